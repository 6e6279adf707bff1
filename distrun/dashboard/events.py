"""Words for the events of a job (lines of events.jsonl), as the dashboard and `distrun status JOB` show them.

No side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace

from distrun import formats
from distrun.dashboard import source, text
from distrun_runtime.contract import facts
from distrun_runtime.contract.dataclass import dataclass

FOLD_S = 10.0
"""What is told of several tasks is one line if it is not longer apart than this."""


@dataclass(frozen=True)
class EventLine:
    """One line of the panel of events."""

    time: float
    """Wall clock, seconds."""
    words: str
    style: str = text.PLAIN
    is_message: bool = False
    """It is told nowhere else: a message, or what happened to a host."""
    tasks: tuple[str, ...] = ()
    """Those that it is about."""
    stalled: bool = False
    """It says that they are stalled."""
    host: str = ""
    what: str = ""
    """What happened to a task or a host; what is the same for others makes one line with it (`folded`)."""


class EventReader:
    """Reads the events of one job in their order, so that each thing that happened is shown once."""

    def __init__(self) -> None:
        self._left: frozenset[str] = frozenset()
        """Hosts whose agents have said goodbye."""
        self._ended: frozenset[str] = frozenset()
        """Tasks and hosts that failed or were lost, or whose loss was told by others."""
        self._bereft: dict[str, str] = {}
        """Tasks that have not failed themselves but lost another, and which."""

    def take(self, event: Mapping[str, object]) -> EventLine | None:
        """Return how the next event reads; None: it says nothing to a user, or nothing new."""
        kind, host, task = (source.string(event.get(name)) for name in ("event", "host", "task"))
        if kind == "bye":
            self._left |= {host}
        elif kind == "ready":
            self._left -= {host}
        is_repeated = self.is_end_of_connection(event) or self._is_repeated(kind, event)
        if kind == "exited" and not event.get("stopped") and not _has_succeeded(event):
            self._ended |= {task}
        elif kind == "lost":
            self._ended |= {host}
        elif kind == "published":
            values = source.members(event.get("values"))
            self._ended |= {task if values.get("failed") else source.string(values.get("lost_peer"))} - {""}
            if not values.get("failed") and values.get("lost_peer") and task not in self._ended:
                self._bereft.setdefault(task, source.string(values.get("lost_peer")))
        elif kind == "started":
            self._bereft.pop(task, None)
        found = None if is_repeated else describe(event)
        if found is not None and found.style == text.RED and task in self._bereft:
            after = f" after it lost {self._bereft[task]}"
            found = replace(found, words=found.words + after, what=found.what + after, style=text.DIM)
        return found

    def is_end_of_connection(self, event: Mapping[str, object]) -> bool:
        """Return whether an event only is the end of a connection after a goodbye, as at a job's end."""
        return event.get("event") == "lost" and source.string(event.get("host")) in self._left

    def _is_repeated(self, kind: str, event: Mapping[str, object]) -> bool:
        if kind == "said":
            return source.string(event.get("repeats")) in self._ended
        lost = source.string(source.members(event.get("values")).get("lost_peer"))
        return kind == "published" and (bool(event.get("stopped")) or lost in self._ended)


def describe(event: Mapping[str, object]) -> EventLine | None:
    """Return how an event reads; None: it says nothing to a user."""
    how = _READERS.get(source.string(event.get("event")))
    found = None if how is None else how(event)
    if found is None:
        return None
    what, style = found
    kind, task, host = (source.string(event.get(name)) for name in ("event", "task", "host"))
    tasks = tuple(source.texts(event.get("tasks"))) or tuple(filter(None, [task]))
    is_of_job = kind in _OF_JOB
    what = text.clean(" ".join(what.split()))
    words = what if is_of_job else text.clean(f"{_where(task, host)}{what}")
    if kind == "started":
        words += f", pid {source.whole(event.get('pid'))}"
    time, what = source.moment(event.get("time")) or 0.0, "" if is_of_job else what
    return EventLine(time, words, style, kind in _MESSAGES, tasks, bool(event.get("stalled")), host, what)


def folded(lines: Sequence[EventLine]) -> list[EventLine]:
    """Return lines with those that tell the same of several tasks or hosts, at nearly the same time, as one of them."""
    groups: list[list[EventLine]] = []
    last: dict[tuple[str, str], tuple[list[EventLine], set[object]]] = {}
    for line in lines:
        group, about = last.get((line.what, line.style), ([], set()))
        if not group or not line.what or (line.tasks, line.host) in about or line.time > group[-1].time + FOLD_S:
            group, about = last[line.what, line.style] = [], set()
            groups.append(group)
        group.append(line)
        about.add((line.tasks, line.host))
    return [group[0] if len(group) == 1 else _joined(group) for group in groups]


def _joined(group: Sequence[EventLine]) -> EventLine:
    tasks, hosts = [name for line in group for name in line.tasks], [line.host for line in group]
    where = _where(*(text.folded(tuple(dict.fromkeys(filter(None, names)))) for names in (tasks, hosts)))
    return replace(group[0], words=where + group[0].what)


Described = tuple[str, str] | None


def _where(task: str, host: str) -> str:
    """Return where something happened, as a line begins: `worker-0 on d1: `."""
    return f"{task} on {host}: " if task and host else f"{task or host}: " if task or host else ""


