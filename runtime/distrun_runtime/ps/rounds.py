"""The rounds of a server: which contributions came, which updates are ordered, and what came of them.

* A push to a synchronous store is a contribution of its worker to a round. When all workers have contributed to the
  round of a shard, Apply is ordered. A repeat is acknowledged and not counted. The engine may report later: the next
  round of the shard is ordered when this one is over, so that a pull of this one is lent its value before.
* A push to an asynchronous store is a Step of its own.
* Where the rule needs norms of whole values, an update stops halfway: this server's sums of squares go to the others
  (`norms`), and FinishUpdate follows when theirs are here. Only lamb and lars do: the section on norms can be left out
  at first.

How far a shard is, of synchronous stores (`shards.Store`): `last` is for each worker the last round that it has pushed,
`reach` the last round that all workers have pushed who are not excused (joined, left), `ordered` the last round whose
Apply went to the engine, and `done` the last one that is over: applied, failed or skipped. Ordered is at most one ahead
of done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.protocol.handshake import NodeIdentity
from distrun_runtime.protocol.message import Kind, Message, rows_of
from distrun_runtime.ps import role
from distrun_runtime.ps.arithmetic import Norms, Part, Peers, UpdateResult
from distrun_runtime.ps.counters import Counters
from distrun_runtime.ps.pulls import Pulls, names_of
from distrun_runtime.ps.replies import answer, refusal
from distrun_runtime.ps.shards import SYNC, Failure, Store, Turn


class Rounds:
    """Decides on updates.

    Arguments:
        me: who this server is.
        pulls: those that wait; they are told of every change.
    """

    def __init__(self, me: Callable[[], NodeIdentity], counters: Counters, pulls: Pulls) -> None:
        self.peers = Peers()
        """The other servers of the job."""
        self._me = me
        self._counters = counters
        self._pulls = pulls
        self._norms = Norms()
        self._scripts = 0
        """How many scripts of the job are over: norms of an earlier one are none of the present."""
        self._logged: set[int] = set()
        """Stores with a failed update that was logged."""

    @property
    def waits_for_norms(self) -> bool:
        """Whether any update does."""
        return bool(self._norms.open)

    def stop(self) -> None:
        """The job is ending: no norms are waited for any more."""
        self._norms.open.clear()

    def clear(self) -> None:
        """The job's next script begins."""
        self._norms.open.clear()
        self._scripts += 1
        self._logged.clear()

    def forget(self, number: int) -> None:
        """A store is closed."""
        for turn in list(self._norms.open):
            if turn.store == number:
                del self._norms.open[turn]
        self._logged.discard(number)

    def push(self, link: str, ranks: Sequence[int], batch: role.Batch, first: int = -1) -> list[role.Action]:
        """Take in the contributions of a synchronous push: of one worker, or a sum of several (`against_sum`).

        Arguments:
            first: the first worker of the relay that made the sum; -1: a worker has pushed.
        """
        store, shards = batch.store, batch.shards
        rounds = batch.entries["round"].astype(np.int64)
        skip = batch.message.body.get("skip")
        is_empty = batch.message.kind is Kind.PUSHPULL and not batch.message.payloads
        actions = self._pulls.before_push(link, ranks[0] if first < 0 else first, store, shards)
        taken = np.zeros(len(shards), np.bool_)
        for rank in ranks:
            taken |= self._count(store, rank, shards, rounds)
        if not taken.all():
            at = np.flatnonzero(taken)
            batch, rounds = role.Batch(store, shards[at], batch.message, batch.entries, batch.how, at), rounds[at]
        if not len(batch.shards):
            return actions
        for number, some in by_round(batch, rounds):
            if is_empty:
                actions += self._complete(store, some.shards)
            elif skip is None:
                actions += self._contribute(ranks[0], number, some)
            else:
                for shard in some.shards.tolist():
                    said = store.skipping.setdefault(shard, {}).setdefault(number, {})
                    said.update(dict.fromkeys(ranks, skip))
                actions += self._complete(store, some.shards)
        return actions

    def against_sum(self, ranks: Sequence[int], store: Store, shards: Array, rounds: Array) -> str:
        """Return why a sum of contributions cannot be taken in: some of them came before; empty: it can be."""
        known = np.maximum(store.last[np.ix_(store.row[list(ranks)], shards)], store.ordered[shards])
        if (rounds > known).all() and not store.early:
            return ""  # mostly
        for place, (shard, number) in enumerate(zip(shards.tolist(), rounds.tolist(), strict=True)):
            came = [rank for rank in ranks if store.contributed(shard, rank, number)]
            if came and len(came) < len(ranks):
                return f"entry {place} is a sum for {names_of(ranks)}, of which {names_of(came)} came before"
        return ""

    def _count(self, store: Store, rank: int, shards: Array, rounds: Array) -> Array:
        """Count contributions of a worker; return which of them are no repeats: the first one counts."""
        # Rounds that were ordered without this worker, while it was excused, do not wait for it any more.
        ahead = rounds - np.maximum(store.last[store.row[rank], shards], store.ordered[shards])
        if (ahead == 1).all():
            store.last[store.row[rank], shards] = rounds
            return np.ones(len(shards), np.bool_)
        each = zip(shards, rounds, ahead, strict=True)
        return np.array([self._count_one(store, rank, *one) for one in each], np.bool_)

    def _count_one(self, store: Store, rank: int, shard: int, number: int, ahead: int) -> bool:
        if ahead == 1:
            store.last[store.row[rank], shard] = number
            return True
        early = store.early.get(int(shard), {}).get(int(number), set())
        if ahead < 1 or rank in early:
            return False
        store.early.setdefault(int(shard), {}).setdefault(int(number), set()).add(rank)
        return True

    def _contribute(self, rank: int, number: int, batch: role.Batch) -> list[role.Action]:
        """Order what contributions to one round lead to."""
        store, shards = batch.store, batch.shards
        if store.is_held_up(shards):
            return [role.Work(role.Add(rank, number, batch))]
        reach = store.reach(shards)
        ready = (store.ordered[shards] + 1 == number) & (store.done[shards] + 1 == number) & (reach >= number)
        if store.skipping or store.early or not ready.all():
            return [role.Work(role.Add(rank, number, batch)), *self._complete(store, shards)]
        # The most frequent case: the last contributions of all these shards need not be kept for a moment.
        store.ordered[shards] = number
        return [role.Work(role.Apply(store, number, shards, rank=rank, last=batch), reports=True)]

    def _complete(self, store: Store, shards: Array) -> list[role.Action]:
        """Order the next rounds of some shards, as far as they are complete and the rounds before them are over."""
        if store.early:
            self._take_early(store, shards)
        following = store.ordered[shards] + 1
        ready = (store.reach(shards) >= following) & (store.ordered[shards] == store.done[shards])
        shards, following = shards[ready], following[ready]
        store.ordered[shards] = following
        actions: list[role.Action] = []
        for number in np.unique(following).tolist():
            some = shards[following == number]
            skipped = [shard for shard in some.tolist() if number in store.skipping.get(shard, ())]
            for shard in skipped:
                said = store.skipping[shard].pop(number)
                ranks = [r for r in store.members.ranks if store.last[store.row[r], shard] >= number]
                store.skipped.setdefault(shard, {})[number] = {rank: said.get(rank) for rank in ranks}
            if skipped:
                gone = np.array(skipped)
                actions.append(role.Work(role.Apply(store, number, gone, skip=True), reports=True))
                some = some[~np.isin(some, gone)]
            if len(some):
                actions.append(role.Work(role.Apply(store, number, some), reports=True))
        return actions

    def _take_early(self, store: Store, shards: Array) -> None:
        """Count contributions as usual ones that came beyond a gap which is closed: the missing worker was excused."""
        for shard in shards.tolist():
            known = store.early.get(shard, {})
            number = int(store.ordered[shard]) + 1
            while number in known:
                for rank in known.pop(number):
                    store.last[store.row[rank], shard] = max(int(store.last[store.row[rank], shard]), number)
                number += 1
            if not known:
                store.early.pop(shard, None)

    def complete_all(self, store: Store) -> list[role.Action]:
        """Order the rounds of a store that are complete now: a worker was excused."""
        return self._complete(store, np.arange(store.count)) if store.is_sync else []

    def refused(self, store: Store, rank: int, entries: Array, reason: str) -> list[role.Action]:
        """An async push was refused here: servers that took their shards of it do not wait for our norms."""
        actions: list[role.Action] = []
        if store.is_sync:
            return actions
        for shard, entry in zip(store.find(entries).tolist(), rows_of(entries), strict=True):
            if shard < 0:
                continue
            turn = Turn(store.number, entry.key, rank, entry.round)
            self._count_async(store, np.array([shard]), rank, np.array([entry.round]))
            if turn in self._norms.open:
                actions += [*self._tell(store, turn, {"error": reason}), *self._fail_here(store, turn, Failure(reason))]
            actions += self._pulls.advanced(store, np.array([shard]))
        return actions

    def _count_async(self, store: Store, shards: Array, rank: int, rounds: Array) -> Array:
        """Count a worker's pushes; return how many updates came since its last pull of each shard."""
        store.last[store.row[rank], shards] = np.maximum(store.last[store.row[rank], shards], rounds)
        store.done[shards] = np.maximum(store.done[shards], store.last[store.row[rank], shards])
        stale: Array = store.updates[shards] - store.seen[store.row[rank], shards]
        return stale

    # What the engine reports

    def applied(self, what: role.Apply, event: role.WorkDone) -> list[role.Action]:
        """A round is applied, or waits for norms."""
        store, shards = what.store, what.shards
        result = event.value if isinstance(event.value, UpdateResult) else UpdateResult()
        if event.error is not None:
            result = UpdateResult(dict.fromkeys(shards.tolist(), (event.error, event.traceback)))
        special = {*result.failed, *result.squares}
        actions: list[role.Action] = []
        good = shards if not special else shards[~np.isin(shards, list(special))]
        if len(good):
            self._counters.updated(len(self._note_over(store, good, what.round)))
            actions += self._pulls.advanced(store, good)
            for key in {int(store.key[shard]) for shard in good} if self._norms.open else ():
                actions += self._went_without(store, Turn(store.number, key, SYNC, what.round))
        for shard, (error, trace) in result.failed.items():
            failure = self._failure(store, shard, error, trace)
            turn = Turn(store.number, int(store.key[shard]), SYNC, what.round)
            self._note(store, shard, turn, failure)
            actions += [*self._log(store, failure), *self._go_on(store, shard)]
            actions += self._fail_others(store, turn, failure)
        for shard, squares in result.squares.items():
            store.halfway[shard] = True
            turn = Turn(store.number, int(store.key[shard]), SYNC, what.round)
            actions += self._norms_ready(store, shard, turn, squares)
        if store.early or (store.reach(good) > store.ordered[good]).any():
            actions += self._complete(store, good)
        return actions

    def stepped(self, what: role.Step, event: role.WorkDone) -> list[role.Action]:
        """An async push is applied, or half applied; it is acknowledged now in any case."""
        batch, store = what.batch, what.batch.store
        waiting: Mapping[int, tuple[float, ...]] = event.value or {}
        rounds = batch.entries["round"].astype(np.int64)
        actions: list[role.Action] = []
        if event.error is not None:
            failure = self._failure(store, int(batch.shards[0]), event.error, event.traceback)
            no = refusal(batch.message, failure.reason, "RuleError", failure.traceback)
            actions.append(role.Send(what.link, no))
        else:
            actions.append(role.Send(what.link, answer(batch.message)))
        stale = self._count_async(store, batch.shards, what.rank, rounds)
        if event.error is None and not waiting and not self._norms.open:
            self._counters.updated(len(batch.shards), what.rank, stale.tolist())
            store.updates[batch.shards] += 1
            store.fresh[batch.shards] = False
            return [*actions, *self._pulls.advanced(store, batch.shards)]
        pushes = list(zip(batch.shards.tolist(), rounds.tolist(), stale.tolist(), strict=True))
        for shard, number, each in pushes:
            # All of them before any goes on: what is counted and does not wait counts as over.
            if shard in waiting:
                store.pending.setdefault(shard, {})[what.rank, number] = each
        for shard, number, each in pushes:
            turn = Turn(store.number, int(store.key[shard]), what.rank, number)
            if shard in waiting:
                actions += self._norms_ready(store, shard, turn, waiting[shard])
            elif event.error is not None:
                failure = self._failure(store, shard, event.error, event.traceback)
                actions += self._fail_others(store, turn, failure)
            else:
                self._counters.updated(1, what.rank, [each])
                store.updates[shard] += 1
                store.fresh[shard] = False
                actions += self._went_without(store, turn)
            actions += self._pulls.advanced(store, np.array([shard]))
        return actions

    def finished(self, what: role.FinishUpdate, event: role.WorkDone) -> list[role.Action]:
        """The second half of an update is done, or has failed."""
        failure = None if event.error is None else self._failure(what.store, what.shard, event.error, event.traceback)
        logs = [] if failure is None else self._log(what.store, failure)
        self._note(what.store, what.shard, what.turn, failure)
        return [*logs, *self._go_on(what.store, what.shard)]

    def _note_over(self, store: Store, shards: Array, number: int) -> Array:
        """Rounds of shards are over, for good or ill; return those that were not skipped."""
        store.done[shards] = number
        for known in (store.failed, store.skipped):
            # A worker that pushed this round will not ask for one before the last.
            for shard in shards.tolist() if known else ():
                if shard in known:
                    rest = {each: what for each, what in known[shard].items() if each >= number - 1}
                    known[shard] = rest  # type: ignore[assignment]
                    if not rest:
                        del known[shard]
        if store.skipped:
            skipped = np.array([number in store.skipped.get(shard, ()) for shard in shards.tolist()])
            store.skips[shards[skipped]] += 1  # The value is as it was: nothing is counted.
            shards = shards[~skipped]
        store.fresh[shards] = store.halfway[shards] = False
        return shards

    def _go_on(self, store: Store, shard: int) -> list[role.Action]:
        """One update of one shard is over, for good or ill: go on."""
        one = np.array([shard])
        # The next round may have waited for this one to be through.
        return [*self._pulls.advanced(store, one), *(self._complete(store, one) if store.is_sync else [])]

    def _note(self, store: Store, shard: int, turn: Turn, failure: Failure | None) -> None:
        """Note that one update of one shard is over, for good or ill."""
        one = np.array([shard])
        if turn.rank == SYNC:
            if failure is None:
                self._counters.updated(len(self._note_over(store, one, turn.round)))
                return
            self._note_over(store, one, turn.round)
            store.failed.setdefault(shard, {})[turn.round] = failure
            # Who pushes on without asking in between is told by its next pull, whichever round that asks for.
            late = store.late.setdefault(shard, {})
            late.update({rank: late.get(rank, failure) for rank in store.members.ranks})
            return
        store.fresh[shard] = store.halfway[shard] = False
        pending = store.pending.get(shard, {})
        staleness = pending.pop((turn.rank, turn.round), 0)
        if not pending:
            store.pending.pop(shard, None)
        if failure is not None:
            store.late.setdefault(shard, {}).setdefault(turn.rank, failure)
        else:
            store.updates[shard] += 1
            self._counters.updated(1, turn.rank, [staleness])

    def _failure(self, store: Store, shard: int, error: BaseException, trace: str) -> Failure:
        name = store.names.get(int(store.key[shard]))
        what = "update" if isinstance(error, KVError) and error.is_of_device else "rule"
        return Failure(f"the {what} failed on {self._me().name} for key {name!r}: {words_of(error)}", trace)

    def _log(self, store: Store, failure: Failure) -> list[role.Action]:
        """Say a failure here: the push was acknowledged before, and a script may end without another pull."""
        if store.number in self._logged:
            return []
        self._logged.add(store.number)
        return [role.Log("ERROR", f"event=rule-failed store={store.number} {failure.reason}")]

    # Norms of whole values

    def _norms_ready(self, store: Store, shard: int, turn: Turn, squares: tuple[float, ...]) -> list[role.Action]:
        """A shard's update waits for norms."""
        shards = store.by_key[turn.key]
        parts = self._norms.mine(turn, shard, int(store.offset[shard]), int(store.length[shard]), squares)
        size = store.size(turn.key)
        length = int(store.length[shards].sum())
        if size is None and len(self.peers):
            what = f"the shape of key {store.names.get(turn.key)!r} is not known to {self._me().name}"
            self._norms.fail(turn, Failure(f"{what}, and the rule needs norms of the whole value"))
        elif any(_is_past(store, each, turn) for each in shards):
            self._norms.fail(turn, self._other_rule(store, turn))
        actions: list[role.Action] = []
        if len(parts) == len(shards) and size is not None and length < size:
            listed = [[part.offset, part.length, list(part.squares)] for part in parts]
            actions += self._tell(store, turn, {"parts": listed})
        return [*actions, *self._settle(store, turn)]

    def heard_norms(self, store: Store | None, message: Message) -> list[role.Action]:
        """Take in the NORMS of another server."""
        body = message.body
        if store is None or int(body["script"]) != self._scripts or int(body["key"]) not in store.by_key:
            return []
        if message.epoch != store.members.epoch:
            return []  # It is about an earlier store of this number.
        turn = Turn(store.number, int(body["key"]), int(body["rank"]), int(body["round"]))
        is_past = any(_is_past(store, shard, turn) for shard in store.by_key[turn.key])
        if "error" in body:
            if is_past:
                return []
            return self._fail_here(store, turn, Failure(str(body["error"]), str(body.get("traceback", ""))))
        if is_past:
            # Ours is over, and not with these parts: their rule is not the one that we had.
            return self._tell(store, turn, {"error": self._other_rule(store, turn).reason})
        self._norms.theirs(turn, [Part(int(at), int(size), tuple(map(float, its))) for at, size, its in body["parts"]])
        return self._settle(store, turn)

    def _settle(self, store: Store, turn: Turn) -> list[role.Action]:
        """Go on with the shards of ours whose norms are known, or will not be."""
        shards = store.by_key[turn.key]
        size = store.size(turn.key)
        settled = self._norms.settled(turn, int(store.length[shards].sum()) if size is None else size)
        if settled is None:
            return []
        ready, result = settled
        actions: list[role.Action] = []
        if not isinstance(result, Failure):
            del self._norms.open[turn]
            return [role.Work(role.FinishUpdate(store, shard, turn, result), reports=True) for shard in ready]
        for shard in ready:
            actions.append(role.Work(role.DropUpdate(store, shard, turn)))
            # All of them before anybody is answered: a pull of several shards fails once.
            self._note(store, shard, turn, result)
        for shard in ready:
            actions += self._go_on(store, shard)
        if all(_is_past(store, shard, turn) for shard in shards):
            del self._norms.open[turn]
        return actions

    def _fail_others(self, store: Store, turn: Turn, failure: Failure) -> list[role.Action]:
        """Our first half failed: so does the update of the key's other shards, here and elsewhere."""
        size = store.size(turn.key)
        if not store.needs_norms:
            return []
        actions: list[role.Action] = []
        if size is not None and int(store.length[store.by_key[turn.key]].sum()) < size:
            actions += self._tell(store, turn, {"error": failure.reason, "traceback": failure.traceback})
        return [*actions, *self._fail_here(store, turn, failure)]

    def _went_without(self, store: Store, turn: Turn) -> list[role.Action]:
        """An update was done without norms: a server that waits for ours has another rule, and is told."""
        if turn not in self._norms.open:
            return []
        failure = self._other_rule(store, turn)
        return [*self._tell(store, turn, {"error": failure.reason}), *self._fail_here(store, turn, failure)]

    def _fail_here(self, store: Store, turn: Turn, failure: Failure) -> list[role.Action]:
        self._norms.fail(turn, failure)
        return self._settle(store, turn)

    def _other_rule(self, store: Store, turn: Turn) -> Failure:
        what = f"the rule was changed while push {turn.round} of key {store.names.get(turn.key)!r} was under way"
        return Failure(f"{what}: {self._me().name} applied it with another one")

    def _tell(self, store: Store, turn: Turn, body: Mapping[str, Any]) -> list[role.Action]:
        facts = {"script": self._scripts, "key": turn.key, "rank": turn.rank, "round": turn.round, **body}
        return self.peers.tell(Message(Kind.NORMS, store=turn.store, epoch=store.members.epoch, body=facts))


def by_round(batch: role.Batch, rounds: Array) -> Iterator[tuple[int, role.Batch]]:
    """Yield the rounds that a batch contributes to, each with its part of the batch."""
    first = int(rounds[0])
    if (rounds == first).all():
        yield first, batch
        return
    entries = np.arange(len(batch.shards)) if batch.at is None else batch.at
    for number in np.unique(rounds).tolist():
        some = rounds == number
        part = role.Batch(batch.store, batch.shards[some], batch.message, batch.entries, batch.how, entries[some])
        yield number, part


def _is_past(store: Store, shard: int, turn: Turn) -> bool:
    """Whether an update of a shard is over, for good or ill."""
    if turn.rank == SYNC:
        return bool(store.done[shard] >= turn.round)
    is_pending = (turn.rank, turn.round) in store.pending.get(shard, ())
    return bool(store.last[store.row[turn.rank], shard] >= turn.round) and not is_pending


def words_of(err: Any) -> str:
    """Return the words of an error; its type if it has none."""
    return str(err) or type(err).__name__
