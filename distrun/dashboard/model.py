"""The dashboard's model of one job, built from the frames `state`, `event`, `metrics` and `outcome`.

No side effects, no clock: calls that need the time get it as wall clock seconds. Frames replace values and do not
change them, so a shallow copy (`frozen`) is a snapshot.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile

from distrun import formats
from distrun.dashboard import events, source, text
from distrun.dashboard.events import EventLine
from distrun.dashboard.text import natural
from distrun_runtime.contract import facts
from distrun_runtime.contract.facts import time_of_day
from distrun_runtime.coordinator.failures import last_state

LOST_WITH_HOST = "lost with its host"
LONG_WAIT_S = 30.0
"""A task that waits in the store for longer than this is a problem."""
SILENT_S = 2.0
"""What a host told of its tasks is older than the snapshot, if it has been silent for longer than this."""
EVENTS = 2000
"""Events that are kept."""
TRACE = 120
"""Values of a trace that are kept, one a second."""

LEVELS = {
    facts.FAILED: 0,
    facts.LOST: 1,
    facts.STALLED: 2,
    facts.STRAGGLER: 4,
    facts.PENDING: 6,
    facts.STARTING: 6,
    facts.RUNNING: 7,
    facts.WAITING: 7,
    facts.EXITED: 8,
    facts.STOPPED: 9,
}
"""Rank of a word in the order `problems`: what needs a look comes first."""
FIRST_LEVEL = -1
"""Of the task that failed first: of what has failed with it, it is the one to look at."""
LONG_WAIT_LEVEL = 3
PROBLEM_LEVEL = 4
"""Words of at most this level are problems."""
CONSEQUENCE_LEVEL = 5
"""Of a task that failed because it lost another."""


@dataclass(frozen=True)
class TaskView:
    """One task, as it is shown. What is unknown is None or empty."""

    name: str
    role: str
    rank: int
    host: str
    word: str
    """Its state; of a running task its condition, if it has one."""
    level: int
    pid: int | None = None
    started: float | None = None
    ended: float | None = None
    code: str = ""
    cpu_s: float | None = None
    """Processor time of one that has ended, seconds."""
    why: str = ""
    cpu: float | None = None
    rss: float | None = None
    limit: float | None = None
    processes: int | None = None
    read_s: float | None = None
    write_s: float | None = None
    gpu: float | None = None
    gpu_mem: float | None = None
    quiet_s: float | None = None
    """How long ago its last line was, at the time of the metrics."""
    step: int | None = None
    total: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    is_consequence: bool = False
    cpu_history: tuple[float | None, ...] = ()
    """Means of 10 s each, oldest first, if its host is looked at; so is `rss_history`."""
    rss_history: tuple[float | None, ...] = ()

    @property
    def is_problem(self) -> bool:
        """Whether a user should look at it."""
        return self.level <= PROBLEM_LEVEL

    @property
    def is_over(self) -> bool:
        """Whether it runs no more."""
        return self.word in (facts.EXITED, facts.FAILED, facts.STOPPED, facts.LOST)

    def uptime(self, now: float) -> float | None:
        """Return how long it has run, or ran."""
        if self.started is None or (self.is_over and self.ended is None):
            return None  # it is not known when a lost task ended
        return max(0.0, (self.ended or now) - self.started)


@dataclass(frozen=True)
class GpuView:
    """One GPU of a host."""

    index: int
    name: str
    util: float | None
    mem_used: float | None
    mem_total: float | None


@dataclass(frozen=True)
class HostView:
    """One host, as it is shown."""

    name: str
    word: str = ""
    """`ok`, `silent`, `lost` or, before anything is known of it, empty."""
    heard_s: float | None = None
    cores: int | None = None
    cpu: float | None = None
    load: float | None = None
    mem_used: float | None = None
    mem_total: float | None = None
    disk_free: float | None = None
    net_rx: float | None = None
    net_tx: float | None = None
    offset_s: float | None = None
    gpus: tuple[GpuView, ...] = ()


@dataclass(frozen=True)
class ServerView:
    """One server of the store."""

    name: str
    keys: int | None
    size: float | None
    push_s: float | None
    pull_s: float | None
    in_s: float | None
    out_s: float | None
    queue: int | None
    waiting: int | None
    staleness_max: float | None
    lags: Mapping[str, float]
    device: str = ""
    device_why: str = ""
    """Why its values are not on a GPU."""


@dataclass(frozen=True)
class StoreView:
    """The parameter server as a whole."""

    servers: tuple[ServerView, ...] = ()
    push_s: float | None = None
    pull_s: float | None = None
    round_s: float | None = None
    barriers: int | None = None
    barrier_waiting: int | None = None
    members: int | None = None
    """Of a barrier."""

    @property
    def queue(self) -> float:
        """Work that waits on all servers."""
        return float(sum(each.queue or 0 for each in self.servers))

    @property
    def staleness(self) -> float | None:
        """The largest of any server."""
        return max((each.staleness_max for each in self.servers if each.staleness_max is not None), default=None)

    @property
    def slowest(self) -> tuple[str, float] | None:
        """The rank that came last, and its lag in seconds."""
        lags: dict[str, float] = {}
        for each in self.servers:
            for rank, lag in each.lags.items():
                lags[rank] = max(lag, lags.get(rank, lag))
        return max(lags.items(), key=lambda item: item[1]) if lags else None


@dataclass(frozen=True)
class JobSummary:
    """What the state says of the job as a whole."""

    id: str
    name: str = ""
    state: str = ""
    backend: str = ""
    command: tuple[str, ...] = ()
    message: str = ""
    exit_code: int | None = None
    created: float | None = None
    finished: float | None = None
    heard: float | None = None
    """When a job was last heard of that has no end, though it does not go on."""
    seen_s: float | None = None
    """How long ago that was, if its host does not answer."""

    @property
    def is_over(self) -> bool:
        """Whether it goes on no more, as far as is known."""
        return bool(self.state) and self.state not in facts.GOING

    @property
    def until(self) -> float | None:
        """When it ended, or was last heard of; None: it goes on."""
        return self.finished or (self.heard if self.state not in facts.LIVE else None)

    def elapsed(self, now: float) -> float | None:
        """Return how long it has gone on, or went on."""
        if self.created is None or self.state == facts.DAMAGED:
            return None
        return max(0.0, (self.until or now) - self.created)


def exit_code(state: str) -> int:
    """Return what `distrun status JOB` ends with: 0 if the job runs or succeeded."""
    return 0 if state in (*facts.LIVE, facts.SUCCEEDED) else 1


class Model:
    """What is known of a job.

    Arguments:
        job: its id.
        seen_s: how long ago it was heard of, if its host does not answer.
    """

    def __init__(self, job: str, seen_s: float | None = None) -> None:
        self.job = JobSummary(job, seen_s=seen_s)
        self.tasks: Mapping[str, TaskView] = {}
        self.hosts: Mapping[str, HostView] = {}
        self.store: StoreView | None = None
        self.progress: events.ProgressView | None = None
        self.reports: Mapping[str, Sequence[source.Point]] = {}
        """What scripts report, by name, over the whole run; the oldest first."""
        self.history: Mapping[str, tuple[float | None, ...]] = {}
        self.traces: Mapping[str, tuple[float | None, ...]] = {}
        """What the dashboard itself saw, one value a second, by name."""
        self.events: tuple[EventLine, ...] = ()
        self.culprit = ""
        """The task whose failure ended the job, once the outcome says so."""
        self.error_lines: tuple[str, ...] = ()
        """The end of the log of the task that failed first."""
        self.link = ""
        """Why nothing new comes; empty while the coordinator is connected."""
        self.metrics_at: float | None = None
        """When the last metrics came."""
        self._state: Mapping[str, object] = {}
        self._metrics: Mapping[str, object] = {}
        self._reader = events.EventReader()
        self._lost: frozenset[str] = frozenset()
        self._silent: frozenset[str] = frozenset()
        self._waits: Mapping[str, float] = {}
        self._traced = 0.0
        self._is_settled = True

    def set_error(self, lines: Sequence[str]) -> None:
        """Take the end of the log of the task that failed first, without the marks below lines of a traceback."""
        self.error_lines = tuple(line for line in lines if "^" not in line or line.strip(" ~^"))
        self._is_settled = False

    def frozen(self) -> Model:
        """Return a copy that stays as it is."""
        return copy.copy(self)

    # ------------------------------------------------------------------ what comes

    def take(self, kind: str, header: Mapping[str, object], now: float) -> bool:
        """Take a frame of the coordinator, or its like; return whether it is one of those that are shown.

        Args:
            kind: type of the frame.
            header: the frame's JSON.
            now: wall clock, seconds.
        """
        if kind == "state":
            self._take_state(source.members(header.get("state")))
        elif kind == "metrics":
            self._take_metrics(source.members(header.get("metrics")), now)
        elif kind == "event":
            self._take_event(source.members(header.get("event")))
        elif kind == "reports":
            found = source.curves(header.get("reports"))
            if _newest(found) >= _newest(self.reports):  # the folder of a lost job has those of a minute before
                self.reports = found
        elif kind == "outcome":
            self._take_outcome(source.members(header.get("outcome")), now)
        else:
            return False
        self._is_settled = False
        return True

    def settle(self, now: float) -> None:
        """Bring tasks and hosts up to date with what was taken: once before they are looked at, not for each frame."""
        if not self._is_settled:
            self._is_settled = True
            self._rebuild(now)

    def _take_state(self, state: Mapping[str, object]) -> None:
        self._state = state
        known = source.known(JobSummary, state)
        known.update(id=known["id"] or self.job.id, seen_s=self.job.seen_s)
        known.update({name: source.moment(state.get(name)) for name in ("created", "finished", "heard")})
        known["heard"] = known["heard"] or source.moment(state.get("updated"))
        self.job = JobSummary(**known)

    def _take_outcome(self, outcome: Mapping[str, object], now: float) -> None:
        code, state = source.whole(outcome.get("exit_code")), last_state(source.string(outcome.get("reason")))
        self.culprit = source.string(source.members(outcome.get("culprit")).get("task"))
        known = {**self._state, "state": state, "exit_code": code, "message": outcome.get("message")}
        if source.objects(outcome.get("tasks")):
            known["tasks"] = outcome["tasks"]
        self._take_state(known)
        if self.job.finished is None:
            self.job = replace(self.job, finished=now)

    def _take_metrics(self, metrics: Mapping[str, object], now: float) -> None:
        self._metrics = metrics
        self.metrics_at = now
        self.progress = events.of(metrics)
        store = source.members(metrics.get("store"))
        self.store = _store(store) if store else None
        self.reports = source.curves(metrics.get("reports"))
        self.history = {name: source.series(each) for name, each in source.members(metrics.get("history")).items()}
        if now >= self._traced + 1.0:
            self._traced = now
            self._trace()

    def _take_event(self, event: Mapping[str, object]) -> None:
        kind, host = event.get("event"), source.string(event.get("host"))
        shown = self._reader.take(event)
        if self._reader.is_end_of_connection(event):
            return
        if shown is not None:
            self.events = (*self.events[-EVENTS + 1 :], shown)
        if kind == "lost":
            self._lost |= {host}
        elif kind == "cut":
            self._silent |= {host}
        elif kind == "resumed":
            self._silent -= {host}

    # ------------------------------------------------------------------ what is shown

    def trace(self, name: str, room: int) -> tuple[float | None, ...]:
        """Return the past of a number for a chart: means of 10 s or, if they are few, what was seen each second."""
        seen = self.traces.get(name, ())
        means = tuple(dropwhile(lambda value: value is None, self.history.get(name, ())))
        return means if 2 * len(means) > room or len(means) > len(seen) else seen

    @property
    def first_error(self) -> TaskView | None:
        """The task that failed first, not as the consequence of another's end."""
        if self.culprit in self.tasks:
            return self.tasks[self.culprit]
        failed = [task for task in self.tasks.values() if task.word in (facts.FAILED, facts.LOST)]
        own = [task for task in failed if not task.is_consequence] or failed
        return min(own, key=lambda task: task.ended or float("inf"), default=None)

    @property
    def counts(self) -> Sequence[tuple[str, int]]:
        """How many tasks are in a state, problems first."""
        found = Counter(task.word for task in self.tasks.values())
        return sorted(found.items(), key=lambda item: (LEVELS.get(item[0], PROBLEM_LEVEL), item[0]))

    @property
    def exit_code(self) -> int:
        """What `distrun status JOB` ends with."""
        return exit_code(self.job.state) if self.job.state else 0

    def _rebuild(self, now: float) -> None:
        metrics, hosts = (source.members(self._metrics.get(kind)) for kind in ("tasks", "hosts"))
        over = self.job.is_over
        tasks, waits = {}, {}
        behind = {} if over or self.progress is None else self.progress.behind
        for each in source.objects(self._state.get("tasks")):
            name = source.string(each.get("name"))
            told = {} if over else source.members(metrics.get(name))
            if told.get("condition") == facts.WAITING:
                waits[name] = self._waits.get(name, now)
            heard_s = source.finite(source.members(hosts.get(source.string(each.get("host")))).get("heard_s")) or 0.0
            silent_s = heard_s if heard_s > SILENT_S else 0.0
            tasks[name] = _task(each, told, self.job.until, waited_s=now - waits.get(name, now), silent_s=silent_s)
            if name in behind and tasks[name].level == LEVELS[facts.RUNNING]:
                why = f"{behind[name]} steps behind the others"
                tasks[name] = replace(tasks[name], word=facts.STRAGGLER, level=LEVELS[facts.STRAGGLER], why=why)
        self.tasks, self._waits = tasks, waits
        error = self.first_error
        if error is not None:
            # As a rule the last line names the exception.
            last = next((line.strip() for line in reversed(self.error_lines) if line.strip()), "")
            tasks[error.name] = replace(error, why=error.why or last, level=FIRST_LEVEL)
        names = source.texts(self._state.get("hosts")) or list(dict.fromkeys(task.host for task in tasks.values()))
        known = source.members(self._metrics.get("hosts"))
        self._lost |= {task.host for task in tasks.values() if task.word == facts.LOST}
        self.hosts = {name: self._host(name, source.members(known.get(name))) for name in names}

    def _host(self, name: str, told: Mapping[str, object]) -> HostView:
        heard_s = source.finite(told.get("heard_s"))
        if name in self._lost:
            word = facts.LOST
        elif name in self._silent or (heard_s is not None and heard_s > facts.SUSPECT_S and not self.job.is_over):
            word = "silent"
        else:
            word = "ok" if told else ""
        gpus = tuple(GpuView(**source.known(GpuView, each)) for each in source.objects(told.get("gpus")))
        known = source.known(HostView, {**told, "name": name, "word": word, "offset_s": told.get("clock_offset_s")})
        return HostView(**known, gpus=gpus)

    def _trace(self) -> None:
        store = self.store or StoreView()
        slowest = store.slowest
        values = {
            **{name: getattr(store, name) for name in ("push_s", "pull_s", "queue", "staleness")},
            "lag": slowest[1] if slowest else None,
        }
        for name, value in values.items():
            known = self.traces.get(name, ())
            if known or value is not None:
                self.traces = {**self.traces, name: (*known[-TRACE + 1 :], value)}


