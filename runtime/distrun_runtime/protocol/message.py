"""Message <-> frames: what the nodes of a job say to each other.

A message is a list of frames: the head (fixed fields, then `n` entries of 32 bytes), a body (JSON, empty for
data) and raw frames with the payloads of the entries. The entries are one structured array (`ENTRY`): what reads or
writes them does so for all entries of a message at once. `docs/protocol.md` fixes the layout and its golden bytes are
tests; a later change comes with another version.

Nothing here touches a socket or the contents of a value.
"""

from __future__ import annotations

import json
import operator
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array, Buffer
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import WireError

MAGIC = b"DRKV"
VERSION = 4
FRAME_LIMIT = 64 * 1024 * 1024
"""No frame is larger: values are cut into pieces far below it, so a stranger cannot make us allocate more."""
ENTRY_LIMIT = 65536

_HEAD = struct.Struct("<4sHBBHBxIiIiQIII")
HEAD_BYTES = _HEAD.size
"""Where the entries begin in the first frame."""
STEP_AT = HEAD_BYTES - 4
"""Where the step is in a head."""

ENTRY = np.dtype(
    [
        *(("key", "<u4"), ("dtype", "u1"), ("codec", "u1"), ("payload", "u1"), ("reserved", "u1")),
        *(("offset", "<u8"), ("length", "<u8"), ("round", "<u8")),
    ]
)
"""One entry: `length` elements from element `offset` on of key number `key`, 32 bytes without padding."""


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
    CLOSE = 25
    """A worker has closed a store; to servers: all of its workers have, so it is forgotten."""
    INIT = 32
    PUSH = 33
    PULL = 34
    ROUNDS = 35
    STATS = 36
    PROFILE = 37
    NORMS = 38
    PUSHPULL = 39
    """A push and the pull of its round: what comes of the round answers both."""
    RELEASE = 40
    """Servers copy what they still read in the sender's shared memory, and then answer."""
    SETTLE = 41
    """A relay passes on what it holds of the sender's contributions, and answers when their servers have them."""


@dataclass(frozen=True)
class Membership:
    """The workers that share a store in one epoch of it. A value, the same on all nodes."""

    ranks: Sequence[int]
    """Their ranks in the job, ascending; a range if they are all. A worker's rank in the store is its place here."""
    epoch: int = 0
    """Rises when the members change, and when the number in messages becomes that of another store."""

    @property
    def first(self) -> int:
        """The worker whose values count, with rank 0 in the store."""
        return self.ranks[0]

    @cached_property
    def places(self) -> Mapping[int, int]:
        """Each worker's rank in the store, by its rank in the job."""
        return {rank: place for place, rank in enumerate(self.ranks)}


GROUP_STORES = 1 << 15
"""Stores of groups have numbers from here on, those of all workers below."""
LAST_STORE = (1 << 16) - 1
"""Stores of groups are numbered from here downwards to GROUP_STORES, those of all workers from 1 upwards."""
GROUP_LETTERS = 100
"""Of a group's name at most."""


PUSH, PULL, PUSHPULL = Kind.PUSH, Kind.PULL, Kind.PUSHPULL
"""For what runs for every call: in Python 3.11, to look a member up in its class calls a function."""
_KINDS: Mapping[int, Kind] = {int(kind): kind for kind in Kind}
"""By their numbers. A look-up costs a fraction of what `Kind(number)` does."""
REPLY, _ERROR, _RELAYED = 1, 2, 4
"""Bits of the head's flags, for what a message is."""
KIND_AT, FLAGS_AT, STORE_AT, NUMBER_AT, NUMBER = 6, 7, 8, 28, struct.Struct("<Q")
"""Where in a head the kind is, the flags, the store and the request's number, and what that is."""


class Payload(IntEnum):
    """Where an entry's values are."""

    NONE = 0
    FRAME = 1
    SEGMENT = 2
    """Reserved. That a frame lies in shared memory is the transport's affair (`transport.host_paths`)."""
    PACKED = 3
    """In the frames of the message, end to end in the order of the entries; a frame holds whole entries."""


