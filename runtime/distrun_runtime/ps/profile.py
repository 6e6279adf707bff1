"""What a node did when: spans in the Chrome trace format, which chrome://tracing and ui.perfetto.dev show.

Times are microseconds of the wall clock, so that the traces of a job's processes lie beside each other when they are
loaded together (as exactly as the hosts' clocks agree). Durations are measured by the monotonic clock.

Source: "Trace Event Format" (Google): complete events (`ph` X) and metadata events (`ph` M).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distrun_runtime.errors import KVError

EVENT_LIMIT = 200_000
"""So many spans are kept; later ones are only counted. A server's answer with them has to fit into one frame."""

Event = dict[str, Any]


class Recorder:
    """Records spans while it is on.

    Threads: any.
    """

    def __init__(self, limit: int = EVENT_LIMIT) -> None:
        self.is_on = False
        self._limit = limit
        self._lock = threading.Lock()
        self._spans: list[tuple[str, str, int, int, int, dict[str, object]]] = []
        self._threads: dict[int, str] = {}
        self._lost = 0

    def start(self) -> None:
        """Record from now on; what was recorded before is forgotten."""
        with self._lock:
            self._spans, self._threads, self._lost = [], {}, 0
            self.is_on = True

    def stop(self, name: str) -> list[Event]:
        """Record no more and return all spans as trace events.

        Arguments:
            name: of the process, for people: `server-0@d1`.
        """
        with self._lock:
            self.is_on = False
            spans, threads, lost = self._spans, self._threads, self._lost
            self._spans, self._threads = [], {}
        pid = os.getpid()
        events = [_named("process_name", pid, 0, name)]
        events += [_named("thread_name", pid, thread, label) for thread, label in threads.items()]
        events += [
            {
                **{"name": what, "cat": category, "ph": "X", "ts": begin_us, "dur": length_us},
                **{"pid": pid, "tid": thread, "args": args},
            }
            for what, category, begin_us, length_us, thread, args in spans
        ]
        if lost:
            label = "%d later spans were not kept" % lost
            last_us = spans[-1][2] if spans else now_us()
            events.append({"name": label, "ph": "i", "ts": last_us, "pid": pid, "tid": 0, "s": "p"})
        return events

    @contextmanager
    def span(self, name: str, category: str, **args: object) -> Iterator[None]:
        """Record how long the block takes. `args` are JSON values that say more."""
        if not self.is_on:
            yield
            return
        begin_us, started = now_us(), time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(name, category, begin_us, (time.perf_counter_ns() - started) // 1000, **args)

    def add(self, name: str, category: str, begin_us: int, length_us: int, **args: object) -> None:
        """Record a span that began at `begin_us` (see `now_us`) and took `length_us`."""
        thread = threading.get_ident()
        with self._lock:
            if not self.is_on:
                return
            if len(self._spans) >= self._limit:
                self._lost += 1
                return
            self._threads.setdefault(thread, threading.current_thread().name)
            self._spans.append((name, category, begin_us, length_us, thread, args))


def now_us() -> int:
    """Return the wall clock in microseconds."""
    return time.time_ns() // 1000


def prepare(folder: str) -> None:
    """Make the folder for traces, before what they are of has been run.

    Raises:
        KVError: it is none and cannot be made, or nothing can be written there; names it.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise KVError("traces cannot be written to folder %s: %s" % (folder, err.strerror)) from None
    if not os.access(folder, os.W_OK):
        raise KVError("traces cannot be written to folder %s: no permission" % folder)


def write(folder: str, name: str, events: Sequence[Event]) -> str:
    """Write a trace to `folder/name` and return that path. The folder is made if it is not there.

    Raises:
        KVError: it cannot be written; names the file.
    """
    path = Path(folder, name)
    temporary = path.with_name(".%s.%d" % (name, os.getpid()))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"displayTimeUnit": "ms", "traceEvents": list(events)}, file, separators=(",", ":"))
        os.replace(temporary, path)
    except OSError as err:
        raise KVError("the trace cannot be written to %s: %s" % (path, err)) from err
    return str(path)


def _named(what: str, pid: int, thread: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": thread, "args": {"name": name}}
