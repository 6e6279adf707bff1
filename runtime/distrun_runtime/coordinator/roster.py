"""Hosts and tasks of a job as the supervisor knows them: who answered, who is silent, what runs. No side effects."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, Dict, List, Optional, Set
from typing import Counter as Counts

from distrun_runtime.contract import facts
from distrun_runtime.contract.agent_messages import Output
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.contract.plan import WORKER, Plan, Task, references
from distrun_runtime.coordinator.failures import Survivor, TaskResult, listed
from distrun_runtime.coordinator.messages import Event

SKEW_S = 1.0
"""A host's clock is corrected only when it is off by more: below that, NTP knows better than a hello's delay."""
SKEW_LIMIT_S = 300.0
"""One that is off by more is none that can be relied on: files look older than they are, certificates expired."""

LOST_WITH_HOST = "lost with its host"
"""Reason of a task whose host was lost."""


@dataclass
class HostState:
    """What is known of one host and its agent."""

    name: str
    machine: str = ""
    """The name that its machine has for itself; empty: not known yet."""
    greeted: bool = False
    is_ready: bool = False
    """It has done what it was asked to do before tasks can start: `begin` or, later, `settle`."""
    is_gone: bool = False
    last_seen: float = 0.0
    """`now` of its last event."""
    is_suspect: bool = False
    cut_at: Optional[float] = None
    """`now` when its connection was cut, until it is made again."""
    silence_s: float = 0.0
    """For how long it was silent, at most, when tasks elsewhere had lost those on it; 0: nothing was lost so."""
    skew_s: float = 0.0
    """Added to its stamps."""
    stamp: float = 0.0
    """Its last one, by its own clock."""
    told_to_stop: bool = False
    """A stop that named all its tasks was sent."""
    cleared: bool = False
    ended_at: Optional[float] = None
    """`now` when it was told to end whatever is left."""
    last_output: float = 0.0
    over_at: Optional[float] = None
    """`now` when all its tasks were over, as was looked then."""

    @property
    def has_answered(self) -> bool:
        """Whether it is known if the host can be used."""
        return self.is_ready or self.is_gone

    def note_stamp(self, stamp: float, arrived: float) -> float:
        """Take a stamp of the host that came at `arrived` by our clock. Return by how much the host's clock was set, 0
        if it was not, and correct the stamps from now on.

        A stamp that is much later than its arrival, or much earlier than the one before, shows that. One that is much
        earlier than its arrival may have waited while the connection was cut, or while we slept.
        """
        moved = stamp + self.skew_s - arrived
        is_set = moved > SKEW_LIMIT_S or stamp < self.stamp - SKEW_LIMIT_S
        self.stamp = stamp
        if not is_set:
            return 0.0
        self.skew_s = arrived - stamp
        return moved


class JobRoster:
    """All hosts, tasks and facts of one job.

    What is asked at every event takes the same time however large the job is: states are counted when they change.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.hosts: Dict[str, HostState] = {place.name: HostState(place.name) for place in plan.all_places}
        """By the name of the place: the agents. Where a host has one, it is called as the host."""
        self.places: Dict[str, str] = {task.name: task.place_name for task in plan.tasks}
        """The place of each task."""
        self.tasks: Dict[str, TaskResult] = {
            task.name: TaskResult(task.name, task.role, task.rank, task.host) for task in plan.tasks
        }
        self._names: Dict[str, List[str]] = {}
        """The tasks of each place, in the plan's order."""
        for task in plan.tasks:
            self._names.setdefault(task.place_name, []).append(task.name)
        self._states: Counts[str] = Counter({facts.PENDING: len(plan.tasks)})
        """How many tasks are in a state."""
        self._workers: Counts[str] = Counter({facts.PENDING: len(plan.of_role(WORKER))})
        """The same of workers alone."""
        self._order = list(self.hosts.values())
        self._by_address: Dict[str, HostState] = {}
        self._answered = self._gone = 0
        """So many hosts from the first on have answered, and are gone: no other is looked at to know if all are."""
        self._tried = -1
        """How many facts were known when tasks were last looked for that can be spawned."""
        self.facts: Dict[str, str] = {}
        self.spawned: Set[str] = set()
        self.survivors: List[Survivor] = []
        self._totals: Dict[str, Counts[str]] = {}
        """Bytes that a task which was reaped had written, by stream."""
        self._received: Dict[str, Counts[str]] = {}

    def change(self, name: str, **members: Any) -> TaskResult:
        """Replace members of a task's result and return the new one."""
        before = self.tasks[name]
        self.tasks[name] = result = dataclasses.replace(before, **members)
        for counts in (self._states, self._workers) if result.role == WORKER else (self._states,):
            counts[before.state] -= 1
            counts[result.state] += 1
        return result

    def knows(self, event: Event) -> bool:
        """Whether the host, and the task on that host, which an event names (if it does) are the plan's."""
        host, name = getattr(event, "host", ""), getattr(event, "task", None)
        if host and host not in self.hosts:
            return False
        return name is None or (name in self.tasks and self.places[name] == host)

    def lose(self, host: str, state: str, time: float) -> bool:
        """Mark a host gone and its live tasks as `state`; return whether anything ran there."""
        self.hosts[host].is_gone = True
        live = [task for task in self.on_host(host) if not task.is_over]
        for task in live:
            self.change(task.name, state=state, ended=time, reason=LOST_WITH_HOST)
            self.survive(task, host)
        return bool(live)

    def survive(self, task: TaskResult, host: str) -> None:
        """Note that a task may still run. `host`: the name of its place."""
        self.survivors.append(Survivor(f"{task.name} (pid {task.pid or 'unknown'})", host))

    def on_host(self, host: str) -> List[TaskResult]:
        """Return the tasks of a host that were spawned, by name of the plan's order."""
        return [self.tasks[name] for name in self._names.get(host, ()) if name in self.spawned]

    def is_pending(self, host: str) -> bool:
        """Whether a task of a host is still to be spawned."""
        return any(self.tasks[name].state == facts.PENDING for name in self._names.get(host, ()))

    def spawnable(self) -> List[Task]:
        """Return the tasks not spawned yet whose references are all known. Each is returned once."""
        if self._tried == len(self.facts):
            return []  # only another fact makes more tasks ready
        self._tried = len(self.facts)
        return [
            task
            for task in self.plan.tasks
            if task.name not in self.spawned
            and not self.hosts[task.place_name].is_gone
            and references(task) <= self.facts.keys()
        ]

    @property
    def silent(self) -> Dict[str, float]:
        """The hosts whose silence explains what tasks elsewhere lost, and how many seconds it lasted."""
        found: Dict[str, float] = {}
        for state in self.hosts.values():
            if state.silence_s:
                name = self.plan.host_of(state.name).name
                found[name] = max(found.get(name, 0.0), state.silence_s)
        return found

    @property
    def all_started(self) -> bool:
        """Whether every task runs or ran."""
        return not (self._states[facts.PENDING] or self._states[facts.STARTING])

    @property
    def workers_succeeded(self) -> bool:
        """Whether all workers ended by themselves with 0."""
        return self._workers[facts.EXITED] == sum(self._workers.values()) > 0

    @property
    def workers_over(self) -> bool:
        """Whether no worker that was spawned still runs."""
        return not (self._workers[facts.STARTING] or self._workers[facts.RUNNING])

    @property
    def all_over(self) -> bool:
        """Whether no task that was spawned still runs."""
        return not (self._states[facts.STARTING] or self._states[facts.RUNNING])

    @property
    def all_gone(self) -> bool:
        """Whether no agent is left."""
        while self._gone < len(self._order) and self._order[self._gone].is_gone:
            self._gone += 1
        return self._gone == len(self._order)

    @property
    def all_answered(self) -> bool:
        """Whether it is known of every host if it can be used."""
        while self._answered < len(self._order) and self._order[self._answered].has_answered:
            self._answered += 1
        return self._answered == len(self._order)

    def twin_of(self, host: HostState, address: str) -> Optional[HostState]:
        """Note a host's address for data; return the host that has it already, if that is another machine."""
        other = self._by_address.setdefault(address, host)
        return other if other.machine != host.machine else None

    def ask_again(self) -> None:
        """Every host has something to do before tasks can start, and is to answer again."""
        self._answered = 0
        for host in self._order:
            host.is_ready = False

    @property
    def unanswered(self) -> List[str]:
        """The hosts of which it is not known yet whether they can be used."""
        return [host.name for host in self.hosts.values() if not host.has_answered]

    def missing(self) -> str:
        """Return what has not started yet, in words: agents and hosts or, once all of those are ready, tasks.

        Of a task that needs another one's address, only that other one is awaited, and so it is named, once.
        """
        hosts = [host for host in self.hosts.values() if not host.has_answered]
        if hosts:
            silent = [host.name for host in hosts if not host.greeted]
            unready = [host.name for host in hosts if host.greeted]
            agents = "the agent on " if len(silent) == 1 else "the agents on "
            texts = [agents + listed(silent)] if silent else []
            return "; ".join([*texts, *(["the preparation of " + listed(unready)] if unready else [])])
        free: List[str] = []
        waiting: Dict[str, List[str]] = {}
        for task in self.plan.tasks:
            if self.tasks[task.name].state in (facts.PENDING, facts.STARTING):
                where = f"{task.name} on {task.host}"
                needs = {name.partition(".")[0] for name in references(task) - self.facts.keys()}
                providers = [name for name in sorted(needs) if name in self.tasks]
                for name in providers:
                    waiting.setdefault(name, []).append(where)
                if not providers:
                    free.append(where)
        texts = []
        for name, needing in waiting.items():
            where = f"{name} on {self.tasks[name].host}"
            free = [each for each in free if each != where]
            verb = "needs" if len(needing) == 1 else "need"
            texts.append(f"{where} ({facts.listed(needing, 1)} {verb} its address)")
        return "; ".join([*texts, *([listed(free)] if free else [])])

    def unfinished(self) -> List[str]:
        """Return the workers that have not ended, or, when all have, the other tasks; a few words each."""
        left = [task for task in self.tasks.values() if not task.is_over]
        workers = [task for task in left if task.role == WORKER]
        return [f"{task.name} on {task.host}" for task in workers or left]

    def settle(self) -> None:
        """Bring every task that was spawned to its last state: the job is over, and no message of its end will come."""
        for name in self.spawned:
            task = self.tasks[name]
            if task.is_over:
                continue
            if self.hosts[self.places[name]].silence_s:
                self.change(name, state=facts.FAILED, reason=LOST_WITH_HOST)
            else:
                self.change(name, state=facts.STOPPED, reason=task.reason or "its end was not reported")

    def expect(self, task: str, out: int, err: int) -> None:
        """Remember how much a task that was reaped had written."""
        self._totals[task] = Counter(out=out, err=err)

    def received(self, event: Output) -> None:
        """Remember how much of a task's output has come."""
        came = self._received.setdefault(event.task, Counter())
        came[event.stream] = max(came[event.stream], event.offset + len(event.data))

    def undrained(self, host: str) -> List[str]:
        """Return the reaped tasks of `host` of whose output something has not come."""
        found: List[str] = []
        for name in sorted(self._names.get(host, ())):
            if self._totals.get(name, Counter()) - self._received.get(name, Counter()):
                found.append(name)
        return found

    def forgive(self, gap_s: float) -> None:
        """Move all silences by the time in which it was us who slept."""
        for host in self.hosts.values():
            host.last_seen += gap_s
