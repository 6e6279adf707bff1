"""Page-locked memory: which blocks are, when they are, and that none goes while a copy is under way."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cudastandin import Mistake, StandIn, outside_of_locks
from gpukit import Machine, values

from distrun_runtime.arrays import segments
from distrun_runtime.arrays.cuda import CudaError, Driver
from distrun_runtime.arrays.gpumemory import PageLocked
from distrun_runtime.arrays.segments import BLOCKS, PAGE, Pool

F32 = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small blocks, none of other tests, and no watcher that stays."""
    monkeypatch.setattr(segments, "FIRST_BYTES", 16 * PAGE)
    monkeypatch.setattr(BLOCKS, "_known", {})
    yield
    BLOCKS.watch(None)


def read_only(nbytes: int = PAGE) -> tuple[mmap.mmap, Any]:
    """Return a mapping as that of a peer's segment, and the same memory to write."""
    fd = os.memfd_create("test")
    os.truncate(fd, nbytes)
    writable, mapped = mmap.mmap(fd, nbytes), mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
    os.close(fd)
    return mapped, np.frombuffer(writable, F32)


def array_of(pool: Pool, size: int = 1000) -> Any:
    made = pool.empty((size,), F32)
    assert made is not None
    return made


def test_blocks_are_page_locked_once_when_a_gpu_is_first_used_and_later_ones_when_they_are_made() -> None:
    pool, machine = Pool(), Machine(blocks=BLOCKS)
    before = array_of(pool)
    assert machine.standin.calls["register"] == 0
    device = machine.gpus.get(0)
    machine.gpus.get(1)
    assert machine.standin.calls["register"] == 1
    after = array_of(pool, 32 * PAGE)  # a block of its own
    assert machine.standin.calls["register"] == 2
    given = values((1000,), F32)
    before[...] = given
    for _ in range(3):
        array = device.put(before)
        device.read(array, after[:1000])
        again = array_of(pool)
        device.read(array, again)
        assert after[:1000].tobytes() == again.tobytes() == given.tobytes()
    assert machine.standin.calls["register"] == 2
    machine.finish()


def test_a_peers_block_is_registered_as_read_only_and_is_read_directly() -> None:
    machine = Machine(blocks=BLOCKS)
    device = machine.gpus.get(0)
    mapped, there = read_only()
    there[:100] = given = values((100,), F32)
    BLOCKS.add(mapped, is_readonly=True)
    array = device.elements(memoryview(mapped)[:400], F32)
    assert device.host(array).tobytes() == given.tobytes()
    assert machine.standin.calls["register"] == 2  # the block, and staging for the answer
    with pytest.raises(Mistake, match="registered as read-only"):
        device.read(array, np.frombuffer(mapped, F32)[:100])
    machine.standin.mistakes.clear()
    machine.finish()


def test_where_a_gpu_cannot_register_read_only_memory_copies_go_by_staging() -> None:
    machine = Machine(blocks=BLOCKS, locks_readonly=False)
    device = machine.gpus.get(0)
    mapped, there = read_only()
    there[:100] = given = values((100,), F32)
    BLOCKS.add(mapped, is_readonly=True)
    memory = np.frombuffer(mapped, F32)[:100]
    assert not machine.gpus.locked.covers(memory)
    assert device.host(device.put(memory)).tobytes() == given.tobytes()
    machine.finish()


def test_read_only_memory_is_not_registered_without_the_flag() -> None:
    machine = Machine()
    mapped, _ = read_only()
    assert not machine.gpus.locked.lock(np.frombuffer(mapped, np.uint8))


def test_a_block_that_goes_is_unregistered_before_it_is_unmapped() -> None:
    machine = Machine(blocks=BLOCKS)
    machine.gpus.get(0)
    mapped, _ = read_only()
    BLOCKS.add(mapped, is_readonly=True)
    address = segments.address_of(mapped)
    BLOCKS.drop(mapped)
    assert machine.standin.calls["unregister"] == 1
    assert is_mapped(address)  # somebody may still refer to it
    del mapped
    gc.collect()
    assert not is_mapped(address)
    machine.finish()


