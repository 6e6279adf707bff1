"""Jobs on every path whose servers forget buckets: scripts see nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cluster import Cluster

from distrun_runtime.store.values import RowSparse

pytestmark = pytest.mark.usefixtures("engine", "server_device")

Job = Callable[..., Cluster]

KEYS = ["k%d" % number for number in range(24)]
STEPS = 30


def full(value: float) -> Any:
    return np.full((3, 2), value, np.float32)


def started(kv: Any) -> None:
    kv.init(KEYS, [full(0)] * len(KEYS))


@pytest.mark.parametrize("every", [1, 3])
def test_every_round_has_what_was_pushed_to_it_although_servers_forget_buckets(job: Job, every: int) -> None:
    """With a push and a pull at a time, and with several pushes of the same keys on their way."""

    def script(kv: Any) -> None:
        started(kv)
        outs = [full(-1) for _ in KEYS]
        for step in range(1, STEPS):
            kv.pushpull(KEYS, [full(step * 10**kv.rank)] * len(KEYS), outs)
            assert {float(out.max()) for out in outs} == {11.0 * step}
        for step in range(STEPS, 2 * STEPS):
            pushes = [kv.push(KEYS, [full(step * 10**kv.rank)] * len(KEYS), wait=False) for _ in range(4)]
            kv.pull(KEYS, outs)
            assert {float(out.min()) for out in outs} == {float(out.max()) for out in outs} == {11.0 * step}
            for push in pushes:
                push.wait()
        kv.barrier()

    with job(2, 2, forget_every=every) as made:
        made.run(script)
        servers = [made.transports["server-%d" % rank] for rank in range(2)]
        # With relays both workers push to server-0 only, and what goes on from there names its entries.
        assert all(server.changed > STEPS for server in servers[: 1 if made.has_relays else 2])


def test_compressed_values_and_rows_beside_plain_ones_are_sent_again_too(job: Job) -> None:
    """In one call: plain values by their bucket; compressed ones and rows behind it, which name their entries."""
    wide, table = np.full((40, 40), 0.5, np.float32), (100, 3)

    def script(kv: Any) -> None:
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5, "min_size": 1000})
        kv.init([*KEYS, "wide", "rows"], [*[full(0)] * len(KEYS), wide * 0, RowSparse.empty(table)])
        outs = [*(full(-1) for _ in KEYS), wide * 0, np.zeros(table, np.float32)]
        for step in range(1, STEPS):
            at = [step, 99 - kv.rank]
            rows = RowSparse(np.full((2, 3), step, np.float32), at, table)
            push = kv.push([*KEYS, "wide", "rows"], [*[full(step)] * len(KEYS), wide, rows], wait=False)
            kv.pull([*KEYS, "wide", "rows"], outs)
            assert {float(out.min()) for out in outs[:-2]} == {float(out.max()) for out in outs[:-2]} == {2.0 * step}
            assert (outs[-2] == 1).all()
            assert outs[-1][[step, 98, 99], 0].tolist() == [2 * step, step, step]
            found = RowSparse.empty(table)
            kv.row_sparse_pull("rows", found, row_ids=np.array([step, 99]))
            assert found.values[:, 0].tolist() == [2 * step, step]
            push.wait()

    with job(2, 2, forget_every=2) as made:
        made.run(script)
        assert any(made.transports["server-%d" % rank].changed for rank in range(2))
