"""Times as a person reads them: durations such as `1 h 30 min`, and the time of day."""

from __future__ import annotations

import time

_DAYS_FROM = 48 * 3600
"""Shorter durations are told in hours: a day is 24 h."""


def duration(seconds: float) -> str:
    """Return a duration: `0.5 s`, `45 s`, `2 min`, `1 h 30 min`, `3 d`. From a minute on, to the nearest second."""
    if seconds < 60:
        return f"{round(seconds, 3 if seconds < 1 else 2 if seconds < 10 else 1):g} s"
    left = round(seconds)
    units = [("d", 86400)] if left >= _DAYS_FROM else []
    words = []
    for name, size in [*units, ("h", 3600), ("min", 60), ("s", 1)]:
        count, left = divmod(left, size)
        if count:
            words.append("%d %s" % (count, name))
    return " ".join(words)


def time_of_day(when: float) -> str:
    """Return the local time of day of a wall clock's seconds, with milliseconds: `14:30:25.299`."""
    # Cut, not rounded: 59.9996 s must not become 60.000.
    return "%s.%03d" % (time.strftime("%H:%M:%S", time.localtime(when)), int(when % 1 * 1000))
