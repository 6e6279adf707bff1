"""`distrun status JOB` as text, of what a coordinator measures."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import schemas
from fakecoordinator import METRICS
from sample_plan import sample_plan

from distrun.cli import tables
from distrun.dashboard.source import FrameSource
from distrun.jobs import JobView
from distrun_runtime.coordinator import jobfolder
from distrun_runtime.coordinator.failures import Culprit, Outcome, TaskResult
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.jobstore import JobStore

NOW = 1e9 + 65
TASKS = [TaskResult("worker-0", "worker", 0, "d1", "running", 7, started=1e9)]


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    made = JobStore(tmp_path).create(sample_plan(job="calm-1"))
    made.write_state("running", TASKS)
    return made


def text(folder: JobFolder, **more: Any) -> str:
    return tables.text(JobView(folder, folder.state(), **more), NOW, 400)


def test_a_running_job_is_shown_with_what_is_measured(folder: JobFolder) -> None:
    shown = text(folder, metrics=METRICS)
    assert shown.splitlines()[0] == "calm-1  running  python train.py"
    said = "step 1200/5000 (24 %), 5.25 steps/s, ETA 0:12:00, loss nan, accuracy 0.91"
    assert f"progress     {said}\n" in shown
    assert re.search(r"^worker-0  d1 +7  stalled +0:01:05 +150 %  3.0G .*87 %  1.0G .* 2 s ", shown, re.MULTILINE)
    assert re.search(
        r"^worker-0 +stalled: no output, report or store call for 6 min; to see where: ", shown, re.MULTILINE
    )
    assert re.search(r"^d1 +ok +0 s +62 % +5.1 +12G/64G ", shown, re.MULTILINE)
    assert re.search(r"^server-0 +12 +10M +10.5 .* worker-1 .0.31s +gpu:0, cpu:0$", shown, re.MULTILINE)
    assert "\nserver-0: in host memory, not on a GPU: key 'e' is row-sparse\n" in shown
    assert "  a barrier waits for 2 of 3 members  " in shown


@pytest.mark.parametrize("odd", [None, 5, "x", [], {}, {"a": 1}, float("inf")])
@pytest.mark.parametrize("member", ["progress", "hosts", "tasks", "store", "history", "reports"])
def test_what_another_version_measures_is_shown_as_far_as_it_is_understood(
    member: str, odd: object, folder: JobFolder
) -> None:
    assert "calm-1  running" in text(folder, metrics={**METRICS, member: odd})


@pytest.mark.parametrize("is_over", [False, True])
def test_what_was_reported_is_drawn_also_once_the_job_is_over(is_over: bool, folder: JobFolder) -> None:
    reports = {"accuracy": [[50, 60.0, 0.5]], "loss": [[1, 1.0, 2.0], [50, 60.0, 1.0]]}
    if is_over:
        folder.keep_reports(reports)
        schemas.check(json.loads((folder.path / "reports.json").read_text()), "reports")
        folder.finish(Outcome(0, "succeeded", "all workers succeeded", job="calm-1"))
    shown = text(folder, metrics=None if is_over else {**METRICS, "reports": reports}).splitlines()
    at = shown.index("loss 1   min 1  max 2   step 1 to 50")
    assert len(shown[at + 6]) == tables.REPORT_COLUMNS
    assert shown[at + 7] == "accuracy 0.5   step 50"


def test_reports_that_cannot_be_read_are_none(folder: JobFolder) -> None:
    for content in ("{", "[]", '{"version": 1, "reports": 5}', '{"version": 9, "reports": {"loss": []}}'):
        (folder.path / "reports.json").write_text(content)
        assert folder.reports() == {}
    folder.keep_reports({"loss": [[10**400, 0.0, 1.0], [1, 10**400, 1.0], [1, 1.0, 10**400]]})
    assert "\nloss 1   0:00:00\n" in text(folder)
    folder.keep_reports({"x" * jobfolder.REPORTS_LIMIT: []})
    assert folder.reports() == {}


def test_what_was_seen_of_reports_stays_if_the_folder_has_none(folder: JobFolder) -> None:
    folder.finish(Outcome(0, "succeeded", "all workers succeeded", job="calm-1"))
    source = FrameSource(folder)
    source.start(None)
    assert "reports" not in [frame.type for frame in source.take()]
    source.close()


def test_what_tasks_say_cannot_control_the_terminal(folder: JobFolder) -> None:
    evil = "\x1b]0;x\x07\x1b[2Jhere\x9b1m"
    measured = {**METRICS["tasks"]["worker-0"], "condition": evil, "why": evil}
    progress = {**METRICS["progress"], "values": {evil: evil}}
    folder.write_state("running", [dataclasses.replace(TASKS[0], state="failed", reason=evil)])
    folder.log_path("worker-0").parent.mkdir(exist_ok=True)
    folder.log_path("worker-0").write_text(f"Error: {evil}\n")
    shown = text(folder, metrics={**METRICS, "tasks": {"worker-0": measured}, "progress": progress})
    assert "Error: here" in shown
    assert not set(shown) & set("\x1b\x07\x9b")


def test_a_job_of_which_nothing_is_heard_says_since_when_and_why(folder: JobFolder) -> None:
    view = JobView(
        folder, {**folder.state(), "state": "unknown"}, "d1", False, None, (), 180.0, "d1 cannot be asked: x"
    )
    shown = tables.text(view, NOW, 80)
    assert shown.startswith("calm-1  unknown  ")
    assert "seen         3 min ago; d1 cannot be asked: x\n" in shown
    assert "coordinator  on d1\n" in shown


def test_a_job_that_failed_shows_the_end_of_the_first_error_and_the_last_events(folder: JobFolder) -> None:
    failed = TaskResult("worker-0", "worker", 0, "d1", "failed", 7, 3, started=1e9, ended=1e9 + 5)
    folder.log_path("worker-0").write_text("one\nValueError: no\n")
    outcome = Outcome(3, "task_failed", "worker-0 on d1 failed", Culprit("worker-0", "d1", 3), (failed,), job="calm-1")
    folder.finish(outcome)
    when = {"version": 1, "time": "2026-01-31T12:00:00.000Z"}
    events = [{**when, "event": "state", "state": "running"}, {**when, "event": "said", "text": "stopping the job"}]
    shown = text(folder, metrics=METRICS, events=events)
    assert "running" not in shown
    assert "  stopping the job\n" in shown
    assert "first failure: worker-0 on d1: exit code 3\n" in shown
    assert "    | ValueError: no\n" in shown
    assert "exit code    3\n" in shown


def test_the_task_that_ended_the_job_is_the_first_row_though_another_is_said_to_have_failed_sooner(
    folder: JobFolder,
) -> None:
    sooner, culprit = (
        TaskResult(f"worker-{rank}", "worker", rank, "d1", "failed", 7, 1, started=1e9, ended=1e9 + 5 + rank)
        for rank in range(2)
    )
    folder.finish(Outcome(1, "task_failed", "no", Culprit("worker-1", "d1", 1), (sooner, culprit), job="calm-1"))
    rows = [line.split()[0] for line in text(folder).splitlines() if line.startswith("worker-")]
    assert rows == ["worker-1", "worker-0"]


def test_of_a_culprit_that_had_not_started_the_table_says_all(folder: JobFolder) -> None:
    missing = TaskResult("server-0", "server", 0, "d2", "pending")
    failed = TaskResult("worker-0", "worker", 0, "d1", "failed", 7, 3, started=1e9, ended=1e9 + 5)
    folder.finish(Outcome(3, "task_failed", "no", Culprit("server-0", "d2", None), (failed, missing), job="calm-1"))
    rows = [line for line in text(folder).splitlines() if line.startswith("server-0")]
    assert [row.split()[:3] for row in rows] == [["server-0", "d2", "pending"]]


def test_the_first_task_that_failed_is_shown_while_others_still_end(folder: JobFolder) -> None:
    failed = TaskResult("worker-0", "worker", 0, "d1", "failed", 7, 3, started=1e9, ended=1e9 + 5)
    folder.write_state("stopping", [failed])
    folder.log_path("worker-0").write_text("oops\n")
    assert text(folder).endswith("first failure: worker-0 on d1: exit code 3\n    | oops\n")


def test_long_words_are_broken_at_the_width_of_the_screen(folder: JobFolder) -> None:
    view = JobView(folder, folder.state(), metrics=METRICS)
    lines = [line for line in tables.text(view, NOW, 60).splitlines() if line.startswith(("progress", " " * 13))]
    assert len(lines) > 1
    assert all(len(line) <= 60 for line in lines)


def test_a_stall_is_told_once_while_it_lasts(folder: JobFolder) -> None:
    when = {"version": 1, "time": "2026-01-31T12:00:00.000Z"}
    said = "one of them does nothing: distrun stack calm-1 worker-0"
    events = [
        {**when, "event": "condition", "task": "worker-0", "condition": "stalled"},
        {**when, "event": "said", "level": "warning", "text": said, "tasks": ["worker-0"], "stalled": True},
    ]
    assert text(folder, metrics=METRICS, events=events).count("distrun stack calm-1 worker-0") == 1
    over = {**METRICS, "tasks": {"worker-0": {**METRICS["tasks"]["worker-0"], "condition": ""}}}
    assert said in text(folder, metrics=over, events=events)
