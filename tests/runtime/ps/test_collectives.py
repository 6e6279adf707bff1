"""Collective calls without keys: allreduce, broadcast, allgather, reduce_scatter, over every path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore

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
        for text in (shapes, ops, calls):
            assert "worker-0" in text and "worker-1" in text, text
        assert "(3,) float32" in shapes and "(4,) float32" in shapes
        assert "op='sum'" in ops and "op='max'" in ops
        assert "allgather" in calls and "allreduce(op='sum')" in calls
