"""A server's decisions. It sees descriptors, never the contents of an array.

A message names shards; what it means is decided for all of them at once, from the flat arrays of their store
(`shards.Store`). What is to be done with arrays goes to the engine as work (`role.Work`), in order. The engine reports
when it is done, and what waited for it goes on.

Nothing is done here: `handle` returns actions (`role`), which the node's loop (`loop`) carries out in their order. A
`role.Work` goes to the engine; if it `reports`, `role.WorkDone` comes back as an event, at once or later, and with
`holds` nothing else that arrives on that connection is told before.

Here are the job, what messages say, rules, saved states, and membership. What a push leads to is in `rounds`, what a
pull waits for in `pulls`. What workers of this host push to servers of other hosts goes through `relay`, which can be
left out at first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.contract.facts import duration, listed
from distrun_runtime.ops.partition import Shard
from distrun_runtime.ops.reduce import OPS
from distrun_runtime.protocol.handshake import NodeIdentity, nodes_of
from distrun_runtime.protocol.message import (
    GROUP_STORES,
    NO_ENTRIES,
    Kind,
    Membership,
    Message,
    Payload,
    rows_of,
    sizes_of,
)
from distrun_runtime.ps import checks, role, statefile
from distrun_runtime.ps.counters import Counters, Lags, latest
from distrun_runtime.ps.pulls import Pulls
from distrun_runtime.ps.relay import Relay
from distrun_runtime.ps.replies import answer, failed, refusal
from distrun_runtime.ps.role import Config, ranks_text, tasks_of
from distrun_runtime.ps.rounds import Rounds, words_of
from distrun_runtime.ps.shards import Store, relayed
from distrun_runtime.ps.trace import Recorder


def _open_round(store: Store, message: Message) -> str:
    """Return that a round is open, in words: some workers pushed more often than others; empty: none is."""
    names = _names_in(message)
    for shard in range(store.count):
        key = int(store.key[shard])
        if key in names and store.is_open(shard):
            number = int(store.ordered[shard]) + 1
            pushed = [rank for rank in store.members.ranks if store.contributed(shard, rank, number)]
            return _is_open(number, names[key], pushed, store.missing(shard))
    return ""


def _names_in(message: Message) -> dict[int, Any]:
    """Return the keys that a SAVE or LOAD is about, by their numbers."""
    return {int(pair[0]): pair[-1] for pair in message.body["names" if message.kind is Kind.SAVE else "numbers"]}


def _is_open(number: int, name: Any, pushed: Iterable[int], missing: Iterable[int]) -> str:
    have, have_not = (", ".join(tasks_of(sorted(ranks))) for ranks in (pushed, missing))
    return (
        f"round {number} of key {name!r} is open: {have or 'no worker'} pushed it, {have_not} did not; states are saved"
        " and loaded when all workers have pushed equally often"
    )


def _set_rounds(store: Store | None, rounds: Mapping[int, int]) -> None:
    if store is None:
        return
    store.fresh[: store.count] = True
    store.late.clear()
    for shard in range(store.count):
        number = rounds.get(int(store.key[shard]))
        if number is not None:
            store.set_round(shard, number)


def _table_of(work: role.EngineWork) -> Store | None:
    """Return the table of the shards that work is about; None: it is about a rule, or about a whole store."""
    found = getattr(getattr(work, "batch", work), "store", None)
    return found if isinstance(found, Store) else None


BYE_S = 2.0
"""How long a server that was told to stop waits for the scheduler's answer. The scheduler may be frozen."""


KEPT_S = 0.2
"""How long messages are kept. Whom their round waits for is told later."""
_CLOSED = 0
"""In place of the number of a store that is closed: no store has this one."""


@dataclass(frozen=True, eq=False)
class _Bucket:
    """Entries that a worker does not name again."""

    entries: Array
    """With the rounds of the bucket's step 0."""
    shards: Array
    fits: bool
    """Whether they are plain, and fit their shards; that cannot change, so it is looked at once."""
    size: int
    """Bytes of the elements."""


class UndecidedMessage(Protocol):
    """A push or pull of plain values with which nothing is wrong."""

    @property
    def now(self) -> float:
        """When it came."""

    def decided_by(self, accept: Callable[[str, int, role.Batch], list[role.Action]]) -> list[role.Action]:
        """Return what follows from it; `accept` decides, by link, rank and what the message is about."""


