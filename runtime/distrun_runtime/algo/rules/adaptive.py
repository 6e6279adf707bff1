"""Rules with a step size for each element: adam, adamw, rmsprop, adagrad and ftrl."""

from __future__ import annotations

import math
from typing import cast

import numpy as np

from distrun_runtime.algo.params import Param
from distrun_runtime.algo.rules.rule import COMMON, LAZY, Rates, Rule, State, learning_rate
from distrun_runtime.device.dtypes import Array

BETAS = (
    Param("beta1", 0.9, low=0.0, high=1.0, open_high=True),
    Param("beta2", 0.999, low=0.0, high=1.0, open_high=True),
)


class Adam(Rule):
    """t += 1; g' = clip(rescale_grad g + wd w), then with b1, b2 for beta1, beta2.

    m = b1 m + (1 - b1) g'; v = b2 v + (1 - b2) g' g';
    w -= learning_rate sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + epsilon).

    Source: MXNet's `Adam` (`adam_update`); Kingma and Ba, 2015, the form before section 2.1.
    """

    name = "adam"
    table = (learning_rate(0.001), *BETAS, Param("epsilon", 1e-8, low=0.0), *COMMON, LAZY)

    def start(self, weight: Array) -> State:
        """Return m and v."""
        return {"mean": np.zeros_like(weight), "variance": np.zeros_like(weight)}

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        step = self.rescaled(grad)
        if rates.wd:
            step += rates.wd * weight
        self.clip(step)
        self.moments(step, state)
        step = self.quotient(state)
        step *= rates.learning_rate * self.correction(rates.updates)
        weight -= step

    def moments(self, grad: Array, state: State) -> None:
        """Take `grad` into m and v; it is overwritten."""
        mean, variance = cast(Array, state["mean"]), cast(Array, state["variance"])
        beta1, beta2 = self.number("beta1"), self.number("beta2")
        mean *= beta1
        mean += (1.0 - beta1) * grad
        np.multiply(grad, grad, out=grad)
        grad *= 1.0 - beta2
        variance *= beta2
        variance += grad

    def quotient(self, state: State) -> Array:
        """Return m / (sqrt(v) + epsilon) as a new array."""
        result = np.sqrt(cast(Array, state["variance"]))
        result += self.number("epsilon")
        return np.divide(cast(Array, state["mean"]), result, out=result)

    def correction(self, updates: int) -> float:
        """Return sqrt(1 - b2^t) / (1 - b1^t)."""
        return math.sqrt(1.0 - self.number("beta2") ** updates) / (1.0 - self.number("beta1") ** updates)


class AdamW(Adam):
    """Adam with a weight decay of its own. t += 1; g' = clip(rescale_grad g); m and v as `adam` has them.

    rate = learning_rate sqrt(1 - b2^t) / (1 - b1^t), or learning_rate without correct_bias;
    w -= rate (m / (sqrt(v) + epsilon) + wd w).

    Source: MXNet 2's `AdamW`; Loshchilov and Hutter, 2019. torch's differs: there the decay is learning_rate wd w
    from the first step on, here it is corrected as the rest is.
    """

    name = "adamw"
    table = (learning_rate(0.001), *BETAS, Param("epsilon", 1e-6, low=0.0), Param("correct_bias", True), *COMMON)

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        given = self.rescaled(grad)
        self.clip(given)
        self.moments(given, state)
        step = self.quotient(state)
        if rates.wd:
            step += rates.wd * weight
        step *= rates.learning_rate * (self.correction(rates.updates) if self.params["correct_bias"] else 1.0)
        weight -= step


