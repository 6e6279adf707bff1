"""What the workers of a job agree on: collective calls, the keys of a store, and its rule.

Each worker numbers its collective calls of a store (0, 1, 2 ...). Call i of all workers must be of the same kind with
the same content. Call i is gathered until every worker that has not left the store has made it. The first difference is
the error of all of them; it names both workers and both contents. A worker that fails at a call says so by a call of
that number with an `error`, which is the error of all, too. A worker that stops waiting for the others may take its
call back.

A worker may start over, as when a notebook cell is run again: it creates another store instead of using the one that
it has just created, where the others wait for it. It is told to use that one.

Some of the workers may have stores of their own, as a group with a name. The first OPEN of a group names its members,
and each of them must name the same. An OPEN says which store of the group it is about, counted from 1; the answer gives
the store its number in messages.

A rule changes on all servers or on none, one change at a time. First all servers try it (RULE with `check`: they make
it and look whether it takes the weights they hold), then all put it in its place. So what one server refuses, such as a
module that only its host lacks, changes nothing anywhere. If a server fails later, when the state is carried over, all
go back to the rule that was there.

No side effects: what is to be sent is returned as actions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Optional

from distrun_runtime.arrays import dtypes
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers
from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.protocol.handshake import NodeIdentity
from distrun_runtime.protocol.message import GROUP_LETTERS, GROUP_STORES, LAST_STORE, Kind, Membership, Message
from distrun_runtime.ps import role
from distrun_runtime.ps.replies import answer, refusal
from distrun_runtime.ps.role import NAMED, listed, ranks_text, tasks_of
from distrun_runtime.ps.routing import cut, place

# Queries to all servers

ALIVE = "alive"
LEFT = "left"
"""Said BYE: its part is over."""
LOST = "lost"


@dataclass
class Member:
    """A node that was welcomed."""

    link: str
    who: NodeIdentity
    state: str = ALIVE


@dataclass
class Answers:
    """What the servers said to one query."""

    bodies: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Server's name to its reply, of those that did what was asked."""
    errors: list[str] = field(default_factory=list)
    """Why the others refused it, each with its name."""
    error: str = "KVError"
    """Class of the first of these, of distrun_runtime.errors."""
    traceback: str = ""

    def refusal(self, request: Message) -> Message:
        """Return the refusal of the request that led to it: the reasons of all servers."""
        return refusal(request, folded(self.errors), self.error, self.traceback)


def folded(errors: Iterable[str]) -> str:
    """Return errors `name: reason` as one text, in which each reason stands once, after all who gave it."""
    names: dict[str, list[str]] = {}
    for error in sorted(errors):
        name, _, reason = error.partition(": ")
        names.setdefault(reason, []).append(name)
    return "; ".join(": ".join(filter(None, (", ".join(those), reason))) for reason, those in names.items())


Then = Callable[[Answers], "list[role.Action]"]
"""Returns what follows."""


@dataclass
class _Query:
    """One message to several servers."""

    waiting: set[str]
    then: Then
    store: int
    answers: Answers = field(default_factory=Answers)


class Queries:
    """The queries that are under way.

    Arguments:
        servers: returns those that are asked.
    """

    def __init__(self, servers: Callable[[], Sequence[Member]]) -> None:
        self._servers = servers
        self._queries: dict[int, _Query] = {}
        self._count = 0

    def send(self, message: Message | Callable[[Member], Message], then: Then) -> list[role.Action]:
        """Send `message`, or what it returns for each, to all servers; `then` gives what follows when all have
        answered."""
        self._count += 1
        servers, store = self._servers(), 0 if callable(message) else message.store
        self._queries[self._count] = _Query({server.link for server in servers}, then, store)
        return [
            role.Send(server.link, replace(message(server) if callable(message) else message, request=self._count))
            for server in servers
        ]

    def forget(self, store: int | None = None) -> None:
        """Drop the queries about a store, or all. Numbers go on, so that a late answer does not count for a later
        query."""
        self._queries = {at: each for at, each in self._queries.items() if store not in (None, each.store)}

    def answered(self, server: Member, reply: Message) -> list[role.Action]:
        """Take in a server's reply and return what follows from it."""
        query = self._queries.get(reply.request)
        if query is None or server.link not in query.waiting:
            return []
        query.waiting.discard(server.link)
        answers = query.answers
        if not reply.is_error:
            answers.bodies[server.who.name] = reply.body
        else:
            if not answers.errors:
                answers.error = str(reply.body.get("error", "KVError"))
                answers.traceback = str(reply.body.get("traceback", ""))
            answers.errors.append(f"{server.who.name}: {reply.body.get('reason')}")
        if query.waiting:
            return []
        del self._queries[reply.request]
        return query.then(answers)


# One worker's call


@dataclass(frozen=True)
class Call:
    """One worker's part of a collective call."""

    rank: int
    link: str
    message: Message

    @property
    def number(self) -> int:
        """Which collective call of its store this is."""
        return int(self.message.body.get("number", -1))


@dataclass
class Gathering:
    """The calls of one number that came so far."""

    calls: dict[int, Call] = field(default_factory=dict)
    may_start_over: set[int] = field(default_factory=set)
    """Workers whose call creates a store while they have one that they do not use."""
    notice: role.WaitNotice | None = None
    """When its workers are told whom it waits for."""

    def add(self, call: Call) -> str:
        """Take a call in and return how it differs from those before; empty: it does not."""
        first = next(iter(self.calls.values()), None)
        wrong = "" if first is None else difference(first, call)
        self.calls[call.rank] = call
        if call.message.kind is Kind.OPEN and call.message.body.get("unused"):
            self.may_start_over.add(call.rank)
        return wrong


