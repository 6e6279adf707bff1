from __future__ import annotations

import contextlib
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import ANY

import pytest
from slowness import scaled

from distrun_runtime.contract import agent_messages, session
from distrun_runtime.contract.session import Frame, Session
from distrun_runtime.coordinator import messages
from distrun_runtime.coordinator.channel import Greeting, Inlet, SessionChannel, SocketConnection, StreamChannel
from distrun_runtime.errors import ContractError, WireError

LIMIT_S = scaled(60.0)
HELLO = session.encode({"type": "hello", "version": 1, "seq": 1})
BYE = session.encode({"type": "bye", "seq": 2})


class Pipes:
    """A channel, and what an agent would hold."""

    def __init__(self) -> None:
        self.hear, theirs_out = os.pipe()
        theirs_in, self.say = os.pipe()
        self.channel = StreamChannel("d1", theirs_in, theirs_out, program=b"program\n", explain=lambda: "exit code 9")
        self.events: queue.SimpleQueue[messages.Event] = queue.SimpleQueue()
        self.channel.start(self.events.put)
        assert os.read(self.hear, 8) == b"program\n"

    def next(self) -> messages.Event:
        return self.events.get(timeout=LIMIT_S)

    def close(self) -> None:
        self.channel.kill()
        while not isinstance(self.next(), messages.AgentLost):
            pass
        for fd in (self.hear, self.say):
            with contextlib.suppress(OSError):
                os.close(fd)


def lost(pipes: Pipes) -> str:
    event = pipes.next()
    assert isinstance(event, messages.AgentLost)
    return event.reason


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_greeting_is_found_after_noise_in_any_pieces(size: int) -> None:
    greeting = Greeting()
    data = b"motd\r\nhi DISTRUN/1 n0nce\nrest"
    rest = None
    for begin in range(0, len(data), size):
        piece = data[begin : begin + size]
        rest = greeting.feed(piece) if rest is None else rest + piece
    assert (rest, greeting.nonce, greeting.noise) == (b"rest", "n0nce", ["motd", "hi "])


@pytest.mark.parametrize("line", [b"noise\n", b"noise"])
def test_endless_noise_is_given_up(line: bytes) -> None:
    greeting = Greeting()

    def feed() -> None:
        for _ in range(100_000):
            greeting.feed(line)

    with pytest.raises(WireError, match="not an agent's greeting"):
        feed()


def test_an_inlet_makes_events_of_an_agents_bytes_and_knows_its_last_word() -> None:
    session = Session()
    session.connect()
    inlet = Inlet("d1", session)
    assert inlet.feed(b"welcome\nDISTR", 5.0) == []
    assert not inlet.greeted
    assert inlet.noise == "welcome | DISTR"
    found = inlet.feed(b"UN/2 x\n" + HELLO + BYE[:7], 6.0)
    assert [type(event) for event in found] == [agent_messages.Warned, agent_messages.AgentHello]
    assert isinstance(found[1], agent_messages.AgentHello)
    assert found[1].arrived == 6.0
    assert (inlet.greeted, inlet.said_bye) == (True, False)
    assert inlet.feed(BYE[7:9], 7.5) == [agent_messages.Pong("d1")], "a part of a frame is a sign of life"
    assert inlet.feed(BYE[9:10], 8.0) == []
    assert inlet.feed(BYE[10:], 8.0) == [agent_messages.Bye("d1")]
    assert inlet.said_bye


@pytest.mark.parametrize("last", [{"type": "bye"}, {"type": "refused", "reason": "no numpy"}])
def test_a_last_word_before_a_frame_that_is_wrong_does_not_count(last: dict[str, str]) -> None:
    """Nobody gets its event."""
    session_ = Session()
    session_.connect()
    inlet = Inlet("d1", session_, greets=False)
    with pytest.raises((ContractError, WireError)):
        inlet.feed(HELLO + session.encode({**last, "seq": 2}) + session.encode({"type": "exited", "seq": 3}), 6.0)
    assert not inlet.is_leaving


