"""What a server keeps for each store: slots with their rounds, and the pulls that wait for them. Pure.

A slot is one piece of one value of one store. Contributions are ranks here, never arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distrun_runtime.net.message import DTYPES, Entry, Kind, Message, Payload
from distrun_runtime.node.role import Patience
from distrun_runtime.node.work import SlotId


@dataclass(eq=False)
class Slot:
    """One piece of a value."""

    id: SlotId
    length: int
    dtype: int
    round: int = 0
    """Rounds that are complete and applied."""
    ordered: int = 0
    """Rounds whose Apply was handed to the executor."""
    open: dict[int, set[int]] = field(default_factory=dict)
    """Round to the ranks that contributed."""
    failed: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Round to the reason and traceback why its update failed."""
    waiting: list[tuple[Pull, int]] = field(default_factory=list)
    """Pulls, and which of their entries this slot owes."""

    def contribute(self, rank: int, number: int) -> bool:
        """Count a worker's contribution to a round; False: it is a repeat, the first one counted."""
        if number <= self.ordered or rank in self.open.get(number, ()):
            return False
        self.open.setdefault(number, set()).add(rank)
        return True

    def complete(self, everybody: set[int], excused: set[int]) -> list[int]:
        """Return the rounds that are complete now, in order; each is returned once.

        A round without any contribution is not one, whoever is excused.
        """
        complete = []
        while self.open.get(self.ordered + 1) and everybody <= self.open[self.ordered + 1] | excused:
            self.ordered += 1
            del self.open[self.ordered]
            complete.append(self.ordered)
        return complete


@dataclass(eq=False)
class Pull:
    """A pull that is not answered yet."""

    link: str
    rank: int
    message: Message
    owed: set[int]
    """Numbers of the entries whose round is not applied yet."""
    patience: Patience
    ticket: int


@dataclass
class Store:
    """What a server knows of one store."""

    number: int
    is_sync: bool = True
    has_rule: bool = False
    slots: dict[SlotId, Slot] = field(default_factory=dict)
    names: dict[int, Any] = field(default_factory=dict)
    """Key number to the user's key."""
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

    def against_init(self, message: Message) -> str:
        """Return why an INIT cannot be taken in; empty: it can."""
        seen = set(self.slots)
        for entry in message.entries:
            if entry.payload is not Payload.FRAME:
                return "key %r: INIT without a value" % self.name(entry)
            if self.id_of(entry) in seen:
                return "key %r was initialised before" % self.name(entry)
            seen.add(self.id_of(entry))
        return ""

    def against(self, message: Message, server: str) -> str:
        """Return what is wrong with a push or pull; empty: nothing."""
        for entry in message.entries:
            slot = self.slots.get(self.id_of(entry))
            name = self.name(entry)
            if slot is None:
                return "key %r, offset %d: no such piece on %s" % (name, entry.offset, server)
            if (entry.length, entry.dtype) != (slot.length, slot.dtype):
                return "key %r: %s has %d elements of %s, the message %d of %s" % (
                    *(name, server, slot.length, DTYPES[slot.dtype]),
                    *(entry.length, DTYPES[entry.dtype]),
                )
            if (message.kind is Kind.PUSH) != (entry.payload is Payload.FRAME):
                return "key %r: %s with payload kind %s" % (name, message.kind.name, entry.payload.name)
        return ""

    def missing(self, slot: Slot, workers: int) -> list[int]:
        """Return the ranks that the slot's next round waits for."""
        return sorted(set(range(workers)) - slot.open.get(slot.ordered + 1, set()) - self.excused())

    def owed_slots(self, pull: Pull) -> list[Slot]:
        """Return the slots that a pull waits for, in the order of its entries."""
        return [self.slot(pull.message.entries[number]) for number in sorted(pull.owed)]

    def waits_for(self, pull: Pull, workers: int, server: str) -> str:
        """Return whom a pull waits for, for people: `waiting for worker-1, key w, round 57`."""
        slot = self.owed_slots(pull)[0]
        who = ", ".join("worker-%d" % rank for rank in self.missing(slot, workers))
        name = self.names.get(slot.id.key, slot.id.key)
        return "waiting for %s, key %s, round %d" % (who or server, name, slot.ordered + 1)

    def hopeless(self, pull: Pull, workers: int, gone: Mapping[int, str]) -> str:
        """Return why a pull will never be answered: it waits for a worker of `gone` (rank to who); empty: it may."""
        for slot in self.owed_slots(pull):
            for rank in self.missing(slot, workers):
                if rank in gone:
                    return (
                        "%s has ended (BYE) without pushing round %d of key %r;"
                        " a worker that runs out of data calls kv.join()"
                    ) % (gone[rank], slot.ordered + 1, self.names.get(slot.id.key))
        return ""

    def rounds(self) -> list[tuple[int, int]]:
        """Return (key number, rounds applied) of every key that has a piece here."""
        rounds: dict[int, int] = {}
        for slot in self.slots.values():
            rounds[slot.id.key] = max(rounds.get(slot.id.key, 0), slot.round)
        return sorted(rounds.items())
