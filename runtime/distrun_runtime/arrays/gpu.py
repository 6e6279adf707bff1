"""Devices `gpu:0`, `gpu:1` ...: arrays in a GPU's memory, summed there by kernels.

Three streams a device: work (kernels), copies in, copies out. What waits for what follows from the memory that each
operation uses (`gpu_order`). A call returns when its work has been given to the GPU, unless it returns or writes memory
of the host.

`gpu:0/0`, `gpu:0/1` are devices for tests: each has streams and memory of its own on GPU 0, and neither looks into the
other's memory, as if they were two GPUs.

Memory of another device is never accessed by a kernel: it is copied to this one first, in pieces, by way of blocks that
make up a ring of 32 MiB.
"""

from __future__ import annotations

import itertools
import math
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Union, cast

import numpy as np

from distrun_runtime.arrays import gpu_programs
from distrun_runtime.arrays.cuda import Argument, CudaError, HostMemory, Loaded, Pointer, Read, Table, Use, Write
from distrun_runtime.arrays.dtypes import ALIGNED, Array, Buffer, DType, work_dtype
from distrun_runtime.arrays.gpu_frames import IN_USE, array_of
from distrun_runtime.arrays.gpu_memory import GpuPool, Memory, PageLocked, Staging
from distrun_runtime.arrays.gpu_order import StreamOrdering, Uses
from distrun_runtime.arrays.gpu_programs import Program
from distrun_runtime.arrays.shared_memory import address_of

RING_BYTES = 32 * 1024 * 1024
"""Of values that come from elsewhere to be added: for all pieces that are on their way at a time."""
RING_TURNS = 2
"""While one piece is added, the next is copied."""
PIECE_BYTES = 16 * 1024 * 1024
"""Larger arrays are copied from and to page-locked memory in equal pieces of at most so many bytes."""
ADVICE = (
    "fix: create a 'local' store, whose sums and weights are in the host's memory; or push and pull fewer keys at once;"
    " or end what else takes this GPU's memory ('nvidia-smi' lists it)"
)
"""What to do if memory runs out, for workers; servers have their own."""
LISTS, LISTED_BYTES = 1 << 10, 1 << 20
"""How many lists of tensors, and bytes of them, are kept on a device; if there would be more, all are dropped."""


