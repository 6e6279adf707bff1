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
    edges = [_edge(size, servers, i) for i in range(servers)] + [size]
    return tuple(
        Shard(server=i, offset=edges[i], length=edges[i + 1] - edges[i])
        for i in range(servers)
        if edges[i + 1] > edges[i]
    )


def pieces(parts: Iterable[Shard], itemsize: int, limit_bytes: int = PIECE_BYTES) -> tuple[Shard, ...]:
    """Return the same shards, cut into runs of at most `limit_bytes` (but at least one element), in order.

    `itemsize` is the size of one element in bytes. A shard of length 0 stays one piece.
    """
    step = max(1, limit_bytes // itemsize)
    return tuple(
        Shard(server=part.server, offset=offset, length=min(step, part.end - offset))
        for part in parts
        for offset in (range(part.offset, part.end, step) if part.length else (part.offset,))
    )


def _edge(size: int, servers: int, i: int) -> int:
    """Return round(size / servers * i), in doubles and halves away from zero as C does it."""
    exact = size / servers * i
    whole = math.floor(exact)
    return whole + 1 if exact - whole >= 0.5 else whole
