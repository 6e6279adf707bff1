"""A server: rounds, who contributed, who waits. Pure: it sees descriptors, never the contents of an array.

The unit is a slot: one piece of one value of one store. What is to be done with arrays goes to the executor as
work, in order; when an Apply or Step is done the executor says so and the pulls that waited for it are answered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from distrun_runtime.net.handshake import Identity
from distrun_runtime.net.message import DTYPES, Buffer, Entry, Flag, Kind, Message, Payload
from distrun_runtime.node import role, work
from distrun_runtime.node.config import Config
from distrun_runtime.node.roster import from_json
from distrun_runtime.node.work import SlotId

WAITING_S = 30.0
"""How long a pull waits before its worker is told for whom, and again every so long."""


@dataclass
class _Slot:
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
    waiting: list[tuple[_Pull, int]] = field(default_factory=list)
    """Pulls, and which of their entries this slot owes."""


@dataclass
class _Pull:
    """A pull that is not answered yet."""

    link: str
    rank: int
    message: Message
    owed: set[int]
    since: float
    told: float
    ticket: int


@dataclass
class _Store:
    """What a server knows of one store."""

    is_sync: bool = True
    has_rule: bool = False
    slots: dict[SlotId, _Slot] = field(default_factory=dict)
    names: dict[int, Any] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    """Workers that left this store for good (kv.leave)."""

    def excused(self) -> set[int]:
        """Return the workers whose contribution to an open round is zero."""
        return self.joined | self.left


class Server:
    """A server's decisions."""

    def __init__(self, config: Config, endpoint: str) -> None:
        self.me = config.identity(endpoint)
        self._config = config
        self._nodes: set[tuple[str, int]] = set()
        self._stores: dict[int, _Store] = {}
        self._ranks: dict[str, int] = {}
        self._gone: dict[int, str] = {}
        self._pulls: list[_Pull] = []
        self._tickets = 0
        self._is_stopping = False
        self._deadline = role.Deadline()

    def start(self, now: float) -> list[role.Action]:
        """Register with the scheduler."""
        self._deadline.set(now + self._config.start_timeout_s)
        endpoint = "tcp://%s:%d" % (_bracket(self._config.root), self._config.root_port)
        return [role.Connect(role.SCHEDULER_LINK, endpoint)]

    def admit(self, peer: Identity) -> str:
        """Return why `peer` may not connect: only workers of this job do."""
        if peer.job != self.me.job:
            return "%s belongs to job %r, %s to job %r" % (peer, peer.job, self.me.name, self.me.job)
        if self._nodes and (peer.role, peer.rank) not in self._nodes:
            return "%s is not in this job's roster" % peer
        return ""

    def handle(self, event: role.Event, now: float) -> list[role.Action]:
        """Take in one event."""
        if isinstance(event, role.Welcomed):
            return self._welcomed(event)
        if isinstance(event, role.TurnedAway) and event.link == role.SCHEDULER_LINK:
            return [role.Finish(1, "the scheduler refused %s: %s" % (self.me.name, event.reason))]
        if isinstance(event, role.Broken):
            return self._broken(event)
        if isinstance(event, role.Told):
            return [role.Finish(0, "signal %d" % event.signal)]
        if isinstance(event, role.Done):
            return self._done(event)
        if isinstance(event, role.Heard):
            if event.link == role.SCHEDULER_LINK:
                return self._from_scheduler(event.message)
            return self._from_worker(event.link, event.message, now)
        return []

    def tick(self, now: float) -> list[role.Action]:
        """Tell workers whom their pulls wait for."""
        if self._deadline.is_due(now):
            return [
                role.Finish(1, "the scheduler at %s:%d did not answer for %g s" % (
                    *(self._config.root, self._config.root_port, self._config.start_timeout_s),
                ))
            ]  # fmt: skip
        actions: list[role.Action] = []
        for pull in self._pulls:
            if now - pull.told >= WAITING_S:
                pull.told = now
                body = {"text": self._waits_for(pull), "seconds": now - pull.since}
                message = Message(Kind.WAITING, store=pull.message.store, request=pull.message.request, body=body)
                actions.append(role.Send(pull.link, message))
        return actions

    # The job

    def _welcomed(self, event: role.Welcomed) -> list[role.Action]:
        if event.link == role.SCHEDULER_LINK:
            self._deadline.at = None
            return [role.Log("INFO", "event=registered scheduler=%s:%d" % (self._config.root, self._config.root_port))]
        assert event.peer is not None
        self._ranks[event.link] = event.peer.rank
        return [role.Log("INFO", "event=connected node=%s host=%s" % (event.peer.name, event.peer.host))]

    def _broken(self, event: role.Broken) -> list[role.Action]:
        if event.link == role.SCHEDULER_LINK:
            if self._is_stopping:
                return [role.Finish(0)]
            text = "the scheduler at %s is lost: %s" % (self._config.root, event.reason)
            return [role.Publish({"lost_peer": "scheduler", "message": text}), role.Finish(1, text)]
        # The scheduler judges deaths; here the worker's open requests are forgotten.
        self._ranks.pop(event.link, None)
        self._forget([pull for pull in self._pulls if pull.link == event.link])
        return []

    def _from_scheduler(self, message: Message) -> list[role.Action]:
        if message.kind is Kind.ROSTER:
            nodes = from_json(message.body["nodes"])
            self._nodes = {(node.role, node.rank) for node in nodes}
            self.me = self._config.identity(self.me.endpoint, message.body["rank"])
            lines = ["event=roster node=%s host=%s endpoint=%s" % (who.name, who.host, who.endpoint) for who in nodes]
            return [role.Log("INFO", line) for line in lines]
        if message.kind is Kind.RULE:
            return [role.Work(work.SetRule(message.store, message.body["name"], message.body["params"], message), True)]
        if message.kind is Kind.JOIN:
            return [*self._joined(message), role.Send(role.SCHEDULER_LINK, _answer(message))]
        if message.kind is Kind.LEFT and message.request:
            self._stores.setdefault(message.store, _Store()).left.add(int(message.body["rank"]))
            return [*self._complete_all(message.store), role.Send(role.SCHEDULER_LINK, _answer(message))]
        if message.kind is Kind.LEFT:
            self._gone[message.body["rank"]] = message.body["who"]
            return self._fail_hopeless()
        if message.kind is Kind.LOST:
            reason = str(message.body["reason"])
            actions: list[role.Action] = [role.Publish({"lost_peer": message.body["who"], "message": reason})]
            for pull in list(self._pulls):
                actions.append(self._refuse(pull.link, pull.message, reason, "PeerLost"))
            self._forget(list(self._pulls))
            return actions
        if message.kind is Kind.STOP:
            self._is_stopping = True
            return [role.Finish(0, "all workers have ended")]
        return []

    # Requests of workers

    def _from_worker(self, link: str, message: Message, now: float) -> list[role.Action]:
        rank = self._ranks.get(link)
        if rank is None:
            return []
        if message.kind is Kind.INIT:
            return self._init(link, message)
        store = self._stores.get(message.store)
        if store is None:
            return [self._refuse(link, message, "store %d has no keys on %s yet" % (message.store, self.me.name))]
        if message.kind is Kind.ROUNDS:
            return [self._rounds(link, store, message)]
        wrong = self._against(store, message)
        if wrong:
            return [self._refuse(link, message, wrong)]
        if message.kind is Kind.PUSH:
            return self._push(link, rank, store, message)
        if message.kind is Kind.PULL:
            return self._pull(link, rank, store, message, now)
        return [self._refuse(link, message, "%s knows no %s" % (self.me.name, message.kind.name))]

    def _init(self, link: str, message: Message) -> list[role.Action]:
        store = self._stores.setdefault(message.store, _Store())
        store.is_sync = "async" not in str(message.body.get("type", ""))
        store.names.update({int(number): name for number, name in message.body.get("names", [])})
        actions: list[role.Action] = []
        for number, entry in enumerate(message.entries):
            slot_id = SlotId(message.store, entry.key, entry.offset)
            if slot_id in store.slots:
                return [self._refuse(link, message, "key %r was initialised before" % store.names.get(entry.key))]
            store.slots[slot_id] = _Slot(slot_id, entry.length, entry.dtype)
            actions.append(role.Work(work.Fill(slot_id, message.payloads[number], DTYPES[entry.dtype])))
        return [*actions, role.Send(link, _answer(message))]

    def _against(self, store: _Store, message: Message) -> str:
        for entry in message.entries:
            slot = store.slots.get(SlotId(message.store, entry.key, entry.offset))
            name = store.names.get(entry.key, entry.key)
            if slot is None:
                return "key %r, offset %d: no such piece on %s" % (name, entry.offset, self.me.name)
            if (entry.length, entry.dtype) != (slot.length, slot.dtype):
                return "key %r: %s has %d elements of %s, the message %d of %s" % (
                    *(name, self.me.name, slot.length, DTYPES[slot.dtype]),
                    *(entry.length, DTYPES[entry.dtype]),
                )
            if (message.kind is Kind.PUSH) != (entry.payload is Payload.FRAME):
                return "key %r: %s with payload kind %s" % (name, message.kind.name, entry.payload.name)
        return ""

    def _push(self, link: str, rank: int, store: _Store, message: Message) -> list[role.Action]:
        if not store.is_sync and not store.has_rule:
            text = "dist_async needs a rule on the servers: call kv.set_optimizer('sgd', learning_rate=...) before push"
            return [self._refuse(link, message, text)]
        ids = tuple(SlotId(message.store, entry.key, entry.offset) for entry in message.entries)
        if not store.is_sync:
            return [role.Work(work.Steps(link, message, ids), True)]
        actions: list[role.Action] = []
        for slot_id, entry, payload in zip(ids, message.entries, message.payloads, strict=True):
            actions += self._contribute(store, store.slots[slot_id], rank, entry, payload)
        return [*actions, role.Send(link, _answer(message))]

    def _contribute(self, store: _Store, slot: _Slot, rank: int, entry: Entry, payload: Buffer) -> list[role.Action]:
        ranks = slot.open.get(entry.round, set())
        if entry.round <= slot.ordered or rank in ranks:
            return []  # A repeat: the first one counted (decision 20).
        slot.open.setdefault(entry.round, ranks).add(rank)
        add = role.Work(work.Add(slot.id, entry.round, payload, DTYPES[entry.dtype]))
        return [add, *self._complete(store, slot)]

    def _complete(self, store: _Store, slot: _Slot) -> list[role.Action]:
        """Return the Apply of every round that is complete, in order."""
        actions: list[role.Action] = []
        everybody = set(range(self._config.workers))
        while True:
            ranks = slot.open.get(slot.ordered + 1)
            if not ranks or not everybody <= ranks | store.excused():
                return actions
            slot.ordered += 1
            del slot.open[slot.ordered]
            actions.append(role.Work(work.Apply(slot.id, slot.ordered), True))

    def _pull(self, link: str, rank: int, store: _Store, message: Message, now: float) -> list[role.Action]:
        self._tickets += 1
        pull = _Pull(link, rank, message, set(), now, now, self._tickets)
        actions: list[role.Action] = []
        for number, entry in enumerate(message.entries):
            slot = store.slots[SlotId(message.store, entry.key, entry.offset)]
            if not store.is_sync or entry.round <= slot.round:
                if entry.round in slot.failed:
                    return [*actions, *self._failed(pull, slot, entry.round)]
                actions.append(role.Work(work.Lend(pull.ticket, number, slot.id)))
            else:
                pull.owed.add(number)
                slot.waiting.append((pull, number))
        if not pull.owed:
            return [*actions, role.Work(work.Deliver(pull.ticket, link, message))]
        self._pulls.append(pull)
        return [*actions, *self._fail_hopeless()]

    def _rounds(self, link: str, store: _Store, message: Message) -> role.Action:
        rounds: dict[int, int] = {}
        for slot in store.slots.values():
            rounds[slot.id.key] = max(rounds.get(slot.id.key, 0), slot.round)
        return role.Send(link, _answer(message, {"rounds": sorted(rounds.items())}))

    # What the executor reports

    def _done(self, event: role.Done) -> list[role.Action]:
        what = event.work
        if isinstance(what, work.SetRule):
            return self._rule_set(what, event)
        if isinstance(what, work.Steps):
            if event.error is not None:
                reason = self._rule_reason(what.slots[0], event)
                return [self._refuse(what.link, what.message, reason, "RuleError", event.traceback)]
            return [role.Send(what.link, _answer(what.message))]
        assert isinstance(what, work.Apply)
        slot = self._stores[what.slot.store].slots[what.slot]
        slot.round = what.round
        if event.error is not None:
            slot.failed[what.round] = (self._rule_reason(what.slot, event), event.traceback)
        due, slot.waiting = slot.waiting, []
        actions: list[role.Action] = []
        for pull, number in due:
            if pull.message.entries[number].round > slot.round:
                slot.waiting.append((pull, number))
                continue
            if slot.round in slot.failed:
                if pull in self._pulls:
                    self._forget([pull])
                    actions += self._failed(pull, slot, slot.round)
                continue
            pull.owed.discard(number)
            actions.append(role.Work(work.Lend(pull.ticket, number, slot.id)))
            if not pull.owed and pull in self._pulls:
                self._pulls.remove(pull)
                actions.append(role.Work(work.Deliver(pull.ticket, pull.link, pull.message)))
        return actions

    def _rule_set(self, what: work.SetRule, event: role.Done) -> list[role.Action]:
        if event.error is not None:
            flags = Flag.REPLY | Flag.ERROR
            body = {"reason": str(event.error), "error": "KVError"}
            reply = Message(Kind.RULE, flags, store=what.store, request=what.message.request, body=body)
            return [role.Send(role.SCHEDULER_LINK, reply)]
        self._stores.setdefault(what.store, _Store()).has_rule = True
        return [role.Send(role.SCHEDULER_LINK, _answer(what.message))]

    # Leaving

    def _joined(self, message: Message) -> list[role.Action]:
        store = self._stores.setdefault(message.store, _Store())
        store.joined.add(int(message.body["rank"]))
        actions = self._complete_all(message.store)
        if message.body.get("all"):
            store.joined.clear()
        return actions

    def _complete_all(self, number: int) -> list[role.Action]:
        store = self._stores[number]
        return [action for slot in store.slots.values() for action in self._complete(store, slot)]

    def _fail_hopeless(self) -> list[role.Action]:
        """Refuse the pulls that wait for a worker that has ended."""
        if not self._gone:
            return []
        actions: list[role.Action] = []
        for pull in list(self._pulls):
            store = self._stores[pull.message.store]
            for number in sorted(pull.owed):
                entry = pull.message.entries[number]
                slot = store.slots[SlotId(pull.message.store, entry.key, entry.offset)]
                missing = self._missing(store, slot)
                gone = [rank for rank in missing if rank in self._gone]
                if gone:
                    text = (
                        "%s has ended (BYE) without pushing round %d of key %r;"
                        " a worker that runs out of data calls kv.join()"
                    )
                    reason = text % (self._gone[gone[0]], slot.ordered + 1, store.names.get(entry.key))
                    self._forget([pull])
                    actions.append(role.Work(work.Discard(pull.ticket)))
                    actions.append(self._refuse(pull.link, pull.message, reason, "PeerLost"))
                    break
        return actions

    def _forget(self, pulls: Iterable[_Pull]) -> None:
        for pull in pulls:
            if pull in self._pulls:
                self._pulls.remove(pull)
            for number in pull.owed:
                entry = pull.message.entries[number]
                slot = self._stores[pull.message.store].slots[SlotId(pull.message.store, entry.key, entry.offset)]
                slot.waiting = [(other, index) for other, index in slot.waiting if other is not pull]

    # Words

    def _missing(self, store: _Store, slot: _Slot) -> list[int]:
        ranks = slot.open.get(slot.ordered + 1, set())
        return sorted(set(range(self._config.workers)) - ranks - store.excused())

    def _waits_for(self, pull: _Pull) -> str:
        store = self._stores[pull.message.store]
        entry = pull.message.entries[min(pull.owed)]
        slot = store.slots[SlotId(pull.message.store, entry.key, entry.offset)]
        who = ", ".join("worker-%d" % rank for rank in self._missing(store, slot))
        return "waiting for %s, key %s, round %d" % (who or self.me.name, store.names.get(entry.key), slot.ordered + 1)

    def _rule_reason(self, slot: SlotId, event: role.Done) -> str:
        name = self._stores[slot.store].names.get(slot.key)
        return "the rule failed on %s for key %r: %s" % (self.me.name, name, event.error)

    def _failed(self, pull: _Pull, slot: _Slot, number: int) -> list[role.Action]:
        reason, traceback = slot.failed[number]
        refusal = self._refuse(pull.link, pull.message, reason, "RuleError", traceback)
        return [role.Work(work.Discard(pull.ticket)), refusal]

    def _refuse(
        self, link: str, message: Message, reason: str, error: str = "KVError", traceback: str = ""
    ) -> role.Action:
        body = {"reason": reason, "error": error, "traceback": traceback}
        flags = Flag.REPLY | Flag.ERROR
        return role.Send(link, Message(message.kind, flags, store=message.store, request=message.request, body=body))


def _bracket(host: str) -> str:
    return "[%s]" % host if ":" in host else host


def _answer(message: Message, body: dict[str, Any] | None = None) -> Message:
    return Message(message.kind, Flag.REPLY, store=message.store, request=message.request, body=body or {})
