"""A program that was started in a session of its own, with whatever it starts itself: an ssh and its ProxyCommand."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from typing import IO

KILLED_S = 5.0
"""How long a killed program may take to go; one that the system holds longer is left to it."""
_GLANCE_S = 0.02
_READ_SIZE = 64 * 1024


class Child:
    """A running program; it must have been started with `start_new_session`. `kill` is for any thread."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self._reaping = threading.Lock()

    @property
    def code(self) -> int | None:
        """Its exit code; None before `end`."""
        return self._popen.returncode

    def kill(self) -> None:
        """Kill it and all in its process group; nothing once it was reaped, as its number may be another's then."""
        with self._reaping:
            if self._popen.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._popen.pid, signal.SIGKILL)

    def end(self, limit_s: float) -> None:
        """Wait for its end, at most so long; kill what is left of its group, and reap it."""
        until = time.monotonic() + limit_s
        while not self._is_over() and time.monotonic() < until:
            time.sleep(_GLANCE_S)
        self.kill()
        with self._reaping, contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(KILLED_S)

    def _is_over(self) -> bool:
        """Return whether it has ended, if possible without reaping it."""
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):
                return os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return self._popen.poll() is not None


def read_rest(pipe: IO[bytes], limit_s: float = 1.0) -> bytes:
    """Return what a pipe holds, without waiting for its end: somebody may hold it open for long."""
    found: list[bytes] = []
    until = time.monotonic() + limit_s
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    with contextlib.suppress(OSError):
        while poll.poll(0) and time.monotonic() < until:
            data = os.read(pipe.fileno(), _READ_SIZE)
            if not data:
                break
            found.append(data)
    return b"".join(found)
