"""What benchmarks on a GPU call of cupy and torch, on a stand-in's GPUs: numpy's arrays that are the same memory.

Events take the wall clock's time. `SIGNATURES` are those of cupy's runtime; a test compares them with cupy's own.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fakecupy
import numpy as np
from gpukit import Machine

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

SIGNATURES = {
    **{name: fakecupy.SIGNATURES[name] for name in ("malloc", "memsetAsync", "memcpyAsync", "getDeviceProperties")},
    **{name: fakecupy.SIGNATURES[name] for name in ("eventRecord", "eventSynchronize", "eventQuery", "eventDestroy")},
    "eventCreate": (),
    "eventElapsedTime": ("start", "end"),
    "deviceSynchronize": (),
    "driverGetVersion": (),
}
CONSTANTS = {"memcpyHostToDevice": 1, "memcpyDeviceToHost": 2}


class Runtime:
    """cupy.cuda.runtime."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._events: dict[int, float] = {}
        for name, value in CONSTANTS.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        names = SIGNATURES[name]

        def called(*args: Any) -> Any:
            assert len(args) == len(names), name
            made = getattr(type(self), "_" + name, None)
            return made(self, *args) if made is not None else 0

        return called

    def _getDeviceProperties(self, device: int) -> dict[str, Any]:
        return {"l2CacheSize": 1000}

    def _driverGetVersion(self) -> int:
        return 13010

    def _eventCreate(self) -> int:
        self._events[number := len(self._events) + 1] = 0.0
        return number

    def _eventRecord(self, event: int, stream: int) -> None:
        self._deviceSynchronize()
        self._events[event] = time.perf_counter()

    def _eventQuery(self, event: int) -> int:
        return 600  # cudaErrorNotReady

    def _eventElapsedTime(self, start: int, end: int) -> float:
        return (self._events[end] - self._events[start]) * 1e3

    def _deviceSynchronize(self) -> None:
        for device in list(self._machine.gpus._devices.values()):
            device.synchronize()

    def _memcpyAsync(self, into: int, source: int, size: int, kind: int, stream: int) -> None:
        self._deviceSynchronize()
        if kind == CONSTANTS["memcpyHostToDevice"]:
            into = host_address(self._machine, into)
        else:
            source = host_address(self._machine, source)
        ctypes.memmove(into, source, size)


def host_address(machine: Machine, address: int) -> int:
    """Return where the stand-in keeps what is at an address of a device."""
    for block in machine.standin._blocks:
        if block.is_alive and block.address <= address < block.end:
            return int(block.data.ctypes.data) + address - block.address
    raise AssertionError("%#x is no memory of a device" % address)


def shared(machine: Machine, value: Any) -> np.ndarray[Any, Any]:
    """Return the memory of an array of a device as numpy's."""
    found = value.__cuda_array_interface__
    address, is_readonly = found["data"]
    assert not is_readonly
    dtype = np.dtype(found["typestr"])
    size = int(np.prod(found["shape"])) * dtype.itemsize
    memory = (ctypes.c_uint8 * size).from_address(host_address(machine, address))
    return np.frombuffer(memory, dtype).reshape(found["shape"])


def cupy_of(machine: Machine) -> Any:
    """Return what benchmarks use of cupy."""
    cuda = SimpleNamespace(runtime=Runtime(machine), get_current_stream=lambda: SimpleNamespace(ptr=0))
    return SimpleNamespace(
        cuda=cuda, asarray=lambda value: shared(machine, value), full=np.full, zeros=np.zeros, __version__="14.2.0"
    )


class Torch:
    """torch, whose tensors on a GPU are on the CPU."""

    def __init__(self, machine: Machine, torch: Any) -> None:
        self._machine = machine
        self._torch = torch
        self.cuda = SimpleNamespace(current_stream=lambda: SimpleNamespace(cuda_stream=0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def as_tensor(self, value: Any, *, device: str) -> Any:
        assert device == "cuda"
        return self._torch.from_numpy(shared(self._machine, value))


def load() -> ModuleType:
    """Return benchmarks/gpu.py, with little memory for random numbers."""
    spec = importlib.util.spec_from_file_location("bench_gpu", BENCHMARKS / "gpu.py")
    assert spec.loader is not None
    before = list(sys.path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    module.RANDOM = 1 << 12  # type: ignore[attr-defined]
    return module
