"""Selects and cuts data: a worker's part of a data set, its order and epochs; a batch cut for devices.

Source: `split_data`, `split_and_load` and `split_input_slice` have the sizes and roundings of MXNet 1.9.1's
`gluon.utils` and `executor_manager`; here for everything that has a shape and takes slices (numpy arrays, torch
tensors).
"""

from __future__ import annotations

import math
import numbers
import operator
import sys
from dataclasses import dataclass
from typing import Any, Generic, Iterable, Iterator, Protocol, Sequence, TypeVar

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]

Item = TypeVar("Item")

REMAINDERS = ("drop", "pad", "wrap", "spread")
"""What to do with the examples that are left over when the parts do not divide the data set; see `part`."""


def part(length: int, num_parts: int, part_index: int, remainder: str) -> Positions:
    """Return the positions of one part of a data set, ascending except where it starts again.

    Arguments:
        length: examples in the data set, at least 1.
        num_parts, part_index: number of parts, and which, from 0.
        remainder:
            `drop`: parts of floor(length / num_parts) adjacent examples; the (length mod num_parts) last are unused.
            `pad`: the parts of `spread`, where those that are one shorter repeat their first example.
            `wrap`: parts of ceil(length / num_parts) adjacent examples; after the last example comes the first.
            `spread`: from floor(length / num_parts * i) up to the next part's first; sizes differ by at most 1.

    Returns:
        int64 array. With drop, pad and wrap the same size for all parts.

    Raises:
        ValueError: a number out of its range, an unknown remainder, or a part that would be empty.

    Source: `drop` is SplitSampler of MXNet's distributed training example, `spread` is MXNet's MNISTIter.
    """
    length = whole(length, "length", "give len(dataset)")
    num_parts, part_index = which_part(num_parts, part_index)
    if remainder not in REMAINDERS:
        raise ValueError(f"unknown remainder {remainder!r}; known are {', '.join(REMAINDERS)}")
    if length < 1:
        raise ValueError("a data set without examples has no parts")
    if length < num_parts and remainder in ("drop", "spread"):
        raise ValueError(f"{length} examples are too few for {num_parts} parts; use fewer parts, or remainder='wrap'")
    most = -(-length // num_parts)
    if remainder == "drop":
        return np.arange(length // num_parts, dtype=np.int64) + length // num_parts * part_index
    if remainder == "wrap":
        return (np.arange(most, dtype=np.int64) + most * part_index) % length
    begin, end = length * part_index // num_parts, length * (part_index + 1) // num_parts
    if remainder == "spread":
        return np.arange(begin, end, dtype=np.int64)
    # An empty part (fewer examples than parts) pads with an example of the next one.
    return np.resize(np.arange(begin, max(end, begin + 1), dtype=np.int64), most)


def which_part(num_parts: int, part_index: int) -> tuple[int, int]:
    """Return both as ints. Raises as `part`."""
    num_parts, part_index = whole(num_parts, "num_parts"), whole(part_index, "part_index")
    if num_parts < 1 or not 0 <= part_index < num_parts:
        raise ValueError(f"expected 0 <= part_index < num_parts, found part {part_index} of {num_parts}")
    return num_parts, part_index


@dataclass(frozen=True)
class LoadingProcess:
    """A worker process of a torch DataLoader."""

    index: int
    count: int
    """How many processes the loader has; 0: this is none of them."""
    seed: int
    """A number that they share, which follows from torch's seed; another one in each epoch for which they start."""


def loading_process() -> LoadingProcess:
    """Return which process of a torch DataLoader this is."""
    loading = sys.modules.get("torch.utils.data")  # a process of a DataLoader has it
    info = None if loading is None else loading.get_worker_info()
    if info is None:
        return LoadingProcess(0, 0, 0)
    return LoadingProcess(int(info.id), int(info.num_workers), (int(info.seed) - int(info.id)) % (1 << 64))


class EpochOrder:
    """The order in which positions are read: as they are, or shuffled anew in each epoch.

    Arguments:
        shuffle: whether to shuffle the positions of a part among themselves.
        seed: the orders follow from it and the epoch's number. None: drawn, so each run has its own.
        length: examples of the whole data set, to shuffle all of them before they are cut into parts. None: only
            those of a part are shuffled.

    Raises:
        TypeError, ValueError: the seed is not a whole number from 0.
    """

    def __init__(self, shuffle: bool, seed: int | None, length: int | None = None) -> None:
        self._shuffle, self._length = shuffle, length
        self._seed = seed_of(seed)
        self.epoch = 0
        """Number of the epoch that `next` arranges; set it to go on where another run has stopped."""

    def next(self, positions: Positions) -> Positions:
        """Return the positions in this epoch's order, and go on to the next epoch."""
        epoch, self.epoch = self.epoch, self.epoch + 1
        if self._length is not None:
            everything: Positions = np.random.default_rng((self._seed, epoch)).permutation(self._length)
            return everything[positions]
        if not self._shuffle:
            return positions
        # A process of a DataLoader begins anew in each epoch, with the number that this copy of it had then.
        process = loading_process()
        return np.random.default_rng((self._seed, epoch, *([process.seed] if process.count else []))).permutation(
            positions
        )


def seed_of(seed: int | None) -> int:
    """Return a seed as it was given, a whole number from 0; for None a new one."""
    return int(np.random.default_rng().integers(1 << 62)) if seed is None else whole(seed, "seed", least=0)


class _Sampler:
    """Gives the positions of a part, in the order of each epoch."""

    def __init__(self, positions: Positions, order: EpochOrder) -> None:
        self._positions, self._order = positions, order

    def __len__(self) -> int:
        return len(self._positions)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order.next(self._positions).tolist())

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of epoch number `epoch`, from 0: to go on with a run that was stopped."""
        self._order.epoch = whole(epoch, "epoch", least=0)


class SplitSampler(_Sampler):
    """The positions of one worker's examples, each epoch in another order: `SplitSampler(n, kv.num_workers, kv.rank)`.

    A worker has the same examples in all epochs; in the data set they are adjacent. If that is sorted by class, each
    worker sees only some classes; take `GlobalShuffleSampler` then.

    All parts are equally long, so that all workers make the same number of steps. It is what torch's DataLoader takes
    as `sampler`; torch is not needed for it.

    Arguments:
        length: examples in the data set.
        num_parts, part_index: the parts' number and which of them to read, from 0.
        remainder: `drop`, `pad` or `wrap`: what becomes of the (length mod num_parts) left over; see `part`.
        shuffle: draw an order, within the part, for each iteration; otherwise ascending.
        seed: of the orders. None: each run has its own.

    Raises:
        ValueError: a part that would be empty, or an argument out of its range.
        TypeError: a number that is no whole one.

    Source: SplitSampler of MXNet's distributed training example, which always drops, and shuffles with the process's
    generator.

    Examples:
        >>> list(SplitSampler(10, num_parts=4, part_index=3, remainder="wrap", shuffle=False))
        [9, 0, 1]
    """

    def __init__(
        self,
        length: int,
        num_parts: int = 1,
        part_index: int = 0,
        remainder: str = "drop",
        *,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        super().__init__(_equal_part(length, num_parts, part_index, remainder), EpochOrder(shuffle, seed))


class GlobalShuffleSampler(_Sampler):
    """The positions of one worker's examples: in each epoch all examples are shuffled, then cut into parts.

    So each worker has other examples in each epoch, whatever the order of the data set; within an epoch no two workers
    have the same, except those that `remainder` repeats. All parts are equally long. It is what torch's DataLoader
    takes as `sampler`; torch is not needed for it.

    Each iteration is an epoch. All workers must be in the same epoch: they iterate equally often, or call `set_epoch`
    with the same number before each iteration.

    Arguments:
        length: examples in the data set, the same on all workers.
        num_parts, part_index: the parts' number and which of them to read, from 0.
        remainder: `drop`, `pad` or `wrap`: what becomes of the (length mod num_parts) left over, others in each epoch;
            see `part`.
        seed: of the orders, the same on all workers.

    Raises:
        ValueError: a part that would be empty, or an argument out of its range.
        TypeError: a number that is no whole one.

    Source: DistributedSampler of torch does the same.

    Examples:
        >>> parts = [GlobalShuffleSampler(6, num_parts=2, part_index=rank, seed=1) for rank in range(2)]
        >>> [list(part) for part in parts], [list(part) for part in parts]
        ([[4, 0, 2], [1, 5, 3]], [[1, 4, 0], [3, 2, 5]])
    """

    def __init__(
        self, length: int, num_parts: int = 1, part_index: int = 0, remainder: str = "drop", *, seed: int = 0
    ) -> None:
        positions = _equal_part(length, num_parts, part_index, remainder)
        seed = whole(seed, "seed", "all workers give the same, such as 0", least=0)
        super().__init__(positions, EpochOrder(True, seed, whole(length, "length")))


def _equal_part(length: int, num_parts: int, part_index: int, remainder: str) -> Positions:
    if remainder == "spread":
        raise ValueError("remainder 'spread' makes parts of unequal length; use drop, pad or wrap")
    return part(length, num_parts, part_index, remainder)


def epoch_size(num_examples: int, batch_size: int, num_workers: int = 1) -> int:
    """Return how many batches each worker takes in an epoch: num_examples / batch_size / num_workers, rounded down.

    Arguments:
        num_examples: examples of the whole data set, all workers' parts together.
        batch_size: examples that one worker takes for a step.
        num_workers: `kv.num_workers` for dist_sync. A dist_async worker needs no fixed size.

    Raises:
        ValueError: a number is not at least 1, or not even one step of all workers is there.

    Source: MXNet's tutorial on distributed training.
    """
    num_examples, batch_size = whole(num_examples, "num_examples"), whole(batch_size, "batch_size")
    num_workers = whole(num_workers, "num_workers")
    if min(num_examples, batch_size, num_workers) < 1:
        raise ValueError(
            f"expected numbers of at least 1, found num_examples={num_examples} batch_size={batch_size}"
            f" num_workers={num_workers}"
        )
    size = num_examples // (batch_size * num_workers)
    if not size:
        raise ValueError(
            f"{num_examples} examples are not one batch of {batch_size} for each of {num_workers}"
            " workers; use a smaller batch size"
        )
    return size


class Epochs(Generic[Item]):
    """Data that is iterated in epochs of exactly `size` batches, whatever their number in the data.

    Data that ends earlier is started again; data that does not is gone on with in the next epoch, so every batch has
    its turn. An epoch that is broken off counts as far as it came.

    Arguments:
        data: anything that can be iterated again and again: a list, a reader, a torch DataLoader.
        size: batches in an epoch, at least 1; a quotient is rounded down. None: one iteration of the data is an epoch.

    Raises:
        ValueError: the size is not at least 1; when iterated, data that gives no batch when it is started.
        TypeError: a size that is no number; data that cannot be iterated.

    Source: `epoch_size` of MXNet's FeedForward.

    Examples:
        >>> epochs = Epochs("abc", size=2)
        >>> list(epochs), list(epochs)
        (['a', 'b'], ['c', 'a'])
    """

    def __init__(self, data: Iterable[Item], size: float | None = None) -> None:
        hint = "data.epoch_size(num_examples, batch_size, num_workers) gives one"
        if isinstance(size, (float, np.floating)) and 1 <= size < math.inf:
            # The tutorials' num_examples / batch_size / num_workers, which was a whole number in Python 2.
            size = math.floor(size)
        self.size = None if size is None else whole(size, "epoch_size", hint)
        """Batches in an epoch; None: those of one iteration of the data."""
        if self.size is not None and self.size < 1:
            raise ValueError(f"expected an epoch of at least 1 batch, found {self.size}")
        if not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
            raise TypeError(f"data is what can be iterated, batch by batch, not {data!r:.60}")
        self._data = data
        self._rest: Iterator[Item] = iter(())

    def __iter__(self) -> Iterator[Item]:
        if self.size is None:
            yield from self._data
            return
        for _ in range(self.size):
            yield self._next()

    def _next(self) -> Item:
        for batch in self._rest:
            return batch
        self._rest = iter(self._data)
        for batch in self._rest:
            return batch
        raise ValueError(
            f"the data, a {type(self._data).__name__}, gives no batch when it is started; an epoch of"
            f" {self.size} batches needs data that can be iterated again and again: a list or a reader, not a"
            " generator"
        )


class Sliceable(Protocol):
    """What can be cut: numpy arrays, torch tensors and their like."""

    @property
    def shape(self) -> Sequence[int]:
        """Sizes of the axes."""
        ...

    def __getitem__(self, key: Any, /) -> Any:
        """Return the part that a tuple of slices names; a view, where the library has views."""
        ...


Data = TypeVar("Data", bound=Sliceable)


def split_data(data: Data, num_slice: int, batch_axis: int = 0, even_split: bool = True) -> list[Data]:
    """Return the data in `num_slice` parts, in order; the parts share the data's memory.

    Arguments:
        data: array or tensor of any dtype.
        num_slice: number of parts, at least 1.
        batch_axis: the axis that is cut.
        even_split: refuse a size that `num_slice` does not divide. Otherwise the first (size mod num_slice) parts
            have one example more than the others; parts may be empty.

    Raises:
        ValueError: the parts would not be equal, with even_split.
        IndexError: the data has no such axis.
        TypeError: the data is no array, such as a list; a number that is no whole one.

    Examples:
        >>> [len(part) for part in split_data(np.zeros(8), 3, even_split=False)]
        [3, 3, 2]
    """
    num_slice = whole(num_slice, "num_slice")
    if num_slice < 1:
        raise ValueError(f"expected at least 1 slice, found {num_slice}")
    size = _size(data, batch_axis)
    each, extra = divmod(size, num_slice)
    if even_split and extra:
        raise ValueError(
            f"data of shape {tuple(data.shape)} has {size} examples along axis {batch_axis}, which"
            f" {num_slice} slices do not divide; use a batch size that is a multiple of {num_slice}, or"
            " even_split=False"
        )
    sizes = [each + 1] * extra + [each] * (num_slice - extra)
    ends = [sum(sizes[: i + 1]) for i in range(num_slice)]
    return [_part(data, slice(end - length, end), batch_axis) for end, length in zip(ends, sizes, strict=True)]


def split_and_load(
    data: Data,
    devices: Sequence[Any],
    batch_axis: int = 0,
    even_split: bool = True,
    work_load_list: Sequence[float] | None = None,
) -> list[Data]:
    """Return one part of the data for each device, on that device; with a single device all of it, uncut.

    Arguments:
        data: array or tensor. One with a method `to` (a torch tensor) is copied to each device that it is not on;
            any other (a numpy array) has to stay in host memory, as views.
        devices: what `to` takes, such as `"cuda:0"` or a torch.device; `"cpu"` for numpy arrays.
        batch_axis, even_split: as `split_data` has them.
        work_load_list: the devices' shares of the work, as `split_input_slice` has them, instead of even parts.

    Raises:
        ValueError: the parts would not be equal, with even_split and without work_load_list; no devices; a share
            for another number of devices; a numpy array for a device that is not the CPU.
        TypeError: devices that are no list; data that is no array, such as a list.
    """
    if isinstance(devices, str) or not hasattr(devices, "__len__"):
        raise TypeError(f"devices is a list of devices, such as [{str(devices)!r}], not {devices!r:.60}")
    if not len(devices):
        raise ValueError("expected at least one device to load on, found none")
    if work_load_list is not None and len(work_load_list) != len(devices):
        raise ValueError(f"{len(work_load_list)} shares in work_load_list for {len(devices)} devices")
    if len(devices) == 1:
        parts = [data]
    elif work_load_list is None:
        parts = split_data(data, len(devices), batch_axis, even_split)
    else:
        slices = split_input_slice(_size(data, batch_axis), work_load_list)
        parts = [_part(data, part, batch_axis) for part in slices]
    return [_load(part, device) for part, device in zip(parts, devices, strict=True)]


def split_input_slice(batch_size: int, work_load_list: Sequence[float]) -> list[slice]:
    """Return which examples of a batch each device takes: its share of the work, rounded.

    A device of share w gets round(w batch_size / sum of shares) examples, halves to the even number. What is then
    missing goes to the last device; what is too much is cut off the last ones.

    Raises:
        ValueError: a device would get no example, or a share is not a number above 0.
        TypeError: shares that are no list; a batch size that is not a whole number.

    Examples:
        >>> split_input_slice(10, [3, 1])
        [slice(0, 8, None), slice(8, 10, None)]
    """
    batch_size, shares = whole(batch_size, "batch_size"), _shares(work_load_list)
    total = sum(shares)
    counts = [round(share * batch_size / total) for share in shares]
    counts[-1] += max(0, batch_size - sum(counts))
    slices, end = [], 0
    for count in counts:
        begin, end = end, min(end + count, batch_size)
        if begin >= end:
            raise ValueError(f"Too many slices. Some splits are empty: a batch of {batch_size} for shares {shares}")
        slices.append(slice(begin, end))
    return slices


def _shares(given: object) -> list[float]:
    """Return shares of the work: numbers above 0."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"shares of the work are a list of numbers, not {given!r:.60}")
    shares = list(given)
    if not shares or not all(isinstance(share, numbers.Real) and 0 < float(share) < math.inf for share in shares):
        raise ValueError(f"expected shares above 0, found {shares}")
    return shares


def _size(data: Sliceable, axis: int) -> int:
    if not hasattr(data, "shape"):
        raise TypeError(f"data is an array or a tensor, not a {type(data).__name__}; np.asarray makes one")
    axis = whole(axis, "batch_axis")
    if not -len(data.shape) <= axis < len(data.shape):
        raise IndexError(f"data of shape {tuple(data.shape)} has no axis {axis}")
    return int(data.shape[axis])


def _part(data: Data, part: slice, axis: int) -> Data:
    axis %= len(data.shape)
    cut: Data = data[(slice(None),) * axis + (part,)]
    return cut


def _load(part: Data, device: Any) -> Data:
    to = getattr(part, "to", None)
    # numpy 2 arrays have `to_device`, but no `to`.
    if to is not None:
        loaded: Data = to(device)
        return loaded
    if str(device) != "cpu":
        raise ValueError(
            f"a {type(part).__name__} lives in host memory and cannot be loaded on {device!r}; give a torch"
            " tensor, or device 'cpu'"
        )
    return part


def whole(value: object, name: str, hint: str = "", *, least: int | None = None) -> int:
    """Return an int of an argument: Python's and numpy's whole numbers as they are.

    Arguments:
        name: the argument's name, for people.
        hint: what to do instead, added to the message.
        least: the smallest number that is right; None: any is.

    Raises:
        TypeError: another type, such as a float or a text.
        ValueError: a smaller number.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # what is tried
    except TypeError:
        raise TypeError(f"{name} is a whole number, not {value!r:.60}{hint and '; ' + hint}") from None
    if least is not None and number < least:
        raise ValueError(f"{name} is a number from {least}, not {number}")
    return number