DTYPES: tuple[np.dtype[Any], ...] = tuple(
    dtypes.parse(name)
    for name in (
        *("float32", "float64", "float16", "uint8", "int32", "int8", "int64"),
        *("int16", "uint16", "uint32", "uint64", "bfloat16"),
    )
)
"""Element types by their code on the wire; the first seven are MXNet's codes (mshadow base.h), 7 and up are ours."""

DTYPE_CODES: Mapping[np.dtype[Any], int] = {dtype: code for code, dtype in enumerate(DTYPES)}


DTYPE_SIZES: Array = np.array([dtype.itemsize for dtype in DTYPES], np.int64)
"""Bytes of an element by the code of its dtype."""


class Entry(NamedTuple):
    """One entry by itself, for tables and tests: `entries_of` makes the array of them."""

    key: int
    offset: int
    length: int
    round: int = 0
    dtype: int = 0
    codec: int = 0
    """0: the payload is the elements themselves; else the number of a codec (`ops.compression`)."""
    payload: int = Payload.NONE


def entries_of(rows: Iterable[Entry]) -> Array:
    """Return the structured array of some entries."""
    given = list(rows)
    entries: Array = np.zeros(len(given), ENTRY)
    entries[[*Entry._fields]] = given
    return entries


def rows_of(entries: Array) -> list[Entry]:
    """Return the entries of an array one by one, as Python numbers."""
    return [Entry(*row) for row in entries[[*Entry._fields]].tolist()]


def sizes_of(entries: Array) -> Array:
    """Return the bytes of each entry's elements, uncompressed: int64 of shape (n,)."""
    sizes: Array = entries["length"].astype(np.int64) * DTYPE_SIZES[entries["dtype"]]
    return sizes


def payloads_of(entries: Array, payloads: Sequence[Buffer]) -> list[Buffer | None]:
    """Return for each entry its payload, of the frames after the body; None where it has none."""
    kinds = entries["payload"].tolist()
    if Payload.PACKED not in kinds:
        frames = iter(payloads)
        return [next(frames) if kind == Payload.FRAME else None for kind in kinds]
    result: list[Buffer | None] = []
    number, at = 0, 0
    views = [memoryview(frame).cast("B") if memoryview(frame).nbytes else memoryview(b"") for frame in payloads]
    for size in sizes_of(entries).tolist():
        while size and number < len(views) - 1 and at >= len(views[number]):
            number, at = number + 1, 0
        result.append(views[number][at : at + size] if views else b"")
        at += size
    return result


NO_ENTRIES: Array = np.empty(0, ENTRY)
NO_ENTRIES.flags.writeable = False
BYTES: Callable[[memoryview], int] = operator.attrgetter("nbytes")
VIEW: Callable[[Buffer], memoryview] = memoryview


def size_of(frames: Iterable[Buffer]) -> int:
    """Return how many bytes frames have."""
    return sum(map(BYTES, map(VIEW, frames)))


@dataclass(frozen=True, eq=False)
class Message:
    """One message; its numbers up to `step` are in the order of the head.

    `payloads` holds the frames after the body: one for each entry whose payload kind is FRAME, or the frames that the
    PACKED entries share. `bucket` names a list of entries that the receiver knows from an earlier message of this
    sender (0: none); without entries of its own the message has those, `step` rounds later. `request` numbers this
    message; a reply has the same (a worker's `role.NodeRequest` may have several messages).
    """

    kind: Kind
    store: int = 0
    role: int = 0
    epoch: int = 0
    rank: int = -1
    incarnation: int = 0
    priority: int = 0
    request: int = 0
    bucket: int = 0
    step: int = 0
    entries: Array = field(default_factory=lambda: NO_ENTRIES)
    body: Mapping[str, Any] = field(default_factory=dict)
    payloads: Sequence[Buffer] = ()
    is_reply: bool = False
    """It answers a request."""
    is_error: bool = False
    """It says that a request failed; the body says why."""
    is_relayed: bool = False
    """The shards are on another server, for which the receiver is the relay on the sender's host (`ps.relay`)."""

    @property
    def size(self) -> int:
        """Bytes of the payloads."""
        return size_of(self.payloads)


