"""What is wrong with a worker's message is found before anything changes, and said with the key's name."""

from __future__ import annotations

from typing import Any

import pytest
from rig import VALUE, Rig, kinds, reason, works

from distrun_runtime.protocol.message import Entry, Kind, Message, Payload


def push(rig: Rig, codec: int, payload: bytes, body: dict[str, Any] | None = None, **changes: Any) -> Any:
    entry = Entry(**{"key": 0, "offset": 0, "length": 2, "round": 1, "payload": Payload.FRAME, **changes}, codec=codec)
    return rig.hear("w0", Message(Kind.PUSH, entries=(entry,), body=body or {}, payloads=[payload]))


def pull(rig: Rig, codec: int, body: dict[str, Any] | None = None, payload: bytes | None = None) -> Any:
    kind = Payload.NONE if payload is None else Payload.FRAME
    entry = Entry(0, 0, 2, 0, codec=codec, payload=kind)
    return rig.hear("w0", Message(Kind.PULL, entries=(entry,), body=body or {}, payloads=[payload] if payload else []))


@pytest.mark.parametrize(
    ("codec", "payload", "body", "words"),
    [
        (9, bytes(4), {}, "key 'a': unknown codec number 9; known are 1 (2bit)"),
        (1, bytes(5), {}, "key 'a': compression '2bit' makes 4 bytes of 2 elements, the payload has 5"),
        (3, b"", {}, "key 'a': compression 'fp16' makes 4 bytes of 2 elements, the payload has 0"),
        (1, bytes(4), {"codec": {"threshold": -1}}, "key 'a': compression '2bit': threshold=-1: expected"),
        (1, bytes(4), {"codec": {"treshold": 1}}, "has no parameter 'treshold'"),
        (1, bytes(4), {"codec": [1]}, "key 'a': the parameters of a codec are an object, not [1]"),
        (16, bytes(8), {}, "key 'a' is not row-sparse"),
        (0, VALUE, {"scale": True}, "a contribution is scaled by a finite number, not by True"),
        (0, VALUE, {"scale": float("inf")}, "a contribution is scaled by a finite number, not by inf"),
        (0, VALUE, {"scale": "2"}, "a contribution is scaled by a finite number, not by '2'"),
    ],
)
def test_a_push_that_cannot_be_read_is_refused(codec: int, payload: bytes, body: dict[str, Any], words: str) -> None:
    rig = Rig()
    assert words in reason(push(rig, codec, payload, body))
    assert works(rig) == []
    assert kinds(rig.push(0, 1)) == [("w0", "PUSH")], "its round is still open to the worker"


def test_integers_are_neither_compressed_nor_scaled() -> None:
    rig = Rig()
    entry = Entry(2, 0, 2, dtype=4, payload=Payload.FRAME)
    rig.hear("w0", Message(Kind.INIT, entries=(entry,), payloads=[VALUE]))
    assert reason(push(rig, 1, bytes(4), key=2, dtype=4)) == "key 2: compression '2bit' is for float values, not int32"
    assert reason(push(rig, 0, VALUE, {"scale": 0.5}, key=2, dtype=4)) == (
        "key 2: only float values are scaled, not int32"
    )
    assert kinds(push(rig, 0, VALUE, {"scale": 1}, key=2, dtype=4)) == [("w0", "PUSH")]


def test_one_push_has_each_piece_once() -> None:
    rig = Rig()
    assert reason(rig.push(0, 1, 0, 0)) == "key 'a', offset 0: twice in one push"


def test_only_sums_travel_back_compressed_and_weights_at_most_as_fp16() -> None:
    rig = Rig()
    assert kinds(pull(rig, 1)) == [("w0", "PULL")]
    rig.scheduler(Kind.RULE, 1, spec={"name": "sgd", "params": {}})
    assert reason(pull(rig, 1)) == "key 'a': weights of a rule travel back in full or as fp16, not as 2bit"
    assert kinds(pull(rig, 3)) == [("w0", "PULL")]
    assert "values of an asynchronous store" in reason(pull(Rig("dist_async"), 4))


def test_a_pull_of_rows_says_which_and_no_other_pull_brings_anything() -> None:
    rig = Rig(rows={"0": 1})
    assert reason(pull(rig, 16)) == "key 'a': PULL with payload kind NONE"
    assert reason(pull(rig, 3, payload=bytes(4))) == "key 'a': PULL with payload kind FRAME"
    assert kinds(pull(rig, 16, payload=bytes(8))) == [("w0", "PULL")]


def test_rows_must_be_whole_in_every_piece() -> None:
    rig = Rig()
    init = Message(Kind.INIT, body={"rows": {"5": 3}}, entries=(Entry(5, 0, 2, payload=Payload.FRAME),))
    init = Message(Kind.INIT, body=init.body, entries=init.entries, payloads=[VALUE])
    assert reason(rig.hear("w0", init)) == "key 5: 2 elements from 0 on are not whole rows of 3"
    assert "no such piece" in reason(rig.pull(0, 0, 5))


# Assign


def assign(rig: Rig, **changes: Any) -> Any:
    entry = Entry(**{"key": 0, "offset": 0, "length": 2, "payload": Payload.FRAME, **changes})
    payload = bytes(entry.size_bytes)
    return rig.hear("w0", Message(Kind.INIT, body={"assign": True}, entries=(entry,), payloads=[payload]))


def test_assign_replaces_the_value_and_no_round() -> None:
    rig = Rig()
    for rank in (0, 1):
        rig.push(rank, 1)
    works(rig)
    assert kinds(assign(rig)) == [("w0", "INIT")]
    assert works(rig) == ["assign"]
    assert rig.server._stores[1].rounds() == [(0, 1), (1, 0)]


def test_assign_to_what_does_not_exist_or_fit_is_refused() -> None:
    rig = Rig()
    assert reason(assign(rig, key=7)) == "key 7, offset 0: assigned before it was initialised"
    assert "2 elements of float32, the message 1 of float32" in reason(assign(rig, length=1))
    assert works(rig) == []
