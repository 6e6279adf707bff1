"""Values as classes declare them: a quick `dataclass`, and JSON from and to objects of dataclasses and named tuples.

`dataclass` is for modules that programs import when they start, and costs a third of that of `dataclasses`, which
compiles up to seven functions for each class. Here it compiles `__init__`; the others are shared. That `frozen` is kept
to is for mypy to see, which makes instances cheaper, too.

`read` makes an object of the members of JSON, which is not trusted; `written` is its opposite.
"""

from __future__ import annotations

import functools
import operator
import reprlib
import sys
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Tuple, Type, TypeVar

__all__ = ["NO_MEMBERS", "Members", "Time", "dataclass", "declared_in", "read", "rfc3339", "seconds", "written"]


@reprlib.recursive_repr()
def _repr(self: Any) -> str:
    import dataclasses

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
        import dataclasses  # agents have no such class, and its import takes long

        made = dataclasses.dataclass(repr=False, eq=False)(cls)
        compared = [each.name for each in dataclasses.fields(made) if each.compare]
        made.__compared__ = operator.attrgetter(*compared) if compared else type
        return made


# JSON as classes declare it.


Members = Mapping[str, Any]
"""All members of a frame. `read` knows members that are declared so."""
NO_MEMBERS: Members = {}
Time = float
"""Wall-clock seconds since 1970; RFC 3339 in JSON. `read` and `written` know members that are declared so."""
_RFC3339 = "%Y-%m-%dT%H:%M:%S.%fZ"


def rfc3339(when: Time) -> str:
    """Return a wall-clock time as `2026-01-31T12:00:00.000Z`."""
    import datetime  # agents do without it

    moment = datetime.datetime.fromtimestamp(when, datetime.timezone.utc)
    return f"{moment.strftime(_RFC3339)[:-4]}Z"


def seconds(text: str) -> Time:
    """Return what `rfc3339` has written as wall-clock seconds since 1970. Raises ValueError."""
    import datetime

    return datetime.datetime.strptime(text, _RFC3339).replace(tzinfo=datetime.timezone.utc).timestamp()


_PLAIN: Mapping[str, Tuple[type, str]] = {
    "str": (str, "a text"),
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "bool": (bool, "true or false"),
}
"""Types of members that JSON has too, and how messages name them."""
_T = TypeVar("_T")


def declared_in(table: Dict[str, Type[Any]], kind: str) -> Callable[[Type[_T]], Type[_T]]:
    """Return a decorator that enters a class into a table by the type of frame that it is."""

    def declare(message: Type[_T]) -> Type[_T]:
        table[kind] = message
        return message

    return declare


def read(kind: Callable[..., _T], members: Mapping[str, Any], body: bytes = b"", /, **given: Any) -> _T:
    """Return an object of class `kind`, whose members are those of JSON, of the types that the class declares.

    What is missing, null or false has its default. A member of type `bytes` is the `body` of the frame that has the
    members, one of type `Members` is all of them but `type`. What is `given` counts in place of a member.

    Raises:
        ValueError: a member is missing or of another type.
    """
    found = {}
    for name, of, plain in _declared(kind):
        value = members.get(name)
        if name in given:
            found[name] = given[name]
        elif type(value) is plain:
            found[name] = value
        elif of == "bytes":
            found[name] = body
        elif of == "Members":
            found[name] = {each: value for each, value in members.items() if each != "type"}
        elif value is not None and (value is not False or of == "Any"):
            found[name] = _value(kind, name, of, value)
    try:
        return kind(**found)
    except TypeError:  # one without a default is missing
        names = ", ".join(name for name, _, _ in _declared(kind) if name not in given)
        what = ", ".join(name for name in members if name != "type") or "none"
        raise ValueError(f"expected the members {names}, found {what[:200]}") from None


def written(value: Any) -> Any:
    """Return as JSON a value of such a class, a tuple of them, or what JSON has too: the opposite of `read`."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return [written(each) for each in value]
    kind: Callable[..., Any] = type(value)
    found = {}
    for name, of, plain in _declared(kind):
        member = getattr(value, name)
        is_time = member is not None and of in ("Time", "Optional[Time]")
        found[name] = rfc3339(member) if is_time else member if plain else written(member)
    return found or value


@functools.lru_cache(maxsize=None)
def _declared(kind: Callable[..., Any]) -> List[Tuple[str, str, Optional[type]]]:
    """Return the name of each member of a class, its type, and the same if JSON has it."""
    found: List[Tuple[str, str, Optional[type]]] = []
    # Before Python 3.10, a class without members has no annotations.
    for name, annotation in getattr(kind, "__annotations__", {}).items():
        of = str(getattr(annotation, "__forward_arg__", annotation))
        found.append((name, of, _PLAIN[of][0] if of in _PLAIN else None))
    return found


def _value(kind: Callable[..., Any], name: str, of: str, value: Any) -> Any:
    """Return a value of JSON as the type that `kind` declares for a member."""
    outer, _, inner = of.rstrip("]").partition("[")
    if outer == "Optional":
        return _value(kind, name, inner, value)
    if outer == "float" and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{name}: expected a number, found one that is too large") from None
    if outer == "Time":
        try:
            return seconds(value)
        except (TypeError, ValueError):
            raise ValueError(f"{name}: expected a time (RFC 3339), found {value!r:.40}") from None
    expected, what = (list, "a list") if outer == "Tuple" else _PLAIN.get(outer, (dict, "an object"))
    if outer != "Any" and type(value) is not expected:
        raise ValueError(f"{name}: expected {what}, found {value!r:.40}")
    if outer == "Tuple":
        return tuple(_value(kind, name, inner[: -len(", ...")], each) for each in value)
    if outer == "Mapping":
        return {key: _value(kind, name, inner[len("str, ") :], each) for key, each in value.items()}
    is_json = outer == "Any" or outer in _PLAIN
    return value if is_json else read(getattr(sys.modules[kind.__module__], outer), value)
