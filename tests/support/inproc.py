"""A transport inside one process, for whole jobs in threads of one process without a socket.

What is sent is copied, so no buffer is in use after `send`. Connections have no limits and need no credentials. The
caller can delay messages and cut connections.

Threads: the methods of a network may be called from any.
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

from distrun_runtime.arrays.dtypes import Buffer
from distrun_runtime.transport import base
from distrun_runtime.transport.base import COPIED, Arrived, Down, Event, Lease, Link, Up


@dataclass
class _Wire:
    """One connection: both sides, and its name on each."""

    opener: InprocTransport
    link: Link
    acceptor: InprocTransport
    link_in: Link


class InprocNetwork:
    """Connects transports by their endpoints.

    Arguments:
        delay_s: returns by how many seconds a message is delayed, from the receiver's endpoint and the frames; 0 or
            less: not at all. Messages of one connection keep their order.
    """

    def __init__(self, delay_s: Callable[[str, Sequence[Buffer]], float] | None = None) -> None:
        self.lock = threading.RLock()
        self.delay_s = delay_s or (lambda endpoint, frames: 0.0)
        self.bound: dict[str, InprocTransport] = {}
        self.wires: list[_Wire] = []
        self.numbers = itertools.count(1)

    def transport(self) -> InprocTransport:
        """Return a transport of this network."""
        return InprocTransport(self)

    def join(self, opener: InprocTransport, link: Link, endpoint: str) -> bool:
        """Connect `opener` to the transport that listens on `endpoint`; False if there is none."""
        with self.lock:
            acceptor = self.bound.get(endpoint)
            if acceptor is None:
                return False
            self.wires.append(_Wire(opener, link, acceptor, f"in:{next(self.numbers):08x}"))
        opener.put(Up(link))
        return True

    def cut(self, transport: InprocTransport, reason: str = "cut") -> None:
        """Break every connection of `transport`, as when its process dies."""
        with self.lock:
            broken = [wire for wire in self.wires if transport in (wire.opener, wire.acceptor)]
            self.bound = {endpoint: other for endpoint, other in self.bound.items() if other is not transport}
        self._break(broken, reason)

    def cut_link(self, opener: InprocTransport, link: Link, reason: str = "cut") -> None:
        """Break one connection, by its name at the side that opened it."""
        self._break([wire for wire in self.wires if wire.opener is opener and wire.link == link], reason)

    def _break(self, broken: Sequence[_Wire], reason: str) -> None:
        with self.lock:
            self.wires = [wire for wire in self.wires if wire not in broken]
        for wire in broken:
            wire.opener.put(Down(wire.link, reason))
            wire.acceptor.put(Down(wire.link_in, reason))


class InprocTransport:
    """One node's connections on an `InprocNetwork`."""

    def __init__(self, network: InprocNetwork) -> None:
        self._network = network
        self._arrivals: deque[tuple[float, Event]] = deque()
        self._changed = threading.Condition()
        self._is_woken = False
        self._calling: dict[Link, str] = {}
        self.endpoint = ""

    def bind(self, address: str, ports: Sequence[int] = ()) -> int:
        """Listen; return the port."""
        with self._network.lock:
            for port in ports or (20000 + next(self._network.numbers),):
                endpoint = base.endpoint(address, port)
                if endpoint not in self._network.bound:
                    self._network.bound[endpoint] = self
                    self.endpoint = endpoint
                    return port
        where = f"port {ports[0]}" if len(ports) == 1 else f"any of {len(ports)} ports"
        raise OSError(errno.EADDRINUSE, f"cannot listen on {address}, {where}: {os.strerror(errno.EADDRINUSE)}")

    def connect(self, link: Link, endpoint: str) -> None:
        """Open a connection."""
        if not self._network.join(self, link, endpoint):
            self._calling[link] = endpoint

    def disconnect(self, link: Link, linger_s: float = 0.0) -> None:
        """Close a connection."""
        self._calling.pop(link, None)
        with self._network.lock:
            closed = [wire for wire in self._network.wires if wire.opener is self and wire.link == link]
            self._network.wires = [wire for wire in self._network.wires if wire not in closed]
        for wire in closed:
            wire.acceptor.put(Down(wire.link_in, "its connection closed"))

    def admitted(self, link: Link) -> None:
        """Do nothing: there are no limits."""

    def proven(self, link: Link) -> None:
        """Do nothing: there is one path."""

    def refused(self, link: Link) -> None:
        """Do nothing: the side that was refused closes its connection."""

    def shares(self, link: Link) -> bool:
        """Return False: all frames travel as bytes."""
        return False

    def send(self, link: Link, frames: Sequence[Buffer]) -> Lease:
        """Deliver a copy of the frames."""
        with self._network.lock:
            for wire in self._network.wires:
                if wire.opener is self and wire.link == link:
                    target, name = wire.acceptor, wire.link_in
                    break
                if wire.acceptor is self and wire.link_in == link:
                    target, name = wire.opener, wire.link
                    break
            else:
                raise ConnectionError(f"no connection {link}")
        copies = [bytes(memoryview(frame).cast("B")) if memoryview(frame).nbytes else b"" for frame in frames]
        target.put(Arrived(name, copies), self._network.delay_s(target.endpoint, copies))
        return COPIED

    def put(self, event: Event, delay_s: float = 0.0) -> None:
        """Give `event` to a poll after `delay_s`. Threads: any."""
        with self._changed:
            due = time.monotonic() + delay_s
            if self._arrivals:
                due = max(due, self._arrivals[-1][0]) if delay_s > 0 else due
            self._arrivals.append((due, event))
            self._changed.notify()

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait for events and return them."""
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
                # What came behind a delayed message waits for it, so the first one says when to look again.
                until = min(end, self._arrivals[0][0]) if self._arrivals else end
                self._changed.wait(max(0.0, until - now))

    def wake(self) -> None:
        """End a `poll`."""
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    def close(self, linger_s: float = 0.0) -> None:
        """Close everything."""
        self._network.cut(self, "its connection closed")
