"""The only module that prints: tasks' output and distrun's own words, without ever making a job wait.

A `Writer` does the writing, in one thread for each place that is written to (one if stdout and stderr are the same).
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import operator
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from distrun.cli.jobline import JobLine
    from distrun.cli.screen import Feed, Region
    from distrun.dashboard.text import Line
    from distrun_runtime.coordinator.clients import OutputPiece

INTERRUPTED_S = 0.5
"""After Ctrl-C at the end, a reader that takes nothing for this time is given up."""
WIDE = 400
"""Columns of a table that is not shown on a terminal."""

LEVELS = ("debug", "info", "warning", "error")

ERRORS = "errors"
"""Stands, among what is shown of tasks, for stderr of all."""

LogPath = Callable[[str], Path]
Counts = Callable[[], "tuple[int, int]"]
"""Returns how many hosts (agents) and tasks a job has."""


def wants_colour(fd: int, env: Mapping[str, str]) -> bool:
    """Return whether to colour what is written to `fd`: NO_COLOR, FORCE_COLOR, CLICOLOR_FORCE, TERM, a terminal."""
    if env.get("NO_COLOR"):
        return False
    if env.get("FORCE_COLOR") or env.get("CLICOLOR_FORCE", "0") not in ("", "0"):
        return True
    return os.isatty(fd) and env.get("TERM") != "dumb"


def can_draw(fd: int, env: Mapping[str, str]) -> bool:
    """Return whether `fd` is a terminal on which lines can be drawn again in place. Not where CI is set."""
    if env.get("CI", "").lower() not in ("", "0", "false"):
        return False
    return os.isatty(fd) and env.get("TERM", "dumb") not in ("", "dumb", "unknown")


def has_symbols(env: Mapping[str, str]) -> bool:
    """Return whether a terminal of these variables shows UTF-8, by its locale and PYTHONIOENCODING."""
    named = env.get("PYTHONIOENCODING", "").partition(":")[0]
    if not named:
        name = env.get("LC_ALL") or env.get("LC_CTYPE") or env.get("LANG") or ""
        name = name.partition("@")[0]
        named = name.partition(".")[2] or name  # "UTF-8" alone, on macOS
    return named.lower().replace("-", "") == "utf8"


class Console:
    """Prints tasks' output and distrun's own messages.

    What is said before `start` is printed at once, so that a process may fork until then. Then threads print. They
    begin with the first thing to print (also before `start`, if that is a task's output): a job that prints nothing has
    none.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        *,
        prefix: bool = True,
        level: str = "info",
        shows: Collection[str] = (),
        out_fd: int = 1,
        err_fd: int = 2,
    ) -> None:
        """Make one that prints nothing yet.

        Args:
            prefix: with the origin of each line; without, the bytes of tasks go through unchanged.
            shows: only the output of tasks of these names and roles is printed, or all stderr (ERRORS); empty: all.
        """
        self._shows = shows
        self._level = LEVELS.index(level)
        self._fds = {"out": out_fd, "err": err_fd}
        self._has_prefix = prefix
        self._env = env
        self._log_path: LogPath | None = None
        self._job = ""
        self._is_closing = False
        self._leaves_out = False
        self._left_out = 0
        self._on_unread: Callable[[], None] | None = None
        self._has_region = prefix and can_draw(err_fd, env)
        """There is a region at the bottom of stderr's terminal: progress bars and the job's line."""
        self.draws = self._has_region and self._level <= LEVELS.index("info")
        """The job's line is shown (`follow`)."""
        self._job_line: JobLine | None = None
        self._counts: Counts = lambda: (0, 0)
        self._since: float | None = None
        self._is_started = False
        self._beginning = threading.Lock()
        """Held while the writers are made and begin: several threads print."""
        self._writers: Mapping[str, Writer] = {}
        """By stream; both are one if stdout and stderr are one place, so that what was written first is shown first."""

    def start(self) -> None:
        """Have threads print from now on, from the line of the job at once: this process forks no more."""
        self._is_started = True
        if self.draws and (line := self._line()) is not None:
            self._show_status(line)

    def _ready_writers(self) -> Mapping[str, Writer]:
        """Return the writers. They are made and begin if they have not yet.

        If an interrupt ends this, the next call goes on with it.
        """
        with self._beginning:
            if not self._writers:
                self._writers = self._made_writers()
                if self._leaves_out:  # looked at after they can be found, so that an interrupt meanwhile is not lost
                    self.leave_out()
            for writer in self._distinct:
                writer.start()
            return self._writers

    @property
    def _distinct(self) -> Collection[Writer]:
        """Each writer once, that of stderr last."""
        return dict.fromkeys(self._writers.values())

    def _made_writers(self) -> Mapping[str, Writer]:
        fds = self._fds
        is_one_place = _same_file(fds["out"], fds["err"])
        region = None
        if self._has_region:
            from distrun.cli.screen import Region  # not before: a job's agents start while this is imported

            region = Region()
        has_colour = {stream: wants_colour(fd, self._env) for stream, fd in fds.items()}

        def feed(piece: OutputPiece) -> Feed:
            from distrun.cli.screen import Feed, prefix

            is_error = piece.stream == "err"
            before = prefix(piece.task, piece.host, is_error, has_colour[piece.stream]) if self._has_prefix else b""
            return Feed(
                before, terminal=os.isatty(fds[piece.stream]), live=region is not None and (is_error or is_one_place)
            )

        err = Writer(fds, feed, self._find_log, self._on_broken, region, last_words=self._last_words)
        out = err if is_one_place else Writer(fds, feed, self._find_log, self._on_broken)
        return {"out": out, "err": err}

    def attach(
        self, log_path: LogPath, job: str = "", counts: Counts = lambda: (0, 0), since: float | None = None
    ) -> None:
        """Say where a task's log file is and which job it is.

        Args:
            log_path: returns the path for a task's name.
            job: the job's id.
            counts: counts its hosts and tasks (0: not known yet).
            since: when it was launched (monotonic), if that was just now: then the phases of its start are shown.
        """
        self._log_path = log_path
        self._job = job
        self._counts = counts
        self._since = since

    def show(self, piece: OutputPiece) -> None:
        """Take a piece of a task's output."""
        shown = piece.task, piece.task.partition("-")[0], ERRORS if piece.stream == "err" else ""
        if not self._shows or any(each in self._shows for each in shown):
            self._ready_writers()[piece.stream].put(piece)

    def say(self, text: str, level: str = "info") -> None:
        """Take one message of our own; below the chosen level it is dropped."""
        if LEVELS.index(level) < self._level:
            return
        mark = f"{level}: " if level in ("warning", "error") else ""
        self._put("err", f"distrun: {mark}{text}\n")

    def follow(self, kind: str, value: Mapping[str, Any]) -> None:
        """Take what the coordinator tells of the job, for the line that shows its progress.

        `kind`: "event" (a line of events.jsonl), "state" (what state.json holds), "metrics" (a snapshot) or "sync"
        (what is said of the copy). Nothing of it is shown where there is no region.
        """
        line = self._line()
        if kind == "sync" and (line is None or self._level < LEVELS.index("info")):
            self.say(value["text"], value["level"])
        if line is None:
            return
        for text in line.take(kind, value, time.monotonic()):
            self.say(text)
        self._show_status(line)

    def _show_status(self, line: JobLine) -> None:
        self._ready_writers()["err"].show_status(encoded(line.text()))

    def _line(self) -> JobLine | None:
        if self._job_line is None and self.draws:
            from distrun.cli.jobline import JobLine

            self._job_line = JobLine(self._counts, self._since, has_symbols(self._env))
        return self._job_line

    def write_err(self, text: str) -> None:
        """Print text to stderr as it stands."""
        self._put("err", text)

    def write_out(self, text: str) -> None:
        """Print text to stdout as it stands."""
        self._put("out", text)

    def _put(self, stream: str, text: str) -> None:
        if self._is_started or self._writers:
            from distrun_runtime.coordinator.clients import OutputPiece

            self._ready_writers()[stream].put(OutputPiece(encoded(text), stream=stream))
        else:
            _print_plain(self._fds[stream], text)

    def toggle_pause(self) -> None:
        """Stop printing, or go on."""
        self._ready_writers()
        paused = [writer.toggle_pause() for writer in self._distinct]
        if any(paused):
            # Past the writers, which wait now.
            with contextlib.suppress(OSError):
                os.write(self._fds["err"], b"distrun: printing is paused, the job goes on; Ctrl-Z again to go on\n")

    def when_unread(self, on_unread: Callable[[], None]) -> None:
        """Have `on_unread` called, by any thread, when the reader of stdout turns out to have gone."""
        self._on_unread = on_unread

    def leave_out(self, more: int = 0) -> None:
        """Print no more of the output that waits: the job was interrupted. The end says how much that is (`close`).

        Begins no threads: those that begin later are told. `more`: so many bytes were not even put here.
        """
        self._leaves_out = True
        self._left_out += more
        for writer in self._distinct:
            writer.leave_out()

    def _last_words(self) -> str:
        left_out = self._left_out + sum(writer.left_out for writer in self._distinct)
        if not left_out:
            return ""
        from distrun.formats import size  # not for other commands' sake

        where = f": distrun logs {self._job}" if self._job else ""
        return f"distrun: {size(left_out)} of output are not shown{where}\n"

    def hold(self, text: str = "") -> None:
        """Stop printing for a question, which is printed at once; until `release`. For any thread."""
        self._ready_writers()
        for writer in self._distinct:
            writer.hold()
        with contextlib.suppress(OSError):
            os.write(self._fds["err"], encoded(text))

    def release(self, text: str = "") -> None:
        """Print the end of the question's line, and go on printing."""
        with contextlib.suppress(OSError):
            os.write(self._fds["err"], encoded(text))
        for writer in self._distinct:
            writer.release()

    def end_output(self) -> None:
        """Take note that all tasks have ended: their last words come before what is said of their end."""
        for writer in self._distinct:
            writer.end_output()

    def close(self) -> None:
        """Print what is left and stop. Ctrl-C leaves it out. A stuck terminal, or another Ctrl-C, ends the wait."""
        if not self._writers:
            if self._left_out:
                _print_plain(self._fds["err"], self._last_words())
            return
        self._is_closing = True
        self._writers["err"].resume()
        try:
            self._end()
        except KeyboardInterrupt:
            self.leave_out()
            with contextlib.suppress(KeyboardInterrupt):
                self._end(INTERRUPTED_S)

    def _end(self, limit_s: float | None = None) -> None:
        # stderr last: it is told when the reader of stdout has gone, and how much was left out.
        for writer in self._distinct:
            writer.end()
            writer.join(limit_s)

    def _on_broken(self, fd: int, err: OSError) -> None:
        if fd != self._fds["out"] and not _same_file(fd, self._fds["out"]):
            return
        if not is_gone(fd, err):
            unwritten.append(err.strerror or str(err))
        if not is_gone(fd, err) and self._job:
            what = "all that the job printed" if self._is_closing else "the job goes on"
            self.say(f"stdout cannot be written; {what}: distrun logs {self._job}", "warning")
        elif err.errno == errno.EPIPE and self._on_unread is not None:
            self._on_unread()

    def _find_log(self, task: str) -> Path | None:
        return self._log_path(task) if self._log_path else None


