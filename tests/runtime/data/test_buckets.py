"""Sequences in buckets by their lengths: what a batch has, which order epochs have, what is padding."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrun_runtime.data import BucketReader

IGNORE = -100

Lengths = st.lists(st.integers(1, 12), min_size=1, max_size=40)


def numbered(lengths: list[int]) -> list[list[int]]:
    """Return sequences of these numbers of elements to read; no two elements are equal, and none is 0, the padding."""
    begins = np.cumsum([1, *(length + 1 for length in lengths)]).tolist()
    return [list(range(begin, begin + length + 1)) for begin, length in zip(begins, lengths, strict=False)]


def rows_of(reader: BucketReader) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return data and labels of an epoch's sequences without what is padding."""
    rows = []
    for data, label in reader:
        for one, other in zip(data, label, strict=True):
            assert ((one == 0) == (other == IGNORE)).all()
            rows.append((tuple(one[one != 0].tolist()), tuple(other[other != IGNORE].tolist())))
    return [row for row in rows if row[0]]


def test_the_label_of_an_element_is_the_next_one() -> None:
    reader = BucketReader([[5, 6, 7], [8, 9]], 1, buckets=[1, 2], layout="NT", shuffle=False)
    assert [(data.tolist(), label.tolist()) for data, label in reader] == [([[8]], [[9]]), ([[5, 6]], [[6, 7]])]


def test_arrays_are_time_major_unless_asked_otherwise() -> None:
    (data, label), *_ = BucketReader([[5, 6, 7], [8, 9]], 2, buckets=[2], shuffle=False)
    assert data.tolist() == [[5, 8], [6, 0]]
    assert label.tolist() == [[6, 9], [7, IGNORE]]
    assert data.flags.c_contiguous
    assert data.dtype == label.dtype == np.int64


def test_labels_may_be_given_and_padding_chosen() -> None:
    reader = BucketReader(
        [[5, 6], [8]], 2, labels=[[1, 0], [1]], buckets=[3], layout="NT", shuffle=False, pad=9, ignore=-1
    )
    assert [(data.tolist(), label.tolist()) for data, label in reader] == [
        ([[5, 6, 9], [8, 9, 9]], [[1, 0, -1], [1, -1, -1]])
    ]


