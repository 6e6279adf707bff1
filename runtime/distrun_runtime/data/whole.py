"""Whole numbers in arguments: what is none is refused by name, before it fails in arithmetic."""

from __future__ import annotations

import operator

__all__ = ["whole"]


def whole(value: object, name: str, hint: str = "", *, least: int | None = None) -> int:
    """Return an int of an argument: Python's and numpy's whole numbers as they are. Pure.

    Arguments:
        name: the argument's name, for people.
        hint: what to do instead, added to the message.
        least: the smallest number that is right; None: any is.

    Raises:
        TypeError: another type, such as a float or a text.
        ValueError: a smaller number.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # what is tried
    except TypeError:
        raise TypeError("%s is a whole number, not %.60r%s" % (name, value, hint and "; " + hint)) from None
    if least is not None and number < least:
        raise ValueError("%s is a number from %d, not %d" % (name, least, number))
    return number
