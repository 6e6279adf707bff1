"""The state of a server: the shards of each store, how far their rounds are, and where their arrays are.

A shard is a run of elements of one value, at most 1 MiB; its index in the store's table stands for it everywhere on the
server. What is asked for every message is in flat arrays over the shards, so that one decision is made for all shards
of a message. What is rare (a failed update, a skipped round) is in dictionaries by shard.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, Optional

import numpy as np

from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.ops.partition import Shard
from distrun_runtime.protocol.message import DTYPE_SIZES, Membership

__all__ = ["SYNC", "Failure", "Notes", "Store", "Turn", "relayed"]

Notes = Mapping[int, Optional[Mapping[str, Any]]]
"""By rank, what the workers of a skipped round said: the note of one that skipped it, None of one that contributed."""

MANY = 64
"""With so many workers it pays to remember which of them a round waits for."""
SYNC = -1
"""In place of a rank: an update that is a round of all workers."""


class Turn(NamedTuple):
    """Names one update of one key: a round (rank SYNC), or in async a worker's push."""

    store: int
    key: int
    rank: int
    round: int


class Failure(NamedTuple):
    """Why an update failed: what callers are told, and a traceback of the server."""

    reason: str
    traceback: str = ""


def relayed(number: int) -> int:
    """Return the number under which a server keeps what it has of a store's shards that are on other servers."""
    return -number


