"""`logs/index`: in which order the tasks' output came, so that it can be shown again as it was shown first.

One record of 56 bytes for each piece of output: when it came, of which task and stream, and where it is in the task's
log (docs/protocol.md, "Index of the logs"). A record also says its position: how many bytes of output all records
before it stand for. So a position is a place in the job's whole output, whatever was rotated away; it is what readers
use as a cursor. A record that was not written to its end, or not by us, is ignored.
"""

from __future__ import annotations

import binascii
import os
import struct
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional

NAME = "index"
OLDER = "index.1"
"""What NAME was before it was rotated."""
PIECE_LIMIT = 256 * 1024
"""A record stands for so many bytes at most."""

UNKNOWN = ""
OUT = "out"
ERR = "err"
NOTE = "note"
"""Streams. UNKNOWN: bytes of a log whose order was not recorded (disk full, crash); NOTE: distrun's own line in it."""

RECORD = struct.Struct("<BBHIdQQ20s")
SIZE = RECORD.size + 4
_MAGIC = 0xD1
_STREAMS = (UNKNOWN, OUT, ERR, NOTE)
_CODES = {name: code for code, name in enumerate(_STREAMS)}
_CHECK = struct.Struct("<I")


class IndexEntry(NamedTuple):
    """One record."""

    time: float
    """When it came: the coordinator's wall clock, seconds since 1970. Never less than that of the record before."""
    task: str
    stream: str
    attempt: int
    at: int
    """Absolute offset in the task's log."""
    length: int
    position: int = 0
    """Bytes of output that the records before it stand for."""

    @property
    def end(self) -> int:
        """Position past its last byte."""
        return self.position + self.length


def encode(entry: IndexEntry) -> bytes:
    """Return a record. Raises ValueError if the task's name has more than 20 bytes."""
    name = entry.task.encode("utf-8")
    if len(name) > 20:
        raise ValueError(f"a task's name has at most 20 bytes in an index, found {entry.task!r}")
    head = RECORD.pack(
        _MAGIC,
        _CODES[entry.stream],
        entry.attempt,
        entry.length,
        entry.time,
        entry.position,
        entry.at,
        name,
    )
    return head + _CHECK.pack(binascii.crc32(head))


def decode(data: bytes, start: int = 0) -> Optional[IndexEntry]:
    """Return the record at `start`; None if there is no whole one."""
    if len(data) < start + SIZE:
        return None
    head = data[start : start + RECORD.size]
    magic, stream, attempt, length, time, position, at, name = RECORD.unpack(head)
    (check,) = _CHECK.unpack_from(data, start + RECORD.size)
    if magic != _MAGIC or stream >= len(_STREAMS) or check != binascii.crc32(head):
        return None
    task = name.rstrip(b"\0").decode("utf-8", "replace")
    return IndexEntry(time, task, _STREAMS[stream], attempt, at, length, position)


def entries(data: bytes) -> Iterator[IndexEntry]:
    """Give the whole records in `data`, which begins with one."""
    for start in range(0, len(data) - SIZE + 1, SIZE):
        entry = decode(data, start)
        if entry is not None:
            yield entry


class IndexWriter:
    """Appends to the index. Pieces wait in memory until `flush`.

    A disk that is full costs the order, not the output: what could not be recorded is recorded, once there is room
    again, as bytes of an unknown stream before the next piece of that task.

    Arguments:
        folder: the job's `logs`.
        limit: bytes of the index after which it is rotated; one older file is kept. 0: never. May be changed.
    """

    def __init__(self, folder: Path, limit: int = 0, write: Callable[[int, memoryview], int] = os.write) -> None:
        self.path = folder / NAME
        self.error = ""
        """Why the last flush failed; empty: it did not."""
        self.limit = limit
        self._write = write
        self._fd: Optional[int] = None
        self._size = 0
        self._position = 0
        self._time = 0.0
        self._covered: Dict[str, int] = {}
        """By task: the records on the disk stand for the log before this offset."""
        self._pending: List[IndexEntry] = []

    def add(self, piece: IndexEntry) -> None:
        """Take a piece of output that is in the log. One that continues the last piece is joined to it."""
        last = self._pending[-1] if self._pending else None
        if (
            last is not None
            and (last.task, last.stream, last.attempt) == (piece.task, piece.stream, piece.attempt)
            and last.at + last.length == piece.at
            and last.length + piece.length <= PIECE_LIMIT
        ):
            self._pending[-1] = last._replace(length=last.length + piece.length)
            return
        self._time = max(self._time, piece.time)  # the clock may be set back
        self._pending.append(piece._replace(time=self._time))

    def flush(self, ends: Optional[Mapping[str, int]] = None) -> None:
        """Write what waits. `ends`: where the logs end, by task, so that also the last bytes have a record."""
        if not self._pending and not ends:
            return
        pending, self._pending = self._pending, []
        try:
            if self._fd is None:
                self._open()
            covered, position = dict(self._covered), self._position
            records = []
            for entry in self._whole(pending, ends or {}, covered):
                records.append(encode(entry._replace(position=position)))
                position += entry.length
            self._append(b"".join(records))
        except OSError as err:
            self.error = err.strerror or str(err)
            return
        self.error = ""
        self._covered, self._position = covered, position

    def close(self) -> None:
        """Close the file; what was not flushed is dropped."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _whole(
        self, pending: List[IndexEntry], ends: Mapping[str, int], covered: Dict[str, int]
    ) -> Iterator[IndexEntry]:
        """Give the pieces, none longer than PIECE_LIMIT, and before each what its task's log has since the last."""
        last = [IndexEntry(self._time, task, UNKNOWN, 0, end, 0) for task, end in ends.items()]
        for entry in (*pending, *last):
            start = covered.get(entry.task, 0)
            if start < entry.at:
                yield from _cut(entry._replace(stream=UNKNOWN, at=start, length=entry.at - start))
            if entry.length:
                yield from _cut(entry)
            covered[entry.task] = max(start, entry.at + entry.length)

    def _append(self, data: bytes) -> None:
        """Write whole records or none. Raises OSError."""
        if not data:
            return
        if self.limit and self._size >= self.limit:
            os.replace(str(self.path), str(self.path.parent / OLDER))
            self.close()
            self._create()
        assert self._fd is not None
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)

    def _create(self) -> None:
        self._fd = os.open(str(self.path), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = 0

    def _open(self) -> None:
        """Open the file, and go on after its last whole record: another process may have begun it."""
        self._create()
        assert self._fd is not None
        size = os.fstat(self._fd).st_size
        older = self.path.parent / OLDER
        if not size and not older.exists():
            return
        before = older.read_bytes() if older.exists() else b""
        data = self.path.read_bytes()
        for entry in entries(before):
            self._take(entry)
        for start in range(0, len(data), SIZE):
            found = decode(data, start)
            if found is None:
                break
            self._take(found)
            self._size = start + SIZE
        os.ftruncate(self._fd, self._size)

    def _take(self, entry: IndexEntry) -> None:
        self._time = max(self._time, entry.time)
        self._position = entry.end
        self._covered[entry.task] = max(self._covered.get(entry.task, 0), entry.at + entry.length)


def _cut(entry: IndexEntry) -> Iterator[IndexEntry]:
    for start in range(0, entry.length, PIECE_LIMIT):
        yield entry._replace(at=entry.at + start, length=min(PIECE_LIMIT, entry.length - start))
