"""A stand-in for CUDA that finds mistakes: devices in host memory whose work is done as late as events allow.

It is the driver below `distrun_runtime.arrays.cuda.Cuda`. What it does that a GPU does not:

* Work of a stream is done when something waits for it, not before; of several streams, in an order drawn by the seed.
  With another seed than 0 some of it is done earlier, by chance.
* Fresh and freed memory is NaN in every float type, and so is what a copy is to write to the host until it is done.
* Every operation has a vector clock. Two operations on overlapping bytes, one of which writes, that no stream or event
  puts into an order are a mistake. So is memory that is freed, or unregistered, before the host knows that its last
  use is over, and host memory that the program overwrites before a copy from it is done.
* A call that may wait for a GPU, or takes long, is a mistake while its thread holds the lock of an `Order`: all other
  threads that give work would wait with it.
* Memory is only found at the address and on the device that it has: anything else is a mistake.
* What several processes share (`standinsharing`) is checked across them: no process reads what another has not written
  yet, none overwrites what another still reads, and none waits for another without asking whether that one lives. What
  a process that was killed had still to do is never done.
* Each call can be made to fail, or to be the process's last.

A mistake is raised where it is found, and once more by `finish`, in case that the code under test caught it.

What the host knows is one clock for all threads: that they hand arrays to each other rightly is not checked here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import random
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep
from typing import Any, TypeVar

import numpy as np
from standinsharing import EventPage, SharedBlock, SharedEvent

from distrun_runtime.arrays.cuda import (
    SHARED_UNIT,
    STICKY,
    Argument,
    DriverError,
    Event,
    HostMemory,
    Loaded,
    Place,
    Pointer,
    Properties,
    Read,
    Stream,
    Table,
    Update,
    Write,
)
from distrun_runtime.arrays.gpu_order import OrderLock
from distrun_runtime.arrays.gpu_programs import Program

Compiled = Callable[[str, Sequence[Any], int], None]
"""Runs a kernel by name on addresses of host memory and numbers, for so many elements."""

NAMES = {
    1: ("cudaErrorInvalidValue", "invalid argument"),
    2: ("cudaErrorMemoryAllocation", "out of memory"),
    35: ("cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"),
    100: ("cudaErrorNoDevice", "no CUDA-capable device is detected"),
    217: ("cudaErrorPeerAccessUnsupported", "peer access is not supported between these two devices"),
    400: ("cudaErrorInvalidResourceHandle", "invalid resource handle"),
    700: ("cudaErrorIllegalAddress", "an illegal memory access was encountered"),
    704: ("cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"),
    801: ("cudaErrorNotSupported", "operation not supported"),
    711: ("cudaErrorTooManyPeers", "peer mapping resources exhausted"),
    712: ("cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"),
    719: ("cudaErrorLaunchFailure", "unspecified launch failure"),
    999: ("cudaErrorUnknown", "unknown error"),
}
NAN = 0xFF
"""Bytes of this value are NaN in every float type."""
ALIGNMENT = 256
ASKS_BEFORE_DONE = 20
"""So often an event is not yet completed when it is asked."""

BLOCKING = {"alloc", "free", "register", "unregister", "load", "synchronize", "enable_peer", "share", "open_shared"}
"""Calls that may wait for a GPU, or take long; so may copies from and to memory of the host that is not page-locked."""

EVENTS = ("make_event", "share_event", "open_event")
"""Calls of which there are many at once."""

Clock = dict[int, int]
"""For each stream, how many of its operations are known to be over."""


class _Holds(threading.local):
    """How many locks of an `Order` a thread holds."""

    count = 0


_holds = _Holds()


def _count_locks() -> None:
    enter, leave = OrderLock.__enter__, OrderLock.__exit__

    def entered(lock: OrderLock) -> None:
        enter(lock)
        _holds.count += 1

    def left(lock: OrderLock, *error: object) -> None:
        _holds.count -= 1
        leave(lock, *error)

    OrderLock.__enter__, OrderLock.__exit__ = entered, left  # type: ignore[method-assign]


_count_locks()


@contextlib.contextmanager
def outside_of_locks() -> Iterator[None]:
    """Calls in the block are of another library, whatever distrun's lock the thread holds."""
    count, _holds.count = _holds.count, 0
    try:
        yield
    finally:
        _holds.count = count


