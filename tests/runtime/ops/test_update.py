"""Steps of a rule over flat arrays in chunks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gpukit import Machine, values
from sums import total as total_of

from distrun_runtime.arrays.cores import Threads
from distrun_runtime.arrays.device import CpuDevice, on_host
from distrun_runtime.arrays.dtypes import DType
from distrun_runtime.errors import KVError
from distrun_runtime.ops import fuse, optimizers, update

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
        rule.step(expected, total_of(device, parts), expected_state)
    assert state["updates"] == 3
    assert weight.tobytes() == expected.tobytes()
    assert {each: np.asarray(value).tobytes() for each, value in state.items()} == {
        each: np.asarray(value).tobytes() for each, value in expected_state.items()
    }


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_steps_of_several_weights_that_threads_share_have_the_bits_of_each_alone(name: str) -> None:
    rule, found = optimizers.RULES[name]({}), []
    for threads in (1, 3):
        device, items = CpuDevice(threads=Threads(threads, bound=1000)), []
        for size in (2 * update.CHUNK + 17, 5, 0, 9000):
            weight = np.linspace(0, 1, size, dtype=FLOAT)
            parts = [np.sin(weight), np.cos(weight)]
            items.append(update.WeightStep(weight, parts, rule.new_state(weight), optimizers.Knobs()))
        for _ in range(2):
            update.step_all(rule, items, device=device)
        found.append(
            [
                (each.weight.tobytes(), sorted((n, np.asarray(v).tobytes()) for n, v in each.state.items()))
                for each in items
            ]
        )
        assert [each.state["updates"] for each in items] == [2, 2, 2, 2]
    assert found[0] == found[1]


# On GPUs

HALF = np.dtype(np.float16)


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize("name", FLAT)
def test_steps_on_a_gpu_have_the_bytes_of_steps_in_host_memory(name: str, dtype: DType) -> None:
    """One machine a rule and type: rules with a master, by one part and by two, and parts in the work type."""
    machine = Machine(1)
    device = machine.gpus.get(0)
    params = {"multi_precision": True} if name != "test" else {}
    rule, size = optimizers.RULES[name](params), 37
    weight = values((size,), dtype)
    mine = device.put(weight)
    state = rule.new_state(weight)
    there = update.new_state(rule, mine)
    assert list(there) == list(state)
    update.prepare(rule, [dtype], device)
    programs = machine.standin.calls["load"]
    for step, kinds in enumerate([(dtype,), (dtype, dtype), (FLOAT,), (FLOAT, dtype)]):
        parts = [values((size,), kind, 10 * step + number) for number, kind in enumerate(kinds)]
        knobs = optimizers.Knobs(lr_mult=1.0 + step)
        update.step(rule, weight, parts, state, knobs, device=CpuDevice())
        update.step(rule, mine, [device.put(part) for part in parts], there, knobs, device=device)
        assert there["updates"] == state["updates"] == step + 1
        assert device.host(mine).tobytes() == weight.tobytes()
        for each, value in state.items():
            if isinstance(value, np.ndarray):
                assert device.host(there[each]).tobytes() == value.tobytes()
    assert machine.standin.calls["load"] == programs, "something was compiled in a step"
    machine.finish()


def flat_state(state: optimizers.State) -> dict[str, Any]:
    """Return what a state holds, as bytes and numbers."""
    return {name: value if isinstance(value, int) else on_host(value).tobytes() for name, value in state.items()}


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize("name", FLAT)
def test_steps_of_many_weights_on_a_gpu_have_the_bytes_of_steps_in_host_memory(name: str, dtype: DType) -> None:
    """Weights of any size at any address, with rates, decays and numbers of updates of their own; by one and two parts.

    Those that take the same step share a launch."""
    machine = Machine(1)
    device = machine.gpus.get(0)
    params = {"multi_precision": True, "wd": 0.1, "learning_rate": 0.1} if name != "test" else {}
    rule = optimizers.RULES[name](params)
    update.prepare(rule, [dtype], device)
    sizes, knobs = (1, 0, 5000, 37, 8, 64, 3), optimizers.Knobs(lr_mult=2.0)
    ends = np.cumsum(sizes)
    whole = values((int(ends[-1]),), dtype)
    mine = device.put(whole)  # end to end: most begin between two multiples of 16 bytes
    cuts = [slice(int(end) - size, int(end)) for end, size in zip(ends, sizes, strict=True)]
    states = [rule.new_state(whole[cut]) for cut in cuts]
    there = [update.new_state(rule, mine[cut]) for cut in cuts]

    def step(some: Sequence[int], kinds: Sequence[DType], apart: Sequence[int] = (), seed: int = 0) -> int:
        given = [[values((sizes[each],), kind, seed + each) for kind in kinds] for each in some]
        launches = machine.standin.calls["launch"]
        for on, weight, held in ((CpuDevice(), whole, states), (device, mine, there)):
            parts = [[on.put(part) for part in each] for each in given]
            items = [
                update.WeightStep(weight[cuts[each]], part, held[each], knobs if each in apart else optimizers.PLAIN)
                for each, part in zip(some, parts, strict=True)
            ]
            update.step_all(rule, items, device=on)
        assert device.host(mine).tobytes() == whole.tobytes()
        assert [flat_state(each) for each in there] == [flat_state(each) for each in states]
        return machine.standin.calls["launch"] - launches

    assert step(range(7), [dtype]) == 1
    assert step(range(7), [FLOAT, dtype], seed=100) == 1
    assert step([4, 2], [dtype], seed=200) == 1
    found = step(range(7), [dtype], apart=[0, 6], seed=300)
    assert found == 3 if name == "adam" else found <= 3, "of two rates, and of two numbers of updates"
    with pytest.raises(KVError, match="expected part_0 with 3 elements on gpu:0"):
        update.step_all(rule, [update.WeightStep(mine[cuts[6]], [device.put(whole[:2])], there[6], knobs)] * 2)
    machine.finish()


def test_what_a_gpu_does_not_update_is_refused_and_not_counted() -> None:
    machine = Machine(1)
    device = machine.gpus.get(0)
    weight = device.put(np.ones(4, np.float32))
    rule = optimizers.make("sgd", {})
    state = update.new_state(rule, weight)
    with pytest.raises(KVError, match="expected part_0 with 4 elements on gpu:0, found an array of numpy's"):
        update.update(rule, weight, np.ones(4, np.float32), state)
    with pytest.raises(KVError, match="rows are updated in host memory, not on gpu:0"):
        update.update(rule, weight, weight, state, rows=np.array([0]))
    for name in ("lamb", "sgld"):
        with pytest.raises(fuse.Untraceable, match="cannot fuse: rule %r" % name):
            update.update(optimizers.make(name, {}), weight, weight, state)
        assert not update.can_fuse(optimizers.make(name, {}))
    assert state == {"updates": 0}
    machine.finish()


def test_kernels_of_a_rule_are_not_kept_longer_than_the_rule() -> None:
    rule = optimizers.make("adam", {})
    gone = weakref.ref(rule)
    machine = Machine(1)
    update.prepare(rule, [FLOAT], machine.gpus.get(0))
    del rule
    gc.collect()
    assert gone() is None
