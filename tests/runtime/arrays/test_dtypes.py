"""Element types: 16-bit floats are calculated in float32, and converted exactly."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrun_runtime.arrays.dtypes import (
    BFLOAT16,
    CACHED_BYTES,
    NAMES,
    cached_pieces,
    copy_fresh,
    is_float,
    name_of,
    narrow,
    parse,
    widen,
    work_dtype,
)

FLOAT16 = np.dtype(np.float16)
Array = npt.NDArray[Any]


def test_every_name_gives_a_dtype_that_has_this_name() -> None:
    assert [name_of(parse(name)) for name in NAMES] == list(NAMES)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"float8.*bfloat16"):
        parse("float8")


def test_bfloat16_is_not_taken_for_uint16_and_has_no_arithmetic() -> None:
    array = narrow(np.ones(3, np.float32), BFLOAT16)
    assert array.dtype != np.uint16
    assert is_float(array.dtype)
    assert work_dtype(array.dtype) == np.float32
    with pytest.raises(TypeError):
        array + array


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.0, 0x3F80),
        (-2.0, 0xC000),
        (1.0 + 2**-8, 0x3F80),  # half way: to the even one below
        (1.0 + 3 * 2**-8, 0x3F82),  # half way: to the even one above
        (1.0 + 2**-8 + 2**-20, 0x3F81),
        (float("inf"), 0x7F80),
        (3.4e38, 0x7F80),  # above the largest one: rounds to inf
        (-0.0, 0x8000),
    ],
)
def test_narrow_rounds_to_nearest_even(value: float, bits: int) -> None:
    assert narrow(np.float32([value]), BFLOAT16).view(np.uint16)[0] == bits


def test_nan_stays_nan() -> None:
    low = np.array([0x7F800001], np.uint32).view(np.float32)  # its upper half alone would be inf
    assert np.isnan(widen(narrow(low, BFLOAT16))).all()


@given(st.integers(0, 0xFFFF))
def test_every_bfloat16_survives_the_way_to_float32_and_back(bits: int) -> None:
    array = np.array([bits], np.uint16).view(BFLOAT16)
    wide = widen(array)
    if not np.isnan(wide[0]):
        assert narrow(wide, BFLOAT16).view(np.uint16)[0] == bits


def test_shapes_are_kept() -> None:
    array = narrow(np.arange(6, dtype=np.float32).reshape(2, 3), BFLOAT16)
    assert array.shape == widen(array).shape == (2, 3)
    assert widen(array[:, 1]).tolist() == [1.0, 4.0]
    assert widen(np.array(narrow(np.float32(2), BFLOAT16))).shape == ()


# float16


def float32s(bits: Array) -> Array:
    return bits.astype(np.uint32).view(np.float32)


def cast(values: Array) -> Array:
    """numpy's own cast, which is exact."""
    with np.errstate(all="ignore"):
        return values.astype(np.float16)


def every_half() -> Array:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16)


def edges() -> Array:
    """Every float16 number, what is half way to the next, and the float32 neighbours of both; of both signs."""
    positive = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = np.append((positive[:-1].astype(np.float64) + positive[1:]) / 2, 65520).astype(np.float32)
    bits = np.concatenate([positive.view(np.uint32), middles.view(np.uint32)]).astype(np.int64)
    near = np.concatenate([bits - 1, bits, bits + 1])
    values = float32s(near[near >= 0])
    return np.concatenate([values, -values])


@pytest.mark.parametrize("count", [1, 100, 32768, 100003])
def test_every_rounding_to_float16_is_to_the_nearest_even(count: int) -> None:
    """In calls of all sizes: few numbers are converted by numpy, many in blocks."""
    values = edges() if count > 1 else edges()[:: 1 << 6]
    for start in range(0, len(values), count):
        given_ = values[start : start + count]
        assert np.array_equal(narrow(given_, FLOAT16).view(np.uint16), cast(given_).view(np.uint16))


def test_numbers_of_any_bits_become_the_float16_that_they_should() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, np.uint32)
    values = float32s(bits)
    values = values[~np.isnan(values)]
    assert np.array_equal(narrow(values, FLOAT16).view(np.uint16), cast(values).view(np.uint16))


@pytest.mark.parametrize("count", [3, 1000])
def test_what_float16_cannot_say_becomes_infinite_zero_or_a_quiet_nan_of_its_sign(count: int) -> None:
    def halves(*values: float) -> list[int]:
        return narrow(np.resize(np.float32(values), count), FLOAT16).view(np.uint16)[: len(values)].tolist()

    assert halves(65519.996, 65520, -3e38) == [0x7BFF, 0x7C00, 0xFC00]
    assert halves(np.inf, -np.inf, 0.0) == [0x7C00, 0xFC00, 0]
    assert halves(-0.0, 2.0**-25, -(2.0**-149)) == [0x8000, 0, 0x8000]
    signalling = np.resize(float32s(np.array([0x7F800001, 0xFFC00000, 0x3F800000])), count)
    found = narrow(signalling, FLOAT16)
    assert np.isnan(found).tolist() == np.isnan(signalling).tolist()
    assert np.signbit(found).tolist() == np.signbit(signalling).tolist()
    if count > 128:
        assert found.view(np.uint16)[:3].tolist() == [0x7E00, 0xFE00, 0x3C00]


def test_every_float16_is_widened_as_numpy_does_it_and_comes_back() -> None:
    halves = every_half()
    wide = widen(halves)
    assert np.array_equal(wide.view(np.uint32), halves.astype(np.float32).view(np.uint32))
    number = ~np.isnan(halves)
    assert np.array_equal(narrow(wide, FLOAT16).view(np.uint16)[number], halves.view(np.uint16)[number])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3), (300, 500)])
def test_float16_keeps_shapes_and_takes_any_strides(shape: tuple[int, ...]) -> None:
    wide = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    views = [wide, np.asfortranarray(wide), wide.T, wide[..., ::-2] if shape else wide]
    for view in views:
        half = narrow(view, FLOAT16)
        assert (half.shape, half.dtype) == (view.shape, FLOAT16)
        assert np.array_equal(half, cast(view))
        assert np.array_equal(widen(half.T), half.T.astype(np.float32))
        assert widen(half).shape == view.shape


def test_small_numbers_raise_no_floating_point_exception_one_by_one() -> None:
    """Each of them is what made numpy's cast slow."""
    with np.errstate(all="raise"):
        narrow(np.full(1000, 1.1e-6, np.float32), FLOAT16)


@given(st.integers(0, 1 << 20), st.integers(0, 5 * CACHED_BYTES), st.sampled_from([1, 2, 4, 8]))
def test_pieces_make_up_the_run_and_are_small_enough_for_the_caches_but_not_smaller_than_half(
    begin: int, size: int, itemsize: int
) -> None:
    pieces = list(cached_pieces(slice(begin, begin + size), itemsize))
    assert pieces[0].start == begin
    assert pieces[-1].stop == begin + size
    assert all(one.stop == other.start for one, other in pairwise(pieces))
    sizes = [(piece.stop - piece.start) * itemsize for piece in pieces]
    assert max(sizes) <= CACHED_BYTES
    assert len(sizes) == 1 or min(sizes) >= CACHED_BYTES // 2 - itemsize


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, CACHED_BYTES // 3)])
@pytest.mark.parametrize("step", [1, -1])
def test_what_is_fresh_is_copied_whatever_its_size_and_strides(shape: tuple[int, ...], step: int) -> None:
    source = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    target, there = np.zeros_like(source), (slice(None, None, step),) * len(shape)
    copy_fresh(source[there], target[there])
    assert np.array_equal(target, source)
