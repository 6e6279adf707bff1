"""A worker's decisions: registration, requests in flight, and what a death means for them. No side effects.

`handle` is told what happens, and returns actions (`role`), which the node's loop (`loop`) carries out: `role.Send`
sends a message, `role.Resolve` wakes the thread that waits for a request. What the script's threads want comes as
`role.CallSubmitted`, from `session.NodeSession.ask`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.contract.facts import duration
from distrun_runtime.errors import KVError, PeerLost, Refused, RuleError, RuntimeFault, TimedOut, because_of
from distrun_runtime.protocol.handshake import NodeIdentity, nodes_of
from distrun_runtime.protocol.message import Kind, Membership, Message
from distrun_runtime.ps import role
from distrun_runtime.ps.relay import relays_of_hosts
from distrun_runtime.ps.role import Config, NodeRequest
from distrun_runtime.ps.routing import WINDOW_BYTES

# What a worker has to say to one server: by priority, within a window, each key's requests in their order.


class Outbox:
    """Orders the messages to one server."""

    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        self._window = window_bytes
        self._heap: list[tuple[int, int, Message]] = []
        """Urgency, the least first; the order of `put`; the message."""
        self._count = 0
        self._in_flight: dict[int, int] = {}

    def put(self, message: Message) -> None:
        """Queue a message that has its request number."""
        urgency = -message.priority
        # Requests of one worker on one key keep their order: a later one is never more urgent than an earlier.
        for other, _, queued in self._heap:
            if other > urgency and _shares_keys(queued, message):
                urgency = other
        self._count += 1
        heapq.heappush(self._heap, (urgency, self._count, message))

    def take(self) -> list[Message]:
        """Return what may be sent now, in order, and count it as on its way."""
        ready: list[Message] = []
        while self._heap:
            message = self._heap[0][-1]
            size = message.size if message.kind is Kind.PUSH else 0
            if size and self._in_flight and sum(self._in_flight.values()) + size > self._window:
                break
            heapq.heappop(self._heap)
            if size:
                self._in_flight[message.request] = size
            ready.append(message)
        return ready

    def sent(self, message: Message) -> None:
        """A message was sent past this queue: count it as on its way."""
        if message.kind is Kind.PUSH and message.size:
            self._in_flight[message.request] = message.size

    def drop(self, requests: Collection[int]) -> None:
        """Forget the messages of these requests that wait here."""
        self._heap = [each for each in self._heap if each[-1].request not in requests]
        heapq.heapify(self._heap)

    def answered(self, request: int) -> None:
        """A request was answered: its bytes are no longer on their way."""
        self._in_flight.pop(request, None)


def _shares_keys(one: Message, other: Message) -> bool:
    """Whether messages are about a key of both; one that names its entries by a bucket may be about any."""
    if any(message.bucket and not len(message.entries) for message in (one, other)):
        return True
    return bool(np.isin(other.entries["key"], one.entries["key"]).any())


REPORT_S = 5.0
"""How often a worker says that it waits for the scheduler."""
BYE_S = 5.0
ABORT_S = 2.0
"""How long a worker waits for the scheduler to answer its last words. The scheduler may be frozen."""
SLACK_S = 5.0
"""How much longer than the scheduler a worker waits for the roster: the scheduler's reason is the better one."""


EntriesOf = Callable[[int], Array]
"""Returns the entries of a request's message, by its number in the request."""


@dataclass(frozen=True)
class Ask:
    """What a thread of the script has this node do: send these messages, and resolve the request with all replies.

    Links are `scheduler` and `server-I`.
    """

    request: NodeRequest
    messages: Sequence[tuple[str, Message]]
    entries_of: EntriesOf | None = None
    """For messages that name a bucket in place of their entries. Called by the node's thread if a server does not know
    the bucket; later messages must not name it."""
    members: Membership | None = None
    """Whom it cannot do without: the workers of the store that it is about. None: all of the job."""


@dataclass(frozen=True)
class Adopted:
    """A request that a thread of the script has begun by itself, and leaves to this node."""

    asked: Ask
    first: int
    """Number of its first message, from `Worker.reserve`."""
    sent: int
    """How many of its messages were sent."""


