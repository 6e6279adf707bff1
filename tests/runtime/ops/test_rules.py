"""What all rules have in common: dtypes, shapes, slices, rows, names. Their formulas are in test_rules_steps.py."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrun_runtime.arrays.dtypes import BFLOAT16, narrow, parse, widen
from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops.optimizers.base import spread

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
    "torch_sgd": {"momentum": 0.9, "dampening": 0.5, "wd": 0.1},
    "torch_adam": {"amsgrad": True, "wd": 0.1},
    "torch_rmsprop": {"centered": True, "momentum": 0.9, "wd": 0.1},
    "adam": {"wd": 0.1},
    "adamw": {"wd": 0.1},
    "rmsprop": {"centered": True, "wd": 0.1, "clip_weights": 1.0},
    "adagrad": {"wd": 0.1},
    "ftrl": {"lamda1": 0.1, "wd": 0.1},
    "signum": {"wd": 0.1, "wd_lh": 0.1, "clip_gradient": 0.5},
    "dcasgd": {"momentum": 0.9, "wd": 0.1, "lamda": 0.5},
    "sgld": {"wd": 0.1, "seed": 7},
    "torch_adamw": {"amsgrad": True, "wd": 0.1},
    "adamax": {"wd": 0.1},
    "nadam": {"wd": 0.1},
    "adadelta": {"wd": 0.1},
    "ftml": {"wd": 0.1},
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
            rule.step(sliced[cut], given_[cut], part, rules.Knobs(offset=cut.start))
    assert np.array_equal(whole, sliced)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("multi", [False, True])
@pytest.mark.parametrize("name", sorted(set(FULL) - {"sgld"}))  # its noise depends on the place
def test_only_the_rows_of_a_sparse_gradient_are_updated(name: str, dtype: str, multi: bool) -> None:
    """As MXNet's lazy updates: other rows keep weight and state, neither decay nor momentum moves them."""
    rule = rules.make(name, {**FULL[name], "multi_precision": multi})
    weight, rows = ones((6, 5), dtype), np.array([4, 1, 2])
    alone = weight[rows]
    state, other = rule.new_state(weight), rule.new_state(alone)
    first = rule.new_state(weight)
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
            assert np.array_equal(value[[0, 3, 5]], first[key][[0, 3, 5]]), key
    rule.step(weight, ones((0, 5), dtype), state, rows=np.array([], np.int64))
    assert np.array_equal(weight[rows], alone)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("multi", [False, True])
def test_rows_under_sgld_get_the_noise_that_they_have_in_a_whole_update(dtype: str, multi: bool) -> None:
    rule = rules.make("sgld", {"lr": 0.5, "multi_precision": multi})
    table, whole, rows = ones((6, 5), dtype), ones((6, 5), dtype), np.array([4, 1, 2])
    state, other = rule.new_state(table.reshape(-1)), rule.new_state(whole)
    for grad in gradients():
        given_ = narrow(grad.astype(widen(table).dtype), parse(dtype))
        rule.step(table, given_, state, rules.Knobs(key="w", offset=30), rows=rows)
        rule.step(whole, spread(whole, given_, rows), other, rules.Knobs(key="w", offset=30))
    assert np.array_equal(table[rows], whole[rows])
    assert np.array_equal(table[[0, 3, 5]], ones((3, 5), dtype))
    assert (widen(whole[[0, 3, 5]]) != 1).any()


def drawn(size: int = 100000, **changes: Any) -> Array:
    """Return the noise of one update under sgld with a learning rate of 1."""
    key, offset, updates = changes.pop("key", "w"), changes.pop("offset", 0), changes.pop("updates", 0)
    rule, weight = rules.make("sgld", {"lr": 1.0, **changes}), np.zeros(size)
    rule.step(weight, np.zeros(size), {"updates": updates}, rules.Knobs(key=key, offset=offset))
    return weight


def test_the_noise_of_sgld_is_standard_normal_and_its_places_are_independent() -> None:
    noise = drawn()
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02
    for bound, share in ((1, 0.6827), (2, 0.9545), (3, 0.9973)):
        assert abs((np.abs(noise) < bound).mean() - share) < 0.006
    for distance in (1, 2, 64):
        assert abs((noise[distance:] * noise[:-distance]).mean()) < 0.02


@pytest.mark.parametrize("change", [{"seed": 1}, {"key": "v"}, {"key": 0}, {"updates": 1}, {"offset": 1 << 40}])
def test_the_noise_of_sgld_is_another_one_for_another_seed_key_update_and_place(change: dict[str, Any]) -> None:
    one, other = drawn(), drawn(**change)
    assert not (one == other).any()
    assert abs((one * other).mean()) < 0.02
    assert np.array_equal(drawn(**change), other)


@pytest.mark.parametrize("seed", [-1, 0.5, 2**63, True, "1", None, float("nan")])
def test_a_seed_that_is_no_whole_number_is_refused(seed: object) -> None:
    with pytest.raises(KVError, match=r"rule 'sgld': seed=.*: expected a whole number from 0 to 2\*\*63 - 1"):
        rules.make("sgld", {"seed": seed})


def test_adamax_takes_a_gradient_that_is_0_from_the_first_step() -> None:
    """In MXNet 0 was divided by 0, and the weight was NaN for ever."""
    for eps in (0.0, 1e-8):
        rule, weight = rules.make("adamax", {"lr": 0.5, "eps": eps}), np.ones(2)
        state = rule.new_state(weight)
        for _ in range(2):
            rule.step(weight, np.array([0.0, 1.0]), state)
        np.testing.assert_allclose(weight, [1, 0], rtol=0, atol=1e-7)


