"""Update rules: how a summed gradient changes a weight. By name and JSON parameters, never as code.

A rule works in place on numpy arrays and keeps its state (momentum, ...) in a plain dict for each weight, or for
each slice of one: every rule here is element by element, so slices can be updated apart.

Source: the arithmetic of MXNet's optimizers `sgd`, `adam` and `test` (one w for each, a global learning rate).
We differ in half precision: float16 weights are computed and their state is kept in float32 (in float16 adam's
epsilon is 0 and 0/0 follows); `multi_precision` keeps, as there, a float32 master of a float16 weight as well.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Dict, Type, Union, cast

import numpy as np

from distrun_runtime.algo.params import Number, Param, complete, did_you_mean
from distrun_runtime.algo.reduce import Array
from distrun_runtime.errors import KVError

State = Dict[str, Union[Array, int]]
"""What a rule remembers of one weight: arrays of the weight's shape, and counters."""

RESCALE = Param("rescale_grad", 1.0, alias="rescale")
CLIP = Param("clip_gradient", None, low=0.0, open_low=True)
DECAY = Param("wd", 0.0, low=0.0)
MULTI = Param("multi_precision", False)


class Rule(ABC):
    """One update rule with its parameters; it holds no weight and no state itself."""

    name: ClassVar[str]
    table: ClassVar[tuple[Param, ...]]

    def __init__(self, params: Mapping[str, object]) -> None:
        self.params: dict[str, Number] = complete(self.name, self.table, params)
        """All parameters, defaults included, as JSON-able values. Equal params of one name mean an equal rule."""

    def check(self, dtype: np.dtype[Any]) -> None:
        """Return if weights of this dtype can be updated.

        Raises:
            KVError: they cannot; the message says why.
        """
        if dtype.kind != "f":
            raise KVError("rule %r updates float weights, not %s" % (self.name, dtype))

    def new_state(self, weight: Array) -> State:
        """Return the state for a weight that was never updated: zeros of its shape (float32 for float16 weights).

        Raises:
            KVError: weights of this dtype cannot be updated.
        """
        self.check(weight.dtype)
        work = weight.astype(_work_dtype(weight.dtype))
        state = self._start(work)
        if self.params.get("multi_precision") and weight.dtype == np.float16:
            state["master"] = work
        return state

    def step(self, weight: Array, grad: Array, state: State) -> None:
        """Update `weight` and `state` in place by one summed gradient of the same shape, which is only read."""
        # Overflow to inf is the training's affair, and a warning for each step would be of no use to anybody.
        with np.errstate(all="ignore"):
            work = state.get("master")
            if not isinstance(work, np.ndarray):
                work = weight if weight.dtype == _work_dtype(weight.dtype) else weight.astype(np.float32)
            self._update(work, grad.astype(work.dtype, copy=False), state)
            if work is not weight:
                weight[...] = work

    def _number(self, name: str) -> float:
        return float(self.params[name] or 0.0)

    def _scaled(self, grad: Array) -> Array:
        """Return rescale_grad * grad as a new array."""
        result = np.empty_like(grad)
        # `out` keeps the dtype: before numpy 2, a 0-d array times a Python float became float64.
        return np.multiply(grad, self._number("rescale_grad"), out=result, casting="same_kind")

    def _clip(self, grad: Array) -> None:
        limit = self.params["clip_gradient"]
        if limit is not None:
            np.clip(grad, -limit, limit, out=grad)

    def _decay(self, grad: Array, weight: Array) -> None:
        if self.params["wd"]:
            grad += self._number("wd") * weight

    @abstractmethod
    def _start(self, work: Array) -> State:
        """Return the state of a weight; `work` has the dtype that `_update` will see."""

    @abstractmethod
    def _update(self, work: Array, grad: Array, state: State) -> None:
        """Update `work` in place; `grad` has its dtype and must not be changed."""


class Sgd(Rule):
    """g' = clip(rescale_grad g) + wd w; v = momentum v - learning_rate g'; w += v."""

    name = "sgd"
    table = (
        Param("learning_rate", 0.01, low=0.0, alias="lr"),
        Param("momentum", 0.0, low=0.0, high=1.0),
        DECAY,
        RESCALE,
        CLIP,
        MULTI,
    )

    def _start(self, work: Array) -> State:
        return {"momentum": np.zeros_like(work)} if self.params["momentum"] else {}

    def _update(self, work: Array, grad: Array, state: State) -> None:
        step = self._scaled(grad)
        self._clip(step)
        self._decay(step, work)
        step *= self._number("learning_rate")
        velocity = state.get("momentum")
        if isinstance(velocity, np.ndarray):
            velocity *= self._number("momentum")
            velocity -= step
            work += velocity
        else:
            work -= step


