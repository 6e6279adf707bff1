"""`row_sparse_pull`: which rows are read, and how they come into outputs of each form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distrun_runtime import kvstore
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore, RowSparse

TABLE = np.arange(12.0).reshape(6, 2)
ROW_BYTES = 2 * 8


@pytest.fixture
def kv() -> KVStore:
    """A store with the row-sparse key `t`, whose value is TABLE, and the dense key `w`."""
    kv = kvstore.create("local")
    kv.init(["t", "w"], [RowSparse.from_dense(TABLE), TABLE])
    return kv


def rows_read(kv: KVStore, out: object, ids: object, key: object = "t") -> int:
    """Pull rows; return how many were read."""
    before: Any = kv.stats()[0]["bytes_out"]
    kv.row_sparse_pull(key, out, row_ids=ids)  # type: ignore[arg-type]  # any form
    return int(kv.stats()[0]["bytes_out"] - before) // ROW_BYTES


@pytest.mark.parametrize("shape", [(6, 2), (2, 3, 2)])
def test_an_array_gets_a_row_for_each_number_in_their_order(kv: KVStore, shape: tuple[int, ...]) -> None:
    ids = np.array([[5, 1, 1], [0, 5, 2]])
    out = np.empty(shape)
    assert rows_read(kv, out, ids) == 4
    assert np.array_equal(out, TABLE[ids].reshape(shape))


def test_outputs_with_rows_of_their_own_read_each_row_once(kv: KVStore) -> None:
    outs = [RowSparse.empty((6, 2), "float64") for _ in range(3)]
    strided = np.zeros((4, 4))
    read = rows_read(kv, [outs[0], outs[1], strided[::2, ::2], outs[2]], [[1, 2], [2, 3], [3, 1], [3, 1, 2]])
    assert read == 3
    assert [out.rows.tolist() for out in outs] == [[1, 2], [2, 3], [1, 2, 3]]
    assert all(np.array_equal(out.values, TABLE[out.rows]) for out in outs)
    assert np.array_equal(strided[::2, ::2], TABLE[[3, 1]])
    assert not np.shares_memory(outs[0].values, outs[2].values)


@pytest.mark.parametrize(
    "ids",
    [
        np.array([1, 0], np.uint8),
        np.array([1.0, 0.0], np.float32),
        np.array([1, 0], np.float16),
        np.array([[1], [0]], ">i8"),
        np.array([[1, 9], [0, 9]])[:, 0],
        np.arange(2)[::-1],
    ],
)
def test_numbers_of_any_shape_and_dtype_are_taken(kv: KVStore, ids: Array) -> None:
    out = np.empty((2, 2))
    kv.row_sparse_pull("t", out, row_ids=ids)
    assert np.array_equal(out, TABLE[[1, 0]])


def test_no_numbers_read_nothing(kv: KVStore) -> None:
    out = RowSparse.from_dense(TABLE)
    assert rows_read(kv, out, []) == 0
    assert (len(out.rows), out.shape) == (0, (6, 2))
    assert rows_read(kv, np.empty((0, 2)), np.empty((0, 3), int)) == 0


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 6], "key 't': row 6, expected whole numbers from 0 to 5"),
        ([-1], "key 't': row -1"),
        (np.array([2**63], np.uint64), "key 't': row 9223372036854775808"),
        (np.array([0.5]), "key 't': row 0.5"),
        (np.array([np.nan]), "key 't': row nan"),
        (np.array([np.inf]), "key 't': row inf"),
        ([2.0**70], "key 't': row 1.18"),
        ("rows", "key 't'"),
        (["a"], "key 't': row_ids are whole numbers, not str"),
    ],
)
def test_a_number_that_is_no_row_is_an_error_that_names_it(kv: KVStore, ids: object, words: str) -> None:
    out = RowSparse.from_dense(TABLE)
    with pytest.raises(KVError, match=words):
        kv.row_sparse_pull("t", out, row_ids=ids)
    assert np.array_equal(out.to_dense(), TABLE)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (np.empty((2, 3)), r"the output has shape \(2, 3\) and dtype float64, but 2 rows of it have shape \(2, 2\)"),
        (np.empty((6, 2)), r"the output has shape \(6, 2\)"),
        (np.empty((2, 2), np.float32), "and dtype float32, but 2 rows of it have .* and dtype float64"),
        (RowSparse.empty((5, 2), "float64"), r"the output has shape \(5, 2\)"),
        (RowSparse.empty((6, 2), "float32"), "and dtype float32"),
        ([1.0], "key 't': an output is"),
    ],
)
def test_an_output_that_does_not_fit_is_an_error_that_names_both(kv: KVStore, out: object, words: str) -> None:
    with pytest.raises(KVError, match=words):
        kv.row_sparse_pull("t", out, row_ids=[1, 2])


def test_one_set_of_numbers_is_for_all_outputs_and_a_list_has_one_for_each(kv: KVStore) -> None:
    kv.init(["u"], [RowSparse.from_dense(-TABLE)])
    a, b, c = (np.empty((2, 2)) for _ in range(3))

    def pulled(key: object, out: object, ids: object) -> list[list[float]]:
        kv.row_sparse_pull(key, out, row_ids=ids)  # type: ignore[arg-type]  # any form
        return [(one[:, 0] / 2).tolist() for one in (a, b, c)]

    assert pulled("t", [a, b], np.array([[0, 1]]).reshape(2))[:2] == [[0, 1], [0, 1]]
    assert pulled("t", [a, b], [[2, 1], np.array([2, 3])])[:2] == [[2, 1], [2, 3]]
    assert pulled(["t", "u"], [a, [b, c]], [[0, 1], [[2, 3], [4, 5]]]) == [[0, 1], [-2, -3], [-4, -5]]
    assert pulled("t", [a, b], [[4, 1]])[:2] == [[4, 1], [4, 1]]


@pytest.mark.parametrize(
    ("key", "out", "ids", "words"),
    [
        ("t", None, [1], "needs out and row_ids"),
        ("t", np.empty((1, 2)), None, "needs out and row_ids"),
        ("t", [np.empty((1, 2))] * 3, [[1], [2]], "key 't': 3 outputs, but 2 row_ids"),
        (["t", "w"], [np.empty((1, 2))] * 2, [[1], [1], [1]], "2 keys, but 3 row_ids"),
    ],
)
def test_outputs_and_numbers_that_do_not_match_are_counted(
    kv: KVStore, key: Any, out: object, ids: object, words: str
) -> None:
    with pytest.raises(KVError, match=words):
        kv.row_sparse_pull(key, out, row_ids=ids)


@pytest.mark.parametrize("ids", [[True, False], np.ones(6, bool), "3"])
def test_a_mask_or_text_for_row_numbers_is_refused_with_what_to_give(kv: KVStore, ids: object) -> None:
    with pytest.raises(KVError, match=r"key 't': row_ids are whole numbers, not (bool|str); .*np.flatnonzero"):
        kv.row_sparse_pull("t", np.empty((1, 2)), row_ids=ids)
