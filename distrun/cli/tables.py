"""The tables of `distrun status`: jobs, tasks of a job, jobs on hosts. No side effects.

If a table is too wide, its least important columns are left out.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distrun import formats
from distrun.cli.console import WIDE, render
from distrun.dashboard import events, read
from distrun.dashboard.text import clean, clean_lines
from distrun_runtime.contract import facts
from distrun_runtime.coordinator import stored
from distrun_runtime.coordinator.failures import Culprit, Outcome, Problem, Survivor, TaskResult
from distrun_runtime.errors import JobStoreError

if TYPE_CHECKING:
    from rich.table import Table

    from distrun.fleet.questions import HostJob
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
            str(state["message"]) if _is_damaged(state) else formats.join(state["command"]),
        )
        for state in states
    ]
    headings = ("JOB", "STATE", "PROGRESS", "CODE", "TASKS", "TIME", "CREATED", "COMMAND")
    return filled(headings, rows, ("PROGRESS",))


def _job_state(state: Mapping[str, Any], view: JobView | None) -> str:
    if view is None or view.seen_s is None:
        return str(state["state"])
    return f"{state['state']}, seen {formats.age(view.seen_s)} ago"


def _progress(view: JobView | None) -> str:
    found = events.of(view.metrics or {}) if view is not None and view.is_going else None
    return "" if found is None else events.short(found)


def tasks_table(
    state: Mapping[str, Any], now: float, columns: int = WIDE, metrics: Mapping[str, Any] | None = None
) -> Table:
    """Return one row for each task of a job.

    `now`: wall clock, seconds. `columns`: room. `metrics`: what its coordinator measures, while it runs.
    """
    measured = (metrics or {}).get("tasks")
    if isinstance(measured, Mapping) and state["state"] in facts.GOING:
        return _running_tasks(state, now, columns, measured)
    return _tasks(state, now, columns)


def heading(state: Mapping[str, Any]) -> str:
    """Return the lines above what is told of a job: its id, state and command, and its message if it has one."""
    title = clean_lines(f"{state['id']}  {state['state']}  {formats.join(state['command'])}") + "\n"
    return title + (f"{clean_lines(str(state['message']))}\n" if state.get("message") else "")


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
        output_s = number_text(found, "output_age_s")
        row = (
            str(task["name"]),
            str(found.get("condition") or task["state"]),
            _code(task["code"], task["signal"]),
            "" if task["pid"] is None else str(task["pid"]),
            duration(task["started"], task["ended"] or until(state), now),
            formats.percent(number_text(found, "cpu")),
            formats.size(number_text(found, "rss")),
            formats.percent(number_text(found, "gpu")),
            formats.size(number_text(found, "gpu_mem")),
            "" if output_s is None else f"{formats.age(output_s)} ago",
            str(task["host"]),
        )
        rows.append(row)
    headings = ("TASK", "STATE", "CODE", "PID", "TIME", "CPU", "MEMORY", "GPU", "GPU MEM", "OUTPUT", "HOST")
    kept = filled(headings, rows, ("CODE", "GPU", "GPU MEM", "OUTPUT"))
    return table(*kept, columns, ("GPU MEM", "PID", "TIME", "CODE", "OUTPUT", "GPU", "MEMORY", "CPU"))


def hosts_table(found: Sequence[HostJob], columns: int = WIDE, problems: Mapping[str, Problem] | None = None) -> Table:
    """Return one row for each job of each host, and one for each host with a problem. `columns`: room."""
    from distrun.fleet import questions

    names = questions.names(found)
    rows = [
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
    return formats.elapsed(seconds)


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
    return formats.counted(len(tasks), counts)


def filled(
    headings: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str]
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return headings and rows without those `optional` columns in which nothing is."""
    shown = [index for index, name in enumerate(headings) if name not in optional or any(row[index] for row in rows)]
    return [headings[index] for index in shown], [[row[index] for index in shown] for row in rows]


def number_text(value: Mapping[str, Any], name: str) -> float | None:
    """Return a finite number of what a coordinator, maybe of another version, tells; None: it is not known."""
    return read.finite(value.get(name))


def plain(text: str) -> str:
    """Return a text in which rich reads no markup, and the terminal no control character."""
    from rich.markup import escape

    return escape(clean_lines(text))


# Formats one job in detail for `distrun status JOB`: plain text with tables. No side effects except reading its files.
#
# The metrics (`distrun.metrics/1`) may come from another version of the coordinator, so no member is required.


EVENTS = 6
"""Events that are shown."""
NARROW = 40
"""Columns that text needs; on a terminal with fewer it is broken by that."""
LABEL = 13
QUIET = ("ready", "started", "finished")
"""Events that are not shown."""


def text(view: JobView, now: float, columns: int) -> str:
    """Return all that is known of a job. `now`: wall clock, seconds. `columns`: room."""
    state = view.state
    parts = [heading(state) + "".join(_labelled(*pair, columns) for pair in _about(view, now))]
    if state["tasks"]:
        table = tasks_table(state, now, columns, view.metrics)
        parts.append(render(table) + "".join(_labelled(*pair, columns) for pair in _conditions(view)))
    parts += [_hosts(view, columns), _store(view, columns), _events(view, columns), clean_lines(error(view))]
    return "\n".join(part for part in parts if part)


