"""Rules with the arithmetic of torch.optim: torch_sgd, torch_adam, torch_adamw and torch_rmsprop.

Parameters have torch's names; MXNet's are understood too. `lr_scheduler`, `rescale_grad`, `clip_gradient`,
`multi_precision` and `lazy_update` are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, cast

import numpy as np

from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.ops.optimizers.adaptive import BETAS, epsilon, moments
from distrun_runtime.ops.optimizers.base import (
    COMMON,
    DECAY,
    LAZY,
    Rates,
    Rule,
    State,
    average,
    learning_rate,
    subtract,
)
from distrun_runtime.ops.optimizers.sgd import MOMENTUM
from distrun_runtime.ops.params import Json, Param

SHARED = (Param("maximize", False), *COMMON, LAZY)


class TorchRule(Rule):
    """What these rules share. With s for -1 if `maximize`, else 1: g' = s clip(rescale_grad g) + wd w."""

    def slope(self, weight: Array, grad: Array, wd: float) -> Array:
        """Return g', only to be read: `grad` itself if nothing changes it."""
        given = self.clipped(grad)
        if self.params["maximize"]:
            given = np.negative(given)
        if not wd:
            return given
        result = np.multiply(weight, wd)
        result += given
        return result


class TorchSgd(TorchRule):
    """v = momentum v + (1 - dampening) g', and v = g' in the first step; w -= learning_rate v.

    With nesterov, w -= learning_rate (g' + momentum v). Without dampening, and while the learning rate stays, it is
    `sgd` or `nag`.

    Source: torch's `SGD`.
    """

    name = "torch_sgd"
    table = (learning_rate(0.001), MOMENTUM, Param("dampening", 0.0), Param("nesterov", False), *SHARED)

    @classmethod
    def complete(cls, params: Mapping[str, object]) -> dict[str, Json]:
        """Return all parameters, as `Rule.complete` does.

        Raises:
            KVError: as there; or nesterov without a momentum, or with dampening.
        """
        result = super().complete(params)
        if result["nesterov"] and (not result["momentum"] or result["dampening"]):
            found = f"momentum={result['momentum']:g}, dampening={result['dampening']:g}"
            raise KVError(f"rule {cls.name!r}: nesterov=True needs a momentum above 0 and dampening=0, not {found}")
        return result

    def start(self, weight: Array) -> State:
        """Return v, if there is a momentum."""
        return {"momentum": np.zeros_like(weight)} if self.params["momentum"] else {}

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        step = self.slope(weight, grad, rates.wd)
        if "momentum" in state:
            velocity, momentum = cast(Array, state["momentum"]), self.number("momentum")
            velocity *= momentum
            share = 1.0 - self.number("dampening") if rates.updates > 1 else 1.0
            velocity += share * step if self.params["dampening"] else step
            step = step + momentum * velocity if self.params["nesterov"] else velocity
        weight -= rates.learning_rate * step


class TorchAdam(TorchRule):
    """t += 1; with b1, b2 for beta1, beta2: m = b1 m + (1 - b1) g'; v = b2 v + (1 - b2) g' g'.

    w -= learning_rate / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + epsilon). With amsgrad, the largest v so far is in
    the place of v.

    Source: torch's `Adam`; Kingma and Ba, 2015; Reddi, Kale and Kumar, 2018, for amsgrad.
    """

    name = "torch_adam"
    table: ClassVar[tuple[Param, ...] | None] = (
        learning_rate(0.001),
        *BETAS,
        epsilon(1e-8),
        Param("amsgrad", False),
        *SHARED,
    )

    def start(self, weight: Array) -> State:
        """Return m, v, and the largest v for amsgrad."""
        names = ("mean", "variance", *(("largest",) if self.params["amsgrad"] else ()))
        return {name: np.zeros_like(weight) for name in names}

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        self.descend(weight, self.slope(weight, grad, rates.wd), state, rates)

    def descend(self, weight: Array, slope: Array, state: State, rates: Rates) -> None:
        """Take g' into m and v, and step."""
        step = moments(self, slope, state)
        variance = cast(Array, state["variance"])
        if "largest" in state:
            variance = np.maximum(cast(Array, state["largest"]), variance, out=cast(Array, state["largest"]))
        np.sqrt(variance, out=step)
        step /= math.sqrt(1.0 - self.number("beta2") ** rates.updates)
        step += self.number("epsilon")
        np.divide(cast(Array, state["mean"]), step, out=step)
        subtract(weight, step, rates.learning_rate / (1.0 - self.number("beta1") ** rates.updates))


class TorchAdamW(TorchAdam):
    """w -= learning_rate wd w, then the step of `torch_adam` with a g' that has no decay.

    Source: torch's `AdamW`; Loshchilov and Hutter, 2019.
    """

    name = "torch_adamw"
    table = tuple(replace(one, default=0.01) if one is DECAY else one for one in TorchAdam.table or ())

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        if rates.wd:
            weight *= 1.0 - rates.learning_rate * rates.wd
        self.descend(weight, self.slope(weight, grad, 0.0), state, rates)


class TorchRmsProp(TorchRule):
    """n = alpha n + (1 - alpha) g' g'; d = g' / (sqrt(n) + epsilon); w -= learning_rate d.

    Centered: a = alpha a + (1 - alpha) g', and n - a a in the place of n below the root. With a momentum:
    v = momentum v + d; w -= learning_rate v.

    Source: torch's `RMSprop`.
    """

    name = "torch_rmsprop"
    table = (
        learning_rate(0.01),
        Param("alpha", 0.99, low=0.0, high=1.0, alias="gamma1"),
        epsilon(1e-8),
        replace(MOMENTUM, alias="gamma2"),
        Param("centered", False),
        *SHARED,
    )

    def start(self, weight: Array) -> State:
        """Return n; centered also a; with a momentum also v."""
        names = ("square", *(("mean",) if self.params["centered"] else ()))
        names += ("momentum",) if self.params["momentum"] else ()
        return {name: np.zeros_like(weight) for name in names}

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        given, alpha = self.slope(weight, grad, rates.wd), self.number("alpha")
        square = cast(Array, state["square"])
        average(square, alpha, np.multiply(given, given))
        if "mean" in state:
            mean = cast(Array, state["mean"])
            average(mean, alpha, given)
            square = square - np.multiply(mean, mean)
        step = np.sqrt(square)
        step += self.number("epsilon")
        np.divide(given, step, out=step)
        if "momentum" in state:
            velocity = cast(Array, state["momentum"])
            velocity *= self.number("momentum")
            velocity += step
            np.copyto(step, velocity)  # the weight takes off a copy, times the rate
        subtract(weight, step, rates.learning_rate)
