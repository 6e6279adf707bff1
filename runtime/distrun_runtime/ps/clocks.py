"""How far each worker is with a slot in async: what it has pushed, and what it had seen when it did. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Counts one slot's async pushes; workers are ranks."""

    pushed: dict[int, int] = field(default_factory=dict)
    """Worker to the number of its last push."""
    updates: int = 0
    """Updates of the slot, by whomever."""
    seen: dict[int, int] = field(default_factory=dict)
    """Worker to `updates` at its last pull."""
    pending: dict[tuple[int, int], int] = field(default_factory=dict)
    """(Worker, push) whose update waits for norms, to its staleness."""

    def push(self, rank: int, number: int) -> int:
        """Count a worker's push `number`; return how many updates came since that worker's last pull.

        A worker that never pulled has seen the initial value.
        """
        self.pushed[rank] = max(self.pushed.get(rank, 0), number)
        return self.updates - self.seen.get(rank, 0)

    def pull(self, rank: int) -> None:
        """A worker is given the present value."""
        self.seen[rank] = self.updates

    def most(self) -> int:
        """Return the number of pushes of the worker that is farthest."""
        return max(self.pushed.values(), default=0)

    def behind(self, least: int, workers: Iterable[int]) -> list[int]:
        """Return which of `workers` have pushed less often than `least` times."""
        return [rank for rank in workers if self.pushed.get(rank, 0) < least]

    def level(self, workers: Iterable[int]) -> None:
        """Put all workers where the farthest is: all have joined, and begin anew together."""
        most = self.most()
        if most:
            self.pushed = dict.fromkeys(workers, most)
