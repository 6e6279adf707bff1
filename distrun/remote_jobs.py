"""Jobs whose coordinator is on one of their hosts: keeps this machine's folder of such a job up to date.

The job's real folder is on that host, unless this machine and that host share a job store. Its state is fetched when
a command looks at it; when the job is over, everything in the folder is fetched once, logs included, and from then on
the job is like any other.

The host is asked through an agent that the fleet starts there (`agent.query.JobStream`).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from distrun.errors import DistrunError
from distrun_runtime.contract import facts
from distrun_runtime.contract.agent_messages import AnswerPiece
from distrun_runtime.coordinator.failures import Problem
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.errors import JobStoreError

if TYPE_CHECKING:
    from distrun.backends.base import Backend
    from distrun.fleet import Fleet, HostAnswer
    from distrun_runtime.contract.plan import Host

ANSWER_S = 30.0
"""How long the first answer of a host may take, passwords included. One that drops connections, because it has too
many, is asked again meanwhile."""
REMOVE_S = 60.0
"""How long the removal of a job's folder on a host may take."""
EVERY = (
    *("state.json", "events.1.jsonl", "events.jsonl", "metrics.jsonl", "reports.json", "coordinator.log", "logs/*"),
    "outcome.json",
)
"""What is fetched when a job is over, the outcome last: then it is finished here, too."""
_NAME = re.compile(
    r"(state|outcome|reports)\.json|(events|events\.1|metrics)\.jsonl|coordinator\.log|logs/[A-Za-z0-9][A-Za-z0-9._-]*"
)


class NotAsked(DistrunError):
    """The host of a job's coordinator cannot be asked."""

    exit_code = facts.EXIT_HOST_LOST


def is_elsewhere(folder: JobFolder) -> bool:
    """Return whether what is known of a job has to be fetched from one of its hosts."""
    where = folder.control()
    return where is not None and bool(where.get("folder")) and not folder.is_finished


def refreshed(folder: JobFolder, may_ask: bool = True) -> str:
    """Fetch what is new of a job, if it has to be fetched; return a warning if that fails.

    `may_ask`: the user may be asked for a password.
    """
    if not is_elsewhere(folder):
        return ""
    where = folder.control()
    assert where is not None  # of `is_elsewhere`
    try:
        _fetch(folder, where, may_ask)
    except NotAsked as err:
        text = f"job {folder.id}: its coordinator's host {where['host']} cannot be asked: {err}"
        return f"{text}; what is known here is older; try: {where['login']} true"
    except OSError as err:
        text = f"what its coordinator's host sent cannot be written to {folder.path}: {err.strerror}"
        return f"job {folder.id}: {text}; is the disk full, or over quota? see: df {folder.path}"
    return ""


def _fetch(folder: JobFolder, where: Mapping[str, Any], may_ask: bool) -> None:
    """Save the files that the host has of a job, one at least.

    Raises:
        NotAsked: it has none, or they did not all come.
        OSError: one cannot be written.
    """
    args = {"jobs": [[folder.id, where["folder"], ""]], "files": [("outcome.json", 1), ("state.json", 0)], "asked": ""}
    fleet, found = ask(folder, where, args, may_ask, ANSWER_S)
    with contextlib.closing(fleet):
        if not isinstance(found, AnswerPiece):
            raise NotAsked(why(found, ANSWER_S))
        if found.name == "outcome.json":
            fleet.begin("jobs", {**args, "files": [(name, 0) for name in EVERY]})
            found = fleet.next()
        while isinstance(found, AnswerPiece):
            save(folder, found.name, found.age_s, content(fleet, found))
            found = fleet.next()
        if isinstance(found, Problem):
            raise NotAsked(found.text)


def ask(
    folder: JobFolder, where: Mapping[str, Any], args: Mapping[str, Any], may_ask: bool, limit_s: float
) -> tuple[Fleet, AnswerPiece | HostAnswer | Problem | None]:
    """Ask the host of a job's coordinator; return the connection, to be closed, and what came first (`Fleet.next`).

    Args:
        folder: the job's.
        where: where its coordinator is.
        args: of the tool `jobs`, as docs/protocol.md says.
        may_ask: the user may be asked for a password.
        limit_s: how long the first answer may take.
    """
    from distrun.fleet import Fleet
    from distrun.ssh.failure import BUSY

    until = time.monotonic() + limit_s
    backend, host = _reached(folder, where)
    if not may_ask and backend.asker is not None:
        backend.asker.by(lambda *question: None)
    found: AnswerPiece | HostAnswer | Problem | None = None
    while True:
        with contextlib.ExitStack() as stack:
            # Not its own limit: it is ours, whatever the agent has not done by then.
            fleet = stack.enter_context(contextlib.closing(Fleet(backend, [host], math.inf)))
            fleet.begin("jobs", args)
            found = fleet.next(until - time.monotonic()) or found
            if not isinstance(found, Problem) or found.kind != BUSY or time.monotonic() >= until:
                stack.pop_all()
                return fleet, found