class Mistake(AssertionError):
    """The code under test relies on an order or a lifetime that nothing ensures."""


def error(code: int) -> DriverError:
    return DriverError(code, *NAMES[code])


@dataclass(eq=False)
class Operation:
    stream: int
    time: int
    what: str
    run: Callable[[], None]
    needs: Operation | None = None
    """An operation of another stream that has to be over before."""
    is_done: bool = False


@dataclass(eq=False)
class Access:
    begin: int
    end: int
    is_write: bool
    operation: Operation


@dataclass(eq=False)
class Block:
    """Memory of a device, or registered memory of the host (device -1)."""

    device: int
    address: int
    data: np.ndarray[Any, Any]
    is_alive: bool = True
    is_readonly: bool = False
    shared: SharedBlock | None = None
    accesses: list[Access] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.address + len(self.data)


@dataclass(eq=False)
class StreamState:
    device: int
    clock: Clock = field(default_factory=dict)
    waiting: deque[Operation] = field(default_factory=deque)


@dataclass(eq=False)
class EventState:
    device: int
    operation: Operation | None = None
    clock: Clock = field(default_factory=dict)
    asked: int = 0
    shared: SharedEvent | None = None


T = TypeVar("T", bound=Callable[..., Any])


def call(method: T) -> T:
    """Count a call, let it fail if it is to, and let no two threads be in calls at once."""
    name = method.__name__

    @functools.wraps(method)
    def entered(self: StandIn, *args: Any) -> Any:
        if os.getpid() != self.pid:
            raise self.mistake("a forked child calls CUDA: %s" % name)
        if name in BLOCKING:
            self.check_free(name)
        with self.lock:
            self.calls[name] += 1
            if self.kill_at and sum(self.calls.values()) - sum(self.calls[each] for each in EVENTS) >= self.kill_at:
                os.kill(self.pid, signal.SIGKILL)
            if self.dead is not None:
                raise self.dead
            code = self.faults.pop((name, self.calls[name]), None)
            if code is not None:
                if code in STICKY - {999}:  # which can be of what another process has given
                    self.dead = error(code)
                raise error(code)
            self._name = name
            result = method(self, *args)
            if name != "query":  # who asks often does not find more done
                self._advance()
            if self.dead is not None and not name.startswith("end_"):
                raise self.dead
            return result

    return entered  # type: ignore[return-value]


