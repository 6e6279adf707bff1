"""Values as pieces and messages: what travels, in which message, and what comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distrun_runtime.arrays import dtypes
from distrun_runtime.errors import KVError
from distrun_runtime.ops import rows
from distrun_runtime.protocol.message import DTYPE_CODES, Entry, Kind, Payload, rows_of
from distrun_runtime.ps.routing import Layout, Shape, mxnet_layout
from distrun_runtime.store import pieces, requests
from distrun_runtime.store.base import Record
from distrun_runtime.store.compress import Compressor, Setting
from distrun_runtime.store.pieces import RowTarget
from distrun_runtime.store.sparse import RowSparse

WIDE = np.arange(1600, dtype="float32").reshape(40, 40)


def placed(value: Any, *, servers: int = 2, factor: int = 1, number: int = 5) -> tuple[Record, Layout]:
    """Return a value's record and a layout that has it on all servers."""
    record = Record.of("w", 0, value)
    rows = record.shape[0] if record.is_sparse else 0
    shape = Shape(record.size, record.dtype.itemsize, record.row_size if record.is_sparse else 0, rows)
    return record, mxnet_layout(number, record.index, shape, servers=servers, bound=1000, factor=factor)


def bytes_of(parts: list[pieces.Part]) -> bytes:
    return b"".join(bytes(part.buffer) for part in parts if part.buffer is not None)


@pytest.mark.parametrize("dtype", dtypes.NAMES)
def test_the_pieces_of_a_value_are_its_bytes(dtype: str) -> None:
    value = np.frombuffer(np.random.default_rng(0).bytes(1600 * 8), dtypes.parse(dtype))[:1600].reshape(40, 40)
    for given in (value, value.T, value[::-1]):
        record, layout = placed(given)
        parts = pieces.whole(record, layout, given)
        assert [part.piece.server for part in parts] == [0, 1]
        assert bytes_of(parts) == given.tobytes()


def test_lent_memory_is_not_copied_and_other_memory_is() -> None:
    value = WIDE.copy()
    record, layout = placed(value)
    lent, copied = pieces.whole(record, layout, value), pieces.whole(record, layout, value, lent=False)
    value[...] = 0
    assert bytes_of(lent) == bytes(6400)
    assert bytes_of(copied) == WIDE.tobytes()


def test_values_of_one_and_of_no_elements_have_a_piece() -> None:
    for value in (np.array(3.0), np.zeros((0, 4))):
        record, layout = placed(value)
        parts = pieces.whole(record, layout, value)
        assert len(parts) == 1
        assert bytes_of(parts) == value.tobytes()
        # In a message of its own too: a round counts it.
        assert requests.groups(parts) == [parts]


def test_a_compressed_contribution_has_the_codecs_number_and_parameters() -> None:
    compressor = Compressor()
    compressor.set(Setting.of({"type": "2bit", "threshold": 2}))
    record, layout = placed(WIDE, factor=16)
    parts = pieces.contribution(record, layout, WIDE, compressor, lent=False)
    assert [(part.codec, part.params, part.size_bytes) for part in parts] == [(1, {"threshold": 2.0}, 200)] * 2
    [one, two] = requests.pack(Kind.PUSH, 1, parts, [0, 0, 0, 0, 0, 3])
    assert one.message.body == two.message.body == {"codec": {"threshold": 2.0}}
    assert rows_of(one.message.entries) == [Entry(5, 0, 800, 3, 0, 1, Payload.FRAME)]
    assert pieces.wanted(record, layout, compressor)[0].codec == 0
    compressor.set(Setting.of({"type": "fp16", "two_way": True}))
    assert [part.codec for part in pieces.wanted(record, layout, compressor)] == [3, 3]


def test_rows_go_to_the_pieces_that_hold_them_and_every_piece_hears_of_the_round() -> None:
    value = RowSparse(WIDE[[39, 1]], [39, 1], WIDE.shape)
    record, layout = placed(RowSparse.empty(WIDE.shape), servers=3)
    parts = pieces.contribution(record, layout, value, Compressor(), lent=True)
    assert [part.piece.length // 40 for part in parts] == [13, 14, 13]
    found = [rows.decode(part.buffer, part.piece.length // 40, 40, record.dtype) for part in parts if part.buffer]
    assert [numbers.tolist() for numbers, _ in found] == [[1], [], [12]]
    assert (found[2][1] == WIDE[39]).all()
    asked = pieces.wanted_rows(record, layout, np.array([0, 12, 39]))
    assert [(part.piece.server, part.rows) for part in asked] == [(0, slice(0, 2)), (2, slice(2, 3))]
    target = RowTarget(record, 3)
    for part in reversed(asked):
        assert part.rows is not None
        target.write(part.rows, WIDE[[0, 12, 39]][part.rows].reshape(-1))
    assert (target.values == WIDE[[0, 12, 39]]).all()


def test_small_pieces_of_one_server_share_a_message_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MESSAGE_BYTES", 100)
    monkeypatch.setattr(requests, "MESSAGE_ENTRIES", 3)
    parts = []
    for number in range(12):
        value = np.zeros(number * 3, "float32")
        record = Record.of(number, number, value)
        layout = mxnet_layout(number, number, Shape(record.size, record.dtype.itemsize), servers=2, bound=1000)
        parts += pieces.whole(record, layout, value)
    packed = requests.pack(Kind.PUSH, 1, parts, [1] * 12, priority=4)
    assert sorted(part.number for one in packed for part in one.parts) == list(range(12))
    for one in packed:
        assert {part.piece.server for part in one.parts} == {int(one.link[-1])}
        assert len(one.parts) <= 3
        assert len(one.parts) == 1 or sum(part.size_bytes for part in one.parts) <= 100
        assert one.message.priority == 4
        assert one.message.entries["key"].tolist() == [part.number for part in one.parts]


def test_an_answer_is_decoded_by_what_its_entry_says() -> None:
    record, layout = placed(WIDE, servers=1)
    [part] = pieces.wanted(record, layout, Compressor())
    plain = Entry(5, 0, 1600, 1, 0, 0, Payload.FRAME)
    assert (requests.values_of(part, plain, WIDE.tobytes(), {}) == WIDE.reshape(-1)).all()
    half = Entry(5, 0, 1600, 1, 0, 3, Payload.FRAME)
    assert (requests.values_of(part, half, WIDE.astype("float16").tobytes(), {}) == WIDE.reshape(-1)).all()
    with pytest.raises(KVError, match="float64"):
        requests.values_of(part, Entry(5, 0, 1600, 1, DTYPE_CODES[np.dtype("float64")]), b"", {})
