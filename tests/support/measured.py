"""Agents' measurements, scripted: what a host and its tasks use grows as a test says, and frames tell of it."""

from __future__ import annotations

from typing import Any

from distrun_runtime.contract import agent_messages
from distrun_runtime.contract.plan import Plan
from distrun_runtime.coordinator import messages
from distrun_runtime.coordinator.conditions import JobMeasurement
from distrun_runtime.coordinator.messages import (
    Announce,
    KeepMetrics,
    MetricsAction,
    RecordEvent,
    Sample,
    ShowMetrics,
)

WALL = 1_000_000.0
"""The wall clock when the coordinator's own shows 0; the agents' monotonic clock shows BOOT then."""
BOOT = 5000.0


class MeasuredJob:
    """A job's `JobMeasurement`, a clock that the test moves, and agents that send a frame a second."""

    def __init__(self, plan: Plan, interval_s: float = 1.0) -> None:
        self.plan = plan
        self.measuring = JobMeasurement(plan, interval_s, WALL)
        self.now = 0.0
        self.done: list[MetricsAction] = []
        self.cpu: dict[str, float] = {}
        """Cores that a task uses, by its name; 0.5 unless it is here."""
        self.more: dict[str, dict[str, Any]] = {task.name: {} for task in plan.tasks}
        """Members of a task's frame, by its name."""
        self.ended: set[str] = set()
        self._used = {task.name: 10.0 for task in plan.tasks}
        self.tell(messages.Tick(WALL))

    def tell(self, event: messages.Event) -> None:
        self.done += self.measuring.handle(event, self.now)

    def frame(self, host: str) -> dict[str, Any]:
        """Return what the agent of a host sends now."""
        tasks = {
            task.name: {"cpu_s": self._used[task.name], "rss": 1 << 20, "processes": 1, **self.more[task.name]}
            for task in self.plan.tasks
            if task.host == host and task.name not in self.ended
        }
        told = {"cores": 4, "cpu_s": 100 + 2 * self.now, "net_rx": 1000 * self.now, "net_tx": 0}
        return {"clock": BOOT + self.now, "time": WALL + self.now, "host": told, "tasks": tasks}

    def run_to(self, now: float) -> MeasuredJob:
        """Let time pass: every second each agent sends a frame, and the loop ticks."""
        while self.now < now:
            self.now += 1.0
            for name in self._used:
                self._used[name] += self.cpu.get(name, 0.5)
            self.tell_measured()
            self.tell(messages.Tick(WALL + self.now))
        return self

    def tell_measured(self) -> None:
        """Have each agent send a frame."""
        for host in self.plan.hosts:
            self.tell(agent_messages.Measured(host.name, self.frame(host.name), WALL + self.now))

    def snapshot(self) -> dict[str, Any]:
        """Return a snapshot of now."""
        found: list[dict[str, Any]] = []
        self.done += self.measuring.handle(messages.MetricsAsked(found.append), self.now)
        [given] = [each for each in self.done if isinstance(each, ShowMetrics) and each.give]
        self.done.remove(given)
        return dict(given.snapshot)

    def report(self, task: str, step: float | None = None, total: float | None = None, **values: float) -> None:
        """Have a task report now."""
        told = {"step": step, "total": total, "values": values, "time": WALL + self.now}
        self.more[task]["report"] = told

    @property
    def shown(self) -> list[dict[str, Any]]:
        return [dict(each.snapshot) for each in self.done if isinstance(each, ShowMetrics)]

    @property
    def said(self) -> list[str]:
        return [each.text for each in self.done if isinstance(each, Announce)]

    @property
    def recorded(self) -> list[tuple[str, ...]]:
        return [tuple(each.members.values()) for each in self.done if isinstance(each, RecordEvent)]

    @property
    def intervals(self) -> list[tuple[str, float]]:
        return [(each.host, each.interval_s) for each in self.done if isinstance(each, Sample)]

    @property
    def kept(self) -> list[str]:
        return [each.line for each in self.done if isinstance(each, KeepMetrics)]
