"""Sends again what is lost between two nodes: a transport around another one that may lose messages.

For networks that lose messages although TCP does not: relays, broken middle boxes, and injected faults
(`transport.faults`). Both ends of a connection must resend.

Once a connection is welcome (the handshake is over), each message on it has one frame more before it, its envelope: a
number, counted from 1 for each connection and direction, and the sender's incarnation. The receiver acknowledges what
it has, delivers in the order of the numbers and drops repeats (`Incoming`). The sender keeps a message until it is
acknowledged, and sends it again when that takes too long (`Outgoing`). `docs/protocol.md` has the format.

The buffers of a message are in use until it is acknowledged.

Source: ps-lite's PS_RESEND and PS_RESEND_TIMEOUT, with the same waits (the n-th repeat waits n + 1 times as long) and
the same limit. There the signatures that were seen were kept for ever, and nothing was put back in order.
"""

from __future__ import annotations

import itertools
import logging
import struct
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from distrun_runtime.arrays.dtypes import Buffer
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.protocol.message import Kind, size_of
from distrun_runtime.transport.base import (
    Arrived,
    Down,
    Event,
    Lease,
    Link,
    PathChosen,
    Released,
    Stranger,
    Transport,
)

logger = logging.getLogger(__name__)

LIMIT = 10
"""How often a message is sent again before its connection is given up."""
BATCH = 64
"""How many messages of a connection are sent again at once: the first ones that are missing hold up all others."""
HELD = 4096
HELD_BYTES = 256 * 1024 * 1024
"""How many messages, and how many bytes of them, may wait for a missing one before them. What is beyond is taken as
lost."""

Item = TypeVar("Item")

# Envelopes

MAGIC = b"DRRS"
DATA, ACK = 1, 2
_ENVELOPE = struct.Struct("<4sB3xIQ")

HANDSHAKE = frozenset((Kind.HELLO, Kind.CHALLENGE, Kind.PROOF, Kind.WELCOME, Kind.REFUSED))
"""Kinds of messages that travel without an envelope: those of the handshake."""


@dataclass(frozen=True)
class Envelope:
    """The frame before a message, or all of an acknowledgement."""

    what: int
    """DATA or ACK."""
    incarnation: int
    """How often the sender was restarted."""
    number: int
    """DATA: the message's number, from 1. ACK: all numbers up to it have arrived."""
    others: tuple[int, ...] = ()
    """ACK: numbers beyond that have arrived as well."""

    def encode(self) -> bytes:
        """Return the frame."""
        head = _ENVELOPE.pack(MAGIC, self.what, self.incarnation, self.number)
        return head + struct.pack(f"<{len(self.others)}Q", *self.others)


def read(frames: Sequence[Buffer]) -> Envelope | None:
    """Return the envelope that frames begin with; None if there is none, or it is malformed."""
    head = memoryview(frames[0])
    if head.nbytes < _ENVELOPE.size or bytes(head[:4]) != MAGIC:
        return None
    _, what, incarnation, number = _ENVELOPE.unpack_from(head)
    count, rest = divmod(head.nbytes - _ENVELOPE.size, 8)
    if what == DATA and head.nbytes == _ENVELOPE.size and len(frames) > 1:
        return Envelope(what, incarnation, number)
    if what == ACK and not rest and len(frames) == 1:
        return Envelope(what, incarnation, number, struct.unpack_from(f"<{count}Q", head, _ENVELOPE.size))
    return None


def kind_of(frames: Sequence[Buffer]) -> Kind | None:
    """Return the kind of a message, with or without an envelope; None: an acknowledgement, or not a message."""
    for frame in frames[:2]:
        head = bytes(memoryview(frame).cast("B")[:7]) if memoryview(frame).nbytes else b""
        if head[:4] == MAGIC and len(frames) > 1:
            continue
        try:
            return Kind(head[6]) if len(head) == 7 and head[:4] != MAGIC else None
        except ValueError:
            return None
    return None


# Windows