def difference(one: Call, other: Call) -> str:
    """Return how two parts of one collective call differ, in words; empty when they agree."""
    here, there = f"worker-{one.rank}", f"worker-{other.rank}"
    if verb(one.message) != verb(other.message):
        calls = f"{here} calls {verb(one.message)} where {there} calls {verb(other.message)}"
        return f"{calls} (call {one.number} of the store)"
    mine, theirs = one.message.body, other.message.body
    if one.message.kind is Kind.OPEN and mine.get("members") != theirs.get("members"):
        return members_differ(str(mine.get("group")), (one.rank, mine["members"]), (other.rank, theirs["members"]))
    if one.message.kind is Kind.OPEN and opened(mine) != opened(theirs):
        return f"{here} creates {opened(mine)} where {there} creates {opened(theirs)}"
    if one.message.kind in (Kind.SAVE, Kind.LOAD) and mine.get("folder") != theirs.get("folder"):
        return f"{here} calls {verb(one.message)}({mine.get('folder')!r}) where {there} gives {theirs.get('folder')!r}"
    if one.message.kind is Kind.KEYS:
        return _records_differ(one, other)
    if one.message.kind is Kind.BARRIER:
        return _facts_differ(one, other)
    return ""


def opened(body: Mapping[str, Any]) -> str:
    """Return what an OPEN creates, in words; alike where it is the same."""
    said = [f"{name}={body[name]}" for name in ("staleness", "deterministic") if body.get(name) is not None]
    whose = f" of group {body['group']!r}" if "group" in body else ""
    return f"a {body.get('type')!r} store{whose}" + (f" with {', '.join(said)}" if said else "")


def members_differ(group: str, *said: tuple[int, Sequence[int]]) -> str:
    """Return that workers name other members of a group, in words: each worker with those that it names."""
    lists = " and ".join(f"{ranks_text(ranks)} for worker-{rank}" for rank, ranks in said)
    (_, one), (_, other) = said
    where = (
        listed(tasks_of(sorted(set(one).symmetric_difference(other)))) if max(map(len, (one, other))) > NAMED else ""
    )
    only = f" (only one has {where})" if where else ""
    return f"group {group!r} has the members {lists}{only}; fix: all of its workers give the same list"


SHOWN = 3
"""How many settings of trainers a message names."""


def _facts_differ(one: Call, other: Call) -> str:
    one, other = sorted((one, other), key=lambda call: call.rank)
    mine, theirs = one.message.body.get("facts") or {}, other.message.body.get("facts") or {}
    found = [
        f"{name} is {mine.get(name, 'not set')} on worker-{one.rank}, "
        f"{theirs.get(name, 'not set')} on worker-{other.rank}"
        for name in dict.fromkeys([*mine, *theirs])
        if mine.get(name) != theirs.get(name)
    ]
    if not found:
        return ""
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    of = one.message.body.get("of", "trainers")
    alike = (
        "optimizer and optimizer_params, update_on_kvstore and multipliers"
        if of == "trainers"
        else "parameters and arguments"
    )
    return (
        f"the {of} of the workers differ: {'; '.join(found[:SHOWN])}{more}. fix: give the {of} of all workers"
        f" the same {alike}"
    )


def _records_differ(one: Call, other: Call) -> str:
    both = one.message.body["records"], other.message.body["records"]
    if both[0] != both[1] and any(record.get("call") for records in both for record in records):
        pairs = enumerate(zip(*both, strict=False))
        at = next((at for at, (mine, theirs) in pairs if describe(mine) != describe(theirs)), 0)
        here, there = (_called(records, at) for records in both)
        return f"worker-{one.rank} calls {here} where worker-{other.rank} calls {there}; {SAME_CALLS}"
    mine = {record["key"]: record for record in one.message.body["records"]}
    theirs = {record["key"]: record for record in other.message.body["records"]}
    for key in [*mine, *theirs]:
        left, right = mine.get(key), theirs.get(key)
        if left is None or right is None:
            has, lacks = (one, other) if right is None else (other, one)
            record = left or right
            assert record is not None
            declares = f"worker-{has.rank} declares key {record['key']!r} ({describe(record)})"
            return f"{declares}, worker-{lacks.rank} does not"
        if left != right:
            fix = "" if left.get("label") == right.get("label") else "; " + SAME_ORDER
            has_one = f"worker-{one.rank} has {describe(left)}"
            return f"for key {left['key']!r} {has_one}, worker-{other.rank} has {describe(right)}{fix}"
    return ""


def _called(records: Sequence[Record], at: int) -> str:
    """Return a collective call by its array number `at`."""
    return describe(records[at]) + (f" (array {at} of {len(records)})" if len(records) > 1 else "")


SAME_CALLS = "fix: make the same collective calls in the same order on all workers, with equal shapes and dtypes"
SAME_ORDER = "fix: give the parameters in the same order on all workers; a dict of parameters is sorted by its names"


def describe(record: Mapping[str, Any]) -> str:
    """Return what a record says beside its key, for messages: `shape (2, 3) float32, row_sparse, codec 2bit`.

    A label comes first: `parameter 'fc.weight' of shape (2, 3) float32`.
    """
    label = f"{record['label']} of " if record.get("label") else ""
    if record.get("call"):
        label = f"{record['call']} of "
    more = [record["stype"]] if record.get("stype", "default") != "default" else []
    more += [f"codec {record['codec']}"] if record.get("codec") else []
    more += [f"pushed {record['pushed']} times"] if "pushed" in record else []
    return ", ".join([f"{label}shape {tuple(record['shape'])} {record['dtype']}", *more])


def verb(message: Message) -> str:
    """Return what the user calls it."""
    if message.kind is Kind.KEYS:
        return next((name for name in ("assign", "delete") if message.body.get(name)), "init")
    if message.kind is Kind.BARRIER and "facts" in message.body:
        return "Trainer"
    if message.kind is Kind.OPEN and "group" in message.body:
        return f"create(group={message.body['group']!r})"
    return _VERBS.get(message.kind, message.kind.name.lower())


_VERBS = {Kind.OPEN: "create", Kind.SAVE: "save_states", Kind.LOAD: "load_states"}


