"""The GPUs of this process, each made once, and arrays of other libraries on them, as arrays of ours for one call.

    array = borrowing.value(x)            or `output`: a GpuArray in the memory of x, in the thread that calls the store
    loan = borrowing.borrow([array])      our work on it comes after what the program has queued so far
    ... copies and kernels on our streams ...
    loan.end()                            the program's later work comes after ours

What the program has queued is on streams of its own: those that its libraries say are current. Each is a queue to
`StreamOrdering`, so our streams wait for it as for each other, and it for ours. The host waits only where a library
does not tell its stream. A reference to x is kept until our work on its memory is over.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from distrun_runtime.arrays import foreign
from distrun_runtime.arrays.cuda import Cuda, Pointer, Stream, never_freed
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.arrays.foreign import DeviceView, StreamOf, current_stream
from distrun_runtime.arrays.gpu import GpuArray, GpuDevice
from distrun_runtime.arrays.gpu_memory import Memory, PageLocked
from distrun_runtime.arrays.gpu_order import Mark, StreamOrdering, StreamQueue, Uses
from distrun_runtime.arrays.shared_memory import Blocks
from distrun_runtime.errors import KVError


class Gpus:
    """The devices of a process: each is made once. Threads: any.

    Arguments:
        wait_s: seconds that the host waits for a GPU at most.
        has_peers: copy directly between GPUs that allow it.
        blocks: shared memory that is page-locked once a device is used; None: none is.
    """

    def __init__(self, cuda: Cuda, *, wait_s: float, has_peers: bool = True, blocks: Blocks | None = None) -> None:
        self._blocks = blocks
        self._has_peers = has_peers
        self.order = StreamOrdering(cuda, wait_s=wait_s)
        self.locked = PageLocked(self.order)
        self.borrowing = Borrowing(self.order, self.get)
        """Arrays of other libraries on these devices."""
        self._devices: dict[str, GpuDevice] = {}
        self._lock = threading.Lock()

    def made(self) -> list[GpuDevice]:
        """Return the devices that were asked for so far."""
        with self._lock:
            return list(self._devices.values())

    def get(self, physical: int, part: int | None = None) -> GpuDevice:
        """Return `gpu:N`, or `gpu:N/M` for a part.

        Raises:
            KVError: CUDA sees no such GPU.
        """
        name = f"gpu:{physical}" if part is None else f"gpu:{physical}/{part}"
        self.order.cuda.check()
        with self._lock:
            is_first = not self._devices
            if name not in self._devices:
                count = self.order.cuda.count()
                if not 0 <= physical < count:
                    seen = ("none", "only gpu:0")[count] if count < 2 else f"gpu:0 to gpu:{count - 1}"
                    raise KVError(
                        f"no device gpu:{physical}: this process sees {seen} (CUDA_VISIBLE_DEVICES may hide others)"
                    )
                self._devices[name] = GpuDevice(self.order, physical, name, self.locked, has_peers=self._has_peers)
            device = self._devices[name]
        if is_first and self._blocks is not None:
            self._blocks.watch(self.locked)  # Page-locks what is there, which takes long.
        return device


@dataclass(eq=False)
class KeptOwner:
    """What has to be known of borrowed memory when nothing of ours refers to it any more."""

    owner: object
    uses: Uses


class Keeper:
    """Keeps the owners of borrowed memory until our work on it is over. It never waits. Threads: any."""

    def __init__(self, order: StreamOrdering) -> None:
        self.dropped: deque[int] = deque()
        """Numbers of what nothing of ours refers to any more."""
        self._order = order
        self._numbers = itertools.count()
        self._kept: dict[int, KeptOwner] = {}
        # A forked child has a copy: what it would free may call CUDA. In this process it is emptied by `collect`.
        never_freed(self._kept)
        self._marked: list[tuple[list[Mark], list[int]]] = []
        """Marks behind our work on memory that was dropped."""

    def keep(self, kept: KeptOwner) -> int:
        """Keep an owner at least until the number that is returned is `dropped`."""
        number = next(self._numbers)
        self._kept[number] = kept
        return number

    def keep_until(self, marks: list[Mark], owner: object) -> None:
        """Keep an owner until all work before some marks is over."""
        with self._order.locked():
            self._marked.append((marks, [self.keep(KeptOwner(owner, Uses()))]))

    def collect(self) -> int:
        """Let go of what is not needed any more; return how many owners are left.

        Raises:
            CudaError: an event cannot be asked; the owners are kept.
            StoreClosed: in a forked child.
        """
        # What is let go is freed when the lock is not held: a destructor may come back here.
        with self._order.locked():
            over: list[int] = []
            fresh: list[int] = []
            while self.dropped:
                number = self.dropped.popleft()
                (over if self._order.is_over(self._kept[number].uses) else fresh).append(number)
            if fresh:
                self._marked.append((self._order.marks(self._kept[number].uses for number in fresh), fresh))
            for marks, numbers in self._marked:
                over += numbers if self._is_past(marks) else []
            self._marked = [batch for batch in self._marked if batch[0]]
            freed = [self._kept.pop(number) for number in over]
            left = len(self._kept)
        del freed
        return left

    def _is_past(self, marks: list[Mark]) -> bool:
        while marks and self._order.is_past(marks[-1]):
            del marks[-1]
        return not marks


class KeptMemory(Memory):
    """Memory that is not ours. Its owner is kept until our work on it is over, when nothing of ours refers to it."""

    def __init__(self, pointer: Pointer, owner: object, keeper: Keeper) -> None:
        self._dropped = keeper.dropped
        self.pointer = pointer
        self.uses = Uses()
        self._kept = KeptOwner(owner, self.uses)
        self._number = keeper.keep(self._kept)

    def __del__(self) -> None:
        # No lock can be taken, and no call made, by whichever thread drops the last reference.
        self._dropped.append(self._number)


class Borrowed(KeptMemory):
    """Memory of another library's array, for one call."""

    def __init__(self, view: DeviceView, keeper: Keeper) -> None:
        super().__init__(Pointer(view.address, view.device, view.nbytes), view.owner, keeper)
        self.library = view.library
        self.stream = view.stream
        """Handle of the stream that the program works on; None: it is not told."""
        self.is_awaited = view.stream is None and not view.is_immutable
        """Nothing but the host can tell the program that the memory is free again."""

    def share(self, uses: Uses) -> None:
        """Have the same uses as other memory."""
        self.uses = self._kept.uses = uses


