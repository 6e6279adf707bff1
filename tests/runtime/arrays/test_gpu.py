"""Devices `gpu:N`: the bytes of cpu devices, whatever order the GPU works in."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from gpuhistories import arrays_come_and_go, memory_is_given_back, values_come_from_other_devices
from gpukit import Machine, values
from slowness import scaled
from sums import add as add_to
from sums import total as total_of

from distrun_runtime.arrays import dtypes, gpu, gpu_memory, gpu_programs
from distrun_runtime.arrays.cuda import CudaError, CudaOutOfMemory, Read, Write
from distrun_runtime.arrays.device import CpuDevice, Device
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.arrays.gpu import GpuArray, GpuDevice
from distrun_runtime.arrays.gpu_memory import Staging
from distrun_runtime.errors import KVError, StoreClosed

CPU = CpuDevice()
SEEDS = pytest.mark.parametrize("seed", range(3))
F32 = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces, so that small arrays have several."""
    monkeypatch.setattr(gpu, "RING_BYTES", 4096)
    monkeypatch.setattr(Staging.__init__, "__defaults__", (1024, 2))


def same(one: Array, other: Array) -> None:
    assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert one.tobytes() == other.tobytes()


@SEEDS
@pytest.mark.parametrize("dtype", dtypes.NAMES)
def test_arrays_come_back_as_they_were_put(dtype: str, seed: int) -> None:
    machine = Machine(seed=seed)
    device = machine.gpus.get(0)
    for shape in ((), (0,), (1000,), (3, 5, 7), (2, 0, 3)):
        given = values(shape, dtypes.parse(dtype), 1)
        array = device.put(given)
        assert (array.shape, array.dtype) == (given.shape, given.dtype)
        same(device.host(array), given)
    out = np.zeros((7, 10), F32)
    given = values((7, 5), F32)
    device.read(device.put(given), out[:, ::2])
    assert np.array_equal(out[:, ::2], given)
    assert not out[:, 1::2].any()
    turned = values((5, 4), F32).T
    same(device.host(device.put(turned)), np.ascontiguousarray(turned))
    machine.finish()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "uint64"])
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_sums_have_the_bytes_of_the_cpus(dtype: str, count: int) -> None:
    machine = Machine(seed=count)
    device = machine.gpus.get(1)
    parts = [values((33,), dtypes.parse(dtype), seed) for seed in range(count)]
    expected = total_of(CPU, parts)
    mine = [device.put(part) for part in parts]
    same(device.host(total_of(device, mine)), expected)
    same(device.host(total_of(device, parts)), expected)  # from the host
    out = device.empty((33,), dtypes.parse(dtype))
    device.sum(mine, out)
    same(device.host(out), expected)
    device.sum(mine, mine[-1])  # into one of them
    same(device.host(mine[-1]), expected)
    machine.finish()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("wide", [(True, False, False), (False, True, True), (True, True, True)])
def test_sums_of_halves_and_float32_are_rounded_once(dtype: str, wide: tuple[bool, ...]) -> None:
    machine = Machine()
    device, kind = machine.gpus.get(0), dtypes.parse(dtype)
    parts = [values((100,), F32 if is_wide else kind, seed) for seed, is_wide in enumerate(wide)]
    expected, out = np.empty(100, kind), device.empty((100,), kind)
    CPU.sum(parts, expected)
    device.sum([device.put(part) for part in parts], out)
    same(device.host(out), expected)
    sums = device.empty((100,), F32)
    halves = [values((100,), kind, seed) for seed in range(3)]
    device.sum([device.put(part) for part in halves], sums)
    total = dtypes.widen(halves[0]) + dtypes.widen(halves[1]) + dtypes.widen(halves[2])
    same(device.host(sums), total)
    mixed = np.empty(100, F32)
    CPU.sum(parts, mixed)
    device.sum([device.put(part) for part in parts], sums)
    same(device.host(sums), mixed)
    machine.finish()


