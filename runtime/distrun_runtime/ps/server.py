"""A server's decisions: rounds, pulls and membership. It sees descriptors, never the contents of an array.

A message names shards; what it means is decided for all of them at once, from the flat arrays of their store
(`shards.Store`). What is to be done with arrays goes to the engine as work (`work`), in order. The engine reports when
it is done, and what waited for it goes on.

* A push to a synchronous store is a contribution of its worker to a round. When all workers have contributed to the
  round of a shard, Apply is ordered. A repeat is acknowledged and not counted.
* A push to an asynchronous store is a Step of its own.
* A pull waits until its round is applied (async: until the pushes before it are), then the value is lent at once: the
  one between this round and the next. The answer goes out when all of its shards are lent.
* Where the rule needs norms of whole values, an update stops halfway: this server's sums of squares go to the others
  (`norms`), and Finish follows when theirs are here.

Saved states, rules, counters and profiles are in `control`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distrun_runtime.arrays.device import Buffer
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.contract.duration import duration
from distrun_runtime.ops import compression as codecs
from distrun_runtime.protocol.handshake import Identity
from distrun_runtime.protocol.message import (
    NO_ENTRIES,
    Kind,
    Message,
    Payload,
    payloads_of,
    rows_of,
    sizes_of,
)
from distrun_runtime.ps import checks, role, work
from distrun_runtime.ps.config import Config
from distrun_runtime.ps.control import Control
from distrun_runtime.ps.engine import Applied
from distrun_runtime.ps.norms import Norms, Part, Peers
from distrun_runtime.ps.profile import Recorder
from distrun_runtime.ps.replies import answer, failed, refusal
from distrun_runtime.ps.roster import from_json
from distrun_runtime.ps.shards import SYNC, Failure, Shard, Store, Turn
from distrun_runtime.ps.stats import Counters

BYE_S = 2.0
"""How long a server that was told to stop waits for the scheduler's answer. The scheduler may be frozen."""


@dataclass(eq=False)
class Pull:
    """A pull that is not answered yet."""

    link: str
    rank: int
    store: Store
    message: Message
    entries: Array
    shards: Array
    rounds: Array
    notice: role.WaitNotice
    ticket: int
    owed: Array
    """For each entry whether it is not lent yet."""
    rows: list[Buffer | None] = field(default_factory=list)
    """For each entry the payload that says which rows are pulled; empty: whole values."""
    before: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    """For each entry in async the pushes that waited for norms when it came: what was pushed before is in its value."""
    skipped: dict[int, Any] = field(default_factory=dict)
    """Key number to the notes of the round that is pulled, if that was skipped."""

    def first_owed(self) -> int:
        """Return the number of the first entry that is not lent."""
        return int(np.argmax(self.owed))


