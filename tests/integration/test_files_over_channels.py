"""Files of jobs whose agents dial back: they go over the agents' channels, once into each folder."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentkit import leftovers
from fakeengine import Cable, Copied, FakeEngine, Shown, opened, planned
from pythons import need

from distrun import launching
from distrun.sync.rules import CopyRules
from distrun_runtime.contract.folder import MARKER
from distrun_runtime.coordinator.failures import Outcome
from distrun_runtime.coordinator.jobstore import JobStore

ALL = CopyRules()
SHOW = ("sh", "-c", "cat hello")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    with opened(tmp_path) as found:
        yield found


class Run:
    """One job, run to its end in this thread."""

    def __init__(self, engine: FakeEngine, tmp_path: Path) -> None:
        self.engine = engine
        self.store = JobStore(tmp_path / "state")
        self.sink = Shown()
        self.source = tmp_path / "source"
        self.source.mkdir()
        (self.source / "hello").write_text("hello\n")
        self.dst = tmp_path / "dst"

    def __call__(
        self,
        *places: str,
        command: tuple[str, ...] = SHOW,
        rules: CopyRules = ALL,
        delete: bool = False,
        **limits: float,
    ) -> Outcome:
        copied = Copied(self.source, self.dst, rules, delete)
        job, folder = planned(self.engine, self.store, command, places or ("7",), copied, **limits)
        outcome = launching.coordinate(job, folder, self.sink)
        assert leftovers(job.plan.job) == []
        return outcome

    @property
    def found(self) -> set[str]:
        """The files of the destination, but for the marker."""
        files = {str(path.relative_to(self.dst)) for path in self.dst.rglob("*") if not path.is_dir()}
        return files - {MARKER}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "full", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here (that needs root)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def run(engine: FakeEngine, tmp_path: Path) -> Run:
    return Run(engine, tmp_path)


def test_the_files_are_there_before_tasks_start_with_their_modes_times_and_links(run: Run) -> None:
    (run.source / "a" / "empty").mkdir(parents=True)
    (run.source / "a" / "run.sh").write_text("#!/bin/sh\n")
    (run.source / "a" / "run.sh").chmod(0o750)
    (run.source / "a" / "link").symlink_to("../hello")
    os.utime(run.source / "hello", (1_600_000_000, 1_600_000_000))
    outcome = run()
    assert (outcome.exit_code, outcome.reason) == (0, "succeeded"), run.sink.said
    assert run.sink.text == {"worker-0": "hello\n"}
    assert run.found == {"hello", "a/run.sh", "a/link"}
    assert (run.dst / "a" / "empty").is_dir()
    assert (run.dst / "a" / "run.sh").stat().st_mode & 0o777 == 0o750
    assert os.readlink(run.dst / "a" / "link") == "../hello"
    assert (run.dst / "hello").stat().st_mtime == 1_600_000_000
    assert sorted(os.listdir(run.dst)) == [MARKER, "a", "hello"]
    assert sorted(os.listdir(run.source)) == ["a", "hello"]


@pytest.mark.parametrize("version", ["3.8", "3.13"])
def test_the_agent_takes_files_under_old_and_new_pythons(version: str, run: Run) -> None:
    run.engine.python = need(version)
    outcome = run()
    assert outcome.exit_code == 0, run.sink.said
    assert run.sink.text == {"worker-0": "hello\n"}


def test_a_copy_goes_on_where_it_was_when_the_channel_is_cut(run: Run) -> None:
    data = os.urandom(8_000_000)
    (run.source / "big").write_bytes(data)
    cable = run.engine.cable = Cable()
    cable.at = (2_000_000, cable.cut)
    outcome = run("7", command=("sh", "-c", "wc -c < big"))
    assert outcome.exit_code == 0, run.sink.said
    assert run.sink.text == {"worker-0": "8000000\n"}
    assert (run.dst / "big").read_bytes() == data
    assert cable.made == 2
    assert cable.carried < 8_000_000 + 3_000_000, "it did not begin again"
    assert run.found == {"hello", "big"}


def test_a_full_disk_ends_the_job_and_is_told_with_host_and_path(run: Run, disk: Path) -> None:
    """The folder has a file already, so its room is not checked beforehand."""
    (run.source / "big").write_bytes(os.urandom(3_000_000))
    run.dst = disk / "job"
    run.dst.mkdir()
    (run.dst / "hello").write_text("before\n")
    outcome = run()
    assert (outcome.exit_code, outcome.reason) == (4, "sync")
    assert outcome.message.startswith("the files did not reach 7: there is no room for the files: ")
    assert outcome.message.endswith(f"{run.dst}/big on {os.uname().nodename}: No space left on device")
    assert outcome.culprit.reason == "fix: make room there, or leave files out with --sync-exclude"
    assert (run.dst / "hello").read_text() == "before\n", "what was there stays"
    assert os.listdir(run.dst) == ["hello"]
    assert not run.sink.text


def test_delete_removes_what_only_the_host_has_but_for_what_patterns_leave_out(run: Run) -> None:
    rules = CopyRules(excludes=("*.ckpt", "/logs/", "+ /keep/me", "/keep/**"))
    assert run(delete=True, rules=rules).exit_code == 0
    for name in ("old/deep/file", "old/a.ckpt", "gone", "a.ckpt", "logs/1", "hello.pyc", "keep/me", "keep/you"):
        (run.dst / name).parent.mkdir(parents=True, exist_ok=True)
        (run.dst / name).write_text("theirs")
    (run.source / "hello").write_text("hello again\n")
    run.sink.text.clear()
    outcome = run(delete=True, rules=rules)
    assert outcome.exit_code == 0, run.sink.said
    assert run.sink.text == {"worker-0": "hello again\n"}
    assert run.found == {"hello", "old/a.ckpt", "a.ckpt", "logs/1", "hello.pyc", "keep/you"}


def test_nothing_is_copied_onto_the_source_itself_not_even_where_its_identity_says_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on hosts that share a file system with the launching machine."""
    monkeypatch.setattr("distrun_runtime.contract.folder.identity", lambda path: "")
    run.dst = run.source
    before = (run.source / "hello").stat().st_ino
    outcome = run("7", "8")
    assert outcome.exit_code == 0, run.sink.said
    assert run.sink.text == {"worker-0": "hello\n", "worker-1": "hello\n"}
    assert (run.source / "hello").stat().st_ino == before
    assert not [text for text in run.sink.said if text.startswith("info: copy ")]
    assert os.listdir(run.source) == ["hello"]


def test_a_job_that_is_interrupted_while_it_copies_leaves_the_folder_as_it_was(run: Run) -> None:
    (run.source / "big").write_bytes(bytes(60_000_000))
    run.dst.mkdir()
    (run.dst / "hello").write_text("before\n")
    cable = run.engine.cable = Cable()
    cable.at = (2_000_000, lambda: os.kill(os.getpid(), signal.SIGINT))
    outcome = run()
    assert (outcome.exit_code, outcome.reason) == (130, "interrupted")
    assert (run.dst / "hello").read_text() == "before\n"
    assert os.listdir(run.dst) == ["hello"]
