"""Frames between a job's coordinator and its clients: terminals, `distrun kill`, a dashboard.

A client opens the job's control socket (`control.json` in the job's folder has its path) and sends `hello`; the
coordinator answers with its own. Frames are those of `contract.session`. docs/protocol.md, "Clients and coordinator",
lists them all; its golden bytes are tests.

`hello`, `state`, `stop` and `kill` (FIXED) never change, so that any distrun can ask and end any job. All other frames
need the same major version.

The client that launched the job is connected by a socket pair. It sends no `hello`, and only it may send `signal` and
`answer`.

No side effects: `Conversation.take` checks what a client sent and returns what it asks for.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple, Type

from distrun_runtime.contract import facts, process, session
from distrun_runtime.contract.dataclass import dataclass, declared_in, read
from distrun_runtime.errors import RuntimeFault

VERSION = (1, 0)
"""Major and minor version of the control protocol."""
FIXED = ("hello", "state", "stop", "kill")
"""Types of frames that no version changes."""
SIGNALS = ("INT", "TERM", "HUP", "PIPE", *process.TASKS_SIGNALS)
"""What the launching client may send as `signal`. PIPE: it did not receive it, but its stdout is closed."""
STOPS = ("TERM", "INT")
"""What `stop` may name: how the job is stopped. The first is the default."""
UNTIL = ("", "now")
"""What a subscription may name as the end of its output. The first is the default."""
BY_LIMIT = 200
"""Characters of `by` in `stop` that are kept."""
FRAME_LIMIT = 64 * 1024
"""Bytes of one frame of a client."""
LOOK_LIMIT = 1000
"""Hosts that one client may look at."""
METRICS_SCHEMA = "distrun.metrics/1"
"""What a `metrics` frame holds."""


class Refusal(RuntimeFault):
    """A client asked for what it cannot have; it is told so by `refused`. `is_last`: the connection ends after that."""

    def __init__(self, message: str, hint: str = "", is_last: bool = False) -> None:
        super().__init__(message)
        self.hint = hint
        self.is_last = is_last


# ---------------------------------------------------------------------- what a client asks for


class ClientRequest:
    """What a client asks for: each class is a type of frame."""


@dataclass(frozen=True)
class Hello(ClientRequest):
    """The client introduces itself."""

    version: Tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.version) < 2 or min(self.version) < 0:
            raise ValueError(f"version: expected [major, minor], found {list(self.version)!r:.40}")


@dataclass(frozen=True)
class State(ClientRequest):
    """The job's state is wanted: what state.json holds."""


@dataclass(frozen=True)
class Stop(ClientRequest):
    """The job is to be stopped, as if the coordinator had received `signal` ("TERM" or "INT")."""

    signal: str = STOPS[0]
    by: str = ""
    """Who stops it, and with what, for the message at its end; empty: `distrun kill`."""

    def __post_init__(self) -> None:
        _check_one_of("signal", self.signal, STOPS)
        object.__setattr__(self, "by", "".join(each for each in self.by[:BY_LIMIT] if each.isprintable()))


@dataclass(frozen=True)
class Kill(ClientRequest):
    """All tasks are to be killed at once."""


@dataclass(frozen=True)
class Detach(ClientRequest):
    """The job is to go on without the client that launched it."""


@dataclass(frozen=True)
class OutputWanted:
    """Output is wanted."""

    cursor: Optional[int] = None
    """From this place of the log's index on, 0 for all of it; None: from now on."""
    tail: Optional[int] = None
    """In place of a cursor: from about so many lines before the end."""
    since: Optional[float] = None
    """In place of a cursor: from what came then on, seconds since 1970; with `tail` no more than both."""
    tasks: Optional[Tuple[str, ...]] = None
    """Only theirs."""
    until: str = UNTIL[0]
    """"now": no further than what there is when this is asked; `output_end` follows that. Empty: to the job's end."""

    def __post_init__(self) -> None:
        _check_one_of("until", self.until, UNTIL)
        for name in ("cursor", "tail", "since"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name}: expected a number from 0 or null, found {value}")