@SEEDS
@pytest.mark.parametrize("names", [((0, None), (1, None)), ((0, 0), (0, 1))])
def test_values_of_other_devices_and_of_the_host_are_summed_in_order(seed: int, names: Any) -> None:
    machine = Machine(seed=seed)
    here, there = (machine.gpus.get(*name) for name in names)
    given = [values((3000,), F32, number) for number in range(4)]
    expected = total_of(CPU, given)
    mixed = [there.put(given[0]), given[1], here.put(given[2]), there.put(given[3])]
    same(here.host(total_of(here, mixed)), expected)
    into = here.put(given[0])
    add_to(here, into, mixed[3])
    add_to(here, into, given[1])
    same(here.host(into), total_of(CPU, [given[0], given[3], given[1]]))
    same(here.host(here.put(mixed[0])), given[0])
    machine.finish()
    assert machine.standin.enabled == ({(0, 1)} if names[0][1] is None else set())


def test_devices_that_are_no_peers_copy_all_the_same() -> None:
    machine = Machine(peers=[])
    here, there = machine.gpus.get(0), machine.gpus.get(1)
    given = values((100,), F32)
    same(here.host(here.put(there.put(given))), given)
    assert not machine.standin.enabled


def test_a_peer_too_many_is_copied_from_all_the_same() -> None:
    machine = Machine()
    here, there = machine.gpus.get(0), machine.gpus.get(1)
    machine.standin.fail("enable_peer", code=711)
    given = values((100,), F32)
    theirs = there.put(given)
    for _ in range(2):
        same(here.host(here.put(theirs)), given)
    assert not machine.standin.enabled
    machine.finish()


@pytest.mark.parametrize("seed", range(8))
def test_memory_of_a_launch_that_failed_after_it_was_filled_with_zeros_is_used_again(seed: int) -> None:
    machine = Machine(1, seed=seed)
    device, given = machine.gpus.get(0), values((100,), F32)
    device.prepare([F32])
    out = device.empty((100,), F32)
    machine.standin.fail("launch", code=1)
    arguments: list[Any] = [Read(out.pointer, out.nbytes), np.float32(2), Write(out.pointer, out.nbytes)]
    with pytest.raises(CudaError):
        device.launch(gpu_programs.sums("f32", "f32"), "scale", arguments, 100, writes=[out], zeroed=[out])
    del out
    gc.collect()  # the error's frames refer to it
    same(device.host(device.put(given)), given)
    machine.finish()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "int32", "uint64"])
@pytest.mark.parametrize("factor", [0.25, -3.0])
def test_scaling_has_the_bytes_of_the_cpus(dtype: str, factor: float) -> None:
    kind = dtypes.parse(dtype)
    factor = abs(factor) if kind.kind == "u" else factor  # numpy refuses a negative one
    machine = Machine()
    device = machine.gpus.get(0)
    expected = values((77,), kind)
    array = device.put(expected)
    CPU.scale(expected, factor)
    device.scale(array, factor)
    same(device.host(array), expected)
    machine.finish()


def test_parts_of_an_array_share_its_memory() -> None:
    machine = Machine()
    device = machine.gpus.get(0)
    given = values((6, 4), F32)
    array = device.put(given)
    flat = array.reshape(-1)
    assert (len(flat), flat[4:8].shape, flat[-4:].pointer.nbytes, flat[5:3].size) == (24, (4,), 16, 0)
    device.scale(flat[4:8], 0.0)
    given[1] = 0
    np.testing.assert_array_equal(device.host(array), given)
    same(device.host(flat.reshape(3, -1)), device.host(array).reshape(3, 8))
    with pytest.raises(TypeError, match="cut by slices"):
        array[0:1]
    with pytest.raises(ValueError, match="cannot reshape 24"):
        array.reshape(5, 5)
    assert "gpu:0" in repr(array)
    machine.finish()


@SEEDS
def test_bytes_from_the_network_may_be_overwritten_at_once(seed: int) -> None:
    machine = Machine(seed=seed)
    device = machine.gpus.get(0)
    given = values((900,), F32)
    frame = bytearray(given.tobytes())
    array = device.elements(frame, F32)
    frame[:] = bytes(len(frame))
    same(device.host(array), given)
    assert bytes(device.frame(array)) == given.tobytes()
    assert device.elements(b"", F32).size == 0
    machine.finish()


