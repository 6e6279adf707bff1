"""Implements push, pull and pushpull of a distributed store.

Which shards share a message is decided in `ps.routing`: for plain and encoded values once for each list of keys, for
rows of row-sparse values at each call. Here are the payloads, this worker's rounds and its buckets.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.device import DeviceArray, copy, is_on_host
from distrun_runtime.arrays.dtypes import Array, Buffer
from distrun_runtime.arrays.gpu_frames import IN_USE, readable
from distrun_runtime.arrays.shared_memory import Pool, Stitched, stitched
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import KVError, RuntimeFault
from distrun_runtime.ops import compression as codecs
from distrun_runtime.ops import reduce
from distrun_runtime.ops.compression import NONE, ROWS
from distrun_runtime.ops.partition import Shard
from distrun_runtime.ops.reduce import PLAIN, How
from distrun_runtime.protocol.message import (
    DTYPES,
    NO_ENTRIES,
    PULL,
    PUSH,
    PUSHPULL,
    Kind,
    Message,
    Payload,
    decode,
    encode,
    payloads_of,
)
from distrun_runtime.ps import counters
from distrun_runtime.ps.counters import COPY_IN
from distrun_runtime.ps.role import NodeRequest
from distrun_runtime.ps.routing import (
    BUCKET_ENTRIES,
    MESSAGE_BYTES,
    NOTHING_IN_PLACE,
    Buckets,
    InPlace,
    Portion,
    Route,
    message_limit,
    portions_of,
)
from distrun_runtime.ps.session import Asked, Commitment, PlannedSends
from distrun_runtime.ps.shards import Notes
from distrun_runtime.store.base import CallOptions, RowsTarget, Selection
from distrun_runtime.store.compress import Compression, Compressor
from distrun_runtime.store.keys import Key, KeyRecord
from distrun_runtime.store.link import StoreLink, is_added_on_hosts
from distrun_runtime.store.pending import Late, Pending, check_process, check_seconds
from distrun_runtime.store.plans import (
    LOOKED_BYTES,
    PLANNED_BYTES,
    STAGED_BYTES,
    CallPlan,
    PlannedCall,
    PlannedMessage,
    SpareMemory,
)
from distrun_runtime.store.values import RowSparse, Value

if TYPE_CHECKING:
    from distrun_runtime.arrays.gpu import GpuArray, GpuDevice


# What becomes of a call that was sent to servers: its replies, processed by the thread that waits for them.


Take = Callable[["tuple[Message, ...]"], Notes]
"""Takes the replies in: fills the outputs, and returns what is to be known of a skipped round."""


class SentCall(Pending):
    """A request of a store. Outputs are filled by the first `wait` that finds all replies there.

    Arguments:
        left: called by `left_waiting`.
        settle: called by `wait` when all replies are there; may wait for servers, never for workers.
        is_watched: the store's next call raises its error, unless `wait` does before.
    """

    def __init__(
        self,
        request: NodeRequest,
        link: StoreLink,
        late: Late,
        take: Take | None = None,
        *,
        left: Callable[[], None] = lambda: None,
        settle: Callable[[], None] | None = None,
        is_watched: bool = False,
    ) -> None:
        self.what = request.what
        self.take = take
        """How `wait` takes the replies in. It may be set until a thread waits."""
        self._request = request
        self._link = link
        self._late = late
        self._left = left
        self._settle = settle
        self._is_left = False
        self._is_over = False
        """Whether a `wait` has returned: there is nothing more to be told."""
        self._lock = threading.Lock()
        self._pid = os.getpid()
        if is_watched:
            request.then(self._note, only_errors=True)

    @property
    def is_done(self) -> bool:
        """Whether all replies are there, or an error is."""
        return self._request.is_done

    def when_done(self, act: Callable[[], None]) -> None:
        """Call it when all replies are there, or an error is."""
        self._request.then(lambda error: act())

    def fill(self) -> None:
        """Take the replies in; raises what went wrong, without reporting it."""
        check_process(self._pid, self.what)
        if not self._is_over and self._request.error is None and not self._late.has_errors:
            self._take_in(self._request.replies)

    def left_waiting(self) -> None:
        """Note that the call which made it has stopped waiting before it was done; no later call raises its error."""
        self._is_left = True
        self._left()

    def disregard(self) -> None:
        """Note that its replies are not wanted; errors are reported all the same."""
        self._request.then(lambda error: self._request.forget())

    def _note(self, error: RuntimeFault | None) -> None:
        if error is not None and not self._is_left:
            self._late.add(self, error)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when it is done; raise what went wrong, with this call or with an earlier push of the store."""
        check_process(self._pid, self.what)
        timeout_s = check_seconds(timeout_s)
        if self._is_over:
            return
        with self._link.span("wait", call=self.what):
            with self._late.told(self):
                if timeout_s is None:
                    replies = self._request.wait(self._link.limit_s)
                else:
                    replies = self._request.wait(timeout_s, "as long as wait was to wait")
            if self.take is not None:
                # An earlier push may have been refused: then the servers answered that first, and this is not its
                # result.
                self._late.raise_first()
            self._take_in(replies)
        self._is_over = True

    def _take_in(self, replies: tuple[Message, ...]) -> None:
        if self.take is not None:
            with self._lock, self._link.stage(COPY_IN):
                if self.take is not None:
                    self.skipped = self.take(replies)
                # Last: one that was interrupted is to be waited for again.
                self.take = None
                self._request.forget()
        if self._settle is not None:
            self._settle()