class Outgoing(Generic[Item]):
    """The messages that were sent on one connection and are not acknowledged yet. Decides which are sent again.

    Has no clock: time is passed in, in seconds of any epoch.

    Arguments:
        timeout_s: how long the first try may take; the n-th repeat may take n + 1 times as long.
        has_left: returns whether all copies of an item have left this process. One that has not, and all behind it,
            wait for a slow network: they are neither sent again nor lost.
    """

    def __init__(self, timeout_s: float, has_left: Callable[[Item], bool] = lambda item: True) -> None:
        self._timeout_s = timeout_s
        self._has_left = has_left
        self._last = 0
        self._waiting: dict[int, tuple[Item, int, float]] = {}
        """Number to item, repeats, and when it was sent first."""
        self._due: dict[int, float] = {}
        self._next_due = float("inf")

    def put(self, item: Item, now: float) -> int:
        """Add a message that is being sent; return its number."""
        self._last += 1
        self._waiting[self._last] = (item, 0, now)
        self._due[self._last] = now + self._timeout_s
        self._next_due = min(self._next_due, now + self._timeout_s)
        return self._last

    def acknowledge(self, through: int, others: Sequence[int] = ()) -> list[Item]:
        """Remove all numbers up to `through`, and the `others`: they have arrived. Return their items."""
        # In the order of their numbers: the first that is not covered ends the search.
        numbers = list(itertools.takewhile(lambda number: number <= through, self._waiting))
        numbers += [number for number in others if number > through and number in self._waiting]
        for number in numbers:
            del self._due[number]
        return [self._waiting.pop(number)[0] for number in numbers]

    def due(self, now: float) -> list[tuple[int, Item]]:
        """Return what is to be sent again, by number in ascending order, and count it as sent."""
        if now < self._next_due:
            return []
        stuck = self._stuck()
        late = [number for number, at in self._due.items() if at <= now]
        left = [number for number in late if number < stuck]
        again, rest = left[:BATCH], left[BATCH:] + late[len(left) :]
        self._due.update((number, now + self._timeout_s) for number in rest)
        for number in again:
            item, repeats, since = self._waiting[number]
            self._waiting[number] = (item, repeats + 1, since)
            self._due[number] = now + self._timeout_s * (repeats + 2)
        self._next_due = min(self._due.values(), default=float("inf"))
        return [(number, self._waiting[number][0]) for number in again]

    def lost(self, now: float) -> tuple[Item, float] | None:
        """Return an item that was repeated `LIMIT` times in vain, and how long ago it was sent; None: there is none."""
        if now >= self._next_due:
            stuck = self._stuck()
            for number, (item, repeats, since) in self._waiting.items():
                if repeats >= LIMIT and self._due[number] <= now and number < stuck:
                    return item, now - since
        return None

    def _stuck(self) -> float:
        """Return the first number that has not left this process; infinite if all have."""
        numbers = (number for number, (item, _, _) in self._waiting.items() if not self._has_left(item))
        return next(numbers, float("inf"))

    def hasten(self, now: float, timeout_s: float) -> None:
        """Make everything due after `timeout_s` at the latest: the connection is about to be closed."""
        self._timeout_s = min(self._timeout_s, timeout_s)
        self._due = {number: min(at, now + timeout_s) for number, at in self._due.items()}
        self._next_due = min(self._due.values(), default=float("inf"))

    def clear(self) -> list[Item]:
        """Remove everything; return the items."""
        items = [item for item, _, _ in self._waiting.values()]
        self._waiting, self._due, self._next_due = {}, {}, float("inf")
        return items

    @property
    def next_due(self) -> float:
        """The earliest time at which `due` returns something; infinite if nothing waits."""
        return self._next_due if self._waiting else float("inf")

    @property
    def is_empty(self) -> bool:
        """Whether everything has arrived."""
        return not self._waiting


