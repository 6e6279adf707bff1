"""Routing: how values are cut and placed, and which messages carry a call over many keys."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from itertools import chain, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrun_runtime.ops import compression
from distrun_runtime.ops.partition import Shard
from distrun_runtime.ops.reduce import How
from distrun_runtime.protocol.message import DTYPE_CODES, DTYPES, Kind, Message, Payload, decode, encode, payloads_of
from distrun_runtime.ps import routing
from distrun_runtime.ps.agreement import Keys
from distrun_runtime.ps.role import NodeRequest
from distrun_runtime.ps.routing import (
    BUCKETS,
    SHARD_BYTES,
    Buckets,
    InPlace,
    Portion,
    Route,
    cut,
    message_limit,
    mxnet_shards,
    place,
    portions_of,
    shards_on,
)

ITEMSIZES = (1, 2, 4, 8)

# Cutting


@given(size=st.integers(0, 20_000_000), itemsize=st.sampled_from(ITEMSIZES))
def test_shards_cover_a_dense_value_once_in_multiples_of_32_elements(size: int, itemsize: int) -> None:
    shards = cut(size, itemsize)
    assert shards[0][0] == 0
    assert sum(length for _, length in shards) == size
    assert all(one[0] + one[1] == other[0] for one, other in itertools.pairwise(shards))
    assert all(length * itemsize <= SHARD_BYTES for _, length in shards)
    assert all(length % 32 == 0 for _, length in shards[:-1])
    assert all(length > 0 for _, length in shards) or size == 0


@given(rows=st.integers(0, 5000), row_size=st.integers(1, 600_000), itemsize=st.sampled_from(ITEMSIZES))
def test_shards_of_a_row_sparse_value_hold_whole_rows(rows: int, row_size: int, itemsize: int) -> None:
    shards = cut(rows * row_size, itemsize, row_size)
    assert sum(length for _, length in shards) == rows * row_size
    assert all(offset % row_size == 0 and length % row_size == 0 for offset, length in shards)
    assert all(length * itemsize <= SHARD_BYTES or length == row_size for _, length in shards)
    assert all(one[0] + one[1] == other[0] for one, other in itertools.pairwise(shards))


def test_a_value_of_no_elements_has_one_shard_so_that_its_rounds_are_counted() -> None:
    assert cut(0, 4) == cut(0, 4, 8) == [(0, 0)]


def test_a_value_of_exactly_a_mebibyte_is_one_shard_and_one_element_more_makes_two() -> None:
    assert cut(SHARD_BYTES // 4, 4) == [(0, 262144)]
    assert cut(SHARD_BYTES // 4 + 1, 4) == [(0, 262144), (262144, 1)]


# Placing

SIZES = st.lists(st.integers(0, SHARD_BYTES), max_size=60)


@given(batches=st.lists(SIZES, max_size=4), servers=st.integers(1, 7))
def test_no_server_has_more_than_its_share_and_the_largest_shard(batches: list[list[int]], servers: int) -> None:
    loads = [0] * servers
    for sizes in batches:
        placed = place(sizes, loads)
        assert len(placed) == len(sizes)
        assert all(0 <= server < servers for server in placed)
    sizes = [max(1, size) for each in batches for size in each]
    assert sum(loads) == sum(sizes)
    assert max(loads) <= sum(sizes) / servers + max(sizes, default=0)


@given(sizes=SIZES, before=st.lists(st.integers(0, 1 << 30), min_size=1, max_size=7))
def test_placing_depends_on_nothing_but_sizes_and_loads(sizes: list[int], before: list[int]) -> None:
    one, other = list(before), list(before)
    servers = place(sizes, one)
    assert place(sizes, other) == servers
    assert one == other
    for server in range(len(before)):
        here = sum(max(1, size) for size, where in zip(sizes, servers, strict=True) if where == server)
        assert one[server] == before[server] + here


def test_empty_shards_take_turns() -> None:
    assert sorted(place([0] * 6, [0, 0, 0])) == [0, 0, 1, 1, 2, 2]


def record(name: object, shape: tuple[int, ...], dtype: str = "float32") -> dict[str, Any]:
    return {"key": name, "shape": list(shape), "dtype": dtype}


@given(sizes=st.lists(st.integers(0, 3_000_000), min_size=1, max_size=5), servers=st.integers(1, 4))
def test_what_a_server_has_of_a_value_goes_on_from_shard_to_shard_and_is_one_part(
    sizes: list[int], servers: int
) -> None:
    shapes = [(size,) for size in sizes]
    placed = Keys(servers).declare([record(str(at), shape) for at, shape in enumerate(shapes)])["servers"]
    every = [length * 4 for size in sizes for _, length in cut(size, 4)]
    assert Counter(chain(*placed)) == Counter(place(every, [0] * servers))
    shards = [
        shards_on(Shard(0, 0, size, at, DTYPE_CODES[np.dtype(np.float32)]), its)
        for at, (size, its) in enumerate(zip(sizes, placed, strict=True))
    ]
    for at, its in enumerate(placed):
        changes = sum(one != other for one, other in pairwise(its))
        assert changes <= len(set(its)) - 1
        parts = [part for each in Route.of(shards, shapes, message_bytes=1 << 30).portions for part in each.parts]
        assert sum(getattr(part, "item", None) == at for part in parts) in {0, len(set(its))}


@given(
    batches=st.lists(st.lists(st.integers(0, 900_000), min_size=1, max_size=8), min_size=1, max_size=4),
    servers=st.integers(1, 5),
)
def test_later_keys_move_none_and_every_worker_is_told_the_same(batches: list[list[int]], servers: int) -> None:
    keys = Keys(servers)
    told: dict[str, Any] = {}
    for number, sizes in enumerate(batches):
        records = [record("%d.%d" % (number, at), (size,)) for at, size in enumerate(sizes)]
        answer = keys.declare(records)
        told.update(zip(answer["keys"], answer["servers"], strict=True))
        assert [len(each) for each in answer["servers"]] == [len(cut(size, 4)) for size in sizes]
        # What the other workers hear later, in whichever order they ask.
        random.Random(number).shuffle(records)
        again = keys.told(records)
        assert dict(zip(again["keys"], again["servers"], strict=True)) == {
            each["key"]: told[each["key"]] for each in records
        }
    every = [record(name, ()) for name in told]
    assert keys.told(every)["servers"] == list(told.values())


def test_a_scheduler_that_places_as_mxnet_says_no_servers() -> None:
    assert "servers" not in Keys(0).declare([record("w", (4, 4))])


@given(
    index=st.integers(-5, 400_000),
    shape=st.tuples(st.integers(0, 3000), st.integers(1, 1500)),
    servers=st.integers(1, 7),
    factor=st.sampled_from([1, 16, 32]),
    is_sparse=st.booleans(),
)
def test_shards_where_mxnet_has_them_cover_the_value_and_cut_no_row_and_no_word(
    index: int, shape: tuple[int, int], servers: int, factor: int, is_sparse: bool
) -> None:
    value = Shard(0, 0, math.prod(shape), 3, 0, shape[1] if is_sparse else 0)
    shards = mxnet_shards(value, index, servers=servers, bound=10_000, factor=factor)
    assert shards[0].offset == 0
    assert shards[-1].end == value.length
    assert all(one.end == other.offset for one, other in itertools.pairwise(shards))
    assert {(shard.key, shard.dtype, shard.row_size) for shard in shards} == {(3, 0, value.row_size)}
    unit = shape[1] if is_sparse else factor
    assert all(shard.offset % unit == 0 for shard in shards)
    assert all(shard.length * 4 <= SHARD_BYTES or shard.length == unit for shard in shards)


# Messages


def shards_of(shapes: list[tuple[int, ...]], dtypes: list[Any], servers: int) -> list[tuple[Shard, ...]]:
    """Return the shards of keys 10, 11 and so on, placed as the scheduler does it."""
    loads = [0] * servers
    result = []
    for item, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        where = place([length * dtype.itemsize for _, length in cut(math.prod(shape), dtype.itemsize)], loads)
        result.append(shards_on(Shard(0, 0, math.prod(shape), 10 + item, DTYPE_CODES[dtype]), where))
    return result


def random_values(seed: int, shapes: list[tuple[int, ...]], dtypes: list[Any]) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [
        np.frombuffer(rng.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape).copy()
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


SHAPE = st.one_of(
    st.just(()), st.tuples(st.integers(0, 40)), st.tuples(st.integers(1, 30), st.integers(1, 30)), st.just((3, 0, 2))
)
KEYS = st.lists(st.tuples(SHAPE, st.sampled_from(DTYPES)), min_size=1, max_size=12)


@given(
    keys=KEYS,
    servers=st.integers(1, 4),
    seed=st.integers(0, 1000),
    limits=st.tuples(
        *(st.sampled_from(few) for few in ([256, 1024, SHARD_BYTES], [512, 1 << 22], [1, 3, 32768], [1, 200, 65536]))
    ),
    is_lent=st.booleans(),
)
def test_what_is_gathered_travels_and_is_scattered_is_what_was_given(
    keys: list[tuple[tuple[int, ...], Any]], servers: int, seed: int, limits: tuple[int, ...], is_lent: bool
) -> None:
    """Through encoded messages, for any shapes, dtypes, orders of keys, and limits."""
    shapes, dtypes = [shape for shape, _ in keys], [dtype for _, dtype in keys]
    with pytest.MonkeyPatch.context() as patch:
        names = ("SHARD_BYTES", "", "MESSAGE_ENTRIES", "DIRECT_BYTES")
        for name, limit in zip(names, limits, strict=True):
            if name:
                patch.setattr(routing, name, limit)
        placed = shards_of(shapes, dtypes, servers)
        order = random.Random(seed).sample(range(len(keys)), len(keys))
        shapes, dtypes = [shapes[at] for at in order], [dtypes[at] for at in order]
        route = Route.of([placed[at] for at in order], shapes, message_bytes=limits[1])
    values = random_values(seed, shapes, dtypes)
    # Outputs of any strides are made contiguous before.
    outs = [np.zeros_like(value) for value in values]
    rounds = np.arange(len(keys), dtype=np.int64)
    given_entries = []
    for portion in route.portions:
        assert len(portion.entries) <= limits[2]
        entries = portion.entries_at(rounds, Payload.PACKED)
        sizes = entries["length"].astype(np.int64) * portion.dtype.itemsize
        assert len(entries) == 1 or sizes.sum() <= limits[1]
        # What a stranger's frames are checked for, too.
        sent = Message(Kind.PUSH, entries=entries, payloads=portion.gather(values, is_lent))
        heard = decode([bytes(frame) for frame in encode(sent)])
        assert [len(memoryview(each)) for each in payloads_of(heard.entries, heard.payloads) if each is not None] == (
            sizes.tolist()
        )
        assert entries["round"].tolist() == [int(rounds[item]) for item in portion.items]
        portion.scatter(heard.payloads, outs)
        given_entries += entries[["key", "offset", "length"]].tolist()
    for value, out in zip(values, outs, strict=True):
        assert out.tobytes() == value.tobytes()
    every = [(shard.key, shard.offset, shard.length) for each in placed for shard in each]
    assert sorted(given_entries) == sorted(every)
    assert {int(server) for server in {portion.server for portion in route.portions}} == {
        shard.server for each in placed for shard in each
    }


@given(keys=KEYS, seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 4000), max_size=3))
def test_an_answer_may_come_in_other_frames_than_were_gathered(keys: list[Any], seed: int, cuts: list[int]) -> None:
    shapes, dtypes = [shape for shape, _ in keys], [dtype for _, dtype in keys]
    route = Route.of(shards_of(shapes, dtypes, 2), shapes)
    values = random_values(seed, shapes, dtypes)
    outs = [np.zeros_like(value) for value in values]
    for portion in route.portions:
        whole = b"".join(bytes(frame) for frame in portion.gather(values, True))
        item = portion.dtype.itemsize
        edges = sorted({0, len(whole), *(at - at % item for at in cuts if at < len(whole))})
        frames = [whole[one:other] for one, other in itertools.pairwise(edges)]
        portion.scatter(frames, outs)
        runs = list(portion.runs(frames))
        assert b"".join(run.tobytes() for _, _, run in runs) == whole
        for keys_of_run, offset, run in runs:
            expected = np.concatenate([values[key].reshape(-1) for key in keys_of_run])
            assert run.tobytes() == expected[offset : offset + len(run)].tobytes()
    for value, out in zip(values, outs, strict=True):
        assert out.tobytes() == value.tobytes()


def test_a_large_value_is_not_copied_together_where_an_answer_has_it_in_several_frames() -> None:
    shape = (300_000,)
    [portion] = Route.of(shards_of([shape], [DTYPES[0]], 1), [shape]).portions
    frames = [np.full(100_000, number, DTYPES[0]) for number in range(3)]
    found = list(portion.runs([frame.data for frame in frames]))
    assert [offset for _, offset, _ in found] == [0, 100_000, 200_000]
    assert all(np.shares_memory(run, frame) for (_, _, run), frame in zip(found, frames, strict=True))


@given(keys=KEYS, servers=st.integers(1, 4), seed=st.integers(0, 100))
def test_two_workers_that_are_told_the_same_send_the_same_entries(keys: list[Any], servers: int, seed: int) -> None:
    shapes, dtypes = [shape for shape, _ in keys], [dtype for _, dtype in keys]
    placed = shards_of(shapes, dtypes, servers)
    one = Route.of(placed, shapes)
    order = random.Random(seed).sample(range(len(keys)), len(keys))
    # The other names its keys in another order.
    other = Route.of([placed[at] for at in order], [shapes[at] for at in order])
    assert [portion.link for portion in one.portions] == [portion.link for portion in other.portions]
    for mine, theirs in zip(one.portions, other.portions, strict=True):
        assert mine.entries.tobytes() == theirs.entries.tobytes()


def test_values_that_are_not_lent_share_no_memory_with_what_is_sent() -> None:
    shapes: list[tuple[int, ...]] = [(3,), (400, 200)]
    values = [np.ones(shape, np.float32) for shape in shapes]
    [portion] = Route.of(shards_of(shapes, [DTYPES[0]] * 2, 1), shapes).portions
    copied = portion.gather(values, lent=False)
    lent = portion.gather(values, lent=True)
    for value in values:
        value[...] = 2
    assert set(np.frombuffer(b"".join(copied), np.float32).tolist()) == {1.0}
    # Small values are gathered in any case, large ones are sent from their own memory.
    assert [np.frombuffer(frame, np.float32)[0] for frame in lent] == [1.0, 2.0]


def test_what_a_push_copies_is_written_again_by_the_next_one_when_its_answer_is_here() -> None:
    portion, values = portion_of(), [np.ones(2, np.float32) for _ in range(10)]

    def frame() -> Any:
        [made] = portion.gather(values, lent=False)
        return made

    first = frame()
    assert frame() is first
    portion.carried_by = NodeRequest("push")
    second = frame()
    assert second is not first
    portion.carried_by.resolve((), None)
    assert frame() is second


@pytest.mark.parametrize("is_lent", [False, True])
def test_values_of_any_strides_are_gathered_in_c_order(is_lent: bool) -> None:
    for dtype in DTYPES:
        rows = np.frombuffer(np.random.default_rng(0).bytes(400 * 300 * dtype.itemsize), dtype).reshape(400, 300)
        for value in (rows, rows.T, rows[::-1, ::2], rows[:5, :3].T):
            [portion] = Route.of(shards_of([value.shape], [dtype], 1), [value.shape]).portions
            assert b"".join(bytes(frame) for frame in portion.gather([value], is_lent)) == value.tobytes()


@given(
    keys=st.lists(st.tuples(st.integers(1, 3000), st.sampled_from(["", "2bit", "fp16", "rows"])), max_size=30),
    servers=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_shards_that_travel_in_different_ways_share_no_message_and_none_is_left_out(
    keys: list[tuple[int, str]], servers: int, seed: int
) -> None:
    """With a payload of its own size for each shard: messages are filled by what really travels."""
    ways = {"": How(), "2bit": How(1, {"threshold": 0.5}), "fp16": How(3), "rows": How(compression.ROWS)}
    placed = shards_of([(size,) for size, _ in keys], [DTYPES[0]] * len(keys), servers)
    shards = [(item, shard) for item, its in enumerate(placed) for shard in its]
    rng = random.Random(seed)
    sizes = [rng.randrange(600) for _ in shards]
    hows = [ways[name] for _, name in keys]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "MESSAGE_ENTRIES", 4)
        portions = portions_of(shards, [(size,) for size, _ in keys], hows, sizes, message_bytes=1000)
    size_of = {shard: size for (_, shard), size in zip(shards, sizes, strict=True)}
    used, found = [], []
    for portion in portions:
        its = list(portion.shards())
        assert {shard.server for _, shard in its} == {portion.server}
        assert all(hows[item] == portion.how for item, _ in its)
        assert set(portion.entries["codec"].tolist()) == {portion.how.codec}
        assert not portion.how.codec or [shards[place] for place in portion.places] == its
        used.append(sum(size_of[shard] for _, shard in its))
        assert len(its) == 1 or (len(its) <= 4 and used[-1] <= 1000)
        found += its
    assert sorted(found) == sorted(shards)
    for at, (one, other) in enumerate(itertools.pairwise(portions)):
        if (one.link, one.how) == (other.link, other.how):
            first = next(other.shards())[1]
            assert len(one.entries) == 4 or used[at] + size_of[first] > 1000, "it would have fitted into the one before"


def test_keys_that_travel_by_rows_have_a_number_and_no_messages_in_a_route() -> None:
    shapes: list[tuple[int, ...]] = [(4, 2), (6,), (5,)]
    hows = [How(compression.ROWS), How(), How(3)]
    route = Route.of(shards_of(shapes, [np.dtype(np.float32)] * 3, 1), shapes, hows)
    assert route.numbers.tolist() == [10, 11, 12]
    assert [(portion.items.tolist(), portion.how) for portion in route.portions] == [([1], hows[1]), ([2], hows[2])]
    assert route.runs == [2]


class Staging:
    """Memory that the receiver reads where it is."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, ...]] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        self.taken.append(shape)
        return np.empty(shape, dtype)


