"""What all rules have in common: dtypes, shapes, slices, rows, names. Their formulas are in test_rules_steps.py."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrun_runtime.algo import rules
from distrun_runtime.algo.rules.rule import spread
from distrun_runtime.device.dtypes import BFLOAT16, narrow, parse, widen
from distrun_runtime.errors import KVError

STEPS = 7
SHAPE = (3, 5)
FLOATS = ("float16", "bfloat16", "float32", "float64")
Array = npt.NDArray[np.float64]


def gradients() -> list[Array]:
    random = np.random.default_rng(3)
    return [random.normal(size=SHAPE) for _ in range(STEPS)]


def start() -> Array:
    return np.random.default_rng(4).normal(size=SHAPE)


def ones(shape: tuple[int, ...], dtype: str, value: float = 1.0) -> npt.NDArray[Any]:
    if dtype == "bfloat16":
        return narrow(np.full(shape, value, np.float32), BFLOAT16)
    return np.full(shape, value, dtype)


# What makes a rule use all of its state and parameters; of those that are updated element by element.
FULL: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "wd": 0.1, "clip_gradient": 0.5},
    "nag": {"momentum": 0.9, "wd": 0.1},
    "adam": {"wd": 0.1},
    "adamw": {"wd": 0.1},
    "rmsprop": {"centered": True, "wd": 0.1, "clip_weights": 1.0},
    "adagrad": {"wd": 0.1},
    "ftrl": {"lamda1": 0.1, "wd": 0.1},
    "test": {"rescale_grad": 0.5},
}


@pytest.mark.parametrize("dtype", [*FLOATS, "int8", "int64", "uint8"])
def test_test_adds_the_rescaled_gradient(dtype: str) -> None:
    rule = rules.make("test", {"rescale": 2})
    weight = ones(SHAPE, dtype)
    state = rule.new_state(weight)
    for _ in range(3):
        rule.step(weight, ones(SHAPE, dtype, 3), state)
    assert np.array_equal(weight, ones(SHAPE, dtype, 19))


def test_integer_weights_wrap_around_under_test_and_need_a_whole_rescale() -> None:
    weight = np.array([5], np.uint8)
    rule = rules.make("test", {"rescale_grad": -1})
    rule.step(weight, np.array([6], np.uint8), rule.new_state(weight))
    assert weight.tolist() == [255]
    with pytest.raises(KVError, match=r"rescale_grad=0\.5 updates float weights, not uint8"):
        rules.make("test", {"rescale_grad": 0.5}).new_state(weight)


@pytest.mark.parametrize("name", sorted(set(rules.RULES) - {"test"}))
def test_all_other_rules_refuse_integer_weights(name: str) -> None:
    with pytest.raises(KVError, match="rule '%s' updates float weights, not int32" % name):
        rules.make(name, {}).new_state(np.zeros(2, np.int32))


@pytest.mark.parametrize("name", sorted(rules.RULES))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
@pytest.mark.parametrize("multi", [False, True])
def test_every_rule_keeps_the_dtype_of_scalars_and_empty_arrays(
    name: str, dtype: str, shape: tuple[int, ...], multi: bool
) -> None:
    fast = {"lars": {"lr": 500}, "test": {}}.get(name, {"lr": 0.5})  # so that 16 bits see it
    rule = rules.make(name, {**FULL.get(name, {}), **fast, "multi_precision": multi})
    weight = ones(shape, dtype)
    state = rule.new_state(weight)
    names = state.keys()
    for _ in range(2):
        rule.step(weight, ones(shape, dtype), state)
    assert (weight.shape, weight.dtype) == (shape, parse(dtype))
    assert state.keys() == names
    assert state["updates"] == 2
    for value in state.values():
        assert isinstance(value, int) or (value.shape, value.dtype) == (shape, widen(weight).dtype)
    if weight.size:
        assert widen(weight) != 1


@pytest.mark.parametrize("name", sorted(rules.RULES))
def test_every_rule_works_in_place_on_any_strides(name: str) -> None:
    whole, fortran = np.ones((6, 4), np.float32), np.ones((3, 4), np.float32, order="F")
    straight = np.ones((3, 4), np.float32)
    grad = np.arange(12, dtype=np.float32).reshape(4, 3).T
    rule = rules.make(name, FULL.get(name, {}))
    views = [whole[::2], fortran, straight]
    states = [rule.new_state(view) for view in views]
    for _ in range(3):
        for view, state in zip(views, states, strict=True):
            rule.step(view, grad if view is not straight else np.ascontiguousarray(grad), state)
    np.testing.assert_allclose(whole[::2], straight, rtol=1e-6)  # norms are summed in another order
    np.testing.assert_allclose(fortran, straight, rtol=1e-6)
    assert name in ("lamb", "lars") or np.array_equal(fortran, straight)
    assert np.array_equal(whole[1::2], np.ones((3, 4), np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", sorted(FULL))
@settings(max_examples=10, deadline=None)
@given(points=st.lists(st.integers(0, 15), max_size=4))
def test_slices_updated_apart_are_bit_for_bit_the_whole(name: str, dtype: str, points: list[int]) -> None:
    rule = rules.make(name, FULL[name])
    cuts = [slice(*pair) for pair in pairwise(sorted([0, 15, *points]))]
    whole = narrow(start().ravel().astype(widen(np.zeros(1, parse(dtype))).dtype), parse(dtype))
    sliced = whole.copy()
    state, states = rule.new_state(whole), [rule.new_state(sliced[cut]) for cut in cuts]
    for grad in gradients():
        given_ = grad.ravel().astype(widen(whole).dtype)
        rule.step(whole, given_, state)
        for cut, part in zip(cuts, states, strict=True):
            rule.step(sliced[cut], given_[cut], part)
    assert np.array_equal(whole, sliced)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("multi", [False, True])
@pytest.mark.parametrize("name", sorted(FULL))
def test_only_the_rows_of_a_sparse_gradient_are_updated(name: str, dtype: str, multi: bool) -> None:
    """As MXNet's lazy updates: other rows keep weight and state, neither decay nor momentum moves them."""
    rule = rules.make(name, {**FULL[name], "multi_precision": multi})
    weight, rows = ones((6, 5), dtype), np.array([4, 1, 2])
    alone = weight[rows]
    state, other = rule.new_state(weight), rule.new_state(alone)
    flat = {key: value.reshape(-1) if isinstance(value, np.ndarray) else value for key, value in state.items()}
    for number, grad in enumerate(gradients()):
        given_ = narrow(grad.astype(widen(weight).dtype), parse(dtype))
        rule.step(weight, given_, flat if number % 2 else state, rows=rows)
        state["updates"] = flat["updates"] = max(state["updates"], flat["updates"])
        rule.step(alone, given_, other)
    assert np.array_equal(weight[rows], alone)
    assert np.array_equal(weight[[0, 3, 5]], ones((3, 5), dtype))
    for key, value in state.items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(value[rows], other[key]), key
            assert key == "master" or not value[[0, 3, 5]].any(), key
    rule.step(weight, ones((0, 5), dtype), state, rows=np.array([], np.int64))
    assert np.array_equal(weight[rows], alone)


