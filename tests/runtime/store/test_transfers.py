"""Transfers: which messages a call makes where some values are compressed or go by rows, and what replies become."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from distrun_runtime.errors import KVError
from distrun_runtime.ops import compression
from distrun_runtime.ops.partition import Shard
from distrun_runtime.protocol.message import DTYPE_CODES, Entry, Message, Payload, rows_of
from distrun_runtime.ps.counters import Stages
from distrun_runtime.ps.role import Request
from distrun_runtime.ps.routing import mxnet_shards
from distrun_runtime.store.base import CallOptions, Selection
from distrun_runtime.store.compress import Compression, Compressor
from distrun_runtime.store.keys import KeyRecord
from distrun_runtime.store.transfers import Transfers
from distrun_runtime.store.values import RowSparse

WIDE = np.arange(1600, dtype="float32").reshape(40, 40)
TWO_BIT = {"type": "2bit", "threshold": 2.0}


class Sending:
    """The transfers of a store with these keys; `asked` has the messages of its last call."""

    def __init__(self, servers: int = 2, setting: Any = None, **values: Any) -> None:
        self.asked: list[tuple[str, Message]] = []
        self.compressor = Compressor()
        if setting is not None:
            self.compressor.set(Compression.of(setting))
        node = SimpleNamespace(
            value_servers=[f"server-{rank}" for rank in range(servers)],
            staging=lambda link: None,
            is_shared=lambda array: False,
            stages=Stages(),
        )
        link: Any = SimpleNamespace(
            store=1, epoch=0, node=node, relays={}, ask=self._ask, stage=lambda stage: nullcontext()
        )
        self.transfers = Transfers(link, self.compressor)
        self.records = {name: KeyRecord.of(name, number, value) for number, (name, value) in enumerate(values.items())}
        for number, record in enumerate(self.records.values()):
            rows = record.row_size if record.is_sparse else 0
            whole = Shard(0, 0, record.size, number, DTYPE_CODES[record.dtype], rows)
            self.transfers.add(record.key, mxnet_shards(whole, number, servers=servers, bound=1000, factor=16))
        self.keys = Selection(self.records.values())

    def _ask(self, what: str, messages: Any, **how: Any) -> Request:
        self.asked = list(messages)
        return Request(what)

    def push(self, *values: Any) -> list[Message]:
        self.transfers.push("push", self.keys, values, CallOptions(3))
        return [message for _, message in self.asked]

    def pull(self, *outs: Any) -> Any:
        _, take = self.transfers.pull("pull", self.keys, [[out] for out in outs], priority=3, own=False)
        return take


def answer(message: Message, payloads: Any, **changes: Any) -> Message:
    """Return a server's answer to a pull, with a frame for each entry."""
    entries = message.entries.copy()
    entries["payload"] = Payload.FRAME
    for name, value in changes.items():
        entries[name] = value
    return replace(message, is_reply=True, entries=entries, payloads=payloads)


def test_a_compressed_contribution_has_the_codecs_number_and_parameters() -> None:
    sending = Sending(setting=TWO_BIT, w=WIDE)
    one, two = sending.push(WIDE)
    assert [link for link, _ in sending.asked] == ["server-0", "server-1"]
    assert one.body == two.body == {"codec": {"threshold": 2.0}}
    assert rows_of(one.entries) == [Entry(0, 0, 800, 1, 0, 1, Payload.FRAME)]
    assert [memoryview(frame).nbytes for frame in one.payloads] == [200]
    assert (one.priority, one.bucket) == (3, 0)


def test_only_what_is_compressed_goes_by_itself_and_plain_values_still_share_messages_and_buckets() -> None:
    small = {"s%d" % number: np.full(4, number, "float32") for number in range(12)}
    sending = Sending(servers=1, setting={**TWO_BIT, "min_size": 100}, w=WIDE, **small)
    for step in range(2):
        plain, coded = sorted(sending.push(WIDE, *small.values()), key=lambda each: bool(each.body))
        assert [entry.key for entry in rows_of(coded.entries)] == [0]
        assert (plain.bucket, plain.step, len(plain.entries)) == (1, step, 0 if step else 12)
        assert b"".join(bytes(frame) for frame in plain.payloads) == b"".join(v.tobytes() for v in small.values())


