"""Transfers: the messages of a distributed store's data calls, and what becomes of their answers.

Plain values of many keys share messages: `ps.routing` says which, once for each list of keys. Rows and encoded values
go shard by shard (`pieces`, `requests`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError, RuntimeFault
from distrun_runtime.protocol.message import NO_ENTRIES, Kind, Message, Payload, payloads_of, rows_of
from distrun_runtime.ps.pending import Pending as Request
from distrun_runtime.ps.routing import BUCKET_ENTRIES, Buckets, Layout, Portion, Route, step_of
from distrun_runtime.ps.shards import Notes
from distrun_runtime.store.base import Record, Selection
from distrun_runtime.store.compress import Compressor
from distrun_runtime.store.link import Link
from distrun_runtime.store.pieces import Part, wanted
from distrun_runtime.store.requests import Packed, pack, values_of
from distrun_runtime.store.values import Key

__all__ = ["Take", "Transfers", "answers"]

Take = Callable[["tuple[Message, ...]"], Notes]
"""Takes the replies in: fills the outputs, and returns what is to be known of a skipped round."""


class Transfers:
    """What one store sends to the servers. Threads: one at a time, but for what a `Take` does."""

    def __init__(self, link: Link, compressor: Compressor) -> None:
        self._link = link
        self._compressor = compressor
        self.layouts: dict[Key, Layout] = {}
        self._rounds = np.zeros(0, np.int64)
        """By key number: the number of this worker's pushes, which is the round of the last one."""
        self._buckets = Buckets()

    def add(self, record: Record, layout: Layout) -> None:
        """Take in a key."""
        self.layouts[record.key] = layout
        if layout.number >= len(self._rounds):
            grown = np.zeros(max(2 * len(self._rounds), layout.number + 1), np.int64)
            grown[: len(self._rounds)] = self._rounds
            self._rounds = grown

    def round_of(self, key: Key) -> int:
        """Return the round of this worker's last push of a key."""
        return int(self._rounds[self.layouts[key].number])

    def set_round(self, key: Key, number: int) -> None:
        """Go on with another round."""
        self._rounds[self.layouts[key].number] = number

    # Whole values

    def push(
        self, what: str, keys: Selection, values: Sequence[Array], *, body: Any, priority: int, lent: bool
    ) -> Request:
        """Send one value of each key as this worker's contribution to its next round."""
        route = self._route(keys)
        rounds = self._rounds[route.numbers] + 1
        self._rounds[route.numbers] = rounds
        messages = [
            self._message(Kind.PUSH, portion, rounds, portion.gather(values, lent), body=body, priority=priority)
            for portion in route.portions
        ]
        request = self._link.node.ask(what, messages)
        for portion in route.portions:
            portion.carried_by = request
        request.then(lambda error: self._failed(route, error))
        return request

    def pull(
        self, what: str, keys: Selection, outs: Sequence[Sequence[Array]], *, priority: int, own: bool
    ) -> tuple[Request, Take]:
        """Ask for the present values of keys; return the request, and what takes its replies.

        Arguments:
            own: it belongs to the push before it: outputs of keys whose round was skipped stay as they are.
        """
        if self._compressor.is_on and any(self._is_encoded(record) for record in keys.records):
            return self._pull_encoded(what, keys, outs, priority, own)
        route = self._route(keys)
        rounds = self._rounds[route.numbers]
        messages = [
            self._message(Kind.PULL, portion, rounds, (), body={}, priority=priority) for portion in route.portions
        ]
        request = self._link.node.ask(what, messages)
        return request, lambda replies: _fill(route, keys.records, outs, replies, own)

    def _message(
        self, kind: Kind, portion: Portion, rounds: Array, payloads: Any, *, body: Any, priority: int
    ) -> tuple[str, Message]:
        """Return one message of a call, and its link; with a bucket in place of its entries if the server knows one."""
        step = step_of(portion, rounds)
        is_new = step < 0 and kind is Kind.PUSH and len(portion.entries) >= BUCKET_ENTRIES
        if is_new:
            self._buckets.register(portion, rounds)
        place = Payload.PACKED if kind is Kind.PUSH else Payload.NONE
        return portion.link, Message(
            kind,
            store=self._link.store,
            priority=priority,
            bucket=portion.bucket if step >= 0 or is_new else 0,
            step=max(step, 0),
            entries=NO_ENTRIES if step >= 0 else portion.named(rounds, place),
            body=body,
            payloads=payloads,
        )

    def _failed(self, route: Route, error: RuntimeFault | None) -> None:
        if error is not None:
            self._buckets.forget(route.portions)

    def _route(self, keys: Selection) -> Route:
        if keys.kept is None:
            layouts = [self.layouts[record.key] for record in keys.records]
            shapes, dtypes = [record.shape for record in keys.records], [record.dtype for record in keys.records]
            keys.kept = Route.of(layouts, shapes, dtypes)
        route: Route = keys.kept
        return route

    # Shard by shard

    def _is_encoded(self, record: Record) -> bool:
        setting = self._compressor.of(record)
        return setting is not None and setting.two_way

    def contribute(
        self, what: str, records: Sequence[Record], parts: Sequence[Part], body: Mapping[str, Any], priority: int
    ) -> Request:
        """Send parts of values, encoded or without elements, as this worker's contribution to the keys' next round."""
        for record in records:
            self._rounds[self.layouts[record.key].number] += 1
        return self._link.send(
            what, pack(Kind.PUSH, self._link.store, parts, self._rounds, priority=priority, body=body)
        )

    def ask(self, parts: Sequence[Part], priority: int) -> list[Packed]:
        """Return the messages that ask for parts of values."""
        return pack(Kind.PULL, self._link.store, parts, self._rounds, priority=priority)

    def _pull_encoded(
        self, what: str, keys: Selection, outs: Sequence[Sequence[Array]], priority: int, own: bool
    ) -> tuple[Request, Take]:
        parts = [part for record in keys.records for part in wanted(record, self.layouts[record.key], self._compressor)]
        packed = self.ask(parts, priority)

        def take(replies: tuple[Message, ...]) -> Notes:
            skipped = skipped_in(replies)
            found: dict[Key, Array] = {}
            arrays_of = {record.key: arrays for record, arrays in zip(keys.records, outs, strict=True)}
            for part, values in answers(packed, replies):
                if own and part.number in skipped:
                    continue
                key = part.record.key
                if key not in found:
                    found[key] = _contiguous(arrays_of[key][0])
                found[key].reshape(-1)[part.piece.offset : part.piece.end] = values
            for key, value in found.items():
                _copy_out(value, arrays_of[key])
            return said(skipped)

        return self._link.send(what, packed), take


