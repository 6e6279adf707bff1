from __future__ import annotations

import numpy as np
import pytest

from distrun_runtime.errors import KVError
from distrun_runtime.store.record import Record, missing, twice

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
