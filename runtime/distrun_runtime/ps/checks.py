"""What can be wrong with a worker's message, as far as its descriptors show. Pure.

Everything here is looked at before a server changes anything. What only the bytes of a payload show (row numbers,
places of a sparse codec) the executor looks at, for the codecs of `READ_FIRST`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from distrun_runtime.arrays.dtypes import is_float, name_of
from distrun_runtime.errors import KVError
from distrun_runtime.ops import compression as codecs
from distrun_runtime.protocol.message import DTYPES, Buffer, Entry, Kind, Message, Payload
from distrun_runtime.ps.slots import Slot, Store
from distrun_runtime.ps.work import PLAIN, How

READ_FIRST = frozenset((codecs.CODECS["topk"].number, codecs.ROWS))
"""Codecs whose payload may be wrong though its size is right."""

HALF = codecs.CODECS["fp16"].number


def payloads_of(message: Message) -> list[Buffer | None]:
    """Return for each entry its payload; None where it has none."""
    frames = iter(message.payloads)
    return [next(frames) if entry.payload is Payload.FRAME else None for entry in message.entries]


def params_of(message: Message, number: int) -> Mapping[str, float]:
    """Return the complete parameters of the codec that a message's entries use; {} for those that have none.

    Raises:
        KVError: no such codec, or parameters that are not right.
    """
    if number in (codecs.NONE, codecs.ROWS):
        return {}
    given = message.body.get("codec", {})
    if not isinstance(given, Mapping):
        raise KVError("the parameters of a codec are an object, not %.80r" % (given,))
    return codecs.numbered(number).check(given)


def how(message: Message, number: int) -> How:
    """Return how payloads of codec `number` of a message become elements; errors as `params_of`."""
    if not message.body and number == codecs.NONE:
        return PLAIN
    return How(number, params_of(message, number), float(message.body.get("scale", 1.0)))


def against_init(store: Store, message: Message) -> str:
    """Return why an INIT cannot be taken in; empty: it can."""
    staleness = message.body.get("staleness")
    if staleness is not None and (isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0):
        return "staleness is a number of pushes, not %.80r" % (staleness,)
    is_new = not message.body.get("assign")
    seen = set(store.slots) if is_new else set()
    for entry, payload in zip(message.entries, payloads_of(message), strict=True):
        name, slot = store.name(entry), store.id_of(entry)
        if payload is None or entry.codec:
            return "key %r: INIT without a value" % (name,)
        if slot in seen:
            return "key %r was initialised before" % (name,)
        if not is_new and slot not in store.slots:
            return "key %r, offset %d: assigned before it was initialised" % (name, entry.offset)
        if not is_new and (wrong := _size(store, store.slots[slot], entry, "the server")):
            return wrong
        shape_of(message, entry)  # raises here, where nothing has changed yet
        width = row_size_of(message, entry)
        if width < 0 or (width and (entry.offset % width or entry.length % width)):
            return "key %r: %d elements from %d on are not whole rows of %d" % (name, entry.length, entry.offset, width)
        seen.add(slot)
    return ""


def row_size_of(message: Message, entry: Entry) -> int:
    """Return the elements of a row of a key that an INIT declares; 0: it is not row-sparse."""
    return int(message.body.get("rows", {}).get(str(entry.key), 0))


def shape_of(message: Message, entry: Entry) -> tuple[int, ...] | None:
    """Return the shape of a key's whole value that an INIT declares; None: it does not say."""
    shape = message.body.get("shapes", {}).get(str(entry.key))
    return None if shape is None else tuple(int(side) for side in shape)


def against(store: Store, message: Message, server: str) -> str:
    """Return what is wrong with a push or pull; empty: nothing, as far as can be seen here."""
    scale = message.body.get("scale", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        return "a contribution is scaled by a finite number, not by %.80r" % (scale,)
    seen = set()
    is_push = message.kind is Kind.PUSH
    skips = is_push and "skip" in message.body
    if skips and not isinstance(message.body["skip"], Mapping):
        return "a skipped round has a note that is an object, not %.80r" % (message.body["skip"],)
    if skips and not store.is_sync:
        return "a round cannot be skipped in a dist_async store: it has no rounds"
    usual = Payload.FRAME if is_push and not skips else Payload.NONE
    is_plain = scale == 1
    for entry, payload in zip(message.entries, payloads_of(message), strict=True):
        slot = store.slots.get(store.id_of(entry))
        if slot is None:
            return "key %r, offset %d: no such piece on %s" % (store.name(entry), entry.offset, server)
        if is_push and slot.id in seen:
            return "key %r, offset %d: twice in one push" % (store.name(entry), entry.offset)
        seen.add(slot.id)
        if is_plain and not entry.codec and entry.payload is usual and _fits(slot, entry):
            continue  # what follows finds nothing wrong with it, for the most frequent case
        if skips and (entry.codec or entry.payload is not usual):
            return "key %r: a skipped round brings no value" % (store.name(entry),)
        wrong = _size(store, slot, entry, server) or ("" if skips else _codec(store, slot, message, entry, payload))
        if not wrong and scale != 1 and not is_float(DTYPES[slot.dtype]):
            wrong = "key %r: only float values are scaled, not %s" % (store.name(entry), name_of(DTYPES[slot.dtype]))
        if wrong:
            return wrong
    # No entry may use it, and yet the answer repeats it.
    if not isinstance(message.body.get("codec", {}), Mapping):
        return "the parameters of a codec are an object, not %.80r" % (message.body["codec"],)
    return ""


def _fits(slot: Slot, entry: Entry) -> bool:
    return entry.length == slot.length and entry.dtype == slot.dtype


def _size(store: Store, slot: Slot, entry: Entry, server: str) -> str:
    if _fits(slot, entry):
        return ""
    return "key %r: %s has %d elements of %s, the message %d of %s" % (
        *(store.name(entry), server, slot.length, name_of(DTYPES[slot.dtype])),
        *(entry.length, name_of(DTYPES[entry.dtype])),
    )


def _codec(store: Store, slot: Slot, message: Message, entry: Entry, payload: Buffer | None) -> str:
    # A pull of rows says which; every other pull brings nothing.
    if (payload is not None) != (message.kind is Kind.PUSH or entry.codec == codecs.ROWS):
        return "key %r: %s with payload kind %s" % (store.name(entry), message.kind.name, entry.payload.name)
    if entry.codec == codecs.NONE:
        return ""
    name = store.name(entry)
    if entry.codec == codecs.ROWS:
        return "" if slot.row_size else "key %r is not row-sparse" % (name,)
    dtype = DTYPES[slot.dtype]
    try:
        codec = codecs.numbered(entry.codec)
        params = params_of(message, entry.codec)
    except KVError as err:
        return "key %r: %s" % (name, err)
    if not is_float(dtype):
        return "key %r: compression %r is for float values, not %s" % (name, codec.name, name_of(dtype))
    if payload is not None:
        expected, found = codec.size(slot.length, dict(params)), memoryview(payload).nbytes
        if expected != found:
            return "key %r: compression %r makes %d bytes of %d elements, the payload has %d" % (
                *(name, codec.name, expected, slot.length, found),
            )
    elif entry.codec != HALF and not (store.is_sync and not store.has_rule):
        what = "weights of a rule" if store.has_rule else "values of an asynchronous store"
        return "key %r: %s travel back in full or as fp16, not as %s" % (name, what, codec.name)
    return ""


def server_error(err: Any) -> str:
    """Return the words of an error; its type if it has none."""
    return str(err) or type(err).__name__
