"""What cupy is told, and what is said where it is missing."""

from __future__ import annotations

import gc
import importlib.util
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import fakecupy
import numpy as np
import pytest
from children import exit_code_of
from fakecupy import CONTEXT, FakeCupy
from slowness import scaled

from distrun_runtime.arrays import cupy_driver
from distrun_runtime.arrays.cuda import (
    Cuda,
    CudaError,
    CudaMissing,
    CudaOutOfMemory,
    Event,
    HostMemory,
    Pointer,
    ProgramError,
    Properties,
    Read,
    Stream,
    Table,
    Update,
    Write,
)
from distrun_runtime.arrays.gpu_programs import OPTIONS, Access, Kernel, KernelParameter, Program
from distrun_runtime.errors import StoreClosed


def test_cuda_is_opened_once_a_process_and_not_in_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    fakecupy.install(monkeypatch)
    monkeypatch.setattr(cupy_driver, "_opened", [])
    monkeypatch.setattr(cupy_driver, "_opener", [])
    assert cupy_driver.of_process() is cupy_driver.of_process()
    monkeypatch.setattr(cupy_driver, "_opener", [12])  # as if this were a child
    with pytest.raises(StoreClosed, match="forked from process 12"):
        cupy_driver.of_process()


def test_a_child_that_is_forked_while_cuda_is_opened_does_not_wait_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_driver, "_opened", [])
    monkeypatch.setattr(cupy_driver, "_opener", [])
    inside, go_on = threading.Event(), threading.Event()

    def opened() -> None:
        inside.set()
        go_on.wait(scaled(20))
        raise CudaMissing("none")

    monkeypatch.setattr(cupy_driver, "open_cupy", opened)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(cupy_driver.of_process)
        assert inside.wait(scaled(20))

        def child() -> None:
            with pytest.raises(StoreClosed, match="forked from process %d" % os.getppid()):
                cupy_driver.of_process()

        try:
            assert exit_code_of(child) == 0
        finally:
            go_on.set()
        with pytest.raises(CudaMissing, match="none"):
            opening.result(scaled(20))
    assert not cupy_driver._opener  # a child may try, now


# What is missing


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CudaMissing, match=r"cupy, which is not installed. fix: pip install 'distrun\[cuda12\]'"):
        cupy_driver.open_cupy()


def test_a_broken_cupy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = fakecupy.install(monkeypatch)
    del cupy.cuda
    with pytest.raises(CudaMissing, match=r"installed, but fails: AttributeError.*fix: pip install"):
        cupy_driver.open_cupy()


@pytest.mark.parametrize(("devices", "status", "text"), [(0, 0, "counts none"), (1, 35, "Insuff"), (1, 100, "NoDev")])
def test_without_a_gpu_or_driver_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch, devices: int, status: int, text: str
) -> None:
    cupy = fakecupy.install(monkeypatch, devices)
    if status:
        cupy.statuses["getDeviceCount"] = status
    with pytest.raises(CudaMissing, match="cupy 14.2.0 finds no GPU here .*%s.*nvidia-smi" % text):
        cupy_driver.open_cupy()


# What cupy is told


PROGRAM = Program(
    "sums",
    "KERNEL add() {}",
    (
        Kernel("add", tuple(KernelParameter(name, "f32", Access.READ) for name in "abcd")),
        Kernel("other", ()),
    ),
)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCupy:
    monkeypatch.setattr(cupy_driver, "find_folder", lambda: str(tmp_path))
    return fakecupy.install(monkeypatch)


def made(cupy: FakeCupy) -> list[tuple[object, ...]]:
    """Return the calls since the last time: name, arguments, current device."""
    calls = [(name, *args, device) for name, args, device in cupy.calls]
    cupy.calls.clear()
    return calls


