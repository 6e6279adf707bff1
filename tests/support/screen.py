"""What a terminal shows of the bytes that were written to it: as much of one as our programs use."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\x1b\[([\d;?]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")


class Screen:
    """A terminal: text, carriage return, newline, cursor up, erase; colours are ignored."""

    def __init__(self, columns: int, rows: int) -> None:
        self._columns, self._rows = columns, rows
        self.lines = [""]
        """All lines, those that were scrolled away too; the last one may be where the cursor is."""
        self._row = self._column = 0

    def write(self, data: bytes) -> None:
        """Show these bytes."""
        for token in _TOKEN.finditer(data.decode()):
            text, number, what = token.group(), token.group(1), token.group(2)
            if text == "\r":
                self._column = 0
            elif text == "\n":
                self._down()
            elif what == "A":
                # A cursor does not go up to what was scrolled away.
                self._row = max(self._row - int(number or 1), len(self.lines) - self._rows, 0)
            elif what in ("J", "K"):
                self.lines[self._row] = self.lines[self._row][: self._column]
                if what == "J":
                    del self.lines[self._row + 1 :]
            elif what is None:
                self._show(text)
            else:
                assert what == "m", "unknown sequence %r" % text

    def _down(self) -> None:
        self._row, self._column = self._row + 1, 0  # as terminals are set up: a newline goes to the line's start
        if self._row == len(self.lines):
            self.lines.append("")

    def _show(self, text: str) -> None:
        for character in text:
            if self._column == self._columns:
                self._down()
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1
