"""Words for the events of a job (lines of events.jsonl), as the dashboard and `distrun status JOB` show them.

No side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from distrun import formats
from distrun.dashboard import read, text
from distrun_runtime.contract import facts
from distrun_runtime.contract.dataclass import dataclass

DONE = "exit code 0"


@dataclass(frozen=True)
class EventLine:
    """One line of the panel of events."""

    time: float
    """Wall clock, seconds."""
    words: str
    style: str = text.PLAIN
    is_message: bool = False
    """It is told nowhere else: a message, or what happened to a host."""
    stalled: str = ""
    """Of a message that tasks are stalled: the first of them."""


class EventReader:
    """Reads the events of one job in their order, so that each thing that happened is shown once."""

    def __init__(self) -> None:
        self._left: frozenset[str] = frozenset()
        """Hosts whose agents have said goodbye."""
        self._ended: frozenset[str] = frozenset()
        """Tasks and hosts that failed or were lost, or whose loss was told by others."""
        self._failures: list[str] = []
        """How messages that repeat a failure begin."""
        self._stalled: frozenset[str] = frozenset()

    def take(self, event: Mapping[str, object]) -> EventLine | None:
        """Return how the next event reads; None: it says nothing to a user, or nothing new."""
        kind, host, task = (read.text(event.get(name)) for name in ("event", "host", "task"))
        if kind == "bye":
            self._left |= {host}
        elif kind == "ready":
            self._left -= {host}
        is_repeated = self.is_end_of_connection(event) or self._is_repeated(kind, event)
        if kind == "exited" and not event.get("stopped") and _how(event) != DONE:
            self._ended |= {task}
            self._failures.append(f"{_where(event)}: {_how(event)}")
        elif kind == "lost":
            self._ended |= {host}
            self._failures.append(f"lost {host}")
        elif kind == "published":
            values = read.members(event.get("values"))
            self._ended |= {task if values.get("failed") else read.text(values.get("lost_peer"))} - {""}
        elif kind == "condition" and event.get("condition") == facts.STALLED:
            self._stalled |= {task}
        found = None if is_repeated else describe(event)
        if found is None or kind != "said":
            return found
        first = found.words.partition(" ")[0].rstrip(",")
        return replace(found, stalled=first) if first in self._stalled and "stalled" in found.words else found

    def is_end_of_connection(self, event: Mapping[str, object]) -> bool:
        """Return whether an event only is the end of a connection after a goodbye, as at a job's end."""
        return event.get("event") == "lost" and read.text(event.get("host")) in self._left

    def _is_repeated(self, kind: str, event: Mapping[str, object]) -> bool:
        if kind == "said":
            said = read.text(event.get("text"))
            return any(said.startswith((f"{words};", f"{words} (")) for words in self._failures)
        lost = read.text(read.members(event.get("values")).get("lost_peer"))
        return kind == "published" and (bool(event.get("stopped")) or lost in self._ended)


def describe(event: Mapping[str, object]) -> EventLine | None:
    """Return how an event reads; None: it says nothing to a user."""
    how = _READERS.get(read.text(event.get("event")))
    found = None if how is None else how(event)
    if found is None:
        return None
    words, style = found
    is_message = event.get("event") in _MESSAGES
    return EventLine(read.moment(event.get("time")) or 0.0, text.clean(" ".join(words.split())), style, is_message)


Described = tuple[str, str] | None


def _where(event: Mapping[str, object]) -> str:
    task, host = read.text(event.get("task")), read.text(event.get("host"))
    return f"{task} on {host}" if task and host else task or host


def _how(event: Mapping[str, object]) -> str:
    signal, code = read.text(event.get("signal")), read.whole(event.get("code"))
    return f"signal {signal}" if signal else f"exit code {code}" if code is not None else "ended"


def _exited(event: Mapping[str, object]) -> Described:
    how, reason = _how(event), read.text(event.get("reason"))
    more = f": {reason}" if reason else ""
    if event.get("stopped"):
        return f"{_where(event)}: stopped ({how}){more}", text.DIM
    return f"{_where(event)}: {how}{more}", text.GREEN if how == DONE else text.RED


def _published(event: Mapping[str, object]) -> Described:
    values = read.members(event.get("values"))
    message = read.text(values.get("message")) or read.text(values.get("failed"))
    return (f"{_where(event)}: {message}", text.RED) if message else None


def _said(event: Mapping[str, object]) -> Described:
    style = {"error": text.RED, "warning": text.YELLOW}.get(read.text(event.get("level")), text.PLAIN)
    return (read.text(event.get("text")), style) if event.get("level") != "debug" else None


def _finished(event: Mapping[str, object]) -> Described:
    code = read.whole(event.get("exit_code"))
    style = text.GREEN if code == 0 else text.RED
    return f"job over, exit code {code}: {read.text(event.get('message'))}", style


def _reasoned(what: str, style: str) -> Callable[[Mapping[str, object]], Described]:
    def describe_one(event: Mapping[str, object]) -> Described:
        reason = read.text(event.get("text")) or read.text(event.get("reason"))
        return f"{_where(event)}: {what}" + (f": {reason}" if reason else ""), style

    return describe_one


def _condition(event: Mapping[str, object]) -> Described:
    word = read.text(event.get("condition"))
    if word != "straggler":
        return None  # of a stall there is a message; that tasks wait, and wait no more, is how a store works
    why = read.text(event.get("why"))
    return f"{_where(event)}: {word}" + (f": {why}" if why else ""), text.YELLOW


def _started(event: Mapping[str, object]) -> Described:
    attempt = read.whole(event.get("attempt")) or 0
    what = f"started again ({attempt})" if attempt else "started"
    return f"{_where(event)}: {what}, pid {read.whole(event.get('pid'))}", text.PLAIN


