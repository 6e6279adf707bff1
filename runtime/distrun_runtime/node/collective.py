"""Calls that all workers make together: opening a store, declaring keys, barriers.

Each worker numbers its collective calls of a store (0, 1, 2 ...); call i of all workers must be the same kind with the
same content. The first difference is an error that names both workers and both contents. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distrun_runtime.net.message import Kind, Message
from distrun_runtime.node.role import Patience


@dataclass(frozen=True)
class Call:
    """One worker's part of a collective call."""

    rank: int
    link: str
    message: Message

    @property
    def number(self) -> int:
        """Which collective call of its store this is."""
        return int(self.message.body.get("number", -1))


@dataclass
class Gathering:
    """The calls of one number that came so far."""

    calls: dict[int, Call] = field(default_factory=dict)
    patience: Patience | None = None

    def add(self, call: Call) -> str:
        """Take a call in and return how it differs from those before; empty: it does not."""
        first = next(iter(self.calls.values()), None)
        self.calls[call.rank] = call
        return "" if first is None else difference(first, call)


def difference(one: Call, other: Call) -> str:
    """Return how two parts of one collective call differ, in words; empty when they agree."""
    if one.message.kind is not other.message.kind:
        return "worker-%d calls %s where worker-%d calls %s (call %d of the store)" % (
            *(one.rank, verb(one.message), other.rank, verb(other.message)),
            one.number,
        )
    if one.message.kind is Kind.OPEN and one.message.body != other.message.body:
        return "worker-%d creates a %r store where worker-%d creates a %r store" % (
            *(one.rank, one.message.body.get("type"), other.rank, other.message.body.get("type")),
        )
    if one.message.kind is Kind.KEYS:
        return _records_differ(one, other)
    return ""


def _records_differ(one: Call, other: Call) -> str:
    mine = {_text(record): record for record in one.message.body["records"]}
    theirs = {_text(record): record for record in other.message.body["records"]}
    for key in [*mine, *theirs]:
        left, right = mine.get(key), theirs.get(key)
        if left is None or right is None:
            has, lacks = (one, other) if right is None else (other, one)
            record = left or right
            assert record is not None
            return "worker-%d declares key %s (%s), worker-%d does not" % (
                *(has.rank, repr(record["key"]), describe(record), lacks.rank),
            )
        if left != right:
            return "for key %s worker-%d has %s, worker-%d has %s" % (
                *(repr(left["key"]), one.rank, describe(left), other.rank, describe(right)),
            )
    return ""


def describe(record: Mapping[str, Any]) -> str:
    """Return shape and type of a record, for people."""
    return "shape %s %s" % (tuple(record["shape"]), record["dtype"])


def _text(record: Mapping[str, Any]) -> str:
    return json.dumps(record["key"])


def verb(message: Message) -> str:
    """Return what the user calls it."""
    return {Kind.KEYS: "init", Kind.OPEN: "create", Kind.JOIN: "join"}.get(message.kind, message.kind.name.lower())