class Both(Pending):
    """A push and what follows it, as one call."""

    def __init__(self, what: str, push: Pending, then: Pending) -> None:
        self.what = what
        self._push = push
        self._then = then

    @property
    def is_done(self) -> bool:
        """Whether both are."""
        return self._push.is_done and self._then.is_done

    def fill(self) -> None:
        """Take in what both got."""
        self._push.fill()
        self._then.fill()
        self.skipped = self._then.skipped

    def when_done(self, act: Callable[[], None]) -> None:
        """Call it when both are."""
        self._push.when_done(lambda: self._then.when_done(act))

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when both are done; raise the push's error rather than that of what followed."""
        timeout_s = check_seconds(timeout_s)
        started = time.monotonic()
        self._push.wait(timeout_s)
        self._then.wait(None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - started)))
        self.skipped = self._then.skipped


BY_ROWS = How(ROWS)
"""How values of row-sparse keys travel."""

_NOTHING = np.empty(0)

Taking = Callable[["Sequence[Sequence[DeviceArray]]", bool, "tuple[Message, ...]"], Notes]
"""A `Take` for given outputs; the second argument is `own`, as for `Transfers.pull`."""

Loaded = tuple[Portion, Sequence[Buffer], Payload]
"""What a message carries, its frames, and where the entries' values are."""


def _without_values(route: Route) -> list[Loaded]:
    """Return the messages of a route that carry no values: pulls, and contributions of nothing."""
    return [(portion, (), Payload.NONE) for portion in route.portions]


def _payload_of(kind: Kind) -> Payload:
    """Return where the values are of entries that a bucket may stand for."""
    return Payload.NONE if kind is Kind.PULL else Payload.PACKED


class _SentPart(NamedTuple):
    """Messages of one kind that ask for something about the same keys."""

    kind: Kind
    route: Route
    loaded: Sequence[Loaded]
    rounds: Array
    """Of the keys, in the order of the route's numbers."""


@dataclass(frozen=True)
class _Routes:
    """The routes of one list of keys."""

    version: tuple[int, int]
    """Of the compressor's settings that they were made with, and the most that their messages carry."""
    plain: Route
    """The route of uncompressed values."""
    push: Route
    pull: Route
    """These are `plain` if nothing is encoded: what a push has registered, a pull names."""
    are_plain: bool
    """Whether nothing is encoded, and no key is row-sparse: one route serves pushes and pulls."""


