from __future__ import annotations

import errno
import json
import os
import re
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sample_plan import sample_plan
from slowness import scaled

from distrun_runtime.contract import facts, process
from distrun_runtime.contract.dataclass import rfc3339
from distrun_runtime.coordinator import failures, jobfolder
from distrun_runtime.coordinator.failures import Culprit, Outcome, Problem, Survivor, TaskResult
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.jobstore import JobStore
from distrun_runtime.errors import JobStoreError, NoSuchJob


def store(tmp_path: Path, *jobs: str, name: str = "") -> JobStore:
    found = JobStore(tmp_path / "state")
    for job in jobs:
        found.create(sample_plan(job=job, name=name))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    """The folder of job `a-1`, the only one of its store."""
    return store(tmp_path, "a-1").find("a-1")


def dead_process() -> process.Identity:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        who = process.identity(child.pid)
        child.communicate(b"\n")
    return who


def orphan(folder: jobfolder.JobFolder) -> None:
    """Make a dead process the launcher of a job."""
    who = dead_process()
    launcher = dict(folder.launcher(), pid=who.pid, start=who.start)
    (folder.path / "launcher.json").write_text(json.dumps(launcher))


def end(jobs: JobStore, job: str) -> None:
    jobs.find(job).finish(Outcome(0, "succeeded", "all well"))


def created(jobs: JobStore, job: str, when: str) -> None:
    path = jobs.jobs / job / "state.json"
    path.write_text(json.dumps(dict(json.loads(path.read_text()), created=when)))


def test_the_root_follows_xdg_state_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert JobStore().root == tmp_path / "distrun"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert JobStore().root == tmp_path / ".local/state/distrun"


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
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "jobs").stat().st_mode & 0o077 == 0


def test_a_job_that_exists_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(JobStoreError, match="there is a job calm-otter-7f3 already"):
        store(tmp_path, "calm-otter-7f3", "calm-otter-7f3")


def test_a_folder_is_taken_over_by_the_nonce_of_its_plan_not_because_it_is_there(tmp_path: Path) -> None:
    plan = sample_plan()._replace(nonce="1f2e3d4c5b6a7988")
    jobs = JobStore(tmp_path)
    made = jobs.create(plan)
    orphan(made)
    assert jobs.take_over(plan._replace(nonce="0000000000000000")) is None
    assert jobs.take_over(plan._replace(nonce="")) is None
    assert made.launcher()["pid"] != os.getpid()
    taken = jobs.take_over(plan)
    assert taken == made
    assert made.launcher()["pid"] == os.getpid()
    assert taken.state()["state"] == "starting"


def test_a_link_of_the_launcher_to_its_own_disk_leads_to_a_folder_here(tmp_path: Path) -> None:
    jobs, runs = JobStore(tmp_path / "state"), tmp_path / "runs"
    jobs.create(sample_plan(), runs)
    (runs / "calm-otter-7f3").rename(tmp_path / "on the launcher")
    assert jobs.take_over(sample_plan()._replace(nonce="1f2e3d4c5b6a7988")) is None
    with pytest.raises(JobStoreError, match="there is a job calm-otter-7f3 already"):
        jobs.create(sample_plan(), tmp_path / "others")
    assert jobs.create(sample_plan(), runs).path == runs / "calm-otter-7f3"
    assert jobs.find("calm-otter-7f3").state()["state"] == "starting"


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
    with pytest.raises(JobStoreError, match="XDG_STATE_HOME"):
        JobStore(tmp_path / "file").create(sample_plan(), run_dir=tmp_path / "runs")
    assert JobStore(tmp_path / "state").list() == []
    assert not list((tmp_path / "runs").glob("*"))


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


def test_of_several_jobs_of_a_name_the_newest_is_meant(tmp_path: Path) -> None:
    jobs = store(tmp_path, "digits-002", "digits-001", name="digits")
    created(jobs, "digits-001", "2999-01-01T00:00:00.000Z")
    assert jobs.find("digits").id == "digits-001"
    assert [job.id for job in jobs.named("digits")] == ["digits-001", "digits-002"]


