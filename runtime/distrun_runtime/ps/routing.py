"""Routing: where the shards of a value are, and which messages carry a call over many keys.

A value is cut into shards of at most `SHARD_BYTES`, alike on all paths. The scheduler places them when keys are
registered: the largest first, each on the server with the fewest bytes; shards that are placed never move. With
`DISTRUN_PARTITION=mxnet` shards lie where MXNet has them (`ops.partition`).

A call with the same keys comes again every step. Its `Route` is worked out once: for each server the messages
(`Portion`), the entries of each, and how the bytes of the values are gathered into it and scattered from its answer.
This module is the one owner of how much a message carries.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distrun_runtime.arrays.device import Buffer
from distrun_runtime.arrays.dtypes import Array, DType
from distrun_runtime.ops import partition
from distrun_runtime.ops.partition import Shard
from distrun_runtime.protocol.message import DTYPE_CODES, ENTRY, Payload
from distrun_runtime.ps.pending import Pending as Request

__all__ = ["Layout", "Portion", "Route", "cut", "mxnet_layout", "place"]

SHARD_BYTES = 1024 * 1024
"""The most that one shard has, unless one row is longer."""
MESSAGE_BYTES = 4 * 1024 * 1024
"""Shards for one server share a message up to so many bytes."""
MESSAGE_ENTRIES = 32768
"""And up to so many shards."""
WINDOW_BYTES = 64 * 1024 * 1024
"""Pushed bytes that may be on their way to one server, so that a later push of higher priority overtakes the rest.

Only pushes count: a server acknowledges them at once. Pulls wait for rounds, and a window full of them could wait
for pushes that stand behind them.
"""
SMALL_CALL_BYTES = 64 * 1024
"""A call of fewer bytes may share a message with others that are made while it waits (`store.gathering`)."""
GATHERED_BYTES = 1024 * 1024
"""So many bytes of small calls are sent without waiting for more."""
DIRECT_BYTES = 64 * 1024
"""Values from this size on are sent from their own memory; smaller ones are gathered."""
BUCKETS = 64
"""How many lists of entries a server remembers of one worker."""
BUCKET_ENTRIES = 8
"""A message of fewer entries names them each time."""


@dataclass(frozen=True)
class Layout:
    """Where the shards of one key are."""

    number: int
    """The key's number in messages."""
    shards: tuple[Shard, ...]

    @property
    def size(self) -> int:
        """Elements of the key."""
        return sum(shard.length for shard in self.shards)


