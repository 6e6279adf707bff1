"""Batches cut for devices, with MXNet's sizes and roundings."""

from __future__ import annotations

import json
import math
from typing import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrun_runtime.data.split import split_and_load, split_data, split_input_slice


class Tensor:
    """Stands in for a torch tensor: it goes where it is told."""

    def __init__(self, array: np.ndarray, device: str = "cpu") -> None:
        self.array, self.device = array, device

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def __getitem__(self, key: object) -> Tensor:
        return Tensor(self.array[key], self.device)  # type: ignore[index]

    def to(self, device: str) -> Tensor:
        return Tensor(self.array, device)


def sizes(parts: list[np.ndarray], axis: int = 0) -> list[int]:
    return [part.shape[axis] for part in parts]


def test_an_even_split_shares_the_memory_of_the_data() -> None:
    data = np.arange(12).reshape(6, 2)
    parts = split_data(data, 3)
    assert sizes(parts) == [2, 2, 2]
    assert all(np.shares_memory(part, data) for part in parts)
    np.testing.assert_array_equal(np.concatenate(parts), data)


def test_a_size_that_the_slices_do_not_divide_is_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match=r"8 examples along axis 1, which 3 .* multiple of 3, or even_split=False"):
        split_data(np.zeros((2, 8)), 3, batch_axis=1)


@pytest.mark.parametrize(
    ("size", "slices", "expected"),
    [(8, 3, [3, 3, 2]), (7, 4, [2, 2, 2, 1]), (2, 3, [1, 1, 0]), (0, 2, [0, 0]), (9, 1, [9])],
)
def test_an_uneven_split_gives_the_first_slices_one_more(size: int, slices: int, expected: list[int]) -> None:
    assert sizes(split_data(np.zeros(size), slices, even_split=False)) == expected


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 9), st.integers(-2, 1))
def test_a_split_covers_the_data_once_in_order(size: int, slices: int, axis: int) -> None:
    shape = [2, 2]
    shape[axis] = size
    data = np.arange(2 * size).reshape(shape)
    parts = split_data(data, slices, batch_axis=axis, even_split=False)
    assert max(sizes(parts, axis)) - min(sizes(parts, axis)) <= 1
    np.testing.assert_array_equal(np.concatenate(parts, axis=axis), data)


def test_an_axis_that_is_not_there_and_no_slice_are_refused() -> None:
    with pytest.raises(IndexError, match="has no axis 1"):
        split_data(np.zeros(3), 1, batch_axis=1)
    with pytest.raises(ValueError, match="at least 1 slice, found 0"):
        split_data(np.zeros(3), 0)


@pytest.mark.parametrize(
    ("batch", "shares", "expected"),
    [
        (10, [3, 1], [8, 2]),  # round(7.5) is 8: halves go to the even number
        (10, [1, 3], [2, 8]),  # round(2.5) is 2
        (10, [1, 1, 1], [3, 3, 4]),  # one is missing: to the last
        (11, [1, 1, 1], [4, 4, 3]),  # one too many: from the last
        (8, [1, 1], [4, 4]),
        (5, [2.5], [5]),
        (3, [1, 1], [2, 1]),
    ],
)
def test_shares_of_the_work_are_rounded_as_mxnet_rounds(batch: int, shares: list[float], expected: list[int]) -> None:
    assert [part.stop - part.start for part in split_input_slice(batch, shares)] == expected


@settings(deadline=None)
@given(st.integers(1, 200), st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_shares_cover_the_batch_once_or_are_refused(batch: int, shares: list[float]) -> None:
    try:
        slices = split_input_slice(batch, shares)
    except ValueError as error:
        assert "Too many slices" in str(error)  # noqa: PT017
        return
    covered = [i for part in slices for i in range(batch)[part]]
    assert covered == list(range(batch))


def test_shares_and_slices_are_those_of_mxnet(peer: Callable[..., str]) -> None:
    rng = np.random.default_rng(5)
    cases = [
        (int(rng.integers(1, 40)), (rng.integers(1, 12, size=rng.integers(1, 6)) / 4).tolist()) for _ in range(300)
    ]
    text = """\
import json, sys
import mxnet as mx
from mxnet.executor_manager import _split_input_slice
found = []
for batch, shares in json.loads(sys.argv[1]):
    try:
        slices = [part.stop - part.start for part in _split_input_slice(batch, shares)]
    except ValueError:
        slices = None
    parts = mx.gluon.utils.split_data(mx.np.zeros(batch), len(shares), even_split=False)
    found.append([slices, [len(part) for part in parts]])
print(json.dumps(found))
"""

    def slices(batch: int, shares: list[float]) -> list[int] | None:
        try:
            return [part.stop - part.start for part in split_input_slice(batch, shares)]
        except ValueError:
            return None

    ours = [
        [slices(batch, shares), sizes(split_data(np.zeros(batch), len(shares), even_split=False))]
        for batch, shares in cases
    ]
    assert json.loads(peer("mxnet", text, json.dumps(cases))) == ours
    assert any(found is None for found, _ in ours)


def test_a_device_without_an_example_and_a_share_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Too many slices. Some splits are empty: a batch of 2 for shares"):
        split_input_slice(2, [1, 1, 1])
    for shares in ([1, 0], [], [2, -1], [1, math.nan], [math.inf, 1], [1, "2"]):
        with pytest.raises(ValueError, match="shares above 0"):
            split_input_slice(4, shares)  # type: ignore[arg-type]
    assert sizes(split_and_load(np.zeros(10), ["cpu", "cpu"], work_load_list=np.array([3, 1]))) == [8, 2]  # type: ignore[arg-type]


def test_one_device_gets_all_of_the_data_uncut() -> None:
    data = np.zeros((5, 2))
    (part,) = split_and_load(data, ["cpu"])
    assert part is data


def test_each_device_gets_its_part_on_it() -> None:
    parts = split_and_load(Tensor(np.arange(6)), ["cuda:0", "cuda:2"])
    assert [(part.device, part.array.tolist()) for part in parts] == [("cuda:0", [0, 1, 2]), ("cuda:2", [3, 4, 5])]


def test_work_load_list_gives_a_faster_device_more() -> None:
    assert sizes(split_and_load(np.zeros(10), ["cpu", "cpu"], work_load_list=[3, 1])) == [8, 2]
    with pytest.raises(ValueError, match="1 shares in work_load_list for 2 devices"):
        split_and_load(np.zeros(10), ["cpu", "cpu"], work_load_list=[3])


def test_a_numpy_array_is_not_loaded_on_a_gpu() -> None:
    with pytest.raises(ValueError, match="a ndarray lives in host memory"):
        split_and_load(np.zeros(4), ["cuda:0", "cuda:1"])
    with pytest.raises(ValueError, match="at least one device"):
        split_and_load(np.zeros(4), [])


def test_a_list_is_refused_with_what_to_do() -> None:
    with pytest.raises(TypeError, match="an array or a tensor, not a list"):
        split_and_load([1, 2, 3, 4], ["cpu", "cpu"])  # type: ignore[type-var]  # what is tested
