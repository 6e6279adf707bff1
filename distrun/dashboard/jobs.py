"""The live table of jobs, from which the user can open one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from distrun.dashboard import rows, text
from distrun.dashboard.loop import Ended, Input, Signals, ending, first_connection, show
from distrun.dashboard.model import Model
from distrun.dashboard.terminal import Appearance, Terminal
from distrun.dashboard.text import Glyphs, Line
from distrun.dashboard.user import MOVES, ViewSelection, moved
from distrun.errors import DistrunError
from distrun.jobs import THERE_S, JobView
from distrun.jobs import look as look_at
from distrun_runtime.contract import facts

if TYPE_CHECKING:
    from distrun_runtime.coordinator.jobfolder import JobFolder

INTERVAL_S = 1.0
ENDS = "q or Ctrl-C ends this view"


def watch(read: Callable[[], Sequence[Model]], find: Callable[[str], JobFolder], look: Appearance) -> Ended:
    """Show a table of jobs on the terminal, of which the user can open one, until the user leaves.

    Args:
        read: returns the jobs that are shown.
        find: returns the folder of the job with an id.
        look: how it is drawn.
    """
    with Signals() as signals, Terminal(look=look) as terminal:
        jobs = JobsScreen(read, terminal, signals)
        while True:
            chosen = jobs.run()
            if isinstance(chosen, Ended):
                return chosen
            folder = find(chosen)
            try:
                connection = first_connection(folder)
            except DistrunError as err:
                jobs.say(str(err))
                continue
            ended = show(folder, connection, terminal, signals)
            if ended.signal is not None:
                return ended


def picture(
    models: Sequence[Model], look: ViewSelection, columns: int, height: int, glyphs: Glyphs, *, now: float
) -> tuple[list[Line], int, int]:
    """Return the lines of the table, its first visible row and how many rows are visible. No side effects.

    Args:
        models: the jobs.
        look: what is looked at.
        columns: of the terminal.
        height: rows of the terminal.
        glyphs: of charts and marks.
        now: wall clock, seconds.
    """
    running = sum(each.job.state in facts.GOING for each in models)
    head: list[Line] = [((f"jobs {len(models)}", text.BOLD), (f": {running} running", text.PLAIN))]
    ids = [each.job.id for each in models]
    at_row = ids.index(look.chosen) if look.chosen in ids else 0
    room = max(1, height - len(head) - 3)
    first = max(0, min(look.first, at_row, len(ids) - room))
    first = at_row - room + 1 if at_row >= first + room else first
    visible = models[first : first + room]
    table = rows.jobs(visible, columns, now, glyphs, has_marks=True)
    lines = [*head, table.heading()]
    lines += [table.line(number, first + number == at_row) for number in range(len(visible))]
    if not ids:
        lines.append((("no jobs yet", text.DIM),))
    hidden = len(ids) - min(room, len(ids))
    lines += [()] * (height - 2 - len(lines))
    lines.append(((f"  {hidden} more" if hidden else "", text.DIM),))
    bottom = look.message or f"{glyphs.arrows} Enter show the job  {ENDS}"
    lines.append(((text.clean(bottom), text.YELLOW if look.message else text.DIM),))
    return [text.cut(line, columns, glyphs.ellipsis) for line in lines[:height]], first, room


class JobsScreen:
    """The table on a terminal.

    Arguments:
        read: returns the jobs that are shown.
        terminal: taken already.
        signals: entered already.
    """

    def __init__(self, read: Callable[[], Sequence[Model]], terminal: Terminal, signals: Signals) -> None:
        self._read = read
        self._terminal = terminal
        self._input = Input(terminal, signals)
        self._look = ViewSelection()
        self._ids: list[str] = []
        self._room = 1

    def say(self, message: str) -> None:
        """Show a message until the next key."""
        self._look = replace(self._look, message=message)

    def run(self) -> Ended | str:
        """Show the table until the user chooses a job, whose id is returned, or leaves."""
        self._terminal.redraw()
        next_s, read_s = 0.0, 0.0
        models: Sequence[Model] = ()
        while True:
            now = time.monotonic()
            if now >= read_s:
                models, read_s = self._read(), now + INTERVAL_S
            if now >= next_s:
                self._draw(models)
                next_s = read_s
            came = self._input.wait(next_s)
            found = ending(came, 0) or self._press([each for each in came if not isinstance(each, signal.Signals)])
            if found is not None:
                return found
            if came:
                next_s = 0.0

    def _press(self, pressed: Sequence[str]) -> Ended | str | None:
        for key in pressed:
            self.say("")
            at = self._ids.index(self._look.chosen) if self._look.chosen in self._ids else 0
            if key in ("q", "esc"):
                return Ended(0)
            if key == "enter" and self._ids:
                return self._ids[at]
            if key == "ctrl-l":
                self._terminal.redraw()
            elif key in MOVES and self._ids:
                chosen = self._ids[moved(key, at, len(self._ids) - 1, self._room)]
                self._look = replace(self._look, chosen=chosen)
        return None

    def _draw(self, models: Sequence[Model]) -> None:
        if self._terminal.is_behind and not self._terminal.flush():
            return
        self._ids = [each.job.id for each in models]
        columns, height = self._terminal.size()
        lines, first, self._room = picture(models, self._look, columns, height, self._terminal.glyphs, now=time.time())
        self._look = replace(self._look, first=first)
        self._terminal.draw(lines)


class Background:
    """Looks at jobs again and again, in a thread of its own, so that who shows them never waits.

    `read` returns the jobs; it is called in that thread and once in the first thread that asks.
    """

    def __init__(self, read: Callable[[], Iterable[JobFolder]], interval_s: float = 1.0) -> None:
        self._read = read
        self._interval_s = interval_s
        self._views: Sequence[JobView] | None = None
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)

    def views(self) -> Sequence[JobView]:
        """Return how the jobs stood at the last look; at first what the job store knows. Never waits for a host."""
        if not self._thread.is_alive():
            self._thread.start()
        views = self._views
        return [JobView(folder, folder.shown()) for folder in self._read()] if views is None else views

    def _run(self) -> None:
        while True:
            views = look_at(self._read())
            self._views = views
            time.sleep(self._interval_s if all(view.is_here for view in views) else max(self._interval_s, THERE_S))
