"""Memory of this process's GPUs that other processes of the host use, and theirs that this one uses.

    GpuExports   segments of one GPU that others can map, and arrays in them
    ReadExports  those of them that some processes read
    GpuMapping   a segment of another process, mapped here
    Arrival      what to wait for before values of another process are used
    GpuSharing   all of a process

Each segment begins with a nonce: who reads it on its own GPU has the same memory. Arrays of ours are written by the
device's kernels, and free when no frame refers to them: who sends a frame keeps it until its receiver is done with it.
Values of another process are only read. The frame is kept until our GPU is known to have read it.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays.cuda import SHARED_UNIT, CudaError, Event, HostMemory, Pointer
from distrun_runtime.arrays.dtypes import Array, Buffer, DType
from distrun_runtime.arrays.gpu import GpuArray, GpuDevice
from distrun_runtime.arrays.gpu_devices import KeptMemory
from distrun_runtime.arrays.gpu_frames import IN_USE, SegmentOffer, frames_at, place_of, readable
from distrun_runtime.arrays.gpu_memory import Memory
from distrun_runtime.arrays.gpu_order import StreamOrdering, Uses
from distrun_runtime.arrays.shared_memory import (
    FIRST_BYTES,
    NONCE_BYTES,
    NUMBERS,
    PAGE,
    SEGMENT_BYTES,
    FreeRuns,
    address_of,
    first_free,
    note_free,
)
from distrun_runtime.errors import KVError

ASK_S = 0.0001
"""How often the host asks whether values of another process are there."""


@dataclass(eq=False)
class GpuSegment(FreeRuns):
    """A segment of a GPU's memory that this process has made."""

    pointer: Pointer
    fd: int
    nonce: bytes
    event: Event
    """Behind the nonce."""
    event_name: bytes
    number: int = field(default_factory=lambda: next(NUMBERS))
    uses: Uses = field(default_factory=Uses)

    def __post_init__(self) -> None:
        self.free = [(PAGE, self.pointer.nbytes)]


@dataclass(eq=False)
class _ExportedPlace:
    """A run of a segment of ours."""

    gpu: GpuDevice
    segment: int
    offset: int
    address: int
    memory: Memory

    def array(self, frame: Buffer, begin: int, dtype: DType) -> GpuArray:
        return _cut(self.gpu, self.memory, frame, begin, dtype)


class _ExportedRun(Memory):
    """Memory of an array of ours; `bytes` is for its frames, and keeps it in use."""

    is_shared = True

    def __init__(self, gpu: GpuDevice, segment: GpuSegment, begin: int, nbytes: int) -> None:
        self.pointer = segment.pointer.at(begin, nbytes)
        self.uses = segment.uses
        # The place has another one of the same memory, which keeps nothing.
        bare = Memory.__new__(Memory)
        bare.pointer, bare.uses, bare.is_shared = self.pointer, self.uses, True
        self.bytes = frames_at(_ExportedPlace(gpu, segment.number, begin, self.pointer.address, bare), nbytes)


def frames_of(arrays: Iterable[GpuArray]) -> list[Buffer]:
    """Return frames with arrays of `GpuExports.empty`, or parts of them: one for those that follow each other."""
    runs: list[tuple[GpuArray, int]] = []
    for array in arrays:
        last, end = runs[-1] if runs else (array, -1)
        if array.memory is last.memory and array.begin == end:
            runs[-1] = last, end + array.nbytes
        else:
            runs.append((array, array.begin + array.nbytes))
    return [GpuExports.bytes_of(first)[first.begin : end].data for first, end in runs]


def is_exported(array: GpuArray) -> bool:
    """Whether an array, or what it is a part of, is of `GpuExports.empty`."""
    return isinstance(array.memory, _ExportedRun)


