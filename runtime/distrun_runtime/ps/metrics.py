"""Sends the metrics of a node of the store to its agent: counters, lags of workers, waits of the script.

The node's loop calls `NodeMetrics.tick` in every turn. Once a second, a datagram (`contract.metrics`) with the role's
`counters()` is sent. `Lags` samples how late the contributions of each worker arrive.
"""

from __future__ import annotations

import heapq
import math
import statistics
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distrun_runtime import stacks
from distrun_runtime.contract import metrics
from distrun_runtime.ps.request import Request, Waits

INTERVAL_S = 1.0
"""How often counters are sent."""
WAIT_S = 1.0
"""A wait of the script is reported after this time."""
NAMELESS_S = 3.0
"""If no server has said by then whom the script waits for, the servers without an answer are named."""
AGAIN_S = 5.0
"""How often a wait is told again: datagrams may be lost."""
TEXT = 300
"""Characters of a text that goes with counters."""
NAMES = 16
"""So many of those that are waited for are named."""

APART_S = 0.05
"""From the end of one sampled round to the beginning of the next. A worker that is less late is not worth a name."""
RANKS = 40
"""Lags are reported for at most this many workers: those that came last most often."""


@dataclass
class _Sample:
    """A round of the sampled shard, from its first contribution to its last."""

    round: int
    at: dict[int, float] = field(default_factory=dict)
    """When the contribution of each worker came, in that order."""


@dataclass(frozen=True)
class _Round:
    """A sampled round that is over."""

    last: int
    """The worker that came last; -1: it was a sum of several."""
    lags: Mapping[int, float]
    """Seconds from the median of all arrivals to each worker's."""
    duration_s: float


class Lags:
    """How late workers contribute to rounds of one shard, by this server's clock.

    Of a sum that a relay sends, nobody knows here which of its workers was late; the relay itself samples them.

    Arguments:
        shard: the shard that is sampled.
    """

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.over_at = -math.inf
        """When the last sampled round was over."""
        self._over_round = 0
        self._newest = 0
        """The last round that anybody has contributed to."""
        self._open: _Sample | None = None
        self._rounds: deque[_Round] = deque(maxlen=metrics.LAG_ROUNDS)

    def contributed(self, ranks: Sequence[int], number: int, members: int, now: float) -> None:
        """Take note of a contribution to round `number`, which is over with those of so many `members`."""
        is_first = number > self._newest
        self._newest = max(self._newest, number)
        if is_first and now >= self.over_at + APART_S:
            sample = self._open
            # An open one may lack a contribution for good: of a worker that was excused meanwhile, or was refused.
            if sample is None or number > sample.round + 1:
                self._open = _Sample(number)
        sample = self._open
        if sample is None or sample.round != number:
            return
        for rank in ranks:
            sample.at.setdefault(rank, now)
        if len(sample.at) >= members:
            self._end(sample, ranks, now)

    def _end(self, sample: _Sample, last: Sequence[int], now: float) -> None:
        since, rounds = self.over_at, sample.round - self._over_round
        self._open, self.over_at, self._over_round = None, now, sample.round
        at = sample.at
        if len(at) < 2 or math.isinf(since):  # of the first one it is not known how long it took
            return
        median = statistics.median_low(at.values())  # of two workers, the one that was first
        lags = {rank: when - median for rank, when in at.items()}
        self._rounds.append(_Round(last[0] if len(last) == 1 else -1, lags, (now - since) / rounds))

    def to_json(self) -> dict[str, list[float]]:
        """Return for each rank: its last lag, in how many rounds it was last, its median lag, the median round."""
        rounds = self._rounds
        if not rounds:
            return {}
        round_s = statistics.median(each.duration_s for each in rounds)
        found: dict[int, list[float]] = {}
        newest = rounds[-1].lags
        for rank in {each.last for each in rounds if each.last >= 0}.union(
            heapq.nlargest(RANKS, newest, newest.__getitem__)
        ):
            mine = [each.lags[rank] for each in rounds if rank in each.lags]
            times = sum(each.last == rank for each in rounds)
            found[rank] = [round(mine[-1], 4), times, round(statistics.median(mine), 4), round(round_s, 4)]
        worst = sorted(found, key=lambda rank: (-found[rank][1], -found[rank][2]))[:RANKS]
        return {str(rank): found[rank] for rank in sorted(worst)}


class NodeMetrics:
    """Tells the agent. Called by the node's thread; `waits` is set by the script's.

    Arguments:
        role: `server`, `scheduler` or `worker`.
        counters: returns what the node has counted, by the names that docs/protocol.md lists.
        lags: returns `Lags.to_json`.
        devices: returns where a server's arrays are (`device`), and why not on a GPU (`device_why`).
        waits: what the script waits for.
    """

    def __init__(
        self,
        role: str,
        sender: metrics.Sender,
        counters: Callable[[], Mapping[str, float]],
        *,
        lags: Callable[[], Mapping[str, Any]] = dict,
        devices: Callable[[], Mapping[str, str]] = dict,
        waits: Waits | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._role = role
        self._sender = sender
        self._counters = counters
        self._lags = lags
        self._devices = devices
        self._waits = waits
        self._wall = wall
        self._next_at = 0.0
        self._look_at = 0.0
        self._told: Request | None = None
        """The wait that the agent knows of."""
        self._told_of: tuple[object, ...] = ()
        self._told_at = 0.0

    def tick(self, now: float) -> None:
        """Send what is due at `now` (monotonic clock, seconds). Never raises: after a fault, nothing is sent."""
        if now < self._look_at:
            return
        try:
            self._send(now)
        except Exception:
            self._look_at = math.inf
            traceback.print_exc()

    def _send(self, now: float) -> None:
        self._look_at = now + (0.2 if self._waits is not None else INTERVAL_S)
        if self._waits is not None:
            self._tell_wait(self._waits, now)
        if now >= self._next_at:
            self._next_at = now + INTERVAL_S
            lags = self._lags()
            more = {**({"lags": lags} if lags else {}), **{name: text[:TEXT] for name, text in self._devices().items()}}
            self._sender.send(metrics.COUNTERS, role=self._role, values=self._counters(), **more)
            stacks.tell(now)

    def _tell_wait(self, waits: Waits, now: float) -> None:
        request, since = waits.request, waits.since
        waited_s = self._wall() - since
        if request is None or request.is_done or waited_s < WAIT_S:
            over = {"for": [], "key": "", "call": "", "since": 0.0}
            # If it does not go now, it is told at the next look: else the worker would wait for ever.
            if self._told is not None and self._sender.send(metrics.WAITING, **over):
                self._told, self._told_of = None, ()
            return
        names = request.awaited
        if not names and waited_s < NAMELESS_S:
            return
        names = names or tuple(sorted(set(request.missing.copy().values()))) or ("scheduler",)
        what = (request, names, request.awaited_key)
        if what == self._told_of and now < self._told_at + AGAIN_S:
            return
        self._told, self._told_of, self._told_at = request, what, now
        members = {
            "for": names[:NAMES],
            "key": request.awaited_key[:200],
            "call": request.what.partition(" ")[0],
            "since": round(since, 3),
        }
        self._sender.send(metrics.WAITING, **members)
