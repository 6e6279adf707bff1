"""Element types: which there are, their names, and bfloat16, which numpy does not know.

A bfloat16 array is a numpy array of `BFLOAT16`, a structured dtype of one 16-bit field: it can be stored, copied and
sent like any other and is never taken for uint16, but numpy refuses arithmetic on it. `widen` gives float32 to
calculate with, `narrow` brings the result back.

Source: bfloat16 is the upper half of an IEEE 754 binary32; `narrow` rounds to nearest, ties to even, as hardware and
torch do, and keeps NaN quiet. We need no other package for this; arrays of `ml_dtypes` and torch are viewed as it.

float16 is IEEE 754 binary16. It is converted by its bits, because numpy's own casts take up to 40 times as long where
values are below 6.1e-5 (float16's subnormal range), as most gradients are late in training. A compiled loop converts it
where there is one (`compiled`), else numpy in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Union

import numpy as np
import numpy.typing as npt

from distrun_runtime.arrays import compiled

Array = npt.NDArray[Any]
"""A numpy array of any shape and dtype."""

DType = np.dtype[Any]

Buffer = Union[bytes, bytearray, memoryview]
"""Bytes in the host's memory."""

BFLOAT16: DType = np.dtype([("bfloat16", "<u2")])
"""The dtype of bfloat16 arrays."""
_HALVES = (np.dtype(np.float16), BFLOAT16)

