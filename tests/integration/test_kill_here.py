"""`distrun kill`, `exec` and `doctor` on this machine, without any host named.

Other jobs of this user may run on this machine meanwhile: every test names the one it means.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distrun_cli import AGENT, Distrun, processes, wait_until
from slowness import scaled

LIMIT_S = 60.0

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for leftovers in /proc")


def begin(distrun: Distrun) -> tuple[subprocess.Popen[bytes], str]:
    """Start a job of one worker; return its launcher and its id."""
    script = "setsid sleep 600 & touch up; wait"
    launcher = distrun.begin("-n", "1", "-s", "0", "--grace", "1", "bash", "-c", script)
    wait_until((distrun.work / "up").exists, LIMIT_S, "the worker is up")
    return launcher, distrun.job.name


def orphan(distrun: Distrun) -> str:
    """Start a job and kill launcher, guard and agent."""
    launcher, job = begin(distrun)
    marks = os.fsencode("XDG_RUNTIME_DIR=%s" % (distrun.home / "run"))
    agents = [pid for pid, environ, command in processes() if AGENT in command and marks in environ.split(b"\0")]
    assert len(agents) == 2
    ours = (*agents, distrun.coordinator(), launcher.pid)
    for pid in ours:
        os.kill(pid, signal.SIGSTOP)
    for pid in ours:
        os.kill(pid, signal.SIGKILL)
    launcher.wait(scaled(LIMIT_S))
    assert distrun.left()
    return job


def told(done: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(done.stdout)
    assert value["exit_code"] == done.returncode, done
    return value


def test_a_stale_job_of_this_machine_is_shown_and_ended(distrun: Distrun) -> None:
    job = orphan(distrun)
    shown = distrun.run("kill", "--stale", "--dry-run", job)
    assert shown.returncode == 0
    assert b"sleep 600" in shown.stdout
    assert distrun.left()
    refused = distrun.run("kill", "--stale", job)
    assert refused.returncode == 2
    assert b"-y answers yes" in refused.stderr
    done = told(distrun.run("kill", "--stale", "-y", "--json", "--grace", "1", job))
    (each,) = done["hosts"][0]["jobs"]
    assert (each["job"], each["agent"], each["stale"], each["left"]) == (job, "dead", True, [])
    assert distrun.left() == []


def test_a_job_that_runs_is_not_stale(distrun: Distrun) -> None:
    launcher, job = begin(distrun)
    done = distrun.run("kill", "--stale", "-y", job)
    assert (done.returncode, done.stdout) == (0, b"no stale job is there\n")
    assert launcher.poll() is None
    preview = told(distrun.run("kill", "--dry-run", "--json", job))
    (each,) = preview["jobs"][0]["hosts"][0]["jobs"]
    assert (each["agent"], each["guard"]) == ("alive", "alive")
    assert {"agent", "guard", "worker-0"} == {row["task"] for row in each["processes"]} - {"helper"}
    assert told(distrun.run("kill", "--json", job))["jobs"][0]["left"] == []
    assert launcher.wait(scaled(LIMIT_S)) == 143


@pytest.mark.parametrize(("answer", "is_ended"), [(b"y\n", True), (b"n\n", False)])
def test_it_asks_on_a_terminal(distrun: Distrun, answer: bytes, is_ended: bool) -> None:
    job = orphan(distrun)
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        distrun.argv("kill", "--stale", "--grace", "1", job),
        env=distrun.env,
        cwd=distrun.work,
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    os.close(theirs)
    os.write(ours, answer)
    out, _ = child.communicate(timeout=scaled(LIMIT_S))
    os.close(ours)
    assert b"End these" in out
    assert bool(distrun.left()) is not is_ended
    assert child.returncode == (0 if is_ended else 130)
    if not is_ended:
        assert distrun.run("kill", "-y", "--stale", "--grace", "1", job).returncode == 0


def test_a_pattern_is_looked_for_on_this_machine_and_never_means_us(distrun: Distrun, tmp_path: Path) -> None:
    word = tmp_path.name + str(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600) #" + word])
    try:
        wait_until(lambda: any(word.encode() in command for _, _, command in processes()), LIMIT_S)
        shown = told(distrun.run("kill", "--match", word, "--any-process", "--dry-run", "--json"))
        assert [row["pid"] for row in shown["hosts"][0]["found"]] == [child.pid]
        done = distrun.run("kill", "--match", word, "--any-process", "-y")
        assert done.returncode == 0
        assert child.wait(scaled(LIMIT_S)) == -signal.SIGTERM
        nothing = distrun.run("kill", "--match", word, "--any-process")
        assert nothing.returncode == 0
        assert nothing.stdout.startswith(b"nothing matches")
    finally:
        child.kill()
        child.wait()


def test_without_a_job_and_hosts_it_asks_which(distrun: Distrun) -> None:
    done = distrun.run("kill")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == b"distrun: error: which job? none of your jobs goes on"
    job = distrun.launch("-n", "1", "-s", "0", "--detach", "sleep", "300").stdout.decode().strip()
    told = distrun.run("kill").stderr.decode()
    assert told.splitlines()[0] == "distrun: error: which job? these go on: %s" % job
    assert "hint: distrun kill %s; " % job in told
    assert distrun.run("kill", job).returncode == 0


def test_exec_runs_here_only_if_it_is_told_to(distrun: Distrun) -> None:
    assert distrun.run("exec", "true").returncode == 2
    done = distrun.run("exec", "--launcher", "local", "echo hi; exit 4")
    assert done.returncode == 4
    assert done.stdout.endswith(b"\nhi\n")


def test_the_doctor_examines_this_machine(distrun: Distrun) -> None:
    done = distrun.run("doctor", "--json")
    value = json.loads(done.stdout)
    assert value["schema"] == "distrun.doctor/1"
    (facts,) = value["facts"].values()
    assert facts["agent_python"]["version"] == sys.version.split()[0]
    assert {row["check"] for row in value["rows"]} >= {"this machine", "reach", "server python", "address"}
