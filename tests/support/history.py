"""A scripted history of one job: events at times go in, what the supervisor did comes out. No process, no clock."""

from __future__ import annotations

from typing import Any, TypeVar

from distrun_runtime.contract import agent_messages, session
from distrun_runtime.contract.plan import Plan
from distrun_runtime.coordinator import messages
from distrun_runtime.coordinator.failures import Culprit, Outcome
from distrun_runtime.coordinator.messages import Action, Announce, EndAgent, FinishJob, StopTasks
from distrun_runtime.coordinator.supervisor import Supervisor

WALL = 1_000_000.0
"""The wall clock when the supervisor's own shows 0."""

A = TypeVar("A")


class History:
    """A supervisor, agents that answer its stops if `obedient`, and a clock that the test moves."""

    def __init__(self, plan: Plan, obedient: bool = True, has_preparation: bool = False) -> None:
        self.plan = plan
        self.supervisor = Supervisor(plan, has_preparation)
        self.obedient = obedient
        self.now = 0.0
        self.done: list[Action] = []
        self.tell(messages.Tick(WALL))

    def tell(self, event: messages.Event) -> History:
        self._act(self.supervisor.handle(event, self.now))
        return self

    def tick_to(self, now: float) -> History:
        """Let time pass, with all agents that were not told to be silent answering pings."""
        while self.now < now and self.outcome is None:
            self.now = min(now, self.now + 0.5)
            self.tell(messages.Tick(WALL + self.now))
        return self

    def beat_to(self, now: float, *hosts: str) -> History:
        """Let time pass while every agent (of `hosts`) answers pings."""
        while self.now < now and self.outcome is None:
            self.now = min(now, self.now + 0.5)
            for host in self.plan.hosts:
                if not hosts or host.name in hosts:
                    self.tell(agent_messages.Pong(host.name))
            self.tell(messages.Tick(WALL + self.now))
        return self

    def start(self) -> History:
        """Bring every task up."""
        self.gather()
        if self.plan.of_role("scheduler"):
            self.started("scheduler").publish("scheduler", address="10.0.0.1", port=9091)
        for task in self.plan.tasks:
            self.started(task.name)
        return self

    def gather(self) -> History:
        """Have every host answer and get ready."""
        for host in self.plan.hosts:
            self.hello(host.name).ready(host.name)
        return self

    def bad(self, host: str, kind: str = "", text: str = "no route to host", **more: Any) -> History:
        """Have a host turn out to be unusable; without a kind, its agent just did not come up."""
        return self.tell(agent_messages.StartFailed(host, text, WALL + self.now, kind=kind, **more))

    def hello(self, host: str, /, **facts: Any) -> History:
        time = WALL + self.now
        return self.tell(agent_messages.AgentHello(host, {"version": session.VERSION, "time": time, **facts}, time))

    def ready(self, host: str, **ports: int) -> History:
        return self.tell(agent_messages.AgentReady(host, "10.0.0.%s" % host[1:], ports))

    def settled(self, host: str) -> History:
        return self.tell(agent_messages.Settled(host))

    def started(self, task: str) -> History:
        return self.tell(agent_messages.Started(self.host(task), task, 100, "x", WALL + self.now))

    def publish(self, task: str, **values: Any) -> History:
        return self.tell(agent_messages.Published(self.host(task), task, values, WALL + self.now))

    def fails(self, task: str, why: str = "ValueError: my bug", at: float | None = None, **more: Any) -> History:
        """Have a task say that it begins to abort."""
        time = WALL + (self.now if at is None else at)
        return self.tell(agent_messages.Published(self.host(task), task, {"failed": why}, time, **more))

    def loses(self, task: str, peer: str, code: int = 1) -> History:
        """Have a task die of a lost peer."""
        return self.publish(task, lost_peer=peer, message="%s is lost" % peer).exited(task, code)

    def exited(self, task: str, code: int | None = 0, at: float | None = None, **more: Any) -> History:
        time = WALL + (self.now if at is None else at)
        return self.tell(agent_messages.Exited(self.host(task), task, code=code, time=time, **more))

    def killed(self, task: str, signal: str, **more: Any) -> History:
        return self.exited(task, code=None, signal=signal, **more)

    def interrupt(self, signal: str) -> History:
        return self.tell(messages.Interrupt(signal, WALL + self.now))

    def lost(self, host: str, at: float | None = None) -> History:
        return self.tell(messages.AgentLost(host, "its connection ended", WALL + (self.now if at is None else at)))

    def host(self, task: str) -> str:
        return self.plan.task(task).host

    def did(self, kind: type[A]) -> list[A]:
        return [action for action in self.done if isinstance(action, kind)]

    def said(self) -> str:
        return "\n".join(action.text for action in self.did(Announce))

    def stops(self, host: str = "d1") -> list[tuple[tuple[str, ...], Any]]:
        return [(stop.tasks, stop.steps) for stop in self.did(StopTasks) if stop.host == host]

    @property
    def outcome(self) -> Outcome | None:
        finished = self.did(FinishJob)
        return finished[0].outcome if finished else None

    def end(self) -> Outcome:
        """Let time pass until the job is over."""
        self.tick_to(self.now + 100)
        assert self.outcome is not None, self.done
        return self.outcome

    def culprit(self) -> Culprit:
        """Let time pass until the job is over; return who is named."""
        found = (self.outcome or self.end()).culprit
        assert found is not None
        return found

    def _act(self, actions: list[Action]) -> None:
        self.done += actions
        for action in actions:
            if not self.obedient:
                continue
            if isinstance(action, StopTasks):
                for name in action.tasks:
                    if not self.supervisor.roster.tasks[name].is_over:
                        self.killed(name, action.steps[0][0], stopped=True)
                self.tell(agent_messages.Cleared(action.host))
            elif isinstance(action, EndAgent):
                self.tell(agent_messages.Bye(action.host))
