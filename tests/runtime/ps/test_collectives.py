"""Collective calls without keys: allreduce, broadcast, allgather, reduce_scatter, over every path."""

from __future__ import annotations

import queue
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore, Pending
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
        ):
            with pytest.raises(KVError) as caught:
                call()
            told.append(str(caught.value))
        assert kv.allreduce(np.ones(1)).tolist() == [2]
        return told

    for shapes, ops, calls in run(script, 2, 1):
        for text, *words in (
            (shapes, "(3,) float32", "(4,) float32"),
            (ops, "op='sum'", "op='max'"),
            (calls, "allgather", "allreduce"),
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
        found = [called.get(timeout=60) for _ in calls]
        assert sorted(map(id, calls)) == sorted(id(one) for one, _ in found)
        assert values[0][1] == values[1][1] == values[3][1] == 12
        calls[0].add_done_callback(lambda one: called.put((one, 0.0)))
        assert called.get(timeout=60) == (calls[0], 0.0)
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
    assert called.get(timeout=60) == "told"
    assert called.get(timeout=60) == "later"
    late.raise_first()
    assert "of the callback" in capfd.readouterr().err


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
        for given, text in (
            ({"a": [1, {2}]}, r"value\['a'\]\[1\]: found set"),
            ({1: 2}, "a str, not int"),
            (deep, "100"),
        ):
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
    nodes += [
        "[" * 100_000,
        '["list",' * 200 + "1" + "]" * 200,
        '["dict",[[1,2]]]',
        '["list",5]',
        '["bytes",true]',
        "nan",
    ]
    wrong = [struct.pack("<Q", len(text)) + text.encode() + b"0123" for text in nodes]
    for data in [b"", good[:-1], good + b"x", struct.pack("<Q", 2**63) + good, *wrong]:
        with pytest.raises(KVError, match="no object"):
            objects.decode(data, "call")
