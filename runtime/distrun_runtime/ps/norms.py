"""Norms of whole values for rules that need them: each server adds up its pieces and tells the others. Pure.

A rule such as LAMB scales its step by norms of the whole weight, which lies in pieces on several servers. Each
server squares and sums its own pieces of a key (`Part`), sends these sums to the others (NORMS), and goes on when
the parts it has cover the value. All servers add the parts up in the order of their offsets, so all get the very
same totals. Parts, not elements, are what is known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from distrun_runtime.protocol.handshake import NodeIdentity
from distrun_runtime.protocol.message import Message
from distrun_runtime.ps import role
from distrun_runtime.ps.shards import Failure, Turn


class Part(NamedTuple):
    """One piece's sums of squares."""

    offset: int
    length: int
    squares: tuple[float, ...]


@dataclass
class _Exchange:
    """What is known of one update of one key."""

    parts: dict[int, Part] = field(default_factory=dict)
    """By offset, ours and others'."""
    shards: dict[int, int] = field(default_factory=dict)
    """Ours that wait for the totals, with their offsets."""
    failure: Failure | None = None


class Norms:
    """The updates of a server that wait for norms."""

    def __init__(self) -> None:
        self._open: dict[Turn, _Exchange] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def mine(self, turn: Turn, shard: int, offset: int, length: int, squares: tuple[float, ...]) -> list[Part]:
        """Enter a shard of ours that is ready for this turn; return our parts so far."""
        exchange = self._open.setdefault(turn, _Exchange())
        exchange.shards[shard] = offset
        exchange.parts[offset] = Part(offset, length, squares)
        ours = set(exchange.shards.values())
        return [part for at, part in sorted(exchange.parts.items()) if at in ours]

    def theirs(self, turn: Turn, parts: list[Part]) -> None:
        """Enter the parts of another server."""
        exchange = self._open.setdefault(turn, _Exchange())
        exchange.parts.update((part.offset, part) for part in parts)

    def fail(self, turn: Turn, failure: Failure) -> None:
        """The update of this turn fails, here and for shards that are not ready yet; the first reason counts."""
        exchange = self._open.setdefault(turn, _Exchange())
        exchange.failure = exchange.failure or failure

    def has(self, turn: Turn) -> bool:
        """Whether anything is known of a turn."""
        return turn in self._open

    def turns(self) -> list[Turn]:
        """Return the turns that are under way."""
        return list(self._open)

    def settled(self, turn: Turn, size: int) -> tuple[list[int], tuple[float, ...] | Failure] | None:
        """Return our shards that may go on, and with what: totals or a failure; None: parts are missing.

        Arguments:
            size: elements of the whole value.
        """
        exchange = self._open.get(turn)
        if exchange is None:
            return None
        parts = [part for _, part in sorted(exchange.parts.items())]
        waiting, exchange.shards = exchange.shards, {}
        shards = list(waiting)
        if exchange.failure is not None:
            return shards, exchange.failure
        if sum(part.length for part in parts) < size:
            exchange.shards = waiting
            return None
        if len({len(part.squares) for part in parts}) > 1:
            exchange.failure = Failure("the servers applied different rules")
            return shards, exchange.failure
        return shards, tuple(sum(column) for column in zip(*(part.squares for part in parts), strict=True))

    def close(self, turn: Turn) -> None:
        """Forget a turn: all our shards are through."""
        self._open.pop(turn, None)

    def clear(self) -> None:
        """Forget all."""
        self._open.clear()


class Peers:
    """The other servers of the job: connected to when there is something to tell them.

    A connection carries messages one way, from the side that opened it; the other side opens its own.
    """

    def __init__(self) -> None:
        self._endpoints: dict[str, str] = {}
        self._called: set[str] = set()

    def learn(self, nodes: Sequence[NodeIdentity], rank: int) -> None:
        """Take in the job's roster; `rank` is ours."""
        self._endpoints = {node.name: node.endpoint for node in nodes if node.role == "server" and node.rank != rank}

    def __len__(self) -> int:
        return len(self._endpoints)

    def tell(self, message: Message) -> list[role.Action]:
        """Send a message to all of them."""
        actions: list[role.Action] = []
        for name in self._endpoints:
            actions += [*self.call(name), role.Send(name, message)]
        return actions

    def call(self, name: str) -> list[role.Action]:
        """Connect to a server by its name, `server-1`, unless that was done. What is sent before its WELCOME waits at
        the loop."""
        if name in self._called:
            return []
        self._called.add(name)
        return [role.Connect(name, self._endpoints[name])]

    def is_ours(self, link: role.Link) -> bool:
        """Whether we opened a connection to another server."""
        return link in self._called

    def lost(self, link: role.Link) -> str:
        """A connection ended or was refused; return the endpoint of the server that it led to, if it was ours."""
        if link not in self._called:
            return ""
        self._called.remove(link)
        return self._endpoints[link]
