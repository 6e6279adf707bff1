from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import python_of
from slowness import scaled

from distrun_runtime.arrays.dtypes import BFLOAT16, narrow, parse
from distrun_runtime.errors import KVError
from distrun_runtime.ops.reduce import Rows, Sum
from distrun_runtime.store.keys import KeyRecord
from distrun_runtime.store.values import Lookup, RowSparse, row_numbers

ROOT = Path(__file__).resolve().parents[3]

TORCH = """\
import numpy as np
import torch
from distrun_runtime.store.values import RowSparse

table = torch.nn.Embedding(6, 2, sparse=True)
table(torch.tensor([4, 1, 4])).sum().backward()
found = RowSparse.of(table.weight.grad)
assert found.shape == (6, 2) and found.dtype == np.float32, found
assert sorted(found.rows.tolist()) == [1, 4, 4] or sorted(found.rows.tolist()) == [1, 4], found.rows
assert np.array_equal(found.to_dense(), table.weight.grad.to_dense().numpy())

dense = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
for sparse in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse(1)):
    found = RowSparse.of(sparse)
    assert found.rows.tolist() == [1, 2], found.rows
    assert np.array_equal(found.to_dense(), dense.numpy())
    assert RowSparse.of(sparse.to(torch.bfloat16)).canonical().values.view(np.uint16).tolist() == [
        [0x3F80, 0], [0, 0x4000]]
assert RowSparse.of(dense) is None
print("alike")
"""


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.integers(0, 7), max_size=20),
    shape=st.sampled_from([(8,), (8, 1), (8, 3), (8, 2, 2), (8, 0)]),
    dtype=st.sampled_from(["float32", "float64", "int32", "uint8"]),
)
def test_canonical_has_each_row_once_and_the_same_sum(rows: list[int], shape: tuple[int, ...], dtype: str) -> None:
    values = np.random.default_rng(len(rows)).integers(0, 5, (len(rows), *shape[1:])).astype(dtype)
    dense = np.zeros(shape, dtype)
    np.add.at(dense, np.array(rows, np.intp), values)
    one = RowSparse(values, rows, shape).canonical()
    assert one.rows.tolist() == sorted(set(rows))
    assert one.values.dtype == dtype
    np.testing.assert_array_equal(one.to_dense(), dense)


def test_from_dense_takes_the_rows_that_are_not_zero() -> None:
    dense = np.array([[0, 0], [1, 0], [0, 0], [0, np.nan]], np.float32)
    found = RowSparse.from_dense(dense)
    assert found.rows.tolist() == [1, 3]
    np.testing.assert_array_equal(found.to_dense(), dense)
    found.values[:] = 7
    assert dense[1, 0] == 1


def test_sums_of_16_bit_floats_are_made_in_float32() -> None:
    for dtype in (np.dtype(np.float16), BFLOAT16):
        values = narrow(
            np.array([[256.0], [1.0], [1.0]] if dtype == BFLOAT16 else [[2048.0], [1.0], [1.0]], "f4"), dtype
        )
        expected = narrow(np.array([[258.0 if dtype == BFLOAT16 else 2050.0]], np.float32), dtype)
        one = RowSparse(values, [0, 0, 0], (1, 1)).canonical()
        assert one.dtype == dtype
        assert one.values.tobytes() == expected.tobytes()


def test_fill_exchanges_the_rows() -> None:
    out = RowSparse.empty((3, 2))
    out.fill(np.ones((1, 2), np.float32), np.array([2]))
    assert out.to_dense().tolist() == [[0, 0], [0, 0], [1, 1]]
    with pytest.raises(KVError, match=r"cannot be filled with 1 rows from values of shape \(1, 3\) and dtype float32"):
        out.fill(np.ones((1, 3), np.float32), np.array([2]))
    with pytest.raises(KVError, match="row 3, expected whole numbers from 0 to 2"):
        out.fill(np.ones((1, 2), np.float32), np.array([3]))


def test_scipy_matrices_and_arrays_become_rows() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    dense = np.array([[0, 0, 0], [1, 0, 2], [0, 0, 0], [0, 3, 0]], np.float32)
    for kind in (sparse.csr_matrix, sparse.csc_array, sparse.coo_array, sparse.lil_matrix):
        found = RowSparse.of(kind(dense))
        assert found is not None
        assert found.rows.tolist() == [1, 3]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found.to_dense(), dense)


def test_what_is_not_sparse_is_none() -> None:
    assert RowSparse.of(np.zeros((2, 2))) is None
    assert RowSparse.of([1, 2]) is None
    own = RowSparse.empty((1,))
    assert RowSparse.of(own) is own


@pytest.mark.peers
def test_sparse_torch_tensors_become_rows() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "runtime"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [python_of("torch"), "-W", "ignore", "-c", TORCH],
        env=env,
        capture_output=True,
        text=True,
        timeout=scaled(100),
        check=False,
    )
    assert result.stdout == "alike\n", result.stderr


