"""What agents tell the coordinator: each message declared once, for the agent that sends and for who reads it.

Each is a frame of the type that it is marked with, and an event of decision classes. The frame has its members but for
some that the reader adds: `host`; `arrived`, its wall clock when the message came; and `time`, where the agent did not
stamp it. `docs/protocol.md` says what the members mean. `Channel.say` of the agent sends one, `coordinator.messages`
reads it.

Times called `time` are wall-clock seconds since the epoch: of the agent's clock where an agent stamped them, of
ours elsewhere.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple, Type

from distrun_runtime.contract.dataclass import NO_MEMBERS, Members, declared_in

FROM_AGENT: Dict[str, Type[Any]] = {}
"""The messages by the types of their frames."""
_from_agent = functools.partial(declared_in, FROM_AGENT)


@_from_agent("hello")
class AgentHello(NamedTuple):
    """An agent answered. `facts` is its hello frame."""

    host: str
    facts: Members = NO_MEMBERS
    arrived: float = 0.0


@_from_agent("ready")
class AgentReady(NamedTuple):
    """An agent has its share of the plan, and has made and found everything on its host that the plan asks for."""

    host: str
    address: str
    ports: Mapping[str, int] = {}
    python: Mapping[str, str] = {}
    """For each argv[0] of tasks that need modules: `VERSION PATH` of the interpreter that it is there."""
    gpus: Mapping[str, Any] = {}
    """What its driver tells, and which of its GPUs tasks see (docs/protocol.md); empty: no task gets any."""


@_from_agent("settled")
class Settled(NamedTuple):
    """An agent has activated and found what came with the files."""

    host: str
    python: Mapping[str, str] = {}
    """As in `AgentReady`."""


@_from_agent("need")
class Needed(NamedTuple):
    """The agent of `host` wants the archive of the runtime."""

    host: str
    digest: str


@_from_agent("answer")
class Answered(NamedTuple):
    """An agent's tool gave `value`, or, where `error` is not empty, failed."""

    host: str
    id: int
    value: Any = None
    error: str = ""


@_from_agent("piece")
class AnswerPiece(NamedTuple):
    """A piece of the answer of a tool that answers with a stream: of a file, or of what a control socket sends.

    `Answered` is the end of the stream.
    """

    host: str
    id: int
    job: str
    name: str
    """The file, seen from the job's folder; `frames`: of the control socket; empty: that sends no more."""
    data: bytes = b""
    left: int = 0
    """Bytes of the file that are still to come."""
    age_s: float = 0.0
    """How long ago the file was written."""


@_from_agent("stack")
class StackFound(NamedTuple):
    """An agent has found where a task stands, or, where `error` is not empty, why that cannot be said."""

    host: str
    id: int
    text: str = ""
    how: str = ""
    error: str = ""
    fix: str = ""
    task: str = ""


@_from_agent("folder")
class FolderFound(NamedTuple):
    """An agent has looked at the folder for the job's files. This and the next three events are for the copier."""

    host: str
    state: str
    """`mine`: the files are wanted. `shared`: another agent wants them, into the very same folder. `source`: it is the
    folder that they come from."""
    notes: Tuple[str, ...] = ()
    """What the user should know."""


@_from_agent("copying")
class Copying(NamedTuple):
    """An agent has put `files` of the job's files into place so far."""

    host: str
    files: int


@_from_agent("copied")
class Copied(NamedTuple):
    """All files are in place: `files`, with so many bytes."""

    host: str
    files: int
    bytes: int


@_from_agent("copy_failed")
class CopyFailed(NamedTuple):
    """An agent cannot take the files. `reason`, `kind` and `fix` are as in `StartFailed`."""

    host: str
    reason: str
    kind: str = ""
    fix: str = ""


@_from_agent("refused")
class StartFailed(NamedTuple):
    """There will be no agent on `host`: it could not be reached, or refused us. `reason` says why."""

    host: str
    reason: str
    time: float = 0.0
    refused: bool = False
    """It answered, and cannot do what the plan asks for."""
    kind: str = ""
    """As `failures.Problem.kind`, when it is known what is wrong with the host; that is a failed preflight too."""
    fix: str = ""
    """What to type next."""

    @property
    def is_preflight(self) -> bool:
        """Whether the host is known to be unusable; else its agent simply did not come up."""
        return self.refused or bool(self.kind)


@_from_agent("started")
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
    """0: not known."""


@_from_agent("published")
class Published(NamedTuple):
    """A task told its agent facts, e.g. the scheduler its address and port, or a worker the peer that it lost."""

    host: str
    task: str
    values: Mapping[str, Any]
    time: float = 0.0
    stopped: bool = False
    """The agent had signalled it before it said so."""
    arrived: float = 0.0


@_from_agent("output")
class Output(NamedTuple):
    """Bytes that a task wrote. `offset` counts from the beginning of its stream ("out" or "err")."""

    host: str
    task: str
    stream: str
    offset: int
    data: bytes
    attempt: int = 0


@_from_agent("exited")
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


class LeftProcess(NamedTuple):
    """A process of the job that did not end."""

    pid: int
    command: str = ""


@_from_agent("cleared")
class Cleared(NamedTuple):
    """After a stop of all tasks no process of the job is left on `host`, but for those in `left`."""

    host: str
    left: Tuple[LeftProcess, ...] = ()


@_from_agent("warning")
class Warned(NamedTuple):
    """An agent, or the channel to it, has something to say to the user."""

    host: str
    """Empty: it is no host's."""
    text: str


@_from_agent("ending")
class AgentEnding(NamedTuple):
    """An agent ends all its tasks without being told to by us."""

    host: str
    reason: str
    """Why, in words."""
    time: float = 0.0
    by_user: bool = False
    """`distrun kill` on that host asked it to."""
    arrived: float = 0.0


@_from_agent("pong")
class Pong(NamedTuple):
    """An agent answered a ping, or gave another sign of life (then `n` is 0)."""

    host: str
    n: int = 0


@_from_agent("metrics")
class Measured(NamedTuple):
    """What an agent has measured of its host and tasks: its `metrics` frame. Wrong numbers in it are no error."""

    host: str
    value: Members = NO_MEMBERS
    arrived: float = 0.0


@_from_agent("bye")
class Bye(NamedTuple):
    """An agent has ended whatever was left and goes."""

    host: str


@_from_agent("holding")
class Holding(NamedTuple):
    """An agent that goes on without a connection waits for another one at this path on its host. For its channel."""

    host: str
    path: str


@_from_agent("signalled")
class TasksSignal(NamedTuple):
    """The launcher, this process or an agent got a signal for tasks (`process.TASKS_SIGNALS`), as "USR1"."""

    host: str
    """Whose agent got it and gave it to its tasks; empty: it was no agent."""
    signal: str
    by: str = ""
    """"client": the launching client got it; empty: an agent, or this process."""


TYPES: Mapping[object, str] = {message: kind for kind, message in FROM_AGENT.items()}
"""The types of frames by their messages."""
