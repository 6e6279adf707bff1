"""The loop of the dashboard of one job: takes keys, frames and signals, and draws twice a second."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from distrun import report
from distrun.dashboard import keys, read, text, user, view
from distrun.dashboard.model import Model
from distrun.dashboard.source import FrameSource, JobFrame
from distrun.dashboard.terminal import Terminal
from distrun.dashboard.user import User, VisibleRows
from distrun_runtime.contract import process

# The signals of the dashboard: the interpreter records them, and the loop handles them.


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


INTERVAL_S = 0.5
"""Between two pictures, unless a key was pressed."""
STATE_S = 10.0
"""Interval of requests for the job's state."""
CHANGED_S = 2.0
"""For this time after an event, every picture requests the state: the coordinator writes it a moment later."""
LOOK_S = 2.0
"""Minimum time between two messages that say which hosts are looked at."""
LOG_LINES = 1000
OUTPUT_SIZE = 128 * 1024
"""Bytes of a task's output that are kept, if its log is on another machine."""
OUTPUT_LINES = 200
"""Lines of the job's output that are asked for there."""


class Logs(Protocol):
    """The end of a task's log."""

    def tail(self, task: str, lines: int) -> Sequence[str]:
        """Return its last lines, decoded."""

    def log_stamp(self, task: str) -> object:
        """Return what changes when the log does."""


@dataclass(frozen=True)
class Ended:
    """How the dashboard ended: its exit code, and the signal that ended it, if one did."""

    exit_code: int
    signal: signal.Signals | None = None


