"""CUDA: the about 20 calls that distrun makes, and their errors. Nothing else in distrun calls CUDA.

    Cuda      what the rest of distrun uses: one object a process
    Driver    who makes the calls: cupy here (`open_cupy`), a stand-in that finds mistakes in the tests

`Cuda` adds to every call what has to hold for all of them: a forked child makes none, an error is told by its call and
device, and after an error that leaves the device unusable every later call raises this first error.

Errors:

    KVError
      + CudaMissing               no cupy, driver or GPU here: what to install
      + CudaError                 a call failed: call, device, CUDA's name and code
          + CudaOutOfMemory       the device has too little memory left: wanted, free
      + ProgramError              a program of kernels does not compile
    StoreClosed                   the process was forked after CUDA had been opened

cupy is imported when a GPU is asked for, never before. All streams are non-blocking, and all events are without timing
and let a waiting thread sleep. Threads: any.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar, Union, cast

import numpy as np

from distrun_runtime.arrays import cubins
from distrun_runtime.arrays.programs import OPTIONS, THREADS, Program
from distrun_runtime.errors import KVError, StoreClosed

__all__ = [
    "INSTALL",
    "Argument",
    "Cuda",
    "CudaError",
    "CudaMissing",
    "CudaOutOfMemory",
    "Driver",
    "DriverError",
    "Event",
    "Host",
    "Loaded",
    "Place",
    "Pointer",
    "ProgramError",
    "Properties",
    "Read",
    "Stream",
    "Table",
    "Update",
    "Write",
    "never_freed",
    "of_process",
    "open_cupy",
]

INSTALL = "pip install 'distrun[cuda12]' (a driver for CUDA 12) or 'distrun[cuda13]' (for CUDA 13)"
"""How to get what a GPU needs."""

BLOCKS_PER_PROCESSOR = 16
"""At most so many blocks are launched for each multiprocessor: kernels loop over what is left."""
ELEMENTS_PER_THREAD = 4
"""Kernels read and write 16 bytes at once where they can."""

OUT_OF_MEMORY, INITIALIZATION, INSUFFICIENT_DRIVER, NO_DEVICE = 2, 3, 35, 100
NOT_READY, PEER_ALREADY_ENABLED = 600, 704
STICKY = frozenset({4, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999})
"""Codes after which the process cannot use the device any more: illegal address, launch failure, ECC and their kin.

Source: CUDA Runtime API, cudaError: "the process must be terminated and relaunched".
"""
_PORTABLE, _NON_BLOCKING, _EVENT_FLAGS, _ANY_DIRECTION = 1, 1, 1 | 2, 4
"""cudaHostRegisterPortable; cudaStreamNonBlocking; cudaEventBlockingSync and DisableTiming; cudaMemcpyDefault."""


# What calls work with


@dataclass(frozen=True)
class Pointer:
    """Memory of a device. The address is opaque: only kernels and copies may use it."""

    address: int
    device: int
    nbytes: int

    def at(self, offset: int, nbytes: int) -> Pointer:
        """Return a part of this memory."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes, (self, offset, nbytes)
        return Pointer(self.address + offset, self.device, nbytes)


@dataclass(frozen=True)
class Host:
    """Memory of the host. Whoever passes it keeps it alive until the copy is done."""

    address: int
    nbytes: int

    def at(self, offset: int, nbytes: int) -> Host:
        """Return a part of this memory."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes, (self, offset, nbytes)
        return Host(self.address + offset, nbytes)


Place = Union[Pointer, Host]


@dataclass(frozen=True)
class Read:
    """An argument of a kernel: memory that it only reads."""

    pointer: Pointer
    nbytes: int


@dataclass(frozen=True)
class Write:
    """An argument of a kernel: memory that it writes whole."""

    pointer: Pointer
    nbytes: int


@dataclass(frozen=True)
class Update:
    """An argument of a kernel: memory that it reads and writes."""

    pointer: Pointer
    nbytes: int


@dataclass(frozen=True)
class Table:
    """An argument of a kernel: an array of addresses in device memory, and what it does with the memory there."""

    pointer: Pointer
    entries: tuple[Read | Write | Update, ...]


Argument = Union[Read, Write, Update, Table, "np.generic[Any]"]


@dataclass(frozen=True)
class Properties:
    """What a device is."""

    name: str
    """`NVIDIA H100 80GB HBM3`."""
    uuid: str
    """32 hex digits."""
    memory: int
    """Bytes."""
    architecture: str
    """`sm_90`."""
    processors: int
    """Multiprocessors."""
    bus: str
    """PCI domain, bus and device: `0000:65:00`."""


@dataclass(eq=False)
class Stream:
    """Operations of one device, each after the one before. It ends when nothing refers to it."""

    device: int
    handle: int


@dataclass(eq=False)
class Event:
    """A place in a stream's work: where `record` put it last. It ends when nothing refers to it."""

    device: int
    handle: int


