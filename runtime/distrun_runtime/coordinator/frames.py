"""Frames of agents to events, and actions to frames. No side effects."""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, NamedTuple, Sequence

from distrun_runtime.contract import plan as plans
from distrun_runtime.contract import wire
from distrun_runtime.contract.plan import Plan, Secrets
from distrun_runtime.contract.session import Source
from distrun_runtime.coordinator import events
from distrun_runtime.coordinator.actions import Ack, AskAgent, AskStack, EndAgent, Settle, SignalTasks, Spawn, StopTasks
from distrun_runtime.errors import ContractError


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


def to_event(host: str, frame: wire.Frame, arrived: float) -> events.Event:
    """Return the event that a frame of the agent of `host` means; `arrived` is our wall clock.

    A frame of an unknown type becomes a warning: a newer agent may say more than we understand.

    Raises:
        ContractError: a member is missing or of another type.
    """
    make = _EVENTS.get(frame.type)
    if make is None:
        return events.Warned(host, f"it sent {frame.type!r}, which this version does not know")
    try:
        return make(host, frame.header, frame.body, arrived)
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        raise ContractError(f"it sent a malformed {frame.type!r}: {type(err).__name__}: {err}") from err


def _optional(header: Mapping[str, Any], name: str, kind: Callable[[Any], Any]) -> Any:
    value = header.get(name)
    return None if value is None else kind(value)


