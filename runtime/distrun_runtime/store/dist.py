"""The backend of distributed stores: values live on the servers, cut into shards; workers push and pull them.

Decides which call goes when, and what waits for what. `transfers` makes the messages of data calls and takes their
replies; `declare`, `fill` and `saving` are the calls that all workers make together; the worker's node (`ps.session`)
sends and receives.

A data call returns a `SentCall` (`transfers`) of the request that it has made (`ps.role`), `Both` of two, `BatchedCall`
while it waits for others to share a message with, or a `CompletedCall`. The node's thread resolves the request. The
thread that calls `wait` then writes the outputs, by the call's `Take`, or raises what went wrong; an error of a push
that is not waited for is raised by the store's next call (`is_watched`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import compress
from operator import attrgetter, methodcaller
from typing import Any, cast

import numpy as np

from distrun_runtime.arrays.device import DeviceArray
from distrun_runtime.arrays.dtypes import Array, DType
from distrun_runtime.contract.process import own_pid
from distrun_runtime.errors import KVError, RuntimeFault, TimedOut
from distrun_runtime.ops.optimizers import RuleSpec, importable
from distrun_runtime.ops.partition import Shard
from distrun_runtime.protocol.message import PULL, PUSH, PUSHPULL, Kind, Message, Payload
from distrun_runtime.ps import node as nodes
from distrun_runtime.ps import session
from distrun_runtime.ps.role import NodeRequest
from distrun_runtime.ps.routing import GATHERED_BYTES, SMALL_CALL_BYTES, Route, mxnet_shards, shards_on
from distrun_runtime.ps.session import CallUnderWay
from distrun_runtime.ps.trace import prepare, write
from distrun_runtime.store import saving
from distrun_runtime.store.base import (
    CallOptions,
    Contribution,
    Lifetime,
    RowsItem,
    RowsTarget,
    Selection,
    StoreBackend,
    Updater,
)
from distrun_runtime.store.compress import Compression, Compressor
from distrun_runtime.store.keys import Key, KeyRecord, Zeros, begun, canonical, is_async, named, on_devices
from distrun_runtime.store.link import Group, StoreLink, close_link, group_of, is_added_on_hosts, open_link
from distrun_runtime.store.pending import CompletedCall, Pending
from distrun_runtime.store.plans import CallPlan, CallPlans, PlannedCall
from distrun_runtime.store.reducer import reducer_for
from distrun_runtime.store.transfers import Both, CallBatch, SentCall, Taking, Transfers
from distrun_runtime.store.values import First, RowSparse, Value

# Declaring keys: all workers say what they have, the scheduler compares, rank 0's values go to the servers.


Placed = tuple[KeyRecord, tuple[Shard, ...]]
"""A key's record and its shards."""


def declare(
    link: StoreLink,
    what: str,
    number: int,
    items: Sequence[tuple[Key, First]],
    compressor: Compressor,
    *,
    labels: Mapping[Key, str],
) -> tuple[int, list[Placed]]:
    """Declare new keys and return what the workers agreed on: each key's record and its shards.

    Returns to rank 0 before the servers have the values, to the others after. The call's number comes first (`agree`).

    Arguments:
        labels: what this worker calls some of the keys.

    Raises:
        KVError: the workers differ; names key, workers and what each has.
    """
    records = [_described(KeyRecord.of(key, 0, value), compressor) for key, value in items]
    body = {"records": [{**one, "label": labels[one["key"]]} if one["key"] in labels else one for one in records]}
    made, reply = link.agree(what, Kind.KEYS, number, body)
    if "servers" in reply and link.node.config.partition == "mxnet":
        warnings.warn(
            "the scheduler places values by size: DISTRUN_PARTITION=mxnet or MXNET_KVSTORE_BIGARRAY_BOUND is set for"
            " this worker and not for the scheduler; fix: set it for all tasks, such as by --env",
            RuntimeWarning,
            stacklevel=4,
        )
    servers = reply.get("servers") or [None] * len(reply["keys"])
    told = zip(reply["keys"], reply["numbers"], servers, strict=True)
    places = {key: (int(pair[0]), int(pair[1]), where) for key, pair, where in told}
    placed = []
    for key, value in items:
        number, index, where = places[key]
        record = KeyRecord.of(key, index, value)
        placed.append((record, _shards(link, record, number, where, compressor)))
    return made, placed