@dataclass(eq=False)
class Loaded:
    """A program on a device; it stays there as long as the process lives."""

    program: Program
    device: int
    functions: Mapping[str, object] = field(repr=False)
    """By the kernel's name: what the driver launches."""


# Errors


class DriverError(Exception):
    """What a Driver raises: CUDA's code, its name and text."""

    def __init__(self, code: int, name: str, text: str) -> None:
        super().__init__("%s: %s" % (name, text))
        self.code = code
        self.name = name
        self.text = text


class CudaMissing(KVError):
    """There is no cupy, driver or GPU here; the message says what to install."""


class CudaError(KVError):
    """A CUDA call failed."""

    def __init__(self, call: str, device: int | None, code: int, name: str, text: str, more: str = "") -> None:
        self.call = call
        self.device = device
        self.code = code
        self.name = name
        self.text = text
        self.is_sticky = code in STICKY
        """The process cannot use the device any more."""
        where = "" if device is None else " on gpu:%d" % device
        after = (
            "; it may come of an earlier operation, and this process cannot use the GPU any more"
            if self.is_sticky
            else ""
        )
        super().__init__("%s%s failed: %s (CUDA error %d: %s)%s%s" % (call, where, name, code, text, more, after))

    def again(self) -> CudaError:
        """Return the same error, to be raised once more."""
        error = CudaError(self.call, self.device, self.code, self.name, self.text)
        error.__cause__ = self.__cause__
        return error

    def about(self, what: str) -> CudaError:
        """Return this error with what the call was for, such as a key, before its message."""
        self.args = ("%s: %s" % (what, self.args[0]), *self.args[1:])
        return self


class CudaOutOfMemory(CudaError):
    """A device has too little memory left."""

    def __init__(self, call: str, device: int, name: str, text: str, wanted: int, free: int, total: int) -> None:
        self.wanted = wanted
        """Bytes that were asked for."""
        self.free = free
        self.total = total
        more = "; wanted %d bytes, free are %d of %d" % (wanted, free, total)
        super().__init__(call, device, OUT_OF_MEMORY, name, text, more)


class ProgramError(KVError):
    """A program of kernels does not compile; the compiler's text is in the message."""


# Who makes the calls


class Driver(Protocol):
    """Makes CUDA's calls. Each raises DriverError; what they mean is said at `Cuda`."""

    def count(self) -> int: ...
    def properties(self, device: int) -> Properties: ...
    def memory(self, device: int) -> tuple[int, int]: ...
    def alloc(self, device: int, nbytes: int) -> int: ...
    def free(self, pointer: Pointer) -> None: ...
    def register(self, host: Host, is_readonly: bool) -> None: ...
    def unregister(self, host: Host) -> None: ...
    def make_stream(self, device: int, priority: int) -> int: ...
    def end_stream(self, device: int, handle: int) -> None: ...
    def make_event(self, device: int) -> int: ...
    def end_event(self, device: int, handle: int) -> None: ...
    def copy(self, into: Place, source: Place, nbytes: int, stream: Stream) -> None: ...
    def copy_peer(self, into: Pointer, source: Pointer, nbytes: int, stream: Stream) -> None: ...
    def fill(self, pointer: Pointer, byte: int, nbytes: int, stream: Stream) -> None: ...
    def load(self, program: Program, device: int) -> Mapping[str, object]: ...
    def launch(
        self, loaded: Loaded, kernel: str, arguments: Sequence[Argument], elements: int, stream: Stream
    ) -> None: ...
    def record(self, event: Event, stream: Stream) -> None: ...
    def wait(self, stream: Stream, event: Event) -> None: ...
    def query(self, event: Event) -> bool: ...
    def synchronize(self, event: Event) -> None: ...
    def can_access_peer(self, device: int, other: int) -> bool: ...
    def enable_peer(self, device: int, other: int) -> None: ...
    def device_of(self, address: int) -> int: ...