def _fill(
    route: Route, records: Sequence[Record], outs: Sequence[Sequence[Array]], replies: Sequence[Message], own: bool
) -> Notes:
    """Write the answers of a pull into its outputs."""
    skipped = skipped_in(replies)
    kept = {item for item, number in enumerate(route.numbers.tolist()) if number in skipped} if skipped and own else ()
    flat = [
        # An array of its own where the values are not wanted, or the output takes no run of elements.
        np.empty(record.shape, record.dtype) if not arrays or item in kept else _contiguous(arrays[0])
        for item, (record, arrays) in enumerate(zip(records, outs, strict=True))
    ]
    for portion, reply in zip(route.portions, replies, strict=True):
        expected = portion.size * portion.dtype.itemsize
        found = sum(memoryview(each).nbytes for each in reply.payloads)
        if found != expected or (len(reply.entries) and (reply.entries["payload"] != Payload.PACKED).any()):
            raise KVError("%s answered with %d bytes of values, expected %d" % (portion.link, found, expected))
        portion.scatter(reply.payloads, flat)
    for item, (value, arrays) in enumerate(zip(flat, outs, strict=True)):
        if item not in kept and (len(arrays) > 1 or (arrays and value is not arrays[0])):
            _copy_out(value, arrays)
    return said(skipped)


def _contiguous(out: Array) -> Array:
    """Return an output if runs of elements can be written to it, else an array of its shape that takes them."""
    return out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)


def _copy_out(value: Array, arrays: Sequence[Array]) -> None:
    for array in arrays:
        if array is not value:
            array[...] = value


def skipped_in(replies: Sequence[Message]) -> dict[int, Notes]:
    """Return the notes of the rounds that were skipped, by number of the key."""
    return {
        int(number): {int(rank): note for rank, note in notes.items()}
        for reply in replies
        for number, notes in reply.body.get("skipped", {}).items()
    }


def said(skipped: Mapping[int, Notes]) -> Notes:
    """Return what the workers said of a skipped call: of any of its keys."""
    return next(iter(skipped.values()), {})


def answers(packed: Sequence[Packed], replies: Sequence[Message]) -> Iterator[tuple[Part, Array]]:
    """Yield each part with what came for it."""
    for one, reply in zip(packed, replies, strict=True):
        params = reply.body.get("codec") or one.message.body.get("codec") or {}
        payloads = payloads_of(reply.entries, reply.payloads)
        for part, entry, payload in zip(one.parts, rows_of(reply.entries), payloads, strict=True):
            yield part, values_of(part, entry, payload or b"", params)
