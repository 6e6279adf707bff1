"""How a step changes the weights: by the rule of the store, or by the trainer's own.

`StoreUpdates` and `OwnUpdates` are the two ways, with the same methods. With `StoreUpdates`, a step pushes gradients,
and pulls the weights that the store's rule made of them. With `OwnUpdates`, a store (if there is one) sums the
gradients, and every worker runs the rule itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Dict, cast

from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore, RowSparse
from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.trainer import states
from distrun_runtime.trainer.agreement import (
    NO_MARK,
    STORE_HARM,
    Agreement,
    Changed,
    Changes,
    UpdateRule,
    change_refused,
    check_rules,
    chosen,
    is_skip,
    said_rules,
    trainer_facts,
)
from distrun_runtime.trainer.exchange import Gradients, Reduced, Sent, StoreExchange, Sum, ThirdPartyExchange, Workers
from distrun_runtime.trainer.model import Buffers
from distrun_runtime.trainer.parameters import Gradient, Parameter
from distrun_runtime.trainer.states import LocalRule

RESERVED = (
    "the rule of this store updates a trainer's weights, and would update it; fix: keep values of your own in another"
    " store, kvstore.create(%r), or make the trainer with update_on_kvstore=False"
)
"""Why a store whose rule updates weights has no other keys than its trainer's."""


