"""Rules that follow the gradient itself: sgd, nag and test."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import numpy as np

from distrun_runtime.algo.params import Param
from distrun_runtime.algo.rules.rule import COMMON, LAZY, MULTI, RESCALE, Rates, Rule, State, learning_rate
from distrun_runtime.device.dtypes import Array, name_of
from distrun_runtime.errors import KVError

MOMENTUM = Param("momentum", 0.0, low=0.0, high=1.0)


class Sgd(Rule):
    """g' = clip(rescale_grad g) + wd w; v = momentum v - learning_rate g'; w += v.

    Source: MXNet's `SGD` (`sgd_update`, `sgd_mom_update`).
    """

    name = "sgd"
    table: ClassVar[tuple[Param, ...] | None] = (learning_rate(0.01), MOMENTUM, *COMMON, LAZY)

    def start(self, weight: Array) -> State:
        """Return the momentum v, if there is any."""
        return {"momentum": np.zeros_like(weight)} if self.params["momentum"] else {}

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        step = self.slope(weight, grad, rates)
        step *= rates.learning_rate
        velocity = state.get("momentum")
        if isinstance(velocity, np.ndarray):
            velocity *= self.number("momentum")
            velocity -= step
            weight += velocity
        else:
            weight -= step

    def slope(self, weight: Array, grad: Array, rates: Rates) -> Array:
        """Return g' as a new array."""
        step = self.rescaled(grad)
        self.clip(step)
        if rates.wd:
            step += rates.wd * weight
        return step


class Nag(Sgd):
    """Nesterov's momentum. g' = clip(rescale_grad g) + wd w; v = momentum v - learning_rate g'.

    w += momentum v - learning_rate g'. Without momentum it is `sgd`.

    Source: MXNet's `NAG`, as its text has it, and torch's `SGD(nesterov=True)`. We differ: with a weight decay,
    `nag_mom_update` 1.9.1 reads w for the momentum after it has overwritten it, so that w decays twice a step.
    """

    name = "nag"
    table = (learning_rate(0.01), MOMENTUM, *COMMON)

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        velocity = state.get("momentum")
        if not isinstance(velocity, np.ndarray):
            super().update(weight, grad, state, rates)
            return
        step = self.slope(weight, grad, rates)
        step *= rates.learning_rate
        velocity *= self.number("momentum")
        velocity -= step
        weight -= step
        np.multiply(velocity, self.number("momentum"), out=step)
        weight += step


class Test(Rule):
    """w += rescale_grad g. Integer weights too, if rescale_grad is a whole number; they wrap around.

    Source: MXNet's `Test`.
    """

    __test__ = False  # pytest: a rule, not a set of tests
    name = "test"
    table = (RESCALE, MULTI)

    def check(self, dtype: np.dtype[Any]) -> None:
        """Return if weights of this dtype can be updated."""
        rescale = self.number("rescale_grad")
        if dtype.kind in "iu" and (rescale != int(rescale) or abs(rescale) >= 2**63):
            text = "rule 'test' with rescale_grad=%g updates float weights, not %s: whole numbers only"
            raise KVError(text % (rescale, name_of(dtype)))

    def start(self, weight: Array) -> State:
        """Return no state."""
        return {}

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        if weight.dtype.kind in "iu":
            weight += grad * np.array(int(cast(float, self.params["rescale_grad"])), np.int64).astype(weight.dtype)
        else:
            weight += self.rescaled(grad)
