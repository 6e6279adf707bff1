"""One command on many hosts, which are all this machine, by real agents."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slowness import scaled

from distrun.backends.local import ChildChannel
from distrun.cli import exec as command
from distrun.fleet import commands
from distrun.fleet.commands import Ran
from distrun_runtime.contract import agent_messages, session
from distrun_runtime.contract.plan import Host, Plan, Secrets
from distrun_runtime.contract.session import Source
from distrun_runtime.coordinator import messages
from distrun_runtime.coordinator.channel import AgentChannel, Put
from distrun_runtime.coordinator.failures import Problem

HOSTS = (Host("a"), Host("b"))


class Broken:
    """A channel that never comes up."""

    def __init__(self, host: str) -> None:
        self.host = host

    def start(self, put: Put) -> None:
        put(agent_messages.StartFailed(self.host, "no route", 0.0, kind="unreachable", fix="ping it"))

    def send(self, frame: session.Frame) -> None: ...

    def send_large(self, header: dict[str, Any], source: Source) -> None: ...
    def close(self) -> None: ...
    def kill(self) -> None: ...


class Local:
    name = "local"

    def connect(self, hosts: Sequence[Host]) -> tuple[AgentChannel, ...]:
        from distrun.backends import local

        return tuple(
            Broken(host.name) if host.name == "broken" else ChildChannel(host.name, local._argv()) for host in hosts
        )


def run(script: str, hosts: Sequence[Host] = HOSTS, **more: object) -> dict[str, Ran | Problem]:
    return commands.run(Local(), hosts, ("bash", "-c", script), **more)  # type: ignore[arg-type]


def ran(found: dict[str, Ran | Problem], host: str = "a") -> Ran:
    each = found[host]
    assert isinstance(each, Ran), each
    return each


def test_outputs_and_codes_come_by_host() -> None:
    found = run("echo $DISTRUN_HOST; echo bad >&2; [ $DISTRUN_HOST = a ] || exit 7")
    assert (ran(found).code, bytes(ran(found).out), bytes(ran(found).err)) == (0, b"a\n", b"bad\n")
    assert (ran(found, "b").code, bytes(ran(found, "b").out)) == (7, b"b\n")


def test_a_host_that_fails_does_not_stop_the_others() -> None:
    found = run("echo fine", [Host("broken"), Host("a")])
    assert found["broken"] == Problem("broken", "unreachable", "no route", "ping it")
    assert bytes(ran(found).out) == b"fine\n"
    assert list(found) == ["broken", "a"]


def test_a_host_is_sent_its_own_part_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, sent = messages.begin, {}

    def noted(share: Plan, secrets: Secrets, place: str) -> session.Frame:
        sent[place] = [task.host for task in share.tasks]
        return begin(share, secrets, place)

    monkeypatch.setattr(messages, "begin", noted)
    run("true")
    assert sent == {"a": ["a"], "b": ["b"]}


def test_the_command_starts_at_home_or_in_the_folder_that_is_named(tmp_path: Path) -> None:
    assert bytes(ran(run("pwd")).out).decode().strip() == os.path.realpath(os.path.expanduser("~"))
    assert bytes(ran(run("pwd", cwd=str(tmp_path))).out).decode().strip() == str(tmp_path)
    missing = ran(run("pwd", cwd=str(tmp_path / "none")))
    assert missing.code
    assert b"none" in missing.err


def test_an_interface_that_is_not_there_keeps_no_command_from_running() -> None:
    found = run("echo $NCCL_SOCKET_IFNAME", [Host("a", interface="nosuch0"), Host("b")])
    assert (ran(found).code, bytes(ran(found).out)) == (0, b"\n")


def test_a_command_that_is_not_there_is_127() -> None:
    found = commands.run(Local(), HOSTS[:1], ("no-such-program-here",))  # type: ignore[arg-type]
    assert ran(found).code == 127
    assert "command not found: no-such-program-here" in ran(found).reason


def test_a_signal_is_128_and_its_number() -> None:
    assert ran(run("kill -KILL $$")).code == 137


def test_much_output_comes_whole_and_in_pieces_as_it_is_written() -> None:
    pieces: list[tuple[str, str, int]] = []
    found = run(
        "head -c 3000000 /dev/zero", on_output=lambda host, stream, data: pieces.append((host, stream, len(data)))
    )
    assert len(ran(found).out) == len(ran(found, "b").out) == 3000000
    assert sum(size for host, _, size in pieces if host == "a") == 3000000


class Scripted(Broken):
    """An agent whose answers to our frames are made up."""

    def __init__(self, reply: Callable[[dict[str, Any]], Sequence[messages.Event]]) -> None:
        super().__init__("a")
        self._reply = reply
        self._put: Put = lambda event: None

    def start(self, put: Put) -> None:
        self._put = put
        put(agent_messages.AgentHello("a"))

    def send(self, frame: session.Frame) -> None:
        kind = frame.header["type"]
        if kind == "begin":
            self._put(agent_messages.AgentReady("a", "127.0.0.1"))
        elif kind == "end":
            self._put(agent_messages.Bye("a"))
            self._put(messages.AgentLost("a", "its connection ended"))
        for event in self._reply(frame.header):
            self._put(event)


def scripted(reply: Callable[[dict[str, Any]], Sequence[messages.Event]], **more: Any) -> Ran:
    backend = SimpleNamespace(name="test", connect=lambda hosts: (Scripted(reply),))
    return ran(commands.run(backend, HOSTS[:1], ("true",), **more))  # type: ignore[arg-type]


def piece(offset: int, data: bytes) -> agent_messages.Output:
    return agent_messages.Output("a", "worker-0", "out", offset, data)


def test_who_reads_slowly_is_no_reason_to_lose_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distrun_runtime.coordinator.loop.PING_S", 0.05)
    monkeypatch.setattr("distrun.fleet.commands.UNREAD_LIMIT", 1)
    monkeypatch.setattr(commands, "SETTLE_S", 1.0)
    pings, taken, enough = [], [], threading.Event()

    def reply(header: dict[str, Any]) -> Sequence[messages.Event]:
        if header["type"] == "spawn":
            return [piece(0, b"ab"), agent_messages.Exited("a", "worker-0", 0, out=4)]
        if header["type"] == "ack" and header["offset"] == 2:
            assert taken, "more was asked for than there is room"
            return [piece(2, b"cd")]
        if header["type"] == "ping":
            pings.append(header)
            if len(pings) > 40:  # 2 s
                enough.set()
        return []

    def read(host: str, stream: str, data: bytes) -> None:
        taken.append(data if enough.wait(scaled(60)) else b"nobody was pinged meanwhile")

    assert scripted(reply, on_output=read).problem is None
    assert taken == [b"ab", b"cd"]


def test_what_the_reader_cannot_take_is_raised() -> None:
    def read(host: str, stream: str, data: bytes) -> None:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        run("echo hi", on_output=read)


def test_what_was_passed_on_need_not_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    found = run("head -c 100 /dev/zero", on_output=lambda host, stream, data: sizes.append(len(data)), keep=0)
    assert (sum(sizes), len(ran(found).out), command.remarks(found)) == (200, 0, [])
    kept = run("head -c 100 /dev/zero", keep=99)
    assert (len(ran(kept).out), ran(kept).is_cut) == (99, True)
    assert "only the first" in command.remarks(kept)[0]
    assert [row["cut"] for row in command.as_json(kept)] == [True, True]


def test_each_host_may_have_a_command_of_its_own_and_an_environment_before_it() -> None:
    words = {"a": ("bash", "-c", "echo a$X"), "b": ("bash", "-c", "echo b$X")}
    found = commands.run(Local(), HOSTS, words, activate="export X=5")  # type: ignore[arg-type]
    assert [bytes(ran(found, host).out) for host in ("a", "b")] == [b"a5\n", b"b5\n"]
    failed = commands.run(Local(), HOSTS, words, activate="echo no such module >&2; false")  # type: ignore[arg-type]
    problem = failed["a"]
    assert isinstance(problem, Problem)
    assert "no such module" in problem.text
