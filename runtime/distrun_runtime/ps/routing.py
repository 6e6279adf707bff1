"""Routing: where the shards of a value are, and which messages carry a call over many keys.

A value is cut into shards of at most `SHARD_BYTES`, alike on all paths. The scheduler places them when keys are
registered: the largest first, each on the server with the fewest bytes; shards that are placed never move. With
`DISTRUN_PARTITION=mxnet` shards lie where MXNet has them (`ops.partition`).

Every data call goes by portions: a `Portion` is what one message carries. A call with the same keys comes again every
step, so its `Route` is worked out once: for each server the messages, the entries of each, and how the bytes of the
values are gathered into it and scattered from its answer. What a push or pull of some rows carries depends on the
rows, so its portions are made for each call. This module is the one owner of how much a message carries.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple, cast

import numpy as np

from distrun_runtime.arrays.cores import copy_all, give_way
from distrun_runtime.arrays.device import DeviceArray
from distrun_runtime.arrays.dtypes import RELEASED, Array, Buffer, DType, copy, copy_fresh
from distrun_runtime.arrays.gpu_frames import IN_USE, array_of, readable
from distrun_runtime.arrays.shared_memory import Pool
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.ops import partition
from distrun_runtime.ops.compression import NONE, ROWS
from distrun_runtime.ops.partition import Shard
from distrun_runtime.ops.reduce import PLAIN, How
from distrun_runtime.protocol.message import DTYPE_SIZES, DTYPES, ENTRY, Payload
from distrun_runtime.ps.role import NodeRequest

__all__ = ["Buckets", "Portion", "Route", "cut", "message_limit", "mxnet_shards", "place", "portions_of", "shards_on"]

SHARD_BYTES = 1024 * 1024
"""The most that one shard has, unless one row is longer."""
MESSAGE_BYTES = 4 * 1024 * 1024
"""Shards for one server share a message up to so many bytes."""
SHARED_MESSAGE_BYTES = 64 * 1024 * 1024
"""The same where all servers read this process's memory: only the message itself travels then."""
DEVICE_MESSAGE_BYTES = 16 * 1024 * 1024
"""The same for stores on GPUs: these copy one message while they add another."""
MESSAGE_ENTRIES = 32768
"""And up to so many shards."""
WINDOW_BYTES = 8 * 1024 * 1024
"""Pushed bytes that may be on their way to one server, so that a later push of higher priority overtakes the rest.

Only pushes count: a server acknowledges them at once. Pulls wait for rounds, and a window full of them could wait
for pushes that stand behind them.
With 64 MiB a step over TCP that computes as long as it communicates hid 0.45 of the communication, with 8 MiB 0.7;
without anything to overtake both are as fast.
"""
SMALL_CALL_BYTES = 64 * 1024
"""A call of fewer bytes may share a message with others that are made while it waits (`store.transfers`)."""
GATHERED_BYTES = 1024 * 1024
"""So many bytes of small calls are sent without waiting for more."""
DIRECT_BYTES = 64 * 1024
"""Values from this size on, if they are lent, are sent from their own memory; others are copied together."""
ROUNDS_AT_ONCE = 2
"""Rounds whose values are in memory that is shared, at both sides: of the last one it may not be known yet that they
were read."""
BUCKETS = 64
"""How many lists of entries a server remembers of one worker."""
BUCKET_ENTRIES = 8
"""A message of fewer entries names them each time."""


def message_limit(size_bytes: int, *, is_shared: bool, is_on_one_host: bool, on_devices: bool) -> int:
    """Return the most that a message of a call over so many bytes carries.

    All workers of the job send the same messages of a small call, as a server then knows them all (`ps.steady`). Over a
    network these are short, so that servers add and answer the first of them while the others are under way.

    Arguments:
        is_shared: all servers read this process's memory.
        is_on_one_host: all nodes of the job are on this host.
        on_devices: the store is of a kind `dist_device_*`.
    """
    if size_bytes <= MESSAGE_BYTES and not is_on_one_host:
        return SHARD_BYTES
    shared_bytes = DEVICE_MESSAGE_BYTES if on_devices else SHARED_MESSAGE_BYTES
    return shared_bytes if is_shared else MESSAGE_BYTES


