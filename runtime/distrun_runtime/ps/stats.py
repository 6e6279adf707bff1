"""What a server counts: bytes, updates, and how old the weights were that async pushes were computed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Staleness:
    """Of one worker's async pushes: updates of a shard by others between its last pull of it and its push."""

    pushes: int = 0
    total: int = 0
    max: int = 0


@dataclass
class Counters:
    """Plain numbers of one server since its start, or since it forgot everything."""

    bytes_in: int = 0
    """Payload bytes of requests."""
    bytes_out: int = 0
    """Payload bytes of answers."""
    pushes: int = 0
    """Messages that push; one that pulls as well counts here and there."""
    pulls: int = 0
    """Messages that pull."""
    updates: int = 0
    """Steps of rules and assignments of sums, each of one shard."""
    staleness: dict[int, Staleness] = field(default_factory=dict)
    """By the rank of the worker."""

    def received(self, size_bytes: int) -> None:
        """Count the payloads of a request."""
        self.bytes_in += size_bytes

    def sent(self, size_bytes: int) -> None:
        """Count the payloads of an answer."""
        self.bytes_out += size_bytes

    def updated(self, count: int, rank: int = -1, stale: Sequence[int] = ()) -> None:
        """Count updates of shards; in async by whose push, and how stale each was."""
        self.updates += count
        if stale:
            known = self.staleness.setdefault(rank, Staleness())
            known.pushes += len(stale)
            known.total += sum(stale)
            known.max = max(known.max, *stale)

    def asked(self, pushes: bool, pulls: bool) -> None:
        """Count a message that pushes, pulls, or does both."""
        self.pushes += pushes
        self.pulls += pulls

    def to_metrics(self) -> dict[str, float]:
        """Return the numbers that the agent is told (`metrics`)."""
        known = self.staleness.values()
        pushes = sum(each.pushes for each in known)
        return {
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "pushes": self.pushes,
            "pulls": self.pulls,
            "updates": self.updates,
            "staleness_max": max((each.max for each in known), default=0),
            "staleness_mean": round(sum(each.total for each in known) / pushes, 3) if pushes else 0.0,
        }

    def reset(self) -> None:
        """Begin anew."""
        self.bytes_in = self.bytes_out = self.updates = self.pushes = self.pulls = 0
        self.staleness.clear()

    def to_json(self) -> dict[str, object]:
        """Return the numbers as an answer to STATS has them; staleness by rank, as text."""
        staleness = {
            str(rank): {"mean": each.total / each.pushes, "max": each.max, "pushes": each.pushes}
            for rank, each in sorted(self.staleness.items())
        }
        sizes = {"bytes_in": self.bytes_in, "bytes_out": self.bytes_out, "updates": self.updates}
        return {**sizes, "staleness": staleness}
