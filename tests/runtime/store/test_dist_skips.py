"""Rounds that a worker skips: no value changes on any server, and every worker hears who skipped and why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cluster import Cluster, run_job

from distrun_runtime import kvstore
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore
from distrun_runtime.store.values import RowSparse

pytestmark = pytest.mark.usefixtures("placement")

KEYS = ["small", "wide", "table"]
SHAPES = [(2,), (50, 40), (6, 3)]


def start(kv: KVStore) -> None:
    values: list[Any] = [np.zeros(shape) for shape in SHAPES]
    values[2] = RowSparse(values[2], np.arange(6), SHAPES[2])
    kv.init(KEYS, values)


def ones() -> list[Any]:
    values: list[Any] = [np.ones(shape) for shape in SHAPES]
    return [*values[:2], RowSparse(values[2], np.arange(6), SHAPES[2])]


@pytest.mark.parametrize("over", ["inproc", "zmq"])
@pytest.mark.parametrize("rule", [True, False])
def test_a_round_that_one_worker_skips_changes_no_value(rule: bool, over: str) -> None:
    def script(kv: KVStore) -> list[Any]:
        start(kv)
        if rule:
            kv.set_optimizer("test")
        seen: list[Any] = []
        for step in range(3):
            outs = [np.full(shape, 7.0) for shape in SHAPES]
            if step == 1 and kv.rank == 1:
                pending = kv.skip_round(KEYS, {"why": "nan"})
            else:
                pending = kv.pushpull(KEYS, ones(), out=outs)
            seen.append((dict(pending.skipped), {float(each) for out in outs for each in out.flat}))
        outs = [np.zeros(shape) for shape in SHAPES]
        kv.pull(KEYS, out=outs)
        seen.append({float(each) for out in outs for each in out.flat})
        return seen

    found = run_job(script, 2, servers=2, bigarray_bound=100, over=over)
    last = 4.0 if rule else 2.0
    for rank, seen in enumerate(found):
        assert seen[0] == ({}, {2.0})
        # Outputs are left alone: whatever was in them is still there.
        assert seen[1] == ({0: None, 1: {"why": "nan"}}, {7.0}), rank
        assert seen[2] == ({}, {last})
        assert seen[3] == {last}


def test_only_row_sparse_keys_can_be_skipped_too() -> None:
    def script(kv: KVStore) -> Any:
        start(kv)
        if kv.rank:
            return dict(kv.skip_round("table", {"rank": 1}).skipped)
        kv.push("table", ones()[2])
        rows = np.ones((1, 3))
        return dict(kv.row_sparse_pull("table", out=rows, row_ids=[0]).skipped), rows.tolist()

    with Cluster(2, over="inproc") as job:
        told = {0: None, 1: {"rank": 1}}
        assert job.run(script) == [(told, [[0, 0, 0]]), told]


def test_what_a_skipped_round_had_compressed_is_as_after_a_push_that_was_refused() -> None:
    """The worker that skipped has its residual as it was; the other one's went on."""

    def script(kv: KVStore) -> float:
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5, "min_size": 0})
        kv.init("w", np.zeros(4, np.float32))
        out = np.zeros(4, np.float32)
        for step in range(3):
            if step == 1 and kv.rank:
                kv.skip_round("w", {})
            else:
                kv.pushpull("w", np.full(4, 0.3, np.float32), out=out)
        return float(out[0])

    # Third round: rank 1 has 0.3 + 0.3 and sends 0.5; rank 0 sent its 0.5 in the skipped round, and has 0.4 now.
    assert run_job(script, 2) == [0.5, 0.5]


@pytest.mark.parametrize("type_name", ["dist_async", "local"])
def test_where_there_are_no_rounds_nothing_is_skipped(type_name: str) -> None:
    def script(kv: Any) -> Any:
        kv.init("w", np.zeros(2))
        kv.set_optimizer("test")
        pending = kv.skip_round("w", {"rank": kv.rank})
        out = np.zeros(2)
        kv.pushpull("w", np.ones(2), out=out)
        return dict(pending.skipped), bool((out >= 1).all())

    if type_name == "local":
        assert script(kvstore.create("local")) == ({}, True)
        return
    assert run_job(script, 2, type_name=type_name) == [({}, True)] * 2


def test_a_push_can_be_checked_before_any_part_of_it_is_sent() -> None:
    def script(kv: KVStore) -> str:
        kv.init(["a", "b"], [np.zeros(300, np.float32), np.zeros(300, np.float32)])
        bad = [np.ones(300, np.float32), np.full(300, np.nan, np.float32)]
        kv.check_push(["a", "b"], bad)  # nothing is compressed yet: it travels as it is
        kv.set_gradient_compression({"type": "2bit"}, ["b"])
        kv.check_push(["a", "b"], bad[::-1])
        # On two devices: it is their sum that is compressed.
        kv.check_push("b", [bad[0], bad[0]])
        with pytest.raises(KVError, match=r"key 'b': .* element 0 is nan"):
            kv.check_push("b", [bad[0], bad[1]])
        with pytest.raises(KVError) as caught:
            kv.check_push(["a", "b"], bad)
        out = np.zeros(300, np.float32)
        kv.pushpull("a", bad[0], out=out)
        assert out[0] == 2, "the check counted as a push"
        return str(caught.value)

    assert all("key 'b': compression '2bit': element 0 is nan" in said for said in run_job(script, 2))


def test_a_companion_sums_beside_the_rule() -> None:
    def script(kv: KVStore) -> list[float]:
        kv.init(0, np.zeros(2))
        kv.set_optimizer("sgd", learning_rate=1.0)
        with kv.companion() as other:
            other.init(0, np.zeros(2, np.int64))
            out = np.zeros(2, np.int64)
            other.pushpull(0, np.ones(2, np.int64), out=out)
        return out.tolist()

    for type_name in ("dist_sync", "dist_async"):
        assert run_job(script, 2, type_name=type_name) == [[2, 2]] * 2
