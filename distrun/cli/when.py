"""Points in time and sizes as a user types them. Pure."""

from __future__ import annotations

import datetime
import re

from distrun import units
from distrun.errors import UsageError

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?\s*(?:ms|s|min|m|h|d|w)\s*)+", re.ASCII)
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|w)", re.ASCII)
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}(?:\.\d+)?))?", re.ASCII)
_HOURS = re.compile(r"(\d{1,6}):([0-5]\d):([0-5]\d)", re.ASCII)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.ASCII | re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SHOWN = 40


def point_in_time(option: str, text: str, now: float) -> float:
    """Return a time in seconds since 1970: `10m` (so long before `now`), `2026-11-24T10:00`, `10:00` (the last one).

    Without an offset or Z a time is local.

    Raises:
        UsageError: it is none of these.
    """
    word = text.strip()
    try:
        if _DURATION.fullmatch(word):
            return now - sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(word))
        clock = _CLOCK.fullmatch(word)
        if clock is not None:
            return _last(int(clock[1]), int(clock[2]), float(clock[3] or 0), now)
        return datetime.datetime.fromisoformat(re.sub(r"[zZ]\Z", "+00:00", word)).timestamp()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"{option}: expected a duration (10m, 1h30m), a time (10:00) or a date (2026-11-24T10:00), "
            f"found {text[:_SHOWN]!r}"
        ) from None


def _last(hour: int, minute: int, second: float, now: float) -> float:
    today = datetime.datetime.fromtimestamp(now)
    time = today.replace(hour=hour, minute=minute, second=int(second), microsecond=int(second % 1 * 1_000_000))
    return (time if time <= today else time - datetime.timedelta(days=1)).timestamp()


def lasting(option: str, text: str) -> float:
    """Return a time in seconds, more than 0: `90m`, `1h30m`, `1:30:00`, or a number of seconds.

    Raises:
        UsageError: it is none of these.
    """
    word = text.strip()
    found = 0.0
    clock = _HOURS.fullmatch(word)
    if _DURATION.fullmatch(word):
        found = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(word))
    elif clock is not None:
        found = int(clock[1]) * 3600 + int(clock[2]) * 60 + int(clock[3])
    elif re.fullmatch(r"\d{1,9}(\.\d+)?", word, re.ASCII):
        found = float(word)
    if not found > 0:
        raise UsageError(
            f"{option}: expected a time such as 90m, 1h30m, 1:30:00 or 5400 (seconds), found {text[:_SHOWN]!r}"
        )
    return found


def size(option: str, text: str, low: int) -> int:
    """Return a number of bytes, from `low` on: `500000`, `100M`, `1.5GiB`; units are powers of 1024.

    Raises:
        UsageError: it is none, or less.
    """
    found = _SIZE.fullmatch(text.strip())
    number = int(float(found[1]) * 1024 ** _POWERS[found[2].lower()]) if found else 0
    if found is None or not low <= number < 2**62:
        least = units.size(low)
        raise UsageError(f"{option}: expected a size from {least} on, such as 100M or 2G, found {text[:_SHOWN]!r}")
    return number
