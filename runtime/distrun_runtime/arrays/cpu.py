"""Devices in the host's memory: cpu:0, cpu:1 ... have separate buffers and share the processors.

With several of them, everything that a worker with several GPUs does can be run, and tested, without one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.device import Buffer
from distrun_runtime.arrays.dtypes import Array, DType
from distrun_runtime.arrays.segments import Pool

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

__all__ = ["CpuDevice", "Threads"]

CHUNK = 1 << 15
"""Elements that are added up before the next: a chunk of the sum stays in the processor's cache."""


class Threads:
    """Who shares the work on large arrays: `count` threads, for arrays of at least `bound` elements.

    The threads start with the first such array. Every element is calculated alike by each of them.
    """

    def __init__(self, count: int = 1, bound: int = 1000000) -> None:
        self.count = count
        self.bound = bound
        self._pool: ThreadPoolExecutor | None = None
        self._inside = threading.local()

    def split(self, size: int, work: Callable[[slice], None]) -> None:
        """Call `work` with slices that make up range(size), in parallel if there are enough elements."""
        if self.count < 2 or size < self.bound or getattr(self._inside, "is_one", False):
            work(slice(0, size))
            return
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor  # with logging

            self._pool = ThreadPoolExecutor(self.count, "distrun-reduce", self._begin)
        ends = [size * part // self.count for part in range(self.count + 1)]
        runs = [slice(start, end) for start, end in itertools.pairwise(ends)]
        # list: what a thread raised is raised here.
        list(self._pool.map(work, runs))

    def _begin(self) -> None:
        # Work that is shared already is not shared again: all threads might wait for each other.
        self._inside.is_one = True


class CpuDevice:
    """One set of buffers in host memory; its arrays are numpy's."""

    is_gpu = False

    def __init__(self, index: int = 0, threads: Threads | None = None, memory: Pool | None = None) -> None:
        self.name = f"cpu:{index}"
        self._threads = threads or Threads()
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

    def total(self, arrays: Sequence[Array]) -> Array:
        """Return the sum of at least one array as a new array, added from first to last.

        Integers wrap around as numpy's do; floats become inf.
        """
        first = arrays[0]
        result = np.empty(first.shape, first.dtype)
        flats = [array.reshape(-1) for array in arrays]  # Views of contiguous arrays, copies of others.
        out = result.reshape(-1)
        self._threads.split(first.size, lambda run: _sum([flat[run] for flat in flats], out[run]))
        return result

    def add(self, into: Array, array: Array) -> None:
        """Add an array of the same shape and dtype to one of this device."""
        flat, other = into.reshape(-1), array.reshape(-1)
        self._threads.split(into.size, lambda run: _sum([flat[run], other[run]], flat[run]))

    def sum(self, parts: Sequence[Array], out: Array) -> None:
        """Write the sum of flat arrays into `out`, added from first to last."""
        if len(parts) == 1 and parts[0] is out:
            return
        self.split(len(out), lambda run: _sum([part[run] for part in parts], out[run]))

    def split(self, size: int, work: Callable[[slice], None]) -> None:
        """Call `work` with slices that make up range(size), on several threads if there are enough elements."""
        self._threads.split(size, work)

    def elements(self, frame: Buffer, dtype: DType) -> Array:
        """Return the elements of bytes: a read-only view of them."""
        return np.frombuffer(frame, dtype) if memoryview(frame).nbytes else np.empty(0, dtype)

    def frame(self, array: Array) -> Buffer:
        """Return the bytes of a flat array: a view of them."""
        return array.view(np.uint8).data

    def scale(self, array: Array, factor: float) -> None:
        """Multiply an array of this device."""
        with np.errstate(over="ignore", invalid="ignore"):
            wide = dtypes.widen(array)
            array[...] = dtypes.narrow(np.multiply(wide, wide.dtype.type(factor)), array.dtype)

    def host(self, array: Array) -> Array:
        """Return the array itself: it is in host memory."""
        return array

    def read(self, array: Array, out: Array) -> None:
        """Copy an array of this device into another."""
        np.copyto(out, array)


def _sum(parts: Sequence[Array], out: Array) -> None:
    # An overflowing half-precision gradient is the training's affair (loss scaling looks for inf): no warning here.
    with np.errstate(over="ignore", invalid="ignore"):
        is_plain = dtypes.work_dtype(out.dtype) == out.dtype and all(part.dtype == out.dtype for part in parts)
        if is_plain and len(parts) == 1:
            out[...] = parts[0]
        elif is_plain and len(parts) == 2:
            np.add(parts[0], parts[1], out=out)
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
