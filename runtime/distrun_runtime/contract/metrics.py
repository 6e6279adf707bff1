"""What a task tells its agent while it runs: numbers, progress, what it waits for. Tasks and agents agree on it here.

A task sends datagrams to a Unix socket of its own in the agent's private folder (DISTRUN_METRICS_SOCKET names it).
Sending never waits and never fails: a datagram that finds no room, or no agent, is dropped, and the next one says how
things are then. What must not be lost goes by DISTRUN_PUBLISH_FD instead.

A datagram is one JSON object of at most LIMIT bytes: `v` (VERSION), `kind` (one of KINDS), `task`, and what the kind
has. docs/protocol.md, "Metrics", lists them.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional

from distrun_runtime.contract import environ, facts

if TYPE_CHECKING:
    import socket

VERSION = 1
SOCKET = "metrics.s"
"""Ends the names of the sockets in the agent's folder, after the task's name."""
LIMIT = 4096
"""Bytes of a datagram."""
VALUES = 16
"""A task reports so many values, at most."""
LAG_ROUNDS = 20
"""A server's `lags` are of so many sampled rounds, the last ones."""
STACKS_FILE = "stacks-%d.txt"
"""Name of the file in the agent's folder to which a process writes its stacks; with its process id."""
BY_SIGURG = "sigurg"
"""`how` of `stacks`: the process writes them when it gets SIGURG. Empty: it does not, or not any more."""

REPORT = "report"
"""Progress of a script: `step`, `total`, `values`."""
COUNTERS = "counters"
"""What a node of the store has counted since its start."""
WAITING = "waiting"
"""What a worker waits for in the store, or that it waits for nothing any more."""
STACKS = "stacks"
"""How the process lets its stacks be written."""
KINDS = (REPORT, COUNTERS, WAITING, STACKS)


def encode(kind: str, task: str, members: Mapping[str, Any]) -> Optional[bytes]:
    """Return a datagram; None if it would be longer than LIMIT. Numbers may be nan or infinite: not strict JSON."""
    data = json.dumps({"v": VERSION, "kind": kind, "task": task, **members}, separators=(",", ":")).encode()
    return data if len(data) <= LIMIT else None


def decode(data: bytes) -> Optional[Dict[str, Any]]:
    """Return what a datagram says; None: it is none of ours, or of a version that is not known here."""
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.get("v") != VERSION or value.get("kind") not in KINDS:
        return None
    return value if isinstance(value.get("task"), str) else None


class Sender:
    """Sends datagrams of this process to its agent. For any thread. Without an agent it does nothing.

    A forked child must not use its parent's: it is another process, which the agent does not know by that name.
    """

    def __init__(self, path: str = "", task: str = "") -> None:
        """`path`, `task`: of another agent or of another task than the environment names."""
        self._path = path or environ.text("DISTRUN_METRICS_SOCKET") or ""
        self._task = task or own_name()
        self._owner = os.getpid()
        self._socket: Optional[socket.socket] = None
        if self._path:
            import socket  # not every script runs in a job

            with contextlib.suppress(OSError):  # no descriptor is left: nothing is told
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.setblocking(False)

    def send(self, kind: str, /, **members: Any) -> bool:
        """Send, and return whether the datagram went. Never waits, never raises."""
        if self._socket is None or os.getpid() != self._owner:
            return False
        try:
            data = encode(kind, self._task, members)
            if data is None:
                return False
            self._socket.sendto(data, self._path)
        except (OSError, TypeError, ValueError, RecursionError):
            return False
        return True

    def close(self) -> None:
        """Send nothing more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def own_name() -> str:
    """Return this task's name; empty outside a job."""
    return facts.task_name(environ.text("DISTRUN_ROLE"), environ.text("DISTRUN_RANK"))
