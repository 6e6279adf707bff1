"""`distrun wait` beside a job that ends meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_plan import sample_plan

from distrun import cli, client
from distrun.client import ControlConnection, CoordinatorLost
from distrun_runtime.contract import facts
from distrun_runtime.coordinator.failures import Outcome
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.jobstore import JobStore


@pytest.mark.parametrize("is_over", [True, False])
def test_a_job_that_ends_before_its_coordinator_is_reached_gives_its_code(
    is_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = JobStore().create(sample_plan(job="calm-1"))
    folder.write_state("running", [])

    def ends(found: JobFolder, may_ask: bool = True) -> ControlConnection:
        if is_over:
            found.finish(Outcome(3, facts.TASK_FAILED, "worker-0 failed"))
        raise CoordinatorLost("its coordinator is gone", "")

    monkeypatch.setattr(client, "connect", ends)
    assert cli.run(["wait", "calm-1"]) == (3 if is_over else 7)