@dataclass(frozen=True)
class Subscribe(ClientRequest):
    """What the client wants to hear from now on. It replaces what was subscribed before."""

    events: bool = False
    metrics: bool = False
    """Snapshots of the job's numbers (`metrics`), the newest only."""
    output: Optional[OutputWanted] = None
    look: Tuple[str, ...] = ()
    """Hosts that the user looks at: they are measured every second while this client wants metrics."""

    def __post_init__(self) -> None:
        if len(self.look) > LOOK_LIMIT:
            raise ValueError(f"look: expected a list of at most {LOOK_LIMIT} names, found {len(self.look)}")


@dataclass(frozen=True)
class Stack(ClientRequest):
    """The stacks of a task are wanted; of a role, or of all workers. There is a `stack` for each task."""

    task: str = ""
    """A name or a role; empty: all workers."""


@dataclass(frozen=True)
class Signal(ClientRequest):
    """The launching client has received a signal (SIGNALS)."""

    name: str

    def __post_init__(self) -> None:
        _check_one_of("name", self.name, SIGNALS)


@dataclass(frozen=True)
class PromptAnswer(ClientRequest):
    """The user has answered a prompt; not `given`: there is no terminal, or the time was up."""

    id: int
    given: bool = False
    body: bytes = b""

    @property
    def text(self) -> Optional[str]:
        """What the user typed, if anything."""
        return self.body.decode("utf-8", "replace") if self.given else None


REQUESTS: Mapping[str, Type[ClientRequest]] = {
    "hello": Hello,
    "state": State,
    "stop": Stop,
    "kill": Kill,
    "detach": Detach,
    "subscribe": Subscribe,
    "stack": Stack,
    "signal": Signal,
    "answer": PromptAnswer,
}
"""By type of frame."""
_LAUNCHERS = ("signal", "answer")


def _check_one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}, found {value!r:.40}")


class Conversation:
    """What one client may ask for, given what it said before.

    `is_launcher`: it is the client that launched the job. It need not say `hello`.
    """

    def __init__(self, is_launcher: bool = False) -> None:
        self.is_launcher = is_launcher
        self.has_greeted = is_launcher
        self.is_same_major = is_launcher

    def take(self, frame: session.Frame) -> ClientRequest:
        """Return what a frame asks for.

        Raises:
            Refusal: it is not allowed, of a kind that is not known, or malformed.
        """
        kind = frame.type
        if not self.has_greeted and kind != "hello":
            raise Refusal(f"the first frame must be hello, found {kind!r}", is_last=True)
        if not self.is_same_major and kind not in FIXED:
            raise Refusal(
                f"{kind} needs control protocol {VERSION[0]}.x, which this coordinator speaks",
                "use the distrun that launched the job",
            )
        if kind not in REQUESTS or (kind in _LAUNCHERS and not self.is_launcher):
            raise Refusal(f"a client may not send {kind!r}", is_last=self.is_launcher)
        try:
            request = read(REQUESTS[kind], frame.header, frame.body)
        except ValueError as err:
            raise Refusal(f"a malformed {kind!r} frame: {err}", is_last=True) from err
        if isinstance(request, Hello):
            self.has_greeted = True
            self.is_same_major = request.version[0] == VERSION[0]
        return request


# ---------------------------------------------------------------------- messages to a client

TO_CLIENT: Dict[str, Type[Any]] = {}
"""By type of frame. `docs/protocol.md` says what the members mean."""
_to_client = functools.partial(declared_in, TO_CLIENT)


@_to_client("hello")
class CoordinatorHello(NamedTuple):
    """The coordinator introduces itself."""

    job: str
    pid: int
    host: str
    version: Tuple[int, ...] = VERSION


@_to_client("state")
class JobState(NamedTuple):
    """What state.json holds."""

    state: Mapping[str, Any]
    missed: Optional[int] = None
    """So many events and messages were left out before it."""


@_to_client("event")
class JobEvent(NamedTuple):
    """What is a line of events.jsonl."""

    event: Mapping[str, Any]


@_to_client("metrics")
class JobNumbers(NamedTuple):
    """A snapshot of the job's numbers, of schema METRICS_SCHEMA."""

    metrics: Mapping[str, Any]


