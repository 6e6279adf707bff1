"""Styled text of the dashboard: lines of spans, their width on a terminal, and charts.

No side effects. A line is a tuple of spans; a span is a text and a style. A style only repeats what a word says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from distrun_runtime.contract.dataclass import dataclass

Span = tuple[str, str]
"""A text without control characters, and the name of a style."""
Line = tuple[Span, ...]

PLAIN = ""
BOLD = "bold"
DIM = "dim"
RED = "red"
GREEN = "green"
YELLOW = "yellow"
CYAN = "cyan"
CHOSEN = "reverse"
TITLE = "title"

_CODES = {BOLD: "1", DIM: "2", RED: "31", GREEN: "32", YELLOW: "33", CYAN: "36", CHOSEN: "7", TITLE: "1;36"}
_COLOURLESS = {BOLD: "1", CHOSEN: "7", TITLE: "1"}
"""Codes that are used without colours, too."""
RESET = "\x1b[0m"

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


@dataclass(frozen=True)
class Glyphs:
    """The characters of charts and rules."""

    levels: str
    full: str
    empty: str
    rule: str
    ellipsis: str
    bar: str
    mark: str
    arrows: str


UNICODE = Glyphs("▁▂▃▄▅▆▇█", "█", "░", "─", "…", "│", "▸", "↑↓")
ASCII = Glyphs("_.-=+*#", "#", ".", "-", "~", "|", ">", "Up/Down")


@lru_cache(maxsize=4096)
def width(text: str) -> int:
    """Return how many columns a text takes on a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # loads its tables when there is something to look up

    return cell_len(text)


