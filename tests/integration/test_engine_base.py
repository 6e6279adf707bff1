"""What all engines share, with a queue of real processes on this machine (`folderqueue`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import folderqueue
import pytest
from distrun_cli import Distrun, leaving_nothing, processes, wait_until
from slowness import scaled

pytestmark = pytest.mark.slow
LIMIT_S = 60.0
WAITS = ("python3", "-c", "import time; print('up', flush=True); time.sleep(100)")


class Queue:
    """The command with its queue."""

    def __init__(self, distrun: Distrun, folder: Path) -> None:
        self.distrun = distrun
        self.folder = folder
        self.begun: list[subprocess.Popen[bytes]] = []

    def say(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)

    def unsay(self, name: str) -> None:
        (self.folder / name).unlink()

    def argv(self, *words: str) -> tuple[str, ...]:
        return ("launch", "--launcher", "folderqueue", *words)

    def launch(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        return self.distrun.run(*self.argv(*words))

    def begin(self, *words: str) -> subprocess.Popen[bytes]:
        self.begun.append(self.distrun.start(*self.argv(*words)))
        return self.begun[-1]

    @property
    def jobs(self) -> list[str]:
        return [path.stem for path in self.folder.glob("distrun-*.json")]

    def heard(self, text: str) -> None:
        """Wait until the launch that was begun has said so."""
        wait_until(lambda: text in (self.distrun.home / "err").read_text(), LIMIT_S, f"{text!r} is said")

    def printed(self, text: str) -> None:
        """Wait until the launch that was begun has printed that."""
        wait_until(lambda: text in (self.distrun.home / "out").read_text(), LIMIT_S, f"{text!r} is printed")

    def processes(self, place: str = "") -> list[int]:
        """What runs of the queue's jobs, or in one place."""
        marks = {f"FOLDERQUEUE={self.folder}".encode(), *([f"PLACE={place}".encode()] if place else ())}
        return [pid for pid, env, _ in processes() if marks <= set(env.split(b"\0")) and b"\0PLACE=" in b"\0" + env]


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    folder = tmp_path / "queue"
    folder.mkdir()
    with leaving_nothing(tmp_path) as distrun:
        distrun.env.update(folderqueue.install(folder))
        made = Queue(distrun, folder)
        yield made
        for launch in made.begun:  # of a test that failed
            if launch.poll() is None:
                launch.terminate()
                launch.wait(scaled(LIMIT_S))
        wait_until(lambda: not made.processes(), LIMIT_S, "no process of a place is left")


def test_a_job_runs_where_the_engine_put_it_and_leaves_nothing(queue: Queue) -> None:
    done = queue.launch("-n", "2", "-s", "1", "python3", "-c", "import os; print('rank', os.environ['RANK'])")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [b"worker-0@here | rank 0", b"worker-1@here | rank 1"]
    places = {
        each["name"]: each["host"] for each in json.loads((queue.distrun.job / "allocation.json").read_text())["places"]
    }
    assert places == {"server-0@here": "here", "worker-0@here": "here", "worker-1@here": "here"}
    assert not (queue.distrun.job / "engine" / "secret").exists()


def test_a_job_that_waits_says_why_and_ctrl_c_takes_it_back(queue: Queue) -> None:
    queue.say("full", "position 3 in all.q")
    launch = queue.begin("-n", "1", "-s", "0", "true")
    queue.heard("folderqueue: queued, position 3 in all.q")
    assert queue.distrun.state()["state"] == "queued"
    assert b"queued" in queue.distrun.run("status").stdout
    launch.send_signal(signal.SIGINT)
    assert launch.wait(scaled(LIMIT_S)) == 130
    assert queue.jobs == []
    assert queue.distrun.state()["state"] == "killed"


def test_a_signal_while_the_engine_is_asked_before_the_submission_ends_the_job(queue: Queue) -> None:
    queue.say("full", "no room")
    queue.say("slow")
    launch = queue.begin("-n", "1", "-s", "0", "true")
    wait_until((queue.folder / "asked").exists, LIMIT_S, "the engine is asked")
    os.kill(int((queue.folder / "asked").read_text()), signal.SIGTERM)
    queue.unsay("slow")
    assert launch.wait(scaled(LIMIT_S)) == 143
    assert queue.jobs == []
    assert queue.distrun.state()["state"] == "killed"


