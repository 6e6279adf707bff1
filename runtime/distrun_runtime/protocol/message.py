"""Message <-> frames: what the nodes of a job say to each other.

A message is a list of frames: the head (fixed fields, then `n` entries of 32 bytes), a body (JSON, empty for
data) and one raw frame for each entry that carries a payload. `docs/protocol.md` fixes the layout and its
golden bytes are tests; a later change comes with another version.

Pure: nothing here touches a socket or the contents of an array.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Any, Union

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.errors import WireError

Buffer = Union[bytes, bytearray, memoryview]
"""What a frame is made of."""

MAGIC = b"DRKV"
VERSION = 1
FRAME_LIMIT = 64 * 1024 * 1024
"""No frame is larger: values are cut into pieces far below it, so a stranger cannot make us allocate more."""
ENTRY_LIMIT = 65536

_HEAD = struct.Struct("<4sHBBHBxIiIiQI8x")
_ENTRY = struct.Struct("<IBBBxQQQ")


class Kind(IntEnum):
    """What a message is about. A reply has the kind of its request and the flag REPLY."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5
    ROSTER = 6
    LOST = 7
    BYE = 8
    ABORT = 9
    STOP = 10
    OPEN = 16
    BARRIER = 17
    KEYS = 18
    RULE = 19
    JOIN = 20
    LEFT = 21
    WAITING = 22
    SAVE = 23
    LOAD = 24
    INIT = 32
    PUSH = 33
    PULL = 34
    ROUNDS = 35
    STATS = 36
    PROFILE = 37
    NORMS = 38


class Flag(IntFlag):
    """Bits of the head's flags."""

    NONE = 0
    REPLY = 1
    ERROR = 2


_FLAGS = int(Flag.REPLY | Flag.ERROR)


class Payload(IntEnum):
    """Where an entry's values are."""

    NONE = 0
    FRAME = 1
    SEGMENT = 2
    """In shared memory (reserved)."""


_PLACES = {int(place): place for place in (Payload.NONE, Payload.FRAME)}

DTYPES: tuple[np.dtype[Any], ...] = tuple(
    dtypes.parse(name)
    for name in (
        *("float32", "float64", "float16", "uint8", "int32", "int8", "int64"),
        *("int16", "uint16", "uint32", "uint64", "bfloat16"),
    )
)
"""Element types by their code on the wire; the first seven are MXNet's codes (mshadow base.h), 7 and up are ours."""

DTYPE_CODES: Mapping[np.dtype[Any], int] = {dtype: code for code, dtype in enumerate(DTYPES)}


@dataclass(frozen=True)
class Entry:
    """One piece of one value: `length` elements from element `offset` on, of key number `key`."""

    key: int
    offset: int
    length: int
    round: int = 0
    dtype: int = 0
    codec: int = 0
    """0: the payload is the elements themselves; else the number of a codec (`ops.compression`)."""
    payload: Payload = Payload.NONE

    @property
    def size_bytes(self) -> int:
        """Bytes of its payload, uncompressed."""
        return self.length * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Message:
    """One message. `payloads` holds one buffer for each entry whose payload kind is FRAME, in order."""

    kind: Kind
    flags: Flag = Flag.NONE
    store: int = 0
    role: int = 0
    rank: int = -1
    epoch: int = 0
    incarnation: int = 0
    priority: int = 0
    request: int = 0
    entries: tuple[Entry, ...] = ()
    body: Mapping[str, Any] = field(default_factory=dict)
    payloads: Sequence[Buffer] = ()

    @property
    def is_reply(self) -> bool:
        """Whether it answers a request."""
        return bool(self.flags & Flag.REPLY)

    @property
    def is_error(self) -> bool:
        """Whether it says that a request failed; the body says why."""
        return bool(self.flags & Flag.ERROR)