@SEEDS
def test_page_locked_memory_is_copied_without_staging(seed: int) -> None:
    machine = Machine(seed=seed)
    device = machine.gpus.get(0)
    memory = np.zeros(1000, F32)
    assert machine.gpus.locked.lock(memory)
    assert machine.gpus.locked.lock(memory)
    memory[:500] = given = values((500,), F32)
    array = device.put(memory[:500])
    memory[:500] = 0
    device.read(array, memory[500:])
    same(memory[500:], given)
    assert machine.standin.calls["copy"] == 2
    assert not machine.gpus.locked.covers(np.zeros(10, F32))
    machine.finish()


def test_memory_that_cannot_be_page_locked_goes_by_staging() -> None:
    machine = Machine()
    memory = values((100,), F32)
    machine.standin.fail("register", code=1)
    assert not machine.gpus.locked.lock(memory)
    device = machine.gpus.get(0)
    same(device.host(device.put(memory)), memory)
    machine.finish()


def test_a_device_that_was_prepared_page_locks_nothing_with_its_first_copy() -> None:
    machine = Machine()
    device = machine.gpus.get(0)
    device.prepare([F32])
    assert machine.standin.calls["register"] == 1
    memory = values((100,), F32)
    same(device.host(device.put(memory)), memory)
    assert machine.standin.calls["register"] == 1
    machine.finish()


@SEEDS
def test_staging_works_where_nothing_can_be_page_locked(seed: int) -> None:
    machine = Machine(seed=seed)
    machine.standin.fail("register", code=1)
    device = machine.gpus.get(0)
    given = values((1000,), F32)
    for _ in range(2):
        same(device.host(total_of(device, [given, given])), total_of(CPU, [given, given]))
    assert not device._staging.is_locked
    machine.finish()


def test_numpy_does_not_take_it_for_an_array_of_the_host() -> None:
    array = Machine().gpus.get(0).put(np.zeros(3, F32))
    with pytest.raises(TypeError, match="not in the host's memory"):
        np.asarray(array)
    with pytest.raises(TypeError):
        np.zeros(3, F32) + array


# Memory


@SEEDS
def test_memory_is_used_again_and_its_next_user_waits_for_the_last(seed: int) -> None:
    machine = Machine(seed=seed)
    device = machine.gpus.get(0)
    for number in range(6):
        given = [values((500,), F32, number), values((500,), F32, number + 100)]
        total = total_of(device, [device.put(each) for each in given])
        same(device.host(total), total_of(CPU, given))
    del total
    assert machine.standin.calls["alloc"] <= 4
    machine.finish()


@SEEDS
def test_a_pool_that_is_full_has_spare_arrays_dropped_before_it_fails(seed: int) -> None:
    machine = Machine(seed=seed)
    device = machine.gpus.get(0)
    device.pool.limit = 8192
    spare = [device.put(values((1024,), F32)), device.put(values((1024,), F32))]
    device.scale(spare[1], 2.0)  # its memory is given back when that is over
    device.pool.spares = spare.clear
    assert "fix: create a 'local' store" in device.pool.advice, "a worker's, if nobody says something else"
    device.pool.advice = "fix: use less"
    given = values((1500,), F32)
    same(device.host(device.put(given)), given)
    assert spare == []
    with pytest.raises(CudaOutOfMemory, match=r"wanted 12288 bytes, free are 8192 of 8192; fix: use less$"):
        device.empty((3072,), F32)
    machine.finish()


def test_a_pool_keeps_to_its_limit_and_gives_back_what_is_free() -> None:
    machine = Machine(1, memory=1 << 20)
    device = machine.gpus.get(0)
    device.pool.limit = 8192
    kept = device.empty((1024,), F32)
    other = device.empty((512,), F32)
    del other
    assert device.pool.size == 6144
    again = device.empty((1024,), F32)  # only without the free block
    assert device.pool.size == 8192
    with pytest.raises(CudaOutOfMemory, match=r"pool's limit.*wanted 4096 bytes, free are 0 of 8192") as caught:
        device.empty((1024,), F32)
    assert not caught.value.is_sticky
    del kept, again
    assert device.pool.trim() == 8192
    assert machine.standin.used == [0]
    machine.finish()


def test_a_block_that_could_not_be_given_back_is_not_lost() -> None:
    machine = Machine(1)
    device = machine.gpus.get(0)
    kept = [device.empty((100 * each,), F32) for each in (1, 2, 3)]
    size = device.pool.size
    kept.clear()
    machine.standin.fail("free", 2, code=1)
    with pytest.raises(CudaError, match="free on gpu:0"):
        device.pool.trim()
    assert device.pool.trim() < size
    assert (device.pool.size, machine.standin.used) == (0, [0])


