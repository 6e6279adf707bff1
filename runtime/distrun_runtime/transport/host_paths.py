"""A transport that sends large frames by the fastest path that works, and everything else as the one that it wraps.

Order and control stay with the wrapped transport (ZeroMQ). Of a message with large frames it carries a table of
references and the small frames; the bytes of the large ones go by shared memory (`host_segments`) where both processes
are on one host. On arrival the message is whole again.

As soon as both sides of a connection have proven themselves, the side that it came in to offers its paths. What does
not work there is noticed and said (`PathChosen`), and the next path is used; the last one is the wrapped transport.

Messages of this module begin with `MAGIC`, which no other message does. docs/protocol.md has the bytes.
"""

from __future__ import annotations

import contextlib
import json
import struct
import time
from collections.abc import Callable, Mapping, Sequence, Set
from enum import IntEnum
from typing import Any

from distrun_runtime.arrays.dtypes import Buffer
from distrun_runtime.arrays.gpu_frames import IN_USE, readable
from distrun_runtime.arrays.shared_memory import Pool
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import WireError
from distrun_runtime.protocol.message import BYTES, VIEW
from distrun_runtime.transport.base import (
    Arrived,
    Down,
    Event,
    Lease,
    Link,
    NotShared,
    PathChosen,
    Released,
    Transport,
)
from distrun_runtime.transport.direct import DirectTransport, Sink
from distrun_runtime.transport.host_segments import Segments

MAGIC = b"DRKB"
VERSION = 1
LOOK_S = 0.05
"""How often memory is looked after, if nothing wakes the polling thread; where all messages are taken as they come
(`pour`), its loop has to tick for it."""
LARGE_BYTES = 80 * 1024
"""Frames from this size on go by another path. For smaller ones a reference costs more than the copies: 64 KiB take two
thirds of the time. A message of them is read from a socket at once (`direct.CHUNK_BYTES`)."""

_HEAD = struct.Struct("<4sBBHII")
"""Magic, version, kind, number of references, slot, generation."""
_REFERENCE = struct.Struct("<IIQQ")
"""Number of the frame, segment, offset, length."""

KEPT_LEASES = 32
"""From so many messages in shared memory on it is looked which of them were read, each time that one is sent."""

_UNREADABLE = (struct.error, ValueError, KeyError, IndexError, TypeError, WireError, NotShared)
"""What it raises to read what makes no sense."""


class BulkKind(IntEnum):
    """What a message of this module is."""

    OFFER = 1
    """The acceptor: what the opener needs for each path. JSON."""
    ANSWER = 2
    """The opener: which paths it took, and why not the others. JSON."""
    READY = 3
    """The acceptor: which of those it has found right. JSON."""
    CARRIED = 4
    """A message, some of whose frames are elsewhere: the table, then its frames, these empty."""
    SEGMENTS = 5
    """Segments whose descriptors were sent, to be mapped now: later messages will name them. JSON."""
    ENDED = 6
    """The acceptor: it reads nothing more on this connection, and why. Only the opener can close it. JSON."""
    GONE = 7
    """Segments that were given back, to be unmapped: no later message names them. JSON."""
    GPU_OFFER = 8
    """A segment of a GPU, whose descriptor was sent. JSON."""
    GPU_ANSWER = 9
    """Whether the other side reads it where it is, and why not. JSON."""


_CARRIED = MAGIC + bytes([VERSION, BulkKind.CARRIED])


@dataclass(eq=False)
class _SplitLease:
    """Of a message whose frames went by several ways."""

    parts: list[Lease]

    @property
    def is_over(self) -> bool:
        while self.parts and self.parts[-1].is_over:
            self.parts.pop()
        return not self.parts


