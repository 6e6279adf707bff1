"""Memory of this process that other processes of the host may read: pooled segments, and arrays in them.

A segment is an anonymous file in memory (memfd_create(2)). It has no name, so nothing is left when its last holder
dies. It is allocated in full before it is used, sealed against shrinking, growing and later writable mappings
(F_SEAL_FUTURE_WRITE, Linux 5.1): a process that gets its descriptor can read it and do nothing else to it.

Segments are few and large. Arrays are cut out of them; the memory of an array that nothing refers to any more is used
again, since memory that was written once costs no page faults.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import math
import mmap
import os
import sys
import threading
import weakref
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from functools import lru_cache
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from distrun_runtime.arrays.cores import control_groups, touch
from distrun_runtime.arrays.dtypes import Array, Buffer, DType, owner_of
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.contract.process import own_pid
from distrun_runtime.errors import RuntimeFault

NONCE_BYTES = 16
"""Of what shows another process that it has the right memory, or the right connection."""
PAGE = mmap.PAGESIZE
FIRST_BYTES = 16 * 1024 * 1024
SEGMENT_BYTES = 256 * 1024 * 1024
"""Segments double from the first size up to this one; a larger array gets a segment of its own size."""
LINE = 64
"""Arrays begin at multiples of so many bytes; those of at least a page at pages."""

NUMBERS = itertools.count(1)
"""No two segments of a process have one number, of whatever memory they are."""

_SHRINK, _GROW, _FUTURE_WRITE, _ADD_SEALS, _GET_SEALS = 0x2, 0x4, 0x10, 1033, 1034
"""Of fcntl(2): Python names them from 3.13 on, or not at all."""


class BlockWatcher(Protocol):
    """Who wants to know of blocks of shared memory, such as the GPUs of this process, which page-lock them."""

    why_not: str
    """Why the last block was not taken in."""

    def lock(self, memory: Array, *, is_readonly: bool = False) -> bool:
        """Take in a block; False: it was not, see `why_not`."""

    def unlock(self, memory: Array) -> None:
        """A block is about to go. The watcher keeps the memory as long as it needs it."""


class Blocks:
    """The blocks of shared memory that this process has mapped, its own and those of others, and who watches them.

    An error of a watcher ends nothing: the block is used as it is. A forked child tells no watcher of its blocks.
    Threads: any. It has no lock, which a forked child might find locked.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[mmap.mmap], bool]] = {}
        """By id: the block, and whether it is read-only."""
        self._watcher: tuple[int, BlockWatcher] | None = None
        """With its process."""
        self._say: Callable[[str], None] = lambda text: None
        self._has_said = False

    def log_to(self, say: Callable[[str], None]) -> None:
        """Call `say` once, when a block cannot be page-locked; it gets the reason and what to do."""
        self._say, self._has_said = say, False

    def add(self, memory: mmap.mmap, *, is_readonly: bool = False) -> None:
        """A block was mapped."""
        known, key = self._known, id(memory)
        known[key] = weakref.ref(memory, lambda _: known.pop(key, None)), is_readonly
        # Who watches from now on may hear of it twice.
        self._tell(memory, is_readonly=is_readonly)

    def drop(self, memory: mmap.mmap) -> None:
        """A block is not needed any more: it is unmapped when nothing refers to it."""
        self._known.pop(id(memory), None)
        watcher = self._watcher
        if watcher is not None and watcher[0] == os.getpid():
            with contextlib.suppress(RuntimeFault):
                watcher[1].unlock(np.frombuffer(memory, np.uint8))

    def watch(self, watcher: BlockWatcher | None) -> None:
        """Tell a watcher of all blocks, those of now and later ones; None: no watcher."""
        self._watcher = None if watcher is None else (os.getpid(), watcher)
        for reference, is_readonly in list(self._known.values()):
            memory = reference()
            if memory is not None:
                self._tell(memory, is_readonly=is_readonly)

    def _tell(self, memory: mmap.mmap, *, is_readonly: bool) -> None:
        pid, watcher = self._watcher or (0, None)
        if watcher is None or pid != os.getpid():
            return
        block: Array = np.frombuffer(memory, np.uint8)
        with contextlib.suppress(RuntimeFault):
            if not watcher.lock(block, is_readonly=is_readonly):
                self._refused(watcher, len(block))
            # Another thread may have dropped it while it was locked, and has then found nothing to unlock.
            elif id(memory) not in self._known:
                watcher.unlock(block)

    def _refused(self, watcher: BlockWatcher, nbytes: int) -> None:
        if not self._has_said:
            self._has_said = True
            self._say(
                f"{nbytes} bytes of shared memory are not page-locked, so copies between them and GPUs take longer:"
                f" {watcher.why_not}; fix: raise the limit `ulimit -l`"
            )


