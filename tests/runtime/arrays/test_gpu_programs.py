"""Programs for GPUs, compiled for this machine: their kernels give numpy's bytes, but for NaN's payloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cxx
import numpy as np
import numpy.typing as npt
import pytest
from hardfloats import floats
from hypothesis import given, settings
from hypothesis import strategies as st

from distrun_runtime.arrays import dtypes, gpu_programs
from distrun_runtime.arrays.device import CpuDevice
from distrun_runtime.arrays.dtypes import BFLOAT16, DType
from distrun_runtime.arrays.gpu_programs import ALONE, FEW, SUMS, Access, Kernel, KernelParameter, program

Array = npt.NDArray[Any]

DTYPES = {"f16": np.dtype(np.float16), "bf16": BFLOAT16, "f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}
QUICK = [("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("u8", "u8")]
PAIRS = [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in SUMS]
"""Each has a program of its own, which takes half a second to compile."""
LONG = 8192 + 77
"""More elements of any kind than a block of a GPU takes at once."""
MARGIN = 3
"""Elements before and after an array, which nobody may write."""


def numbers(dtype: DType, n: int, seed: int) -> Array:
    """Return numbers of a dtype, many of them difficult."""
    if not dtypes.is_float(dtype):
        return np.random.default_rng(seed).integers(0, 256, n * dtype.itemsize, np.uint8).view(dtype)
    if dtype == np.float64:
        bits = np.random.default_rng(seed).integers(0, 1 << 63, n, np.int64)
        with np.errstate(invalid="ignore"):  # NaN becomes quiet
            some = floats(n, seed, finite=False).astype(np.float64)
        return np.where(bits % 3 == 0, bits.view(np.float64), some)
    if dtype.itemsize == 2:
        some = np.random.default_rng(seed).integers(0, 1 << 16, n, np.uint16).view(dtype)
        return np.where(np.arange(n) % 2, some, dtypes.narrow(floats(n, seed, finite=False), dtype))
    return floats(n, seed, finite=False)


def placed(values: Array, offset: int) -> Array:
    """Return a copy that begins `offset` elements behind a multiple of 16 bytes."""
    room = np.zeros(values.nbytes + 64 + (offset + MARGIN) * values.itemsize, np.uint8)
    begin = -room.ctypes.data % 16 + offset * values.itemsize
    result = room[begin : begin + values.nbytes].view(values.dtype)
    result[...] = values
    return result


class Out:
    """Room for a result between sentinels."""

    def __init__(self, dtype: DType, n: int, offset: int) -> None:
        self._all = placed(np.full((n + 2 * MARGIN) * dtype.itemsize, 0xA5, np.uint8).view(dtype), offset)
        self.array = self._all[MARGIN : MARGIN + n]

    def check(self) -> None:
        for edge in (self._all[:MARGIN], self._all[MARGIN + len(self.array) :]):
            assert set(edge.tobytes()) == {0xA5}, "written outside"


def address(array: Array) -> int:
    return int(array.ctypes.data)


def table(arrays: Sequence[Array]) -> Array:
    return np.array([address(array) for array in arrays], np.uint64)


def assert_same(found: Array, expected: Array) -> None:
    """Check that both have the same bytes, NaN's aside."""
    assert found.dtype == expected.dtype
    if dtypes.is_float(found.dtype):
        nans, expected_nans = np.isnan(dtypes.widen(found)), np.isnan(dtypes.widen(expected))
        assert (nans == expected_nans).all()
        found, expected = found[~nans], expected[~nans]
    assert found.tobytes() == expected.tobytes()


def dtype_of(kind: str) -> DType:
    return DTYPES.get(kind) or np.dtype("uint%s" % kind[1:])


def by_numpy(parts: Sequence[Array], dtype: DType) -> Array:
    out = np.empty(len(parts[0]), dtype)
    CpuDevice().sum(parts, out)
    return out


def check_sum(
    pair: tuple[str, str], k: int, n: int, offsets: Sequence[int], seed: int, *, tabled: bool = False
) -> None:
    dtype, result = dtype_of(pair[0]), dtype_of(pair[1])
    parts = [placed(numbers(dtype, n, seed + p), offsets[p % len(offsets)]) for p in range(k)]
    out = Out(result, n, offsets[-1])
    run = cxx.compiled(gpu_programs.sums(*pair))
    if tabled or k > ALONE:
        addresses, ends = table([*parts, out.array]), np.array([0, n], np.int64)
        name = "sum_lists_many" if tabled else gpu_programs.sum_lists_of(k)
        counts = (k, 1, 1) if name == "sum_lists_many" else (1, 1)
        run(name, [address(addresses), address(ends), *map(np.int64, counts)], n)
    else:
        run(gpu_programs.sum_of(k), [*map(address, parts), address(out.array)], n)
    out.check()
    assert_same(out.array, by_numpy(parts, result))


