"""One stream of a task on this host's disk, addressed by byte offset.

It is kept in segments, so that what the coordinator has acknowledged can be given back to the disk. When the disk
is full the stream goes on in memory; `is_full` then says that no more should be read from the task.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import Deque, List

SEGMENT_BYTES = 8 * 1024 * 1024
MEMORY_BYTES = 1024 * 1024


class _Segment:
    def __init__(self, path: str, start: int) -> None:
        self.path = path
        self.start = start
        self.length = 0
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    @property
    def end(self) -> int:
        return self.start + self.length

    def remove(self) -> None:
        os.close(self.descriptor)
        with contextlib.suppress(OSError):  # the folder may be gone already
            os.unlink(self.path)


class Spool:
    """Bytes `begin` to `end` of one stream."""

    def __init__(self, path: str, segment_bytes: int = SEGMENT_BYTES, memory_bytes: int = MEMORY_BYTES) -> None:
        self.begin = 0
        self.end = 0
        self.failure = ""
        """Why nothing is written to disk any more; empty while it is."""
        self._path = path
        self._segment_bytes = segment_bytes
        self._memory_bytes = memory_bytes
        self._segments: List[_Segment] = []
        self._count = 0
        self._memory: Deque[bytes] = deque()
        self._in_memory = 0

    @property
    def is_full(self) -> bool:
        """Nothing more fits: the disk failed and memory is at its bound."""
        return self._in_memory >= self._memory_bytes

    def append(self, data: bytes) -> None:
        """Keep `data` at the end, on disk or, when that fails, in memory (whatever the bound)."""
        view = memoryview(data)
        while view and not self.failure:
            try:
                written = self._write(view)
            except OSError as err:
                self.failure = "%s: %s" % (self._path, err.strerror or err)
                break
            self.end += written
            view = view[written:]
        if view:
            self._memory.append(bytes(view))
            self._in_memory += len(view)
            self.end += len(view)

    def read(self, offset: int, limit: int) -> bytes:
        """Return up to `limit` bytes from `offset`; empty at the end, or if the disk lost them."""
        for segment in self._segments:
            if segment.start <= offset < segment.end:
                try:
                    return os.pread(segment.descriptor, min(limit, segment.end - offset), offset - segment.start)
                except OSError as err:
                    self.failure = "%s: %s" % (segment.path, err.strerror or err)
                    return b""
        start = self.end - self._in_memory
        for piece in self._memory:
            if start <= offset < start + len(piece):
                return piece[offset - start : offset - start + limit]
            start += len(piece)
        return b""

    def forget(self, offset: int) -> None:
        """Give back what lies before `offset`."""
        self.begin = max(self.begin, min(offset, self.end))
        while self._segments and self._segments[0].end <= self.begin and not self._is_growing(self._segments[0]):
            self._segments.pop(0).remove()
        while self._memory and self.end - self._in_memory + len(self._memory[0]) <= self.begin:
            self._in_memory -= len(self._memory.popleft())

    def close(self) -> None:
        """Remove everything."""
        for segment in self._segments:
            segment.remove()
        self._segments = []
        self._memory.clear()
        self._in_memory = 0

    def _is_growing(self, segment: _Segment) -> bool:
        return segment is self._segments[-1] and segment.length < self._segment_bytes and not self.failure

    def _write(self, view: memoryview) -> int:
        if not self._segments or self._segments[-1].length >= self._segment_bytes:
            self._segments.append(_Segment("%s.%d" % (self._path, self._count), self.end))
            self._count += 1
        segment = self._segments[-1]
        room = self._segment_bytes - segment.length
        written = os.pwrite(segment.descriptor, view[:room], segment.length)
        segment.length += written
        return written
