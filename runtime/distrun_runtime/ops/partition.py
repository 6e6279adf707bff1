"""The shards of a value: what one is, and MXNet's placement of them on the servers. No side effects.

A `Shard` is the unit of names, placement, rounds and arithmetic, from the worker that cuts a value to the server that
has it. How values are cut and placed by default is in `ps.routing`; here is the placement of MXNet's distributed
KVStore and of ps-lite, number for number (`DISTRUN_PARTITION=mxnet`). It differs in three points: an index may be
negative or of any size (there the 32-bit product overflowed), a shard of no elements is left out (there every server
got one), and the last shard always ends at the value's last element.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

SPREAD = 9973
"""A prime; consecutive indices fall on different servers unless their number is a multiple of it."""


class Shard(NamedTuple):
    """A run of elements of one value (flat, C order) on one server. A value that is not cut yet is one shard, too."""

    server: int
    """Rank of the server that has it."""
    offset: int
    """Its first element in the value."""
    length: int
    """In elements."""
    key: int = -1
    """Number of its key in messages; -1: the key is not declared yet."""
    dtype: int = 0
    """Code of its element type (`protocol.message.DTYPES`)."""
    row_size: int = 0
    """Elements of a row; 0: the value is dense, or its rows have no elements."""

    @property
    def end(self) -> int:
        """The element after the last one."""
        return self.offset + self.length

    @property
    def first_row(self) -> int:
        """Its first row in a row-sparse value."""
        return self.offset // self.row_size

    @property
    def row_count(self) -> int:
        """Number of rows in it, of a row-sparse value."""
        return self.length // self.row_size


def shards(index: int, size: int, servers: int, bound: int, unit: int = 1) -> tuple[Shard, ...]:
    """Return the shards of one value, in the order of their offsets; together they cover it once.

    Arguments:
        index: the value's placement number (`KeyRecord.index`); any integer.
        size: elements of the value, at least 0.
        servers: number of servers, at least 1.
        bound: values of fewer elements live on one server, all others are cut over all of them; at least 1.
        unit: elements that a shard never cuts: a row, or what a codec puts into a word. Units are dealt as elements
            are; the last server takes the rest of both.

    Returns:
        One shard (length 0 for a value of no elements) below the bound; else at most one for each server.
    """
    if size < 0 or servers < 1 or bound < 1:
        raise ValueError(
            f"expected size >= 0, servers >= 1 and bound >= 1, found size={size} servers={servers} bound={bound}"
        )
    if size < bound:
        return (Shard(server=(index * SPREAD) % servers, offset=0, length=size),)
    units = -(-size // unit)
    edges = [min(size, _edge(units, servers, i) * unit) for i in range(servers)] + [size]
    return tuple(
        Shard(server, begin, end - begin) for server, (begin, end) in enumerate(pairwise(edges)) if end > begin
    )


def _edge(size: int, servers: int, i: int) -> int:
    """Return round(size / servers * i), in doubles and halves away from zero as C does it."""
    exact = size / servers * i
    whole = math.floor(exact)
    return whole + 1 if exact - whole >= 0.5 else whole
