"""A module that looks like the part of cupy that distrun calls: it notes each call, and with which current device.

It has contexts as CUDA 12 has them: a device gets its context when a thread chooses it, or with the first call that
needs one, in a thread that has none: on the device that the thread chose last, gpu:0 if it never chose one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from distrun_runtime.arrays.shared_memory import BLOCKS

NAMES = {
    2: "cudaErrorMemoryAllocation: out of memory",
    35: "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version",
    100: "cudaErrorNoDevice: no CUDA-capable device is detected",
    600: "cudaErrorNotReady: device not ready",
    700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
    704: "cudaErrorPeerAccessAlreadyEnabled: peer access is already enabled",
}

SIGNATURES = {
    "getDeviceCount": (),
    "setDevice": ("device",),
    "deviceGetAttribute": ("attrib", "device"),
    "getDeviceProperties": ("device",),
    "memGetInfo": (),
    "malloc": ("size",),
    "free": ("ptr",),
    "hostRegister": ("ptr", "size", "flags"),
    "hostUnregister": ("ptr",),
    "streamCreateWithFlags": ("flags",),
    "streamDestroy": ("stream",),
    "eventCreateWithFlags": ("flags",),
    "eventDestroy": ("event",),
    "ipcGetEventHandle": ("event",),
    "ipcOpenEventHandle": ("handle",),
    "memcpyAsync": ("dst", "src", "size", "kind", "stream"),
    "memcpyPeerAsync": ("dst", "dstDevice", "src", "srcDevice", "size", "stream"),
    "memsetAsync": ("ptr", "value", "size", "stream"),
    "eventRecord": ("event", "stream"),
    "streamWaitEvent": ("stream", "event", "flags"),
    "eventQuery": ("event",),
    "eventSynchronize": ("event",),
    "deviceCanAccessPeer": ("device", "peerDevice"),
    "deviceEnablePeerAccess": ("peerDevice",),
    "pointerGetAttributes": ("ptr",),
}
"""Of `cupy.cuda.runtime`, version 14. A test compares them with cupy's own where it is installed."""

DRIVER_SIGNATURES = {"ctxGetCurrent": (), "ctxSetCurrent": ("ctx",)}
"""Of `cupy.cuda.driver`."""

WITHOUT_CONTEXT = ("getDeviceCount", "deviceGetAttribute", "getDeviceProperties", "deviceCanAccessPeer")
"""Calls that need none."""
CONTEXT = 0x7000
"""Device 0's; the others follow."""

SAME_ARGUMENTS = """
import json
import re
import sys

import cupy

runtime = cupy.cuda.runtime
for name, arguments in json.loads(sys.argv[1]).items():
    module = cupy.cuda.driver if name.startswith("ctx") else runtime
    first = str(getattr(module, name).__doc__).splitlines()[0]
    found = re.fullmatch(r"%s\\((.*)\\)(?: -> .*)?" % name, first)
    assert found is not None, first
    names = [each.split("=")[0].split()[-1] for each in found.group(1).split(",") if each]
    assert names == arguments, first
"""
"""A program for the interpreter that has cupy: compares the signatures of its first argument, as JSON, with cupy's."""


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(NAMES[status])
        self.status = status


class CUDADriverError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(
            "CUDA_ERROR_NOT_INITIALIZED: initialization error"
            if status == 3
            else "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"
        )
        self.status = status


class CompileException(Exception):
    pass


