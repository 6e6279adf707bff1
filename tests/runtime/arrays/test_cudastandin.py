"""The stand-in for CUDA finds what a GPU would only do wrong now and then."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cudastandin import ASKS_BEFORE_DONE, Mistake, StandIn, outside_of_locks
from slowness import scaled

from distrun_runtime.arrays.cuda import Cuda, HostMemory, Pointer, Read, Table, Update, Write
from distrun_runtime.arrays.gpu_order import StreamOrdering
from distrun_runtime.arrays.gpu_programs import Access, Kernel, KernelParameter, Program
from distrun_runtime.arrays.shared_memory import address_of

F32 = "f32"
PROGRAM = Program(
    "test",
    "",
    (
        Kernel("add", (KernelParameter("part", F32, Access.READ), KernelParameter("into", F32, Access.UPDATE))),
        Kernel("wrong", (KernelParameter("part", F32, Access.READ), KernelParameter("into", F32, Access.READ))),
        Kernel("half", (KernelParameter("out", F32, Access.WRITE),)),
        Kernel(
            "sum",
            (
                KernelParameter("parts", F32, Access.TABLE),
                KernelParameter("out", F32, Access.WRITE),
                KernelParameter("number", "i32", Access.SCALAR),
            ),
        ),
    ),
)


def floats(address: int, n: int) -> np.ndarray[Any, Any]:
    return np.ctypeslib.as_array((ctypes.c_float * n).from_address(address))


def compiled(program: object) -> Any:
    """Run the kernels by numpy; `half` writes only half of what it says, `wrong` what it says that it reads."""

    def run(kernel: str, arguments: Sequence[Any], n: int) -> None:
        if kernel in ("add", "wrong"):
            floats(arguments[1], n)[...] += floats(arguments[0], n)
        elif kernel == "half":
            floats(arguments[0], n // 2)[...] = 1
        else:
            table = (ctypes.c_uint64 * int(arguments[2])).from_address(arguments[0])
            floats(arguments[1], n)[...] = sum(floats(each, n) for each in table)

    return run


N = 64
BYTES = 4 * N


class Bench:
    """Two streams of one device, an event, page-locked host memory and two arrays on the device."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        self.standin = StandIn(seed=seed, compiled=compiled, **options)
        self.cuda = Cuda(self.standin)
        self.one, self.other = self.cuda.stream(0), self.cuda.stream(0)
        self.event = self.cuda.event(0)
        self.memory = np.zeros(4 * N, np.float32)
        self.host = HostMemory(address_of(self.memory), self.memory.nbytes)
        self.cuda.register(self.host)
        self.a, self.b = self.cuda.alloc(0, BYTES), self.cuda.alloc(0, BYTES)
        self.loaded = self.cuda.load(PROGRAM, 0)

    def part(self, index: int) -> HostMemory:
        return self.host.at(index * BYTES, BYTES)

    def values(self, index: int) -> np.ndarray[Any, Any]:
        return self.memory[index * N : (index + 1) * N]

    def add(self, source: Pointer, into: Pointer, stream: Any) -> None:
        self.cuda.launch(self.loaded, "add", [Read(source, BYTES), Update(into, BYTES)], N, stream)


SEEDS = pytest.mark.parametrize("seed", range(4))


def test_nothing_is_done_before_it_is_waited_for() -> None:
    bench = Bench()
    bench.cuda.fill(bench.a, 7, BYTES, bench.one)
    bench.cuda.fill(bench.b, 8, BYTES, bench.other)
    assert set(bench.standin.bytes_at(bench.a)) == {0xFF}
    bench.cuda.record(bench.event, bench.one)
    bench.cuda.fill(bench.a, 9, BYTES, bench.one)
    bench.cuda.synchronize(bench.event)
    assert set(bench.standin.bytes_at(bench.a)) == {7}
    assert set(bench.standin.bytes_at(bench.b)) == {0xFF}
    assert bench.standin.pending == 2


def test_a_query_says_no_and_at_last_yes() -> None:
    bench = Bench()
    bench.cuda.fill(bench.a, 7, BYTES, bench.one)
    assert bench.cuda.query(bench.event)  # never recorded
    bench.cuda.record(bench.event, bench.one)
    answers = [bench.cuda.query(bench.event) for _ in range(ASKS_BEFORE_DONE + 4)]
    assert answers[0] is False
    assert answers[-1] is True
    bench.cuda.free(bench.a)


