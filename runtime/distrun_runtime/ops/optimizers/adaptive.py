"""Rules with a step size for each element: adam and its kin, rmsprop, adagrad, adadelta, ftrl and ftml."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, cast

import numpy as np

from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.ops.optimizers.base import (
    COMMON,
    LAZY,
    Rates,
    Rule,
    State,
    average,
    decay,
    learning_rate,
    subtract,
)
from distrun_runtime.ops.params import Param

BETAS = (
    Param("beta1", 0.9, low=0.0, high=1.0, open_high=True),
    Param("beta2", 0.999, low=0.0, high=1.0, open_high=True),
)


def epsilon(default: float) -> Param:
    """Return the parameter `epsilon`, with the default that a rule has for it."""
    return Param("epsilon", default, low=0.0, alias="eps")


def moments(rule: Rule, grad: Array, state: State) -> Array:
    """Take `grad` into m and v; return a new array of its shape and of no meaning, to go on with."""
    mean, variance = cast(Array, state["mean"]), cast(Array, state["variance"])
    beta1, beta2 = rule.number("beta1"), rule.number("beta2")
    room = np.multiply(grad, 1.0 - beta1)
    mean *= beta1
    mean += room
    np.multiply(grad, grad, out=room)
    room *= 1.0 - beta2
    variance *= beta2
    variance += room
    return room


class Adam(Rule):
    """t += 1; g' = clip(rescale_grad g + wd w), then with b1, b2 for beta1, beta2.

    m = b1 m + (1 - b1) g'; v = b2 v + (1 - b2) g' g';
    w -= learning_rate sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + epsilon).

    Source: MXNet's `Adam` (`adam_update`); Kingma and Ba, 2015, the form before section 2.1.
    """

    name = "adam"
    table: ClassVar[tuple[Param, ...] | None] = (learning_rate(0.001), *BETAS, epsilon(1e-8), *COMMON, LAZY)
    keeps = ("mean", "variance")

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        step = moments(self, self.decayed(weight, grad, rates), state)
        self.quotient(state, step)
        subtract(weight, step, rates.learning_rate * self.correction(rates.updates))

    def decayed(self, weight: Array, grad: Array, rates: Rates) -> Array:
        """Return clip(rescale_grad g + wd w), only to be read: `grad` itself if nothing changes it."""
        if not rates.wd:
            return self.clipped(grad)
        result = np.multiply(weight, rates.wd)
        np.add(self.scaled(grad), result, out=result)
        self.clip(result)
        return result

    def quotient(self, state: State, out: Array) -> None:
        """Write m / (sqrt(v) + epsilon) into `out`."""
        np.sqrt(cast(Array, state["variance"]), out=out)
        out += self.number("epsilon")
        np.divide(cast(Array, state["mean"]), out, out=out)

    def correction(self, updates: int) -> float:
        """Return sqrt(1 - b2^t) / (1 - b1^t)."""
        return math.sqrt(1.0 - self.number("beta2") ** updates) / (1.0 - self.number("beta1") ** updates)


class AdamW(Adam):
    """Adam with a weight decay of its own. t += 1; g' = clip(rescale_grad g); m and v as `adam` has them.

    rate = learning_rate sqrt(1 - b2^t) / (1 - b1^t), or learning_rate without correct_bias;
    w -= rate (m / (sqrt(v) + epsilon) + wd w).

    Source: MXNet 2's `AdamW`; Loshchilov and Hutter, 2019. torch's is `torch_adamw`: there the decay is learning_rate
    wd w from the first step on, here it is corrected as the rest is.
    """

    name = "adamw"
    table = (learning_rate(0.001), *BETAS, epsilon(1e-6), Param("correct_bias", True), *COMMON)

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        step = moments(self, self.clipped(grad), state)
        self.quotient(state, step)
        decay(step, weight, rates)
        correction = self.correction(rates.updates) if self.params["correct_bias"] else 1.0
        subtract(weight, step, rates.learning_rate * correction)


class Adamax(Rule):
    """Adam with the largest gradient in place of the mean square. t += 1; g' = clip(rescale_grad g + wd w).

    m = b1 m + (1 - b1) g'; u = max(b2 u, |g'| + epsilon); w -= learning_rate / (1 - b1^t) m / u; no step where u is 0.

    Source: MXNet's `Adamax`; Kingma and Ba, 2015, section 7. The epsilon is torch's: MXNet has none and divides 0 by 0
    where a gradient has been 0 from the first step on.
    """

    name = "adamax"
    table = (learning_rate(0.002), *BETAS, epsilon(1e-8), *COMMON)
    keeps = ("mean", "largest")

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        given = self.rescaled(grad)
        decay(given, weight, rates)
        self.clip(given)
        mean, largest = cast(Array, state["mean"]), cast(Array, state["largest"])
        beta1 = self.number("beta1")
        average(mean, beta1, given)
        largest *= self.number("beta2")
        np.abs(given, out=given)
        given += self.number("epsilon")
        np.maximum(largest, given, out=largest)
        step = np.divide(mean, largest)
        np.copyto(step, 0.0, where=largest == 0.0)
        subtract(weight, step, rates.learning_rate / (1.0 - beta1**rates.updates))


class Nadam(Adam):
    """Adam with Nesterov's momentum. t += 1; g' = clip(rescale_grad g + wd w); m and v as `adam` has them.

    mu_t = b1 (1 - 0.96^(t schedule_decay) / 2); p_t = mu_1 mu_2 ... mu_t;
    m' = (1 - mu_t) g' / (1 - p_t) + mu_(t+1) m / (1 - p_(t+1));
    w -= learning_rate m' / (sqrt(v / (1 - b2^t)) + epsilon).

    Source: MXNet's `Nadam` and torch's `NAdam`; Dozat, 2015. We differ from MXNet, as torch does: the product p is that
    of the weight's own steps (there: of the steps of all weights, so that it depends on how many there are).
    """

    name = "nadam"
    table = (
        learning_rate(0.001),
        *BETAS,
        epsilon(1e-8),
        Param("schedule_decay", 0.004, low=0.0, alias="momentum_decay"),
        *COMMON,
    )

    def __init__(self, params: Mapping[str, object]) -> None:
        super().__init__(params)
        self._products = [1.0]
        """p_0, p_1 and so on, as far as they differ from 0 beside 1."""

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        given = self.decayed(weight, grad, rates)
        step = moments(self, given, state)
        t = rates.updates
        np.multiply(given, (1.0 - self._mu(t)) / (1.0 - self._product(t)), out=step)
        step += self._mu(t + 1) / (1.0 - self._product(t + 1)) * cast(Array, state["mean"])
        root = np.sqrt(cast(Array, state["variance"]) / (1.0 - self.number("beta2") ** t))
        root += self.number("epsilon")
        step /= root
        subtract(weight, step, rates.learning_rate)

    def _mu(self, t: int) -> float:
        return self.number("beta1") * (1.0 - 0.5 * math.pow(0.96, t * self.number("schedule_decay")))

    def _product(self, t: int) -> float:
        products = self._products
        while len(products) <= t and products[-1] > 1e-17:
            products.append(products[-1] * self._mu(len(products)))
        return products[t] if t < len(products) else 0.0


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
        epsilon(1e-8),
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
        decay(step, weight, rates)
        self.clip(step)
        square = cast(Array, state["square"])
        average(square, self.number("gamma1"), np.multiply(step, step))
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
        mean, delta = cast(Array, state["mean"]), cast(Array, state["delta"])
        average(mean, self.number("gamma1"), step)
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
    keeps = ("history",)

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        step, history = self.cut(grad), cast(Array, state["history"])
        history += np.multiply(step, step)
        step /= np.sqrt(history + self.number("eps"))
        decay(step, weight, rates)
        subtract(weight, step, rates.learning_rate)


class AdaDelta(Rule):
    """g' = clip(rescale_grad g); n = rho n + (1 - rho) g' g'; s = sqrt(d + epsilon) / sqrt(n + epsilon) g'.

    d = rho d + (1 - rho) s s; w -= learning_rate (s + wd w).

    Source: MXNet's `AdaDelta`; Zeiler, 2012. The learning rate is torch's and MXNet 2's; MXNet 1.9.1 takes it and does
    not use it, which is a learning rate of 1.
    """

    name = "adadelta"
    table = (learning_rate(1.0), Param("rho", 0.9, low=0.0, high=1.0), epsilon(1e-5), *COMMON)
    keeps = ("square", "delta")

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        given, rho, tiny = self.cut(grad), self.number("rho"), self.number("epsilon")
        square, delta = cast(Array, state["square"]), cast(Array, state["delta"])
        average(square, rho, np.multiply(given, given))
        given *= np.sqrt(delta + tiny)
        given /= np.sqrt(square + tiny)
        average(delta, rho, np.multiply(given, given))
        decay(given, weight, rates)
        subtract(weight, given, rates.learning_rate)


class Ftml(Rule):
    """Follow the moving leader. t += 1; g' = clip(rescale_grad g + wd w); v = b2 v + (1 - b2) g' g'.

    d_t = (1 - b1^t) / learning_rate (sqrt(v / (1 - b2^t)) + epsilon); z = b1 z + (1 - b1) g' - (d_t - b1 d_(t-1)) w;
    w = -z / d_t. Under a learning rate of 0 nothing changes.

    Source: MXNet's `FTML` (`ftml_update`); Zheng and Kwok, 2017.
    """

    name = "ftml"
    table = (learning_rate(0.01), replace(BETAS[0], default=0.6), BETAS[1], epsilon(1e-8), *COMMON)
    keeps = ("variance", "d", "z")

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        if not rates.learning_rate:
            return
        given, beta1, beta2 = self.rescaled(grad), self.number("beta1"), self.number("beta2")
        decay(given, weight, rates)
        self.clip(given)
        variance, before, z = (cast(Array, state[name]) for name in self.keeps)
        average(variance, beta2, np.multiply(given, given))
        present = np.sqrt(variance / (1.0 - beta2**rates.updates))
        present += self.number("epsilon")
        present *= (1.0 - beta1**rates.updates) / rates.learning_rate
        before *= beta1
        z *= beta1
        given *= 1.0 - beta1
        z += given
        z -= (present - before) * weight
        before[...] = present
        np.divide(z, present, out=weight)
        np.negative(weight, out=weight)


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
    keeps = ("z", "n")

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update in place."""
        if not rates.learning_rate:
            return
        given, z, n = self.cut(grad), cast(Array, state["z"]), cast(Array, state["n"])
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
        np.copyto(weight, 0.0, where=np.abs(z) <= limit)
