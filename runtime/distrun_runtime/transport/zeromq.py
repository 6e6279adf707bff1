"""A transport over ZeroMQ, by TCP.

A node binds one ROUTER and opens one DEALER for each peer that it talks to; replies come back on the connection of the
request. Liveness is libzmq's own heartbeat (ZMTP 3.1 PING and PONG, RFC 37): its I/O thread beats while Python holds
the GIL. The death of a peer that we connected to is reported by the socket's monitor. The death of a peer that
connected to us shows when the ROUTER cannot route to it any more (ROUTER_MANDATORY), which is tried every second.

`transport.admission` limits connections that come in until their other side is proven.

Frames of at least `ZERO_COPY_BYTES` are not copied: libzmq reads the caller's buffer, and pyzmq's tracker tells when
it has finished. Frames that arrive are libzmq's own memory.

pyzmq's `Socket.send` and `Socket.recv_multipart` are Python around compiled methods, and cost more than those: here
the compiled ones are called, with flags that are plain ints.

libzmq's own poll asks each socket several times, which with many connections costs more than the messages. Here the
operating system waits for the descriptors that the sockets have for that (ZMQ_FD). Such a descriptor tells of news
only, and any call on its socket may take the news in: so a socket that something was sent on is asked before the wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence

import zmq
from zmq.backend import Socket as _Compiled

from distrun_runtime.arrays.dtypes import Buffer
from distrun_runtime.contract.facts import duration
from distrun_runtime.protocol.message import FRAME_LIMIT
from distrun_runtime.transport.admission import Admission, next_of, refusal
from distrun_runtime.transport.base import (
    COPIED,
    Arrived,
    Down,
    Event,
    Heartbeat,
    Lease,
    Link,
    Rejected,
    Released,
    Up,
    endpoint,
)

PROBE_S = 1.0
"""How often connections that came in are tried; bounds how late their end is seen once libzmq knows it."""

ZERO_COPY_BYTES = 256 * 1024
"""Frames of at least so many bytes are not copied. For shorter ones the copy costs less than to be told, by pyzmq's
own thread, when libzmq has finished with the buffer."""

_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_MORE = int(zmq.SNDMORE)
_NOBLOCK = int(zmq.NOBLOCK)
_MESSAGES = 256
"""How many messages of a socket one poll receives at most."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""
_KEPT_BYTES = 256 * 1024 * 1024
"""How much freed memory at the end of its heap glibc may keep."""
_KEPT_BLOCK_BYTES = 32 * 1024 * 1024
"""The largest block whose memory glibc may keep; the most that mallopt(3) takes."""


