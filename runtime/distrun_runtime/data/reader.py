"""Readers: the examples of a data set in batches, for one part of several."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any, Callable, Iterator, Protocol, runtime_checkable

from numpy.typing import NDArray

from distrun_runtime.data.sampling import EpochOrder, Epochs, Positions, loading_process, part, whole

Batch = tuple[NDArray[Any], NDArray[Any]]


@runtime_checkable
class Dataset(Protocol):
    """Examples that are read by their positions."""

    def __len__(self) -> int:
        """Return the number of examples."""
        ...

    def read(self, positions: Positions) -> Batch:
        """Return data (n, ...) and labels (n, ...) of the n examples at these positions, in their order."""
        ...


@runtime_checkable
class Cuttable(Protocol):
    """A data set in a file that is cut by bytes, without looking at the whole file."""

    def cut(self, num_parts: int, part_index: int) -> Dataset:
        """Return the examples of one part."""
        ...


@runtime_checkable
class HasEpochs(Protocol):
    """A data set that draws numbers, other ones in each epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Draw the numbers of this epoch from now on."""
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """A data set that can fetch examples before they are read."""

    def expect(self, positions: Positions) -> None:
        """Begin to fetch the first of these examples, and the others as these are read; forget earlier calls.

        Arguments:
            positions: of all examples of a pass, in the order in which they are read.
        """
        ...


@dataclass(frozen=True)
class Arrays:
    """A data set in memory: data (n, ...) and labels (n, ...), arrays of any dtype.

    Raises:
        TypeError: one of them is no array, such as a list.
        ValueError: they are not equally many.
    """

    data: NDArray[Any]
    label: NDArray[Any]

    def __post_init__(self) -> None:
        for name, array in (("data", self.data), ("labels", self.label)):
            if not len(getattr(array, "shape", ())):
                raise TypeError(
                    f"{name} of a data set is an array (n, ...), not a {type(array).__name__}; np.asarray makes one"
                )
        if len(self.data) != len(self.label):
            raise ValueError(f"{len(self.data)} examples, but {len(self.label)} labels")

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, position: int) -> tuple[Any, Any]:
        """Return one example and its label, for a torch DataLoader."""
        return self.data[position], self.label[position]

    def read(self, positions: Positions) -> Batch:
        """Return copies of the examples and labels at these positions."""
        return self.data[positions], self.label[positions]


class Reader:
    """Batches of a part of a data set: `Reader(dataset, 32, num_parts=kv.num_workers, part_index=kv.rank)`.

    Each iteration is an epoch, in an order of its own with shuffle, and yields numpy arrays (data, label) with the
    batch's examples along the first axis. Processes of a torch DataLoader that have a copy each share the batches.

    Arguments:
        dataset: an `Arrays`, `MNIST`, `CIFAR10`, `ImageRecords`, or an object of yours with `__len__` and `read`.
        batch_size: examples of a batch, at least 1.
        num_parts, part_index: the number of parts and which of them to read, from 0.
        remainder: `spread` (parts differ by at most one example), `drop`, `pad` or `wrap`; see `part`.
        by: `count`, or `bytes` for files of records: parts are cut at the first record after each
            num_parts-th of the file's bytes, as MXNet does it, so their numbers of examples differ.
        epoch_size: batches of an epoch: exactly so many (a quotient is rounded down), starting again when the part is
            exhausted and going on in the next epoch where this one stopped. None: an epoch is the part, once. Not for
            processes of a DataLoader, which begin each epoch with a copy.
        shuffle: True: another order, within the part, for each pass. "global": for each pass all examples of the data
            set are shuffled before they are cut into parts, so that each part has other examples then; all workers
            give the same seed. With `epoch_size`, use a `remainder` that makes the parts equal: so all workers begin
            each pass together.
        seed: of the orders. None: each run has its own.
        last_batch: `keep` a last batch of fewer examples, or `discard` it.

    Raises:
        ValueError: an argument out of its range, a part without examples, or of less than one batch with `discard`.
        TypeError: no data set, or a number that is no whole one.
        DataError: a file that is damaged, with its name, the offset, what was expected and what was found.

    Threads: one at a time.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        num_parts: int = 1,
        part_index: int = 0,
        remainder: str = "spread",
        by: str = "count",
        epoch_size: float | None = None,
        shuffle: bool | str = False,
        seed: int | None = None,
        last_batch: str = "keep",
    ) -> None:
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"a {type(dataset).__name__} is no data set: that has __len__ and read(positions), and"
                " Arrays(data, label) makes one of two arrays; a torch data set goes into a DataLoader with a"
                " SplitSampler"
            )
        batch_size = whole(batch_size, "batch_size")
        if batch_size < 1:
            raise ValueError(f"expected a batch_size of at least 1, found {batch_size}")
        if last_batch not in ("keep", "discard"):
            raise ValueError(f"unknown last_batch {last_batch!r}; known are keep and discard")
        if by not in ("count", "bytes"):
            raise ValueError(f"unknown way to cut, by={by!r}; known are count and bytes")
        if shuffle not in (False, True, "global"):
            raise ValueError(f"unknown shuffle {shuffle!r}; known are False, True and 'global'")
        is_global = shuffle == "global"
        if is_global and by == "bytes":
            raise ValueError("a file that is cut by='bytes' cannot be shuffled as a whole; cut it by='count'")
        if is_global and seed is None and num_parts != 1:
            raise ValueError("shuffle='global' needs a seed, the same on all workers, such as seed=0")
        if by == "bytes":
            if not isinstance(dataset, Cuttable):
                raise ValueError(f"{type(dataset).__name__} is not a file of records; cut it by='count'")
            dataset = dataset.cut(num_parts, part_index)
            if not len(dataset):
                raise ValueError(f"no record begins in part {part_index} of {num_parts}; use fewer parts")
            num_parts, part_index = 1, 0
        # A data set that counts epochs is copied: another reader of it does not change this one's random numbers.
        self._dataset = copy.copy(dataset) if isinstance(dataset, HasEpochs) else dataset
        self._positions = part(len(dataset), num_parts, part_index, remainder)
        self._order = EpochOrder(bool(shuffle), seed, len(dataset) if is_global else None)
        self._batch_size = batch_size
        self._discard = last_batch == "discard"
        self._begun = 0
        """How many batches of the next pass came before this reader began."""
        if not self._batches():
            raise ValueError(f"the part's {self.num_examples} examples are less than a batch of {batch_size}")
        self._epochs = Epochs(_Passes(self._pass), epoch_size)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be epoch number `epoch`, from 0: to go on with a run that was stopped."""
        before = whole(epoch, "epoch", least=0) * len(self)
        self._order.epoch, self._begun = divmod(before, self._batches())
        self._epochs = Epochs(_Passes(self._pass), self._epochs.size)

    @property
    def num_examples(self) -> int:
        """Examples of the part."""
        return len(self._positions)

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return self._epochs.size or self._batches()

    def __iter__(self) -> Iterator[Batch]:
        process = loading_process()
        if process.count and self._epochs.size:
            raise ValueError(
                "a copy of this Reader in a process of a DataLoader does not know where the epoch before stopped, as"
                " epoch_size needs it; fix: Epochs(loader, size) around the DataLoader, and a Reader without epoch_size"
            )
        for positions in islice(self._epochs, process.index, None, process.count or 1):
            yield self._dataset.read(positions)

    def _batches(self) -> int:
        return (self.num_examples + (0 if self._discard else self._batch_size - 1)) // self._batch_size

    def _pass(self) -> Iterator[Positions]:
        """Yield the positions of the part's batches once; in the first pass those that are left."""
        if isinstance(self._dataset, HasEpochs):
            self._dataset.set_epoch(self._order.epoch)
        positions = self._order.next(self._positions)
        size, count = self._batch_size, self._batches() * self._batch_size
        start, self._begun = self._begun * size, 0
        if isinstance(self._dataset, ReadsAhead) and not loading_process().count:
            self._dataset.expect(positions[start:count])
        for begin in range(start, count, size):
            yield positions[begin : begin + size]


@dataclass(frozen=True)
class _Passes:
    """What can be iterated again and again: each time one pass."""

    start: Callable[[], Iterator[Positions]]

    def __iter__(self) -> Iterator[Positions]:
        return self.start()
