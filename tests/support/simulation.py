"""A simulated job: a coordinator as shipped, on a virtual clock, with hosts that answer by a script.

`SimulatedJob` has a coordinator (`coordinator.jobrun`: loop, supervisor, job folder, frames) and an agent a host, that
starts tasks which are no processes. `simulated_store` has a scheduler or a server, and the nodes around it.

Nothing waits: where a loop would sleep, the clock is set to the next thing that happens. With `Clock(counts_cpu=True)`
the processor time that the code under test takes passes on the clock, too; what hosts and nodes take to answer does
not, since elsewhere each has a machine of its own.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from distrun_runtime.contract import session
from distrun_runtime.contract.plan import SCHEDULER, SERVER, WORKER, Host, Plan, Secrets, Task
from distrun_runtime.contract.session import Session, Source
from distrun_runtime.coordinator import jobrun, loop, messages
from distrun_runtime.coordinator.channel import Inlet, Put
from distrun_runtime.coordinator.failures import Outcome
from distrun_runtime.coordinator.jobfolder import JobFolder

WALL = 1_000_000.0
"""The wall clock when the virtual one shows 0."""
LATENCY_S = 0.0005
"""One way, between any two hosts."""
SPAWN_S = 0.02
"""An agent needs it to start a task."""
GREETING = b"DISTRUN/1 abc\n"


class Clock:
    """Virtual time in seconds, and what happens when.

    Args:
        counts_cpu: processor time of the code under test passes on this clock. Without, it stands still while code
            runs, and what happens does not depend on the machine.
    """

    def __init__(self, counts_cpu: bool = False) -> None:
        self.now = 0.0
        self.cpu_s = 0.0
        """What the code under test took so far."""
        self._counts_cpu = counts_cpu
        self._since: float | None = None
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def monotonic(self) -> float:
        """Return the time; the code under test asks."""
        if self._counts_cpu and self._since is not None:
            self.pause()
            self.go_on()
        return self.now

    def time(self) -> float:
        """Return the wall clock; the code under test asks."""
        return WALL + self.monotonic()

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        """Have something happen `delay_s` from now."""
        heapq.heappush(self._due, (self.now + delay_s, next(self._numbers), what))

    def happen(self, until: float) -> bool:
        """Let the next thing happen that is due by `until`, and everything due by now; without one, go to `until`."""
        if not self._due or self._due[0][0] > until:
            self.now = max(self.now, until)
            return False
        self.now = max(self.now, self._due[0][0])
        while self._due and self._due[0][0] <= self.now:
            heapq.heappop(self._due)[2]()
        return True

    def go_on(self) -> None:
        """The code under test runs from here on."""
        self._since = time.thread_time()

    def pause(self) -> None:
        """What runs from here on is the simulation's."""
        if self._since is not None:
            spent, self._since = time.thread_time() - self._since, None
            self.cpu_s += spent
            if self._counts_cpu:
                self.now += spent


# Launch and heartbeat: a coordinator and its agents


def job_plan(hosts: int, servers: int = 0, workers: int = 0, **limits: Any) -> Plan:
    """Return the plan of a job with a worker a host, or `workers`, and servers and a scheduler on the first of them."""
    names = ["n%05d" % number for number in range(hosts)]
    refs = {"DMLC_PS_ROOT_URI": "{scheduler.address}", "DMLC_PS_ROOT_PORT": "{scheduler.port}"} if servers else {}

    def task(role: str, rank: int) -> Task:
        host = names[rank % hosts]
        name = role if role == SCHEDULER else "%s-%d" % (role, rank)
        own = {"DMLC_NODE_HOST": "{host:%s.address}" % host, **({} if role == SCHEDULER else refs)}
        argv = ("python", "train.py") if role == WORKER else ("python", "-m", "distrun_runtime", role)
        return Task(name, role, rank, host, argv, "/work", {"DMLC_ROLE": role}, own)

    tasks = [task(SCHEDULER, 0)] if servers else []
    tasks += [task(SERVER, rank) for rank in range(servers)] + [task(WORKER, rank) for rank in range(workers or hosts)]
    plan = Plan(
        job="calm-otter-7f3",
        name="",
        backend="simulated",
        command=("python", "train.py"),
        cwd="/work",
        hosts=tuple(Host(name) for name in names),
        tasks=tuple(tasks),
    )
    return plan._replace(limits=plan.limits._replace(**limits))