def test_of_values_in_shared_memory_those_that_stay_are_not_copied() -> None:
    shapes: list[tuple[int, ...]] = [(3,), (SHARD_BYTES // 2,), (20_000,)]
    values = random_values(1, shapes, [np.dtype(np.float32)] * 3)
    [portion] = Route.of(shards_of(shapes, [np.dtype(np.float32)] * 3, 1), shapes).portions
    staging: Any = Staging()
    frames = portion.gather(values, lent=True, staging=staging, in_place=InPlace(frozenset({1}), {}))
    assert [memoryview(frame).nbytes for frame in frames] == [12, 2 * SHARD_BYTES, 80_000]
    assert [bytes(frame) for frame in frames] == [value.tobytes() for value in values]
    before = [value.tobytes() for value in values]
    for value in values:
        value[:] = 1
    assert [bytes(frame) for frame in frames] == [before[0], values[1].tobytes(), before[2]]
    [only] = Route.of(shards_of(shapes[1:2], [np.dtype(np.float32)], 1), shapes[1:2]).portions
    frames = only.gather(values[1:2], True, staging, InPlace(frozenset({0}), {}))
    assert [bytes(frame) for frame in frames] == [values[1].tobytes()]
    assert staging.taken == [(20_003,)]


@pytest.mark.parametrize("places", [(), (1,)])
def test_values_for_which_there_is_no_shared_memory_left_travel_as_bytes(places: tuple[int, ...]) -> None:
    shapes: list[tuple[int, ...]] = [(3,), (SHARD_BYTES // 2,), (5,)]
    values = random_values(1, shapes, [np.dtype(np.float32)] * 3)
    [portion] = Route.of(shards_of(shapes, [np.dtype(np.float32)] * 3, 1), shapes).portions
    staging = SimpleNamespace(empty=lambda shape, dtype: None)
    in_place = InPlace(frozenset(places), {})
    frames = portion.gather(values, lent=True, staging=staging, in_place=in_place)  # type: ignore[arg-type]
    assert b"".join(frames) == b"".join(value.tobytes() for value in values)


def test_messages_are_filled_to_the_last_byte() -> None:
    shapes: list[tuple[int, ...]] = [(128,)] * 6
    route = Route.of(shards_of(shapes, [np.dtype(np.float32)] * 6, 1), shapes, message_bytes=1024)
    assert [len(portion.entries) for portion in route.portions] == [2, 2, 2]


def test_of_stores_in_shared_memory_those_on_gpus_have_the_smaller_messages() -> None:
    size = 1 << 30
    limits = [
        message_limit(size, is_shared=is_shared, is_on_one_host=True, on_devices=on_devices)
        for is_shared, on_devices in ((False, True), (True, True), (True, False))
    ]
    assert limits == sorted(limits)
    assert len(set(limits)) == 3


# Buckets


def portion_of(count: int = 10) -> Portion:
    shapes: list[tuple[int, ...]] = [(2,)] * count
    [portion] = Route.of(shards_of(shapes, [DTYPES[0]] * count, 1), shapes).portions
    return portion


def test_a_bucket_stands_for_its_entries_as_long_as_all_keys_go_on_together() -> None:
    buckets, portion = Buckets(), portion_of()
    rounds = np.arange(10, dtype=np.int64)
    assert buckets.name(portion, rounds, registers=False) == (0, -1), "a pull registers nothing"
    assert buckets.name(portion, rounds, registers=True) == (1, -1)
    assert [buckets.name(portion, rounds + step, registers=True) for step in (0, 1, 7)] == [(1, 0), (1, 1), (1, 7)]
    assert buckets.name(portion, rounds - 2, registers=False) == (0, -1), "an earlier round than that of step 0"
    rounds[3] += 1
    assert buckets.name(portion, rounds, registers=False) == (0, -1), "one key was pushed by itself"
    assert buckets.name(portion, rounds, registers=True) == (2, -1)


def test_a_message_of_few_entries_always_names_them() -> None:
    buckets, portion = Buckets(), portion_of(7)
    rounds = np.zeros(7, np.int64)
    assert [buckets.name(portion, rounds, registers=True) for _ in range(2)] == [(0, -1)] * 2


def test_the_number_of_a_bucket_that_is_given_again_belongs_to_the_later_portion_only() -> None:
    buckets = Buckets()
    rounds = np.zeros(10, np.int64)
    first = portion_of()
    buckets.name(first, rounds, registers=True)
    portions = [portion_of() for _ in range(BUCKETS)]
    for portion in portions:
        buckets.name(portion, rounds, registers=True)
    assert buckets.name(first, rounds, registers=False) == (0, -1)
    numbers = [buckets.name(portion, rounds, registers=False)[0] for portion in portions]
    assert sorted(numbers) == list(range(1, BUCKETS + 1))
    buckets.forget([first])
    assert [buckets.name(portion, rounds, registers=False)[0] for portion in portions] == numbers, (
        "what was forgotten before is not forgotten for another"
    )


def test_a_portion_that_is_forgotten_is_told_anew() -> None:
    buckets, portion = Buckets(), portion_of()
    rounds = np.zeros(10, np.int64)
    buckets.name(portion, rounds, registers=True)
    buckets.forget([portion])
    assert buckets.name(portion, rounds, registers=False) == (0, -1)
    buckets.name(portion, rounds + 1, registers=True)
    assert buckets.name(portion, rounds + 1, registers=False) == (2, 0)


def test_a_portion_that_was_never_told_is_forgotten_without_an_effect_on_others() -> None:
    buckets, never_told = Buckets(), portion_of()
    rounds = np.zeros(10, np.int64)
    buckets.forget([never_told])
    told = [portion_of() for _ in range(BUCKETS)]
    for portion in told:
        buckets.name(portion, rounds, registers=True)
    buckets.forget([never_told])
    assert [buckets.name(portion, rounds, registers=False) for portion in (told[0], told[-1])] == [(1, 0), (BUCKETS, 0)]


def test_a_portion_that_is_told_anew_keeps_its_new_bucket_when_its_former_one_is_given_to_another() -> None:
    buckets, portion = Buckets(), portion_of()
    rounds = np.zeros(10, np.int64)
    buckets.name(portion, rounds, registers=True)
    buckets.forget([portion])
    assert buckets.name(portion, rounds, registers=True) == (2, -1)
    for _ in range(BUCKETS - 1):
        buckets.name(portion_of(), rounds, registers=True)
    assert buckets.name(portion, rounds, registers=False) == (2, 0)


def test_a_step_that_has_no_room_in_a_message_is_not_named() -> None:
    buckets, portion = Buckets(), portion_of()
    rounds = np.zeros(10, np.int64)
    buckets.name(portion, rounds, registers=True)
    assert buckets.name(portion, rounds + 2**32 - 1, registers=False) == (1, 2**32 - 1)
    assert buckets.name(portion, rounds + 2**32, registers=False) == (0, -1)
