"""Jobs on every path: element types, shapes, rows, compression, scales and what rules make of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cluster import Cluster, open_store

from distrun_runtime.arrays import dtypes
from distrun_runtime.errors import KVError
from distrun_runtime.store.values import RowSparse

pytestmark = pytest.mark.usefixtures("engine", "server_device")

Job = Callable[..., Cluster]
Run = Callable[..., list[Any]]

BOUND = 100
"""Elements from which a value is cut over all servers here."""
HALVES = ["float16", "bfloat16"]


def of(value: Any, dtype: str, shape: tuple[int, ...] = ()) -> Any:
    """Return an array of any of the store's types, filled or (an array) converted."""
    kind = dtypes.parse(dtype)
    return dtypes.narrow(np.broadcast_to(value, shape).astype(dtypes.work_dtype(kind)), kind)


def pulled(kv: Any, key: Any, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    """Return a value in the type in which it can be compared."""
    out = of(0, dtype, shape)
    kv.pull(key, out)
    return dtypes.widen(out)


def rows(shape: tuple[int, ...], numbers: Any, value: Any, dtype: str = "float32") -> RowSparse:
    return RowSparse(of(value, dtype, (len(numbers), *shape[1:])), numbers, shape)


# Element types and shapes


def test_values_of_all_types_are_summed_in_one_call(run: Run) -> None:
    """Each type in a small value and in one that lies on both servers; every second push is of a transposed array."""
    keys = [(name, shape) for name in dtypes.NAMES if name != "bool" for shape in ((3,), (20, 11))]

    def filled(number: int, shape: tuple[int, ...]) -> Any:
        """Return an array whose elements differ."""
        return number + np.arange(math.prod(shape)).reshape(shape) % 7

    def script(kv: Any) -> None:
        names = ["%s %d" % (name, len(shape)) for name, shape in keys]

        def check(number: int, factor: int) -> None:
            outs = [of(0, name, shape) for name, shape in keys]
            kv.pull(names[::-1], outs[::-1])
            for name, out in zip(names, outs, strict=True):
                assert (dtypes.widen(out) == factor * filled(0, out.shape) + number).all(), name

        kv.init(names, [of(filled(1, shape), name, shape) for name, shape in keys])
        check(1, 1)
        for step in (1, 2):
            pushed = [of(filled(10 * kv.rank + step, shape), name, shape) for name, shape in keys]
            if step == 2:
                pushed = [np.ascontiguousarray(value.T).T for value in pushed]
            kv.push(names, pushed)
            check(30 + 3 * step, 3)

    run(script, 3, bigarray_bound=BOUND)


@pytest.mark.parametrize("rule", [None, "test"])
@pytest.mark.parametrize("dtype", HALVES)
def test_16_bit_contributions_are_summed_in_float32_and_rounded_once(run: Run, dtype: str, rule: str | None) -> None:
    """Where each step is rounded, each small one is lost: the next number above `large` is further away than 1."""
    large = {"float16": 2048, "bfloat16": 256}[dtype]

    def script(kv: Any) -> None:
        kv.init(["s", "w"], [of(0, dtype, (3,)), of(0, dtype, (20, 11))])
        if rule:
            kv.set_optimizer(rule)
        value = [large, 1, 1, 1, 1][kv.rank]
        kv.push(["s", "w"], [of(value, dtype, (3,)), of(value, dtype, (20, 11))])
        assert (pulled(kv, "s", (3,), dtype) == large + 4).all()
        assert (pulled(kv, "w", (20, 11), dtype) == large + 4).all()

    run(script, 5, bigarray_bound=BOUND)


# Rows


TABLE = (40, 6)


def test_rows_and_dense_contributions_to_one_key_make_one_sum(run: Run) -> None:
    """Worker 0 pushes the whole value, worker 1 rows, worker 2 none; beside a dense key in the same call."""

    def script(kv: Any) -> None:
        kv.init(["w", "t"], [np.zeros((20, 11), "f4"), RowSparse.empty(TABLE)])
        some = [np.ones(TABLE, "f4"), rows(TABLE, [3, 39], 10), RowSparse.empty(TABLE)][kv.rank]
        for _ in range(2):
            kv.push(["w", "t"], [np.full((20, 11), 10**kv.rank, "f4"), some])
            assert (pulled(kv, "w", (20, 11)) == 111).all()
            found = pulled(kv, "t", TABLE)
            assert (found[[3, 39]] == 11).all()
            assert (np.delete(found, [3, 39], axis=0) == 1).all()
            out = np.zeros((3, 6), np.float32)
            kv.row_sparse_pull("t", out, row_ids=[39, 0, 3])
            assert out[:, 0].tolist() == [11, 1, 11]

    run(script, 3, bigarray_bound=BOUND)


@pytest.mark.parametrize("dtype", ["float64", *HALVES, "int8"])
def test_rows_of_other_types_are_summed_like_dense_values(run: Run, dtype: str) -> None:
    large = {"float16": 2048, "bfloat16": 256, "int8": 100, "float64": 1}[dtype]

    def script(kv: Any) -> None:
        kv.init("t", RowSparse.empty(TABLE, dtype))
        kv.push("t", rows(TABLE, [1, 20 + kv.rank], [[large], [1]] if kv.rank == 0 else 1, dtype))
        found = pulled(kv, "t", TABLE, dtype)
        assert (found[1] == np.add(large, 2)).all()
        assert found[[20, 21, 22]].tolist() == [[1] * 6] * 3
        some = RowSparse.empty(TABLE, dtype)
        kv.row_sparse_pull("t", some, row_ids=[22, 3, 1])
        assert np.array_equal(dtypes.widen(some.values), found[[1, 3, 22]])

    run(script, 3, bigarray_bound=BOUND)


# Compression and scales


@pytest.mark.parametrize("dtype", ["float32", "float64", *HALVES])
def test_each_contribution_is_multiplied_by_its_own_scale(run: Run, dtype: str) -> None:
    """A whole value of one worker, rows of another, a compressed one beside them."""

    def script(kv: Any) -> None:
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5, "min_size": 0}, keys="c")
        kv.init(["w", "t", "c"], [of(0, dtype, TABLE), RowSparse.empty(TABLE, dtype), of(0, dtype, TABLE)])
        table = of(1, dtype, TABLE) if kv.rank else rows(TABLE, [2], 1, dtype)
        gradients = [of(1, dtype, TABLE), table, of(0.5, dtype, TABLE)]
        kv.push(["w", "t", "c"], gradients, scale=[0.5, 4.0][kv.rank])
        assert (pulled(kv, "w", TABLE, dtype) == 4.5).all()
        found = pulled(kv, "t", TABLE, dtype)
        assert (found[2] == 4.5).all()
        assert (np.delete(found, 2, axis=0) == 4).all()
        assert (pulled(kv, "c", TABLE, dtype) == 2.25).all()
        assert (dtypes.widen(gradients[0]) == 1).all(), "the pushed array is as it was"
        kv.pushpull("w", gradients[0], scale=0.25)
        assert (dtypes.widen(gradients[0]) == 0.5).all()
        with pytest.raises(KVError, match="scale"):
            kv.push("w", gradients[0], scale=float("inf"))

    run(script, bigarray_bound=BOUND)


