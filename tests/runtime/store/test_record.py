from __future__ import annotations

import numpy as np
import pytest

from distrun_runtime.arrays.dtypes import BFLOAT16
from distrun_runtime.errors import KVError
from distrun_runtime.store.record import Record, missing, twice
from distrun_runtime.store.sparse import RowSparse

RECORD = Record.of("w", 4, np.zeros((2, 3), np.float32))


def test_a_record_holds_what_init_saw() -> None:
    assert Record(key="w", index=4, shape=(2, 3), dtype=np.dtype("float32"), size=6) == RECORD
    assert Record.of(1, 1, np.array(2.0)).size == 1


def test_an_array_of_another_shape_or_dtype_does_not_fit() -> None:
    RECORD.fit(np.zeros((3, 2), np.float32).T, "output")
    for array in (np.zeros((3, 2), np.float32), np.zeros((2, 3)), np.zeros(6, np.float32)):
        words = "key 'w': the output has shape .* and dtype .*, but the key has shape .2, 3. and dtype float32"
        with pytest.raises(KVError, match=words):
            RECORD.fit(array, "output")


def test_a_missing_key_names_the_near_ones() -> None:
    assert "(near: 'fc1_weight')" in missing("fc1_wieght", ["fc1_weight", "bias"])
    assert "store of 2 keys; call init" in missing("x", ["fc1_weight", "bias"])
    assert "(near: 12)" in missing(2, [12, 7])


def test_a_second_init_shows_what_the_first_one_set() -> None:
    assert "key 'w' was already initialised with shape (2, 3) and dtype float32;" in twice("w", RECORD)
    assert "key 3 was already initialised;" in twice(3, None)


def test_a_sparse_value_makes_the_key_row_sparse() -> None:
    sparse = Record.of("t", 2, RowSparse.empty((5, 2, 3), "float16"))
    assert (sparse.stype, sparse.is_sparse, sparse.size, sparse.row_size) == ("row_sparse", True, 30, 6)
    dense = Record.of("w", 2, np.zeros((5, 2)))
    assert (dense.stype, dense.is_sparse, dense.size, dense.row_size) == ("default", False, 10, 2)
    assert Record.of("s", 0, np.zeros(())).row_size == 1
    sparse.fit(np.zeros((5, 2, 3), np.float16), "value")


def test_bfloat16_is_called_by_its_name() -> None:
    record = Record.of("w", 0, np.zeros(2, BFLOAT16))
    with pytest.raises(KVError, match=r"and dtype uint16, but the key has .* and dtype bfloat16 since its init"):
        record.fit(np.zeros(2, np.uint16), "value")
    assert "with shape (2,) and dtype bfloat16" in twice("w", record)
