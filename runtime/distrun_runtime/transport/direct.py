"""Direct connections: a stream socket for the messages of two nodes, beside the ZeroMQ connection that proved them.

A message over ZeroMQ passes through a thread of libzmq on each side. A direct connection spares that: the thread that
has a message writes it to the socket, and the thread that waits for it reads it. On one host the socket is an abstract
Unix socket, between hosts TCP. ZeroMQ's connection stays for the handshake and the heartbeats.

    acceptor   offers a Unix socket, a port and a nonce, over the proven connection
    opener     connects to the socket, else to the port, and sends an HMAC of the nonce, before all else
    acceptor   answers with its own HMAC; from its mark on, which it sends over ZeroMQ, all that it sends goes by stream
    opener     does the same

The mark is the last message over ZeroMQ in its direction, and nothing of the stream is read before it has come. So the
order is kept. What does not work is said (`PathChosen`), and messages go on travelling over ZeroMQ. The end of the
stream is that of the connection, for both sides: `Down`, after all that had arrived.

Threads: as `transport.base` says. With a `TurnLock`, another thread may act while the polling one waits: it takes some
connections, sends and receives on them, and gives them back. A signal handler of Python may raise between any two steps
of such a thread, so each change of a stream is one step: what `recv` returns is stored by the same C function that
calls it (`list.extend(map(...))`), and the outcome of reading is one assignment.

docs/protocol.md has the bytes. Linux: elsewhere there is no epoll, and `available` is false.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

import numpy as np

from distrun_runtime.arrays.dtypes import Buffer
from distrun_runtime.arrays.shared_memory import NONCE_BYTES
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.protocol.message import BYTES, ENTRY_LIMIT, FRAME_LIMIT, VIEW
from distrun_runtime.transport.admission import UNPROVEN_S
from distrun_runtime.transport.base import (
    COPIED,
    Arrived,
    Down,
    Event,
    Form,
    Lease,
    Link,
    NotShared,
    PathChosen,
    Released,
    Stranger,
    Up,
)
from distrun_runtime.transport.host_segments import check_user
from distrun_runtime.transport.zeromq import ZmqTransport

MAGIC = b"DRKD"
VERSION = 1
_HEAD = struct.Struct("<4sBBxx")
"""Magic, version, kind."""
PROOF_BYTES = _HEAD.size + hashlib.sha256().digest_size
UNPROVEN = 128
"""How many of them are kept; the oldest is closed when one more comes."""
ENDING_S = 0.5
"""How long TCP may outlive the ZeroMQ connection: both end with their process, but what was sent may be under way."""
CHECK_S = 1.0
"""How often these limits are checked."""
FIRST_LOOK_S, LOOK_S = 20e-6, 1e-3
"""How long, at least and at most, a thread looks for an answer before it sleeps."""
AWAY_S = 20e-6
"""If others had a thread's core for so long while it looked, they needed it."""
KEPT_S = 30e-6
"""For so long a thread may keep its core from them."""
SHARED_WAITS, SLEPT_WAITS = 8, 16
"""Waits in a row in which it keeps it for longer, before it sleeps at once; and how many it then sleeps through."""

CHUNK_BYTES = 96 * 1024
"""So much is read at once: small values with their heads, and less than what malloc asks the kernel for each time."""
LONG_BYTES = 16 * 1024
"""If a message of more has come in part, its rest is read to where it stays."""
TOLD_BYTES = 256 * 1024
"""When so much of a long message has come over TCP, or its rest, the receiver is woken. For each packet takes a fifth
more processor time."""
FRAMES_LIMIT = ENTRY_LIMIT + 8
_BUFFERS = 1000
"""How many buffers one system call is given; Linux takes 1,024."""
_BACKLOG = 128
_READS = 64
"""How often one stream is read at once: others wait meanwhile."""
_COUNT = struct.Struct("<I")


def _table(count: int) -> struct.Struct:
    """Return the form of a table: number of frames and their sizes, filled up to a multiple of 8 bytes."""
    return struct.Struct(f"<{count + 1}I{'' if count % 2 else '4x'}")


_FEW = 16
_TABLES = [_table(count) for count in range(_FEW)]
"""Of messages of few frames."""


def _form_of(sizes: tuple[int, ...]) -> Form:
    """Return the table of a message with frames of these sizes, and how many bytes it has with them."""
    table = _table(len(sizes)).pack(len(sizes), *sizes)
    return table, len(table) + sum(sizes)


_usual_form = lru_cache(256)(_form_of)


def form_of(frames: Sequence[Buffer]) -> Form:
    """Return the table of a message, and how many bytes it has with it."""
    sizes = tuple(map(BYTES, map(VIEW, frames)))
    return (_usual_form if len(sizes) < _FEW else _form_of)(sizes)


@lru_cache(256)
def _usual_frames(table: bytes) -> tuple[Callable[[memoryview], Sequence[Buffer]], int]:
    """Return what cuts a message that begins with this table into its frames, and the bytes of the message; 0: cut it
    otherwise. All but the first frame have to begin at multiples of 8 bytes."""
    (count,) = _COUNT.unpack_from(table)
    if not 1 < count < _FEW or len(table) != _TABLES[count].size:
        return lambda _: (), 0
    ends = [len(table)]
    for size in _TABLES[count].unpack(table)[1:]:
        ends.append(ends[-1] + size)
    cut = itemgetter(*map(slice, ends, ends[1:]))
    return cut, 0 if any(end % 8 for end in ends[1:-1]) else ends[-1]