class Incoming(Generic[Item]):
    """The messages that came on one connection: delivers them in order, each once, within a window."""

    def __init__(self, window: int = HELD, window_bytes: int = HELD_BYTES) -> None:
        self._window = window
        self._window_bytes = window_bytes
        self._through = 0
        self._held: dict[int, tuple[Item, int]] = {}
        self._held_bytes = 0

    def take(self, number: int, item: Item, size: int = 0) -> list[Item]:
        """Take one message of `size` bytes; return what can be delivered now, in order.

        A repeat, or a message too far ahead, is dropped; the latter is not acknowledged, so it comes again.
        """
        if number <= self._through or number in self._held:
            return []
        if number > self._through + 1:
            if number <= self._through + self._window and self._held_bytes + size <= self._window_bytes:
                self._held[number] = (item, size)
                self._held_bytes += size
            return []
        self._through = number
        ready = [item]
        while self._held and self._through + 1 in self._held:
            self._through += 1
            held, held_size = self._held.pop(self._through)
            self._held_bytes -= held_size
            ready.append(held)
        return ready

    @property
    def acknowledged(self) -> tuple[int, tuple[int, ...]]:
        """The number up to which everything has arrived, and those beyond that have arrived too."""
        return self._through, tuple(sorted(self._held))


# The transport


class _SentMessage:
    """A message and the lease of its buffers."""

    def __init__(self, frames: Sequence[Buffer]) -> None:
        self.frames: Sequence[Buffer] = frames
        self.leases: list[Lease] = []
        self.is_acknowledged = False

    @property
    def is_over(self) -> bool:
        """Whether it was acknowledged, or given up, and no copy of it waits in this process."""
        return self.is_acknowledged and self.has_left

    @property
    def has_left(self) -> bool:
        """Whether no copy of it waits in this process."""
        return all(lease.is_over for lease in self.leases)


class _ResendStream:
    """One connection, both ways."""

    def __init__(self, timeout_s: float) -> None:
        self.out: Outgoing[_SentMessage] = Outgoing(timeout_s, lambda sent: sent.has_left)
        self.into: Incoming[Sequence[Buffer]] = Incoming()
        self.incarnation: int | None = None
        """The other side's, by its first message."""
        self.owes_ack = False


