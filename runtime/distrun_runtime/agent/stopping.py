"""Stops tasks and every process that belongs to them: a stop sequence is signals with times between them.

The agent's loop calls `Stopping.step` when `next_at` has come, or when a child died. Nothing here waits.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Set, Tuple

from distrun_runtime.agent.processes import JOB, RunningTask, owners
from distrun_runtime.contract import process
from distrun_runtime.contract.facts import GIVE_UP_S
from distrun_runtime.contract.plan import SCHEDULER, SERVER, WORKER
from distrun_runtime.contract.process import Process
from distrun_runtime.errors import ContractError

LOOK_S = 0.5
"""Interval of looks at the process table while something is being stopped (a child's death makes it sooner)."""
PORTABLE_LOOK_S = 0.25
_SHORTEST_LOOK_S = 0.01
"""The shortest interval, however fast children die."""
KILL = "KILL"
REPEAT_S = 0.25
"""KILL is repeated at this interval until nothing is left: what was being forked may have escaped it."""

_ORDER = (WORKER, SERVER, SCHEDULER)


class Stopping:
    """The tasks that are being stopped, each with its stop sequence."""

    def __init__(self, marks: Mapping[str, str], tasks: Dict[str, RunningTask], is_subreaper: bool) -> None:
        """`tasks`: every task that was started, by name. `marks`: what processes of the job are known by here."""
        self.left: List[Process] = []
        """What still existed at the last look and should not have."""
        self._marks = marks
        self._tasks = tasks
        self._is_subreaper = is_subreaper
        self._sequences: Dict[str, StopSequence] = {}
        self._named: Set[str] = set()
        self._owes_report = False
        self._look_at = math.inf
        self._looked_at = -math.inf
        self._interval_s = LOOK_S if is_subreaper else PORTABLE_LOOK_S

    @property
    def next_at(self) -> float:
        """When `step` should be called next."""
        return min([self._look_at] + [sequence.next_at for sequence in self._sequences.values()])

    @property
    def is_over(self) -> bool:
        """Nothing is being stopped."""
        return not self._sequences

    def stop(self, names: Iterable[str], sequence: StopSequence) -> None:
        """Stop tasks (those that run, and what those that ended left behind).

        A task that is being stopped already keeps its sequence unless the new one kills earlier. When every task that
        was ever started has been named, the whole job is stopped here, with processes of no task, and a report is owed.
        """
        for name in names:
            if name in self._tasks:
                self._sequences[name] = harsher(self._sequences.get(name), sequence)
                self._named.add(name)
        if self._named >= set(self._tasks):
            self._sequences[JOB] = harsher(self._sequences.get(JOB), sequence)
            self._owes_report = True
        self._look_at = -math.inf

    def hurry(self) -> None:
        """Look at the process table at the next step: a child died."""
        if self._sequences:
            self._look_at = self._looked_at + _SHORTEST_LOOK_S

    def step(self, now: float) -> Optional[List[Process]]:
        """Send what is due; return, once after a stop of the whole job, what is left of it (nothing, as a rule)."""
        if not self._sequences or now < self.next_at:
            return None
        owned = self.look()
        self._looked_at, self._look_at = now, now + self._interval_s
        last = max(sequence.gives_up_at for sequence in self._sequences.values())
        for name in sorted(self._sequences, key=self._turn):
            self._sequences[name], number = self._sequences[name].due(now)
            if number is not None:
                deliver(self._tasks.get(name), owned.get(name, []), number)
            if name != JOB and self._tasks[name].is_reaped and not owned.get(name):
                del self._sequences[name]
        self.left = [row for name in self._named | {JOB} for row in owned.get(name, [])]
        is_reaped = all(self._tasks[name].is_reaped for name in self._named)
        if JOB in self._sequences:
            if (self.left or not is_reaped or len(self._sequences) > 1) and now < last:
                return None
            self._sequences.clear()
        elif now >= last:
            self._sequences.clear()
        if not self._sequences:
            self._look_at = math.inf
            if self._owes_report:
                self._owes_report = False
                return self.left
        return None

    def look(self) -> Dict[str, List[Process]]:
        """Return every living process of the job on this host, by task."""
        rows = process.table()
        me = os.getpid()
        not_ours = process.ancestors(me, rows) | {me}
        if self._is_subreaper:
            others = process.descendants([me], rows)
        else:
            others = process.marked(self._marks, [row for row in rows if row.pid not in not_ours])
        families = [task.processes for task in self._tasks.values()]
        return owners(rows, families, others, lambda row: self.task_of(row.pid), not_ours)

    def _turn(self, name: str) -> int:
        """Return when it is the turn of `name`: workers before what they need, processes of no task last."""
        return len(_ORDER) if name == JOB else _ORDER.index(self._tasks[name].task.role)

    def task_of(self, pid: int) -> str:
        """Return the task that a process's environment names; empty if none."""
        env = process.environ_of(pid)
        if not process.has_marks(env, self._marks):
            return ""
        for name, running in self._tasks.items():
            if (running.task.role, str(running.task.rank)) == (env.get("DISTRUN_ROLE"), env.get("DISTRUN_RANK")):
                return name
        return ""


def deliver(task: Optional[RunningTask], rows: Iterable[Process], number: int) -> None:
    """Send a signal once to each of `rows` and, in one go, to the task's group; continue what is stopped."""
    group = 0
    if task is not None and not task.is_reaped:
        # Until it is reaped its id is its own, and so is its group's: the signal reaches even what is being forked.
        group = task.leader.pid
        task.was_signalled = True
    rows = list(rows)
    for each in (number,) if number == signal.SIGKILL else (number, signal.SIGCONT):
        if group:
            signal_group(group, each)
        for row in rows:
            if not group or row.pgid != group:
                with contextlib.suppress(OSError):  # another user's by now (set-user-id): it is reported as left
                    process.send_signal(row.identity, each)


def signal_group(group: int, number: int) -> None:
    """Send a signal to a process group; a group that no longer exists is no error."""
    with contextlib.suppress(OSError):
        os.killpg(group, number)


class StopSequence(NamedTuple):
    """Signals and when they are sent. No clock and no side effects: the caller passes the time."""

    steps: Tuple[Tuple[str, float], ...]
    """(name without SIG, seconds until the next step)."""
    began: float
    sent: int = 0
    """Steps that were sent already; a repeated KILL counts each time."""

    @property
    def kill_at(self) -> float:
        """When the first KILL is sent; infinite if none is."""
        at = self.began
        for name, wait_s in self.steps:
            if name == KILL:
                return at
            at += wait_s
        return math.inf

    @property
    def next_at(self) -> float:
        """When the next signal is due; infinite after a last step that is not KILL."""
        if self.sent < len(self.steps):
            return self.began + sum(wait_s for _, wait_s in self.steps[: self.sent])
        if self.steps[-1][0] == KILL:
            return self.kill_at + (self.sent - len(self.steps) + 1) * REPEAT_S
        return math.inf

    @property
    def gives_up_at(self) -> float:
        """When the wait for what is left ends."""
        last = self.began + sum(wait_s for _, wait_s in self.steps)
        return self.kill_at + GIVE_UP_S if self.kill_at < math.inf else last

    def due(self, now: float) -> Tuple[StopSequence, Optional[int]]:
        """Return the sequence after this step, and the number of the signal to send now, if one is due.

        If several steps are overdue, only the last of them is sent.
        """
        sequence, name = self, None
        while sequence.next_at <= now:
            name = sequence.steps[min(sequence.sent, len(sequence.steps) - 1)][0]
            sent = sequence.sent + 1
            if sequence.sent >= len(sequence.steps):
                # Repeats that were missed are skipped.
                sent = max(sent, len(sequence.steps) + int((now - sequence.kill_at) / REPEAT_S))
            sequence = sequence._replace(sent=sent)
        return sequence, None if name is None else signal_number(name)


def parse(steps: Iterable[Any], now: float) -> StopSequence:
    """Return the stop sequence of `[["TERM", 10.0], ["KILL", 0]]`, beginning now.

    Raises:
        ContractError: no step, an unknown signal, or a time that is not a number of seconds.
    """
    try:
        checked = tuple((_signal(name).name[3:], float(wait_s)) for name, wait_s in steps)
    except (TypeError, ValueError) as err:
        raise ContractError(f"a stop sequence is [[SIGNAL, seconds], ...]: {err}") from err
    if not checked or any(not wait_s >= 0 for _, wait_s in checked):
        raise ContractError(f"a stop sequence has at least one step and no negative time: {checked!r}")
    return StopSequence(checked, now)


def gentle(grace_s: float, now: float) -> StopSequence:
    """Return TERM, `grace_s` seconds, KILL."""
    return StopSequence((("TERM", grace_s), (KILL, 0.0)), now)


def kill(now: float) -> StopSequence:
    """Return KILL."""
    return StopSequence(((KILL, 0.0),), now)


def harsher(current: Optional[StopSequence], new: StopSequence) -> StopSequence:
    """Return the one whose KILL comes first."""
    return new if current is None or new.kill_at < current.kill_at else current


def signal_number(name: Any) -> int:
    """Return the number of a signal that is given by name, with or without SIG.

    Raises:
        ContractError: this system has no such signal.
    """
    return int(_signal(name))


def _signal(name: Any) -> signal.Signals:
    text = str(name).upper()
    try:
        return signal.Signals[text if text.startswith("SIG") else "SIG" + text]
    except KeyError:
        raise ContractError(f"no signal is called {name!r} here; write it as TERM, INT or KILL") from None
