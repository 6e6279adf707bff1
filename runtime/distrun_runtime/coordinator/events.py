"""Events: everything that reaches a decision class (a job's `Supervisor`, questions to hosts). One frozen value each.

Times called `time` are wall-clock seconds since the epoch: of the agent's clock where an agent stamped them, of
ours elsewhere. The `now` of decision classes is another clock (monotonic) and is passed beside the event.

They are named tuples, as in `contract/plan.py`: frozen dataclasses would take a tenth of a small job's start. Those
without members are dataclasses: an empty tuple is false, and equal to any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Mapping, NamedTuple, Optional, Tuple, Union


class AgentHello(NamedTuple):
    """An agent answered. `facts` is its hello frame; `arrived` is our wall clock when it came."""

    host: str
    facts: Mapping[str, Any] = {}
    arrived: float = 0.0


class AgentReady(NamedTuple):
    """An agent has its share of the plan, and has made and found everything on its host that the plan asks for."""

    host: str
    address: str
    ports: Mapping[str, int] = {}
    python: Mapping[str, str] = {}
    """For each argv[0] of tasks that need modules: `VERSION PATH` of the interpreter that it is there."""
    gpus: Mapping[str, Any] = {}
    """What its driver tells, and which of its GPUs tasks see (docs/protocol.md); empty: no task gets any."""


class Settled(NamedTuple):
    """An agent has activated and found what came with the files."""

    host: str
    python: Mapping[str, str] = {}
    """As in `AgentReady`."""


class Needed(NamedTuple):
    """The agent of `host` wants the archive of the runtime."""

    host: str
    digest: str


class Answered(NamedTuple):
    """An agent's tool gave `value`, or, where `error` is not empty, failed."""

    host: str
    id: int
    value: Any = None
    error: str = ""


class StackWanted(NamedTuple):
    """A client wants the stacks of a task, of a role, or of all workers (empty). The supervisor has no part in it."""

    number: int
    """What the answers are for."""
    task: str = ""


class StackFound(NamedTuple):
    """An agent has found where a task stands, or, where `error` is not empty, why that cannot be said."""

    host: str
    id: int
    text: str = ""
    how: str = ""
    error: str = ""
    fix: str = ""


class FolderFound(NamedTuple):
    """An agent has looked at the folder for the job's files. It and the next three are for whoever copies them."""

    host: str
    state: str
    """`mine`: the files are wanted. `shared`: another agent wants them, into the very same folder. `source`: it is the
    folder that they come from."""
    notes: Tuple[str, ...] = ()
    """What the user should know."""


class Copying(NamedTuple):
    """An agent has put `files` of the job's files into place so far."""

    host: str
    files: int


class Copied(NamedTuple):
    """All files are in place: `files`, with `size` bytes."""

    host: str
    files: int
    size: int


class CopyFailed(NamedTuple):
    """An agent cannot take the files. `reason`, `kind` and `fix` are as in `StartFailed`."""

    host: str
    reason: str
    kind: str = ""
    fix: str = ""


@dataclass(frozen=True)
class AllPrepared:
    """What `Prepare` began is done on all hosts."""


class PrepareFailed(NamedTuple):
    """What `Prepare` began failed, on `host` first (empty: on none in particular)."""

    host: str
    reason: str
    """One line."""
    time: float = 0.0
    text: str = ""
    """More lines of it: the last words of whoever failed."""


class StartFailed(NamedTuple):
    """There will be no agent on `host`: it could not be reached, or refused us. `reason` says why."""

    host: str
    reason: str
    time: float = 0.0
    refused: bool = False
    """It answered, and cannot do what the plan asks for."""
    kind: str = ""
    """One of `outcome.KINDS` when it is known what is wrong with the host; that is a failed preflight too."""
    fix: str = ""
    """What to type next."""

    @property
    def is_preflight(self) -> bool:
        """Whether the host is known to be unusable; else its agent simply did not come up."""
        return self.refused or bool(self.kind)


class Started(NamedTuple):
    """A task runs."""

    host: str
    task: str
    pid: int
    start: str = ""
    time: float = 0.0
    attempt: int = 0
    """How often the task was started before."""
    arrived: float = 0.0
    """Our wall clock when it came, here and below; 0: not known."""


class Published(NamedTuple):
    """A task told its agent facts, e.g. the scheduler its address and port, or a worker the peer that it lost."""

    host: str
    task: str
    values: Mapping[str, Any]
    time: float = 0.0
    stopped: bool = False
    """The agent had signalled it before it said so."""
    arrived: float = 0.0


class Output(NamedTuple):
    """Bytes that a task wrote. `offset` counts from the beginning of its stream ("out" or "err")."""

    host: str
    task: str
    stream: str
    offset: int
    data: bytes
    attempt: int = 0


