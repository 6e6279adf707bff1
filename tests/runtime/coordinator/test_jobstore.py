from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sample_plan import sample_plan

from distrun_runtime.contract import process
from distrun_runtime.coordinator import jobfolder, jobstore
from distrun_runtime.coordinator.jobstore import JobStore
from distrun_runtime.coordinator.outcome import Culprit, Outcome, TaskResult
from distrun_runtime.errors import JobStoreError, NoSuchJob


def store(tmp_path: Path, *jobs: str, name: str = "") -> JobStore:
    found = JobStore(tmp_path / "state")
    for job in jobs:
        found.create(sample_plan(job=job, name=name))
    return found


def dead_process() -> process.Identity:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        who = process.identity(child.pid)
        child.communicate(b"\n")
    return who


def test_the_root_follows_xdg_state_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert jobstore.default_root() == tmp_path / "distrun"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert jobstore.default_root() == tmp_path / ".local/state/distrun"


def test_a_new_job_has_plan_state_and_launcher(tmp_path: Path) -> None:
    plan = sample_plan(name="digits")
    folder = JobStore(tmp_path).create(plan)
    assert folder.path == tmp_path / "jobs" / plan.job
    assert jobfolder.JobFolder(folder.path).plan() == plan
    state = folder.state()
    assert (state["schema"], state["version"], state["state"]) == ("distrun.job/1", 1, "starting")
    assert (state["id"], state["name"], state["command"]) == (plan.job, "digits", ["python", "train.py"])
    assert [task["name"] for task in state["tasks"]] == ["scheduler", "server-0", "worker-0", "worker-1"]
    assert state["tasks"][2]["log"] == str(folder.path / "logs/worker-0.log")
    assert folder.launcher()["pid"] == os.getpid()
    assert folder.outcome() is None
    assert folder.path.stat().st_mode & 0o777 & ~0o755 == 0
    assert (tmp_path / "jobs").stat().st_mode & 0o077 == 0


def test_a_job_that_exists_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(JobStoreError, match="there is a job calm-otter-7f3 already"):
        store(tmp_path, "calm-otter-7f3", "calm-otter-7f3")


def test_new_ids_are_not_in_the_store(tmp_path: Path) -> None:
    jobs = store(tmp_path, "digits-001")
    assert jobs.new_id("digits") not in ("digits-001", "digits")


def test_a_run_dir_holds_the_folder_and_the_store_a_link(tmp_path: Path) -> None:
    jobs = JobStore(tmp_path / "state")
    folder = jobs.create(sample_plan(), run_dir=tmp_path / "runs")
    assert folder.path == tmp_path / "runs" / "calm-otter-7f3"
    assert (jobs.jobs / "calm-otter-7f3").resolve() == folder.path.resolve()
    assert jobs.find("calm").state()["id"] == "calm-otter-7f3"


def test_a_store_that_cannot_be_written_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JobStoreError, match="XDG_STATE_HOME"):
        JobStore(tmp_path / "file").create(sample_plan())
    with pytest.raises(JobStoreError, match="--run-dir"):
        JobStore(tmp_path / "state").create(sample_plan(), run_dir=tmp_path / "file")
    assert JobStore(tmp_path / "state").list() == []


def test_jobs_are_found_by_id_unique_prefix_and_exact_name(tmp_path: Path) -> None:
    jobs = store(tmp_path, "calm-otter-7f3", "calm-otter-7f3b", "bold-fox-1a2")
    assert jobs.find("bold").id == "bold-fox-1a2"
    assert jobs.find("calm-otter-7f3").id == "calm-otter-7f3"  # exact, though it begins another
    jobs.create(sample_plan(job="digits-9aa", name="my digits"))
    assert jobs.find("my digits").id == "digits-9aa"
    with pytest.raises(NoSuchJob, match="no job 'my dig'"):
        jobs.find("my dig")


def test_an_ambiguous_prefix_lists_what_it_could_be(tmp_path: Path) -> None:
    with pytest.raises(NoSuchJob, match="'calm' could be calm-owl-001, calm-otter-7f3; type more of the id"):
        store(tmp_path, "calm-otter-7f3", "calm-owl-001", "bold-fox-1a2").find("calm")


def test_an_ambiguous_name_lists_the_jobs(tmp_path: Path) -> None:
    with pytest.raises(NoSuchJob, match="could be"):
        store(tmp_path, "x-001", "y-002", name="digits").find("digits")


