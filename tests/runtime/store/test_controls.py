"""The calls beside the data, seen through a store that only notes what its hooks were given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from noting import Noting, noted

from distrun_runtime.errors import KVError
from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.ops.schedules import Factor
from distrun_runtime.store.compress import Setting


@pytest.fixture
def kv() -> Noting:
    return noted()


def test_set_optimizer_hands_over_the_complete_parameters(kv: Noting) -> None:
    kv.set_optimizer("SGD", lr=0.5)
    kv.set_optimizer("test", rescale=2, replace=True)
    spec, replace = kv.calls[0][1:]
    assert (spec.name, spec.params["learning_rate"], spec.params["momentum"], replace) == ("sgd", 0.5, 0.0, False)
    assert kv.calls[1] == ("rule", RuleSpec("test", {"rescale_grad": 2.0, "multi_precision": False}), True)


def test_an_unknown_rule_or_parameter_or_updater_reaches_no_hook(kv: Noting) -> None:
    with pytest.raises(KVError, match="unknown rule 'lion'; known are adadelta, adagrad, adam, "):
        kv.set_optimizer("lion")
    with pytest.raises(KVError, match="did you mean 'momentum'"):
        kv.set_optimizer("sgd", momemtum=0.9)
    with pytest.raises(KVError, match="an updater is a function"):
        kv.set_updater("sgd")  # type: ignore[arg-type]  # what is tested
    assert kv.calls == []


def test_a_schedule_goes_along_as_json(kv: Noting) -> None:
    kv.set_optimizer("sgd", learning_rate=0.5, lr_scheduler=Factor(step=10, factor=0.5))
    spec = kv.calls[0][1]
    assert RuleSpec.from_json(spec.to_json()) == spec
    assert spec.params["lr_scheduler"]["step"] == 10


def test_changes_of_a_rule_hand_over_only_what_changes(kv: Noting) -> None:
    kv.set_learning_rate(0.25)
    kv.set_optimizer_params(momentum=0.5, wd=0.1)
    kv.set_multipliers(lr={"a": 2, "later": 0.5}, wd={"b": 0})
    assert [{name: part for name, part in call[1].items() if part} for call in kv.calls] == [
        {"params": {"learning_rate": 0.25}},
        {"params": {"momentum": 0.5, "wd": 0.1}},
        {"lr_mult": [["a", 2], ["later", 0.5]], "wd_mult": [["b", 0]]},
    ]
    with pytest.raises(KVError, match="multipliers are a dict of key to number, not list"):
        kv.set_multipliers(lr=[1])  # type: ignore[arg-type]  # what is tested
    with pytest.raises(KVError, match="a key is an int or a str"):
        kv.set_multipliers(wd={1.5: 2})  # type: ignore[dict-item]  # what is tested


def test_compression_hands_over_a_complete_setting_and_its_keys(kv: Noting) -> None:
    kv.set_gradient_compression({"type": "2bit"})
    kv.set_gradient_compression({"type": "none"}, keys="a")
    kv.set_gradient_compression({"type": "none"}, keys=["a", "b", "a"])
    assert [call[2] for call in kv.calls] == [None, ["a"], ["a", "b"]]
    assert kv.calls[0][1] == Setting.of({"type": "2bit", "threshold": 0.5})
    for wrong in ({}, {"type": "3bit"}, {"type": "2bit", "treshold": 1}, "2bit"):
        with pytest.raises(KVError, match="compression"):
            kv.set_gradient_compression(wrong)  # type: ignore[arg-type]  # what is tested
    assert len(kv.calls) == 3


def test_folders_may_be_paths(kv: Noting, tmp_path: Path) -> None:
    kv.save_states(tmp_path)
    kv.load_states(str(tmp_path))
    with kv.profile(tmp_path):
        pass
    assert kv.calls == [(call, str(tmp_path)) for call in ("save", "load", "profile")]


def test_counters_and_lost_nodes_are_told(kv: Noting) -> None:
    assert kv.stats() == [{"keys": 2}]
    assert [kv.num_dead_node(), kv.num_dead_node(np.int64(4), timeout=1)] == [7, 4]  # type: ignore[arg-type]
    for wrong in (0, 8, -1):
        with pytest.raises(KVError, match="node_id is a sum of 1"):
            kv.num_dead_node(wrong)


def test_a_store_is_capable_of_optimizers_and_knows_nothing_else(kv: Noting) -> None:
    assert kv.is_capable("optimizer")
    unknown: Any
    for unknown in ("Optimizer", "flying", None):
        with pytest.raises(KVError, match=r"no capability .* is known"):
            kv.is_capable(unknown)


@pytest.mark.parametrize("folder", [None, 3, b"states", ""])
def test_a_folder_that_is_no_path_reaches_no_hook(kv: Noting, folder: Any) -> None:
    for call in (kv.save_states, kv.load_states, kv.profile):
        with pytest.raises(KVError, match="a folder is a path, such as 'states'"):
            call(folder)
    assert kv.calls == []


@pytest.mark.parametrize("node_id", [0, 8, "workers", None, 1.5])
def test_roles_that_are_none_are_refused(kv: Noting, node_id: Any) -> None:
    with pytest.raises(KVError, match=r"a sum of 1 \(scheduler\), 2 \(servers\), 4 \(workers\), not "):
        kv.num_dead_node(node_id)