NAMES = (
    *("float16", "bfloat16", "float32", "float64"),
    *("int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
)
"""What a store can hold."""

ALIGNED = 16
"""Elements: runs of so many begin and end with 16 bytes, whatever the dtype."""


def owner_of(view: Buffer | Array) -> object:
    """Return what an array or buffer is a view of in the end: what has the memory."""
    root: object = view
    while isinstance(root, (np.ndarray, memoryview)):
        root = root.base if isinstance(root, np.ndarray) else root.obj
    return root


@lru_cache(maxsize=256)  # numpy makes up a dtype's name each time, slowly
def name_of(dtype: DType) -> str:
    """Return a dtype's name, as in `NAMES` where it is one of them."""
    return "bfloat16" if dtype == BFLOAT16 else dtype.name


def parse(name: str) -> DType:
    """Return the dtype of a name of `NAMES`.

    Raises:
        ValueError: there is none.
    """
    if name not in NAMES:
        raise ValueError(f"no element type {name!r}; known are {', '.join(NAMES)}")
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def is_float(dtype: DType) -> bool:
    """Tell whether it is a floating-point type, bfloat16 included."""
    return dtype.kind == "f" or dtype == BFLOAT16


def exact_below(dtype: DType) -> int:
    """Return the number from which on a floating-point type rounds whole numbers: 16,777,216 for float32.

    That number may itself be one that was rounded, such as 16,777,217.
    """
    return 2 ** (8 if dtype == BFLOAT16 else np.finfo(dtype).nmant + 1)


def work_dtype(dtype: DType) -> DType:
    """Return the dtype to calculate in: float32 for 16-bit floats, else the dtype itself."""
    return np.dtype(np.float32) if dtype in _HALVES else dtype


def widen(array: Array) -> Array:
    """Return the array in its `work_dtype`: a new float32 array for 16-bit floats, else the array itself."""
    if array.dtype not in (np.dtype(np.float16), BFLOAT16):
        return array
    flat, result = np.ascontiguousarray(array).reshape(-1), np.empty(array.size, np.float32)
    if array.dtype == np.float16:
        from_half(flat, result)
    else:
        bits = result.view(np.uint32)
        bits[...] = flat.view(np.uint16)
        bits <<= np.uint32(16)
    return result.reshape(array.shape)


def narrow(array: Array, dtype: DType) -> Array:
    """Return the array in `dtype`, rounded to nearest even; the array itself if that is its dtype.

    Arguments:
        array: of `work_dtype(dtype)`, any shape.
    """
    if array.dtype == dtype:
        return array
    if dtype != BFLOAT16 and (dtype != np.float16 or array.dtype != np.float32):
        with np.errstate(over="ignore", invalid="ignore"):
            return array.astype(dtype)
    flat, result = np.ascontiguousarray(array, np.float32).reshape(-1), np.empty(array.size, dtype)
    (_to_bfloat16 if dtype == BFLOAT16 else to_half)(flat, result)
    return result.reshape(array.shape)


def to_half(values: Array, out: Array) -> None:
    """Write flat float32 `values` to `out`, flat float16, rounded to nearest even; NaN stays a quiet NaN."""
    if compiled.call("narrow_half", values, out.view(np.uint16)):
        return
    if values.size <= _FEW and not np.isnan(values).any():  # numpy leaves other bits in a NaN
        with np.errstate(all="ignore"):
            out[...] = values
        return
    flat, result = values.view(np.uint32), out.view(np.uint16)
    rooms = np.empty((2, min(_BLOCK, flat.size)), np.uint32)
    for start in range(0, flat.size, _BLOCK):
        bits = flat[start : start + _BLOCK]
        _block_to_half(bits, result[start : start + _BLOCK], *rooms[:, : bits.size])


def from_half(halves: Array, out: Array, adds: bool = False) -> None:
    """Write flat float16 `halves` to `out`, flat float32, or add them to it."""
    if compiled.call("widen_half", halves.view(np.uint16), out, adds):
        return
    if halves.size <= _FEW and not adds:
        out[...] = halves
        return
    bits, table = halves.view(np.uint16), _all_halves()
    # An overflowing sum is the training's affair (loss scaling looks for inf): no warning here.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, bits.size, _BLOCK):
            run = slice(start, start + _BLOCK)
            if adds:
                out[run] += np.take(table, bits[run])
            else:  # every index is in the table: nothing is clipped
                np.take(table, bits[run], out=out[run], mode="clip")


def _to_bfloat16(values: Array, out: Array) -> None:
    """Write flat float32 `values` to `out`, flat bfloat16, rounded to nearest even."""
    flat, result = values.view(np.uint32), out.view(np.uint16)
    room = np.empty(min(_BLOCK, flat.size), np.uint32)
    for start in range(0, flat.size, _BLOCK):
        bits = flat[start : start + _BLOCK]
        halves = np.right_shift(bits, np.uint32(16), out=room[: bits.size])
        halves &= np.uint32(1)
        halves += np.uint32(0x7FFF)
        halves += bits
        halves >>= np.uint32(16)
        nans = np.isnan(bits.view(np.float32))
        if nans.any():
            halves[nans] = (bits[nans] >> np.uint32(16)) | np.uint32(0x0040)
        result[start : start + _BLOCK] = halves


# float16. A float32 x whose power of two is 2^e has as float16 the quantum 2^(e-10), and 2^-24 below 2^-14. Added to
# 2^(e+13), a float32 whose last bit is that quantum, x is rounded to it by the processor: to nearest even, and with a
# carry into the next power of two where there is one. The bits of the sum count the quanta. No intermediate result is
# subnormal, so nothing here is slow for small numbers.

_BLOCK = 1 << 15
"""Elements that are converted before the next: all intermediate results stay in the processor's cache."""
_FEW = 128
"""Up to so many elements numpy's cast is faster, also at its worst."""
_INFINITE = np.uint32(0x7F800000)
_BEYOND = np.uint32(0x47800000)
"""Bits of 2^16, above all float16 numbers: it is converted to infinity, as every number above it is to be."""
_LEAST = np.uint32(0x38800000)
"""Bits of 2^-14, the smallest float16 number that is not subnormal."""
_SHIFT = np.uint32(13)
"""Bits that a float32 has more than a float16 behind the point."""
_RAISED = np.uint32(13 << 23)
"""What makes bits of 2^e those of 2^(e+13)."""


def _block_to_half(bits: Array, result: Array, sizes: Array, powers: Array) -> None:
    """Convert bits of float32 to bits of float16; `sizes` and `powers` are room for intermediate results."""
    np.bitwise_and(bits, np.uint32(0x7FFFFFFF), out=sizes)
    largest, nans = sizes.max(), None
    if largest > _INFINITE:
        nans = np.flatnonzero(sizes > _INFINITE)
        quiet = (sizes[nans] >> _SHIFT) & np.uint32(0x03FF) | np.uint32(0x7E00)
    if largest > _BEYOND:
        np.minimum(sizes, _BEYOND, out=sizes)
    np.bitwise_and(sizes, _INFINITE, out=powers)
    np.maximum(powers, _LEAST, out=powers)
    powers += _RAISED
    np.add(sizes.view(np.float32), powers.view(np.float32), out=sizes.view(np.float32))
    sizes -= powers
    # The quanta of a number that is not subnormal are from 1024 to 2048: its exponent counts from one less.
    powers -= _LEAST + _RAISED
    powers >>= _SHIFT
    sizes += powers
    if nans is not None:
        sizes[nans] = quiet
    np.bitwise_and(bits, np.uint32(0x80000000), out=powers)
    powers >>= np.uint32(16)
    np.bitwise_or(sizes, powers, out=sizes)
    result[...] = sizes


@lru_cache(maxsize=1)
def _all_halves() -> Array:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


RELEASED = 500
"""numpy gives up the interpreter's lock while it copies more elements than this."""
_HELD_BYTES = 16 * 1024 * 1024
"""Copying so many takes less than the time after which Python hands the lock over (5 ms)."""


def copy(source: Array, target: Array) -> None:
    """Copy the elements of an array to another of its shape and dtype, without giving up the interpreter's lock.

    If it is given up beside a busy Python thread, it is back 5 ms later (`sys.getswitchinterval`): for a list of
    arrays that would take longer than copying them. Arrays that are not contiguous, or very large, are left to numpy.
    """
    if source.nbytes <= _HELD_BYTES and source.flags.c_contiguous and target.flags.c_contiguous:
        target.reshape(-1).view(np.uint8).data[:] = source.reshape(-1).view(np.uint8).data
    else:
        target[...] = source


CACHED_BYTES = 1020 * 1024
"""Copies of so many bytes are written by way of the processor's caches; larger ones may not be (`distrun.planning`)."""


def cached_pieces(run: slice, itemsize: int) -> Iterator[slice]:
    """Yield a run of elements in pieces of at most `CACHED_BYTES`, and of at least half as much if it has that. No side
    effects."""
    size = run.stop - run.start
    count = max(1, -(-size * itemsize // CACHED_BYTES))
    for number in range(count):
        yield slice(run.start + size * number // count, run.start + size * (number + 1) // count)


def copy_fresh(source: Array, target: Array) -> None:
    """As `copy`, of what another process has just written.

    It is in the cache of that one's core. A copy from there that is written past the caches takes twice as long as one
    that is not; with what is in memory it is the other way round.
    """
    if source.flags.c_contiguous and target.flags.c_contiguous:
        source, target = source.reshape(-1), target.reshape(-1)
        for piece in cached_pieces(slice(0, len(source)), source.itemsize):
            copy(source[piece], target[piece])
    else:
        target[...] = source