def cut(size: int, itemsize: int, row_size: int = 0) -> list[tuple[int, int]]:
    """Return (offset, length) in elements of each shard of a value; one of length 0 for a value of no elements.

    Arguments:
        size: elements of the value.
        itemsize: bytes of one.
        row_size: elements of a row of a row-sparse value, which is not cut; 0: the value is dense.

    A shard of a dense value, but for its last one, has a multiple of 32 elements, so a compressed one has whole words.
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


def shards_on(value: Shard, servers: Sequence[int]) -> tuple[Shard, ...]:
    """Return the shards of a value on the servers that the scheduler has placed them on, in the order of offsets.

    Arguments:
        value: the whole of it, as one shard.
    """
    runs = cut(value.length, DTYPES[value.dtype].itemsize, value.row_size)
    what = (value.key, value.dtype, value.row_size)
    return tuple(Shard(int(server), *run, *what) for server, run in zip(servers, runs, strict=True))


def mxnet_shards(value: Shard, index: int, *, servers: int, bound: int, factor: int = 1) -> tuple[Shard, ...]:
    """Return the shards of a value where MXNet's arithmetic has them, in the order of offsets.

    Arguments:
        value: the whole of it, as one shard.
        index: the key's place in the order of declaration, or the key itself if it is an int.
        bound: elements from which a value is cut over all servers.
        factor: elements that the key's codec puts into a word, which is not cut.
    """
    size, row_size = value.length, value.row_size
    placed = partition.shards(index, size, servers, bound, row_size or factor)
    itemsize, what = DTYPES[value.dtype].itemsize, (value.key, value.dtype, row_size)
    return tuple(
        Shard(part.server, part.offset + offset, length, *what)
        for part in placed
        for offset, length in cut(part.length, itemsize, row_size)
    )


@dataclass(frozen=True)
class _Small:
    """Small values of one message, end to end."""

    items: list[int]
    """Their places in the call."""
    size: int
    """Elements of all of them."""
    alike: list[tuple[int, int, int, tuple[int, ...]]]
    """Runs of equal shapes: first and last in `items`, elements before them, and the shape."""


@dataclass(frozen=True)
class _Slice:
    """A run of one larger value."""

    item: int
    begin: int
    end: int
    size: int

    def of(self, arrays: Sequence[Any]) -> Any:
        """Return the elements of it in arrays by place; a view if they are contiguous."""
        return arrays[self.item].reshape(-1)[self.begin : self.end]


_Placed = tuple[int, list["Buffer | list[_Small | _Slice]"]]
"""Of a message: how many elements are copied, and its frames; in place of some the parts that are copied."""


class InPlace(NamedTuple):
    """Values of a call that servers read where they are, until they have released them."""

    items: frozenset[int]
    """Their places in the call."""
    frames: dict[Portion, _Placed]
    """Of messages that carried them."""


NOTHING_IN_PLACE = InPlace(frozenset(), {})


@dataclass(eq=False)
class Portion:
    """What one message of a call carries: shards on one server, of one dtype, that travel alike."""

    link: str
    server: int
    dtype: DType
    how: How
    """How values become payloads. Plain ones (`gather`, `scatter`) are packed; of others each shard has a frame."""
    entries: Array
    """Without rounds and payloads."""
    items: Array
    """For each entry the place of its key in the call."""
    places: list[int]
    """Unless plain: for each entry the place of its shard in what `portions_of` was given."""
    parts: list[_Small | _Slice]
    """If plain: where the elements are in the values of the call."""
    size: int
    """Elements."""
    is_relayed: bool = False
    """Whether `server` is a relay for the one that has the shards (`ps.relay`)."""
    bucket: int = 0
    """Number under which the server knows the entries; 0: it does not."""
    base: Array | None = None
    """The rounds of the bucket's step 0."""
    carried_by: NodeRequest | None = None
    """The last push that carried it."""
    _copy: Array | None = None
    """Holds the elements of a push whose values are not lent; memory that was written once is written again."""

    def __post_init__(self) -> None:
        self.at = run_of(self.items)
        self._frames = list[Buffer]()
        """The frame of `_copy`."""
        only = self.parts[0] if len(self.parts) == 1 else None
        is_small = isinstance(only, _Small) and len(only.items) == 1
        self._only = (only.items[0], only.alike[0][3]) if isinstance(only, _Small) and is_small else None
        """If it carries one small value and nothing else: its place in the call, and its shape."""
        self._run = only if isinstance(only, _Slice) else None
        """If it carries one run of a larger value and nothing else."""

    @property
    def is_plain(self) -> bool:
        """Whether its payloads are the elements as they are."""
        return self.how.codec == NONE

    def shards(self) -> Iterator[tuple[int, Shard]]:
        """Yield each shard with the place of its key in the call, in the order of the entries."""
        columns = (self.entries[name].tolist() for name in ("offset", "length", "key", "dtype"))
        for item, *shard in zip(self.items.tolist(), *columns, strict=True):
            yield item, Shard(self.server, *shard)

    def entries_at(self, rounds: Array, payload: Payload) -> Array:
        """Return the entries of a message.

        Arguments:
            rounds: the round of each key of the call.
        """
        entries: Array = self.entries.copy()
        entries["round"] = rounds[self.items]
        entries["payload"] = payload
        return entries

    def gather(
        self, values: Sequence[Array], lent: bool, staging: Pool | None = None, in_place: InPlace = NOTHING_IN_PLACE
    ) -> list[Buffer]:
        """Return the frames with the values' elements.

        Arguments:
            values: of the whole call, by place.
            lent: they stay as they are until the message is answered; else nothing of their memory is in the result.
            staging: memory that the receiver reads where it is; None: it does not.
            in_place: values that the receiver reads where they are; gets the frames of this message.
        """
        if not self.size:
            return [b""]
        staged = None if staging is None else self._frames_of(values, in_place, staging.empty)
        if staged is not None:
            return staged
        if not lent:
            if self._copy is None or (self.carried_by is not None and not self.carried_by.is_done):
                self._copy = np.empty(self.size, self.dtype)
                self._frames = [self._copy.view(np.uint8).data]
            if self._only is None:
                _copy_parts(self.parts, values, self._copy, 0)
            else:
                item, shape = self._only
                if self.size > RELEASED:
                    copy(values[item], self._copy.reshape(shape))
                else:
                    self._copy.reshape(shape)[...] = values[item]
            return self._frames
        return cast("list[Buffer]", self._frames_of(values, InPlace(frozenset(self.items.tolist()), {}), np.empty))

    def fill(self, values: Sequence[Array], memory: Array) -> None:
        """Copy the values' elements to a flat array."""
        _copy_parts(self.parts, values, memory, 0)

    def _frames_of(self, values: Sequence[Array], in_place: InPlace, empty: Callable[..., Any]) -> list[Buffer] | None:
        """Return frames of which those that are not in place are copies; None: `empty` has no memory for these."""
        size, groups = in_place.frames.get(self) or self._placed(values, in_place)
        copy = empty((size,), self.dtype) if size else np.empty(0, self.dtype)
        if copy is None:
            return None
        frames, at = list[Buffer](), 0
        for group in groups:
            if isinstance(group, list):
                end = _copy_parts(group, values, copy, at)
                group, at = copy[at:end].view(np.uint8).data, end
            frames.append(group)
        return frames

    def _placed(self, values: Sequence[Array], in_place: InPlace) -> _Placed:
        """Return what is copied and where the rest is; keep it if there is a rest."""
        size, groups = 0, list[Buffer | list[_Small | _Slice]]()
        for part in self.parts:
            if isinstance(part, _Slice) and part.item in in_place.items:
                groups.append(np.ascontiguousarray(part.of(values)).view(np.uint8).data)
                continue
            size += part.size
            if not (groups and isinstance(groups[-1], list)):
                groups.append([])
            cast("list[_Small | _Slice]", groups[-1]).append(part)
        if in_place.items:
            in_place.frames[self] = size, groups
        return size, groups

    def cut(self, values: Sequence[DeviceArray]) -> Iterator[DeviceArray]:
        """Yield what the message carries of the values, in its order; flat, without a copy if they are contiguous."""
        for part in self.parts:
            if isinstance(part, _Small):
                yield from (values[item].reshape(-1) for item in part.items)
            else:
                yield part.of(values)

    def runs(
        self, payloads: Sequence[Buffer], *, is_there: bool = False
    ) -> Iterator[tuple[Sequence[int], int, DeviceArray]]:
        """Yield the elements in an answer where they are, in as few runs as there can be.

        Each with the places of the keys whose whole values it has, end to end, and 0; or with the place of one key, and
        the offset in its value.

        Arguments:
            is_there: those on a GPU are arrays there; else they are copied to the host.
        """
        given = _Elements(payloads, self.dtype, is_there=is_there)
        for part in self.parts:
            if isinstance(part, _Small):
                yield part.items, 0, given.take(part.size)
            else:
                for at, run in given.runs_of(part):
                    yield [part.item], at, run

    def scatter(self, payloads: Sequence[Buffer], outs: Sequence[Array]) -> None:
        """Write the elements of an answer into outputs, by place; those of `Route.runs` are C-contiguous."""
        if self._only is not None and len(payloads) == 1:
            item, shape = self._only
            payload = readable(payloads[0]) if IN_USE else payloads[0]
            value = np.frombuffer(payload, self.dtype).reshape(shape)
            if self.size > RELEASED:
                give_way(value.nbytes)
                copy_fresh(value, outs[item])
            else:
                outs[item][...] = value
            return
        give_way(self.size * self.dtype.itemsize)
        if self._run is not None and len(payloads) == 1:
            value = np.frombuffer(readable(payloads[0]) if IN_USE else payloads[0], self.dtype)
            copy_all([(value, self._run.of(outs))], are_fresh=True)
            return
        given = _Elements(payloads, self.dtype)
        large: list[tuple[Array, Array]] = []
        for part in self.parts:
            if isinstance(part, _Slice):
                out = outs[part.item].reshape(-1)
                large += [(run, out[at : at + len(run)]) for at, run in given.runs_of(part)]
                continue
            flat = given.take(part.size)
            for first, last, begin, shape in part.alike:
                count = last - first
                size = math.prod(shape)
                block = flat[begin : begin + count * size].reshape((count, *shape))
                if size > RELEASED:
                    for item, values in zip(part.items[first:last], block, strict=True):
                        copy_fresh(values, outs[item])
                else:
                    for item, values in zip(part.items[first:last], block, strict=True):
                        outs[item][...] = values
        copy_all(large, are_fresh=True)


