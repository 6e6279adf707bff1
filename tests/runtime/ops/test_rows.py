from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrun_runtime.arrays.dtypes import BFLOAT16
from distrun_runtime.errors import KVError
from distrun_runtime.ops import reduce

F4 = np.dtype(np.float32)


def numbers(*found: int) -> npt.NDArray[np.int64]:
    return np.array(found, np.int64)


def test_a_payload_is_count_row_numbers_and_elements() -> None:
    payload = reduce.encode(numbers(1, 4), np.array([[1.0, 2.0], [3.0, 4.0]], np.float32))
    assert payload == struct.pack("<Q2q4f", 2, 1, 4, 1.0, 2.0, 3.0, 4.0)


def test_a_request_is_count_and_row_numbers() -> None:
    assert reduce.encode_rows(numbers(0, 7)) == struct.pack("<Q2q", 2, 0, 7)
    assert reduce.decode_rows(struct.pack("<Q2q", 2, 0, 7), 8).tolist() == [0, 7]


@settings(max_examples=50, deadline=None)
@given(
    found=st.sets(st.integers(0, 99)), row_size=st.integers(1, 5), name=st.sampled_from(["<f2", "<f4", "<f8", "<i1"])
)
def test_rows_come_back_as_they_were_sent(found: set[int], row_size: int, name: str) -> None:
    dtype = np.dtype(name)
    ids = numbers(*sorted(found))
    values = np.arange(len(ids) * row_size).reshape(len(ids), row_size).astype(dtype)
    got_rows, got = reduce.decode(reduce.encode(ids, values), 100, row_size, dtype)
    np.testing.assert_array_equal(got_rows, ids)
    np.testing.assert_array_equal(got, values)
    assert (got_rows.dtype, got.dtype) == (np.int64, dtype)
    np.testing.assert_array_equal(reduce.decode_rows(reduce.encode_rows(ids), 100), ids)


def test_bfloat16_rows_travel_as_their_bits() -> None:
    values = np.array([[0x3F80, 0x4000]], np.uint16).view(BFLOAT16)
    _, got = reduce.decode(reduce.encode(numbers(0), values), 1, 2, BFLOAT16)
    assert got.dtype == BFLOAT16
    assert got.tobytes() == values.tobytes()


def test_no_rows_are_a_payload_too() -> None:
    payload = reduce.encode(numbers(), np.empty((0, 3), np.float32))
    assert payload == bytes(8)
    ids, values = reduce.decode(payload, 5, 3, F4)
    assert ids.shape == (0,)
    assert values.shape == (0, 3)
    assert reduce.decode_rows(payload, 0).shape == (0,)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "expected at least 8 bytes, found 0"),
        (bytes(7), "expected at least 8 bytes, found 7"),
        (struct.pack("<Q", 2**63), "expected at most 4 rows, the piece's number, found 9223372036854775808"),
        (struct.pack("<Q5q", 5, 0, 1, 2, 3, 4), "expected at most 4 rows"),
        (struct.pack("<Qq", 2, 0), "expected 16 bytes of row numbers for 2 rows, found 8"),
        (struct.pack("<Qq2f", 1, 4, 0, 0), r"expected ascending row numbers from 0 to 3, found \[4\]"),
        (struct.pack("<Qq2f", 1, -1, 0, 0), r"found \[-1\]"),
        (struct.pack("<Q2q4f", 2, 1, 1, 0, 0, 0, 0), r"found \[1, 1\]"),
        (struct.pack("<Q2q4f", 2, 2, 1, 0, 0, 0, 0), r"found \[2, 1\]"),
        (struct.pack("<Qqf", 1, 0, 0), "expected 8 bytes for 1 rows of 2 elements of 4 bytes, found 4 bytes"),
        (struct.pack("<Qq3f", 1, 0, 0, 0, 0), "found 12 bytes"),
    ],
)
def test_a_malformed_payload_is_refused_with_what_was_expected(payload: bytes, message: str) -> None:
    with pytest.raises(KVError, match=message):
        reduce.decode(payload, 4, 2, F4)


def test_a_request_with_elements_is_refused() -> None:
    with pytest.raises(KVError, match="expected nothing after 1 row numbers, found 4 bytes"):
        reduce.decode_rows(struct.pack("<Qqf", 1, 0, 0.0), 4)


@settings(max_examples=50, deadline=None)
@given(found=st.sets(st.integers(0, 30)), first=st.integers(0, 31), count=st.integers(0, 31))
def test_within_finds_the_rows_of_a_piece(found: set[int], first: int, count: int) -> None:
    ids = numbers(*sorted(found))
    assert ids[reduce.within(ids, first, count)].tolist() == [i for i in sorted(found) if first <= i < first + count]
