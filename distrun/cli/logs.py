"""`distrun logs`: what the tasks of a job printed, from their log files."""

from __future__ import annotations

import difflib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from distrun.cli.common import count, find_job
from distrun.cli.console import can_draw, copy_out, is_terminal, wants_colour
from distrun.cli.lines import Feed, Live, prefix
from distrun.errors import UsageError
from distrun_runtime.contract import environ, facts
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

    folder = find_job(JobStore(), job)
    chosen = choose(folder.state()["tasks"], task)
    env = environ.snapshot()
    live = Live() if follow and len(chosen) > 1 and can_draw(1, env) else None
    shown = []
    for row in chosen:
        before = b"" if len(chosen) == 1 else prefix(row["name"], row["host"], coloured=wants_colour(1, env))
        feed = Feed(before, terminal=is_terminal(), live=live is not None)
        path = folder.log_path(row["name"])
        shown.append(_Log(path, feed, 0 if lines is None else tail_offset(path, lines)))
    _show(shown, (lambda: folder.state()["state"] in facts.GOING) if follow else lambda: False, live)
    return 0


def choose(tasks: Sequence[Mapping[str, Any]], wanted: str | None) -> list[Mapping[str, Any]]:
    """Return the tasks of that name or role, or all.

    Raises:
        UsageError: there is none; lists near ones.
    """
    chosen = [task for task in tasks if wanted in (None, task["name"], task["role"])]
    if not chosen:
        names = [str(task["name"]) for task in tasks]
        near = difflib.get_close_matches(str(wanted), names, n=3) or names[:8]
        raise UsageError(f"no task {wanted!r} in this job; there is: {', '.join(near)}")
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


def _show(shown: Sequence[_Log], goes_on: Callable[[], bool], live: Live | None) -> None:
    while True:
        # Asked before reading: what was written before the end is then shown.
        last = not goes_on()
        for log in shown:
            if not _copy(log, live):
                return
        if last:
            break
        if live is not None:
            now = time.monotonic()
            copy_out(live.draw([bar for log in shown for bar in log.feed.bars(now)], *shutil.get_terminal_size()))
        time.sleep(POLL_S)
    for log in shown:
        _print(log.feed.flush(), live)


def _copy(log: _Log, live: Live | None) -> bool:
    try:
        with stored.opened(log.path) as file:
            file.seek(log.offset)
            while data := file.read(READ_SIZE):
                log.offset += len(data)
                if not _print(log.feed.feed(data, time.monotonic()), live):
                    return False
    except FileNotFoundError:
        return True
    return _print(log.feed.due(time.monotonic()), live)


def _print(data: bytes, live: Live | None) -> bool:
    if data and live is not None:
        data = live.erase() + data
    return copy_out(data)
