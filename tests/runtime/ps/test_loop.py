"""The loop: who is heard, what bad bytes and bad bodies do, what is sent before WELCOME."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
from cluster import config
from inproc import InprocNetwork, InprocTransport
from scripted_transport import Held, Script
from slowness import scaled

from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays.dtypes import Buffer
from distrun_runtime.protocol import message
from distrun_runtime.protocol.handshake import Acceptor, NodeIdentity, Opener
from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.ps import role
from distrun_runtime.ps.engine import WorkEngine
from distrun_runtime.ps.loop import Loop
from distrun_runtime.ps.trace import Trace
from distrun_runtime.transport.base import COPIED, Arrived, Down, Event, Lease, Released, Up

TOKEN = config("x").token
LIMIT_S = 60.0


class Echo:
    """A role that answers every message and fails where it is told to."""

    def __init__(self) -> None:
        self.me = config("server", rank=0).identity("tcp://127.0.0.1:1")
        self.events: list[role.Event] = []
        self.follow: list[role.Action] = []
        """What follows from every message, too."""

    def start(self, now: float) -> list[role.Action]:
        return []

    def admit(self, peer: NodeIdentity) -> str:
        return "no rank 9 here" if peer.rank == 9 else ""

    def handle(self, event: role.Event, now: float) -> list[role.Action]:
        self.events.append(event)
        if isinstance(event, role.SignalReceived):
            return [role.Finish(0)]
        if isinstance(event, role.MessageReceived):
            answer = Message(event.message.kind, is_reply=True, request=event.message.request)
            return [*self.follow, *([role.Send(event.link, answer)] if int(event.message.body["must"]) else [])]
        return []

    def tick(self, now: float) -> list[role.Action]:
        return []


class Wire:
    """A stranger's end of a connection to the loop."""

    def __init__(self, network: InprocNetwork, endpoint: str) -> None:
        self.transport: InprocTransport = network.transport()
        self.transport.connect("loop", endpoint)
        self.got: list[Event] = []
        self.wait_for(Up)

    def wait_for(self, kind: type[Any]) -> Any:
        until = time.monotonic() + scaled(LIMIT_S)
        while time.monotonic() < until:
            for number, event in enumerate(self.got):
                if isinstance(event, kind):
                    return self.got.pop(number)
            self.got += self.transport.poll(0.1)
        raise AssertionError("no %s came" % kind.__name__)

    def say(self, sent: Message) -> Message:
        """Send a message and return the next that comes."""
        self.transport.send("loop", message.encode(sent))
        return self.hear()

    def hear(self) -> Message:
        return message.decode(self.wait_for(Arrived).frames)

    def enter(self, rank: int = 1) -> Message:
        """Go through the handshake; return the verdict."""
        opener = Opener(config("worker").identity("", rank), TOKEN, "aa")
        proof = opener.answer(self.say(opener.hello()))
        return self.say(proof)


class Office:
    """A post loop in a thread."""

    def __init__(self) -> None:
        self.network = InprocNetwork()
        transport = self.network.transport()
        self.endpoint = "tcp://127.0.0.1:%d" % transport.bind("127.0.0.1")
        self.role = Echo()
        self.out = io.StringIO()
        self.loop = Loop(transport, self.role, TOKEN, Trace(0, lambda: self.role.me, self.out))
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()

    def wire(self) -> Wire:
        return Wire(self.network, self.endpoint)

    def settle(self) -> None:
        """Return when what it does after its answers, until now, is done."""
        self.wire().enter()

    def heard(self) -> list[Message]:
        return [event.message for event in self.role.events if isinstance(event, role.MessageReceived)]


@pytest.fixture
def loop() -> Iterator[Office]:
    made = Office()
    yield made
    made.loop.tell(15)
    made.thread.join(scaled(LIMIT_S))
    assert not made.thread.is_alive()


def test_a_proven_node_is_heard_and_answered(loop: Office) -> None:
    wire = loop.wire()
    assert wire.enter().kind is Kind.WELCOME
    assert wire.say(Message(Kind.BARRIER, request=5, body={"must": 1})).request == 5
    welcomed = loop.role.events[0]
    assert isinstance(welcomed, role.Welcomed)
    assert welcomed.peer.name == "worker-1"


def test_nothing_is_heard_before_welcome(loop: Office) -> None:
    wire = loop.wire()
    answer = wire.say(Message(Kind.PUSH, request=5, body={"must": 1}))
    assert (answer.kind, answer.body) == (Kind.REFUSED, {"reason": "PUSH before WELCOME"})
    assert loop.heard() == []


