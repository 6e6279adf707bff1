"""Orders the work of several CUDA streams on memory that they share: each operation waits for what it depends on.

    StreamQueue     a stream, and how many operations it was given
    Uses            who wrote some memory last, and who has read it since
    StreamOrdering  makes streams and the host wait for each other

A stream of the program's own, in which it fills an array that it gives us, is a queue as well: what the program has
given it is not known, so all of that counts as one operation each time (`StreamOrdering.note_program_use`).

An operation says which memory it reads and which it writes (`StreamOrdering.using`). If another queue used it in a way
that does not fit, the queue waits for that other queue, by an event, before the operation. What a queue or the host
knows to be over is counted, so nothing waits for the same work twice, or for work that the other side had waited for
already.

Memory that is used again keeps its Uses, so its next user waits for the last one.

Every wait of the host has a deadline. CUDA's have none, so a thread of our own sleeps in CUDA's wait, and other
threads wait for that thread. There is one for each queue that was waited for: marks of one queue are passed in their
order, and a copy that is over is not found late because a long kernel of another queue is waited for as well.
Other calls of CUDA may wait inside the driver, too, such as `alloc`: they have no limit.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from queue import SimpleQueue

from distrun_runtime.arrays.cuda import Cuda, CudaTimedOut, Event, Stream

ASKS = 16
"""How often a wait asks whether it is over, about 3 us each, before a sleeper is given it: that takes as long."""


@dataclass(eq=False)
class StreamQueue:
    """A stream of a device. Only `StreamOrdering` changes it."""

    stream: Stream
    event: Event
    """For other queues to wait for: a wait holds for the event as it was recorded then, so one is enough."""
    is_ours: bool = True
    """Else it is a stream of the program's own."""
    count: int = 0
    """Operations that it was given."""
    seen: dict[StreamQueue, int] = field(default_factory=dict)
    """How many operations of other queues are over before its next one begins."""
    recorded: int = 0
    """How many of its operations come before the event."""
    known: dict[StreamQueue, int] = field(default_factory=dict)
    """What is over once the event is."""
    what: str = "work"
    """What the operations are, for errors: `copies out`."""
    sleeper: _Sleeper | None = None
    """Who waits for its marks, once one was waited for."""


@dataclass(eq=False)
class Uses:
    """The last uses of some memory: queues, and each one's count after the operation."""

    writer: tuple[StreamQueue, int] | None = None
    readers: dict[StreamQueue, int] = field(default_factory=dict)

    def before_reading(self) -> Iterator[tuple[StreamQueue, int]]:
        """Yield what has to be over before the memory is read."""
        if self.writer is not None:
            yield self.writer

    def before_writing(self) -> Iterator[tuple[StreamQueue, int]]:
        """Yield what has to be over before the memory is written."""
        yield from self.readers.items()
        yield from self.before_reading()


@dataclass(eq=False)
class Mark:
    """A place in a queue's work that the host can wait for, once."""

    queue: StreamQueue
    event: Event
    known: dict[StreamQueue, int]
    """What is over once the event is."""