def test_another_ctrl_c_does_not_end_the_coordinator_before_the_engine_has_ended_the_job(queue: Queue) -> None:
    queue.say("full", "no room")
    queue.say("stays")
    launch = queue.begin("-n", "1", "-s", "0", "true")
    queue.heard("no room")
    launch.send_signal(signal.SIGINT)
    (job,) = queue.jobs
    wait_until(lambda: "cancelled" in (queue.folder / f"{job}.json").read_text(), LIMIT_S, "it is cancelled")
    launch.send_signal(signal.SIGINT)
    queue.heard("its answer is awaited for 15 s more")
    assert launch.poll() is None
    queue.unsay("stays")
    assert launch.wait(scaled(LIMIT_S)) == 130
    queue.heard(f"ended folderqueue job {job}")
    assert queue.jobs == []
    assert queue.distrun.state()["state"] == "killed"


@pytest.mark.parametrize("is_running", [False, True], ids=["queued", "running"])
def test_a_killed_client_is_noticed_by_the_coordinator_which_takes_the_job_back(is_running: bool, queue: Queue) -> None:
    if not is_running:
        queue.say("full", "no room")
    launch = queue.begin("-n", "1", "-s", "0", "--grace", "2", *WAITS)
    (queue.printed if is_running else queue.heard)("up" if is_running else "no room")
    launch.kill()
    wait_until(lambda: queue.distrun.state()["state"] == "killed", LIMIT_S, "its end is recorded")
    wait_until(lambda: not queue.processes(), LIMIT_S, "nothing of it runs")
    assert is_running or queue.jobs == []
    assert queue.distrun.state()["exit_code"] == 129


def test_a_job_that_waits_is_killed_by_its_name(queue: Queue) -> None:
    queue.say("full", "no room")
    launch = queue.begin("-n", "1", "-s", "0", "true")
    queue.heard("no room")
    assert queue.distrun.run("kill", queue.distrun.job.name).returncode == 0
    assert launch.wait(scaled(LIMIT_S)) == 143
    assert queue.jobs == []
    assert queue.distrun.state()["message"] == "stopped by distrun kill"


def test_a_job_whose_coordinator_died_in_the_queue_is_taken_back_by_kill(queue: Queue) -> None:
    queue.say("full", "no room")
    launch = queue.begin("-n", "1", "-s", "0", "true")
    queue.heard("no room")
    os.kill(queue.distrun.coordinator(), signal.SIGKILL)
    launch.wait(scaled(LIMIT_S))
    (job,) = queue.jobs
    killed = queue.distrun.run("kill", queue.distrun.job.name)
    assert killed.returncode == 0
    assert f"ended folderqueue job {job}".encode() in killed.stdout
    assert queue.jobs == []


def test_a_job_whose_coordinator_died_while_it_ran_is_ended_by_kill_in_the_engine_too(queue: Queue) -> None:
    launch = queue.begin("-n", "1", "-s", "0", *WAITS)
    queue.printed("up")
    os.kill(queue.distrun.coordinator(), signal.SIGKILL)
    launch.wait(scaled(LIMIT_S))
    killed = queue.distrun.run("kill", queue.distrun.job.name)
    assert killed.returncode == 0, killed.stderr
    assert queue.jobs == []
    assert queue.distrun.state()["state"] == "killed"


def test_a_job_that_the_engine_refuses_ends_with_5_and_the_engines_words(queue: Queue) -> None:
    queue.say("refuse", "there is no queue nope")
    done = queue.launch("-n", "1", "-s", "0", "true")
    assert done.returncode == 5
    assert b"folderqueue refused it: there is no queue nope" in done.stderr
    assert queue.distrun.state()["state"] == "failed"


@pytest.mark.parametrize(
    ("why", "code", "text"),
    [
        ("137 folderqueue: out of memory; raise --worker-memory", 137, "raise --worker-memory"),
        ("124 folderqueue: its time is over", 124, "its time is over"),
        ("", 7, "folderqueue has recorded no reason"),
    ],
)
def test_a_place_that_the_engine_ended_is_explained_by_it(why: str, code: int, text: str, queue: Queue) -> None:
    queue.say("why", why)
    launch = queue.begin("-n", "2", "-s", "0", *WAITS)
    queue.printed("up")
    for pid in queue.processes("worker-1"):  # guard, agent and task
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert launch.wait(scaled(LIMIT_S)) == code
    queue.heard(text)
    assert queue.distrun.state()["exit_code"] == code