class StandIn:
    """A driver. Several may be made in one process, each with devices of its own.

    Arguments:
        devices: 0 to 8.
        memory: bytes of each.
        locks_readonly: memory can be registered that is mapped without the right to write.
        peers: pairs of devices of which the first can access the second's memory; None: all.
        uuid: of the first device; processes on devices of one UUID can share memory.
        seed: draws the order in which independent work is done.
        compiled: makes a program's kernels callable; None: none can be loaded.
    """

    def __init__(
        self,
        devices: int = 1,
        *,
        memory: int = 1 << 26,
        locks_readonly: bool = True,
        peers: Iterable[tuple[int, int]] | None = None,
        uuid: int = 0,
        seed: int = 0,
        compiled: Callable[[Program], Compiled] | None = None,
    ) -> None:
        assert 0 <= devices <= 8
        self.devices = devices
        self.uuid = uuid
        self.kill_at = 0
        """The call, of all but `EVENTS`, at which the process is killed."""
        self._event_page: EventPage | None = None
        self.memory_bytes = memory
        self.locks_readonly = locks_readonly
        pairs = ((one, other) for one in range(devices) for other in range(devices))
        self.peers = {pair for pair in (pairs if peers is None else peers) if pair[0] != pair[1]}
        self.enabled: set[tuple[int, int]] = set()
        self.contexts: dict[int, str] = {}
        """Devices that have a context, which takes memory of a GPU, and the call that made it."""
        self.calls: Counter[str] = Counter()
        self.mistakes: list[Mistake] = []
        self.faults: dict[tuple[str, int], int] = {}
        self.dead: DriverError | None = None
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.seed = seed
        self._random = random.Random(seed)
        self._eagerness = 0.0 if seed == 0 else self._random.choice([0.1, 0.5, 1.0])
        self._compiled = compiled
        self._name = ""
        """The call that is being made."""
        self._bad_operation = 0
        self._ran = 0
        self._handles = 0
        self._next = [(device + 1) << 40 for device in range(devices)]
        self._blocks: list[Block] = []
        self._registered: list[Block] = []
        self._mappings: dict[int, str] = {}
        """By address: what was mapped where memory was registered."""
        self._streams: dict[int, StreamState] = {}
        self._events: dict[int, EventState] = {}
        self._known: Clock = {}
        """What the host knows to be over."""

    # For tests

    def fail(self, name: str, nth: int = 1, code: int = 700) -> None:
        """Let the n-th call of a name from now on fail; with a sticky code every later call of any name, too."""
        self.faults[name, self.calls[name] + nth] = code

    def fail_operation(self, nth: int = 1) -> None:
        """Let the n-th operation that is done from now on access an illegal address: the next call says so."""
        self._bad_operation = self._ran + nth

    def mistake(self, text: str) -> Mistake:
        found = Mistake(text)
        self.mistakes.append(found)
        return found

    def check_free(self, what: str) -> None:
        """What this thread does now may take long: it holds no lock that others need to give work."""
        if _holds.count:
            raise self.mistake("%s while the thread holds the lock of an Order" % what)

    def finish(self) -> None:
        """Do what is left to do; raise the first mistake that was found."""
        with self.lock:
            for state in self._streams.values():
                while self.dead is None and state.waiting:
                    self._complete(state.waiting[-1])
        for block in self._registered:
            if _mapping_of(block.address) != self._mappings[block.address]:
                self.mistake("memory was unmapped while it was registered")
        if self.mistakes:
            raise self.mistakes[0]

    @property
    def used(self) -> list[int]:
        """Bytes in use of each device."""
        sizes = [0] * self.devices
        for block in self._blocks:
            if block.is_alive and (block.shared is None or block.shared.is_ours):
                sizes[block.device] += len(block.data)
        return sizes

    @property
    def pending(self) -> int:
        """Operations that are not done."""
        return sum(len(state.waiting) for state in self._streams.values())

    def bytes_at(self, pointer: Pointer) -> bytes:
        """Return what is in memory now, with what was done so far."""
        block, begin = self._found(pointer, pointer.nbytes)
        return block.data[begin : begin + pointer.nbytes].tobytes()

    # The driver's calls

    @call
    def count(self) -> int:
        return self.devices

    @call
    def properties(self, device: int) -> Properties:
        self._device(device)
        return Properties(
            "Stand-in", "%032x" % (self.uuid + device), self.memory_bytes, "sm_00", 4, "0000:%02x:00" % device
        )

    @call
    def memory(self, device: int) -> tuple[int, int]:
        self._in_context(device)
        return self.memory_bytes - self.used[device], self.memory_bytes

    @call
    def alloc(self, device: int, nbytes: int) -> int:
        self._in_context(device)
        if nbytes <= 0:
            raise self.mistake("alloc of %d bytes" % nbytes)
        if self.used[device] + nbytes > self.memory_bytes:
            raise error(2)
        address = self._next[device]
        # No address is ever used again, and nothing is next to anything.
        self._next[device] += (nbytes // ALIGNMENT + 2) * ALIGNMENT
        self._blocks.append(Block(device, address, np.full(nbytes, NAN, np.uint8)))
        return address

    @call
    def free(self, pointer: Pointer) -> None:
        block, begin = self._found(pointer, pointer.nbytes)
        if begin or len(block.data) != pointer.nbytes:
            raise self.mistake("free of %s, which alloc did not return" % (pointer,))
        self._end(block, "freed")
        block.data[:] = NAN

    @call
    def share(self, device: int, nbytes: int) -> tuple[int, int]:
        if nbytes % SHARED_UNIT:
            raise self.mistake("%d bytes are shared, which is no multiple of %d" % (nbytes, SHARED_UNIT))
        address = self.alloc(device, nbytes)
        fd, self._blocks[-1].shared = SharedBlock.made(nbytes)
        self._blocks[-1].data = self._blocks[-1].shared.data
        return address, fd

    @call
    def open_shared(self, device: int, fd: int, nbytes: int) -> int:
        self._in_context(device)
        address, self._next[device] = self._next[device], self._next[device] + nbytes + ALIGNMENT
        shared = SharedBlock.given(fd, nbytes)
        self._blocks.append(Block(device, address, shared.data, shared=shared, is_readonly=True))
        return address

    @call
    def close_shared(self, pointer: Pointer) -> None:
        block, begin = self._found(pointer, pointer.nbytes)
        if begin or block.shared is None or len(block.data) != pointer.nbytes:
            raise self.mistake("close_shared of %s, which is no shared block" % (pointer,))
        self._end(block, "unmapped")

    @call
    def share_event(self, device: int) -> tuple[int, bytes]:
        if self._event_page is None:
            self._event_page = EventPage()
            threading.Thread(target=self._go_on, name="stand-in", daemon=True).start()
        handle = self.make_event(device)
        self._events[handle].shared = made = self._event_page.made()
        return handle, made.name

    @call
    def open_event(self, device: int, name: bytes) -> int:
        handle = self.make_event(device)
        try:
            self._events[handle].shared = SharedEvent.given(name)
        except OSError:
            raise error(400) from None
        return handle

    def _go_on(self) -> None:
        """A GPU goes on by itself: do what other processes ask for, late."""
        while True:
            sleep(0.001)
            with self.lock, contextlib.suppress(Mistake, DriverError):
                for state in list(self._events.values()):
                    is_waiting = state.operation is not None and not state.operation.is_done
                    if state.shared is not None and is_waiting and state.shared.is_wanted(ASKS_BEFORE_DONE):
                        self._complete(state.operation)

    @call
    def register(self, host: HostMemory, is_readonly: bool) -> None:
        for block in self._registered:
            if host.address < block.end and block.address < host.address + host.nbytes:
                raise error(712)
        mapping = _mapping_of(host.address)
        if is_readonly and not self.locks_readonly:
            raise error(801)
        if not (is_readonly or mapping.startswith("rw")):  # as CUDA has it
            raise error(1)
        self._registered.append(Block(-1, host.address, _host_bytes(host), is_readonly=is_readonly))
        self._mappings[host.address] = mapping

    @call
    def unregister(self, host: HostMemory) -> None:
        for block in self._registered:
            if block.address == host.address:
                self._end(block, "unregistered")
                self._registered.remove(block)
                return
        raise self.mistake("unregister of %s, which is not registered" % (host,))

    @call
    def make_stream(self, device: int) -> int:
        self._in_context(device)
        self._handles += 1
        self._streams[self._handles] = StreamState(device)
        return self._handles

    @call
    def end_stream(self, device: int, handle: int) -> None:
        assert self._streams[handle].device == device  # its work goes on

    @call
    def make_event(self, device: int) -> int:
        self._in_context(device)
        self._handles += 1
        self._events[self._handles] = EventState(device)
        return self._handles

    @call
    def end_event(self, device: int, handle: int) -> None:
        state = self._events.pop(handle)
        assert state.device == device
        if state.shared is not None and state.shared.is_ours:
            state.shared.end()

    @call
    def copy(self, into: Place, source: Place, nbytes: int, stream: Stream) -> None:
        for place in (into, source):
            if isinstance(place, Pointer) and place.device != stream.device:
                raise self.mistake("copy on gpu:%d of memory of gpu:%d" % (stream.device, place.device))
        if isinstance(into, HostMemory) and isinstance(source, HostMemory):
            raise self.mistake("copy from the host to the host")
        if isinstance(into, HostMemory):
            assert isinstance(source, Pointer)
            self._copy_out(into, source, nbytes, stream)
        elif isinstance(source, HostMemory):
            self._copy_in(into, source, nbytes, stream)
        else:
            self._copy_across("copy", into, source, nbytes, stream)

    @call
    def copy_peer(self, into: Pointer, source: Pointer, nbytes: int, stream: Stream) -> None:
        if stream.device not in (into.device, source.device):
            raise self.mistake("copy_peer on gpu:%d between %s and %s" % (stream.device, into, source))
        if any(self._found(each, nbytes)[0].shared is not None for each in (into, source)):
            raise self.mistake("copy_peer of shared memory, which is mapped for its own device only")
        self._copy_across("copy_peer", into, source, nbytes, stream)

    @call
    def fill(self, pointer: Pointer, byte: int, nbytes: int, stream: Stream) -> None:
        view, access = self._view(pointer, nbytes, stream)
        self._enqueue("fill", stream, lambda: view.fill(byte), [(*access, True)])

    @call
    def load(self, program: Program, device: int) -> Mapping[str, object]:
        self._in_context(device)
        if self._compiled is None:
            raise self.mistake("this stand-in has no compiler for %s" % program.name)
        made = self._compiled(program)
        return {kernel.name: made for kernel in program.kernels}

    @call
    def launch(self, loaded: Loaded, kernel: str, arguments: Sequence[Argument], elements: int, stream: Stream) -> None:
        if loaded.device != stream.device:
            raise self.mistake("%s is loaded on gpu:%d, not on gpu:%d" % (kernel, loaded.device, stream.device))
        _check_arguments(loaded.program, kernel, arguments, self.mistake)
        spans: list[tuple[Read | Write | Update, np.ndarray[Any, Any]]] = []
        accesses: list[tuple[Block, int, int, bool]] = []
        made: list[Callable[[], Any]] = []
        """For each argument what gives its value once the kernel runs."""

        def known(entry: Read | Write | Update) -> int:
            view, access = self._view(entry.pointer, entry.nbytes, stream)
            spans.append((entry, view))
            accesses.append((*access, not isinstance(entry, Read)))
            return int(view.ctypes.data)

        for argument in arguments:
            if isinstance(argument, Table):
                addresses = np.array([known(entry) for entry in argument.entries()], np.uint64)
                wanted = np.array(argument.addresses, np.uint64)
                table, access = self._view(argument.pointer, wanted.nbytes, stream)
                accesses.append((*access, False))
                made.append(functools.partial(self._table, kernel, table, wanted, addresses))
            elif isinstance(argument, (Read, Write, Update)):
                made.append(functools.partial(int, known(argument)))
            else:
                made.append(functools.partial(_same, argument))
        function: Any = loaded.functions[kernel]

        def run() -> None:
            read = [(view, view.copy()) for entry, view in spans if isinstance(entry, Read)]
            written = [(entry, view) for entry, view in spans if not isinstance(entry, Read)]
            for entry, view in written:
                others = [other for another, other in spans if another is not entry]
                if isinstance(entry, Write) and not any(np.shares_memory(view, other) for other in others):
                    view.fill(NAN)  # it has to be written whole
            function(kernel, [each() for each in made], elements)
            for view, before in read:
                if not any(np.shares_memory(view, other) for _, other in written) and (view != before).any():
                    raise self.mistake("%s wrote into memory that it only reads" % kernel)

        self._enqueue(kernel, stream, run, accesses)

    @call
    def record(self, event: Event, stream: Stream) -> None:
        state = self._events[event.handle]
        if state.device != stream.device:
            raise error(400)
        if state.shared is not None and not state.shared.is_ours:
            raise self.mistake("an event of another process is recorded")
        run = _nothing if state.shared is None else state.shared.recorded()
        state.operation = self._enqueue("record", stream, run, [])
        state.clock = dict(self._streams[stream.handle].clock)
        state.asked = 0

    @call
    def wait(self, stream: Stream, event: Event) -> None:
        state = self._events[event.handle]
        if state.shared is not None and not state.shared.is_ours:
            raise self.mistake("a stream waits for an event of another process, which may be killed")
        if state.operation is None:  # as CUDA has it: nothing to wait for
            return
        self._enqueue("wait", stream, _nothing, [], needs=state.operation)
        _merge(self._streams[stream.handle].clock, state.clock)

    @call
    def query(self, event: Event) -> bool:
        state = self._events[event.handle]
        if state.shared is not None and not state.shared.is_ours:
            return state.shared.ask()
        if state.operation is None:
            return True
        state.asked += 1
        if not state.operation.is_done and state.asked > ASKS_BEFORE_DONE + self._random.randrange(3):
            self._complete(state.operation)
        if state.operation.is_done:
            _merge(self._known, state.clock)
        return state.operation.is_done

    @call
    def synchronize(self, event: Event) -> None:
        state = self._events[event.handle]
        if state.shared is not None and not state.shared.is_ours:
            raise self.mistake("the host waits without a deadline for an event of another process")
        if state.operation is not None:
            self._complete(state.operation)
            _merge(self._known, state.clock)

    @call
    def can_access_peer(self, device: int, other: int) -> bool:
        self._device(device)
        self._device(other)
        return (device, other) in self.peers

    @call
    def enable_peer(self, device: int, other: int) -> None:
        if (device, other) not in self.peers:
            raise error(217)
        self._in_context(device)
        self._in_context(other)
        if (device, other) in self.enabled:
            raise error(704)
        self.enabled.add((device, other))

    @call
    def device_of(self, address: int) -> int:
        for block in self._blocks:
            if block.is_alive and block.address <= address < block.end:
                return block.device
        raise self.mistake("%#x is no memory of a device" % address)

    # Memory

    def _device(self, device: int) -> None:
        if not 0 <= device < self.devices:
            raise self.mistake("there is no device %d of %d" % (device, self.devices))

    def _in_context(self, device: int) -> None:
        self._device(device)
        self.contexts.setdefault(device, self._name)

    def _found(self, pointer: Pointer, nbytes: int) -> tuple[Block, int]:
        for block in self._blocks:
            if block.address <= pointer.address < block.end and block.device == pointer.device:
                begin = pointer.address - block.address
                if not block.is_alive:
                    raise self.mistake("%s was freed" % (pointer,))
                if nbytes > pointer.nbytes or begin + nbytes > len(block.data):
                    raise self.mistake("%d bytes at %s: beyond its end" % (nbytes, pointer))
                return block, begin
        raise self.mistake("%s is no memory of this device" % (pointer,))

    def _view(
        self, pointer: Pointer, nbytes: int, stream: Stream
    ) -> tuple[np.ndarray[Any, Any], tuple[Block, int, int]]:
        if pointer.device != stream.device:
            raise self.mistake("gpu:%d dereferences memory of gpu:%d" % (stream.device, pointer.device))
        block, begin = self._found(pointer, nbytes)
        return block.data[begin : begin + nbytes], (block, begin, begin + nbytes)

    def _end(self, block: Block, what: str) -> None:
        for access in block.accesses:
            operation = access.operation
            if self._known.get(operation.stream, 0) < operation.time:
                raise self.mistake("memory is %s before the host knows that this is over: %s" % (what, operation.what))
        block.is_alive = False

    def _table(
        self,
        kernel: str,
        table: np.ndarray[Any, Any],
        wanted: np.ndarray[Any, Any],
        addresses: np.ndarray[Any, Any],
    ) -> int:
        if table.tobytes() != wanted.tobytes():
            raise self.mistake("%s: the table in memory is not that of the launch" % kernel)
        return int(addresses.ctypes.data)

    # Copies

    def _copy_across(self, what: str, into: Pointer, source: Pointer, nbytes: int, stream: Stream) -> None:
        target, begin = self._found(into, nbytes)
        origin, first = self._found(source, nbytes)
        run = functools.partial(
            np.copyto, target.data[begin : begin + nbytes], origin.data[first : first + nbytes], casting="no"
        )
        accesses = [(target, begin, begin + nbytes, True), (origin, first, first + nbytes, False)]
        self._enqueue(what, stream, run, accesses)

    def _copy_in(self, into: Pointer, source: HostMemory, nbytes: int, stream: Stream) -> None:
        view, access = self._view(into, nbytes, stream)
        accesses = [(*access, True)]
        before = _host_bytes(source)[:nbytes].copy()
        locked = self._locked(source, nbytes)
        if locked is None:  # the driver takes a copy before the call returns
            self.check_free("copy in from memory that is not page-locked")
            self._enqueue("copy in", stream, functools.partial(np.copyto, view, before), accesses)
            return
        memory = _host_bytes(source)[:nbytes]
        begin = source.address - locked.address
        # Waiting copies into the same bytes come first; they, not the program, may write there.
        is_checked = self._is_idle(locked, begin, begin + nbytes, writes=True)

        def run() -> None:
            if is_checked and (memory != before).any():
                raise self.mistake("host memory was overwritten before a copy from it was known to be over")
            view[:] = memory

        self._enqueue("copy in", stream, run, [*accesses, (locked, begin, begin + nbytes, False)])

    def _copy_out(self, into: HostMemory, source: Pointer, nbytes: int, stream: Stream) -> None:
        view, access = self._view(source, nbytes, stream)
        accesses = [(*access, False)]
        locked = self._locked(into, nbytes)
        memory = _host_bytes(into)[:nbytes]
        if locked is None:  # the call returns when the copy is done
            self.check_free("copy out to memory that is not page-locked")
            operation = self._enqueue("copy out", stream, functools.partial(np.copyto, memory, view), accesses)
            self._complete(operation)
            _merge(self._known, self._streams[stream.handle].clock)
            return
        if locked.is_readonly:
            raise self.mistake("a copy into memory that is registered as read-only")
        begin = into.address - locked.address
        # It is NaN until then, unless a copy that comes before still reads it.
        is_checked = self._is_idle(locked, begin, begin + nbytes, writes=False)
        accesses.append((locked, begin, begin + nbytes, True))

        def run() -> None:
            if is_checked and (memory != NAN).any():
                raise self.mistake("host memory was written before a copy to it was known to be over")
            memory[:] = view

        self._enqueue("copy out", stream, run, accesses, poison=memory if is_checked else None)

    def _locked(self, host: HostMemory, nbytes: int) -> Block | None:
        for block in self._registered:
            if block.address <= host.address and host.address + nbytes <= block.end:
                return block
            if host.address < block.end and block.address < host.address + nbytes:
                raise self.mistake("a copy of memory only a part of which is registered")
        return None

    def _is_idle(self, block: Block, begin: int, end: int, *, writes: bool) -> bool:
        """Tell whether no operation is to come that uses bytes, or (`writes`) that writes them."""
        return all(
            each.operation.is_done or (writes and not each.is_write)
            for each in block.accesses
            if each.begin < end and begin < each.end
        )

    # Order

    def _enqueue(
        self,
        what: str,
        stream: Stream,
        run: Callable[[], None],
        accesses: Sequence[tuple[Block, int, int, bool]],
        *,
        needs: Operation | None = None,
        poison: np.ndarray[Any, Any] | None = None,
    ) -> Operation:
        state = self._streams[stream.handle]
        clock = state.clock
        _merge(clock, self._known)  # the host calls: what it knows, the stream knows
        time = clock[stream.handle] = clock.get(stream.handle, 0) + 1
        for block, begin, end, is_write in accesses:
            if block.shared is not None:
                run = self._in_step(what, block.shared, run, begin, end, is_write)
        operation = Operation(stream.handle, time, "%s (stream %d, %d)" % (what, stream.handle, time), run, needs)
        for block, begin, end, is_write in accesses:
            kept = []
            for each in block.accesses:
                other = each.operation
                if self._known.get(other.stream, 0) >= other.time:
                    continue  # all that comes knows of it
                kept.append(each)
                if (
                    other is not operation
                    and (each.is_write or is_write)
                    and each.begin < end
                    and begin < each.end
                    and clock.get(other.stream, 0) < other.time
                ):
                    raise self.mistake("nothing orders %s and %s, on the same bytes" % (other.what, operation.what))
            block.accesses = [*kept, Access(begin, end, is_write, operation)]
        if poison is not None:
            poison.fill(NAN)
        state.waiting.append(operation)
        return operation

    def _in_step(
        self, what: str, shared: SharedBlock, run: Callable[[], None], begin: int, end: int, is_write: bool
    ) -> Callable[[], None]:
        """Return an operation that uses memory which several processes have, with what finds their mistakes."""
        if is_write and not shared.is_ours:
            raise self.mistake("%s writes memory of another process" % what)
        if not shared.is_ours and shared.is_written(begin, end):
            raise self.mistake("%s reads memory of another process before that is known to have written it" % what)
        if not is_write and shared.is_ours:
            return run
        shared.count(begin, end, 1)

        def done() -> None:
            if is_write and shared.is_read(begin, end):
                raise self.mistake("%s overwrites memory before another process is known to have read it" % what)
            run()
            shared.count(begin, end, -1)

        return done

    def _advance(self) -> None:
        while self._eagerness and self._random.random() < self._eagerness:
            ready = [state for state in self._streams.values() if state.waiting and _is_ready(state.waiting[0])]
            if not ready or self.dead is not None:
                return
            self._do(self._random.choice(ready))

    def _complete(self, target: Operation) -> None:
        """Do what has to be done for an operation to be over, and nothing else."""
        wanted: dict[int, int] = {}
        """For each stream, up to which of its operations."""
        open_ends = [target]
        while open_ends:
            last = open_ends.pop()
            begin = wanted.get(last.stream, 0)
            if last.is_done or last.time <= begin:
                continue
            wanted[last.stream] = last.time
            waiting = self._streams[last.stream].waiting
            open_ends += [each.needs for each in waiting if each.needs is not None and begin < each.time <= last.time]
        while not target.is_done and self.dead is None:
            states = [(self._streams[key], time) for key, time in sorted(wanted.items())]
            ready = [
                state
                for state, time in states
                if state.waiting and state.waiting[0].time <= time and _is_ready(state.waiting[0])
            ]
            self._do(self._random.choice(ready))
        if self.dead is not None:
            raise self.dead

    def _do(self, state: StreamState) -> None:
        operation = state.waiting.popleft()
        operation.is_done = True
        self._ran += 1
        if self._ran == self._bad_operation:
            self.dead = error(700)
            return
        operation.run()


def _is_ready(operation: Operation) -> bool:
    return operation.needs is None or operation.needs.is_done


def _merge(clock: Clock, other: Clock) -> None:
    for key, time in other.items():
        if clock.get(key, 0) < time:
            clock[key] = time


def _mapping_of(address: int) -> str:
    """Return rights and file of what this process has mapped at an address: `rw-s 1f:02 4711`; empty: nothing."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, device, inode = line.split()[:5]
        begin, end = (int(each, 16) for each in place.split("-"))
        if begin <= address < end:
            return "%s %s %s" % (rights, device, inode)
    return ""


def _host_bytes(host: HostMemory) -> np.ndarray[Any, Any]:
    memory = (ctypes.c_uint8 * host.nbytes).from_address(host.address)
    return np.ctypeslib.as_array(memory)


def _nothing() -> None:
    pass


def _same(value: Any) -> Any:
    return value


SCALARS = {
    **{"i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8", "u16": "uint16"},
    **{"u32": "uint32", "u64": "uint64", "f32": "float32", "f64": "float64"},
}
ACCESSES: dict[type, str] = {Read: "read", Write: "write", Update: "update", Table: "table"}


def _check_arguments(
    program: Program, kernel: str, arguments: Sequence[Argument], mistake: Callable[[str], Mistake]
) -> None:
    """Compare arguments with what the kernel says of its parameters."""
    parameters = program.kernel(kernel).parameters
    if len(parameters) != len(arguments):
        raise mistake("%s takes %d arguments and n, not %d" % (kernel, len(parameters), len(arguments)))
    for parameter, argument in zip(parameters, arguments, strict=True):
        access = parameter.access.value
        if isinstance(argument, np.generic):
            if access != "scalar" or argument.dtype.name != SCALARS[parameter.kind]:
                raise mistake("%s: %s is no %s" % (kernel, parameter, argument.dtype))
        elif access != ACCESSES[type(argument)]:
            raise mistake("%s: %s is given as %s" % (kernel, parameter, type(argument).__name__))
