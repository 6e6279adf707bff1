"""A job's progress in words."""

from __future__ import annotations

from typing import Any

import pytest

from distrun.dashboard import events

TOLD: dict[str, Any] = {
    "step": 1200,
    "total": 5000,
    "phase": 0,
    "fraction": 0.24,
    "eta_s": 725.0,
    "rate": 5.25,
    "loss": "nan",
    "values": {"accuracy": 0.91, "loss": "nan"},
    "slowest": "worker-1",
}


def of(tasks: dict[str, Any] | None = None, **changed: Any) -> events.ProgressView:
    found = events.of({"progress": {**TOLD, **changed}, "tasks": tasks or {}})
    assert found is not None
    return found


def test_all_that_is_known_is_told_in_the_same_words_everywhere() -> None:
    parts = ["step 1200/5000 (24 %)", "5.25 steps/s", "ETA 0:12:05", "loss nan"]
    assert events.line(of()) == parts
    tasks = {"worker-1": {"condition": "straggler"}}
    assert events.details(of(tasks)) == [*parts, "accuracy 0.91", "slowest worker-1"]
    assert events.short(of()) == "24 %, ETA 0:12:05"


def test_what_is_not_known_is_left_out() -> None:
    none = of(step=7, total=None, fraction=None, eta_s=None, rate=None, loss=None, values={}, slowest=None, phase=1)
    assert events.details(none) == ["phase 2: step 7"]
    assert events.short(none) == "phase 2: step 7"
    assert events.of({"progress": None}) is None
    assert events.line(of(step=None, eta_s="inf", rate=0.0)) == ["loss nan"]


def test_while_the_slowest_rank_is_stalled_there_is_no_eta() -> None:
    found = of({"worker-1": {"condition": "stalled"}})
    assert events.details(found)[2:] == ["no ETA: worker-1 is stalled", "loss nan", "accuracy 0.91"]
    assert events.short(found) == "24 %"


@pytest.mark.parametrize(("rate", "text"), [(0.8349, "0.835"), (24.23, "24.2"), (1234.5, "1234")])
def test_a_rate_is_no_longer_than_it_has_to_be(rate: float, text: str) -> None:
    assert events.line(of(rate=rate))[1] == f"{text} steps/s"


@pytest.mark.parametrize(("behind", "told"), [(0, ""), (1, ""), (9, ""), (11, "slowest worker-1")])
def test_of_ranks_that_are_as_far_as_the_others_none_is_the_slowest(behind: int, told: str) -> None:
    tasks = {f"worker-{rank}": {"report": {"step": 1200 + behind * (1 - rank)}} for rank in range(2)}
    assert events.slowest(of(tasks)) == told


def test_before_the_jobs_speed_is_known_no_rank_is_behind() -> None:
    tasks = {f"worker-{rank}": {"report": {"step": 37 - 5 * rank}} for rank in range(2)}
    assert not of(tasks, step=32, rate=None).behind