def _only_message(data: bytes) -> list[Buffer] | None:
    """Return the frames of the one message that these bytes are, nearly always; None: look what they are."""
    if len(data) < _TABLES[0].size:
        return None
    cut, size = _usual_frames(data[: _TABLES[data[0] % _FEW].size])
    if size != len(data):
        return None
    # Elements lie at multiples of their size, and the first frame is looked up by its bytes.
    head, *rest = cut(memoryview(data))
    return [bytes(head), *rest]


available = hasattr(select, "epoll") and hasattr(os, "eventfd")


class DirectKind(IntEnum):
    """What a message of this module is, or a proof."""

    OFFER = 1
    """The acceptor, over ZeroMQ: where to connect. JSON."""
    MARK = 2
    """The last message over ZeroMQ in its direction."""
    OPENER = 3
    """The opener's proof, on the stream."""
    ACCEPTOR = 4
    """The acceptor's."""


Sink = Callable[[Link, Sequence[Buffer]], "Sequence[Buffer] | None"]
"""Is given a message; returns what is to arrive of it; None: it was taken."""


class _Sending:
    """The lease of a message that is being sent."""

    __slots__ = ("buffers", "counts", "size")

    def __init__(self, buffers: Sequence[Buffer], size: int) -> None:
        self.buffers = buffers
        self.size = size
        self.counts: list[int] = []
        """How many bytes each call has sent."""

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left to send."""
        return sum(self.counts) >= self.size

    def left(self) -> list[Buffer]:
        """Return what is left of its buffers, as much as one system call takes."""
        skipped, found = sum(self.counts), list[Buffer]()
        for buffer in self.buffers:
            size = memoryview(buffer).nbytes
            if skipped < size:
                found.append(memoryview(buffer).cast("B")[skipped:] if skipped else buffer)
            skipped = max(skipped - size, 0)
        return found[:_BUFFERS]


class _LongMessage:
    """A message too long for a chunk, whose last frames are being received at their place."""

    __slots__ = ("counts", "frames", "sizes", "target")

    def __init__(self, frames: list[Buffer], sizes: Sequence[int], target: memoryview, counts: list[int]) -> None:
        self.frames = frames
        self.sizes = sizes
        """Of the frames that follow; their bytes are in `target`."""
        self.target = target
        self.counts = counts
        """How many bytes of it each call has received."""

    def whole(self) -> list[Buffer] | None:
        """Return the frames of the message; None: more is to come."""
        if sum(self.counts) < len(self.target):
            return None
        at, frames = 0, self.frames
        for size in self.sizes:
            frame = self.target if size == len(self.target) else self.target[at : at + size]
            # As in `_only_message`.
            frames.append(bytes(frame) if not frames or at % 8 else frame)
            at += size
        return frames


class _DirectStream:
    """A direct connection. It never waits."""

    def __init__(self, link: Link, connection: socket.socket) -> None:
        self.link = link
        self.connection = connection
        self.fd = connection.fileno()
        self.end = ""
        """Why nothing more comes; empty: it goes on."""
        self.into: list[memoryview] = []
        """Where the third frames of messages of three are received if they are long and have these sizes."""
        self.recent: Sequence[Buffer] = ()
        """The first frames of the message that was sent last."""
        self.out: deque[_Sending] = deque()
        """What was not sent completely."""
        self.received: tuple[list[Sequence[Buffer]], bytes, list[bytes], _LongMessage | None] = ([], b"", [], None)
        """Whole messages that were not taken (take one by removing it); bytes of an incomplete one, and those behind
        them that were not looked at; else an incomplete long one."""
        self.read = self._read if connection.family == socket.AF_UNIX else self._read_from_afar
        """Takes in what has come: whole messages and the end."""
        self._least = 1
        """How much has to have come over TCP before the kernel tells."""
        self._sendmsg, self._recv, self._recv_into = connection.sendmsg, connection.recv, connection.recv_into

    def send(self, frames: Sequence[Buffer], form: Form) -> Lease:
        """Send a message, or queue what the socket does not take."""
        table, size = form
        item = _Sending([table, *frames], size)
        self.out.append(item)
        self.recent = frames[:2]
        if len(self.out) == 1:
            self.flush()
        return item if self.out else COPIED

    def flush(self) -> list[Lease]:
        """Send what is queued, as far as the socket takes it; return the leases that are over."""
        over: list[Lease] = []
        while self.out:
            item = self.out[0]
            buffers = item.left() if item.counts or len(item.buffers) > _BUFFERS else item.buffers
            try:
                item.counts.extend(map(self._sendmsg, (buffers,)))
            except BlockingIOError:
                break
            except OSError:
                # Part of a message may be lost. Both sides see the end; `read` tells it, behind what still arrives.
                self._shut()
                return [*over, *self._drop()]
            if sum(item.counts) >= item.size:
                over.append(item)
                self.out.popleft()
        return over

    def _read_from_afar(self) -> None:
        """As `_read`; of a long message more is waited for at once."""
        self._read()
        long = self.received[3]
        least = 1 if long is None else min(len(long.target) - sum(long.counts), TOLD_BYTES)
        if least != self._least:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._least = least

    def read_first(self) -> bytes:
        """Take in what has come, if nothing came before that was not taken, and return it as it is; else nothing.

        It is among `received`, so that `read` takes it apart.
        """
        messages, rest, chunks, long = self.received
        if messages or rest or chunks or long is not None or self.out or self.end:
            return b""
        try:
            chunks.append(self._recv(CHUNK_BYTES))
        except OSError:  # `read` meets it again
            return b""
        return chunks[0]

    def _read(self) -> None:
        for _ in range(_READS):
            if self.end:
                return
            messages, rest, chunks, long = self.received
            try:
                if long is None and not chunks:
                    chunks.extend(map(self._recv, (CHUNK_BYTES,)))
                elif long is not None and (left := long.target[sum(long.counts) :]):
                    long.counts.extend(map(self._recv_into, (left,)))
            except BlockingIOError:
                return
            except OSError as err:
                self.end = f"its connection closed: {err.strerror}"
                return
            if long is not None:
                if (whole := long.whole()) is not None:
                    self.received = [*messages, whole], b"", [], None
                    return  # It can be worked on while more comes.
                if not long.counts[-1]:
                    self.end = "its connection closed"
                elif long.counts[-1] < CHUNK_BYTES:
                    return
                continue
            chunk = chunks[0]
            if not chunk:
                self.end = "its connection closed"
                return
            try:
                self.received = self._parsed(messages, rest + chunk if rest else chunk)
            except (ValueError, MemoryError, struct.error) as err:
                self.end = f"what it sent cannot be read: {err}"
            if len(chunk) < CHUNK_BYTES and self.received[3] is None:
                return  # There was no more.

    def _parsed(
        self, messages: list[Sequence[Buffer]], data: bytes
    ) -> tuple[list[Sequence[Buffer]], bytes, list[bytes], _LongMessage | None]:
        """Return what `received` becomes with the bytes that came.

        Raises:
            ValueError: they are no messages.
        """
        if (only := _only_message(data)) is not None:
            return [*messages, only], b"", [], None
        view, length, messages, at = memoryview(data), len(data), [*messages], 0
        while length - at >= 8:
            (count,) = _COUNT.unpack_from(data, at)
            if not 0 < count <= FRAMES_LIMIT:
                raise ValueError(f"a message of {count} frames")
            table = _TABLES[count] if count < _FEW else _table(count)
            start = at + table.size
            if start > length:
                break
            _, *sizes = table.unpack_from(data, at)
            end = start + sum(sizes)
            if end > length:
                if max(sizes) > FRAME_LIMIT:
                    raise ValueError(f"a frame of {max(sizes)} bytes; the limit is {FRAME_LIMIT}")
                if end - at <= LONG_BYTES:
                    break
            frames: list[Buffer] = []
            for size in sizes:
                stop = start + size
                if stop > length:
                    return messages, b"", [], self._long(frames, sizes[len(frames) :], view[start:])
                # As in `_only_message`.
                frames.append(view[start:stop] if frames and not start % 8 else data[start:stop])
                start = stop
            messages.append(frames)
            at = end
        return messages, data[at:], [], None

    def _long(self, frames: list[Buffer], sizes: Sequence[int], came: memoryview) -> _LongMessage:
        at = next((at for at, each in enumerate(self.into) if len(frames) == 2 and sizes == [len(each)]), -1)
        into = np.empty(sum(sizes), np.uint8).data if at < 0 else self.into.pop(at)
        into[: len(came)] = came
        return _LongMessage(frames, sizes, into, [len(came)])

    def close(self) -> Sequence[Lease]:
        """Close the connection, for children that were forked as well; return the leases that are over."""
        self._shut()
        self.connection.close()
        return self._drop()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _drop(self) -> Sequence[Lease]:
        dropped, self.out = self.out, deque()
        for lost in dropped:
            lost.counts.append(lost.size)
        return dropped


class Looking:
    """Decides how long a thread looks for an answer before it sleeps. No side effects.

    To wake a thread takes longer than a small value does. A thread looks longer after a wait that `LOOK_S` covers, and
    less long after others: where most waits are long, looking costs nothing.

    A thread that looks lets others have its core (`sched_yield`). But where the kernel shares cores among sessions
    (autogroups, see sched(7)), and each task is one, they get it only when the thread has had its share. One that keeps
    its core so from whom it waits for sleeps at once in the next waits. Then it looks again: who sleeps may be woken
    on a core that is in use while another is idle. After a long wait it may be on another core, too.

    Arguments:
        cores: what this process may use of the host.
        workers: how many may be on the host. If they are more, they do not look: others need the cores.
    """

    def __init__(self, cores: float, workers: int) -> None:
        self._most_s, self._time_s = LOOK_S if workers <= cores else 0.0, 0.0
        self._shared = 0
        """Waits in a row in which it kept its core from others."""
        self._to_sleep = 0
        """Waits that are still to be slept through for that."""

    @property
    def time_s(self) -> float:
        """How long to look in the next wait."""
        return 0.0 if self._to_sleep else self._time_s

    def learn(self, waited_s: float, worked_s: float = 0.0, away_s: float = 0.0) -> None:
        """Take in how long a wait was, and for how long of the looking this thread and others had its core."""
        is_short = waited_s <= self._most_s
        time_s = max(self._time_s * 2, FIRST_LOOK_S) if is_short else self._time_s / 2
        self._time_s = min(time_s, self._most_s) if time_s >= FIRST_LOOK_S else 0.0
        if not is_short:
            self.forget_core()
        elif self._to_sleep:
            self._to_sleep -= 1
        elif away_s < AWAY_S or worked_s < KEPT_S:
            self._shared = 0
        else:
            self._shared += 1
            self._to_sleep = SLEPT_WAITS if self._shared >= SHARED_WAITS else 0

    def forget_core(self) -> None:
        """The thread has slept for long, and may be on another core now."""
        self._shared = self._to_sleep = 0


class TurnLock:
    """Decides which thread acts on a transport and on what its loop keeps: the one that polls it, or another one while
    that waits.

    Arguments:
        looking: decides how long other threads look for news before they sleep; None: they do not.
    """

    def __init__(self, looking: Looking | None = None) -> None:
        self._looking = looking or Looking(0, 1)
        self.lock = threading.Lock()
        self.is_wanted = False
        """The polling thread waits for its turn."""
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable if another thread wants the turn. Open as long as a thread may want it."""
        weakref.finalize(self, os.close, self.fd).atexit = False
        self.owner = 0
        """Thread of the script that has the turn."""
        self.is_waiting = False
        """It waits: a signal handler that runs in it may give the turn away (`give_away`)."""
        self._is_given_away = False
        """A `wait` is to end as soon as it goes on."""
        self.is_asked_for = False
        """Whether there is something that `begin` is to forget."""

    def want(self) -> None:
        """Have the thread that has the turn wait for nothing any more. Threads: any."""
        if self.lock.locked():
            self.is_asked_for = True
            os.eventfd_write(self.fd, 1)

    def begin(self) -> None:
        """Forget who wanted the turn before. For the thread that has it, before it looks for what others want."""
        if self.is_asked_for and not self._is_given_away:
            self.is_asked_for = False
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.fd)

    def wait(self, poller: select.poll, timeout_s: float, *, looks: bool = True) -> list[tuple[int, int]]:
        """Wait for news of descriptors, for the owner; return none if another thread wants the turn, or has had it.

        Arguments:
            looks: as for `DirectTransport.wait`.
        """
        owner, self.is_waiting, news = self.owner, True, list[tuple[int, int]]()
        looking, worked_s, away_s = self._looking, 0.0, 0.0
        try:
            end = (begin := time.monotonic()) + min(looking.time_s, timeout_s)
            if looks and begin < end:
                before_s = time.thread_time()
                while not news and time.monotonic() < end:
                    os.sched_yield()  # The process that is to answer may need this core.
                    news = poller.poll(0)
                worked_s = time.thread_time() - before_s
                away_s = time.monotonic() - begin - worked_s
            news = news or poller.poll(timeout_s * 1000)
            if looks:
                looking.learn(time.monotonic() - begin, worked_s, away_s)
            else:
                looking.forget_core()
        finally:
            self.is_waiting = False
            if self.owner != owner:
                self.lock.acquire()
                self.owner, self._is_given_away, self.is_asked_for, news = owner, False, True, []
        for fd, _ in news:
            if fd == self.fd:
                self.is_asked_for = True  # `want` may have written to it after a `begin` that found nothing.
                return []
        return news

    def give_away(self) -> None:
        """Let others have the turn, until the `wait` in which this thread is goes on. For a signal handler."""
        self.owner, self._is_given_away = 0, True
        os.eventfd_write(self.fd, 1)
        self.lock.release()

    def retake(self, is_urgent: bool) -> None:
        """Take the turn back, for the polling thread."""
        if not self.lock.acquire(blocking=False):
            self.is_wanted = True
            if is_urgent:
                self.want()
            self.lock.acquire()
            self.is_wanted = False
        self.owner = 0  # An interrupted thread may have left its own.


