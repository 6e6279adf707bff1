"""Collective calls without keys: allreduce, broadcast, allgather, reduce_scatter, over every path."""

from __future__ import annotations

import contextlib
import queue
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import plans
import pytest
from cluster import Cluster, open_store, run_job
from fakearrays import put
from gpukit import Machine, gpus_of_process
from gputensors import Torch
from slowness import scaled

from distrun_runtime.errors import KVError, RuntimeFault, StoreClosed
from distrun_runtime.kvstore import KVStore, Pending, create
from distrun_runtime.protocol.message import Kind
from distrun_runtime.store import objects
from distrun_runtime.store.pending import BackgroundCall, Late

Run = Callable[..., list[Any]]

SIZES = (3, 300_000)
"""Elements of a value that travels with others, and of one that is cut into shards."""


def own(kv: KVStore, size: int, dtype: Any = np.float32) -> Any:
    return (np.arange(size) % 7 + 10 * kv.rank).astype(dtype)


@pytest.mark.parametrize("size", SIZES)
def test_every_worker_gets_the_sum_and_the_mean_again_and_again(run: Run, size: int) -> None:
    def script(kv: KVStore) -> None:
        base = np.arange(size) % 7
        for step in range(4):
            for dtype in (np.float32, np.int64):
                found = kv.allreduce(own(kv, size, dtype) + dtype(step))
                np.testing.assert_array_equal(found, (3 * (base + step) + 30).astype(dtype))
            value = own(kv, size)
            assert kv.allreduce([value, value[:1]], [value, value[:1].copy()], op="mean")[0] is value
            np.testing.assert_allclose(value, base + 10, rtol=1e-6)

    run(script, 3, 2)


@pytest.mark.parametrize("size", SIZES)
def test_every_worker_gets_the_arrays_of_all_the_roots_and_its_own_part(run: Run, size: int) -> None:
    def script(kv: KVStore) -> None:
        base = (np.arange(size) % 7).astype(np.float32)
        for step in range(3):
            gathered = kv.allgather([own(kv, size) + np.float32(step), np.array(kv.rank)])
            np.testing.assert_array_equal(gathered[0], np.stack([base + step + 10 * rank for rank in range(3)]))
            assert gathered[1].tolist() == [0, 1, 2]
            given = kv.broadcast(None, own(kv, size) + np.float32(step), root=step)
            np.testing.assert_array_equal(given, base + step + 10 * step)
            parts = np.stack([own(kv, size) * (rank + 1) for rank in range(3)])
            np.testing.assert_array_equal(kv.reduce_scatter(parts), (3 * base + 30) * (kv.rank + 1))

    run(script, 3, 2)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float64"])
def test_minimum_maximum_and_sum_of_every_sort_of_elements(run: Run, dtype: str) -> None:
    def script(kv: KVStore) -> None:
        for _ in range(3):
            value = np.array([kv.rank, 1, kv.rank == 1, 0]).astype(dtype)
            assert [kv.allreduce(value, op=op).tolist() for op in ("min", "max")] == [[0, 1, 0, 0], [1, 1, 1, 0]]
            assert kv.allreduce(value).tolist() == [1, 1 if dtype == "bool" else 2, 1, 0]
            assert kv.allreduce(value).dtype == dtype
            large = np.full((2, 200_000), kv.rank, dtype)
            assert kv.reduce_scatter(large, op="max").all()

    run(script, 2, 2)


def test_workers_that_make_different_calls_are_told_which(run: Run) -> None:
    def script(kv: KVStore) -> list[str]:
        told = []
        for call in (
            lambda: kv.allreduce(np.zeros(3 + kv.rank, np.float32)),
            lambda: kv.allreduce(np.zeros(3, np.float32), op=("sum", "max")[kv.rank]),
            lambda: (kv.allgather, kv.allreduce)[kv.rank](np.zeros(3, np.int32)),
            lambda: kv.allreduce([np.zeros(3, np.float32)] * (2 + kv.rank)),
        ):
            with pytest.raises(KVError) as caught:
                call()
            told.append(str(caught.value))
        assert kv.allreduce(np.ones(1)).tolist() == [2]
        return told

    for shapes, ops, calls, counts in run(script, 2, 1):
        for text, *words in (
            (shapes, "(3,) float32", "(4,) float32"),
            (ops, "op='sum'", "op='max'"),
            (calls, "allgather", "allreduce"),
            (counts, "of 2", "of 3"),
        ):
            assert all(word in text for word in (*words, "worker-0", "worker-1", "fix: ")), text


