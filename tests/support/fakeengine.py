"""An engine that starts one process for each place of a job, on this machine, as mpirun or a queue system would."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slowness import scaled

from distrun import planning
from distrun.backends.base import Backend, Rendered, Swept
from distrun.backends.bootstrap import Bootstrap
from distrun.backends.local import Local
from distrun.backends.queue import listen, write_new
from distrun.hosts import Inventory
from distrun.request import JobRequest
from distrun.sync.channels import ChannelCopier
from distrun.sync.copier import CopyRequest, Says
from distrun.sync.rules import CopyRules
from distrun.sync.tree import scan
from distrun_runtime.contract import folder as folders
from distrun_runtime.contract.plan import HOLD, Host, Limits, Place, Plan, Sync
from distrun_runtime.coordinator.channel import AgentChannel
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.jobstore import JobStore
from distrun_runtime.coordinator.listener import DialBack
from distrun_runtime.coordinator.messages import Event

WAIT_S = scaled(60.0)


class FakeEngine(Backend):
    """Starts `bootstrap` for each place, with the place's name in a variable of its own, as engines have it."""

    name = "fake"
    needs_hosts = False
    inherits_env = True
    ships_runtime = False
    copies_over_channels = True

    def __init__(self, folder: Path) -> None:
        self.secret_file = folder / "enrolment"
        self.cable: Cable | None = None
        """Between the agents and the coordinator, if there is to be one."""
        self.python = sys.executable
        self.skipped: set[str] = set()
        """Places that the engine never starts."""
        self.agents: DialBack
        self.bootstrap: Bootstrap
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self._plan: Plan

    def inventory(self, found: Inventory | None) -> Inventory:
        return Local().inventory(found)

    def copier(self, hosts: Sequence[Host], request: CopyRequest, sink: Says) -> ChannelCopier:
        return ChannelCopier(self._plan, request, sink, self.agents.channels)

    def addresses(self, hosts: Sequence[str]) -> Mapping[str, str]:
        return Local().addresses(hosts)

    def render(self, plan: Plan) -> Rendered:
        raise NotImplementedError

    def connect(self, hosts: Sequence[Host], job: str = "", *more: str) -> tuple[AgentChannel, ...]:
        raise NotImplementedError

    def channels(self, plan: Plan) -> tuple[AgentChannel, ...]:
        self._plan = plan
        secret = os.urandom(32).hex()
        self.agents, self.bootstrap = listen(plan.job, secret, plan.limits.start_s, ("127.0.0.1",))
        self.agents.expect(place.name for place in plan.all_places)
        write_new(self.secret_file, secret + "\n", 0o600)
        if self.cable is not None:
            self.cable.lay(self.agents.port)
            self.bootstrap = self.bootstrap._replace(addresses=(f"127.0.0.1:{self.cable.port}",))
        return self.agents.channels

    def boot(self, channels: Sequence[AgentChannel]) -> None:
        for place in self._plan.all_places:
            if place.name not in self.skipped:
                self.children[place.name] = self.start(place.name)

    def start(self, place: str, secret: str = "") -> subprocess.Popen[bytes]:
        """Start the process of a place."""
        argv = self.bootstrap.command(self.python, "env:FAKE_ENGINE_ID", secret or str(self.secret_file))
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "FAKE_ENGINE_ID": place},
        )

    def release(self, channels: Sequence[AgentChannel], limit_s: float) -> tuple[str, ...]:
        self.agents.close()
        self.secret_file.unlink()
        left = []
        for name, child in self.children.items():
            try:
                _, self.said = child.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                left.append(name)
        return tuple(left)

    def sweep(self, plan: Plan, grace_s: float, hosts: Sequence[str] | None = None) -> Mapping[str, Swept]:
        return Local().sweep(plan, grace_s)

    def close(self) -> None:
        for child in self.children.values():
            if child.poll() is None:
                child.kill()
            child.communicate()


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[FakeEngine]:
    """An engine whose files are in a folder; at the end nothing of it, nor of its cable, is left."""
    found = FakeEngine(folder)
    try:
        yield found
    finally:
        found.close()
        if found.cable is not None:
            found.cable.close()


class Copied(NamedTuple):
    """Files that a job is given: a folder here, and where they go."""

    source: Path
    dst: Path
    rules: CopyRules = CopyRules()
    delete: bool = False


