"""Forwards the output of tasks to the coordinator through an on-disk spool with flow control.

Everything is spooled first, and sent as far as the window allows. So a task does not wait for a slow launcher (only if
the disk is full as well, or SPOOL_BYTES wait), and at most `WINDOW` bytes of a stream are in flight.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from typing import Callable, Deque, List, Optional

WINDOW = 1024 * 1024
"""Bytes of one stream that may be sent and not yet acknowledged."""
READ_BYTES = 64 * 1024
SEND_BYTES = 256 * 1024
DRAIN_BYTES = 4 * 1024 * 1024
"""At most so much is read in one go from the pipe of a task that ended; more than any pipe holds."""
SPOOL_BYTES = 1024 * 1024 * 1024
"""Bytes of one stream that may wait for the coordinator. Past it the task waits."""
SEGMENT_BYTES = 8 * 1024 * 1024
MEMORY_BYTES = 1024 * 1024


class Outlet:
    """One stream ("out" or "err") of one task."""

    def __init__(self, task: str, stream: str, descriptor: int, spool: StreamSpool, attempt: int = 0) -> None:
        self.task = task
        self.attempt = attempt
        self.stream = stream
        self.descriptor: Optional[int] = descriptor
        """Reading end of the pipe, non-blocking; None once it is closed."""
        self.spool = spool
        self.sent = 0
        self.acked = 0
        self.is_mid_line = False
        """What was read last does not end a line."""
        self.read_at = 0.0
        """When something was read last, wall clock; 0: never."""

    @property
    def total(self) -> int:
        """Bytes that the task wrote, as far as they were read."""
        return self.spool.end

    @property
    def is_sent(self) -> bool:
        """Everything read so far is on its way."""
        return self.sent >= self.spool.end

    def read(self) -> bool:
        """Read once from the pipe; return False when nothing was there. Closes it at its end."""
        if self.descriptor is None:
            return False
        try:
            data = os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            return False
        self.spool.append(data)
        self.is_mid_line = not data.endswith(b"\n")
        self.read_at = time.time()
        return True

    def drain(self) -> None:
        """Read what the pipe holds, without waiting; a process that still writes cannot keep us here."""
        end = self.total + DRAIN_BYTES
        while self.total < end and self.read():
            pass

    def pump(self, send: Callable[[int, bytes], None], takes_more: Callable[[], bool], window: int = WINDOW) -> None:
        """Send what the window allows while `takes_more()`. `send(offset, data)` takes a piece."""
        while self.sent < self.spool.end and self.sent - self.acked < window and takes_more():
            limit = min(SEND_BYTES, window - (self.sent - self.acked))
            data = self.spool.read(self.sent, limit)
            if not data:
                # The disk lost it. What follows keeps its true offset, so the gap is seen by the coordinator.
                self.sent = self.spool.end
                return
            send(self.sent, data)
            self.sent += len(data)

    def acknowledge(self, offset: int) -> None:
        """Note that the coordinator has everything before `offset`."""
        self.acked = max(self.acked, min(offset, self.sent))
        self.spool.forget(self.acked)

    def discard(self) -> None:
        """Forget everything: the coordinator is gone for good."""
        self.sent = self.acked = self.spool.end
        self.spool.forget(self.spool.end)

    def close(self) -> None:
        """Close the pipe."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class StreamSpool:
    """Bytes `begin` to `end` of one stream of a task, on this host's disk, addressed by byte offset.

    It is kept in segments, so that what the coordinator has acknowledged can be removed from the disk. If the disk is
    full, the stream continues in memory. `is_full` says that no more should be read from the task.
    """

    def __init__(
        self,
        path: str,
        segment_bytes: int = SEGMENT_BYTES,
        memory_bytes: int = MEMORY_BYTES,
        spool_bytes: int = SPOOL_BYTES,
    ) -> None:
        self.begin = 0
        self.end = 0
        self.failure = ""
        """Why nothing is written to disk any more; empty while it is."""
        self._path = path
        self._segment_bytes = segment_bytes
        self._memory_bytes = memory_bytes
        self._spool_bytes = spool_bytes
        self._segments: List[_SpoolFile] = []
        self._count = 0
        self._memory: Deque[bytes] = deque()
        self._in_memory = 0

    @property
    def is_full(self) -> bool:
        """Nothing more fits: the disk failed and memory is at its bound, or so much waits that no more is taken."""
        return self._in_memory >= self._memory_bytes or self.end - self.begin >= self._spool_bytes

    def append(self, data: bytes) -> None:
        """Keep `data` at the end, on disk or, when that fails, in memory (whatever the bound)."""
        view = memoryview(data)
        while view and not self.failure:
            try:
                written = self._write(view)
            except OSError as err:
                self.failure = f"{self._path}: {err.strerror or err}"
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
                    self.failure = f"{segment.path}: {err.strerror or err}"
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

    def _is_growing(self, segment: _SpoolFile) -> bool:
        return segment is self._segments[-1] and segment.length < self._segment_bytes and not self.failure

    def _write(self, view: memoryview) -> int:
        if not self._segments or self._segments[-1].length >= self._segment_bytes:
            self._segments.append(_SpoolFile(f"{self._path}.{self._count}", self.end))
            self._count += 1
        segment = self._segments[-1]
        left = self._segment_bytes - segment.length
        written = os.pwrite(segment.descriptor, view[:left], segment.length)
        segment.length += written
        return written


class _SpoolFile:
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
