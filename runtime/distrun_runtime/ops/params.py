"""The parameters of update rules and codecs: which there are, what is right, and what was given. JSON both ways."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Dict, List, Union

from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import KVError

Number = Union[float, bool, None]
"""What most parameters are: a number, a switch, or None for "off"."""

Json = Union[None, bool, int, float, str, List["Json"], Dict[str, "Json"]]
"""What a parameter of any kind is, so that it can travel."""


PAIR, PAIRED = "betas", ("beta1", "beta2")
"""torch's name of a pair of parameters, and MXNet's names of the two."""


@dataclass(frozen=True)
class Param:
    """One parameter. A bool default makes it a switch; a None default lets it be None.

    One that is neither number nor switch has a `reader`, which returns a value as JSON or raises a KVError, a TypeError
    or a ValueError with the reason.
    """

    name: str
    default: Number
    low: float = -math.inf
    high: float = math.inf
    alias: str = ""
    open_low: bool = False
    open_high: bool = False
    reader: Callable[[object], Json] | None = None

    def range_text(self) -> str:
        """Return what values are right, in words."""
        if isinstance(self.default, bool):
            return "True or False"
        bounds = []
        if self.low > -math.inf:
            bounds.append(f"{'above' if self.open_low else 'at least'} {self.low:g}")
        if self.high < math.inf:
            bounds.append(f"{'below' if self.open_high else 'at most'} {self.high:g}")
        return " ".join(["a finite number", " and ".join(bounds)]).strip() + (", or None" * (self.default is None))

    def read(self, value: object) -> Json:
        """Return the value as float, bool or None, or as the reader has it.

        Raises:
            ValueError: it is not of the kind or range of this parameter.
            KVError: the reader says what is wrong with it.
        """
        if self.reader is not None:
            return self.reader(value)
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


def complete(whose: str, table: Iterable[Param], given: Mapping[str, object]) -> dict[str, Json]:
    """Return every parameter of the table, in its order, as given or else by default.

    Arguments:
        whose: parameters they are, for messages, such as "rule 'sgd'".

    Raises:
        KVError: a name that is not in the table, a name given twice (by its alias), a value that is not right.
    """
    params = {param.name: param for param in table}
    result: dict[str, Json] = {param.name: param.default for param in params.values()}
    for name, value in canonical(whose, params.values(), given).items():
        try:
            result[name] = params[name].read(value)
        except KVError as err:
            raise KVError(f"{whose}: {err}") from None
        except (ValueError, OverflowError):
            written = next((word for word in given if word in (name, params[name].alias)), name)
            raise KVError(f"{whose}: {written}={value!r}: expected {params[name].range_text()}") from None
    return result


def canonical(whose: str, table: Iterable[Param], given: Mapping[str, object]) -> dict[str, object]:
    """Return the given values by the names of the table instead of their aliases; the values are not looked at.

    `betas`, as torch has it, is understood as the pair of `beta1` and `beta2` where the table has these.

    Raises:
        KVError: a name that is not in the table, or a name given twice (by its alias); betas that are no pair.
    """
    by_name = {name: param.name for param in table for name in (param.name, param.alias) if name}
    known = [*by_name, *([PAIR] if all(name in by_name for name in PAIRED) else [])]
    result: dict[str, object] = {}
    seen: dict[str, str] = {}
    for word, value in given.items():
        if word not in known:
            has = ", ".join(sorted(known)) or "none"
            raise KVError(f"{whose} has no parameter {word!r}{did_you_mean(word, known)}; it has {has}")
        if word in by_name:
            items = [(by_name[word], value)]
        elif isinstance(value, (list, tuple)) and len(value) == len(PAIRED):
            items = list(zip(PAIRED, value, strict=True))
        else:
            raise KVError(f"{whose}: {word}={value!r}: expected a pair of numbers, such as (0.9, 0.999)")
        for name, each in items:
            if name in seen:
                raise KVError(f"{whose}: {seen[name]} and {word} are one parameter; give one")
            seen[name] = word
            result[name] = each
    return result


def to_json(value: object) -> Json:
    """Return a value as JSON: numbers of numpy as Python's, tuples as lists, and what has a `to_json` by it.

    Raises:
        ValueError: it is none of these, or not a finite number.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        if not math.isfinite(value):
            raise ValueError(f"{value!r} is not a finite number")
        return float(value)
    if isinstance(value, Mapping):
        return {str(name): to_json(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(one) for one in value]
    own = getattr(value, "to_json", None)
    if callable(own):
        return to_json(own())
    raise ValueError(f"a {type(value).__name__} cannot be written as JSON")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the nearest known word, or nothing if none is near."""
    import difflib  # for a mistake only

    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