class GpuExports:
    """Segments of one GPU for other processes, and arrays in them. Threads: any.

    Arguments:
        grown: called when there is a new segment.
    """

    def __init__(self, gpu: GpuDevice, order: StreamOrdering, grown: Callable[[], None]) -> None:
        self.gpu = gpu
        self.order = order
        self.why_not = ""
        """Why there was no memory for the last array."""
        self.segments: tuple[GpuSegment, ...] = ()
        self.given_back = 0
        """How many segments were given back."""
        self._grown = grown
        self._is_closed = False
        self._lock = threading.Lock()
        self.descriptors = threading.Lock()
        """Held while a descriptor of `segments` is sent or closed: its number may be another one's then."""
        self._unused: deque[tuple[GpuSegment, int, int]] = deque()
        """Runs that nothing refers to any more. Whichever thread drops one appends it."""

    def empty(self, shape: Sequence[int], dtype: DType, among: Set[int] | None = None) -> GpuArray | None:
        """Return a new array of undefined content; None: there is no memory for it, see `why_not`.

        Arguments:
            among: numbers of the segments that it may be in; if these are all, and full, there will be another one.

        Raises:
            CudaError: the GPU has failed for good.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        size = -(-max(1, nbytes) // PAGE) * PAGE
        with self._lock:
            note_free(self._unused)
            segments = [each for each in self.segments if among is None or each.number in among]
            place = first_free(segments, size)
            if place is None and len(segments) == len(self.segments):
                made = self._make(size + PAGE)
                place = None if made is None or among is not None else (made, made.take(size))
            if place is None:
                return None
        segment, begin = place
        run = _ExportedRun(self.gpu, segment, begin, max(1, nbytes))
        weakref.finalize(run.bytes, self._unused.append, (segment, begin, begin + size)).atexit = False
        return self.gpu.within(run, shape, dtype)

    def among(self, numbers: Set[int]) -> ReadExports:
        """Return what is in some of the segments."""
        return ReadExports(self, numbers)

    @staticmethod
    def bytes_of(array: GpuArray) -> Array:
        """Return the bytes of an array that `empty` has made, to cut frames from."""
        assert isinstance(array.memory, _ExportedRun)
        return array.memory.bytes

    def record(self, event: Event) -> None:
        """Put an event behind all that has written to the segments so far."""
        with self.order.using(self.gpu.work, reads=[each.uses for each in self.segments]):
            self.order.cuda.record(event, self.gpu.work.stream)

    def trim(self) -> None:
        """Give the segments back of which nothing is in use; until `close`, not the first one, which others know."""
        with self._lock:
            note_free(self._unused)
            kept = 0 if self._is_closed else 1
            gone = [each for each in self.segments[kept:] if each.free == [(PAGE, each.pointer.nbytes)]]
            with self.descriptors:
                self.segments = tuple(each for each in self.segments if each not in gone)
                for segment in gone:
                    os.close(segment.fd)
            self.given_back += len(gone)
            for segment in gone:
                self._end(segment)
                self._account(-segment.pointer.nbytes)

    def close(self) -> None:
        """Give all segments back: now, or what is in use by the first `trim` of the device's pool after that."""
        self._is_closed = True
        self.trim()

    def _make(self, nbytes: int) -> GpuSegment | None:
        """Return a new segment with room for so many bytes; None: there is none. Call with the lock held."""
        total = sum(each.pointer.nbytes for each in self.segments)
        for wanted in (max(nbytes, min(max(FIRST_BYTES, total), SEGMENT_BYTES)), nbytes):
            size = -(-wanted // SHARED_UNIT) * SHARED_UNIT
            try:
                if not self._account(size):
                    self.why_not = f"the limit of {self.gpu.pool.limit} bytes is reached"
                    continue
                try:
                    made = self._made(size)
                except BaseException:
                    self._account(-size)
                    raise
            except CudaError as err:
                if err.is_sticky:
                    raise
                self.why_not = str(err)
                continue
            self.segments = (*self.segments, made)
            self._grown()
            return made
        return None

    def _made(self, size: int) -> GpuSegment:
        cuda, work, nonce = self.order.cuda, self.gpu.work, secrets.token_bytes(NONCE_BYTES)
        event, name = cuda.share_event(self.gpu.physical)
        pointer, fd = cuda.share(self.gpu.physical, size)
        segment = GpuSegment(pointer, fd, nonce, event, name)
        source = HostMemory(address_of(np.frombuffer(nonce, np.uint8)), NONCE_BYTES)
        try:
            with self.order.using(work, writes=[segment.uses], blocks=True):
                cuda.copy(pointer.at(0, NONCE_BYTES), source, NONCE_BYTES, work.stream)
            with self.order.using(work, reads=[segment.uses]):
                cuda.record(event, work.stream)
        except BaseException:
            os.close(fd)
            self._end(segment)
            raise
        return segment

    def _end(self, segment: GpuSegment) -> None:
        """Give the memory of a segment back, once it is not used any more. Its descriptor is closed."""
        self.order.finish_uses(segment.uses)
        self.order.cuda.close_shared(segment.pointer)

    def _account(self, size: int) -> bool:
        """Count bytes as those of the device's pool; False: it has a limit, which is reached."""
        pool = self.gpu.pool
        with self.order.locked():
            if size > 0 and pool.limit is not None and pool.size + size > pool.limit:
                return False
            pool.size += size
        return True


@dataclass(frozen=True)
class ReadExports:
    """Those segments of a GPU that some other processes are known to read. Threads: any."""

    all: GpuExports
    numbers: Set[int]

    def empty(self, shape: Sequence[int], dtype: DType) -> GpuArray | None:
        """Return a new array that they read; None: there is no memory for it so far. Raises as `GpuExports.empty`."""
        return self.all.empty(shape, dtype, self.numbers)

    def has(self, memory: Array) -> bool:
        """Whether they read some bytes of an array of ours."""
        place = place_of(memory)
        return place is not None and place.segment in self.numbers


@dataclass(eq=False)
class Arrival:
    """A message of another process with values on a GPU: they are there when its event has completed."""

    who: str
    event: Event
    is_gone: Callable[[], bool]
    """Whether that process has ended, or begun to end, or the connection with it."""
    is_over: bool = False

    def wait(self, order: StreamOrdering) -> None:
        """Return when the values are there. The host waits: a stream that waits for a killed process never ends.

        Raises:
            KVError: the other process has ended before that was known, or they did not come in time.
        """
        until = time.monotonic() + order.wait_s
        while not self.has_come(order):
            if time.monotonic() >= until:
                raise KVError(
                    f"{self.who} announced values on the GPU, which are not there after {order.wait_s:g} s; fix: see"
                    " whether 'nvidia-smi' answers on this host, and what else its process has to do on that GPU"
                )
            time.sleep(ASK_S)

    def has_come(self, order: StreamOrdering) -> bool:
        """Tell whether the values are there. Raises as `wait`, but for the time."""
        if not self.is_over:
            # What an event says whose maker has ended is not defined: it lives before it is asked, and after.
            is_gone = self.is_gone()
            has_completed = not is_gone and order.cuda.query(self.event)
            if is_gone or self.is_gone():
                what = "has ended before its values were known to be on the GPU"
                raise KVError(f"{self.who}, or the connection with it, {what}")
            self.is_over = has_completed
        return self.is_over


class _Imported(KeptMemory):
    """Memory of another process, which a frame of a message owns."""

    is_shared = True


class GpuMapping:
    """A segment of another process, mapped here until nothing refers to it."""

    def __init__(self, gpu: GpuDevice, pointer: Pointer, unmapped: deque[Pointer]) -> None:
        self.gpu = gpu
        self.pointer = pointer
        weakref.finalize(self, unmapped.append, pointer).atexit = False

    def frames(self, arrival: Arrival) -> Array:
        """Return its bytes, for the frames of one message."""
        return frames_at(_ImportedPlace(self, arrival), self.pointer.nbytes)


class _ImportedPlace:
    """What a message of another process has in one of its segments."""

    segment, offset = -1, 0

    def __init__(self, mapping: GpuMapping, arrival: Arrival) -> None:
        self.address = mapping.pointer.address
        self._mapping = mapping
        self._arrival = arrival
        self._memory: weakref.ref[_Imported] | None = None

    def array(self, frame: Buffer, begin: int, dtype: DType) -> GpuArray:
        borrowing = devices.gpus().borrowing
        self._arrival.wait(borrowing.order)
        memory = None if self._memory is None else self._memory()
        if memory is None:
            memory = _Imported(self._mapping.pointer, frame, borrowing.keeper)
            self._memory = weakref.ref(memory)
        return _cut(self._mapping.gpu, memory, frame, begin, dtype)


def _cut(gpu: GpuDevice, memory: Memory, frame: Buffer, begin: int, dtype: DType) -> GpuArray:
    if begin % dtype.itemsize:
        raise KVError(f"a frame of {dtype} begins at byte {begin}, which is no multiple of {dtype.itemsize}")
    first, size = begin // dtype.itemsize, memoryview(frame).nbytes // dtype.itemsize
    return gpu.within(memory, (memory.pointer.nbytes // dtype.itemsize,), dtype)[first : first + size]


class GpuSharing:
    """What a process shares of its GPUs, and what others share with it.

    Threads: `exports` any, the rest one at a time.
    """

    def __init__(self, grown: Callable[[], None]) -> None:
        self.exports: GpuExports | None = None
        """Of the one GPU whose memory others can use; None: of none so far."""
        self.why_not = ""
        """Why there is none, once it was asked for."""
        self._grown = grown
        self._unmapped: deque[Pointer] = deque()
        self._uuids: dict[int, str] = {}
        """By physical GPU."""

    def open(self, gpu: GpuDevice) -> None:
        """Have memory of a GPU for other processes, from now on; of the first one that is asked for."""
        if self.exports is None:
            made = GpuExports(gpu, devices.gpus().order, self._grown)
            try:
                is_made = made.empty((1,), np.dtype(np.uint8)) is not None
            except CudaError as err:  # A GPU that has failed is told with the call that needs it, too.
                is_made, made.why_not = False, str(err)
            if is_made:
                gpu.pool.before_trim.append(made.trim)
                IN_USE.append(True)
                self.exports = made
            self.why_not = "" if is_made else made.why_not

    def map(self, offer: SegmentOffer, gpu: GpuDevice, fd: int, has_ended: Callable[[], bool]) -> GpuMapping | None:
        """Map a segment of another process; None: its nonce is not there yet. It never waits for the other process.

        Raises:
            KVError: that cannot be, and why.
        """
        order = devices.gpus().order
        cuda = order.cuda
        offer.event = offer.event or cuda.open_event(gpu.physical, offer.event_name)
        arrival = Arrival("the process that offers it", offer.event, has_ended)
        if not arrival.has_come(order):
            return None
        mapping = GpuMapping(gpu, cuda.open_shared(gpu.physical, fd, offer.size), self._unmapped)
        IN_USE.append(True)
        nonce = mapping.frames(arrival)[: len(offer.nonce)]
        if bytes(readable(nonce.data)) != offer.nonce:
            raise KVError("its memory has another nonce")
        return mapping

    def gpu_of(self, uuid: str) -> GpuDevice | None:
        """Return the device of a UUID; None: this process does not use it so far."""
        return next((each for each in devices.opened() if self.uuid_of(each) == uuid), None)

    def uuid_of(self, gpu: GpuDevice) -> str:
        """Return the UUID of a device; the driver, which takes long, is asked once."""
        if gpu.physical not in self._uuids:
            self._uuids[gpu.physical] = devices.gpus().order.cuda.properties(gpu.physical).uuid
        return self._uuids[gpu.physical]

    def collect(self) -> None:
        """Let go of what was read, and unmap what is not needed any more."""
        borrowing = devices.gpus().borrowing
        borrowing.keeper.collect()
        while self._unmapped:
            borrowing.order.cuda.close_shared(self._unmapped.popleft())