def run_of(places: Array) -> slice | Array:
    """Return places of an array, each once, as a slice if they are a run of it: numpy looks that up much faster."""
    first = int(places[0]) if len(places) else 0
    run = np.arange(first, first + len(places))
    return slice(first, first + len(places)) if bool((places == run).all()) else places


def _copy_parts(parts: Sequence[_Small | _Slice], values: Sequence[Array], target: Array, at: int) -> int:
    """Copy the elements of parts to a flat array, one after the other from a place on; return where they end."""
    large: list[tuple[Array, Array]] = []
    for part in parts:
        there = target[at : at + part.size]
        if isinstance(part, _Small):
            _join(part, values, there)
        else:
            large.append((part.of(values), there))
        at += part.size
    copy_all(large)
    return at


def _join(small: _Small, values: Sequence[Array], out: Array) -> None:
    for first, last, begin, shape in small.alike:
        size = math.prod(shape)
        if size > RELEASED:
            for number, item in enumerate(small.items[first:last]):
                copy(values[item].reshape(-1), out[begin + number * size : begin + (number + 1) * size])
        else:
            # One call for all of them; axis None takes arrays of any shapes, in C order.
            end = begin + (last - first) * size
            np.concatenate([values[item] for item in small.items[first:last]], axis=None, out=out[begin:end])


