"""Selects the examples of a worker: its part of a data set, in a new order for each epoch."""

from __future__ import annotations

from typing import Iterator

import numpy as np
from numpy.typing import NDArray

from distrun_runtime.data.whole import whole

Positions = NDArray[np.int64]

REMAINDERS = ("drop", "pad", "wrap", "spread")
"""What to do with the examples that are left over when the parts do not divide the data set; see `part`."""


def part(length: int, num_parts: int, part_index: int, remainder: str) -> Positions:
    """Return the positions of one part of a data set, ascending except where it starts again. Pure.

    Arguments:
        length: examples in the data set, at least 1.
        num_parts, part_index: number of parts, and which, from 0.
        remainder:
            `drop`: parts of floor(length / num_parts) neighbours; the last (length mod num_parts) are never used.
            `pad`: the parts of `spread`, where those that are one shorter repeat their first example.
            `wrap`: parts of ceil(length / num_parts) neighbours; after the last example comes the first.
            `spread`: from floor(length / num_parts * i) up to the next part's first; sizes differ by at most 1.

    Returns:
        int64 array. With drop, pad and wrap the same size for all parts.

    Raises:
        ValueError: a number out of its range, an unknown remainder, or a part that would be empty.

    Source: `drop` is SplitSampler of MXNet's distributed training example, `spread` is MXNet's MNISTIter.
    """
    length, num_parts = whole(length, "length", "give len(dataset)"), whole(num_parts, "num_parts")
    part_index = whole(part_index, "part_index")
    if num_parts < 1 or not 0 <= part_index < num_parts:
        raise ValueError("expected 0 <= part_index < num_parts, found part %d of %d" % (part_index, num_parts))
    if remainder not in REMAINDERS:
        raise ValueError("unknown remainder %r; known are %s" % (remainder, ", ".join(REMAINDERS)))
    if length < 1:
        raise ValueError("a data set without examples has no parts")
    if length < num_parts and remainder in ("drop", "spread"):
        raise ValueError(
            "%d examples are too few for %d parts; use fewer parts, or remainder='wrap'" % (length, num_parts)
        )
    most = -(-length // num_parts)
    if remainder == "drop":
        return np.arange(length // num_parts, dtype=np.int64) + length // num_parts * part_index
    if remainder == "wrap":
        return (np.arange(most, dtype=np.int64) + most * part_index) % length
    begin, end = length * part_index // num_parts, length * (part_index + 1) // num_parts
    if remainder == "spread":
        return np.arange(begin, end, dtype=np.int64)
    # An empty part (fewer examples than parts) pads with its neighbour.
    return np.resize(np.arange(begin, max(end, begin + 1), dtype=np.int64), most)


class Order:
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
        drawn = seed is None
        self._seed = int(np.random.default_rng().integers(1 << 62)) if drawn else whole(seed, "seed", least=0)
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
        return np.random.default_rng((self._seed, epoch)).permutation(positions)


class _Sampler:
    """Gives the positions of a part, in the order of each epoch."""

    def __init__(self, positions: Positions, order: Order) -> None:
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

    A worker has the same examples in all epochs: neighbours in the data set. If that is sorted by class, each worker
    sees only some classes; take `GlobalShuffleSampler` then.

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
        super().__init__(_equal_part(length, num_parts, part_index, remainder), Order(shuffle, seed))


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
        super().__init__(positions, Order(True, seed, whole(length, "length")))


def _equal_part(length: int, num_parts: int, part_index: int, remainder: str) -> Positions:
    if remainder == "spread":
        raise ValueError("remainder 'spread' makes parts of unequal length; use drop, pad or wrap")
    return part(length, num_parts, part_index, remainder)
