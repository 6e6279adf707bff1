"""What `distrun status` shows: the tables of jobs, of a job's tasks and of jobs on hosts, and one job in detail.

No side effects except reading a job's files. The tables are those of `distrun top`, of the same model.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distrun import formats
from distrun.cli import common
from distrun.cli.console import WIDE, styled
from distrun.dashboard import events, rows
from distrun.dashboard.model import Model
from distrun.dashboard.text import UNICODE, Glyphs, Line, clean, clean_lines, fit, folded
from distrun.dashboard.view import reports, servers
from distrun_runtime.contract import facts
from distrun_runtime.coordinator.failures import Outcome, Problem
from distrun_runtime.errors import JobStoreError

if TYPE_CHECKING:
    from distrun.fleet.questions import HostJob
    from distrun.jobs import JobView


def model_of(view: JobView, now: float) -> Model:
    """Return the model of a job, of what is known of it. `now`: wall clock, seconds."""
    made = Model(view.id, view.seen_s)
    made.take("state", {"state": view.state}, now)
    if view.metrics and view.is_going:
        made.take("metrics", {"metrics": view.metrics}, now)
    return made


def jobs_table(views: Sequence[JobView], now: float, columns: int = WIDE) -> list[Line]:
    """Return one row for each job. `now`: wall clock, seconds. `columns`: room."""
    return rows.jobs([model_of(view, now) for view in views], columns, now).lines()


def tasks_table(view: JobView, now: float, columns: int = WIDE, most: int = sys.maxsize) -> list[Line]:
    """Return one row for each task of a job; of more than `most`, those that are alike share one.

    `now`: wall clock, seconds. `columns`: room.
    """
    return _tasks(_detailed(view, _outcome(view), now), now, columns, most)


def _tasks(model: Model, now: float, columns: int, most: int = sys.maxsize) -> list[Line]:
    is_folded = len(model.tasks) > most
    return rows.tasks(rows.task_rows(model.tasks.values(), "", rows.SORTS[0], is_folded), columns, now).lines()


def _detailed(view: JobView, outcome: Outcome | None, now: float) -> Model:
    """Return the model of a job whose tasks are shown: the one that ended it comes first."""
    model = model_of(view, now)
    model.take("reports", {"reports": view.reports}, now)
    model.culprit = outcome.culprit.task if outcome is not None and outcome.culprit is not None else ""
    model.settle(now)
    return model


def heading(state: Mapping[str, Any]) -> str:
    """Return the lines above what is told of a job: its id, state and command, and its message if it has one."""
    title = clean_lines(f"{state['id']}  {state['state']}  {formats.join(state['command'])}") + "\n"
    return title + (f"{clean_lines(str(state['message']))}\n" if state.get("message") else "")


def hosts_table(
    found: Sequence[HostJob], columns: int = WIDE, problems: Mapping[str, Problem] | None = None
) -> list[Line]:
    """Return one row for each job of each host, and one for each host with a problem. `columns`: room."""
    from distrun.fleet import questions

    names = questions.names(found)
    cells = [
        (
            job.host,
            job.state(),
            names[job.mark],
            formats.age(job.age_s),
            "" if job.quiet_s is None else f"{formats.age(job.quiet_s)} ago",
            ", ".join(job.tasks) or ("only processes" if job.processes else "only its folder"),
        )
        for job in found
    ]
    cells += [(host, "cannot be asked", "", "", "", "") for host in problems or ()]
    return rows.of_texts(("HOST", "AGENT", "JOB", "AGE", "HEARD", "TASKS"), cells, columns, ("HEARD", "AGE"))


# Formats one job in detail for `distrun status JOB`: plain text with tables. No side effects except reading its files.
#
# The metrics (`distrun.metrics/1`) may come from another version of the coordinator, so no member is required.


REPORTS, REPORT_COLUMNS = 16, 120
"""Lines and columns that the charts of what is reported take at most."""
EVENTS = 6
"""Events that are shown."""
NARROW = 40
"""Columns that text needs; on a terminal with fewer it is broken by that."""
LABEL = 13
QUIET = ("ready", "started", "finished")
"""Events that are not shown."""


def text(view: JobView, now: float, columns: int, glyphs: Glyphs = UNICODE) -> str:
    """Return all that is known of a job. `now`: wall clock, seconds. `columns`: room."""
    outcome = _outcome(view)
    model = _detailed(view, outcome, now)
    parts = [heading(view.state) + "".join(_labelled(*pair, columns) for pair in _about(view, model, now))]
    table = styled(_tasks(model, now, columns))
    parts.append(table + "".join(_labelled(*pair, columns) for pair in _conditions(model)) if model.tasks else "")
    parts.append(styled(reports(model, REPORTS, min(columns, REPORT_COLUMNS), glyphs)))
    if model.metrics_at is not None:
        groups = rows.host_rows([host for host in model.hosts.values() if host.word], "", False)
        parts.append(styled(rows.hosts(groups, columns, 0.0).lines()) if groups else "")
        parts.append(styled(servers(model, columns, glyphs)))
    parts += [_events(view, model, columns), clean_lines(_error(view, outcome))]
    return "\n".join(part for part in parts if part)


def _labelled(label: str, words: str, columns: int) -> str:
    indent = " " * LABEL
    room = max(NARROW, columns) - LABEL
    lines = textwrap.wrap(clean(words), room, break_long_words=False, break_on_hyphens=False) or [""]
    return f"{label:<{LABEL}}" + f"\n{indent}".join(lines) + "\n"


def _about(view: JobView, model: Model, now: float) -> list[tuple[str, str]]:
    """Return labels and what is said of the job as a whole."""
    state, job = view.state, model.job
    is_over = job.state in (*facts.OVER, facts.LOST)
    until = (
        f", {rows.clock(job.created)} to {rows.clock(job.until)}" if is_over else f", since {rows.clock(job.created)}"
    )
    hosts, seen = tuple(state["hosts"]), view.problem or "nothing was heard of it since"
    about = [
        ("time", formats.elapsed(job.elapsed(now)) + until),
        ("exit code", "" if job.exit_code is None else str(job.exit_code)),
        ("progress", "" if model.progress is None else ", ".join(events.details(model.progress))),
        ("seen", "" if view.seen_s is None else f"{formats.age(view.seen_s)} ago; {seen}"),
        ("hosts", (f"{len(hosts)}: " if len(hosts) > 1 else "") + (folded(hosts) if hosts else "none yet")),
        ("coordinator", f"on {view.host}" if view.host and not view.is_here else ""),
        ("launched by", f"{state.get('backend') or '?'}, in {state.get('cwd') or '?'}"),
        ("folder", str(view.folder.path)),
    ]
    return [pair for pair in about if pair[1]]


def _conditions(model: Model) -> list[tuple[str, str]]:
    """Return why tasks are stalled or late, or wait for long; nothing of a job that is over."""
    found: list[tuple[str, str]] = []
    if model.job.is_over:
        return found
    for task in model.tasks.values():
        if task.is_problem and not task.is_over:
            where = f"; to see where: distrun stack {model.job.id} {task.name}" if task.word == facts.STALLED else ""
            found.append((task.name, f"{task.word}: {task.why}{where}"))
    return found


# ---------------------------------------------------------------------- events


def _events(view: JobView, model: Model, columns: int) -> str:
    """Return the last events, without those that the rest of the page tells."""
    reader, lines = events.EventReader(), []
    stalled = {task.name for task in model.tasks.values() if task.word == facts.STALLED}
    for event in view.events:
        found = reader.take(event)
        is_told = event["event"] in QUIET or event.get("state") == facts.RUNNING
        if found is not None and not is_told and not (found.stalled and stalled.intersection(found.tasks)):
            lines.append(found)
    told = [f"{rows.clock(each.time, '%H:%M:%S')}  {each.words}" for each in events.folded(lines)]
    return "".join(fit(line, max(NARROW, columns), " ...").rstrip() + "\n" for line in told[-EVENTS:])


# ---------------------------------------------------------------------- the first error


def _error(view: JobView, outcome: Outcome | None) -> str:
    """Return why a job failed, or the first failure of one that goes on, with the last lines of that task."""
    if outcome is not None:
        found, _ = common.failure(outcome, view.folder)
        return f"{found}\n" if found else ""
    first = _first_failed(view.state["tasks"])
    if first is None:
        return ""
    from distrun import report

    how = f"signal {first['signal']}" if first["signal"] else f"exit code {first['code']}"
    lines = [f"first failure: {first['name']} on {first['host']}: {first['reason'] or how}"]
    lines += ["    | " + line for line in report.excerpt(view.folder.tail(str(first["name"]), report.READ_LINES))]
    return "\n".join(lines) + "\n"


def error_as_json(view: JobView) -> dict[str, Any] | None:
    """Return the first failure: task, host, log, and the last lines of that."""
    from distrun import report

    outcome = _outcome(view)
    first = _first_failed(view.state["tasks"]) if outcome is None else None
    if outcome is not None and outcome.culprit is not None:
        task, host = outcome.culprit.task, outcome.culprit.host
    elif first is not None:
        task, host = str(first["name"]), str(first["host"])
    else:
        return None
    tail = view.folder.tail(task, report.READ_LINES) if task else []
    log = str(view.folder.log_path(task)) if task else None
    return {"task": task or None, "host": host, "log": log, "lines": report.excerpt(tail) if tail else []}


def _first_failed(tasks: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    failed = [task for task in tasks if task["state"] == facts.FAILED]
    return min(failed, key=lambda task: (bool(task.get("lost_peer")), str(task["ended"] or "~")), default=None)


def _outcome(view: JobView) -> Outcome | None:
    """Return a job's end as far as its folder tells; None if it goes on, or nothing is known."""
    try:
        return view.folder.ended()
    except JobStoreError:
        return None
