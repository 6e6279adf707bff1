"""Pending: a call that goes on after it has returned, what becomes of it, and the thread that makes some of them.

An error of a call is raised once: by `wait` of its Pending; of a push that is not waited for, by the store's next call
(`Late`).
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING

from distrun_runtime.arrays import device as devices
from distrun_runtime.contract.process import own_pid
from distrun_runtime.errors import KVError, RuntimeFault, StoreClosed, TimedOut
from distrun_runtime.ps.shards import Notes

if TYPE_CHECKING:
    from distrun_runtime.arrays.gpu import GpuArray
    from distrun_runtime.arrays.gpu_devices import Loan

__all__ = [
    "BackgroundCall",
    "BorrowedArrays",
    "CompletedCall",
    "Late",
    "Line",
    "Pending",
    "awaited",
    "check_process",
    "check_seconds",
]


class Pending(ABC):
    """The outcome of one data call, when it is there.

    Until `wait` has returned, the arrays that were given to a call with wait=False are lent to the store: values must
    not be written, outputs not be read. Any thread may wait, also several times.
    """

    what: str
    """The call, for people: `pull of key 'w'`."""
    skipped: Notes = MappingProxyType({})
    """Of a `pushpull` or `skip_round` that is done: empty unless a worker skipped the round. Then, by rank in the job
    (`KVStore.members`), what its workers said: the note of one that skipped it, None of one that contributed."""

    def __repr__(self) -> str:
        return f"<Pending {self.what}{': done' if self.is_done else ''}>"

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, without waiting for anybody."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the call is done: outputs are filled, values may be overwritten.

        Arguments:
            timeout_s: seconds; None waits as long as the store lets any call wait.

        Raises:
            KVError: timeout_s is not a number of seconds.
            TimedOut: it took longer; the message says what was waited for. It may be waited for again.
            StoreClosed: in a forked child.
            RuntimeFault: what went wrong with the call. Having been raised here, it is not raised by a later call.
        """

    def add_done_callback(self, call: Callable[[Pending], object]) -> None:
        """Have `call(pending)` called once, when outputs are filled, or the call has failed: then `wait` raises why.

        It is called in a thread of the store, one after the other; it must not wait for other calls. What it raises is
        shown on stderr. For what was under way, nothing is called in a forked child.
        """
        self.when_done(lambda: _callbacks().put(self, call))

    @abstractmethod
    def when_done(self, act: Callable[[], None]) -> None:
        """Call `act` once it is done: now, or soon, in any thread, which must not wait. Not for users."""

    def fill(self) -> None:  # noqa: B027  # most calls have no outputs, or have filled them
        """Fill the outputs of a call that is done; what is wrong with it is left for `wait` to raise. Not for users."""

    def note_reads(self) -> None:  # noqa: B027  # most calls have nothing to note
        """Note that what the program has queued on GPUs by now may read the outputs. Not for users.

        For those who lend outputs that others go on reading, until they wait.
        """

    def left_waiting(self) -> None:  # noqa: B027  # most calls have nothing to note
        """Note that the call which made it has stopped waiting, before it was done. Not for users."""


def awaited(pending: Pending, wait: bool) -> Pending:
    """Return a call, with `wait` when it is done."""
    if wait:
        try:
            pending.wait()
        except BaseException:
            if not pending.is_done:
                pending.left_waiting()
            raise
    return pending


class _Callbacks:
    """Calls what is to be called of calls that are done, in a thread of its own, which starts with the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: queue.SimpleQueue[tuple[Pending, Callable[[Pending], object]]] = queue.SimpleQueue()
        self._is_started = False

    def put(self, pending: Pending, call: Callable[[Pending], object]) -> None:
        """Have `call(pending)` called; `pending` is done, so that it is not long waited for."""
        self._due.put((pending, call))
        with self._lock:
            if not self._is_started:
                threading.Thread(target=self._work, name="distrun-callbacks", daemon=True).start()
                self._is_started = True

    def _work(self) -> None:
        while True:
            pending, call = self._due.get()
            # One that ends the script elsewhere, such as SystemExit, would end this thread, and with it all callbacks.
            with suppress(BaseException):  # It is for those who wait for it, such as the callback.
                pending.fill()
            try:
                call(pending)
            except BaseException:
                traceback.print_exc()
            del pending, call  # And the arrays that they refer to.


_CALLBACKS: dict[int, _Callbacks] = {}
"""By process: a forked child has no thread of its parent's, and perhaps its lock held."""


