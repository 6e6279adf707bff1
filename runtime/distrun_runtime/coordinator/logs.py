"""The log files of a job: `logs/TASK.log`, stdout and stderr merged in the order of arrival, and their index.

Every chunk names its stream and offset, so that one that comes twice (after a reconnect) is written once. On a disk
that is full the bytes are counted, and a line in the log says how many are missing once there is room again. It ends a
job only if one of its own tasks has filled it (`Spool.flood`).
"""

from __future__ import annotations

import binascii
import contextlib
import errno
import os
import struct
import sys
import time
from pathlib import Path
from typing import BinaryIO, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from distrun_runtime.coordinator import stored

# `logs/index`: in which order the tasks' output came, so that it can be shown again as it was shown first.
#
# One record of 56 bytes for each piece of output: when it came, of which task and stream, and where it is in the task's
# log (docs/protocol.md, "Index of the logs"). A record also says its position: how many bytes of output all records
# before it stand for. So a position is a place in the job's whole output, whatever was rotated away; it is what readers
# use as a cursor. A record that was not written to its end, or not by us, is ignored.


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
    stream = _STREAMS.index(entry.stream)
    head = RECORD.pack(_MAGIC, stream, entry.attempt, entry.length, entry.time, entry.position, entry.at, name)
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
    """

    def __init__(self, folder: Path, write: Callable[[int, memoryview], int] = os.write) -> None:
        self.path = folder / NAME
        self.error = ""
        """Why the last flush failed; empty: it did not."""
        self.limit = 0
        """Bytes of the index after which it is rotated; one older file is kept. 0: never. May be changed."""
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


# Log files of tasks on the disk: their names, and a reader that outlives rotation.
#
# The log of a task is `logs/TASK.log`. With --log-limit it is rotated: `TASK.log` becomes `TASK.log.END`, END being the
# absolute offset where the next file begins, and the one before it is removed, unless it is the first. Offsets count
# from the first byte that the task ever wrote, so that a place in the log is the same place for ever.


_TRIES = 100
"""How often a file is opened again because it was rotated in that moment."""


def log_path(folder: Path, task: str) -> Path:
    """Return where the log of `task` is, or will be."""
    return folder / (task + ".log")


def rotated(path: Path) -> List[Tuple[int, Path]]:
    """Return the rotated files of the log `path`: where each ends, and its path; the oldest first. Never raises."""
    try:
        names = os.listdir(str(path.parent))
    except OSError:
        return []
    start = path.name + "."
    ends = [name[len(start) :] for name in names if name.startswith(start)]
    return [(int(end), path.parent / (start + end)) for end in sorted(filter(_is_number, ends), key=int)]


def newest(path: Path) -> List[Tuple[int, Path]]:
    """Return those of the `rotated` files between which and the current one nothing is missing."""
    found = rotated(path)
    for number in range(len(found) - 1, 0, -1):
        if _start(found[number]) > found[number - 1][0]:
            return found[number:]
    return found


def _start(file: Tuple[int, Path]) -> int:
    """Return where a rotated file begins."""
    end, path = file
    try:
        return max(0, end - os.stat(str(path)).st_size)
    except OSError:
        return end


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


class LogFile:
    """Reads one task's log by absolute offsets while it grows and is rotated. For one thread.

    Raises JobStoreError if the log is there and cannot be read, or is no file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Optional[BinaryIO] = None
        """The current one, or a rotated one while that is read."""
        self._base = 0
        """Where it begins."""
        self._block_at = 0
        self._block = b""

    def read(self, at: int, size: int) -> bytes:
        """Return bytes from offset `at` on, at most `size`. Fewer may come although there are more.

        b"" if there are none: past the end, or gone, up to `begin`.
        """
        start = at - self._block_at
        if 0 <= start < len(self._block) and start + size <= len(self._block):
            return self._block[start : start + size]
        if self._file is None or at < self._base:
            self._open(at)
        data = self._read(at, size)
        if not data and self._is_replaced():  # rotated: what follows is in the next file
            self._open(at)
            data = self._read(at, size)
        return data

    def begin(self) -> int:
        """Return the offset of the first byte from which on all is there. The log's beginning may be there too."""
        found = newest(self.path)
        return _start(found[0]) if found else 0

    def end(self) -> int:
        """Return the offset past the last byte."""
        if self._file is None or self._is_replaced():
            self._open(sys.maxsize)
        return self._base + (os.fstat(self._file.fileno()).st_size if self._file is not None else 0)

    def close(self) -> None:
        """Close the file; another call opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, at: int) -> None:
        """Open the file that has offset `at`, the current one past all others, and find out where it begins."""
        for _ in range(_TRIES):
            self.close()
            older = rotated(self.path)
            end, path = next((each for each in older if each[0] > at), (0, self.path))
            with contextlib.suppress(FileNotFoundError):
                self._file = stored.opened(path)
            if end and self._file is not None:
                self._base = end - os.fstat(self._file.fileno()).st_size
                return
            if not end and rotated(self.path) == older:  # it was not rotated meanwhile
                self._base = older[-1][0] if older else 0
                return

    def _is_replaced(self) -> bool:
        """Whether the open file is not the current one, or not any more."""
        try:
            now = os.stat(str(self.path))
        except OSError:
            return True
        if self._file is None:
            return True
        mine = os.fstat(self._file.fileno())
        return (now.st_dev, now.st_ino) != (mine.st_dev, mine.st_ino)

    def _read(self, at: int, size: int) -> bytes:
        if self._file is None or at < self._base:
            return b""
        data = os.pread(self._file.fileno(), max(size, _BLOCK), at - self._base)
        self._block_at, self._block = at, data
        return data[:size]


INDEX_BYTES = 8 * 1024 * 1024
"""With a limit, the index is rotated at so many bytes (150,000 pieces), or at half the bytes of all logs, if that is
more."""
HEAD_BYTES = 16 * 1024 * 1024
"""So much of the beginning of a log always stays, or a quarter of a smaller limit."""
FULL = 0.9
"""Used share of a disk of which the user is warned."""
_BLOCK = 64 * 1024
_TAIL_LIMIT = 1024 * 1024
"""A tail reads no more than that from the end of the file."""


class Written(NamedTuple):
    """What became of one chunk."""

    fresh: bytes
    """The part that had not come before."""
    at: Optional[int]
    """Where `fresh` begins in the log: an absolute offset; None: it could not be written."""
    offset: int
    """Everything of the stream before this has come: what an ack says."""
    note: int = 0
    """Bytes of a line of ours that was written just before `fresh`."""


class TaskLog:
    """One task's log file, opened at the first write and appended to.

    Arguments:
        path: the file.
        write: as os.write.
        limit: bytes that are kept, about: the beginning of the log, and the two newest files of the rest. 0: all.
    """

    def __init__(self, path: Path, write: Callable[[int, memoryview], int] = os.write, limit: int = 0) -> None:
        self.path = path
        self.error = ""
        """Why the last chunk could not be written; empty: it was."""
        self.is_full = False
        """That was for want of room."""
        self._write = write
        self._head = min(HEAD_BYTES, limit // 4)
        self._rest = (limit - self._head) // 2
        """Size of a file: of the first one, and of the others."""
        self._fd: Optional[int] = None
        self._base = 0
        """Absolute offset of the file's first byte."""
        self._size = 0
        self._next: Dict[Tuple[int, str], int] = {}
        """By attempt and stream: what has come."""
        self._missing = 0

    @property
    def end(self) -> int:
        """The absolute offset past what was written."""
        return self._base + self._size

    def add(self, stream: str, offset: int, data: bytes, attempt: int = 0) -> Written:
        """Append what of `data` (from byte `offset` of the stream of that attempt) has not come before."""
        expected = self._next.get((attempt, stream), 0)
        fresh = data[max(0, expected - offset) :] if offset < expected else data
        if not fresh:
            return Written(b"", None, expected)
        # A gap (offset > expected) can only be a fault of the agent; what did come is worth more than a stop.
        self._next[attempt, stream] = offset + len(data)
        at, note = self._append(fresh)
        return Written(fresh, at, offset + len(data), note)

    def close(self) -> None:
        """Close the file; another `add` would open it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _append(self, data: bytes) -> Tuple[Optional[int], int]:
        """Return where `data` begins, if it could be written, and how many bytes of ours come before it."""
        before = self._size
        text = b""
        try:
            if self._fd is None:
                self._open()
            self._rotate(len(data))
            before = self._size
            if self._missing:
                note = f"\n[distrun: {self._missing} bytes are missing here: {self.error}]\n"
                text = note.encode()
                self._put(text)
                self._missing = 0
                before = self._size
            self._put(data)
        except OSError as err:
            self.error = err.strerror or str(err)
            self.is_full = err.errno in (errno.ENOSPC, errno.EDQUOT)
            self._missing += len(data) - max(0, self._size - before)
            return None, 0
        self.error = ""
        return self._base + before, len(text)

    def _open(self) -> None:
        self._fd = os.open(str(self.path), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._fd).st_size
        if not self._base:
            self._base = max([end for end, _ in rotated(self.path)], default=0)

    def _rotate(self, more: int) -> None:
        """Begin another file if this one would become too long. A disk on which that fails goes on with this one."""
        limit = self._rest if self._base else self._head
        if not limit or not self._size or self._size + more <= limit:
            return
        older = rotated(self.path)
        try:
            os.replace(str(self.path), f"{self.path}.{self.end}")
        except OSError:
            return
        self.close()
        self._base, self._size = self.end, 0
        for _, path in older[1:]:
            with contextlib.suppress(OSError):
                os.unlink(str(path))
        self._open()

    def _put(self, data: bytes) -> None:
        assert self._fd is not None
        rest = memoryview(data)
        while rest:
            count = self._write(self._fd, rest)
            self._size += count
            rest = rest[count:]


class Spool:
    """All log files of a job and their index, below one folder.

    `limit`: bytes that are kept of each task's log, about; 0: all.
    """

    def __init__(self, folder: Path, limit: int = 0, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._limit = limit
        self._clock = clock
        self._logs: Dict[str, TaskLog] = {}
        self._index = IndexWriter(folder)
        self._warned = False
        self._used = _used(folder)
        self._has_flood = False

    def add(self, task: str, stream: str, offset: int, data: bytes, attempt: int = 0) -> Written:
        """Append to the log of `task`; see `TaskLog.add`."""
        log = self._logs.get(task)
        if log is None:
            log = self._logs[task] = TaskLog(log_path(self._folder, task), limit=self._limit)
            self._index.limit = max(INDEX_BYTES, self._limit * len(self._logs) // 2) if self._limit else 0
        written = log.add(stream, offset, data, attempt)
        if written.at is not None:
            now = self._clock()
            if written.note:
                start = written.at - written.note
                self._index.add(IndexEntry(now, task, NOTE, attempt, start, written.note))
            self._index.add(IndexEntry(now, task, stream, attempt, written.at, len(written.fresh)))
        return written

    def flush(self) -> str:
        """Write the index of what was added: readers see it then. Return a `warning` if that failed."""
        if self._logs:  # until a task has printed, there is no index to look at
            self._index.flush()
        return self.warning() if self._index.error else ""

    def warning(self) -> str:
        """Return, once in the job's life, that logs cannot be written; else an empty text."""
        if self._warned:
            return ""
        files = [(log.path, log.error) for log in self._logs.values()] + [(self._index.path, self._index.error)]
        for path, error in files:
            if error:
                self._warned = True
                return f"cannot write {path}: {error}; the job goes on without what does not fit"
        return ""

    def flood(self, task: str) -> str:
        """Return, once in the job's life, that the output of `task`, more than always stays, has filled the disk."""
        log = self._logs[task]
        if self._has_flood or not (log.error and log.is_full and log.end >= HEAD_BYTES):
            return ""
        self._has_flood = True
        return f"has filled the disk of {self._folder} with {log.end >> 20} MiB of output: {log.error}"

    def filling(self) -> str:
        """Return a warning that the disk of the logs has become nearly full since the last call; else an empty text."""
        before, self._used = self._used, _used(self._folder)
        if not before < FULL <= self._used:
            return ""
        logged = sum(log.end for log in self._logs.values()) >> 20
        return f"the disk of {self._folder} is {self._used:.0%} full; the tasks of this job have printed {logged} MiB"

    def close(self) -> None:
        """Write the index to its end, and close all files."""
        if self._logs:  # as for `flush`
            self._index.flush({task: log.end for task, log in self._logs.items()})
            self._index.close()
        for log in self._logs.values():
            log.close()


