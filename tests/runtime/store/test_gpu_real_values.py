"""Arrays of other libraries in a GPU's memory as values and outputs of stores: on a real GPU, and on the stand-in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cluster import Cluster
from gpukit import values

from distrun_runtime import kvstore
from distrun_runtime.arrays import find
from distrun_runtime.arrays.cpu import CpuDevice
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.kvstore import KVStore

F32 = np.dtype(np.float32)
STEPS = 3


class Interface:
    """An array of a library that has `__cuda_array_interface__` and no stream: all of its work is done."""

    def __init__(self, array: Array) -> None:
        device = find.gpu(0)
        self.array = device.put(array)
        device.synchronize()
        self.__cuda_array_interface__ = {
            **{"shape": array.shape, "typestr": array.dtype.str, "version": 3, "stream": None},
            "data": (self.array.pointer.address, False),
        }

    def host(self) -> Array:
        device = find.gpu(0)
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

    def script(kv: KVStore) -> None:
        keys = list(range(len(shapes)))
        kv.init(keys, [make(np.zeros(shape, np.float32)) for shape in shapes])
        mine = [[make(value), make(value)] for value in given[kv.rank]]
        outs = [[make(np.zeros(shape, np.float32)) for _ in range(2)] for shape in shapes]
        for _ in range(2):
            kv.pushpull(keys, mine, out=outs)
        with lock:
            found[kv.rank] = [host(out) for each in outs for out in each]

    with Cluster() as cluster:
        cluster.run(script, store)
    for key in range(len(shapes)):
        doubled = [CpuDevice().total([given[rank][key]] * 2) for rank in range(2)]
        expected = {CpuDevice().total(order).tobytes() for order in (doubled, doubled[::-1])}
        for rank in range(2):
            for out in found[rank][2 * key : 2 * key + 2]:
                assert out.tobytes() in expected
