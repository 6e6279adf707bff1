"""Calls with the same keys as before are planned: they say what other calls say, and nothing else is taken for one."""

from __future__ import annotations

import gc
import os
import signal
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import plans
import pytest
from alternation import alternate
from cluster import PATHS, Cluster, run_job
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import interrupted
from manual import ManualJob
from slowness import scaled

from distrun_runtime.arrays.shared_memory import address_of
from distrun_runtime.errors import KVError, StoreClosed
from distrun_runtime.kvstore import KVStore, RowSparse
from distrun_runtime.protocol.message import Kind
from distrun_runtime.ps.routing import SMALL_CALL_BYTES
from distrun_runtime.store import plans as store_plans
from distrun_runtime.store.transfers import Transfers

SHAPE = (2, 3)


def full(value: float, shape: tuple[int, ...] = SHAPE, dtype: str = "float32") -> Any:
    return np.full(shape, value, dtype)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> list[plans.SteadyCall]:
    return plans.steady_calls(monkeypatch)


def pushed_and_pulled(kv: KVStore, *keys: str) -> None:
    """Make the calls of a step until they are planned."""
    for _ in range(2):
        values = [full(1) for _ in keys]
        kv.push(list(keys), values)
        kv.pull(list(keys), values)
        kv.pushpull(list(keys), values)


# What a steady call sends


@pytest.mark.parametrize("path", sorted(set(PATHS) - {"relays"}))
@pytest.mark.parametrize(
    ("sizes", "dtype", "scale"),
    [
        ([1], "float32", 1.0),
        ([3] * 20, "float16", 1.0),
        ([40_000, 5, 0, 300_000], "float64", 0.5),
        ([70_000], "int32", 1),
    ],
)
def test_a_steady_call_sends_what_an_unplanned_one_sends(
    steady: list[plans.SteadyCall], path: str, sizes: list[int], dtype: str, scale: float
) -> None:
    keys = [f"k{at}" for at in range(len(sizes))]

    def script(kv: KVStore) -> list[Any]:
        kv.init(keys, [full(0, (size,), dtype) for size in sizes])
        outs = [full(-1, (size,), dtype) for size in sizes]
        for step in range(4):
            given = [full(step + kv.rank, (size,), dtype) for size in sizes]
            kv.push(keys, given, -3, scale=scale)
            kv.pull(keys, outs, -3)
            kv.pull(keys, outs, -3)
            kv.pushpull(keys, given, outs, scale=scale)
        return [out[0] for out in outs if out.size]

    results = run_job(script, 2, 2, over=PATHS[path])
    assert results == [[7 * scale] * sum(map(bool, sizes))] * 2
    # A push of many bytes does not wait until servers have them.
    is_small = sum(size * np.dtype(dtype).itemsize for size in sizes) < SMALL_CALL_BYTES
    assert {one.kind for one in steady} == {Kind.PULL, Kind.PUSHPULL} | ({Kind.PUSH} if is_small else set())
    for one in steady:
        assert one.sent == one.asked


@settings(max_examples=12)
@given(st.data())
def test_calls_with_and_without_plans_in_any_order_give_the_same_values(data: st.DataObject) -> None:
    """Any subset of keys in any order, by any call, planned or not: each has the rounds of its own pushes."""
    keys = ["a", "b", *(f"k{at}" for at in range(10))]
    subset = st.lists(st.sampled_from(keys), min_size=1, max_size=len(keys), unique=True)
    chosen = data.draw(st.lists(subset, min_size=1, max_size=3))
    steps = data.draw(
        st.lists(st.tuples(st.sampled_from(["push", "pull", "pushpull", "barrier"]), st.integers(0, 2)), max_size=25)
    )
    seed = data.draw(st.text(max_size=3))

    def script(kv: KVStore) -> list[list[float]]:
        kv.init(keys, [full(0) for _ in keys])
        seen = []
        for number, (call, which) in enumerate(steps):
            some = chosen[which % len(chosen)]
            arrays = [full(number + keys.index(key)) for key in some]
            if call == "push":
                kv.push(some, arrays)
            elif call == "barrier":
                kv.barrier()
            else:
                (kv.pull if call == "pull" else kv.pushpull)(some, arrays)
                seen.append([float(one[0, 0]) for one in arrays])
        return seen

    stored = dict.fromkeys(keys, 0.0)
    expected = []
    for number, (call, which) in enumerate(steps):
        some = chosen[which % len(chosen)]
        if call in {"push", "pushpull"}:
            stored.update({key: 2.0 * (number + keys.index(key)) for key in some})
        if call in {"pull", "pushpull"}:
            expected.append([stored[key] for key in some])
    with pytest.MonkeyPatch.context() as patch:
        alternate(seed, patch.setattr)
        assert run_job(script, 2, 2, over="direct") == [expected] * 2


