"""What tests of transports share: polls with a deadline, and pairs that are connected."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from slowness import scaled

from distrun_runtime.protocol import message
from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.transport.base import Arrived, Event, Heartbeat, PathChosen, Transport, Up

HOST = "127.0.0.1"
SHORT = Heartbeat(0.5, 4.0)
"""Where a peer is to be lost; a healthy one may still be slow for a while."""
LONG = Heartbeat(0.5, 60.0)
"""Where none is to be lost."""
DEADLINE_S = scaled(60.0)

HELLO = message.encode(Message(Kind.HELLO))
WELCOME = message.encode(Message(Kind.WELCOME))


def until(
    transport: Transport, found: Callable[[list[Event]], bool], *others: Transport, seconds: float = DEADLINE_S
) -> list[Any]:
    """Poll, and let the others run, until `found`; return all events of `transport`."""
    events: list[Event] = []
    deadline = time.monotonic() + seconds
    while not found(events):
        assert time.monotonic() < deadline, "only this happened: %r" % events
        events += transport.poll(0.02)
        for other in others:
            other.poll(0)
    return events


def has(kind: type[Any], count: int = 1) -> Callable[[list[Event]], bool]:
    """Return whether so many events of a kind are there."""
    return lambda events: sum(isinstance(event, kind) for event in events) >= count


@contextmanager
def closed_at_the_end(make: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Give what makes things as `make` does, and close them all at the end."""
    with ExitStack() as made:
        yield lambda *arguments, **more: made.enter_context(closing(make(*arguments, **more)))


def endpoint(port: int) -> str:
    """Return the endpoint of a port of this machine."""
    return "tcp://%s:%d" % (HOST, port)


def frames_of(event: Arrived) -> list[bytes]:
    """Return copies of the frames of a message."""
    return [bytes(frame) for frame in event.frames]


def welcomed(acceptor: Transport, opener: Transport, link: str = "server-0") -> str:
    """Connect the two as nodes do, with a handshake; return the acceptor's name of the connection."""
    opener.connect(link, endpoint(acceptor.bind(HOST)))
    assert until(opener, has(Up), acceptor) == [Up(link)]
    opener.send(link, HELLO)
    [arrived] = until(acceptor, has(Arrived), opener)
    acceptor.admitted(arrived.link)
    acceptor.send(arrived.link, WELCOME)
    acceptor.proven(arrived.link)
    [answer] = until(opener, has(Arrived), acceptor)
    assert frames_of(answer) == [bytes(frame) for frame in WELCOME]
    return arrived.link


def agree(acceptor: Transport, opener: Transport, count: int = 1) -> list[PathChosen]:
    """Poll both until each has chosen so many paths; return what the opener has chosen."""
    found: dict[Transport, list[PathChosen]] = {acceptor: [], opener: []}
    deadline = time.monotonic() + DEADLINE_S
    while min(map(len, found.values())) < count:
        assert time.monotonic() < deadline, "only these were chosen: %r" % found
        for transport, chosen in found.items():
            chosen += [event for event in transport.poll(0.02) if isinstance(event, PathChosen)]
    return found[opener]