def print_out(text: str | bytes) -> bool:
    """Print to stdout from a command that runs no job; return False if that fails: the end says so (`unwritten`)."""
    return _print_plain(1, text)


def print_json(schema: str, **members: Any) -> None:
    """Print one JSON object to stdout: the name of its schema, then its members."""
    import json

    print_out(json.dumps({"schema": schema, **members}, indent=2, default=dict) + "\n")


def print_err(text: str) -> None:
    """Print to stderr from a command that runs no job."""
    _print_plain(2, text)


class Stdout(io.TextIOBase):
    """`sys.stdout` for click and rich: what they write is printed as `print_out` does."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The name of the encoding that the terminal takes."""
        return getattr(sys.__stdout__, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Print a text."""
        if not isinstance(text, str):
            raise TypeError(f"expected a text, found {type(text).__name__}")
        print_out(text)
        return len(text)

    def fileno(self) -> int:
        """Return the descriptor."""
        return 1

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return os.isatty(1)


unwritten: list[str] = []
"""Why stdout could not be written. A reader that has gone is no reason."""


def is_gone(fd: int, err: OSError) -> bool:
    """Return whether a write failed because the reader of a pipe has gone, or the terminal."""
    if err.errno == errno.EIO:
        return stat.S_ISCHR(os.fstat(fd).st_mode)
    return err.errno == errno.EPIPE


def terminal_size(fd: int) -> tuple[int, int]:
    """Return columns and rows of a terminal, 80 and 24 where it does not say."""
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        columns, rows = 0, 0
    return columns or 80, rows or 24


def width() -> int:
    """Return how many columns there are for a table on stdout."""
    import shutil  # with all its formats of archives: for tables only

    return shutil.get_terminal_size().columns if os.isatty(1) else WIDE


def render(table: Table) -> str:
    """Return a rich table as text: in the terminal's width and colours, or plain and as wide as it needs."""
    from rich.console import Console as RichConsole

    terminal = os.isatty(1)
    console = RichConsole() if terminal else RichConsole(width=WIDE, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return "".join(line.rstrip() + "\n" for line in capture.get().splitlines())


def styled(lines: Iterable[Line]) -> str:
    """Return lines as text, in the terminal's styles if stdout is one."""
    from distrun.dashboard import text  # for tables only
    from distrun_runtime.contract import environ

    env = environ.snapshot()
    has_styles, has_colour = os.isatty(1) and env.get("TERM") != "dumb", wants_colour(1, env)
    made = (text.encode(line, has_colour) if has_styles or has_colour else text.plain(line) for line in lines)
    return "".join(f"{line.rstrip()}\n" for line in made)


def is_read() -> bool:
    """Return whether anybody can still read stdout."""
    poll = select.poll()
    poll.register(1, 0)
    try:
        return not any(event & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, event in poll.poll(0))
    except OSError:
        return False


def encoded(text: str) -> bytes:
    """Return the bytes that a word stood for (os.fsdecode made surrogates of what is not UTF-8)."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # other surrogates stand for no bytes
        return text.encode("utf-8", "backslashreplace")


def _print_plain(fd: int, text: str | bytes) -> bool:
    """Write all of it, however slow the reader is; return False if that fails."""
    view = memoryview(encoded(text) if isinstance(text, str) else text)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [], 1.0)
        except OSError as err:
            if fd == 1 and not is_gone(fd, err):
                unwritten.append(err.strerror or str(err))
            return False
    return True


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False


# The thread that writes output to stdout and stderr. It has a queue, so callers never wait for a slow reader.
#
# What cannot be written yet is queued. Past `QUEUE_LIMIT`, only its position in the task's log file is kept, and it is
# read back from there. So a slow reader costs no memory, a job never waits for it, and no line is lost.
#
# On a terminal the thread also owns the region at the bottom (`screen.Region`): progress bars and the line of the job.
# Output scrolls above it: one write erases the region, prints, and draws it again.


LAST_BYTES = 64 * 1024
"""Output that waits for a reader after `leave_out`, at most: the last words of tasks that are being stopped."""
CHECK_S = 0.2
"""Interval of checks whether a reader that takes nothing is to be given up."""
STUCK_S = 10.0
"""At the end, a terminal that takes nothing for this time is given up."""
READ_SIZE = 256 * 1024
WRITE_SIZE = 64 * 1024
"""Bytes that are gathered before they are written, at most."""
PACE_S = 0.03
"""Time for which output above a region is gathered, because each write draws the region again."""
LOOK_S = 0.1
"""While output arrives without a pause, interval of checks for what other tasks have to show."""
ASK_S = 0.02
"""After output has arrived, minimum time between two checks when the streams have something to print."""
RESIZE_S = 1.0
"""How often it is looked whether the terminal has another size, while nothing else happens."""
DRAW_S = 0.1
"""How often a region is drawn again, at most, if nothing is printed above it."""
HIDE_S = 1.0
"""How long a question waits until the region is gone. A terminal that is stuck must not hold it up."""


class Writer:
    """A queue and, from `start` on, the thread that empties it."""

    def __init__(
        self,
        fds: Mapping[str, int],
        make_feed: Callable[[OutputPiece], Feed],
        find_log: Callable[[str], Path | None],
        on_broken: Callable[[int, OSError], None] = lambda fd, err: None,
        region: Region | None = None,
        *,
        last_words: Callable[[], str] = lambda: "",
    ) -> None:
        """`fds`: where each stream ("out", "err") is written; `region`: at the bottom of the terminal of "err".

        `last_words`: called at the end, returns what is printed then.
        """
        from distrun_runtime.coordinator.clients import Backlog, OutputPiece  # not for commands that only print

        self._fds = fds
        self._region = region
        self._status = b""
        self._is_drawn_late = self._is_closed = False
        self._drawn_at = self._looked_at = self._written_at = float("-inf")
        self._gathered: list[tuple[int, bytes]] = []
        self._size = 0
        self._is_mid_line = False
        self._make_feed = make_feed
        self._on_broken = on_broken
        self._find_log = find_log
        self._feeds: dict[tuple[int, str, str], Feed] = {}
        self._due_at = self._asked_at = float("-inf")
        """When a feed has something to print although nothing comes, as of `_asked_at`."""
        self._has_fed = True
        """A feed has changed since then."""
        self._queue = Backlog()
        self._ends_output = OutputPiece()
        """Tasks will write nothing more: what they did not end with a newline is printed now."""
        self._is_paused = self._ending = False
        self._last_words = last_words
        self._leaves_out = False
        self.left_out = 0
        """Bytes of output that were not printed, since `leave_out`."""
        self._cut: dict[tuple[str, str], bool] = {}
        """Task and stream of which something was left out since the last piece; and whether that ended in a line."""
        self._holds = 0
        self._is_hidden = False
        """Nothing is printed, the region is gone."""
        self._broken: set[int] = set()
        self._writing = -1
        self._progress = time.monotonic()
        self._limit_s: float | None = None
        """Time after which a reader that takes nothing is given up: of `join`; without a thread also of `leave_out`."""
        self._changed = threading.Condition()
        self._printing = threading.RLock()
        """The caller of `put` holds it while it prints, if there is no thread."""
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._has_begun = False

    def start(self) -> None:
        """Start the thread, once. If that fails, callers print: they wait for slow readers, and nothing is drawn."""
        if not self._has_begun:
            self._has_begun = True
            try:
                self._thread.start()
            except BaseException as err:
                if self._thread.ident is None:
                    self._region = None
                if not isinstance(err, RuntimeError):  # workers may have taken all threads that this user may have
                    raise

    def put(self, piece: OutputPiece) -> None:
        """Queue a piece; never waits, if there is a thread."""
        with self._changed:
            self._queue.put(piece)
            if self._leaves_out:
                self._drop(LAST_BYTES)
            self._changed.notify()
        self._print_queued()

    def _print_queued(self) -> None:
        """Print what waits and what is due, if there is no thread that does."""
        if self._thread.is_alive():
            return
        with self._printing:
            while True:
                with self._changed:
                    piece = None if self._is_silent else self._queue.take()
                if piece is None:
                    break
                self._print(piece)
            if not self._is_silent:
                self._print_due(time.monotonic())
            self._flush()

    def leave_out(self) -> None:
        """Print nothing of the output that waits, and from now on only what the reader takes as it comes."""
        with self._changed:
            self._leaves_out, self._limit_s = True, INTERRUPTED_S
            self._drop(0)

    def _drop(self, keep: int) -> None:
        for piece in self._queue.drop(keep):
            self._note_left_out(piece, piece.length)

    def _note_left_out(self, piece: OutputPiece, length: int) -> None:
        self.left_out += length
        self._cut[piece.task, piece.stream] = bool(piece.data) and not piece.data.endswith(b"\n")

    def end_output(self) -> None:
        """Say that no task will write anything more."""
        self.put(self._ends_output)

    def show_status(self, line: bytes) -> None:
        """Show a line below the progress bars, in place of the one before; empty: none."""
        with self._changed:
            if line != self._status and self._region is not None and not self._is_closed:
                self._status, self._is_drawn_late = line, True
                self._changed.notify()
        self._print_queued()

    def toggle_pause(self) -> bool:
        """Pause or go on; return whether it is paused now."""
        with self._changed:
            self._is_paused = not self._is_paused
            self._changed.notify_all()
            if self._is_paused:
                self._await_hidden()
                return True
        self._print_queued()
        return False

    def hold(self) -> None:
        """Stop for a question on the terminal, until `release`. Returns when the region is gone."""
        with self._changed:
            self._holds += 1
            self._changed.notify_all()
            self._await_hidden()

    def release(self) -> None:
        """Go on after a question; a pause of the user's stays one."""
        with self._changed:
            self._holds = max(0, self._holds - 1)
            self._changed.notify_all()
        self._print_queued()

    def _await_hidden(self) -> None:
        if self._region is not None and threading.current_thread() is not self._thread:
            self._changed.wait_for(lambda: self._is_hidden or not self._is_silent, HIDE_S)

    def resume(self) -> None:
        """Go on, if it is paused."""
        with self._changed:
            self._is_paused, self._holds = False, 0
            self._changed.notify_all()
        self._print_queued()

    def end(self) -> None:
        """Say that nothing more will come."""
        with self._changed:
            self._ending, self._is_paused, self._holds = True, False, 0
            self._progress = time.monotonic()
            self._changed.notify_all()

    def join(self, limit_s: float | None = None) -> None:
        """Wait until all is printed, until a terminal has taken nothing for STUCK_S, or any reader for `limit_s`."""
        self._limit_s = limit_s
        if self._thread.ident is None:  # none could be started
            self._print_queued()
            self._finish()
        while self._thread.is_alive() and not self._is_stuck():
            self._thread.join(CHECK_S)

    def _is_stuck(self) -> bool:
        stuck_s = time.monotonic() - self._progress
        is_given_up = self._limit_s is not None and stuck_s > self._limit_s
        return is_given_up or (self._ending and stuck_s > STUCK_S and os.isatty(self._writing))

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                piece = self._next()
                is_silent = self._is_silent
                is_over = piece is None and self._ending and not is_silent
            if is_silent:
                self._hide()
            elif piece is not None:
                self._print(piece)
                now = time.monotonic()
                if now >= self._looked_at + LOOK_S:
                    self._print_due(now)
            elif is_over:
                self._finish()
                return
            else:
                self._print_due(time.monotonic())

    def _next(self) -> OutputPiece | None:
        """Wait for a piece, or for something else to do; the lock is held."""
        while True:
            if self._is_silent:
                if not self._is_hidden:
                    return None
                self._changed.wait()
                continue
            self._is_hidden = False
            if self._queue or self._ending:
                return self._queue.take()
            wait_s = self._next_due()
            if wait_s is not None and wait_s <= 0:
                return None
            self._changed.wait(wait_s)

    @property
    def _is_silent(self) -> bool:
        return self._is_paused or self._holds > 0

    def _hide(self) -> None:
        """Write what was gathered, and take the region away, before others write to the terminal."""
        self._flush(draws=False)
        with self._changed:
            self._is_hidden = True
            self._is_drawn_late = self._region is not None
            self._changed.notify_all()

    def _next_due(self) -> float | None:
        """Return how long there is nothing to do unless something comes; None: forever."""
        now = time.monotonic()
        waits = [self._feeds_due(now) - now]
        if self._gathered:
            waits.append(self._flush_at - now)
        if self._is_drawn_late:
            waits.append(self._drawn_at + DRAW_S - now)
        elif self._region is not None and self._region.is_drawn:
            waits.append(self._drawn_at + RESIZE_S - now)
        wait_s = min(waits)
        return wait_s if wait_s < float("inf") else None

    def _feeds_due(self, now: float) -> float:
        """Return when feeds may have something to print, or are to be asked again; infinite: never."""
        if self._has_fed and now < self._asked_at + ASK_S:
            return self._asked_at + ASK_S
        if self._has_fed:
            self._has_fed, self._asked_at = False, now
            waits = [wait_s for wait_s in (feed.wait_s(now) for feed in self._feeds.values()) if wait_s is not None]
            self._due_at = now + min(waits, default=float("inf"))
        return self._due_at

    @property
    def _flush_at(self) -> float:
        """When what was gathered is written: at once, unless that would draw a region all the time."""
        return self._written_at + PACE_S if self._region is not None and self._region.is_drawn else float("-inf")

    def _print_due(self, now: float) -> None:
        self._looked_at, self._has_fed = now, True
        for (fd, _, _), feed in self._feeds.items():
            data = feed.due(now)
            if data:
                self._write(fd, data)
        if self._gathered and now >= self._flush_at:
            self._flush()
        elif self._region is not None and now >= self._drawn_at + (DRAW_S if self._is_drawn_late else RESIZE_S):
            self._draw(now)

    def _draw(self, now: float, before: bytes = b"") -> None:
        """Show the progress bars and the job's line in place, after `before`."""
        assert self._region is not None
        self._drawn_at, self._is_drawn_late = now, False
        from distrun.cli.screen import StreamBars, chosen, short_prefix

        lines: list[bytes] = []
        columns, rows = terminal_size(self._fds["err"])
        if not self._is_mid_line and not self._is_closed:
            groups = []
            for (_, task, _), feed in self._feeds.items():
                bars = feed.bars(now)
                # What has just come may be half of a state.
                self._is_drawn_late = self._is_drawn_late or (feed.live and feed.wait_s(now) is not None)
                if bars:
                    groups.append(StreamBars(feed.prefix, short_prefix(task), bars))
            lines = chosen(groups, self._status, columns, rows)
        self._send(self._fds["err"], before + self._region.draw(lines, columns))

    def _print(self, piece: OutputPiece) -> None:
        if piece is self._ends_output:
            self._flush_feeds()
            return
        fd = self._fds[piece.stream]
        if not piece.task:
            self._write(fd, piece.data)
            return
        key = (fd, piece.task, piece.stream)
        feed = self._feeds.get(key)
        if feed is None:
            from distrun.cli.screen import in_order  # with its patterns: when there is something to show

            feed = self._feeds[key] = self._make_feed(piece)
            feed.live = feed.live and self._region is not None
            self._feeds = dict(sorted(self._feeds.items(), key=lambda item: in_order(*item[0][1:])))
        self._has_fed = True
        if feed.live:
            self._is_drawn_late = True
        if (piece.task, piece.stream) in self._cut:
            self._begin_line(piece, feed)
        if piece.is_place:
            self._print_from_log(piece, feed)
        else:
            self._write(fd, feed.feed(piece.data, time.monotonic()))

    def _begin_line(self, piece: OutputPiece, feed: Feed) -> None:
        """End the line before a gap, and go on with the first whole one after it."""
        self._write(self._fds[piece.stream], feed.flush())
        before, newline, after = piece.data.partition(b"\n")
        with self._changed:
            is_mid_line = self._cut.pop((piece.task, piece.stream))
            if is_mid_line and newline:
                self.left_out += len(before) + 1
                piece.data = after

    def _print_from_log(self, piece: OutputPiece, feed: Feed) -> None:
        from distrun_runtime.coordinator.logs import LogFile  # for slow readers only
        from distrun_runtime.errors import JobStoreError

        fd = self._fds[piece.stream]
        path = self._find_log(piece.task)
        at, left = piece.at or 0, piece.length
        try:
            if path is None:
                raise FileNotFoundError(2, "no log file")
            with contextlib.closing(LogFile(path)) as log:
                while left and fd not in self._broken:
                    if self._leaves_out:
                        with self._changed:
                            self._note_left_out(piece, left)
                        return
                    data = log.read(at, min(left, READ_SIZE))
                    gone = min(left, log.begin() - at) if not data else 0
                    if gone > 0:
                        self._write(fd, _not_shown(gone, path, "they are gone: --log-limit"))
                    elif not data:
                        raise EOFError("it is shorter than it was")
                    self._write(fd, feed.feed(data, time.monotonic()))
                    at, left = at + len(data) + gone, left - len(data) - gone
        except (OSError, EOFError, JobStoreError) as err:
            self._write(fd, _not_shown(left, path, err))

    def _flush_feeds(self) -> None:
        """Print what tasks have left unended, and take the region away for good."""
        with self._changed:
            self._is_closed, self._status = True, b""
        for (fd, _, _), feed in self._feeds.items():
            self._write(fd, feed.flush())
        self._flush(draws=False)

    def _finish(self) -> None:
        self._flush_feeds()
        if self._queue.skipped:
            text = f"distrun: warning: {self._queue.skipped} bytes of output were not shown\n"
            self._write(self._fds["err"], encoded(text))
        self._write(self._fds["err"], encoded(self._last_words()))
        self._flush(draws=False)

    def _write(self, fd: int, data: bytes) -> None:
        """Gather bytes, and write them if they are many."""
        if not data:
            return
        self._gathered.append((fd, data))
        self._size += len(data)
        if self._size >= WRITE_SIZE:
            self._flush()

    def _flush(self, draws: bool = True) -> None:
        """Write what was gathered, and draw the region again below it (`draws`) or take it away."""
        gathered, self._gathered, self._size = self._gathered, [], 0
        region = self._region
        if region is None:
            for fd, pieces in itertools.groupby(gathered, operator.itemgetter(0)):
                self._send(fd, b"".join([data for _, data in pieces]))
            return
        # Both streams are one place where there is a region: what came first is written first.
        self._written_at = time.monotonic()
        data = b"".join([data for _, data in gathered])
        if data:
            self._is_mid_line = not data.endswith(b"\n")
        before = region.erase(terminal_size(self._fds["err"])[0]) + data
        if draws:
            self._draw(self._written_at, before)
        else:
            self._send(self._fds["err"], before)

    def _send(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        self._writing, self._progress = fd, time.monotonic()
        write = os.write if self._thread.is_alive() else _write_at_once
        while view and fd not in self._broken:
            try:
                # Short writes, so that a slow reader is seen to make progress.
                view = view[write(fd, view[:65536]) :]
                self._progress = time.monotonic()
            except BlockingIOError:
                select.select([], [fd], [], CHECK_S)
                if write is not os.write and self._is_stuck():
                    self._broken.add(fd)
            except OSError as err:
                # The reader is gone (`| head -1`), or the terminal, or a disk is full: the job's logs are files.
                self._broken.add(fd)
                self._on_broken(fd, err)


def _write_at_once(fd: int, data: memoryview) -> int:
    """Write what `fd` takes now, and return how many bytes; BlockingIOError: nothing."""
    is_blocking = os.get_blocking(fd)
    os.set_blocking(fd, False)
    try:
        return os.write(fd, data)
    finally:
        os.set_blocking(fd, is_blocking)


def _not_shown(count: int, path: Path | None, why: object) -> bytes:
    return encoded(f"distrun: warning: {count} bytes not shown: {path}: {why}\n")
