"""A transport inside one process: the same interface as ZeroMQ's, with accidents on request.

Part of the product, not of the tests: a whole job can run in threads of one process, fast and without a socket, and
meet a late, cut or dead connection when the caller says so.

Threads: each transport belongs to the thread that polls it; `wake` and the network's methods may be called from any.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distrun_runtime.protocol.message import Buffer
from distrun_runtime.transport.zeromq import Arrived, Down, Event, Lease, Up


@dataclass
class _Wire:
    """One connection: who opened it under which name, who accepted it as what."""

    opener: InprocTransport
    link: str
    acceptor: InprocTransport
    link_in: str


class InprocNetwork:
    """Connects transports by their endpoints.

    Arguments:
        delay_s: how late a message arrives, by its endpoint and frames; 0 or less: at once. Messages of one connection
            keep their order.
    """

    def __init__(self, delay_s: Callable[[str, Sequence[Buffer]], float] | None = None) -> None:
        self.lock = threading.RLock()
        self.delay_s = delay_s or (lambda endpoint, frames: 0.0)
        self.bound: dict[str, InprocTransport] = {}
        self.wires: list[_Wire] = []
        self._numbers = itertools.count(1)

    def transport(self) -> InprocTransport:
        """Return a transport of this network."""
        return InprocTransport(self)

    def join(self, opener: InprocTransport, link: str, endpoint: str) -> bool:
        """Connect `opener` to whoever listens on `endpoint`; False if nobody does."""
        with self.lock:
            acceptor = self.bound.get(endpoint)
            if acceptor is None:
                return False
            self.wires.append(_Wire(opener, link, acceptor, "in:%08x" % next(self._numbers)))
        opener.put(Up(link))
        return True

    def cut(self, transport: InprocTransport, reason: str = "cut") -> None:
        """Break every connection of `transport`, as when its process dies."""
        with self.lock:
            broken = [wire for wire in self.wires if transport in (wire.opener, wire.acceptor)]
            self.wires = [wire for wire in self.wires if wire not in broken]
            self.bound = {endpoint: other for endpoint, other in self.bound.items() if other is not transport}
        for wire in broken:
            wire.opener.put(Down(wire.link, reason))
            wire.acceptor.put(Down(wire.link_in, reason))

    def next_port(self) -> int:
        """Return a port that no transport of this network has."""
        return 20000 + next(self._numbers)


class InprocTransport:
    """One node's connections on an `InprocNetwork`."""

    def __init__(self, network: InprocNetwork) -> None:
        self._network = network
        self._arrivals: deque[tuple[float, Event]] = deque()
        self._changed = threading.Condition()
        self._is_woken = False
        self._calling: dict[str, str] = {}
        self.endpoint = ""

    def bind(self, address: str, ports: Sequence[int] = ()) -> int:
        """Listen and return the port: the first of `ports` that is free, any when empty.

        Raises:
            OSError: all of them are taken.
        """
        with self._network.lock:
            for port in ports or (self._network.next_port(),):
                endpoint = "tcp://%s:%d" % (address, port)
                if endpoint not in self._network.bound:
                    self._network.bound[endpoint] = self
                    self.endpoint = endpoint
                    return port
        where = "port %d" % ports[0] if len(ports) == 1 else "any of %d ports" % len(ports)
        raise OSError(errno.EADDRINUSE, "cannot listen on %s, %s: %s" % (address, where, os.strerror(errno.EADDRINUSE)))

    def connect(self, link: str, endpoint: str) -> None:
        """Open a connection; `Up` follows when somebody listens there."""
        if not self._network.join(self, link, endpoint):
            self._calling[link] = endpoint

    def disconnect(self, link: str, linger_s: float = 0.0) -> None:
        """Close a connection that we opened."""
        self._calling.pop(link, None)
        with self._network.lock:
            closed = [wire for wire in self._network.wires if wire.opener is self and wire.link == link]
            self._network.wires = [wire for wire in self._network.wires if wire not in closed]
        for wire in closed:
            wire.acceptor.put(Down(wire.link_in, "its connection closed"))

    def proven(self, link: str) -> None:
        """Nothing: connections inside a process have no limits."""

    def refused(self, link: str) -> None:
        """Nothing: who was refused closes its connection."""

    def send(self, link: str, frames: Sequence[Buffer]) -> Lease:
        """Deliver a copy of the frames.

        Raises:
            ConnectionError: there is no such connection.
        """
        with self._network.lock:
            for wire in self._network.wires:
                if wire.opener is self and wire.link == link:
                    target, name = wire.acceptor, wire.link_in
                    break
                if wire.acceptor is self and wire.link_in == link:
                    target, name = wire.opener, wire.link
                    break
            else:
                raise ConnectionError("no connection %s" % link)
        copies = [bytes(memoryview(frame).cast("B")) if memoryview(frame).nbytes else b"" for frame in frames]
        target.put(Arrived(name, copies), self._network.delay_s(target.endpoint, copies))
        return Lease(())

    def put(self, event: Event, delay_s: float = 0.0) -> None:
        """Let `event` happen here after a while. Threads: any."""
        with self._changed:
            due = time.monotonic() + delay_s
            if self._arrivals:
                due = max(due, self._arrivals[-1][0]) if delay_s > 0 else due
            self._arrivals.append((due, event))
            self._changed.notify()

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait at most so long and return what happened."""
        for link, endpoint in list(self._calling.items()):
            if self._network.join(self, link, endpoint):
                del self._calling[link]
        if self._calling:
            timeout_s = min(timeout_s, 0.02)
        end = time.monotonic() + timeout_s
        with self._changed:
            while True:
                now = time.monotonic()
                due: list[Event] = []
                while self._arrivals and self._arrivals[0][0] <= now:
                    due.append(self._arrivals.popleft()[1])
                if due or self._is_woken or now >= end:
                    self._is_woken = False
                    return due
                # What came behind a late message waits for it: only the first one says when to look again.
                until = min(end, self._arrivals[0][0]) if self._arrivals else end
                self._changed.wait(max(0.0, until - now))

    def wake(self) -> None:
        """End a running or the next `poll` early. Threads: any."""
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    def close(self, linger_s: float = 0.0) -> None:
        """Close everything."""
        self._network.cut(self, "its connection closed")