class StoreUpdates:
    """The store's rule updates the weights.

    Arguments:
        has_rounds: every worker takes part in every step.
    """

    def __init__(
        self, store: KVStore, exchange: StoreExchange, params: Sequence[Parameter], spec: RuleSpec, has_rounds: bool
    ) -> None:
        self._store, self._exchange, self._params, self._has_rounds = store, exchange, params, has_rounds
        self._changes = Changes(params)
        self.spec = spec
        """The rule as it is now."""
        self._agreed = spec
        """The rule that all workers were last found to have."""
        self.steps = 0
        """Steps that were made."""
        self.multipliers_are_sent = False

    def start(self) -> None:
        """Give rule and weights to the store; all workers have rank 0's weights then. Collective."""
        self._store.reserve(RESERVED % self._store.type)
        try:
            self._agreed = _with_multipliers(self.spec, self._params)
            self._exchange.agree(trainer_facts(self._agreed, self._names(), True))
            # Before the weights: with multi_precision, servers then make the masters of all of them.
            self._store.set_optimizer(self.spec.name, replace=None, **cast(Dict[str, Any], self.spec.params))
            self._exchange.start()
        except BaseException:
            self._store.reserve("")
            raise
        self._changes.accept()
        self.send_multipliers()

    # --- steps

    def may_begin(self) -> bool:
        """Make ready for gradients that are sent before `step`; return False if weights are others than the store's.

        Or if the rule is another than all workers had. Then the round has to be skipped, which is for `step` to say.
        """
        self.send_multipliers()
        return not self._changed() and not self._has_new_rule

    def step(self, gradients: Sequence[Gradients], scale: float, sent: Sent | None = None) -> bool:
        """Push gradients times `scale`, and bring the weights that come of them; return whether the step was made.

        Arguments:
            sent: what was sent of this step before.
        """
        if sent is not None and sent.indices:
            written = self._changes.suspects()
            if written:
                raise KVError(
                    "weights were written after their gradients had been sent:"
                    f" {', '.join(repr(self._names()[index]) for index in written)}; with overlap=True, write"
                    " weights between step and the next backward"
                )
        else:
            self.send_multipliers()
        tells_rule = (sent is None or not sent.indices) and self._has_new_rule
        while True:
            changed = self._changed() if sent is None or not sent.indices else Changed()
            if changed and not (self._has_rounds and self._exchange.store.num_workers > 1):
                self._take_alone(changed, STORE_HARM)
                changed = Changed()
            if changed or tells_rule:
                note = {**changed.to_json(), **({"rule": self.spec.to_json()} if tells_rule else {})}
                notes = self._exchange.skip([index for index, _ in gradients], note)
            else:
                notes = self._exchange.update(gradients, scale, sent)
                sent = None
            if not notes or is_skip(notes):
                self.drop(gradients)
                self.steps += not notes
                return not notes
            # All workers are here, in the same round, with the same notes; or all of them raise.
            said = said_rules(notes)
            tells_rule = said is False
            if tells_rule:
                continue  # All of them say theirs in the next round.
            if said:
                check_rules(notes, self._names())
                self._agreed = self.spec
            taken = chosen(notes, self._exchange.store.members, self._names(), STORE_HARM)
            self._exchange.assign(taken)
            self._changes.accept(taken)

    def drop(self, gradients: Sequence[Gradients]) -> None:
        """Note that these gradients were used, or are of no use any more."""
        for index, _ in gradients:
            self._params[index].used()

    def join(self, join: Callable[[], None]) -> None:
        """Leave the rounds to the other workers (`join` of the store), until none has data; take their weights."""
        self._settle("join would undo it")
        join()
        self._exchange.pull()
        if self.spec.params.get("lr_scheduler") is not None:  # Its steps are those of all, without ours too.
            self.steps = max(self.steps, self._exchange.rounds())

    def pull_rows(self, index: int, rows: Array) -> None:
        """Bring rows of a row-sparse weight up to date."""
        if self._params[index].written_devices():
            # Rows of the store would be mixed with those of the user.
            self._take_alone(Changed((index,)), "pull_rows would undo a part of it")
        notes = self._exchange.pull_rows(index, rows)
        if notes and not is_skip(notes):
            chosen(notes, self._exchange.store.members, self._names(), STORE_HARM)

    # --- the rule

    def set_params(self, params: Mapping[str, object]) -> None:
        """Change parameters of the rule; its state stays."""
        spec = self.spec.changed({"params": params})
        self._store.set_optimizer_params(**params)
        self.spec = spec

    @property
    def _has_new_rule(self) -> bool:
        """Whether this worker wants another rule than all workers had, and can ask what the others want.

        It cannot if it waits for no weight: then it does not hear in a step what the others said.
        """
        if self.spec is self._agreed or self.spec == self._agreed:
            return False
        hears = any(one.stype == "default" and one.trains for one in self._params)
        return hears and self._has_rounds and self._exchange.store.num_workers > 1

    def send_multipliers(self, anew: bool = False) -> None:
        """Give the rule the multipliers of all parameters, if they were changed or `anew`."""
        if self.multipliers_are_sent and not anew:
            return
        spec = _with_multipliers(self.spec, self._params)
        if anew or spec != self.spec:
            rates, decays = _multipliers(self._params)
            self._store.set_multipliers(lr=rates, wd=decays)
            self.spec = spec
        self.multipliers_are_sent = True

    # --- weights that were changed outside of steps

    def replaced(self, index: int) -> None:
        """Take a weight that was written into all devices, in a store that no other worker shares."""
        self._exchange.replaced(index)

    def assigned(self, indices: Iterable[int]) -> None:
        """Note that all workers have these weights as they are now."""
        self._changes.accept(indices)

    def _changed(self) -> Changed:
        """Return which weights are others than the store's."""
        suspects = self._changes.suspects()
        dense = [index for index in suspects if self._params[index].stype == "default"]
        if self._changes.misfit(suspects):
            dense = []
        return self._changes.against(suspects, dict(zip(dense, self._exchange.stored(dense), strict=True)))

    def _settle(self, harm: str) -> None:
        """Take changed weights if no other worker has to; otherwise refuse them.

        Raises:
            KVError: there are some, and others would have to take them; `harm` is what would come of it.
        """
        changed = self._changed()
        if changed:
            self._take_alone(changed, harm)

    def _take_alone(self, changed: Changed, harm: str) -> None:
        if changed.wrong or self._exchange.store.num_workers > 1:
            raise change_refused(changed, self._names(), harm)
        self._exchange.assign(changed.indices)
        self._changes.accept(changed.indices)

    def _names(self) -> list[str]:
        return [one.name for one in self._params]

    # --- saved states

    def save(self, path: str) -> None:
        """Have the store write weights, buffers, rule and states into a folder. Collective.

        Raises:
            KVError: there is a file; or weights were changed that the store does not have.
        """
        _refuse_file(path)
        self._settle("save_states would leave it out")
        self._exchange.save_states(path)

    def load(self, path: str) -> None:
        """Take up what `save` wrote; the parameters keep the multipliers that they have now. Collective."""
        _refuse_file(path)
        self._exchange.load_states(path)
        found = states.rule_of_folder(path)
        if found is not None:
            spec, steps = found
            self._store.set_optimizer(spec.name, replace=True, **cast(Dict[str, Any], spec.params))
            self.spec, self.steps = spec, steps
            self.send_multipliers(anew=True)
        self._exchange.pull()
        self._exchange.pull_buffers()
        self._changes.accept()


