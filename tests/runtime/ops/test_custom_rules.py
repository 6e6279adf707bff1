"""Rules and functions of users, by name, from modules that may be imported and from no others."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import rules_of_users

from distrun_runtime.arrays.dtypes import BFLOAT16, narrow, widen
from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops.optimizers import Knobs, importable

HERE = ("rules_of_users",)


def stepped(rule: rules.Rule, weight: Any, grad: Any, knobs: Knobs = rules.PLAIN) -> Any:
    state = rule.new_state(weight)
    rule.step(weight, grad, state, knobs)
    assert state["updates"] == 1
    return weight


def test_a_rule_of_ones_own_has_what_the_built_in_ones_have() -> None:
    rule = rules.make("rules_of_users:Sign", {"lr": 2}, HERE)
    assert (rule.name, rule.params) == ("rules_of_users:Sign", {"learning_rate": 2.0, "rescale_grad": 1.0})
    assert stepped(rule, np.zeros(2), np.array([3.0, -3.0]), Knobs(lr_mult=0.5)).tolist() == [-1, 1]
    half = stepped(rule, narrow(np.zeros(2, "f4"), BFLOAT16), narrow(np.ones(2, "f4"), BFLOAT16))
    assert widen(half).tolist() == [-2, -2]
    sparse = np.zeros((3, 1), np.float32)
    rule.step(sparse, np.ones((1, 1), np.float32), rule.new_state(sparse), rows=np.array([1]))
    assert sparse.tolist() == [[0], [-2], [0]]
    with pytest.raises(KVError, match=r"rule 'Sign' has no parameter 'x'; it has learning_rate, lr, "):
        rules.make("rules_of_users:Sign", {"x": 2}, HERE)


def test_a_rule_without_a_table_takes_any_json() -> None:
    rule = rules.make("rules_of_users:Free", {"steps": [1, 2], "word": "x"}, HERE)
    weight, state = np.zeros(()), rule.new_state(np.zeros(()))
    rule.step(weight, np.array(5.0), state)
    assert (float(weight), float(state["last"]), state["updates"]) == (3.0, 5.0, 1)
    rows = np.zeros((2, 2))
    parts = rule.new_state(rows)
    rule.step(rows, np.ones((1, 2)), parts, rows=np.array([1]))
    assert parts["last"].tolist() == [[0, 0], [1, 1]]  # type: ignore[union-attr]


def test_a_rule_of_ones_own_may_need_norms() -> None:
    rule = rules.make("rules_of_users:Normalised", {}, HERE)
    assert rule.needs_norms
    np.testing.assert_allclose(stepped(rule, np.zeros(2), np.array([3.0, 4.0])), [-0.6, -0.8])


def test_a_function_is_called_with_key_received_and_stored() -> None:
    rule = rules.make("updater", {"function": "rules_of_users:add"}, HERE)
    given = np.ones(2, np.int32)
    assert stepped(rule, np.ones(2, np.int32), given).tolist() == [2, 2]
    assert given.tolist() == [1, 1]
    half = stepped(rule, np.ones(2, np.float16), np.full(2, 2, np.float32))
    assert (half.dtype, half.tolist()) == (np.float16, [3, 3])
    brain = stepped(rule, narrow(np.ones(2, "f4"), BFLOAT16), np.ones(2, np.float32))
    assert widen(brain).tolist() == [2, 2]
    sparse = np.ones((3, 1))
    rule.step(sparse, np.ones((1, 1)), rule.new_state(sparse), rows=np.array([2]))
    assert sparse.tolist() == [[1], [1], [2]]
    rule = rules.make("updater", {"function": "rules_of_users:failing"}, HERE)
    with pytest.raises(ArithmeticError, match="key 'w' is not right"):
        stepped(rule, np.zeros(2), np.ones(2), Knobs(key="w"))


def test_no_module_is_imported_that_was_not_named() -> None:
    fix = r"start the job with --server-import json \(by hand: DISTRUN_SERVER_IMPORT=%s for every server\)"
    with pytest.raises(KVError, match="rule 'json:Class': this server may not import json.* none; " + fix % "json"):
        rules.make("json:Class", {}, ())
    with pytest.raises(KVError, match="updater 'json:dump': .* with a, b; " + fix % "a,b,json"):
        rules.make("updater", {"function": "json:dump"}, ("a", "b"))
    with pytest.raises(KVError, match=r"may not import rules_of_users\.inner"):
        rules.make("rules_of_users.inner:Rule", {}, HERE)
    assert rules.make("rules_of_users:Sign", {}, None).name == "rules_of_users:Sign"


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("absent_module:Rule", {}, "No module named 'absent_module'; the module must be where servers look for it: "),
        ("rules_of_users:Absent", {}, "rule 'rules_of_users:Absent': rules_of_users has no Absent"),
        ("rules_of_users:add", {}, "not a class derived from distrun_runtime.ops.optimizers.Rule"),
        ("rules_of_users:Outer", {}, "not a class derived from"),
        ("rules_of_users:Unfinished", {}, "the class does not define update"),
        ("rules_of_users:", {}, """rule 'rules_of_users:': expected "module:Class\""""),
        ("a:b:c", {}, 'expected "module:Class"'),
        ("a b:c", {}, 'expected "module:Class"'),
        ("updater", {}, """updater None: expected "module:name\""""),
        ("updater", {"function": "dumps"}, "updater 'dumps': expected"),
        ("updater", {"function": "rules_of_users:nothing"}, r"not a function \(key, received, stored\)"),
        ("rules_of_users:Free", {"steps": {1}}, r"steps=\{1\}: a set cannot be written as JSON"),
        ("rules_of_users:Free", {"steps": float("nan")}, "steps=nan: nan is not a finite number"),
    ],
)
def test_what_cannot_be_a_rule_is_refused_with_the_reason(name: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(KVError, match=words):
        rules.make(name, params, None)


def test_the_spec_of_a_rule_of_ones_own_is_made_without_its_module() -> None:
    spec = rules.RuleSpec.of("absent_module:Rule", {"steps": (1, 2), "x": {"y": None}})
    assert spec.params == {"steps": [1, 2], "x": {"y": None}}
    assert rules.RuleSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert spec.changed({"params": {"x": 3}}).params == {"steps": [1, 2], "x": 3}


def test_a_function_of_a_module_has_a_name() -> None:
    assert importable(rules_of_users.add) == "rules_of_users:add"
    assert importable(rules_of_users.another_name) == "rules_of_users:add"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda key, received, stored: None, "it is a lambda"),
        (rules_of_users.small, "it is a lambda"),
        (rules_of_users.maker(), "it is defined inside another function"),
        (rules_of_users.Outer().method, "it is a method"),
        (rules_of_users.Outer.method, "it is a method"),
        (functools.partial(rules_of_users.add, 1), "it is no function but an object of type partial"),
        (3, "it is no function but an object of type int"),
        (functools.wraps(rules_of_users.add)(lambda *_: None), "it is not what rules_of_users.add is"),
    ],
)
def test_a_function_that_servers_cannot_import_is_refused_with_the_fix(function: object, words: str) -> None:
    with pytest.raises(KVError, match="cannot be imported by the servers, " + words) as caught:
        importable(function)
    assert "--server-import updates" in str(caught.value)
    assert "DISTRUN_SERVER_IMPORT=updates" in str(caught.value)


def test_a_function_of_the_script_itself_is_refused_with_the_fix() -> None:
    text = "from distrun_runtime.ops.optimizers.catalog import importable\ndef f(k, r, s): pass\nimportable(f)"
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "updater f cannot be imported by the servers, it is of the script itself: put a function into" in done.stderr
