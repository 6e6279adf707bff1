"""Jobs that are launched from Python, by `Jobs.launch`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from distrun_cli import wait_until
from slowness import scaled

from distrun import Job, Jobs, Request, UsageError
from distrun.request import JobRequest
from distrun_runtime.coordinator.jobstore import JobStore

LIMIT_S = 60.0


def request(tmp_path: Path, script: str, **more: object) -> JobRequest:
    members: dict[str, object] = {"workers": 2, "servers": 0, "cwd": str(tmp_path), "outer": dict(os.environ), **more}
    return JobRequest(command=("sh", "-c", script), **members)  # type: ignore[arg-type]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> Jobs:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Jobs(JobStore(), lambda text, level: said.append(text))


def test_a_job_is_launched_from_any_thread_and_waited_for(jobs: Jobs, tmp_path: Path, said: list[str]) -> None:
    found: list[Job] = []
    asked = request(tmp_path, "echo I am $DISTRUN_RANK; exit $DISTRUN_RANK")
    thread = threading.Thread(target=lambda: found.append(jobs.launch(asked)))
    thread.start()
    thread.join(scaled(LIMIT_S))
    (job,) = found
    assert [each.id for each in jobs.list()] == [job.id]
    assert job.wait(scaled(LIMIT_S)) == 1
    assert sorted(piece.data for piece in job.logs()) == [b"I am 0\n", b"I am 1\n"]
    assert job.outcome["reason"] == "task_failed"
    assert "exit code 1; stopping the job" in "".join(said)


def test_an_attached_job_is_stopped_when_its_process_ends_and_a_detached_one_goes_on(
    jobs: Jobs, tmp_path: Path
) -> None:
    script = (
        "import sys; from distrun import Jobs, Request\n"
        "print(Jobs().launch(Request(['sleep', '60'], servers=0, detach=sys.argv[1] == 'detach')).id)\n"
    )
    ids = {
        how: subprocess.run([sys.executable, "-c", script, how], check=True, capture_output=True, text=True).stdout
        for how in ("detach", "attach")
    }
    attached, detached = jobs.get(ids["attach"].strip()), jobs.get(ids["detach"].strip())
    wait_until(lambda: attached.is_over, LIMIT_S, "the attached job is stopped")
    assert detached.state == "running"
    detached.stop(0.5)
    assert detached.is_over


def test_a_request_that_cannot_be_fulfilled_leaves_no_job(jobs: Jobs, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--python: there is no program"):
        jobs.launch(request(tmp_path, "true", servers=1, python="/none"))
    assert jobs.list() == []


def test_a_coordinator_that_cannot_start_is_an_error(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Exception, match=r"its coordinator \(pid \d+\) ended with code 1"):
        jobs.launch(request(tmp_path, "true"))


def test_a_job_can_be_stopped_while_it_runs(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.launch(request(tmp_path, "exec sleep 60"))
    began = time.monotonic()
    wait_until(lambda: job.state == "running", LIMIT_S, "it runs")
    assert job.stop(0.5).left == []
    assert job.is_over
    assert time.monotonic() - began < LIMIT_S


def test_leaving_the_block_of_a_job_stops_it_unless_it_is_detached(jobs: Jobs) -> None:
    sleeping = {"command": ["sleep", "60"], "servers": 0, "grace": 0.5}
    with pytest.raises(RuntimeError, match="mine"), jobs.launch(Request(**sleeping)) as attached:  # type: ignore[arg-type]
        raise RuntimeError("mine")
    assert attached.is_over
    with jobs.launch(Request(**sleeping, detach=True)) as detached:  # type: ignore[arg-type]
        assert detached.state in ("starting", "running")
    assert detached.state in ("starting", "running")
    with jobs.get(detached.id):
        detached.stop()
