"""Devices that keep arrays and add them up for stores and servers: their interface, host memory, and all by name.

* `Device`: what host memory and GPUs have in common. GPUs are in `gpu`; they, and cupy with them, are looked for when
  one is asked for (`get`, `gpu`).
* `CpuDevice`: devices in the host's memory. cpu:0, cpu:1 ... have separate buffers and share the processors. With
  several of them, everything that a worker with several GPUs does can be run, and tested, without one.
* `Arena`: many arrays of one dtype, end to end in few large blocks of a device's memory. What lies next to each other
  is added, updated and sent by one call instead of one a value. A block never moves, so views stay valid. An arena may
  have several *sides*, of equal layout: while a reply still reads one, an update writes another. Memory is taken from
  the machine when it is first written.
* `GpuArrays`, `host_array`: the arrays of other libraries that a call is given.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import numpy as np

from distrun_runtime.arrays import dtypes, foreign
from distrun_runtime.arrays.cores import SHARED, Threads, copy_all
from distrun_runtime.arrays.dtypes import Array, Buffer, DType
from distrun_runtime.arrays.gpu_frames import IN_USE, readable
from distrun_runtime.arrays.shared_memory import BLOCKS, PAGE, Pool
from distrun_runtime.contract import environ
from distrun_runtime.errors import KVError, StoreClosed

if TYPE_CHECKING:
    from distrun_runtime.arrays.gpu import GpuDevice
    from distrun_runtime.arrays.gpu_devices import Borrowing, Gpus


DeviceArray = Any
"""An array in a device's memory: numpy's on cpu devices, a `gpu.GpuArray` on GPUs.

Both have `shape`, `dtype`, `size`, `nbytes`, `reshape`; flat ones have a length, and slices that share their memory.
"""


def is_on_host(array: DeviceArray) -> TypeGuard[Array]:
    """Tell whether an array is numpy's, in the host's memory; otherwise it is a `gpu.GpuArray`."""
    return isinstance(array, np.ndarray)


def on_host(array: DeviceArray) -> Array:
    """Return an array as numpy's: itself if it is in the host's memory, else a copy."""
    found: Array = array if is_on_host(array) else array.device.host(array)
    return found


def copy(array: DeviceArray, out: DeviceArray) -> None:
    """Copy an array to another of the same shape and dtype, wherever the two are; numpy's of any strides."""
    if not is_on_host(out):
        out.device.write(out, array)
    elif not is_on_host(array):
        array.device.read(array, out)
    elif array.nbytes >= SHARED.bound and array.flags.c_contiguous and out.flags.c_contiguous:
        copy_all([(array.reshape(-1), out.reshape(-1))])
    else:
        np.copyto(out, array)


class Device(Protocol):
    """One device. Its arrays are C-contiguous; sums are made in the order of the arguments.

    A GPU works on while a call has returned. What a call returns, or writes, in the host's memory is there when it
    returns; memory of the host that a call reads may be overwritten then, if the call does not say otherwise. Calls on
    one array, of any thread, take effect in their order.

    Threads: any, but one at a time for an array that is written.
    """

    name: str
    """`cpu:0`, `gpu:0`."""
    is_gpu: bool
    """Whether arrays are `gpu.GpuArray`s; else they are numpy's."""

    def empty(self, shape: Sequence[int], dtype: DType, *, is_sent: bool = False) -> DeviceArray:
        """Return a new array here, of undefined content.

        Arguments:
            is_sent: it is often sent to other processes, as it is: it may be where those on this host can read it.
        """

    def put(self, array: DeviceArray) -> DeviceArray:
        """Return a copy here of an array of the host or of any device."""

    def sum(self, parts: Sequence[DeviceArray], out: DeviceArray) -> None:
        """Write the sum of flat arrays of one length into `out`, added from first to last.

        All are here; a GPU takes parts of other devices, too.

        Arguments:
            parts: each in the dtype of `out`, or in its work dtype (float32 for 16-bit floats); only read.
            out: may be one of the parts. 16-bit floats are added in float32, and the sum rounded once. Integers wrap
                around; floats become inf.
        """

    def sums(self, items: Iterable[tuple[Sequence[DeviceArray], DeviceArray]]) -> None:
        """Write several sums, as `sum` does each: on a GPU by as few kernels as they allow."""

    def elements(self, frame: Buffer, dtype: DType) -> DeviceArray:
        """Return the elements of bytes that came from another process: flat, not to be written.

        cpu devices look into the bytes, which have to stay as they are meanwhile; GPUs take a copy.
        """

    def frame(self, array: DeviceArray) -> Buffer:
        """Return the bytes of a flat array that is here, to be sent; valid until the array is written.

        Of cpu devices they are the array's memory, of GPUs a copy.
        """

    def scale(self, array: DeviceArray, factor: float) -> None:
        """Multiply an array that is here; 16-bit floats in float32, rounded once."""


