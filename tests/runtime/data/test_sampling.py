"""Parts of data sets and their orders, epochs of so many batches, batches cut for devices; and checks of arguments."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distrun_runtime.data import (
    CIFAR10,
    Arrays,
    Epochs,
    GlobalShuffleSampler,
    ImageRecords,
    Reader,
    SplitSampler,
    epoch_size,
    part,
    split_and_load,
    split_data,
    split_input_slice,
)

# --- parts and orders


def parts(length: int, num: int, remainder: str) -> list[list[int]]:
    return [part(length, num, i, remainder).tolist() for i in range(num)]


def test_the_examples_of_ten_for_four_in_each_way() -> None:
    assert parts(10, 4, "drop") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert parts(10, 4, "wrap") == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 1]]
    assert parts(10, 4, "pad") == [[0, 1, 0], [2, 3, 4], [5, 6, 5], [7, 8, 9]]
    assert parts(10, 4, "spread") == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 12))
def test_parts_cover_and_overlap_as_they_say(length: int, num: int) -> None:
    for remainder in ("pad", "wrap"):
        cut = parts(length, num, remainder)
        assert {len(piece) for piece in cut} == {-(-length // num)}
        assert {i for piece in cut for i in piece} == set(range(length))
    assume(length >= num)
    spread = parts(length, num, "spread")
    assert [i for piece in spread for i in piece] == list(range(length))
    assert max(map(len, spread)) - min(map(len, spread)) <= 1
    drop = parts(length, num, "drop")
    assert [i for piece in drop for i in piece] == list(range(length // num * num))
    assert {len(piece) for piece in drop} == {length // num}
    # Padding stays within the part, so no worker needs another's examples.
    for piece, padded in zip(spread, parts(length, num, "pad"), strict=True):
        assert set(piece) == set(padded)


def test_what_cannot_be_cut_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="part 2 of 2"):
        part(10, 2, 2, "drop")
    with pytest.raises(ValueError, match="3 examples are too few for 4 parts; use fewer parts, or remainder='wrap'"):
        part(3, 4, 0, "drop")
    with pytest.raises(ValueError, match="a data set without examples has no parts"):
        part(0, 1, 0, "wrap")
    with pytest.raises(ValueError, match="'rest'; known are drop, pad, wrap, spread"):
        part(3, 1, 0, "rest")
    with pytest.raises(ValueError, match="unequal length; use drop, pad or wrap"):
        SplitSampler(10, 3, 0, "spread")


def test_the_sampler_takes_the_seeds_three_arguments() -> None:
    sampler = SplitSampler(50000, 3, 1)
    assert len(sampler) == 16666
    assert sorted(sampler) == list(range(16666, 33332))


def test_each_epoch_has_another_order_and_a_seed_repeats_them() -> None:
    first, second = SplitSampler(100, seed=5), SplitSampler(100, seed=5)
    epochs = [list(first) for _ in range(3)]
    assert [list(second) for _ in range(3)] == epochs
    assert epochs[0] != epochs[1] != epochs[2]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert list(SplitSampler(100)) != list(SplitSampler(100))
    second.set_epoch(1)
    assert list(second) == epochs[1]


def test_a_seed_and_an_epoch_are_numbers_from_0() -> None:
    with pytest.raises(ValueError, match="seed is a number from 0, not -1"):
        SplitSampler(10, seed=-1)
    with pytest.raises(ValueError, match="epoch is a number from 0, not -1"):
        SplitSampler(10).set_epoch(-1)


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 9), st.sampled_from(["drop", "pad", "wrap"]), st.integers(0, 5))
def test_a_global_shuffle_deals_all_examples_anew_in_each_epoch(
    length: int, num: int, remainder: str, seed: int
) -> None:
    assume(length >= num or remainder != "drop")
    samplers = [GlobalShuffleSampler(length, num, rank, remainder, seed=seed) for rank in range(num)]
    for _ in range(2):
        dealt = [list(sampler) for sampler in samplers]
        assert {len(positions) for positions in dealt} == {len(samplers[0])}
        # As many of each as the remainder has it for parts of neighbours; only which ones is another matter.
        counts = np.bincount([position for positions in dealt for position in positions], minlength=length)
        plain = np.bincount(
            np.concatenate([part(length, num, rank, remainder) for rank in range(num)]), minlength=length
        )
        assert sorted(counts) == sorted(plain)


def test_workers_see_all_classes_of_sorted_data_only_by_a_global_shuffle() -> None:
    labels = np.repeat(np.arange(10), 100)

    def classes(sampler: SplitSampler | GlobalShuffleSampler) -> set[int]:
        return set(labels[list(sampler)].tolist())

    split = [SplitSampler(1000, 5, rank, seed=0) for rank in range(5)]
    assert [classes(one) for one in split] == [classes(one) for one in split] == [{2 * r, 2 * r + 1} for r in range(5)]
    for rank in range(5):
        assert classes(GlobalShuffleSampler(1000, 5, rank)) == set(range(10))


def test_a_global_shuffle_follows_its_seed_and_epoch() -> None:
    first, second = GlobalShuffleSampler(100, 2, 1, seed=5), GlobalShuffleSampler(100, 2, 1, seed=5)
    epochs = [list(first) for _ in range(3)]
    assert [list(second) for _ in range(3)] == epochs
    assert set(epochs[0]) != set(epochs[1]), "other examples, not only another order"
    assert list(GlobalShuffleSampler(100, 2, 1, seed=6)) != epochs[0]
    second.set_epoch(1)
    assert list(second) == epochs[1]
    assert all(type(position) is int for position in epochs[0])


def test_a_global_shuffle_needs_a_seed_that_all_workers_have() -> None:
    with pytest.raises(TypeError, match="seed is a whole number, not None; all workers give the same, such as 0"):
        GlobalShuffleSampler(10, 2, 0, seed=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unequal length; use drop, pad or wrap"):
        GlobalShuffleSampler(10, 3, 0, "spread")
    with pytest.raises(ValueError, match="part 3 of 3"):
        GlobalShuffleSampler(10, 3, 3)


def test_positions_are_plain_ints_and_in_order_without_shuffle() -> None:
    sampler = SplitSampler(5, 2, 1, "wrap", shuffle=False)
    assert list(sampler) == [3, 4, 0]
    assert all(type(position) is int for position in sampler)


def test_torchs_data_loader_takes_the_sampler(run_by_peer: object) -> None:
    text = """\