class Exited(NamedTuple):
    """A task was reaped. Either `code` or `signal` (a name such as "KILL") is set."""

    host: str
    task: str
    code: Optional[int] = None
    signal: Optional[str] = None
    time: float = 0.0
    stopped: bool = False
    """The agent had signalled it (stop, signal or lease) before it was reaped."""
    reason: str = ""
    out: int = 0
    err: int = 0
    max_rss_kb: int = 0
    cpu_s: float = 0.0
    attempt: int = 0
    arrived: float = 0.0


class Cleared(NamedTuple):
    """After a stop of all tasks no process of the job is left on `host`, but for those in `left` (pid, command)."""

    host: str
    left: Tuple[Tuple[int, str], ...] = ()


class Warned(NamedTuple):
    """An agent, or the channel to it, has something to say to the user."""

    host: str
    """Empty: it is no host's."""
    text: str


class AgentEnding(NamedTuple):
    """An agent ends all its tasks without being told to by us."""

    host: str
    reason: str
    """Why, in words."""
    time: float = 0.0
    by_user: bool = False
    """`distrun kill` on that host asked it to."""
    arrived: float = 0.0


class Pong(NamedTuple):
    """An agent answered a ping, or gave another sign of life (then `n` is 0)."""

    host: str
    n: int = 0


class Measured(NamedTuple):
    """What an agent has measured of its host and tasks: its `metrics` frame."""

    host: str
    value: Mapping[str, Any] = {}
    arrived: float = 0.0


class MetricsWanted(NamedTuple):
    """Whether clients want snapshots of the job's numbers from now on; each time it is said, one at once."""

    is_wanted: bool
    look: Tuple[str, ...] = ()
    """The hosts that they look at."""


class MetricsAsked(NamedTuple):
    """Somebody wants one snapshot. The supervisor has no part in it, nor in the one before."""

    give: Callable[[Mapping[str, Any]], None]
    """Takes it, in the loop's thread; must not wait."""


class Bye(NamedTuple):
    """An agent has ended whatever was left and goes."""

    host: str


class Holding(NamedTuple):
    """An agent that goes on without a connection waits for another one at this path on its host. For its channel."""

    host: str
    path: str


class Cut(NamedTuple):
    """The connection to an agent ended. The agent goes on until its lease ends; a new connection is being made."""

    host: str
    reason: str
    time: float = 0.0


class Resumed(NamedTuple):
    """A new connection to an agent goes on where the last one was cut."""

    host: str


class AgentLost(NamedTuple):
    """The channel to an agent ended for good, or brought bytes that are no frames."""

    host: str
    reason: str
    time: float = 0.0


class PlaceClaimedTwice(NamedTuple):
    """A second agent, which knows the job's enrolment secret, claims the place of an agent that is there."""

    host: str
    """The place."""
    first: str
    """From where the agent dialled that has it."""
    second: str
    time: float = 0.0


class EngineTold(NamedTuple):
    """How a job stands in the engine that is to find room for it, or that it does not say."""

    standing: Any
    """A `Standing`; None: it does not say."""
    error: str = ""
    fix: str = ""
    is_final: bool = False
    """The job was not taken; else it may answer the next time."""


class EngineLetGo(NamedTuple):
    """An engine was asked to end a job that has no plan yet, and has ended it or not."""

    problem: str = ""
    """Why it may still have it; empty: it has ended."""


class Tick(NamedTuple):
    """Nothing happened; time passed. `time` is our wall clock."""

    time: float = 0.0


class Interrupt(NamedTuple):
    """The launcher was sent a signal: "INT", "TERM" or "HUP"."""

    signal: str
    time: float = 0.0


class TasksSignal(NamedTuple):
    """The launcher, this process or an agent got a signal for tasks (`process.TASKS_SIGNALS`), as "USR1"."""

    signal: str
    host: str = ""
    """Whose agent got it and gave it to its tasks; empty: it was no agent."""


class DiskFilled(NamedTuple):
    """The output of a task has filled the disk of the job's logs. The coordinator noticed, not the host."""

    host: str
    task: str
    text: str
    time: float


class Shown(NamedTuple):
    """The reader of output has taken `size` bytes that were handed to it (`actions.Show`)."""

    size: int


@dataclass(frozen=True)
class PauseToggled:
    """Ctrl-Z: printing pauses or goes on. The supervisor has no part in it."""


Event = Union[
    AgentHello,
    AgentReady,
    Settled,
    Needed,
    Answered,
    StackWanted,
    StackFound,
    FolderFound,
    Copying,
    Copied,
    CopyFailed,
    AllPrepared,
    PrepareFailed,
    StartFailed,
    Started,
    Published,
    Output,
    Exited,
    Cleared,
    Warned,
    AgentEnding,
    Pong,
    Measured,
    MetricsWanted,
    MetricsAsked,
    Bye,
    Holding,
    Cut,
    Resumed,
    AgentLost,
    PlaceClaimedTwice,
    EngineTold,
    EngineLetGo,
    Tick,
    Interrupt,
    TasksSignal,
    DiskFilled,
    Shown,
    PauseToggled,
]
