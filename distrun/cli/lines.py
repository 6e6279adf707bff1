"""Turns the bytes of one stream into printed text: whole lines with a prefix, or the bytes unchanged. No side effects.

A progress bar overwrites its line with carriage returns and ends with a newline. Until then its latest state is shown:
as a line once a second or, on a terminal that can move its cursor, in place at the bottom (`region`). `screen` models
the rows of a stream that may still change.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from distrun.cli.screen import HOLD_S, Row, Screen, is_blank, is_lines, shown

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

    def _ended(self, rows: list[Row]) -> bytes:
        """Return the lines that rows have become, without blank bars and those that were printed as they are."""
        return b"".join(
            [
                self._line(row.visible)
                for row in rows
                if not (row.printed and row.visible == row.printed) and not (row.is_bar and is_blank(row.visible))
            ]
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
