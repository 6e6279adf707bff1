"""Arenas: many arrays of one dtype, end to end in few large blocks of a device's memory.

What lies next to each other is added, updated and sent by one call instead of one a value. A block never moves, so
views stay valid. An arena may have several *sides*, of equal layout: while a reply still reads one, an update writes
another. Memory is taken from the machine when it is first written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from distrun_runtime.arrays.device import ArrayPlace, Device, DeviceArray
from distrun_runtime.arrays.dtypes import Array, DType
from distrun_runtime.arrays.segments import PAGE

__all__ = ["Arena", "Run", "runs"]

FIRST_BYTES = 1024 * 1024
BLOCK_BYTES = 64 * 1024 * 1024
"""Blocks double from the first size up to this one; a larger request gets a block of its own size."""


class Arena:
    """Elements of one dtype by position. Threads: one at a time for elements that are written.

    Arguments:
        like: an arena whose positions this one has too (a place for sums, or for a rule's state); it is never
            reserved in itself.
        is_sent: its elements are often sent to other processes.
    """

    def __init__(self, device: Device, dtype: DType, like: Arena | None = None, *, is_sent: bool = False) -> None:
        self.dtype = dtype
        self._device = device
        self._is_sent = is_sent
        self._like = like
        self._bases: list[int] = [] if like is None else like._bases
        """Position of each block's first element. Positions of different blocks are never neighbours."""
        self._sizes: list[int] = [] if like is None else like._sizes
        self._used = 0
        self._sides: list[dict[int, DeviceArray]] = [{}]
        """For each side its blocks, by number; made when they are first used."""

    @property
    def sides(self) -> int:
        """How many sides there are."""
        return len(self._sides)

    def add_side(self) -> int:
        """Make one more side; return its number."""
        self._sides.append({})
        return len(self._sides) - 1

    def reserve(self, lengths: Array, at_pages: Array) -> Array:
        """Return the positions of further values, next to each other and to those before them if there is room.

        Arguments:
            lengths: elements of each, int64 of shape (n,).
            at_pages: bool of shape (n,): which of them begin with a page of memory, so that a process that shares it
                can map them by themselves.
        """
        page = PAGE // self.dtype.itemsize
        offsets, used = _placed(self._used, lengths, at_pages, page)
        if not self._bases or used > self._sizes[-1]:
            offsets, used = _placed(0, lengths, at_pages, page)
            last = self._sizes[-1] if self._sizes else 0
            bound = BLOCK_BYTES // self.dtype.itemsize
            wanted = min(2 * last, bound) if last else FIRST_BYTES // self.dtype.itemsize
            self._bases.append(self._bases[-1] + last + 1 if self._bases else 0)
            self._sizes.append(max(used, wanted, 1))
        self._used = used
        return self._bases[-1] + offsets

    def extent(self) -> tuple[int, int]:
        """Return what `take_back` takes."""
        return len(self._bases), self._used

    def take_back(self, extent: tuple[int, int]) -> None:
        """Take back what was reserved since `extent` was returned; blocks made for it alone are dropped."""
        count, self._used = extent
        del self._bases[count:], self._sizes[count:]
        for blocks in self._sides:
            for number in [number for number in blocks if number >= count]:
                del blocks[number]

    @property
    def sizes(self) -> Sequence[int]:
        """Elements of each block, whether it was used yet or not."""
        return self._sizes

    def places(self) -> Iterator[ArrayPlace]:
        """Yield where the blocks that were used are referred to; `device.move` takes them elsewhere."""
        for blocks in self._sides:
            for number, block in blocks.items():
                yield ArrayPlace(block, partial(blocks.__setitem__, number), self._is_sent)

    def make_on(self, device: Device) -> None:
        """Make further blocks on another device."""
        self._device = device

    def view(self, begin: int, end: int, side: int = 0) -> DeviceArray:
        """Return the elements of some positions, which are in one block; without a copy."""
        number = bisect_right(self._bases, begin) - 1
        blocks = self._sides[side]
        block = blocks.get(number)
        if block is None:
            block = blocks[number] = self._device.empty((self._sizes[number],), self.dtype, is_sent=self._is_sent)
        base = self._bases[number]
        return block[begin - base : end - base]


def _placed(used: int, lengths: Array, at_pages: Array, page: int) -> tuple[Array, int]:
    """Return the offsets of values behind `used` elements, and where the last one ends."""
    offsets = used + np.cumsum(lengths) - lengths
    for index in np.flatnonzero(at_pages).tolist():
        gap = -int(offsets[index]) % page
        if gap:
            offsets[index:] += gap
    end = int(offsets[-1] + lengths[-1]) if len(lengths) else used
    return offsets, end


class Run(NamedTuple):
    """Some values that lie next to each other in an arena."""

    first: int
    """Index of the first of them in the list that was asked for."""
    last: int
    """Index behind the last one."""
    begin: int
    end: int
    """Their positions."""
    offset: int
    """Elements of the values before them in the list."""


def runs(positions: Array, lengths: Array, cuts: Sequence[int] = ()) -> list[Run]:
    """Return the runs that values of these positions and lengths make, in their order.

    Arguments:
        cuts: indices of values that begin a new run in any case, ascending.
    """
    count = len(positions)
    if not count:
        return []
    ends = positions + lengths
    offsets = np.cumsum(lengths) - lengths
    breaks = np.flatnonzero(positions[1:] != ends[:-1]) + 1
    if len(cuts):
        breaks = np.union1d(breaks, np.asarray(cuts, np.int64))
    starts = [0, *(each for each in breaks.tolist() if 0 < each < count)]
    return [
        Run(first, last, int(positions[first]), int(ends[last - 1]), int(offsets[first]))
        for first, last in zip(starts, [*starts[1:], count], strict=True)
    ]