def test_an_exact_name_beats_a_prefix(tmp_path: Path) -> None:
    jobs = store(tmp_path, "digits-long-001", "digits-long-002", name="digits-long")
    jobs.create(sample_plan(job="digits-003", name="digits"))
    assert jobs.find("digits").id == "digits-003"
    with pytest.raises(NoSuchJob, match="could be"):
        jobs.find("digits-l")


def test_what_is_to_be_killed_is_sought_among_the_living_first(tmp_path: Path) -> None:
    jobs = store(tmp_path, "digits-001", "digits-002", "digits-003", name="digits")
    with pytest.raises(NoSuchJob, match="could be"):
        jobs.find_living("digits")
    end(jobs, "digits-003")
    with pytest.raises(NoSuchJob, match=r"could be digits-00., digits-00.; type more"):
        jobs.find_living("digits")
    orphan(jobs.find("digits-002"))  # lost: living ones come before it
    assert jobs.find_living("digits").id == jobs.find_living("digits-").id == "digits-001"
    end(jobs, "digits-001")
    assert jobs.find_living("digits").id == "digits-002"
    end(jobs, "digits-002")
    assert jobs.find_living("digits").id == jobs.find("digits").id


def test_a_living_job_whose_id_only_begins_so_is_not_killed_instead_of_one_of_that_name(tmp_path: Path) -> None:
    jobs = store(tmp_path, "digits-long-001", name="digits-long")
    jobs.create(sample_plan(job="digits-003", name="digits"))
    end(jobs, "digits-003")
    assert jobs.find_living("digits").id == "digits-003"


def test_an_unknown_job_lists_near_ones_or_what_there_is(tmp_path: Path) -> None:
    jobs = store(tmp_path, "calm-otter-7f3", "bold-fox-1a2")
    with pytest.raises(NoSuchJob, match="near: calm-otter-7f3"):
        jobs.find("clam-otter-7f3")
    with pytest.raises(NoSuchJob, match=r"there are: (bold-fox-1a2, calm-otter-7f3|calm-otter-7f3, bold-fox-1a2)"):
        jobs.find("zzz")
    for number in range(9):
        jobs.create(sample_plan(job="job-%d" % number))
        created(jobs, "job-%d" % number, "2999-01-01T00:00:0%d.000Z" % number)
    with pytest.raises(NoSuchJob, match=r"the newest: job-8, job-7, job-6, job-5, job-4 and 6 more"):
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


def test_a_job_whose_launcher_died_is_shown_as_lost(folder: JobFolder) -> None:
    assert folder.state()["state"] == "starting"
    launcher = folder.launcher()
    orphan(folder)
    assert folder.state()["state"] == "lost"
    (folder.path / "launcher.json").write_text(json.dumps(dict(launcher, host="elsewhere")))
    assert folder.state()["state"] == "starting"  # another machine's process cannot be judged from here
    silent = time.time() - facts.UNKNOWN_S - 1
    os.utime(folder.path / "state.json", (silent, silent))
    state = folder.state()
    assert (state["state"], folder.standing()) == ("unknown", "unknown")
    assert {task["state"] for task in state["tasks"]} == {"pending"}
    folder.touch()
    assert folder.state()["state"] == "starting"


def mixed() -> list[TaskResult]:
    """Tasks in every state that a task can have."""
    states = ("pending", "starting", "running", "exited", "failed", "stopped")
    begun = {"started": 1.0, "pid": 7}
    return [
        TaskResult("worker-%d" % rank, "worker", rank, "d1", state, **(begun if rank > 1 else {}))  # type: ignore[arg-type]
        for rank, state in enumerate(states)
    ]


def test_tasks_of_a_lost_job_that_had_not_ended_are_lost(folder: JobFolder) -> None:
    folder.write_state("running", mixed())
    assert "heard" not in folder.state()
    orphan(folder)
    state = folder.state()
    assert [task["state"] for task in state["tasks"]] == ["lost", "lost", "lost", "exited", "failed", "stopped"]
    assert state["updated"] <= state["heard"] <= rfc3339(time.time() + 1)


def test_a_lost_job_was_heard_of_when_anything_of_it_was_last_written(folder: JobFolder) -> None:
    folder.append(jobfolder.event("started", task="worker-0"))
    folder.log_path("worker-0").write_text("hello\n")
    orphan(folder)
    later = time.time() + 60
    for path in (folder.path / "state.json", folder.path / "events.jsonl", folder.log_path("worker-0")):
        later += 60
        os.utime(path, (later, later))
        assert folder.state()["heard"] == rfc3339(later)


