"""The log files of a job: `logs/TASK.log`, stdout and stderr merged in the order of arrival.

Every chunk names its stream and offset, so that one that comes twice (after a reconnect) is written once. A disk
that is full never stops the job: the bytes are counted, and a line in the log says how many are missing once
there is room again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional

_BLOCK = 64 * 1024
_TAIL_LIMIT = 1024 * 1024
"""A tail reads no more than that from the end of the file."""


class Written(NamedTuple):
    """What became of one chunk."""

    fresh: bytes
    """The part that had not come before."""
    at: Optional[int]
    """Where `fresh` begins in the log file; None: it could not be written."""
    offset: int
    """Everything of the stream before this has come: what an ack says."""


class TaskLog:
    """One task's log file, opened at the first write and appended to."""

    def __init__(self, path: Path, write: Callable[[int, memoryview], int] = os.write) -> None:
        self.path = path
        self.error = ""
        """Why the last chunk could not be written; empty: it was."""
        self._write = write
        self._fd: Optional[int] = None
        self._size = 0
        self._next: Dict[str, int] = {"out": 0, "err": 0}
        self._missing = 0

    def add(self, stream: str, offset: int, data: bytes) -> Written:
        """Append what of `data` (from byte `offset` of the stream) has not come before."""
        expected = self._next[stream]
        fresh = data[max(0, expected - offset) :] if offset < expected else data
        if not fresh:
            return Written(b"", None, expected)
        # A gap (offset > expected) can only be a fault of the agent; what did come is worth more than a stop.
        self._next[stream] = offset + len(data)
        return Written(fresh, self._append(fresh), self._next[stream])

    def close(self) -> None:
        """Close the file; another `add` would open it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _append(self, data: bytes) -> Optional[int]:
        before = self._size
        try:
            if self._fd is None:
                self._fd = os.open(str(self.path), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
                before = self._size = os.fstat(self._fd).st_size
            if self._missing:
                note = "\n[distrun: %d bytes are missing here: %s]\n" % (self._missing, self.error)
                self._put(note.encode())
                self._missing = 0
                before = self._size
            self._put(data)
        except OSError as err:
            self.error = err.strerror or str(err)
            self._missing += len(data) - max(0, self._size - before)
            return None
        self.error = ""
        return before

    def _put(self, data: bytes) -> None:
        assert self._fd is not None
        rest = memoryview(data)
        while rest:
            count = self._write(self._fd, rest)
            self._size += count
            rest = rest[count:]


class Spool:
    """All log files of a job, below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logs: Dict[str, TaskLog] = {}
        self._warned = False

    def add(self, task: str, stream: str, offset: int, data: bytes) -> Written:
        """Append to the log of `task`; see `TaskLog.add`."""
        log = self._logs.get(task)
        if log is None:
            log = self._logs[task] = TaskLog(log_path(self._folder, task))
        return log.add(stream, offset, data)

    def warning(self) -> str:
        """Return, once in the job's life, that logs cannot be written; else an empty text."""
        if self._warned:
            return ""
        for log in self._logs.values():
            if log.error:
                self._warned = True
                return f"cannot write {log.path}: {log.error}; the job goes on without what does not fit"
        return ""

    def close(self) -> None:
        """Close all files."""
        for log in self._logs.values():
            log.close()


def log_path(folder: Path, task: str) -> Path:
    """Return where the log of `task` is, or will be."""
    return folder / (task + ".log")


def tail(path: Path, lines: int) -> List[str]:
    r"""Return the last `lines` lines of a log, without newlines; what is not UTF-8 becomes \ufffd. [] without a file.

    A line that was overwritten by carriage returns, as a progress bar, is given as a terminal would show it in the
    end. Reads at most 1 MiB from the end.
    """
    try:
        with open(str(path), "rb") as file:
            start = file.seek(0, os.SEEK_END)
            end = start
            data = b""
            while start > 0 and data.count(b"\n") <= lines and end - start < _TAIL_LIMIT:
                step = min(_BLOCK, start)
                start -= step
                file.seek(start)
                data = file.read(step) + data
    except OSError:
        return []
    text = data.decode("utf-8", "replace")
    found = text[:-1].split("\n") if text.endswith("\n") else text.split("\n")
    return [] if not text else [_overwritten(line) for line in found[-lines:]] if lines > 0 else []


def _overwritten(line: str) -> str:
    return next((part for part in reversed(line.split("\r")) if part), "")
