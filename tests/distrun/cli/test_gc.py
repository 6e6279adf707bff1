"""Removing the folders of jobs that are over."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from sample_plan import sample_plan

from distrun import cli
from distrun_runtime.contract.dataclass import rfc3339
from distrun_runtime.coordinator import jobfolder
from distrun_runtime.coordinator.failures import Outcome
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.jobstore import JobStore

DAY_S = 86400.0


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobStore:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return JobStore()


def change(folder: JobFolder, name: str, **members: object) -> None:
    path = folder.path / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **members}))


def orphan(folder: JobFolder) -> JobFolder:
    change(folder, "launcher.json", boot="another")
    return folder


def over(store: JobStore, job: str, days: float = 40.0, run_dir: Path | None = None) -> JobFolder:
    """A job that ended so many days ago."""
    folder = store.create(sample_plan(job=job), run_dir=run_dir)
    folder.log_path("worker-0").write_text("x" * 100_000)
    folder.finish(Outcome(0, "succeeded", "all well"))
    when = rfc3339(time.time() - days * DAY_S)
    change(folder, "state.json", finished=when, updated=when, created=when)
    return orphan(folder)


def ids(store: JobStore) -> list[str]:
    return sorted(folder.id for folder in store.list())


def gc(*words: str) -> int:
    return cli.run(["gc", *words])


def test_jobs_that_ended_more_than_thirty_days_ago_are_removed(
    store: JobStore, capfd: pytest.CaptureFixture[str]
) -> None:
    over(store, "old-1")
    over(store, "new-1", 20)
    assert gc() == 0
    assert ids(store) == ["new-1"]
    out = capfd.readouterr().out
    assert out.startswith("old-1: succeeded, ")
    assert "1 job removed, " in out
    assert os.listdir(store.jobs) == ["new-1"]


@pytest.mark.parametrize(("older", "left"), [("7d", []), ("500h", []), ("21d", ["a-1"]), ("0", []), ("3w", ["a-1"])])
def test_an_age_is_given_in_a_unit(older: str, left: list[str], store: JobStore) -> None:
    over(store, "a-1", 20.9)
    assert gc("--older-than", older) == 0
    assert ids(store) == left


@pytest.mark.parametrize("older", ["x", "-1", "3y", "1e3", ""])
def test_an_age_that_is_none_is_refused(older: str, store: JobStore, capfd: pytest.CaptureFixture[str]) -> None:
    assert gc(f"--older-than={older}") == 2
    assert "expected a time such as 30d" in capfd.readouterr().err


def test_the_newest_are_kept(store: JobStore) -> None:
    for number in range(5):
        over(store, f"a-{number}", 50 + number)
    assert gc("--keep", "2") == 0
    assert ids(store) == ["a-0", "a-1"]


def test_a_dry_run_says_what_would_go_and_how_much_and_removes_nothing(
    store: JobStore, capfd: pytest.CaptureFixture[str]
) -> None:
    over(store, "old-1")
    assert gc("--dry-run", "--json") == 0
    told = json.loads(capfd.readouterr().out)
    (row,) = told["jobs"]
    assert (told["schema"], told["dry_run"], row["job"], row["state"]) == ("distrun.gc/1", True, "old-1", "succeeded")
    assert row["size"] == told["size"] >= 100_000
    assert gc("--dry-run") == 0
    assert "1 job would be removed (--dry-run)" in capfd.readouterr().out
    assert ids(store) == ["old-1"]


def test_a_job_that_runs_is_never_removed(store: JobStore, capfd: pytest.CaptureFixture[str]) -> None:
    folder = store.create(sample_plan(job="live-1"))
    change(folder, "state.json", created="2001-01-01T00:00:00.000Z", updated="2001-01-01T00:00:00.000Z")
    for words in (["--older-than", "0"], ["--older-than", "0", "--lost"]):
        assert gc(*words) == 0
    assert gc("live-1", "--lost") == 2
    assert "job live-1 is starting" in capfd.readouterr().err
    (folder.path / "state.json").write_text("{")
    assert gc("live-1") == 2
    assert "is damaged, and its launcher runs" in capfd.readouterr().err
    assert ids(store) == ["live-1"]


def test_a_job_that_may_run_on_another_host_is_never_removed(
    store: JobStore, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = store.create(sample_plan(job="away-1"))
    change(folder, "launcher.json", host="elsewhere")
    when = jobfolder.now(store.jobs) - 400 * DAY_S
    os.utime(folder.path / "state.json", (when, when))
    assert folder.state()["state"] == "unknown"
    assert gc("--older-than", "0", "--lost") == 0
    assert gc("away-1", "--lost") == 2
    assert "on elsewhere: distrun status away-1" in capfd.readouterr().err
    assert ids(store) == ["away-1"]


def test_a_lost_job_is_removed_only_if_that_is_said(store: JobStore, capfd: pytest.CaptureFixture[str]) -> None:
    orphan(store.create(sample_plan(job="lost-1")))
    assert gc("--older-than", "0") == 0
    assert gc("lost-1") == 2
    assert "distrun kill lost-1" in capfd.readouterr().err
    assert ids(store) == ["lost-1"]
    assert gc("--older-than", "0", "--lost") == 0
    assert ids(store) == []


def test_a_damaged_job_is_removed_only_by_its_name(store: JobStore) -> None:
    folder = over(store, "bad-1", 400)
    (folder.path / "state.json").write_text("{")
    assert gc("--older-than", "0", "--lost") == 0
    assert ids(store) == ["bad-1"]
    assert gc("bad-1") == 0
    assert ids(store) == []


def test_a_named_job_is_removed_whenever_it_ended(store: JobStore) -> None:
    over(store, "a-1", 0)
    over(store, "b-1", 0)
    assert gc("a-1") == 0
    assert ids(store) == ["b-1"]


def test_links_are_removed_and_not_followed(store: JobStore, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("mine")
    folder = over(store, "a-1")
    (folder.path / "link").symlink_to(precious)
    (folder.path / "logs" / "link").symlink_to(precious / "data")
    theirs = over(store, "b-1", run_dir=tmp_path / "runs")
    assert gc() == 0
    assert ids(store) == []
    assert (precious / "data").read_text() == "mine"
    assert (theirs.path / "plan.json").exists()
    assert f"b-1: succeeded, only the link to it; its folder stays: {theirs.path}" in capfd.readouterr().out


def test_what_an_ended_run_left_is_removed_by_the_next(store: JobStore) -> None:
    over(store, "new-1", 1)
    (store.jobs / ".removed-old-1" / "logs").mkdir(parents=True)
    assert ids(store) == ["new-1"]
    assert gc() == 0
    assert os.listdir(store.jobs) == ["new-1"]


def test_a_folder_that_cannot_be_removed_is_told(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    over(store, "a-1")

    def refuse(*args: object, **more: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    assert gc() == 1
    assert f"cannot remove {store.jobs / 'a-1'}: Permission denied" in capfd.readouterr().err
    assert ids(store) == ["a-1"]


def test_a_job_that_another_host_has_just_removed_is_no_problem(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    over(store, "a-1")
    real = os.rename

    def be_late(old: str, new: str) -> None:
        real(old, new)  # the other host, which shares the store
        shutil.rmtree(new)
        real(old, new)

    monkeypatch.setattr(os, "rename", be_late)
    assert gc() == 0
    assert capfd.readouterr().err == ""
    assert ids(store) == []


def test_nothing_to_remove_is_said(store: JobStore, capfd: pytest.CaptureFixture[str]) -> None:
    assert gc() == 0
    assert capfd.readouterr().out == "there is nothing to remove\n"
