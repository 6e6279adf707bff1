"""What the metrics of a running job mean: progress, conditions of workers, a sample a minute. No side effects.

`JobMeasurement` feeds `metrics.JobMetrics`, `Progress` and `Conditions` with what agents have measured. Snapshots for
clients are made only if a client wants them. One sample a minute is kept. Changed conditions are recorded as events,
and stalls are announced.
"""

from __future__ import annotations

import json
import math
from collections import deque
from typing import (
    Any,
    Callable,
    ClassVar,
    Deque,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

from distrun_runtime.contract import agent_messages, control, facts
from distrun_runtime.contract.dataclass import rfc3339
from distrun_runtime.contract.facts import duration
from distrun_runtime.contract.metrics import LAG_ROUNDS, VALUES
from distrun_runtime.contract.plan import SERVER, WORKER, Place, Plan
from distrun_runtime.coordinator import messages
from distrun_runtime.coordinator.messages import (
    SAMPLE_S,
    WARNING,
    Announce,
    KeepMetrics,
    KeepReports,
    MetricsAction,
    RecordEvent,
    Sample,
    ShowMetrics,
)
from distrun_runtime.coordinator.metrics import MEAN_S, Curves, JobMetrics, Report, TaskNumbers, Wait, plain

# Formats the lines of metrics.jsonl, one sample of a job's metrics a minute. No side effects.
#
# A line has at most LINE bytes, the file at most LIMIT. If a line would be too long, tasks and then hosts are left out,
# and the line says how many. When the file is full, a last line says so.


SCHEMA = "distrun.sample/1"
LINE = 4096
"""Bytes of a line, its newline included."""
LIMIT = 16 * 1024 * 1024
"""Bytes of the file."""
VALUES_BYTES = 2048
"""What scripts report may take of a line; if it takes more, only the loss is kept."""
_ROOM_OF_NOTE = 200
_ROOM_OF_COUNTS = 100

Rows = Iterable[Tuple[str, Mapping[str, Any]]]


class MinuteLines:
    """The lines of one job's file, and how much of it is full."""

    def __init__(self) -> None:
        self._left = LIMIT - _ROOM_OF_NOTE
        self._is_full = False

    def line(self, time: str, job: Mapping[str, Any], hosts: Rows, tasks: Rows) -> str:
        """Return the next line; empty: nothing is written any more.

        Args:
            time: RFC 3339.
            job: numbers of the whole job.
            hosts, tasks: name and numbers of each; the first ones are kept.
        """
        if self._is_full:
            return ""
        made = _line({"schema": SCHEMA, "time": time, **job}, hosts, tasks)
        if len(made) + 1 > self._left:
            self._is_full = True
            return json.dumps({"schema": SCHEMA, "time": time, "note": "the file is full: no more samples are kept"})
        self._left -= len(made) + 1
        return made


def _line(found: Dict[str, Any], hosts: Rows, tasks: Rows) -> str:
    room = LINE - 1 - len(_text(found)) - _ROOM_OF_COUNTS
    if room < 0:
        return _text({name: found[name] for name in ("schema", "time")})
    for kind, rows in (("tasks", tasks), ("hosts", hosts)):
        kept: Dict[str, Any] = {}
        left = 0
        for name, each in rows:
            size = len(_text({name: each}))  # its braces stand for a comma
            if left or size > room:
                left += 1
            else:
                kept[name] = each
                room -= size
        found[kind] = kept
        if left:
            found[f"{kind}_left_out"] = left
    return _text(found)


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


# Computes the progress of a job from the reports of its workers. No side effects.
#
# The progress of the job is that of its slowest rank. A step that goes back starts a new phase, such as the next epoch
# or a restart. The job's phase is the lowest phase of its ranks. The rate is that of the last two minutes, across
# phases.


WINDOW_S = 120.0
"""Period from which the rate is computed, seconds."""
POINT_S = 1.0
"""Points of the past are so far apart."""
LOSS = "loss"


class _Rank:
    """What one rank has reported."""

    __slots__ = ("phase", "report", "step")

    def __init__(self, report: Report) -> None:
        self.report = report
        self.step: Optional[float] = None
        """The last one that was reported."""
        self.phase = 0

    def take(self, report: Report) -> None:
        """Note a report."""
        self.report = report
        if report.step is None:
            return
        if self.step is not None and report.step < self.step:
            self.phase += 1
        self.step = report.step


class Progress:
    """How far a job is."""

    def __init__(self) -> None:
        self._ranks: Dict[str, _Rank] = {}
        self._ended: Dict[str, _Rank] = {}
        """Of tasks that have ended."""
        self._points: Deque[Tuple[float, float]] = deque()
        """When, and how many steps the job had done in all phases."""
        self._done = 0.0
        self._last = (0, 0.0)
        """The phase and the step of the slowest rank when it was looked at last."""
        self.reports = 0
        """How many reports have been taken."""
        self.means: Dict[str, float] = {}
        """Of each reported value over the ranks, by its name, when `value` was called last."""

    def take(self, task: str, report: Report) -> None:
        """Note what a worker reported."""
        rank = self._ranks.get(task)
        if rank is None:
            rank = self._ranks[task] = self._ended.pop(task) if task in self._ended else _Rank(report)
        elif report is rank.report:
            return
        self.reports += 1
        rank.take(report)

    def end(self, task: str) -> None:
        """Note that a worker has ended: the job's progress is that of the others, while there are any."""
        if task in self._ranks:
            self._ended[task] = self._ranks.pop(task)

    def mark(self, now: float) -> None:
        """Remember how far the job is, for its rate; to be called about once a second."""
        slowest = self._slowest()
        if slowest is None:
            return
        rank = slowest[1]
        phase, step = rank.phase, rank.step or 0.0
        if self._points:  # of a rank that comes in later, and is less far, nothing is subtracted
            same_phase = phase == self._last[0]
            self._done += max(0.0, step - self._last[1]) if same_phase else step if phase > self._last[0] else 0.0
        self._last = (phase, step)
        if not self._points or now >= self._points[-1][0] + POINT_S:
            self._points.append((now, self._done))
        while len(self._points) > 2 and self._points[1][0] <= now - WINDOW_S:
            self._points.popleft()

    def value(self, now: float) -> Optional[Dict[str, Any]]:
        """Return `progress` of a snapshot; None: no worker has reported."""
        ranks = self._ranks or self._ended
        if not ranks:
            return None
        self.mark(now)
        found: Dict[str, Any] = dict.fromkeys(("step", "total", "phase", "fraction", "eta_s", "rate", "slowest"))
        slowest = self._slowest()
        if slowest is not None:
            found.update(self._so_far(slowest[1], now), slowest=slowest[0])
        values = self.means = self._means()
        found["loss"] = plain(values.get(LOSS), 6)
        found["values"] = {name: plain(each, 6) for name, each in values.items()}
        return found

    def _means(self) -> Dict[str, float]:
        """Return the mean of each reported value over the ranks that report it; nan if one of them is.

        Those that have ended count for what none of the others reports.
        """
        found: Dict[str, List[float]] = {}
        for ranks in (self._ranks, self._ended):
            others = set(found)
            for rank in ranks.values():
                for name, each in rank.report.values.items():
                    if name not in others and (name in found or len(found) < VALUES):
                        found.setdefault(name, []).append(each)
        return {name: _mean(each) for name, each in found.items()}

    def _so_far(self, rank: _Rank, now: float) -> Dict[str, Any]:
        step = rank.step or 0.0
        total = rank.report.total if rank.report.total is not None else self._largest_total()
        passed_s = now - self._points[0][0] if self._points else 0.0
        pace = (self._done - self._points[0][1]) / passed_s if passed_s >= POINT_S else None
        found = {"step": plain(step), "total": plain(total), "phase": rank.phase, "rate": plain(pace)}
        if total:
            found["fraction"] = plain(min(1.0, step / total))
            if pace or step >= total:
                found["eta_s"] = plain(max(0.0, total - step) / (pace or 1.0), 1)
        return found

    def _slowest(self) -> Optional[Tuple[str, _Rank]]:
        """Return the rank that is least far, of those that report steps; the first by name of several."""
        known = [each for each in (self._ranks or self._ended).items() if each[1].step is not None]
        if not known:
            return None
        others = self._largest_total()  # for a rank that does not say how many steps it is to do

        def order(each: Tuple[str, _Rank]) -> Tuple[int, float, str]:
            name, rank = each
            total, step = rank.report.total or others, rank.step or 0.0
            return rank.phase, step / total if total else step, name

        return min(known, key=order)

    def _largest_total(self) -> Optional[float]:
        ranks = (self._ranks or self._ended).values()
        return max((rank.report.total for rank in ranks if rank.report.total is not None), default=None)


def _mean(values: List[float]) -> float:
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # too large, or both infinities
        return math.nan


# Detects the conditions of workers: waiting, stalled, straggler. No side effects.
#
# waiting     It reported that it waits in the store: for whom, for which key, and since when.
# stalled     For the time that the user set, it wrote no output, reported nothing, called nothing in the store, read
#             and wrote no file, and used less than STALLED_CPU of a core. CPU is a mean over CPU_S, because the system
#             counts in ticks of 10 ms and one tick a second already reaches the limit. A worker that waits is not
#             stalled.
# straggler   By a server's clock, it came last in LAST_ROUNDS of the last LAG_ROUNDS sampled rounds, with a median lag
#             of more than LAG_SHARE of the median round and more than LAG_S.
#
# A task has at most one condition; the first that applies counts. Conditions do not end tasks. A condition is recorded
# only after it has lasted for a while: waiting is common, and recording every change of a thousand workers would fill
# the disk.


STALLED_CPU = 0.01
"""Cores. Less is what a process needs that does nothing."""
CPU_S = 10.0
"""Period over which CPU usage is averaged."""
LAST_ROUNDS = 10
LAG_SHARE = 0.2
LAG_S = 0.05
TOLD_WAIT_S = 10.0
"""Waiting becomes an event after this time."""
TOLD_A_MINUTE = 60
"""Events of conditions in a minute, but for stalls; what comes then is only shown."""


class ConditionChange(NamedTuple):
    """A changed condition of a task, for events.jsonl."""

    task: str
    condition: str
    """Empty: it is like any other again."""
    why: str
    """One line."""


class _Watched:
    """What is known of one worker."""

    __slots__ = ("alive_at", "behind", "condition", "lived", "signs", "told", "used", "wait")

    def __init__(self, now: float) -> None:
        self.alive_at = now
        """When it last gave a sign of life."""
        self.signs: Tuple[Optional[float], ...] = ()
        """What changes with every sign of life."""
        self.wait: Optional[Wait] = None
        """What it waits for."""
        self.behind: Dict[str, str] = {}
        """For each server whose rounds it holds up: how."""
        self.condition = ""
        self.told = ""
        """The condition that was told last."""
        self.lived = now
        """When it was last looked at."""
        self.used: Deque[Tuple[float, float]] = deque()
        """When, and how many cores it used, in the last CPU_S."""

    def works(self, cores: float, now: float) -> bool:
        """Note what it uses of the processor; return whether that is a sign of life."""
        self.used.append((now, cores))
        while self.used[0][0] <= now - CPU_S:
            self.used.popleft()
        mean = sum(each for _, each in self.used) / len(self.used)
        return min(cores, mean) >= STALLED_CPU

    def keep_up(self, server: str) -> None:
        """Note that it does not hold up the rounds of a server any more."""
        self.behind.pop(server, None)
        if self.condition == facts.STRAGGLER and not self.behind:
            self.condition = ""


class Conditions:
    """The conditions of a job's workers.

    Arguments:
        stall_after_s: how long a worker must be without a sign of life; 0: none is ever stalled.
    """

    def __init__(self, stall_after_s: float) -> None:
        self._stall_after_s = stall_after_s
        self._watched: Dict[str, _Watched] = {}
        self._budget = TOLD_A_MINUTE
        self._minute = 0.0

    def take(self, task: TaskNumbers, now: float) -> List[ConditionChange]:
        """Record a worker's new metrics; return the changes to report. `now`: monotonic clock, seconds."""
        if task.role != WORKER:
            return []
        watched = self._watched.get(task.name)
        if watched is None:
            watched = self._watched[task.name] = _Watched(now)
        signs = (
            task.output_at,
            None if task.report is None else task.report.time,
            task.calls,
            task.read_bytes,
            task.written_bytes,
        )
        # If its CPU usage is not known, it may be working.
        works = task.cpu is None or watched.works(task.cpu, now)
        if task.wait is not None or works or signs != watched.signs:
            watched.alive_at = now
        watched.signs = signs
        watched.lived, watched.wait = now, task.wait
        if task.wait is not None:
            watched.condition = facts.WAITING
        elif self._stall_after_s and now - watched.alive_at >= self._stall_after_s:
            watched.condition = facts.STALLED
        else:
            watched.condition = facts.STRAGGLER if watched.behind else ""
        return self._told(task, watched, now)

    def take_lags(self, server: TaskNumbers, workers: Dict[int, str]) -> None:
        """Take note of what a server says of the ranks' lags. `workers`: their names by rank."""
        lags = server.store.lags if server.store is not None else {}
        for rank, name in workers.items():
            watched = self._watched.get(name)
            lag = lags.get(str(rank))
            if watched is None or (lag is None and server.name not in watched.behind):
                continue
            why = _behind(lag) if lag is not None else ""
            if why:
                watched.behind[server.name] = why
            else:
                watched.keep_up(server.name)

    def end(self, task: str) -> List[ConditionChange]:
        """Record the end of a task; return the changes to report."""
        watched = self._watched.pop(task, None)
        for each in self._watched.values():
            each.keep_up(task)
        return [ConditionChange(task, "", "it has ended")] if watched is not None and watched.told else []

    def of(self, task: TaskNumbers) -> Tuple[str, str]:
        """Return the condition of a task, and why it has it in one line; both empty: none."""
        watched = self._watched.get(task.name)
        if watched is None or not watched.condition:
            return "", ""
        return watched.condition, self._why(task, watched)

    def is_stalled(self, task: str) -> bool:
        """Whether a worker gives no sign of life."""
        watched = self._watched.get(task)
        return watched is not None and watched.condition == facts.STALLED

    def _why(self, task: TaskNumbers, watched: _Watched) -> str:
        if watched.wait is not None:
            return _waits(watched.wait, task.stamp)
        if watched.condition == facts.STALLED:
            silent_s = watched.lived - watched.alive_at
            return f"no output, report, store call, disk or CPU for {duration(round(silent_s))}"
        server, why = max(watched.behind.items())
        return f"{why} (seen by {server})"

    def _told(self, task: TaskNumbers, watched: _Watched, now: float) -> List[ConditionChange]:
        condition = watched.condition
        if watched.wait is not None and task.stamp - watched.wait.since < TOLD_WAIT_S:
            condition = ""
        if condition == watched.told or not self._may_tell(condition, now):
            return []
        watched.told = condition
        return [ConditionChange(task.name, condition, self._why(task, watched) if condition else "")]

    def _may_tell(self, condition: str, now: float) -> bool:
        """Whether there may be another event; stalls are always told."""
        if condition == facts.STALLED:
            return True
        if now >= self._minute + MINUTE_S:
            self._minute, self._budget = now, TOLD_A_MINUTE
        self._budget -= 1
        return self._budget >= 0


def _behind(lag: Tuple[float, float, float, float]) -> str:
    """Return, in a few words, how a rank holds up the rounds; empty: it does not."""
    _, last, median_s, round_s = lag
    if last < LAST_ROUNDS or median_s <= LAG_SHARE * round_s or median_s <= LAG_S:
        return ""
    share = f", {median_s / round_s:.0%} of a round" if round_s else ""
    return f"last in {last:.0f} of {LAG_ROUNDS} rounds, {duration(median_s)} late{share}"


def _waits(wait: Wait, stamp: float) -> str:
    """Return, in one line, what a worker waits for."""
    call = f" ({wait.call} of {wait.key})" if wait.call and wait.key else f" ({wait.call})" if wait.call else ""
    return f"has waited {duration(round(max(0.0, stamp - wait.since)))} for {facts.listed(wait.whom, 3)}{call}"


SNAPSHOT_S = 0.5
"""Snapshots are so far apart at least ..."""
SNAPSHOT_A_TASK_S = 0.00025
"""... and so far for each host and task: to make one and send it takes a tenth of that."""
MINUTE_S = 60.0
GATHER_S = 3.0
"""Stalls that come so soon after the first are said in one line."""
NAMED = 3


class JobMeasurement:
    """The metrics of one job. `handle` is called with every event since the first that concerns them.

    Arguments:
        plan: of the job.
        interval_s: how often agents measure where no client looks.
        wall: our wall clock when the monotonic one shows 0.
        began: when the job began (monotonic).
    """

    def __init__(self, plan: Plan, interval_s: float, wall: float, began: float = 0.0) -> None:
        self._plan = plan
        self._interval_s = interval_s
        self._wall = wall
        self._began = began
        self._metrics = JobMetrics(plan)
        self._progress = Progress()
        self._conditions = Conditions(plan.limits.stall_after_s)
        self._lines = MinuteLines()
        self._curves = Curves()
        self._drawn = 0
        """Reports that had been taken when the curves last got a point."""
        self._is_open = False
        """The last point is of this interval: what comes in it replaces that."""
        self._workers = {task.rank: task.name for task in plan.tasks if task.role == WORKER}
        self._pace_s = max(SNAPSHOT_S, SNAPSHOT_A_TASK_S * (len(plan.hosts) + len(plan.tasks)))
        self._look: Set[str] = set()
        """Hosts of which clients want more."""
        self._ready: Set[str] = set()
        """Places whose agents are ready."""
        self._is_wanted = False
        self._is_changed = False
        """Since the last snapshot."""
        self._shown_at = float("-inf")
        self._sampled_at = self._mean_at = self._kept_at = float("-inf")
        self._stalls: List[ConditionChange] = []
        """Those that are still to be said."""
        self._stalls_at = 0.0

    def handle(self, event: messages.Event, now: float) -> List[MetricsAction]:
        """Return the actions for an event. `now`: monotonic clock, seconds."""
        handler = self._HANDLERS.get(type(event))
        found = handler(self, event, now) if handler is not None else []
        return [*found, *self._when_due(now)]

    def wake_s(self) -> float:
        """Return after how many seconds at most the next Tick is wanted."""
        return self._pace_s if self._is_wanted and self._is_changed else 1.0

    def finish(self, now: float) -> List[MetricsAction]:
        """Return the actions at the job's end."""
        if not self._metrics.hosts and not self._progress.reports:
            return []
        self._draw(self._so_far(now), now)
        return self._keep(now)

    # ------------------------------------------------------------------ what comes

    def _on_measured(self, event: agent_messages.Measured, now: float) -> List[MetricsAction]:
        self._is_changed = True
        changes: List[ConditionChange] = []
        for task in self._metrics.take(event.host, event.value, now, event.arrived):
            if task.role == WORKER:
                if task.report is not None:
                    self._progress.take(task.name, task.report)
                changes += self._conditions.take(task, now)
            elif task.role == SERVER:
                self._conditions.take_lags(task, self._workers)
        return self._note(changes, now)

    def _ended(self, tasks: Sequence[str], now: float) -> List[MetricsAction]:
        self._is_changed = True
        changes: List[ConditionChange] = []
        for name in tasks:
            self._metrics.end(name)
            self._progress.end(name)
            changes += self._conditions.end(name)
        return self._note(changes, now)

    def _note(self, changes: Sequence[ConditionChange], now: float) -> List[MetricsAction]:
        for change in changes:
            if change.condition == facts.STALLED:
                self._stalls_at = self._stalls_at if self._stalls else now
                self._stalls.append(change)
        return [RecordEvent("condition", change._asdict()) for change in changes]

    def _on_exited(self, event: agent_messages.Exited, now: float) -> List[MetricsAction]:
        return self._ended((event.task,), now)

    def _on_lost(self, event: messages.AgentLost, now: float) -> List[MetricsAction]:
        self._ready.discard(event.host)
        return self._ended([task.name for task in self._plan.tasks if task.place_name == event.host], now)

    def _on_asked(self, event: messages.MetricsAsked, now: float) -> List[MetricsAction]:
        return [ShowMetrics(self.snapshot(now), event.give)]

    def _on_tick(self, event: messages.Tick, now: float) -> List[MetricsAction]:
        self._wall = event.time - now
        return []

    def _on_wanted(self, event: messages.MetricsWanted, now: float) -> List[MetricsAction]:
        """Show a snapshot at once, with more of the hosts that are looked at: they measure more often."""
        before, self._look = self._look, set(event.look)
        self._is_wanted, self._shown_at, self._is_changed = event.is_wanted, float("-inf"), True
        changed = before ^ self._look if self._interval_s > SAMPLE_S else ()
        places = [place for place in self._plan.all_places if place.host in changed]
        return [self._interval_of(place) for place in places if place.name in self._ready]

    def _on_ready(self, event: agent_messages.AgentReady, now: float) -> List[MetricsAction]:
        self._ready.add(event.host)
        places = self._plan.all_places if self._look else ()
        return [self._interval_of(each) for each in places if each.name == event.host]

    def _interval_of(self, place: Place) -> Sample:
        """Return what the agent of a place is told: it measures more often while its host is looked at."""
        return Sample(place.name, SAMPLE_S if place.host in self._look else self._interval_s)

    # ------------------------------------------------------------------ what is due

    def _when_due(self, now: float) -> List[MetricsAction]:
        found: List[MetricsAction] = []
        if self._metrics.hosts and now >= self._sampled_at + self._interval_s:
            self._sampled_at = now
            self._progress.mark(now)
            self._sample(now)
        if self._stalls and now >= self._stalls_at + GATHER_S:
            found += self._say_stalls()
        if self._is_wanted and self._is_changed and now >= self._shown_at + self._pace_s:
            self._shown_at, self._is_changed = now, False
            found.append(ShowMetrics(self.snapshot(now)))
        if self._metrics.hosts and now >= self._kept_at + MINUTE_S:
            found += self._keep(now) if self._kept_at > float("-inf") else []
            self._kept_at = now
        return found

    def _sample(self, now: float) -> None:
        if self._mean_at == float("-inf"):
            self._mean_at = now
        elif now >= self._mean_at + MEAN_S:
            # Never late by more than one interval, and not drifting.
            self._mean_at = max(self._mean_at + MEAN_S, now - self._interval_s)
            self._metrics.end_mean()
        self._metrics.sample(now, self._interval_s)
        self._draw(self._so_far(now), now)
        self._is_open = False

    def _draw(self, progress: Optional[Mapping[str, Any]], now: float) -> None:
        """Have the curves go on, if anything was reported since they last did."""
        if progress is not None and self._drawn != self._progress.reports:
            self._drawn = self._progress.reports
            self._curves.add(progress["step"], now - self._began, self._progress.means, self._is_open)
            self._is_open = True

    def _say_stalls(self) -> List[MetricsAction]:
        """Return one line for all workers that have stalled."""
        who = tuple(change.task for change in self._stalls)
        if not who:
            return []
        self._stalls = []
        after = duration(self._plan.limits.stall_after_s)
        are = f"{facts.listed(who, NAMED)} {'are' if len(who) > 1 else 'is'} stalled"
        what = f"no output, report, store call, disk or CPU for {after}"
        return [Announce(f"{are}: {what}; to see where: distrun stack {self._plan.job} {who[0]}", WARNING, who, True)]

    def _keep(self, now: float) -> List[MetricsAction]:
        """Return the minute's sample, and the curves."""
        totals = {name: plain(each) for name, each in self._metrics.totals(now, self._interval_s).items()}
        job: Dict[str, Any] = {name: each for name, each in totals.items() if each is not None}
        progress = self._so_far(now)
        if progress is not None:
            named = ("step", "total", "phase", "rate", "eta_s", "loss")
            job["progress"] = {name: progress[name] for name in named if progress[name] is not None}
            if len(json.dumps(progress["values"])) <= VALUES_BYTES:  # all names but very long ones
                job["progress"]["values"] = progress["values"]
        line = self._lines.line(rfc3339(now + self._wall), job, self._hosts(now), self._tasks())
        curves = self._curves.shown()
        return [*([KeepMetrics(line)] if line else []), *([KeepReports(curves)] if curves else [])]

    def _hosts(self, now: float) -> Iterator[Tuple[str, Mapping[str, Any]]]:
        names = ("cpu", "load", "mem_used", "net_rx", "net_tx")
        for name, host in self._metrics.hosts.items():
            shown = host.shown(now)
            yield name, {each: shown[each] for each in names if shown.get(each) is not None}

    def _tasks(self) -> Iterator[Tuple[str, Mapping[str, Any]]]:
        for task in self._metrics.running:
            means = {kind: plain(self._metrics.minute(task.name, kind)) for kind in ("cpu", "rss")}
            known: Dict[str, Any] = {kind: each for kind, each in means.items() if each is not None}
            condition, _ = self._conditions.of(task)
            if condition:
                known["condition"] = condition
            yield task.name, known

    # ------------------------------------------------------------------ snapshots

    def snapshot(self, now: float) -> Dict[str, Any]:
        """Return all numbers as clients get them (docs/protocol.md, "Metrics")."""
        progress = self._so_far(now)
        self._draw(progress, now)  # as new as the progress
        return {
            "schema": control.METRICS_SCHEMA,
            "time": round(now + self._wall, 3),
            "progress": progress,
            "hosts": {name: host.shown(now) for name, host in self._metrics.hosts.items()},
            "tasks": {task.name: self._task(task) for task in self._metrics.running},
            "store": self._metrics.store_shown(now, self._interval_s),
            "history": self._metrics.history(),
            "reports": self._curves.shown(),
        }

    def _so_far(self, now: float) -> Optional[Dict[str, Any]]:
        """Return the job's progress. While its slowest rank is stalled, there is no ETA."""
        found = self._progress.value(now)
        if found is not None and found["slowest"] is not None and self._conditions.is_stalled(found["slowest"]):
            found["eta_s"] = None
        return found

    def _task(self, task: TaskNumbers) -> Dict[str, Any]:
        shown = task.shown(*self._conditions.of(task))
        if task.host in self._look:
            shown["history"] = self._metrics.task_history(task.name)
        return shown

    _HANDLERS: ClassVar[Mapping[type, Callable[[JobMeasurement, Any, float], List[MetricsAction]]]] = {
        agent_messages.Measured: _on_measured,
        agent_messages.Exited: _on_exited,
        messages.AgentLost: _on_lost,
        agent_messages.AgentReady: _on_ready,
        messages.MetricsWanted: _on_wanted,
        messages.MetricsAsked: _on_asked,
        messages.Tick: _on_tick,
    }
