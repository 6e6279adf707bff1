"""Pushes of a server: what they contribute to, when a round is complete, and what follows its update. Pure.

Sync: contributions are added to their round; when all have contributed, Apply. Async: each push is Steps of its own.
Where the rule needs norms of whole values, an update stops halfway: this server's sums of squares go to the others
(`norms`), and Finish follows when theirs are here. Rounds of such a slot are ordered one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distrun_runtime.protocol.message import DTYPES, Kind, Message
from distrun_runtime.ps import checks, role, work
from distrun_runtime.ps.counters import Counters
from distrun_runtime.ps.neighbours import Neighbours
from distrun_runtime.ps.norms import Failure, Norms, Part
from distrun_runtime.ps.pulls import Pulls
from distrun_runtime.ps.replies import answer, refusal
from distrun_runtime.ps.slots import Slot, Store
from distrun_runtime.ps.work import SYNC, SlotId, Turn


class Rounds:
    """The updates of all stores."""

    def __init__(
        self, workers: int, server: Callable[[], str], counters: Counters, pulls: Pulls, neighbours: Neighbours
    ) -> None:
        self._everybody = set(range(workers))
        self._server = server
        self._counters = counters
        self._pulls = pulls
        self._neighbours = neighbours
        self._norms = Norms()
        self._scripts = 0
        """How many scripts of the job are over: norms of an earlier one are none of the present."""
        self._logged: set[int] = set()
        """Stores with a failure that was logged."""

    def push(self, link: role.Link, rank: int, store: Store, message: Message) -> list[role.Action]:
        """Take a push in that nothing is wrong with."""
        slots = [store.slot(entry) for entry in message.entries]
        if not store.is_sync:
            return [role.Work(work.Steps(link, message, tuple(slot.id for slot in slots), rank), True)]
        actions: list[role.Action] = []
        skip = message.body.get("skip")
        if skip is not None:
            for slot, entry in zip(slots, message.entries, strict=True):
                if slot.contribute(rank, entry.round, skip):
                    actions += self.complete(store, slot)
            return [*actions, role.Send(link, answer(message))]
        for slot, entry, payload in zip(slots, message.entries, message.payloads, strict=True):
            if slot.contribute(rank, entry.round):
                how = checks.how(message, entry.codec)
                add = work.Add(slot.id, entry.round, payload, DTYPES[entry.dtype], how)
                actions += [role.Work(add), *self.complete(store, slot)]
        return [*actions, role.Send(link, answer(message))]

    def refused(self, store: Store, rank: int, message: Message, reason: str) -> list[role.Action]:
        """An async push was refused here: servers that took their pieces of it do not wait for our norms."""
        actions: list[role.Action] = []
        for entry in message.entries:
            slot = store.slots.get(store.id_of(entry))
            if slot is None or store.is_sync:
                continue
            turn = Turn(store.number, entry.key, rank, entry.round)
            slot.clock.push(rank, entry.round)
            slot.round = slot.clock.most()
            if self._norms.has(turn):
                actions += [*self._tell(turn, {"error": reason}), *self._fail_here(store, turn, Failure(reason))]
            actions += self._pulls.advanced(store, slot)
        return actions

    def complete(self, store: Store, slot: Slot) -> list[role.Action]:
        """Order the rounds of a slot that are complete now."""
        complete = slot.complete(self._everybody, store.excused(), store.needs_norms)
        return [role.Work(work.Apply(slot.id, number, number in slot.skipped), True) for number in complete]

    def complete_all(self, store: Store) -> list[role.Action]:
        """Order the rounds of a store that are complete now: somebody was excused."""
        return [action for slot in store.slots.values() for action in self.complete(store, slot)]

    # What the executor reports

    def applied(self, store: Store, event: role.Done) -> list[role.Action]:
        """A round's Apply is done, or half done."""
        what = event.work
        slot, turn = store.slots[what.slot], Turn(store.number, what.slot.key, SYNC, what.round)
        if event.error is not None:
            failure = self._failure(store, what.slot, event)
            actions = [*self._advance(store, slot, turn, failure), *self._fail_others(store, turn, failure)]
            return [*self._log(store, failure), *actions]
        if event.value is not None:
            slot.is_halfway = True
            return self._ready(store, slot, turn, event.value)
        actions = self._advance(store, slot, turn)
        return [*actions, *self._went_without(store, turn)] if self._norms else actions

    def stepped(self, store: Store, event: role.Done) -> list[role.Action]:
        """An async push is applied, or half applied; it is acknowledged now in any case."""
        what = event.work
        waiting: Mapping[SlotId, tuple[float, ...]] = event.value or {}
        actions: list[role.Action] = []
        if event.error is not None:
            failure = self._failure(store, what.slots[0], event)
            no = refusal(what.message, failure.reason, "RuleError", failure.traceback)
            actions.append(role.Send(what.link, no))
        else:
            actions.append(role.Send(what.link, answer(what.message)))
        for entry in what.message.entries:
            slot, turn = store.slot(entry), Turn(store.number, entry.key, what.rank, entry.round)
            staleness = slot.clock.push(what.rank, entry.round)
            slot.round = slot.clock.most()
            if slot.id in waiting:
                slot.clock.pending[what.rank, entry.round] = staleness
                actions += self._ready(store, slot, turn, waiting[slot.id])
            elif event.error is not None:
                actions += self._fail_others(store, turn, self._failure(store, slot.id, event))
            else:
                self._count(slot, what.rank, staleness)
                actions += self._went_without(store, turn)
            actions += self._pulls.advanced(store, slot)
        return actions

    def finished(self, store: Store, event: role.Done) -> list[role.Action]:
        """The second half of an update is done."""
        what = event.work
        failure = None if event.error is None else self._failure(store, what.slot, event)
        logs = [] if failure is None else self._log(store, failure)
        return [*logs, *self._advance(store, store.slots[what.slot], what.turn, failure)]

    def _advance(self, store: Store, slot: Slot, turn: Turn, failure: Failure | None = None) -> list[role.Action]:
        """An update of a slot is over, for good or ill: go on."""
        self._note(slot, turn, failure)
        return self._go_on(store, slot)

    def _note(self, slot: Slot, turn: Turn, failure: Failure | None) -> None:
        if turn.rank == SYNC:
            slot.round = turn.round
            # A worker that pushed this round will not ask for one before the last.
            slot.failed = {number: each for number, each in slot.failed.items() if number >= turn.round - 1}
            slot.skipped = {number: each for number, each in slot.skipped.items() if number >= turn.round - 1}
            if turn.round in slot.skipped:
                slot.skips += 1  # The value is as it was: nothing is counted.
                return
        slot.is_fresh = slot.is_halfway = False
        if turn.rank == SYNC:
            if failure is not None:
                slot.failed[turn.round] = failure
                # Who pushes on without asking in between is told by its next pull, whichever round that asks for.
                slot.late.update({rank: slot.late.get(rank, failure) for rank in self._everybody})
            else:
                self._count(slot)
            return
        staleness = slot.clock.pending.pop((turn.rank, turn.round), 0)
        if failure is not None:
            slot.late.setdefault(turn.rank, failure)
        else:
            self._count(slot, turn.rank, staleness)

    def _go_on(self, store: Store, slot: Slot) -> list[role.Action]:
        actions = self._pulls.advanced(store, slot) if slot.waiting else []
        # The next round may have waited for this one to be through.
        return [*actions, *self.complete(store, slot)] if slot.open else actions

    def _count(self, slot: Slot, rank: int = SYNC, staleness: int | None = None) -> None:
        slot.clock.updates += 1
        self._counters.updated(slot.id, rank, staleness)

    def _failure(self, store: Store, slot: SlotId, event: role.Done) -> Failure:
        name = store.names.get(slot.key)
        text = "the rule failed on %s for key %r: %s" % (self._server(), name, checks.server_error(event.error))
        return Failure(text, event.traceback)

    def _log(self, store: Store, failure: Failure) -> list[role.Action]:
        """Say a failure here: the push was acknowledged before, and a script may end without another pull."""
        if store.number in self._logged:
            return []
        self._logged.add(store.number)
        return [role.Log("ERROR", "event=rule-failed store=%d %s" % (store.number, failure.reason))]

    # Norms of whole values

    def _ready(self, store: Store, slot: Slot, turn: Turn, squares: tuple[float, ...]) -> list[role.Action]:
        """A slot's update waits for norms."""
        pieces = store.by_key[turn.key]
        parts = self._norms.mine(turn, slot.id, slot.length, squares)
        size = store.size(turn.key)
        length = sum(piece.length for piece in pieces)
        if size is None and len(self._neighbours):
            text = "the shape of key %r is not known to %s, and the rule needs norms of the whole value"
            self._norms.fail(turn, Failure(text % (store.names.get(turn.key), self._server())))
        elif any(_is_past(piece, turn) for piece in pieces):
            self._norms.fail(turn, self._other_rule(store, turn))
        actions: list[role.Action] = []
        if len(parts) == len(pieces) and size is not None and length < size:
            listed = [[part.offset, part.length, list(part.squares)] for part in parts]
            actions += self._tell(turn, {"parts": listed})
        return [*actions, *self._settle(store, turn)]

    def heard(self, store: Store | None, message: Message) -> list[role.Action]:
        """Take in the NORMS of another server."""
        body = message.body
        if store is None or int(body["script"]) != self._scripts or int(body["key"]) not in store.by_key:
            return []
        turn = Turn(store.number, int(body["key"]), int(body["rank"]), int(body["round"]))
        is_past = any(_is_past(piece, turn) for piece in store.by_key[turn.key])
        if "error" in body:
            if is_past:
                return []
            self._norms.fail(turn, Failure(str(body["error"]), str(body.get("traceback", ""))))
            return self._settle(store, turn)
        if is_past:
            # Ours is over, and not with these parts: their rule is not the one that we had.
            return self._tell(turn, {"error": self._other_rule(store, turn).reason})
        self._norms.theirs(
            turn, [Part(int(at), int(length), _floats(squares)) for at, length, squares in body["parts"]]
        )
        return self._settle(store, turn)

    def lost(self, stores: dict[int, Store], reason: str) -> list[role.Action]:
        """The connection to another server is gone: what waits for it fails."""
        actions: list[role.Action] = []
        for turn in self._norms.turns():
            if turn.store in stores:
                self._norms.fail(turn, Failure(reason))
                actions += self._settle(stores[turn.store], turn)
        return actions

    def forget(self) -> None:
        """The job's script is over, or the job is: nothing waits for norms any more."""
        self._norms.clear()

    def begin_anew(self) -> None:
        """The job's next script begins."""
        self.forget()
        self._scripts += 1
        self._logged.clear()

    def _settle(self, store: Store, turn: Turn) -> list[role.Action]:
        """Go on with the slots of ours whose norms are known, or will not be."""
        pieces = store.by_key[turn.key]
        size = store.size(turn.key)
        settled = self._norms.settled(turn, sum(piece.length for piece in pieces) if size is None else size)
        if settled is None:
            return []
        slots, result = settled
        actions: list[role.Action] = []
        if not isinstance(result, Failure):
            self._norms.close(turn)
            return [role.Work(work.Finish(slot, turn, result), True) for slot in slots]
        for slot in slots:
            actions.append(role.Work(work.Drop(slot, turn)))
            # All of them before anybody is answered: a pull of several pieces fails once.
            self._note(store.slots[slot], turn, result)
        for slot in slots:
            actions += self._go_on(store, store.slots[slot])
        if all(_is_past(piece, turn) for piece in pieces):
            self._norms.close(turn)
        return actions

    def _fail_others(self, store: Store, turn: Turn, failure: Failure) -> list[role.Action]:
        """Our first half failed: so does the update of the key's other pieces, here and elsewhere."""
        size = store.size(turn.key)
        pieces = store.by_key[turn.key]
        if not store.needs_norms:
            return []
        actions: list[role.Action] = []
        if size is not None and sum(piece.length for piece in pieces) < size:
            actions += self._tell(turn, {"error": failure.reason, "traceback": failure.traceback})
        self._norms.fail(turn, failure)
        return [*actions, *self._settle(store, turn)]

    def _went_without(self, store: Store, turn: Turn) -> list[role.Action]:
        """An update was done without norms: whoever waits for ours has another rule, and is told."""
        if not self._norms.has(turn):
            return []
        failure = self._other_rule(store, turn)
        return [*self._tell(turn, {"error": failure.reason}), *self._fail_here(store, turn, failure)]

    def _fail_here(self, store: Store, turn: Turn, failure: Failure) -> list[role.Action]:
        self._norms.fail(turn, failure)
        return self._settle(store, turn)

    def _other_rule(self, store: Store, turn: Turn) -> Failure:
        text = "the rule was changed while push %d of key %r was under way: %s applied it with another one"
        return Failure(text % (turn.round, store.names.get(turn.key), self._server()))

    def _tell(self, turn: Turn, body: Mapping[str, Any]) -> list[role.Action]:
        facts = {"script": self._scripts, "key": turn.key, "rank": turn.rank, "round": turn.round, **body}
        return self._neighbours.tell(Message(Kind.NORMS, store=turn.store, body=facts))


def _is_past(slot: Slot, turn: Turn) -> bool:
    """Whether an update of a slot is over, for good or ill."""
    if turn.rank == SYNC:
        return slot.round >= turn.round
    is_pending = (turn.rank, turn.round) in slot.clock.pending
    return slot.clock.pushed.get(turn.rank, 0) >= turn.round and not is_pending


def _floats(squares: list[Any]) -> tuple[float, ...]:
    return tuple(float(each) for each in squares)