@SEEDS
@pytest.mark.parametrize("writes", [(True, True), (True, False), (False, True)])
def test_unordered_accesses_of_two_streams_to_the_same_bytes_are_a_mistake(
    seed: int, writes: tuple[bool, bool]
) -> None:
    bench = Bench(seed)
    spare = bench.cuda.alloc(0, BYTES)
    with pytest.raises(Mistake, match="nothing orders"):
        for index, (stream, is_write) in enumerate(zip((bench.one, bench.other), writes, strict=True)):
            source, into = (bench.b, bench.a) if is_write else (bench.a, bench.b)
            bench.cuda.copy(into if index == 0 or is_write else spare, source, BYTES, stream)
    with pytest.raises(Mistake):
        bench.standin.finish()


def test_a_wait_holds_for_the_event_as_it_was_recorded_then() -> None:
    bench = Bench()
    cuda = bench.cuda
    cuda.record(bench.event, bench.one)
    cuda.wait(bench.other, bench.event)
    cuda.fill(bench.a, 1, BYTES, bench.one)
    cuda.record(bench.event, bench.one)  # too late for that wait
    with pytest.raises(Mistake, match="nothing orders"):
        cuda.fill(bench.a, 2, BYTES, bench.other)


@pytest.mark.parametrize("ends", ["free", "unregister"])
def test_memory_that_ends_while_it_is_in_use_is_a_mistake(ends: str) -> None:
    bench = Bench()
    bench.cuda.copy(bench.a, bench.part(0), BYTES, bench.one)
    with pytest.raises(Mistake, match="before the host knows"):
        if ends == "free":
            bench.cuda.free(bench.a)
        else:
            bench.cuda.unregister(bench.host)


def test_freed_memory_is_a_mistake_and_fresh_memory_is_nan() -> None:
    bench = Bench()
    assert np.isnan(np.frombuffer(bench.standin.bytes_at(bench.a), np.float32)).all()
    bench.cuda.free(bench.a)
    with pytest.raises(Mistake, match="was freed"):
        bench.cuda.fill(bench.a, 1, BYTES, bench.one)
    with pytest.raises(Mistake, match="was freed"):
        bench.cuda.free(bench.a)


def test_host_memory_that_is_overwritten_too_early_is_a_mistake() -> None:
    bench = Bench()
    bench.values(0)[...] = 1
    bench.cuda.copy(bench.a, bench.part(0), BYTES, bench.one)
    bench.values(0)[...] = 2
    with pytest.raises(Mistake, match="host memory was overwritten"):
        bench.standin.finish()


def test_host_memory_is_nan_until_a_copy_to_it_is_done() -> None:
    bench = Bench()
    bench.cuda.fill(bench.a, 0, BYTES, bench.one)
    bench.cuda.copy(bench.part(0), bench.a, BYTES, bench.one)
    assert np.isnan(bench.values(0)).all()
    bench.values(0)[3] = 1
    with pytest.raises(Mistake, match="host memory was written"):
        bench.standin.finish()


def test_memory_is_found_on_its_own_device_only() -> None:
    bench = Bench(devices=2)
    far = bench.cuda.alloc(1, BYTES)
    with pytest.raises(Mistake, match="dereferences memory of gpu:1"):
        bench.add(far, bench.a, bench.one)
    with pytest.raises(Mistake, match="copy on gpu:0 of memory of gpu:1"):
        bench.cuda.copy(bench.a, far, BYTES, bench.one)
    with pytest.raises(Mistake, match="no memory of this device"):
        bench.cuda.fill(Pointer(bench.a.address + BYTES, 0, BYTES), 0, BYTES, bench.one)
    with pytest.raises(Mistake, match="beyond its end"):
        bench.cuda.fill(bench.a, 0, BYTES + 1, bench.one)
    bench.standin.mistakes.clear()
    there = bench.cuda.stream(1)
    bench.cuda.fill(far, 3, BYTES, there)
    event = bench.cuda.event(1)
    bench.cuda.record(event, there)
    bench.cuda.wait(bench.one, event)
    bench.cuda.copy_peer(bench.a, far, BYTES, bench.one)
    bench.standin.finish()
    assert set(bench.standin.bytes_at(bench.a)) == {3}


