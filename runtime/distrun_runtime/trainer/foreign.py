"""Stores of other makers: whole arrays, `broadcast` and `pushpull` without options. They only sum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distrun_runtime.device.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.store.contract import KVStoreBase
from distrun_runtime.store.sparse import RowSparse
from distrun_runtime.trainer.exchange import Found, Sum, Workers
from distrun_runtime.trainer.parameter import Parameter

__all__ = ["ForeignExchange"]


class ForeignExchange:
    """Parameters in such a store; see `Exchange`."""

    def __init__(self, store: KVStoreBase, params: list[Parameter]) -> None:
        self._store, self._params = store, params

    def start(self) -> None:
        """Give all parameters rank 0's values, on all workers."""
        for index, parameter in enumerate(self._params):
            rooms = [replica.room() for replica in parameter.replicas]
            self._store.broadcast(index, parameter.replicas[0].weight(), out=rooms, priority=-index)
            for replica, room in zip(parameter.replicas, rooms, strict=True):
                replica.written(room)

    def reduce(self, found: Sequence[Found], scale: float, me: Workers) -> tuple[list[Sum], Workers]:
        """Sum gradients over devices and workers; `scale` is left to do. All workers must have as much data."""
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
        return result, Workers(*(self._store.num_workers * mine for mine in me))

    def update(self, found: Sequence[Found], scale: float) -> None:
        """Refuse: it only sums."""
        raise self._refusal("update weights")

    def pull(self) -> None:
        """Do nothing: the weights are the trainer's own."""

    def pull_rows(self, index: int, ids: Array) -> None:
        """Refuse: there are no rows."""
        raise self._refusal("pull rows")

    def assign(self, indices: Sequence[int]) -> None:
        """Refuse: `broadcast` works once a key."""
        raise self._refusal("assign weights")

    def replaced(self, index: int) -> None:
        """Do nothing: the weights are the trainer's own."""

    def _refusal(self, what: str) -> KVError:
        return KVError("store %r cannot %s: only its broadcast and pushpull are used" % (self._store.type, what))
