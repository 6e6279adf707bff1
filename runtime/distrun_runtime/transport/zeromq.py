"""The sockets of one node: connections out, connections in, and what happens on them.

A node binds one ROUTER and opens one DEALER for each peer it talks to; replies come back on the connection that
the request went out on. Liveness is libzmq's own heartbeat (ZMTP 3.1 PING/PONG, RFC 37): its I/O thread beats while
Python holds the GIL. The death of a peer we connected to comes from the socket's monitor; the death of one that
connected to us shows when the ROUTER cannot route to it any more (ROUTER_MANDATORY), which is tried every second.

Connections that come in are limited until their other side is proven: `transport.admission`.

Threads: everything belongs to the thread that polls, except `wake`.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

import zmq
from zmq.utils.monitor import recv_monitor_message

from distrun_runtime.contract.duration import duration
from distrun_runtime.protocol.message import FRAME_LIMIT, Buffer
from distrun_runtime.transport.admission import Admission, Stranger, refusal

PROBE_S = 1.0
"""How often connections in are tried; bounds how late their end is seen once libzmq knows it."""

ZERO_COPY_BYTES = 65536
"""Frames of at least so many bytes are lent to ZeroMQ instead of copied."""

Link = str
"""One connection: the name it was opened under (`server-1`), or `in:HEX` for one that came in."""


@dataclass(frozen=True)
class Up:
    """A connection we opened stands (again); nothing was proven yet."""

    link: Link


@dataclass(frozen=True)
class Down:
    """A connection broke: the peer died, closed it, or fell silent."""

    link: Link
    reason: str


@dataclass(frozen=True)
class Arrived:
    """Frames came in on a connection."""

    link: Link
    frames: Sequence[Buffer]


@dataclass(frozen=True)
class Rejected:
    """The other side does not accept our credentials: a connection that we opened is closed, and not tried again."""

    link: Link
    reason: str


Event = Union[Up, Down, Arrived, Rejected, Stranger]


@dataclass(frozen=True)
class Heartbeat:
    """When a silent peer is lost, seconds."""

    interval_s: float = 2.0
    timeout_s: float = 10.0


class Lease:
    """A buffer that was lent to ZeroMQ; it must not be written while it is out."""

    def __init__(self, trackers: Sequence[zmq.MessageTracker]) -> None:
        self._trackers = trackers

    @property
    def is_over(self) -> bool:
        """Whether ZeroMQ has let go of the buffer."""
        return all(tracker.done for tracker in self._trackers)


class ZmqTransport:
    """ROUTER, DEALERs and their monitors, polled together."""

    def __init__(
        self, heartbeat: Heartbeat | None = None, token: bytes = b"", *, frame_limit: int = FRAME_LIMIT
    ) -> None:
        # pyzmq's collector of lent buffers starts with the first one, and stops in an exit handler. Started here, it
        # stops after ours: a worker that ends can still send what it pushed.
        zmq.Frame(bytearray(ZERO_COPY_BYTES), copy=False, track=True)
        self._heartbeat = heartbeat or Heartbeat()
        self._token = token
        self._frame_limit = frame_limit
        self._context = zmq.Context()
        self._context.max_sockets = 65535 if zmq.zmq_version_info() >= (4, 0) else 1023
        self._poller = zmq.Poller()
        self._router: zmq.Socket[bytes] | None = None
        self._dealers: dict[Link, zmq.Socket[bytes]] = {}
        self._monitors: dict[zmq.Socket[bytes], Link] = {}
        self._inbound: set[Link] = set()
        self._unproven: dict[Link, int] = {}
        """Connections in whose other side has proven nothing yet, and libzmq's descriptors of them."""
        self._next_probe = 0.0
        # A plain socket pair: a thread may write to it while another polls, which no ZeroMQ socket allows.
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._poller.register(self._wake_in, zmq.POLLIN)
        self._admission = Admission(self._context, token, self.wake)

    def bind(self, address: str, ports: Sequence[int] = ()) -> int:
        """Listen on `address` and return the port: the first of `ports` that is free, any free one when empty.

        Raises:
            OSError: no port could be bound; says which were tried, or the address is not one of this host.
        """
        router = self._socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._admission.acceptor(router)
        try:
            if not ports:
                router.bind(endpoint(address, "*"))
            else:
                _bind_first(router, address, ports)
        except zmq.ZMQError as err:
            self._admission.abandon()
            router.close(0)
            where = "port %d" % ports[0] if len(ports) == 1 else "any of %d ports" % len(ports) if ports else "a port"
            raise OSError(err.errno, "cannot listen on %s, %s: %s" % (address, where, err)) from err
        self._router = router
        self._poller.register(router, zmq.POLLIN)
        port = int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._admission.start(port)
        return port

    def connect(self, link: Link, endpoint: str) -> None:
        """Open a connection to `endpoint`; `Up` follows when it stands. It is tried until then, or until `Rejected`."""
        dealer = self._socket(zmq.DEALER)
        self._admission.opener(dealer)
        monitor = dealer.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
        )
        self._dealers[link] = dealer
        self._monitors[monitor] = link
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        dealer.connect(endpoint)

    def disconnect(self, link: Link, linger_s: float = 0.0) -> None:
        """Close a connection that we opened; forget one that came in."""
        self._inbound.discard(link)
        self._unproven.pop(link, None)
        dealer = self._dealers.pop(link, None)
        if dealer is None:
            return
        dealer.disable_monitor()
        for monitor, name in list(self._monitors.items()):
            if name == link:
                del self._monitors[monitor]
                self._poller.unregister(monitor)
                monitor.close(0)
        self._poller.unregister(dealer)
        dealer.close(int(linger_s * 1000))

    def proven(self, link: Link) -> None:
        """The other side of a connection that came in has proven itself: no limit holds any more."""
        fd = self._unproven.pop(link, None)
        if fd is not None:
            self._admission.proven(fd)

    def refused(self, link: Link) -> None:
        """The other side of a connection that came in was told why it is refused: close it in a moment."""
        fd = self._unproven.pop(link, None)
        if fd is not None:
            self._admission.refused(fd)

    def send(self, link: Link, frames: Sequence[Buffer]) -> Lease:
        """Send frames; big ones are lent to ZeroMQ until the lease is over.

        Raises:
            ConnectionError: the connection that came in is gone.
        """
        prefix: list[Buffer] = []
        out = self._dealers.get(link)
        if out is None:
            if self._router is None or not link.startswith("in:"):
                raise ConnectionError("no connection %s" % link)
            out = self._router
            prefix = [bytes.fromhex(link[3:])]
        trackers: list[zmq.MessageTracker] = []
        parts = [*prefix, *frames]
        try:
            for number, part in enumerate(parts):
                more = zmq.SNDMORE if number < len(parts) - 1 else 0
                if memoryview(part).nbytes >= ZERO_COPY_BYTES:
                    tracker = out.send(part, more, copy=False, track=True)
                    if tracker is not None:
                        trackers.append(tracker)
                else:
                    out.send(part, more)
        except zmq.ZMQError as err:
            raise ConnectionError("%s is gone: %s" % (link, err)) from err
        return Lease(trackers)

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait at most so long and return what happened; empty after a `wake` or when nothing did."""
        events: list[Event] = []
        until_probe = max(0.0, self._next_probe - time.monotonic()) if self._inbound else timeout_s
        ready = dict(self._poller.poll(int(1000 * max(0.0, min(timeout_s, until_probe)))))
        # Monitors last: what a peer sent before it died is heard before its death.
        for out in [sock for sock in ready if sock not in self._monitors]:
            if out is self._router:
                events += self._receive_in()
            elif out is self._wake_in or out == self._wake_in.fileno():
                with contextlib.suppress(BlockingIOError):
                    while self._wake_in.recv(4096):
                        pass
        for link, dealer in list(self._dealers.items()):
            if dealer in ready:
                events += _arrived(link, dealer)
        for monitor, link in list(self._monitors.items()):
            if monitor in ready:
                events += self._monitored(monitor, link)
        return [*events, *self._probe(), *self._admission.strangers()]

    def wake(self) -> None:
        """End a running or the next `poll` early. Threads: may be called from any, and from a signal handler."""
        with contextlib.suppress(OSError):
            self._wake_out.send(b"w")

    def close(self, linger_s: float = 0.0) -> None:
        """Close everything; what was sent has so long to leave.

        What was sent to a peer that has gone is waited for in vain on connections that we opened. And libzmq 4.3.5
        aborts the process if a peer dies on a connection that lingers and is not read any more, at the next heartbeat.
        So a node asks for an answer to its last words instead, and lingers only where it cannot.
        """
        self._admission.close()
        for link in list(self._dealers):
            self.disconnect(link, linger_s)
        if self._router is not None:
            self._poller.unregister(self._router)
            self._router.close(int(linger_s * 1000))
            self._router = None
        self._wake_in.close()
        self._wake_out.close()
        self._context.term()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        new: zmq.Socket[bytes] = self._context.socket(kind)
        beat = self._heartbeat
        # A peer is lost after at most timeout_s: the beat that finds it silent goes out up to interval_s late, and a
        # connection in is tried every PROBE_S.
        patience_s = max(beat.timeout_s - beat.interval_s - PROBE_S, beat.timeout_s / 2)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, 1),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, self._frame_limit),
            (zmq.HEARTBEAT_IVL, int(beat.interval_s * 1000)),
            (zmq.HEARTBEAT_TIMEOUT, int(patience_s * 1000)),
            (zmq.HANDSHAKE_IVL, int(beat.timeout_s * 1000)),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 1000),
        ):
            new.setsockopt(option, value)
        return new

    def _receive_in(self) -> list[Event]:
        assert self._router is not None
        events: list[Event] = []
        for frames in _receive_all(self._router):
            link = "in:" + bytes(frames[0].buffer).hex()
            if len(frames) > 1:
                if link not in self._inbound:
                    self._inbound.add(link)
                    self._unproven[link] = int(frames[1].get(zmq.SRCFD))
                events.append(Arrived(link, [frame.buffer for frame in frames[1:]]))
        return events

    def _monitored(self, monitor: zmq.Socket[bytes], link: Link) -> list[Event]:
        events: list[Event] = []
        while monitor.poll(0):
            message = recv_monitor_message(monitor)
            what = message["event"]
            if what == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                events.append(Up(link))
            elif what == zmq.EVENT_DISCONNECTED:
                # What arrived just before the end is still in the socket: hear it first.
                events += _arrived(link, self._dealers[link])
                events.append(self._down(link))
            elif what == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.disconnect(link)
                return [*events, Rejected(link, refusal(self._token, message["value"]))]
        return events

    def _down(self, link: Link) -> Down:
        return Down(link, "its connection closed, or it was silent for %s" % duration(self._heartbeat.timeout_s))

    def _probe(self) -> list[Event]:
        now = time.monotonic()
        if not self._inbound or now < self._next_probe:
            return []
        self._next_probe = now + PROBE_S
        events: list[Event] = []
        assert self._router is not None
        for link in sorted(self._inbound):
            try:
                self._router.send_multipart([bytes.fromhex(link[3:]), b""], zmq.NOBLOCK)
            except zmq.ZMQError as err:
                if err.errno == zmq.EHOSTUNREACH:
                    self._inbound.discard(link)
                    self._unproven.pop(link, None)
                    events.append(self._down(link))
        return events


def endpoint(address: str, port: int | str) -> str:
    """Return where a node is reached, `tcp://address:port`; an IPv6 address stands in brackets. Pure."""
    return "tcp://%s:%s" % ("[%s]" % address if ":" in address else address, port)


def _bind_first(router: zmq.Socket[bytes], address: str, ports: Sequence[int]) -> None:
    for number, port in enumerate(ports):
        try:
            router.bind(endpoint(address, port))
        except zmq.ZMQError as err:
            if err.errno != zmq.EADDRINUSE or number == len(ports) - 1:
                raise
        else:
            return


def _arrived(link: Link, dealer: zmq.Socket[bytes]) -> list[Event]:
    return [Arrived(link, [frame.buffer for frame in frames]) for frames in _receive_all(dealer)]


def _receive_all(source: zmq.Socket[bytes], limit: int = 256) -> list[list[zmq.Frame]]:
    messages: list[list[zmq.Frame]] = []
    while len(messages) < limit:
        try:
            frames = source.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            break
        if len(frames) == 1 and not len(frames[0].buffer):
            continue  # a probe
        messages.append(frames)
    return messages
