"""The live table of jobs, from which the user can open one."""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from distrun import formats
from distrun.dashboard import keys, read, text
from distrun.dashboard.loop import Ended, Signals
from distrun.dashboard.tasks import STYLES
from distrun.dashboard.terminal import Terminal
from distrun.dashboard.text import Glyphs, Line
from distrun_runtime.contract import facts

INTERVAL_S = 1.0
ENDS = "q or Ctrl-C ends this view"
GAP = "  "
DISPENSABLE = (6, 2, 5, 4)
"""Columns that are left out where there is no room, the first one first."""
COMMAND_LEAST = 12


@dataclass(frozen=True)
class JobsLook:
    """What of the table is looked at."""

    chosen: str = ""
    first: int = 0
    message: str = ""


def picture(
    states: Sequence[Mapping[str, object]], look: JobsLook, columns: int, height: int, glyphs: Glyphs, *, now: float
) -> tuple[list[Line], int, int]:
    """Return the lines of the table, its first visible row and how many rows are visible. No side effects.

    Args:
        states: the jobs as `JobFolder.shown` gives them.
        look: what is looked at.
        columns: of the terminal.
        height: rows of the terminal.
        glyphs: of charts and marks.
        now: wall clock, seconds.
    """
    table = [
        ("JOB", "STATE", "CODE", "NAME", "TASKS", "TIME", "HOSTS", "COMMAND"),
        *(_cells(each, now) for each in states),
    ]
    widths = [max(text.width(row[at]) for row in table) for at in range(len(table[0]))]
    shown = [at for at in range(len(widths)) if at in (0, 1, 7) or any(row[at] for row in table[1:])]
    for at in DISPENSABLE:
        if 2 + sum(widths[each] + len(GAP) for each in shown[:-1]) + COMMAND_LEAST > columns and at in shown:
            shown.remove(at)
    running = sum(each.get("state") in facts.GOING for each in states)
    head: list[Line] = [((f"jobs {len(states)}", text.BOLD), (f": {running} running", text.PLAIN))]
    ids = [row[0] for row in table[1:]]
    at_row = ids.index(look.chosen) if look.chosen in ids else 0
    room = max(1, height - len(head) - 3)
    first = max(0, min(look.first, at_row, len(ids) - room))
    first = at_row - room + 1 if at_row >= first + room else first
    lines = [*head, _line(table[0], widths, shown, "", style=text.BOLD, glyphs=glyphs)]
    for number in range(first, min(first + room, len(ids))):
        mark = glyphs.mark if number == at_row else ""
        lines.append(_line(table[number + 1], widths, shown, mark, style="", glyphs=glyphs))
    if not ids:
        lines.append((("no jobs yet", text.DIM),))
    hidden = len(ids) - min(room, len(ids))
    lines += [()] * (height - 2 - len(lines))
    lines.append(((f"  {hidden} more" if hidden else "", text.DIM),))
    bottom = look.message or f"{glyphs.arrows} Enter show the job  {ENDS}"
    lines.append(((text.clean(bottom), text.YELLOW if look.message else text.DIM),))
    return [text.cut(line, columns, glyphs.ellipsis) for line in lines[:height]], first, room


def _line(
    row: Sequence[str], widths: Sequence[int], shown: Sequence[int], mark: str, *, style: str, glyphs: Glyphs
) -> Line:
    spans = [(mark.ljust(2), text.BOLD)]
    for at in shown:
        word_style = STYLES.get(row[1], text.PLAIN) if at == 1 and not style else style
        if at == 0 and mark:
            word_style = text.CHOSEN
        spans += [(text.fit(row[at], widths[at], glyphs.ellipsis) if at != shown[-1] else row[at], word_style)]
        spans.append((GAP, text.PLAIN))
    return tuple(spans[:-1])


def _cells(state: Mapping[str, object], now: float) -> tuple[str, ...]:
    created = read.moment(state.get("created"))
    word = read.text(state.get("state"))
    until = read.moment(state.get("finished"))
    if until is None and word not in facts.LIVE:
        until = read.moment(state.get("heard")) or read.moment(state.get("updated"))
    tasks = read.objects(state.get("tasks"))
    counts = [(sum(task.get("state") == each for task in tasks), each) for each in ("running", "failed", "lost")]
    code = read.whole(state.get("exit_code"))
    command = formats.join(read.texts(state.get("command")))
    return (
        read.text(state.get("id")),
        word,
        "" if code is None else str(code),
        text.clean(read.text(state.get("name"))),
        formats.counted(len(tasks), counts) if tasks else "",
        "" if created is None else formats.elapsed((now if until is None else until) - created),
        str(len(read.texts(state.get("hosts"))) or ""),
        text.clean(command or read.text(state.get("message"))),
    )


class JobsScreen:
    """The table on a terminal.

    Arguments:
        read_states: returns the states of the jobs that are shown.
        terminal: taken already.
        signals: entered already.
        is_ascii: marks are ASCII.
    """

    def __init__(
        self,
        read_states: Callable[[], Sequence[Mapping[str, object]]],
        terminal: Terminal,
        signals: Signals,
        *,
        is_ascii: bool = False,
    ) -> None:
        self._read = read_states
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
        states: Sequence[Mapping[str, object]] = ()
        while True:
            now = time.monotonic()
            if now >= read_s:
                states, read_s = self._read(), now + INTERVAL_S
            if now >= next_s:
                self._draw(states)
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

    def _draw(self, states: Sequence[Mapping[str, object]]) -> None:
        if self._terminal.is_behind and not self._terminal.flush():
            return
        self._ids = [read.text(state.get("id")) for state in states]
        columns, height = self._terminal.size()
        lines, first, self._room = picture(states, self._look, columns, height, self._glyphs, now=time.time())
        self._look = JobsLook(self._look.chosen, first, self._look.message)
        self._terminal.draw(lines)
