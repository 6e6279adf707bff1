"""Relays: a server that adds what the workers of its host push for servers of other hosts, and sends the sums.

Between hosts a link is slow, and on a host memory is fast. So workers of one host push what belongs to a server
elsewhere to a server of their own host, their relay. It adds up what they push, and sends each round's sum to the
server that has the shards, their owner, with the ranks that it is of. What comes of a round is fetched once, when the
first of the workers pulls it, and all of them read it here. To the owner a sum is one push for several workers.

A sum leaves when all workers of the host have contributed that are to contribute. It leaves earlier, as a part, when
the owner must know: a worker whose calls are to be settled (SETTLE: before a barrier, `join`, saved
states, its end), a pull that has waited for a while, a push that is no usual one (its worker has left out a round, or
skips this one). So a contribution leaves exactly once, and the owner then answers correctly.

The shards have a table (`shards.Store`) and arrays (`values.Values`) as any others; here `done` is the round of the
value that is in the array, -1 where there is none. The sum of a round is made in the same array, and leaves from there.
Which values go by relays is decided in `store.transfers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.ops.partition import Shard
from distrun_runtime.protocol.handshake import NodeIdentity
from distrun_runtime.protocol.message import DTYPE_SIZES, ENTRY, Kind, Membership, Message, Payload, rows_of, sizes_of
from distrun_runtime.ps import checks, role
from distrun_runtime.ps.arithmetic import Peers
from distrun_runtime.ps.pulls import Pull, Pulls, names_of
from distrun_runtime.ps.replies import answer, refusal
from distrun_runtime.ps.rounds import by_round, words_of
from distrun_runtime.ps.routing import MESSAGE_BYTES, message_ends
from distrun_runtime.ps.shards import Failure, Store, relayed

PART_S = 1.0
"""How long a pull waits until the parts of its round's sum that are here leave: sooner than its owner says for whom it
waits (`role.FIRST_NOTE_S`)."""


def relays_of(nodes: Iterable[NodeIdentity], host: str) -> dict[int, int]:
    """Return the relay on `host` of each server of another host, by rank.

    There is none unless `host` has several workers: their contributions are added before they leave it. Its servers
    share the others among them. Servers beyond those that the nodes are told of (`NodeIdentity.servers`) keep no
    values.
    """
    return relays_of_hosts([node for node in nodes if node.role == "server" or node.host == host]).get(host, {})


def relays_of_hosts(nodes: Sequence[NodeIdentity]) -> dict[str, dict[int, int]]:
    """Return `relays_of` by host, of all hosts that have any. The nodes, of which there may be many, are read once."""
    workers = Counter(node.host for node in nodes if node.role == "worker")
    servers: dict[str, list[int]] = {}
    for node in nodes:
        if node.role == "server" and workers[node.host] > 1:
            servers.setdefault(node.host, []).append(node.rank)
    keepers = sorted((node.rank, node.host) for node in nodes if node.role == "server" and node.rank < node.servers)
    found: dict[str, dict[int, int]] = {}
    for host, ranks in servers.items():
        here = sorted(ranks)
        relays = {owner: here[owner % len(here)] for owner, other in keepers if other != host}
        if relays:
            found[host] = relays
    return found


def workers_of(nodes: Iterable[NodeIdentity], host: str) -> tuple[int, ...]:
    """Return the ranks of the workers of a host."""
    return tuple(sorted(node.rank for node in nodes if node.role == "worker" and node.host == host))


@dataclass(eq=False)
class _Relayed:
    """The shards of one store that are on other servers; flat arrays have an element for each of them."""

    store: Store
    members: tuple[int, ...]
    """The workers of this host that share the store."""
    owner: Array
    """The rank of the server that has it."""
    sent: Array
    """(members, shards): the round of the last contribution that has left. All between it and `Store.last` are here."""
    fetch: Array
    """Number of the last PULL that is under way; 0: none is."""
    asked: Array
    """The round that it asks for."""
    changes: Array
    """How often a value was replaced without a round: what was asked for before is not wanted any more."""

    def add(self, owner: int, shards: list[Shard]) -> Array:
        """Take in new shards; return their indices."""
        store, more = self.store, len(shards)
        added = store.add(shards)
        store.done[added] = -1
        self.owner = np.concatenate([self.owner, np.full(more, owner)])
        self.sent = np.concatenate([self.sent, np.zeros((len(self.sent), more), np.int64)], axis=1)
        self.fetch = np.concatenate([self.fetch, np.zeros(more, np.int64)])
        self.asked = np.concatenate([self.asked, np.zeros(more, np.int64)])
        self.changes = np.concatenate([self.changes, np.zeros(more, np.int64)])
        return added

    def forget_values(self, shards: Array) -> None:
        """Values are others from now on."""
        self.store.done[shards] = -1
        self.fetch[shards] = 0
        self.changes[shards] += 1

    @property
    def held(self) -> Array:
        """(members, shards): whether contributions of a worker are here that have not left."""
        found: Array = self.sent < self.store.last[:, : self.store.count]
        return found


@dataclass(frozen=True, eq=False)
class _Fetch:
    """A PULL that its owner has not answered."""

    number: int
    of: _Relayed
    shards: Array
    entries: Array
    changes: Array
    """`_Relayed.changes` of the shards when it was sent."""
    asker: int | None
    """The worker that asked for a round to which it has contributed nothing here: the owner knows whether it has."""


@dataclass
class _Settling:
    """A SETTLE that waits until owners have acknowledged sums."""

    link: str
    message: Message
    missing: set[int] = field(default_factory=set)


class Relay:
    """The relay of one server.

    Arguments:
        peers: the other servers.
        pulls: those of the server; a relay's pulls are among them.
    """

    def __init__(self, me: Callable[[], NodeIdentity], workers: int, peers: Peers, pulls: Pulls) -> None:
        self._me = me
        self._workers = workers
        """How many the job has."""
        self._peers = peers
        self._pulls = pulls
        self.members: tuple[int, ...] = ()
        """The workers of this host."""
        self.stores: dict[int, _Relayed] = {}
        """By the store's number."""
        self._requests = 0
        self._sums: dict[int, int] = {}
        """Sums that their owners have not acknowledged: number of the PUSH to the store."""
        self._fetches: dict[int, _Fetch] = {}
        self._settling: list[_Settling] = []

    def learn(self, nodes: list[NodeIdentity]) -> list[role.Action]:
        """Take in the job's roster; return what is to be said of it."""
        me = self._me()
        self.members = workers_of(nodes, me.host)
        owners = [owner for owner, relay in relays_of(nodes, me.host).items() if relay == me.rank]
        if not owners:
            return []
        names = ",".join(f"server-{owner}" for owner in owners)
        return [role.Log("INFO", f"event=relay stands_in_for={names} workers={names_of(self.members)}")]

    def against(self, rank: int) -> str:
        """Return why this is no relay for a worker; empty: it is."""
        is_here = rank in self.members
        return "" if is_here else f"{self._me().name} is no relay for worker-{rank}: they are on two hosts"

    def store(self, number: int) -> Store | None:
        """Return the table of a store's shards on other servers; None: there are none."""
        found = self.stores.get(number)
        return None if found is None else found.store

    def clear(self) -> None:
        """The job's next script begins. Numbers go on, so that a late answer is to nothing of it."""
        self.stores.clear()
        self._sums.clear()
        self._fetches.clear()
        self._settling.clear()

    def forget(self, number: int) -> Store | None:
        """A store is closed; return the table of its shards, if there is one.

        All sums of it are acknowledged, unless one of its workers was lost: then no worker waits for that.
        """
        of = self.stores.pop(number, None)
        self._sums = {each: store for each, store in self._sums.items() if store != number}
        self._settling = [each for each in self._settling if each.message.store != number]
        self._fetches = {each: fetch for each, fetch in self._fetches.items() if fetch.of is not of}
        return None if of is None else of.store

    def declare(self, link: str, message: Message, members: Membership) -> list[role.Action]:
        """Take in which shards a server has (INIT without values), or that their values were replaced (`assign`).

        Arguments:
            members: the workers of the store.
        """
        of = self.stores.get(message.store)
        if of is None:
            nothing = np.zeros(0, np.int64)
            store = Store(relayed(message.store), self._workers, self._me().rank, members)
            here = tuple(rank for rank in self.members if rank in members.ranks)
            sent = np.zeros((len(members.ranks), 0), np.int64)
            of = _Relayed(store, here, nothing, sent, nothing, nothing, nothing)
            self.stores[message.store] = of
        store = of.store
        store.names.update({int(number): name for number, name in message.body.get("names", [])})
        shards = store.find(message.entries)
        known = shards[shards >= 0]
        if not checks.fit(store, message.entries[shards >= 0], known):
            return [role.Send(link, refusal(message, f"{self._me().name} knows these shards with other sizes"))]
        of.forget_values(known)
        if message.body.get("delete"):
            batch = role.Batch(store, known, message, message.entries)
            return [role.Work(role.Forget(batch), reports=True), role.Send(link, answer(message))]
        actions: list[role.Action] = []
        if len(known) < len(shards):
            rank = self._me().rank
            new = rows_of(message.entries[shards < 0])
            places = [Shard(rank, each.offset, each.length, each.key, each.dtype, 0) for each in new]
            added = of.add(int(message.body["owner"]), places)
            actions.append(role.Work(role.Reserve(store, added), reports=True))
        return [*actions, *self._fetch_again(of, known), role.Send(link, answer(message))]

    # Contributions

    def push(self, rank: int, batch: role.Batch) -> list[role.Action]:
        """Take in contributions of a worker of this host."""
        of, shards = self.stores[relayed(batch.store.number)], batch.shards
        rounds = batch.entries["round"].astype(np.int64)
        at = np.flatnonzero(rounds > of.store.last[of.store.row[rank], shards])
        if len(at) < len(shards):  # the others are repeats
            batch, rounds = role.Batch(of.store, shards[at], batch.message, batch.entries, batch.how, at), rounds[at]
        actions: list[role.Action] = []
        for number, some in by_round(batch, rounds) if len(at) else ():
            actions += self._contribute(of, rank, number, some)
        return actions

    def _contribute(self, of: _Relayed, rank: int, number: int, batch: role.Batch) -> list[role.Action]:
        store, shards = of.store, batch.shards
        actions: list[role.Action] = []
        note = batch.message.body.get("skip")
        is_usual = note is None and bool((store.last[store.row[rank], shards] == number - 1).all())
        if not is_usual:
            actions += self._send_held(of, shards)
            of.sent[of.store.row[rank], shards] = number - 1
        store.last[store.row[rank], shards] = number
        if note is not None:
            return [*actions, *self._forward(of, number, shards, body={"skip": note})]
        ready = self._reach(of, shards) >= number
        if not is_usual or ready.all():
            return [*actions, *self._forward(of, number, shards, last=batch)]
        actions.append(role.Work(role.Add(rank, number, batch), reports=True))
        return [*actions, *self._forward(of, number, shards[ready])]

    def _reach(self, of: _Relayed, shards: Array) -> Array:
        """Return the last round of each shard that all workers of this host have contributed to who are to do so."""
        excused = of.store.excused()
        ranks = [rank for rank in of.members if rank not in excused] or list(of.members)
        reach: Array = of.store.last[np.ix_(of.store.row[ranks], shards)].min(axis=0)
        return reach

    def _send_held(self, of: _Relayed, shards: Array, *, only_complete: bool = False) -> list[role.Action]:
        """Send what is here of some shards' rounds: all, or the rounds that are complete."""
        actions: list[role.Action] = []
        while len(shards):
            held = of.held[:, shards]
            # Of each shard, the first round with contributions that have not left.
            first = np.where(held, of.sent[:, shards], np.iinfo(np.int64).max - 1).min(axis=0) + 1
            due = held.any(axis=0)
            if only_complete:
                due &= self._reach(of, shards) >= first
            shards, first = shards[due], first[due]
            for number in np.unique(first).tolist():
                actions += self._forward(of, number, shards[first == number])
        return actions

    def _forward(
        self,
        of: _Relayed,
        number: int,
        shards: Array,
        *,
        last: role.Batch | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> list[role.Action]:
        """Send what is here of a round of shards to their owners.

        Arguments:
            last: contributions to just these shards that are not in the sums yet.
            body: in place of values, what else is said of the round.
        """
        store = of.store
        actions: list[role.Action] = []
        groups = list(self._groups(of, number, shards))
        if last is not None and len(groups) > 1:
            actions.append(role.Work(role.Add(-1, number, last), reports=True))
            last = None
        for owner, ranks, some in groups:
            of.sent[np.ix_(store.row[list(ranks)], some)] = number
            self._requests += 1
            self._sums[self._requests] = relayed(store.number)
            link = f"server-{owner}"
            message = Message(
                Kind.PUSH,
                store=relayed(store.number),
                epoch=store.members.epoch,
                request=self._requests,
                entries=self._entries(of, some, number, Payload.NONE if body else Payload.PACKED),
                body={"ranks": list(ranks), "first": of.members[0], **(body or {})},
            )
            actions += self._peers.call(link)
            if body:
                actions.append(role.Send(link, message))
                continue
            # The sum is made where the value was, and lent to the message until that has left.
            store.done[some] = -1
            ticket = -self._requests
            actions += [
                role.Work(role.Apply(store, number, some, last=last), reports=True),
                role.Work(role.Lend(ticket, store, some, np.arange(len(some))), reports=True),
                role.Work(role.Forward(ticket, store, link, message), reports=True),
            ]
        return actions

    def _groups(self, of: _Relayed, number: int, shards: Array) -> Iterator[tuple[int, tuple[int, ...], Array]]:
        """Yield what one message each may carry: the owner, the workers that it is of, and the shards."""
        ranks = np.array(of.members)
        at = np.ix_(of.store.row[ranks], shards)
        gave = (of.sent[at] < number) & (of.store.last[at] >= number)
        labels = np.stack([of.owner[shards], of.store.dtype[shards], *gave]).T
        if (labels == labels[:1]).all():
            kinds, which = labels[:1], np.zeros(len(shards), np.int64)  # mostly
        else:
            kinds, which = np.unique(labels, axis=0, return_inverse=True)
        for kind, (owner, _, *its) in enumerate(kinds.tolist()):
            some = shards[which.reshape(-1) == kind]
            sizes = of.store.length[some] * DTYPE_SIZES[of.store.dtype[some]]
            begin = 0
            for end in message_ends(np.zeros((len(some), 1)), sizes, np.full(len(some), MESSAGE_BYTES)):
                yield owner, tuple(ranks[np.array(its, np.bool_)].tolist()), some[begin:end]
                begin = end

    def _entries(self, of: _Relayed, shards: Array, rounds: int | Array, payload: Payload) -> Array:
        entries = np.zeros(len(shards), ENTRY)
        for name in ("key", "offset", "length", "dtype"):
            entries[name] = getattr(of.store, name)[shards]
        entries["round"], entries["payload"] = rounds, payload
        return entries

    # Values

    def pull(self, link: str, rank: int, batch: role.Batch, now: float) -> list[role.Action]:
        """Take in a pull of a worker of this host."""
        of = self.stores[relayed(batch.store.number)]
        actions = self._pulls.take(link, (rank,), batch, now)
        waiting = self._pulls.newest()
        return actions if waiting is None else [*actions, *self._fetch(of, waiting)]

    def _fetch(self, of: _Relayed, pull: Pull) -> list[role.Action]:
        """Ask owners for what a pull waits for, unless they have been asked."""
        pull.is_fetched = True
        shards, first = np.unique(pull.shards[pull.owed], return_index=True)
        rounds = pull.rounds[pull.owed][first]
        # The answer to a later round comes when this pull's worker has gone on: it may not wait for that.
        missing = (of.fetch[shards] == 0) | (of.asked[shards] != rounds)
        actions: list[role.Action] = []
        for owner in np.unique(of.owner[shards[missing]]).tolist():
            some = missing & (of.owner[shards] == owner)
            actions += self._ask(of, owner, shards[some], rounds[some], pull.rank)
        if len(np.unique(of.fetch[shards])) > 1:
            self._pulls.watch_all(pull)  # They come one after the other.
        return actions

    def _ask(self, of: _Relayed, owner: int, shards: Array, rounds: Array, rank: int) -> list[role.Action]:
        self._requests += 1
        entries = self._entries(of, shards, rounds, Payload.NONE)
        asker = rank if bool((rounds > of.store.last[of.store.row[rank], shards]).any()) else None
        self._fetches[self._requests] = _Fetch(self._requests, of, shards, entries, of.changes[shards], asker)
        of.fetch[shards], of.asked[shards] = self._requests, rounds
        body = {"ranks": list(of.members), **({} if asker is None else {"own": asker})}
        link, number, epoch = f"server-{owner}", relayed(of.store.number), of.store.members.epoch
        message = Message(Kind.PULL, store=number, epoch=epoch, request=self._requests, entries=entries, body=body)
        return [*self._peers.call(link), role.Send(link, message)]

    def _fetch_again(self, of: _Relayed, shards: Array) -> list[role.Action]:
        """Ask for what pulls wait for of some shards, as it is not coming any more."""
        return [action for pull in self._waiting_for(of, shards) for action in self._fetch(of, pull)]

    def _waiting_for(self, of: _Relayed, shards: Array) -> list[Pull]:
        """Return the pulls that wait for any of some shards."""
        return [pull for pull in self._pulls.open_of(of.store) if np.isin(pull.shards[pull.owed], shards).any()]

    # What owners answer

    def heard(self, message: Message) -> list[role.Action]:
        """Take in what an owner says."""
        fetch = self._fetches.get(message.request)
        if message.kind is Kind.WAITING:
            return [] if fetch is None else self._waits(fetch, message)
        if not message.is_reply:
            return []
        if message.request in self._sums:
            if message.body.get("closed"):
                return []  # The owner has heard of CLOSE sooner than we: `forget` follows.
            del self._sums[message.request]
            if message.is_error:
                return [role.Finish(1, f"a sum for another server was refused: {message.body.get('reason')}")]
            return self._acknowledged(message.request)
        if fetch is None:
            return []
        del self._fetches[message.request]
        of = fetch.of
        is_latest = of.fetch[fetch.shards] == fetch.number
        of.fetch[fetch.shards[is_latest]] = 0
        if (fetch.changes != of.changes[fetch.shards]).any():
            return self._fetch_again(of, fetch.shards)
        return self._refused(fetch, message) if message.is_error else self._fetched(fetch, message)

    def _fetched(self, fetch: _Fetch, message: Message) -> list[role.Action]:
        store, shards = fetch.of.store, fetch.shards
        found = message.size
        if found != sizes_of(fetch.entries).sum() or (message.entries["payload"] != Payload.PACKED).any():
            return [role.Finish(1, f"the answer of another server has {found} bytes of values, expected others")]
        entries = fetch.entries.copy()
        entries["payload"] = Payload.PACKED
        rounds = entries["round"].astype(np.int64)
        store.done[shards] = rounds
        for shard, number in zip(shards.tolist(), rounds.tolist(), strict=True) if store.skipped else ():
            if shard in store.skipped:
                store.skipped[shard] = {each: said for each, said in store.skipped[shard].items() if each >= number}
        for key, notes in message.body.get("skipped", {}).items():
            said = {int(rank): note for rank, note in notes.items()}
            for shard in np.flatnonzero(store.key[shards] == int(key)).tolist():
                store.skipped.setdefault(int(shards[shard]), {})[int(rounds[shard])] = said
        values = role.Batch(store, shards, message, entries)
        return [role.Work(role.Assign(values), reports=True), *self._pulls.advanced(store, shards)]

    def _refused(self, fetch: _Fetch, message: Message) -> list[role.Action]:
        """Tell those who wait; others hear of a failed update by their next pull."""
        of, actions = fetch.of, list[role.Action]()
        told: set[int] = set()
        for pull in self._waiting_for(of, fetch.shards):
            if fetch.asker in (None, pull.rank):
                told.add(pull.rank)
                actions += self._pulls.refuse(pull, message.body)
        if message.body.get("error") == "RuleError" and fetch.asker is None:
            failure = Failure(str(message.body.get("reason")), str(message.body.get("traceback", "")))
            for shard, number in zip(fetch.shards.tolist(), fetch.entries["round"].tolist(), strict=True):
                known = of.store.failed.get(shard, {})
                if number not in known:  # else this was the answer to one who had not heard of it yet
                    of.store.failed[shard] = {number: failure}
                    late = of.store.late.setdefault(shard, {})
                    late.update({rank: failure for rank in of.members if rank not in told})
        return [*actions, *self._fetch_again(of, fetch.shards)]

    def _waits(self, fetch: _Fetch, message: Message) -> list[role.Action]:
        """Tell those who wait what their shards' owner says: for whom."""
        store, body = message.store, message.body
        return [
            role.Send(pull.link, Message(Kind.WAITING, store=store, request=pull.message.request, body=body))
            for pull in self._waiting_for(fetch.of, fetch.shards)
        ]

    # Being settled

    def settle(self, link: str, rank: int, message: Message) -> list[role.Action]:
        """Answer when the owners have all that a worker has pushed here."""
        of = self.stores.get(message.store)
        if of is None:
            return [role.Send(link, answer(message))]
        actions = self._send_held(of, np.flatnonzero(of.held[of.store.row[rank]]))
        settling = _Settling(link, message, {each for each, store in self._sums.items() if store == message.store})
        self._settling.append(settling)
        return [*actions, *self._acknowledged(0)]

    def _acknowledged(self, request: int) -> list[role.Action]:
        for each in self._settling:
            each.missing.discard(request)
        done = [each for each in self._settling if not each.missing]
        self._settling = [each for each in self._settling if each.missing]
        return [role.Send(each.link, answer(each.message)) for each in done]

    def excused(self, number: int) -> list[role.Action]:
        """A worker has joined or left a store: no sum waits for it."""
        of = self.stores.get(number)
        return [] if of is None else self._send_held(of, np.arange(of.store.count), only_complete=True)

    def tick(self, now: float) -> list[role.Action]:
        """Send the parts of sums that pulls have waited for long enough."""
        actions: list[role.Action] = []
        for of in self.stores.values():
            for pull in self._pulls.open_of(of.store):
                if now - pull.notice.since >= PART_S:
                    shards = np.unique(pull.shards[pull.owed])
                    actions += self._send_held(of, shards[of.held[:, shards].any(axis=0)])
        return actions

    def open_round(self, number: int, keys: Mapping[int, Any]) -> tuple[int, Any, list[int], list[int]] | None:
        """Return a round of some of these keys that has contributions here: its number, the key, who of this host has
        pushed it, and who has not; None: there is none."""
        of = self.stores.get(number)
        for shard in np.flatnonzero(of.held.any(axis=0)).tolist() if of is not None else ():
            assert of is not None
            key = int(of.store.key[shard])
            if key in keys:
                at = int(of.sent[of.held[:, shard], shard].min()) + 1
                pushed = [rank for rank in of.members if of.store.last[of.store.row[rank], shard] >= at]
                return at, keys[key], pushed, [rank for rank in of.members if rank not in pushed]
        return None

    def loaded(self, number: int, rounds: Mapping[int, int]) -> list[role.Action]:
        """Saved states are in place: rounds go on from theirs, by number of the key."""
        of = self.stores.get(number)
        if of is None:
            return []
        store = of.store
        every = np.arange(store.count)
        store.late.clear()
        for shard in every.tolist():
            if int(store.key[shard]) in rounds:
                store.set_round(shard, rounds[int(store.key[shard])])
                of.sent[:, shard] = store.last[:, shard]
        of.forget_values(every)
        return self._fetch_again(of, every)

    def worked(self, event: role.WorkDone) -> list[role.Action]:
        """The engine has done work for a relay. There is none that fails but for want of memory."""
        if event.error is None:
            return []
        reason = f"{type(event.work).__name__} on {self._me().name}: {words_of(event.error)}"
        return [role.Log("ERROR", f"event=relay-failed {event.traceback}"), role.Finish(1, reason)]
