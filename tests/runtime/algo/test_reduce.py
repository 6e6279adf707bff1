from __future__ import annotations

import numpy as np
import pytest

from distrun_runtime.algo.reduce import total

DTYPES = ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_the_sum_has_the_shape_and_dtype_of_its_parts(dtype: str, shape: tuple[int, ...]) -> None:
    parts = [np.full(shape, n, dtype) for n in (1, 2, 3)]
    result = total(parts)
    assert isinstance(result, np.ndarray)
    assert (result.shape, result.dtype) == (shape, np.dtype(dtype))
    assert np.array_equal(result, np.full(shape, 6, dtype))


def test_the_sum_shares_memory_with_none_of_its_parts_and_leaves_them_alone() -> None:
    parts = [np.ones(4), np.full(4, 2.0)]
    for given in (parts, parts[:1]):
        result = total(given)
        assert not any(np.shares_memory(result, part) for part in parts)
    assert parts[0].tolist() == [1.0] * 4
    assert parts[1].tolist() == [2.0] * 4


def test_integers_wrap_around() -> None:
    assert total([np.array([200, 1], np.uint8), np.array([100, 1], np.uint8)]).tolist() == [44, 2]
    assert total([np.array([100], np.int8), np.array([100], np.int8)]).tolist() == [-56]


def test_half_precision_overflows_to_inf_without_a_warning() -> None:
    assert np.isinf(total([np.array([6e4], np.float16)] * 2)).all()


def test_any_memory_order_may_be_summed() -> None:
    whole = np.arange(24.0).reshape(4, 6)
    parts = [whole[::2, ::3], np.asfortranarray(whole[:2, :2]), whole[3:1:-1, 5:3:-1]]
    result = total(parts)
    assert result.flags.c_contiguous
    assert np.array_equal(result, parts[0] + parts[1] + parts[2])
