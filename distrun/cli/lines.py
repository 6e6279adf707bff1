"""Turns the bytes of one stream into what is printed: whole prefixed lines, or the bytes unchanged. No side effects.

A progress bar overwrites its line with carriage returns and ends it with a newline only when it is done. Its latest
state is shown meanwhile: as a line, once a second; or, on a terminal that can move its cursor, in a place at the bottom
that is drawn again (`Live`). Bars below each other (tqdm's nested ones) move the cursor up; so each stream has rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

LINE_LIMIT = 1024 * 1024
"""A line is cut after so many bytes; what follows is a line of its own."""
HOLD_S = 0.2
"""How long bytes without a newline are held back when nothing may be changed, so that lines stay whole. How long after
a carriage return a newline may follow that makes both a line's end, as in Windows texts."""
PROGRESS_S = 1.0
"""How often a progress bar is shown as a line."""
SETTLE_S = 0.05
"""The state of a bar is whole when nothing was added to it for so long: it may have been read in two pieces."""
DRAW_S = 0.1
"""How often bars are drawn again in place, at most."""
ROWS = 64
"""Rows of one stream that may still be changed, at most."""

_RESET = b"\x1b[0m"
_UP = re.compile(rb"\x1b\[\d*[AF]")
_MARK = re.compile(rb"(\n|\r|\x1b\[\d*[AF])")
_CUT_OFF = re.compile(rb"\x1b(\[\d{0,4})?\Z")
"""An escape sequence whose end has not come yet."""
_MOVE = re.compile(rb"\x1b\[[\d;]*[A-HJKSTf]")
"""Moves the cursor or erases: behind a prefix it would spoil the lines of other tasks."""
_ESCAPE = re.compile(r"\x1b\[[\d;?]*[@-~]|\x1b.?")

NAMES = {"worker": (32, 166, 28, 133, 100, 63, 30, 163, 130, 97, 64, 168), "server": (67,), "scheduler": (94,)}
"""Colours of prefixes, of the 256 that terminals have; tasks of a role take them in turn. Each can be read on black and
on white: its contrast to both is at least 3.4 (WCAG)."""
STDERR = 160
"""Colour of the bar behind the name where the line came from stderr."""


def prefix(task: str, host: str, is_error: bool = False, coloured: bool = False) -> bytes:
    """Return what stands before each line of a task: `worker-1@d2 | `. The same task has the same colour always.

    With colours, the bar of lines that came from stderr is red.
    """
    name = (f"{task}@{host}").encode("utf-8", "surrogateescape")
    if not coloured:
        return name + b" | "
    role, _, rank = task.partition("-")
    colours = NAMES.get(role, NAMES["worker"])
    bar = _colour(STDERR) + b"|" + _RESET if is_error else b"|"
    return b"%s%s%s %s " % (_colour(colours[int(rank) % len(colours) if rank.isdecimal() else 0]), name, _RESET, bar)


def in_order(task: str, stream: str) -> tuple[str, int, str]:
    """Return a key that sorts streams by task, role and rank."""
    role, _, rank = task.partition("-")
    return role, int(rank) if rank.isdecimal() else 0, stream


def _colour(number: int) -> bytes:
    return b"\x1b[38;5;%dm" % number


@dataclass
class _ScreenRow:
    """One line of a stream that has not ended, as a terminal would show it."""

    text: bytes = b""
    """Since the last carriage return."""
    before: bytes = b""
    """What stood there before it."""
    is_bar: bool = False
    """Something was written after a carriage return."""
    written_at: float = float("-inf")
    returned_at: float | None = None
    """When the carriage return came that nothing has followed yet."""
    left_at: float | None = None
    """When the cursor went to a row below."""
    shown: bytes = b""
    """The state that was printed as a line."""
    shown_at: float = float("-inf")

    @property
    def visible(self) -> bytes:
        return self.text or self.before

    def write(self, text: bytes, now: float) -> None:
        self.is_bar = self.is_bar or self.returned_at is not None
        self.returned_at = None
        self.text += text
        self.written_at = now

    def start_over(self) -> None:
        if self.text:
            self.text, self.before = b"", self.text

    def go_back(self, now: float) -> None:
        self.start_over()
        if self.returned_at is None:
            self.returned_at = now

    def state(self, now: float) -> bytes:
        """Return what a bar shows; empty if it is none, or blank."""
        if not self.is_bar and (self.returned_at is None or now < self.returned_at + HOLD_S):
            return b""
        state = self.text if self.text and now >= self.written_at + SETTLE_S else self.before
        return state if _still(state).strip() else b""

    def state_at(self, now: float) -> list[float]:
        """Return when its state may change although nothing more arrives: one time or none."""
        if self.returned_at is not None and not self.is_bar:
            return [self.returned_at + HOLD_S] if now < self.returned_at + HOLD_S else []
        return [self.written_at + SETTLE_S] if self.is_bar and self.text and now < self.written_at + SETTLE_S else []