class _Inbox:
    """The coordinator's queue: `get` lets virtual time pass."""

    def __init__(self, clock: Clock) -> None:
        self.ready: deque[Callable[[], None]] = deque()
        """Bytes that have arrived and wait to be read."""
        self._clock = clock
        self._found: deque[messages.Event] = deque()

    def put(self, event: messages.Event) -> None:
        self._found.append(event)

    def get(self, timeout: float = 0.0) -> messages.Event:
        """Return the next event. What arrived as bytes is read here: elsewhere a thread of this process does."""
        self._clock.pause()
        until = self._clock.now + timeout
        is_late = not self._clock.happen(self._clock.now) and timeout <= 0
        while True:
            self._clock.go_on()
            if self._read():
                return self._found.popleft()
            self._clock.pause()
            if is_late and not self.ready:
                self._clock.go_on()
                raise queue.Empty
            is_late = not self._clock.happen(until)

    def get_nowait(self) -> messages.Event:
        if not self._found and not self._read():
            raise queue.Empty
        return self._found.popleft()

    def _read(self) -> bool:
        while self.ready and not self._found:
            self.ready.popleft()()
        return bool(self._found)


class SimulatedAgent:
    """An agent, its host's tasks, and the coordinator's channel to it (`channel.Channel`).

    Both ends speak the real session in real bytes; the coordinator's end counts as its work.
    """

    def __init__(self, job: SimulatedJob, host: str) -> None:
        self._job = job
        self._host = host
        self._near, self._far = Session(), Session()
        self._inlet = Inlet(host, self._near)
        self._live: dict[str, int] = {}
        self.sample_s = 0.0
        """Between its measurements, as `begin` says; 0: it does not measure."""
        self._has_ended = False
        self.heard: Counter[str] = Counter()
        """Frames that the agent got, by type."""

    @property
    def host(self) -> str:
        return self._host

    # The coordinator's end

    def start(self, put: Put) -> None:
        self._put = put
        self._job.clock.after(self._job.connect_s(self._host), self._connected)

    def send(self, frame: session.Frame) -> None:
        self._near.say(frame.header, frame.body)
        data = b""
        while self._near.is_ready:
            data += self._near.next()
        self._job.clock.after(LATENCY_S, lambda: self._hear(data))

    def send_large(self, header: dict[str, Any], source: Source) -> None:
        raise AssertionError("the simulated plan ships no runtime")

    def close(self) -> None: ...

    def kill(self) -> None: ...

    def _feed(self, data: bytes) -> None:
        for event in self._inlet.feed(data, self._job.clock.now + WALL):
            self._put(event)

    # The host's end

    def _connected(self) -> None:
        self._near.connect()
        self._far.connect()
        self._job.arrive(self, GREETING)
        self._say("hello", version=session.VERSION, host=self._host, time=WALL + self._job.clock.now)

    def _say(self, kind: str, /, **members: Any) -> None:
        self._far.say({"type": kind, **members})
        data = b""
        while self._far.is_ready:
            data += self._far.next()
        self._job.clock.after(LATENCY_S, lambda: self._job.arrive(self, data))

    def _stamped(self, kind: str, /, **members: Any) -> None:
        self._say(kind, time=WALL + self._job.clock.now, **members)

    def _hear(self, data: bytes) -> None:
        for frame in self._far.feed(data):
            self.heard[frame.type] += 1
            if frame.type == "begin":
                self._say("ready", address=f"10.0.0.{self._host}", ports={})
                self.sample_s = frame.header["sample_s"]
                if self.sample_s and self._job.measures:
                    # Elsewhere no two agents measure at the same time.
                    self._job.clock.after(self.sample_s * self._job.place_in_line(self._host), self._measure)
            elif frame.type == "ping":
                self._say("pong", n=frame.header["n"])
            elif frame.type == "spawn":
                self._job.clock.after(SPAWN_S, lambda task=frame.header["task"]: self._started(task))
            elif frame.type == "stop":
                for task in [name for name in frame.header["tasks"] if name in self._live]:
                    self.exit(task, signal=frame.header["steps"][0][0])
                self._say("cleared", left=[])
            elif frame.type == "end":
                self._has_ended = True
                self._say("bye")

    def _measure(self) -> None:
        """Send what the host and its tasks use, again each interval."""
        if self._has_ended:
            return
        now = self._job.clock.now
        host = {"cores": 96, "cpu_s": 80.0 * now, "load": 80.1, "mem_total": 1 << 40, "mem_used": 1 << 38}
        host.update(net_rx=1e8 * now, net_tx=1e8 * now, disk_total=1 << 42, disk_free=1 << 41, processes=1000)
        gpus = [
            {
                "uuid": f"GPU-{each}",
                "index": each,
                "name": "H100",
                "util": 0.9,
                "mem_total": 1 << 36,
                "mem_used": 1 << 35,
            }
            for each in range(8)
        ]
        wall = WALL + now
        report = {"step": int(now), "total": 1000, "values": {"loss": 1.0 / (1.0 + now), "lr": 0.1}, "time": wall - 0.3}
        counters = {"role": "worker", "values": {"store_calls": int(10 * now)}, "time": wall - 0.2}
        task = {"cpu_s": 9.5 * now, "rss": 1 << 33, "processes": 9, "read": 1e6 * now, "write": 1e5 * now}
        task.update(gpu=0.9, gpu_mem=1 << 35, output_at=wall - 1.0, report=report, counters=counters)
        self._stamped("metrics", clock=5000.0 + now, host=host, gpus=gpus, tasks=dict.fromkeys(self._live, task))
        self._job.clock.after(self.sample_s, self._measure)

    def _started(self, task: str) -> None:
        self._live[task] = pid = 1000 + len(self._live)
        self._stamped("started", task=task, pid=pid, start="1")
        if task == SCHEDULER:
            self._stamped("published", task=task, values={"address": "10.0.0.1", "port": "9091"})
        self._job.count_started()

    def exit(self, task: str, signal: str | None = None, code: int = 0) -> None:
        """Have a task end: with a code, or by a signal that the agent sent."""
        del self._live[task]
        how = {"code": code, "signal": None} if signal is None else {"code": None, "signal": signal}
        self._stamped("exited", task=task, stopped=signal is not None, out=0, err=0, **how)