class Dashboard:
    """One job on a terminal.

    Arguments:
        job: the job's id.
        source: gives frames.
        terminal: taken already.
        signals: entered already.
        logs: the job's logs on this machine.
        is_elsewhere: until the job is over its logs are on another machine, and its coordinator sends them.
        is_ascii: charts are drawn in ASCII.
        clock: wall clock, seconds.
    """

    def __init__(
        self,
        job: str,
        source: FrameSource,
        terminal: Terminal,
        signals: Signals,
        logs: Logs,
        *,
        is_elsewhere: bool = False,
        is_ascii: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.model = Model(job)
        self._source = source
        self._terminal = terminal
        self._signals = signals
        self._logs = logs
        self._is_elsewhere = is_elsewhere
        self._glyphs = text.ASCII if is_ascii else text.UNICODE
        self._clock = clock
        self._user = User()
        self._decoder = keys.KeyDecoder()
        self._shown = VisibleRows()
        self._held: tuple[Model, float] | None = None
        """The model, and the time, of a picture that is held."""
        self._stack: tuple[str, ...] = ()
        self._log: Sequence[str] = ()
        self._log_stamp: object = None
        self._error_stamp: object = None
        self._output: dict[str, bytes] = {}
        """What tasks printed, where their logs are elsewhere."""
        self._changed_until = 0.0
        self._asked_state = self._told_look = 0.0
        self._hosts: tuple[str, ...] = ()
        self._ended: Ended | None = None

    def run(self) -> Ended:
        """Show the job until the user leaves or a signal ends this."""
        self._take_all()
        next_s = 0.0
        while self._ended is None:
            now = time.monotonic()
            if now >= next_s:
                self._draw(now)
                next_s = now + INTERVAL_S
            if self._wait(next_s):
                next_s = 0.0
        return self._ended

    def _wait(self, until: float) -> bool:
        """Wait for input; return whether to draw at once."""
        terminal = self._terminal
        limit_s = max(0.0, until - time.monotonic())
        if self._decoder.is_waiting:
            limit_s = min(limit_s, keys.ESCAPE_S)
        writing = [terminal.out] if terminal.is_behind else []
        reading = [terminal.keys, self._source.wakeup, self._signals.wakeup]
        ready, writable, _ = select.select(reading, writing, [], limit_s)
        is_urgent = False
        if writable:
            terminal.flush()
        if self._signals.wakeup in ready:
            is_urgent = self._take_signals()
        if self._source.wakeup in ready:
            self._take_all()
        pressed: list[str] = []
        if terminal.keys in ready:
            data = terminal.read()
            if data is None:
                self._ended = Ended(self.model.exit_code, signal.SIGHUP)
                return False
            pressed = self._decoder.feed(data)
        elif self._decoder.is_waiting and not ready:
            pressed = self._decoder.expire()
        self._press(pressed)
        return bool(pressed) or is_urgent

    def _take_signals(self) -> bool:
        is_urgent = False
        for each in self._signals.take():
            if each == signal.SIGINT:
                self._ended = Ended(self.model.exit_code)
            elif each in (signal.SIGTERM, signal.SIGHUP):
                self._ended = Ended(self.model.exit_code, each)
            elif each == signal.SIGTSTP:
                self._terminal.suspend()
                self._signals.take()  # the SIGCONT of that
                is_urgent = True
            elif each == signal.SIGCONT:
                self._terminal.again()
                is_urgent = True
            elif each == signal.SIGWINCH:
                is_urgent = True
        return is_urgent

    # ------------------------------------------------------------------ frames

    def _take_all(self) -> None:
        for frame in self._source.take():
            self._take(frame)

    def _take(self, frame: JobFrame) -> None:
        now, header = self._clock(), frame.header
        if self.model.take(frame.kind, header, now):
            if frame.kind == "event":
                self._changed_until = time.monotonic() + CHANGED_S
        elif frame.kind == "link":
            why = read.text(header.get("why"))
            if why:
                self.model.disconnected(why)
            else:
                self.model.connected()
        elif frame.kind == "output":
            task = read.text(header.get("task"))
            self._output[task] = (self._output.get(task, b"") + frame.body)[-OUTPUT_SIZE:]
        elif frame.kind == "stack":
            self._take_stack(frame)
        elif frame.kind == "refused":
            self._refused(read.text(header.get("message")), read.text(header.get("hint")))
        elif frame.kind == "failed":
            self.model.disconnected(read.text(header.get("message")))
        elif frame.kind == "failed_here":
            self._user.say(f"internal error: {read.text(header.get('error'))}; leave and begin again")

    def _take_stack(self, frame: JobFrame) -> None:
        header = frame.header
        lines = read.text(header.get("text")).splitlines()
        error, fix = read.text(header.get("error")), read.text(header.get("fix"))
        how = read.text(header.get("how"))
        about = [f"by {how}", ""] if how and lines else []
        problem = [*error.splitlines(), *(f"fix: {line}" for line in fix.splitlines())]
        if read.text(header.get("task")) == self._user.look.chosen:
            self._stack = (*problem, *about, *lines) or ("there is nothing",)

    def _refused(self, message: str, hint: str) -> None:
        self._user.say(message + (f"; {hint}" if hint else ""))
        if self._user.look.mode == user.STACK:
            self._stack = tuple(line for line in (message, hint) if line)

    # ------------------------------------------------------------------ what the user wants

    def _press(self, pressed: Sequence[str]) -> None:
        """Take the keys of one read."""
        mode = self._user.look.mode
        for number, key in enumerate(pressed):
            if self._user.look.mode != mode:  # the key is for what that shows
                mode = self._user.look.mode
                self._draw(time.monotonic())
            for action in self._user.press(key, self._shown, is_next=number > 0):
                self._do(action)
            if self._ended is not None:
                return

    def _do(self, action: user.Action) -> None:
        if isinstance(action, user.Leave):
            self._ended = Ended(self.model.exit_code)
        elif isinstance(action, user.Redraw):
            self._terminal.redraw()
        elif isinstance(action, user.StopJob):
            if self.model.job.is_over:
                self._user.say("the job is over already")
            elif not self._source.send("stop", by=f"{_who()} from the dashboard"):
                self._user.say(f"there is no coordinator to ask; type: distrun kill {self.model.job.id}")
        elif isinstance(action, user.ShowStack):
            self._stack = (f"asking for the stack of {action.task} ...",)
            if not self._source.send("stack", task=action.task):
                self._stack = ("there is no coordinator to ask",)
        elif isinstance(action, user.ShowLog):
            self._log, self._log_stamp = (), None
            self._told_look = float("-inf")  # a log that is elsewhere is asked for at once

    # ------------------------------------------------------------------ drawing

    def _draw(self, now: float) -> None:
        self._ask(now)
        terminal = self._terminal
        if terminal.is_behind and not terminal.flush():
            return
        wall = self._clock()
        self.model.settle(wall)
        self._read_logs()
        look = self._user.look
        if look.is_paused and self._held is None:
            self._held = (self.model.frozen(), wall)
        elif not look.is_paused:
            self._held = None
        model, when = self._held or (self.model, wall)
        columns, rows = terminal.size()
        options = view.Options(columns, rows, self._glyphs)
        extra = view.TaskExtra(self._log, self._stack)
        picture = view.picture(model, look, options, when, extra)
        self._shown = picture.shown
        if look.mode == user.MAIN:
            self._user.look = replace(look, first=picture.first)
        self._hosts = picture.hosts
        terminal.draw(picture.lines)

    def _ask(self, now: float) -> None:
        """Ask the coordinator for what changes rarely, and tell it what is looked at."""
        if self.model.job.is_over:
            return
        if now >= self._asked_state + (INTERVAL_S if now < self._changed_until else STATE_S):
            self._asked_state = now
            self._source.send("state")
        if now >= self._told_look + LOOK_S:
            self._told_look = now
            wanted: dict[str, object] = {"events": True, "metrics": True, "look": list(self._hosts)}
            if self._is_elsewhere and (self._user.look.mode == user.LOG or self.model.first_error is not None):
                wanted["output"] = {"tail": OUTPUT_LINES}
            self._source.subscribe(**wanted)

    def _read_logs(self) -> None:
        """Read the log that is followed, and the end of that of the first error, if they have changed."""
        look, error = self._user.look, self.model.first_error
        if look.mode == user.LOG and not look.is_paused:
            stamp = self._stamp(look.chosen)
            if stamp != self._log_stamp:
                self._log_stamp = stamp
                self._log = self._tail(look.chosen, LOG_LINES)
        if error is not None:
            stamp = (error.name, self._stamp(error.name))
            if stamp != self._error_stamp:
                self._error_stamp = stamp
                lines = [text.clean(line) for line in self._tail(error.name, report.READ_LINES)]
                self.model.set_error(report.excerpt(lines))
                self.model.settle(self._clock())

    @property
    def _has_logs(self) -> bool:
        return not self._is_elsewhere or self.model.job.is_over

    def _stamp(self, task: str) -> object:
        if self._has_logs:
            return task, self._logs.log_stamp(task)
        return task, len(self._output.get(task, b"")), hash(self._output.get(task, b"")[-256:])

    def _tail(self, task: str, lines: int) -> Sequence[str]:
        if self._has_logs:
            return self._logs.tail(task, lines)
        found = self._output.get(task, b"").decode("utf-8", "replace").splitlines()
        return [line.rstrip("\r").rpartition("\r")[2] for line in found[-lines:]]


def _who() -> str:
    """Return this user and this machine, for a message to others."""
    return f"{process.user_name() or f'user {os.getuid()}'}@{socket.gethostname()}"


class FolderOfLogs(Protocol):
    """What is needed of a job's folder."""

    def tail(self, task: str, lines: int) -> list[str]:
        """Return the last lines of a task's log."""

    def log_path(self, task: str) -> os.PathLike[str]:
        """Return where it is."""


class FolderLogs:
    """Logs in a job's folder on this machine."""

    def __init__(self, folder: FolderOfLogs) -> None:
        self._folder = folder

    def tail(self, task: str, lines: int) -> Sequence[str]:
        """Return the last lines of a task's log, decoded."""
        return self._folder.tail(task, lines)

    def log_stamp(self, task: str) -> object:
        """Return size and time of a task's log."""
        try:
            found = os.stat(self._folder.log_path(task))
        except OSError:
            return None
        return found.st_size, found.st_mtime_ns
