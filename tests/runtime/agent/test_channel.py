"""The agent's end of the byte stream."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from distrun_runtime.agent.channel import QUEUE_BYTES, Channel
from distrun_runtime.contract import wire


class Ends:
    def __init__(self) -> None:
        reading, self.to_agent = os.pipe()
        self.from_agent, writing = os.pipe()
        self.channel = Channel(reading, writing)
        self._open = [reading, writing, self.to_agent, self.from_agent]

    def close(self, descriptor: int) -> None:
        self._open.remove(descriptor)
        os.close(descriptor)

    def close_all(self) -> None:
        for descriptor in list(self._open):
            self.close(descriptor)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close_all()


def test_messages_are_numbered(ends: Ends) -> None:
    ends.channel.greet(b"DISTRUN/1 x\n")
    ends.channel.say("pong", n=1)
    ends.channel.say("bye")
    ends.channel.flush()
    data = os.read(ends.from_agent, 4096)
    assert data.startswith(b"DISTRUN/1 x\n")
    assert [frame.header["seq"] for frame in wire.Decoder().feed(data[12:])] == [1, 2]


def test_full_pipe_never_blocks_and_nothing_is_lost(ends: Ends) -> None:
    for _ in range(20):
        ends.channel.say("output", b"x" * 100_000)
    ends.channel.flush()
    assert ends.channel.queued > QUEUE_BYTES
    assert not ends.channel.takes_output()
    decoder, count = wire.Decoder(), 0
    while count < 20:
        count += len(decoder.feed(os.read(ends.from_agent, 1 << 16)))
        ends.channel.flush()
    assert ends.channel.queued == 0
    assert ends.channel.takes_output()


def test_end_of_input_is_noticed(ends: Ends) -> None:
    os.write(ends.to_agent, wire.encode({"type": "ping"}))
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
    ends.channel.say("pong")
    ends.channel.flush()
    assert ends.channel.is_broken
    ends.channel.say("pong")
    assert ends.channel.queued == 0
