"""How a dashboard begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_plan import sample_plan

from distrun import client, remote_jobs
from distrun.client import CoordinatorLost
from distrun.dashboard import loop
from distrun_runtime.contract import facts
from distrun_runtime.coordinator.failures import Outcome
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.jobstore import JobStore


@pytest.mark.parametrize("is_over", [True, False])
def test_a_job_elsewhere_that_has_ended_meanwhile_is_shown_and_is_no_error(
    is_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = JobStore(tmp_path).create(sample_plan(job="calm-1"))

    def refuse(folder: JobFolder, may_ask: bool = True) -> None:
        raise CoordinatorLost("its coordinator (pid 7 on h2) is gone")

    def fetch(folder: JobFolder, may_ask: bool = True) -> str:
        if is_over:
            folder.finish(Outcome(7, facts.HOST_LOST, "lost h4"))
        return ""

    monkeypatch.setattr(client, "connect", refuse)
    monkeypatch.setattr(remote_jobs, "is_elsewhere", lambda folder: True)
    monkeypatch.setattr(remote_jobs, "refreshed", fetch)
    if is_over:
        assert loop.first_connection(folder) is None
    else:
        with pytest.raises(CoordinatorLost):
            loop.first_connection(folder)
