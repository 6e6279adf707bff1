"""Epochs of exactly so many batches."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrun_runtime.data.epoch import Epochs, epoch_size


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


def test_data_that_ends_earlier_starts_again_and_goes_on_in_the_next_epoch() -> None:
    epochs = Epochs(["a", "b", "c"], size=5)
    assert [list(epochs) for _ in range(3)] == [list("abcab"), list("cabca"), list("bcabc")]


def test_data_that_is_longer_is_not_started_again_in_its_midst() -> None:
    epochs = Epochs(range(5), size=2)
    assert [list(epochs) for _ in range(4)] == [[0, 1], [2, 3], [4, 0], [1, 2]]


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5))
def test_every_batch_has_its_turn(batches: int, size: int, count: int) -> None:
    epochs = Epochs(range(batches), size)
    drawn = [batch for _ in range(count) for batch in epochs]
    assert drawn == [i % batches for i in range(size * count)]


def test_without_a_size_an_epoch_is_the_data_once() -> None:
    epochs = Epochs("abc")
    assert [list(epochs), list(epochs)] == [list("abc"), list("abc")]


def test_an_epoch_that_is_broken_off_counts_as_far_as_it_came() -> None:
    epochs = Epochs(range(10), 4)
    assert list(islice(epochs, 2)) == [0, 1]
    assert list(epochs) == [2, 3, 4, 5]


def test_a_generator_cannot_be_started_again_and_the_error_says_so() -> None:
    epochs = Epochs((i for i in range(3)), 2)
    assert list(epochs) == [0, 1]
    with pytest.raises(ValueError, match=r"a generator, gives no batch when it is started.*not a generator"):
        list(epochs)
