"""Each rule against the same formula written out in float64."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pytest

from distrun_runtime.algo import rules
from distrun_runtime.errors import KVError

STEPS = 7
SHAPE = (3, 5)
# Relative to float64: a few roundings a step.
TOLERANCE = {"float16": 2e-2, "float32": 1e-5, "float64": 1e-12}
Array = npt.NDArray[np.float64]


def gradients() -> list[Array]:
    random = np.random.default_rng(3)
    return [random.normal(size=SHAPE) for _ in range(STEPS)]


def start() -> Array:
    return np.random.default_rng(4).normal(size=SHAPE)


def run(rule: rules.Rule, dtype: str) -> npt.NDArray[np.float64]:
    weight = start().astype(dtype)
    state = rule.new_state(weight)
    for grad in gradients():
        given = grad.astype(dtype)
        before = given.copy()
        rule.step(weight, given, state)
        assert np.array_equal(given, before)
    assert weight.dtype == np.dtype(dtype)
    return weight.astype(np.float64)


def sgd_by_hand(lr: float, mu: float = 0.0, wd: float = 0.0, rescale: float = 1.0, clip: float = np.inf) -> Array:
    w, v = start(), np.zeros(SHAPE)
    for g in gradients():
        v = mu * v - lr * (np.clip(rescale * g, -clip, clip) + wd * w)
        w = w + v
    return w


def adam_by_hand(
    lr: float = 0.001, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, wd: float = 0.0, clip: float = np.inf
) -> Array:
    w, m, v = start(), np.zeros(SHAPE), np.zeros(SHAPE)
    for t, raw in enumerate(gradients(), 1):
        g = np.clip(raw + wd * w, -clip, clip)
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        w = w - lr * np.sqrt(1 - b2**t) / (1 - b1**t) * m / (np.sqrt(v) + eps)
    return w


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, sgd_by_hand(0.01)),
        ({"lr": 0.5}, sgd_by_hand(0.5)),
        ({"learning_rate": 0.1, "momentum": 0.9}, sgd_by_hand(0.1, mu=0.9)),
        ({"lr": 0.1, "momentum": 0.9, "wd": 0.01}, sgd_by_hand(0.1, mu=0.9, wd=0.01)),
        (
            {"lr": 0.1, "wd": 0.3, "rescale_grad": 0.25, "clip_gradient": 0.2},
            sgd_by_hand(0.1, wd=0.3, rescale=0.25, clip=0.2),
        ),
    ],
)
def test_sgd_is_mxnets_sgd(params: Mapping[str, object], expected: Array, dtype: str) -> None:
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(run(rules.make("sgd", params), dtype), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, adam_by_hand()),
        ({"lr": 0.1, "beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3}, adam_by_hand(0.1, 0.5, 0.9, 1e-3)),
        ({"lr": 0.1, "wd": 0.5, "clip_gradient": 0.7}, adam_by_hand(0.1, wd=0.5, clip=0.7)),
    ],
)
def test_adam_is_mxnets_adam(params: Mapping[str, object], expected: Array, dtype: str) -> None:
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(run(rules.make("adam", params), dtype), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [*TOLERANCE, "int8", "int64", "uint8"])
def test_test_adds_the_rescaled_gradient(dtype: str) -> None:
    rule = rules.make("test", {"rescale": 2})
    weight = np.ones(SHAPE, dtype)
    state = rule.new_state(weight)
    for _ in range(3):
        rule.step(weight, np.full(SHAPE, 3, dtype), state)
    assert np.array_equal(weight, np.full(SHAPE, 19, dtype))


def test_integer_weights_wrap_around_under_test_and_need_a_whole_rescale() -> None:
    weight = np.array([5], np.uint8)
    rule = rules.make("test", {"rescale_grad": -1})
    rule.step(weight, np.array([6], np.uint8), rule.new_state(weight))
    assert weight.tolist() == [255]
    with pytest.raises(KVError, match=r"rescale_grad=0\.5 updates float weights, not uint8"):
        rules.make("test", {"rescale_grad": 0.5}).new_state(weight)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_sgd_and_adam_refuse_integer_weights(name: str) -> None:
    with pytest.raises(KVError, match="rule '%s' updates float weights, not int32" % name):
        rules.make(name, {}).new_state(np.zeros(2, np.int32))


@pytest.mark.parametrize("name", sorted(rules.RULES))
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_every_rule_keeps_the_dtype_of_scalars_and_empty_arrays(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    rule = rules.make(name, {})
    weight = np.ones(shape, dtype)
    state = rule.new_state(weight)
    for _ in range(2):
        rule.step(weight, np.ones(shape, dtype), state)
    assert (weight.shape, weight.dtype) == (shape, np.dtype(dtype))
    assert all(isinstance(value, (np.ndarray, int)) for value in state.values())
    if weight.size:
        assert weight != 1


@pytest.mark.parametrize("name", sorted(rules.RULES))
def test_every_rule_works_in_place_on_any_strides(name: str) -> None:
    whole = np.ones((6, 4), np.float32)
    straight = np.ones((3, 4), np.float32)
    grad = np.arange(12, dtype=np.float32).reshape(4, 3).T
    rule = rules.make(name, {})
    views = whole[::2]
    state, other = rule.new_state(views), rule.new_state(straight)
    for _ in range(3):
        rule.step(views, grad, state)
        rule.step(straight, np.ascontiguousarray(grad), other)
    assert np.array_equal(views, straight)
    assert np.array_equal(whole[1::2], np.ones((3, 4), np.float32))


@pytest.mark.parametrize("params", [{"lr": 0.1, "momentum": 0.9, "wd": 0.1}, {"lr": 0.1}])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_slices_updated_apart_equal_the_whole(name: str, params: dict[str, object]) -> None:
    if name == "adam":
        params = {k: v for k, v in params.items() if k != "momentum"}
    rule = rules.make(name, params)
    whole, sliced = start().ravel(), start().ravel()
    cuts = [slice(0, 4), slice(4, 15)]
    state, states = rule.new_state(whole), [rule.new_state(sliced[cut]) for cut in cuts]
    for grad in gradients():
        rule.step(whole, grad.ravel(), state)
        for cut, part in zip(cuts, states, strict=True):
            rule.step(sliced[cut], grad.ravel()[cut], part)
    assert np.array_equal(whole, sliced)


def test_a_float32_master_keeps_small_steps_of_half_precision() -> None:
    """As MXNet: 20 steps of 1e-4 on a float16 weight of 1.0 give 0.998 with multi_precision, and 1.0 without."""
    for multi, expected in ((True, 0.998), (False, 1.0)):
        rule = rules.make("sgd", {"lr": 1e-4, "multi_precision": multi})
        weight = np.ones(3, np.float16)
        state = rule.new_state(weight)
        for _ in range(20):
            rule.step(weight, np.ones(3, np.float16), state)
        assert weight.tolist() == [float(np.float16(expected))] * 3


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
    assert rules.carry_state(rules.make("adam", {}), weight, state).keys() == {"mean", "variance", "t"}
    assert rules.carry_state(rules.make("sgd", {}), weight, state) == {}


def test_a_users_own_rule_derives_from_rule() -> None:
    class Sign(rules.Rule):
        name = "sign"
        table = (rules.RESCALE,)

        def _start(self, work: rules.Array) -> rules.State:
            return {}

        def _update(self, work: rules.Array, grad: rules.Array, state: rules.State) -> None:
            work -= np.sign(grad)

    rule = rules.make("sign", {}, {**rules.RULES, "sign": Sign})
    weight = np.zeros(2, np.float16)
    rule.step(weight, np.array([3, -3], np.float16), rule.new_state(weight))
    assert weight.tolist() == [-1, 1]