class Borrowing:
    """Makes arrays of ours from those of other libraries. Threads: any.

    Arguments:
        device: gives the device of a GPU's number.
    """

    def __init__(self, order: StreamOrdering, device: Callable[[int], GpuDevice]) -> None:
        self.keeper = Keeper(order)
        self.order = order
        self._device = cache(device)
        self._callers: dict[tuple[int, int, int], StreamQueue] = {}
        """The program's streams, by device, handle and, of a thread's own, thread."""
        self._arrivals: dict[int, StreamQueue] = {}

    def value(self, value: object, stream_of: StreamOf = current_stream) -> GpuArray:
        """Return an array in GPU memory, to be read.

        Arguments:
            stream_of: as for `foreign.device_array`; of a call with several arrays one that asks once.

        Raises:
            KVError: it cannot be read; says what to do.
        """
        asked: list[StreamQueue] = []

        def ours(device: int) -> Stream:
            asked.append(self.arrivals(device))
            return asked[-1].stream

        array = self._array(foreign.device_array(value, self.order.cuda, ours, stream_of))
        # By DLPack the library has let that stream wait for its own work: so it counts as the work of that stream.
        for queue in asked:
            with self.order.using(queue, writes=[array.memory.uses]):
                pass
        return array

    def output(self, value: object, stream_of: StreamOf = current_stream) -> GpuArray:
        """Return an array in GPU memory, to be written.

        Arguments:
            stream_of: as for `value`.

        Raises:
            KVError: it cannot be written; says what to do.
        """
        return self._array(foreign.device_output(value, self.order.cuda, stream_of))

    def borrow(self, arrays: Iterable[GpuArray]) -> Loan:
        """Begin to use arrays that `value` and `output` have made in this thread, for one call."""
        loan = Loan(self)
        loan.add(arrays)
        return loan

    def host(self, array: GpuArray) -> Array:
        """Return a copy, in the host's memory, of an array that `value` has made in this thread."""
        loan = self.borrow([array])
        try:
            return array.device.host(array)
        finally:
            loan.end()

    def arrivals(self, device: int) -> StreamQueue:
        """Return a queue of ours that only waits: for libraries, and for all uses of memory that is shared."""
        with self.order.locked():
            if device not in self._arrivals:
                self._arrivals[device] = self.order.queue(device, "waits for other libraries")
            return self._arrivals[device]

    def caller(self, device: int, handle: int) -> StreamQueue:
        """Return the queue of a stream of the program's; the per-thread default stream is that of this thread."""
        place = (device, handle, threading.get_ident() if handle == foreign.PER_THREAD else 0)
        found = self._callers.get(place)
        if found is None:
            # A plain Stream: nothing of ours ends it.
            made = StreamQueue(Stream(device, handle), self.order.cuda.event(device), is_ours=False)
            found = self._callers.setdefault(place, made)
        return found

    def _array(self, view: DeviceView | None) -> GpuArray:
        assert view is not None  # the caller has asked `foreign.is_on_gpu`
        return self._device(view.device).within(Borrowed(view, self.keeper), view.shape, view.dtype)


