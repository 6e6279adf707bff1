"""What has to hold on a real GPU, where there is one; most of it is also run on the stand-in, with small arrays.

On a real GPU there are two devices: two GPUs, or two devices on the only one. `scripts/gpu-check` runs this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cluster import Cluster
from gpuhistories import EACH_HISTORY
from gpukit import Machine, gpus_of_process, values
from kernelcheck import same

from distrun_runtime import kvstore
from distrun_runtime.arrays import cupydriver, dtypes, find
from distrun_runtime.arrays.cpu import CpuDevice
from distrun_runtime.arrays.cuda import CudaMissing
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.arrays.gpu import GpuArray, GpuDevice, Gpus
from distrun_runtime.arrays.programs import Access
from distrun_runtime.kvstore import KVStore
from distrun_runtime.ops import fuse, optimizers, update

F32 = np.dtype(np.float32)
REAL = pytest.param("gpu", marks=pytest.mark.gpu)
ON_BOTH = pytest.mark.parametrize("where", ["stand-in", REAL], indirect=True)
ON_REAL = pytest.mark.parametrize("where", [REAL], indirect=True)
FUSED = [name for name, rule in optimizers.RULES.items() if not fuse.why_not(rule({}))]
STEPS = 3


@pytest.fixture
def where(request: pytest.FixtureRequest) -> Iterator[str]:
    """Whether the process's GPUs are real ones or the stand-in's."""
    if request.param == "gpu":
        try:
            cupydriver.of_process()
        except CudaMissing as err:
            pytest.skip(str(err))
        yield "gpu"
        return
    with gpus_of_process(Machine(2)) as machine:
        yield "stand-in"
        machine.finish()


@pytest.fixture
def gpus(where: str) -> Gpus:
    find.gpu(0)
    return find._gpus[0]


@pytest.fixture
def length(where: str) -> int:
    """Elements of an array: odd, and on a real GPU more than a launch has threads."""
    return (1 << 20) + 3 if where == "gpu" else 301


@pytest.fixture
def machine(gpus: Gpus) -> Any:
    """What histories use of a Machine."""
    count = gpus.order.cuda.count()

    def get(number: int, part: int | None = None) -> GpuDevice:
        return gpus.get(number, part) if number < count else gpus.get(0, 100 + number)

    return SimpleNamespace(gpus=SimpleNamespace(get=get, locked=gpus.locked))


@ON_REAL  # `test_gpu_histories` has them on the stand-in
@EACH_HISTORY
def test_every_history_is_right(machine: Machine, history: Callable[[Machine], None]) -> None:
    for _ in range(20):
        history(machine)


@ON_REAL
def test_a_gpu_says_what_it_is(gpus: Gpus) -> None:
    found = gpus.order.cuda.properties(0)
    free, total = gpus.order.cuda.memory(0)
    assert 0 < free <= total
    assert found.memory >= total
    assert found.architecture.startswith("sm_")
    assert np.iinfo(np.int32).max > found.processors > 0


# Sums


@ON_BOTH
@pytest.mark.parametrize("dtype", dtypes.NAMES)
def test_sums_have_the_bytes_of_the_cpus(gpus: Gpus, length: int, dtype: str) -> None:
    device, kind = gpus.get(0), dtypes.parse(dtype)
    for count in (1, 2, 5, 9):
        parts = [values((length,), kind, seed) for seed in range(count)]
        mine = [device.put(part) for part in parts]
        assert device.host(device.total(mine)).tobytes() == CpuDevice().total(parts).tobytes()
        # At addresses that 16 does not divide.
        odd = [part[1:] for part in parts]
        out = device.empty((length,), kind)
        device.sum([each[1:] for each in mine], out[: length - 1])
        assert device.host(out[: length - 1]).tobytes() == CpuDevice().total(odd).tobytes()


@ON_BOTH
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sums_of_several_devices_have_the_bytes_of_the_cpus(gpus: Gpus, length: int, dtype: str) -> None:
    kind = dtypes.parse(dtype)
    devices = [gpus.get(0, 0), gpus.get(0, 1), gpus.get(0)]
    parts = [values((length,), kind, seed) for seed in range(4)]
    given = [device.put(part) for device, part in zip(devices, parts[:3], strict=True)]
    expected = CpuDevice().total(parts).tobytes()
    for device in devices:
        assert device.host(device.total([*given, parts[3]])).tobytes() == expected


@ON_REAL
def test_a_sum_of_more_than_2_to_the_31_elements_is_right_everywhere(gpus: Gpus) -> None:
    device, size = gpus.get(0), 2**31 + 2**20 + 3
    free, _ = gpus.order.cuda.memory(0)
    if free < 4 * size:
        pytest.skip("%d bytes are free on this GPU, and %d are needed" % (free, 4 * size))
    part, out = device.zeros((size,), np.dtype(np.uint8)), device.zeros((size,), np.dtype(np.uint8))
    for begin in (0, 2**31 - 500, size - 1000):
        device.write(part[begin : begin + 1000], np.arange(1000, dtype=np.uint8))
    device.sum([part, part], out)
    for begin in (0, 2**31 - 500, size - 1000):
        found = device.host(out[begin : begin + 1000])
        assert found.tobytes() == (np.arange(1000, dtype=np.uint8) * np.uint8(2)).tobytes()
    assert not device.host(out[2**30 : 2**30 + 1000]).any()
    del part, out
    device.pool.trim()


# Rules


@pytest.mark.parametrize(
    ("where", "dtype"),  # `test_fuse` has all dtypes as C++
    [
        ("stand-in", "float32"),
        *(pytest.param("gpu", each, marks=pytest.mark.gpu) for each in ("float32", "float16", "bfloat16", "float64")),
    ],
    indirect=["where"],
)
def test_steps_of_rules_have_the_bytes_of_the_cpus(gpus: Gpus, length: int, dtype: str) -> None:
    device, kind = gpus.get(0), dtypes.parse(dtype)
    rules = [optimizers.RULES[name]({}) for name in FUSED]
    made = [fuse.Fused(rule, kind, [kind, kind]) for rule in rules]
    device.load(fuse.together("real_%s" % dtype, made))
    for rule, fused in zip(rules, made, strict=True):
        weight = values((length,), kind, 1)
        state, updates = rule.new_state(weight), {"updates": 0}
        mine = {fuse.WEIGHT: device.put(weight)}
        for each in fused.states:
            mine[fuse.STATE % each.name] = device.put(np.asarray(state[each.name]))
        for number in range(STEPS):
            parts = [values((length,), kind, 10 * number + seed) for seed in range(2)]
            update.step(rule, weight, parts, state, optimizers.PLAIN, device=CpuDevice())
            for seed, part in enumerate(parts):
                mine[fuse.PART % seed] = device.put(part)
            launch(device, fused.step(rule.rates(updates, optimizers.PLAIN)), mine, length)
        same(device.host(mine[fuse.WEIGHT]), weight, rule.name)
        for each in fused.states:
            same(device.host(mine[fuse.STATE % each.name]), state[each.name], "%s: %s" % (rule.name, each.name))


def launch(device: GpuDevice, step: fuse.Step, arrays: dict[str, GpuArray], length: int) -> None:
    used = [each for each in step.kernel.parameters if each.access is not Access.SCALAR]
    reads = [arrays[each.name] for each in used if each.access is not Access.WRITE]
    writes = [arrays[each.name] for each in used if each.access is not Access.READ]
    arguments = step.arguments({name: each.pointer for name, each in arrays.items()}, length)
    device.launch(step.program, step.kernel.name, arguments, length, reads=reads, writes=writes)


# Arrays of other libraries, in stores


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
    ("where", "library"),
    [("stand-in", "interface"), *(pytest.param("gpu", each, marks=pytest.mark.gpu) for each in LIBRARIES)],
    indirect=["where"],
)


@EACH_LIBRARY
@pytest.mark.parametrize("store", ["local", "device"])
@pytest.mark.parametrize("rule", ["", "adam"])
def test_a_store_takes_and_fills_arrays_on_the_gpu(where: str, library: str, store: str, rule: str) -> None:
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
def test_a_store_of_a_job_takes_and_fills_arrays_on_the_gpu(where: str, library: str, store: str) -> None:
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
