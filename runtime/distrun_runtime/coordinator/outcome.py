"""How a job, and each of its tasks, stands or ended. Frozen values, JSON-able by `dataclasses.asdict`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Optional, Tuple

from distrun_runtime.contract import facts


@dataclass(frozen=True)
class TaskResult:
    """One task as it stands, or ended."""

    name: str
    role: str
    rank: int
    host: str
    state: str = facts.PENDING
    pid: Optional[int] = None
    code: Optional[int] = None
    signal: Optional[str] = None
    started: Optional[float] = None
    """Wall clock, seconds; so is `ended`."""
    ended: Optional[float] = None
    reason: str = ""
    """Why it could not run, of what it failed or how it was lost, in words; else empty."""
    own_failure: str = ""
    """What it said it fails of, before anybody had signalled it; it may have been stopped before it had ended."""
    lost_peer: str = ""
    """The peer whose loss it died of: then it is a consequence."""
    max_rss_kb: int = 0
    cpu_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """It ran, and runs no more as far as anybody can know."""
        return self.state in (facts.EXITED, facts.FAILED, facts.STOPPED)


KINDS = (
    "dns",
    "refused",
    "timeout",
    "unreachable",
    "hostkey",
    "auth",
    "password",
    "python",
    "folder",
    "disk",
    "clock",
    "module",
    "activation",
    "interface",
    "gpus",
    "protocol",
    "other",
)
"""What can be wrong with a host before anything is started there."""


@dataclass(frozen=True)
class Problem:
    """Why one host cannot be used."""

    host: str
    kind: str
    """One of KINDS."""
    text: str
    """What was found."""
    fix: str = ""
    """What to type, or to do, next."""


@dataclass(frozen=True)
class Culprit:
    """What ended a job that did not succeed. `task` is empty when a whole host was lost or did not start."""

    task: str
    host: str
    code: Optional[int] = None
    signal: Optional[str] = None
    time: float = 0.0
    reason: str = ""
    consequence: bool = False
    """It died of a lost peer; nothing else is known to have failed."""
    lost_peer: str = ""
    missing: bool = False
    """It did not fail; others lost it, or waited for it in vain."""


@dataclass(frozen=True)
class Outcome:
    """The end of a job."""

    exit_code: int
    reason: str
    """One of `facts.REASONS`."""
    message: str
    """One line: what happened, where, and what to do if that is known."""
    culprit: Optional[Culprit] = None
    tasks: Tuple[TaskResult, ...] = ()
    survivors: Tuple[str, ...] = ()
    """Processes that may still run, one text each (`pid 123 (sleep) on d2`)."""
    job: str = ""
    """The job's id; may be empty."""
    problems: Tuple[Problem, ...] = ()
    """PREFLIGHT: every host that cannot be used, in the plan's order."""

    @property
    def job_state(self) -> str:
        """The job's last state: succeeded, failed or killed."""
        return last_state(self.reason)


def last_state(reason: str) -> str:
    """Return the last state of a job that ended for a reason (`facts.REASONS`): succeeded, failed or killed."""
    if reason == facts.SUCCEEDED:
        return facts.SUCCEEDED
    return facts.KILLED if reason in (facts.INTERRUPTED, facts.TERMINATED) else facts.FAILED


def from_json(value: Mapping[str, Any]) -> Outcome:
    """Return the outcome of which `value` is the JSON (`dataclasses.asdict`)."""
    culprit = value["culprit"]
    return Outcome(
        **{
            **value,
            "culprit": None if culprit is None else Culprit(**culprit),
            "tasks": tuple(TaskResult(**task) for task in value["tasks"]),
            "survivors": tuple(value["survivors"]),
            "problems": tuple(Problem(**problem) for problem in value["problems"]),
        }
    )
