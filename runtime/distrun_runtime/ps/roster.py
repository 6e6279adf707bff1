"""Who is in the job, who is late, who is gone. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from distrun_runtime.protocol.handshake import Identity

ALIVE = "alive"
LEFT = "left"
"""Said BYE: its part is over."""
LOST = "lost"


@dataclass
class Member:
    """A node that was welcomed."""

    link: str
    who: Identity
    state: str = ALIVE


class Roster:
    """The scheduler's book of workers and servers."""

    def __init__(self, workers: int, servers: int) -> None:
        self.expected = {"worker": workers, "server": servers}
        self.members: dict[str, Member] = {}

    def against(self, peer: Identity) -> str:
        """Return why `peer` may not join; empty: it may."""
        if peer.role not in self.expected:
            return "%s: this job has its scheduler already" % peer
        theirs = {"worker": peer.workers, "server": peer.servers}
        if theirs != self.expected:
            return "%s expects %s and %s; the scheduler was started for %d and %d" % (
                *(peer, _count(peer.workers, "worker"), _count(peer.servers, "server")),
                *(self.expected["worker"], self.expected["server"]),
            )
        count = self.expected[peer.role]
        if peer.rank >= count:
            return "%s: ranks of %ss go from 0 to %d" % (peer, peer.role, count - 1)
        present = self.of_role(peer.role)
        taken = [member for member in present if peer.rank >= 0 and member.who.rank == peer.rank]
        if taken:
            return "rank %d is taken: %s registered as %s" % (peer.rank, taken[0].who, taken[0].who.name)
        if len(present) >= count:
            return "all %d %ss have registered: %s" % (count, peer.role, _names(member.who for member in present))
        return ""

    def add(self, link: str, peer: Identity) -> None:
        """Enter a node that `against` said nothing about."""
        self.members[link] = Member(link, peer)

    def remove(self, link: str) -> None:
        """Strike a node out, before the roster is complete."""
        self.members.pop(link, None)

    @property
    def is_complete(self) -> bool:
        """Whether everybody is here."""
        return all(len(self.of_role(role)) == count for role, count in self.expected.items())

    def of_role(self, role: str) -> list[Member]:
        """Return the members of a role in the order of rank, those without one last."""
        found = [member for member in self.members.values() if member.who.role == role]
        return sorted(found, key=lambda member: (member.who.rank < 0, member.who.rank))

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

    def to_json(self) -> list[dict[str, Any]]:
        """Return all members for a ROSTER message."""
        return [asdict(member.who) for member in self.members.values()]

    def missing(self) -> list[str]:
        """Return the names of the nodes that have not registered; [] if a node has no rank yet: nobody knows then."""
        if any(member.who.rank < 0 for member in self.members.values()):
            return []
        present = {member.who.name for member in self.members.values()}
        every = ["%s-%d" % (role, rank) for role, count in self.expected.items() for rank in range(count)]
        return [name for name in every if name not in present]

    def waiting_text(self) -> str:
        """Return who is missing, for people: `waiting for 1 of 2 workers: have worker-0@d1`."""
        parts = []
        for role, count in self.expected.items():
            present = self.of_role(role)
            if len(present) < count:
                have = _names(member.who for member in present) or "none"
                parts.append("%d of %d %ss: have %s" % (count - len(present), count, role, have))
        return "waiting for " + "; ".join(parts)


def _names(who: Iterable[Identity]) -> str:
    return ", ".join("%s@%s" % (peer.name, peer.host) for peer in who)


def _count(number: int, noun: str) -> str:
    return "%d %s%s" % (number, noun, "" if number == 1 else "s")


def from_json(value: Sequence[dict[str, Any]]) -> list[Identity]:
    """Return the nodes of a ROSTER message; members that we do not know are ignored."""
    names = [each.name for each in fields(Identity)]
    return [Identity(**{name: node[name] for name in names}) for node in value]
