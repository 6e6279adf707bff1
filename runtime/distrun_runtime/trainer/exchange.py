"""A trainer's weights, gradients and buffers in a store.

The keys of parameters are their indices; then comes the key under which workers are counted, where the trainers update;
then those of buffers. All keys of a step are sent at once, the first with the highest priority. Gradients are pushed as
they are, and the factor that multiplies them goes with the push (`scale`): so it may be another one in every step and
on every worker, and a compression's threshold means elements of the gradients.

`StoreExchange` uses a store of ours. `ThirdPartyExchange` uses a store from another package: only its `broadcast` and
`pushpull` of whole arrays, to sum gradients; its trainer updates the weights.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, Union
from weakref import WeakSet

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError, RuntimeFault, TimedOut
from distrun_runtime.kvstore import KVStore, KVStoreBase, Pending, RowSparse
from distrun_runtime.ps.shards import Notes
from distrun_runtime.store.keys import is_dist
from distrun_runtime.trainer.model import Buffers
from distrun_runtime.trainer.parameters import Buffer, Gradient, Parameter, is_near, memory_of, on_host

_KEYS = re.compile(r"\bkeys? (\d+(?:, \d+)*)")
"""Keys in an error's text."""
COUNTED = 7
"""Elements of the key under which workers are counted: see `StoreExchange.reduce`."""

logger = logging.getLogger(__name__)

_TAKEN: WeakSet[KVStore] = WeakSet()
"""Stores that have a trainer's parameters: another trainer's would have the same keys."""

Gradients = tuple[int, Union[list[Gradient], None]]
"""A parameter's index, and the gradients of its devices; None: it has none in this step."""

Sum = tuple[int, Gradient, float]
"""A parameter's index, the sum of its gradients, and what that is still to be multiplied by."""


class Workers(NamedTuple):
    """How many workers there are in a step where the trainers update."""

    active: int
    """They have gradients of their own."""
    unscaled: int
    """They divide by their batch size only after the sum (`Trainer.update`)."""


class Reduced(NamedTuple):
    """What came of a step's gradients where the trainers update."""

    sums: list[Sum]
    workers: Workers
    """The sum of what all workers count as."""
    is_alike: bool = True
    """Whether all workers gave the same fingerprint."""
    skipped: Notes = MappingProxyType({})
    """What the workers said, if one skipped the step. Then there are no sums."""


class Sent:
    """What was sent of a step: the whole of it is sent by `update` or `reduce`, or a part before, by `send`."""

    def __init__(self) -> None:
        self.items: list[_Item] = []
        self.calls: list[Pending] = []
        self.sums: list[Sum] = []
        """Where the trainers update: what comes of the gradients."""
        self.owners: dict[tuple[str, int], int] = {}
        """Where the trainers update: memory that a sum is written into, to the parameter."""
        self.indices: set[int] = set()
        """The parameters that have been dealt with."""