class _Elements:
    """The elements of several frames, one run after the other.

    Arguments:
        is_there: those of frames on a GPU are arrays there; else they are copied to the host.
    """

    def __init__(self, payloads: Sequence[Buffer], dtype: DType, *, is_there: bool = False) -> None:
        self._payloads = iter(payloads)
        self._dtype = dtype
        self._is_there = is_there
        self._left: Any = np.empty(0, dtype)
        """Of the present frame."""

    def take(self, size: int) -> Any:
        """Return the next elements; a view if they are in one frame."""
        found = list(self._runs(size))
        if len(found) < 2:
            return found[0] if found else self._left[:0]
        if isinstance(found[0], np.ndarray):
            return np.concatenate(found)
        whole = found[0].device.empty((sum(map(len, found)),), self._dtype)
        found[0].device.gather([[each] for each in found], whole)
        return whole

    def runs_of(self, part: _Slice) -> Iterator[tuple[int, Any]]:
        """Yield the elements of a slice as they are in the frames: runs of them, each with its offset in the value."""
        at = part.begin
        for run in self._runs(part.size):
            yield at, run
            at += len(run)

    def _runs(self, size: int) -> Iterator[Any]:
        while size:
            if not len(self._left):
                self._left = self._of(next(self._payloads))
                continue
            run, self._left = self._left[:size], self._left[size:]
            size -= len(run)
            yield run

    def _of(self, payload: Buffer) -> Any:
        if IN_USE:
            if self._is_there and (there := array_of(payload, self._dtype)) is not None:
                return there
            payload = readable(payload)
        return np.frombuffer(payload, self._dtype) if len(payload) else self._left


