"""Row-sparse keys in the stores of one process, by the rows of MXNet's test suites and on their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distrun_runtime import kvstore
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore, RowSparse

SHAPE = (4, 4)
DEVICES = 4


@pytest.fixture(params=["local", "device"])
def kv(request: pytest.FixtureRequest) -> KVStore:
    store = kvstore.create(request.param)
    assert isinstance(store, KVStore)
    return store


def ones(rows: list[int], shape: tuple[int, ...] = SHAPE, dtype: str = "float64") -> RowSparse:
    return RowSparse(np.ones((len(rows), *shape[1:]), dtype), rows, shape)


def dense(kv: KVStore, key: Any, shape: tuple[int, ...] = SHAPE, dtype: str = "float64") -> Any:
    out = np.full(shape, np.nan, dtype)
    kv.pull(key, out)
    return out


@pytest.mark.parametrize("key", [3, "a"])
def test_a_row_sparse_value_is_pushed_and_its_table_pulled(kv: KVStore, key: Any) -> None:
    """Row: tests/python/unittest/test_kvstore.py::test_single_kv_pair (row-sparse)."""
    kv.init(key, RowSparse.empty(SHAPE, "float64"))
    kv.push(key, RowSparse.from_dense(np.ones(SHAPE)))
    assert np.array_equal(dense(kv, key), np.ones(SHAPE))


@pytest.mark.parametrize("key", [3, "a"])
@pytest.mark.parametrize("count", [1, 4])
def test_outputs_with_row_numbers_of_their_own_get_these_rows_and_zeros(kv: KVStore, key: Any, count: int) -> None:
    """Row: tests/python/unittest/test_kvstore.py::test_row_sparse_pull: 1 and 4 outputs, 2-D row numbers."""
    kv.init(key, RowSparse.from_dense(np.ones(SHAPE)))
    random = np.random.default_rng(count)
    ids = [random.integers(SHAPE[0], size=(SHAPE[0], 2)) for _ in range(count)]
    outs = [RowSparse.empty(SHAPE, "float64") for _ in range(count)]
    kv.row_sparse_pull(key, out=outs if count > 1 else outs[0], row_ids=ids if count > 1 else ids[0])
    for out, numbers in zip(outs, ids, strict=True):
        expected = np.zeros(SHAPE)
        expected[numbers.reshape(-1)] = 1
        assert np.array_equal(out.to_dense(), expected)


def test_random_rows_of_four_devices_are_summed(kv: KVStore) -> None:
    """Row: tests/python/unittest/test_kvstore.py::test_sparse_aggregator (skipped upstream)."""
    random = np.random.default_rng(11)
    kv.init("a", RowSparse.empty((50, 3), "float64"))
    values = [np.where(random.random((50, 1)) < 0.3, random.normal(size=(50, 3)), 0) for _ in range(DEVICES)]
    kv.push("a", [RowSparse.from_dense(value) for value in values])
    out = RowSparse.empty((50, 3), "float64")
    kv.row_sparse_pull("a", out=out, row_ids=np.arange(50))
    assert np.allclose(out.to_dense(), sum(values), rtol=1e-15)
    assert np.array_equal(dense(kv, "a", (50, 3)), out.to_dense())


def test_what_does_not_fit_a_row_pull_is_refused_and_changes_no_output(kv: KVStore) -> None:
    """Row: tests/python/unittest/test_kvstore.py::test_invalid_pull (row-sparse part)."""
    kv.init("a", RowSparse.from_dense(np.ones(SHAPE)))
    sparse, whole = RowSparse.empty(SHAPE, "float64"), np.zeros(SHAPE)
    calls: list[tuple[Any, str]] = [
        (lambda: kv.pull("a", sparse), "filled by row_sparse_pull"),
        (lambda: kv.row_sparse_pull("a", out=whole, row_ids=[1]), "1 rows of it have shape"),
        (lambda: kv.row_sparse_pull(3, out=sparse, row_ids=[1]), "all ints or all strs"),
        (lambda: kv.row_sparse_pull("b", out=sparse, row_ids=[1]), "key 'b' was never initialised"),
        (lambda: kv.row_sparse_pull("a", out=sparse, row_ids=[0, 4]), "row 4, expected whole numbers from 0 to 3"),
        (lambda: kv.row_sparse_pull("a", out=sparse, row_ids=[-1]), "row -1"),
    ]
    for call, words in calls:
        with pytest.raises(KVError, match=words):
            call()
    assert len(sparse.rows) == 0
    assert not whole.any()


@pytest.mark.parametrize("grouped", [False, True])
def test_ten_rounds_of_random_rows_pushed_to_dense_keys_equal_numpys(kv: KVStore, grouped: bool) -> None:
    """Row: tests/nightly/test_kvstore.py::test_kvstore and ::test_group_kvstore, row-sparse pushes."""
    random = np.random.default_rng(5)
    keys, shapes, lr = [3, 5, 7], [(10, 1), (13, 5), (4, 5, 6)], np.float32(0.1)

    def descend(key: int, received: Any, stored: Any) -> None:
        stored += lr * received

    kv.set_updater(descend)
    kv.init(keys, [np.zeros(shape, np.float32) for shape in shapes])
    expected = [np.zeros(shape) for shape in shapes]
    for _ in range(10):
        data = [[random.normal(size=shape).astype(np.float32) for _ in range(DEVICES)] for shape in shapes]
        sparse = [[RowSparse.from_dense(value) for value in values] for values in data]
        outs = [[np.empty(shape, np.float32) for _ in range(DEVICES)] for shape in shapes]
        if grouped:
            kv.push(keys, sparse)
            kv.pull(keys, out=outs)
        else:
            for key, values, each in zip(keys, sparse, outs, strict=True):
                kv.push(key, values)
                kv.pull(key, out=each)
        for number, values in enumerate(data):
            expected[number] += float(lr) * np.sum(values, axis=0, dtype=np.float64)
            for out in outs[number]:
                assert np.abs(out - expected[number]).sum() / np.abs(expected[number]).sum() < 1e-6


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 2, 3), (0, 3), (6, 0)])
def test_tables_of_any_shape_and_dtype_are_kept(kv: KVStore, shape: tuple[int, ...], dtype: str) -> None:
    rows = [row for row in (5, 0) if row < shape[0]]
    kv.init("a", RowSparse.empty(shape, dtype))
    kv.push("a", [ones(rows, shape, dtype), ones(rows, shape, dtype)])
    out = np.empty((len(rows), *shape[1:]), dtype)
    kv.row_sparse_pull("a", out=out, row_ids=rows)
    assert np.array_equal(out, np.full(out.shape, 2))


def test_many_row_numbers_in_one_pull_are_taken(kv: KVStore) -> None:
    """Row: tests/python/gpu/test_kvstore_gpu.py, 793 470 row numbers in one pull."""
    count = 793470
    kv.init("a", RowSparse(np.arange(count, dtype=np.float32), np.arange(count), (count,)))
    out = np.empty(count, np.float32)
    kv.row_sparse_pull("a", out=out, row_ids=np.arange(count)[::-1])
    assert np.array_equal(out, np.arange(count)[::-1])


def test_rows_that_a_pushpull_returns_are_bytes_that_went_out() -> None:
    with kvstore.create("local") as kv:
        kv.init("w", RowSparse(np.ones((1, 2), np.float32), [0], (4, 2)))
        rows = RowSparse(np.ones((2, 2), np.float32), [1, 3], (4, 2))
        kv.pushpull("w", rows, out=rows)
        assert kv.stats()[0]["bytes_out"] == 2 * 2 * 4
