"""The signals of the dashboard: the interpreter records them, and the loop handles them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from typing import Any

HANDLED = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGTSTP", "SIGCONT", "SIGWINCH"))


class Signals:
    """Notes signals while it is entered; used by the main thread.

    Arguments:
        handled: the signals. Others keep their meaning.
    """

    def __init__(self, handled: Sequence[signal.Signals] = HANDLED) -> None:
        self._handled = handled
        self._before: list[tuple[signal.Signals, Any]] = []
        self._wakeup_before = -1
        self.wakeup = self._waking = -1
        """Readable when one has come."""

    def __enter__(self) -> Signals:
        self.wakeup, self._waking = os.pipe()
        os.set_blocking(self.wakeup, False)
        os.set_blocking(self._waking, False)
        self._wakeup_before = signal.set_wakeup_fd(self._waking, warn_on_full_buffer=False)
        for each in self._handled:
            before = signal.getsignal(each)
            # What was ignored from outside (nohup) stays so.
            if before is not signal.SIG_IGN or each == signal.SIGWINCH:
                self._before.append((each, signal.signal(each, _note)))
        return self

    def __exit__(self, *error: object) -> None:
        for each, before in self._before:
            signal.signal(each, before)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.wakeup)
        os.close(self._waking)

    def take(self) -> list[signal.Signals]:
        """Return the signals that have come, in their order."""
        found: list[signal.Signals] = []
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self.wakeup, 4096):
                with contextlib.suppress(ValueError):
                    found.append(signal.Signals(number))
        return found


def _note(number: int, frame: object) -> None:
    """Do nothing: the interpreter has written the number into the pipe."""
