"""Whatever bytes come as the payload of a codec: an error reply or a value, nothing half done, and the server lives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import Live, kinds, reason

from distrun_runtime.ops import rows as rowcodec
from distrun_runtime.ops.compression import CODECS
from distrun_runtime.protocol.message import Entry, Kind, Message, Payload, decode, encode

ROWS, WIDTH = 6, 2
SIZE = ROWS * WIDTH


def live(type_name: str = "dist_sync") -> Live:
    """A server with one row-sparse key of 12 float32, all 1."""
    rig = Live(type_name)
    entry = Entry(2, 0, SIZE, payload=Payload.FRAME)
    body = {"type": type_name, "names": [[2, "emb"]], "shapes": {"2": [ROWS, WIDTH]}, "rows": {"2": WIDTH}}
    value = np.ones(SIZE, np.float32).tobytes()
    assert kinds(rig.hear("w0", Message(Kind.INIT, body=body, entries=(entry,), payloads=[value]))) == [("w0", "INIT")]
    return rig


def send(rig: Live, kind: Kind, codec: int, payload: bytes, body: dict[str, Any], turn: int) -> Message:
    entry = Entry(2, 0, SIZE, turn, 0, codec, Payload.FRAME)
    sent = decode(encode(Message(kind, entries=(entry,), body=body, payloads=[payload])))
    [(link, reply)] = rig.hear("w0", sent)
    assert link == "w0"
    return reply


def stored(rig: Live) -> list[float]:
    [(_, reply)] = rig.hear("w1", Message(Kind.PULL, entries=(Entry(2, 0, SIZE),)))
    return np.frombuffer(reply.payloads[0], np.float32).tolist()


def good(number: int) -> bytes:
    if number == rowcodec.ROWS:
        return bytes(rowcodec.encode(np.array([1, 4]), np.ones((2, WIDTH), np.float32)))
    codec = next(each for each in CODECS.values() if each.number == number)
    return bytes(codec.encode(np.linspace(-1, 1, SIZE, dtype=np.float32), None, codec.check({})))


NUMBERS = sorted([*(codec.number for codec in CODECS.values()), rowcodec.ROWS])


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


@settings(max_examples=300, deadline=None)
@given(damaged(), BODIES)
def test_a_push_of_any_bytes_is_refused_whole_or_counted(what: tuple[int, bytes], body: dict[str, Any]) -> None:
    rig = live()
    reply = send(rig, Kind.PUSH, *what, body, 1)
    is_counted = 0 in rig.server._stores[1].slots[(1, 2, 0)].open.get(1, ())
    assert is_counted is not reply.is_error
    assert not reply.is_error or str(reply.body["reason"])
    assert stored(rig) == [1.0] * SIZE
    # The round goes on: the other worker's contribution, and this one's own if the first was refused.
    for rank in (0, 1):
        entry = Entry(2, 0, SIZE, 1, payload=Payload.FRAME)
        ones = np.ones(SIZE, np.float32).tobytes()
        rig.hear("w%d" % rank, Message(Kind.PUSH, entries=(entry,), payloads=[ones]))
    assert len(stored(rig)) == SIZE
    if reply.is_error:
        assert stored(rig) == [2.0] * SIZE


@settings(max_examples=150, deadline=None)
@given(damaged(), BODIES)
def test_an_async_push_of_any_bytes_is_refused_whole_or_applied(what: tuple[int, bytes], body: dict[str, Any]) -> None:
    rig = live("dist_async")
    rig.scheduler(Kind.RULE, 1, spec={"name": "sgd", "params": {"learning_rate": 1.0}})
    reply = send(rig, Kind.PUSH, *what, body, 1)
    if reply.is_error:
        assert stored(rig) == [1.0] * SIZE
    assert not send(rig, Kind.PUSH, 0, bytes(4 * SIZE), {}, 2).is_error


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.binary(max_size=64), st.lists(st.integers(-2, 8), max_size=4)))
def test_a_pull_of_any_rows_gives_them_or_says_which_there_are(wanted: bytes | list[int]) -> None:
    rig = live()
    is_listed = isinstance(wanted, list)
    payload = bytes(rowcodec.encode_rows(np.array(wanted, np.int64))) if isinstance(wanted, list) else wanted
    reply = send(rig, Kind.PULL, rowcodec.ROWS, payload, {}, 0)
    if is_listed and sorted(set(wanted)) == wanted and all(0 <= row < ROWS for row in wanted):
        assert np.frombuffer(reply.payloads[0], np.float32).tolist() == [1.0] * WIDTH * len(wanted)
    elif is_listed:
        assert str(reply.body["reason"]).startswith("key 'emb' of shape (6, 2): rows: expected")
    assert stored(rig) == [1.0] * SIZE


@pytest.mark.parametrize("facts", [{"staleness": -1}, {"staleness": "1"}, {"staleness": True}])
def test_an_init_with_a_bound_that_is_none_is_refused(facts: dict[str, Any]) -> None:
    rig = live()
    entry = Entry(3, 0, 1, payload=Payload.FRAME)
    message = Message(Kind.INIT, body={"type": "dist_async", **facts}, entries=(entry,), payloads=[bytes(4)])
    assert "staleness is a number of pushes" in reason(rig.hear("w0", message))
    assert rig.server._stores[1].is_sync


@pytest.mark.parametrize("facts", [{"shapes": {"3": "x"}}, {"rows": {"3": "x"}}, {"shapes": {"3": [None]}}])
def test_an_init_with_garbled_facts_leaves_nothing_behind(facts: dict[str, Any]) -> None:
    """The post office answers what this raises."""
    rig = live()
    entry = Entry(3, 0, 1, payload=Payload.FRAME)
    with pytest.raises((TypeError, ValueError)):
        rig.hear("w0", Message(Kind.INIT, body=facts, entries=(entry,), payloads=[bytes(4)]))
    assert (1, 3, 0) not in rig.server._stores[1].slots
