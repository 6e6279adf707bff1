"""Takes the datagrams of tasks (`contract/metrics.py`) and keeps the last of each kind. Nothing here waits."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, Union

from distrun_runtime.contract import metrics, process

TURN = 64
"""Datagrams that are taken in one turn of the loop."""
PATH_BYTES = 100
"""A longer path does not fit into a socket's address everywhere."""
NAMES = 32
"""Of the numbers of one datagram, so many are kept."""
TEXT = 200
"""Characters that are kept of a text."""
HIGHEST = 1 << 63
"""Whole numbers are smaller than this: readers may make floats of them."""

Number = Union[int, float]


class Reports:
    """The socket of one agent, and what came there. `is_known`: whether a task runs here."""

    def __init__(self, folder: str, is_known: Callable[[str], bool]) -> None:
        """Listen in `folder`. Raises OSError: that is not possible, or no task could name the socket."""
        self.last: Dict[str, Dict[str, Dict[str, Any]]] = {}
        """By task and kind, as the frame `metrics` has it: `time` is when it came."""
        self.sizes: Dict[Tuple[str, str], int] = {}
        """Bytes of each, about, by task and kind."""
        self.path = ""
        """What tasks call the socket by."""
        self._is_known = is_known
        self._file = os.path.join(folder, metrics.SOCKET)
        self._folder = -1
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._bind(folder)
        except OSError:
            self.close()
            raise

    @property
    def descriptor(self) -> int:
        """Readable when `drain` has something to do."""
        return self._socket.fileno()

    def drain(self) -> None:
        """Take what has come, a part of it if that is much."""
        for _ in range(TURN):
            try:
                data = self._socket.recv(metrics.LIMIT + 1)
            except OSError:
                return
            found = metrics.decode(data) if len(data) <= metrics.LIMIT else None
            if found is not None and self._is_known(found["task"]):
                self._keep(found["task"], found["kind"], found)
                self.sizes[found["task"], found["kind"]] = len(data)

    def forget(self, task: str) -> None:
        """Forget what a task said: it is another attempt from now on, or over."""
        self.last.pop(task, None)

    def close(self) -> None:
        """Remove the socket."""
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self._file)
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def _bind(self, folder: str) -> None:
        if len(os.fsencode(self._file)) <= PATH_BYTES:
            self.path = self._file
        elif process.is_portable():
            raise OSError(f"{self._file} is too long for a socket's address")
        else:
            # Tasks reach the folder by a descriptor of ours, for they are of the same user.
            self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self.path = f"/proc/{os.getpid()}/fd/{self._folder}/{metrics.SOCKET}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._file)  # of an earlier agent of the same job
        self._socket.setblocking(False)
        self._socket.bind(self.path)
        os.chmod(self._file, 0o600)  # the folder lets nobody else in anyway

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
