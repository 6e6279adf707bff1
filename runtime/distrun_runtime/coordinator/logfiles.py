"""Log files of tasks on the disk: their names, and a reader that outlives rotation.

The log of a task is `logs/TASK.log`. With --log-limit it is rotated: `TASK.log` becomes `TASK.log.END`, END being the
absolute offset where the next file begins, and the one before it is removed, unless it is the first. Offsets count from
the first byte that the task ever wrote, so that a place in the log is the same place for ever.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, List, Optional, Tuple

from distrun_runtime.coordinator import stored

_BLOCK = 64 * 1024
"""Small reads one after the other are answered from a block of that size."""
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
        self._base = 0
        """Where `_file` begins."""
        self._block_at = 0
        self._block = b""

    def read(self, at: int, size: int) -> bytes:
        """Return bytes from offset `at` on, at most `size`. Fewer may come although there are more.

        b"" if there are none: past the end, or gone, up to `begin`.
        """
        start = at - self._block_at
        if 0 <= start < len(self._block) and start + size <= len(self._block):
            return self._block[start : start + size]
        if self._file is None:
            self._open()
        if at < self._base:
            return self._read_rotated(at, size)
        data = self._read_current(at, size)
        if not data and self._is_replaced():
            self._open()
            return self._read_rotated(at, size) if at < self._base else self._read_current(at, size)
        return data

    def begin(self) -> int:
        """Return the offset of the first byte from which on all is there. The log's beginning may be there too."""
        found = newest(self.path)
        return _start(found[0]) if found else 0

    def end(self) -> int:
        """Return the offset past the last byte."""
        if self._file is None or self._is_replaced():
            self._open()
        return self._base + (os.fstat(self._file.fileno()).st_size if self._file is not None else 0)

    def close(self) -> None:
        """Close the file; another call opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> LogFile:
        """Return itself; `close` is called at the end."""
        return self

    def __exit__(self, *about: object) -> None:
        """Close the file."""
        self.close()

    def _open(self) -> None:
        """Open the current file, and find out where it begins: it may be rotated meanwhile."""
        self.close()
        for _ in range(_TRIES):
            base = self._newest_end()
            try:
                self._file = stored.opened(self.path)
            except FileNotFoundError:
                self._file = None
            if self._newest_end() == base:
                self._base = base
                return
            self.close()

    def _newest_end(self) -> int:
        return max([end for end, _ in rotated(self.path)], default=0)

    def _is_replaced(self) -> bool:
        try:
            now = os.stat(str(self.path))
        except OSError:
            return False
        if self._file is None:
            return True
        mine = os.fstat(self._file.fileno())
        return (now.st_dev, now.st_ino) != (mine.st_dev, mine.st_ino)

    def _read_current(self, at: int, size: int) -> bytes:
        if self._file is None:
            return b""
        data = os.pread(self._file.fileno(), max(size, _BLOCK), at - self._base)
        self._block_at, self._block = at, data
        return data[:size]

    def _read_rotated(self, at: int, size: int) -> bytes:
        for end, path in rotated(self.path):
            if at >= end:
                continue
            try:
                with stored.opened(path) as file:
                    start = at - (end - os.fstat(file.fileno()).st_size)
                    if start < 0:
                        return b""
                    data = os.pread(file.fileno(), max(size, _BLOCK), start)
            except FileNotFoundError:
                return b""
            self._block_at, self._block = at, data
            return data[:size]
        return b""
