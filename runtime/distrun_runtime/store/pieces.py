"""Values as pieces: where the elements of each key go, what of them travels, and how they come back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distrun_runtime.arrays.device import Buffer
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.ops import rows
from distrun_runtime.ops.partition import Shard
from distrun_runtime.protocol.message import DTYPE_CODES, Entry, Payload
from distrun_runtime.ps.routing import Layout
from distrun_runtime.store.base import Record, Value
from distrun_runtime.store.compress import Compressor
from distrun_runtime.store.sparse import RowSparse


@dataclass(frozen=True)
class Part:
    """One piece in a message, and where it belongs in its value."""

    record: Record
    number: int
    """The key's number in messages."""
    piece: Shard
    buffer: Buffer | None = None
    """The payload that goes with it."""
    codec: int = 0
    params: Mapping[str, Any] = field(default_factory=dict)
    """The codec's parameters."""
    rows: slice | None = None
    """Of a pull of rows: which of its rows are asked of this piece."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the payload that goes, or else of the one that comes."""
        if self.rows is not None:
            return int(self.rows.stop - self.rows.start) * self.record.row_size * self.record.dtype.itemsize
        if self.buffer is not None:
            return memoryview(self.buffer).nbytes
        return self.piece.length * self.record.dtype.itemsize

    def entry(self, round_: int) -> Entry:
        """Return its entry in a message of round `round_`."""
        return Entry(
            key=self.number,
            offset=self.piece.offset,
            length=self.piece.length,
            round=round_,
            dtype=DTYPE_CODES[self.record.dtype],
            codec=self.codec,
            payload=Payload.NONE if self.buffer is None else Payload.FRAME,
        )


def whole(record: Record, layout: Layout, value: Array, *, lent: bool = True) -> list[Part]:
    """Return all pieces of a value with their elements as they are.

    Arguments:
        lent: its memory stays as it is until the message is away; else the elements are copied.
    """
    flat = np.ascontiguousarray(value) if lent else np.array(value, order="C", copy=True)
    frame = flat.reshape(-1).view(np.uint8).data
    if len(layout.shards) == 1:
        return [Part(record, layout.number, layout.shards[0], frame)]
    size = record.dtype.itemsize
    return [
        Part(record, layout.number, piece, frame[piece.offset * size : piece.end * size]) for piece in layout.shards
    ]


def contribution(record: Record, layout: Layout, value: Value, compressor: Compressor, *, lent: bool) -> list[Part]:
    """Return all pieces of what is pushed to a key: compressed, as rows, or as they are (`lent` as in `whole`)."""
    if isinstance(value, RowSparse):
        return _rows_of(record, layout, value)
    setting = compressor.of(record)
    if setting is None:
        return whole(record, layout, value, lent=lent)
    flat = np.ascontiguousarray(value).reshape(-1)
    parts = []
    for piece in layout.shards:
        found = compressor.encode(record, piece, flat)
        assert found is not None
        parts.append(Part(record, layout.number, piece, found[1], found[0], setting.params))
    return parts


def wanted(record: Record, layout: Layout, compressor: Compressor) -> list[Part]:
    """Return all pieces of a key for a pull, compressed on the way back if its setting says so."""
    setting = compressor.of(record)
    codec, params = (setting.number, setting.params) if setting is not None and setting.two_way else (0, {})
    return [Part(record, layout.number, piece, codec=codec, params=params) for piece in layout.shards]


def wanted_rows(record: Record, layout: Layout, numbers: Array) -> list[Part]:
    """Return the pieces that hold some of these rows (int64, ascending, each once), for a pull."""
    parts = []
    for piece in layout.shards if record.row_size else ():
        first, count = _span(record, piece)
        here = rows.within(numbers, first, count)
        if here.stop > here.start:
            asked = rows.encode_rows(numbers[here] - first)
            parts.append(Part(record, layout.number, piece, asked, rows.ROWS, rows=here))
    return parts


def _rows_of(record: Record, layout: Layout, value: RowSparse) -> list[Part]:
    """Every piece has its part, also without a row of it: it counts in the piece's round."""
    if not record.row_size:
        return whole(record, layout, value.to_dense())
    one = value.canonical()
    parts = []
    for piece in layout.shards:
        first, count = _span(record, piece)
        here = rows.within(one.rows, first, count)
        payload = rows.encode(one.rows[here] - first, one.values[here])
        parts.append(Part(record, layout.number, piece, payload, rows.ROWS))
    return parts


def _span(record: Record, piece: Shard) -> tuple[int, int]:
    """Return a piece's first row and its number of rows."""
    return piece.offset // record.row_size, piece.length // record.row_size


class RowTarget:
    """The rows of one key's pull, in the order in which they were asked for."""

    def __init__(self, record: Record, count: int) -> None:
        self.values: Array = np.empty((count, *record.shape[1:]), record.dtype)
        self._table = self.values.reshape(count, record.row_size)

    def write(self, here: slice, values: Array) -> None:
        """Take in the rows of one piece; `here`: which they are."""
        self._table[here] = values.reshape(self._table[here].shape)