def _labelled(label: str, words: str, columns: int) -> str:
    indent = " " * LABEL
    room = max(NARROW, columns) - LABEL
    lines = textwrap.wrap(clean(words), room, break_long_words=False, break_on_hyphens=False) or [""]
    return f"{label:<{LABEL}}" + f"\n{indent}".join(lines) + "\n"


def _about(view: JobView, now: float) -> list[tuple[str, str]]:
    """Return labels and what is said of the job as a whole."""
    state = view.state
    rows = []
    took = duration(state["created"], state["finished"] or until(state), now)
    created = _clock(state["created"])
    if state["state"] in (*facts.OVER, facts.LOST):
        rows.append(("time", f"{took}, {created} to {_clock(state['finished'] or until(state) or '')}"))
    else:
        rows.append(("time", f"{took}, since {created}"))
    if state["exit_code"] is not None:
        rows.append(("exit code", str(state["exit_code"])))
    found = events.of(view.metrics or {}) if view.is_going else None
    rows += [("progress", ", ".join(events.details(found)))] if found is not None else []
    if view.seen_s is not None:
        rows.append(("seen", f"{formats.age(view.seen_s)} ago; {view.problem or 'nothing was heard of it since'}"))
    hosts = state["hosts"]
    rows.append(("hosts", f"{len(hosts)}: {_folded(hosts)}" if len(hosts) > 1 else hosts[0] if hosts else "none yet"))
    if view.host and not view.is_here:
        rows.append(("coordinator", f"on {view.host}"))
    rows.append(("launched by", f"{state.get('backend') or '?'}, in {state.get('cwd') or '?'}"))
    rows.append(("folder", str(view.folder.path)))
    return rows


def _folded(hosts: Sequence[str]) -> str:
    from distrun.hosts import fold

    return fold(list(hosts))


def _with_condition(view: JobView) -> dict[str, Mapping[str, object]]:
    """Return what is measured of the tasks that wait, are stalled or late, by name; nothing of a job that is over."""
    measured = read.members((view.metrics or {}).get("tasks")) if view.is_going else {}
    tasks = {name: read.members(each) for name, each in measured.items()}
    return {name: task for name, task in tasks.items() if task.get("condition")}


def _conditions(view: JobView) -> list[tuple[str, str]]:
    """Return, for the tasks that wait, are stalled or late, why."""
    found = []
    for name, task in _with_condition(view).items():
        where = f"; to see where: distrun stack {view.id} {name}" if task["condition"] == facts.STALLED else ""
        found.append((name, f"{task['condition']}: {task.get('why') or 'no reason known'}{where}"))
    return found


def _hosts(view: JobView, columns: int) -> str:
    measured = read.members((view.metrics or {}).get("hosts"))
    if not measured or not view.is_going:
        return ""
    number, rows = number_text, []
    for name, each in measured.items():
        host = read.members(each)
        disk = number(host, "disk_free")
        rx, tx, heard_s = (number(host, member) for member in ("net_rx", "net_tx", "heard_s"))
        gpus = read.objects(host.get("gpus"))
        row = (
            name,
            "" if heard_s is None else f"{formats.age(heard_s)} ago",
            formats.percent(number(host, "cpu")),
            "" if number(host, "load") is None else f"{number(host, 'load'):.1f}",
            formats.used(number(host, "mem_used"), number(host, "mem_total")),
            "" if disk is None else f"{formats.size(disk)}",
            "" if rx is None else formats.rate(rx),
            "" if tx is None else formats.rate(tx),
            " ".join(formats.percent(number(gpu, "util")) or "?" for gpu in gpus),
        )
        rows.append(row)
    headings = ("HOST", "HEARD", "CPU", "LOAD", "MEMORY", "DISK FREE", "NET IN", "NET OUT", "GPUS")
    kept = filled(headings, rows, headings[2:])
    return render(table(*kept, columns, ("LOAD", "DISK FREE", "NET OUT", "NET IN", "GPUS", "MEMORY"), False))


def _store(view: JobView, columns: int) -> str:
    store = read.members((view.metrics or {}).get("store"))
    servers = read.members(store.get("servers"))
    if not store or not view.is_going:
        return ""
    number, rows = number_text, []
    for name, each in servers.items():
        server = read.members(each)
        lags = read.numbers(server.get("lags"))
        last = max(lags, key=lambda rank: lags[rank], default=None)
        stale = number(server, "staleness_max")
        row = (
            name,
            formats.count(number(server, "keys")),
            formats.size(number(server, "bytes")),
            formats.per_second(number(server, "push_s")),
            formats.per_second(number(server, "pull_s")),
            formats.rate(number(server, "in_s")),
            formats.rate(number(server, "out_s")),
            formats.count(number(server, "queue")),
            formats.count(number(server, "waiting")),
            "" if not stale else f"{stale:.0f}",
            "" if last is None else f"worker-{last} {lags[last]:.2f} s",
            read.text(server.get("device")),
        )
        rows.append(row)
    headings = ("SERVER", "KEYS", "BYTES", "PUSH", "PULL", "IN", "OUT", "QUEUE", "WAIT", "STALE", "LAST", "DEVICE")
    kept = filled(headings, rows, headings[2:])
    shown = render(table(*kept, columns, ("STALE", "OUT", "IN", "WAIT", "BYTES", "QUEUE"), False)) if rows else ""
    for name, each in servers.items():
        why = read.text(read.members(each).get("device_why"))
        shown += _cut(f"{name}: in host memory, not on a GPU: {why}", columns) + "\n" if why else ""
    scheduler = read.members(store.get("scheduler"))
    waiting = number(scheduler, "barrier_waiting")
    if waiting:
        shown += f"a barrier waits for {waiting:.0f} of {formats.count(number(scheduler, 'members'))} members\n"
    return shown


