"""The agents of some hosts while no job runs: who is there, who cannot be used, and how they are let go."""

from __future__ import annotations

from collections.abc import Iterable

from distrun_runtime.coordinator import events
from distrun_runtime.coordinator.actions import AgentAction, Close, Drop, EndAgent
from distrun_runtime.coordinator.outcome import Problem

HELLO_S = 60.0
"""How long the first frame of an agent is waited for, and HELLO_EACH_S more for each host: they come in turns."""
HELLO_EACH_S = 0.5
END_S = 3.0
"""How long the end of agents that were told to end is waited for."""
TICK_S = 1.0
"""Seconds between two looks at the clock, at most."""
SIGNALS = ("INT",)
"""Signals that the loop turns into events; all others keep their usual effect."""


class Agents:
    """What events tell of the agents of `hosts`. `now`: monotonic clock, seconds. No side effects."""

    def __init__(self, hosts: Iterable[str], hello_s: float | None = None) -> None:
        self.hosts = tuple(hosts)
        self.hello_s = HELLO_S + HELLO_EACH_S * len(self.hosts) if hello_s is None else hello_s
        self.hello_by = 0.0
        """When an agent that has not sent a frame is late."""
        self.hellos: dict[str, events.AgentHello] = {}
        self.problems: dict[str, Problem] = {}
        """Hosts that cannot be used any more, and why."""
        self.warnings: list[events.Warned] = []
        self.is_interrupted = False
        """Ctrl-C came while the loop ran."""
        self._gone: set[str] = set()
        self._heard: dict[str, float] = {}
        self._now = 0.0
        self._close_by: float | None = None

    @property
    def is_closing(self) -> bool:
        """Whether the agents were let go."""
        return self._close_by is not None

    @property
    def have_gone(self) -> bool:
        """Whether the agents were let go and have ended, or are not waited for any longer."""
        return self._close_by is not None and (self._gone >= self.hellos.keys() or self._now >= self._close_by)

    def note(self, event: events.Event, now: float) -> None:
        """Take in an event. The first one starts the time within which agents have to answer."""
        self.hello_by = self.hello_by or now + self.hello_s
        self._now = now
        host = getattr(event, "host", "")
        if host:
            self._heard[host] = now
        match event:
            case events.AgentHello():
                self.hellos[host] = event
            case events.StartFailed():
                self._gone.add(host)
                self.problems.setdefault(host, Problem(host, event.kind or "other", event.reason, event.fix))
            case events.AgentLost():
                self._gone.add(host)
                self.problems.setdefault(host, Problem(host, "other", event.reason))
            case events.Warned():
                self.warnings.append(event)
            case events.Interrupt():
                self.is_interrupted = True

    def silence_s(self, host: str) -> float:
        """Return for how long nothing has come from a host that was there; the loop pings it."""
        return self._now - self._heard.get(host, self._now)

    def give_up(self, problem: Problem) -> list[AgentAction]:
        """Have nothing more to do with a host."""
        self.problems.setdefault(problem.host, problem)
        return [Close(problem.host)]

    def let_go(self, limit_s: float, end: bool = True) -> list[AgentAction]:
        """Close all channels; the ends of the agents are waited for at most so long.

        Args:
            limit_s: seconds.
            end: tell the agents to end at once; else the end of their input makes them end their tasks gently.
        """
        self._close_by = self._now + limit_s
        found: list[AgentAction] = []
        for host in self.hosts:
            if end and host in self.hellos and host not in self._gone:
                found.append(EndAgent(host))
            found.append(Close(host) if host in self.hellos else Drop(host))
        return found

    def wake_s(self, deadlines: Iterable[float]) -> float:
        """Return how long nothing has to be done, if it has to be at these times."""
        due = [self._close_by] if self._close_by is not None else [*deadlines]
        return max(0.0, min([TICK_S, *(each - self._now for each in due)]))