def test_a_detached_job_is_left_when_the_engine_has_it_and_followed_later(queue: Queue) -> None:
    queue.say("full", "no room")
    done = queue.launch("--detach", "-n", "1", "-s", "0", "sh", "-c", "echo here; exit 4")
    assert done.returncode == 0, done.stderr
    job = done.stdout.decode().strip()
    assert job == queue.distrun.job.name
    attached = queue.distrun.start("attach", job)
    queue.heard("queued")
    queue.unsay("full")
    assert attached.wait(scaled(LIMIT_S)) == 4
    queue.printed("worker-0@here | here")
    assert queue.distrun.run("wait", job).returncode == 4
    assert b"here" in queue.distrun.run("logs", job).stdout


def test_a_fault_in_an_engines_code_ends_the_job_and_is_said(queue: Queue) -> None:
    queue.say("fault", "")
    done = queue.launch("-n", "1", "-s", "0", "true")
    assert done.returncode == 5
    assert b"internal error: ZeroDivisionError" in done.stderr
    assert b"Traceback" not in done.stderr
    assert queue.jobs == []


def test_an_engine_that_does_not_answer_for_a_while_costs_nothing(queue: Queue) -> None:
    queue.say("full", "no room")
    launch = queue.begin("-n", "1", "-s", "0", "echo", "there")
    queue.heard("no room")
    queue.say("silent")
    queue.unsay("full")
    queue.unsay("silent")
    assert launch.wait(scaled(LIMIT_S)) == 0


def test_a_dry_run_shows_the_script_without_the_secret_and_submits_nothing(queue: Queue) -> None:
    done = queue.launch("--dry-run", "-n", "2", "--worker-memory", "2G", "python3", "train.py", "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    shown = done.stdout.decode()
    assert "{folder}/job.sh:" in shown
    assert "{folder}/secret" in shown
    assert "2 workers, each with memory 2.0 GiB" in shown
    assert "workers run: python3 train.py --lr 0.1" in shown
    assert queue.jobs == []
    assert queue.distrun.jobs == []


def test_the_secret_is_in_one_file_of_the_user_alone_and_in_no_argument(queue: Queue) -> None:
    launch = queue.begin("-n", "1", "-s", "0", *WAITS)
    queue.printed("up")
    folder = queue.distrun.job / "engine"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    secret = (folder / "secret").read_bytes().strip()
    assert secret not in (folder / "job.sh").read_bytes()
    assert secret not in (queue.distrun.job / "engine.json").read_bytes()
    assert not [pid for pid, _, command in processes() if secret in command]
    launch.send_signal(signal.SIGINT)
    launch.wait(scaled(LIMIT_S))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--launcher", "folderqueue", "--pe", "mpi"), "--pe is not for --launcher folderqueue"),
        (("--launcher", "folderqueue", "--hosts", "a,b"), "it chooses the hosts itself"),
    ],
)
def test_options_that_mean_nothing_are_refused(words: tuple[str, ...], message: str, queue: Queue) -> None:
    done = queue.distrun.run("launch", *words, "-n", "1", "-s", "0", "true")
    assert done.returncode == 2
    assert message in done.stderr.decode()


def test_an_engine_takes_the_options_of_others_that_it_names(queue: Queue) -> None:
    words = ("launch", "--launcher", "folderqueue", "--dry-run", "-n", "1", "-s", "0", "--docker-image", "x", "true")
    assert queue.distrun.run(*words).returncode == 0


def test_files_reach_the_places_as_they_were_when_the_job_was_submitted(queue: Queue) -> None:
    (queue.distrun.work / "train.py").write_text("print('old')\n")
    queue.say("full", "no room")
    there = queue.folder / "there"
    launch = queue.begin("--sync-dst-dir", str(there), "-n", "2", "-s", "0", "python3", "train.py")
    queue.heard("no room")
    (queue.distrun.work / "train.py").write_text("print('new')\n")
    queue.unsay("full")
    assert launch.wait(scaled(LIMIT_S)) == 0
    queue.printed("worker-0@here | old")
    assert (there / "train.py").exists()
