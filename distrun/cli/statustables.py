"""The tables of `distrun status`: jobs, the tasks of one, jobs on hosts. No side effects.

Where there is no room, columns are left out, each table's least important first.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distrun import shell, units
from distrun.cli.console import WIDE
from distrun.dashboard import progress, read
from distrun.dashboard.text import clean_lines
from distrun_runtime.contract import facts
from distrun_runtime.coordinator import stored

if TYPE_CHECKING:
    from rich.table import Table

    from distrun.fleet import Problem
    from distrun.fleet.jobs import HostJob
    from distrun.jobviews import JobView

LAST_SHOWN = 12
"""Characters of the last column for which others are left out."""
GAP = 2
LEAST = ("CREATED", "CODE")
"""Columns of the table of jobs that matter least: the state tells of a failure, too."""

_STYLES = {
    "running": "cyan",
    "starting": "cyan",
    "succeeded": "green",
    "exited": "green",
    "failed": "red",
    "runs": "cyan",
    "agent gone": "red",
    "lost": "red",
    "damaged": "red",
    "stalled": "red",
    "cannot be asked": "red",
}


def jobs_table(
    states: Sequence[Mapping[str, Any]], now: float, columns: int = WIDE, views: Mapping[str, JobView] | None = None
) -> Table:
    """Return one row for each job. `now`: wall clock, seconds. `columns`: room. `views`: what else is known, by id.

    Where there is no room, TASKS counts problems only, before columns that matter more than CODE are left out.
    """
    headings, rows = _jobs(states, now, views or {}, is_short=False)
    least = [each for each in headings if each not in LEAST]
    if _taken(least, [[row[headings.index(each)] for each in least] for row in rows]) > columns:
        headings, rows = _jobs(states, now, views or {}, is_short=True)
    return table(headings, rows, columns, (*LEAST, "TIME", "PROGRESS", "TASKS"))


def _jobs(
    states: Sequence[Mapping[str, Any]], now: float, known: Mapping[str, JobView], *, is_short: bool
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    rows = [
        (
            str(state["id"]),
            _job_state(state, known.get(str(state["id"]))),
            _progress(known.get(str(state["id"]))),
            _code(state["exit_code"], None),
            "" if _is_damaged(state) else _count(state["tasks"], known.get(str(state["id"])), is_short=is_short),
            "" if _is_damaged(state) else duration(state["created"], state["finished"] or until(state), now),
            time.strftime("%m-%d %H:%M", time.localtime(stored.seconds(state["created"]))) if state["created"] else "",
            str(state["message"]) if _is_damaged(state) else shell.join(state["command"]),
        )
        for state in states
    ]
    headings = ("JOB", "STATE", "PROGRESS", "CODE", "TASKS", "TIME", "CREATED", "COMMAND")
    return filled(headings, rows, ("PROGRESS",))


def _job_state(state: Mapping[str, Any], view: JobView | None) -> str:
    if view is None or view.seen_s is None:
        return str(state["state"])
    return f"{state['state']}, seen {units.age(view.seen_s)} ago"


def _progress(view: JobView | None) -> str:
    found = progress.of(view.metrics or {}) if view is not None and view.is_going else None
    return "" if found is None else progress.short(found)


def tasks_table(
    state: Mapping[str, Any], now: float, columns: int = WIDE, metrics: Mapping[str, Any] | None = None
) -> Table:
    """Return one row for each task of a job, with its state and command as the title.

    `now`: wall clock, seconds. `columns`: room. `metrics`: what its coordinator measures, while it runs.
    """
    measured = (metrics or {}).get("tasks")
    if isinstance(measured, Mapping) and state["state"] in facts.GOING:
        made = _running_tasks(state, now, columns, measured)
    else:
        made = _tasks(state, now, columns)
    title = f"{state['id']}  {state['state']}  {shell.join(state['command'])}"
    made.title = plain(title + ("\n" + str(state["message"]) if state.get("message") else ""))
    made.title_justify, made.title_style = "left", ""
    return made


def _tasks(state: Mapping[str, Any], now: float, columns: int) -> Table:
    rows = [
        (
            str(task["name"]),
            str(task["state"]),
            _code(task["code"], task["signal"]),
            "" if task["pid"] is None else str(task["pid"]),
            duration(task["started"], task["ended"] or until(state), now),
            f"{task['cpu_s']:.1f} s" if task["max_rss_kb"] else "",  # unknown: it runs, or was lost with its host
            f"{task['max_rss_kb'] / 1024:.0f} MB" if task["max_rss_kb"] else "",
            str(task["host"]),
        )
        for task in state["tasks"]
    ]
    headings = ("TASK", "STATE", "CODE", "PID", "TIME", "CPU", "MAX RSS", "HOST")
    return table(headings, rows, columns, ("CPU", "MAX RSS", "PID", "TIME", "CODE"))


def _running_tasks(state: Mapping[str, Any], now: float, columns: int, measured: Mapping[str, Any]) -> Table:
    """Return the tasks with what is measured of them, in place of what is known at their end."""
    rows = []
    for task in state["tasks"]:
        found = measured.get(task["name"])
        found = found if isinstance(found, Mapping) and task["state"] == facts.RUNNING else {}
        output_s = number(found, "output_age_s")
        row = (
            str(task["name"]),
            str(found.get("condition") or task["state"]),
            _code(task["code"], task["signal"]),
            "" if task["pid"] is None else str(task["pid"]),
            duration(task["started"], task["ended"] or until(state), now),
            units.percent(number(found, "cpu")),
            units.size(number(found, "rss")),
            units.percent(number(found, "gpu")),
            units.size(number(found, "gpu_mem")),
            "" if output_s is None else f"{units.age(output_s)} ago",
            str(task["host"]),
        )
        rows.append(row)
    headings = ("TASK", "STATE", "CODE", "PID", "TIME", "CPU", "MEMORY", "GPU", "GPU MEM", "OUTPUT", "HOST")
    kept = filled(headings, rows, ("CODE", "GPU", "GPU MEM", "OUTPUT"))
    return table(*kept, columns, ("GPU MEM", "PID", "TIME", "CODE", "OUTPUT", "GPU", "MEMORY", "CPU"))


def hosts_table(found: Sequence[HostJob], columns: int = WIDE, problems: Mapping[str, Problem] | None = None) -> Table:
    """Return one row for each job of each host, and one for each host with a problem. `columns`: room."""
    from distrun.fleet import jobs

    names = jobs.names(found)
    rows = [
        (
            job.host,
            job.state(),
            names[job.mark],
            units.age(job.age_s),
            "" if job.quiet_s is None else f"{units.age(job.quiet_s)} ago",
            ", ".join(job.tasks) or ("only processes" if job.processes else "only its folder"),
        )
        for job in found
    ]
    rows += [(host, "cannot be asked", "", "", "", "") for host in problems or ()]
    return table(("HOST", "AGENT", "JOB", "AGE", "HEARD", "TASKS"), rows, columns, ("HEARD", "AGE"))


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    columns: int,
    dispensable: Sequence[str],
    has_state: bool = True,
) -> Table:
    """Return a table; `has_state`: its second column is a state, which is coloured.

    Where there is no room, `dispensable` columns are left out, the first one first, and the last one is cut.
    """
    from rich.table import Table

    for heading in dispensable:
        if heading in headings and _taken(headings, rows) > columns:
            at = headings.index(heading)
            headings, rows = _without(headings, at), [_without(row, at) for row in rows]
    taken = sum(max(len(row[index]) for row in (headings, *rows)) + GAP for index in range(len(headings) - 1))
    room = max(len(headings[-1]), columns - taken)
    made = Table(box=None, pad_edge=False, header_style="bold")
    for index, heading in enumerate(headings):
        is_last = index == len(headings) - 1
        width = None if is_last else max(len(row[index]) for row in (headings, *rows))
        made.add_column(heading, no_wrap=True, overflow="ellipsis", min_width=width)
    for row in rows:
        # Cut here: rich takes what a very long cell needs from all columns, down to nothing.
        last = row[-1] if len(row[-1]) <= room else row[-1][: max(1, room - 1)] + "…"
        cells = [plain(cell) for cell in (*row[:-1], last)]
        if has_state:
            cells[1] = f"[{_STYLES.get(row[1].partition(',')[0], 'yellow')}]{cells[1]}[/]"
        made.add_row(*cells)
    return made


def _without(row: Sequence[str], at: int) -> Sequence[str]:
    return [*row[:at], *row[at + 1 :]]


def _taken(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return how many columns of a terminal a table takes, of its last column LAST_SHOWN at most."""
    widths = [max(len(row[index]) for row in (headings, *rows)) for index in range(len(headings))]
    widths[-1] = min(widths[-1], LAST_SHOWN)
    return sum(width + GAP for width in widths) - GAP


