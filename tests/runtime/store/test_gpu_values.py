"""Values and outputs in GPU memory, in stores that sum on the host and on devices: the same bytes as from host memory.

The GPUs are those of the stand-in, which fails the test if a copy or kernel is not ordered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cluster import Cluster
from fakearrays import FakeTorch
from fakearrays import put as libraries
from gpukit import Machine, gpus_of_process, values
from gpustores import Store, put

from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.cores import Threads
from distrun_runtime.arrays.device import is_on_host, on_host
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.ps.session import NodeSession
from distrun_runtime.store.base import CallOptions
from distrun_runtime.store.compress import Compression
from distrun_runtime.store.dist import DistBackend
from distrun_runtime.store.keys import KeyRecord
from distrun_runtime.store.local import LocalBackend
from distrun_runtime.store.reducer import DeviceReducer

F32 = np.dtype(np.float32)
PLACES = ["gpu:0", "gpu:1", "gpu:0/0", "gpu:0/1", "host"]


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine(2)
    yield machine
    machine.finish()


def expected(given: Sequence[Array]) -> Array:
    wide = dtypes.widen(given[0]).copy()
    with np.errstate(over="ignore"):
        for each in given[1:]:
            wide = wide + dtypes.widen(each)
    return dtypes.narrow(wide, given[0].dtype)


@pytest.mark.parametrize("kind", ["local", "device"])
@pytest.mark.parametrize("dtype", dtypes.NAMES)
@pytest.mark.parametrize(
    "places",
    [
        ["gpu:0"],
        ["gpu:0", "gpu:1"],
        ["gpu:1", "gpu:0/1", "gpu:0/0"],
        ["host", "gpu:0", "gpu:0"],
        ["gpu:1", "host"],
    ],
    ids="-".join,
)
def test_sums_of_values_on_gpus_have_the_bytes_of_sums_in_host_memory(
    machine: Machine, kind: str, dtype: str, places: list[str]
) -> None:
    dt = dtypes.parse(dtype)
    shapes = [(5, 3), (40,), ()]
    store = Store(LocalBackend(kind), {n: np.zeros(shape, dt) for n, shape in enumerate(shapes)})
    given = [[values(shape, dt, 10 * n + k) for k in range(len(places))] for n, shape in enumerate(shapes)]
    store.push(*[[put(machine, place, each) for place, each in zip(places, its, strict=True)] for its in given])
    for its, found in zip(given, store.pulled(), strict=True):
        assert found.tobytes() == expected(its).tobytes()
    store.backend.close()


@pytest.mark.parametrize("kind", ["local", "device"])
def test_outputs_on_every_device_get_the_value(machine: Machine, kind: str) -> None:
    store = Store(LocalBackend(kind), {"w": values((6, 4), F32), "v": values((3,), F32)})
    for turn in range(2):
        outs = [[put(machine, place, np.zeros(record.shape, F32)) for place in PLACES] for record in store.keys.records]
        across = np.zeros((4, 6), F32)
        store.pull([[*outs[0], across.T], outs[1]])
        for its, value in zip(outs, store.pulled(), strict=True):
            assert [on_host(out).tobytes() for out in its] == [value.tobytes()] * len(its)
        assert across.T.tobytes() == store.pulled()[0].tobytes()
        store.push(*[[put(machine, "gpu:0", values(r.shape, F32, 5 + turn))] for r in store.keys.records])
    store.backend.close()


# Distributed stores


def in_a_job(script: Any, kind: str, over: str, workers: int = 2) -> list[Any]:
    """Run `script(backend, rank)` in every worker of a job with two servers."""

    def work(session: NodeSession) -> Any:
        backend = DistBackend(kind, session, deterministic=True)
        try:
            return script(backend, backend.rank)
        finally:
            backend.close()

    with Cluster(workers, 2, over=over, bigarray_bound=100) as job:
        return job.run_sessions(work)


SHAPES = [(5, 3), (70, 2), (20000,), ()]


@pytest.mark.parametrize("over", ["inproc", "segments"])
@pytest.mark.parametrize("kind", ["dist_sync", "dist_device_sync"])
@pytest.mark.parametrize("wait", [True, False])
def test_workers_with_values_on_gpus_have_the_results_of_workers_without(
    machine: Machine, kind: str, over: str, wait: bool
) -> None:
    def script(backend: DistBackend, rank: int) -> list[list[bytes]]:
        store = Store(backend, {n: np.zeros(shape, F32) for n, shape in enumerate(SHAPES)})
        found = []
        for turn in range(4):
            given = [[values(shape, F32, 100 * rank + 10 * turn + k) for k in range(2)] for shape in SHAPES]
            at = ["host", "host"] if turn == 3 else [["gpu:0", "gpu:0"], ["gpu:1", "gpu:0/1"], ["host", "gpu:1"]][turn]
            pushed = store.push(
                *[[put(machine, place, each) for place, each in zip(at, its, strict=True)] for its in given], wait=wait
            )
            outs = [[put(machine, place, np.zeros(shape, F32)) for place in ("gpu:0", "gpu:1")] for shape in SHAPES]
            pulled = store.pull(outs, wait=wait)
            if not wait:
                pushed.wait()
                pulled.wait()
            found.append([on_host(out).tobytes() for its in outs for out in its])
        return found

    first, second = in_a_job(script, kind, over)
    assert first == second
    for turn, found in enumerate(first):
        totals = []
        for shape in SHAPES:
            sums = [expected([values(shape, F32, 100 * rank + 10 * turn + k) for k in range(2)]) for rank in range(2)]
            totals += [expected(sums).tobytes()] * 2
        assert found == totals


def test_a_pushpull_may_write_the_values_that_it_pushes(machine: Machine) -> None:
    def script(backend: DistBackend, rank: int) -> bytes:
        store = Store(backend, {"w": np.zeros(3000, F32)})
        gradients = [put(machine, "gpu:%d" % n, values((3000,), F32, 10 * rank + n)) for n in range(2)]
        for _ in range(2):
            sums = backend.reducer.reduce([(store.keys.records[0], gradients)])
            backend.pushpull(store.keys, sums, [gradients], CallOptions(lent=True)).wait()
        assert on_host(gradients[0]).tobytes() == on_host(gradients[1]).tobytes()
        return on_host(gradients[0]).tobytes()

    first = [expected([values((3000,), F32, 10 * rank + n) for n in range(2)]) for rank in range(2)]
    twice = expected([expected(first)] * 2)
    assert in_a_job(script, "dist_device_sync", "segments") == [expected([twice] * 2).tobytes()] * 2


def test_values_on_gpus_are_compressed_on_their_way_to_servers(machine: Machine) -> None:
    def script(backend: DistBackend, rank: int) -> bytes:
        backend.compress(Compression.of({"type": "2bit", "threshold": 0.5, "min_size": 0, "two_way": True}), None)
        store = Store(backend, {"w": np.zeros(100, F32)})
        store.push([put(machine, "gpu:0", np.full(100, 0.7, F32))])
        out = put(machine, "gpu:1", np.zeros(100, F32))
        store.pull([[out]])
        return on_host(out).tobytes()

    found = in_a_job(script, "dist_device_sync", "inproc")
    assert found[0] == found[1]
    assert set(np.frombuffer(found[0], F32)) == {np.float32(0.5)}


@pytest.mark.parametrize("kind", ["2bit", "topk"])
@pytest.mark.parametrize("places", [["gpu:0"], ["gpu:1", "gpu:0"]], ids="-".join)
def test_compressed_pushes_from_gpus_have_the_results_of_the_host(
    machine: Machine, kind: str, places: list[str]
) -> None:
    setting = Compression.of({"type": kind, "min_size": 400, **({"ratio": 0.1} if kind == "topk" else {})})

    def script(backend: DistBackend, rank: int) -> list[bytes]:
        backend.compress(setting, None)
        store = Store(backend, {"there": np.zeros(300, F32), "here": np.zeros(100, F32), "small": np.zeros(9, F32)})
        found = []
        for turn in range(3):
            given = [[values((n,), F32, 10 * turn + rank + n + p) for p in range(len(places))] for n in (300, 100, 9)]
            if is_on_gpus:
                given = [[put(machine, at, each) for at, each in zip(places, some, strict=True)] for some in given]
                given[1][0] = on_host(given[1][0])
            store.push(*given)
            found.append(b"".join(each.tobytes() for each in store.pulled()))
        assert is_on_host(backend._compressor._residuals["there", 0]) is not is_on_gpus
        found += [each.tobytes() for each in backend._compressor.residuals().values()]
        return found

    is_on_gpus = False
    expected = in_a_job(script, "dist_device_sync", "inproc")
    is_on_gpus = True
    assert in_a_job(script, "dist_device_sync", "inproc") == expected
    assert len(expected[0]) == 5


def test_a_gpus_outputs_of_a_skipped_round_stay_as_they_are(machine: Machine) -> None:
    def script(backend: DistBackend, rank: int) -> bytes:
        store = Store(backend, {"w": np.zeros(100, F32)})
        out = put(machine, "gpu:0", np.full(100, 7, F32))
        if rank:
            backend.skip(list(store.keys.records), {"why": "test"}).wait()
        else:
            sums = backend.reducer.reduce([(store.keys.records[0], [put(machine, "gpu:0", np.ones(100, F32))])])
            backend.pushpull(store.keys, sums, [[out]], CallOptions(lent=True)).wait()
        return on_host(out).tobytes()

    assert in_a_job(script, "dist_device_sync", "inproc") == [np.full(100, 7, F32).tobytes()] * 2


@pytest.mark.parametrize("count", [1, 2])
def test_a_list_from_one_gpu_is_summed_by_one_kernel_and_copied_to_the_stores_memory_at_once(
    machine: Machine, count: int
) -> None:
    made: list[Array] = []

    def memory(shape: tuple[int, ...], dtype: Any) -> Array:
        made.append(np.empty(shape, dtype))
        return made[-1]

    reducer = DeviceReducer(Threads(), memory)
    given = [[values(shape, F32, 10 * n + k) for k in range(count)] for n, shape in enumerate(SHAPES)]
    records = [KeyRecord.of(n, n, each[0]) for n, each in enumerate(given)]
    items = [(r, [put(machine, "gpu:0", each) for each in its]) for r, its in zip(records, given, strict=True)]
    reducer.reduce(items)
    made.clear()
    calls = machine.standin.calls
    launches, copies = calls["launch"], calls["copy"]
    sums = reducer.reduce(items)
    assert (calls["launch"] - launches, calls["copy"] - copies, len(made)) == (1, 1, 1)
    assert made[0].tobytes() == b"".join(expected(its).tobytes() for its in given)
    assert all(np.shares_memory(total, made[0]) for total in sums)


def test_small_values_come_to_a_gpu_by_one_copy_a_server_and_are_scattered_there(machine: Machine) -> None:
    shapes = [(5, 3), (7,), (), (0,), (70, 2), (11,)]

    def script(backend: DistBackend, rank: int) -> tuple[int, list[bytes]]:
        store = Store(backend, {n: values(shape, F32, n) for n, shape in enumerate(shapes)})
        outs = [[put(machine, "gpu:0", np.zeros(shape, F32))] for shape in shapes]
        twice = [*[[each[0], each[0]] for each in outs[:2]], *outs[2:]]
        store.pull(outs)
        machine.gpus.get(0).synchronize()
        copies = machine.standin.calls["copy"]
        store.pull(outs)
        copies = machine.standin.calls["copy"] - copies
        store.pull(twice)  # more outputs than values: each by itself
        return copies, [on_host(out).tobytes() for (out,) in outs]

    def work(session: NodeSession) -> Any:
        backend = DistBackend("dist_device_sync", session)
        try:
            return script(backend, backend.rank)
        finally:
            backend.close()

    with Cluster(1, 2, over="inproc") as job:
        ((copies, found),) = job.run_sessions(work)
    assert copies == 2
    assert found == [values(shape, F32, n).tobytes() for n, shape in enumerate(shapes)]


@pytest.mark.parametrize("kind", ["local", "device"])
def test_a_store_whose_values_are_on_one_gpu_makes_a_context_on_no_other(machine: Machine, kind: str) -> None:
    store = Store(LocalBackend(kind), {"a": values((40,), F32)})
    store.push([put(machine, "gpu:1", values((40,), F32, part)) for part in range(2)])
    out = put(machine, "gpu:1", values((40,), F32))
    with ThreadPoolExecutor(1) as thread:
        thread.submit(store.pull, [[out]]).result()
    assert machine.standin.contexts == {1: "make_stream"}
    store.backend.close()


# What is ready before a round, and let go at the end


@pytest.mark.parametrize("setting", [None, {"type": "2bit", "min_size": 0}])
def test_after_init_no_round_of_a_distributed_store_waits_for_a_compiler_but_a_servers_first_of_a_codec(
    monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any] | None
) -> None:
    torch = FakeTorch()
    torch.is_used, torch.device = True, 1
    libraries(monkeypatch, torch)
    shapes = [(5, 3), (70, 2), ()]

    def script(backend: DistBackend, rank: int) -> tuple[int, int]:
        store = Store(backend, {n: np.zeros(shape, np.float16) for n, shape in enumerate(shapes)})
        if setting is not None:
            backend.compress(Compression.of(setting), None)
        calls = machine.standin.calls
        loads = calls["load"]
        for _ in range(2):
            store.push(*[[put(machine, "gpu:1", np.ones(shape, np.float16)) for _ in range(2)] for shape in shapes])
            store.pull([[put(machine, "gpu:1", np.zeros(shape, np.float16))] for shape in shapes])
        return loads, calls["load"]

    with gpus_of_process(Machine(2)) as machine:
        ((before, after),) = in_a_job(script, "dist_device_sync", "inproc", 1)
        machine.finish()
    assert after - before == (setting is not None)
    assert before > 0


def test_nothing_of_a_push_is_sent_before_its_gpu_has_compiled_all(machine: Machine) -> None:
    def script(backend: DistBackend, rank: int) -> list[list[float]]:
        store = Store(backend, {"w": np.zeros(4, F32), "h": np.zeros(4, np.float16)})
        backend.compress(Compression.of({"type": "2bit", "threshold": 0.5, "min_size": 0}), None)
        given = [[put(machine, "gpu:0", np.full(4, 0.3, each))] for each in ("float32", "float16")]
        for nth in (1, 2, 3):
            machine.standin.fail("load", nth=nth, code=1)
            with pytest.raises(KVError, match=r"key '[wh]' \(float(32|16)\): load on gpu:0 failed"):
                store.push(*given)
        found = []
        for _ in range(2):
            store.push(*given)
            found += [float(each[0]) for each in store.pulled()]
        return found

    (found,) = in_a_job(script, "dist_device_sync", "inproc", 1)
    assert found == [0, 0, 0.5, 0.5]  # no residual was left by what failed


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_closed_store_gives_the_memory_of_its_gpus_back(machine: Machine, is_compressed: bool) -> None:
    used: list[tuple[Store, int]] = []

    def script(backend: Any, rank: int) -> None:
        store = Store(backend, {"w": np.zeros(100, F32)})
        if is_compressed:
            backend.compress(Compression.of({"type": "2bit", "min_size": 0}), None)
        store.push([put(machine, place, np.ones(100, F32)) for place in ("gpu:0", "gpu:1")])
        used.append((store, machine.gpus.get(0).pool.size))  # programs keep stores that are closed

    backend = LocalBackend("device")
    script(backend, 0)
    backend.close()
    in_a_job(script, "dist_device_sync", "inproc", 1)
    assert all(size > 0 for _, size in used)
    assert [machine.gpus.get(number).pool.size for number in range(2)] == [0, 0]


@pytest.mark.parametrize("allowed", ["1", "0"])
def test_without_peer_access_sums_of_two_gpus_are_the_same(monkeypatch: pytest.MonkeyPatch, allowed: str) -> None:
    monkeypatch.setenv("MXNET_ENABLE_GPU_P2P", allowed)
    with gpus_of_process(Machine(2)) as machine:
        monkeypatch.setattr(devices, "_gpus", [])  # made with the environment as it is now
        store = Store(LocalBackend("device"), {"w": np.zeros(9, F32)})
        given = [values((9,), F32, k) for k in range(3)]
        store.push(
            [devices.get(place).put(each) for place, each in zip(("gpu:0", "gpu:1", "gpu:0"), given, strict=True)]
        )
        assert store.pulled()[0].tobytes() == expected(given).tobytes()
        calls = machine.standin.calls
        assert calls["copy_peer"] > 0
        assert calls["enable_peer"] == int(allowed)
        store.backend.close()
        machine.finish()
