"""Devices of host memory: sums have one order and one precision, whoever makes them."""

from __future__ import annotations

import numpy as np
import pytest
from sums import total as total_of

from distrun_runtime.arrays import cores, dtypes
from distrun_runtime.arrays.cores import Threads
from distrun_runtime.arrays.device import CHUNK, CpuDevice, copy
from distrun_runtime.arrays.dtypes import BFLOAT16, Array, narrow, widen


def total(arrays: list[Array], threads: Threads | None = None) -> Array:
    return total_of(CpuDevice(0, threads), arrays)


def filled(shape: tuple[int, ...], number: float, dtype: str) -> Array:
    kind = dtypes.parse(dtype)
    return narrow(np.full(shape, number, dtypes.work_dtype(kind)), kind)


@pytest.mark.parametrize("dtype", dtypes.NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_the_sum_has_the_shape_and_dtype_of_its_parts(dtype: str, shape: tuple[int, ...]) -> None:
    result = total([filled(shape, n, dtype) for n in (1, 2, 3)])
    assert isinstance(result, np.ndarray)
    assert (result.shape, result.dtype) == (shape, dtypes.parse(dtype))
    assert np.array_equal(result, filled(shape, 6, dtype))


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
    largest = narrow(np.array([3.38e38], np.float32), BFLOAT16)
    assert np.isinf(widen(total([largest, largest]))).all()


def test_any_memory_order_may_be_summed() -> None:
    whole = np.arange(24.0).reshape(4, 6)
    parts = [whole[::2, ::3], np.asfortranarray(whole[:2, :2]), whole[3:1:-1, 5:3:-1]]
    result = total(parts)
    assert result.flags.c_contiguous
    assert np.array_equal(result, parts[0] + parts[1] + parts[2])


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
def test_threads_give_the_same_bits_as_one(dtype: str) -> None:
    random = np.random.default_rng(3)
    size = 2 * CHUNK + 12345
    parts = [(random.normal(size=size) * 1000).astype(dtype) for _ in range(3)]
    alone = total(parts)
    assert np.array_equal(total(parts, Threads(4, bound=4 * size)), alone)
    assert np.array_equal(total(parts, Threads(3, bound=1)), alone)
    assert np.array_equal(total([parts[0][:2]] * 2, Threads(5, bound=1)), total([parts[0][:2]] * 2))


def test_several_sums_that_threads_share_have_the_bits_of_each_alone() -> None:
    random = np.random.default_rng(4)
    items = [([random.normal(size=size).astype(np.float32) for _ in range(3)], size) for size in (70_000, 0, 5, 9000)]
    outs, alone = ([np.zeros(size, np.float32) for _, size in items] for _ in range(2))
    pairs = [(parts, out) for (parts, _), out in zip(items, outs, strict=True)]
    CpuDevice(0, Threads(3, bound=1)).sums([*pairs, ([outs[0]], outs[0])])
    for (parts, _), out in zip(items, alone, strict=True):
        CpuDevice().sum(parts, out)
    assert [each.tobytes() for each in outs] == [each.tobytes() for each in alone]


def test_large_arrays_of_any_strides_are_copied_whoever_shares_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores.SHARED, "bound", 1)
    monkeypatch.setattr(cores.SHARED, "wanted", 3)
    given = np.arange(60_000.0).reshape(300, 200)
    for array in (given, given.T, given[:, ::2]):
        for out in (np.zeros(array.shape), np.zeros(array.shape, order="F")):
            copy(array, out)
            assert np.array_equal(out, array)


def test_what_a_device_has_is_copied_into_any_others() -> None:
    device, given, canvas = CpuDevice(3), np.arange(6.0).reshape(2, 3).T, np.zeros((3, 4))
    copy(device.put(given), canvas[:, ::2])
    assert np.array_equal(canvas[:, ::2], given)
    assert not canvas[:, 1::2].any()
