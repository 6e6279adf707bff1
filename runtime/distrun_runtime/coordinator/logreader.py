"""Reads the output of a job again, in the order in which it came, while it is written or later.

A cursor is a place in the job's whole output: a number of bytes, 0 at its beginning. It stays valid when logs are
rotated and when reader or writer are restarted. Readers write nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from pathlib import Path
from typing import Callable, Collection, Dict, Iterator, List, NamedTuple, Optional, Tuple

from distrun_runtime.contract import control
from distrun_runtime.coordinator import logs, stored
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.logs import NAME, OLDER, SIZE, IndexEntry, LogFile, log_path
from distrun_runtime.errors import JobStoreError

READ_LIMIT = 256 * 1024
_OPEN_FILES = 64
_SCAN = 16 * 1024
"""Records that one `read` looks at, at most."""
_BLOCK = 512 * SIZE


class LogPiece(NamedTuple):
    """A piece of a task's output, as it came."""

    cursor: int
    """Where it begins in the job's output."""
    time: float
    """When it came, seconds since 1970 (the coordinator's clock)."""
    task: str
    stream: str
    """"out", "err"; "note": distrun's own line in the log; "": not known, as order and time are (crash, full disk)."""
    attempt: int
    at: int
    """Absolute offset in the task's log."""
    data: bytes


class LogRead(NamedTuple):
    """What one `LogReader.read` found."""

    pieces: Tuple[LogPiece, ...]
    cursor: int
    """Where to read on. Equal to the one given, and no pieces: there is no more at present."""
    gap: int
    """Bytes between the given cursor and `cursor` that are gone: removed by rotation, or damaged."""


