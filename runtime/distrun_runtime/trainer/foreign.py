"""Stores of other makers: whole arrays, `broadcast` and `pushpull` without options. They only sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.ps.work import Notes
from distrun_runtime.store.contract import KVStoreBase
from distrun_runtime.store.sparse import RowSparse
from distrun_runtime.trainer.buffers import Buffers
from distrun_runtime.trainer.exchange import Found, Reduced, Sum, Workers
from distrun_runtime.trainer.parameter import Parameter

__all__ = ["ForeignExchange"]


class ForeignExchange:
    """Parameters and buffers in such a store; see `Exchange`."""

    def __init__(self, store: KVStoreBase, params: list[Parameter], buffers: Buffers) -> None:
        self._store, self._params, self._buffers = store, params, buffers

    def start(self) -> None:
        """Give all parameters and buffers rank 0's values, on all workers."""
        for index, parameter in enumerate(self._params):
            rooms = [replica.room() for replica in parameter.replicas]
            self._store.broadcast(index, parameter.replicas[0].weight(), out=rooms, priority=-index)
            for replica, room in zip(parameter.replicas, rooms, strict=True):
                replica.written(room)
        values = self._buffers.floats()
        for index, value in enumerate(values):
            room = np.empty_like(value)
            self._store.broadcast(len(self._params) + 1 + index, value, out=[room])
            values[index] = room
        self._buffers.take_floats(values)

    def close(self) -> None:
        """Do nothing: no store was made here."""

    def store_buffers(self) -> None:
        """Do nothing: the buffers are the trainer's own."""

    def pull_buffers(self) -> None:
        """Do nothing: the buffers are the trainer's own."""

    def average_buffers(self) -> None:
        """Replace the buffers of float types by their mean over all workers."""
        means = {}
        for index, (name, value) in enumerate(zip(self._buffers.names, self._buffers.arrays(), strict=True)):
            if dtypes.is_float(value.dtype):
                wide = dtypes.widen(value) / self._store.num_workers
                room = means[name] = np.empty_like(value)
                narrow = dtypes.narrow(wide.astype(dtypes.work_dtype(value.dtype), copy=False), value.dtype)
                self._store.pushpull(len(self._params) + 1 + index, [narrow], out=[room])
        self._buffers.write(means)

    def skip(self, indices: Iterable[int], note: Mapping[str, Any]) -> Notes:
        """Refuse: it knows only sums of all workers."""
        raise self._refusal("have the other workers skip a step; let all of them go without calling step")

    def reduce(self, found: Sequence[Found], scale: float, me: Workers, mark: tuple[int, int]) -> Reduced:
        """Sum gradients over devices and workers; `scale` is left to do. All workers must have as much data.

        What must be alike on all workers is not compared.
        """
        if not me.active:
            raise self._refusal("go on without a worker that has no more data (use epoch_size)")
        result: list[Sum] = []
        for index, grads in found:
            parameter = self._params[index]
            if grads is None:
                if self._store.num_workers == 1:
                    continue
                grads = [np.zeros(parameter.shape, parameter.dtype)]
            if any(isinstance(grad, RowSparse) for grad in grads):
                raise self._refusal("take the row-sparse gradient of parameter %r" % parameter.name)
            targets = [replica.target() for replica in parameter.replicas]
            self._store.pushpull(index, grads, out=targets, priority=-index)
            for replica, target in zip(parameter.replicas, targets, strict=True):
                replica.reduced(target)
            result.append((index, targets[0], scale))
        return Reduced(result, Workers(*(self._store.num_workers * mine for mine in me)))

    def update(self, found: Sequence[Found], scale: float) -> NoReturn:
        """Refuse: it only sums."""
        raise self._refusal("update weights")

    def pull(self) -> None:
        """Do nothing: the weights are the trainer's own."""

    def pull_rows(self, index: int, ids: Array) -> NoReturn:
        """Refuse: there are no rows."""
        raise self._refusal("pull rows")

    def assign(self, indices: Sequence[int]) -> NoReturn:
        """Refuse: `broadcast` works once a key."""
        raise self._refusal("assign weights")

    def replaced(self, index: int) -> None:
        """Do nothing: the weights are the trainer's own."""

    def _refusal(self, what: str) -> KVError:
        return KVError("store %r cannot %s: only its broadcast and pushpull are used" % (self._store.type, what))