def test_every_call_has_cupys_arguments_and_the_right_current_device(cupy: FakeCupy) -> None:
    cuda = cupy_driver.open_cupy()
    assert made(cupy) == [("getDeviceCount", 0)]
    far, near = Pointer(0x1000, 1, 64), Pointer(0x2000, 0, 64)
    host, stream, event = HostMemory(0x3000, 64), Stream(1, 77), Event(1, 88)
    cupy.answers.update(streamCreateWithFlags=5, eventCreateWithFlags=6, deviceCanAccessPeer=1)
    assert cuda.memory(1) == (3, 10)
    assert cuda.alloc(1, 64) == far
    cuda.free(far)
    cuda.register(host)
    cuda.unregister(host)
    assert (cuda.stream(1).handle, cuda.event(1).handle) == (5, 6)
    gc.collect()
    cuda.copy(far, host, 48, stream)
    cuda.copy(host.at(8, 8), far.at(16, 8), 8, stream)
    cuda.copy_peer(far, near, 48, stream)
    cuda.fill(far, 9, 48, stream)
    cuda.record(event, stream)
    cuda.wait(stream, event)
    assert cuda.query(event)
    cuda.synchronize(event)
    assert cuda.can_access_peer(1, 0) is True
    cuda.enable_peer(1, 0)
    assert made(cupy) == [
        ("memGetInfo", 1),
        ("malloc", 64, 1),
        ("free", 0x1000, 1),
        ("hostRegister", 0x3000, 64, 1, 1),
        ("hostUnregister", 0x3000, 1),
        ("streamCreateWithFlags", 1, 1),
        ("streamDestroy", 5, 1),
        ("eventCreateWithFlags", 3, 1),
        ("eventDestroy", 6, 1),
        ("memcpyAsync", 0x1000, 0x3000, 48, 4, 77, 1),
        ("memcpyAsync", 0x3008, 0x1010, 8, 4, 77, 1),
        ("memcpyPeerAsync", 0x1000, 1, 0x2000, 0, 48, 77, 1),
        ("memsetAsync", 0x1000, 9, 48, 77, 1),
        ("eventRecord", 88, 77, 1),
        ("streamWaitEvent", 77, 88, 0, 1),
        ("eventQuery", 88, 1),
        ("eventSynchronize", 88, 1),
        ("deviceCanAccessPeer", 1, 0, 1),
        ("deviceEnablePeerAccess", 0, 1),
    ]
    assert cupy.current == 0


def test_read_only_memory_is_registered_where_a_gpu_can_that(cupy: FakeCupy) -> None:
    cuda, host = cupy_driver.open_cupy(), HostMemory(0x3000, 64)
    stream = cuda.stream(1)  # a device that is in use: no context is made on another one
    made(cupy)
    cupy.answers["deviceGetAttribute"] = 1
    cuda.register(host, is_readonly=True)
    cuda.unregister(host)
    assert made(cupy) == [
        ("deviceGetAttribute", 113, 1, 1),
        ("hostRegister", 0x3000, 64, 1 | 8, 1),
        ("hostUnregister", 0x3000, 1),
    ]
    cupy.answers["deviceGetAttribute"] = 0
    with pytest.raises(CudaError, match="cudaErrorNotSupported") as caught:
        cuda.register(host, is_readonly=True)
    assert not caught.value.is_sticky
    assert stream.device == 1


def test_the_current_device_of_the_thread_stays_what_it_was(cupy: FakeCupy) -> None:
    cuda = cupy_driver.open_cupy()
    cupy.statuses["malloc"] = 2
    cupy.cuda.runtime.setDevice(1)
    with pytest.raises(CudaOutOfMemory):
        cuda.alloc(0, 64)
    assert cupy.current == 1
    seen: list[int] = []

    def other_thread() -> None:
        cuda.memory(1)
        seen.append(cupy.current)

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert seen == [0]


def every_call(cuda: Cuda, device: int) -> None:
    place, host = cuda.alloc(device, 64), HostMemory(0x3000, 64)
    stream, event = cuda.stream(device), cuda.event(device)
    cuda.register(host, is_readonly=True)
    cuda.copy(place, host, 64, stream)
    cuda.copy_peer(place, place, 64, stream)
    cuda.fill(place, 0, 64, stream)
    cuda.launch(cuda.load(PROGRAM, device), "other", [], 1, stream)
    cuda.record(event, stream)
    cuda.wait(stream, event)
    cuda.query(event)
    cuda.synchronize(event)
    cuda.can_access_peer(device, 0)
    cuda.device_of(place.address)
    cuda.memory(device)
    cuda.properties(0)
    cuda.unregister(host)
    cuda.free(place)


def test_a_process_that_uses_one_gpu_makes_a_context_on_no_other(cupy: FakeCupy) -> None:
    cuda = cupy_driver.open_cupy()
    cupy.answers.update(deviceGetAttribute=1, pointerGetAttributes=SimpleNamespace(device=1))
    found: list[tuple[int, int]] = []

    def fresh() -> None:
        every_call(cuda, 1)
        cuda.device_of(0x1000)
        found.append((cupy.current, cupy.context))

    for _ in range(2):
        thread = threading.Thread(target=fresh)
        thread.start()
        thread.join()
    fresh()
    assert cupy.contexts == {1: "setDevice"}
    assert found == [(0, 0)] * 3, "these threads have not chosen a device"


def test_a_thread_keeps_the_context_that_it_has_of_another_library(cupy: FakeCupy) -> None:
    cuda = cupy_driver.open_cupy()
    cuda.memory(0)
    own = CONTEXT + 1
    cupy.contexts[1] = "ctxCreate"
    cupy.cuda.driver.ctxSetCurrent(own)
    cupy.statuses["malloc"] = 2
    with pytest.raises(CudaOutOfMemory):
        cuda.alloc(0, 64)
    assert cupy.context == own


