from __future__ import annotations

import dataclasses
import json
from dataclasses import field
from typing import Any, Mapping, NamedTuple, Optional, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrun_runtime.contract.dataclass import Time, dataclass, read, written


class Part(NamedTuple):
    """A member of `Whole`."""

    name: str
    sizes: Tuple[int, ...] = ()
    ended: Optional[Time] = None


@dataclass(frozen=True)
class Whole:
    """What is read and written here."""

    number: int
    since: Time
    first: Part
    share: float = 0.5
    is_last: bool = False
    parts: Tuple[Part, ...] = ()
    more: Mapping[str, str] = field(default_factory=dict)


TIMES = st.integers(0, 2**33).map(lambda milliseconds: milliseconds / 1000)
PARTS = st.builds(Part, st.text(), st.lists(st.integers()).map(tuple), st.none() | TIMES)
WHOLES = st.builds(
    Whole,
    st.integers(),
    TIMES,
    PARTS,
    st.floats(allow_nan=False),
    st.booleans(),
    st.lists(PARTS, max_size=3).map(tuple),
    st.dictionaries(st.text(), st.text(), max_size=3),
)


def classes(make: Any) -> Any:
    @make(frozen=True)
    class Key:
        name: str
        part: int = 0
        note: list[str] = field(default_factory=list, compare=False, repr=False)

    @make(frozen=True)
    class Longer(Key):
        end: float = 0.5

    @make
    class Changing:
        name: str = "a"
        inner: Any = None

    @make(frozen=True, eq=False)
    class Itself:
        name: str = "a"

    @make(frozen=True, repr=False)
    class Empty:
        def __repr__(self) -> str:
            return "nothing"

    return Key, Longer, Changing, Itself, Empty


def seen(make: Any) -> list[object]:
    """Return what can be seen of the instances of some classes."""
    key, longer, changing, itself, empty = classes(make)
    circle = changing("b")
    circle.inner = circle
    return [
        [repr(each).rpartition(".")[2] for each in (key("k", 1, ["x"]), longer("l"), changing(), circle, empty())],
        key("k", 1, ["x"]) == key("k", 1),
        key("k") == key("k", 1),
        key("k") == longer("k"),
        hash(longer("l")) == hash(longer("l", note=["x"])),
        len({key("k"), key("k"), key("l"), empty(), empty()}),
        changing() == changing(),
        changing.__hash__,
        itself() == itself(),
        dataclasses.replace(longer("l"), part=3) == longer("l", 3),
        dataclasses.asdict(longer("l")),
        [each.name for each in dataclasses.fields(longer)],
    ]


def test_classes_are_printed_compared_and_hashed_as_those_of_the_standard_library() -> None:
    assert seen(dataclass) == seen(dataclasses.dataclass)


def test_an_argument_too_few_is_refused() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'name'"):
        classes(dataclass)[0]()


@given(WHOLES)
def test_what_is_written_is_read_back(whole: Whole) -> None:
    assert read(Whole, json.loads(json.dumps(written(whole)))) == whole


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"number": "1"}, "number: expected a whole number, found '1'"),
        ({"since": "noon"}, r"since: expected a time \(RFC 3339\), found 'noon'"),
        ({"since": 5}, r"since: expected a time \(RFC 3339\), found 5"),
        ({"first": {"name": "a", "ended": {}}}, r"ended: expected a time \(RFC 3339\), found {}"),
        ({"first": {"name": 3}}, "name: expected a text, found 3"),
        ({"parts": {}}, "parts: expected a list, found {}"),
        ({"number": None}, "expected the members number, since, first"),
    ],
)
def test_a_member_of_another_type_is_named(changes: Mapping[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read(Whole, {**written(Whole(1, 0.0, Part("a"))), **changes})
