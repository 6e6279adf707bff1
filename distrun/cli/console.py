"""The only module that prints: tasks' output and distrun's own words, without ever making a job wait.

`writer.py` does the writing, in one thread for each place that is written to (one if stdout and stderr are the same).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import stat
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrun_runtime.coordinator.clients import OutputPiece, encoded

if TYPE_CHECKING:
    from rich.table import Table

    from distrun.cli.jobline import JobLine
    from distrun.cli.screen import Feed
    from distrun.cli.writer import Writer
    from distrun.dashboard.text import Line

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

    Threads are started by `start`, or by the first output of a task. What is said before is printed at once, so that a
    process may fork until then.
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
        self._left_out = 0
        self._on_unread: Callable[[], None] | None = None
        self._has_region = prefix and can_draw(err_fd, env)
        """There is a region at the bottom of stderr's terminal: progress bars and the job's line."""
        self.draws = self._has_region and self._level <= LEVELS.index("info")
        """The job's line is shown (`follow`)."""
        self._job_line: JobLine | None = None
        self._counts: Counts = lambda: (0, 0)
        self._since: float | None = None
        self._writers: dict[str, Writer] = {}
        """By stream; both are one if stdout and stderr are one place, so that what was written first is shown first."""

    def start(self) -> None:
        """Start the threads that print."""
        if self._writers:
            return
        # Not before: a job's agents start while these are imported.
        from distrun.cli.region import Region
        from distrun.cli.writer import Writer

        fds = self._fds
        is_one_place = _same_file(fds["out"], fds["err"])
        live = {"err": self._has_region, "out": self._has_region and is_one_place}
        make = _Feeds(self._has_prefix, fds, {fd: wants_colour(fd, self._env) for fd in fds.values()}, live)
        region = Region() if self._has_region else None
        err = Writer(fds, make.make, self._find_log, self._on_broken, region, last_words=self._last_words)
        out = err if is_one_place else Writer(fds, make.make, self._find_log, self._on_broken)
        self._writers = {"err": err, "out": out}
        line = self._line()
        if line is not None:
            err.show_status(encoded(line.text()))

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

    def output(self, task: str, host: str, stream: str, data: bytes, at: int | None) -> None:
        """Take bytes of a task; they begin at byte `at` of its log file."""
        self.show(OutputPiece(data, task, host, stream, at, len(data)))

    def show(self, piece: OutputPiece) -> None:
        """Take a piece of a task's output."""
        shown = piece.task, piece.task.partition("-")[0], ERRORS if piece.stream == "err" else ""
        if self._shows and not any(each in self._shows for each in shown):
            return
        self.start()
        self._writers[piece.stream].put(piece)

    def say(self, text: str, level: str = "info") -> None:
        """Take one message of our own; below the chosen level it is dropped."""
        if LEVELS.index(level) < self._level:
            return
        mark = f"{level}: " if level in ("warning", "error") else ""
        self.write_err(f"distrun: {mark}{text}\n")

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
        self._writers["err"].show_status(encoded(line.text()))

    def _line(self) -> JobLine | None:
        if self._job_line is None and self.draws:
            from distrun.cli.jobline import JobLine

            self.start()
            self._job_line = JobLine(self._counts, self._since, has_symbols(self._env))
        return self._job_line

    def write_err(self, text: str) -> None:
        """Print text to stderr as it stands."""
        self._put("err", text)

    def write_out(self, text: str) -> None:
        """Print text to stdout as it stands."""
        self._put("out", text)

    def _put(self, stream: str, text: str) -> None:
        if self._writers:
            self._writers[stream].put(OutputPiece(encoded(text), stream=stream))
        else:
            _print_plain(self._fds[stream], text)

    def toggle_pause(self) -> None:
        """Stop printing, or go on."""
        self.start()
        paused = [writer.toggle_pause() for writer in self._each()]
        if any(paused):
            # Past the writers, which wait now.
            with contextlib.suppress(OSError):
                os.write(self._fds["err"], b"distrun: printing is paused, the job goes on; Ctrl-Z again to go on\n")

    def when_unread(self, on_unread: Callable[[], None]) -> None:
        """Have `on_unread` called, by any thread, when the reader of stdout turns out to have gone."""
        self._on_unread = on_unread

    def leave_out(self, more: int = 0) -> None:
        """Print no more of the output that waits: the job was interrupted. The end says how much that is (`close`).

        `more`: so many bytes were not even put here.
        """
        self._left_out += more
        for writer in self._each():
            writer.leave_out()

    def _last_words(self) -> str:
        left_out = self._left_out + sum(writer.left_out for writer in self._each())
        if not left_out:
            return ""
        from distrun.formats import size  # not for other commands' sake

        where = f": distrun logs {self._job}" if self._job else ""
        return f"distrun: {size(left_out)} of output are not shown{where}\n"

    def hold(self, text: str = "") -> None:
        """Stop printing for a question, which is printed at once; until `release`. For any thread."""
        self.start()
        for writer in self._each():
            writer.hold()
        with contextlib.suppress(OSError):
            os.write(self._fds["err"], encoded(text))

    def release(self, text: str = "") -> None:
        """Print the end of the question's line, and go on printing."""
        with contextlib.suppress(OSError):
            os.write(self._fds["err"], encoded(text))
        for writer in self._each():
            writer.release()

    def end_output(self) -> None:
        """Take note that all tasks have ended: their last words come before what is said of their end."""
        for writer in self._each():
            writer.end_output()

    def close(self) -> None:
        """Print what is left and stop. Ctrl-C leaves it out. A stuck terminal, or another Ctrl-C, ends the wait."""
        if not self._writers:
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
        for writer in (self._writers["out"], self._writers["err"]):
            writer.end()
            writer.join(limit_s)

    def _each(self) -> list[Writer]:
        return list({id(writer): writer for writer in self._writers.values()}.values())

    def _on_broken(self, fd: int, err: OSError) -> None:
        if fd != self._fds["out"] and not _same_file(fd, self._fds["out"]):
            return
        unwritten.note(fd, err)
        if not is_gone(fd, err) and self._job:
            what = "all that the job printed" if self._is_closing else "the job goes on"
            self.say(f"stdout cannot be written; {what}: distrun logs {self._job}", "warning")
        elif err.errno == errno.EPIPE and self._on_unread is not None:
            self._on_unread()

    def _find_log(self, task: str) -> Path | None:
        return self._log_path(task) if self._log_path else None