class RmsProp(Rule):
    """g' = clip(rescale_grad g + wd w); n = gamma1 n + (1 - gamma1) g' g'.

    w -= learning_rate g' / sqrt(n + epsilon); or centered, after Graves: a = gamma1 a + (1 - gamma1) g';
    d = gamma2 d - learning_rate g' / sqrt(n - a a + epsilon); w += d. With clip_weights, then w = clip(w).

    Source: MXNet's `RMSProp` (`rmsprop_update`, `rmspropalex_update`).
    """

    name = "rmsprop"
    table = (
        learning_rate(0.001),
        Param("gamma1", 0.9, low=0.0, high=1.0, alias="rho"),
        Param("gamma2", 0.9, low=0.0, high=1.0, alias="momentum"),
        Param("epsilon", 1e-8, low=0.0),
        Param("centered", False),
        Param("clip_weights", None, low=0.0, open_low=True),
        *COMMON,
    )

    def start(self, weight: Array) -> State:
        """Return n; centered also a and d."""
        names = ("square", "mean", "delta") if self.params["centered"] else ("square",)
        return {name: np.zeros_like(weight) for name in names}

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        step = self.rescaled(grad)
        if rates.wd:
            step += rates.wd * weight
        self.clip(step)
        square, decay = cast(Array, state["square"]), self.number("gamma1")
        square *= decay
        square += (1.0 - decay) * np.multiply(step, step)
        if self.params["centered"]:
            weight += self._centered(step, square, state, rates)
        else:
            step *= rates.learning_rate
            step /= np.sqrt(square + self.number("epsilon"))
            weight -= step
        if self.params["clip_weights"] is not None:
            limit = self.number("clip_weights")
            np.clip(weight, -limit, limit, out=weight)

    def _centered(self, step: Array, square: Array, state: State, rates: Rates) -> Array:
        mean, delta, decay = cast(Array, state["mean"]), cast(Array, state["delta"]), self.number("gamma1")
        mean *= decay
        mean += (1.0 - decay) * step
        step *= rates.learning_rate
        step /= np.sqrt(square - np.multiply(mean, mean) + self.number("epsilon"))
        delta *= self.number("gamma2")
        delta -= step
        return delta


class AdaGrad(Rule):
    """g' = clip(rescale_grad g); h += g' g'; w -= learning_rate (g' / sqrt(h + eps) + wd w).

    Source: MXNet's `AdaGrad`; Duchi, Hazan and Singer, 2011.
    """

    name = "adagrad"
    table = (learning_rate(0.01), Param("eps", 1e-7, low=0.0, alias="epsilon"), *COMMON)

    def start(self, weight: Array) -> State:
        """Return h."""
        return {"history": np.zeros_like(weight)}

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        step, history = self.rescaled(grad), cast(Array, state["history"])
        self.clip(step)
        history += np.multiply(step, step)
        step /= np.sqrt(history + self.number("eps"))
        if rates.wd:
            step += rates.wd * weight
        step *= rates.learning_rate
        weight -= step


class Ftrl(Rule):
    """g' = clip(rescale_grad g); z += g' - (sqrt(n + g' g') - sqrt(n)) w / learning_rate; n += g' g'.

    w = (sign(z) lamda1 - z) / ((beta + sqrt(n)) / learning_rate + wd) where |z| > lamda1, else 0. Under a learning
    rate of 0 nothing changes.

    Source: MXNet's `Ftrl` (`ftrl_update`); McMahan et al., 2013.
    """

    name = "ftrl"
    table = (
        learning_rate(0.1),
        Param("lamda1", 0.01, low=0.0, alias="lambda1"),
        Param("beta", 1.0, low=0.0),
        *COMMON,
    )

    def start(self, weight: Array) -> State:
        """Return z and n."""
        return {"z": np.zeros_like(weight), "n": np.zeros_like(weight)}

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        if not rates.learning_rate:
            return
        given, z, n = self.rescaled(grad), cast(Array, state["z"]), cast(Array, state["n"])
        self.clip(given)
        root = np.sqrt(n)
        n += np.multiply(given, given)
        new_root = np.sqrt(n)
        z += given
        root -= new_root
        root *= weight
        root /= rates.learning_rate
        z += root
        new_root += self.number("beta")
        new_root /= rates.learning_rate
        new_root += rates.wd
        limit = self.number("lamda1")
        np.divide(np.sign(z) * limit - z, new_root, out=weight)
        weight[np.abs(z) <= limit] = 0.0