def test_a_lost_job_that_was_killed_is_over(folder: JobFolder) -> None:
    folder.write_state("running", mixed())
    orphan(folder)
    folder.bury([Survivor("pid 9 (sleep)", "d1")])
    state = folder.state()
    assert (state["state"], state["exit_code"], state["reason"]) == ("killed", 143, "terminated")
    assert [task["state"] for task in state["tasks"]] == ["stopped"] * 3 + ["exited", "failed", "stopped"]
    assert [task["started"] for task in state["tasks"][1:3]] == [None, "1970-01-01T00:00:01.000Z"]
    assert state["tasks"][2]["ended"]
    assert state["tasks"][0]["ended"] is None
    assert "distrun kill" in state["message"]
    outcome = folder.outcome()
    assert outcome["survivors"] == [{"what": "pid 9 (sleep)", "host": "d1"}]


def test_a_job_that_ended_meanwhile_is_not_buried(folder: JobFolder) -> None:
    folder.finish(Outcome(0, "succeeded", "all well"))
    folder.bury([])
    assert folder.state()["state"] == "succeeded"


def test_a_job_that_was_ended_by_distrun_kill_says_so(folder: JobFolder) -> None:
    terminated = Outcome(143, "terminated", "terminated (SIGTERM)")
    assert folder.explained(terminated) == terminated
    folder.ask_to_end()
    assert folder.explained(terminated).message == "stopped by distrun kill"
    failed = Outcome(3, "task_failed", "worker-0 failed")
    assert folder.explained(failed) == failed
    folder.finish(terminated)
    assert folder.state()["message"] == "stopped by distrun kill"


def test_a_job_that_was_stopped_from_the_dashboard_says_by_whom(folder: JobFolder) -> None:
    terminated = Outcome(143, "terminated", "terminated (SIGTERM)")
    folder.ask_to_end("me@d1 from the dashboard")
    assert folder.explained(terminated).message == "stopped by me@d1 from the dashboard"
    (folder.path / "kill.json").write_text("{")
    assert folder.explained(terminated).message == "stopped by distrun kill"


def test_a_finished_job_is_never_lost(folder: JobFolder) -> None:
    task = TaskResult("worker-0", "worker", 0, "d1", "failed", pid=7, code=3, started=1.0, ended=2.5)
    culprit = Culprit("worker-0", "d1", 3, time=2.5)
    folder.finish(Outcome(3, "task_failed", "worker-0 on d1 failed", culprit, (task,)))
    (folder.path / "launcher.json").unlink()
    state = folder.state()
    assert (state["state"], state["exit_code"], state["reason"]) == ("failed", 3, "task_failed")
    assert state["tasks"][0]["started"] == "1970-01-01T00:00:01.000Z"
    assert state["finished"]
    outcome = folder.outcome()
    assert outcome["culprit"]["log"] == str(folder.log_path("worker-0"))
    assert outcome["culprit"]["time"] == "1970-01-01T00:00:02.500Z"


def test_the_outcome_that_a_folder_holds_is_the_one_that_was_written(folder: JobFolder) -> None:
    task = TaskResult("worker-0", "worker", 0, "d1", facts.FAILED, 7, 3, started=1.25, ended=2.5, cpu_s=0.5)
    culprit, problem = Culprit("worker-0", "d1", 3, time=2.5), Problem("d1", "disk", "it is full")
    survivor = Survivor("pid 7 (sleep)", "d1")
    outcome = Outcome(3, "task_failed", "it failed", culprit, (task,), (survivor,), folder.id, (problem,))
    folder.finish(outcome)
    assert failures.from_json(folder.outcome() or {}) == outcome


