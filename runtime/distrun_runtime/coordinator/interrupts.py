"""Turns signals to this process into events."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import TracebackType
from typing import Any, Callable, Dict, Optional, Sequence, Type

from distrun_runtime.contract import process
from distrun_runtime.coordinator.events import Event, Interrupt, PauseToggled, TasksSignal

ALL = ("INT", "TERM", "HUP", "TSTP", *process.TASKS_SIGNALS)


class Interrupts:
    """While it is entered, in the main thread, the signals of `names` are events; elsewhere it does nothing.

    A signal that was ignored before (nohup) stays ignored, and handlers of others for signals that are for tasks stay.
    Everything is put back at the end.

    A Python handler runs only when the main thread comes to it, and the system may deliver a signal to any thread:
    then the main thread's wait is not interrupted, and two Ctrl-C within it become one. So the interpreter's wakeup
    descriptor is used, which gets one byte for each signal whatever the threads do, and a thread of ours reads it.
    """

    def __init__(self, put: Callable[[Event], None], names: Sequence[str] = ALL) -> None:
        self._put = put
        self._names = names
        self._before: Dict[int, Any] = {}
        self._wakeup_before = -1
        self._write_fd = -1
        self._reader: Optional[threading.Thread] = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():
            return self
        read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._reader = threading.Thread(target=self._read, args=(read_fd,), name="signals", daemon=True)
        self._reader.start()
        for name in self._names:
            number = signal.Signals["SIG" + name]
            before = signal.getsignal(number)
            free = (signal.SIG_DFL, process.do_nothing)
            # None: a handler that is not Python's; it could not be put back.
            if before in free if name in process.TASKS_SIGNALS else before not in (signal.SIG_IGN, None):
                self._before[number] = before
                signal.signal(number, process.do_nothing)  # the byte on the wakeup descriptor has said it
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        if self._reader is None:
            return
        signal.set_wakeup_fd(self._wakeup_before)
        for number, before in self._before.items():
            signal.signal(number, before)
        os.close(self._write_fd)
        self._reader.join()

    def _read(self, read_fd: int) -> None:
        while True:
            numbers = os.read(read_fd, 64)
            if not numbers:
                os.close(read_fd)
                return
            for number in numbers:
                if number in self._before:  # others of this process are not ours
                    name = signal.Signals(number).name[3:]
                    if name in process.TASKS_SIGNALS:
                        self._put(TasksSignal(name))
                    else:
                        self._put(PauseToggled() if name == "TSTP" else Interrupt(name, time.time()))