class ArrayPlace(NamedTuple):
    """Where an array is referred to."""

    array: DeviceArray
    put: Callable[[DeviceArray], None]
    """Refers to another array in its place. Never fails."""
    is_sent: bool = False
    """As for `Device.empty`."""


def move(places: Iterable[ArrayPlace], device: Device) -> None:
    """Have arrays on another device: all of them, or none if a call fails.

    Raises:
        KVError: a call of a GPU failed, as when its memory is full. Nothing has changed.
    """
    every, made = list(places), list[DeviceArray]()
    try:
        for each in every:
            made.append(device.empty(each.array.shape, each.array.dtype, is_sent=each.is_sent))
        for at, each in enumerate(every):
            copy(each.array, made[at])
    except BaseException:
        made.clear()  # keeping the error does not keep their memory
        raise
    for each, new in zip(every, made, strict=True):
        each.put(new)


_WORD_BYTES = 4
"""Of an element: most are float32, or become it."""
CHUNK = 1 << 15
"""Elements that are added up before the next: a chunk of the sum stays in the processor's cache."""


class CpuDevice:
    """One set of buffers in host memory; its arrays are numpy's."""

    is_gpu = False

    def __init__(self, index: int = 0, threads: Threads | None = None, memory: Pool | None = None) -> None:
        self.name = f"cpu:{index}"
        self._threads = threads or SHARED
        self._memory = memory

    def __repr__(self) -> str:
        return f"<CpuDevice {self.name}>"

    def empty(self, shape: Sequence[int], dtype: DType, *, is_sent: bool = False) -> Array:
        """Return a new array of undefined content; one that is often sent in shared memory, if there is any."""
        found = self._memory.empty(shape, dtype) if is_sent and self._memory is not None else None
        return np.empty(tuple(shape), dtype) if found is None else found

    def reserve(self, nbytes: int, pieces: int, times: int, *, store: int = 0) -> None:
        """Have memory, as far as there is any, for so many times so many bytes more of arrays that are often sent.

        Arguments:
            pieces: of how many arrays these are the bytes.
            store: whose arrays these are; a number.
        """
        if self._memory is not None:
            self._memory.reserve(nbytes, pieces, times, store=store)

    def unreserve(self, store: int | None = None) -> None:
        """What was reserved for a store, or with None for all, is room for other arrays; the rest is given back."""
        if self._memory is not None:
            self._memory.unreserve(store)
            self._memory.trim()

    def put(self, array: Array) -> Array:
        """Return a C-contiguous copy."""
        return np.array(array, order="C", copy=True)

    def sum(self, parts: Sequence[Array], out: Array) -> None:
        """Write the sum of flat arrays into `out`, added from first to last."""
        self.sums([(parts, out)])

    def sums(self, items: Iterable[tuple[Sequence[Array], Array]]) -> None:
        """Write several sums: several threads share all of them, if there are enough elements."""
        every = list(items)
        sizes = [len(out) for _, out in every]
        if not self.shares(sum(sizes)):
            for parts, out in every:
                _sum(parts, out)
            return

        def work(number: int, run: slice) -> None:
            parts, out = every[number]
            _sum([part[run] for part in parts], out[run])

        self.share(sizes, work)

    def share(self, sizes: Sequence[int], work: Callable[[int, slice], None]) -> None:
        """Call `work` for items of these numbers of elements, as `Threads.share` does."""
        self._threads.share(sizes, work)

    def shares(self, elements: int) -> bool:
        """Whether several threads share work on so many elements."""
        nbytes = elements * _WORD_BYTES
        return nbytes >= self._threads.bound and self._threads.shares(nbytes)

    def elements(self, frame: Buffer, dtype: DType) -> Array:
        """Return the elements of bytes: a read-only view of them, or of their copy if they are on a GPU."""
        if IN_USE:
            frame = readable(frame)
        return np.frombuffer(frame, dtype) if memoryview(frame).nbytes else np.empty(0, dtype)

    def frame(self, array: Array) -> Buffer:
        """Return the bytes of a flat array: a view of them."""
        return array.view(np.uint8).data

    def scale(self, array: Array, factor: float) -> None:
        """Multiply an array of this device."""
        with np.errstate(over="ignore", invalid="ignore"):
            wide = dtypes.widen(array)
            number = wide.dtype.type(factor)
            if wide is array:
                np.multiply(array, number, out=array)
            else:
                array[...] = dtypes.narrow(np.multiply(wide, number), array.dtype)


