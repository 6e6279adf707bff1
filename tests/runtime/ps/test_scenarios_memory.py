"""Jobs on every path: whose memory values are in, when it may be written, and what is read meanwhile."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cluster import Cluster, open_store, run_job
from slowness import scaled

from distrun_runtime.arrays import dtypes
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import create
from distrun_runtime.store.values import RowSparse

# Placed as MXNet does, servers do all their work later in any case.
pytestmark = [
    pytest.mark.usefixtures("engine", "placement", "server_device"),
    pytest.mark.parametrize(
        ("engine", "placement"),
        [("at once", "size"), ("later", "size"), ("later", "mxnet")],
        indirect=True,
        scope="module",
    ),
]

Job = Callable[..., Cluster]
Run = Callable[..., list[Any]]

SHAPES = {"small": (5,), "medium": (300, 70), "large": (700, 1000), "long": (3 * (1 << 18) + 77,), "none": (0, 3)}
"""Three of them are cut into several pieces."""
SHARD_BYTES = 1 << 16
KEYS = list(SHAPES)


def filled(kv: Any, value: float) -> list[Any]:
    """Return an array of the store's memory for each key."""
    arrays = [kv.empty(shape) for shape in SHAPES.values()]
    for array in arrays:
        array.fill(value)
    return arrays


def check(arrays: Any, value: float) -> None:
    for key, array in zip(KEYS, arrays, strict=True):
        assert array.shape == SHAPES[key]
        assert (array == value).all(), (key, value, array.reshape(-1)[:5])


@pytest.mark.parametrize("deterministic", [False, True])
def test_arrays_of_the_stores_memory_are_summed_and_written_as_all_others(
    run_sessions: Run, deterministic: bool
) -> None:
    def script(session: Any) -> None:
        kv = open_store("dist_sync", session, deterministic=deterministic)
        grads, outs = filled(kv, 0.0), filled(kv, -1.0)
        kv.init(KEYS, grads)
        for step in range(1, 6):
            for grad in grads:
                grad.fill(10 * step + kv.rank)
            kv.pushpull(KEYS, grads, out=outs)
            check(outs, 30 * step + 3)
        kv.pushpull(KEYS, grads)  # Into the gradients themselves.
        check(grads, 153)

    run_sessions(script, 3)


@pytest.mark.parametrize("waits", [True, False])
def test_a_push_takes_the_values_that_the_arrays_had(run: Run, waits: bool) -> None:
    """Ten rounds ahead of the other worker, in one array that is written again each time."""
    is_ahead = threading.Event()

    def script(kv: Any) -> None:
        arrays = filled(kv, 0.0)
        kv.init(KEYS, arrays)
        if kv.rank:
            assert is_ahead.wait(scaled(60))
        for step in range(1, 11):
            for array in arrays:
                array.fill(step)
            kv.push(KEYS, arrays, wait=waits).wait()
            if kv.rank:
                outs = filled(kv, 0.0)
                kv.pull(KEYS, outs)
                check(outs, 2 * step)
        is_ahead.set()
        outs = filled(kv, 0.0)
        kv.pull(KEYS, outs)
        check(outs, 20)

    run(script)


def test_what_a_view_shows_stays_while_later_rounds_go_on(run: Run) -> None:
    """Worker 0 looks at round 3 until all have pushed and pulled rounds 4 to 6."""

    def script(kv: Any) -> None:
        arrays = filled(kv, 1.0)
        kv.init(KEYS, arrays)
        for step in range(1, 4):
            for array in arrays:
                array.fill(step)
            kv.push(KEYS, arrays)
        with kv.view(KEYS) as seen:
            check(seen, 6)
            for step in range(4, 7):
                for array in arrays:
                    array.fill(step)
                kv.push(KEYS, arrays)
                with kv.view(KEYS) as later:
                    check(later, 2 * step)
                check(seen, 6)
            kv.barrier()
            check(seen, 6)
        kv.barrier()

    run(script)


def test_a_view_of_a_rule_shows_weights_that_no_later_step_changes(run: Run) -> None:
    def script(kv: Any) -> None:
        arrays = filled(kv, 0.0)
        kv.init(KEYS, arrays)
        kv.set_optimizer("sgd", learning_rate=1.0)
        kept: list[Any] = []
        for step in range(1, 5):
            for array in arrays:
                array.fill(-1.0)
            kv.push(KEYS, arrays)
            with kv.view(KEYS) as seen:
                check(seen, 2 * step)
                kept.append(list(seen))  # Nobody should; still they must not change.
        for step, seen in enumerate(kept, 1):
            check(seen, 2 * step)

    run(script)