@dataclass(eq=False)
class Route:
    """The messages of calls over one list of keys."""

    numbers: Array
    """The keys' numbers, int64."""
    portions: list[Portion]
    in_place: dict[tuple[int, ...], InPlace] = field(default_factory=dict)
    """Of the last arrays of a call that servers read where they are, by their ids; empty when one of them goes."""
    watched: Sequence[object] = ()
    """Weak references to these."""

    def __post_init__(self) -> None:
        self.at = run_of(self.numbers)
        found: set[int] = set()
        for portion in self.portions:
            found |= {part.item for part in portion.parts if isinstance(part, _Slice)}
            if not portion.is_plain:
                found |= set(portion.items.tolist())
        self.runs = sorted(found)
        """Places of the keys whose values are not among the small ones that are joined: they are written by runs of
        elements, of which a value may have one only, and so have to be C-contiguous."""

    @classmethod
    def of(
        cls,
        shards: Sequence[tuple[Shard, ...]],
        shapes: Sequence[tuple[int, ...]],
        hows: Sequence[How] = (),
        message_bytes: int = MESSAGE_BYTES,
        relays: Sequence[Mapping[int, int]] = (),
    ) -> Route:
        """Return the route of keys.

        Arguments:
            shards, shapes: of each key.
            hows: how each key's values travel; empty: all plain. What is sent of keys that travel by rows depends on
                the rows: such keys have no portion here (see `portions_of`).
            message_bytes, relays: as for `portions_of`.
        """
        placed = [
            (item, shard) for item, its in enumerate(shards) if not hows or hows[item].codec != ROWS for shard in its
        ]
        numbers = np.array([its[0].key for its in shards], np.int64)
        return cls(numbers, portions_of(placed, shapes, hows, message_bytes=message_bytes, relays=relays))


def portions_of(
    shards: Sequence[tuple[int, Shard]],
    shapes: Sequence[tuple[int, ...]],
    hows: Sequence[How] = (),
    sizes: Sequence[int] = (),
    *,
    message_bytes: int = MESSAGE_BYTES,
    relays: Sequence[Mapping[int, int]] = (),
) -> list[Portion]:
    """Return the messages that carry shards: each has one server, one dtype, one way to travel, and not too much.

    Arguments:
        shards: each with the place of its key in the call.
        shapes: of each key of the call; needed for plain values only.
        hows: how each key's values travel; empty: all plain.
        sizes: bytes of each shard's payload, sent or answered; empty: those of its elements.
        message_bytes: the most that a message carries, unless one shard has more.
        relays: for each key, the relays of its servers (server to relay); empty: there are none. What
            a relay passes on goes over a network: MESSAGE_BYTES at most.
    """
    if not shards:
        return []
    table = np.array([(item, *shard) for item, shard in shards], np.int64)
    column = {name: table[:, at] for at, name in enumerate(("item", *Shard._fields))}
    kinds: list[How] = []
    for how in hows or (PLAIN,):
        if how not in kinds:
            kinds.append(how)
    ways = (
        np.array([kinds.index(how) for how in hows], np.int64)[column["item"]] if hows else np.zeros_like(table[:, 0])
    )
    used = np.array(sizes, np.int64) if len(sizes) else column["length"] * DTYPE_SIZES[column["dtype"]]
    through = np.full(len(table), NO_RELAY, np.int64)
    if relays:
        through[:] = [relays[item].get(shard.server, NO_RELAY) for item, shard in shards]
    limits = np.where(through == NO_RELAY, message_bytes, min(message_bytes, MESSAGE_BYTES))
    order = np.lexsort((column["offset"], column["key"], ways, column["dtype"], column["server"], through))
    labels = np.stack([column["server"], column["dtype"], ways, through], axis=1)
    portions, begin = [], 0
    for end in message_ends(labels[order], used[order], limits[order]):
        at = order[begin:end]
        its = {name: values[at] for name, values in column.items()}
        portions.append(_portion(its, at, kinds[ways[at[0]]], shapes, int(through[at[0]])))
        begin = end
    return portions


NO_RELAY = -1
"""In place of the rank of a relay: shards go to the server that has them."""


