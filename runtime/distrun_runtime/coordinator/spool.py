"""The log files of a job: `logs/TASK.log`, stdout and stderr merged in the order of arrival, and their index.

Every chunk names its stream and offset, so that one that comes twice (after a reconnect) is written once. On a disk
that is full the bytes are counted, and a line in the log says how many are missing once there is room again. It ends a
job only if one of its own tasks has filled it (`Spool.flood`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from distrun_runtime.coordinator import logindex
from distrun_runtime.coordinator.logfiles import log_path, newest, rotated
from distrun_runtime.coordinator.logindex import IndexEntry, IndexWriter

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
                note = "\n[distrun: %d bytes are missing here: %s]\n" % (self._missing, self.error)
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
                self._index.add(IndexEntry(now, task, logindex.NOTE, attempt, start, written.note))
            self._index.add(IndexEntry(now, task, stream, attempt, written.at, len(written.fresh)))
        return written

    def flush(self) -> str:
        """Write the index of what was added: readers see it then. Return a `warning` if that failed."""
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
