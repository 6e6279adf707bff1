"""Datagrams of tasks to their agents: what is sent, what is taken, and that sending never waits."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from distrun_runtime.contract import metrics


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / metrics.SOCKET))
        listening.setblocking(False)
        yield listening


@pytest.fixture
def sender(agent: socket.socket) -> Iterator[metrics.Sender]:
    with contextlib.closing(metrics.Sender(agent.getsockname(), "worker-1")) as sender:
        yield sender


def test_a_datagram_that_finds_no_room_is_dropped_and_nobody_waits(sender: metrics.Sender) -> None:
    sent = [sender.send(metrics.REPORT, step=step) for step in range(5_000)]
    assert sent[0]
    assert not sent[-1]


def test_without_an_agent_nothing_is_sent_and_nothing_raised(tmp_path: Path) -> None:
    for path in ("", str(tmp_path / "nobody.s")):
        with contextlib.closing(metrics.Sender(path, "worker-0")) as sender:
            assert not sender.send(metrics.REPORT, step=1)


@pytest.mark.parametrize("value", ["x" * metrics.LIMIT, {1: object()}], ids=["too long", "no JSON"])
def test_what_cannot_be_sent_is_dropped(sender: metrics.Sender, value: object) -> None:
    assert not sender.send(metrics.REPORT, values=value)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"[1]", b"[" * 4000, b'{"v":2,"kind":"report","task":"a"}', b'{"v":1,"kind":"x","task":"a"}', b"{}"],
)
def test_what_is_no_datagram_of_ours_is_none(data: bytes) -> None:
    assert metrics.decode(data) is None