# ---------------------------------------------------------------------- events


def _events(view: JobView, columns: int) -> str:
    """Return the last events, without those that the rest of the page tells."""
    reader, lines = events.EventReader(), []
    told = {name for name, task in _with_condition(view).items() if task["condition"] == facts.STALLED}
    for event in view.events:
        found = reader.take(event)
        is_told = event["event"] in QUIET or event.get("state") == facts.RUNNING
        if found is not None and not is_told and not (found.stalled and told.intersection(found.tasks)):
            lines.append(f"{time.strftime('%H:%M:%S', time.localtime(found.time))}  {found.words}")
    return "".join(_cut(line, max(NARROW, columns)) + "\n" for line in lines[-EVENTS:])


def _cut(line: str, columns: int) -> str:
    line = line.splitlines()[0] if line else ""
    return line if len(line) <= columns else line[: columns - 4] + " ..."


# ---------------------------------------------------------------------- the first error


def error(view: JobView) -> str:
    """Return why a job failed, or the first failure of one that goes on, with the last lines of that task."""
    from distrun import report

    outcome = _outcome(view)
    if outcome is not None:
        culprit = outcome.culprit.task if outcome.culprit is not None else ""
        tail = view.folder.tail(culprit, report.READ_LINES) if culprit else []
        found = report.failure(outcome, tail, str(view.folder.log_path(culprit)) if culprit else "")
        return f"{found}\n" if found else ""
    first = _first_failed(view.state["tasks"])
    if first is None:
        return ""
    how = f"signal {first['signal']}" if first["signal"] else f"exit code {first['code']}"
    lines = [f"first failure: {first['name']} on {first['host']}: {first['reason'] or how}"]
    tail = report.excerpt(view.folder.tail(str(first["name"]), report.READ_LINES))
    lines += ["    | " + line for line in tail]
    return "\n".join(lines) + "\n"


def error_as_json(view: JobView) -> dict[str, Any] | None:
    """Return the first failure: task, host, log, and the last lines of that."""
    from distrun import report

    outcome = _outcome(view)
    if outcome is not None:
        culprit = outcome.culprit
        if culprit is None:
            return None
        task, host = culprit.task, culprit.host
    else:
        first = _first_failed(view.state["tasks"])
        if first is None:
            return None
        task, host = str(first["name"]), str(first["host"])
    tail = view.folder.tail(task, report.READ_LINES) if task else []
    log = str(view.folder.log_path(task)) if task else None
    return {"task": task or None, "host": host, "log": log, "lines": report.excerpt(tail) if tail else []}


def _first_failed(tasks: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    failed = [task for task in tasks if task["state"] == facts.FAILED]
    return min(failed, key=lambda task: str(task["ended"] or "~"), default=None)


def _outcome(view: JobView) -> Outcome | None:
    """Return a job's end as far as the report of a failure needs it; None if it goes on, or nothing is known."""
    try:
        found = view.folder.outcome()
        if found is None:
            return None
        culprit = found.get("culprit")
        tasks = [
            TaskResult(
                **{name: task[name] for name in ("name", "role", "rank", "host", "state", "code", "signal")},
                reason=task["reason"],
                lost_peer=task["lost_peer"],
            )
            for task in found["tasks"]
        ]
        problems = [
            Problem(str(each["host"]), str(each["kind"]), str(each["text"]), str(each["fix"]))
            for each in found.get("problems", ())
        ]
        return Outcome(
            found["exit_code"],
            found["reason"],
            found["message"],
            None if culprit is None else _culprit(culprit),
            tuple(tasks),
            tuple(Survivor(each["what"], each["host"]) for each in found.get("survivors", ())),
            view.id,
            tuple(problems),
        )
    except (JobStoreError, LookupError, TypeError, AttributeError):
        return None


def _culprit(value: Mapping[str, Any]) -> Culprit:
    return Culprit(
        str(value["task"]),
        str(value["host"]),
        value["code"],
        value["signal"],
        reason=str(value["reason"]),
        consequence=bool(value.get("consequence")),
        lost_peer=str(value.get("lost_peer") or ""),
        missing=bool(value.get("missing")),
    )


def _clock(when: str) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stored.seconds(when))) if when else "?"