def _output(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> events.Event:
    stream, offset = header["stream"], int(header["offset"])
    if stream not in ("out", "err") or offset < 0:
        raise ValueError(f"stream {stream!r}, offset {offset}")
    return events.Output(host, str(header["task"]), stream, offset, body, int(header.get("attempt", 0)))


def _exited(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> events.Event:
    return events.Exited(
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


def _started(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> events.Event:
    time = float(header.get("time", arrived))
    pid, start, attempt = int(header["pid"]), str(header.get("start", "")), int(header.get("attempt", 0))
    return events.Started(host, str(header["task"]), pid, start, time, attempt, arrived)


def _published(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> events.Event:
    time, stopped = float(header.get("time", arrived)), bool(header.get("stopped", False))
    return events.Published(host, str(header["task"]), dict(header["values"]), time, stopped, arrived)


def _ready(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> events.Event:
    ports = {str(name): int(port) for name, port in header.get("ports", {}).items()}
    python = {str(name): str(text) for name, text in header.get("python", {}).items()}
    return events.AgentReady(host, str(header["address"]), ports, python, dict(header.get("gpus") or {}))


def _ending(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> events.Event:
    time, by_user = float(header.get("time", arrived)), bool(header.get("by_user", False))
    return events.AgentEnding(host, str(header["reason"]), time, by_user, arrived)


def _settled(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> events.Event:
    return events.Settled(host, {str(name): str(text) for name, text in header.get("python", {}).items()})


def _refused(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> events.Event:
    kind, fix = str(header.get("kind") or ""), str(header.get("fix") or "")
    return events.StartFailed(host, str(header["reason"]), arrived, True, kind, fix)


def _answer(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> events.Event:
    return events.Answered(host, int(header["id"]), header.get("value"), str(header.get("error") or ""))


def _stack(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> events.Event:
    text, how, error, fix = (str(header.get(name) or "") for name in ("text", "how", "error", "fix"))
    return events.StackFound(host, int(header["id"]), text, how, error, fix)


def _folder(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> events.Event:
    return events.FolderFound(host, str(header["state"]), tuple(str(note) for note in header.get("notes", ())))


def _copied(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> events.Event:
    return events.Copied(host, int(header["files"]), int(header["bytes"]))


def _copy_failed(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> events.Event:
    kind, fix = str(header.get("kind") or ""), str(header.get("fix") or "")
    return events.CopyFailed(host, str(header["reason"]), kind, fix)


def _metrics(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> events.Event:
    # Whatever is wrong with its numbers is no reason to give up an agent.
    return events.Measured(host, {name: value for name, value in header.items() if name != "type"}, arrived)


def _cleared(host: str, header: Mapping[str, Any], body: bytes, arrived: float) -> events.Event:
    left = tuple((int(each["pid"]), str(each.get("command", ""))) for each in header.get("left", ()))
    return events.Cleared(host, left)


_EVENTS: Dict[str, Callable[[str, Mapping[str, Any], bytes, float], events.Event]] = {
    "hello": lambda host, header, body, arrived: events.AgentHello(host, dict(header), arrived),
    "ready": _ready,
    "settled": _settled,
    "started": _started,
    "published": _published,
    "output": _output,
    "exited": _exited,
    "cleared": _cleared,
    "warning": lambda host, header, body, arrived: events.Warned(host, str(header["text"])),
    "ending": _ending,
    "signalled": lambda host, header, body, arrived: events.TasksSignal(str(header["signal"]), host),
    "pong": lambda host, header, body, arrived: events.Pong(host, int(header.get("n", 0))),
    "metrics": _metrics,
    "refused": _refused,
    "holding": lambda host, header, body, arrived: events.Holding(host, str(header["path"])),
    "need": lambda host, header, body, arrived: events.Needed(host, str(header["digest"])),
    "answer": _answer,
    "stack": _stack,
    "folder": _folder,
    "copying": lambda host, header, body, arrived: events.Copying(host, int(header["files"])),
    "copied": _copied,
    "copy_failed": _copy_failed,
    "bye": lambda host, header, body, arrived: events.Bye(host),
}


def begin(plan: Plan, secrets: Secrets, place: str) -> wire.Frame:
    """Return the frame that gives the agent of `place` its share: its own tasks, and only their secrets."""
    share = plan.share(place)
    names = {name for task in share.tasks for name in task.secret_env}
    return wire.Frame(
        {
            "type": "begin",
            "version": wire.VERSION,
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


def copy(run: str, rules: Sequence[KeepRule]) -> wire.Frame:
    """Return the frame that announces the job's files. `run`: the copy's name, new for each. `rules`: what is kept."""
    return wire.Frame({"type": "copy", "run": run, "rules": [list(rule) for rule in rules]})


def files(run: str, archive: Source) -> Large:
    """Return the message that carries the job's files: a tar archive."""
    return Large({"type": "files", "run": run}, archive)


def ask(action: AskAgent) -> wire.Frame:
    """Return the frame that has an agent's tool answer. Only before `begin`."""
    return wire.Frame({"type": "ask", "id": action.id, "what": action.what, "args": dict(action.args)})


def stack(action: AskStack) -> wire.Frame:
    """Return the frame that has an agent say where a task stands."""
    return wire.Frame({"type": "stack", "id": action.id, "task": action.task})


def settle(action: Settle) -> wire.Frame:
    """Return the frame that has an agent activate and look at what was copied."""
    return wire.Frame({"type": "settle"})


def spawn(action: Spawn) -> wire.Frame:
    """Return the frame that starts a task."""
    return wire.Frame({"type": "spawn", "task": action.task, "attempt": action.attempt, "env": dict(action.env)})


def stop(action: StopTasks) -> wire.Frame:
    """Return the frame that stops tasks by a sequence of signals."""
    steps = [[name, wait_s] for name, wait_s in action.steps]
    return wire.Frame({"type": "stop", "tasks": list(action.tasks), "steps": steps})


def signal(action: SignalTasks) -> wire.Frame:
    """Return the frame that gives tasks a signal."""
    return wire.Frame({"type": "signal", "tasks": list(action.tasks), "signal": action.signal})


def end(action: EndAgent) -> wire.Frame:
    """Return the frame that ends the agent."""
    return wire.Frame({"type": "end"})


def ack(action: Ack) -> wire.Frame:
    """Return the frame that says: everything before `offset` is safe here."""
    return wire.Frame({"type": "ack", "task": action.task, "stream": action.stream, "offset": action.offset})


def ping(n: int) -> wire.Frame:
    """Return the frame that renews an agent's lease."""
    return wire.Frame({"type": "ping", "n": n})


def sample(interval_s: float) -> wire.Frame:
    """Return the frame that has an agent send `metrics` each `interval_s` seconds; 0: no more."""
    return wire.Frame({"type": "sample", "interval_s": interval_s})
