from __future__ import annotations

import dataclasses

import pytest

from distrun.errors import UsageError
from distrun.fleet import questions
from distrun.fleet.questions import HostJob

RUNS = HostJob("h1", "calm-otter-1", "alive", "alive", (), 1.0, 45.0)


def like(**members: object) -> HostJob:
    return dataclasses.replace(RUNS, **members)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("job", "stale", "state"),
    [
        (RUNS, False, "runs"),
        (like(agent="dead"), True, "agent gone"),
        (like(agent="stopped"), True, "agent stopped"),
        (like(agent="none", quiet_s=None, lease_s=None), True, "agent unknown"),
        (like(quiet_s=46.0), True, "silent 46 s"),
        (like(quiet_s=45.0), False, "runs"),
        (like(guard="dead"), False, "runs"),
    ],
)
def test_a_job_is_stale_when_nobody_looks_after_it(job: HostJob, stale: bool, state: str) -> None:
    assert (job.is_stale, job.state()) == (stale, state)


def test_jobs_are_chosen_by_the_beginning_of_their_id_and_by_staleness() -> None:
    dead = like(agent="dead", job="bold-fox-2")
    assert questions.chosen([RUNS, dead]) == [RUNS, dead]
    assert questions.chosen([RUNS, dead], stale=True) == [dead]
    assert questions.chosen([RUNS, dead], ["calm"]) == [RUNS]
    assert questions.chosen([RUNS, dead], ["calm"], stale=True) == []


def test_a_beginning_of_several_ids_names_none_of_them() -> None:
    other, longer = like(job="calm-otter-2"), like(job="calm-otter-12")
    with pytest.raises(UsageError, match="'calm' could be calm-otter-1, calm-otter-2") as caught:
        questions.chosen([RUNS, like(host="h2"), other], ["calm"])
    assert "type more" in caught.value.hint
    assert questions.chosen([RUNS, like(host="h2"), longer], ["calm-otter-1"]) == [RUNS, like(host="h2")]
    stale = like(job="calm-otter-3", agent="dead")
    assert questions.chosen([RUNS, stale], ["calm"], stale=True) == [stale]


@pytest.mark.parametrize("word", ["", "  "])
def test_an_empty_word_names_no_job_and_never_all(word: str) -> None:
    with pytest.raises(UsageError, match="is no job"):
        questions.chosen([RUNS], [word])


def test_the_answer_of_an_agent_is_read() -> None:
    row = {"pid": 7, "start": "proc:x:1", "command": "sleep 9", "task": "worker-0", "age_s": 3.5, "state": "S"}
    answer = {
        "uid": 0,
        "hostname": "x",
        "jobs": [
            {
                "job": "j1",
                "host": "d1",
                "agent": "dead",
                "guard": "dead",
                "quiet_s": 3.0,
                "lease_s": 45.0,
                "grace_s": 3.5,
                "processes": [row],
                "folder": "/tmp/x",
            }
        ],
    }
    (found,) = questions.read("h1", answer)
    assert found == HostJob(
        "h1", "j1", "dead", "dead", (questions.JobProcess(7, "proc:x:1", "sleep 9", "worker-0", 3.5),), 3.0, 45.0, 3.5
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (3.4, "3 s"), (99, "99 s"), (150, "2 min"), (11100, "3:05 h"), (12 * 86400, "12 d")],
)
def test_ages_are_short(seconds: float | None, text: str) -> None:
    assert questions.age(seconds) == text


def test_a_table_names_our_own_processes_and_cuts_long_commands() -> None:
    def shown(command: str, task: str = "") -> str:
        return questions.shown(questions.JobProcess(7, "s", command, task))

    assert shown("python3 -I -S -c exec(...)", "agent") == "distrun's agent"
    assert shown("python3 -I -S -c exec(...)", "guard") == "distrun's guard"
    assert shown("python3 -c import json, sys ...", "helper") == "distrun's helper"
    assert shown("sleep 9", "worker-0") == "sleep 9"
    assert len(shown("x" * 500)) == 103


def test_jobs_of_two_stores_by_one_id_are_named_with_their_nonces() -> None:
    ours, theirs, other = like(nonce="a1"), like(nonce="b2"), like(job="bold-fox-2", nonce="c3")
    assert questions.names([ours, theirs, other]) == {
        "calm-otter-1/a1": "calm-otter-1/a1",
        "calm-otter-1/b2": "calm-otter-1/b2",
        "bold-fox-2/c3": "bold-fox-2",
    }
    with pytest.raises(UsageError, match=r"'calm-otter-1' could be calm-otter-1/a1, calm-otter-1/b2"):
        questions.chosen([ours, theirs, other], ["calm-otter-1"])
    assert questions.chosen([ours, theirs, other], ["calm-otter-1/b"]) == [theirs]
    assert questions.chosen([ours, like(host="h2", nonce="a1")], ["calm"]) == [ours, like(host="h2", nonce="a1")]
    assert questions.chosen([ours, theirs]) == [ours, theirs]
