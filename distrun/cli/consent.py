"""What every form of `distrun kill` has in common: it asks before it ends anything, and what its exit codes mean."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import click

from distrun.cli.console import print_err
from distrun.errors import UsageError
from distrun.fleet import Problem
from distrun_runtime.contract import facts

SCHEMA = "distrun.kill/1"


def agree(question: str, yes: bool, what: str, hint: str = "look first: --dry-run") -> None:
    """Ask on the terminal, unless `yes`. `what`, `hint`: for the error where nobody can be asked.

    Raises:
        UsageError: nobody can be asked.
        click.Abort: the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("%s only with -y where nobody can be asked" % what, hint)
    click.confirm(question, abort=True, err=True)


def exit_code(left: bool, problems: Mapping[str, Problem]) -> int:
    """Return the exit code; `left`: a process did not end, `problems`: hosts that did not answer, and why."""
    return facts.EXIT_LEFT if left else facts.EXIT_PREFLIGHT if problems else 0


def tell_problems(problems: Mapping[str, Problem]) -> None:
    """Say which hosts did not answer, and what can be done about it."""
    for name, problem in problems.items():
        print_err("distrun: error: %s: %s\n" % (name, problem.text))
        for line in problem.fix.splitlines():
            print_err("distrun: hint: %s\n" % line)