@pytest.mark.parametrize("size", SIZES)
def test_a_callback_is_called_once_when_the_outputs_are_filled(run: Run, size: int) -> None:
    def script(kv: KVStore) -> None:
        kv.declare("a", size)
        called: queue.SimpleQueue[tuple[Any, float]] = queue.SimpleQueue()
        values = [own(kv, size) for _ in range(4)]
        calls = [kv.pushpull("a", values[0], wait=False), kv.allreduce(values[1], values[1], wait=False)]
        calls += [kv.allgather(values[2], np.empty((2, size), np.float32), wait=False)]
        calls += [kv.init("b", values[3], wait=False), kv.pull("a", values[3], wait=False)]
        for call in calls:
            call.add_done_callback(lambda one: called.put((one, float(values[0][1]))))
        found = [called.get(timeout=scaled(60)) for _ in calls]
        assert sorted(map(id, calls)) == sorted(id(one) for one, _ in found)
        assert values[0][1] == values[1][1] == values[3][1] == 12
        calls[0].add_done_callback(lambda one: called.put((one, 0.0)))
        assert called.get(timeout=scaled(60)) == (calls[0], 0.0)
        assert called.empty()

    run(script, 2, 2)


def test_a_failed_call_is_told_to_its_callback(capfd: pytest.CaptureFixture[str]) -> None:
    late, called = Late(), queue.SimpleQueue[str]()

    def told(one: Pending) -> None:
        with pytest.raises(ValueError, match="no number"):
            one.wait()
        called.put("told")
        raise RuntimeError("of the callback")

    call = BackgroundCall("init", lambda: int("no number"), late)  # type: ignore[arg-type, return-value]
    call.add_done_callback(told)
    call.run()
    call.add_done_callback(lambda one: called.put("later"))
    assert called.get(timeout=scaled(60)) == "told"
    assert called.get(timeout=scaled(60)) == "later"
    late.raise_first()
    assert "of the callback" in capfd.readouterr().err
    call.add_done_callback(lambda one: sys.exit(1))
    call.add_done_callback(lambda one: called.put("after SystemExit"))
    assert called.get(timeout=scaled(60)) == "after SystemExit"


def test_a_callback_that_does_not_wait_leaves_the_error_to_the_next_call(run: Run) -> None:
    def script(kv: KVStore) -> None:
        kv.init("a", np.zeros(2, np.float32))
        called = threading.Event()
        pushed = kv.push("a", np.ones(2, np.float32), wait=False)
        pushed.add_done_callback(lambda one: called.set())
        assert called.wait(scaled(60))
        with pytest.raises(KVError, match="needs a rule"):
            kv.pull("a", np.ones(2, np.float32))

    run(script, 1, 1, type_name="dist_async")


def test_a_store_with_an_error_that_was_not_told_is_closed_all_the_same(run: Run) -> None:
    def script(kv: KVStore) -> None:
        kv.allreduce(np.ones(1))
        kv.init("a", np.zeros(2, np.float32))
        failed = threading.Event()
        kv.push("a", np.ones(2, np.float32), wait=False).when_done(failed.set)
        assert failed.wait(scaled(60))
        with pytest.raises(KVError, match="needs a rule"):
            kv.close()
        assert kv.is_closed
        assert kv._through is not None
        assert kv._through.is_closed

    run(script, 2, 1, type_name="dist_async")