class GpuArray:
    """A C-contiguous array in a device's memory, or a part of one. It keeps the memory; views share it."""

    def __init__(self, device: GpuDevice, memory: Memory, begin: int, shape: Sequence[int], dtype: DType) -> None:
        self.device = device
        self.memory = memory
        self.begin = begin
        """Bytes of the memory before the first element."""
        self.address = memory.pointer.address + begin
        """Of the first element, on the device: `pointer` says more of it."""
        self.shape = tuple(shape)
        self.dtype = dtype
        self.size = math.prod(self.shape)
        self.nbytes = self.size * dtype.itemsize

    def __repr__(self) -> str:
        return f"<GpuArray {self.shape} {self.dtype} on {self.device.name}>"

    def __len__(self) -> int:
        return self.shape[0]

    __array_ufunc__ = None
    """numpy's operators with it raise TypeError."""

    def __array__(self, *_: object, **__: object) -> Array:
        """Refuse to be taken for an array of the host.

        Raises:
            TypeError: always; `device.host(array)` copies it.
        """
        raise TypeError(f"{self!r} is not in the host's memory; its device's host() copies it")

    def __getitem__(self, run: slice) -> GpuArray:
        """Return consecutive elements of a flat array."""
        if len(self.shape) != 1 or not isinstance(run, slice) or run.step not in (None, 1):
            raise TypeError(f"a GpuArray is cut by slices, if it is flat; not {self.shape!r} by {run!r}")
        first, last, _ = run.indices(self.size)
        begin = self.begin + first * self.dtype.itemsize
        return GpuArray(self.device, self.memory, begin, (max(0, last - first),), self.dtype)

    def reshape(self, *shape: Any) -> GpuArray:
        """Return the same elements in another shape; -1 stands for what is left over."""
        wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        known = math.prod(each for each in wanted if each != -1)
        made = tuple(self.size // max(1, known) if each == -1 else each for each in wanted)
        if math.prod(made) != self.size:
            raise ValueError(f"cannot reshape {self.size} elements to {wanted!r}")
        return GpuArray(self.device, self.memory, self.begin, made, self.dtype)

    @property
    def pointer(self) -> Pointer:
        """Where the elements are."""
        return self.memory.pointer.at(self.begin, self.nbytes)

    def argument(self, use: Use) -> Argument:
        """Return what a kernel is given that uses the elements so."""
        return use(self.pointer, self.nbytes)


AnyArray = Union[Array, GpuArray]


@dataclass
class _CopyBatch:
    """What is copied from elsewhere at once, to be added up."""

    tensors: list[list[AnyArray]]
    """Their parts and the sum, flat, whole or a run of each."""
    nbytes: int
    """What is not here of them."""


@dataclass(frozen=True)
class TensorColumn:
    """One array of each tensor of a list that a kernel goes over."""

    use: Use
    """What the kernel does with them."""
    addresses: Sequence[int]
    nbytes: Sequence[int]
    uses: Sequence[Uses] = ()
    """Of their memory; none for what a program has given a call with a plan (`arrays.plans`)."""

    @classmethod
    def of(cls, use: Use, arrays: Sequence[GpuArray]) -> TensorColumn:
        """Return a column of arrays."""
        return cls(use, *(list(map(read, arrays)) for read in (_ADDRESS, _NBYTES, _MEMORY)))

    @classmethod
    def within(cls, use: Use, bucket: GpuArray, sizes: Sequence[int]) -> TensorColumn:
        """Return a column of arrays that lie end to end in a flat one."""
        nbytes = [size * bucket.dtype.itemsize for size in sizes]
        addresses = list(itertools.accumulate(nbytes, initial=bucket.address))
        return cls(use, addresses[:-1], nbytes, [bucket.memory.uses])

    @classmethod
    def joined(cls, use: Use, columns: Sequence[TensorColumn]) -> TensorColumn:
        """Return the arrays of all columns as one."""
        addresses, nbytes, uses = (
            [each for column in columns for each in of(column)] for of in (_ADDRESSES, _NBYTES, _USES)
        )
        return cls(use, addresses, nbytes, uses)

    def some(self, numbers: Iterable[int]) -> TensorColumn:
        """Return the arrays of some tensors, by their numbers; the uses are those of all."""
        addresses, nbytes = ([of[number] for number in numbers] for of in (self.addresses, self.nbytes))
        return TensorColumn(self.use, addresses, nbytes, self.uses)


_ADDRESSES, _NBYTES, _USES = map(operator.attrgetter, ("addresses", "nbytes", "uses"))
_ADDRESS, _MEMORY = operator.attrgetter("address"), operator.attrgetter("memory.uses")
_SIZE, _DTYPE, _DEVICE = map(operator.attrgetter, ("size", "dtype", "device"))


@dataclass(frozen=True)
class _Listed:
    """A list of tensors as kernels take it. Its content follows from addresses and sizes."""

    memory: GpuArray
    """The addresses, the offsets, the flags."""
    table: Table
    offsets: Read
    flags: Read
    """Of arrays of two dtypes: for each a byte, 1 where it is float32."""
    tensors: np.int64
    """Those that have elements."""
    size: int
    """Elements of all tensors."""


class ListLaunch:
    """A kernel over a list of tensors that are on one device, to be launched once or many times.

    The kernel's parameters are a table of addresses, the offsets of the tensors' elements, scalars, and the number of
    tensors (`gpu_programs.sums` says how they are laid out).

    Arguments:
        columns: flat arrays, all of a tensor of one size, all of a column of one dtype.
        sizes: elements of each tensor.
    """

    def __init__(
        self,
        device: GpuDevice,
        program: Program,
        kernel: str,
        columns: Sequence[TensorColumn],
        sizes: Sequence[int],
    ) -> None:
        self._device = device
        self._loaded, self._kernel = device.load(program), kernel
        self._size = sum(sizes)
        # A plan keeps its own.
        self._listed = device._list(columns, sizes, is_kept=all(each.uses for each in columns))
        reads, writes = (
            tuple(dict.fromkeys(itertools.chain(*(each.uses for each in columns if (each.use is Read) is is_read))))
            for is_read in (True, False)
        )
        self._operation = device._order.using(device.work, (*reads, self._listed.memory.memory.uses), writes)

    def run(self, scalars: Sequence[np.generic]) -> None:
        """Launch the kernel."""
        device = self._device
        if self._size:
            listed = self._listed
            arguments: list[Argument] = [listed.table, listed.offsets, *scalars, listed.tensors]
            with self._operation:
                device._cuda.launch(self._loaded, self._kernel, arguments, self._size, device.work.stream)


class GpuDevice:
    """One device. Threads: any, but one at a time for an array that is written.

    Arguments:
        physical: the number by which CUDA knows the GPU.
        has_peers: copy directly from other GPUs where they allow it.
    """

    is_gpu = True

    def __init__(
        self,
        order: StreamOrdering,
        physical: int,
        name: str,
        locked: PageLocked,
        *,
        has_peers: bool = True,
    ) -> None:
        self.name = name
        self.physical = physical
        self.pool = GpuPool(order, physical)
        self.pool.advice = ADVICE
        self.locked = locked
        self._order = order
        self._cuda = order.cuda
        self._has_peers = has_peers
        self._peers: set[int] = {physical}
        """GPUs for which direct copies have been settled."""
        self._staging = Staging(order)
        self._lists: dict[object, _Listed] = {}
        """Those that were made before, unless a plan keeps them."""
        self.pool.before_trim.append(self._lists.clear)
        self.work, self._inward, self._outward = (
            order.queue(physical, what) for what in ("kernels", "copies in", "copies out")
        )
        self._loaded: dict[int, Loaded] = {}
        """By the program's id; it keeps the program."""
        self._loading = threading.Lock()

    def __repr__(self) -> str:
        return f"<GpuDevice {self.name}>"

    def prepare(self, dtypes: Iterable[DType]) -> None:
        """Have staging, and compile and load what arrays of these dtypes need: seconds, if nothing was compiled."""
        self._staging.prepare()
        for dtype in dtypes:
            kind, work = gpu_programs.kind_of(dtype), gpu_programs.kind_of(work_dtype(dtype))
            for pair in {(kind, kind), (kind, work), (work, kind)}:
                self.load(gpu_programs.sums(*pair))

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
            with self._order.using(self.work, writes=[array.memory.uses]):
                self._cuda.fill(array.pointer, 0, array.nbytes, self.work.stream)

    def put(self, array: AnyArray) -> GpuArray:
        """Return a copy here of an array of the host or of any GPU."""
        result = self.empty(array.shape, array.dtype)
        self.write(result, array)
        return result

    def write(self, into: GpuArray, array: AnyArray) -> None:
        """Copy an array of the host or of any GPU, of the same shape and dtype, to one that is here."""
        self._bring(array.reshape(-1), into.reshape(-1))

    def sum(self, parts: Sequence[AnyArray], out: GpuArray) -> None:
        """Write the sum of flat arrays, of anywhere, into `out`, added from first to last."""
        self.sums([(parts, out)])

    def sums(self, items: Iterable[tuple[Sequence[AnyArray], GpuArray]]) -> None:
        """Write several sums, as `sum` does each: those alike whose parts are here by one kernel."""
        here: list[tuple[Sequence[Any], GpuArray]] = []
        elsewhere: list[tuple[Sequence[AnyArray], GpuArray]] = []
        for parts, out in items:
            if out.size and not (len(parts) == 1 and parts[0] is out):
                (here if all(map(self._is_here, parts)) else elsewhere).append((parts, out))
        self._sums(here)
        for brought in self._by_ring(elsewhere):
            self._sums(brought)

    def gather(self, lists: Sequence[Sequence[AnyArray]], bucket: GpuArray) -> None:
        """Write the sums of tensors into a flat array that is here, end to end: by one kernel for a whole list.

        Tensors that follow each other and have equally many parts share a kernel. The table of their addresses stays
        on the device: with the same list again, nothing is copied there.

        Arguments:
            lists: the parts of each tensor, at least one, of one size and dtype and of any alignment; added from first
                to last, 16-bit floats in float32, and rounded once. Parts of other devices and of the host are
                copied here first, by the ring.
            bucket: as many elements as the tensors have; of their dtype or, for 16-bit floats, float32.

        Raises:
            ValueError: sizes or dtypes do not fit.
        """
        if not all(map(len, lists)):
            raise ValueError("a tensor has no parts")
        sizes, every = [parts[0].size for parts in lists], list(itertools.chain(*lists))
        if list(map(_SIZE, every)) != [size for size, parts in zip(sizes, lists, strict=True) for _ in parts]:
            raise ValueError("the parts of a tensor have different sizes")
        if len(set(map(_DTYPE, every))) > 1:
            raise ValueError("the tensors of a list have different dtypes")
        _check_size(sum(sizes), bucket)
        are_here = set(map(type, every)) == {GpuArray} and set(map(_DEVICE, every)) == {self}
        if bucket.size and are_here and len(set(map(len, lists))) == 1:
            columns = [TensorColumn.of(Read, cast(Any, column)) for column in zip(*lists, strict=True)]
            out = TensorColumn.within(Write, bucket, sizes)
            self.sum_lists(columns, [out], sizes, every[0].dtype, bucket.dtype)()
            return
        ends = itertools.pairwise(itertools.accumulate(sizes, initial=0))
        self.sums((parts, bucket[begin:end]) for parts, (begin, end) in zip(lists, ends, strict=True))

    def scatter(self, bucket: GpuArray, outs: Sequence[GpuArray]) -> None:
        """Write a flat array to tensors that are here, one after the other: the reverse of `gather`.

        Raises:
            ValueError: sizes or dtypes do not fit, or a tensor is not here.
        """
        if not all(self._is_here(out) and out.dtype == bucket.dtype for out in outs):
            raise ValueError(f"a bucket of {bucket.dtype} goes to tensors of this dtype on {self.name}")
        sizes = [out.size for out in outs]
        _check_size(sum(sizes), bucket)
        columns = [TensorColumn.within(Read, bucket, sizes)]
        self.sum_lists(columns, [TensorColumn.of(Write, outs)], sizes, bucket.dtype)()

    def sum_lists(
        self, parts: Sequence[TensorColumn], outs: Sequence[TensorColumn], sizes: Sequence[int], *dtypes: DType
    ) -> Callable[[], None]:
        """Return what writes the sum of each tensor of a list to each of its outs, whenever it is called.

        Arguments:
            parts: all of one dtype, added from first to last, 16-bit floats in float32.
            outs: an array of them may be one of the parts.
            dtypes: of the parts, and of the sums, if it is another one.
        """
        program = gpu_programs.sums(*map(gpu_programs.kind_of, (dtypes[0], dtypes[-1])))
        launch = ListLaunch(self, program, gpu_programs.sum_lists_of(len(parts)), [*parts, *outs], sizes)
        number = [np.int64(len(parts))] if len(parts) > gpu_programs.FEW else []
        return partial(launch.run, [*number, np.int64(len(outs))])

    def elements(self, frame: Buffer, dtype: DType) -> GpuArray:
        """Return a copy here of the elements of bytes, which may be overwritten when this returns; those of a frame
        that is on this GPU are not copied."""
        there: GpuArray | None = array_of(frame, dtype) if IN_USE else None
        if there is not None:
            return there if there.device is self else self.put(there)
        return self.put(np.frombuffer(frame, dtype) if memoryview(frame).nbytes else np.empty(0, dtype))

    def frame(self, array: GpuArray) -> Buffer:
        """Return a copy of the bytes of a flat array, in the host's memory."""
        return self.host(array).view(np.uint8).data

    def scale(self, array: GpuArray, factor: float) -> None:
        """Multiply an array of this device; 16-bit floats in float32, rounded once."""
        if not array.size:
            return
        kind = gpu_programs.kind_of(array.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            number = work_dtype(array.dtype).type(factor)
        if kind.startswith("u"):  # integers wrap around: the kernel takes the bits that count
            number = np.int64(int(number) - (1 << 64) if int(number) >= 1 << 63 else int(number))
        arguments: list[Argument] = [array.argument(Read), number, array.argument(Write)]
        self.launch(gpu_programs.sums(kind, kind), "scale", arguments, array.size, writes=[array])

    def host(self, array: GpuArray) -> Array:
        """Return a copy of an array as a numpy array."""
        result = np.empty(array.shape, array.dtype)
        self.read(array, result)
        return result

    def read(self, array: GpuArray, out: Array) -> None:
        """Copy an array that is here into a numpy array of the same shape and dtype, of any strides."""
        self.read_all([(array, out)])

    def read_all(self, pairs: Sequence[tuple[GpuArray, Array]]) -> None:
        """Copy arrays that are here, each into a numpy array of the same shape and dtype, of any strides.

        Page-locked memory is written directly, in pieces, other memory by way of staging. The host waits once, at the
        end, or for what goes by staging when a piece has to be taken from there.
        """
        staged: list[tuple[Memory, int, Array]] = []
        strided: list[tuple[Array, Array]] = []
        with self.locked.copies(self._outward) as copies:
            for array, out in pairs:
                if not out.flags.c_contiguous:
                    strided.append((out, np.empty(out.shape, out.dtype)))
                flat = (out if out.flags.c_contiguous else strided[-1][1]).reshape(-1).view(np.uint8)
                if not copies.takes(flat):
                    staged.append((array.memory, array.begin, flat))
                    continue
                for begin, size in _pieces(flat.nbytes):
                    with self._order.using(self._outward, reads=[array.memory.uses]):
                        source = array.memory.pointer.at(array.begin + begin, size)
                        self._cuda.copy(HostMemory(address_of(flat) + begin, size), source, size, self._outward.stream)
            self._staging.copy_out(staged, self._outward)
        for out, copy in strided:
            np.copyto(out, copy)

    def read_end_to_end(self, arrays: Sequence[GpuArray], out: Array) -> None:
        """Copy flat arrays that are here, one after the other, into bytes of the host: those of a dtype by one copy."""
        pairs, at = [], 0
        for dtype, some in itertools.groupby(arrays, operator.attrgetter("dtype")):
            its = list(some)
            source = its[0]
            if len(its) > 1:
                source = self.empty((sum(each.size for each in its),), dtype)
                self.gather([[each] for each in its], source)
            pairs.append((source, out[at : at + source.nbytes].view(dtype)))
            at += source.nbytes
        self.read_all(pairs)

    def write_all(self, pairs: Sequence[tuple[GpuArray, Array]]) -> None:
        """Copy numpy arrays, each to an array of the same shape and dtype that is here.

        When this returns, the numpy arrays may be overwritten; those that are read directly, page-locked ones, have
        been copied then. Of others a piece is copied to staging while the GPU copies the one before.
        """
        staged: list[tuple[Array, Memory, int]] = []
        with self.locked.copies(self._inward) as copies:
            for into, source in pairs:
                flat = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
                if not copies.takes(flat):
                    staged.append((flat, into.memory, into.begin))
                    continue
                for begin, size in _pieces(flat.nbytes):
                    with self._order.using(self._inward, writes=[into.memory.uses]):
                        target = into.memory.pointer.at(into.begin + begin, size)
                        self._cuda.copy(target, HostMemory(address_of(flat) + begin, size), size, self._inward.stream)
            self._staging.copy_in(staged, self._inward)

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
        loaded = self.load(program)
        with self._order.using(self.work, [each.memory.uses for each in reads], [each.memory.uses for each in writes]):
            for each in zeroed:
                self._cuda.fill(each.pointer, 0, each.nbytes, self.work.stream)
            self._cuda.launch(loaded, kernel, arguments, elements, self.work.stream)

    def load(self, program: Program) -> Loaded:
        """Return a program on this device, compiled and loaded: takes seconds, if it was not compiled before."""
        loaded = self._loaded.get(id(program))
        if loaded is None:
            self._cuda.check()
            with self._loading:
                loaded = self._loaded.get(id(program))
                if loaded is None:
                    loaded = self._loaded[id(program)] = self._cuda.load(program, self.physical)
        return loaded

    @property
    def failed(self) -> CudaError | None:
        """The error after which this process cannot use a GPU any more; None: there was none."""
        return self._cuda.failed

    def free_bytes(self) -> int:
        """Return how much of the GPU's memory no process has taken."""
        return self._cuda.memory(self.physical)[0]

    def synchronize(self) -> None:
        """Return when all work that was given to this device is over."""
        for queue in (self.work, self._inward, self._outward):
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
        self.write_all([(into, source)])

    def _bring_from_gpu(self, source: GpuArray, into: GpuArray) -> None:
        other = source.device.physical
        if other != self.physical and (source.memory.is_shared or into.memory.is_shared):
            self.write_all([(into, source.device.host(source))])
            return
        queue = self.work if source.device is self else self._inward
        if other not in self._peers:
            self._enable_peer(other)
            self._peers.add(other)
        with self._order.using(queue, reads=[source.memory.uses], writes=[into.memory.uses]):
            copy = self._cuda.copy if other == self.physical else self._cuda.copy_peer
            copy(into.pointer, source.pointer, into.nbytes, queue.stream)

    def _enable_peer(self, other: int) -> None:
        """Have copies from another GPU made directly, if that can be; else the driver makes them by way of the host."""
        if self._has_peers and self._cuda.can_access_peer(self.physical, other):
            try:
                self._cuda.enable_peer(self.physical, other)
            except CudaError as err:  # a GPU has only so many peers
                if err.is_sticky:
                    raise

    # Sums

    def _by_ring(
        self, items: Sequence[tuple[Sequence[AnyArray], GpuArray]]
    ) -> Iterator[list[tuple[Sequence[GpuArray], GpuArray]]]:
        """Copy parts of sums that are not here, and yield runs of the sums' elements: all parts here, and the out.

        At most `RING_TURNS` runs are on their way at a time, so each is used before the next one is asked for.
        """
        batches = list(self._batches(items, RING_BYTES // RING_TURNS))
        room_bytes = max((batch.nbytes for batch in batches), default=0)
        rooms = [self.empty((room_bytes,), np.dtype(np.uint8)) for _ in batches[:RING_TURNS]]
        for turn, batch in enumerate(batches):
            memory, used = rooms[turn % RING_TURNS].memory, 0
            from_host: list[tuple[GpuArray, Array]] = []
            brought: list[tuple[Sequence[GpuArray], GpuArray]] = []
            for *parts, out in batch.tensors:
                for number, part in enumerate(parts):
                    if not self._is_here(part):
                        place = parts[number] = GpuArray(self, memory, used, part.shape, part.dtype)
                        used += _padded(part.nbytes)
                        if isinstance(part, GpuArray):
                            self._bring_from_gpu(part, place)
                        else:
                            from_host.append((place, part))
                brought.append((cast("list[GpuArray]", parts), cast(GpuArray, out)))
            self.write_all(from_host)
            yield brought

    def _batches(self, items: Sequence[tuple[Sequence[AnyArray], GpuArray]], limit: int) -> Iterator[_CopyBatch]:
        """Yield runs of the sums' elements, of whose parts those that are not here take at most `limit` bytes."""
        batch = _CopyBatch([], 0)
        for parts, out in items:
            flats = [each.reshape(-1) for each in (*parts, out)]
            widths = [part.dtype.itemsize for part in parts if not self._is_here(part)]
            begin, end = 0, out.size
            while begin < end:
                nbytes = sum(_padded(width * (end - begin)) for width in widths)
                if batch.nbytes + nbytes <= limit:
                    batch.tensors.append([flat[begin:end] for flat in flats])
                    batch.nbytes += nbytes
                    break
                if batch.tensors:
                    yield batch
                    batch = _CopyBatch([], 0)
                    continue
                # Larger than the room: a part of it, whose end is aligned as its beginning is.
                size = max(1, limit // sum(widths) - ALIGNED)
                size -= size % ALIGNED if size > ALIGNED else 0
                yield _CopyBatch(
                    [[flat[begin : begin + size] for flat in flats]], sum(_padded(width * size) for width in widths)
                )
                begin += size
        if batch.tensors:
            yield batch

    def _list(
        self, columns: Sequence[TensorColumn], sizes: Sequence[int], flags: bytes = b"", *, is_kept: bool = True
    ) -> _Listed:
        """Return a list of tensors for a kernel.

        Arguments:
            flags: for each column a byte.
            is_kept: on the device it is made once, as long as it is kept.
        """
        if 0 in sizes:  # Kernels need none without elements.
            there = [number for number, size in enumerate(sizes) if size]
            sizes, columns = [sizes[number] for number in there], [each.some(there) for each in columns]
        uses = tuple([each.use for each in columns])
        key = (uses, flags, tuple(sizes), *[(tuple(each.nbytes[:1]), tuple(each.addresses)) for each in columns])
        found = self._lists.get(key)
        if found is None:
            head = np.array([*itertools.chain(*(each.addresses for each in columns)), 0, *sizes], np.uint64)
            np.cumsum(head[-len(sizes) :], out=head[-len(sizes) :])
            memory = self.put(np.frombuffer(head.tobytes() + flags, np.uint8))
            ends = list(itertools.accumulate([0, 8 * len(columns) * len(sizes), 8 * len(sizes) + 8, len(flags)]))
            places = [memory.pointer.at(begin, end - begin) for begin, end in itertools.pairwise(ends)]
            addresses = tuple(head[: len(columns) * len(sizes)].tolist())
            table = Table(places[0], uses, addresses, tuple(itertools.chain(*(each.nbytes for each in columns))))
            offsets, wide = (Read(each, each.nbytes) for each in places[1:])
            found = _Listed(memory, table, offsets, wide, np.int64(len(sizes)), int(head[-1]) if sizes else 0)
            if is_kept:
                kept = [each.memory.nbytes for each in list(self._lists.values())]
                if len(kept) >= LISTS or sum(kept) + memory.nbytes > LISTED_BYTES:
                    self._lists.clear()
                self._lists[key] = found
        return found

    def _sums(self, items: Iterable[tuple[Sequence[GpuArray], GpuArray]]) -> None:
        """Write sums of flat arrays that are all here."""
        alike: dict[tuple[DType, ...], list[tuple[Sequence[GpuArray], GpuArray]]] = {}
        for parts, out in items:
            alike.setdefault((out.dtype, *map(_DTYPE, parts)), []).append((parts, out))
        for (kind, *kinds), some in alike.items():
            if len(set(kinds)) > 1:
                for parts, out in some:
                    self._sum_mixed(parts, out)
            elif len(some) == 1 and len(kinds) <= gpu_programs.ALONE:
                ((parts, out),) = some
                program = gpu_programs.sums(*map(gpu_programs.kind_of, (kinds[0], kind)))
                used = [*(part.argument(Read) for part in parts), out.argument(Write)]
                self.launch(program, gpu_programs.sum_of(len(parts)), used, out.size, reads=parts, writes=[out])
            else:
                columns = [TensorColumn.of(Read, column) for column in zip(*(parts for parts, _ in some), strict=True)]
                outs = TensorColumn.of(Write, [out for _, out in some])
                self.sum_lists(columns, [outs], [out.size for _, out in some], kinds[0], kind)()

    def _sum_mixed(self, parts: Sequence[GpuArray], out: GpuArray) -> None:
        """Write the sum of parts of a 16-bit float and of float32."""
        half = next(part.dtype for part in parts if part.dtype.itemsize == 2)
        columns = [TensorColumn.of(Read, [part]) for part in parts]
        listed = self._list(columns, [out.size], bytes(part.dtype.itemsize == 4 for part in parts))
        arguments: list[Argument] = [listed.table, listed.flags, out.argument(Write), np.int64(len(parts))]
        program = gpu_programs.sums(*map(gpu_programs.kind_of, (half, out.dtype)))
        self.launch(program, "sum_mixed", arguments, out.size, reads=[*parts, listed.memory], writes=[out])


def _pieces(nbytes: int) -> list[tuple[int, int]]:
    """Return begin and size of the pieces in which so many bytes are copied."""
    count = -(-nbytes // PIECE_BYTES)
    ends = [nbytes * number // count for number in range(count + 1)]
    return [(begin, end - begin) for begin, end in itertools.pairwise(ends)]


def _check_size(size: int, bucket: GpuArray) -> None:
    if size != bucket.size:
        raise ValueError(f"tensors of {size} elements, and a bucket of {bucket.size}")


def _padded(nbytes: int) -> int:
    """Return the bytes that an array takes in the ring, so that the next one is aligned."""
    return -(-nbytes // 16) * 16
