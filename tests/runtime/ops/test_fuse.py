"""Kernels that are made of rules: compiled for this machine, they give the bytes that the rules give with numpy."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import cxx
import numpy as np
import numpy.typing as npt
import pytest

from distrun_runtime.arrays.cpu import CpuDevice
from distrun_runtime.arrays.dtypes import narrow, parse, widen, work_dtype
from distrun_runtime.ops import fuse, update
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops.programs import Access

Array = npt.NDArray[Any]

LONG = 1031
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, LONG)
STEPS = 5
WARMING = {"type": "factor", "base_lr": 0.1, "step": 2, "factor": 0.5, "warmup_steps": 2, "warmup_mode": "constant"}

# What makes a rule go other ways; the first is what it does by default.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "sgd": [{}, {"momentum": 0.9}, {"momentum": 0.9, "wd": 0.1, "clip_gradient": 0.5, "rescale_grad": 0.25}],
    "nag": [{}, {"momentum": 0.9}, {"momentum": 0.9, "wd": 0.1, "clip_gradient": 0.5}],
    "signum": [{}, {"momentum": 0.0}, {"momentum": 0.0, "wd": 0.1}, {"wd": 0.1, "wd_lh": 0.1, "clip_gradient": 0.5}],
    "dcasgd": [{}, {"momentum": 0.9, "wd": 0.1, "lamda": 0.5, "clip_gradient": 0.5}],
    "adam": [{}, {"wd": 0.1, "clip_gradient": 0.5}, {"rescale_grad": 1 / 3, "beta1": 0.0, "epsilon": 0.0}],
    "adamw": [{}, {"wd": 0.1}, {"wd": 0.1, "correct_bias": False, "clip_gradient": 0.5}],
    "torch_adamw": [{}, {"wd": 0.0, "clip_gradient": 0.5}],
    "adamax": [{}, {"epsilon": 0.0}, {"wd": 0.1, "clip_gradient": 0.5}],
    "nadam": [{}, {"wd": 0.1, "clip_gradient": 0.5}, {"beta1": 0.5, "schedule_decay": 50.0}],
    "rmsprop": [{}, {"centered": True}, {"centered": True, "wd": 0.1, "clip_weights": 1.0, "clip_gradient": 0.5}],
    "adagrad": [{}, {"wd": 0.1, "clip_gradient": 0.5}],
    "adadelta": [{}, {"wd": 0.1, "clip_gradient": 0.5}],
    "ftrl": [{}, {"lamda1": 0.1, "wd": 0.1, "clip_gradient": 0.5}, {"beta": 0.0, "lamda1": 0.0}],
    "ftml": [{}, {"wd": 0.1, "clip_gradient": 0.5}],
    "test": [{}, {"rescale_grad": 0.3}],
}
FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int8", "int64", "uint8", "int32", "uint16")


@dataclass(frozen=True)
class Case:
    """One rule for weights of one type, and what its gradients are."""

    name: str
    params: str
    """JSON."""
    dtype: str
    parts: tuple[str, ...]

    def __str__(self) -> str:
        words = [f"{word}={value}" for word, value in json.loads(self.params).items()]
        return "-".join([self.name, self.dtype, "+".join(self.parts), *words])

    def rule(self) -> rules.Rule:
        return rules.make(self.name, json.loads(self.params))


def case(name: str, params: dict[str, Any], dtype: str, parts: Sequence[str]) -> Case:
    return Case(name, json.dumps(params), dtype, tuple(parts))


def few() -> Iterator[Case]:
    """Every rule with every variant for float32, and with the last one for the other types."""
    for name, variants in VARIANTS.items():
        for number, params in enumerate(variants):
            yield case(name, params, "float32", ["float32"] * (1 + number))
        yield case(name, variants[-1], "float64", ["float64"])
        yield case(name, {**variants[-1], "multi_precision": True}, "bfloat16", ["bfloat16"])
    yield case("adam", {}, "float16", ["float16", "float32"])
    yield case("sgd", {"momentum": 0.9}, "bfloat16", ["float32", "bfloat16", "bfloat16"])
    yield case("test", {"rescale_grad": -3}, "int8", ["int8", "int8"])
    yield case("ftml", {"lr_scheduler": WARMING}, "float32", ["float32"])


def all_others() -> Iterator[Case]:
    for name, variants in VARIANTS.items():
        for params, dtype, master in itertools.product(variants, FLOATS, (False, True)):
            work = "float32" if dtype in ("float16", "bfloat16") else dtype
            if master and work == dtype:
                continue
            schedule = {} if name == "test" else {"lr_scheduler": WARMING}
            parts = [work, dtype, dtype] if master or work == dtype else [dtype]
            yield case(name, {**params, **schedule, "multi_precision": master}, dtype, parts)
    for dtype, rescale in itertools.product(INTEGERS, (-3, 1)):
        yield case("test", {"rescale_grad": rescale}, dtype, [dtype] * 2)


@lru_cache(maxsize=2)
def fused(cases: tuple[Case, ...]) -> tuple[dict[Case, fuse.Fused], cxx.Compiled]:
    """All kernels of these cases, compiled at once."""
    made = {each: fuse.Fused(each.rule(), parse(each.dtype), [parse(part) for part in each.parts]) for each in cases}
    return made, cxx.compiled(fuse.together("rules", list(made.values())))


FEW = tuple(few())
OTHERS = tuple(all_others())


@pytest.mark.parametrize("each", FEW, ids=str)
def test_kernels_give_the_bytes_of_numpy(each: Case) -> None:
    made, compiled = fused(FEW)
    compare(each, made[each], compiled)


@pytest.mark.slow
def test_kernels_of_all_types_and_variants_give_the_bytes_of_numpy() -> None:
    made, compiled = fused(OTHERS)
    for each in OTHERS:
        compare(each, made[each], compiled)


def compare(each: Case, made: fuse.Fused, compiled: cxx.Compiled) -> None:
    """Make steps of weights of all lengths, by numpy and by kernels, with memory at any address."""
    random, dtype = np.random.default_rng(1), parse(each.dtype)
    for length in LENGTHS:
        rule, knobs = each.rule(), rules.Knobs(lr_mult=0.5, wd_mult=length % 4)
        weight = values(random, length, dtype)
        expected, state = weight.copy(), rule.new_state(weight)
        arrays = {fuse.WEIGHT: placed(weight, length % 3)}
        for one in made.states:
            begun = state[one.name]
            assert isinstance(begun, np.ndarray)
            assert begun.dtype == one.dtype
            assert np.array_equal(begun, widen(weight) if one.is_weight else np.zeros(length))
            arrays[fuse.STATE % one.name] = placed(begun, (length + 1) % 2)
        assert {"updates", *(one.name for one in made.states)} == state.keys()
        counted: rules.State = {"updates": 0}
        for number in range(STEPS):
            parts = [values(random, length, parse(part), specials=number > 1) for part in each.parts]
            update.step(rule, expected, parts, state, knobs, device=CpuDevice())
            arrays.update({fuse.PART % place: placed(part, length // 2 % 2) for place, part in enumerate(parts)})
            step = made.step(made.rule.rates(counted, knobs))
            assert step.program is made.program
            launch(step, arrays, compiled, length)
            same(arrays[fuse.WEIGHT], expected, f"weight of {length} after step {number + 1}")
            for one in made.states:
                same(arrays[fuse.STATE % one.name], state[one.name], f"{one.name} of {length} after {number + 1}")


def launch(step: fuse.Step, arrays: dict[str, Array], compiled: cxx.Compiled, length: int) -> None:
    """Run a step's kernel; what it may only write is NaN before, what it may only read is as before afterwards."""
    pointers, read = [], {}
    for each in step.kernel.parameters:
        if each.access is Access.SCALAR:
            continue
        array = arrays[each.name]
        pointers.append(array.ctypes.data)
        if each.access is Access.WRITE:
            array.view(np.uint8)[:] = 255
        elif each.access is Access.READ:
            read[each.name] = array.copy()
    compiled(step.kernel.name, [*pointers, *step.scalars], length)
    for name, before in read.items():
        assert before.tobytes() == arrays[name].tobytes()


