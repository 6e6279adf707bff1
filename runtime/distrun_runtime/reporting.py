"""What a process of a task tells its agent: the progress of a script (`report`), and that its stacks can be asked for.

A report is a datagram (`contract.metrics`). Sending never blocks; if there is no receiver, the report is lost. At most
one report is sent per INTERVAL_S. Later reports within that time replace each other; the last one is sent by the next
call or, if there is none, by a thread that is started when it is first needed.

Python stacks are available by a signal and by a debugger. On SIGURG, which processes ignore by default, `faulthandler`
writes the stacks of all threads to a file in the agent's folder. This also works if the process hangs in a call. It is
registered only if nothing else handles the signal. A datagram tells the agent, which sends the signal only to such
processes. `py-spy` needs no help of the process, unless the kernel lets only ancestors trace a process (Yama). Then the
agent is permitted explicitly.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from distrun_runtime.contract import environ, metrics, process

__all__ = ["report"]

INTERVAL_S = 0.1
"""Between two reports that are sent, at least."""
RETRY_S = 5.0
"""Between two attempts to send the last report, at most: the agent may be stopped, or have no place for it."""
NAME_LENGTH = 32
"""Characters of a value's name; what is longer is cut."""


def report(*, step: object = None, total: object = None, **values: object) -> None:
    """Report how far the script is, for `distrun status` and the progress shown by `distrun launch`.

    Call it once a step, in any process of a task, from any thread. It never raises and never waits; outside a job it
    does nothing. What is given replaces what was reported before under the same name. At most 10 reports a second are
    sent, and always the last one.

    Arguments:
        step: number of steps that are done.
        total: number of steps to do. With it, progress and the remaining time are shown.
        values: numbers by name, such as `loss=0.3`: Python's, numpy's, or arrays and tensors without dimensions. At
            most 16, with names of at most 32 characters. NaN is shown as such. What is no number is left out. Of a
            tensor that is not in host memory, only a value that is sent at once is read, which waits for it.
    """
    with contextlib.suppress(Exception):
        reporter = _reporters.current()
        if reporter is not None:
            reporter.report(step, total, values)


class Reporter:
    """Reports of one process. For any thread.

    Arguments:
        sender: sends datagrams.
        clock: seconds, any epoch.
        has_thread: a thread sends what is left when a burst of reports has ended. Without, call `flush`.
    """

    def __init__(
        self,
        sender: metrics.Sender,
        clock: Callable[[], float] = time.monotonic,
        *,
        has_thread: bool = True,
    ) -> None:
        self._sender = sender
        self._clock = clock
        self._has_thread = has_thread
        self._lock = threading.RLock()
        """Guards what follows. A signal handler may report while its thread does."""
        self._step: int | None = None
        self._total: int | None = None
        self._values: dict[str, float] = {}
        self._elsewhere: dict[str, object] = {}
        """Values that are not in host memory and were not read yet."""
        self._next_at = 0.0
        self._is_due = False
        """Something was reported and not sent."""
        self._wake: threading.Event | None = None

    def report(self, step: object, total: object, values: dict[str, object]) -> None:
        """Take in a report, and send it if it is time."""
        with self._lock:
            self._step = _whole(step, self._step)
            self._total = _whole(total, self._total)
            now = self._clock()
            is_time = now >= self._next_at
            if is_time:
                values = {**self._elsewhere, **values}
            for name, value in values.items():
                self._take(name[:NAME_LENGTH], value, is_time)
            self._is_due = True
            if is_time:
                self._send(now)
            if self._is_due and self._has_thread:
                self._send_later()

    def flush(self) -> bool:
        """Send what was reported and not sent; return whether nothing is left."""
        with self._lock:
            if self._is_due:
                self._send(self._clock())
            return not self._is_due

    def _take(self, name: str, value: object, is_time: bool) -> None:
        self._values.pop(name, None)  # the last one is the newest
        self._elsewhere.pop(name, None)
        if not is_time and not _is_here(value):
            # Read by a later call: in another thread that could disturb what the script does on the device. Detached,
            # as it would keep the memory of a whole graph.
            detach = getattr(value, "detach", None)
            self._elsewhere[name] = value if detach is None else detach()
        else:
            number = _number(value)
            if number is not None:
                self._values[name] = number
        for known in (self._values, self._elsewhere):
            while len(known) > metrics.VALUES:  # the last ones stay
                del known[next(iter(known))]

    def _send(self, now: float) -> None:
        tell_stacks(now)
        self._next_at = now + INTERVAL_S
        self._is_due = not self._sender.send(metrics.REPORT, step=self._step, total=self._total, values=self._values)

    def _send_later(self) -> None:
        """Have the rest of a burst, or what could not be sent, sent when it is time."""
        if self._wake is None:
            self._wake = threading.Event()
            threading.Thread(target=self._run, args=(self._wake,), name="distrun-report", daemon=True).start()
        self._wake.set()

    def _run(self, wake: threading.Event) -> None:
        while wake.wait():
            wake.clear()
            pause_s = INTERVAL_S
            time.sleep(pause_s)
            while not self.flush():
                pause_s = min(RETRY_S, 2 * pause_s)
                time.sleep(pause_s)


class _Reporters:
    """The reporter of this process: a forked child gets one of its own."""

    def __init__(self) -> None:
        self._pid = 0
        self._current: Reporter | None = None

    def current(self) -> Reporter | None:
        """Return it, made if need be; None: there is no agent to report to."""
        if self._pid != os.getpid():
            self._current = None
            if environ.text("DISTRUN_METRICS_SOCKET"):
                offer_stacks()
                self._current = Reporter(metrics.Sender())
                atexit.register(self._current.flush)
            self._pid = os.getpid()
        return self._current


_reporters = _Reporters()


def _is_here(value: object) -> bool:
    """Return whether a value can be read without waiting for a device."""
    device = getattr(value, "device", None)
    return device is None or str(device).partition(":")[0].lower() in ("cpu", "tfrt_cpu_0")


def _number(value: object) -> float | None:
    """Return a value as a number that JSON has; None: it is none."""
    item: Any = value
    try:
        if not isinstance(item, (int, float)):
            item = item.item() if hasattr(item, "item") else float(item)
        return int(item) if isinstance(item, int) else float(item)
    except Exception:  # whatever was given: reporting never disturbs a script
        return None


def _whole(value: object, before: int | None) -> int | None:
    """Return a number of steps; what was known before, if it is not given or none."""
    number = None if value is None else _number(value)
    return before if number is None or not math.isfinite(number) else int(number)


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


def offer_stacks() -> None:
    """Offer the stacks of this process to its agent, once; without an agent, do nothing. Never raises."""
    if _offers.pid == os.getpid():
        return
    is_child = _offers.pid != 0
    _offers.pid, _offers.offer = os.getpid(), None
    if is_child:
        return  # it has its parent's handler, and its parent's file
    with contextlib.suppress(Exception):
        _offers.offer = _make_offer()
        tell_stacks()


def tell_stacks(now: float | None = None) -> None:
    """Tell the agent again, if it is time. Never raises."""
    found = _offers.offer
    if found is not None and found.pid == os.getpid():
        with contextlib.suppress(Exception):
            found.tell(now)


def _make_offer() -> Offer | None:
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
