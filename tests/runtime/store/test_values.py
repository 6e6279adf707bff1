from __future__ import annotations

import array as buffers
import enum

import ml_dtypes
import numpy as np
import pytest

from distrun_runtime.arrays import dtypes
from distrun_runtime.errors import KVError
from distrun_runtime.store.values import (
    array_of,
    contributions,
    key_of,
    keys_of,
    one_kind,
    output_of,
    outputs,
)

A, B, C = np.ones(2), np.full(2, 2.0), np.full(2, 3.0)


class Color(enum.IntEnum):
    RED = 7


class Foreign:
    """An array of another library: only DLPack."""

    def __init__(self, inner: np.ndarray) -> None:
        self.inner = inner

    def __dlpack__(self, **options: object) -> object:
        return self.inner.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.inner.__dlpack_device__()


class OnDevice:
    """An array that does not let itself be read, as cupy's and a torch tensor with a gradient."""

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        raise TypeError("implicit conversion is not allowed")


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (3, 3),
        (-1, -1),
        (np.int64(3), 3),
        (np.uint8(3), 3),
        (Color.RED, 7),
        ("w", "w"),
        (np.str_("w"), "w"),
        ("", ""),
        ("gewicht-ß", "gewicht-ß"),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_keys_are_ints_and_strs_and_numpys_are_taken_as_these(given: object, key: object) -> None:
    found = key_of(given)
    assert found == key
    assert type(found) is type(key)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (1.5, "a key is an int or a str, not float: 1.5"),
        (True, "not bool: True"),
        (np.bool_(True), "not bool"),
        (None, "not NoneType: None"),
        (b"w", "not bytes"),
        (np.array([1]), "not ndarray"),
        (("a",), "not tuple"),
        (2**63, "does not fit into 64 bits; use a str key"),
        ("\udc80", "surrogate"),
    ],
)
def test_a_key_of_a_third_type_is_an_error(given: object, words: str) -> None:
    with pytest.raises(KVError, match=words):
        key_of(given)


def test_int_and_str_keys_in_one_call_or_store_are_an_error_that_names_both() -> None:
    with pytest.raises(KVError, match="key 'b' is str, key 1 is int: the keys of one store are all ints or all strs"):
        contributions([1, "b"], [A, B])
    with pytest.raises(KVError, match="key 1 is int, key 'b' is str"):
        one_kind([1], "b")
    one_kind([1, 2], 3)
    one_kind([])


def test_a_repeated_key_is_one_key_with_all_its_arrays() -> None:
    found = contributions(["b", "a", "b"], [A, B, [C, C]])
    assert [(key, len(arrays)) for key, arrays in found] == [("b", 3), ("a", 1)]
    outs = outputs([3, 3], [np.zeros(1), np.zeros(1)])
    assert [(key, len(arrays)) for key, arrays in outs] == [(3, 2)]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ([1, 2], [A], "2 keys, but 1 values: expected one"),
        ([1], [A, B], "1 keys, but 2 values"),
        ([1, 2], A, "2 keys, but one ndarray instead of a list of values"),
        ("w", [], "key 'w': an empty list, expected at least one value"),
        ("w", [[A]], "key 'w': a list in a list"),
        ([1], [[[A]]], "key 1: a list in a list"),
        ([1, 1.5], [A, B], "not float"),
        ([[1]], [A], "not list"),
    ],
)
def test_keys_and_values_that_do_not_match_are_counted(key: object, value: object, words: str) -> None:
    with pytest.raises(KVError, match=words):
        contributions(key, value)


@pytest.mark.parametrize("dtype", dtypes.NAMES)
def test_arrays_of_every_dtype_are_taken_without_a_copy(dtype: str) -> None:
    value = np.zeros((3, 4), dtypes.parse(dtype))[::2, ::-1]
    assert array_of("w", value) is value


def test_scalars_buffers_and_dlpack_are_taken_as_arrays() -> None:
    assert [array_of(1, np.float16(2)).dtype, array_of(1, np.float16(2)).shape] == [np.float16, ()]
    assert [array_of(1, 2.0).dtype, array_of(1, 2).dtype] == [np.float64, np.int64]
    buffer = buffers.array("f", [1, 2])
    assert np.shares_memory(array_of(1, memoryview(buffer)), np.asarray(buffer))
    inner = np.arange(4.0)
    assert np.shares_memory(array_of(1, Foreign(inner)), inner)


def test_foreign_byte_order_becomes_native() -> None:
    found = array_of(1, np.array([1, 2], ">f4"))
    assert found.dtype == np.float32
    assert found.dtype.isnative
    assert found.tolist() == [1, 2]


@pytest.mark.parametrize(
    "value", [np.array([True]), True, np.zeros(1, complex), "text", None, object(), {"a": 1}, np.zeros(1, "M8[s]")]
)
def test_other_dtypes_are_an_error_that_lists_what_is_right(value: object) -> None:
    with pytest.raises(KVError, match=r"key 'w': a .* gives dtype .*, expected one of float16, bfloat16, .*uint64"):
        array_of("w", value)


def test_an_array_that_cannot_be_read_says_so() -> None:
    with pytest.raises(KVError, match=r"cannot read a OnDevice \(implicit conversion is not allowed\); bring it"):
        array_of("w", OnDevice())


def test_an_output_is_a_writable_numpy_array() -> None:
    out = np.zeros((4, 4))[::2, ::2]
    assert output_of("w", out) is out
    fixed = np.zeros(2)
    fixed.flags.writeable = False
    for given, words in (
        (fixed, "the output is read-only"),
        (np.zeros(2, ">f8"), "byte order is foreign"),
        (Foreign(out), "a torch tensor, or an array in GPU memory, not Foreign"),
        (None, "not NoneType"),
        (1.0, "not float"),
    ):
        with pytest.raises(KVError, match=words):
            output_of("w", given)


def test_an_output_of_a_class_of_its_own_is_filled_as_the_array_that_it_is() -> None:
    """A numpy.matrix stays of two dimensions when it is flattened: pieces after the first went nowhere."""

    class Matrix(np.ndarray):
        """As numpy's, which warns."""

    matrix = np.zeros((2, 3)).view(Matrix)
    out = output_of("w", matrix)
    assert type(out) is np.ndarray
    assert np.shares_memory(out, matrix)


def test_one_key_or_a_list_is_a_list_with_each_key_once() -> None:
    assert keys_of("w") == ["w"]
    assert keys_of(np.int8(3)) == [3]
    assert keys_of(("b", "a", "b")) == ["b", "a"]
    assert keys_of([]) == []
    with pytest.raises(KVError, match="all ints or all strs"):
        keys_of([1, "a"])


def test_bfloat16_of_ml_dtypes_is_viewed_as_ours_in_any_order() -> None:
    given = np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(2, 3)
    for array in (given, given.T, given[:, ::2], given[:1, :1].reshape(())):
        assert array_of("w", array).dtype == dtypes.BFLOAT16
        assert np.shares_memory(array_of("w", array), array)
        assert output_of("w", array).shape == array.shape
    assert array_of("w", given[0, 1]).dtype == dtypes.BFLOAT16
