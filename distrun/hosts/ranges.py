"""Node lists: `gpu[01-16,20]n[1-8/2],x1`, folded and expanded. No side effects.

The meaning is that of Slurm and ClusterShell: several ranges in a name give all combinations, the last one running
fastest; zero padding is kept.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from distrun.formats import grouped
from distrun.hosts.grammar import Fault, Finding, error_of
from distrun_runtime.contract.dataclass import dataclass

LIMIT = 65_536
"""Hosts that one job may have."""
DIGITS = 18
"""Digits of a number in a range, at most."""
SOURCE = "node list"

_DIGITS = rf"([0-9]{{1,{DIGITS}}})"
_RANGE = rf"{_DIGITS}(?:-{_DIGITS}(?:/{_DIGITS})?)?"
_NUMBER = re.compile(_DIGITS)


@dataclass(frozen=True)
class Range:
    """One item between brackets."""

    first: int
    last: int
    step: int = 1
    width: int = 0
    """To which numbers are padded with zeros; 0: they are not."""

    def __len__(self) -> int:
        return (self.last - self.first) // self.step + 1

    def __iter__(self) -> Iterator[str]:
        for number in range(self.first, self.last + 1, self.step):
            yield f"{number:0{self.width}d}"


@dataclass(frozen=True)
class Pattern:
    """A name with any number of ranges: fixed texts and lists of ranges by turns."""

    texts: tuple[str, ...]
    ranges: tuple[tuple[Range, ...], ...]
    """One less than texts."""

    @property
    def count(self) -> int:
        """How many names it stands for."""
        total = 1
        for items in self.ranges:
            total *= sum(len(item) for item in items)
        return total

    @property
    def sample(self) -> str:
        """One of the names."""
        pairs = zip(self.texts, [*(next(iter(items[0])) for items in self.ranges), ""], strict=True)
        return "".join(itertools.chain.from_iterable(pairs))

    def names(self) -> Iterator[str]:
        """Give all of them."""
        for numbers in itertools.product(*(itertools.chain(*items) for items in self.ranges)):
            yield "".join(itertools.chain.from_iterable(zip(self.texts, [*numbers, ""], strict=True)))


def pattern(text: str) -> Pattern:
    """Read a name with ranges.

    Raises:
        Fault: E109 brackets, E110 ranges.
    """
    texts, ranges = [], []
    at = 0
    while (start := text.find("[", at)) >= 0:
        end = text.find("]", start)
        if end < 0 or "[" in text[start + 1 : end]:
            raise Fault(start, "E109", f"unclosed '[' in {text!r}")
        texts.append(_plain(text, at, start))
        ranges.append(_ranges(text, start + 1, end))
        at = end + 1
    texts.append(_plain(text, at, len(text)))
    found = Pattern(tuple(texts), tuple(ranges))
    if found.count > LIMIT:
        raise Fault(text.find("[") + 1, "E110", too_many(found.count))
    return found


def too_many(count: int) -> str:
    """Return what is said of so many hosts."""
    return f"expands to {count} hosts, limit {LIMIT}"


def _plain(text: str, start: int, end: int) -> str:
    stray = text.find("]", start, end)
    if stray >= 0:
        raise Fault(stray, "E109", f"stray ']' in {text!r}")
    return text[start:end]


def _ranges(text: str, start: int, end: int) -> tuple[Range, ...]:
    items = []
    for item in text[start:end].split(","):
        items.append(_range(item, start))
        start += len(item) + 1
    return tuple(items)


def _range(item: str, at: int) -> Range:
    match = re.fullmatch(_RANGE, item)
    if match is None:
        raise Fault(at, "E110", f"range {item!r} is none of N, N-M, N-M/STEP")
    low, high, step = match[1], match[2] or match[1], match[3] or "1"
    padded = any(len(bound) > 1 and bound[0] == "0" for bound in (low, high))
    if padded and len(low) != len(high):
        raise Fault(at, "E110", f"range bounds {item!r} have different padding")
    if int(low) > int(high):
        raise Fault(at, "E110", f"range {item!r} is descending")
    if not int(step):
        raise Fault(at, "E110", f"range {item!r} has the step 0")
    return Range(int(low), int(high), int(step), len(low) if padded else 0)


def split(text: str, separators: str = ",") -> list[tuple[int, str]]:
    """Return the items of a list with their places; separators inside brackets separate nothing. No side effects."""
    items, start, depth = [], 0, 0
    for at, char in enumerate(text):
        depth += (char == "[") - (char == "]" and depth > 0)
        if not depth and char in separators:
            items.append((start, text[start:at]))
            start = at + 1
    items.append((start, text[start:]))
    return [
        (at + len(item) - len(item.lstrip(" \t")), item.strip(" \t")) for at, item in items if item.strip(" \t\r\n")
    ]


def expand(text: str) -> list[str]:
    """Return the names of a node list, in its order. Commas and white space separate. No side effects.

    Raises:
        HostsError: E109, E110, with the place.
    """
    names: list[str] = []
    findings: list[Finding] = []
    for number, line in enumerate(text.split("\n"), 1):
        for at, item in split(line, ", \t\r"):
            try:
                # An address in brackets is no range.
                is_address = item.startswith("[") and item.find("]") == len(item) - 1 and ":" in item
                found = Pattern((item[1:-1],), ()) if is_address else pattern(item)
                if len(names) + found.count > LIMIT:
                    raise Fault(0, "E110", too_many(len(names) + found.count))
                names += found.names()
            except Fault as fault:
                findings.append(Finding(SOURCE, number, at + fault.at + 1, fault.code, fault.text, line))
    if findings:
        raise error_of(findings)
    return names


def fold(names: Iterable[str]) -> str:
    """Return a node list of these names, each once, in the order of their numbers. No side effects.

    `expand(fold(names))` gives the same names.
    """
    rows = [_fields(name) for name in dict.fromkeys(names)]
    depth = max((len(row) for row in rows), default=0)
    for index in range(depth - 2, 0, -2):
        rows = _merge(rows, index)
    rows.sort(key=lambda row: [_order(field) for field in row])
    return ",".join("".join(_written(field) for field in row) for row in rows)


_Field = tuple[str, ...]
"""A text, or the numbers that stand in one place."""


def _fields(name: str) -> list[_Field]:
    """Return texts and numbers by turns, beginning with a text. Addresses of IPv6 are one text."""
    return [(part,) for part in ([name] if ":" in name else _NUMBER.split(name))]


def _merge(rows: Sequence[list[_Field]], index: int) -> list[list[_Field]]:
    """Join the rows that differ in nothing but this field."""

    def others(row: list[_Field]) -> tuple[object, ...]:
        return (tuple(row[:index]), tuple(row[index + 1 :])) if index < len(row) else (id(row),)

    merged = []
    for group in grouped((others(row), row) for row in rows).values():
        row = group[0]
        if len(group) > 1:
            numbers = sorted({number for each in group for number in each[index]}, key=lambda n: (int(n), len(n)))
            row = [*row[:index], tuple(numbers), *row[index + 1 :]]
        merged.append(row)
    return merged


def _order(field: _Field) -> tuple[int, str]:
    return (int(field[0]), field[0]) if _NUMBER.fullmatch(field[0]) else (-1, field[0])


def _written(field: _Field) -> str:
    if len(field) == 1:
        return field[0]
    # Numbers of a width in which some are padded belong together; the others are not padded.
    widths = {len(number) for number in field if len(number) > 1 and number[0] == "0"}
    runs: list[list[str]] = []
    previous: tuple[int, int] | None = None
    for width, value, number in sorted((len(n) if len(n) in widths else 0, int(n), n) for n in field):
        if previous == (width, value - 1):
            runs[-1][1:] = [number]
        else:
            runs.append([number])
        previous = width, value
    return f"[{','.join('-'.join(run) for run in runs)}]"


def generic(host: str, text: str) -> str:
    """Return a text about a host with HOST in place of its name, to compare it with that of another host."""
    return re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "HOST", text) if host in text else text
