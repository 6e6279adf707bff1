"""GPUs of the stand-in, for tests of what is above `arrays.cuda`. Needs a C++ compiler, else the test is skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cxx
import numpy as np
from cudastandin import StandIn

from distrun_runtime.arrays import cupy_driver, dtypes
from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays.cuda import Cuda, Driver
from distrun_runtime.arrays.dtypes import Array, DType
from distrun_runtime.arrays.gpu_devices import Gpus
from distrun_runtime.arrays.shared_memory import BLOCKS, Blocks


class Machine:
    """A stand-in, and its devices as distrun has them.

    Arguments:
        driver: what goes between the two: given the stand-in, it returns the driver to use.
        blocks: shared memory that the devices page-lock.
        options: for the stand-in.
    """

    def __init__(
        self,
        devices: int = 2,
        *,
        driver: Callable[[StandIn], Driver] | None = None,
        blocks: Blocks | None = None,
        **options: Any,
    ) -> None:
        self.standin = StandIn(devices, compiled=cxx.compiled, **options)
        self.cuda = Cuda(self.standin if driver is None else driver(self.standin))
        self.gpus = Gpus(self.cuda, wait_s=60, blocks=blocks)

    def finish(self) -> None:
        self.standin.finish()


@contextmanager
def gpus_of_process(machine: Machine) -> Iterator[Machine]:
    """Let a machine's devices be those of this process in the block: `devices.get("gpu:0")` returns `gpus.get(0)`."""
    opened, gpus = list(cupy_driver._opened), list(devices._gpus)
    cupy_driver._opened[:], devices._gpus[:] = [machine.cuda], [machine.gpus]
    try:
        yield machine
    finally:
        cupy_driver._opened[:], devices._gpus[:] = opened, gpus
        BLOCKS.watch(None)


def values(shape: tuple[int, ...], dtype: DType, seed: int = 0) -> Array:
    """Return random values that fit a dtype: whole numbers of both signs and, of floats, fractions."""
    random = np.random.default_rng(seed)
    if not dtypes.is_float(dtype):
        info = np.iinfo(dtype)
        return random.integers(info.min, info.max, shape, dtype, endpoint=True)
    return dtypes.narrow(random.normal(0, 3, shape).astype(dtypes.work_dtype(dtype)), dtype)