def _callbacks() -> _Callbacks:
    return _CALLBACKS.get(own_pid()) or _CALLBACKS.setdefault(own_pid(), _Callbacks())


class Late:
    """Errors of calls that were not waited for. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: dict[object, BaseException] = {}
        """By owner, in their order."""
        self._told: list[object] = []
        """Owners that a thread is waiting for."""

    @contextmanager
    def told(self, owner: object) -> Iterator[None]:
        """While the block runs, its error is raised there; afterwards neither it nor others of its cause are raised."""
        with self._lock:
            self._told.append(owner)
        try:
            yield
        except RuntimeFault as err:
            cause = _cause(owner, err)
            with self._lock:
                self._errors = {other: each for other, each in self._errors.items() if _cause(other, each) != cause}
            raise
        finally:
            with self._lock:
                self._told.remove(owner)  # once: another thread may be waiting for the same
                self._errors.pop(owner, None)

    def add(self, owner: object, error: BaseException) -> None:
        """Note the error of `owner`, for the store's next call to raise."""
        with self._lock:
            self._errors[owner] = error

    def forget(self, owner: object) -> None:
        """Note that `owner` was waited for, and so told its caller itself."""
        with self._lock:
            self._errors.pop(owner, None)

    @property
    def has_errors(self) -> bool:
        """Whether `raise_first` would raise one, now or when no thread waits for its call any more."""
        return bool(self._errors)

    def raise_first(self) -> None:
        """Raise the first error, if there is any; what the others say, which mostly follow from it, are its notes."""
        if not self._errors:
            return
        with self._lock:
            errors = [pair for pair in self._errors.items() if pair[0] not in self._told]
            for owner, _ in errors:
                del self._errors[owner]
        if errors:
            first = errors[0][1]
            # Many calls of a store fail of one cause: it is told once.
            others: dict[str, str] = {}
            for owner, error in errors:
                others.setdefault(_cause(owner, error), str(error))
            del others[_cause(*errors[0])]
            if others:
                # As add_note does, which Python 3.10 does not have.
                notes = vars(first).get("__notes__", [])
                vars(first)["__notes__"] = [*notes, *(f"and also: {text}" for text in others.values())]
            raise first


def _cause(owner: object, error: BaseException) -> str:
    """Return what an error says, without its call."""
    return str(error).removeprefix(f"{getattr(owner, 'what', '')}: ")


class CompletedCall(Pending):
    """A call that was over when it returned.

    Arguments:
        then: is called by each `wait`.
    """

    def __init__(
        self,
        what: str,
        error: BaseException | None = None,
        late: Late | None = None,
        then: Callable[[], object] | None = None,
    ) -> None:
        self.what = what
        self._then = then
        self._error = error
        self._late = late
        if error is not None and late is not None:
            late.add(self, error)

    @property
    def is_done(self) -> bool:
        """True."""
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Return, or raise what went wrong."""
        check_seconds(timeout_s)
        if self._error is not None:
            if self._late is not None:
                self._late.forget(self)
            raise self._error
        if self._then is not None:
            self._then()

    def when_done(self, act: Callable[[], None]) -> None:
        """Call it."""
        act()


class BorrowedArrays:
    """The arrays in GPU memory that a call of a store was given: for most calls none.

    As a context manager it gives them back if the block raises.
    """

    __slots__ = ("_loan",)

    def __init__(self) -> None:
        self._loan: Loan | None = None

    def take(self, arrays: Sequence[GpuArray]) -> None:
        """Borrow some more."""
        if self._loan is not None:
            self._loan.add(arrays)
        elif arrays:
            self._loan = devices.gpus().borrowing.borrow(arrays)

    def note_reads(self) -> None:
        """Let what the store does with them from now on wait for what the program has queued by now."""
        if self._loan is not None:
            self._loan.note_reads()

    def give_back(self, *, keeps: bool = False) -> None:
        """Let what the program does with them from now on wait for what the store has done.

        Arguments:
            keeps: the store may do more with them: they are to be given back again.
        """
        if self._loan is not None:
            self._loan.end(keeps=keeps)

    def until(self, pending: Pending) -> Pending:
        """Return a call that gives them back when it is waited for."""
        return pending if self._loan is None else _BorrowingCall(pending, self)

    def __enter__(self) -> BorrowedArrays:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.give_back()


class _BorrowingCall(Pending):
    """A call with arrays in GPU memory."""

    def __init__(self, call: Pending, borrowed: BorrowedArrays) -> None:
        self.what = call.what
        self._call = call
        self._borrowed = borrowed

    @property
    def skipped(self) -> Notes:  # type: ignore[override]
        """As of the call."""
        return self._call.skipped

    @property
    def is_done(self) -> bool:
        """Whether the call is."""
        return self._call.is_done

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the call is done, and the program's streams wait for what is still to be done by the GPU."""
        try:
            self._call.wait(timeout_s)
        except BaseException:
            # It may be waited for again, and then fill the outputs.
            if self._call.is_done:
                self._borrowed.give_back(keeps=True)
            raise
        self._borrowed.give_back()

    def fill(self) -> None:
        """Let the streams that were current follow what fills the outputs; `wait` lets those follow that are then."""
        self._call.fill()
        self._borrowed.give_back(keeps=True)

    def when_done(self, act: Callable[[], None]) -> None:
        """Call it when the call is."""
        self._call.when_done(act)

    def note_reads(self) -> None:
        """Let what is still to be done come after what the program has queued by now."""
        self._borrowed.note_reads()

    def left_waiting(self) -> None:
        """Tell the call."""
        self._call.left_waiting()


