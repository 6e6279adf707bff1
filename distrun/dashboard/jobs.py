"""The live table of jobs, from which the user can open one."""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distrun.dashboard import keys, rows, text
from distrun.dashboard.loop import Ended, Signals
from distrun.dashboard.model import Model
from distrun.dashboard.terminal import Terminal
from distrun.dashboard.text import Glyphs, Line
from distrun_runtime.contract import facts

INTERVAL_S = 1.0
ENDS = "q or Ctrl-C ends this view"


@dataclass(frozen=True)
class JobsLook:
    """What of the table is looked at."""

    chosen: str = ""
    first: int = 0
    message: str = ""


def picture(
    models: Sequence[Model], look: JobsLook, columns: int, height: int, glyphs: Glyphs, *, now: float
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
        is_ascii: marks are ASCII.
    """

    def __init__(
        self,
        read: Callable[[], Sequence[Model]],
        terminal: Terminal,
        signals: Signals,
        *,
        is_ascii: bool = False,
    ) -> None:
        self._read = read
        self._terminal = terminal
        self._signals = signals
        self._glyphs = text.ASCII if is_ascii else text.UNICODE
        self._decoder = keys.KeyDecoder()
        self._look = JobsLook()
        self._ids: list[str] = []
        self._room = 1

    def say(self, message: str) -> None:
        """Show a message until the next key."""
        self._look = JobsLook(self._look.chosen, self._look.first, message)

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
            limit_s = max(0.0, next_s - time.monotonic())
            if self._decoder.is_waiting:
                limit_s = min(limit_s, keys.ESCAPE_S)
            terminal = self._terminal
            writing = [terminal.out] if terminal.is_behind else []
            ready, writable, _ = select.select([terminal.keys, self._signals.wakeup], writing, [], limit_s)
            if writable:
                terminal.flush()
            found: Ended | str | None = self._take_signals() if self._signals.wakeup in ready else None
            if found is None and terminal.keys in ready:
                data = terminal.read()
                found = Ended(0, signal.SIGHUP) if data is None else self._press(self._decoder.feed(data))
                next_s = 0.0
            elif not ready and self._decoder.is_waiting:
                found = self._press(self._decoder.expire())
                next_s = 0.0
            if found is not None:
                return found
            if self._signals.wakeup in ready:
                next_s = 0.0

    def _take_signals(self) -> Ended | None:
        for each in self._signals.take():
            if each == signal.SIGINT:
                return Ended(0)
            if each in (signal.SIGTERM, signal.SIGHUP):
                return Ended(0, each)
            if each == signal.SIGTSTP:
                self._terminal.suspend()
                self._signals.take()
            elif each == signal.SIGCONT:
                self._terminal.again()
        return None

    def _press(self, pressed: Sequence[str]) -> Ended | str | None:
        for key in pressed:
            self.say("")
            at = self._ids.index(self._look.chosen) if self._look.chosen in self._ids else 0
            steps = {"up": -1, "k": -1, "down": 1, "j": 1, "pgup": -self._room, "pgdn": self._room}
            steps.update(home=-at, end=len(self._ids))
            if key in ("q", "esc"):
                return Ended(0)
            if key == "enter" and self._ids:
                return self._ids[at]
            if key == "ctrl-l":
                self._terminal.redraw()
            elif key in steps and self._ids:
                chosen = self._ids[max(0, min(len(self._ids) - 1, at + steps[key]))]
                self._look = JobsLook(chosen, self._look.first)
        return None

    def _draw(self, models: Sequence[Model]) -> None:
        if self._terminal.is_behind and not self._terminal.flush():
            return
        self._ids = [each.job.id for each in models]
        columns, height = self._terminal.size()
        lines, first, self._room = picture(models, self._look, columns, height, self._glyphs, now=time.time())
        self._look = JobsLook(self._look.chosen, first, self._look.message)
        self._terminal.draw(lines)
