"""Kernels that are made of rules: compiled for this machine, they give the bytes that the rules give with numpy."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import cxx
import numpy as np
import nvrtc
import pytest
from kernelcheck import FLOATS, launch, placed, same, values

from distrun_runtime.arrays.device import CpuDevice
from distrun_runtime.arrays.dtypes import parse, widen
from distrun_runtime.arrays.gpu_programs import Access
from distrun_runtime.errors import KVError
from distrun_runtime.ops import fuse, update
from distrun_runtime.ops import optimizers as rules

LONG = 1031
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, LONG)
STEPS = 5
WARMING = {"type": "factor", "base_lr": 0.1, "step": 2, "factor": 0.5, "warmup_steps": 2, "warmup_mode": "constant"}

# What makes a rule go other ways; the first is what it does by default.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "sgd": [{}, {"momentum": 0.9}, {"momentum": 0.9, "wd": 0.1, "clip_gradient": 0.5, "rescale_grad": 0.25}],
    "nag": [{}, {"momentum": 0.9}, {"momentum": 0.9, "wd": 0.1, "clip_gradient": 0.5}],
    "torch_sgd": [
        {},
        {"momentum": 0.9, "wd": 0.1, "dampening": 0.3, "maximize": True},
        {"momentum": 0.9, "nesterov": True, "clip_gradient": 0.5},
    ],
    "signum": [{}, {"momentum": 0.0}, {"momentum": 0.0, "wd": 0.1}, {"wd": 0.1, "wd_lh": 0.1, "clip_gradient": 0.5}],
    "dcasgd": [{}, {"momentum": 0.9, "wd": 0.1, "lamda": 0.5, "clip_gradient": 0.5}],
    "adam": [{}, {"wd": 0.1, "clip_gradient": 0.5}, {"rescale_grad": 1 / 3, "beta1": 0.0, "epsilon": 0.0}],
    "adamw": [{}, {"wd": 0.1}, {"wd": 0.1, "correct_bias": False, "clip_gradient": 0.5}],
    "torch_adam": [{}, {"wd": 0.1, "amsgrad": True, "maximize": True}],
    "torch_adamw": [{}, {"wd": 0.0, "clip_gradient": 0.5}, {"amsgrad": True, "maximize": True}],
    "torch_rmsprop": [{}, {"momentum": 0.9, "wd": 0.1, "maximize": True}, {"centered": True, "clip_gradient": 0.5}],
    "adamax": [{}, {"epsilon": 0.0}, {"wd": 0.1, "clip_gradient": 0.5}],
    "nadam": [{}, {"wd": 0.1, "clip_gradient": 0.5}, {"beta1": 0.5, "schedule_decay": 50.0}],
    "rmsprop": [{}, {"centered": True}, {"centered": True, "wd": 0.1, "clip_weights": 1.0, "clip_gradient": 0.5}],
    "adagrad": [{}, {"wd": 0.1, "clip_gradient": 0.5}],
    "adadelta": [{}, {"wd": 0.1, "clip_gradient": 0.5}],
    "ftrl": [{}, {"lamda1": 0.1, "wd": 0.1, "clip_gradient": 0.5}, {"beta": 0.0, "lamda1": 0.0}],
    "ftml": [{}, {"wd": 0.1, "clip_gradient": 0.5}],
    "test": [{}, {"rescale_grad": 0.3}],
}
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
    """Every rule with every variant for float32, and some with the last one for the other types."""
    for name, variants in VARIANTS.items():
        for number, params in enumerate(variants):
            yield case(name, params, "float32", ["float32"] * (1 + number))
        if name in ("adam", "nadam", "ftrl", "rmsprop", "signum", "test"):
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
@pytest.mark.parametrize("dtype", [*FLOATS, "integers"])
def test_kernels_of_all_types_and_variants_give_the_bytes_of_numpy(dtype: str) -> None:
    cases = tuple(each for each in OTHERS if each.dtype == dtype or (dtype == "integers" and "int" in each.dtype))
    made, compiled = fused(cases)
    for each in cases:
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


FLOAT, HALF = np.dtype(np.float32), np.dtype(np.float16)


def rates(learning_rate: float = 0.1, wd: float = 0.0, updates: int = 1) -> rules.Rates:
    return rules.Rates(learning_rate, wd, updates, learning_rate)


def test_other_numbers_are_other_arguments_of_one_kernel() -> None:
    made = fuse.Fused(rules.make("adam", {"wd": 0.1}), FLOAT, [FLOAT])
    one, other = made.step(rates(0.1, 0.1, 1)), made.step(rates(0.2, 0.3, 77))
    assert one.kernel == other.kernel
    assert one.scalars != other.scalars
    assert all(type(number) is np.float32 for number in one.scalars)
    assert made.step(rates(0.1, 0.1, 1)) is one
    assert one.program is other.program is made.program
    assert len(made.program.kernels) == 2  # with a weight decay and without


def test_a_decision_of_the_rule_is_another_kernel() -> None:
    made = fuse.Fused(rules.make("sgd", {"wd": 0.1}), FLOAT, [FLOAT])
    with_decay, without = made.step(rates(wd=0.1)), made.step(rates(wd=0.0))
    assert with_decay.kernel != without.kernel
    assert with_decay.program is without.program is made.program


def test_a_step_that_was_not_to_be_expected_has_a_program_of_its_own() -> None:
    made = fuse.Fused(rules.make("sgd", {"wd": 0.0}), FLOAT, [FLOAT])
    step = made.step(rates(wd=0.1))
    assert step.program is not made.program
    assert step.program.kernels == (step.kernel,)


def test_equal_rules_have_equal_programs() -> None:
    one, other = (fuse.Fused(rules.make("adam", {"lr": lr}), FLOAT, [FLOAT]) for lr in (0.1, 0.2))
    assert one.program is other.program
    assert one.program.key == fuse.Fused(rules.make("adam", {"beta1": 0.5}), FLOAT, [FLOAT]).program.key
    assert one.program.key != fuse.Fused(rules.make("adam", {}), FLOAT, [FLOAT, FLOAT]).program.key


def test_programs_of_several_rules_are_compiled_together() -> None:
    made = [fuse.Fused(rules.make(name, {}), FLOAT, [FLOAT]) for name in ("sgd", "adam", "sgd")]
    program = fuse.together("all", made)
    assert len(program.kernels) == 2
    assert all(each.step(rates()).program is program for each in made)


def test_a_kernel_takes_only_the_arrays_that_it_needs() -> None:
    made = fuse.Fused(rules.make("ftml", {"multi_precision": True}), HALF, [HALF])
    step, nothing = made.step(rates()), made.step(rates(0.0))
    access = {each.name: each.access for each in step.arrays}
    assert access == {
        "weight": Access.WRITE,  # rounded from its master
        "part_0": Access.READ,
        **dict.fromkeys(("state_variance", "state_d", "state_z", "state_master"), Access.UPDATE),
    }
    assert [(each.name, each.access) for each in nothing.arrays] == [
        ("weight", Access.WRITE),
        ("state_master", Access.READ),
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lamb", "cannot fuse: rule 'lamb' needs norms over the whole value"),
        ("lars", "cannot fuse: rule 'lars' needs norms over the whole value"),
        ("sgld", "cannot fuse: rule 'sgld' depends on the place of each element"),
        ("rules_of_users:Sign", "cannot fuse: rule 'rules_of_users:Sign' is not one of distrun's own"),
    ],
)
def test_rules_that_are_not_fused_say_why(name: str, words: str) -> None:
    rule = rules.make(name, {}, ["rules_of_users"])
    with pytest.raises(fuse.Untraceable, match=words):
        fuse.Fused(rule, FLOAT, [FLOAT])
    assert fuse.why_not(rule) == words.partition(": ")[2]
    assert fuse.why_not(rules.make("sgd", {})) == ""


def test_the_other_built_in_rules_are_all_fused() -> None:
    assert set(rules.RULES) - set(VARIANTS) == {"lamb", "lars", "sgld"}


def test_types_that_a_rule_or_its_weight_does_not_have_are_refused() -> None:
    with pytest.raises(KVError, match="rule 'adam' updates float weights, not int32"):
        fuse.Fused(rules.make("adam", {}), np.dtype(np.int32), [np.dtype(np.int32)])
    with pytest.raises(KVError, match="a gradient of float64 for a weight of float16: expected its dtype or float32"):
        fuse.Fused(rules.make("adam", {}), HALF, [np.dtype(np.float64)])


@pytest.mark.peers
@pytest.mark.parametrize("architecture", [75, 100])
def test_kernels_compile_for_gpus_by_16_bytes_and_with_each_operation_rounded(architecture: int) -> None:
    made = [fuse.Fused(rules.make(name, {"wd": 0.1}), FLOAT, [FLOAT]) for name in ("adam", "ftrl", "rmsprop")]
    made.append(fuse.Fused(rules.make("sgd", {"multi_precision": True}), parse("bfloat16"), [parse("bfloat16")]))
    _, assembly = nvrtc.compile(fuse.together("rules", made), architecture)
    assert assembly.count("ld.global.v4") >= 4
    assert not re.search(r"\bfma\.|\.approx|\.ftz|ld\.local|st\.local", assembly)
