"""A simulated job whose agents measure: what its coordinator asks of them, writes and shows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from simulation import Clock, SimulatedJob, job_plan

from distrun_runtime.coordinator import loop, messages
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.metrics import JobMetrics


class Viewer:
    """A watcher that wants snapshots."""

    def __init__(self) -> None:
        self.seen: list[Mapping[str, Any]] = []

    def opened(self, put: Any) -> None:
        put(messages.MetricsWanted(True))

    def event(self, value: Mapping[str, Any]) -> None: ...

    def state(self, value: Mapping[str, Any]) -> None: ...

    def stack(self, number: int, members: Mapping[str, Any]) -> None: ...

    def metrics(self, value: Mapping[str, Any]) -> None:
        self.seen.append(value)


def simulated(tmp_path: Path, hosts: int = 4, beats: int = 70, watcher: Viewer | None = None) -> SimulatedJob:
    plan = job_plan(hosts, workers=2 * hosts)
    return SimulatedJob(plan, tmp_path, Clock(), beats=beats, measures=True, watcher=watcher)


@pytest.mark.parametrize(("hosts", "interval_s"), [(1, 1.0), (100, 1.0), (250, 2.5)])
def test_agents_of_a_large_job_measure_less_often(tmp_path: Path, hosts: int, interval_s: float) -> None:
    job = SimulatedJob(job_plan(hosts, workers=hosts), tmp_path, Clock(), beats=1)
    assert job.run().exit_code == 0
    assert {agent.sample_s for agent in job.agents.values()} == {interval_s}


def test_a_client_sees_the_job(tmp_path: Path) -> None:
    viewer = Viewer()
    assert simulated(tmp_path, beats=5, watcher=viewer).run().exit_code == 0
    assert viewer.seen[0]["tasks"] == {}
    assert 10 <= len(viewer.seen) <= 25
    last = viewer.seen[-3]
    assert len(last["tasks"]) == 8
    assert len(last["hosts"]["n00000"]["gpus"]) == 8


def test_a_disk_that_fails_costs_samples_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: JobFolder, line: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JobFolder, "append_sample", full)
    job = simulated(tmp_path)
    assert job.run().exit_code == 0
    assert sum("No space left on device" in text for text in job.said) == 1


def test_a_fault_of_ours_costs_the_numbers_only_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: JobMetrics, *measured: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(JobMetrics, "take", fail)
    job = simulated(tmp_path, beats=5)
    assert job.run().exit_code == 0
    assert [text for text in job.said if "count" in text] == [
        "distrun itself failed to count: ZeroDivisionError: a bug; this job's numbers end here"
    ]
    assert "ZeroDivisionError: a bug" in capsys.readouterr().err


@pytest.mark.parametrize("measures", [True, False])
def test_what_comes_together_with_the_end_of_a_job_is_not_counted(
    measures: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = loop.HostLoop._handle
    given: list[object] = []

    def handle_and_more(self: loop.HostLoop, event: messages.Event) -> None:
        handle(self, event)
        if self._decisions.is_over:
            for late in (messages.MetricsWanted(True), messages.MetricsAsked(given.append)):
                handle(self, late)

    monkeypatch.setattr(loop.HostLoop, "_handle", handle_and_more)
    job = SimulatedJob(job_plan(2, workers=2), tmp_path, Clock(), beats=5, measures=measures)
    assert job.run().exit_code == 0
    kept = tmp_path / job.plan.job / "metrics.jsonl"
    assert len(kept.read_text().splitlines() if measures else []) == measures
    assert given == []
    assert not [text for text in job.said if "count" in text]