def test_bad_bytes_are_refused_and_do_no_harm(loop: Office) -> None:
    wire = loop.wire()
    wire.transport.send("loop", [b"GET / HTTP/1.1", b""])
    assert "not a distrun message" in wire.hear().body["reason"]
    assert loop.wire().enter().kind is Kind.WELCOME


def test_a_body_that_lacks_a_member_is_refused_and_the_node_lives(loop: Office) -> None:
    wire = loop.wire()
    wire.enter()
    answer = wire.say(Message(Kind.KEYS, request=6, body={}))
    assert answer.is_error
    assert answer.request == 6
    assert answer.body["reason"] == "KEYS is malformed: KeyError: 'must'"
    answer = wire.say(Message(Kind.KEYS, request=8, body={"must": float("inf")}))
    assert answer.body["reason"] == "KEYS is malformed: OverflowError: cannot convert float infinity to integer"
    assert wire.say(Message(Kind.BARRIER, request=7, body={"must": 1})).request == 7
    assert "event=malformed" in loop.out.getvalue()
    assert loop.out.getvalue().count("\n") == 2


@pytest.mark.parametrize("body", [{"rank": float("inf")}, {"nonce": "\ud800"}, {"version": [1]}, {"role": None}])
def test_a_garbled_hello_never_ends_the_node(loop: Office, body: dict[str, Any]) -> None:
    wire = loop.wire()
    hello = Opener(config("worker").identity("", 1), TOKEN, "aa").hello()
    assert wire.say(Message(Kind.HELLO, body={**hello.body, **body})).kind is Kind.REFUSED
    assert loop.wire().enter().kind is Kind.WELCOME


def test_a_garbled_proof_never_ends_the_node(loop: Office) -> None:
    wire = loop.wire()
    wire.say(Opener(config("worker").identity("", 1), TOKEN, "aa").hello())
    assert wire.say(Message(Kind.PROOF, body={"proof": "\ud800"})).kind is Kind.REFUSED
    assert loop.wire().enter().kind is Kind.WELCOME


def test_the_reason_of_a_refusal_is_said_on_both_sides(loop: Office) -> None:
    assert loop.wire().enter(rank=9).body == {"reason": "no rank 9 here"}
    loop.settle()
    assert "event=denied reason=no rank 9 here" in loop.out.getvalue()
    assert role.Denied("no rank 9 here") in loop.role.events


def test_who_was_refused_gets_no_second_answer(loop: Office) -> None:
    wire = loop.wire()
    wire.say(Message(Kind.HELLO, body={"version": 9}))
    for _ in range(100):
        wire.transport.send("loop", message.encode(Message(Kind.HELLO, body={"version": 9})))
    loop.settle()
    assert wire.transport.poll(0) == []


def test_a_stranger_fills_neither_log_nor_terminal(loop: Office) -> None:
    """A name of 30 MB came back in the refusal and in the log, with what a terminal obeys in it."""
    evil = "\x1b]0;gotcha\x07" * 1000
    hello = Opener(config("worker").identity("", 1), TOKEN, "aa").hello().body
    for body in [
        {"version": evil},
        {**hello, "host": "\x1b[2J"},
        {**hello, "role": "\x07"},
        {**hello, "job": evil},
    ] * 10:
        wire = loop.wire()
        answer = wire.say(Message(Kind.HELLO, body=body))
        assert answer.kind is Kind.REFUSED
        assert len(answer.body["reason"]) <= 500
    loop.settle()
    log = loop.out.getvalue()
    assert log.replace("\n", "").isprintable()
    assert len(log) < 10_000
    assert 1 <= log.count("event=") <= 10


def test_a_message_of_many_megabytes_is_not_read_before_welcome(loop: Office) -> None:
    answer = loop.wire().say(Message(Kind.HELLO, body={"version": "x" * 30_000_000}))
    assert "before WELCOME; at most" in answer.body["reason"]


def test_what_follows_from_a_message_does_not_end_the_node(loop: Office) -> None:
    """Not only the decision may fail on it, also what is done then; here there is no executor."""
    loop.role.follow = [role.Work(object()), role.Log("INFO", "went on")]
    wire = loop.wire()
    wire.enter()
    answer = wire.say(Message(Kind.PULL, request=5, body={"must": 0}))
    assert answer.is_error
    assert answer.request == 5
    assert "PULL is malformed: AssertionError" in answer.body["reason"]
    loop.role.follow = []
    assert wire.say(Message(Kind.BARRIER, request=7, body={"must": 1})).request == 7


