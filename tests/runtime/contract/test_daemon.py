"""Processes that an agent starts and that survive it, its connection and the login."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from slowness import scaled

from distrun_runtime.contract import daemon
from distrun_runtime.errors import ContractError

ABOUT = (
    "import json, os, signal, sys\n"
    "print(json.dumps({'leads': os.getsid(0) == os.getpid(), 'sid': os.getsid(0), 'cwd': os.getcwd(),"
    " 'umask': os.umask(0), 'hup': signal.getsignal(signal.SIGHUP) == signal.SIG_IGN,"
    " 'given': sys.stdin.read(), 'X': os.environ['X'],"
    " 'others': [fd for fd in range(3, 64) if os.path.exists('/proc/self/fd/%d' % fd)]}), flush=True)\n"
)


def test_it_is_a_daemon_and_its_first_line_is_returned(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        told = json.loads(daemon.start([daemon.PYTHON, "-c", ABOUT], b"secret", {"X": "1"}, 20.0, str(tmp_path)))
    finally:
        os.umask(before)
    assert (told["given"], told["X"]) == ("secret", "1")
    assert (told["leads"], told["cwd"], told["hup"]) == (False, "/", True)
    assert told["sid"] != os.getsid(0)
    assert told["others"] == []
    assert told["umask"] == 0o027, "the login's"


def test_one_that_ends_without_a_line_is_an_error_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="it ended at once: no disk"):
        daemon.start(["sh", "-c", "echo no disk >&2"], b"", {}, 20.0, str(tmp_path))


def test_one_that_cannot_be_run_is_an_error_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"it ended at once: /no/such: .*No such file"):
        daemon.start(["/no/such"], b"", {}, 20.0, str(tmp_path))


def test_one_that_is_not_ready_in_time_is_an_error_with_the_time(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"it did not get ready within 0\.1 s"):
        daemon.start(["sleep", "0.5"], b"", {}, 0.1, str(tmp_path))


def test_where_a_logout_ends_all_it_is_started_below_the_users_own_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / "systemd-run"
    stand_in.write_text('#!/bin/sh\necho "$@"\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(daemon, "ends_at_logout", lambda: True)
    monkeypatch.setattr(daemon, "needs_linger", lambda: None)
    found = daemon.start([daemon.PYTHON, "-V"], b"", {}, 20.0, str(tmp_path))
    assert found == f"--user --scope --quiet --collect -- {sys.executable} -V"


def test_where_that_is_not_allowed_it_is_refused_with_the_line_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "ends_at_logout", lambda: True)
    monkeypatch.setattr(daemon, "needs_linger", lambda: "loginctl enable-linger ann")
    with pytest.raises(ContractError, match=r"KillUserProcesses.*once: loginctl enable-linger ann"):
        daemon.start(["true"], b"", {}, 20.0, str(tmp_path))


STOPPED_AT_BIRTH = """
import os, signal
from distrun_runtime.contract import daemon
born = []
def stop():
    born.append(os.getpid())
    if born[1:]:  # the process that forks the daemon is the first
        os.kill(os.getpid(), signal.SIGSTOP)
os.register_at_fork(after_in_child=stop)
pid = daemon.fork()
os.kill(pid, signal.SIGKILL)
print("killed", pid)
"""


def test_a_daemon_that_is_stopped_at_its_birth_is_not_waited_for() -> None:
    argv = [sys.executable, "-c", STOPPED_AT_BIRTH]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=scaled(30), check=True)
    assert done.stdout.startswith("killed ")
