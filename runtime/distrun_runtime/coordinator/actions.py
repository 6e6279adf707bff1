"""Actions that decision classes (a job's `Supervisor`, questions to hosts) return. One frozen value each.

The loop performs those of `AgentAction`, which concern one agent each; the others are performed by who runs the loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Tuple, Union

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
    attempt: int = 0
    """How often it was started before."""


@dataclass(frozen=True)
class StopTasks:
    """Have tasks, and whatever they started, ended by the signals of `steps`."""

    host: str
    tasks: Tuple[str, ...]
    steps: Steps


@dataclass(frozen=True)
class SignalTasks:
    """Give a signal to the first processes of tasks. Whatever comes of it is their own doing."""

    host: str
    tasks: Tuple[str, ...]
    signal: str


@dataclass(frozen=True)
class EndAgent:
    """Have the agent end whatever is left at once, and go."""

    host: str


@dataclass(frozen=True)
class AskAgent:
    """Have a tool of the agent answer. Only before `Begin`."""

    host: str
    id: int
    """Comes back in `Answered`."""
    what: str
    """Name of the tool (`distrun_runtime.agent.query`)."""
    args: Mapping[str, Any]


@dataclass(frozen=True)
class AskStack:
    """Have the agent say where a task stands."""

    host: str
    id: int
    """Comes back in `StackFound`."""
    task: str


@dataclass(frozen=True)
class Ack:
    """Tell the agent that everything before `offset` of a task's stream has been taken: it may send more."""

    host: str
    task: str
    stream: str
    offset: int


@dataclass(frozen=True)
class Sample:
    """Have an agent measure its host and tasks every `interval_s` seconds from now on; 0: no more."""

    host: str
    interval_s: float


@dataclass(frozen=True)
class Close:
    """Let the agent see the end of its input after what was sent: it ends its tasks gently and goes."""

    host: str


@dataclass(frozen=True)
class Drop:
    """Cut the channel: the agent is not worth waiting for (it will end its tasks when it sees the end of input)."""

    host: str


AgentAction = Union[
    Begin, SendRuntime, Settle, Spawn, StopTasks, SignalTasks, EndAgent, AskAgent, AskStack, Ack, Sample, Close, Drop
]


@dataclass(frozen=True)
class Show:
    """Hand output of a task to its reader, who says so by `events.Shown`."""

    host: str
    stream: str
    data: bytes


@dataclass(frozen=True)
class Announce:
    """Tell the user. `level` is debug, info, warning or error."""

    text: str
    level: str = INFO


@dataclass(frozen=True)
class Record:
    """Note in events.jsonl what has happened."""

    kind: str
    members: Mapping[str, Any]


@dataclass(frozen=True)
class ShowMetrics:
    """Give clients that want them a snapshot of the job's numbers."""

    snapshot: Mapping[str, Any]


@dataclass(frozen=True)
class GiveMetrics:
    """Give a snapshot to who asked for it (`events.MetricsAsked`)."""

    snapshot: Mapping[str, Any]
    give: Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class KeepMetrics:
    """Append a sample to metrics.jsonl."""

    line: str
    """One JSON object, without its newline."""


@dataclass(frozen=True)
class FinishJob:
    """The job is over."""

    outcome: Outcome


Action = Union[AgentAction, Prepare, Announce, FinishJob]
"""What the supervisor returns."""

MetricsAction = Union[Sample, Announce, Record, ShowMetrics, GiveMetrics, KeepMetrics]
"""What `measuring.Measuring` returns."""