def test_out_of_memory_is_tried_again_without_the_free_blocks() -> None:
    machine = Machine(1, memory=10000)
    device = machine.gpus.get(0)
    device.scale(device.empty((1500,), F32), 2.0)  # 6,144 bytes, and in use when they are dropped
    gc.collect()
    kept = device.empty((2000,), F32)
    assert kept.size == 2000
    with pytest.raises(CudaOutOfMemory, match="wanted 12288 bytes, free are 1808 of 10000"):
        device.empty((3000,), F32)
    machine.finish()


def test_sizes_of_blocks_are_few_and_waste_little() -> None:
    for nbytes in [0, 1, 511, 512, 513, 4096, 5000, 1 << 20, (1 << 20) + 1, 10**9]:
        size = gpu_memory.rounded(nbytes)
        assert nbytes <= size <= max(512, nbytes * 9 // 8 + 512)
        assert size % 512 == 0
    assert len({gpu_memory.rounded(nbytes) for nbytes in range(1 << 16, 1 << 17)}) <= 9


# Buckets


def bucket_of(lists: Sequence[Sequence[Array]]) -> Array:
    return np.concatenate([total_of(CPU, parts).reshape(-1) for parts in lists])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "int64"])
@pytest.mark.parametrize("count", [1, 2, 8, 9])
def test_a_gathered_list_has_the_bytes_of_the_cpus_sums(dtype: str, count: int) -> None:
    machine, kind = Machine(seed=count), dtypes.parse(dtype)
    device = machine.gpus.get(0)
    shapes = [(33,), (), (0,), (3, 50), (2500,)]
    given = [[values(shape, kind, 10 * place + part) for part in range(count)] for place, shape in enumerate(shapes)]
    # Behind one element more: no address is a multiple of 16 bytes.
    whole = [
        [device.put(np.append(part.reshape(-1)[:1], part)) if part.size else device.put(part) for part in parts]
        for parts in given
    ]
    lists = [
        [array[1:].reshape(part.shape) if part.size else array for array, part in zip(arrays, parts, strict=True)]
        for arrays, parts in zip(whole, given, strict=True)
    ]
    expected = bucket_of(given)
    bucket = device.empty((expected.size + 1,), kind)[1:]
    device.gather(lists, bucket)
    same(device.host(bucket), expected)
    outs = [device.empty(shape, kind) for shape in shapes]
    device.scatter(bucket, outs)
    for parts, out in zip(given, outs, strict=True):
        same(device.host(out), total_of(CPU, parts))
    assert machine.standin.calls["launch"] == 2
    machine.finish()


def test_halves_are_gathered_in_float32_and_rounded_once() -> None:
    machine = Machine()
    device = machine.gpus.get(0)
    given = [[values((size,), np.dtype(np.float16), size + part) for part in range(3)] for size in (40, 5)]
    bucket = device.empty((45,), F32)
    device.gather([[device.put(part) for part in parts] for parts in given], bucket)
    sums = [sum((dtypes.widen(part) for part in parts[1:]), dtypes.widen(parts[0])) for parts in given]
    same(device.host(bucket), np.concatenate(sums))
    machine.finish()


@SEEDS
def test_tensors_of_a_list_may_have_different_numbers_of_parts_from_everywhere(seed: int) -> None:
    machine = Machine(seed=seed)
    here, there = machine.gpus.get(0), machine.gpus.get(1)
    sizes = [(1, 30), (2, 3000), (2, 4), (3, 700), (1, 0), (2, 1)]
    given = [[values((size,), F32, 10 * size + part) for part in range(count)] for count, size in sizes]
    kinds = [here.put, there.put, np.copy]
    lists: list[list[Any]] = [
        [kinds[(place + part) % 3](each) for part, each in enumerate(parts)] for place, parts in enumerate(given)
    ]
    expected = bucket_of(given)
    bucket = here.empty((expected.size,), F32)
    for _ in range(2):
        here.gather(lists, bucket)
        same(here.host(bucket), expected)
        here.scale(bucket, 0.0)
    machine.finish()


