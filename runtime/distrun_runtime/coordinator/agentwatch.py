"""What the supervisor makes of agents: who answered, who is lost, who is silent. No I/O."""

from __future__ import annotations

from typing import List, Mapping

from distrun_runtime.contract import wire
from distrun_runtime.contract.duration import duration
from distrun_runtime.contract.plan import Plan
from distrun_runtime.coordinator import events, verdict
from distrun_runtime.coordinator import outcome as ends
from distrun_runtime.coordinator.actions import (
    DEBUG,
    INFO,
    WARNING,
    Action,
    Announce,
    Begin,
    Drop,
    Prepare,
    SendRuntime,
    Settle,
)
from distrun_runtime.coordinator.preflight import WAIT_S, Preflight
from distrun_runtime.coordinator.roster import SKEW_LIMIT_S, SKEW_S, HostState, Roster
from distrun_runtime.coordinator.verdict import Cause

GATHERING = "gathering"
PREPARING = "preparing"
SETTLING = "settling"
STARTING = "starting"
RUNNING = "running"
REMARK_S = 1.0
"""Hosts that answer so soon after the first bad one are waited for without a word."""
DRAINING = "draining"
STOPPING = "stopping"
OVER = "over"
ASKING = (GATHERING, SETTLING)
"""Hosts say whether they can be used; the job goes on when all have."""
UNDECIDED = (GATHERING, PREPARING, SETTLING, STARTING, RUNNING)
"""Nothing has ended the job yet."""


