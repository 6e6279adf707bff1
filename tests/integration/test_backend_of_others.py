"""The backend that docs/backends.md shows runs jobs: Debian's task-spooler."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from distrun_cli import Distrun, leaving_nothing, wait_until
from slowness import scaled

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "backend_tsp"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tsp") is None, reason="there is no tsp: Debian's package task-spooler"),
]
LIMIT_S = 60.0


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Distrun]:
    """The command, with the example installed, and a queue of its own."""
    info = tmp_path / "site" / "distrun_tsp-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: distrun-tsp\nVersion: 1\n")
    points = (EXAMPLE / "pyproject.toml").read_text().partition('[project.entry-points."distrun.backends"]\n')[2]
    name, _, value = points.splitlines()[0].partition(" = ")
    (info / "entry_points.txt").write_text(f"[distrun.backends]\n{name} = {value.strip(chr(34))}\n")
    with leaving_nothing(tmp_path) as distrun:
        distrun.env.update(PYTHONPATH=f"{info.parent}:{EXAMPLE}", TS_SOCKET=str(tmp_path / "queue"))
        yield distrun
        tsp(distrun, "-K")


def tsp(machine: Distrun, *words: str) -> str:
    """What tsp prints."""
    return subprocess.run(["tsp", *words], env=machine.env, capture_output=True, text=True, check=True).stdout


def test_a_job_runs_and_its_first_failing_code_is_returned(machine: Distrun) -> None:
    script = "echo up; [ $DISTRUN_RANK = 0 ] || exit 9; exec sleep 100"
    done = machine.run("launch", "--launcher", "tsp", "-n", "2", "-s", "1", "--grace", "2", script)
    assert done.returncode == 9, done.stderr
    assert done.stdout.count(b"| up\n") == 2
    assert b"worker-1" in done.stderr
    assert "finished" in tsp(machine)


def test_a_job_waits_for_those_before_it_and_ctrl_c_takes_it_out(machine: Distrun) -> None:
    tsp(machine, "-n", "sleep", "100")
    launch = machine.start("launch", "--launcher", "tsp", "-n", "2", "-s", "0", "true")
    wait_until(lambda: "tsp: queued, 0 of" in (machine.home / "err").read_text(), LIMIT_S, "it waits")
    assert machine.run("kill", "--launcher", "tsp", "--stale", "-y").stdout == b"no abandoned job of mine is in tsp\n"
    launch.send_signal(signal.SIGINT)
    assert launch.wait(scaled(LIMIT_S)) == 130
    assert "distrun-" not in tsp(machine)
    tsp(machine, "-k", "0")


def test_what_is_left_of_a_lost_job_store_is_found_and_ended(machine: Distrun) -> None:
    tsp(machine, "-n", "sleep", "100")
    done = machine.run("launch", "--detach", "--launcher", "tsp", "-n", "1", "-s", "0", "true")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: "distrun-" in tsp(machine), LIMIT_S, "it is in the queue")
    other = {"XDG_STATE_HOME": str(machine.home / "other")}
    shown = machine.run("kill", "--launcher", "tsp", "--stale", "--dry-run", env=other)
    assert done.stdout.strip() in shown.stdout
    killed = machine.run("kill", "--launcher", "tsp", "--stale", "-y", env=other)
    assert killed.returncode == 0
    assert b"tsp: ended distrun-" in killed.stdout
    assert "distrun-" not in tsp(machine)
    assert machine.run("wait", done.stdout.decode().strip()).returncode == 5
    tsp(machine, "-k", "0")


def test_doctor_says_what_is_there(machine: Distrun) -> None:
    done = machine.run("doctor", "--launcher", "tsp")
    assert done.returncode == 0, done.stderr
    assert b"tsp runs 1 at once" in done.stdout
