"""Children that are over, and the signals that say so."""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import Dict, Iterable, Iterator, Optional, Tuple

DEAF_TO = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTSTP", "SIGTTIN", "SIGTTOU")
"""What a terminal sends: the launcher hears it and tells us what to do."""


def set_signals(heard: Iterable[int] = ()) -> None:
    """Be deaf to the terminal's signals, hear `heard`, and let every other one do what it does by default.

    What this process inherited as ignored or blocked would reach every task through exec. So it is undone, and
    deafness is a handler that does nothing: exec turns a handler into the default.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    pythons_own = {signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE)}  # Popen restores these two
    for number in signal.Signals:
        if number not in pythons_own and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    for each in [getattr(signal, name) for name in DEAF_TO] + list(heard):
        signal.signal(each, _do_nothing)


class Wakeup:
    """Signals as bytes on a descriptor that a selector can wait for."""

    def __init__(self) -> None:
        self.descriptor, self._writing = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._writing, False)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)

    def read(self) -> bytes:
        """Return the numbers of the signals that arrived since the last call."""
        try:
            return os.read(self.descriptor, 4096)
        except BlockingIOError:
            return b""


def reaped() -> Iterator[Tuple[int, int, resource.struct_rusage]]:
    """Yield (pid, wait status, resources used) of each child that is over, without waiting."""
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status, usage


def exit_facts(status: int, usage: resource.struct_rusage) -> Dict[str, object]:
    """Return how a child ended, as the `exited` message says it. Pure."""
    # macOS counts bytes, everybody else kibibytes (getrusage(2)).
    rss_kb = usage.ru_maxrss // 1024 if sys.platform == "darwin" else usage.ru_maxrss
    return {
        "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "signal": _name(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else None,
        "max_rss_kb": int(rss_kb),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 6),
    }


def exit_code(status: int) -> int:
    """Return a wait status as a shell's exit code: 128 + number for a signal. Pure."""
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _name(number: int) -> str:
    """Return a signal's name without SIG; real-time signals have only a number."""
    try:
        return signal.Signals(number).name[3:]
    except ValueError:
        return str(number)


def _do_nothing(number: int, frame: Optional[object]) -> None:
    del number, frame
