"""distrun stack on a real local job: where workers stand that cannot say so themselves."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemas
from distrun_cli import Distrun, leaving_nothing, wait_until
from slowness import scaled

LIMIT_S = 60.0

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or bool(shutil.which("py-spy")), reason="reads /proc; py-spy is not to be here"
)

STUCK = """
    import signal, sys, time, distrun_runtime
    if sys.argv[1] == "handles":
        signal.signal(signal.SIGURG, lambda *_: print("touched", flush=True))
    distrun_runtime.report(step=1)
    def never_ends():
        print("up", flush=True)
        while True:
            time.sleep(0.01)
    never_ends()
"""
WORKERS = 'case $RANK in 3) echo up; exec sleep 1000;; 2) how=handles;; *) how=stuck;; esac; exec "$0" stuck.py $how'


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Distrun]:
    """A job: workers 0 and 1 are stuck, 2 handles SIGURG itself, 3 is no Python. A py-spy in `bin` would be found."""
    with leaving_nothing(tmp_path_factory.mktemp("stack")) as made:
        (made.work / "stuck.py").write_text(textwrap.dedent(STUCK))
        (made.work / "bin").mkdir()
        path = "%s:%s" % (made.work / "bin", os.environ["PATH"])
        words = ("-n", "4", "-s", "0", "--grace", "1", "--name", "stuck", "--", "bash", "-c", WORKERS, sys.executable)
        launch = made.begin(*words, env={"PATH": path})
        wait_until(lambda: (made.home / "out").read_bytes().count(b"up") >= 4, LIMIT_S, "all workers are up")
        yield made
        launch.terminate()
        launch.wait(scaled(LIMIT_S))


def pid_of(job: Distrun, task: str) -> int:
    [row] = [each for each in job.state()["tasks"] if each["name"] == task]
    return int(row["pid"])


def test_equal_stacks_are_shown_once_and_who_has_none_is_told_why(job: Distrun) -> None:
    done = job.run("stack", "stuck")
    assert done.returncode == 0
    shown, said = done.stdout.decode(), done.stderr.decode()
    assert shown.startswith("worker-0 and worker-1 (faulthandler)\n")
    assert shown.count("in never_ends") == 1
    handles, sleeps = pid_of(job, "worker-2"), pid_of(job, "worker-3")
    no_offer = "has not used distrun_runtime, or handles SIGURG itself"
    assert "worker-2: py-spy is not installed where the task runs, and process %d %s" % (handles, no_offer) in said
    assert "hint: pip install py-spy, in the task's environment" in said
    assert "worker-3: process %d is no Python: sleep 1000\n" % sleeps in said
    assert b"touched" not in job.log("worker-2")


def test_the_exit_code_is_1_if_there_is_no_stack_at_all(job: Distrun) -> None:
    done = job.run("stack", "stuck", "worker-3")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"there is no stack to show" in done.stderr
    done = job.run("stack", "stuck", "worker-3", "worker-0")
    assert done.returncode == 0


def test_json_has_a_member_for_each_task(job: Distrun) -> None:
    done = job.run("stack", "stuck", "worker-1", "worker-3", "worker-1", "--json")
    value = json.loads(done.stdout)
    schemas.check(value, "stack")
    assert value["job"] == job.job.name
    first, second = value["tasks"]
    assert (first["task"], first["how"], first["error"]) == ("worker-1", "faulthandler", "")
    assert "in never_ends" in first["text"]
    assert (second["task"], second["text"], second["how"]) == ("worker-3", "", "")
    assert "is no Python" in second["error"]
    assert done.stderr == b""


def test_a_py_spy_on_the_tasks_path_is_used_first(job: Distrun) -> None:
    program = job.work / "bin" / "py-spy"
    program.write_text('#!/bin/sh\necho "Thread 1 (idle): $*"\n')
    program.chmod(0o755)
    try:
        done = job.run("stack", "stuck", "worker-2")
    finally:
        program.unlink()
    pid = pid_of(job, "worker-2")
    assert done.stdout.decode() == "worker-2 (py-spy)\nThread 1 (idle): dump --nonblocking --pid %d\n\n" % pid


@pytest.mark.slow
def test_a_job_that_is_over_has_no_stacks(tmp_path: Path) -> None:
    with leaving_nothing(tmp_path) as distrun:
        assert distrun.launch("-n", "1", "-s", "0", "--name", "done", "true").returncode == 0
        done = distrun.run("stack", "done")
    assert done.returncode == 2
    assert b"is over" in done.stderr
    assert b"distrun logs" in done.stderr
