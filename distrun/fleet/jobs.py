"""Jobs on hosts and their processes, read from the answers of agents' tools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distrun.errors import UsageError
from distrun.units import age
from distrun_runtime.contract import facts

SHOWN = 100
"""Characters of a command line in a table; the JSON has all."""
_OWN = ("agent", "guard", facts.HELPER)
"""Processes of a job that are no tasks, by what they are called in place of one."""


@dataclass(frozen=True)
class JobProcess:
    """One process of a host."""

    pid: int
    start: str
    """Opaque: tells it from a later one of the same pid."""
    command: str
    task: str = ""
    """Which task of the job it belongs to, `agent`, `guard` or `helper`; empty: not known."""
    age_s: float | None = None


@dataclass(frozen=True)
class HostJob:
    """A job on one host."""

    host: str
    """What we call it."""
    job: str
    agent: str
    """alive, stopped, dead or none."""
    guard: str
    processes: tuple[JobProcess, ...]
    quiet_s: float | None = None
    """How long ago its agent heard from its launcher, at most."""
    lease_s: float | None = None
    grace_s: float | None = None
    """What its tasks have between TERM and KILL; None: nothing tells."""
    nonce: str = ""
    """Tells it from a job of another store by the same id."""

    @property
    def mark(self) -> str:
        """Which job it is of all stores: `ID/NONCE`; of an older version the id."""
        return f"{self.job}/{self.nonce}" if self.nonce else self.job

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of its tasks that have a process here."""
        names = (each.task for each in self.processes if each.task not in ("", *_OWN))
        return tuple(dict.fromkeys(names))

    @property
    def age_s(self) -> float | None:
        """How old its oldest process is; None: nothing tells."""
        return max((each.age_s for each in self.processes if each.age_s is not None), default=None)

    @property
    def is_stale(self) -> bool:
        """Whether nobody looks after it: its agent is dead, stopped, or past its lease."""
        return self.agent != facts.AGENT_ALIVE or self.is_past_lease

    @property
    def is_past_lease(self) -> bool:
        """Whether its agent has not heard from its launcher for so long that it should have ended the job."""
        return self.quiet_s is not None and self.lease_s is not None and self.quiet_s > self.lease_s

    def state(self) -> str:
        """Return how its agent stands, in words."""
        if self.agent == facts.AGENT_ALIVE:
            return f"silent {age(self.quiet_s)}" if self.is_past_lease else "runs"
        return "agent " + {facts.AGENT_STOPPED: "stopped", facts.AGENT_NONE: "unknown"}.get(self.agent, "gone")


def read(host: str, answer: Mapping[str, Any]) -> list[HostJob]:
    """Return the jobs of a host from what its agent's `survey` answered."""
    return [
        HostJob(
            host,
            str(each["job"]),
            str(each["agent"]),
            str(each["guard"]),
            tuple(processes(each["processes"])),
            each.get("quiet_s"),
            each.get("lease_s"),
            each.get("grace_s"),
            str(each.get("nonce") or ""),
        )
        for each in answer["jobs"]
    ]


def processes(rows: Iterable[Mapping[str, Any]]) -> list[JobProcess]:
    """Return the processes that a tool told of."""
    return [
        JobProcess(
            int(row["pid"]), str(row["start"]), str(row["command"]), str(row.get("task") or ""), row.get("age_s")
        )
        for row in rows
    ]


def chosen(found: Iterable[HostJob], jobs: Sequence[str] = (), stale: bool = False) -> list[HostJob]:
    """Return the jobs that are meant, stale ones if so: those named; all without names.

    A name is an id, the beginning of one, or `ID/NONCE` where two stores have a job of that id.

    Raises:
        UsageError: a name could be several jobs, or is empty.
    """
    rows = [each for each in found if each.is_stale or not stale]
    ids: dict[str, str] = {each.mark: each.job for each in rows}
    meant = {each for word in jobs for each in _meant(word, ids)} if jobs else set(ids)
    return [each for each in rows if each.mark in meant]


def names(rows: Iterable[HostJob]) -> dict[str, str]:
    """Return what jobs are called, by `mark`: the id; `ID/NONCE` where two of them have the same id."""
    ids = {each.mark: each.job for each in rows}
    alike = list(ids.values())
    return {mark: mark if alike.count(job) > 1 else job for mark, job in ids.items()}


def _meant(word: str, ids: Mapping[str, str]) -> list[str]:
    """Return the marks of the one job that `word` names, none if there is none. `ids`: by mark."""
    if not word.strip():
        raise UsageError(f"there is no job {word!r}", "leave it out to mean all of mine on these hosts, or type an id")
    exact = [mark for mark, job in ids.items() if word in (mark, job)]
    found = exact or [mark for mark in ids if mark.startswith(word)]
    if len(found) > 1:
        told = found if len({ids[mark] for mark in found}) < len(found) else [ids[mark] for mark in found]
        raise UsageError(f"{word!r} could be {', '.join(told)}", "type more of the id, or name each of them")
    return found


def shown(process: JobProcess) -> str:
    """Return a process's command for a table: ours by its name, for theirs is long; others cut."""
    if process.task in _OWN:
        return f"distrun's {process.task}"
    return process.command if len(process.command) <= SHOWN else process.command[:SHOWN] + "..."
