"""A worker's part of a data set: every example once or as often as the remainder asks, in new orders."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distrun_runtime.data.sampler import GlobalShuffleSampler, SplitSampler, part


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


def test_torchs_data_loader_takes_the_sampler(peer: object) -> None:
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
    assert peer("torch", text).splitlines() == [  # type: ignore[operator]
        *("2 [0, 1, 2, 3, 4]", "2 [5, 6, 7, 8, 9]"),
        *["[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]"] * 2,
    ]


def test_no_module_of_data_imports_torch_or_pillow() -> None:
    from subprocess import check_output

    text = "import sys, distrun_runtime.data; print(sorted(n for n in ('torch', 'PIL', 'zmq') if n in sys.modules))"
    assert check_output([sys.executable, "-c", text], text=True) == "[]\n"


def test_the_readers_examples_in_docstrings_are_right() -> None:
    import doctest

    from distrun_runtime.data import epoch, sampler, split

    for module in (epoch, sampler, split):
        done = doctest.testmod(module, extraglobs={"np": np})
        assert done.attempted, module
        assert not done.failed, module
    assert re.match("Epochs of a fixed number", epoch.__doc__ or "")
