"""The rows of the table of tasks: filters and sorts them, and folds tasks that are alike into one row.

No side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from distrun.dashboard.model import Host, Task
from distrun.hosts.ranges import fold

SORTS = ("problems", "task", "host", "cpu", "memory", "gpu", "last line")
"""Orders of the table; `s` goes to the next one."""


@dataclass(frozen=True)
class Row:
    """One row: a task, or several that are alike."""

    tasks: tuple[Task, ...]

    @property
    def key(self) -> str:
        """What the row is called while it is chosen."""
        return self.tasks[0].name

    @property
    def first(self) -> Task:
        """The task, or the first one."""
        return self.tasks[0]

    @property
    def name(self) -> str:
        """Names of the tasks, folded: `worker-[0-7]`."""
        return self.first.name if len(self.tasks) == 1 else folded(tuple(task.name for task in self.tasks))

    @property
    def host(self) -> str:
        """Names of the hosts, folded: `gpu[01-08]`."""
        return self.first.host if len(self.tasks) == 1 else folded(tuple(task.host for task in self.tasks))

    def total(self, of: Callable[[Task], float | None]) -> float | None:
        """Return the sum over its tasks of what is known."""
        known = [value for value in map(of, self.tasks) if value is not None]
        return sum(known) if known else None

    def mean(self, of: Callable[[Task], float | None]) -> float | None:
        """Return the mean over its tasks of what is known."""
        known = [value for value in map(of, self.tasks) if value is not None]
        return sum(known) / len(known) if known else None

    def largest(self, of: Callable[[Task], float | None]) -> float | None:
        """Return the largest value of its tasks."""
        return max((value for value in map(of, self.tasks) if value is not None), default=None)


@lru_cache(maxsize=256)
def folded(names: tuple[str, ...]) -> str:
    """Return names as a node list."""
    return fold(names)


def table(tasks: Iterable[Task], wanted: str, order: str, is_folded: bool) -> list[Row]:
    """Return the rows of a table.

    Args:
        tasks: the job's tasks, in its order.
        wanted: words that must all be part of the task's name, host or state; empty: all tasks.
        order: one of SORTS. Within it tasks keep the job's order.
        is_folded: tasks of one role and state, unless they are problems, share a row.
    """
    found = [task for task in tasks if matches(wanted, task.name, task.host, task.word)]
    found.sort(key=_KEYS[order])
    if not is_folded:
        return [Row((task,)) for task in found]
    groups: dict[tuple[str, ...], list[Task]] = {}
    for task in found:
        groups.setdefault((task.name,) if task.is_problem else ("", task.role, task.word), []).append(task)
    return [Row(tuple(group)) for group in groups.values()]


def matches(wanted: str, *texts: str) -> bool:
    """Return whether each word of `wanted` is part of one of the texts, in upper or lower case."""
    return all(any(word in text.lower() for text in texts) for word in wanted.lower().split())


def hosts(known: Iterable[Host], wanted: str, is_folded: bool) -> list[tuple[Host, ...]]:
    """Return the rows of the panel of hosts: those that are silent or lost first; folded, one for those of one word."""
    found = sorted(
        (host for host in known if matches(wanted, host.name, host.word)), key=lambda host: host.word == "ok"
    )
    if not is_folded:
        return [(host,) for host in found]
    groups: dict[str, list[Host]] = {}
    for host in found:
        groups.setdefault(host.word, []).append(host)
    return [tuple(group) for group in groups.values()]


def _descending(of: Callable[[Task], float | None]) -> Callable[[Task], tuple[float, ...]]:
    def key(task: Task) -> tuple[float, ...]:
        value = of(task)
        return (1.0,) if value is None else (0.0, -value)

    return key


_ROLES = {"worker": 0, "server": 1, "scheduler": 2}
_KEYS: dict[str, Callable[[Task], tuple[Any, ...]]] = {
    "problems": lambda task: (task.level, task.ended or 0.0, _ROLES.get(task.role, 3), task.rank),
    "task": lambda task: (_ROLES.get(task.role, 3), task.role, task.rank),
    "host": lambda task: (task.host, _ROLES.get(task.role, 3), task.rank),
    "cpu": _descending(lambda task: task.cpu),
    "memory": _descending(lambda task: task.rss),
    "gpu": _descending(lambda task: task.gpu),
    "last line": _descending(lambda task: task.quiet_s),
}
