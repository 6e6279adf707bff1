"""What a distributed store tells of itself: counters, traces, lost nodes, capabilities."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import DEADLINE_S, Cluster, run_job

from distrun_runtime.errors import KVError, PeerLost
from distrun_runtime.kvstore import KVStore

pytestmark = pytest.mark.usefixtures("placement")

SHAPE, WIDE = (2, 3), (40, 40)
BOUND = 1000


def ones(shape: tuple[int, ...] = SHAPE) -> Any:
    return np.ones(shape, "float32")


def test_staleness_of_async_pushes_is_counted_a_worker() -> None:
    """A push is as stale as the updates that others made since the worker's last pull."""
    turns = [threading.Event(), threading.Event()]

    def script(kv: KVStore) -> Any:
        kv.init("w", ones())
        kv.set_optimizer("test", rescale_grad=1)
        kv.pull("w", ones())
        kv.barrier()
        if kv.rank == 0:
            for _ in range(3):
                kv.push("w", ones()).wait()
            turns[0].set()
            assert turns[1].wait(DEADLINE_S)
        else:
            assert turns[0].wait(DEADLINE_S)
            kv.push("w", ones()).wait()
            turns[1].set()
        kv.barrier()
        return [facts["staleness"] for facts in kv.stats() if facts["keys"]]

    [found] = run_job(script, type_name="dist_async")[0]
    assert found["1"] == {"mean": 3.0, "max": 3, "pushes": 1}
    assert found["0"]["pushes"] == 3


def test_a_profile_writes_a_trace_for_every_worker_and_server(tmp_path: Path) -> None:
    """Row: tests/nightly/test_server_profiling.py: a file a rank, each valid JSON, around a sharded key."""

    def script(kv: KVStore) -> None:
        kv.init(["w", "v"], [ones(), ones(WIDE)])
        with kv.profile(tmp_path / "traces"):
            kv.barrier()
            for _ in range(2):
                kv.push(["w", "v"], [ones(), ones(WIDE)], wait=False)
                kv.pull(["w", "v"], [ones(), ones(WIDE)])
            kv.barrier()
        kv.pull("w", ones())

    run_job(script, 3, 3, bigarray_bound=BOUND)
    names = ["server-0.json", "server-1.json", "server-2.json", "worker-0.json", "worker-1.json", "worker-2.json"]
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == names
    for name in names:
        events = json.loads((tmp_path / "traces" / name).read_text())["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        assert all(event["dur"] >= 0 and event["ts"] > 0 for event in spans)
        called = {event["name"] for event in spans}
        assert called >= ({"push", "pull", "wait"} if name.startswith("worker") else {"apply"}), name
        assert all(event["args"]["shards"] > 0 for event in spans if event["name"] == "apply")


def test_a_trace_that_cannot_be_written_does_not_leave_the_servers_recording(tmp_path: Path) -> None:
    """Every later profile was refused: the servers were being profiled already."""

    def script(kv: KVStore) -> None:
        kv.init("w", ones())
        with pytest.raises(KVError, match=r"cannot be written to .*worker-0\.json"), kv.profile(tmp_path / "gone"):
            (tmp_path / "gone").rmdir()
            (tmp_path / "gone").write_text("in the way")
        with kv.profile(tmp_path / "again"):
            kv.pull("w", ones())

    run_job(script, 1, 1)
    assert (tmp_path / "again" / "server-0.json").exists()


def test_one_profile_at_a_time(tmp_path: Path) -> None:
    def script(kv: KVStore) -> None:
        kv.init("w", ones())
        already = "worker-0 is being profiled already"
        with kv.profile(tmp_path), pytest.raises(KVError, match=already), kv.profile(tmp_path / "other"):
            pass
        assert not (tmp_path / "other").exists(), "it is refused before anything is made"
        with kv.profile(tmp_path / "again"):
            kv.pull("w", ones())

    run_job(script, 1, 1)
    assert (tmp_path / "again" / "server-0.json").exists()


def test_lost_nodes_are_counted_by_role() -> None:
    """In MXNet nobody was ever seen to be dead."""

    def script(kv: KVStore) -> None:
        kv.init("w", ones(WIDE))
        assert kv.num_dead_node() == 0
        kv.push("w", ones(WIDE)).wait()
        kv.barrier()
        if kv.rank == 0:
            job.network.cut(job.transports["server-1"])
        with pytest.raises(PeerLost):
            kv.barrier()
        with pytest.raises(PeerLost):
            kv.barrier()
        assert kv.num_dead_node(2) == 1
        assert kv.num_dead_node(7) >= 1
        assert kv.num_dead_node(1) == 0

    with Cluster(over="inproc", bigarray_bound=BOUND) as job:
        job.run(script)
