"""Orders the work of several CUDA streams on memory that they share: each operation waits for what it depends on.

    Queue   a stream, and how many operations it was given
    Uses    who wrote some memory last, and who has read it since
    Order   makes streams and the host wait for each other

An operation says which memory it reads and which it writes (`Order.using`). If another queue used it in a way that does
not fit, the queue waits for that other queue, by an event, before the operation. What a queue or the host knows to be
over is counted, so nothing waits for the same work twice, or for work that the other side had waited for already.

Memory that is used again, by whoever, keeps its Uses: so its next user waits for the last one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from distrun_runtime.arrays.cuda import Cuda, Event, Stream

__all__ = ["Mark", "Order", "Queue", "Uses"]


@dataclass(eq=False)
class Queue:
    """A stream of a device. Only `Order` changes it."""

    stream: Stream
    event: Event
    """For other queues to wait for: a wait holds for the event as it was recorded then, so one is enough."""
    count: int = 0
    """Operations that it was given."""
    seen: dict[Queue, int] = field(default_factory=dict)
    """How many operations of other queues are over before its next one begins."""
    recorded: int = 0
    """How many of its operations come before the event."""
    known: dict[Queue, int] = field(default_factory=dict)
    """What is over once the event is."""


@dataclass(eq=False)
class Uses:
    """The last uses of some memory: queues, and each one's count after the operation."""

    writer: tuple[Queue, int] | None = None
    readers: dict[Queue, int] = field(default_factory=dict)

    def before_reading(self) -> Iterator[tuple[Queue, int]]:
        """Yield what has to be over before the memory is read."""
        if self.writer is not None:
            yield self.writer

    def before_writing(self) -> Iterator[tuple[Queue, int]]:
        """Yield what has to be over before the memory is written."""
        yield from self.readers.items()
        yield from self.before_reading()


@dataclass(eq=False)
class Mark:
    """A place in a queue's work that the host can wait for, once."""

    event: Event
    known: dict[Queue, int]
    """What is over once the event is."""


class Order:
    """Orders the work of all queues of a process. Threads: any.

    Nothing waits while the lock is held: a thread that waits for a device does not stop others from giving it work.
    """

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self._lock = threading.RLock()
        self._known: dict[Queue, int] = {}
        """What the host knows to be over."""
        self._events: dict[int, list[Event]] = {}
        """Those that no mark uses, by device."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let no other thread give work meanwhile. In a forked child: raise StoreClosed; the lock may be held there."""
        self.cuda.check()
        with self._lock:
            yield

    def queue(self, device: int, priority: int = 0) -> Queue:
        """Return a new queue of a device."""
        return Queue(self.cuda.stream(device, priority), self.cuda.event(device))

    @contextmanager
    def using(self, queue: Queue, reads: Sequence[Uses] = (), writes: Sequence[Uses] = ()) -> Iterator[None]:
        """Give a queue one operation, in the block, that reads and writes some memory."""
        with self.locked():
            before = [each for uses in reads for each in uses.before_reading()]
            before += [each for uses in writes for each in uses.before_writing()]
            self._follow(queue, before)
            yield
            queue.count += 1
            for uses in reads:
                uses.readers[queue] = queue.count
            for uses in writes:
                uses.writer = (queue, queue.count)
                uses.readers.clear()

    def mark(self, queue: Queue) -> Mark:
        """Return a mark behind all that a queue was given so far."""
        with self.locked():
            device = queue.stream.device
            free = self._events.setdefault(device, [])
            event = free.pop() if free else self.cuda.event(device)
            self.cuda.record(event, queue.stream)
            return Mark(event, {**queue.seen, queue: queue.count})

    def finish(self, mark: Mark) -> None:
        """Return when all work before a mark is over. The mark cannot be used again."""
        self.cuda.check()
        if any(self._known.get(queue, 0) < count for queue, count in mark.known.items()):
            self.cuda.synchronize(mark.event)
        with self.locked():
            _raise_counts(self._known, mark.known)
            self._events[mark.event.device].append(mark.event)

    def finish_uses(self, uses: Uses, *, writes: bool) -> None:
        """Return when the host may read some memory, or write or end it."""
        for queue, count in _covering_first(uses.before_writing() if writes else uses.before_reading()):
            if self._known.get(queue, 0) < count:
                self.finish(self.mark(queue))

    def is_over(self, uses: Uses) -> bool:
        """Tell whether the host knows that all uses are over."""
        return all(self._known.get(queue, 0) >= count for queue, count in uses.before_writing())

    def _follow(self, queue: Queue, before: Iterable[tuple[Queue, int]]) -> None:
        """Let later operations of a queue wait for some of other queues."""
        for other, count in _covering_first(before):
            if other is queue or max(queue.seen.get(other, 0), self._known.get(other, 0)) >= count:
                continue
            if other.recorded < count:
                self.cuda.record(other.event, other.stream)
                other.recorded, other.known = other.count, {**other.seen, other: other.count}
            self.cuda.wait(queue.stream, other.event)
            _raise_counts(queue.seen, other.known)
            queue.seen.pop(queue, None)


def _covering_first(before: Iterable[tuple[Queue, int]]) -> list[tuple[Queue, int]]:
    """Return places in queues, those first that come after most of the others: these are over then, too."""
    places = list(before)
    if len(places) < 2:
        return places
    return sorted(places, key=lambda place: -sum(place[0].seen.get(queue, 0) >= count for queue, count in places))


def _raise_counts(counts: dict[Queue, int], others: dict[Queue, int]) -> None:
    for queue, count in others.items():
        if counts.get(queue, 0) < count:
            counts[queue] = count