OBJECTS = [
    None,
    {"step": 3, "loss": 0.1, "name": "ä\0", "flags": [True, False, None], "empty": [[], {}], "large": 2**70},
    [np.arange(6, dtype=np.int16).reshape(2, 3), np.array(True), np.zeros((0, 4)), b"\xff\0", ["list", "array"]],
    {"weights": np.arange(5000.0), "more": b"x" * 3000},
]


def test_objects_come_as_they_were_given_also_of_other_sizes(run: Run) -> None:
    def script(kv: KVStore) -> None:
        for at, given in enumerate(OBJECTS):
            found = [kv.broadcast_object(given if kv.rank == at % 2 else object, at % 2)]
            found += kv.allgather_object(given if kv.rank else None)[1:]
            for each in found:
                assert repr(each) == repr(given)
        assert kv.allgather_object((kv.rank, np.float32(1.5))) == [[0, 1.5], [1, 1.5]]

    run(script, 2, 2)


def test_what_is_no_object_is_an_error_of_all_workers_that_says_where_it_is(run: Run) -> None:
    def script(kv: KVStore) -> None:
        deep: Any = []
        for _ in range(200):
            deep = [deep]
        wrong = (({"a": [1, {2}]}, r"value\['a'\]\[1\]: found set"), ({1: 2}, "a str, not int"), (deep, "100"))
        for given, text in (*wrong, (10**5000, "digits"), (np.ma.masked_array([1, 2], [0, 1]), "mask")):
            with pytest.raises(KVError, match=rf"of rank 1: .*{text}"):
                kv.allgather_object(given if kv.rank else 5)
            with pytest.raises(KVError, match=rf"of rank 1: .*{text}"):
                kv.broadcast_object(given if kv.rank else 5, 1)
        assert kv.allgather_object(kv.rank) == [0, 1]

    run(script, 2, 1)


def test_bytes_that_are_no_object_are_refused() -> None:
    good = objects.encode([1, np.arange(3), b"abc", {"a": None}], "value")
    assert len(objects.decode(good, "call")) == 4
    nodes = ['{"a":1}', '["array","float32",[-1],"numpy"]', '["array","O",[1],"numpy"]', '["bytes",99]', '["what",[]]']
    nodes += ["nan", "[" * 100_000, '["list",' * 200 + "1" + "]" * 200, '["dict",[[1,2]]]', '["list",5]']
    wrong = [struct.pack("<Q", len(text)) + text.encode() + b"0123" for text in nodes]
    for data in [b"", good[:-1], good + b"x", struct.pack("<Q", 2**63) + good, *wrong]:
        with pytest.raises(KVError, match="no object"):
            objects.decode(data, "call")


def test_calls_may_be_under_way_together_and_a_list_has_arrays_of_any_sort(run: Run) -> None:
    def script(kv: KVStore) -> None:
        sorts = [np.zeros((), np.float16), np.zeros((2, 0)), np.zeros(70_000, np.int8), np.zeros((3, 2))[:, 0]]
        for step in range(3):
            outs = [[np.empty_like(each) for each in sorts] for _ in range(4)]
            given = [[each + each.dtype.type(turn + step) for each in sorts] for turn in range(4)]
            ops = ("sum", "max", "sum", "max")
            calls = [kv.allreduce(*its, op=op, wait=False) for *its, op in zip(given, outs, ops, strict=True)]
            for call in reversed(calls):
                call.wait()
            for turn, its in enumerate(outs):
                times = 1 if turn % 2 else kv.num_workers
                assert all((found == (turn + step) * times).all() for found in its)

    run(script, 2, 2)