def test_an_unknown_job_lists_near_ones_or_what_there_is(tmp_path: Path) -> None:
    jobs = store(tmp_path, "calm-otter-7f3", "bold-fox-1a2")
    with pytest.raises(NoSuchJob, match="near: calm-otter-7f3"):
        jobs.find("clam-otter-7f3")
    with pytest.raises(NoSuchJob, match="there are: bold-fox-1a2, calm-otter-7f3"):
        jobs.find("zzz")
    with pytest.raises(NoSuchJob, match="there are no jobs"):
        JobStore(tmp_path / "empty").find("x")
    with pytest.raises(NoSuchJob):
        jobs.find("")


def test_jobs_are_listed_newest_first_and_half_made_ones_left_out(tmp_path: Path) -> None:
    jobs = store(tmp_path, "a-1", "b-2")
    (jobs.jobs / "c-3").mkdir()
    (jobs.jobs / "d-4").symlink_to(tmp_path / "gone")
    assert sorted(job.id for job in jobs.list()) == ["a-1", "b-2"]
    state = json.loads((jobs.jobs / "a-1/state.json").read_text())
    (jobs.jobs / "a-1/state.json").write_text(json.dumps(dict(state, created="2999-01-01T00:00:00.000Z")))
    assert [job.id for job in jobs.list()] == ["a-1", "b-2"]


def test_a_job_whose_launcher_died_is_shown_as_lost(tmp_path: Path) -> None:
    folder = store(tmp_path, "a-1").find("a-1")
    assert folder.state()["state"] == "starting"
    who = dead_process()
    launcher = dict(folder.launcher(), pid=who.pid, start=who.start)
    (folder.path / "launcher.json").write_text(json.dumps(launcher))
    assert folder.state()["state"] == "lost"
    (folder.path / "launcher.json").write_text(json.dumps(dict(launcher, host="elsewhere")))
    assert folder.state()["state"] == "starting"  # another machine's process cannot be judged from here


def test_a_finished_job_is_never_lost(tmp_path: Path) -> None:
    folder = store(tmp_path, "a-1").find("a-1")
    task = TaskResult("worker-0", "worker", 0, "d1", "failed", pid=7, code=3, started=1.0, ended=2.5)
    culprit = Culprit("worker-0", "d1", 3, time=2.5)
    folder.finish(Outcome(3, "task_failed", "worker-0 on d1 failed", culprit, (task,)))
    (folder.path / "launcher.json").unlink()
    state = folder.state()
    assert (state["state"], state["exit_code"], state["reason"]) == ("failed", 3, "task_failed")
    assert state["tasks"][0]["started"] == "1970-01-01T00:00:01.000Z"
    assert state["finished"]
    outcome = folder.outcome()
    assert outcome is not None
    assert outcome["culprit"]["log"] == str(folder.log_path("worker-0"))
    assert outcome["culprit"]["time"] == "1970-01-01T00:00:02.500Z"


def test_a_reader_never_sees_half_a_state(tmp_path: Path) -> None:
    folder = store(tmp_path, "a-1").find("a-1")
    tasks = [TaskResult("worker-%d" % rank, "worker", rank, "d1") for rank in range(200)]
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            folder.write_state("running", tasks)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            folder.state()
    finally:
        stop.set()
        writer.join()
    assert [name for name in os.listdir(folder.path) if name.endswith(".tmp")] == []


def test_a_write_that_fails_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store(tmp_path, "a-1").find("a-1")

    def full(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(OSError, match="No space"):
        folder.write_state("running", [])
    assert folder.state()["state"] == "starting"
    assert sorted(os.listdir(folder.path)) == ["launcher.json", "logs", "plan.json", "state.json"]


def test_events_are_one_object_a_line(tmp_path: Path) -> None:
    folder = store(tmp_path, "a-1").find("a-1")
    folder.record("started", task="worker-0")
    folder.record("said", text="two\nlines \udcff")
    lines = [json.loads(line) for line in (folder.path / "events.jsonl").read_text().splitlines()]
    assert [(line["event"], line["version"]) for line in lines] == [("started", 1), ("said", 1)]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 9}', "nonsense"])
def test_a_file_that_is_not_ours_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    folder = store(tmp_path, "a-1").find("a-1")
    (folder.path / "state.json").write_text(text)
    with pytest.raises(JobStoreError, match=r"state\.json"):
        folder.state()
    assert JobStore(tmp_path / "state").list() == [folder]  # one broken job hides no other