def test_a_block_that_nobody_has_told_of_stays_mapped() -> None:
    machine = Machine(blocks=BLOCKS)
    machine.gpus.get(0)
    array = array_of(Pool())
    address = segments.address_of(array)
    del array
    gc.collect()
    assert is_mapped(address)
    machine.finish()


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as file:
        places = [line.split()[0].split("-") for line in file]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in places)


class AtCopy:
    """A driver that does something after the first copy was given."""

    def __init__(self, standin: StandIn, what: Callable[[], None]) -> None:
        self._standin = standin
        self._what = [what]

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._standin, name)
        if name != "copy":
            return method

        def called(*arguments: object) -> object:
            result = method(*arguments)
            if self._what:
                with outside_of_locks():  # as another thread does it
                    self._what.pop()()
            return result

        return called


def block_goes_during_a_copy(is_out: bool) -> Machine:
    memory = values((1000,), F32)
    machine: list[Machine] = []

    def driver(standin: StandIn) -> Driver:
        made: Any = AtCopy(standin, lambda: machine[0].gpus.locked.unlock(memory))
        return made

    machine.append(Machine(driver=driver))
    locked, device = machine[0].gpus.locked, machine[0].gpus.get(0)
    assert locked.lock(memory)
    array, expected = device.empty((1000,), F32), memory.copy()
    if is_out:
        device.read_all([(array, memory)])
    else:
        device.write_all([(array, memory)])
        assert device.host(array).tobytes() == expected.tobytes()
    assert machine[0].standin.calls["unregister"] == 1
    assert not locked.covers(memory)
    device.write(array, expected)  # by staging
    assert device.host(array).tobytes() == expected.tobytes()
    machine[0].finish()
    return machine[0]


@pytest.mark.parametrize("is_out", [False, True])
def test_a_block_that_goes_stays_page_locked_until_copies_are_over(
    monkeypatch: pytest.MonkeyPatch, is_out: bool
) -> None:
    block_goes_during_a_copy(is_out)
    take = PageLocked.take

    def careless(self: PageLocked, memory: Any) -> Any:
        place = take(self, memory)
        if place is not None:
            place.copies -= 1
        return place

    monkeypatch.setattr(PageLocked, "take", careless)
    with pytest.raises(Mistake, match="unregistered before the host knows"):
        block_goes_during_a_copy(is_out)


@pytest.mark.parametrize("is_out", [False, True])
def test_after_an_error_page_locked_memory_is_not_used_any_more(is_out: bool) -> None:
    machine = Machine(1)
    device, memory = machine.gpus.get(0), values((2000,), F32)
    assert machine.gpus.locked.lock(memory)
    arrays = [device.empty((1000,), F32) for _ in range(2)]
    machine.standin.fail("copy", 2, code=1)
    pairs = list(zip(arrays, (memory[:1000], memory[1000:]), strict=True))
    with pytest.raises(CudaError, match="cudaErrorInvalidValue"):
        device.read_all(pairs) if is_out else device.write_all(pairs)
    memory[...] = 1  # nothing is under way
    machine.gpus.locked.unlock(memory)
    assert machine.standin.calls["unregister"] == 1
    machine.finish()


def test_a_forked_child_locks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(blocks=BLOCKS)
    machine.gpus.get(0)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    array_of(Pool())
    assert machine.standin.calls["register"] == 0


def test_a_process_that_uses_no_gpu_loads_nothing_for_its_blocks() -> None:
    code = (
        "import sys, numpy\nfrom distrun_runtime.arrays.segments import Pool\nimport distrun_runtime.transport.bulk\n"
        "Pool().empty((3,), numpy.dtype('f4'))\nprint(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {name for name in loaded if name.rpartition(".")[2] in ("cuda", "gpu", "gpumemory", "cupy")}
