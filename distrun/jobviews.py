"""The current status of jobs: their state and, if they run, their metrics. Each query has a time limit.

The job store is read at once. Coordinators on this machine are asked for metrics through their control sockets, all in
parallel. Coordinators elsewhere are asked through one ssh connection per host, also in parallel: a few lines of Python
there send the states of the jobs and forward the replies of their control sockets. ssh asks no questions. If a
coordinator does not answer in time, its job is `unknown`; other jobs are not affected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import shlex
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from distrun import client
from distrun_runtime.contract import control, facts, session
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.contract.facts import duration
from distrun_runtime.coordinator import stored
from distrun_runtime.coordinator.jobfolder import JobFolder, events_of
from distrun_runtime.errors import JobStoreError, WireError

HERE_S = 0.3
"""How long coordinators on this machine are waited for, all together."""
THERE_S = 2.0
"""The same for those on other hosts."""
METRICS_S = 0.5
"""Additional time for the metrics of a coordinator elsewhere after its state arrived. It may have none."""
EVENTS_SIZE = 16 * 1024
"""Bytes from the end of events.jsonl that are read."""
END_S = 0.2
"""How long the end of an ssh program is waited for that has closed its output."""
READ_SIZE = 256 * 1024
HEADER_LIMIT = 4096
MOST = 100
"""Jobs that one connection asks about; more would not fit into a command line."""

LOOK = """
import json, os, select, socket, sys, time
jobs, asked = json.loads(sys.argv[1]), bytes.fromhex(sys.argv[2])
tail, until = int(sys.argv[3]), time.monotonic() + float(sys.argv[4])
def tell(job, name, data, age_s=0.0):
    head = {"job": job, "name": name, "size": len(data), "age_s": age_s}
    sys.stdout.buffer.write(json.dumps(head).encode() + bytes([10]) + data)
    sys.stdout.buffer.flush()
def read(job, folder, name, most):
    try:
        with open(os.path.join(folder, name), "rb") as file:
            found = os.fstat(file.fileno())
            if most:
                file.seek(max(0, found.st_size - most))
            tell(job, name, file.read(), max(0.0, time.time() - found.st_mtime))
    except OSError:
        pass
peers = {}
for job, folder, path in jobs:
    if folder:
        if tail:
            read(job, folder, "events.jsonl", tail)
        read(job, folder, "state.json", 0)
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(1.0)
    try:
        peer.connect(path)
        peer.sendall(asked)
        peers[peer] = job
    except OSError:
        tell(job, "", b"")
while peers and time.monotonic() < until:
    for peer in select.select(list(peers), [], [], max(0.0, until - time.monotonic()))[0]:
        try:
            data = peer.recv(65536)
        except OSError:
            data = b""
        tell(peers[peer], "frames" if data else "", data)
        if not data:
            del peers[peer]
"""
"""Runs on a coordinator's host. Writes files and frames of jobs, each after a line of JSON; an empty name: no more."""


@dataclass(frozen=True)
class JobView:
    """How one job stands."""

    folder: JobFolder
    state: Mapping[str, Any]
    """As `JobFolder.shown`; the state is `unknown` if its coordinator's host has not answered."""
    host: str = ""
    """Where its coordinator is, or was; empty: not known."""
    is_here: bool = True
    """That is this machine."""
    metrics: Mapping[str, Any] | None = None
    """What the coordinator measures (`distrun.metrics/1`); None: nothing is known."""
    events: Sequence[Mapping[str, Any]] = ()
    """The last events, the oldest first, if they were asked for."""
    seen_s: float | None = None
    """How long ago it was heard of; None: just now, or it is over."""
    problem: str = ""
    """Why its coordinator's host has not answered."""
    fix: str = ""
    """What to type then."""

    @property
    def id(self) -> str:
        """The job's id."""
        return self.folder.id

    @property
    def is_going(self) -> bool:
        """Whether it goes on, as far as is known."""
        return self.state["state"] in facts.GOING

    @property
    def progress(self) -> Mapping[str, Any] | None:
        """The job's progress, if its script reports it."""
        found = (self.metrics or {}).get("progress")
        return found if isinstance(found, Mapping) else None


def with_state(view: JobView, state: Mapping[str, Any]) -> JobView:
    """Return a view with a state that its coordinator has told just now."""
    return dataclasses.replace(view, state=state, seen_s=None, problem="", fix="")


