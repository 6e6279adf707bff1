"""CUDA: the about 25 calls that distrun makes, and their errors. Nothing else in distrun calls CUDA.

    Cuda      what the rest of distrun uses: one object a process
    Driver    who makes the calls: cupy (`cupy_driver`), in the tests a stand-in that finds mistakes

`Cuda` adds to every call what has to hold for all of them: a forked child makes none, an error is told by its call and
device, and after an error that leaves the device unusable every later call raises this first error.

Errors:

    KVError
      + CudaMissing               no cupy, driver or GPU here: what to install
      + CudaError                 a call failed: call, device, CUDA's name and code
          + CudaOutOfMemory       the device has too little memory left: wanted, free
          + CudaTimedOut          the device has not finished its work in time
      + ProgramError              a program of kernels does not compile
    StoreClosed                   the process was forked after CUDA had been opened

All streams are non-blocking, and all events are without timing and let a waiting thread sleep. Threads: any.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar, Union

from distrun_runtime.arrays.gpu_programs import Program
from distrun_runtime.contract.process import own_pid
from distrun_runtime.errors import KVError, StoreClosed

if TYPE_CHECKING:
    from typing import Any

    import numpy as np


INSTALL = "pip install 'distrun[cuda12]' (a driver for CUDA 12) or 'distrun[cuda13]' (for CUDA 13)"
"""How to get what a GPU needs."""

OUT_OF_MEMORY, NOT_READY, PEER_ALREADY_ENABLED = 2, 600, 704
EVENT_NAME_BYTES = 64
SHARED_UNIT = 2 * 1024 * 1024
"""Memory that is shared between processes comes in multiples of it."""
STICKY = frozenset({4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999})
"""Codes after which the process cannot use the device any more: illegal address, launch failure, ECC, a contained
fault of the hardware (226), and their kin.

Source: CUDA Runtime API, cudaError: "the process must be terminated and relaunched".
"""


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
class HostMemory:
    """Memory of the host. The caller keeps it alive until the copy is done."""

    address: int
    nbytes: int

    def at(self, offset: int, nbytes: int) -> HostMemory:
        """Return a part of this memory."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes, (self, offset, nbytes)
        return HostMemory(self.address + offset, nbytes)


Place = Union[Pointer, HostMemory]


@dataclass(frozen=True)
class _KernelMemory:
    """An argument of a kernel: memory."""

    pointer: Pointer
    nbytes: int


class Read(_KernelMemory):
    """An argument of a kernel: memory that it only reads."""


class Write(_KernelMemory):
    """An argument of a kernel: memory that it writes whole."""


class Update(_KernelMemory):
    """An argument of a kernel: memory that it reads and writes."""


Use = Union[type[Read], type[Write], type[Update]]
"""What a kernel does with memory."""