def test_memory_of_a_library_is_looked_up_in_the_context_of_its_thread(cupy: FakeCupy) -> None:
    cuda = cupy_driver.open_cupy()
    cupy.answers["pointerGetAttributes"] = SimpleNamespace(device=1)
    cupy.cuda.runtime.setDevice(1)
    assert cuda.device_of(0x1000) == 1  # before this process has used a GPU by distrun
    assert cupy.contexts == {1: "setDevice"}


def test_cupys_errors_come_with_code_and_name(cupy: FakeCupy) -> None:
    cuda = cupy_driver.open_cupy()
    cupy.statuses["eventQuery"] = 600
    assert cuda.query(Event(0, 1)) is False
    cupy.statuses["deviceEnablePeerAccess"] = 704
    cuda.enable_peer(0, 1)  # another library did it
    cupy.statuses["malloc"] = 2
    with pytest.raises(CudaOutOfMemory, match="wanted 99 bytes, free are 3 of 10"):
        cuda.alloc(0, 99)
    cupy.statuses["eventQuery"] = 700
    with pytest.raises(CudaError, match=r"query on gpu:0 failed: cudaErrorIllegalAddress \(CUDA error 700: an ill"):
        cuda.query(Event(0, 1))


def test_properties_are_read(cupy: FakeCupy) -> None:
    found = cupy_driver.open_cupy().properties(0)
    assert found == Properties("NVIDIA T4", bytes(range(16)).hex(), 16, "sm_75", 2, "0000:65:00")


def test_a_program_is_compiled_for_its_device_and_launched_by_addresses_and_numbers(cupy: FakeCupy) -> None:
    cuda = cupy_driver.open_cupy()
    loaded = cuda.load(PROGRAM, 1)
    assert cupy.programs == [("KERNEL add() {}", OPTIONS, 1)]
    assert {"--fmad=false", "--ftz=false"} <= set(OPTIONS)
    assert cupy.loaded == [b"KERNEL add() {}"]
    stream = Stream(1, 77)
    places = [Pointer(address, 1, 64) for address in (0x1000, 0x2000, 0x3000, 0x4000)]
    arguments = [Read(places[0], 64), Write(places[1], 64), Update(places[2], 64), Table(places[3], (), (), ())]
    cuda.launch(loaded, "add", [*arguments, np.float32(0.5)], 1025, stream)
    name, grid, block, values, shared, handle = cupy.launches[0]
    assert (name, grid, block, shared) == ("add", (2,), (256,), 0)
    assert handle.ptr == 77
    assert values == (0x1000, 0x2000, 0x3000, 0x4000, np.float32(0.5), 1025)
    assert [type(each) for each in values] == [*[np.uint64] * 4, np.float32, np.int64]
    cuda.launch(loaded, "add", [], 1 << 40, stream)
    assert cupy.launches[1][1] == (2 * cupy_driver.BLOCKS_PER_PROCESSOR,)
    cuda.launch(loaded, "add", [], 0, stream)
    assert len(cupy.launches) == 2
    assert cupy.current == 0


def test_a_program_is_compiled_once_for_all_processes(cupy: FakeCupy) -> None:
    for _ in range(2):
        cupy_driver.open_cupy().load(PROGRAM, 0)
    assert len(cupy.programs) == 1
    assert cupy.loaded == [b"KERNEL add() {}"] * 2


def test_a_loaded_module_is_never_unloaded_not_even_in_a_forked_child(cupy: FakeCupy) -> None:
    loaded = cupy_driver.open_cupy().load(PROGRAM, 0)
    module = weakref.ref(cupy.made[0])
    cupy.made.clear()
    del loaded
    gc.collect()
    assert module() is not None


def test_cupy_without_the_compiler_is_told(cupy: FakeCupy) -> None:
    cupy.cuda.nvrtc.getVersion = Mock(side_effect=RuntimeError('Failure finding "libnvrtc.so.12"'))
    with pytest.raises(CudaMissing, match=r"NVRTC, CUDA's compiler: Failure finding .*fix: pip install"):
        cupy_driver.open_cupy().load(PROGRAM, 0)


def test_a_program_that_cannot_be_loaded_is_told(cupy: FakeCupy) -> None:
    cuda = cupy_driver.open_cupy()
    cupy.fault = fakecupy.CompileException("line 3: what is this?")
    with pytest.raises(ProgramError, match="program sums does not compile for gpu:0: line 3: what is this"):
        cuda.load(PROGRAM, 0)
    cupy.fault = None
    cupy.cuda.function.Module = Mock(side_effect=fakecupy.CUDADriverError(700))
    with pytest.raises(CudaError, match="load on gpu:0 failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        cuda.load(PROGRAM, 0)
