"""The output of tasks as lines: rows that a terminal would show, order, prefixes. No side effects.

A progress bar overwrites its line with carriage returns, and nested bars (tqdm) move the cursor up. `Screen` keeps the
rows that may still change and returns finished rows as lines. It differs from a terminal in one way: text after a
carriage return replaces the whole row, whatever its length, because that is what programs mean by it.

Of control sequences, only colours (SGR) are kept. All other sequences and control characters are obeyed or dropped, so
that no task can move the cursor, or change the title or the character set of the user's terminal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import field
from typing import NamedTuple

from distrun.dashboard.text import width as columns_of
from distrun_runtime.contract.dataclass import dataclass

ROWS = 10
"""Rows of one stream that may still be changed, at most."""
HOLD_S = 0.2
"""How long after a carriage return a newline may follow that makes both a line's end, as in Windows texts; and how long
the cursor may stay below a row before the row has become a line."""
SETTLE_S = 0.05
"""The state of a bar is complete if nothing was added for this time: it may have been read in two pieces."""
STRING_LIMIT = 4096
"""Bytes of a title or another string for the terminal; what follows is text."""
KEEP_S = 1.0
"""The same for the row of a bar below which the cursor stays: it is likely to go up again."""
BACK_LIMIT = 4096
"""Backspaces in a row of text that is longer are ignored."""

ESCAPE, BACKSPACE = 27, 8
_COLOUR = rb"\x1b\[[\d;:]*m"
_MOVE = rb"\x1b\[\d{0,9}[ABEFJK]"
_STRING = rb"\x1b[\]PX^_][^\x07\x1b\r\n]{0,%d}" % STRING_LIMIT
_DROPPED = re.compile(
    # Kept: colours, and what the rows obey. The rest: sequences in order of length, then single characters.
    rb"(%s|%s)" % (_COLOUR, _MOVE)
    + rb"|\x1b\[[\x20-\x3f]*[\x40-\x7e]?"
    + rb"|%s(?:\x07|\x1b\\)?" % _STRING
    + rb"|\x1b[\x20-\x2f]*[\x30-\x7e]?"
    + rb"|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]+"
)
_CUT_OFF = re.compile(rb"(?:\x1b\[[\x20-\x3f]{0,%d}|\x1b[\x20-\x2f]*|%s\x1b?)\Z" % (STRING_LIMIT, _STRING))
"""A sequence whose end has not come yet."""
_KEPT = re.compile(rb"%s|%s" % (_COLOUR, _MOVE))
_MARK = re.compile(rb"(\n|\r|\x08+|%s)" % _MOVE)
_UPS = re.compile(rb"\x1b\[\d{0,9}[AF]")
_MOVES = re.compile(_MOVE)
_EIGHT_BITS = re.compile(rb"\xc2[\x80-\x9f]")
_UNSHOWN = re.compile(rb"(%s)|\x1b|\xc2[\x80-\x9f]" % _COLOUR)
_CELL = re.compile(rb"%s|[\xc0-\xff][\x80-\xbf]+|." % _COLOUR, re.DOTALL)
_COLOURS = re.compile(_COLOUR)
SMALL = 2048
_UNKEPT = bytes({*range(32), 0x7F} - set(b"\t\n\r\b\x1b"))


def _has_none(data: bytes, characters: bytes) -> bool:
    """Return whether data has none of these characters."""
    if len(data) < SMALL:
        return len(data.translate(None, characters)) == len(data)
    return not any(character in data for character in characters)  # faster there


def is_lines(cleaned: bytes) -> bool:
    """Return whether what `Screen.clean` returned moves no cursor, but for newlines."""
    if b"\r" in cleaned or b"\b" in cleaned:
        return False
    return b"\x1b" not in cleaned or _MOVES.search(cleaned) is None


def shown(text: bytes) -> bytes:
    """Return text without any control sequence but colours.

    The 8-bit ones too (0x80 to 0x9f, in UTF-8): some terminals obey them.
    """
    while (b"\x1b" in text and len(_COLOURS.findall(text)) != text.count(b"\x1b")) or (
        b"\xc2" in text and _EIGHT_BITS.search(text)
    ):
        text = _UNSHOWN.sub(rb"\1", text)
    return text


def is_blank(text: bytes) -> bool:
    """Return whether nothing of a text is seen."""
    return not (shown(_COLOURS.sub(b"", text)) if b"\x1b" in text else text).strip()


@dataclass
class ScreenRow:
    """One line of a stream that has not ended, as a terminal would show it."""

    text: bytes = b""
    """Since the last carriage return."""
    before: bytes = b""
    """What stood there before it."""
    is_bar: bool = False
    """Something was written over what stood there."""
    written_at: float = float("-inf")
    returned_at: float | None = None
    """When the carriage return came that nothing has followed yet."""
    left_at: float | None = None
    """When the cursor went to a row below."""
    back: int = 0
    """Columns that backspaces have moved the cursor back."""
    printed: bytes = b""
    """The state that was printed as a line."""
    printed_at: float = float("-inf")

    @property
    def visible(self) -> bytes:
        """What a terminal would show."""
        return self.text or self.before

    def write(self, text: bytes, now: float) -> None:
        """Add text where the cursor is."""
        self.is_bar = self.is_bar or self.returned_at is not None
        self.returned_at = None
        if self.back:
            self._go_over()
        self.text += text
        self.written_at = now

    def _go_over(self) -> None:
        """Remove the characters that backspaces have gone back over, with the colours around them."""
        back, self.back = self.back, 0
        self.is_bar = True
        if len(self.text) > BACK_LIMIT:
            return
        cells: list[bytes] = _CELL.findall(self.text)
        while back and cells:
            back -= cells.pop()[0] != ESCAPE
        while len(cells) > 1 and cells[-1][0] == cells[-2][0] == ESCAPE:
            del cells[-2]
        self.text = b"".join(cells)

    def start_over(self) -> None:
        """Put the cursor to the row's begin."""
        self.back = 0
        if self.text:
            self.text, self.before = b"", self.text

    def go_back(self, now: float) -> None:
        """Take a carriage return."""
        self.start_over()
        if self.returned_at is None:
            self.returned_at = now

    def erase(self, mode: int, now: float) -> None:
        """Take `CSI mode K`: 0 erases from the cursor on, 1 up to it, 2 all."""
        if mode == 0 and (self.text or not self.before):
            return
        if self.text or self.before:
            self.is_bar = True
        self.text = self.before = b""
        self.back = 0
        self.written_at = now

    def state(self, now: float) -> bytes:
        """Return what a bar shows; empty if it is none, or blank."""
        if not self.is_bar and (self.returned_at is None or now < self.returned_at + HOLD_S):
            return b""
        state = self.text if self.text and now >= self.written_at + SETTLE_S else self.before
        return b"" if is_blank(state) else state

    def state_at(self, now: float) -> list[float]:
        """Return when its state may change although nothing more arrives: one time or none."""
        if self.returned_at is not None and not self.is_bar:
            return [self.returned_at + HOLD_S] if now < self.returned_at + HOLD_S else []
        return [self.written_at + SETTLE_S] if self.is_bar and self.text and now < self.written_at + SETTLE_S else []