@pytest.mark.parametrize(
    ("member", "value", "told"),
    [
        (("culprit",), [], "culprit: expected an object or null, found []"),
        (("culprit", "task"), None, "culprit.task: expected a text, found None"),
        (("culprit", "consequence"), "no", "culprit.consequence: expected true or false, found 'no'"),
        (("problems", 0, "fix"), None, "problems[0].fix: expected a text, found None"),
        (("survivors", 0), "sleep", "survivors[0]: expected an object, found 'sleep'"),
    ],
)
def test_what_is_wrong_in_an_outcome_is_told_with_its_member(
    member: tuple[Any, ...], value: Any, told: str, folder: JobFolder
) -> None:
    problems = (Problem("d1", "clock", "it is\0behind"), Problem("d1", "disk", "it is full"))
    culprit, survivors = Culprit("worker-0", "d1", 3, time=2.5), (Survivor("pid 7 (sleep)", "d1"),)
    folder.finish(Outcome(3, "task_failed", "it failed", culprit, survivors=survivors, problems=problems))
    outcome: Any = folder.outcome()
    assert len(outcome["problems"]) == 2
    here = outcome
    for name in member[:-1]:
        here = here[name]
    here[member[-1]] = value
    (folder.path / "outcome.json").write_text(json.dumps(outcome))
    with pytest.raises(JobStoreError, match=re.escape(told)):
        folder.outcome()


def test_a_task_may_die_with_any_words(folder: JobFolder) -> None:
    words = "ValueError: bad \0 \ud800"
    said = {"reason": words, "own_failure": words, "lost_peer": words}
    task = TaskResult("worker-0", "worker", 0, "d1", "failed", pid=7, code=1, started=1.0, ended=2.5, **said)
    folder.write_state("stopping", [task])
    assert folder.state()["tasks"][0]["own_failure"] == words
    culprit = Culprit("worker-0", "d1", 1, time=2.5, reason=words, lost_peer=words)
    folder.finish(Outcome(1, "task_failed", words, culprit, (task,)))
    state: Any = folder.state()
    outcome: Any = folder.outcome()
    assert (state["message"], outcome["message"]) == (words, words)
    assert [outcome["tasks"][0][name] for name in said] == [words] * 3
    assert (outcome["culprit"]["reason"], outcome["culprit"]["lost_peer"]) == (words, words)


def test_members_that_no_reader_needs_are_ignored(folder: JobFolder) -> None:
    folder.finish(Outcome(3, "task_failed", "it failed", survivors=(Survivor("pid 7 (sleep)", "d1"),)))
    outcome: Any = folder.outcome()
    outcome["survivors"][0]["name"] = []
    (folder.path / "outcome.json").write_text(json.dumps(outcome))
    assert folder.outcome() == outcome


def test_a_process_that_takes_a_job_over_knows_what_was_written(tmp_path: Path) -> None:
    made = store(tmp_path, "a-1").find("a-1")
    made.write_state("running", [])
    assert JobFolder(made.path).written == made.written


