"""Exchange: a trainer's parameters in a store. Their keys are their indices; all keys are under way at once, the first
with the highest priority.

Gradients are pushed as they are, and what they are to be multiplied by goes with the push (`scale`): so it may be
another one in every step and on every worker, and a compression's threshold means elements of the gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Union
from weakref import WeakSet

import numpy as np

from distrun_runtime.device.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.store.base import KVStore
from distrun_runtime.store.pending import Pending
from distrun_runtime.store.sparse import RowSparse
from distrun_runtime.trainer.naming import naming
from distrun_runtime.trainer.parameter import Parameter
from distrun_runtime.trainer.replica import Gradient, place_of

__all__ = ["Exchange", "Found", "Item", "Sum", "Workers", "finish", "grouped"]

GROUP_BYTES = 1024 * 1024
"""Parameters up to so many bytes together share a call. 100 parameters of 4 KB took 241 ms a step one by one, 67 ms
together (two workers, two servers and the scheduler on two cores)."""

logger = logging.getLogger(__name__)

_TAKEN: WeakSet[KVStore] = WeakSet()
"""Stores that have a trainer's parameters: another trainer's would have the same keys."""

Found = tuple[int, Union[list[Gradient], None]]
"""A parameter's index, and the gradients of its devices; None: it has none in this step."""


Sum = tuple[int, Gradient, float]
"""A parameter's index, the sum of its gradients, and what that is still to be multiplied by."""


class Workers(NamedTuple):
    """How many workers there are in a step where the trainers update."""

    active: int
    """They have gradients of their own."""
    unscaled: int
    """They divide by their batch size only after the sum (`Trainer.update`)."""