def test_a_training_loop_uploads_its_tables_once() -> None:
    machine = Machine()
    device = machine.gpus.get(0)
    given = [[values((size,), F32, size + part) for part in range(2)] for size in (30, 40)]
    lists = [[device.put(part) for part in parts] for parts in given]
    bucket, outs = device.empty((70,), F32), [device.empty((size,), F32) for size in (30, 40)]
    device.gather(lists, bucket)
    device.scatter(bucket, outs)
    before = machine.standin.calls["copy"]
    for _ in range(3):
        device.gather(lists, bucket)
        device.scatter(bucket, outs)
    assert machine.standin.calls["copy"] == before
    size = device.pool.size
    del lists, bucket, outs
    assert device.pool.trim() == size  # the tables, too
    machine.finish()


def test_sums_of_many_or_mixed_parts_upload_their_tables_once() -> None:
    machine = Machine()
    device = machine.gpus.get(0)
    many = [values((20,), F32, seed) for seed in range(9)]
    for given in (many, [values((20,), np.dtype(np.float16) if seed % 2 else F32, seed) for seed in range(3)]):
        expected, parts = np.empty(20, given[-2].dtype), [device.put(each) for each in given]
        CpuDevice().sum(given, expected)
        out = device.empty((20,), expected.dtype)
        device.sum(parts, out)
        before = machine.standin.calls["copy"]
        for _ in range(2):
            device.sum(parts, out)
        assert machine.standin.calls["copy"] == before
        same(device.host(out), expected)
    device.sum(parts * 3, out)
    with pytest.raises(ValueError, match="different dtypes"):
        device.gather([parts * 3], out)  # whose table would be the same
    machine.finish()


@pytest.mark.parametrize("limit", ["LISTS", "LISTED_BYTES"])
def test_no_more_tables_are_kept_than_a_limit_says(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of two tensors: four addresses and three offsets.
    monkeypatch.setattr(gpu, limit, {"LISTS": 2, "LISTED_BYTES": 2 * 56}[limit])
    machine = Machine()
    device = machine.gpus.get(0)
    arrays = [device.put(values((10,), F32, seed)) for seed in range(6)]
    bucket = device.empty((20,), F32)
    for first in range(5):
        device.gather([[arrays[first]], [arrays[first + 1]]], bucket)
        assert len(device._lists) == 1 + first % 2
    before = machine.standin.calls["copy"]
    device.gather([[arrays[4]], [arrays[5]]], bucket)
    assert machine.standin.calls["copy"] == before
    machine.finish()


def test_a_list_that_does_not_fit_is_refused() -> None:
    device = Machine().gpus.get(0)
    ten, half = device.put(values((10,), F32)), device.put(values((10,), np.dtype(np.float16)))
    bucket = device.empty((20,), F32)
    calls: list[tuple[str, Callable[[], None]]] = [
        ("tensors of 10 elements, and a bucket of 20", lambda: device.gather([[ten]], bucket)),
        ("tensors of 10 elements, and a bucket of 20", lambda: device.gather([[np.ones(10, np.float32)]], bucket)),
        ("tensors of 30 elements, and a bucket of 20", lambda: device.gather([[ten], [ten, ten], [ten]], bucket)),
        ("different sizes", lambda: device.gather([[ten, ten[:5]], [ten, ten]], bucket)),
        ("different sizes", lambda: device.gather([[ten, np.ones(5, np.float32)], [ten, ten]], bucket)),
        ("different dtypes", lambda: device.gather([[ten], [half]], bucket)),
        ("no parts", lambda: device.gather([[ten], []], bucket)),
        ("tensors of 10 elements", lambda: device.scatter(bucket, [ten])),
        ("tensors of this dtype on gpu:0", lambda: device.scatter(bucket, [ten, half])),
    ]
    for text, call in calls:
        with pytest.raises(ValueError, match=text):
            call()
    device.gather([], device.empty((0,), F32))
    device.gather([[np.ones(0, np.float32)]], device.empty((0,), F32))
    device.scatter(device.empty((0,), F32), [])


def test_large_copies_are_made_in_equal_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PIECE_BYTES", 1000)
    machine = Machine()
    device, memory = machine.gpus.get(0), values((1200,), F32)
    assert machine.gpus.locked.lock(memory)
    given, array = memory.copy(), device.empty((900,), F32)
    device.write_all([(array, memory[:900])])
    assert machine.standin.calls["copy"] == 4
    assert machine.standin.calls["synchronize"] <= 1
    device.read_all([(array[:300], memory[900:])])
    same(memory[900:], given[:300])
    machine.finish()


# Whoever calls


def test_threads_may_share_a_device() -> None:
    machine = Machine(seed=1)
    device = machine.gpus.get(0)
    device.prepare([F32])
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for turn in range(5):
                given = [values((700,), F32, 10 * number + turn + each) for each in range(3)]
                same(device.host(total_of(device, given)), total_of(CPU, given))
        except BaseException as err:
            wrong.append(err)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(60))
    assert not wrong
    machine.finish()


