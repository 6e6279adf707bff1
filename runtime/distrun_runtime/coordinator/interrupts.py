"""Signals to the launcher become events on the loop's queue."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Callable, Dict, Optional, Type

from distrun_runtime.coordinator.events import Event, Interrupt, PauseToggled

_NAMES = ("INT", "TERM", "HUP", "TSTP")


class Interrupts:
    """While it is entered, in the main thread, signals are events; elsewhere it does nothing.

    A signal that was ignored before (nohup) stays ignored. `put` is called in the handler, so it must be
    reentrant, as `queue.SimpleQueue.put` is.
    """

    def __init__(self, put: Callable[[Event], None]) -> None:
        self._put = put
        self._before: Dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for name in _NAMES:
                number = getattr(signal, "SIG" + name)
                before = signal.getsignal(number)
                # None: a handler that is not Python's; it could not be put back.
                if before not in (signal.SIG_IGN, None):
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    def _handle(self, number: int, frame: Optional[FrameType]) -> None:
        name = signal.Signals(number).name[3:]
        self._put(PauseToggled() if name == "TSTP" else Interrupt(name, time.time()))
