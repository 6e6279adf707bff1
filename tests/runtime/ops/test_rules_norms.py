"""Rules in two phases: a value in slices is updated as the whole one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrun_runtime.arrays.dtypes import BFLOAT16, narrow
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops.optimizers import Knobs, NormRule
from distrun_runtime.ops.schedules import MultiFactor

SIZE, STEPS = 40, 4
RULES: list[tuple[str, dict[str, Any]]] = [
    ("lamb", {"lr": 0.1, "wd": 0.1, "clip_gradient": 1.0, "rescale_grad": 0.5}),
    ("lamb", {"lr": 0.1, "bias_correction": False, "lower_bound": 0.5, "upper_bound": 8.0}),
    ("lars", {"lr": 0.5, "eta": 0.1, "momentum": 0.9, "wd": 0.1}),
    ("lars", {"lr": 0.5, "eta": 0.1}),
]


def norm_rule(name: str, params: dict[str, Any]) -> NormRule:
    rule = rules.make(name, params)
    assert isinstance(rule, NormRule)
    assert rule.needs_norms
    return rule


def start() -> Any:
    return np.random.default_rng(1).normal(size=SIZE)


def gradients() -> Any:
    return np.random.default_rng(2).normal(size=(STEPS, SIZE))


def in_slices(rule: NormRule, weight: Any, cuts: list[slice], knobs: Knobs = rules.PLAIN) -> None:
    states = [rule.new_state(weight[cut]) for cut in cuts]
    for grad in gradients().astype(weight.dtype if weight.dtype != BFLOAT16 else "f4"):
        ready = [rule.prepare(weight[cut], grad[cut], state, knobs) for cut, state in zip(cuts, states, strict=True)]
        totals = tuple(map(sum, zip(*(one.squares for one in ready), strict=True)))
        for cut, one, state in zip(cuts, ready, states, strict=True):
            rule.finish(weight[cut], one, totals, state, knobs)


def as_whole(rule: NormRule, weight: Any, knobs: Knobs = rules.PLAIN) -> None:
    state = rule.new_state(weight)
    for grad in gradients().astype(weight.dtype if weight.dtype != BFLOAT16 else "f4"):
        rule.step(weight, grad, state, knobs)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "params"), RULES)
@settings(max_examples=25, deadline=None)
@given(points=st.lists(st.integers(0, SIZE), max_size=5))
def test_a_value_in_any_slices_is_updated_as_the_whole_one(
    name: str, params: dict[str, Any], dtype: str, points: list[int]
) -> None:
    """To a few units in the last place: the sums of squares differ by the order of addition only."""
    rule = norm_rule(name, params)
    whole, sliced = start().astype(dtype), start().astype(dtype)
    as_whole(rule, whole)
    in_slices(rule, sliced, [slice(*pair) for pair in pairwise(sorted([0, SIZE, *points]))])
    np.testing.assert_allclose(sliced, whole, rtol=8 * np.finfo(dtype).eps, atol=8 * np.finfo(dtype).eps)


@pytest.mark.parametrize("multi", [False, True])
@pytest.mark.parametrize(("name", "params"), RULES)
def test_slices_of_half_precision_have_masters_of_their_own(name: str, params: dict[str, Any], multi: bool) -> None:
    rule = norm_rule(name, {**params, "multi_precision": multi})
    whole, sliced = narrow(start().astype("f4"), BFLOAT16), narrow(start().astype("f4"), BFLOAT16)
    as_whole(rule, whole)
    in_slices(rule, sliced, [slice(0, 11), slice(11, SIZE)])
    assert np.array_equal(whole, sliced)


@pytest.mark.parametrize(("name", "params"), RULES)
def test_preparing_does_not_touch_the_weight_and_counts_the_update(name: str, params: dict[str, Any]) -> None:
    rule, weight = norm_rule(name, params), start()
    state = rule.new_state(weight)
    prepared = rule.prepare(weight, gradients()[0], state)
    assert np.array_equal(weight, start())
    assert (state["updates"], prepared.rates.updates) == (1, 1)
    assert prepared.squares[0] == pytest.approx(float(weight @ weight), rel=1e-14)
    assert prepared.direction.shape == weight.shape


def test_squares_are_summed_in_float64() -> None:
    """In float32, 2**24 ones and one more are 2**24."""
    weight = np.ones(2**20, np.float32)
    weight[0] = 2.0**12
    rule = norm_rule("lars", {})
    assert rule.prepare(weight, weight, rule.new_state(weight)).squares == (2.0**24 + 2**20 - 1,) * 2


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_an_update_between_the_phases_keeps_the_rate_of_its_own_preparation(name: str) -> None:
    """In dist_async the totals of one update may arrive after the next one was prepared."""
    rule, weight = norm_rule(name, {"lr_scheduler": MultiFactor([1], 0.0, 1.0)}), start()
    state = rule.new_state(weight)
    first, second = (rule.prepare(weight, grad, state) for grad in gradients()[:2])
    rule.finish(weight, second, second.squares, state)
    assert np.array_equal(weight, start())
    rule.finish(weight, first, first.squares, state)
    assert not np.array_equal(weight, start())


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_rows_that_a_sparse_gradient_lacks_have_a_gradient_of_0(name: str) -> None:
    rule = norm_rule(name, {"wd": 0.1, "lr": 0.1})
    one, other = start().reshape(10, 4), start().reshape(10, 4)
    state, same = rule.new_state(one), rule.new_state(other)
    rows = np.array([1, 7])
    for grad in gradients().reshape(STEPS, 10, 4):
        dense = np.zeros_like(grad)
        dense[rows] = grad[rows]
        rule.step(one, grad[rows], state, rows=rows)
        rule.step(other, dense, same)
    assert np.array_equal(one, other)


def test_norms_of_0_leave_the_learning_rate_as_it_is() -> None:
    for name, expected in (("lars", -0.5), ("lamb", -0.5)):
        weight = np.zeros(3)
        rule = norm_rule(name, {"lr": 0.5, **({"epsilon": 0} if name == "lamb" else {})})
        rule.step(weight, np.ones(3), rule.new_state(weight))
        np.testing.assert_allclose(weight, expected, rtol=1e-15, err_msg=name)
        still = np.ones(3)
        rule.step(still, np.zeros(3), rule.new_state(still))
        assert name == "lamb" or still.tolist() == [1.0] * 3


def test_lars_does_not_scale_biases_and_normalisations_of_str_keys() -> None:
    rule = norm_rule("lars", {"lr": 0.5})
    for key, is_scaled in (("fc_weight", True), ("fc_bias", False), ("bn_gamma", False), ("bn_beta", False), (3, True)):
        weight = np.ones(2)
        rule.step(weight, np.ones(2), rule.new_state(weight), Knobs(key=key))
        assert (weight[0] != 0.5) == is_scaled, key


def test_lars_corrects_its_momentum_when_the_learning_rate_changes() -> None:
    """v = 0.9 v (new rate / old rate) - rate g, from Goyal et al.; without the correction v = 0.9 v - rate g."""
    schedule = {"type": "multifactor", "step": [1], "factor": 0.1, "base_lr": 1.0}
    for is_corrected, factor in ((True, 0.1), (False, 1.0)):
        rule = norm_rule("lars", {"lr_scheduler": schedule, "momentum": 0.9, "momentum_correction": is_corrected})
        weight = np.zeros(1)  # no norm, so that the rate is not scaled
        state = rule.new_state(weight)
        rule.step(weight, np.ones(1), state, Knobs(key="bias"))
        assert weight == [-1.0]
        rule.step(weight, np.ones(1), state, Knobs(key="bias"))
        np.testing.assert_allclose(weight, [-1.0 - 0.9 * factor - 0.1], rtol=1e-15)


def test_an_overflow_of_norms_does_not_warn_or_raise() -> None:
    for name in ("lamb", "lars"):
        rule, weight = norm_rule(name, {}), np.full(3, 1e200)
        rule.step(weight, np.full(3, 1e200), rule.new_state(weight))
