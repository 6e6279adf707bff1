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
from contextlib import AbstractContextManager
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

    No thread waits for a GPU while it holds the lock, so others can give work meanwhile. A wait for a GPU has no time
    limit, for CUDA has none; a GPU that does not answer is ended by its driver, and the wait raises CudaError.
    """

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self._locked = _Locked(cuda)
        self._known: dict[Queue, int] = {}
        """What the host knows to be over."""
        self._events: dict[int, list[Event]] = {}
        """Those that no mark uses, by device."""

    def locked(self) -> AbstractContextManager[None]:
        """Let no other thread give work meanwhile. In a forked child: raise StoreClosed; the lock may be held there."""
        return self._locked

    def queue(self, device: int, priority: int = 0) -> Queue:
        """Return a new queue of a device."""
        return Queue(self.cuda.stream(device, priority), self.cuda.event(device))

    def using(
        self, queue: Queue, reads: Sequence[Uses] = (), writes: Sequence[Uses] = ()
    ) -> AbstractContextManager[None]:
        """Give a queue one operation, in the block, that reads and writes some memory."""
        return _Operation(self, queue, reads, writes)

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

    def follow(self, queue: Queue, before: Iterable[tuple[Queue, int]]) -> None:
        """Let later operations of a queue wait for some of other queues."""
        for other, count in _covering_first([place for place in before if place[0] is not queue]):
            if max(queue.seen.get(other, 0), self._known.get(other, 0)) >= count:
                continue
            if other.recorded < count:
                self.cuda.record(other.event, other.stream)
                other.recorded, other.known = other.count, {**other.seen, other: other.count}
            self.cuda.wait(queue.stream, other.event)
            _raise_counts(queue.seen, other.known)
            queue.seen.pop(queue, None)


class _Locked:
    """The lock of an Order."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._cuda.check()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class _Operation:
    """One operation of a queue, while it is given."""

    __slots__ = ("_order", "_queue", "_reads", "_writes")

    def __init__(self, order: Order, queue: Queue, reads: Sequence[Uses], writes: Sequence[Uses]) -> None:
        self._order = order
        self._queue = queue
        self._reads = reads
        self._writes = writes

    def __enter__(self) -> None:
        locked = self._order.locked()
        locked.__enter__()
        try:
            before = [each for uses in self._reads for each in uses.before_reading()]
            before += [each for uses in self._writes for each in uses.before_writing()]
            self._order.follow(self._queue, before)
        except BaseException:
            locked.__exit__(None, None, None)
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        queue = self._queue
        if kind is None:
            queue.count += 1
            for uses in self._reads:
                uses.readers[queue] = queue.count
            for uses in self._writes:
                uses.writer = (queue, queue.count)
                uses.readers.clear()
        self._order.locked().__exit__(None, None, None)


def _covering_first(before: Iterable[tuple[Queue, int]]) -> list[tuple[Queue, int]]:
    """Return the last place in each queue, those first that come after most of the others: these are over then, too."""
    last: dict[Queue, int] = {}
    for queue, count in before:
        if last.get(queue, 0) < count:
            last[queue] = count
    places = list(last.items())
    if len(places) < 2:
        return places
    return sorted(places, key=lambda place: -sum(place[0].seen.get(queue, 0) >= count for queue, count in places))


def _raise_counts(counts: dict[Queue, int], others: dict[Queue, int]) -> None:
    for queue, count in others.items():
        if counts.get(queue, 0) < count:
            counts[queue] = count
