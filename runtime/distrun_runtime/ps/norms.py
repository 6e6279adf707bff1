"""Norms of whole values for rules that need them: each server adds up its pieces and tells the others. Pure.

A rule such as LAMB scales its step by norms of the whole weight, which lies in pieces on several servers. Each
server squares and sums its own pieces of a key (`Part`), sends these sums to the others (NORMS), and goes on when
the parts it has cover the value. All servers add the parts up in the order of their offsets, so all get the very
same totals. Parts, not elements, are what is known here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from distrun_runtime.ps.work import SlotId, Turn


class Part(NamedTuple):
    """One piece's sums of squares."""

    offset: int
    length: int
    squares: tuple[float, ...]


class Failure(NamedTuple):
    """Why an update failed: what callers are told, and a traceback of whoever failed."""

    reason: str
    traceback: str = ""


@dataclass
class _Exchange:
    """What is known of one update of one key."""

    parts: dict[int, Part] = field(default_factory=dict)
    """By offset, ours and others'."""
    slots: list[SlotId] = field(default_factory=list)
    """Ours that wait for the totals."""
    failure: Failure | None = None


class Norms:
    """The updates of a server that wait for norms."""

    def __init__(self) -> None:
        self._open: dict[Turn, _Exchange] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def mine(self, turn: Turn, slot: SlotId, length: int, squares: tuple[float, ...]) -> list[Part]:
        """Enter a slot of ours that is ready for this turn; return our parts so far."""
        exchange = self._open.setdefault(turn, _Exchange())
        exchange.slots.append(slot)
        exchange.parts[slot.offset] = Part(slot.offset, length, squares)
        ours = {each.offset for each in exchange.slots}
        return [part for offset, part in sorted(exchange.parts.items()) if offset in ours]

    def theirs(self, turn: Turn, parts: list[Part]) -> None:
        """Enter the parts of another server."""
        exchange = self._open.setdefault(turn, _Exchange())
        exchange.parts.update((part.offset, part) for part in parts)

    def fail(self, turn: Turn, failure: Failure) -> None:
        """The update of this turn fails, here and for slots that are not ready yet; the first reason counts."""
        exchange = self._open.setdefault(turn, _Exchange())
        exchange.failure = exchange.failure or failure

    def has(self, turn: Turn) -> bool:
        """Whether anything is known of a turn."""
        return turn in self._open

    def turns(self) -> list[Turn]:
        """Return the turns that are under way."""
        return list(self._open)

    def settled(self, turn: Turn, size: int) -> tuple[list[SlotId], tuple[float, ...] | Failure] | None:
        """Return our slots that may go on, and with what: totals or a failure; None: parts are missing.

        Arguments:
            size: elements of the whole value.
        """
        exchange = self._open.get(turn)
        if exchange is None:
            return None
        parts = [part for _, part in sorted(exchange.parts.items())]
        slots, exchange.slots = exchange.slots, []
        if exchange.failure is not None:
            return slots, exchange.failure
        if sum(part.length for part in parts) < size:
            exchange.slots = slots
            return None
        if len({len(part.squares) for part in parts}) > 1:
            exchange.failure = Failure("the servers applied different rules")
            return slots, exchange.failure
        return slots, tuple(sum(column) for column in zip(*(part.squares for part in parts), strict=True))

    def close(self, turn: Turn) -> None:
        """Forget a turn: all our slots are through."""
        self._open.pop(turn, None)

    def clear(self) -> None:
        """Forget all."""
        self._open.clear()