@dataclass
class Feed:
    """One stream of one task.

    With a `prefix` each line gets it, and a line that was overwritten by carriage returns is printed as a terminal
    would show it in the end. Without one, the bytes go through unchanged.

    `live`: the state of bars is not printed as lines; the caller shows `bars` in its own way.
    """

    prefix: bytes
    terminal: bool = False
    live: bool = False
    _rows: list[_ScreenRow] = field(default_factory=lambda: [_ScreenRow()])
    """The last one is the lowest; above the cursor are rows that may have ended."""
    _at: int = 0
    _moves_up: bool = False
    """The cursor has gone up before: a bar's newline may be a step down to the next bar."""
    _rest: bytes = b""
    _held_since: float = 0.0
    _shown_at: float = float("-inf")

    def feed(self, data: bytes, now: float) -> bytes:
        """Add what arrived; return what is to be printed now."""
        if not self.prefix:
            return self._feed_raw(data, now)
        data, self._rest = self._rest + data, b""
        cut = _CUT_OFF.search(data, max(0, len(data) - 8))
        if cut is not None:
            data, self._rest = data[: cut.start()], data[cut.start() :]
        row = self._rows[0]
        is_plain = len(self._rows) == 1 and not (row.is_bar or row.before or row.returned_at is not None)
        if is_plain and b"\r" not in data and not _UP.search(data):
            whole, newline, tail = data.rpartition(b"\n")
            if newline:
                lines, row.text = self._lines(row.text + whole), tail
            else:
                lines, row.text = b"", row.text + tail
        else:
            lines = b"".join([self._take_mark(mark, now) for mark in _MARK.split(data) if mark])
        return lines + self._long_rows() + self.due(now)

    def due(self, now: float) -> bytes:
        """Return what must not wait longer: held bytes, rows that have ended, or the state of a progress bar."""
        if not self.prefix:
            is_due = bool(self._rows[0].text) and now >= self._held_since + HOLD_S
            return self._take_raw() if is_due else b""
        lines = b""
        while self._at and now >= (self._rows[0].left_at or 0.0) + HOLD_S:
            lines += self._end_rows(1, now)
        for row in self._rows if not self.live else ():
            state = row.state(now)
            if state and state != row.shown and now >= row.shown_at + PROGRESS_S:
                row.shown, row.shown_at = state, now
                self._shown_at = now
                lines += self._line(state)
        return lines

    def wait_s(self, now: float) -> float | None:
        """Return how long until `due`, or `bars`, may have something; None: not before more arrives."""
        if not self.prefix:
            return max(0.0, self._held_since + HOLD_S - now) if self._rows[0].text else None
        times = [(self._rows[0].left_at or 0.0) + HOLD_S] if self._at else []
        for row in self._rows:
            times += row.state_at(now)
            if not self.live and row.state(now) not in (b"", row.shown):
                times.append(row.shown_at + PROGRESS_S)
        return max(0.0, min(times) - now) if times else None

    def bars(self, now: float) -> list[bytes]:
        """Return the lines that show the running bars as they stand."""
        if not self.prefix:
            return []
        states = [row.state(now) for row in self._rows]
        return [self.prefix + _still(state) for state in states if state]

    def flush(self) -> bytes:
        """Return what is left when the stream is over; a last line without a newline gets one with a prefix."""
        if not self.prefix:
            return self._take_raw()
        self._rows[self._at].text += self._rest
        self._rest = b""
        rows, self._rows, self._at = self._rows, [_ScreenRow()], 0
        return b"".join([self._ended(row) for row in rows if (row.visible.strip() if row.is_bar else row.visible)])

    def _feed_raw(self, data: bytes, now: float) -> bytes:
        row = self._rows[0]
        if not row.text:
            self._held_since = now
        whole, newline, row.text = (row.text + data).rpartition(b"\n")
        if newline:
            self._held_since = now
        too_long = self._take_raw() if len(row.text) > LINE_LIMIT else b""
        return whole + newline + too_long + self.due(now)

    def _take_raw(self) -> bytes:
        row = self._rows[0]
        tail, row.text = row.text, b""
        return tail

    def _take_mark(self, mark: bytes, now: float) -> bytes:
        """Take text, a carriage return, a newline or a step up; return the lines that have ended."""
        row = self._rows[self._at]
        if mark == b"\r":
            row.go_back(now)
        elif mark == b"\n":
            return self._go_down(row, now)
        elif _UP.fullmatch(mark):
            self._go_up(int(mark[2:-1] or b"1"))
        else:
            row.write(mark, now)
        return b""

    def _go_down(self, row: _ScreenRow, now: float) -> bytes:
        is_lowest = self._at == len(self._rows) - 1
        if is_lowest and not (self._moves_up and row.is_bar):
            return self._end_rows(self._at + 1, now)
        row.left_at = now
        self._at += 1
        if is_lowest or not self._rows[self._at].visible.strip():
            self._rows[self._at :] = [_ScreenRow(shown_at=self._shown_at), *self._rows[self._at + 1 :]]
        else:
            self._rows[self._at].start_over()
        return self._end_rows(1, now) if len(self._rows) > ROWS else b""

    def _go_up(self, count: int) -> None:
        self._moves_up = True
        missing = min(count - self._at, ROWS - len(self._rows))
        if missing > 0:
            # These rows were taken for ended ones: nothing had shown by then that the cursor would come back.
            self._rows[:0] = [_ScreenRow(shown_at=self._shown_at) for _ in range(missing)]
            self._at += missing
        for row in self._rows[max(0, self._at - count) :]:
            row.left_at = None
        self._at = max(0, self._at - count)

    def _end_rows(self, count: int, now: float) -> bytes:
        """End the upper rows; return them as lines."""
        ended, self._rows = self._rows[:count], self._rows[count:]
        self._at = max(0, self._at - count)
        if any(row.is_bar for row in ended):
            self._shown_at = now
        if not self._rows:
            self._rows = [_ScreenRow(shown_at=self._shown_at)]
        return b"".join([self._ended(row) for row in ended])

    def _ended(self, row: _ScreenRow) -> bytes:
        """Return the line that a row has become; nothing if it was printed already as a bar's last state."""
        return b"" if row.shown and row.visible == row.shown else self._line(row.visible)

    def _long_rows(self) -> bytes:
        row = self._rows[self._at]
        if len(row.text) <= LINE_LIMIT:
            return b""
        line, row.text = self._line(row.text), b""
        return line

    def _lines(self, whole: bytes) -> bytes:
        return b"".join([self._line(line) for line in whole.split(b"\n")])

    def _line(self, line: bytes) -> bytes:
        if b"\x1b" in line:
            line = _still(line)
            line += _RESET if self.terminal else b""
        return self.prefix + line + b"\n"


