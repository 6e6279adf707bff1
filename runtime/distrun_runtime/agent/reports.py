"""Receives the datagrams of tasks (`contract/metrics.py`) and keeps the last one of each kind. Never blocks.

Each task has its own socket, so a busy task takes no room from the others. A turn of the agent's loop costs more than
a datagram. So after some datagrams have arrived, the agent reads the next ones after a short pause.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, Union

from distrun_runtime.contract import metrics, process

TURN = 32
"""Datagrams of a task that are taken in one turn of the loop."""
FULL = 10
"""So many does Linux keep in a socket (net.unix.max_dgram_qlen), about; what comes then is dropped."""
SHORTEST_S, FIRST_S, LONGEST_S = 0.05, 0.5, 1.0
"""How long they are left there: by how many come, FIRST_S before that is known."""
PATH_BYTES = 100
"""A longer path does not fit into a socket's address everywhere."""
NAMES = 32
"""Numbers of one datagram that are kept, at most."""
TEXT = 200
"""Characters that are kept of a text."""
HIGHEST = 1 << 63
"""Whole numbers are smaller than this: readers may make floats of them."""

Number = Union[int, float]


class Reports:
    """The sockets of one agent's tasks in its `folder`, and what came there."""

    def __init__(self, folder: str, selector: selectors.BaseSelector) -> None:
        self.last: Dict[str, Dict[str, Dict[str, Any]]] = {}
        """By task and kind, as the frame `metrics` has it: `time` is when it came."""
        self.sizes: Dict[Tuple[str, str], int] = {}
        """Bytes of each, about, by task and kind."""
        self.on_stacks: Callable[[str, Mapping[str, Any]], None] = lambda task, found: None
        """Called with each datagram of that kind: several processes of a task may send them."""
        self.next_at = math.inf
        """When `tick` has something to do (monotonic clock)."""
        self._folder = folder
        self._descriptor = -1
        """Of the folder, if its name is too long for a socket's address."""
        self._selector = selector
        self._sockets: Dict[str, socket.socket] = {}
        self._is_watching = True
        """The selector says when something comes; else it is looked for at `next_at`."""
        self._pause_s = FIRST_S

    def open(self, task: str) -> str:
        """Listen to a task that is about to start, and return what it calls its socket by. Raises OSError."""
        self.last.pop(task, None)
        name = f"{task}.{metrics.SOCKET}"
        path = self._path(name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._folder, name))  # of an earlier attempt
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            listening.setblocking(False)
            listening.bind(path)
            os.chmod(path, 0o600)  # the folder lets nobody else in anyway
        except OSError:
            listening.close()
            raise
        self._watch(False)
        if task in self._sockets:
            self._sockets[task].close()
        self._sockets[task] = listening
        self._watch(True)
        return path

    def tick(self, now: float) -> None:
        """Take what has come meanwhile; if that is nothing, wait for the next one."""
        most = self.drain()
        if most >= FULL:
            self._pause_s = max(SHORTEST_S, self._pause_s / 2)
        elif most < FULL // 2:
            self._pause_s = min(LONGEST_S, self._pause_s * 2)
        self._watch(not most)
        self.next_at = now + self._pause_s if most else math.inf

    def fetch(self, now: float) -> None:
        """Take what has come, before the last values are used."""
        if not self._is_watching:
            self.drain()
            self.next_at = now + self._pause_s

    def drain(self) -> int:
        """Take what has come, a part of it if that is much; return how many came from the task that sent most."""
        return max((self._drain(task, each) for task, each in self._sockets.items()), default=0)

    def close(self) -> None:
        """Remove the sockets."""
        self._watch(False)
        self.next_at = math.inf
        for task, each in self._sockets.items():
            each.close()
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, f"{task}.{metrics.SOCKET}"))
        self._sockets = {}
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _path(self, name: str) -> str:
        """Return what we and the tasks call a file of the folder by."""
        path = os.path.join(self._folder, name)
        if len(os.fsencode(path)) <= PATH_BYTES:
            return path
        if process.is_portable():
            raise OSError(f"{path} is too long for a socket's address")
        if self._descriptor < 0:
            self._descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # Tasks reach it by a descriptor of ours, for they are of the same user.
        return f"/proc/{os.getpid()}/fd/{self._descriptor}/{name}"

    def _watch(self, wanted: bool) -> None:
        """Have the selector say when something comes, or not any more."""
        if wanted and not self._is_watching:
            for each in self._sockets.values():
                self._selector.register(each.fileno(), selectors.EVENT_READ, self._on_first)
        elif not wanted and self._is_watching:
            for each in self._sockets.values():
                self._selector.unregister(each.fileno())
        self._is_watching = wanted

    def _on_first(self) -> None:
        self._watch(False)
        self.drain()
        self.next_at = time.monotonic() + self._pause_s

    def _drain(self, task: str, listening: socket.socket) -> int:
        for count in range(TURN):
            try:
                data = listening.recv(metrics.LIMIT + 1)
            except OSError:
                return count
            found = metrics.decode(data) if len(data) <= metrics.LIMIT else None
            if found is None or found["task"] != task:
                continue
            if found["kind"] == metrics.STACKS:
                self.on_stacks(task, found)
            self._keep(task, found["kind"], found)
            self.sizes[task, found["kind"]] = len(data)
        return TURN

    def _keep(self, task: str, kind: str, found: Mapping[str, Any]) -> None:
        kept = checked(kind, found)
        if kept is None:
            return
        if kind == metrics.WAITING and not kept["for"]:
            self.last.get(task, {}).pop(kind, None)
        else:
            self.last.setdefault(task, {})[kind] = dict(kept, time=round(time.time(), 3))


def checked(kind: str, found: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    """Return the members that a datagram of this kind has; None if one that it needs is not there. No side effects.

    What is of another type is left out: a task may send anything, and all of it goes to whoever watches the job.
    """
    if kind == metrics.REPORT:
        whole = {name: number(found.get(name)) for name in ("step", "total")}
        return {**whole, "values": _numbers(found.get("values"))}
    if kind == metrics.COUNTERS:
        kept: Dict[str, Any] = {"role": _text(found.get("role")), "values": _numbers(found.get("values"))}
        lags = found.get("lags")
        if isinstance(lags, dict):
            kept["lags"] = {
                _text(rank): [number(each) for each in row[:4]] for rank, row in lags.items() if isinstance(row, list)
            }
        return kept
    if kind == metrics.WAITING:
        names = found.get("for")
        if not isinstance(names, list):
            return None
        told = {name: _text(found.get(name)) for name in ("key", "call")}
        return {"for": [_text(name) for name in names[:NAMES]], **told, "since": number(found.get("since"))}
    return {"pid": number(found.get("pid")), "how": _text(found.get("how")), "path": _text(found.get("path"), 4096)}


def number(value: object) -> Optional[Number]:
    """Return a number as it is, not a number and the infinities too; None of what is none, or is too large."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if isinstance(value, float) or -HIGHEST <= value < HIGHEST else None


def _numbers(values: object) -> Dict[str, Number]:
    rows = list(values.items()) if isinstance(values, dict) else []
    found: List[Any] = [(_text(name), number(value)) for name, value in rows[:NAMES]]
    return {name: value for name, value in found if value is not None}


def _text(value: object, limit: int = TEXT) -> str:
    """Return a text, or a number as one (a key of the store); empty of anything else."""
    return str(value)[:limit] if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
