"""Shared memory of jobs with GPUs: it is made and page-locked when keys are initialised, not in a round."""

from __future__ import annotations

from typing import Any

import cluster
import numpy as np
import pytest
from cluster import Cluster
from gpukit import Machine, gpus_of_process, values
from gpustores import Store, put

from distrun_runtime.arrays import shared_memory
from distrun_runtime.arrays.shared_memory import BLOCKS, PAGE, Pool
from distrun_runtime.ps.session import NodeSession
from distrun_runtime.store.compress import Compression
from distrun_runtime.store.dist import DistBackend

F32 = np.dtype(np.float32)
SHAPES = [(50, 30), (700, 20), (20000,), (3,), (4, 5)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No block has room for more than it was made for, and none is of another test."""
    monkeypatch.setattr(shared_memory, "FIRST_BYTES", 4 * PAGE)
    monkeypatch.setattr(BLOCKS, "_known", {})


@pytest.mark.parametrize(
    ("is_together", "count", "wait", "codec"),
    [
        (True, 1, True, ""),
        (True, 2, False, ""),
        (False, 2, True, ""),
        (False, 1, False, ""),
        (True, 2, True, "2bit"),
        (False, 1, True, "fp16"),
    ],
)
def test_no_round_of_workers_and_servers_with_gpus_makes_or_page_locks_a_block(
    monkeypatch: pytest.MonkeyPatch, is_together: bool, count: int, wait: bool, codec: str
) -> None:
    made: list[int] = []
    grown = Pool._grown

    def counted(self: Pool, size: int) -> Any:
        made.append(size)
        return grown(self, size)

    def script(session: NodeSession) -> list[int]:
        backend = DistBackend("dist_device_sync", session)
        if codec:
            backend.compress(Compression.of({"type": codec, "min_size": 1000}), None)
        initial = {number: np.zeros(shape, F32) for number, shape in enumerate(SHAPES)}
        groups = [initial] if is_together else [{number: value} for number, value in initial.items()]
        stores = [Store(backend, group) for group in groups]
        backend.barrier().wait()
        before, found = len(made), []
        for turn in range(4):
            for store in stores:
                shapes = [record.shape for record in store.keys.records]
                given = [
                    [put(machine, "gpu:%d" % place, values(shape, F32, turn)) for place in range(count)]
                    for shape in shapes
                ]
                outs = [[put(machine, "gpu:0", np.zeros(shape, F32))] for shape in shapes]
                pending = [store.push(*given, wait=wait), store.pull(outs, wait=wait)]
                for each in pending:
                    each.wait()
                del pending, each
            found.append(machine.standin.calls["register"])
        assert len(made) == before
        backend.close()
        return found

    monkeypatch.setattr(Pool, "_grown", counted)
    monkeypatch.setattr(cluster, "SERVER_DEVICE", "gpu:0")
    with gpus_of_process(Machine(2, blocks=BLOCKS)) as machine:
        machine.gpus.get(0)
        with Cluster(2, 2, over="segments", bigarray_bound=100) as job:
            first, second = job.run_sessions(script)
        assert len(set(first + second)) == 1
        machine.finish()


def test_the_memory_of_a_closed_store_is_that_of_the_next() -> None:
    def script(session: NodeSession) -> list[int]:
        found = []
        for _ in range(6):
            backend = DistBackend("dist_device_sync", session)
            store = Store(backend, {"w": np.zeros(20000, F32)})
            store.push([put(machine, "gpu:0", values((20000,), F32))])
            store.pulled()
            backend.close()
            found.append(session._memory.arrays.size)
        return found

    with gpus_of_process(Machine(1, blocks=BLOCKS)) as machine:
        machine.gpus.get(0)
        with Cluster(1, 1, over="segments") as job:
            [found] = job.run_sessions(script)
        # Of a store that was just closed some may still be in use, or nothing. It takes 80,000 bytes in whole pages.
        assert found[-1] <= 2 * 81920
        machine.finish()


@pytest.mark.parametrize("kind", ["dist_sync", "dist_device_sync"])
def test_a_job_that_uses_no_gpu_reserves_no_memory(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def never(self: Pool, *args: int, **options: int) -> bool:
        raise AssertionError("nobody has a GPU")

    def script(session: NodeSession) -> None:
        backend = DistBackend(kind, session)
        store = Store(backend, {"w": np.zeros(20000, F32)})
        store.push([values((20000,), F32)])
        store.pulled()
        backend.close()

    monkeypatch.setattr(Pool, "reserve", never)
    with Cluster(2, 1, over="segments") as job:
        job.run_sessions(script)


def test_where_nothing_can_be_reserved_rounds_take_memory_by_need(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(session: NodeSession) -> bytes:
        backend = DistBackend("dist_device_sync", session)
        store = Store(backend, {"w": np.zeros(20000, F32)})
        store.push([put(machine, "gpu:0", values((20000,), F32))])
        [found] = store.pulled()
        backend.close()
        return found.tobytes()

    monkeypatch.setattr(Pool, "reserve", lambda self, *args, **options: False)
    with gpus_of_process(Machine(1, blocks=BLOCKS)) as machine:
        machine.gpus.get(0)
        with Cluster(1, 1, over="segments") as job:
            assert job.run_sessions(script) == [values((20000,), F32).tobytes()]
        machine.finish()