class Store:
    """What a server knows of one store.

    Flat arrays have one element for each shard (`last`, `seen` and `owed` a `row` for each member). There is room for
    more shards than there are: always index them by shards.

    Arguments:
        workers: how many the job has.
        members: those that share the store; None: all of them.
    """

    _FLAT = (
        *("key", "offset", "length", "dtype", "row_size", "done", "ordered", "skips", "updates", "fresh", "halfway"),
        *("slow", "progress", "op"),
    )

    def __init__(self, number: int, workers: int, server: int = 0, members: Membership | None = None) -> None:
        self.number = number
        self.members = members or Membership(range(workers))
        self.row = np.full(workers, -1)
        """The row of each worker of the job, which is its place among the members; -1: it is none."""
        self.row[list(self.members.ranks)] = np.arange(len(self.members.ranks))
        self._server = server
        self.is_sync = True
        self.on_devices = False
        """A worker has created it as a `dist_device_*` store."""
        self.device = "cpu:0"
        """Where its arrays are, by name."""
        self.why_host = ""
        """Why they are not on a GPU, if they could have been there, in words."""
        self.is_deterministic = False
        """Sums are made in the order of ranks."""
        self.has_rule = False
        self.needs_norms = False
        """The rule needs norms of whole values."""
        self.staleness: int | None = None
        """In async: how many pushes of a key a worker may be ahead of another that it pulls; None: any number."""
        self.names: dict[int, Any] = {}
        """Key number to the user's key."""
        self.shapes: dict[int, tuple[int, ...]] = {}
        """Key number to the shape of the whole value."""
        self.joined: set[int] = set()
        self.left: set[int] = set()
        """Workers that left this store for good (kv.leave)."""
        self.count = 0
        """Number of shards."""
        self._room = 0
        integers = np.zeros(0, np.int64)
        self.key = self.offset = self.length = self.row_size = integers
        self.dtype = np.zeros(0, np.uint8)
        self.op = np.zeros(0, np.uint8)
        """What becomes of contributions: the place in `reduce.OPS`."""
        self.done = self.ordered = integers
        """Rounds that are over: applied, failed or skipped (in async the farthest worker's pushes; in a relay the round
        of the value, -1: it has none); and rounds whose Apply was ordered."""
        self.skips = self.updates = integers
        """Rounds that were skipped; in async the updates that were made."""
        self.progress = integers
        """Number of the `values.ShardProgress` that knows the rounds of the shard."""
        self.slow = integers
        """Row of a worker that had contributed least when `reach` last looked; if there are MANY."""
        self.fresh = np.zeros(0, np.bool_)
        """No round was applied since the shard was given its value, which is answered in full."""
        self.halfway = np.zeros(0, np.bool_)
        """The update of the round ordered last waits for norms."""
        self.last = np.zeros((len(self.members.ranks), 0), np.int64)
        """The round of each worker's last push, where it has pushed all before."""
        self.seen = np.zeros((len(self.members.ranks), 0), np.int64)
        """In async: `updates` at each worker's last pull."""
        self.owed = np.zeros((len(self.members.ranks), 0), np.int64)
        """How many pulls of each worker wait for each shard."""
        self._first = np.full(0, -1, np.int64)
        """Key number to the first of its shards here; -1: none."""
        self.by_key: dict[int, list[int]] = {}
        """Key number to its shards, in the order of their offsets."""
        self._at: dict[tuple[int, int], int] = {}
        """(Key number, offset) to shard, of keys with several shards here."""
        self.early: dict[int, dict[int, set[int]]] = {}
        """Contributions beyond a gap, because a push was refused: shard to round to ranks."""
        self.failed: dict[int, dict[int, Failure]] = {}
        """Shard to round to the reason why its update failed; only as long as it may be pulled."""
        self.late: dict[int, dict[int, Failure]] = {}
        """Shard to worker to why an update failed of pushes that were acknowledged; its next pull says so."""
        self.skipping: dict[int, dict[int, dict[int, Mapping[str, Any]]]] = {}
        """Shard to open round to the workers that skip it, each with its note."""
        self.skipped: dict[int, dict[int, Notes]] = {}
        """Shard to skipped round to the notes of its workers; only as long as it may be pulled."""
        self.pending: dict[int, dict[tuple[int, int], int]] = {}
        """In async: shard to (worker, push) whose update waits for norms, to its staleness."""

        self.again: dict[int, deque[int]] = {}
        """Worker to the requests that it was asked to send again, in their order: one named an unknown bucket."""

    # The table

    def add(self, shards: Iterable[Shard]) -> Array:
        """Take in new shards; return their indices."""
        new = list(shards)
        begin, end = self.count, self.count + len(new)
        self._make_room(end)
        table = np.array(new, np.int64).reshape(len(new), len(Shard._fields))
        for name, column in zip(Shard._fields[1:], table.T[1:], strict=True):
            getattr(self, name)[begin:end] = column  # The first is the server: this one.
        self.fresh[begin:end] = True
        self.count = end
        most = int(self.key[begin:end].max(initial=-1))
        if most >= len(self._first):
            grown = np.full(max(2 * len(self._first), most + 1), -1, np.int64)
            grown[: len(self._first)] = self._first
            self._first = grown
        for index, shard in enumerate(new, begin):
            known = self.by_key.setdefault(shard.key, [])
            known.append(index)
            if len(known) > 1:
                self._at.update({(shard.key, int(self.offset[each])): each for each in known[-2:]})
                known.sort(key=lambda each: int(self.offset[each]))
            self._first[shard.key] = known[0]
        return np.arange(begin, end)

    def take_back(self, shards: Array) -> None:
        """Take back the shards that were added last: nothing came for them."""
        first = self.count - len(shards)
        for shard in range(first, self.count):
            self._take_out(shard)
        for name in self._FLAT:
            getattr(self, name)[first : self.count] = 0
        self.last[:, first : self.count] = self.seen[:, first : self.count] = 0
        self.count = first

    def forget(self, shards: Array) -> None:
        """Forget shards, and their keys with the last of them. Their places in the table stay empty."""
        for shard in shards.tolist():
            key = int(self.key[shard])
            self._take_out(shard)
            if key not in self.by_key:
                self.names.pop(key, None)
                self.shapes.pop(key, None)
            for noted in (self.early, self.failed, self.late, self.skipping, self.skipped, self.pending):
                noted.pop(shard, None)
        self.key[shards] = -1
        self.length[shards] = self.row_size[shards] = 0

    def _take_out(self, shard: int) -> None:
        """Let it be found no more."""
        key = int(self.key[shard])
        known = self.by_key[key]
        known.remove(shard)
        self._at.pop((key, int(self.offset[shard])), None)
        if known:
            self._first[key] = known[0]
        else:
            del self.by_key[key]
            self._first[key] = -1

    def _make_room(self, count: int) -> None:
        if count <= self._room:
            return
        self._room = max(64, 2 * self._room, count)
        for name in (*self._FLAT, "last", "seen", "owed"):
            old = getattr(self, name)
            new = np.zeros((*old.shape[:-1], self._room), old.dtype)
            new[..., : self.count] = old[..., : self.count]
            setattr(self, name, new)

    def find(self, entries: Array) -> Array:
        """Return the shard of each entry, int64; -1 where there is none."""
        keys, offsets = entries["key"].astype(np.int64), entries["offset"].astype(np.int64)
        found = np.full(len(entries), -1, np.int64)
        known = keys < len(self._first)
        found[known] = self._first[keys[known]]
        if not self.count:
            return found
        wrong = (found >= 0) & (self.offset[found] != offsets)
        for at in np.flatnonzero(wrong).tolist():
            found[at] = self._at.get((int(keys[at]), int(offsets[at])), -1)
        return found

    def shard(self, index: int) -> Shard:
        """Return one shard."""
        offset, length, key = int(self.offset[index]), int(self.length[index]), int(self.key[index])
        return Shard(self._server, offset, length, key, int(self.dtype[index]), int(self.row_size[index]))

    def name(self, key: int) -> Any:
        """Return the user's key of a key number; the number if that is not known."""
        return self.names.get(key, key)

    def size(self, key: int) -> int | None:
        """Return the elements of a key's whole value; None: not known."""
        shape = self.shapes.get(key)
        return None if shape is None else math.prod(shape)

    @property
    def bytes(self) -> int:
        """Size of all values here."""
        return int((self.length[: self.count] * DTYPE_SIZES[self.dtype[: self.count]]).sum())

    # Members and rounds

    def excused(self) -> set[int]:
        """Return the workers whose contribution to an open round is zero."""
        return self.joined | self.left

    def reach(self, shards: Array | slice) -> Array:
        """Return the last round of each shard that all workers have contributed to who are not excused."""
        excused = self.excused()
        if not excused:
            last: Array = self.last[:, shards]
            reached: Array = last.min(axis=0)
            if len(last) >= MANY:
                # The last of them: where workers contribute in the order of their ranks, it stays the slowest.
                self.slow[shards] = len(last) - 1 - last[::-1].argmin(axis=0)
            return reached
        members = [rank for rank in self.members.ranks if rank not in excused]
        # A round without any contribution is none, even if workers are excused.
        most: Array = self.last[:, shards].max(axis=0)
        return most if not members else np.minimum(self.last[:, shards][self.row[members]].min(axis=0), most)

    def is_held_up(self, shards: Array) -> bool:
        """Whether the next round of all these shards is known to be incomplete.

        It looks at one worker for each shard, which is enough for most contributions of a round, where `reach` looks at
        all: of thousands that is what a contribution costs.
        """
        if len(self.members.ranks) < MANY or self.early or self.joined or self.left:
            return False
        return bool((self.last[self.slow[shards], shards] <= self.ordered[shards]).all())

    def contributed(self, shard: int, rank: int, number: int) -> bool:
        """Whether a worker has contributed to a round that is not ordered yet."""
        if number <= max(int(self.last[self.row[rank], shard]), int(self.ordered[shard])):
            return True
        return rank in self.early.get(shard, {}).get(number, ())

    def missing(self, shard: int) -> list[int]:
        """Return the ranks that the shard's next round waits for."""
        number, excused = int(self.ordered[shard]) + 1, self.excused()
        ranks = (rank for rank in self.members.ranks if rank not in excused)
        return [rank for rank in ranks if not self.contributed(shard, rank, number)]

    def is_open(self, shard: int) -> bool:
        """Whether a worker has contributed to a round that is not ordered."""
        return int(self.last[:, shard].max()) > int(self.ordered[shard]) or bool(self.early.get(shard))

    def waits_for_itself(self, shard: int, rank: int, number: int) -> bool:
        """Whether a worker wants a round that its own push is missing from: it came before, so it was refused."""
        is_missing = number > self.ordered[shard] and not self.contributed(shard, rank, number)
        return is_missing and rank not in self.excused()

    def behind(self, shard: int, number: int, workers: Iterable[int], gone: Collection[int]) -> list[int]:
        """Return which of `workers` are too far behind for a pull after push `number` of an asynchronous store."""
        if self.staleness is None:
            return []
        excused, least = self.excused(), number - self.staleness
        return [r for r in workers if r not in excused and r not in gone and self.last[self.row[r], shard] < least]

    def failure(self, shard: int, ranks: Iterable[int], number: int) -> Failure | None:
        """Return why a pull of round `number` by or for workers cannot be answered; None: it can."""
        late = [self.late.get(shard, {}).pop(rank, None) for rank in ranks]
        return (self.failed.get(shard, {}).get(number) if self.is_sync else None) or next(filter(None, late), None)

    def level(self) -> None:
        """All workers have joined and begin anew together, in async where the farthest of them is."""
        self.joined.clear()
        if not self.is_sync:
            self.last[:, : self.count] = self.last[:, : self.count].max(axis=0)

    @property
    def is_usual(self) -> bool:
        """Whether it is synchronous, all workers take part, and nothing is noted of single shards."""
        noted = (self.early, self.failed, self.late, self.skipping, self.skipped, self.pending, self.joined, self.left)
        is_special = not self.is_sync or self.is_deterministic or self.needs_norms
        return not (is_special or any(noted) or any(self.again.values()))

    @property
    def is_relayed(self) -> bool:
        """Whether its shards are on other servers (`ps.relay`)."""
        return self.number < 0

    def set_round(self, shard: int, number: int) -> None:
        """Go on where saved rounds ended."""
        self.done[shard] = self.ordered[shard] = self.last[:, shard] = number
        self.skips[shard] = 0
        for known in (self.early, self.failed, self.skipping, self.skipped):
            known.pop(shard, None)

    def changed_rounds(self) -> Array:
        """Return for each shard the rounds that changed its value: those that were not skipped."""
        changed: Array = self.done[: self.count] - self.skips[: self.count]
        return changed

    def rounds(self, counts: Array) -> list[tuple[int, int]]:
        """Return (key number, the most of its shards' counts) of every key that has a shard here."""
        return [(key, max(int(counts[shard]) for shard in shards)) for key, shards in sorted(self.by_key.items())]
