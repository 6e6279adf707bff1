"""Calls that all workers make together: opening a store, declaring keys, barriers, saving and loading states.

Each worker numbers its collective calls of a store (0, 1, 2 ...); call i of all workers must be the same kind with the
same content. The first difference is an error that names both workers and both contents. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.ps.role import Patience


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
        wrong = "" if first is None else difference(first, call)
        self.calls[call.rank] = call
        return wrong


def difference(one: Call, other: Call) -> str:
    """Return how two parts of one collective call differ, in words; empty when they agree."""
    if verb(one.message) != verb(other.message):
        return "worker-%d calls %s where worker-%d calls %s (call %d of the store)" % (
            *(one.rank, verb(one.message), other.rank, verb(other.message)),
            one.number,
        )
    mine, theirs = one.message.body, other.message.body
    if one.message.kind is Kind.OPEN and opened(mine) != opened(theirs):
        return "worker-%d creates %s where worker-%d creates %s" % (
            one.rank,
            opened(mine),
            other.rank,
            opened(theirs),
        )
    if one.message.kind in (Kind.SAVE, Kind.LOAD) and mine.get("folder") != theirs.get("folder"):
        return "worker-%d calls %s(%r) where worker-%d gives %r" % (
            *(one.rank, verb(one.message), mine.get("folder"), other.rank, theirs.get("folder")),
        )
    if one.message.kind is Kind.KEYS:
        return _records_differ(one, other)
    return ""


def opened(body: Mapping[str, Any]) -> str:
    """Return what an OPEN creates, in words; alike where it is the same."""
    bound = body.get("staleness")
    return "a %r store" % body.get("type") + ("" if bound is None else " with staleness=%s" % bound)


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
    """Return what a record says beside its key, for people: `shape (2, 3) float32, row_sparse, codec 2bit`."""
    more = [record["stype"]] if record.get("stype", "default") != "default" else []
    more += ["codec %s" % record["codec"]] if record.get("codec") else []
    return ", ".join(["shape %s %s" % (tuple(record["shape"]), record["dtype"]), *more])


def _text(record: Mapping[str, Any]) -> str:
    return json.dumps(record["key"])


def verb(message: Message) -> str:
    """Return what the user calls it."""
    if message.kind is Kind.KEYS:
        return "assign" if message.body.get("assign") else "init"
    return _VERBS.get(message.kind, message.kind.name.lower())


_VERBS = {Kind.OPEN: "create", Kind.SAVE: "save_states", Kind.LOAD: "load_states"}
