"""`distrun status`: my jobs, or the tasks of one, as a table or as JSON.

Jobs are those of this machine's job store; with -H those that hosts' agents find there, wherever they were launched.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from distrun import shell
from distrun.cli.common import fetched, find_job
from distrun.cli.console import WIDE, print_err, print_out, render, width
from distrun.cli.reach import host_options, hosts_of, tell_warnings
from distrun.errors import UsageError
from distrun_runtime.contract import facts
from distrun_runtime.coordinator import stored

if TYPE_CHECKING:
    from rich.table import Table

    from distrun.fleet import Problem
    from distrun.fleet.jobs import HostJob
    from distrun_runtime.coordinator.jobstore import JobStore

SCHEMA = "distrun.status/1"
SHOWN = 20
"""Jobs that are listed without --all."""
SURVEY_S = 30.0
"""How long a host may take to say which jobs it has."""

DROPPED = ("CPU", "MAX RSS", "PID", "TIME", "CODE")
"""Columns of a job's tasks that are left out where there is no room, the first one first."""
LAST_SHOWN = 12
"""Characters of the last column for which others are left out."""
GAP = 2

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
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False)
@click.option("-w", "--watch", is_flag=True, help="Show it live (also: distrun top). q leaves, ? shows the keys.")
@click.option("--plain", is_flag=True, help="With -w: print a line for each change, until the job is over.")
@click.option("--ascii", "is_ascii", is_flag=True, help="With -w: draw with ASCII characters only.")
@click.option("-a", "--all", "everything", is_flag=True, help=f"List all jobs, not only the {SHOWN} newest.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@host_options
def status(
    job: str | None,
    *,
    watch: bool = False,
    plain: bool = False,
    is_ascii: bool = False,
    everything: bool = False,
    as_json: bool = False,
    **options: Any,
) -> int:
    """Show my jobs, the newest first; or the tasks of JOB (an id, the beginning of one, or a name).

    \b
    Examples:
      distrun status
      distrun status calm-otter -w
      distrun status -H hosts          # what of mine is on these hosts, launched from any machine

    With JOB the exit code is 1 if it failed, was killed, lost or is unknown, 2 if its files cannot be read, else 0.
    With -H it is 3 if a host cannot be asked.
    """
    if (plain or is_ascii) and not watch:
        raise UsageError("--plain and --ascii say how -w shows a job", "add -w")
    if options.get("hostfile") is not None or options.get("hosts") is not None:
        if watch:
            raise UsageError("-w/--watch shows jobs of this machine only", "leave it out, or leave -H out")
        return _on_hosts(job, as_json, options)
    from distrun_runtime.coordinator.jobstore import JobStore

    store = JobStore()
    watched = _watched(store, job, everything, plain, is_ascii) if watch and not as_json else None
    if watched is not None:
        return watched
    if job is None:
        read: Callable[[], list[dict[str, Any]]] = lambda: _jobs(store, everything)  # noqa: E731
        if as_json:
            print_out(json.dumps({"schema": SCHEMA, "jobs": read()}, indent=2) + "\n")
        else:
            print_out(render(jobs_table(read(), time.time(), width())))
        return 0
    folder = find_job(store, job)
    state = folder.state()
    if as_json:
        print_out(json.dumps({"schema": SCHEMA, "job": state}, indent=2) + "\n")
    else:
        print_out(render(tasks_table(state, time.time(), width())))
    return 0 if state["state"] in (*facts.GOING, facts.SUCCEEDED) else 1


def _watched(store: JobStore, job: str | None, everything: bool, plain: bool, is_ascii: bool) -> int | None:
    """Show a job, or all, live; return the exit code. None: nothing can be drawn, so it is shown once."""
    from distrun.cli import top

    if not plain and not top.is_drawn(plain):
        return None
    folder = find_job(store, job) if job is not None else top.only_running(store)
    if folder is not None:
        ended = top.watch_one(folder, plain, is_ascii)
        if ended.signal is None and not plain:
            print_out(render(tasks_table(fetched(folder).state(), time.time(), width())))
        return top.code_of(ended)
    if plain:
        return None
    ended = top.watch_all(store, lambda: _jobs(store, everything), is_ascii)
    if ended.signal is None:
        print_out(render(jobs_table(_jobs(store, everything), time.time(), width())))
    return top.code_of(ended)


def jobs_table(states: Sequence[Mapping[str, Any]], now: float, columns: int = WIDE) -> Table:
    """Return one row for each job. `now`: wall clock, seconds. `columns`: room."""
    rows = [
        (
            str(state["id"]),
            str(state["state"]),
            _code(state["exit_code"], None),
            "" if _is_damaged(state) else _count(state["tasks"]),
            "" if _is_damaged(state) else duration(state["created"], state["finished"] or _until(state), now),
            time.strftime("%m-%d %H:%M", time.localtime(stored.seconds(state["created"]))) if state["created"] else "",
            str(state["message"]) if _is_damaged(state) else shell.join(state["command"]),
        )
        for state in states
    ]
    headings = ("JOB", "STATE", "CODE", "TASKS", "TIME", "CREATED", "COMMAND")
    return _table(headings, rows, columns, ("CREATED", "CODE", "TASKS", "TIME"))


def tasks_table(state: Mapping[str, Any], now: float, columns: int = WIDE) -> Table:
    """Return one row for each task of a job. `now`: wall clock, seconds. `columns`: room."""
    rows = [
        (
            str(task["name"]),
            str(task["state"]),
            _code(task["code"], task["signal"]),
            "" if task["pid"] is None else str(task["pid"]),
            duration(task["started"], task["ended"] or _until(state), now),
            f"{task['cpu_s']:.1f} s" if task["max_rss_kb"] else "",  # unknown: it runs, or was lost with its host
            f"{task['max_rss_kb'] / 1024:.0f} MB" if task["max_rss_kb"] else "",
            str(task["host"]),
        )
        for task in state["tasks"]
    ]
    headings = ("TASK", "STATE", "CODE", "PID", "TIME", "CPU", "MAX RSS", "HOST")
    table = _table(headings, rows, columns, DROPPED)
    title = f"{state['id']}  {state['state']}  {shell.join(state['command'])}"
    table.title = _plain(title + ("\n" + str(state["message"]) if state.get("message") else ""))
    table.title_justify, table.title_style = "left", ""
    return table


def _on_hosts(wanted: str | None, as_json: bool, options: Mapping[str, Any]) -> int:
    """Show my jobs on hosts; return the exit code."""
    from distrun.fleet import Fleet, Problem, jobs

    inventory, backend, hosts = hosts_of(options, {})
    tell_warnings(inventory)
    with Fleet(backend, hosts) as fleet:
        answers = fleet.ask("survey", {}, SURVEY_S)
    problems = {host: each for host, each in answers.items() if isinstance(each, Problem)}
    every = [
        job for host, each in answers.items() if not isinstance(each, Problem) for job in jobs.read(host, each.value)
    ]
    found = jobs.chosen(every, [wanted] if wanted is not None else ())
    code = facts.EXIT_PREFLIGHT if problems else 0
    if as_json:
        rows = [_host_as_json(host, problems.get(host), found) for host in answers]
        print_out(json.dumps({"schema": SCHEMA, "exit_code": code, "hosts": rows}, indent=2) + "\n")
        return code
    if found:
        print_out(render(hosts_table(found, width())))
    elif len(problems) < len(answers):
        print_out("no job of mine is there\n" if not problems else "no job of mine is on the other hosts\n")
    for host, problem in problems.items():
        print_err(f"distrun: error: {host}: cannot be asked: {problem.text}\n")
        for line in problem.fix.splitlines():
            print_err(f"distrun: hint: {line}\n")
    return code


def hosts_table(found: Sequence[HostJob], columns: int = WIDE) -> Table:
    """Return one row for each job of each host. `columns`: room."""
    from distrun.fleet import jobs

    names = jobs.names(found)
    rows = [
        (
            job.host,
            job.state(),
            names[job.mark],
            jobs.age(job.age_s),
            "" if job.quiet_s is None else f"{jobs.age(job.quiet_s)} ago",
            ", ".join(job.tasks) or ("only processes" if job.processes else "only its folder"),
        )
        for job in found
    ]
    return _table(("HOST", "AGENT", "JOB", "AGE", "HEARD", "TASKS"), rows, columns, ("HEARD", "AGE"))


def _host_as_json(host: str, problem: Problem | None, found: Sequence[HostJob]) -> dict[str, Any]:
    from dataclasses import asdict

    mine = [
        {
            **{"job": job.job, "nonce": job.nonce, "agent": job.agent, "guard": job.guard, "stale": job.is_stale},
            **{"age_s": job.age_s, "quiet_s": job.quiet_s, "lease_s": job.lease_s, "tasks": list(job.tasks)},
        }
        for job in found
        if job.host == host
    ]
    return {"host": host, "problem": None if problem is None else asdict(problem), "jobs": mine}


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], columns: int, dispensable: Sequence[str]) -> Table:
    """Return a table whose second column is a state.

    Where there is no room, `dispensable` columns are left out, the first one first, and the last one is cut.
    """
    from rich.table import Table

    widths = [max(len(row[index]) for row in (headings, *rows)) for index in range(len(headings))]
    widths[-1] = min(widths[-1], LAST_SHOWN)
    shown = list(range(len(headings)))
    for heading in dispensable:
        if sum(widths[index] + GAP for index in shown) - GAP > columns:
            shown.remove(headings.index(heading))
    headings, rows = [headings[index] for index in shown], [[row[index] for index in shown] for row in rows]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, heading in enumerate(headings):
        is_last = index == len(headings) - 1
        width = None if is_last else max(len(row[index]) for row in (headings, *rows))
        table.add_column(heading, no_wrap=True, overflow="ellipsis", min_width=width)
    for row in rows:
        cells = [_plain(cell) for cell in row]
        cells[1] = f"[{_STYLES.get(row[1], 'yellow')}]{row[1]}[/]"
        table.add_row(*cells)
    return table