@dataclass
class Phase:
    """What a part of a job took."""

    virtual_s: float
    cpu_s: float
    """Of the one process that is not simulated."""


class Phases(dict[str, Phase]):
    """The phases that are over, by name."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._mark = (0.0, 0.0)

    def end(self, name: str, times: int = 1) -> None:
        """A phase ends, and the next begins. `times`: it was so many alike; one of them is noted."""
        now, cpu_s = self._mark
        self[name] = Phase((self._clock.now - now) / times, (self._clock.cpu_s - cpu_s) / times)
        self._mark = (self._clock.now, self._clock.cpu_s)


class SimulatedJob:
    """A job's coordinator, with its loop, supervisor, frames and job folder, and `hosts` agents.

    The workers exit with 0, all at once, `beats` pings after the last was started.

    Args:
        fails: only worker 0 exits, with 1.
        measures: agents measure their hosts and tasks, if they are told to.
        watcher: takes what the job's service is told besides.
        folder: an empty folder, for the job's.
        connect_s: when the agent of a host connects, by its index; default: at once.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        clock: Clock,
        beats: int = 3,
        connect_s: Callable[[int], float] = lambda number: 0.0,
        fails: bool = False,
        measures: bool = False,
        watcher: Any = None,
    ) -> None:
        self.plan = plan
        self.clock = clock
        self.measures = measures
        self._watcher = watcher
        self.agents = {host.name: SimulatedAgent(self, host.name) for host in plan.hosts}
        self.phases = Phases(clock)
        """`launch` (to the last `started`), `beat` (one ping of every host and its answer), `end`."""
        self.said: list[str] = []
        self._beats = beats
        self._numbers = {host.name: number for number, host in enumerate(plan.hosts)}
        self._connect_s = connect_s
        self._fails = fails
        self._started = 0
        self._folder = folder
        self._inbox = _Inbox(clock)

    def connect_s(self, host: str) -> float:
        """Return when the agent of a host connects."""
        return self._connect_s(self._numbers[host])

    def place_in_line(self, host: str) -> float:
        """Return a number from 0 to 1, another for each host."""
        return self._numbers[host] / len(self._numbers)

    def arrive(self, agent: SimulatedAgent, data: bytes) -> None:
        """Bytes of an agent are here."""
        self._inbox.ready.append(lambda: agent._feed(data))

    def count_started(self) -> None:
        """One more task runs."""
        self._started += 1
        if self._started == len(self.plan.tasks):
            self.clock.after(2 * LATENCY_S, self._all_started)

    def run(self) -> Outcome:
        """Run the job to its end."""
        place = self._folder / self.plan.job
        place.mkdir()
        folder = JobFolder.make(place, self.plan)

        def ignore(*_: object) -> None: ...

        told = {name: getattr(self._watcher, name, ignore) for name in ("opened", "event", "state", "stack", "metrics")}
        service = SimpleNamespace(say=lambda text, level: self.said.append(text), output=ignore, **told)
        shown = SimpleNamespace(monotonic=self.clock.monotonic, time=self.clock.time)
        queues = SimpleNamespace(SimpleQueue=lambda: self._inbox, Empty=queue.Empty)
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(loop, "time", shown))
            stack.enter_context(mock.patch.object(loop, "queue", queues))
            self.clock.go_on()
            outcome = jobrun.JobRun(self.plan, Secrets(), list(self.agents.values()), folder, service).run()
            self.clock.pause()
        self.phases.end("end")
        return outcome

    def _all_started(self) -> None:
        self.phases.end("launch")
        self.clock.after(self._beats * loop.PING_S, self._end)

    def _end(self) -> None:
        self.phases.end("beat", self._beats)
        for task in self.plan.of_role(WORKER)[: 1 if self._fails else None]:
            self.agents[task.host].exit(task.name, code=int(self._fails))
