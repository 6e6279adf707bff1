"""What all workers do together in the stores of a job: open, declare keys, save, wait for each other, leave. Pure.

Call i of a store is gathered until every worker that has not left the store has made it; the first difference is
the error of all of them. A worker that fails at a call says so by a call of that number with an `error`, which is the
error of all, too. One that stops waiting for the others may take its call back.

A worker may start over, as when a notebook cell is run again: it creates another store instead of using the one it has
just created, where the others wait for it. It is told to use that one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.ps import role
from distrun_runtime.ps.checkpoint import Checkpoints, Subject
from distrun_runtime.ps.collective import Call, Gathering, difference, opened, verb
from distrun_runtime.ps.errands import Errands
from distrun_runtime.ps.keys import Keys
from distrun_runtime.ps.replies import answer, refusal
from distrun_runtime.ps.roster import LEFT, Member, Roster


@dataclass
class _Refusal:
    """A collective call that failed."""

    reason: str
    missing: set[int]
    """Workers that have not made it yet: each hears the reason when it does."""


@dataclass
class _Store:
    """What the workers agreed on for one store."""

    awaited: set[int]
    """Workers that make calls: they have neither left the store nor ended."""
    type: str = ""
    opened: str = ""
    """What was created, in words: kind and bound."""
    keys: Keys = field(default_factory=Keys)
    gatherings: dict[int, Gathering] = field(default_factory=dict)
    filling: dict[int, Gathering] = field(default_factory=dict)
    """Declared keys whose first values rank 0 is sending to the servers."""
    refused: dict[int, _Refusal] = field(default_factory=dict)
    """Collective calls that failed and that not all workers have made."""
    joined: dict[int, Call] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    """Workers that left this store for good."""

    def refuse(self, number: int, reason: str, calls: Iterable[int]) -> None:
        """Note that a call failed, which workers `calls` have made."""
        # Who has joined instead waits for all others to join, and will never make it.
        elsewhere = {rank for rank, part in self.joined.items() if part.number == number}
        missing = self.awaited.difference(calls, elsewhere)
        if missing:
            self.refused[number] = _Refusal(reason, missing)

    def told(self, number: int, rank: int) -> str:
        """Return why a call failed, for a worker that makes it now; empty: it did not."""
        refusal = self.refused.get(number)
        if refusal is None:
            return ""
        self._hear(number, rank)
        return refusal.reason

    def gone(self, rank: int) -> None:
        """A worker makes no more calls."""
        self.awaited.discard(rank)
        for number in list(self.refused):
            self._hear(number, rank)

    def _hear(self, number: int, rank: int) -> None:
        self.refused[number].missing.discard(rank)
        if not self.refused[number].missing:
            del self.refused[number]


class Assembly:
    """The collective calls of all stores."""

    def __init__(self, workers: int, roster: Roster, errands: Errands, checkpoints: Checkpoints) -> None:
        self._workers = workers
        self._checkpoints = checkpoints
        self._roster = roster
        self._errands = errands
        self._stores: dict[int, _Store] = {}

    def gather(self, call: Call) -> list[role.Action]:
        """Take in one worker's OPEN, KEYS, BARRIER, SAVE or LOAD.

        One with an `error`, what the worker found before it came here, fails for all.
        """
        store = self._store(call)
        if call.message.body.get("take_back"):
            return self._taken_back(store, call)
        refused = store.told(call.number, call.rank)
        if refused:
            return [_refuse(call, refused)]
        if call.message.body.get("error"):
            return self._failed(store, call)
        # First: what raises here, since the message lacks something, must not count as a call.
        against = _against(store, call)
        self._awaiting(call.rank, call.message)
        gathering = store.gatherings.setdefault(call.number, Gathering())
        # A worker that has joined waits for all others to join: it will never make this call.
        elsewhere = [part for part in store.joined.values() if part.number == call.number]
        wrong = gathering.add(call) or (difference(elsewhere[0], call) if elsewhere else "")
        wrong = wrong or against
        if wrong:
            return _fail(store, call.number, wrong)
        gone = [member for member in self._roster.of_role("worker") if member.state == LEFT]
        missing = [member for member in gone if member.who.rank not in {*gathering.calls, *store.left}]
        if missing:
            return _fail(store, call.number, _gone(missing[0], call.message))
        return self._complete(store, call.number) or self._started_over()

    def _failed(self, store: _Store, call: Call) -> list[role.Action]:
        """A worker fails at a call: it fails for all."""
        gathering = store.gatherings.setdefault(call.number, Gathering())
        gathering.calls[call.rank] = call
        reason = "worker-%d failed at %s: %s" % (call.rank, verb(call.message), call.message.body["error"])
        return _fail(store, call.number, reason)

    def _taken_back(self, store: _Store, call: Call) -> list[role.Action]:
        """A worker takes back its call of this number, unless all have made theirs."""
        gathering = store.gatherings.get(call.number)
        before = gathering.calls.pop(call.rank, None) if gathering is not None else None
        actions: list[role.Action] = []
        if before is not None:
            actions.append(_refuse(before, "it was taken back"))
        elif call.rank == 0 and call.number in store.filling:
            reason = "worker-0 has stopped waiting for %s and does not send the values" % verb(call.message)
            unfilled = self._unfilled(store, call.number, reason)
            return [*unfilled, role.Send(call.link, answer(call.message, {"is_taken": False, "failed": True}))]
        if gathering is not None and not gathering.calls:
            del store.gatherings[call.number]
        return [*actions, role.Send(call.link, answer(call.message, {"is_taken": before is not None}))]

    def _started_over(self) -> list[role.Action]:
        """Tell workers that create another store to use one that they have created and the others wait for them in."""
        actions: list[role.Action] = []
        for store in self._stores.values():
            for number, gathering in list(store.gatherings.items()):
                for rank, part in list(gathering.calls.items()):
                    there = self._awaiting(rank, part.message)
                    if there is not None:
                        del gathering.calls[rank]
                        actions.append(role.Send(part.link, answer(part.message, {"instead": there})))
                if not gathering.calls:
                    del store.gatherings[number]
        return actions

    def _awaiting(self, rank: int, message: Message) -> int | None:
        """Return the store in which others wait for a worker that creates another like it; None: there is none."""
        if message.kind is not Kind.OPEN:
            return None
        for number in message.body.get("unused", ()):
            there = self._stores.get(int(number))
            if there is None or there.opened != opened(message.body):
                continue
            if any(rank not in gathering.calls for gathering in there.gatherings.values()):
                return int(number)
        return None

    def inited(self, call: Call) -> list[role.Action]:
        """Rank 0 has sent the first values to the servers (INIT), or could not: tell the others."""
        store = self._store(call)
        if call.number not in store.filling:
            return [_refuse(call, "INIT without KEYS")]
        answered = role.Send(call.link, answer(call.message))
        error = str(call.message.body.get("error", ""))
        if error:
            return [answered, *self._unfilled(store, call.number, error)]
        gathering = store.filling.pop(call.number)
        body = store.keys.told(gathering.calls[0].message.body["records"])
        others = [part for part in gathering.calls.values() if part.rank != call.rank]
        return [answered, *(role.Send(part.link, answer(part.message, body)) for part in others)]

    def _unfilled(self, store: _Store, number: int, reason: str) -> list[role.Action]:
        """The values of declared keys will not come from rank 0: tell the others."""
        gathering = store.filling.pop(number)
        first = gathering.calls.pop(0).message
        if not first.body.get("assign"):
            store.keys.take_back([record["key"] for record in first.body["records"]])
        return [_refuse(part, reason) for part in gathering.calls.values()]

    def join(self, call: Call) -> list[role.Action]:
        """A worker contributes zero to every round from here on, until all have joined."""
        store = self._store(call)
        refused = store.told(call.number, call.rank)
        if refused:
            return [_refuse(call, refused)]
        gathering = store.gatherings.get(call.number)
        if gathering is not None:
            return _fail(store, call.number, gathering.add(call))
        store.joined[call.rank] = call
        told = Message(Kind.JOIN, store=call.message.store, body={"rank": call.rank})
        return [*self._tell_servers(told), *self._all_joined(call.message.store, store)]

    def leave(self, call: Call) -> list[role.Action]:
        """A worker leaves one store for good."""
        store = self._store(call)
        store.left.add(call.rank)
        store.gone(call.rank)
        told = Message(Kind.LEFT, store=call.message.store, body={"rank": call.rank})
        servers = self._roster.alive("server")
        actions = self._errands.send(told, servers, lambda _: [role.Send(call.link, answer(call.message))])
        for number in list(store.gatherings):
            actions += self._complete(store, number)
        return [*actions, *self._all_joined(call.message.store, store)]

    def ended(self, gone: Member) -> list[role.Action]:
        """A worker said BYE: what waited for it fails, and who joined does not wait for it."""
        actions: list[role.Action] = []
        for number, store in self._stores.items():
            store.gone(gone.who.rank)
            for at, gathering in list(store.gatherings.items()):
                if gone.who.rank not in {*gathering.calls, *store.left}:
                    part = next(iter(gathering.calls.values()))
                    actions += _fail(store, at, _gone(gone, part.message))
            for at in list(store.filling) if gone.who.rank == 0 else ():
                what = verb(store.filling[at].calls[0].message)
                text = "%s has ended (BYE) and will never send the values of %s" % (gone.who, what)
                actions += self._unfilled(store, at, text)
            actions += self._all_joined(number, store)
        return actions

    def remind(self, now: float) -> list[role.Action]:
        """Tell the workers of a gathering that takes long whom it waits for."""
        actions: list[role.Action] = []
        for number, store in self._stores.items():
            for gathering in store.gatherings.values():
                gathering.patience = gathering.patience or role.Patience(now)
                if gathering.patience.is_due(now):
                    actions += self._reminders(number, store, gathering, now)
        return actions

    def _reminders(self, number: int, store: _Store, gathering: Gathering, now: float) -> list[role.Action]:
        assert gathering.patience is not None
        missing = sorted(set(range(self._workers)) - set(gathering.calls) - store.left)
        parts = list(gathering.calls.values())
        text = "waiting for %s to call %s" % (", ".join("worker-%d" % rank for rank in missing), verb(parts[0].message))
        body = {"text": text, "seconds": now - gathering.patience.since}
        return [
            role.Send(part.link, Message(Kind.WAITING, store=number, request=part.message.request, body=body))
            for part in parts
        ]

    def _store(self, call: Call) -> _Store:
        number = call.message.store
        if number not in self._stores:
            ended = {member.who.rank for member in self._roster.of_role("worker") if member.state == LEFT}
            self._stores[number] = _Store(set(range(self._workers)) - ended)
        return self._stores[number]

    def _complete(self, store: _Store, number: int) -> list[role.Action]:
        gathering = store.gatherings[number]
        if len(gathering.calls) < self._workers - len(store.left - set(gathering.calls)):
            return []
        del store.gatherings[number]
        call = next(iter(gathering.calls.values())).message
        if call.kind is Kind.OPEN:
            store.type, store.opened = str(call.body.get("type", "")), opened(call.body)
        if call.kind in (Kind.OPEN, Kind.BARRIER):
            return [role.Send(part.link, answer(part.message)) for part in gathering.calls.values()]
        if 0 not in gathering.calls:
            return _refuse_all(store, number, gathering, "worker-0, %s, has left the store" % _DUTY[call.kind])
        if call.kind is Kind.KEYS:
            store.filling[number] = gathering
            return _declare(store, gathering)
        subject = Subject(call.store, store.type, store.keys)
        if call.kind is Kind.SAVE:
            return self._checkpoints.save(subject, gathering.calls)
        return self._checkpoints.load(subject, gathering.calls)

    def _all_joined(self, number: int, store: _Store) -> list[role.Action]:
        present = {member.who.rank for member in self._roster.alive("worker")} - store.left
        if not store.joined or not present <= set(store.joined):
            return []
        # The servers forget who joined before any worker hears that all have: its next push is a new round of all.
        parts = list(store.joined.values())
        store.joined.clear()
        told = Message(Kind.JOIN, store=number, body={"rank": parts[0].rank, "all": True})
        servers = self._roster.alive("server")
        return self._errands.send(
            told, servers, lambda _: [role.Send(part.link, answer(part.message)) for part in parts]
        )

    def _tell_servers(self, message: Message) -> list[role.Action]:
        return self._errands.send(message, self._roster.alive("server"), lambda _: [])


_DUTY = {
    Kind.KEYS: "whose values count",
    Kind.SAVE: "who writes the manifest",
    Kind.LOAD: "who reads the manifest",
}


def _declare(store: _Store, gathering: Gathering) -> list[role.Action]:
    first = gathering.calls[0].message
    records = first.body["records"]
    body = store.keys.told(records) if first.body.get("assign") else store.keys.declare(records)
    # Rank 0 goes to fill the servers now; the others hear when it has (INIT), so that nobody reads too early.
    return [role.Send(gathering.calls[0].link, answer(first, body))]


def _against(store: _Store, call: Call) -> str:
    body = call.message.body
    if call.message.kind is not Kind.KEYS:
        return ""
    return store.keys.against(body["records"], bool(body.get("assign")))


def _fail(store: _Store, number: int, reason: str) -> list[role.Action]:
    return _refuse_all(store, number, store.gatherings.pop(number), reason)


def _refuse_all(store: _Store, number: int, gathering: Gathering, reason: str) -> list[role.Action]:
    store.refuse(number, reason, gathering.calls)
    return [_refuse(part, reason) for part in gathering.calls.values()]


def _refuse(call: Call, reason: str) -> role.Action:
    return role.Send(call.link, refusal(call.message, reason))


def _gone(member: Member, message: Message) -> str:
    return "%s has ended (BYE) and will never call %s: all workers must" % (member.who, verb(message))
