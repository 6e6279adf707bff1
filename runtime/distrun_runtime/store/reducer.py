"""The sum of a worker's device values of each key, made by the host's threads or on one of the devices.

Both give the same sums: from the first device to the last, 16-bit floats in float32. A sum for servers is rounded to
the key's dtype, in which it is sent; a sum for this process stays float32.

    Reducer         sums in host memory; what is on GPUs is copied there before
    DeviceReducer   sums where the values are; a distributed store then gets the sums in host memory

Source: the placement is MXNet's (`CommDevice::InitMergeBuffer`): keys by size, the largest first, each to the device
that has the fewest elements so far.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np

from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays.cores import Threads, threads_here
from distrun_runtime.arrays.device import DeviceArray, is_on_host
from distrun_runtime.arrays.dtypes import Array, DType, name_of, work_dtype
from distrun_runtime.arrays.gpu_frames import IN_USE
from distrun_runtime.contract import environ
from distrun_runtime.errors import KVError
from distrun_runtime.ps.routing import SMALL_CALL_BYTES
from distrun_runtime.store.compress import Compressor
from distrun_runtime.store.keys import Key, KeyRecord, is_dist, named, on_devices
from distrun_runtime.store.values import RowSparse, Value

if TYPE_CHECKING:  # Most processes use no GPU.
    from distrun_runtime.arrays.gpu import GpuArray, GpuDevice
    from distrun_runtime.arrays.gpu_sharing import ReadExports


Memory = Callable[["tuple[int, ...]", DType], Array]
"""Makes an array in host memory, of undefined content."""


def reducer_for(type_name: str, memory: Memory = np.empty, compressor: Compressor | None = None) -> Reducer:
    """Return the reducer of a kind of store, set up by the environment.

    Arguments:
        memory: makes the arrays that values of GPUs are copied to.
        compressor: the store's.
    """
    count = threads_here()  # now: a wrong DISTRUN_COPY_THREADS is said before any call needs it
    most = environ.read("MXNET_KVSTORE_REDUCTION_NTHREADS") or count
    bound = 4 * environ.read("MXNET_KVSTORE_BIGARRAY_BOUND")  # bytes of so many float32
    threads = Threads(min(count, most), bound)
    if not on_devices(type_name):
        return Reducer(threads, memory, is_shared=is_dist(type_name))
    return DeviceReducer(threads, memory, compressor, is_shared=is_dist(type_name))


def is_gpu_array(value: object) -> TypeGuard[DeviceArray]:
    """Tell whether a value is a `gpu.GpuArray`."""
    return not is_on_host(value) and not isinstance(value, RowSparse)


class Reducer:
    """Sums by the host's threads. Threads: any may call.

    Arguments:
        is_shared: whether the sums are for servers.
    """

    def __init__(self, threads: Threads, memory: Memory = np.empty, *, is_shared: bool = True) -> None:
        self.host = devices.get("cpu:0", threads)
        """The device in host memory on which sums are made."""
        self._memory = memory
        self._is_shared = is_shared
        self.exports: Callable[[GpuDevice], ReadExports | None] = lambda gpu: None
        """Returns memory of a GPU that all servers read where it is; None: not all do."""
        self.prepares: list[Callable[[GpuDevice, DType], None]] = []
        """Have ready what else a GPU needs for keys of a dtype: that of codecs, and of a rule."""

    @property
    def seen(self) -> list[GpuDevice]:
        """The GPUs that values were on so far, and those that the program used at an `init`, if sums are made there."""
        return []

    def prepare(self, records: Iterable[KeyRecord]) -> None:
        """Have ready what values of these keys need on GPUs: no push waits for a compiler.

        These are the GPUs that the program uses, and those whose values come later. Call it before the keys are
        initialised, in the thread whose call that is. Row-sparse keys need nothing.

        Raises:
            KVError: a kernel does not compile, or a GPU has failed; names a key. No store was changed.
        """

    def trim(self) -> None:
        """Give memory of GPUs back that nothing uses, as the store is closed."""

    def reduce(self, items: Sequence[tuple[KeyRecord, Sequence[Value]]]) -> list[Value]:
        """Return the sum of each key's values, which fit its record and are of its storage kind.

        A single value is returned as it is (a RowSparse: canonical; one on a GPU: in host memory); every other sum is
        new. In the key's dtype, or for this process in its work dtype.

        Raises:
            KVError: a value cannot be compressed, and nothing was changed; or a GPU has failed, and no weight was
                changed (of residuals see `DeviceReducer`).
        """
        values = iter(self._on_host([value for _, each in items for value in each]))
        return [self._sum(record, [next(values) for _ in each]) for record, each in items]

    def check(self, items: Sequence[tuple[KeyRecord, Sequence[Value]]]) -> None:
        """Return if `reduce` would take these values; nothing is changed.

        Raises:
            KVError: a value cannot be compressed.
        """

    def _sum(self, record: KeyRecord, values: Sequence[Value]) -> Value:
        rows = [value for value in values if isinstance(value, RowSparse)]
        if rows:
            return RowSparse.total(rows, self._dtype(record))
        if len(values) == 1:
            return values[0]
        total = np.empty(record.shape, self._dtype(record))
        # Views of contiguous arrays, copies of others.
        self.host.sum([cast(Array, value).reshape(-1) for value in values], total.reshape(-1))
        return total

    def _dtype(self, record: KeyRecord) -> DType:
        """Return the dtype of a key's sums."""
        return record.dtype if self._is_shared else work_dtype(record.dtype)

    def _on_host(self, values: Sequence[Value]) -> list[Value]:
        """Return values with copies in host memory of those that are on GPUs, which lie end to end by dtype."""
        result = list(values)
        by_dtype: dict[DType, list[int]] = {}
        for number, value in enumerate(values):
            if is_gpu_array(value):
                by_dtype.setdefault(value.dtype, []).append(number)
        for dtype, numbers in by_dtype.items():
            given: list[DeviceArray] = [values[number] for number in numbers]
            memory, at = self._memory((sum(each.size for each in given),), dtype), 0
            for number, each in zip(numbers, given, strict=True):
                result[number] = memory[at : at + each.size].reshape(each.shape)
                at += each.size
            _read(given, memory)
        return result