@SEEDS
def test_a_table_has_to_be_in_memory_before_the_kernel_reads_it(seed: int) -> None:
    bench = Bench(seed)
    cuda = bench.cuda
    out, table = cuda.alloc(0, BYTES), cuda.alloc(0, 16)
    bench.values(0)[...], bench.values(1)[...] = 1, 2
    cuda.copy(bench.a, bench.part(0), BYTES, bench.one)
    cuda.copy(bench.b, bench.part(1), BYTES, bench.one)
    addresses = np.array([bench.a.address, bench.b.address], np.uint64)
    cuda.copy(table, HostMemory(address_of(addresses), 16), 16, bench.one)
    listed = Table(table, (Read, Read), (bench.a.address, bench.b.address), (BYTES, BYTES))
    cuda.launch(bench.loaded, "sum", [listed, Write(out, BYTES), np.int32(2)], N, bench.one)
    bench.standin.finish()
    assert np.frombuffer(bench.standin.bytes_at(out), np.float32).tolist() == [3.0] * N
    swapped = replace(listed, addresses=listed.addresses[::-1])
    cuda.launch(bench.loaded, "sum", [swapped, Write(out, BYTES), np.int32(2)], N, bench.one)
    with pytest.raises(Mistake, match="table in memory"):
        bench.standin.finish()


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("alloc", lambda it: it.cuda.alloc(0, 8)),
        ("free", lambda it: it.cuda.free(it.a)),
        ("register", lambda it: it.cuda.register(HostMemory(address_of(np.zeros(8)), 64))),
        ("unregister", lambda it: it.cuda.unregister(it.host)),
        ("load", lambda it: it.cuda.load(PROGRAM, 0)),
        ("synchronize", lambda it: it.cuda.synchronize(it.event)),
        ("enable_peer", lambda it: it.cuda.enable_peer(0, 0)),
        ("copy in", lambda it: it.cuda.copy(it.a, HostMemory(address_of(np.zeros(8)), 8), 8, it.one)),
        ("copy out", lambda it: it.cuda.copy(HostMemory(address_of(np.zeros(8)), 8), it.a, 8, it.one)),
    ],
)
def test_what_may_take_long_is_a_mistake_while_the_thread_holds_the_lock_of_an_order(
    name: str, made: Callable[[Bench], object]
) -> None:
    bench = Bench()
    order = StreamOrdering(bench.cuda, wait_s=60)
    with order.locked():
        bench.cuda.fill(bench.a, 0, BYTES, bench.one)
        with ThreadPoolExecutor(1) as thread:  # another thread holds nothing
            thread.submit(bench.cuda.alloc, 0, 8).result(scaled(60))
        with pytest.raises(Mistake, match="^%s .*while the thread holds the lock" % name):
            made(bench)
        with outside_of_locks():
            bench.cuda.alloc(0, 8)
    bench.cuda.alloc(0, 8)
    with pytest.raises(Mistake):
        bench.standin.finish()


def test_a_kernel_that_does_not_write_all_leaves_nan() -> None:
    bench = Bench()
    bench.cuda.fill(bench.a, 0, BYTES, bench.one)
    bench.cuda.launch(bench.loaded, "half", [Write(bench.a, BYTES)], N, bench.one)
    bench.standin.finish()
    assert np.isnan(np.frombuffer(bench.standin.bytes_at(bench.a), np.float32)).sum() == N // 2


def test_a_kernel_that_writes_what_it_only_reads_is_a_mistake() -> None:
    bench = Bench()
    bench.cuda.fill(bench.a, 1, BYTES, bench.one)
    bench.cuda.fill(bench.b, 1, BYTES, bench.one)
    bench.cuda.launch(bench.loaded, "wrong", [Read(bench.a, BYTES), Read(bench.b, BYTES)], N, bench.one)
    with pytest.raises(Mistake, match="only reads"):
        bench.standin.finish()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (lambda a: [Read(a, BYTES)], "takes 2 arguments and n, not 1"),
        (lambda a: [Read(a, BYTES), Write(a, BYTES)], "is given as Write"),
        (lambda a: [Read(a, BYTES), np.float32(1)], "is no float32"),
    ],
)
def test_arguments_that_do_not_fit_the_kernels_parameters_are_a_mistake(arguments: Any, text: str) -> None:
    bench = Bench()
    with pytest.raises(Mistake, match=text):
        bench.cuda.launch(bench.loaded, "add", arguments(bench.a), N, bench.one)