def duration(start: str | None, end: str | None, now: float) -> str:
    """Return how long something took between two RFC 3339 times, or takes until `now`, as `1:02:03`."""
    if start is None:
        return ""
    seconds = (now if end is None else stored.seconds(end)) - stored.seconds(start)
    return units.elapsed(seconds)


def _is_damaged(state: Mapping[str, Any]) -> bool:
    """Whether nothing is known of a job but what is wrong with its folder."""
    return bool(state["state"] == facts.DAMAGED)


def until(state: Mapping[str, Any]) -> str | None:
    """Return when a job that has no end was last heard of, if its launcher is gone."""
    return None if state["state"] in facts.LIVE else str(state.get("heard") or state["updated"])


def _code(code: int | None, signal: str | None) -> str:
    return str(signal) if signal else "" if code is None else str(code)


def _count(tasks: Sequence[Mapping[str, Any]], view: JobView | None, *, is_short: bool) -> str:
    shown = (facts.FAILED, facts.LOST) if is_short else (facts.RUNNING, facts.FAILED, facts.LOST)
    counts = [(sum(task["state"] == word for task in tasks), word) for word in shown]
    measured = (view.metrics or {}).get("tasks") if view is not None else None
    if isinstance(measured, Mapping):
        conditions = [each.get("condition") for each in measured.values() if isinstance(each, Mapping)]
        counts += [(conditions.count(word), word) for word in (facts.STALLED, facts.STRAGGLER)]
    return units.counted(len(tasks), counts)


def filled(
    headings: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str]
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return headings and rows without those `optional` columns in which nothing is."""
    shown = [index for index, name in enumerate(headings) if name not in optional or any(row[index] for row in rows)]
    return [headings[index] for index in shown], [[row[index] for index in shown] for row in rows]


def number(value: Mapping[str, Any], name: str) -> float | None:
    """Return a finite number of what a coordinator, maybe of another version, tells; None: it is not known."""
    return read.finite(value.get(name))


def plain(text: str) -> str:
    """Return a text in which rich reads no markup, and the terminal no control character."""
    from rich.markup import escape

    return escape(clean_lines(text))