class DeviceReducer(Reducer):
    """Sums each key on the device that its placement gives it; with compression, of what each device sends there.

    A key that has values on GPUs is summed on one of these: what lies elsewhere is copied there, piece by piece.

    Arguments:
        compressor: compresses sums for servers, where they were made; for this process each device's contribution.
        is_shared: whether the sums are for servers. If so they are in host memory, but for those that will be
            compressed; else they are where they were made.
    """

    def __init__(
        self,
        threads: Threads,
        memory: Memory = np.empty,
        compressor: Compressor | None = None,
        *,
        is_shared: bool = True,
    ) -> None:
        super().__init__(threads, memory, is_shared=is_shared)
        self._compressor = compressor or Compressor()
        self.prepares.append(self._compressor.prepare)
        self.gpus = SumDevices()
        """Where sums are made of values that are on GPUs."""
        self._dtypes: dict[DType, Key] = {}
        """Of all keys that are known; the first one of each."""
        self._ready: dict[GpuDevice, set[DType]] = {}
        """The GPUs that are `seen`, and what each has kernels for."""
        self._lock = threading.Lock()

    @property
    def seen(self) -> list[GpuDevice]:
        """The GPUs that values were on so far, and those that the program used at an `init`."""
        with self._lock:
            return list(self._ready)

    def prepare(self, records: Iterable[KeyRecord]) -> None:
        """Have ready what values of these keys need on GPUs that the program uses."""
        self._prepare(devices.in_use(), _by_dtype(records))

    def trim(self) -> None:
        """Give memory of GPUs back that nothing uses, as the store is closed."""
        for gpu in self.seen:
            with suppress(KVError):  # One that has failed gives nothing back before the process ends.
                gpu.pool.trim()

    def reduce(self, items: Sequence[tuple[KeyRecord, Sequence[Value]]]) -> list[Value]:
        """Return the sum of each key's values.

        All values are checked before a residual changes. If a GPU fails after that, such as for lack of memory, the
        residuals of contributions that were compressed before have what their payloads left out, and what these
        carried is lost.
        """
        self._prepare_for(items)
        if self._is_shared:
            return self._for_servers(items)
        self.check(items)  # All of them, before any residual changes.
        return self._sums([(record, self._compressed(record, values)) for record, values in items])

    def check(self, items: Sequence[tuple[KeyRecord, Sequence[Value]]]) -> None:
        """Return if `reduce` would take these values; nothing is changed."""
        if self._is_shared or not self._compressor.is_on:
            return
        self._prepare_for(items)
        # A device's residual belongs to one contribution at a time.
        with self._lock:
            self._compressor.check_all(
                (record, value.reshape(-1), device)
                for record, values in items
                for device, value in enumerate(values)
                if not isinstance(value, RowSparse)
            )

    def _for_servers(self, items: Sequence[tuple[KeyRecord, Sequence[Value]]]) -> list[Value]:
        """Return sums in host memory, but for those on GPUs that are compressed there."""
        sums = self._sums(items)
        if not self._compressor.is_on:
            return sums if IN_USE and all(map(_is_exported, sums)) else self._on_host(sums)
        stay = [
            is_gpu_array(total) and self._compressor.of(record) for (record, _), total in zip(items, sums, strict=True)
        ]
        there = iter(self._on_host([total for total, stays in zip(sums, stay, strict=True) if not stays]))
        return [total if stays else next(there) for total, stays in zip(sums, stay, strict=True)]

    def _compressed(self, record: KeyRecord, values: Sequence[Value]) -> Sequence[Value]:
        if self._compressor.of(record) is None:
            return values
        with self._lock:
            return [
                self._compressor.through(record, value.reshape(-1), device).reshape(record.shape)
                if not isinstance(value, RowSparse)
                else value
                for device, value in enumerate(values)
            ]

    def _sums(self, items: Sequence[tuple[KeyRecord, Sequence[Value]]]) -> list[Value]:
        """Return the sums. Those that one GPU makes of values of one dtype lie end to end, made by one kernel."""
        result: list[Value] = []
        together: dict[tuple[GpuDevice, DType], list[int]] = {}
        # A single value is copied only if it is to be sent.
        gpus = [
            [value.device for value in values if is_gpu_array(value)] if len(values) > 1 or self._is_shared else []
            for _, values in items
        ]
        with self._lock:
            places = self.gpus.choose([record for record, _ in items], gpus)
        for number, ((record, values), gpu) in enumerate(zip(items, places, strict=True)):
            if gpu is not None and record.size:
                together.setdefault((gpu, record.dtype), []).append(number)
            result.append(self._sum(record, values) if gpu is None else values[0])
        is_large = self._is_shared and sum(each.size * each.dtype.itemsize for each, _ in items) >= SMALL_CALL_BYTES
        for (gpu, _), numbers in together.items():
            its = [items[number] for number in numbers]
            try:
                shape, dtype = (sum(record.size for record, _ in its),), self._dtype(its[0][0])
                exports = self.exports(gpu) if is_large and not self._compressor.is_on else None
                bucket = exports.empty(shape, dtype) if exports is not None else None
                if bucket is None:
                    bucket = gpu.empty(shape, dtype)
                gpu.gather([cast("Sequence[Array]", values) for _, values in its], bucket)
            except KVError as err:
                raise KVError(f"{named((record.key for record, _ in its))}: {err}") from err
            at = 0
            for number, (record, _) in zip(numbers, its, strict=True):
                result[number] = cast(Any, bucket[at : at + record.size].reshape(record.shape))
                at += record.size
        return result

    def _prepare_for(self, items: Sequence[tuple[KeyRecord, Sequence[Value]]]) -> None:
        """Prepare the GPUs of these values, if they are new, for all keys that are known: only one push waits."""
        gpus = dict.fromkeys(value.device for _, values in items for value in values if is_gpu_array(value))
        if gpus:
            self._prepare(gpus, _by_dtype(record for record, _ in items))

    def _prepare(self, gpus: Iterable[GpuDevice], dtypes: Mapping[DType, Key]) -> None:
        """Compile and load what values of these dtypes, and of all that are known, need on GPUs."""
        with self._lock:
            wanted = {**dtypes, **self._dtypes}
            missing = [
                (gpu, dtype) for gpu in gpus for dtype in wanted if dtype not in self._ready.setdefault(gpu, set())
            ]
        for gpu, dtype in missing:
            try:
                gpu.prepare({dtype} if self._is_shared else {dtype, work_dtype(dtype)})
                for prepare in self.prepares:
                    prepare(gpu, dtype)
            except KVError as err:
                raise KVError(f"key {wanted[dtype]!r} ({name_of(dtype)}): {err}") from err
            with self._lock:
                self._ready[gpu].add(dtype)
        with self._lock:
            self._dtypes = wanted


