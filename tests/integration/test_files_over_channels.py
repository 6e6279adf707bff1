"""Files of jobs whose agents dial back: they go over the agents' channels, once into each folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentkit import leftovers
from fakeengine import Copied, FakeEngine, Shown, planned

from distrun import launching
from distrun.sync import CopyRules
from distrun_runtime.contract.folder import MARKER
from distrun_runtime.coordinator.jobstore import JobStore
from distrun_runtime.coordinator.outcome import Outcome

SHOW = ("sh", "-c", "cat hello")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    found = FakeEngine(tmp_path)
    try:
        yield found
    finally:
        found.close()
        if found.cable is not None:
            found.cable.close()


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
        rules: CopyRules = CopyRules(),
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


def test_places_that_see_the_same_folder_get_one_copy(run: Run) -> None:
    (run.source / "big").write_bytes(b"x" * 3_000_000)
    outcome = run("7", "8", "9")
    assert outcome.exit_code == 0, run.sink.said
    assert run.sink.text == {f"worker-{rank}": "hello\n" for rank in range(3)}
    assert len([text for text in run.sink.said if text.startswith("info: copy ")]) == 1
    [done] = [text for text in run.sink.said if text.startswith("info: sync ")]
    assert done.startswith("info: sync 3/3 (2 files, 2.9 MiB) in ")
