"""Errands: one message to all servers, and what to do when all of them have answered. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from distrun_runtime.protocol.message import Message
from distrun_runtime.ps import role
from distrun_runtime.ps.replies import refusal
from distrun_runtime.ps.roster import Member


@dataclass
class Answers:
    """What the servers said to one errand."""

    bodies: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Server's name to its reply, of those that did what was asked."""
    errors: list[str] = field(default_factory=list)
    """What the others had against it, each with its name."""
    error: str = "KVError"
    """Class of the first of these, of distrun_runtime.errors."""
    traceback: str = ""

    def refusal(self, request: Message) -> Message:
        """Return the reply to whoever wanted it: all that servers had against it."""
        return refusal(request, folded(self.errors), self.error, self.traceback)


def folded(errors: Iterable[str]) -> str:
    """Return errors `name: reason` as one text, in which each reason stands once, after all who gave it. Pure."""
    names: dict[str, list[str]] = {}
    for error in sorted(errors):
        name, _, reason = error.partition(": ")
        names.setdefault(reason, []).append(name)
    return "; ".join(": ".join(filter(None, (", ".join(those), reason))) for reason, those in names.items())


Then = Callable[[Answers], list[role.Action]]
"""What follows."""


@dataclass
class _Errand:
    waiting: set[str]
    then: Then
    answers: Answers = field(default_factory=Answers)


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
        if errand is None or server.link not in errand.waiting:
            return []
        errand.waiting.discard(server.link)
        _note(errand.answers, server.who.name, reply)
        if errand.waiting:
            return []
        del self._errands[reply.request]
        return errand.then(errand.answers)


def _note(answers: Answers, name: str, reply: Message) -> None:
    if not reply.is_error:
        answers.bodies[name] = reply.body
        return
    if not answers.errors:
        answers.error = str(reply.body.get("error", "KVError"))
        answers.traceback = str(reply.body.get("traceback", ""))
    answers.errors.append("%s: %s" % (name, reply.body.get("reason")))
