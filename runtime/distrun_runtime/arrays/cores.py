"""Shares large copies and sums of host memory among threads.

One core does not move as many bytes as the memory of a machine with many cores allows. So work on more than
`SHARED_BYTES` is cut into pieces, which threads of this process do together with the caller. numpy gives up the
interpreter's lock meanwhile. How many threads there are is decided once (`threads_for`): each process has its share of
the cores, so that processes of one role on a host do not take cores from each other.

* `Threads`: so many threads, for work of at least so many bytes.
* `copy_all`: copies many arrays.
* `give_way`: lets other threads run before long work.
* `touch`: maps pages before they are needed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from distrun_runtime.arrays.dtypes import Array, cached_pieces, copy, copy_fresh
from distrun_runtime.contract import environ
from distrun_runtime.errors import RuntimeFault

if TYPE_CHECKING:
    from pathlib import Path

SHARED_BYTES = 4 * 1024 * 1024
"""Work on fewer bytes is done by the caller: to wake other threads takes about as long as they would save."""
MOST_THREADS = 8
"""More do not copy faster: memory is the limit then."""
PIECES = 4
"""For each thread: one that is held up does fewer of them."""
UNIT = 1 << 12
"""Elements: pieces are multiples, so that no two threads write one line of the cache or one page."""
READ_AROUND = 16
"""Linux maps so many pages that exist around one that is read (fault_around_bytes, default: 64 KiB)."""
LONG_BYTES = 2 * 1024 * 1024
"""Before work on so many bytes others may run."""
LIMIT_S = 600.0
"""How long pieces may take that other threads have begun."""

Work = Callable[[int, slice], None]
"""Does a part of an item: its number, and which of its elements."""
Pieces = list[tuple[int, slice]]


# How many threads


def threads_for(cores: float, processes: int, limit: int = 0, wanted: int = 0) -> int:
    """Return how many threads of a process copy and add. No side effects.

    Arguments:
        cores: what this process may use of the host.
        processes: how many of its role are on the host. Other roles are not counted: workers and servers take turns.
        limit: OMP_NUM_THREADS of a process that runs a script, 0: unset.
        wanted: DISTRUN_COPY_THREADS, which overrides the rest; 0: unset.
    """
    share = min(int(cores / max(1, processes)), MOST_THREADS, limit or MOST_THREADS)
    return wanted or max(1, share)


def threads_here() -> int:
    """Return `threads_for` of this process, by its environment.

    Raises:
        ContractError: DISTRUN_COPY_THREADS is wrong.
    """
    wanted = environ.read("DISTRUN_COPY_THREADS")
    role = environ.text("DMLC_ROLE")
    # It may be a list, of which the first number is meant: one for each level of nested loops. It is set to leave cores
    # to other workers, which wait where servers have much to do.
    limit = "" if role == "server" else environ.text("OMP_NUM_THREADS").partition(",")[0].strip()
    count = {"worker": "DMLC_NUM_WORKER", "server": "DMLC_NUM_SERVER"}.get(role, "DISTRUN_LOCAL_SIZE")
    # Of a job that is started by hand all processes may be here.
    processes = environ.read("DISTRUN_LOCAL_SIZE") or environ.read(count) or 1
    return threads_for(usable_cores(), processes, int(limit) if limit.isdigit() else 0, wanted)


def usable_cores() -> float:
    """Return how many cores this process may use at a time: by its affinity, and by its control groups."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(usable), *_quotas()])


