"""What a server counts and samples: bytes, updates, the age of weights, stages of its work, rounds."""

from __future__ import annotations

import heapq
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Any

from distrun_runtime import reporting
from distrun_runtime.contract import metrics
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.protocol.message import Message
from distrun_runtime.ps.role import NodeRequest, Waits


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

    def updated(self, count: int, rank: int = -1, stale: Sequence[int] = ()) -> None:
        """Count updates of shards; in async by whose push, and how stale each was."""
        self.updates += count
        if stale:
            known = self.staleness.setdefault(rank, Staleness())
            known.pushes += len(stale)
            known.total += sum(stale)
            known.max = max(known.max, *stale)

    def to_metrics(self) -> dict[str, float]:
        """Return the numbers that the agent is told (`metrics`)."""
        numbers = dict(vars(self))
        known = numbers.pop("staleness").values()
        pushes = sum(each.pushes for each in known)
        return {
            **numbers,
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


# Where the time of pushes and pulls goes, stage by stage, for `DISTRUN_STAGES=1`.
#
# A worker measures its copies and how long it is until servers have answered a pull. A server says in the answer how
# long it had the pull, and how much of that it added or ran the rule. So no two clocks are compared.


ASKED = "stages"
"""Member of a pull's body that asks for a server's times, and of the answer's body that has them."""

COPY_OUT, WIRE, WAIT, ADD, RULE, COPY_IN = STAGES = ("copy out", "wire", "wait", "add", "rule", "copy in")
_KEPT = 256
"""A server remembers so many pieces of work; a round has fewer."""


class Stages:
    """The times of one worker.

    Threads: any.
    """

    def __init__(self, is_on: bool = False) -> None:
        self.is_on = is_on
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._answers = 0

    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        began = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._seconds[stage] += time.monotonic() - began

    def answered(self, seconds: float, replies: Sequence[Message]) -> None:
        """Take in the answers to a pull, which came `seconds` after it was sent.

        Of several servers that answer, the one counts that had it longest: the worker waited for that one.
        """
        told = [reply.body[ASKED] for reply in replies if ASKED in reply.body]
        if not told:
            return
        held, add, rule = max((float(each["held"]), float(each[ADD]), float(each[RULE])) for each in told)
        with self._lock:
            self._answers += 1
            self._seconds[ADD] += add
            self._seconds[RULE] += rule
            self._seconds[WAIT] += max(0.0, held - add - rule)
            self._seconds[WIRE] += max(0.0, seconds - held)

    def text(self, name: str) -> str:
        """Return the times for people, or "" if there are none.

        Arguments:
            name: of the worker.
        """
        with self._lock:
            seconds, answers = dict(self._seconds), self._answers
        if not answers:
            return ""
        whole = sum(seconds.values()) or 1.0
        parts = ", ".join(
            f"{stage} {seconds[stage] / answers * 1000.0:.2f} ms ({seconds[stage] / whole * 100:.0f} %)"
            for stage in STAGES
        )
        return f"{name}: {answers} pulls answered, of each on average: {parts}"


class Worked:
    """When a server's engine has added and run the rule. Threads: one at a time."""

    def __init__(self) -> None:
        self._spans: deque[tuple[str, float, float]] = deque(maxlen=_KEPT)

    def note(self, stage: str, began: float, ended: float) -> None:
        """Note a piece of work."""
        self._spans.append((stage, began, ended))

    def since(self, began: float, now: float) -> dict[str, float]:
        """Return what an answer says of a pull that came at `began`: seconds in all, and of them those of each work."""
        seconds = {ADD: 0.0, RULE: 0.0}
        for stage, first, last in self._spans:
            seconds[stage] += max(0.0, last - max(first, began))
        return {"held": now - began, **seconds}


# Sends the metrics of a node of the store to its agent: counters, lags of workers, waits of the script.
#
# The node's loop calls `NodeMetrics.tick` in every turn. Once a second, a datagram (`contract.metrics`) with the role's
# `counters()` is sent. `Lags` samples how late the contributions of each worker arrive.


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


@dataclass(frozen=True)
class _SampledRound:
    """A sampled round that is over."""

    last: int
    """The worker that came last; -1: it was a sum of several."""
    lags: Mapping[int, float]
    """Seconds from the median of all arrivals to each worker's."""
    duration_s: float


class Lags:
    """How late workers contribute to rounds of one shard, by this server's clock.

    Of a sum that a relay sends, it is unknown here which of its workers was late; the relay itself samples them.

    Arguments:
        shard: the shard that is sampled.
        members: the workers that share its store.
    """

    def __init__(self, shard: int, members: Sequence[int] = ()) -> None:
        self.shard = shard
        self.members = members
        self.over_at = -math.inf
        """When the last sampled round was over."""
        self._over_round = 0
        self._newest = 0
        """The last round that anybody has contributed to."""
        self._round = -1
        """The round that is sampled; -1: none is."""
        self._at: dict[int, float] = {}
        """When the contribution of each worker came, in that order."""
        self._rounds: deque[_SampledRound] = deque(maxlen=metrics.LAG_ROUNDS)

    def wants(self, number: int, now: float) -> bool:
        """Return whether a contribution to round `number`, which comes now, is to be noted (`contributed`)."""
        if number > self._newest:
            self._newest = number
            # An open one may lack a contribution for good: of a worker that was excused meanwhile, or was refused.
            if now >= self.over_at + APART_S and (self._round < 0 or number > self._round + 1):
                self._round, self._at = number, {}
        return number == self._round

    def contributed(self, ranks: Sequence[int], number: int, members: int, now: float) -> None:
        """Take note of a contribution to round `number`, which is over with those of so many `members`."""
        if not self.wants(number, now):
            return
        for rank in ranks:
            self._at.setdefault(rank, now)
        if len(self._at) >= members:
            self._end(ranks, now)

    def _end(self, last: Sequence[int], now: float) -> None:
        at, since, rounds = self._at, self.over_at, self._round - self._over_round
        self.over_at, self._over_round, self._round = now, self._round, -1
        if len(at) < 2 or math.isinf(since):  # of the first one it is not known how long it took
            return
        from statistics import median_low  # with decimals and fractions

        median = median_low(at.values())  # of two workers, the one that was first
        lags = {rank: when - median for rank, when in at.items()}
        self._rounds.append(_SampledRound(last[0] if len(last) == 1 else -1, lags, (now - since) / rounds))

    def to_json(self) -> dict[str, list[float]]:
        """Return for each rank: its last lag, in how many rounds it was last, its median lag, the median round."""
        rounds = self._rounds
        if not rounds:
            return {}
        from statistics import median

        round_s = median(each.duration_s for each in rounds)
        found: dict[int, list[float]] = {}
        newest = rounds[-1].lags
        for rank in {each.last for each in rounds if each.last >= 0}.union(
            heapq.nlargest(RANKS, newest, newest.__getitem__)
        ):
            mine = [each.lags[rank] for each in rounds if rank in each.lags]
            times = sum(each.last == rank for each in rounds)
            found[rank] = [round(mine[-1], 4), times, round(median(mine), 4), round(round_s, 4)]
        return latest({str(rank): each for rank, each in found.items()})


def latest(found: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Return of what `Lags.to_json` says that of the RANKS that were last most often, or are latest as a rule."""
    worst = sorted(found, key=lambda rank: (-found[rank][1], -found[rank][2]))[:RANKS]
    return {rank: found[rank] for rank in sorted(worst, key=int)}


@dataclass
class NodeMetrics:
    """Tells the agent. Called by the node's thread; `waits` is set by the script's.

    Arguments:
        role: `server`, `scheduler` or `worker`.
        counters: returns what the node has counted, by the names that docs/protocol.md lists.
        lags: returns `Lags.to_json`.
        devices: returns where a server's arrays are (`device`), and why not on a GPU (`device_why`).
        waits: what the script waits for.
    """

    role: str
    sender: metrics.Sender
    counters: Callable[[], Mapping[str, float]]
    lags: Callable[[], Mapping[str, Any]] = dict
    devices: Callable[[], Mapping[str, str]] = dict
    waits: Waits | None = None
    wall: Callable[[], float] = time.time
    _next_at: float = field(default=0.0, init=False)
    _look_at: float = field(default=0.0, init=False)
    _told: NodeRequest | None = field(default=None, init=False)
    """The wait that the agent knows of."""
    _told_of: tuple[object, ...] = field(default=(), init=False)
    _told_at: float = field(default=0.0, init=False)

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
        self._look_at = now + (0.2 if self.waits is not None else INTERVAL_S)
        if self.waits is not None:
            self._tell_wait(self.waits, now)
        if now >= self._next_at:
            self._next_at = now + INTERVAL_S
            lags = self.lags()
            more = {**({"lags": lags} if lags else {}), **{name: text[:TEXT] for name, text in self.devices().items()}}
            self.sender.send(metrics.COUNTERS, role=self.role, values=self.counters(), **more)
            reporting.tell_stacks(now)

    def _tell_wait(self, waits: Waits, now: float) -> None:
        request, since = waits.request, waits.since
        waited_s = self.wall() - since
        if request is None or request.is_done or waited_s < WAIT_S:
            over = {"for": [], "key": "", "call": "", "since": 0.0}
            # If it does not go now, it is told at the next look: else the worker would wait for ever.
            if self._told is not None and self.sender.send(metrics.WAITING, **over):
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
        self.sender.send(metrics.WAITING, **members)