def test_a_reader_never_sees_half_a_state(folder: JobFolder) -> None:
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


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file can be written any more, but for those that are there."""

    def replace(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(jobfolder, "_replace", replace)


def test_on_a_full_disk_the_outcome_goes_where_room_was_kept(
    folder: JobFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan(folder)
    folder.write_state("running", [TaskResult("worker-0", "worker", 0, "d1", "running", 7)])
    full_disk(monkeypatch)
    ended = TaskResult("worker-0", "worker", 0, "d1", "failed", 7, 3, reason="x" * 1000, own_failure="y" * 1000)
    with pytest.raises(OSError, match="No space"):  # state.json: told to the user
        folder.finish(Outcome(3, "task_failed", "worker-0 failed", Culprit("worker-0", "d1", 3), (ended,), job="a-1"))
    assert "reserve" not in os.listdir(folder.path)
    state = folder.state()
    assert (state["state"], state["exit_code"], state["message"]) == ("failed", 3, "worker-0 failed")
    assert [(task["state"], task["code"], task["reason"]) for task in state["tasks"]] == [("failed", 3, "x" * 1000)]
    assert [(job.id, job.standing()) for job in JobStore(tmp_path / "state").list()] == [("a-1", "failed")]


def test_an_outcome_that_is_too_long_for_the_room_is_kept_without_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = JobStore(tmp_path / "state")
    folder = jobs.create(sample_plan(workers=40, job="a-1"))
    tasks = [TaskResult("worker-%d" % rank, "worker", rank, "d1", "failed", reason="x" * 9000) for rank in range(40)]
    orphan(folder)
    full_disk(monkeypatch)
    with pytest.raises(OSError, match="No space"):
        folder.finish(Outcome(1, "task_failed", "many failed", tasks=tuple(tasks)))
    found = jobs.find("a-1").outcome()
    assert [task["reason"] for task in found["tasks"]] == [""] * 40


def test_the_room_is_given_back_when_a_job_ends_well(tmp_path: Path) -> None:
    jobs = store(tmp_path, "a-1")
    assert (jobs.find("a-1").path / "reserve").stat().st_size > 32 * 1024
    end(jobs, "a-1")
    assert "reserve" not in os.listdir(jobs.find("a-1").path)


def test_a_write_that_fails_leaves_the_old_state(folder: JobFolder, monkeypatch: pytest.MonkeyPatch) -> None:

    def full(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        folder.write_state("running", [])
    assert folder.state()["state"] == "starting"
    assert sorted(os.listdir(folder.path)) == ["launcher.json", "logs", "plan.json", "reserve", "state.json"]


def test_events_are_one_object_a_line(folder: JobFolder) -> None:
    folder.append(jobfolder.event("started", task="worker-0"))
    folder.append(jobfolder.event("said", text="two\nlines \udcff"))
    lines = [json.loads(line) for line in (folder.path / "events.jsonl").read_text().splitlines()]
    assert [(line["event"], line["version"]) for line in lines] == [("started", 1), ("said", 1)]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 9}', "nonsense"])
def test_a_file_that_is_not_ours_is_an_error_that_names_it(folder: JobFolder, tmp_path: Path, text: str) -> None:
    (folder.path / "state.json").write_text(text)
    with pytest.raises(JobStoreError, match=r"state\.json"):
        folder.state()
    assert JobStore(tmp_path / "state").list() == [folder]  # one broken job hides no other


REQUEST = {
    "name": "digits",
    "labels": ["team=a"],
    "launcher": "slurm",
    "command": ["python", "train.py"],
    "cwd": "/srv",
    "workers": 2,
}


def test_a_job_that_waits_for_its_allocation_is_listed_with_what_was_asked_for(tmp_path: Path) -> None:
    jobs = JobStore(tmp_path)
    folder = jobs.submit("digits-001", REQUEST)
    (listed,) = jobs.list()
    state = listed.state()
    assert (state["state"], state["name"], state["backend"]) == ("submitting", "digits", "slurm")
    assert (state["command"], state["hosts"], state["tasks"]) == (["python", "train.py"], [], [])
    folder.write_state("queued", ())
    assert listed.state()["state"] == "queued"
    folder.allocate({"hosts": [{"name": "d1"}]})
    folder.start(sample_plan(job="digits-001", name="digits"))
    assert listed.state()["state"] == "starting"
    assert [task["name"] for task in listed.state()["tasks"]] == ["scheduler", "server-0", "worker-0", "worker-1"]
    read = jobs.find("digits-001")
    request, allocation = read.request(), read.allocation()
    assert (request["schema"], request["version"], request["workers"]) == ("distrun.request/1", 1, 2)
    assert (allocation["schema"], allocation["hosts"]) == ("distrun.allocation/1", [{"name": "d1"}])
    assert request["time"] <= allocation["time"]


def test_a_job_that_never_got_its_allocation_is_lost_with_its_launcher(tmp_path: Path) -> None:
    folder = JobStore(tmp_path).submit("digits-001", REQUEST)
    orphan(folder)
    assert folder.state()["state"] == "lost"
    folder.bury(())
    assert folder.state()["state"] == "killed"


def test_a_damaged_record_stops_no_job_that_runs(tmp_path: Path) -> None:
    made = JobStore(tmp_path).create(sample_plan(job="digits-001"), request=REQUEST)
    (made.path / "request.json").write_text("{")
    read = JobStore(tmp_path).find("digits-001")
    read.write_state("running", ())
    assert (read.state()["state"], read.state()["labels"]) == ("running", [])


def elsewhere(folder: jobfolder.JobFolder, silent_s: float) -> None:
    """Make another host the one that runs a job, and that has touched it so long ago by the server's clock."""
    (folder.path / "launcher.json").write_text(json.dumps(dict(folder.launcher(), host="elsewhere", boot="other")))
    when = jobfolder.now(folder.path.parent) - silent_s
    os.utime(folder.path / "state.json", (when, when))


