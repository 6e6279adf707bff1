"""A server: the job's events, and whose business each is. Pure: it sees descriptors, never the contents of an array.

The unit is a slot (`slots`): one piece of one value of one store. Pushes are the business of `rounds`, pulls that of
`pulls`, all other requests that of `control`. What is to be done with arrays goes to the executor as work, in order;
when it is done the executor says so, and what waited for it goes on.
"""

from __future__ import annotations

from distrun_runtime.contract.duration import duration
from distrun_runtime.protocol.handshake import Identity
from distrun_runtime.protocol.message import DTYPES, Kind, Message
from distrun_runtime.ps import checks, role, work
from distrun_runtime.ps.config import Config
from distrun_runtime.ps.control import Control
from distrun_runtime.ps.counters import Counters
from distrun_runtime.ps.neighbours import Neighbours
from distrun_runtime.ps.profile import Recorder
from distrun_runtime.ps.pulls import Pulls
from distrun_runtime.ps.replies import answer, failed, refusal
from distrun_runtime.ps.roster import from_json
from distrun_runtime.ps.rounds import Rounds
from distrun_runtime.ps.slots import Slot, Store

BYE_S = 2.0
"""How long a server that was told to stop waits for the scheduler's answer. The scheduler may be frozen."""


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
        self._neighbours = Neighbours()
        self._pulls = Pulls(config.workers, lambda: self.me.name)
        self._rounds = Rounds(config.workers, lambda: self.me.name, self._counters, self._pulls, self._neighbours)
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
            return self._lost_neighbour(event)
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
        return [*self._control.tick(self._stores), *self._pulls.remind(self._stores, now)]

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
        return [*self._pulls.drop(self._stores, event.link), *self._lost_neighbour(event)]

    def _lost_neighbour(self, event: role.Broken | role.TurnedAway) -> list[role.Action]:
        if self._is_stopping or not self._neighbours.lost(event.link):
            return []
        text = "%s lost its connection to %s: %s" % (self.me.name, event.link, event.reason)
        return [role.Log("INFO", "event=lost-peer %s" % text), *self._rounds.lost(self._stores, text)]

    def _from_scheduler(self, message: Message) -> list[role.Action]:
        if message.kind is Kind.BYE and message.is_reply:
            return [role.Finish(0, "told to stop")]
        if message.kind is Kind.ROSTER:
            nodes = from_json(message.body["nodes"])
            self._nodes = {(node.role, node.rank) for node in nodes}
            self.me = self._config.identity(self.me.endpoint, message.body["rank"])
            self._neighbours.learn(nodes, self.me.rank)
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
            self._pulls.gone[message.body["rank"]] = message.body["who"]
            hopeless = self._pulls.fail_hopeless(self._stores)
            return [
                *hopeless,
                *(action for store in self._stores.values() for action in self._pulls.all_advanced(store)),
            ]
        if message.kind is Kind.LOST:
            reason = str(message.body["reason"])
            told = role.Publish({"lost_peer": message.body["who"], "message": reason})
            if not self._nodes:
                return [told, role.Finish(1, reason)]  # registration failed; the reason says who was missing
            self._rounds.forget()
            return [told, *self._pulls.drop_all(self._stores, reason, str(message.body["who"]))]
        if message.kind is Kind.STOP and message.body.get("stay"):
            forgotten = self._pulls.drop_all(self._stores)
            self._rounds.begin_anew()
            self._nodes, self._stores = set(), {}
            self._pulls.gone.clear()
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
            return self._rounds.heard(self._stores.get(message.store), message)
        rank = self._ranks.get(link)
        if rank is None:
            return []
        self._counters.received(sum(memoryview(payload).nbytes for payload in message.payloads))
        if message.kind is Kind.INIT:
            return self._init(link, message)
        if message.kind in (Kind.STATS, Kind.PROFILE):
            handled = self._control.from_worker(link, rank, message, self._stores)
            if handled is not None:
                return handled
        store = self._stores.get(message.store)
        if store is None:
            return [self._refuse(link, message, "store %d has no keys on %s" % (message.store, self.me.name))]
        if message.kind is Kind.ROUNDS:
            return [role.Send(link, answer(message, {"rounds": store.rounds()}))]
        if message.kind not in (Kind.PUSH, Kind.PULL):
            return [self._refuse(link, message, "%s knows no %s" % (self.me.name, message.kind.name))]
        return self._data(link, rank, store, message)

    def _data(self, link: str, rank: int, store: Store, message: Message) -> list[role.Action]:
        wrong = checks.against(store, message, self.me.name)
        if not wrong and message.kind is Kind.PUSH and not store.is_sync and not store.has_rule:
            wrong = (
                "dist_async needs a rule on the servers: call kv.set_optimizer('sgd', learning_rate=...) before push"
            )
        if wrong:
            return self._refuse_data(link, rank, store, message, wrong)
        if any(entry.codec in checks.READ_FIRST and entry.payload for entry in message.entries):
            slots = tuple(store.id_of(entry) for entry in message.entries)
            return [role.Work(work.Check(link, rank, message, slots), True)]
        return self._accept(link, rank, store, message)

    def _refuse_data(self, link: str, rank: int, store: Store, message: Message, wrong: str) -> list[role.Action]:
        others = self._rounds.refused(store, rank, message, wrong) if message.kind is Kind.PUSH else []
        return [self._refuse(link, message, wrong), *others]

    def _accept(self, link: str, rank: int, store: Store, message: Message) -> list[role.Action]:
        """Do what nothing is wrong with."""
        if message.kind is Kind.PUSH:
            return self._rounds.push(link, rank, store, message)
        return self._pulls.take(link, rank, store, message, self._now)

    def _init(self, link: str, message: Message) -> list[role.Action]:
        store = self._store(message.store)
        store.names.update({int(number): name for number, name in message.body.get("names", [])})
        wrong = checks.against_init(store, message)
        if wrong:
            return [self._refuse(link, message, wrong)]
        if message.body.get("assign"):
            actions: list[role.Action] = []
            for entry, payload in zip(message.entries, message.payloads, strict=True):
                store.slot(entry).is_fresh = True
                actions.append(role.Work(work.Assign(store.id_of(entry), payload, DTYPES[entry.dtype])))
            return [*actions, role.Send(link, answer(message))]
        if store.has_rule:
            return [role.Work(work.TryFill(link, message), True)]
        return self._fill(link, store, message)

    def _fill(self, link: str, store: Store, message: Message) -> list[role.Action]:
        actions: list[role.Action] = []
        store.is_sync = "async" not in str(message.body.get("type", ""))
        store.staleness = message.body.get("staleness")
        for entry, payload in zip(message.entries, message.payloads, strict=True):
            slot = Slot(store.id_of(entry), entry.length, entry.dtype, checks.row_size_of(message, entry))
            shape = checks.shape_of(message, entry)
            if shape is not None:
                store.shapes[entry.key] = shape
            store.add(slot)
            about = (store.name(entry), shape or (), slot.row_size)
            actions.append(role.Work(work.Fill(slot.id, payload, DTYPES[entry.dtype], *about)))
        return [*actions, role.Send(link, answer(message))]

    # What the executor reports

    def _done(self, event: role.Done) -> list[role.Action]:
        what = event.work
        if isinstance(what, work.Apply):
            return self._rounds.applied(self._stores[what.slot.store], event)
        handled = self._control.done(event, self._stores)
        if isinstance(what, work.SetRule) and event.error is None:
            self._store(what.store).needs_norms = bool(event.value)
        if handled is not None:
            return handled
        if isinstance(what, work.Check):
            if event.error is not None:
                store, wrong = self._stores[what.message.store], checks.server_error(event.error)
                return self._refuse_data(what.link, what.rank, store, what.message, wrong)
            return self._accept(what.link, what.rank, self._stores[what.message.store], what.message)
        if isinstance(what, work.TryFill):
            if event.error is not None:
                return [role.Send(what.link, failed(what.message, event))]
            return self._fill(what.link, self._store(what.message.store), what.message)
        if isinstance(what, work.Steps):
            return self._rounds.stepped(self._stores[what.message.store], event)
        assert isinstance(what, work.Finish)
        return self._rounds.finished(self._stores[what.slot.store], event)

    # Leaving

    def _joined(self, message: Message) -> list[role.Action]:
        store = self._store(message.store)
        store.joined.add(int(message.body["rank"]))
        actions = self._excused(store)
        if message.body.get("all"):
            store.joined.clear()
            for slot in store.slots.values():
                slot.clock.level(range(self._config.workers))
        return actions

    def _excused(self, store: Store) -> list[role.Action]:
        """Somebody contributes nothing from now on."""
        return [*self._rounds.complete_all(store), *self._pulls.all_advanced(store)]

    def _store(self, number: int) -> Store:
        return self._stores.setdefault(number, Store(number))

    def _refuse(self, link: str, message: Message, reason: str, error: str = "KVError", trace: str = "") -> role.Action:
        return role.Send(link, refusal(message, reason, error, trace))
