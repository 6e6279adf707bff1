"""How two workers' parts of one collective call differ, in words."""

from __future__ import annotations

from typing import Any

import pytest

from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.ps.collective import Call, Gathering, difference


def call(rank: int, kind: Kind, number: int = 1, **body: Any) -> Call:
    return Call(rank, "w%d" % rank, Message(kind, body={"number": number, **body}))


def record(key: object, shape: tuple[int, ...] = (2,), dtype: str = "float32") -> dict[str, Any]:
    return {"key": key, "shape": list(shape), "dtype": dtype}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (call(0, Kind.BARRIER), call(1, Kind.BARRIER)),
        (call(0, Kind.OPEN, type="dist_sync"), call(1, Kind.OPEN, type="dist_sync")),
        (call(0, Kind.KEYS, records=[]), call(1, Kind.KEYS, records=[])),
        (
            call(0, Kind.KEYS, records=[record("a"), record("b")]),
            call(1, Kind.KEYS, records=[record("b"), record("a")]),
        ),
    ],
)
def test_equal_parts_do_not_differ(one: Call, other: Call) -> None:
    assert difference(one, other) == ""


def test_kinds_are_called_by_the_names_that_users_know() -> None:
    text = difference(call(0, Kind.OPEN, 7, type="dist"), call(3, Kind.JOIN, 7))
    assert text == "worker-0 calls create where worker-3 calls join (call 7 of the store)"


def test_the_first_difference_of_records_is_the_one_that_is_named() -> None:
    mine = [record("a"), record("b", (1,)), record("c", (1,))]
    theirs = [record("a"), record("b", (9,)), record("c", (9,))]
    text = difference(call(0, Kind.KEYS, records=mine), call(1, Kind.KEYS, records=theirs))
    assert text == "for key 'b' worker-0 has shape (1,) float32, worker-1 has shape (9,) float32"


def test_an_int_key_and_a_str_key_of_the_same_digits_are_two() -> None:
    text = difference(call(0, Kind.KEYS, records=[record(1)]), call(1, Kind.KEYS, records=[record("1")]))
    assert text == "worker-0 declares key 1 (shape (2,) float32), worker-1 does not"


def test_every_later_part_is_compared_with_the_first() -> None:
    gathering = Gathering()
    assert gathering.add(call(2, Kind.BARRIER)) == ""
    assert gathering.add(call(0, Kind.BARRIER)) == ""
    assert gathering.add(call(1, Kind.KEYS, records=[])) == (
        "worker-2 calls barrier where worker-1 calls init (call 1 of the store)"
    )
    assert set(gathering.calls) == {0, 1, 2}


def test_a_call_without_a_number_is_number_minus_1() -> None:
    assert Call(0, "w0", Message(Kind.BARRIER)).number == -1
