"""Frames between a job's coordinator and its clients: terminals, `distrun kill`, a dashboard.

A client opens the job's control socket (`control.json` in the job's folder has its path) and sends `hello`; the
coordinator answers with its own. Frames are those of `contract.wire`. docs/protocol.md, "Clients and coordinator",
lists them all; its golden bytes are tests.

`hello`, `state`, `stop` and `kill` (FIXED) never change, so that any distrun can ask and end any job. All other frames
need the same major version.

The client that launched the job is connected by a socket pair. It sends no `hello`, and only it may send `signal` and
`answer`.

No side effects: `Conversation.take` checks what a client sent and returns what it asks for.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from distrun_runtime.contract import facts, process, session
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import RuntimeFault

VERSION = (1, 0)
"""Major and minor version of the control protocol."""
FIXED = ("hello", "state", "stop", "kill")
"""Types of frames that no version changes."""
SIGNALS = ("INT", "TERM", "HUP", "PIPE", *process.TASKS_SIGNALS)
"""What the launching client may send as `signal`. PIPE: it did not receive it, but nobody reads what it prints."""
STOPS = ("TERM", "INT")
"""What `stop` may name: how the job is stopped. The first is the default."""
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


@dataclass(frozen=True)
class Hello:
    """The client introduces itself."""

    version: Sequence[int]


@dataclass(frozen=True)
class State:
    """The job's state is wanted: what state.json holds."""


@dataclass(frozen=True)
class Stop:
    """The job is to be stopped, as if the coordinator had received `signal` ("TERM" or "INT")."""

    signal: str = STOPS[0]
    by: str = ""
    """Who stops it, and with what, for the message at its end; empty: `distrun kill`."""


@dataclass(frozen=True)
class Kill:
    """All tasks are to be killed at once."""


@dataclass(frozen=True)
class Detach:
    """The job is to go on without the client that launched it."""


@dataclass(frozen=True)
class OutputWanted:
    """Output is wanted."""

    cursor: Optional[int] = None
    """From this place of the log's index on, 0 for all of it; None: from now on."""
    tail: Optional[int] = None
    """In place of a cursor: from about so many lines before the end."""


@dataclass(frozen=True)
class Subscribe:
    """What the client wants to hear from now on. It replaces what was subscribed before."""

    events: bool = False
    metrics: bool = False
    """Snapshots of the job's numbers (`metrics`), the newest only."""
    output: Optional[OutputWanted] = None
    look: Tuple[str, ...] = ()
    """Hosts that the user looks at: they are measured every second while this client wants metrics."""


@dataclass(frozen=True)
class Stack:
    """The stacks of a task are wanted; of a role, or of all workers. There is a `stack` for each task."""

    task: str = ""
    """A name or a role; empty: all workers."""


@dataclass(frozen=True)
class Signal:
    """The launching client has received a signal (SIGNALS)."""

    name: str


@dataclass(frozen=True)
class PromptAnswer:
    """The user has answered a prompt; None: there is no terminal, or the time was up."""

    id: int
    text: Optional[str]


Request = Union[Hello, State, Stop, Kill, Detach, Subscribe, Stack, Signal, PromptAnswer]


class Conversation:
    """What one client may ask for, given what it said before.

    `is_launcher`: it is the client that launched the job. It need not say `hello`.
    """

    def __init__(self, is_launcher: bool = False) -> None:
        self.is_launcher = is_launcher
        self.has_greeted = is_launcher
        self.is_same_major = is_launcher

    def take(self, frame: session.Frame) -> Request:
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
        read = _READERS.get(kind)
        if read is None or (kind in _LAUNCHERS and not self.is_launcher):
            raise Refusal(f"a client may not send {kind!r}", is_last=self.is_launcher)
        try:
            request = read(frame)
        except (LookupError, TypeError, ValueError, AttributeError) as err:
            what = f"a malformed {kind!r} frame: {err if isinstance(err, ValueError) else repr(err)}"
            raise Refusal(what, is_last=True) from err
        if isinstance(request, Hello):
            self.has_greeted = True
            self.is_same_major = request.version[0] == VERSION[0]
        return request


def _hello(frame: session.Frame) -> Hello:
    version = frame.header["version"]
    if not isinstance(version, list) or len(version) < 2 or not all(_is_count(each) for each in version):
        raise ValueError(f"version: expected [major, minor], found {version!r:.40}")
    return Hello(tuple(version))


def _stop(frame: session.Frame) -> Stop:
    by = str(frame.header.get("by", ""))[:BY_LIMIT]
    return Stop(
        _one_of("signal", frame.header.get("signal", STOPS[0]), STOPS),
        "".join(each for each in by if each.isprintable()),
    )


def _subscribe(frame: session.Frame) -> Subscribe:
    header = frame.header
    wanted = header.get("output", False)
    if wanted is False or wanted is None:
        output = None
    else:
        output = OutputWanted(
            _count_or_none("cursor", wanted.get("cursor")), _count_or_none("tail", wanted.get("tail"))
        )
    look = _names("look", header.get("look"))
    return Subscribe(bool(header.get("events", False)), bool(header.get("metrics", False)), output, look)


def _signal(frame: session.Frame) -> Signal:
    return Signal(_one_of("name", frame.header["name"], SIGNALS))


