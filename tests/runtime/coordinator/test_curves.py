"""What scripts report, over the whole run: how points are merged, and what of it a job's snapshot has."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from statistics import fmean

import pytest
import schemas
from hypothesis import given
from hypothesis import strategies as st
from measured import WALL, MeasuredJob
from sample_plan import sample_plan

from distrun_runtime.contract.agent_messages import Measured
from distrun_runtime.coordinator.messages import KeepReports
from distrun_runtime.coordinator.metrics import CURVE_POINTS as POINTS
from distrun_runtime.coordinator.metrics import Curve, Curves, Point


@given(st.integers(1, 3000), st.integers(0, 9))
def test_a_curve_has_the_whole_run_in_few_points_each_the_mean_of_equally_many(count: int, seed: int) -> None:
    choose, curve = random.Random(seed), Curve()
    told = [choose.uniform(-5, 5) for _ in range(count)]
    for step, value in enumerate(told):
        curve.add(Point(step, float(step), value))
    points = curve.points()
    assert min(count, POINTS // 2) <= len(points) <= POINTS
    assert points[0] == Point(0, 0.0, told[0])
    assert points[-1] == Point(count - 1, count - 1.0, told[-1])
    assert all(point.step == point.time_s for point in points)
    ends = [int(point.time_s) + 1 for point in points]
    for (begin, end), point in zip(pairwise(ends), points[1:], strict=True):
        assert point.value == pytest.approx(fmean(told[begin:end]))
    assert len({end - begin for begin, end in pairwise(ends[:-2])}) <= 1


def test_means_of_huge_numbers_are_no_larger_and_nan_stays_where_it_was() -> None:
    curve = Curve()
    for step in range(500):
        curve.add(Point(step, step, math.nan if step == 200 else 1.7e308))
    values = [point.value for point in curve.points()]
    assert [math.isnan(value) for value in values].count(True) == 1
    assert {value for value in values if not math.isnan(value)} == {1.7e308}


def test_values_have_6_digits_and_names_are_the_first_16() -> None:
    curves = Curves()
    curves.add(
        None, 1.26, {"": 1.0, "a": 1 / 3, "b": math.inf, "c": 1234567.8, **{f"n{each}": 0.0 for each in range(20)}}
    )
    found = curves.shown()
    assert len(found) == 16
    assert [found[name] for name in "abc"] == [[[None, 1.3, each]] for each in (0.333333, "inf", 1.23457e6)]
    schemas.check(found, "common", "#/$defs/reports")


def test_a_snapshot_has_means_of_the_ranks_whenever_one_has_reported() -> None:
    job = MeasuredJob(sample_plan(2, 0, ("d1",)))
    for step in (1, 2, 3):
        job.report("worker-0", step, 10, loss=1 / step)
        job.report("worker-1", step, 10, loss=3 / step, lr=0.5)
        job.run_to(4.0 * step)
    assert job.snapshot()["reports"] == {
        "loss": [[1, 1.0, 2.0], [2, 5.0, 1.0], [3, 9.0, 0.666667]],
        "lr": [[step, 4.0 * step - 3, 0.5] for step in (1, 2, 3)],
    }


def test_what_a_task_that_ends_reports_last_is_a_point_and_changes_nothing_else() -> None:
    job = MeasuredJob(sample_plan(2, 0, ("d1",)))
    job.report("worker-0", 1, 10, loss=4.0)
    before = job.run_to(3.0).snapshot()
    last = {"step": 2, "total": 10, "values": {"loss": 2.0}, "time": WALL + 3.5}
    job.tell(Measured("d1", {"clock": 5003.5, "time": WALL + 3.5, "ended": {"worker-0": last, "worker-7": last}}))
    after = job.snapshot()
    assert after["reports"]["loss"][-1] == [2, 3.0, 2.0]
    assert (after["hosts"], after["tasks"].keys()) == (before["hosts"], before["tasks"].keys())
    job = MeasuredJob(sample_plan(2, 0, ("d1",)))  # one that ends before its first sample
    job.tell(Measured("d1", {"clock": 5003.5, "time": WALL + 3.5, "ended": {"worker-0": last}}))
    (kept,) = [each.reports for each in job.measuring.finish(1.0) if isinstance(each, KeepReports)]
    assert kept == {"loss": [[2, 1.0, 2.0]]}


def test_a_number_that_comes_again_after_a_restart_keeps_its_first_point() -> None:
    curves = Curves()
    curves.add(1, 1.0, {"loss": 3.0, "accuracy": 0.1})
    curves.add(2, 2.0, {"loss": 2.0})
    curves.add(3, 2.5, {"loss": 1.0, "accuracy": 0.5}, replaces=True)
    assert curves.shown()["accuracy"] == [[1, 1.0, 0.1], [3, 2.5, 0.5]]
    assert [value for _, _, value in curves.shown()["loss"]] == [3.0, 1.0]


def test_a_snapshot_has_what_was_reported_last_and_adds_no_points_however_often_it_is_made() -> None:
    job, alone = (MeasuredJob(sample_plan(1, 0, ("d1",)), 10.0) for _ in range(2))
    for step in range(60):
        for each in (job, alone):
            each.report("worker-0", step, 100, loss=float(step))
            each.run_to(step + 1.0)
        assert job.snapshot()["reports"]["loss"][-1][2] == step
    kept, others = job.snapshot()["reports"]["loss"], alone.snapshot()["reports"]["loss"]
    assert 6 <= len(kept) <= len(others) + 1 <= 8


def test_curves_are_kept_each_minute_and_at_the_end_with_what_was_reported_last() -> None:
    job = MeasuredJob(sample_plan(1, 0, ("d1",)))
    job.report("worker-0", 1, 10, loss=1.0)
    job.run_to(150)
    kept = [each.reports for each in job.done if isinstance(each, KeepReports)]
    assert kept == [{"loss": [[1, 1.0, 1.0]]}] * 2
    job.report("worker-0", 2, 10, loss=0.5)
    job.tell_measured()
    last = [each.reports for each in job.measuring.finish(job.now) if isinstance(each, KeepReports)]
    assert last == [{"loss": [[1, 1.0, 1.0], [2, 150.0, 0.5]]}]


def test_a_sample_has_all_that_is_reported_unless_its_names_would_fill_the_line() -> None:
    for names, kept in (
        (("loss", "accuracy"), {"accuracy": 0.0, "loss": 1.0}),
        (["\u8a13" * 32 + str(n) for n in range(16)], None),
    ):
        job = MeasuredJob(sample_plan(1, 0, ("d1",)))
        job.report("worker-0", 1, 10, **{name: float(name == "loss") for name in names})
        progress = json.loads(job.run_to(70).kept[0])["progress"]
        assert progress.get("values") == kept
        assert progress["step"] == 1