class AgentWatch:
    """The half of the supervisor that is about hosts; `supervise.Supervisor` is the other one."""

    def __init__(self, plan: Plan, has_preparation: bool = False) -> None:
        self.plan = plan
        self.roster = Roster(plan)
        self.phase = GATHERING
        self._has_preparation = has_preparation
        self._has_remarked = False
        self._preflight = Preflight([host.name for host in plan.hosts])
        self._actions: List[Action] = []
        self._now = 0.0

    def _blame(self, cause: Cause) -> None:
        raise NotImplementedError

    def _say(self, text: str, level: str = INFO) -> None:
        self._actions.append(Announce(text, level))

    def _hear(self, event: events.Event) -> None:
        host = self.roster.hosts.get(getattr(event, "host", ""))
        if host is None or isinstance(event, (events.AgentLost, events.StartFailed, events.PrepareFailed)):
            return
        host.last_seen = self._now
        if host.is_suspect or host.silence_s:
            host.is_suspect = False
            host.silence_s = 0.0
            self._say("%s answers again" % host.name)

    def _on_hello(self, event: events.AgentHello) -> None:
        host = self.roster.hosts[event.host]
        version = event.facts.get("version")
        if version != wire.VERSION:
            why = "its agent speaks protocol version %r, this program %d" % (version, wire.VERSION)
            fix = "use one release of distrun everywhere"
            self._on_start_failed(events.StartFailed(event.host, why, event.arrived, True, "protocol", fix))
            return
        stamp = event.facts.get("time")
        skew = event.arrived - stamp if isinstance(stamp, (int, float)) else 0.0
        if abs(skew) > SKEW_LIMIT_S:
            where = "behind" if skew > 0 else "ahead of"
            why = "the clock of %s is %.0f s %s that of this machine" % (host.name, abs(skew), where)
            of_plan = next(each for each in self.plan.hosts if each.name == host.name)
            # Root needs no sudo, and often there is none.
            script = "sudo=$(command -v sudo); $sudo chronyc makestep || $sudo timedatectl set-ntp true"
            fix = of_plan.typed(script, asks=True)
            self._on_start_failed(events.StartFailed(event.host, why, event.arrived, True, "clock", fix))
            return
        host.greeted = True
        if abs(skew) > SKEW_S:
            host.skew_s = skew
            self._say("the clock of %s is off by %.1f s; its times are corrected" % (host.name, -skew), WARNING)
        if not host.was_ended:
            self._actions.append(Begin(event.host))

    def _on_ready(self, event: events.AgentReady) -> None:
        self.roster.hosts[event.host].is_ready = True
        self.roster.facts["host:%s.address" % event.host] = event.address
        for label, port in event.ports.items():
            self.roster.facts["%s/port:%s" % (event.host, label)] = str(port)
        self._tell_python(event.host, event.python)

    def _on_settled(self, event: events.Settled) -> None:
        self.roster.hosts[event.host].is_ready = True
        self._tell_python(event.host, event.python)

    def _tell_python(self, host: str, found: Mapping[str, str]) -> None:
        for text in found.values():
            self._say("%s: servers run by Python %s" % (host, text), DEBUG)

    def _on_needed(self, event: events.Needed) -> None:
        if event.digest == self.plan.runtime.digest and not self.roster.hosts[event.host].was_ended:
            self._actions.append(SendRuntime(event.host))

    def _on_start_failed(self, event: events.StartFailed) -> None:
        if self.roster.hosts[event.host].is_gone:
            return
        make = verdict.bad_host if event.is_preflight else verdict.no_agent
        self._rule_out(make(event.host, event.reason, event.time), event.kind, event.fix)

    def _rule_out(self, cause: Cause, kind: str = "", fix: str = "") -> None:
        """Note that a host did not get ready. The job ends when the others have answered too."""
        self.roster.hosts[cause.host].is_gone = True
        self._actions.append(Drop(cause.host))
        if self.phase not in ASKING:
            if self.phase in UNDECIDED:
                self._blame(cause)
            return
        self._preflight.add(cause, self._now, kind, fix)

    def _gather(self) -> None:
        """Go on when every host has answered: to the tasks if all are ready, to the end if one is bad."""
        waiting, until = self.roster.unanswered, self._preflight.until
        if until is not None:
            if not waiting or self._now >= until:
                self._condemn()
            elif self._now >= until - WAIT_S + REMARK_S and not self._has_remarked:
                self._has_remarked = True
                short = self._preflight.verdict().short
                self._say(
                    "%s; waiting up to %s to hear from %s" % (short, duration(WAIT_S), verdict.listed(waiting)),
                    WARNING,
                )
        elif waiting:
            return
        elif self.phase == SETTLING:
            self.phase = STARTING
        elif self._has_preparation:
            self.phase = PREPARING
            self._actions.append(Prepare())
        else:
            self._settle()

    def _settle(self) -> None:
        """Have every host activate and look at what is there now, if something has been left for that."""
        self.phase = SETTLING if self.plan.settles else STARTING
        if self.phase == SETTLING:
            for host in self.roster.hosts.values():
                host.is_ready = False
                self._actions.append(Settle(host.name))

    def _condemn(self) -> None:
        """End the job for the hosts that are bad."""
        self._blame(self._preflight.verdict(self.roster.unanswered))

    def _on_prepare_failed(self, event: events.PrepareFailed) -> None:
        # Only what came before the end, if something else has ended the job: a copy that was cancelled fails too.
        self._blame(verdict.not_prepared(event.host, event.reason, event.time, event.text))

    def _on_lost(self, event: events.AgentLost) -> None:
        host = self.roster.hosts[event.host]
        if host.is_gone:
            return
        if not host.greeted and not host.was_ended:
            self._on_start_failed(events.StartFailed(event.host, event.reason, event.time))
            return
        is_asked = self.phase in (DRAINING, STOPPING)
        pending = any(task.host == event.host and task.state == ends.PENDING for task in self.roster.tasks.values())
        if self.phase in ASKING and not host.was_ended:
            self._rule_out(verdict.host_lost(event.host, event.reason, event.time))
            return
        self._actions.append(Drop(event.host))
        missing = self.roster.undrained(event.host)
        live = self.roster.lose(event.host, ends.STOPPED if is_asked else ends.FAILED, event.time)
        if missing:
            self._say("the last lines of %s were lost with %s" % (verdict.listed(missing), event.host), WARNING)
        if live or (pending and not is_asked):
            self._blame(verdict.host_lost(event.host, event.reason, event.time))
        elif not host.was_ended:
            self._say("%s is gone (%s); all its tasks had ended" % (event.host, event.reason), WARNING)
        elif host.greeted and not host.cleared and self.roster.on_host(event.host):
            self._say("the agent on %s went without saying that nothing is left there" % event.host, WARNING)

    def _on_cleared(self, event: events.Cleared) -> None:
        host = self.roster.hosts[event.host]
        host.cleared = host.told_to_stop
        for pid, command in event.left:
            text = "pid %d (%s) on %s" % (pid, command, event.host)
            if text not in self.roster.survivors:
                self.roster.survivors.append(text)

    def _on_agent_ending(self, event: events.AgentEnding) -> None:
        host = self.roster.hosts[event.host]
        if host.was_ended or self.phase not in UNDECIDED:
            return
        self._say("%s: its agent ends all tasks there: %s" % (host.name, event.reason), WARNING)
        if event.by_user or any(not task.is_over for task in self.roster.on_host(event.host)):
            self._blame(verdict.agent_ended(event.host, event.reason, event.by_user, event.time + host.skew_s))

    def _on_bye(self, event: events.Bye) -> None:
        host = self.roster.hosts[event.host]
        host.said_bye = True
        if not host.was_ended:
            self._on_lost(events.AgentLost(event.host, "its agent left", self._wall_of(host)))
            return
        host.is_gone = True

    def _listen(self, event: events.Tick) -> None:
        limits = self.plan.limits
        for host in self.roster.hosts.values():
            silence = self._now - host.last_seen
            if not host.greeted or host.is_gone:
                continue
            if host.silence_s:
                host.silence_s = max(host.silence_s, silence)
            shown = verdict.rounded(silence)
            if silence >= limits.lost_s:
                self._on_lost(events.AgentLost(host.name, "silent for %s" % shown, event.time - silence))
            elif silence >= limits.suspect_s and not host.is_suspect:
                host.is_suspect = True
                if host.silence_s:
                    continue  # the job is being stopped for it: that was said
                text = "%s has been silent for %s (suspect); it counts as lost after %s"
                self._say(text % (host.name, shown, duration(limits.lost_s)), WARNING)

    def _wall_of(self, host: HostState) -> float:
        return max((task.ended or task.started or 0.0 for task in self.roster.on_host(host.name)), default=0.0)
