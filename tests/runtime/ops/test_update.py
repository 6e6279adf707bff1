"""Steps of a rule over flat arrays in chunks."""

from __future__ import annotations

import numpy as np
import pytest

from distrun_runtime.arrays.cpu import CpuDevice, Threads
from distrun_runtime.ops import optimizers, update

FLOAT = np.dtype(np.float32)
FLAT = [
    name
    for name, kind in sorted(optimizers.RULES.items())
    if kind.is_elementwise and not issubclass(kind, optimizers.NormRule)
]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", FLAT)
def test_steps_in_chunks_by_any_number_of_threads_give_the_bits_of_steps_of_the_whole(name: str, threads: int) -> None:
    device, rng = CpuDevice(threads=Threads(threads, bound=1000)), np.random.default_rng(0)
    rule = optimizers.RULES[name]({})
    size = 2 * update.CHUNK + 17
    weight = rng.normal(size=size).astype(FLOAT)
    expected = weight.copy()
    state, expected_state = rule.new_state(weight), rule.new_state(expected)
    for workers in (2, 1, 3):
        parts = [rng.normal(size=size).astype(FLOAT) for _ in range(workers)]
        update.step(rule, weight, parts, state, optimizers.Knobs(), device=device)
        rule.step(expected, device.total(parts), expected_state)
    assert state["updates"] == 3
    assert weight.tobytes() == expected.tobytes()
    assert {each: np.asarray(value).tobytes() for each, value in state.items()} == {
        each: np.asarray(value).tobytes() for each, value in expected_state.items()
    }