def clean(text: str) -> str:
    """Return a text of a task's or a host's without escape sequences and control characters; tabs are blanks."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROL.sub("", _ESCAPES.sub("", text.replace("\t", "    ")))


def clean_lines(text: str) -> str:
    """Return a text of several lines with each of them as `clean` leaves it."""
    return "\n".join(clean(line) for line in text.split("\n"))


@lru_cache(maxsize=256)
def folded(names: tuple[str, ...]) -> str:
    """Return names as a node list: `worker-[0-7]`."""
    if len(names) == 1:
        return names[0]
    from distrun.hosts.ranges import fold  # when there is something to fold

    return fold(names)


def natural(name: str) -> list[tuple[str, int]]:
    """Return what sorts names as a reader does: worker-2 before worker-10."""
    return [(word, int(number or 0)) for word, number in re.findall(r"(\D*)(\d*)", name, re.ASCII)]


def only_ascii(text: str) -> str:
    """Return a text as wide with `?` in place of every character that is not ASCII."""
    return text if text.isascii() else "".join(each if each.isascii() else "?" * width(each) for each in text)


def fit(text: str, columns: int, ellipsis: str = UNICODE.ellipsis) -> str:
    """Return a text of exactly this width: cut, with an ellipsis, or filled with blanks."""
    found = width(text)
    if found <= columns:
        return text + " " * (columns - found)
    if columns <= len(ellipsis):
        return ellipsis[:columns]
    if text.isascii():
        return text[: columns - len(ellipsis)] + ellipsis
    from rich.cells import set_cell_size

    return set_cell_size(text, columns - len(ellipsis)) + ellipsis


def right(text: str, columns: int, ellipsis: str = UNICODE.ellipsis) -> str:
    """Return a text that ends at a column, as numbers do."""
    found = width(text)
    return " " * (columns - found) + text if found <= columns else fit(text, columns, ellipsis)


def cut(line: Line, columns: int, ellipsis: str = UNICODE.ellipsis) -> Line:
    """Return a line of at most this width."""
    spans: list[Span] = []
    left = columns
    for text, style in line:
        size = width(text)
        if size > left:
            if left > 0:
                spans.append((fit(text, left, ellipsis), style))
            return tuple(spans)
        spans.append((text, style))
        left -= size
    return tuple(spans)


def line_width(line: Line) -> int:
    """Return how many columns a line takes."""
    return sum(width(text) for text, _ in line)


def padded(line: Line, columns: int, ellipsis: str = UNICODE.ellipsis) -> Line:
    """Return a line of exactly this width."""
    found = cut(line, columns, ellipsis)
    missing = columns - line_width(found)
    return (*found, (" " * missing, PLAIN)) if missing else found


def plain(line: Line) -> str:
    """Return a line without styles and blanks at its end."""
    return "".join(text for text, _ in line).rstrip()


def encode(line: Line, has_colour: bool) -> str:
    """Return a line with the escape sequences of its styles, and no others."""
    codes = _CODES if has_colour else _COLOURLESS
    parts = []
    for text, style in ((clean(text), style) for text, style in line):
        code = codes.get(style)
        parts.append(f"\x1b[{code}m{text}{RESET}" if code and text else text)
    return "".join(parts)


# ---------------------------------------------------------------------- charts


def spark(values: Iterable[float | None], columns: int, glyphs: Glyphs) -> str:
    """Return the last values as a chart one line high, from 0 to their maximum; what is unknown is a blank."""
    shown = list(values)[-columns:] if columns > 0 else []
    known = [value for value in shown if value is not None and math.isfinite(value)]
    top = max(known, default=0.0)
    last = len(glyphs.levels) - 1
    out = []
    for value in shown:
        if value is None or not math.isfinite(value):
            out.append(" ")
        elif top <= 0:
            out.append(glyphs.levels[0])
        else:
            out.append(glyphs.levels[max(0, min(last, round(value / top * last)))])
    return "".join(out)


def chart(values: Sequence[float], rows: int, glyphs: Glyphs) -> list[str]:
    """Return values as a chart of so many lines, from the smallest to the largest; what is not finite is `!`."""
    known = [value / 2 for value in values if math.isfinite(value)]  # halves: their difference is finite
    low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    most = len(glyphs.levels)
    heights = [
        1 + round((value / 2 - low) / (span or 1.0) * (rows * most - 1)) if math.isfinite(value) else 0
        for value in values
    ]
    lines = []
    for below in range((rows - 1) * most, -1, -most):
        cells = (glyphs.levels[min(height - below, most) - 1] if height > below else " " for height in heights)
        lines.append("".join(cells))
    lines[-1] = "".join(cell if height else "!" for cell, height in zip(lines[-1], heights, strict=True))
    return lines


def stretched(points: Sequence[tuple[float, float]], columns: int) -> list[float]:
    """Return a value for each column, of points (where, value) that come in order: means, and what lies between two."""
    first, span = points[0][0], points[-1][0] - points[0][0]
    cells: dict[int, list[float]] = {}
    for where, value in points:
        cells.setdefault(round((where - first) / span * (columns - 1)) if 0 < span < math.inf else 0, []).append(value)
    means = [(column, sum(each / len(each_of) for each in each_of)) for column, each_of in cells.items()]
    found: list[float] = []
    for (column, value), (after, other) in pairwise(means):
        for share in (number / (after - column) for number in range(after - column)):
            found.append(value * (1 - share) + other * share if share and math.isfinite(other) else value)
    return [*found, means[-1][1]]


def bar(share: float, columns: int, glyphs: Glyphs) -> str:
    """Return a bar of which a share is full."""
    full = round(max(0.0, min(1.0, share)) * columns) if math.isfinite(share) else 0
    return glyphs.full * full + glyphs.empty * (columns - full)


def rule(title: str, columns: int, glyphs: Glyphs) -> Line:
    """Return the line above a panel."""
    head = f"{glyphs.rule}{glyphs.rule} "
    text = fit(title, min(width(title), max(0, columns - 4)), glyphs.ellipsis)
    rest = max(0, columns - len(head) - width(text) - 1)
    return ((head, DIM), (text, TITLE), (" " + glyphs.rule * rest, DIM))


def wrapped(text: str, columns: int) -> Sequence[str]:
    """Return a text in lines of at most this width, broken between words if possible, without blanks at their ends.

    Only the first line of a paragraph is indented as that is, and only if its first word fits beside the indent. A word
    that is longer than a line begins where the word before it ends.
    """
    lines: list[str] = []
    for paragraph in text.split("\n"):
        rest = paragraph.rstrip(" ")
        while (head := _beginning(rest, columns)) != rest:
            end = len(head) if rest[len(head)] == " " else head.rfind(" ")
            word = rest[end + 1 : end + 2 + columns].partition(" ")[0]  # or so much of it that it is too long
            if end < 0 or (end < len(head) and width(word) > columns):
                end = len(head)
            line = head[:end].rstrip(" ")
            if line:  # else only the indent has room
                lines.append(line)
            rest = rest[end:].lstrip(" ")
        lines.append(rest)
    return lines


def _beginning(text: str, columns: int) -> str:
    """Return as much of a text as fits: at least one character, each with the marks above it."""
    if text.isascii():
        return text[: max(1, columns)]
    end, left = 0, columns
    while end < len(text) and (left := left - width(text[end])) >= 0:  # no further: a line may be very long
        end += 1
    # Some characters are wider together, such as a heart with a colour.
    while end > 1 and (width(text[:end]) > columns or _is_mark(text[end : end + 1])):
        end -= 1
    end = max(1, end)
    while _is_mark(text[end : end + 1]):  # those of the first character, which may be wider than a line
        end += 1
    return text[:end]


def _is_mark(text: str) -> bool:
    """Return whether this is a character that has no width of its own: it belongs to the one before it."""
    return text != "" and width(text) == 0
