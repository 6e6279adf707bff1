"""How far a job is, by scripted reports."""

from __future__ import annotations

import math
from typing import Any

import pytest
from measured import MeasuredJob
from sample_plan import sample_plan

from distrun_runtime.coordinator.conditions import Progress
from distrun_runtime.coordinator.metrics import Report


class Script:
    """Progress, and a clock."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.now = 0.0

    def report(self, task: str, step: float | None, total: float | None = None, **values: float) -> None:
        self.progress.take(task, Report(step, total, values, self.now))

    def value(self) -> dict[str, Any]:
        found = self.progress.value(self.now)
        assert found is not None
        return found


@pytest.fixture
def script() -> Script:
    return Script()


def test_nothing_is_known_before_a_worker_reports() -> None:
    assert Progress().value(0.0) is None


def test_a_job_is_as_far_as_its_slowest_rank(script: Script) -> None:
    for task, step in (("worker-0", 50), ("worker-1", 20), ("worker-2", 60)):
        script.report(task, step, 100)
    found = script.value()
    assert [found[name] for name in ("slowest", "step", "total", "fraction")] == ["worker-1", 20, 100, 0.2]


def test_the_slowest_of_uneven_shares_has_the_lowest_fraction(script: Script) -> None:
    script.report("worker-0", 30, 40)
    script.report("worker-1", 60, 100)
    assert script.value()["slowest"] == "worker-1"


def test_a_rank_that_does_not_say_its_total_has_that_of_the_others(script: Script) -> None:
    script.report("worker-0", 10)
    script.report("worker-1", 60, 100)
    found = script.value()
    assert (found["slowest"], found["total"], found["fraction"]) == ("worker-0", 100, 0.1)


def test_the_time_left_goes_by_the_rate_of_the_last_two_minutes(script: Script) -> None:
    for second in range(400):
        script.now = float(second)
        script.report("worker-0", second * 2 if second < 200 else 400 + (second - 200) * 5, 3000)
        script.progress.mark(script.now)
    found = script.value()
    assert found["rate"] == pytest.approx(5.0, rel=0.02)
    assert found["eta_s"] == pytest.approx((3000 - found["step"]) / 5, rel=0.02)


def test_a_job_that_stands_gets_slower(script: Script) -> None:
    for second in range(61):
        script.now = float(second)
        script.report("worker-0", second, 1000)
        script.progress.mark(script.now)
    assert script.value()["rate"] == 1.0
    script.now = 120.0
    assert script.value()["rate"] == 0.5


def test_a_step_that_goes_back_begins_a_phase_when_all_ranks_have(script: Script) -> None:
    for task in ("worker-0", "worker-1"):
        script.report(task, 99, 100)
    script.report("worker-0", 3, 100)
    found = script.value()
    assert (found["phase"], found["step"], found["slowest"]) == (0, 99, "worker-1")
    script.report("worker-1", 2, 100)
    found = script.value()
    assert (found["phase"], found["step"], found["slowest"]) == (1, 2, "worker-1")


def test_the_rate_goes_on_across_phases(script: Script) -> None:
    for second in range(100):
        script.now = float(second)
        script.report("worker-0", second % 20, 20)
        script.progress.mark(script.now)
    assert script.value()["rate"] == pytest.approx(0.95, rel=0.05)  # the last step of a phase is not seen
    assert script.value()["phase"] == 4


def test_loss_is_the_mean_of_the_ranks_and_nan_is_shown(script: Script) -> None:
    script.report("worker-0", 1, 10, loss=0.5, accuracy=0.25)
    script.report("worker-1", 1, 10, loss=1.5)
    assert (script.value()["loss"], script.value()["values"]["accuracy"]) == (1.0, 0.25)
    script.now = 1.0
    script.report("worker-1", 2, 10, loss=math.nan)
    assert script.value()["loss"] == "nan"
    script.report("worker-1", 2, 10, loss=math.inf)
    assert script.value()["loss"] == "inf"


def test_values_without_steps_are_shown(script: Script) -> None:
    script.report("worker-0", None, None, loss=0.5)
    found = script.value()
    assert (found["step"], found["fraction"], found["loss"]) == (None, None, 0.5)


def test_a_worker_that_has_ended_holds_nothing_up_and_the_last_ones_stay(script: Script) -> None:
    script.report("worker-0", 10, 100)
    script.report("worker-1", 100, 100)
    script.progress.end("worker-0")
    assert script.value()["step"] == 100
    assert script.value()["eta_s"] == 0
    script.progress.end("worker-1")
    assert script.value()["slowest"] == "worker-0"


def test_of_ranks_that_have_ended_only_what_no_other_reports_counts(script: Script) -> None:
    script.report("worker-0", 9, 10, loss=1.0, final=7.0)
    script.report("worker-1", 5, 10, loss=3.0)
    script.progress.end("worker-0")
    assert script.value()["values"] == {"loss": 3.0, "final": 7.0}


def test_only_workers_have_progress() -> None:
    job = MeasuredJob(sample_plan(1, 1, ("d1",)))
    job.report("server-0", 5, 10)
    assert job.run_to(3).snapshot()["progress"] is None
    job.report("worker-0", 5, 10)
    assert job.run_to(5).snapshot()["progress"]["fraction"] == 0.5
