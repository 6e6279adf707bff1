"""What a server keeps for each store: slots with their rounds, the pulls that wait for them, and who is excused. Pure.

A slot is one piece of one value of one store. Contributions are ranks here, never arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from distrun_runtime.protocol.message import Buffer, Entry, Message
from distrun_runtime.ps.clocks import Clock
from distrun_runtime.ps.norms import Failure
from distrun_runtime.ps.role import Patience
from distrun_runtime.ps.work import Notes, SlotId


@dataclass(eq=False)
class Pull:
    """A pull that is not answered yet."""

    link: str
    rank: int
    message: Message
    owed: set[int]
    """Numbers of the entries that are not due yet."""
    patience: Patience
    ticket: int
    rows: list[Buffer | None] = field(default_factory=list)
    """For each entry the payload that says which rows are pulled."""
    before: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    """For each entry in async the pushes that waited for norms when it came: what was pushed before is in its value."""
    skipped: dict[int, Notes] = field(default_factory=dict)
    """Key number to the notes of the round that is pulled, if that was skipped."""


@dataclass(eq=False)
class Slot:
    """One piece of a value."""

    id: SlotId
    length: int
    dtype: int
    row_size: int = 0
    """Elements of a row; 0: the value is not row-sparse."""
    round: int = 0
    """Rounds that are complete and applied; the farthest worker's pushes in async."""
    ordered: int = 0
    """Rounds whose Apply was handed to the executor."""
    open: dict[int, set[int]] = field(default_factory=dict)
    """Round to the ranks that contributed."""
    failed: dict[int, Failure] = field(default_factory=dict)
    """Round to the reason and traceback why its update failed."""
    skipping: dict[int, dict[int, Mapping[str, Any]]] = field(default_factory=dict)
    """Open round to the workers that skip it, each with its note."""
    skipped: dict[int, Notes] = field(default_factory=dict)
    """Round that was skipped to the notes of its workers; only as long as it may be pulled."""
    skips: int = 0
    """How many rounds were skipped."""
    late: dict[int, Failure] = field(default_factory=dict)
    """Worker to why an update of its pushes failed that was acknowledged; its next pull says so."""
    waiting: list[tuple[Pull, int]] = field(default_factory=list)
    """Pulls, and which of their entries this slot owes."""
    clock: Clock = field(default_factory=Clock)
    """How far the workers are in async."""
    is_halfway: bool = False
    """The update of the round ordered last waits for norms."""
    is_fresh: bool = True
    """No round was applied since it was given its value, which is answered in full."""

    @property
    def updates(self) -> int:
        """Rounds that changed the value: those that were not skipped."""
        return self.round - self.skips

    def contribute(self, rank: int, number: int, skip: Mapping[str, Any] | None = None) -> bool:
        """Count a worker's contribution to a round; False: it is a repeat, the first one counted.

        Arguments:
            skip: the worker skips the round, and says this.
        """
        if number <= self.ordered or rank in self.open.get(number, ()):
            return False
        self.open.setdefault(number, set()).add(rank)
        if skip is not None:
            self.skipping.setdefault(number, {})[rank] = skip
        return True

    def complete(self, everybody: set[int], excused: set[int], one_at_a_time: bool = False) -> list[int]:
        """Return the rounds that are complete now, in order; each is returned once.

        A round without any contribution is not one, whoever is excused. With `one_at_a_time` none is returned while
        the last one is not applied.
        """
        complete: list[int] = []
        while self.open.get(self.ordered + 1) and everybody <= self.open[self.ordered + 1] | excused:
            if self.is_halfway or (one_at_a_time and self.ordered > self.round):
                break
            self.ordered += 1
            ranks, said = self.open.pop(self.ordered), self.skipping.pop(self.ordered, None)
            if said is not None:
                self.skipped[self.ordered] = {rank: said.get(rank) for rank in sorted(ranks)}
            complete.append(self.ordered)
        return complete

    def failure(self, is_sync: bool, rank: int, number: int) -> Failure | None:
        """Return why a pull of round `number` by a worker cannot be answered; None: it can."""
        late = self.late.pop(rank, None)
        return (self.failed.get(number) if is_sync else None) or late


@dataclass
class Store:
    """What a server knows of one store."""

    number: int
    is_sync: bool = True
    has_rule: bool = False
    needs_norms: bool = False
    """The rule needs norms of whole values."""
    staleness: int | None = None
    """In async: how many pushes of a key a worker may be ahead of another that it pulls; None: any number."""
    slots: dict[SlotId, Slot] = field(default_factory=dict)
    names: dict[int, Any] = field(default_factory=dict)
    """Key number to the user's key."""
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Key number to the shape of the whole value."""
    by_key: dict[int, list[Slot]] = field(default_factory=dict)
    """Key number to its slots, in the order of their offsets."""
    joined: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    """Workers that left this store for good (kv.leave)."""

    def excused(self) -> set[int]:
        """Return the workers whose contribution to an open round is zero."""
        return self.joined | self.left

    def name(self, entry: Entry) -> Any:
        """Return the user's key of an entry; its number if that is not known."""
        return self.names.get(entry.key, entry.key)

    def id_of(self, entry: Entry) -> SlotId:
        """Return the name of the slot that an entry is about."""
        return SlotId(self.number, entry.key, entry.offset)

    def slot(self, entry: Entry) -> Slot:
        """Return the slot that an entry is about; KeyError if there is none."""
        return self.slots[self.id_of(entry)]

    def add(self, slot: Slot) -> None:
        """Take in a new slot."""
        self.slots[slot.id] = slot
        pieces = self.by_key.setdefault(slot.id.key, [])
        pieces.append(slot)
        pieces.sort(key=lambda piece: piece.id.offset)

    def size(self, key: int) -> int | None:
        """Return the elements of a key's whole value; None: nobody said."""
        shape = self.shapes.get(key)
        return None if shape is None else math.prod(shape)

    def missing(self, slot: Slot, workers: int) -> list[int]:
        """Return the ranks that the slot's next round waits for."""
        return sorted(set(range(workers)) - slot.open.get(slot.ordered + 1, set()) - self.excused())

    def waits_for_itself(self, slot: Slot, rank: int, number: int) -> bool:
        """Whether a worker wants a round that its own push is missing from: it came before, so it was refused."""
        is_missing = number > slot.ordered and rank not in slot.open.get(number, ())
        return is_missing and rank not in self.excused()

    def behind(self, slot: Slot, number: int, workers: Iterable[int], gone: Collection[int]) -> list[int]:
        """Return which of `workers` are too far behind for a pull after push `number` of an asynchronous store."""
        if self.staleness is None:
            return []
        counted = (rank for rank in workers if rank not in self.excused() and rank not in gone)
        return slot.clock.behind(number - self.staleness, counted)

    def rounds(self) -> list[tuple[int, int]]:
        """Return (key number, rounds that are over) of every key that has a piece here."""
        return self._most(lambda slot: slot.round)

    def updates(self) -> list[tuple[int, int]]:
        """Return (key number, rounds that changed the value) of every key that has a piece here."""
        return self._most(lambda slot: slot.updates)

    def _most(self, count: Callable[[Slot], int]) -> list[tuple[int, int]]:
        found: dict[int, int] = {}
        for slot in self.slots.values():
            found[slot.id.key] = max(found.get(slot.id.key, 0), count(slot))
        return sorted(found.items())
