"""The stop sequence of a job: which tasks are signalled when, and when an agent may end. No side effects.

Levels follow each other, each harder than the one before: OPEN, ASK_WORKERS, ASK_ALL, KILL_ALL.
"""

from __future__ import annotations

from typing import List, Optional

from distrun_runtime.contract.plan import SCHEDULER, SERVER, WORKER, Limits
from distrun_runtime.coordinator.actions import WARNING, Action, Announce, Drop, EndAgent, Steps, StopTasks
from distrun_runtime.coordinator.roster import HostState, JobRoster

OPEN = 0
ASK_WORKERS = 1
"""INT to the workers; the servers stay until those have ended."""
ASK_ALL = 2
"""TERM to everything."""
KILL_ALL = 3

LINGER_S = 3.0
"""How long servers that are the user's own command may take to end by themselves after the workers."""
MARGIN_S = 5.0
"""Past the last step, an agent that has not reported is awaited for so long."""
BYE_S = 5.0
"""From `end` to `bye`; the agent itself gives up at 3 s."""
ABSENT_S = 2.0
"""The same for an agent that never answered."""
OUTPUT_S = 10.0
"""How long the rest of the output may make no progress."""
INTERRUPTED_OUTPUT_S = 3.0
"""After an interrupt: how long the rest of the output is waited for, though it comes."""
SILENT_S = 5.0
"""After a success, a host that has been silent for so long is waited for until it is lost: it may have output still."""

LOOK_S = 0.1
"""While many hosts report that they are done, all are looked at so often; each at once when it reports."""

_ORDER = {WORKER: 0, SERVER: 1, SCHEDULER: 2}


class JobStopSequence:
    """Ends one job. It starts when `linger` or `escalate` is called."""

    def __init__(self, roster: JobRoster, limits: Limits) -> None:
        self._roster = roster
        self._limits = limits
        self.level = OPEN
        self._is_success = False
        self.is_interrupted = False
        """The user has ended the job: who floods is not waited for."""
        self._linger_until = 0.0
        self._deadline = 0.0
        self._looked = (-1, 0.0)
        """The level and the time when all hosts were last looked at."""
        self._until: Optional[float] = None
        """When the grace time of a Ctrl-C is over."""

    def steps(self, level: int, now: float) -> Steps:
        """Return the steps of a level."""
        grace = self._limits.grace_s
        if level == ASK_WORKERS:
            # Shares of the one grace time, so that with the servers' turn after them all is over when it is.
            return (("INT", 0.7 * grace), ("TERM", 0.2 * grace), ("KILL", 0.0))
        if level == ASK_ALL:
            left = grace if self._until is None else max(self._until - now, 0.1 * grace)
            return (("TERM", left), ("KILL", 0.0))
        return (("KILL", 0.0),)

    def linger(self, now: float, linger_s: float) -> None:
        """Begin the end of a job whose workers are done: what is left is asked to go `linger_s` from now."""
        self._is_success = True
        self._linger_until = now + linger_s

    def escalate(self, level: int, now: float) -> List[Action]:
        """Return the stops of `level`, unless something as hard is under way."""
        if level <= self.level:
            return []
        self.level = level
        if level == ASK_WORKERS:
            self._until = now + self._limits.grace_s
        steps = self.steps(level, now)
        self._deadline = now + sum(wait_s for _, wait_s in steps) + MARGIN_S
        actions: List[Action] = []
        for host in self._roster.hosts.values():
            # Workers go before servers, servers before the scheduler: a task should not see a peer die that it needs.
            tasks = sorted(self._roster.on_host(host.name), key=lambda task: _ORDER[task.role])
            if level == ASK_WORKERS:
                tasks = [task for task in tasks if task.role == WORKER]
            else:
                host.told_to_stop, host.cleared = True, False
            # Tasks that ended already are named too: what they left behind goes with them.
            if tasks and not host.is_gone and not host.was_ended:
                actions.append(StopTasks(host.name, tuple(task.name for task in tasks), steps))
        return actions

    def advance(self, now: float, host: str = "") -> List[Action]:
        """Return what is due: the next level, ends of agents whose tasks are gone, channels to give up.

        `host`: only it has said something since the last call. The others, of which there may be thousands, are not
        looked at if they were less than LOOK_S ago.
        """
        actions: List[Action] = []
        lingered = self.level == OPEN and (self._roster.all_over or now >= self._linger_until)
        if lingered or (self.level == ASK_WORKERS and (self._roster.workers_over or now >= self._deadline)):
            actions += self.escalate(ASK_ALL, now)
        level, when = self._looked
        is_all = not host or level != self.level or now >= when + LOOK_S
        if is_all:
            self._looked = (self.level, now)
        for state in self._roster.hosts.values() if is_all else (self._roster.hosts[host],):
            actions += self._end(state, now)
        return actions

    def _end(self, host: HostState, now: float) -> List[Action]:
        """Return what ends the agent of a host, or gives it up, if it is time."""
        if host.is_gone:
            return []
        if host.was_ended:
            is_awaited = host.is_cut and self.level < KILL_ALL  # until it is reached again, or lost
            if now < host.ended_at + (BYE_S if host.greeted else ABSENT_S) or is_awaited:
                return []
            host.is_gone = True
            self._survive(host)
            return [Drop(host.name)]
        if not self._may_end(host, now):
            return []
        host.ended_at = now
        missing = self._roster.undrained(host.name)
        if missing and self.is_interrupted:
            text = f"the last output of {', '.join(missing)} is not waited for"
            return [Announce(text, WARNING), EndAgent(host.name)]
        return [EndAgent(host.name)]

    @property
    def is_over(self) -> bool:
        """Whether no agent is left."""
        return self._roster.all_gone

    def _may_end(self, host: HostState, now: float) -> bool:
        if self.level < ASK_ALL:
            return False
        tasks = self._roster.on_host(host.name)
        if not tasks:
            return True
        silence = now - host.last_seen
        if self._is_success and self.level < KILL_ALL and silence >= min(SILENT_S, self._limits.suspect_s):
            return False
        if now >= self._deadline + OUTPUT_S:
            return True
        if not (host.cleared and all(task.is_over for task in tasks)) and now < self._deadline:
            return False
        if host.over_at < 0:
            host.over_at = now
        if self.is_interrupted and now >= host.over_at + INTERRUPTED_OUTPUT_S:
            return True
        return self._roster.is_drained(host.name) or now >= host.last_output + OUTPUT_S

    def _survive(self, host: HostState) -> None:
        for task in self._roster.on_host(host.name):
            if not task.is_over:
                self._roster.survivors.append("{} (pid {}) on {}".format(task.name, task.pid or "unknown", host.name))
        if host.greeted:
            self._roster.survivors.append(f"the agent on {host.name}")
