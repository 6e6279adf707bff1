"""Frames and messages: golden bytes, round trips, and what is refused."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrun_runtime.arrays.dtypes import name_of
from distrun_runtime.errors import WireError
from distrun_runtime.protocol import message
from distrun_runtime.protocol.handshake import NodeIdentity, Opener
from distrun_runtime.protocol.message import (
    DTYPES,
    Common,
    Entry,
    Kind,
    Message,
    Payload,
    SharedBody,
    entries_of,
    payloads_of,
    rows_of,
)

HEAD = bytes.fromhex(
    "44524b56 0400 21 01 0200 03 00 04000000 ffffffff 05000000 f9ffffff 0807060504030201 01000000 0000000000000000"
)
ENTRY = bytes.fromhex("09000000 01 00 01 00 0a00000000000000 0200000000000000 0b00000000000000")
U32 = st.integers(0, 2**32 - 1)
I32 = st.integers(-(2**31), 2**31 - 1)
U64 = st.integers(0, 2**64 - 1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    entries, payloads = [], []
    for _ in range(draw(st.integers(0, 5))):
        dtype = draw(st.integers(0, len(DTYPES) - 1))
        has_frame = draw(st.booleans())
        length = draw(st.integers(0, 9)) if has_frame else draw(U64)
        payload = Payload.FRAME if has_frame else Payload.NONE
        entries.append(Entry(draw(U32), draw(U64), length, draw(U64), dtype, 0, payload))
        if has_frame:
            size = length * DTYPES[dtype].itemsize
            payloads.append(draw(st.binary(min_size=size, max_size=size)))
    return Message(
        kind=draw(st.sampled_from(Kind)),
        is_reply=draw(st.booleans()),
        is_error=draw(st.booleans()),
        store=draw(st.integers(0, 2**16 - 1)),
        role=draw(st.integers(0, 255)),
        rank=draw(I32),
        epoch=draw(U32),
        incarnation=draw(U32),
        priority=draw(I32),
        request=draw(U64),
        entries=entries_of(entries),
        body=draw(st.dictionaries(st.text(), JSON, max_size=3)),
        payloads=payloads,
    )


@given(messages())
def test_every_message_comes_back_as_it_was(sent: Message) -> None:
    frames = [bytes(frame) for frame in message.encode(sent)]
    assert facts(message.decode(frames)) == facts(sent)


def sent_and_read(one: Message) -> Message:
    return message.decode([bytes(frame) for frame in message.encode(one)])


def facts(one: Message) -> dict[str, Any]:
    """All fields of a message, so that they can be compared."""
    found = {each.name: getattr(one, each.name) for each in fields(one)}
    return {**found, "entries": rows_of(one.entries), "payloads": [bytes(payload) for payload in one.payloads]}


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    dtype=st.integers(0, len(DTYPES) - 1),
    cuts=st.sets(st.integers(1, 5)),
)
def test_packed_entries_share_frames_that_hold_whole_entries(lengths: list[int], dtype: int, cuts: set[int]) -> None:
    entries = entries_of(Entry(key, 0, length, 3, dtype, payload=Payload.PACKED) for key, length in enumerate(lengths))
    values = [bytes([key]) * (length * DTYPES[dtype].itemsize) for key, length in enumerate(lengths)]
    edges = [0, *sorted(cut for cut in cuts if cut < len(lengths)), len(lengths)]
    frames = [b"".join(values[begin:end]) for begin, end in pairwise(edges)]
    got = message.decode(
        [bytes(frame) for frame in message.encode(Message(Kind.PUSH, entries=entries, payloads=frames))]
    )
    assert [bytes(each or b"") for each in payloads_of(got.entries, got.payloads)] == values


@pytest.mark.parametrize(
    ("entries", "payloads", "words"),
    [
        ([Entry(0, 0, 2), Entry(1, 0, 2)], [bytes(12)], "2 packed entries announce 16 bytes, their frames have 12"),
        ([Entry(0, 0, 2), Entry(1, 0, 2)], [bytes(4), bytes(12)], "a frame ends within a packed entry"),
        ([Entry(0, 0, 2), Entry(1, 0, 1, dtype=1)], [bytes(16)], "packed entries of several element types"),
        ([Entry(0, 0, 2), Entry(1, 0, 2, codec=1)], [bytes(16)], "packed entries share their frames with entries of"),
        ([Entry(0, 0, 2**63)], [], "an entry of 9223372036854775808 elements; no frame can hold it"),
    ],
)
def test_packed_entries_that_are_none_are_refused(entries: list[Entry], payloads: list[bytes], words: str) -> None:
    packed = entries_of(entry._replace(payload=Payload.PACKED) for entry in entries)
    with pytest.raises(WireError, match=words):
        message.decode(
            [bytes(frame) for frame in message.encode(Message(Kind.PUSH, entries=packed, payloads=payloads))]
        )


def test_a_message_may_name_entries_by_their_bucket() -> None:
    sent = Message(Kind.PUSH, bucket=7, step=9, payloads=[b"1234"])
    head = bytes(message.encode(sent)[0])
    assert head[40:48] == struct.pack("<II", 7, 9)
    assert facts(message.decode([bytes(frame) for frame in message.encode(sent)])) == facts(sent)


def test_golden_bytes_of_head_and_entry() -> None:
    sent = Message(
        Kind.PUSH,
        is_reply=True,
        store=2,
        role=3,
        rank=-1,
        epoch=4,
        incarnation=5,
        priority=-7,
        request=0x0102030405060708,
        entries=entries_of([Entry(9, 10, 2, 11, 1, 0, Payload.FRAME)]),
        payloads=[np.array([1.0, 2.0]).data.cast("B")],
    )
    head, body, payload = (bytes(frame) for frame in message.encode(sent))
    assert head == HEAD + ENTRY
    assert (len(HEAD), len(ENTRY)) == (48, 32)
    assert body == b""
    assert payload == struct.pack("<2d", 1, 2)


def test_golden_bytes_of_a_hello() -> None:
    who = NodeIdentity("j", "worker", 1, 0, "d1", 42, "tcp://10.0.0.1:5", 2, 1)
    head, body = (bytes(frame) for frame in message.encode(Opener(who, b"secret", "00ff").hello()))
    assert head.hex() == "44524b56" + "0400" + "01" + "00" + "00" * 8 + "ffffffff" + "00" * 28
    assert body == (
        b'{"auth":"token","endpoint":"tcp://10.0.0.1:5","host":"d1","incarnation":0,"job":"j","nonce":"00ff",'
        b'"pid":42,"rank":1,"role":"worker","servers":1,"version":4,"workers":2}'
    )


def test_codes_of_kinds_and_types_do_not_change() -> None:
    """The first seven types have MXNet's codes (mshadow base.h); a kind's number is for good."""
    types = ("float32", "float64", "float16", "uint8", "int32", "int8", "int64", "int16", "uint16", "uint32", "uint64")
    assert tuple(name_of(dtype) for dtype in DTYPES) == (*types, "bfloat16")
    first = ("HELLO", "CHALLENGE", "PROOF", "WELCOME", "REFUSED", "ROSTER", "LOST", "BYE", "ABORT", "STOP")
    job = ("OPEN", "BARRIER", "KEYS", "RULE", "JOIN", "LEFT", "WAITING", "SAVE", "LOAD", "CLOSE")
    values = ("INIT", "PUSH", "PULL", "ROUNDS", "STATS", "PROFILE", "NORMS", "PUSHPULL", "RELEASE", "SETTLE")
    numbered = [*enumerate(first, 1), *enumerate(job, 16), *enumerate(values, 32)]
    assert [(int(kind), kind.name) for kind in Kind] == numbered


def test_a_payload_is_passed_through_without_a_copy() -> None:
    values = np.arange(4.0)
    entry = Entry(0, 0, 4, dtype=1, payload=Payload.FRAME)
    frames = message.encode(Message(Kind.PUSH, entries=entries_of([entry]), payloads=[values.data.cast("B")]))
    got = message.decode(frames)
    values[0] = 7
    assert np.frombuffer(got.payloads[0])[0] == 7


def changed(at: int, *values: int) -> list[bytes]:
    """A push of one entry of two float64, with some bytes of its head changed."""
    head = bytearray(HEAD + ENTRY)
    head[at : at + len(values)] = bytes(values)
    return [bytes(head), b"", bytes(16)]


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([], "0 frames came"),
        ([HEAD], "1 frames came"),
        ([b"", b""], "not a distrun message"),
        ([HEAD[:47], b""], "not a distrun message"),
        (changed(0, 0x45), "not a distrun message"),
        (changed(4, 1), "message version 1; this program speaks version 4"),
        (changed(6, 99), "unknown kind"),
        (changed(7, 8), "unknown flags: 0x08"),
        (changed(7, 255), "unknown flags: 0xff"),
        (changed(36, 2), "a head of 80 bytes cannot hold 2 entries"),
        (changed(36, 0xFF, 0xFF, 0xFF, 0xFF), "cannot hold 4294967295 entries"),
        (changed(52, 12), "entry 0 has dtype 12, codec 0, payload kind 1"),
        (changed(54, 2), "payload kind 2"),
        (changed(54, 4), "payload kind 4"),
        (changed(64, 3), "entry 0 announces 24 bytes, its frame has 16"),
        (changed(54, 0), "1 payload frames for 0 entries that announce one"),
        ([*changed(0, 0x44), b"more"], "2 payload frames for 1 entries"),
        (changed(0, 0x44)[:2], "entry 0 announces a payload; only 0 frames came"),
        ([HEAD[:36] + bytes(12), b"{"], "body is not JSON"),
        ([HEAD[:36] + bytes(12), b"\xff\xfe"], "body is not JSON"),
        ([HEAD[:36] + bytes(12), b"[1]"], "body is not an object"),
        ([HEAD[:36] + bytes(12), b"[" * 200_000], "body is not JSON"),
        ([HEAD[:36] + bytes(12), b'{"a":' + b"9" * 5000 + b"}"], "body is not JSON"),
    ],
)
def test_what_is_no_message_of_ours_is_refused_and_named(frames: list[bytes], words: str) -> None:
    with pytest.raises(WireError, match=words.replace("(", r"\(")):
        message.decode(frames)


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_bytes_give_a_message_or_a_wire_error(frames: list[bytes]) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(message.decode(frames), Message)


@given(st.data())
def test_a_damaged_message_gives_a_message_or_a_wire_error(data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in message.encode(data.draw(messages()))]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = data.draw(st.sampled_from(frames))
        if frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        assert isinstance(message.decode(frames), Message)


def test_a_message_of_too_many_entries_is_not_encoded() -> None:
    with pytest.raises(WireError, match="65537 entries; the limit is 65536"):
        message.encode(Message(Kind.PULL, entries=entries_of([Entry(0, 0, 1)] * 65537)))


@pytest.mark.parametrize(("given_", "sent"), [(2**40, 2**31 - 1), (-(2**40), -(2**31))])
def test_a_priority_beyond_the_field_is_sent_as_the_nearest(given_: int, sent: int) -> None:
    assert message.decode(message.encode(Message(Kind.PUSH, priority=given_))).priority == sent


def test_a_shared_body_has_the_bytes_of_an_ordinary_one() -> None:
    common = {"nodes": [{"host": "d1", "rank": 0}, {"host": "d\u00fc2", "rank": 1}], "host_sums": True}
    shared = Common(common)
    for rank in (0, 7):
        body = {**common, "rank": rank}
        made = SharedBody(shared, {"rank": rank})
        assert made == body
        assert message.encode(Message(Kind.ROSTER, body=made)) == message.encode(Message(Kind.ROSTER, body=body))
