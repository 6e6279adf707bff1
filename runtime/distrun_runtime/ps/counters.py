"""What a server counts: bytes, updates, and how old the weights were that async pushes were computed from."""

from __future__ import annotations

from dataclasses import dataclass, field

from distrun_runtime.ps.work import SlotId


@dataclass
class Staleness:
    """Of one worker's async pushes: updates of a slot by others between its last pull of it and its push."""

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
    updates: int = 0
    """Steps of rules and assignments of sums, each of one slot."""
    staleness: dict[int, Staleness] = field(default_factory=dict)
    """By the rank of the worker."""

    def received(self, size_bytes: int) -> None:
        """Count the payloads of a request."""
        self.bytes_in += size_bytes

    def sent(self, size_bytes: int) -> None:
        """Count the payloads of an answer."""
        self.bytes_out += size_bytes

    def updated(self, slot: SlotId, rank: int = -1, staleness: int | None = None) -> None:
        """Count one update of a slot; in async by whose push, and how stale that was."""
        self.updates += 1
        if staleness is not None:
            known = self.staleness.setdefault(rank, Staleness())
            known.pushes += 1
            known.total += staleness
            known.max = max(known.max, staleness)

    def reset(self) -> None:
        """Begin anew."""
        self.bytes_in = self.bytes_out = self.updates = 0
        self.staleness.clear()

    def to_json(self) -> dict[str, object]:
        """Return the numbers as an answer to STATS has them; staleness by rank, as text."""
        staleness = {
            str(rank): {"mean": each.total / each.pushes, "max": each.max, "pushes": each.pushes}
            for rank, each in sorted(self.staleness.items())
        }
        sizes = {"bytes_in": self.bytes_in, "bytes_out": self.bytes_out, "updates": self.updates}
        return {**sizes, "staleness": staleness}