def fill(
    link: StoreLink,
    what: str,
    number: int,
    placed: Sequence[tuple[KeyRecord, tuple[Shard, ...], First]],
    facts: dict[str, Any],
) -> None:
    """Send rank 0's values to the servers, and tell the scheduler when they are there.

    Arguments:
        facts: what the servers have to know of the store.

    Raises:
        RuntimeFault: a server refused them (KVError), or they did not get there; the other workers are told.
    """
    error = f"worker-{link.node.rank} was interrupted before the servers had the values"
    try:
        records = [record for record, _, _ in placed]
        # Zeros do not travel: all are, or none.
        is_blank = any(isinstance(value, Zeros) for _, _, value in placed)
        values = [value.to_dense() if isinstance(value, RowSparse) else value for _, _, value in placed]
        payload = Payload.NONE if is_blank else Payload.PACKED
        route = Route.of([shards for _, shards, _ in placed], [record.shape for record in records])
        rounds = np.zeros(len(placed), np.int64)
        messages = []
        for portion in route.portions:
            numbered = {int(route.numbers[item]): records[item] for item in portion.items.tolist()}
            message = Message(
                Kind.INIT,
                store=link.store,
                epoch=link.epoch,
                entries=portion.entries_at(rounds, payload),
                body={**facts, **_facts_of(numbered), **({"zeros": True} if is_blank else {})},
                payloads=() if is_blank else portion.gather(cast("list[Array]", values), lent=True),
            )
            messages.append((portion.link, message))
        link.ask(what, messages).wait(link.limit_s)
        _tell_relays(link, what, route, records, facts)
        error = ""
    except RuntimeFault as err:
        error = str(err)
        raise
    finally:
        link.settled(number, not error)
        link.scheduler(what, Kind.INIT, {"number": number, "error": error})


def _tell_relays(
    link: StoreLink, what: str, route: Route, records: Sequence[KeyRecord], facts: Mapping[str, Any]
) -> None:
    """Tell servers which shards of others they stand in for, and that the values are new."""
    messages = []
    for relays in link.relays_of_hosts:
        for portion in route.portions:
            if portion.server not in relays:
                continue
            some = [at for at, item in enumerate(portion.items.tolist()) if is_added_on_hosts(facts, records[item])]
            if not some:
                continue
            numbered = {int(route.numbers[item]): records[item] for item in portion.items[some].tolist()}
            message = Message(
                Kind.INIT,
                is_relayed=True,
                store=link.store,
                epoch=link.epoch,
                entries=portion.entries_at(np.zeros(len(records), np.int64), Payload.NONE)[some],
                body={**facts, **_facts_of(numbered), "owner": portion.server},
            )
            messages.append((f"server-{relays[portion.server]}", message))
    if messages:
        link.ask(what, messages).wait(link.limit_s)


def _shards(
    link: StoreLink, record: KeyRecord, number: int, servers: Sequence[int] | None, compressor: Compressor
) -> tuple[Shard, ...]:
    """Return a key's shards: on the servers that the scheduler says, or where MXNet has them."""
    value = record.whole(number)
    if servers is not None:
        return shards_on(value, servers)
    setting = compressor.of(record)
    factor = setting.codec.factor if setting is not None and setting.codec is not None else 1
    config = link.node.config
    return mxnet_shards(value, record.index, servers=config.servers, bound=config.bigarray_bound, factor=factor)


def _described(record: KeyRecord, compressor: Compressor) -> dict[str, Any]:
    """Return what workers have to agree on."""
    return {**record.to_json(), "codec": _compression(compressor.of(record))}


def _compression(setting: Compression | None) -> str:
    if setting is None:
        return ""
    params = [f"{name}={value:g}" for name, value in sorted(setting.params.items())]
    return " ".join([setting.type, *params, *(["two_way"] if setting.two_way else [])])


def _facts_of(records: Mapping[int, KeyRecord]) -> dict[str, Any]:
    """Return what a server has to know of the keys of a message, by their numbers."""
    rows = {str(number): record.row_size for number, record in records.items() if record.is_sparse}
    ops = {str(number): record.op for number, record in records.items() if record.op != "sum"}
    return {
        "names": [[number, record.key] for number, record in records.items()],
        "shapes": {str(number): list(record.shape) for number, record in records.items()},
        **({"rows": rows} if rows else {}),
        **({"ops": ops} if ops else {}),
    }


# Traces: what this worker and the servers did, as files for Chrome's trace viewer.


@contextmanager
def profile(link: StoreLink, folder: str) -> Iterator[None]:
    """Record until the block ends, then write `worker-R.json`, and in rank 0 also `server-I.json` of every server.

    Servers record from when rank 0 begins until it ends.

    Raises:
        KVError: the folder cannot be made, which is tried before anything is recorded; or a profile is under way.
    """
    recorder, rank = link.node.recorder, link.node.rank
    if recorder.is_on:
        raise KVError(f"worker-{rank} is being profiled already: one profile at a time")
    prepare(folder)
    if link.rank == 0:
        link.servers("profile", Kind.PROFILE, {"action": "start"})
    recorder.start()
    try:
        yield
    finally:
        events = recorder.stop(f"worker-{rank}@{link.node.config.host}")
        # Before anything is written: what cannot be must not leave the servers recording.
        stopped = link.servers("profile", Kind.PROFILE, {"action": "stop"}) if link.rank == 0 else []
        write(folder, f"worker-{rank}.json", events)
        for server, body in enumerate(stopped):
            write(folder, f"server-{server}.json", body["events"])


ROLES = {1: "scheduler", 2: "server", 4: "worker"}
"""MXNet's masks of roles."""
PLANNED_S = 1.0
"""How long `close` waits for a call that is made by a plan; after a tenth of that it is a request."""
PULLED_NEXT = 2
"""After so many pushes of the same keys that their pull followed, the next push asks for the result at once."""
PULLED_NEXT_AGAIN = 16
"""As many more are wanted once it did not follow."""
LAST = -(2**31)
"""The lowest priority."""
_RELEASE, _IS_DONE = methodcaller("release"), attrgetter("is_done")


