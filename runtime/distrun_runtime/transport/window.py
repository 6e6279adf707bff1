"""Windows: which messages of a connection are to be sent again, and which are delivered. One direction each. Pure.

Messages are numbered from 1. What a message is, these do not know; time is passed in, in seconds of any epoch.

Source: ps-lite's resender: the same waits (the n-th repeat waits n + 1 times as long) and the same limit. There the
signatures that were seen were kept for ever, and nothing was put back in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

LIMIT = 10
"""How often a message is sent again until its connection is given up."""
BATCH = 64
"""How many messages of a connection are sent again at once: the first that are missing hold up all others."""
HELD = 4096
HELD_BYTES = 256 * 1024 * 1024
"""How many messages, and how many bytes of them, may wait for one that is missing before them. What is beyond is taken
as lost."""

Item = TypeVar("Item")


class Outgoing(Generic[Item]):
    """What was sent one way on one connection and is not acknowledged yet.

    Arguments:
        timeout_s: how long the first try may take; the n-th repeat may take n + 1 times as long.
        has_left: tells whether all copies of an item have left this machine. One that has not, and all behind it, wait
            for a slow network: they are neither sent again nor lost.
    """

    def __init__(self, timeout_s: float, has_left: Callable[[Item], bool] = lambda item: True) -> None:
        self._timeout_s = timeout_s
        self._has_left = has_left
        self._last = 0
        self._waiting: dict[int, tuple[Item, int, float]] = {}
        """Number to item, repeats, and when it was sent first."""
        self._due: dict[int, float] = {}
        self._next_due = float("inf")

    def put(self, item: Item, now: float) -> int:
        """Take in a message that is being sent; return its number."""
        self._last += 1
        self._waiting[self._last] = (item, 0, now)
        self._due[self._last] = now + self._timeout_s
        self._next_due = min(self._next_due, now + self._timeout_s)
        return self._last

    def acknowledge(self, through: int, others: Sequence[int] = ()) -> list[Item]:
        """Take note that all numbers up to `through` and the `others` have arrived; return what was waiting for it."""
        # In the order of their numbers: the first that is not covered ends the search.
        numbers = []
        for number in self._waiting:
            if number > through:
                break
            numbers.append(number)
        numbers += [number for number in others if number > through and number in self._waiting]
        for number in numbers:
            del self._due[number]
        return [self._waiting.pop(number)[0] for number in numbers]

    def due(self, now: float) -> list[tuple[int, Item]]:
        """Return what is to be sent again, with its numbers, in their order, and count it as sent."""
        if now < self._next_due:
            return []
        stuck = self._stuck()
        late = [number for number, at in self._due.items() if at <= now]
        left = [number for number in late if number < stuck]
        again, rest = left[:BATCH], left[BATCH:] + late[len(left) :]
        self._due.update((number, now + self._timeout_s) for number in rest)
        for number in again:
            item, repeats, since = self._waiting[number]
            self._waiting[number] = (item, repeats + 1, since)
            self._due[number] = now + self._timeout_s * (repeats + 2)
        self._next_due = min(self._due.values(), default=float("inf"))
        return [(number, self._waiting[number][0]) for number in again]

    def lost(self, now: float) -> tuple[Item, float] | None:
        """Return a message that was repeated in vain as often as may be, and how long ago it was sent; or None."""
        if now >= self._next_due:
            stuck = self._stuck()
            for number, (item, repeats, since) in self._waiting.items():
                if repeats >= LIMIT and self._due[number] <= now and number < stuck:
                    return item, now - since
        return None

    def _stuck(self) -> float:
        """Return the first number that has not left this machine; infinite if all have."""
        numbers = (number for number, (item, _, _) in self._waiting.items() if not self._has_left(item))
        return next(numbers, float("inf"))

    def hasten(self, now: float, timeout_s: float) -> None:
        """Let everything be due after `timeout_s` at the latest: there is not much time left."""
        self._timeout_s = min(self._timeout_s, timeout_s)
        self._due = {number: min(at, now + timeout_s) for number, at in self._due.items()}
        self._next_due = min(self._due.values(), default=float("inf"))

    def clear(self) -> list[Item]:
        """Forget everything; return it."""
        items = [item for item, _, _ in self._waiting.values()]
        self._waiting, self._due, self._next_due = {}, {}, float("inf")
        return items

    @property
    def next_due(self) -> float:
        """When `due` has something to say, at the earliest; infinite if nothing waits."""
        return self._next_due if self._waiting else float("inf")

    @property
    def is_empty(self) -> bool:
        """Whether everything has arrived."""
        return not self._waiting


class Incoming(Generic[Item]):
    """What came one way on one connection: in order, each once, within a window."""

    def __init__(self, window: int = HELD, window_bytes: int = HELD_BYTES) -> None:
        self._window = window
        self._window_bytes = window_bytes
        self._through = 0
        self._held: dict[int, tuple[Item, int]] = {}
        self._held_bytes = 0

    def take(self, number: int, item: Item, size: int = 0) -> list[Item]:
        """Take in one message of `size` bytes; return what can be delivered now, in order.

        A repeat, or one too far ahead, is dropped; the latter is not acknowledged, so it comes again.
        """
        if number <= self._through or number in self._held:
            return []
        if number > self._through + 1:
            if number <= self._through + self._window and self._held_bytes + size <= self._window_bytes:
                self._held[number] = (item, size)
                self._held_bytes += size
            return []
        self._through = number
        ready = [item]
        while self._held and self._through + 1 in self._held:
            self._through += 1
            held, held_size = self._held.pop(self._through)
            self._held_bytes -= held_size
            ready.append(held)
        return ready

    @property
    def acknowledged(self) -> tuple[int, tuple[int, ...]]:
        """The number up to which everything is here, and those beyond that are here too."""
        return self._through, tuple(sorted(self._held))