def test_large_answers_that_travel_as_bytes_are_received_in_the_same_memory_again(
    steady: list[plans.SteadyCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Transfers, "_staging", lambda self, portion: None)
    size = 100_000

    def script(kv: KVStore) -> list[float]:
        kv.init(["a", "b"], [full(0, (size,)), full(0, (5,))])
        seen = []
        for step in range(10):
            outs = [full(-1, (size,)), full(-1, (5,))]
            kv.pushpull(["a", "b"], [full(step, (size,)), full(step + 1, (5,))], outs)
            seen.append(float(outs[0][-1] + outs[1][0]))
        return seen

    assert run_job(script, 2, 1, over="direct") == [[4.0 * step + 2 for step in range(10)]] * 2
    for rank in range(2):
        calls = [one for one in steady if one.rank == rank and one.kind is Kind.PUSHPULL]
        assert len(calls) == 9
        assert all(into is not None and len(into) == 4 * (size + 5) for one in calls for into in one.into)
        # A call that has become a request, as this machine was slow, leaves its memory to it.
        assert len({id(into) for one in calls for into in one.into}) <= 1 + sum(one.is_request for one in calls)


@pytest.mark.parametrize(("hosts", "lengths"), [(1, [3 << 20]), (2, [1 << 20] * 3)])
def test_between_hosts_a_small_call_goes_by_messages_of_one_shard(
    steady: list[plans.SteadyCall], monkeypatch: pytest.MonkeyPatch, hosts: int, lengths: list[int]
) -> None:
    class OnHosts(Cluster):
        def session(self, rank: int = -1, **changes: Any) -> Any:
            return super().session(rank, host=("here", "there")[rank % hosts], **changes)

    monkeypatch.setattr(Transfers, "_staging", lambda self, portion: None)
    size = 3 << 18
    ramp = np.arange(size, dtype=np.float32)

    def script(kv: KVStore) -> None:
        kv.init("a", full(0, (size,)))
        out = full(-1, (size,))
        for step in range(5):
            kv.pushpull("a", ramp + step, out)
            assert (out == 2 * ramp + 2 * step).all()

    with OnHosts(2, 1, over="direct") as job:
        job.run(script)
    calls = [one for one in steady if one.kind is Kind.PUSHPULL]
    assert [[len(into or b"") for into in one.into] for one in calls] == [lengths] * 8


@pytest.mark.parametrize("calls", ["pushpull", "push and pull"])
def test_steady_calls_give_their_shared_memory_back_without_a_search_for_garbage(calls: str) -> None:
    size, steps = 500_000, 40

    def script(kv: KVStore) -> int:
        kv.init("a", full(0, (size,)))
        value, out = full(1, (size,)), full(0, (size,))
        for _ in range(steps):
            if calls == "pushpull":
                kv.pushpull("a", value, out)
            else:
                kv.push("a", value)
                kv.pull("a", out)
        return int(kv._backend._node._memory.staging.size)  # type: ignore[attr-defined]

    gc.disable()
    try:
        sizes = run_job(script, 2, 1, over="direct")
    finally:
        gc.enable()
    assert max(sizes) < steps // 2 * 4 * size


def new_blocks(kv: KVStore) -> int:
    """Make 20 calls of one large key; return how many of them after the second took new shared memory."""
    kv.init("a", full(0, (500_000,)))
    value, out, seen = full(1, (500_000,)), full(0, (500_000,)), list[int]()
    staging: Any = kv._backend._node._memory.staging  # type: ignore[attr-defined]
    make = staging.empty

    def watched(*what: Any) -> Any:
        seen.append(step)
        return make(*what)

    staging.empty = watched
    for step in range(20):  # noqa: B007  # `watched` reads it
        kv.pushpull("a", value, out)
    return sum(step >= 2 for step in seen)


def test_a_steady_pushpull_is_sent_from_the_shared_memory_of_the_one_before(steady: list[plans.SteadyCall]) -> None:
    for rank, count in enumerate(run_job(new_blocks, 2, 1, over="direct")):
        # A call that has become a request, as this machine was slow, keeps its memory.
        assert count <= 2 * sum(one.is_request for one in steady if one.rank == rank)


def test_shared_memory_beyond_the_limit_stays_with_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_plans, "SPARE_BYTES", 1_000_000)
    assert min(run_job(new_blocks, 2, 1, over="direct")) >= 18


