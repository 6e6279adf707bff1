"""`distrun status`: my jobs, or the tasks of one, as a table or as JSON."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from distrun import shell
from distrun.cli.console import live, print_out, render

if TYPE_CHECKING:
    from rich.table import Table

    from distrun_runtime.coordinator.jobstore import JobStore

SCHEMA = "distrun.status/1"
SHOWN = 20
"""Jobs that are listed without --all."""
INTERVAL_S = 0.5
LIVE = ("starting", "running", "stopping")

_STYLES = {
    "running": "cyan",
    "starting": "cyan",
    "succeeded": "green",
    "exited": "green",
    "failed": "red",
    "lost": "red",
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False)
@click.option("-w", "--watch", is_flag=True, help="Show it again and again, until the job is over or Ctrl-C.")
@click.option("-a", "--all", "everything", is_flag=True, help="List all jobs, not only the %d newest." % SHOWN)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def status(job: str | None, watch: bool, everything: bool, as_json: bool) -> int:
    """Show my jobs, the newest first; or the tasks of JOB (an id, the beginning of one, or a name).

    With JOB the exit code is 1 if it failed, was killed or lost, else 0.
    """
    from distrun_runtime.coordinator.jobstore import JobStore

    store = JobStore()
    if job is None:
        read: Callable[[], list[dict[str, Any]]] = lambda: _jobs(store, everything)  # noqa: E731
        if as_json:
            print_out(json.dumps({"schema": SCHEMA, "jobs": read()}, indent=2) + "\n")
        elif watch:
            live(lambda: jobs_table(read(), time.time()), lambda: True, INTERVAL_S)
        else:
            print_out(render(jobs_table(read(), time.time())))
        return 0
    folder = store.find(job)
    if watch and not as_json:
        live(lambda: tasks_table(folder.state(), time.time()), lambda: folder.state()["state"] in LIVE, INTERVAL_S)
    state = folder.state()
    if as_json:
        print_out(json.dumps({"schema": SCHEMA, "job": state}, indent=2) + "\n")
    elif not watch:
        print_out(render(tasks_table(state, time.time())))
    return 0 if state["state"] in (*LIVE, "succeeded") else 1


def jobs_table(states: Sequence[Mapping[str, Any]], now: float) -> Table:
    """Return one row for each job. `now`: wall clock, seconds. Pure."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("JOB", "STATE", "CODE", "TASKS", "TIME", "CREATED"):
        table.add_column(heading, no_wrap=True)
    table.add_column("COMMAND", overflow="ellipsis", no_wrap=True)
    for state in states:
        table.add_row(
            str(state["id"]),
            _state(state["state"]),
            _code(state["exit_code"], None),
            _count(state["tasks"]),
            duration(state["created"], state["finished"] or _until(state), now),
            str(state["created"])[:19].replace("T", " "),
            _plain(shell.join(state["command"])),
        )
    return table


def tasks_table(state: Mapping[str, Any], now: float) -> Table:
    """Return one row for each task of a job. `now`: wall clock, seconds. Pure."""
    from rich.table import Table

    title = "%s  %s  %s" % (state["id"], state["state"], _plain(shell.join(state["command"])))
    if state.get("message"):
        title += "\n" + _plain(str(state["message"]))
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left", title_style="")
    for heading in ("TASK", "HOST", "PID", "STATE", "CODE", "TIME", "CPU", "MAX RSS"):
        table.add_column(heading, no_wrap=True)
    for task in state["tasks"]:
        over = task["ended"] is not None
        table.add_row(
            task["name"],
            task["host"],
            "" if task["pid"] is None else str(task["pid"]),
            _state(task["state"]),
            _code(task["code"], task["signal"]),
            duration(task["started"], task["ended"] or _until(state), now),
            "%.1f s" % task["cpu_s"] if over else "",
            "%.0f MB" % (task["max_rss_kb"] / 1024) if over else "",
        )
    return table


def duration(start: str | None, end: str | None, now: float) -> str:
    """Return how long something took between two RFC 3339 times, or takes until `now`, as `1:02:03`. Pure."""
    if start is None:
        return ""
    seconds = (now if end is None else _seconds(end)) - _seconds(start)
    return str(datetime.timedelta(seconds=max(0, int(seconds))))


def _jobs(store: JobStore, everything: bool) -> list[dict[str, Any]]:
    folders = store.list()
    return [folder.state() for folder in (folders if everything else folders[:SHOWN])]


def _until(state: Mapping[str, Any]) -> str | None:
    """Return when a job that has no end was last heard of, if its launcher is gone."""
    return None if state["state"] in LIVE else str(state["updated"])


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _state(state: str) -> str:
    style = _STYLES.get(state, "yellow")
    return "[%s]%s[/]" % (style, state)


def _code(code: int | None, signal: str | None) -> str:
    return str(signal) if signal else "" if code is None else str(code)


def _count(tasks: Sequence[Mapping[str, Any]]) -> str:
    failed = sum(task["state"] == "failed" for task in tasks)
    running = sum(task["state"] == "running" for task in tasks)
    extra = ["%d %s" % (count, word) for count, word in ((running, "running"), (failed, "failed")) if count]
    return "%d%s" % (len(tasks), " (%s)" % ", ".join(extra) if extra else "")


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
