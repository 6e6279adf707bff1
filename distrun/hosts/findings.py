"""What is wrong, and where: an error or a warning with file, line and column, and the line with a caret. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from distrun.errors import HostsError

SHOWN = 200
"""Errors of one file that are printed; of a file that is none, every line is one."""
WIDE = 120
"""Characters of a line that are shown; of a longer one the surroundings of the caret."""


@dataclass(frozen=True)
class Finding:
    """One error or warning."""

    source: str
    line: int
    """From 1; 0: of no line."""
    column: int
    """In characters, from 1; 0: of no line."""
    code: str
    text: str
    shown: str = ""
    """The line itself."""

    @property
    def head(self) -> str:
        """`file:line:col: CODE: text`."""
        return "%s:%d:%d: %s: %s" % (self.source, self.line, self.column, self.code, self.text)

    def __str__(self) -> str:
        if not self.line:
            return self.head
        line, at = self.shown, self.column - 1
        if len(line) > WIDE:
            start = max(0, min(at - WIDE // 2, len(line) - WIDE))
            line, at = "..." + line[start : start + WIDE] + "...", at - start + 3
        line = "".join(char if char.isprintable() else " " if char == "\t" else "?" for char in line)
        return "%s\n  %s\n  %s^" % (self.head, line, " " * _width(line[:at]))


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


class Fault(Exception):
    """One error, found in a piece of text: its place there, from 0, its code and words."""

    def __init__(self, at: int, code: str, text: str) -> None:
        super().__init__(text)
        self.at = at
        self.code = code
        self.text = text


def error_of(findings: Sequence[Finding], hint: str = "") -> HostsError:
    """Return the error that holds all findings."""
    lines = [str(finding) for finding in findings[:SHOWN]]
    if len(findings) > SHOWN:
        lines.append("... and %d more errors" % (len(findings) - SHOWN))
    return HostsError("\n".join(lines), hint, len(findings))
