"""Random histories on several GPUs give what numpy gives, whatever order the GPUs work in."""

from __future__ import annotations

from typing import Any

import numpy as np
from gpukit import Machine
from hypothesis import given, settings
from hypothesis import strategies as st
from sums import add as add_to
from sums import total as total_of

from distrun_runtime.arrays import gpu
from distrun_runtime.arrays.gpu import GpuArray, GpuDevice
from distrun_runtime.arrays.gpu_memory import Staging

N = 150
F32 = np.dtype(np.float32)

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "move", "total", "add", "scale", "sum", "host", "read", "drop", "elements", "trim"]),
        st.integers(0, 2),  # the device
        st.integers(0, 5),  # arrays
        st.integers(0, 5),
    ),
    max_size=25,
)


class History:
    """Arrays on devices, each with the numpy array that it should be equal to."""

    def __init__(self, seed: int) -> None:
        self.machine = Machine(2, seed=seed)
        gpus = self.machine.gpus
        self.devices: list[GpuDevice] = [gpus.get(0, 0), gpus.get(0, 1), gpus.get(1)]
        for device in self.devices:
            device._staging = Staging(gpus.order, 256, 2)
        self.locked = np.zeros(N, F32)
        assert gpus.locked.lock(self.locked)
        self.arrays: list[tuple[GpuArray, Any]] = []
        self.number = 0

    def fresh(self) -> Any:
        self.number += 1
        return np.arange(N, dtype=F32) + np.float32(1000 * self.number)

    def keep(self, array: GpuArray, known: Any) -> None:
        self.arrays = [*self.arrays, (array, known)][-6:]

    def step(self, what: str, number: int, one: int, other: int) -> None:
        device = self.devices[number]
        if what == "put" or not self.arrays:
            known = self.fresh()
            if one % 2:
                self.locked[...] = known
                self.keep(device.put(self.locked), known)
            else:
                self.keep(device.put(known), known)
            return
        (a, known_a), (b, known_b) = self.arrays[one % len(self.arrays)], self.arrays[other % len(self.arrays)]
        if what == "move":
            self.keep(device.put(a), known_a.copy())
        elif what == "total":
            self.keep(total_of(device, [a, known_b, b]), known_a + known_b + known_b)
        elif what == "add":
            add_to(a.device, a, b)
            known_a += known_b.copy()
        elif what == "scale":
            a.device.scale(a[10:140], 0.5)
            known_a[10:140] *= np.float32(0.5)
        elif what == "sum":
            mine = a.device.put(b)
            a.device.sum([mine, a, mine], a)
            known_a[...] = known_b + known_a + known_b
        elif what == "host":
            np.testing.assert_array_equal(a.device.host(a), known_a)
        elif what == "read":
            a.device.read(a, self.locked)
            np.testing.assert_array_equal(self.locked, known_a)
        elif what == "drop":
            del self.arrays[one % len(self.arrays)]
        elif what == "elements":
            frame = bytearray(known_a.tobytes())
            self.keep(device.elements(frame, F32), known_a.copy())
            frame[:] = bytes(len(frame))
        else:
            device.pool.trim()

    def finish(self) -> None:
        for array, known in self.arrays:
            np.testing.assert_array_equal(array.device.host(array), known)
        self.machine.finish()


@settings(max_examples=40)
@given(seed=st.integers(0, 5), steps=STEPS)
def test_random_histories_are_those_of_numpy(seed: int, steps: list[tuple[str, int, int, int]]) -> None:
    before, gpu.RING_BYTES = gpu.RING_BYTES, 1024
    try:
        history = History(seed)
        for step in steps:
            history.step(*step)
        history.finish()
    finally:
        gpu.RING_BYTES = before
