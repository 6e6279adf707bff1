"""Memory of GPUs and page-locked memory of the host.

    Memory     a block of a GPU; it goes back to its pool when nothing refers to it
    GpuPool    blocks of one GPU, used again, up to a limit
    Staging    page-locked memory by which arrays of the host come and go
    PageLocked which other memory of the host is page-locked, such as shared segments

A block that is used again keeps its Uses (`gpu_order`), so its next use waits for the last one, on the GPU. The host
waits only before it gives memory back to CUDA, and before it writes memory itself.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from distrun_runtime.arrays.cuda import CudaError, CudaOutOfMemory, HostMemory, Pointer
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.arrays.gpu_order import Mark, StreamOrdering, StreamQueue, Uses
from distrun_runtime.arrays.shared_memory import LINE, address_of

SMALL = 512
"""Blocks are multiples of it."""
SLOT_BYTES = 4 * 1024 * 1024
SLOTS = 4


@dataclass(eq=False)
class _Block:
    pointer: Pointer
    uses: Uses = field(default_factory=Uses)


class Memory:
    """A block of a GPU's memory, for who refers to it."""

    is_shared = False
    """It is mapped for its own GPU only: no other one can be given access to it."""

    def __init__(self, pool: GpuPool, block: _Block) -> None:
        self.pointer = block.pointer
        self.uses = block.uses
        # No lock can be taken, and no call made, by whichever thread drops the last reference.
        weakref.finalize(self, pool.dropped.append, block).atexit = False


class GpuPool:
    """Blocks of one GPU. Threads: any."""

    def __init__(self, order: StreamOrdering, device: int) -> None:
        self.limit: int | None = None
        """Bytes that the pool takes at most, free blocks included; None: what is there."""
        self.spares: Callable[[], None] = lambda: None
        """Drops arrays that are not in use; called before `take` fails."""
        self.advice = ""
        """What an error of `take` says to do."""
        self.size = 0
        """Bytes of all blocks, those included that are being allocated."""
        self.dropped: deque[_Block] = deque()
        """Blocks that nothing refers to any more, not yet among the free ones."""
        self.before_trim: list[Callable[[], None]] = []
        """Called first by `trim`: each drops memory that is kept only to save work."""
        self._order = order
        self._device = device
        self._free: dict[int, list[_Block]] = {}
        """By size."""
        self._trimming = threading.RLock()
        """While room is made: one thread at a time, which may drop arrays that have others make room."""

    def take(self, nbytes: int) -> Memory:
        """Return a block of at least so many bytes, of undefined content.

        Raises:
            CudaOutOfMemory: neither the limit nor the GPU allows it, after spare arrays were dropped and all free
                blocks given back.
        """
        size = rounded(nbytes)
        found = self._found(size)
        return Memory(self, self._found_in_room(size) if found is None else found)

    def trim(self) -> int:
        """Give all free blocks back to CUDA, when their last use is over; return how many bytes that were."""
        self._order.cuda.check()  # in a forked child the lock may be held
        with self._trimming:
            for drop in self.before_trim:
                drop()
            freed = 0
            while (block := self._any_free()) is not None:
                try:
                    self._order.finish_uses(block.uses)
                    self._order.cuda.free(block.pointer)
                except BaseException:
                    self.dropped.append(block)
                    raise
                freed += block.pointer.nbytes
                with self._order.locked():
                    self.size -= block.pointer.nbytes
            return freed

    def _found_in_room(self, size: int) -> _Block:
        """Make room, and return a block that is free or new then. `_found` has checked that calls can be made."""
        with self._trimming:
            # Another thread may have made room while this one waited.
            found = self._found(size)
            while found is None and self.trim():
                found = self._found(size)
            if found is not None:
                return found
            self.spares()
            self.trim()
            try:
                found = self._found(size, is_last=True)
            except CudaOutOfMemory as err:
                raise err.advising(self.advice) if self.advice else err
            assert found is not None
            return found

    def _found(self, size: int, *, is_last: bool = False) -> _Block | None:
        """Return a free block or a new one; None: there is none, but may be after `trim`."""
        with self._order.locked():
            self._collect()
            free = self._free.get(size)
            if free:
                # One whose last use is over, if there is one: nothing has to wait.
                over = [block for block in free if self._order.is_over(block.uses)]
                block = over[-1] if over else free[-1]
                free.remove(block)
                return block
            if self.limit is not None and self.size + size > self.limit:
                if is_last:
                    text, left = "the memory pool's limit is reached", self.limit - self.size
                    raise CudaOutOfMemory("alloc", self._device, "limit", text, size, left, self.limit)
                return None
            self.size += size
        # Not under the lock: it can take as long as the GPU works.
        try:
            return _Block(self._order.cuda.alloc(self._device, size))
        except BaseException as err:
            with self._order.locked():
                self.size -= size
            if isinstance(err, CudaOutOfMemory) and not is_last:
                return None
            raise

    def _any_free(self) -> _Block | None:
        """Return a free block, which is not among them any more; None: there is none."""
        with self._order.locked():
            self._collect()
            free = next((free for free in self._free.values() if free), None)
            return free.pop() if free else None

    def _collect(self) -> None:
        while self.dropped:
            block = self.dropped.popleft()
            self._free.setdefault(block.pointer.nbytes, []).append(block)


