"""Row-sparse keys on a distributed store: pushes by rows, pulls of rows, rounds of servers that get no rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cluster import run_job, shards_of

from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore, create
from distrun_runtime.store.values import RowSparse

pytestmark = pytest.mark.usefixtures("placement")
SHARD_BYTES = 1024

SHAPE = (6, 4)
WIDE = (120, 12)
BOUND = 100
"""Elements from which rows are dealt to all servers here."""
RATE = 2


def ones(shape: tuple[int, ...]) -> Any:
    return RowSparse.from_dense(np.ones(shape, "float32"))


def some(shape: tuple[int, ...], rows: Any, value: float = 1.0) -> RowSparse:
    return RowSparse(np.full((len(rows), *shape[1:]), value, "float32"), rows, shape)


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_check_row_sparse_keys(workers: int) -> None:
    """Row: tests/nightly/dist_sync_kvstore.py, check_row_sparse_keys: each worker pushes one row."""

    def script(kv: KVStore) -> None:
        kv.init(["small", "wide"], [ones(SHAPE), ones(WIDE)])
        kv.set_optimizer("test", rescale_grad=RATE)
        random = np.random.default_rng(kv.rank)
        for key, shape in (("small", SHAPE), ("wide", WIDE)):
            expected = np.ones(shape, "float32")
            for _ in range(3):
                kv.push(key, some(shape, [kv.rank % shape[0]], kv.rank + 1))
                for rank in range(workers):
                    expected[rank % shape[0]] += RATE * (rank + 1)
            ids = random.integers(0, shape[0], 2 * shape[0])  # in disorder, some twice
            out = RowSparse.empty(shape)
            kv.row_sparse_pull(key, out, row_ids=ids)
            assert (out.rows == np.unique(ids)).all()
            assert (out.values == expected[out.rows]).all()
            table = np.zeros((len(ids), shape[1]), "float32")
            kv.row_sparse_pull(key, table, row_ids=ids)
            assert (table == expected[ids]).all()

    run_job(script, workers, 2, bigarray_bound=BOUND)


def test_check_row_sparse_keys_with_zeros() -> None:
    """Row: tests/nightly/dist_sync_kvstore.py, check_row_sparse_keys_with_zeros (small and sharded)."""

    def script(kv: KVStore) -> None:
        kv.init(["small", "wide"], [ones(SHAPE), ones(WIDE)])
        kv.set_optimizer("test", rescale_grad=RATE)
        for key, shape in (("small", SHAPE), ("wide", WIDE)):
            for _ in range(3):
                kv.push(key, RowSparse.empty(shape))
                out = RowSparse.empty(shape)
                kv.row_sparse_pull(key, out, row_ids=np.arange(shape[0]))
                assert (out.to_dense() == 1).all()
                kv.row_sparse_pull(key, out, row_ids=np.array([]))
                assert len(out.rows) == 0
                assert (out.to_dense() == 0).all()

    run_job(script, 3, 3, bigarray_bound=BOUND)


def test_check_big_row_sparse_keys() -> None:
    """Row: tests/nightly/dist_sync_kvstore.py, check_big_row_sparse_keys: overlapping rows, density .3, sharded."""
    workers = 3

    def rows_of(rank: int) -> Any:
        return np.flatnonzero(np.random.default_rng(rank).random(WIDE[0]) < 0.3)

    def script(kv: KVStore) -> None:
        kv.init("wide", ones(WIDE))
        kv.set_optimizer("test", rescale_grad=RATE)
        expected = np.ones(WIDE, "float32")
        for step in range(4):
            kv.push("wide", some(WIDE, rows_of(kv.rank + step), kv.rank + 1), wait=bool(step % 2))
            for rank in range(workers):
                expected[rows_of(rank + step)] += RATE * (rank + 1)
        ids = np.random.default_rng(100 + kv.rank).integers(0, WIDE[0], (5, 6))
        table = np.zeros((5, 6, WIDE[1]), "float32")
        kv.row_sparse_pull("wide", table, row_ids=ids)
        assert (table == expected[ids]).all()

    run_job(script, workers, 3, bigarray_bound=BOUND)


def test_rows_of_a_key_larger_than_a_piece_are_never_cut() -> None:
    """Every shard holds whole rows, whichever limit it has."""
    shape = (3000, 1300)

    def script(kv: KVStore) -> None:
        kv.init("w", RowSparse.empty(shape))
        shards = shards_of(kv, "w")
        assert {shard.server for shard in shards} == {0, 1}
        assert len(shards) > 2
        assert all(shard.offset % 1300 == 0 and shard.length % 1300 == 0 for shard in shards)
        rows = np.array([2999, 0, 1500, 1499, 806, 807])
        kv.push("w", RowSparse(np.repeat(rows[:, None], 1300, 1).astype("float32"), rows, shape))
        out = RowSparse.empty(shape)
        kv.row_sparse_pull("w", out, row_ids=[806, 807, 1499, 1500, 2999, 5])
        assert (out.values[:, 7] == [0, 2 * 806, 2 * 807, 2 * 1499, 2 * 1500, 2 * 2999]).all()

    run_job(script)


def test_a_dense_push_to_a_row_sparse_key_has_all_rows_and_a_pull_gives_the_whole_value() -> None:
    def script(kv: KVStore) -> None:
        kv.init("wide", ones(WIDE))
        kv.set_optimizer("test", rescale_grad=1)
        if kv.rank == 0:
            kv.push("wide", np.full(WIDE, 3, "float32"))
        else:
            kv.push("wide", some(WIDE, [5, 119], 4))
        out = np.zeros(WIDE, "float32")
        kv.pull("wide", out)
        expected = np.full(WIDE, 4, "float32")
        expected[[5, 119]] += 4
        assert (out == expected).all()

    run_job(script, bigarray_bound=BOUND)


def test_rows_out_of_range_are_refused_before_anything_is_sent() -> None:
    def script(kv: KVStore) -> None:
        kv.init(["wide", "dense"], [ones(WIDE), np.ones(WIDE, "float32")])
        out = RowSparse.empty(WIDE)
        for ids in ([120], [-1], [3.5]):
            with pytest.raises(KVError, match="119"):
                kv.row_sparse_pull("wide", out, row_ids=ids)
        with pytest.raises(KVError, match="119"):
            some(WIDE, [120])
        with pytest.raises(KVError, match="not row-sparse"):
            kv.row_sparse_pull("dense", out, row_ids=[1])
        kv.barrier()

    run_job(script, bigarray_bound=BOUND)


def test_several_outputs_keys_and_devices_in_one_call() -> None:
    def script(kv: KVStore) -> None:
        kv.init(["a", "b"], [ones(SHAPE), ones(WIDE)])
        kv.set_optimizer("test", rescale_grad=1)
        kv.push(["a", "b"], [[some(SHAPE, [1, 2]), some(SHAPE, [2])], some(WIDE, [7])])
        outs: Any = [[RowSparse.empty(SHAPE), RowSparse.empty(SHAPE)], RowSparse.empty(WIDE)]
        ids = [[np.array([2, 1]), np.array([5])], np.array([7, 7, 8])]
        kv.row_sparse_pull(["a", "b"], outs, row_ids=ids, wait=False).wait()
        assert (outs[0][0].values[:, 0] == [3, 5]).all()
        assert (outs[0][1].values[:, 0] == [1]).all()
        assert (outs[1].values[:, 0] == [3, 1]).all()

    run_job(script, bigarray_bound=BOUND)


@pytest.mark.parametrize(
    ("name", "params"),
    [("lamb", {}), ("lars", {"momentum": 0.5}), ("sgd", {"momentum": 0.5, "lazy_update": False})],
)
def test_a_rule_that_steps_all_rows_does_what_the_dense_gradient_does(name: str, params: dict[str, Any]) -> None:
    """With lazy_update=False every push of rows failed."""

    def script(kv: KVStore) -> None:
        kv.init(["rows", "whole"], [ones(WIDE), np.ones(WIDE, "float32")])
        kv.set_optimizer(name, learning_rate=0.5, wd=0.1, **params)
        for rows in ([1, 100], [], [kv.rank]):
            pushed = some(WIDE, rows)
            kv.push(["rows", "whole"], [pushed, pushed.to_dense()])
        outs = [np.zeros(WIDE, "float32"), np.zeros(WIDE, "float32")]
        kv.pull(["rows", "whole"], outs)
        assert np.allclose(outs[0], outs[1], rtol=1e-6)
        assert (outs[0] != 1).all()

    run_job(script, bigarray_bound=BOUND)


def test_workers_that_disagree_about_the_kind_of_a_key_are_told() -> None:
    def script(kv: KVStore) -> None:
        with pytest.raises(KVError, match="row_sparse"):
            kv.init("w", ones(SHAPE) if kv.rank else np.ones(SHAPE, "float32"))

    run_job(script)


@pytest.mark.parametrize("rows", [7, 40_000])
def test_a_pushpull_into_rows_gives_those_that_any_worker_pushed(rows: int) -> None:
    def script(kv: KVStore) -> list[Any]:
        kv.init("t", RowSparse.empty((rows, 2, 9)))
        kv.declare("d", 3)
        found = []
        for step in range(3):
            mine = np.array([rows - 1, kv.rank + step])
            value = RowSparse(np.ones((2, 2, 9), np.float32), mine, (rows, 2, 9))
            out = value if step else RowSparse.empty((rows, 2, 9))
            call = kv.pushpull(["t"], [value], None if step else [out], wait=bool(step % 2), scale=kv.rank + 1)
            call.wait()
            assert (out.values == out.values[:, :1, :1]).all()
            found.append((out.rows.tolist(), out.values[:, 0, 0].tolist()))
        kv.push("t", RowSparse.empty((rows, 2, 9)))
        with pytest.raises(KVError, match="key 'd' is not row-sparse"):
            kv.pushpull("d", np.zeros(3, np.float32), RowSparse.empty((3,)))
        with pytest.raises(KVError, match="or arrays for all"):
            kv.pushpull(["t", "d"], [value, np.zeros(3, np.float32)], [out, np.zeros(3, np.float32)])
        return found

    expected = [([step, step + 1, rows - 1], [1, 2, 3]) for step in range(3)]
    assert run_job(script, 2, 2) == [expected] * 2
    with create("local") as kv:
        assert script(kv) == [([step, rows - 1], [1, 1]) for step in range(3)]


def test_a_store_without_rounds_has_no_rows_of_one() -> None:
    def script(kv: KVStore) -> None:
        kv.init("t", RowSparse.empty((7, 2)))
        with pytest.raises(KVError, match="a 'dist_async' store has no rounds of which rows come"):
            kv.pushpull("t", RowSparse.empty((7, 2)), RowSparse.empty((7, 2)))

    run_job(script, 1, 1, type_name="dist_async")