@pytest.mark.parametrize(("silent_s", "state"), [(0.0, "running"), (25.0, "running"), (35.0, "unknown")])
@pytest.mark.parametrize("ahead_s", [0.0, 12 * 3600.0, -12 * 3600.0])
def test_a_job_of_another_host_is_unknown_when_it_was_not_updated_for_30_s_by_the_servers_clock(
    silent_s: float, state: str, ahead_s: float, folder: JobFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_state("running", mixed())
    elsewhere(folder, silent_s)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + ahead_s)  # this host's clock is wrong
    found = folder.state()
    assert found["state"] == state
    assert [task["state"] for task in found["tasks"]][:3] == ["pending", "starting", "running"], "nobody knows better"
    assert sorted(os.listdir(tmp_path / "state" / "jobs")) == ["a-1"], "the clock's file is gone"


def test_a_job_of_another_boot_of_this_machine_is_lost(folder: JobFolder) -> None:
    (folder.path / "launcher.json").write_text(json.dumps(dict(folder.launcher(), boot="another")))
    assert folder.state()["state"] == "lost"


def test_of_many_who_want_one_id_one_gets_it(tmp_path: Path) -> None:
    plan, got, wrong = sample_plan(), [], []

    def claim(number: int) -> None:
        try:
            got.append(
                JobStore(tmp_path / "state").create(plan, run_dir=tmp_path / str(number) if number % 2 else None)
            )
        except JobStoreError as err:
            wrong.append(str(err))

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(30))
    assert len(got) == 1
    assert len(wrong) == 15
    assert all(text.startswith("there is a job calm-otter-7f3 already") for text in wrong)
    assert [folder.id for folder in JobStore(tmp_path / "state").list()] == ["calm-otter-7f3"]
    assert [path for path in tmp_path.glob("*/calm-otter-7f3") if path.is_dir()] in ([], [got[0].path])


def test_what_a_job_is_called_in_its_engine_is_on_the_disk_before_it_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(stat.S_ISDIR(os.fstat(fd).st_mode)))
    folder = jobfolder.JobFolder(tmp_path)
    assert folder.engine() is None
    folder.note_engine("distrun-otter-5f3a")
    assert synced == [False, True], "the file, and its name in the folder"
    note = folder.engine()
    assert (note["marker"], note["handle"]) == ("distrun-otter-5f3a", None)
    handle = {
        "engine": "slurm",
        "id": "12",
        "more": {"bin": "/opt", "tasks": 2, "time_s": None, "grants": [["h1", "h1", {}]]},
    }
    folder.note_engine("distrun-otter-5f3a", handle)
    note = folder.engine()
    assert note["handle"] == handle
    folder.note_engine("distrun-otter-5f3a", {"engine": "slurm"})
    with pytest.raises(JobStoreError, match="handle"):
        folder.engine()


def test_events_have_a_bound_and_the_newest_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobfolder, "EVENTS_BYTES", 4096)
    folder = JobStore(tmp_path).create(sample_plan())
    for number in range(1000):
        folder.append(jobfolder.event("said", level="info", text="x" * 50, number=number))
        assert sum(path.stat().st_size for path in folder.path.glob("events*.jsonl")) <= 2 * 4096
    numbers = [event["number"] for event in folder.last_events(6000)]
    assert numbers == list(range(numbers[0], 1000))
    assert len(numbers) > 30
    assert [event["number"] for event in folder.last_events(200)] == [999]


def test_last_events_are_read_from_the_middle_of_a_line_on(tmp_path: Path) -> None:
    folder = JobStore(tmp_path).create(sample_plan(job="calm-1"))
    assert folder.last_events(100) == []
    lines = [{"event": "started", "time": "2026-01-01T00:00:00Z", "task": "worker-%d" % rank} for rank in range(9)]
    (folder.path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "hal')
    size = len(json.dumps(lines[0])) + 1
    assert folder.last_events(3 * size) == lines[-2:]
    assert folder.last_events(1 << 20) == lines
