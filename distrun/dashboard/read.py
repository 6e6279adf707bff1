"""Reads members of frames and files for the dashboard. A member that is missing, null or of a wrong type is unknown.

No side effects. Frames may come from a newer distrun, so unknown members are ignored and no member is required.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from distrun_runtime.coordinator import stored


def number(value: object) -> float | None:
    """Return a number; the texts "nan", "inf" and "-inf" are numbers, too."""
    if type(value) is float:  # first: most are, and a job has thousands
        return value
    if type(value) is int:
        return float(value)
    if isinstance(value, str) and value.lower() in ("nan", "inf", "-inf"):
        return float(value)
    return None


def finite(value: object) -> float | None:
    """Return a number that is neither infinite nor NaN."""
    found = value if type(value) is float else number(value)
    return found if found is not None and math.isfinite(found) else None


def whole(value: object) -> int | None:
    """Return a whole number."""
    found = finite(value)
    return None if found is None else int(found)


def text(value: object) -> str:
    """Return a text; "" in place of anything else."""
    return value if isinstance(value, str) else ""


def moment(value: object) -> float | None:
    """Return an RFC 3339 time in seconds since 1970."""
    return _parsed(value) if isinstance(value, str) else None


@lru_cache(maxsize=16384)
def _parsed(value: str) -> float | None:
    """Return what a time means; those of a job's tasks come again with every state."""
    try:
        return stored.seconds(value)
    except ValueError:
        return None


def members(value: object) -> Mapping[str, object]:
    """Return an object; an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def objects(value: object) -> Sequence[Mapping[str, object]]:
    """Return the objects of a list."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list | tuple) else []


def texts(value: object) -> list[str]:
    """Return the texts of a list."""
    return [each for each in value if isinstance(each, str)] if isinstance(value, list | tuple) else []


def numbers(value: object) -> dict[str, float]:
    """Return the numbers of an object by their names."""
    found = {name: number(each) for name, each in value.items()} if isinstance(value, dict) else {}
    return {name: each for name, each in found.items() if each is not None}


def series(value: object) -> tuple[float | None, ...]:
    """Return a list of numbers; None where one is unknown."""
    return tuple(number(each) for each in value) if isinstance(value, list | tuple) else ()
