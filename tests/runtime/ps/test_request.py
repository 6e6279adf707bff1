"""A request in flight: its outcome, what follows it, and its deadline."""

from __future__ import annotations

import pytest

from distrun_runtime.errors import KVError, RuleError, RuntimeFault, TimedOut
from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.ps.role import NodeRequest, when_done


def test_what_follows_is_called_with_the_error_before_anybody_stops_waiting() -> None:
    request = NodeRequest("pull")
    heard: list[tuple[RuntimeFault | None, bool]] = []
    request.then(lambda error: heard.append((error, request.is_done)))
    error = KVError("no")
    request.resolve((), error)
    assert heard == [(error, False)]
    request.then(lambda error: heard.append((error, request.is_done)))
    assert heard[1] == (error, True)


def test_each_wait_raises_an_exception_of_its_own() -> None:
    request = NodeRequest("push")
    request.resolve((), RuleError("no", "where"))
    caught = []
    for _ in range(2):
        with pytest.raises(RuleError, match="no") as info:
            request.wait(0)
        caught.append(info.value)
    assert caught[0] is not caught[1]
    assert [error.server_traceback for error in caught] == ["where", "where"]


def test_a_deadline_says_whose_it_is() -> None:
    request = NodeRequest("pull of key 'w'", limit="the limit is --op-timeout")
    request.note = "waiting for worker-1"
    with pytest.raises(TimedOut, match=r"no answer for 0 s, waiting for worker-1 \(the limit is --op-timeout\)"):
        request.wait(0)
    with pytest.raises(TimedOut, match=r"waiting for worker-1 \(the caller's\)"):
        request.wait(0, "the caller's")
    request.resolve((Message(Kind.PULL),), None)
    assert [reply.kind for reply in request.wait(0)] == [Kind.PULL]


def test_something_may_follow_several_requests() -> None:
    first, second = NodeRequest("one"), NodeRequest("two")
    done: list[int] = []
    when_done([first, second], lambda: done.append(2))
    when_done([], lambda: done.append(0))
    first.resolve((), KVError("no"))
    assert done == [0]
    second.resolve((), None)
    assert done == [0, 2]
    when_done([first, second], lambda: done.append(3))
    assert done == [0, 2, 3]


def test_a_short_deadline_is_told_in_tenths_of_a_second() -> None:
    with pytest.raises(TimedOut, match=r"pull: no answer for 0\.[12] s"):
        NodeRequest("pull").wait(0.1)