import torch
from distrun_runtime.data import Arrays, SplitSampler
import numpy as np
dataset = Arrays(np.arange(10.0), np.arange(10))
for rank in range(2):
    sampler = SplitSampler(len(dataset), 2, rank, seed=1)
    loader = torch.utils.data.DataLoader(dataset, batch_size=3, sampler=sampler)
    print(len(loader), sorted(int(i) for _, label in loader for i in label))
from distrun_runtime.data import GlobalShuffleSampler
samplers = [GlobalShuffleSampler(len(dataset), 2, rank, seed=1) for rank in range(2)]
loaders = [torch.utils.data.DataLoader(dataset, batch_size=3, num_workers=1, sampler=one) for one in samplers]
for epoch in range(2):
    print(sorted(int(i) for loader in loaders for _, label in loader for i in label))
"""
    assert run_by_peer("torch", text).splitlines() == [  # type: ignore[operator]
        *("2 [0, 1, 2, 3, 4]", "2 [5, 6, 7, 8, 9]"),
        *["[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]"] * 2,
    ]


def test_the_readers_examples_in_docstrings_are_right() -> None:
    import doctest

    from distrun_runtime.data import sampling

    done = doctest.testmod(sampling, extraglobs={"np": np})
    assert done.attempted >= 4
    assert not done.failed


# --- epochs


@pytest.mark.parametrize(
    ("examples", "batch", "workers", "expected"), [(60000, 64, 1, 937), (50000, 128, 3, 130), (10, 5, 2, 1)]
)
def test_epoch_size_is_the_seeds_formula(examples: int, batch: int, workers: int, expected: int) -> None:
    assert epoch_size(examples, batch, workers) == expected == int(examples / batch / workers)


def test_an_epoch_of_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="9 examples are not one batch of 5 for each of 2 workers"):
        epoch_size(9, 5, 2)
    with pytest.raises(ValueError, match="num_workers=0"):
        epoch_size(9, 5, 0)
    with pytest.raises(ValueError, match="at least 1 batch, found 0"):
        Epochs([1], 0)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5))
def test_every_batch_has_its_turn(batches: int, size: int, count: int) -> None:
    epochs = Epochs(range(batches), size)
    drawn = [batch for _ in range(count) for batch in epochs]
    assert drawn == [i % batches for i in range(size * count)]


def test_an_epoch_that_is_broken_off_counts_as_far_as_it_came() -> None:
    epochs = Epochs(range(10), 4)
    assert list(islice(epochs, 2)) == [0, 1]
    assert list(epochs) == [2, 3, 4, 5]


def test_a_generator_cannot_be_started_again_and_the_error_says_so() -> None:
    epochs = Epochs((i for i in range(3)), 2)
    assert list(epochs) == [0, 1]
    with pytest.raises(ValueError, match=r"a generator, gives no batch when it is started.*not a generator"):
        list(epochs)


# --- batches cut for devices


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


def test_shares_and_slices_are_those_of_mxnet(run_by_peer: Callable[..., str]) -> None:
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
    assert json.loads(run_by_peer("mxnet", text, json.dumps(cases))) == ours
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


# --- arguments of another kind

ARRAYS = Arrays(np.arange(10), np.arange(10))


def test_whole_numbers_of_python_and_numpy_are_taken() -> None:
    assert [epoch_size(*map(kind, (12, 2, 2))) for kind in (int, np.int32, np.uint64)] == [3, 3, 3]
    assert list(SplitSampler(np.int64(4), np.int64(2), np.int64(1), shuffle=False)) == [2, 3]  # type: ignore[arg-type]


def test_an_epoch_size_may_be_the_seeds_quotient() -> None:
    """num_examples / batch_size / num_workers has been a float since Python 3."""
    assert [list(Epochs("abc", size)) for size in (100 / 20 / 2, np.float32(1), 2.0)] == [["a", "b"], ["a"], ["a", "b"]]
    assert len(Reader(ARRAYS, 2, epoch_size=15 / 2 / 2)) == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Epochs([1], 10 / 100 / 2), r"epoch_size is a whole number, not 0\.05; data\.epoch_size\("),
        (lambda: Reader(ARRAYS, 2, epoch_size=math.inf), r"epoch_size is a whole number, not inf"),
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