def _how(event: Mapping[str, object]) -> str:
    signal, code = source.string(event.get("signal")), source.whole(event.get("code"))
    return f"signal {signal}" if signal else f"exit code {code}" if code is not None else "ended"


def _has_succeeded(event: Mapping[str, object]) -> bool:
    return source.whole(event.get("code")) == 0 and not event.get("signal")


def _exited(event: Mapping[str, object]) -> Described:
    how, reason = _how(event), source.string(event.get("reason"))
    more = f": {reason}" if reason else ""
    if event.get("stopped"):
        return f"stopped ({how}){more}", text.DIM
    return f"{how}{more}", text.GREEN if _has_succeeded(event) else text.RED


def _published(event: Mapping[str, object]) -> Described:
    values = source.members(event.get("values"))
    message = source.string(values.get("message")) or source.string(values.get("failed"))
    return (message, text.RED if values.get("failed") else text.YELLOW) if message else None


def _said(event: Mapping[str, object]) -> Described:
    style = {"error": text.RED, "warning": text.YELLOW}.get(source.string(event.get("level")), text.PLAIN)
    return (source.string(event.get("text")), style) if event.get("level") != "debug" else None


def _finished(event: Mapping[str, object]) -> Described:
    code = source.whole(event.get("exit_code"))
    style = text.GREEN if code == 0 else text.RED
    return f"job over, exit code {code}: {source.string(event.get('message'))}", style


def _reasoned(what: str, style: str) -> Callable[[Mapping[str, object]], Described]:
    def describe_one(event: Mapping[str, object]) -> Described:
        reason = source.string(event.get("text")) or source.string(event.get("reason"))
        return what + (f": {reason}" if reason else ""), style

    return describe_one


def _condition(event: Mapping[str, object]) -> Described:
    word = source.string(event.get("condition"))
    if word != "straggler":
        return None  # of a stall there is a message; that tasks wait, and wait no more, is how a store works
    why = source.string(event.get("why"))
    return word + (f": {why}" if why else ""), text.YELLOW


def _started(event: Mapping[str, object]) -> Described:
    attempt = source.whole(event.get("attempt")) or 0
    return f"started again ({attempt})" if attempt else "started", text.PLAIN


_OF_JOB = ("said", "state", "finished")
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
    "state": lambda event: (f"job is {source.string(event.get('state'))}", text.BOLD),
    "said": _said,
    "finished": _finished,
    "condition": _condition,
}


# Reads a job's progress from a snapshot of its metrics and words it for all displays. No side effects.


BEHIND_STEPS, BEHIND_S, BEHIND_SHARE = 5, 2.0, 3.0
"""A task is clearly behind by this many steps, by what the job does in this time (reports are as old), and by this
multiple of the median difference."""


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
    """The rank that is least far, if it is stalled or one of those that are clearly behind; else empty."""
    behind: Mapping[str, int] = field(default_factory=dict)
    """By how many steps tasks are clearly behind the others."""
    is_stalled: bool = False
    """The slowest rank is stalled, so there is no ETA."""


def of(metrics: Mapping[str, object]) -> ProgressView | None:
    """Return the progress in a snapshot of metrics (`distrun.metrics/1`); None: no task has reported any."""
    told = source.members(metrics.get("progress"))
    if not told:
        return None
    tasks = {name: source.members(each) for name, each in source.members(metrics.get("tasks")).items()}
    known = source.known(ProgressView, told)
    rate, eta_s, slowest = (known[name] for name in ("rate", "eta_s", "slowest"))
    steps = _steps(tasks, known["step"] or 0)
    behind = {} if rate is None else _behind(steps, rate)  # before it is known, any difference would be large
    is_stalled = tasks.get(slowest, {}).get("condition") == facts.STALLED
    if not is_stalled:
        late = {name for name, each in tasks.items() if each.get("condition") == facts.STRAGGLER}.union(behind)
        known["slowest"] = min(late, key=lambda name: (steps.get(name, 0), name), default="")
    known.update(
        eta_s=None if is_stalled or eta_s is None or not 0 <= eta_s < formats.LONG_S else eta_s,
        rate=rate if rate is not None and rate > 0 else None,
        loss=source.number(told.get("loss")),  # it may be infinite, or none
        values={name: value for name, value in source.numbers(told.get("values")).items() if name != "loss"},
    )
    return ProgressView(**known, behind=behind, is_stalled=is_stalled)


def _steps(tasks: Mapping[str, Mapping[str, object]], least: int) -> dict[str, int]:
    """Return how far tasks are that report steps. One with fewer than the least far is in the next epoch already."""
    found = {}
    for name, task in tasks.items():
        report = source.members(task.get("report"))
        step, total = source.whole(report.get("step")), source.whole(report.get("total"))
        if step is not None:
            found[name] = step if step >= least else step + (total or least)
    return found


def _behind(steps: Mapping[str, int], rate: float) -> dict[str, int]:
    """Return by how many steps those tasks are behind the median that differ from it more than tasks usually do."""
    if len(steps) < 2:
        return {}
    middle = sorted(steps.values())[len(steps) // 2]
    usual = sorted(abs(step - middle) for step in steps.values())[(len(steps) - 1) // 2]
    least = max(BEHIND_STEPS, BEHIND_S * rate, BEHIND_SHARE * usual)
    return {name: middle - step for name, step in steps.items() if middle - step >= least}


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
