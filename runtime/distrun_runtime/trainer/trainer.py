"""Trainer: takes the gradients of parameters, and updates their weights, alone or with other workers.

All calls are here, with their documentation and their checks. How a step changes the weights is in `updates.py`: by the
rule of the store, or by the trainer's own.
"""

from __future__ import annotations

import math
import numbers
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Type, Union, cast

import numpy as np

from distrun_runtime.arrays import cores
from distrun_runtime.contract import facts
from distrun_runtime.errors import KVError, StoreClosed
from distrun_runtime.kvstore import KVStore, KVStoreBase
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops import schedules as schedule
from distrun_runtime.store.compress import Compression
from distrun_runtime.store.keys import is_dist
from distrun_runtime.store.values import row_numbers
from distrun_runtime.trainer.agreement import SHOWN, SKIP, Opened, leave, open_store, updates_itself
from distrun_runtime.trainer.exchange import Gradients, Sent, StoreExchange
from distrun_runtime.trainer.model import Buffers, collect
from distrun_runtime.trainer.parameters import Parameter
from distrun_runtime.trainer.states import LocalRule, check_rule
from distrun_runtime.trainer.updates import OwnUpdates, StoreUpdates

# Overlap: a trainer's gradients are sent while backward still computes others.
#
# Parameters are sent in groups, the last ones first, as backward comes to them. A group is sent when all of its
# gradients are there, by the thread that backward has brought the last one of; on GPUs it waits for the streams of the
# others (`Parameter.follow`). Its answers are taken in by `Trainer.step`, so that no weight changes before. The group
# that comes last, of the first parameters, is left to `step`, which follows.


GROUP_BYTES = 16 * 1024 * 1024
"""A group has parameters of at least so many bytes, but for the last one. A call costs as much as copying some MB."""


class Overlap:
    """Sends the gradients of a step before `step` is called.

    Arguments:
        params: all parameters of the trainer.
        begins: called when the first gradients of a step could be sent; returns whether they may be. If not, `step`
            sends all of them.
        send: sends the gradients of some parameters.

    Threads: any; one at a time sends.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        begins: Callable[[], bool],
        send: Callable[[Sent, Sequence[Gradients]], None],
    ) -> None:
        self._params = params
        self._begins = begins
        self._send = send
        self._lock = threading.Lock()
        """Guards what follows."""
        self._sent = Sent()
        """What was sent of the present step."""
        self._may_send: bool | None = None
        """What `begins` has said in this step; None: it was not asked yet."""
        self._told: Counter[int] = Counter()
        """How many devices of each parameter have a gradient in this step."""
        watched = [index for index, one in enumerate(params) if one.stype == "default" and one.trains and one.tells]
        self._groups = _groups(params, watched)
        self._group_of = {index: number for number, group in enumerate(self._groups) for index in group}
        self._stop = [params[index].watch(partial(self._came, index)) for index in watched]

    @property
    def has_begun(self) -> bool:
        """Whether gradients came that no step has used yet."""
        return bool(self._told)

    def take(self) -> Sent:
        """Return what was sent of the step that is being made; what comes next belongs to the next one."""
        with self._lock:
            sent, self._sent, self._may_send = self._sent, Sent(), None
            self._told.clear()
        return sent

    def stop(self) -> None:
        """Send nothing more."""
        for stop in self._stop:
            stop()

    def _came(self, index: int) -> None:
        """A device of a parameter has a new gradient."""
        with self._lock:
            self._told[index] += 1
            if self._told[index] > self._devices(index):
                raise KVError(
                    f"parameter {self._params[index].name!r} got another gradient before step: with"
                    " overlap=True its first one may be on its way; to add up the gradients of several"
                    " backwards, make the trainer with overlap=False"
                )
            number = self._group_of[index]
            group = self._groups[number]
            if number == len(self._groups) - 1 or any(self._told[each] < self._devices(each) for each in group):
                return
            if self._may_send is None:
                self._may_send = self._begins()
            if self._may_send:
                for each in group:
                    self._params[each].follow()
                with cores.beside_backward():
                    self._send(self._sent, [(each, self._params[each].gradients()) for each in group])

    def _devices(self, index: int) -> int:
        return len(self._params[index].replicas)


def _groups(params: Sequence[Parameter], indices: Sequence[int]) -> list[list[int]]:
    """Return parameters in groups of some size, beginning from the last one; in a group in their order."""
    groups: list[list[int]] = []
    size = GROUP_BYTES
    for index in reversed(indices):
        if size >= GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].insert(0, index)
        size += params[index].size_bytes
    return groups


Path = Union[str, "os.PathLike[str]"]


class Trainer:
    """Parameters, an optimizer and a store: `step` makes one update of all weights.

    With a distributed store all workers make a trainer of the same parameters, in the same order; making it is
    collective, and gives every worker rank 0's weights, and its buffers if `params` is a torch module.

    A step adds up the gradients of all devices and workers, and divides the sum. For a loss that is the mean over the
    batch, call `step()`: it divides by the number of gradients. For the sum of the examples' losses, call
    `step(batch_size)` with the number of examples in all gradients: n * b for n workers with batches of b. Both train
    as one process does with batches of n * b.

    Arguments:
        params: a list or dict of `Parameter` or of torch tensors, `net.named_parameters()`, or a torch module. An item
            may be a list, with one for each device. Keys in the store are 0, 1, ... in order (of names, if a dict).
        optimizer: name of a rule, such as "sgd" or "adam", or "module:Class" for one of yours.
        optimizer_params: its parameters: `{"learning_rate": 0.1, "momentum": 0.9, "lr_scheduler": Factor(...)}`. With
            MXNet's `param_idx2name`, parameters whose names do not end in _weight or _gamma get `wd_mult=0`.
        kvstore: name of a store, which the trainer makes and closes; an open store; or None. No store is made where
            there is one device and one machine.
        compression_params: as `KVStore.set_gradient_compression` takes them.
        update_on_kvstore: who updates: the store (True), the trainer (False), or as fits (None).
        overlap: with a distributed store, a gradient is sent as soon as backward has made it (a torch tensor), or as it
            is assigned (`Parameter.grad`), and `step` waits for what is left. Each backward is then followed by
            `step()`, without a batch size, and gradients stay as they are in between: docs/trainer.md, "Overlap".

    Raises:
        KVError: parameters, rule or store do not fit together.
        ContractError: a distributed store without a job.

    Threads: one at a time. Source: the class of this name in MXNet's gluon; `docs/trainer.md` says where we differ.
    """

    def __init__(  # noqa: PLR0917  # the order of the original
        self,
        params: object,
        optimizer: str,
        optimizer_params: Mapping[str, object] | None = None,
        kvstore: str | KVStoreBase | None = "dist_sync",
        compression_params: Mapping[str, object] | None = None,
        update_on_kvstore: bool | None = None,
        *,
        overlap: bool = False,
    ) -> None:
        if not isinstance(overlap, bool):
            raise KVError(f"overlap is True or False, not {overlap!r:.60}")
        collected = collect(params)
        for parameter in collected:
            if parameter.owner is not None:
                raise KVError(f"parameter {parameter.name!r} belongs to a trainer already; close that first")
        named = optimizer_params or {}
        if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
            raise KVError(
                f"optimizer_params is a dictionary such as {{'learning_rate': 0.1}}, not {optimizer_params!r:.60}"
            )
        # All that can be wrong here is found before a store is made: in a job that is a call of all workers.
        named = dict(named)
        decays = _decays(optimizer, named.pop("param_idx2name", None) or {}, collected)
        spec = rules.RuleSpec.of(optimizer, named)
        check_rule(spec, collected)
        if compression_params:
            Compression.of(compression_params)
        for parameter in decays:
            parameter.wd_mult = 0.0
        buffers = Buffers(params)
        # Not made where the store updates: a rule of the user's own is then imported by servers only.
        rule = LocalRule(spec, collected) if updates_itself(collected, kvstore, update_on_kvstore) else None
        opened = open_store(collected, buffers, kvstore, update_on_kvstore)
        self._params, self._buffers, self._opened, self._exchange = collected, buffers, opened, opened.exchange
        self._is_closed = False
        self._overlap: Overlap | None = None
        try:
            self._updates = _make_updates(collected, buffers, spec, rule, opened)
            if self._exchange is not None and compression_params:
                self._exchange.compress(compression_params)
            self._updates.start()
            self._overlap = self._overlapping() if overlap else None
        except BaseException as err:
            # Not as `__exit__`, which ends this process's part in the job: the trainer may be made again.
            self._is_closed = True
            if opened.is_own and opened.store is not None:
                opened.store.give_up(err)
            raise
        for parameter in collected:
            parameter.owner = self
        if isinstance(self.kvstore, KVStore):
            self.kvstore.joins_by(self._updates.join)

    def __repr__(self) -> str:
        where = "no store" if self.kvstore is None else f"store {self.kvstore.type!r}"
        return f"<Trainer of {len(self.params)} parameters by {self.optimizer!r}, {where}>"

    # --- what it is

    @property
    def params(self) -> list[Parameter]:
        """The parameters, each once; a parameter's index is its key in the store."""
        return list(self._params)

    @property
    def kvstore(self) -> KVStoreBase | None:
        """The store, or None."""
        return self._opened.store

    @property
    def update_on_kvstore(self) -> bool:
        """Whether the store updates the weights."""
        return self._opened.updates

    @property
    def optimizer(self) -> str:
        """The rule's name."""
        return self._updates.spec.name

    @property
    def optimizer_params(self) -> dict[str, Any]:
        """All parameters of the rule, as they are now."""
        return dict(self._updates.spec.params)

    @property
    def learning_rate(self) -> float:
        """The learning rate; with a schedule, that of this trainer's last step.

        Raises:
            KVError: the rule has none.
        """
        spec = self._updates.spec
        if "learning_rate" not in spec.params:
            raise KVError(f"rule {spec.name!r} has no learning_rate")
        found = schedule.read(spec.params.get("lr_scheduler"))
        return found(self._updates.steps) if found else float(cast(float, spec.params["learning_rate"]))

    # --- steps

    def step(self, batch_size: float | None = None, ignore_stale_grad: bool = False) -> bool:
        """Update all weights by the sum of all gradients, divided.

        To clip gradients by their norm, call `allreduce_grads`, clip, and `update`: before `step`, a worker has its own
        gradients only.

        Arguments:
            batch_size: what the sum is divided by, for gradients of a sum of losses: the number of examples in the
                gradients of all workers, which may be another one in every step. None, for gradients of a mean: the
                number of gradients, which is the number of devices times that of the workers that step together
                (those that have joined count too, as they contribute zero).
            ignore_stale_grad: a parameter without a new gradient is no error, but contributes nothing: zeros where
                other workers take part in the round, else it is not updated.

        Returns:
            True; False if a worker called `skip_step` instead: then no weight was updated on any worker.

        Raises:
            KVError: a parameter has no new gradient (named), or one that does not fit or that compression does not
                take; nothing was sent. Weights were changed outside of steps by only some workers, or the rules of
                the workers' trainers differ: all workers raise this, in the same step, and no weight was updated.
                Where the trainer updates, the gradients are used up then.
        """
        if self._overlap is not None and batch_size is not None:
            raise KVError(
                f"step({batch_size!r:.60}): with overlap=True gradients are sent before step is called, and divided by"
                " their number; use the mean of the losses and step(), or make the trainer with overlap=False"
            )
        scale, gradients = self._scale(batch_size), self._new_gradients(ignore_stale_grad)
        return self._updates.step(gradients, scale, None if self._overlap is None else self._overlap.take())

    def skip_step(self) -> None:
        """Have all workers skip this step, in place of `step` or `allreduce_grads`: no weight is updated.

        For gradients that must not be used, such as those that are not finite. So this worker stays in the same round
        as the others, whose gradients of this step are dropped too: their `step` returns False. Without rounds (one
        process, or dist_async) no other worker waits for this one, and only its own gradients are dropped.

        Raises:
            KVError: a store from another package, which cannot.
        """
        self._check_open()
        self._check_settled("skip_step")
        nothing: list[Gradients] = [(index, None) for index, one in enumerate(self._params) if one.trains]
        if self._exchange is not None and self._opened.has_rounds:
            self._exchange.skip([index for index, _ in nothing], SKIP)
        self._updates.drop(nothing)

    def allreduce_grads(self, ignore_stale_grad: bool = False) -> bool:
        """Replace all gradients by their sums over devices and workers. You may change them, and then call `update`.

        Returns:
            True; False if a worker called `skip_step` instead: then `update` does nothing.

        Raises:
            KVError: the store updates the weights; or as `step`.
        """
        own = self._own_updates("allreduce_grads")
        return own.reduce(self._new_gradients(ignore_stale_grad))

    def update(self, batch_size: float | None = None, ignore_stale_grad: bool = False) -> bool:
        """Update all weights by what `allreduce_grads` left in the gradients, divided as `step` does it.

        Distributed: all workers with the same batch size.

        Returns:
            True; False if the step is skipped.

        Raises:
            KVError: the store updates the weights; `allreduce_grads` was left out; or as `step`.
        """
        own = self._own_updates("update")
        if not own.may_update():
            return False
        scale, gradients = self._scale(batch_size), self._new_gradients(ignore_stale_grad)
        own.send_multipliers()
        own.update(gradients, scale)
        return True

    def zero_grad(self) -> None:
        """Forget all gradients, before a backward that adds to what is there, as torch's does; buffers become zeros."""
        for parameter in self._params:
            parameter.zero_grad()

    def join(self) -> None:
        """Take part in later rounds without a gradient of one's own, until no worker has data; for unequal data.

        All workers call it, each when it has no more batches; then weights are alike, and all may go on together.
        Without a distributed store it does nothing. `kv.join()` of the trainer's store is the same.

        Raises:
            KVError: a store from another package, which cannot know; or the others call `update`, and this worker never
                did: its own last batch size is taken for theirs.
        """
        self._check_open()
        self._check_settled("join")
        if isinstance(self.kvstore, KVStore):
            self.kvstore.join()  # calls `join` of the updates
        elif self._exchange is not None:
            self._updates.join(lambda: None)

    # --- the rule

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate from the next step on; the rule's state stays. Distributed: on every worker.

        Raises:
            KVError: not a right number, or there is a schedule.
        """
        self.set_optimizer_params(learning_rate=lr)

    def set_optimizer_params(self, **params: object) -> None:
        """Change parameters of the rule from the next step on; its state stays. Distributed: on every worker.

        Raises:
            KVError: an unknown parameter, or a value that is not right.
        """
        self._check_settled("a change of the rule")
        self._updates.set_params(params)

    # --- weights

    def pull_rows(self, parameter: Parameter | str | int, ids: object = None) -> None:
        """Bring rows of a row-sparse weight up to date, before they are used.

        Arguments:
            parameter: itself, its name or index.
            ids: row numbers in any order and shape, also repeated; None for all rows.

        Raises:
            KVError: its weight is not row-sparse, or a row is out of range.
        """
        self._check_open()
        index = self._index(parameter)
        one = self._params[index]
        if one.stype != "row_sparse" or not isinstance(self._updates, StoreUpdates):
            raise KVError(f"parameter {one.name!r} is not row-sparse: step brings all of it")
        rows = np.arange(one.shape[0]) if ids is None else row_numbers(ids, one.shape[0], f"parameter {one.name!r}")
        self._updates.pull_rows(index, rows)

    def assign(self, parameters: Iterable[Parameter | str | int] | None = None) -> None:
        """Give all workers and the store rank 0's present weights, such as those that it has just read from a file.

        Collective. The rule's state stays. Without `parameters`, all that are not row-sparse, and the buffers of the
        module that the trainer was made from.

        Raises:
            KVError: no such parameter; or the store is from another package, which cannot.
        """
        self._check_open()
        self._check_settled("assign")
        if parameters is not None and (not isinstance(parameters, Iterable) or isinstance(parameters, str)):
            raise KVError(
                f"assign takes a list of parameters, such as [{self._params[0].name!r}], not {parameters!r:.60}"
            )
        some = [one for one in self._params if one.stype == "default"] if parameters is None else parameters
        indices = [self._index(one) for one in some]
        if self._exchange is not None:
            self._exchange.assign(indices)
            if parameters is None and isinstance(self._exchange, StoreExchange):
                self._exchange.store_buffers()
                self._exchange.pull_buffers()
        self._updates.assigned(indices)

    def average_buffers(self) -> None:
        """Replace the buffers of float types by their mean over all workers, for instance before an evaluation.

        All workers call it. Integer buffers stay. Without other workers, or buffers, it does nothing.

        Raises:
            KVError: a worker has joined instead.
        """
        self._check_open()
        if self._exchange is not None and self._buffers:
            self._exchange.average_buffers()

    # --- saved states

    def save_states(self, path: Path) -> None:
        """Write weights, buffers, the rule and its states, so that `load_states` goes on from here.

        Where the store updates, that is a folder as `KVStore.save_states` makes it, and all workers call it; the
        buffers are rank 0's. Else it is a file, with this worker's buffers and all else the same on every worker.

        Raises:
            KVError: it cannot be written, or there is a file in the folder's place or a folder in the file's; or
                weights were changed that the store does not have.
            OSError: a file that cannot be written.
        """
        self._check_open()
        self._check_settled("save_states")
        self._updates.save(os.fspath(path))

    def load_states(self, path: Path) -> None:
        """Take up what `save_states` wrote: all weights and buffers, the rule with its parameters, and its states.

        Raises:
            KVError: it is not whole, or other parameters' or buffers' (names, shapes, dtypes), or of another rule.
            OSError: a file that cannot be read.
        """
        self._check_open()
        self._check_settled("load_states")
        self._updates.load(os.fspath(path))

    # --- the end

    def close(self) -> None:
        """Give the parameters back, and close the store if the trainer made it. A second close does nothing."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Trainer:
        """Return the trainer."""
        return self

    def __exit__(
        self, kind: Type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Close; after an error, without waiting for other workers."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._overlap is not None:
            self._overlap.stop()
        for parameter in self._params:
            if parameter.owner is self:
                parameter.owner = None
        if isinstance(self.kvstore, KVStore):
            self.kvstore.joins_by(None)
        if self._exchange is not None and error is None:
            self._exchange.close()
        if self._opened.is_own and self.kvstore is not None:
            leave(self.kvstore, error)

    # --- calls of its parameters (`Owner`)

    def multiplied(self) -> None:
        """Note that a parameter's multiplier was changed; the next step sends it."""
        self._updates.multipliers_are_sent = False

    def may_replace(self, parameter: Parameter) -> None:
        """Return if a parameter's weight may be written by this worker alone.

        Raises:
            RuntimeError: the store has it, and shares it with other workers.
        """
        if self.update_on_kvstore and self.kvstore is not None and "dist" in self.kvstore.type:
            raise RuntimeError(
                f"parameter {parameter.name!r} is kept in the distributed store {self.kvstore.type!r}, which"
                " cannot be reset by one worker: write the weight in place on rank 0 and call"
                " trainer.assign() on all"
            )

    def replaced(self, parameter: Parameter) -> None:
        """Take a weight that was written into all devices."""
        self._updates.replaced(self._index(parameter))

    # --- checks

    def _new_gradients(self, ignore_stale_grad: bool) -> list[Gradients]:
        """Return the gradients that no step has used yet; None for a parameter without one."""
        self._check_open()
        result: list[Gradients] = []
        for index, one in enumerate(self._params):
            if not one.trains:
                continue
            grads = one.gradients()
            if len(grads) < len(one.replicas) and not ignore_stale_grad:
                raise KVError(
                    f"parameter {one.name!r} has no new gradient since the last step on"
                    f" {len(one.replicas) - len(grads)} of its {len(one.replicas)} devices: a part of the"
                    " model was not used, or the model has another tensor in its place; if that is on"
                    " purpose, call step with ignore_stale_grad=True"
                )
            result.append((index, grads or None))
        if not result:
            raise KVError(f"none of the {len(self._params)} parameters is trained: requires_grad is False")
        return result

    def _scale(self, batch_size: float | None) -> float:
        """Return what the sum of a step's gradients is multiplied by."""
        if batch_size is not None:
            return scale_of(batch_size)
        if self._exchange is None:
            return 1.0  # Each device trains by itself.
        workers = self._exchange.store.num_workers if self._opened.has_rounds else 1
        return 1.0 / (len(self._params[0].replicas) * workers)

    def _overlapping(self) -> Overlap | None:
        """Return what sends gradients before `step`; None: nothing is sent to other workers."""
        exchange = self._exchange
        if exchange is None or self.kvstore is None or not is_dist(self.kvstore.type):
            return None
        if not isinstance(exchange, StoreExchange):
            raise KVError(f"overlap=True needs a store of distrun's own, not {self.kvstore.type!r}")
        return Overlap(
            self._params,
            self._updates.may_begin,
            lambda sent, gradients: exchange.send(sent, gradients, self._scale(None)),
        )

    def _check_settled(self, call: str) -> None:
        """Return if no gradients came that no step has used, where they are sent before it.

        Raises:
            KVError: there are some; `call` is what cannot be done now.
        """
        if self._overlap is not None and self._overlap.has_begun:
            raise KVError(
                f"{call}: gradients of this step may be on their way since backward (overlap=True); call step"
                " first, or make the trainer with overlap=False"
            )

    def _own_updates(self, call: str) -> OwnUpdates:
        self._check_open()
        if self._overlap is not None:
            raise KVError(f"{call}: with overlap=True gradients are divided as they are sent; call step")
        if isinstance(self._updates, StoreUpdates):
            raise KVError(f"{call}: the store updates the weights; make the trainer with update_on_kvstore=False")
        return self._updates

    def _index(self, parameter: Parameter | str | int) -> int:
        for index, one in enumerate(self._params):
            if one is parameter or parameter in (index, one.name):
                return index
        known = facts.listed([repr(one.name) for one in self._params], SHOWN)
        raise KVError(f"the trainer has no parameter {parameter!r:.60}; it has {known}")

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreClosed("the trainer was closed; make another one")


def _decays(optimizer: object, names: object, params: list[Parameter]) -> list[Parameter]:
    """Return the parameters that have no weight decay because of their names; none that has a multiplier already.

    Arguments:
        names: MXNet's `param_idx2name`. A parameter without a name there has that of its position.

    Raises:
        KVError: it is none, or has neither names nor positions of parameters.
    """
    without = rules.decays_by_name(str(optimizer), names)
    given = cast(Mapping[Any, str], names)
    own = {one.name for one in params}
    for key, name in given.items():
        if name not in own and (not isinstance(key, int) or not 0 <= key < len(params)):
            raise KVError(f"param_idx2name: the trainer has no parameter {key!r}, nor one with the name {name!r}")
    found = [one.name if one.name in given.values() else index for index, one in enumerate(params)]
    return [one for one, key in zip(params, found, strict=True) if key in without and one.wd_mult == 1.0]


def _make_updates(
    params: list[Parameter], buffers: Buffers, spec: rules.RuleSpec, rule: LocalRule | None, opened: Opened
) -> StoreUpdates | OwnUpdates:
    """Return how the weights are updated."""
    store, exchange = opened.store, opened.exchange
    if opened.updates and isinstance(store, KVStore) and isinstance(exchange, StoreExchange):
        return StoreUpdates(store, exchange, params, spec, opened.has_rounds)
    return OwnUpdates(rule or LocalRule(spec, params), exchange, params, buffers, opened.has_rounds)


def scale_of(batch_size: object) -> float:
    """Return what gradients of so many examples are multiplied by.

    Raises:
        KVError: it is not a finite number above 0.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, numbers.Real):
        raise KVError(f"batch_size is a number of examples, not {batch_size!r:.60}")
    try:
        size = float(batch_size)
    except OverflowError:
        size = math.inf
    if not 0 < size < math.inf:
        raise KVError(f"batch_size is a number above 0, not {size:g}")
    return 1.0 / size