@pytest.mark.parametrize("rubbish", [b"\xff" * 20, b"\0\0\0\x02{}", b"\0\0\0\x12" + b'{"type":"started"}'])
def test_rubbish_ends_the_channel_with_a_reason(rubbish: bytes) -> None:
    pipes = Pipes()
    os.write(pipes.say, b"DISTRUN/1 x\n" + rubbish)
    assert "exit code 9" in lost(pipes)
    assert pipes.channel.is_over
    assert os.read(pipes.hear, 1) == b"", "it sees the end of its input"
    os.close(pipes.say)
    os.close(pipes.hear)


def test_what_is_sent_arrives_in_order_before_the_end_of_input() -> None:
    pipes = Pipes()
    for number in range(5_000):
        pipes.channel.send(Frame({"type": "spawn", "n": number}, b"x" * 100))
    pipes.channel.close()
    pipes.channel.send(Frame({"type": "too late"}))
    found = session.Decoder().feed(read_all(pipes.hear))
    assert [(frame.header["n"], frame.header["seq"]) for frame in found] == [(n, n + 1) for n in range(5_000)]
    pipes.close()


def read_all(fd: int) -> bytes:
    got = bytearray()
    while True:
        piece = os.read(fd, 1 << 20)
        if not piece:
            return bytes(got)
        got += piece


