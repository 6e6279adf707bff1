"""Devices `gpu:0`, `gpu:1` ...: arrays in a GPU's memory, summed there by kernels.

Three streams a device: work (kernels), copies in, copies out. What waits for what follows from the memory that each
operation uses (`queues`). A call returns when its work has been given to the GPU, unless it returns or writes memory of
the host.

`gpu:0/0`, `gpu:0/1` are devices for tests: each has streams and memory of its own on GPU 0, and neither looks into the
other's memory, as if they were two GPUs.

Memory of another device is never accessed by a kernel: it is copied to this one first, in pieces, by way of blocks that
make up a ring of 32 MiB.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Union

import numpy as np

from distrun_runtime.arrays import programs
from distrun_runtime.arrays.borrowing import Borrowing
from distrun_runtime.arrays.cuda import Argument, Cuda, CudaError, Host, Loaded, Pointer, Read, Table, Write
from distrun_runtime.arrays.device import Buffer
from distrun_runtime.arrays.dtypes import Array, DType, work_dtype
from distrun_runtime.arrays.gpumemory import Memory, PageLocked, Pool, Staging
from distrun_runtime.arrays.programs import Program
from distrun_runtime.arrays.queues import Order
from distrun_runtime.arrays.segments import address_of
from distrun_runtime.errors import KVError

__all__ = ["GpuArray", "GpuDevice", "Gpus"]

RING_BYTES = 32 * 1024 * 1024
"""Of values that come from elsewhere to be added: for all pieces that are on their way at a time."""
RING_TURNS = 2
"""While one piece is added, the next is copied."""


class GpuArray:
    """A C-contiguous array in a device's memory, or a part of one. It keeps the memory; views share it."""

    def __init__(self, device: GpuDevice, memory: Memory, begin: int, shape: Sequence[int], dtype: DType) -> None:
        self.device = device
        self.memory = memory
        self.begin = begin
        """Bytes of the memory before the first element."""
        self.shape = tuple(shape)
        self.dtype = dtype
        self.size = math.prod(self.shape)
        self.nbytes = self.size * dtype.itemsize

    def __repr__(self) -> str:
        return "<GpuArray %s %s on %s>" % (self.shape, self.dtype, self.device.name)

    def __len__(self) -> int:
        return self.shape[0]

    __array_ufunc__ = None
    """numpy's operators with it raise TypeError."""

    def __array__(self, *_: object, **__: object) -> Array:
        """Refuse to be taken for an array of the host.

        Raises:
            TypeError: always; `device.host(array)` copies it.
        """
        raise TypeError("%r is not in the host's memory; its device's host() copies it" % self)

    def __getitem__(self, run: slice) -> GpuArray:
        """Return consecutive elements of a flat array."""
        if len(self.shape) != 1 or not isinstance(run, slice) or run.step not in (None, 1):
            raise TypeError("a GpuArray is cut by slices, if it is flat; not %r by %r" % (self.shape, run))
        first, last, _ = run.indices(self.size)
        begin = self.begin + first * self.dtype.itemsize
        return GpuArray(self.device, self.memory, begin, (max(0, last - first),), self.dtype)

    def reshape(self, *shape: Any) -> GpuArray:
        """Return the same elements in another shape; -1 stands for what is left over."""
        wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        known = math.prod(each for each in wanted if each != -1)
        made = tuple(self.size // max(1, known) if each == -1 else each for each in wanted)
        if math.prod(made) != self.size:
            raise ValueError("cannot reshape %d elements to %r" % (self.size, wanted))
        return GpuArray(self.device, self.memory, self.begin, made, self.dtype)

    @property
    def pointer(self) -> Pointer:
        """Where the elements are."""
        return self.memory.pointer.at(self.begin, self.nbytes)


AnyArray = Union[Array, GpuArray]


class GpuDevice:
    """One device. Threads: any, but one at a time for an array that is written.

    Arguments:
        physical: the number by which CUDA knows the GPU.
        limit: bytes of memory that its arrays take at most; None: what is there.
        has_peers: copy directly from other GPUs where they allow it.
    """

    def __init__(
        self,
        order: Order,
        physical: int,
        name: str,
        locked: PageLocked,
        *,
        limit: int | None = None,
        has_peers: bool = True,
    ) -> None:
        self.name = name
        self.physical = physical
        self.pool = Pool(order, physical, limit)
        self.locked = locked
        self._order = order
        self._cuda = order.cuda
        self._has_peers = has_peers
        self._peers: set[int] = {physical}
        """GPUs for which direct copies have been settled."""
        self._staging = Staging(order)
        self._work, self._inward, self._outward = (
            order.queue(physical, what) for what in ("kernels", "copies in", "copies out")
        )
        self._loaded: dict[int, Loaded] = {}
        """By the program's id; it keeps the program."""
        self._loading = threading.Lock()

    def __repr__(self) -> str:
        return "<GpuDevice %s>" % self.name

    def prepare(self, dtypes: Iterable[DType]) -> None:
        """Compile and load what arrays of these dtypes need: seconds, if nothing was compiled before."""
        for dtype in dtypes:
            kind, work = programs.kind_of(dtype), programs.kind_of(work_dtype(dtype))
            for pair in {(kind, kind), (kind, work), (work, kind)}:
                self._program(programs.sums(*pair))

    def empty(self, shape: Sequence[int], dtype: DType, *, is_sent: bool = False) -> GpuArray:
        """Return a new array here, of undefined content."""
        size = math.prod(shape) * dtype.itemsize
        return GpuArray(self, self.pool.take(size), 0, shape, np.dtype(dtype))

    def within(self, memory: Memory, shape: Sequence[int], dtype: DType) -> GpuArray:
        """Return an array at the beginning of memory of this GPU that was got in another way, such as borrowed."""
        return GpuArray(self, memory, 0, shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: DType) -> GpuArray:
        """Return a new array here of zeros."""
        result = self.empty(shape, dtype)
        self.clear(result)
        return result

    def clear(self, array: GpuArray) -> None:
        """Fill an array of this device with zeros."""
        if array.nbytes:
            with self._order.using(self._work, writes=[array.memory.uses]):
                self._cuda.fill(array.pointer, 0, array.nbytes, self._work.stream)

    def put(self, array: AnyArray) -> GpuArray:
        """Return a copy here of an array of the host or of any GPU."""
        result = self.empty(array.shape, array.dtype)
        self.write(result, array)
        return result

    def write(self, into: GpuArray, array: AnyArray) -> None:
        """Copy an array of the host or of any GPU, of the same shape and dtype, to one that is here."""
        self._bring(array.reshape(-1), into.reshape(-1))

    def total(self, arrays: Sequence[AnyArray]) -> GpuArray:
        """Return the sum of at least one array as a new array here, added from first to last."""
        result = self.empty(arrays[0].shape, arrays[0].dtype)
        self._add_up([array.reshape(-1) for array in arrays], result.reshape(-1))
        return result

    def add(self, into: GpuArray, array: AnyArray) -> None:
        """Add an array of the same shape and dtype, of the host or of any GPU, to one that is here."""
        flat = into.reshape(-1)
        self._add_up([flat, array.reshape(-1)], flat)

    def sum(self, parts: Sequence[GpuArray], out: GpuArray) -> None:
        """Write the sum of flat arrays into `out`, added from first to last."""
        self._add_up(parts, out)

    def split(self, size: int, work: Callable[[slice], None]) -> None:
        """Call `work` with slice(0, size): a GPU shares the work by itself."""
        work(slice(0, size))

    def elements(self, frame: Buffer, dtype: DType) -> GpuArray:
        """Return a copy here of the elements of bytes; they may be overwritten when this returns."""
        return self.put(np.frombuffer(frame, dtype) if memoryview(frame).nbytes else np.empty(0, dtype))

    def frame(self, array: GpuArray) -> Buffer:
        """Return a copy of the bytes of a flat array, in the host's memory."""
        return self.host(array).view(np.uint8).data

    def scale(self, array: GpuArray, factor: float) -> None:
        """Multiply an array of this device; 16-bit floats in float32, rounded once."""
        if not array.size:
            return
        kind = programs.kind_of(array.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            number = work_dtype(array.dtype).type(factor)
        if kind.startswith("u"):  # integers wrap around: the kernel takes the bits that count
            number = np.int64(int(number) - (1 << 64) if int(number) >= 1 << 63 else int(number))
        place, nbytes = array.pointer, array.nbytes
        arguments: list[Argument] = [Read(place, nbytes), number, Write(place, nbytes)]
        self.launch(programs.sums(kind, kind), "scale", arguments, array.size, writes=[array])

    def host(self, array: GpuArray) -> Array:
        """Return a copy of an array as a numpy array."""
        result = np.empty(array.shape, array.dtype)
        self.read(array, result)
        return result

    def read(self, array: GpuArray, out: Array) -> None:
        """Copy an array that is here into a numpy array of the same shape and dtype, of any strides."""
        if not out.flags.c_contiguous:
            np.copyto(out, self.host(array))
            return
        flat = out.reshape(-1).view(np.uint8)
        if not self.locked.covers(flat):
            self._staging.copy_out(array.memory, array.begin, flat, self._outward)
            return
        with self._order.using(self._outward, reads=[array.memory.uses]):
            self._cuda.copy(Host(address_of(flat), flat.nbytes), array.pointer, flat.nbytes, self._outward.stream)
        self._order.finish(self._order.mark(self._outward))

    def launch(
        self,
        program: Program,
        kernel: str,
        arguments: Sequence[Argument],
        elements: int,
        *,
        reads: Sequence[GpuArray] = (),
        writes: Sequence[GpuArray] = (),
        zeroed: Sequence[GpuArray] = (),
    ) -> None:
        """Launch a kernel of a program here; it is compiled and loaded with the first launch, or by `load`.

        Arguments:
            arguments: those of the kernel, but for the number of elements.
            reads, writes: all arrays that it reads, and those that it writes, also by a table; they are here.
            zeroed: those of `writes` that are filled with zeros before.
        """
        loaded = self._program(program)
        with self._order.using(self._work, [each.memory.uses for each in reads], [each.memory.uses for each in writes]):
            for each in zeroed:
                self._cuda.fill(each.pointer, 0, each.nbytes, self._work.stream)
            self._cuda.launch(loaded, kernel, arguments, elements, self._work.stream)

    def load(self, program: Program) -> None:
        """Compile and load a program: seconds, if it was not compiled before."""
        self._program(program)

    @property
    def failed(self) -> CudaError | None:
        """The error after which this process cannot use a GPU any more; None: there was none."""
        return self._cuda.failed

    def free_bytes(self) -> int:
        """Return how much of the GPU's memory no process has taken."""
        return self._cuda.memory(self.physical)[0]

    def synchronize(self) -> None:
        """Return when all work that was given to this device is over."""
        for queue in (self._work, self._inward, self._outward):
            self._order.finish(self._order.mark(queue))

    # Values from elsewhere

    def _is_here(self, array: AnyArray) -> bool:
        return isinstance(array, GpuArray) and array.device is self

    def _bring(self, source: AnyArray, into: GpuArray) -> None:
        """Copy a flat array from anywhere to one that is here."""
        if not into.nbytes:
            return
        if isinstance(source, GpuArray):
            self._bring_from_gpu(source, into)
            return
        flat = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        if not self.locked.covers(flat):
            self._staging.copy_in(flat, into.memory, into.begin, self._inward)
            return
        with self._order.using(self._inward, writes=[into.memory.uses]):
            self._cuda.copy(into.pointer, Host(address_of(flat), flat.nbytes), flat.nbytes, self._inward.stream)
        self._order.finish(self._order.mark(self._inward))  # the caller may overwrite it now

    def _bring_from_gpu(self, source: GpuArray, into: GpuArray) -> None:
        other = source.device.physical
        queue = self._work if source.device is self else self._inward
        if other not in self._peers:
            if self._has_peers and self._cuda.can_access_peer(self.physical, other):
                self._cuda.enable_peer(self.physical, other)
            self._peers.add(other)
        with self._order.using(queue, reads=[source.memory.uses], writes=[into.memory.uses]):
            copy = self._cuda.copy if other == self.physical else self._cuda.copy_peer
            copy(into.pointer, source.pointer, into.nbytes, queue.stream)

    # Sums

    def _add_up(self, parts: Sequence[AnyArray], out: GpuArray) -> None:
        """Write the sum of flat arrays, of anywhere, into one that is here."""
        if not out.size or (len(parts) == 1 and parts[0] is out):
            return
        here = [part for part in parts if isinstance(part, GpuArray) and part.device is self]
        if len(here) == len(parts):
            self._sum(here, out)
            return
        widest = max(part.dtype.itemsize for part in parts)
        piece = max(1, RING_BYTES // (RING_TURNS * (len(parts) - len(here)) * widest))
        for begin in range(0, out.size, piece):
            run = slice(begin, min(begin + piece, out.size))
            self._sum([self._brought(part[run]) for part in parts], out[run])

    def _brought(self, part: AnyArray) -> GpuArray:
        if isinstance(part, GpuArray) and part.device is self:
            return part
        room = self.empty(part.shape, part.dtype)
        self._bring(part, room)
        return room

    def _sum(self, parts: Sequence[GpuArray], out: GpuArray) -> None:
        """Write the sum of flat arrays that are all here."""
        kinds, kind = [programs.kind_of(part.dtype) for part in parts], programs.kind_of(out.dtype)
        given = tuple(Read(part.pointer, part.nbytes) for part in parts)
        into, number = Write(out.pointer, out.nbytes), np.int64(len(parts))
        used = list(parts)
        arguments: list[Argument]
        if len(set(kinds)) == 1 and len(parts) <= programs.FEW:
            program, name = programs.sums(kinds[0], kind), programs.sum_of(len(parts))
            arguments = [*given, into]
        else:
            table = self.put(np.array([each.pointer.address for each in given], np.uint64))
            used.append(table)
            if len(set(kinds)) == 1:
                program, name = programs.sums(kinds[0], kind), programs.sum_of(len(parts))
                arguments = [Table(table.pointer, given), into, number]
            else:
                half = next(each for each in kinds if each in ("f16", "bf16"))
                wide = self.put(np.array([each != half for each in kinds], np.uint8))
                used.append(wide)
                program, name = programs.sums(half, kind), "sum_mixed"
                arguments = [Table(table.pointer, given), Read(wide.pointer, wide.nbytes), into, number]
        self.launch(program, name, arguments, out.size, reads=used, writes=[out])

    def _program(self, program: Program) -> Loaded:
        loaded = self._loaded.get(id(program))
        if loaded is None:
            self._cuda.check()
            with self._loading:
                loaded = self._loaded.get(id(program))
                if loaded is None:
                    loaded = self._loaded[id(program)] = self._cuda.load(program, self.physical)
        return loaded


class Gpus:
    """The devices of a process: each is made once. Threads: any.

    Arguments:
        wait_s: seconds that the host waits for a GPU at most.
        has_peers: copy directly between GPUs that allow it.
    """

    def __init__(self, cuda: Cuda, *, wait_s: float, has_peers: bool = True) -> None:
        self._has_peers = has_peers
        self.order = Order(cuda, wait_s=wait_s)
        self.locked = PageLocked(self.order)
        self.borrowing = Borrowing(self.order, self.get)
        """Arrays of other libraries on these devices."""
        self._devices: dict[str, GpuDevice] = {}
        self._lock = threading.Lock()

    def get(self, physical: int, part: int | None = None, *, limit: int | None = None) -> GpuDevice:
        """Return `gpu:N`, or `gpu:N/M` for a part.

        Arguments:
            limit: for the memory of a device that is made by this call.

        Raises:
            KVError: CUDA sees no such GPU.
        """
        name = "gpu:%d" % physical if part is None else "gpu:%d/%d" % (physical, part)
        self.order.cuda.check()
        with self._lock:
            if name not in self._devices:
                count = self.order.cuda.count()
                if physical >= count:
                    seen = ("none", "only gpu:0")[count] if count < 2 else "gpu:0 to gpu:%d" % (count - 1)
                    raise KVError(
                        "no device gpu:%d: this process sees %s (CUDA_VISIBLE_DEVICES may hide others)"
                        % (physical, seen)
                    )
                self._devices[name] = GpuDevice(
                    self.order, physical, name, self.locked, limit=limit, has_peers=self._has_peers
                )
            return self._devices[name]
