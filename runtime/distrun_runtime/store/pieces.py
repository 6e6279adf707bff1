"""Values as pieces: where the elements of each key go, which pieces share a message, and how they come back. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from distrun_runtime.algo.partition import Shard
from distrun_runtime.algo.reduce import Array
from distrun_runtime.net.message import DTYPE_CODES, Buffer, Entry, Payload
from distrun_runtime.store.record import Record

MESSAGE_BYTES = 4 * 1024 * 1024
"""Small pieces to one server share a message up to so many bytes."""
MESSAGE_ENTRIES = 512


@dataclass(frozen=True)
class Layout:
    """Where the pieces of one key are."""

    number: int
    """The key's number in messages."""
    pieces: tuple[Shard, ...]


@dataclass(frozen=True)
class Part:
    """One piece in a message, and where it belongs in its value."""

    record: Record
    number: int
    """The key's number in messages."""
    piece: Shard

    def entry(self, round_: int, carries: bool) -> Entry:
        """Return its entry in a message of round `round_`; `carries`: a payload frame goes with it."""
        return Entry(
            key=self.number,
            offset=self.piece.offset,
            length=self.piece.length,
            round=round_,
            dtype=DTYPE_CODES[self.record.dtype],
            payload=Payload.FRAME if carries else Payload.NONE,
        )


def cut(items: Iterable[tuple[Record, Layout, Array]]) -> tuple[list[Part], list[Buffer]]:
    """Return the pieces of each value and, for each piece, a copy of its elements, which is ours alone."""
    parts: list[Part] = []
    buffers: list[Buffer] = []
    for record, layout, array in items:
        copy = np.array(array, order="C", copy=True).reshape(-1).data.cast("B")
        size = record.dtype.itemsize
        for piece in layout.pieces:
            parts.append(Part(record, layout.number, piece))
            buffers.append(copy[piece.offset * size : piece.end * size])
    return parts, buffers


def groups(parts: Sequence[Part]) -> list[list[int]]:
    """Return the numbers of the parts that share a message: one server, not too many bytes."""
    groups: list[list[int]] = []
    filling: dict[int, tuple[list[int], int]] = {}
    for number, part in enumerate(parts):
        size = part.piece.length * part.record.dtype.itemsize
        group, used = filling.get(part.piece.server, ([], MESSAGE_BYTES))
        if used + size > MESSAGE_BYTES or len(group) >= MESSAGE_ENTRIES:
            group, used = [], 0
            groups.append(group)
        group.append(number)
        filling[part.piece.server] = (group, used + size)
    return groups


class Target:
    """The outputs of one key's pull, filled piece by piece."""

    def __init__(self, arrays: list[Array]) -> None:
        self._arrays = arrays
        first = arrays[0]
        # A view of contiguous outputs takes the pieces directly; any other is written at the end from a copy.
        self._flat = first.reshape(-1) if first.flags.c_contiguous else np.empty(first.size, first.dtype)

    def write(self, piece: Shard, values: Array) -> None:
        """Take in one piece."""
        self._flat[piece.offset : piece.end] = values

    def finish(self) -> None:
        """Write the outputs that are not filled yet."""
        value = self._flat.reshape(self._arrays[0].shape)
        for number, array in enumerate(self._arrays):
            if number > 0 or not array.flags.c_contiguous:
                array[...] = value
