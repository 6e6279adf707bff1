"""Forks processes that survive the terminal, the connection or the login from which they are started."""

from __future__ import annotations

import os
import signal
from typing import Iterable, Set

from distrun_runtime.errors import ContractError


def fork(keep: Iterable[int] = ()) -> int:
    """Fork a process that survives this one's terminal. Return its pid here, and 0 there.

    It is a grandchild in a session of its own, in the root folder, and SIGHUP means nothing to it; the umask stays.
    Its streams are still ours. All other descriptors, but for those to `keep`, are closed. No thread may run here that
    it needs.

    Raises:
        ContractError: the system has no room for it.
        OSError: not even for the process that is to start it.
    """
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(writing)
        with os.fdopen(reading, "rb") as file:
            told = file.read()
        os.waitpid(between, 0)
        if not told:
            raise ContractError("the system has no room for another process; see: ulimit -u")
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


def close_all_but(kept: Set[int]) -> None:
    """Close all descriptors of this process but these."""
    at = 0
    for fd in sorted(kept):
        if at < fd:  # an empty range would close all
            os.closerange(at, fd)
        at = fd + 1
    most = os.sysconf("SC_OPEN_MAX")
    os.closerange(at, most if 0 < most < 65536 else 65536)
