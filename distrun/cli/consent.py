"""What every form of `distrun kill` has in common: it asks before it ends anything, and what its exit codes mean."""

from __future__ import annotations

import sys

import click

from distrun.errors import UsageError

SCHEMA = "distrun.kill/1"
EXIT_LEFT = 1
EXIT_PROBLEM = 3


def agree(question: str, yes: bool, what: str) -> None:
    """Ask on the terminal, unless `yes`.

    Raises:
        UsageError: nobody can be asked.
        click.Abort: the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("%s only with -y where nobody can be asked" % what, "look first: --dry-run")
    click.confirm(question, abort=True, err=True)
