"""Record: what a store knows of a key, and what is said when a call does not fit it. Pure."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.store.sparse import RowSparse
from distrun_runtime.store.values import Key

__all__ = ["DENSE", "ROW_SPARSE", "Array", "Key", "Record", "missing", "twice"]

DENSE, ROW_SPARSE = "default", "row_sparse"
"""MXNet's names of the kinds of storage."""


@dataclass(frozen=True)
class Record:
    """What a store knows of one key since its `init`."""

    key: Key
    index: int
    """Placement number: an int key itself; a str key's position in the order of `init` (rank 0's, if distributed)."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    size: int
    """Elements."""
    stype: str = DENSE
    """`default`, or `row_sparse`: it is pushed and pulled by rows, and cut between them."""

    @classmethod
    def of(cls, key: Key, index: int, value: Array | RowSparse) -> Record:
        """Return the record of a value; a RowSparse makes the key row-sparse."""
        stype = ROW_SPARSE if isinstance(value, RowSparse) else DENSE
        size = math.prod(value.shape)
        return cls(key=key, index=index, shape=value.shape, dtype=value.dtype, size=size, stype=stype)

    @property
    def is_sparse(self) -> bool:
        """Whether the key is row-sparse."""
        return self.stype == ROW_SPARSE

    @property
    def row_size(self) -> int:
        """Elements of a row: all dimensions but the first."""
        return math.prod(self.shape[1:])

    def fit(self, array: Array | RowSparse, noun: str) -> None:
        """Return if the value has the record's shape and dtype. `noun` is what it is, for the message.

        Raises:
            KVError: it has not; key, both shapes and both dtypes are named.
        """
        if array.shape != self.shape or array.dtype != self.dtype:
            raise KVError(
                "key %r: the %s has shape %s and dtype %s, but the key has shape %s and dtype %s since its init"
                % (
                    *(self.key, noun, array.shape, dtypes.name_of(array.dtype)),
                    *(self.shape, dtypes.name_of(self.dtype)),
                )
            )


def twice(key: Key, record: Record | None) -> str:
    """Return what is said of a second init; `record` is what the first one made, if it has ended."""
    was = " with shape %s and dtype %s" % (record.shape, dtypes.name_of(record.dtype)) if record else ""
    return "key %r was already initialised%s; init works once a key, push changes its value" % (key, was)


def missing(key: Key, known: Iterable[Key]) -> str:
    """Return what is said of a key that was never initialised; names the keys most like it."""
    by_text = {str(name): name for name in known}
    near = [repr(by_text[word]) for word in difflib.get_close_matches(str(key), list(by_text), n=3)]
    return "key %r was never initialised in this store of %d keys%s; call init first" % (
        key,
        len(by_text),
        " (near: %s)" % ", ".join(near) if near else "",
    )