def _answer(frame: session.Frame) -> PromptAnswer:
    text = frame.body.decode("utf-8", "replace") if frame.header.get("given") else None
    return PromptAnswer(int(frame.header["id"]), text)


_READERS: Mapping[str, Callable[[session.Frame], Request]] = {
    "hello": _hello,
    "state": lambda frame: State(),
    "stop": _stop,
    "kill": lambda frame: Kill(),
    "detach": lambda frame: Detach(),
    "subscribe": _subscribe,
    "stack": lambda frame: Stack(str(frame.header.get("task", ""))),
    "signal": _signal,
    "answer": _answer,
}
_LAUNCHERS = ("signal", "answer")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _count_or_none(name: str, value: object) -> Optional[int]:
    if value is None:
        return None
    if not isinstance(value, int) or not _is_count(value):
        raise ValueError(f"{name}: expected a number from 0 or null, found {value!r:.40}")
    return value


def _names(name: str, value: object) -> Tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > LOOK_LIMIT or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{name}: expected a list of at most {LOOK_LIMIT} names, found {value!r:.40}")
    return tuple(value)


def _one_of(name: str, value: object, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}, found {value!r:.40}")
    return str(value)


# ---------------------------------------------------------------------- frames to a client


class Chunk(NamedTuple):
    """A piece of a task's output on its way to a client."""

    task: str
    host: str
    stream: str
    at: Optional[int]
    """Where it begins in the task's log; None: it is not there (disk full)."""
    length: int
    data: bytes = b""
    """Empty: the bytes are only in the log."""
    cursor: Optional[int] = None
    """Where a later subscription goes on after this piece."""


def hello(job: str, pid: int, host: str) -> bytes:
    """Return the coordinator's `hello`."""
    return session.encode({"type": "hello", "version": list(VERSION), "job": job, "pid": pid, "host": host})


def client_hello() -> bytes:
    """Return a client's `hello`."""
    return session.encode({"type": "hello", "version": list(VERSION)})


def state(value: Mapping[str, Any], missed: int = 0) -> bytes:
    """Return the job's state. `missed`: so many events and messages were left out before it."""
    header = {"type": "state", "state": dict(value)}
    return session.encode(dict(header, missed=missed) if missed else header)


def event(value: Mapping[str, Any]) -> bytes:
    """Return what is a line of events.jsonl."""
    return session.encode({"type": "event", "event": dict(value)})


def metrics(snapshot: Mapping[str, Any]) -> bytes:
    """Return a snapshot of the job's numbers, of schema METRICS_SCHEMA."""
    return session.encode({"type": "metrics", "metrics": dict(snapshot)})


def output(chunk: Chunk) -> bytes:
    """Return a piece of a task's output."""
    header: Dict[str, Any] = {"type": "output", "task": chunk.task, "host": chunk.host, "stream": chunk.stream}
    header.update(at=chunk.at, length=chunk.length)
    if chunk.cursor is not None:
        header["cursor"] = chunk.cursor
    return session.encode(header, chunk.data)


def gap(length: int, cursor: int) -> bytes:
    """Return that `length` bytes of output are not in the logs any more."""
    return session.encode({"type": "gap", "length": length, "cursor": cursor})


def said(text: str, level: str, phase: str = "") -> bytes:
    """Return a message of distrun's own. `phase`: it tells how far that phase of the start is ("sync")."""
    header = {"type": "said", "text": text, "level": level}
    return session.encode(dict(header, phase=phase) if phase else header)


def prompt(number: int, text: str, limit_s: float) -> bytes:
    """Return a question to the user."""
    return session.encode({"type": "prompt", "id": number, "text": text, "limit_s": limit_s})


def withdrawn(number: int) -> bytes:
    """Return that a question needs no answer any more."""
    return session.encode({"type": "withdrawn", "id": number})


def done(kind: str, **members: Any) -> bytes:
    """Return the answer to `stop`, `kill` or `detach`: a frame of the same type."""
    return session.encode({"type": kind, **members})


def stack(members: Mapping[str, Any]) -> bytes:
    """Return where a task stands: task, text, how, error, fix; and how many answers are still to come: left."""
    return session.encode({"type": "stack", **members})


def detached(cursor: Optional[int]) -> bytes:
    """Return, to the client that launched the job, that it goes on without it. `cursor`: where its output ended."""
    return session.encode({"type": "detached", "cursor": cursor})


def outcome(value: Mapping[str, Any]) -> bytes:
    """Return the job's outcome (`coordinator.outcome.Outcome` as JSON-able values)."""
    return session.encode({"type": "outcome", "outcome": dict(value)})


def failure(err: BaseException, exit_code: Optional[int] = None, hint: str = "") -> Dict[str, Any]:
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
    return {"kind": type(err).__name__, "message": message, "hint": hint, "exit_code": exit_code, "trace": trace}


def failed(error: Mapping[str, Any]) -> bytes:
    """Return why there is no outcome, as `failure` says it."""
    return session.encode({"type": "failed", **error})


def refused(refusal: Refusal) -> bytes:
    """Return why a client does not get what it asked for."""
    return session.encode({"type": "refused", "message": str(refusal), "hint": refusal.hint})