class Server:
    """A server's decisions."""

    def __init__(
        self, config: Config, endpoint: str, counters: Counters | None = None, recorder: Recorder | None = None
    ) -> None:
        self.me = config.identity(endpoint)
        self._config = config
        self._counters = counters or Counters()
        self._control = Control(lambda: self.me, self._counters, recorder or Recorder())
        self._nodes: set[tuple[str, int]] = set()
        self._stores: dict[int, Store] = {}
        self._ranks: dict[str, int] = {}
        """Links of workers, to their ranks."""
        self._servers: set[str] = set()
        """Links that other servers opened."""
        self._peers = Peers()
        self._buckets: dict[tuple[int, int, int], tuple[Array, Array]] = {}
        """(Rank, store, bucket) to entries, with the rounds of its first step, and their shards."""
        self._pulls: dict[int, Pull] = {}
        """Those that wait, by their tickets, in the order in which they came."""
        self._waiting: dict[tuple[int, int], list[Pull]] = {}
        """(Store, shard) to the pulls that are looked at again when the shard's value has changed."""
        self._tickets = 0
        self._gone: dict[int, str] = {}
        """Workers that have ended, and who they were."""
        self._norms = Norms()
        self._scripts = 0
        """How many scripts of the job are over: norms of an earlier one are none of the present."""
        self._logged: set[int] = set()
        """Stores with a failed update that was logged."""
        self._now = 0.0
        self._is_registered = False
        self._is_stopping = False
        self._deadline = role.Deadline()
        self._farewell = role.Deadline()

    def start(self, now: float) -> list[role.Action]:
        """Register with the scheduler."""
        self._deadline.set(now + self._config.start_timeout_s)
        return [role.Connect(role.SCHEDULER_LINK, self._config.root_endpoint)]

    def admit(self, peer: Identity) -> str:
        """Return why `peer` may not connect: only workers and servers of this job do."""
        if peer.job != self.me.job:
            return "%s belongs to job %r, %s to job %r" % (peer, peer.job, self.me.name, self.me.job)
        if self._nodes and (peer.role, peer.rank) not in self._nodes:
            return "%s is not in this job's roster" % peer
        return ""

    def handle(self, event: role.Event, now: float) -> list[role.Action]:
        """Take in one event."""
        self._now = now
        if isinstance(event, role.Welcomed):
            return self._welcomed(event)
        if isinstance(event, role.TurnedAway) and event.link == role.SCHEDULER_LINK:
            return [role.Finish(1, "the scheduler refused %s: %s" % (self.me.name, event.reason))]
        if isinstance(event, role.TurnedAway):
            return self._lost_peer(event)
        if isinstance(event, role.Broken):
            return self._broken(event)
        if isinstance(event, role.Told):
            name = role.signal_name(event.signal)
            return [role.Publish({"told": name}), *self._leave("signal %d" % event.signal, now)]
        if isinstance(event, role.Done):
            return self._done(event)
        if isinstance(event, role.Heard):
            if event.link == role.SCHEDULER_LINK:
                return self._from_scheduler(event.message)
            return self._from_peer(event.link, event.message)
        return []

    def tick(self, now: float) -> list[role.Action]:
        """Tell workers whom their pulls wait for."""
        if self._farewell.is_due(now):
            return [role.Finish(0, "the scheduler did not answer BYE for %g s" % BYE_S)]
        if self._deadline.is_due(now):
            text = "the scheduler at %s did not answer for %s"
            return [role.Finish(1, text % (self._config.root_endpoint, duration(self._config.start_timeout_s)))]
        return [*self._control.tick(self._stores), *self._remind(now)]

    # The job

    def _welcomed(self, event: role.Welcomed) -> list[role.Action]:
        if event.link == role.SCHEDULER_LINK:
            self._deadline.at = None
            self._is_registered = True
            return [role.Log("INFO", "event=registered scheduler=%s" % self._config.root_endpoint)]
        if event.peer is None:
            return []  # a server that we called
        if event.peer.role == "server":
            self._servers.add(event.link)
        else:
            self._ranks[event.link] = event.peer.rank
        return [role.Log("INFO", "event=connected node=%s host=%s" % (event.peer.name, event.peer.host))]

    def _broken(self, event: role.Broken) -> list[role.Action]:
        if event.link == role.SCHEDULER_LINK:
            if self._is_stopping:
                return [role.Finish(0)]
            text = "the scheduler at %s is lost: %s" % (self._config.root_endpoint, event.reason)
            return [role.Publish({"lost_peer": "scheduler", "message": text}), role.Finish(1, text)]
        # The scheduler judges deaths; here the worker's open requests are forgotten.
        self._servers.discard(event.link)
        self._ranks.pop(event.link, None)
        return [*self._drop_pulls(event.link), *self._lost_peer(event)]

    def _lost_peer(self, event: role.Broken | role.TurnedAway) -> list[role.Action]:
        if self._is_stopping or not self._peers.lost(event.link):
            return []
        text = "%s lost its connection to %s: %s" % (self.me.name, event.link, event.reason)
        return [role.Log("INFO", "event=lost-peer %s" % text), *self._norms_lost(text)]

    def _from_scheduler(self, message: Message) -> list[role.Action]:
        if message.kind is Kind.BYE and message.is_reply:
            return [role.Finish(0, "told to stop")]
        if message.kind is Kind.ROSTER:
            nodes = from_json(message.body["nodes"])
            self._nodes = {(node.role, node.rank) for node in nodes}
            self.me = self._config.identity(self.me.endpoint, message.body["rank"])
            self._peers.learn(nodes, self.me.rank)
            lines = ["event=roster node=%s host=%s endpoint=%s" % (who.name, who.host, who.endpoint) for who in nodes]
            return [role.Log("INFO", line) for line in lines]
        if message.kind in (Kind.RULE, Kind.SAVE, Kind.LOAD):
            return self._control.from_scheduler(message, self._stores) or []
        if message.kind is Kind.JOIN:
            return [*self._joined(message), role.Send(role.SCHEDULER_LINK, answer(message))]
        if message.kind is Kind.LEFT and message.request:
            store = self._store(message.store)
            store.left.add(int(message.body["rank"]))
            return [*self._excused(store), role.Send(role.SCHEDULER_LINK, answer(message))]
        if message.kind is Kind.LEFT:
            self._gone[message.body["rank"]] = message.body["who"]
            hopeless = [action for pull in list(self._pulls.values()) for action in self._refuse_hopeless(pull)]
            return [*hopeless, *(action for store in self._stores.values() for action in self._all_advanced(store))]
        if message.kind is Kind.LOST:
            reason = str(message.body["reason"])
            told = role.Publish({"lost_peer": message.body["who"], "message": reason})
            if not self._nodes:
                return [told, role.Finish(1, reason)]  # registration failed; the reason says who was missing
            self._norms.clear()
            return [told, *self._drop_all_pulls(reason, str(message.body["who"]))]
        if message.kind is Kind.STOP and message.body.get("stay"):
            forgotten = self._drop_all_pulls()
            self._norms.clear()
            self._scripts += 1
            self._logged.clear()
            self._nodes, self._stores, self._buckets = set(), {}, {}
            self._gone.clear()
            self._control.forget()
            return [*forgotten, role.Work(work.Clear()), role.Send(role.SCHEDULER_LINK, answer(message))]
        if message.kind is Kind.STOP:
            self._is_stopping = True
            who, reason = str(message.body.get("who", "")), str(message.body.get("reason", ""))
            early = [role.Publish({"lost_peer": who, "message": reason})] if who else []
            return [*early, role.Finish(int(message.body.get("code", 0)), reason)]
        return []

    def _leave(self, reason: str, now: float) -> list[role.Action]:
        """Say BYE, and end when the scheduler has answered: it must not take our end for a death."""
        if self._is_stopping or not self._is_registered:
            return [role.Finish(0, reason)]
        self._is_stopping = True
        self._farewell.set(now + BYE_S)
        return [role.Send(role.SCHEDULER_LINK, Message(Kind.BYE))]

    # Requests of workers and other servers

    def _from_peer(self, link: str, message: Message) -> list[role.Action]:
        if message.is_reply:
            return []
        if link in self._servers and message.kind is Kind.NORMS:
            return self._heard_norms(self._stores.get(message.store), message)
        rank = self._ranks.get(link)
        if rank is None:
            return []
        self._counters.received(sum(memoryview(payload).nbytes for payload in message.payloads))
        if message.kind is Kind.INIT:
            return self._init(link, message)
        if message.kind in (Kind.STATS, Kind.PROFILE):
            waiting = sum(pull.store.number == message.store for pull in self._pulls.values())
            handled = self._control.from_worker(link, message, self._stores, waiting)
            if handled is not None:
                return handled
        store = self._stores.get(message.store)
        if store is None:
            return [self._refuse(link, message, "store %d has no keys on %s" % (message.store, self.me.name))]
        if message.kind is Kind.ROUNDS:
            rounds = store.rounds(store.done)
            return [role.Send(link, answer(message, {"rounds": rounds}))]
        if message.kind not in (Kind.PUSH, Kind.PULL):
            return [self._refuse(link, message, "%s knows no %s" % (self.me.name, message.kind.name))]
        return self._data(link, rank, store, message)

    def _data(self, link: str, rank: int, store: Store, message: Message) -> list[role.Action]:
        entries, shards, wrong = self._entries(rank, store, message)
        if message.bucket and len(message.entries) and (shards >= 0).all():
            # Entries that travelled name the rounds of the bucket's step 0. Also if the push is refused: later ones
            # that name the bucket are on their way, and each is to hear why it is refused.
            self._buckets[rank, store.number, message.bucket] = entries, shards
        wrong = wrong or checks.against(store, message, entries, shards, self.me.name)
        is_push = message.kind is Kind.PUSH
        if not wrong and is_push and not store.is_sync and not store.has_rule:
            wrong = (
                "dist_async needs a rule on the servers: call kv.set_optimizer('sgd', learning_rate=...) before push"
            )
        if wrong:
            return self._refuse_data(link, rank, store, message, entries=entries, wrong=wrong)
        batch = work.Batch(store, shards, message, entries, checks.how(message, entries))
        if message.payloads and entries["codec"].any() and np.isin(entries["codec"], tuple(checks.READ_FIRST)).any():
            return [role.Work(work.Check(link, rank, batch), True)]
        return self._accept(link, rank, batch)

    def _entries(self, rank: int, store: Store, message: Message) -> tuple[Array, Array, str]:
        """Return the entries of a message, their shards (-1: there is none), and what is wrong with its bucket."""
        if len(message.entries) or not message.bucket:
            return message.entries, store.find(message.entries), ""
        known = self._buckets.get((rank, store.number, message.bucket))
        if known is None:
            return NO_ENTRIES, store.find(NO_ENTRIES), "bucket %d is not known to %s" % (message.bucket, self.me.name)
        entries = known[0].copy()
        entries["round"] += np.uint64(message.step)
        is_push = message.kind is Kind.PUSH
        if is_push and sum(memoryview(each).nbytes for each in message.payloads) != _bytes_of(entries):
            text = "bucket %d has %d bytes, the message brings others"
            return entries, known[1], text % (message.bucket, _bytes_of(entries))
        entries["payload"] = Payload.PACKED if is_push else Payload.NONE
        return entries, known[1], ""

    def _refuse_data(
        self, link: str, rank: int, store: Store, message: Message, *, entries: Array, wrong: str
    ) -> list[role.Action]:
        others = self._refused(store, rank, entries, wrong) if message.kind is Kind.PUSH else []
        return [self._refuse(link, message, wrong), *others]

    def _accept(self, link: str, rank: int, batch: work.Batch) -> list[role.Action]:
        """Do what nothing is wrong with."""
        if batch.message.kind is Kind.PULL:
            return self._pull(link, rank, batch)
        if not batch.store.is_sync:
            return [role.Work(work.Step(link, rank, batch), True)]
        return [*self._push(rank, batch), role.Send(link, answer(batch.message))]

    def _init(self, link: str, message: Message) -> list[role.Action]:
        store = self._store(message.store)
        store.names.update({int(number): name for number, name in message.body.get("names", [])})
        shards = store.find(message.entries)
        wrong = checks.against_init(store, message, shards)
        if wrong:
            return [self._refuse(link, message, wrong)]
        if message.body.get("assign"):
            store.fresh[shards] = True
            batch = work.Batch(store, shards, message, message.entries)
            return [role.Work(work.Assign(batch)), role.Send(link, answer(message))]
        if store.has_rule:
            return [role.Work(work.TryFill(link, message), True)]
        return self._fill(link, store, message)

    def _fill(self, link: str, store: Store, message: Message) -> list[role.Action]:
        store.is_sync = "async" not in str(message.body.get("type", ""))
        store.is_deterministic = bool(message.body.get("deterministic"))
        store.staleness = message.body.get("staleness")
        rows = rows_of(message.entries)
        for entry in rows:
            shape = checks.shape_of(message, entry)
            if shape is not None:
                store.shapes[entry.key] = shape
        new = [
            Shard(each.key, each.offset, each.length, each.dtype, checks.row_size_of(message, each)) for each in rows
        ]
        batch = work.Batch(store, store.add(new), message, message.entries)
        return [role.Work(work.Fill(batch)), role.Send(link, answer(message))]

    # Rounds

    def _push(self, rank: int, batch: work.Batch) -> list[role.Action]:
        """Take in the contributions of a synchronous push."""
        store, shards = batch.store, batch.shards
        rounds = batch.entries["round"].astype(np.int64)
        ahead = rounds - np.maximum(store.last[rank, shards], store.ordered[shards])
        skip = batch.message.body.get("skip")
        self._watch_all(rank, store, shards)
        if (ahead == 1).all():
            store.last[rank, shards] = rounds
            taken = batch
        else:
            at = np.flatnonzero([self._count(store, rank, *each) for each in zip(shards, rounds, ahead, strict=True)])
            taken = work.Batch(store, shards[at], batch.message, batch.entries, batch.how, at)
            rounds = rounds[at]
        if not len(taken.shards):
            return []
        actions: list[role.Action] = []
        for number, some in _by_round(taken, rounds):
            if skip is None:
                actions += self._contribute(rank, number, some)
            else:
                for shard in some.shards.tolist():
                    store.skipping.setdefault(shard, {}).setdefault(number, {})[rank] = skip
                actions += self._complete(store, some.shards)
        return actions

    def _count(self, store: Store, rank: int, shard: int, number: int, ahead: int) -> bool:
        """Count one contribution; tell whether it is not a repeat: the first one counts."""
        if ahead == 1:
            store.last[rank, shard] = number
            return True
        early = store.early.get(int(shard), {}).get(int(number), set())
        if ahead < 1 or rank in early:
            return False
        store.early.setdefault(int(shard), {}).setdefault(int(number), set()).add(rank)
        return True

    def _contribute(self, rank: int, number: int, batch: work.Batch) -> list[role.Action]:
        """Order what contributions to one round lead to."""
        store, shards = batch.store, batch.shards
        reach = store.reach(shards)
        ready = (store.ordered[shards] + 1 == number) & (reach >= number)
        if store.needs_norms:
            ready &= ~self._is_updating(store, shards)
        if store.skipping or store.early or not ready.all():
            return [role.Work(work.Add(rank, number, batch)), *self._complete(store, shards)]
        # The most frequent case: the last contributions of all these shards need not be kept for a moment.
        store.ordered[shards] = number
        apply = role.Work(work.Apply(store, number, shards, rank=rank, last=batch), True)
        return [apply, *self._complete(store, shards)] if (reach > number).any() else [apply]

    def _is_updating(self, store: Store, shards: Array) -> Array:
        """Return for which shards an update is under way that waits for norms, or may."""
        updating: Array = store.halfway[shards] | (store.ordered[shards] > store.done[shards])
        return updating

    def _complete(self, store: Store, shards: Array) -> list[role.Action]:
        """Order the rounds of some shards that are complete now."""
        actions: list[role.Action] = []
        while len(shards):
            self._take_early(store, shards)
            following = store.ordered[shards] + 1
            ready = store.reach(shards) >= following
            ready &= ~(self._is_updating(store, shards) if store.needs_norms else store.halfway[shards])
            shards, following = shards[ready], following[ready]
            store.ordered[shards] = following
            for number in np.unique(following).tolist():
                some = shards[following == number]
                skipped = [shard for shard in some.tolist() if number in store.skipping.get(shard, ())]
                for shard in skipped:
                    said = store.skipping[shard].pop(number)
                    ranks = [r for r in range(self._config.workers) if store.last[r, shard] >= number]
                    store.skipped.setdefault(shard, {})[number] = {rank: said.get(rank) for rank in ranks}
                if skipped:
                    gone = np.array(skipped)
                    actions.append(role.Work(work.Apply(store, number, gone, skip=True), True))
                    some = some[~np.isin(some, gone)]
                if len(some):
                    actions.append(role.Work(work.Apply(store, number, some), True))
        return actions

    def _take_early(self, store: Store, shards: Array) -> None:
        """Count contributions as usual ones that came beyond a gap which is closed: the missing worker was excused."""
        if not store.early:
            return
        for shard in shards.tolist():
            known = store.early.get(shard, {})
            number = int(store.ordered[shard]) + 1
            while number in known:
                for rank in known.pop(number):
                    store.last[rank, shard] = max(int(store.last[rank, shard]), number)
                number += 1
            if not known:
                store.early.pop(shard, None)

    def _complete_all(self, store: Store) -> list[role.Action]:
        """Order the rounds of a store that are complete now: somebody was excused."""
        return self._complete(store, np.arange(store.count)) if store.is_sync else []

    def _refused(self, store: Store, rank: int, entries: Array, reason: str) -> list[role.Action]:
        """An async push was refused here: servers that took their shards of it do not wait for our norms."""
        actions: list[role.Action] = []
        if store.is_sync:
            return actions
        for shard, entry in zip(store.find(entries).tolist(), rows_of(entries), strict=True):
            if shard < 0:
                continue
            turn = Turn(store.number, entry.key, rank, entry.round)
            self._count_async(store, np.array([shard]), rank, np.array([entry.round]))
            if self._norms.has(turn):
                actions += [*self._tell(turn, {"error": reason}), *self._fail_here(store, turn, Failure(reason))]
            actions += self._advanced(store, np.array([shard]))
        return actions

    def _count_async(self, store: Store, shards: Array, rank: int, rounds: Array) -> Array:
        """Count a worker's pushes; return how many updates came since its last pull of each shard."""
        store.last[rank, shards] = np.maximum(store.last[rank, shards], rounds)
        store.done[shards] = np.maximum(store.done[shards], store.last[rank, shards])
        stale: Array = store.updates[shards] - store.seen[rank, shards]
        return stale

    # What the engine reports

    def _done(self, event: role.Done) -> list[role.Action]:
        what = event.work
        if isinstance(what, work.Apply):
            return self._applied(what, event)
        if isinstance(what, work.Deliver):
            return []  # The loop has sent it.
        handled = self._control.done(event, self._stores)
        if isinstance(what, work.SetRule) and event.error is None:
            self._store(what.store).needs_norms = bool(event.value)
        if handled is not None:
            return handled
        if isinstance(what, work.Check):
            message, store = what.batch.message, what.batch.store
            if event.error is not None:
                wrong = _words(event.error)
                return self._refuse_data(what.link, what.rank, store, message, entries=what.batch.entries, wrong=wrong)
            return self._accept(what.link, what.rank, what.batch)
        if isinstance(what, work.TryFill):
            if event.error is not None:
                return [role.Send(what.link, failed(what.message, event))]
            return self._fill(what.link, self._store(what.message.store), what.message)
        if isinstance(what, work.Step):
            return self._stepped(what, event)
        assert isinstance(what, work.Finish)
        failure = None if event.error is None else self._failure(what.store, what.shard, event.error, event.traceback)
        logs = [] if failure is None else self._log(what.store, failure)
        return [*logs, *self._advance(what.store, what.shard, what.turn, failure)]

    def _applied(self, what: work.Apply, event: role.Done) -> list[role.Action]:
        """A round is applied, or waits for norms."""
        store, shards = what.store, what.shards
        if self._stores.get(store.number) is not store:
            return []  # The script that it belonged to is over.
        result = event.value if isinstance(event.value, Applied) else Applied()
        if event.error is not None:
            result = Applied(dict.fromkeys(shards.tolist(), (event.error, event.traceback)))
        special = {*result.failed, *result.squares}
        actions: list[role.Action] = []
        good = shards if not special else shards[~np.isin(shards, list(special))]
        if len(good):
            self._note_applied(store, good, what.round)
            actions += self._advanced(store, good)
            for key in {int(store.key[shard]) for shard in good} if self._norms else ():
                actions += self._went_without(store, Turn(store.number, key, SYNC, what.round))
        for shard, (error, trace) in result.failed.items():
            failure = self._failure(store, shard, error, trace)
            turn = Turn(store.number, int(store.key[shard]), SYNC, what.round)
            actions += [*self._log(store, failure), *self._advance(store, shard, turn, failure)]
            actions += self._fail_others(store, turn, failure)
        for shard, squares in result.squares.items():
            store.halfway[shard] = True
            actions += self._norms_ready(
                store, shard, Turn(store.number, int(store.key[shard]), SYNC, what.round), squares
            )
        return [*actions, *self._complete(store, good)] if (store.reach(good) > store.ordered[good]).any() else actions

    def _note_applied(self, store: Store, shards: Array, number: int) -> None:
        """Rounds of shards are over, and their updates have not failed."""
        changed = self._note_over(store, shards, number)
        self._counters.updated(len(changed))
        store.updates[changed] += 1

    def _note_over(self, store: Store, shards: Array, number: int) -> Array:
        """Rounds of shards are over, for good or ill; return those that were not skipped."""
        store.done[shards] = number
        for known in (store.failed, store.skipped):
            # A worker that pushed this round will not ask for one before the last.
            for shard in shards.tolist() if known else ():
                if shard in known:
                    rest = {each: what for each, what in known[shard].items() if each >= number - 1}
                    known[shard] = rest  # type: ignore[assignment]
                    if not rest:
                        del known[shard]
        if store.skipped:
            skipped = np.array([number in store.skipped.get(shard, ()) for shard in shards.tolist()])
            store.skips[shards[skipped]] += 1  # The value is as it was: nothing is counted.
            shards = shards[~skipped]
        store.fresh[shards] = store.halfway[shards] = False
        return shards

    def _stepped(self, what: work.Step, event: role.Done) -> list[role.Action]:
        """An async push is applied, or half applied; it is acknowledged now in any case."""
        batch, store = what.batch, what.batch.store
        waiting: Mapping[int, tuple[float, ...]] = event.value or {}
        rounds = batch.entries["round"].astype(np.int64)
        actions: list[role.Action] = []
        if event.error is not None:
            failure = self._failure(store, int(batch.shards[0]), event.error, event.traceback)
            no = refusal(batch.message, failure.reason, "RuleError", failure.traceback)
            actions.append(role.Send(what.link, no))
        else:
            actions.append(role.Send(what.link, answer(batch.message)))
        stale = self._count_async(store, batch.shards, what.rank, rounds)
        if event.error is None and not waiting and not self._norms:
            self._counters.updated(len(batch.shards), what.rank, stale.tolist())
            store.updates[batch.shards] += 1
            store.fresh[batch.shards] = False
            return [*actions, *self._advanced(store, batch.shards)]
        pushes = list(zip(batch.shards.tolist(), rounds.tolist(), stale.tolist(), strict=True))
        for shard, number, each in pushes:
            # All of them before any goes on: what is counted and does not wait counts as over.
            if shard in waiting:
                store.pending.setdefault(shard, {})[what.rank, number] = each
        for shard, number, each in pushes:
            turn = Turn(store.number, int(store.key[shard]), what.rank, number)
            if shard in waiting:
                actions += self._norms_ready(store, shard, turn, waiting[shard])
            elif event.error is not None:
                failure = self._failure(store, shard, event.error, event.traceback)
                actions += self._fail_others(store, turn, failure)
            else:
                self._counters.updated(1, what.rank, [each])
                store.updates[shard] += 1
                store.fresh[shard] = False
                actions += self._went_without(store, turn)
            actions += self._advanced(store, np.array([shard]))
        return actions

    def _advance(self, store: Store, shard: int, turn: Turn, failure: Failure | None = None) -> list[role.Action]:
        """One update of one shard is over, for good or ill: go on."""
        self._note(store, shard, turn, failure)
        return self._go_on(store, shard)

    def _go_on(self, store: Store, shard: int) -> list[role.Action]:
        one = np.array([shard])
        # The next round may have waited for this one to be through.
        return [*self._advanced(store, one), *(self._complete(store, one) if store.is_sync else [])]

    def _note(self, store: Store, shard: int, turn: Turn, failure: Failure | None) -> None:
        one = np.array([shard])
        if turn.rank == SYNC:
            if failure is None:
                self._note_applied(store, one, turn.round)
                return
            self._note_over(store, one, turn.round)
            store.failed.setdefault(shard, {})[turn.round] = failure
            # Who pushes on without asking in between is told by its next pull, whichever round that asks for.
            late = store.late.setdefault(shard, {})
            late.update({rank: late.get(rank, failure) for rank in range(self._config.workers)})
            return
        store.fresh[shard] = store.halfway[shard] = False
        pending = store.pending.get(shard, {})
        staleness = pending.pop((turn.rank, turn.round), 0)
        if not pending:
            store.pending.pop(shard, None)
        if failure is not None:
            store.late.setdefault(shard, {}).setdefault(turn.rank, failure)
        else:
            store.updates[shard] += 1
            self._counters.updated(1, turn.rank, [staleness])

    def _failure(self, store: Store, shard: int, error: BaseException, trace: str) -> Failure:
        name = store.names.get(int(store.key[shard]))
        return Failure("the rule failed on %s for key %r: %s" % (self.me.name, name, _words(error)), trace)

    def _log(self, store: Store, failure: Failure) -> list[role.Action]:
        """Say a failure here: the push was acknowledged before, and a script may end without another pull."""
        if store.number in self._logged:
            return []
        self._logged.add(store.number)
        return [role.Log("ERROR", "event=rule-failed store=%d %s" % (store.number, failure.reason))]

    # Pulls

    def _pull(self, link: str, rank: int, batch: work.Batch) -> list[role.Action]:
        """Take in a pull."""
        self._tickets += 1
        store, shards = batch.store, batch.shards
        rounds = batch.entries["round"].astype(np.int64)
        owed = np.ones(len(shards), np.bool_)
        rows = payloads_of(batch.entries, batch.message.payloads) if batch.message.payloads else []
        notice = role.WaitNotice(self._now)
        pull = Pull(link, rank, store, batch.message, batch.entries, shards, rounds, notice, self._tickets, owed, rows)
        if store.pending:
            pull.before = {
                at: set(store.pending[shard]) for at, shard in enumerate(shards.tolist()) if shard in store.pending
            }
        self._pulls[pull.ticket] = pull
        np.add.at(store.owed[rank], shards, 1)
        actions = self._look(pull, is_new=True)
        return [*actions, *self._refuse_hopeless(pull)] if pull.ticket in self._pulls else actions

    def _look(self, pull: Pull, is_new: bool = False) -> list[role.Action]:
        """Lend what is due of a pull; answer it if nothing is owed, else look again when its next shard advances."""
        store = pull.store
        at = np.flatnonzero(pull.owed & self._due(pull))
        actions: list[role.Action] = []
        if is_new and store.is_sync:
            pushed = np.maximum(store.last[pull.rank, pull.shards], store.ordered[pull.shards])
            for place in np.flatnonzero(pull.rounds > pushed).tolist():
                if store.waits_for_itself(int(pull.shards[place]), pull.rank, int(pull.rounds[place])):
                    return self._refuse_own(pull, place)
        if store.failed or store.late:
            for place in at.tolist():
                failure = store.failure(int(pull.shards[place]), pull.rank, int(pull.rounds[place]))
                if failure is not None:
                    return self._fail_pull(pull, failure)
        if len(at):
            pull.owed[at] = False
            np.subtract.at(store.owed[pull.rank], pull.shards[at], 1)
            actions += self._lend(pull, at)
        if not pull.owed.any():
            del self._pulls[pull.ticket]
            deliver = work.Deliver(pull.ticket, pull.link, pull.message, pull.entries, pull.skipped)
            return [*actions, role.Work(deliver, True)]
        shard = int(pull.shards[pull.first_owed()])
        self._waiting.setdefault((store.number, shard), []).append(pull)
        return actions

    def _watch_all(self, rank: int, store: Store, shards: Array) -> None:
        """A worker pushes shards again: if a pull of its own still waits for them, it is looked at after every round.

        Its value is the one of the round before, which may be over in a moment.
        """
        owed = shards[store.owed[rank, shards] > 0]
        for shard in owed.tolist():
            for pull in self._pulls.values():
                if pull.rank == rank and pull.store is store and shard in pull.shards[pull.owed]:
                    watching = self._waiting.setdefault((store.number, shard), [])
                    if pull not in watching:
                        watching.append(pull)

    def _due(self, pull: Pull) -> Array:
        """Return which entries of a pull can be lent."""
        store = pull.store
        if store.is_sync:
            due: Array = pull.rounds <= store.done[pull.shards]
            return due
        due = np.ones(len(pull.shards), np.bool_)
        for at, before in pull.before.items():
            due[at] = before.isdisjoint(store.pending.get(int(pull.shards[at]), ()))
        if store.staleness is not None:
            excused = store.excused()
            # Not itself: a push of its own that was refused would never be counted.
            others = [r for r in range(self._config.workers) if r != pull.rank and r not in self._gone]
            others = [rank for rank in others if rank not in excused]
            if others:
                due &= store.last[np.ix_(np.array(others), pull.shards)].min(axis=0) >= pull.rounds - store.staleness
        return due

    def _lend(self, pull: Pull, at: Array) -> list[role.Action]:
        store = pull.store
        shards = pull.shards[at]
        if not store.is_sync:
            store.seen[pull.rank, shards] = store.updates[shards]
        if store.skipped:
            for shard, number in zip(shards.tolist(), pull.rounds[at].tolist(), strict=True):
                notes = store.skipped.get(shard, {}).get(number)
                if notes is not None:
                    pull.skipped[int(store.key[shard])] = notes
        wanted = pull.entries["codec"][at].astype(np.int64)
        # The first value is never compressed.
        wanted[~np.isin(wanted, (codecs.NONE, codecs.ROWS, checks.HALF)) & store.fresh[shards]] = codecs.NONE
        actions: list[role.Action] = []
        for codec in np.unique(wanted).tolist():
            some = wanted == codec
            params = checks.params_of(pull.message, codec)
            rows = tuple(pull.rows[place] or b"" for place in at[some].tolist()) if codec == codecs.ROWS else ()
            actions.append(role.Work(work.Lend(pull.ticket, store, shards[some], at[some], codec, params, rows)))
        return actions

    def _advanced(self, store: Store, shards: Array) -> list[role.Action]:
        """Shards are farther than before: lend what is due now."""
        if not self._waiting:
            return []
        if len(shards) <= len(self._waiting):
            names = [(store.number, shard) for shard in shards.tolist() if (store.number, shard) in self._waiting]
        else:
            mine = set(shards.tolist())
            names = [name for name in self._waiting if name[0] == store.number and name[1] in mine]
        actions: list[role.Action] = []
        for name in names:
            for pull in self._waiting.pop(name, ()):
                if pull.ticket in self._pulls:
                    actions += self._look(pull)
        return actions

    def _all_advanced(self, store: Store) -> list[role.Action]:
        """Somebody is excused in a whole store."""
        return self._advanced(store, np.arange(store.count))

    def _remind(self, now: float) -> list[role.Action]:
        """Tell workers whom their pulls wait for."""
        actions: list[role.Action] = []
        for pull in self._pulls.values():
            if pull.notice.is_due(now):
                body = {"text": self._waits_for(pull), "seconds": now - pull.notice.since}
                message = Message(Kind.WAITING, store=pull.store.number, request=pull.message.request, body=body)
                actions.append(role.Send(pull.link, message))
        return actions

    def _waits_for(self, pull: Pull) -> str:
        """Return whom a pull waits for, for people: `waiting for worker-1, key w, round 57`."""
        store, at = pull.store, pull.first_owed()
        shard, turn = int(pull.shards[at]), int(pull.rounds[at])
        name = store.name(int(store.key[shard]))
        others = (rank for rank in range(self._config.workers) if rank != pull.rank)
        slow = [] if store.is_sync else store.behind(shard, turn, others, self._gone)
        if slow and store.staleness is not None:
            bound = (turn - store.staleness, store.staleness)
            return "waiting for %s, key %s, push %d (staleness %d)" % (_names(slow), name, *bound)
        if not store.is_sync:
            rank, push = min(pull.before.get(at, set()) & set(store.pending.get(shard, ())))
            return "waiting for the other servers' norms, key %s, push %d of worker-%d" % (name, push, rank)
        number = int(store.ordered[shard])
        if store.halfway[shard]:
            return "waiting for the other servers' norms, key %s, round %d" % (name, number)
        who = _names(store.missing(shard))
        return "waiting for %s, key %s, round %d" % (who or self.me.name, name, number + 1)

    def _refuse_hopeless(self, pull: Pull) -> list[role.Action]:
        """Refuse a pull that waits for a worker that has ended."""
        reason, who = self._hopeless(pull) if self._gone and pull.store.is_sync else ("", "")
        if not reason:
            return []
        return [*self._forget(pull), role.Send(pull.link, refusal(pull.message, reason, "PeerLost", who=who))]

    def _hopeless(self, pull: Pull) -> tuple[str, str]:
        """Return why a pull will never be answered, and the worker that is gone; empty texts: it may be."""
        store = pull.store
        for at in np.flatnonzero(pull.owed).tolist():
            shard, number = int(pull.shards[at]), int(pull.rounds[at])
            for rank in store.missing(shard) if number > store.ordered[shard] else ():
                if rank in self._gone:
                    reason = (
                        "%s has ended (BYE) without pushing round %d of key %r;"
                        " a worker that runs out of data calls kv.join()"
                    ) % (self._gone[rank], int(store.ordered[shard]) + 1, store.names.get(int(store.key[shard])))
                    return reason, "worker-%d" % rank
        return "", ""

    def _fail_pull(self, pull: Pull, failure: Failure) -> list[role.Action]:
        for shard in pull.shards.tolist():
            pull.store.late.get(shard, {}).pop(pull.rank, None)  # one error for all shards
        no = self._refuse(pull.link, pull.message, failure.reason, "RuleError", failure.traceback)
        return [*self._forget(pull), no]

    def _refuse_own(self, pull: Pull, at: int) -> list[role.Action]:
        text = "round %d of key %r cannot come: this worker's own push of it was refused"
        reason = text % (int(pull.rounds[at]), pull.store.name(int(pull.entries["key"][at])))
        return [*self._forget(pull), self._refuse(pull.link, pull.message, reason, "KVError")]

    def _forget(self, pull: Pull) -> list[role.Action]:
        """Owe this pull nothing any more, and take back what was lent to it."""
        if self._pulls.pop(pull.ticket, None) is not None:
            np.subtract.at(pull.store.owed[pull.rank], pull.shards[pull.owed], 1)
        for name, pulls in list(self._waiting.items()):
            if pull in pulls:
                pulls.remove(pull)
                if not pulls:
                    del self._waiting[name]
        return [role.Work(work.Discard(pull.ticket))]

    def _drop_pulls(self, link: role.Link) -> list[role.Action]:
        """A worker's connection is gone: nobody waits for its answers."""
        pulls = [pull for pull in self._pulls.values() if pull.link == link]
        return [action for pull in pulls for action in self._forget(pull)]

    def _drop_all_pulls(self, reason: str = "", who: str = "") -> list[role.Action]:
        """Owe nothing to anybody any more; with a reason, everybody who waits is told, and `who` is lost."""
        actions: list[role.Action] = []
        for pull in list(self._pulls.values()):
            if reason:
                # It may come before the scheduler's word, and whoever asks then who is lost is to be told.
                actions.append(role.Send(pull.link, refusal(pull.message, reason, "PeerLost", who=who)))
            actions += self._forget(pull)
        return actions

    # Norms of whole values

    def _norms_ready(self, store: Store, shard: int, turn: Turn, squares: tuple[float, ...]) -> list[role.Action]:
        """A shard's update waits for norms."""
        shards = store.by_key[turn.key]
        parts = self._norms.mine(turn, shard, int(store.offset[shard]), int(store.length[shard]), squares)
        size = store.size(turn.key)
        length = int(store.length[shards].sum())
        if size is None and len(self._peers):
            text = "the shape of key %r is not known to %s, and the rule needs norms of the whole value"
            self._norms.fail(turn, Failure(text % (store.names.get(turn.key), self.me.name)))
        elif any(_is_past(store, each, turn) for each in shards):
            self._norms.fail(turn, self._other_rule(store, turn))
        actions: list[role.Action] = []
        if len(parts) == len(shards) and size is not None and length < size:
            listed = [[part.offset, part.length, list(part.squares)] for part in parts]
            actions += self._tell(turn, {"parts": listed})
        return [*actions, *self._settle(store, turn)]

    def _heard_norms(self, store: Store | None, message: Message) -> list[role.Action]:
        """Take in the NORMS of another server."""
        body = message.body
        if store is None or int(body["script"]) != self._scripts or int(body["key"]) not in store.by_key:
            return []
        turn = Turn(store.number, int(body["key"]), int(body["rank"]), int(body["round"]))
        is_past = any(_is_past(store, shard, turn) for shard in store.by_key[turn.key])
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

    def _norms_lost(self, reason: str) -> list[role.Action]:
        """The connection to another server is gone: what waits for it fails."""
        actions: list[role.Action] = []
        for turn in self._norms.turns():
            if turn.store in self._stores:
                self._norms.fail(turn, Failure(reason))
                actions += self._settle(self._stores[turn.store], turn)
        return actions

    def _settle(self, store: Store, turn: Turn) -> list[role.Action]:
        """Go on with the shards of ours whose norms are known, or will not be."""
        shards = store.by_key[turn.key]
        size = store.size(turn.key)
        settled = self._norms.settled(turn, int(store.length[shards].sum()) if size is None else size)
        if settled is None:
            return []
        ready, result = settled
        actions: list[role.Action] = []
        if not isinstance(result, Failure):
            self._norms.close(turn)
            return [role.Work(work.Finish(store, shard, turn, result), True) for shard in ready]
        for shard in ready:
            actions.append(role.Work(work.Drop(store, shard, turn)))
            # All of them before anybody is answered: a pull of several shards fails once.
            self._note(store, shard, turn, result)
        for shard in ready:
            actions += self._go_on(store, shard)
        if all(_is_past(store, shard, turn) for shard in shards):
            self._norms.close(turn)
        return actions

    def _fail_others(self, store: Store, turn: Turn, failure: Failure) -> list[role.Action]:
        """Our first half failed: so does the update of the key's other shards, here and elsewhere."""
        size = store.size(turn.key)
        if not store.needs_norms:
            return []
        actions: list[role.Action] = []
        if size is not None and int(store.length[store.by_key[turn.key]].sum()) < size:
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
        return Failure(text % (turn.round, store.names.get(turn.key), self.me.name))

    def _tell(self, turn: Turn, body: Mapping[str, Any]) -> list[role.Action]:
        facts = {"script": self._scripts, "key": turn.key, "rank": turn.rank, "round": turn.round, **body}
        return self._peers.tell(Message(Kind.NORMS, store=turn.store, body=facts))

    # Leaving

    def _joined(self, message: Message) -> list[role.Action]:
        store = self._store(message.store)
        store.joined.add(int(message.body["rank"]))
        actions = self._excused(store)
        if message.body.get("all"):
            store.level()
        return actions

    def _excused(self, store: Store) -> list[role.Action]:
        """Somebody contributes nothing from now on."""
        return [*self._complete_all(store), *self._all_advanced(store)]

    def _store(self, number: int) -> Store:
        return self._stores.setdefault(number, Store(number, self._config.workers))

    def _refuse(self, link: str, message: Message, reason: str, error: str = "KVError", trace: str = "") -> role.Action:
        return role.Send(link, refusal(message, reason, error, trace))