BLOCKS = Blocks()
"""Those of this process."""


class FreeRuns:
    """What is free of some memory."""

    free: list[tuple[int, int]]
    """Begin and end of each run, ascending."""

    def take(self, size: int) -> int:
        """Return where `size` bytes are free that are from now on in use; -1: nowhere."""
        unit = LINE if size < PAGE else PAGE
        for index, (first, end) in enumerate(self.free):
            begin = -(-first // unit) * unit
            if end - begin >= size:
                rest = (first, begin), (begin + size, end)
                self.free[index : index + 1] = [each for each in rest if each[0] < each[1]]
                return begin
        return -1

    def give_back(self, begin: int, end: int) -> None:
        """Bytes are free again."""
        insort(self.free, (begin, end))
        index = self.free.index((begin, end))
        if index + 1 < len(self.free) and self.free[index + 1][0] == end:
            self.free[index : index + 2] = [(begin, self.free[index + 1][1])]
        if index and self.free[index - 1][1] == self.free[index][0]:
            self.free[index - 1 : index + 1] = [(self.free[index - 1][0], self.free[index][1])]


Free = TypeVar("Free", bound=FreeRuns)


def first_free(segments: Iterable[Free], size: int) -> tuple[Free, int] | None:
    """Return the first segment in which so many bytes are free, and where: they are in use from now on; None: none."""
    places = ((segment, segment.take(size)) for segment in segments)
    return next((place for place in places if place[1] >= 0), None)


def note_free(unused: deque[tuple[Free, int, int]]) -> None:
    """Note of each segment which of its bytes, from begin to end, are free again."""
    while unused:
        segment, begin, end = unused.popleft()
        segment.give_back(begin, end)


@dataclass(eq=False)
class Segment(FreeRuns):
    """One segment of this process."""

    number: int
    fd: int
    memory: mmap.mmap
    size: int
    address: int
    free: list[tuple[int, int]] = field(default_factory=list)


class Pool:
    """Arrays in segments.

    Arguments:
        is_inherited: children that are forked see the memory, too (they must not write it).

    A new block is told to `BLOCKS` when other threads can use it already: to page-lock it takes long. What they copy
    meanwhile goes as from any other memory.

    Threads: any.
    """

    def __init__(self, *, is_inherited: bool = True) -> None:
        self.why_not = "" if hasattr(os, "memfd_create") else "this system has no memfd_create"
        """Why the last array was not in shared memory; empty: it was."""
        self._is_inherited = is_inherited
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._segments: list[Segment] = []
        self._places: list[tuple[int, Segment]] = []
        """Address of each segment, ascending."""
        self._unused: deque[tuple[Segment, int, int]] = deque()
        """Arrays that nothing refers to any more. Whichever thread drops one appends it; no lock can be taken then."""
        self._is_closed = False
        self._trims = False
        """Whether segments that have become empty are given back."""
        self.given_back = 0
        """How many segments were given back."""
        self._reserving = threading.Lock()
        self._reserved: dict[int, tuple[list[int], int]] = {}
        """By store: sizes of the arrays that there is room for, of all stores at the same time, and how many bytes of
        the last one of `FIRST_BYTES` was not asked for yet."""
        self.ahead: tuple[Segment, ...] = ()
        """Segments that peers are to map before they are used: those that were there after the last `reserve`."""

    def empty(self, shape: Sequence[int], dtype: DType) -> Array | None:
        """Return a new array of undefined content; None: there is no shared memory for it, see `why_not`."""
        count = math.prod(shape)
        size = _rounded(max(1, count * dtype.itemsize))
        if own_pid() != self._pid or not hasattr(os, "memfd_create"):
            return None
        with self._lock:
            note_free(self._unused)
            place = first_free(self._segments, size)
            made = self._grown(size) if place is None else None
            if made is not None:
                place = made, made.take(size)
        if made is not None:
            BLOCKS.add(made.memory)
            if self._is_closed:  # by another thread, which may not have found it there
                BLOCKS.drop(made.memory)
        if place is None:
            return None
        segment, begin = place
        # Every view of this array, and every memoryview, keeps it: when it goes, the memory is out of reach.
        owner: Array = np.frombuffer(segment.memory, np.uint8, size, begin)
        weakref.finalize(owner, self._unused.append, (segment, begin, begin + size)).atexit = False
        return owner[: count * dtype.itemsize].view(dtype).reshape(tuple(shape))

    def find(self, address: int, size: int) -> tuple[Segment, int] | None:
        """Return the segment that has all bytes from an address on, and their offset in it."""
        places = self._places
        index = bisect_right(places, address, key=lambda place: place[0]) - 1
        if index < 0:
            return None
        begin, segment = places[index]
        return (segment, address - begin) if address + size <= begin + segment.size else None

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self._segments)

    def reserve(self, nbytes: int, pieces: int = 1, times: int = 1, *, store: int = 0) -> bool:
        """Make segments, so that arrays of so many bytes more can be made without a new one; tell if they are there.

        It adds up until `unreserve`: there is room for what all calls asked for, beside the arrays that are in use
        during this one. An array of `nbytes` fits, so many times. All that is reserved is at most half of what the
        segments have and the machine has left: what is beyond that comes by need.

        Arguments:
            pieces: of how many arrays these are the bytes; each of them begins with a page.
            store: whose arrays these are; a number.
        """
        if not nbytes or os.getpid() != self._pid:
            return False
        size = (-(-nbytes // PAGE) + pieces - 1) * PAGE
        with self._reserving:
            sizes, left = self._reserved.get(store, ([], 0))
            sizes = list(sizes)
            for _ in range(times):
                if size > left and size < FIRST_BYTES:
                    # Small ones share a run, so that a call for each of many keys mostly finds room.
                    sizes.append(FIRST_BYTES)
                    left = FIRST_BYTES
                if size > left:
                    sizes.append(size)
                else:
                    left -= size
            wanted = {**self._reserved, store: (sizes, left)}
            if len(sizes) > len(self._reserved.get(store, ([], 0))[0]):
                present, left_here = self.size, memory_left()
                if sum(sum(its) for its, _ in wanted.values()) > (present + left_here) // 2:
                    self.why_not = f"{left_here} bytes of memory are left here"
                    return False
                held = [self.empty((each,), np.dtype(np.uint8)) for its, _ in wanted.values() for each in its]
                is_there = all(each is not None for each in held)
                self.ahead = tuple(self._segments)
                if not is_there:
                    return False
            self._reserved = wanted
        return True

    def unreserve(self, store: int | None = None) -> None:
        """What was reserved for a store, or with None for all, is room for the next one: its memory stays."""
        if os.getpid() == self._pid:
            with self._reserving:
                self._reserved = {} if store is None else {n: its for n, its in self._reserved.items() if n != store}

    @property
    def numbers(self) -> set[int]:
        """Numbers of the segments that there are."""
        with self._lock:
            return {segment.number for segment in self._segments}

    def trim(self) -> None:
        """Give the system back the segments that have no array, and those that become empty until a new one is needed.

        A first one of the usual size stays, and all of them while room is reserved.
        """
        self._trims = True
        self._trim()

    def collect(self) -> None:
        """Go on with a `trim`. It costs next to nothing if no array was freed."""
        if self._trims and self._unused:
            self._trim()

    def close(self) -> None:
        """Make no arrays any more, and have nothing page-locked. Those that are in use stay valid."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._is_closed = True
            self.why_not = "it is not shared any more"
            segments, self._segments, self._places, self.ahead = self._segments, [], [], ()
            self._unused = deque()  # the arrays that are in use keep the old one, and with it their segments
        for segment in segments:
            BLOCKS.drop(segment.memory)

    def _trim(self) -> None:
        if os.getpid() != self._pid or self._is_closed or self._reserved:
            return
        with self._lock:
            note_free(self._unused)
            kept = [
                segment
                for number, segment in enumerate(self._segments)
                if segment.free != [(0, segment.size)] or (number == 0 and segment.size <= FIRST_BYTES)
            ]
            gone = [segment for segment in self._segments if segment not in kept]
            self._segments = kept
            self._places = [place for place in self._places if place[1] in kept]
            self.ahead = tuple(segment for segment in self.ahead if segment in kept)
            self.given_back += len(gone)
        for segment in gone:
            BLOCKS.drop(segment.memory)

    def _grown(self, size: int) -> Segment | None:
        """Return a new segment in which an array fits; None: there is no memory. Call with the lock held."""
        if self._is_closed:
            return None
        self._trims = False
        wanted = max(size, min(max(FIRST_BYTES, self.size), SEGMENT_BYTES))
        for each in (wanted, size):
            try:
                segment = _made(-(-each // PAGE) * PAGE)
            except OSError as err:
                self.why_not = f"no {each} bytes of shared memory: {err.strerror or err}"
                continue
            if not self._is_inherited:
                segment.memory.madvise(mmap.MADV_DONTFORK)
            self._segments.append(segment)
            self._places = sorted([*self._places, (segment.address, segment)], key=lambda place: place[0])
            self.why_not = ""
            return segment
        return None


def _rounded(size: int) -> int:
    unit = LINE if size < PAGE else PAGE
    return -(-size // unit) * unit


def _made(size: int) -> Segment:
    """Return a new segment.

    Raises:
        OSError: no memory is left for it, or the system has none of this kind.
    """
    left = memory_left()
    if size > left // 2:
        raise OSError(None, f"{left} bytes of memory are left here")
    # The name is for people who read /proc/PID/maps: whose memory it is.
    fd = os.memfd_create(f"distrun-{os.getpid()}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # All of it now: a page that is missing later would end the process that touches it.
        os.posix_fallocate(fd, 0, size)
        memory = mmap.mmap(fd, size)
        if _has_large_pages():
            memory.madvise(mmap.MADV_HUGEPAGE)
        if size > FIRST_BYTES:  # at `init`, rather than in the first rounds
            touch(np.frombuffer(memory, np.uint8), is_written=True)
        seal(fd, is_read_only=True)
    except BaseException:
        os.close(fd)
        raise
    weakref.finalize(memory, close_unless_forked, fd, os.getpid()).atexit = False
    return Segment(next(NUMBERS), fd, memory, size, address_of(memory), [(0, size)])


@lru_cache(maxsize=1)
def _has_large_pages(path: str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled") -> bool:
    """Whether the system uses large pages for anonymous files that ask for them; mostly it does not."""
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        return file.read().partition("[")[2].partition("]")[0] in {"advise", "within_size"}
    return False


def close_unless_forked(fd: int, pid: int) -> None:
    """Close a descriptor in the process that it belongs to, `pid`; a forked child leaves its copy."""
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            os.close(fd)


def seal(fd: int, *, is_read_only: bool) -> None:
    """Fix a segment's size; with `is_read_only` it cannot be mapped writable from now on.

    Raises:
        OSError: the system cannot seal a size. One that only lacks F_SEAL_FUTURE_WRITE is taken as it is.
    """
    fcntl.fcntl(fd, _ADD_SEALS, _SHRINK | _GROW)
    if is_read_only:
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, _ADD_SEALS, _FUTURE_WRITE)


def has_fixed_size(fd: int) -> bool:
    """Whether a segment that came from another process cannot shrink: reading it is safe."""
    return bool(fcntl.fcntl(fd, _GET_SEALS) & _SHRINK)


def address_of(buffer: Buffer | mmap.mmap | Array) -> int:
    """Return where a buffer's first byte is in this process's memory."""
    array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    return int(array.__array_interface__["data"][0])


# One array of several pieces of memory

_ANONYMOUS, _NO_RESERVE, _MAY_MOVE, _FIXED = 0x20, 0x4000, 1, 2
"""Of mmap(2) and mremap(2), on Linux."""
_KEPT = 1024
"""So many arrays that were put together stay mapped, for the next time."""
Stitched = OrderedDict[tuple[tuple[int, int], ...], tuple[Any, list[mmap.mmap]]]
"""Arrays that were put together: by addresses and sizes of the pieces, the memory, and the mappings of the pieces,
which must not change."""
_stitching = threading.Lock()


def stitched(pieces: Sequence[Array], kept: Stitched) -> Array | None:
    """Return one flat array that has the memory of flat ones, end to end, without a copy; None: they do not allow it.

    The pages of the pieces are mapped once more, next to each other. Each piece has to be in a mapped segment, to
    begin with a page and, but for the last one, to end with one. The pieces stay referenced as long as the array.

    Arguments:
        kept: has the mappings of earlier calls, and gets this one.

    Source: mremap(2): an old size of 0 maps the pages of a shared mapping a second time.
    """
    places = tuple([(address_of(piece), piece.nbytes) for piece in pieces])
    with _stitching:
        known = kept.get(places)
        if known is None:
            is_aligned = not any(address % PAGE for address, _ in places) and not any(n % PAGE for _, n in places[:-1])
            if not (sys.platform.startswith("linux") and is_aligned and places[-1][1]):
                return None
            roots = list(map(owner_of, pieces))
            memory = _mapped_again(places) if {type(root) for root in roots} == {mmap.mmap} else None
            if memory is None:
                return None
            known = kept[places] = memory, cast("list[mmap.mmap]", roots)
            while len(kept) > _KEPT:
                kept.popitem(last=False)
        kept.move_to_end(places)
    array: Array = np.frombuffer(known[0], pieces[0].dtype, sum(len(piece) for piece in pieces))
    weakref.finalize(array, len, list(pieces)).atexit = False
    return array


def _mapped_again(places: Sequence[tuple[int, int]]) -> Any | None:
    """Return a buffer whose pages are those of some places, one after the other."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    size = sum(-(-each // PAGE) * PAGE for _, each in places)
    flags = mmap.MAP_PRIVATE | _ANONYMOUS | _NO_RESERVE
    arguments = (None, ctypes.c_size_t(size), 0, flags, -1, ctypes.c_long(0))
    base = libc.mmap(*arguments)
    if base in {None, ctypes.c_void_p(-1).value}:
        return None
    memory = (ctypes.c_char * size).from_address(base)
    weakref.finalize(memory, libc.munmap, ctypes.c_void_p(base), ctypes.c_size_t(size)).atexit = False
    at = base
    for address, each in places:
        whole = -(-each // PAGE) * PAGE
        found = libc.mremap(
            *(ctypes.c_void_p(address), ctypes.c_size_t(0), ctypes.c_size_t(whole)),
            *(_MAY_MOVE | _FIXED, ctypes.c_void_p(at)),
        )
        if found != at:
            return None
        at += whole
    return memory


def memory_left() -> int:
    """Return how many bytes this process may still take: what the machine has, and its control groups allow.

    Source: proc(5), MemAvailable; the kernel's "Control Group v2", memory.max and memory.current, and for version 1
    memory.limit_in_bytes and memory.usage_in_bytes.
    """
    left = [each for each in (_machine_left(), *_groups_left()) if each is not None]
    return min(left) if left else 1 << 62


def _machine_left() -> int | None:
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _groups_left(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> list[int]:
    found = []
    for folder, is_first_version in control_groups("memory", root, own):
        names = ("limit_in_bytes", "usage_in_bytes") if is_first_version else ("max", "current")
        with contextlib.suppress(OSError, ValueError):
            limit, used = (int((folder / f"memory.{name}").read_text()) for name in names)
            found.append(max(0, limit - used))
    return found