def test_arrays_of_the_stores_that_were_pushed_give_their_memory_back_when_they_are_dropped() -> None:
    keys, shape, steps = ["a", "b"], (300_000,), 20

    def script(kv: KVStore) -> int:
        kv.init(keys, [full(0, shape)] * 2)
        outs, seen = [full(0, shape) for _ in keys], set[int]()
        for step in range(1, steps + 1):
            values = [kv.empty(shape) for _ in keys]
            for value in values:
                value.fill(step)
                seen.add(address_of(value))
            kv.push(keys, values, wait=False).wait()
            kv.pull(keys, outs)
            assert all((out == 2 * step).all() for out in outs)
        return len(seen)

    gc.disable()
    try:
        counts = run_job(script, 2, 1, over="direct")
    finally:
        gc.enable()
    assert max(counts) < steps


def test_a_push_has_read_an_array_of_the_stores_when_it_returns() -> None:
    def script(kv: KVStore) -> list[float]:
        value, out = kv.empty((300_000,)), full(0, (300_000,))
        kv.init("a", full(0, (300_000,)))
        seen = []
        for _ in range(8):
            kv.barrier()
            value[:] = 1
            kv.push("a", value)
            value[:] = 1000
            kv.pull("a", out)
            seen.append(float(out.max()))
        return seen

    assert run_job(script, 2, 1, over="direct") == [[2.0] * 8] * 2


# What is no steady call


def sparse(value: float) -> RowSparse:
    return RowSparse(full(value), np.arange(2), SHAPE)


OTHERS: dict[str, tuple[Callable[[], Any], Any]] = {
    "another dtype": (lambda: full(3, dtype="float64"), "float64"),
    "another shape": (lambda: full(3, (3, 2)), r"\(3, 2\)"),
    "strides": (lambda: np.asfortranarray(full(3)), None),
    "every second element": (lambda: full(3, (2, 6))[:, ::2], None),
    "two devices": (lambda: [full(1), full(2)], None),
    "a subclass": (lambda: full(3).view(np.matrix), None),
    "rows": (lambda: sparse(3), None),
    "a list of numbers": (lambda: [[3.0] * 3] * 2, "array"),
    "nothing": (lambda: None, "None"),
}


@pytest.mark.parametrize("other", sorted(OTHERS))
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_a_call_with_other_arrays_is_not_taken_for_the_planned_one(other: str) -> None:
    make, error = OTHERS[other]

    def script(kv: KVStore) -> list[float]:
        kv.init(["w", "v"], [full(0), full(0)])
        pushed_and_pulled(kv, "w")
        pushed_and_pulled(kv, "w", "v")
        out, seen = full(-1), []
        for keys in ("w", ["w"], ["w", "v"]):
            value = make() if isinstance(keys, str) else [make(), *(full(3) for _ in keys[1:])]
            for call in (kv.push, kv.pushpull):
                if error is None:
                    call(
                        keys,
                        value,
                        *(() if call == kv.push else ([out, full(0)][: len(keys)] if isinstance(keys, list) else out,)),
                    )
                else:
                    with pytest.raises((KVError, TypeError), match=error):
                        call(keys, value)
            kv.pull("w", out)
            seen.append(float(out[1, 2]))
        return seen

    (seen,) = run_job(script, 1, 1, over="direct")
    assert seen == [1.0 if error else 3.0] * 3


