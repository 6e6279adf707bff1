"""Events: everything that reaches a decision class (a job's `Supervisor`, questions to hosts). One frozen value each.

Times called `time` are wall-clock seconds since the epoch: of the agent's clock where an agent stamped them, of
ours elsewhere. The `now` of decision classes is another clock (monotonic) and is passed beside the event.

They are named tuples, as in `contract/plan.py`: frozen dataclasses would take a tenth of a small job's start. Those
without members are dataclasses: an empty tuple is false, and equal to any other.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from distrun_runtime.contract import plan as plans
from distrun_runtime.contract import session
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.contract.plan import Plan, Secrets
from distrun_runtime.contract.session import Source
from distrun_runtime.coordinator.failures import Outcome
from distrun_runtime.errors import ContractError


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


# Actions that decision classes (a job's `Supervisor`, questions to hosts) return. One frozen value each.
#
# The loop performs those of `AgentAction`, which concern one agent each; the others are performed by who runs the loop.


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
class RecordEvent:
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

MetricsAction = Union[Sample, Announce, RecordEvent, ShowMetrics, GiveMetrics, KeepMetrics]
"""What `measuring.Measuring` returns."""


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
    make = _EVENTS.get(frame.type)
    if make is None:
        return Warned(host, f"it sent {frame.type!r}, which this version does not know")
    try:
        return make(host, frame.header, frame.body, arrived)
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        raise ContractError(f"it sent a malformed {frame.type!r}: {type(err).__name__}: {err}") from err


def _optional(header: Mapping[str, Any], name: str, kind: Callable[[Any], Any]) -> Any:
    value = header.get(name)
    return None if value is None else kind(value)


def _output(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> Event:
    stream, offset = header["stream"], int(header["offset"])
    if stream not in ("out", "err") or offset < 0:
        raise ValueError(f"stream {stream!r}, offset {offset}")
    return Output(host, str(header["task"]), stream, offset, body, int(header.get("attempt", 0)))


def _exited(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> Event:
    return Exited(
        host,
        str(header["task"]),
        code=_optional(header, "code", int),
        signal=_optional(header, "signal", str),
        time=float(header.get("time", arrived)),
        stopped=bool(header.get("stopped", False)),
        reason=str(header.get("reason") or ""),
        out=int(header.get("out", 0)),
        err=int(header.get("err", 0)),
        max_rss_kb=int(header.get("max_rss_kb") or 0),
        cpu_s=float(header.get("cpu_s") or 0.0),
        attempt=int(header.get("attempt", 0)),
        arrived=arrived,
    )


def _started(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> Event:
    time = float(header.get("time", arrived))
    pid, start, attempt = int(header["pid"]), str(header.get("start", "")), int(header.get("attempt", 0))
    return Started(host, str(header["task"]), pid, start, time, attempt, arrived)


def _published(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> Event:
    time, stopped = float(header.get("time", arrived)), bool(header.get("stopped", False))
    return Published(host, str(header["task"]), dict(header["values"]), time, stopped, arrived)


def _ready(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> Event:
    ports = {str(name): int(port) for name, port in header.get("ports", {}).items()}
    python = {str(name): str(text) for name, text in header.get("python", {}).items()}
    return AgentReady(host, str(header["address"]), ports, python, dict(header.get("gpus") or {}))


def _ending(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> Event:
    time, by_user = float(header.get("time", arrived)), bool(header.get("by_user", False))
    return AgentEnding(host, str(header["reason"]), time, by_user, arrived)


def _settled(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> Event:
    return Settled(host, {str(name): str(text) for name, text in header.get("python", {}).items()})


def _refused(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> Event:
    kind, fix = str(header.get("kind") or ""), str(header.get("fix") or "")
    return StartFailed(host, str(header["reason"]), arrived, True, kind, fix)


def _answer(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> Event:
    return Answered(host, int(header["id"]), header.get("value"), str(header.get("error") or ""))


def _stack(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> Event:
    text, how, error, fix = (str(header.get(name) or "") for name in ("text", "how", "error", "fix"))
    return StackFound(host, int(header["id"]), text, how, error, fix)


def _folder(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> Event:
    return FolderFound(host, str(header["state"]), tuple(str(note) for note in header.get("notes", ())))


def _copied(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> Event:
    return Copied(host, int(header["files"]), int(header["bytes"]))


def _copy_failed(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> Event:
    kind, fix = str(header.get("kind") or ""), str(header.get("fix") or "")
    return CopyFailed(host, str(header["reason"]), kind, fix)


def _metrics(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> Event:
    # Whatever is wrong with its numbers is no reason to give up an agent.
    return Measured(host, {name: value for name, value in header.items() if name != "type"}, arrived)


def _cleared(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> Event:
    left = tuple((int(each["pid"]), str(each.get("command", ""))) for each in header.get("left", ()))
    return Cleared(host, left)


_EVENTS: Dict[str, Callable[[str, Mapping[str, Any], bytes, float], Event]] = {
    "hello": lambda host, header, body, arrived: AgentHello(host, dict(header), arrived),
    "ready": _ready,
    "settled": _settled,
    "started": _started,
    "published": _published,
    "output": _output,
    "exited": _exited,
    "cleared": _cleared,
    "warning": lambda host, header, body, arrived: Warned(host, str(header["text"])),
    "ending": _ending,
    "signalled": lambda host, header, body, arrived: TasksSignal(str(header["signal"]), host),
    "pong": lambda host, header, body, arrived: Pong(host, int(header.get("n", 0))),
    "metrics": _metrics,
    "refused": _refused,
    "holding": lambda host, header, body, arrived: Holding(host, str(header["path"])),
    "need": lambda host, header, body, arrived: Needed(host, str(header["digest"])),
    "answer": _answer,
    "stack": _stack,
    "folder": _folder,
    "copying": lambda host, header, body, arrived: Copying(host, int(header["files"])),
    "copied": _copied,
    "copy_failed": _copy_failed,
    "bye": lambda host, header, body, arrived: Bye(host),
}


def begin(plan: Plan, secrets: Secrets, place: str) -> session.Frame:
    """Return the frame that gives the agent of `place` its share: its own tasks, and only their secrets."""
    share = plan.share(place)
    names = {name for task in share.tasks for name in task.secret_env}
    return session.Frame(
        {
            "type": "begin",
            "version": session.VERSION,
            "host": plan.host_of(place).name,
            "place": place,
            "plan": plans.to_json(share),
            "token": secrets.token,
            "secret_env": {name: value for name, value in secrets.env.items() if name in names},
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


def ask(action: AskAgent) -> session.Frame:
    """Return the frame that has an agent's tool answer. Only before `begin`."""
    return session.Frame({"type": "ask", "id": action.id, "what": action.what, "args": dict(action.args)})


