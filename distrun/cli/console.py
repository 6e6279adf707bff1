"""The only module that prints: tasks' output and distrun's own words, without ever making a job wait.

`writer.py` does the writing, in one thread for each place that is written to (one if stdout and stderr are the same).
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from distrun.cli.lines import Feed, Live, prefix
from distrun.cli.writer import Piece, Writer, encode

if TYPE_CHECKING:
    from rich.table import Table

WIDE = 400
"""Columns of a table that is not shown on a terminal."""

LEVELS = ("debug", "info", "warning", "error")

LogPath = Callable[[str], Path]


def wants_colour(fd: int, env: Mapping[str, str]) -> bool:
    """Return whether to colour what is written to `fd`: NO_COLOR, FORCE_COLOR, CLICOLOR_FORCE, TERM, a terminal."""
    if env.get("NO_COLOR"):
        return False
    if env.get("FORCE_COLOR") or env.get("CLICOLOR_FORCE", "0") not in ("", "0"):
        return True
    return os.isatty(fd) and env.get("TERM") != "dumb"


def can_draw(fd: int, env: Mapping[str, str]) -> bool:
    """Return whether `fd` is a terminal on which lines can be drawn again in place."""
    return os.isatty(fd) and env.get("TERM", "dumb") not in ("", "dumb", "unknown")


class Console:
    """The terminal printer: a `coordinator.sink.Sink`."""

    def __init__(
        self,
        env: Mapping[str, str],
        *,
        prefix: bool = True,
        level: str = "info",
        out_fd: int = 1,
        err_fd: int = 2,
    ) -> None:
        self._level = LEVELS.index(level)
        self._out_fd, self._err_fd = out_fd, err_fd
        self._log_path: LogPath | None = None
        live = {fd: prefix and can_draw(fd, env) for fd in (out_fd, err_fd)}
        make = _Feeds(prefix, {fd: wants_colour(fd, env) for fd in (out_fd, err_fd)}, live)
        self._job = ""
        self._is_closing = False

        def writer(fd: int) -> Writer:
            return Writer(make.make, self._find_log, self._on_broken, Live() if live[fd] else None)

        self._err = writer(err_fd)
        # One thread when both are one place: what was written first is shown first.
        self._out = self._err if _same_file(out_fd, err_fd) else writer(out_fd)

    def attach(self, log_path: LogPath, job: str = "") -> None:
        """Say where a task's log file is, and which job it is."""
        self._log_path = log_path
        self._job = job

    def output(self, task: str, host: str, stream: str, data: bytes, at: int | None) -> None:
        """Take bytes of a task; they begin at byte `at` of its log file."""
        fd, writer = (self._out_fd, self._out) if stream == "out" else (self._err_fd, self._err)
        writer.put(Piece(fd, data, task, host, stream, at, len(data)))

    def say(self, text: str, level: str = "info") -> None:
        """Take one message of our own; below the chosen level it is dropped."""
        if LEVELS.index(level) < self._level:
            return
        mark = "%s: " % level if level in ("warning", "error") else ""
        self.write_err("distrun: %s%s\n" % (mark, text))

    def write_err(self, text: str) -> None:
        """Print text to stderr as it stands."""
        self._err.put(Piece(self._err_fd, encode(text)))

    def write_out(self, text: str) -> None:
        """Print text to stdout as it stands."""
        self._out.put(Piece(self._out_fd, encode(text)))

    def toggle_pause(self) -> None:
        """Stop printing, or go on."""
        paused = self._out.toggle_pause()
        if self._err is not self._out:
            self._err.toggle_pause()
        if paused:
            # Past the writers, which wait now.
            with contextlib.suppress(OSError):
                os.write(self._err_fd, b"distrun: printing is paused, the job goes on; Ctrl-Z again to go on\n")

    def end_output(self) -> None:
        """Take note that all tasks have ended: their last words come before what is said of their end."""
        for writer in {self._out, self._err}:
            writer.put(Piece(self._err_fd, ends_output=True))

    def close(self) -> None:
        """Print what is left and stop. A stuck terminal, or Ctrl-C, ends the wait."""
        self._is_closing = True
        self._err.resume()
        try:
            # stderr last: it is told when the reader of stdout has gone.
            for writer in (self._out, self._err):
                writer.end()
                writer.join()
        except KeyboardInterrupt:
            return

    def _on_broken(self, fd: int) -> None:
        if fd == self._out_fd and self._job:
            what = "all that the job printed" if self._is_closing else "the job goes on"
            self.say("stdout is closed; %s: distrun logs %s" % (what, self._job))

    def _find_log(self, task: str) -> Path | None:
        return self._log_path(task) if self._log_path else None


class _Feeds:
    """Makes the feed of a task's stream."""

    def __init__(self, has_prefix: bool, coloured: Mapping[int, bool], live: Mapping[int, bool]) -> None:
        self._has_prefix = has_prefix
        self._coloured = coloured
        self._live = live

    def make(self, piece: Piece) -> Feed:
        before = b""
        if self._has_prefix:
            before = prefix(piece.task, piece.host, piece.stream == "err", self._coloured[piece.fd])
        return Feed(before, terminal=os.isatty(piece.fd), live=self._live[piece.fd])


def print_out(text: str) -> None:
    """Print to stdout from a command that runs no job; a reader that went away is no error."""
    _print_plain(1, text)


def print_err(text: str) -> None:
    """Print to stderr from a command that runs no job."""
    _print_plain(2, text)


def is_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return os.isatty(1)


def width() -> int:
    """Return how many columns there are for a table on stdout."""
    return shutil.get_terminal_size().columns if is_terminal() else WIDE


def render(table: Table) -> str:
    """Return a rich table as text: in the terminal's width and colours, or plain and as wide as it needs."""
    from rich.console import Console as RichConsole

    terminal = is_terminal()
    console = RichConsole() if terminal else RichConsole(width=WIDE, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return "".join(line.rstrip() + "\n" for line in capture.get().splitlines())


def live(make: Callable[[], Table], goes_on: Callable[[], bool], interval_s: float) -> None:
    """Show a table again and again until `goes_on` says no or Ctrl-C, and then once more, to stay.

    On a terminal's second screen, so that neither a redraw nor the ^C leaves a trace. Elsewhere only the last is shown.
    """
    if not is_terminal():
        while goes_on():
            time.sleep(interval_s)
    else:
        from rich.live import Live

        shown = Live(_watched(make()), auto_refresh=False, screen=True)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                shown.start(refresh=True)
                while goes_on():
                    time.sleep(interval_s)
                    shown.update(_watched(make()), refresh=True)
        finally:
            # Not `with`: a Ctrl-C during the first picture would leave the terminal on its second screen.
            shown.stop()
    print_out(render(make()))


def _watched(table: Table) -> Table:
    table.caption, table.caption_justify = "Ctrl-C ends this view", "left"
    return table


def copy_out(data: bytes) -> bool:
    """Write bytes to stdout unchanged; return False when nobody reads any more."""
    return _print_plain(1, data)


def _print_plain(fd: int, text: str | bytes) -> bool:
    stream = sys.stdout if fd == 1 else sys.stderr
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()
    view = memoryview(encode(text) if isinstance(text, str) else text)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [], 1.0)
        except OSError:
            return False
    return True


def _same_file(one: int, other: int) -> bool:
    try:
        a, b = os.fstat(one), os.fstat(other)
    except OSError:
        return False
    return (a.st_dev, a.st_ino, a.st_rdev) == (b.st_dev, b.st_ino, b.st_rdev)
