"""What a worker has to say to one server: by priority, within a window, each key's requests in their order."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.ps.routing import WINDOW_BYTES


@dataclass(order=True)
class _Queued:
    order: tuple[int, int]
    message: Message = field(compare=False)

    def shares_keys(self, message: Message) -> bool:
        """Whether a message is about a key of this one; one that names its entries by a bucket may be about any."""
        mine, its = self.message.entries["key"], message.entries["key"]
        is_named = (len(mine) or not self.message.bucket) and (len(its) or not message.bucket)
        return not is_named or bool(np.isin(its, mine).any())


class Outbox:
    """Orders the messages to one server."""

    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        self._window = window_bytes
        self._heap: list[_Queued] = []
        self._count = 0
        self._in_flight: dict[int, int] = {}

    def put(self, message: Message) -> None:
        """Queue a message that has its request number."""
        priority = message.priority
        # Requests of one worker on one key keep their order: a later one is never more urgent than an earlier.
        for queued in self._heap:
            if -queued.order[0] < priority and queued.shares_keys(message):
                priority = -queued.order[0]
        self._count += 1
        heapq.heappush(self._heap, _Queued((-priority, self._count), message))

    def take(self) -> list[Message]:
        """Return what may be sent now, in order, and count it as on its way."""
        ready: list[Message] = []
        while self._heap:
            message = self._heap[0].message
            size = sum(memoryview(each).nbytes for each in message.payloads) if message.kind is Kind.PUSH else 0
            if size and self._in_flight and sum(self._in_flight.values()) + size > self._window:
                break
            heapq.heappop(self._heap)
            if size:
                self._in_flight[message.request] = size
            ready.append(message)
        return ready

    def answered(self, request: int) -> None:
        """A request was answered: its bytes are no longer on their way."""
        self._in_flight.pop(request, None)