@_to_client("output")
class Chunk(NamedTuple):
    """A piece of a task's output."""

    task: str
    host: str
    stream: str
    at: Optional[int] = None
    """Where it begins in the task's log; None: it is not there (disk full)."""
    length: int = 0
    data: bytes = b""
    """Empty: the bytes are only in the log."""
    cursor: Optional[int] = None
    """Where a later subscription goes on after this piece."""
    time: Optional[float] = None
    """When it came; None: just now."""
    attempt: Optional[int] = None


@_to_client("gap")
class OutputGap(NamedTuple):
    """So many bytes of output are not in the logs any more."""

    length: int
    cursor: int


@_to_client("output_end")
class OutputEnd(NamedTuple):
    """All output that there was when it was asked for (`until`) has been sent, or the logs cannot be read (`said`)."""

    cursor: int
    """Where it ends: a later subscription goes on there."""


class CopyProgress(NamedTuple):
    """How far the copy of files to the hosts is. As text: `sync 1/2: 64%, 38 files, 14.4 MiB sent`."""

    ready: int
    """Hosts that have the files."""
    hosts: int
    detail: str = ""

    def __str__(self) -> str:
        return f"sync {self.ready}/{self.hosts}: {self.detail}"


@_to_client("said")
class Said(NamedTuple):
    """A message of distrun's own."""

    text: str
    level: str
    sync: Optional[CopyProgress] = None
    """It tells how far the copy is."""


@_to_client("prompt")
class Prompt(NamedTuple):
    """A question to the user at the launching client."""

    id: int
    text: str
    limit_s: float


@_to_client("withdrawn")
class PromptWithdrawn(NamedTuple):
    """That question needs no answer any more."""

    id: int


@_to_client("stop")
@_to_client("kill")
@_to_client("detach")
class Done(NamedTuple):
    """What the client asked for by a frame of this type was heard."""

    type: str
    released: Optional[bool] = None
    """`detach`: whether there was a launching client to let go."""


@_to_client("stack")
class TaskStack(NamedTuple):
    """Where a task stands, or why that cannot be said."""

    task: str
    left: int
    """So many answers to this question are still to come."""
    text: str = ""
    how: str = ""
    error: str = ""
    fix: str = ""


@_to_client("detached")
class LauncherReleased(NamedTuple):
    """The job goes on without the client that launched it."""

    cursor: int
    """Where its output ended."""


@_to_client("outcome")
class JobEnded(NamedTuple):
    """The job's outcome: what outcome.json holds (`JobFolder.outcome_json`)."""

    outcome: Mapping[str, Any]


@_to_client("failed")
class CoordinatorFailed(NamedTuple):
    """The error that leaves the job without an outcome."""

    kind: str
    message: str
    hint: str
    exit_code: int
    trace: str


@_to_client("refused")
class RequestRefused(NamedTuple):
    """Why a client does not get what it asked for."""

    message: str
    hint: str = ""


_TYPES = {message: kind for kind, message in TO_CLIENT.items()}


def encode(message: Any) -> bytes:
    """Return the frame of a message to a client. Members that are None are left out, bytes are its body."""
    header: Dict[str, Any] = {"type": _TYPES[type(message)]}
    for name, value in message._asdict().items():
        if value is not None and name != "data":
            header[name] = value._asdict() if isinstance(value, CopyProgress) else value
    return session.encode(header, getattr(message, "data", b""))


def client_hello() -> bytes:
    """Return a client's `hello`."""
    return session.encode({"type": "hello", "version": VERSION})


def failure(err: BaseException, exit_code: Optional[int] = None, hint: str = "") -> CoordinatorFailed:
    """Return what a client is told of an error that leaves a job without an outcome.

    Args:
        err: the error.
        exit_code: that of the launch; None: the error was not foreseen.
        hint: what to type next.
    """
    import traceback  # only here, and its import takes long

    message = str(err)
    if exit_code is None:
        exit_code, hint = facts.EXIT_INTERNAL, "please report it, with what -vv prints"
        message = f"internal error: {type(err).__name__}: {err}"
    trace = "".join(traceback.format_exception(type(err), err, err.__traceback__))
    return CoordinatorFailed(type(err).__name__, message, hint, exit_code, trace)
