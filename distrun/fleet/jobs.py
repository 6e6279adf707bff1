"""Jobs on hosts and their processes, read from the answers of agents' tools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distrun.errors import UsageError
from distrun_runtime.contract import facts

SHOWN = 100
"""Characters of a command line in a table; the JSON has all."""


@dataclass(frozen=True)
class JobProcess:
    """One process of a host."""

    pid: int
    start: str
    """Opaque: tells it from a later one of the same pid."""
    command: str
    task: str = ""
    """Which task of the job it belongs to, "agent" or "guard"; empty: not known."""
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
    """Return the jobs that are meant: those named (an id or its beginning; all without names), stale ones if so.

    Raises:
        UsageError: a name is the beginning of several ids, or is empty.
    """
    rows = [each for each in found if each.is_stale or not stale]
    ids = list(dict.fromkeys(each.job for each in rows))
    meant = {each for word in jobs for each in _meant(word, ids)} if jobs else set(ids)
    return [each for each in rows if each.job in meant]


def _meant(word: str, ids: Sequence[str]) -> list[str]:
    if not word.strip():
        raise UsageError(f"there is no job {word!r}", "leave it out to mean all of mine on these hosts, or type an id")
    found = [word] if word in ids else [each for each in ids if each.startswith(word)]
    if len(found) > 1:
        raise UsageError(f"{word!r} could be {', '.join(found)}", "type more of the id, or name each of them")
    return found


def shown(process: JobProcess) -> str:
    """Return a process's command for a table: ours by its name, for theirs is long; others cut."""
    if process.task in ("agent", "guard"):
        return f"distrun's {process.task}"
    return process.command if len(process.command) <= SHOWN else process.command[:SHOWN] + "..."


def age(seconds: float | None) -> str:
    """Return a time for people: 59 s, 12 min, 3:05 h, 12 d."""
    if seconds is None:
        return ""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    if seconds < 100 * 3600:
        return f"{int(seconds // 3600)}:{int(seconds % 3600 // 60):02d} h"
    return f"{seconds / 86400:.0f} d"