class Adam(Rule):
    """Adam as MXNet has it: t += 1; g' = clip(rescale_grad g + wd w), then with b1, b2 for beta1, beta2.

    m = b1 m + (1 - b1) g'; v = b2 v + (1 - b2) g' g';
    w -= learning_rate sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + epsilon).
    """

    name = "adam"
    table = (
        Param("learning_rate", 0.001, low=0.0, alias="lr"),
        Param("beta1", 0.9, low=0.0, high=1.0, open_high=True),
        Param("beta2", 0.999, low=0.0, high=1.0, open_high=True),
        Param("epsilon", 1e-8, low=0.0),
        DECAY,
        RESCALE,
        CLIP,
        MULTI,
    )

    def _start(self, work: Array) -> State:
        return {"mean": np.zeros_like(work), "variance": np.zeros_like(work), "t": 0}

    def _update(self, work: Array, grad: Array, state: State) -> None:
        beta1, beta2 = self._number("beta1"), self._number("beta2")
        mean, variance, t = cast(Array, state["mean"]), cast(Array, state["variance"]), cast(int, state["t"]) + 1
        step = self._scaled(grad)
        self._decay(step, work)
        self._clip(step)
        mean *= beta1
        mean += (1.0 - beta1) * step
        np.multiply(step, step, out=step)
        step *= 1.0 - beta2
        variance *= beta2
        variance += step
        np.sqrt(variance, out=step)
        step += self._number("epsilon")
        np.divide(mean, step, out=step)
        step *= self._number("learning_rate") * math.sqrt(1.0 - beta2**t) / (1.0 - beta1**t)
        work -= step
        state["t"] = t


class Test(Rule):
    """w += rescale_grad g. Integer weights too, if rescale_grad is a whole number; they wrap around."""

    __test__ = False  # pytest: a rule, not a set of tests
    name = "test"
    table = (RESCALE, MULTI)

    def check(self, dtype: np.dtype[Any]) -> None:
        """Return if weights of this dtype can be updated."""
        rescale = self._number("rescale_grad")
        if dtype.kind in "iu" and (rescale != int(rescale) or abs(rescale) >= 2**63):
            raise KVError(
                "rule 'test' with rescale_grad=%g updates float weights, not %s: whole numbers only" % (rescale, dtype)
            )

    def _start(self, work: Array) -> State:
        return {}

    def _update(self, work: Array, grad: Array, state: State) -> None:
        if work.dtype.kind in "iu":
            work += grad * np.array(int(self._number("rescale_grad")), np.int64).astype(work.dtype)
        else:
            work += self._scaled(grad)


RULES: dict[str, Type[Rule]] = {rule.name: rule for rule in (Sgd, Adam, Test)}
"""The built-in rules by name."""


def make(name: str, params: Mapping[str, object], known: Mapping[str, Type[Rule]] = RULES) -> Rule:
    """Return the rule of this name (in any case) with these parameters; those not given have their defaults.

    Raises:
        KVError: unknown name, unknown parameter, or a value that is not right.
    """
    if not isinstance(name, str):
        raise KVError("a rule is given by name (%s), not as %s" % (", ".join(sorted(known)), type(name).__name__))
    found = known.get(name.lower())
    if found is None:
        raise KVError(
            "unknown rule %r%s; known are %s" % (name, did_you_mean(name.lower(), known), ", ".join(sorted(known)))
        )
    return found(params)


def same(one: Rule, other: Rule) -> bool:
    """Tell whether two rules are equal: same name, same parameters."""
    return one.name == other.name and one.params == other.params


def difference(old: Rule, new: Rule) -> str:
    """Return in words how `new` differs from `old`; for error messages."""
    if old.name != new.name:
        return "%s, not %s" % (old.name, new.name)
    changed = [name for name in old.params if old.params[name] != new.params[name]]
    return "%s with %s" % (old.name, ", ".join("%s=%s, not %s" % (n, old.params[n], new.params[n]) for n in changed))


def carry_state(rule: Rule, weight: Array, old: State) -> State:
    """Return the state to go on with when `rule` replaces another one whose state for this weight was `old`.

    What both know by the same name goes on (a new learning rate keeps the momentum); the rest starts anew.
    """
    return {name: old.get(name, value) for name, value in rule.new_state(weight).items()}


def _work_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float32) if dtype == np.float16 else dtype