# An overflowing half-precision gradient is the training's affair (loss scaling looks for inf): no warning here.
@np.errstate(over="ignore", invalid="ignore")
def _sum(parts: Sequence[Array], out: Array) -> None:
    if len(parts) == 1 and parts[0] is out:
        return
    dtype = out.dtype
    is_plain = dtype == parts[0].dtype == parts[-1].dtype == dtypes.work_dtype(dtype)
    is_plain = is_plain and (len(parts) < 3 or all(part.dtype == dtype for part in parts))
    if is_plain and len(parts) == 1:
        out[...] = parts[0]
    elif is_plain and len(parts) == 2:
        np.add(parts[0], parts[1], out)
    else:
        add = _add if is_plain else _add_wide
        for begin in range(0, len(out), CHUNK):
            run = slice(begin, begin + CHUNK)
            add([part[run] for part in parts], out[run])


def _add(parts: Sequence[Array], out: Array) -> None:
    np.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        np.add(out, part, out=out)


def _add_wide(parts: Sequence[Array], out: Array) -> None:
    wide = dtypes.widen(parts[0])
    if len(parts) > 1:
        wide = np.add(wide, dtypes.widen(parts[1]))
    for part in parts[2:]:
        np.add(wide, dtypes.widen(part), out=wide)
    out[...] = dtypes.narrow(wide, out.dtype)


FIRST_BYTES = 1024 * 1024
BLOCK_BYTES = 64 * 1024 * 1024
"""Blocks double from the first size up to this one; a larger request gets a block of its own size."""