class Screen:
    """The rows of one stream that may still change, at most ROWS, and its cursor.

    Its methods return rows that have become lines, in their order.
    """

    def __init__(self) -> None:
        self.rows = [ScreenRow()]
        """The last one is the lowest; above the cursor are rows that may have ended."""
        self.printed_at = float("-inf")
        """When a state of a bar, or its end, was printed last: the next bar begins with it."""
        self.past: list[ScreenRow] = []
        """The last rows that have ended, if they stand directly above: a bar may be returned to."""
        self.at = 0
        """Which row the cursor is in."""
        self._moves_up = False
        """The cursor has gone up before: a bar's newline may be a step down to the next bar."""
        self._rest = b""
        """The beginning of a sequence whose end has not come."""

    @property
    def row(self) -> ScreenRow:
        """The row where the cursor is."""
        return self.rows[self.at]

    @property
    def is_line(self) -> bool:
        """Whether there is nothing but a line that has begun: no bar, no cursor that has moved."""
        row = self.rows[0]
        return len(self.rows) == 1 and not (row.is_bar or row.before or row.back or row.returned_at is not None)

    def clean(self, data: bytes) -> bytes:
        """Return what was written without what is dropped. A sequence that is cut off is kept until its end comes."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        escapes = data.count(b"\x1b")
        if _has_none(data, _UNKEPT) and (not escapes or len(_KEPT.findall(data)) == escapes):
            return data
        cut = data.rfind(b"\x1b", max(0, len(data) - STRING_LIMIT - 8))
        if cut >= 0:
            # A string may end by two characters, of which the first is an escape.
            before = data.rfind(b"\x1b", max(0, cut - STRING_LIMIT - 8), cut) if cut == len(data) - 1 else -1
            for start in (before, cut):
                if start >= 0 and _CUT_OFF.match(data, start):
                    data, self._rest = data[:start], data[start:]
                    break
        return _DROPPED.sub(rb"\1", data)

    def write(self, cleaned: bytes, now: float) -> list[ScreenRow]:
        """Take what `clean` returned."""
        if cleaned.rfind(b"\r") == 0 and not (b"\n" in cleaned or b"\b" in cleaned or b"\x1b" in cleaned):
            # The next state of a bar, by far the most frequent.
            row = self.rows[self.at]
            row.go_back(now)
            if len(cleaned) > 1:
                row.write(cleaned[1:], now)
            return []
        self._moves_up = self._moves_up or (b"\x1b" in cleaned and _UPS.search(cleaned) is not None)
        ended: list[ScreenRow] = []
        for mark in _MARK.split(cleaned):
            if mark:
                ended += self._take(mark, now)
        return ended

    def expire(self, now: float) -> list[ScreenRow]:
        """Return rows that the cursor has left for good."""
        ended: list[ScreenRow] = []
        while self.at and now >= self._ends_at:
            ended += self._end(1, now)
        return ended

    def expire_at(self) -> list[float]:
        """Return when `expire` may have something: one time or none."""
        return [self._ends_at] if self.at else []

    def flush(self) -> list[ScreenRow]:
        """Return what is left."""
        self._rest = b""
        rows, self.rows, self.at = self.rows, [ScreenRow()], 0
        return [row for row in rows if row.visible]

    @property
    def _ends_at(self) -> float:
        """When the upmost row has become a line if the cursor stays below it."""
        row = self.rows[0]
        return (row.left_at or 0.0) + (KEEP_S if row.is_bar else HOLD_S)

    def _take(self, mark: bytes, now: float) -> list[ScreenRow]:
        """Take text, a newline, or what moves the cursor or erases."""
        row, first = self.row, mark[0]
        if first > ESCAPE:
            row.write(mark, now)
        elif mark == b"\n":
            return self._go_down(row, now)
        elif mark == b"\r":
            row.go_back(now)
        elif first == BACKSPACE:
            row.back += len(mark) if row.text else 0
        elif first == ESCAPE and _MOVES.fullmatch(mark):
            self._obey(mark[-1:], mark[2:-1], now)
        else:
            row.write(mark, now)
        return []

    def _obey(self, what: bytes, number: bytes, now: float) -> None:
        is_at_start = not self.row.text
        if what in b"AF":
            self._go_up(int(number or b"1") or 1)
        elif what in b"BE":
            self.at = min(self.at + (int(number or b"1") or 1), len(self.rows) - 1)
            for row in self.rows[: self.at]:
                row.left_at = row.left_at or now
        elif what == b"K":
            self.row.erase(int(number or b"0"), now)
        else:
            self._erase_rows(int(number or b"0"), now)
        if what in b"EF":
            self.row.go_back(now)
        elif what in b"AB" and is_at_start:
            self.row.start_over()

    def _erase_rows(self, mode: int, now: float) -> None:
        """Take `CSI mode J`: 0 erases from the cursor on, 1 up to it, 2 and 3 all."""
        self.row.erase(min(mode, 2), now)
        if mode == 0:
            del self.rows[self.at + 1 :]
        for row in self.rows[: self.at] if mode == 1 else self.rows if mode else ():
            row.erase(2, now)

    def _go_down(self, row: ScreenRow, now: float) -> list[ScreenRow]:
        is_lowest = self.at == len(self.rows) - 1
        if is_lowest and not (self._moves_up and row.is_bar):
            return self._end(self.at + 1, now)
        row.left_at = now
        self.at += 1
        if is_lowest:
            self.rows.append(ScreenRow(printed_at=self.printed_at))
        elif is_blank(self.row.visible):
            self.rows[self.at] = ScreenRow(printed_at=self.printed_at, is_bar=self.row.is_bar)
        else:
            self.row.start_over()
        return self._end(1, now) if len(self.rows) > ROWS else []

    def _go_up(self, count: int) -> None:
        self._moves_up = True
        missing = min(count - self.at, ROWS - len(self.rows))
        if missing > 0:
            self.rows[:0] = self._taken_back(missing)
            self.at += missing
        top = max(0, self.at - count)
        for row in self.rows[top : self.at + 1]:
            row.is_bar = True
        for row in self.rows[top:]:
            row.left_at = None
        self.at = top

    def _taken_back(self, count: int) -> list[ScreenRow]:
        """Return rows that were taken for ended ones: nothing had shown by then that the cursor would come back."""
        found, self.past = self.past[-count:], self.past[:-count]
        rows = [ScreenRow(printed_at=self.printed_at) for _ in range(count - len(found))]
        for row in found:
            back = ScreenRow(printed_at=row.printed_at)
            if row.is_bar:
                back.text = back.printed = row.visible
            rows.append(back)
        return rows

    def _end(self, count: int, now: float) -> list[ScreenRow]:
        """End the upper rows."""
        ended, self.rows = self.rows[:count], self.rows[count:]
        self.at = max(0, self.at - count)
        if any(row.is_bar for row in ended):
            self.printed_at = now
        self.past = [*self.past, *ended][-ROWS:]
        if not self.rows:
            self.rows = [ScreenRow(printed_at=self.printed_at)]
        return ended


# Turns the bytes of one stream into printed text: whole lines with a prefix, or the bytes unchanged. No side effects.
#
# A progress bar overwrites its line with carriage returns and ends with a newline. Until then its latest state is
# shown: as a line once a second or, on a terminal that can move its cursor, in place at the bottom (`region`). `screen`
# models the rows of a stream that may still change.


LINE_LIMIT = 1024 * 1024
"""A longer line is cut after this many bytes. The rest is a line of its own."""
PROGRESS_S = 1.0
"""How often a progress bar is shown as a line."""

_RESET = b"\x1b[0m"

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


def short_prefix(task: str) -> bytes:
    """Return the prefix without host and colour, for a narrow terminal."""
    return task.encode("utf-8", "surrogateescape") + b" | "


def in_order(task: str, stream: str) -> tuple[str, int, str]:
    """Return a key that sorts streams by task, role and rank."""
    role, _, rank = task.partition("-")
    return role, int(rank) if rank.isdecimal() else 0, stream


def _colour(number: int) -> bytes:
    return b"\x1b[38;5;%dm" % number


@dataclass
class Feed:
    """One stream of one task.

    With a `prefix` each line gets it, and a line that was overwritten is printed as a terminal would show it in the
    end. Without one, the bytes go through unchanged.

    `live`: the state of bars is not printed as lines; the caller shows `bars` in its own way.
    """

    prefix: bytes
    terminal: bool = False
    live: bool = False
    _screen: Screen = field(default_factory=Screen)
    _held: bytes = b""
    """Without a prefix: what was not printed yet."""
    _held_since: float = 0.0

    def feed(self, data: bytes, now: float) -> bytes:
        """Add data; return what to print now."""
        if not self.prefix:
            return self._feed_raw(data, now)
        screen = self._screen
        data = screen.clean(data)
        if b"\r" in data and screen.is_line:
            data = data.replace(b"\r\n", b"\n")
        if screen.is_line and is_lines(data):
            whole, newline, tail = data.rpartition(b"\n")
            lines = b""
            if newline:
                lines, screen.past = self._lines(screen.row.text + whole), []
            screen.row.text = tail if newline else screen.row.text + tail
        else:
            ended = screen.write(data, now)
            lines = self._ended(ended) if ended else b""
        if len(screen.row.text) > LINE_LIMIT:
            line, screen.row.text = self._line(screen.row.text), b""
            lines += line
        return lines + self.due(now)

    def due(self, now: float) -> bytes:
        """Return what must not wait longer: held bytes, rows that have ended, or the state of a progress bar."""
        if not self.prefix:
            return self._take_raw() if self._held and now >= self._held_since + HOLD_S else b""
        lines = self._ended(self._screen.expire(now)) if self._screen.at else b""
        if self.live:
            return lines
        for row in self._screen.rows:
            state = row.state(now) if now >= row.printed_at + PROGRESS_S else b""
            if state and state != row.printed:
                row.printed, row.printed_at = state, now
                self._screen.printed_at = now
                lines += self._line(state)
        return lines

    def wait_s(self, now: float) -> float | None:
        """Return how long until `due`, or `bars`, may have something; None: not before more arrives."""
        if not self.prefix:
            return max(0.0, self._held_since + HOLD_S - now) if self._held else None
        if self._screen.is_line:
            return None
        times = self._screen.expire_at()
        for row in self._screen.rows:
            times += row.state_at(now)
            if not self.live and row.state(now) not in (b"", row.printed):
                times.append(row.printed_at + PROGRESS_S)
        return max(0.0, min(times) - now) if times else None

    def bars(self, now: float) -> list[bytes]:
        """Return the running bars as they stand, without the prefix."""
        if not self.prefix or self._screen.is_line:
            return []
        states = [row.state(now) for row in self._screen.rows]
        return [shown(state) for state in states if state]

    def flush(self) -> bytes:
        """Return what is left when the stream is over; a last line without a newline gets one with a prefix."""
        return self._ended(self._screen.flush()) if self.prefix else self._take_raw()

    def _feed_raw(self, data: bytes, now: float) -> bytes:
        if not self._held:
            self._held_since = now
        whole, newline, self._held = (self._held + data).rpartition(b"\n")
        if newline:
            self._held_since = now
        too_long = self._take_raw() if len(self._held) > LINE_LIMIT else b""
        return whole + newline + too_long + self.due(now)

    def _take_raw(self) -> bytes:
        held, self._held = self._held, b""
        return held

    def _ended(self, rows: list[ScreenRow]) -> bytes:
        """Return the lines that rows have become, without blank bars and those that were printed as they are."""
        return b"".join(
            self._line(row.visible)
            for row in rows
            if not (row.printed and row.visible == row.printed) and not (row.is_bar and is_blank(row.visible))
        )

    def _lines(self, whole: bytes) -> bytes:
        if b"\xc2" in whole:
            whole = shown(whole)
        if self.terminal and b"\x1b" in whole:
            lines = [line + _RESET if b"\x1b" in line else line for line in whole.split(b"\n")]
            whole = b"\n".join(lines)
        return self.prefix + whole.replace(b"\n", b"\n" + self.prefix) + b"\n"

    def _line(self, line: bytes) -> bytes:
        line = shown(line)
        return self.prefix + line + (_RESET if self.terminal and b"\x1b" in line else b"") + b"\n"


# The lines at the bottom of a terminal that are redrawn in place: progress bars and the line of the job. `chosen`
# decides which are shown, `Region` returns the bytes to write.


HEIGHT = 8
"""Lines of a region, at most."""
_ESCAPE = r"\x1b\[[\d;:?]*[@-~]|\x1b.?"


class StreamBars(NamedTuple):
    """The progress bars of one stream of a task."""

    prefix: bytes
    """What stands before each of its lines."""
    short: bytes
    """The same where columns are scarce."""
    bars: Sequence[bytes]
    """From above to below."""


def chosen(groups: Sequence[StreamBars], status: bytes, columns: int, rows: int) -> list[bytes]:
    """Return the lines to be shown in a terminal of this size: at most HEIGHT, `status` (if any) last.

    If there are more bars than lines, each group gets its upper bars first, and the others are counted.
    """
    room = max(1, min(HEIGHT, rows - 2)) - bool(status)
    count = sum(len(group.bars) for group in groups)
    taken = [len(group.bars) for group in groups]
    if count > room:
        taken = _shared(taken, max(0, room - 1))
    lines = []
    for group, number in zip(groups, taken, strict=True):
        for bar in group.bars[:number]:
            before = group.prefix
            if width(before) > columns // 2:
                before = group.short if width(group.short) <= columns // 2 else b""
            lines.append(before + bar)
    hidden = count - sum(taken)
    if hidden and room:
        lines.append(b"+%d more progress bar%s" % (hidden, b"" if hidden == 1 else b"s"))
    return lines + [status] * bool(status)


def _shared(counts: Sequence[int], room: int) -> list[int]:
    """Return how many of its bars each group shows, of `room` in all."""
    taken = [0] * len(counts)
    for depth in range(max(counts)):
        for at, count in enumerate(counts):
            if room and count > depth:
                taken[at] += 1
                room -= 1
    return taken


class Region:
    """What is drawn at the bottom of a terminal. The cursor is always at the begin of the line below it."""

    def __init__(self) -> None:
        self._drawn: list[bytes] = []
        self._columns = 0

    @property
    def is_drawn(self) -> bool:
        """Whether there are lines of it on the terminal."""
        return bool(self._drawn)

    def erase(self, columns: int = 0) -> bytes:
        """Take the lines away, so that others can be printed in their place.

        A terminal that has become narrower (`columns`; 0: not known) has broken them into several.
        """
        drawn, self._drawn = self._drawn, []
        if not drawn:
            return b""
        is_narrower = 0 < columns < self._columns
        rows = sum(max(1, -(-width(line) // columns)) for line in drawn) if is_narrower else len(drawn)
        return b"\r\x1b[%dA\x1b[J" % rows

    def draw(self, lines: Sequence[bytes], columns: int) -> bytes:
        """Show these lines in place of the ones before; nothing if they are the same. They are cut to the terminal."""
        cut = [clip(line, columns - 1) for line in lines]
        if cut == self._drawn and columns == self._columns:
            return b""
        before = b""
        if columns < self._columns:
            before = self.erase(columns)
        self._columns = columns
        up = b"\r\x1b[%dA" % len(self._drawn) if self._drawn else b""
        less = b"\x1b[J" if len(cut) < len(self._drawn) else b""
        self._drawn = cut
        return before + up + b"".join([line + b"\x1b[K\n" for line in cut]) + less


def clip(line: bytes, columns: int) -> bytes:
    """Return the part of a line that fits into `columns`. Colours stay, and end with the line."""
    shown = line.decode("utf-8", "replace")
    if shown.isascii() and shown.isprintable():
        return line[: max(0, columns)]
    parts: list[str] = []
    for each in re.findall(f"{_ESCAPE}|.", shown, re.DOTALL):
        if each[0] == "\x1b":
            parts.append(each if each.endswith("m") else "")
            continue
        character = each if each.isprintable() else " "
        columns -= columns_of(character)
        if columns < 0:
            break
        parts.append(character)
    return "".join(parts).encode() + (_RESET if "\x1b" in shown else b"")


def width(line: bytes) -> int:
    """Return how many columns a line takes."""
    return columns_of(re.sub(_ESCAPE, "", line.decode("utf-8", "replace")))
