"""Messages that a server knows by their bytes: they leave the same tables, and are answered with the same bytes, as if
the server did not know them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from history_server import History, Piece, data, node, raw, said
from hypothesis import given, settings
from hypothesis import strategies as st

from distrun_runtime.arrays.device import CpuDevice
from distrun_runtime.arrays.dtypes import Buffer
from distrun_runtime.ops.compression import ROWS
from distrun_runtime.protocol import message as protocol
from distrun_runtime.protocol.message import DTYPES, NO_ENTRIES, Entry, Kind, Message, Payload
from distrun_runtime.ps.engine import MUCH_BYTES, WorkEngine
from distrun_runtime.ps.pulls import Pull
from distrun_runtime.ps.server import KEPT_S, Server
from distrun_runtime.ps.shards import MANY
from distrun_runtime.ps.steady import Steady
from distrun_runtime.ps.values import Round, ShardProgress, ShardSet, Values
from distrun_runtime.transport.base import COPIED, Arrived, Down, Event
from distrun_runtime.transport.direct import form_of
from distrun_runtime.transport.host_segments import is_shared

FLOAT32, FLOAT16, FLOAT64 = 0, 2, 1
SIZES = {0: 2, 1: 3, 2: 1, 3: 5, 4: 4, 5: 2}
CODES = {0: FLOAT32, 1: FLOAT32, 2: FLOAT32, 3: FLOAT32, 4: FLOAT16, 5: FLOAT64}
"""Keys with their elements and dtypes."""
LISTS = ((0,), (0, 1), (0, 1, 2, 3), (3, 1), (2,), (4,), (5,), (0, 3))
"""What messages are about: lists of keys that overlap, one of them not in order."""


@dataclass
class Worker:
    """What a worker remembers."""

    rounds: dict[int, int] = field(default_factory=lambda: dict.fromkeys(SIZES, 0))
    buckets: dict[int, tuple[int, dict[int, int]]] = field(default_factory=dict)
    """List to the number of its bucket, and the rounds at its step 0."""


class Twins:
    """Two servers that hear the same: one knows messages by their bytes, the other never does."""

    def __init__(
        self,
        workers: int,
        *,
        buckets: bool,
        frames: str = "one",
        shared: bool = False,
        much_bytes: int = MUCH_BYTES,
        looks: bool = False,
    ) -> None:
        """Make them.

        Arguments:
            buckets: workers name lists by buckets.
            frames: of a push: `one`; `two`, the first value in one of its own; `each`, one for each entry; `mixed`,
                each worker has another of these ways.
            shared: what they push is their memory.
            much_bytes: from so many on, the engine's thread does the work.
            looks: compare what both know after each event: nothing is kept for long.
        """
        self.looks = looks
        self.workers, self.buckets, self.frames, self.shared = workers, buckets, frames, shared
        self.copied = 0
        """Frames of so many bytes come as bytes, though others of their message are shared."""
        self.is_in_order = much_bytes == MUCH_BYTES
        """No thread of an engine decides by its pace on which side values are, and so in how many frames they go."""
        self.known = self.known_by_bytes = 0
        self._stack = ExitStack()
        self.servers = [self._stack.enter_context(History(workers=workers, has_keys=False)) for _ in range(2)]
        for server in self.servers:
            engine_of(server).much_bytes = much_bytes
        first, second = self.servers
        steady = first._loop.known
        assert isinstance(steady, Steady)

        def counted(link: str, frames: Sequence[Buffer], now: float) -> Any:
            """Take a message as it is received, if it may be known by that, else by its frames."""
            is_received = len(frames) == 3 and not is_shared(frames[2])
            data = form_of(frames)[0] + b"".join(map(bytes, frames)) if is_received else b""
            found = steady.take_bytes(link, data, now)
            self.known_by_bytes += found is not None
            found = steady.take(link, frames, now) if found is None else found
            self.known += found is not None
            return found

        first._loop.known, second._loop.known = SimpleNamespace(take=counted), None
        self.memory = [Worker() for _ in range(workers)]
        self.requests = 1000
        self.links = ["w%d" % rank for rank in range(workers)]
        for keys in ((0, 1, 2, 3), (4,), (5,)):
            self.init(keys)

    def close(self) -> None:
        self._stack.close()

    def tell(self, *events: Event) -> None:
        """Let both hear of something, and compare what they sent and what they know."""
        sent = []
        for server in self.servers:
            begin = len(server.transport.sent)
            server.step(*events)
            new = server.transport.sent[begin:]
            said = [(link, [bytes(frame) for frame in frames]) for link, frames in new]
            if not self.is_in_order:
                said = [(link, [*frames[:2], b"".join(frames[2:])]) for link, frames in said]
            # What the engine's thread does is told later than what is done at once: each connection by itself.
            sent.append(sorted(said, key=itemgetter(0)))
        assert sent[0] == sent[1]
        if self.looks:
            self.look()
        if not self.is_keeping:
            first, second = (state_of(server, has_sides=self.is_in_order) for server in self.servers)
            assert first == second

    def look(self) -> None:
        """Let time pass until nothing is kept."""
        if self.is_keeping:
            for server in self.servers:
                server.now += KEPT_S
            self.tell()

    @property
    def is_keeping(self) -> bool:
        """Whether the first has messages that it has not decided on."""
        return bool(role_of(self.servers[0]).kept)

    def hear(self, link: str, message: Message) -> None:
        self.requests += 1
        head, *told = [bytes(memoryview(frame)) for frame in protocol.encode(replace(message, request=self.requests))]
        shared = [
            raw(np.frombuffer(frame, np.uint8)) if self.shared and len(frame) > self.copied else frame for frame in told
        ]
        self.tell(Arrived(link, [head, *shared]))

    def init(self, keys: Sequence[int]) -> None:
        entries = [Entry(key, 0, SIZES[key], 0, CODES[key], 0, Payload.PACKED) for key in keys]
        elements = np.zeros(sum(SIZES[key] for key in keys), DTYPES[CODES[keys[0]]])
        names, shapes = [[key, "k%d" % key] for key in keys], {str(key): [SIZES[key]] for key in keys}
        body = {"type": "dist_sync", "names": names, "shapes": shapes}
        self.hear(
            "w0", Message(Kind.INIT, 1, entries=protocol.entries_of(entries), payloads=[raw(elements)], body=body)
        )

    def call(self, kind: Kind, rank: int, number: int, values: int = 1, **odd: Any) -> None:
        """Let a worker push or pull a list of keys as it would: by its bucket where it can.

        Arguments:
            number: of the list.
            values: what the elements are.
            odd: what is not as usual: `body`, `rounds` (added), `short` (elements missing), `priority`.
        """
        keys, worker = LISTS[number], self.memory[rank]
        if kind is not Kind.PULL:
            for key in keys:
                worker.rounds[key] += 1
        bucket, step, named = 0, 0, False
        if self.buckets:
            bucket, base = worker.buckets.get(number, (0, {}))
            steps = {worker.rounds[key] - base[key] for key in keys} if bucket else set()
            named = len(steps) == 1 and min(steps) >= 0
            if named:
                step = steps.pop()
            elif kind is not Kind.PULL:
                # Few numbers: most of them are given again to other lists.
                bucket = number % 3 + 1
                for other in [other for other, known in worker.buckets.items() if known[0] == bucket]:
                    del worker.buckets[other]
                worker.buckets[number] = bucket, {key: worker.rounds[key] for key in keys}
            else:
                bucket = 0
        step = max(0, step + (odd.get("rounds", 0) if named else 0))
        added = 0 if named else odd.get("rounds", 0)
        brings = kind is not Kind.PULL
        way = ("one", "two", "each")[rank % 3] if self.frames == "mixed" else self.frames
        is_each = way == "each" and not bucket
        payload = Payload.FRAME if is_each else Payload.PACKED
        entries = [
            Entry(key, 0, SIZES[key], max(0, worker.rounds[key] + added), CODES[key], 0, payload * brings)
            for key in keys
        ]
        payloads: list[Buffer] = []
        if brings:
            count = sum(SIZES[key] for key in keys) - odd.get("short", 0)
            elements = np.arange(values, values + count).astype(DTYPES[CODES[keys[0]]])
            ends = np.cumsum([SIZES[key] for key in keys])[:-1]
            cuts = ends if is_each else ends[:1] if way == "two" else ends[:0]
            payloads = [raw(part) for part in np.split(elements, cuts[cuts < count])]
        made = NO_ENTRIES if named else protocol.entries_of(entries)
        more = {"body": odd.get("body", {}), "priority": odd.get("priority", 0)}
        self.hear(
            self.links[rank],
            Message(kind, 1, 3, rank=rank, bucket=bucket, step=step, entries=made, payloads=payloads, **more),
        )

    def round(self, kind: Kind, number: int, order: Iterable[int] | None = None, value: int = 1) -> None:
        """Let all workers push a list of keys; with PUSH they pull it then, with PULL only the first one does."""
        for place, rank in enumerate(rank for rank in order or range(self.workers) if rank < self.workers):
            self.call(Kind.PUSHPULL if kind is Kind.PUSHPULL else Kind.PUSH, rank, number, value + rank)
            if kind is Kind.PUSH or (kind is Kind.PULL and not place):
                self.call(Kind.PULL, rank, number)

    def disturb(self, what: int, rank: int) -> None:
        """Let something happen that does not happen in every step."""
        link, other = self.links[rank], (rank + 1) % self.workers
        match what:
            case 0:
                for server in self.servers:
                    server.join(rank)
            case 1:
                for server in self.servers:
                    server.join(other, is_last=True)
            case 2:
                for server in self.servers:
                    server.leave(rank)
            case 3:
                for server in self.servers:
                    server.rule("sgd", learning_rate=0.5, momentum=0.5)
            case 4:
                for server in self.servers:
                    server.rule("adam", learning_rate=0.5)
            case 5:
                for server in self.servers:
                    server.rule(None)
            case 6:
                entries = [Entry(0, 0, SIZES[0], self.memory[rank].rounds[0] + 1)]
                self.memory[rank].rounds[0] += 1
                skip = Message(Kind.PUSH, 1, 3, entries=protocol.entries_of(entries), body={"skip": {"why": 1}})
                self.hear(link, skip)
            case 7:
                self.hear(link, Message(Kind.RELEASE, 1, 3))
            case 8:
                self.hear(link, Message(Kind.STATS, 1, 3))
            case 9:
                for server in self.servers:
                    server.tick(server.now + 3.0)
            case 10:
                self.tell(Down(link, "cut"))
                self.links[rank] = "%s+" % link
                self.memory[rank].buckets.clear()
                for server in self.servers:
                    assert not server.enter(self.links[rank], node("worker", rank, self.workers))
            case 11:
                for server in self.servers:
                    server.readings.clear()
                    server.read_slowly()
            case 12:
                for server in self.servers:
                    for reading in server.readings:
                        reading.is_over = True
            case 13:
                half = [Entry(0, 0, SIZES[0], self.memory[rank].rounds[0], 0, 6)]
                self.hear(link, Message(Kind.PULL, 1, 3, entries=protocol.entries_of(half)))
            case 14:
                entries = [Entry(2, 0, SIZES[2], 0, CODES[2], 0, Payload.PACKED)]
                given = [raw(np.full(SIZES[2], 7, np.float32))]
                body = {"assign": True}
                self.hear(
                    link, Message(Kind.INIT, 1, 3, entries=protocol.entries_of(entries), payloads=given, body=body)
                )
            case 15:
                for server in self.servers:
                    server.bye(rank)
            case 16:
                for server in self.servers:
                    server.now += 0.1
            case 17:
                for server in self.servers:
                    server.scheduler(Kind.STOP, 9, stay=True)
                self.memory = [Worker() for _ in self.memory]
                for keys in ((0, 1, 2, 3), (4,), (5,)):
                    self.init(keys)
        self.tell()


def engine_of(server: History) -> WorkEngine:
    engine = server._loop._engine
    assert engine is not None
    return engine


def role_of(server: History) -> Server:
    decides = server._loop._role
    assert isinstance(decides, Server)
    return decides


def state_of(server: History, *, has_sides: bool) -> dict[str, Any]:
    """Return all that a server keeps of its stores, but for what it does not have to remember."""
    decides, engine = role_of(server), engine_of(server)
    engine.give_back()
    pulls = decides.pulls
    found: dict[str, Any] = {
        "counters": decides.counters(),
        "lags": decides.lags(),
        "buckets": {name: (each.entries.tobytes(), each.shards.tolist()) for name, each in decides._buckets.items()},
        "pulls": [pull_of(pull) for pull in pulls._open.values()],
        "waiting": {
            name: [pull_of(pull) for pull in each.values() if pull.ticket in pulls._open]
            for name, each in pulls._waiting.items()
            if set(each) & set(pulls._open)
        },
        "returned": len(engine._returned),
    }
    for number, store in decides._stores.items():
        flat = {name: getattr(store, name)[..., : store.count].tolist() for name in FLAT}
        noted = {name: getattr(store, name) for name in NOTED}
        found["store %d" % number] = (flat, noted)
    for number, values in engine._values.items():
        found["values %d" % number] = values_of(values)
        if has_sides:
            count = values.store.count
            found["sides %d" % number] = values.side[:count].tolist(), values.lent[:, :count].tolist()
    return found


FLAT = ("done", "ordered", "skips", "updates", "fresh", "halfway", "last", "seen", "owed")
NOTED = ("early", "failed", "late", "skipping", "skipped", "pending", "joined", "left", "again", "has_rule")


def pull_of(pull: Pull) -> Any:
    asked = [bytes(memoryview(frame)) for frame in protocol.encode(pull.message)]
    arrays = [each.tolist() for each in (pull.entries, pull.shards, pull.rounds, pull.owed)]
    notice = (pull.notice.since, pull.notice.told)
    return (pull.link, pull.rank, pull.ranks, asked, arrays, notice, pull.passed, pull.before, pull.skipped, pull.rows)


def values_of(values: Values) -> Any:
    count = values.store.count
    weights = [np.asarray(values.weight(shard)).tolist() for shard in range(count)]
    states = [
        {name: np.asarray(value).tolist() for name, value in (values.state_of(shard) or {}).items()}
        for shard in range(count)
    ]
    rounds = {number: round_of(values, each) for number, each in values.rounds.items()}
    flat = values.lent[:, :count].sum(axis=0).tolist(), values.steps[:count].tolist()
    encoded = {shard: sorted(each) for shard, each in values.encoded.items()}
    return (weights, states, rounds, flat, encoded)


def round_of(values: Values, of: Round) -> Any:
    held = {
        number: (each.shards.tolist(), each.runs, [np.asarray(part).tolist() for part in each.parts])
        for number, each in of.held.items()
    }
    places = [shard for shard in np.flatnonzero(of.where == -1).tolist() if shard not in of.lost]
    sums = [
        np.asarray(of.arenas[int(values.store.dtype[shard])].view(*values.span(shard))).tolist() for shard in places
    ]
    return (of.where[: values.store.count].tolist(), of.open, held, sums, sorted(of.by_shard), sorted(of.by_rank))


@pytest.fixture
def twins() -> Iterator[Callable[..., Twins]]:
    with ExitStack() as stack:

        def make(*arguments: Any, **more: Any) -> Twins:
            made = Twins(*arguments, **more)
            stack.callback(made.close)
            return made

        yield make


Ways = st.sampled_from((Kind.PUSHPULL, Kind.PUSHPULL, Kind.PUSH, Kind.PULL))
Odds = st.sampled_from(({"body": {"more": 1}}, {"rounds": 1}, {"rounds": -1}, {"short": 1}, {"priority": 3}, {}))
Steps = st.one_of(
    st.tuples(st.just("rounds"), st.integers(0, len(LISTS) - 1), Ways, st.permutations(range(3)), st.integers(1, 5)),
    st.tuples(st.just("rounds"), st.integers(0, len(LISTS) - 1), Ways, st.permutations(range(3)), st.integers(1, 5)),
    st.tuples(st.just("one"), st.integers(0, len(LISTS) - 1), Ways, st.integers(0, 2), Odds),
    st.tuples(st.just("disturb"), st.integers(0, 17), st.integers(0, 2)),
)


def play(twins: Twins, steps: Sequence[Any]) -> None:
    """Let a history happen to both servers."""
    value = 1
    for what, *how in steps:
        value += 1
        match what, how:
            case "rounds", (number, kind, order, times):
                for _ in range(times):
                    twins.round(kind, number, order, value)
            case "one", (number, kind, rank, odd):
                twins.call(kind, rank % twins.workers, number, value, **odd)
            case "disturb", (number, rank):
                twins.disturb(number, rank % twins.workers)
    twins.look()


@settings(max_examples=60)
@given(
    st.integers(1, 3),
    st.tuples(*[st.booleans()] * 4),
    st.sampled_from(("one", "two", "each", "mixed")),
    st.lists(Steps, min_size=4, max_size=25),
)
def test_a_server_that_knows_messages_is_as_one_that_does_not(
    workers: int, how: tuple[bool, ...], frames: str, steps: Sequence[Any]
) -> None:
    buckets, shared, is_much, looks = how
    much = 8 if is_much else MUCH_BYTES
    twins = Twins(workers, buckets=buckets, frames=frames, shared=shared, much_bytes=much, looks=looks)
    try:
        play(twins, steps)
    finally:
        twins.close()


@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("kind", [Kind.PUSHPULL, Kind.PUSH])
def test_a_message_is_known_from_the_second_time_on(twins: Callable[..., Twins], kind: Kind, buckets: bool) -> None:
    pair = twins(2, buckets=buckets)
    pair.round(kind, 1)
    assert pair.known == 0
    for _ in range(1 + buckets):  # a message that registers a bucket is another one
        pair.round(kind, 1)
    pair.known = 0
    for _ in range(5):
        pair.round(kind, 1)
    assert pair.known == 5 * 2 * (1 if kind is Kind.PUSHPULL else 2)


@pytest.mark.parametrize(("number", "is_one"), [(0, True), (2, False), (5, False), (6, True)])
def test_a_small_value_of_one_key_is_known_as_it_is_received_if_sums_have_its_dtype(
    twins: Callable[..., Twins], number: int, is_one: bool
) -> None:
    pair = twins(3, buckets=False)
    for _ in range(4):
        pair.round(Kind.PUSHPULL, number)
    pair.known = pair.known_by_bytes = 0
    for _ in range(5):
        pair.round(Kind.PUSHPULL, number)
    assert (pair.known, pair.known_by_bytes) == (15, 15 * is_one)
    pair.round(Kind.PUSH, number)
    assert pair.known_by_bytes == 15 * is_one


def test_a_large_message_is_done_at_once_if_most_of_it_is_its_senders_memory_but_for_a_small_first_frame() -> None:
    pair = Twins(2, buckets=False, frames="two", shared=True, much_bytes=8)
    pair.copied = 4 * SIZES[0]
    try:
        for _ in range(4):
            pair.round(Kind.PUSHPULL, 2)
        pair.known = 0
        pair.round(Kind.PUSHPULL, 2)
        assert pair.known == 2
    finally:
        pair.close()


def test_a_large_message_that_is_only_added_is_done_at_once_up_to_four_times_the_bytes_of_others() -> None:
    pair = Twins(2, buckets=False, much_bytes=8)
    try:
        for number, has_rule in ((1, False), (2, False), (1, True)):  # Lists of 20 and 44 bytes.
            if has_rule:
                pair.disturb(3, 0)
            for _ in range(4):
                pair.round(Kind.PUSHPULL, number)
            pair.known = 0
            pair.round(Kind.PUSHPULL, number)
            assert (pair.known == 2) == (number == 1 and not has_rule)
    finally:
        pair.close()


def test_a_round_whose_workers_send_other_frames_is_known(twins: Callable[..., Twins]) -> None:
    pair = twins(3, buckets=True, frames="mixed")
    for _ in range(4):
        pair.round(Kind.PUSHPULL, 2)
    pair.known = 0
    pair.round(Kind.PUSHPULL, 2, order=(1, 0, 2))
    assert pair.known == 3


def test_the_sums_of_a_message_are_made_by_one_call_so_that_threads_share_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sums, counts = CpuDevice.sums, list[int]()

    def counted(device: CpuDevice, items: Any) -> None:
        every = list(items)
        counts.append(len(every))
        sums(device, every)

    monkeypatch.setattr(CpuDevice, "sums", counted)
    pair = Twins(2, buckets=False, frames="each")
    try:
        for _ in range(5):
            counts.clear()
            pair.round(Kind.PUSHPULL, 2)
        assert counts == [len(LISTS[2])] * 2  # of a server that knows the messages, and of one that does not
    finally:
        pair.close()


def test_lists_that_share_keys_are_known_as_long_as_their_rounds_are_the_next_ones(twins: Callable[..., Twins]) -> None:
    pair = twins(2, buckets=False)
    for _ in range(4):
        pair.round(Kind.PUSHPULL, 2)  # all four keys
    pair.round(Kind.PUSHPULL, 0)  # one of them, whose round is ahead from now on
    pair.known = 0
    pair.round(Kind.PUSHPULL, 2)
    assert pair.known == 0
    for _ in range(2):
        pair.round(Kind.PUSHPULL, 0)
    assert pair.known > 0


def test_rounds_of_many_workers_are_as_those_of_a_server_that_knows_no_messages(twins: Callable[..., Twins]) -> None:
    pair = twins(MANY + 1, buckets=True)
    for kind in (Kind.PUSHPULL, Kind.PUSHPULL, Kind.PUSHPULL, Kind.PUSHPULL):
        pair.round(kind, 1)
    assert pair.known > MANY


def test_of_many_workers_only_few_contributions_look_at_all_of_them(twins: Callable[..., Twins]) -> None:
    looked = []

    class Watched(np.ndarray):  # type: ignore[type-arg]
        def __getitem__(self, at: Any) -> Any:
            if isinstance(at[0], slice):
                looked.append(at)
            return np.asarray(self)[at]

    pair = twins(MANY + 1, buckets=True)
    for _ in range(3):
        pair.round(Kind.PUSHPULL, 1)
    store = role_of(pair.servers[0])._stores[1]
    store.last = store.last.view(Watched)
    pair.known = 0
    for rank in range(MANY + 1):
        del looked[:]
        pair.call(Kind.PUSHPULL, rank, 1)
        assert len(looked) <= (rank in (0, MANY)), rank
    assert pair.known == MANY + 1


def test_a_bucket_number_that_is_given_to_another_list_is_known_again(twins: Callable[..., Twins]) -> None:
    pair = twins(2, buckets=True)
    for number in (2, 5, 2):  # these two lists have the same number
        for _ in range(5):
            pair.round(Kind.PUSHPULL, number)
    pair.known = 0
    pair.round(Kind.PUSHPULL, 2)
    assert pair.known == 2


def test_lists_with_the_same_first_key_do_not_exclude_each_other(twins: Callable[..., Twins]) -> None:
    pair = twins(2, buckets=False)
    for times, number in enumerate((1, 7, 1, 7)):
        pair.known = 0
        for server in pair.servers:
            for shard in range(len(SIZES)):  # all keys have had as many rounds
                role_of(server)._stores[1].set_round(shard, 10 * times)
        for worker in pair.memory:
            worker.rounds = dict.fromkeys(SIZES, 10 * times)
        for _ in range(4):
            pair.round(Kind.PUSHPULL, number)
        assert pair.known == 4 * 2 - (2 if times < 2 else 0)


@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.PUSHPULL, Kind.PULL])
def test_a_round_that_no_integer_holds_is_refused_and_the_server_lives(twins: Callable[..., Twins], kind: Kind) -> None:
    pair = twins(2, buckets=False)
    for _ in range(4):
        pair.round(Kind.PUSHPULL if kind is Kind.PUSHPULL else Kind.PUSH, 1)
    pair.call(kind, 0, 1, rounds=2**63 + 5)
    pair.call(Kind.PULL, 1, 1)


def test_what_fails_at_a_message_that_is_known_is_refused_and_the_server_lives(
    serving: Callable[..., History], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, ones = serving(workers=2), raw(np.ones(2, np.float32))

    def push(rank: int, number: int) -> list[str]:
        return said(server.hear("w%d" % rank, data(Kind.PUSHPULL, [Piece(0, round=number, payload=ones)])))

    def fail(*arguments: Any) -> None:
        raise MemoryError("no memory for an answer")

    for number in range(1, 4):
        push(0, number), push(1, number)
    assert push(0, 4) == []
    with monkeypatch.context() as patched:
        patched.setattr("distrun_runtime.ps.steady.frames_of", fail)
        for known in engine_of(server).values[1].plans.values():
            if isinstance(known, ShardSet):
                known.frames.clear()
        assert push(1, 4) == ["w0 PUSHPULL!", "w1 PUSHPULL!"]
    with monkeypatch.context() as patched:
        patched.setattr(ShardProgress, "add", fail)
        assert push(0, 5) == ["w0 PUSHPULL!"]
    assert said(server.ask(0, Kind.STATS)) == ["w0 STATS"]


def test_a_sum_that_fails_is_made_anew_of_what_was_pushed(
    serving: Callable[..., History], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, ones = serving(workers=4), raw(np.ones(2, np.float32))

    def push(rank: int, number: int) -> list[Any]:
        return server.hear("w%d" % rank, data(Kind.PUSHPULL, [Piece(0, round=number, payload=ones)]))

    def fail(device: CpuDevice, items: Any) -> None:
        for _, out in items:
            out[...] = 99
        raise MemoryError("no memory for a sum")

    for number in range(1, 4):
        for rank in range(4):
            push(rank, number)
    push(0, 4), push(1, 4)
    with monkeypatch.context() as patched:
        patched.setattr(CpuDevice, "sums", fail)
        assert said(push(2, 4)) == ["w2 PUSHPULL!"]
    push(3, 4)
    answers = push(2, 4)
    assert len(answers) == 4
    four = np.full(2, 4, np.float32).tobytes()
    assert [bytes(piece.payload) for each in answers for piece in each.pieces] == [four] * 4


def test_a_pull_that_brings_bytes_is_no_push(twins: Callable[..., Twins]) -> None:
    pair = twins(2, buckets=True)
    for _ in range(5):
        pair.round(Kind.PUSH, 0)
    bucket, base = pair.memory[0].buckets[0]
    step = pair.memory[0].rounds[0] - base[0]
    for more in (0, 0, 0, 1):
        pair.hear("w0", Message(Kind.PULL, 1, 3, bucket=bucket, step=step + more, payloads=[b"y" * 8]))


def test_a_push_whose_frames_cut_an_element_is_treated_as_any_other(twins: Callable[..., Twins]) -> None:
    pair = twins(2, buckets=True)
    for _ in range(4):
        for _ in range(3):
            pair.round(Kind.PUSH, 1)
        for rank, worker in enumerate(pair.memory):
            for key in LISTS[1]:
                worker.rounds[key] += 1
            bucket, base = worker.buckets[1]
            cut = [b"x" * 6, b"y" * 14]
            step = worker.rounds[0] - base[0]
            pair.hear("w%d" % rank, Message(Kind.PUSH, 1, 3, bucket=bucket, step=step, payloads=cut))


@pytest.mark.parametrize("rule", [None, "sgd"])
def test_values_on_several_sides_are_on_one_again_when_nobody_reads_them(
    twins: Callable[..., Twins], rule: str | None
) -> None:
    pair = twins(2, buckets=True)
    if rule is not None:
        pair.disturb(3, 0)
    for _ in range(4):
        pair.round(Kind.PUSHPULL, 2)
    pair.disturb(11, 0)
    pair.call(Kind.PULL, 0, 0)  # one of the four keys is read while the next round is made
    for server in pair.servers:
        server.transport.make_lease = lambda: COPIED
    pair.round(Kind.PUSHPULL, 2)
    sides = engine_of(pair.servers[0])._values[1].side
    assert len(set(sides[:4].tolist())) == 2
    pair.disturb(12, 0)
    pair.known = 0
    pair.round(Kind.PUSHPULL, 2)
    assert pair.known == 2
    assert len(set(sides[:4].tolist())) == 1


def test_what_is_known_is_bounded_and_what_a_link_sent_goes_with_it(
    twins: Callable[..., Twins], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = twins(2, buckets=False)
    for _ in range(3):
        pair.round(Kind.PUSHPULL, 1)
    values = engine_of(pair.servers[0])._values[1]
    before = values.plan_bytes
    assert before > 0
    monkeypatch.setattr("distrun_runtime.ps.steady.KNOWN_BYTES", before)
    for _ in range(3):
        pair.round(Kind.PUSHPULL, 6)
    pair.known = 0
    pair.round(Kind.PUSHPULL, 1)
    assert (pair.known, values.plan_bytes) == (2, before)
    for rank in range(2):
        pair.disturb(10, rank)
    pair.round(Kind.PUSHPULL, 1)
    assert {name[0] for name in values.plans if isinstance(name[0], str)} == {"w0+", "w1+"}
    assert values.plan_bytes < before


def test_messages_that_come_no_more_make_room_for_others_and_those_that_come_stay_known(
    twins: Callable[..., Twins], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = twins(2, buckets=False)
    for number in (1, 6):
        for _ in range(3):
            pair.round(Kind.PUSHPULL, number)
    known = engine_of(pair.servers[0])._values[1].plans
    monkeypatch.setattr("distrun_runtime.ps.steady.KNOWN", len(known))
    monkeypatch.setattr("distrun_runtime.ps.steady.REFUSED", 6)
    for _ in range(6):
        pair.known = 0
        pair.round(Kind.PUSHPULL, 5)
        pair.round(Kind.PUSHPULL, 1)
        assert pair.known == 2
        pair.round(Kind.PUSHPULL, 1)
        assert pair.known == 4
    for _ in range(3):
        pair.round(Kind.PUSHPULL, 5)
    assert pair.known == 4 + 2 * 2


def test_a_first_contribution_that_cannot_be_kept_leaves_no_round_open(
    serving: Callable[..., History], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, ones = serving(workers=3), raw(np.ones(2, np.float32))

    def push(rank: int, number: int) -> None:
        server.hear("w%d" % rank, data(Kind.PUSHPULL, [Piece(0, round=number, payload=ones)]))

    def fail(*arguments: Any) -> None:
        raise MemoryError("no memory for a sum")

    for number in range(1, 4):
        for rank in range(3):
            push(rank, number)
    with monkeypatch.context() as patched:
        patched.setattr(Round, "hold", fail)
        push(0, 4)
    push(1, 4)
    push(2, 4)
    assert engine_of(server)._values[1].rounds == {}


def test_a_pull_that_names_a_shard_twice_leaves_nothing_owed(twins: Callable[..., Twins]) -> None:
    pair = twins(2, buckets=False)
    for _ in range(3):
        pair.round(Kind.PUSH, 0)
    for _ in range(4):
        pair.call(Kind.PUSH, 0, 0)
        twice = [Entry(0, 0, SIZES[0], pair.memory[0].rounds[0])] * 2
        pair.hear("w0", Message(Kind.PULL, 1, 3, entries=protocol.entries_of(twice)))
        pair.call(Kind.PUSH, 1, 0)


def test_adding_is_told_apart_from_the_rule(twins: Callable[..., Twins]) -> None:
    pair = twins(3, buckets=True)
    pair.disturb(3, 0)
    pair.round(Kind.PUSHPULL, 1)
    spans = [[stage for stage, _, _ in engine_of(server)._worked._spans] for server in pair.servers]
    assert spans[0] == spans[1]
    assert {*spans[0]} == {"add", "rule"}


def test_what_was_pushed_is_let_go_of_when_its_round_is_over(serving: Callable[..., History]) -> None:
    """It may be memory of the worker, who waits for it."""
    server = serving(workers=2, has_keys=False)
    server.init({"a": [0, 0]})
    kept = []
    for number in range(1, 6):
        for rank in range(2):
            memory = np.full(2, number, np.float32)
            frame = raw(memory)
            kept.append(weakref.ref(memory))
            entries = protocol.entries_of([Entry(0, 0, 2, number, 0, 0, Payload.PACKED)])
            pushed = Message(Kind.PUSHPULL, 1, request=number, entries=entries, payloads=[frame])
            server.hear_frames("w%d" % rank, [bytes(protocol.encode(pushed)[0]), b"", frame])
            del memory, frame, pushed
    server.ask(0, Kind.STATS)  # The loop refers to the last event.
    assert [number for number, each in enumerate(kept) if each() is not None] == []


def test_a_store_that_is_closed_leaves_nothing_of_what_was_known(twins: Callable[..., Twins]) -> None:
    pair = twins(2, buckets=False)
    for _ in range(4):
        pair.round(Kind.PUSHPULL, 1)
    gc.disable()
    try:
        kept = weakref.ref(engine_of(pair.servers[0])._values[1])
        for server in pair.servers:
            server.scheduler(Kind.CLOSE, 9)
        assert kept() is None
    finally:
        gc.enable()


def test_a_sum_that_cannot_be_made_fails_its_round_for_all_and_no_later_one(
    serving: Callable[..., History], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, ones = serving(workers=2), raw(np.ones(2, np.float32))

    def rounds(number: int) -> list[Any]:
        pushed = [
            server.hear("w%d" % rank, data(Kind.PUSHPULL, [Piece(0, round=number, payload=ones)])) for rank in range(2)
        ]
        return [each for sent in pushed for each in sent]

    for number in range(1, 4):
        assert [each.values["a"].tolist() for each in rounds(number)] == [[2, 2]] * 2

    def full(*arguments: Any) -> None:
        raise MemoryError("no memory for a sum")

    with monkeypatch.context() as patched:
        patched.setattr(CpuDevice, "sums", full)
        refused = rounds(4)
    assert said(refused) == ["w0 PUSHPULL!", "w1 PUSHPULL!"]
    assert all("key 'a': no memory for a sum" in str(each.body["reason"]) for each in refused)
    assert [each.values["a"].tolist() for each in rounds(5)] == [[2, 2]] * 2


def test_a_pull_of_more_keys_gets_its_own_round_of_those_that_its_worker_has_pushed_again(
    twins: Callable[..., Twins],
) -> None:
    pair = twins(2, buckets=False)
    for _ in range(4):
        pair.round(Kind.PUSH, 0)
        pair.round(Kind.PUSH, 4)
    for _ in range(4):
        pair.call(Kind.PUSH, 0, 4)
        pair.call(Kind.PUSH, 0, 0)
        both = [Entry(key, 0, SIZES[key], pair.memory[0].rounds[key]) for key in (2, 0)]
        pair.hear("w0", Message(Kind.PULL, 1, 3, entries=protocol.entries_of(both)))
        pair.call(Kind.PUSH, 1, 0)
        pair.call(Kind.PUSH, 0, 0, 100)
        pair.call(Kind.PUSH, 1, 0, 100)
        pair.call(Kind.PUSH, 1, 4)


def test_rows_take_no_place_of_messages_that_come_again(twins: Callable[..., Twins]) -> None:
    pair = twins(1, buckets=False)
    values = engine_of(pair.servers[0])._values[1]
    for count in range(1, 6):
        rows = Entry(0, 0, SIZES[0], count, FLOAT32, ROWS, Payload.FRAME)
        pair.hear("w0", Message(Kind.PUSH, 1, 3, entries=protocol.entries_of([rows]), payloads=[bytes(8 * count)]))
    assert not values.plans


def test_a_pull_of_the_second_of_two_keys_that_are_pushed_together_is_answered_by_their_round(
    twins: Callable[..., Twins],
) -> None:
    pair = twins(2, buckets=False)
    for _ in range(6):
        pair.call(Kind.PUSH, 0, 1)
        second = LISTS[1][1]
        one = [Entry(second, 0, SIZES[second], pair.memory[0].rounds[second])]
        pair.hear("w0", Message(Kind.PULL, 1, 3, entries=protocol.entries_of(one)))
        pair.call(Kind.PUSH, 1, 1)
    assert pair.known > 6
