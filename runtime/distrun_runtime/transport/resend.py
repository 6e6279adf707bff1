"""Resending: what is lost between two nodes is sent again, what comes twice is dropped, and the order is kept.

For networks that lose messages although TCP does not: relays, broken middle boxes, and faults that are injected to
test (`net.faults`). Once a connection is welcome, each message on it is in an envelope with a number, counted up from 1
for each connection and direction, and the sender's incarnation. The receiver acknowledges what it has, delivers in the
order of the numbers and drops repeats; the sender keeps each message until then, and sends it again when it waited too
long. `net.window` decides; here it is done.

Source: ps-lite's PS_RESEND and PS_RESEND_TIMEOUT.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from distrun_runtime.protocol.message import Buffer, Kind
from distrun_runtime.transport.admission import Stranger
from distrun_runtime.transport.envelope import ACK, DATA, HANDSHAKE, Envelope, kind_of, read
from distrun_runtime.transport.window import LIMIT, Incoming, Outgoing
from distrun_runtime.transport.wrapper import Inner, Wrapper
from distrun_runtime.transport.zeromq import Arrived, Down, Event, Lease, Link

logger = logging.getLogger(__name__)


class _Sent(Lease):
    """A message that waits for its acknowledgement; its buffers are lent until then."""

    def __init__(self, frames: Sequence[Buffer]) -> None:
        super().__init__(())
        self.frames: Sequence[Buffer] = frames
        self.leases: list[Lease] = []
        self.is_acknowledged = False

    @property
    def is_over(self) -> bool:
        """Whether it arrived and no copy of it is on its way."""
        return self.is_acknowledged and self.has_left

    @property
    def has_left(self) -> bool:
        """Whether no copy of it waits in this process."""
        return all(lease.is_over for lease in self.leases)


class _Stream:
    """One connection, both ways."""

    def __init__(self, timeout_s: float) -> None:
        self.out: Outgoing[_Sent] = Outgoing(timeout_s, lambda sent: sent.has_left)
        self.into: Incoming[Sequence[Buffer]] = Incoming()
        self.incarnation: int | None = None
        """The other side's, by its first message."""
        self.owes_ack = False


class Resending(Wrapper):
    """A transport that sends again what another one loses. Both ends of a connection must be such.

    Arguments:
        inner: does the sending.
        timeout_s: how long an acknowledgement may take.
        incarnation: how often this node was started before.

    Threads: as the inner one: everything but `wake` belongs to the thread that polls.
    """

    def __init__(
        self, inner: Inner, timeout_s: float, incarnation: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(inner)
        self._timeout_s = timeout_s
        self._incarnation = incarnation
        self._clock = clock
        self._streams: dict[Link, _Stream] = {}
        """The connections that are welcome."""
        self._given_up: set[Link] = set()
        """Connections that are not heard any more, although they may stand."""
        self.repeats = 0
        """Messages that were sent again."""

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
        """Send frames. They are lent until the other side has acknowledged them.

        Raises:
            ConnectionError: the connection is gone.
        """
        kind = kind_of(frames)
        stream = self._streams.get(link)
        if kind in HANDSHAKE or stream is None:
            lease = self._inner.send(link, frames)
            if kind is Kind.WELCOME:
                self._streams[link] = _Stream(self._timeout_s)
            return lease
        sent = _Sent(frames)
        self._transmit(link, stream.out.put(sent, self._clock()), sent)
        return sent

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait at most so long and return what happened, each message once and in order."""
        now = self._clock()
        next_due = min((stream.out.next_due for stream in self._streams.values()), default=float("inf"))
        arrived = self._inner.poll(max(0.0, min(timeout_s, next_due - now)))
        events = [event for found in arrived for event in self._taken(found)]
        self._acknowledge()
        return events + self._repeat(self._clock())

    def close(self, linger_s: float = 0.0) -> None:
        """Close everything; what was sent has so long to arrive."""
        now = self._clock()
        end = now + linger_s
        streams = list(self._streams.values())
        for stream in streams:
            stream.out.hasten(now, linger_s / 20)
        while now < end and any(not stream.out.is_empty for stream in streams):
            # What still comes in is acknowledged and dropped: there is nobody to hear it.
            self.poll(min(end - now, 0.05))
            now = self._clock()
        self._inner.close(linger_s)

    def _end(self, link: Link) -> None:
        """Give up what was not acknowledged: its buffers are lent no longer."""
        stream = self._streams.pop(link, None)
        for sent in stream.out.clear() if stream is not None else ():
            sent.is_acknowledged = True

    def _transmit(self, link: Link, number: int, sent: _Sent) -> None:
        envelope = Envelope(DATA, self._incarnation, number).encode()
        sent.leases = [lease for lease in sent.leases if not lease.is_over]
        sent.leases.append(self._inner.send(link, [envelope, *sent.frames]))

    def _taken(self, event: Event) -> list[Event]:
        """Return what an event of the inner transport means to whoever polls us."""
        if isinstance(event, Stranger):
            return [event]
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
                self._streams[event.link] = _Stream(self._timeout_s)
            return [event]  # Of the handshake; or bytes that whoever decodes them will refuse.
        if stream.incarnation is None:
            stream.incarnation = envelope.incarnation
        if envelope.incarnation != stream.incarnation:
            return []
        if envelope.what == ACK:
            for sent in stream.out.acknowledge(envelope.number, envelope.others):
                sent.is_acknowledged = True
            return []
        stream.owes_ack = True
        frames = event.frames[1:]
        size = sum(memoryview(frame).nbytes for frame in frames)
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
                given_up.append(Down(link, _in_vain(*lost)))
                continue
            for number, sent in stream.out.due(now):
                self.repeats += 1
                logger.debug("message %d to %s is sent again", number, link)
                try:
                    self._transmit(link, number, sent)
                except ConnectionError:
                    break  # `Down` will say so.
        return given_up


def _in_vain(sent: _Sent, waited_s: float) -> str:
    kind = kind_of(sent.frames)
    return "it did not acknowledge a message (%s) that was sent %d times in %.1f s" % (
        kind.name if kind else "of unknown kind",
        LIMIT + 1,
        waited_s,
    )
