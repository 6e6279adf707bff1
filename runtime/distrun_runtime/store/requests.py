"""Requests of a dist store: which pieces share a message, and what comes back of them. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.device import Buffer
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.ops import compression as codecs
from distrun_runtime.ops.compression import ROWS
from distrun_runtime.protocol.message import DTYPES, Entry, Kind, Message, entries_of
from distrun_runtime.ps.routing import MESSAGE_BYTES, MESSAGE_ENTRIES
from distrun_runtime.store.pieces import Part


@dataclass(frozen=True)
class Packed:
    """One message, where it goes, and what it holds."""

    link: str
    message: Message
    parts: list[Part]


def groups(parts: Sequence[Part]) -> list[list[Part]]:
    """Return the parts that share a message: one server, one codec with one set of parameters, not too many bytes."""
    found: list[list[Part]] = []
    filling: dict[tuple[int, int, str], tuple[list[Part], int]] = {}
    for part in parts:
        label = (part.piece.server, part.codec, json.dumps(part.params, sort_keys=True) if part.params else "")
        group, used = filling.get(label, ([], 0))
        if not group or used + part.size_bytes > MESSAGE_BYTES or len(group) >= MESSAGE_ENTRIES:
            group, used = [], 0
            found.append(group)
        group.append(part)
        filling[label] = (group, used + part.size_bytes)
    return found


def pack(
    kind: Kind,
    store: int,
    parts: Sequence[Part],
    rounds: Sequence[int] | Array,
    *,
    priority: int = 0,
    body: Mapping[str, Any] | None = None,
    body_of: Callable[[list[Part]], dict[str, Any]] = lambda parts: {},
) -> list[Packed]:
    """Return the messages that carry `parts`.

    Arguments:
        rounds: the round that entries name, by number of their key.
        body: what the body of all messages has.
        body_of: what the body of a message with these parts has besides, but for the parameters of their codec.
    """
    packed = []
    for group in groups(parts):
        own = {**(body or {}), **body_of(group)}
        if 0 < group[0].codec < ROWS:
            own["codec"] = dict(group[0].params)
        message = Message(
            kind,
            store=store,
            priority=priority,
            entries=entries_of(part.entry(int(rounds[part.number])) for part in group),
            body=own,
            payloads=[part.buffer for part in group if part.buffer is not None],
        )
        packed.append(Packed("server-%d" % group[0].piece.server, message, group))
    return packed


def values_of(part: Part, entry: Entry, payload: Buffer, params: Mapping[str, Any]) -> Array:
    """Return what a server answered for a part, in the key's dtype.

    Arguments:
        entry, payload: of the reply.
        params: the codec's parameters, from the reply's body or the request's.

    Raises:
        KVError: it is not what was asked for.
    """
    if DTYPES[entry.dtype] != part.record.dtype:
        raise KVError("key %r: a server answered with %s" % (part.record.key, dtypes.name_of(DTYPES[entry.dtype])))
    if 0 < entry.codec < ROWS:
        codec = codecs.numbered(entry.codec)
        wide = codec.decode(payload, part.piece.length, codec.check(params))
        return dtypes.narrow(wide.astype(dtypes.work_dtype(part.record.dtype), copy=False), part.record.dtype)
    if not memoryview(payload).nbytes:
        return np.empty(0, part.record.dtype)
    return np.frombuffer(payload, part.record.dtype)