@dataclass(frozen=True)
class Goodbye:
    """The last request: BYE, or ABORT with a reason."""

    request: NodeRequest
    abort: str = ""


@dataclass
class _Open:
    """A request that is not complete."""

    request: NodeRequest
    missing: dict[int, str]
    """Numbers of the messages that are not answered, and their links."""
    entries_of: EntriesOf | None = None
    members: Membership | None = None
    first: int = 0
    """Number of its first message."""
    sent: dict[int, Message] = field(default_factory=dict)
    """Its PUSH, PULL and PUSHPULL messages that were sent once. A server may ask for such a message again."""
    awaits_all: bool = False
    """It has a PUSH, to which the script's arrays are lent until the last server has them: a refusal of one server
    waits for the others' replies. These come at once, unlike those to a PUSHPULL, which may wait for workers that have
    been refused as well."""
    replies: dict[int, Message] = field(default_factory=dict)
    error: RuntimeFault | None = None


class Worker:
    """A worker's decisions."""

    def __init__(self, config: Config, endpoint: str, ready: NodeRequest) -> None:
        self.me = config.identity(endpoint)
        self.servers: list[NodeIdentity] = []
        """By rank; known when `ready` is resolved."""
        self.relays: Mapping[int, int] = {}
        """Maps servers of other hosts to their relays on this host, by rank (`relay`)."""
        self.relays_of_hosts: Sequence[Mapping[int, int]] = ()
        """The same, of every host that has relays."""
        self._summing: list[NodeIdentity] = []
        """All nodes, if workers of one host are to add what they push."""
        self.is_on_one_host = False
        """Whether all nodes of the job are; known when `ready` is resolved."""
        self._config = config
        self._ready = ready
        self._root = config.root_endpoint
        self._deadline = role.Deadline()
        self._report = role.Deadline()
        self._welcomes: set[str] = set()
        self._outboxes: dict[str, Outbox] = {}
        self._numbers = 0
        self._open: dict[int, _Open] = {}
        self.dead: set[str] = set()
        """Names of the nodes that are known to be lost."""
        self._lost: RuntimeFault | None = None
        """Why no request about a store of all workers is answered any more."""
        self._over: RuntimeFault | None = None
        """Why no other is, either."""
        self._lost_workers: dict[int, RuntimeFault] = {}
        """By rank: why no request is answered about a store that this worker shares."""
        self._memberships: set[Membership | None] = set()
        """Those of the stores of this process; None: all workers."""
        self._goodbye: Goodbye | None = None
        self._farewell = role.Deadline()

    def start(self, now: float) -> list[role.Action]:
        """Register with the scheduler."""
        self._deadline.set(now + self._config.start_timeout_s)
        self._report.set(now + REPORT_S)
        return [role.Connect(role.SCHEDULER_LINK, self._root)]

    def admit(self, peer: NodeIdentity) -> str:
        """Return why `peer` may not connect."""
        return "" if peer.job == self.me.job else f"{peer} belongs to job {peer.job!r}"

    def handle(self, event: role.Event, now: float) -> list[role.Action]:
        """Take in one event."""
        match event:
            case role.CallSubmitted(what):
                return self._asked(what, now)
            case role.MessageReceived(link, message):
                return self._heard(link, message, now)
            case role.Welcomed(link, None):
                return self._welcomed(link, now)
            case role.TurnedAway(link, reason):
                return [*self.fail(Refused(f"{self._name(link)} refused this process: {reason}"))]
            case role.Broken(link, reason) if link == role.SCHEDULER_LINK or link in self._outboxes:
                if self._goodbye is not None:  # only the scheduler's answer counts now
                    return self._gone() if link == role.SCHEDULER_LINK else []
                return self._lose(link, f"{self._name(link)} is lost: {reason}")
        return []

    def tick(self, now: float) -> list[role.Action]:
        """Give up on registration, and on an answer to the last words, at their deadlines."""
        if self._farewell.is_due(now):
            return self._gone()
        if self._ready.is_done:
            return []
        if not self._deadline.is_due(now):
            if role.SCHEDULER_LINK in self._welcomes or not self._report.is_due(now):
                return []
            self._report.set(now + REPORT_S)
            return [role.Log("WARNING", f"waiting for the scheduler at {self._root}")]
        if role.SCHEDULER_LINK not in self._welcomes:
            waited = f"no scheduler answered at {self._root} for {duration(self._config.start_timeout_s)}"
            text = f"{waited}: is it running, and reachable from host {self.me.host}?"
            return self._miss("scheduler", text)
        absent = [server.name for server in self.servers if server.name not in self._welcomes]
        names = ", ".join(self._name(name) for name in absent)
        text = f"{self.me.name} waited for {names or 'the other nodes to register'}"
        return self._miss(absent[0] if absent else "", text)

    # Registration

    def _welcomed(self, link: str, now: float) -> list[role.Action]:
        self._welcomes.add(link)
        if link == role.SCHEDULER_LINK:
            self._deadline.at = now + self._config.start_timeout_s + SLACK_S
            return [role.Log("INFO", f"event=registered scheduler={self._root}")]
        if self.servers and len(self._welcomes) == len(self.servers) + 1:
            self._deadline.at = None
            return [role.Log("INFO", f"event=ready servers={len(self.servers)}"), role.Resolve(self._ready)]
        return []

    def _roster(self, message: Message, now: float) -> list[role.Action]:
        nodes = nodes_of(message.body["nodes"])
        self.me = self._config.identity(self.me.endpoint, message.body["rank"])
        servers = [node for node in nodes if node.role == "server"]
        self.is_on_one_host = len({node.host for node in nodes}) == 1
        self.servers = sorted(servers, key=lambda node: node.rank)
        if message.body.get("host_sums"):
            self._summing = nodes
            self.relays, self.relays_of_hosts = self.relays_among(Membership(range(self._config.workers)))
        self._outboxes = {node.name: Outbox() for node in self.servers}
        self._deadline.at = now + self._config.heartbeat.timeout_s + SLACK_S
        lines = [f"event=roster node={node.name} host={node.host} endpoint={node.endpoint}" for node in nodes]
        actions: list[role.Action] = [role.Log("INFO", line) for line in lines]
        return actions + [role.Connect(node.name, node.endpoint) for node in self.servers]

    def relays_among(self, members: Membership) -> tuple[Mapping[int, int], Sequence[Mapping[int, int]]]:
        """Return `relays` and `relays_of_hosts` for a store: those of hosts with several of its members.

        Threads: any, once `ready` is resolved.
        """
        by_host = relays_of_hosts(
            [node for node in self._summing if node.role != "worker" or node.rank in members.ranks]
        )
        return by_host.get(self.me.host, {}), [by_host[host] for host in sorted(by_host)]

    # Requests

    def reserve(self, count: int) -> int:
        """Return the first of so many numbers for messages that are sent past this node; 0: it has to send them itself.

        They may be sent so only while nothing is in flight: then no order is broken. If all are answered, that is all;
        otherwise `Adopted` follows.
        """
        if self._open or self._lost is not None or self._goodbye is not None or not self._ready.is_done:
            return 0
        first = self._numbers + 1
        self._numbers += count
        return first

    def _asked(self, what: Ask | Adopted | Goodbye, now: float) -> list[role.Action]:
        if isinstance(what, Goodbye):
            return self._leave(what, now)
        asked, first, sent = (what.asked, what.first, what.sent) if isinstance(what, Adopted) else (what, 0, 0)
        if asked.request.is_taken_in:
            return []
        asked.request.is_taken_in = True
        lost = None if self._lost is None else self._lost_to(asked.members)
        is_over = self._over is not None
        if lost is not None and (is_over or any(each.kind is not Kind.CLOSE for _, each in asked.messages)):
            return [role.Resolve(asked.request, error=lost)]
        self._memberships.add(asked.members)
        if not first:
            first = self._numbers + 1
            self._numbers += len(asked.messages)
        entry = _Open(asked.request, {}, asked.entries_of, asked.members, first)
        asked.request.missing = entry.missing
        actions: list[role.Action] = []
        for number, (link, message) in enumerate(asked.messages, first):
            entry.missing[number] = link
            self._open[number] = entry
            numbered = replace(message, request=number)
            entry.awaits_all |= message.kind is Kind.PUSH
            if message.kind in (Kind.PUSH, Kind.PULL, Kind.PUSHPULL):
                entry.sent[number] = numbered
            outbox = self._outboxes.get(link)
            if number < first + sent:
                if outbox is not None:
                    outbox.sent(numbered)
            elif outbox is not None:
                outbox.put(numbered)
            else:
                actions.append(role.Send(link, numbered))
        if not entry.missing:
            return [role.Resolve(asked.request)]
        for link, outbox in self._outboxes.items():
            for message in outbox.take():
                actions.append(role.Send(link, message))
        return actions

    def _heard(self, link: str, message: Message, now: float) -> list[role.Action]:
        is_order = link == role.SCHEDULER_LINK and not message.is_reply
        entry = self._open.get(message.request)
        match message.kind:
            case Kind.ROSTER if is_order:
                return self._roster(message, now)
            case Kind.LOST if is_order or (
                link in self._outboxes and message.body.get("who") in (link, role.SCHEDULER_LINK)
            ):
                return self._lose(str(message.body["who"]), str(message.body["reason"]), is_told=is_order)
            case Kind.BYE | Kind.ABORT if message.is_reply and self._goodbye is not None:
                return self._gone()
            case Kind.WAITING:
                return [] if entry is None else self._noted(entry.request, message.body)
            case _ if not message.is_reply:
                return []
            case _ if entry is not None and message.is_error and message.body.get("again"):
                if message.request in entry.sent:
                    return self._send_again(link, entry, message)
        # One that has failed because of a lost worker has no entry, and is not on its way any more all the same.
        actions = [] if entry is None else self._answered(entry, message)
        outbox = self._outboxes.get(link)
        if outbox is not None:  # only its window has changed
            outbox.answered(message.request)
            for each in outbox.take():
                actions.append(role.Send(link, each))
        return actions

    def _noted(self, request: NodeRequest, body: Mapping[str, Any]) -> list[role.Action]:
        """A node says what a request waits for. It is said aloud only when that takes long."""
        text, seconds = str(body.get("text", "")), float(body.get("seconds", 0))
        line = role.Log("WARNING", f"{text} ({duration(round(seconds))})")
        note = role.Note(request, text, tuple(map(str, body.get("for", ()))), str(body.get("key", "")))
        return [note, line] if seconds >= role.WAITING_S else [note]

    def _send_again(self, link: str, entry: _Open, refusal: Message) -> list[role.Action]:
        """Send a message again that a server did nothing about: it does not know a bucket, of this or an earlier one.

        The server expects such messages in the order of its refusals, which is that in which they were sent. So they
        go now, before all that is queued. Once: a second refusal is an error.
        """
        message = entry.sent.pop(refusal.request)
        if message.bucket and not len(message.entries) and entry.entries_of is not None:
            entries = entry.entries_of(message.request - entry.first)
            message = replace(message, bucket=0, step=0, entries=entries)
        reason = refusal.body.get("reason", "")
        log = f"event=sent-again link={link} request={message.request} reason={reason}"
        return [role.Log("INFO", log), role.Send(link, message)]

    def _answered(self, entry: _Open, message: Message) -> list[role.Action]:
        del self._open[message.request]
        entry.missing.pop(message.request, None)
        entry.sent.pop(message.request, None)
        actions: list[role.Action] = []
        if message.is_error:
            error = _error(entry.request, message)
            entry.error = entry.error or error
            if "who" in message.body:
                self.dead.add(str(message.body["who"]))
                # The script may catch the error and end with a code of its own: that is a consequence all the same.
                actions.append(role.Publish({"lost_peer": str(message.body["who"]), "message": str(error)}))
        entry.replies[message.request] = message
        if entry.request.is_done or (entry.missing and (entry.awaits_all or entry.error is None)):
            return actions
        if entry.error is not None:
            return [*actions, role.Resolve(entry.request, error=entry.error)]
        return [role.Resolve(entry.request, tuple(map(entry.replies.__getitem__, sorted(entry.replies))))]

    # The end

    def _leave(self, goodbye: Goodbye, now: float) -> list[role.Action]:
        self._goodbye = goodbye
        is_awaited = self._over is None and any(self._memberships)  # Those of its groups may go on without the lost.
        if role.SCHEDULER_LINK not in self._welcomes or (self._lost is not None and not is_awaited):
            return self._gone()
        self._farewell.set(now + (ABORT_S if goodbye.abort else BYE_S))
        last = Message(Kind.ABORT, body={"reason": goodbye.abort}) if goodbye.abort else Message(Kind.BYE)
        return [role.Send(role.SCHEDULER_LINK, last)]

    def _gone(self) -> list[role.Action]:
        assert self._goodbye is not None
        return [role.Resolve(self._goodbye.request), role.Finish(0)]

    def _lose(self, who: str, reason: str, *, is_told: bool = False) -> list[role.Action]:
        """A node is lost: fail what cannot do without it. Of a worker, that is what is about a store that it shares.

        Arguments:
            is_told: the scheduler has said so. Else it is told: this worker may end before the scheduler sees the
                server's end, and would be taken for the first that is lost.
        """
        self.dead.add(who)
        error, rank = because_of(PeerLost(reason), who), role.worker_rank(who)
        lost = [each for each in self._memberships or {None} if self._lost_to(each) is None]
        if rank is None or not self.servers:  # Before the roster is here, any missing node ends the registration.
            failed = self.fail(error)
        else:
            self._lost = self._lost or error
            known = self._lost_workers.setdefault(rank, self._over or error)  # The first reason counts.
            lost = [each for each in lost if each is None or rank in each.ranks]
            failed = self._end(known, rank)
        if not lost:
            return [*failed]
        told: list[role.Action] = [role.Publish({"lost_peer": who, "message": reason})]
        if not is_told and who != role.SCHEDULER_LINK:
            body = {"who": who, "reason": f"{reason} (seen by {self.me.name})"}
            told.append(role.Send(role.SCHEDULER_LINK, Message(Kind.LOST, body=body)))
        # Under an agent the error that ends the script says it, in one line.
        level = "INFO" if self._config.stays else "ERROR"
        return [*told, role.Log(level, reason), *failed]

    def _lost_to(self, members: Membership | None) -> RuntimeFault | None:
        """Return why no request about a store is answered any more; None: it is."""
        if members is None:
            return self._lost
        return next((error for rank, error in self._lost_workers.items() if rank in members.ranks), self._over)

    def _miss(self, who: str, reason: str) -> list[role.Action]:
        """Give up on a node that did not come."""
        told = [role.Publish({"lost_peer": who, "message": reason})] if who else []
        return [*told, *self.fail(because_of(TimedOut(reason), who))]

    def fail(self, error: RuntimeFault) -> list[role.Resolve]:
        """Return the end of everything that waits: `error`."""
        self._lost, self._over = self._lost or error, self._over or error
        failed = [] if self._ready.is_done else [role.Resolve(self._ready, error=error)]
        return failed + self._end(error)

    def _end(self, error: RuntimeFault, rank: int | None = None) -> list[role.Resolve]:
        """Return the end of what waits and cannot do without worker `rank`; None: of everything."""
        ended = {
            number: entry
            for number, entry in self._open.items()
            if rank is None or entry.members is None or rank in entry.members.ranks
        }
        self._open = {number: entry for number, entry in self._open.items() if number not in ended}
        for outbox in self._outboxes.values():
            outbox.drop(ended)
        requests = dict.fromkeys(entry.request for entry in ended.values() if not entry.request.is_done)
        return [
            role.Resolve(each, error=because_of(type(error)(f"{each.what}: {error}"), error.lost_peer))
            for each in requests
        ]

    def _name(self, link: str) -> str:
        for server in self.servers:
            if server.name == link:
                return f"{link}@{server.host} (pid {server.pid}, {server.endpoint})"
        return f"the scheduler at {self._root}" if link == role.SCHEDULER_LINK else link


def _error(request: NodeRequest, message: Message) -> RuntimeFault:
    reason = f"{request.what}: {message.body.get('reason', 'the other side gave no reason')}"
    name = message.body.get("error")
    if name == "RuleError":
        return RuleError(reason, str(message.body.get("traceback", "")))
    if name == "PeerLost":
        return because_of(PeerLost(reason), str(message.body.get("who", "")))
    return KVError(reason)
