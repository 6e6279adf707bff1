"""A rule as it travels, and what a change of it does."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops.optimizers import Knobs, RuleSpec
from distrun_runtime.ops.schedules import Constant, Factor


def test_a_spec_is_complete_and_the_same_after_its_way_through_json() -> None:
    spec = RuleSpec.of("SGD", {"lr": 1, "lr_scheduler": Factor(2, 0.5)}, {"w": 0.5, "b": 1}, [(3, 0)])
    assert spec.name == "sgd"
    assert spec.params["momentum"] == 0.0
    assert spec.lr_mult == (("w", 0.5),)
    assert RuleSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert spec.to_json()["wd_mult"] == [[3, 0.0]]


def test_specs_that_say_the_same_are_equal() -> None:
    one = RuleSpec.of("sgd", {}, [("b", 2), ("a", 3)])
    assert one == RuleSpec.of("sgd", {"learning_rate": 0.01}, {"a": 3.0, "b": 2.0, "c": 1.0})
    assert rules.agreed(one, rules.RuleSpec.of("sgd", {}), False) is one
    assert rules.rule_of(one).params == one.params
    assert rules.difference(one, rules.RuleSpec.of("sgd", {"lr": 1})) == "sgd with learning_rate=0.01, not 1.0"


def test_a_key_has_its_own_multipliers_and_name() -> None:
    spec = RuleSpec.of("sgd", {}, {"w": 0.5}, {"b": 0})
    assert spec.knobs("w") == Knobs(0.5, 1.0, "w")
    assert spec.knobs("b") == Knobs(1.0, 0.0, "b")
    assert spec.knobs(7) == Knobs(1.0, 1.0, 7)


def test_multipliers_multiply_learning_rate_and_decay() -> None:
    rule, weight = rules.make("sgd", {"lr": 0.5, "wd": 0.25}), np.ones(1)
    state = rule.new_state(weight)
    rule.step(weight, np.ones(1), state, Knobs(lr_mult=2.0, wd_mult=4.0))
    assert weight == [1 - 1.0 * (1 + 1.0 * 1)]
    for name in set(rules.RULES) - {"test"}:
        rule, one, other = rules.make(name, {"lr": 0.5, "wd": 0.25}), np.ones(3), np.ones(3)
        rule.step(one, np.ones(3), rule.new_state(one), Knobs(lr_mult=0.5, wd_mult=3.0))
        same = rules.make(name, {"lr": 0.25, "wd": 0.75})
        same.step(other, np.ones(3), same.new_state(other))
        np.testing.assert_allclose(one, other, rtol=1e-15, err_msg=name)


def test_a_change_replaces_what_it_names_and_leaves_the_rest() -> None:
    spec = RuleSpec.of("sgd", {"lr": 1, "momentum": 0.5}, {"w": 0.5, "b": 2})
    changed = spec.changed({"params": {"lr": 0.1, "wd": 1}, "lr_mult": [["w", 3], ["b", 1]], "wd_mult": [["w", 0]]})
    assert changed == RuleSpec.of("sgd", {"lr": 0.1, "momentum": 0.5, "wd": 1}, {"w": 3}, {"w": 0})
    assert spec.changed({}) == spec
    assert rules.rule_of(changed).params["learning_rate"] == 0.1


def test_the_learning_rate_and_the_base_of_a_schedule_are_one_number() -> None:
    both = rules.RuleSpec.of("adam", {"lr": 0.5, "lr_scheduler": Factor(10, 0.1)})
    assert both.params["lr_scheduler"]["base_lr"] == both.params["learning_rate"] == 0.5  # type: ignore[index, call-overload]
    alone = rules.RuleSpec.of("adam", {"lr_scheduler": Factor(10, 0.1, base_lr=0.3)})
    assert alone.params["learning_rate"] == 0.3
    assert rules.RuleSpec.of("adam", alone.params) == alone


def test_a_schedule_put_in_place_or_taken_away_while_running_changes_the_rate() -> None:
    spec = rules.RuleSpec.of("sgd", {"lr": 0.5})
    scheduled = spec.changed({"params": {"lr_scheduler": Constant(0.2).to_json()}})
    assert scheduled.params["learning_rate"] == 0.2
    plain = scheduled.changed({"params": {"lr_scheduler": None}})
    assert (plain.params["lr_scheduler"], plain.params["learning_rate"]) == (None, 0.2)
    both = spec.changed({"params": {"lr_scheduler": Constant(0.2), "learning_rate": 0.7}})
    assert both.params["lr_scheduler"] == Constant(0.7).to_json()


def test_a_learning_rate_beside_a_schedule_that_stays_is_refused_with_the_fix() -> None:
    spec = rules.RuleSpec.of("sgd", {"lr_scheduler": Constant(0.2)})
    with pytest.raises(KVError, match=r"comes from lr_scheduler .*give lr_scheduler=None and learning_rate=0\.1"):
        spec.changed({"params": {"lr": 0.1}})
    assert spec.changed({"params": {"wd": 0.1}}).params["wd"] == 0.1


def test_a_change_travels_as_json_whatever_numbers_it_is_made_of() -> None:
    params = {"lr": np.float32(0.5), "lr_scheduler": None, "clip_gradient": np.int64(2)}
    change = rules.change_of(params, {np.int64(3): np.float64(2)}, {"b": 0})  # type: ignore[dict-item]
    spec = rules.RuleSpec.of("sgd", {}).changed(json.loads(json.dumps(change)))
    assert spec == RuleSpec.of("sgd", {"lr": 0.5, "clip_gradient": 2}, {3: 2}, {"b": 0})
    scheduled = rules.change_of({"lr_scheduler": Factor(3, 0.5)})
    assert spec.changed(json.loads(json.dumps(scheduled))).params["lr_scheduler"] == Factor(3, 0.5).to_json()
    with pytest.raises(KVError, match=r"parameter lr=.*: a object cannot be written as JSON"):
        rules.change_of({"lr": object()})
    with pytest.raises(KVError, match="lr_mult: inf is not a finite number"):
        rules.change_of(lr_mult={"w": float("inf")})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"params": {"lr": -1}}, "rule 'sgd': learning_rate=-1: expected a finite number at least 0"),
        ({"params": {"mu": 1}}, "rule 'sgd' has no parameter 'mu'"),
        ({"params": {"lr": 1, "learning_rate": 1}}, "are one parameter; give one"),
        ({"params": {"lr_scheduler": {"type": "x"}}}, "rule 'sgd': unknown type of schedule 'x'"),
        ({"lr_mult": [["w", -1]]}, "lr multiplier of key 'w': expected a finite number at least 0, not -1"),
        ({"wd_mult": [["w", "1"]]}, "wd multiplier of key 'w': expected a finite number"),
        ({"lr_mult": [["w"]]}, "lr multipliers: expected pairs of key and number"),
        ({"lr_mult": 3}, "lr multipliers: expected pairs"),
        ({"wd_mult": [[None, 1]]}, "wd multiplier: None is not a key; keys are int or str"),
        ({"wd_mult": [[True, 1]]}, "wd multiplier: True is not a key"),
    ],
)
def test_a_wrong_change_is_refused_and_says_what_would_be_right(change: Any, words: str) -> None:
    with pytest.raises(KVError, match=words):
        rules.RuleSpec.of("sgd", {}).changed(change)


@pytest.mark.parametrize("value", [None, {}, {"name": "sgd"}, {"name": "sgd", "params": []}])
def test_what_is_no_spec_is_refused(value: Any) -> None:
    with pytest.raises(KVError, match="not a rule"):
        RuleSpec.from_json(value)
