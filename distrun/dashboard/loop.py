"""The loop of the dashboard of one job: takes keys, frames and signals, and draws twice a second.

`watch` shows a job on a terminal, `follow` prints a line for each change.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distrun import client, remote_jobs
from distrun.dashboard import user, view
from distrun.dashboard.feed import STATE_S, JobFeed
from distrun.dashboard.model import Model, Plain
from distrun.dashboard.source import FrameSource, string
from distrun.dashboard.terminal import ESCAPE_S, Appearance, KeyDecoder, Terminal
from distrun.dashboard.user import Action, User, VisibleRows
from distrun.errors import DistrunError
from distrun_runtime.contract import process
from distrun_runtime.errors import JobStoreError

if TYPE_CHECKING:
    from distrun.client import ControlConnection
    from distrun_runtime.coordinator.jobfolder import JobFolder

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HANDLED = (*ENDING, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)
INTERVAL_S = 0.5
"""Between two pictures, unless a key was pressed."""
LOG_LINES = 1000


def watch(folder: JobFolder, look: Appearance) -> Ended:
    """Show a job on the terminal until the user leaves. The exit code is that of `distrun status JOB`.

    Raises:
        DistrunError: the host of the job's coordinator cannot be reached, and nothing is known of the job.
    """
    connection = first_connection(folder)  # before the screen is taken: ssh may ask for a password
    with Signals() as signals, Terminal(look=look) as terminal:
        return show(folder, connection, terminal, signals)


def follow(folder: JobFolder, write: Callable[[str], bool]) -> Ended:
    """Print a line for each change of a job, until it is over.

    Args:
        folder: the job's.
        write: prints a text; returns False if stdout is closed.
    """
    connection = first_connection(folder)
    model, plain = Model(folder.id), Plain()
    with Signals(ENDING) as signals, _source(folder, connection) as source:
        asked = 0.0
        while True:
            select.select([source.wakeup, signals.wakeup], [], [], INTERVAL_S)
            for frame in source.take():
                if frame.type == "link":
                    model.link = str(frame.header["why"])
                model.take(frame.type, frame.header, time.time())
            model.settle(time.time())
            lines = plain.changes(model, time.time())
            if not all(write(line + "\n") for line in lines) or model.job.is_over:
                return Ended(model.exit_code)
            for each in signals.take():
                return Ended(model.exit_code, None if each == signal.SIGINT else each)
            if time.monotonic() >= asked + STATE_S / 10:
                asked = time.monotonic()
                source.send("state")


def show(folder: JobFolder, connection: ControlConnection | None, terminal: Terminal, signals: Signals) -> Ended:
    """Show a job on a terminal that is taken, until the user leaves. `connection`: that of `first_connection`."""
    with _source(folder, connection) as source:
        return Dashboard(folder, source, terminal, signals).run()


@contextlib.contextmanager
def _source(folder: JobFolder, connection: ControlConnection | None) -> Iterator[FrameSource]:
    made = FrameSource(folder)
    made.start(connection, has_events=not remote_jobs.is_elsewhere(folder))
    try:
        yield made
    finally:
        made.close()


def first_connection(folder: JobFolder) -> ControlConnection | None:
    """Return a connection; None if there is none, but the folder says how the job stands."""
    try:
        if folder.is_finished:
            return None
        return client.connect(folder)
    except (DistrunError, JobStoreError):
        if remote_jobs.is_elsewhere(folder):
            remote_jobs.refreshed(folder, may_ask=False)  # as a rule the job is over, and its folder says so
            if not folder.is_finished:
                raise
        return None


@dataclass(frozen=True)
class Ended:
    """How the dashboard ended: its exit code, and the signal that ended it, if one did."""

    exit_code: int
    signal: signal.Signals | None = None


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
            # What was ignored from outside (nohup) stays so. The interpreter writes the numbers into the pipe.
            if before is not signal.SIG_IGN or each == signal.SIGWINCH:
                self._before.append((each, signal.signal(each, process.do_nothing)))
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


class Input:
    """What a user does at a terminal that is taken: keys and signals.

    Stopping and going on (Ctrl-Z, SIGCONT) is done here.
    """

    def __init__(self, terminal: Terminal, signals: Signals) -> None:
        self._terminal = terminal
        self._signals = signals
        self._decoder = KeyDecoder()

    def wait(self, until: float, *others: int) -> list[str | signal.Signals]:
        """Wait for something to come, or to be read from `others`, until a time (monotonic); return what came.

        That is names of keys, and signals; SIGHUP if the terminal is gone. What waits to be drawn is written meanwhile.
        """
        terminal, signals, decoder = self._terminal, self._signals, self._decoder
        limit_s = max(0.0, until - time.monotonic())
        if decoder.is_waiting:
            limit_s = min(limit_s, ESCAPE_S)
        writing = [terminal.out] if terminal.is_behind else []
        ready, writable, _ = select.select([terminal.keys, signals.wakeup, *others], writing, [], limit_s)
        if writable:
            terminal.flush()
        came: list[str | signal.Signals] = list(signals.take()) if signals.wakeup in ready else []
        if signal.SIGTSTP in came:
            terminal.suspend()
            signals.take()  # the SIGCONT of that
        elif signal.SIGCONT in came:
            terminal.again()
        if terminal.keys in ready:
            data = terminal.read()
            came += [signal.SIGHUP] if data is None else decoder.feed(data)
        elif decoder.is_waiting and not ready:
            came += decoder.expire()
        return came


def ending(came: Sequence[str | signal.Signals], exit_code: int) -> Ended | None:
    """Return how a dashboard ends by what has come (`Input.wait`); None: it goes on."""
    first = next((each for each in came if isinstance(each, signal.Signals) and each in ENDING), None)
    return None if first is None else Ended(exit_code, None if first == signal.SIGINT else first)


class Dashboard:
    """One job on a terminal.

    Arguments:
        folder: the job's folder on this machine.
        source: gives frames.
        terminal: taken already.
        signals: entered already.
    """

    def __init__(self, folder: JobFolder, source: FrameSource, terminal: Terminal, signals: Signals) -> None:
        self._feed = JobFeed(folder, source)
        self.model = self._feed.model
        self._source = source
        self._terminal = terminal
        self._input = Input(terminal, signals)
        self._user = User()
        self._shown = VisibleRows()
        self._held: tuple[Model, float] | None = None
        """The model, and the time, of a picture that is held."""
        self._stack: tuple[str, ...] = ()
        self._log: Sequence[str] = ()
        self._log_stamp: object = None
        self._hosts: tuple[str, ...] = ()
        self._ended: Ended | None = None

    def run(self) -> Ended:
        """Show the job until the user leaves or a signal ends this."""
        self._take_all()
        next_s = 0.0
        while self._ended is None:
            now = time.monotonic()
            if now >= next_s:
                self._draw()
                next_s = now + INTERVAL_S
            came = self._input.wait(next_s, self._source.wakeup)
            self._take_all()
            self._ended = ending(came, self.model.exit_code)
            if came:
                next_s = 0.0
            if self._ended is None:
                self._press([each for each in came if not isinstance(each, signal.Signals)])
        return self._ended

    # ------------------------------------------------------------------ frames

    def _take_all(self) -> None:
        for frame in self._feed.take():
            told = {name: string(frame.header.get(name)) for name in ("message", "hint", "error")}
            match frame.type:
                case "stack":
                    self._take_stack(frame.header)
                case "refused":
                    self._refused(told["message"], told["hint"])
                case "failed_here":
                    self._user.say(f"internal error: {told['error']}; leave and begin again")

    def _take_stack(self, header: Mapping[str, object]) -> None:
        lines, error, fix, how = (string(header.get(name)) for name in ("text", "error", "fix", "how"))
        about = [f"by {how}", ""] if how and lines else []
        problem = [*error.splitlines(), *(f"fix: {line}" for line in fix.splitlines())]
        if string(header.get("task")) == self._user.look.chosen:
            self._stack = (*problem, *about, *lines.splitlines()) or ("there is nothing",)

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
                self._draw()
            for action in self._user.press(key, self._shown, is_next=number > 0):
                self._do(action)
            if self._ended is not None:
                return

    def _do(self, action: Action) -> None:
        match action:
            case Action.LEAVE:
                self._ended = Ended(self.model.exit_code)
            case Action.REDRAW:
                self._terminal.redraw()
            case Action.STOP_JOB:
                if self.model.job.is_over:
                    self._user.say("the job is over already")
                elif not self._source.send("stop", by=f"{_who()} from the dashboard"):
                    self._user.say(f"there is no coordinator to ask; type: distrun kill {self.model.job.id}")
            case Action.STACK:
                task = self._user.look.chosen
                is_asked = self._source.send("stack", task=task)
                self._stack = (f"asking for the stack of {task} ..." if is_asked else "there is no coordinator to ask",)
            case Action.LOG:
                self._log, self._log_stamp = (), None
                self._feed.hurry()  # a log that is elsewhere is asked for at once

    # ------------------------------------------------------------------ drawing

    def _draw(self) -> None:
        self._feed.ask(self._hosts, wants_output=self._user.look.mode == user.LOG)
        terminal = self._terminal
        if terminal.is_behind and not terminal.flush():
            return
        wall = self._feed.settle()
        self._read_log()
        look = self._user.look
        if look.is_paused and self._held is None:
            self._held = (self.model.frozen(), wall)
        elif not look.is_paused:
            self._held = None
        model, when = self._held or (self.model, wall)
        columns, rows = terminal.size()
        options = view.Options(columns, rows, terminal.glyphs)
        extra = view.TaskExtra(self._log, self._stack)
        picture = view.picture(model, look, options, when, extra)
        self._shown = picture.shown
        if look.mode == user.MAIN:
            self._user.look = replace(look, first=picture.first)
        self._hosts = picture.hosts
        terminal.draw(picture.lines)

    def _read_log(self) -> None:
        """Read the log that is followed, if it has changed."""
        look = self._user.look
        if look.mode == user.LOG and not look.is_paused:
            stamp = self._feed.stamp(look.chosen)
            if stamp != self._log_stamp:
                self._log_stamp = stamp
                self._log = self._feed.tail(look.chosen, LOG_LINES)


def _who() -> str:
    """Return this user and this machine, for a message to others."""
    return f"{process.user_name() or f'user {os.getuid()}'}@{socket.gethostname()}"
