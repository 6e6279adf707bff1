"""Computes the progress of a job from the reports of its workers. No side effects.

The progress of the job is that of its slowest rank. A step that goes back starts a new phase, such as the next epoch or
a restart. The job's phase is the lowest phase of its ranks. The rate is that of the last two minutes, across phases.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Deque, Dict, List, Optional, Tuple

from distrun_runtime.contract.metrics import VALUES
from distrun_runtime.coordinator.metrics import Report, plain

WINDOW_S = 120.0
"""Period from which the rate is computed, seconds."""
POINT_S = 1.0
"""Points of the past are so far apart."""
LOSS = "loss"


class _Rank:
    """What one rank has reported."""

    __slots__ = ("phase", "report", "step")

    def __init__(self, report: Report) -> None:
        self.report = report
        self.step: Optional[float] = None
        """The last one that was reported."""
        self.phase = 0

    def take(self, report: Report) -> None:
        """Note a report."""
        self.report = report
        if report.step is None:
            return
        if self.step is not None and report.step < self.step:
            self.phase += 1
        self.step = report.step


class Progress:
    """How far a job is."""

    def __init__(self) -> None:
        self._ranks: Dict[str, _Rank] = {}
        self._ended: Dict[str, _Rank] = {}
        """Of tasks that have ended."""
        self._points: Deque[Tuple[float, float]] = deque()
        """When, and how many steps the job had done in all phases."""
        self._done = 0.0
        self._last = (0, 0.0)
        """The phase and the step of the slowest rank when it was looked at last."""

    def take(self, task: str, report: Report) -> None:
        """Note what a worker reported."""
        rank = self._ranks.get(task)
        if rank is None:
            rank = self._ranks[task] = self._ended.pop(task) if task in self._ended else _Rank(report)
        elif report is rank.report:
            return
        rank.take(report)

    def end(self, task: str) -> None:
        """Note that a worker has ended: the job's progress is that of the others, while there are any."""
        if task in self._ranks:
            self._ended[task] = self._ranks.pop(task)

    def mark(self, now: float) -> None:
        """Remember how far the job is, for its rate; to be called about once a second."""
        slowest = self._slowest()
        if slowest is None:
            return
        rank = slowest[1]
        phase, step = rank.phase, rank.step or 0.0
        if self._points:  # of a rank that comes in later, and is less far, nothing is subtracted
            same_phase = phase == self._last[0]
            self._done += max(0.0, step - self._last[1]) if same_phase else step if phase > self._last[0] else 0.0
        self._last = (phase, step)
        if not self._points or now >= self._points[-1][0] + POINT_S:
            self._points.append((now, self._done))
        while len(self._points) > 2 and self._points[1][0] <= now - WINDOW_S:
            self._points.popleft()

    def value(self, now: float) -> Optional[Dict[str, Any]]:
        """Return `progress` of a snapshot; None: no worker has reported."""
        ranks = self._ranks or self._ended
        if not ranks:
            return None
        self.mark(now)
        found: Dict[str, Any] = dict.fromkeys(("step", "total", "phase", "fraction", "eta_s", "rate", "slowest"))
        slowest = self._slowest()
        if slowest is not None:
            found.update(self._so_far(slowest[1], now), slowest=slowest[0])
        values = _means([rank.report for rank in ranks.values()])
        found["loss"] = plain(values.get(LOSS), 6)
        found["values"] = {name: plain(each, 6) for name, each in values.items()}
        return found

    def _so_far(self, rank: _Rank, now: float) -> Dict[str, Any]:
        step = rank.step or 0.0
        total = rank.report.total if rank.report.total is not None else self._largest_total()
        passed_s = now - self._points[0][0] if self._points else 0.0
        pace = (self._done - self._points[0][1]) / passed_s if passed_s >= POINT_S else None
        found = {"step": plain(step), "total": plain(total), "phase": rank.phase, "rate": plain(pace)}
        if total:
            found["fraction"] = plain(min(1.0, step / total))
            if pace or step >= total:
                found["eta_s"] = plain(max(0.0, total - step) / (pace or 1.0), 1)
        return found

    def _slowest(self) -> Optional[Tuple[str, _Rank]]:
        """Return the rank that is least far, of those that report steps; the first by name of several."""
        known = [each for each in (self._ranks or self._ended).items() if each[1].step is not None]
        if not known:
            return None
        others = self._largest_total()  # for a rank that does not say how many steps it is to do

        def order(each: Tuple[str, _Rank]) -> Tuple[int, float, str]:
            name, rank = each
            total, step = rank.report.total or others, rank.step or 0.0
            return rank.phase, step / total if total else step, name

        return min(known, key=order)

    def _largest_total(self) -> Optional[float]:
        ranks = (self._ranks or self._ended).values()
        return max((rank.report.total for rank in ranks if rank.report.total is not None), default=None)


def _means(reports: List[Report]) -> Dict[str, float]:
    """Return the mean of each value over those that report it; nan if one of them is."""
    found: Dict[str, List[float]] = {}
    for report in reports:
        for name, each in report.values.items():
            if name in found or len(found) < VALUES:
                found.setdefault(name, []).append(each)
    return {name: _mean(each) for name, each in found.items()}


def _mean(values: List[float]) -> float:
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # too large, or both infinities
        return math.nan