class SumDevices:
    """Which device each key's sum is made on. Threads: one at a time."""

    def __init__(self) -> None:
        self._places: dict[Key, Any] = {}
        self._loads: dict[Any, int] = defaultdict(int)
        """Elements of all keys that were given to a device."""

    def choose(self, records: Sequence[KeyRecord], given: Sequence[Sequence[Any]]) -> list[Any]:
        """Return where each key's sum is made; None where no device has values.

        Keys that are new come by size, the largest first, each to the device that has the fewest elements so far, of
        equal ones to the first. They stay there as long as it has values of them.

        Arguments:
            given: the devices that have values of each key.
        """
        for record, its in sorted(zip(records, given, strict=True), key=lambda item: -item[0].size):
            if its and record.key not in self._places:
                chosen = self._places[record.key] = min(its, key=self._loads.__getitem__)
                self._loads[chosen] += record.size
        places = [self._places.get(record.key) for record in records]
        return [
            place if place in its else min(its, key=self._loads.__getitem__, default=None)
            for place, its in zip(places, given, strict=True)
        ]


def _is_exported(value: Value) -> bool:
    """Tell whether a sum is where servers read it on a GPU."""
    from distrun_runtime.arrays.gpu_sharing import is_exported  # most processes use no GPU

    return is_gpu_array(value) and is_exported(value)


