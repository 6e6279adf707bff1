"""Errors of the command line and their exit codes.

    DistrunError                      exit 8    our own fault, unless a class below says otherwise
      + UsageError (ValueError)       exit 2    an option, its value, a name or a file that is wrong
          + PlacedError                         files that cannot be understood; all errors with their places
              + HostsError                      hosts
      + PreflightError                exit 3    a host that cannot be used
      + SyncError (OSError)           exit 4    files that did not reach a host
      + SubmitError                   exit 5    the queue or engine refused the job

Output that cannot be written has the code 9; the commands go on, and their end says so (`cli.console.unwritten`).

Each class also derives from the built-in that fits. 126, 127 and 128+n come from the tasks themselves and are no
errors of this tree; the job store's own errors are in `distrun_runtime.errors`. The command line prints the message,
and `hint` (what to type next) below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distrun_runtime.contract import facts


class DistrunError(Exception):
    """The root of every error that the submit side raises on purpose."""

    exit_code = facts.EXIT_INTERNAL

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        self.__notes__ = [f"hint: {hint}"] if hint else []  # Python prints them below the message


class UsageError(DistrunError, ValueError):
    """What the user typed, or a file that it names, is wrong: what was expected, what was found."""

    exit_code = facts.EXIT_USAGE


class PlacedError(UsageError):
    """Files cannot be understood. The message has all errors, each with its own place (`file:line:col`, or `file`)."""

    what = "the files given"

    def __init__(self, message: str, hint: str = "", count: int = 1) -> None:
        super().__init__(message, hint)
        self.count = count
        """How many errors the message has."""


class HostsError(PlacedError):
    """Hosts cannot be read or understood."""

    what = "the hosts given"
    findings: Sequence[Any] = ()
    """The errors one by one (`grammar.Finding`), if they are known."""


class PreflightError(DistrunError):
    """A host cannot be used; nothing was started anywhere."""

    exit_code = facts.EXIT_PREFLIGHT


class SyncError(DistrunError, OSError):
    """Files did not reach a host; nothing was started anywhere."""

    exit_code = facts.EXIT_SYNC


class SubmitError(DistrunError):
    """The queue or engine refused the job."""

    exit_code = facts.EXIT_SUBMIT
