"""Arrays of other libraries in a GPU's memory as values and outputs of stores: on a real GPU, and on the stand-in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import Cluster
from gpukit import values
from realgpus import ON_BOTH
from sums import total as total_of

from distrun_runtime import kvstore
from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays.device import CpuDevice
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.kvstore import KVStore

F32 = np.dtype(np.float32)
STEPS = 3
ASKED = {"cpu:0": "cpu", "gpu:0": "gpu:0"}
"""What servers are told, by the device on which they are to keep values."""


class Interface:
    """An array of a library that has `__cuda_array_interface__` and no stream: all of its work is done."""

    def __init__(self, array: Array) -> None:
        device = devices.gpu(0)
        self.array = device.put(array)
        device.synchronize()
        self.__cuda_array_interface__ = {
            **{"shape": array.shape, "typestr": array.dtype.str, "version": 3, "stream": None},
            "data": (self.array.pointer.address, False),
        }

    def host(self) -> Array:
        device = devices.gpu(0)
        device.synchronize()
        return device.host(self.array)


def of_cupy(array: Array) -> Any:
    return pytest.importorskip("cupy").asarray(array)


def of_torch(array: Array) -> Any:
    return pytest.importorskip("torch").from_numpy(array.copy()).cuda()


def host(value: Any) -> Array:
    if isinstance(value, Interface):
        return value.host()
    found: Array = value.get() if hasattr(value, "get") else value.cpu().numpy()
    return found


LIBRARIES: dict[str, Callable[[Array], Any]] = {"interface": Interface, "cupy": of_cupy, "torch": of_torch}
EACH_LIBRARY = pytest.mark.parametrize(
    ("kind_of_gpu", "library"),
    [("stand-in", "interface"), *(pytest.param("gpu", each, marks=pytest.mark.gpu) for each in LIBRARIES)],
    indirect=["kind_of_gpu"],
)


@EACH_LIBRARY
@pytest.mark.parametrize("store", ["local", "device"])
@pytest.mark.parametrize("rule", ["", "adam"])
def test_a_store_takes_and_fills_arrays_on_the_gpu(kind_of_gpu: str, library: str, store: str, rule: str) -> None:
    make = LIBRARIES[library]
    weight, given = values((7, 5), F32, 1), [values((7, 5), F32, seed) for seed in (2, 3)]
    expected = np.empty((7, 5), np.float32)
    with kvstore.create("local") as plain, kvstore.create(store) as kv:
        for each, form in ((plain, np.array), (kv, make)):
            if rule:
                each.set_optimizer(rule, learning_rate=0.1)
            each.init("w", form(weight))
            for _ in range(STEPS):
                each.push("w", [form(value) for value in given])
        plain.pull("w", out=expected)
        outs = [make(np.zeros((7, 5), np.float32)) for _ in range(2)]
        kv.pull("w", out=outs)
        for out in outs:
            assert host(out).tobytes() == expected.tobytes()


@EACH_LIBRARY
@pytest.mark.parametrize("store", ["dist_sync", "dist_device_sync"])
def test_a_store_of_a_job_takes_and_fills_arrays_on_the_gpu(kind_of_gpu: str, library: str, store: str) -> None:
    make = LIBRARIES[library]
    shapes = [(3,), (7, 5), (1100,)]
    given = [[values(shape, F32, 10 * rank + key) for key, shape in enumerate(shapes)] for rank in range(2)]
    lock = threading.Lock()
    found: dict[int, list[Array]] = {}
    device = "gpu:0" if store == "dist_device_sync" else "cpu:0"

    def script(kv: KVStore) -> None:
        keys = list(range(len(shapes)))
        kv.init(keys, [make(np.zeros(shape, np.float32)) for shape in shapes])
        mine = [[make(value), make(value)] for value in given[kv.rank]]
        outs = [[make(np.zeros(shape, np.float32)) for _ in range(2)] for shape in shapes]
        for _ in range(2):
            kv.pushpull(keys, mine, out=outs)
        with lock:
            found[kv.rank] = [host(out) for each in outs for out in each]
        assert devices_of(kv) == {device}

    with Cluster(server_device=ASKED[device]) as cluster:
        cluster.run(script, store)
    for key in range(len(shapes)):
        doubled = [total_of(CpuDevice(), [given[rank][key]] * 2) for rank in range(2)]
        expected = {total_of(CpuDevice(), order).tobytes() for order in (doubled, doubled[::-1])}
        for rank in range(2):
            for out in found[rank][2 * key : 2 * key + 2]:
                assert out.tobytes() in expected


def devices_of(kv: KVStore) -> set[str]:
    """Return where the servers that have keys keep them."""
    return {each["device"] for each in kv.stats() if each["keys"]}


@ON_BOTH
@pytest.mark.parametrize(("before", "after"), [("gpu:0", "cpu:0"), ("cpu:0", "gpu:0")])
def test_states_that_were_saved_on_one_device_go_on_on_the_other(
    kind_of_gpu: str, before: str, after: str, tmp_path: Path
) -> None:
    shapes = [(3,), (7, 5), (1100,)]
    keys, given = list(range(len(shapes))), [values(shape, F32, key) for key, shape in enumerate(shapes)]

    def rounds(kv: KVStore, out: list[Array]) -> None:
        for _ in range(2):
            kv.pushpull(keys, given, out=out)

    def begun(kv: KVStore) -> list[Array]:
        kv.set_optimizer("adam", learning_rate=0.1)
        kv.init(keys, [values(shape, F32, 10 + key) for key, shape in enumerate(shapes)])
        return [np.empty(shape, np.float32) for shape in shapes]

    def saves(kv: KVStore) -> list[bytes]:
        out = begun(kv)
        rounds(kv, out)
        assert devices_of(kv) == {before}
        kv.save_states(tmp_path / "states")
        rounds(kv, out)
        return [each.tobytes() for each in out]

    def loads(kv: KVStore) -> list[bytes]:
        out = begun(kv)
        kv.load_states(tmp_path / "states")
        assert devices_of(kv) == {after}
        rounds(kv, out)
        return [each.tobytes() for each in out]

    with Cluster(1, 2, server_device=ASKED[before]) as cluster:
        expected = cluster.run(saves)
    with Cluster(1, 2, server_device=ASKED[after]) as cluster:
        assert cluster.run(loads) == expected