def test_an_answer_that_cannot_be_read_is_the_end_of_its_connection(loop: Office) -> None:
    """Whoever waits for it would wait for ever."""
    wire = loop.wire()
    wire.enter()
    wire.transport.send("loop", message.encode(Message(Kind.STATS, is_reply=True, request=3)))
    loop.settle()
    [broken] = [event for event in loop.role.events if isinstance(event, role.Broken)]
    assert broken.reason == "its answer to STATS is malformed: KeyError: 'must'"


def test_the_end_of_a_proven_connection_is_told_and_of_a_strangers_is_not(loop: Office) -> None:
    stranger, known = loop.wire(), loop.wire()
    stranger.transport.disconnect("loop")
    known.enter()
    known.transport.disconnect("loop")
    last = loop.wire()
    last.enter()
    last.say(Message(Kind.BARRIER, request=1, body={"must": 1}))
    kinds = [role.Welcomed, role.Broken, role.Welcomed, role.MessageReceived]
    assert [type(event) for event in loop.role.events] == kinds


class Leaving(Script):
    """Who knocks goes as soon as it has sent PROOF."""

    loop: Loop

    def __init__(self) -> None:
        super().__init__()
        self.opener = Opener(config("worker").identity("", 1), TOKEN, "aa")
        self.coming.append([Arrived("in:1", message.encode(self.opener.hello()))])

    def send(self, link: str, frames: Sequence[Buffer]) -> Lease:
        lease = super().send(link, frames)
        self.gone.add(link)
        proof = self.opener.answer(message.decode(frames))
        self.coming += [[Arrived(link, message.encode(proof))], [Down(link, "it has gone")]]
        return lease

    def poll(self, timeout_s: float) -> list[Event]:
        events = super().poll(timeout_s)
        if not self.coming:
            self.loop.tell(15)
        return events


def test_who_has_gone_before_it_is_welcome_is_not_in_the_job() -> None:
    script, echo = Leaving(), Echo()
    script.loop = Loop(script, echo, TOKEN, Trace(0, lambda: echo.me, io.StringIO()))
    script.loop.run()
    assert [type(event) for event in echo.events] == [role.SignalReceived]


class Caller(Echo):
    """A role that connects and sends at once."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self.endpoint = endpoint

    def start(self, now: float) -> list[role.Action]:
        return [role.Connect("server-0", self.endpoint), role.Send("server-0", Message(Kind.BARRIER, request=1))]


def test_what_is_sent_before_welcome_is_held_back_and_sent_then() -> None:
    network = InprocNetwork()
    server, client = network.transport(), network.transport()
    caller = Caller("tcp://127.0.0.1:%d" % server.bind("127.0.0.1"))
    loop = Loop(client, caller, TOKEN, Trace(0, lambda: caller.me, io.StringIO()))
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    acceptor = Acceptor(config("server", rank=0).identity(""), TOKEN, "bb")
    seen: list[Kind] = []
    while len(seen) < 3:
        for event in server.poll(LIMIT_S):
            assert isinstance(event, Arrived)
            arrived = message.decode(event.frames)
            seen.append(arrived.kind)
            if arrived.kind is Kind.HELLO:
                server.send(event.link, message.encode(acceptor.challenge(arrived)))
            elif arrived.kind is Kind.PROOF:
                server.send(event.link, message.encode(acceptor.verdict(arrived, lambda peer: "")))
    assert seen == [Kind.HELLO, Kind.PROOF, Kind.BARRIER]
    loop.tell(15)
    thread.join(scaled(LIMIT_S))
    assert not thread.is_alive()


@dataclass
class Counted:
    """What a reply carries; it counts how often it was given back."""

    returns: int = 0

    def give_back(self) -> None:
        self.returns += 1


def test_what_a_reply_carried_is_given_back_once_before_the_next_work() -> None:
    script, held, unknown, reply = Script(), Held(), Held(), Counted()
    engine = WorkEngine(devices.get("cpu:0"))
    engine.sent(cast(Any, [reply]), held)
    engine.do(role.Discard(1))
    assert reply.returns == 0
    script.coming.append([Released(unknown), Released(held), Released(held)])
    caller = Echo()
    loop = Loop(script, caller, TOKEN, Trace(0, lambda: caller.me, io.StringIO()), engine=engine)
    loop.tell(15)
    loop.run()
    engine.do(role.Discard(1))
    engine.do(role.Discard(1))
    assert reply.returns == 1


def test_what_has_left_when_a_reply_was_sent_is_given_back_by_the_next_work() -> None:
    engine, left, unsent = WorkEngine(devices.get("cpu:0")), Counted(), Counted()
    engine.sent(cast(Any, [left]), COPIED)
    engine.sent(cast(Any, [unsent]), None)
    engine.do(role.Discard(1))
    assert (left.returns, unsent.returns) == (1, 1)