def create_dist(
    type_name: str,
    staleness: int | None = None,
    deterministic: bool = False,
    group: str | None = None,
    members: Sequence[int] | None = None,
) -> DistBackend:
    """Return the backend of a store of this process's job; in a server or scheduler process, serve and then end.

    Raises:
        KVError: the group cannot have these members, or this worker is none of them.
        SystemExit: this process is a server or scheduler (DMLC_ROLE) and the job has ended: with its exit code.
        ContractError, Refused, TimedOut, PeerLost: the job cannot be joined, and why.
    """
    role = nodes.role_of()
    if role in ("server", "scheduler"):
        raise SystemExit(nodes.serve(role))
    reducer_for(type_name)  # Reads the environment: what is wrong there is said before this process joins the job.
    node = session.current(lambda: nodes.read("worker"))
    shared_by = None if group is None else group_of(node, group, members)
    return DistBackend(type_name, node, staleness, deterministic, shared_by)


class DistBackend(StoreBackend):
    """A key-value store on the servers of the job.

    Threads: any may call; calls are ordered as they take the store's lock, which no thread holds while waiting.
    """

    def __init__(
        self,
        type_name: str,
        node: session.NodeSession,
        staleness: int | None = None,
        deterministic: bool = False,
        group: Group | None = None,
    ) -> None:
        self._group = group
        self._pid = own_pid()
        self._is_async = is_async(type_name)
        self.lifetime = Lifetime(type_name)
        self._compressor = Compressor()
        self.reducer = reducer_for(type_name, node.empty, self._compressor)
        self.reducer.exports = node.exports
        self._node = node
        self._lock = threading.RLock()
        """Guards what follows; who sends data holds it, so that rounds are sent in their order."""
        self._open: list[NodeRequest] = []
        """Pushes that servers have not acknowledged yet."""
        self._unanswered: list[NodeRequest] = []
        """Contributions that are answered when their round is over, of calls that did not wait."""
        self._asked: list[NodeRequest] = []
        """Small pulls that are not answered yet."""
        bound = {} if staleness is None else {"staleness": staleness}
        order = {"deterministic": True} if deterministic else {}
        self._facts = {"type": canonical(type_name), **bound, **order}
        """What all workers and servers must know alike."""
        what = f"create({type_name!r})" if group is None else f"create({type_name!r}, group={group.name!r})"
        self._link = open_link(node, what, self._facts, on_devices(type_name), group)
        self._link.replaced = self._replaced
        self._transfers = Transfers(self._link, self._compressor)
        self._labels: dict[Key, str] = {}
        """What this worker calls keys that it is about to initialise."""
        self._gathering = CallBatch(self._flush)
        """Small calls that wait for others to be answered."""
        self._plans = CallPlans()
        self._planning = threading.Lock()
        """Held while a call is made by a plan."""
        self._pushed: Selection | None = None
        """Keys of the last call, if that was a push with wait=True that was sent at once."""
        self._expected: tuple[SentCall, Taking] | None = None
        """That push, if it asked for the result too, and what takes that in for outputs."""
        self._ahead: PlannedCall | None = None
        """That push instead, if it was planned and its answers are not looked for yet."""
        node.before_end(self._flush_at_end)

    @property
    def rank(self) -> int:
        """This worker's rank among those that share the store."""
        return self._link.rank

    @property
    def num_workers(self) -> int:
        """Number of workers that share the store."""
        return self._link.workers

    @property
    def members(self) -> Sequence[int]:
        """Their ranks in the job."""
        return self._link.members.ranks

    def companion(self) -> DistBackend:
        """Return another store of the same workers, with rounds and without a rule. All of them call it."""
        kind = "dist_device_sync" if on_devices(self.type) else "dist_sync"
        return DistBackend(kind, self._node, deterministic="deterministic" in self._facts, group=self._group)

    # Data

    def agree(self, facts: Mapping[str, str], of: str) -> None:
        self._link.together(f"making {of}", Kind.BARRIER, facts=dict(facts), of=of)

    def label(self, labels: Mapping[Key, str]) -> None:
        self._labels.update(labels)

    def reserve(self) -> int:
        return self._link.next_call()

    def init(self, items: list[tuple[Key, First]], call_number: int) -> list[KeyRecord]:
        what = begun(items)
        number, placed = declare(self._link, what, call_number, items, self._compressor, labels=self._labels)
        with self._lock:
            for record, shards in placed:
                self._transfers.add(record.key, shards)
        self._make_room([record for record, _ in placed])
        if self.rank == 0:
            values = [(record, shards, value) for (record, shards), (_, value) in zip(placed, items, strict=True)]
            fill(self._link, what, number, values, {**self._facts, **self._link.told})
        return [record for record, _ in placed]

    def _make_room(self, records: Sequence[KeyRecord]) -> None:
        """Have page-locked memory for what is pushed of new keys, if the program's values are on GPUs."""
        if not self.reducer.seen:
            return
        plain: list[int] = []
        encoded = 0
        for record in records:
            setting = self._compressor.of(record)
            if setting is not None and setting.codec is not None:
                # Its shards are encoded one by one, so that each may take a little more than its part.
                shards = self._transfers.shards[record.key]
                encoded += sum(setting.codec.size(shard.length, dict(setting.params)) for shard in shards)
            elif not record.is_sparse:
                plain.append(record.size * record.dtype.itemsize)
        self._node.reserve(self._link.store, plain, encoded)

    def assign(self, items: list[tuple[KeyRecord, Array]], call_number: int) -> None:
        self._change("assign", items, call_number)

    def _change(self, verb: str, items: Sequence[tuple[KeyRecord, First]], call_number: int) -> None:
        what = f"{verb} of {named((record.key for record, _ in items))}"
        # What was pushed before comes before: here by waiting, on this connection by its order.
        try:
            self._settle([record.key for record, _ in items] if verb == "delete" else [])
        except BaseException:
            self._link.free(Kind.KEYS, call_number)
            raise
        records = [_described(record, self._compressor) for record, _ in items]
        if verb == "delete" and not self._is_async:
            # Workers that have pushed as often have no round open.
            records = [{**one, "pushed": self._transfers.round_of(one["key"])} for one in records]
        number, _ = self._link.agree(what, Kind.KEYS, call_number, {"records": records, verb: True})
        if self.rank == 0:
            if verb == "delete" and not self._is_async:
                keys = Selection(record for record, _ in items)
                with self._lock:
                    last = self._pull_now(keys, [()] * len(items), CallOptions())
                with suppress(RuntimeFault):  # A round that failed is over, too.
                    last.wait()
            values = [(record, self._transfers.shards[record.key], value) for record, value in items]
            fill(self._link, what, number, values, {**self._facts, verb: True})

    def delete(self, records: list[KeyRecord], call_number: int) -> None:
        self._change("delete", [(record, Zeros(record.shape, record.dtype)) for record in records], call_number)
        with self._lock:
            # What they keep is of keys by their names, which others may have now.
            self._plans.clear()
            self._flush()
            self._gathering = CallBatch(self._flush)
            for record in records:
                del self._transfers.shards[record.key]
                self._compressor.forget(record.key)

    def push(self, keys: Selection, values: Sequence[Value], call: CallOptions) -> Pending:
        with self._lock, self._link.span("push", keys=len(keys.records)):
            # Another thread may have closed the store since the call began: what `close` does not see would be lost.
            self.lifetime.check()
            self._begin()
            if self._gathers(keys, True):
                gathered = self._gathering.push(keys, cast("Sequence[Array]", values), call)
                if self._gathering.size_bytes >= GATHERED_BYTES:
                    self._flush()
                return gathered
            self._flush()
            if call.waits and not self._is_async:
                self._pushed = keys
                if keys.pulled_next >= PULLED_NEXT and self._transfers.goes_at_once(keys):
                    # Every push of these keys was followed by their pull. To ask for its result now saves a message and
                    # an answer of each server. The answer is of the round that the pull would ask for, whenever that
                    # comes: no other call lies between.
                    self._expected = self._pushpull_now(keys, cast("Sequence[Array]", values), call)
                    self._learn(Kind.PUSH, keys, call)
                    return CompletedCall(f"push of {keys.named}")
            sent = self._push_now(keys, values, call)
            self._learn(Kind.PUSH, keys, call)
            return sent

    def pull(self, keys: Selection, outs: Sequence[Sequence[DeviceArray]], call: CallOptions) -> Pending:
        with self._lock, self._link.span("pull", keys=len(keys.records)):
            self._learn(Kind.PULL, keys, call)
            self._land()
            if keys is self._pushed:
                keys.pulled_next += 1
                expected, self._pushed, self._expected = self._expected, None, None
                if expected is not None:
                    sent, taking = expected
                    sent.take = partial(taking, outs, False)
                    return sent
            self._begin()
            if not call.waits and self._gathers(keys, False):
                return self._gathering.pull(keys, outs, call)
            self._flush()
            return self._pull_now(keys, outs, call)

    def pushpull(
        self, keys: Selection, values: Sequence[Value], outs: Sequence[Sequence[DeviceArray]], call: CallOptions
    ) -> Pending:
        # The pull follows its push on the same connections and asks for its round.
        with self._lock, self._link.span("pushpull", keys=len(keys.records)):
            self.lifetime.check()
            self._begin()
            if not call.waits and self._gathers(keys, True):
                first = self._gathering.push(keys, cast("Sequence[Array]", values), call)
                both = Both(f"pushpull of {keys.named}", first, self._gathering.pull(keys, outs, call, own=True))
                if self._gathering.size_bytes >= GATHERED_BYTES:
                    self._flush()
                return both
            self._flush()
            if not self._is_async and self._transfers.goes_at_once(keys, call.waits):
                sent, taking = self._pushpull_now(keys, cast("Sequence[Array]", values), call)
                self._learn(Kind.PUSHPULL, keys, call)
                sent.take = partial(taking, outs, True)
                return sent
            push = self._push_now(keys, values, call)
            return Both(f"pushpull of {keys.named}", push, self._pull_now(keys, outs, call, own=True))

    def exchange(
        self,
        keys: Selection,
        values: Sequence[Value],
        asked: Selection,
        outs: Sequence[Sequence[DeviceArray]],
        call: CallOptions,
    ) -> Pending:
        what = f"the next round of {asked.named}"
        with self._lock, self._link.span("exchange", keys=len(asked.records)):
            self.lifetime.check()
            self._begin()
            self._flush()
            if asked.records[0] in keys.records:
                return Both(what, self._push_now(keys, values, call), self._pull_now(asked, outs, call, own=True))
            request, taking = self._transfers.exchange(what, keys, cast("Sequence[Array]", values), asked, call)
            self._note_unanswered(request)
            return SentCall(request, self._link, self.lifetime.late, partial(taking, outs, True), is_watched=True)

    def _note_unanswered(self, request: NodeRequest) -> None:
        request.then(self._answered)
        self._unanswered = [*(old for old in self._unanswered if not old.is_done), request]

    def _pushes(self) -> list[NodeRequest]:
        """Return what is done when servers have all that was contributed. Call with the lock held."""
        if not all(request.is_done for request in self._unanswered):
            # It goes behind all that waits to be sent.
            self._open.append(self._link.ask_servers("the end of pushes", Kind.RELEASE, priority=LAST))
        self._unanswered = []
        return [request for request in self._open if not request.is_done]

    def _begin(self) -> None:
        """Begin a call that is not the pull of what was just pushed. Call with the lock held."""
        self._land()
        keys, expected = self._pushed, self._expected
        self._pushed = self._expected = None
        if keys is not None:
            # Asking in vain has cost something, so it is not forgotten when another push is not followed either.
            keys.pulled_next = min(keys.pulled_next, 0 if expected is None else PULLED_NEXT - PULLED_NEXT_AGAIN)
        if expected is not None and not expected[0].is_done:
            # The result is not wanted. Later calls wait until servers have what was pushed, not for other workers.
            expected[0].disregard()
            self._open.append(self._link.ask_servers("the end of a push", Kind.RELEASE))

    def _gathers(self, keys: Selection, is_push: bool) -> bool:
        """Whether a call goes with others, later: it is small, and something is under way. Call with the lock held.

        A push waits for pushes only, which servers acknowledge at once. A pull may wait for another worker, and that
        one for this push.
        """
        if keys.has_rows or self.compresses or keys.size_bytes >= SMALL_CALL_BYTES:
            return False
        if not is_push and self._gathering.count:
            return True
        return not all(map(_IS_DONE, self._open if is_push else [*self._open, *self._asked]))

    def _flush(self) -> None:
        """Send the small calls that were kept."""
        with self._lock:
            for is_push, keys, arrays, call, waiting in self._gathering.take() if self._gathering.count else ():
                own = self._gathering.own
                sent = self._push_now(keys, arrays, call) if is_push else self._pull_now(keys, arrays, call, own)
                for gathered in waiting:
                    gathered.sent = sent

    def _answered(self, error: RuntimeFault | None) -> None:
        """A call was answered: send what was kept meanwhile. In the thread of the node."""
        if not self._gathering.count:
            return
        try:
            self._flush()
        except Exception as err:
            # The store was closed, or the process has lost the job: the next call is told.
            self.lifetime.late.add(err, err)

    def steady(
        self, kind: Kind, key: Any, values: Any, outs: Any, *, priority: object, scale: object = 1.0
    ) -> Pending | None:
        if own_pid() != self._pid:
            self.lifetime.check_process()  # in a child that was forked the lock is never released
        if type(key) is str or type(key) is int:
            values, outs = (values,), (outs,)
        # A signal handler may raise behind any call, but not within what C does by one: the lock is taken and noted by
        # one call, and given back by one, once.
        held: list[threading.RLock] = []
        let_go = partial(next, map(_RELEASE, held), None)
        try:
            held += compress((self._lock,), map(self._lock.acquire, (True,)))
            plan = self._plans.find(kind, key, priority, scale)
            if plan is None or not self._link.plans:
                return None
            self.lifetime.check()
            self.lifetime.late.raise_first()
            if not plan.fits(kind, values, outs) or self._planning.locked():
                return None
            with self._planning:  # It is free: only who has the lock takes it, but for `close`, which gives it back.
                return self._steady(kind, plan, values, outs, let_go)
        finally:
            let_go()

    def _steady(
        self, kind: Kind, plan: CallPlan, values: Sequence[Array], outs: Sequence[Array], sent: Callable[[], None]
    ) -> Pending | None:
        """Make a call by its plan. Call with the lock held; `sent` releases it, so that others may call meanwhile."""
        keys, ahead = plan.keys, self._ahead
        follows = kind is PULL and keys is self._pushed
        was_asked_ahead = bool(ahead) and follows
        comes_after_others = ahead or self._expected or self._gathering.count or self._link.unanswered
        if comes_after_others and not was_asked_ahead:
            return None  # Something is kept, or not answered.
        asks_ahead = kind is PUSH and keys.pulled_next >= PULLED_NEXT
        if kind is PUSH and not asks_ahead and keys.size_bytes >= SMALL_CALL_BYTES:
            return None  # To wait until servers have it would take as long as the bytes do.
        if follows:
            keys.pulled_next += 1
            self._pushed = self._ahead = None
        elif self._pushed is not None:
            self._begin()
        if ahead is not None:
            sent()
            return self._answer(ahead, outs, partial(self._finish, ahead), own=False)
        done = plan.done
        if asks_ahead:
            plan = self._plans.asking(plan)
        made = self._transfers.begin(plan, values, lent=kind is PUSHPULL)
        if made is None:
            self._plans.drop(plan.name)
            return None
        try:
            begun = partial(self._link.begun, made.requests)
            exchange = partial(self._node.exchange, made.sends, partial(self._transfers.asked, made), begun)
            if kind is PUSH:
                self._pushed = keys
                if plan.name[0] is PUSHPULL:
                    try:
                        made.ahead = exchange(waits=False)
                    finally:
                        self._ahead = made if made.ahead or made.requests else None
                    return done
            return self._answer(made, outs, partial(exchange, sent), own=kind is PUSHPULL)
        except BaseException:
            if not made.sends.is_begun:
                self._transfers.take_back(made)
            raise

    def _finish(self, made: PlannedCall, *, waits: bool = True) -> Any:
        """Receive the answers of a push that asked for its result; return them, or the request."""
        ahead, made.ahead = made.ahead, None  # It refers to the call, too: with it, the memory of values goes at once.
        return self._node.finish(ahead, waits=waits) if isinstance(ahead, CallUnderWay) else made.requests[0]

    def _land(self) -> None:
        """Have a push that asked for its result go on as a request. Call with the lock held."""
        made, self._ahead = self._ahead, None
        if made is not None:
            self._expected = self._pushing(made, self._finish(made, waits=False))

    def _pushing(self, made: PlannedCall, request: NodeRequest) -> tuple[SentCall, Taking]:
        taking = self._transfers.goes_on(made, request)
        request.then(self._answered)
        return SentCall(request, self._link, self.lifetime.late, is_watched=True), taking

    def _answer(self, made: PlannedCall, outs: Sequence[Array], exchange: Callable[[], Any], *, own: bool) -> Pending:
        """Receive the answers of a steady call in this thread; `own` as for `_pull_now`."""
        try:
            answers = exchange()
        except BaseException:
            # It was interrupted: what was sent goes on.
            for request in made.requests:
                self._goes_on(made, request, outs, own).left_waiting()
            raise
        if isinstance(answers, NodeRequest):
            return self._goes_on(made, answers, outs, own)
        skipped = self._transfers.take(made, answers, outs, own)
        if not skipped:
            return made.plan.done
        done = CompletedCall(made.plan.done.what)
        done.skipped = skipped
        return done

    def _goes_on(self, made: PlannedCall, request: NodeRequest, outs: Sequence[Array], own: bool) -> SentCall:
        """Return a steady call that has become a request."""
        kind = made.plan.name[0]
        with self._lock:
            if kind is PUSH:
                self._transfers.goes_on(made, request)
                return self._sent(request)
            if kind is PUSHPULL:
                sent, taking = self._pushing(made, request)
            else:
                sent, taking = SentCall(request, self._link, self.lifetime.late), self._transfers.goes_on(made, request)
        sent.take = partial(taking, [(out,) for out in outs], own)
        return sent

    def _learn(self, kind: Kind, keys: Selection, call: CallOptions) -> None:
        """Have the call that was just made planned from now on, if that can be. Call with the lock held."""
        if call.waits and self._link.plans and not (self._is_async or self.compresses):
            for each in {kind, PUSHPULL if kind is PUSH else kind}:
                plan = self._transfers.plan(each, keys, call)
                if plan is not None:
                    self._plans.keep(plan)

    def skip(self, records: list[KeyRecord], note: Mapping[str, Any]) -> Pending:
        if self._is_async:
            return super().skip(records, note)
        what = f"skip_round of {named(record.key for record in records)}"
        with self._lock, self._link.span("skip_round", keys=len(records)):
            self._begin()
            self._flush()
            self.lifetime.check()
            push = self._sent(self._transfers.skip(what, Selection(records), note))
            # Any key tells what the workers said; the smallest costs least.
            first = min(records, key=lambda record: (record.is_sparse, record.size))
            return Both(what, push, self._pull_now(Selection([first]), [()], CallOptions(), own=True))

    def check(self, items: list[Contribution]) -> None:
        compressed = [item for item in items if self._compressor.of(item[0]) is not None]
        self._check([record for record, _ in compressed], self.reducer.reduce(compressed))

    def _check(self, records: Sequence[KeyRecord], values: Sequence[Value]) -> None:
        """Return if all values can be compressed, or need not be."""
        pairs = zip(records, values, strict=True)
        self._compressor.check_all((one, each.reshape(-1), 0) for one, each in pairs if not isinstance(each, RowSparse))

    def _push_now(self, keys: Selection, values: Sequence[Value], call: CallOptions) -> Pending:
        """Send a push. Call with the lock held."""
        if self.compresses:
            self._check(keys.records, values)
        return self._sent(*self._transfers.push(f"push of {keys.named}", keys, values, call))

    def _pushpull_now(self, keys: Selection, values: Sequence[Array], call: CallOptions) -> tuple[SentCall, Taking]:
        """Send a push and its pull as one; return it, and what takes the result in. Call with the lock held.

        It is not among the pushes that later calls wait for: these must not wait for other workers.
        """
        request, taking = self._transfers.pushpull(f"pushpull of {keys.named}", keys, values, call)
        if call.waits:
            request.then(self._answered)
        else:
            self._note_unanswered(request)
        return SentCall(request, self._link, self.lifetime.late, is_watched=True), taking

    def _sent(self, request: NodeRequest, settle: Callable[[], None] | None = None) -> SentCall:
        """Return the outcome of a push that was sent. Call with the lock held."""
        self._open = [*(old for old in self._open if not old.is_done), request]
        request.then(self._answered)
        return SentCall(request, self._link, self.lifetime.late, settle=settle, is_watched=True)

    def _pull_now(
        self, keys: Selection, outs: Sequence[Sequence[DeviceArray]], call: CallOptions, own: bool = False
    ) -> Pending:
        """Send a pull. Call with the lock held.

        Arguments:
            own: it belongs to the push before it: outputs of keys whose round was skipped stay as they are.
        """
        request, take = self._transfers.pull(f"pull of {keys.named}", keys, outs, priority=call.priority, own=own)
        if keys.size_bytes < SMALL_CALL_BYTES:
            self._asked = [*(old for old in self._asked if not old.is_done), request]
            request.then(self._answered)
        return SentCall(request, self._link, self.lifetime.late, take)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        return self._node.empty(shape, dtype)

    def view(self, keys: Selection) -> Sequence[Array]:
        with self._lock, self._link.span("view", keys=len(keys.records)):
            self._begin()
            self._flush()
            asked = self._transfers.views(f"view of {keys.named}", keys)
        if asked is None:
            return super().view(keys)
        request, found, take = asked
        SentCall(request, self._link, self.lifetime.late, take).wait()
        return found

    def pull_rows(self, items: list[RowsItem], call: CallOptions) -> Pending:
        with self._lock, self._link.span("row_sparse_pull", keys=len(items)):
            self._begin()
            self._flush()
            what = f"row_sparse_pull of {named((record.key for record, _, _ in items))}"
            request, take = self._transfers.pull_rows(what, items, priority=call.priority)
        return SentCall(request, self._link, self.lifetime.late, take)

    def pushpull_rows(
        self, keys: Selection, values: Sequence[Value], items: list[RowsTarget], call: CallOptions
    ) -> Pending:
        if self._is_async:
            raise KVError(f"pushpull of {keys.named}: a {self.type!r} store has no rounds of which rows come")
        with self._lock, self._link.span("pushpull", keys=len(items)):
            self.lifetime.check()
            self._begin()
            self._flush()
            push = self._push_now(keys, values, call)
            request, take = self._transfers.pull_round(f"pull of {keys.named}", items, priority=call.priority)
            pull = SentCall(request, self._link, self.lifetime.late, take)
        return Both(f"pushpull of {keys.named}", push, pull)

    # What a push does

    def set_rule(self, spec: RuleSpec, replace: bool | None) -> None:
        self._drain()
        body = {"spec": spec.to_json(), "replace": replace}
        self._link.scheduler(f"set_optimizer({spec.name!r})", Kind.RULE, body)

    def change_rule(self, change: Mapping[str, Any]) -> None:
        self._drain()
        self._link.scheduler("a change of the rule", Kind.RULE, {"change": dict(change)})

    def set_updater(self, updater: Updater | None) -> None:
        self._drain()
        spec = None if updater is None else RuleSpec("updater", {"function": importable(updater)}).to_json()
        self._link.scheduler("set_updater", Kind.RULE, {"spec": spec, "replace": True})

    @property
    def compresses(self) -> bool:
        return self._compressor.is_on

    def compress(self, setting: Compression, keys: list[Key] | None) -> None:
        # What was pushed through relays is at its servers before what goes straight to them.
        self._settle()
        with self._lock:
            self._compressor.set(setting, keys)
            self._plans.clear()

    # States and facts

    def save(self, folder: str) -> None:
        self._drain()
        with self._lock:
            residuals, numbers = self._compressor.residuals(), self._numbers()
        saving.save(self._link, folder, residuals, numbers)

    def load(self, folder: str) -> None:
        self._drain()
        with self._lock:
            keys = {key: (its[0].key, its[-1].end) for key, its in self._transfers.shards.items()}
        residuals, rounds = saving.load(self._link, folder, keys)
        with self._lock:
            # One here, also of a store that compressed each device's part.
            whole = {key: np.atleast_2d(rows).sum(axis=0, dtype=np.float32) for key, rows in residuals.items()}
            self._compressor.restore(whole)
            for key, number in rounds.items():
                self._transfers.set_round(key, number)

    def _numbers(self) -> dict[Key, int]:
        """Return each key's number in messages."""
        return {key: its[0].key for key, its in self._transfers.shards.items()}

    def stats(self) -> list[dict[str, Any]]:
        return self._link.servers("stats", Kind.STATS)

    def profile(self, folder: str) -> AbstractContextManager[None]:
        return profile(self._link, folder)

    def num_dead(self, mask: int) -> int:
        return self._node.num_dead([role for bit, role in ROLES.items() if mask & bit], self._link.members)

    # Membership

    def barrier(self) -> Pending:
        return self._barrier(waits=False)

    def meet(self) -> Pending:
        return self._barrier(waits=True)

    def _barrier(self, *, waits: bool) -> Pending:
        with self._lock:
            self._begin()
            self._flush()
            number, pushes = self._link.next_call(), self._pushes()
            pushes = [*pushes, *self._settle_relays(pushes)]
        if waits and self._link.plans and not pushes:
            call = self._link.meet("barrier", Kind.BARRIER, number)
        else:  # The scheduler hears of it when the servers have all that was pushed.
            call = self._link.begin("barrier", Kind.BARRIER, number, {}, after=pushes)
        if call is None:
            self.lifetime.late.raise_first()
            return CompletedCall("barrier")
        late, leave = self.lifetime.late, partial(self._link.leave, call)
        return SentCall(call.request, self._link, late, lambda replies: {}, left=leave, is_watched=True)

    def join(self) -> None:
        self._drain()
        self._link.together("join", Kind.JOIN)
        # All have joined, so no round is open: the next push of everybody is the round after the last.
        by_number = {number: key for key, number in self._numbers().items()}
        holders = {shard.server for its in self._transfers.shards.values() for shard in its}
        answers = self._link.servers("join", Kind.ROUNDS, ranks=sorted(holders))
        with self._lock:
            for number, done in (pair for answer in answers for pair in answer["rounds"]):
                # A number that we do not know is of a key whose init failed.
                if number in by_number:
                    key = by_number[number]
                    self._transfers.set_round(key, max(self._transfers.round_of(key), done))

    def leave(self) -> None:
        self._drain()
        close_link(self._link)
        self._link.scheduler("leave", Kind.LEFT, {})

    def close(self) -> None:
        close_link(self._link)
        try:
            self._settle()
        finally:
            # Nothing is left to flush, and what the store holds may go.
            self._node.not_before_end(self._flush_at_end)
            self._compressor.clear()
            with self._lock:
                self._plans.clear()
                self._open, self._asked, self._unanswered = [], [], []
                self._transfers = Transfers(self._link, self._compressor)
                self._gathering = CallBatch(self._flush)
            self._node.unreserve(self._link.store)
            self.reducer.trim()
            # Another thread's call is soon answered, or among those that the end comes after.
            if self._planning.acquire(timeout=PLANNED_S):
                self._planning.release()
            self._link.close()

    def give_up(self, error: BaseException) -> None:
        self._node.not_before_end(self._flush_at_end)
        # One that is unused stays as it is, if this worker has only stopped waiting: the next `create` takes its place,
        # if others wait here. After an error it may be for something else.
        has_failed = isinstance(error, Exception) and not isinstance(error, TimedOut)
        if has_failed or not self._link.is_unused:
            close_link(self._link)
            # The process may have lost the job: then all are told anyway.
            with suppress(RuntimeFault):
                self._link.give_up(f"{type(error).__name__}: {error}")
            self._link.close()

    def _replaced(self) -> None:
        """A later `create` has taken the place of this store, which was not used."""
        self.lifetime.retire("was replaced by a later create, as it was not used before")
        self._node.not_before_end(self._flush_at_end)

    def abort(self, error: BaseException) -> None:
        self._node.note_crash(error)
        # Now: the script may catch the error and go on for long, and the others wait.
        self._node.end()

    def _drain(self) -> None:
        """Wait until the servers have all that was pushed; raise what they have against it."""
        self._settle()
        self.lifetime.late.raise_first()

    def _settle(self, keys: Sequence[Key] = ()) -> None:
        """Wait until the servers have answered all pushes, and all that was asked of some keys, well or not."""
        with self._lock:
            self._begin()
            self._flush()
            pushes = self._pushes()
            pushes += self._settle_relays(pushes)
            if self._transfers.is_on_gpu:
                # Acknowledged or not, what is pushed may still be to come from our GPU, which works no more when this
                # process has ended.
                pushes.append(self._link.ask_servers("the end of pushes", Kind.RELEASE, after=pushes))
                self._transfers.is_on_gpu = False
            numbers = {self._transfers.shards[key][0].key for key in keys}
            pushes += [request for request in list(self._link.unanswered) if not numbers.isdisjoint(request.keys)]
        for request in pushes:
            try:
                request.wait(self._link.limit_s)
            except RuntimeFault:
                if not request.is_done:
                    raise  # It took too long.

    def _settle_relays(self, pushes: Sequence[NodeRequest]) -> list[NodeRequest]:
        """Have relays pass on what was pushed through them; `pushes` are those under way. Call with the lock held."""
        relays, self._transfers.relays = self._transfers.relays, set()
        if not relays:
            return []
        return [self._link.ask_servers("the end of pushes", Kind.SETTLE, ranks=sorted(relays), after=pushes)]

    def _flush_at_end(self) -> None:
        if not self.lifetime.is_over:
            self.lifetime.line.finish()
            self._drain()