class FakeCupy(ModuleType):
    """The module. `calls` has each call's name, arguments and current device."""

    def __init__(self, devices: int) -> None:
        super().__init__("cupy")
        self.__spec__ = ModuleSpec("cupy", None)
        self.__version__ = "14.2.0"
        self.calls: list[tuple[str, tuple[object, ...], int]] = []
        self.answers: dict[str, Any] = {"getDeviceCount": devices, "memGetInfo": (3, 10), "malloc": 0x1000}
        self.answers["getDeviceProperties"] = {
            **{"name": b"NVIDIA T4", "uuid": bytes(range(16)), "totalGlobalMem": 16, "major": 7, "minor": 5},
            **{"multiProcessorCount": 2, "pciDomainID": 0, "pciBusID": 0x65, "pciDeviceID": 0},
        }
        self.statuses: dict[str, int] = {}
        """Calls that fail, and with which code."""
        self.launches: list[tuple[object, ...]] = []
        self.contexts: dict[int, str] = {}
        """Devices that have a context, and the call that made it."""
        self._here = threading.local()
        """Of a thread: `device`, that it chose, and `context`."""
        runtime = SimpleNamespace(**{name: self._call(name) for name in SIGNATURES}, CUDARuntimeError=CUDARuntimeError)
        compiler = SimpleNamespace(CompileException=CompileException, compile_using_nvrtc=self._compile)
        self.cuda = SimpleNamespace(
            runtime=runtime,
            driver=SimpleNamespace(
                ctxGetCurrent=self._get_context, ctxSetCurrent=self._set_context, CUDADriverError=CUDADriverError
            ),
            compiler=compiler,
            function=SimpleNamespace(Module=self._module),
            nvrtc=SimpleNamespace(getVersion=lambda: (12, 9)),
        )
        self.programs: list[tuple[str, tuple[str, ...], int]] = []
        self.loaded: list[bytes] = []
        self.made: list[FakeModule] = []
        """The modules."""
        self.fault: Exception | None = None
        """Raised where a program is compiled."""

    @property
    def current(self) -> int:
        """The device of this thread."""
        return self.context - CONTEXT if self.context else int(getattr(self._here, "device", 0))

    @property
    def context(self) -> int:
        """That of this thread; 0: it has none."""
        return int(getattr(self._here, "context", 0))

    def _call(self, name: str) -> Callable[..., Any]:
        def called(*args: object) -> Any:
            assert len(args) == len(SIGNATURES[name]), name
            if name == "setDevice":
                assert isinstance(args[0], int)
                self._here.device, self._here.context = args[0], self._context_of(args[0], name)
                return 0
            if name not in WITHOUT_CONTEXT and not self.context:
                self._here.context = self._context_of(self.current, name)
            self.calls.append((name, args, self.current))
            if name in self.statuses:
                if name == "eventQuery":
                    return self.statuses[name]
                raise CUDARuntimeError(self.statuses[name])
            return self.answers.get(name, 0)

        return called

    def _context_of(self, device: int, call: str) -> int:
        self.contexts.setdefault(device, call)
        return CONTEXT + device

    def _get_context(self) -> int:
        if not self.contexts:
            raise CUDADriverError(3)  # nothing has initialized CUDA yet
        return self.context

    def _set_context(self, context: int) -> None:
        assert context == 0 or context - CONTEXT in self.contexts
        self._here.context = context

    def _compile(
        self, source: str, options: tuple[str, ...], arch: None, *, cache_in_memory: bool
    ) -> tuple[bytes, dict[str, str]]:
        assert cache_in_memory
        if self.fault is not None:
            raise self.fault
        self.programs.append((source, options, self.current))
        return source.encode(), {}

    def _module(self) -> FakeModule:
        self.made.append(FakeModule(self))
        return self.made[-1]


class FakeModule:
    """As `cupy.cuda.function.Module`: belongs to the device that was current when it was made."""

    def __init__(self, cupy: FakeCupy) -> None:
        self._cupy = cupy
        self._device = cupy.current

    def load(self, code: bytes) -> None:
        assert self._cupy.current == self._device
        self._cupy.loaded.append(code)

    def get_function(self, name: str) -> Callable[..., None]:
        def kernel(grid: object, block: object, args: object, shared_mem: int, *, stream: object) -> None:
            assert self._cupy.current == self._device
            self._cupy.launches.append((name, grid, block, args, shared_mem, stream))

        return kernel


def install(monkeypatch: pytest.MonkeyPatch, devices: int = 2) -> FakeCupy:
    """Put the module where `import cupy` finds it."""
    cupy = FakeCupy(devices)
    monkeypatch.setattr(BLOCKS, "_watcher", None)  # nor does one stay
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy
