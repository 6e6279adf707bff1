"""Trainer: takes the gradients of parameters, and updates their weights, alone or with other workers."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Dict, cast

from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.store.base import KVStore
from distrun_runtime.store.compress import Setting
from distrun_runtime.store.sparse import RowSparse
from distrun_runtime.trainer.agreement import NO_MARK, UpdateRule
from distrun_runtime.trainer.buffers import Buffers
from distrun_runtime.trainer.changes import SKIP, STORE_HARM, Changed, chosen, is_skip
from distrun_runtime.trainer.collect import collect
from distrun_runtime.trainer.exchange import Exchange, Found, Reduced, Sum, Workers
from distrun_runtime.trainer.keeping import Keeping
from distrun_runtime.trainer.opening import AnyStore, give_up, open_store, updates_itself
from distrun_runtime.trainer.replica import Gradient
from distrun_runtime.trainer.updates import Updates, check

__all__ = ["Trainer", "scale_of"]


class Trainer(Keeping):
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
        optimizer_params: its parameters: `{"learning_rate": 0.1, "momentum": 0.9, "lr_scheduler": Factor(...)}`.
        kvstore: name of a store, which the trainer makes and closes; an open store; or None. No store is made where
            there is one device and one machine.
        compression_params: as `KVStore.set_gradient_compression` takes them.
        update_on_kvstore: who updates: the store (True), the trainer (False), or as fits (None).

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
        kvstore: str | AnyStore | None = "dist_sync",
        compression_params: Mapping[str, object] | None = None,
        update_on_kvstore: bool | None = None,
    ) -> None:
        collected = collect(params)
        for parameter in collected:
            if parameter.owner is not None:
                raise KVError("parameter %r belongs to a trainer already; close that first" % parameter.name)
        named = optimizer_params or {}
        if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
            raise KVError(
                "optimizer_params is a dictionary such as {'learning_rate': 0.1}, not %.60r" % (optimizer_params,)
            )
        # All that can be wrong here is found before a store is made: in a job that is a call of all workers.
        spec = rules.spec_of(optimizer, named)
        check(spec, collected)
        if compression_params:
            Setting.of(compression_params)
        buffers = Buffers(params)
        # Not made where the store updates: a rule of the user's own is then imported by servers only.
        own = Updates(spec, collected) if updates_itself(collected, kvstore, update_on_kvstore) else None
        opened = open_store(collected, buffers, kvstore, update_on_kvstore)
        try:
            updates = None if opened.updates else own or Updates(spec, collected)
            super().__init__(collected, buffers, spec, opened, updates)
            self._was_skipped = False
            """`allreduce_grads` found that a worker skips the step; `update` has nothing to do."""
            self._reduced: dict[int, Sum] | None = None
            self._left: float | None = None  # what the sums of `allreduce_grads` were still multiplied by
            self._begin(compression_params)
        except BaseException as err:
            # Not as `__exit__`, which ends this process's part in the job: the trainer may be made again.
            self._is_closed = True
            if opened.is_own and opened.store is not None:
                give_up(opened.store, err)
            raise
        for parameter in collected:
            parameter.owner = self
        if isinstance(self.kvstore, KVStore):
            self.kvstore.joins_by(self._joins)

    def __repr__(self) -> str:
        where = "no store" if self.kvstore is None else "store %r" % self.kvstore.type
        return "<Trainer of %d parameters by %r, %s>" % (len(self.params), self.optimizer, where)

    def __enter__(self) -> Trainer:
        """Return the trainer."""
        return self

    # --- steps

    def step(self, batch_size: float | None = None, ignore_stale_grad: bool = False) -> bool:
        """Update all weights by the sum of all gradients, divided.

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
        scale, found = self._scale_of(batch_size), self._found(ignore_stale_grad)
        self._tell()
        if self._exchange is None:
            self._accept_here()
            self._update_apart(found, scale)
        elif self.update_on_kvstore:
            if not self._update_in_store(found, scale):
                return self._forget(found)
        else:
            # The store's sums are scaled already: so all workers make one update, whatever batch each had.
            reduced = self._reduce(found, scale, Workers(1, 0))
            if reduced.skipped:
                return self._forget(found)
            self._update(reduced.sums, 1.0)
        self._stepped(found)
        return True

    def skip_step(self) -> None:
        """Have all workers skip this step, in place of `step` or `allreduce_grads`: no weight is updated.

        For gradients that must not be used, such as those that are not finite. So this worker stays in the same round
        as the others, whose gradients of this step are dropped too: their `step` returns False. Without rounds (one
        process, or dist_async) nobody waits for this worker, and only its own gradients are dropped.

        Raises:
            KVError: a store of another maker, which cannot.
        """
        self._needs_open()
        found: list[Found] = [(index, None) for index, one in enumerate(self._params) if one.trains]
        if self._exchange is not None and self._opened.has_rounds:
            self._exchange.skip([index for index, _ in found], SKIP)
        self._forget(found)

    def allreduce_grads(self, ignore_stale_grad: bool = False) -> bool:
        """Replace all gradients by their sums over devices and workers. You may change them, and then call `update`.

        Returns:
            True; False if a worker called `skip_step` instead: then `update` does nothing.

        Raises:
            KVError: the store updates the weights; or as `step`.
        """
        self._needs_own_updates("allreduce_grads")
        found = self._found(ignore_stale_grad)
        if self._exchange is not None:
            reduced = self._reduce(found, 1.0, Workers(1, 1))
            if reduced.skipped:
                return self._forget(found)
            self._reduced = {one[0]: one for one in reduced.sums}
        self._was_skipped = False
        return True

    def update(self, batch_size: float | None = None, ignore_stale_grad: bool = False) -> bool:
        """Update all weights by what `allreduce_grads` left in the gradients, divided as `step` does it.

        Distributed: all workers with the same batch size.

        Returns:
            True; False if the step is skipped.

        Raises:
            KVError: the store updates the weights; `allreduce_grads` was left out; or as `step`.
        """
        self._needs_own_updates("update")
        if self._was_skipped:
            self._was_skipped = False
            # Where nothing is summed, `update` alone is a step, and new gradients belong to the next one.
            if self._exchange is not None or not any(one.is_anew for each in self._params for one in each.replicas):
                return False
        if self._exchange is not None and self._reduced is None:
            raise KVError("update: the gradients are not summed yet; call allreduce_grads first, or step for both")
        scale = self._scale_of(batch_size)
        found = self._found(ignore_stale_grad)
        self._tell()
        if self._reduced is None:
            self._accept_here()
            self._update_apart(found, scale)
        else:
            # Weights that were changed since the sum are used as they are; the next sum shows whether on all workers.
            suspects = self._changes.suspects()
            self._accept(suspects)
            self._changes.mark(suspects)
            self._update(self._reduced.values(), scale)
            self._left = scale
        self._stepped(found)
        return True

    # --- weights

    def zero_grad(self) -> None:
        """Forget all gradients, before a backward that adds to what is there, as torch's does; buffers become zeros."""
        for parameter in self._params:
            parameter.zero_grad()

    def join(self) -> None:
        """Take part in later rounds without a gradient of one's own, until no worker has data; for unequal data.

        All workers call it, each when it has no more batches; then weights are alike, and all may go on together.
        Without a distributed store it does nothing. `kv.join()` of the trainer's store is the same.

        Raises:
            KVError: a store of another maker, which cannot know; or the others call `update`, and this one never did:
                it takes its last batch size there for theirs.
        """
        self._needs_open()
        if isinstance(self.kvstore, KVStore):
            self.kvstore.join()
        elif self._exchange is not None and self._opened.has_rounds:
            self._follow()

    # --- parts

    def _joins(self, join: Callable[[], None]) -> None:
        """Make the store's `join`."""
        exchange = cast(Exchange, self._exchange)
        if self.update_on_kvstore:
            self._settle("join would undo it")
            join()
            exchange.pull()
            if self._spec.params.get("lr_scheduler") is not None:  # Its steps are those of all, without ours too.
                self._steps = max(self._steps, exchange.rounds())
        elif self._opened.has_rounds:
            self._follow()

    def _follow(self) -> None:
        """Make the updates of the workers that have data, until none has."""
        nothing: list[Found] = [(index, None) for index, one in enumerate(self._params) if one.trains]
        while True:
            reduced = self._reduce(nothing, 1.0, Workers(0, 0))
            if reduced.skipped:
                continue
            if not reduced.workers.active:
                return
            if reduced.workers.unscaled and self._left is None:
                raise KVError(
                    "join: the other workers call allreduce_grads and update, and what they divide by is not known"
                    " here, where no update was made yet; let them call step, or give every worker a batch"
                )
            self._update(reduced.sums, cast(float, self._left) if reduced.workers.unscaled else 1.0)
            self._stepped(nothing)

    def _begin(self, compression_params: Mapping[str, object] | None) -> None:
        store, keys = self.kvstore, list(range(len(self._params)))
        if store is None or self._exchange is None:
            self._tell()
            self._changes.accept()
            return
        if compression_params:
            if isinstance(store, KVStore):
                store.set_gradient_compression(compression_params, keys)
            else:
                store.set_gradient_compression(compression_params)
        if self.update_on_kvstore and isinstance(store, KVStore):
            # Before the values: with multi_precision, servers then make the masters of all of them.
            store.set_optimizer(self._spec.name, **cast(Dict[str, Any], self._spec.params))
        self._exchange.start()
        self._changes.accept()
        self._tell()

    def _update_in_store(self, found: Sequence[Found], scale: float) -> bool:
        """Push gradients and bring the new weights; return whether the step was made. Where the store updates."""
        exchange = cast(Exchange, self._exchange)
        while True:
            changed = self._changed()
            if changed and not (self._opened.has_rounds and self._workers() > 1):
                self._settle(STORE_HARM)
                changed = Changed()
            if changed:
                skipped = exchange.skip([index for index, _ in found], changed.to_json())
            else:
                skipped = exchange.update(found, scale)
            if not skipped or is_skip(skipped):
                return not skipped
            # All workers are here, in the same round, with the same notes; or all of them raise.
            taken = chosen(skipped, range(self._workers()), self._names(), STORE_HARM)
            exchange.assign(taken)
            self._changes.accept(taken)

    def _reduce(self, found: Sequence[Found], scale: float, me: Workers) -> Reduced:
        """Sum gradients, and see to it that all workers will make the same update. Where the trainer updates."""
        exchange = cast(Exchange, self._exchange)
        changed = self._changes.here()
        if self._agreement is None:
            if changed.wrong:
                raise KVError(changed.wrong)
            reduced = exchange.reduce(found, scale, me, NO_MARK)
            self._accept(changed.indices)
            return reduced
        rule = UpdateRule(self._spec, self._divided)
        reduced = exchange.reduce(found, scale, me, self._agreement.mark(rule, changed))
        if reduced.skipped:
            return reduced
        try:
            if 0 < reduced.workers.unscaled < reduced.workers.active:
                raise KVError(
                    "%d of %d workers call allreduce_grads and update, the others call step; fix: call the same on all"
                    " workers" % (reduced.workers.unscaled, reduced.workers.active)
                )
            if not reduced.is_alike:
                self._accept(self._agreement.compare(rule, changed))
        except KVError:
            self._forget(found)  # Sums have taken the gradients' place.
            self._was_skipped = False
            raise
        self._accept(changed.indices)
        self._agreement.reached()
        return reduced

    def _accept_here(self) -> None:
        """Take weights that were changed; there is no store."""
        suspects = self._changes.suspects()
        wrong = self._changes.misfit(suspects)
        if wrong:
            raise KVError(wrong)
        self._accept(suspects)

    def _forget(self, found: Sequence[Found]) -> bool:
        """Note that the gradients are of no use any more, and no step was made; return False."""
        for index, _ in found:
            self._params[index].used()
        self._reduced, self._was_skipped = None, True
        return False

    def _found(self, ignore_stale_grad: bool) -> list[Found]:
        self._needs_open()
        result: list[Found] = []
        for index, one in enumerate(self._params):
            if not one.trains:
                continue
            grads = one.gradients()
            if len(grads) < len(one.replicas) and not ignore_stale_grad:
                raise KVError(
                    "parameter %r has no new gradient since the last step on %d of its %d devices: a part of the model"
                    " was not used, or the model has another tensor in its place; if that is on purpose, call step"
                    " with ignore_stale_grad=True" % (one.name, len(one.replicas) - len(grads), len(one.replicas))
                )
            result.append((index, grads or None))
        if not result:
            raise KVError("none of the %d parameters is trained: requires_grad is False" % len(self._params))
        return result

    def _update(self, sums: Iterable[Sum], scale: float) -> None:
        """Update the parameters by sums of gradients, alike on all devices."""
        self._divided = scale
        for index, given, left in sums:
            grad: Gradient | None = given
            if not isinstance(given, RowSparse):
                # As it is now: it may have been changed, or exchanged, since it was summed.
                grad = self._params[index].replicas[0].gradient()
            if grad is not None:
                cast(Updates, self._updates).together(index, grad, scale * left)

    def _update_apart(self, found: Sequence[Found], scale: float) -> None:
        for index, _ in found:
            cast(Updates, self._updates).apart(index, scale)

    def _stepped(self, found: Sequence[Found]) -> None:
        for index, _ in found:
            self._params[index].used()
        self._reduced, self._was_skipped = None, False
        self._steps += 1

    def _scale_of(self, batch_size: float | None) -> float:
        return 1.0 / self._gradients() if batch_size is None else scale_of(batch_size)

    def _gradients(self) -> int:
        """Return how many gradients of a parameter are added up in a step."""
        if self._exchange is None:
            return 1  # Each device trains by itself.
        return len(self._params[0].replicas) * (self._workers() if self._opened.has_rounds else 1)

    def _needs_own_updates(self, call: str) -> None:
        self._needs_open()
        if self.update_on_kvstore:
            raise KVError("%s: the store updates the weights; make the trainer with update_on_kvstore=False" % call)


def scale_of(batch_size: object) -> float:
    """Return what gradients of so many examples are multiplied by.

    Raises:
        KVError: it is not a finite number above 0.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, numbers.Real):
        raise KVError("batch_size is a number of examples, not %.60r" % (batch_size,))
    try:
        size = float(batch_size)
    except OverflowError:
        size = math.inf
    if not 0 < size < math.inf:
        raise KVError("batch_size is a number above 0, not %g" % size)
    return 1.0 / size
