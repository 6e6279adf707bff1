"""Reports the exception that ends a script: to the agent, to the node of this process, and on stderr.

On stderr an exception that comes from the loss of a peer is one line, for its traceback tells nothing of the cause.
In every other traceback the frames of distrun_runtime are folded. DISTRUN_TRACEBACK=full, or PS_VERBOSE=1, prints
what Python prints. If the script has an excepthook of its own, that one prints and nothing here does.

Nothing here needs more than the standard library: a store that cannot be created is reported, too.
"""

from __future__ import annotations

import json
import os
import re
import select
import stat
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from types import TracebackType
from typing import Any

from distrun_runtime.contract import environ, process
from distrun_runtime.errors import ContractError, RuntimeFault

FULL = "full"

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_CACHED = re.compile(r"[^\s\"']*/distrun/runtime/[0-9a-f]{64}/(?=distrun_runtime)")
"""Where an agent keeps the runtime on its host: of no use to a reader."""

Listener = Callable[[BaseException], None]


class _Hook:
    """Takes the place of sys.excepthook."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
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


def watch(listener: Listener | None = None) -> None:
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
