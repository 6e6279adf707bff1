"""`distrun top` and `distrun status -w` of real jobs on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from distrun_cli import Distrun, leaving_nothing, wait_until
from slowness import scaled
from terminal import Session

LIMIT_S = 60.0
PROGRAM = """\
import os, sys, time
print("hello from", os.environ["RANK"], flush=True)
while not os.path.exists("go-" + os.environ["RANK"]):
    time.sleep(0.05)
if os.environ["RANK"] == "1":
    raise RuntimeError("out of luck")
"""


class Watcher(Session):
    """A terminal of 100x30 with a command of ours."""

    def __init__(self, distrun: Distrun, *words: str) -> None:
        super().__init__(distrun.argv(*words), {**distrun.env, "TERM": "xterm"}, distrun.work, size=(100, 30))


@pytest.fixture
def distrun(tmp_path: Path) -> Iterator[Distrun]:
    with leaving_nothing(tmp_path) as made:
        (made.work / "job.py").write_text(PROGRAM)
        yield made


def begin(distrun: Distrun, *words: str) -> subprocess.Popen[bytes]:
    job = distrun.begin("-n", "2", "-s", "0", *words, "python3", "job.py")
    wait_until(lambda: distrun.jobs and distrun.state()["state"] == "running", LIMIT_S, "a job that runs")
    return job


def test_a_job_is_watched_to_its_failure_and_the_last_picture_stays(distrun: Distrun) -> None:
    job = begin(distrun)
    screen = Watcher(distrun, "top")
    plain = distrun.start("status", "-w", "--plain", distrun.job.name)
    screen.expect("worker-1")
    screen.expect("2 running")
    screen.type("l")
    screen.expect("hello from 0")
    screen.type("q")
    wait_until(lambda: b"running" in (distrun.home / "out").read_bytes(), LIMIT_S, "the first lines")
    (distrun.work / "go-1").touch()
    screen.expect("first error: worker-1")
    screen.expect("RuntimeError: out of luck")
    screen.expect("exit code 1")
    assert job.wait(scaled(LIMIT_S)) == 1
    assert plain.wait(scaled(LIMIT_S)) == 1
    assert screen.process.poll() is None
    screen.type("q")
    assert screen.ends() == 1
    _, _, after = screen.shown.partition("\x1b[?1049l")
    assert "worker-1 on" in after
    assert "failed" in after
    lines = (distrun.home / "out").read_text()
    assert "worker-1 on" in lines
    assert "failed (1)" in lines
    assert "\x1b" not in lines


@pytest.mark.slow
def test_a_job_is_stopped_from_its_picture(distrun: Distrun) -> None:
    job = begin(distrun)
    screen = Watcher(distrun, "status", "-w", distrun.job.name)
    screen.expect("2 running")
    screen.type("x")
    screen.expect("stop job")
    screen.type("yes\r")
    screen.expect("killed")
    assert job.wait(scaled(LIMIT_S)) == 143
    assert f"@{socket.gethostname()} from the dashboard" in distrun.state()["message"]
    screen.type("q")
    assert screen.ends() == 1


@pytest.mark.slow
def test_a_coordinator_that_is_gone_is_told_and_what_was_known_stays(distrun: Distrun) -> None:
    job = begin(distrun)
    screen = Watcher(distrun, "top")
    screen.expect("2 running")
    os.kill(distrun.coordinator(), 9)
    screen.expect("coordinator is gone")
    screen.expect("2 lost")
    screen.type("q")
    assert screen.ends() == 1
    job.wait(scaled(LIMIT_S))
    wait_until(lambda: not distrun.left(), LIMIT_S, "the agent's end")


def test_of_several_jobs_there_is_a_table_from_which_one_is_opened(distrun: Distrun) -> None:
    for name in ("one", "two"):
        assert distrun.launch("-q", "-n", "1", "-s", "0", "--name", name, "echo", name).returncode == 0
    screen = Watcher(distrun, "top")
    screen.expect("jobs 2")
    screen.type("\x1b[B\r")
    screen.expect("succeeded", 3)
    screen.expect("echo one")
    screen.expect("worker-0")
    screen.type("q")
    screen.expect("jobs 2", 2)
    screen.type("q")
    assert screen.ends() == 0
