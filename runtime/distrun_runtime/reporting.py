"""Reports the progress of a script to its agent: `report`, for scripts with or without a store.

A report is a datagram (`contract.metrics`). Sending never blocks; if there is no receiver, the report is lost. At most
one report is sent per INTERVAL_S. Later reports within that time replace each other; the last one is sent by the next
call or, if there is none, by a thread that is started when it is first needed.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from distrun_runtime import stacks
from distrun_runtime.contract import environ, metrics

INTERVAL_S = 0.1
"""Between two reports that are sent, at least."""
RETRY_S = 5.0
"""Between two attempts to send the last report, at most: the agent may be stopped, or have no place for it."""
NAME_LENGTH = 32
"""Characters of a value's name; what is longer is cut."""

__all__ = ["report"]


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
        stacks.tell(now)
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
                stacks.offer()
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
