"""What a pull is given: the weight itself, some rows of it, or what a codec makes of it."""

from __future__ import annotations

import numpy as np

from distrun_runtime.arrays.dtypes import BFLOAT16, narrow, widen
from distrun_runtime.ops import rows as rowcodec
from distrun_runtime.ops.compression import CODECS
from distrun_runtime.protocol.message import Entry, Flag, Kind, Message, Payload, decode, encode
from distrun_runtime.ps import lending, work
from distrun_runtime.ps.shelf import Shelf
from distrun_runtime.ps.work import How, SlotId

SLOT = SlotId(1, 0, 0)
TWO_BIT = CODECS["2bit"]


def lend(shelf: Shelf, how: How = work.PLAIN, rows: list[int] | None = None) -> lending.Lent:
    payload = None if rows is None else rowcodec.encode_rows(np.array(rows, np.int64))
    return lending.lend(shelf, work.Lend(1, 0, SLOT, payload, how))


def test_the_weight_itself_is_lent_until_it_is_given_back() -> None:
    shelf = Shelf(np.array([1, 2], np.float32))
    lent = lend(shelf)
    assert lent.weight is shelf.weight
    assert shelf.is_lent
    lending.give_back(shelf, lent)
    assert not shelf.is_lent


def test_rows_are_copied_in_the_order_of_the_request() -> None:
    shelf = Shelf(np.arange(6, dtype=np.float32), row_size=2)
    lent = lend(shelf, How(16), rows=[0, 2])
    assert np.frombuffer(lent.payload, np.float32).tolist() == [0, 1, 4, 5]
    assert not shelf.is_lent
    assert bytes(lend(shelf, How(16), rows=[]).payload) == b""


def test_bfloat16_travels_as_it_is_and_by_rows() -> None:
    weight = narrow(np.arange(4, dtype=np.float32), BFLOAT16)
    shelf = Shelf(weight, row_size=2)
    assert bytes(lend(shelf).payload) == weight.tobytes()
    found = np.frombuffer(lend(shelf, How(16), rows=[1]).payload, BFLOAT16)
    assert widen(found).tolist() == [2, 3]


def test_a_round_is_encoded_once_and_what_was_left_out_comes_with_the_next() -> None:
    shelf = Shelf(np.array([0.75, -0.25], np.float32))
    how = How(TWO_BIT.number, TWO_BIT.check({}))
    first = lend(shelf, how).payload
    assert lend(shelf, how).payload is first
    assert TWO_BIT.decode(first, 2, TWO_BIT.check({})).tolist() == [0.5, 0]
    assert shelf.residual is not None
    assert shelf.residual.tolist() == [0.25, -0.25]
    shelf.put(np.array([0.25, -0.25], np.float32))
    second = lend(shelf, how).payload
    assert TWO_BIT.decode(second, 2, TWO_BIT.check({})).tolist() == [0.5, -0.5]
    assert shelf.residual.tolist() == [0, 0]


def test_fp16_leaves_no_residual() -> None:
    shelf = Shelf(np.array([0.1], np.float32))
    lent = lend(shelf, How(CODECS["fp16"].number))
    assert np.frombuffer(lent.payload, np.float16).tolist() == [np.float16(0.1)]
    assert shelf.residual is None


def test_a_reply_says_what_each_payload_is() -> None:
    shelf = Shelf(np.array([1, 2], np.float32), row_size=1)
    entries = (Entry(0, 0, 2, 3, codec=1), Entry(0, 0, 2, 3, codec=16, payload=Payload.FRAME))
    pull = Message(Kind.PULL, store=1, request=7, body={"codec": {"threshold": 0.5}}, entries=entries)
    lent = {0: lend(shelf, How(1, TWO_BIT.check({}))), 1: lend(shelf, How(16), rows=[1])}
    reply = lending.reply(pull, lent)
    assert (reply.flags, reply.request, reply.body) == (Flag.REPLY, 7, {"codec": {"threshold": 0.5}})
    assert [(entry.codec, entry.payload, entry.round) for entry in reply.entries] == [
        (1, Payload.FRAME, 3),
        (16, Payload.FRAME, 3),
    ]
    assert decode(encode(reply)).entries == reply.entries


def test_what_cannot_be_encoded_is_the_pullers_error() -> None:
    shelf = Shelf(np.array([np.inf], np.float32), key="w", shape=(1,))
    lent = lend(shelf, How(1, TWO_BIT.check({})))
    reply = lending.reply(Message(Kind.PULL, entries=(Entry(0, 0, 1, codec=1),)), {0: lent})
    assert reply.is_error
    assert str(reply.body["reason"]).startswith("key 'w' of shape (1,): compression '2bit': element 0 is inf")
    assert lending.reply(Message(Kind.PULL, entries=(Entry(0, 0, 1),)), {}).is_error