class Resending:
    """A transport that sends again what another one loses. Both ends of a connection must be of this kind.

    Arguments:
        inner: the transport that sends. `bind`, `admitted`, `proven`, `refused` and `wake` go to it as they are.
        timeout_s: how long an acknowledgement may take.
        incarnation: how often this node was restarted.
    """

    def __init__(
        self, inner: Transport, timeout_s: float, incarnation: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._inner = inner
        self.bind, self.admitted, self.proven, self.refused = inner.bind, inner.admitted, inner.proven, inner.refused
        self.wake, self.shares = inner.wake, inner.shares
        self._timeout_s = timeout_s
        self._incarnation = incarnation
        self._clock = clock
        self._streams: dict[Link, _ResendStream] = {}
        """The connections that are welcome."""
        self._given_up: set[Link] = set()
        """Connections that were given up. What still comes on them is dropped."""
        self._direct: set[Lease] = set()
        """Leases of messages without a number."""
        self._leaving: list[_SentMessage] = []
        """Messages that are acknowledged or given up and whose release was not told yet."""
        self.repeats = 0
        """How many messages were sent again."""

    def connect(self, link: Link, endpoint: str) -> None:
        """Open a connection."""
        self._end(link)
        self._given_up.discard(link)
        self._inner.connect(link, endpoint)

    def disconnect(self, link: Link, linger_s: float = 0.0) -> None:
        """Close a connection; what was not acknowledged is given up."""
        self._end(link)
        self._inner.disconnect(link, linger_s)

    def send(self, link: Link, frames: Sequence[Buffer]) -> Lease:
        """Send a message."""
        kind = kind_of(frames)
        stream = self._streams.get(link)
        if kind in HANDSHAKE or stream is None:
            lease = self._inner.send(link, frames)
            if not lease.is_over:
                self._direct.add(lease)
            if kind is Kind.WELCOME:
                self._streams[link] = _ResendStream(self._timeout_s)
            return lease
        sent = _SentMessage(frames)
        self._transmit(link, stream.out.put(sent, self._clock()), sent)
        return sent

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait for events and return them, each message once and in order."""
        now = self._clock()
        next_due = min((stream.out.next_due for stream in self._streams.values()), default=float("inf"))
        arrived = self._inner.poll(max(0.0, min(timeout_s, next_due - now)))
        events = [event for found in arrived for event in self._taken(found)]
        self._acknowledge()
        return [*events, *self._repeat(self._clock()), *self._released()]

    def close(self, linger_s: float = 0.0) -> None:
        """Close everything, after all was acknowledged or `linger_s` is over."""
        now = self._clock()
        end = now + linger_s
        streams = list(self._streams.values())
        for stream in streams:
            stream.out.hasten(now, linger_s / 20)
        while now < end and any(not stream.out.is_empty for stream in streams):
            # What still comes in is acknowledged and dropped.
            self.poll(min(end - now, 0.05))
            now = self._clock()
        self._inner.close(linger_s)

    def _end(self, link: Link) -> None:
        """Give up what was not acknowledged."""
        stream = self._streams.pop(link, None)
        self._forget(stream.out.clear() if stream is not None else ())

    def _forget(self, messages: Sequence[_SentMessage]) -> None:
        for sent in messages:
            sent.is_acknowledged = True
        self._leaving += messages

    def _released(self) -> list[Event]:
        leaving, self._leaving = self._leaving, []
        events: list[Event] = []
        for sent in leaving:
            if sent.has_left:
                events.append(Released(sent))
            else:
                self._leaving.append(sent)
        return events

    def _transmit(self, link: Link, number: int, sent: _SentMessage) -> None:
        envelope = Envelope(DATA, self._incarnation, number).encode()
        sent.leases = [lease for lease in sent.leases if not lease.is_over]
        sent.leases.append(self._inner.send(link, [envelope, *sent.frames]))

    def _taken(self, event: Event) -> list[Event]:
        """Return the events that follow from one of the inner transport."""
        if isinstance(event, (Stranger, PathChosen)):
            return [event]
        if isinstance(event, Released):
            # A copy of a numbered message has left; that message itself is released when it is acknowledged, too.
            is_direct = event.lease in self._direct
            self._direct.discard(event.lease)
            return [event] if is_direct else []
        if not isinstance(event, Arrived):
            self._end(event.link)
            is_known = isinstance(event, Down) and event.link in self._given_up
            self._given_up.discard(event.link)
            return [] if is_known else [event]
        if event.link in self._given_up:
            return []
        stream = self._streams.get(event.link)
        envelope = read(event.frames) if stream is not None else None
        if stream is None or envelope is None:
            if stream is None and kind_of(event.frames) is Kind.WELCOME:
                self._streams[event.link] = _ResendStream(self._timeout_s)
            return [event]  # Of the handshake; or malformed, which its decoder refuses.
        if stream.incarnation is None:
            stream.incarnation = envelope.incarnation
        if envelope.incarnation != stream.incarnation:
            return []
        if envelope.what == ACK:
            self._forget(stream.out.acknowledge(envelope.number, envelope.others))
            return []
        stream.owes_ack = True
        frames = event.frames[1:]
        size = size_of(frames)
        return [Arrived(event.link, ready) for ready in stream.into.take(envelope.number, frames, size)]

    def _acknowledge(self) -> None:
        for link, stream in self._streams.items():
            if stream.owes_ack:
                stream.owes_ack = False
                try:
                    self._inner.send(link, [Envelope(ACK, self._incarnation, *stream.into.acknowledged).encode()])
                except ConnectionError:
                    logger.debug("no acknowledgement to %s: it is gone", link)

    def _repeat(self, now: float) -> list[Event]:
        given_up: list[Event] = []
        for link, stream in list(self._streams.items()):
            lost = stream.out.lost(now)
            if lost is not None:
                self._end(link)
                self._given_up.add(link)
                kind, waited_s = kind_of(lost[0].frames), lost[1]
                what = f"a message ({kind.name if kind else 'of unknown kind'})"
                reason = f"it did not acknowledge {what} that was sent {LIMIT + 1} times in {waited_s:.1f} s"
                given_up.append(Down(link, reason))
                continue
            for number, sent in stream.out.due(now):
                self.repeats += 1
                logger.debug("message %d to %s is sent again", number, link)
                try:
                    self._transmit(link, number, sent)
                except ConnectionError:
                    break  # `Down` will say so.
        return given_up