def _used(folder: Path) -> float:
    """Return which share of a disk's room for users is used; 1 if that is not known."""
    try:
        found = os.statvfs(str(folder))
    except OSError:
        return 1.0
    used = found.f_blocks - found.f_bfree
    return used / (used + found.f_bavail) if used + found.f_bavail else 1.0


def tail(path: Path, lines: int) -> List[str]:
    r"""Return the last `lines` lines of a log, without newlines; what is not UTF-8 becomes \ufffd. [] without a file.

    A line that was overwritten by carriage returns, as a progress bar, is given as a terminal would show it in the
    end. Reads at most 1 MiB from the end.
    """
    data = _end_of(path, lines)
    for _, older in reversed(newest(path)):
        if data.count(b"\n") <= lines:
            data = _end_of(older, lines) + data
    text = data.decode("utf-8", "replace")
    found = text[:-1].split("\n") if text.endswith("\n") else text.split("\n")
    return [] if not text else [_overwritten(line) for line in found[-lines:]] if lines > 0 else []


def _end_of(path: Path, lines: int) -> bytes:
    """Return the end of a file, in which there are at least so many newlines if it is not too long."""
    data = b""
    try:
        with open(str(path), "rb") as file:
            start = end = file.seek(0, os.SEEK_END)
            while start > 0 and data.count(b"\n") <= lines and end - start < _TAIL_LIMIT:
                step = min(_BLOCK, start)
                start -= step
                file.seek(start)
                data = file.read(step) + data
    except OSError:
        return b""
    return data


def _overwritten(line: str) -> str:
    return next((part for part in reversed(line.split("\r")) if part), "")
