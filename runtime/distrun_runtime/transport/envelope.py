"""Envelope: the frame before a message that has a number, and what acknowledges one; see `docs/protocol.md`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from distrun_runtime.protocol.message import Buffer, Kind

MAGIC = b"DRRS"
DATA, ACK = 1, 2
_ENVELOPE = struct.Struct("<4sB3xIQ")

HANDSHAKE = frozenset((Kind.HELLO, Kind.CHALLENGE, Kind.PROOF, Kind.WELCOME, Kind.REFUSED))
"""What travels without an envelope: it makes the connection."""


@dataclass(frozen=True)
class Envelope:
    """What is before a message, or an acknowledgement."""

    what: int
    """DATA or ACK."""
    incarnation: int
    """How often the sender was started before."""
    number: int
    """DATA: the message's, from 1. ACK: all numbers up to it have arrived."""
    others: tuple[int, ...] = ()
    """ACK: numbers beyond that have arrived as well."""

    def encode(self) -> bytes:
        """Return the frame."""
        head = _ENVELOPE.pack(MAGIC, self.what, self.incarnation, self.number)
        return head + struct.pack("<%dQ" % len(self.others), *self.others)


def read(frames: Sequence[Buffer]) -> Envelope | None:
    """Return the envelope that some frames begin with; None if it is none, or not a right one."""
    head = memoryview(frames[0])
    if head.nbytes < _ENVELOPE.size or bytes(head[:4]) != MAGIC:
        return None
    _, what, incarnation, number = _ENVELOPE.unpack_from(head)
    count, rest = divmod(head.nbytes - _ENVELOPE.size, 8)
    if what == DATA and head.nbytes == _ENVELOPE.size and len(frames) > 1:
        return Envelope(what, incarnation, number)
    if what == ACK and not rest and len(frames) == 1:
        return Envelope(what, incarnation, number, struct.unpack_from("<%dQ" % count, head, _ENVELOPE.size))
    return None


def kind_of(frames: Sequence[Buffer]) -> Kind | None:
    """Return the kind of a message, in an envelope or not; None for an acknowledgement and for what is no message."""
    for frame in frames[:2]:
        head = bytes(memoryview(frame).cast("B")[:7]) if memoryview(frame).nbytes else b""
        if head[:4] == MAGIC and len(frames) > 1:
            continue
        try:
            return Kind(head[6]) if len(head) == 7 and head[:4] != MAGIC else None
        except ValueError:
            return None
    return None
