"""`status --watch --json` of a job whose coordinator says what this test wants."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemas
from fakecoordinator import METRICS, Coordinator
from sample_plan import sample_plan

from distrun import cli
from distrun.cli import status
from distrun_runtime.contract import session
from distrun_runtime.coordinator.failures import Outcome, TaskResult
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.jobstore import JobStore

Watched = Callable[[Callable[[str], list[bytes]]], list[dict[str, Any]]]
TASKS = [TaskResult("worker-0", "worker", 0, "d1", "running", 7, started=1e9)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobFolder:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(status, "POLL_S", 0.05)
    made = JobStore().create(sample_plan(job="calm-1", name="calm"))
    made.write_state("running", TASKS)
    made.write_control(str(tmp_path / "c.s"))
    return made


@pytest.fixture
def watched(folder: JobFolder, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> Iterator[Watched]:
    """Returns the lines of a watch to its end, given what the coordinator answers to frames; checks the schema."""
    made: list[Coordinator] = []

    def run(answers: Callable[[str], list[bytes]]) -> list[dict[str, Any]]:
        made.append(Coordinator(tmp_path / "c.s", folder.id, answers))
        code = cli.run(["status", folder.id, "--watch", "--json"])
        out, err = capfdbinary.readouterr()
        assert err == b""
        lines = [json.loads(line) for line in out.splitlines()]
        for line in lines:
            schemas.check(line, "watch")
        assert code == (0 if (lines[-1]["outcome"] or {}).get("exit_code") == 0 else 1)
        return lines

    yield run
    for each in made:
        each.close()


def frame(kind: str, /, **members: Any) -> bytes:
    return session.encode({"type": kind, **members})


def state(folder: JobFolder, word: str) -> dict[str, Any]:
    return {**json.loads((folder.path / "state.json").read_text()), "state": word}


def ended(folder: JobFolder) -> bytes:
    return frame("outcome", outcome=folder.outcome_json(Outcome(0, "succeeded", "all well")))


def test_changes_are_told_once_each_and_the_end_has_the_outcome(folder: JobFolder, watched: Watched) -> None:
    event = {"version": 1, "time": "2026-01-31T12:00:00.000Z", "event": "exited", "task": "worker-0", "host": "d1"}
    states = iter([state(folder, "running"), state(folder, "stopping")])

    def answers(kind: str) -> list[bytes]:
        if kind == "subscribe":
            return [frame("metrics", metrics=METRICS)]
        if kind == "state":
            found = next(states)
            then = ended(folder) if found["state"] == "stopping" else frame("event", event=event)
            return [frame("state", state=found), then]
        return []

    lines = watched(answers)
    assert lines[0]["type"] == "snapshot"
    told = [(line["type"], *(name for name in ("state", "metrics", "event") if name in line)) for line in lines[1:-1]]
    assert ("update", "metrics") in told
    assert ("update", "event") in told
    assert told.count(("update", "state")) == 2, "a state that is as before is not told"
    assert [line["state"]["state"] for line in lines if "state" in line] == ["running", "stopping", "succeeded"]
    assert lines[-1]["outcome"]["exit_code"] == 0


def test_the_last_state_is_told_if_the_coordinator_ends_before_it_answers_for_it(
    folder: JobFolder, watched: Watched
) -> None:
    last = TaskResult("worker-0", "worker", 0, "d1", "exited", 7, 0, started=1e9)
    outcome = folder.outcome_json(Outcome(0, "succeeded", "all well", tasks=(last,)))

    def answers(kind: str) -> list[bytes]:
        finished = {"version": 1, "time": "2026-01-31T12:00:00.000Z", "event": "finished"}
        return [frame("event", event=finished), frame("outcome", outcome=outcome)] if kind == "subscribe" else []

    lines = watched(answers)
    state = lines[-2]["state"]
    assert (state["state"], state["exit_code"], state["reason"]) == ("succeeded", 0, "succeeded")
    assert (state["message"], state["finished"] is None) == ("all well", False)
    assert [(task["state"], task["code"]) for task in state["tasks"]] == [("exited", 0)]


def test_what_the_coordinator_left_out_is_a_gap_and_then_the_whole_state(folder: JobFolder, watched: Watched) -> None:
    def answers(kind: str) -> list[bytes]:
        missed = frame("state", state=state(folder, "running"), missed=12)
        return [missed, ended(folder)] if kind == "state" else []

    lines = watched(answers)
    kinds = [line["type"] for line in lines]
    at = kinds.index("gap")
    assert lines[at]["missed"] == 12
    assert lines[at + 1]["state"]["state"] == "running"
    assert kinds[-1] == "end"


def test_a_connection_that_was_cut_is_a_gap_and_the_watch_goes_on(folder: JobFolder, watched: Watched) -> None:
    connections = itertools.count()  # those of the watch: the snapshot's does not ask for the state

    def answers(kind: str) -> list[bytes]:
        if kind == "subscribe":
            return [frame("metrics", metrics=METRICS)]
        if kind != "state":
            return []
        is_cut = next(connections) == 0
        return [frame("state", state=state(folder, "running")), b"\xff" * 8 if is_cut else ended(folder)]

    lines = watched(answers)
    gaps = [line for line in lines if line["type"] == "gap"]
    assert [line["missed"] for line in gaps] == [None]
    assert lines[lines.index(gaps[0]) + 1]["state"]["state"] == "running"
    assert lines[-1]["outcome"]["exit_code"] == 0


def test_a_job_without_an_outcome_ends_with_why(folder: JobFolder, watched: Watched) -> None:
    def answers(kind: str) -> list[bytes]:
        told = {"kind": "OSError", "message": "no room", "hint": "make some", "exit_code": 8, "trace": ""}
        return [frame("failed", **told)] if kind == "subscribe" else []

    lines = watched(answers)
    assert lines[-1]["outcome"] is None
    assert lines[-1]["error"] == {"message": "no room", "hint": "make some"}


def test_a_job_whose_coordinator_dies_is_lost_and_the_watch_ends(folder: JobFolder, watched: Watched) -> None:
    def answers(kind: str) -> list[bytes]:
        if kind != "subscribe":
            return []
        who = json.loads((folder.path / "launcher.json").read_text())
        (folder.path / "launcher.json").write_text(json.dumps({**who, "start": "proc:another-boot:1"}))
        return [b"\xff" * 8]

    lines = watched(answers)
    assert lines[-2]["state"]["state"] == "lost"
    assert (lines[-1]["type"], lines[-1]["outcome"], lines[-1]["error"]) == ("end", None, None)