class Exchange:
    """Parameters in a store of ours.

    Arguments:
        updates: the store updates weights; else it sums gradients.
        has_rounds: it is distributed and synchronous: every worker pushes every key in every step.

    Raises:
        KVError: the store has another trainer's parameters.
    """

    def __init__(self, store: KVStore, params: list[Parameter], updates: bool, has_rounds: bool) -> None:
        if store in _TAKEN:
            raise KVError(
                "this %r store has the parameters of another trainer already, under the keys 0, 1, ...: make another"
                " store for this trainer, or one trainer for all parameters" % store.type
            )
        self._store, self._params = store, params
        self._updates = updates
        self._has_rounds = has_rounds
        self._counter = len(params) if has_rounds and not updates else None
        """Key under which workers are counted (`Workers`): here no server knows who has joined."""
        self._warned: set[str] = set()

    def start(self) -> None:
        """Give all parameters rank 0's values, on all workers. Collective."""
        keys, values = list(range(len(self._params))), [self._initial(one) for one in self._params]
        if self._counter is not None:
            keys, values = [*keys, self._counter], [*values, np.zeros(2, np.int64)]
        with naming(self._params):
            self._store.init(keys, values)
        _TAKEN.add(self._store)
        self.pull()

    def pull(self) -> None:
        """Bring all weights up to date, except those that are row-sparse."""
        self._pulled([index for index, one in enumerate(self._params) if one.stype == "default"])

    def pull_rows(self, index: int, ids: Array) -> None:
        """Bring rows of a row-sparse weight up to date; others stay as they are."""
        parameter = self._params[index]
        some = RowSparse.empty(parameter.shape, parameter.dtype)
        with naming(self._params):
            self._store.row_sparse_pull(index, out=some, priority=-index, row_ids=ids)
        for replica in parameter.replicas:
            weight = replica.weight()
            weight[some.rows] = some.values
            replica.written(weight)

    def assign(self, indices: Sequence[int]) -> None:
        """Give the store rank 0's present weights, and all workers what is stored then. Collective."""
        with naming(self._params):
            self._store.assign(list(indices), [self._params[index].replicas[0].weight() for index in indices])
        self._pulled(indices)

    def rounds(self) -> int:
        """Return how many rounds the store's servers have seen, of the key that has most."""
        return max(int(each["rounds"]) for each in self._store.stats())

    def replaced(self, index: int) -> None:
        """Give the store a weight that was replaced; of a store that nobody shares."""
        self._store.assign(index, self._params[index].replicas[0].weight())

    def update(self, found: Sequence[Found], scale: float) -> None:
        """Push gradients times `scale`, and bring the weights that come of them into all devices."""
        items = []
        for index, grads in found:
            parameter = self._params[index]
            if grads is None and self._has_rounds:
                grads = [self._nothing(parameter)]
            rooms = [] if parameter.stype == "row_sparse" else [replica.room() for replica in parameter.replicas]
            if grads is not None or rooms:  # Without rounds nobody waits for a push of ours.
                items.append(Item(index, grads and self._pushable(parameter, grads), rooms, parameter.size_bytes))
        with naming(self._params):
            finish(self._sent(items, scale))
        for item in items:
            for replica, room in zip(self._params[item.index].replicas, item.outs, strict=False):
                replica.written(room)

    def reduce(self, found: Sequence[Found], scale: float, me: Workers) -> tuple[list[Sum], Workers]:
        """Sum gradients times `scale` over devices and workers, into the gradients of all devices.

        Arguments:
            me: 1 or 0 each: what this worker counts as.

        Returns:
            What came of it, and the sum of what all workers count as.

        Raises:
            KVError: two parameters' gradients are one array. Nothing was sent.
        """
        calls: list[Pending] = []
        result: list[Sum] = []
        items = []
        owners: dict[tuple[str, int], int] = {}
        own, counted = np.array(me, np.int64), np.array(me, np.int64)
        for index, grads in found:
            parameter = self._params[index]
            if grads is None and not self._has_rounds:
                continue
            grads = [self._nothing(parameter)] if grads is None else grads
            if any(isinstance(grad, RowSparse) for grad in grads):
                # Only this process has them: a store with several workers updates row-sparse gradients itself.
                result.append((index, RowSparse.total(_rows(grads)), scale))
                continue
            targets = [replica.target() for replica in parameter.replicas]
            for target in targets:
                other = owners.setdefault(place_of(target), index)
                if other != index and target.size:
                    raise KVError(
                        "parameters %r and %r have the same array for their gradients, and their sums are written into"
                        " it: give each an array of its own" % (self._params[other].name, parameter.name)
                    )
            items.append(Item(index, grads, targets, parameter.size_bytes))
            result.append((index, targets[0], 1.0))
        with naming(self._params):
            if self._counter is not None:
                calls.append(self._store.pushpull(self._counter, own, out=counted, wait=False))
            finish([*calls, *self._sent(items, scale)])
        for item in items:
            for replica, target in zip(self._params[item.index].replicas, item.outs, strict=True):
                replica.reduced(target)
        return result, Workers(*counted.tolist())

    def _sent(self, items: Sequence[Item], scale: float) -> list[Pending]:
        """Make calls for all items, each with some; return what to wait for."""
        calls = []
        for group in grouped(items):
            keys, first = [item.index for item in group], group[0]
            grads, outs = [item.grads for item in group], [item.outs for item in group]
            if first.grads is None:
                calls.append(self._store.pull(keys, out=outs, priority=-first.index, wait=False))
            elif first.outs:
                pending = self._store.pushpull(keys, grads, outs, -first.index, wait=False, scale=scale)
                calls.append(pending)
            else:
                calls.append(self._store.push(keys, grads, -first.index, wait=False, scale=scale))
        return calls

    def _initial(self, parameter: Parameter) -> Gradient:
        weight = parameter.replicas[0].weight()
        if self._updates and parameter.grad_stype == "row_sparse":
            return RowSparse(weight, np.arange(parameter.shape[0]), parameter.shape)
        return weight

    def _pulled(self, indices: Sequence[int]) -> None:
        rooms = [[replica.room() for replica in self._params[index].replicas] for index in indices]
        if rooms:
            with naming(self._params):
                self._store.pull(list(indices), out=rooms)
        for index, those in zip(indices, rooms, strict=True):
            for replica, room in zip(self._params[index].replicas, those, strict=True):
                replica.written(room)

    def _pushable(self, parameter: Parameter, grads: list[Gradient]) -> list[Gradient]:
        if parameter.grad_stype == "row_sparse":
            return list(_rows(grads))
        if any(isinstance(grad, RowSparse) for grad in grads) and parameter.name not in self._warned:
            self._warned.add(parameter.name)
            logger.warning(
                "parameter %r: row-sparse gradients are sent as whole arrays, as they were not announced; give the"
                " trainer the network itself, Trainer(net, ...), or Parameter(weight, grad_stype='row_sparse')",
                parameter.name,
            )
        return grads

    def _nothing(self, parameter: Parameter) -> Gradient:
        """Return a zero gradient."""
        if self._updates and parameter.grad_stype == "row_sparse":
            return RowSparse.empty(parameter.shape, parameter.dtype)
        return np.zeros(parameter.shape, parameter.dtype)


@dataclass(frozen=True)
class Item:
    """What is to be sent of a parameter: gradients, or none; and where the answer is to be written, or nowhere."""

    index: int
    grads: Sequence[Gradient] | None
    outs: Sequence[Array]
    size_bytes: int


def grouped(items: Sequence[Item]) -> list[list[Item]]:
    """Return the items in groups that make one call each: neighbours of one kind, small ones together. Pure."""
    groups: list[list[Item]] = []
    room = 0
    for item in items:
        room -= item.size_bytes
        last = groups[-1][-1] if groups else item
        is_alike = (last.grads is None, not last.outs) == (item.grads is None, not item.outs)
        if groups and is_alike and room >= 0:
            groups[-1].append(item)
        else:
            groups.append([item])
            room = GROUP_BYTES - item.size_bytes
    return groups


def finish(calls: Sequence[Pending]) -> None:
    """Wait for all calls; raise the first error after the last call, when nothing is lent any more."""
    error: Exception | None = None
    for call in calls:
        try:
            call.wait()
        except Exception as err:
            error = error or err
    if error is not None:
        raise error


def _rows(grads: list[Gradient]) -> list[RowSparse]:
    return [
        grad if isinstance(grad, RowSparse) else RowSparse(grad, np.arange(grad.shape[0]), grad.shape) for grad in grads
    ]
