"""From a task's pipe to the coordinator: everything is spooled first, and sent as far as the window allows.

A task therefore never waits for a slow launcher (it waits only when the disk is full as well), and what is in
flight is bounded: `WINDOW` bytes a stream.
"""

from __future__ import annotations

import os
from typing import Callable, Optional

from distrun_runtime.agent.spool import Spool

WINDOW = 1024 * 1024
"""Bytes of one stream that may be sent and not yet acknowledged."""
READ_BYTES = 64 * 1024
SEND_BYTES = 256 * 1024
DRAIN_BYTES = 4 * 1024 * 1024
"""At most so much is read in one go from the pipe of a task that ended; more than any pipe holds."""


class Outlet:
    """One stream ("out" or "err") of one task."""

    def __init__(self, task: str, stream: str, descriptor: int, spool: Spool) -> None:
        self.task = task
        self.stream = stream
        self.descriptor: Optional[int] = descriptor
        """Reading end of the pipe, non-blocking; None once it is closed."""
        self.spool = spool
        self.sent = 0
        self.acked = 0
        self.is_mid_line = False
        """What was read last does not end a line."""

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
        return True

    def drain(self) -> None:
        """Read what the pipe holds, without waiting; somebody who still writes cannot keep us here."""
        end = self.total + DRAIN_BYTES
        while self.total < end and self.read():
            pass

    def pump(self, send: Callable[[int, bytes], None], has_room: Callable[[], bool], window: int = WINDOW) -> None:
        """Send what the window and the channel have room for. `send(offset, data)` takes a piece."""
        while self.sent < self.spool.end and self.sent - self.acked < window and has_room():
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
        """Forget what nobody will ask for any more: the coordinator is gone for good."""
        self.sent = self.acked = self.spool.end
        self.spool.forget(self.spool.end)

    def close(self) -> None:
        """Close the pipe."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
