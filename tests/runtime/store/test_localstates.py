"""Saved states of the stores of one process: all or nothing, and the same files as a job's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import run_job

from distrun_runtime import kvstore
from distrun_runtime.arrays.dtypes import BFLOAT16, narrow
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import RowSparse

SGD = {"learning_rate": 0.5, "momentum": 0.5}


def filled(kind: str = "local", **params: Any) -> Any:
    """Return a store with a dense, a row-sparse and a bfloat16 key, updated once by sgd."""
    kv = kvstore.create(kind)
    fill(kv)
    if params:
        kv.set_optimizer("sgd", **params)
    return kv


def fill(kv: Any) -> None:
    kv.init(["w", "t", "h"], [np.zeros((2, 3)), RowSparse.empty((4, 2), "float64"), np.zeros(2, BFLOAT16)])


def push(kv: Any) -> None:
    kv.push("w", np.ones((2, 3)))
    kv.push("t", RowSparse(np.ones((2, 2)), [3, 1], (4, 2)))
    kv.push("h", narrow(np.ones(2, np.float32), BFLOAT16))


def everything(kv: Any) -> list[Any]:
    outs = [np.empty((2, 3)), np.empty((4, 2)), np.empty(2, BFLOAT16)]
    kv.pull(["w", "t", "h"], outs)
    return [out.tolist() for out in outs]


@pytest.mark.parametrize("kind", ["local", "device"])
def test_training_goes_on_from_loaded_states_as_if_it_had_not_stopped(kind: str, tmp_path: Path) -> None:
    kv = filled(kind, **SGD, multi_precision=True)
    push(kv)
    kv.save_states(tmp_path)
    push(kv)
    other = filled(kind, **SGD, multi_precision=True)
    other.load_states(tmp_path)
    push(other)
    assert everything(other) == everything(kv)
    push(kv)
    push(other)
    assert everything(other) == everything(kv)


def test_a_store_without_a_rule_gets_the_saved_one_with_its_multipliers(tmp_path: Path) -> None:
    kv = filled(**SGD)
    kv.set_multipliers(lr={"w": 2})
    push(kv)
    kv.save_states(tmp_path)
    other = filled()
    other.load_states(tmp_path)
    push(kv)
    push(other)
    assert everything(other) == everything(kv)
    assert everything(kv)[0][0][0] == -2.5  # at twice the rate: -1, then -0.5 of momentum and -1


def test_a_store_with_an_updater_keeps_it(tmp_path: Path) -> None:
    kv = filled(**SGD)
    push(kv)
    kv.save_states(tmp_path)
    other = filled()
    other.set_updater(lambda key, received, stored: stored.fill(7))
    other.load_states(tmp_path)
    assert everything(other) == everything(kv)
    other.push("w", np.ones((2, 3)))
    assert everything(other)[0][0] == [7, 7, 7]


def test_residuals_of_all_devices_are_saved_and_loaded(tmp_path: Path) -> None:
    def create() -> Any:
        kv = kvstore.create("device")
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5, "min_size": 0})
        kv.init("w", np.zeros(3, np.float32))
        return kv

    def step(kv: Any) -> list[float]:
        out = np.empty(3, np.float32)
        kv.pushpull("w", [np.full(3, 0.4, np.float32), np.full(3, 0.1, np.float32)], out=out)
        return [float(number) for number in out]

    kv, other, fresh = create(), create(), create()
    for _ in range(4):
        step(kv)
    kv.save_states(tmp_path)
    other.load_states(tmp_path)
    assert step(other) == step(kv) == [1, 1, 1]
    assert step(fresh) == [0, 0, 0]


def test_residuals_of_all_devices_are_one_in_a_job(tmp_path: Path) -> None:
    """There the sum of the devices is compressed. Those of all devices but the first were lost."""
    setting = {"type": "2bit", "threshold": 0.5, "min_size": 0}
    kv = kvstore.create("device")
    kv.set_gradient_compression(setting)
    kv.init("w", np.zeros(3, np.float32))
    kv.push("w", [np.full(3, 0.25, np.float32), np.full(3, 0.25, np.float32)])
    kv.save_states(tmp_path)

    def in_job(kv: Any) -> list[float]:
        kv.set_gradient_compression(setting)
        kv.init("w", np.zeros(3, np.float32))
        kv.load_states(tmp_path)
        out = np.empty(3, np.float32)
        kv.pushpull("w", np.zeros(3, np.float32), out=out)
        return [float(number) for number in out]

    assert run_job(in_job, 1, 1) == [[0.5, 0.5, 0.5]]


def test_residuals_of_several_workers_are_dropped_with_a_warning(tmp_path: Path) -> None:
    setting = {"type": "2bit", "threshold": 0.5, "min_size": 0}

    def in_job(kv: Any) -> None:
        kv.set_gradient_compression(setting)
        kv.init("w", np.zeros(3, np.float32))
        kv.pushpull("w", np.full(3, 0.4, np.float32), out=np.empty(3, np.float32))
        kv.save_states(tmp_path)

    run_job(in_job, 2, 1)
    kv = kvstore.create("device")
    kv.set_gradient_compression(setting)
    kv.init("w", np.zeros(3, np.float32))
    with pytest.warns(RuntimeWarning, match=r"of 2 workers are loaded by one: .*worker-0\.npz, worker-1\.npz") as seen:
        kv.load_states(tmp_path)
    assert seen[0].filename == __file__
    out = np.empty(3, np.float32)
    kv.pushpull("w", np.full(3, 0.4, np.float32), out=out)
    assert out.tolist() == [0, 0, 0]


def test_a_save_that_fails_leaves_the_last_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = filled(**SGD)
    push(kv)
    kv.save_states(tmp_path)
    saved = everything(kv)
    push(kv)

    def fail(*args: object, **others: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(KVError, match=r"server-0.npz on host .*: no space left on device"):
        kv.save_states(tmp_path)
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 2
    other = filled(**SGD)
    other.load_states(tmp_path)
    assert everything(other) == saved


@pytest.mark.parametrize("harm", ["absent", "manifest", "file", "short"])
def test_states_that_are_not_whole_are_refused_and_change_nothing(harm: str, tmp_path: Path) -> None:
    kv = filled(**SGD)
    push(kv)
    kv.save_states(tmp_path)
    (file,) = tmp_path.glob("data-*/server-0.npz")
    if harm == "absent":
        (tmp_path / "manifest.json").unlink()
    elif harm == "manifest":
        (tmp_path / "manifest.json").write_text("{")
    elif harm == "file":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-100])
    push(kv)
    before = everything(kv)
    with pytest.raises(KVError, match=r"manifest\.json|server-0\.npz"):
        kv.load_states(tmp_path)
    assert everything(kv) == before


def test_states_of_other_keys_shapes_or_rules_are_refused_by_name(tmp_path: Path) -> None:
    filled(**SGD).save_states(tmp_path)
    other = filled()
    other.set_optimizer("adam")
    with pytest.raises(KVError, match="saved under the rule 'sgd', the store has 'adam'"):
        other.load_states(tmp_path)
    fewer = kvstore.create("local")
    fewer.init("w", np.zeros((2, 3)))
    with pytest.raises(KVError, match="key 't' is in the saved states and not in the store"):
        fewer.load_states(tmp_path)
    different = kvstore.create("local")
    different.init(["w", "t", "h"], [np.zeros((3, 2)), RowSparse.empty((4, 2), "float64"), np.zeros(2, BFLOAT16)])
    with pytest.raises(KVError, match=r"key 'w': the store has shape \(3, 2\) float64, the saved states have"):
        different.load_states(tmp_path)


def test_counters_grow_with_every_call() -> None:
    kv = filled()
    (before,) = kv.stats()
    push(kv)
    kv.pull("w", np.empty((2, 3)))
    (after,) = kv.stats()
    assert {name: after[name] - before[name] for name in ("bytes_in", "bytes_out", "updates", "rounds", "queue")} == {
        **{"bytes_in": 48 + 32 + 4, "bytes_out": 48, "updates": 3, "rounds": 1, "queue": 0},
    }
    assert (after["keys"], after["pieces"], after["staleness"]) == (3, 3, {})


def test_a_profile_is_a_trace_of_the_calls_in_its_block(tmp_path: Path) -> None:
    kv = filled()
    push(kv)
    with kv.profile(tmp_path):
        kv.push(["w", "w"], [np.ones((2, 3))] * 2)
        kv.pull("w", np.empty((2, 3)))
        with pytest.raises(KVError, match="being profiled already"), kv.profile(tmp_path):
            pass
    push(kv)
    trace = json.loads((tmp_path / "worker-0.json").read_text("utf-8"))["traceEvents"]
    spans = [event for event in trace if event["ph"] == "X"]
    assert [(event["name"], event["args"]) for event in spans] == [("push", {"keys": ["w"]}), ("pull", {"keys": ["w"]})]
    assert all(event["dur"] >= 0 for event in spans)


def test_a_jobs_states_are_loaded_here_and_ours_in_a_job_of_another_size(tmp_path: Path) -> None:
    def in_job(kv: Any) -> list[Any]:
        fill(kv)
        if (tmp_path / "manifest.json").exists():
            kv.load_states(tmp_path)
        else:
            kv.set_optimizer("sgd", **SGD)
            push(kv)
            kv.save_states(tmp_path)
        push(kv)
        return everything(kv)

    (expected,) = run_job(in_job, 1, 2, bigarray_bound=3, partition="mxnet")
    kv = filled()
    kv.load_states(tmp_path)
    push(kv)
    assert everything(kv) == expected
    kv.save_states(tmp_path)
    push(kv)
    assert run_job(in_job, 1, 3, bigarray_bound=2, partition="mxnet") == [everything(kv)]


def test_a_profile_into_a_folder_that_cannot_be_does_not_begin(tmp_path: Path) -> None:
    kv = filled()
    (tmp_path / "file").touch()
    began = []
    with pytest.raises(KVError, match="traces cannot be written"), kv.profile(tmp_path / "file"):
        began.append(True)
    assert not began
    with kv.profile(tmp_path / "folder"):
        pass