def _task(
    state: Mapping[str, object], told: Mapping[str, object], until: float | None, *, waited_s: float, silent_s: float
) -> TaskView:
    """Return a task. `until`: when its job ended, or was last heard of."""
    word = source.string(state.get("state"))
    reason = source.string(state.get("reason"))
    condition = source.string(told.get("condition"))
    why = reason or source.string(state.get("own_failure"))
    lost_peer = source.string(state.get("lost_peer"))
    if lost_peer and word in (facts.EXITED, facts.STOPPED):
        why = ""  # it has ended well all the same
    elif lost_peer:
        lost = [why] if why.startswith(f"{lost_peer}@") else [lost_peer, why]
        why = f"lost {': '.join(filter(None, lost))}"
    if word == facts.FAILED and reason == LOST_WITH_HOST:
        word = facts.LOST
    level = CONSEQUENCE_LEVEL if word == facts.FAILED and lost_peer else LEVELS.get(word, PROBLEM_LEVEL)
    if word == facts.RUNNING and condition:
        word, why = condition, source.string(told.get("why"))
        level = LEVELS.get(word, PROBLEM_LEVEL)
        if word == facts.WAITING and waited_s >= LONG_WAIT_S:
            level = LONG_WAIT_LEVEL
    code, signal = source.whole(state.get("code")), source.string(state.get("signal"))
    report, history = source.members(told.get("report")), source.members(told.get("history"))
    peak_kb, quiet_s = source.finite(state.get("max_rss_kb")), source.finite(told.get("output_age_s"))
    known = source.known(
        TaskView,
        {
            **{**told, **state},
            **{name: report.get(name) for name in ("step", "total", "values")},
            **{"read_s": told.get("read"), "write_s": told.get("write")},
            **{"cpu_history": history.get("cpu"), "rss_history": history.get("rss")},
        },
    )
    known.update(
        word=word,
        level=level,
        started=source.moment(state.get("started")),
        ended=source.moment(state.get("ended")) or (None if reason == LOST_WITH_HOST else until),
        code=signal or ("" if code is None else str(code)),
        cpu_s=known["cpu_s"] if peak_kb else None,
        why=why,
        rss=known["rss"] if told else (peak_kb * 1024 if peak_kb else None),
        quiet_s=None if quiet_s is None else quiet_s + silent_s,
    )
    return TaskView(**known, is_consequence=bool(lost_peer))


