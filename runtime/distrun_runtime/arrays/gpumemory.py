"""Memory of GPUs and page-locked memory of the host.

    Memory     a block of a GPU; it goes back to its pool when nothing refers to it
    Pool       blocks of one GPU, used again, up to a limit
    Staging    page-locked memory by which arrays of the host come and go
    PageLocked which other memory of the host is page-locked, such as shared segments

A block that is used again keeps its Uses (`queues`), so its next use waits for the last one, on the GPU. The host waits
only before it gives memory back to CUDA, and before it writes memory itself.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from distrun_runtime.arrays.cuda import CudaError, CudaOutOfMemory, Host, Pointer
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.arrays.queues import Mark, Order, Queue, Uses
from distrun_runtime.arrays.segments import address_of

__all__ = ["Memory", "PageLocked", "Pool", "Staging"]

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

    def __init__(self, pool: Pool, block: _Block) -> None:
        self.pointer = block.pointer
        self.uses = block.uses
        # No lock can be taken, and no call made, by whichever thread drops the last reference.
        weakref.finalize(self, pool.dropped.append, block).atexit = False


class Pool:
    """Blocks of one GPU. Threads: any.

    Arguments:
        limit: bytes that the pool takes at most, free blocks included; None: what is there.
    """

    def __init__(self, order: Order, device: int, limit: int | None = None) -> None:
        self.limit = limit
        self.spares: Callable[[], None] = lambda: None
        """Drops arrays that are not in use; called before `take` fails."""
        self.advice = ""
        """What an error of `take` says to do."""
        self.size = 0
        """Bytes of all blocks."""
        self.dropped: deque[_Block] = deque()
        """Blocks that nothing refers to any more, not yet among the free ones."""
        self._order = order
        self._device = device
        self._free: dict[int, list[_Block]] = {}
        """By size."""

    def take(self, nbytes: int) -> Memory:
        """Return a block of at least so many bytes, of undefined content.

        Raises:
            CudaOutOfMemory: neither the limit nor the GPU allows it, after spare arrays were dropped and all free
                blocks given back.
        """
        size = _rounded(nbytes)
        found = self._found(size, is_last=False)
        if found is None:
            self.trim()
            found = self._found(size, is_last=False)
        if found is None:
            self.spares()
            self.trim()
            try:
                found = self._found(size, is_last=True)
            except CudaOutOfMemory as err:
                raise err.advising(self.advice) if self.advice else err
        assert found is not None
        return Memory(self, found)

    def trim(self) -> int:
        """Give all free blocks back to CUDA, when their last use is over; return how many bytes that were."""
        freed = 0
        while True:
            with self._order.locked():
                self._collect()
                free = next((free for free in self._free.values() if free), None)
                if free is None:
                    return freed
                block = free.pop()
            try:
                self._order.finish_uses(block.uses, writes=True)
                self._order.cuda.free(block.pointer)
            except BaseException:
                self.dropped.append(block)
                raise
            freed += block.pointer.nbytes
            with self._order.locked():
                self.size -= block.pointer.nbytes

    def _found(self, size: int, *, is_last: bool) -> _Block | None:
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
                    raise self._beyond(size, self.limit)
                return None
            try:
                pointer = self._order.cuda.alloc(self._device, size)
            except CudaOutOfMemory:
                if is_last:
                    raise
                return None
            self.size += size
            return _Block(pointer)

    def _collect(self) -> None:
        while self.dropped:
            block = self.dropped.popleft()
            self._free.setdefault(block.pointer.nbytes, []).append(block)

    def _beyond(self, size: int, limit: int) -> CudaError:
        text = "the memory pool's limit is reached"
        return CudaOutOfMemory("alloc", self._device, "limit", text, size, limit - self.size, limit)


def _rounded(nbytes: int) -> int:
    """Return the size of a block: one of eight between a power of two and the next, so that blocks fit again."""
    step = max(SMALL, 1 << max(0, max(1, nbytes).bit_length() - 4))
    return -(-max(1, nbytes) // step) * step


# The host's side


@dataclass(eq=False)
class _Slot:
    host: Host
    bytes: Array
    uses: Uses = field(default_factory=Uses)
    mark: Mark | None = None
    """Behind the last copy, if it was not waited for."""


class Staging:
    """Page-locked memory by which arrays of the host come to one GPU and go from it. Threads: any, one after the other.

    It is registered once, with the first copy. Several slots: while the GPU copies one, the host fills the next. Where
    the system allows no page-locked memory, it is ordinary memory, and each copy holds up its caller.
    """

    def __init__(self, order: Order, slot_bytes: int = SLOT_BYTES, slots: int = SLOTS) -> None:
        self._order = order
        self._slot_bytes = slot_bytes
        self._count = slots
        self._slots: deque[_Slot] = deque()
        self.is_locked = True
        """Whether it is page-locked; not known before the first copy."""
        self._lock = threading.Lock()

    def copy_in(self, source: Array, into: Memory, begin: int, queue: Queue) -> None:
        """Copy flat bytes to a place in a GPU's memory; when this returns, they may be overwritten."""
        self._order.cuda.check()
        with self._lock:
            for at in range(0, len(source), self._slot_bytes):
                run = source[at : at + self._slot_bytes]
                slot = self._oldest_slot()
                self._finish(slot)
                slot.bytes[: len(run)] = run
                with self._order.using(queue, reads=[slot.uses], writes=[into.uses]):
                    place = into.pointer.at(begin + at, len(run))
                    self._order.cuda.copy(place, slot.host, len(run), queue.stream)
                slot.mark = self._order.mark(queue)

    def copy_out(self, source: Memory, begin: int, out: Array, queue: Queue) -> None:
        """Copy from a place in a GPU's memory to flat bytes; return when they are there."""
        self._order.cuda.check()
        with self._lock:
            under_way: deque[tuple[_Slot, Array]] = deque()
            for at in range(0, len(out), self._slot_bytes):
                if len(under_way) == self._count:
                    self._arrive(*under_way.popleft())
                run = out[at : at + self._slot_bytes]
                slot = self._oldest_slot()
                with self._order.using(queue, reads=[source.uses], writes=[slot.uses]):
                    place = source.pointer.at(begin + at, len(run))
                    self._order.cuda.copy(slot.host, place, len(run), queue.stream)
                slot.mark = self._order.mark(queue)
                under_way.append((slot, run))
            while under_way:
                self._arrive(*under_way.popleft())

    def _arrive(self, slot: _Slot, out: Array) -> None:
        self._finish(slot)
        out[...] = slot.bytes[: len(out)]

    def _finish(self, slot: _Slot) -> None:
        """Return when no copy from or to a slot is under way."""
        if slot.mark is not None:
            self._order.finish(slot.mark)
            slot.mark = None
        # If a call failed after a copy had been given, there is no mark behind it.
        self._order.finish_uses(slot.uses, writes=True)

    def _oldest_slot(self) -> _Slot:
        """Return the slot that was used longest ago; a copy from it may be under way."""
        if not self._slots:
            self._slots = self._registered()
        slot = self._slots.popleft()
        self._slots.append(slot)
        return slot

    def _registered(self) -> deque[_Slot]:
        memory = mmap.mmap(-1, self._slot_bytes * self._count)
        if hasattr(mmap, "MADV_DONTFORK"):
            memory.madvise(mmap.MADV_DONTFORK)  # a copy-on-write page would not be the one that is locked
        whole = np.frombuffer(memory, np.uint8)
        try:
            self._order.cuda.register(Host(address_of(whole), len(whole)))
        except CudaError as err:
            if err.is_sticky:
                raise
            self.is_locked = False
        runs = (whole[at : at + self._slot_bytes] for at in range(0, len(whole), self._slot_bytes))
        return deque(_Slot(Host(address_of(run), len(run)), run) for run in runs)


class PageLocked:
    """Which memory of the host is page-locked, beside staging. Threads: any.

    Copies from and to it are made directly. It stays page-locked as long as the process lives, and is kept so long.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._lock = threading.Lock()
        self._places: list[tuple[int, int]] = []
        """Begin and end, ascending."""
        self._kept: list[object] = []

    def lock(self, memory: Array) -> bool:
        """Page-lock whole memory; False: the system does not allow it (`ulimit -l`), and copies go by staging."""
        place = (address_of(memory), address_of(memory) + memory.nbytes)
        with self._lock:
            if place in self._places:
                return True
            try:
                self._order.cuda.register(Host(place[0], memory.nbytes))
            except CudaError as err:
                if err.is_sticky:
                    raise
                return False
            self._places = sorted([*self._places, place])
            self._kept.append(memory)
        return True

    def covers(self, memory: Array) -> bool:
        """Tell whether all of some contiguous memory is page-locked, by one `lock`."""
        address = address_of(memory)
        places = self._places
        index = bisect_right(places, (address, 1 << 64)) - 1
        return index >= 0 and memory.nbytes > 0 and address + memory.nbytes <= places[index][1]