class Common:
    """Members that the bodies of many messages share; their JSON is made once."""

    def __init__(self, members: Mapping[str, Any]) -> None:
        self.members = members
        self.text = _text(members)


class SharedBody(dict[str, Any]):
    """A body of shared members and of its own, whose names sort behind those. Not to be changed."""

    def __init__(self, common: Common, own: Mapping[str, Any]) -> None:
        super().__init__({**common.members, **own})
        self._common = common
        self._own = own

    def text(self) -> str:
        """Return its JSON."""
        return f"{self._common.text[:-1]},{_text(self._own)[1:]}"


_json: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode


def _text(body: Mapping[str, Any]) -> str:
    return _json(body) if body else ""


def encode(message: Message, sender: tuple[int, int, int] | None = None) -> list[Buffer]:
    """Return the frames of `message`; payload buffers are passed through, not copied.

    A priority beyond 32 bits is sent as the nearest: it orders what is queued here, and informs there.

    Arguments:
        sender: role, rank and incarnation, in place of the message's own.

    Raises:
        WireError: more than ENTRY_LIMIT entries.
    """
    if len(message.entries) > ENTRY_LIMIT:
        raise WireError(f"a message of {len(message.entries)} entries; the limit is {ENTRY_LIMIT}")
    role, rank, incarnation = sender or (message.role, message.rank, message.incarnation)
    flags = REPLY * message.is_reply | _ERROR * message.is_error | _RELAYED * message.is_relayed
    head = _HEAD.pack(
        *(MAGIC, VERSION, message.kind, flags, message.store, role),
        *(message.epoch, rank, incarnation, max(-(2**31), min(message.priority, 2**31 - 1))),
        *(message.request & 0xFFFFFFFFFFFFFFFF, len(message.entries), message.bucket, message.step),
    )
    body = message.body.text().encode() if isinstance(message.body, SharedBody) else _text(message.body).encode()
    return [head + message.entries.tobytes() if len(message.entries) else head, body, *message.payloads]


def decode(frames: Sequence[Buffer]) -> Message:
    """Return the message that `frames` make; payloads are views of the frames.

    Raises:
        WireError: magic, version, counts, lengths or types are not ours; says which.
    """
    if len(frames) < 2:
        raise WireError(f"a message has a head and a body; {len(frames)} frames came")
    head = memoryview(frames[0]).cast("B")
    fields = _HEAD.unpack_from(head) if len(head) >= _HEAD.size else (b"",)
    if fields[0] != MAGIC:
        raise WireError(f"not a distrun message: it begins with {bytes(head[:8])!r}")
    _, version, kind, flags, *numbers, count, bucket, step = fields
    if version != VERSION:
        raise WireError(f"message version {version}; this program speaks version {VERSION}")
    if count > ENTRY_LIMIT or len(head) != _HEAD.size + count * ENTRY.itemsize:
        raise WireError(f"a head of {len(head)} bytes cannot hold {count} entries")
    if flags > (REPLY | _ERROR | _RELAYED):
        raise WireError(f"message of unknown flags: 0x{flags:02x}")
    if kind not in _KINDS:
        raise WireError(f"message of unknown kind: {kind}")
    payloads = frames[2:]
    entries = _entries(head, count, payloads, bucket) if count or not bucket else NO_ENTRIES
    body = _body(frames[1]) if len(frames[1]) else {}
    about = (flags & REPLY != 0, flags & _ERROR != 0, flags & _RELAYED != 0)
    return Message(_KINDS[kind], *(*numbers, bucket, step, entries, body, payloads, *about))