@pytest.mark.parametrize("history", [arrays_come_and_go, values_come_from_other_devices, memory_is_given_back])
@pytest.mark.parametrize("name", ["alloc", "free", "copy", "copy_peer", "launch", "record", "wait", "synchronize"])
def test_a_call_that_fails_once_leaves_everything_in_order(history: Callable[[Machine], None], name: str) -> None:
    """Whoever catches the error can go on; nothing that was under way is forgotten."""
    machine = Machine()
    history(machine)
    for nth in range(1, machine.standin.calls[name] + 1):
        machine = Machine()
        machine.standin.fail(name, nth, code=1)
        with pytest.raises(CudaError, match="cudaErrorInvalidValue"):
            history(machine)
        history(machine)
        machine.finish()


@pytest.mark.parametrize("devices", [0, 1, 8])
def test_a_gpu_that_is_not_there_is_refused(devices: int) -> None:
    gpus = Machine(devices).gpus
    for number in range(devices):
        assert gpus.get(number).name == "gpu:%d" % number
    seen = {0: "none", 1: "only gpu:0", 8: "gpu:0 to gpu:7"}[devices]
    with pytest.raises(KVError, match="no device gpu:%d: this process sees %s " % (devices, seen)):
        gpus.get(devices)


def test_after_an_illegal_address_everything_fails_by_its_name() -> None:
    machine = Machine()
    device = machine.gpus.get(0)
    array = device.put(values((100,), F32))
    machine.standin.fail_operation()
    with pytest.raises(CudaError, match="cudaErrorIllegalAddress"):
        device.host(array)
    calls: list[Callable[[], object]] = [
        lambda: device.put(np.zeros(3)),
        lambda: device.empty((3,), F32),
        lambda: device.scale(array, 2.0),
        lambda: device.host(array),
        lambda: machine.gpus.get(1),
        device.synchronize,
    ]
    for call in calls:
        with pytest.raises(CudaError, match=r"cudaErrorIllegalAddress .*cannot use the GPU any more"):
            call()


def test_in_a_forked_child_every_call_says_so_and_none_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    device = machine.gpus.get(0)
    array: Any = device.put(values((100,), F32))
    device.synchronize()
    before = sum(machine.standin.calls.values())
    monkeypatch.setattr(machine.cuda, "_pid", 1)  # as in a child; locks may be held there for ever
    machine.gpus.order._locked._lock.acquire()
    calls: list[Callable[[], object]] = [
        lambda: device.put(np.zeros(3)),
        lambda: device.empty((3,), F32),
        lambda: device.scale(array, 2.0),
        lambda: total_of(device, [array]),
        lambda: device.host(array),
        lambda: machine.gpus.get(1),
        device.pool.trim,
        device.synchronize,
    ]
    threads = [threading.Thread(target=lambda call=call: refused(call)) for call in calls]
    refusals: list[object] = []

    def refused(call: Callable[[], object]) -> None:
        try:
            call()
        except StoreClosed as err:
            refusals.append(err)

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(20))
    assert len(refusals) == len(calls)
    calls.clear()
    threads.clear()
    array = device.name
    gc.collect()
    assert sum(machine.standin.calls.values()) == before
    machine.gpus.order._locked._lock.release()


def test_a_gpu_is_a_device() -> None:
    device: Device = Machine().gpus.get(0)
    assert isinstance(device, GpuDevice)
    assert isinstance(device.empty((2,), F32, is_sent=True), GpuArray)