def rounded(nbytes: int) -> int:
    """Return the size of the block that `take` makes: one of eight between a power of two and the next, so that blocks
    fit again."""
    step = max(SMALL, 1 << max(0, max(1, nbytes).bit_length() - 4))
    return -(-max(1, nbytes) // step) * step


# The host's side


@dataclass(eq=False)
class _HostSlot:
    host: HostMemory
    bytes: Array
    uses: Uses = field(default_factory=Uses)
    mark: Mark | None = None
    """Behind the last copy, if it was not waited for."""


_Piece = tuple[int, slice, int]
"""Which of several arrays, which of its bytes, and where they begin in a slot."""


class Staging:
    """Page-locked memory by which arrays of the host come to one GPU and go from it. Threads: any, one after the other.

    It is registered once, by `prepare` or with the first copy. Several slots: while the GPU copies one, the host fills
    the next. Where the system allows no page-locked memory, it is ordinary memory, and each copy holds up its caller.
    """

    def __init__(self, order: StreamOrdering, slot_bytes: int = SLOT_BYTES, slots: int = SLOTS) -> None:
        self._order = order
        self._slot_bytes = slot_bytes
        self._count = slots
        self._slots: deque[_HostSlot] = deque()
        self.is_locked = True
        """Whether it is page-locked; not known before it was to be registered."""
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Have it registered, which takes long."""
        self._order.cuda.check()  # in a forked child the lock may be held
        with self._lock:
            self._register()

    def copy_in(self, pairs: Sequence[tuple[Array, Memory, int]], queue: StreamQueue) -> None:
        """Copy flat bytes, each to a GPU's memory at an offset; when this returns, they may be overwritten."""
        self._order.cuda.check()
        with self._lock:
            for portion in self._portions([len(source) for source, _, _ in pairs]):
                slot = self._oldest_slot()
                self._finish(slot)
                for index, run, place in portion:
                    source, into, begin = pairs[index]
                    size = run.stop - run.start
                    slot.bytes[place : place + size] = source[run]
                    with self._order.using(queue, reads=[slot.uses], writes=[into.uses], blocks=not self.is_locked):
                        target = into.pointer.at(begin + run.start, size)
                        self._order.cuda.copy(target, slot.host.at(place, size), size, queue.stream)
                slot.mark = self._order.mark(queue)

    def copy_out(self, pairs: Sequence[tuple[Memory, int, Array]], queue: StreamQueue) -> None:
        """Copy from a GPU's memory, each from an offset to flat bytes; return when they are there."""
        self._order.cuda.check()
        with self._lock:
            under_way: deque[tuple[_HostSlot, list[_Piece]]] = deque()
            for portion in self._portions([len(out) for _, _, out in pairs]):
                if len(under_way) == self._count:
                    self._arrive(pairs, *under_way.popleft())
                slot = self._oldest_slot()
                for index, run, place in portion:
                    source, begin, _ = pairs[index]
                    size = run.stop - run.start
                    with self._order.using(queue, reads=[source.uses], writes=[slot.uses], blocks=not self.is_locked):
                        origin = source.pointer.at(begin + run.start, size)
                        self._order.cuda.copy(slot.host.at(place, size), origin, size, queue.stream)
                slot.mark = self._order.mark(queue)
                under_way.append((slot, portion))
            while under_way:
                self._arrive(pairs, *under_way.popleft())

    def _portions(self, sizes: Sequence[int]) -> Iterator[list[_Piece]]:
        """Yield what each slot takes of arrays of these bytes: small ones share a slot."""
        portion: list[_Piece] = []
        used = 0
        for index, size in enumerate(sizes):
            begin = 0
            while begin < size:
                if used >= self._slot_bytes:
                    yield portion
                    portion, used = [], 0
                end = min(size, begin + self._slot_bytes - used)
                portion.append((index, slice(begin, end), used))
                used += -(-(end - begin) // LINE) * LINE
                begin = end
        if portion:
            yield portion

    def _arrive(self, pairs: Sequence[tuple[Memory, int, Array]], slot: _HostSlot, portion: Sequence[_Piece]) -> None:
        self._finish(slot)
        for index, run, place in portion:
            pairs[index][2][run] = slot.bytes[place : place + run.stop - run.start]

    def _finish(self, slot: _HostSlot) -> None:
        """Return when no copy from or to a slot is under way."""
        if slot.mark is not None:
            self._order.finish(slot.mark)
            slot.mark = None
        # If a call failed after a copy had been given, there is no mark behind it.
        self._order.finish_uses(slot.uses)

    def _oldest_slot(self) -> _HostSlot:
        """Return the slot that was used longest ago; a copy from it may be under way."""
        self._register()
        slot = self._slots.popleft()
        self._slots.append(slot)
        return slot

    def _register(self) -> None:
        """Make the slots, if there are none."""
        if self._slots:
            return
        memory = mmap.mmap(-1, self._slot_bytes * self._count)
        if hasattr(mmap, "MADV_DONTFORK"):
            memory.madvise(mmap.MADV_DONTFORK)  # a copy-on-write page would not be the one that is locked
        whole = np.frombuffer(memory, np.uint8)
        try:
            self._order.cuda.register(HostMemory(address_of(whole), len(whole)))
        except CudaError as err:
            if err.is_sticky:
                raise
            self.is_locked = False
        runs = (whole[at : at + self._slot_bytes] for at in range(0, len(whole), self._slot_bytes))
        self._slots.extend(_HostSlot(HostMemory(address_of(run), len(run)), run) for run in runs)


@dataclass(eq=False)
class _Locked:
    """Memory of the host that is page-locked, or about to be no more."""

    begin: int
    end: int
    memory: Array
    """Kept: it is not unmapped while it is registered."""
    copies: int = 0
    """Who copies from or to it now."""
    is_ending: bool = False

    @property
    def host(self) -> HostMemory:
        return HostMemory(self.begin, self.end - self.begin)


class PageLocked:
    """Which memory of the host is page-locked, beside staging. Threads: any.

    Copies from and to it are made directly. It is kept as long as it is page-locked.
    """

    def __init__(self, order: StreamOrdering) -> None:
        self._order = order
        self._locking = threading.Lock()
        """While memory is registered: that takes long."""
        self._lock = threading.Lock()
        self._places: list[_Locked] = []
        """Ascending."""
        self._ending: set[_Locked] = set()
        """They are not among the places any more, and still registered."""
        self.why_not = ""
        """Why the last memory that is not page-locked is not."""

    def lock(self, memory: Array, *, is_readonly: bool = False) -> bool:
        """Page-lock whole memory; False: that is not allowed, see `why_not`, and copies go by staging.

        Arguments:
            is_readonly: it is mapped so that it cannot be written, neither by this process nor by a GPU.
        """
        with self._locking:
            if self.covers(memory):
                return True
            begin = address_of(memory)
            made = _Locked(begin, begin + memory.nbytes, memory)
            try:
                self._order.cuda.register(made.host, is_readonly=is_readonly)
            except CudaError as err:
                if err.is_sticky:
                    raise
                self.why_not = str(err)
                return False
            with self._lock:
                self._places = sorted([*self._places, made], key=lambda place: place.begin)
        return True

    def unlock(self, memory: Array) -> None:
        """Copies go by staging from now on; the memory is page-locked and kept until those under way are over."""
        begin = address_of(memory)
        with self._lock:
            found = [place for place in self._places if place.begin == begin]
            self._places = [place for place in self._places if place.begin != begin]
            self._ending.update(found)
            for place in found:
                place.is_ending = True
            idle = [place for place in found if not place.copies]
        self._end(idle)

    def covers(self, memory: Array) -> bool:
        """Tell whether all of some contiguous memory is page-locked, by one `lock`."""
        return self._place_of(memory) is not None

    def copies(self, queue: StreamQueue) -> Copies:
        """Return what makes copies of a queue, in a `with` block."""
        return Copies(self, self._order, queue)

    def take(self, memory: Array) -> _Locked | None:
        """Return the place of some contiguous memory, which stays page-locked until it is released."""
        with self._lock:
            place = self._place_of(memory)
            if place is not None:
                place.copies += 1
            return place

    def release(self, places: Sequence[_Locked]) -> None:
        """Copies are over, for which the places were taken."""
        with self._lock:
            for place in places:
                place.copies -= 1
            over = [place for place in dict.fromkeys(places) if place.is_ending and not place.copies]
        self._end(over)

    def _end(self, places: Sequence[_Locked]) -> None:
        """Unregister all of them; raise the first error. The memory of one that cannot be unregistered is kept."""
        errors: list[CudaError] = []
        for place in places:
            try:
                self._order.cuda.unregister(place.host)
                self._ending.discard(place)
            except CudaError as err:
                errors.append(err)
        if errors:
            raise errors[0]

    def _place_of(self, memory: Array) -> _Locked | None:
        address = address_of(memory)
        places = self._places
        index = bisect_right(places, address, key=lambda place: place.begin) - 1
        if index < 0 or not memory.nbytes or address + memory.nbytes > places[index].end:
            return None
        return places[index]


class Copies:
    """Copies of one queue between a GPU and page-locked memory: when the `with` block ends, they are over.

    Memory that `takes` names stays page-locked meanwhile. If the wait fails, it stays so for ever.
    """

    def __init__(self, locked: PageLocked, order: StreamOrdering, queue: StreamQueue) -> None:
        self._locked = locked
        self._order = order
        self._queue = queue
        self._taken: list[_Locked] = []

    def takes(self, memory: Array) -> bool:
        """Tell whether some flat bytes are page-locked: then they are copied directly."""
        place = self._locked.take(memory)
        if place is not None:
            self._taken.append(place)
        return place is not None

    def __enter__(self) -> Copies:
        self._order.cuda.check()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._taken:
            return
        # After an error, too: the copies before it are under way.
        self._order.finish(self._order.mark(self._queue))
        self._locked.release(self._taken)
