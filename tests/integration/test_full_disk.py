"""A disk that is full when a job ends: what became of the job is known all the same."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from distrun_cli import Distrun, wait_until
from slowness import scaled

LIMIT_S = 60.0
FILL = "for i in $(seq 30000); do echo line $i of a long text that fills the disk; done; exit %d"


@pytest.fixture
def size_mib() -> int:
    """The size of the disk."""
    return 1


@pytest.fixture
def distrun(tmp_path: Path, size_mib: int) -> Iterator[Distrun]:
    """The command, with its job store on a small disk."""
    made = Distrun(tmp_path)
    state = tmp_path / "state"
    state.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "full", str(state)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("no tmpfs can be mounted here (that needs root): %s" % mounted.stderr.strip())
    try:
        yield made
        wait_until(lambda: not made.left(), LIMIT_S, "nothing is left; left: %s" % made.left())
    finally:
        subprocess.run(["umount", "-l", str(state)], check=True)


def fill(folder: Path) -> None:
    """Use up the last byte of a disk."""
    with pytest.raises(OSError, match="No space left"), (folder / "more").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(512))


@pytest.mark.parametrize(("code", "state"), [(0, "succeeded"), (3, "failed")])
def test_a_job_that_ends_on_a_full_disk_has_ended_as_it_did(code: int, state: str, distrun: Distrun) -> None:
    done = distrun.launch("-n", "2", "-s", "0", "--no-prefix", FILL % code)
    assert done.returncode == code, done.stderr.decode()
    assert 1 <= done.stderr.count(b"No space left on device") <= 4, "a warning, not one for each line"
    assert code or len(done.stdout.splitlines()) == 60000
    shown = json.loads(distrun.run("status", distrun.job.name, "--json").stdout)["job"]
    assert (shown["state"], shown["exit_code"]) == (state, code)
    assert {task["state"] for task in shown["tasks"]} <= {"exited", "failed", "stopped"}
    listed = distrun.run("status").stdout.decode().splitlines()[1].split()
    assert listed[:2] == [distrun.job.name, state]
    outcome = json.loads((distrun.job / "outcome.json").read_text())
    assert outcome["exit_code"] == code
    assert len(outcome["tasks"]) == 2


@pytest.mark.parametrize("size_mib", [24], ids=["24 MiB"])
def test_a_task_that_floods_the_disk_ends_the_job_and_is_named(distrun: Distrun, size_mib: int) -> None:
    done = distrun.launch("-q", "-n", "2", "-s", "0", '[ "$RANK" = 0 ] && exec yes; exec sleep 100')
    said = done.stderr.decode()
    assert done.returncode == 9, said
    assert f"worker-0 on {distrun.job_host()} has filled the disk of {distrun.job / 'logs'} with 2" in said
    shown = json.loads(distrun.run("status", distrun.job.name, "--json").stdout)["job"]
    assert (shown["state"], shown["exit_code"]) == ("failed", 9)


def test_the_end_of_a_job_whose_disk_others_have_filled_is_kept(distrun: Distrun) -> None:
    """Also when nothing is free any more, not even what the job's own logs could not use."""
    child = distrun.begin("-n", "1", "-s", "0", "touch up; until [ -e go ]; do sleep 0.05; done")
    wait_until((distrun.work / "up").exists, LIMIT_S, "the task is up")
    fill(distrun.home / "state")
    (distrun.work / "go").touch()
    assert child.wait(scaled(LIMIT_S)) == 0
    shown = json.loads(distrun.run("status", distrun.job.name, "--json").stdout)["job"]
    assert (shown["state"], shown["exit_code"], shown["message"]) == ("succeeded", 0, "all workers succeeded")
    assert [task["state"] for task in shown["tasks"]] == ["exited"]