class StreamOrdering:
    """Orders the work of all queues of a process. Threads: any.

    No thread waits for a GPU, allocates or frees while it holds the lock, so others can give work meanwhile.

    Arguments:
        wait_s: seconds that the host waits for a GPU at most. After that the GPU counts as lost, as after a sticky
            error: what it still does may write into memory of the host, so nothing is used or freed any more.
    """

    def __init__(self, cuda: Cuda, *, wait_s: float) -> None:
        self.cuda = cuda
        self.wait_s = wait_s
        self._locked = OrderLock(cuda)
        self._known: dict[StreamQueue, int] = {}
        """What the host knows to be over."""
        self._events: dict[int, list[Event]] = {}
        """Those that no mark uses, by device."""

    def locked(self) -> AbstractContextManager[None]:
        """Let no other thread give work meanwhile. In a forked child: raise StoreClosed; the lock may be held there."""
        return self._locked

    def queue(self, device: int, what: str = "work") -> StreamQueue:
        """Return a new queue of a device.

        Arguments:
            what: its operations, for errors: `copies out`.
        """
        return StreamQueue(self.cuda.stream(device), self.cuda.event(device), what=what)

    def note_program_use(self, queue: StreamQueue, uses: Iterable[Uses], *, reads: bool = False) -> None:
        """Let the last use of some memory be all that the program has given a stream of its own so far.

        Call it in the program's thread, if the stream is the per-thread default one.

        Arguments:
            reads: the memory was lent before, and the program has only read it since.
        """
        with self.locked():
            self._note_program(queue)
            for each in uses:
                if reads:
                    each.readers[queue] = queue.count
                else:
                    each.writer = (queue, queue.count)

    def using(
        self, queue: StreamQueue, reads: Sequence[Uses] = (), writes: Sequence[Uses] = (), *, blocks: bool = False
    ) -> AbstractContextManager[None]:
        """Give a queue one operation, in the block, that reads and writes some memory.

        Arguments:
            blocks: the call that gives it may return only when it is over: other threads give work meanwhile. None of
                it may use memory that this one writes, or write what this one reads.
        """
        return _Operation(self, queue, reads, writes, blocks)

    def mark(self, queue: StreamQueue) -> Mark:
        """Return a mark behind all that a queue was given so far."""
        with self.locked():
            return self._marked(queue)

    def marks(self, uses: Iterable[Uses]) -> list[Mark]:
        """Return marks behind all uses of some memory by queues of ours that the host does not know to be over."""
        with self.locked():
            found: list[Mark] = []
            covered = dict(self._known)
            for queue, count in _covering_first(place for each in uses for place in each.before_writing()):
                if queue.is_ours and covered.get(queue, 0) < count:
                    found.append(self._marked(queue))
                    _raise_counts(covered, found[-1].known)
            return found

    def is_past(self, mark: Mark) -> bool:
        """Tell whether all work before a mark is over, and do not wait; if it is, the mark cannot be used again.

        Call it while no other thread gives work (`locked`).
        """
        if self._is_unknown(mark) and not self.cuda.query(mark.event):
            return False
        self._pass(mark)
        return True

    def finish(self, mark: Mark) -> None:
        """Return when all work before a mark is over. The mark cannot be used again.

        Raises:
            CudaTimedOut: it was not in time.
        """
        self.cuda.check()
        if self._is_unknown(mark):
            self._sleep_until(mark)
        with self.locked():
            self._pass(mark)

    def _sleep_until(self, mark: Mark) -> None:
        if any(self.cuda.query(mark.event) for _ in range(ASKS)):
            return
        queue = mark.queue
        with self.locked():
            if queue.sleeper is None:
                queue.sleeper = _Sleeper(self.cuda, f"distrun-gpu:{queue.stream.device}-{queue.what}")
        try:
            queue.sleeper.asked(mark.event).result(self.wait_s)
        except TimeoutError:
            error = CudaTimedOut(queue.stream.device, queue.what, self.wait_s)
            self.cuda.give_up(error)
            raise error from None

    def finish_uses(self, uses: Uses) -> None:
        """Return when the host may write some memory, or end it."""
        for queue, count in _covering_first(uses.before_writing()):
            if self._known.get(queue, 0) < count:
                self.finish(self.mark(queue))

    def is_over(self, uses: Uses) -> bool:
        """Tell whether the host knows that all uses by queues of ours are over."""
        return all(self._known.get(queue, 0) >= count for queue, count in uses.before_writing() if queue.is_ours)

    def follow(self, queue: StreamQueue, before: Iterable[tuple[StreamQueue, int]]) -> None:
        """Let later operations of a queue wait for some of other queues."""
        for other, count in _covering_first([place for place in before if place[0] is not queue]):
            if max(queue.seen.get(other, 0), self._known.get(other, 0)) >= count:
                continue
            if other.recorded < count:
                self._record(other)
            self._wait(queue, other.event, other.known)

    def begin_after(self, pairs: Iterable[tuple[StreamQueue, StreamQueue]]) -> None:
        """Let later operations of each queue wait for all that the program has given a stream of its own so far.

        Call it in the program's thread, if a stream is the per-thread default one.
        """
        with self.locked():
            for queue, program in pairs:
                self._note_program(program)
                self._wait(queue, program.event, program.known)

    def end_before(self, pairs: Iterable[tuple[StreamQueue, StreamQueue]]) -> list[Mark]:
        """Let what the program gives its streams later wait for all that queues were given; return marks behind it."""
        with self.locked():
            marks = []
            for queue, program in pairs:
                marks.append(mark := self._marked(queue))
                self._wait(program, mark.event, mark.known)
            return marks

    def _note_program(self, queue: StreamQueue) -> None:
        """Count all that the program has given a stream of its own by now as one operation, and record its event."""
        # The handle may be that of another stream by now, which has not waited for anything.
        queue.seen.clear()
        queue.count += 1
        self._record(queue)

    def _wait(self, queue: StreamQueue, event: Event, known: dict[StreamQueue, int]) -> None:
        """Let later operations of a queue wait for an event, after which all that is `known` is over."""
        self.cuda.wait(queue.stream, event)
        _raise_counts(queue.seen, known)
        queue.seen.pop(queue, None)

    def _marked(self, queue: StreamQueue) -> Mark:
        device = queue.stream.device
        free = self._events.setdefault(device, [])
        event = free.pop() if free else self.cuda.event(device)
        self.cuda.record(event, queue.stream)
        return Mark(queue, event, {**queue.seen, queue: queue.count})

    def _record(self, queue: StreamQueue) -> None:
        self.cuda.record(queue.event, queue.stream)
        queue.recorded, queue.known = queue.count, {**queue.seen, queue: queue.count}

    def _is_unknown(self, mark: Mark) -> bool:
        return any(self._known.get(queue, 0) < count for queue, count in mark.known.items())

    def _pass(self, mark: Mark) -> None:
        """Take note that the host knows the work before a mark to be over."""
        _raise_counts(self._known, mark.known)
        self._events[mark.event.device].append(mark.event)


