"""End tasks and everything that belongs to them: ladders, looks at the process table, signals.

The agent's loop calls `step` when `next_at` has come, or when a child died; nothing here waits.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from typing import Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from distrun_runtime.agent import ladder as ladders
from distrun_runtime.agent import members
from distrun_runtime.agent.ladder import Ladder
from distrun_runtime.agent.tasks import Running
from distrun_runtime.contract import process
from distrun_runtime.contract.plan import SCHEDULER, SERVER, WORKER
from distrun_runtime.contract.process import Process

LOOK_S = 0.5
"""So often the process table is looked at while something is being ended (a child's death makes it sooner)."""
PORTABLE_LOOK_S = 0.25
_CLOSEST_S = 0.01
"""Never more often than this, however fast children die."""

_ORDER = (WORKER, SERVER, SCHEDULER)


class Marks(NamedTuple):
    """What the environments of a job's processes on this host say."""

    job: str
    host: str


class Ending:
    """What is being ended, and how far that is."""

    def __init__(self, marks: Marks, running: Dict[str, Running], is_subreaper: bool) -> None:
        self.left: List[Process] = []
        """What was there at the last look and should not have been."""
        self._marks = marks
        self._running = running
        self._is_subreaper = is_subreaper
        self._ladders: Dict[str, Ladder] = {}
        self._named: Set[str] = set()
        self._owes_report = False
        self._look_at = math.inf
        self._looked_at = -math.inf
        self._every_s = LOOK_S if is_subreaper else PORTABLE_LOOK_S

    @property
    def next_at(self) -> float:
        """When `step` should be called next."""
        return min([self._look_at] + [ladder.next_at for ladder in self._ladders.values()])

    @property
    def is_over(self) -> bool:
        """Nothing is being ended."""
        return not self._ladders

    def stop(self, names: Iterable[str], ladder: Ladder) -> None:
        """End tasks (those that run, and what those that are over left behind).

        A task that is being ended already keeps its ladder unless the new one kills earlier. Once every task that
        was ever started has been named, the whole job is being ended here: its strays too, and a report is owed.
        """
        for name in names:
            if name in self._running:
                self._ladders[name] = ladders.harsher(self._ladders.get(name), ladder)
                self._named.add(name)
        if self._named >= set(self._running):
            self._ladders[members.JOB] = ladders.harsher(self._ladders.get(members.JOB), ladder)
            self._owes_report = True
        self._look_at = -math.inf

    def hurry(self) -> None:
        """Look at the table at the next step: a child died."""
        if self._ladders:
            self._look_at = self._looked_at + _CLOSEST_S

    def step(self, now: float) -> Optional[List[Process]]:
        """Send what is due; return, once after a stop of the whole job, what is left of it (nothing, as a rule)."""
        if not self._ladders or now < self.next_at:
            return None
        owned = self.look()
        self._looked_at, self._look_at = now, now + self._every_s
        last = max(ladder.gives_up_at for ladder in self._ladders.values())
        for name in sorted(self._ladders, key=self._turn):
            ladder, signal_name = ladders.due(self._ladders[name], now)
            self._ladders[name] = ladder
            if signal_name is not None:
                deliver(self._running.get(name), owned.get(name, []), ladders.signal_number(signal_name))
            if name != members.JOB and self._running[name].is_reaped and not owned.get(name):
                del self._ladders[name]
        self.left = [row for name in self._named | {members.JOB} for row in owned.get(name, [])]
        is_reaped = all(self._running[name].is_reaped for name in self._named)
        if members.JOB in self._ladders:
            if (self.left or not is_reaped or len(self._ladders) > 1) and now < last:
                return None
            self._ladders.clear()
        elif now >= last:
            self._ladders.clear()
        if not self._ladders:
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
            strays = process.descendants([me], rows)
        else:
            strays = process.marked(
                {"DISTRUN_JOB_ID": self._marks.job, "DISTRUN_HOST": self._marks.host},
                [row for row in rows if row.pid not in not_ours],
            )
        families = [running.family for running in self._running.values()]
        return members.sort_out(rows, families, strays, self._task_of, not_ours)

    def _turn(self, name: str) -> int:
        """Return when it is the turn of `name`: who needs others goes before them, strays go last."""
        return len(_ORDER) if name == members.JOB else _ORDER.index(self._running[name].task.role)

    def _task_of(self, row: Process) -> str:
        env = process.environ_of(row.pid)
        if env.get("DISTRUN_JOB_ID") != self._marks.job or env.get("DISTRUN_HOST") != self._marks.host:
            return ""
        for name, running in self._running.items():
            if (running.task.role, str(running.task.rank)) == (env.get("DISTRUN_ROLE"), env.get("DISTRUN_RANK")):
                return name
        return ""


def deliver(running: Optional[Running], rows: Iterable[Process], number: int) -> None:
    """Send a signal once to each of `rows` and, in one go, to the task's group; wake what is stopped."""
    group = 0
    if running is not None and not running.is_reaped:
        # Until it is reaped its id is its own, and with it the group's: even what is just being forked is hit.
        group = running.leader.pid
        running.was_signalled = True
    rows = list(rows)
    for each in (number,) if number == signal.SIGKILL else (number, signal.SIGCONT):
        if group:
            signal_group(group, each)
        for row in rows:
            if not group or row.pgid != group:
                try:
                    process.send_signal(row.identity, each)
                except OSError:
                    continue  # not ours to signal any more (set-user-id): it is reported as left


def signal_group(group: int, number: int) -> None:
    """Send a signal to a process group; one that is gone is no error."""
    with contextlib.suppress(OSError):
        os.killpg(group, number)


def described(rows: Iterable[Process]) -> List[Dict[str, object]]:
    """Return processes as the `cleared` message names them."""
    return [{"pid": row.pid, "command": process.command_of(row.pid)} for row in rows]


def known(running: Iterable[Running]) -> Tuple[process.Identity, ...]:
    """Return the processes of tasks, other than their leaders, as far as they were seen."""
    found = {who for each in running for who in each.family.known if who != each.leader}
    return tuple(sorted(found))
