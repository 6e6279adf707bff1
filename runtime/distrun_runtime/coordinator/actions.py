"""What the supervisor wants done; the loop does it. One frozen value each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping, Tuple, Union

from distrun_runtime.coordinator.outcome import Outcome

DEBUG = "debug"
INFO = "info"
WARNING = "warning"
ERROR = "error"

Steps = Tuple[Tuple[str, float], ...]
"""The stop sequence of tasks: pairs of a signal's name and the seconds until the next one; the last is ("KILL", 0)."""


@dataclass(frozen=True)
class Begin:
    """Send the agent of `host` its share of the plan."""

    host: str


@dataclass(frozen=True)
class SendRuntime:
    """Send the agent of `host` the archive of the runtime."""

    host: str


@dataclass(frozen=True)
class Prepare:
    """Begin what must be done between readiness and the first task: `prepare` of the loop's caller."""


@dataclass(frozen=True)
class Settle:
    """Have the agent of `host` activate and look at what `Prepare` brought."""

    host: str


@dataclass(frozen=True)
class Spawn:
    """Have `task` started, with the environment that is added to it (references filled in)."""

    host: str
    task: str
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StopTasks:
    """Have tasks, and whatever they started, ended by the signals of `steps`."""

    host: str
    tasks: Tuple[str, ...]
    steps: Steps


@dataclass(frozen=True)
class EndAgent:
    """Have the agent end whatever is left at once, and go."""

    host: str


@dataclass(frozen=True)
class Drop:
    """Close the channel: the agent is not worth waiting for (it will end its tasks when it sees the end of input)."""

    host: str


@dataclass(frozen=True)
class Announce:
    """Tell the user. `level` is debug, info, warning or error."""

    text: str
    level: str = INFO


@dataclass(frozen=True)
class Finish:
    """The job is over."""

    outcome: Outcome


Action = Union[Begin, SendRuntime, Prepare, Settle, Spawn, StopTasks, EndAgent, Drop, Announce, Finish]
