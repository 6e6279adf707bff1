"""Signals and the exit code of the guard and the agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distrun_runtime.agent import guard, share
from distrun_runtime.contract import facts, process


def test_signals_are_inherited_as_defaults_by_what_is_executed() -> None:
    code = (
        "import signal, subprocess, sys\n"
        "from distrun_runtime.agent import guard\n"
        "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])\n"
        "guard.set_signals()\n"
        "child = 'import signal as s; three = s.SIGUSR1, s.SIGHUP, s.SIGTSTP;"
        " print(*(int(s.getsignal(n) == s.SIG_DFL) for n in three),"
        " s.getsignal(s.SIGINT) is s.default_int_handler, s.pthread_sigmask(s.SIG_BLOCK, []))'\n"
        "subprocess.run([sys.executable, '-S', '-c', child], check=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1 1 1 True set()\n"


def test_wakeup_carries_signal_numbers() -> None:
    code = (
        "import os, signal\n"
        "from distrun_runtime.agent import guard\n"
        "guard.set_signals([signal.SIGTERM])\n"
        "wakeup = guard.Wakeup()\n"
        "assert wakeup.read() == b''\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "assert wakeup.read() == bytes([signal.SIGTERM])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -KILL $$", 128 + signal.SIGKILL)])
def test_a_signal_becomes_the_exit_code_of_a_shell(script: str, code: int) -> None:
    pid = os.posix_spawnp("sh", ["sh", "-c", script], os.environ)
    assert facts.exit_code_of(os.waitpid(pid, 0)[1]) == code


@pytest.fixture
def note(tmp_path: Path) -> dict[str, Any]:
    """What a guard knows of a job that is over: the agent has left its record."""
    folder = tmp_path / "job" / "here"
    folder.mkdir(parents=True)
    assert guard.RECORD == share.RECORD
    (folder / share.RECORD).write_text("{}")
    return {"folder": str(folder), "marks": {"DISTRUN_JOB_ID": "calm-otter-7f3", "DISTRUN_JOB_NONCE": "0011"}}


def environs_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the id of every process whose environment is read."""
    read: list[int] = []

    def environ_of(pid: int) -> dict[str, str]:
        read.append(pid)
        return {}

    monkeypatch.setattr(process, "environ_of", environ_of)
    return read


@pytest.mark.skipif(process.is_portable(), reason="needs /proc")
def test_a_folder_with_nothing_but_the_record_is_removed(note: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "has_children", lambda: False)
    assert guard._removed_if_clean(note)
    assert not os.path.exists(os.path.dirname(note["folder"]))


@pytest.mark.skipif(process.is_portable(), reason="needs /proc")
def test_a_folder_with_more_than_the_record_stays(note: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "has_children", lambda: False)
    token = Path(note["folder"], share.TOKEN)
    Path(note["folder"], share.RECORD).rename(token)
    assert not guard._removed_if_clean(note)
    assert token.exists()


@pytest.mark.skipif(process.is_portable(), reason="needs /proc")
def test_a_guard_with_children_reads_no_environments(note: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "has_children", lambda: True)
    read = environs_read(monkeypatch)
    assert not guard._removed_if_clean(note)
    assert not read


@pytest.mark.skipif(process.is_portable() or os.geteuid() != 0, reason="needs /proc and another user")
def test_a_guard_of_roots_reads_no_environments_of_other_users(
    note: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "has_children", lambda: False)
    read = environs_read(monkeypatch)
    mine = subprocess.Popen(["sleep", "600"])
    others = subprocess.Popen(["sleep", "600"], user=65534)
    try:
        assert guard._removed_if_clean(note)
    finally:
        for each in (mine, others):
            each.kill()
            each.wait()
    assert mine.pid in read
    assert others.pid not in read


def test_an_agent_that_beats_is_never_given_up() -> None:
    silence = guard.Silence()
    for second in range(0, 100, 5):
        silence.beat(6.0, float(second))
        assert not silence.is_over(second + 4.9)


def test_an_agent_is_given_up_after_the_lease_without_a_beat() -> None:
    silence = guard.Silence()
    silence.beat(45.0, 0.0)
    looks = [each * silence.interval_s for each in range(1, 12)]
    assert next(now for now in looks if silence.is_over(now)) == 45.0


def test_an_agent_that_never_began_a_job_is_not_watched() -> None:
    silence = guard.Silence()
    assert not silence.is_over(0.0)
    assert not silence.is_over(1e9)
    assert silence.interval_s == float("inf")


def test_a_guard_that_was_suspended_gives_its_agent_time_to_beat() -> None:
    silence = guard.Silence()
    silence.beat(10.0, 0.0)
    assert not silence.is_over(3600.0), "it slept for an hour"
    assert not silence.is_over(7200.0), "and again"
    silence.beat(10.0, 7201.0)
    assert not silence.is_over(7202.0)


@pytest.mark.parametrize(("lease_s", "beat_s"), [(1.0, 0.5), (20.0, 2.0), (45.0, 4.5), (600.0, 5.0)])
def test_an_agent_beats_ten_times_a_lease_within_half_a_second_and_five(lease_s: float, beat_s: float) -> None:
    assert guard.beat_s(lease_s) == beat_s
