"""Asking agents, with channels of our own making and with real agents."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from slowness import scaled

from distrun.backends.local import ChildChannel
from distrun.fleet import Fleet
from distrun.fleet.questions import HostAnswer
from distrun_runtime.contract import agent_messages, session
from distrun_runtime.contract.agent_messages import AnswerPiece
from distrun_runtime.contract.plan import Host
from distrun_runtime.contract.session import Source
from distrun_runtime.coordinator import messages
from distrun_runtime.coordinator.channel import Put, StreamChannel
from distrun_runtime.coordinator.failures import Problem

HOSTS = (Host("a"), Host("b"), Host("c"))
Reply = Callable[[dict[str, Any]], list[messages.Event]]


class Scripted:
    """A channel whose agent answers as it is told to; what we sent is in `heard`."""

    def __init__(self, host: str, first: Sequence[messages.Event], reply: Reply = lambda header: []) -> None:
        self.host = host
        self.heard: list[dict[str, Any]] = []
        self.is_closed = False
        self.is_killed = False
        self._first = first
        self._reply = reply
        self._put: Put = lambda event: None

    def start(self, put: Put) -> None:
        self._put = put
        for event in self._first:
            put(event)

    def send(self, frame: session.Frame) -> None:
        self.heard.append(frame.header)
        for event in self._reply(frame.header):
            self._put(event)
        if frame.type == "end":
            self._put(agent_messages.Bye(self.host))
            self._put(messages.AgentLost(self.host, "its connection ended"))

    def send_large(self, header: dict[str, Any], source: Source) -> None: ...

    def close(self) -> None:
        self.is_closed = True

    def kill(self) -> None:
        self.is_killed = True


class Backend:
    name = "test"

    def __init__(self, *channels: Scripted | StreamChannel) -> None:
        self.channels = channels

    def connect(self, hosts: Sequence[Host]) -> tuple[Scripted | StreamChannel, ...]:
        return self.channels


def answering(host: str, value: object) -> Scripted:
    def reply(header: dict[str, Any]) -> list[messages.Event]:
        return [agent_messages.Answered(host, header["id"], value)] if header["type"] == "ask" else []

    return Scripted(host, [agent_messages.AgentHello(host)], reply)


def ask(*channels: Scripted, limit_s: float = 60.0) -> dict[str, HostAnswer | Problem]:
    hosts = [Host(channel.host) for channel in channels]
    with Fleet(Backend(*channels), hosts) as fleet:  # type: ignore[arg-type]
        return fleet.ask("survey", {"x": 1}, limit_s)


def test_every_host_gives_its_value_and_its_agent_is_ended() -> None:
    channels = answering("a", 1), answering("b", [2])
    assert ask(*channels) == {"a": HostAnswer(1), "b": HostAnswer([2])}
    for channel in channels:
        assert [header["type"] for header in channel.heard] == ["ask", "end"]
        assert channel.heard[0]["args"] == {"x": 1}
        assert channel.is_closed
        assert channel.is_killed


def test_arguments_may_differ_by_host_and_only_some_may_be_asked() -> None:
    channels = answering("a", 1), answering("b", 2)
    with Fleet(Backend(*channels), HOSTS[:2]) as talk:  # type: ignore[arg-type]
        assert talk.ask("survey", lambda host: {"me": host}, 60.0, ["b"]) == {"b": HostAnswer(2)}
    assert [header["type"] for header in channels[0].heard] == ["end"]
    assert channels[1].heard[0]["args"] == {"me": "b"}


def test_a_signal_while_agents_are_asked_is_a_ctrl_c_and_other_signals_keep_their_effect() -> None:
    before = signal.getsignal(signal.SIGTERM)
    during: list[object] = []

    def reply(header: dict[str, Any]) -> list[messages.Event]:
        if header["type"] == "ask":
            during.extend(signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGTSTP))
            os.kill(os.getpid(), signal.SIGINT)
        return []

    channel = Scripted("a", [agent_messages.AgentHello("a")], reply)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ask(channel)
    assert time.monotonic() - began < 30.0
    assert during == [before, signal.getsignal(signal.SIGTSTP)]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert channel.is_killed


# Real agents


class Local:
    """Several hosts that are all this machine."""

    name = "local"

    def connect(self, hosts: Sequence[Host]) -> tuple[ChildChannel, ...]:
        from distrun.backends import local

        return tuple(ChildChannel(host.name, local._argv()) for host in hosts)


def test_real_agents_answer_and_refuse_what_they_do_not_know() -> None:
    with Fleet(Local(), HOSTS) as talk:  # type: ignore[arg-type]
        for each in talk.ask("survey", {}, 60.0).values():
            assert isinstance(each, HostAnswer)
            assert set(each.value) == {"jobs", "uid", "hostname"}
        unknown = talk.ask("nonsense", {}, 60.0)["a"]
        assert isinstance(unknown, Problem)
        assert "no tool 'nonsense'" in unknown.text
        malformed = talk.ask("match", {"regex": "("}, 60.0)["b"]
        assert isinstance(malformed, Problem)
        assert "not a regular expression" in malformed.text


IMPATIENT = """
from distrun_runtime.agent import __main__, agent

agent.FIRST_LEASE_S = 2.0
__main__.main()
"""


def test_an_agent_whose_reader_was_stopped_during_a_stream_is_there_after_the_stream(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", IMPATIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    channel = StreamChannel("a", os.dup(child.stdout.fileno()), os.dup(child.stdin.fileno()))
    child.stdin.close()
    child.stdout.close()
    with socket.socket(socket.AF_UNIX) as coordinator:
        coordinator.bind(str(tmp_path / "c.s"))
        coordinator.listen()
        with Fleet(Backend(channel), HOSTS[:1]) as talk:  # type: ignore[arg-type]
            talk.begin("jobs", {"jobs": [["j", "", str(tmp_path / "c.s")]], "files": [], "asked": ""})
            assert talk.next(1.0) is None
            time.sleep(2.5)  # nothing is sent: no ping, as if this process were stopped
            coordinator.accept()[0].close()
            time.sleep(0.5)
            assert isinstance(talk.next(60.0), AnswerPiece)
            assert talk.next(60.0) == HostAnswer(None)
            assert isinstance(talk.ask("survey", {}, 60.0)["a"], HostAnswer)
    child.wait(scaled(60.0))
