"""Jobs on every path that save their states: a job that loads them goes on, with any number of servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import Cluster, open_store

from distrun_runtime.arrays import dtypes
from distrun_runtime.ops.optimizers import RULES
from distrun_runtime.store.values import RowSparse

pytestmark = pytest.mark.usefixtures("engine", "server_device")

Job = Callable[..., Cluster]
Run = Callable[..., list[Any]]

BOUND = 50
"""Elements from which a value is cut over all servers here."""
SHAPES = {"wide": (25, 40), "small": (7,), "mid": (64,)}
PARAMS: dict[str, dict[str, Any]] = {
    **{name: {"learning_rate": 0.1} for name in RULES if name != "test"},
    **{name: {"learning_rate": 0.1, "momentum": 0.9} for name in ("sgd", "nag", "dcasgd", "lars")},
    "test": {},
}


def start(kv: Any, name: str, dtype: str, **more: Any) -> None:
    random = np.random.default_rng(5)
    values = [random.standard_normal(shape).astype(np.float32) for shape in SHAPES.values()]
    kv.init(list(SHAPES), [dtypes.narrow(value, dtypes.parse(dtype)) for value in values])
    kv.init("rows", RowSparse.empty((30, 4), dtype))
    kv.set_optimizer(name, **PARAMS[name], **more)
    kv.barrier()


def step(kv: Any, dtype: str, number: int) -> None:
    random = np.random.default_rng([number, kv.rank])
    kind = dtypes.parse(dtype)
    for key, shape in SHAPES.items():
        kv.push(key, dtypes.narrow(random.standard_normal(shape).astype(np.float32), kind))
    some = np.unique(random.integers(0, 30, 6))
    kv.push("rows", RowSparse(dtypes.narrow(random.random((len(some), 4), np.float32), kind), some, (30, 4)))


def values(kv: Any, dtype: str) -> list[bytes]:
    outs = [np.zeros(shape, dtypes.parse(dtype)) for shape in (*SHAPES.values(), (30, 4))]
    kv.pull([*SHAPES, "rows"], outs)
    return [out.tobytes() for out in outs]


def train_and_save(folder: Path, name: str, dtype: str, **more: Any) -> Callable[[Any], Any]:
    """Return what two rounds, a save and two more rounds give: the values at the save, and at the end."""

    def script(kv: Any) -> Any:
        start(kv, name, dtype, **more)
        for number in (1, 2):
            step(kv, dtype, number)
        kv.save_states(folder)
        saved = values(kv, dtype)
        for number in (3, 4):
            step(kv, dtype, number)
        return saved, values(kv, dtype)

    return script


def load_and_train(folder: Path, name: str, dtype: str, **more: Any) -> Callable[[Any], Any]:
    def script(kv: Any) -> Any:
        start(kv, name, dtype, **more)
        step(kv, dtype, 9)  # what is loaded takes the place of this
        kv.load_states(folder)
        loaded = values(kv, dtype)
        for number in (3, 4):
            step(kv, dtype, number)
        return loaded, values(kv, dtype)

    return script


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.slow
def test_training_with_any_rule_goes_on_as_if_nothing_had_been_saved(job: Job, servers: int, tmp_path: Path) -> None:
    """Bit by bit; counters go on too. One store for each rule, all in the same job."""
    names = sorted(set(RULES) - {"lamb", "lars"})

    def each(make: Callable[..., Any]) -> Callable[[Any], Any]:
        def script(session: Any) -> Any:
            return [make(tmp_path / name, name, "float32")(open_store("dist_sync", session)) for name in names]

        return script

    with job(2, 2, bigarray_bound=BOUND) as made:
        before = made.run_sessions(each(train_and_save))[0]
    with job(2, servers, bigarray_bound=BOUND) as made:
        after = made.run_sessions(each(load_and_train))[0]
    for name, one, other in zip(names, before, after, strict=True):
        assert one == other, name
        assert one[0] != one[1], name


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_rules_with_norms_go_on_with_as_many_servers(job: Job, name: str, tmp_path: Path) -> None:
    found = []
    for script in (train_and_save, load_and_train):
        with job(2, 2, bigarray_bound=BOUND) as made:
            found.append(made.run(script(tmp_path, name, "float32"))[0])
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_weights_and_their_masters_come_back_bit_by_bit(job: Job, dtype: str, tmp_path: Path) -> None:
    found = []
    for script, servers in ((train_and_save, 2), (load_and_train, 3)):
        with job(2, servers, bigarray_bound=BOUND) as made:
            found.append(made.run(script(tmp_path, "sgd", dtype, multi_precision=True))[0])
    assert found[0] == found[1]


def test_what_compressed_answers_left_out_comes_after_a_load_too(run: Run, tmp_path: Path) -> None:
    """A sum of 1 travels back as 0.5; the half that is left out is saved, and comes with the next round's zeros."""

    def script(kv: Any) -> list[float]:
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5, "min_size": 0, "two_way": True})
        kv.init("w", np.zeros((25, 40), np.float32))
        has_saved = (tmp_path / "manifest.json").exists()
        kv.barrier()
        if has_saved:
            kv.load_states(tmp_path)
        seen = []
        for value in (0.0, 0.0) if has_saved else (0.5, 0.0, 0.0):
            out = np.zeros((25, 40), np.float32)
            kv.pushpull("w", np.full((25, 40), value, np.float32), out)
            assert out.min() == out.max()
            seen.append(float(out[0, 0]))
            if value:
                kv.save_states(tmp_path)
        return seen

    assert run(script, bigarray_bound=BOUND) == [[0.5, 0.5, 0.0]] * 2
    assert run(script, 2, 1, bigarray_bound=BOUND) == [[0.5, 0.0]] * 2
