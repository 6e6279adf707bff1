"""Ending what is left, with a table of our own making."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import uuid
from pathlib import Path

import pytest
from agentkit import poll
from slowness import scaled

from distrun_runtime.agent import share, stopping
from distrun_runtime.agent.share import Record, RecordedTask
from distrun_runtime.contract import process
from distrun_runtime.contract.process import Identity, Process

GONE = Identity(2**22 + 5, "proc:x:1")


@pytest.fixture
def job() -> str:
    return "s" + uuid.uuid4().hex[:10]


def start(script: str, job: str = "") -> tuple[subprocess.Popen[bytes], Process]:
    env = dict(os.environ, DISTRUN_JOB_ID=job) if job else None
    child = subprocess.Popen(["sh", "-c", script], env=env, start_new_session=True)
    poll(lambda: process.table([child.pid])[0].sid == child.pid, "it has its session")
    poll(lambda: not job or process.environ_of(child.pid).get("DISTRUN_JOB_ID") == job, "its environment shows")
    return child, process.table([child.pid])[0]


@pytest.mark.parametrize("way", ["", pytest.param("1", marks=pytest.mark.portable)])
def test_marked_processes_and_their_children_are_ended_and_reported(
    way: str, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTRUN_PORTABLE", way)
    child, row = start("env -i sleep 600 & echo; wait", job)
    poll(lambda: len(process.descendants([child.pid])) == 1, "it has its child")
    report = stopping.sweep(job, 60.0)
    assert child.wait(scaled(60)) == -signal.SIGTERM
    assert report.left == []
    assert row.pid in {pid for pid, _ in report.ended}
    assert len(report.ended) == 2


def test_nothing_to_end_is_no_error(job: str) -> None:
    report = stopping.sweep(job, 0.1)
    assert report == ([], [])


def test_the_control_socket_of_a_dead_coordinator_goes_and_that_of_a_living_one_stays(job: str) -> None:
    path = Path(share.private_root()) / f"{job}.s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        stopping.sweep(job, 0.1)
        assert path.is_socket()
    stopping.sweep(job, 0.1)
    assert not path.exists()


def test_recorded_leader_must_still_be_that_very_process() -> None:
    child, row = start("exec sleep 600")
    try:
        stale = Identity(row.pid, row.start + "1")
        for leader, expected in ((stale, set()), (row.identity, {row.pid})):
            record = Record("j", "h", GONE, GONE, 1.0, (RecordedTask("worker-0", leader),))
            found = stopping.belongings([record], {"DISTRUN_JOB_ID": "no-such-job"})
            assert {each.pid for each in found if each.pid == row.pid} == expected
    finally:
        child.kill()
        child.wait()


def test_neither_we_nor_our_ancestors_are_ever_found() -> None:
    me = process.identity(os.getpid())
    parent = process.identity(os.getppid())
    record = Record(
        "j", "h", GONE, GONE, 1.0, (RecordedTask("worker-0", parent), RecordedTask("worker-1", me)), (me, parent)
    )
    found = {each.pid for each in stopping.belongings([record], {"DISTRUN_JOB_ID": "no-such-job"})}
    assert not {me.pid, parent.pid} & found


def test_a_look_that_takes_long_delays_signals_and_leaves_none_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "GIVE_UP_S", 0.1)
    child, row = start("trap '' TERM; while :; do sleep 0.1; done")

    def find() -> list[Process]:
        time.sleep(0.5)
        return [] if child.poll() is not None else [row]

    assert stopping.end_all(find, 0.1)[1] == []
    assert child.returncode == -signal.SIGKILL


class Clock:
    """Time that passes only while somebody sleeps, and processes that live until a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.sent = 0.0, list[tuple[float, int]]()
        monkeypatch.setattr(stopping, "time", self)
        monkeypatch.setattr(process, "send_signal", lambda who, number: self.sent.append((round(self.now, 3), number)))

    def monotonic(self) -> float:
        return self.now

    def sleep(self, time_s: float) -> None:
        self.now += time_s


def test_what_is_found_is_asked_to_end_once_and_killed_after_the_grace_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    row = Process(2**22 + 7, 1, 5, 5, "proc:x:2", "S")
    assert stopping.end_all(lambda: [row] if clock.now < 2.02 else [], 2.0)[1] == []
    assert clock.sent[:2] == [(0.0, signal.SIGTERM), (0.0, signal.SIGCONT)]
    assert {number for _, number in clock.sent[2:]} == {signal.SIGKILL}
    assert clock.sent[2][0] == pytest.approx(2.0, abs=stopping.POLL_S)


@pytest.mark.parametrize(("takes_s", "is_killed"), [(3.9, False), (4.5, True)])
def test_an_agent_has_the_grace_time_and_two_seconds_before_its_tasks_are_ended_for_it(
    job: str, takes_s: float, is_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    agent = Process(2**22 + 7, 1, 5, 5, "proc:x:2", "S")
    record = Record(job, "h", GONE, agent.identity, 1.0)
    monkeypatch.setattr(share, "folders_of", lambda job, nonce: [str(Path(share.private_root()) / "none")])
    monkeypatch.setattr(share, "find_record", lambda folder: record)
    monkeypatch.setattr(process, "is_alive", lambda who: who == agent.identity and clock.now < takes_s)
    monkeypatch.setattr(stopping, "belongings", lambda *of: [agent] if clock.now < takes_s else [])
    monkeypatch.setattr(process, "mine", list)
    report = stopping.sweep(job, 2.0)
    assert [(number in (signal.SIGTERM, signal.SIGCONT), at) for at, number in clock.sent[:2]] == [(True, 0.0)] * 2
    assert (len(clock.sent) > 2) == is_killed
    assert [pid for pid, _ in report.ended] == [agent.pid]
    assert report.left == []


def test_what_will_not_die_is_left_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "GIVE_UP_S", 0.2)
    immortal = Process(2**22 + 7, 1, 5, 5, "proc:x:2", "D")
    signalled, left = stopping.end_all(lambda: [immortal], 0.1)
    assert left == [immortal]
    assert list(signalled) == [immortal.identity]
