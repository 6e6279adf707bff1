"""Errands: one message to all servers, and what to do when all of them have answered. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from distrun_runtime.net.message import Message
from distrun_runtime.node import role
from distrun_runtime.node.roster import Member

Then = Callable[[list[str]], list[role.Action]]
"""What follows; it is given what servers had against it."""


@dataclass
class _Errand:
    waiting: set[str]
    then: Then
    errors: list[str] = field(default_factory=list)


class Errands:
    """The errands that are under way."""

    def __init__(self) -> None:
        self._errands: dict[int, _Errand] = {}
        self._count = 0

    def send(self, message: Message, servers: Iterable[Member], then: Then) -> list[role.Action]:
        """Send `message` to all servers; `then` gives what follows when all have answered."""
        self._count += 1
        links = [server.link for server in servers]
        self._errands[self._count] = _Errand(set(links), then)
        numbered = replace(message, request=self._count)
        return [role.Send(link, numbered) for link in links]

    def forget(self) -> None:
        """Let nothing follow from what is under way. Numbers go on, so that a late answer is none of a later errand."""
        self._errands.clear()

    def answered(self, server: Member, reply: Message) -> list[role.Action]:
        """Take in a server's reply and return what follows from it."""
        errand = self._errands.get(reply.request)
        if errand is None:
            return []
        errand.waiting.discard(server.link)
        if reply.is_error:
            errand.errors.append("%s: %s" % (server.who.name, reply.body.get("reason")))
        if errand.waiting:
            return []
        del self._errands[reply.request]
        return errand.then(errand.errors)