def test_a_call_follows_a_change_of_the_setting() -> None:
    sending = Sending(servers=1, setting=TWO_BIT, w=WIDE)
    assert [message.entries["codec"].tolist() for message in sending.push(WIDE)] == [[1]]
    sending.pull(WIDE.copy())
    assert sending.asked[0][1].entries["codec"].tolist() == [0]
    sending.compressor.set(Compression.of({"type": "fp16", "two_way": True}))
    assert [message.entries["codec"].tolist() for message in sending.push(WIDE)] == [[3]]
    sending.pull(WIDE.copy())
    assert sending.asked[0][1].entries["codec"].tolist() == [3]
    sending.compressor.set(Compression())
    assert [message.entries["codec"].tolist() for message in sending.push(WIDE)] == [[0]]


def test_rows_go_to_the_shards_that_hold_them_and_every_shard_hears_of_the_round() -> None:
    sending = Sending(servers=3, w=RowSparse.empty(WIDE.shape))
    messages = sending.push(RowSparse(WIDE[[39, 1]], [39, 1], WIDE.shape))
    assert [message.entries["length"].tolist() for message in messages] == [[520], [560], [520]]
    assert {code for message in messages for code in message.entries["codec"].tolist()} == {compression.ROWS}
    counts = [int.from_bytes(bytes(memoryview(message.payloads[0])[:8]), "little") for message in messages]
    assert counts == [1, 0, 1]


def test_a_pull_of_rows_asks_only_shards_that_hold_some_also_for_one_key_twice() -> None:
    sending = Sending(servers=3, w=RowSparse.empty(WIDE.shape))
    found: dict[int, Any] = {}
    record = sending.records["w"]
    wanted = [np.array([0, 12, 39]), np.array([12])]
    items = [(record, rows, lambda values, at=at: found.__setitem__(at, values)) for at, rows in enumerate(wanted)]
    _, take = sending.transfers.pull_rows("rows", items, priority=0)
    assert [(link, len(message.entries)) for link, message in sending.asked] == [("server-0", 2), ("server-2", 1)]
    take(
        (
            answer(sending.asked[0][1], [WIDE[[0, 12]].tobytes(), WIDE[[12]].tobytes()]),
            answer(sending.asked[1][1], [WIDE[[39]].tobytes()]),
        )
    )
    for at, rows in enumerate(wanted):
        assert (found[at] == WIDE[rows]).all()


def test_an_answer_is_decoded_by_what_its_entry_says() -> None:
    sending = Sending(servers=1, setting={"type": "fp16", "two_way": True}, w=WIDE)
    for codec, frame in ((0, WIDE.tobytes()), (3, WIDE.astype("float16").tobytes())):
        out = np.zeros_like(WIDE).T
        take = sending.pull(out)
        take((answer(sending.asked[0][1], [frame], codec=codec),))
        assert (out == WIDE).all()
    other = DTYPE_CODES[np.dtype("float64")]
    with pytest.raises(KVError, match="answered with values of float64, expected float32"):
        take((answer(sending.asked[0][1], [frame], dtype=other),))


def test_keys_of_one_and_of_no_elements_are_in_a_message_so_that_their_rounds_are_counted() -> None:
    values = {"a": np.array(3.0), "b": np.zeros((0, 4)), "c": RowSparse.empty((3, 0), "float64")}
    sending = Sending(servers=1, **values)
    [message] = sending.push(*values.values())
    assert sorted(message.entries["key"].tolist()) == [0, 1, 2]
    assert b"".join(bytes(frame) for frame in message.payloads) == np.array(3.0).tobytes()
