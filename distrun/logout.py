"""Makes a detached job survive the logout of the user who launches it.

Some systems end a user's processes at logout, daemons too (KillUserProcesses of systemd-logind). There a detached job
is started below the user's own service manager, which must go on without a login ("linger").
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from distrun.errors import UsageError
from distrun_runtime.contract import daemon


def outlive_logout(argv: Sequence[str], root: str = "") -> None:
    """Make sure that what this process starts survives a logout. May replace this process by `argv` in another place.

    Arguments:
        argv: the arguments of distrun that make it do what it is about to do, and do not lead here again.
        root: where the system's files are looked for; for tests.

    Raises:
        UsageError: it would not survive; the hint has the line to type.
    """
    if not daemon.ends_at_logout(root):
        return
    line = daemon.needs_linger(root)
    if line is not None:
        raise UsageError(f"--detach: {daemon.WHY}", f"allow yours to go on, once: {line}")
    import shutil  # with all its formats of archives

    found = shutil.which("systemd-run")
    if found is None:
        raise UsageError(
            f"--detach: {daemon.WHY}, and there is no systemd-run", "launch it without --detach, in tmux or so"
        )
    _replace_by([found, *daemon.SCOPE, sys.executable, "-m", "distrun", *argv])


def _replace_by(argv: list[str]) -> None:
    try:
        os.execv(argv[0], argv)
    except OSError as err:
        raise UsageError(f"--detach: cannot run {argv[0]}: {err.strerror}") from err
