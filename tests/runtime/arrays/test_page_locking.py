"""Page-locked memory: which blocks are, when they are, and that none goes while a copy is under way."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from children import exit_code_of
from cudastandin import Mistake, StandIn, outside_of_locks
from gpukit import Machine, values
from slowness import scaled

from distrun_runtime.arrays import shared_memory
from distrun_runtime.arrays.cuda import CudaError, Driver
from distrun_runtime.arrays.gpu_memory import PageLocked
from distrun_runtime.arrays.shared_memory import BLOCKS, PAGE, Pool

F32 = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small blocks, none of other tests, and no watcher that stays."""
    monkeypatch.setattr(shared_memory, "FIRST_BYTES", 16 * PAGE)
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
    address = shared_memory.address_of(mapped)
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
    address = shared_memory.address_of(array)
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
    gc.collect()  # What other tests have left is not freed by this child.
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(shared_memory, "own_pid", lambda: 1)
    array_of(Pool())
    assert machine.standin.calls["register"] == 0


def test_a_child_that_is_forked_while_a_block_is_page_locked_makes_no_call_and_waits_for_nobody() -> None:
    machine, driver = at_register()
    machine.gpus.get(0)
    pool, codes = Pool(), list[int]()

    def use() -> None:
        signal.alarm(20)
        before = dict(machine.standin.calls)
        assert pool.empty((3,), F32) is None
        assert not pool.reserve(PAGE)
        pool.unreserve()
        pool.close()
        assert machine.standin.calls == before

    driver.what = lambda: codes.append(exit_code_of(use))
    array = array_of(pool)
    assert codes == [0]
    assert machine.gpus.locked.covers(array)
    machine.finish()


class AtRegister:
    """A driver that does something while memory is registered, once."""

    def __init__(self, standin: StandIn) -> None:
        self._standin = standin
        self.what: Callable[[], None] | None = None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._standin, name)
        if name != "register":
            return method

        def called(*arguments: object) -> object:
            what, self.what = self.what, None
            if what is not None:
                what()
            return method(*arguments)

        return called


def at_register() -> tuple[Machine, AtRegister]:
    made: list[Any] = []

    def driver(standin: StandIn) -> Driver:
        made.append(AtRegister(standin))
        driver: Driver = made[0]
        return driver

    return Machine(driver=driver, blocks=BLOCKS), made[0]


def in_another_thread(what: Callable[[], object]) -> None:
    thread = threading.Thread(target=what, daemon=True)
    thread.start()
    thread.join(scaled(20))
    assert not thread.is_alive(), "it waits for the thread that registers memory"


@pytest.mark.parametrize("is_first", [True, False])
def test_while_a_block_is_page_locked_other_threads_use_it_and_the_devices(is_first: bool) -> None:
    machine, driver = at_register()
    pool, given = Pool(), values((1000,), F32)
    done: list[bytes] = []

    def use() -> None:
        array = array_of(pool)
        array[...] = given
        device = machine.gpus.get(1)
        done.append(device.host(device.put(array)).tobytes())

    if is_first:
        array_of(pool)
    else:
        machine.gpus.get(0)
    driver.what = lambda: in_another_thread(use)
    if is_first:
        machine.gpus.get(0)
    else:
        array_of(pool)
    assert done == [given.tobytes()]
    assert machine.gpus.locked.covers(array_of(pool))
    machine.finish()


@pytest.mark.parametrize("is_pool", [True, False])
def test_a_block_that_goes_while_it_is_page_locked_is_unregistered(is_pool: bool) -> None:
    machine, driver = at_register()
    machine.gpus.get(0)
    pool, (mapped, _) = Pool(), read_only()
    driver.what = lambda: in_another_thread(pool.close if is_pool else lambda: BLOCKS.drop(mapped))
    if is_pool:
        array_of(pool)
    else:
        BLOCKS.add(mapped, is_readonly=True)
    assert (machine.standin.calls["register"], machine.standin.calls["unregister"]) == (1, 1)
    machine.finish()


def test_a_block_that_is_made_while_its_pool_is_closed_does_not_stay_page_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, pool = Machine(blocks=BLOCKS), Pool()
    machine.gpus.get(0)
    add = BLOCKS.add

    def late(memory: mmap.mmap) -> None:
        pool.close()  # by another thread, before this one has told of the block
        add(memory)

    monkeypatch.setattr(BLOCKS, "add", late)
    array = array_of(pool)
    assert not machine.gpus.locked.covers(array)
    assert (machine.standin.calls["register"], machine.standin.calls["unregister"]) == (1, 1)
    machine.finish()


def test_a_closed_pool_is_page_locked_no_more_and_its_arrays_go_by_staging() -> None:
    machine = Machine(blocks=BLOCKS)
    pool, device = Pool(), machine.gpus.get(0)
    array, given = array_of(pool), values((1000,), F32)
    array[...] = given
    pool.close()
    assert machine.standin.calls["unregister"] == 1
    assert device.host(device.put(array)).tobytes() == given.tobytes()
    address = shared_memory.address_of(array)
    del array
    gc.collect()
    assert not is_mapped(address)
    machine.finish()


def test_reserved_memory_is_page_locked_at_once_and_arrays_in_it_register_nothing() -> None:
    machine, pool = Machine(blocks=BLOCKS), Pool()
    device = machine.gpus.get(0)
    assert pool.reserve(40 * PAGE)
    registered = machine.standin.calls["register"]
    for _ in range(3):
        arrays = [array_of(pool, 10 * PAGE // 4) for _ in range(4)]
        for array in arrays:
            device.read(device.zeros(array.shape, F32), array)
        del arrays, array
    assert machine.standin.calls["register"] == registered
    machine.finish()


def test_what_cannot_be_page_locked_is_said_once_with_the_reason() -> None:
    machine, said = Machine(blocks=BLOCKS), list[str]()
    BLOCKS.log_to(said.append)
    machine.gpus.get(0)
    machine.standin.fail("register", 1, code=2)
    machine.standin.fail("register", 2, code=2)
    pool = Pool()
    kept = [array_of(pool), array_of(pool, 32 * PAGE)]
    assert machine.standin.calls["register"] == 2
    assert len(kept) == 2
    [text] = said
    assert text.startswith("%d bytes of shared memory are not page-locked" % (16 * PAGE))
    assert "cudaErrorMemoryAllocation" in text
    assert "ulimit -l" in text
    machine.finish()


@pytest.mark.parametrize("at", [1, 2])
def test_memory_that_cannot_be_unregistered_is_kept_and_holds_up_no_other(at: int) -> None:
    machine = Machine(1)
    locked, device = machine.gpus.locked, machine.gpus.get(0)
    memories = [values((1000,), F32) for _ in range(2)]
    assert all(locked.lock(memory) for memory in memories)
    array = device.zeros((1000,), F32)
    machine.standin.fail("unregister", at, code=1)
    with pytest.raises(CudaError, match="unregister"), locked.copies(device._outward) as copies:
        for memory in memories:
            assert copies.takes(memory.view(np.uint8))
            locked.unlock(memory)
    assert machine.standin.calls["unregister"] == 2
    assert [len(machine.standin._registered), len(locked._ending)] == [1, 1]
    for memory in memories:
        device.read(array, memory)  # by staging
        assert not memory.any()
    machine.standin.mistakes.clear()
