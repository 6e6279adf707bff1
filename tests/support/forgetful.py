"""A server that forgets buckets: its transport gives the messages that name one the number of another, unknown one."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distrun_runtime.arrays.dtypes import Buffer
from distrun_runtime.protocol.message import MAGIC
from distrun_runtime.transport.base import Arrived, Event

UNKNOWN = 1 << 20
"""A number that no worker gives a bucket."""
_COUNTS = struct.Struct("<III")
"""Number of entries, bucket and step in the head of a message."""
COUNTS_AT = 36


class Forgetful:
    """A transport around another one. Of the messages that name a bucket in place of entries it changes every n-th."""

    def __init__(self, within: Any, every: int) -> None:
        self._within = within
        self._every = every
        self.named = 0
        """How many messages named a bucket."""
        self.changed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._within, name)

    def poll(self, timeout_s: float) -> list[Event]:
        return [
            replace(event, frames=self._changed(event.frames)) if isinstance(event, Arrived) else event
            for event in self._within.poll(timeout_s)
        ]

    def _changed(self, frames: Sequence[Buffer]) -> Sequence[Buffer]:
        head = bytearray(memoryview(frames[0]).cast("B"))
        if head[:4] != MAGIC:
            return frames
        count, bucket, step = _COUNTS.unpack_from(head, COUNTS_AT)
        if count or not bucket:
            return frames
        self.named += 1
        if self.named % self._every:
            return frames
        self.changed += 1
        _COUNTS.pack_into(head, COUNTS_AT, 0, UNKNOWN, step)
        return [bytes(head), *frames[1:]]
