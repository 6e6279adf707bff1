"""Batches of a part of a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from distrun_runtime.data import Arrays, Reader, RecordFile, RecordWriter
from distrun_runtime.data.reader import Batch


def numbers(count: int) -> Arrays:
    return Arrays(np.arange(count, dtype=np.float32)[:, None] * 10, np.arange(count))


def labels(reader: Reader) -> list[list[int]]:
    return [label.tolist() for _, label in reader]


def test_batches_have_their_labels_and_the_last_may_be_short() -> None:
    reader = Reader(numbers(5), 2)
    assert labels(reader) == [[0, 1], [2, 3], [4]]
    assert all((data[:, 0] == 10 * label).all() for data, label in reader)
    assert len(reader) == 3
    assert reader.num_examples == 5


def test_the_last_short_batch_can_be_discarded() -> None:
    reader = Reader(numbers(5), 2, last_batch="discard")
    assert labels(reader) == [[0, 1], [2, 3]]
    assert len(reader) == 2
    with pytest.raises(ValueError, match="5 examples are less than a batch of 6"):
        Reader(numbers(5), 6, last_batch="discard")


def test_parts_cover_the_data_once() -> None:
    read = [labels(Reader(numbers(10), 2, num_parts=4, part_index=i)) for i in range(4)]
    assert read == [[[0, 1]], [[2, 3], [4]], [[5, 6]], [[7, 8], [9]]]


def test_shuffle_draws_a_new_order_for_each_pass_which_a_seed_repeats() -> None:
    def passes(seed: int | None) -> list[list[int]]:
        reader = Reader(numbers(50), 50, shuffle=True, seed=seed)
        return [labels(reader)[0] for _ in range(2)]

    first = passes(3)
    assert first == passes(3) != passes(4)
    assert first[0] != first[1]
    assert sorted(first[0]) == sorted(first[1]) == list(range(50))
    assert passes(None) != passes(None)


def test_a_reader_takes_a_data_set_of_the_users() -> None:
    class Squares:
        def __len__(self) -> int:
            return 4

        def read(self, positions: NDArray[np.int64]) -> Batch:
            return positions.astype(np.float64) ** 2, positions

    assert [data.tolist() for data, _ in Reader(Squares(), 3)] == [[0, 1, 4], [9]]


def test_arguments_out_of_range_are_refused_with_the_words_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch_size of at least 1, found 0"):
        Reader(numbers(3), 0)
    with pytest.raises(ValueError, match="'roll'; known are keep and discard"):
        Reader(numbers(3), 1, last_batch="roll")
    with pytest.raises(ValueError, match="by='size'; known are count and bytes"):
        Reader(numbers(3), 1, by="size")
    with pytest.raises(ValueError, match="Arrays is not a file of records; cut it by='count'"):
        Reader(numbers(3), 1, by="bytes")
    with pytest.raises(ValueError, match="3 examples, but 2 labels"):
        Arrays(np.zeros(3), np.zeros(2))


def test_records_are_cut_by_bytes_if_asked_to(tmp_path: Path) -> None:
    """The first record is as long as all the others, so by bytes it is a part of its own."""

    class Lengths:
        def __init__(self, file: RecordFile) -> None:
            self.file = file

        def __len__(self) -> int:
            return len(self.file)

        def cut(self, num_parts: int, part_index: int) -> Lengths:
            return Lengths(self.file.cut(num_parts, part_index))

        def read(self, positions: NDArray[np.int64]) -> Batch:
            return np.array([len(self.file[i]) for i in positions]), positions

    with RecordWriter(tmp_path / "a.rec") as writer:
        for record in [bytes(92), *[bytes(2)] * 8]:
            writer.write(record)
    dataset = Lengths(RecordFile(tmp_path / "a.rec"))
    found = [Reader(dataset, 9, num_parts=2, part_index=i, by="bytes").num_examples for i in range(2)]
    assert found == [1, 8]
    with pytest.raises(ValueError, match="no record begins in part 1 of 9; use fewer parts"):
        Reader(dataset, 9, num_parts=9, part_index=1, by="bytes")
    assert [Reader(dataset, 9, num_parts=2, part_index=i).num_examples for i in range(2)] == [4, 5]


def labels_of(reader: Reader) -> list[int]:
    return [int(each) for _, label in reader for each in label]


def test_with_epochs_of_full_batches_all_parts_begin_each_pass_together() -> None:
    dataset = Arrays(np.arange(22.0), np.arange(22))
    size = 22 // (5 * 2)
    options = {"num_parts": 2, "remainder": "drop", "shuffle": "global", "seed": 4, "last_batch": "discard"}
    readers = [Reader(dataset, 5, part_index=rank, epoch_size=size, **options) for rank in range(2)]
    for _ in range(3):
        seen = [label for reader in readers for label in labels_of(reader)]
        assert len(seen) == len(set(seen)) == 20


def test_a_reader_goes_on_at_an_epoch_also_within_a_pass() -> None:
    def reader(shuffle: bool | str) -> Reader:
        return Reader(Arrays(np.arange(9.0), np.arange(9)), 4, shuffle=shuffle, seed=1, epoch_size=2)

    for shuffle in (True, "global"):
        first, second = reader(shuffle), reader(shuffle)
        epochs = [labels_of(first) for _ in range(6)]
        for number in (0, 0, 4, 5, 3, 2):  # of two batches each, where a pass has three
            second.set_epoch(number)
            assert labels_of(second) == epochs[number]
        assert labels_of(second) == epochs[3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shuffle": "all"}, "unknown shuffle 'all'; known are False, True and 'global'"),
        (
            {"shuffle": "global", "num_parts": 2},
            "shuffle='global' needs a seed, the same on all workers, such as seed=0",
        ),
        ({"shuffle": "global", "by": "bytes", "seed": 0}, "cut by='bytes' cannot be shuffled as a whole"),
    ],
    ids=str,
)
def test_a_shuffle_that_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Reader(Arrays(np.arange(9.0), np.arange(9)), 4, **options)


LOADED = """\
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from distrun_runtime.data import Arrays, Reader