P = ParamSpec("P")
T = TypeVar("T")


class Cuda:
    """CUDA's calls, made by a driver for the process that made this object.

    Every call raises CudaError if it fails, and StoreClosed in a forked child. After a sticky error every call raises
    that error, by the name of the call that met it. The thread's current device stays what it is.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._pid = os.getpid()
        self._first: CudaError | None = None
        """The sticky error that came first."""

    @property
    def failed(self) -> CudaError | None:
        """The error that made the device unusable for this process, if there was one."""
        return self._first

    def check(self) -> None:
        """Return if calls can be made.

        Raises:
            StoreClosed: this is a forked child.
            CudaError: the sticky error that came first.
        """
        if os.getpid() != self._pid:
            raise StoreClosed(
                "this process was forked from process %d after that one had opened CUDA; CUDA cannot be used here. fix:"
                " start processes that use a GPU by 'spawn' or 'forkserver', or fork before the store is created"
                % self._pid
            )
        if self._first is not None:
            raise self._first.again()

    def count(self) -> int:
        """Return how many devices this process sees."""
        return self._made("count", None, self._driver.count)

    def properties(self, device: int) -> Properties:
        """Return what a device is."""
        return self._made("properties", device, self._driver.properties, device)

    def memory(self, device: int) -> tuple[int, int]:
        """Return the bytes of a device that are free, and all of them."""
        return self._made("memory", device, self._driver.memory, device)

    def alloc(self, device: int, nbytes: int) -> Pointer:
        """Return new memory of a device, of undefined content, at a multiple of 256 bytes.

        Raises:
            CudaOutOfMemory: there is not so much.
        """
        try:
            address = self._made("alloc", device, self._driver.alloc, device, nbytes)
        except CudaError as err:
            if err.code != OUT_OF_MEMORY:
                raise
            free, total = self.memory(device)
            raise CudaOutOfMemory("alloc", device, err.name, err.text, nbytes, free, total) from err.__cause__
        return Pointer(address, device, nbytes)

    def free(self, pointer: Pointer) -> None:
        """Give back memory as `alloc` returned it. No operation that uses it may be under way."""
        self._made("free", pointer.device, self._driver.free, pointer)

    def register(self, host: Host, *, is_readonly: bool = False) -> None:
        """Page-lock memory of the host: copies from and to it do not hold up the calling thread.

        Arguments:
            is_readonly: the memory is mapped without the right to write; copies go from it only. Not all GPUs can that.
        """
        self._made("register", None, self._driver.register, host, is_readonly)

    def unregister(self, host: Host) -> None:
        """Undo `register`. No copy that uses the memory may be under way."""
        self._made("unregister", None, self._driver.unregister, host)

    def stream(self, device: int, priority: int = 0) -> Stream:
        """Return a new non-blocking stream; of several, work of the one with the lower number comes first."""
        handle = self._made("stream", device, self._driver.make_stream, device, priority)
        stream = Stream(device, handle)
        weakref.finalize(stream, self._dropped, self._driver.end_stream, device, handle).atexit = False
        return stream

    def event(self, device: int) -> Event:
        """Return a new event, for streams of this device; it has not been recorded."""
        handle = self._made("event", device, self._driver.make_event, device)
        event = Event(device, handle)
        weakref.finalize(event, self._dropped, self._driver.end_event, device, handle).atexit = False
        return event

    def copy(self, into: Place, source: Place, nbytes: int, stream: Stream) -> None:
        """Copy bytes between the host and the stream's device, or within the device.

        The call returns before the copy is done, unless memory of the host is not registered.
        """
        self._made("copy", stream.device, self._driver.copy, into, source, nbytes, stream)

    def copy_peer(self, into: Pointer, source: Pointer, nbytes: int, stream: Stream) -> None:
        """Copy bytes between two devices; directly, if `enable_peer` was called, else by way of the host."""
        self._made("copy_peer", stream.device, self._driver.copy_peer, into, source, nbytes, stream)

    def fill(self, pointer: Pointer, byte: int, nbytes: int, stream: Stream) -> None:
        """Set bytes of a device."""
        self._made("fill", stream.device, self._driver.fill, pointer, byte, nbytes, stream)

    def load(self, program: Program, device: int) -> Loaded:
        """Compile a program for a device and load it there: may take seconds where it is not in cupy's cache.

        Raises:
            ProgramError: it does not compile.
        """
        return Loaded(program, device, self._made("load", device, self._driver.load, program, device))

    def launch(self, loaded: Loaded, kernel: str, arguments: Sequence[Argument], elements: int, stream: Stream) -> None:
        """Launch a kernel for so many elements; with none, do nothing."""
        if elements:
            self._made(kernel, stream.device, self._driver.launch, loaded, kernel, arguments, elements, stream)

    def record(self, event: Event, stream: Stream) -> None:
        """Put an event behind all that the stream has to do so far."""
        self._made("record", stream.device, self._driver.record, event, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        """Let later work of a stream wait for an event as it is recorded now; an event of any device."""
        self._made("wait", stream.device, self._driver.wait, stream, event)

    def query(self, event: Event) -> bool:
        """Tell whether all work before an event is done."""
        return self._made("query", event.device, self._driver.query, event)

    def synchronize(self, event: Event) -> None:
        """Return when all work before an event is done; the thread sleeps meanwhile."""
        self._made("synchronize", event.device, self._driver.synchronize, event)

    def can_access_peer(self, device: int, other: int) -> bool:
        """Tell whether `enable_peer` can be called."""
        return self._made("can_access_peer", device, self._driver.can_access_peer, device, other)

    def enable_peer(self, device: int, other: int) -> None:
        """Let `copy_peer` between a device and another's memory be direct; again: no effect."""
        try:
            self._made("enable_peer", device, self._driver.enable_peer, device, other)
        except CudaError as err:
            if err.code != PEER_ALREADY_ENABLED:  # by another library of this process
                raise

    def device_of(self, address: int) -> int:
        """Return the device that has the memory at an address, whoever allocated it."""
        return self._made("device_of", None, self._driver.device_of, address)

    def _made(self, name: str, device: int | None, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self.check()
        try:
            return call(*args, **kwargs)
        except DriverError as err:
            error = CudaError(name, device, err.code, err.name, err.text)
            if error.is_sticky and self._first is None:
                self._first = error
            raise error from err

    def _dropped(self, end: Callable[[int, int], None], device: int, handle: int) -> None:
        # Called by whichever thread drops the last reference, a forked child's too: its copy of the driver's state is
        # of no use, and a call could hang.
        if os.getpid() == self._pid and self._first is None:
            with contextlib.suppress(DriverError):
                end(device, handle)


# cupy


class _Runtime(Protocol):
    """What is used of `cupy.cuda.runtime`, of cupy 14."""

    def getDeviceCount(self) -> int: ...
    def getDevice(self) -> int: ...
    def setDevice(self, device: int) -> None: ...
    def getDeviceProperties(self, device: int) -> Mapping[str, Any]: ...
    def memGetInfo(self) -> tuple[int, int]: ...
    def malloc(self, size: int) -> int: ...
    def free(self, ptr: int) -> None: ...
    def hostRegister(self, ptr: int, size: int, flags: int) -> None: ...
    def hostUnregister(self, ptr: int) -> None: ...
    def streamCreateWithPriority(self, flags: int, priority: int) -> int: ...
    def streamDestroy(self, stream: int) -> None: ...
    def eventCreateWithFlags(self, flags: int) -> int: ...
    def eventDestroy(self, event: int) -> None: ...
    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None: ...
    def memcpyPeerAsync(self, dst: int, dst_device: int, src: int, src_device: int, size: int, stream: int) -> None: ...
    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None: ...
    def eventRecord(self, event: int, stream: int) -> None: ...
    def streamWaitEvent(self, stream: int, event: int, flags: int) -> None: ...
    def eventQuery(self, event: int) -> int: ...
    def eventSynchronize(self, event: int) -> None: ...
    def deviceCanAccessPeer(self, device: int, peer_device: int) -> int: ...
    def deviceEnablePeerAccess(self, peer_device: int) -> None: ...
    def pointerGetAttributes(self, ptr: int) -> _PointerAttributes: ...


class _PointerAttributes(Protocol):
    """What is used of `cupy.cuda.runtime.PointerAttributes`."""

    device: int


class _Function(Protocol):
    """A loaded kernel: `cupy.cuda.function.Function`."""

    def __call__(
        self, grid: tuple[int], block: tuple[int], args: tuple[object, ...], shared_mem: int, *, stream: _Handle
    ) -> None: ...


@dataclass(frozen=True)
class _Handle:
    """What cupy takes for a stream: anything with `ptr`."""

    ptr: int


class _Cupy:
    """CUDA's calls by cupy's thin layer, `cupy.cuda.runtime`; no arrays, pools or streams of cupy are used."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._runtime = cast(_Runtime, cupy.cuda.runtime)
        self._failures: tuple[type[Exception], ...] = (cupy.cuda.runtime.CUDARuntimeError, _driver_error(cupy))
        self._processors: dict[int, int] = {}
        self._folder = cubins.find_folder()

    @contextlib.contextmanager
    def _told(self, device: int | None = None) -> Iterator[_Runtime]:
        """Translate cupy's errors; make a device the current one of this thread meanwhile."""
        runtime = self._runtime
        try:
            if device is None:
                yield runtime
                return
            before = runtime.getDevice()
            if before == device:
                yield runtime
                return
            runtime.setDevice(device)
            try:
                yield runtime
            finally:
                runtime.setDevice(before)
        except self._failures as err:
            raise _driver_error_of(err) from err

    def count(self) -> int:
        with self._told() as runtime:
            return runtime.getDeviceCount()

    def properties(self, device: int) -> Properties:
        with self._told() as runtime:
            found = runtime.getDeviceProperties(device)
        return Properties(
            name=bytes(found["name"]).decode(errors="replace"),
            uuid=bytes(found["uuid"]).hex(),
            memory=int(found["totalGlobalMem"]),
            architecture="sm_%d%d" % (found["major"], found["minor"]),
            processors=int(found["multiProcessorCount"]),
            bus="%04x:%02x:%02x" % (found["pciDomainID"], found["pciBusID"], found["pciDeviceID"]),
        )

    def memory(self, device: int) -> tuple[int, int]:
        with self._told(device) as runtime:
            free, total = runtime.memGetInfo()
        return free, total

    def alloc(self, device: int, nbytes: int) -> int:
        with self._told(device) as runtime:
            return runtime.malloc(nbytes)

    def free(self, pointer: Pointer) -> None:
        with self._told(pointer.device) as runtime:
            runtime.free(pointer.address)

    def register(self, host: Host, is_readonly: bool) -> None:
        with self._told() as runtime:
            runtime.hostRegister(host.address, host.nbytes, _PORTABLE)

    def unregister(self, host: Host) -> None:
        with self._told() as runtime:
            runtime.hostUnregister(host.address)

    def make_stream(self, device: int, priority: int) -> int:
        with self._told(device) as runtime:
            return runtime.streamCreateWithPriority(_NON_BLOCKING, priority)

    def end_stream(self, device: int, handle: int) -> None:
        with self._told(device) as runtime:
            runtime.streamDestroy(handle)

    def make_event(self, device: int) -> int:
        with self._told(device) as runtime:
            return runtime.eventCreateWithFlags(_EVENT_FLAGS)

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
            version = "%d.%d" % tuple(self._cupy.cuda.nvrtc.getVersion())
        except Exception as err:  # cupy finds the library when it is first used
            raise CudaMissing("cupy does not find NVRTC, CUDA's compiler: %s. fix: %s" % (err, INSTALL)) from err
        with self._told(device):
            code = cubins.kept(
                self._folder, program.key, architecture, version, lambda: self._compiled(program, device)
            )
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
            raise ProgramError("program %s does not compile for gpu:%d: %s" % (program.name, device, err)) from err
        return bytes(code)

    def launch(self, loaded: Loaded, kernel: str, arguments: Sequence[Argument], elements: int, stream: Stream) -> None:
        device = loaded.device
        if device not in self._processors:
            self._processors[device] = self.properties(device).processors
        wanted = -(-elements // (THREADS * ELEMENTS_PER_THREAD))
        blocks = max(1, min(wanted, self._processors[device] * BLOCKS_PER_PROCESSOR))
        function = cast(_Function, loaded.functions[kernel])
        values = tuple(
            np.uint64(each.pointer.address) if isinstance(each, (Read, Write, Update, Table)) else each
            for each in arguments
        )
        with self._told(device):
            function((blocks,), (THREADS,), (*values, np.int64(elements)), 0, stream=_Handle(stream.handle))

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
        return status == 0

    def synchronize(self, event: Event) -> None:
        with self._told(event.device) as runtime:
            runtime.eventSynchronize(event.handle)

    def can_access_peer(self, device: int, other: int) -> bool:
        with self._told() as runtime:
            return bool(runtime.deviceCanAccessPeer(device, other))

    def enable_peer(self, device: int, other: int) -> None:
        with self._told(device) as runtime:
            runtime.deviceEnablePeerAccess(other)

    def device_of(self, address: int) -> int:
        with self._told() as runtime:
            return runtime.pointerGetAttributes(address).device


def _driver_error(cupy: Any) -> type[Exception]:
    """Return what cupy raises where it calls CUDA's lower interface: when it loads and launches."""
    found: type[Exception] = importlib.import_module("cupy_backends.cuda.api.driver").CUDADriverError
    return found


def _driver_error_of(error: Exception) -> DriverError:
    # The text is `NAME: what it means`, of both kinds; the codes are the same where both have one.
    name, _, text = str(error).partition(": ")
    return DriverError(int(getattr(error, "status", 999)), name, text)


def never_freed(kept: object) -> None:
    """Add a reference that is never taken back: what is freed with it could call CUDA, in a forked child too."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def open_cupy() -> Cuda:
    """Return CUDA by cupy.

    Raises:
        CudaMissing: cupy, a driver or a GPU is missing.
    """
    if importlib.util.find_spec("cupy") is None:
        raise CudaMissing("a GPU needs cupy, which is not installed. fix: %s" % INSTALL)
    try:
        cupy = importlib.import_module("cupy")
        cuda = Cuda(_Cupy(cupy))
    except Exception as err:  # an installation can be broken in many ways
        raise CudaMissing("cupy is installed, but fails: %s: %s. fix: %s" % (type(err).__name__, err, INSTALL)) from err
    version = str(getattr(cupy, "__version__", "?"))
    try:
        found = cuda.count()
    except CudaError as err:
        if err.code not in (INITIALIZATION, INSUFFICIENT_DRIVER, NO_DEVICE):
            raise
        found, why = 0, "%s: %s" % (err.name, err.text)
    else:
        why = "it counts none"
    if not found:
        raise CudaMissing(
            "cupy %s finds no GPU here (%s). fix: see whether 'nvidia-smi' lists one, whether its driver is new enough"
            " for this cupy, and what CUDA_VISIBLE_DEVICES hides" % (version, why)
        )
    return cuda


_opened: list[tuple[int, Cuda]] = []
"""Who opened CUDA in this process or one that it was forked from: at most one."""
_lock = threading.Lock()


def of_process() -> Cuda:
    """Return this process's CUDA, opened by cupy with the first call.

    Raises:
        CudaMissing: cupy, a driver or a GPU is missing.
        StoreClosed: the process was forked from one that had opened it.
    """
    with _lock:
        if not _opened:
            _opened.append((os.getpid(), open_cupy()))
        cuda = _opened[0][1]
    cuda.check()
    return cuda