# Keys

Record = Mapping[str, Any]
"""What a worker declares of a key: key, shape, dtype, stype, codec, a label if it has one, call and op if it is for a
collective call; of one that is deleted how often it was pushed."""


def _side_by_side(sizes: Sequence[int], servers: Sequence[int]) -> list[int]:
    """Return the servers of a value's shards with those of equal size exchanged, so that what one server has goes on
    from shard to shard: it is sent, added and copied in fewer pieces. No server has more or less."""
    alike = len(sizes) - (sizes[-1] != sizes[0])
    return [*sorted(servers[:alike], key=lambda server: (server == servers[-1], server)), *servers[alike:]]


@dataclass(frozen=True)
class _Known:
    record: Record
    number: int
    place: int
    servers: list[int]
    """Where each of its shards is; empty: the workers know."""


class Keys:
    """The declared keys of one store.

    Arguments:
        servers: on how many the shards are placed; 0: the workers know where they are (DISTRUN_PARTITION=mxnet), or
            there are none.
    """

    def __init__(self, servers: int = 0) -> None:
        self._loads = [0] * servers
        """Bytes on each server."""
        self._known: dict[Any, _Known] = {}
        self._numbers = 0
        self._texts = 0

    def against(self, records: Sequence[Record], is_assign: bool) -> str:
        """Return why these records cannot be declared, or given other values (`is_assign`); empty: they can.

        Raises:
            ValueError: these are not records.
        """
        _check(records)
        for record in records:
            known = self._known.get(record["key"])
            if known is None:
                if is_assign:
                    return f"key {record['key']!r} doesn't exist. Did you init?"
            elif not is_assign:
                return f"key {record['key']!r} was initialised before"
            elif any(known.record.get(name) != record.get(name) for name in ("shape", "dtype")):
                has = f"the store has {describe(known.record)}"
                return f"key {record['key']!r}: {has}, assign was given {describe(record)}"
        return ""

    def declare(self, records: Sequence[Record]) -> dict[str, Any]:
        """Number and place new keys; return what their workers are told: `keys`, each one's number, place and servers.

        A key's place is its number if it is an int, else its position. Its shards are placed together with those of the
        other records; keys that are declared later move none.
        """
        servers = iter(self._placed(records))
        for record in records:
            is_text = isinstance(record["key"], str)
            place = self._texts if is_text else int(record["key"])
            self._texts += is_text
            self._known[record["key"]] = _Known(record, self._numbers, place, next(servers, []))
            self._numbers += 1
        return self.told(records)

    def told(self, records: Sequence[Record]) -> dict[str, Any]:
        """Return what workers are told of these keys."""
        known = [self._known[record["key"]] for record in records]
        return {
            "keys": [record["key"] for record in records],
            "numbers": [[each.number, each.place] for each in known],
            **({"servers": [each.servers for each in known]} if self._loads else {}),
        }

    def _placed(self, records: Sequence[Record]) -> list[list[int]]:
        """Return the server of each shard of each record."""
        if not self._loads:
            return []
        sizes = [[length * item for _, length in cut(size, item, row)] for size, item, row in map(_extent, records)]
        servers = iter(place([size for each in sizes for size in each], self._loads))
        return [_side_by_side(each, [next(servers) for _ in each]) for each in sizes]

    def take_back(self, keys: Sequence[Any]) -> None:
        """Forget keys that are deleted, or whose first values did not reach all servers.

        Their numbers are not given again: a server may hold shards under them. Their room is.
        """
        for key in keys:
            known = self._known.pop(key, None)
            if known is not None and known.servers:
                size, item, row = _extent(known.record)
                for server, (_, length) in zip(known.servers, cut(size, item, row), strict=True):
                    self._loads[server] -= max(1, length * item)

    @property
    def names(self) -> list[list[Any]]:
        """(number, key) of every key, in the order of their declaration."""
        return [[known.number, known.record["key"]] for known in self._known.values()]

    def to_json(self) -> list[dict[str, Any]]:
        """Return all records with number and place, for a manifest."""
        shown = ("key", "shape", "dtype", "stype")
        return [
            {"stype": "default"}
            | {name: known.record[name] for name in shown if name in known.record}
            | {"number": known.number, "index": known.place}
            for known in self._known.values()
        ]

    def differ_from(self, manifest: Mapping[str, Any], present: RuleSpec | None) -> str:
        """Return how keys and rule of saved states differ from these and the present rule; empty: they do not."""
        rule = rule_of(manifest)
        if rule is not None and present is not None and rule.name != present.name:
            return f"the states were saved under the rule {rule.name!r}, the store has {present.name!r}"
        by_key = {each["key"]: each for each in manifest["keys"]}
        mine = {each["key"]: each for each in self.to_json()}
        for text in [*mine, *by_key]:
            ours, theirs = mine.get(text), by_key.get(text)
            if theirs is None:
                return f"key {(ours or {})['key']!r} of the store is not in the saved states"
            if ours is None:
                return f"key {theirs['key']!r} is in the saved states and not in the store: init it before"
            if any(ours[name] != theirs[name] for name in ("shape", "dtype", "stype")):
                has = f"the store has {describe(ours)}"
                return f"key {ours['key']!r}: {has}, the saved states have {describe(theirs)}"
        return ""

    def saved_as(self, saved: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, Any]]:
        """Return (number, number in the saved states, key) of every key; they do not differ."""
        numbers = {each["key"]: int(each["number"]) for each in saved}
        return [(each.number, numbers[text], each.record["key"]) for text, each in self._known.items()]


def _extent(record: Record) -> tuple[int, int, int]:
    """Return elements of a value, bytes of one, and elements of a row if it is row-sparse."""
    shape = record["shape"]
    row = math.prod(shape[1:]) if record.get("stype") == "row_sparse" else 0
    return math.prod(shape), dtypes.parse(record["dtype"]).itemsize, row


