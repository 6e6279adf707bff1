"""The pulls of a server that are not answered yet: whom they wait for, when they are lent what, and when they fail.

A pull waits until the rounds that it asks for are applied (async: until the pushes before it are), then the values are
lent at once: those between this round and the next. The answer goes out when all of its shards are lent.

To lend a value is to let a reply read it where it is (`answers`): the next update then writes other memory. (On
workers, "lent" is said of arrays of the script's that the store may still read.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from typing import Any

import numpy as np

from distrun_runtime.arrays.dtypes import Array, Buffer
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import JOIN_ADVICE
from distrun_runtime.ops import compression as codecs
from distrun_runtime.protocol.handshake import NodeIdentity
from distrun_runtime.protocol.message import Kind, Message, payloads_of
from distrun_runtime.ps import checks, role
from distrun_runtime.ps.replies import answer, refusal
from distrun_runtime.ps.role import NAMED, listed, tasks_of
from distrun_runtime.ps.shards import Store

_FEW = 4
"""Shards that are looked for one by one, in the array of another's shards, sooner than it is made a set."""


@dataclass(eq=False)
class Pull:
    """A pull that is not answered yet; all arrays have an element for each of its entries."""

    link: str
    rank: int
    """The worker that pulls; of a relay the first of its workers."""
    ranks: tuple[int, ...]
    """The worker; of a relay (`relay`) those that it pulls for."""
    store: Store
    message: Message
    entries: Array
    shards: Array
    rounds: Array
    notice: role.WaitNotice
    ticket: int
    """Its number, under which the engine keeps what was lent to it."""
    owed: Array
    """For each entry whether it is not lent yet."""
    rows: list[Buffer | None] = field(default_factory=list)
    """For each entry the payload that says which rows are pulled; empty: whole values."""
    before: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    """For each entry in async the pushes that waited for norms when it came: what was pushed before is in its value."""
    passed: set[int] = field(default_factory=set)
    """Shards at which it is looked whenever they have advanced: the round after that would replace what it asks for.
    Those that its worker has pushed again since, by a call that did not wait for this pull; in a relay all that do not
    come together."""
    is_fetched: bool = False
    """A relay has asked other servers for the values that it waits for: it takes the answers for its own rounds alone.
    The answer for a later round of a shard may come first, if the one for its own comes with a shard that is late."""
    skipped: dict[int, Any] = field(default_factory=dict)
    """Key number to the notes of the round that is pulled, if that was skipped."""


