"""What the page in the browser shows, as JSON: the list of jobs, and one job with its tables, events and plots.

No side effects. Tables, words and styles are those of `distrun top`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distrun import formats
from distrun.dashboard import events, rows, source, text, view
from distrun.dashboard.model import Model
from distrun.dashboard.source import Point
from distrun_runtime.contract.facts import time_of_day

ROOM = 10_000
"""Columns of a table: as many as it wants."""
ROWS = 500
"""Rows of a table at most."""
EVENTS = 200
POINTS = 600
"""Points of a plot of what a job uses, at most."""
MEAN_S = 10.0
"""Of the points of a job's `history`."""

Values = tuple[float | None, ...]


@dataclass(frozen=True)
class RowChoice:
    """What a user wants to see of the tasks and hosts."""

    wanted: str = ""
    """Words that must be part of name, host or state."""
    order: str = rows.SORTS[0]
    is_folded: bool = False


def jobs(models: Sequence[Model], now: float) -> dict[str, Any]:
    """Return the list of jobs. `now`: wall clock, seconds."""
    return {"jobs": rows.jobs(models, ROOM, now).as_json(), "ids": [model.job.id for model in models]}


def job(model: Model, choice: RowChoice, usage: UsagePlots, now: float) -> dict[str, Any]:
    """Return one job. `now`: wall clock, seconds."""
    found, since_s = model.job, view.since(model, now)
    tasks = rows.task_rows(model.tasks.values(), choice.wanted, choice.order, choice.is_folded)
    hosts = rows.host_rows([host for host in model.hosts.values() if host.word], choice.wanted, choice.is_folded)
    servers = model.store.servers if model.store is not None else ()
    shown = events.folded(model.events)[-EVENTS:]
    return {
        "id": found.id,
        "state": found.state or "no state yet",
        "style": rows.style_of(found.state),
        "elapsed": formats.elapsed(found.elapsed(now)),
        "code": found.exit_code,
        "backend": found.backend,
        "name": text.clean(found.name),
        "command": text.clean(formats.join(found.command)),
        "is_over": found.is_over,
        "counts": [[f"{count} {word}", rows.style_of(word)] for word, count in model.counts],
        "notes": [[text.plain(line), line[-1][1]] for line in view.notes(model, now)],
        "progress": _progress(model),
        "error": {"title": view.error_title(model), "lines": model.error_lines} if model.first_error else None,
        "charts": [*(_report(*each) for each in model.reports.items()), *usage.charts(found.created or now)],
        "tasks": rows.tasks(tasks[:ROWS], ROOM, now, since_s).as_json(),
        "tasks_hidden": len(tasks[ROWS:]),
        "hosts": rows.hosts(hosts[:ROWS], ROOM, since_s).as_json(),
        "hosts_hidden": len(hosts[ROWS:]),
        "servers": rows.servers(servers[:ROWS], ROOM).as_json(),
        "store": [text.plain(line) for line in view.store_notes(model)],
        "events": [[time_of_day(each.time)[:8], each.words, each.style] for each in reversed(shown)],
        "orders": rows.SORTS,
    }


def _progress(model: Model) -> dict[str, Any] | None:
    found = model.progress
    if found is None:
        return None
    if model.job.is_over:
        found = replace(found, eta_s=None, is_stalled=False, slowest="")
    return {"fraction": found.fraction, "parts": list(map(text.clean, events.details(found)))}


# ---------------------------------------------------------------------- plots


def _report(name: str, points: Sequence[Point]) -> dict[str, Any]:
    """Return the plot of a number that scripts report, over steps if these are known, went on and never went back."""
    steps, times, values = zip(*points, strict=True)
    known = [value for value in values if math.isfinite(value)]
    has_steps = None not in steps and list(steps) == sorted(steps) and (len(steps) == 1 or steps[0] != steps[-1])
    about = f"min {formats.value(min(known))}  max {formats.value(max(known))}" if known else ""
    shown = [value if math.isfinite(value) else None for value in values]
    return {
        "kind": "report",
        "name": text.clean(name),
        "unit": "",
        "last": formats.value(values[-1]),
        "about": about,
        "steps": steps if has_steps else None,
        "times": times,
        "series": [["", shown]],
    }


CHARTS = (
    ("CPU cores", "cores", (("", "cpu"),)),
    ("memory", "B", (("", "rss"),)),
    ("network", "B/s", (("", "net"),)),
    ("store", "/s", (("pushes", "push_s"), ("pulls", "pull_s"))),
)
"""Of each plot of what a job uses: its name, its unit, and its series with their names."""
NAMES = tuple(name for _, _, series in CHARTS for _, name in series)


class UsagePlots:
    """What a job uses, over its whole time: cores, memory, network, pushes and pulls.

    Arguments:
        samples: those of the job's folder, one a minute, the oldest first.
    """

    def __init__(self, samples: Iterable[Mapping[str, object]]) -> None:
        told = [(source.moment(each.get("time")), {**each, "net": _net(each)}) for each in samples]
        self._points: list[tuple[float, Values]] = [
            (at, tuple(source.finite(each.get(name)) for name in NAMES)) for at, each in told if at is not None
        ]
        self._has_history = False
        self._thin()

    def take(self, model: Model) -> None:
        """Take the numbers of the last metrics, unless they are known."""
        at = model.metrics_at
        if at is None or model.job.is_over or (self._points and at <= self._points[-1][0]):
            return
        if not self._has_history:
            self._has_history = True
            self._take_history(model, at)
        store, tasks, hosts = model.store, model.tasks.values(), model.hosts.values()
        self._points.append(
            (
                at,
                (
                    rows.total(task.cpu for task in tasks),
                    rows.total(task.rss for task in tasks if not task.is_over),
                    rows.total(rate for host in hosts for rate in (host.net_rx, host.net_tx)),
                    store.push_s if store is not None else None,
                    store.pull_s if store is not None else None,
                ),
            )
        )
        self._thin()

    def charts(self, created: float) -> list[dict[str, Any]]:
        """Return the plots of which anything is known. `created`: when the job began, wall clock, seconds."""
        times = [round(max(0.0, at - created), 1) for at, _ in self._points]
        found = []
        for name, unit, series in CHARTS:
            curves = [[label, [values[NAMES.index(key)] for _, values in self._points]] for label, key in series]
            if len(times) > 1 and any(value is not None for _, values in curves for value in values):
                found.append(
                    {"kind": "usage", "name": name, "unit": unit, "steps": None, "times": times, "series": curves}
                )
        return found

    def _take_history(self, model: Model, now: float) -> None:
        """Take the last minutes, as far as no sample tells of them: the newest mean ended `now`."""
        count = max(map(len, model.history.values()), default=0)
        times = [now - MEAN_S * (count - number) for number in range(count)]
        first = bisect_right(times, self._points[-1][0]) if self._points else 0
        kept = [((None,) * count + tuple(model.history.get(name, ())))[-count:] if count else () for name in NAMES]
        self._points += list(zip(times[first:], list(zip(*kept, strict=True))[first:], strict=True))

    def _thin(self) -> None:
        while len(self._points) > POINTS:
            del self._points[1:-1:2]  # the first and the last stay


def _net(sample: Mapping[str, object]) -> float | None:
    return rows.total(source.finite(sample.get(name)) for name in ("net_rx", "net_tx"))