@pytest.mark.parametrize(("parts", "out"), PAIRS)
def test_sums_have_the_bytes_of_numpys_for_all_short_lengths_and_numbers_of_parts(parts: str, out: str) -> None:
    for n in range(41):
        check_sum((parts, out), 1 + n % FEW, n, (n % 5, 0, 1), seed=n)
        check_sum((parts, out), 1 + n % FEW, n, (n % 3,), seed=n)
    for k in range(1, FEW + 1):
        check_sum((parts, out), k, LONG, (0,), seed=k)
        check_sum((parts, out), k, LONG, (1,), seed=k)
    for k in (1, 5, 9, 17):
        check_sum((parts, out), k, LONG, (0, 0, k % 2), seed=k, tabled=True)


@settings(max_examples=20, deadline=None, database=None)
@given(
    pair=st.sampled_from(QUICK),
    k=st.integers(1, FEW + 3),
    n=st.integers(0, 9000),
    offsets=st.lists(st.integers(0, 16), min_size=1, max_size=4),
    seed=st.integers(0, 1 << 20),
)
def test_sums_have_the_bytes_of_numpys_at_any_addresses(
    pair: tuple[str, str], k: int, n: int, offsets: list[int], seed: int
) -> None:
    check_sum(pair, k, n, offsets, seed)


def test_a_sum_may_be_written_over_one_of_its_parts() -> None:
    for n, over in ((1000, 0), (1001, 1)):
        parts = [placed(numbers(np.dtype(np.float32), n, p), 0) for p in range(2)]
        expected = by_numpy(parts, np.dtype(np.float32))
        cxx.compiled(gpu_programs.sums("f32", "f32"))("sum2", [*map(address, parts), address(parts[over])], n)
        assert_same(parts[over], expected)


def test_signed_integers_are_summed_as_unsigned_ones_and_wrap_around() -> None:
    for name in ("int8", "uint8"):
        dtype = np.dtype(name)
        assert gpu_programs.kind_of(dtype) == "u8"
        parts = [numbers(dtype, 300, p) for p in range(2)]
        out = np.empty(300, dtype)
        cxx.compiled(gpu_programs.sums("u8", "u8"))("sum2", [*map(address, parts), address(out)], 300)
        assert_same(out, by_numpy(parts, dtype))


def test_every_dtype_of_a_store_has_a_kind_with_a_program() -> None:
    kinds = {gpu_programs.kind_of(dtypes.parse(name)) for name in dtypes.NAMES}
    assert {(kind, kind) for kind in kinds} <= set(SUMS)
    assert gpu_programs.kind_of(BFLOAT16) == "bf16"


