"""The nodes of a job as the scheduler knows them: who is here, who is late, who is gone; and queries to all servers.

No side effects: what is to be sent is returned as actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, field, fields, replace
from typing import Any

from distrun_runtime.contract import facts
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.protocol.handshake import NodeIdentity
from distrun_runtime.protocol.message import Message
from distrun_runtime.ps.replies import refusal
from distrun_runtime.ps.role import Action, Send

ALIVE = "alive"
LEFT = "left"
"""Said BYE: its part is over."""
LOST = "lost"
NAMED = 16
"""So many of a list of nodes are named in a message."""


@dataclass
class Member:
    """A node that was welcomed."""

    link: str
    who: NodeIdentity
    state: str = ALIVE


def relays_of(nodes: Iterable[NodeIdentity], host: str) -> dict[int, int]:
    """Return for each server of another host the server on `host` that stands in for it, by rank.

    None does unless `host` has several workers: their contributions are added before they leave it. Its servers share
    the others among them. Servers beyond those that the nodes are told of (`NodeIdentity.servers`) keep no values.
    """
    return relays_of_hosts([node for node in nodes if node.role == "server" or node.host == host]).get(host, {})


def relays_of_hosts(nodes: Sequence[NodeIdentity]) -> dict[str, dict[int, int]]:
    """Return `relays_of` by host, of all hosts that have any. The nodes, of which there may be many, are read once."""
    workers = Counter(node.host for node in nodes if node.role == "worker")
    servers: dict[str, list[int]] = {}
    for node in nodes:
        if node.role == "server" and workers[node.host] > 1:
            servers.setdefault(node.host, []).append(node.rank)
    keepers = sorted((node.rank, node.host) for node in nodes if node.role == "server" and node.rank < node.servers)
    found: dict[str, dict[int, int]] = {}
    for host, ranks in servers.items():
        here = sorted(ranks)
        relays = {owner: here[owner % len(here)] for owner, other in keepers if other != host}
        if relays:
            found[host] = relays
    return found


def workers_of(nodes: Iterable[NodeIdentity], host: str) -> tuple[int, ...]:
    """Return the ranks of the workers of a host."""
    return tuple(sorted(node.rank for node in nodes if node.role == "worker" and node.host == host))


class Roster:
    """The workers and servers of a job.

    What is asked at every message takes the same time however many there are.
    """

    def __init__(self, workers: int, servers: int, relays: int = 0) -> None:
        self._told = {"worker": workers, "server": servers}
        """What every node is told of the job's size."""
        self.expected = {"worker": workers, "server": servers + relays}
        self.members: dict[str, Member] = {}
        self._by_rank: dict[tuple[str, int], Member] = {}
        self._in_order: dict[str, list[Member]] = {}
        """`of_role`, until a member comes, goes or gets a rank."""
        self._counts: Counter[str] = Counter()
        """Members of each role."""
        self._counts_over: Counter[str] = Counter()
        """How many of those are lost or have left."""
        self._left: list[Member] = []

    def against(self, peer: NodeIdentity) -> str:
        """Return why `peer` may not join; empty: it may."""
        if peer.role not in self.expected:
            return f"{peer}: this job has its scheduler already"
        theirs = {"worker": peer.workers, "server": peer.servers}
        if theirs != self._told:
            return "%s expects %s and %s; the scheduler was started for %d and %d" % (
                *(peer, _count(peer.workers, "worker"), _count(peer.servers, "server")),
                *(self._told["worker"], self._told["server"]),
            )
        count = self.expected[peer.role]
        if peer.rank >= count:
            return f"{peer}: ranks of {peer.role}s go from 0 to {count - 1}"
        taken = self.of_rank(peer.role, peer.rank)
        if taken is not None:
            return f"rank {peer.rank} is taken: {taken.who} registered as {taken.who.name}"
        if self._counts[peer.role] >= count:
            return f"all {count} {peer.role}s have registered: {_names(self.of_role(peer.role))}"
        return ""

    def add(self, link: str, peer: NodeIdentity) -> None:
        """Add a node that `against` said nothing about."""
        self.members[link] = member = Member(link, peer)
        self._counts[peer.role] += 1
        self._in_order.pop(peer.role, None)
        if peer.rank >= 0:
            self._by_rank[peer.role, peer.rank] = member

    def remove(self, link: str) -> None:
        """Remove a node, before the roster is complete."""
        member = self.members.pop(link, None)
        if member is None:
            return
        self._counts[member.who.role] -= 1
        self._in_order.pop(member.who.role, None)
        self._by_rank.pop((member.who.role, member.who.rank), None)
        self._counts_over[member.who.role] -= member.state != ALIVE
        if member.state == LEFT:
            self._left = [other for other in self._left if other is not member]

    def end(self, member: Member, state: str) -> None:
        """Note that a member that was alive is LOST or LEFT."""
        member.state = state
        self._counts_over[member.who.role] += 1
        if state == LEFT:
            self._left.append(member)

    @property
    def is_complete(self) -> bool:
        """Whether everybody is here."""
        return all(self._counts[role] == count for role, count in self.expected.items())

    def count(self, role: str) -> int:
        """Return how many members of a role there are."""
        return self._counts[role]

    def count_alive(self, role: str) -> int:
        """Return how many members of a role are neither lost nor have left."""
        return self._counts[role] - self._counts_over[role]

    def of_rank(self, role: str, rank: int) -> Member | None:
        """Return the member that has a rank; None if it is free, or none is given (-1)."""
        return self._by_rank.get((role, rank))

    def of_role(self, role: str) -> list[Member]:
        """Return the members of a role in the order of rank, those without one last."""
        if role not in self._in_order:
            found = [member for member in self.members.values() if member.who.role == role]
            self._in_order[role] = sorted(found, key=lambda member: (member.who.rank < 0, member.who.rank))
        return list(self._in_order[role])

    def left(self, role: str) -> list[Member]:
        """Return the members of a role that have left, in that order."""
        return [member for member in self._left if member.who.role == role]

    def alive(self, role: str) -> list[Member]:
        """Return the members of a role that are neither lost nor have left."""
        return [member for member in self.of_role(role) if member.state == ALIVE]

    def assign(self) -> None:
        """Give each node without a rank the lowest that is free, in the order of registration."""
        for role, count in self.expected.items():
            members = [member for member in self.members.values() if member.who.role == role]
            free = iter(sorted(set(range(count)) - {member.who.rank for member in members}))
            for member in members:
                if member.who.rank < 0:
                    member.who = replace(member.who, rank=next(free))
                    self._by_rank[role, member.who.rank] = member
        self._in_order.clear()

    def to_json(self) -> list[dict[str, Any]]:
        """Return all members for a ROSTER message."""
        return [asdict(member.who) for member in self.members.values()]

    def missing(self) -> list[str]:
        """Return the names of the nodes that have not registered; [] while a node has no rank: they are unknown."""
        if any(member.who.rank < 0 for member in self.members.values()):
            return []
        present = {member.who.name for member in self.members.values()}
        every = [f"{role}-{rank}" for role, count in self.expected.items() for rank in range(count)]
        return [name for name in every if name not in present]

    def waiting_text(self) -> str:
        """Return who is missing, for people: `waiting for 1 of 2 workers: have worker-0@d1`."""
        parts = []
        for role, count in self.expected.items():
            present = self.of_role(role)
            if len(present) < count:
                have = _names(present) or "none"
                parts.append(f"{count - len(present)} of {count} {role}s: have {have}")
        return "waiting for " + "; ".join(parts)


