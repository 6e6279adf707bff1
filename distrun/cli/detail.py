"""Formats one job in detail for `distrun status JOB`: plain text with tables. No side effects except reading its files.

The metrics (`distrun.metrics/1`) may come from another version of the coordinator, so no member is required.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distrun import report, units
from distrun.cli import statustables as tables
from distrun.cli.console import render
from distrun.dashboard import events as happenings
from distrun.dashboard import progress, read
from distrun.dashboard.text import clean, clean_lines
from distrun_runtime.contract import facts
from distrun_runtime.coordinator import stored
from distrun_runtime.coordinator.outcome import Culprit, Outcome, Problem, TaskResult
from distrun_runtime.errors import JobStoreError

if TYPE_CHECKING:
    from distrun.jobviews import JobView

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
    parts = [tables.heading(state) + "".join(_labelled(*pair, columns) for pair in _about(view, now))]
    if state["tasks"]:
        table = tables.tasks_table(state, now, columns, view.metrics)
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
    took = tables.duration(state["created"], state["finished"] or tables.until(state), now)
    created = _clock(state["created"])
    if state["state"] in (*facts.OVER, facts.LOST):
        rows.append(("time", f"{took}, {created} to {_clock(state['finished'] or tables.until(state) or '')}"))
    else:
        rows.append(("time", f"{took}, since {created}"))
    if state["exit_code"] is not None:
        rows.append(("exit code", str(state["exit_code"])))
    found = progress.of(view.metrics or {}) if view.is_going else None
    rows += [("progress", ", ".join(progress.details(found)))] if found is not None else []
    if view.seen_s is not None:
        rows.append(("seen", f"{units.age(view.seen_s)} ago; {view.problem or 'nothing was heard of it since'}"))
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
    number, rows = tables.number, []
    for name, each in measured.items():
        host = read.members(each)
        disk = number(host, "disk_free")
        rx, tx, heard_s = (number(host, member) for member in ("net_rx", "net_tx", "heard_s"))
        gpus = read.objects(host.get("gpus"))
        row = (
            name,
            "" if heard_s is None else f"{units.age(heard_s)} ago",
            units.percent(number(host, "cpu")),
            "" if number(host, "load") is None else f"{number(host, 'load'):.1f}",
            units.used(number(host, "mem_used"), number(host, "mem_total")),
            "" if disk is None else f"{units.size(disk)}",
            "" if rx is None else units.rate(rx),
            "" if tx is None else units.rate(tx),
            " ".join(units.percent(number(gpu, "util")) or "?" for gpu in gpus),
        )
        rows.append(row)
    headings = ("HOST", "HEARD", "CPU", "LOAD", "MEMORY", "DISK FREE", "NET IN", "NET OUT", "GPUS")
    kept = tables.filled(headings, rows, headings[2:])
    return render(tables.table(*kept, columns, ("LOAD", "DISK FREE", "NET OUT", "NET IN", "GPUS", "MEMORY"), False))


def _store(view: JobView, columns: int) -> str:
    store = read.members((view.metrics or {}).get("store"))
    servers = read.members(store.get("servers"))
    if not store or not view.is_going:
        return ""
    number, rows = tables.number, []
    for name, each in servers.items():
        server = read.members(each)
        lags = read.numbers(server.get("lags"))
        last = max(lags, key=lambda rank: lags[rank], default=None)
        stale = number(server, "staleness_max")
        row = (
            name,
            units.count(number(server, "keys")),
            units.size(number(server, "bytes")),
            units.per_second(number(server, "push_s")),
            units.per_second(number(server, "pull_s")),
            units.rate(number(server, "in_s")),
            units.rate(number(server, "out_s")),
            units.count(number(server, "queue")),
            units.count(number(server, "waiting")),
            "" if not stale else f"{stale:.0f}",
            "" if last is None else f"worker-{last} {lags[last]:.2f} s",
            read.text(server.get("device")),
        )
        rows.append(row)
    headings = ("SERVER", "KEYS", "BYTES", "PUSH", "PULL", "IN", "OUT", "QUEUE", "WAIT", "STALE", "LAST", "DEVICE")
    kept = tables.filled(headings, rows, headings[2:])
    shown = (
        render(tables.table(*kept, columns, ("STALE", "OUT", "IN", "WAIT", "BYTES", "QUEUE"), False)) if rows else ""
    )
    for name, each in servers.items():
        why = read.text(read.members(each).get("device_why"))
        shown += _cut(f"{name}: in host memory, not on a GPU: {why}", columns) + "\n" if why else ""
    scheduler = read.members(store.get("scheduler"))
    waiting = number(scheduler, "barrier_waiting")
    if waiting:
        shown += f"a barrier waits for {waiting:.0f} of {units.count(number(scheduler, 'members'))} members\n"
    return shown


# ---------------------------------------------------------------------- events


def _events(view: JobView, columns: int) -> str:
    """Return the last events, without those that the rest of the page tells."""
    reader, lines = happenings.EventReader(), []
    told = {name for name, task in _with_condition(view).items() if task["condition"] == facts.STALLED}
    for event in view.events:
        found = reader.take(event)
        is_told = event["event"] in QUIET or event.get("state") == facts.RUNNING
        if found is not None and not is_told and found.stalled not in told:
            lines.append(f"{time.strftime('%H:%M:%S', time.localtime(found.time))}  {found.words}")
    return "".join(_cut(line, max(NARROW, columns)) + "\n" for line in lines[-EVENTS:])


def _cut(line: str, columns: int) -> str:
    line = line.splitlines()[0] if line else ""
    return line if len(line) <= columns else line[: columns - 4] + " ..."


# ---------------------------------------------------------------------- the first error


def error(view: JobView) -> str:
    """Return why a job failed, or the first failure of one that goes on, with the last lines of that task."""
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
            tuple(map(str, found.get("survivors", ()))),
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
