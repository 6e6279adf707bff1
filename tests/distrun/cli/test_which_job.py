"""Which jobs a command means: the latest, those of a label, those whose names are alike."""

from __future__ import annotations

import json

import pytest
from distrun_cli import Distrun, wait_until


@pytest.fixture
def jobs(distrun: Distrun) -> Distrun:
    """A job that is over, after two that run, of which one is the latest that does."""
    for name, label in (("x-1", "team=a"), ("x-2", "team=b")):
        words = (
            "--detach",
            "-n",
            "1",
            "-s",
            "0",
            "--name",
            name,
            "--label",
            label,
            "--label",
            "all=1",
            "sleep",
            "1000",
        )
        assert distrun.launch(*words).returncode == 0
    assert distrun.launch("-n", "1", "-s", "0", "--name", "done", "echo", "over").returncode == 0
    return distrun


def names(distrun: Distrun, *words: str) -> list[str]:
    return [line[:-4] for line in distrun.answer("status", "-o", "name", *words).stdout.decode().split()]


def test_jobs_are_listed_and_stopped_by_label_and_name(jobs: Distrun) -> None:
    assert names(jobs) == ["x-2", "x-1", "done"]
    assert names(jobs, "-l", "all=1") == ["x-2", "x-1"]
    assert names(jobs, "-l", "all=1", "-l", "team=a") == ["x-1"]
    assert names(jobs, "-l", "team=c") == []
    found = json.loads(jobs.answer("status", "-o", "json", "-l", "team=b").stdout)
    assert [(job["name"], job["labels"]) for job in found["jobs"]] == [("x-2", ["team=b", "all=1"])]
    assert b"job x-2-" in (latest := jobs.answer("wait", "--timeout", "0.01")).stderr
    assert latest.returncode == 124
    assert b"stdin is not a terminal" in jobs.answer("kill", "--name", "x-*").stderr
    assert jobs.run("kill", "-l", "team=a").returncode == 0
    assert jobs.run("kill", "--name", "x-*", "-y").returncode == 0
    none = jobs.answer("kill", "--name", "x-*")
    assert none.returncode == 2
    assert b"no job that runs has such a name" in none.stderr


def test_without_a_name_the_latest_job_is_meant_and_said(distrun: Distrun) -> None:
    none = distrun.answer("logs")
    assert none.returncode == 2
    assert b"there are no jobs in" in none.stderr
    for word in ("first", "second"):
        assert distrun.launch("-n", "1", "-s", "0", "--name", word, "echo", word).returncode == 0
        wait_until(lambda: distrun.answer("wait").returncode == 0, 20, "the job is over")
    done = distrun.answer("logs")
    assert done.stdout == b"second\n"
    assert done.stderr.startswith(b"distrun: job second-")
    assert b", the latest\n" in done.stderr
    assert distrun.answer("logs", "worker-0").stdout == b"second\n"
    assert b"no task 'worker-7' in this job" in distrun.answer("logs", "worker-0", "worker-7").stderr
    for command in ("attach", "stack"):
        assert b" is over: " in distrun.answer(command, "worker").stderr
    assert b"no job 'worker-'" in distrun.answer("logs", "worker-").stderr


@pytest.mark.parametrize(
    "words",
    [
        ("status", "-l", "a=1", "-w"),
        ("status", "-o", "name", "--hosts", "x"),
        ("status", "-l", "a"),
        ("kill", "--name", "x", "job"),
        ("launch", "-n", "1", "--label", "a b=1", "true"),
    ],
)
def test_a_choice_that_makes_no_sense_ends_with_2(words: tuple[str, ...], distrun: Distrun) -> None:
    assert distrun.answer(*words).returncode == 2


def test_a_job_whose_record_is_damaged_has_no_labels(distrun: Distrun) -> None:
    assert distrun.launch("-n", "1", "-s", "0", "--label", "team=a", "true").returncode == 0
    path = distrun.job / "request.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "labels": [["team=a"]]}))
    done = distrun.answer("status", "-o", "name", "-l", "team=a")
    assert (done.returncode, done.stdout) == (0, b"")
