"""What a server is asked that is no push and no pull: rules, saved states, counters, profiles. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from distrun_runtime.protocol.handshake import NodeIdentity
from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.ps import role, statefile, work
from distrun_runtime.ps.profile import Recorder
from distrun_runtime.ps.relay import Relay
from distrun_runtime.ps.replies import answer, failed, refusal
from distrun_runtime.ps.shards import Store
from distrun_runtime.ps.stats import Counters

Stores = dict[int, Store]


class Control:
    """Answers these requests; None: it is not one of them."""

    def __init__(self, me: Callable[[], NodeIdentity], counters: Counters, recorder: Recorder, relay: Relay) -> None:
        self._me = me
        self._relay = relay
        self._counters = counters
        self._recorder = recorder
        self._held: list[Message] = []
        """Requests that wait until no update of their store is under way."""

    def from_scheduler(self, message: Message, stores: Stores) -> list[role.Action] | None:
        """Take in a request of the scheduler."""
        if message.kind is Kind.RULE:
            kind = work.TryRule if message.body.get("check") else work.SetRule
            return [role.Work(kind(message.store, message.body["spec"], message), reports=True)]
        if message.kind is Kind.LOAD and message.body["action"] != "stage":
            return [role.Work(work.Load(message.store, message), reports=True)]
        if message.kind in (Kind.SAVE, Kind.LOAD):
            return self._states(message, stores)
        return None

    def from_worker(self, link: role.Link, message: Message, stores: Stores, waiting: int) -> list[role.Action] | None:
        """Take in a request of a worker; `waiting`: how many pulls of the store wait."""
        if message.kind is Kind.STATS:
            return [role.Send(link, answer(message, self._stats(stores.get(message.store), waiting)))]
        if message.kind is Kind.PROFILE:
            return [role.Send(link, self._profile(message))]
        if message.kind is Kind.RELEASE:
            return [role.Work(work.Release(link, message), reports=True)]
        return None

    def tick(self, stores: Stores) -> list[role.Action]:
        """Go on with what waited for updates."""
        held, self._held = self._held, []
        return [action for message in held for action in self._states(message, stores)]

    def forget(self) -> None:
        """The job's next script begins: nobody waits any more, and nothing was counted."""
        self._held.clear()
        self._counters.reset()
        if self._recorder.is_on:
            self._recorder.stop("")

    def done(self, event: role.Done, stores: Stores) -> list[role.Action] | None:
        """The executor has done work that was asked for here."""
        what = event.work
        if isinstance(what, work.Release):
            return [role.Send(what.link, answer(what.message) if event.error is None else failed(what.message, event))]
        if not isinstance(what, (work.TryRule, work.SetRule, work.Save, work.Load)):
            return None
        if event.error is not None:
            return [role.Send(role.SCHEDULER_LINK, failed(what.message, event))]
        body: dict[str, Any] = {}
        if isinstance(what, work.SetRule):
            stores.setdefault(what.store, Store(what.store, self._me().workers)).has_rule = what.spec is not None
        elif isinstance(what, work.Save):
            store = stores.get(what.store)
            is_sync = store is not None and store.is_sync
            body = {**event.value, "rounds": store.rounds(store.changed_rounds()) if store and is_sync else []}
        elif isinstance(what, work.Load) and what.message.body["action"] == "commit":
            rounds = {int(number): int(done) for number, done in what.message.body.get("rounds", ())}
            _set_rounds(stores.get(what.store), rounds)
            fetched = self._relay.loaded(what.store, rounds)
            return [role.Send(role.SCHEDULER_LINK, answer(what.message, body)), *fetched]
        return [role.Send(role.SCHEDULER_LINK, answer(what.message, body))]

    # Saved states

    def _states(self, message: Message, stores: Stores) -> list[role.Action]:
        open_here = self._relay.open_round(message.store, _names_in(message))
        if open_here is not None:
            return [role.Send(role.SCHEDULER_LINK, refusal(message, _is_open(*open_here)))]
        store = stores.get(message.store)
        if store is not None and (store.pending or (store.ordered > store.done).any()):
            # An update waits for norms of other servers; they are on their way.
            self._held.append(message)
            return []
        wrong = _open_round(store, message, self._me().workers) if store is not None and store.is_sync else ""
        if wrong:
            return [role.Send(role.SCHEDULER_LINK, refusal(message, wrong))]
        me = self._me()
        body = {**message.body, "file": statefile.server_file(me.rank), "host": me.host}
        kind = work.Save if message.kind is Kind.SAVE else work.Load
        return [role.Work(kind(message.store, replace(message, body=body)), reports=True)]

    # Counters and profiles

    def _stats(self, store: Store | None, waiting: int) -> dict[str, object]:
        is_used = store is not None and store.count > 0
        return {
            "server": self._me().name,
            "host": self._me().host,
            "keys": len(store.by_key) if store is not None else 0,
            "pieces": store.count if store is not None else 0,
            "rounds": int(store.changed_rounds().max()) if store is not None and is_used else 0,
            "queue": waiting,
            "device": "" if store is None else store.device,
            **self._counters.to_json(),
        }

    def _profile(self, message: Message) -> Message:
        me = self._me()
        action = message.body["action"]
        if action == "start":
            if self._recorder.is_on:
                return refusal(message, "%s on host %s is being profiled already" % (me.name, me.host))
            self._recorder.start()
            return answer(message)
        if not self._recorder.is_on:
            return refusal(message, "%s on host %s is not being profiled" % (me.name, me.host))
        return answer(message, {"events": self._recorder.stop("%s@%s" % (me.name, me.host))})


def _open_round(store: Store, message: Message, workers: int) -> str:
    """Return that a round is open, in words: some workers pushed more often than others; empty: none is."""
    names = _names_in(message)
    for shard in range(store.count):
        key = int(store.key[shard])
        if key in names and store.is_open(shard):
            number = int(store.ordered[shard]) + 1
            pushed = [rank for rank in range(workers) if store.contributed(shard, rank, number)]
            return _is_open(number, names[key], pushed, store.missing(shard))
    return ""


def _names_in(message: Message) -> dict[int, Any]:
    """Return the keys that a SAVE or LOAD is about, by their numbers."""
    return {int(pair[0]): pair[-1] for pair in message.body["names" if message.kind is Kind.SAVE else "numbers"]}


def _is_open(number: int, name: Any, pushed: Iterable[int], missing: Iterable[int]) -> str:
    return (
        "round %d of key %r is open: %s pushed it, %s did not; states are saved and loaded when all workers"
        " have pushed equally often"
    ) % (number, name, _names(pushed) or "nobody", _names(missing))


def _set_rounds(store: Store | None, rounds: Mapping[int, int]) -> None:
    if store is None:
        return
    store.fresh[: store.count] = True
    store.late.clear()
    for shard in range(store.count):
        number = rounds.get(int(store.key[shard]))
        if number is not None:
            store.set_round(shard, number)


def _names(ranks: Iterable[int]) -> str:
    return ", ".join("worker-%d" % rank for rank in sorted(ranks))
