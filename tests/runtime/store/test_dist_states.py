"""Saved states of a distributed store: weights, rule states, rounds and residuals, into any number of servers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import Cluster, rounds_of, run_job
from rules_of_users import Choosy

from distrun_runtime.arrays import dtypes
from distrun_runtime.errors import KVError, RuleError
from distrun_runtime.kvstore import KVStore
from distrun_runtime.store.values import RowSparse

pytestmark = pytest.mark.usefixtures("placement")

SHAPE, WIDE = (2, 3), (40, 40)
BOUND = 1000
KEYS = ["w", "v", "half", "rows"]


def gradient(key: str, rank: int, step: int) -> Any:
    random = np.random.default_rng([KEYS.index(key), rank, step])
    if key == "half":
        return dtypes.narrow(random.normal(size=WIDE).astype("float32"), dtypes.BFLOAT16)
    if key == "rows":
        rows = np.unique(random.integers(0, 40, 9))
        return RowSparse(random.normal(size=(len(rows), 40)).astype("float32"), rows, WIDE)
    return random.normal(size=SHAPE if key == "w" else WIDE).astype("float32")


def start(kv: KVStore) -> None:
    kv.init(["w", "v"], [np.ones(SHAPE, "float32"), np.ones(WIDE, "float32")])
    kv.init("half", dtypes.narrow(np.ones(WIDE, "float32"), dtypes.BFLOAT16))
    kv.init("rows", RowSparse.empty(WIDE))
    kv.set_optimizer("sgd", learning_rate=0.1, momentum=0.9)


def train(kv: KVStore, steps: range) -> dict[str, Any]:
    for step in steps:
        for key in KEYS:
            kv.push(key, gradient(key, kv.rank % 2, step))
    return values(kv)


def values(kv: KVStore) -> dict[str, Any]:
    outs = {"w": np.zeros(SHAPE, "float32"), "v": np.zeros(WIDE, "float32"), "rows": np.zeros(WIDE, "float32")}
    outs["half"] = np.zeros(WIDE, dtypes.BFLOAT16)
    for key, out in outs.items():
        kv.pull(key, out)
    return {key: dtypes.widen(out) for key, out in outs.items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(one[key], other[key]) for key in KEYS)


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_training_goes_on_where_it_was_saved_also_with_other_servers(servers: int, tmp_path: Path) -> None:
    """In MXNet a dist store could save nothing, and a server that was started again had nothing."""

    def first(kv: KVStore) -> Any:
        start(kv)
        train(kv, range(3))
        kv.save_states(tmp_path / "saved")
        saved = values(kv)
        return saved, train(kv, range(3, 6))

    def second(kv: KVStore) -> Any:
        start(kv)
        kv.load_states(tmp_path / "saved")
        loaded = values(kv)
        assert rounds_of(kv) == dict.fromkeys(KEYS, 3)
        return loaded, train(kv, range(3, 6))

    saved, went_on = run_job(first, 2, 2, bigarray_bound=BOUND)[0]
    with Cluster(2, servers, over="inproc", bigarray_bound=BOUND) as job:
        for loaded, ended in job.run(second):
            assert same(loaded, saved)
            assert same(ended, went_on)


def test_a_folder_holds_one_whole_state_of_documented_files(tmp_path: Path) -> None:
    def script(kv: KVStore) -> None:
        kv.set_gradient_compression({"type": "2bit", "min_size": 0}, keys=["w", "v"])
        start(kv)
        for step in range(2):
            train(kv, range(step, step + 1))
            kv.save_states(tmp_path)

    run_job(script, bigarray_bound=BOUND)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["format"] == 1
    assert [record["key"] for record in manifest["keys"]] == KEYS
    assert manifest["rule"]["name"] == "sgd"
    assert sorted(os.listdir(tmp_path)) == sorted(["manifest.json", manifest["data"]]), "the state before is removed"
    names = sorted(os.listdir(tmp_path / manifest["data"]))
    assert names == ["server-0.npz", "server-1.npz", "worker-0.npz", "worker-1.npz"]
    for name in names:
        with np.load(tmp_path / manifest["data"] / name, allow_pickle=False) as file:
            assert file.files
    with np.load(tmp_path / manifest["data"] / "worker-1.npz", allow_pickle=False) as file:
        assert sorted(file.files) == ["0.residual", "1.residual", "save"]


def test_residuals_are_taken_up_and_dropped_with_a_warning_for_another_number_of_workers(tmp_path: Path) -> None:
    def full(value: float) -> Any:
        return np.full(WIDE, value, "float32")

    def save(kv: KVStore) -> None:
        kv.set_gradient_compression({"type": "2bit"})
        kv.init("w", full(0))
        kv.set_optimizer("test", rescale_grad=1)
        kv.push("w", full(0.25 + 0.125 * kv.rank))
        kv.save_states(tmp_path)

    def load(kv: KVStore) -> Any:
        kv.set_gradient_compression({"type": "2bit"})
        kv.init("w", full(0))
        kv.set_optimizer("test", rescale_grad=1)
        kv.load_states(tmp_path)
        out = full(-1)
        kv.pushpull("w", full(0.25 - 0.125 * kv.rank), out)
        return out[0, 0], float(kv._backend._compressor.residuals()["w"][0])

    with Cluster(2, 2, over="inproc", bigarray_bound=BOUND) as job:
        job.run(save)
    with Cluster(2, 1, over="inproc", bigarray_bound=BOUND) as job:
        assert job.run(load) == [(1.0, 0.0), (1.0, 0.0)]
    warned = pytest.warns(RuntimeWarning, match=r"2 workers are loaded by 1.*worker-1.npz.*dropped")
    with Cluster(1, 1, over="inproc", bigarray_bound=BOUND) as job, warned:
        assert job.run(load) == [(0.0, 0.25)]


@pytest.mark.parametrize("what", ["torn", "missing", "of another size", "not finite"])
def test_a_workers_file_that_is_not_whole_is_refused_and_changes_nothing(what: str, tmp_path: Path) -> None:
    """The servers had taken over their part when the worker found out."""

    def begin(kv: KVStore) -> None:
        kv.set_gradient_compression({"type": "2bit", "min_size": 0}, keys="w")
        start(kv)

    def save(kv: KVStore) -> None:
        begin(kv)
        train(kv, range(2))
        kv.save_states(tmp_path)

    def load(kv: KVStore) -> None:
        begin(kv)
        before = train(kv, range(1))
        kept = kv._backend._compressor.residuals()["w"]
        with pytest.raises(KVError, match=r"worker-1 failed at load_states: .*worker-1\.npz on host here"):
            kv.load_states(tmp_path)
        assert same(values(kv), before)
        assert np.array_equal(kv._backend._compressor.residuals()["w"], kept)
        train(kv, range(1))

    run_job(save, bigarray_bound=BOUND)
    path = tmp_path / json.loads((tmp_path / "manifest.json").read_text())["data"] / "worker-1.npz"
    with np.load(path) as file:
        (name, residual), mark = next((name, file[name]) for name in file if name != "save"), file["save"]
    if what == "missing":
        path.unlink()
    elif what == "torn":
        path.write_bytes(path.read_bytes()[:100])
    else:
        wrong = residual[1:] if what == "of another size" else np.full_like(residual, np.nan)
        np.savez(path, save=mark, **{name: wrong})
    run_job(load, bigarray_bound=BOUND)


def test_a_rule_that_dislikes_a_value_on_one_server_changes_nothing_on_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, sizes = [0, 1], [5, 3]  # one on each of two servers, in both ways of placing them

    def job(script: Callable[[KVStore], Any]) -> Any:
        with Cluster(workers=1, servers=2, over="inproc", imports=("rules_of_users",)) as cluster:
            return cluster.run(script)

    def save(kv: KVStore) -> None:
        kv.init(keys, [np.zeros(size) for size in sizes])
        kv.set_optimizer("rules_of_users:Choosy")
        kv.push(keys, [np.ones(size) for size in sizes])
        kv.save_states(tmp_path / "saved")

    def load(kv: KVStore) -> list[float]:
        kv.init(keys, [np.full(size, 7.0) for size in sizes])
        monkeypatch.setattr(Choosy, "refused", 3)
        with pytest.raises(RuleError, match=r"server-1: ValueError: 3 elements are too many"):
            kv.load_states(tmp_path / "saved")
        monkeypatch.setattr(Choosy, "refused", -1)
        outs = [np.zeros(size) for size in sizes]
        kv.pull(keys, out=outs)
        assert [out.tolist() for out in outs] == [[7.0] * size for size in sizes]
        kv.load_states(tmp_path / "saved")
        kv.pull(keys, out=outs)
        return [float(out[0]) for out in outs]

    job(save)
    assert job(load) == [[-1.0, -1.0]]
