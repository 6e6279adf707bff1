"""Learning-rate schedules: which learning rate the n-th update of a weight has. Pure; JSON both ways.

A schedule is called with the number of the update, counted from 1. `warmup_steps` updates come first: with
`warmup_mode="linear"` the rate grows in equal steps from `warmup_begin_lr` towards `base_lr`, with "constant" it stays
at `warmup_begin_lr`.

Source: `lr_scheduler.py` of MXNet 1.9.1: names, arguments, their order and the arithmetic. We differ in that a
schedule has no memory, so that it may be asked for any update in any order: after a schedule's last update its final
rate holds (there: the rate it was asked for last), and a rule's `learning_rate`, where it is given too, becomes the
whole schedule's `base_lr` (there: not of the warm-up, nor of poly and cosine).
"""

from __future__ import annotations

import itertools
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import ClassVar, Type

from distrun_runtime.errors import KVError
from distrun_runtime.ops.params import Json, did_you_mean

__all__ = [
    "SCHEDULES",
    "Constant",
    "Cosine",
    "CosineScheduler",
    "Factor",
    "FactorScheduler",
    "MultiFactor",
    "MultiFactorScheduler",
    "Poly",
    "PolyScheduler",
    "Schedule",
    "from_json",
    "read",
]


class Schedule(ABC):
    """A learning rate for every update. Derived classes are frozen dataclasses whose fields are its arguments."""

    type: ClassVar[str]
    base_lr: float
    warmup_steps: int
    warmup_begin_lr: float
    warmup_mode: str

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            KVError: one of them is not right; the message says which values are.
        """
        self._number("base_lr", self.base_lr, low=0.0)
        self._whole("warmup_steps", self.warmup_steps, low=0)
        self._number("warmup_begin_lr", self.warmup_begin_lr, low=0.0)
        if self.warmup_begin_lr > self.base_lr:
            self._refuse("warmup_begin_lr", self.warmup_begin_lr, f"at most base_lr, which is {self.base_lr:g}")
        if self.warmup_mode not in ("linear", "constant"):
            self._refuse("warmup_mode", self.warmup_mode, "'linear' or 'constant'")
        self._check()

    def __call__(self, updates: int) -> float:
        """Return the learning rate of update number `updates`, which is 1 for the first."""
        if updates >= self.warmup_steps:
            return self._rate(updates)
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        return self.warmup_begin_lr + (self.base_lr - self.warmup_begin_lr) * updates / self.warmup_steps

    def to_json(self) -> dict[str, Json]:
        """Return the schedule as JSON: its type and all its arguments."""
        values = asdict(self)  # type: ignore[call-overload]  # every derived class is a dataclass
        return {"type": self.type, **{name: list(x) if isinstance(x, tuple) else x for name, x in values.items()}}

    def with_base(self, learning_rate: float) -> Schedule:
        """Return this schedule with another `base_lr`."""
        return replace(self, base_lr=learning_rate)  # type: ignore[type-var]  # every derived class is a dataclass

    @abstractmethod
    def _rate(self, updates: int) -> float:
        """Return the learning rate after the warm-up."""

    def _check(self) -> None:  # noqa: B027  # a schedule may have none
        """Check the arguments that only this schedule has."""

    def _number(self, name: str, value: object, low: float = -math.inf, high: float = math.inf) -> None:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high:  # type: ignore[operator, arg-type]
            bounds = [f"at least {low:g}"] * (low > -math.inf) + [f"at most {high:g}"] * (high < math.inf)
            self._refuse(name, value, " ".join(["a finite number", " and ".join(bounds)]).strip())
        object.__setattr__(self, name, float(value))  # type: ignore[arg-type]  # checked above

    def _whole(self, name: str, value: object, low: int) -> None:
        if not _is_whole(value) or value < low:  # type: ignore[operator]  # checked by the words before
            self._refuse(name, value, f"a whole number, at least {low}")
        object.__setattr__(self, name, int(value))  # type: ignore[call-overload]  # checked above

    def _refuse(self, name: str, value: object, expected: str) -> None:
        raise KVError(f"schedule {self.type!r}: {name}={value!r}: expected {expected}")


@dataclass(frozen=True)
class Constant(Schedule):
    """`base_lr` after the warm-up."""

    type = "constant"
    base_lr: float = 0.01
    warmup_steps: int = 0
    warmup_begin_lr: float = 0.0
    warmup_mode: str = "linear"

    def _rate(self, updates: int) -> float:
        return self.base_lr


@dataclass(frozen=True)
class Factor(Schedule):
    """`base_lr * factor ** k` after k times `step` updates, but not below `stop_factor_lr`.

    Updates 1 to `step` have k = 0, the next `step` updates k = 1, and so on; those of the warm-up count.
    """

    type = "factor"
    step: int
    factor: float = 1.0
    stop_factor_lr: float = 1e-8
    base_lr: float = 0.01
    warmup_steps: int = 0
    warmup_begin_lr: float = 0.0
    warmup_mode: str = "linear"

    def _rate(self, updates: int) -> float:
        drops = max(0, updates - 1) // self.step
        return max(self.base_lr * self.factor**drops, self.stop_factor_lr) if drops else self.base_lr

    def _check(self) -> None:
        self._whole("step", self.step, low=1)
        self._number("factor", self.factor, low=0.0, high=1.0)
        self._number("stop_factor_lr", self.stop_factor_lr, low=0.0)


@dataclass(frozen=True)
class MultiFactor(Schedule):
    """`base_lr * factor ** k`, where k is how many of the numbers in `step` are below the number of the update."""

    type = "multifactor"
    step: Sequence[int]
    factor: float = 1.0
    base_lr: float = 0.01
    warmup_steps: int = 0
    warmup_begin_lr: float = 0.0
    warmup_mode: str = "linear"

    def _rate(self, updates: int) -> float:
        return self.base_lr * self.factor ** sum(updates > step for step in self.step)

    def _check(self) -> None:
        steps = self.step
        is_list = isinstance(steps, Sequence) and not isinstance(steps, (str, bytes)) and len(steps) > 0
        if not is_list or not all(map(_is_whole, steps)):
            self._refuse("step", steps, "a list of whole numbers")
        numbers_ = [0, *(int(x) for x in steps)]
        if any(later <= earlier for earlier, later in itertools.pairwise(numbers_)):
            self._refuse("step", steps, "ascending numbers, each at least 1")
        object.__setattr__(self, "step", tuple(numbers_[1:]))
        self._number("factor", self.factor, low=0.0, high=1.0)


class _BoundedSchedule(Schedule):
    """A schedule that comes to its last rate at update `max_update`."""

    max_update: int
    final_lr: float

    def _share(self, updates: int) -> float:
        """Return how much of the way from the warm-up to the last rate is behind."""
        return (min(updates, self.max_update) - self.warmup_steps) / (self.max_update - self.warmup_steps)

    def _check(self) -> None:
        self._whole("max_update", self.max_update, low=self.warmup_steps + 1)
        self._number("final_lr", self.final_lr, low=0.0)


@dataclass(frozen=True)
class Poly(_BoundedSchedule):
    """From `base_lr` to `final_lr` at update `max_update`, as (1 - share of the way) ** `pwr`; `final_lr` after it."""

    type = "poly"
    max_update: int
    base_lr: float = 0.01
    pwr: float = 2.0
    final_lr: float = 0.0
    warmup_steps: int = 0
    warmup_begin_lr: float = 0.0
    warmup_mode: str = "linear"

    def _rate(self, updates: int) -> float:
        return float(self.final_lr + (self.base_lr - self.final_lr) * (1.0 - self._share(updates)) ** self.pwr)

    def _check(self) -> None:
        super()._check()
        self._number("pwr", self.pwr, low=0.0)


@dataclass(frozen=True)
class Cosine(_BoundedSchedule):
    """From `base_lr` to `final_lr` at update `max_update`, as (1 + cos(pi * share of the way)) / 2; then `final_lr`."""

    type = "cosine"
    max_update: int
    base_lr: float = 0.01
    final_lr: float = 0.0
    warmup_steps: int = 0
    warmup_begin_lr: float = 0.0
    warmup_mode: str = "linear"

    def _rate(self, updates: int) -> float:
        return self.final_lr + (self.base_lr - self.final_lr) * (1.0 + math.cos(math.pi * self._share(updates))) / 2.0


def _is_whole(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral)


FactorScheduler = Factor
"""MXNet's name of it."""
MultiFactorScheduler = MultiFactor
"""MXNet's name of it."""
PolyScheduler = Poly
"""MXNet's name of it."""
CosineScheduler = Cosine
"""MXNet's name of it."""