def duration(start: str | None, end: str | None, now: float) -> str:
    """Return how long something took between two RFC 3339 times, or takes until `now`, as `1:02:03`."""
    if start is None:
        return ""
    seconds = (now if end is None else stored.seconds(end)) - stored.seconds(start)
    return str(datetime.timedelta(seconds=max(0, int(seconds))))


def _jobs(store: JobStore, everything: bool) -> list[dict[str, Any]]:
    folders = store.list()
    return [folder.shown() for folder in (folders if everything else folders[:SHOWN])]


def _is_damaged(state: Mapping[str, Any]) -> bool:
    """Whether nothing is known of a job but what is wrong with its folder."""
    return bool(state["state"] == facts.DAMAGED)


def _until(state: Mapping[str, Any]) -> str | None:
    """Return when a job that has no end was last heard of, if its launcher is gone."""
    return None if state["state"] in facts.LIVE else str(state.get("heard") or state["updated"])


def _code(code: int | None, signal: str | None) -> str:
    return str(signal) if signal else "" if code is None else str(code)


def _count(tasks: Sequence[Mapping[str, Any]]) -> str:
    counts = [(sum(task["state"] == word for task in tasks), word) for word in ("running", "failed", "lost")]
    extra = [f"{number} {word}" for number, word in counts if number]
    return f"{len(tasks)} ({', '.join(extra)})" if extra else str(len(tasks))


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