def encode(message: Message) -> list[Buffer]:
    """Return the frames of `message`; payload buffers are passed through, not copied.

    A priority beyond 32 bits is sent as the nearest: it orders what is queued here, and informs there.

    Raises:
        WireError: more than ENTRY_LIMIT entries.
    """
    if len(message.entries) > ENTRY_LIMIT:
        raise WireError("a message of %d entries; the limit is %d" % (len(message.entries), ENTRY_LIMIT))
    head = _HEAD.pack(
        *(MAGIC, VERSION, message.kind, message.flags, message.store, message.role),
        *(message.epoch, message.rank, message.incarnation, max(-(2**31), min(message.priority, 2**31 - 1))),
        *(message.request & 0xFFFFFFFFFFFFFFFF, len(message.entries)),
    )
    entries = b"".join(
        _ENTRY.pack(entry.key, entry.dtype, entry.codec, entry.payload, entry.offset, entry.length, entry.round)
        for entry in message.entries
    )
    body = json.dumps(message.body, separators=(",", ":"), sort_keys=True).encode() if message.body else b""
    return [head + entries, body, *message.payloads]


def decode(frames: Sequence[Buffer]) -> Message:
    """Return the message that `frames` make; payloads are views of the frames.

    Raises:
        WireError: magic, version, counts, lengths or types are not ours; says which.
    """
    if len(frames) < 2:
        raise WireError("a message has a head and a body; %d frames came" % len(frames))
    head = memoryview(frames[0]).cast("B")
    if len(head) < _HEAD.size or bytes(head[:4]) != MAGIC:
        raise WireError("not a distrun message: it begins with %r" % bytes(head[:8]))
    _, version, kind, flags, store, role, epoch, rank, incarnation, priority, request, count = _HEAD.unpack_from(head)
    if version != VERSION:
        raise WireError("message version %d; this program speaks version %d" % (version, VERSION))
    if count > ENTRY_LIMIT or len(head) != _HEAD.size + count * _ENTRY.size:
        raise WireError("a head of %d bytes cannot hold %d entries" % (len(head), count))
    if flags & ~_FLAGS:
        # Checked here: IntFlag takes any bits (enum's KEEP boundary).
        raise WireError("message of unknown flags: 0x%02x" % flags)
    payloads = frames[2:]
    entries = _entries(head, count, payloads)
    try:
        return Message(
            kind=Kind(kind),
            flags=Flag(flags),
            store=store,
            role=role,
            rank=rank,
            epoch=epoch,
            incarnation=incarnation,
            priority=priority,
            request=request,
            entries=entries,
            body=_body(frames[1]),
            payloads=payloads,
        )
    except ValueError as err:
        raise WireError("message of unknown kind: %s" % err) from err


def _entries(head: memoryview, count: int, payloads: Sequence[Buffer]) -> tuple[Entry, ...]:
    entries = []
    at = 0
    for number in range(count):
        key, dtype, codec, payload, offset, length, turn = _ENTRY.unpack_from(head, _HEAD.size + number * _ENTRY.size)
        where = _PLACES.get(payload)
        if dtype >= len(DTYPES) or where is None:
            raise WireError("entry %d has dtype %d, codec %d, payload kind %d" % (number, dtype, codec, payload))
        entry = Entry(key, offset, length, turn, dtype, codec, where)
        if where is Payload.FRAME:
            if at >= len(payloads):
                raise WireError("entry %d announces a payload; only %d frames came" % (number, len(payloads)))
            found = memoryview(payloads[at]).nbytes
            # What a codec makes of the elements, whoever decodes it checks.
            if codec == 0 and found != entry.size_bytes:
                raise WireError("entry %d announces %d bytes, its frame has %d" % (number, entry.size_bytes, found))
            at += 1
        entries.append(entry)
    if at != len(payloads):
        raise WireError("%d payload frames for %d entries that announce one" % (len(payloads), at))
    return tuple(entries)


def _body(frame: Buffer) -> Mapping[str, Any]:
    text = bytes(memoryview(frame))
    if not text:
        return {}
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise WireError("message body is not JSON: %s" % err) from err
    if not isinstance(body, dict):
        raise WireError("message body is not an object: %.80r" % text)
    return body
