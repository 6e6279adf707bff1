"""The same histories on a real GPU, where there is one: two devices on it, if there is only one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpuhistories import EACH_HISTORY
from gpukit import Machine, values

from distrun_runtime.arrays import cupydriver, dtypes
from distrun_runtime.arrays.cpu import CpuDevice
from distrun_runtime.arrays.cuda import CudaMissing
from distrun_runtime.arrays.gpu import GpuDevice, Gpus

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpus() -> Gpus:
    try:
        return Gpus(cupydriver.of_process(), wait_s=60)
    except CudaMissing as err:
        pytest.skip(str(err))


@pytest.fixture
def machine(gpus: Gpus) -> Any:
    """What histories use of a Machine."""
    count = gpus.order.cuda.count()

    def get(number: int, part: int | None = None) -> GpuDevice:
        return gpus.get(number, part) if number < count else gpus.get(0, 100 + number)

    return SimpleNamespace(gpus=SimpleNamespace(get=get, locked=gpus.locked))


@EACH_HISTORY
def test_every_history_is_right(machine: Machine, history: Callable[[Machine], None]) -> None:
    for _ in range(20):
        history(machine)


@pytest.mark.parametrize("dtype", dtypes.NAMES)
def test_sums_of_large_arrays_have_the_bytes_of_the_cpus(gpus: Gpus, dtype: str) -> None:
    device, kind = gpus.get(0), dtypes.parse(dtype)
    for count in (1, 2, 5, 9):
        parts = [values((1 << 20,), kind, seed) for seed in range(count)]
        sums = device.host(device.total([device.put(part) for part in parts]))
        assert sums.tobytes() == CpuDevice().total(parts).tobytes()


def test_a_gpu_says_what_it_is(gpus: Gpus) -> None:
    found = gpus.order.cuda.properties(0)
    free, total = gpus.order.cuda.memory(0)
    assert 0 < free <= total
    assert found.memory >= total
    assert found.architecture.startswith("sm_")
    assert np.iinfo(np.int32).max > found.processors > 0