def _check(records: Sequence[Record]) -> None:
    """Refuse what a worker sent in the place of records, before anything of it is kept."""
    if not isinstance(records, list):
        raise ValueError(f"expected a list of records, found {records!r:.80}")
    for record in records:
        if not isinstance(record, dict) or not all(_FITS[name](record.get(name)) for name in _FITS):
            raise ValueError(f"expected a record with key, shape and dtype, found {record!r:.200}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_FITS: Mapping[str, Callable[[Any], bool]] = {
    "key": lambda value: isinstance(value, str) or _is_whole(value),
    "shape": lambda value: isinstance(value, list) and all(_is_whole(size) and size >= 0 for size in value),
    "dtype": lambda value: value in dtypes.NAMES,
    "stype": lambda value: value is None or isinstance(value, str),
    "label": lambda value: value is None or isinstance(value, str),
    "call": lambda value: value is None or isinstance(value, str),
    "op": lambda value: value in (None, "sum", "min", "max"),
}
"""What the members of a record must be."""


# Rules


@dataclass(frozen=True)
class _PendingChange:
    """Something that wants its turn."""

    store: int
    wanted: Callable[[Optional[RuleSpec]], Optional[RuleSpec]]
    """From the present rule to the one to come; None: none. Raises KVError."""
    then: Callable[[Optional[Answers]], list[role.Action]]
    """What follows; it is given what the servers had against it, or None."""
    rank: int | None = None
    """The worker that wants it; None: saved states had the rule."""


class Rules:
    """The rules of all stores."""

    def __init__(self, queries: Queries) -> None:
        self._queries = queries
        self._specs: dict[int, tuple[RuleSpec | None, int | None]] = {}
        """By store: its rule, and the worker that has set it."""
        self._waiting: deque[_PendingChange] = deque()
        self._changing: int | None = None
        """The store whose rule is being changed."""

    def spec(self, store: int) -> RuleSpec | None:
        """Return the store's rule; None: it has none."""
        return self._specs.get(store, (None, None))[0]

    def to_json(self, store: int) -> dict[str, Any] | None:
        """Return the store's rule for a message or a manifest."""
        return spec_json(self.spec(store))

    def forget(self, store: int) -> list[role.Action]:
        """No worker has the store any more: none waits for a change there, and its number may be another's soon."""
        self._specs.pop(store, None)
        self._waiting = deque(change for change in self._waiting if change.store != store)
        self._changing = None if self._changing == store else self._changing
        return self._next()

    def ask(self, call: Call) -> list[role.Action]:
        """Take in one worker's RULE: another rule, none, or other parameters of the one there is."""
        body, store = call.message.body, call.message.store

        def wanted(old: RuleSpec | None) -> RuleSpec | None:
            return _wanted(old, body, self._specs.get(store, (None, None))[1], call.rank)

        def then(answers: Answers | None) -> list[role.Action]:
            return [role.Send(call.link, answers.refusal(call.message) if answers else answer(call.message))]

        return self._queue(_PendingChange(store, wanted, then, call.rank))

    def restore(
        self, store: int, spec: RuleSpec | None, then: Callable[[Answers | None], list[role.Action]]
    ) -> list[role.Action]:
        """Give a store the rule of its saved states, unless it has one."""
        return self._queue(_PendingChange(store, lambda old: old or spec, then))

    def _queue(self, change: _PendingChange) -> list[role.Action]:
        self._waiting.append(change)
        return self._next()

    def _next(self) -> list[role.Action]:
        actions: list[role.Action] = []
        while self._waiting and self._changing is None:
            change = self._waiting.popleft()
            present = self.spec(change.store)
            try:
                wanted = change.wanted(present)
            except KVError as err:
                actions += change.then(Answers(errors=[str(err)]))
                continue
            except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as err:
                # Its sender's mistake; it may be another's message that we are handling now.
                actions += change.then(Answers(errors=[f"RULE is malformed: {type(err).__name__}: {err}"]))
                continue
            if wanted == present:
                actions += change.then(None)
                continue
            self._changing = change.store
            actions += self._try(change, wanted)
        return actions

    def _try(self, change: _PendingChange, wanted: RuleSpec | None) -> list[role.Action]:
        def tried(answers: Answers) -> list[role.Action]:
            if answers.errors:
                return self._over(change, answers)
            return self._tell(change.store, {"spec": spec}, lambda answers: self._put(change, wanted, answers))

        spec = spec_json(wanted)
        return self._tell(change.store, {"spec": spec, "check": True}, tried)

    def _put(self, change: _PendingChange, wanted: RuleSpec | None, answers: Answers) -> list[role.Action]:
        if answers.errors:
            back = {"spec": self.to_json(change.store)}
            return self._tell(change.store, back, lambda _: self._over(change, answers))
        self._specs[change.store] = wanted, change.rank
        return self._over(change, None)

    def _over(self, change: _PendingChange, answers: Answers | None) -> list[role.Action]:
        self._changing = None
        return [*change.then(answers), *self._next()]

    def _tell(self, store: int, body: Mapping[str, Any], then: Then) -> list[role.Action]:
        return self._queries.send(Message(Kind.RULE, store=store, body=body), then)


def _wanted(present: RuleSpec | None, body: Mapping[str, Any], setter: int | None, rank: int) -> RuleSpec | None:
    """Return the rule that worker `rank` asks for with a RULE.

    Arguments:
        present, setter: the store's rule, and the worker that has set it.
    """
    if "change" in body:
        if present is None:
            raise KVError("the store has no rule whose parameters could be changed: call kv.set_optimizer first")
        return present.changed(body["change"])
    value = body["spec"]
    if value is None:
        return None
    who = "" if setter is None else f" (worker-{setter} has set it, worker-{rank} asks for the other)"
    return optimizers.agreed(present, RuleSpec.from_json(value), body.get("replace"), who)


