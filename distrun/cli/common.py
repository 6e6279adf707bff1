"""Options and helpers that several commands share. Those that concern hosts are in `distrun.cli.reach`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from distrun import request
from distrun.cli import when
from distrun.cli.console import print_err
from distrun.errors import UsageError
from distrun_runtime.contract import environ

if TYPE_CHECKING:
    from distrun_runtime.coordinator.jobstore import JobFolder, JobStore

Function = TypeVar("Function", bound=Callable[..., Any])


def seconds(*names: str, low: float | None = None, variable: str = "", **more: Any) -> Callable[[Function], Function]:
    """Return an option for a time in seconds, from `low` (more than 0 if it is None) to a year.

    An error names the option, the accepted range and what was found. `variable` is one of the environment table whose
    range the option has.
    """
    least = environ.BY_NAME[variable].low if variable else low

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
        return None if value is None else request.seconds("/".join(param.opts), value, least)

    return click.option(*names, type=str, callback=convert, metavar="S", **more)


def count(*names: str, low: int, high: int = request.MOST, **more: Any) -> Callable[[Function], Function]:
    """Return an option for a whole number from `low` to `high`. Errors are as those of `seconds`."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
        if value == "p" and "-n" in param.opts:
            raise UsageError("there is no option -np", "it is mpirun's; type -n N")
        return None if value is None else request.count("/".join(param.opts), value, low, high)

    return click.option(*names, type=str, callback=convert, metavar="N", **more)


def size(*names: str, low: int, **more: Any) -> Callable[[Function], Function]:
    """Return an option for a number of bytes from `low` on; 0 if it is not given, or `all`."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> int:
        return 0 if value in (None, "all") else when.size("/".join(param.opts), str(value), low)

    return click.option(*names, type=str, callback=convert, metavar="SIZE", **more)


def current_folder() -> str:
    """Return the path of the current directory.

    Raises:
        UsageError: it was removed.
    """
    try:
        return os.getcwd()
    except OSError as err:
        raise UsageError("the current directory does not exist any more", "cd to one that does") from err


def find_job(store: JobStore, wanted: str) -> JobFolder:
    """Return the job, as `found_job` does, of which is known here what its coordinator's host knows.

    Raises:
        NoSuchJob: there is none, or several ids begin so.
    """
    return fetched(found_job(store, wanted))


def found_job(store: JobStore, wanted: str) -> JobFolder:
    """Return the job, as `JobStore.find` does; if several have exactly that name the newest, and say so.

    Raises:
        NoSuchJob: there is none, or several ids begin so.
    """
    folder = store.find(wanted)
    count = len(store.named(wanted)) if folder.id != wanted else 0
    if count > 1:
        print_err(f"distrun: {wanted}: the newest of {count} jobs of that name, {folder.id}\n")
    return folder


def fetched(folder: JobFolder) -> JobFolder:
    """Return a job of which is known here what its coordinator's host knows; say so if that host cannot be asked."""
    from distrun import elsewhere

    warning = elsewhere.refreshed(folder)
    if warning:
        print_err(f"distrun: warning: {warning}\n")
    return folder


def agree(question: str, yes: bool, hint: str = "look first: --dry-run") -> None:
    """Ask on the terminal, unless `yes`. `hint`: for the error if stdin is no terminal.

    Raises:
        UsageError: stdin is no terminal.
        click.Abort: the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{question} stdin is not a terminal to answer on; -y answers yes", hint)
    click.confirm(question, abort=True, err=True)


def placed(folder: JobFolder) -> tuple[int, int]:
    """Return how many agents and tasks the plan in a job's folder has; 0 and 0 if there is none yet."""
    from distrun_runtime.errors import RuntimeFault

    try:
        if folder.is_unplanned:
            return 0, 0
        plan = folder.plan()
    except (OSError, RuntimeFault):
        return 0, 0
    return len(plan.all_places), len(plan.tasks)