def test_threads_make_calls_of_kinds_of_their_own(run: Run) -> None:
    def script(kv: KVStore) -> None:
        for size in range(1, 5):
            kv.allgather(own(kv, size))
        found: list[Any] = []

        def work(size: int) -> None:
            for step in range(20):
                wanted = np.stack([np.arange(size) % 7 + step, np.arange(size) % 7 + step + 10])
                found.append(np.array_equal(kv.allgather(own(kv, size) + step), wanted))

        threads = [threading.Thread(target=work, args=(size,)) for size in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(scaled(60))
        assert found == [True] * 80

    run(script, 2, 2)


@pytest.mark.parametrize("type_name", ["dist_async", "dist_sync"])
def test_a_rule_keys_and_compression_have_nothing_to_do_with_the_calls(run: Run, type_name: str) -> None:
    def script(kv: KVStore) -> None:
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        kv.init([7, 8], [np.ones(2, np.float32)] * 2)
        kv.set_optimizer("sgd", learning_rate=0.1)
        for _ in range(3):
            np.testing.assert_array_equal(kv.allreduce(np.arange(40_000, dtype=np.float32)), 2 * np.arange(40_000))
        out = np.empty(2, np.float32)
        kv.pull(7, out)
        assert out.tolist() == [1, 1]
        assert repr(kv) == f"<KVStore {type_name!r}: 2 keys>"
        with pytest.raises(KVError, match="store of 2 keys"):
            kv.pull(9, out)
        kv.close()
        with pytest.raises(StoreClosed):
            kv.allreduce(out)

    run(script, 2, 2, type_name=type_name)


def test_one_who_has_joined_contributes_nothing(run: Run) -> None:
    def script(kv: KVStore) -> None:
        kv.init("w", np.zeros(2, np.float32))
        values = [kv.allreduce(np.full(2, 1 + kv.rank)).tolist() for _ in range(1 + kv.rank)]
        if kv.rank:
            kv.push("w", np.ones(2, np.float32))
        kv.join()
        assert values == [[3, 3], [2, 2]][: 1 + kv.rank]
        assert kv.allreduce(np.ones(2)).tolist() == [2, 2]

    run(script, 2, 2)


def test_the_calls_of_a_group_are_its_own(job: Callable[..., Cluster]) -> None:
    def script(session: Any) -> list[Any]:
        first = session.rank // 2 * 2
        kv = open_store("dist_sync", session, group=f"from {first}", members=[first, first + 1])
        return [kv.allgather(np.array(session.rank)).tolist(), kv.broadcast_object(session.rank, 1)]

    with job(4, 2) as cluster:
        assert cluster.run_sessions(script) == [[[0, 1], 1]] * 2 + [[[2, 3], 3]] * 2


def test_the_call_that_waits_for_a_worker_which_has_ended_names_it(run: Run) -> None:
    def script(kv: KVStore) -> None:
        kv.allgather(np.zeros(3))
        if kv.rank:
            with pytest.raises(RuntimeFault, match="worker-0"):
                kv.allgather(np.zeros(3))

    run(script, 2, 2)


def test_a_key_is_broadcast_by_any_worker_and_a_declared_key_begins_with_zeros(run: Run) -> None:
    def script(kv: KVStore) -> None:
        out = np.empty((2, 200_000), np.float32)
        kv.broadcast("a", np.full((2, 200_000), kv.rank + 5, np.float32), out, root=1)
        assert (out == 6).all()
        kv.declare(["b", "c", "d"], [3, (), (2, 200_000)], ["bfloat16", "int8", np.float32])
        kv.pull("d", out)
        assert not out.any()
        kv.push("d", np.ones((2, 200_000), np.float32))
        kv.pull("d", out)
        assert (out == 2).all()
        with pytest.raises(KVError, match="already initialised"):
            kv.broadcast("a", out, out, root=1)
        with pytest.raises(KVError, match="3 keys, 2 shapes"):
            kv.declare(["x", "y", "z"], [(1,), (2,)])

    run(script, 2, 2)


@pytest.mark.parametrize("kind", ["local", "device"])
def test_one_process_has_the_same_calls(kind: str) -> None:
    with create(kind) as kv:
        value = np.arange(3)
        assert kv.allreduce(value, op="max").tolist() == kv.broadcast(None, value).tolist() == [0, 1, 2]
        assert kv.allgather([value])[0].tolist() == [[0, 1, 2]]
        assert kv.reduce_scatter(value.reshape(1, 3)).tolist() == [0, 1, 2]
        assert kv.broadcast_object({"a": 1}) == {"a": 1}
        kv.declare("a", (2,))
        out = np.ones(2, np.float32)
        kv.pull("a", out)
        assert not out.any()


def test_what_is_wrong_with_a_call_is_said_before_anybody_waits(run: Run) -> None:
    def script(kv: KVStore) -> None:
        value = np.zeros(3)
        for call, text in (
            (lambda: kv.allreduce(value, op="product"), "no operation 'product'; known are sum, mean, min, max"),
            (lambda: kv.allreduce(np.zeros(3, np.int32), op="mean"), "a mean is of floats, not of int32"),
            (lambda: kv.allreduce(value, np.zeros(2)), r"out has shape \(2,\).* expected shape \(3,\)"),
            (lambda: kv.allreduce([value], [value, value]), "1 arrays and 2 outputs"),
            (lambda: kv.allreduce(value, [value]), "both a list"),
            (lambda: kv.allreduce(value, wait=False), "wait=False it needs out"),
            (lambda: kv.allreduce(np.zeros(2, complex)), "complex128"),
            (lambda: kv.broadcast(None, value, root=2), "a rank from 0 to 1, not 2"),
            (lambda: kv.reduce_scatter(value), "expected 2 parts"),
        ):
            with pytest.raises(KVError, match=text):
                call()

    run(script, 2, 1)


@pytest.mark.parametrize("kind", ["dist_sync", "dist_device_sync"])
def test_tensors_on_gpus_are_reduced_and_broadcast(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpus_of_process(Machine(2)) as machine:
        torch = Torch(machine)
        put(monkeypatch, torch)

        def script(kv: KVStore) -> None:
            for step in range(3):
                with torch.stream(torch.new_stream(kv.rank)):
                    value = torch.tensor(own(kv, 30) + np.float32(step), kv.rank)
                    assert kv.allreduce([value], [value], op="mean")[0] is value
                    np.testing.assert_allclose(value.get(), own(kv, 30) % 10 + step + 5)
                    kv.allreduce(value, value, op="max", wait=False).wait()
                    np.testing.assert_allclose(value.get(), own(kv, 30) % 10 + step + 5)
                    gone_on = threading.Event()
                    pending = kv.allreduce([value], [value], wait=False)
                    pending.add_done_callback(lambda one: gone_on.set())  # noqa: B023
                    assert gone_on.wait(scaled(60))
                with torch.stream(torch.new_stream(kv.rank)):
                    pending.wait()
                    np.testing.assert_allclose(value.get(), 2 * (own(kv, 30) % 10 + step + 5))
                    value.set(own(kv, 30))
                    kv.broadcast(None, value, value, root=1)
                    np.testing.assert_array_equal(value.get(), own(kv, 30) % 10 + 10)

        run_job(script, 2, 1, type_name=kind)
        machine.finish()


def test_a_deleted_key_is_unknown_and_may_be_initialised_with_another_shape(run: Run) -> None:
    def script(kv: KVStore) -> None:
        kv.set_optimizer("sgd", learning_rate=1, momentum=0.5)
        names = ["a", "b", "c"]
        for turn in range(5):
            shapes = [(3 + turn % 2,), (300_000,), (2, 2)]
            kv.declare(names, shapes)
            outs = [np.empty(shape, np.float32) for shape in shapes]
            moved = velocity = 0.0
            for step in range(4):
                velocity = velocity / 2 - 2 * step
                moved += velocity
                kv.push(names, [np.full(shape, step, np.float32) for shape in shapes])
                kv.pull(names, outs)
            assert {float(out.min()) for out in outs} == {float(out.max()) for out in outs} == {moved}
            kv.delete(names if turn % 2 else names[:2])
            with pytest.raises(KVError, match="never initialised"):
                kv.pull("a", outs[0])
            if not turn % 2:
                kv.pull("c", outs[2])
                kv.delete("c", wait=False).wait()
            assert repr(kv) == "<KVStore 'dist_sync': 0 keys>"
        assert sum(each["keys"] for each in kv.stats()) == 0

    run(script, 2, 2)


def test_the_places_of_deleted_keys_are_used_again() -> None:
    with create("local") as kv:
        for _ in range(50):
            kv.declare("a", 1000)
            out = np.ones(1000, np.float32)
            kv.pull("a", out)
            assert not out.any()
            kv.push("a", np.ones(1000, np.float32))
            kv.delete("a")
        (values,) = kv._backend._weights._values.values()
        assert next(iter(values.arenas.values())).extent() == (1, 1000)


@pytest.mark.parametrize("first", [0, 1])
def test_a_key_with_an_open_round_is_not_deleted(run: Run, first: int) -> None:
    def script(kv: KVStore) -> None:
        kv.init(["a", "b"], [np.zeros(2, np.float32)] * 2)
        if kv.rank == first:
            kv.push("a", np.ones(2, np.float32))
        with pytest.raises(KVError, match=r"for key 'a' .*pushed [01] times, .* pushed [01] times"):
            kv.delete(["a", "b"])
        if kv.rank != first:
            kv.push("a", np.ones(2, np.float32))
        out = np.empty(2, np.float32)
        kv.pull("a", out)
        kv.delete("b")
        with pytest.raises(KVError, match=r"calls (delete|assign) where"):
            (kv.delete, kv.assign)[kv.rank](*("a", out)[: 1 + kv.rank])
        assert out.tolist() == [2, 2]

    run(script, 2, 2)


def test_from_the_third_on_an_allreduce_is_planned_as_a_pushpull_is(monkeypatch: pytest.MonkeyPatch) -> None:
    steady = plans.steady_calls(monkeypatch)

    def script(kv: KVStore) -> list[int]:
        counts = []
        value = [own(kv, 3), own(kv, 3000)]
        for _ in range(5):
            kv.barrier()
            counts.append(sum(one.kind is Kind.PUSHPULL and one.rank == kv.rank for one in steady))
            kv.allreduce(value, value)
        return counts

    for counts in run_job(script, 2, 1):
        assert counts == [0, 0, 1, 2, 3]


def test_a_call_that_is_refused_sends_nothing_so_that_the_next_one_is_right(run: Run) -> None:
    def script(kv: KVStore) -> None:
        for step in range(3):
            pair, out, part = [np.full(2, kv.rank + step)] * 2, np.empty((2, 2), int), np.empty(2, int)
            for refused in (
                lambda: kv.allgather(pair, [out, out]),  # noqa: B023
                lambda: kv.reduce_scatter([np.ones((2, 2), int)] * 2, [part, part]),  # noqa: B023
                lambda: kv.broadcast(None, pair, [part, part], root=1),  # noqa: B023
            ):
                with pytest.raises(KVError, match="share memory"):
                    refused()
            assert kv.allgather(pair)[1].tolist() == [[step] * 2, [step + 1] * 2]
            assert kv.reduce_scatter([out[:, :1] * 0 + step] * 2)[0].tolist() == [2 * step]
            assert kv.broadcast(None, pair, root=1)[0].tolist() == [step + 1] * 2

    run(script, 2, 2)


@pytest.mark.parametrize("call", ["allgather", "reduce_scatter"])
def test_after_a_signal_between_requests_of_a_call_the_next_ones_have_their_own_values(run: Run, call: str) -> None:
    def script(kv: KVStore) -> None:
        make = getattr(kv, call)
        make(np.zeros((2, 3)))
        if kv.rank == 0:
            link = kv._through._backend._link  # type: ignore[union-attr]
            ask, turns = link.ask, iter([link.ask])

            def ask_once(*args: Any, **options: Any) -> Any:
                return next(turns, _interrupt)(*args, **options)

            link.ask = ask_once
            with contextlib.suppress(KeyboardInterrupt):
                make(np.full((2, 3), -9.0))
            link.ask = ask
        else:
            make(np.full((2, 3), -9.0))
        for step in range(3):
            assert set(make(np.full((2, 3), float(step))).ravel().tolist()) == {
                step if call == "allgather" else 2 * step
            }

    run(script, 2, 1)


def test_a_first_call_that_was_interrupted_before_it_was_made_is_made_by_the_next_one(run: Run) -> None:
    def script(kv: KVStore) -> None:
        kv.allreduce(np.zeros(1))
        if kv.rank == 0:
            backend = kv._through._backend  # type: ignore[union-attr]
            reserve, backend.reserve = backend.reserve, _interrupt  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                kv.allreduce(np.ones(2))
            backend.reserve = reserve  # type: ignore[method-assign]
        assert [kv.allreduce(np.ones(size)).tolist() for size in (3, 2)] == [[2] * 3, [2] * 2]

    run(script, 2, 1)


def _interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_a_key_of_several_messages_is_deleted_and_what_a_broken_delete_has_left_by_the_next_one(run: Run) -> None:
    def script(kv: KVStore) -> None:
        kv.declare(["a", "b"], [(3, 1_000_000), (2,)])
        if kv.rank == 0:
            link = kv._backend._link  # type: ignore[attr-defined]
            ask = link.ask

            def interrupted(what: str, *args: Any, **options: Any) -> Any:
                request = ask(what, *args, **options)
                if what.startswith("delete") and args[0][0][0].startswith("server"):
                    request.wait(scaled(60))
                    link.ask = ask
                    raise KeyboardInterrupt
                return request

            link.ask = interrupted
        with pytest.raises((KVError, KeyboardInterrupt), match="interrupted" if kv.rank else None):
            kv.delete("b")
        kv.delete(["a", "b"])
        kv.declare(["a", "b"], [3, (3, 1_000_000)])
        kv.delete(["a", "b"])
        assert sum(each["keys"] for each in kv.stats()) == 0

    run(script, 2, 1)


def test_a_delete_waits_for_no_call_of_other_keys(run: Run) -> None:
    def script(kv: KVStore) -> None:
        kv.declare(["a", "b"], 2)
        value = np.ones(2, np.float32)
        first = kv.pushpull("b", value, wait=False) if kv.rank == 0 else None
        kv.delete("a")
        (first or kv.pushpull("b", value, wait=False)).wait()
        assert value.tolist() == [2, 2]

    run(script, 2, 1)


def test_a_delete_loses_no_push_of_other_keys_that_is_made_meanwhile() -> None:
    def script(kv: KVStore) -> None:
        kv.set_optimizer("sgd", learning_rate=1)
        kv.declare("b", 2)
        one, pushed = np.ones(2, np.float32), 0
        for _ in range(5):
            kv.declare("a", 2)
            deleted = kv.delete("a", wait=False)
            while not deleted.is_done:
                kv.push("b", one)
                pushed += 1
            deleted.wait()
        kv.pull("b", one)
        assert one.tolist() == [-pushed] * 2

    run_job(script, 1, 1)


def test_a_list_of_keys_takes_a_list_of_shapes_also_of_whole_numbers() -> None:
    with create("local") as kv:
        kv.declare(["a", "b"], [2, 3])
        kv.declare(["c", "d"], (2, 3))
        shapes = {"a": (2,), "b": (3,), "c": (2, 3), "d": (2, 3)}
        kv.pull(list(shapes), [np.empty(each, np.float32) for each in shapes.values()])
        with pytest.raises(KVError, match="3 keys, 2 shapes"):
            kv.declare(["x", "y", "z"], [2, 3])


@pytest.mark.parametrize("size", SIZES)
def test_what_was_contributed_without_waiting_is_with_the_servers_at_a_barrier_and_at_the_end(
    run: Run, size: int
) -> None:
    def script(kv: KVStore) -> list[float]:
        kv.init("a", np.zeros(size, np.float32))
        found = []
        for turn in range(2):
            value = np.ones(size, np.float32)
            if kv.rank == 0:
                kv.pushpull("a", value, priority=-3, wait=False)
            if turn == 0:
                kv.barrier()
            if kv.rank:
                kv.pushpull("a", value)
            found.append(float(value[-1]))
        return found[kv.rank == 0 :]

    assert run(script, 2, 2)[1] == [2, 2]