def _newest(reports: Mapping[str, Sequence[source.Point]]) -> float:
    return max((at for points in reports.values() for _, at, _ in points[-1:]), default=-1.0)


def _store(told: Mapping[str, object]) -> StoreView:
    told_of = source.members(told.get("servers"))
    servers = [
        ServerView(**source.known(ServerView, {**each, "name": name, "size": each.get("bytes")}))
        for name, each in ((name, source.members(told_of[name])) for name in sorted(told_of, key=natural))
    ]
    return StoreView(
        **source.known(StoreView, {**told, **source.members(told.get("scheduler"))}), servers=tuple(servers)
    )


# The model as lines of text, one for each change: for screen readers, logs, and terminals that cannot draw.


PROGRESS_S = 30.0
"""Minimum time between two lines of progress,"""
PROGRESS_SHARE = 0.1
"""unless the progress grew by at least this share."""


class Plain:
    """Says what has changed since it was last asked."""

    def __init__(self) -> None:
        self._job = ""
        self._link = ""
        self._words: dict[str, str] = {}
        self._hosts: dict[str, str] = {}
        self._event: EventLine | None = None
        self._has_begun = False
        self._told_s = 0.0
        self._told_share = 0.0
        self._told_step: int | None = None

    def changes(self, model: Model, now: float) -> Sequence[str]:
        """Return a line for each change. `now`: wall clock, seconds."""
        if not model.job.state:
            return []
        found = [*self._of_tasks(model), *self._of_hosts(model), *self._of_events(model)]
        found += self._of_link(model)
        found += self._of_job(model, now)
        progress = self._of_progress(model, now)
        at = time_of_day(now)[:8]
        return [f"{at} {text.clean(line)}" for line in (*found, *progress)]

    def _of_job(self, model: Model, now: float) -> list[str]:
        job = model.job
        if job.state == self._job:
            return []
        self._job = job.state
        more = "" if job.exit_code is None else f", exit code {job.exit_code}"
        if job.is_over and job.message:
            more += f": {job.message}"
        return [f"job {job.id}: {job.state} after {formats.elapsed(job.elapsed(now)) or '0:00:00'}{more}"]

    def _of_tasks(self, model: Model) -> list[str]:
        changed: dict[tuple[str, str], list[TaskView]] = {}
        for task in model.tasks.values():
            # A short wait in the store is how a job works.
            word = facts.RUNNING if task.word == facts.WAITING and not task.is_problem else task.word
            if self._words.get(task.name) == word:
                continue
            self._words[task.name] = word
            why = ""
            if word != facts.STOPPED:  # that others were stopped is a consequence, told as one
                why = f" ({task.code})" if task.code and task.is_over else ""
                why += f": {task.why}" if task.why and word == task.word else ""
            changed.setdefault((word, why), []).append(task)
        lines = []
        for (word, why), tasks in changed.items():
            names = text.folded(tuple(task.name for task in tasks))
            hosts = text.folded(tuple(task.host for task in tasks))
            lines.append(f"{names} on {hosts}: {word}{why}")
        return lines

    def _of_hosts(self, model: Model) -> list[str]:
        lines = []
        for host in model.hosts.values():
            word = host.word or "ok"
            if self._hosts.get(host.name, "ok") != word:
                lines.append(f"host {host.name}: {word}")
            self._hosts[host.name] = word
        return lines

    def _of_events(self, model: Model) -> list[str]:
        """Return warnings and errors; what concerns a task's state is told with the state."""
        fresh: list[EventLine] = []
        for event in reversed(model.events):
            if event is self._event:
                break
            fresh.append(event)
        if model.events:
            self._event = model.events[-1]
        has_begun, self._has_begun = self._has_begun, True
        return [event.words for event in reversed(fresh) if event.is_message] if has_begun else []

    def _of_link(self, model: Model) -> list[str]:
        if model.link == self._link:
            return []
        self._link = model.link
        return [model.link or "the coordinator is connected again"]

    def _of_progress(self, model: Model, now: float) -> list[str]:
        progress = model.progress
        if progress is None or progress.step is None or progress.step == self._told_step:
            return []
        share = progress.fraction or 0.0
        if now < self._told_s + PROGRESS_S and abs(share - self._told_share) < PROGRESS_SHARE:
            return []
        self._told_s, self._told_share, self._told_step = now, share, progress.step
        return ["progress: " + ", ".join(events.line(progress))]
