"""Values of a store in one process: keys that are updated together have the bytes of steps key by key."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distrun_runtime import kvstore
from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array, narrow, widen
from distrun_runtime.ops import fuse, update
from distrun_runtime.ops.optimizers import RULES, Knobs, make
from distrun_runtime.ps import arithmetic
from distrun_runtime.store import local, weights

SIZES = (1, 3, 0, 40, 7, 100, 100, 2, 65)
DTYPES = ("float32", "float16", "bfloat16", "float64")
RULES_OF_CALLS: list[tuple[str, dict[str, Any]]] = [
    *(("sgd", {"lr": 0.1, "momentum": 0.9}), ("sgd", {"lr": 0.2, "momentum": 0.9}), ("sgd", {"lr": 0.1})),
    *(("adam", {"lr": 0.1, "multi_precision": True}), ("lamb", {"lr": 0.1}), ("sgld", {"lr": 0.1})),
    ("rules_of_users:Sign", {"learning_rate": 0.25}),
]


def values(size: int, dtype: str, seed: int) -> Array:
    kind = dtypes.parse(dtype)
    return narrow(np.random.default_rng(seed).normal(size=size).astype(dtypes.work_dtype(kind)), kind)


class ByKey:
    """The same, one key at a time."""

    def __init__(self, first: dict[int, Array]) -> None:
        self.weights = {key: value.copy() for key, value in first.items()}
        self.states: dict[int, Any] = {}
        self.rule: Any = None
        self.multipliers: dict[int, float] = {}

    def set_rule(self, name: str, params: dict[str, Any]) -> None:
        rule = make(name, params, None)
        for key, state in self.states.items():
            fresh = rule.new_state(self.weights[key])
            self.states[key] = {part: state.get(part, value) for part, value in fresh.items()}
        self.rule = rule

    def push(self, key: int, parts: list[Array], scale: float) -> None:
        weight, total = self.weights[key], widen(parts[0])
        for part in parts[1:]:
            total = total + widen(part)
        total = total if scale == 1 else total * total.dtype.type(scale)
        if self.rule is None:
            weight[...] = narrow(total, weight.dtype)
            return
        state = self.states.setdefault(key, self.rule.new_state(weight))
        self.rule.step(weight, total, state, Knobs(self.multipliers.get(key, 1.0), key=key))


PUSH = st.tuples(
    st.just("push"),
    st.sampled_from([tuple(range(9)), (3, 4), (3,), (8, 5, 2, 1), (4, 6)]),
    st.integers(1, 3),
    st.sampled_from([1.0, 0.3]),
)
RULE = st.tuples(st.just("rule"), st.integers(0, len(RULES_OF_CALLS) - 1), st.none(), st.none())
CHANGE = st.one_of(
    RULE,
    st.tuples(st.just("multiplier"), st.sampled_from([1, 3, 4]), st.sampled_from([0.5, 1.0]), st.none()),
    st.tuples(st.just("assign"), st.sampled_from([1, 3, 4]), st.none(), st.none()),
)
STEPS = st.tuples(st.one_of(PUSH, RULE, RULE), PUSH, st.lists(st.one_of(PUSH, PUSH, CHANGE), min_size=4, max_size=12))
ALL = ("push", tuple(range(9)), 2, 1.0)
LIMITS = st.tuples(st.sampled_from([2, 50, 1000]), st.sampled_from([8, 1000]), st.sampled_from([16, 1000]))


def rule(number: int) -> tuple[Any, ...]:
    return ("rule", number, None, None)


@settings(max_examples=60, deadline=None)
@given(
    STEPS.map(lambda drawn: [*drawn[:2], *drawn[2]]),
    st.lists(st.sampled_from(DTYPES), min_size=9, max_size=9),
    st.sampled_from(["local", "device"]),
    LIMITS,
)
@example([rule(0), ALL, rule(2), ALL, rule(1), ALL, ALL], ["float32"] * 9, "local", (50, 8, 16))
@example([rule(0), ALL, ("multiplier", 3, 0.5, None), ALL, ALL], ["float32"] * 9, "local", (50, 1000, 1000))
@example([rule(3), ALL, ("push", (3, 4), 1, 0.3), ALL], ["float32"] * 9, "local", (50, 1000, 1000))
@example([rule(3), ALL, ("assign", 3, None, None), ALL], ["float16"] * 9, "local", (50, 1000, 1000))
def test_any_calls_have_the_bytes_of_steps_key_by_key(
    steps: list[Any], kinds: list[str], type_name: str, limits: tuple[int, int, int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), limit in zip(
            [(weights, "JOINED_ELEMENTS"), (weights, "CHUNK"), (update, "CHUNK")], limits, strict=True
        ):
            patch.setattr(module, name, limit)
        first = {key: values(size, kinds[key], key) for key, size in enumerate(SIZES)}
        other, kv = ByKey(first), kvstore.create(type_name)
        kv.init(list(first), list(first.values()))
        for turn, (what, which, count, scale) in enumerate(steps):
            if what == "push":
                given = [
                    [values(SIZES[key], kinds[key], 99 * turn + 9 * key + k) for k in range(count)] for key in which
                ]
                kv.push(list(which), given, scale=scale)
                for key, parts in zip(which, given, strict=True):
                    other.push(key, parts, scale)
            elif what == "rule":
                name, params = RULES_OF_CALLS[which]
                kv.set_optimizer(name, replace=True, **params)
                kv.set_multipliers(lr=dict.fromkeys(first, 1.0))
                other.set_rule(name, params)
                other.multipliers = {}
            elif what == "multiplier" and other.rule is not None:
                kv.set_multipliers(lr={which: count})
                other.multipliers[which] = count
            elif what == "assign":
                value = values(SIZES[which], kinds[which], 7777 + turn)
                kv.assign(which, value)
                other.weights[which][...] = value
                if "master" in other.states.get(which, {}):
                    other.states[which]["master"][...] = widen(value)
        outs = [np.empty_like(value) for value in first.values()]
        kv.pull(list(first), outs)
        for out, right in zip(outs, other.weights.values(), strict=True):
            assert out.tobytes() == right.tobytes()


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_becomes_a_kernel_steps_over_any_run_of_elements(name: str) -> None:
    """What `weights` takes for granted: no value of such a rule is updated by itself, on a GPU."""
    rule = make(name, {})
    assert fuse.why_not(rule) or all(update.is_flat(rule, dtypes.parse(dtype)) for dtype in DTYPES)


def interrupted_after(calls: int, work: Callable[..., object]) -> Callable[..., object]:
    """Return the function with Ctrl-C in the call after so many."""
    left = itertools.count(calls, -1)

    def call(*given: Any, **options: Any) -> object:
        if not next(left):
            raise KeyboardInterrupt
        return work(*given, **options)

    return call


def test_states_that_are_loaded_after_an_interrupted_step_are_stepped_as_in_a_new_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, size = ["a", "b"], weights.JOINED_ELEMENTS
    given, results = [np.ones(size, np.float32)] * 2, []
    for is_interrupted in (True, False):
        with kvstore.create("local") as kv:
            kv.init(keys, [np.zeros(size, np.float32)] * 2)
            if is_interrupted:
                kv.set_optimizer("adam", learning_rate=0.1)
                kv.set_multipliers({"a": 1.0, "b": 0.5}, {})
                kv.push(keys, given)
                kv.push(keys, given)
                kv.save_states(tmp_path)
                with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    patch.setattr(update, "step", interrupted_after(1, update.step))
                    kv.push(keys, given)
            kv.load_states(tmp_path)
            kv.push(keys, given)
            outs = [np.empty(size, np.float32) for _ in keys]
            kv.pull(keys, outs)
            results.append([out.tobytes() for out in outs])
    assert results[0] == results[1]


def test_a_rule_without_momentum_forgets_that_of_states_that_were_replaced(tmp_path: Path) -> None:
    with kvstore.create("local") as kv:
        kv.init("a", np.zeros(3, np.float32))
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        kv.save_states(tmp_path / "first")
        kv.push("a", np.ones(3, np.float32))
        kv.load_states(tmp_path / "first")
        for momentum in (0.0, 0.5):  # of the step that was undone nothing comes back
            kv.set_optimizer("sgd", learning_rate=1.0, momentum=momentum, replace=True)
            kv.push("a", np.ones(3, np.float32))
        out = np.empty(3, np.float32)
        kv.pull("a", out)
        assert out.tolist() == [-2.0] * 3


def test_calls_whose_keys_are_given_anew_each_time_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MOST_UNCOUNTED", 2)
    with kvstore.create("local") as kv:
        kv.init([0, 1], [np.zeros(3), np.zeros(3)])
        kv.set_optimizer("test")
        backend: Any = kv._backend
        for _ in range(20):
            kv.push([1, 0], [np.zeros(3), np.zeros(3)])
            kv.push([np.int64(0), 1], [np.ones(3), np.ones(3)])  # not of the kind that the store keeps
        gc.collect()
        assert len(backend._weights.calls) <= 3
        assert len(backend._weights.kept[0].values.step_plans) <= 3
        out = np.zeros(3)
        kv.pull(0, out)
        assert out.tolist() == [20.0] * 3


def test_of_scaled_sums_that_threads_share_few_are_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXNET_KVSTORE_REDUCTION_NTHREADS", "2")
    monkeypatch.setattr(arithmetic, "SHARED_ELEMENTS", 1 << 20)
    keys, given = [*range(16)], [np.ones(1 << 20, np.float32)] * 16
    with kvstore.create("local") as kv:
        kv.init(keys, given)
        kv.set_optimizer("sgd", learning_rate=0.1)
        kv.push(keys, given)
        tracemalloc.start()
        kv.push(keys, given, scale=0.5)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 24 << 20  # of 64 MiB


def test_a_rule_that_fails_leaves_the_keys_before_updated_and_those_behind_as_they_were() -> None:
    with kvstore.create("local") as kv:
        kv.init(["a", "b", "c"], [np.zeros(2), np.zeros(2), np.zeros(2)])
        kv.set_optimizer("rules_of_users:Fussy")
        with pytest.raises(ArithmeticError):
            kv.push(["a", "b", "c"], [np.ones(2), np.full(2, 13.0), np.ones(2)])
        outs = [np.empty(2) for _ in range(3)]
        kv.pull(["a", "b", "c"], outs)
        assert [out.tolist() for out in outs] == [[-1, -1], [0, 0], [0, 0]]