def test_a_view_is_read_only_and_has_one_array_for_each_key(run: Run) -> None:
    def script(kv: Any) -> None:
        kv.init(KEYS, filled(kv, 4.0))
        with kv.view(KEYS[::-1]) as seen:
            assert [array.shape for array in seen] == [SHAPES[key] for key in KEYS[::-1]]
            for array in seen:
                with pytest.raises(ValueError, match="read-only"):
                    array[...] = 1.0
        with kv.view("large") as one:
            assert one.shape == SHAPES["large"]
            assert (one == 4.0).all()
        with kv.view([]) as nothing:
            assert nothing == []
        with pytest.raises(KVError, match="each key once"), kv.view(["small", "small"]):
            raise AssertionError
        with pytest.raises(KVError, match="'other'"), kv.view("other"):
            raise AssertionError

    run(script, 1)


def test_a_view_of_rows_and_of_compressed_values_is_what_a_pull_gives(run: Run) -> None:
    def script(kv: Any) -> None:
        table = RowSparse(np.full((2, 3), 7.0, np.float32), [1, 4], (6, 3))
        kv.init("table", table)
        kv.init("w", np.zeros((40, 50), np.float32))
        kv.set_gradient_compression({"type": "fp16", "two_way": True}, ["w"])
        kv.push("w", np.full((40, 50), 1.0 + kv.rank, np.float32))
        for key, shape in (("table", (6, 3)), ("w", (40, 50))):
            out = np.empty(shape, np.float32)
            kv.pull(key, out)
            with kv.view([key]) as [seen]:
                assert np.array_equal(seen, out)
                assert not seen.flags.writeable

    run(script)


def test_a_view_that_is_held_costs_one_more_copy_of_the_values_and_not_one_a_round(job: Job) -> None:
    """Sides of an arena are used again."""

    def script(kv: Any) -> int:
        arrays = filled(kv, 1.0)
        kv.init(KEYS, arrays)
        kv.push(KEYS, arrays)
        with kv.view(KEYS) as seen:
            for _ in range(12):
                kv.push(KEYS, arrays)
                with kv.view(KEYS):
                    pass
            check(seen, 1)
        gc.collect()
        return 0

    with job(1, 2) as made:
        made.run(script)
        for thread, loop in made._loops.items():
            if thread.name.startswith("server"):
                [values] = loop._engine._values.values()  # type: ignore[union-attr]
                assert len(values.lent) < 12  # How many are in use at once depends on when leases are given back.


def test_an_asynchronous_store_takes_and_shows_values_too(run: Run) -> None:
    def script(kv: Any) -> None:
        arrays = filled(kv, 0.0)
        kv.init(KEYS, arrays)
        kv.set_optimizer("sgd", learning_rate=1.0)
        kv.barrier()
        for array in arrays:
            array.fill(-1.0)
        pushed = kv.push(KEYS, arrays, wait=False)
        pushed.wait()
        for array in arrays:
            array.fill(55.0)
        kv.barrier()
        with kv.view(KEYS) as seen:
            check(seen, 2.0)
        outs = filled(kv, 0.0)
        for array in arrays:
            array.fill(0.0)
        kv.pushpull(KEYS, arrays, out=outs)
        check(outs, 2.0)

    run(script, type_name="dist_async")


def test_what_is_no_shape_or_dtype_is_named() -> None:
    def script(kv: Any) -> None:
        for arguments, text in (
            (((3,), "float33"), "float33"),
            (((3,), "complex64"), "complex64"),
            (((3, -1),), r"shape \(3, -1\)"),
            ((("a",),), "shape"),
            ((2.5,), "shape"),
        ):
            with pytest.raises(KVError, match=text):
                kv.empty(*arguments)

    script(create("local"))
    run_job(script, 1, 1)


def test_arrays_of_all_types_can_be_had_and_viewed(run: Run) -> None:
    def script(kv: Any) -> None:
        for dtype in dtypes.NAMES:
            array = kv.empty((700, 300), dtype)
            array.view(np.uint8)[...] = 1
            kv.init(dtype, array)
            with kv.view(dtype) as seen:
                assert seen.dtype == array.dtype, dtype
                assert np.array_equal(seen.view(np.uint8), array.view(np.uint8)), dtype

    run(script, 1)


def test_a_local_store_has_arrays_and_views_too() -> None:
    kv = create("local")
    arrays = filled(kv, 2.0)
    kv.init(KEYS, arrays)
    with kv.view(KEYS) as seen:
        check(seen, 2.0)
        assert not seen[0].flags.writeable