def _still(line: bytes) -> bytes:
    return _MOVE.sub(b"", line) if b"\x1b" in line else line


class Live:
    """Lines at the bottom of a terminal that are drawn again in place. Returns the bytes that do it."""

    def __init__(self) -> None:
        self._drawn: list[bytes] = []

    def erase(self) -> bytes:
        """Take the lines away, so that others can be printed in their place."""
        count, self._drawn = len(self._drawn), []
        return b"\r\x1b[%dA\x1b[J" % count if count else b""

    def draw(self, lines: Sequence[bytes], columns: int, rows: int) -> bytes:
        """Show these lines in place of the ones before; nothing if they are the same. They are cut to the terminal."""
        room = max(1, rows - 2)
        if len(lines) > room:
            lines = [*lines[: room - 1], b"... and %d more progress bars" % (len(lines) - room + 1)]
        cut = [clip(line, columns - 1) for line in lines]
        if cut == self._drawn:
            return b""
        up = b"\r\x1b[%dA" % len(self._drawn) if self._drawn else b""
        less = b"\x1b[J" if len(cut) < len(self._drawn) else b""
        self._drawn = cut
        return up + b"".join(line + b"\x1b[K\n" for line in cut) + less

    def forget(self) -> None:
        """Leave the lines where they are: something else was written below them."""
        self._drawn = []


def clip(line: bytes, columns: int) -> bytes:
    """Return as much of a line as fits into so many columns of a terminal; colours stay, and end with the line."""
    text = line.decode("utf-8", "replace")
    if text.isascii() and text.isprintable():
        return line[:columns]
    import unicodedata  # for such lines only: it is large

    parts: list[str] = []
    at = 0
    while at < len(text):
        escape = _ESCAPE.match(text, at)
        if escape is not None:
            parts.append(escape.group() if escape.group().endswith("m") else "")
            at = escape.end()
            continue
        character = text[at] if text[at].isprintable() else " "
        wide = 0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if wide > columns:
            break
        columns -= wide
        parts.append(character)
        at += 1
    return "".join(parts).encode() + (_RESET if "\x1b" in text else b"")
