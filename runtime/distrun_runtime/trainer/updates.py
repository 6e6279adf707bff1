"""Updates: the rule where the trainer itself updates the weights, with the state of every parameter."""

from __future__ import annotations

import json

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops.optimizers import Rule, RuleSpec, State
from distrun_runtime.store.sparse import RowSparse
from distrun_runtime.trainer.changes import digest
from distrun_runtime.trainer.parameter import Parameter
from distrun_runtime.trainer.replica import Gradient, Replica

__all__ = ["Updates", "check"]


class Updates:
    """A rule and its states, by parameter and device."""

    def __init__(self, spec: RuleSpec, params: list[Parameter]) -> None:
        self.spec = spec
        self._params = params
        self.states: dict[tuple[int, int], State] = {}
        """By parameter's index and device. All devices share the first one's where gradients are summed over them."""
        self._rule = self._made(spec)

    def change(self, spec: RuleSpec) -> None:
        """Take other parameters or multipliers; the states stay.

        Raises:
            KVError: they are not right.
        """
        rule = self._made(spec)
        for (index, device), state in self.states.items():
            weight = self._params[index].replicas[device].weight()
            self.states[index, device] = rules.carry_state(rule, weight, state)
        self.spec, self._rule = spec, rule

    def together(self, index: int, grad: Gradient, scale: float) -> None:
        """Update a parameter by one gradient, on the first device; the others get a copy."""
        first, *others = self._params[index].replicas
        weight = self._step(index, 0, first, grad, scale)
        for replica in others:
            room = replica.room()
            np.copyto(room, weight)
            replica.written(room)

    def apart(self, index: int, scale: float) -> None:
        """Update each device of a parameter by its own gradient, where that is fresh."""
        for device, replica in enumerate(self._params[index].replicas):
            grad = replica.gradient() if replica.is_fresh else None
            if grad is not None:
                self._step(index, device, replica, grad, scale)

    def replaced(self, index: int) -> None:
        """Note that a weight was written by other means: its float32 master, if there is one, follows."""
        for device, replica in enumerate(self._params[index].replicas):
            rules.renew_master(replica.weight(), self.states.get((index, device), {}))

    def digest(self) -> str:
        """Return a digest of all weights and states, to compare workers by."""
        arrays = [one.replicas[0].weight() for one in self._params]
        counters: dict[str, object] = {}
        for place, state in sorted(self.states.items()):
            for name, part in sorted(state.items()):
                if isinstance(part, np.ndarray):
                    arrays.append(part)
                counters["%d.%d.%s" % (*place, name)] = None if isinstance(part, np.ndarray) else str(part)
        return digest(arrays) + json.dumps(counters, sort_keys=True)

    def _step(self, index: int, device: int, replica: Replica, grad: Gradient, scale: float) -> Array:
        weight = replica.weight()
        if (index, device) not in self.states:
            self.states[index, device] = self._rule.new_state(weight)
        state, knobs = self.states[index, device], self.spec.knobs(index)
        if isinstance(grad, RowSparse):
            some = grad.canonical()
            self._rule.step(weight, _scaled(some.values, scale), state, knobs, some.rows)
        else:
            self._rule.step(weight, _scaled(grad, scale), state, knobs)
        replica.written(weight)
        return weight

    def _made(self, spec: RuleSpec) -> Rule:
        # A rule of the user's own runs in the user's own process here: any module may be imported.
        return rules.rule_of(spec, None)


def check(spec: RuleSpec, params: list[Parameter]) -> None:
    """Return if a built-in rule can update parameters of these dtypes. Another rule is not looked at.

    Raises:
        KVError: it cannot; the parameter is named.
    """
    if spec.name not in rules.RULES:
        return
    rule = rules.rule_of(spec)
    for parameter in params:
        try:
            rule.check(parameter.dtype)
        except KVError as err:
            raise KVError("parameter %r: %s" % (parameter.name, err)) from None


def _scaled(grad: Array, scale: float) -> Array:
    """Return scale * grad, in the dtype that is calculated in; the gradient itself if the scale is 1."""
    if scale == 1.0:
        return grad
    wide = dtypes.widen(grad)
    result = np.empty_like(wide)
    return np.multiply(wide, scale, out=result, casting="same_kind")