def rule_of(manifest: Mapping[str, Any]) -> RuleSpec | None:
    """Return the rule of saved states; None: they have none."""
    return None if manifest["rule"] is None else RuleSpec.from_json(manifest["rule"])


def spec_json(spec: RuleSpec | None) -> dict[str, Any] | None:
    """Return a rule for a message; None: there is none."""
    return None if spec is None else dict(spec.to_json())


# Calls of all workers


@dataclass
class AgreedStore:
    """What the workers agreed on for one store."""

    number: int
    members: Membership
    awaited: set[int]
    """Workers that make calls: they have neither left the store nor ended."""
    holders: set[int]
    """Workers that have neither closed the store nor ended."""
    keys: Keys
    type: str = ""
    group: str = ""
    """Name of the group whose store it is; empty: that of all workers."""
    opened: str = ""
    """What was created, in words: kind and bound."""
    gatherings: dict[int, Gathering] = field(default_factory=dict)
    filling: dict[int, Gathering] = field(default_factory=dict)
    """Declared keys whose first values rank 0 is sending to the servers."""
    refused: dict[int, tuple[str, set[int]]] = field(default_factory=dict)
    """Collective calls that failed and that not all workers have made: why, and who has not made it yet. Each of these
    hears the reason when it does."""
    joined: dict[int, Call] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    """Workers that left this store for good."""
    has_lost: bool = False
    """One of its workers is lost."""
    saving: tuple[str, int] = ("", 0)
    """The folder of the SAVE that is under way, and the number of the call that ends it: the last BARRIER."""

    @property
    def whose(self) -> str:
        """Who shares it, in words."""
        return f"group {self.group!r}" if self.group else "all workers"

    @property
    def is_sync(self) -> bool:
        """Whether its pushes make rounds."""
        return "async" not in self.type

    def others(self, ranks: Iterable[int]) -> set[int]:
        """Return the members that have not left, without these."""
        return set(self.members.ranks).difference(ranks, self.left)

    def refuse(self, number: int, reason: str, calls: Iterable[int]) -> None:
        """Note that a call failed, which workers `calls` have made."""
        # Who has joined instead waits for all others to join, and will never make it.
        elsewhere = {rank for rank, part in self.joined.items() if part.number == number}
        missing = self.awaited.difference(calls, elsewhere)
        if missing:
            self.refused[number] = reason, missing

    def told(self, number: int, rank: int) -> str:
        """Return why a call failed, for a worker that makes it now; empty: it did not."""
        reason = self.refused[number][0] if number in self.refused else ""
        self._hear(number, rank)
        return reason

    def end(self) -> None:
        """A worker is lost: no call is made any more. Who has made one has heard that it failed."""
        self.has_lost, self.saving = True, ("", 0)
        for known in (self.gatherings, self.filling, self.refused, self.joined):
            known.clear()

    def gone(self, rank: int) -> None:
        """A worker makes no more calls."""
        self.awaited.discard(rank)
        for number in list(self.refused):
            self._hear(number, rank)

    def _hear(self, number: int, rank: int) -> None:
        if number in self.refused:
            self.refused[number][1].discard(rank)
            if not self.refused[number][1]:
                del self.refused[number]


@dataclass
class AgreedGroup:
    """Workers that have stores of their own."""

    stores: dict[int, int] = field(default_factory=dict)
    """Which store of the group it is, from 1 in order of creation, to its number in messages."""
    members: Membership | None = None
    """What all of them have named; None: they have created no store yet."""


States = Callable[[AgreedStore, Mapping[int, Call]], "list[role.Action]"]
"""What follows when all workers have asked to save or load the states of a store; the calls are by rank."""


