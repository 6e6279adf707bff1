"""Pulls of a server: which can be answered, which wait, and whom they wait for. Pure.

In sync an entry of a pull is due when its round is applied. In async it is due when all pushes are that came before it
(they may wait for norms), and with a bound on staleness when no other worker is too far behind. What is due is lent at
once: the value between this round and the next. The answer goes out when all entries are lent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from distrun_runtime.ops import compression as codecs
from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.ps import checks, role, work
from distrun_runtime.ps.norms import Failure
from distrun_runtime.ps.replies import refusal
from distrun_runtime.ps.slots import Pull, Slot, Store


class Pulls:
    """The pulls of all stores that wait."""

    def __init__(self, workers: int, server: Callable[[], str]) -> None:
        self._workers = range(workers)
        self._server = server
        self._open: dict[int, Pull] = {}
        """By their tickets, in the order in which they came."""
        self._tickets = 0
        self.gone: dict[int, str] = {}
        """Workers that have ended, and who they were."""

    def take(self, link: role.Link, rank: int, store: Store, message: Message, now: float) -> list[role.Action]:
        """Take a pull in that nothing is wrong with."""
        self._tickets += 1
        rows = checks.payloads_of(message)
        pull = Pull(link, rank, message, set(), role.Patience(now), self._tickets, rows)
        actions: list[role.Action] = []
        for number, entry in enumerate(message.entries):
            slot = store.slot(entry)
            if slot.clock.pending:
                pull.before[number] = set(slot.clock.pending)
            if not self._is_due(store, slot, pull, number):
                if store.is_sync and store.waits_for_itself(slot, rank, entry.round):
                    return [*actions, *self._refuse_own(store, pull, slot, entry.round)]
                pull.owed.add(number)
                slot.waiting.append((pull, number))
                continue
            failure = slot.failure(store.is_sync, rank, entry.round)
            if failure is not None:
                return [*actions, *self._fail(store, pull, failure)]
            actions.append(_lend(pull, number, slot))
        if not pull.owed:
            return [*actions, role.Work(work.Deliver(pull.ticket, link, message, pull.skipped))]
        self._open[pull.ticket] = pull
        return [*actions, *self._refuse_hopeless(store, pull)]

    def advanced(self, store: Store, slot: Slot) -> list[role.Action]:
        """A slot is farther than before, or somebody is excused: lend what is due now."""
        waiting, slot.waiting = slot.waiting, []
        actions: list[role.Action] = []
        for pull, number in waiting:
            if pull.ticket not in self._open:
                continue
            if not self._is_due(store, slot, pull, number):
                slot.waiting.append((pull, number))
                continue
            failure = slot.failure(store.is_sync, pull.rank, pull.message.entries[number].round)
            if failure is not None:
                actions += self._fail(store, pull, failure)
                continue
            pull.owed.discard(number)
            actions.append(_lend(pull, number, slot))
            if not pull.owed:
                del self._open[pull.ticket]
                actions.append(role.Work(work.Deliver(pull.ticket, pull.link, pull.message, pull.skipped)))
        return actions

    def all_advanced(self, store: Store) -> list[role.Action]:
        """Somebody is excused in a whole store."""
        return [action for slot in store.slots.values() if slot.waiting for action in self.advanced(store, slot)]

    def remind(self, stores: dict[int, Store], now: float) -> list[role.Action]:
        """Tell workers whom their pulls wait for."""
        actions: list[role.Action] = []
        for pull in self._open.values():
            if pull.patience.is_due(now):
                text = self._waits_for(stores[pull.message.store], pull)
                body = {"text": text, "seconds": now - pull.patience.since}
                message = Message(Kind.WAITING, store=pull.message.store, request=pull.message.request, body=body)
                actions.append(role.Send(pull.link, message))
        return actions

    def fail_hopeless(self, stores: dict[int, Store]) -> list[role.Action]:
        """Refuse the pulls that wait for a worker that has ended."""
        pulls = list(self._open.values())
        return [action for pull in pulls for action in self._refuse_hopeless(stores[pull.message.store], pull)]

    def drop(self, stores: dict[int, Store], link: role.Link) -> list[role.Action]:
        """A worker's connection is gone: nobody waits for its answers."""
        pulls = [pull for pull in self._open.values() if pull.link == link]
        return [action for pull in pulls for action in self._forget(stores[pull.message.store], pull)]

    def drop_all(self, stores: dict[int, Store], reason: str = "", who: str = "") -> list[role.Action]:
        """Owe nothing to anybody any more; with a reason, everybody who waits is told, and `who` is lost."""
        actions: list[role.Action] = []
        for pull in list(self._open.values()):
            if reason:
                # It may come before the scheduler's word, and whoever asks then who is lost is to be told.
                actions.append(role.Send(pull.link, refusal(pull.message, reason, "PeerLost", who=who)))
            actions += self._forget(stores[pull.message.store], pull)
        return actions

    def _is_due(self, store: Store, slot: Slot, pull: Pull, number: int) -> bool:
        turn = pull.message.entries[number].round
        if store.is_sync:
            return turn <= slot.round
        is_over = number not in pull.before or pull.before[number].isdisjoint(slot.clock.pending)
        return is_over and not self._behind(store, slot, pull, turn)

    def _behind(self, store: Store, slot: Slot, pull: Pull, turn: int) -> list[int]:
        # Not itself: a push of its own that was refused would never be counted.
        others = (rank for rank in self._workers if rank != pull.rank)
        return store.behind(slot, turn, others, self.gone)

    def _owed(self, store: Store, pull: Pull) -> Iterable[tuple[int, Slot, int]]:
        """Yield the numbers of the entries that a pull waits for, in their order, each with its slot and round."""
        for number in sorted(pull.owed):
            entry = pull.message.entries[number]
            yield number, store.slot(entry), entry.round

    def _waits_for(self, store: Store, pull: Pull) -> str:
        """Return whom a pull waits for, for people: `waiting for worker-1, key w, round 57`."""
        number, slot, turn = next(iter(self._owed(store, pull)))
        name = store.names.get(slot.id.key, slot.id.key)
        slow = [] if store.is_sync else self._behind(store, slot, pull, turn)
        if slow and store.staleness is not None:
            bound = (turn - store.staleness, store.staleness)
            return "waiting for %s, key %s, push %d (staleness %d)" % (_names(slow), name, *bound)
        if not store.is_sync:
            rank, push = min(pull.before[number] & set(slot.clock.pending))
            return "waiting for the other servers' norms, key %s, push %d of worker-%d" % (name, push, rank)
        if slot.is_halfway:
            return "waiting for the other servers' norms, key %s, round %d" % (name, slot.ordered)
        who = _names(store.missing(slot, len(self._workers)))
        return "waiting for %s, key %s, round %d" % (who or self._server(), name, slot.ordered + 1)

    def _refuse_hopeless(self, store: Store, pull: Pull) -> list[role.Action]:
        reason, who = self._hopeless(store, pull) if self.gone else ("", "")
        if not reason:
            return []
        return [*self._forget(store, pull), role.Send(pull.link, refusal(pull.message, reason, "PeerLost", who=who))]

    def _hopeless(self, store: Store, pull: Pull) -> tuple[str, str]:
        """Return why a pull will never be answered, and the worker that is gone; empty texts: it may be."""
        for _, slot, turn in self._owed(store, pull):
            for rank in store.missing(slot, len(self._workers)) if store.is_sync and turn > slot.ordered else ():
                if rank in self.gone:
                    reason = (
                        "%s has ended (BYE) without pushing round %d of key %r;"
                        " a worker that runs out of data calls kv.join()"
                    ) % (self.gone[rank], slot.ordered + 1, store.names.get(slot.id.key))
                    return reason, "worker-%d" % rank
        return "", ""

    def _fail(self, store: Store, pull: Pull, failure: Failure) -> list[role.Action]:
        for entry in pull.message.entries:
            store.slot(entry).late.pop(pull.rank, None)  # one error for all pieces
        return [*self._forget(store, pull), self._refuse(pull, failure.reason, "RuleError", failure.traceback)]

    def _refuse_own(self, store: Store, pull: Pull, slot: Slot, turn: int) -> list[role.Action]:
        text = "round %d of key %r cannot come: this worker's own push of it was refused"
        reason = text % (turn, store.names.get(slot.id.key, slot.id.key))
        return [*self._forget(store, pull), self._refuse(pull, reason, "KVError")]

    def _forget(self, store: Store, pull: Pull) -> list[role.Action]:
        """Owe this pull nothing any more, and take back what was lent to it."""
        self._open.pop(pull.ticket, None)
        for _, slot, _ in self._owed(store, pull):
            slot.waiting = [(other, number) for other, number in slot.waiting if other is not pull]
        return [role.Work(work.Discard(pull.ticket))]

    def _refuse(self, pull: Pull, reason: str, error: str, traceback: str = "") -> role.Action:
        return role.Send(pull.link, refusal(pull.message, reason, error, traceback))


def _lend(pull: Pull, number: int, slot: Slot) -> role.Action:
    if slot.clock.pushed:
        slot.clock.pull(pull.rank)
    entry = pull.message.entries[number]
    if entry.round in slot.skipped:
        pull.skipped[entry.key] = slot.skipped[entry.round]
    codec = entry.codec
    if codec not in (codecs.NONE, codecs.ROWS, checks.HALF) and slot.is_fresh:
        codec = codecs.NONE  # The first value is never compressed.
    how = checks.how(pull.message, codec)
    return role.Work(work.Lend(pull.ticket, number, slot.id, pull.rows[number], how))


def _names(ranks: Iterable[int]) -> str:
    return ", ".join("worker-%d" % rank for rank in ranks)