class Transfers:
    """Sends a store's requests to the servers and handles the replies.

    Not thread-safe, with two exceptions: a `Take` runs in the waiting thread; `entries_of` and completion callbacks run
    in the node's thread.
    """

    def __init__(self, link: StoreLink, compressor: Compressor) -> None:
        self._link = link
        self._compressor = compressor
        self.shards: dict[Key, tuple[Shard, ...]] = {}
        """In the order of their offsets."""
        self._rounds = np.zeros(0, np.int64)
        """By key number: the number of this worker's pushes, which is the round of the last one."""
        self._spare = SpareMemory()
        self._answered = np.zeros(0, np.int64)
        """By key number: the last round of which this worker has had the outcome."""
        self._buckets = Buckets()
        self._stitched: Stitched = OrderedDict()
        """What `view` has put together."""
        self.is_on_gpu = False
        """Whether servers were told of values on a GPU that they may not have waited for yet."""
        self.relays: set[int] = set()
        """Servers of this host that have got contributions for servers of others, since the store was last settled."""

    def add(self, key: Key, shards: tuple[Shard, ...]) -> None:
        """Take in a key."""
        self.shards[key] = shards
        number = shards[0].key
        if number >= len(self._rounds):
            self._rounds, self._answered = (
                np.concatenate([known, np.zeros(max(len(known), number + 1 - len(known)), np.int64)])
                for known in (self._rounds, self._answered)
            )

    def round_of(self, key: Key) -> int:
        """Return the round of this worker's last push of a key."""
        return int(self._rounds[self.shards[key][0].key])

    def set_round(self, key: Key, number: int) -> None:
        """Go on with another round."""
        self._rounds[self.shards[key][0].key] = number

    # Contributions

    def push(
        self, what: str, keys: Selection, values: Sequence[Value], call: CallOptions
    ) -> tuple[NodeRequest, Callable[[], None]]:
        """Send one value of each key as this worker's contribution to its next round.

        Returns:
            The request; and a function to be called when it is answered: it has servers copy what they still read in
            the memory of the values (they acknowledge a push before its round is over).
        """
        route = self._routes(keys).push
        in_place = NOTHING_IN_PLACE
        loaded: list[Loaded] = []
        if keys.has_rows:
            loaded += self._with_rows(keys, values)
            pairs = zip(keys.records, values, strict=True)
            # Rows of no elements do not travel.
            values = [
                value.to_dense() if isinstance(value, RowSparse) and not _has_rows(record) else value
                for record, value in pairs
            ]
        arrays = cast("Sequence[Array]", values)
        # What the script may write when the call has returned is not read in place: it would have to wait for that.
        if call.own or (call.lent and not call.waits):
            in_place = self._in_place(route, arrays)
        loaded += self._load(route, keys, arrays, call.lent, in_place)
        request = self._contribute(what, [self._next(Kind.PUSH, route, loaded)], call)
        to_release = frozenset() if call.own else in_place.items
        return request, lambda: self._release(what, route, to_release)

    def _load(
        self, route: Route, keys: Selection, values: Sequence[Array], lent: bool, in_place: InPlace
    ) -> list[Loaded]:
        """Return the messages of a route with their values."""
        loaded: list[Loaded] = []
        with self._link.stage(counters.COPY_OUT):
            for portion in route.portions:
                staging = self._staging(portion)
                if IN_USE and portion.is_plain and not is_on_host(next(portion.cut(values), _NOTHING)):
                    self.is_on_gpu = True
                    loaded.append((portion, _frames_there(portion, values), Payload.PACKED))
                elif portion.is_plain:
                    loaded.append((portion, portion.gather(values, lent, staging, in_place), Payload.PACKED))
                else:
                    frames = self._compressor.encode_all(portion, keys.records, values, staging)
                    loaded.append((portion, frames, Payload.FRAME))
        return loaded

    def _staging(self, portion: Portion) -> Pool | None:
        """Return memory that a portion's server reads where it is; None: it does not, or the portion is small."""
        if portion.is_plain and portion.size * portion.dtype.itemsize < STAGED_BYTES:
            return None
        return self._link.node.staging(portion.link)

    def _in_place(self, route: Route, values: Sequence[Array]) -> InPlace:
        """Return which values servers can read where they are."""
        node = self._link.node
        if not node.has_arrays or not any(node.staging(portion.link) for portion in route.portions):
            return NOTHING_IN_PLACE
        kept = route.in_place
        known = kept.get(ids := tuple(map(id, values)))
        if known is None:
            here = (item for item in route.runs if is_on_host(values[item]) and values[item].flags.c_contiguous)
            known = InPlace(frozenset(item for item in here if node.is_shared(values[item])), {})
            # The same arrays come in every step. What is kept of them must not outlive any of them.
            kept.clear()
            route.watched = [weakref.ref(values[at], lambda _: kept.clear()) for at in known.items]
            if known.items:
                kept[ids] = known
        return known

    def _release(self, what: str, route: Route, in_place: frozenset[int]) -> None:
        """Have servers copy what they still read in the memory of values, unless their round is over."""
        numbers = route.numbers[list(in_place)]
        if in_place and (self._answered[numbers] < self._rounds[numbers]).any():
            self._link.servers(f"the end of {what}", Kind.RELEASE)

    def goes_at_once(self, keys: Selection, waits: bool = True) -> bool:
        """Whether `pushpull` takes these keys: plain values, for which servers need no window while the other workers
        are waited for. They need none in shared memory, and for one message if the call `waits`: it is the only one."""
        routes = self._routes(keys)
        if not routes.are_plain:
            return False
        is_one_message = waits and keys.size_bytes <= MESSAGE_BYTES
        return is_one_message or all(self._link.node.staging(portion.link) for portion in routes.plain.portions)

    def pushpull(
        self, what: str, keys: Selection, values: Sequence[Array], call: CallOptions
    ) -> tuple[NodeRequest, Taking]:
        """Send one value of each key and ask for what comes of the round, by the same messages.

        Returns:
            The request, and what takes its replies in for outputs.
        """
        route = self._routes(keys).plain
        # The answer comes when the round is over: then nothing is read any more. So a lent value needs no release, also
        # if the call waits; of a push that waits only the store's own sums are lent.
        in_place = self._in_place(route, values) if call.lent else NOTHING_IN_PLACE
        loaded = self._load(route, keys, values, False, in_place)
        request = self._contribute(what, [self._next(Kind.PUSHPULL, route, loaded)], call)
        return request, partial(self._taken, route=route, rounds=self._rounds[route.numbers], records=keys.records)

    def _taken(
        self,
        outs: Sequence[Sequence[DeviceArray]],
        own: bool,
        replies: tuple[Message, ...],
        *,
        route: Route,
        rounds: Array,
        records: Sequence[KeyRecord],
    ) -> Notes:
        """Write the answers of a pull into its outputs, and note that these rounds were answered."""
        notes = _fill(route, records, outs, replies, own)
        self._answered[route.numbers] = np.maximum(self._answered[route.numbers], rounds)
        return notes

    def exchange(
        self, what: str, keys: Selection, values: Sequence[Array], asked: Selection, call: CallOptions
    ) -> tuple[NodeRequest, Taking]:
        """Send one value of each key, contribute nothing to the next round of others, and ask for what comes of that.

        It is one request: all of it is sent, or nothing. Returns as `pushpull`, for the keys that are asked for.
        """
        route = self._routes(asked).plain
        parts = [self._next(Kind.PUSHPULL, route, _without_values(route))]
        if keys.records:
            push = self._routes(keys).plain
            parts.append(self._next(Kind.PUSH, push, self._load(push, keys, values, False, NOTHING_IN_PLACE)))
        request, count = self._contribute(what, parts, call), len(route.portions)
        taking = partial(self._taken, route=route, rounds=parts[0].rounds, records=asked.records)
        return request, lambda outs, own, replies: taking(outs, own, replies[:count])

    def skip(self, what: str, keys: Selection, note: Mapping[str, Any]) -> NodeRequest:
        """Send that this worker has the next round of keys skipped."""
        route = self._routes(keys).plain
        part = self._next(Kind.PUSH, route, _without_values(route))
        return self._contribute(what, [part], CallOptions(), skip=note)

    def _next(self, kind: Kind, route: Route, loaded: Sequence[Loaded]) -> _SentPart:
        """Return this worker's contribution to the next round of keys."""
        return _SentPart(kind, route, loaded, self._rounds[route.numbers] + 1)

    def _contribute(
        self, what: str, parts: Sequence[_SentPart], call: CallOptions, *, skip: Mapping[str, Any] | None = None
    ) -> NodeRequest:
        body = _body(call.scale)
        if skip is not None:
            body["skip"] = dict(skip)
        request = self._send(what, parts, body=body, priority=call.priority, counts=True)
        # Not `loaded`: its frames are free when their own message is answered.
        self._carries(request, [portion for part in parts for portion, _, _ in part.loaded])
        return request

    def _carries(self, request: NodeRequest, portions: Sequence[Portion]) -> None:
        """A request has contributions under way."""
        for portion in portions:
            portion.carried_by = request
            if portion.is_relayed:
                self.relays.add(portion.server)
        request.then(lambda error: self._buckets.forget(portions), only_errors=True)

    def _with_rows(self, keys: Selection, values: Sequence[Value]) -> list[Loaded]:
        """Return what carries the values of row-sparse keys; each shard counts, also without a row of it."""
        shards: list[tuple[int, Shard]] = []
        frames: list[Buffer] = []
        for item, (record, value) in enumerate(zip(keys.records, values, strict=True)):
            if not _has_rows(record):
                continue
            assert isinstance(value, RowSparse)
            one = value.canonical()
            for shard in self.shards[record.key]:
                here = reduce.within(one.rows, shard.first_row, shard.row_count)
                shards.append((item, shard))
                frames.append(reduce.encode(one.rows[here] - shard.first_row, one.values[here]))
        sizes = [memoryview(frame).nbytes for frame in frames]
        return [
            (portion, [frames[place] for place in portion.places], Payload.FRAME)
            for portion in portions_of(shards, (), [BY_ROWS] * len(keys.records), sizes)
        ]

    # Values

    def pull(
        self, what: str, keys: Selection, outs: Sequence[Sequence[DeviceArray]], *, priority: int, own: bool
    ) -> tuple[NodeRequest, Take]:
        """Ask for the present values of keys; return the request, and what takes its replies.

        Arguments:
            own: it belongs to the push before it: outputs of keys whose round was skipped stay as they are.
        """
        route = self._routes(keys).pull
        request = self._ask(what, route, _without_values(route), priority)
        rounds = self._rounds[route.numbers]
        return request, partial(self._taken, outs, own, route=route, rounds=rounds, records=keys.records)

    def views(self, what: str, keys: Selection) -> tuple[NodeRequest, list[Array], Take] | None:
        """Ask for the present values of keys; return the request, a list, and what puts the values into it, read-only
        and where they are if that can be; None: these keys have no plain values."""
        routes = self._routes(keys)
        if keys.has_rows or routes.pull is not routes.plain:
            return None
        route, found = routes.plain, list[Array]()
        request, rounds = self._ask(what, route, _without_values(route), 0), self._rounds[route.numbers]

        def take(replies: tuple[Message, ...]) -> Notes:
            found[:] = _seen(route, keys.records, replies, self._stitched)
            self._answered[route.numbers] = np.maximum(self._answered[route.numbers], rounds)
            return _said(_skipped_in(replies))

        return request, found, take

    def pull_rows(
        self, what: str, items: Sequence[tuple[KeyRecord, Array, Callable[[Array], None]]], *, priority: int
    ) -> tuple[NodeRequest, Take]:
        """Ask for rows of keys, of which one may be there several times; return as `pull`.

        Arguments:
            items: record, rows (int64, ascending, each once), and what takes their values, (n, *shape[1:]).
        """
        shards: list[tuple[int, Shard]] = []
        runs: list[slice] = []
        frames: list[Buffer] = []
        sizes: list[int] = []
        for item, (record, numbers, _) in enumerate(items):
            for shard in self.shards[record.key] if record.row_size else ():
                here = reduce.within(numbers, shard.first_row, shard.row_count)
                if here.stop > here.start:
                    shards.append((item, shard))
                    runs.append(here)
                    frames.append(reduce.encode_rows(numbers[here] - shard.first_row))
                    # The answer is what there is most of.
                    sizes.append((here.stop - here.start) * record.row_size * record.dtype.itemsize)
        portions = portions_of(shards, (), [BY_ROWS] * len(items), sizes)
        route = Route(np.array([self.shards[record.key][0].key for record, _, _ in items], np.int64), portions)
        loaded = [(each, [frames[place] for place in each.places], Payload.FRAME) for each in portions]
        request = self._ask(what, route, loaded, priority)

        def take(replies: tuple[Message, ...]) -> Notes:
            tables = [np.empty((len(numbers), record.row_size), record.dtype) for record, numbers, _ in items]
            for portion, reply in zip(portions, replies, strict=True):
                found = zip(portion.items.tolist(), portion.places, _answers(portion, reply), strict=True)
                for item, place, (_, _, frame) in found:
                    tables[item][runs[place]] = np.frombuffer(frame, portion.dtype).reshape(-1, items[item][0].row_size)
            for (record, numbers, give), table in zip(items, tables, strict=True):
                give(table.reshape(len(numbers), *record.shape[1:]))
            return _said(_skipped_in(replies))

        return request, take

    def pull_round(self, what: str, items: Sequence[RowsTarget], *, priority: int) -> tuple[NodeRequest, Take]:
        """Ask for the rows of row-sparse keys that came in their last round; return as `pull`."""
        shards = [
            (item, shard)
            for item, (record, _) in enumerate(items)
            for shard in (self.shards[record.key] if record.row_size else ())
        ]
        portions = portions_of(shards, (), [BY_ROWS] * len(items), [len(reduce.ROUND_ROWS)] * len(shards))
        route = Route(np.array([self.shards[record.key][0].key for record, _ in items], np.int64), portions)
        loaded = [(each, [reduce.ROUND_ROWS] * len(each.places), Payload.FRAME) for each in portions]
        request = self._ask(what, route, loaded, priority)

        def take(replies: tuple[Message, ...]) -> Notes:
            parts: list[list[tuple[int, Array, Array]]] = [[] for _ in items]
            for portion, reply in zip(portions, replies, strict=True):
                for (item, shard), _, frame in _answers(portion, reply):
                    width = items[item][0].row_size
                    rows, values = reduce.decode(frame, shard.length // width, width, portion.dtype)
                    parts[item].append((shard.offset, rows + shard.offset // width, values))
            for (record, give), its in zip(items, parts, strict=True):
                its.sort(key=lambda part: part[0])
                rows = np.concatenate([np.empty(0, np.int64), *(rows for _, rows, _ in its)])
                values = np.concatenate([np.empty((0, record.row_size), record.dtype), *(each for *_, each in its)])
                give(values.reshape(len(rows), *record.shape[1:]), rows)
            return _said(_skipped_in(replies))

        return request, take

    def _ask(self, what: str, route: Route, loaded: Sequence[Loaded], priority: int) -> NodeRequest:
        return self._send(
            what, [_SentPart(Kind.PULL, route, loaded, self._rounds[route.numbers])], body={}, priority=priority
        )

    # Calls that are made by plans

    def plan(self, kind: Kind, keys: Selection, call: CallOptions) -> CallPlan | None:
        """Return how the call that was just made is made from now on; None: not by a plan."""
        routes = self._routes(keys)
        route, has_answer = routes.plain, kind is not Kind.PUSH
        if not routes.are_plain or keys.size_bytes > PLANNED_BYTES:
            return None
        if kind is Kind.PUSHPULL and not self.goes_at_once(keys):
            return None
        for portion in route.portions:
            registers = kind is not Kind.PULL and not portion.bucket and len(portion.entries) >= BUCKET_ENTRIES
            if portion.is_relayed or not portion.size or registers:
                return None
        loaded: list[Loaded] = [(portion, (), _payload_of(kind)) for portion in route.portions]
        rounds, body = self._rounds[route.numbers], _body(call.scale)
        made = [message for _, message in self._messages(kind, loaded, rounds, body, call.priority)]
        frames = [[*map(bytes, encode(message, self._link.node.sender))] for message in made]
        heads = zip(route.portions, frames, strict=True)
        messages = [PlannedMessage(portion, head, has_answer) for portion, (head, _) in heads]
        name = (kind, tuple(record.key for record in keys.records), call.priority, call.scale)
        return CallPlan(name, keys, route, messages, frames[0][1])

    def begin(self, plan: CallPlan, values: Sequence[Array], *, lent: bool) -> PlannedCall | None:
        """Return a steady call that is ready to be sent; None: servers expect other messages than the plan has now.

        The call is this worker's next contribution, so it has to be sent, or taken back.

        Arguments:
            lent: the values stay as they are until the answers are here.
        """
        kind, route, sends = plan.name[0], plan.route, PlannedSends()
        rounds = self._rounds[route.at].copy()
        if kind is not PULL:
            if len(rounds) == 1:
                rounds[0] += 1  # in a tenth of the time
            else:
                rounds += 1
        if plan.keys.size_bytes > MESSAGE_BYTES and self._routes(plan.keys).plain is not route:
            return None
        in_place = self._in_place(route, values) if lent and route.runs else NOTHING_IN_PLACE
        sends.looks = plan.keys.size_bytes <= LOOKED_BYTES
        says_when_read = kind is PUSHPULL and not in_place.items
        made = PlannedCall(plan, rounds, sends)
        for each in plan.messages:
            if not each.is_at(rounds):
                return None
            pool = None if each.is_small else self._staging(each.portion)
            staged = self._spare.take(each.size_bytes, pool) if says_when_read and pool is not None else None
            payloads: Sequence[Buffer] = ()
            if staged is not None:
                made.staged.append(staged)
                each.portion.fill(values, np.frombuffer(staged, each.portion.dtype))
                payloads = [staged]
            elif kind is not PULL:
                payloads = each.portion.gather(values, False, pool, in_place)
            sends.append(each.send(plan.text, payloads, pool is not None))
        if kind is not PULL:
            self._rounds[route.at] = rounds
        return made

    def take_back(self, made: PlannedCall) -> None:
        """A steady call was interrupted before it was to be sent: its round is that of the next one."""
        if made.plan.name[0] is not PULL:
            self._rounds[made.plan.route.at] = made.rounds - 1

    def asked(self, made: PlannedCall) -> Asked:
        """Return what a steady call asks of the servers, as messages."""
        kind, _, priority, scale = made.plan.name
        pairs = zip(made.plan.messages, made.sends, strict=True)
        loaded = [(each.portion, send.frames[2:], _payload_of(kind)) for each, send in pairs]
        messages = self._messages(kind, loaded, made.rounds, _body(scale), priority)
        return Asked(
            made.plan.done.what,
            messages,
            entries_of=partial(self._entries_again, [(each, made.rounds) for each in loaded]),
        )

    def goes_on(self, made: PlannedCall, request: NodeRequest) -> Taking:
        """A steady call has become a request; return what takes its replies in."""
        request.keys = made.plan.route.numbers.tolist()
        made.plan.renew()
        if made.plan.name[0] is not PULL:
            self._carries(request, made.plan.route.portions)
        return self._taking(made)

    def _taking(self, made: PlannedCall) -> Taking:
        return partial(self._taken, route=made.plan.route, rounds=made.rounds, records=made.plan.keys.records)

    def take(self, made: PlannedCall, answers: Sequence[Sequence[Buffer]], outs: Sequence[Array], own: bool) -> Notes:
        """Write the answers of a steady call into its outputs, and note that these rounds were answered."""
        plan, at = made.plan, made.plan.route.at
        while made.staged:
            self._spare.give_back(made.staged.pop())
        if plan.name[0] is PUSH:
            return {}
        if not plan.take(answers, outs):
            return self._taking(made)([(out,) for out in outs], own, tuple(map(decode, answers)))
        if self._link.node.has_arrays:  # else servers read none where it is
            self._answered[at] = np.maximum(self._answered[at], made.rounds)
        return {}

    # Messages

    def _send(
        self,
        what: str,
        parts: Sequence[_SentPart],
        *,
        body: Mapping[str, Any],
        priority: int,
        counts: bool = False,
    ) -> NodeRequest:
        """Send messages as one request; `counts`: their rounds are those of their keys from now on."""
        measured = self._link.node.stages
        is_measured = measured.is_on and parts[0].kind is not Kind.PUSH
        if is_measured:
            body = {**body, counters.ASKED: True}
        commitment = Commitment()
        try:
            for part in parts if counts else ():
                self._rounds[part.route.numbers] = part.rounds
            messages = [
                message
                for part in parts
                for message in self._messages(part.kind, part.loaded, part.rounds, body, priority)
            ]
            began = time.monotonic()
            again = partial(self._entries_again, [(each, part.rounds) for part in parts for each in part.loaded])
            # From here on it is the node's thread: `ps.worker` is told (`role.CallSubmitted`), and the loop sends.
            request = self._link.ask(what, messages, entries_of=again, commitment=commitment)
        except BaseException:
            for part in parts if counts and not commitment.is_begun else ():
                self._rounds[part.route.numbers] = part.rounds - 1  # It was interrupted: the next call is this round.
            raise
        request.keys = [number for part in parts for number in part.route.numbers.tolist()]
        if is_measured:
            request.then(lambda error: measured.answered(time.monotonic() - began, request.replies))
        return request

    def _entries_again(self, sent: Sequence[tuple[Loaded, Array]], number: int) -> Array:
        """Return the entries of a message whose bucket a server does not know. In the node's thread."""
        (portion, _, payload), rounds = sent[number]
        self._buckets.forget([portion])
        return portion.entries_at(rounds, payload)

    def _messages(
        self, kind: Kind, loaded: Sequence[Loaded], rounds: Array, body: Mapping[str, Any], priority: int
    ) -> list[tuple[str, Message]]:
        messages = []
        for portion, frames, payload in loaded:
            # With a bucket in place of its entries if the server knows one.
            bucket, step = 0, -1
            if payload is _payload_of(kind):
                bucket, step = self._buckets.name(portion, rounds, registers=kind is not Kind.PULL)
            is_encoded = NONE < portion.how.codec < ROWS
            message = Message(
                kind,
                is_relayed=portion.is_relayed,
                store=self._link.store,
                epoch=self._link.epoch,
                priority=priority,
                bucket=bucket,
                step=max(step, 0),
                entries=NO_ENTRIES if step >= 0 else portion.entries_at(rounds, payload),
                body={**body, "codec": dict(portion.how.params)} if is_encoded else body,
                payloads=frames,
            )
            messages.append((portion.link, message))
        return messages

    def _routes(self, keys: Selection) -> _Routes:
        found: _Routes | None = keys.kept
        node = self._link.node
        is_shared, is_here = all(map(node.staging, node.value_servers)), node.worker.is_on_one_host
        on_devices = "on_devices" in self._link.told
        size = message_limit(keys.size_bytes, is_shared=is_shared, is_on_one_host=is_here, on_devices=on_devices)
        version = self._compressor.version, size
        if found is None or found.version != version:
            settings = [self._compressor.of(record) for record in keys.records]
            pushed = [
                BY_ROWS if _has_rows(record) else _how(setting)
                for record, setting in zip(keys.records, settings, strict=True)
            ]
            pulled = [_how(setting if setting is not None and setting.two_way else None) for setting in settings]
            plain = self._route(keys, (), size)
            push, pull = (
                self._route(keys, hows, size) if any(how.codec for how in hows) else plain for hows in (pushed, pulled)
            )
            are_plain = push is plain and pull is plain and not keys.has_rows
            found = keys.kept = _Routes(version, plain, push, pull, are_plain)
        return found

    def _route(self, keys: Selection, hows: Sequence[How], message_bytes: int) -> Route:
        shards = [self.shards[record.key] for record in keys.records]
        relays: list[Mapping[int, int]] = []
        if here := self._link.relays:
            relays = [
                here if self._compressor.of(record) is None and is_added_on_hosts(self._link.facts, record) else {}
                for record in keys.records
            ]
        return Route.of(shards, [record.shape for record in keys.records], hows, message_bytes, relays)


def _frames_there(portion: Portion, values: Sequence[DeviceArray]) -> list[Buffer]:
    """Return the frames of values that servers read where they are on a GPU (`Reducer.exports`)."""
    from distrun_runtime.arrays.gpu_sharing import frames_of  # most processes use no GPU

    return frames_of(cast("Iterator[GpuArray]", portion.cut(values)))


def _body(scale: float) -> dict[str, Any]:
    """Return the body of a contribution."""
    return {} if scale == 1.0 else {"scale": scale}


def _how(setting: Compression | None) -> How:
    """Return how values travel that are compressed by a setting; None: they are not."""
    return PLAIN if setting is None else How(setting.number, setting.params)


def _has_rows(record: KeyRecord) -> bool:
    """Whether values of a key travel by rows. Rows of no elements do not."""
    return record.is_sparse and record.row_size > 0


def _fill(
    route: Route,
    records: Sequence[KeyRecord],
    outs: Sequence[Sequence[DeviceArray]],
    replies: Sequence[Message],
    own: bool,
) -> Notes:
    """Write the answers of a pull into its outputs."""
    skipped = _skipped_in(replies)
    kept = {item for item, number in enumerate(route.numbers.tolist()) if number in skipped} if skipped and own else ()
    if not set(map(type, chain.from_iterable(outs))) <= {np.ndarray}:  # asked at once: mostly there are none on GPUs
        _fill_devices(route, records, [() if item in kept else arrays for item, arrays in enumerate(outs)], replies)
        return _said(skipped)
    # Mostly each key has one output, and what is small is written to it whatever its strides are.
    is_usual = not kept and all(outs) and max(map(len, outs)) == 1
    apart = route.runs if is_usual else range(len(outs))
    flat: list[Array] = [arrays[0] for arrays in outs] if is_usual else [_NOTHING] * len(outs)
    for item in apart:
        record, arrays = records[item], outs[item]
        # An array of its own where the values are not wanted, or the output takes no run of elements.
        is_own = not arrays or item in kept or not arrays[0].flags.c_contiguous
        flat[item] = np.empty(record.shape, record.dtype) if is_own else arrays[0]
    for portion, reply in zip(route.portions, replies, strict=True):
        if not portion.is_plain:
            _decode(portion, reply, [array.reshape(-1) for array in flat])
            continue
        _check_answer(portion, reply)
        portion.scatter(reply.payloads, flat)
    for item in apart:
        for out in () if item in kept else outs[item]:
            if out is not flat[item]:
                out[...] = flat[item]
    return _said(skipped)


def _fill_devices(
    route: Route, records: Sequence[KeyRecord], outs: Sequence[Sequence[DeviceArray]], replies: Sequence[Message]
) -> None:
    """Write the answers of a pull into outputs of which some are on GPUs: to these from where the answer has them."""
    targets: list[list[DeviceArray]] = []
    """Flat arrays that take runs of each key's elements."""
    apart: list[tuple[Array, Sequence[DeviceArray]]] = []
    """What is written first, and then copied to outputs."""
    encoded = {item for portion in route.portions if not portion.is_plain for item in portion.items.tolist()}
    for item, (record, arrays) in enumerate(zip(records, outs, strict=True)):
        if item in encoded or not all(not is_on_host(out) or out.flags.c_contiguous for out in arrays):
            whole = np.empty(record.shape, record.dtype)
            apart.append((whole, arrays))
            arrays = [whole]
        targets.append([array.reshape(-1) for array in arrays])
    # All of a GPU's at once: it is waited for once.
    pairs: dict[GpuDevice, list[tuple[GpuArray, Array]]] = {}
    shared: dict[GpuDevice, list[tuple[list[GpuArray], GpuArray]]] = {}
    """What the server has on the same GPU, and where it is to be."""
    buckets: list[tuple[GpuArray, list[GpuArray]]] = []
    """Small values as they came, end to end, and where they are to be."""
    for portion, reply in zip(route.portions, replies, strict=True):
        if not portion.is_plain:
            _decode(portion, reply, [arrays[0] if arrays else _NOTHING for arrays in targets])
            continue
        _check_answer(portion, reply)
        for items, offset, elements in portion.runs(reply.payloads, is_there=True):
            found: dict[GpuDevice, list[tuple[int, GpuArray, Array]]] = {}
            for item, piece in _by_key(items, elements, records):
                for target in targets[item]:
                    run = target[offset : offset + len(piece)]
                    if is_on_host(run):
                        copy(piece, run)
                    elif not is_on_host(piece):
                        shared.setdefault(run.device, []).append(([piece], run))
                    else:
                        found.setdefault(run.device, []).append((item, run, piece))
            for gpu, its in found.items():
                if len(items) > 1 and [item for item, _, _ in its] == list(items):
                    buckets.append((gpu.empty(elements.shape, elements.dtype), [run for _, run, _ in its]))
                    pairs.setdefault(gpu, []).append((buckets[-1][0], elements))
                else:
                    pairs.setdefault(gpu, []).extend((run, piece) for _, run, piece in its)
    for gpu, copies in pairs.items():
        gpu.write_all(copies)
    for gpu, sums in shared.items():
        gpu.sums(sums)
    for bucket, runs in buckets:
        bucket.device.scatter(bucket, runs)
    for whole, arrays in apart:
        for out in arrays:
            copy(whole, out)


def _by_key(items: Sequence[int], elements: Any, records: Sequence[KeyRecord]) -> Iterator[tuple[int, Any]]:
    """Yield what each key has of a run of elements (`Portion.runs`), with the key's place."""
    at = 0
    for item in items:
        size = records[item].size if len(items) > 1 else len(elements)
        yield item, elements[at : at + size]
        at += size


def _check_answer(portion: Portion, reply: Message) -> None:
    expected = portion.size * portion.dtype.itemsize
    found = reply.size
    if found != expected or (len(reply.entries) and (reply.entries["payload"] != Payload.PACKED).any()):
        raise KVError(f"{portion.link} answered with {found} bytes of values, expected {expected}")


def _seen(route: Route, records: Sequence[KeyRecord], replies: Sequence[Message], kept: Stitched) -> list[Array]:
    """Return the values of keys as the answers have them: read-only, without a copy where their memory allows it.

    Arguments:
        kept: as for `stitched`.
    """
    parts: list[list[tuple[int, Array]]] = [[] for _ in records]
    for portion, reply in zip(route.portions, replies, strict=True):
        _check_answer(portion, reply)
        for items, offset, elements in portion.runs(reply.payloads):
            for item, piece in _by_key(items, elements, records):
                parts[item].append((offset, piece))
    found = []
    for record, its in zip(records, parts, strict=True):
        pieces = [elements for _, elements in sorted(its, key=itemgetter(0))]
        whole = pieces[0] if len(pieces) == 1 else stitched(pieces, kept)
        value = (np.concatenate(pieces) if whole is None else whole).reshape(record.shape)
        value.flags.writeable = False
        found.append(value)
    return found


def _decode(portion: Portion, reply: Message, outs: Sequence[Array]) -> None:
    """Write what a server answered for each shard of a portion that is encoded to flat arrays, by place.

    Raises:
        KVError: it is not what was asked for.
    """
    params = reply.body.get("codec") or portion.how.params
    checked: dict[int, codecs.Params] = {}
    for (item, shard), codec, frame in _answers(portion, reply):
        out = outs[item][shard.offset : shard.end]
        if NONE < codec < ROWS:
            found = codecs.numbered(codec)
            if codec not in checked:
                checked[codec] = found.check(params)
            if out.dtype == np.float32:
                found.read(frame, out, checked[codec])
            else:
                wide = found.decode(frame, shard.length, checked[codec])
                out[...] = dtypes.narrow(wide.astype(dtypes.work_dtype(out.dtype), copy=False), out.dtype)
        elif shard.length:
            out[...] = np.frombuffer(frame, out.dtype)


def _answers(portion: Portion, reply: Message) -> Iterator[tuple[tuple[int, Shard], int, Buffer]]:
    """Yield each shard of a portion, with the codec and the payload of a server's answer."""
    codes, given = reply.entries["dtype"].tolist(), reply.entries["codec"].tolist()
    frames = payloads_of(reply.entries, reply.payloads)
    for placed, code, codec, frame in zip(portion.shards(), codes, given, frames, strict=True):
        if DTYPES[code] != portion.dtype:
            raise KVError(
                f"{portion.link} answered with values of {dtypes.name_of(DTYPES[code])}, expected"
                f" {dtypes.name_of(portion.dtype)}"
            )
        yield placed, codec, b"" if frame is None else readable(frame) if IN_USE else frame


def _skipped_in(replies: Sequence[Message]) -> dict[int, Notes]:
    """Return the notes of the rounds that were skipped, by number of the key."""
    told = [pair for reply in replies for pair in reply.body.get("skipped", {}).items()]
    return {int(number): {int(rank): note for rank, note in notes.items()} for number, notes in told}


def _said(skipped: Mapping[int, Notes]) -> Notes:
    """Return what the workers said of a skipped call: of any of its keys."""
    return next(iter(skipped.values()), {})


# Batches of small calls: calls that are made one after the other share messages.
#
# A program that pushes and pulls key by key, without waiting, would pay for a message and an answer each time. So a
# small call that follows others which are still under way is kept until one of them is answered, until there is a
# message full, or until a thread waits. No clock is involved, and the calls on one key keep their order.


KNOWN_KEYS = 1 << 16
"""Lists of keys that were sent together are forgotten when they have more keys than this."""


class BatchedCall(Pending):
    """A call that goes with others; `sent` is what became of all of them, once they have gone."""

    def __init__(self, keys: Selection, call: str, flush: Callable[[], None]) -> None:
        self._call = call
        self._keys = keys
        self._flush = flush
        self.sent: Pending | None = None

    @property
    def what(self) -> str:  # type: ignore[override]
        """The call, for people."""
        return f"{self._call} of {self._keys.named}"

    @property
    def skipped(self) -> Mapping[int, Any]:  # type: ignore[override]
        """As of the calls that it went with."""
        return {} if self.sent is None else self.sent.skipped

    @property
    def is_done(self) -> bool:
        """Whether the calls that it goes with are done."""
        return self.sent is not None and self.sent.is_done

    def fill(self) -> None:
        """Fill the outputs of all that went together."""
        self._sent_now().fill()

    def when_done(self, act: Callable[[], None]) -> None:
        """Have it sent now, and call `act` when it is done."""
        self._sent_now().when_done(act)

    def wait(self, timeout_s: float | None = None) -> None:
        """Have it sent now, and return when it is done."""
        self._sent_now().wait(timeout_s)

    def _sent_now(self) -> Pending:
        if self.sent is None:
            self._flush()
        if self.sent is None:
            raise KVError(f"{self.what} was not sent")
        return self.sent


@dataclass
class _CallQueue:
    """Calls of one kind that wait to be sent."""

    keys: list[Selection] = field(default_factory=list)
    arrays: list[Any] = field(default_factory=list)
    names: set[Key] = field(default_factory=set)
    waiting: list[BatchedCall] = field(default_factory=list)


class CallBatch:
    """The small calls of a store that wait to be sent. Threads: one at a time.

    Arguments:
        flush: sends all of them (calls `take`); any thread may call it.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._pushes, self._pulls = _CallQueue(), _CallQueue()
        self._scale = 1.0
        """Of all of them."""
        self._priority = 0
        """The highest: small calls cost too little to be sent apart by their priorities."""
        self.own = False
        """Whether the pulls belong to pushes before them."""
        self.count = 0
        """How many calls wait."""
        self.size_bytes = 0
        """Of their values; with GATHERED_BYTES there is enough for a message."""
        self._known: dict[tuple[Key, ...], Selection] = {}
        self._known_keys = 0

    def push(self, keys: Selection, values: Sequence[Array], call: CallOptions) -> BatchedCall:
        """Take in a push; the values are copied unless they are lent."""
        self._settle(keys, call, self._pushes, self._pulls)
        given = values if call.lent else [value.copy() for value in values]
        return self._put(self._pushes, keys, given, "push")

    def pull(
        self, keys: Selection, outs: Sequence[Sequence[DeviceArray]], call: CallOptions, own: bool = False
    ) -> BatchedCall:
        """Take in a pull; `own` as for `Transfers.pull`."""
        self._settle(keys, call, self._pulls)
        if self._pulls.waiting and own != self.own:
            self._flush()
        self.own = own
        return self._put(self._pulls, keys, outs, "pull")

    def _settle(self, keys: Selection, call: CallOptions, *before: _CallQueue) -> None:
        """Send what is here if the call has to come after it, or cannot share a message with it."""
        if self.count and (call.scale != self._scale or not all(kind.names.isdisjoint(keys.keys) for kind in before)):
            self._flush()
        self._priority = max(self._priority, call.priority) if self.count else call.priority
        self._scale = call.scale

    def _put(self, kind: _CallQueue, keys: Selection, arrays: Sequence[Any], call: str) -> BatchedCall:
        gathered = BatchedCall(keys, call, self._flush)
        kind.keys.append(keys)
        kind.arrays += arrays
        kind.names.update(keys.keys)
        kind.waiting.append(gathered)
        self.count += 1
        self.size_bytes += keys.size_bytes
        return gathered

    def take(self) -> list[tuple[bool, Selection, list[Any], CallOptions, list[BatchedCall]]]:
        """Return what is to be sent, pushes first: whether it is a push, keys, arrays, how, and who waits for it."""
        kinds = [(True, self._pushes), (False, self._pulls)]
        self._pushes, self._pulls, self.count, self.size_bytes = _CallQueue(), _CallQueue(), 0, 0
        call = CallOptions(self._priority, lent=True, scale=self._scale)
        return [(is_push, self._joined(k.keys), k.arrays, call, k.waiting) for is_push, k in kinds if k.waiting]

    def _joined(self, keys: Sequence[Selection]) -> Selection:
        """Return all keys as one selection; the same calls come in every step."""
        if len(keys) == 1:
            return keys[0]
        names = tuple(chain.from_iterable([each.keys for each in keys]))
        found = self._known.get(names)
        if found is None:
            if self._known_keys > KNOWN_KEYS:
                self._known, self._known_keys = {}, 0
            found = self._known[names] = Selection(record for each in keys for record in each.records)
            self._known_keys += len(names)
        return found
