"""Names: the keys of a store, what it knows of each since `init`, how messages name them; and the kinds of store."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, Protocol, Union, get_args

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import KVError
from distrun_runtime.ops.partition import Shard
from distrun_runtime.protocol.message import DTYPE_CODES

Key = Union[int, str]
"""A key, as stores keep it."""

DENSE, ROW_SPARSE = "default", "row_sparse"
"""MXNet's names of the kinds of storage."""


class Shaped(Protocol):
    """An array of the host or of a GPU, or a RowSparse."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions; of a RowSparse those of the whole value."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type."""


@dataclass(frozen=True)
class Zeros:
    """The first value of a declared key, which does not travel: zeros of a shape and dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    op: str = "sum"
    call: str = ""
    """These two as in `KeyRecord`."""

    def to_dense(self) -> np.ndarray[Any, Any]:
        """Return the whole value as a new array."""
        return np.zeros(self.shape, self.dtype)


@dataclass(frozen=True)
class KeyRecord:
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
    op: str = "sum"
    """What the contributions of a round become: their `sum`, or element by element their `min` or `max`."""
    call: str = ""
    """The collective call that the key is for (`store.collectives`), for people; workers agree on it. Empty: none."""

    @classmethod
    def of(cls, key: Key, index: int, value: Shaped) -> KeyRecord:
        """Return the record of a value; one whose `stype` says so, a RowSparse, makes the key row-sparse."""
        stype = getattr(value, "stype", DENSE)
        size = math.prod(value.shape)
        op, call = (value.op, value.call) if isinstance(value, Zeros) else ("sum", "")
        return cls(key, index, value.shape, value.dtype, size, stype, op, call)

    @property
    def is_sparse(self) -> bool:
        """Whether the key is row-sparse."""
        return self.stype == ROW_SPARSE

    @property
    def row_size(self) -> int:
        """Elements of a row: all dimensions but the first."""
        return math.prod(self.shape[1:])

    def whole(self, number: int) -> Shard:
        """Return the value as one shard, under the key's number in messages."""
        row_size = self.row_size if self.is_sparse else 0
        return Shard(0, 0, self.size, number, DTYPE_CODES[self.dtype], row_size)

    def to_json(self) -> dict[str, Any]:
        """Return what workers tell the scheduler of the key."""
        dtype = dtypes.name_of(self.dtype)
        call = {"call": self.call, "op": self.op} if self.call else {}
        return {"key": self.key, "shape": list(self.shape), "dtype": dtype, "stype": self.stype, **call}

    def fit(self, array: Shaped, noun: str) -> None:
        """Return if the value has the record's shape and dtype. `noun` is what it is, for the message.

        Raises:
            KVError: it has not; key, both shapes and both dtypes are named.
        """
        if array.shape != self.shape or array.dtype != self.dtype:
            raise KVError(
                f"key {self.key!r}: the {noun} has shape {array.shape} and dtype {dtypes.name_of(array.dtype)}, but the"
                f" key has shape {self.shape} and dtype {dtypes.name_of(self.dtype)} since its init"
            )


def named(keys: Iterable[Key], what: str = "key") -> str:
    """Return keys, or `what` else, for people: `key 'w'`, or the first three of several and their number."""
    names = [repr(key) for key in keys]
    shown = ", ".join(names[:3]) + (f", ... ({len(names)} {what}s)" if len(names) > 3 else "")
    return f"{what if len(names) == 1 else what + 's'} {shown}"


def begun(items: Iterable[tuple[Key, object]]) -> str:
    """Return the call that brings keys, for people: the collective one that they are for, else `init`."""
    pairs = list(items)
    calls = [value.call for _, value in pairs if isinstance(value, Zeros) and value.call]
    return calls[0] if calls else f"init of {named(key for key, _ in pairs)}"


def twice(key: Key, record: KeyRecord | None) -> str:
    """Return what is said of a second init; `record` is what the first one made, if it has ended."""
    was = f" with shape {record.shape} and dtype {dtypes.name_of(record.dtype)}" if record else ""
    return f"key {key!r} was already initialised{was}; init works once a key, push changes its value"


# The built-in kinds of store. Source: the names are MXNet's. There, any name that contains `dist`, `device` or `_async`
# is taken; here only these.

BuiltIn = Literal[
    "local",
    "device",
    "dist",
    "dist_sync",
    "dist_async",
    "dist_device_sync",
    "dist_sync_device",
    "dist_device_async",
    "dist_async_device",
]
"""`TYPES`, for type checkers."""

TYPES: tuple[str, ...] = get_args(BuiltIn)
"""The built-in kinds, as `kvstore.create` takes them."""


def is_dist(name: str) -> bool:
    """Tell whether its values are on the servers of a job."""
    return name.startswith("dist")


def is_async(name: str) -> bool:
    """Tell whether each push is applied on arrival, without rounds."""
    return "async" in name


def on_devices(name: str) -> bool:
    """Tell whether a worker's device values are summed on a device rather than by the host's threads."""
    return "device" in name


def canonical(name: str) -> str:
    """Return what a kind means to the servers and to other workers: `local`, `dist_sync` or `dist_async`.

    `dist_device_sync` is `dist_sync` to them: only how a worker sums its own devices differs, and the sums are equal.
    So workers of both kinds may share a store. If one of them is of the kind `dist_device_*`, servers may keep it on a
    GPU (`ps.device_choice`).
    """
    if not is_dist(name):
        return "local"
    return "dist_async" if is_async(name) else "dist_sync"
