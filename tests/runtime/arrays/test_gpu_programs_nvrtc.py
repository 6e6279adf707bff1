"""Programs for GPUs, compiled by NVIDIA's compiler: it takes them for all architectures, and what it makes of them."""

from __future__ import annotations

import re

import nvrtc
import pytest

from distrun_runtime.arrays import gpu_programs
from distrun_runtime.arrays.gpu_programs import ALONE, SUMS, Access, Kernel, KernelParameter, program

pytestmark = [pytest.mark.peers, pytest.mark.timeout(300)]

ARCHITECTURES = (75, 80, 90, 100)
MAIN = [("f32", "f32"), ("f16", "f16")]
CASES = [(pair, each) for pair in MAIN for each in ARCHITECTURES] + [
    (pair, ARCHITECTURES[i % 4]) for i, pair in enumerate(pair for pair in SUMS if pair not in MAIN)
]
"""The programs differ in types alone: two of them are compiled for all, and the others for one architecture each."""


@pytest.mark.parametrize(("pair", "architecture"), CASES, ids=lambda each: str(each).strip("()"))
def test_sums_compile_and_move_16_bytes_at_once_without_contracted_arithmetic(
    pair: tuple[str, str], architecture: int
) -> None:
    compiled = gpu_programs.sums(*pair)
    code, assembly = nvrtc.compile(compiled, architecture)
    found = nvrtc.functions(assembly)
    assert code.startswith(b"\x7fELF")
    assert set(found) == {kernel.name for kernel in compiled.kernels}
    for name, text in found.items():
        if name != "sum_mixed":
            assert "ld.global.v%d.u32" % (2 if is_widening(*pair) else 4) in text, name
            assert "st.global.v4.u32" in text, name
        if name == "sum1":  # a thread's neighbour writes the next 16 bytes: `sum_into`
            assert text.count("st.global.v4.u32") == 1
    check_arithmetic(assembly)


def is_widening(parts: str, out: str) -> bool:
    return int(parts.lstrip("ufb")) < int(out.lstrip("ufb"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_codecs_compile_and_move_16_bytes_at_once_without_contracted_arithmetic(architecture: int) -> None:
    compiled = gpu_programs.codecs()
    code, assembly = nvrtc.compile(compiled, architecture)
    found = nvrtc.functions(assembly)
    assert code.startswith(b"\x7fELF")
    assert set(found) == {kernel.name for kernel in compiled.kernels}
    for name, text in found.items():
        if "encode" in name or "finite" in name:
            assert "ld.global.v4.u32" in text, name
        if name.endswith("_decode") and name != "top_decode":
            assert text.count("st.global.v4.u32") == 1, name
        if "encode_keeping" in name or name.endswith("bit_decode"):
            assert "st.global.v4.u32" in text, name
    check_arithmetic(assembly)


def check_arithmetic(assembly: str) -> None:
    """Check that each operation is rounded by itself, and that subnormal numbers are not taken for 0."""
    assert not re.search(r"\b(?:fma|mad)\.(?:rn|rz|ftz|f)", assembly)
    assert ".ftz" not in assembly
    assert ".approx" not in assembly
    assert ".local" not in assembly  # everything is in registers


def test_the_options_keep_subnormal_numbers_and_round_each_operation() -> None:
    a, b, out = (
        KernelParameter(name, "f32", Access.READ if name != "out" else Access.WRITE) for name in ("a", "b", "out")
    )
    body = "    EACH (i, n)\n        out[i] = root(a[i] * b[i] + a[i]) / b[i];"
    _, assembly = nvrtc.compile(program("all", [(Kernel("all", (a, b, out)), body)]), 80)
    check_arithmetic(assembly)
    for operation in ("mul.rn.f32", "add.rn.f32", "sqrt.rn.f32", "div.rn.f32"):
        assert operation in assembly or operation.replace(".rn", "") in assembly


def test_an_array_of_more_elements_than_32_bits_count_is_indexed_with_64() -> None:
    _, assembly = nvrtc.compile(gpu_programs.sums("f32", "f32"), 80)
    for k in (1, ALONE):
        text = nvrtc.functions(assembly)[gpu_programs.sum_of(k)]
        assert ".param .u64 sum%d_param_%d" % (k, k + 1) in text
        assert not re.search(r"ld\.param\.[us]32", text)
        assert not re.search(r"setp\.\w+\.[us]32", text)
