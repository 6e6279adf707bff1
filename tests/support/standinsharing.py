"""What stand-ins for CUDA (`cudastandin`) of several processes share: memory, in a memfd, and events, in another.

Of each page of shared memory it counts the operations that are to write it, and those that are to read it, of each
process that has mapped it. A count of a process that has ended does not matter.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

PAGE = 4096
READERS = 8
"""So many processes may have mapped a block that another has made."""
EVENTS = 4096
ENDING: list[bool] = []
"""Not empty when this process ends: what it has still to do is not done for others, as a GPU does not."""
_NAME = struct.Struct("<qii")


class SharedBlock:
    """Memory, as one stand-in has it mapped."""

    def __init__(self, fd: int, nbytes: int, *, is_ours: bool) -> None:
        pages = nbytes // PAGE
        self.is_ours = is_ours
        memory = mmap.mmap(fd, nbytes + 4 * (READERS + 1) * (pages + 1))
        self.data: np.ndarray[Any, Any] = np.frombuffer(memory, np.uint8, nbytes)
        counts = np.frombuffer(memory, np.int32, offset=nbytes).reshape(READERS + 1, pages + 1)
        self._pids, self._counts = counts[:, -1], counts[:, :-1]
        self._row = 0 if is_ours else 1 + int(np.flatnonzero(self._pids[1:] == 0)[0])
        self._pids[self._row] = os.getpid()

    @classmethod
    def made(cls, nbytes: int) -> tuple[int, SharedBlock]:
        fd = os.memfd_create("stand-in", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes + 4 * (READERS + 1) * (nbytes // PAGE + 1))
        made = cls(fd, nbytes, is_ours=True)
        made.data.fill(0xFF)
        return fd, made

    @classmethod
    def given(cls, fd: int, nbytes: int) -> SharedBlock:
        return cls(fd, nbytes, is_ours=False)

    def count(self, begin: int, end: int, more: int) -> None:
        """Count an operation of ours that is to be done, or with -1, one that was."""
        self._counts[self._row, begin // PAGE : -(-end // PAGE)] += more

    def is_written(self, begin: int, end: int) -> bool:
        """Whether the process that made it has something to write there."""
        return bool(self._counts[0, begin // PAGE : -(-end // PAGE)].any())

    def is_read(self, begin: int, end: int) -> bool:
        """Whether another process that lives has something to read there."""
        if not self.is_ours:
            return False
        rows = 1 + np.flatnonzero(self._counts[1:, begin // PAGE : -(-end // PAGE)].any(axis=1))
        return any(os.path.exists("/proc/%d/fd/0" % self._pids[row]) for row in rows)


class SharedEvent:
    """An event: how often it was recorded, and the last of these that is over; and how often others have asked."""

    def __init__(self, row: np.ndarray[Any, Any], name: bytes, *, is_ours: bool) -> None:
        self._row = row
        self._seen = 0
        self.name = name
        self.is_ours = is_ours

    @classmethod
    def given(cls, name: bytes) -> SharedEvent:
        pid, fd, number = _NAME.unpack_from(name)
        with open("/proc/%d/fd/%d" % (pid, fd), "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        return cls(np.frombuffer(memory, np.int64).reshape(-1, 3)[number], name, is_ours=False)

    def recorded(self) -> Callable[[], None]:
        """Note that it is recorded once more; return what notes that this is over."""
        self._row[0] += 1
        number = int(self._row[0])

        def done() -> None:
            if not ENDING:
                self._row[1] = max(int(self._row[1]), number)

        return done

    def ask(self) -> bool:
        """Tell whether it has completed; one that was never recorded has.

        What one says whose maker has given it back, or ended, is not defined: here, that it has.
        """
        self._row[2] += 1
        is_defined = os.path.exists("/proc/%d/fd/0" % _NAME.unpack_from(self.name)[0])
        return bool(self._row[1] >= self._row[0] or not is_defined)

    def end(self) -> None:
        """Its maker gives it back."""
        self._row[1] = self._row[0]

    def is_wanted(self, asks: int) -> bool:
        """Whether another process has asked for it so often since it was last wanted."""
        if int(self._row[2]) < self._seen + asks:
            return False
        self._seen = int(self._row[2])
        return True


class EventPage:
    """The events that one stand-in has made."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("stand-in events", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, 24 * EVENTS)
        self._rows = np.frombuffer(mmap.mmap(self._fd, 24 * EVENTS), np.int64).reshape(-1, 3)
        self._count = 0

    def made(self) -> SharedEvent:
        self._count += 1
        name = _NAME.pack(os.getpid(), self._fd, self._count - 1)
        return SharedEvent(self._rows[self._count - 1], name.ljust(64, b"\0"), is_ours=True)
