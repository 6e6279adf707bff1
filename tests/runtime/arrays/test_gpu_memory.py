"""Memory of GPUs that several threads take, use and give back at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from children import exit_code_of
from cudastandin import StandIn
from gpukit import Machine, values
from slowness import scaled

from distrun_runtime.arrays.cuda import CudaError, CudaOutOfMemory
from distrun_runtime.arrays.gpu import GpuDevice
from distrun_runtime.errors import StoreClosed

F32 = np.dtype(np.float32)
LIMIT = 8192


class Slow:
    """A driver of which one call, the next of a name, does not return before `go_on` is set.

    It holds up its thread once it is made, or (`before`) already before.
    """

    def __init__(self, standin: StandIn) -> None:
        self._standin = standin
        self.name = ""
        self.before = False
        self.inside, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._standin, name)
        if name != self.name:
            return method

        def called(*arguments: object) -> object:
            self.name = ""
            if not self.before:
                result = method(*arguments)
            self.inside.set()
            assert self.go_on.wait(scaled(60))
            return method(*arguments) if self.before else result

        return called


class Bench:
    def __init__(self) -> None:
        made: list[Slow] = []
        self.machine = Machine(1, driver=lambda standin: made.append(Slow(standin)) or made[0])  # type: ignore[func-returns-value]
        self.driver, self.standin = made[0], self.machine.standin
        self.device: GpuDevice = self.machine.gpus.get(0)
        self._thread = ThreadPoolExecutor(2)

    def held_up(self, name: str, call: Callable[[], Any], *, before: bool = False) -> Future[Any]:
        """Make a call in another thread; return while it is in a call of CUDA, until `go_on` is set."""
        self.driver.name, self.driver.before = name, before
        future = self._thread.submit(call)
        assert self.driver.inside.wait(scaled(60))
        return future

    def started(self, call: Callable[[], Any]) -> Future[Any]:
        """Make a call in one more thread."""
        return self._thread.submit(call)

    def close(self) -> None:
        self.driver.go_on.set()
        self._thread.shutdown()
        self.machine.finish()


@pytest.fixture
def it() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_work_goes_on_while_another_thread_allocates(it: Bench) -> None:
    array = it.device.put(values((100,), F32))
    taken = it.held_up("alloc", lambda: it.device.empty((1000,), F32))
    it.device.scale(array, 2.0)
    assert it.device.host(array).tobytes() == (values((100,), F32) * np.float32(2)).tobytes()
    assert not taken.done()
    it.driver.go_on.set()
    assert taken.result(scaled(60)).size == 1000


def test_what_is_being_allocated_counts_for_the_limit(it: Bench) -> None:
    it.device.pool.limit = LIMIT
    taken = it.held_up("alloc", lambda: it.device.empty((1024,), F32), before=True)
    with pytest.raises(CudaOutOfMemory, match="wanted 6144 bytes, free are 4096 of 8192"):
        it.device.empty((1536,), F32)
    other = it.device.empty((1024,), F32)
    it.driver.go_on.set()
    assert taken.result(scaled(60)).size == other.size
    assert it.device.pool.size == sum(it.standin.used) == LIMIT


@pytest.mark.parametrize("code", [1, 2])
def test_what_could_not_be_allocated_does_not_count(it: Bench, code: int) -> None:
    it.device.pool.limit = LIMIT
    for nth in range(1, 4):
        it.standin.fail("alloc", nth, code=code)
    with pytest.raises(CudaError, match="alloc on gpu:0"):
        it.device.empty((1024,), F32)
    assert it.device.pool.size == 0
    it.standin.faults.clear()
    assert it.device.empty((2048,), F32).size == 2048


@pytest.mark.parametrize("is_out", [False, True])
def test_a_copy_that_holds_up_its_thread_holds_up_no_other(it: Bench, is_out: bool) -> None:
    it.standin.fail("register", code=1)
    given = values((200,), F32)
    mine, other = [it.device.put(given)], it.device.put(given)
    it.device.scale(other, 2.0)
    out = np.empty(200, F32)
    queue = it.device._outward if is_out else it.device._inward
    copied = it.held_up(
        "copy",
        lambda: it.device.read(mine[0], out) if is_out else it.device.write(mine[0], given),
        before=True,
    )
    it.device.scale(other, 2.0)
    order = it.machine.gpus.order
    order.finish(order.mark(it.device.work))
    order.finish(order.mark(queue))  # the copy does not count yet: it comes behind this mark
    assert not copied.done()
    it.driver.go_on.set()
    copied.result(scaled(60))
    if is_out:
        assert out.tobytes() == given.tobytes()
    mine.clear()
    it.device.pool.trim()  # not before the copy is over
    assert it.device.host(other).tobytes() == (given * np.float32(4)).tobytes()


class Told:
    """A lock that tells who comes to it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.come = threading.Semaphore(0)

    def __enter__(self) -> None:
        self.come.release()
        self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)


def test_who_needs_room_that_another_thread_is_making_waits_for_it(it: Bench) -> None:
    pool, spares = it.device.pool, []
    pool.limit, pool.spares = LIMIT, lambda: spares.append(1)
    told = pool._trimming = Told(pool._trimming)  # type: ignore[assignment]
    block = it.device.empty((1536,), F32)
    del block
    one = it.held_up("free", lambda: it.device.empty((1024,), F32), before=True)
    for _ in range(2):  # to make room, and to trim
        assert told.come.acquire(timeout=scaled(60))
    # Nothing is free any more, and the block that is given back still counts.
    other = it.started(lambda: it.device.empty((1024,), F32))
    assert told.come.acquire(timeout=scaled(60)), "it waits, and does not fail"
    it.driver.go_on.set()
    assert one.result(scaled(60)).size == other.result(scaled(60)).size == 1024
    assert not spares, "nor are arrays dropped for it"
    assert pool.size == sum(it.standin.used) == LIMIT


def test_arrays_that_are_dropped_for_room_may_have_others_make_room(it: Bench) -> None:
    pool = it.device.pool
    pool.limit = LIMIT
    kept = [it.device.empty((2048,), F32)]

    def dropped() -> None:
        kept.clear()
        assert pool.trim() == LIMIT
        assert it.device.empty((512,), F32).size == 512

    pool.spares = dropped
    assert it.device.empty((1024,), F32).size == 1024


def test_a_forked_child_does_not_wait_for_room_that_its_parent_makes(it: Bench) -> None:
    it.device.pool.limit = LIMIT
    block = it.device.empty((2048,), F32)
    del block
    taken = it.held_up("free", lambda: it.device.empty((1024,), F32), before=True)

    def child() -> None:
        signal.alarm(20)  # a child that waits ends by it
        for call in (it.device.pool.trim, lambda: it.device.empty((1024,), F32)):
            with pytest.raises(StoreClosed):
                call()

    assert exit_code_of(child) == 0
    it.driver.go_on.set()
    taken.result(scaled(60))
