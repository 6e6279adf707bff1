"""What a process of a task tells its agent: the progress of a script, where its stacks can be read, how it ended.

A report is a datagram (`contract.metrics`). Sending never blocks; if there is no receiver, the report is lost. At most
one report is sent per INTERVAL_S. Later reports within that time replace each other; the last one is sent by the next
call or, if there is none, by a thread that is started when it is first needed.

The exception that ends a script is told to the agent (`publish`) and to the node of this process (`watch`), and printed
on stderr. There an exception that comes from the loss of a peer is one line, for its traceback tells nothing of the
cause. In every other traceback the frames of distrun_runtime are folded. DISTRUN_TRACEBACK=full, or PS_VERBOSE=1,
prints what Python prints. If the script has an excepthook of its own, that one prints and nothing here does.

Python stacks are available by a signal and by a debugger. On SIGURG, which processes ignore by default, `faulthandler`
writes the stacks of all threads to a file in the agent's folder. This also works if the process hangs in a call. It is
registered only if nothing else handles the signal. A datagram tells the agent, which sends the signal only to such
processes. `py-spy` needs no help of the process, unless the kernel lets only ancestors trace a process (Yama). Then the
agent is permitted explicitly.

Nothing here needs more than the standard library: a store that cannot be created is reported, too.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import math
import os
import re
import select
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from types import TracebackType
from typing import IO, Any

from distrun_runtime.contract import environ, metrics, process
from distrun_runtime.errors import ContractError, RuntimeFault

INTERVAL_S = 0.1
"""Between two reports that are sent, at least."""
RETRY_S = 5.0
"""Between two attempts to send the last report, at most: the agent may be stopped, or have no place for it."""
NAME_LENGTH = 32
"""Characters of a value's name; what is longer is cut."""

__all__ = ["catch_up", "meaning", "printed", "publish", "report", "watch"]


def report(*, step: object = None, total: object = None, **values: object) -> None:
    """Report how far the script is, for `distrun status`, `distrun top` and the progress shown by `distrun launch`.

    Call it once a step, in any process of a task, from any thread. It never raises and never waits; outside a job it
    does nothing. What is given replaces what was reported before under the same name. At most 10 reports a second are
    sent, and always the last one.

    Arguments:
        step: number of steps that are done.
        total: number of steps to do. With it, progress and the remaining time are shown.
        values: numbers by name, such as `loss=0.3`, of which charts are shown: Python's, numpy's, or arrays and tensors
            without dimensions. At most 16, with names of at most 32 characters. NaN is shown as such. What is no number
            is left out. Of a tensor that is not in host memory, only a value that is sent at once is read, which waits
            for it.
    """
    with contextlib.suppress(Exception):
        reporter = _reporters.current()
        if reporter is not None:
            reporter.report(step, total, values)


class Reporter:
    """Reports of one process. For any thread.

    Arguments:
        sender: sends datagrams.
        clock: seconds, any epoch.
        has_thread: a thread sends what is left when a burst of reports has ended. Without, call `flush`.
    """

    def __init__(
        self,
        sender: metrics.Sender,
        clock: Callable[[], float] = time.monotonic,
        *,
        has_thread: bool = True,
    ) -> None:
        self._sender = sender
        self._clock = clock
        self._has_thread = has_thread
        self._lock = threading.RLock()
        """Guards what follows. A signal handler may report while its thread does."""
        self._step: int | None = None
        self._total: int | None = None
        self._values: dict[str, float] = {}
        self._elsewhere: dict[str, object] = {}
        """Values that are not in host memory and were not read yet."""
        self._next_at = 0.0
        self._is_due = False
        """Something was reported and not sent."""
        self._wake: threading.Event | None = None

    def report(self, step: object, total: object, values: dict[str, object]) -> None:
        """Take in a report, and send it if it is time."""
        with self._lock:
            self._step = _whole(step, self._step)
            self._total = _whole(total, self._total)
            now = self._clock()
            is_time = now >= self._next_at
            if is_time:
                values = {**self._elsewhere, **values}
            for name, value in values.items():
                self._take(name[:NAME_LENGTH], value, is_time)
            self._is_due = True
            if is_time:
                self._send(now)
            if self._is_due and self._has_thread:
                self._send_later()

    def flush(self) -> bool:
        """Send what was reported and not sent; return whether nothing is left."""
        with self._lock:
            if self._is_due:
                self._send(self._clock())
            return not self._is_due

    def _take(self, name: str, value: object, is_time: bool) -> None:
        self._values.pop(name, None)  # the last one is the newest
        self._elsewhere.pop(name, None)
        if not is_time and not _is_here(value):
            # Read by a later call: in another thread that could disturb what the script does on the device. Detached,
            # as it would keep the memory of a whole graph.
            detach = getattr(value, "detach", None)
            self._elsewhere[name] = value if detach is None else detach()
        else:
            number = _number(value)
            if number is not None:
                self._values[name] = number
        for known in (self._values, self._elsewhere):
            while len(known) > metrics.VALUES:  # the last ones stay
                del known[next(iter(known))]

    def _send(self, now: float) -> None:
        tell_stacks(now)
        self._next_at = now + INTERVAL_S
        self._is_due = not self._sender.send(metrics.REPORT, step=self._step, total=self._total, values=self._values)

    def _send_later(self) -> None:
        """Have the rest of a burst, or what could not be sent, sent when it is time."""
        if self._wake is None:
            self._wake = threading.Event()
            threading.Thread(target=self._run, args=(self._wake,), name="distrun-report", daemon=True).start()
        self._wake.set()

    def _run(self, wake: threading.Event) -> None:
        while wake.wait():
            wake.clear()
            pause_s = INTERVAL_S
            time.sleep(pause_s)
            while not self.flush():
                pause_s = min(RETRY_S, 2 * pause_s)
                time.sleep(pause_s)