def message_ends(labels: Array, sizes: Array, limits: Array) -> Iterable[int]:
    """Yield where each message ends in a list of shards.

    Arguments:
        labels: (n, m): a message holds shards of one label.
        sizes: bytes of each.
        limits: the bytes that a message with it may have, unless it has more itself.
    """
    begin = used = 0
    rows = labels.tolist()
    for at, (label, size, limit) in enumerate(zip(rows, sizes.tolist(), limits.tolist(), strict=True)):
        is_full = used + size > limit or at - begin >= MESSAGE_ENTRIES
        if at > begin and (label != rows[begin] or is_full):
            yield at
            begin, used = at, 0
        used += size
    yield len(rows)


def _portion(
    shards: Mapping[str, Array], places: Array, how: How, shapes: Sequence[tuple[int, ...]], relay: int
) -> Portion:
    """Return the portion of some shards, of which each field is one array."""
    server = int(shards["server"][0]) if relay == NO_RELAY else relay
    dtype = DTYPES[shards["dtype"][0]]
    entries = np.zeros(len(places), ENTRY)
    for name in ("dtype", "key", "offset", "length"):
        entries[name] = shards[name]
    entries["codec"] = how.codec
    is_plain = how.codec == NONE
    return Portion(
        link=f"server-{server}",
        server=server,
        dtype=dtype,
        how=how,
        entries=entries,
        items=shards["item"],
        places=[] if is_plain else places.tolist(),
        parts=_parts(shards, dtype.itemsize, shapes) if is_plain else [],
        size=int(shards["length"].sum()),
        is_relayed=relay != NO_RELAY,
    )


def _parts(shards: Mapping[str, Array], itemsize: int, shapes: Sequence[tuple[int, ...]]) -> list[_Small | _Slice]:
    """Return where the elements of plain shards are in the values of their call."""
    parts: list[_Small | _Slice] = []
    items: list[int] = []
    for item, offset, length in np.stack([shards["item"], shards["offset"], shards["length"]], axis=1).tolist():
        if length == math.prod(shapes[item]) and length * itemsize < DIRECT_BYTES:
            items.append(item)
            continue
        if items:
            parts.append(_small(items, shapes))
            items = []
        last = parts[-1] if parts else None
        if isinstance(last, _Slice) and (last.item, last.end) == (item, offset):
            parts[-1] = _Slice(item, last.begin, offset + length, last.size + length)
        else:
            parts.append(_Slice(item, offset, offset + length, length))
    return [*parts, _small(items, shapes)] if items else parts


def _small(items: list[int], shapes: Sequence[tuple[int, ...]]) -> _Small:
    alike: list[tuple[int, int, int, tuple[int, ...]]] = []
    first = size = 0
    for shape, its in itertools.groupby(shapes[item] for item in items):
        last = first + len(list(its))
        alike.append((first, last, size, shape))
        size += (last - first) * math.prod(shape)
        first = last
    return _Small(items, size, alike)


class Buckets:
    """Which lists of entries the servers know of this worker. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: dict[int, list[Portion | None]] = {}
        self._next: dict[int, int] = {}

    def name(self, portion: Portion, rounds: Array, registers: bool) -> tuple[int, int]:
        """Return bucket and step of a message that is about to go; bucket 0: it names its entries.

        Arguments:
            rounds: the round of each key of the call.
            registers: whether the message may have the server remember its entries. If it does so, the step is -1:
                entries and bucket both travel, and these rounds are those of the bucket's step 0.
        """
        with self._lock:
            step = step_of(portion, rounds)
            if step >= 0:
                return portion.bucket, step
            if not registers or len(portion.entries) < BUCKET_ENTRIES:
                return 0, -1
            owners = self._owners.setdefault(portion.server, [None] * BUCKETS)
            number = self._next.get(portion.server, 0)
            self._next[portion.server] = (number + 1) % BUCKETS
            former = owners[number]
            if former is not None:
                former.bucket, former.base = 0, None
            owners[number] = portion
            portion.bucket, portion.base = number + 1, rounds[portion.items]
            return portion.bucket, -1

    def forget(self, portions: Iterable[Portion]) -> None:
        """Take it that servers do not know these portions: the next push of each names its entries again."""
        with self._lock:
            for portion in portions:
                owners = self._owners.get(portion.server, [])
                if portion.bucket and owners[portion.bucket - 1] is portion:
                    owners[portion.bucket - 1] = None
                portion.bucket, portion.base = 0, None


def step_of(portion: Portion, rounds: Array) -> int:
    """Return how many steps after its registration a portion's keys have reached these rounds; -1: not all as many."""
    if portion.base is None:
        return -1
    steps: Any = rounds[portion.at] - portion.base
    first = int(steps[0])
    return first if 0 <= first < 2**32 and bool((steps == first).all()) else -1
