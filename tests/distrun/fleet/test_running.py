"""One command on many hosts, which are all this machine, by real agents."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from agentkit import poll

from distrun import fleet
from distrun.backends.local import ChildChannel
from distrun.fleet import Problem, Ran
from distrun_runtime.contract import process
from distrun_runtime.contract.plan import Host
from distrun_runtime.coordinator import events
from distrun_runtime.coordinator.channel import Channel, Put

HOSTS = (Host("a"), Host("b"))


class Broken:
    """A channel that never comes up."""

    def __init__(self, host: str) -> None:
        self.host = host

    def start(self, put: Put) -> None:
        put(events.StartFailed(self.host, "no route", 0.0, kind="unreachable", fix="ping it"))

    def send(self, data: bytes) -> None: ...
    def close(self) -> None: ...
    def kill(self) -> None: ...


class Local:
    name = "local"

    def connect(self, hosts: Sequence[Host]) -> tuple[Channel, ...]:
        from distrun.backends import local

        return tuple(
            Broken(host.name) if host.name == "broken" else ChildChannel(host.name, local._argv()) for host in hosts
        )


def run(script: str, hosts: Sequence[Host] = HOSTS, **more: object) -> dict[str, Ran | Problem]:
    return fleet.run(Local(), hosts, ("bash", "-c", script), **more)  # type: ignore[arg-type]


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


def test_the_command_starts_at_home_or_in_the_folder_that_is_named(tmp_path: Path) -> None:
    assert bytes(ran(run("pwd")).out).decode().strip() == os.path.realpath(os.path.expanduser("~"))
    assert bytes(ran(run("pwd", cwd=str(tmp_path))).out).decode().strip() == str(tmp_path)
    missing = ran(run("pwd", cwd=str(tmp_path / "none")))
    assert missing.code
    assert b"none" in missing.err


def test_a_command_that_is_not_there_is_127() -> None:
    found = fleet.run(Local(), HOSTS[:1], ("no-such-program-here",))  # type: ignore[arg-type]
    assert ran(found).code == 127


def test_a_signal_is_128_and_its_number() -> None:
    assert ran(run("kill -KILL $$")).code == 137


def test_what_takes_too_long_is_ended_and_says_so() -> None:
    found = run("echo begun; [ $DISTRUN_HOST = a ] || sleep 600", limit_s=2.0)
    assert ran(found).code == 0
    assert (ran(found, "b").code, ran(found, "b").is_late, bytes(ran(found, "b").out)) == (124, True, b"begun\n")


def test_much_output_comes_whole_and_in_pieces_as_it_is_written() -> None:
    pieces: list[tuple[str, str, int]] = []
    found = run(
        "head -c 3000000 /dev/zero", on_output=lambda host, stream, data: pieces.append((host, stream, len(data)))
    )
    assert len(ran(found).out) == len(ran(found, "b").out) == 3000000
    assert sum(size for host, _, size in pieces if host == "a") == 3000000


class Silent(Broken):
    """An agent that begins, and then is never heard again."""

    def start(self, put: Put) -> None:
        put(events.AgentHello(self.host))
        put(events.AgentReady(self.host, "127.0.0.1"))


def test_a_host_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distrun.fleet.running.LOST_S", 0.2)

    class Backend:
        name = "test"

        def connect(self, hosts: Sequence[Host]) -> tuple[Channel, ...]:
            return (Silent("a"),)

    found = fleet.run(Backend(), HOSTS[:1], ("true",))["a"]  # type: ignore[arg-type]
    assert isinstance(found, Problem)
    assert "fell silent" in found.text


def test_ctrl_c_ends_the_command_everywhere(tmp_path: Path) -> None:
    def interrupt() -> None:
        poll(lambda: len(list(tmp_path.glob("pid-*"))) == 2, "both run")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(
            "echo $$ > %s/new-$DISTRUN_HOST; mv %s/new-$DISTRUN_HOST %s/pid-$DISTRUN_HOST; sleep 600"
            % ((tmp_path,) * 3)
        )
    thread.join()
    pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
    poll(lambda: all(row.is_dead for row in process.table(pids)), "both have ended")
