"""What can be wrong with a worker's message, as far as its descriptors show.

A server looks at all of this before it changes anything. What only the bytes of a payload show (row numbers, places of
a sparse codec) the engine looks at, for the codecs of `READ_FIRST`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from distrun_runtime.arrays.dtypes import Array, Buffer, is_float, name_of
from distrun_runtime.arrays.gpu_frames import IN_USE, place_of
from distrun_runtime.errors import KVError
from distrun_runtime.ops import compression as codecs
from distrun_runtime.ops.reduce import OPS, PLAIN, How
from distrun_runtime.protocol.message import DTYPES, Entry, Kind, Message, Payload, payloads_of, rows_of
from distrun_runtime.ps.shards import Store

HALF = codecs.CODECS["fp16"].number
READ_FIRST = frozenset((codecs.CODECS["topk"].number, codecs.ROWS))
"""Codecs whose payload may be wrong though its size is right."""


_NO_OBJECT = "the parameters of a codec are an object, not {!r:.80}"


def against_init(store: Store, message: Message, shards: Array) -> str:
    """Return why an INIT cannot be taken in; empty: it can."""
    staleness = message.body.get("staleness")
    if staleness is not None and (isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0):
        return f"staleness is a number of pushes, not {staleness!r:.80}"
    is_new = not message.body.get("assign")
    seen: set[tuple[int, int]] = set()
    for entry, shard in zip(rows_of(message.entries), shards.tolist(), strict=True):
        name, place = store.name(entry.key), (entry.key, entry.offset)
        if (entry.payload == Payload.NONE) != bool(is_new and message.body.get("zeros")) or entry.codec:
            return f"key {name!r}: INIT without a value"
        if is_new and (shard >= 0 or place in seen):
            return f"key {name!r} was initialised before"
        if not is_new and shard < 0:
            return f"key {name!r}, offset {entry.offset}: assigned before it was initialised"
        if not is_new and (wrong := _size(store, shard, entry, "the server")):
            return wrong
        shape_of(message, entry)  # raises here, where nothing has changed yet
        op = message.body.get("ops", {}).get(str(entry.key), "sum")
        if op not in OPS:
            return f"key {name!r}: no operation {op!r:.80}; known are {', '.join(OPS)}"
        width = row_size_of(message, entry)
        if width < 0 or (width and (entry.offset % width or entry.length % width)):
            return f"key {name!r}: {entry.length} elements from {entry.offset} on are not whole rows of {width}"
        seen.add(place)
    return ""


def against_delete(store: Store, shards: Array) -> str:
    """Return why keys cannot be deleted; empty: they can. That nothing is under way is the workers' business."""
    busy = shards[store.halfway[shards] | store.owed[:, shards].any(axis=0)].tolist()
    return f"key {store.name(int(store.key[busy[0]]))!r}: a pull or an update is under way" if busy else ""


def against_ranks(message: Message, ranks: Sequence[int], members: Sequence[int]) -> str:
    """Return what is wrong with whom a relay speaks for; empty: nothing."""
    body = message.body
    said = [*ranks, *(body[name] for name in ("own", "first") if name in body)]
    if not ranks or not all(isinstance(rank, int) and rank in members for rank in said):
        known = f"from 0 to {members[-1]}" if isinstance(members, range) else f"of {list(members)!r:.80}"
        return f"a relay names the workers that it speaks for, each {known}, not {said!r:.80}"
    if message.kind is Kind.PUSH and "first" not in body:
        return "a relay's push names the first of its workers"
    return ""


def row_size_of(message: Message, entry: Entry) -> int:
    """Return the elements of a row of a key that an INIT declares; 0: it is not row-sparse."""
    return int(message.body.get("rows", {}).get(str(entry.key), 0))


def shape_of(message: Message, entry: Entry) -> tuple[int, ...] | None:
    """Return the shape of a key's whole value that an INIT declares; None: it does not say."""
    shape = message.body.get("shapes", {}).get(str(entry.key))
    return None if shape is None else tuple(int(side) for side in shape)


