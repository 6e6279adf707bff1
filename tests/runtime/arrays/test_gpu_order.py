"""Waits of the host: each has a deadline, and what is waited for is named."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import exit_code_of
from cudastandin import StandIn
from gpukit import Machine, gpus_of_process
from slowness import scaled

from distrun_runtime.arrays import cupy_driver, gpu_order
from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays.cuda import Cuda, CudaError, CudaTimedOut, Event, Stream
from distrun_runtime.arrays.gpu_order import StreamOrdering
from distrun_runtime.errors import StoreClosed

F32 = np.dtype(np.float32)
SUPPORT = Path(__file__).resolve().parents[2] / "support"


class Slow:
    """A driver whose events of some streams do not complete before `go_on` is set."""

    def __init__(self, standin: StandIn) -> None:
        self._standin = standin
        self.slow: set[int] = set()
        """Handles of the streams."""
        self.go_on = threading.Event()
        self.sleeping = threading.Event()
        """Somebody waits for one of them."""
        self.threads: list[threading.Thread] = []
        """Those that waited."""
        self._stream_of: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._standin, name)

    def record(self, event: Event, stream: Stream) -> None:
        self._stream_of[event.handle] = stream.handle
        self._standin.record(event, stream)

    def query(self, event: Event) -> bool:
        return not self._is_slow(event) and self._standin.query(event)

    def synchronize(self, event: Event) -> None:
        self.threads.append(threading.current_thread())
        if self._is_slow(event):
            self.sleeping.set()
            assert self.go_on.wait(scaled(60))
        self._standin.synchronize(event)

    def _is_slow(self, event: Event) -> bool:
        return self._stream_of[event.handle] in self.slow and not self.go_on.is_set()


class Bench:
    def __init__(self, wait_s: float) -> None:
        self.standin = StandIn(1)
        self.driver = Slow(self.standin)
        self.cuda = Cuda(self.driver)
        self.order = StreamOrdering(self.cuda, wait_s=wait_s)
        self.memory = self.cuda.alloc(0, 8)
        self.one, self.other = self.order.queue(0, "copies out"), self.order.queue(0, "kernels")

    def work(self, queue: gpu_order.StreamQueue) -> gpu_order.Mark:
        with self.order.using(queue):
            self.cuda.fill(self.memory.at(4 * (queue is self.one), 4), 7, 4, queue.stream)
        return self.order.mark(queue)


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Callable[[float], Bench]]:
    made: list[Bench] = []

    def make(wait_s: float) -> Bench:
        made.append(Bench(wait_s))
        return made[-1]

    yield make
    for each in made:
        each.driver.go_on.set()


def test_a_wait_that_takes_too_long_names_the_gpu_and_what_it_waited_for(bench: Callable[[float], Bench]) -> None:
    it = bench(0.02)
    it.driver.slow.add(it.one.stream.handle)
    with pytest.raises(CudaTimedOut) as caught:
        it.order.finish(it.work(it.one))
    text = str(caught.value)
    assert text.startswith("gpu:0 has not finished its copies out after 0.02 s")
    assert "nvidia-smi" in text
    assert "compute-sanitizer" in text
    assert "--op-timeout or DISTRUN_OP_TIMEOUT" in text
    assert caught.value.is_sticky


def test_after_such_a_wait_nothing_is_asked_of_the_gpu_and_nothing_freed(bench: Callable[[float], Bench]) -> None:
    it = bench(0.02)
    it.driver.slow.add(it.one.stream.handle)
    mark = it.work(it.one)
    with pytest.raises(CudaTimedOut):
        it.order.finish(mark)
    calls: list[Callable[[], object]] = [
        lambda: it.cuda.free(it.memory),
        lambda: it.cuda.event(0),
        lambda: it.order.finish(mark),
        lambda: it.order.mark(it.other),
    ]
    before = it.standin.calls.copy()
    for call in calls:
        with pytest.raises(CudaTimedOut, match=r"gpu:0 has not finished its copies out after 0\.02 s"):
            call()
    assert it.standin.calls == before


def test_a_wait_for_one_queue_does_not_hold_up_that_for_another(bench: Callable[[float], Bench]) -> None:
    it = bench(60)
    it.driver.slow.add(it.one.stream.handle)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(it.order.finish, it.work(it.one))
        assert it.driver.sleeping.wait(scaled(60))
        it.order.finish(it.work(it.other))
        assert not waiting.done()
        it.driver.go_on.set()
        waiting.result(scaled(60))


def test_only_a_thread_of_our_own_sleeps_in_cuda(bench: Callable[[float], Bench]) -> None:
    it = bench(60)
    for queue in (it.one, it.other, it.one):
        it.order.finish(it.work(queue))
    assert [thread.name for thread in it.driver.threads] == [
        "distrun-gpu:0-copies out",
        "distrun-gpu:0-kernels",
        "distrun-gpu:0-copies out",
    ]
    assert len({thread for thread in it.driver.threads if thread.is_alive()}) == 2


def test_a_thread_ends_with_its_queue(bench: Callable[[float], Bench]) -> None:
    it = bench(60)
    it.order.finish(it.work(it.one))
    (thread,) = it.driver.threads
    it.one = it.other
    it.order._known.clear()
    gc.collect()
    thread.join(scaled(60))
    assert not thread.is_alive()


def test_a_short_wait_is_over_without_the_other_thread(bench: Callable[[float], Bench]) -> None:
    it = bench(60)
    mark = it.work(it.one)
    it.standin.finish()
    it.order.finish(mark)
    assert not it.driver.threads


def test_an_error_while_the_gpu_is_waited_for_is_raised_by_the_wait(bench: Callable[[float], Bench]) -> None:
    it = bench(60)
    it.standin.fail_operation()
    with pytest.raises(CudaError, match="synchronize on gpu:0 failed: cudaErrorIllegalAddress"):
        it.order.finish(it.work(it.one))


def test_a_forked_child_neither_waits_nor_starts_a_thread(bench: Callable[[float], Bench]) -> None:
    it = bench(60)
    mark = it.work(it.one)

    def child() -> None:
        for call in (lambda: it.order.finish(mark), lambda: it.order.mark(it.other)):
            with pytest.raises(StoreClosed, match="forked from process %d" % os.getppid()):
                call()
        assert threading.active_count() == 1
        assert not it.standin.mistakes

    assert exit_code_of(child) == 0
    it.order.finish(mark)


def test_a_wait_may_take_half_of_the_time_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(1)
    with gpus_of_process(machine):
        monkeypatch.setattr(devices, "_gpus", [])
        monkeypatch.setenv("DISTRUN_OP_TIMEOUT", "30")
        assert devices.gpu(0).pool._order.wait_s == 15
        assert cupy_driver.of_process() is machine.cuda


EXIT = """
import sys, threading
sys.path[:0] = [sys.argv[1]]
import numpy as np
from gpukit import Machine
from test_gpu_order import Slow

made = []
machine = Machine(1, driver=lambda standin: made.append(Slow(standin)) or made[0])
driver, device = made[0], machine.gpus.get(0)
array = device.put(np.ones(4, np.float32))
device.synchronize()
driver.slow.update(queue.stream.handle for queue in (device.work, device._outward))
threading.Thread(target=device.host, args=(array,), daemon=True).start()
assert driver.sleeping.wait(60)
calls = machine.standin.calls.copy()
import atexit
atexit.register(lambda: print(machine.standin.calls == calls, flush=True))
kept = array, device, machine
"""


def test_a_process_ends_although_it_waits_for_a_gpu_and_makes_no_call_then() -> None:
    path = os.pathsep.join([str(SUPPORT), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", EXIT.replace("[sys.argv[1]]", "sys.argv[1].split(':')"), path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
