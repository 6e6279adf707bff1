"""Answers to pulls: what is lent of a shelf for each entry, and the reply that carries all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from distrun_runtime.arrays.dtypes import Array, widen
from distrun_runtime.errors import KVError
from distrun_runtime.ops import compression as codecs
from distrun_runtime.ops import rows as rowcodec
from distrun_runtime.protocol.message import Buffer, Entry, Flag, Message, Payload
from distrun_runtime.ps import work
from distrun_runtime.ps.replies import refusal
from distrun_runtime.ps.shelf import Shelf, raw
from distrun_runtime.ps.work import SlotId


class Lent(NamedTuple):
    """What a pull holds for one of its entries."""

    slot: SlotId
    payload: Buffer = b""
    codec: int = codecs.NONE
    weight: Array | None = None
    """The shelf's own array, if that is what goes out."""
    error: str = ""
    """Why there is nothing."""


def lend(shelf: Shelf, what: work.Lend) -> Lent:
    """Take from a shelf what an entry of a pull gets: the weight itself, or what is made of it."""
    try:
        if what.rows is not None:
            wanted = rowcodec.decode_rows(what.rows, shelf.rows)
            values = shelf.weight.reshape(-1, shelf.row_size)[wanted]
            return Lent(what.slot, raw(values.reshape(-1)), codecs.ROWS)
        if what.how.codec != codecs.NONE:
            return Lent(what.slot, _encoded(shelf, what.how), what.how.codec)
    except KVError as err:
        return Lent(what.slot, error="key %r of shape %s: %s" % (shelf.key, shelf.shape, err))
    shelf.tickets += 1
    return Lent(what.slot, raw(shelf.weight), weight=shelf.weight)


def give_back(shelf: Shelf, lent: Lent) -> None:
    """The pull is delivered, or is not to be."""
    if shelf.weight is lent.weight:
        shelf.tickets -= 1


def reply(message: Message, lent: Mapping[int, Lent], skipped: Mapping[int, work.Notes] | None = None) -> Message:
    """Return the answer to a pull, or why there is none.

    Arguments:
        skipped: key number to the notes of its round, for the keys whose round was skipped.
    """
    entries = []
    payloads: list[Buffer] = []
    for number, entry in enumerate(message.entries):
        each = lent.get(number)
        if each is None or each.error:
            return refusal(message, each.error if each is not None else "key number %d was not lent" % entry.key)
        about = (entry.key, entry.offset, entry.length, entry.round, entry.dtype)
        entries.append(Entry(*about, codec=each.codec, payload=Payload.FRAME))
        payloads.append(each.payload)
    body: dict[str, Any] = {"codec": dict(message.body["codec"])} if "codec" in message.body else {}
    if skipped:
        body["skipped"] = {
            str(key): {str(rank): note for rank, note in notes.items()} for key, notes in skipped.items()
        }
    return Message(
        message.kind,
        Flag.REPLY,
        store=message.store,
        request=message.request,
        entries=tuple(entries),
        body=body,
        payloads=payloads,
    )


def _encoded(shelf: Shelf, how: work.How) -> Buffer:
    """Return the weight by a codec; the first who asks in a round makes it, and the residual takes the rest."""
    name = (how.codec, *sorted(how.params.items()))
    if name not in shelf.encoded:
        codec = codecs.numbered(how.codec)
        if codec.has_residual and shelf.residual is None:
            shelf.residual = np.zeros(len(shelf.weight), np.float32)
        with np.errstate(over="ignore"):
            values = widen(shelf.weight).astype(np.float32, copy=False)
        residual = shelf.residual if codec.has_residual else None
        shelf.encoded[name] = codec.encode(values, residual, dict(how.params))
    return shelf.encoded[name]