def cut(size: int, itemsize: int, row_size: int = 0) -> list[tuple[int, int]]:
    """Return (offset, length) in elements of each shard of a value; one of length 0 for a value of no elements.

    Arguments:
        size: elements of the value.
        itemsize: bytes of one.
        row_size: elements of a row of a row-sparse value, which is not cut; 0: the value is dense.

    A shard of a dense value has a multiple of 32 elements, so a compressed one has whole words.
    """
    unit = max(1, row_size)
    step = max(1, SHARD_BYTES // (itemsize * unit)) * unit
    return [(offset, min(step, size - offset)) for offset in range(0, size, step)] or [(0, 0)]


def place(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Return the server of each shard: the largest first, each on the server with the fewest bytes so far.

    Arguments:
        sizes: bytes of the shards; equal ones keep their order.
        loads: bytes of each server so far; the new ones are added to them.
    """
    heap = [(load, server) for server, load in enumerate(loads)]
    heapq.heapify(heap)
    servers = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        load, server = heap[0]
        servers[index] = server
        # Empty shards take turns, too: each costs the same work.
        loads[server] = load + max(1, sizes[index])
        heapq.heapreplace(heap, (loads[server], server))
    return servers


@dataclass(frozen=True)
class Shape:
    """What a layout depends on of a key."""

    size: int
    itemsize: int
    row_size: int = 0
    """Elements of a row; 0: the value is dense, or its rows have no elements."""
    rows: int = 0


def mxnet_layout(number: int, index: int, of: Shape, *, servers: int, bound: int, factor: int = 1) -> Layout:
    """Return the layout that MXNet's arithmetic gives.

    Arguments:
        index: the key's place in the order of declaration, or the key itself if it is an int.
        bound: elements from which a value is cut over all servers.
        factor: elements that the key's codec puts into a word, which is not cut.
    """
    if of.rows:
        shards = partition.row_shards(index, of.rows, of.row_size, servers, bound)
        return Layout(number, partition.pieces(shards, of.itemsize, SHARD_BYTES, unit=of.row_size))
    if factor > 1:
        shards = partition.compressed_shards(index, of.size, servers, bound, factor)
    else:
        shards = partition.shards(index, of.size, servers, bound)
    return Layout(number, partition.pieces(shards, of.itemsize, SHARD_BYTES))


@dataclass(frozen=True)
class _Few:
    """Small values of one message, end to end."""

    items: list[int]
    """Their places in the call."""
    size: int
    """Elements of all of them."""
    alike: list[tuple[int, int, int, tuple[int, ...]]]
    """Runs of equal shapes: first and last in `items`, elements before them, and the shape."""


@dataclass(frozen=True)
class _Piece:
    """A run of one larger value."""

    item: int
    begin: int
    end: int


@dataclass(eq=False)
class Portion:
    """What one message of a call carries: shards on one server, of one dtype."""

    link: str
    server: int
    dtype: DType
    entries: Array
    """Without rounds and payloads."""
    keys: Array
    """For each entry the place of its key in the call."""
    parts: list[_Few | _Piece]
    size: int
    """Elements."""
    bucket: int = 0
    """Number under which the server knows the entries; 0: it does not."""
    base: Array | None = None
    """The rounds of the bucket's step 0."""
    carried_by: Request | None = None
    """The last push that carried it."""
    _copy: Array | None = None
    """Room for the elements of a push whose values are not lent; memory that was written once is written again."""

    def named(self, rounds: Array, payload: Payload) -> Array:
        """Return the entries of a message.

        Arguments:
            rounds: the round of each key of the call.
        """
        entries: Array = self.entries.copy()
        entries["round"] = rounds[self.keys]
        entries["payload"] = payload
        return entries

    def gather(self, values: Sequence[Array], lent: bool) -> list[Buffer]:
        """Return the frames with the values' elements.

        Arguments:
            values: of the whole call, by place.
            lent: they stay as they are until the message is answered; else nothing of their memory is in the result.
        """
        if not lent:
            return [self._copied(values).view(np.uint8).data] if self.size else [b""]
        frames: list[Buffer] = []
        for part in self.parts:
            if isinstance(part, _Few):
                few = np.empty(part.size, self.dtype)
                _join(part, values, few)
                frames.append(few.view(np.uint8).data)
            else:
                flat = values[part.item].reshape(-1)[part.begin : part.end]
                frames.append(np.ascontiguousarray(flat).view(np.uint8).data)
        return frames

    def _copied(self, values: Sequence[Array]) -> Array:
        is_free = self.carried_by is None or self.carried_by.is_done
        copy = self._copy if is_free and self._copy is not None else np.empty(self.size, self.dtype)
        self._copy = copy
        at = 0
        for part in self.parts:
            size = part.size if isinstance(part, _Few) else part.end - part.begin
            if isinstance(part, _Few):
                _join(part, values, copy[at : at + size])
            else:
                copy[at : at + size] = values[part.item].reshape(-1)[part.begin : part.end]
            at += size
        return copy

    def scatter(self, payloads: Sequence[Buffer], outs: Sequence[Array]) -> None:
        """Write the elements of an answer into outputs that are C-contiguous, by place."""
        given = _Elements(payloads, self.dtype)
        for part in self.parts:
            if isinstance(part, _Piece):
                outs[part.item].reshape(-1)[part.begin : part.end] = given.take(part.end - part.begin)
                continue
            flat = given.take(part.size)
            for first, last, begin, shape in part.alike:
                count = last - first
                block = flat[begin : begin + count * math.prod(shape)].reshape((count, *shape))
                for item, values in zip(part.items[first:last], block, strict=True):
                    outs[item][...] = values


def _join(few: _Few, values: Sequence[Array], out: Array) -> None:
    # One call for all of them; axis None takes arrays of any shapes, in C order.
    np.concatenate([values[item] for item in few.items], axis=None, out=out)


class _Elements:
    """The elements of several frames, one run after the other."""

    def __init__(self, payloads: Sequence[Buffer], dtype: DType) -> None:
        self._frames = [np.frombuffer(each, dtype) for each in payloads if memoryview(each).nbytes]
        self._dtype = dtype
        self._number = self._at = 0

    def take(self, size: int) -> Array:
        """Return the next elements; a view if they are in one frame."""
        found: list[Array] = []
        while size:
            frame = self._frames[self._number]
            part = frame[self._at : self._at + size]
            found.append(part)
            size -= len(part)
            self._at += len(part)
            if self._at == len(frame):
                self._number, self._at = self._number + 1, 0
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty(0, self._dtype)


@dataclass(eq=False)
class Route:
    """The messages of calls over one list of keys."""

    numbers: Array
    """The keys' numbers, int64."""
    portions: list[Portion] = field(default_factory=list)

    @classmethod
    def of(cls, layouts: Sequence[Layout], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[DType]) -> Route:
        """Return the route of keys with these layouts, shapes and dtypes."""
        rows = [
            (item, shard.server, DTYPE_CODES[dtype], layout.number, shard.offset, shard.length)
            for item, (layout, dtype) in enumerate(zip(layouts, dtypes, strict=True))
            for shard in layout.shards
        ]
        table = np.array(rows, np.int64).reshape(len(rows), 6)
        table = table[np.lexsort((table[:, 4], table[:, 3], table[:, 2], table[:, 1]))]
        route = cls(np.array([layout.number for layout in layouts], np.int64))
        itemsizes = {DTYPE_CODES[dtype]: dtype.itemsize for dtype in set(dtypes)}
        kinds = {DTYPE_CODES[dtype]: dtype for dtype in set(dtypes)}
        for begin, end in _messages(table, itemsizes):
            route.portions.append(_portion(table[begin:end], kinds[int(table[begin, 2])], shapes))
        return route


def _messages(table: Array, itemsizes: dict[int, int]) -> Iterable[tuple[int, int]]:
    """Yield the rows of each message: one server, one dtype, not too much."""
    begin = used = 0
    rows = table[:, (1, 2, 5)].tolist()
    for at, (server, code, length) in enumerate(rows):
        size = length * itemsizes[code]
        is_other = at > begin and rows[begin][:2] != [server, code]
        is_full = at > begin and (used + size > MESSAGE_BYTES or at - begin >= MESSAGE_ENTRIES)
        if is_other or is_full:
            yield begin, at
            begin, used = at, 0
        used += size
    if len(rows) > begin:
        yield begin, len(rows)


def _portion(rows: Array, dtype: DType, shapes: Sequence[tuple[int, ...]]) -> Portion:
    entries = np.zeros(len(rows), ENTRY)
    for name, column in (("dtype", 2), ("key", 3), ("offset", 4), ("length", 5)):
        entries[name] = rows[:, column]
    parts: list[_Few | _Piece] = []
    few: list[int] = []

    def close() -> None:
        if few:
            parts.append(_few(list(few), shapes))
            few.clear()

    for item, _, _, _, offset, length in rows.tolist():
        is_whole = offset == 0 and length == math.prod(shapes[item])
        if is_whole and length * dtype.itemsize < DIRECT_BYTES:
            few.append(item)
        else:
            close()
            parts.append(_Piece(item, offset, offset + length))
    close()
    server = int(rows[0, 1])
    return Portion("server-%d" % server, server, dtype, entries, rows[:, 0].copy(), parts, int(rows[:, 5].sum()))


def _few(items: list[int], shapes: Sequence[tuple[int, ...]]) -> _Few:
    alike: list[tuple[int, int, int, tuple[int, ...]]] = []
    first = begin = size = 0
    for at, item in enumerate(items):
        if at > first and shapes[item] != shapes[items[first]]:
            alike.append((first, at, begin, shapes[items[first]]))
            first, begin = at, size
        size += math.prod(shapes[item])
    alike.append((first, len(items), begin, shapes[items[first]]))
    return _Few(items, size, alike)


class Buckets:
    """Which lists of entries the servers know of this worker."""

    def __init__(self) -> None:
        self._owners: dict[int, list[Portion | None]] = {}
        self._next: dict[int, int] = {}

    def register(self, portion: Portion, rounds: Array) -> None:
        """Have the message of a portion that is about to go tell its entries; step 0 is what it contributes to."""
        owners = self._owners.setdefault(portion.server, [None] * BUCKETS)
        number = self._next.get(portion.server, 0)
        self._next[portion.server] = (number + 1) % BUCKETS
        former = owners[number]
        if former is not None:
            former.bucket, former.base = 0, None
        owners[number] = portion
        portion.bucket, portion.base = number + 1, rounds[portion.keys]

    def forget(self, portions: Iterable[Portion]) -> None:
        """A message failed: what its server knows of these portions is uncertain."""
        for portion in portions:
            owners = self._owners.get(portion.server, [])
            if portion.bucket and owners[portion.bucket - 1] is portion:
                owners[portion.bucket - 1] = None
            portion.bucket, portion.base = 0, None


def step_of(portion: Portion, rounds: Array) -> int:
    """Return how many steps after its registration a portion's keys have reached these rounds; -1: not all as many."""
    if portion.base is None:
        return -1
    steps: Any = rounds[portion.keys] - portion.base
    first = int(steps[0])
    return first if 0 <= first < 2**32 and bool((steps == first).all()) else -1
