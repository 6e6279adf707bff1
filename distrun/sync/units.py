"""Sizes and counts in words. Pure."""

from __future__ import annotations

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def size_text(size: float) -> str:
    """Return a number of bytes: `512 B`, `3.4 MiB`."""
    if size < 1024:
        return "%d B" % size
    for unit in _UNITS:
        size /= 1024
        if size < 1024 or unit == _UNITS[-1]:
            break
    return "%.1f %s" % (size, unit)


def count(number: int, noun: str) -> str:
    """Return `1 file`, `2 files`."""
    return "%d %s%s" % (number, noun, "" if number == 1 else "s")
