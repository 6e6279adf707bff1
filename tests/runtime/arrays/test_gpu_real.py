"""What has to hold on a real GPU, where there is one; most of it is also run on the stand-in, with small arrays.

On a real GPU there are two devices: two GPUs, or two devices on the only one. `scripts/gpu-check` runs this.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpuhistories import EACH_HISTORY
from gpukit import Machine, values
from kernelcheck import same
from realgpus import ON_BOTH, ON_REAL
from sums import total as total_of

from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.device import CpuDevice
from distrun_runtime.arrays.gpu import GpuArray, GpuDevice, ListLaunch, TensorColumn
from distrun_runtime.arrays.gpu_devices import Gpus
from distrun_runtime.ops import compression, fuse, optimizers, update

F32 = np.dtype(np.float32)
FUSED = [name for name, rule in optimizers.RULES.items() if not fuse.why_not(rule({}))]
IS_SMALL = bool(os.environ.get("DISTRUN_TEST_SMALL_ARRAYS"))
"""`scripts/gpu-check` says it where a sanitizer checks each thread, which takes long."""
TURNS = 2 if IS_SMALL else 20
STEPS = 3


@pytest.fixture
def gpus(kind_of_gpu: str) -> Gpus:
    return devices.gpus()


@pytest.fixture
def length(kind_of_gpu: str) -> int:
    """Elements of an array: odd, and on a real GPU more than a launch has threads, or more than a block has."""
    return 301 if kind_of_gpu != "gpu" else 4099 if IS_SMALL else (1 << 20) + 3


@pytest.fixture
def machine(gpus: Gpus) -> Any:
    """What histories use of a Machine."""
    count = gpus.order.cuda.count()

    def get(number: int, part: int | None = None) -> GpuDevice:
        return gpus.get(number, part) if number < count else gpus.get(0, 100 + number)

    return SimpleNamespace(gpus=SimpleNamespace(get=get, locked=gpus.locked, borrowing=gpus.borrowing))


@ON_REAL  # `test_gpu_histories` has them on the stand-in
@EACH_HISTORY
def test_every_history_is_right(machine: Machine, history: Callable[[Machine], None]) -> None:
    for _ in range(TURNS):
        history(machine)


@ON_REAL
def test_a_thread_that_has_chosen_no_gpu_has_chosen_none_after_a_call(gpus: Gpus) -> None:
    driver: Any = importlib.import_module("cupy").cuda.driver

    def used() -> int:
        device = gpus.get(0)
        same(device.host(device.put(values((100,), F32))), values((100,), F32), "a value put and read back")
        return int(driver.ctxGetCurrent())

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(used).result() == 0


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
        assert device.host(total_of(device, mine)).tobytes() == total_of(CpuDevice(), parts).tobytes()
        # At addresses that 16 does not divide.
        odd = [part[1:] for part in parts]
        out = device.empty((length,), kind)
        device.sum([each[1:] for each in mine], out[: length - 1])
        assert device.host(out[: length - 1]).tobytes() == total_of(CpuDevice(), odd).tobytes()


@ON_BOTH
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sums_of_several_devices_have_the_bytes_of_the_cpus(gpus: Gpus, length: int, dtype: str) -> None:
    kind = dtypes.parse(dtype)
    devices = [gpus.get(0, 0), gpus.get(0, 1), gpus.get(0)]
    parts = [values((length,), kind, seed) for seed in range(4)]
    given = [device.put(part) for device, part in zip(devices, parts[:3], strict=True)]
    expected = total_of(CpuDevice(), parts).tobytes()
    for device in devices:
        assert device.host(total_of(device, [*given, parts[3]])).tobytes() == expected


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
    ("kind_of_gpu", "dtype"),  # `test_fuse` has all dtypes as C++
    [
        ("stand-in", "float32"),
        *(pytest.param("gpu", each, marks=pytest.mark.gpu) for each in ("float32", "float16", "bfloat16", "float64")),
    ],
    indirect=["kind_of_gpu"],
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


def launch(device: GpuDevice, step: fuse.FusedStep, arrays: dict[str, GpuArray], length: int) -> None:
    columns = [TensorColumn.of(fuse.USES[each.access], [arrays[each.name]]) for each in step.arrays]
    ListLaunch(device, step.program, step.kernel.name, columns, [length]).run(step.scalars)


# Codecs


@ON_BOTH
@pytest.mark.parametrize("name", ["2bit", "1bit", "fp16", "topk"])
def test_codecs_have_the_bytes_of_the_cpus(gpus: Gpus, length: int, name: str) -> None:
    device, codec = gpus.get(0), compression.named(name)
    params = codec.check({})
    left = np.zeros(length, np.float32) if codec.has_residual else None
    there = None if left is None else device.put(left)
    out, expected = device.zeros((length,), F32), np.zeros(length, np.float32)
    for seed in range(STEPS):
        pushed = np.round(values((length,), F32, seed), 1)  # with equal ones, among which top-k chooses
        payload = bytes(codec.encode(pushed, left, params))
        assert bytes(codec.encode(device.put(pushed), there, params)) == payload
        if left is not None:
            assert device.host(there).tobytes() == left.tobytes()
        codec.read(payload, expected, params, adds=True)
        codec.read(payload, out, params, adds=True)
        assert device.host(out).tobytes() == expected.tobytes()