class LogReader:
    """All output of a job in one order. `folder`: the job's `logs`. For one thread.

    Its methods raise JobStoreError if index or logs are there and cannot be read. What is not in the index, because its
    record could not be written, is given by `rest` only.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._segments: List[_IndexFile] = []
        """The rotated file, if there is one, and the current one."""
        self._logs: OrderedDict[str, LogFile] = OrderedDict()

    def begin(self) -> int:
        """Return the first cursor that the index still knows."""
        self._refresh()
        return next((segment.entry(0).position for segment in self._segments if segment.count), 0)

    def end(self) -> int:
        """Return the cursor past all output that has been recorded."""
        self._refresh()
        return next((segment.entry(segment.count - 1).end for segment in reversed(self._segments) if segment.count), 0)

    def cursor_at(self, time: float) -> int:
        """Return the cursor of the first piece that came at `time` (seconds since 1970) or later; else the end."""
        self._refresh()
        for segment in self._segments:
            number = segment.first(lambda entry: entry.time >= time)
            if number < segment.count:
                return segment.entry(number).position
        return self.end()

    def cursor_back(self, size: int) -> int:
        """Return the cursor `size` bytes before the end, or the first one."""
        return max(self.begin(), self.end() - size)

    def read(
        self, cursor: int, limit: int = READ_LIMIT, tasks: Optional[Collection[str]] = None, stop: Optional[int] = None
    ) -> LogRead:
        """Return the output from `cursor` on, at most `limit` bytes of it; never waits. A piece may come in two parts.

        Args:
            cursor: where it begins.
            limit: bytes.
            tasks: only theirs; the others' is passed over.
            stop: the cursor before which it ends.
        """
        self._refresh()
        gap = max(0, self.begin() - cursor)
        cursor += gap
        pieces: List[LogPiece] = []
        used = 0
        for entry in self._entries(cursor):
            if stop is not None and entry.position >= stop:
                break
            gap += max(0, entry.position - cursor)  # records that cannot be read
            cursor = max(cursor, entry.position)
            if tasks is not None and entry.task not in tasks:
                cursor = entry.end
                continue
            end = entry.end if stop is None else min(entry.end, stop)
            while cursor < end and used < limit:
                at = entry.at + cursor - entry.position
                size = min(end - cursor, limit - used)
                data = self._log(entry.task).read(at, size)
                if data:
                    pieces.append(LogPiece(cursor, entry.time, entry.task, entry.stream, entry.attempt, at, data))
                    cursor += len(data)
                    used += len(data)
                else:
                    gone = self._gone(entry.task, at, end - cursor)
                    gap += gone
                    cursor += gone
            if used >= limit:
                break
        return LogRead(tuple(pieces), cursor, gap)

    def rest(self, tasks: Collection[str]) -> Iterator[LogPiece]:
        """Give what is in these tasks' logs and not in the index, one task after the other, stream "".

        That is all of a job without index; of one whose coordinator died, the last it wrote.
        """
        self._refresh()
        covered = dict.fromkeys(tasks, 0)
        for segment in self._segments:
            for entry in segment.entries(0):
                if entry.task in covered:
                    covered[entry.task] = max(covered[entry.task], entry.at + entry.length)
        for task, start in covered.items():
            log = self._log(task)
            at = start
            time = 0.0
            with contextlib.suppress(OSError):
                time = os.stat(str(log.path)).st_mtime
            while True:
                data = log.read(at, READ_LIMIT)
                if not data and at < log.begin():
                    at = log.begin()
                    continue
                if not data:
                    break
                yield LogPiece(self.end(), time, task, logs.UNKNOWN, 0, at, data)
                at += len(data)

    def close(self) -> None:
        """Close all files; the reader may be used again."""
        for segment in self._segments:
            segment.close()
        self._segments = []
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    def between(self, start: int, stop: int, tasks: Optional[Collection[str]]) -> Iterator[LogPiece]:
        """Give the output between two cursors."""
        while start < stop:
            found = self.read(start, READ_LIMIT, tasks, stop)
            if found.cursor == start:
                return
            yield from found.pieces
            start = found.cursor

    def _gone(self, task: str, at: int, size: int) -> int:
        """Return how many of `size` bytes from `at` on, of which the first cannot be read, are gone."""
        begin = self._log(task).begin()
        return min(size, begin - at) if begin > at else size

    def _log(self, task: str) -> LogFile:
        log = self._logs.pop(task, None)
        if log is None:
            log = LogFile(log_path(self.folder, task))
            if len(self._logs) >= _OPEN_FILES:
                _, oldest = self._logs.popitem(last=False)
                oldest.close()
        self._logs[task] = log
        return log

    def _entries(self, cursor: int) -> Iterator[IndexEntry]:
        """Give the records from the one on that has `cursor`, at most _SCAN of them."""
        left = _SCAN
        for segment in self._segments:
            number = segment.first(lambda entry: entry.end > cursor)
            for entry in segment.entries(number):
                if left <= 0:
                    return
                left -= 1
                yield entry

    def _refresh(self) -> None:
        """Take note of what was appended and rotated."""
        current = self.folder / NAME
        try:
            now = os.stat(str(current))
        except FileNotFoundError:
            return  # none, or it is being rotated in this moment
        except OSError as err:
            raise JobStoreError(f"cannot read {current}: {err.strerror or err}") from err
        if not self._segments or not self._segments[-1].is_file(now):
            for segment in self._segments:
                segment.close()
            # The current one first: if it is rotated in between, it is found a second time, and none is missed.
            files = [_IndexFile.open(self.folder / name) for name in (NAME, OLDER)]
            found = [segment for segment in reversed(files) if segment is not None]
            if len(found) > 1 and found[0].is_file(os.fstat(found[1].descriptor)):
                found.pop().close()
            self._segments = found
        for segment in self._segments:
            segment.refresh()


class _IndexFile:
    """One file of the index."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.count = 0
        """Whole records."""
        self._block_at = 0
        self._block = b""

    @classmethod
    def open(cls, path: Path) -> Optional[_IndexFile]:
        try:
            with stored.opened(path) as file:
                return cls(os.dup(file.fileno()))
        except FileNotFoundError:
            return None

    def close(self) -> None:
        os.close(self.descriptor)

    def is_file(self, other: os.stat_result) -> bool:
        mine = os.fstat(self.descriptor)
        return (mine.st_dev, mine.st_ino) == (other.st_dev, other.st_ino)

    def refresh(self) -> None:
        """Count the records again. Those at the end that were not written whole do not count."""
        count = os.fstat(self.descriptor).st_size // SIZE
        if count == self.count:
            return
        self._block = b""
        while count > 0 and self._decoded(count - 1) is None:
            count -= 1
        self.count = count

    def entry(self, number: int) -> IndexEntry:
        """Return a record; for one that is damaged, the next whole one. The last is whole."""
        while True:
            found = self._decoded(number)
            if found is not None:
                return found
            number += 1

    def entries(self, number: int) -> Iterator[IndexEntry]:
        for each in range(number, self.count):
            found = self._decoded(each)
            if found is not None:
                yield found

    def first(self, fits: Callable[[IndexEntry], bool]) -> int:
        """Return the number of the first record that fits, `count` if none does; all after it must fit too."""
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            if fits(self.entry(middle)):
                high = middle
            else:
                low = middle + 1
        return low

    def _decoded(self, number: int) -> Optional[IndexEntry]:
        start = number * SIZE - self._block_at
        if not 0 <= start <= len(self._block) - SIZE:
            self._block_at, start = number * SIZE, 0
            self._block = os.pread(self.descriptor, _BLOCK, self._block_at)
        return logs.decode(self._block, start)