class _Reporters:
    """The reporter of this process: a forked child gets one of its own."""

    def __init__(self) -> None:
        self._pid = 0
        self._current: Reporter | None = None

    def current(self) -> Reporter | None:
        """Return it, made if need be; None: there is no agent to report to."""
        if self._pid != os.getpid():
            self._current = None
            if environ.text("DISTRUN_METRICS_SOCKET"):
                offer_stacks()
                self._current = Reporter(metrics.Sender())
                atexit.register(self._current.flush)
            self._pid = os.getpid()
        return self._current


_reporters = _Reporters()


def _is_here(value: object) -> bool:
    """Return whether a value can be read without waiting for a device."""
    device = getattr(value, "device", None)
    return device is None or str(device).partition(":")[0].lower() in ("cpu", "tfrt_cpu_0")


def _number(value: object) -> float | None:
    """Return a value as a number that JSON has; None: it is none."""
    item: Any = value
    try:
        if not isinstance(item, (int, float)):
            item = item.item() if hasattr(item, "item") else float(item)
        return int(item) if isinstance(item, int) else float(item)
    except Exception:  # whatever was given: reporting never disturbs a script
        return None


def _whole(value: object, before: int | None) -> int | None:
    """Return a number of steps; what was known before, if it is not given or none."""
    number = None if value is None else _number(value)
    return before if number is None or not math.isfinite(number) else int(number)


# The stacks of this process


AGAIN_S = 10.0
"""How often the agent is told again: datagrams may be lost."""
YAMA = "/proc/sys/kernel/yama/ptrace_scope"
_PR_SET_PTRACER = 0x59616D61


class Offer:
    """That the agent may ask this process for its stacks. For any thread."""

    def __init__(self, sender: metrics.Sender, file: IO[bytes], path: str) -> None:
        self.pid = os.getpid()
        self._sender = sender
        self._file = file
        """Where the stacks go; open as long as the process lives."""
        self._path = path
        self._start = process.identity(self.pid).start
        self._next_at = 0.0

    def tell(self, now: float | None = None) -> None:
        """Tell the agent, if it is time. If the script handles the signal by now, take it back."""
        now = time.monotonic() if now is None else now
        if now < self._next_at:
            return
        self._next_at = now + AGAIN_S
        how = metrics.BY_SIGURG if signal.getsignal(signal.SIGURG) == signal.SIG_DFL else ""
        self._sender.send(metrics.STACKS, pid=self.pid, start=self._start, how=how, path=self._path)


class _Offers:
    """The offer of this process; a forked child has none."""

    def __init__(self) -> None:
        self.pid = 0
        self.offer: Offer | None = None


_offers = _Offers()


def offer_stacks() -> None:
    """Offer the stacks of this process to its agent, once; without an agent, do nothing. Never raises."""
    if _offers.pid == os.getpid():
        return
    is_child = _offers.pid != 0
    _offers.pid, _offers.offer = os.getpid(), None
    if is_child:
        return  # it has its parent's handler, and its parent's file
    with contextlib.suppress(Exception):
        _offers.offer = _make_offer()
        tell_stacks()


def tell_stacks(now: float | None = None) -> None:
    """Tell the agent again, if it is time. Never raises."""
    found = _offers.offer
    if found is not None and found.pid == os.getpid():
        with contextlib.suppress(Exception):
            found.tell(now)


