"""CUDA's calls by cupy, and this process's CUDA. cupy is imported when a GPU is asked for, never before.

Compiled programs are kept on disk: compiling one takes a second or two, and every process of a job needs it. Each is a
file `KEY-ARCHITECTURE-COMPILER.cubin` (`contract.private`) in the user's cache. Where that cannot be written, as in
many containers, they are in `distrun-cubins-UID` in the system's temporary folder, and where that cannot be, nowhere.
That needs no GPU, and nothing fails because a file cannot be read or written: then the program is compiled.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from distrun_runtime.arrays.cuda import (
    INSTALL,
    NOT_READY,
    Argument,
    Cuda,
    CudaError,
    CudaMissing,
    DriverError,
    Event,
    HostMemory,
    Loaded,
    Place,
    Pointer,
    ProgramError,
    Properties,
    Read,
    Stream,
    Table,
    Update,
    Write,
    forked_from,
    never_freed,
)
from distrun_runtime.arrays.cuda_virtual import VirtualMemory
from distrun_runtime.arrays.gpu_programs import OPTIONS, THREADS, Program
from distrun_runtime.contract import private

KIND = "cubins"
SUFFIX = ".cubin"
UNUSED_S = 30 * 86400.0
"""A file that was not used for so long is removed when another is added."""


def find_folder(env: Mapping[str, str] | None = None, temporary: str | None = None) -> str:
    """Return a folder that this process can write to, and only this user; empty if there is none.

    Arguments:
        env: instead of this process's environment.
        temporary: instead of the system's temporary folder.
    """
    with contextlib.suppress(OSError):
        found = private.make_cache(KIND, env)
        if os.access(found, os.W_OK | os.X_OK):
            return found
    path = os.path.join(temporary or tempfile.gettempdir(), f"distrun-{KIND}-{os.geteuid()}")
    with contextlib.suppress(OSError):
        path = private.own(path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        if private.is_ours(os.lstat(path), rights=0o077) and os.access(path, os.W_OK | os.X_OK):
            return path
    return ""


def kept(folder: str, key: str, architecture: str, compiler: str, compile: Callable[[], bytes]) -> bytes:
    """Return a program's machine code: from the folder, else compiled, and then kept there.

    Arguments:
        folder: of `find_folder`; empty: nothing is kept.
        key: of the source and the options, `Program.key`.
        architecture, compiler: for what and by which version it is compiled: `sm_90`, `12.9`.
        compile: does it; its errors are raised here.
    """
    if not folder:
        return compile()
    name = "-".join(re.sub(r"[^\w.]", "_", part) for part in (key, architecture, compiler)) + SUFFIX
    path = os.path.join(folder, name)
    with contextlib.suppress(OSError):
        code = private.read_cached(path)
        if code:
            with contextlib.suppress(OSError):
                os.utime(path)
            return code
    code = compile()
    with contextlib.suppress(OSError):
        private.write_cached(path, code)
        _thin_out(folder)
    return code


def _thin_out(folder: str) -> None:
    """Remove what was not used for long, or was left half written. Raises OSError."""
    before = time.time() - UNUSED_S
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):  # another process removed it
            if (name.endswith(SUFFIX) or name.startswith(private.FRESH)) and os.lstat(path).st_mtime < before:
                os.unlink(path)


BLOCKS_PER_PROCESSOR = 16
"""At most so many blocks are launched for each multiprocessor: kernels loop over what is left."""
ELEMENTS_PER_THREAD = 4
"""Kernels read and write 16 bytes at once where they can."""


INITIALIZATION, INSUFFICIENT_DRIVER, NO_DEVICE = 3, 35, 100
NOT_SUPPORTED = 801
_PORTABLE, _READ_ONLY, _NON_BLOCKING, _EVENT_FLAGS, _ANY_DIRECTION = 1, 8, 1, 1 | 2, 4
"""cudaHostRegisterPortable, ReadOnly; cudaStreamNonBlocking; cudaEventBlockingSync, DisableTiming; MemcpyDefault."""
_INTERPROCESS = 4
"""cudaEventInterprocess."""
_REGISTERS_READ_ONLY = 113
"""cudaDevAttrHostRegisterReadOnlySupported."""


@dataclass(frozen=True)
class _StreamHandle:
    """What cupy takes for a stream: anything with `ptr`."""

    ptr: int


class CupyDriver:
    """CUDA's calls by cupy's thin layer, `cupy.cuda.runtime`; no arrays, pools or streams of cupy are used.

    A call that needs a device is made in that device's context. The thread's own is put back after it, also if it had
    none: a thread that never chose a device stays so. (To choose gpu:0 for it would make a context there, about 500 MiB
    of a GPU that this process may not use.)

    Source: CUDA Runtime API, "Interactions with the CUDA Driver API": calls use the context that is current, the
    runtime's is the primary one of each device, and `cudaSetDevice` makes it.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._driver = cupy.cuda.driver
        self._failures: tuple[type[Exception], ...] = (
            cupy.cuda.runtime.CUDARuntimeError,
            cupy.cuda.driver.CUDADriverError,
        )
        self._contexts: dict[int, int] = {}
        """The context of each device that was used."""
        self._used: int | None = None
        """One of these devices, for calls that need any; None: not known."""
        self._processors: dict[int, int] = {}
        self._folder = find_folder()
        self._virtual = VirtualMemory()

    @contextlib.contextmanager
    def _told(self, device: int | None = None) -> Iterator[Any]:
        """Translate cupy's errors; make a device the current one of this thread meanwhile."""
        try:
            if device is None:
                yield self._runtime
                return
            context = self._contexts.get(device)
            if context is None:
                context = self._contexts[device] = self._context_of(device)
                self._used = device
            before = self._driver.ctxGetCurrent()
            if before == context:
                yield self._runtime
                return
            self._driver.ctxSetCurrent(context)
            try:
                yield self._runtime
            finally:
                self._driver.ctxSetCurrent(before)
        except self._failures as err:
            # The text is `NAME: what it means`, of both kinds; the codes are the same where both have one.
            name, _, text = str(err).partition(": ")
            raise DriverError(int(getattr(err, "status", 999)), name, text) from err

    def _context_of(self, device: int) -> int:
        """Return a device's context, made if there was none."""

        def chosen() -> int:
            self._runtime.setDevice(device)
            return int(self._driver.ctxGetCurrent())

        # In a thread of its own: the choice stays with the thread that makes it.
        with ThreadPoolExecutor(1, "distrun-context") as thread:
            return thread.submit(chosen).result()

    def count(self) -> int:
        with self._told() as runtime:
            return int(runtime.getDeviceCount())

    def properties(self, device: int) -> Properties:
        with self._told() as runtime:
            found = runtime.getDeviceProperties(device)
        return Properties(
            name=bytes(found["name"]).decode(errors="replace"),
            uuid=bytes(found["uuid"]).hex(),
            memory=int(found["totalGlobalMem"]),
            architecture=f"sm_{int(found['major'])}{int(found['minor'])}",
            processors=int(found["multiProcessorCount"]),
            bus=f"{found['pciDomainID']:04x}:{found['pciBusID']:02x}:{found['pciDeviceID']:02x}",
        )

    def memory(self, device: int) -> tuple[int, int]:
        with self._told(device) as runtime:
            free, total = runtime.memGetInfo()
        return free, total

    def alloc(self, device: int, nbytes: int) -> int:
        with self._told(device) as runtime:
            return int(runtime.malloc(nbytes))

    def free(self, pointer: Pointer) -> None:
        with self._told(pointer.device) as runtime:
            runtime.free(pointer.address)

    def share(self, device: int, nbytes: int) -> tuple[int, int]:
        with self._told(device):
            return self._virtual.create(device, nbytes)

    def open_shared(self, device: int, fd: int, nbytes: int) -> int:
        with self._told(device):
            return self._virtual.map(device, self._virtual.received(fd), nbytes)

    def close_shared(self, pointer: Pointer) -> None:
        with self._told(pointer.device):
            self._virtual.unmap(pointer.address, pointer.nbytes)

    def share_event(self, device: int) -> tuple[int, bytes]:
        with self._told(device) as runtime:
            event = runtime.eventCreateWithFlags(_EVENT_FLAGS | _INTERPROCESS)
            try:
                return event, bytes(runtime.ipcGetEventHandle(event))
            except BaseException:
                runtime.eventDestroy(event)
                raise

    def open_event(self, device: int, name: bytes) -> int:
        with self._told(device) as runtime:
            return int(runtime.ipcOpenEventHandle(name))

    def register(self, host: HostMemory, is_readonly: bool) -> None:
        device = self._used
        with self._told(device) as runtime:
            if is_readonly and not runtime.deviceGetAttribute(_REGISTERS_READ_ONLY, device or 0):
                raise DriverError(NOT_SUPPORTED, "cudaErrorNotSupported", "read-only memory cannot be registered")
            runtime.hostRegister(host.address, host.nbytes, _PORTABLE | (_READ_ONLY if is_readonly else 0))

    def unregister(self, host: HostMemory) -> None:
        with self._told(self._used) as runtime:
            runtime.hostUnregister(host.address)

    def make_stream(self, device: int) -> int:
        with self._told(device) as runtime:
            return int(runtime.streamCreateWithFlags(_NON_BLOCKING))

    def end_stream(self, device: int, handle: int) -> None:
        with self._told(device) as runtime:
            runtime.streamDestroy(handle)

    def make_event(self, device: int) -> int:
        with self._told(device) as runtime:
            return int(runtime.eventCreateWithFlags(_EVENT_FLAGS))

    def end_event(self, device: int, handle: int) -> None:
        with self._told(device) as runtime:
            runtime.eventDestroy(handle)

    def copy(self, into: Place, source: Place, nbytes: int, stream: Stream) -> None:
        with self._told(stream.device) as runtime:
            # The direction follows from the addresses: all of them are of one address space.
            runtime.memcpyAsync(into.address, source.address, nbytes, _ANY_DIRECTION, stream.handle)

    def copy_peer(self, into: Pointer, source: Pointer, nbytes: int, stream: Stream) -> None:
        with self._told(stream.device) as runtime:
            runtime.memcpyPeerAsync(into.address, into.device, source.address, source.device, nbytes, stream.handle)

    def fill(self, pointer: Pointer, byte: int, nbytes: int, stream: Stream) -> None:
        with self._told(stream.device) as runtime:
            runtime.memsetAsync(pointer.address, byte, nbytes, stream.handle)

    def load(self, program: Program, device: int) -> Mapping[str, object]:
        architecture = self.properties(device).architecture
        try:
            version = ".".join(map(str, self._cupy.cuda.nvrtc.getVersion()))
        except Exception as err:  # cupy finds the library when it is first used
            raise CudaMissing(f"cupy does not find NVRTC, CUDA's compiler: {err}. fix: {INSTALL}") from err
        with self._told(device):
            code = kept(self._folder, program.key, architecture, version, lambda: self._compiled(program, device))
            module = self._cupy.cuda.function.Module()
            module.load(code)
            functions = {each.name: module.get_function(each.name) for each in program.kernels}
        never_freed(module)  # its destructor calls CUDA
        return functions

    def _compiled(self, program: Program, device: int) -> bytes:
        compiler = self._cupy.cuda.compiler
        try:
            # Not by RawModule, which adds -ftz=true behind any option: subnormal numbers would become zero.
            code, _ = compiler.compile_using_nvrtc(program.source, OPTIONS, None, cache_in_memory=True)
        except compiler.CompileException as err:
            raise ProgramError(f"program {program.name} does not compile for gpu:{device}: {err}") from err
        return bytes(code)

    def launch(self, loaded: Loaded, kernel: str, arguments: Sequence[Argument], elements: int, stream: Stream) -> None:
        device = loaded.device
        if device not in self._processors:
            self._processors[device] = self.properties(device).processors
        wanted = -(-elements // (THREADS * ELEMENTS_PER_THREAD))
        blocks = max(1, min(wanted, self._processors[device] * BLOCKS_PER_PROCESSOR))
        function: Any = loaded.functions[kernel]
        values = tuple(
            np.uint64(each.pointer.address) if isinstance(each, (Read, Write, Update, Table)) else each
            for each in arguments
        )
        with self._told(device):
            function((blocks,), (THREADS,), (*values, np.int64(elements)), 0, stream=_StreamHandle(stream.handle))

    def record(self, event: Event, stream: Stream) -> None:
        with self._told(stream.device) as runtime:
            runtime.eventRecord(event.handle, stream.handle)

    def wait(self, stream: Stream, event: Event) -> None:
        with self._told(stream.device) as runtime:
            runtime.streamWaitEvent(stream.handle, event.handle, 0)

    def query(self, event: Event) -> bool:
        with self._told(event.device) as runtime:
            status = runtime.eventQuery(event.handle)  # the only call that returns its code
            if status not in (0, NOT_READY):
                raise self._failures[0](status)
        return bool(status == 0)

    def synchronize(self, event: Event) -> None:
        with self._told(event.device) as runtime:
            runtime.eventSynchronize(event.handle)

    def can_access_peer(self, device: int, other: int) -> bool:
        with self._told(device) as runtime:
            return bool(runtime.deviceCanAccessPeer(device, other))

    def enable_peer(self, device: int, other: int) -> None:
        with self._told(device) as runtime:
            runtime.deviceEnablePeerAccess(other)

    def device_of(self, address: int) -> int:
        with self._told(self._used) as runtime:
            return int(runtime.pointerGetAttributes(address).device)


def open_cupy() -> Cuda:
    """Return CUDA by cupy.

    Raises:
        CudaMissing: cupy, a driver or a GPU is missing.
    """
    if sys.modules.get("cupy") is None and importlib.util.find_spec("cupy") is None:
        raise CudaMissing(f"a GPU needs cupy, which is not installed. fix: {INSTALL}")
    try:
        cupy = importlib.import_module("cupy")
        cuda = Cuda(CupyDriver(cupy))
    except Exception as err:  # an installation can be broken in many ways
        raise CudaMissing(f"cupy is installed, but fails: {type(err).__name__}: {err}. fix: {INSTALL}") from err
    version = str(getattr(cupy, "__version__", "?"))
    try:
        found = cuda.count()
    except CudaError as err:
        if err.code not in (INITIALIZATION, INSUFFICIENT_DRIVER, NO_DEVICE):
            raise
        found, why = 0, f"{err.name}: {err.text}"
    else:
        why = "it counts none"
    if not found:
        raise CudaMissing(
            f"cupy {version} finds no GPU here ({why}). fix: see whether 'nvidia-smi' lists one, whether its"
            " driver is new enough for this cupy, and what CUDA_VISIBLE_DEVICES hides"
        )
    return cuda


_opened: list[Cuda] = []
"""This process's CUDA, or that of the process that it was forked from: at most one."""
_opener: list[int] = []
"""The process that has opened it, or is about to."""
_lock = threading.Lock()


def of_process() -> Cuda:
    """Return this process's CUDA, opened by cupy with the first call.

    Raises:
        CudaMissing: cupy, a driver or a GPU is missing.
        StoreClosed: the process was forked from one that had opened it.
    """
    if _opener and _opener[0] != os.getpid():  # the lock may be held here for ever
        raise forked_from(_opener[0])
    with _lock:
        if not _opened:
            _opener[:] = [os.getpid()]
            try:
                _opened.append(open_cupy())
            except BaseException:
                _opener.clear()
                raise
    cuda = _opened[0]
    cuda.check()
    return cuda
