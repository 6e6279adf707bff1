r"""The supervisor of a job: events in, actions out.

It decides what to start, what the death of a task or host means, and when the job is over. It has no clock, no socket
and prints nothing; `now` is any monotonic clock in seconds. It has two parts: `failures.FailureAnalysis` decides which
failure ended the job, `stopping.JobStopSequence` ends the tasks. The phases:

    gathering -> [preparing] -> [settling] -> starting -> running -> draining (all workers ended with 0) -> over
            \----------\------------\-----------\----------\--> stopping (something ended the job)   -> over

gathering: agents answer and check their hosts. No task is started on any host before all hosts are ready.
preparing: files that tasks need are copied to the hosts (`Prepare`).
settling: agents run `--activate` and check what was copied. An unusable host ends the job as in gathering.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, Union

from distrun_runtime.contract import agent_messages, facts, gpus, process, session
from distrun_runtime.contract import plan as plans
from distrun_runtime.contract.facts import duration
from distrun_runtime.contract.plan import SCHEDULER, SERVER, WORKER, Limits, Plan
from distrun_runtime.coordinator import failures, messages
from distrun_runtime.coordinator.failures import ANSWERS_S, Cause
from distrun_runtime.coordinator.messages import (
    DEBUG,
    INFO,
    WARNING,
    Action,
    Announce,
    Begin,
    Drop,
    EndAgent,
    FinishJob,
    Prepare,
    SendRuntime,
    Settle,
    SignalTasks,
    Spawn,
    Steps,
    StopTasks,
)
from distrun_runtime.coordinator.roster import SKEW_LIMIT_S, SKEW_S, HostState, JobRoster

# The stop sequence of a job: which tasks are signalled when, and when an agent may end. No side effects.
#
# Levels follow each other, each harder than the one before: OPEN, ASK_WORKERS, ASK_ALL, KILL_ALL.


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
        roles = (WORKER,) if level == ASK_WORKERS else (WORKER, SERVER, SCHEDULER)
        actions: List[Action] = []
        for host in self._roster.hosts.values():
            # Workers go before servers, servers before the scheduler: a task should not see a peer die that it needs.
            # Tasks that ended already are named too: what they left behind goes with them.
            tasks = self._roster.on_host(host.name)
            names = tuple(task.name for role in roles for task in tasks if task.role == role)
            if level != ASK_WORKERS:
                host.told_to_stop, host.cleared = True, False
            if names and not host.is_gone and host.ended_at is None:
                actions.append(StopTasks(host.name, names, steps))
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
        if host.ended_at is not None:
            is_awaited = host.cut_at is not None and self.level < KILL_ALL  # until it is reached again, or lost
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
        if host.over_at is None:
            host.over_at = now
        if self.is_interrupted and now >= host.over_at + INTERRUPTED_OUTPUT_S:
            return True
        return not self._roster.undrained(host.name) or now >= host.last_output + OUTPUT_S

    def _survive(self, host: HostState) -> None:
        for task in self._roster.on_host(host.name):
            if not task.is_over:
                self._roster.survive(task, host.name)
        if host.greeted:
            self._roster.survivors.append(failures.Survivor("the agent", host.name))


GATHERING = "gathering"
PREPARING = "preparing"
SETTLING = "settling"
STARTING = facts.STARTING
RUNNING = facts.RUNNING
DRAINING = "draining"
STOPPING = facts.STOPPING
OVER = "over"
ASKING = (GATHERING, SETTLING)
"""Hosts say whether they can be used; the job goes on when all have."""
UNDECIDED = (GATHERING, PREPARING, SETTLING, STARTING, RUNNING)
"""Nothing has ended the job yet."""

REMARK_S = 1.0
"""Hosts that answer this soon after the first unusable one are awaited without a notice."""
COMMENT_S = 5.0
"""A start that takes longer is reported, again every 10 s."""
SLEPT_S = 5.0
"""A longer gap between two events means that this process was suspended, since the loop ticks more often; it does not
mean that agents are silent. With a short `suspect_s`: half of it."""
PEERLESS_SILENCE_S = 8.0
"""When tasks elsewhere lose a peer, a host that has been silent for so long, or is suspect, counts as the cause."""
FAILING_S = 5.0
"""A task that reported its failure may take so long to end when others have already died of its loss."""


class Supervisor:
    """One job's supervisor. `handle` is all there is to call; a Tick must come first, then one each `wake_s`."""

    def __init__(self, plan: Plan, has_preparation: bool = False, ends_when_ready: bool = False) -> None:
        """Begin a job.

        Args:
            plan: of the job.
            has_preparation: something is to be done between readiness and the first task (`Prepare`).
            ends_when_ready: no task is started. When every host is ready, all agents end, and the outcome is a success.
        """
        self.plan = plan
        self.roster = JobRoster(plan)
        self.phase = GATHERING
        self._has_preparation = has_preparation
        self._ends_when_ready = ends_when_ready
        self._has_remarked = False
        self._unusable: Optional[failures.UnusableHosts] = None
        """None: there is none so far."""
        self._actions: List[Action] = []
        self._now = 0.0
        self._stop = JobStopSequence(self.roster, plan.limits)
        self._analysis = failures.FailureAnalysis(plan.limits.verdict_s)
        self._origin: Optional[float] = None
        self._start_from = 0.0
        """From when on the start's time limit counts."""
        self._comment_at = 0.0
        self._early_until: Optional[float] = None
        self._consequence_at: Optional[float] = None
        """When the first task died of a lost peer, while nothing was known that it died of."""
        self._announced: Optional[Cause] = None
        """For what it was said that the job is being stopped."""
        self._interrupts = 0
        self._warnings: Dict[str, Tuple[str, float]] = {}
        self._is_one_machine = plan.backend == "local" and len(plan.hosts) == 1
        """There is one clock: a hello that was stamped earlier came late."""

    @property
    def job_state(self) -> str:
        """The job's state in the words of the job store; meaningless once it is over (`Outcome.job_state`)."""
        return facts.RUNNING if self.phase == RUNNING else facts.STARTING if self.phase in UNDECIDED else facts.STOPPING

    def handle(self, event: messages.Event, now: float) -> List[Action]:
        """Return what is to be done about `event`. After `FinishJob` there is nothing more."""
        if self.phase == OVER:
            return []
        if self._origin is None:
            self._origin = self._start_from = now
            self._comment_at = now + COMMENT_S
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
            sender, what, task = getattr(event, "host", "?"), type(event).__name__, getattr(event, "task", "")
            self._say(f"{sender} sent {what} of {task!r}, which is not a task of that host; ignored", WARNING)
        self._advance(event)
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
        if self.phase in ASKING and self._unusable is not None:
            due.append(self._unusable.until)
        if self._early_until is not None:
            due.append(self._early_until)
        if self._consequence_at is not None and self._cause_until(self._consequence_at) > self._now:
            due.append(self._cause_until(self._consequence_at))
        return max(0.0, min(due) - self._now)

    # ------------------------------------------------------------------ hosts

    def _say(self, text: str, level: str = INFO, *tasks: str, repeats: str = "") -> None:
        self._actions.append(Announce(text, level, tasks, repeats=repeats))

    def _hear(self, event: messages.Event) -> None:
        host = self.roster.hosts.get(getattr(event, "host", ""))
        if host is None or isinstance(event, _NO_SIGNS_OF_LIFE):
            return
        host.last_seen = self._now
        if host.is_suspect or host.silence_s:
            host.is_suspect = False
            host.silence_s = 0.0
            self._say(f"{host.name} answers again")
        if isinstance(event, _STAMPED) and event.arrived:
            moved = host.note_stamp(event.time, event.arrived)
            if moved:
                text = (
                    f"the clock of {host.name} (or of this machine) was set by {moved:+.0f} s; its times are corrected"
                )
                self._say(text, WARNING)

    def _on_hello(self, event: agent_messages.AgentHello) -> None:
        host = self.roster.hosts[event.host]
        version = event.facts.get("version")
        if version != session.VERSION:
            why = f"its agent speaks protocol version {version!r}, this program {session.VERSION}"
            fix = "use one release of distrun everywhere"
            self._on_start_failed(agent_messages.StartFailed(event.host, why, event.arrived, True, "protocol", fix))
            return
        stamp = event.facts.get("time")
        skew = event.arrived - stamp if isinstance(stamp, (int, float)) and not self._is_one_machine else 0.0
        if abs(skew) > SKEW_LIMIT_S:
            where = "behind" if skew > 0 else "ahead of"
            why = f"the clock of {host.name} is {abs(skew):.0f} s {where} that of this machine"
            of_plan = self.plan.host_of(host.name)
            # Root needs no sudo, and often there is none.
            script = "sudo=$(command -v sudo); $sudo chronyc makestep || $sudo timedatectl set-ntp true"
            fix = of_plan.typed(script, asks=True)
            self._on_start_failed(agent_messages.StartFailed(event.host, why, event.arrived, True, "clock", fix))
            return
        host.greeted = True
        host.machine = str(event.facts.get("host", ""))
        if isinstance(stamp, (int, float)):
            host.stamp = stamp
        if abs(skew) > SKEW_S:
            host.skew_s = skew
            self._say(f"the clock of {host.name} is off by {-skew:.1f} s; its times are corrected", WARNING)
        if host.ended_at is None:
            self._actions.append(Begin(event.host))

    def _on_ready(self, event: agent_messages.AgentReady) -> None:
        host = self.roster.hosts[event.host]
        twin = self.roster.twin_of(host, event.address)
        if twin is not None:
            # As docker0 or the address of a virtual machine behind NAT: the same on every host.
            text = f"{host.name} and {twin.name} both have {event.address} as their address for data"
            fix = "choose another network with --subnet CIDR or --interface NAME"
            if self.plan.of_role(SCHEDULER):
                why = f"{text}, so tasks elsewhere cannot reach both"
                self._on_start_failed(agent_messages.StartFailed(event.host, why, host.stamp, True, "interface", fix))
                return
            self._say(f"{text}; {fix} if tasks are to reach both", WARNING)
        host.is_ready = True
        self.roster.facts[f"host:{event.host}.address"] = event.address
        for label, port in event.ports.items():
            self.roster.facts[f"{event.host}/port:{label}"] = str(port)
        if event.python:  # only where servers run
            self._tell_python(event)
        if event.gpus:  # only where tasks get GPUs
            self._tell_gpus(event.host, event.gpus)

    def _on_settled(self, event: agent_messages.Settled) -> None:
        self.roster.hosts[event.host].is_ready = True
        self._tell_python(event)

    def _tell_python(self, event: Union[agent_messages.AgentReady, agent_messages.Settled]) -> None:
        for text in event.python.values():
            self._say(f"{event.host}: servers run by Python {text}", DEBUG)

    def _tell_gpus(self, host: str, found: Mapping[str, Any]) -> None:
        """Say which GPUs tasks see, and on which hosts that could not be checked."""
        sees = "tasks see " + (",".join(map(str, found.get("visible") or ())) or "none")
        if found.get("how"):
            self._say(f"{host}: GPUs: {found.get('kinds') or 'none'}, driver {found.get('driver')}; {sees}", DEBUG)
        else:
            why = found.get("error") or gpus.NO_DRIVER
            self._say(f"{host}: its GPUs cannot be checked: {why}; {sees}", INFO)

    def _on_needed(self, event: agent_messages.Needed) -> None:
        if event.digest == self.plan.runtime.digest and self.roster.hosts[event.host].ended_at is None:
            self._actions.append(SendRuntime(event.host))

    def _on_start_failed(self, event: agent_messages.StartFailed) -> None:
        if self.roster.hosts[event.host].is_gone:
            return
        make = failures.bad_host if event.is_preflight else failures.no_agent
        self._add_unusable(make(event.host, event.reason, event.time), event.kind, event.fix)

    def _add_unusable(self, cause: Cause, kind: str = "", fix: str = "") -> None:
        """Note that a host did not get ready. The job ends when the other hosts have answered."""
        self.roster.hosts[cause.host].is_gone = True
        self._actions.append(Drop(cause.host))
        if self.phase not in ASKING:
            if self.phase in UNDECIDED:
                self._fail(cause)
            return
        if self._unusable is None:
            self._unusable = failures.UnusableHosts(list(self.roster.hosts), self._now)
        self._unusable.add(cause, kind, fix)

    def _gather(self) -> None:
        """When every host has answered: start the tasks if all are ready, end the job if one is unusable."""
        all_answered, unusable = self.roster.all_answered, self._unusable
        if unusable is not None:
            if all_answered or self._now >= unusable.until:
                self._fail(unusable.cause(self.roster.unanswered))
            elif self._now >= unusable.until - ANSWERS_S + REMARK_S and not self._has_remarked:
                self._has_remarked = True
                short = unusable.cause().short
                self._say(
                    f"{short}; waiting up to {duration(ANSWERS_S)} to hear from"
                    f" {failures.listed(self.roster.unanswered)}",
                    WARNING,
                )
        elif not all_answered:
            return
        elif self.phase == SETTLING:
            self._begin_tasks()
        elif self._has_preparation:
            self.phase = PREPARING
            self._actions.append(Prepare())
        else:
            self._settle()

    def _settle(self) -> None:
        """Have every host activate and check what was copied, if the plan left something for that."""
        if not self.plan.settles:
            self._begin_tasks()
            return
        self.phase = SETTLING
        self.roster.ask_again()
        self._actions += [Settle(host) for host in self.roster.hosts]

    def _begin_tasks(self) -> None:
        """Every host is ready: start the tasks, unless that was all that was asked for."""
        self.phase = DRAINING if self._ends_when_ready else STARTING
        if self._ends_when_ready:
            self._stop.linger(self._now, 0.0)

    def _on_prepare_failed(self, event: messages.PrepareFailed) -> None:
        # Only what came before the end, if something else has ended the job: a copy that was cancelled fails too.
        self._fail(failures.not_prepared(event.host, event.reason, event.time, event.text))

    def _on_lost(self, event: messages.AgentLost) -> None:
        host = self.roster.hosts[event.host]
        if host.is_gone:
            return
        if not host.greeted and host.ended_at is None:
            self._on_start_failed(agent_messages.StartFailed(event.host, event.reason, event.time))
            return
        is_asked = self.phase in (DRAINING, STOPPING)
        pending = self.roster.is_pending(event.host)
        if self.phase in ASKING and host.ended_at is None:
            self._add_unusable(failures.host_lost(event.host, event.reason, event.time))
            return
        self._actions.append(Drop(event.host))
        missing = self.roster.undrained(event.host)
        live = self.roster.lose(event.host, facts.STOPPED if is_asked else facts.FAILED, event.time)
        if missing:
            self._say(f"the last lines of {failures.listed(missing)} were lost with {event.host}", WARNING)
        if live or (pending and not is_asked):
            self._fail(failures.host_lost(event.host, event.reason, event.time))
        elif host.ended_at is None:
            self._say(f"{event.host} is gone ({event.reason}); all its tasks had ended", WARNING)
        elif host.greeted and not host.cleared and self.roster.on_host(event.host):
            self._say(f"the agent on {event.host} went without saying that nothing is left there", WARNING)

    def _on_cut(self, event: messages.Cut) -> None:
        host = self.roster.hosts[event.host]
        if host.is_gone or host.cut_at is not None:
            return
        host.cut_at = self._now
        host.is_suspect = False
        self._say(f"{host.name}: connection lost, trying again", WARNING)
        self._say(f"{host.name}: {event.reason}", DEBUG)

    def _on_resumed(self, event: messages.Resumed) -> None:
        host = self.roster.hosts[event.host]
        if host.cut_at is not None:
            self._say(f"{host.name}: reconnected after {failures.rounded(self._now - host.cut_at)}")
            host.cut_at = None
            if host.ended_at is not None:
                host.ended_at = self._now  # what it was told reaches it only now

    def _on_cleared(self, event: agent_messages.Cleared) -> None:
        host = self.roster.hosts[event.host]
        host.cleared = host.told_to_stop
        for pid, command in event.left:
            found = failures.Survivor(f"pid {pid} ({command})", event.host)
            if found not in self.roster.survivors:
                self.roster.survivors.append(found)

    def _on_agent_ending(self, event: agent_messages.AgentEnding) -> None:
        host = self.roster.hosts[event.host]
        if host.ended_at is not None or self.phase not in UNDECIDED:
            return
        self._say(f"{host.name}: its agent ends all tasks there: {event.reason}", WARNING)
        if event.by_user or any(not task.is_over for task in self.roster.on_host(event.host)):
            self._fail(failures.agent_ended(event.host, event.reason, event.by_user, event.time + host.skew_s))

    def _on_warned(self, event: agent_messages.Warned) -> None:
        self._say(f"{event.host}: {event.text}" if event.host else event.text, WARNING)

    def _on_claimed_twice(self, event: messages.PlaceClaimedTwice) -> None:
        cause = failures.claimed_twice(event.host, event.first, event.second, event.time)
        if self.phase in UNDECIDED:
            self._fail(cause)
        else:
            self._say(cause.text, WARNING)

    def _on_bye(self, event: agent_messages.Bye) -> None:
        host = self.roster.hosts[event.host]
        if host.ended_at is None:
            times = (task.ended or task.started or 0.0 for task in self.roster.on_host(event.host))
            self._on_lost(messages.AgentLost(event.host, "its agent left", max(times, default=0.0)))
            return
        host.is_gone = True

    def _check_silence(self, event: messages.Tick) -> None:
        limits = self.plan.limits
        # An agent that goes on without a connection can be reached again until its lease ends.
        lost_s = limits.lease_s if self.plan.on_eof == plans.HOLD else limits.lost_s
        for host in self.roster.hosts.values():
            silence = self._now - host.last_seen
            if not host.greeted or host.is_gone:
                continue
            if host.silence_s:
                host.silence_s = max(host.silence_s, silence)
            if silence < limits.suspect_s and silence < lost_s:
                continue
            shown = failures.rounded(silence)
            if silence >= lost_s:
                cut = f"its connection was cut, and nothing came for {shown}"
                how = f"silent for {shown}" if host.cut_at is None else cut
                self._on_lost(messages.AgentLost(host.name, how, event.time - silence))
            elif not host.is_suspect and host.cut_at is None:
                host.is_suspect = True
                if host.silence_s:
                    continue  # the job is being stopped for it: that was said
                text = f"{host.name} has been silent for {shown} (suspect); it counts as lost after {duration(lost_s)}"
                self._say(text, WARNING)

    # ------------------------------------------------------------------ tasks

    def _on_started(self, event: agent_messages.Started) -> None:
        task = self.roster.tasks[event.task]
        if not task.is_over:
            started = event.time + self.roster.hosts[event.host].skew_s
            self.roster.change(event.task, state=facts.RUNNING, pid=event.pid, started=started)

    def _on_published(self, event: agent_messages.Published) -> None:
        task = self.roster.tasks[event.task]
        if task.role == SCHEDULER:
            for name in ("address", "port"):
                if name in event.values:
                    self.roster.facts[f"scheduler.{name}"] = str(event.values[name])
        if task.is_over or task.own_failure or task.lost_peer or event.stopped:
            return  # what it says or loses on its way out is no cause of its end
        time = event.time + self.roster.hosts[event.host].skew_s
        if event.values.get("lost_peer"):
            message = str(event.values.get("message", ""))
            self.roster.change(event.task, lost_peer=str(event.values["lost_peer"]), reason=message)
            self._analysis.note_loss(event.task, time)
        elif event.values.get("failed"):
            why = str(event.values["failed"])
            self.roster.change(event.task, own_failure=why, reason=why)
            self._analysis.note_failing(event.task, time)
        elif event.values.get("told"):
            self.roster.change(event.task, reason=f"it was asked to end by {event.values['told']}, not by distrun")

    def _on_output(self, event: agent_messages.Output) -> None:
        self.roster.received(event)
        self.roster.hosts[event.host].last_output = self._now

    def _on_exited(self, event: agent_messages.Exited) -> None:
        task = self.roster.tasks[event.task]
        if task.is_over:
            return
        code = facts.exit_code(event.code, event.signal)
        state = facts.STOPPED if event.stopped else facts.FAILED if code else facts.EXITED
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
        self._say(f"{task.name} on {task.host} ended: {task.how}", DEBUG)
        if state == facts.FAILED:
            self._on_failure(task)
        elif state == facts.STOPPED and self.phase in (STARTING, RUNNING):
            why = f"its agent ended {task.name} without being told to, and did not say why"
            self._fail(failures.host_lost(event.host, why, task.ended or 0.0))
        elif state == facts.EXITED and task.role != WORKER and self.phase in (STARTING, RUNNING):
            self._analysis.background.append(failures.ended_early(task))
            if self._early_until is None:
                self._early_until = self._now + self.plan.limits.early_exit_s
        if state == facts.EXITED and task.own_failure:
            self._analysis.note_denied(task)

    def _on_failure(self, task: failures.TaskResult) -> None:
        if self.phase == DRAINING:
            self._say(f"{task.name} on {task.host} ended after the workers were done: {task.how}", WARNING, task.name)
            return
        cause = failures.task_failed(task)
        if task.lost_peer and self.phase in (STARTING, RUNNING):
            # If all were stopped now, the task that is the cause, still about to exit, would end by our signal.
            # `_await_cause` decides later.
            self._analysis.add(cause, self._now)
            if self._consequence_at is None:
                self._consequence_at = self._now
        else:
            self._fail(cause)

    def _cause_until(self, since: float) -> float:
        """Return until when the cause of a consequence that came at `since` is awaited."""
        failing = any(task.own_failure and not task.is_over for task in self.roster.tasks.values())
        return since + (FAILING_S if failing else self.plan.limits.verdict_s)

    def _await_cause(self, since: float) -> None:
        """Stop the job for consequences, the first at `since`, if their cause is known or none is to be expected."""
        self._note_silence()
        cause = self._analysis.choose(self.roster.tasks, self.roster.silent)
        if cause is None:
            return
        is_known = cause.reason == facts.HOST_LOST or cause in self._analysis.background
        is_late = self._now >= self._cause_until(since) and not self._is_in_doubt(since)
        if is_known or self.roster.all_over or is_late:
            self._end(cause, ASK_ALL)

    def _note_silence(self) -> None:
        """Note which hosts have been silent for so long that they explain what tasks elsewhere lost."""
        limit_s = min(PEERLESS_SILENCE_S, self.plan.limits.suspect_s)
        for host in self.roster.hosts.values():
            silence_s = self._now - host.last_seen
            if host.greeted and not host.is_gone and silence_s >= limit_s:
                host.silence_s = silence_s

    def _is_in_doubt(self, since: float) -> bool:
        """Whether a host that has tasks which others lost has not been heard since: it may be lost itself."""
        hosts = {self.roster.tasks[name].host for name in self._analysis.roots(self.roster.tasks)}
        return any(self.roster.hosts[name].last_seen < since and not self.roster.hosts[name].is_gone for name in hosts)

    # ------------------------------------------------------------------ ends

    def _on_interrupt(self, event: messages.Interrupt) -> None:
        self._interrupts += 1
        self._stop.is_interrupted = True
        cause = failures.interrupted(event.signal, event.time)
        again = self.phase == DRAINING or self._interrupts > 1
        if self.phase == STOPPING and event.signal == "INT" and not again:
            self._say("the job is being stopped already; press Ctrl-C again to kill what is left", WARNING)
        elif event.signal == "INT" and again:
            self._say("killing what is left", WARNING)
            self._fail(cause, KILL_ALL)
        elif event.signal == "INT":
            grace = duration(self.plan.limits.grace_s)
            self._say(f"{cause.text}: workers have {grace} to end; Ctrl-C again kills them now", WARNING)
            self._fail(cause, ASK_WORKERS)
        else:
            self._say(f"{cause.text}: stopping all tasks", WARNING)
            self._fail(cause, ASK_ALL)

    def _on_tasks_signal(self, event: agent_messages.TasksSignal) -> None:
        if event.signal not in self.plan.forward_signals:
            text = f"SIG{event.signal} came, and nothing was done; --forward-signal {event.signal} gives it to workers"
            self._say(text)
            return
        if not process.is_new_warning(self._warnings, event.signal, event.host or event.by, self._now):
            return
        given: List[str] = []
        for host in self.roster.hosts.values():
            tasks = self.roster.on_host(host.name)
            names = tuple(task.name for task in tasks if task.role == WORKER and task.state == facts.RUNNING)
            if names and not host.is_gone and host.ended_at is None:
                if host.name != event.host:
                    self._actions.append(SignalTasks(host.name, names, event.signal))
                given += names
        self._say(f"SIG{event.signal} was given to {failures.listed(given) or 'no worker: none runs'}", INFO, *given)

    def _on_disk_filled(self, event: messages.DiskFilled) -> None:
        if self.phase in UNDECIDED:
            self._fail(failures.disk_filled(self.roster.tasks[event.task], event.text, event.time))

    def _fail(self, cause: Cause, level: int = ASK_ALL) -> None:
        """Record a cause that may have ended the job, and stop the job (harder, if it is being stopped)."""
        if self.phase in ASKING and self._unusable is not None and not cause.problems:
            # Something else ends the wait for the other hosts; what is known of the bad ones came before it.
            self._analysis.add(self._unusable.cause(), self._now)
        if self.phase != DRAINING:  # the workers have succeeded: nothing changes that
            self._analysis.add(cause, self._now)
        self._end(cause, level)

    def _end(self, cause: Cause, level: int) -> None:
        self._analysis.start_deadline(self._now)
        if self.phase in UNDECIDED:
            if cause.reason not in (facts.INTERRUPTED, facts.TERMINATED):
                text = f"{cause.short or cause.text}; stopping the job"
                self._say(text, WARNING, *filter(None, [cause.task]), repeats=cause.repeats)
                self._announced = cause
            self.phase = STOPPING
        if cause.is_failure and self._stop.level != OPEN:
            return  # a death while the workers are being asked to end is no reason to hurry them
        self._actions += self._stop.escalate(level, self._now)

    def _on_tick(self, event: messages.Tick) -> None:
        limits = self.plan.limits
        passed, starting = self._now - (self._origin or 0.0), self._now - self._start_from
        self._check_silence(event)
        if self.phase not in UNDECIDED:
            return
        if limits.timeout_s is not None and passed >= limits.timeout_s:
            missing = "" if self.phase == RUNNING else self.roster.missing()
            self._fail(failures.timed_out(limits.timeout_s, event.time, self.roster.unfinished(), missing))
        elif self._early_until is not None and self._now >= self._early_until:
            self._fail(self._analysis.first_early(self.roster.tasks))
        elif self.phase not in (*ASKING, STARTING):
            return
        elif starting >= limits.start_s:
            slow = failures.start_too_slow(limits.start_s, self.roster.missing(), event.time)
            self._fail(slow if self._unusable is None else self._unusable.cause(self.roster.unanswered))
        elif self._now >= self._comment_at:
            self._comment_at = self._now + 2 * COMMENT_S
            self._say(f"waiting for {self.roster.missing()} ({duration(round(starting))})")

    def _on_prepared(self, event: messages.AllPrepared) -> None:
        if self.phase == PREPARING:
            self._settle()
            self._start_from = self._now
            self._comment_at = self._now + COMMENT_S

    def _advance(self, event: messages.Event) -> None:
        roster = self.roster
        if self.phase in ASKING:
            self._gather()
        if self.phase in (STARTING, RUNNING):
            for task in roster.spawnable():
                roster.spawned.add(task.name)
                roster.change(task.name, state=facts.STARTING)
                self._actions.append(Spawn(task.place_name, task.name, plans.resolve(task, roster.facts)))
            if self.phase == STARTING and roster.all_started:
                self.phase = RUNNING
                self._say("all tasks run", DEBUG)
            if roster.workers_succeeded:
                self.phase = DRAINING
                self._say("all workers succeeded", DEBUG)
                self._stop.linger(self._now, 0.0 if roster.all_over else self._linger_s())
            elif self._consequence_at is not None:
                self._await_cause(self._consequence_at)
        if self.phase in (DRAINING, STOPPING):
            self._actions += self._stop.advance(self._now, getattr(event, "host", "") if roster.knows(event) else "")
            if roster.all_gone:
                self.phase = OVER
                roster.settle()
                outcome = self._analysis.outcome(self.plan.job, roster.tasks, roster.survivors, roster.silent)
                if self._announced is not None:
                    self._tell_change(self._announced, outcome.culprit)
                self._actions.append(FinishJob(outcome))

    def _linger_s(self) -> float:
        """Return how long other tasks may take to end after the workers: the user's own servers do so by themselves."""
        commands = {task.argv for task in self.plan.of_role(WORKER)}  # `--ps command` runs them as servers, too
        return LINGER_S if any(task.argv in commands for task in self.plan.tasks if task.role != WORKER) else 0.0

    def _tell_change(self, said: Cause, culprit: Optional[failures.Culprit]) -> None:
        """Say why the job's end names another task than the one for which it was stopped."""
        if culprit is None or not culprit.task or not said.task or culprit.task == said.task:
            return
        if culprit.time < said.time:
            first, second = f"{culprit.task} on {culprit.host}", f"{said.task} on {said.host}"
            self._say(
                f"{first} failed before {second}, but the report of it came later", WARNING, culprit.task, said.task
            )


