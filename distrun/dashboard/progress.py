"""Reads a job's progress from a snapshot of its metrics and words it for all displays. No side effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distrun import units
from distrun.dashboard import read
from distrun_runtime.contract import facts


@dataclass(frozen=True)
class Progress:
    """How far a job is, by what its tasks reported. What is unknown is None or empty."""

    step: int | None = None
    total: int | None = None
    phase: int = 0
    fraction: float | None = None
    eta_s: float | None = None
    rate: float | None = None
    """Steps a second."""
    loss: float | None = None
    values: Mapping[str, float] | None = None
    """Other reported values, by name."""
    slowest: str = ""
    """The slowest rank; empty if all are in step."""
    is_stalled: bool = False
    """The slowest rank is stalled, so there is no ETA."""


def of(metrics: Mapping[str, object]) -> Progress | None:
    """Return the progress in a snapshot of metrics (`distrun.metrics/1`); None: no task has reported any."""
    told = read.members(metrics.get("progress"))
    if not told:
        return None
    tasks = {name: read.members(each) for name, each in read.members(metrics.get("tasks")).items()}
    steps = {name: read.number(read.members(each.get("report")).get("step")) for name, each in tasks.items()}
    slowest = read.text(told.get("slowest"))
    is_stalled = tasks.get(slowest, {}).get("condition") == facts.STALLED
    rate, eta_s = read.finite(told.get("rate")), read.finite(told.get("eta_s"))
    return Progress(
        step=read.whole(told.get("step")),
        total=read.whole(told.get("total")),
        phase=read.whole(told.get("phase")) or 0,
        fraction=read.finite(told.get("fraction")),
        eta_s=None if is_stalled or eta_s is None or not 0 <= eta_s < units.LONG_S else eta_s,
        rate=rate if rate is not None and rate > 0 else None,
        loss=read.number(told.get("loss")),
        values={name: value for name, value in read.numbers(told.get("values")).items() if name != "loss"},
        slowest=slowest if slowest and (is_stalled or _is_behind(slowest, steps)) else "",
        is_stalled=is_stalled,
    )


def _is_behind(name: str, steps: Mapping[str, float | None]) -> bool:
    """Return whether a task is behind by more than the step in which all are: of ranks in step none is slow.

    `steps`: what tasks have reported. A task that has not is behind.
    """
    known = {task: step for task, step in steps.items() if step is not None}
    return name not in known or max(known.values()) - known[name] > 1


# ---------------------------------------------------------------------- words


def step(found: Progress) -> str:
    """Return the step: `step 1200/5000`, `phase 2: step 7`; empty if it is not known."""
    if found.step is None:
        return ""
    return (f"phase {found.phase + 1}: " if found.phase else "") + f"step {units.steps(found.step, found.total)}"


def eta(found: Progress) -> str:
    """Return the time that is left, `ETA 0:12:05`, or why there is none; empty if it is not known."""
    if found.is_stalled:
        return f"no ETA: {found.slowest} is stalled"
    return "" if found.eta_s is None else f"ETA {units.elapsed(found.eta_s)}"


def loss(found: Progress) -> str:
    """Return the loss: `loss 0.3712`; empty if it is not known."""
    return "" if found.loss is None else f"loss {units.value(found.loss)}"


def slowest(found: Progress) -> str:
    """Return which rank is the slowest: `slowest worker-1`; empty if none is, or if `eta` says so."""
    return f"slowest {found.slowest}" if found.slowest and not found.is_stalled else ""


def line(found: Progress) -> Sequence[str]:
    """Return the parts of a line: `step 1200/5000 (24 %)`, `5.25 steps/s`, `ETA 0:12:05`, `loss 0.3712`."""
    share = "" if found.fraction is None else f" ({units.percent(found.fraction)})"
    rate = "" if found.rate is None else f"{_rounded(found.rate)} steps/s"
    parts = (step(found) + share if step(found) else "", rate, eta(found), loss(found))
    return [part for part in parts if part]


def _rounded(rate: float) -> str:
    return f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}"


def details(found: Progress) -> Sequence[str]:
    """Return the parts of a line with other reported values and the slowest rank."""
    values = [f"{name} {units.value(each)}" for name, each in (found.values or {}).items()]
    return [*line(found), *values, *([slowest(found)] if slowest(found) else [])]


def short(found: Progress) -> str:
    """Return the progress for a column: `24 %, ETA 0:12:05`; without a total `step 7`."""
    if found.fraction is None:
        return step(found)
    return units.percent(found.fraction) + ("" if found.eta_s is None else f", {eta(found)}")
