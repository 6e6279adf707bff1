"""Makes the Python stacks of this process available to the agent, by a signal and by a debugger.

On SIGURG, which processes ignore by default, `faulthandler` writes the stacks of all threads to a file in the agent's
folder. This also works if the process hangs in a call. It is registered only if nothing else handles the signal. A
datagram (`contract.metrics`, `stacks`) tells the agent, which sends the signal only to such processes.

`py-spy` needs no help of the process, unless the kernel lets only ancestors trace a process (Yama). Then the agent is
permitted explicitly.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from typing import IO

from distrun_runtime.contract import environ, metrics, process

AGAIN_S = 10.0
"""How often the agent is told again: datagrams may be lost."""
YAMA = "/proc/sys/kernel/yama/ptrace_scope"
_PR_SET_PTRACER = 0x59616D61


class Offer:
    """That the agent may ask this process for its stacks. For any thread."""

    def __init__(self, sender: metrics.Sender, file: IO[bytes], path: str) -> None:
        self.pid = os.getpid()
        self._sender = sender
        self._file = file
        """Where the stacks go; open as long as the process lives."""
        self._path = path
        self._start = process.identity(self.pid).start
        self._next_at = 0.0

    def tell(self, now: float | None = None) -> None:
        """Tell the agent, if it is time. If the script handles the signal by now, take it back."""
        now = time.monotonic() if now is None else now
        if now < self._next_at:
            return
        self._next_at = now + AGAIN_S
        how = metrics.BY_SIGURG if signal.getsignal(signal.SIGURG) == signal.SIG_DFL else ""
        self._sender.send(metrics.STACKS, pid=self.pid, start=self._start, how=how, path=self._path)


class _Offers:
    """The offer of this process; a forked child has none."""

    def __init__(self) -> None:
        self.pid = 0
        self.offer: Offer | None = None


_offers = _Offers()


def offer() -> None:
    """Offer the stacks of this process to its agent, once; without an agent, do nothing. Never raises."""
    if _offers.pid == os.getpid():
        return
    is_child = _offers.pid != 0
    _offers.pid, _offers.offer = os.getpid(), None
    if is_child:
        return  # it has its parent's handler, and its parent's file
    with contextlib.suppress(Exception):
        _offers.offer = _make()
        tell()


def tell(now: float | None = None) -> None:
    """Tell the agent again, if it is time. Never raises."""
    found = _offers.offer
    if found is not None and found.pid == os.getpid():
        with contextlib.suppress(Exception):
            found.tell(now)


def _make() -> Offer | None:
    socket = environ.text("DISTRUN_METRICS_SOCKET")
    folder = os.path.dirname(socket or "")
    if not socket or not os.path.isdir(folder):
        return None
    let_trace(folder)
    if is_handled(signal.SIGURG):
        return None
    path = os.path.join(folder, metrics.STACKS_FILE % os.getpid())
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)
    faulthandler.register(signal.SIGURG, file=file, all_threads=True, chain=False)
    return Offer(metrics.Sender(), file, path)


def is_handled(number: signal.Signals, status: str = "/proc/self/status") -> bool:
    """Return whether anything in this process handles a signal, or ignores it on purpose."""
    if signal.getsignal(number) != signal.SIG_DFL:
        return True
    # Python does not know handlers that a library has set after its start.
    with contextlib.suppress(OSError), open(status, encoding="ascii", errors="replace") as lines:
        for line in lines:
            name, _, mask = line.partition(":")
            if name in ("SigCgt", "SigIgn", "SigBlk") and int(mask, 16) >> (number - 1) & 1:
                return True
    return False


def let_trace(folder: str, yama: str = YAMA) -> bool:
    """Let this job's agent, and what it starts, trace this process; return whether that was needed and possible."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        with open(yama, encoding="ascii") as file:
            if file.read().strip() != "1":
                return False  # either every process of this user may trace, or none
        with open(os.path.join(folder, "agent.json"), encoding="utf-8") as file:
            agent = int(json.load(file)["agent"]["pid"])
    except (OSError, LookupError, TypeError, ValueError):
        return False
    import ctypes  # only here, and its import takes long

    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(agent), 0, 0, 0) == 0)
