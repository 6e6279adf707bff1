"""Traces: the lines of PS_VERBOSE on stderr, and spans of calls for a profile.

PS_VERBOSE=1 prints addresses and ids, 2 every message, one line each, `key=value`. `time` is the local time of day.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from distrun_runtime.arrays.dtypes import name_of
from distrun_runtime.contract.facts import time_of_day
from distrun_runtime.errors import KVError
from distrun_runtime.protocol.handshake import NodeIdentity
from distrun_runtime.protocol.message import DTYPES, Message, rows_of

_ALWAYS = ("WARNING", "ERROR")

STRANGER_LINES = 10
STRANGER_PERIOD_S = 60.0
"""So many different lines in so much time are written about peers that have proven nothing."""
_LINE_LIMIT = 8000
"""Characters of a line."""


class Trace:
    """Writes a node's lines, each with its role and rank."""

    def __init__(self, verbose: int, me: Callable[[], NodeIdentity], out: TextIO | None = None) -> None:
        self._verbose = verbose
        self.has_messages = verbose > 1
        """Whether a line for each message is wanted: `sent` and `received`, at PS_VERBOSE=2."""
        self._me = me
        self._out = out
        self._stranger_lines: set[str] = set()
        self._left_out = 0
        self._period_from = 0.0

    def log(self, level: str, text: str) -> None:
        """Write a line; INFO and DEBUG only from PS_VERBOSE=1 on."""
        if self._verbose or level in _ALWAYS:
            prefix = "" if level == "INFO" else level.lower() + ": "
            self._write(prefix + text)

    def stranger(self, text: str) -> None:
        """Write a warning about a peer that has proven nothing, unless there were too many lately, or the same one."""
        now = time.monotonic()
        more = ""
        if now - self._period_from >= STRANGER_PERIOD_S:
            if self._left_out:
                more = f" ({self._left_out} lines like this one were left out before it)"
            self._period_from, self._left_out = now, 0
            self._stranger_lines.clear()
        if text in self._stranger_lines or len(self._stranger_lines) == STRANGER_LINES:
            self._left_out += 1
            return
        self._stranger_lines.add(text)
        self.log("WARNING", text + more)

    def sent(self, link: str, message: Message) -> None:
        """Write a line for a message that goes out."""
        self._write(f"event=send to={link} {describe(message)}")

    def received(self, link: str, message: Message) -> None:
        """Write a line for a message that came in."""
        self._write(f"event=receive from={link} {describe(message)}")

    def _write(self, text: str) -> None:
        me = self._me()
        rank = "" if me.rank < 0 else f" rank={me.rank}"
        text = printable(text, _LINE_LIMIT)  # a stranger's words are in some of them
        # One write a line: several threads and processes share the stream.
        out = self._out or sys.stderr
        out.write(f"distrun role={me.role}{rank} time={time_of_day(time.time())} {text}\n")
        out.flush()


def printable(text: str, limit: int) -> str:
    """Return a text in one line of at most about `limit` characters, without any that a terminal would obey; pure."""
    if len(text) > limit:
        text = f"{text[:limit]}... ({len(text) - limit} characters left out)"
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode("ascii") for each in text
    )


def describe(message: Message) -> str:
    """Return the fields of a message as `key=value` pairs, without any value of an array or secret."""
    fields = [f"kind={message.kind.name.lower()}", f"store={message.store}", f"request={message.request}"]
    if message.is_reply:
        fields.append(f"reply={'error' if message.is_error else 'ok'}")
    if message.priority:
        fields.append(f"priority={message.priority}")
    if message.bucket:
        fields.append(f"bucket={message.bucket} step={message.step}")
    if len(message.entries):
        size = message.size
        first = rows_of(message.entries[:1])[0]
        fields.append(f"entries={len(message.entries)} key={first.key} offset={first.offset} round={first.round}")
        codec = f"codec={first.codec} " if first.codec else ""
        fields.append(f"{codec}dtype={name_of(DTYPES[first.dtype])} bytes={size}")
    if message.is_error:
        fields.append(f"reason={str(message.body.get('reason', ''))!r}")
    return " ".join(fields)


# What a node did when: spans in the Chrome trace format, which chrome://tracing and ui.perfetto.dev show.
#
# Times are microseconds of the wall clock, so that the traces of a job's processes lie beside each other when they are
# loaded together (as exactly as the hosts' clocks agree). Durations are measured by the monotonic clock.
#
# Source: "Trace Event Format" (Google): complete events (`ph` X) and metadata events (`ph` M).


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
            label = f"{lost} later spans were not kept"
            last_us = spans[-1][2] if spans else now_us()
            events.append({"name": label, "ph": "i", "ts": last_us, "pid": pid, "tid": 0, "s": "p"})
        return events

    @contextmanager
    def span(self, name: str, category: str, **args: object) -> Iterator[None]:
        """Record how long the block takes. `args` are JSON values that say more."""
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
        raise KVError(f"traces cannot be written to folder {folder}: {err.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise KVError(f"traces cannot be written to folder {folder}: no permission")


def write(folder: str, name: str, events: Sequence[Event]) -> str:
    """Write a trace to `folder/name` and return that path. The folder is made if it is not there.

    Raises:
        KVError: it cannot be written; names the file.
    """
    path = Path(folder, name)
    temporary = path.with_name(f".{name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"displayTimeUnit": "ms", "traceEvents": list(events)}, file, separators=(",", ":"))
        os.replace(temporary, path)
    except OSError as err:
        raise KVError(f"the trace cannot be written to {path}: {err}") from err
    return str(path)


def _named(what: str, pid: int, thread: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": thread, "args": {"name": name}}
