"""The arrays of one slot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from distrun_runtime.arrays.dtypes import Array, DType
from distrun_runtime.ops.optimizers import Knobs, NormRule, Prepared
from distrun_runtime.protocol.message import Buffer
from distrun_runtime.ps.sums import Sum


class Lease(Protocol):
    """What `ZmqTransport.send` gives back."""

    @property
    def is_over(self) -> bool:
        """Whether the buffers may be written again."""
        ...


@dataclass(frozen=True)
class Half:
    """An update between its two phases: it waits for norms."""

    rule: NormRule
    knobs: Knobs
    prepared: Prepared


@dataclass
class Shelf:
    """What an executor holds of one slot; all arrays are flat."""

    weight: Array
    key: Any = None
    """The user's key."""
    shape: tuple[int, ...] = ()
    """Of the whole value; for people."""
    row_size: int = 0
    """Elements of a row; 0: the value is not row-sparse."""
    sums: dict[int, Sum] = field(default_factory=dict)
    """Round to the sum of its contributions so far."""
    state: dict[str, Any] | None = None
    """What the rule remembers of the weight; None before its first step."""
    halves: dict[tuple[int, int], Half] = field(default_factory=dict)
    """(Rank, round) to an update that waits for norms."""
    residual: Array | None = None
    """float32: what compressed answers left out so far; None: nothing yet."""
    encoded: dict[tuple[Any, ...], Buffer] = field(default_factory=dict)
    """The weight as compressed answers carry it, by codec and parameters: made once a round."""
    staged: Any = None
    """What was read of saved states and is not taken over yet (`states.Staged`)."""
    tickets: int = 0
    """Pulls that hold `weight` and are not delivered yet."""
    leases: list[Lease] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Number of rows; 0: the value is not row-sparse."""
        return len(self.weight) // self.row_size if self.row_size else 0

    @property
    def is_lent(self) -> bool:
        """Whether somebody may still read `weight`, so that it must not be written."""
        return bool(self.tickets) or not all(lease.is_over for lease in self.leases)

    def put(self, weight: Array) -> None:
        """Have another array be the weight; nobody holds it yet."""
        self.weight = weight
        self.tickets = 0
        self.leases = []
        self.encoded.clear()

    def make_own(self) -> None:
        """See to it that `weight` may be written."""
        if self.is_lent:
            self.put(self.weight.copy())
        self.encoded.clear()


def elements(payload: Buffer, dtype: DType) -> Array:
    """Return the elements of a payload, flat and read-only, without a copy."""
    return np.frombuffer(payload, dtype) if memoryview(payload).nbytes else np.empty(0, dtype)


def raw(array: Array) -> memoryview:
    """Return the bytes of a flat array of any dtype, without a copy."""
    return array.view(np.uint8).data
