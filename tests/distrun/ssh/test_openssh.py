"""Programs that connections are made by: ended with all that they started, and never waited for for long."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slowness import scaled

from distrun.ssh.failure import SshFailure
from distrun.ssh.openssh import OpensshLink, ProxyProgram
from distrun.ssh.resolve import Resolved, Target

LIMIT_S = 60.0


def wait(condition: Callable[[], object], what: str) -> None:
    until = time.monotonic() + scaled(LIMIT_S)
    while not condition():
        assert time.monotonic() < until, "not within %g s: %s" % (LIMIT_S, what)
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path("/proc/%d/stat" % pid).read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def pid_file(tmp_path: Path) -> Iterator[Path]:
    """Where a program writes the pid of what it started; that is ended after the test."""
    path = tmp_path / "pid"
    yield path
    with contextlib.suppress(OSError, ValueError):
        os.kill(int(path.read_text()), signal.SIGKILL)


def number(path: Path) -> int:
    wait(lambda: path.exists() and path.read_text().endswith("\n"), "a pid")
    return int(path.read_text())


def test_who_holds_the_stderr_of_a_proxy_command_is_not_waited_for(pid_file: Path) -> None:
    """Such is the master connection of an ssh with ControlPersist."""
    program = ProxyProgram("sh -c 'echo no way >&2; setsid sleep 600 & echo $! >%s; exec sleep 600'" % pid_file)
    number(pid_file)
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(program.end()), daemon=True)
    thread.start()
    thread.join(scaled(LIMIT_S))
    assert said == ["no way"]
    assert is_alive(int(pid_file.read_text()))  # in a session of its own: it is not ours to end


def test_a_proxy_command_that_has_ended_says_its_last_words_and_leaves_nobody(pid_file: Path) -> None:
    program = ProxyProgram("sh -c 'sleep 600 & echo $! >%s; echo no way >&2; exit 3'" % pid_file)
    pid = number(pid_file)
    assert program.end() == "no way"
    wait(lambda: not is_alive(pid), "what it had started has ended")


@pytest.fixture
def ssh(tmp_path: Path, pid_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An `ssh` that starts something, as it does for a ProxyCommand."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nsleep 600 &\necho $! >%s\ncase "$*" in *go) exit 255;; esac\nwait\n' % pid_file)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", "%s:%s" % (program.parent, os.environ["PATH"]))


@pytest.mark.parametrize("command", ["stay", "go"])
@pytest.mark.usefixtures("ssh")
def test_what_the_ssh_program_started_ends_with_it(command: str, pid_file: Path) -> None:
    link = OpensshLink(Resolved(Target("d1"), "d1"), command)
    pid = number(pid_file)
    if command == "stay":
        link.kill()
        wait(lambda: not is_alive(pid), "it has ended by the kill alone")
    link.finish()
    wait(lambda: not is_alive(pid), "it has ended")
    link.kill()  # harmless


def test_without_the_ssh_program_its_host_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SshFailure, match="cannot run ssh: No such file or directory"):
        OpensshLink(Resolved(Target("h1"), "h1"), "true")
