"""How far a reader walks to follow a command: the modules and functions that it enters stay below their limits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import walks
from distrun_cli import Distrun, leaving_nothing, wait_until
from manual import ManualJob


def run(distrun: Distrun, out: Path, *words: str) -> None:
    """Run `distrun WORDS` in a new process, without a cache; note what it and the coordinator that it forks enter."""
    env = {**distrun.env, **walks.watched(out), "XDG_CACHE_HOME": str(out.parent / "cache")}
    done = subprocess.run(
        distrun.argv(*words), env=env, cwd=distrun.work, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_steady_push_and_pull_enters_no_more_than_its_limit() -> None:
    with ManualJob(workers=2, servers=1) as job:
        out = job.path("walk")
        env = walks.watched(out, WALK_STEPS="1", PS_HEARTBEAT_INTERVAL="0.3")
        job.start("scheduler")
        server = job.processes[job.start("server", **env)].pid
        for _ in range(2):
            job.start("worker", str(walks.WALKING / "worker.py"), str(job.path("")), str(server), **env)
        assert set(job.wait()) == {0}, job.report()
        assert len(walks.files(out)) == 3
        walks.check("push_and_pull", walks.walk(out))


def test_a_local_launch_enters_no_more_than_its_limit(tmp_path: Path) -> None:
    with leaving_nothing(tmp_path) as distrun:
        out = tmp_path / "walk"
        run(distrun, out, "launch", "-n", "1", "-s", "0", "--launcher", "local", "true")
        wait_until(lambda: len(walks.files(out)) == 2, 60, "client and coordinator have written what they entered")
        walks.check("launch", walks.walk(out))


def test_status_enters_no_more_than_its_limit(tmp_path: Path) -> None:
    with leaving_nothing(tmp_path) as distrun:
        assert distrun.launch("-n", "1", "-s", "0", "true").returncode == 0
        run(distrun, tmp_path / "walk", "status", "--json")
        walks.check("status", walks.walk(tmp_path / "walk"))


def test_a_walk_beyond_its_limit_names_the_modules_and_functions_entered() -> None:
    entered = {f"distrun.module{number}": {"call"} for number in range(200)}
    with pytest.raises(AssertionError, match=r"walks.status: 200 modules .* Entered:\n  distrun.module0: call\n"):
        walks.check("status", entered)
