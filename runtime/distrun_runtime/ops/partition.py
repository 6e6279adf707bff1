"""How a value is cut over the servers: which server holds which elements. Pure functions.

Source: the placement of MXNet's distributed KVStore and of ps-lite, number for number. We differ in three points:
an index may be negative or of any size (there the 32-bit product overflowed), a slice of no elements is left out
(there every server got one), and the last slice always ends at the value's last element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterable

SPREAD = 9973
"""A prime; consecutive indices fall on different servers unless their number is a multiple of it."""

PIECE_BYTES = 4 * 1024 * 1024
"""Upper limit of one piece on the wire, in bytes."""


@dataclass(frozen=True)
class Shard:
    """A run of elements of one value (flat, C order) and the server that holds it."""

    server: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The element after the last one."""
        return self.offset + self.length


def shards(index: int, size: int, servers: int, bound: int) -> tuple[Shard, ...]:
    """Return the shards of one value, in the order of their offsets; together they cover it once.

    Arguments:
        index: the value's placement number (Record.index); any integer.
        size: elements of the value, at least 0.
        servers: number of servers, at least 1.
        bound: values of fewer elements live on one server, all others are cut over all of them; at least 1.

    Returns:
        One shard (length 0 for a value of no elements) below the bound; else at most one for each server.
    """
    if size < 0 or servers < 1 or bound < 1:
        raise ValueError(
            "expected size >= 0, servers >= 1 and bound >= 1, found size=%d servers=%d bound=%d"
            % (size, servers, bound)
        )
    if size < bound:
        return (Shard(server=(index * SPREAD) % servers, offset=0, length=size),)
    return _shards_at([_edge(size, servers, i) for i in range(servers)] + [size])


def compressed_shards(index: int, size: int, servers: int, bound: int, factor: int) -> tuple[Shard, ...]:
    """Return the shards of a value whose codec puts `factor` elements into a word: a shard never cuts a word.

    The words, not the elements, are dealt as `shards` deals elements; the last server takes the rest of both.
    The other arguments are those of `shards`.
    """
    if size < bound:
        return shards(index, size, servers, bound)
    words = -(-size // factor)
    return _shards_at([min(size, _edge(words, servers, i) * factor) for i in range(servers)] + [size])


def row_shards(index: int, rows: int, row_size: int, servers: int, bound: int) -> tuple[Shard, ...]:
    """Return the shards of a value of `rows` rows of `row_size` elements: a shard never cuts a row.

    The rows are dealt as `shards` deals elements, once there are `bound` elements. Offsets and lengths are in
    elements, and multiples of `row_size`.
    """
    if rows * row_size < bound:
        return shards(index, rows * row_size, servers, bound)
    return _shards_at([_edge(rows, servers, i) * row_size for i in range(servers)] + [rows * row_size])


def pieces(parts: Iterable[Shard], itemsize: int, limit_bytes: int = PIECE_BYTES, unit: int = 1) -> tuple[Shard, ...]:
    """Return the same shards, cut into runs of at most `limit_bytes` (but at least one unit), in order.

    Arguments:
        itemsize: the size of one element in bytes.
        unit: elements that stay together, such as a row; lengths of shards are multiples of it.

    A shard of length 0 stays one piece.
    """
    step = max(1, limit_bytes // (itemsize * max(1, unit))) * max(1, unit)
    return tuple(
        Shard(server=part.server, offset=offset, length=min(step, part.end - offset))
        for part in parts
        for offset in (range(part.offset, part.end, step) if part.length else (part.offset,))
    )


def _shards_at(edges: list[int]) -> tuple[Shard, ...]:
    """Return the runs between neighbouring edges that have elements; run i is server i's."""
    return tuple(
        Shard(server=i, offset=edges[i], length=edges[i + 1] - edges[i])
        for i in range(len(edges) - 1)
        if edges[i + 1] > edges[i]
    )


def _edge(size: int, servers: int, i: int) -> int:
    """Return round(size / servers * i), in doubles and halves away from zero as C does it."""
    exact = size / servers * i
    whole = math.floor(exact)
    return whole + 1 if exact - whole >= 0.5 else whole
