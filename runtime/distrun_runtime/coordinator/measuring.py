"""Decides what to do with the metrics of a running job. No side effects.

It tells agents how often to measure and feeds `metrics.JobMetrics`, `progress.Progress` and `stalls.Conditions`.
Snapshots for clients are made only if a client wants them. One sample a minute is kept. Changed conditions are recorded
as events, and stalls are announced.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

from distrun_runtime.contract import control, facts, words
from distrun_runtime.contract.duration import duration
from distrun_runtime.contract.plan import SERVER, WORKER, Plan
from distrun_runtime.coordinator import events, minutes
from distrun_runtime.coordinator.actions import (
    WARNING,
    Announce,
    GiveMetrics,
    KeepMetrics,
    MetricsAction,
    Record,
    Sample,
    ShowMetrics,
)
from distrun_runtime.coordinator.jobfolder import rfc3339
from distrun_runtime.coordinator.metrics import MEAN_S, JobMetrics, TaskNumbers, plain
from distrun_runtime.coordinator.progress import Progress
from distrun_runtime.coordinator.stalls import Change, Conditions

INTERVAL_S = 1.0
"""Interval of measurements; in large jobs INTERVAL_A_HOST_S times the number of hosts."""
INTERVAL_A_HOST_S = 0.01
SNAPSHOT_S = 0.5
"""Snapshots are so far apart at least ..."""
SNAPSHOT_A_TASK_S = 0.00025
"""... and so far for each host and task: to make one and send it takes a tenth of that."""
MINUTE_S = 60.0
GATHER_S = 3.0
"""Stalls that come so soon after the first are said in one line."""
NAMED = 3


class Measuring:
    """The metrics of one job. The loop calls `handle` with every event."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._metrics = JobMetrics(plan)
        self._progress = Progress()
        self._conditions = Conditions(plan.limits.stall_after_s)
        self._lines = minutes.MinuteLines()
        self._workers = {task.rank: task.name for task in plan.tasks if task.role == WORKER}
        places = plan.all_places
        self._nodes = {place.name: place.host for place in places}
        self._interval_s = max(INTERVAL_S, INTERVAL_A_HOST_S * len(places))
        self._pace_s = max(SNAPSHOT_S, SNAPSHOT_A_TASK_S * (len(plan.hosts) + len(plan.tasks)))
        self._told: Dict[str, float] = {}
        """The interval that the agent of each place was told."""
        self._look: Set[str] = set()
        self._is_wanted = False
        self._is_changed = False
        """Since the last snapshot."""
        self._shown_at = float("-inf")
        self._wall = 0.0
        """Our wall clock when the monotonic one showed 0."""
        self._sampled_at = self._mean_at = self._kept_at = float("-inf")
        self._stalls: List[Change] = []
        """Those that are still to be said."""
        self._stalls_at = 0.0

    def handle(self, event: events.Event, now: float) -> List[MetricsAction]:
        """Return the actions for an event. `now`: monotonic clock, seconds."""
        found: List[MetricsAction] = []
        if isinstance(event, events.Measured):
            found += self._measured(event, now)
        elif isinstance(event, events.AgentReady):
            found += self._set_interval(event.host)
        elif isinstance(event, events.Exited):
            found += self._ended((event.task,), now)
        elif isinstance(event, events.AgentLost):
            found += self._ended([task.name for task in self._plan.tasks if task.place_name == event.host], now)
        elif isinstance(event, events.MetricsWanted):
            found += self._wanted(event)
        elif isinstance(event, events.MetricsAsked):
            found.append(GiveMetrics(self.snapshot(now), event.give))
        elif isinstance(event, events.Tick):
            self._wall = event.time - now
        found += self._when_due(now)
        return found

    def wake_s(self) -> float:
        """Return after how many seconds at most the next Tick is wanted."""
        return self._pace_s if self._is_wanted and self._is_changed else 1.0

    def finish(self, now: float) -> List[MetricsAction]:
        """Return the actions at the job's end."""
        return [*self._say_stalls(), *self._keep(now)] if self._metrics.hosts else []

    # ------------------------------------------------------------------ what comes

    def _measured(self, event: events.Measured, now: float) -> List[MetricsAction]:
        self._is_changed = True
        changes: List[Change] = []
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
        changes: List[Change] = []
        for name in tasks:
            self._metrics.end(name)
            self._progress.end(name)
            changes += self._conditions.end(name)
        return self._note(changes, now)

    def _note(self, changes: Sequence[Change], now: float) -> List[MetricsAction]:
        for change in changes:
            if change.condition == facts.STALLED:
                self._stalls_at = self._stalls_at if self._stalls else now
                self._stalls.append(change)
        return [Record("condition", change._asdict()) for change in changes]

    def _wanted(self, event: events.MetricsWanted) -> List[MetricsAction]:
        """Show a snapshot at once, and have the hosts that are looked at measured more often, and others no more."""
        self._is_wanted = event.is_wanted
        self._shown_at, self._is_changed = float("-inf"), True
        before, self._look = self._look, {name for name in event.look if event.is_wanted}
        found: List[MetricsAction] = []
        for place, node in self._nodes.items():
            if (node in self._look) != (node in before) and place in self._told:
                found += self._set_interval(place)
        return found

    def _set_interval(self, place: str) -> List[MetricsAction]:
        node = self._nodes.get(place)
        interval_s = INTERVAL_S if node in self._look else self._interval_s
        if node is None or self._told.get(place) == interval_s:
            return []
        self._told[place] = interval_s
        return [Sample(place, interval_s)]

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
        self._metrics.sample(now, self._interval_s, self._so_far(now))

    def _say_stalls(self) -> List[MetricsAction]:
        """Return one line for all workers that have stalled."""
        names = [change.task for change in self._stalls]
        if not names:
            return []
        self._stalls = []
        after = duration(self._plan.limits.stall_after_s)
        are = f"{words.listed(names, NAMED)} {'are' if len(names) > 1 else 'is'} stalled"
        what = f"no output, report, store call, disk or CPU for {after}"
        return [Announce(f"{are}: {what}; to see where: distrun stack {self._plan.job} {names[0]}", WARNING)]

    def _keep(self, now: float) -> List[MetricsAction]:
        """Return the minute's sample."""
        totals = {name: plain(each) for name, each in self._metrics.totals(now, self._interval_s).items()}
        job: Dict[str, Any] = {name: each for name, each in totals.items() if each is not None}
        progress = self._so_far(now)
        if progress is not None:
            named = ("step", "total", "phase", "rate", "eta_s", "loss")
            job["progress"] = {name: progress[name] for name in named if progress[name] is not None}
        line = self._lines.line(rfc3339(now + self._wall), job, self._hosts(now), self._tasks())
        return [KeepMetrics(line)] if line else []

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
        return {
            "schema": control.METRICS_SCHEMA,
            "time": round(now + self._wall, 3),
            "progress": self._so_far(now),
            "hosts": self._metrics.hosts_shown(now, self._look),
            "tasks": {task.name: self._task(task) for task in self._metrics.running},
            "store": self._metrics.store_shown(now, self._interval_s),
            "history": self._metrics.history(),
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
