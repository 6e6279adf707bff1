"""What contributions add up to: dense, of some rows, or both; 16-bit floats in float32."""

from __future__ import annotations

import numpy as np
import pytest

from distrun_runtime.arrays.dtypes import BFLOAT16, narrow
from distrun_runtime.errors import KVError
from distrun_runtime.ops import rows as rowcodec
from distrun_runtime.ops.compression import CODECS
from distrun_runtime.ps.sums import Dense, Rows, Sum, read, spread
from distrun_runtime.ps.work import How

ROWS = How(16)


def sparse(rows: list[int], values: list[list[float]], weight: np.ndarray, scale: float = 1.0) -> Rows:
    payload = rowcodec.encode(np.array(rows, np.int64), np.array(values, weight.dtype).reshape(len(rows), 2))
    given = read(payload, weight, 2, How(16, scale=scale))
    assert isinstance(given, Rows)
    return given


def test_a_plain_contribution_is_the_frame_itself_and_a_scaled_one_is_not() -> None:
    frame = np.array([1, 2], np.float32)
    given = read(frame.tobytes(), frame, 0, How())
    assert isinstance(given, Dense)
    assert (given.is_own, given.values.flags.writeable) == (False, False)
    scaled = read(frame.tobytes(), frame, 0, How(scale=0.5))
    assert isinstance(scaled, Dense)
    assert (scaled.is_own, scaled.values.tolist(), scaled.values.dtype) == (True, [0.5, 1], np.float32)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16])
def test_half_precision_is_summed_in_float32_and_narrowed_once(dtype: np.dtype) -> None:
    """256 and then 512 times 0.5: in 16 bits each half would be lost."""
    total = Sum()
    large, small = (narrow(np.array([x], np.float32), dtype) for x in (2048.0, 0.5))
    total.add(read(large.tobytes(), large, 0, How()))
    for _ in range(512):
        total.add(read(small.tobytes(), large, 0, How()))
    found = total.total()
    assert isinstance(found, Dense)
    assert (found.values.dtype, found.values.tolist()) == (np.float32, [2304.0])


@pytest.mark.parametrize("name", sorted(CODECS))
def test_a_compressed_contribution_is_decoded_and_then_scaled(name: str) -> None:
    codec = CODECS[name]
    params = codec.check({})
    values = np.array([0.75, -0.75, 0.0, 3.0], np.float32)
    payload = codec.encode(values, None, params)
    expected = codec.decode(payload, 4, params)
    given = read(payload, np.zeros(4, np.float64), 0, How(codec.number, params, 2.0))
    assert isinstance(given, Dense)
    assert given.is_own
    assert given.values.dtype == np.float64
    np.testing.assert_array_equal(given.values, 2.0 * expected)


def test_rows_of_several_workers_are_merged() -> None:
    weight = np.zeros(8, np.float32)
    total = Sum(2)
    total.add(sparse([1, 3], [[1, 2], [3, 4]], weight))
    total.add(sparse([0, 3], [[5, 6], [7, 8]], weight, scale=2.0))
    total.add(sparse([], [], weight))
    found = total.total()
    assert isinstance(found, Rows)
    assert found.rows.tolist() == [0, 1, 3]
    assert found.values.tolist() == [[10, 12], [1, 2], [17, 20]]


def test_a_round_of_empty_contributions_has_no_rows() -> None:
    weight = np.zeros(8, np.float32)
    total = Sum(2)
    for _ in range(2):
        total.add(sparse([], [], weight))
    found = total.total()
    assert isinstance(found, Rows)
    assert (len(found.rows), found.values.shape) == (0, (0, 2))
    assert spread(found, 8).values.tolist() == [0] * 8


@pytest.mark.parametrize("is_dense_first", [True, False])
def test_one_dense_contribution_makes_the_sum_dense(is_dense_first: bool) -> None:
    weight = np.zeros(4, np.float32)
    frame = np.array([1, 1, 1, 1], np.float32)
    given = [read(frame.tobytes(), weight, 2, How()), sparse([1], [[5, 6]], weight)]
    total = Sum(2)
    for each in given if is_dense_first else reversed(given):
        total.add(each)
    found = total.total()
    assert isinstance(found, Dense)
    assert found.values.tolist() == [1, 1, 6, 7]
    assert found.is_own


def test_spread_rows_are_zero_elsewhere() -> None:
    weight = np.zeros(6, np.float32)
    assert spread(sparse([2], [[5, 6]], weight), 6).values.tolist() == [0, 0, 0, 0, 5, 6]


def test_integers_are_summed_as_rows_too() -> None:
    weight = np.zeros(4, np.int8)
    total = Sum(2)
    for _ in range(2):
        total.add(sparse([1], [[100, 1]], weight))
    found = total.total()
    assert isinstance(found, Rows)
    assert found.values.tolist() == [[-56, 2]], "they wrap around"


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16, np.dtype(np.int32)])
def test_a_value_without_elements_is_read(dtype: np.dtype) -> None:
    given = read(b"", np.empty(0, dtype), 0, How())
    assert isinstance(given, Dense)
    assert given.values.size == 0


@pytest.mark.parametrize("payload", [b"", bytes(7), bytes([1]) + bytes(7), bytes([2]) + bytes(40), bytes([255]) * 40])
def test_rows_that_cannot_be_read_are_errors(payload: bytes) -> None:
    with pytest.raises(KVError, match="rows: expected"):
        read(payload, np.zeros(4, np.float32), 2, ROWS)
