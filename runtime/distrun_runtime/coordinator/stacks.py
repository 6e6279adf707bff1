"""Gets the stacks of tasks for clients: asks the agents and always answers. No side effects.

A client asks for a task, a role or all workers. It gets one answer per task: the stacks, or why there are none and how
to fix that. If an agent does not answer in time, the coordinator answers in its place.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Set, Tuple, Union

from distrun_runtime.contract import facts
from distrun_runtime.contract.plan import WORKER
from distrun_runtime.coordinator.actions import AskStack
from distrun_runtime.coordinator.events import StackFound, StackWanted
from distrun_runtime.coordinator.outcome import TaskResult

ANSWER_S = 10.0
"""How long an agent may take."""
MOST = 1024
"""Tasks that are asked for at a time."""


class StackTold(NamedTuple):
    """An answer for the client's question `number`, as `control.stack` takes it."""

    number: int
    members: Mapping[str, Any]


class _Open(NamedTuple):
    """A task that was asked for."""

    number: int
    task: str
    until: float


class Stacks:
    """The questions that are not answered yet.

    Arguments:
        places: the place of each task.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places
        self._asked = 0
        self._open: Dict[int, _Open] = {}
        """By the number that the agent answers with."""
        self._left: Dict[int, int] = {}
        """Question to the answers that are still to come."""

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is to come."""
        return bool(self._open)

    def wanted(
        self, event: StackWanted, tasks: Mapping[str, TaskResult], reached: Set[str], now: float
    ) -> Tuple[List[AskStack], List[StackTold]]:
        """Take a client's question; return what agents are asked, and what can be answered now.

        Arguments:
            tasks: all tasks of the job, as they stand.
            reached: places whose agents can be asked.
        """
        names = matching(event.task, tasks)
        if not names:
            known = ", ".join(list(tasks)[:8]) + (", ..." if len(tasks) > 8 else "")
            error = f"no task {event.task!r} in this job; there is: {known}" if event.task else "the job has no workers"
            return [], [StackTold(event.number, _members(event.task, error=error, left=0))]
        self._left[event.number] = len(names)
        asked: List[AskStack] = []
        told: List[StackTold] = []
        for name in names:
            place = self._places[name]
            error, fix = _why_not(tasks[name])
            if not error and place not in reached:
                error = f"the agent of {place} cannot be reached"
            if not error and len(self._open) >= MOST:
                error, fix = f"more than {MOST} stacks are asked for at a time", "name the task"
            if error:
                told.append(self._told(event.number, name, error=error, fix=fix))
            else:
                self._asked += 1
                self._open[self._asked] = _Open(event.number, name, now + ANSWER_S)
                asked.append(AskStack(place, self._asked, name))
        return asked, told

    def heard(self, event: StackFound) -> List[StackTold]:
        """Take an agent's answer."""
        found = self._open.get(event.id)
        if found is None or event.host != self._places.get(found.task):
            return []
        del self._open[event.id]
        members = {"text": event.text, "how": event.how, "error": event.error, "fix": event.fix}
        return [self._told(found.number, found.task, **members)]

    def expired(self, now: float) -> List[StackTold]:
        """Answer for agents that have not answered in time."""
        late = [number for number, each in self._open.items() if now >= each.until]
        told = []
        for found in (self._open.pop(number) for number in late):
            error = f"the agent of {self._places[found.task]} did not answer within {ANSWER_S:g} s"
            told.append(self._told(found.number, found.task, error=error))
        return told

    def _told(self, number: int, task: str, **members: str) -> StackTold:
        self._left[number] -= 1
        left = self._left[number]
        if not left:
            del self._left[number]
        return StackTold(number, _members(task, left=left, **members))


def matching(wanted: str, tasks: Mapping[str, TaskResult]) -> List[str]:
    """Return the names of the tasks that a client means: one, those of a role, or all workers. No side effects."""
    return [name for name, task in tasks.items() if (wanted or WORKER) in (name, task.role)]


def _members(task: str, **members: Union[str, int]) -> Dict[str, Any]:
    return {"task": task, "text": "", "how": "", "error": "", "fix": "", **members}


def _why_not(task: TaskResult) -> Tuple[str, str]:
    """Return why a task has no stacks, and what would help."""
    if task.state == facts.RUNNING:
        return "", ""
    if not task.is_over:
        return f"{task.name} has not started yet", ""
    how = f"signal {task.signal}" if task.signal else f"exit code {task.code}"
    return f"{task.name} has ended ({task.reason or how})", "distrun logs JOB " + task.name + " shows what it printed"