class Batches(IterableDataset):
    def __init__(self, **options):
        self.reader = Reader(Arrays(np.arange(24), np.arange(24)), 3, **options)

    def __iter__(self):
        return iter(self.reader)

def epochs(processes, persistent=False, **options):
    torch.manual_seed(0)
    loader = DataLoader(
        Batches(**options), None, num_workers=processes, persistent_workers=persistent, multiprocessing_context="fork"
    )
    return [[tuple(data.tolist()) for data, _ in loader] for _ in range(3)]

for options in ({}, {"shuffle": True}, {"shuffle": True, "seed": 1}, {"persistent": True, "shuffle": True}):
    found = epochs(2, **options)
    whole = [sorted(sum(epoch, ())) == list(range(24)) for epoch in found]
    print(all(whole), len(set(map(tuple, found))), found == epochs(2, **{"seed": 1, **options}))
print(epochs(2)[0] == epochs(1)[0])
try:
    epochs(2, epoch_size=5)
except ValueError as err:
    print(str(err).strip().splitlines()[-1])
"""


PER_EPOCH = (
    "ValueError: a copy of this Reader in a process of a DataLoader does not know where the epoch before stopped, as"
    " epoch_size needs it; fix: Epochs(loader, size) around the DataLoader, and a Reader without epoch_size"
)


def test_processes_of_a_data_loader_share_a_readers_batches_in_another_order_in_each_epoch(run_by_peer: Any) -> None:
    lines = run_by_peer("torch", LOADED).splitlines()
    assert lines == ["True 1 True", "True 3 False", "True 3 True", "True 3 False", "True", PER_EPOCH]