def look(
    folders: Iterable[JobFolder], here_s: float = HERE_S, there_s: float = THERE_S, with_events: bool = False
) -> list[JobView]:
    """Return how jobs stand, in their order.

    Coordinators on this machine are waited for `here_s` seconds at most, those elsewhere `there_s`. Damaged jobs are
    shown as such.
    """
    jobs = [_JobQuery(folder, with_events) for folder in folders]
    _ask(jobs, here_s, there_s)
    return [job.view() for job in jobs]


class _JobQuery:
    """What is known of one job, and how its coordinator is asked."""

    def __init__(self, folder: JobFolder, with_events: bool) -> None:
        self.folder = folder
        self.with_events = with_events
        self.state = folder.shown()
        self.where: Mapping[str, Any] = {}
        with contextlib.suppress(JobStoreError):
            self.where = folder.control() or {}
        self.is_here = not self.where or client.is_here(self.where)
        is_fetched = bool(self.where.get("folder"))
        is_going = self.state["state"] in facts.GOING
        self.is_asked_there = bool(self.where.get("path")) and is_going and not self.is_here
        self.is_asked_here = bool(self.where.get("path")) and is_going and self.is_here
        self.is_owned_there = self.is_asked_there and is_fetched and not folder.is_finished
        """What is here is a copy of what is on the coordinator's host."""
        self.has_state = not self.is_owned_there
        """What is known of its state is of now."""
        self.has_metrics = False
        self.metrics: Mapping[str, Any] | None = None
        self.events: bytes | None = None
        self.problem = ""
        self.fix = ""
        self._decoder = session.Decoder()

    @property
    def login(self) -> str:
        """What a user types before a command to run it on the coordinator's host."""
        return str(self.where.get("login") or shlex.join(["ssh", str(self.where["host"])]))

    def feed(self, data: bytes) -> bool:
        """Take what the control socket says; return whether more is wanted."""
        try:
            for frame in self._decoder.feed(data):
                if frame.type == "metrics" and isinstance(frame.header.get("metrics"), dict):
                    self.metrics, self.has_metrics = frame.header["metrics"], True
                elif frame.type == "hello" and frame.header.get("job") != self.folder.id:
                    return False  # another job has its socket
                elif frame.type in ("refused", "outcome", "failed"):
                    return False
        except WireError:
            return False
        return not self.has_metrics

    def take(self, name: str, age_s: float, data: bytes) -> bool:
        """Take what a host sent; return whether more is wanted."""
        from distrun import remote_jobs

        if name == "frames":
            return self.feed(data)
        if name == "events.jsonl":
            self.events = data
        elif name == "state.json" and self.is_owned_there:
            try:
                remote_jobs.save(self.folder, name, age_s, [data])
                self.state = self.folder.shown()
                self.has_state = True
            except OSError as err:
                self.problem = f"what {self.where['host']} sent cannot be written to {self.folder.path}: {err.strerror}"
        return bool(name) and self.state["state"] in facts.GOING

    def view(self) -> JobView:
        state = self.state
        if not self.has_state:
            state = {**state, "state": facts.UNKNOWN}
        seen_s = None
        if state["state"] == facts.UNKNOWN:
            seen_s = self._silent_s(state)
        events: Sequence[Mapping[str, Any]] = ()
        if self.with_events:
            events = self.folder.last_events(EVENTS_SIZE) if self.events is None else events_of(self.events)
        host = str(self.where.get("host") or "")
        problem = self.problem if not self.has_state else ""
        fix = self.fix if problem else ""
        return JobView(self.folder, state, host, self.is_here, self.metrics, events, seen_s, problem, fix)

    def _silent_s(self, state: Mapping[str, Any]) -> float | None:
        """Return how long ago the coordinator was heard of."""
        if not self.has_state:
            with contextlib.suppress(OSError):
                return max(0.0, time.time() - os.stat(str(self.folder.path / "state.json")).st_mtime)
        heard = state.get("heard") or state["updated"]
        return max(0.0, time.time() - stored.seconds(heard)) if heard else None


# ---------------------------------------------------------------------- asking


def asked() -> bytes:
    """Return what a coordinator is sent: it answers with its metrics at once."""
    return control.client_hello() + session.encode({"type": "subscribe", "metrics": True})