class BulkTransport:
    """Wraps a transport.

    Arguments:
        pools: memory of this process that others on the host may read.
        offers: offer paths to nodes that connect to us. A node that gets no values does not.
        large_bytes: frames from this size on go by another path.
    """

    def __init__(
        self,
        inner: Transport,
        token: bytes,
        pools: Sequence[Pool],
        *,
        offers: bool = True,
        large_bytes: int = LARGE_BYTES,
    ) -> None:
        self._inner = inner
        self.bind, self.connect, self.admitted, self.refused = inner.bind, inner.connect, inner.admitted, inner.refused
        self._is_woken = True
        self._look_at = 0.0
        self.direct = inner if isinstance(inner, DirectTransport) else None
        """What a thread that has the turn takes links from."""
        self._offers = offers
        self._large_bytes = large_bytes
        self._segments = Segments(token, pools, self.wake)
        self.shares = self._segments.is_open
        self.share_gpu, self.exports_to = self._segments.gpu.open, self._segments.exports_to
        """Have memory of a GPU offered to nodes on this host; and that memory, if some nodes read it. Threads: any."""
        self._proven: set[Link] = set()
        self._early: dict[Link, Sequence[Buffer]] = {}
        """Offers of acceptors that have not proven themselves yet, as far as the loop has heard."""
        self._events: list[Event] = []
        self._in_use: list[Lease] = []
        self._by_inner: dict[Lease, Lease] = {}
        """Leases of the wrapped transport that are part of one of ours."""
        self._sink: Sink = lambda link, frames: frames

    # The interface of a transport

    def disconnect(self, link: Link, linger_s: float = 0.0) -> None:
        """Close a connection."""
        self._ended(link)
        self._inner.disconnect(link, linger_s)

    def proven(self, link: Link) -> None:
        """Both sides have proven themselves: look for better paths."""
        self._inner.proven(link)
        self._proven.add(link)
        if link.startswith("in:") and self._offers:
            try:
                self._say(link, BulkKind.OFFER, {"segments": self._segments.offer(link)})
            except NotShared as err:
                self._chose(link, "messages", f"this process cannot share memory: {err}")
        elif link in self._early:
            self._control(link, self._early.pop(link))

    def send(self, link: Link, frames: Sequence[Buffer]) -> Lease:
        """Send a message."""
        on_gpu: Set[int] = frozenset()
        if IN_USE:
            frames, on_gpu = self._segments.reachable(link, frames)
        sizes = tuple(map(BYTES, map(VIEW, frames)))
        if link not in self._segments.peers or (not on_gpu and max(sizes) < self._large_bytes):
            return self._inner.send(link, frames)
        table: list[bytes] = []
        rest = list(frames)
        for number, size in enumerate(sizes):
            if size < self._large_bytes and number not in on_gpu:
                continue
            reference = self._segments.refer(link, frames[number])
            if reference is not None:
                table.append(_REFERENCE.pack(number, *reference))
                rest[number] = b""
        shared = self._segments.lease(link, frames, is_on_gpu=bool(on_gpu)) if table else None
        if shared is None:
            return self._inner.send(link, list(map(readable, frames)) if on_gpu else frames)
        try:
            self._in_use.append(shared)
            if len(self._in_use) > KEPT_LEASES:
                self._release()  # A thread that sends and receives by itself may do so many times before the next poll.
            head = _HEAD.pack(MAGIC, VERSION, BulkKind.CARRIED, len(table), shared.slot, shared.generation)
            inner = self._inner.send(link, [head + b"".join(table), *rest])
        except BaseException:  # A signal handler has raised. Where it is not known, the message may have been sent.
            if self.direct is not None and not self.direct.was_sent(link, rest[0]):
                shared.take_back()
            raise
        lease: Lease = shared
        if not inner.is_over:
            lease = self._by_inner[inner] = self._in_use[-1] = _SplitLease([shared, inner])
        return lease

    def _release(self) -> None:
        """Let go of memory that the other sides have read."""
        if self._in_use:
            over: list[Lease] = []
            left: list[Lease] = []
            for lease in self._in_use:
                (over if lease.is_over else left).append(lease)
            if over:  # One step: see `direct`.
                self._in_use, self._events = left, [*self._events, *map(Released, over)]

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait for events and return them."""
        if self._is_woken or time.monotonic() >= self._look_at:
            self._is_woken = False
            self._look()
        self._release()
        for event in self._inner.poll(0.0 if self._events else timeout_s):
            if isinstance(event, Arrived) and bytes(event.frames[0][:4]) == MAGIC:
                self._arrived(event)
            elif isinstance(event, Down):
                self._ended(event.link)
                self._events.append(event)
            elif not (isinstance(event, Released) and self._by_inner.pop(event.lease, None) is not None):
                self._events.append(event)
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        """End a `poll`; the next one looks whether there is new memory. Threads: any, and signal handlers."""
        self._is_woken = True
        self._inner.wake()

    def _look(self) -> None:
        """Tell peers of memory that has come or gone."""
        self._look_at = time.monotonic() + LOOK_S
        self._segments.look()
        for link, numbers in self._segments.announce().items():
            self._say(link, BulkKind.SEGMENTS, {"segments": {"numbers": numbers}})
        for link, numbers in self._segments.retract().items():
            self._say(link, BulkKind.GONE, {"segments": {"numbers": numbers}})
        why_not, self._segments.gpu.why_not = self._segments.gpu.why_not, ""
        for link in self._segments.peers if why_not else ():
            self._chose(link, "segments", why_not)
        for link, told in self._segments.gpu_offers():
            self._say(link, BulkKind.GPU_OFFER, {"gpu": told})
        for link, told in self._segments.retry_gpus():
            self._say(link, BulkKind.GPU_ANSWER, {"gpu": told})

    def inbox(self, link: Link) -> Sequence[Sequence[Buffer]] | None:
        """Return the messages that have come on a link that was taken (`direct`), whole; None: it has ended."""
        assert self.direct is not None
        inbox = self.direct.inbox(link)
        for place, frames in enumerate(inbox or ()):
            if inbox and frames[0][:4] == MAGIC:
                with contextlib.suppress(*_UNREADABLE):  # The polling thread finds it again.
                    if frames[0][5] == BulkKind.CARRIED:
                        inbox[place] = self._whole(link, frames)
        return inbox

    def pour(self, sink: Sink, known: Callable[[Link, bytes], bool]) -> None:
        """Give `sink` each message, whole, that comes on a direct connection while there are no events before it; but
        not what `known` takes as it comes."""
        if self.direct is not None:
            self._sink, self.direct.sink, self.direct.known = sink, self._sunk, known

    def _sunk(self, link: Link, frames: Sequence[Buffer]) -> Sequence[Buffer] | None:
        begin = frames[0][:6]
        if begin[:4] != MAGIC:
            return self._sink(link, frames)
        if begin != _CARRIED or link not in self._proven:
            return frames
        try:
            whole = self._whole(link, frames)
        except _UNREADABLE:
            return frames  # It is found again when it arrives.
        return self._sink(link, whole)

    def close(self, linger_s: float = 0.0) -> None:
        """Close everything."""
        self._inner.close(linger_s)
        self._segments.close()

    # Paths

    def _control(self, link: Link, frames: Sequence[Buffer]) -> None:
        """Act on a message by which both sides agree on paths."""
        kind = frames[0][5]
        told = json.loads(bytes(frames[1]))["segments"]
        try:
            if kind == BulkKind.OFFER:
                self._segments.take(link, told)
                self._say(link, BulkKind.ANSWER, {"segments": {}})
            elif kind == BulkKind.ANSWER and "reason" in told:
                self._chose(link, "messages", str(told["reason"]))
            elif kind == BulkKind.ANSWER:
                self._segments.taken(link)
                self._say(link, BulkKind.READY, {"segments": {}})
                self._chose(link, "segments", "")
            elif kind == BulkKind.READY:
                self._segments.ready(link, str(told.get("reason", "")))
                self._chose(link, "segments", "")
        except NotShared as err:
            self._chose(link, "messages", str(err))
            if kind in {BulkKind.OFFER, BulkKind.ANSWER}:
                self._say(link, BulkKind(kind + 1), {"segments": {"reason": str(err)}})

    def _arrived(self, event: Arrived) -> None:
        """Take in a message of this module."""
        link, frames = event.link, event.frames
        if link not in self._proven:
            if link.startswith("in:"):
                self._events.append(event)  # No node says this before it has proven itself: bad bytes.
            else:
                self._early[link] = frames  # The loop has not heard yet that the acceptor is proven.
            return
        try:
            _, version, kind, *_ = _HEAD.unpack_from(frames[0])
            if version != VERSION:
                raise WireError(f"data path version {version}; this program speaks version {VERSION}")
            if kind in {BulkKind.SEGMENTS, BulkKind.GONE}:
                numbers = [int(each) for each in json.loads(bytes(frames[1]))["segments"]["numbers"]]
                (self._segments.map if kind == BulkKind.SEGMENTS else self._segments.unmap)(link, numbers)
                return
            if kind == BulkKind.GPU_OFFER:
                for told in self._segments.take_gpu(link, json.loads(bytes(frames[1]))["gpu"]):
                    self._say(link, BulkKind.GPU_ANSWER, {"gpu": told})
                return
            if kind == BulkKind.GPU_ANSWER:
                reason = self._segments.gpu_answered(link, json.loads(bytes(frames[1]))["gpu"])
                self._chose(link, "segments" if reason else "gpu", reason)
                return
            if kind == BulkKind.ENDED:
                self._end(link, f"the other side says: {json.loads(bytes(frames[1]))['reason']}")
                return
            if kind != BulkKind.CARRIED:
                self._control(link, frames)
                return
            whole = self._whole(link, frames)
        except _UNREADABLE as err:
            # The message is lost, and with it the order: for both sides this connection has ended.
            reason = f"what it sent cannot be read: {type(err).__name__}: {err}"
            if link.startswith("in:"):
                self._say(link, BulkKind.ENDED, {"reason": reason})
            self._end(link, reason)
            return
        self._events.append(Arrived(link, whole))

    def _whole(self, link: Link, frames: Sequence[Buffer]) -> list[Buffer]:
        """Return the frames of a message, some of which are elsewhere."""
        _, _, _, count, slot, generation = _HEAD.unpack_from(frames[0])
        whole = list(frames[1:])
        table = list(_REFERENCE.iter_unpack(memoryview(frames[0])[_HEAD.size :]))
        if len(table) != count:
            raise WireError(f"a table of {len(table)} references, not of {count}")
        self._segments.fill(whole, link, table, slot, generation)
        return whole

    def _end(self, link: Link, reason: str) -> None:
        self._inner.disconnect(link)
        self._ended(link)
        self._events.append(Down(link, reason))

    def _say(self, link: Link, kind: BulkKind, body: Mapping[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):  # `Down` follows.
            self._inner.send(link, [_HEAD.pack(MAGIC, VERSION, kind, 0, 0, 0), json.dumps(body).encode()])

    def _chose(self, link: Link, path: str, reason: str) -> None:
        self._events.append(PathChosen(link, path, reason))

    def _ended(self, link: Link) -> None:
        self._proven.discard(link)
        self._early.pop(link, None)
        self._segments.drop(link)