def stack(action: AskStack) -> session.Frame:
    """Return the frame that has an agent say where a task stands."""
    return session.Frame({"type": "stack", "id": action.id, "task": action.task})


def settle(action: Settle) -> session.Frame:
    """Return the frame that has an agent activate and look at what was copied."""
    return session.Frame({"type": "settle"})


def spawn(action: Spawn) -> session.Frame:
    """Return the frame that starts a task."""
    return session.Frame({"type": "spawn", "task": action.task, "attempt": action.attempt, "env": dict(action.env)})


def stop(action: StopTasks) -> session.Frame:
    """Return the frame that stops tasks by a sequence of signals."""
    steps = [[name, wait_s] for name, wait_s in action.steps]
    return session.Frame({"type": "stop", "tasks": list(action.tasks), "steps": steps})


def signal(action: SignalTasks) -> session.Frame:
    """Return the frame that gives tasks a signal."""
    return session.Frame({"type": "signal", "tasks": list(action.tasks), "signal": action.signal})


def end(action: EndAgent) -> session.Frame:
    """Return the frame that ends the agent."""
    return session.Frame({"type": "end"})


def ack(action: Ack) -> session.Frame:
    """Return the frame that says: everything before `offset` is safe here."""
    return session.Frame({"type": "ack", "task": action.task, "stream": action.stream, "offset": action.offset})


def ping(n: int) -> session.Frame:
    """Return the frame that renews an agent's lease."""
    return session.Frame({"type": "ping", "n": n})


def sample(interval_s: float) -> session.Frame:
    """Return the frame that has an agent send `metrics` each `interval_s` seconds; 0: no more."""
    return session.Frame({"type": "sample", "interval_s": interval_s})
