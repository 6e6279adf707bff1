"""What a job's scripts report, over the whole run in little memory. No side effects.

A curve has at most POINTS points, however long the job runs. The first and the last are as they were reported. Each of
those between is the mean of equally many reports: when there is no room for a further one, pairs become one, and from
then on a point stands for twice as many.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set

from distrun_runtime.contract.metrics import VALUES
from distrun_runtime.coordinator.metrics import plain

POINTS = 120
"""Of each curve at most."""
DIGITS = 6
"""Significant ones of a value."""


class Point(NamedTuple):
    """Where a curve was."""

    step: Optional[int]
    """The job's, as it was last reported; None: it reports none."""
    time_s: float
    """Since the job's start."""
    value: float
    """May be infinite, or nan."""


class Curve:
    """The past of one reported number."""

    def __init__(self) -> None:
        self._kept: List[Point] = []
        """The first, then means of `_size` each."""
        self._size = 1
        self._part: Optional[Point] = None
        """The mean of `_count`, which are fewer."""
        self._count = 0
        self._last: Optional[Point] = None

    def add(self, point: Point, replaces: bool = False) -> None:
        """Take the next point, or one that `replaces` the last."""
        before, self._last = self._last, point
        if before is None or replaces:
            return
        if not self._kept:
            self._kept.append(before)
            return
        self._part = before if self._part is None else _mean(self._part, self._count, before)
        self._count += 1
        if self._count == self._size:
            self._kept.append(self._part)
            self._part, self._count = None, 0
            if len(self._kept) == POINTS - 1:
                first, *others = self._kept
                pairs = zip(others[::2], others[1::2])
                self._kept = [first, *(_mean(one, 1, other) for one, other in pairs)]
                self._size *= 2

    def points(self) -> List[Point]:
        """Return what is known, the oldest first."""
        return self._kept + [each for each in (self._part, self._last) if each is not None]


class Curves:
    """The curves of a job: of the first names that its scripts report, as many as a task may report at a time."""

    def __init__(self) -> None:
        self._curves: Dict[str, Curve] = {}
        self._open: Set[str] = set()
        """Those that have a point which may be replaced."""

    def add(self, step: Optional[float], time_s: float, values: Mapping[str, float], replaces: bool = False) -> None:
        """Take means over the ranks. `step`: the job's; `time_s`: since its start; `replaces`: those that came last."""
        whole = None if step is None else int(step)
        before: Set[str] = self._open if replaces else set()
        self._open = before.union(values)
        for name, value in values.items():
            if name and (name in self._curves or len(self._curves) < VALUES):
                self._curves.setdefault(name, Curve()).add(Point(whole, round(time_s, 1), value), name in before)

    def shown(self) -> Dict[str, Any]:
        """Return `reports` of a snapshot."""
        return {
            name: [[each.step, each.time_s, _shown(each.value)] for each in curve.points()]
            for name, curve in self._curves.items()
        }


def _mean(one: Point, count: int, other: Point) -> Point:
    """Return one point for `count` that became `one` and for the next, where that is."""
    share = count / (count + 1)  # not the sum, which may be too large
    return other._replace(value=one.value * share + other.value * (1 - share))


def _shown(value: float) -> Any:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else plain(value)