class Loan:
    """The arrays that one call has borrowed. Threads: one at a time, but for `end`, which waits for another one."""

    def __init__(self, borrowing: Borrowing) -> None:
        self._borrowing = borrowing
        self._order = borrowing.order
        self._thread = threading.get_ident()
        self._ending = threading.Lock()
        self._memories: list[Borrowed] = []

    def add(self, arrays: Iterable[GpuArray]) -> None:
        """Use more arrays: those that share memory with others wait for all that is done with these so far."""
        self._borrowing.keeper.collect()
        given = [array.memory for array in arrays if isinstance(array.memory, Borrowed)]
        for queue, memories in self._by_stream(given).items():
            self._order.note_program_use(queue, [memory.uses for memory in memories])
        self._memories += given
        self._share()

    def note_reads(self) -> None:
        """Let our later writes wait for all that the program has queued by now: it may have read the arrays.

        It is work on the streams that were current at `borrow`, and on those that are current now, in this thread.
        """
        for streams in (self._by_stream(self._memories), self._by_current_stream(self._memories)):
            for queue, memories in streams.items():
                self._order.note_program_use(queue, [memory.uses for memory in memories], reads=True)

    def end(self, *, keeps: bool = False) -> None:
        """Let the program's later work wait for our uses so far; again, unless it `keeps` the arrays: no effect.

        It is work on the streams that were current at `borrow`, and on those that are current now, in this thread.

        Arguments:
            keeps: there may be more uses, after which it is called again.
        """
        with self._ending:
            memories = self._memories
            if not keeps:
                self._memories = []
            if not memories:
                return
            # First of all: a library that is asked for its stream may have something against it.
            self._let_follow(self._by_stream(memories))
            awaited = [memory for memory in memories if memory.is_awaited]
            if threading.get_ident() != self._thread:
                # That thread's own stream cannot be named in this one.
                awaited += [memory for memory in memories if memory.stream == foreign.PER_THREAD]
            self._let_follow(self._by_current_stream(memories))
            for mark in self._order.marks(memory.uses for memory in awaited):
                self._order.finish(mark)
            self._borrowing.keeper.collect()

    def _let_follow(self, streams: dict[StreamQueue, list[Borrowed]]) -> None:
        with self._order.locked():
            for queue, memories in streams.items():
                self._order.follow(queue, [place for memory in memories for place in memory.uses.before_writing()])

    def _by_stream(self, memories: Iterable[Borrowed]) -> dict[StreamQueue, list[Borrowed]]:
        by_handle: dict[tuple[int, int], list[Borrowed]] = {}
        for memory in memories:
            if memory.stream is not None:
                by_handle.setdefault((memory.pointer.device, memory.stream), []).append(memory)
        return {self._borrowing.caller(*place): its for place, its in by_handle.items()}

    def _by_current_stream(self, memories: Iterable[Borrowed]) -> dict[StreamQueue, list[Borrowed]]:
        found: dict[StreamQueue, list[Borrowed]] = {}
        by_library: dict[tuple[str, int], list[Borrowed]] = {}
        for memory in memories:
            by_library.setdefault((memory.library, memory.pointer.device), []).append(memory)
        for (library, device), its in by_library.items():
            handle = foreign.current_stream(library, device)
            if handle is not None:
                found.setdefault(self._borrowing.caller(device, handle), []).extend(its)
        return found

    def _share(self) -> None:
        """Let arrays that share memory have one history: what writes one waits for what reads the other."""
        groups = [group for group in _overlapping(self._memories) if len({id(memory.uses) for memory in group}) > 1]
        for device in {group[0].pointer.device for group in groups}:
            here = [memory.uses for group in groups for memory in group if memory.pointer.device == device]
            with self._order.using(self._borrowing.arrivals(device), writes=here):
                pass
        for group in groups:
            for memory in group:
                memory.share(group[0].uses)


def _overlapping(memories: Iterable[Borrowed]) -> Iterator[list[Borrowed]]:
    """Yield memories that share bytes, directly or by others between them."""
    group: list[Borrowed] = []
    end = 0
    for memory in sorted(
        (memory for memory in memories if memory.pointer.nbytes),
        key=lambda memory: (memory.pointer.device, memory.pointer.address),
    ):
        place = memory.pointer
        if group and (group[0].pointer.device != place.device or end <= place.address):
            yield group
            group = []
        end = max(end, place.address + place.nbytes) if group else place.address + place.nbytes
        group.append(memory)
    if group:
        yield group
