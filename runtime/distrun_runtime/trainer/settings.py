"""Settings: a trainer's rule, its parameters and multipliers, where they stand and where they have to be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Dict, cast

from distrun_runtime.errors import KVError
from distrun_runtime.ops import schedules as schedule
from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.store.base import Key, KVStore
from distrun_runtime.trainer.opening import AnyStore, Opened
from distrun_runtime.trainer.parameter import Parameter
from distrun_runtime.trainer.updates import Updates

__all__ = ["Settings"]


class Settings:
    """The half of a trainer that is about its rule.

    Arguments:
        updates: the rule here; None if the store has it.
    """

    def __init__(self, params: list[Parameter], spec: RuleSpec, opened: Opened, updates: Updates | None) -> None:
        self._params, self._spec, self._opened, self._updates = params, spec, opened, updates
        self._steps = 0
        self._is_told = False  # multipliers

    @property
    def params(self) -> list[Parameter]:
        """The parameters, each once; a parameter's index is its key in the store."""
        return list(self._params)

    @property
    def kvstore(self) -> AnyStore | None:
        """The store, or None."""
        return self._opened.store

    @property
    def update_on_kvstore(self) -> bool:
        """Whether the store updates the weights."""
        return self._opened.updates

    @property
    def optimizer(self) -> str:
        """The rule's name."""
        return self._spec.name

    @property
    def optimizer_params(self) -> dict[str, Any]:
        """All parameters of the rule, as they are now."""
        return dict(self._spec.params)

    @property
    def learning_rate(self) -> float:
        """The learning rate; with a schedule, that of this trainer's last step.

        Raises:
            KVError: the rule has none.
        """
        if "learning_rate" not in self._spec.params:
            raise KVError("rule %r has no learning_rate" % self._spec.name)
        found = schedule.read(self._spec.params.get("lr_scheduler"))
        return found(self._steps) if found else float(cast(float, self._spec.params["learning_rate"]))

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
        spec = self._spec.changed({"params": params})
        if isinstance(self.kvstore, KVStore) and self.update_on_kvstore:
            self.kvstore.set_optimizer_params(**params)
        self._take(spec)

    def multiplied(self) -> None:
        """Note that a parameter's multiplier was changed; the next step tells it."""
        self._is_told = False

    def _tell(self, anew: bool = False) -> None:
        """Tell the rule the multipliers of all parameters, if they were changed or `anew`."""
        if self._is_told:
            return
        rates: dict[Key, float] = {index: one.lr_mult for index, one in enumerate(self._params)}
        decays: dict[Key, float] = {index: one.wd_mult for index, one in enumerate(self._params)}
        spec = self._spec.changed({"lr_mult": rates, "wd_mult": decays})
        if anew or spec != self._spec:
            if isinstance(self.kvstore, KVStore) and self.update_on_kvstore:
                self.kvstore.set_multipliers(lr=rates, wd=decays)
            self._take(spec)
        self._is_told = True

    def _take(self, spec: RuleSpec) -> None:
        if self._updates is not None:
            self._updates.change(spec)
        self._spec = spec

    def _loaded(self, rule: Mapping[str, Any], steps: int) -> None:
        """Take a rule that was saved, on the servers too; the parameters keep the multipliers that they have now."""
        spec = RuleSpec.from_json(rule)
        if isinstance(self.kvstore, KVStore) and self.update_on_kvstore:
            self.kvstore.set_optimizer(spec.name, replace=True, **cast(Dict[str, Any], spec.params))
        self._take(spec)
        self._steps, self._is_told = steps, False
        self._tell(anew=True)