class OwnUpdates:
    """The trainer updates the weights, by gradients that a store sums; without a store, each device by its own.

    A step has two halves: `reduce` replaces the gradients by their sums, `update` runs the rule.

    Arguments:
        has_rounds: every worker takes part in every step.
    """

    def __init__(
        self,
        rule: LocalRule,
        exchange: StoreExchange | ThirdPartyExchange | None,
        params: list[Parameter],
        buffers: Buffers,
        has_rounds: bool,
    ) -> None:
        self._rule, self._exchange, self._params, self._buffers = rule, exchange, params, buffers
        self._has_rounds = has_rounds
        self._changes = Changes(params)
        self._agreement: Agreement | None = None
        """With the trainers of the other workers."""
        if has_rounds and isinstance(exchange, StoreExchange):
            self._agreement = Agreement(params, rule, exchange)
        self.steps = 0
        """Steps that were made."""
        self.multipliers_are_sent = False
        self._sums: dict[int, Sum] | None = None
        """What `reduce` left for `update`, by index of the parameter."""
        self._was_skipped = False
        """`reduce` found that a worker skips the step; `update` has nothing to do."""
        self._divided: float | None = None
        """What the sums of the last update were multiplied by; None before the first, and after `assigned`."""
        self._scale_after_sum: float | None = None
        """What `update` multiplied the sums of `reduce` by, the last time."""

    @property
    def spec(self) -> RuleSpec:
        """The rule as it is now."""
        return self._rule.spec

    def start(self) -> None:
        """Give all workers rank 0's weights. Collective."""
        self.send_multipliers()
        if self._exchange is not None:
            self._exchange.agree(trainer_facts(self.spec, [one.name for one in self._params], False))
            self._exchange.start()
        self._changes.accept()
        self._rule.prepare()

    # --- steps

    def may_begin(self) -> bool:
        """Return True: gradients may be sent before `step`, which finds out what else is to be known."""
        return True

    def step(self, gradients: Sequence[Gradients], scale: float, sent: Sent | None = None) -> bool:
        """Sum gradients, multiply them by `scale` and update; return whether the step was made.

        Arguments:
            sent: what was sent of this step before.
        """
        self.send_multipliers()
        if self._exchange is None:
            self._update_each_device(gradients, scale)
        else:
            # The sums are scaled already: so all workers make one update, whatever batch each had.
            reduced = self._reduce(gradients, scale, Workers(1, 0), sent)
            if reduced.skipped:
                self.drop(gradients)
                return False
            self._update(reduced.sums, 1.0)
        self._end_step(gradients)
        return True

    def reduce(self, gradients: Sequence[Gradients]) -> bool:
        """Replace gradients by their sums, for `update`; return False if a worker skips the step."""
        if self._exchange is not None:
            reduced = self._reduce(gradients, 1.0, Workers(1, 1))
            if reduced.skipped:
                self.drop(gradients)
                return False
            self._sums = {one[0]: one for one in reduced.sums}
        self._was_skipped = False
        return True

    def may_update(self) -> bool:
        """Return False if the step is skipped, so that there is nothing to update.

        Raises:
            KVError: `reduce` was left out.
        """
        if self._was_skipped:
            self._was_skipped = False
            # Where nothing is summed, `update` alone is a step, and new gradients belong to the next one.
            if self._exchange is not None or not any(
                one.is_surely_new for each in self._params for one in each.replicas
            ):
                return False
        if self._exchange is not None and self._sums is None:
            raise KVError("update: the gradients are not summed yet; call allreduce_grads first, or step for both")
        return True

    def update(self, gradients: Sequence[Gradients], scale: float) -> None:
        """Update by what `reduce` left, times `scale`."""
        if self._sums is None:
            self._update_each_device(gradients, scale)
        else:
            # Weights that were changed since the sum are used as they are; the next sum shows whether on all workers.
            suspects = self._changes.suspects()
            self._accept(suspects)
            self._changes.mark(suspects)
            self._update(self._sums.values(), scale)
            self._scale_after_sum = scale
        self._end_step(gradients)

    def drop(self, gradients: Sequence[Gradients]) -> None:
        """Note that these gradients are of no use any more, and no step was made."""
        for index, _ in gradients:
            self._params[index].used()
        self._sums, self._was_skipped = None, True

    def join(self, _: Callable[[], None]) -> None:
        """Make the updates of the workers that have data, until none has."""
        if not self._has_rounds:
            return
        nothing: list[Gradients] = [(index, None) for index, one in enumerate(self._params) if one.trains]
        while True:
            reduced = self._reduce(nothing, 1.0, Workers(0, 0))
            if reduced.skipped:
                continue
            if not reduced.workers.active:
                return
            if reduced.workers.unscaled and self._scale_after_sum is None:
                raise KVError(
                    "join: the other workers call allreduce_grads and update, and what they divide by is not known"
                    " here, where no update was made yet; let them call step, or give every worker a batch"
                )
            self._update(reduced.sums, cast(float, self._scale_after_sum) if reduced.workers.unscaled else 1.0)
            self._end_step(nothing)

    def _reduce(self, gradients: Sequence[Gradients], scale: float, me: Workers, sent: Sent | None = None) -> Reduced:
        """Sum gradients, and see to it that all workers will make the same update."""
        exchange = self._exchange
        assert exchange is not None
        changed = self._changes.here()
        if self._agreement is None:
            if changed.wrong:
                raise KVError(changed.wrong)
            reduced = exchange.reduce(gradients, scale, me, NO_MARK, sent)
            self._accept(changed.indices)
            return reduced
        rule = UpdateRule(self.spec, self._divided)
        reduced = exchange.reduce(gradients, scale, me, self._agreement.mark(rule, changed), sent)
        if reduced.skipped:
            return reduced
        try:
            if 0 < reduced.workers.unscaled < reduced.workers.active:
                raise KVError(
                    f"{reduced.workers.unscaled} of {reduced.workers.active} workers call allreduce_grads"
                    " and update, the others call step; fix: call the same on all workers"
                )
            if not reduced.is_alike:
                self._accept(self._agreement.compare(rule, changed))
        except KVError:
            self.drop(gradients)  # Sums have taken the gradients' place.
            self._was_skipped = False
            raise
        self._accept(changed.indices)
        self._agreement.has_loaded = False
        return reduced

    def _update(self, sums: Iterable[Sum], scale: float) -> None:
        """Update the parameters by sums of gradients, alike on all devices."""
        self._divided = scale
        found = []
        for index, total, left in sums:
            grad: Gradient | None = total
            if not isinstance(total, RowSparse):
                # As it is now: it may have been changed, or exchanged, since it was summed.
                grad = self._params[index].replicas[0].gradient()
            if grad is not None:
                found.append((index, grad, scale * left))
        self._rule.update(found)

    def _update_each_device(self, gradients: Sequence[Gradients], scale: float) -> None:
        """Update each device by its own gradient; there is no store."""
        suspects = self._changes.suspects()
        wrong = self._changes.misfit(suspects)
        if wrong:
            raise KVError(wrong)
        self._accept(suspects)
        self._rule.update_each_device([index for index, _ in gradients], scale)

    def _end_step(self, gradients: Sequence[Gradients]) -> None:
        self.drop(gradients)
        self._was_skipped = False
        self.steps += 1

    # --- the rule

    def set_params(self, params: Mapping[str, object]) -> None:
        """Change parameters of the rule; its state stays."""
        self._rule.change(self.spec.changed({"params": params}))

    def send_multipliers(self) -> None:
        """Give the rule the multipliers of all parameters, if they were changed."""
        if not self.multipliers_are_sent:
            spec = _with_multipliers(self.spec, self._params)
            if spec != self.spec:
                self._rule.change(spec)
            self.multipliers_are_sent = True

    # --- weights that were changed outside of steps

    def replaced(self, index: int) -> None:
        """Take a weight that was written into all devices of this worker."""
        self._rule.renew_masters(index)
        self._changes.mark([index])

    def assigned(self, indices: Iterable[int]) -> None:
        """Note that all workers have these weights as they are now."""
        self._accept(indices)
        self._divided = None

    def _accept(self, indices: Iterable[int]) -> None:
        """Take weights as they are now, in this process."""
        for index in indices:
            self._rule.renew_masters(index)
            self._changes.accept([index])

    # --- saved states

    def save(self, path: str) -> None:
        """Write weights, buffers, rule and states into a file."""
        states.save(path, self._rule, self._params, self._buffers, self.steps)

    def load(self, path: str) -> None:
        """Take up what `save` wrote; the parameters keep the multipliers that they have now."""
        spec, self.steps = states.load(path, self._rule, self._params, self._buffers)
        self._rule.change(spec)
        self.multipliers_are_sent = False
        self.send_multipliers()
        if self._agreement is not None:
            self._agreement.has_loaded = True
        self._changes.accept()


def _multipliers(params: Sequence[Parameter]) -> tuple[dict[int | str, float], dict[int | str, float]]:
    """Return multipliers of the learning rate and of the weight decay, by index."""
    rates: dict[int | str, float] = {index: one.lr_mult for index, one in enumerate(params)}
    return rates, {index: one.wd_mult for index, one in enumerate(params)}


def _with_multipliers(spec: RuleSpec, params: Sequence[Parameter]) -> RuleSpec:
    """Return a rule with the multipliers that the parameters have now."""
    rates, decays = _multipliers(params)
    return spec.changed({"lr_mult": rates, "wd_mult": decays})


def _refuse_file(path: str) -> None:
    if os.path.isfile(path):
        raise KVError(
            f"{path} is a file, as it is written where a trainer updates by itself; the store of this trainer"
            " updates (update_on_kvstore=True) and keeps a folder"
        )