def against(
    store: Store, message: Message, entries: Array, shards: Array, server: str, *, is_plain: bool = False
) -> str:
    """Return what is wrong with a push or pull; empty: nothing, as far as can be seen here.

    Arguments:
        is_plain: the entries are known to `fit`, and to bring values if and only if the message is a push.
    """
    if IN_USE and entries["codec"].any() and any(map(place_of, message.payloads)):
        return "only plain values can be in memory of a GPU: what has a codec, or rows, the host reads"
    scale = message.body.get("scale", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        return f"a contribution is scaled by a finite number, not by {scale!r:.80}"
    is_push = message.kind is not Kind.PULL
    skips = is_push and "skip" in message.body
    # One that contributes nothing to a round, and wants to know what comes of it.
    brings = is_push and not skips and not (message.kind is Kind.PUSHPULL and not message.payloads)
    if skips and not isinstance(message.body["skip"], Mapping):
        return f"a skipped round has a note that is an object, not {message.body['skip']!r:.80}"
    if skips and not store.is_sync:
        return "a round cannot be skipped in a dist_async store: it has no rounds"
    # No entry may use it, and yet the answer repeats it.
    no_object = ""
    if not isinstance(message.body.get("codec", {}), Mapping):
        no_object = _NO_OBJECT.format(message.body["codec"])
    if scale == 1 and ((is_plain and not skips) or _is_usual(store, entries, shards, brings, is_push)):
        return no_object
    if (brings or not is_push) and _is_usual_encoded(store, message, entries, shards, brings):
        return no_object
    seen, is_empty = set(), is_push and not brings
    usual = (Payload.FRAME, Payload.PACKED) if brings else (Payload.NONE,)
    frames = payloads_of(entries, message.payloads)
    for entry, shard, payload in zip(rows_of(entries), shards.tolist(), frames, strict=True):
        name = store.name(entry.key)
        if shard < 0:
            return f"key {name!r}, offset {entry.offset}: no such piece on {server}"
        if is_push and shard in seen:
            return f"key {name!r}, offset {entry.offset}: twice in one push"
        seen.add(shard)
        if is_empty and (entry.codec or entry.payload not in usual):
            return f"key {name!r}: {'a skipped round' if skips else 'an empty contribution'} brings no value"
        wrong = _size(store, shard, entry, server)
        if not wrong and not is_empty:
            wrong = _codec(store, shard, message, entry, payload)
        dtype = DTYPES[int(store.dtype[shard])]
        if not wrong and scale != 1 and not is_float(dtype):
            wrong = f"key {name!r}: only float values are scaled, not {name_of(dtype)}"
        if wrong:
            return wrong
    return no_object


def _is_usual(store: Store, entries: Array, shards: Array, has_values: bool, is_push: bool) -> bool:
    """Whether nothing is wrong with plain entries: all at once, for the most frequent case."""
    kinds = entries["payload"]
    is_right = (kinds != Payload.NONE if has_values else kinds == Payload.NONE).all()
    return bool(is_right) and fit(store, entries, shards, is_push)


def fit(store: Store, entries: Array, shards: Array, once: bool = True) -> bool:
    """Whether plain entries have the size and dtype of their shards; with `once`, also whether none comes twice."""
    return not bool(entries["codec"].any()) and _fit(store, entries, shards, once)


def _is_usual_encoded(store: Store, message: Message, entries: Array, shards: Array, has_values: bool) -> bool:
    """Whether nothing is wrong with a push or pull whose values are all encoded alike: all at once."""
    number = int(entries["codec"][0]) if len(entries) else codecs.NONE
    if not codecs.NONE < number < codecs.ROWS or (entries["codec"] != number).any():
        return False
    payload = Payload.FRAME if has_values else Payload.NONE
    if (entries["payload"] != payload).any() or not _fit(store, entries, shards, has_values):
        return False
    if not has_values and number != HALF and (store.has_rule or not store.is_sync):
        return False
    if not all(is_float(DTYPES[code]) for code in np.unique(entries["dtype"]).tolist()):
        return False
    try:
        codec, params = codecs.numbered(number), dict(params_of(message, number))
    except KVError:
        return False  # what is wrong is said where entries are looked at one by one
    if not has_values:
        return True
    lengths, places = np.unique(entries["length"], return_inverse=True)
    expected = np.array([codec.size(length, params) for length in lengths.tolist()], np.int64)[places]
    return bool(expected.tolist() == [memoryview(each).nbytes for each in message.payloads])


def _fit(store: Store, entries: Array, shards: Array, once: bool) -> bool:
    if (shards < 0).any():
        return False
    fits = (entries["length"] == store.length[shards].astype(np.uint64)) & (entries["dtype"] == store.dtype[shards])
    if not fits.all():
        return False
    # Most messages name their shards in ascending order.
    return not once or bool((shards[1:] > shards[:-1]).all()) or len(np.unique(shards)) == len(shards)


def _size(store: Store, shard: int, entry: Entry, server: str) -> str:
    length, dtype = int(store.length[shard]), int(store.dtype[shard])
    if (entry.length, entry.dtype) == (length, dtype):
        return ""
    has = f"{server} has {length} elements of {name_of(DTYPES[dtype])}"
    return f"key {store.name(entry.key)!r}: {has}, the message {entry.length} of {name_of(DTYPES[entry.dtype])}"


def _codec(store: Store, shard: int, message: Message, entry: Entry, payload: Buffer | None) -> str:
    name = store.name(entry.key)
    # A pull of rows says which; every other pull brings nothing.
    if (payload is not None) != (message.kind is not Kind.PULL or entry.codec == codecs.ROWS):
        return f"key {name!r}: {message.kind.name} with payload kind {Payload(entry.payload).name}"
    if entry.codec == codecs.NONE:
        return ""
    if entry.codec == codecs.ROWS:
        return "" if store.row_size[shard] else f"key {name!r} is not row-sparse"
    dtype, length = DTYPES[int(store.dtype[shard])], int(store.length[shard])
    try:
        codec = codecs.numbered(entry.codec)
        params = params_of(message, entry.codec)
    except KVError as err:
        return f"key {name!r}: {err}"
    if not is_float(dtype):
        return f"key {name!r}: compression {codec.name!r} is for float values, not {name_of(dtype)}"
    if payload is not None:
        expected, found = codec.size(length, dict(params)), memoryview(payload).nbytes
        if expected != found:
            makes = f"compression {codec.name!r} makes {expected} bytes of {length} elements"
            return f"key {name!r}: {makes}, the payload has {found}"
    elif entry.codec != HALF and not (store.is_sync and not store.has_rule):
        what = "weights of a rule" if store.has_rule else "values of an asynchronous store"
        return f"key {name!r}: {what} travel back in full or as fp16, not as {codec.name}"
    return ""


def params_of(message: Message, number: int) -> Mapping[str, float]:
    """Return the complete parameters of the codec that a message's entries use; {} for those that have none.

    Raises:
        KVError: no such codec, or parameters that are not right.
    """
    if number in (codecs.NONE, codecs.ROWS):
        return {}
    given = message.body.get("codec", {})
    if not isinstance(given, Mapping):
        raise KVError(_NO_OBJECT.format(given))
    return codecs.numbered(number).check(given)


def how(message: Message, entries: Array) -> How:
    """Return how the payloads of a push become elements; errors as `params_of`."""
    number = int(entries["codec"][0]) if len(entries) else codecs.NONE
    if number == codecs.NONE and "scale" not in message.body:
        return PLAIN
    return How(number, params_of(message, number), float(message.body.get("scale", 1.0)))
