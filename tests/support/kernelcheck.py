"""Kernels of rules beside numpy: numbers to try them with, memory at any address, comparison by bytes."""

from __future__ import annotations

from typing import Any

import cxx
import numpy as np
import numpy.typing as npt

from distrun_runtime.arrays.dtypes import narrow, widen, work_dtype
from distrun_runtime.arrays.gpu_programs import Access
from distrun_runtime.ops import fuse

Array = npt.NDArray[Any]

FLOATS = ("float32", "float64", "float16", "bfloat16")


def launch(step: fuse.FusedStep, arrays: dict[str, Array], compiled: cxx.Compiled, length: int) -> None:
    """Run a step's kernel; what it may only write is NaN before, what it may only read is as before afterwards."""
    pointers, read = [], {}
    for each in step.arrays:
        array = arrays[each.name]
        pointers.append(array.ctypes.data)
        if each.access is Access.WRITE:
            array.view(np.uint8)[:] = 255
        elif each.access is Access.READ:
            read[each.name] = array.copy()
    table, ends = np.array(pointers, np.uint64), np.array([0, length], np.int64)
    compiled(step.kernel.name, [table.ctypes.data, ends.ctypes.data, *step.scalars, np.int64(1)], length)
    for name, before in read.items():
        assert before.tobytes() == arrays[name].tobytes()


def values(random: np.random.Generator, length: int, dtype: np.dtype[Any], specials: bool = False) -> Array:
    """Numbers of a type; with what is special in floats, and numbers that overflow when they are squared."""
    if dtype.kind in "iu":
        return random.integers(0, 256, length).astype(dtype)
    result = random.normal(size=length).astype(work_dtype(dtype))
    result[random.random(length) < 0.1] = 0.0
    if specials:
        kinds = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, -1e-45, 1e-7, 6e-5, 3e38, -65504.0, 1e-20, 1e30])
        chosen = random.random(length) < 0.15
        with np.errstate(over="ignore"):
            result[chosen] = random.choice(kinds, size=int(chosen.sum())).astype(result.dtype)
    return narrow(result, dtype)


def placed(array: Array, elements: int) -> Array:
    """Return a copy at an address that is `elements` behind one that 16 divides."""
    room = np.empty(array.nbytes + 16 + elements * array.itemsize, np.uint8)
    start = -room.ctypes.data % 16 + elements * array.itemsize
    result = room[start : start + array.nbytes].view(array.dtype)
    result[:] = array
    return result


def same(found: Array, expected: object, what: str) -> None:
    """Compare bytes; of NaN only that they are there."""
    assert isinstance(expected, np.ndarray)
    if expected.dtype.kind in "iu":
        assert found.tobytes() == expected.tobytes(), what
        return
    wrong = np.isnan(widen(found)) != np.isnan(widen(expected))
    bits = np.dtype(f"u{expected.itemsize}")
    wrong |= (found.view(bits) != expected.view(bits)) & ~np.isnan(widen(expected))
    assert not wrong.any(), f"{what}: {widen(found)[wrong][:3]} instead of {widen(expected)[wrong][:3]}"