_MESSAGES = ("said", "warning", "ending", "cut", "resumed", "lost", "claimed_twice", "prepare_failed")
_READERS: Mapping[str, Callable[[Mapping[str, object]], Described]] = {
    "ready": _reasoned("host is ready", text.PLAIN),
    "prepare_failed": _reasoned("cannot be used", text.RED),
    "start_failed": _reasoned("did not start", text.RED),
    "started": _started,
    "published": _published,
    "exited": _exited,
    "warning": _reasoned("warning", text.YELLOW),
    "ending": _reasoned("its agent ends", text.YELLOW),
    "cut": _reasoned("connection lost", text.YELLOW),
    "resumed": _reasoned("connection is back", text.GREEN),
    "lost": _reasoned("host lost", text.RED),
    "claimed_twice": _reasoned("two agents for one place", text.RED),
    "state": lambda event: (f"job is {read.text(event.get('state'))}", text.BOLD),
    "said": _said,
    "finished": _finished,
    "condition": _condition,
}


# Reads a job's progress from a snapshot of its metrics and words it for all displays. No side effects.


@dataclass(frozen=True)
class ProgressView:
    """How far a job is, by what its tasks reported. What is unknown is None or empty."""

    step: int | None = None
    total: int | None = None
    phase: int = 0
    fraction: float | None = None
    eta_s: float | None = None
    rate: float | None = None
    """Steps a second."""
    loss: float | None = None
    values: Mapping[str, float] | None = None
    """Other reported values, by name."""
    slowest: str = ""
    """The slowest rank; empty if all are in step."""
    is_stalled: bool = False
    """The slowest rank is stalled, so there is no ETA."""


def of(metrics: Mapping[str, object]) -> ProgressView | None:
    """Return the progress in a snapshot of metrics (`distrun.metrics/1`); None: no task has reported any."""
    told = read.members(metrics.get("progress"))
    if not told:
        return None
    tasks = {name: read.members(each) for name, each in read.members(metrics.get("tasks")).items()}
    steps = {name: read.number(read.members(each.get("report")).get("step")) for name, each in tasks.items()}
    slowest = read.text(told.get("slowest"))
    is_stalled = tasks.get(slowest, {}).get("condition") == facts.STALLED
    rate, eta_s = read.finite(told.get("rate")), read.finite(told.get("eta_s"))
    return ProgressView(
        step=read.whole(told.get("step")),
        total=read.whole(told.get("total")),
        phase=read.whole(told.get("phase")) or 0,
        fraction=read.finite(told.get("fraction")),
        eta_s=None if is_stalled or eta_s is None or not 0 <= eta_s < formats.LONG_S else eta_s,
        rate=rate if rate is not None and rate > 0 else None,
        loss=read.number(told.get("loss")),
        values={name: value for name, value in read.numbers(told.get("values")).items() if name != "loss"},
        slowest=slowest if slowest and (is_stalled or _is_behind(slowest, steps)) else "",
        is_stalled=is_stalled,
    )


def _is_behind(name: str, steps: Mapping[str, float | None]) -> bool:
    """Return whether a task is behind by more than the step in which all are: of ranks in step none is slow.

    `steps`: what tasks have reported. A task that has not is behind.
    """
    known = {task: step for task, step in steps.items() if step is not None}
    return name not in known or max(known.values()) - known[name] > 1


# ---------------------------------------------------------------------- words


def step(found: ProgressView) -> str:
    """Return the step: `step 1200/5000`, `phase 2: step 7`; empty if it is not known."""
    if found.step is None:
        return ""
    return (f"phase {found.phase + 1}: " if found.phase else "") + f"step {formats.steps(found.step, found.total)}"


def eta(found: ProgressView) -> str:
    """Return the time that is left, `ETA 0:12:05`, or why there is none; empty if it is not known."""
    if found.is_stalled:
        return f"no ETA: {found.slowest} is stalled"
    return "" if found.eta_s is None else f"ETA {formats.elapsed(found.eta_s)}"


def loss(found: ProgressView) -> str:
    """Return the loss: `loss 0.3712`; empty if it is not known."""
    return "" if found.loss is None else f"loss {formats.value(found.loss)}"


def slowest(found: ProgressView) -> str:
    """Return which rank is the slowest: `slowest worker-1`; empty if none is, or if `eta` says so."""
    return f"slowest {found.slowest}" if found.slowest and not found.is_stalled else ""


def line(found: ProgressView) -> Sequence[str]:
    """Return the parts of a line: `step 1200/5000 (24 %)`, `5.25 steps/s`, `ETA 0:12:05`, `loss 0.3712`."""
    share = "" if found.fraction is None else f" ({formats.percent(found.fraction)})"
    rate = "" if found.rate is None else f"{_rounded(found.rate)} steps/s"
    parts = (step(found) + share if step(found) else "", rate, eta(found), loss(found))
    return [part for part in parts if part]


def _rounded(rate: float) -> str:
    return f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}"


def details(found: ProgressView) -> Sequence[str]:
    """Return the parts of a line with other reported values and the slowest rank."""
    values = [f"{name} {formats.value(each)}" for name, each in (found.values or {}).items()]
    return [*line(found), *values, *([slowest(found)] if slowest(found) else [])]


def short(found: ProgressView) -> str:
    """Return the progress for a column: `24 %, ETA 0:12:05`; without a total `step 7`."""
    if found.fraction is None:
        return step(found)
    return formats.percent(found.fraction) + ("" if found.eta_s is None else f", {eta(found)}")
