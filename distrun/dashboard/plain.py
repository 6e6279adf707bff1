"""The dashboard as lines of text, one for each change: for screen readers, logs, and terminals that cannot draw.

No side effects.
"""

from __future__ import annotations

from collections.abc import Sequence

from distrun import formats
from distrun.dashboard import events, text
from distrun.dashboard.events import EventLine
from distrun.dashboard.model import Model, TaskView
from distrun_runtime.contract import facts
from distrun_runtime.contract.facts import time_of_day

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
