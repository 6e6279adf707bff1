"""The scheduler: who is in the job, what all workers agree on, and who died. Pure.

It never sees a value. It collects the nodes (roster), compares what the workers do together (collective), hands a
store's rule to the servers one at a time, and tells everybody when a node is lost or has left. When all workers
have ended it tells the servers to stop and ends itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from distrun_runtime.net.handshake import Identity
from distrun_runtime.net.message import Flag, Kind, Message
from distrun_runtime.node import role
from distrun_runtime.node.collective import Call, Gathering
from distrun_runtime.node.config import Config
from distrun_runtime.node.roster import ALIVE, LEFT, LOST, Member, Roster

Rule = tuple[str, Mapping[str, Any]]
"""A rule's name and parameters."""

REPORT_S = 5.0
"""How often the scheduler says whom it waits for."""


@dataclass
class _Store:
    """What the workers agreed on for one store."""

    type: str = ""
    keys: dict[str, int] = field(default_factory=dict)
    """Key, as JSON text, to its number."""
    text_keys: int = 0
    gatherings: dict[int, Gathering] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    """Collective calls that failed, with the reason: a late caller hears it too."""
    rule: Rule | None = None
    joined: dict[int, Call] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    """Workers that left this store for good."""


@dataclass
class _Errand:
    """A message that went to all servers, and what follows when they have answered."""

    waiting: set[str]
    then: Callable[[list[str]], list[role.Action]]
    errors: list[str] = field(default_factory=list)