def _ask(jobs: Sequence[_JobQuery], here_s: float, there_s: float) -> None:
    """Ask all coordinators at the same time."""
    sources: list[_TimedSource] = []
    began = time.monotonic()
    for job in jobs:
        if job.is_asked_here:
            sources.append(_LocalCoordinator(job, began + here_s))
    by_login: dict[str, list[_JobQuery]] = {}
    for job in jobs:
        if job.is_asked_there:
            by_login.setdefault(job.login, []).append(job)
    for login, of_host in by_login.items():
        for first in range(0, len(of_host), MOST):
            sources.append(_CoordinatorHost(login, of_host[first : first + MOST], began + there_s))
    try:
        _wait(sources)
    finally:
        for source in sources:
            source.close()


class _TimedSource:
    """Something that is read from until its time is up."""

    def __init__(self, until: float) -> None:
        self.until = until
        """Monotonic time."""
        self.is_open = False

    def fileno(self) -> int:
        """Return the descriptor that is waited for."""
        raise NotImplementedError

    def read(self) -> bool:
        """Take what has come; return whether more is wanted."""
        raise NotImplementedError

    def late(self) -> None:
        """Take note that the time is up."""

    def release(self) -> None:
        """Close what is no longer read. Called after `read`, when no caller waits for it any more."""

    def close(self) -> None:
        """End it."""


def _wait(sources: Sequence[_TimedSource]) -> None:
    """Read from all sources until each has told all, or its time is up."""
    with selectors.DefaultSelector() as selector:
        for source in sources:
            if source.is_open:
                selector.register(source.fileno(), selectors.EVENT_READ, source)
        while selector.get_map():
            now = time.monotonic()
            waiting: list[_TimedSource] = [key.data for key in selector.get_map().values()]
            for source in waiting:
                if now >= source.until:
                    selector.unregister(source.fileno())
                    source.late()
            limits = [key.data.until for key in selector.get_map().values()]
            if not limits:
                return
            for key, _ in selector.select(max(0.0, min(limits) - now)):
                source, descriptor = key.data, key.fd
                goes_on = source.read()
                if not goes_on or source.fileno() != descriptor:
                    selector.unregister(descriptor)
                    source.release()
                if goes_on and source.fileno() != descriptor:
                    selector.register(source.fileno(), selectors.EVENT_READ, source)