def why(found: AnswerPiece | HostAnswer | Problem | None, limit_s: float) -> str:
    """Return why a host sent no state, by what came last."""
    if isinstance(found, Problem):
        return found.text
    return f"no answer within {facts.duration(round(limit_s, 1))}" if found is None else "it has no state of this job"


def _reached(folder: JobFolder, where: Mapping[str, Any]) -> tuple[Backend, Host]:
    """Return how the host of a coordinator is reached: as the job's plan has it, else by the `ssh` program."""
    from distrun import backends
    from distrun.ssh.resolve import OPENSSH
    from distrun_runtime.contract.plan import Host, Reach

    with contextlib.suppress(JobStoreError, DistrunError):  # another machine may not have the plan's backend
        plan = folder.plan()
        for host in plan.hosts:
            if host.login and host.login == where.get("login"):
                return backends.load(plan.backend), host
    return backends.load("ssh"), Host(str(where["host"]), reach=Reach({"transport": OPENSSH}))


class RemoteSocket:
    """The control socket of a coordinator on another host: what `ControlConnection` needs of a socket.

    It is connected when what was sent before is answered.
    """

    def __init__(self, folder: JobFolder, where: Mapping[str, Any], may_ask: bool) -> None:
        self.problem: Problem | None = None
        """Why the host cannot be asked, or how the connection broke; None: the coordinator, or we, have ended it."""
        self._is_ended = False
        self._folder = folder
        self._where = where
        self._may_ask = may_ask
        self._limit_s = math.inf
        self._first = b""
        self._fleet: Fleet | None = None

    def settimeout(self, limit_s: float | None) -> None:
        """Have `recv` wait at most so long."""
        self._limit_s = math.inf if limit_s is None else limit_s

    def sendall(self, data: bytes) -> None:
        """Have data sent; any thread."""
        if self._fleet is None:
            self._first += data
        else:
            self._fleet.send(self._folder.id, data)

    def recv(self, _size: int) -> bytes:
        """Return what came, however much it is; empty: the connection has ended.

        Raises:
            TimeoutError: nothing came.
        """
        if self._fleet is None:
            args = {"jobs": [[self._folder.id, "", self._where["path"]]], "files": [], "asked": self._first.hex()}
            self._fleet, found = ask(self._folder, self._where, args, self._may_ask, self._limit_s)
        else:
            found = self._fleet.next(self._limit_s)
        if found is None and self._fleet.agents.hellos:
            raise TimeoutError
        found = found or Problem(str(self._where["host"]), "timeout", why(None, self._limit_s))
        if isinstance(found, Problem) and not self._is_ended:
            self.problem = found
        return found.data if isinstance(found, AnswerPiece) else b""

    def shutdown(self, _how: int) -> None:
        """End the connection both ways; any thread."""
        self._is_ended = True
        if self._fleet is not None:
            self._fleet.cut()

    def close(self) -> None:
        """Free it."""
        if self._fleet is not None:
            self._fleet.close()


def remove(folder: JobFolder, where: Mapping[str, Any]) -> str:
    """Remove the folder of a job that is over on the host that had its coordinator; return why it is still there.

    Raises:
        NotAsked: that host cannot be asked.
    """
    from distrun.fleet import Fleet

    backend, host = _reached(folder, where)
    with Fleet(backend, [host]) as fleet:
        answer = fleet.ask("remove", {"job": folder.id, "folder": where["folder"]}, REMOVE_S)[host.name]
    if isinstance(answer, Problem) and (host.name not in fleet.agents.hellos or answer.kind == "timeout"):
        raise NotAsked(answer.text)
    return answer.text if isinstance(answer, Problem) else ""


def content(fleet: Fleet, first: AnswerPiece, most: float = math.inf, until: float = math.inf) -> Iterator[bytes]:
    """Yield the content of a file whose first piece has come.

    Raises:
        NotAsked: it did not come whole until `until`, monotonic time, or has more than `most` bytes.
    """
    found: object = first
    while isinstance(found, AnswerPiece) and (found.job, found.name) == (first.job, first.name):
        most -= len(found.data)
        if found.left > most:
            raise NotAsked(f"it sent a file that is too large: {first.name!r}, {len(first.data) + first.left} bytes")
        yield found.data
        if found.left <= 0:
            return
        found = fleet.next(until - time.monotonic())
    reason = "it took too long" if found is None else getattr(found, "text", "it could not be read to its end")
    raise NotAsked(f"{first.name} did not come whole: {reason}")


def save(folder: JobFolder, name: str, age_s: float, pieces: Iterable[bytes]) -> None:
    """Replace a file of the folder as a whole. It gets its age, too: by that of the state, a job is `unknown`.

    Raises:
        NotAsked: no job has such a file.
        OSError: it cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise NotAsked(f"it sent a file that no job has: {name!r}")
    path = folder.path / name
    fresh = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")  # hosts may share the folder
    try:
        with open(fresh, "wb") as file:
            for data in pieces:
                file.write(data)
        when = time.time() - max(0.0, age_s)
        os.utime(fresh, (when, when))
        os.replace(fresh, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