@dataclass(frozen=True)
class Table:
    """An argument of a kernel: an array of addresses in device memory, and what it does with the memory there."""

    pointer: Pointer
    uses: tuple[Use, ...]
    """Of each column; all have equally many addresses."""
    addresses: tuple[int, ...]
    """Column after column."""
    nbytes: tuple[int, ...]
    """Of the memory at each address."""

    def entries(self) -> list[Read | Write | Update]:
        """Return what the kernel does with the memory at each address."""
        count = len(self.addresses) // max(1, len(self.uses))
        return [
            self.uses[number // count](Pointer(address, self.pointer.device, nbytes), nbytes)
            for number, (address, nbytes) in enumerate(zip(self.addresses, self.nbytes, strict=True))
        ]


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
    is_of_other: bool = False
    """Another process has made it."""


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
        super().__init__(f"{name}: {text}")
        self.code = code
        self.name = name
        self.text = text


class CudaMissing(KVError):
    """There is no cupy, driver or GPU here; the message says what to install."""


class CudaError(KVError):
    """A CUDA call failed."""

    is_of_device = True

    def __init__(
        self,
        call: str,
        device: int | None,
        code: int,
        name: str,
        text: str,
        more: str = "",
        *,
        is_of_other: bool = False,
    ) -> None:
        self.call = call
        self.device = device
        self.code = code
        self.name = name
        self.text = text
        self.is_sticky = code in STICKY and not is_of_other
        """The process cannot use the device any more."""
        where = "" if device is None else f" on gpu:{device}"
        after = (
            "; it may come of an earlier operation, and this process cannot use the GPU any more"
            if self.is_sticky
            else ""
        )
        super().__init__(f"{call}{where} failed: {name} (CUDA error {code}: {text}){more}{after}")

    def again(self) -> CudaError:
        """Return the same error, to be raised once more."""
        error = CudaError(self.call, self.device, self.code, self.name, self.text)
        error.__cause__ = self.__cause__
        return error

    def about(self, what: str) -> CudaError:
        """Return this error with what the call was for, such as a key, before its message."""
        self.args = (f"{what}: {self.args[0]}", *self.args[1:])
        return self

    def advising(self, what: str) -> CudaError:
        """Return this error with what to do behind its message."""
        self.args = (f"{self.args[0]}; {what}", *self.args[1:])
        return self


class CudaOutOfMemory(CudaError):
    """A device has too little memory left."""

    def __init__(self, call: str, device: int, name: str, text: str, wanted: int, free: int, total: int) -> None:
        self.wanted = wanted
        """Bytes that were asked for."""
        self.free = free
        self.total = total
        more = f"; wanted {wanted} bytes, free are {free} of {total}"
        super().__init__(call, device, OUT_OF_MEMORY, name, text, more)


class CudaTimedOut(CudaError):
    """A device has not finished its work in time. Whatever it is, the process cannot use the device any more."""

    def __init__(self, device: int, what: str, waited_s: float) -> None:
        self.call, self.device, self.code, self.name, self.text = "synchronize", device, NOT_READY, "hangs", what
        self.waited_s = waited_s
        self.is_sticky = True
        KVError.__init__(
            self,
            (
                f"gpu:{device} has not finished its {what} after {waited_s:g} s, and this process cannot use the"
                " GPU any more. fix: see whether 'nvidia-smi' answers on this host, and whether 'dmesg' there has"
                " lines with 'Xid', for a GPU that has failed; run the script under 'compute-sanitizer' for a"
                " kernel that never ends; if the work may take so long, raise --op-timeout or DISTRUN_OP_TIMEOUT"
                " (a wait for a GPU may take half of it)"
            ),
        )

    def again(self) -> CudaError:
        """Return the same error, to be raised once more."""
        return CudaTimedOut(self.device or 0, self.text, self.waited_s)


class ProgramError(KVError):
    """A program of kernels does not compile; the compiler's text is in the message."""


def forked_from(pid: int) -> StoreClosed:
    """Return the error of a process that was forked from one that had opened CUDA."""
    return StoreClosed(
        f"this process was forked from process {pid} after that one had opened CUDA; CUDA cannot be used"
        " here. fix: start processes that use a GPU by 'spawn' or 'forkserver', or fork before the store is"
        " created"
    )


# Who makes the calls


class Driver(Protocol):
    """Makes CUDA's calls. Each raises DriverError; what they mean is said at `Cuda`."""

    def count(self) -> int: ...
    def properties(self, device: int) -> Properties: ...
    def memory(self, device: int) -> tuple[int, int]: ...
    def alloc(self, device: int, nbytes: int) -> int: ...
    def free(self, pointer: Pointer) -> None: ...
    def share(self, device: int, nbytes: int) -> tuple[int, int]: ...
    def open_shared(self, device: int, fd: int, nbytes: int) -> int: ...
    def close_shared(self, pointer: Pointer) -> None: ...
    def share_event(self, device: int) -> tuple[int, bytes]: ...
    def open_event(self, device: int, name: bytes) -> int: ...
    def register(self, host: HostMemory, is_readonly: bool) -> None: ...
    def unregister(self, host: HostMemory) -> None: ...
    def make_stream(self, device: int) -> int: ...
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
        self._pid = own_pid()
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
        if own_pid() != self._pid:
            raise forked_from(self._pid)
        if self._first is not None:
            raise self._first.again()

    def give_up(self, error: CudaError) -> None:
        """Let every later call raise an error, as if CUDA had made it."""
        if self._first is None:
            self._first = error

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

    def share(self, device: int, nbytes: int) -> tuple[Pointer, int]:
        """Return new memory of a device that other processes can use, and its descriptor, which the caller closes.

        It is there until no process has it mapped or holds a descriptor of it, whichever of them ends first.

        Arguments:
            nbytes: a multiple of `SHARED_UNIT`.
        """
        address, fd = self._made("share", device, self._driver.share, device, nbytes)
        return Pointer(address, device, nbytes), fd

    def open_shared(self, device: int, fd: int, nbytes: int) -> Pointer:
        """Map memory that another process shares, by its descriptor, which stays the caller's."""
        return Pointer(self._tried("open_shared", device, self._driver.open_shared, device, fd, nbytes), device, nbytes)

    def close_shared(self, pointer: Pointer) -> None:
        """Unmap memory as `share` or `open_shared` returned it. No operation that uses it may be under way."""
        self._made("close_shared", pointer.device, self._driver.close_shared, pointer)

    def share_event(self, device: int) -> tuple[Event, bytes]:
        """Return a new event that another process of this host can wait for, and its name, of 64 bytes, for that one.

        Tell the name's receiver of it after `record`: what was never recorded counts as completed.
        """
        handle, name = self._made("share_event", device, self._driver.share_event, device)
        return self._event(device, handle), name

    def open_event(self, device: int, name: bytes) -> Event:
        """Return the event of another process, to be asked by `query`.

        No stream may wait for it: the other process may be killed, and nothing takes such a wait back.
        """
        handle = self._tried("open_event", device, self._driver.open_event, device, name)
        return self._event(device, handle, is_of_other=True)

    def register(self, host: HostMemory, *, is_readonly: bool = False) -> None:
        """Page-lock memory of the host: copies from and to it do not hold up the calling thread.

        Arguments:
            is_readonly: the memory is mapped without the right to write; copies go from it only. Not all GPUs can that.
        """
        self._made("register", None, self._driver.register, host, is_readonly)

    def unregister(self, host: HostMemory) -> None:
        """Undo `register`. No copy that uses the memory may be under way."""
        self._made("unregister", None, self._driver.unregister, host)

    def stream(self, device: int) -> Stream:
        """Return a new non-blocking stream."""
        handle = self._made("stream", device, self._driver.make_stream, device)
        stream = Stream(device, handle)
        weakref.finalize(stream, self._dropped, self._driver.end_stream, device, handle).atexit = False
        return stream

    def event(self, device: int) -> Event:
        """Return a new event, for streams of this device; it has not been recorded."""
        return self._event(device, self._made("event", device, self._driver.make_event, device))

    def _event(self, device: int, handle: int, *, is_of_other: bool = False) -> Event:
        event = Event(device, handle, is_of_other)
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
        made = self._tried if event.is_of_other else self._made
        return made("query", event.device, self._driver.query, event)

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
        """Return the device that has the memory at an address, however allocated; a negative number: none has."""
        return self._made("device_of", None, self._driver.device_of, address)

    def _made(self, name: str, device: int | None, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self.check()
        try:
            return call(*args, **kwargs)
        except DriverError as err:
            error = CudaError(name, device, err.code, err.name, err.text)
            if error.is_sticky:
                self.give_up(error)
            raise error from err

    def _tried(self, name: str, device: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a call on what another process has given: only if calls on our own fail, too, the device has failed."""
        self.check()
        try:
            return call(*args, **kwargs)
        except DriverError as err:
            if err.code in STICKY:
                self.query(self.event(device))
            raise CudaError(name, device, err.code, err.name, err.text, is_of_other=True) from err

    def _dropped(self, end: Callable[[int, int], None], device: int, handle: int) -> None:
        # Called by whichever thread drops the last reference, a forked child's too: its copy of the driver's state is
        # of no use, and a call could hang.
        if own_pid() == self._pid and self._first is None:
            with contextlib.suppress(DriverError):
                end(device, handle)


def never_freed(kept: object) -> None:
    """Add a reference that is never taken back: what is freed with it could call CUDA, in a forked child too."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
