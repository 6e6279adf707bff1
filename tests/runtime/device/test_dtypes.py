"""Element types: bfloat16 is stored like any other and calculated in float32."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrun_runtime.device.dtypes import BFLOAT16, NAMES, is_float, name_of, narrow, parse, widen, work_dtype


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