class Server:
    """A server's decisions."""

    def __init__(
        self, config: Config, endpoint: str, counters: Counters | None = None, recorder: Recorder | None = None
    ) -> None:
        self.me = config.identity(endpoint)
        self._config = config
        self._counters = counters or Counters()
        self.pulls = Pulls(lambda: self.me)
        self._rounds = Rounds(lambda: self.me, self._counters, self.pulls)
        self._relay = Relay(lambda: self.me, config.workers, self._rounds.peers, self.pulls)
        self._recorder = recorder or Recorder()
        self._held: list[Message] = []
        """SAVE and LOAD that wait until no update of their store is under way."""
        self._nodes: set[tuple[str, int]] = set()
        self._stores: dict[int, Store] = {}
        self._ranks: dict[str, int] = {}
        """Links of workers, to their ranks."""
        self._servers: set[str] = set()
        """Links that other servers opened."""
        self.gone: set[str] = set()
        """Links that have ended, until `ps.steady` has forgotten them."""
        self._buckets: dict[tuple[int, int, int], _Bucket] = {}
        """By rank, store and bucket."""
        self._lags: dict[int, Lags] = {}
        """By the number of the store; those of stores for which this server is a relay are negative. That of the
        closed store that had a round last is kept."""
        self._over_rounds = 0
        """Rounds of the stores that are closed."""
        self._now = 0.0
        self.kept: dict[int, UndecidedMessage] = {}
        """What came of open rounds, and is not decided on yet (`ps.steady`), in order."""
        self.version = 0
        """Rises with every event: while it has not risen, only messages were taken in that are known (`ps.steady`,
        which looks by itself what these have changed)."""
        self._is_registered = False
        self._is_stopping = False
        self._failing = ""
        """Why this process cannot go on."""
        self._deadline = role.Deadline()
        self._farewell = role.Deadline()

    def start(self, now: float) -> list[role.Action]:
        """Register with the scheduler."""
        self._deadline.set(now + self._config.start_timeout_s)
        return [role.Connect(role.SCHEDULER_LINK, self._config.root_endpoint)]

    def admit(self, peer: NodeIdentity) -> str:
        """Return why `peer` may not connect: only workers and servers of this job do."""
        if peer.job != self.me.job:
            return f"{peer} belongs to job {peer.job!r}, {self.me.name} to job {self.me.job!r}"
        if self._nodes and (peer.role, peer.rank) not in self._nodes:
            return f"{peer} is not in this job's roster"
        return ""

    def handle(self, event: role.Event, now: float) -> list[role.Action]:
        """Take in one event."""
        return [*self._decide_kept(), *self._handle(event, now)]

    def _handle(self, event: role.Event, now: float) -> list[role.Action]:
        self._now = now
        self.version += 1
        if self._failing and not isinstance(event, role.Failing):
            return self._while_failing(event)
        match event:
            case role.WorkDone():
                return self._done(event)
            case role.MessageReceived(role.SCHEDULER_LINK, message):
                return self._from_scheduler(message)
            case role.MessageReceived(link, message):
                return self._from_peer(link, message)
            case role.Welcomed():
                return self._welcomed(event)
            case role.TurnedAway(role.SCHEDULER_LINK, reason):
                return [role.Finish(1, f"the scheduler refused {self.me.name}: {reason}")]
            case role.TurnedAway():
                return self._lost_peer(event)
            case role.Broken():
                return self._broken(event)
            case role.SignalReceived(number):
                told = role.Publish({"told": role.signal_name(number)})
                return [told, *self._leave(f"signal {number}", now)]
            case role.Failing(reason):
                return self._fail(reason)
        return []

    def tick(self, now: float) -> list[role.Action]:
        """Tell workers whom their pulls wait for."""
        if self._failing:
            return [role.Finish(1, self._failing)] if self._farewell.is_due(now) else []
        if self._farewell.is_due(now):
            return [role.Finish(0, f"the scheduler did not answer BYE for {BYE_S:g} s")]
        if self._deadline.is_due(now):
            waited = duration(self._config.start_timeout_s)
            return [role.Finish(1, f"the scheduler at {self._config.root_endpoint} did not answer for {waited}")]
        oldest = next(iter(self.kept.values()), None)
        actions = [] if oldest is None or now < oldest.now + KEPT_S else self._decide_kept()
        if self._held:
            held, self._held = self._held, []
            actions += (action for message in held for action in self._states(message))
        if self._relay.stores:
            actions += self._relay.tick(now)
        return [*actions, *self.pulls.remind(now)]

    def counters(self) -> dict[str, float]:
        """Return what the agent is told (`metrics`)."""
        stores = [store for store in self._stores.values() if store.count]
        return {
            "keys": sum(len(store.by_key) for store in stores),
            "bytes": sum(store.bytes for store in stores),
            "rounds": self._over_rounds + sum(int(store.changed_rounds().max()) for store in stores),
            "waiting": self.pulls.count,
            **self._counters.to_metrics(),
        }

    def lags(self) -> Mapping[str, Any]:
        """Return how late workers contribute (`metrics.Lags`): each to the store of its that had a round last."""
        found: dict[str, list[float]] = {}
        known: set[int] = set()
        for lags in sorted(self._lags.values(), key=lambda each: each.over_at, reverse=True):
            its = {} if known.issuperset(lags.members) else lags.to_json()
            if its:
                found.update({rank: each for rank, each in its.items() if int(rank) not in known})
                known.update(lags.members)
        return latest(found)

    def devices(self) -> Mapping[str, str]:
        """Return where the stores' arrays are, and why not on a GPU, as the agent is told (`metrics`)."""
        stores = [store for store in self._stores.values() if store.count]
        names = dict.fromkeys(store.device for store in stores)
        why = dict.fromkeys(store.why_host for store in stores if store.why_host)
        return {"device": ", ".join(names), **({"device_why": "; ".join(why)} if why else {})} if names else {}

    # The job

    def _welcomed(self, event: role.Welcomed) -> list[role.Action]:
        if event.link == role.SCHEDULER_LINK:
            self._deadline.at = None
            self._is_registered = True
            return [role.Log("INFO", f"event=registered scheduler={self._config.root_endpoint}")]
        if event.peer is None:
            return []  # a server that we called
        if event.peer.role == "server":
            self._servers.add(event.link)
        else:
            self._ranks[event.link] = event.peer.rank
        return [role.Log("INFO", f"event=connected node={event.peer.name} host={event.peer.host}")]

    def _broken(self, event: role.Broken) -> list[role.Action]:
        if event.link == role.SCHEDULER_LINK:
            if self._is_stopping:
                return [role.Finish(0)]
            text = f"the scheduler at {self._config.root_endpoint} is lost: {event.reason}"
            # A worker may see the end of this server before that of the scheduler.
            lost = Message(Kind.LOST, body={"who": role.SCHEDULER_LINK, "reason": text})
            told = [role.Send(link, lost) for link in self._ranks]
            return [role.Publish({"lost_peer": "scheduler", "message": text}), *told, role.Finish(1, text)]
        # The scheduler judges deaths; here the worker's open requests are forgotten.
        self._servers.discard(event.link)
        self._ranks.pop(event.link, None)
        self.gone.add(event.link)
        return [*self.pulls.drop(event.link), *self._lost_peer(event)]

    def _lost_peer(self, event: role.Broken | role.TurnedAway) -> list[role.Action]:
        """A connection that we opened to another server has ended.

        What went that way is lost, and workers would wait for it for ever. So the scheduler is told even if the other
        server lives: it tells all nodes.
        """
        endpoint = self._rounds.peers.lost(event.link)
        if self._is_stopping or not endpoint:
            return []
        reason = f"{self.me} lost its connection to {event.link} ({endpoint}): {event.reason}"
        lost = Message(Kind.LOST, body={"who": event.link, "reason": reason})
        return [role.Log("INFO", f"event=lost-peer {reason}"), role.Send(role.SCHEDULER_LINK, lost)]

    def _from_scheduler(self, message: Message) -> list[role.Action]:
        match message.kind:
            case Kind.RULE | Kind.SAVE | Kind.LOAD | Kind.JOIN | Kind.LEFT if self._is_unknown(message.store):
                return [self._refuse(role.SCHEDULER_LINK, message, f"{self.me.name} knows no store {message.store}")]
            case Kind.BYE if message.is_reply:
                return [role.Finish(0, "told to stop")]
            case Kind.ROSTER:
                return self._roster(message)
            case Kind.OPEN:
                return self._open(message)
            case Kind.RULE if message.body.get("check"):
                return [role.Work(role.TryRule(message.store, message.body["spec"], message), reports=True)]
            case Kind.RULE:
                self._store(message.store)
                return [role.Work(role.SetRule(message.store, message.body["spec"], message), reports=True)]
            case Kind.LOAD if message.body["action"] != "stage":
                return [role.Work(role.Load(message.store, message), reports=True)]
            case Kind.SAVE | Kind.LOAD:
                return self._states(message)
            case Kind.JOIN:
                return [*self._joined(message), role.Send(role.SCHEDULER_LINK, answer(message))]
            case Kind.LEFT if message.request:
                rank = int(message.body["rank"])
                for store in self._tables(message.store):
                    store.left.add(rank)
                return [*self._excused(message.store), role.Send(role.SCHEDULER_LINK, answer(message))]
            case Kind.LEFT:
                hopeless = self.pulls.ended(message.body["rank"], message.body["who"])
                advanced = (action for store in self._stores.values() for action in self.pulls.all_advanced(store))
                return [*hopeless, *advanced]
            case Kind.LOST:
                return self._lost(message)
            case Kind.STOP if not message.body.get("stay"):
                self._is_stopping = True
                who, reason = str(message.body.get("who", "")), str(message.body.get("reason", ""))
                early = [role.Publish({"lost_peer": who, "message": reason})] if who else []
                return [*early, role.Finish(int(message.body.get("code", 0)), reason)]
            case Kind.CLOSE | Kind.STOP:
                return [role.Work(role.Clear(message), reports=True)]
        return []

    def _roster(self, message: Message) -> list[role.Action]:
        nodes = nodes_of(message.body["nodes"])
        self._nodes = {(node.role, node.rank) for node in nodes}
        self.me = self._config.identity(self.me.endpoint, message.body["rank"])
        self._rounds.peers.learn(nodes, self.me.rank)
        stands_in = self._relay.learn(nodes) if message.body.get("host_sums") else []
        lines = [f"event=roster node={who.name} host={who.host} endpoint={who.endpoint}" for who in nodes]
        # The workers are told next, and expect that this server knows them.
        answered = role.Send(role.SCHEDULER_LINK, answer(message))
        return [*(role.Log("INFO", line) for line in lines), *stands_in, answered]

    def _open(self, message: Message) -> list[role.Action]:
        """Workers have created a store that they share with no others."""
        members = Membership(tuple(map(int, message.body["members"])), int(message.body["epoch"]))
        number = message.store
        known = self._stores.get(number)
        if known is not None and known.members != members:
            text = f"{self.me.name} has store {number} of the workers {ranks_text(known.members.ranks)} already"
            return [self._refuse(role.SCHEDULER_LINK, message, text)]
        if known is None:
            self._stores[number] = Store(number, self._config.workers, self.me.rank, members)
        return [role.Send(role.SCHEDULER_LINK, answer(message))]

    def _lost(self, message: Message) -> list[role.Action]:
        who, reason = str(message.body["who"]), str(message.body["reason"])
        told = role.Publish({"lost_peer": who, "message": reason})
        if not self._nodes:
            return [told, role.Finish(1, reason)]  # registration failed; the reason says who was missing
        rank = role.worker_rank(who)
        if rank is None:
            self._rounds.stop()
        return [told, *self.pulls.drop_all(reason, who, rank)]

    def _cleared(self, what: role.Clear) -> list[role.Action]:
        """The engine has forgotten the script that is over, or a store that is closed; so do we.

        What follows from earlier work has been decided and done before (`role.ALONE`).
        """
        told = role.Send(role.SCHEDULER_LINK, answer(what.message))
        if what.store is not None:
            return [*self._forget(what.store), told]
        forgotten = self.pulls.clear()
        self._rounds.clear()
        self._relay.clear()
        self._nodes, self._stores, self._buckets, self._lags = set(), {}, {}, {}
        self._over_rounds = 0
        self._held.clear()
        self._counters.reset()
        if self._recorder.is_on:
            self._recorder.stop("")
        return [*forgotten, told]

    def _forget(self, number: int) -> list[role.Action]:
        """Forget a store that all its workers have closed: what they asked for was answered."""
        mine = self._stores.pop(number, None)
        others = self._relay.forget(number)
        self._rounds.forget(number)
        self._buckets = {name: bucket for name, bucket in self._buckets.items() if name[1] not in (number, -number)}
        lags = [self._lags.pop(each, None) for each in (_CLOSED, number, relayed(number))]
        self._lags.update({_CLOSED: max(filter(None, lags), key=lambda each: each.over_at)} if any(lags) else {})
        self._over_rounds += 0 if mine is None or not mine.count else int(mine.changed_rounds().max())
        waiting = [message for message in self._held if message.store == number]
        self._held = [message for message in self._held if message.store != number]
        text = f"{self.me.name} knows no store {number}"
        known = [store for store in (mine, others) if store is not None]
        return [
            *(self._refuse(role.SCHEDULER_LINK, message, text) for message in waiting),
            *(action for store in known for action in self.pulls.drop_store(store)),
        ]

    def _leave(self, reason: str, now: float) -> list[role.Action]:
        """Say BYE, and end when the scheduler has answered: it must not take our end for a death."""
        if self._is_stopping or not self._is_registered:
            return [role.Finish(0, reason)]
        self._is_stopping = True
        self._farewell.set(now + BYE_S)
        return [role.Send(role.SCHEDULER_LINK, Message(Kind.BYE))]

    def _fail(self, reason: str) -> list[role.Action]:
        """This process cannot go on: tell the scheduler why, and so all nodes; then end.

        Who has a connection to this server is told on that one, too: else its end may be seen before the scheduler's
        word of the reason comes.
        """
        self._failing = reason
        told = [role.Publish({"failed": f"{self.me.name}: {reason}"})]
        if not self._is_registered or self._is_stopping:
            return [*told, role.Finish(1, reason)]
        self._farewell.set(self._now + BYE_S)
        body = {"who": self.me.name, "host": self.me.host, "reason": f"{self.me} failed: {reason}"}
        lost = Message(Kind.LOST, body=body)
        return [
            *told,
            *(role.Send(link, lost) for link in (*self._ranks, *sorted(self._servers))),
            role.Send(role.SCHEDULER_LINK, Message(Kind.ABORT, body={"reason": reason})),
        ]

    def _while_failing(self, event: role.Event) -> list[role.Action]:
        """The scheduler has heard of it, or is gone itself: end. Nothing else is done any more."""
        match event:
            case role.MessageReceived(_, Message(kind=Kind.ABORT, is_reply=True)):
                return [role.Finish(1, self._failing)]
            case role.Broken(role.SCHEDULER_LINK) | role.TurnedAway(role.SCHEDULER_LINK):
                return [role.Finish(1, self._failing)]
        return []

    # Requests of workers and other servers

    def _from_peer(self, link: str, message: Message) -> list[role.Action]:
        self._counters.bytes_in += message.size
        if link in self._rounds.peers.called:
            is_end = message.kind is Kind.LOST and message.body.get("who") == link
            return self._lost(message) if is_end else self._relay.heard(message)
        if message.is_reply:
            return []
        if link in self._servers:
            if message.kind is Kind.NORMS:
                return self._rounds.heard_norms(self._stores.get(message.store), message)
            return self._from_relay(link, message)
        rank, known = self._ranks.get(link), self._stores.get(message.store)
        if known is not None and message.epoch != known.members.epoch:
            return [self._refuse(link, message, f"store {message.store} is another one since this was sent")]
        if known is not None and rank is not None and rank not in known.members.places:
            return [self._refuse(link, message, f"worker-{rank} does not share store {message.store}")]
        match message.kind:
            case _ if rank is None:
                return []
            case Kind.SETTLE:
                return self._relay.settle(link, rank, message)
            case Kind.INIT if self._is_unknown(message.store):
                return [self._refuse(link, message, f"{self.me.name} knows no store {message.store}")]
            case Kind.INIT:
                if message.is_relayed:
                    return self._relay.declare(link, message, self._store(message.store).members)
                return self._init(link, message)
            case Kind.STATS:
                return [role.Send(link, answer(message, self._stats(message.store)))]
            case Kind.PROFILE:
                return [role.Send(link, self._profile(message))]
            case Kind.RELEASE:
                return [role.Work(role.Release(link, message), reports=True)]
        wrong = self._relay.against(rank) if message.is_relayed else ""
        if wrong:
            return [self._refuse(link, message, wrong)]
        store = self._relay.store(message.store) if message.is_relayed else known
        if store is None:
            return [self._refuse(link, message, f"store {message.store} has no keys on {self.me.name}")]
        match message.kind:
            case Kind.PUSH | Kind.PULL | Kind.PUSHPULL:
                return self._data(link, rank, store, message)
            case Kind.ROUNDS:
                return [role.Send(link, answer(message, {"rounds": store.rounds(store.done)}))]
            case kind:
                return [self._refuse(link, message, f"{self.me.name} knows no {kind.name}")]

    def _from_relay(self, link: str, message: Message) -> list[role.Action]:
        """Take in what another server sends for the workers of its host: a sum of their contributions, or a pull."""
        store, ranks = self._stores.get(message.store), [int(rank) for rank in message.body.get("ranks", ())]
        is_closed = store is None or store.members.epoch != message.epoch
        if store is None or is_closed or message.kind not in (Kind.PUSH, Kind.PULL):
            text = f"{self.me.name} expects no such {message.kind.name}"
            return [role.Send(link, refusal(message, text, closed=is_closed))]
        entries, shards = message.entries, store.find(message.entries)
        rounds = entries["round"].astype(np.int64)
        wrong = checks.against_ranks(message, ranks, store.members.ranks)
        wrong = wrong or checks.against(store, message, entries, shards, self.me.name)
        is_push = message.kind is Kind.PUSH
        if not wrong and (not store.is_sync or entries["codec"].any()):
            wrong = "only plain values of synchronous stores are added on a host"
        if not wrong and is_push:
            wrong = self._rounds.against_sum(ranks, store, shards, rounds)
        if wrong:
            return [self._refuse(link, message, wrong)]
        batch = role.Batch(store, shards, message, entries)
        if is_push:
            self._counters.pushes += 1
            self.sample(ranks, batch, rounds, self._now)
            pushed = self._rounds.push(link, ranks, batch, int(message.body["first"]))
            return [*pushed, role.Send(link, answer(message))]
        self._counters.pulls += 1
        return self.pulls.take(link, tuple(ranks), batch, self._now, message.body.get("own"))

    def _data(self, link: str, rank: int, store: Store, message: Message) -> list[role.Action]:
        missed = self._missed(rank, store, message)
        if missed:
            return [role.Send(link, refusal(message, missed, again=True))]
        entries, shards, wrong, is_plain = self._entries(rank, store, message)
        if message.bucket and len(message.entries) and (shards >= 0).all():
            # Entries that travelled name the rounds of the bucket's step 0. Also if the push is refused: later ones
            # that name the bucket are on their way, and each is to hear why it is refused.
            fits = checks.fit(store, entries, shards)
            self._buckets[rank, store.number, message.bucket] = _Bucket(
                entries, shards, fits, int(sizes_of(entries).sum())
            )
        wrong = wrong or checks.against(store, message, entries, shards, self.me.name, is_plain=is_plain)
        is_push = message.kind is not Kind.PULL
        if not wrong and store.is_relayed and entries["codec"].any():
            wrong = "only plain values are added on a host"
        if not wrong and not store.is_sync and message.kind is Kind.PUSHPULL:
            wrong = "PUSHPULL is for synchronous stores"
        if not wrong and is_push and not store.is_sync and not store.has_rule:
            wrong = (
                "dist_async needs a rule on the servers: call kv.set_optimizer('sgd', learning_rate=...) before push"
            )
        if wrong:
            return self._refuse_data(link, rank, store, message, entries=entries, wrong=wrong)
        batch = role.Batch(store, shards, message, entries, checks.how(message, entries))
        if message.payloads and entries["codec"].any() and np.isin(entries["codec"], tuple(checks.READ_FIRST)).any():
            return [role.Work(role.Check(link, rank, batch), reports=True, holds=link)]
        return self._accept(link, rank, batch)

    def _missed(self, rank: int, store: Store, message: Message) -> str:
        """Return why a message has to be sent again; empty: it does not.

        A worker names a bucket when its message with the bucket's entries has left, not when that was answered. If that
        message was refused for a shard that is not here, the bucket is not known, and may be of any keys. So what the
        worker sends behind such a message has to come again as well, in its order: nothing of it is done before.
        """
        expected = store.again.get(rank)
        if expected and expected[0] == message.request:
            expected.popleft()  # Again, and in its turn; what is wrong with it now is an error.
            return ""
        if expected:
            wrong = f"{self.me.name} expects an earlier message of worker-{rank} again first"
        elif len(message.entries) or not message.bucket or (rank, store.number, message.bucket) in self._buckets:
            return ""
        else:
            wrong = f"bucket {message.bucket} is not known to {self.me.name}"
        store.again.setdefault(rank, deque()).append(message.request)
        return wrong

    def _entries(self, rank: int, store: Store, message: Message) -> tuple[Array, Array, str, bool]:
        """Return the entries of a message, their shards (-1: there is none), what is wrong with its bucket, and
        whether the entries are known to fit."""
        if len(message.entries) or not message.bucket:
            return message.entries, store.find(message.entries), "", False
        known = self._buckets.get((rank, store.number, message.bucket))
        if known is None:  # `_missed` had it sent again, and it does not name its entries this time either.
            unknown = f"bucket {message.bucket} is not known to {self.me.name}"
            return NO_ENTRIES, store.find(NO_ENTRIES), unknown, False
        entries = known.entries.copy()
        entries["round"] += np.uint64(message.step)
        is_push = message.kind is not Kind.PULL
        if is_push and message.size != known.size:
            others = f"bucket {message.bucket} has {known.size} bytes, the message brings others"
            return entries, known.shards, others, False
        entries["payload"] = Payload.PACKED if is_push else Payload.NONE
        return entries, known.shards, "", known.fits and (is_push or not message.payloads)

    def _refuse_data(
        self, link: str, rank: int, store: Store, message: Message, *, entries: Array, wrong: str
    ) -> list[role.Action]:
        others = self._rounds.refused(store, rank, entries, wrong) if message.kind is not Kind.PULL else []
        return [self._refuse(link, message, wrong), *others]

    def _accept(self, link: str, rank: int, batch: role.Batch) -> list[role.Action]:
        """Do what nothing is wrong with."""
        kind, store = batch.message.kind, batch.store
        actions: list[role.Action] = []
        if kind is not Kind.PULL:
            self._counters.pushes += 1
            if not store.is_sync:
                return [role.Work(role.Step(link, rank, batch), reports=True, holds=link)]
            self.sample((rank,), batch, batch.entries["round"], self._now)
            actions += self._relay.push(rank, batch) if store.is_relayed else self._rounds.push(link, (rank,), batch)
            if kind is Kind.PUSH:
                return [*actions, role.Send(link, answer(batch.message))]
            # The answer to both is that to the pull. It must not keep what was pushed.
            told = Message(**{**vars(batch.message), "payloads": ()})
            batch = role.Batch(store, batch.shards, told, batch.entries)
        self._counters.pulls += 1
        if store.is_relayed:
            return [*actions, *self._relay.pull(link, rank, batch, self._now)]
        return [*actions, *self.pulls.take(link, (rank,), batch, self._now, rank)]

    def lags_of(self, batch: role.Batch) -> Lags | None:
        """Return what notes when contributions come, if it is noted of these; None: it is not. It is of one shard of a
        store: the first that was ever pushed."""
        store, shard = batch.store, batch.shards.item(0) if len(batch.shards) else -1
        lags = self._lags.get(store.number)
        if lags is None and shard >= 0:
            lags = self._lags[store.number] = Lags(shard, store.members.ranks)
        return None if lags is None or shard != lags.shard else lags

    def sample(self, ranks: Sequence[int], batch: role.Batch, rounds: Array | Sequence[int], now: float) -> None:
        """Note when contributions come."""
        store, lags = batch.store, self.lags_of(batch)
        if lags is not None and lags.wants(int(rounds[0]), now):
            members = store.members.ranks
            if store.is_relayed:
                members = self._relay.stores[relayed(store.number)].members
            excused = len(store.excused().intersection(members)) if store.joined or store.left else 0
            lags.contributed(ranks, int(rounds[0]), len(members) - excused, now)

    # Messages that come again and again (`ps.steady`)

    def _decide_kept(self) -> list[role.Action]:
        """Decide on what is kept."""
        if not self.kept:
            return []
        kept = [*self.kept.values()]
        self.kept.clear()
        self.version += 1
        actions: list[role.Action] = []
        for each in kept:
            self._now = each.now
            actions += each.decided_by(self._accept)
        return actions

    def plain(self, link: str, message: Message) -> tuple[int, role.Batch, object] | None:
        """Return whose push or pull of plain values it is, what it is about, and the bucket that it names, if it does;
        None: it is no such message, or something is wrong with it."""
        rank, store = self._ranks.get(link, -1), self._stores.get(message.store)
        is_other = message.is_reply or message.is_error or message.is_relayed or bool(message.body)
        if store is None or is_other or rank not in store.members.places or message.epoch != store.members.epoch:
            return None
        entries, shards, wrong, is_plain = self._entries(rank, store, message)
        wrong = wrong or checks.against(store, message, entries, shards, self.me.name, is_plain=is_plain)
        is_named = bool(message.bucket)
        is_listed = is_named == bool(len(message.entries)) or len(np.unique(shards)) < len(shards)
        if wrong or not len(entries) or is_listed or entries["codec"].any():
            return None
        batch = role.Batch(store, shards, replace(message, payloads=()), entries)  # what was pushed is not kept
        return rank, batch, self._buckets.get((rank, store.number, message.bucket))

    def is_named(self, rank: int, batch: role.Batch, bucket: object) -> bool:
        """Whether the number that a message gives is still this bucket's."""
        return self._buckets.get((rank, batch.store.number, batch.message.bucket)) is bucket

    def is_usual(self, link: str, rank: int, batch: role.Batch, bucket: object) -> bool:
        """Whether `plain` still returns these, and nothing unusual is under way in the store, but for single shards."""
        store = batch.store
        is_here = self._stores.get(store.number) is store and self._ranks.get(link) == rank
        is_here = is_here and self.is_named(rank, batch, bucket) and not self.pulls.has_ended(store.members.ranks)
        return is_here and store.is_usual and not self._failing and not self._rounds.waits_for_norms

    def _init(self, link: str, message: Message) -> list[role.Action]:
        store = self._store(message.store)
        shards = store.find(message.entries)
        if message.body.get("delete"):
            # What is not here was deleted before, by a call that came to no end.
            here = shards >= 0
            batch = role.Batch(store, shards[here], message, message.entries[here])
            wrong = checks.against_delete(store, batch.shards)
            return [self._refuse(link, message, wrong) if wrong else role.Work(role.Forget(batch, link), reports=True)]
        store.names.update({int(number): name for number, name in message.body.get("names", [])})
        if wrong := checks.against_init(store, message, shards):
            return [self._refuse(link, message, wrong)]
        if message.body.get("assign"):
            store.fresh[shards] = True
            batch = role.Batch(store, shards, message, message.entries)
            return [role.Work(role.Assign(batch, link), reports=True)]
        return [role.Work(role.TryFill(link, store, message), reports=True)]

    def _fill(self, link: str, store: Store, message: Message) -> list[role.Action]:
        """Take in new keys. All work before is done, and nothing is decided until it is known whether their values have
        found a place: what is taken back if not are the last shards of the store."""
        wrong = checks.against_init(store, message, store.find(message.entries))
        if wrong:  # others gave it keys while the work before was done
            return [self._refuse(link, message, wrong)]
        rows = rows_of(message.entries)
        new = [
            Shard(self.me.rank, each.offset, each.length, each.key, each.dtype, checks.row_size_of(message, each))
            for each in rows
        ]
        batch = role.Batch(store, store.add(new), message, message.entries)
        ops = message.body.get("ops", {})
        store.op[batch.shards] = [OPS.index(ops.get(str(each.key), "sum")) for each in rows]
        store.is_sync = "async" not in str(message.body.get("type", ""))
        store.on_devices = bool(message.body.get("on_devices"))
        store.is_deterministic = bool(message.body.get("deterministic"))
        store.staleness = message.body.get("staleness")
        for entry in rows:
            shape = checks.shape_of(message, entry)
            if shape is not None:
                store.shapes[entry.key] = shape
        return [role.Work(role.Fill(batch, link), reports=True)]

    # Rules, saved states, counters and profiles

    def _states(self, message: Message) -> list[role.Action]:
        open_here = self._relay.open_round(message.store, _names_in(message))
        if open_here is not None:
            return [role.Send(role.SCHEDULER_LINK, refusal(message, _is_open(*open_here)))]
        store = self._stores.get(message.store)
        if store is not None and (store.pending or (store.ordered > store.done).any()):
            # An update waits for norms of other servers; they are on their way.
            self._held.append(message)
            return []
        wrong = _open_round(store, message) if store is not None and store.is_sync else ""
        if wrong:
            return [role.Send(role.SCHEDULER_LINK, refusal(message, wrong))]
        me = self.me
        body = {**message.body, "file": statefile.server_file(me.rank), "host": me.host}
        kind = role.Save if message.kind is Kind.SAVE else role.Load
        return [role.Work(kind(message.store, replace(message, body=body)), reports=True)]

    def _stats(self, number: int) -> dict[str, object]:
        store = self._stores.get(number)
        is_used = store is not None and store.count > 0
        return {
            "server": self.me.name,
            "host": self.me.host,
            "keys": len(store.by_key) if store is not None else 0,
            "pieces": store.count if store is not None else 0,
            "rounds": int(store.changed_rounds().max()) if store is not None and is_used else 0,
            "queue": self.pulls.of_store(number),
            "device": "" if store is None else store.device,
            **self._counters.to_json(),
        }

    def _profile(self, message: Message) -> Message:
        me = self.me
        action = message.body["action"]
        if action == "start":
            if self._recorder.is_on:
                return refusal(message, f"{me.name} on host {me.host} is being profiled already")
            self._recorder.start()
            return answer(message)
        if not self._recorder.is_on:
            return refusal(message, f"{me.name} on host {me.host} is not being profiled")
        return answer(message, {"events": self._recorder.stop(f"{me.name}@{me.host}")})

    # What the engine reports

    def _done(self, event: role.WorkDone) -> list[role.Action]:
        """Go on with what waited for work: one case for each kind that reports."""
        match event.work:
            case role.Clear() as what:
                return self._cleared(what)
            case role.Deliver():
                return []  # The loop has sent the reply (`engine.Reply`).
            case what if self._is_over(_table_of(what)):
                return []
            case (role.Fill() | role.Assign() | role.Forget()) as what if what.link:
                return self._filled(what, event)
            case role.Forget() as what:
                what.batch.store.forget(what.batch.shards)
                return []
            case role.Reserve() | role.Forward() | role.Add() | role.Lend() | role.Assign():
                return self._relay.worked(event)
            case role.Apply(store=store) if store.is_relayed:
                return self._relay.worked(event)
            case role.Apply() as what:
                return self._rounds.applied(what, event)
            case role.Step() as what:
                return self._rounds.stepped(what, event)
            case role.FinishUpdate() as what:
                return self._rounds.finished(what, event)
            case role.Check(link, rank, batch) if event.error is not None:
                wrong = words_of(event.error)
                return self._refuse_data(link, rank, batch.store, batch.message, entries=batch.entries, wrong=wrong)
            case role.Check(link, rank, batch):
                return self._accept(link, rank, batch)
            case role.TryFill(link, _, message) if event.error is not None:
                return [role.Send(link, failed(message, event))]
            case role.TryFill(link, store, message):
                return self._fill(link, store, message)
            case role.Release(link, message):
                return [role.Send(link, answer(message) if event.error is None else failed(message, event))]
            case role.TryRule() | role.SetRule() | role.Save() | role.Load() as what:
                return self._scheduled(what, event)
        raise AssertionError(f"{event.work} reports nothing")

    def _is_over(self, store: Store | None) -> bool:
        """Whether a store that work was about is closed, or its script is over."""
        if store is None:
            return False
        number = store.number
        return (self._relay.store(relayed(number)) if store.is_relayed else self._stores.get(number)) is not store

    def _scheduled(
        self, what: role.TryRule | role.SetRule | role.Save | role.Load, event: role.WorkDone
    ) -> list[role.Action]:
        """The engine has done work that the scheduler asked for."""
        message = what.message
        if event.error is not None:
            return [role.Send(role.SCHEDULER_LINK, failed(message, event))]
        body: dict[str, Any] = {}
        follows: list[role.Action] = []
        match what:
            case role.SetRule() if (store := self._stores.get(what.store)) is not None:
                store.has_rule, store.needs_norms = what.spec is not None, bool(event.value)
            case role.Save():
                known = self._stores.get(what.store)
                is_sync = known is not None and known.is_sync
                body = {**event.value, "rounds": known.rounds(known.changed_rounds()) if known and is_sync else []}
            case role.Load() if message.body["action"] == "commit":
                rounds = {int(number): int(done) for number, done in message.body.get("rounds", ())}
                _set_rounds(self._stores.get(what.store), rounds)
                follows = self._relay.loaded(what.store, rounds)
        return [role.Send(role.SCHEDULER_LINK, answer(message, body)), *follows]

    def _filled(self, what: role.Fill | role.Assign | role.Forget, event: role.WorkDone) -> list[role.Action]:
        message, store = what.batch.message, what.batch.store
        if event.error is None:
            told: role.Action = role.Send(what.link, answer(message))
            if isinstance(what, role.Forget):
                store.forget(what.batch.shards)
                self._lags.pop(store.number, None)  # it may have been of one of them
        else:
            names = [repr(store.name(key)) for key in np.unique(store.key[what.batch.shards]).tolist()]
            text = f"{self.me.name} cannot take the values of key {listed(names, 3)}: {words_of(event.error)}"
            told = self._refuse(what.link, message, text)
        if isinstance(what, role.Fill) and event.error is not None:
            store.take_back(what.batch.shards)
        return [told]

    # Members

    def _joined(self, message: Message) -> list[role.Action]:
        for store in self._tables(message.store):
            store.joined.add(int(message.body["rank"]))
        actions = self._excused(message.store)
        for store in self._tables(message.store) if message.body.get("all") else ():
            store.level()
        return actions

    def _tables(self, number: int) -> list[Store]:
        """Return what is known of a store: its shards here, and those of servers for which this one is a relay."""
        others = self._relay.store(number)
        return [self._store(number), *([] if others is None else [others])]

    def _excused(self, number: int) -> list[role.Action]:
        """A worker contributes nothing from now on."""
        store = self._store(number)
        return [
            *self._rounds.complete_all(store),
            *self.pulls.all_advanced(store),
            *self._relay.excused(number),
        ]

    def _is_unknown(self, number: int) -> bool:
        """Whether a number is that of a group's store that is not known here: not yet, or not any more."""
        return number >= GROUP_STORES and number not in self._stores

    def _store(self, number: int) -> Store:
        store = self._stores.get(number)
        if store is None:
            store = self._stores[number] = Store(number, self._config.workers, self.me.rank)
        return store

    def _refuse(self, link: str, message: Message, reason: str) -> role.Action:
        return role.Send(link, refusal(message, reason))
