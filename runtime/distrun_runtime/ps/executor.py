"""The hands of a server: arrays are touched here and nowhere else on it.

Works are done inline, in the order given. A buffer that was lent to a reply is not written while ZeroMQ still reads
it or the reply is not sent: the next update writes another.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, cast

from distrun_runtime.arrays.dtypes import Array, narrow
from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops import rows as rowcodec
from distrun_runtime.protocol.message import DTYPES, Entry, Kind, Message
from distrun_runtime.ps import checks, lending, role, states, work
from distrun_runtime.ps.counters import Counters
from distrun_runtime.ps.profile import Recorder
from distrun_runtime.ps.replies import failed
from distrun_runtime.ps.shelf import Half, Lease, Shelf, elements
from distrun_runtime.ps.sums import Contribution, Dense, Sum, read, spread
from distrun_runtime.ps.work import SYNC, SlotId


class Executor:
    """Does a server's work on numpy arrays.

    Arguments:
        imports: modules that users' rules may come from.
    """

    def __init__(
        self, counters: Counters | None = None, recorder: Recorder | None = None, imports: Sequence[str] = ()
    ) -> None:
        self.shelves: dict[SlotId, Shelf] = {}
        self.rules: dict[int, rules.Rule] = {}
        self.specs: dict[int, rules.RuleSpec] = {}
        self._counters = counters or Counters()
        self._recorder = recorder or Recorder()
        self._imports = tuple(imports)
        self._lent: dict[int, dict[int, lending.Lent]] = {}
        self._staged: dict[int, rules.RuleSpec | None] = {}
        """Stores whose saved states are being loaded, with the rule that these were read for."""
        self._methods: dict[type[Any], Callable[[Any], Any]] = {}
        """What does each kind of work; looked up once."""

    def do(self, what: Any) -> role.Done:
        """Do one piece of work; what it raises is in the result."""
        try:
            method = self._methods.get(type(what)) or self._method(type(what))
            value = self._timed(method, what) if self._recorder.is_on else method(what)
        except Exception as err:
            # A user's rule may raise anything; the caller gets it with this traceback, the server lives.
            return role.Done(what, err, traceback.format_exc())
        return role.Done(what, value=value)

    def _method(self, kind: type[Any]) -> Callable[[Any], Any]:
        method: Callable[[Any], Any] = getattr(self, "_" + kind.__name__.lower())
        return self._methods.setdefault(kind, method)

    def _timed(self, method: Callable[[Any], Any], what: Any) -> Any:
        slot = getattr(what, "slot", None)
        args = {} if slot is None else {"key": slot.key, "offset": slot.offset}
        with self._recorder.span(type(what).__name__.lower(), "work", **args):
            return method(what)

    # Values

    def _fill(self, what: work.Fill) -> None:
        weight = elements(what.payload, what.dtype).copy()
        self.shelves[what.slot] = Shelf(weight, what.key, what.shape, what.row_size)

    def _tryfill(self, what: work.TryFill) -> None:
        message = what.message
        rule, names = self.rules[message.store], dict(message.body.get("names", ()))
        for entry, payload in zip(message.entries, message.payloads, strict=True):
            try:
                weight = elements(payload, DTYPES[entry.dtype])
                rule.check(weight.dtype)
                _try(rule, weight)
            except KVError as err:
                raise KVError("key %r: %s" % (names.get(entry.key, entry.key), err)) from None

    def _assign(self, what: work.Assign) -> None:
        shelf = self.shelves[what.slot]
        shelf.put(elements(what.payload, what.dtype).copy())
        if shelf.state is not None:
            rules.renew_master(shelf.weight, shelf.state)

    def _clear(self, what: work.Clear) -> None:
        self.shelves.clear()
        self.rules.clear()
        self.specs.clear()
        self._lent.clear()
        self._staged.clear()

    # Contributions

    def _check(self, what: work.Check) -> None:
        message = what.message
        for slot, entry, payload in zip(what.slots, message.entries, checks.payloads_of(message), strict=True):
            shelf = self.shelves[slot]
            if payload is None or entry.codec not in checks.READ_FIRST:
                continue
            try:
                if message.kind is Kind.PULL:
                    rowcodec.decode_rows(payload, shelf.rows)
                else:
                    self._read(shelf, payload, entry, message)
            except KVError as err:
                first = "; row 0 here is row %d of the value" % (slot.offset // shelf.row_size) if slot.offset else ""
                raise KVError("key %r of shape %s: %s%s" % (shelf.key, shelf.shape, err, first)) from None

    def _read(self, shelf: Shelf, payload: Any, entry: Entry, message: Message) -> Contribution:
        return read(payload, shelf.weight, shelf.row_size, checks.how(message, entry.codec))

    def _add(self, what: work.Add) -> None:
        shelf = self.shelves[what.slot]
        total = shelf.sums.get(what.round)
        if total is None:
            total = shelf.sums[what.round] = Sum(shelf.row_size)
        total.add(read(what.payload, shelf.weight, shelf.row_size, what.how))

    # Updates

    def _apply(self, what: work.Apply) -> tuple[float, ...] | None:
        shelf = self.shelves[what.slot]
        if what.skip:
            shelf.sums.pop(what.round, None)
            return None
        total = shelf.sums.pop(what.round).total()
        if what.slot.store in self.rules:
            return self._step(what.slot, total, (SYNC, what.round))
        dense = spread(total, len(shelf.weight))
        weight = narrow(dense.values, shelf.weight.dtype)
        shelf.put(weight if dense.is_own or weight is not dense.values else weight.copy())
        return None

    def _steps(self, what: work.Steps) -> Mapping[SlotId, tuple[float, ...]]:
        message = what.message
        if message.store not in self.rules:
            raise KVError("store %d has no rule" % message.store)
        waiting = {}
        try:
            for slot, entry, payload in zip(what.slots, message.entries, message.payloads, strict=True):
                given = self._read(self.shelves[slot], payload, entry, message)
                squares = self._step(slot, given, (what.rank, entry.round))
                if squares is not None:
                    waiting[slot] = squares
        except Exception:
            for slot, entry in zip(what.slots, message.entries, strict=True):
                self.shelves[slot].halves.pop((what.rank, entry.round), None)
            raise
        return waiting

    def _step(self, slot: SlotId, given: Contribution, turn: tuple[int, int]) -> tuple[float, ...] | None:
        """Do one update of a slot; with a rule that needs norms, the first half of it."""
        shelf, rule = self.shelves[slot], self.rules[slot.store]
        knobs = self.specs[slot.store].knobs(shelf.key, slot.offset)
        if shelf.state is None:
            shelf.state = rule.new_state(shelf.weight)
        if isinstance(rule, rules.NormRule):
            dense = spread(given, len(shelf.weight))
            prepared = rule.prepare(shelf.weight, dense.values, shelf.state, knobs)
            shelf.halves[turn] = Half(rule, knobs, prepared)
            return prepared.squares
        shelf.make_own()
        if isinstance(given, Dense):
            rule.step(shelf.weight, given.values, shelf.state, knobs)
        else:
            rule.step(shelf.weight.reshape(-1, shelf.row_size), given.values, shelf.state, knobs, given.rows)
        return None

    def _finish(self, what: work.Finish) -> None:
        shelf = self.shelves[what.slot]
        half = shelf.halves.pop((what.turn.rank, what.turn.round))
        if shelf.state is None:
            shelf.state = half.rule.new_state(shelf.weight)
        shelf.make_own()
        half.rule.finish(shelf.weight, half.prepared, what.totals, shelf.state, half.knobs)

    def _drop(self, what: work.Drop) -> None:
        self.shelves[what.slot].halves.pop((what.turn.rank, what.turn.round), None)

    # Answers

    def _lend(self, what: work.Lend) -> None:
        lent = lending.lend(self.shelves[what.slot], what)
        self._lent.setdefault(what.ticket, {})[what.number] = lent

    def deliver(self, what: work.Deliver) -> tuple[Message, list[SlotId]]:
        """Return the reply to a pull, its payloads still on the shelves, and the slots it lends.

        Whatever is wrong with the pull is said in the reply, and nothing raised.
        """
        lent = self._lent.pop(what.ticket, {})
        try:
            for each in lent.values():
                lending.give_back(self.shelves[each.slot], each)
            reply = lending.reply(what.message, lent, what.skipped)
        except Exception as err:
            return failed(what.message, role.Done(what, err, traceback.format_exc())), []
        self._counters.sent(sum(memoryview(payload).nbytes for payload in reply.payloads))
        if reply.is_error:
            return reply, []
        return reply, [each.slot for each in lent.values() if each.weight is not None]

    def lend(self, slots: list[SlotId], lease: Lease) -> None:
        """Remember that the buffers of `slots` are out until the lease is over."""
        for slot in slots:
            shelf = self.shelves[slot]
            shelf.leases = [old for old in shelf.leases if not old.is_over]
            if not lease.is_over:
                shelf.leases.append(lease)

    def _discard(self, what: work.Discard) -> None:
        for each in self._lent.pop(what.ticket, {}).values():
            lending.give_back(self.shelves[each.slot], each)

    # Control

    def _tryrule(self, what: work.TryRule) -> None:
        if what.spec is None:
            return
        spec = rules.RuleSpec.from_json(what.spec)
        rule = self._made(what.store, spec)
        for shelf in self._of_store(what.store).values():
            _try(rule, shelf.weight)

    def _made(self, store: int, spec: rules.RuleSpec) -> rules.Rule:
        rule = rules.rule_of(spec, self._imports)
        rules.check_keys(rule, ((shelf.key, shelf.weight.dtype) for shelf in self._of_store(store).values()))
        return rule

    def _setrule(self, what: work.SetRule) -> bool:
        """Return whether the new rule needs norms."""
        shelves = self._of_store(what.store).values()
        if what.spec is None:
            self.rules.pop(what.store, None)
            self.specs.pop(what.store, None)
            for shelf in shelves:
                shelf.state = None
            return False
        spec = rules.RuleSpec.from_json(what.spec)
        rule = self._made(what.store, spec)
        # A user's rule may fail at any of them: then none has changed.
        carried = [shelf.state and rules.carry_state(rule, shelf.weight, shelf.state) for shelf in shelves]
        for shelf, state in zip(shelves, carried, strict=True):
            shelf.state = cast(Optional[dict[str, Any]], state)
        self.rules[what.store], self.specs[what.store] = rule, spec
        return rule.needs_norms

    def _save(self, what: work.Save) -> dict[str, Any]:
        return states.save(what.message.body, self._of_store(what.store))

    def _load(self, what: work.Load) -> None:
        body, shelves = what.message.body, self._of_store(what.store)
        if body["action"] == "stage":
            spec = None if body["spec"] is None else rules.RuleSpec.from_json(body["spec"])
            states.stage(body, shelves, None if spec is None else self._made(what.store, spec))
            self._staged[what.store] = spec
        elif body["action"] == "drop":
            states.drop(shelves)
        elif self._staged.pop(what.store, None) != self.specs.get(what.store):
            # The same on all servers: the scheduler changes rules one at a time.
            raise KVError("the rule was changed while states were being loaded; nothing was loaded, load them again")
        else:
            states.commit(shelves)

    def _of_store(self, store: int) -> dict[SlotId, Shelf]:
        return {slot: shelf for slot, shelf in self.shelves.items() if slot.store == store}


def _try(rule: rules.Rule, weight: Array) -> None:
    """Return if a rule that takes the weight's dtype takes the weight too; else raise what it says."""
    if rule.name not in rules.RULES:
        # A user's rule may not like a weight, and is to say so before any server has it.
        rule.new_state(weight)
