"""The lines at the bottom of a terminal that are redrawn in place: progress bars and the line of the job.

No side effects: `Region` returns the bytes to write, `chosen` decides which lines are shown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

HEIGHT = 8
"""Lines of a region, at most."""
DRAW_S = 0.1
"""How often it is drawn again, at most, if nothing is printed above it."""

_RESET = b"\x1b[0m"
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
    depth = 0
    while room and depth < max(counts):
        for at, count in enumerate(counts):
            if room and count > depth:
                taken[at] += 1
                room -= 1
        depth += 1
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
        if not 0 < columns < self._columns:
            return b"\r\x1b[%dA\x1b[J" % len(drawn)
        return b"\r\x1b[%dA\x1b[J" % sum(max(1, -(-width(line) // columns)) for line in drawn)

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
    text = line.decode("utf-8", "replace")
    if text.isascii() and text.isprintable():
        return line[: max(0, columns)]
    parts: list[str] = []
    at = 0
    while at < len(text):
        escape = re.compile(_ESCAPE).match(text, at)
        if escape is not None:
            parts.append(escape.group() if escape.group().endswith("m") else "")
            at = escape.end()
            continue
        character = text[at] if text[at].isprintable() else " "
        columns -= _columns_of(character)
        if columns < 0:
            break
        parts.append(character)
        at += 1
    return "".join(parts).encode() + (_RESET if "\x1b" in text else b"")


def width(line: bytes) -> int:
    """Return how many columns a line takes."""
    text = line.decode("utf-8", "replace")
    if "\x1b" in text:
        text = re.sub(_ESCAPE, "", text)
    return len(text) if text.isascii() else sum(map(_columns_of, text))


def _columns_of(character: str) -> int:
    if character.isascii() or "\u2500" <= character <= "\u259f":  # box drawing and blocks, of which bars are made
        return 1
    import unicodedata  # for such lines only: it is large

    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
