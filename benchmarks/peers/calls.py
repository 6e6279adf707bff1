"""Counts the Python and C calls of each thread of this process, and the processor time of each function.

A server imports this module (`--server-import calls`) and records between two signals SIGUSR2; at the second one it
prints what it has found. A worker makes a `Recorder` before its store, whose thread is then recorded too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, Dict, List, Optional, Tuple

SHOWN = 200
"""Functions of a thread that are printed; all count."""


class Thread:
    """What one thread has called."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: Dict[Any, int] = {}
        """By a Python function's code, or a C function's name."""
        self.own_ns: Dict[Any, int] = {}
        self.whole_ns: Dict[Any, int] = {}
        """With what it calls."""
        self.total_ns = 0
        self.files: Dict[str, int] = {}
        """Nanoseconds of the Python functions of each file, and of the C functions that these call."""
        self.stack: List[Tuple[Any, str, int]] = []
        """Functions that have begun, their files, and the total when they did."""
        self.last_ns = 0
        """When the innermost function went on: processor time of the thread."""


class Recorder:
    """Records all threads that start after it was made, and the one that made it, while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self._threads: Dict[int, Thread] = {}
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.is_on:
            return
        now_ns = time.thread_time_ns()
        thread = self._threads.get(threading.get_ident())
        if thread is None:
            thread = self._threads[threading.get_ident()] = Thread(threading.current_thread().name)
            thread.last_ns = now_ns
        if thread.stack:
            top, file, _ = thread.stack[-1]
            taken_ns = now_ns - thread.last_ns
            thread.files[file] = thread.files.get(file, 0) + taken_ns
            thread.own_ns[top] = thread.own_ns.get(top, 0) + taken_ns
            thread.total_ns += taken_ns
        if event.endswith("call"):
            function = frame.f_code if event == "call" else _name_of_builtin(argument)
            thread.calls[function] = thread.calls.get(function, 0) + 1
            thread.stack.append((function, frame.f_code.co_filename, thread.total_ns))
        elif thread.stack:
            function, _, begun_ns = thread.stack.pop()
            thread.whole_ns[function] = thread.whole_ns.get(function, 0) + thread.total_ns - begun_ns
        thread.last_ns = time.thread_time_ns()

    def print_report(self, who: str) -> None:
        """Stop, and print a JSON line for each thread.

        Functions come by their own time, as [name, is Python, calls, ns, ns with what it calls].
        """
        self.is_on = False
        for thread in self._threads.values():
            rows: List[Any] = [
                [_text(key), not isinstance(key, str), count, thread.own_ns.get(key, 0), thread.whole_ns.get(key, 0)]
                for key, count in thread.calls.items()
            ]
            rows.sort(key=lambda row: -row[3])
            totals = [sum(row[2] for row in rows if row[1]), sum(row[2] for row in rows if not row[1])]
            files = sorted(thread.files.items(), key=lambda item: -item[1])
            line = {"who": who, "thread": thread.name, "python_c": totals, "own_ns": thread.total_ns}
            print(
                json.dumps(
                    {**line, "files": [[_short(name), taken_ns] for name, taken_ns in files], "functions": rows[:SHOWN]}
                ),
                flush=True,
            )


def _name_of_builtin(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    module = getattr(function, "__module__", None) or type(owner).__name__
    return "%s.%s" % (module, getattr(function, "__name__", "?"))


def _text(function: Any) -> str:
    if isinstance(function, str):
        return function
    name = getattr(function, "co_qualname", function.co_name)
    return "%s:%d %s" % (_short(function.co_filename), function.co_firstlineno, name.replace("<locals>.", ""))


def _short(path: str) -> str:
    return "/".join(path.split(os.sep)[-2:])


class _OfServer:
    """The recorder of a server, which signals start and stop."""

    def __init__(self) -> None:
        self.recorder = Recorder()

    def signalled(self, number: int, frame: Optional[FrameType]) -> None:
        """Start, or stop and print."""
        if self.recorder.is_on:
            self.recorder.print_report("server")
        else:
            self.recorder.is_on = True


def begin_in_server() -> None:
    """Be ready for the signals."""
    signal.signal(signal.SIGUSR2, _OfServer().signalled)


if sys.argv[-1:] == ["server"]:
    begin_in_server()