def test_without_lazy_update_other_rows_have_a_gradient_of_0() -> None:
    rule = rules.make("sgd", {"lr": 0.5, "wd": 0.5, "lazy_update": False})
    weight = np.ones((3, 1))
    rule.step(weight, np.ones((1, 1)), rule.new_state(weight), rows=np.array([1]))
    assert weight.tolist() == [[0.75], [0.25], [0.75]]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("multi", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adam", "lamb", "lars"])
def test_rows_that_step_the_whole_value_may_have_a_flat_state(name: str, dtype: str, multi: bool) -> None:
    """Stores keep it so. The momentum of rows did not fit the table, and every push of them failed."""
    more = {"lamb": {"lr": 0.5}, "lars": {"lr": 500, "momentum": 0.9}}.get(name, {"lazy_update": False})
    rule = rules.make(name, {**FULL.get(name, {}), **more, "multi_precision": multi})
    one, other = ones((6, 5), dtype), ones((6, 5), dtype)
    flat, state = rule.new_state(one.reshape(-1)), rule.new_state(other)
    rows = np.array([4, 1, 2])
    for grad in gradients():
        given_ = narrow(grad.astype(widen(one).dtype), parse(dtype))
        dense = spread(other, given_, rows)
        rule.step(one, given_, flat, rows=rows)
        rule.step(other, dense, state)
    assert np.array_equal(one, other)
    assert all(np.array_equal(flat[key], np.reshape(value, -1)) for key, value in state.items() if key != "updates")


def test_a_rule_may_put_another_array_into_the_state_of_rows() -> None:
    rule = rules.make("rules_of_users:Free", {"steps": [1.0], "lazy_update": False}, ["rules_of_users"])
    weight = np.zeros((3, 2))
    state = rule.new_state(weight.reshape(-1))
    rule.step(weight, np.full((1, 2), 7.0), state, rows=np.array([1]))
    assert isinstance(state["last"], np.ndarray)
    assert state["last"].tolist() == [0, 0, 7, 7, 0, 0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_float32_master_keeps_small_steps_of_half_precision(dtype: str) -> None:
    """As MXNet: 20 steps of 1e-4 on a float16 weight of 1.0 give 0.998 with multi_precision, and 1.0 without."""
    for multi, expected in ((True, 0.998), (False, 1.0)):
        rule = rules.make("sgd", {"learning_rate": 1e-4, "multi_precision": multi})
        weight = ones((3,), dtype)
        state = rule.new_state(weight)
        for _ in range(20):
            rule.step(weight, ones((3,), dtype), state)
        assert np.array_equal(weight, ones((3,), dtype, expected))


def test_a_weight_that_was_assigned_goes_on_from_there_with_a_master() -> None:
    rule, weight = rules.make("sgd", {"lr": 1.0, "multi_precision": True}), np.ones(2, np.float16)
    state = rule.new_state(weight)
    rule.step(weight, np.ones(2, np.float16), state)
    weight[:] = 5
    rules.renew_master(weight, state)
    rule.step(weight, np.ones(2, np.float16), state)
    assert weight.tolist() == [4, 4]
    rules.renew_master(weight, {"updates": 0})


@pytest.mark.parametrize(
    "params",
    [
        {"learning_rate": 0.1, "wd": 1e-4, "momentum": 0.9, "multi_precision": True},
        {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.0005, "rescale_grad": 1 / 64, "clip_gradient": 5},
        {"lr": 0.1, "rescale": 0.5},
    ],
)
def test_mxnets_parameter_names_and_the_short_ones_are_known(params: dict[str, Any]) -> None:
    assert rules.make("sgd", params).params["learning_rate"] == params.get("lr", params.get("learning_rate"))


def test_a_learning_rate_of_0_changes_no_weight() -> None:
    for name in set(rules.RULES) - {"test"}:
        rule, weight = rules.make(name, {**FULL.get(name, {}), "lr": 0}), np.full(3, 0.5)
        state = rule.new_state(weight)
        for _ in range(2):
            rule.step(weight, np.ones(3), state)
        assert weight.tolist() == [0.5] * 3, name


def test_adam_of_half_precision_does_not_divide_by_zero() -> None:
    rule = rules.make("adam", {})
    weight = np.ones(2, np.float16)
    rule.step(weight, np.array([0.0, 1e-4], np.float16), rule.new_state(weight))
    assert np.isfinite(weight).all()


@pytest.mark.parametrize("name", sorted(rules.RULES))
def test_overflow_gives_inf_or_nan_without_a_warning(name: str) -> None:
    rule = rules.make(name, {})
    weight = np.full(2, 6e4, np.float16)
    rule.step(weight, np.array([np.inf, 6e4], np.float16), rule.new_state(weight))


def test_the_name_is_taken_in_any_case_and_params_are_complete_json() -> None:
    rule = rules.make("SGD", {"lr": 1})
    assert rule.name == "sgd"
    assert json.loads(json.dumps(rule.params)) == rule.params
    assert rules.same(rule, rules.make("sgd", rule.params))
    assert rules.same(rule, rules.make("sgd", {"learning_rate": 1.0, "momentum": 0}))
    assert not rules.same(rule, rules.make("sgd", {"lr": 2}))
    assert not rules.same(rules.make("test", {}), rules.make("adam", {}))


def test_an_unknown_rule_lists_the_known_and_the_near_one() -> None:
    known = ", ".join(sorted(rules.RULES))
    with pytest.raises(KVError, match=r"unknown rule 'sdg' \(did you mean 'sgd'\?\); known are %s" % re.escape(known)):
        rules.make("sdg", {})
    with pytest.raises(KVError, match=r"given by name \(%s\), not as object" % re.escape(known)):
        rules.make(object(), {})  # type: ignore[arg-type]  # what an MXNet script would pass


def test_the_difference_of_two_rules_is_told_in_words() -> None:
    one = rules.make("sgd", {"lr": 0.5})
    assert rules.difference(one, rules.make("adam", {})) == "sgd, not adam"
    assert rules.difference(one, rules.make("sgd", {"lr": 0.25})) == "sgd with learning_rate=0.5, not 0.25"


def test_a_replaced_rule_goes_on_with_the_state_both_know() -> None:
    weight = np.ones(2)
    old = rules.make("sgd", {"lr": 0.1, "momentum": 0.9})
    state = old.new_state(weight)
    old.step(weight, np.ones(2), state)
    new = rules.make("sgd", {"lr": 0.01, "momentum": 0.9})
    carried = rules.carry_state(new, weight, state)
    assert carried["momentum"] is state["momentum"]
    assert rules.carry_state(rules.make("adam", {}), weight, state).keys() == {"updates", "mean", "variance"}
    assert rules.carry_state(rules.make("sgd", {}), weight, state) == {"updates": 1}