def test_an_agent_that_does_not_read_never_makes_us_wait() -> None:
    pipes = Pipes()
    begin = time.monotonic()
    for _ in range(17):
        pipes.channel.send(Frame({"type": "spawn"}, b"x" * (session.LIMIT // 16)))
    assert time.monotonic() - begin < 30  # it never reads
    assert re.match(r"it does not read what we send: .* over the limit of 67108864", lost(pipes))
    read_all(pipes.hear)  # it sees the end of its input although it did not read before
    pipes.close()


def test_kill_ends_both_threads_although_the_agent_does_nothing() -> None:
    before = threading.active_count()
    pipes = Pipes()
    pipes.channel.send(Frame({"type": "spawn"}, b"x" * 1_000_000))
    pipes.close()
    until = time.monotonic() + LIMIT_S
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_an_agent_that_died_is_no_error_to_the_sender() -> None:
    pipes = Pipes()
    os.close(pipes.hear)
    pipes.channel.send(Frame({"type": "spawn"}))
    pipes.channel.send(Frame({"type": "stop"}))
    os.close(pipes.say)
    assert "exit code 9" in lost(pipes)
    pipes.channel.kill()


# Connections that are replaced


class Far:
    """An agent's end: the session, over the last of several socket pairs."""

    def __init__(self, **members: Any) -> None:
        self.session = Session()
        self.channel = SessionChannel("d1", greets=False, **members)
        self.events: queue.SimpleQueue[messages.Event] = queue.SimpleQueue()
        self.heard: list[Frame] = []
        self.sock: socket.socket | None = None
        self._opened: list[socket.socket] = []

    def connect(self) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(LIMIT_S)
        self.sock = ours
        self._opened.append(ours)
        self.session.connect()
        self.channel.attach(SocketConnection(theirs))

    def turn(self) -> None:
        """Send what is due, take what comes next, and send what is due then: there may be no other turn."""
        self._send()
        self.heard += self.session.feed(self.sock.recv(65536))
        self._send()

    def _send(self) -> None:
        while self.session.is_ready:
            self.sock.sendall(self.session.next())

    def until(self, kind: type[messages.Event]) -> messages.Event:
        while True:
            event = self.events.get(timeout=LIMIT_S)
            if isinstance(event, kind):
                return event

    def cut(self) -> None:
        self.sock.close()

    def close(self) -> None:
        self.channel.kill()
        for sock in self._opened:
            sock.close()


@pytest.fixture
def far() -> Iterator[Far]:
    """An agent whose session holds."""
    found = Far(holds=True)
    yield found
    found.close()


def test_a_session_goes_on_over_another_connection(far: Far) -> None:
    far.connect()  # a connection may be there before the loop starts
    far.channel.start(far.events.put)
    far.session.say({"type": "hello", "version": 3})
    far.channel.send(Frame({"type": "begin"}))
    while not far.heard:
        far.turn()
    assert isinstance(far.until(agent_messages.AgentHello), agent_messages.AgentHello)
    far.cut()
    assert isinstance(far.until(messages.Cut), messages.Cut)
    far.channel.send(Frame({"type": "spawn"}))
    far.session.say({"type": "warning", "text": "said without a connection"})
    far.connect()
    while len(far.heard) < 2:
        far.turn()
    assert [frame.type for frame in far.heard] == ["begin", "spawn"]
    assert isinstance(far.until(messages.Resumed), messages.Resumed)
    assert far.until(agent_messages.Warned) == agent_messages.Warned("d1", "said without a connection")


def test_a_new_connection_takes_the_place_of_one_that_seems_to_be_there(far: Far) -> None:
    far.channel.start(far.events.put)
    far.connect()
    far.session.say({"type": "hello", "version": 3})
    far.sock.sendall(far.session.next())
    assert isinstance(far.until(agent_messages.AgentHello), agent_messages.AgentHello)
    first = far.sock
    far.connect()
    far.channel.send(Frame({"type": "begin"}))
    while not far.heard:
        far.turn()
    first.settimeout(LIMIT_S)
    assert read_all(first.fileno()) == b"", "the other one is closed"
    assert isinstance(far.until(messages.Resumed), messages.Resumed)
    with contextlib.suppress(queue.Empty):
        while True:
            assert not isinstance(far.events.get(timeout=0.2), messages.Cut)


def test_the_end_of_a_channel_that_holds_is_said_to_the_agent_and_is_no_cut(far: Far) -> None:
    far.channel.start(far.events.put)
    far.connect()
    far.channel.close()
    while not far.heard:
        far.turn()
    assert [frame.type for frame in far.heard] == ["leave"]
    far.cut()
    assert isinstance(far.until(messages.AgentLost), messages.AgentLost)


def test_without_holding_the_end_of_a_connection_is_the_end() -> None:
    far = Far()
    far.channel.start(far.events.put)
    far.connect()
    far.cut()
    assert far.until(messages.AgentLost) == messages.AgentLost("d1", "its connection ended", ANY)


def test_pings_are_answered_while_a_large_body_crawls_through_a_slow_link(far: Far) -> None:
    """80 MiB take minutes on such a link; still no ping has more than two windows of them before it."""
    far.channel.start(far.events.put)
    far.connect()
    size = 80 * 1024 * 1024
    far.channel.send_large({"type": "runtime", "digest": "ab"}, (bytes(1024 * 1024) for _ in range(80)))
    far.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
    taken, number, pinged_at, waited = 0, 0, 0, []
    while taken < size:
        far.turn()
        for frame in far.heard:
            taken += len(frame.body)
            if frame.type == "ping":
                assert frame.header["n"] == number
                waited.append(taken - pinged_at)
        far.heard.clear()
        if taken - pinged_at > 4 * 1024 * 1024:
            number, pinged_at = number + 1, taken
            far.channel.send(messages.to_frame(messages.Ping("d1", number)))
    assert len(waited) > 10
    assert max(waited) <= 2 * session.WINDOW


def test_events_can_be_put_elsewhere_by_their_kind() -> None:
    pipes = Pipes()
    diverted: queue.SimpleQueue[messages.Event] = queue.SimpleQueue()
    pipes.channel.divert((agent_messages.Copied, agent_messages.CopyFailed), diverted.put)
    os.write(pipes.say, b"DISTRUN/3 n\n" + session.encode({"type": "copied", "files": 1, "bytes": 2, "seq": 1}))
    os.write(pipes.say, session.encode({"type": "warning", "text": "hm", "seq": 2}))
    assert pipes.next() == agent_messages.Warned("d1", "hm")
    assert diverted.get(timeout=LIMIT_S) == agent_messages.Copied("d1", 1, 2)
    pipes.close()
