"""`dataclass` as in `dataclasses`, for modules that programs import when they start, at a third of its cost.

`dataclasses` compiles up to seven functions for each class. Here it compiles `__init__`; the others are shared. That
`frozen` is kept to is for mypy to see, which makes instances cheaper, too.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import reprlib
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]


@reprlib.recursive_repr()
def _repr(self: Any) -> str:
    shown = [f"{each.name}={getattr(self, each.name)!r}" for each in dataclasses.fields(self) if each.repr]
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _eq(self: Any, other: Any) -> bool:
    return self.__compared__(self) == self.__compared__(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(self.__compared__(self))


if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, *, frozen=False, repr=True, eq=True):
        """Return the class as a dataclass, or, without a class, what makes one with these options."""
        if cls is None:
            return functools.partial(dataclass, frozen=frozen, repr=repr, eq=eq)
        if repr and "__repr__" not in cls.__dict__:
            cls.__repr__ = _repr
        if eq and "__eq__" not in cls.__dict__:
            cls.__eq__, cls.__hash__ = _eq, cls.__dict__.get("__hash__", _hash if frozen else None)
        made = dataclasses.dataclass(repr=False, eq=False)(cls)
        compared = [each.name for each in dataclasses.fields(made) if each.compare]
        made.__compared__ = operator.attrgetter(*compared) if compared else type
        return made
