"""Hosts and tasks of a job as the supervisor knows them: who answered, who is silent, what runs. No side effects."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Dict, List, Set, Tuple

from distrun_runtime.contract import facts
from distrun_runtime.contract.plan import WORKER, Plan, Task, references
from distrun_runtime.coordinator.events import Event, Output
from distrun_runtime.coordinator.outcome import TaskResult

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
    greeted: bool = False
    is_ready: bool = False
    """It has done what it was asked to do before tasks can start: `begin` or, later, `settle`."""
    is_gone: bool = False
    said_bye: bool = False
    last_seen: float = 0.0
    """`now` of its last event."""
    is_suspect: bool = False
    cut_at: float = -1.0
    """`now` when its connection was cut; negative: it is not."""
    silence_s: float = 0.0
    """For how long it was silent, at most, when tasks elsewhere had lost those on it; 0: nothing was lost so."""
    skew_s: float = 0.0
    """Added to its stamps."""
    stamp: float = 0.0
    """Its last one, by its own clock."""
    told_to_stop: bool = False
    """A stop that named all its tasks was sent."""
    cleared: bool = False
    ended_at: float = -1.0
    """`now` when it was told to end; negative: not yet."""
    last_output: float = 0.0

    @property
    def has_answered(self) -> bool:
        """Whether it is known if the host can be used."""
        return self.is_ready or self.is_gone

    @property
    def is_cut(self) -> bool:
        """Whether its connection is being made again."""
        return self.cut_at >= 0

    @property
    def was_ended(self) -> bool:
        """Whether it was told to end whatever is left."""
        return self.ended_at >= 0

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
    """All hosts, tasks and facts of one job."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.hosts: Dict[str, HostState] = {place.name: HostState(place.name) for place in plan.all_places}
        """By the name of the place: the agents. Where a host has one, it is called as the host."""
        self.places: Dict[str, str] = {task.name: task.place_name for task in plan.tasks}
        """The place of each task."""
        self.tasks: Dict[str, TaskResult] = {
            task.name: TaskResult(task.name, task.role, task.rank, task.host) for task in plan.tasks
        }
        self.facts: Dict[str, str] = {}
        self.spawned: Set[str] = set()
        self.survivors: List[str] = []
        self._totals: Dict[Tuple[str, str], int] = {}
        self._received: Dict[Tuple[str, str], int] = {}

    def change(self, name: str, **members: Any) -> TaskResult:
        """Replace members of a task's result and return the new one."""
        self.tasks[name] = result = dataclasses.replace(self.tasks[name], **members)
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
            self.survivors.append(f"{task.name} (pid {task.pid or 'unknown'}) on {host}")
        return bool(live)

    def on_host(self, host: str) -> List[TaskResult]:
        """Return the tasks of a host that were spawned, by name of the plan's order."""
        return [task for task in self.tasks.values() if self.places[task.name] == host and task.name in self.spawned]

    def spawnable(self) -> List[Task]:
        """Return the tasks not spawned yet whose references are all known."""
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
        return all(task.state == facts.RUNNING or task.is_over for task in self.tasks.values())

    @property
    def workers_over(self) -> bool:
        """Whether no worker that was spawned still runs."""
        return all(self.tasks[name].is_over for name in self.spawned if self.tasks[name].role == WORKER)

    @property
    def all_over(self) -> bool:
        """Whether no task that was spawned still runs."""
        return all(self.tasks[name].is_over for name in self.spawned)

    @property
    def unanswered(self) -> List[str]:
        """The hosts of which it is not known yet whether they can be used."""
        return [host.name for host in self.hosts.values() if not host.has_answered]

    def missing(self) -> List[str]:
        """Return, one text each, what has not started yet: agents or, once all of them are ready, tasks."""
        texts = [
            f"{host.name} to get ready" if host.greeted else f"the agent on {host.name}"
            for host in self.hosts.values()
            if not host.has_answered
        ]
        for task in () if texts else self.plan.tasks:
            if self.tasks[task.name].state in (facts.PENDING, facts.STARTING):
                needs = sorted(references(task) - self.facts.keys())
                what = f"{task.name} on {task.host}"
                texts.append(f"{what} (which waits for {', '.join(needs)})" if needs else what)
        return texts

    def unfinished(self) -> List[str]:
        """Return the workers that have not ended, or, when all have, the other tasks; a few words each."""
        left = [task for task in self.tasks.values() if not task.is_over]
        workers = [task for task in left if task.role == WORKER]
        return [f"{task.name} on {task.host}" for task in workers or left]

    def settle(self) -> None:
        """Bring every task that was spawned to its last state: the job is over, and nobody will hear of its end."""
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
        self._totals[task, "out"] = out
        self._totals[task, "err"] = err

    def received(self, event: Output) -> None:
        """Remember how much of a task's output has come."""
        key = (event.task, event.stream)
        self._received[key] = max(self._received.get(key, 0), event.offset + len(event.data))

    def is_drained(self, host: str) -> bool:
        """Whether all output of the reaped tasks of `host` has come."""
        return not self.undrained(host)

    def undrained(self, host: str) -> List[str]:
        """Return the reaped tasks of `host` of whose output something has not come."""
        names = {
            key[0]
            for key, total in self._totals.items()
            if self.places[key[0]] == host and self._received.get(key, 0) < total
        }
        return sorted(names)

    def forgive(self, gap_s: float) -> None:
        """Move all silences by the time in which it was us who slept."""
        for host in self.hosts.values():
            host.last_seen += gap_s
