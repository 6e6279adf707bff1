"""The hands of a server: arrays are touched here and nowhere else on it.

Works are done inline, in the order given. A buffer that was lent to a reply is not written while ZeroMQ still reads
it or the reply is not sent: the next Apply writes another.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from distrun_runtime.algo import rules
from distrun_runtime.errors import KVError
from distrun_runtime.net.message import Buffer, Entry, Flag, Message, Payload
from distrun_runtime.node import role, work
from distrun_runtime.node.work import SlotId

Array = np.ndarray[Any, np.dtype[Any]]


class Lease(Protocol):
    """What `ZmqTransport.send` gives back."""

    @property
    def is_over(self) -> bool:
        """Whether the buffers may be written again."""
        ...


@dataclass
class _Shelf:
    """The arrays of one slot, all flat."""

    weight: Array
    sums: dict[int, Array] = field(default_factory=dict)
    owns: set[int] = field(default_factory=set)
    """Rounds whose sum is an array of ours; a first contribution is the message's own frame, which is read-only."""
    state: dict[str, Any] | None = None
    tickets: int = 0
    """Pulls that hold `weight` and are not delivered yet."""
    leases: list[Lease] = field(default_factory=list)


class Executor:
    """Does a server's work on numpy arrays."""

    def __init__(self) -> None:
        self._shelves: dict[SlotId, _Shelf] = {}
        self._rules: dict[int, rules.Rule] = {}
        self._lent: dict[int, dict[int, tuple[SlotId, Array]]] = {}

    def do(self, what: Any) -> role.Done:
        """Do one piece of work; what it raises is in the result."""
        try:
            getattr(self, "_" + type(what).__name__.lower())(what)
        except Exception as err:
            # A user's rule may raise anything; the caller gets it with this traceback, the server lives.
            return role.Done(what, err, traceback.format_exc())
        return role.Done(what)

    def deliver(self, what: work.Deliver) -> tuple[Message, list[SlotId]]:
        """Return the reply to a pull, its payloads still on the shelves, and the slots it lends."""
        lent = self._lent.pop(what.ticket, {})
        entries = []
        payloads: list[Buffer] = []
        for number, entry in enumerate(what.message.entries):
            slot, weight = lent[number]
            entries.append(
                Entry(entry.key, entry.offset, entry.length, entry.round, entry.dtype, payload=Payload.FRAME)
            )
            payloads.append(weight.data.cast("B"))
            shelf = self._shelves[slot]
            if shelf.weight is weight:
                shelf.tickets -= 1
        message = what.message
        reply = Message(
            message.kind,
            Flag.REPLY,
            store=message.store,
            request=message.request,
            entries=tuple(entries),
            payloads=payloads,
        )
        return reply, [slot for slot, _ in lent.values()]

    def lend(self, slots: list[SlotId], lease: Lease) -> None:
        """Remember that the buffers of `slots` are out until the lease is over."""
        for slot in slots:
            shelf = self._shelves[slot]
            shelf.leases = [old for old in shelf.leases if not old.is_over]
            if not lease.is_over:
                shelf.leases.append(lease)

    def _fill(self, what: work.Fill) -> None:
        self._shelves[what.slot] = _Shelf(np.frombuffer(what.payload, what.dtype).copy())

    def _add(self, what: work.Add) -> None:
        shelf = self._shelves[what.slot]
        given = np.frombuffer(what.payload, what.dtype)
        present = shelf.sums.get(what.round)
        if present is None:
            shelf.sums[what.round] = given
        elif what.round in shelf.owns:
            _add(present, given, present)
        else:
            shelf.sums[what.round] = _add(present, given, np.empty_like(present))
            shelf.owns.add(what.round)

    def _apply(self, what: work.Apply) -> None:
        shelf = self._shelves[what.slot]
        total = shelf.sums.pop(what.round)
        is_own = what.round in shelf.owns
        shelf.owns.discard(what.round)
        rule = self._rules.get(what.slot.store)
        if rule is None:
            self._put(shelf, total if is_own else total.copy())
        else:
            self._step(shelf, rule, total)

    def _steps(self, what: work.Steps) -> None:
        rule = self._rules.get(what.message.store)
        if rule is None:
            raise KVError("store %d has no rule" % what.message.store)
        for slot, payload in zip(what.slots, what.message.payloads, strict=True):
            shelf = self._shelves[slot]
            self._step(shelf, rule, np.frombuffer(payload, shelf.weight.dtype))

    def _step(self, shelf: _Shelf, rule: rules.Rule, gradient: Array) -> None:
        if shelf.tickets or not all(lease.is_over for lease in shelf.leases):
            self._put(shelf, shelf.weight.copy())
        if shelf.state is None:
            shelf.state = rule.new_state(shelf.weight)
        rule.step(shelf.weight, gradient, shelf.state)

    def _put(self, shelf: _Shelf, weight: Array) -> None:
        shelf.weight = weight
        shelf.tickets = 0
        shelf.leases = []

    def _lend(self, what: work.Lend) -> None:
        shelf = self._shelves[what.slot]
        shelf.tickets += 1
        self._lent.setdefault(what.ticket, {})[what.number] = (what.slot, shelf.weight)

    def _discard(self, what: work.Discard) -> None:
        for slot, weight in self._lent.pop(what.ticket, {}).values():
            shelf = self._shelves[slot]
            if shelf.weight is weight:
                shelf.tickets -= 1

    def _clear(self, what: work.Clear) -> None:
        self._shelves.clear()
        self._rules.clear()
        self._lent.clear()

    def _setrule(self, what: work.SetRule) -> None:
        rule = rules.make(what.name, dict(what.params))
        shelves = [shelf for slot, shelf in self._shelves.items() if slot.store == what.store]
        for shelf in shelves:
            rule.check(shelf.weight.dtype)
        self._rules[what.store] = rule
        for shelf in shelves:
            if shelf.state is not None:
                shelf.state = rules.carry_state(rule, shelf.weight, shelf.state)


def _add(one: Array, other: Array, out: Array) -> Array:
    # An overflowing half-precision gradient is the training's affair (loss scaling looks for inf): no warning here.
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(one, other, out=out)
    return out
