"""A server by scripted histories: messages that name their entries by a bucket, good ones and others."""

from __future__ import annotations

from typing import Any

import numpy as np
from history_server import History, Piece, data, raw, reason, said, values

from distrun_runtime.protocol.message import Kind, Message


def elements(*given: float) -> memoryview:
    return raw(np.array(given, np.float32))


def registering(*pieces: Piece, **head: Any) -> Message:
    """Return a push that tells the server what bucket 3 is."""
    return data(Kind.PUSH, pieces, bucket=3, **head)


def later(kind: Kind, step: int, *payloads: memoryview, **head: Any) -> Message:
    return Message(kind, bucket=3, step=step, payloads=payloads, **head)


def test_a_bucket_stands_for_its_entries_in_later_rounds() -> None:
    with History() as server:
        first = registering(Piece(0, round=1, payload=elements(1, 2)), Piece(1, round=1, payload=elements(3, 4)))
        assert said(server.hear("w0", first)) == ["w0 PUSH"]
        assert said(server.hear("w0", later(Kind.PUSH, 1, elements(10, 20, 30, 40)))) == ["w0 PUSH"]
        for number in (1, 2):
            server.push(1, number, {"a": [number, number], "b": [0, 0]})
        assert values(server.pull(1, 2, "a", "b")) == {"a": [12, 22], "b": [30, 40]}
        [answer] = server.hear("w0", later(Kind.PULL, 1))
        assert (answer.is_error, said([answer])) == (False, ["w0 PULL"])


def test_a_bucket_whose_entries_do_not_fit_is_refused_in_every_round() -> None:
    """What fits is looked at once, and must not be taken for granted then."""
    for wrong, words in (
        (Piece(1, 0, 3, 1, payload=elements(3, 4, 5)), "has 2 elements of float32, the message 3"),
        (Piece(0, round=1, payload=elements(3, 4)), "twice in one push"),
    ):
        with History() as server:
            first = registering(Piece(0, round=1, payload=elements(1, 2)), wrong)
            assert words in reason(server.hear("w0", first))
            rest = elements(*range(wrong.length + 2))
            assert words in reason(server.hear("w0", later(Kind.PUSH, 1, rest)))
            assert server.rounds() == {"a": 0, "b": 0}


def test_a_message_of_a_good_bucket_is_looked_at_as_any_other() -> None:
    with History() as server:
        first = registering(Piece(0, round=1, payload=elements(1, 2)), Piece(1, round=1, payload=elements(3, 4)))
        server.hear("w0", first)
        assert "the message brings others" in reason(server.hear("w0", later(Kind.PUSH, 1, elements(1, 2, 3))))
        scaled = later(Kind.PUSH, 1, elements(1, 2, 3, 4), body={"scale": "2"})
        assert "scaled by a finite number" in reason(server.hear("w0", scaled))
        skips = later(Kind.PUSH, 1, elements(1, 2, 3, 4), body={"skip": {}})
        assert "a skipped round brings no value" in reason(server.hear("w0", skips))
        # None of them was counted: the next push of the bucket is that of round 2.
        assert said(server.hear("w0", later(Kind.PUSH, 1, elements(5, 6, 7, 8)))) == ["w0 PUSH"]
        for number in (1, 2):
            server.push(1, number, {"a": [0, 0], "b": [0, 0]})
        assert values(server.pull(1, 2, "a", "b")) == {"a": [5, 6], "b": [7, 8]}


def test_a_bucket_that_was_never_told_is_refused() -> None:
    with History() as server:
        assert "bucket 3 is not known" in reason(server.hear("w0", later(Kind.PUSH, 1, elements(1, 2))))
