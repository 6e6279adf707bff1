"""How far a reader walks to follow a command: within limits, and through the files that docs/overview.md names."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import folderqueue
import pytest
import walks
from distrun_cli import Distrun, leaving_nothing, wait_until
from manual import ManualJob
from slowness import scaled
from terminal import Session

COMMON = "what all commands use"
LAUNCH = (COMMON, "a local launch")


def watched(distrun: Distrun, out: Path) -> dict[str, str]:
    """Return the variables of a command that notes what it enters, without a cache."""
    env = {**distrun.env, **walks.watched(out), "XDG_CACHE_HOME": str(out.parent / "cache")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (env["PYTHONPATH"], distrun.env.get("PYTHONPATH"))))
    return env


def run(distrun: Distrun, out: Path, *words: str, code: int = 0) -> None:
    """Run `distrun WORDS` in a new process; note what it and the coordinator that it forks enter."""
    done = subprocess.run(
        distrun.argv(*words),
        env=watched(distrun, out),
        cwd=distrun.work,
        capture_output=True,
        text=True,
        timeout=scaled(100),
        check=False,
    )
    assert done.returncode == code, done.stderr


def walk_of_launch(out: Path) -> walks.Walk:
    wait_until(lambda: len(walks.files(out)) == 2, 60, "client and coordinator have written what they entered")
    return walks.walk(out)


def test_a_steady_push_and_pull_enters_no_more_than_its_limit() -> None:
    """A steady step enters what every one of several windows of steps entered.

    A single window of a busy machine has more, for instance: a pool of shared memory grows when more values are in
    flight than ever before, or a wait lasts so long that it may have to be reported. The map names their files, too.
    """
    count = 7  # the first one is the warm-up
    # A node that gets no processor for seconds is not to be taken for lost. Copies are made alike on all machines.
    fixed = {"PS_HEARTBEAT_INTERVAL": "0.3", "PS_HEARTBEAT_TIMEOUT": "60", "DISTRUN_COPY_THREADS": "2"}
    with ManualJob(workers=2, servers=1) as job:
        out = job.path("walk")
        env = walks.watched(out, WALK_STEPS="1", **fixed)
        job.start("scheduler")
        server = job.processes[job.start("server", **env)].pid
        for _ in range(2):
            job.start("worker", str(walks.WALKING / "worker.py"), str(job.path("")), str(server), str(count), **env)
        assert set(job.wait()) == {0}, job.report()
        assert [len(walks.files(out, window)) for window in range(count)] == [3] * count
        found = [walks.walk(out, window) for window in range(1, count)]
        walks.check("push_and_pull", walks.common(found))
        walks.check_map(walks.together(found), "push and pull")


def test_a_local_launch_enters_no_more_than_its_limit(tmp_path: Path) -> None:
    """A launch enters what every one of three enters; one alone may also meet the sockets of other tests' dead jobs."""
    found = []
    with leaving_nothing(tmp_path) as distrun:
        for number in range(3):
            out = tmp_path / str(number) / "walk"
            out.parent.mkdir()
            run(distrun, out, "launch", "-n", "1", "-s", "0", "--launcher", "local", "true")
            found.append(walk_of_launch(out))
    walks.check("launch", walks.common(found))
    walks.check_map(walks.together(found), *LAUNCH)


def test_the_map_names_the_files_of_a_failure(tmp_path: Path) -> None:
    with leaving_nothing(tmp_path) as distrun:
        run(distrun, tmp_path / "walk", "launch", "-n", "2", "-s", "0", "--launcher", "local", "exit 3", code=3)
        walks.check_map(walk_of_launch(tmp_path / "walk"), *LAUNCH, "a failure")


def test_the_map_names_the_files_of_a_launch_on_a_queue_system(tmp_path: Path) -> None:
    with leaving_nothing(tmp_path) as distrun:
        distrun.env.update(folderqueue.install(tmp_path))
        run(distrun, tmp_path / "walk", "launch", "-n", "1", "-s", "0", "--launcher", "folderqueue", "true")
        walks.check_map(walk_of_launch(tmp_path / "walk"), *LAUNCH, "a launch on a queue system")


def test_the_map_names_the_files_of_the_dashboard(tmp_path: Path) -> None:
    with leaving_nothing(tmp_path) as distrun:
        job = distrun.begin("-n", "1", "-s", "0", "--grace", "1", "sleep", "100")
        wait_until(lambda: distrun.jobs and distrun.state()["state"] == "running", 60, "the job runs")
        words = distrun.argv("top", distrun.job.name)
        shown = Session(words, watched(distrun, tmp_path / "walk"), distrun.work, size=(100, 30))
        shown.expect("worker-0")
        shown.type("q")
        assert shown.ends() == 0
        job.send_signal(signal.SIGINT)
        job.wait(scaled(60))
        walks.check_map(walks.walk(tmp_path / "walk"), COMMON, "distrun top")


def test_status_enters_no_more_than_its_limit(tmp_path: Path) -> None:
    with leaving_nothing(tmp_path) as distrun:
        assert distrun.launch("-n", "1", "-s", "0", "true").returncode == 0
        run(distrun, tmp_path / "walk", "status", "--json")
        walks.check("status", walks.walk(tmp_path / "walk"))


def test_a_walk_beyond_its_limit_names_the_modules_and_functions_entered() -> None:
    entered = {f"distrun.module{number}": {"call"} for number in range(200)}
    with pytest.raises(AssertionError, match=r"walks.status: 200 modules .* Entered:\n  distrun.module0: call\n"):
        walks.check("status", entered)


def test_a_function_that_only_some_windows_enter_is_not_steady() -> None:
    first, second = {"distrun.pool": {"take", "grow"}, "distrun.waits": {"report"}}, {"distrun.pool": {"take", "trim"}}
    assert walks.common([first, second]) == {"distrun.pool": {"take"}}
    assert walks.together([first, second]) == {**first, "distrun.pool": {"take", "grow", "trim"}}
