"""Row pulls: what is asked for, and how it comes into outputs of each form."""

from __future__ import annotations

import numpy as np
import pytest

from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.store.lookup import Lookup, wanted
from distrun_runtime.store.record import Record
from distrun_runtime.store.sparse import RowSparse

TABLE = np.arange(12.0).reshape(6, 2)
RECORD = Record.of("t", 0, RowSparse.from_dense(TABLE))


def filled(*pairs: tuple[object, object]) -> Array:
    """Fill the outputs; return the rows that were asked for."""
    lookup = Lookup(RECORD, pairs)
    lookup.take(TABLE[lookup.rows])
    return lookup.rows


def test_a_row_sparse_output_gets_its_rows_ascending_each_once() -> None:
    out = RowSparse.empty((6, 2), "float64")
    rows = filled((out, [4, 0, 4]))
    assert rows.tolist() == out.rows.tolist() == [0, 4]
    assert rows.dtype == np.int64
    assert out.values.tolist() == [[0, 1], [8, 9]]


@pytest.mark.parametrize("shape", [(6, 2), (2, 3, 2)])
def test_an_array_gets_a_row_for_each_number_in_their_order(shape: tuple[int, ...]) -> None:
    ids = np.array([[5, 1, 1], [0, 5, 2]])
    out = np.empty(shape)
    assert filled((out, ids)).tolist() == [0, 1, 2, 5]
    assert np.array_equal(out, TABLE[ids].reshape(shape))


def test_outputs_with_rows_of_their_own_ask_for_each_row_once() -> None:
    outs = [RowSparse.empty((6, 2), "float64") for _ in range(3)]
    strided = np.zeros((4, 4))
    rows = filled((outs[0], [1, 2]), (outs[1], [2, 3]), (strided[::2, ::2], [3, 1]), (outs[2], [3, 1, 2]))
    assert rows.tolist() == [1, 2, 3]
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
def test_numbers_of_any_shape_and_dtype_are_taken(ids: Array) -> None:
    out = np.empty((2, 2))
    filled((out, ids))
    assert np.array_equal(out, TABLE[[1, 0]])


def test_no_numbers_ask_for_nothing() -> None:
    out = RowSparse.from_dense(TABLE)
    assert filled((out, [])).tolist() == []
    assert (len(out.rows), out.shape) == (0, (6, 2))
    assert filled((np.empty((0, 2)), np.empty((0, 3), int))).tolist() == []


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 6], "key 't': row 6, expected whole numbers from 0 to 5"),
        ([-1], "key 't': row -1"),
        (np.array([2**63], np.uint64), "key 't': row 9223372036854775808"),
        (np.array([0.5]), "key 't': row 0.5"),
        (np.array([np.nan]), "key 't': row nan"),
        ("rows", "key 't'"),
    ],
)
def test_a_number_that_is_no_row_is_an_error_that_names_it(ids: object, words: str) -> None:
    with pytest.raises(KVError, match=words):
        Lookup(RECORD, [(RowSparse.empty((6, 2), "float64"), ids)])


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
def test_an_output_that_does_not_fit_is_an_error_that_names_both(out: object, words: str) -> None:
    with pytest.raises(KVError, match=words):
        Lookup(RECORD, [(out, [1, 2])])


def test_a_dense_key_has_no_rows_to_pull() -> None:
    with pytest.raises(KVError, match="key 'w' is not row-sparse: pull it as a whole"):
        Lookup(Record.of("w", 0, TABLE), [(np.empty((1, 2)), [0])])


def test_one_set_of_numbers_is_for_all_outputs_and_a_list_has_one_for_each() -> None:
    a, b, c = (np.empty((2, 2)) for _ in range(3))
    shared = np.array([[0, 1]])
    assert wanted("t", [a, b], shared) == [("t", [(a, shared), (b, shared)])]
    ((_, pairs),) = wanted("t", [a, b], [[0, 1], np.array([2, 3])])
    assert [np.asarray(ids).tolist() for _, ids in pairs] == [[0, 1], [2, 3]]
    found = wanted([1, 2], [a, [b, c]], [[0, 1], [[2, 3], [4, 5]]])
    assert [(key, [np.asarray(ids).tolist() for _, ids in each]) for key, each in found] == [
        (1, [[0, 1]]),
        (2, [[2, 3], [4, 5]]),
    ]
    ((_, pairs),) = wanted("t", [a, b], [[0, 1]])
    assert [np.asarray(ids).tolist() for _, ids in pairs] == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("key", "out", "ids", "words"),
    [
        ("t", None, [1], "needs out and row_ids"),
        ("t", np.empty((1, 2)), None, "needs out and row_ids"),
        ("t", [np.empty((1, 2))] * 3, [[1], [2]], "key 't': 3 outputs, but 2 row_ids"),
        ([1, 2], [np.empty((1, 2))] * 2, [[1], [1], [1]], "2 keys, but 3 row_ids"),
    ],
)
def test_outputs_and_numbers_that_do_not_match_are_counted(key: object, out: object, ids: object, words: str) -> None:
    with pytest.raises(KVError, match=words):
        wanted(key, out, ids)


@pytest.mark.parametrize("ids", [[True, False], np.ones(6, bool), "3"])
def test_a_mask_or_text_for_row_numbers_is_refused_with_what_to_give(ids: object) -> None:
    ((_, pairs),) = wanted("t", np.empty((1, 2)), ids)
    with pytest.raises(KVError, match=r"key 't': row_ids are whole numbers, not (bool|str); .*np.flatnonzero"):
        Lookup(RECORD, pairs)