class Arena:
    """Elements of one dtype by position. Threads: one at a time for elements that are written.

    Arguments:
        like: an arena whose positions this one has too (a place for sums, or for a rule's state); it is never
            reserved in itself.
        is_sent: its elements are often sent to other processes.
    """

    def __init__(self, device: Device, dtype: DType, like: Arena | None = None, *, is_sent: bool = False) -> None:
        self.dtype = dtype
        self._device = device
        self._is_sent = is_sent
        self._bases: list[int] = [] if like is None else like._bases
        """Position of each block's first element. Positions of different blocks are never neighbours."""
        self._sizes: list[int] = [] if like is None else like._sizes
        self._used = 0
        self._sides: list[dict[int, DeviceArray]] = [{}]
        """For each side its blocks, by number; made when they are first used."""

    @property
    def sides(self) -> int:
        """How many sides there are."""
        return len(self._sides)

    def add_side(self) -> int:
        """Make one more side; return its number."""
        self._sides.append({})
        return len(self._sides) - 1

    def reserve(self, lengths: Array, at_pages: Array, multiple: int = 1) -> Array:
        """Return the positions of further values, next to each other and to those before them if there is room.

        Arguments:
            lengths: elements of each, int64 of shape (n,).
            at_pages: bool of shape (n,): which of them begin with a page of memory, so that a process that shares it
                can map them by themselves.
            multiple: of how many elements each position is one.
        """
        lengths = -(-lengths // multiple) * multiple
        page = PAGE // self.dtype.itemsize
        offsets, used = _placed(self._used, lengths, at_pages, page)
        if not self._bases or used > self._sizes[-1]:
            offsets, used = _placed(0, lengths, at_pages, page)
            last = self._sizes[-1] if self._sizes else 0
            bound = BLOCK_BYTES // self.dtype.itemsize
            wanted = min(2 * last, bound) if last else FIRST_BYTES // self.dtype.itemsize
            self._bases.append(self._bases[-1] + last + 1 if self._bases else 0)
            self._sizes.append(max(used, wanted, 1))
        self._used = used
        return self._bases[-1] + offsets

    def extent(self) -> tuple[int, int]:
        """Return what `take_back` takes."""
        return len(self._bases), self._used

    def take_back(self, extent: tuple[int, int]) -> None:
        """Take back what was reserved since `extent` was returned; blocks made for it alone are dropped."""
        count, self._used = extent
        del self._bases[count:], self._sizes[count:]
        for blocks in self._sides:
            for number in [number for number in blocks if number >= count]:
                del blocks[number]

    @property
    def sizes(self) -> Sequence[int]:
        """Elements of each block, whether it was used yet or not."""
        return self._sizes

    def places(self) -> Iterator[ArrayPlace]:
        """Yield where the blocks that were used are referred to; `device.move` takes them elsewhere."""
        for blocks in self._sides:
            for number, block in blocks.items():
                yield ArrayPlace(block, partial(blocks.__setitem__, number), self._is_sent)

    def make_on(self, device: Device) -> None:
        """Make further blocks on another device."""
        self._device = device

    def view(self, begin: int, end: int, side: int = 0) -> DeviceArray:
        """Return the elements of some positions, which are in one block; without a copy."""
        number = bisect_right(self._bases, begin) - 1
        blocks = self._sides[side]
        block = blocks.get(number)
        if block is None:
            block = blocks[number] = self._device.empty((self._sizes[number],), self.dtype, is_sent=self._is_sent)
        base = self._bases[number]
        return block[begin - base : end - base]


def _placed(used: int, lengths: Array, at_pages: Array, page: int) -> tuple[Array, int]:
    """Return the offsets of values behind `used` elements, and where the last one ends."""
    offsets = used + np.cumsum(lengths) - lengths
    for index in np.flatnonzero(at_pages).tolist():
        gap = -int(offsets[index]) % page
        if gap:
            offsets[index:] += gap
    end = int(offsets[-1] + lengths[-1]) if len(lengths) else used
    return offsets, end


class Run(NamedTuple):
    """Some values that lie next to each other in an arena."""

    first: int
    """Index of the first of them in the list that was asked for."""
    last: int
    """Index behind the last one."""
    begin: int
    end: int
    """Their positions."""
    offset: int
    """Elements of the values before them in the list."""


def runs(positions: Array, lengths: Array, cuts: Sequence[int] = ()) -> list[Run]:
    """Return the runs that values of these positions and lengths make, in their order.

    Arguments:
        cuts: indices of values that begin a new run in any case, ascending.
    """
    count = len(positions)
    if not count:
        return []
    ends = positions + lengths
    offsets = np.cumsum(lengths) - lengths
    breaks = np.flatnonzero(positions[1:] != ends[:-1]) + 1
    if len(cuts):
        breaks = np.union1d(breaks, np.asarray(cuts, np.int64))
    starts = [0, *(each for each in breaks.tolist() if 0 < each < count)]
    return [
        Run(first, last, int(positions[first]), int(ends[last - 1]), int(offsets[first]))
        for first, last in zip(starts, [*starts[1:], count], strict=True)
    ]


WAIT_OF_CALL = 0.5
"""Of the time for a store's call, a wait for a GPU takes at most: whose GPU hangs says so before its peers give up."""

_gpus: list[Gpus] = []
"""Those of this process, once one was asked for."""
_lock = threading.Lock()


def get(name: str, threads: Threads | None = None, memory: Pool | None = None) -> Device:
    """Return the device of a name: `cpu:0`, `cpu:1` ..., `gpu:0` ... (`cpu` is `cpu:0`, and `cuda:0` is `gpu:0`).

    A GPU is one device for the whole process. `gpu:0/0`, `gpu:0/1` are two devices on one GPU, for tests.

    Arguments:
        threads: who shares a cpu device's work on large arrays; None: those that copy.
        memory: where arrays of a cpu device are that are often sent to other processes; None: as all others.

    Raises:
        KVError: there is no such device; for a GPU it says what is missing.
    """
    found = re.fullmatch(r"(?:cpu(?::(\d+))?|(gpu|cuda)(?::(\d+)(?:/(\d+))?)?)", name)
    if found is None:
        raise KVError(f"no device {name!r}; there are cpu:0, cpu:1 ... and gpu:0, gpu:1 ...")
    if found.group(2) is None:
        return CpuDevice(int(found.group(1) or 0), threads, memory)
    return gpu(int(found.group(3) or 0), None if found.group(4) is None else int(found.group(4)))


def gpu(number: int, part: int | None = None) -> GpuDevice:
    """Return a GPU.

    Arguments:
        part: for tests, a device that is only a part of it.

    Raises:
        KVError: cupy, a driver or this GPU is missing.
        StoreClosed: the process was forked from one that uses GPUs.
    """
    return gpus().get(number, part)


def gpus() -> Gpus:
    """Return the GPUs of this process.

    Raises:
        KVError: cupy, a driver or a GPU is missing.
        StoreClosed: the process was forked from one that uses GPUs.
    """
    from distrun_runtime.arrays import cupy_driver  # most processes use no GPU
    from distrun_runtime.arrays.gpu_devices import Gpus

    opened = cupy_driver.of_process()
    with _lock:
        if not _gpus:
            wait_s = environ.read("DISTRUN_OP_TIMEOUT") * WAIT_OF_CALL
            has_peers = environ.read("MXNET_ENABLE_GPU_P2P")
            _gpus.append(Gpus(opened, wait_s=wait_s, has_peers=has_peers, blocks=BLOCKS))
    return _gpus[0]


def opened() -> list[GpuDevice]:
    """Return the devices that this process has asked for so far."""
    return _gpus[0].made() if _gpus else []


def in_use() -> list[GpuDevice]:
    """Return the GPUs that this process is known to use: what a call will need there can be prepared.

    These are the devices that were asked for so far, as for the values of a call; if there are none, the one on which
    torch or cupy works in the calling thread. A program that uses no GPU opens none by it.

    Raises:
        KVError: a GPU has failed for good.
    """
    if not _gpus and foreign.current_device() is None:
        return []
    from distrun_runtime.arrays.cuda import CudaMissing  # most processes use no GPU

    try:
        found = gpus()
    except (CudaMissing, StoreClosed):  # others use it, or the process that this one was forked from
        return []
    made = found.made()
    if made:
        return made
    current = foreign.current_device()
    return [] if current is None else [found.get(current)]


class GpuArrays:
    """The arrays in GPU memory that one call of a store is given, in one thread. It looks up once what they share."""

    def __init__(self) -> None:
        self._borrowing: Borrowing | None = None
        self._stream_of: foreign.StreamOf = foreign.current_stream

    def of(self, value: object, what: str, *, is_output: bool = False) -> DeviceArray | None:
        """Return an array in GPU memory as a `gpu.GpuArray` in the same memory; None if it is elsewhere.

        None, too, if it is only to be read and there is no cupy or driver in this process: see `host_array`. It is to
        be borrowed (`Gpus.borrowing`) before anything is done with it.

        Arguments:
            what: as for `host_array`.
            is_output: it is to be written.

        Raises:
            KVError: the array cannot be used, or there is no cupy or driver and it is to be written; says what to do.
        """
        if not foreign.is_on_gpu(value):
            return None
        try:
            if self._borrowing is None:
                self._borrowing = gpus().borrowing
                self._stream_of = cache(foreign.current_stream)
            take = self._borrowing.output if is_output else self._borrowing.value
            return take(value, self._stream_of)
        except KVError as err:
            from distrun_runtime.arrays.cuda import CudaError, CudaMissing  # most processes use no GPU

            if isinstance(err, CudaError):
                raise err.about(what)
            if not isinstance(err, CudaMissing):
                raise KVError(f"{what}: {err}") from err
            if not is_output:  # its library may copy it to the host
                return None
            why = foreign.refusal(value, is_output=True) or _missing(value, err)
            raise KVError(f"{what}: {why}") from err


def _missing(value: object, error: Exception) -> str:
    return f"found {foreign.named(value)} in the memory of a GPU; {error}"


def host_array(value: object, what: str) -> Array:
    """Return what numpy sees of a value: the same memory, if numpy can see it. bfloat16 becomes `dtypes.BFLOAT16`.

    An array in GPU memory, and a tensor that torch negates or conjugates lazily, is copied.

    Arguments:
        what: whose value it is, for the message, such as "key 'w'".

    Raises:
        KVError: numpy cannot see it: without values, of a layout of its own, ..., or it is on a GPU and cannot be
            copied; says what was found and what to do.
    """
    why = foreign.of_mxnet(value)
    if why is not None:  # numpy would look into it element by element
        raise KVError(f"{what}: {why}")
    on_gpu = GpuArrays().of(value, what)
    if on_gpu is not None:
        return gpus().borrowing.host(on_gpu)
    try:
        array = foreign.memory_of(value)
    # Whatever a foreign array raises when asked for its memory: on a device, needs a gradient, ...
    except (TypeError, ValueError, RuntimeError, BufferError) as err:
        raise KVError(f"{what}: {_why_not(value) or foreign.unreadable(value, err)}") from err
    if array.dtype.kind == "O":  # numpy could not look into it
        why = _why_not(value)
        if why is not None:
            raise KVError(f"{what}: {why}")
    return array


def _why_not(value: object) -> str | None:
    """Return why numpy cannot read an array of another library."""
    if foreign.is_on_gpu(value):
        try:
            gpus()
        except KVError as err:
            return _missing(value, err)
    return foreign.refusal(value)