def test_async_pushes_take_rows_codecs_and_scales(run: Run) -> None:
    def script(kv: Any) -> None:
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5, "min_size": 0}, keys="c")
        kv.init(["t", "c"], [RowSparse.from_dense(np.ones(TABLE, "f4")), np.ones(TABLE, "f4")])
        kv.set_optimizer("sgd", learning_rate=1.0)
        kv.barrier()
        kv.push(["c", "t"], [np.full(TABLE, 0.5, "f4"), rows(TABLE, [4 + kv.rank], 1)], scale=0.5)
        kv.push("t", RowSparse.empty(TABLE))
        kv.barrier()
        found = pulled(kv, "t", TABLE)
        assert found[:, 0].tolist() == [0.5 if row in (4, 5) else 1 for row in range(40)]
        assert (pulled(kv, "c", TABLE) == 0.5).all()

    run(script, bigarray_bound=BOUND, type_name="dist_async")


# Rules


@pytest.mark.parametrize("dtype", HALVES)
def test_an_assigned_16_bit_value_keeps_the_rules_state_and_renews_its_master(run: Run, dtype: str) -> None:
    def script(kv: Any) -> None:
        kv.init(["s", "w"], [of(1, dtype, (3,)), of(1, dtype, TABLE)])
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5, multi_precision=True)
        for expected in (0, 6.5):
            kv.push(["s", "w"], [of(0.5, dtype, (3,)), of(0.5, dtype, TABLE)])
            assert (pulled(kv, "s", (3,), dtype) == expected).all(), "v = 0.5 * -1 - 1"
            assert (pulled(kv, "w", TABLE, dtype) == expected).all()
            if not expected:
                kv.assign(["s", "w"], [of(8, dtype, (3,)), of(8, dtype, TABLE)])

    run(script, bigarray_bound=BOUND)


@pytest.mark.parametrize("codec", [None, "fp16"])
@pytest.mark.parametrize("rule", [None, "sgd"])
def test_deterministic_sums_are_those_of_the_ranks_order_however_contributions_arrive(
    job: Job, rule: str | None, codec: str | None
) -> None:
    """In float32 (2^-10 + 2^15) - 2^15 is 0, and 2^-10 if the large ones come first. float16 has all three."""
    parts = [2.0**-10, 2.0**15, -(2.0**15)]

    def script(session: Any) -> list[float]:
        kv = open_store("dist_sync", session, deterministic=True)
        if codec:
            kv.set_gradient_compression({"type": codec, "min_size": 0})
        kv.init("w", np.zeros(6, np.float32))
        if rule:
            kv.set_optimizer(rule, learning_rate=1.0)
        found = []
        out = np.empty(6, np.float32)
        for order in itertools.permutations(range(3)):
            before = out.copy() if found else np.zeros(6, np.float32)
            for rank in order:
                if kv.rank == rank:
                    kv.push("w", np.full(6, parts[rank], np.float32))
                kv.barrier()
            kv.pull("w", out=out)
            found.append(float(before[0] - out[0]) if rule else float(out[0]))
            kv.assign("w", np.zeros(6, np.float32))
            out[...] = 0
        return found

    with job(3, 2) as made:
        for found in made.run_sessions(script):
            assert found == [0.0] * 6
