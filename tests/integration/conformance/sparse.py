"""Rows of row-sparse values: pushes of some rows or none, pulls of any rows, and what is no row pull."""

from __future__ import annotations

from typing import Any

import numpy as np

from distrun_runtime import kvstore
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore, RowSparse

RATE = 2
SMALL, BIG = (7, 3), (1200, 1200)
SHAPES = {"9": SMALL, "11": SMALL, "97": BIG}


def opened(kind: str = "dist_sync") -> KVStore:
    """Return a store of three keys of ones, under the rule of the tests."""
    kv = kvstore.create(kind)
    kv.init(list(SHAPES), [RowSparse.from_dense(np.ones(shape, "float32")) for shape in SHAPES.values()])
    kv.set_optimizer("test", rescale_grad=RATE)
    return kv


def check(kv: KVStore, key: str, expected: Any, ids: Any) -> None:
    """Pull rows both ways: as rows, each once, and as an array with a row for each number."""
    some = RowSparse.empty(SHAPES[key])
    kv.row_sparse_pull(key, some, row_ids=ids)
    whole = np.zeros(SHAPES[key], "float32")
    whole[ids] = expected[ids]
    assert (some.to_dense() == whole).all(), key
    table = np.full((len(ids), SHAPES[key][1]), -1, "float32")
    kv.row_sparse_pull(key, table, row_ids=ids)
    assert (table == expected[ids]).all(), key


def check_row_sparse_keys() -> KVStore:
    """Each worker pushes one row; random row numbers, some of them twice, are pulled."""
    kv = opened()
    random = np.random.default_rng(kv.rank)
    for key, shape in SHAPES.items():
        expected = np.ones(shape, "float32")
        for _ in range(3):
            row = np.full((1, shape[1]), kv.rank + 1, "float32")
            kv.push(key, RowSparse(row, [kv.rank % shape[0]], shape))
            for rank in range(kv.num_workers):
                expected[rank % shape[0]] += RATE * (rank + 1)
            check(kv, key, expected, random.integers(0, shape[0], shape[0]))
    return kv


def check_row_sparse_keys_with_zeros() -> KVStore:
    """A push without rows is a contribution of nothing, and no row numbers ask for nothing."""
    kv = opened()
    for key, shape in SHAPES.items():
        for _ in range(3):
            kv.push(key, RowSparse.empty(shape))
            check(kv, key, np.ones(shape, "float32"), np.arange(shape[0]))
            check(kv, key, np.ones(shape, "float32"), np.array([], int))
    return kv


def check_big_row_sparse_keys() -> KVStore:
    """Workers push overlapping sets of rows, each of 0.3 of them."""
    kv = opened()
    random, expected = np.random.default_rng(5), np.ones(BIG, "float32")
    for _ in range(3):
        sets = [np.flatnonzero(random.random(BIG[0]) < 0.3) for _ in range(kv.num_workers)]
        mine = sets[kv.rank]
        kv.push("97", RowSparse(np.full((len(mine), BIG[1]), kv.rank + 1, "float32"), mine, BIG))
        for rank, rows in enumerate(sets):
            expected[rows] += RATE * (rank + 1)
        check(kv, "97", expected, np.random.default_rng(kv.rank).integers(0, BIG[0], 400))
    return kv


def invalid_pull() -> KVStore:
    """A pull is of whole values: rows of outputs that are not rows are refused, and so are rows that are not there."""
    kv = opened()
    some = RowSparse.from_dense(np.full(SMALL, 5, "float32"))
    for call in (
        lambda: kv.pull("9", some),
        lambda: kv.row_sparse_pull("9", RowSparse.empty(SMALL), row_ids=[SMALL[0]]),
        lambda: kv.row_sparse_pull("9", RowSparse.empty(SMALL), row_ids=[-1]),
        lambda: kv.row_sparse_pull("9", np.zeros((1, 9)), row_ids=[0]),
    ):
        try:
            call()
        except (KVError, TypeError, ValueError):
            continue
        raise AssertionError("it was not refused")
    assert (some.to_dense() == 5).all()
    check(kv, "9", np.ones(SMALL, "float32"), np.arange(3))
    return kv


PARTS = {
    "check_row_sparse_keys": check_row_sparse_keys,
    "check_row_sparse_keys_with_zeros": check_row_sparse_keys_with_zeros,
    "check_big_row_sparse_keys": check_big_row_sparse_keys,
    "invalid_pull": invalid_pull,
}
