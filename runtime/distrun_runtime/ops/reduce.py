"""Sums of contributions, dense or of rows: many at once over arrays that lie end to end, or one shard's.

16-bit floats are summed in float32 and narrowed once, when the sum is used. A round to which all gave only rows stays
sparse, so that its update touches these rows alone; one dense contribution makes it dense.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import field
from typing import Any, NamedTuple, Union

import numpy as np

from distrun_runtime.arrays.device import Device, DeviceArray, is_on_host, on_host
from distrun_runtime.arrays.dtypes import Array, Buffer, DType, widen, work_dtype
from distrun_runtime.arrays.gpu_frames import IN_USE, place_of, readable
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import KVError
from distrun_runtime.ops import compression as codecs

# Rows: the payload of row-sparse values, and what is done with rows of a value. No side effects.
#
# A row-sparse value has R rows of `row_size` elements; a piece of it is a run of whole rows. Its payload (codec 16) is
#
#     8 bytes          n, the number of rows, unsigned, little-endian
#     8 n bytes        the row numbers within the piece, int64, little-endian, ascending, each once
#     n * row_size     elements of the key's dtype (in a pull's request: none)
#
# The reply of a pull is the elements alone, in the order of the request's rows. A pull may also ask for the rows of its
# round, those that any worker pushed, by `ROUND_ROWS`; then the reply is a payload as above.


_COUNT = struct.Struct("<Q")
ROUND_ROWS = _COUNT.pack(2**64 - 1)


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
            f"rows: expected {expected} bytes for {len(rows)} rows of {row_size} elements of"
            f" {dtype.itemsize} bytes, found {rest.nbytes} bytes"
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
        raise KVError(f"rows: expected nothing after {len(rows)} row numbers, found {rest.nbytes} bytes")
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
        raise KVError(f"rows: expected at least {_COUNT.size} bytes, found {frame.nbytes}")
    (found,) = _COUNT.unpack_from(frame)
    if found > count:
        raise KVError(f"rows: expected at most {count} rows, the piece's number, found {found}")
    end = _COUNT.size + 8 * found
    if frame.nbytes < end:
        raise KVError(f"rows: expected {8 * found} bytes of row numbers for {found} rows, found {len(frame) - 8}")
    rows: Array = np.frombuffer(frame[_COUNT.size : end], "<i8") if found else np.empty(0, np.int64)
    if found and (rows[0] < 0 or rows[-1] >= count or not (rows[1:] > rows[:-1]).all()):
        raise KVError(
            f"rows: expected ascending row numbers from 0 to {count - 1}, found"
            f" {np.array2string(rows, threshold=8, separator=', ')}"
        )
    return rows.view(np.int64), frame[end:]


@dataclass(frozen=True)
class How:
    """How a payload becomes elements, and by what these are multiplied."""

    codec: int = 0
    params: Mapping[str, float] = field(default_factory=dict)
    scale: float = 1.0


PLAIN = How()
"""The payload is the elements."""


class Rows(NamedTuple):
    """Values of some rows; all others are zero."""

    rows: Array
    """int64 of shape (k,), ascending, each once."""
    values: Array
    """(k, row size), in the work dtype."""


class Dense(NamedTuple):
    """Values of all elements."""

    values: DeviceArray
    """Flat, in the work dtype."""
    is_own: bool
    """Whether it is ours to write; otherwise it is a message's frame."""


Contribution = Union[Dense, Rows]