def _by_round(batch: work.Batch, rounds: Array) -> Iterator[tuple[int, work.Batch]]:
    """Yield the rounds that a batch contributes to, each with its part of the batch."""
    first = int(rounds[0])
    if (rounds == first).all():
        yield first, batch
        return
    entries = np.arange(len(batch.shards)) if batch.at is None else batch.at
    for number in np.unique(rounds).tolist():
        some = rounds == number
        part = work.Batch(batch.store, batch.shards[some], batch.message, batch.entries, batch.how, entries[some])
        yield number, part


def _bytes_of(entries: Array) -> int:
    return int(sizes_of(entries).sum())


def _is_past(store: Store, shard: int, turn: Turn) -> bool:
    """Whether an update of a shard is over, for good or ill."""
    if turn.rank == SYNC:
        return bool(store.done[shard] >= turn.round)
    is_pending = (turn.rank, turn.round) in store.pending.get(shard, ())
    return bool(store.last[turn.rank, shard] >= turn.round) and not is_pending


def _words(err: Any) -> str:
    """Return the words of an error; its type if it has none."""
    return str(err) or type(err).__name__


def _names(ranks: Iterable[int]) -> str:
    return ", ".join("worker-%d" % rank for rank in ranks)


def _floats(squares: list[Any]) -> tuple[float, ...]:
    return tuple(float(each) for each in squares)