@pytest.mark.parametrize("kind", ["f16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_parts_of_two_kinds_are_summed_in_the_order_in_which_they_are_given(kind: str) -> None:
    for n in (1, 40, 1000):
        wide = np.array([0, 1, 1, 0, 1], np.uint8)
        parts = [numbers(DTYPES["f32"] if each else DTYPES[kind], n, p) for p, each in enumerate(wide)]
        for result in (kind, "f32"):
            out, addresses = Out(DTYPES[result], n, 1), table(parts)
            arguments = [address(addresses), address(wide), address(out.array), np.int64(len(parts))]
            cxx.compiled(gpu_programs.sums(kind, result))("sum_mixed", arguments, n)
            out.check()
            assert_same(out.array, by_numpy(parts, DTYPES[result]))


# Lists of tensors

LISTS = [[7], [0, 1, 0, 0, 3, 0], [64, 1, 4096, 5000, 0, 12, 3], [1] * 50, [4096, 4096]]


@pytest.mark.parametrize(("parts", "out"), PAIRS)
def test_lists_of_tensors_are_summed_and_each_sum_goes_to_all_its_outs(parts: str, out: str) -> None:
    run = cxx.compiled(gpu_programs.sums(parts, out))
    for case, lengths in enumerate(LISTS):
        k, outs = (1, 3, FEW + 2, 2, FEW)[case], (1, 2, 1, 3, 2)[case]
        n, offsets = sum(lengths), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        given = [
            [placed(numbers(dtype_of(parts), size, p), (p + t) % 3) for t, size in enumerate(lengths)] for p in range(k)
        ]
        taken = [[Out(dtype_of(out), size, (t + o) % 3) for t, size in enumerate(lengths)] for o in range(outs)]
        addresses = table(
            [*(tensor for part in given for tensor in part), *(each.array for some in taken for each in some)]
        )
        numbers_of = [np.int64(each) for each in (*([k] if k > FEW else []), outs, len(lengths))]
        run(gpu_programs.sum_lists_of(k), [address(addresses), address(offsets), *numbers_of], n)
        for some in taken:
            for each in some:
                each.check()
            expected = by_numpy([np.concatenate(part) for part in given], dtype_of(out))
            assert_same(np.concatenate([each.array for each in some]), expected)


@pytest.mark.parametrize(("kind", "other"), [pair for pair in PAIRS if pair.values[0] == pair.values[1]])
def test_arrays_are_multiplied_as_numpy_does_it(kind: str, other: str) -> None:
    dtype = dtype_of(kind)
    for n, offset, factor in ((40, 0, 0.1), (1003, 0, -3.7), (1003, 1, 7.0)):
        array, out = placed(numbers(dtype, n, n), offset), Out(dtype, n, offset)
        expected = array.copy()
        expected_factor = factor if dtypes.is_float(dtype) else int(abs(factor))
        CpuDevice().scale(expected, expected_factor)
        number = (
            np.int64(abs(factor)) if kind[0] == "u" else np.float64(factor) if kind == "f64" else np.float32(factor)
        )
        run = cxx.compiled(gpu_programs.sums(kind, other))
        run("scale", [address(array), number, address(out.array)], n)
        out.check()
        assert_same(out.array, expected)
        run("scale", [address(array), number, address(array)], n)
        assert_same(array, expected)


# The prelude


NUMPYS = {"root": np.sqrt, "magnitude": np.abs, "negative": np.negative, "sign": np.sign}
NUMPYS_OF_TWO = {"minimum": np.minimum, "maximum": np.maximum}
LIMITS = [
    (-1.0, 1.0),
    (0.0, 0.0),
    (-0.0, 0.5),
    (0.0, -0.0),
    (1.0, -1.0),
    (np.nan, 1.0),
    (-1.0, np.nan),
    (-np.inf, np.inf),
]


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_the_preludes_functions_are_numpys(kind: str) -> None:
    dtype = DTYPES[kind]
    arrays = [KernelParameter("a", kind, Access.READ), KernelParameter("b", kind, Access.READ)]
    out, limits = (
        KernelParameter("out", kind, Access.WRITE),
        [KernelParameter(name, kind, Access.SCALAR) for name in ("low", "high")],
    )
    calls = {**dict.fromkeys(NUMPYS, "a[i]"), **dict.fromkeys(NUMPYS_OF_TWO, "a[i], b[i]"), "clip": "a[i], low, high"}
    functions = [
        (Kernel("try_" + name, (*arrays, *limits, out)), "    EACH (i, n)\n        out[i] = %s(%s);" % (name, values))
        for name, values in calls.items()
    ]
    run = cxx.compiled(program("functions_" + kind, functions))
    a, b = (numbers(dtype, 5000, seed) for seed in range(2))
    b[:1000], b[1000:1100], a[1000:1100] = a[:1000], 0.0, -0.0

    def called(name: str, low: float = 0.0, high: float = 0.0) -> Array:
        found = np.empty(5000, dtype)
        run("try_" + name, [address(a), address(b), dtype.type(low), dtype.type(high), address(found)], 5000)
        return found

    with np.errstate(all="ignore"):
        for name, function in NUMPYS.items():
            assert_same(called(name), function(a))
        for name, function in NUMPYS_OF_TWO.items():
            assert_same(called(name), function(a, b))
        for low, high in LIMITS:
            assert_same(called("clip", low, high), np.clip(a, dtype.type(low), dtype.type(high)))


def test_a_kernel_declares_what_it_takes() -> None:
    kernel = Kernel(
        "name",
        (
            KernelParameter("a", "f16", Access.READ),
            KernelParameter("b", "f32", Access.UPDATE),
            KernelParameter("c", "f64", Access.TABLE),
            KernelParameter("d", "i32", Access.SCALAR),
        ),
    )
    assert kernel.head() == "KERNEL name(const f16 *a, f32 *b, const u64 *c, i32 d, i64 n)"


def test_programs_of_the_same_source_have_the_same_key() -> None:
    kernel = Kernel("one", (KernelParameter("a", "f32", Access.WRITE),))
    one, other = (program("any", [(kernel, "    EACH (i, n)\n        a[i] = %d;" % value)]) for value in (1, 2))
    assert one.key == program("any", [(kernel, "    EACH (i, n)\n        a[i] = 1;")]).key
    assert one.key != other.key
    assert one.kernel("one") is kernel
    with pytest.raises(KeyError):
        one.kernel("other")


def test_no_source_includes_anything() -> None:
    for each in (gpu_programs.codecs(), gpu_programs.sums("f32", "f32")):
        assert "#include" not in each.source
