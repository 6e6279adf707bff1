"""A listener and agents' ends of connections, for tests of agents that dial back."""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from slowness import scaled

from distrun.backends import bootstrap
from distrun_runtime.agent.dial import Credentials, Dialed, Dialer
from distrun_runtime.coordinator.listener import AgentListener, ClaimedTwice, Connected, Register, pin_of

JOB = "calm-otter-7f3"
SECRET = "5e" * 32
WAIT_S = scaled(20.0)
CERTIFICATE = bootstrap.certificate(JOB)
"""Made once: what it takes is not what these tests are about."""
PIN = pin_of(CERTIFICATE)


class Hall:
    """A listener of a job, and what it told."""

    def __init__(self, places: Sequence[str], port_range: str = "") -> None:
        self.register = Register(JOB, SECRET, PIN, places)
        self.listener = AgentListener(self.register, CERTIFICATE, lambda: b"program\n", port_range)
        self.agents: queue.Queue[tuple[str, Connected]] = queue.Queue()
        self.twice: queue.Queue[ClaimedTwice] = queue.Queue()
        self.denied: queue.Queue[tuple[str, str]] = queue.Queue()
        self._connections: list[ssl.SSLSocket] = []

    def start(self) -> None:
        self.listener.start(
            lambda place, connected: self.agents.put((place, connected)),
            self.twice.put,
            lambda address, reason, is_claim: self.denied.put((address, reason)),
        )

    def agent(self) -> tuple[str, Connected]:
        place, connected = self.agents.get(timeout=WAIT_S)
        self._connections.append(connected.socket)
        return place, connected

    def close(self) -> None:
        self.listener.close()
        while not self.agents.empty():
            self.agent()
        for connection in self._connections:
            connection.close()

    @property
    def port(self) -> int:
        return self.listener.port

    def credentials(self, place: str = "0", **members: Any) -> Credentials:
        return credentials(("127.0.0.1", self.port), place=place)._replace(**members)


def credentials(*addresses: tuple[str, int], place: str = "0") -> Credentials:
    return Credentials(addresses, PIN, JOB, place, "a" * 32, SECRET, False)


@contextlib.contextmanager
def hall(*places: str, port_range: str = "") -> Iterator[Hall]:
    found = Hall(places or ("0", "1"), port_range)
    found.start()
    try:
        yield found
    finally:
        found.close()


class Agent:
    """The dialer of an agent with a loop of its own."""

    def __init__(self, credentials: Credentials) -> None:
        self.selector = selectors.PollSelector()
        self.found: list[Dialed] = []
        self.dialer = Dialer(credentials, self.selector, self.found.append)

    def until(self, condition: Callable[[], object]) -> None:
        """Turn the loop until the condition holds."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            now = time.monotonic()
            assert now < deadline, (self.dialer.denied, self.dialer.problems)
            for key, _ in self.selector.select(max(0.0, min(self.dialer.next_at - now, 0.05))):
                key.data()
            self.dialer.tick(time.monotonic())

    def dial(self) -> Dialed:
        self.dialer.begin()
        self.until(lambda: self.found)
        return self.found[0]

    def close(self) -> None:
        self.dialer.close()
        for dialed in self.found:
            dialed.socket.close()
        self.selector.close()


@contextlib.contextmanager
def agent(credentials: Credentials) -> Iterator[Agent]:
    found = Agent(credentials)
    try:
        yield found
    finally:
        found.close()


def read(connection: socket.socket, size: int) -> bytes:
    """Read so many bytes of a connection, which is made to wait."""
    connection.settimeout(WAIT_S)
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        assert more, f"the connection ended after {data!r}"
        data += more
    return data
