from __future__ import annotations

import pytest

from distrun_runtime.protocol import message
from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.transport.envelope import ACK, DATA, Envelope, kind_of, read

PUSH = message.encode(Message(Kind.PUSH))


def test_an_envelope_comes_back_as_it_was() -> None:
    data = Envelope(DATA, 2, 2**63)
    assert read([data.encode(), *PUSH]) == data
    ack = Envelope(ACK, 0, 7, (9, 11))
    assert read([ack.encode()]) == ack


def test_the_bytes_are_fixed() -> None:
    assert Envelope(DATA, 1, 7).encode() == bytes.fromhex("44525253 01 000000 01000000 0700000000000000")
    assert Envelope(ACK, 0, 7, (9,)).encode() == bytes.fromhex(
        "44525253 02 000000 00000000 0700000000000000 0900000000000000"
    )


@pytest.mark.parametrize(
    "frames",
    [
        PUSH,
        [b"", b""],
        [Envelope(DATA, 0, 1).encode()],
        [Envelope(DATA, 0, 1).encode() + b"x", *PUSH],
        [Envelope(DATA, 0, 1).encode()[:-1], *PUSH],
        [Envelope(ACK, 0, 1).encode(), *PUSH],
        [Envelope(ACK, 0, 1).encode() + b"1234"],
        [Envelope(3, 0, 1).encode()],
    ],
)
def test_what_is_no_right_envelope_is_none(frames: list[bytes]) -> None:
    assert read(frames) is None


def test_the_kind_of_a_message_is_known_in_and_out_of_its_envelope() -> None:
    assert kind_of(PUSH) is Kind.PUSH
    assert kind_of([Envelope(DATA, 0, 1).encode(), *PUSH]) is Kind.PUSH
    assert kind_of([Envelope(ACK, 0, 1).encode()]) is None
    assert kind_of([b"", b""]) is None
    assert kind_of([b"short"]) is None
    assert kind_of([b"DRKV\x01\x00\xff" + bytes(41), b""]) is None
