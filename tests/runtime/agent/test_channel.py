"""The agent's end of the byte stream."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from distrun_runtime.agent.channel import HELD_BYTES, Channel, Descriptors, StreamSocket
from distrun_runtime.contract import session
from distrun_runtime.contract.agent_messages import AgentReady, Bye, Exited, Output, Pong, Started


class Ends:
    def __init__(self) -> None:
        reading, self.to_agent = os.pipe()
        self.from_agent, writing = os.pipe()
        self.channel = Channel(Descriptors(reading, writing))
        self._open = [reading, writing, self.to_agent, self.from_agent]

    def close(self, descriptor: int) -> None:
        self._open.remove(descriptor)
        os.close(descriptor)

    def close_all(self) -> None:
        for descriptor in list(self._open):
            with contextlib.suppress(OSError):  # the channel closed it
                self.close(descriptor)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close_all()


def test_messages_are_numbered(ends: Ends) -> None:
    ends.channel.greet(b"DISTRUN/1 x\n")
    ends.channel.say(AgentReady)
    ends.channel.say(Pong, n=1)
    ends.channel.say(Bye)
    ends.channel.flush()
    data = os.read(ends.from_agent, 4096)
    assert data.startswith(b"DISTRUN/1 x\n")
    assert [frame.header.get("seq") for frame in session.Decoder().feed(data[12:])] == [None, 1, 2], "but for pings"


def test_full_pipe_never_blocks_and_nothing_is_lost(ends: Ends) -> None:
    for _ in range(20):
        ends.channel.say(Output, data=b"x" * 100_000)
    ends.channel.flush()
    assert ends.channel.wants_to_write
    assert not ends.channel.takes_output()
    decoder, count = session.Decoder(), 0
    while count < 20:
        count += len(decoder.feed(os.read(ends.from_agent, 1 << 16)))
        ends.channel.flush()
    assert not ends.channel.wants_to_write
    assert ends.channel.takes_output()


def test_end_of_input_is_noticed(ends: Ends) -> None:
    os.write(ends.to_agent, session.encode({"type": "ping"}))
    assert [frame.type for frame in ends.channel.receive()] == ["ping"]
    assert ends.channel.receive() == []
    assert not ends.channel.is_over
    ends.close(ends.to_agent)
    assert ends.channel.receive() == []
    assert ends.channel.is_over
    assert ends.channel.fault == ""


def test_stream_that_is_not_ours_ends_the_channel_with_a_reason(ends: Ends) -> None:
    os.write(ends.to_agent, b"\xff" * 8)
    assert ends.channel.receive() == []
    assert ends.channel.is_over
    assert "limit" in ends.channel.fault


def test_reader_that_is_gone_breaks_the_channel_quietly(ends: Ends) -> None:
    ends.close(ends.from_agent)
    ends.channel.say(Pong)
    ends.channel.flush()
    assert ends.channel.is_broken
    ends.channel.say(Pong)
    assert not ends.channel.wants_to_write


def test_output_waits_while_the_coordinator_does_not_say_that_it_has_what_was_sent(ends: Ends) -> None:
    decoder, frames = session.Decoder(), 0
    while ends.channel.takes_output():
        ends.channel.say(Output, data=b"x" * 100_000)
        while ends.channel.wants_to_write:
            ends.channel.flush()
            frames += len(decoder.feed(os.read(ends.from_agent, 1 << 16)))
    assert frames == HELD_BYTES // 100_000 + 1
    os.write(ends.to_agent, session.encode({"type": "received", "seq": frames}))
    assert ends.channel.receive() == []
    assert ends.channel.takes_output()


def test_another_connection_goes_on_where_the_last_one_was_cut(ends: Ends) -> None:
    ends.channel.say(Started)
    ends.channel.cut()
    assert not ends.channel.wants_to_write
    ends.channel.say(Exited)
    ours, theirs = socket.socketpair()
    ends.channel.attach(StreamSocket(theirs))
    with ours:
        ours.sendall(session.encode({"type": "resume", "received": 0, "credit": 0}))
        assert ends.channel.receive() == []
        ends.channel.flush()
        found = session.Decoder().feed(ours.recv(65536))
        assert [frame.type for frame in found] == ["resume", "started", "exited"]
    assert ends.channel.receive() == []
    assert ends.channel.is_over
    ends.channel.cut()
