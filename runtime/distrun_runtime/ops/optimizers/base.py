"""What every update rule is: parameters, the state of a weight, and one step.

A rule works in place on numpy arrays and keeps its state (momentum, ...) in a plain dict for each weight, or for each
slice of one: rules are element by element, so slices can be updated apart. Those that need norms over the whole value
are in `norms`.

Source: where nothing else is said, a rule's arithmetic is that of the optimizer of its name in MXNet 1.9.1. We differ
in half precision: float16 and bfloat16 weights are computed and their state is kept in float32 (in float16 adam's
epsilon is 0 and 0/0 follows); `multi_precision` keeps, as there, a float32 master of such a weight as well. And a
schedule is asked for the number of updates of the weight itself (there: of the server's most updated weight).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Dict, Union, cast

import numpy as np

from distrun_runtime.arrays.dtypes import Array, is_float, name_of, narrow, widen, work_dtype
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import KVError
from distrun_runtime.ops import schedules as schedule
from distrun_runtime.ops.params import Json, Param, complete

State = Dict[str, Union[Array, int]]
"""What a rule remembers of one weight: arrays of the weight's shape, and counters, `updates` among them."""

Key = Union[int, str]

RESCALE = Param("rescale_grad", 1.0, alias="rescale")
CLIP = Param("clip_gradient", None, low=0.0, open_low=True)
DECAY = Param("wd", 0.0, low=0.0, alias="weight_decay")
MULTI = Param("multi_precision", False)
LAZY = Param("lazy_update", True)


def _schedule_json(value: object) -> Json:
    found = schedule.read(value)
    return None if found is None else found.to_json()


SCHEDULE = Param("lr_scheduler", None, reader=_schedule_json)
COMMON = (DECAY, SCHEDULE, RESCALE, CLIP, MULTI)
"""The parameters that nearly all rules have."""


def learning_rate(default: float) -> Param:
    """Return the parameter `learning_rate`, with the default that a rule has for it."""
    return Param("learning_rate", default, low=0.0, alias="lr")


@dataclass(frozen=True)
class Knobs:
    """What one key has for itself: multipliers of the learning rate and of the weight decay, and its name.

    `offset` is the place of the weight's first element in the key's value, where the weight is a slice of it.
    """

    lr_mult: float = 1.0
    wd_mult: float = 1.0
    key: Key | None = None
    offset: int = 0


PLAIN = Knobs()
"""A key that has nothing for itself."""


@dataclass(frozen=True)
class Rates:
    """The numbers of one step: schedule and multipliers are in them.

    `updates` counts the updates of this weight, this one included; `base_rate` is the learning rate without the
    multiplier. `offset` is that of the `Knobs`; `rows` are the numbers of the weight's rows within the slice, if the
    step is one of some rows (int64 of shape (k,)).
    """

    learning_rate: float
    wd: float
    updates: int
    base_rate: float
    key: Key | None = None
    offset: int = 0
    rows: Array | None = None


