"""Formats numbers for tables and panels: bytes, rates, shares, ages, elapsed times. No side effects.

An unknown number is None and formatted as an empty text. Numbers that JSON cannot represent are the texts `nan`, `inf`
and `-inf`.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable
from typing import Union

Number = Union[float, str]
"""A number, or `nan`, `inf`, `-inf`."""

LONG_S = 10 * 365 * 86400.0
"""A script may report any number of steps to do: the time that is left may be anything."""
_BYTES = ("KiB", "MiB", "GiB", "TiB")
_SHORT = ("", "K", "M", "G", "T")
_COUNTS = ("", "k", "M", "G", "T")


def size(count: float | None) -> str:
    """Return a number of bytes: `512 B`, `3.4 MiB`."""
    if count is None:
        return ""
    if count < 1024:
        return f"{int(count)} B"
    for unit in _BYTES:
        count /= 1024
        if count < 1024 or unit == _BYTES[-1]:
            break
    return f"{count:.1f} {unit}"


def short_size(count: float | None) -> str:
    """Return a number of bytes in at most 5 characters, for a column: `512`, `3.4M`, `128G`."""
    return "" if count is None else _scaled(count, 1024, _SHORT)


def rate(per_s: float | None) -> str:
    """Return bytes a second: `3.4 MiB/s`."""
    return "" if per_s is None else f"{size(per_s)}/s"


def used(part: float | None, whole: float | None) -> str:
    """Return used and total bytes: `3.4 of 16.0 GiB`; without a total, the same as `size`."""
    if part is None or not whole:
        return size(part)
    text = size(whole)
    number, unit = text.split(" ")
    power = 1024 ** (0 if unit == "B" else _BYTES.index(unit) + 1)
    return f"{part / power:.1f} of {number} {unit}" if power > 1 else f"{int(part)} of {text}"


def percent(fraction: float | None) -> str:
    """Return a share: `87 %` of 0.874; a share below a half per cent that is not nothing is `0.3 %`."""
    if fraction is None:
        return ""
    value = 100 * fraction
    return f"{value:.1f} %" if 0.05 <= value < 0.5 else f"{value:.0f} %"


def count(number: float | None) -> str:
    """Return a number of things in at most 5 characters: `12`, `3.4k`, `128M`."""
    return "" if number is None else _scaled(number, 1000, _COUNTS)


def per_second(number: float | None) -> str:
    """Return how many things a second: `12.5/s`, `3.4k/s`."""
    if number is None:
        return ""
    return f"{number:.3g}/s" if 0 < number < 100 else f"{count(number)}/s"


def value(number: Number | None) -> str:
    """Return a number that a script reported, such as a loss: `0.3712`, `1.2e-05`, `nan`."""
    if number is None or isinstance(number, str):
        return number or ""
    return f"{number:.4g}" if math.isfinite(number) else str(number)


def age(seconds: float | None) -> str:
    """Return how long ago something was: `59 s`, `12 min`, `3:05 h`, `12 d`."""
    if seconds is None:
        return ""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    if seconds < 100 * 3600:
        return f"{int(seconds // 3600)}:{int(seconds % 3600 // 60):02d} h"
    return f"{seconds / 86400:.0f} d"


def elapsed(seconds: float | None) -> str:
    """Return how long something takes: `0:01:05`, `3 days, 1:02:03`, and from LONG_S on `over 10 years`."""
    if seconds is None:
        return ""
    return str(datetime.timedelta(seconds=max(0, int(seconds)))) if seconds < LONG_S else "over 10 years"


def steps(step: int | None, total: int | None) -> str:
    """Return how far something is: `1200/5000`, `1200`."""
    return "" if step is None else str(step) if not total else f"{step}/{total}"


def counted(whole: int, parts: Iterable[tuple[int, str]]) -> str:
    """Return how many things there are, and how many of which kind: `5 (4 running, 1 failed)`."""
    extra = ", ".join(f"{number} {word}" for number, word in parts if number)
    return f"{whole} ({extra})" if extra else str(whole)


def _scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    if number < base:
        return f"{number:.0f}"
    for unit in units[1:]:
        number /= base
        if number < 999.5 or unit == units[-1]:
            break
    return f"{number:.1f}{unit}" if number < 9.95 else f"{number:.0f}{unit}"


def exact(number: float) -> str:
    """Return a number as text that gives the same number back, without a needless point. Pure."""
    return "%d" % number if number == int(number) else repr(number)
