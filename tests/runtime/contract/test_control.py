"""What clients may ask of a coordinator, frame by frame."""

from __future__ import annotations

from typing import Any

import pytest

from distrun_runtime.contract import control
from distrun_runtime.contract.control import Conversation, Refusal
from distrun_runtime.contract.session import Frame

HELLO = {"type": "hello", "version": [1, 0]}


def greeted(version: Any = (1, 0), **more: bool) -> Conversation:
    conversation = Conversation(**more)
    conversation.take(Frame({"type": "hello", "version": list(version)}))
    return conversation


@pytest.mark.parametrize(
    ("header", "body", "expected"),
    [
        ({"type": "state"}, b"", control.State()),
        ({"type": "stop"}, b"", control.Stop("TERM")),
        ({"type": "stop", "signal": "INT"}, b"", control.Stop("INT")),
        ({"type": "stop", "by": "me\x1b\n from the dashboard"}, b"", control.Stop("TERM", "me from the dashboard")),
        ({"type": "kill"}, b"", control.Kill()),
        ({"type": "detach"}, b"", control.Detach()),
        ({"type": "stack", "task": "worker-0"}, b"", control.Stack("worker-0")),
        ({"type": "subscribe"}, b"", control.Subscribe()),
        ({"type": "subscribe", "events": True, "output": False}, b"", control.Subscribe(events=True)),
        (
            {"type": "subscribe", "output": {"cursor": None}},
            b"",
            control.Subscribe(output=control.OutputWanted()),
        ),
        (
            {"type": "subscribe", "metrics": True, "output": {"cursor": 7}},
            b"",
            control.Subscribe(metrics=True, output=control.OutputWanted(7)),
        ),
        (
            {"type": "subscribe", "metrics": True, "look": ["d1", "d2"]},
            b"",
            control.Subscribe(metrics=True, look=("d1", "d2")),
        ),
        ({"type": "subscribe", "output": {"tail": 5}}, b"", control.Subscribe(output=control.OutputWanted(None, 5))),
        (
            {"type": "subscribe", "output": {"since": 1.5e9, "tasks": ["worker-0"]}},
            b"",
            control.Subscribe(output=control.OutputWanted(since=1.5e9, tasks=("worker-0",))),
        ),
    ],
)
def test_a_client_that_has_greeted_may_ask(
    header: dict[str, Any], body: bytes, expected: control.ClientRequest
) -> None:
    assert greeted().take(Frame(header, body)) == expected


def test_a_client_that_has_not_greeted_may_not() -> None:
    with pytest.raises(Refusal, match="the first frame must be hello, found 'stop'") as caught:
        Conversation().take(Frame({"type": "stop"}))
    assert caught.value.is_last


@pytest.mark.parametrize("kind", control.FIXED)
def test_a_client_of_another_major_version_may_ask_for_what_never_changes(kind: str) -> None:
    for version in ((2, 0), (0, 9)):
        greeted(version).take(Frame({"type": kind, "version": list(version)}))


@pytest.mark.parametrize("kind", ["subscribe", "detach", "stack", "something new"])
def test_a_client_of_another_major_version_may_ask_for_nothing_else(kind: str) -> None:
    with pytest.raises(Refusal, match=r"needs control protocol 1\.x") as caught:
        greeted((2, 0)).take(Frame({"type": kind}))
    assert not caught.value.is_last  # it may go on with what it may


def test_a_newer_minor_version_may_ask_for_all() -> None:
    assert greeted((1, 7)).take(Frame({"type": "detach"})) == control.Detach()


@pytest.mark.parametrize("kind", ["signal", "answer", "spawn"])
def test_signals_and_answers_are_the_launching_clients(kind: str) -> None:
    with pytest.raises(Refusal, match=f"a client may not send '{kind}'") as caught:
        greeted().take(Frame({"type": kind, "name": "INT", "id": 1}))
    assert not caught.value.is_last


def test_the_launching_client_need_not_greet() -> None:
    conversation = Conversation(is_launcher=True)
    assert conversation.take(Frame({"type": "signal", "name": "HUP"})) == control.Signal("HUP")
    answers = [Frame({"type": "answer", "id": 3, "given": given}, b"x") for given in (True, False)]
    assert [conversation.take(each) for each in answers] == [
        control.PromptAnswer(3, given=True, body=b"x"),
        control.PromptAnswer(3, body=b"x"),
    ]
    assert [control.PromptAnswer(3, given, b"x").text for given in (True, False)] == ["x", None]


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ({"type": "hello"}, "expected the members version, found none"),
        ({"type": "hello", "version": 1}, "version: expected a list, found 1"),
        ({"type": "hello", "version": ["1", 0]}, "version: expected a whole number, found '1'"),
        ({"type": "hello", "version": [1]}, r"version: expected \[major, minor\], found \[1\]"),
        ({"type": "stop", "signal": "KILL"}, "signal: expected one of TERM, INT, found 'KILL'"),
        ({"type": "subscribe", "output": True}, "output: expected an object, found True"),
        ({"type": "subscribe", "output": {"cursor": -1}}, "cursor: expected a number from 0 or null, found -1"),
        ({"type": "subscribe", "output": {"tail": "x"}}, "tail: expected"),
        ({"type": "subscribe", "output": {"until": "later"}}, "until: expected"),
        ({"type": "subscribe", "output": {"tail": True}}, "tail: expected"),
        ({"type": "subscribe", "look": "d1"}, "look: expected a list, found 'd1'"),
        ({"type": "subscribe", "look": ["d1", 2]}, "look: expected a text, found 2"),
        ({"type": "subscribe", "look": ["d1"] * 1001}, "look: expected a list of at most 1000 names, found 1001"),
    ],
)
def test_what_is_malformed_is_refused_and_the_last_frame(header: dict[str, Any], found: str) -> None:
    with pytest.raises(Refusal, match=found) as caught:
        greeted().take(Frame(header))
    assert caught.value.is_last
