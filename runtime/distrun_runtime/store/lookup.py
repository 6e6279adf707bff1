"""Row pulls: which rows of which keys go into which outputs. Pure.

The row numbers of an output are any whole numbers, in any order, also repeated. What travels is each row once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.store import values
from distrun_runtime.store.record import Record
from distrun_runtime.store.sparse import RowSparse, row_numbers
from distrun_runtime.store.values import Key

__all__ = ["Lookup", "Wanted", "apart", "wanted"]

Output = Union[Array, RowSparse]

Wanted = list[tuple[Key, list[tuple[object, object]]]]
"""Each key once, with its outputs and the row numbers of each, as they were given."""


def wanted(key: object, out: object, row_ids: object) -> Wanted:
    """Return what a call of `row_sparse_pull` asks for.

    Arguments:
        key, out: as for a pull.
        row_ids: an array or a list of ints, for all outputs; or a list in the form of `out` with one for each output.

    Raises:
        KVError: a key of another kind, or another number of outputs or of row numbers than expected.
    """
    if out is None or row_ids is None:
        raise KVError("row_sparse_pull needs out and row_ids")
    outs = values.grouped(key, out, "output")
    numbers = _arrays(row_ids)
    if not isinstance(numbers, list):
        return [(name, [(item, numbers) for item in items]) for name, items in outs]
    ids = values.grouped(key, numbers, "row_id")
    result: Wanted = []
    for (name, items), (_, each) in zip(outs, ids, strict=True):
        if len(each) not in (1, len(items)):
            raise KVError(
                "key %r: %d outputs, but %d row_ids: expected one for each, or one for all"
                % (name, len(items), len(each))
            )
        result.append((name, list(zip(items, each * len(items) if len(each) == 1 else each, strict=True))))
    return result


def apart(lookups: Sequence[tuple[Key, Lookup]]) -> None:
    """Return if no output of a call would overwrite another.

    Raises:
        KVError: two outputs are one RowSparse, or share memory; names the keys.
    """
    if sum(len(lookup.outputs) for _, lookup in lookups) == 1:
        return
    arrays: list[tuple[Key, object, Array]] = []
    sparse: dict[int, tuple[Key, Array]] = {}
    for key, lookup in lookups:
        for out, numbers in lookup.outputs:
            if not isinstance(out, RowSparse):
                arrays.append((key, numbers.tobytes(), out))
                continue
            other, rows = sparse.setdefault(id(out), (key, numbers))
            if other != key or not np.array_equal(rows, numbers):
                whose = "keys %r and %r have" % (other, key) if other != key else "key %r has" % (key,)
                raise KVError(
                    "%s one RowSparse as output for different rows, so one result would replace the other; fix: give"
                    " each a RowSparse of its own" % whose
                )
    if arrays:
        values.apart(arrays)


class Lookup:
    """One key's row pull: the rows to ask for, and the outputs that take them.

    Arguments:
        pairs: each output with its row numbers. A RowSparse gets its rows ascending, each once; an array of shape
            (n, *shape[1:]) or (*row_ids.shape, *shape[1:]) gets one row for each of the n numbers, in their order.

    Raises:
        KVError: the key is not row-sparse, a row is out of range, or an output does not fit.
    """

    def __init__(self, record: Record, pairs: Sequence[tuple[object, object]]) -> None:
        if not record.is_sparse:
            raise KVError(
                "key %r is not row-sparse: pull it as a whole, or give init a RowSparse to make it so" % (record.key,)
            )
        self._record = record
        self._pairs = [_checked(record, out, ids) for out, ids in pairs]
        self.rows: Array = np.unique(np.concatenate([numbers for _, numbers in self._pairs]))
        """What to ask for: int64, ascending, each once."""

    @property
    def outputs(self) -> list[tuple[Output, Array]]:
        """The outputs, each with its row numbers."""
        return list(self._pairs)

    def take(self, found: Array) -> None:
        """Fill the outputs; `found` (n, *shape[1:]) has the values of `rows` and is ours."""
        for number, (out, numbers) in enumerate(self._pairs):
            if isinstance(out, RowSparse):
                rows = np.unique(numbers)
                picked = found if len(rows) == len(self.rows) and number == 0 else found[self._at(rows)]
                out.fill(picked, rows)
            else:
                out[...] = found[self._at(numbers)].reshape(out.shape)

    def _at(self, rows: Array) -> Array:
        return np.searchsorted(self.rows, rows)


def _arrays(row_ids: object) -> object:
    """Return row numbers with every list of numbers as an array: a list that is left is one of several of them."""
    if not isinstance(row_ids, (list, tuple)):
        return row_ids
    if all(isinstance(item, (int, float, np.integer, np.floating)) for item in row_ids):
        return np.asarray(row_ids)
    return [_arrays(item) for item in row_ids]


def _checked(record: Record, out: object, ids: object) -> tuple[Output, Array]:
    if isinstance(ids, (str, bytes)) or str(getattr(ids, "dtype", "")).endswith("bool"):
        raise KVError(
            "key %r: row_ids are whole numbers, not %s; for a mask give np.flatnonzero(mask)"
            % (record.key, type(ids).__name__ if isinstance(ids, (str, bytes)) else "bool")
        )
    given = values.array_of(record.key, ids)
    numbers = row_numbers(dtypes.widen(given), record.shape[0], "key %r" % (record.key,))
    if isinstance(out, RowSparse):
        if out.shape != record.shape or out.dtype != record.dtype:
            record.fit(out, "output")
        return out, numbers
    array = values.output_of(record.key, out)
    tail = record.shape[1:]
    shapes = {(numbers.size, *tail), (*given.shape, *tail)}
    if array.dtype != record.dtype or array.shape not in shapes:
        raise KVError(
            "key %r: the output has shape %s and dtype %s, but %d rows of it have shape %s and dtype %s"
            % (
                *(record.key, array.shape, dtypes.name_of(array.dtype), numbers.size),
                *((numbers.size, *tail), dtypes.name_of(record.dtype)),
            )
        )
    return array, numbers
