"""Rows: the payload of row-sparse values, and what is done with rows of a value. Pure.

A row-sparse value has R rows of `row_size` elements; a piece of it is a run of whole rows. Its payload (codec 16) is

    8 bytes          n, the number of rows, unsigned, little-endian
    8 n bytes        the row numbers within the piece, int64, little-endian, ascending, each once
    n * row_size     elements of the key's dtype (in a pull's request: none)

The reply of a pull is the elements alone, in the order of the request's rows.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from distrun_runtime.arrays.device import Buffer
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.ops.compression import ROWS

__all__ = ["ROWS", "ascending", "decode", "decode_rows", "encode", "encode_rows", "within"]

_COUNT = struct.Struct("<Q")


def ascending(rows: Array) -> Array:
    """Return row numbers in ascending order, each once; the array itself if they are so already.

    `numpy.unique` gives the same. Since numpy 2.3 it makes a hash table, which takes up to a hundred times as long.
    """
    if (rows[1:] > rows[:-1]).all():
        return rows
    found = np.sort(rows)
    once: Array = found[np.concatenate(([True], found[1:] != found[:-1]))]
    return once


def encode(rows: Array, values: Array) -> Buffer:
    """Return the payload of some rows of a piece.

    Arguments:
        rows: int64 of shape (n,), ascending, each once, counted from the piece's first row.
        values: (n, ...), of the key's dtype; copied.
    """
    return b"".join((encode_rows(rows), np.ascontiguousarray(values).tobytes()))


def encode_rows(rows: Array) -> Buffer:
    """Return the payload that asks for some rows of a piece; `rows` as for `encode`."""
    return _COUNT.pack(len(rows)) + rows.astype("<i8", copy=False).tobytes()


def decode(payload: Buffer, count: int, row_size: int, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return row numbers (n,), int64, and their values (n, row_size); both are views of the payload.

    Arguments:
        payload: as `encode` returns it.
        count: rows of the piece.
        row_size: elements of a row.
        dtype: the key's.

    Raises:
        KVError: it is no such payload of this piece; says what was expected.
    """
    rows, rest = _head(payload, count)
    expected = len(rows) * row_size * dtype.itemsize
    if rest.nbytes != expected:
        raise KVError(
            "rows: expected %d bytes for %d rows of %d elements of %d bytes, found %d bytes"
            % (expected, len(rows), row_size, dtype.itemsize, rest.nbytes)
        )
    values: Array = np.frombuffer(rest, dtype) if expected else np.empty(0, dtype)
    return rows, values.reshape(len(rows), row_size)


def decode_rows(payload: Buffer, count: int) -> Array:
    """Return the row numbers that a pull asks for; a view of the payload.

    Raises:
        KVError: it is no payload of row numbers below `count` and nothing else.
    """
    rows, rest = _head(payload, count)
    if rest.nbytes:
        raise KVError("rows: expected nothing after %d row numbers, found %d bytes" % (len(rows), rest.nbytes))
    return rows


def within(rows: Array, first: int, count: int) -> slice:
    """Return where those of `rows` are that lie in a piece.

    Arguments:
        rows: ascending.
        first: the piece's first row.
        count: its number of rows.
    """
    low, high = np.searchsorted(rows, (first, first + count))
    return slice(int(low), int(high))


def _head(payload: Buffer, count: int) -> tuple[Array, memoryview]:
    """Return the checked row numbers and what follows them."""
    frame = memoryview(payload).cast("B") if memoryview(payload).nbytes else memoryview(b"")
    if frame.nbytes < _COUNT.size:
        raise KVError("rows: expected at least %d bytes, found %d" % (_COUNT.size, frame.nbytes))
    (found,) = _COUNT.unpack_from(frame)
    if found > count:
        raise KVError("rows: expected at most %d rows, the piece's number, found %d" % (count, found))
    end = _COUNT.size + 8 * found
    if frame.nbytes < end:
        raise KVError(
            "rows: expected %d bytes of row numbers for %d rows, found %d" % (8 * found, found, len(frame) - 8)
        )
    rows: Array = np.frombuffer(frame[_COUNT.size : end], "<i8") if found else np.empty(0, np.int64)
    if found and (rows[0] < 0 or rows[-1] >= count or not (rows[1:] > rows[:-1]).all()):
        raise KVError(
            "rows: expected ascending row numbers from 0 to %d, found %s"
            % (count - 1, np.array2string(rows, threshold=8, separator=", "))
        )
    return rows.view(np.int64), frame[end:]
