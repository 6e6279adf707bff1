"""Element types: which there are, their names, and bfloat16, which numpy does not know.

A bfloat16 array is a numpy array of `BFLOAT16`, a structured dtype of one 16-bit field: it can be stored, copied and
sent like any other and is never taken for uint16, but numpy refuses arithmetic on it. `widen` gives float32 to
calculate with, `narrow` brings the result back.

Source: bfloat16 is the upper half of an IEEE 754 binary32; `narrow` rounds to nearest, ties to even, as hardware and
torch do, and keeps NaN quiet. We need no other package for this; arrays of `ml_dtypes` and torch are viewed as it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BFLOAT16", "NAMES", "Array", "DType", "is_float", "name_of", "narrow", "parse", "widen", "work_dtype"]

Array = npt.NDArray[Any]
"""A numpy array of any shape and dtype."""

DType = np.dtype[Any]

BFLOAT16: DType = np.dtype([("bfloat16", "<u2")])
"""The dtype of bfloat16 arrays."""

NAMES = (
    *("float16", "bfloat16", "float32", "float64"),
    *("int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
)
"""What a store can hold."""


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
        raise ValueError("no element type %r; known are %s" % (name, ", ".join(NAMES)))
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def is_float(dtype: DType) -> bool:
    """Tell whether it is a floating-point type, bfloat16 included."""
    return dtype.kind == "f" or dtype == BFLOAT16


def work_dtype(dtype: DType) -> DType:
    """Return the dtype to calculate in: float32 for 16-bit floats, else the dtype itself."""
    return np.dtype(np.float32) if dtype in (np.dtype(np.float16), BFLOAT16) else dtype


def widen(array: Array) -> Array:
    """Return the array in its `work_dtype`: a new float32 array for 16-bit floats, else the array itself."""
    if array.dtype == BFLOAT16:
        bits = np.ascontiguousarray(array).view(np.uint16).astype(np.uint32) << np.uint32(16)
        wide: Array = bits.view(np.float32).reshape(array.shape)
        return wide
    return array.astype(np.float32) if array.dtype == np.float16 else array


def narrow(array: Array, dtype: DType) -> Array:
    """Return the array in `dtype`, rounded to nearest even; the array itself if that is its dtype.

    Arguments:
        array: of `work_dtype(dtype)`, any shape.
    """
    if array.dtype == dtype:
        return array
    if dtype != BFLOAT16:
        with np.errstate(over="ignore", invalid="ignore"):
            return array.astype(dtype)
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x0040)
    halves = np.where(np.isnan(bits.view(np.float32)), quiet, rounded).astype(np.uint16)
    result: Array = halves.view(BFLOAT16).reshape(array.shape)
    return result