class _LocalCoordinator(_TimedSource):
    """A coordinator on this machine."""

    def __init__(self, job: _JobQuery, until: float) -> None:
        super().__init__(until)
        self._job = job
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):  # gone, or so busy that its queue of connections is full
            self._socket.connect(job.where["path"])
            self._socket.sendall(asked())
            self.is_open = True

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> bool:
        try:
            data = self._socket.recv(READ_SIZE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return bool(data) and self._job.feed(data)

    def close(self) -> None:
        self._socket.close()


class _CoordinatorHost(_TimedSource):
    """A host with coordinators, asked by one ssh connection; by another one if it drops that."""

    def __init__(self, login: str, jobs: Sequence[_JobQuery], until: float) -> None:
        from distrun import remote_jobs

        super().__init__(until)
        self._login = login
        self._jobs = {job.folder.id: job for job in jobs}
        self._left = set(self._jobs)
        self._data = bytearray()
        self._limit = until
        self._limit_s = round(until - time.monotonic(), 1)
        self._pauses = remote_jobs.pauses()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._child: subprocess.Popen[bytes] | None = None
        self._former: list[subprocess.Popen[bytes]] = []
        self._start(0.0)

    def _start(self, pause_s: float) -> None:
        from distrun import remote_jobs

        left_s = max(1.0, self._limit - time.monotonic())
        about = [
            [job.folder.id, str(job.where.get("folder") or ""), str(job.where["path"])] for job in self._jobs.values()
        ]
        tail = EVENTS_SIZE if any(job.with_events for job in self._jobs.values()) else 0
        words = ["python3", "-I", "-c", LOOK, json.dumps(about), asked().hex(), str(tail), f"{left_s:.1f}"]
        argv = remote_jobs.ssh_argv(self._login, shlex.join(words), left_s, may_ask=False)
        if pause_s:
            argv = ["sh", "-c", 'sleep "$0"; exec "$@"', f"{pause_s:.2f}", *argv]
        try:
            # In a session of its own: a Ctrl-C is for us, and there is no terminal on which anything can be asked.
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._said, start_new_session=True
            )
        except OSError as err:
            self._fail(f"cannot run {argv[0]}: {err.strerror}")
            return
        self._child = child
        os.set_blocking(self.fileno(), False)
        self.is_open = True

    def fileno(self) -> int:
        assert self._child is not None
        assert self._child.stdout is not None
        return self._child.stdout.fileno()

    def read(self) -> bool:
        try:
            data = os.read(self.fileno(), READ_SIZE)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            return self._again()
        self._data += data
        try:
            self._take()
        except (ValueError, KeyError, TypeError):
            self._fail("it sent what is no answer")
            return False
        if not self._left:
            self._fail("it has no state of this job")
        elif all(self._jobs[each].has_state for each in self._left):  # only metrics are missing
            self.until = min(self.until, time.monotonic() + METRICS_S)
        return bool(self._left)

    def late(self) -> None:
        self._fail(f"no answer within {duration(self._limit_s)}")

    def _take(self) -> None:
        """Take the answers that are whole."""
        while self._data:
            end = self._data.find(b"\n", 0, HEADER_LIMIT)
            if end < 0 and len(self._data) < HEADER_LIMIT:
                return
            about = json.loads(bytes(self._data[: max(0, end)]))
            name, size, age_s = str(about["name"]), int(about["size"]), float(about["age_s"])
            if not 0 <= size <= stored.SIZE_LIMIT:
                raise ValueError(size)
            if len(self._data) < end + 1 + size:
                return
            data = bytes(self._data[end + 1 : end + 1 + size])
            del self._data[: end + 1 + size]
            job = self._jobs[str(about["job"])]
            if not job.take(name, age_s, data):
                self._left.discard(job.folder.id)

    def _again(self) -> bool:
        """The ssh program has ended; return whether another one was started."""
        from distrun import remote_jobs

        if all(job.has_state for job in self._jobs.values()):
            return False
        assert self._child is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(END_S)
        code = self._child.returncode
        self._said.seek(0)
        said = self._said.read().decode("utf-8", "replace").strip()
        if remote_jobs.is_dropped(code, said):
            pause_s = next(self._pauses, None)
            if pause_s is not None and time.monotonic() + pause_s < self._limit:
                self._former.append(self._child)
                self._said.seek(0)
                self._said.truncate()
                self._data.clear()
                self._start(pause_s)
                return self.is_open
        lines = said.splitlines()
        self._fail(lines[-1] if lines else f"ssh ended with code {code}" if code else "it has no state of this job")
        return False

    def _fail(self, why: str) -> None:
        for job in self._jobs.values():
            if not job.has_state and not job.problem:
                job.problem = f"{job.where['host']} cannot be asked: {why}"
                job.fix = f"{self._login} true"

    def release(self) -> None:
        for child in self._former:
            _end(child)
        self._former = []

    def close(self) -> None:
        self.release()
        self._said.close()
        if self._child is not None:
            _end(self._child)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.kill()
        child.wait()
    assert child.stdout is not None
    child.stdout.close()


# ---------------------------------------------------------------------- order


def listed(folders: Sequence[JobFolder], most: int | None) -> list[JobFolder]:
    """Return the jobs of a list, newest first, in the order in which they are shown: those that go on, then others.

    Of those that are over there are at most `most`; None: all.
    """
    going: list[JobFolder] = []
    others: list[JobFolder] = []
    for folder in folders:
        if not folder.is_finished and folder.standing() in facts.GOING:
            going.append(folder)
        elif most is None or len(others) < most:
            others.append(folder)
    return going + others


# ---------------------------------------------------------------------- again and again


class Background:
    """Looks at jobs again and again, in a thread of its own, so that who shows them never waits.

    `read` returns the jobs; it is called in that thread and once in the first thread that asks.
    """

    def __init__(self, read: Callable[[], Iterable[JobFolder]], interval_s: float = 1.0) -> None:
        self._read = read
        self._interval_s = interval_s
        self._views: Sequence[JobView] | None = None
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)

    def states(self) -> Sequence[Mapping[str, Any]]:
        """Return how the jobs stood at the last look; at first what the job store knows. Never waits for a host."""
        if not self._thread.is_alive():
            self._thread.start()
            return [folder.shown() for folder in self._read()]
        views = self._views
        return [folder.shown() for folder in self._read()] if views is None else [view.state for view in views]

    def _run(self) -> None:
        while True:
            views = look(self._read())
            self._views = views
            time.sleep(self._interval_s if all(view.is_here for view in views) else max(self._interval_s, THERE_S))