def values(random: np.random.Generator, length: int, dtype: np.dtype[Any], specials: bool = False) -> Array:
    """Numbers of a type; with what is special in floats, and numbers that overflow when they are squared."""
    if dtype.kind in "iu":
        return random.integers(0, 256, length).astype(dtype)
    result = random.normal(size=length).astype(work_dtype(dtype))
    result[random.random(length) < 0.1] = 0.0
    if specials:
        kinds = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, -1e-45, 1e-7, 6e-5, 3e38, -65504.0, 1e-20, 1e30])
        chosen = random.random(length) < 0.15
        with np.errstate(over="ignore"):
            result[chosen] = random.choice(kinds, size=int(chosen.sum())).astype(result.dtype)
    return narrow(result, dtype)


def placed(array: Array, elements: int) -> Array:
    """Return a copy at an address that is `elements` behind one that 16 divides."""
    room = np.empty(array.nbytes + 16 + elements * array.itemsize, np.uint8)
    start = -room.ctypes.data % 16 + elements * array.itemsize
    result = room[start : start + array.nbytes].view(array.dtype)
    result[:] = array
    return result


def same(found: Array, expected: object, what: str) -> None:
    """Compare bytes; of NaN only that they are there."""
    assert isinstance(expected, np.ndarray)
    if expected.dtype.kind in "iu":
        assert found.tobytes() == expected.tobytes(), what
        return
    wrong = np.isnan(widen(found)) != np.isnan(widen(expected))
    bits = np.dtype(f"u{expected.itemsize}")
    wrong |= (found.view(bits) != expected.view(bits)) & ~np.isnan(widen(expected))
    assert not wrong.any(), f"{what}: {widen(found)[wrong][:3]} instead of {widen(expected)[wrong][:3]}"