_NO_SIGNS_OF_LIFE = (
    messages.AgentLost,
    agent_messages.StartFailed,
    messages.PrepareFailed,
    messages.PlaceClaimedTwice,
    messages.Cut,
    messages.DiskFilled,
)
_STAMPED = (agent_messages.Started, agent_messages.Published, agent_messages.Exited, agent_messages.AgentEnding)
_HANDLERS: Dict[type, Callable[[Supervisor, Any], None]] = {
    agent_messages.AgentHello: Supervisor._on_hello,
    agent_messages.Settled: Supervisor._on_settled,
    agent_messages.AgentReady: Supervisor._on_ready,
    agent_messages.Needed: Supervisor._on_needed,
    messages.AllPrepared: Supervisor._on_prepared,
    messages.PrepareFailed: Supervisor._on_prepare_failed,
    agent_messages.StartFailed: Supervisor._on_start_failed,
    agent_messages.Started: Supervisor._on_started,
    agent_messages.Published: Supervisor._on_published,
    agent_messages.Output: Supervisor._on_output,
    agent_messages.Exited: Supervisor._on_exited,
    agent_messages.Cleared: Supervisor._on_cleared,
    agent_messages.Warned: Supervisor._on_warned,
    agent_messages.AgentEnding: Supervisor._on_agent_ending,
    agent_messages.Bye: Supervisor._on_bye,
    messages.Cut: Supervisor._on_cut,
    messages.Resumed: Supervisor._on_resumed,
    messages.AgentLost: Supervisor._on_lost,
    messages.PlaceClaimedTwice: Supervisor._on_claimed_twice,
    messages.Interrupt: Supervisor._on_interrupt,
    agent_messages.TasksSignal: Supervisor._on_tasks_signal,
    messages.DiskFilled: Supervisor._on_disk_filled,
    messages.Tick: Supervisor._on_tick,
}
