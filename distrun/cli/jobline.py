"""The line that shows how far a job is: first the phases of its start, then the progress that tasks report.

No side effects: `JobLine` takes data from the coordinator and returns text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distrun import formats
from distrun.dashboard import events
from distrun_runtime.contract import facts

_BEFORE = (facts.SUBMITTING, facts.QUEUED, facts.STARTING)
CONNECT, CHECK, SYNC, START = "connect", "check", "sync", "start"
_PLACES = {"hello": CONNECT, "ready": CHECK}
"""Events of agents and the phase that each ends for its place."""


class JobLine:
    """How far a job is.

    Arguments:
        counts: returns how many places (agents) and tasks the job has; 0: not known yet.
        since: when the job was launched, monotonic seconds; None: before we looked.
        has_symbols: the terminal shows UTF-8.
    """

    def __init__(self, counts: Callable[[], tuple[int, int]], since: float | None, has_symbols: bool = True) -> None:
        self._counts = counts
        self._known = (0, 0)
        self._separator = " \u00b7 " if has_symbols else ", "
        self._begun = since
        self._done: dict[str, set[str]] = {CONNECT: set(), CHECK: set(), START: set()}
        """By phase the places or tasks that have passed it."""
        self._passed_at: dict[str, float] = {}
        """When the last of them did."""
        self._synced = ""
        self._sync_text = ""
        self._is_starting = since is not None
        self._progress: events.ProgressView | None = None

    def take(self, kind: str, value: Mapping[str, Any], now: float) -> list[str]:
        """Take data from the coordinator (`Console.follow`); return the text to print above the line."""
        if kind == "event":
            return self._take_event(value, now)
        if kind == "state":
            return self._take_state(value)
        if kind == "metrics":
            self._progress = events.of(value)
            return []
        return self._take_copy(value["sync"], now)

    def text(self) -> str:
        """Return the line as it stands; empty: there is nothing to show."""
        if self._is_starting:
            return self._separator.join(self._phases())
        return self._separator.join(events.line(self._progress)) if self._progress else ""

    # ------------------------------------------------------------------ what is heard

    def _take_event(self, event: Mapping[str, Any], now: float) -> list[str]:
        what = event.get("event")
        phase = _PLACES.get(str(what)) or (START if what == "started" else "")
        if phase:
            self._done[phase].add(str(event.get("task" if phase == START else "host", "")))
            self._passed_at[phase] = now
        elif what == "prepared":
            self._passed_at[SYNC] = now
        elif what == "state":
            was_starting, self._is_starting = self._is_starting, event.get("state") in _BEFORE
            if event.get("state") == facts.RUNNING and was_starting and self._begun is not None:
                return [self._summary(self._begun, now)]
        elif what == "finished":
            self._is_starting, self._progress = False, None
        return []

    def _take_state(self, state: Mapping[str, Any]) -> list[str]:
        """Take the whole state: of a job that had begun before we looked."""
        self._is_starting = state.get("state") in _BEFORE
        started = [task["name"] for task in state.get("tasks", ()) if task.get("state") not in (None, facts.PENDING)]
        self._done[START].update(map(str, started))
        return []

    def _take_copy(self, progress: Mapping[str, Any], now: float) -> list[str]:
        self._synced = f"{progress['ready']}/{progress['hosts']}"
        self._sync_text = progress["detail"] or self._sync_text
        self._passed_at[SYNC] = now
        return []

    # ------------------------------------------------------------------ words

    def _totals(self) -> tuple[int, int]:
        if not self._known[0]:
            self._known = self._counts()
        return self._known

    def _phases(self) -> list[str]:
        places, tasks = self._totals()
        connected, checked, started = (len(self._done[phase]) for phase in (CONNECT, CHECK, START))
        words = [f"{CONNECT} {_of(connected, places)}"] if connected or places else []
        if connected or checked:
            words.append(f"{CHECK} {_of(checked, places)}")
        if self._synced:
            words.append(f"{SYNC} {self._synced}" + (f" ({self._sync_text})" if self._sync_text else ""))
        if started:
            words.append(f"{START} {_of(started, tasks)}")
        return words

    def _summary(self, begun: float, now: float) -> str:
        """Return the line that stays when all tasks run: how long each phase took."""
        places, tasks = self._totals()
        at, words = begun, []
        for phase in (CONNECT, CHECK, SYNC, START):
            passed = self._passed_at.get(phase)
            if passed is None or (phase == SYNC and not self._synced):
                continue
            detail = f" ({self._sync_text})" if phase == SYNC and self._sync_text else ""
            words.append(f"{phase} {max(0.0, passed - at):.1f} s{detail}")
            at = max(at, passed)
        tasks = tasks or len(self._done[START])
        places = places or len(self._done[CONNECT])
        where = f" on {places} hosts" if places > 1 else ""
        how = f" ({self._separator.join(words)})" if words else ""
        return f"{formats.number_of(tasks, 'task')}{where} started in {max(0.0, now - begun):.1f} s{how}"


def _of(done: int, count: int) -> str:
    return f"{done}/{count}" if count else str(done)
