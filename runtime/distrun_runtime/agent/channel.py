"""The agent's end of the byte stream to its coordinator: non-blocking, frames in both directions."""

from __future__ import annotations

import os
from collections import deque
from typing import Any, Deque, List

from distrun_runtime.contract import wire
from distrun_runtime.errors import WireError

QUEUE_BYTES = 1024 * 1024
"""If more is queued, the output of tasks waits in its spool."""
_READ_BYTES = 256 * 1024


class Channel:
    """Reads descriptor `reading`, writes descriptor `writing`; both are made non-blocking."""

    def __init__(self, reading: int, writing: int) -> None:
        self.reading = reading
        self.writing = writing
        self.is_over = False
        """The coordinator closed its end (or sent what is no frame): nothing will arrive any more."""
        self.is_broken = False
        """Nothing can be sent any more."""
        self.fault = ""
        """Why the stream cannot be read further, if it was not simply closed."""
        self._decoder = wire.Decoder()
        self._queue: Deque[memoryview] = deque()
        self._queued = 0
        self._number = 0
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)

    @property
    def queued(self) -> int:
        """Bytes that wait to be written."""
        return self._queued

    def takes_output(self) -> bool:
        """Return whether more output of tasks should be queued now."""
        return self._queued < QUEUE_BYTES and not self.is_broken

    def greet(self, line: bytes) -> None:
        """Queue the first line, which is no frame."""
        self._put(line)

    def say(self, kind: str, body: bytes = b"", /, **members: Any) -> None:
        """Queue one message of type `kind`; "seq" is filled in."""
        if not self.is_broken:
            self._number += 1
            self._put(wire.encode(dict(members, type=kind, seq=self._number), body))

    def flush(self) -> None:
        """Write what can be written without waiting."""
        while self._queue and not self.is_broken:
            piece = self._queue[0]
            try:
                written = os.write(self.writing, piece)
            except BlockingIOError:
                return
            except OSError:
                self.is_broken = True
                self._queue.clear()
                self._queued = 0
                return
            self._queued -= written
            if written == len(piece):
                self._queue.popleft()
            else:
                self._queue[0] = piece[written:]

    def feed(self, data: bytes) -> List[wire.Frame]:
        """Return the frames that `data` completes; a stream that is not ours ends the channel."""
        try:
            return self._decoder.feed(data)
        except WireError as err:
            self.is_over = True
            self.fault = str(err)
            return []

    def receive(self) -> List[wire.Frame]:
        """Return the frames that have arrived, without waiting."""
        try:
            data = os.read(self.reading, _READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.is_over = True
            return []
        return self.feed(data)

    def _put(self, data: bytes) -> None:
        self._queue.append(memoryview(data))
        self._queued += len(data)