@pytest.mark.parametrize("call", ["pull", "pushpull"])
def test_outputs_that_cannot_be_written_are_refused_though_the_call_was_planned(call: str) -> None:
    def script(kv: KVStore) -> list[Any]:
        keys = ["w", "v"]
        kv.init(keys, [full(0), full(0)])
        pushed_and_pulled(kv, "w")
        pushed_and_pulled(kv, "w", "v")

        def make(key: Any, out: Any) -> None:
            if call == "pull":
                kv.pull(key, out)
            else:
                kv.pushpull(key, full(1) if isinstance(key, str) else [full(1), full(1)], out)

        fixed = full(7)
        fixed.flags.writeable = False
        shared = full(5, (3, 3))
        bad: list[tuple[Any, Any, str]] = [
            ("w", fixed, "read-only|writ"),
            (keys, [full(0), fixed], "read-only|writ"),
            ("w", np.lib.stride_tricks.as_strided(shared, SHAPE, (0, 4)), "share memory"),
            (keys, [shared[:2], shared[1:]], "share memory"),
            (keys, [shared[:2], shared[:2]], "share memory"),
            (keys, None, "None"),
        ]
        for key, out, words in bad:
            if out is None and call == "pushpull":
                continue  # The pushed arrays are the outputs.
            with pytest.raises((KVError, TypeError, ValueError), match=words):
                make(key, out)
        strided = full(0, (2, 6))
        make("w", strided[:, ::2])
        return [fixed[0, 0], shared[0, 0], strided[0].tolist()]

    assert run_job(script, 1, 1, over="direct") == [[7, 5, [1, 0, 1, 0, 1, 0]]]


def test_keys_in_another_order_or_of_another_type_are_not_taken_for_the_planned_ones() -> None:
    def script(kv: KVStore) -> list[list[float]]:
        kv.init([0, 1], [full(0), full(0)])
        for _ in range(3):
            kv.pushpull([0, 1], [full(1), full(2)])
            kv.pushpull(1, full(2))
        seen = []
        for keys in ([0, 1], (0, 1), [1, 0], [np.int64(1), np.int64(0)], [1], 1):
            outs: Any = [full(0) for _ in range(len(keys))] if isinstance(keys, (list, tuple)) else full(0)
            kv.pull(keys, outs)
            seen.append([float(out[0, 0]) for out in (outs if isinstance(outs, list) else [outs])])
        for keys in ([False, True], True, 1.0, [1.0]):
            with pytest.raises((KVError, TypeError)):
                kv.pull(keys, [full(0), full(0)])  # type: ignore[arg-type]
        for priority in (1.0, "0"):
            with pytest.raises(KVError, match="priority is an int"):
                kv.pushpull(1, full(2), priority=priority)  # type: ignore[arg-type]
        with pytest.raises(KVError, match="scale is a finite number"):
            kv.pushpull(1, full(2), scale=float("nan"))
        return seen

    (seen,) = run_job(script, 1, 1, over="direct")
    assert seen == [[1, 2], [1, 2], [2, 1], [2, 1], [2], [2]]


# What happens to a store meanwhile


def test_compression_that_is_set_later_compresses_what_was_planned(steady: list[plans.SteadyCall]) -> None:
    def script(kv: KVStore) -> float:
        kv.init("w", full(0))
        pushed_and_pulled(kv, "w")
        steady.clear()
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5, "min_size": 0})
        out = full(0)
        for _ in range(3):
            kv.pushpull("w", full(0.7), out)
        return float(out[0, 0])

    assert run_job(script, 1, 1, over="direct") == [0.5]
    assert not steady


def test_a_round_that_another_worker_skips_tells_a_steady_call_so(steady: list[plans.SteadyCall]) -> None:
    def script(kv: KVStore) -> Any:
        kv.init("w", full(0))
        out = full(-1)
        for _ in range(3):
            kv.pushpull("w", full(1), out)
        out.fill(-5)
        if not kv.rank:
            steady.clear()
        call = kv.skip_round("w", {"why": "nan"}) if kv.rank else kv.pushpull("w", full(1), out)
        return dict(call.skipped), float(out[0, 0])

    assert run_job(script, 2, 1, over="direct") == [({0: None, 1: {"why": "nan"}}, -5.0)] * 2
    assert [one.kind for one in steady] == [Kind.PUSHPULL]


def test_rounds_that_were_loaded_have_a_plan_of_their_own(tmp_path: Any) -> None:
    def script(kv: KVStore) -> list[float]:
        keys = [f"k{at}" for at in range(10)]
        kv.init(keys, [full(0) for _ in keys])
        outs, seen = [full(0) for _ in keys], []
        for step in range(6):
            kv.pushpull(keys, [full(step) for _ in keys], outs)
            seen.append(float(outs[3][0, 0]))
            if step == 2:
                kv.save_states(tmp_path)
            if step == 4:
                kv.load_states(tmp_path)
                kv.pull(keys, outs)
                seen.append(float(outs[3][0, 0]))
        return seen

    assert run_job(script, 2, 2, over="direct") == [[0, 2, 4, 6, 8, 4, 10]] * 2