@settings(deadline=None)
@given(Lengths, st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_an_epoch_has_each_sequence_once_in_the_shortest_bucket_that_it_fits(
    lengths: list[int], batch_size: int, num_parts: int, buckets: int
) -> None:
    sequences = numbered(lengths)
    found: Counter[Any] = Counter()
    for part_index in range(num_parts):
        more: dict[str, Any] = {"num_parts": num_parts, "part_index": part_index, "layout": "NT", "seed": 3}
        reader = BucketReader(sequences, batch_size, buckets=buckets, **more)
        assert len(reader.buckets) <= buckets
        assert reader.buckets[-1] == max(lengths)
        for data, _ in BucketReader(sequences, batch_size, buckets=buckets, **more):
            longest = int((data != 0).sum(axis=1).max())
            shorter = [length for length in reader.buckets if length < data.shape[1]]
            assert data.shape[0] == batch_size
            assert data.shape[1] in reader.buckets
            assert not longest or not shorter or longest > shorter[-1]
        found.update(rows_of(reader))
    assert found == Counter((tuple(one[:-1]), tuple(one[1:])) for one in sequences)


@settings(deadline=None)
@given(Lengths, st.integers(1, 4), st.integers(2, 3), st.integers(0, 3))
def test_all_parts_are_at_the_same_bucket_in_each_step(
    lengths: list[int], batch_size: int, num_parts: int, seed: int
) -> None:
    shapes = set()
    for part_index in range(num_parts):
        reader = BucketReader(
            numbered(lengths), batch_size, buckets=3, num_parts=num_parts, part_index=part_index, seed=seed
        )
        shapes.add(tuple(data.shape for _ in range(2) for data, _ in reader))
    assert len(shapes) == 1


def test_a_batch_that_is_not_full_is_dealt_to_all_parts() -> None:
    for part_index in range(2):
        ((data, _),) = BucketReader(numbered([2] * 2), 2, buckets=[2], num_parts=2, part_index=part_index, layout="NT")
        assert (data != 0).all(axis=1).sum() == 1


def test_the_order_follows_from_the_seed_and_the_epoch() -> None:
    def reader(**more: Any) -> BucketReader:
        return BucketReader(numbered(list(range(1, 30))), 2, buckets=3, layout="NT", **more)

    one, other, later = reader(seed=1), reader(seed=1), reader(seed=1)
    first, second = rows_of(one), rows_of(one)
    assert (rows_of(other), rows_of(other)) == (first, second)
    assert first != second
    later.set_epoch(1)
    assert rows_of(later) == second
    assert rows_of(reader(seed=2)) != first
    assert sorted(first) == sorted(second)


def test_without_shuffle_all_epochs_are_alike_by_length() -> None:
    reader = BucketReader(numbered([3, 1, 2, 1]), 1, buckets=[1, 2, 3], layout="NT", shuffle=False)
    assert [len(data) for data, _ in rows_of(reader)] == [1, 1, 2, 3]
    assert rows_of(reader) == rows_of(reader)


@settings(deadline=None)
@given(Lengths, st.integers(1, 5), st.integers(1, 3))
def test_the_share_of_padding_is_that_of_the_batches(lengths: list[int], batch_size: int, buckets: int) -> None:
    reader = BucketReader(numbered(lengths), batch_size, buckets=buckets)
    elements = np.concatenate([data.ravel() for data, _ in reader])
    assert reader.padding == pytest.approx((elements == 0).mean())
    assert len(reader) == sum(1 for _ in reader)


def test_what_does_not_fill_a_batch_is_dropped_if_asked_and_other_sequences_in_each_epoch() -> None:
    sequences = numbered([2] * 7)
    reader = BucketReader(sequences, 4, buckets=[3], layout="NT", remainder="drop")
    epochs = [rows_of(reader) for _ in range(20)]
    assert {len(rows) for rows in epochs} == {4}
    assert len(reader) == 1
    assert {row for rows in epochs for row in rows} == {(tuple(one[:-1]), tuple(one[1:])) for one in sequences}
    assert reader.padding == pytest.approx(1 / 3)


def test_long_sequences_are_an_error_dropped_or_cut() -> None:
    sequences = numbered([2, 9, 3])
    with pytest.raises(ValueError, match=r"sequence 1 has 9 elements to read, the largest bucket 3; give a longer"):
        BucketReader(sequences, 1, buckets=[3])
    dropped = BucketReader(sequences, 1, buckets=[3], layout="NT", too_long="drop")
    assert len(rows_of(dropped)) == 2
    assert dropped.num_dropped == 1
    cut = BucketReader(sequences, 1, buckets=[3], layout="NT", too_long="cut")
    assert sorted(len(data) for data, _ in rows_of(cut)) == [2, 3, 3]
    assert cut.num_dropped == 0


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"sequences": []}, "expected at least one sequence, found none"),
        ({"sequences": [[1, 2], [3]]}, "sequence 1: expected at least 2, an element and one to predict, found 1"),
        ({"sequences": [[1], []], "labels": [[1], []]}, "sequence 1: expected at least 1, an element, found 0"),
        ({"labels": [[1, 2]]}, "2 sequences, but labels for 1"),
        ({"labels": [[1, 2], [3]]}, "sequence 1 has 2 elements, but 1 labels"),
        ({"batch_size": 0}, "batch_size is a number from 1, not 0"),
        ({"num_parts": 2, "part_index": 2}, "expected 0 <= part_index < num_parts, found part 2 of 2"),
        ({"layout": "T"}, "unknown layout 'T'; known are TN, NT"),
        ({"remainder": "wrap"}, "unknown remainder 'wrap'; known are pad, drop"),
        ({"too_long": "keep"}, "unknown too_long 'keep'; known are error, drop, cut"),
        ({"buckets": []}, "expected at least one bucket, found none"),
        ({"buckets": 0}, "buckets is a number from 1, not 0"),
        ({"buckets": [0]}, "a bucket's length is a number from 1, not 0"),
        ({"sequences": [[1, 2, 3]], "buckets": [1], "too_long": "drop"}, "all 1 sequences are longer than the largest"),
        ({"batch_size": 3, "remainder": "drop"}, "no bucket has the 3 sequences of a batch of all parts, at most 2"),
        ({"seed": -1}, "seed is a number from 0, not -1"),
    ],
)
def test_wrong_arguments_are_named(more: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        BucketReader(**{"sequences": [[1, 2], [3, 4]], "batch_size": 1, "buckets": 1, **more})


@pytest.mark.parametrize("sequence", [[0.5, 1.0], "ab", [[1, 2], [3, 4]], 3])
def test_a_sequence_of_something_else_is_refused(sequence: Any) -> None:
    with pytest.raises(TypeError, match="sequence 1 is a list of whole numbers, not "):
        BucketReader([[1, 2], sequence], 1)
