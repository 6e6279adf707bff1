"""PS_VERBOSE: one line each, key=value, with role and rank, and no secret in it."""

from __future__ import annotations

import io
import re
import time

import pytest
from cluster import config

from distrun_runtime.protocol.handshake import Acceptor, Opener
from distrun_runtime.protocol.message import Entry, Kind, Message, Payload, entries_of
from distrun_runtime.ps.trace import Trace, describe

LINE = re.compile(r"distrun role=(worker|server|scheduler)( rank=\d+)? time=\d\d:\d\d:\d\d\.\d{3} (\S+=\S*( |$))+")


def traced(verbose: int, rank: int = 1, role: str = "worker") -> tuple[Trace, io.StringIO]:
    out = io.StringIO()
    return Trace(verbose, lambda: config(role).identity("tcp://127.0.0.1:1", rank), out), out


PUSH = Message(
    Kind.PUSH,
    store=2,
    request=9,
    priority=-3,
    entries=entries_of([Entry(4, 8, 2, 57, payload=Payload.FRAME), Entry(5, 0, 1, 57, payload=Payload.FRAME)]),
    payloads=[b"SECRETS!", b"more"],
)


def test_a_message_is_one_line_of_pairs_with_role_and_rank() -> None:
    trace, out = traced(2)
    trace.sent("server-0", PUSH)
    trace.received("in:00ff", Message(Kind.BARRIER, is_reply=True, store=1, request=3))
    first, second = out.getvalue().splitlines()
    assert LINE.fullmatch(first)
    assert LINE.fullmatch(second)
    assert first.startswith("distrun role=worker rank=1 time=")
    assert first.endswith(
        " event=send to=server-0 kind=push store=2 request=9 priority=-3 entries=2 key=4 offset=8 round=57"
        " dtype=float32 bytes=12"
    )
    assert second.endswith(" event=receive from=in:00ff kind=barrier store=1 request=3 reply=ok")


def test_the_time_of_a_line_is_the_local_time_of_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distrun_runtime.ps.trace.time.time", lambda: 1795357825.299)
    trace, out = traced(0, rank=0)
    trace.log("WARNING", "waiting for 1 of 2 workers")
    at = time.strftime("%H:%M:%S", time.localtime(1795357825))
    assert out.getvalue() == "distrun role=worker rank=0 time=%s.299 warning: waiting for 1 of 2 workers\n" % at


@pytest.mark.parametrize(("verbose", "lines"), [(0, 2), (1, 4), (2, 5)])
def test_what_is_said_at_each_level(verbose: int, lines: int) -> None:
    trace, out = traced(verbose)
    trace.log("ERROR", "worker-0 is lost")
    trace.log("WARNING", "waiting for 1 of 2 workers")
    trace.log("INFO", "event=bound endpoint=tcp://127.0.0.1:1")
    trace.log("DEBUG", "event=detail")
    if trace.has_messages:
        trace.sent("server-0", PUSH)
    assert len(out.getvalue().splitlines()) == lines
    assert "error: worker-0 is lost" in out.getvalue()
    assert "warning: waiting for 1 of 2 workers" in out.getvalue()


def test_a_node_without_a_rank_names_none() -> None:
    trace, out = traced(1, -1, "scheduler")
    trace.log("INFO", "event=bound")
    assert out.getvalue().startswith("distrun role=scheduler time=")


def test_words_of_others_stay_on_one_line() -> None:
    trace, out = traced(1)
    trace.log("WARNING", "event=refused reason=first\r\nforged role=scheduler")
    assert out.getvalue().count("\n") == 1
    assert "\\r\\nforged" in out.getvalue()


def test_strangers_get_ten_lines_a_minute_and_each_line_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("distrun_runtime.ps.trace.time.monotonic", lambda: now)
    trace, out = traced(0)
    for number in range(100):
        trace.stranger("event=denied reason=%d" % number)
        trace.stranger("event=denied reason=%d" % number)
    assert [line.split()[-1] for line in out.getvalue().splitlines()] == ["reason=%d" % each for each in range(10)]
    now = 1061.0
    trace.stranger("event=denied reason=7")
    assert out.getvalue().splitlines()[-1].endswith("reason=7 (190 lines like this one were left out before it)")


def test_what_a_terminal_obeys_is_escaped_and_long_lines_are_cut() -> None:
    trace, out = traced(0)
    trace.log("ERROR", "reason=\x1b]0;title\x07 \x9b2J \u202e ü \ud800" + "x" * 20_000)
    [line] = out.getvalue().splitlines()
    assert "reason=\\x1b]0;title\\x07 \\x9b2J \\u202e ü \\ud800xxx" in line
    assert line.endswith("characters left out)")
    assert len(line) < 8200


def test_neither_values_nor_token_nor_proofs_are_shown() -> None:
    token = b"the-token-of-this-job"
    trace, out = traced(2)
    me = config("worker").identity("tcp://127.0.0.1:1", 1)
    opener, acceptor = Opener(me, token, "aabbcc"), Acceptor(me, token, "ddeeff")
    hello = opener.hello()
    challenge = acceptor.challenge(hello)
    proof = opener.answer(challenge)
    for message in (hello, challenge, proof, PUSH):
        trace.sent("server-0", message)
    text = out.getvalue()
    for secret in (token.decode(), str(challenge.body["proof"]), str(proof.body["proof"]), "SECRETS!", "aabbcc"):
        assert secret not in text


def test_a_refusal_shows_its_reason() -> None:
    message = Message(Kind.PULL, is_reply=True, is_error=True, request=1, body={"reason": "no such\nkey"})
    assert describe(message) == "kind=pull store=0 request=1 reply=error reason='no such\\nkey'"