def test_the_least_recently_used_plan_goes_when_there_are_too_many(
    steady: list[plans.SteadyCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_plans, "PLANS", 2)
    monkeypatch.setattr(store_plans, "PLANNED_KEYS", 0)

    def script(kv: KVStore) -> list[int]:
        keys = ["a", "b", "c", "d"]
        kv.init(keys, [full(0) for _ in keys])
        counts = []
        for some in (["a", "b"], ["c", "d"], ["a", "b"], ["b", "c"], ["a", "b"], ["c", "d"]):
            steady.clear()
            kv.pushpull(some, [full(1), full(1)])
            counts.append(len(steady))
        return counts

    assert run_job(script, 1, 1, over="direct") == [[0, 0, 1, 0, 1, 0]]


def test_push_and_pull_of_each_of_hundreds_of_keys_are_planned(steady: list[plans.SteadyCall]) -> None:
    def script(kv: KVStore) -> list[int]:
        keys, out = list(range(400)), full(0)
        kv.init(keys, [full(0) for _ in keys])
        counts = []
        for _ in range(4):
            steady.clear()
            for key in keys:
                kv.push(key, full(1))
                kv.pull(key, out)
            counts.append(len(steady))
        return counts

    ((*_, last),) = run_job(script, 1, 1, over="direct")
    assert last == 400  # a push that asks for its result, too; the pull sends nothing


def test_plans_of_long_lists_count_for_more(steady: list[plans.SteadyCall], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_plans, "PLANS", 1)
    monkeypatch.setattr(store_plans, "PLANNED_KEYS", 40)

    def script(kv: KVStore) -> list[int]:
        keys = list(range(30))
        kv.init(keys, [full(0) for _ in keys])
        counts = []
        for some in ([1], [2], [3], [1], keys, [1], [3]):  # beside 30 keys there is room for one plan more
            steady.clear()
            kv.pushpull(some, [full(1) for _ in some])
            counts.append(len(steady))
        return counts

    assert run_job(script, 1, 1, over="direct") == [[0, 0, 0, 1, 0, 1, 0]]


def test_a_profile_has_the_spans_of_calls_that_were_planned_before(
    steady: list[plans.SteadyCall], tmp_path: Any
) -> None:
    def script(kv: KVStore) -> int:
        kv.init("w", full(0))
        pushed_and_pulled(kv, "w")
        kv.barrier()
        steady.clear()
        with kv.profile(tmp_path):
            kv.pushpull("w", full(1))
            kv.barrier()
        return len(steady)

    assert run_job(script, 1, 1, over="direct") == [0]
    assert '"pushpull"' in (tmp_path / "worker-0.json").read_text()


# Threads and processes


def test_two_threads_that_call_at_once_in_opposite_orders_get_their_own_values() -> None:
    def script(kv: KVStore) -> list[set[float]]:
        kv.init(["a", "b"], [full(0), full(0)])
        for _ in range(2):
            kv.pushpull("a", full(1))
            kv.pushpull("b", full(10))
        seen: dict[str, set[float]] = {"a": set(), "b": set()}

        def work(key: str, value: float) -> None:
            for _ in range(50):
                out = full(-1)
                kv.pushpull(key, full(value), out)
                seen[key] |= set(out.ravel().tolist())

        # The other worker starts them in the opposite order: each waits for one that this worker's other thread makes.
        both = [threading.Thread(target=work, args=one) for one in (("a", 1), ("b", 10))][:: 1 - 2 * kv.rank]
        for one in both:
            one.start()
        for one in both:
            one.join()
        return [seen["a"], seen["b"]]

    assert run_job(script, 2, 1, over="direct") == [[{2.0}, {20.0}]] * 2


def test_after_a_steady_call_that_is_interrupted_anywhere_the_store_goes_on() -> None:
    def script(kv: KVStore) -> int:
        kv.init("w", full(0))
        given, out, at = full(1), full(0), 1
        for _ in range(4):
            kv.pushpull("w", given, out)
        while interrupted(lambda: kv.pushpull("w", given, out), at):
            at += 1
            for value in (2, 3):
                again = threading.Thread(target=kv.pushpull, args=("w", full(value), out), daemon=True)
                again.start()
                again.join(scaled(20))
                assert not again.is_alive(), f"interrupted at {at - 1}"
                assert (out == value).all()
        return at

    assert run_job(script, 1, 1, over="direct")[0] > 50


def test_a_forked_child_makes_no_steady_call_though_another_thread_was_in_one() -> None:
    def script(kv: KVStore) -> int:
        kv.init("w", full(0))
        pushed_and_pulled(kv, "w")
        backend: Any = kv._backend
        is_held, is_over = threading.Event(), threading.Event()

        def hold() -> None:
            with backend._lock:
                is_held.set()
                is_over.wait(scaled(60))

        other = threading.Thread(target=hold)
        other.start()
        is_held.wait(scaled(60))
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            try:
                kv.pushpull("w", full(1))
            except StoreClosed:
                os._exit(7)
            finally:
                os._exit(1)
        is_over.set()
        other.join()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert run_job(script, 1, 1, over="direct") == [7]


LOOP = """
    import sys
    import numpy as np
    from distrun_runtime import kvstore

    kv = kvstore.create("dist_sync")
    keys = ["a", "b"]
    kv.init(keys, [np.zeros(SIZE, "float32") for _ in keys])
    values, outs = [np.ones(SIZE, "float32") for _ in keys], [np.zeros(SIZE, "float32") for _ in keys]
    for step in range(COUNT):
        CALLS
    print(f"steady, rank {kv.rank}", flush=True)
"""
CALLS = {
    "pushpull": "kv.pushpull(keys, values, outs)",
    "push and pull": "kv.push(keys, values); kv.pull(keys, outs)",
    "one key": "kv.pushpull('a', values[0], outs[0])",
    "barrier": "kv.barrier()",
}


def looping(calls: str, size: int, then: str) -> str:
    """Return a script that makes steady calls, and then does something."""
    text = LOOP.replace("SIZE", str(size)).replace("CALLS", CALLS[calls]).replace("COUNT", "20")
    return textwrap.dedent(text) + textwrap.dedent(then)


@pytest.mark.parametrize(
    ("calls", "after_s"),
    [
        ("push and pull", 0.03),
        *(pytest.param(calls, 0.03, marks=pytest.mark.slow) for calls in ("barrier", "one key", "pushpull")),
        *(pytest.param(calls, 0.4, marks=pytest.mark.slow) for calls in sorted(CALLS)),
    ],
)
def test_ctrl_c_in_a_steady_call_ends_it_at_once_and_the_store_goes_on(calls: str, after_s: float) -> None:
    """Rank 0 is interrupted in the call, and only then does rank 1 make it. After 0.4 s the node's thread waits."""
    then = f"""
        import os, signal, threading, time
        from pathlib import Path
        go = Path(sys.argv[1])
        if kv.rank == 0:
            threading.Timer({after_s}, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            try:
                {CALLS[calls]}
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            go.touch()
        else:
            while not go.exists():
                time.sleep(0.01)
            {"pass" if calls == "barrier" else CALLS[calls]}
        kv.barrier()
        for step in range(20):
            for array in values:
                array.fill(step + kv.rank)
            {CALLS[calls]}
        kv.pushpull(keys, values, outs)
        print("sum", outs[0][0], outs[1][-1])
    """
    with ManualJob(workers=2, servers=2) as job:
        script = job.script(looping(calls, 20_000, then))
        job.start("scheduler")
        for _ in range(2):
            job.start("server")
        names = [job.start("worker", script, str(job.path("go"))) for _ in range(2)]
        assert set(job.wait()) == {0}, job.report()
        assert "interrupted" in "".join(map(job.out, names))
        assert all("sum 39.0 39.0" in job.out(name) for name in names), job.report()


@pytest.mark.parametrize(
    "calls", ["pushpull", *(pytest.param(each, marks=pytest.mark.slow) for each in ("barrier", "push and pull"))]
)
def test_a_node_that_dies_in_a_steady_call_ends_it_and_is_named(calls: str) -> None:
    then = f"""
        if kv.rank == 0:
            {CALLS[calls]}
        else:
            sys.stdin.read() or __import__("time").sleep(60)
    """
    lost = "scheduler" if calls == "barrier" else "server-0"
    with ManualJob(workers=2, servers=1) as job:
        script = job.script(looping(calls, 20_000, then))
        job.start("scheduler")
        job.start("server")
        names = [job.start("worker", script) for _ in range(2)]
        for name in names:
            job.until(name, "steady")
        job.processes["server-0" if lost == "server-0" else "scheduler-0"].kill()
        said = [name for name in names if job.processes[name].poll() is None]
        first = next(name for name in said if "rank 0" in job.out(name))
        assert job.wait(first) == [1]
        assert "PeerLost" in job.err(first), job.report()
        assert lost in job.err(first), job.report()
