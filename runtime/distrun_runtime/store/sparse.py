"""Row-sparse values, and the row pulls of row-sparse keys.

A RowSparse is some rows of a value, by number: the gradient of an embedding, or what `row_sparse_pull` returns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Union

import numpy as np

from distrun_runtime.arrays import dtypes, interop
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.ops.rows import ascending
from distrun_runtime.store.keys import ROW_SPARSE, KeyRecord

__all__ = ["Lookup", "RowSparse", "refuse_mask", "row_numbers"]


class RowSparse:
    """Rows of a value of `shape`; all others are zero.

    Attributes:
        values: (n, *shape[1:]) in one of the store's dtypes.
        rows: int64 of shape (n,), each from 0 to shape[0] - 1; any order, and rows that are named more than once are
            summed (`canonical` does it).
        shape: of the whole value, at least one dimension.

    The arrays are not copied. `fill` exchanges them: that is how a pull writes into one.
    """

    stype = ROW_SPARSE

    def __init__(self, values: object, rows: object, shape: Sequence[int]) -> None:
        self.shape: tuple[int, ...] = _shape(shape)
        if not self.shape or min(self.shape) < 0:
            raise KVError("a RowSparse has a shape of at least one dimension, found %s" % (self.shape,))
        refuse_mask(values, "the values of a RowSparse")
        self.values: Array = interop.host_array(values, "the values of a RowSparse")
        self.rows: Array = row_numbers(rows, self.shape[0], "RowSparse")
        expected = (len(self.rows), *self.shape[1:])
        if self.values.shape != expected:
            raise KVError(
                "a RowSparse of shape %s with %d rows has values of shape %s, found %s"
                % (self.shape, len(self.rows), expected, self.values.shape)
            )

    def __repr__(self) -> str:
        return "RowSparse(%d of %d rows, shape %s, %s)" % (
            *(len(self.rows), self.shape[0], self.shape),
            dtypes.name_of(self.dtype),
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type."""
        return self.values.dtype

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: object = "float32") -> RowSparse:
        """Return one without rows: a contribution of nothing, or an output for `row_sparse_pull`.

        Raises:
            KVError: a shape of no dimension.
            ValueError, TypeError: no such dtype.
        """
        kind = dtypes.parse(dtype) if isinstance(dtype, str) else np.dtype(dtype)  # type: ignore[call-overload]
        return cls(np.empty((0, *_shape(shape)[1:]), kind), np.empty(0, np.int64), shape)

    @classmethod
    def from_dense(cls, array: object) -> RowSparse:
        """Return the rows of an array that are not all zero, as a copy.

        Raises:
            KVError: an array of no dimension, or a masked array.
        """
        refuse_mask(array, "the array of a RowSparse")
        dense = interop.host_array(array, "the array of a RowSparse")
        if not dense.ndim:
            raise KVError("a RowSparse has a shape of at least one dimension, found ()")
        flat = dtypes.widen(dense).reshape(dense.shape[0], math.prod(dense.shape[1:]))
        rows = np.flatnonzero(flat.any(axis=1))
        return cls(dense[rows], rows, dense.shape)

    @classmethod
    def from_scipy(cls, matrix: Any) -> RowSparse:
        """Return the rows of a scipy.sparse matrix or array that have stored elements; each row becomes dense.

        One of cupyx.scipy.sparse is copied to the host first.
        """
        if type(matrix).__module__.partition(".")[0] == "cupyx":
            matrix = matrix.get()  # a copy in host memory, of scipy
        table = matrix.tocsr()
        rows = np.flatnonzero(np.diff(table.indptr))
        return cls(table[rows].toarray(), rows, table.shape)

    @classmethod
    def from_torch(cls, tensor: Any) -> RowSparse:
        """Return the rows of a sparse torch tensor, such as the gradient of `Embedding(sparse=True)`.

        A COO tensor of one sparse dimension in host memory is taken as it is, without a copy; any other becomes rows
        first. One on a device is copied to the host before.
        """
        table = tensor.detach()
        if table.device.type != "cpu":
            table = table.cpu()
        if not table.is_sparse:
            table = table.to_sparse_coo()
        if table.sparse_dim() == 1:
            # Uncoalesced as it may be: rows named twice are ours to sum.
            return cls(interop.tensor_memory(table._values()), table._indices()[0].numpy(), table.shape)
        table = table.coalesce()
        rows, place = np.unique(table.indices()[0].numpy(), return_inverse=True)
        found = interop.tensor_memory(table.values())
        values = np.zeros((len(rows), *table.shape[1:]), found.dtype)
        where = (place.reshape(-1), *(axis.numpy() for axis in table.indices()[1:]))
        values[where] = found
        return cls(values, rows, table.shape)

    @classmethod
    def of(cls, value: object) -> RowSparse | None:
        """Return a value as RowSparse if it is sparse - one of ours, scipy's or torch's -, None if it is not."""
        if isinstance(value, RowSparse):
            return value
        if hasattr(value, "tocsr") and hasattr(value, "nnz"):
            return cls.from_scipy(value)
        if hasattr(value, "to_sparse_coo") and "sparse" in str(getattr(value, "layout", "")):
            return cls.from_torch(value)
        return None

    @classmethod
    def total(cls, values: Sequence[RowSparse]) -> RowSparse:
        """Return the canonical sum of at least one, all of one shape and dtype; 16-bit floats are added in float32."""
        if len(values) == 1:
            return values[0].canonical()
        first = values[0]
        joined = np.concatenate([value.values for value in values])
        return cls(joined, np.concatenate([value.rows for value in values]), first.shape).canonical()

    def canonical(self) -> RowSparse:
        """Return the same with rows in ascending order, each once; itself if it is so already."""
        if (self.rows[1:] > self.rows[:-1]).all():
            return self
        order = np.argsort(self.rows, kind="stable")
        rows = self.rows[order]
        starts = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1])))
        values = self.values[order]
        if len(starts) < len(rows):
            with np.errstate(over="ignore", invalid="ignore"):
                wide = dtypes.widen(values)
                sums = np.add.reduceat(wide, starts, axis=0, dtype=wide.dtype)
            values = dtypes.narrow(sums, self.dtype)
        return RowSparse(values, rows[starts], self.shape)

    def to_dense(self) -> Array:
        """Return the whole value as a new array."""
        one = self.canonical()
        dense = np.zeros(self.shape, self.dtype)
        dense[one.rows] = one.values
        return dense

    def fill(self, values: Array, rows: Array) -> None:
        """Exchange the rows: `values` (n, *shape[1:]) of the same dtype for `rows` int64 (n,). Not copied."""
        if values.dtype != self.dtype or values.shape != (len(rows), *self.shape[1:]):
            raise KVError(
                "%r cannot be filled with %d rows from values of shape %s and dtype %s"
                % (self, len(rows), values.shape, dtypes.name_of(values.dtype))
            )
        self.values, self.rows = values, row_numbers(rows, self.shape[0], "RowSparse")


