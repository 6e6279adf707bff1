"""Whatever bytes come as the payload of a codec: an error reply or a value, nothing half done, and the server lives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from history_server import History, Piece, Sent, data, reason, said, values
from hypothesis import given, settings
from hypothesis import strategies as st

from distrun_runtime.ops import compression, reduce
from distrun_runtime.ops.compression import CODECS
from distrun_runtime.protocol.message import Kind
from distrun_runtime.ps import checks

ROWS, WIDTH = 6, 2
SIZE = ROWS * WIDTH
ONES = [1.0] * SIZE


@contextmanager
def live(type_name: str = "dist_sync") -> Iterator[History]:
    """A server with one row-sparse key `c` of 12 float32, all 1."""
    with History(type_name) as server:
        body = {"names": [[2, "emb"]], "shapes": {"2": [ROWS, WIDTH]}, "rows": {"2": WIDTH}}
        assert said(server.init({"c": ONES}, **body)) == ["w0 INIT"]
        yield server


def send(server: History, kind: Kind, codec: int, payload: bytes, body: dict[str, Any], turn: int) -> Sent:
    [reply] = server.hear("w0", data(kind, [Piece(2, 0, SIZE, turn, 0, codec, payload)], body=body))
    assert reply.link == "w0"
    return reply


def stored(server: History) -> list[float]:
    return list(values(server.pull(1, 0, "c"))["c"])


def good(number: int) -> bytes:
    if number == compression.ROWS:
        return bytes(reduce.encode(np.array([1, 4]), np.ones((2, WIDTH), np.float32)))
    codec = next(each for each in CODECS.values() if each.number == number)
    return bytes(codec.encode(np.linspace(-1, 1, SIZE, dtype=np.float32), None, codec.check({})))


NUMBERS = sorted([*(codec.number for codec in CODECS.values()), compression.ROWS])


@st.composite
def damaged(draw: st.DrawFn) -> tuple[int, bytes]:
    """A codec's number, and a payload that may be one of its own, a damaged one or noise."""
    number = draw(st.sampled_from([*NUMBERS, *NUMBERS, 6, 15, 17, 255]))
    if draw(st.booleans()) or number not in NUMBERS:
        return number, draw(st.binary(max_size=96))
    payload = bytearray(good(number))
    for _ in range(draw(st.integers(0, 3))):
        payload[draw(st.integers(0, len(payload) - 1))] = draw(st.integers(0, 255))
    cut = draw(st.integers(0, len(payload)))
    return number, bytes(payload[:cut] if draw(st.booleans()) else payload)


BODIES = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"scale": st.one_of(st.floats(), st.integers(), st.text(max_size=3), st.none())}),
    st.fixed_dictionaries({"codec": st.dictionaries(st.sampled_from(["threshold", "ratio"]), st.floats(), max_size=2)}),
)


@pytest.mark.parametrize(
    ("kind", "number"),
    [(Kind.PUSH, CODECS["2bit"].number), (Kind.PUSH, compression.ROWS), (Kind.PULL, compression.ROWS)],
)
def test_what_the_host_reads_is_refused_if_it_is_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, number: int
) -> None:
    monkeypatch.setattr(checks, "IN_USE", [True])
    monkeypatch.setattr(checks, "place_of", lambda frame: frame)
    with live() as server:
        assert "only plain values can be in memory of a GPU" in reason(
            [send(server, kind, number, good(number), {}, 1)]
        )


@settings(max_examples=300, deadline=None)
@given(damaged(), BODIES)
@pytest.mark.slow
def test_a_push_of_any_bytes_is_refused_whole_or_counted(what: tuple[int, bytes], body: dict[str, Any]) -> None:
    with live() as server:
        reply = send(server, Kind.PUSH, *what, body, 1)
        assert not reply.is_error or str(reply.body["reason"])
        assert stored(server) == ONES
        # A worker waits for a round that it has contributed to, and not for one whose push was refused.
        asked = server.pull(0, 1, "c")
        assert [each.is_error for each in asked] == ([True] if reply.is_error else [])
        # The round goes on: the other worker's contribution, and this one's own if the first was refused.
        for rank in (0, 1):
            server.push(rank, 1, {"c": ONES})
        assert server.rounds()["c"] == 1
        found = values(server.pull(0, 1, "c"))["c"]
        assert len(found) == SIZE
        if reply.is_error:
            assert found == [2.0] * SIZE


@settings(max_examples=150, deadline=None)
@given(damaged(), BODIES)
@pytest.mark.slow
def test_an_async_push_of_any_bytes_is_refused_whole_or_applied(what: tuple[int, bytes], body: dict[str, Any]) -> None:
    with live("dist_async") as server:
        server.rule("sgd", learning_rate=1.0)
        reply = send(server, Kind.PUSH, *what, body, 1)
        if reply.is_error:
            assert stored(server) == ONES
        assert not send(server, Kind.PUSH, 0, bytes(4 * SIZE), {}, 2).is_error


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.binary(max_size=64), st.lists(st.integers(-2, 8), max_size=4)))
def test_a_pull_of_any_rows_gives_them_or_says_which_there_are(wanted: bytes | list[int]) -> None:
    is_listed = isinstance(wanted, list)
    payload = bytes(reduce.encode_rows(np.array(wanted, np.int64))) if isinstance(wanted, list) else wanted
    with live() as server:
        reply = send(server, Kind.PULL, compression.ROWS, payload, {}, 0)
        if is_listed and sorted(set(wanted)) == wanted and all(0 <= row < ROWS for row in wanted):
            assert values([reply]) == {"c": [1.0] * WIDTH * len(wanted)}
        elif is_listed:
            assert str(reply.body["reason"]).startswith("key 'emb' of shape (6, 2): rows: expected")
        assert stored(server) == ONES


@pytest.mark.parametrize("facts", [{"staleness": -1}, {"staleness": "1"}, {"staleness": True}])
def test_an_init_with_a_bound_that_is_none_is_refused(facts: dict[str, Any]) -> None:
    with live() as server:
        assert "staleness is a number of pushes" in reason(server.init({"d": [1]}, type="dist_async", **facts))
        for rank in (0, 1):
            server.push(rank, 1, {"c": ONES})
        assert server.rounds()["c"] == 1, "the store is a synchronous one as before"


@pytest.mark.parametrize("facts", [{"shapes": {"3": "x"}}, {"rows": {"3": "x"}}, {"shapes": {"3": [None]}}])
def test_an_init_with_garbled_facts_leaves_nothing_behind(facts: dict[str, Any]) -> None:
    with live() as server:
        assert reason(server.init({"d": [1]}, **facts)).startswith("INIT is malformed: ")
        assert "no such piece" in reason(server.pull(0, 0, "d"))
        assert said(server.init({"d": [1]})) == ["w0 INIT"]
