"""Rules that need norms over a whole value, in two phases: lamb and lars.

A value may lie in slices on several servers. Each slice is prepared, which gives sums of squares; these are added up
over all slices; then each slice is finished with the totals. `step` does both for a value that lies in one piece.

The sums are made in float64, so a value that is cut differs from the whole one only by the order in which its sums are
added up: by some 1e-16 of the norms, and so at most in the last bit of a weight after a step.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import cast

import numpy as np

from distrun_runtime.arrays.dtypes import Array, narrow, widen
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.ops.optimizers.adaptive import BETAS, epsilon, moments
from distrun_runtime.ops.optimizers.base import (
    COMMON,
    PLAIN,
    Knobs,
    Rates,
    Rule,
    State,
    decay,
    learning_rate,
    shaped,
    spread,
    subtract,
    work_of,
)
from distrun_runtime.ops.optimizers.sgd import MOMENTUM
from distrun_runtime.ops.params import Param

CHUNK = 1 << 16
"""So many squares are in memory at once."""


@dataclass(frozen=True)
class Prepared:
    """One slice between its two phases.

    `direction` has the slice's shape and its work dtype; `squares` are the slice's sums of squares, in float64, as many
    as the rule needs: the value's norms are the roots of their totals.
    """

    direction: Array
    squares: tuple[float, ...]
    rates: Rates


class NormRule(Rule):
    """A rule whose step depends on norms over the whole value."""

    needs_norms = True

    def step(self, weight: Array, grad: Array, state: State, knobs: Knobs = PLAIN, rows: Array | None = None) -> None:
        """Update a weight that is whole; with `rows`, the gradient is 0 elsewhere and all rows are updated."""
        prepared = self.prepare(weight, grad, state, knobs, rows)
        self.finish(weight, prepared, prepared.squares, state, knobs)

    def prepare(
        self, weight: Array, grad: Array, state: State, knobs: Knobs = PLAIN, rows: Array | None = None
    ) -> Prepared:
        """Return direction and sums of squares of one slice; its state is updated, its weight is not.

        Arguments are those of `step`; `weight` may be any slice of the value, also an empty one.
        """
        with np.errstate(all="ignore"):
            rates = self.rates(state, knobs)
            shape = weight.shape or (1,)
            work = work_of(weight, state).reshape(shape)
            given = spread(weight, grad, rows) if rows is not None else widen(grad)
            given = given.astype(work.dtype, copy=False).reshape(shape)
            direction, squares = self.direction(work, given, shaped(state, shape), rates)
        return Prepared(direction.reshape(weight.shape), squares, rates)

    def finish(
        self, weight: Array, prepared: Prepared, totals: tuple[float, ...], state: State, knobs: Knobs = PLAIN
    ) -> None:
        """Update one slice and its state in place.

        Arguments:
            prepared: what `prepare` returned for this slice; used up.
            totals: the sums of the squares of all slices of the value.
        """
        with np.errstate(all="ignore"):
            shape = weight.shape or (1,)
            work = work_of(weight, state)
            direction = prepared.direction.reshape(shape)
            self.move(work.reshape(shape), direction, totals, shaped(state, shape), prepared.rates)
            if work is not weight:
                weight[...] = narrow(work.reshape(weight.shape), weight.dtype)

    @abstractmethod
    def direction(self, weight: Array, grad: Array, state: State, rates: Rates) -> tuple[Array, tuple[float, ...]]:
        """Return a new array of the slice's shape and the sums of squares of a slice.

        Arguments:
            weight: array (n, ...) in the work dtype, only read.
            grad: the same, only read.
            state: arrays of the same shape, updated in place.
        """

    @abstractmethod
    def move(self, weight: Array, direction: Array, totals: tuple[float, ...], state: State, rates: Rates) -> None:
        """Update weight and state in place; `direction` may be overwritten. Arrays have the weight's shape."""

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Not used: `step` does both phases."""
        raise NotImplementedError


class Lamb(NormRule):
    """t += 1; g' = clip(rescale_grad g), then with b1, b2 for beta1, beta2.

    m = b1 m + (1 - b1) g'; v = b2 v + (1 - b2) g' g'; with bias_correction m' = m / (1 - b1^t), v' = v / (1 - b2^t),
    else m' = m, v' = v; d = m' / (sqrt(v') + epsilon) + wd w; r = |w|, not below lower_bound nor above upper_bound;
    w -= learning_rate r / |d| d, and without the quotient where r or |d| is 0.

    Source: MXNet's `LAMB` (`lamb_update_phase1`, `lamb_update_phase2`); You et al., 2019.
    """

    name = "lamb"
    table = (
        learning_rate(0.001),
        *BETAS,
        epsilon(1e-6),
        Param("lower_bound", None, low=0.0, open_low=True),
        Param("upper_bound", None, low=0.0, open_low=True),
        Param("bias_correction", True),
        *COMMON,
    )
    keeps = ("mean", "variance")

    def direction(self, weight: Array, grad: Array, state: State, rates: Rates) -> tuple[Array, tuple[float, ...]]:
        """Return d, and the squares of w and d."""
        beta1, beta2 = self.number("beta1"), self.number("beta2")
        mean, variance = cast(Array, state["mean"]), cast(Array, state["variance"])
        moments(self, self.clipped(grad), state)
        is_corrected = bool(self.params["bias_correction"])
        root = np.sqrt(variance / (1.0 - beta2**rates.updates) if is_corrected else variance)
        root += self.number("epsilon")
        result = np.divide(mean / (1.0 - beta1**rates.updates) if is_corrected else mean, root, out=root)
        decay(result, weight, rates)
        return result, (sum_of_squares(weight), sum_of_squares(result))

    def move(self, weight: Array, direction: Array, totals: tuple[float, ...], state: State, rates: Rates) -> None:
        """Step along d."""
        weight_norm, norm = math.sqrt(totals[0]), math.sqrt(totals[1])
        lower, upper = self.params["lower_bound"], self.params["upper_bound"]
        if lower is not None:
            weight_norm = max(weight_norm, cast(float, lower))
        if upper is not None:
            weight_norm = min(weight_norm, cast(float, upper))
        trust = weight_norm / norm if weight_norm and norm else 1.0
        subtract(weight, direction, rates.learning_rate * trust)


class Lars(NormRule):
    """g' = clip(rescale_grad g) + wd w; v = momentum v - rate g'; w += v.

    rate = learning_rate eta |w| / (rescale_grad |g| + wd |w| + eps), and learning_rate where |w| or |g| is 0 or the key
    is a str that ends with gamma, beta or bias. With momentum_correction, v is multiplied by the new learning rate over
    the old one when a schedule or a user changes it.

    Source: MXNet's `LARS`; You et al., 2017, and Goyal et al., 2017, for the correction. We differ: the old learning
    rate is that of the weight's own last step (there: of the last step of any weight, so that it corrects one weight
    of many), and a learning rate of 0 does not erase the momentum.
    """

    name = "lars"
    table = (
        learning_rate(0.01),
        MOMENTUM,
        Param("eta", 0.001, low=0.0),
        Param("eps", 0.0, low=0.0, alias="epsilon"),
        Param("momentum_correction", True),
        *COMMON,
    )

    def start(self, weight: Array) -> State:
        """Return the momentum, if there is any: v, or with the correction v without its learning rate."""
        if not self.params["momentum"]:
            return {}
        name = "relative_momentum" if self.params["momentum_correction"] else "momentum"
        return {name: np.zeros_like(weight)}

    def direction(self, weight: Array, grad: Array, state: State, rates: Rates) -> tuple[Array, tuple[float, ...]]:
        """Return g', and the squares of w and of rescale_grad g before it is cut."""
        given = self.rescaled(grad)
        squares = sum_of_squares(weight), sum_of_squares(given)
        self.clip(given)
        decay(given, weight, rates)
        return given, squares

    def move(self, weight: Array, direction: Array, totals: tuple[float, ...], state: State, rates: Rates) -> None:
        """Step with the layer's own learning rate."""
        base = rates.base_rate
        direction *= self.trust(totals, rates) * (rates.learning_rate / base if base else 1.0)
        momentum, relative = state.get("momentum"), state.get("relative_momentum")
        if isinstance(relative, np.ndarray):  # v without its learning rate: so it need not be corrected
            relative *= self.number("momentum")
            relative -= direction
            weight += base * relative
        elif isinstance(momentum, np.ndarray):
            momentum *= self.number("momentum")
            momentum -= base * direction
            weight += momentum
        else:
            weight -= base * direction

    def trust(self, totals: tuple[float, ...], rates: Rates) -> float:
        """Return by what the layer's learning rate is multiplied."""
        weight_norm, norm = math.sqrt(totals[0]), math.sqrt(totals[1])
        is_plain = isinstance(rates.key, str) and rates.key.endswith(("gamma", "beta", "bias"))
        if is_plain or not (weight_norm > 0.0 and norm > 0.0):
            return 1.0
        return self.number("eta") * weight_norm / (norm + rates.wd * weight_norm + self.number("eps"))


def sum_of_squares(array: Array) -> float:
    """Return the sum of the squares of an array, made in float64."""
    flat = array.reshape(-1)
    parts = (flat[start : start + CHUNK] for start in range(0, flat.size, CHUNK))
    return sum(float(np.square(part, dtype=np.float64).sum()) for part in parts)
