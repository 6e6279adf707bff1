"""Detects the conditions of workers: waiting, stalled, straggler. No side effects.

waiting     It reported that it waits in the store: for whom, for which key, and since when.
stalled     For the time that the user set, it wrote no output, reported nothing, called nothing in the store, read and
            wrote no file, and used less than STALLED_CPU of a core. CPU is a mean over CPU_S, because the system counts
            in ticks of 10 ms and one tick a second already reaches the limit. A worker that waits is not stalled.
straggler   By a server's clock, it came last in LAST_ROUNDS of the last LAG_ROUNDS sampled rounds, with a median lag of
            more than LAG_SHARE of the median round and more than LAG_S.

A task has at most one condition; the first that applies counts. Conditions do not end tasks. A condition is recorded
only after it has lasted for a while: waiting is common, and recording every change of a thousand workers would fill the
disk.
"""

from __future__ import annotations

from collections import deque
from typing import Deque, Dict, List, NamedTuple, Optional, Tuple

from distrun_runtime.contract import facts, words
from distrun_runtime.contract.duration import duration
from distrun_runtime.contract.metrics import LAG_ROUNDS
from distrun_runtime.contract.plan import WORKER
from distrun_runtime.coordinator.metrics import TaskNumbers, Wait

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
MINUTE_S = 60.0


class Change(NamedTuple):
    """A changed condition of a task, for events.jsonl."""

    task: str
    condition: str
    """Empty: it is like any other again."""
    why: str
    """One line."""


class _Watched:
    """What is known of one worker."""

    __slots__ = ("alive_at", "behind", "condition", "lived", "signs", "told", "used")

    def __init__(self, now: float) -> None:
        self.alive_at = now
        """When it last gave a sign of life."""
        self.signs: Tuple[Optional[float], ...] = ()
        """What changes with every sign of life."""
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
        self._waits: Dict[str, Wait] = {}
        self._budget = TOLD_A_MINUTE
        self._minute = 0.0

    def take(self, task: TaskNumbers, now: float) -> List[Change]:
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
        watched.lived = now
        if task.wait is not None:
            self._waits[task.name] = task.wait
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

    def end(self, task: str) -> List[Change]:
        """Record the end of a task; return the changes to report."""
        watched = self._watched.pop(task, None)
        self._waits.pop(task, None)
        for each in self._watched.values():
            each.keep_up(task)
        return [Change(task, "", "it has ended")] if watched is not None and watched.told else []

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
        if watched.condition == facts.WAITING:
            return _waits(self._waits[task.name], task.stamp)
        if watched.condition == facts.STALLED:
            silent_s = watched.lived - watched.alive_at
            return f"no output, report, store call, disk or CPU for {duration(round(silent_s))}"
        server, why = max(watched.behind.items())
        return f"{why} (seen by {server})"

    def _told(self, task: TaskNumbers, watched: _Watched, now: float) -> List[Change]:
        condition = watched.condition
        if condition == facts.WAITING and task.stamp - self._waits[task.name].since < TOLD_WAIT_S:
            condition = ""
        if condition == watched.told or not self._may_tell(condition, now):
            return []
        watched.told = condition
        return [Change(task.name, condition, self._why(task, watched) if condition else "")]

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
    return f"has waited {duration(round(max(0.0, stamp - wait.since)))} for {words.listed(wait.whom, 3)}{call}"
