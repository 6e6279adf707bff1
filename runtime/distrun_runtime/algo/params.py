"""The parameters of an update rule: which there are, what is right, and what was given. Pure; JSON both ways."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Union

from distrun_runtime.errors import KVError

Number = Union[float, bool, None]
"""What a parameter is: a number, a switch, or None for "off"."""


@dataclass(frozen=True)
class Param:
    """One parameter. A bool default makes it a switch; a None default lets it be None."""

    name: str
    default: Number
    low: float = -math.inf
    high: float = math.inf
    alias: str = ""
    open_low: bool = False
    open_high: bool = False

    def range_text(self) -> str:
        """Return what values are right, in words."""
        if isinstance(self.default, bool):
            return "True or False"
        bounds = []
        if self.low > -math.inf:
            bounds.append("%s %g" % ("above" if self.open_low else "at least", self.low))
        if self.high < math.inf:
            bounds.append("%s %g" % ("below" if self.open_high else "at most", self.high))
        return " ".join(["a finite number", " and ".join(bounds)]).strip() + (", or None" * (self.default is None))

    def read(self, value: object) -> Number:
        """Return the value as float, bool or None.

        Raises:
            ValueError: it is not of the kind or range of this parameter.
        """
        if isinstance(self.default, bool):
            if isinstance(value, bool):
                return value
            raise ValueError(value)
        if value is None and self.default is None:
            return None
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError(value)
        number = float(value)
        inside = self.low <= number <= self.high and math.isfinite(number)
        if not inside or (self.open_low and number == self.low) or (self.open_high and number == self.high):
            raise ValueError(value)
        return number


def complete(rule: str, table: Iterable[Param], given: Mapping[str, object]) -> dict[str, Number]:
    """Return every parameter of the table, in its order, as given or else by default.

    Raises:
        KVError: a name that is not in the table, a name given twice (by its alias), a value that is not right.
    """
    by_name = {name: param for param in table for name in (param.name, param.alias) if name}
    result = {param.name: param.default for param in by_name.values()}
    seen: dict[str, str] = {}
    for name, value in given.items():
        param = by_name.get(name)
        if param is None:
            raise KVError(
                "rule %r has no parameter %r%s; it has %s"
                % (rule, name, did_you_mean(name, by_name), ", ".join(sorted(by_name)))
            )
        if param.name in seen:
            raise KVError("rule %r: %s and %s are one parameter; give one" % (rule, seen[param.name], name))
        seen[param.name] = name
        try:
            result[param.name] = param.read(value)
        except (ValueError, OverflowError):
            raise KVError("rule %r: %s=%r: expected %s" % (rule, name, value, param.range_text())) from None
    return result


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the nearest known word, or nothing if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return " (did you mean %r?)" % near[0] if near else ""