class StoreExchange:
    """Parameters in a store of ours, and the buffers of the module that they come from.

    Arguments:
        updates: the store updates weights; else it sums gradients.
        has_rounds: it is distributed and synchronous: every worker pushes every key in every step.

    Raises:
        KVError: the store has another trainer's parameters.
    """

    def __init__(
        self, store: KVStore, params: list[Parameter], buffers: Buffers, updates: bool, has_rounds: bool
    ) -> None:
        if store in _TAKEN:
            raise KVError(
                f"this {store.type!r} store has the parameters of another trainer already, under the keys 0,"
                " 1, ...: make another store for this trainer, or one trainer for all parameters"
            )
        self.store, self._params, self._buffers = store, params, buffers
        self._buffer_keys = [len(params) + 1 + index for index in range(len(buffers.names))]
        self._companion: KVStore | None = None
        """A second store, for sums of buffers: in the first one a rule may update whatever is pushed."""
        self._updates = updates
        self._has_rounds = has_rounds
        self._counter = len(params) if has_rounds and not updates else None
        """Key under which workers are counted (`Workers`): here no server knows who has joined."""
        self._warned: set[str] = set()

    def agree(self, facts: Mapping[str, str]) -> None:
        """Compare what must be alike in the trainers of all workers. Collective."""
        self.store.agree(facts)

    def start(self) -> None:
        """Give all parameters rank 0's values, on all workers. Collective."""
        keys, values = list(range(len(self._params))), [self._initial(one) for one in self._params]
        if self._counter is not None:
            keys, values = [*keys, self._counter], [*values, np.zeros(COUNTED, np.int64)]
        if self._buffers and is_dist(self.store.type):
            # They must come back as they are, whatever the store was told for all its keys.
            self.store.set_gradient_compression({"type": "none"}, self._buffer_keys)
        self.store.label(self._labels())
        with self._naming():
            self.store.init([*keys, *self._buffer_keys], [*values, *self._buffers.floats()])
        _TAKEN.add(self.store)
        self.pull()
        self.pull_buffers()

    def compress(self, compression: Mapping[str, object]) -> None:
        """Compress the gradients, as `KVStore.set_gradient_compression` does it."""
        self.store.set_gradient_compression(compression, list(range(len(self._params))))

    def close(self) -> None:
        """Close the second store, if there is one."""
        if self._companion is not None:
            self._companion.close()

    def pull(self) -> None:
        """Bring all weights up to date, except those that are row-sparse."""
        self._pull([index for index, one in enumerate(self._params) if one.stype == "default"])

    def pull_rows(self, index: int, ids: Array) -> Notes:
        """Bring rows of a row-sparse weight up to date; others stay as they are.

        Returns:
            What the workers said, if one skipped the last step: `update` waits for no row-sparse weight.
        """
        parameter = self._params[index]
        some = RowSparse.empty(parameter.shape, parameter.dtype)
        with self._naming():
            pending = self.store.row_sparse_pull(index, out=some, priority=-index, row_ids=ids)
        for replica in parameter.replicas:
            weight = replica.weight()
            weight[some.rows] = some.values
            replica.weight_written(weight)
        return pending.skipped

    def assign(self, indices: Sequence[int]) -> None:
        """Give the store rank 0's present weights, and all workers what is stored then. Collective."""
        with self._naming():
            self.store.assign(list(indices), [self._params[index].replicas[0].weight() for index in indices])
        dense = [index for index in indices if self._params[index].stype == "default"]
        self._pull(dense)
        for index in indices:
            if index not in dense:
                self.pull_rows(index, np.arange(self._params[index].shape[0]))

    def stored(self, indices: Sequence[int]) -> list[Array]:
        """Return copies of what the store has of some weights; they are not row-sparse."""
        result = [np.empty(self._params[index].shape, self._params[index].dtype) for index in indices]
        if result:
            with self._naming():
                self.store.pull(list(indices), out=result)
        return result

    # --- buffers

    def store_buffers(self) -> None:
        """Give the store rank 0's buffers. Collective."""
        if self._buffers:
            with self._naming():
                self.store.assign(self._buffer_keys, self._buffers.floats())

    def pull_buffers(self) -> None:
        """Take the buffers that the store has."""
        if self._buffers:
            found = [np.empty_like(array) for array in self._buffers.floats()]
            with self._naming():
                self.store.pull(self._buffer_keys, out=found)
            self._buffers.take_floats(found)

    def average_buffers(self) -> None:
        """Replace the buffers of float types by their mean over all workers. Collective."""
        if self.store.num_workers == 1:
            return
        try:
            self.store.barrier()
        except KVError as err:  # A worker that has joined will not come; the others must not wait for it.
            raise KVError(f"average_buffers: all workers call it together: {err}") from err
        arrays = dict(zip(self._buffers.names, self._buffers.arrays(), strict=True))
        floats = {name: array for name, array in arrays.items() if dtypes.is_float(array.dtype)}
        if not floats:
            return
        names, values = list(floats), list(floats.values())
        if self._companion is None:
            self._companion = self.store.companion()
            self._companion.init(names, values)
        means = [np.empty_like(array) for array in values]
        self._companion.pushpull(names, values, out=means, scale=1.0 / self.store.num_workers)
        self._buffers.write(dict(zip(names, means, strict=True)))

    # --- saved states

    def save_states(self, path: str | os.PathLike[str]) -> None:
        """Have the servers write weights, rule states and rank 0's buffers into a folder. Collective."""
        self.store_buffers()
        with self._naming():
            self.store.save_states(path)

    def load_states(self, path: str | os.PathLike[str]) -> None:
        """Have the servers read what `save_states` wrote; `pull` and `pull_buffers` bring it here."""
        with self._naming():
            self.store.load_states(path)

    # --- steps

    def rounds(self) -> int:
        """Return how many rounds the store's servers have seen, of the key that has most."""
        return max(int(each["rounds"]) for each in self.store.stats())

    def replaced(self, index: int) -> None:
        """Give the store a weight that was replaced. Only where no other worker has the store."""
        self.store.assign(index, self._params[index].replicas[0].weight())

    def skip(self, indices: Iterable[int], note: Mapping[str, Any]) -> Notes:
        """Have all workers skip this step of the parameters that it would update; return what each of them said."""
        own = [] if self._counter is None else [self._counter]
        return self._skip([*indices, *own], note)

    def exchange_notes(self, note: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        """Return each worker's note, by rank. All workers call it. Where the trainers update."""
        assert self._counter is not None
        notes = self._skip([self._counter], note)
        return {rank: each or {} for rank, each in notes.items()}

    def _skip(self, keys: Sequence[int], note: Mapping[str, Any]) -> Notes:
        with self._naming():
            return self.store.skip_round(keys, note).skipped

    def send(self, sent: Sent, gradients: Sequence[Gradients], scale: float) -> None:
        """Begin `update` or `reduce` with some of the parameters, and add to `sent` what was sent.

        Raises:
            KVError: two parameters' gradients are one array, or compression cannot take one. None of these was sent.
        """
        items = self._prepare(sent, gradients, scale)
        with self._naming():
            self._send(sent, items, scale)

    def _prepare(self, sent: Sent, gradients: Sequence[Gradients], scale: float) -> list[_Item]:
        """Return what is to be sent of gradients that were not sent before; errors as `send`."""
        given = [each for each in gradients if each[0] not in sent.indices]
        items = self._updated(given) if self._updates else self._summed(sent, given, scale)
        with self._naming():
            pushed = [item for item in items if item.grads is not None]
            if pushed:
                # None is sent if compression does not take one of them.
                self.store.check_push([item.index for item in pushed], [item.grads for item in pushed])
        sent.indices |= {index for index, _ in given}
        return items

    def update(self, gradients: Sequence[Gradients], scale: float, sent: Sent | None = None) -> Notes:
        """Push gradients times `scale`, and bring the weights that come of them into all devices.

        Arguments:
            sent: what was sent of this step before.

        Returns:
            What the workers said, if one skipped the step; then nothing was written.

        Raises:
            KVError: as `send`.
        """
        sent = sent or Sent()
        items = self._prepare(sent, gradients, scale)
        with self._naming():
            _note_reads(sent.calls)
            self._send(sent, items, scale, waits=True)
            skipped = _wait_for_all(sent.calls)
        for item in [] if skipped else sent.items:
            for replica, buffer in zip(self._params[item.index].replicas, item.outs, strict=False):
                replica.weight_written(buffer)
        return skipped

    def reduce(
        self,
        gradients: Sequence[Gradients],
        scale: float,
        me: Workers,
        mark: tuple[int, int],
        sent: Sent | None = None,
    ) -> Reduced:
        """Sum gradients times `scale` over devices and workers, into the gradients of all devices.

        Arguments:
            me: 1 or 0 each: what this worker counts as.
            mark: the `fingerprint` of what has to be alike on all workers.
            sent: what was sent of this step before.

        Raises:
            KVError: as `send`.
        """
        sent = sent or Sent()
        # Numbers are all equal if and only if n times the sum of their squares is the square of their sum.
        own = np.array([1, *me, *mark, *(each * each for each in mark)], np.int64)
        counted = own.copy()
        items = self._prepare(sent, gradients, scale)
        with self._naming():
            _note_reads(sent.calls)
            if self._counter is not None:
                sent.calls.append(self.store.pushpull(self._counter, own, out=counted, wait=False))
            self._send(sent, items, scale, waits=True)
            skipped = _wait_for_all(sent.calls)
        if skipped:
            return Reduced([], me, skipped=skipped)
        for item in sent.items:
            for replica, target in zip(self._params[item.index].replicas, item.outs, strict=True):
                replica.grad_written(target)
        n, active, unscaled, *marks = counted.tolist()
        is_alike = all(n * square == total * total for total, square in zip(marks[:2], marks[2:], strict=True))
        return Reduced(sorted(sent.sums, key=lambda one: one[0]), Workers(active, unscaled), is_alike)

    def _updated(self, gradients: Sequence[Gradients]) -> list[_Item]:
        """Return what is to be sent where the store updates."""
        items = []
        for index, grads in gradients:
            parameter = self._params[index]
            if grads is None and self._has_rounds:
                grads = [self._nothing(parameter)]
            is_kept = parameter.stype == "row_sparse"  # in the store
            outs = [] if is_kept else [replica.weight_buffer() for replica in parameter.replicas]
            if grads is not None or outs:  # Without rounds, no other worker waits for a push of ours.
                items.append(_Item(index, grads and self._pushable(parameter, grads), outs))
        return items

    def _summed(self, sent: Sent, gradients: Sequence[Gradients], scale: float) -> list[_Item]:
        """Return what is to be sent where the trainers update, and add to `sent` what will come of it."""
        items = []
        sums: list[Sum] = []
        owners: dict[tuple[str, int], int] = {}
        for index, grads in gradients:
            parameter = self._params[index]
            if grads is None and not self._has_rounds:
                continue
            grads = [self._nothing(parameter)] if grads is None else grads
            if any(isinstance(grad, RowSparse) for grad in grads):
                # Only this process has them: a store with several workers updates row-sparse gradients itself.
                sums.append((index, RowSparse.total(_rows(grads)), scale))
                continue
            targets = [replica.grad_buffer() for replica in parameter.replicas]
            for target in targets:
                memory = memory_of(target)
                other = sent.owners.get(memory, owners.setdefault(memory, index))
                if other != index and parameter.size:
                    raise KVError(
                        f"parameters {self._params[other].name!r} and {parameter.name!r} have the same array"
                        " for their gradients, and their sums are written into it: give each an array of its"
                        " own"
                    )
            items.append(_Item(index, grads, targets))
            sums.append((index, targets[0], 1.0))
        sent.owners.update(owners)
        sent.sums += sums
        return items

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Add the names of parameters and buffers to what is raised inside about their keys."""
        try:
            yield
        except RuntimeFault as err:
            text = str(err)
            keys = sorted({int(key) for found in _KEYS.findall(text) for key in found.split(", ")})
            said = ", ".join(filter(None, (self._note(key, text) for key in keys)))
            named = [f"parameter {one.name!r}" for one in self._params]
            named += [f"buffer {name!r}" for name in self._buffers.names]
            if said and not any(name in text for name in named):
                # In place: the error keeps its type, what else it carries, and where it was raised.
                err.args = (f"{text} ({said})", *err.args[1:])
            raise

    def _note(self, key: int, text: str) -> str:
        """Return what a key is that an error names; empty: the key says it."""
        params, buffers = self._params, self._buffers.names
        if key < len(params):
            name = params[key].name
            return "" if name == str(key) else f"key {key} is parameter {name!r}"
        if 0 <= key - len(params) - 1 < len(buffers):
            return f"key {key} is buffer {buffers[key - len(params) - 1]!r}"
        if key > len(params) and "saved states" in text:
            return f"key {key} is a buffer of the module whose states were saved; make the trainer of that module"
        return ""

    def _send(self, sent: Sent, items: Sequence[_Item], scale: float, waits: bool = False) -> None:
        """Make calls for all items, each with some, and add them to what was sent.

        Arguments:
            waits: the caller is about to wait for them. The last call then waits itself: it takes fewer messages.
        """
        sent.items += items
        groups = _grouped(items)
        for group in groups:
            keys, first = [item.index for item in group], group[0]
            grads, outs = _flat([item.grads for item in group]), _flat([item.outs for item in group])
            if first.grads is None:
                sent.calls.append(self.store.pull(keys, out=outs, priority=-first.index, wait=False))
            elif not first.outs:
                sent.calls.append(self.store.push(keys, grads, -first.index, wait=False, scale=scale))
            else:
                try:
                    is_last = waits and group is groups[-1]
                    sent.calls.append(self.store.pushpull(keys, grads, outs, -first.index, wait=is_last, scale=scale))
                except TimedOut:
                    raise
                except RuntimeFault:
                    with suppress(Exception):
                        _wait_for_all(sent.calls)  # Then nothing is lent any more.
                    raise

    def _labels(self) -> dict[int | str, str]:
        """Return what keys are called: parameters that have names, and buffers."""
        buffers = zip(self._buffer_keys, self._buffers.names, strict=True)
        named = ((key, f"parameter {one.name!r}") for key, one in enumerate(self._params) if one.name != str(key))
        return dict((*named, *((key, f"buffer {name!r}") for key, name in buffers)))

    def _initial(self, parameter: Parameter) -> Gradient:
        weight = parameter.replicas[0].weight()
        if self._updates and parameter.grad_stype == "row_sparse":
            return RowSparse(weight, np.arange(parameter.shape[0]), parameter.shape)
        return weight

    def _pull(self, indices: Sequence[int]) -> None:
        outs = [[replica.weight_buffer() for replica in self._params[index].replicas] for index in indices]
        if outs:
            with self._naming():
                self.store.pull(list(indices), out=outs)
        for index, buffers in zip(indices, outs, strict=True):
            for replica, buffer in zip(self._params[index].replicas, buffers, strict=True):
                replica.weight_written(buffer)

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


class ThirdPartyExchange:
    """Parameters and buffers in a store from another package; see `StoreExchange`."""

    def __init__(self, store: KVStoreBase, params: list[Parameter], buffers: Buffers) -> None:
        self.store, self._params, self._buffers = store, params, buffers

    def agree(self, facts: Mapping[str, str]) -> None:
        """Do nothing: the store cannot compare."""

    def start(self) -> None:
        """Give all parameters and buffers rank 0's values, on all workers."""
        for index, parameter in enumerate(self._params):
            value = parameter.replicas[0].weight()
            buffers = [replica.weight_buffer(on_host=True) for replica in parameter.replicas]
            self.store.broadcast(index, value, out=buffers, priority=-index)
            for replica, buffer in zip(parameter.replicas, buffers, strict=True):
                replica.weight_written(buffer)
        values = self._buffers.floats()
        for index, value in enumerate(values):
            buffer = np.empty_like(value)
            self.store.broadcast(len(self._params) + 1 + index, value, out=[buffer])
            values[index] = buffer
        self._buffers.take_floats(values)

    def compress(self, compression: Mapping[str, object]) -> None:
        """Compress what is sent, if the store can."""
        self.store.set_gradient_compression(compression)

    def close(self) -> None:
        """Do nothing: there is no second store."""

    def average_buffers(self) -> None:
        """Replace the buffers of float types by their mean over all workers."""
        means = {}
        for index, (name, value) in enumerate(zip(self._buffers.names, self._buffers.arrays(), strict=True)):
            if dtypes.is_float(value.dtype):
                wide = dtypes.widen(value) / self.store.num_workers
                buffer = means[name] = np.empty_like(value)
                narrow = dtypes.narrow(wide.astype(dtypes.work_dtype(value.dtype), copy=False), value.dtype)
                self.store.pushpull(len(self._params) + 1 + index, [narrow], out=[buffer])
        self._buffers.write(means)

    def skip(self, indices: Iterable[int], note: Mapping[str, Any]) -> Notes:
        """Refuse: it knows only sums of all workers."""
        raise self._refusal("have the other workers skip a step; let all of them go without calling step")

    def reduce(
        self,
        gradients: Sequence[Gradients],
        scale: float,
        me: Workers,
        mark: tuple[int, int],
        sent: Sent | None = None,
    ) -> Reduced:
        """Sum gradients over devices and workers; `scale` is left to do. All workers must have as much data.

        What must be alike on all workers is not compared. Nothing is ever `sent` before.
        """
        if not me.active:
            raise self._refusal("go on without a worker that has no more data (use epoch_size)")
        result: list[Sum] = []
        for index, grads in gradients:
            parameter = self._params[index]
            if grads is None:
                if self.store.num_workers == 1:
                    continue
                grads = [np.zeros(parameter.shape, parameter.dtype)]
            if any(isinstance(grad, RowSparse) for grad in grads):
                raise self._refusal(f"take the row-sparse gradient of parameter {parameter.name!r}")
            grads = [on_host(grad) if is_near(grad) else grad for grad in grads]
            targets = [replica.grad_buffer(on_host=True) for replica in parameter.replicas]
            self.store.pushpull(index, grads, out=targets, priority=-index)
            for replica, target in zip(parameter.replicas, targets, strict=True):
                replica.grad_written(target)
            result.append((index, targets[0], scale))
        return Reduced(result, Workers(*(self.store.num_workers * mine for mine in me)))

    def assign(self, indices: Sequence[int]) -> NoReturn:
        """Refuse: `broadcast` works once a key."""
        raise self._refusal("assign weights")

    def _refusal(self, what: str) -> KVError:
        return KVError(f"store {self.store.type!r} cannot {what}: only its broadcast and pushpull are used")


@dataclass(frozen=True)
class _Item:
    """What is to be sent of a parameter: gradients, or none; and where the answer is to be written, or nowhere."""

    index: int
    grads: Sequence[Gradient] | None
    outs: Sequence[Buffer]


def _grouped(items: Sequence[_Item]) -> list[list[_Item]]:
    """Return the items in groups that make one call each: adjacent items of one kind."""
    groups: list[list[_Item]] = []
    for item in items:
        last = groups[-1][-1] if groups else item
        is_alike = (last.grads is None, not last.outs) == (item.grads is None, not item.outs)
        if groups and is_alike:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _flat(values: Sequence[Any]) -> Sequence[Any]:
    """Return what each parameter has on its devices; if each is on one only, that itself: the store is faster then."""
    return [each[0] for each in values] if all(each is not None and len(each) == 1 for each in values) else values


def _note_reads(calls: Sequence[Pending]) -> None:
    """Note that the program may have read weights and gradients since these calls, which write them, were made."""
    for call in calls:
        call.note_reads()


def _wait_for_all(calls: Sequence[Pending]) -> Notes:
    """Wait for all calls; raise the first error after the last call, when nothing is lent any more.

    Returns:
        What the workers said, if one skipped the round.
    """
    error: Exception | None = None
    skipped: Notes = {}
    for call in calls:
        try:
            call.wait()
            skipped = skipped or call.skipped
        except Exception as err:
            error = error or err
    if error is not None:
        raise error
    return skipped


def _rows(grads: list[Gradient]) -> list[RowSparse]:
    return [
        grad if isinstance(grad, RowSparse) else RowSparse(grad, np.arange(grad.shape[0]), grad.shape) for grad in grads
    ]