# A job's output for one client of its coordinator: read from the logs, as frames.


TAIL_LIMIT = 64 * 1024 * 1024
"""Lines before the end are looked for in so many bytes: meanwhile other clients wait."""


class LoggedOutput:
    """What `service` reads for a client, over `LogReader`. Raises JobStoreError (an OSError): logs cannot be read."""

    def __init__(self, folder: JobFolder, wanted: control.OutputWanted) -> None:
        self._folder = folder
        self._hosts: Dict[str, str] = {}
        """By task; read when there is output: a job that waits in a queue has no plan yet."""
        self._reader = LogReader(folder.logs)
        self._tasks = None if wanted.tasks is None else frozenset(wanted.tasks)
        self.has_more = False
        """There may be more behind what was read last."""
        self.is_over = False
        """Its end, which the client asked for, has been read."""
        self._stop: Optional[int] = None
        """The cursor of that end."""
        try:
            self.cursor = begin(self._reader, wanted)
            if wanted.until:
                self._stop = self._reader.end()
        except BaseException:
            self._reader.close()
            raise

    def read(self, limit: int) -> bytes:
        """Return frames with about `limit` bytes of output; empty: there is nothing new so far (`has_more`).

        One call looks at a bounded part of the log, since other clients wait meanwhile.
        """
        found = self._reader.read(self.cursor, limit, self._tasks, self._stop)
        self.has_more = found.cursor != self.cursor
        self.is_over = self._stop is not None and (found.cursor >= self._stop or not self.has_more)
        frames = [control.encode(control.OutputGap(found.gap, found.cursor))] if found.gap else []
        if found.pieces and not self._hosts:
            self._hosts = {task.name: task.host for task in self._folder.plan().tasks}
        ends = [piece.cursor for piece in found.pieces[1:]] + [found.cursor]
        for piece, end in zip(found.pieces, ends):
            host = self._hosts.get(piece.task, "")
            place = piece.stream, piece.at, len(piece.data), piece.data, end, piece.time, piece.attempt
            chunk = control.Chunk(piece.task, host, *place)
            frames.append(control.encode(chunk))
        if self.is_over:
            frames.append(control.encode(control.OutputEnd(found.cursor)))
        self.cursor = found.cursor
        return b"".join(frames)

    def close(self) -> None:
        """Close the files."""
        self._reader.close()


def begin(reader: LogReader, wanted: control.OutputWanted) -> int:
    """Return the cursor at which a client's output begins."""
    if wanted.cursor is not None:
        return max(reader.begin(), min(wanted.cursor, reader.end()))
    since = reader.end() if wanted.since is None else reader.cursor_at(wanted.since)
    if wanted.tail is None:
        return since
    tail = _lines_back(reader, wanted.tail, wanted.tasks)
    return tail if wanted.since is None else max(since, tail)


def _lines_back(reader: LogReader, lines: int, tasks: Optional[Collection[str]]) -> int:
    """Return a cursor with `lines` lines after it, or so, but no further back than TAIL_LIMIT."""
    stop, left = reader.end(), lines + 1  # the newline before the first of these lines
    first = reader.cursor_back(TAIL_LIMIT)
    while stop > first:
        start = max(first, stop - READ_LIMIT)
        ends: List[int] = []
        for piece in reader.between(start, stop, tasks):
            at = -1
            while (at := piece.data.find(b"\n", at + 1)) >= 0:
                ends.append(piece.cursor + at + 1)
        if len(ends) >= left:
            return ends[-left]
        left -= len(ends)
        stop = start
    return stop
