"""`distrun logs`: what the tasks of a job printed, from their log files."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from distrun.cli.console import copy_out
from distrun.cli.find import find
from distrun.cli.lines import Feed
from distrun.cli.status import LIVE
from distrun.cli.values import count
from distrun.cli.writer import encode
from distrun.errors import UsageError
from distrun_runtime.coordinator import stored

POLL_S = 0.1
READ_SIZE = 256 * 1024
MOST_LINES = 1_000_000_000


@dataclass
class _Log:
    """A log file that is being shown."""

    path: Path
    feed: Feed
    offset: int = 0


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job")
@click.argument("task", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job is over.")
@count("-n", "--lines", low=0, high=MOST_LINES, help="Only the last N lines of each task.")
def logs(job: str, task: str | None, follow: bool, lines: int | None) -> int:
    """Show what JOB's tasks printed, stdout and stderr together.

    TASK is a name (worker-0) or a role (worker). The log of a single task is shown unchanged, several with prefixes.
    """
    from distrun_runtime.coordinator.jobstore import JobStore

    folder = find(JobStore(), job)
    chosen = choose(folder.state()["tasks"], task)
    shown = []
    for row in chosen:
        prefix = "" if len(chosen) == 1 else "%s@%s | " % (row["name"], row["host"])
        path = folder.log_path(row["name"])
        shown.append(_Log(path, Feed(encode(prefix)), 0 if lines is None else tail_offset(path, lines)))
    _show(shown, (lambda: folder.state()["state"] in LIVE) if follow else lambda: False)
    return 0


def choose(tasks: Sequence[Mapping[str, Any]], wanted: str | None) -> list[Mapping[str, Any]]:
    """Return the tasks of that name or role, or all. Pure.

    Raises:
        UsageError: there is none; lists near ones.
    """
    chosen = [task for task in tasks if wanted in (None, task["name"], task["role"])]
    if not chosen:
        names = [str(task["name"]) for task in tasks]
        near = difflib.get_close_matches(str(wanted), names, n=3) or names[:8]
        raise UsageError("no task %r in this job; there is: %s" % (wanted, ", ".join(near)))
    return chosen


def tail_offset(path: Path, lines: int) -> int:
    """Return where the last `lines` lines of a file begin; 0 if it is not there."""
    try:
        with stored.opened(path) as file:
            end = position = file.seek(0, os.SEEK_END)
            found = 0
            while position:
                step = min(READ_SIZE, position)
                position = file.seek(position - step)
                data = file.read(step)
                # The newline that ends the last line begins nothing.
                index = len(data) - 1 if position + step == end and data.endswith(b"\n") else len(data)
                if lines == 0:
                    return end
                while (index := data.rfind(b"\n", 0, index)) >= 0:
                    found += 1
                    if found == lines:
                        return position + index + 1
            return 0
    except FileNotFoundError:
        return 0


def _show(shown: Sequence[_Log], goes_on: Callable[[], bool]) -> None:
    while True:
        # Asked before reading: what was written before the end is then shown.
        last = not goes_on()
        for log in shown:
            if not _copy(log):
                return
        if last:
            break
        time.sleep(POLL_S)
    for log in shown:
        copy_out(log.feed.flush())


def _copy(log: _Log) -> bool:
    try:
        with stored.opened(log.path) as file:
            file.seek(log.offset)
            while data := file.read(READ_SIZE):
                log.offset += len(data)
                if not copy_out(log.feed.feed(data, time.monotonic())):
                    return False
    except FileNotFoundError:
        return True
    return copy_out(log.feed.due(time.monotonic()))