class BackgroundCall(Pending):
    """A call that is made by a function, now or by another thread."""

    def __init__(self, what: str, body: Callable[[], None], late: Late) -> None:
        self.what = what
        self._body = body
        self._late = late
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._followers: list[Callable[[], None]] = []
        self._pid = os.getpid()

    @property
    def is_done(self) -> bool:
        """Whether the function has ended."""
        return self._over.is_set()

    def run(self) -> None:
        """Call the function; never raises."""
        try:
            self._body()
        except BaseException as err:
            self._error = err
            self._late.add(self, err)
        finally:
            del self._body  # It holds the arrays, which are not lent any more.
            with self._lock:
                self._over.set()
            for follow in self._followers:
                follow()

    def when_done(self, act: Callable[[], None]) -> None:
        """Call it when the function has ended."""
        with self._lock:
            if not self._over.is_set():
                self._followers.append(act)
                return
        act()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the function has ended, or raise what it raised."""
        check_process(self._pid, self.what)
        timeout_s = check_seconds(timeout_s)
        started = time.monotonic()
        with self._late.told(self):
            if not self._over.wait(timeout_s):
                raise TimedOut(f"{self.what}: not done after {time.monotonic() - started:.1f} s")
        if self._error is not None:
            raise self._error


class Line:
    """Tasks one after the other in a thread of their own, which starts with the first.

    It is a daemon, as a task may wait for other workers: the end of the process must not.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[BackgroundCall] = queue.SimpleQueue()
        self._last: BackgroundCall | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Whether every task that was put in has ended."""
        return self._last is None or self._last.is_done

    def put(self, task: BackgroundCall) -> None:
        """Run the task after those before it. Not for two threads at the same time."""
        self._last = task
        self._tasks.put(task)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Return when every task that was put in has ended, well or not; at once if called by a task."""
        last = self._last
        if last is not None and threading.current_thread() is not self._thread:
            last._over.wait()

    def _work(self) -> None:
        while True:
            self._tasks.get().run()


def check_seconds(timeout_s: object) -> float | None:
    """Return a time limit in seconds as a float that locks take; None for none.

    Raises:
        KVError: it is neither a number nor None.
    """
    if timeout_s is None:
        return None
    if isinstance(timeout_s, Real) and not math.isnan(timeout_s):
        return min(float(timeout_s), threading.TIMEOUT_MAX)
    raise KVError(f"wait: timeout_s is a number of seconds or None, not {timeout_s!r}")


def check_process(pid: int, what: str) -> None:
    """Return if this is process `pid`, which made the call `what`.

    Raises:
        StoreClosed: it is a forked child, in which no thread goes on with the call.
    """
    if os.getpid() != pid:
        raise StoreClosed(f"{what} was called in process {pid}; in its forked child {os.getpid()} it never ends")