class CollectiveCalls:
    """The collective calls of all stores.

    Arguments:
        states: what follows a SAVE and a LOAD.
        placed_on: on how many servers keys are placed; 0: the workers know where they are.
        forget: forgets what else is known of a store, by its number; returns what follows.
    """

    def __init__(
        self,
        workers: int,
        queries: Queries,
        states: Mapping[Kind, States],
        placed_on: int,
        *,
        forget: Callable[[int], list[role.Action]],
    ) -> None:
        self._workers = workers
        self._forget = forget
        self._placed_on = placed_on
        self._states = states
        self._queries = queries
        self._ended: list[Member] = []
        """Workers that said BYE."""
        self._stores: dict[int, AgreedStore] = {}
        self._groups: dict[str, AgreedGroup] = {}
        """By name."""
        self._free: deque[tuple[int, int]] = deque()
        """Numbers that stores of groups had which all servers have forgotten, each with the epoch of its next store."""
        self._numbered = 0
        """How many others stores of groups have got."""
        self.barriers = 0
        """How many barriers all workers have come to."""

    def barrier_waiting(self) -> int:
        """Return for how many workers those wait that have come to a barrier, to most of them."""
        missing = [
            len(store.others(gathering.calls))
            for store in self._stores.values()
            for gathering in store.gatherings.values()
            if any(part.message.kind is Kind.BARRIER for part in gathering.calls.values())
        ]
        return max(missing, default=0)

    def gather(self, call: Call) -> list[role.Action]:
        """Take in one worker's OPEN, KEYS, BARRIER, SAVE or LOAD.

        One with an `error`, what the worker found before it came here, fails for all.
        """
        store = self._store(call)
        actions = self._gathered(store, call)
        self._drop_unmade(store)
        return actions

    def _gathered(self, store: AgreedStore, call: Call) -> list[role.Action]:
        if call.message.body.get("take_back"):
            return self._taken_back(store, call)
        refused = store.told(call.number, call.rank)
        if refused:
            return [_refuse(call, refused)]
        gathering = store.gatherings.get(call.number) or Gathering()
        if store.group and call.message.kind is Kind.OPEN:
            wrong = self._named(store, call, is_first=not gathering.calls)
            if wrong:
                return [_refuse(call, wrong)]
        if call.message.body.get("error"):
            gathering.calls[call.rank] = call
            store.gatherings[call.number] = gathering
            reason = f"worker-{call.rank} failed at {verb(call.message)}: {call.message.body['error']}"
            return _fail(store, call.number, reason)
        # First: what raises here, since the message lacks something, must not count as a call.
        against = _against(store, call)
        self._awaiting(call.rank, call.message)
        store.gatherings[call.number] = gathering
        # A worker that has joined waits for all others to join: it will never make this call.
        elsewhere = [part for part in store.joined.values() if part.number == call.number]
        wrong = gathering.add(call) or (difference(elsewhere[0], call) if elsewhere else "") or against
        if wrong:
            return _fail(store, call.number, wrong)
        ended = [gone for gone in self._ended if gone.who.rank in store.members.places]
        missing = [gone for gone in ended if gone.who.rank not in {*gathering.calls, *store.left}]
        if missing:
            return _fail(store, call.number, _gone(missing[0], call.message))
        return self._complete(store, call.number) or self._started_over()

    def _named(self, store: AgreedStore, call: Call, *, is_first: bool) -> str:
        """Take in whom an OPEN names as the members of its group; return how they differ from those that it has.

        If it has none yet, the calls of one number are compared with each other (`difference`).
        """
        ranks, group = call.message.body["members"], self._groups[store.group]
        # All of a store that is made have named the same, also before the servers have heard of it.
        known = group.members or (store.members if store.opened else None)
        if known is not None and list(known.ranks) != ranks:
            return members_differ(store.group, (known.first, known.ranks), (call.rank, ranks))
        if is_first and not store.opened:
            store.members = Membership(group.members.ranks if group.members else tuple(ranks), store.members.epoch)
            store.awaited = self._present(store.members)
            store.holders = store.awaited.copy()
        store.awaited.update(self._present(Membership(ranks)))  # Whom only this call names hears why it fails, too.
        return ""

    def _taken_back(self, store: AgreedStore, call: Call) -> list[role.Action]:
        """A worker takes back its call of this number, unless all have made theirs."""
        if call.number <= store.saving[1]:
            store.saving = ("", 0)  # Who was interrupted does not end the save; other stores may use the folder.
        gathering = store.gatherings.get(call.number)
        before = gathering.calls.pop(call.rank, None) if gathering is not None else None
        actions: list[role.Action] = []
        if before is not None:
            actions.append(_refuse(before, "it was taken back"))
        elif call.rank == store.members.first and call.number in store.filling:
            reason = f"worker-{call.rank} has stopped waiting for {verb(call.message)} and does not send the values"
            unfilled = self._unfilled(store, call.number, reason)
            return [*unfilled, role.Send(call.link, answer(call.message, {"is_taken": False, "failed": True}))]
        if gathering is not None and not gathering.calls:
            del store.gatherings[call.number]
        return [*actions, role.Send(call.link, answer(call.message, {"is_taken": before is not None}))]

    def _started_over(self) -> list[role.Action]:
        """Tell workers that create another store to use one that they have created and the others wait for them in."""
        actions: list[role.Action] = []
        for store in list(self._stores.values()):
            for number, gathering in list(store.gatherings.items()):
                for rank in list(gathering.may_start_over):
                    part = gathering.calls.get(rank)
                    there = None if part is None else self._awaiting(rank, part.message)
                    if part is not None and there is not None:
                        del gathering.calls[rank]
                        actions.append(role.Send(part.link, answer(part.message, {"instead": there})))
                if not gathering.calls:
                    del store.gatherings[number]
            self._drop_unmade(store)
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
        first = gathering.calls[store.members.first].message.body
        body = store.keys.told(first["records"])
        if first.get("delete"):
            store.keys.take_back([record["key"] for record in first["records"]])
        others = [part for part in gathering.calls.values() if part.rank != call.rank]
        return [answered, *(role.Send(part.link, answer(part.message, body)) for part in others)]

    def _unfilled(self, store: AgreedStore, number: int, reason: str) -> list[role.Action]:
        """The values of declared keys will not come from rank 0: tell the others."""
        gathering = store.filling.pop(number)
        first = gathering.calls.pop(store.members.first).message
        if verb(first) == "init":
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
        told = Message(Kind.JOIN, store=store.number, body={"rank": call.rank})
        return [*self._queries.send(told, lambda _: []), *self._all_joined(store)]

    def leave(self, call: Call) -> list[role.Action]:
        """A worker leaves one store for good."""
        store = self._store(call)
        store.left.add(call.rank)
        store.gone(call.rank)
        told = Message(Kind.LEFT, store=store.number, body={"rank": call.rank})
        actions = self._queries.send(told, lambda _: [role.Send(call.link, answer(call.message))])
        for number in list(store.gatherings):
            actions += self._complete(store, number)
        return [*actions, *self._all_joined(store)]

    def close(self, call: Call) -> list[role.Action]:
        """A worker has closed a store, and all that it has asked for there is answered."""
        store = self._store(call)
        store.holders.discard(call.rank)
        return [role.Send(call.link, answer(call.message)), *self._forget_unheld(store)]

    def _forget_unheld(self, store: AgreedStore) -> list[role.Action]:
        """Forget a store that all workers have closed, and have the servers forget it."""
        return [] if store.holders else self._forget_store(store)

    def _forget_store(self, store: AgreedStore) -> list[role.Action]:
        self._unlist(store)
        # No worker waits for the answers any more: each has closed the store, is lost, or was refused the store.
        self._queries.forget(store.number)

        def forgotten(answers: Answers) -> list[role.Action]:
            # What the store was sent may come later than this: it names the epoch that is over.
            if store.group and not answers.errors:
                self._free.append((store.number, store.members.epoch + 1))
            return []

        told = self._queries.send(Message(Kind.CLOSE, store=store.number), forgotten)
        return [*told, *self._forget(store.number)]

    def _drop_unmade(self, store: AgreedStore) -> None:
        """Drop a store of a group that was not made, if all its workers know that. No server has heard of it."""
        is_open = store.opened or store.gatherings or store.refused
        if store.group and not is_open and self._stores.get(store.number) is store:
            self._unlist(store)
            self._free.append((store.number, store.members.epoch))

    def _unlist(self, store: AgreedStore) -> None:
        del self._stores[store.number]
        if store.group:
            self._unname(store)

    def _unname(self, store: AgreedStore) -> None:
        """No OPEN is about a store of a group any more."""
        numbers = self._groups[store.group].stores
        for each in [each for each, number in numbers.items() if number == store.number]:
            del numbers[each]

    def lose(self, rank: int) -> list[role.Action]:
        """A worker is lost. All nodes that share a store with it hear that, and ask nothing more there but CLOSE."""
        actions: list[role.Action] = []
        for store in [each for each in self._stores.values() if rank in each.members.places]:
            store.end()
            store.gone(rank)
            store.holders.discard(rank)
            if not store.opened:
                store.holders.clear()  # No worker has it, to close it.
            elif store.group and self._groups[store.group].members is None:
                self._unname(store)  # Its workers have no answer yet, and may create another with others.
            actions += self._forget_unheld(store)
        return actions

    def ended(self, gone: Member) -> list[role.Action]:
        """A worker said BYE: what waited for it fails, and who joined does not wait for it."""
        actions: list[role.Action] = []
        self._ended.append(gone)
        is_last = len(self._ended) == self._workers  # The servers forget all stores, or end.
        for store in list(self._stores.values()):
            store.gone(gone.who.rank)  # It may be to hear why a create failed that it did not make.
            if gone.who.rank not in store.members.places:
                self._drop_unmade(store)
                continue
            store.holders.discard(gone.who.rank)
            for at, gathering in list(store.gatherings.items()):
                if gone.who.rank not in {*gathering.calls, *store.left}:
                    part = next(iter(gathering.calls.values()))
                    actions += _fail(store, at, _gone(gone, part.message))
            for at in list(store.filling) if gone.who.rank == store.members.first else ():
                what = verb(store.filling[at].calls[gone.who.rank].message)
                text = f"{gone.who} has ended (BYE) and will never send the values of {what}"
                actions += self._unfilled(store, at, text)
            actions += self._all_joined(store)
            self._drop_unmade(store)
            actions += [] if is_last or store.number not in self._stores else self._forget_unheld(store)
        return actions

    def remind(self, now: float) -> list[role.Action]:
        """Tell the workers of a gathering that takes long whom it waits for."""
        actions: list[role.Action] = []
        for store in self._stores.values():
            for gathering in store.gatherings.values():
                gathering.notice = gathering.notice or role.WaitNotice(now)
                if not gathering.notice.is_due(now):
                    continue
                tasks = tasks_of(sorted(store.others(gathering.calls)))
                parts = list(gathering.calls.values())
                what = verb(parts[0].message)
                where = f" in group {store.group!r}" if store.group and store.opened else ""
                text = f"waiting for {listed(tasks)} to call {what}{where}"
                body = {"text": text, "seconds": now - gathering.notice.since, "for": tasks[:NAMED]}
                for part in parts:
                    told = Message(Kind.WAITING, store=store.number, request=part.message.request, body=body)
                    actions.append(role.Send(part.link, told))
        return actions

    def members_of(self, message: Message) -> Collection[int]:
        """Return the workers that share the store that a message is about."""
        if message.kind is Kind.OPEN and "members" in message.body:
            return list(message.body["members"])
        store = self._stores.get(self._number(message))
        return range(self._workers) if store is None else store.members.places

    def whose(self, message: Message) -> str:
        """Return who shares the store that a message is about, in words."""
        store = self._stores.get(self._number(message))
        return f"group {message.body.get('group')!r:.120}" if store is None else store.whose

    def beside(self, rank: int) -> set[int]:
        """Return the workers that share a store of a group with a worker."""
        groups = [store for store in self._stores.values() if store.group]
        return {other for store in groups if rank in store.members.places for other in store.members.ranks}

    def against(self, call: Call) -> str:
        """Return why a message is about no store, and may not create one; empty: it is, or may."""
        message, body = call.message, call.message.body
        if message.kind is not Kind.OPEN or body.get("take_back") or body.get("error"):
            return "" if self._number(message) in self._stores else f"{message.kind.name} is about no store of this job"
        if "group" not in body:
            is_right = 0 < message.store < GROUP_STORES
            return "" if is_right else f"stores of all workers have the numbers 1 to {GROUP_STORES - 1}"
        name, members = body["group"], body.get("members")
        if not isinstance(name, str) or not 0 < len(name) <= GROUP_LETTERS or message.store < 1:
            return f"a group has a name of 1 to {GROUP_LETTERS} letters and stores numbered from 1, not {name!r:.120}"
        ranks = members if isinstance(members, list) and all(type(rank) is int for rank in members) else []
        if sorted(set(ranks)) != ranks or call.rank not in ranks or not 0 <= ranks[0] <= ranks[-1] < self._workers:
            return f"members are ranks of this job in ascending order, the sender among them, not {members!r:.120}"
        group = self._groups.get(name, AgreedGroup())
        if message.store in group.stores:
            return ""
        if group.members is not None and list(group.members.ranks) != ranks:
            return members_differ(name, (group.members.first, group.members.ranks), (call.rank, ranks))
        if not self._free and LAST_STORE - self._numbered < GROUP_STORES:
            fix = "fix: close stores that are not used any more (kv.close()), on all of their workers"
            return f"this job has no number left for a store of group {name!r}; {fix}"
        return ""

    def _number(self, message: Message) -> int:
        """Return the number of the store that a message is about; -1: of a group's that is not known.

        Until OPEN is answered, its sender only knows which of the group's stores it is.
        """
        if "group" not in message.body:
            return message.store
        group = self._groups.get(str(message.body["group"]))
        return -1 if group is None else group.stores.get(message.store, -1)

    def _store(self, call: Call) -> AgreedStore:
        number, name = self._number(call.message), str(call.message.body.get("group", ""))
        if number not in self._stores:
            members = Membership(range(self._workers))
            if name:
                (number, epoch), group = self._new_number(), self._groups.setdefault(name, AgreedGroup())
                group.stores[call.message.store] = number
                members = Membership((group.members or members).ranks, epoch)
            present = self._present(members)
            store = AgreedStore(number, members, present, present.copy(), Keys(self._placed_on), group=name)
            self._stores[number] = store
        return self._stores[number]

    def _new_number(self) -> tuple[int, int]:
        """Return a number that no store had, else that of the store that is gone for longest; and its epoch."""
        if LAST_STORE - self._numbered < GROUP_STORES:
            return self._free.popleft()
        self._numbered += 1
        return LAST_STORE + 1 - self._numbered, 0

    def _present(self, members: Membership) -> set[int]:
        """Return the members that have not ended."""
        return set(members.ranks).difference(member.who.rank for member in self._ended)

    def _complete(self, store: AgreedStore, number: int) -> list[role.Action]:
        gathering = store.gatherings[number]
        if len(gathering.calls) < len(store.members.ranks) - sum(rank not in gathering.calls for rank in store.left):
            return []
        call, first = next(iter(gathering.calls.values())).message, store.members.first
        if first not in gathering.calls and call.kind in _DUTY:
            return _fail(store, number, f"worker-{first}, {_DUTY[call.kind]}, has left the store")
        folder = str(call.body.get("folder")) if call.kind is Kind.SAVE else ""
        other = next((each for each in self._stores.values() if folder and each.saving[0] == folder), store)
        if other is not store:
            fix = "fix: save each store into a folder of its own"
            text = f"{store.whose} cannot save into {folder!r} while a store of {other.whose} is saved there; {fix}"
            return _fail(store, number, text)
        if folder or number >= store.saving[1]:
            store.saving = (folder, number + 2) if folder else ("", 0)
        del store.gatherings[number]
        if call.kind is Kind.OPEN:
            store.type, store.opened = str(call.body.get("type", "")), opened(call.body)
            if store.group:
                return self._open_of_group(store, gathering)
        if call.kind in (Kind.OPEN, Kind.BARRIER):
            self.barriers += verb(call) == "barrier"
            return _answers(gathering, _of_devices(gathering))
        if call.kind is Kind.KEYS:
            store.filling[number] = gathering
            part = gathering.calls[first]
            records, is_new = part.message.body["records"], verb(part.message) == "init"
            body = store.keys.declare(records) if is_new else store.keys.told(records)
            # Rank 0 goes to fill the servers now; the others hear when it has (INIT), so that none reads too early.
            return [role.Send(part.link, answer(part.message, body))]
        return self._states[call.kind](store, gathering.calls)

    def _open_of_group(self, store: AgreedStore, gathering: Gathering) -> list[role.Action]:
        """All members have created a store of a group: tell the servers who they are, then the workers its number."""
        group, epoch = self._groups[store.group], store.members.epoch
        body = {**_of_devices(gathering), "store": store.number, "epoch": epoch}
        members = {"members": list(store.members.ranks), "epoch": epoch}

        def told(answers: Answers) -> list[role.Action]:
            if not answers.errors and not store.has_lost:
                group.members = store.members
                return _answers(gathering, body)
            refused = [role.Send(part.link, answers.refusal(part.message)) for part in gathering.calls.values()]
            # No worker has it, to close it.
            gone = self._forget_store(store) if self._stores.get(store.number) is store else []
            return [*(refused if answers.errors else ()), *gone]

        return self._queries.send(Message(Kind.OPEN, store=store.number, body=members), told)

    def _all_joined(self, store: AgreedStore) -> list[role.Action]:
        # The lengths first: of many workers, each one that joins comes here.
        if not store.joined or len(store.joined) < len(store.awaited) or not store.awaited <= store.joined.keys():
            return []
        # The servers forget who joined before any worker hears that all have: its next push is a new round of all.
        parts = list(store.joined.values())
        store.joined.clear()
        told = Message(Kind.JOIN, store=store.number, body={"rank": parts[0].rank, "all": True})
        return self._queries.send(told, lambda _: [role.Send(part.link, answer(part.message)) for part in parts])