def _names(members: Sequence[Member]) -> str:
    return listed([f"{member.who.name}@{member.who.host}" for member in members])


def tasks_of(ranks: Iterable[int]) -> list[str]:
    """Return the names of workers."""
    return [f"worker-{rank}" for rank in ranks]


def listed(names: Sequence[str]) -> str:
    """Return names with commas between them, and no more of them than a line should have."""
    return facts.listed(names, NAMED)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def from_json(value: Sequence[dict[str, Any]]) -> list[NodeIdentity]:
    """Return the nodes of a ROSTER message; members that we do not know are ignored."""
    names = [each.name for each in fields(NodeIdentity)]
    return [NodeIdentity(**{name: node[name] for name in names}) for node in value]


# Queries to all servers


@dataclass
class Answers:
    """What the servers said to one query."""

    bodies: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Server's name to its reply, of those that did what was asked."""
    errors: list[str] = field(default_factory=list)
    """Why the others refused it, each with its name."""
    error: str = "KVError"
    """Class of the first of these, of distrun_runtime.errors."""
    traceback: str = ""

    def refusal(self, request: Message) -> Message:
        """Return the refusal of the request that led to it: the reasons of all servers."""
        return refusal(request, folded(self.errors), self.error, self.traceback)


def folded(errors: Iterable[str]) -> str:
    """Return errors `name: reason` as one text, in which each reason stands once, after all who gave it."""
    names: dict[str, list[str]] = {}
    for error in sorted(errors):
        name, _, reason = error.partition(": ")
        names.setdefault(reason, []).append(name)
    return "; ".join(": ".join(filter(None, (", ".join(those), reason))) for reason, those in names.items())


Then = Callable[[Answers], list[Action]]
"""Returns what follows."""


@dataclass
class _Query:
    """One message to several servers."""

    waiting: set[str]
    then: Then
    answers: Answers = field(default_factory=Answers)


class Queries:
    """The queries that are under way."""

    def __init__(self) -> None:
        self._queries: dict[int, _Query] = {}
        self._count = 0

    def send(
        self, message: Message | Callable[[Member], Message], servers: Iterable[Member], then: Then
    ) -> list[Action]:
        """Send `message`, or what it returns for each, to all servers; `then` gives what follows when all have
        answered."""
        self._count += 1
        asked = list(servers)
        self._queries[self._count] = _Query({server.link for server in asked}, then)
        if callable(message):
            return [Send(server.link, replace(message(server), request=self._count)) for server in asked]
        numbered = replace(message, request=self._count)
        return [Send(server.link, numbered) for server in asked]

    def forget(self) -> None:
        """Drop all queries. Numbers go on, so that a late answer does not count for a later query."""
        self._queries.clear()

    def answered(self, server: Member, reply: Message) -> list[Action]:
        """Take in a server's reply and return what follows from it."""
        query = self._queries.get(reply.request)
        if query is None or server.link not in query.waiting:
            return []
        query.waiting.discard(server.link)
        _note(query.answers, server.who.name, reply)
        if query.waiting:
            return []
        del self._queries[reply.request]
        return query.then(query.answers)


def _note(answers: Answers, name: str, reply: Message) -> None:
    if not reply.is_error:
        answers.bodies[name] = reply.body
        return
    if not answers.errors:
        answers.error = str(reply.body.get("error", "KVError"))
        answers.traceback = str(reply.body.get("traceback", ""))
    answers.errors.append(f"{name}: {reply.body.get('reason')}")