def _quotas(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> list[float]:
    """Return the cores that each control group allows, of those that have a limit.

    Source: the kernel's "Control Group v2", cpu.max; version 1: "CFS Bandwidth Control".
    """
    found = []
    for folder, is_first_version in control_groups("cpu", root, own):
        with contextlib.suppress(OSError, ValueError):
            if is_first_version:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            else:
                quota, period = (folder / "cpu.max").read_text().split()
            if int(quota) > 0:  # `max` is no number, and -1 in version 1
                found.append(int(quota) / int(period))
    return found


def control_groups(controller: str, root: str, own: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's control groups and of those above, whose limits hold for those below; and
    whether they are of version 1.

    Arguments:
        controller: `cpu`, `memory`.
        root, own: where the groups are, and the file that names those of this process.
    """
    from pathlib import Path  # numpy and zmq do not import it

    with contextlib.suppress(OSError):
        for line in Path(own).read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            top = Path(root, controller) if controllers else Path(root)
            folder = top / path.lstrip("/")
            for each in (folder, *folder.parents):
                yield each, bool(controllers)
                if each == top:
                    break


# The threads


class _SharedWork:
    """Pieces of work that the caller and other threads take from, until none is left."""

    def __init__(self, work: Work, pieces: Sequence[Pieces]) -> None:
        self._work = work
        self._left = iter(pieces)
        self._errors: list[BaseException] = []
        self._helping: list[None] = []
        """One for each other thread that may be doing a piece."""
        self._helped: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One for each that has ended."""

    def take_part(self) -> None:
        """Do pieces. Threads: any."""
        try:
            while piece := next(self._left, None):
                for number, run in piece:
                    self._work(number, run)
        except BaseException as err:  # `end` raises it
            self._left = iter(())
            self._errors.append(err)

    def help(self) -> None:
        """Do pieces. Threads: others than the caller's."""
        self._helping.append(None)  # before it takes a piece, so that `end` sees each thread that has one
        self.take_part()
        self._helping.pop()
        self._helped.put(None)

    def end(self) -> None:
        """Return when all is done and nothing is written any more; raise what went wrong. No piece is begun then."""
        self._left = iter(())
        while self._helping:
            try:
                self._helped.get(timeout=LIMIT_S)
            except queue.Empty:
                raise RuntimeFault(f"waited {LIMIT_S:g} s for a thread that copies or adds arrays") from None
            except BaseException as err:  # a signal's handler raised it
                self._errors.append(err)
        self._work = _nothing  # a thread that comes too late keeps no arrays
        if self._errors:
            raise min(self._errors, key=lambda each: isinstance(each, Exception))  # an interrupt is not lost


def _nothing(number: int, run: slice) -> None:
    """Do nothing."""


class _ThreadSet:
    """The threads of one process. They start when they are first needed and end with the process."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[_SharedWork] = queue.SimpleQueue()
        self._count = 0
        self._lock = threading.Lock()

    def run(self, work: _SharedWork, helpers: int) -> None:
        """Do work, with the help of so many threads."""
        # If no more may be started, or the interpreter ends, there are fewer.
        with self._lock, contextlib.suppress(RuntimeError):
            while self._count < helpers:
                threading.Thread(target=self._help, name="distrun-copy", daemon=True).start()
                self._count += 1
        try:
            for _ in range(min(helpers, self._count)):
                self._asked.put(work)
            work.take_part()
        finally:
            work.end()

    def _help(self) -> None:
        while True:
            self._asked.get().help()


_threads: dict[int, _ThreadSet] = {}
"""By process: a forked child has none of its parent's threads."""
_halved = threading.local()


@contextlib.contextmanager
def beside_backward() -> Iterator[None]:
    """Have this thread's calls use half as many threads in the block: others of the process compute meanwhile."""
    before, _halved.is_on = getattr(_halved, "is_on", False), True
    try:
        yield
    finally:
        _halved.is_on = before


class Threads:
    """Who shares work on large arrays. Every element is calculated alike by each thread. Threads: any.

    Arguments:
        count: how many threads, the caller's among them; 0: as `threads_here` says when that is first asked.
        bound: bytes of the smallest work that is shared.
    """

    def __init__(self, count: int = 0, bound: int = SHARED_BYTES) -> None:
        self.wanted = count
        self.bound = bound
        """Work on fewer bytes is not shared."""

    def count(self) -> int:
        """Return how many threads share work now."""
        if not self.wanted:
            self.wanted = threads_here()
        return max(1, self.wanted // 2) if getattr(_halved, "is_on", False) else self.wanted

    def shares(self, nbytes: int) -> bool:
        """Whether work on so many bytes is shared."""
        return nbytes >= self.bound and self.count() > 1

    def share(self, sizes: Sequence[int], work: Work, itemsize: int = 4) -> None:
        """Call `work` for each item with slices that make up all its elements, on several threads if there is much.

        Arguments:
            sizes: elements of each item.
            itemsize: bytes of an element; most are float32, or become it.
        """
        total = sum(sizes)
        if not self.shares(total * itemsize):
            for number, size in enumerate(sizes):
                work(number, slice(0, size))
            return
        count = self.count()
        threads = _threads.get(os.getpid()) or _threads.setdefault(os.getpid(), _ThreadSet())
        threads.run(_SharedWork(work, pieces_of(sizes, total // (count * PIECES))), count - 1)


def pieces_of(sizes: Sequence[int], about: int) -> list[Pieces]:
    """Return items cut into pieces of about so many elements each, of one item or several. No side effects."""
    about = max(UNIT, about - about % UNIT)
    found: list[Pieces] = [[]]
    left = about
    for number, size in enumerate(sizes):
        begin = 0
        if not size:
            found[-1].append((number, slice(0, 0)))  # a step of no elements counts, too
        while begin < size:
            end = size if size - begin <= left + UNIT else begin + max(left - left % UNIT, UNIT)
            found[-1].append((number, slice(begin, end)))
            left -= end - begin
            begin = end
            if left < UNIT:
                found.append([])
                left = about
    return [each for each in found if each]


SHARED = Threads()
"""Those that copy."""


def copy_all(pairs: Sequence[tuple[Array, Array]], *, are_fresh: bool = False) -> None:
    """Copy the elements of flat arrays to others: pairs of source and target, each of one length; all of one dtype.

    Arguments:
        are_fresh: as of `dtypes.copy_fresh`.
    """
    nbytes = sum(source.nbytes for source, _ in pairs)
    if not SHARED.shares(nbytes):
        for source, target in pairs:
            (copy_fresh if are_fresh else copy)(source, target)
        return

    def work(number: int, run: slice) -> None:
        source, target = pairs[number]
        for piece in cached_pieces(run, source.itemsize) if are_fresh else (run,):
            target[piece] = source[piece]

    SHARED.share([source.size for source, _ in pairs], work, pairs[0][0].itemsize)


def give_way(nbytes: int) -> None:
    """Let what waits for this core run first, before work on so many bytes.

    Who has just woken this thread may wait for the core with more to say, to others whose cores have nothing to do. The
    kernel moves it to one of these only milliseconds later.
    """
    if nbytes >= LONG_BYTES and hasattr(os, "sched_yield"):
        os.sched_yield()


def touch(memory: Array, *, is_written: bool) -> None:
    """Have pages of memory mapped that exist: else each would cost a page fault when it is first used.

    Arguments:
        memory: uint8, flat; begins with a page.
        is_written: it is new, so that it has zeros, and will be written here; else it may be mapped read-only.
    """
    step = mmap.PAGESIZE * (1 if is_written else READ_AROUND)
    pages = memory[::step]

    def work(_: int, run: slice) -> None:
        if is_written:
            pages[run] = 0  # to read it first would map it twice
        else:
            np.bitwise_or.reduce(pages[run])

    SHARED.share([len(pages)], work, step)