_DUTY = {
    Kind.KEYS: "whose values count",
    Kind.SAVE: "who writes the manifest",
    Kind.LOAD: "who reads the manifest",
}


def _of_devices(gathering: Gathering) -> dict[str, Any]:
    """Return whether the servers are to use GPUs for a store. One worker is enough: they keep the values of all."""
    is_any = any(part.message.body.get("on_devices") for part in gathering.calls.values())
    return {"on_devices": True} if is_any else {}


def _answers(gathering: Gathering, body: Mapping[str, Any]) -> list[role.Action]:
    return [role.Send(part.link, answer(part.message, body)) for part in gathering.calls.values()]


def _against(store: AgreedStore, call: Call) -> str:
    body = call.message.body
    if not isinstance(body.get("facts", {}), dict):
        raise ValueError(f"expected facts as an object, found {body['facts']!r:.80}")
    if call.message.kind is not Kind.KEYS:
        return ""
    return store.keys.against(body["records"], verb(call.message) != "init")


def _fail(store: AgreedStore, number: int, reason: str) -> list[role.Action]:
    """Refuse a call to all who have made it, and to the others when they do."""
    calls, store.saving = store.gatherings.pop(number).calls, ("", 0)
    store.refuse(number, reason, calls)
    return [_refuse(part, reason) for part in calls.values()]


def _refuse(call: Call, reason: str) -> role.Action:
    return role.Send(call.link, refusal(call.message, reason))


def _gone(member: Member, message: Message) -> str:
    return f"{member.who} has ended (BYE) and will never call {verb(message)}: all workers must"