def _by_dtype(records: Iterable[KeyRecord]) -> dict[DType, Key]:
    """Return the dtypes of keys whose values may be on GPUs, each with its first key."""
    dense = [record for record in records if not record.is_sparse]
    return {record.dtype: record.key for record in reversed(dense)}  # so a dtype's first key stays


def end_to_end(arrays: Iterable[DeviceArray]) -> list[GpuArray]:
    """Return arrays of GPUs as flat ones; those that follow each other in memory are one."""
    found: list[GpuArray] = []
    for array in arrays:
        last = found[-1] if found else None
        if last is not None and array.memory is last.memory and array.begin == last.begin + last.nbytes:
            found[-1] = type(last)(last.device, last.memory, last.begin, (last.size + array.size,), last.dtype)
        else:
            found.append(array.reshape(-1))
    return found


def _read(arrays: Sequence[DeviceArray], out: Array) -> None:
    """Copy arrays of GPUs to host memory, one after the other; what lies end to end on its GPU, at once."""
    pairs: dict[GpuDevice, list[tuple[GpuArray, Array]]] = {}
    at = 0
    for run in end_to_end(arrays):
        pairs.setdefault(run.device, []).append((run, out[at : at + run.size]))
        at += run.size
    for gpu, its in pairs.items():
        gpu.read_all(its)
