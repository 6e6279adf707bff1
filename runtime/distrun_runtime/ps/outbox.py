"""What a worker has to say to one server: by priority, within a window, each key's requests in their order. Pure."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from distrun_runtime.protocol.message import Kind, Message

WINDOW_BYTES = 64 * 1024 * 1024
"""Pushed bytes that may be on their way to one server, so that a later push of higher priority overtakes the rest.

Only pushes count: a server acknowledges them at once. Pulls wait for rounds, and a window full of them could wait
for pushes that stand behind them.
"""


@dataclass(order=True)
class _Queued:
    order: tuple[int, int]
    message: Message = field(compare=False)


class Outbox:
    """Orders the messages to one server."""

    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        self._window = window_bytes
        self._heap: list[_Queued] = []
        self._count = 0
        self._in_flight: dict[int, int] = {}
        self._last: dict[int, tuple[int, int]] = {}
        """Key to the lowest priority of its queued messages, and how many are queued."""

    def put(self, message: Message) -> None:
        """Queue a message that has its request number."""
        priority = message.priority
        keys = {entry.key for entry in message.entries}
        for key in keys:
            # Requests of one worker on one key keep their order: a later one is never more urgent than an earlier.
            if key in self._last:
                priority = min(priority, self._last[key][0])
        for key in keys:
            self._last[key] = (priority, self._last.get(key, (0, 0))[1] + 1)
        self._count += 1
        heapq.heappush(self._heap, _Queued((-priority, self._count), message))

    def take(self) -> list[Message]:
        """Return what may be sent now, in order, and count it as on its way."""
        ready: list[Message] = []
        while self._heap:
            message = self._heap[0].message
            size = sum(entry.size_bytes for entry in message.entries) if message.kind is Kind.PUSH else 0
            if size and self._in_flight and sum(self._in_flight.values()) + size > self._window:
                break
            heapq.heappop(self._heap)
            for key in {entry.key for entry in message.entries}:
                lowest, count = self._last.pop(key)
                if count > 1:
                    self._last[key] = (lowest, count - 1)
            if size:
                self._in_flight[message.request] = size
            ready.append(message)
        return ready

    def answered(self, request: int) -> None:
        """A request was answered: its bytes are no longer on their way."""
        self._in_flight.pop(request, None)