class Scheduler:
    """The scheduler's decisions."""

    def __init__(self, config: Config, endpoint: str) -> None:
        self.me = config.identity(endpoint)
        self._config = config
        self._counts = (config.workers, config.servers)
        self._roster = Roster(config.workers, config.servers)
        self._is_open = False
        self._deadline = role.Deadline()
        self._report = role.Cadence(REPORT_S)
        self._stores: dict[int, _Store] = {}
        self._changes: deque[Call] = deque()
        self._is_changing = False
        self._errands: dict[int, _Errand] = {}
        self._errand_number = 0
        self._broken = ""
        self._finished = False

    def start(self, now: float) -> list[role.Action]:
        """Publish the address for the launcher, and say what is expected."""
        host, _, port = self.me.endpoint.removeprefix("tcp://").rpartition(":")
        return [
            role.Publish({"address": host.strip("[]"), "port": port}),
            role.Log("INFO", "event=listening endpoint=%s workers=%d servers=%d" % (self.me.endpoint, *self._counts)),
        ]

    def admit(self, peer: Identity) -> str:
        """Return why `peer` may not join the job."""
        if self._broken:
            return "the job is ending: %s" % self._broken
        if peer.job != self.me.job:
            return "%s belongs to job %r, this is job %r" % (peer, peer.job, self.me.job)
        return self._roster.against(peer)

    def handle(self, event: role.Event, now: float) -> list[role.Action]:
        """Take in one event."""
        if self._finished:
            return []
        if isinstance(event, role.Welcomed) and event.peer is not None:
            return self._register(event.link, event.peer, now)
        if isinstance(event, role.Broken):
            return self._ended(event.link, event.reason)
        if isinstance(event, role.Told):
            return self._finish(0, "signal %d" % event.signal)
        if isinstance(event, role.Heard):
            member = self._roster.members.get(event.link)
            return self._heard(member, event.message) if member is not None else []
        return []

    def tick(self, now: float) -> list[role.Action]:
        """Say whom we wait for; give up on the roster at its deadline."""
        if self._is_open or self._finished or not self._roster.members:
            return []
        if self._deadline.is_due(now):
            reason = "registration ended after %g s, %s" % (
                *(self._config.start_timeout_s, self._roster.waiting_text()),
            )
            return [*self._tell_all(Kind.LOST, {"reason": reason, "who": "job"}), *self._finish(1, reason)]
        if self._report.is_due(now) and self._roster.of_role("worker"):
            return [role.Log("WARNING", self._roster.waiting_text())]
        return []

    # Registration

    def _register(self, link: str, peer: Identity, now: float) -> list[role.Action]:
        self._roster.add(link, peer)
        actions: list[role.Action] = [_line("registered", peer)]
        if peer.role == "worker":
            # The clock starts with the first worker: a job whose script opens no store waits for nobody.
            self._deadline.set(now + self._config.start_timeout_s)
        if not self._roster.is_complete:
            return actions
        self._roster.assign()
        self._is_open = True
        actions.append(role.Log("INFO", "event=complete workers=%d servers=%d" % self._counts))
        nodes = self._roster.to_json()
        # Servers first: a worker's HELLO then finds a server that knows it.
        for member in [*self._roster.of_role("server"), *self._roster.of_role("worker")]:
            body = {"nodes": nodes, "rank": member.who.rank}
            actions.append(role.Send(member.link, Message(Kind.ROSTER, body=body)))
            actions.append(_line("assigned", member.who))
        return actions

    # Leaving and dying

    def _ended(self, link: str, reason: str) -> list[role.Action]:
        member = self._roster.members.get(link)
        if member is None or member.state != ALIVE:
            return []
        if not self._is_open:
            self._roster.remove(link)
            return [role.Log("WARNING", "%s went away before all had registered: %s" % (member.who, reason))]
        return self._lose(member, reason)

    def _lose(self, member: Member, reason: str) -> list[role.Action]:
        member.state = LOST
        self._broken = self._broken or "%s is lost: %s" % (member.who, reason)
        body = {"who": member.who.name, "host": member.who.host, "reason": "%s is lost: %s" % (member.who, reason)}
        return [
            role.Log("ERROR", body["reason"]),
            *self._tell_all(Kind.LOST, body),
            *self._finish_when_done(),
        ]

    def _leave(self, member: Member) -> list[role.Action]:
        member.state = LEFT
        actions: list[role.Action] = [role.Log("INFO", "event=bye node=%s" % member.who.name)]
        if member.who.role == "worker":
            body = {"rank": member.who.rank, "who": str(member.who)}
            actions += [role.Send(server.link, Message(Kind.LEFT, body=body)) for server in self._alive("server")]
            actions += self._recheck_gatherings(member)
            for number, store in self._stores.items():
                actions += self._all_joined(number, store)
        return [*actions, *self._finish_when_done()]

    def _finish_when_done(self) -> list[role.Action]:
        if self._alive("worker") or not self._is_open:
            return []
        stop = [role.Send(server.link, Message(Kind.STOP)) for server in self._alive("server")]
        return [*stop, *self._finish(1 if self._broken else 0, self._broken or "all workers have ended")]

    def _finish(self, code: int, reason: str) -> list[role.Action]:
        self._finished = True
        return [role.Finish(code, reason)]

    def _alive(self, name: str) -> list[Member]:
        return [member for member in self._roster.of_role(name) if member.state == ALIVE]

    def _tell_all(self, kind: Kind, body: Mapping[str, Any]) -> list[role.Action]:
        everybody = [member for member in self._roster.members.values() if member.state == ALIVE]
        return [role.Send(member.link, Message(kind, body=body)) for member in everybody]

    # Messages

    def _heard(self, member: Member, message: Message) -> list[role.Action]:
        call = Call(member.who.rank, member.link, message)
        if message.is_reply:
            return self._answered(member, message)
        if message.kind is Kind.BYE:
            reply = _reply(message)
            return [role.Send(member.link, reply), *self._leave(member)]
        if message.kind is Kind.ABORT:
            return self._lose(member, "it failed: %s" % message.body.get("reason", "no reason given"))
        if member.who.role != "worker":
            return [role.Log("WARNING", "%s sent %s, which only workers send" % (member.who, message.kind.name))]
        if self._broken:
            return [_refuse(call, self._broken, "PeerLost")]
        if message.kind in (Kind.OPEN, Kind.KEYS, Kind.BARRIER):
            return self._gather(call)
        if message.kind is Kind.INIT:
            return self._inited(call)
        if message.kind is Kind.RULE:
            self._changes.append(call)
            return self._next_change()
        if message.kind is Kind.JOIN:
            return self._join(call)
        if message.kind is Kind.LEFT:
            return self._leave_store(call)
        return [_refuse(call, "the scheduler knows no %s" % message.kind.name)]

    # What all workers do together

    def _gather(self, call: Call) -> list[role.Action]:
        store = self._stores.setdefault(call.message.store, _Store())
        if call.number in store.refused:
            return [_refuse(call, store.refused[call.number])]
        gathering = store.gatherings.setdefault(call.number, Gathering())
        wrong = gathering.add(call) or self._against_records(store, call)
        if wrong:
            return self._fail_gathering(store, call.number, wrong)
        gone = [member for member in self._roster.of_role("worker") if member.state == LEFT]
        missing = [member for member in gone if member.who.rank not in {*gathering.calls, *store.left}]
        if missing:
            return self._fail_gathering(store, call.number, _gone(missing[0], call.message))
        return self._complete(store, call.number)

    def _complete(self, store: _Store, number: int) -> list[role.Action]:
        gathering = store.gatherings[number]
        if len(gathering.calls) < self._config.workers - len(store.left):
            return []
        call = next(iter(gathering.calls.values()))
        if call.message.kind is Kind.KEYS:
            return self._declare(store, gathering)
        del store.gatherings[number]
        if call.message.kind is Kind.OPEN:
            store.type = str(call.message.body["type"])
        return [role.Send(part.link, _reply(part.message)) for part in gathering.calls.values()]

    def _against_records(self, store: _Store, call: Call) -> str:
        if call.message.kind is not Kind.KEYS:
            return ""
        twice = [record["key"] for record in call.message.body["records"] if _key(record) in store.keys]
        return "init of key %r: it was initialised before" % twice[0] if twice else ""

    def _declare(self, store: _Store, gathering: Gathering) -> list[role.Action]:
        first = gathering.calls[0]
        numbers: list[list[int]] = []
        for record in first.message.body["records"]:
            is_text = isinstance(record["key"], str)
            place = store.text_keys if is_text else int(record["key"])
            store.text_keys += is_text
            number = store.keys[_key(record)] = len(store.keys)
            numbers.append([number, place])
        order = [record["key"] for record in first.message.body["records"]]
        answer = {"keys": order, "numbers": numbers}
        gathering.calls = {
            rank: replace(part, message=replace(part.message, body={**part.message.body, **answer}))
            for rank, part in gathering.calls.items()
        }
        # Rank 0 goes to fill the servers now; the others hear when it has (INIT), so that nobody reads too early.
        return [role.Send(first.link, _reply(first.message, answer))]

    def _inited(self, call: Call) -> list[role.Action]:
        store = self._stores.setdefault(call.message.store, _Store())
        gathering = store.gatherings.pop(call.number, None)
        if gathering is None:
            return [_refuse(call, "INIT without KEYS")]
        error = str(call.message.body.get("error", ""))
        actions: list[role.Action] = [role.Send(call.link, _reply(call.message))]
        for part in gathering.calls.values():
            if part.rank == call.rank:
                continue
            body = {name: part.message.body[name] for name in ("keys", "numbers")}
            actions.append(_refuse(part, error) if error else role.Send(part.link, _reply(part.message, body)))
        return actions

    def _fail_gathering(self, store: _Store, number: int, reason: str) -> list[role.Action]:
        gathering = store.gatherings.pop(number)
        store.refused[number] = reason
        return [_refuse(part, reason) for part in gathering.calls.values()]

    def _recheck_gatherings(self, gone: Member) -> list[role.Action]:
        actions: list[role.Action] = []
        for store in self._stores.values():
            for number, gathering in list(store.gatherings.items()):
                if gathering.calls and gone.who.rank not in {*gathering.calls, *store.left}:
                    part = next(iter(gathering.calls.values()))
                    actions += self._fail_gathering(store, number, _gone(gone, part.message))
        return actions

    # Joining: zero contributions from here on

    def _leave_store(self, call: Call) -> list[role.Action]:
        store = self._stores.setdefault(call.message.store, _Store())
        store.left.add(call.rank)
        told = Message(Kind.LEFT, store=call.message.store, body={"rank": call.rank})
        actions = self._send_out(told, lambda errors: [role.Send(call.link, _reply(call.message))])
        for number in list(store.gatherings):
            actions += self._complete(store, number)
        return [*actions, *self._all_joined(call.message.store, store)]

    def _join(self, call: Call) -> list[role.Action]:
        store = self._stores.setdefault(call.message.store, _Store())
        store.joined[call.rank] = call
        told = Message(Kind.JOIN, store=call.message.store, body={"rank": call.rank})
        return [*self._send_out(told, lambda errors: []), *self._all_joined(call.message.store, store)]

    def _all_joined(self, number: int, store: _Store) -> list[role.Action]:
        present = {member.who.rank for member in self._alive("worker")} - store.left
        if not store.joined or not present <= set(store.joined):
            return []
        # The servers forget who joined before any worker hears that all have: its next push is a new round of all.
        parts = list(store.joined.values())
        store.joined.clear()
        told = Message(Kind.JOIN, store=number, body={"rank": parts[0].rank, "all": True})
        return self._send_out(told, lambda errors: [role.Send(part.link, _reply(part.message)) for part in parts])

    # Rules, one at a time

    def _next_change(self) -> list[role.Action]:
        actions: list[role.Action] = []
        while self._changes and not self._is_changing:
            call = self._changes.popleft()
            store = self._stores.setdefault(call.message.store, _Store())
            wish = (str(call.message.body["name"]), call.message.body["params"])
            is_forced = bool(call.message.body.get("replace"))
            if store.rule == wish and not is_forced:
                actions.append(role.Send(call.link, _reply(call.message)))
            elif store.rule is not None and not is_forced:
                text = "the store has the rule %s %s; set_optimizer(%r, ..., replace=True) puts another in its place"
                actions.append(_refuse(call, text % (store.rule[0], dict(store.rule[1]), wish[0])))
            else:
                self._is_changing = True
                told = Message(Kind.RULE, store=call.message.store, body=call.message.body)
                actions += self._send_out(told, partial(self._changed, store, wish, call))
        return actions

    def _changed(self, store: _Store, wish: Rule, call: Call, errors: list[str]) -> list[role.Action]:
        self._is_changing = False
        if errors:
            return [_refuse(call, "; ".join(errors)), *self._next_change()]
        store.rule = wish
        return [role.Send(call.link, _reply(call.message)), *self._next_change()]

    # Errands: one message to all servers, and what to do when all have answered

    def _send_out(self, message: Message, then: Callable[[list[str]], list[role.Action]]) -> list[role.Action]:
        self._errand_number += 1
        servers = self._alive("server")
        self._errands[self._errand_number] = _Errand({server.link for server in servers}, then)
        numbered = replace(message, request=self._errand_number)
        return [role.Send(server.link, numbered) for server in servers]

    def _answered(self, member: Member, message: Message) -> list[role.Action]:
        errand = self._errands.get(message.request)
        if errand is None:
            return []
        errand.waiting.discard(member.link)
        if message.is_error:
            errand.errors.append("%s: %s" % (member.who.name, message.body.get("reason")))
        if errand.waiting:
            return []
        del self._errands[message.request]
        return errand.then(errand.errors)


def _line(event: str, who: Identity) -> role.Action:
    fields = (event, who.name, who.host, who.pid, who.endpoint)
    return role.Log("INFO", "event=%s node=%s host=%s pid=%d endpoint=%s" % fields)


def _key(record: Mapping[str, Any]) -> str:
    return "%s:%s" % (type(record["key"]).__name__, record["key"])


def _gone(member: Member, message: Message) -> str:
    return "%s has ended (BYE) and will never call %s: all workers must" % (member.who, message.kind.name.lower())


def _reply(message: Message, body: Mapping[str, Any] | None = None) -> Message:
    return Message(message.kind, Flag.REPLY, store=message.store, request=message.request, body=body or {})


def _refuse(call: Call, reason: str, error: str = "KVError") -> role.Action:
    body = {"reason": reason, "error": error}
    message = call.message
    flags = Flag.REPLY | Flag.ERROR
    return role.Send(call.link, Message(message.kind, flags, store=message.store, request=message.request, body=body))
