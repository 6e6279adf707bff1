"""Which processes belong to which task.

Pure: it is given the process table. A task is a session of its own; what leaves that session is found as its
descendant, or was seen as such before, or - reparented to the agent by then - says so in its environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Dict, Iterable, List, Set

from distrun_runtime.contract import process
from distrun_runtime.contract.process import Identity, Process

JOB = ""
"""Owner of what belongs to the job, but to no task that could be named."""


@dataclass
class Family:
    """What is known of one task's processes."""

    task: str
    leader: Identity
    is_reaped: bool = False
    """The leader was waited for: from then on its id may be given to somebody else."""
    is_scattered: bool = False
    """Reaped, and nothing was left in its group and session: these ids mean nothing any more."""
    known: Set[Identity] = field(default_factory=set)
    """Everything that was ever seen to belong to it and was alive when last looked."""


def sort_out(
    rows: Iterable[Process],
    families: Iterable[Family],
    strays: Iterable[Process],
    mark_of: Callable[[Process], str],
    not_ours: Set[int],
) -> Dict[str, List[Process]]:
    """Return the living processes of each task; under `JOB` those of the job that no task can be named for.

    Args:
        rows: the process table.
        families: what is known; their `known` and `is_scattered` are brought up to date.
        strays: processes that are the job's for another reason (below the agent, or marked).
        mark_of: name of the task that a process's environment names; empty if none.
        not_ours: process ids that are never anybody's: the agent, its guard, its ancestors.
    """
    living = [row for row in rows if not row.is_dead and row.pid not in not_ours]
    owned: Dict[str, List[Process]] = {JOB: []}
    taken: Set[int] = set()
    for family in families:
        mine = _with_descendants([row for row in living if _is_seed(row, family)], living, taken)
        owned[family.task] = mine
    for row in strays:
        if row.pid in taken or row.is_dead or row.pid in not_ours:
            continue
        mark = mark_of(row)
        owned[mark if mark in owned else JOB].extend(_with_descendants([row], living, taken))
    for family in families:
        mine = owned[family.task]
        family.known = {row.identity for row in mine}
        if family.is_reaped and not any(family.leader.pid in (row.pgid, row.sid) for row in mine):
            family.is_scattered = True
    return owned


def _is_seed(row: Process, family: Family) -> bool:
    if row.identity in family.known:
        return True
    if family.is_scattered:
        return False
    return family.leader.pid in (row.pgid, row.sid) or (row.pid == family.leader.pid and not family.is_reaped)


def _with_descendants(seeds: List[Process], living: List[Process], taken: Set[int]) -> List[Process]:
    """Return `seeds` and all below them, each once, and note them in `taken`."""
    both = seeds + process.descendants([row.pid for row in seeds], living)
    mine = []
    for row in both:
        if row.pid not in taken:
            taken.add(row.pid)
            mine.append(row)
    return mine
