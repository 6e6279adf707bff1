from __future__ import annotations

import contextlib
import os
import queue
import threading
import time

import pytest

from distrun_runtime.contract import wire
from distrun_runtime.coordinator import channel, events
from distrun_runtime.coordinator.channel import Greeting, Inlet, StreamChannel
from distrun_runtime.errors import WireError

LIMIT_S = 60.0
HELLO = wire.encode({"type": "hello", "version": 1})


class Pipes:
    """A channel, and what an agent would hold."""

    def __init__(self) -> None:
        self.hear, theirs_out = os.pipe()
        theirs_in, self.say = os.pipe()
        self.killed = threading.Event()
        self.channel = StreamChannel(
            "d1", theirs_in, theirs_out, explain=lambda: "exit code 9", on_kill=self.killed.set
        )
        self.events: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
        self.channel.start(self.events.put)

    def next(self) -> events.Event:
        return self.events.get(timeout=LIMIT_S)

    def close(self) -> None:
        self.channel.kill()
        while not isinstance(self.next(), events.AgentLost):
            pass
        for fd in (self.hear, self.say):
            with contextlib.suppress(OSError):
                os.close(fd)


def lost(pipes: Pipes) -> str:
    event = pipes.next()
    assert isinstance(event, events.AgentLost)
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
    inlet = Inlet("d1")
    assert inlet.feed(b"welcome\nDISTR", 5.0) == []
    assert not inlet.greeted
    assert inlet.noise == "welcome | DISTR"
    found = inlet.feed(b"UN/2 x\n" + HELLO + wire.encode({"type": "bye"})[:7], 6.0)
    assert [type(event) for event in found] == [events.Warned, events.AgentHello]
    assert isinstance(found[1], events.AgentHello)
    assert found[1].arrived == 6.0
    assert (inlet.greeted, inlet.said_bye) == (True, False)
    assert inlet.feed(wire.encode({"type": "bye"})[7:], 7.0) == [events.Bye("d1")]
    assert inlet.said_bye


def test_frames_become_events_and_the_end_is_explained() -> None:
    pipes = Pipes()
    os.write(pipes.say, b"welcome\nDISTRUN/1 x\n" + HELLO)
    assert isinstance(pipes.next(), events.Warned)
    assert isinstance(pipes.next(), events.AgentHello)
    os.close(pipes.say)
    assert lost(pipes) == "its connection ended: exit code 9"
    pipes.channel.kill()
    os.close(pipes.hear)


@pytest.mark.parametrize("rubbish", [b"\xff" * 20, b"\0\0\0\x02{}", b"\0\0\0\x12" + b'{"type":"started"}'])
def test_rubbish_ends_the_channel_with_a_reason(rubbish: bytes) -> None:
    pipes = Pipes()
    os.write(pipes.say, b"DISTRUN/1 x\n" + rubbish)
    assert "exit code 9" in lost(pipes)
    assert pipes.killed.wait(LIMIT_S)
    os.close(pipes.say)
    os.close(pipes.hear)


def test_what_is_sent_arrives_in_order_before_the_end_of_input() -> None:
    pipes = Pipes()
    data = [b"%d," % number for number in range(50_000)]
    for piece in data:
        pipes.channel.send(piece)
    pipes.channel.close()
    pipes.channel.send(b"too late")
    got = b""
    while True:
        piece = os.read(pipes.hear, 1 << 20)
        if not piece:
            break
        got += piece
    assert got == b"".join(data)
    pipes.close()


def test_an_agent_that_does_not_read_never_makes_us_wait() -> None:
    pipes = Pipes()
    begin = time.monotonic()
    for _ in range(17):
        pipes.channel.send(b"x" * (channel.WRITE_LIMIT // 16))
    assert time.monotonic() - begin < 30  # it never reads
    assert lost(pipes) == "it does not read what we send"
    while os.read(pipes.hear, 1 << 20):  # it sees the end of its input although it did not read before
        pass
    pipes.close()


def test_kill_ends_both_threads_although_the_agent_does_nothing() -> None:
    before = threading.active_count()
    pipes = Pipes()
    pipes.channel.send(b"x" * 1_000_000)
    pipes.close()
    until = time.monotonic() + LIMIT_S
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_an_agent_that_died_is_no_error_to_the_sender() -> None:
    pipes = Pipes()
    os.close(pipes.hear)
    pipes.channel.send(b"x")
    pipes.channel.send(b"y")
    os.close(pipes.say)
    assert "exit code 9" in lost(pipes)
    pipes.channel.kill()
