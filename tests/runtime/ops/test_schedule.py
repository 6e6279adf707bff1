"""Each schedule against a table written out by hand, from MXNet's formulas."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import pytest

from distrun_runtime.errors import KVError
from distrun_runtime.ops import schedules as schedule
from distrun_runtime.ops.schedules import Constant, Cosine, Factor, MultiFactor, Poly, Schedule

HALF = math.sqrt(0.5)
TABLES: list[tuple[Schedule, dict[int, float]]] = [
    (Constant(0.3), {0: 0.3, 1: 0.3, 1000: 0.3}),
    (Constant(0.3, warmup_steps=3, warmup_begin_lr=0.2, warmup_mode="constant"), {1: 0.2, 2: 0.2, 3: 0.3, 4: 0.3}),
    (Factor(2, 0.5, base_lr=0.8), {0: 0.8, 1: 0.8, 2: 0.8, 3: 0.4, 4: 0.4, 5: 0.2, 6: 0.2, 7: 0.1}),
    (Factor(1, 0.5, 0.15, 0.8), {1: 0.8, 2: 0.4, 3: 0.2, 4: 0.15, 5: 0.15, 10**9: 0.15}),
    (Factor(100), {1: 0.01, 100: 0.01, 101: 0.01}),
    # The updates of the warm-up count for the drops.
    (Factor(2, 0.5, base_lr=0.8, warmup_steps=4), {1: 0.2, 2: 0.4, 3: 0.6, 4: 0.4, 5: 0.2}),
    (MultiFactor([2, 5], 0.1, 0.5), {1: 0.5, 2: 0.5, 3: 0.05, 5: 0.05, 6: 0.005, 99: 0.005}),
    (MultiFactor([2], 0.1, 0.5, 4, 0.1), {1: 0.2, 2: 0.3, 3: 0.4, 4: 0.05, 5: 0.05}),
    (Poly(4, 0.8), {0: 0.8, 1: 0.8 * 0.75**2, 2: 0.2, 3: 0.05, 4: 0.0, 5: 0.0}),
    (Poly(6, 0.9, 1, 0.1, 2, 0.5), {1: 0.7, 2: 0.9, 3: 0.7, 4: 0.5, 5: 0.3, 6: 0.1, 7: 0.1, 99: 0.1}),
    (Cosine(4, 1.0), {0: 1.0, 1: (1 + HALF) / 2, 2: 0.5, 3: (1 - HALF) / 2, 4: 0.0, 5: 0.0}),
    (Cosine(6, 0.9, 0.1, 2), {1: 0.45, 2: 0.9, 3: 0.5 + 0.4 * HALF, 4: 0.5, 5: 0.5 - 0.4 * HALF, 6: 0.1, 9: 0.1}),
]


@pytest.mark.parametrize(("given", "table"), TABLES)
def test_the_rate_of_every_update_is_that_of_the_table(given: Schedule, table: Mapping[int, float]) -> None:
    assert {update: given(update) for update in table} == pytest.approx(table, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("given", [given for given, _ in TABLES])
def test_a_schedule_is_the_same_after_its_way_through_json(given: Schedule) -> None:
    assert schedule.from_json(json.loads(json.dumps(given.to_json()))) == given
    assert schedule.read(given.to_json()) == given
    assert schedule.read(given) is given


def test_a_schedule_may_be_asked_for_any_update_in_any_order() -> None:
    """MXNet's remember where they were: loading an older state left them at the later rate."""
    one = Factor(2, 0.5, base_lr=0.8)
    assert [one(7), one(1), one(3), one(1)] == [0.1, 0.8, 0.4, 0.8]


def test_mxnets_names_and_positions_of_arguments_work() -> None:
    assert schedule.FactorScheduler(10, 0.5, 1e-4, 0.3, 5, 0.1, "constant") == Factor(
        step=10,
        factor=0.5,
        stop_factor_lr=1e-4,
        base_lr=0.3,
        warmup_steps=5,
        warmup_begin_lr=0.1,
        warmup_mode="constant",
    )
    assert schedule.MultiFactorScheduler([1, 2], 0.5, 0.3).base_lr == 0.3
    assert schedule.PolyScheduler(10, 0.3, 2, 0.1).final_lr == 0.1
    assert schedule.CosineScheduler(10, 0.3, 0.1).final_lr == 0.1


def test_another_base_is_the_whole_schedules() -> None:
    other = Poly(4, 0.8, warmup_steps=2).with_base(0.4)
    assert [other(1), other(2), other(3)] == [0.2, 0.4, 0.1]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "unknown type of schedule None; known are constant, cosine, factor, multifactor, poly"),
        ({"type": "cosin"}, r"unknown type of schedule 'cosin' \(did you mean 'cosine'\?\)"),
        ({"type": "factor"}, "schedule 'factor' needs step"),
        (
            {"type": "factor", "step": 1, "facto": 1},
            r"has no argument 'facto' \(did you mean 'factor'\?\); it has step, ",
        ),
        ({"type": "factor", "step": 0}, "schedule 'factor': step=0: expected a whole number, at least 1"),
        ({"type": "factor", "step": 1.5}, "step=1.5: expected a whole number"),
        ({"type": "factor", "step": True}, "step=True: expected a whole number"),
        ({"type": "factor", "step": 1, "factor": 1.5}, "factor=1.5: expected a finite number at least 0 and at most 1"),
        ({"type": "multifactor", "step": []}, r"step=\[\]: expected a list of whole numbers"),
        ({"type": "multifactor", "step": 3}, "step=3: expected a list of whole numbers"),
        ({"type": "multifactor", "step": "12"}, "step='12': expected a list of whole numbers"),
        ({"type": "multifactor", "step": [2, 2]}, r"step=\[2, 2\]: expected ascending numbers, each at least 1"),
        ({"type": "multifactor", "step": [0, 2]}, "expected ascending numbers, each at least 1"),
        ({"type": "poly", "max_update": 3, "warmup_steps": 3}, "max_update=3: expected a whole number, at least 4"),
        ({"type": "poly", "max_update": 3, "pwr": "2"}, "pwr='2': expected a finite number at least 0"),
        ({"type": "cosine", "max_update": 3, "final_lr": math.nan}, "final_lr=nan: expected a finite number"),
        ({"type": "constant", "base_lr": None}, "base_lr=None: expected a finite number at least 0"),
        ({"type": "constant", "warmup_begin_lr": 1}, "warmup_begin_lr=1.0: expected at most base_lr, which is 0.01"),
        ({"type": "constant", "warmup_steps": -1}, "warmup_steps=-1: expected a whole number, at least 0"),
        ({"type": "constant", "warmup_mode": "fast"}, "warmup_mode='fast': expected 'linear' or 'constant'"),
        (
            0.1,
            r"lr_scheduler=0.1: expected a schedule such as Factor\(step=100, factor=0.5\), its JSON object, or None",
        ),
    ],
)
def test_a_wrong_argument_says_what_would_be_right(value: object, words: str) -> None:
    with pytest.raises(KVError, match=words):
        schedule.read(value)