class _Sleeper:
    """A thread that waits for events, in their order, however long that takes. It ends when nothing refers to this."""

    def __init__(self, cuda: Cuda, name: str) -> None:
        self._asked: SimpleQueue[tuple[Event, Future[None]] | None] = SimpleQueue()
        threading.Thread(target=_sleep, args=(cuda, self._asked), name=name, daemon=True).start()
        weakref.finalize(self, self._asked.put, None).atexit = False

    def asked(self, event: Event) -> Future[None]:
        """Return what is done when the event has completed, and has the error if that cannot be waited for."""
        future: Future[None] = Future()
        self._asked.put((event, future))
        return future


def _sleep(cuda: Cuda, asked: SimpleQueue[tuple[Event, Future[None]] | None]) -> None:
    while (found := asked.get()) is not None:
        try:
            cuda.synchronize(found[0])
        except BaseException as err:  # whatever it is: a thread waits for it
            found[1].set_exception(err)
        else:
            found[1].set_result(None)
        del found  # nothing is kept until the next one comes


class OrderLock:
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

    __slots__ = ("_blocks", "_order", "_queue", "_reads", "_writes")

    def __init__(
        self, order: StreamOrdering, queue: StreamQueue, reads: Sequence[Uses], writes: Sequence[Uses], blocks: bool
    ) -> None:
        self._order = order
        self._queue = queue
        self._reads = reads
        self._writes = writes
        self._blocks = blocks

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
        if self._blocks:
            locked.__exit__(None, None, None)

    def __exit__(self, *_: object) -> None:
        if self._blocks:
            self._order.locked().__enter__()
        # Counted when it has been given, not before: a mark that counts it comes behind it.
        # Also if a call has failed: those before it have given work.
        queue = self._queue
        queue.count += 1
        for uses in self._reads:
            uses.readers[queue] = queue.count
        for uses in self._writes:
            uses.writer = (queue, queue.count)
            uses.readers.clear()
        self._order.locked().__exit__(None, None, None)


def _covering_first(before: Iterable[tuple[StreamQueue, int]]) -> list[tuple[StreamQueue, int]]:
    """Return places in queues, those first that come after most of the others: these are over then, too."""
    last: dict[StreamQueue, int] = {}
    for queue, count in before:  # of many arrays, mostly in few queues
        last[queue] = max(count, last.get(queue, 0))
    places = list(last.items())
    if len(places) < 2:
        return places
    return sorted(places, key=lambda place: -sum(place[0].seen.get(queue, 0) >= count for queue, count in places))


def _raise_counts(counts: dict[StreamQueue, int], others: dict[StreamQueue, int]) -> None:
    for queue, count in others.items():
        if counts.get(queue, 0) < count:
            counts[queue] = count
