"""`distrun top`, the same as `distrun status -w`, and the functions that both share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from distrun.cli.common import found_job
from distrun.cli.console import can_draw, has_symbols, tell, wants_colour
from distrun_runtime.contract import environ, facts

if TYPE_CHECKING:
    from distrun.dashboard.loop import Ended
    from distrun.dashboard.terminal import Appearance
    from distrun_runtime.coordinator.jobstore import JobFolder, JobStore


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False)
@click.option("--plain", is_flag=True, help="Print a line for each change, until the job is over.")
@click.option("--ascii", "is_ascii", is_flag=True, help="Draw with ASCII characters only.")
@click.pass_context
def top(ctx: click.Context, job: str | None, plain: bool, is_ascii: bool) -> int:
    """Show JOB live: progress, tasks, hosts, store, events; without JOB the one of mine that runs, or a table of jobs.

    The same as `distrun status -w`. Keys: q leaves, ? shows the others. The exit code is that of `distrun status`.
    """
    from distrun.cli.status import status

    given = {"watch": True, "plain": plain, "is_ascii": is_ascii}
    code: int = ctx.invoke(status, job=job, **given)
    return code


def look(is_ascii: bool) -> Appearance:
    """Return how to draw on this terminal: by `--ascii`, the locale, NO_COLOR and the like."""
    from distrun.dashboard.terminal import Appearance

    env = environ.snapshot()
    return Appearance(has_colour=wants_colour(1, env), is_ascii=is_ascii or not has_symbols(env))


def is_drawn(plain: bool) -> bool:
    """Return whether there is a terminal on which to draw, and from which to read keys."""
    return not plain and sys.stdin.isatty() and can_draw(1, environ.snapshot())


def watch_one(folder: JobFolder, plain: bool, is_ascii: bool) -> Ended:
    """Show a job live until the user leaves or, where nothing can be drawn, until it is over."""
    from distrun import dashboard

    return dashboard.watch(folder, look(is_ascii)) if is_drawn(plain) else dashboard.follow(folder, tell)


def watch_all(store: JobStore, read: Callable[[], Sequence[Mapping[str, Any]]], is_ascii: bool) -> Ended:
    """Show the table of jobs live until the user leaves."""
    from distrun import dashboard

    return dashboard.watch_jobs(read, lambda job: found_job(store, job), look(is_ascii))


def only_running(store: JobStore) -> JobFolder | None:
    """Return the job that runs, if exactly one does."""
    going = [folder for folder in store.list() if folder.standing() in facts.GOING]
    return going[0] if len(going) == 1 else None


def code_of(ended: Ended) -> int:
    """Return the exit code of a dashboard."""
    return ended.exit_code if ended.signal is None else facts.exit_code(None, ended.signal.name)