def keep_freed_memory(kept_bytes: int = _KEPT_BYTES) -> bool:
    """Let the C library keep memory that is freed, for the next large frame. Return whether it can (glibc on Linux).

    libzmq allocates each frame that arrives. By default glibc soon gives memory of that size back to the kernel, and
    the page faults of the next frame cost as much as its copy. For processes of our own, before their first
    transport: the setting is for the whole process, which then keeps up to `kept_bytes` that it does not use.

    Source: mallopt(3).
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    # Either of them also ends glibc's own adjusting of both.
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BLOCK_BYTES) and libc.mallopt(_M_TRIM_THRESHOLD, kept_bytes))


class _Tracked:
    """The lease of a message that has frames which libzmq reads in place.

    libzmq reads the frames of a message in their order, and drops them together if the connection breaks. So the last
    of them is the only one that is asked.
    """

    __slots__ = ("_last",)

    def __init__(self, last: zmq.MessageTracker) -> None:
        self._last = last

    @property
    def is_over(self) -> bool:
        """Whether libzmq has finished with the buffers."""
        return self._last.done


class ZmqTransport:
    """ROUTER, DEALERs and their monitors, polled together."""

    def __init__(self, heartbeat: Heartbeat | None = None, token: bytes = b"") -> None:
        # pyzmq's thread that releases buffers starts with the first one, and stops in an exit handler. Started here, it
        # stops after ours: a worker that ends can still send what it pushed.
        zmq.Frame(bytearray(ZERO_COPY_BYTES), copy=False, track=True)
        self.heartbeat = heartbeat or Heartbeat()
        self._token = token
        self._context = zmq.Context()
        self._context.max_sockets = 65535 if zmq.zmq_version_info() >= (4, 0) else 1023
        self._selector = selectors.DefaultSelector()
        """Descriptors of all sockets; the data are the socket, None for `_wake_in`."""
        self._touched: set[zmq.Socket[bytes]] = set()
        """Sockets that may have something that their descriptor does not tell."""
        self._router: zmq.Socket[bytes] | None = None
        self._dealers: dict[Link, zmq.Socket[bytes]] = {}
        self._links: dict[zmq.Socket[bytes], Link] = {}
        """Of the dealers."""
        self._monitors: dict[zmq.Socket[bytes], Link] = {}
        self._inbound: set[Link] = set()
        self._unproven: dict[Link, int] = {}
        """Connections that came in and have proven nothing yet, with libzmq's descriptors of them."""
        self._in_use: dict[Link, deque[Lease]] = {}
        """Leases that were not over when `send` returned, the oldest first."""
        self._next_probe = 0.0
        # A plain socket pair: a thread may write to it while another polls, which no ZeroMQ socket allows.
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._is_asleep = self._is_woken = False
        self._admission = Admission(self._context, token, self.wake)

    def bind(self, address: str, ports: Sequence[int] = ()) -> int:
        """Listen; return the port."""
        router = self._socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._admission.acceptor(router)
        try:
            _bind_first(router, address, ports or ("*",))
        except zmq.ZMQError as err:
            self._admission.abandon()
            router.close(0)
            where = f"port {ports[0]}" if len(ports) == 1 else f"any of {len(ports)} ports" if ports else "a port"
            raise OSError(err.errno, f"cannot listen on {address}, {where}: {err}") from err
        self._router = router
        self._watch(router)
        port = int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._admission.start(port)
        return port

    def connect(self, link: Link, endpoint: str) -> None:
        """Open a connection."""
        dealer = self._socket(zmq.DEALER)
        self._admission.opener(dealer)
        monitor = dealer.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
        )
        self._dealers[link] = dealer
        self._links[dealer] = link
        self._monitors[monitor] = link
        dealer.connect(endpoint)
        self._watch(dealer)
        self._watch(monitor)

    def disconnect(self, link: Link, linger_s: float = 0.0) -> None:
        """Close a connection."""
        self._inbound.discard(link)
        self._unproven.pop(link, None)
        dealer = self._dealers.pop(link, None)
        if dealer is None:
            return
        dealer.disable_monitor()
        for monitor, name in list(self._monitors.items()):
            if name == link:
                del self._monitors[monitor]
                self._unwatch(monitor)
                monitor.close(0)
        del self._links[dealer]
        self._unwatch(dealer)
        dealer.close(int(linger_s * 1000))

    def admitted(self, link: Link) -> None:
        """Lift the limits of a connection."""
        fd = self._unproven.pop(link, None)
        if fd is not None:
            self._admission.proven(fd)

    def proven(self, link: Link) -> None:
        """Do nothing: there is one path."""

    def refused(self, link: Link) -> None:
        """Close a connection in a moment."""
        fd = self._unproven.pop(link, None)
        if fd is not None:
            self._admission.refused(fd)

    def shares(self, link: Link) -> bool:
        """Return False: all frames travel as bytes."""
        return False

    def send(self, link: Link, frames: Sequence[Buffer]) -> Lease:
        """Send a message."""
        out: zmq.Socket[bytes] | None = self._dealers.get(link)
        prefix = b""
        if out is None:
            if self._router is None or link not in self._inbound:
                raise ConnectionError(f"no connection {link}")
            out, prefix = self._router, bytes.fromhex(link[3:])
        self._touched.add(out)
        tracker = None
        transmit = _Compiled.send
        try:
            if prefix:
                transmit(out, prefix, _MORE)
            for left, frame in zip(range(len(frames) - 1, -1, -1), frames, strict=True):
                if memoryview(frame).nbytes < ZERO_COPY_BYTES:
                    transmit(out, frame, _MORE if left else 0)
                else:
                    tracker = transmit(out, frame, _MORE if left else 0, False, True)
        except zmq.ZMQError as err:
            raise ConnectionError(f"{link} is gone: {err}") from err
        if tracker is None or tracker.done:
            return COPIED
        lease = _Tracked(tracker)
        self._in_use.setdefault(link, deque()).append(lease)
        return lease

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait for events and return them."""
        news = self._selector.select(self.due_in(timeout_s))
        self._is_asleep = self._is_woken = False
        events = self._released() if self._in_use else []
        sources, self._touched = list(self._touched), set()
        for key, _ in news:
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._wake_in.recv(4096)
            else:
                sources.append(key.data)
        for source in sources:
            if source not in self._monitors:
                self._take(source, events)
        # Monitors last: what a peer sent before it died comes before its death.
        for source in sources:
            if source in self._monitors:
                events += self._monitored(source, self._monitors[source])
        if self._inbound and time.monotonic() >= self._next_probe:
            events += self._probe()
        if self._admission.turned_away:
            events += self._admission.strangers()
        return events

    def fileno(self) -> int:
        """Return a descriptor at which there is input when `poll` has something to do, if `due_in` was asked before."""
        return self._selector.fileno()

    def due_in(self, timeout_s: float) -> float:
        """Return how long the wait for input at `fileno` may be, at most `timeout_s`; 0: call `poll` at once."""
        self._is_asleep = True
        # Who wakes sets its flag first and looks at ours then; here it is the other way round, so that none is missed.
        if self._touched:
            self._touched = set(filter(_has_input, self._touched))
        is_released = self._in_use and any(leases[0].is_over for leases in self._in_use.values())
        if self._is_woken or self._touched or is_released:
            return 0.0
        if self._inbound:
            timeout_s = min(timeout_s, self._next_probe - time.monotonic())
        return max(0.0, timeout_s)

    def wake(self) -> None:
        """End a `poll`."""
        self._is_woken = True
        if self._is_asleep:
            with contextlib.suppress(OSError):
                self._wake_out.send(b"w")

    def close(self, linger_s: float = 0.0) -> None:
        """Close everything.

        Linger only where the last message has no answer that could be waited for. On connections that we opened,
        what was sent to a peer that is gone uses up the whole time. And libzmq 4.3.5 aborts the process, at the next
        heartbeat, if a peer dies on a connection that lingers and is not read any more.
        """
        self._admission.close()
        for link in list(self._dealers):
            self.disconnect(link, linger_s)
        if self._router is not None:
            self._unwatch(self._router)
            self._router.close(int(linger_s * 1000))
            self._router = None
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()
        self._context.term()

    def _watch(self, source: zmq.Socket[bytes]) -> None:
        self._selector.register(int(source.getsockopt(zmq.FD)), selectors.EVENT_READ, source)
        self._touched.add(source)

    def _unwatch(self, source: zmq.Socket[bytes]) -> None:
        self._selector.unregister(int(source.getsockopt(zmq.FD)))
        self._touched.discard(source)

    def _take(self, source: zmq.Socket[bytes], events: list[Event], limit: int = _MESSAGES) -> None:
        """Add what came in on a dealer or the router."""
        messages = _receive(source, limit)
        if len(messages) >= limit:
            self._touched.add(source)
        link = self._links.get(source, "")
        for frames in messages:
            if source is self._router:
                link = "in:" + frames.pop(0).bytes.hex()
                if not frames:
                    continue
                if link not in self._inbound:
                    self._inbound.add(link)
                    self._unproven[link] = int(frames[0].get(zmq.SRCFD))
            events.append(Arrived(link, [frame.buffer for frame in frames]))

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        new: zmq.Socket[bytes] = self._context.socket(kind)
        beat = self.heartbeat
        # A peer is lost after at most timeout_s: the beat that finds it silent goes out up to interval_s late, and a
        # connection in is tried every PROBE_S.
        silence_s = max(beat.timeout_s - beat.interval_s - PROBE_S, beat.timeout_s / 2)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, 1),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, FRAME_LIMIT),
            (zmq.HEARTBEAT_IVL, int(beat.interval_s * 1000)),
            (zmq.HEARTBEAT_TIMEOUT, int(silence_s * 1000)),
            (zmq.HANDSHAKE_IVL, int(beat.timeout_s * 1000)),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 1000),
        ):
            new.setsockopt(option, value)
        return new

    def _released(self) -> list[Event]:
        events: list[Event] = []
        for link, leases in list(self._in_use.items()):
            while leases and leases[0].is_over:
                events.append(Released(leases.popleft()))
            if not leases:
                del self._in_use[link]
        return events

    def _monitored(self, monitor: zmq.Socket[bytes], link: Link) -> list[Event]:
        events: list[Event] = []
        while monitor.poll(0):
            what, value = next_of(monitor)
            if what == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                events.append(Up(link))
            elif what == zmq.EVENT_DISCONNECTED:
                # What arrived just before the end is still in the socket, and comes first.
                self._take(self._dealers[link], events, sys.maxsize)
                events.append(self._down(link))
            elif what == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.disconnect(link)
                return [*events, Rejected(link, refusal(self._token, value))]
        return events

    def _down(self, link: Link) -> Down:
        return Down(link, f"its connection closed, or it was silent for {duration(self.heartbeat.timeout_s)}")

    def _probe(self) -> list[Event]:
        self._next_probe = time.monotonic() + PROBE_S
        events: list[Event] = []
        assert self._router is not None
        self._touched.add(self._router)
        for link in sorted(self._inbound):
            try:
                self._router.send_multipart([bytes.fromhex(link[3:]), b""], zmq.NOBLOCK)
            except zmq.ZMQError as err:
                if err.errno == zmq.EHOSTUNREACH:
                    self._inbound.discard(link)
                    self._unproven.pop(link, None)
                    events.append(self._down(link))
        return events


def _bind_first(router: zmq.Socket[bytes], address: str, ports: Sequence[int | str]) -> None:
    for number, port in enumerate(ports):
        try:
            router.bind(endpoint(address, port))
        except zmq.ZMQError as err:
            if err.errno != zmq.EADDRINUSE or number == len(ports) - 1:
                raise
        else:
            return


def _has_input(source: zmq.Socket[bytes]) -> bool:
    """Whether a message waits in a socket. Takes in all news of it: its descriptor tells of later ones only."""
    return bool(int(_Compiled.get(source, _EVENTS)) & _POLLIN)


def _receive(source: zmq.Socket[bytes], limit: int) -> list[list[zmq.Frame]]:
    """Return the messages that wait in a socket, at most so many."""
    messages: list[list[zmq.Frame]] = []
    receive = _Compiled.recv
    with contextlib.suppress(zmq.Again):
        while len(messages) < limit:
            frame = receive(source, _NOBLOCK, False)
            frames = [frame]
            while frame.more:
                frame = receive(source, 0, False)
                frames.append(frame)
            if len(frames) > 1 or len(frames[0]):  # an empty frame alone is a probe
                messages.append(frames)
            # Asking costs less than an exception.
            if not _has_input(source):
                break
    return messages
