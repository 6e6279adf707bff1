"""Arguments that are no whole numbers, or of another kind, are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distrun_runtime.data import (
    CIFAR10,
    Arrays,
    Epochs,
    ImageRecords,
    Reader,
    SplitSampler,
    epoch_size,
    split_and_load,
    split_data,
    split_input_slice,
)
from distrun_runtime.data.whole import whole

ARRAYS = Arrays(np.arange(10), np.arange(10))


def test_whole_numbers_of_python_and_numpy_are_taken() -> None:
    assert [whole(3, "n"), whole(np.int32(3), "n"), whole(np.uint64(3), "n")] == [3, 3, 3]
    assert list(SplitSampler(np.int64(4), np.int64(2), np.int64(1), shuffle=False)) == [2, 3]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Epochs([1], 1000 / 10 / 2), r"epoch_size is a whole number, not 50\.0; data\.epoch_size\("),
        (lambda: Reader(ARRAYS, 2, epoch_size=2.5), r"epoch_size is a whole number, not 2\.5"),  # type: ignore[arg-type]
        (lambda: Reader(ARRAYS, "2"), "batch_size is a whole number, not '2'"),  # type: ignore[arg-type]
        (lambda: SplitSampler(range(10), 2), r"length is a whole number, not range\(0, 10\); give len\(dataset\)"),  # type: ignore[arg-type]
        (lambda: SplitSampler(10, 2.0, 1), r"num_parts is a whole number, not 2\.0"),  # type: ignore[arg-type]
        (lambda: SplitSampler(10, 2, "1"), "part_index is a whole number, not '1'"),  # type: ignore[arg-type]
        (lambda: epoch_size("100", 10, 2), "num_examples is a whole number, not '100'"),  # type: ignore[arg-type]
        (lambda: split_data(np.zeros(4), "2"), "num_slice is a whole number, not '2'"),  # type: ignore[arg-type]
        (lambda: split_data(np.zeros(4), 2, "0"), "batch_axis is a whole number, not '0'"),  # type: ignore[arg-type]
        (lambda: split_data(np.zeros(4), 2, 0.5), r"batch_axis is a whole number, not 0\.5"),  # type: ignore[arg-type]
        (lambda: split_input_slice(4.5, [1, 1]), r"batch_size is a whole number, not 4\.5"),  # type: ignore[arg-type]
        (lambda: split_input_slice(4, None), "shares of the work are a list of numbers, not None"),  # type: ignore[arg-type]
        (lambda: split_and_load(np.zeros(4), 0), "devices is a list of devices, such as "),  # type: ignore[arg-type]
        (lambda: SplitSampler(10, seed=1.5), r"seed is a whole number, not 1\.5"),  # type: ignore[arg-type]
        (lambda: SplitSampler(10).set_epoch("1"), "epoch is a whole number, not '1'"),  # type: ignore[arg-type]
        (lambda: Reader([1, 2], 2), r"a list is no data set: .* Arrays\(data, label\) makes one of two arrays"),  # type: ignore[arg-type]
        (lambda: Reader(np.zeros(3), 2), "a ndarray is no data set"),  # type: ignore[arg-type]
        (
            lambda: Arrays([1, 2], [1, 2]),
            r"data of a data set is an array \(n, \.\.\.\), not a list; np.asarray makes one",
        ),  # type: ignore[arg-type]
        (lambda: Arrays(np.zeros(2), [1, 2]), r"labels of a data set is an array .*, not a list"),  # type: ignore[arg-type]
        (lambda: ImageRecords("a.rec", (3, 4, 4)), r"records is a RecordFile, not 'a\.rec'; RecordFile\(path\) opens"),  # type: ignore[arg-type]
        (lambda: split_and_load(np.zeros(4), "cpu"), r"devices is a list of devices, such as \['cpu'\]"),
        (lambda: CIFAR10("batch_1.bin"), "files is a list of paths, as cifar10_files gives it, not 'batch_1.bin'"),
        (lambda: CIFAR10([]), r"files is a list of paths, as cifar10_files gives it, not \[\]"),
        (lambda: Epochs(None), "data is what can be iterated, batch by batch, not None"),  # type: ignore[arg-type]
    ],
)
def test_an_argument_of_another_kind_is_an_error_that_names_it(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()
