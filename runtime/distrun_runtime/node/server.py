"""A server: rounds, who contributed, who waits. Pure: it sees descriptors, never the contents of an array.

The unit is a slot (`slots`): one piece of one value of one store. What is to be done with arrays goes to the
executor as work, in order; when an Apply or Step is done the executor says so and the pulls that waited for it are
answered.
"""

from __future__ import annotations

from collections.abc import Iterable

from distrun_runtime.net.handshake import Identity
from distrun_runtime.net.message import DTYPES, Kind, Message
from distrun_runtime.node import role, work
from distrun_runtime.node.config import Config
from distrun_runtime.node.replies import answer, refusal
from distrun_runtime.node.roster import from_json
from distrun_runtime.node.slots import Pull, Slot, Store
from distrun_runtime.node.work import SlotId


class Server:
    """A server's decisions."""

    def __init__(self, config: Config, endpoint: str) -> None:
        self.me = config.identity(endpoint)
        self._config = config
        self._nodes: set[tuple[str, int]] = set()
        self._stores: dict[int, Store] = {}
        self._ranks: dict[str, int] = {}
        self._gone: dict[int, str] = {}
        self._pulls: list[Pull] = []
        self._tickets = 0
        self._is_stopping = False
        self._deadline = role.Deadline()

    def start(self, now: float) -> list[role.Action]:
        """Register with the scheduler."""
        self._deadline.set(now + self._config.start_timeout_s)
        return [role.Connect(role.SCHEDULER_LINK, self._config.root_endpoint)]

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
            goodbye = role.Send(role.SCHEDULER_LINK, Message(Kind.BYE))
            return [goodbye, role.Finish(0, "signal %d" % event.signal)]
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
            text = "the scheduler at %s did not answer for %g s"
            return [role.Finish(1, text % (self._config.root_endpoint, self._config.start_timeout_s))]
        actions: list[role.Action] = []
        for pull in self._pulls:
            if pull.patience.is_due(now):
                text = self._stores[pull.message.store].waits_for(pull, self._config.workers, self.me.name)
                body = {"text": text, "seconds": now - pull.patience.since}
                message = Message(Kind.WAITING, store=pull.message.store, request=pull.message.request, body=body)
                actions.append(role.Send(pull.link, message))
        return actions

    # The job

    def _welcomed(self, event: role.Welcomed) -> list[role.Action]:
        if event.link == role.SCHEDULER_LINK:
            self._deadline.at = None
            return [role.Log("INFO", "event=registered scheduler=%s" % self._config.root_endpoint)]
        assert event.peer is not None
        self._ranks[event.link] = event.peer.rank
        return [role.Log("INFO", "event=connected node=%s host=%s" % (event.peer.name, event.peer.host))]

    def _broken(self, event: role.Broken) -> list[role.Action]:
        if event.link == role.SCHEDULER_LINK:
            if self._is_stopping:
                return [role.Finish(0)]
            text = "the scheduler at %s is lost: %s" % (self._config.root_endpoint, event.reason)
            return [role.Publish({"lost_peer": "scheduler", "message": text}), role.Finish(1, text)]
        # The scheduler judges deaths; here the worker's open requests are forgotten.
        self._ranks.pop(event.link, None)
        return self._forget([pull for pull in self._pulls if pull.link == event.link])

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
            return [*self._joined(message), role.Send(role.SCHEDULER_LINK, answer(message))]
        if message.kind is Kind.LEFT and message.request:
            self._store(message.store).left.add(int(message.body["rank"]))
            return [*self._complete_all(message.store), role.Send(role.SCHEDULER_LINK, answer(message))]
        if message.kind is Kind.LEFT:
            self._gone[message.body["rank"]] = message.body["who"]
            return self._fail_hopeless()
        if message.kind is Kind.LOST:
            reason = str(message.body["reason"])
            actions: list[role.Action] = [role.Publish({"lost_peer": message.body["who"], "message": reason})]
            for pull in self._pulls:
                actions.append(self._refuse(pull.link, pull.message, reason, "PeerLost"))
            return [*actions, *self._forget(list(self._pulls))]
        if message.kind is Kind.STOP and message.body.get("stay"):
            forgotten = self._forget(list(self._pulls))
            self._nodes, self._stores, self._gone = set(), {}, {}
            return [*forgotten, role.Work(work.Clear()), role.Send(role.SCHEDULER_LINK, answer(message))]
        if message.kind is Kind.STOP:
            self._is_stopping = True
            return [role.Finish(int(message.body.get("code", 0)), str(message.body.get("reason", "")))]
        return []

    # Requests of workers

    def _from_worker(self, link: str, message: Message, now: float) -> list[role.Action]:
        rank = self._ranks.get(link)
        if rank is None or message.is_reply:
            return []
        if message.kind is Kind.INIT:
            return self._init(link, message)
        store = self._stores.get(message.store)
        if store is None:
            return [self._refuse(link, message, "store %d has no keys on %s" % (message.store, self.me.name))]
        if message.kind is Kind.ROUNDS:
            return [role.Send(link, answer(message, {"rounds": store.rounds()}))]
        wrong = store.against(message, self.me.name)
        if wrong:
            return [self._refuse(link, message, wrong)]
        if message.kind is Kind.PUSH:
            return self._push(link, rank, store, message)
        if message.kind is Kind.PULL:
            return self._pull(link, rank, store, message, now)
        return [self._refuse(link, message, "%s knows no %s" % (self.me.name, message.kind.name))]

    def _init(self, link: str, message: Message) -> list[role.Action]:
        store = self._store(message.store)
        store.names.update({int(number): name for number, name in message.body.get("names", [])})
        wrong = store.against_init(message)
        if wrong:
            return [self._refuse(link, message, wrong)]
        store.is_sync = "async" not in str(message.body.get("type", ""))
        actions: list[role.Action] = []
        for entry, payload in zip(message.entries, message.payloads, strict=True):
            slot = Slot(store.id_of(entry), entry.length, entry.dtype)
            store.slots[slot.id] = slot
            actions.append(role.Work(work.Fill(slot.id, payload, DTYPES[entry.dtype])))
        return [*actions, role.Send(link, answer(message))]

    def _push(self, link: str, rank: int, store: Store, message: Message) -> list[role.Action]:
        if not store.is_sync and not store.has_rule:
            text = "dist_async needs a rule on the servers: call kv.set_optimizer('sgd', learning_rate=...) before push"
            return [self._refuse(link, message, text)]
        slots = tuple(store.slot(entry) for entry in message.entries)
        if not store.is_sync:
            return [role.Work(work.Steps(link, message, tuple(slot.id for slot in slots)), True)]
        actions: list[role.Action] = []
        for slot, entry, payload in zip(slots, message.entries, message.payloads, strict=True):
            if slot.contribute(rank, entry.round):
                actions.append(role.Work(work.Add(slot.id, entry.round, payload, DTYPES[entry.dtype])))
                actions += self._complete(store, slot)
        return [*actions, role.Send(link, answer(message))]

    def _complete(self, store: Store, slot: Slot) -> list[role.Action]:
        everybody = set(range(self._config.workers))
        return [role.Work(work.Apply(slot.id, n), True) for n in slot.complete(everybody, store.excused())]

    def _pull(self, link: str, rank: int, store: Store, message: Message, now: float) -> list[role.Action]:
        self._tickets += 1
        pull = Pull(link, rank, message, set(), role.Patience(now), self._tickets)
        actions: list[role.Action] = []
        for number, entry in enumerate(message.entries):
            slot = store.slot(entry)
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

    # What the executor reports

    def _done(self, event: role.Done) -> list[role.Action]:
        what = event.work
        if isinstance(what, work.SetRule):
            return self._rule_set(what, event)
        if isinstance(what, work.Steps):
            if event.error is not None:
                reason = self._rule_reason(what.slots[0], event)
                return [self._refuse(what.link, what.message, reason, "RuleError", event.traceback)]
            return [role.Send(what.link, answer(what.message))]
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
            return [role.Send(role.SCHEDULER_LINK, refusal(what.message, str(event.error)))]
        self._store(what.store).has_rule = True
        return [role.Send(role.SCHEDULER_LINK, answer(what.message))]

    # Leaving

    def _joined(self, message: Message) -> list[role.Action]:
        store = self._store(message.store)
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
            reason = self._stores[pull.message.store].hopeless(pull, self._config.workers, self._gone)
            if reason:
                actions += self._forget([pull])
                actions.append(self._refuse(pull.link, pull.message, reason, "PeerLost"))
        return actions

    def _forget(self, pulls: Iterable[Pull]) -> list[role.Action]:
        """Owe these pulls nothing any more, and take back what was lent to them."""
        gone = list(pulls)
        for pull in gone:
            if pull in self._pulls:
                self._pulls.remove(pull)
            for slot in self._stores[pull.message.store].owed_slots(pull):
                slot.waiting = [(other, number) for other, number in slot.waiting if other is not pull]
        return [role.Work(work.Discard(pull.ticket)) for pull in gone]

    def _store(self, number: int) -> Store:
        return self._stores.setdefault(number, Store(number))

    # Words

    def _rule_reason(self, slot: SlotId, event: role.Done) -> str:
        name = self._stores[slot.store].names.get(slot.key)
        return "the rule failed on %s for key %r: %s" % (self.me.name, name, event.error)

    def _failed(self, pull: Pull, slot: Slot, number: int) -> list[role.Action]:
        reason, traceback = slot.failed[number]
        refusal = self._refuse(pull.link, pull.message, reason, "RuleError", traceback)
        return [*self._forget([pull]), refusal]

    def _refuse(self, link: str, message: Message, reason: str, error: str = "KVError", trace: str = "") -> role.Action:
        return role.Send(link, refusal(message, reason, error, trace))