class Lookup:
    """The row pull of one key: the rows to ask for, and the outputs that take them.

    The row numbers of an output are whole numbers in any order, also repeated. Each row travels once.

    Arguments:
        pairs: each output with its row numbers. A RowSparse gets its rows ascending, each once; an array of shape
            (n, *shape[1:]) or (*row_ids.shape, *shape[1:]) gets one row for each of the n numbers, in their order.

    Raises:
        KVError: the key is not row-sparse, a row is out of range, or an output does not fit.
    """

    def __init__(self, record: KeyRecord, pairs: Sequence[tuple[Union[Array, RowSparse], Array]]) -> None:
        if not record.is_sparse:
            raise KVError(
                "key %r is not row-sparse: pull it as a whole, or give init a RowSparse to make it so" % (record.key,)
            )
        self.outputs = [(out, _numbers_for(record, out, ids)) for out, ids in pairs]
        """Each output with its row numbers: int64, of one dimension, in the order given."""
        self.rows: Array = ascending(np.concatenate([numbers for _, numbers in self.outputs]))
        """What to ask for: int64, ascending, each once."""

    def take(self, found: Array) -> None:
        """Fill the outputs; `found` (n, *shape[1:]) has the values of `rows`. The outputs may keep it."""
        for place, (out, numbers) in enumerate(self.outputs):
            if isinstance(out, RowSparse):
                # An output keeps its rows: they must not be the caller's array, nor another output's.
                rows = self.rows if len(self.outputs) == 1 else ascending(numbers.copy())
                picked = found if len(rows) == len(self.rows) and place == 0 else found[self._at(rows)]
                out.fill(picked, rows)
            else:
                picked = found if np.array_equal(numbers, self.rows) else found[self._at(numbers)]
                out[...] = picked.reshape(out.shape)

    def _at(self, numbers: Array) -> Array:
        """Return the place of each of these among `rows`."""
        order = np.argsort(numbers)  # To look up ascending numbers is several times as fast.
        places = np.empty(len(numbers), np.intp)
        places[order] = np.searchsorted(self.rows, numbers[order])
        return places


