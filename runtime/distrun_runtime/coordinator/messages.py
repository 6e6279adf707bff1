"""The messages of the coordinator, each declared once: events and actions. Agents send `contract.agent_messages`.

An event is what reaches a decision class (a job's `Supervisor`, questions to hosts), an action what it returns.

Times called `time` are wall-clock seconds since the epoch: of the agent's clock where an agent stamped them, of
ours elsewhere. The `now` of decision classes is another clock (monotonic) and is passed beside the event.

Events are named tuples, as in `contract/plan.py`: frozen dataclasses would take a tenth of a small job's start.

An action that is a frame to an agent has its TYPE. `docs/protocol.md` says what the members mean.
"""

from __future__ import annotations

from dataclasses import field
from typing import (
    Any,
    Callable,
    ClassVar,
    Dict,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

from distrun_runtime.contract import plan as plans
from distrun_runtime.contract import session
from distrun_runtime.contract.agent_messages import FROM_AGENT, Output, Warned
from distrun_runtime.contract.dataclass import dataclass, read
from distrun_runtime.contract.plan import Plan, Secrets
from distrun_runtime.contract.session import Source
from distrun_runtime.coordinator.failures import Outcome
from distrun_runtime.errors import ContractError

Event = NamedTuple
"""What reaches a decision class: one of the named tuples below, or of those that agents send."""


class StackWanted(NamedTuple):
    """A client wants the stacks of a task, of a role, or of all workers (empty). The supervisor has no part in it."""

    number: int
    """What the answers are for."""
    task: str = ""


class AllPrepared(NamedTuple):
    """What `Prepare` began is done on all hosts."""

    time: float = 0.0


class PrepareFailed(NamedTuple):
    """What `Prepare` began failed, on `host` first (empty: on none in particular)."""

    host: str
    reason: str
    """One line."""
    time: float = 0.0
    text: str = ""
    """More lines of it: the last output of the task that failed."""


class MetricsWanted(NamedTuple):
    """Whether clients want snapshots of the job's numbers from now on; each time it is said, one at once."""

    is_wanted: bool
    look: Tuple[str, ...] = ()
    """The hosts that they look at."""


class MetricsAsked(NamedTuple):
    """A client wants one snapshot. The supervisor ignores this event and the one before."""

    give: Callable[[Mapping[str, Any]], None]
    """Takes it, in the loop's thread; must not wait."""


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
    """The state of a job in the engine that places it, or that the engine does not say."""

    standing: Any
    """A `QueueStatus`; None: it does not say."""
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
    """The launcher was sent a signal: "INT", "TERM", "HUP" or "PIPE"; empty: it has ended without telling of one."""

    signal: str
    time: float = 0.0


class DiskFilled(NamedTuple):
    """The output of a task has filled the disk of the job's logs. The coordinator noticed, not the host."""

    host: str
    task: str
    text: str
    time: float


class Shown(NamedTuple):
    """The reader of output has taken `size` bytes that were handed to it (`Show`)."""

    size: int


# Actions that decision classes (a job's `Supervisor`, questions to hosts) return. One frozen value each.
#
# The loop performs those of `AgentAction`, which concern one agent each; the others are performed by who runs the loop.


DEBUG = "debug"
INFO = "info"
WARNING = "warning"

SAMPLE_S = 1.0
"""How often the agents of a small job measure, and those of hosts at which a client looks, in seconds."""
Steps = Tuple[Tuple[str, float], ...]
"""The stop sequence of tasks: pairs of a signal's name and the seconds until the next one; the last is ("KILL", 0)."""


@dataclass(frozen=True)
class AgentAction:
    """What the loop does for the agent of `host`. If it has a TYPE it is a `frame`, with the other members."""

    host: str
    TYPE: ClassVar[str] = ""

    def __init_subclass__(cls, frame: str = "") -> None:
        cls.TYPE = frame


@dataclass(frozen=True)
class Begin(AgentAction):
    """Send the agent of `host` its share of the plan."""


@dataclass(frozen=True)
class SendRuntime(AgentAction):
    """Send the agent of `host` the archive of the runtime."""


@dataclass(frozen=True)
class Prepare:
    """Begin what must be done between readiness and the first task: `prepare` of the loop's caller."""


@dataclass(frozen=True)
class Settle(AgentAction, frame="settle"):
    """Have the agent of `host` activate and look at what `Prepare` brought."""


@dataclass(frozen=True)
class Spawn(AgentAction, frame="spawn"):
    """Have `task` started, with the environment that is added to it (references filled in)."""

    task: str
    env: Mapping[str, str] = field(default_factory=dict)
    attempt: int = 0
    """How often it was started before."""


@dataclass(frozen=True)
class StopTasks(AgentAction, frame="stop"):
    """Have tasks, and whatever they started, ended by the signals of `steps`."""

    tasks: Tuple[str, ...]
    steps: Steps


@dataclass(frozen=True)
class SignalTasks(AgentAction, frame="signal"):
    """Give a signal to the first processes of tasks. Whatever comes of it is their own doing."""

    tasks: Tuple[str, ...]
    signal: str


@dataclass(frozen=True)
class EndAgent(AgentAction, frame="end"):
    """Have the agent end whatever is left at once, and go."""


@dataclass(frozen=True)
class AskAgent(AgentAction, frame="ask"):
    """Have a tool of the agent answer. Only before `Begin`."""

    id: int
    """Comes back in `Answered`."""
    what: str
    """Name of the tool (`distrun_runtime.agent.query`)."""
    args: Mapping[str, Any]


@dataclass(frozen=True)
class AskStack(AgentAction, frame="stack"):
    """Have the agent say where a task stands."""

    id: int
    """Comes back in `StackFound`."""
    task: str


@dataclass(frozen=True)
class Ping(AgentAction, frame="ping"):
    """Renew the agent's lease, and have it answer."""

    n: int


@dataclass(frozen=True)
class Ack(AgentAction, frame="ack"):
    """Tell the agent that everything before `offset` of a task's stream has been taken: it may send more."""

    task: str
    stream: str
    offset: int


@dataclass(frozen=True)
class Sample(AgentAction, frame="sample"):
    """Have an agent measure its host and tasks every `interval_s` seconds from now on; 0: no more."""

    interval_s: float


@dataclass(frozen=True)
class Close(AgentAction):
    """Let the agent see the end of its input after what was sent: it ends its tasks gently and goes."""


@dataclass(frozen=True)
class Drop(AgentAction):
    """Cut the channel: the agent is not worth waiting for (it will end its tasks when it sees the end of input)."""


class Show(NamedTuple):
    """Hand output of a task to its reader, who says so by `Shown`."""

    host: str
    stream: str
    data: bytes


class Announce(NamedTuple):
    """Tell the user. `level` is debug, info or warning."""

    text: str
    level: str = INFO
    tasks: Tuple[str, ...] = ()
    """Those that it is about."""
    stalled: bool = False
    """It says that they are stalled."""
    repeats: str = ""
    """The task or host whose failure it tells; the event of that failure, if there was one, tells the same."""


class RecordEvent(NamedTuple):
    """Note in events.jsonl what has happened."""

    kind: str
    members: Mapping[str, Any]


class ShowMetrics(NamedTuple):
    """Give a snapshot of the job's numbers to all clients that want them, or to who asked for it (`MetricsAsked`)."""

    snapshot: Mapping[str, Any]
    give: Optional[Callable[[Mapping[str, Any]], None]] = None


class KeepMetrics(NamedTuple):
    """Append a sample to metrics.jsonl."""

    line: str
    """One JSON object, without its newline."""


class KeepReports(NamedTuple):
    """Replace reports.json."""

    reports: Mapping[str, Any]
    """As a snapshot has them."""


class FinishJob(NamedTuple):
    """The job is over."""

    outcome: Outcome


Action = Union[AgentAction, Prepare, Announce, FinishJob]
"""What the supervisor returns."""

MetricsAction = Union[Announce, RecordEvent, Sample, ShowMetrics, KeepMetrics, KeepReports]
"""What `conditions.JobMeasurement` returns."""


# Frames of agents to events, and actions to frames. No side effects.


class KeepRule(NamedTuple):
    """Which files that only a host has are kept there (`keeps`) or not. The first rule that fits a path decides."""

    pattern: str
    """A regular expression for the whole path, which begins with `/`; bytes are read as Latin-1."""
    only_folders: bool
    keeps: bool


class Large(NamedTuple):
    """A message whose body goes in chunks."""

    header: Dict[str, Any]
    source: Source


def to_event(host: str, frame: session.Frame, arrived: float) -> Event:
    """Return the event that a frame of the agent of `host` means; `arrived` is our wall clock.

    A frame of an unknown type becomes a warning: a newer agent may say more than we understand.

    Raises:
        ContractError: a member is missing or of another type.
    """
    kind = FROM_AGENT.get(frame.type)
    if kind is None:
        return Warned(host, f"it sent {frame.type!r}, which this version does not know")
    stamped = {} if frame.header.get("time") else {"time": arrived}
    try:
        event: Event = read(kind, frame.header, frame.body, host=host, arrived=arrived, refused=True, by="", **stamped)
        if isinstance(event, Output) and (event.stream not in ("out", "err") or event.offset < 0):
            raise ValueError(f"expected out or err, and an offset from 0; found {event.stream!r}, {event.offset}")
    except ValueError as err:
        raise ContractError(f"it sent a malformed {frame.type!r}: {err}") from err
    return event


def begin(share: Plan, secrets: Secrets, place: str, sample_s: float = 0.0) -> session.Frame:
    """Return the frame that gives the agent of `place` its share (`plan.shares`), and only the secrets of its tasks.

    `sample_s`: how often it measures, in seconds; 0: not at all.
    """
    return session.Frame(
        {
            "type": "begin",
            "version": session.VERSION,
            "host": share.host_of(place).name,
            "place": place,
            "plan": plans.to_json(share),
            "token": secrets.token,
            "secret_env": {
                name: secrets.env[name] for task in share.tasks for name in task.secret_env if name in secrets.env
            },
            "sample_s": sample_s,
        }
    )


def runtime(digest: str, archive: Source) -> Large:
    """Return the message that carries the runtime: a zip."""
    return Large({"type": "runtime", "digest": digest}, archive)


def copy(run: str, rules: Sequence[KeepRule]) -> session.Frame:
    """Return the frame that announces the job's files. `run`: the copy's name, new for each. `rules`: what is kept."""
    return session.Frame({"type": "copy", "run": run, "rules": [list(rule) for rule in rules]})


def files(run: str, archive: Source) -> Large:
    """Return the message that carries the job's files: a tar archive."""
    return Large({"type": "files", "run": run}, archive)


def stream(taken: int = 0, job: str = "", data: bytes = b"") -> session.Frame:
    """Return the frame for a tool that answers with a stream.

    `taken`: so many more bytes of it were taken. `data`: for the control socket of `job`.
    """
    return session.Frame({"type": "stream", "taken": taken, "job": job}, data)


def to_frame(action: AgentAction) -> session.Frame:
    """Return the frame that an action is."""
    assert action.TYPE, f"{action!r} is no frame by itself: it needs an encoder of the loop's caller"
    return session.Frame({"type": action.TYPE, **{name: each for name, each in vars(action).items() if name != "host"}})
