r"""The supervisor: events in, actions out. It decides what to start, what a death means and when all is over.

Pure but for its own memory: no clock, no socket, no printing. `now` is any monotonic clock in seconds. Who is to
blame is `verdict`, how the job is brought to its end is `closing`. The phases:

    gathering -> [preparing] -> [settling] -> starting -> running -> draining (all workers ended with 0) -> over
            \----------\------------\-----------\----------\--> stopping (something ended the job)   -> over

gathering: agents answer, and look whether their hosts can be used; nothing is started anywhere before all can.
preparing: what must be there before tasks start is brought to the hosts (`Prepare`).
settling: agents activate and look at what came with it; a host that cannot be used ends the job as in gathering.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

from distrun_runtime.contract import plan as plans
from distrun_runtime.contract.duration import duration
from distrun_runtime.contract.plan import SCHEDULER, WORKER, Plan
from distrun_runtime.coordinator import closing, events, verdict
from distrun_runtime.coordinator import outcome as ends
from distrun_runtime.coordinator.actions import DEBUG, WARNING, Action, Finish, Spawn
from distrun_runtime.coordinator.agentwatch import (
    ASKING,
    DRAINING,
    OVER,
    PREPARING,
    RUNNING,
    STARTING,
    STOPPING,
    UNDECIDED,
    AgentWatch,
)
from distrun_runtime.coordinator.verdict import Cause

PATIENCE_S = 5.0
"""A start that takes longer is commented on; again every 10 s."""
SLEPT_S = 5.0
"""A longer gap between two events means that we slept (the loop ticks more often), not that agents are silent. With a
short `suspect_s`: half of it."""
SILENT_S = 8.0
"""A host silent for so long, or suspect, is believed to be the cause when tasks elsewhere die of a lost peer."""
FAILING_S = 5.0
"""How long a task that said that it fails may take to end, while others have died of its loss already."""


class Supervisor(AgentWatch):
    """One job's supervisor. `handle` is all there is to call; a Tick must come first, then one each `wake_s`."""

    def __init__(self, plan: Plan, has_preparation: bool = False) -> None:
        super().__init__(plan, has_preparation)
        self._closing = closing.Closing(self.roster, plan.limits)
        self._inquest = verdict.Inquest(plan.limits.verdict_s)
        self._origin: Optional[float] = None
        self._start_from = 0.0
        """From when on the start's time limit counts."""
        self._comment_at = 0.0
        self._early_until: Optional[float] = None
        self._bereaved_at: Optional[float] = None
        """When the first task died of a lost peer, while nothing was known that it died of."""
        self._interrupts = 0
        worker_commands = {task.argv for task in plan.of_role(WORKER)}
        # `--ps command`: servers are the user's own program and are expected to end by themselves.
        self._own_servers = not any(task.argv in worker_commands for task in plan.tasks if task.role != WORKER)

    @property
    def job_state(self) -> str:
        """The job's state in the words of the job store; meaningless once it is over (`Outcome.job_state`)."""
        return ends.RUNNING if self.phase == RUNNING else ends.STARTING if self.phase in UNDECIDED else ends.STOPPING

    def handle(self, event: events.Event, now: float) -> List[Action]:
        """Return what is to be done about `event`. After `Finish` there is nothing more."""
        if self.phase == OVER:
            return []
        if self._origin is None:
            self._origin = self._start_from = now
            self._comment_at = now + PATIENCE_S
        elif now - self._now > min(SLEPT_S, self.plan.limits.suspect_s / 2):
            self.roster.forgive(now - self._now)
        self._now = now
        self._actions = []
        if self.roster.knows(event):
            self._hear(event)
            handler = _HANDLERS.get(type(event))
            if handler is not None:
                handler(self, event)
        else:
            what = (getattr(event, "host", "?"), type(event).__name__, getattr(event, "task", ""))
            self._say("%s sent %s of %r, which is not a task of that host; ignored" % what, WARNING)
        self._advance()
        return self._actions

    def wake_s(self) -> float:
        """Return after how many seconds at most the next Tick is wanted."""
        if self.phase in (DRAINING, STOPPING):
            return 0.1
        due = [self._now + min(1.0, self.plan.limits.suspect_s / 4)]
        if self._origin is not None and self.plan.limits.timeout_s is not None:
            due.append(self._origin + self.plan.limits.timeout_s)
        if self._origin is not None and self.phase in (*ASKING, STARTING):
            due.append(self._start_from + self.plan.limits.start_s)
        if self.phase in ASKING and self._preflight.until is not None:
            due.append(self._preflight.until)
        if self._early_until is not None:
            due.append(self._early_until)
        if self._bereaved_at is not None and self._cause_until(self._bereaved_at) > self._now:
            due.append(self._cause_until(self._bereaved_at))
        return max(0.0, min(due) - self._now)

    # ------------------------------------------------------------------ tasks

    def _on_started(self, event: events.Started) -> None:
        task = self.roster.tasks[event.task]
        if not task.is_over:
            started = event.time + self.roster.hosts[event.host].skew_s
            self.roster.change(event.task, state=ends.RUNNING, pid=event.pid, started=started)

    def _on_published(self, event: events.Published) -> None:
        task = self.roster.tasks[event.task]
        if task.role == SCHEDULER:
            for name in ("address", "port"):
                if name in event.values:
                    self.roster.facts["scheduler.%s" % name] = str(event.values[name])
        if task.is_over or task.own_failure or task.lost_peer or event.stopped:
            return  # what it says or loses on its way out is no cause of its end
        time = event.time + self.roster.hosts[event.host].skew_s
        if event.values.get("lost_peer"):
            message = str(event.values.get("message", ""))
            self.roster.change(event.task, lost_peer=str(event.values["lost_peer"]), reason=message)
            self._inquest.hear_loss(event.task, time)
        elif event.values.get("failed"):
            why = str(event.values["failed"])
            self.roster.change(event.task, own_failure=why, reason=why)
            self._inquest.hear_failing(event.task, time)
        elif event.values.get("told"):
            self.roster.change(event.task, reason="it was asked to end by %s, not by distrun" % event.values["told"])

    def _on_output(self, event: events.Output) -> None:
        self.roster.received(event)
        self.roster.hosts[event.host].last_output = self._now

    def _on_exited(self, event: events.Exited) -> None:
        task = self.roster.tasks[event.task]
        if task.is_over:
            return
        code = ends.exit_code(event.code, event.signal)
        state = ends.STOPPED if event.stopped else ends.FAILED if code else ends.EXITED
        host = self.roster.hosts[event.host]
        host.last_output = self._now
        self.roster.expect(event.task, event.out, event.err)
        task = self.roster.change(
            event.task,
            state=state,
            code=event.code,
            signal=event.signal,
            ended=event.time + host.skew_s,
            reason=event.reason or task.reason,
            max_rss_kb=event.max_rss_kb,
            cpu_s=event.cpu_s,
        )
        self._say("%s on %s ended: %s" % (task.name, task.host, _how(task)), DEBUG)
        if state == ends.FAILED:
            self._on_failure(task)
        elif state == ends.STOPPED and self.phase in (STARTING, RUNNING):
            why = "its agent ended %s without being told to, and did not say why" % task.name
            self._blame(verdict.host_lost(event.host, why, task.ended or 0.0))
        elif state == ends.EXITED and task.role != WORKER and self.phase in (STARTING, RUNNING):
            self._inquest.background.append(verdict.ended_early(task))
            if self._early_until is None:
                self._early_until = self._now + self.plan.limits.early_exit_s
        if state == ends.EXITED and task.own_failure:
            self._inquest.hear_recanted(task)

    def _on_failure(self, task: ends.TaskResult) -> None:
        if self.phase == DRAINING:
            self._say("%s on %s ended after the workers were done: %s" % (task.name, task.host, _how(task)), WARNING)
            return
        cause = verdict.task_failed(task)
        if task.lost_peer and self.phase in (STARTING, RUNNING):
            # Stopped now, the true culprit, still on its way out, would end by our signal. `_await_cause` goes on.
            self._inquest.hear(cause, self._now)
            if self._bereaved_at is None:
                self._bereaved_at = self._now
        else:
            self._blame(cause)

    def _cause_until(self, since: float) -> float:
        """Return until when the cause of a consequence that came at `since` is awaited."""
        failing = any(task.own_failure and not task.is_over for task in self.roster.tasks.values())
        return since + (FAILING_S if failing else self.plan.limits.verdict_s)

    def _await_cause(self) -> None:
        """Stop the job for a consequence, when its cause is known or not to be expected any more."""
        if self._bereaved_at is None:
            return
        self._note_silence()
        cause = self._inquest.choose(self.roster.tasks, self.roster.silent)
        if cause is None:
            return
        is_known = cause.reason == ends.HOST_LOST or cause in self._inquest.background
        is_late = self._now >= self._cause_until(self._bereaved_at) and not self._is_in_doubt(self._bereaved_at)
        if is_known or self.roster.all_over or is_late:
            self._end(cause, closing.ASK_ALL)

    def _note_silence(self) -> None:
        """Note which hosts have been silent for so long that they explain what tasks elsewhere lost."""
        limit_s = min(SILENT_S, self.plan.limits.suspect_s)
        for host in self.roster.hosts.values():
            silence_s = self._now - host.last_seen
            if host.greeted and not host.is_gone and silence_s >= limit_s:
                host.silence_s = silence_s

    def _is_in_doubt(self, since: float) -> bool:
        """Whether a host that has tasks which others lost has not been heard since: it may be lost itself."""
        hosts = {self.roster.tasks[name].host for name in self._inquest.roots(self.roster.tasks)}
        return any(self.roster.hosts[name].last_seen < since and not self.roster.hosts[name].is_gone for name in hosts)

    # ------------------------------------------------------------------ ends

    def _on_interrupt(self, event: events.Interrupt) -> None:
        self._interrupts += 1
        cause = verdict.interrupted(event.signal, event.time)
        again = self.phase == DRAINING or self._interrupts > 1
        if self.phase == STOPPING and event.signal == "INT" and not again:
            self._say("the job is being stopped already; press Ctrl-C again to kill what is left", WARNING)
        elif event.signal == "INT" and again:
            self._say("killing what is left", WARNING)
            self._blame(cause, closing.KILL_ALL)
        elif event.signal == "INT":
            grace = duration(self.plan.limits.grace_s)
            self._say("%s: workers have %s to end; Ctrl-C again kills them now" % (cause.text, grace), WARNING)
            self._blame(cause, closing.ASK_WORKERS)
        else:
            self._say("%s: stopping all tasks" % cause.text, WARNING)
            self._blame(cause, closing.ASK_ALL)

    def _blame(self, cause: Cause, level: int = closing.ASK_ALL) -> None:
        """Record what may turn out to end the job, and stop it (harder, if it is being stopped)."""
        if self.phase in ASKING and not self._preflight.is_clean and not cause.problems:
            # Something else ends the wait for the other hosts; what is known of the bad ones came before it.
            self._inquest.hear(self._preflight.verdict(), self._now)
        if self.phase != DRAINING:  # the workers have succeeded: nothing changes that
            self._inquest.hear(cause, self._now)
        self._end(cause, level)

    def _end(self, cause: Cause, level: int) -> None:
        self._inquest.close(self._now)
        if self.phase in UNDECIDED:
            if cause.reason not in (ends.INTERRUPTED, ends.TERMINATED):
                self._say("%s; stopping the job" % (cause.short or cause.text), WARNING)
            self.phase = STOPPING
        if cause.is_failure and self._closing.level != closing.OPEN:
            return  # a death while the workers are being asked to end is no reason to hurry them
        self._actions += self._closing.escalate(level, self._now)

    def _on_tick(self, event: events.Tick) -> None:
        limits = self.plan.limits
        passed, starting = self._now - (self._origin or 0.0), self._now - self._start_from
        self._listen(event)
        if self.phase not in UNDECIDED:
            return
        if limits.timeout_s is not None and passed >= limits.timeout_s:
            is_running = self.phase == RUNNING
            names = self.roster.unfinished() if is_running else self.roster.missing()
            self._blame(verdict.timed_out(limits.timeout_s, event.time, names, is_running))
        elif self._early_until is not None and self._now >= self._early_until:
            self._blame(self._inquest.first_early(self.roster.tasks))
        elif self.phase not in (*ASKING, STARTING):
            return
        elif starting >= limits.start_s and self._preflight.is_clean:
            self._blame(verdict.start_too_slow(limits.start_s, self.roster.missing(), event.time))
        elif starting >= limits.start_s:
            self._condemn()
        elif self._now >= self._comment_at:
            self._comment_at = self._now + 2 * PATIENCE_S
            self._say("waiting for %s (%s)" % (verdict.listed(self.roster.missing()), duration(round(starting))))

    def _on_prepared(self, event: events.Prepared) -> None:
        if self.phase == PREPARING:
            self._settle()
            self._start_from = self._now
            self._comment_at = self._now + PATIENCE_S

    def _outcome(self) -> ends.Outcome:
        roster = self.roster
        return self._inquest.outcome(self.plan.job, roster.tasks, roster.survivors, roster.silent)

    def _advance(self) -> None:
        roster = self.roster
        if self.phase in ASKING:
            self._gather()
        if self.phase in (STARTING, RUNNING):
            for task in roster.spawnable():
                roster.spawned.add(task.name)
                roster.change(task.name, state=ends.STARTING)
                self._actions.append(Spawn(task.host, task.name, plans.resolve(task, roster.facts)))
            if self.phase == STARTING and roster.all_started:
                self.phase = RUNNING
                self._say("all tasks run", DEBUG)
            if verdict.workers_done(roster.tasks.values()) is not None:
                self.phase = DRAINING
                self._say("all workers succeeded", DEBUG)
                self._closing.linger(self._now, 0.0 if self._own_servers else closing.LINGER_S)
            else:
                self._await_cause()
        if self.phase in (DRAINING, STOPPING):
            self._actions += self._closing.advance(self._now)
            if self._closing.is_over:
                self.phase = OVER
                roster.settle()
                self._actions.append(Finish(self._outcome()))


def _how(task: ends.TaskResult) -> str:
    return "signal %s" % task.signal if task.signal is not None else "exit code %s" % task.code


_HANDLERS: Dict[type, Callable[[Supervisor, Any], None]] = {
    events.AgentHello: Supervisor._on_hello,
    events.Settled: Supervisor._on_settled,
    events.AgentReady: Supervisor._on_ready,
    events.Needed: Supervisor._on_needed,
    events.Prepared: Supervisor._on_prepared,
    events.PrepareFailed: Supervisor._on_prepare_failed,
    events.StartFailed: Supervisor._on_start_failed,
    events.Started: Supervisor._on_started,
    events.Published: Supervisor._on_published,
    events.Output: Supervisor._on_output,
    events.Exited: Supervisor._on_exited,
    events.Cleared: Supervisor._on_cleared,
    events.Warned: lambda supervisor, event: supervisor._say("%s: %s" % (event.host, event.text), WARNING),
    events.AgentEnding: Supervisor._on_agent_ending,
    events.Bye: Supervisor._on_bye,
    events.AgentLost: Supervisor._on_lost,
    events.Interrupt: Supervisor._on_interrupt,
    events.Tick: Supervisor._on_tick,
}