def _entries(head: memoryview, count: int, payloads: Sequence[Buffer], bucket: int) -> Array:
    """Return the entries of a head, checked against the payload frames."""
    if not count:
        if payloads and not bucket:
            raise WireError(f"{len(payloads)} payload frames for 0 entries that announce one")
        return NO_ENTRIES
    entries = np.frombuffer(head, ENTRY, count, _HEAD.size)
    if count <= _FEW and _is_usual(entries, payloads):
        return entries
    wrong = (entries["dtype"] >= len(DTYPES)) | ~_IS_KIND[entries["payload"]]
    if wrong.any():
        at = int(np.argmax(wrong))
        row = rows_of(entries[at : at + 1])[0]
        raise WireError(f"entry {at} has dtype {row.dtype}, codec {row.codec}, payload kind {row.payload}")
    if (entries["payload"] == Payload.PACKED).any():
        check_packed(entries, payloads)
    else:
        _check_frames(entries, payloads)
    return entries


_FEW = 8
"""So many entries are looked at one by one: a numpy call costs as much as several of them."""


def _is_usual(entries: Array, payloads: Sequence[Buffer]) -> bool:
    """Whether nothing is wrong with entries without payloads, or with plain ones that share one frame."""
    rows = entries.tolist()
    _, first, _, place, *_ = rows[0]
    if first >= len(DTYPES) or any((dtype, codec, each) != (first, 0, place) for _, dtype, codec, each, *_ in rows):
        return False
    if place == Payload.NONE:
        return not payloads
    if place != Payload.PACKED or len(payloads) != 1:
        return False
    size = sum(int(row[6]) for row in rows) * DTYPES[first].itemsize
    return bool(size == memoryview(payloads[0]).nbytes and size <= FRAME_LIMIT)


_IS_KIND = np.zeros(256, np.bool_)
_IS_KIND[[Payload.NONE, Payload.FRAME, Payload.PACKED]] = True


def _check_frames(entries: Array, payloads: Sequence[Buffer]) -> None:
    """Raise WireError unless each entry that announces a frame has one, of the right size if it is not encoded."""
    announced = np.flatnonzero(entries["payload"] == Payload.FRAME).tolist()
    if len(announced) > len(payloads):
        raise WireError(f"entry {announced[len(payloads)]} announces a payload; only {len(payloads)} frames came")
    sizes, codecs = sizes_of(entries), entries["codec"]
    for number, payload in zip(announced, payloads, strict=False):
        found = memoryview(payload).nbytes
        # What a codec makes of the elements is checked where it is decoded.
        if codecs[number] == 0 and found != sizes[number]:
            raise WireError(f"entry {number} announces {sizes[number]} bytes, its frame has {found}")
    if len(announced) != len(payloads):
        raise WireError(f"{len(payloads)} payload frames for {len(announced)} entries that announce one")


def check_packed(entries: Array, payloads: Sequence[Buffer]) -> None:
    """Check that frames hold the elements of all entries end to end, of one dtype, and that no frame's end cuts one.

    Raises:
        WireError: they do not; says what was expected.
    """
    if (entries["payload"] != Payload.PACKED).any() or entries["codec"].any():
        raise WireError("packed entries share their frames with entries of another kind")
    if (entries["dtype"] != entries["dtype"][0]).any():
        raise WireError("packed entries of several element types")
    if (entries["length"] > FRAME_LIMIT).any():
        raise WireError(f"an entry of {entries['length'].max()} elements; no frame can hold it")
    ends = np.cumsum(sizes_of(entries))
    found = np.cumsum([memoryview(payload).nbytes for payload in payloads]) if payloads else np.zeros(1, np.int64)
    if found[-1] != ends[-1]:
        raise WireError(f"{len(ends)} packed entries announce {ends[-1]} bytes, their frames have {found[-1]}")
    if (ends[np.searchsorted(ends, found)] != found).any():
        raise WireError("a frame ends within a packed entry")


def _body(frame: Buffer) -> Mapping[str, Any]:
    try:
        text = str(frame, "utf-8")
        body = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise WireError(f"message body is not JSON: {err}") from err
    if not isinstance(body, dict):
        raise WireError(f"message body is not an object: {text!r:.80}")
    return body
