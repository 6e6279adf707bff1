"""A server by scripted histories: messages that name a bucket in place of their entries, known or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from history_server import History, Piece, Sent, data, raw, reason, said, values

from distrun_runtime.protocol.message import Kind, Message

pytestmark = pytest.mark.usefixtures("engine")

Serving = Callable[..., History]


def push(server: History, bucket: int, step: int, *numbers: float, request: int = 0) -> list[Sent]:
    """Let worker 0 push `a` and `b` by their bucket; `numbers` are the elements of both."""
    return server.by_bucket(Kind.PUSH, 0, bucket, step, numbers, request=request)


def register(server: History, bucket: int, number: int, a: Any, b: Any, request: int = 0) -> list[Sent]:
    return server.register(0, bucket, number, {"a": a, "b": b}, request=request)


def again(sent: list[Sent]) -> bool:
    """Whether the one reply is a refusal that asks for the same message again."""
    [one] = sent
    return one.is_error and one.body.get("again") is True


def test_a_message_by_its_bucket_means_the_entries_so_many_rounds_later(serving: Serving) -> None:
    server = serving(workers=1)
    register(server, 1, 1, [1, 2], [3, 4])
    assert said(push(server, 1, 1, 10, 20, 30, 40)) == ["w0 PUSH"]
    assert values(server.pull(0, 2, "a", "b")) == {"a": [10, 20], "b": [30, 40]}
    assert said(server.by_bucket(Kind.PULL, 0, 1, 1)) == ["w0 PULL"]
    assert server.rounds() == {"a": 2, "b": 2}


def test_a_message_of_an_unknown_bucket_is_asked_for_again_and_counts_when_it_comes_with_its_entries(
    serving: Serving,
) -> None:
    server = serving(workers=1)
    sent = push(server, 7, 0, 1, 2, 3, 4)
    assert again(sent)
    assert reason(sent) == "bucket 7 is not known to server-0"
    assert server.rounds() == {"a": 0, "b": 0}
    assert said(server.push(0, 1, {"a": [1, 2], "b": [3, 4]}, request=sent[0].request)) == ["w0 PUSH"]
    assert values(server.pull(0, 1, "a", "b")) == {"a": [1, 2], "b": [3, 4]}


def test_what_stands_behind_such_a_message_is_asked_for_again_too_and_all_count_in_their_first_order(
    serving: Serving,
) -> None:
    """In dist_async there is no round by which a server could tell the order: it has to keep it."""
    server = serving("dist_async", workers=1)
    server.rule("sgd", learning_rate=1.0, wd=0.5)
    first = push(server, 7, 0, -2, -2, 0, 0)
    [second] = server.push(0, 2, {"a": [-4, -4]})
    [third] = server.pull(0, 2)
    assert [again([each]) for each in (*first, second, third)] == [True] * 3
    assert "an earlier message of worker-0" in reason([third])
    given = {"a": [-2, -2], "b": [0, 0]}
    assert said(server.push(0, 1, given, request=first[0].request)) == ["w0 PUSH"]
    # What comes now was sent before the second one was refused: it is not its turn.
    [fourth] = server.push(0, 3, {"a": [-8, -8]})
    assert again([fourth])
    assert said(server.push(0, 2, {"a": [-4, -4]}, request=second.request)) == ["w0 PUSH"]
    # w = 2, then w = w / 2 + 4; the pull has the first two pushes and not the third, although that came before it.
    assert values(server.pull(0, 2, request=third.request)) == {"a": [5, 5]}
    assert said(server.push(0, 3, {"a": [-8, -8]}, request=fourth.request)) == ["w0 PUSH"]
    assert values(server.pull(0, 3)) == {"a": [10.5, 10.5]}


def test_other_workers_and_other_stores_go_on_meanwhile(server: History) -> None:
    server.hear(
        "w0", data(Kind.INIT, [Piece(0, payload=raw(np.full(2, 5, np.float32)))], store=2, body={"type": "dist_sync"})
    )
    assert again(push(server, 7, 0, 1, 2, 3, 4))
    assert said(server.push(1, 1, {"a": [1, 1]})) == ["w1 PUSH"]
    assert values(server.hear("w0", data(Kind.PULL, [Piece(0)], store=2))) == {"a": [5, 5]}
    assert again(server.pull(0, 0))


def test_a_message_that_comes_again_and_is_still_unknown_is_refused_for_good_and_holds_up_nothing(
    serving: Serving,
) -> None:
    server = serving(workers=1)
    [first] = push(server, 7, 0, 1, 2, 3, 4)
    sent = push(server, 7, 0, 1, 2, 3, 4, request=first.request)
    assert reason(sent) == "bucket 7 is not known to server-0"
    assert not again(sent)
    assert values(server.pull(0, 0)) == {"a": [0, 0]}


def test_a_message_that_registers_a_bucket_out_of_turn_registers_it_when_it_comes_again(serving: Serving) -> None:
    server = serving(workers=1)
    [first] = push(server, 7, 0, 1, 2, 3, 4)
    [second] = register(server, 3, 2, [5, 5], [5, 5])
    assert again([second])
    [third] = push(server, 3, 1, 6, 6, 6, 6)
    assert again([third])
    server.push(0, 1, {"a": [1, 2], "b": [3, 4]}, request=first.request)
    assert said(register(server, 3, 2, [5, 5], [5, 5], request=second.request)) == ["w0 PUSH"]
    assert said(push(server, 3, 1, 6, 6, 6, 6, request=third.request)) == ["w0 PUSH"]
    assert said(server.by_bucket(Kind.PULL, 0, 3, 1)) == ["w0 PULL"]
    assert values(server.pull(0, 3, "a", "b")) == {"a": [6, 6], "b": [6, 6]}


def test_a_script_that_is_over_leaves_nothing_to_be_sent_again(serving: Serving) -> None:
    server = serving(workers=1)
    push(server, 7, 0, 1, 2, 3, 4)
    server.scheduler(Kind.STOP, 9, stay=True)
    assert said(server.init({"a": [1, 1]})) == ["w0 INIT"]
    assert said(server.push(0, 1, {"a": [2, 2]})) == ["w0 PUSH"]


# Checks


def elements(*given: float) -> memoryview:
    return raw(np.array(given, np.float32))


def registering(*pieces: Piece, **head: Any) -> Message:
    """Return a push that tells the server what bucket 3 is."""
    return data(Kind.PUSH, pieces, bucket=3, **head)


def later(kind: Kind, step: int, *payloads: memoryview, **head: Any) -> Message:
    return Message(kind, bucket=3, step=step, payloads=payloads, **head)


def test_a_bucket_whose_entries_do_not_fit_is_refused_in_every_round(serving: Serving) -> None:
    """What fits is looked at once, and must not be taken for granted then."""
    for wrong, words in (
        (Piece(1, 0, 3, 1, payload=elements(3, 4, 5)), "has 2 elements of float32, the message 3"),
        (Piece(0, round=1, payload=elements(3, 4)), "twice in one push"),
    ):
        server = serving()
        first = registering(Piece(0, round=1, payload=elements(1, 2)), wrong)
        assert words in reason(server.hear("w0", first))
        rest = elements(*range(wrong.length + 2))
        assert words in reason(server.hear("w0", later(Kind.PUSH, 1, rest)))
        assert server.rounds() == {"a": 0, "b": 0}


def test_a_message_of_a_good_bucket_is_looked_at_as_any_other(server: History) -> None:
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