class _Feeds:
    """Makes the feed of a task's stream."""

    def __init__(
        self, has_prefix: bool, fds: Mapping[str, int], coloured: Mapping[int, bool], live: Mapping[str, bool]
    ) -> None:
        self._has_prefix = has_prefix
        self._fds = fds
        self._coloured = coloured
        self._live = live

    def make(self, piece: OutputPiece) -> Feed:
        from distrun.cli.screen import Feed, prefix

        before, fd = b"", self._fds[piece.stream]
        if self._has_prefix:
            before = prefix(piece.task, piece.host, piece.stream == "err", self._coloured[fd])
        return Feed(before, terminal=os.isatty(fd), live=self._live[piece.stream])


def print_out(text: str) -> None:
    """Print to stdout from a command that runs no job. If that fails, the command's end says so (`unwritten`)."""
    _print_plain(1, text)


def tell(text: str) -> bool:
    """Print to stdout; return False if stdout is closed or cannot be written."""
    return _print_plain(1, text)


def print_err(text: str) -> None:
    """Print to stderr from a command that runs no job."""
    _print_plain(2, text)


class Stdout(io.TextIOBase):
    """`sys.stdout` for click and rich: what they write is printed as `print_out` does."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The name of the encoding that the terminal takes."""
        return self._encoding

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


class _Unwritten:
    """Why stdout could not be written: the first error since the last `take`."""

    def __init__(self) -> None:
        self._why = ""

    def note(self, fd: int, err: OSError) -> None:
        """Take the error of a write to `fd`. A reader that has gone is none."""
        if not is_gone(fd, err):
            self._why = self._why or err.strerror or str(err)

    def take(self) -> str:
        """Return why, empty if all was written, and forget it."""
        why, self._why = self._why, ""
        return why


unwritten = _Unwritten()


def is_gone(fd: int, err: OSError) -> bool:
    """Return whether a write failed because the reader of a pipe has gone, or the terminal."""
    if err.errno == errno.EIO:
        return stat.S_ISCHR(os.fstat(fd).st_mode)
    return err.errno == errno.EPIPE


def is_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return os.isatty(1)


def width() -> int:
    """Return how many columns there are for a table on stdout."""
    import shutil  # with all its formats of archives: for tables only

    return shutil.get_terminal_size().columns if is_terminal() else WIDE


def render(table: Table) -> str:
    """Return a rich table as text: in the terminal's width and colours, or plain and as wide as it needs."""
    from rich.console import Console as RichConsole

    terminal = is_terminal()
    console = RichConsole() if terminal else RichConsole(width=WIDE, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return "".join(line.rstrip() + "\n" for line in capture.get().splitlines())


def styled(lines: Iterable[Line]) -> str:
    """Return lines as text, in the terminal's styles if stdout is one."""
    from distrun.dashboard import text  # for tables only
    from distrun_runtime.contract import environ

    env = environ.snapshot()
    has_styles, has_colour = is_terminal() and env.get("TERM") != "dumb", wants_colour(1, env)
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


def copy_out(data: bytes) -> bool:
    """Write bytes to stdout unchanged; return False if it is closed or cannot be written."""
    return _print_plain(1, data)


def _print_plain(fd: int, text: str | bytes) -> bool:
    view = memoryview(encoded(text) if isinstance(text, str) else text)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [], 1.0)
        except OSError as err:
            if fd == 1:
                unwritten.note(fd, err)
            return False
    return True


def _same_file(one: int, other: int) -> bool:
    try:
        a, b = os.fstat(one), os.fstat(other)
    except OSError:
        return False
    return (a.st_dev, a.st_ino, a.st_rdev) == (b.st_dev, b.st_ino, b.st_rdev)