def test_a_step_far_in_a_training_is_made_by_a_rule_that_was_just_loaded() -> None:
    rule, weight = rules.make("nadam", {"lr": 0.5, "beta1": 0.999, "schedule_decay": 50.0}), np.ones(2)
    rule.step(weight, np.ones(2), {**rule.new_state(weight), "updates": 10**9})
    assert np.isfinite(weight).all()
    assert (weight != 1).all()


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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_weight_that_was_assigned_as_it_was_keeps_what_small_steps_have_added_up(dtype: Any) -> None:
    rule, weight = rules.make("sgd", {"lr": 1e-3, "multi_precision": True}), ones((2,), dtype)
    state = rule.new_state(weight)
    for number in range(8):
        rule.step(weight, ones((2,), dtype), state)
        weight[0] = ones((1,), dtype, number)[0]
        rules.renew_master(weight, state)
    master = state["master"]
    assert isinstance(master, np.ndarray)
    np.testing.assert_allclose(master, [7.0, 0.992], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "given_", "expected"),
    [
        ("adam", {"betas": (0.5, 0.25), "eps": 1e-3}, {"beta1": 0.5, "beta2": 0.25, "epsilon": 1e-3}),
        ("adamw", {"betas": [0.5, np.float32(0.25)], "weight_decay": 0.1}, {"beta1": 0.5, "beta2": 0.25, "wd": 0.1}),
        ("lamb", {"betas": (0.5, 0.25), "lr": 1, "eps": 2}, {"beta1": 0.5, "learning_rate": 1.0, "epsilon": 2.0}),
        ("rmsprop", {"eps": 0.5, "rho": 0.5}, {"epsilon": 0.5, "gamma1": 0.5}),
        ("adagrad", {"epsilon": 0.5}, {"eps": 0.5}),
        ("sgd", {"weight_decay": 1}, {"wd": 1.0}),
        ("nadam", {"momentum_decay": 1}, {"schedule_decay": 1.0}),
        ("torch_rmsprop", {"gamma1": 0.5, "gamma2": 0.5}, {"alpha": 0.5, "momentum": 0.5}),
    ],
)
def test_torchs_names_of_parameters_are_understood(name: str, given_: dict[str, Any], expected: dict[str, Any]) -> None:
    found = rules.make(name, given_).params
    assert {word: found[word] for word in expected} == expected
    assert rules.make(name, expected).params.keys() == found.keys()
    spec = rules.RuleSpec.of(name, {})
    assert (
        spec.changed(json.loads(json.dumps(rules.change_of(given_)))).params == rules.RuleSpec.of(name, given_).params
    )


@pytest.mark.parametrize("name", sorted(set(rules.RULES) - {"test"}))
def test_every_rule_but_test_understands_weight_decay_and_lr(name: str) -> None:
    found = rules.make(name, {"weight_decay": 0.25, "lr": 0.5}).params
    assert (found["wd"], found["learning_rate"]) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"wd": 0, "weight_decay": 0}, "rule 'adam': wd and weight_decay are one parameter; give one"),
        ({"betas": (0.5, 0.5), "beta2": 0.5}, "rule 'adam': betas and beta2 are one parameter; give one"),
        ({"beta1": 0.5, "betas": (0.5, 0.5)}, "rule 'adam': beta1 and betas are one parameter; give one"),
        ({"eps": 0, "epsilon": 0}, "eps and epsilon are one parameter"),
        ({"lr": 0, "learning_rate": 0}, "lr and learning_rate are one parameter"),
        ({"betas": 0.5}, r"betas=0.5: expected a pair of numbers, such as \(0.9, 0.999\)"),
        ({"betas": (0.5,)}, r"betas=\(0.5,\): expected a pair of numbers"),
        ({"betas": (0.5, 1.0)}, "beta2=1.0: expected a finite number at least 0 and below 1"),
        ({"beta": (0.5, 1.0)}, r"no parameter 'beta' \(did you mean 'beta[s12]'\?\); it has beta1, beta2, betas, "),
    ],
)
def test_a_parameter_that_is_given_by_two_names_is_refused(given_: dict[str, Any], words: str) -> None:
    with pytest.raises(KVError, match=words):
        rules.make("adam", given_)


def test_a_rule_without_two_betas_has_no_betas() -> None:
    with pytest.raises(KVError, match="rule 'sgd' has no parameter 'betas'"):
        rules.make("sgd", {"betas": (0.9, 0.999)})


@pytest.mark.parametrize("params", [{}, {"momentum": 0.9, "dampening": 0.5}])
def test_nesterov_without_momentum_or_with_dampening_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(KVError, match="rule 'torch_sgd': nesterov=True needs a momentum above 0 and dampening=0, not "):
        rules.make("torch_sgd", {"nesterov": True, **params})


def test_parameters_that_only_torchs_rule_has_are_refused_with_its_name() -> None:
    with pytest.raises(KVError, match=r"'sgd' has no parameter 'nesterov'.* fix: use 'torch_sgd', which has torch's"):
        rules.RuleSpec.of("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True})
    with pytest.raises(KVError, match=r"weight_decay$"):
        rules.RuleSpec.of("sgd", {"nesterov": 7})


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
