"""Processes that survive the terminal, and the logout, from which they are started.

A detached job's coordinator is such a process: a grandchild in a session of its own, with no descriptor of the
terminal's, in the root folder. SIGHUP means nothing to it; the umask stays that of the login.

Some systems end a user's processes at logout all the same (KillUserProcesses of systemd-logind). There a detached job
is started below the user's own service manager, which must go on without a login ("linger").
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Sequence

from distrun.errors import DistrunError, UsageError
from distrun_runtime.contract import logout


def fork(keep: Iterable[int] = ()) -> int:
    """Fork a process that survives this one's terminal. Return its pid here, and 0 there.

    Its streams are still ours. All other descriptors, but for those to `keep`, are closed. No thread may run here.

    Raises:
        DistrunError: the system has no room for it.
    """
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(writing)
        with os.fdopen(reading, "rb") as file:
            told = file.read()
        os.waitpid(between, 0)
        if not told:
            raise DistrunError("no process could be started", "are there too many already? see: ulimit -u")
        return int(told)
    try:
        os.close(reading)
        os.setsid()
        pid = os.fork()  # no leader of its session: it can never get a terminal
        if pid:
            os.write(writing, b"%d" % pid)
            os._exit(0)
        os.close(writing)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's `&` ignores it
        os.chdir("/")
        close_all_but({0, 1, 2, *keep})
    except BaseException:
        os._exit(1)
    return 0


def close_all_but(kept: set[int]) -> None:
    """Close all descriptors of this process but these."""
    at = 0
    for fd in sorted(kept):
        if at < fd:  # an empty range would close all
            os.closerange(at, fd)
        at = fd + 1
    most = os.sysconf("SC_OPEN_MAX")
    os.closerange(at, most if 0 < most < 65536 else 65536)


# ---------------------------------------------------------------------- logout


def outlive_logout(argv: Sequence[str], root: str = "") -> None:
    """Make sure that what this process starts survives a logout. May replace this process by `argv` in another place.

    Arguments:
        argv: the arguments of distrun that make it do what it is about to do, and do not lead here again.
        root: where the system's files are looked for; for tests.

    Raises:
        UsageError: it would not survive; the hint has the line to type.
    """
    if not logout.ends_at_logout(root):
        return
    line = logout.needs_linger(root)
    if line is not None:
        raise UsageError(f"--detach: {logout.WHY}", f"allow yours to go on, once: {line}")
    import shutil  # with all its formats of archives

    found = shutil.which("systemd-run")
    if found is None:
        raise UsageError(
            f"--detach: {logout.WHY}, and there is no systemd-run", "launch it without --detach, in tmux or so"
        )
    _replace_by([found, *logout.SCOPE, sys.executable, "-m", "distrun", *argv])


def _replace_by(argv: list[str]) -> None:
    try:
        os.execv(argv[0], argv)
    except OSError as err:
        raise UsageError(f"--detach: cannot run {argv[0]}: {err.strerror}") from err