SCHEDULES: dict[str, Type[Schedule]] = {one.type: one for one in (Constant, Factor, MultiFactor, Poly, Cosine)}
"""The schedules by type."""


def from_json(value: Mapping[str, object]) -> Schedule:
    """Return the schedule of a JSON object, `{"type": "factor", "step": 100, ...}`; arguments not given are default.

    Raises:
        KVError: unknown type or argument, one that is missing, or a value that is not right.
    """
    given = dict(value)
    name = given.pop("type", None)
    kind = SCHEDULES.get(name) if isinstance(name, str) else None
    if kind is None:
        near = did_you_mean(name, SCHEDULES) if isinstance(name, str) else ""
        raise KVError(f"unknown type of schedule {name!r}{near}; known are {', '.join(sorted(SCHEDULES))}")
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # every derived class is a dataclass
    for word in given:
        if word not in known:
            near = did_you_mean(word, known)
            raise KVError(f"schedule {name!r} has no argument {word!r}{near}; it has {', '.join(known)}")
    if known[0] != "base_lr" and known[0] not in given:
        raise KVError(f"schedule {name!r} needs {known[0]}")
    return kind(**given)


def read(value: object) -> Schedule | None:
    """Return the schedule that is meant: a Schedule, its JSON, or None for no schedule.

    Raises:
        KVError: it is none of them, or its JSON is not right.
    """
    if value is None or isinstance(value, Schedule):
        return value
    if isinstance(value, Mapping):
        return from_json(value)
    raise KVError(
        f"lr_scheduler={value!r}: expected a schedule such as Factor(step=100, factor=0.5), its JSON object, or None"
    )
