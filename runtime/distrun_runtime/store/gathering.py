"""Batches of small calls: calls that are made one after the other share messages.

A program that pushes and pulls key by key, without waiting, would pay for a message and an answer each time. So a small
call that follows others which are still under way is kept until one of them is answered, until there is a message
full, or until somebody waits. No clock is involved, and the calls on one key keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.ps.routing import GATHERED_BYTES, SMALL_CALL_BYTES
from distrun_runtime.store.base import CallOptions, Selection
from distrun_runtime.store.keys import Key
from distrun_runtime.store.pending import Pending

__all__ = ["CallBatch", "Gathered"]

KNOWN_KEYS = 1 << 16
"""Lists of keys that were sent together are forgotten when they have more keys than this."""


class Gathered(Pending):
    """A call that goes with others; `sent` is what became of all of them, once they have gone."""

    def __init__(self, keys: Selection, call: str, flush: Callable[[], None]) -> None:
        self._call = call
        self._keys = keys
        self._flush = flush
        self.sent: Pending | None = None

    @property
    def what(self) -> str:  # type: ignore[override]
        """The call, for people."""
        return "%s of %s" % (self._call, self._keys.named)

    @property
    def skipped(self) -> Mapping[int, Any]:  # type: ignore[override]
        """As of the calls that it went with."""
        return {} if self.sent is None else self.sent.skipped

    @property
    def is_done(self) -> bool:
        """Whether the calls that it goes with are done."""
        return self.sent is not None and self.sent.is_done

    def wait(self, timeout_s: float | None = None) -> None:
        """Have it sent now, and return when it is done."""
        if self.sent is None:
            self._flush()
        if self.sent is None:
            raise KVError("%s was not sent" % self.what)
        self.sent.wait(timeout_s)


class _Queue:
    """Calls of one kind that wait to be sent."""

    def __init__(self) -> None:
        self.keys: list[Selection] = []
        self.arrays: list[Any] = []
        self.names: set[Key] = set()
        self.waiting: list[Gathered] = []


class CallBatch:
    """The small calls of a store that wait to be sent. Threads: one at a time.

    Arguments:
        flush: sends all of them (calls `take`); any thread may call it.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._pushes, self._pulls = _Queue(), _Queue()
        self._scale = 1.0
        """Of all of them."""
        self._priority = 0
        """The highest: small calls cost too little to be sent apart by their priorities."""
        self._size = 0
        self._known: dict[tuple[Key, ...], Selection] = {}
        self._known_keys = 0

    def __bool__(self) -> bool:
        return bool(self._pushes.waiting or self._pulls.waiting)

    @property
    def is_full(self) -> bool:
        """Whether there is enough for a message."""
        return self._size >= GATHERED_BYTES

    def push(self, keys: Selection, values: Sequence[Array], call: CallOptions) -> Gathered:
        """Take in a push; the values are copied unless they are lent."""
        self._settle(keys, call, self._pushes, self._pulls)
        given = values if call.lent else [value.copy() for value in values]
        return self._put(self._pushes, keys, given, "push")

    def pull(self, keys: Selection, outs: Sequence[Sequence[Array]], call: CallOptions) -> Gathered:
        """Take in a pull."""
        self._settle(keys, call, self._pulls)
        return self._put(self._pulls, keys, outs, "pull")

    def _settle(self, keys: Selection, call: CallOptions, *before: _Queue) -> None:
        """Send what is here if the call has to come after it, or cannot share a message with it."""
        names = [record.key for record in keys.records]
        if self and (call.scale != self._scale or not all(kind.names.isdisjoint(names) for kind in before)):
            self._flush()
        self._priority = max(self._priority, call.priority) if self else call.priority
        self._scale = call.scale

    def _put(self, kind: _Queue, keys: Selection, arrays: Sequence[Any], call: str) -> Gathered:
        gathered = Gathered(keys, call, self._flush)
        kind.keys.append(keys)
        kind.arrays += arrays
        kind.names.update([record.key for record in keys.records])
        kind.waiting.append(gathered)
        self._size += keys.size_bytes
        return gathered

    def take(self) -> list[tuple[bool, Selection, list[Any], CallOptions, list[Gathered]]]:
        """Return what is to be sent, pushes first: whether it is a push, keys, arrays, how, and who waits for it."""
        kinds = [(True, self._pushes), (False, self._pulls)]
        self._pushes, self._pulls, self._size = _Queue(), _Queue(), 0
        call = CallOptions(self._priority, lent=True, scale=self._scale)
        return [(is_push, self._joined(k.keys), k.arrays, call, k.waiting) for is_push, k in kinds if k.waiting]

    def _joined(self, keys: Sequence[Selection]) -> Selection:
        """Return all keys as one selection; the same calls come in every step."""
        if len(keys) == 1:
            return keys[0]
        names = tuple([record.key for each in keys for record in each.records])
        found = self._known.get(names)
        if found is None:
            if self._known_keys > KNOWN_KEYS:
                self._known, self._known_keys = {}, 0
            found = self._known[names] = Selection(record for each in keys for record in each.records)
            self._known_keys += len(names)
        return found


def is_small(keys: Selection) -> bool:
    """Whether a call on these keys may go with others."""
    return keys.size_bytes < SMALL_CALL_BYTES