def read(
    payload: Buffer, length: int, dtype: DType, row_size: int, how: How, *, device: Device | None = None
) -> Contribution:
    """Return what one payload contributes.

    Arguments:
        length, dtype: of the shard, flat.
        row_size: elements of a row, for codec 16.
        device: where the contribution is to be; None: in the host's memory.

    Raises:
        KVError: it is no such payload.
    """
    if device is not None and device.is_gpu:
        return _read_on(device, payload, length, dtype, how)
    payload = readable(payload) if IN_USE else payload
    if how is PLAIN and dtype.itemsize > 2 and length:
        return Dense(np.frombuffer(payload, dtype), False)  # what follows, for the most frequent case
    if how.codec == codecs.ROWS:
        rows, given = decode(payload, length // row_size, row_size, dtype)
        return Rows(rows, scaled(widen(given), how.scale))
    if how.codec != codecs.NONE:
        decoded = codecs.numbered(how.codec).decode(payload, length, dict(how.params))
        return Dense(scaled(decoded.astype(work_dtype(dtype), copy=False), how.scale), is_own=True)
    given = np.frombuffer(payload, dtype) if memoryview(payload).nbytes else np.empty(0, dtype)
    wide = scaled(widen(given), how.scale)
    return Dense(wide, is_own=wide is not given)


def _read_on(device: Device, payload: Buffer, length: int, dtype: DType, how: How) -> Dense:
    """Return what one payload contributes on a GPU."""
    if how.codec == codecs.ROWS:
        raise KVError(f"rows are added in the host's memory, not on {device.name}")
    if how.codec == codecs.NONE:
        given = device.elements(payload, dtype)
        values = scaled(widened(given), how.scale)
        return Dense(values, is_own=values is not given or not IN_USE or place_of(payload) is None)
    decoded = device.empty((length,), np.dtype(np.float32))
    codecs.numbered(how.codec).read(payload, decoded, dict(how.params))
    return Dense(scaled(codecs.from_floats(decoded, work_dtype(dtype)), how.scale), is_own=True)


OPS = ("sum", "min", "max")
"""What contributions become, element by element."""


@dataclass
class Sum:
    """Adds up contributions, in the order in which they come; or has their minimum or maximum (`OPS`)."""

    row_size: int = 0
    op: str = "sum"
    dense: Dense | None = None
    parts: list[Rows] = field(default_factory=list)

    def add(self, given: Contribution) -> None:
        """Take in one contribution; it is only read."""
        if isinstance(given, Rows):
            self.parts.append(given)
        elif self.dense is None:
            self.dense = given
        elif self.op != "sum":
            # GPUs only add: it is rare enough to be done on the host.
            pair = on_host(self.dense.values), on_host(given.values)
            self.dense = Dense((np.minimum if self.op == "min" else np.maximum)(*pair), is_own=True)
        else:
            present = out = self.dense.values
            if not self.dense.is_own:
                out = np.empty_like(out) if is_on_host(out) else out.device.empty(out.shape, out.dtype)
            self.dense = Dense(_add(present, given.values, out), is_own=True)

    def total(self) -> Contribution:
        """Return the sum."""
        if self.dense is None:
            return self._merged()
        if not self.parts:
            return self.dense
        values = self.dense.values if self.dense.is_own else self.dense.values.copy()
        for part in self.parts:
            _add_rows(values.reshape(-1, self.row_size), part.rows, part.values)
        return Dense(values, is_own=True)

    def _merged(self) -> Rows:
        if len(self.parts) == 1:
            return self.parts[0]
        rows = ascending(np.concatenate([part.rows for part in self.parts]))
        values = np.zeros((len(rows), self.row_size), self.parts[0].values.dtype)
        for part in self.parts:
            _add_rows(values, np.searchsorted(rows, part.rows), part.values)
        return Rows(rows, values)


def spread(given: Contribution, length: int) -> Dense:
    """Return a contribution as one of all elements."""
    if isinstance(given, Dense):
        return given
    values = np.zeros(length, given.values.dtype)
    if len(given.rows):
        values.reshape(-1, given.values.shape[1])[given.rows] = given.values
    return Dense(values, is_own=True)


def widened(given: DeviceArray) -> DeviceArray:
    """Return an array in its work dtype, where it is: itself if it has that."""
    if is_on_host(given):
        return widen(given)
    if work_dtype(given.dtype) == given.dtype:
        return given
    wide = given.device.empty(given.shape, work_dtype(given.dtype))
    given.device.sum([given], wide)
    return wide


def scaled(given: DeviceArray, scale: float) -> DeviceArray:
    """Return a multiple of an array, as a new one of its dtype; the array itself for scale 1."""
    if scale == 1:
        return given
    if not is_on_host(given):
        multiple = given.device.put(given)
        given.device.scale(multiple, scale)
        return multiple
    with np.errstate(over="ignore", invalid="ignore"):
        result: Array = np.multiply(given, given.dtype.type(scale))
    return result


def _add(one: DeviceArray, other: DeviceArray, out: DeviceArray) -> DeviceArray:
    if not is_on_host(out):
        out.device.sum([one, other], out)
        return out
    # An overflowing gradient is the training's affair (loss scaling looks for inf): no warning here.
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(one, other, out=out)
    return out


def _add_rows(values: Array, at: Array, given: Array) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        values[at] += given  # no row comes twice in `at`
