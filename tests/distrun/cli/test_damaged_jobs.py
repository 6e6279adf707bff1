"""Folders of jobs that are damaged: each job is read alone, and no command fails for what it finds."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sample_plan import sample_plan
from tampering import tamper

from distrun import cli
from distrun.backends.base import Swept
from distrun.backends.local import Local
from distrun.backends.ssh import Ssh
from distrun.cli import kill
from distrun_runtime.contract import process
from distrun_runtime.coordinator.failures import Culprit, Outcome, TaskResult
from distrun_runtime.coordinator.jobfolder import event
from distrun_runtime.coordinator.jobstore import JobStore

RUNS = int(os.environ.get("DISTRUN_FUZZ_RUNS", "50"))
"""Folders that are damaged; each is shown to one command of every kind."""
SEED = int(os.environ.get("DISTRUN_FUZZ_SEED", "1"))

JOBS = ("calm-otter-7f3", "bold-fox-1a2", "lost-owl-9b9")


class NoFleet:
    """Stands for agents that find nothing."""

    def __init__(self, *args: object) -> None: ...

    def __enter__(self) -> NoFleet:
        return self

    def __exit__(self, *args: object) -> None: ...

    def ask(self, *args: object) -> dict[str, object]:
        return {}


@pytest.fixture(autouse=True)
def _nothing_is_signalled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def signals(who: process.Identity, number: int) -> bool:
        raise AssertionError("signal %d to %s" % (number, who))

    def sweep(self: object, plan: object, grace_s: float, hosts: Sequence[str] | None = None) -> dict[str, Swept]:
        return {"d1": Swept()}

    monkeypatch.setattr(process, "send_signal", signals)
    monkeypatch.setattr(kill, "Fleet", NoFleet)
    for backend in (Local, Ssh):
        monkeypatch.setattr(backend, "sweep", sweep)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """Folders of a job that failed, of one that succeeded, and of one whose launcher is gone."""
    store = JobStore(tmp_path / "distrun")
    for job in JOBS:
        folder = store.create(sample_plan(job=job, name="digits"))
        path = folder.path / "launcher.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "start": "proc:another-boot:1"}))
        folder.append(event("hello", host="d1"))
        folder.log_path("worker-0").write_text("one\ntwo\n")
        folder.log_path("worker-1").write_text("three\n")
        tasks = [
            TaskResult("worker-0", "worker", 0, "d1", "failed", 7, 1, started=1e9, ended=1e9 + 5, reason="ValueError"),
            TaskResult("worker-1", "worker", 1, "d1", "stopped", 8, None, "TERM", started=1e9, ended=1e9 + 6),
        ]
        folder.write_state("running", tasks)
        if job == JOBS[0]:
            culprit = Culprit("worker-0", "d1", 1, time=1e9)
            folder.finish(Outcome(1, "task_failed", "worker-0 on d1 failed", culprit, tuple(tasks), job=job))
        elif job == JOBS[1]:
            well = tuple(dataclasses.replace(task, state="exited", code=0, signal=None) for task in tasks)
            folder.finish(Outcome(0, "succeeded", "all well", None, well, job=job))
    return store.jobs


def run(*words: str, capfd: pytest.CaptureFixture[bytes]) -> tuple[int, str, str]:
    """Run a command; whatever it finds, its exit code is one that it promises, and no error is an internal one."""
    code = cli.run(words)
    out, err = (data.decode(errors="replace") for data in capfd.readouterr())
    assert code in (0, 1, 2), (words, code, err)
    assert "internal error" not in err, (words, err)
    assert "Traceback" not in err, (words, err)
    assert (code == 2) == ("distrun: error: " in err), (words, code, err)
    return code, out, err


def rows(out: str) -> dict[str, str]:
    """The states that a list of jobs shows, by id."""
    return {line.split()[0]: line.split()[1] for line in out.splitlines()[1:] if len(line.split()) > 1}


SOUND = dict(zip(JOBS, ("failed", "succeeded", "lost"), strict=True))
COMMANDS = (("status",), ("status", "--json"), ("logs",), ("logs", "-n", "1"), ("kill",), ("kill", "--dry-run"))


def test_whatever_is_damaged_every_command_says_so_or_works_and_other_jobs_are_shown(
    jobs: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    random_ = random.Random(SEED)
    sound = tmp_path / "sound"
    shutil.copytree(jobs, sound)
    for number in range(RUNS):
        job = random_.choice(JOBS)
        done = [tamper(jobs / job, random_) for _ in range(random_.choice([1, 1, 1, 2, 4]))]
        told = "run %d of seed %d: %s: %s" % (number, SEED, job, ", ".join(done))
        try:
            shown = rows(run("status", "--all", capfd=capfdbinary)[1])
            assert {other: SOUND[other] for other in JOBS if other != job}.items() <= shown.items()
            assert job in shown or not (os.path.lexists(jobs / job / "state.json"))
            listed = json.loads(run("status", "--json", capfd=capfdbinary)[1])["jobs"]
            assert {each["id"]: each["state"] for each in listed} == shown
            for words in COMMANDS:
                run(words[0], job, *words[1:], capfd=capfdbinary)
        except BaseException as err:
            raise AssertionError(told) from err
        shutil.rmtree(jobs)
        shutil.copytree(sound, jobs)


@pytest.fixture
def damaged(jobs: Path) -> Iterator[Path]:
    """The folder of a job whose state.json nests too deep."""
    (jobs / JOBS[2] / "state.json").write_text("[" * 100_000 + "]" * 100_000)
    return jobs / JOBS[2]


def test_a_damaged_job_is_listed_as_such_with_what_is_wrong(
    damaged: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    out = run("status", capfd=capfdbinary)[1]
    assert rows(out) == {**SOUND, JOBS[2]: "damaged"}
    (line,) = [line for line in out.splitlines() if line.startswith(JOBS[2])]
    assert line.endswith("%s is damaged: it is nested too deep" % (damaged / "state.json"))
    (job,) = [
        each for each in json.loads(run("status", "--json", capfd=capfdbinary)[1])["jobs"] if each["id"] == JOBS[2]
    ]
    assert (job["state"], job["tasks"], job["exit_code"]) == ("damaged", [], None)
    assert job["message"].endswith("it is nested too deep")


def test_a_command_about_a_damaged_job_says_file_member_and_what_to_do(
    damaged: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    for words in (("status", JOBS[2]), ("logs", JOBS[2])):
        code, _, err = run(*words, capfd=capfdbinary)
        assert code == 2
        assert "distrun: error: %s is damaged: it is nested too deep\n" % (damaged / "state.json") in err
        assert "distrun: hint: " in err


@pytest.mark.parametrize(
    ("member", "value", "told"),
    [
        (("tasks", 0, "pid"), "x", "tasks[0].pid: expected a whole number or null, found 'x'"),
        (("tasks", 1, "name"), "../x", "tasks[1].name: expected the name of a task, found '../x'"),
        (("created",), 5, "created: expected a time (RFC 3339), found 5"),
        (("reason",), [], "reason: expected one of succeeded, task_failed, "),
        (("command",), "a", "command: expected a list, each a text, found 'a'"),
        (("id",), JOBS[0], "it is of job " + JOBS[0]),
    ],
)
def test_a_wrong_type_is_told_with_its_member(
    member: tuple[Any, ...], value: Any, told: str, jobs: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = jobs / JOBS[1] / "state.json"
    state = here = json.loads(path.read_text())
    for name in member[:-1]:
        here = here[name]
    here[member[-1]] = value
    path.write_text(json.dumps(state))
    code, _, err = run("status", JOBS[1], capfd=capfdbinary)
    assert code == 2
    assert "distrun: error: %s is damaged: %s" % (path, told) in err


def test_a_job_whose_state_is_damaged_can_be_killed(damaged: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    code, out, _ = run("kill", JOBS[2], capfd=capfdbinary)
    assert code == 0
    assert "%s: all its processes have ended\n" % JOBS[2] in out


def test_a_job_whose_plan_is_damaged_is_killed_by_its_hosts(
    jobs: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (jobs / JOBS[2] / "plan.json").write_text("{")
    code, _, err = run("kill", JOBS[2], capfd=capfdbinary)
    assert code == 2
    assert "%s is damaged: it is not JSON" % (jobs / JOBS[2] / "plan.json") in err
    assert "distrun kill -H FILE %s" % JOBS[2] in err


def test_a_job_that_has_lost_its_state_is_listed_and_one_that_is_being_made_is_not(
    jobs: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (jobs / JOBS[1] / "state.json").unlink()
    assert rows(run("status", capfd=capfdbinary)[1]) == {**SOUND, JOBS[1]: "damaged"}
    path = jobs / JOBS[1] / "launcher.json"
    who = process.identity(os.getpid())
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid": who.pid, "start": who.start}))
    assert JOBS[1] not in rows(run("status", capfd=capfdbinary)[1])