@pytest.mark.parametrize(
    ("values", "rows", "shape", "message"),
    [
        (np.ones((1, 2)), [0, 1], (3, 2), r"with 2 rows has values of shape \(2, 2\), found \(1, 2\)"),
        (np.ones((1, 2)), [3], (3, 2), "RowSparse: row 3, expected whole numbers from 0 to 2: the value has 3 rows"),
        (np.ones((1, 2)), [-1], (3, 2), "RowSparse: row -1, expected"),
        (np.ones(()), [], (), "at least one dimension, found"),
    ],
)
def test_what_does_not_fit_is_refused(values: object, rows: object, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(KVError, match=message):
        RowSparse(values, rows, shape)


@pytest.mark.parametrize("shape", [6, "62", (6.0, 2), None])
def test_what_is_no_shape_is_refused_with_what_one_is(shape: Any) -> None:
    for make in (lambda: RowSparse(np.ones((1, 2)), [0], shape), lambda: RowSparse.empty(shape)):
        with pytest.raises(KVError, match=r"shape is that of the whole value, such as \(6, 2\), not"):
            make()


def test_from_dense_of_a_single_number_is_refused() -> None:
    with pytest.raises(KVError, match="at least one dimension"):
        RowSparse.from_dense(np.float32(1))


@pytest.mark.parametrize(
    ("dtype", "first"), [("float16", 2048), ("bfloat16", 256), ("float32", 2**24), ("float64", 2**53)]
)
def test_row_numbers_that_their_type_may_have_rounded_are_refused_with_what_to_give(dtype: str, first: int) -> None:
    below = narrow(np.array([3.0, first - 1], "f8" if dtype == "float64" else "f4"), parse(dtype))
    assert row_numbers(below, first + 3, "key 'a'").tolist() == [3, first - 1]
    rounded = narrow(np.array([3.0, first + 1], "f8" if dtype == "float64" else "f4"), parse(dtype))
    message = f"^key 'a': row {first} is given as {dtype}, which rounds whole numbers from {first} on, .* as integers"
    with pytest.raises(KVError, match=message):
        row_numbers(rounded, first + 3, "key 'a'")
    assert row_numbers(np.array([first + 1]), first + 3, "key 'a'").tolist() == [first + 1]


def test_row_numbers_of_another_kind_are_refused() -> None:
    with pytest.raises(KVError, match="row numbers are whole numbers, found dtype"):
        row_numbers(["a"], 3, "key 'a'")


@settings(max_examples=50, deadline=None)
@given(asked=st.lists(st.lists(st.integers(0, 40), max_size=60), min_size=1, max_size=3), sparse=st.booleans())
def test_a_look_up_asks_for_each_row_once_and_gives_every_output_its_rows(asked: list[list[int]], sparse: bool) -> None:
    table = np.arange(82.0).reshape(41, 2)
    pairs: list[tuple[Any, Any]] = [
        (RowSparse.empty((41, 2), "float64") if sparse else np.empty((len(ids), 2)), np.array(ids, np.int64))
        for ids in asked
    ]
    lookup = Lookup(_record(), pairs)
    assert lookup.rows.tolist() == sorted({row for ids in asked for row in ids})
    lookup.take(table[lookup.rows])
    for out, ids in pairs:
        if not sparse:
            np.testing.assert_array_equal(out, table[ids])
            continue
        assert out.rows.tolist() == sorted(set(ids.tolist()))
        np.testing.assert_array_equal(out.values, table[out.rows])
        assert not any(np.shares_memory(out.rows, other) for _, other in pairs)
        ours = [one for one, _ in pairs if one is not out]
        assert not any(np.shares_memory(out.rows, one.rows) for one in ours)


def test_rows_that_come_in_order_are_neither_sorted_nor_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`numpy.unique` hashes since numpy 2.3: 467 ms for 300,000 rows, where sorting them takes 8."""
    calls: list[str] = []
    for name in ("unique", "sort", "argsort"):
        monkeypatch.setattr(np, name, _counted(name, getattr(np, name), calls))
    ids = np.arange(0, 41, 3)
    outs = [RowSparse.empty((41, 2), "float64"), np.empty((len(ids), 2))]
    for out in outs:
        lookup = Lookup(_record(), [(out, ids)])
        lookup.take(np.ones((len(lookup.rows), 2)))
    part = Rows(ids, np.ones((len(ids), 2)))
    Sum(2, parts=[part]).total()
    assert calls == []
    Lookup(_record(), [(outs[1], ids[::-1])])
    Sum(2, parts=[part, part]).total()
    assert calls == ["sort", "sort"]


def _record() -> KeyRecord:
    return KeyRecord.of("t", 0, RowSparse.empty((41, 2), "float64"))


def _counted(name: str, function: Any, calls: list[str]) -> Any:
    def counted(*args: Any, **named: Any) -> Any:
        calls.append(name)
        return function(*args, **named)

    return counted
