from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any

import pytest

from distrun_runtime.contract.dataclass import dataclass


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