class Pulls:
    """All of them.

    Arguments:
        me: who this server is.
    """

    def __init__(self, me: Callable[[], NodeIdentity]) -> None:
        self._me = me
        self._open: dict[int, Pull] = {}
        """By their tickets, in the order in which they came."""
        self._waiting: dict[tuple[int, int], dict[int, Pull]] = {}
        """(Store, shard) to the pulls that are looked at again when the shard's value has changed, by their tickets."""
        self._remind_at = math.inf
        """When the first of those that wait is to be told whom it waits for, or earlier."""
        self._tickets = 0
        self._gone: dict[int, str] = {}
        """Workers that have ended, and who they were."""

    @property
    def count(self) -> int:
        """How many pulls wait."""
        return len(self._open)

    def of_store(self, number: int) -> int:
        """Return how many pulls of a store wait."""
        return sum(pull.store.number == number for pull in self._open.values())

    def ended(self, rank: int, who: str) -> list[role.Action]:
        """A worker has ended: pulls that wait for it are refused."""
        self._gone[rank] = who
        return [action for pull in list(self._open.values()) for action in self._refuse_hopeless(pull)]

    def has_ended(self, ranks: Iterable[int]) -> bool:
        """Whether one of some workers has ended."""
        return bool(self._gone) and any(rank in self._gone for rank in ranks)

    def clear(self) -> list[role.Action]:
        """The job's next script begins."""
        actions = self.drop_all()
        self._gone.clear()
        return actions

    def open_of(self, store: Store) -> list[Pull]:
        """Return the pulls of a store that wait, in the order in which they came."""
        return [pull for pull in self._open.values() if pull.store is store]

    def newest(self) -> Pull | None:
        """Return the pull that came last; None: it does not wait."""
        return self._open.get(self._tickets)

    def take(
        self, link: str, ranks: tuple[int, ...], batch: role.Batch, now: float, own: int | None = None
    ) -> list[role.Action]:
        """Take in a pull at time `now`.

        Arguments:
            ranks: the workers that it is for.
            own: the worker whose contribution has come, if it is to come at all; None: that is not known.
        """
        pull, store = opened(link, ranks, batch, now, self._next(now)), batch.store
        self._open[pull.ticket] = pull
        if batch.message.payloads:
            pull.rows = payloads_of(batch.entries, batch.message.payloads)
        if store.pending:
            pending = ((at, store.pending.get(shard, ())) for at, shard in enumerate(batch.shards.tolist()))
            pull.before = {at: set(each) for at, each in pending if each}
        np.add.at(store.owed[store.row[pull.rank]], batch.shards, 1)
        actions = self._look(pull, own)
        return [*actions, *self._refuse_hopeless(pull)] if pull.ticket in self._open else actions

    def _next(self, now: float) -> int:
        """Return the ticket of a pull that comes at time `now`."""
        self._tickets += 1
        self._remind_at = min(self._remind_at, now + role.FIRST_NOTE_S)
        return self._tickets

    def _look(self, pull: Pull, own: int | None = None) -> list[role.Action]:
        """Lend what is due of a pull; answer it if nothing is owed, else look again when its next shard advances."""
        store = pull.store
        at = (pull.owed & self._due(pull)).nonzero()[0]
        actions: list[role.Action] = []
        if own is not None and store.is_sync:
            pushed = np.maximum(store.last[store.row[own], pull.shards], store.ordered[pull.shards])
            for place in (pull.rounds > pushed).nonzero()[0].tolist():
                number = int(pull.rounds[place])
                if store.waits_for_itself(int(pull.shards[place]), own, number):
                    name = store.name(int(pull.entries["key"][place]))
                    reason = f"round {number} of key {name!r} cannot come: this worker's own push of it was refused"
                    return self._refuse(pull, refusal(pull.message, reason))
        if store.failed or store.late:
            for place in at.tolist():
                failure = store.failure(int(pull.shards[place]), pull.ranks, int(pull.rounds[place]))
                if failure is not None:
                    _has_told(pull)
                    no = refusal(pull.message, failure.reason, "RuleError", failure.traceback)
                    return self._refuse(pull, no)
        if len(at):
            pull.owed[at] = False
            np.subtract.at(store.owed[store.row[pull.rank]], pull.shards[at], 1)
            actions += self._lend(pull, at)
        if not pull.owed.any():
            del self._open[pull.ticket]
            deliver = role.Deliver(pull.ticket, pull.link, pull.message, pull.entries, pull.skipped, pull.notice.since)
            return [*actions, role.Work(deliver, reports=True)]
        self._watch(pull, int(pull.shards[pull.owed.argmax()]))
        return actions

    def before_push(self, link: str, rank: int, store: Store, shards: Array) -> list[role.Action]:
        """A worker pushes shards again while a pull of its own still waits for some of them.

        The script has made the pull with wait=False, or from another thread. It gets the round that it asked for: what
        is there is lent now, and the rest as soon as its round is over, before this push's round is applied.

        Arguments:
            rank: the worker; of a relay the first of its workers.
        """
        owed = shards[store.owed[store.row[rank], shards] > 0]
        if not len(owed):
            return []
        actions: list[role.Action] = []
        for pull in [pull for pull in self.open_of(store) if pull.link == link]:
            actions += self._look(pull)
            if pull.ticket in self._open:
                again = np.intersect1d(pull.shards[pull.owed], owed).tolist()
                pull.passed.update(again)
                for shard in again:
                    self._watch(pull, shard)
        return actions

    def watch_all(self, pull: Pull) -> None:
        """Look at a pull again when any of its shards has advanced."""
        pull.passed.update(pull.shards[pull.owed].tolist())
        for shard in pull.passed:
            self._watch(pull, shard)

    def _watch(self, pull: Pull, shard: int) -> None:
        """Look at a pull again when the shard's value has changed."""
        self._waiting.setdefault((pull.store.number, shard), {}).setdefault(pull.ticket, pull)

    def _due(self, pull: Pull) -> Array:
        """Return which entries of a pull can be lent."""
        store = pull.store
        if store.is_sync:
            done = store.done[pull.shards]
            due: Array = pull.rounds == done if pull.is_fetched else pull.rounds <= done
            return due
        due = np.ones(len(pull.shards), np.bool_)
        for at, before in pull.before.items():
            due[at] = before.isdisjoint(store.pending.get(int(pull.shards[at]), ()))
        if store.staleness is not None:
            excused = store.excused()
            # Not itself: a push of its own that was refused would never be counted.
            others = [r for r in store.members.ranks if r != pull.rank and r not in self._gone]
            others = [rank for rank in others if rank not in excused]
            if others:
                due &= store.last[np.ix_(store.row[others], pull.shards)].min(axis=0) >= pull.rounds - store.staleness
        return due

    def _lend(self, pull: Pull, at: Array) -> list[role.Action]:
        store = pull.store
        shards = pull.shards[at]
        if not store.is_sync:
            store.seen[store.row[pull.rank], shards] = store.updates[shards]
        if store.skipped:
            for shard, number in zip(shards.tolist(), pull.rounds[at].tolist(), strict=True):
                notes = store.skipped.get(shard, {}).get(number)
                if notes is not None:
                    pull.skipped[int(store.key[shard])] = notes
        if not pull.entries["codec"].any():
            return [role.Work(role.Lend(pull.ticket, store, shards, at))]
        wanted = pull.entries["codec"][at].astype(np.int64)
        # The first value is never compressed.
        wanted[~np.isin(wanted, (codecs.NONE, codecs.ROWS, checks.HALF)) & store.fresh[shards]] = codecs.NONE
        actions: list[role.Action] = []
        for codec in np.unique(wanted).tolist():
            some = wanted == codec
            params = checks.params_of(pull.message, codec)
            rows = tuple(pull.rows[place] or b"" for place in at[some].tolist()) if codec == codecs.ROWS else ()
            actions.append(role.Work(role.Lend(pull.ticket, store, shards[some], at[some], codec, params, rows)))
        return actions

    def advanced(self, store: Store, shards: Array) -> list[role.Action]:
        """Shards are farther than before: lend what is due now."""
        if not self._waiting:
            return []
        if len(self._waiting) <= _FEW:
            names = [name for name in self._waiting if name[0] == store.number and (shards == name[1]).any()]
        elif len(shards) <= len(self._waiting):
            names = [(store.number, shard) for shard in shards.tolist() if (store.number, shard) in self._waiting]
        else:
            mine = set(shards.tolist())
            names = [name for name in self._waiting if name[0] == store.number and name[1] in mine]
        actions: list[role.Action] = []
        for name in names:
            for pull in self._waiting.pop(name, {}).values():
                if pull.ticket in self._open:
                    actions += self._look(pull)
                if pull.ticket in self._open and name[1] in pull.passed and pull.owed[pull.shards == name[1]].any():
                    self._watch(pull, name[1])
        return actions

    def all_advanced(self, store: Store) -> list[role.Action]:
        """A worker is excused in a whole store."""
        return self.advanced(store, np.arange(store.count))

    def remind(self, now: float) -> list[role.Action]:
        """Tell workers whom their pulls wait for."""
        actions: list[role.Action] = []
        if now < self._remind_at:
            return actions  # thousands may wait, and this is asked at every turn of the loop
        self._remind_at = math.inf
        texts: dict[tuple[int, int, int], tuple[str, list[str], str]] = {}
        """What workers that want the same round of a shard wait for: the same."""
        for pull in self._open.values():
            # Whom a relay's workers wait for, the shards' own server says.
            if not pull.store.is_relayed and pull.notice.is_due(now):
                at = int(pull.owed.argmax())
                what = (pull.store.number, int(pull.shards[at]), int(pull.rounds[at]))
                if not pull.store.is_sync or what not in texts:
                    texts[what] = self._waits_for(pull)
                text, names, key = texts[what]
                body = {"text": text, "seconds": now - pull.notice.since, "for": names[:NAMED], "key": key}
                message = Message(Kind.WAITING, store=pull.store.number, request=pull.message.request, body=body)
                actions.append(role.Send(pull.link, message))
            self._remind_at = min(self._remind_at, math.inf if pull.store.is_relayed else pull.notice.next)
        return actions

    def _waits_for(self, pull: Pull) -> tuple[str, list[str], str]:
        """Return whom a pull waits for, for people, as names, and the key: `waiting for worker-1, key w, round 57`."""
        store, at = pull.store, int(pull.owed.argmax())
        shard, wanted = int(pull.shards[at]), int(pull.rounds[at])
        name = str(store.name(int(store.key[shard])))
        others = (rank for rank in store.members.ranks if rank != pull.rank)
        slow = [] if store.is_sync else store.behind(shard, wanted, others, self._gone)
        if slow:
            assert store.staleness is not None  # else none is behind
            what = f"key {name}, push {wanted - store.staleness}"
            why = f"staleness {store.staleness}; a worker that is done calls leave()"
            return f"waiting for {names_of(slow)}, {what} ({why})", tasks_of(slow), name
        if not store.is_sync:
            rank, push = min(pull.before.get(at, set()) & set(store.pending.get(shard, ())))
            text = f"waiting for the other servers' norms, key {name}, push {push} of worker-{rank}"
            return text, ["server"], name
        number = int(store.ordered[shard])
        if store.halfway[shard]:
            return f"waiting for the other servers' norms, key {name}, round {number}", ["server"], name
        me = self._me().name
        if number >= wanted:
            return f"waiting for the update on {me}, key {name}, round {number}", [me], name
        missing = store.missing(shard)
        text = f"waiting for {names_of(missing) or me}, key {name}, round {number + 1}"
        return text, tasks_of(missing) or [me], name

    def _refuse_hopeless(self, pull: Pull) -> list[role.Action]:
        """Refuse a pull that waits for a worker that has ended."""
        store = pull.store
        may_be = self._gone and store.is_sync and not store.is_relayed
        for at in np.flatnonzero(pull.owed).tolist() if may_be else ():
            shard, number = int(pull.shards[at]), int(pull.rounds[at])
            for rank in store.missing(shard) if number > store.ordered[shard] else ():
                if rank in self._gone:
                    name = store.names.get(int(store.key[shard]))
                    reason = (
                        f"{self._gone[rank]} has ended (BYE) without pushing round"
                        f" {int(store.ordered[shard]) + 1} of key {name!r}{JOIN_ADVICE}"
                    )
                    return self._refuse(pull, refusal(pull.message, reason, "PeerLost", who=f"worker-{rank}"))
        return []

    def _refuse(self, pull: Pull, no: Message) -> list[role.Action]:
        return [*self._forget(pull), role.Send(pull.link, no)]

    def refuse(self, pull: Pull, body: Mapping[str, Any]) -> list[role.Action]:
        """Refuse a pull as another server has refused it."""
        _has_told(pull)
        message = pull.message
        no = replace(answer(message, body), is_error=True)
        return self._refuse(pull, no)

    def _forget(self, pull: Pull) -> list[role.Action]:
        """Owe this pull, which is open, nothing any more, and take back what was lent to it."""
        del self._open[pull.ticket]
        np.subtract.at(pull.store.owed[pull.store.row[pull.rank]], pull.shards[pull.owed], 1)
        for name, pulls in list(self._waiting.items()):
            if pulls.pop(pull.ticket, None) is not None and not pulls:
                del self._waiting[name]
        return [role.Work(role.Discard(pull.ticket))]

    def drop(self, link: role.Link) -> list[role.Action]:
        """A worker's connection is gone: its answers are dropped."""
        pulls = [pull for pull in self._open.values() if pull.link == link]
        return [action for pull in pulls for action in self._forget(pull)]

    def drop_store(self, store: Store) -> list[role.Action]:
        """A store is closed: its answers are dropped."""
        return [action for pull in self.open_of(store) for action in self._forget(pull)]

    def drop_all(self, reason: str = "", who: str = "", rank: int | None = None) -> list[role.Action]:
        """Owe nothing to anybody any more; with a reason, everybody who waits is told, and `who` is lost.

        Arguments:
            rank: of the worker that is lost. Pulls of stores that it does not share go on.
        """
        actions: list[role.Action] = []
        for pull in list(self._open.values()):
            if rank is not None and rank not in pull.store.members.ranks:
                continue
            if reason:
                # It may come before the scheduler's word, and a node that asks then is to be told who is lost.
                actions.append(role.Send(pull.link, refusal(pull.message, reason, "PeerLost", who=who)))
            actions += self._forget(pull)
        return actions


def opened(link: str, ranks: tuple[int, ...], batch: role.Batch, now: float, ticket: int) -> Pull:
    """Return a pull that is owed everything."""
    rounds, owed = batch.entries["round"].astype(np.int64), np.ones(len(batch.shards), np.bool_)
    what = (batch.store, batch.message, batch.entries, batch.shards, rounds)
    return Pull(link, ranks[0], ranks, *what, role.WaitNotice(now), ticket, owed)


def _has_told(pull: Pull) -> None:
    """Its workers are told of a failed update: one error for all shards."""
    for shard in pull.shards.tolist() if pull.store.late else ():
        for rank in pull.ranks:
            pull.store.late.get(shard, {}).pop(rank, None)


def names_of(ranks: Iterable[int]) -> str:
    """Return the names of workers, of many the first few: `worker-0, worker-2`."""
    return listed(tasks_of(ranks))
