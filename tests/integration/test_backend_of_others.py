"""The backend that docs/backends.md shows runs jobs: kubernetes, by a stand-in for kubectl."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from distrun_cli import Distrun, leaving_nothing, wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "backend_kubernetes"
pytestmark = pytest.mark.slow
LIMIT_S = 60.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Distrun]:
    """The command, with the example installed, and a cluster in the folder `cluster`."""
    info = tmp_path / "site" / "distrun_kubernetes-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: distrun-kubernetes\nVersion: 1\n")
    points = (EXAMPLE / "pyproject.toml").read_text().partition('[project.entry-points."distrun.backends"]\n')[2]
    name, _, value = points.splitlines()[0].partition(" = ")
    (info / "entry_points.txt").write_text(f"[distrun.backends]\n{name} = {value.strip(chr(34))}\n")
    (tmp_path / "cluster").mkdir()
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/support/kubectl.py "$@"\n')
    kubectl.chmod(0o755)
    with leaving_nothing(tmp_path) as distrun:
        distrun.env.update(
            PYTHONPATH=f"{info.parent}:{EXAMPLE}",
            PATH=f"{kubectl.parent}:{distrun.env['PATH']}",
            KUBECTL=str(tmp_path / "cluster"),
        )
        yield distrun


def test_a_job_runs_in_pods_and_its_first_failing_code_is_returned(cluster: Distrun) -> None:
    script = "echo on $DISTRUN_HOST; [ $DISTRUN_RANK = 0 ] || exit 9; exec sleep 100"
    done = cluster.run("launch", "--launcher", "kubernetes", "-n", "2", "-s", "1", "--grace", "2", script)
    assert done.returncode == 9, done.stderr
    assert b"worker-1@node-0 | on node-0" in done.stdout  # servers first: pod 0 has server-0
    assert b"worker-1" in done.stderr


def test_a_job_without_nodes_waits_and_ctrl_c_deletes_it(cluster: Distrun) -> None:
    (cluster.home / "cluster" / "pending").touch()
    launch = cluster.start("launch", "--launcher", "kubernetes", "-n", "2", "-s", "0", "true")
    wait_until(lambda: "kubernetes: queued, 0 of 2 pods" in (cluster.home / "err").read_text(), LIMIT_S, "it waits")
    assert cluster.run("kill", "--launcher", "kubernetes", "--stale", "-y").stdout == (
        b"no abandoned job of mine is in kubernetes\n"
    )
    launch.send_signal(signal.SIGINT)
    assert launch.wait(LIMIT_S) == 130
    assert not list((cluster.home / "cluster").glob("*.json"))


def test_what_is_left_of_a_lost_job_store_is_found_and_deleted(cluster: Distrun) -> None:
    (cluster.home / "cluster" / "pending").touch()
    done = cluster.run("launch", "--detach", "--launcher", "kubernetes", "-n", "1", "-s", "0", "true")
    assert done.returncode == 0, done.stderr
    other = {"XDG_STATE_HOME": str(cluster.home / "other")}
    shown = cluster.run("kill", "--launcher", "kubernetes", "--stale", "--dry-run", env=other)
    assert done.stdout.strip() in shown.stdout
    killed = cluster.run("kill", "--launcher", "kubernetes", "--stale", "-y", env=other)
    assert killed.returncode == 0
    assert b"kubernetes: ended distrun-" in killed.stdout
    assert not list((cluster.home / "cluster").glob("*.json"))
    assert cluster.run("wait", done.stdout.decode().strip()).returncode == 5


def test_doctor_says_what_is_there(cluster: Distrun) -> None:
    done = cluster.run("doctor", "--launcher", "kubernetes")
    assert done.returncode == 0, done.stderr
    assert b"jobs may be created" in done.stdout