@dataclass
class _Pair:
    """What is known of a proven link that has, or may get, a stream."""

    proofs: tuple[bytes, bytes] = (b"", b"")
    """The opener's and the acceptor's; good for one connection."""
    dialled: socket.socket | None = None
    """The opener's connection, while it is not proven."""
    stream: _DirectStream | None = None
    """All messages are sent there."""
    is_marked: bool = False
    """The other side's mark has come: all messages come there."""


class DirectTransport:
    """Adds direct connections to a ZeroMQ transport.

    Arguments:
        ports: those that may be bound; 0: any.
    """

    def __init__(self, inner: ZmqTransport, token: bytes, ports: Sequence[int] = (0,)) -> None:
        self._inner = inner
        self.admitted, self.refused, self.shares = inner.admitted, inner.refused, inner.shares
        self.wake = inner.wake
        self._token = token
        self._ports = ports
        self._address = ""
        """Where this node listens."""
        self._peers: dict[Link, str] = {}
        """Addresses of the nodes to which we have connected."""
        self._epoll = select.epoll()
        self._epoll.register(inner.fileno(), select.EPOLLIN)
        self._inner_news = inner.fileno(), select.EPOLLIN
        self._sources: dict[int, Callable[[int], None]] = {}
        """What acts on the news of each descriptor."""
        self._listeners: list[socket.socket] | None = None
        self._offer: dict[str, object] = {}
        self._newcomers: dict[int, tuple[socket.socket, float, bytearray]] = {}
        """Connections without proof, the oldest first: since when, and what they have sent."""
        self._look_at = 0.0
        """When they are looked at next."""
        self._pairs: dict[Link, _Pair] = {}
        self._early: dict[Link, Sequence[Buffer]] = {}
        """Offers of acceptors that have not proven themselves yet, as far as the loop has heard."""
        self._streams: dict[Link, _DirectStream] = {}
        """Those that all messages are sent on."""
        self._open: dict[Link, _DirectStream] = {}
        """Of these, those on which all messages come."""
        self.is_open = self._open.__contains__
        """Whether all messages of a link travel on a direct connection."""
        self._ending: dict[Link, tuple[Down, float]] = {}
        """Links that have ended over ZeroMQ, and how long what comes by stream is still taken in."""
        self._turn: TurnLock | None = None
        self._taken: tuple[Link, ...] = ()
        """Links that another thread has taken."""
        self._unheard: list[Link] = []
        """These, and others that it has given back: it mostly takes them again before anything else comes there. The
        polling thread waits for them again from its next `poll` on; if nothing wakes it, that is a tick of its loop."""
        self._pollers: dict[tuple[Link, ...], select.poll] = {}
        self._events: list[Event] = []
        self.sink: Sink | None = None
        """Is given each message that comes by stream while there are no events, and what it takes is none."""
        self.known: Callable[[Link, bytes], bool] | None = None
        """Is given, before that, what one read has brought; whether it was one message and was taken."""

    # The interface of a transport

    def bind(self, address: str, ports: Sequence[int] = ()) -> int:
        """Listen; return the port."""
        self._address = address
        return self._inner.bind(address, ports)

    def connect(self, link: Link, endpoint: str) -> None:
        """Open a connection."""
        self._peers[link] = endpoint.partition("://")[2].rpartition(":")[0].strip("[]")
        self._inner.connect(link, endpoint)

    def disconnect(self, link: Link, linger_s: float = 0.0) -> None:
        """Close a connection."""
        self._forget(link)
        self._inner.disconnect(link, linger_s)

    def proven(self, link: Link) -> None:
        """Both sides have proven themselves: look for a direct connection."""
        pair = self._pairs[link] = _Pair()
        if not link.startswith("in:"):
            if link in self._early:
                self._control(link, pair, self._early.pop(link))
            return
        if self._listeners is None:
            self._listen()
        nonce = secrets.token_bytes(NONCE_BYTES)
        pair.proofs = self._proofs(nonce)
        self._say(link, DirectKind.OFFER, {**self._offer, "nonce": nonce.hex()})

    def send(self, link: Link, frames: Sequence[Buffer], form: Form | None = None) -> Lease:
        """Send a message; `form`: what `form_of` says of its frames, if it was asked before."""
        stream = self._streams.get(link)
        if stream is None:
            return self._inner.send(link, frames)
        lease = stream.send(frames, form or form_of(frames))
        if lease is not COPIED:
            self._watch(stream)
        return lease

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait for events and return them; what `sink` takes does not end the wait."""
        if self._unheard:
            unheard, self._unheard = self._unheard, []
            for stream in filter(None, map(self._open.get, unheard)):
                self._watch(stream)
                self._deliver(stream)
        end = min([time.monotonic() + timeout_s, *(until for _, until in self._ending.values())])
        is_over = False
        while not is_over:
            wait_s = 0.0 if self._events else self._inner.due_in(end - time.monotonic())
            news = self._wait(wait_s)
            # It goes on where all that has happened was taken by `sink`.
            is_over = wait_s <= 0 or not news or self._inner_news in news
            if is_over:
                self._poll_inner()
            # Last: what came by ZeroMQ was sent before what comes by stream.
            for fd, mask in news:
                if fd in self._sources:  # It may have been closed a moment ago.
                    self._sources[fd](mask)
            is_over = is_over or self.sink is None or bool(self._events or self._ending)
        for link, (down, until) in list(self._ending.items()):
            if time.monotonic() >= until:
                stream = self._open[link]
                stream.read()
                stream.end = stream.end or down.reason
                self._deliver(stream)
        if self._listeners is not None and time.monotonic() >= self._look_at:
            self._look()
        events, self._events = self._events, []
        return events

    def _poll_inner(self) -> None:
        """Take in what has happened over ZeroMQ."""
        for event in self._inner.poll(0.0):
            if isinstance(event, Arrived) and event.frames[0][:4] == MAGIC:
                self._arrived(event)
            elif isinstance(event, Arrived) and event.link in self._open:
                self._end(event.link, "what it sent came behind its mark")
            elif isinstance(event, Down) and event.link in self._open:
                self._inner.disconnect(event.link)
                is_tcp = self._open[event.link].connection.family != socket.AF_UNIX
                self._ending[event.link] = event, time.monotonic() + ENDING_S * is_tcp
            elif not isinstance(event, Up) or event.link not in self._ending:  # It was closed a moment ago.
                if isinstance(event, Down):
                    self._forget(event.link)
                self._events.append(event)

    def _wait(self, wait_s: float) -> list[tuple[int, int]]:
        """Wait for news of descriptors. Another thread may have the turn meanwhile; what it has taken in is no news."""
        if self._turn is None:
            if wait_s > 0:
                os.sched_yield()  # who was answered just now may need this core, and ask for more before this sleeps
            return self._epoll.poll(wait_s)
        self._turn.lock.release()
        news = []
        try:
            news = self._epoll.poll(wait_s)
        finally:
            self._turn.retake(bool(news))
        return self._epoll.poll(0)

    def close(self, linger_s: float = 0.0) -> None:
        """Close everything."""
        end = time.monotonic() + linger_s
        for stream in self._streams.values():
            while stream.out and (left := end - time.monotonic()) > 0:
                poller = select.poll()
                poller.register(stream.fd, select.POLLOUT)
                poller.poll(left * 1000)
                stream.flush()
        for link in list(self._pairs):
            if link in self._open:
                self._open[link].read()  # What is not read makes the kernel drop what was sent.
            self._forget(link)
        for connection in [*(each[0] for each in self._newcomers.values()), *(self._listeners or ())]:
            connection.close()
        self._inner.close(linger_s)
        self._epoll.close()

    # For a thread that has the turn: a link that it has taken is its own until it gives it back

    def turn(self, looking: Looking | None = None) -> TurnLock:
        """Let other threads act from now on. Who polls has the turn, but while it waits."""
        self._turn = TurnLock(looking)
        return self._turn

    def take(self, links: tuple[Link, ...]) -> None:
        """Take links that are open: the polling thread does not wait for what comes there."""
        self._taken = links
        for link in links:
            self._open[link].recent = ()  # The head of a message may be that of the last one, with another number.
            if link not in self._unheard:
                self._unheard.append(link)
                self._watch(self._open[link])

    def expect(self, link: Link, into: memoryview) -> None:
        """Receive the third frame of a message of three there, if it is long and has this size. Once; until
        `give_back`."""
        self._open[link].into.append(into)

    def inbox(self, link: Link) -> list[Sequence[Buffer]] | None:
        """Return the messages that have come on a link that was taken; take one by removing it. None: it has ended."""
        stream = self._open[link]
        return None if stream.end else stream.received[0]

    def wait(self, timeout_s: float, *, looks: bool = True) -> bool:
        """Wait until something has come on the links that were taken, and take it in; send what was queued.

        Return whether to go on: something has come, and no other thread wants the turn.

        Arguments:
            looks: it may come soon, so that it is worth to look before the thread sleeps.
        """
        assert self._turn is not None
        links, sends = self._taken, not self.has_sent(self._taken)
        # A signal handler may wait here, too, while this thread does, and no poller can do both.
        poller = None if sends else self._pollers.pop(links, None)
        if poller is None:
            poller = select.poll()
            poller.register(self._turn.fd, select.POLLIN)
            for link in links:
                poller.register(self._open[link].fd, select.POLLIN | select.POLLOUT * bool(self._open[link].out))
        news = self._turn.wait(poller, timeout_s, looks=looks)
        if news and not sends:
            self._pollers[links] = poller
        for fd, mask in news:
            self._sources[fd](mask)
        return bool(news)

    def was_sent(self, link: Link, head: Buffer) -> bool:
        """Whether a message was given to `send` whose head is this very buffer; for the last message of a link."""
        stream = self._open.get(link)
        if stream is None:
            return True
        last = [*stream.recent, *(each for item in stream.out for each in item.buffers)]
        return any(each is head for each in last)

    def has_sent(self, links: tuple[Link, ...]) -> bool:
        """Whether all was sent on links that were taken: nothing is queued."""
        for link in links:  # noqa: SIM110  # a generator would take several times as long
            if self._open[link].out:
                return False
        return True

    def give_back(self, links: tuple[Link, ...], *, drops: bool = False) -> None:
        """Give back links that were taken, and what has come there and was not removed, unless that is dropped.

        After an interruption it may be called again.
        """
        self._taken = ()
        for link in links:
            stream = self._open.get(link)
            if stream is None:
                continue
            stream.into = []
            if drops:
                stream.received[0].clear()
                if not stream.out and not stream.end:
                    continue
            else:
                stream.read()  # Who had it may have been interrupted before it looked at what came.
            self._watch(stream)
            self._deliver(stream)

    # Streams

    def _wait_for(self, fd: int, mask: int) -> None:
        """Have `poll` act on this news of a descriptor, whatever was waited for there before."""
        try:
            if mask:
                self._epoll.register(fd, mask)
            else:
                self._epoll.unregister(fd)  # With no mask its end would still be told, again and again.
        except FileExistsError:
            self._epoll.modify(fd, mask)
        except FileNotFoundError:
            pass

    def _watch(self, stream: _DirectStream) -> None:
        mask = select.EPOLLIN * (stream.link in self._open) | select.EPOLLOUT * bool(stream.out)
        self._wait_for(stream.fd, 0 if stream.link in self._taken else mask)

    def _news(self, stream: _DirectStream, mask: int) -> None:
        link, is_taken = stream.link, stream.link in self._taken
        if mask == select.EPOLLIN and not (self._events or is_taken) and (data := stream.read_first()):
            if self.known is not None and self.known(link, data):
                stream.received[2].clear()
                return
            if (only := _only_message(data)) is not None:
                stream.received[2].clear()
                self._hand_in(link, only)
                return
        if stream.out:
            self._events += map(Released, stream.flush())
            if not is_taken:
                self._watch(stream)
        if mask & ~select.EPOLLOUT and link in self._open:
            stream.read()
            if not is_taken:
                self._deliver(stream)

    def _deliver(self, stream: _DirectStream) -> None:
        link, inbox = stream.link, stream.received[0]
        for frames in inbox:
            self._hand_in(link, frames)
        inbox.clear()
        if stream.end:
            self._end(link, stream.end)

    def _hand_in(self, link: Link, frames: Sequence[Buffer]) -> None:
        left = frames if self._events or self.sink is None else self.sink(link, frames)
        if left is not None:
            self._events.append(Arrived(link, left))

    def _end(self, link: Link, reason: str) -> None:
        self._inner.disconnect(link)
        self._forget(link)
        self._events.append(Down(link, reason))

    def _forget(self, link: Link) -> None:
        self._early.pop(link, None)
        pair = self._pairs.pop(link, None)
        if pair is None:
            return
        self._open.pop(link, None)
        self._ending.pop(link, None)
        stream = self._streams.pop(link, None)
        if stream is not None:
            self._pollers.clear()
            self._unwatch(stream.fd)
            self._events += map(Released, stream.close())
        elif pair.dialled is not None:
            self._unwatch(pair.dialled.fileno())
            pair.dialled.close()

    def _unwatch(self, fd: int) -> None:
        self._wait_for(fd, 0)
        self._sources.pop(fd, None)

    # Agreement

    def _proofs(self, nonce: bytes) -> tuple[bytes, bytes]:
        def proof(kind: DirectKind) -> bytes:
            text = b"distrun direct %s " % kind.name.lower().encode() + nonce
            return _HEAD.pack(MAGIC, VERSION, kind) + hmac.new(self._token, text, hashlib.sha256).digest()

        return proof(DirectKind.OPENER), proof(DirectKind.ACCEPTOR)

    def _say(self, link: Link, kind: DirectKind, body: dict[str, object]) -> None:
        with contextlib.suppress(ConnectionError):  # `Down` follows.
            self._inner.send(link, [_HEAD.pack(MAGIC, VERSION, kind), json.dumps(body).encode() if body else b""])

    def _arrived(self, event: Arrived) -> None:
        """Take in a message of this module."""
        link = event.link
        pair = self._pairs.get(link)
        if pair is not None:
            self._control(link, pair, event.frames)
        elif link.startswith("in:"):
            self._events.append(event)  # No node says this before it has proven itself: bad bytes.
        else:
            self._early[link] = event.frames  # The loop has not heard yet that the acceptor is proven.

    def _control(self, link: Link, pair: _Pair, frames: Sequence[Buffer]) -> None:
        try:
            _, version, kind = _HEAD.unpack_from(frames[0])
            if version != VERSION:
                raise ValueError(f"version {version}; this program speaks version {VERSION}")
            if kind == DirectKind.OFFER and pair.proofs == (b"", b""):
                told = json.loads(bytes(frames[1]))
                pair.proofs = self._proofs(bytes.fromhex(told["nonce"]))
                self._dial(link, pair, b"\0" + str(told["socket"]).encode(), int(told["port"]) & 0xFFFF)
            elif kind == DirectKind.MARK and not pair.is_marked:
                pair.is_marked = True
                if pair.stream is not None:
                    self._start(link, pair.stream)
                elif pair.dialled is None:
                    raise ValueError("its mark without a stream")
            else:
                raise ValueError(f"kind {kind} at this point")
        except (struct.error, ValueError, KeyError, IndexError, TypeError, RecursionError, OverflowError) as err:
            self._end(link, f"what it says of a direct connection cannot be read: {err}")

    def _dial(self, link: Link, pair: _Pair, name: bytes, port: int) -> None:
        """Take an offer: connect, and prove who we are."""
        try:
            one = _stream_socket(socket.AF_UNIX)
            try:
                one.connect(name)
                check_user(one)
            except (OSError, NotShared):
                # The name is of another network namespace, or no process listens.
                one.close()
                address = self._peers[link]
                one = _stream_socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
                with contextlib.suppress(OSError):  # `_dialled` finds out.
                    one.connect_ex((address, port))
        except OSError as err:
            self._events.append(PathChosen(link, "zeromq", f"no socket for a direct connection: {err.strerror}"))
            return
        pair.dialled = one
        self._sources[one.fileno()] = lambda mask: self._dialled(link, pair, one)
        self._wait_for(one.fileno(), select.EPOLLOUT)

    def _dialled(self, link: Link, pair: _Pair, one: socket.socket) -> None:
        """Our connection is there, or is not to be."""
        try:
            error = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            one.send(pair.proofs[0])
        except OSError as err:
            self._fail(link, pair, one, f"{self._peers[link]} cannot be reached directly: {err.strerror}")
            return
        got = bytearray()
        self._sources[one.fileno()] = lambda mask: self._answered(link, pair, one, got)
        self._wait_for(one.fileno(), select.EPOLLIN)

    def _answered(self, link: Link, pair: _Pair, one: socket.socket, got: bytearray) -> None:
        """The acceptor has answered. Without a limit of time: it may have sent its mark already."""
        if not _hear(one, got):
            return
        if not hmac.compare_digest(got, pair.proofs[1]):
            self._fail(link, pair, one, "the other side closed its direct connection, or its proof is wrong")
            return
        self._switch(link, pair, one)

    def _fail(self, link: Link, pair: _Pair, one: socket.socket, reason: str) -> None:
        self._unwatch(one.fileno())
        one.close()
        pair.dialled = None
        if pair.is_marked:  # It sends nothing over ZeroMQ any more.
            self._end(link, reason)
        else:
            self._events.append(PathChosen(link, "zeromq", reason))

    def _switch(self, link: Link, pair: _Pair, one: socket.socket) -> None:
        """Send all further messages on a stream that is proven."""
        if one.family != socket.AF_UNIX:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # The heartbeats on ZeroMQ's connection do not see what becomes of this one.
            beat = self._inner.heartbeat
            every_s = max(int(beat.interval_s), 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, min(max(int(beat.timeout_s / every_s) - 1, 1), 127))
        stream = pair.stream = self._streams[link] = _DirectStream(link, one)
        self._say(link, DirectKind.MARK, {})
        self._sources[stream.fd] = partial(self._news, stream)
        self._wait_for(stream.fd, 0)
        if pair.is_marked:
            self._start(link, stream)

    def _start(self, link: Link, stream: _DirectStream) -> None:
        """The other side's mark has come: read what it sends on the stream."""
        self._open[link] = stream
        self._watch(stream)
        path = "unix" if stream.connection.family == socket.AF_UNIX else "tcp"
        self._events.append(PathChosen(link, path))

    # Who comes to our socket or port

    def _listen(self) -> None:
        self._listeners = []
        name, port = b"distrun-direct-%s" % secrets.token_hex(16).encode(), 0
        with contextlib.suppress(OSError):
            self._listen_at(socket.AF_UNIX, b"\0" + name)
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        for each in self._ports:
            try:
                port = self._listen_at(family, (self._address, each))
            except OSError as err:
                if err.errno != errno.EADDRINUSE:
                    break
            else:
                break
        self._offer = {"socket": name.decode(), "port": port}

    def _listen_at(self, family: int, where: Any) -> int:
        """Listen; return the port."""
        one = _stream_socket(family)
        try:
            one.bind(where)  # Without SO_REUSEADDR: it would take a port that another process holds for its node.
            one.listen(_BACKLOG)
        except OSError:
            one.close()
            raise
        assert self._listeners is not None
        self._listeners.append(one)
        self._sources[one.fileno()] = lambda mask: self._accept(one)
        self._wait_for(one.fileno(), select.EPOLLIN)
        return 0 if family == socket.AF_UNIX else int(one.getsockname()[1])

    def _accept(self, listener: socket.socket) -> None:
        try:
            one = listener.accept()[0]
        except OSError as err:
            if err.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
                self._wait_for(listener.fileno(), 0)  # until `_look`
            return
        one.setblocking(False)
        try:
            if one.family == socket.AF_UNIX:
                check_user(one)
        except NotShared:
            one.close()
            return
        fd = one.fileno()
        self._newcomers[fd] = one, time.monotonic() + UNPROVEN_S, bytearray()
        self._sources[fd] = lambda mask: self._introduced(fd)
        self._wait_for(fd, select.EPOLLIN)
        if len(self._newcomers) > UNPROVEN:
            self._turn_away(next(iter(self._newcomers)), f"more than {UNPROVEN} connections had proven nothing")

    def _introduced(self, fd: int) -> None:
        """One of them says who it is."""
        one, _, got = self._newcomers[fd]
        if not _hear(one, got):
            return
        for link, pair in self._pairs.items():
            if pair.stream is None and link.startswith("in:") and hmac.compare_digest(got, pair.proofs[0]):
                break
        else:
            self._turn_away(fd, "it gave a wrong proof, or one that was used" if got else "")
            return
        del self._newcomers[fd]
        with contextlib.suppress(OSError):  # Its end is found where the stream is read.
            one.send(pair.proofs[1])
        self._switch(link, pair, one)

    def _turn_away(self, fd: int, reason: str) -> None:
        one = self._newcomers.pop(fd)[0]
        if reason and one.family != socket.AF_UNIX:
            address = ""
            with contextlib.suppress(OSError):
                address = str(one.getpeername()[0])
            self._events.append(Stranger(address, f"{reason} (direct connection)"))
        self._unwatch(fd)
        one.close()

    def _look(self) -> None:
        """Close connections that prove nothing."""
        now = time.monotonic()
        self._look_at = now + CHECK_S
        for fd, (_, until, _) in list(self._newcomers.items()):
            if now >= until:
                self._turn_away(fd, f"it had proven nothing for {UNPROVEN_S:g} s")
        for listener in self._listeners or ():
            self._wait_for(listener.fileno(), select.EPOLLIN)


def _stream_socket(family: int) -> socket.socket:
    return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)


def _hear(one: socket.socket, got: bytearray) -> bool:
    """Receive a proof, and no more; return whether it is complete. One that ended before is empty."""
    try:
        came = one.recv(PROOF_BYTES - len(got))
    except BlockingIOError:
        return False
    except OSError:
        came = b""
    if not came:
        got.clear()
        return True
    got += came
    return len(got) == PROOF_BYTES