class Rule(ABC):
    """One update rule with its parameters; it holds no weight and no state itself.

    A rule of yours has a `table` (None: any parameters, as JSON), says what it `keeps` or defines `start`, and defines
    `update`.
    """

    name: str
    table: ClassVar[tuple[Param, ...] | None] = None
    keeps: ClassVar[tuple[str, ...]] = ()
    """The arrays of a weight's state, by name; they begin as zeros."""
    needs_norms: ClassVar[bool] = False
    """Whether it is a `NormRule`, which works in two phases on a weight that is cut into slices."""
    is_elementwise: ClassVar[bool] = True
    """Whether an element's update depends on nothing but this element: not on its key or its place."""

    def __init__(self, params: Mapping[str, object]) -> None:
        self.params = type(self).complete(params)
        """All parameters, defaults included, as JSON-able values. Equal params of one name mean an equal rule."""
        self._schedule = schedule.read(self.params.get("lr_scheduler"))

    @classmethod
    def complete(cls, params: Mapping[str, object]) -> dict[str, Json]:
        """Return all parameters, as given or else by default; completing them again changes nothing.

        With both `learning_rate` and `lr_scheduler`, the learning rate is the schedule's `base_lr`; with a schedule
        alone, the schedule's `base_lr` is the learning rate.

        Raises:
            KVError: an unknown parameter, or a value that is not right.
        """
        if cls.table is None:
            return cast(Dict[str, Json], dict(params))
        result = complete(f"rule {getattr(cls, 'name', cls.__name__)!r}", cls.table, params)
        found = schedule.read(result.get("lr_scheduler"))
        if found is not None and "learning_rate" in result:
            if "learning_rate" in params or "lr" in params:
                found = found.with_base(cast(float, result["learning_rate"]))
            result["lr_scheduler"], result["learning_rate"] = found.to_json(), found.base_lr
        return result

    # --- what stores and servers call

    def check(self, dtype: np.dtype[Any]) -> None:
        """Return if weights of this dtype can be updated.

        Raises:
            KVError: they cannot; the message says why.
        """
        if not is_float(dtype):
            raise KVError(f"rule {self.name!r} updates float weights, not {name_of(dtype)}")

    def new_state(self, weight: Array) -> State:
        """Return the state for a weight that was never updated: arrays of its shape, in its work dtype.

        Raises:
            KVError: weights of this dtype cannot be updated.
        """
        self.check(weight.dtype)
        work = widen(weight)
        state: State = {"updates": 0, **self.start(work)}
        if self.params.get("multi_precision") and work_dtype(weight.dtype) != weight.dtype:
            state["master"] = work
        return state

    def step(self, weight: Array, grad: Array, state: State, knobs: Knobs = PLAIN, rows: Array | None = None) -> None:
        """Update `weight` and `state` in place by one summed gradient, which is only read.

        Arguments:
            weight: array of any shape and strides.
            grad: array of the weight's shape, in its dtype or its work dtype.
            state: what `new_state` returned for this weight.
            rows: int64 array (k,) without duplicates: `weight` has shape (n, ...), `grad` (k, ...) and only these rows
                of weight and state are read and written (lazy update). State arrays may also be flat.
        """
        # Overflow to inf is the training's affair, and a warning for each step would be of no use to anybody.
        with np.errstate(all="ignore"):
            rates = self.rates(state, knobs)
            if rows is None:
                self._step_whole(weight, grad, state, rates)
            elif self.params.get("lazy_update", True):
                self._step_rows(weight, grad, state, rates, rows)
            else:
                self._step_spread(weight, spread(weight, grad, rows), state, rates)

    def step_chunks(self, chunks: Iterable[tuple[Array, Array, State]], state: State, knobs: Knobs = PLAIN) -> None:
        """Make one step of a weight that comes in chunks, for a rule that works element by element.

        Arguments:
            chunks: what `step` takes, for each chunk of the weight: runs of weight, gradient and state arrays.
            state: of the whole weight; its updates are counted once.
        """
        with np.errstate(all="ignore"):  # as in `step`
            rates = self.rates(state, knobs)
            for weight, grad, part in chunks:
                self._step_whole(weight, grad, part, rates)

    # --- what a rule defines

    def start(self, weight: Array) -> State:
        """Return the state of a weight; `weight` has the dtype that `update` will see. `updates` is counted for you."""
        return {name: np.zeros_like(weight) for name in self.keeps}

    @abstractmethod
    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Update `weight` and `state` in place, element by element.

        Arguments:
            weight: array (n, ...) with at least one axis, in the work dtype: a value, a slice of one or some rows.
            grad: array of the same shape and dtype; it must not be changed.
        """

    # --- what a rule has for it

    def number(self, name: str) -> float:
        """Return a parameter as float; 0.0 for None."""
        return float(cast(float, self.params[name]) or 0.0)

    def rescaled(self, grad: Array) -> Array:
        """Return rescale_grad * grad as a new array."""
        return cast(Array, grad * self.number("rescale_grad"))

    def scaled(self, grad: Array) -> Array:
        """Return rescale_grad * grad, only to be read: `grad` itself if that is 1."""
        return grad if self.number("rescale_grad") == 1.0 else self.rescaled(grad)

    def clipped(self, grad: Array) -> Array:
        """Return clip(rescale_grad * grad), only to be read: `grad` itself if neither changes it."""
        return self.scaled(grad) if self.params["clip_gradient"] is None else self.cut(grad)

    def cut(self, grad: Array) -> Array:
        """Return clip(rescale_grad * grad) as a new array."""
        result = self.rescaled(grad)
        self.clip(result)
        return result

    def clip(self, grad: Array) -> None:
        """Cut the elements of `grad` to the absolute value `clip_gradient`, if there is one; in place."""
        if self.params["clip_gradient"] is not None:
            limit = self.number("clip_gradient")
            np.clip(grad, -limit, limit, out=grad)

    def rates(self, state: State, knobs: Knobs) -> Rates:
        """Count one more update of this weight and return its numbers."""
        updates = cast(int, state.get("updates", 0)) + 1
        state["updates"] = updates
        base = self._schedule(updates) if self._schedule else cast(float, self.params.get("learning_rate") or 0.0)
        decay = cast(float, self.params.get("wd") or 0.0)
        return Rates(base * knobs.lr_mult, decay * knobs.wd_mult, updates, base, knobs.key, knobs.offset)

    # --- half precision, rows and scalars

    def _step_whole(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        work = work_of(weight, state)
        given = widen(grad).astype(work.dtype, copy=False)
        if work.ndim:
            self.update(work, given, state, rates)
        else:  # numpy makes scalars of what is calculated with arrays of no axis; before numpy 2, of another dtype
            parts = shaped(state, (1,))
            self.update(work.reshape(1), given.reshape(1), parts, rates)
            state.update({name: x.reshape(()) if isinstance(x, np.ndarray) else x for name, x in parts.items()})
        if work is not weight:
            weight[...] = narrow(work, weight.dtype)

    def _step_spread(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        given = shaped(state, weight.shape)
        parts = dict(given)
        self._step_whole(weight, grad, parts, rates)
        for name, part in parts.items():
            if part is not given.get(name):  # the rule has put another in its place
                whole = state.get(name)
                is_array = isinstance(whole, np.ndarray) and isinstance(part, np.ndarray)
                state[name] = cast(Array, part).reshape(cast(Array, whole).shape) if is_array else part

    def _step_rows(self, weight: Array, grad: Array, state: State, rates: Rates, rows: Array) -> None:
        parts: State = {}
        for name, whole in state.items():
            parts[name] = whole.reshape(weight.shape)[rows] if isinstance(whole, np.ndarray) else whole
        master = parts.get("master")
        work = master if isinstance(master, np.ndarray) else widen(weight[rows])
        self.update(work, widen(grad).astype(work.dtype, copy=False), parts, replace(rates, rows=rows))
        weight[rows] = narrow(work, weight.dtype)
        for name, part in parts.items():
            whole = state.get(name, 0)
            if isinstance(whole, np.ndarray):
                whole.reshape(weight.shape)[rows] = part
            else:
                state[name] = part


def decay(step: Array, weight: Array, rates: Rates) -> None:
    """Add wd w to a step, in place."""
    if rates.wd:
        step += rates.wd * weight


def subtract(weight: Array, step: Array, rate: float) -> None:
    """Take a step times a rate off a weight, in place; the step is used up."""
    step *= rate
    weight -= step


def average(mean: Array, kept: float, value: Array) -> None:
    """Take a value into a running average, in place: mean = kept mean + (1 - kept) value."""
    mean *= kept
    mean += (1.0 - kept) * value


def work_of(weight: Array, state: State) -> Array:
    """Return what a step calculates on: the master if there is one, else the weight in its work dtype."""
    master = state.get("master")
    return master if isinstance(master, np.ndarray) else widen(weight)


def shaped(state: State, shape: tuple[int, ...]) -> State:
    """Return views of the state's arrays, which may be flat, that have a shape; those of another size as they are."""
    size = math.prod(shape)
    return {name: x.reshape(shape) if isinstance(x, np.ndarray) and x.size == size else x for name, x in state.items()}


def check_keys(rule: Rule, items: Iterable[tuple[Key, np.dtype[Any]]], what: str = "key") -> None:
    """Return if a rule can update weights of all these keys, which have these dtypes.

    Arguments:
        what: what the keys are, for the message.

    Raises:
        KVError: it cannot; the key is named.
    """
    for key, dtype in items:
        try:
            rule.check(dtype)
        except KVError as err:
            raise KVError(f"{what} {key!r}: {err}") from None


def spread(weight: Array, grad: Array, rows: Array) -> Array:
    """Return a gradient of the weight's shape in the work dtype: `grad` in `rows`, 0 elsewhere."""
    whole = np.zeros(weight.shape, work_dtype(weight.dtype))
    whole[rows] = widen(grad)
    return whole