def _make_offer() -> Offer | None:
    socket = environ.text("DISTRUN_METRICS_SOCKET")
    folder = os.path.dirname(socket or "")
    if not socket or not os.path.isdir(folder):
        return None
    let_trace(folder)
    if is_handled(signal.SIGURG):
        return None
    path = os.path.join(folder, metrics.STACKS_FILE % os.getpid())
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)
    faulthandler.register(signal.SIGURG, file=file, all_threads=True, chain=False)
    return Offer(metrics.Sender(), file, path)


def is_handled(number: signal.Signals, status: str = "/proc/self/status") -> bool:
    """Return whether anything in this process handles a signal, or ignores it on purpose."""
    if signal.getsignal(number) != signal.SIG_DFL:
        return True
    # Python does not know handlers that a library has set after its start.
    with contextlib.suppress(OSError), open(status, encoding="ascii", errors="replace") as lines:
        for line in lines:
            name, _, mask = line.partition(":")
            if name in ("SigCgt", "SigIgn", "SigBlk") and int(mask, 16) >> (number - 1) & 1:
                return True
    return False


def let_trace(folder: str, yama: str = YAMA) -> bool:
    """Let this job's agent, and what it starts, trace this process; return whether that was needed and possible."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        with open(yama, encoding="ascii") as file:
            if file.read().strip() != "1":
                return False  # either every process of this user may trace, or none
        with open(os.path.join(folder, "agent.json"), encoding="utf-8") as file:
            agent = int(json.load(file)["agent"]["pid"])
    except (OSError, LookupError, TypeError, ValueError):
        return False
    import ctypes  # only here, and its import takes long

    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(agent), 0, 0, 0) == 0)


# The exception that ends a script


FULL = "full"

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_CACHED = re.compile(r"[^\s\"']*/distrun/runtime/[0-9a-f]{64}/(?=distrun_runtime)")
"""Where an agent keeps the runtime on its host: of no use to a reader."""


class _Hook:
    """Takes the place of sys.excepthook."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[BaseException], None]] = []
        self._before: Any = None
        self._pid = 0

    def install(self) -> None:
        """Take the place, unless it is taken already; the handler that is there is called afterwards."""
        if sys.excepthook is not self and self._before is None:
            self._before, sys.excepthook = sys.excepthook, self
            self._pid = os.getpid()

    @property
    def was_replaced(self) -> bool:
        """Whether another handler has taken our place, and may not call us."""
        return self._before is not None and sys.excepthook is not self

    def __call__(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if os.getpid() != self._pid:  # a forked child: its end is not the script's
            self._before(kind, error, where)
            return
        self.tell(error)
        if self._before is not sys.__excepthook__ or sys.stderr is None or _is_full():
            self._before(kind, error, where)
            return
        try:
            text = printed(error)
        except Exception:  # whatever is odd about this exception: the user must see it
            self._before(kind, error, where)
            return
        sys.stderr.write(text)
        sys.stderr.flush()

    def tell(self, error: BaseException) -> None:
        """Tell the listeners, or the agent if there are none."""
        if not self.listeners:
            publish(meaning(error))
        for listener in self.listeners:
            listener(error)


_hook = _Hook()


def watch(listener: Callable[[BaseException], None] | None = None) -> None:
    """From now on report the exception that ends this script, and tell `listener` of it."""
    _hook.install()
    if listener is not None:
        _hook.listeners.append(listener)


def catch_up() -> None:
    """Report, at the end of the process, an exception that went to a hook which took our place."""
    error = getattr(sys, "last_value", None)  # what the interpreter gave to the hook
    if _hook.was_replaced and isinstance(error, BaseException) and not hasattr(sys, "ps1"):
        _hook.tell(error)


def meaning(error: BaseException) -> dict[str, str]:
    """Return what an exception that ends the script means to the agent, as members of a publish line. No side effects.

    One that comes of a lost peer is a consequence; a Ctrl-C is no failure.
    """
    for each in _chain(error):
        if isinstance(each, RuntimeFault) and each.lost_peer:
            return {"lost_peer": each.lost_peer, "message": str(each)}
        if isinstance(each, (KeyboardInterrupt, SystemExit)):
            return {}
    return {"failed": f"{type(error).__name__}: {error}"}


def printed(error: BaseException) -> str:
    """Return what is printed of an exception that ends the script: a line, or a traceback with folded frames."""
    lost = next((each for each in _chain(error) if isinstance(each, RuntimeFault) and each.lost_peer), None)
    if lost is not None:
        return _shortened(_line(error, lost)) + "\n"
    shown = traceback.TracebackException.from_exception(error)
    _fold(shown, error)
    return _shortened("".join(shown.format()))


def _line(error: BaseException, lost: RuntimeFault) -> str:
    text = f"distrun: ended by the loss of {lost.lost_peer}: {type(lost).__name__}: {_flat(lost)}"
    if error is not lost:
        text += f"; the script made of it {type(error).__name__}: {_flat(error)}"
    frames: dict[str, None] = {}
    for each in reversed(list(_chain(error))):
        for frame in traceback.extract_tb(each.__traceback__):
            if not _is_foreign(frame.filename):
                frames[f"{_near(frame.filename)}:{frame.lineno} in {frame.name}"] = None
    return f"{text} (at {', '.join(frames)})" if frames else text


def _flat(error: BaseException) -> str:
    return " ".join(" ".join([str(error), *map(str, getattr(error, "__notes__", ()))]).split())


def _near(path: str) -> str:
    """Return a path as it is seen from the current folder, if it is below that."""
    try:
        near = os.path.relpath(path)
    except (OSError, ValueError):
        return path
    return path if path.startswith("<") or near.startswith("..") else near


def _is_ours(path: str) -> bool:
    return os.path.abspath(path).startswith(_PACKAGE)


def _is_foreign(path: str) -> bool:
    """Whether a file belongs to distrun, to Python, or to an installed package: it is not the script's own."""
    whole = os.path.abspath(path)
    parts = whole.split(os.sep)
    if _is_ours(path) or "site-packages" in parts or "dist-packages" in parts or path.startswith("<frozen"):
        return True
    import sysconfig  # for an exception only

    return whole.startswith(sysconfig.get_path("stdlib") + os.sep)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what it came from, the outermost first, also what `from None` hides."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and not any(cause is other for other in seen):
        seen.append(cause)
        yield cause
        cause = cause.__cause__ or cause.__context__


class _FoldedStack(traceback.StackSummary):
    """A stack that is printed with runs of our frames folded to a line each."""

    keeps_last = False
    """Whether the innermost run is shown, because the error may be ours."""

    def format(self, **more: Any) -> list[str]:
        """Return the lines, as StackSummary does."""
        lines: list[str] = []
        runs = [(ours, list(frames)) for ours, frames in groupby(self, lambda frame: _is_ours(frame.filename))]
        for number, (ours, frames) in enumerate(runs):
            if ours and not (self.keeps_last and number == len(runs) - 1):
                count = "1 frame" if len(frames) == 1 else f"{len(frames)} frames"
                lines.append(f"  [{count} of distrun_runtime; DISTRUN_TRACEBACK=full shows all]\n")
            else:
                lines += traceback.StackSummary.from_list(frames).format(**more)
        return lines


def _fold(shown: traceback.TracebackException, error: BaseException) -> None:
    """Fold the frames of an exception, and of those that it came from or consists of."""
    stack = _FoldedStack(shown.stack)
    stack.keeps_last = not isinstance(error, RuntimeFault)
    shown.stack = stack
    pairs: list[tuple[Any, Any]] = [(shown.__cause__, error.__cause__), (shown.__context__, error.__context__)]
    inner: Iterable[Any] = getattr(shown, "exceptions", None) or ()
    pairs += zip(inner, getattr(error, "exceptions", ()), strict=False)
    for below, cause in pairs:
        if below is not None and cause is not None:
            _fold(below, cause)


def _shortened(text: str) -> str:
    """Return a text in which the runtime's folder on this host is left out of paths."""
    return _CACHED.sub("", text)


def _is_full() -> bool:
    try:
        return bool(environ.read("PS_VERBOSE")) or environ.read("DISTRUN_TRACEBACK") == FULL
    except ContractError:
        return True


# Facts that a task tells its agent: one JSON object a line on the descriptor DISTRUN_PUBLISH_FD.
#
# A program that a task starts often has the task's environment, but not its descriptors. There the number may be that
# of any other file. So DISTRUN_PUBLISH_PIPE says which pipe it has to be.


def publish(facts: Mapping[str, str]) -> None:
    """Tell the agent `facts`; without an agent, or without the agent's pipe, do nothing.

    A line is shorter than PIPE_BUF (4096 on Linux), so lines of several threads do not mix (POSIX write(2)).
    """
    descriptor = environ.read("DISTRUN_PUBLISH_FD")
    if descriptor is None or not facts or not _is_agents(descriptor):
        return
    line = b""
    for limit in (1000, 200, 50):  # characters of a value; one may need twelve bytes
        line = (json.dumps({name: value[:limit] for name, value in facts.items()}) + "\n").encode()
        if len(line) <= select.PIPE_BUF:
            break
    try:
        os.write(descriptor, line)
    except OSError:
        # The agent is gone; it is about to end us, or we run without it.
        return


def _is_agents(descriptor: int) -> bool:
    """Return whether a descriptor is the agent's pipe, as far as the environment tells."""
    named = environ.text("DISTRUN_PUBLISH_PIPE")
    try:
        return process.pipe_identity(descriptor) == named if named else stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return False