def planned(
    engine: FakeEngine,
    store: JobStore,
    command: tuple[str, ...],
    places: Iterable[str],
    copied: Copied | None = None,
    **limits: float,
) -> tuple[planning.PlannedJob, JobFolder]:
    """Return a job with one worker in each place, all on this machine, and its folder."""
    names = tuple(places)
    request = JobRequest(command=command, workers=len(names), servers=0, cwd="/", launcher="local")
    job = planning.plan_job(request, store)
    if copied is not None:
        source, tree = str(copied.source), scan(str(copied.source), copied.rules)
        sync = Sync(source, tree.size, tree.files, copied.delete, folders.identity(source), brings=False)
        tasks = tuple(task._replace(cwd=str(copied.dst)) for task in job.plan.tasks)
        job = job._replace(
            request=dataclasses.replace(request, sync_rules=copied.rules),
            plan=job.plan._replace(cwd=str(copied.dst), sync=sync, tasks=tasks),
            tree=tree,
        )
    host = job.plan.hosts[0].name
    plan = job.plan._replace(
        on_eof=HOLD,
        places=tuple(Place(name, host) for name in names),
        tasks=tuple(
            task._replace(place=name, refs={"DMLC_NODE_HOST": "{host:%s.address}" % name})
            for task, name in zip(job.plan.tasks, names, strict=True)
        ),
        limits=Limits(grace_s=5.0)._replace(**limits),
    )
    job = job._replace(plan=plan, backend=engine)
    return job, store.create(plan)


class Shown:
    """A job's service that keeps what a terminal would show; `on_output` is called after each piece."""

    def __init__(self) -> None:
        self.text: dict[str, str] = {}
        self.said: list[str] = []
        self.on_output: Callable[[str], None] = lambda task: None

    def output(self, task: str, host: str, stream: str, data: bytes, at: int | None) -> None:
        self.text[task] = self.text.get(task, "") + data.decode()
        self.on_output(task)

    launcher_draws = False

    def say(self, text: str, level: str, sync: object = None) -> None:
        self.said.append(f"{level}: {text}")

    def opened(self, put: Callable[[Event], None]) -> None:
        pass

    def event(self, value: Mapping[str, Any]) -> None:
        pass

    def stack(self, number: int, members: Mapping[str, Any]) -> None:
        pass

    def state(self, value: Mapping[str, Any]) -> None:
        pass

    def metrics(self, value: Mapping[str, Any]) -> None:
        pass


class Cable:
    """Carries TCP connections to a port, and can be cut: then all of them break. A new one may be made at once."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.made = 0
        """Connections so far."""
        self.carried = 0
        """Bytes so far, in both directions."""
        self.at: tuple[int, Callable[[], None]] | None = None
        """What is called once when so many bytes were carried."""
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._frozen: dict[socket.socket, threading.Event] = {}
        self._threads: list[threading.Thread] = []

    def lay(self, port: int) -> None:
        """Begin to carry connections to `port`."""
        self._run(self._accept, port)

    def cut(self) -> None:
        """Break all connections."""
        with self._lock:
            for pair in self._pairs:
                for each in pair:
                    with contextlib.suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)
            self._pairs.clear()

    def freeze(self) -> None:
        """Carry nothing more on the connections that are there; neither end notices."""
        with self._lock:
            for near, _ in self._pairs:
                self._frozen.setdefault(near, threading.Event())

    def close(self) -> None:
        for thawed in self._frozen.values():
            thawed.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(WAIT_S)
        self._listening.close()

    def _run(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, port: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", port))
                except OSError:  # nobody listens there any more
                    near.close()
                    continue
                with self._lock:
                    self._pairs.append((near, far))
                    self.made += 1
                self._run(self._carry, near, far)

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        with near, far, selectors.DefaultSelector() as selector, contextlib.suppress(OSError):
            selector.register(near, selectors.EVENT_READ, far)
            selector.register(far, selectors.EVENT_READ, near)
            while True:
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    if near in self._frozen:
                        self._frozen[near].wait(WAIT_S)
                    data = key.fileobj.recv(65536)
                    if not data:
                        return
                    key.data.sendall(data)
                    self.carried += len(data)
                    if self.at is not None and self.carried >= self.at[0]:
                        (_, call), self.at = self.at, None
                        call()


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"after {WAIT_S:g} s still not: {what}"
        time.sleep(0.02)