def _numbers_for(record: KeyRecord, out: Array | RowSparse, ids: Array) -> Array:
    """Return row numbers in one dimension, if they and the output fit the key."""
    numbers = row_numbers(ids, record.shape[0], "key %r" % (record.key,))
    if isinstance(out, RowSparse):
        record.fit(out, "output")
        return numbers
    tail = record.shape[1:]
    if out.dtype != record.dtype or out.shape not in {(numbers.size, *tail), (*ids.shape, *tail)}:
        raise KVError(
            "key %r: the output has shape %s and dtype %s, but %d rows of it have shape %s and dtype %s"
            % (
                *(record.key, out.shape, dtypes.name_of(out.dtype), numbers.size),
                *((numbers.size, *tail), dtypes.name_of(record.dtype)),
            )
        )
    return numbers


def refuse_mask(value: object, what: str) -> None:
    """Return unless the value is a masked array; `what` is its name in the message.

    Raises:
        KVError: it is one. numpy would give its masked elements as if they were not masked.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise KVError(
            "%s: found a masked array, expected an array without a mask, as no mask is stored or sent; fix: give"
            " array.filled(0) to use 0 for the masked elements, or array.data to ignore the mask" % what
        )


def row_numbers(rows: object, count: int, what: str) -> Array:
    """Return row numbers as an int64 array of one dimension, in the order given; not copied where possible.

    Arguments:
        rows: whole numbers in an array of any shape and dtype, or a list.
        count: rows of the value.
        what: whose they are, for messages, such as "key 'a'".

    Raises:
        KVError: numbers that are not whole, below 0, not below `count`, or so large that their type rounds whole
            numbers; names the first such.
    """
    refuse_mask(rows, "%s: the row numbers" % what)
    given = interop.host_array(rows, "%s: the row numbers" % what)
    array = dtypes.widen(given)
    if not array.size:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iuf":
        raise KVError("%s: row numbers are whole numbers, found dtype %s" % (what, array.dtype))
    flat = array.reshape(-1)
    wrong = (flat < 0) | (flat >= count) | ((flat != np.floor(flat)) if flat.dtype.kind == "f" else False)
    if array.dtype.kind == "f":
        wrong |= ~np.isfinite(flat)
    if wrong.any():
        raise KVError(
            "%s: row %s, expected whole numbers from 0 to %d: the value has %d rows"
            % (what, flat[int(np.argmax(wrong))], count - 1, count)
        )
    if array.dtype.kind == "f" and flat.max() >= dtypes.exact_below(given.dtype):
        raise KVError(
            f"{what}: row {int(flat.max())} is given as {dtypes.name_of(given.dtype)}, which rounds whole numbers from"
            f" {dtypes.exact_below(given.dtype)} on, so that another row may be meant; fix: give row numbers as"
            " integers, such as int64"
        )
    return flat.astype(np.int64, copy=False)


def _shape(value: object) -> tuple[int, ...]:
    """Return the shape of a whole value as it was given.

    Raises:
        KVError: no sequence of whole numbers.
    """
    if not isinstance(value, (Sequence, np.ndarray)) or not all(hasattr(length, "__index__") for length in value):
        raise KVError("a RowSparse's shape is that of the whole value, such as (6, 2), not %r" % (value,))
    return tuple(int(length) for length in value)
