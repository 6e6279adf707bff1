"""Agents on many hosts that are asked questions: one thread, one queue, every wait with a deadline."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from distrun_runtime.contract.plan import Host
from distrun_runtime.coordinator import events, frames
from distrun_runtime.coordinator.actions import EndAgent
from distrun_runtime.coordinator.outcome import Problem

if TYPE_CHECKING:
    from distrun.backends.base import Backend

HELLO_S = 60.0
"""How long the first word of an agent is waited for, and HELLO_EACH_S more for each host: they come in turns."""
HELLO_EACH_S = 0.5
PING_S = 5.0
"""How often agents hear from us, so that their lease does not end while others are slow."""
END_S = 3.0
"""How long the end of agents that were told to end is waited for."""

Args = Mapping[str, Any] | Callable[[str], Mapping[str, Any]]
"""Arguments of a tool: the same for all hosts, or by host."""


@dataclass(frozen=True)
class Answer:
    """What a host's agent answered."""

    value: Any


class Fleet:
    """Channels to the agents of some hosts, from `with` to its end. Not to be shared by threads."""

    def __init__(self, backend: Backend, hosts: Sequence[Host], hello_s: float | None = None) -> None:
        self.hellos: dict[str, events.AgentHello] = {}
        """What each agent said first."""
        self.problems: dict[str, Problem] = {}
        """Hosts that cannot be used any more, and why."""
        self.warnings: list[events.Warned] = []
        self._channels = {channel.host: channel for channel in backend.connect(hosts)}
        self._events: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
        self._hello_s = HELLO_S + HELLO_EACH_S * len(hosts) if hello_s is None else hello_s
        self.hello_by = 0.0
        """When, on the monotonic clock, an agent that has not said a word is late."""
        self._asked = 0
        self._pinged = 0.0
        self._gone: set[str] = set()
        self._heard: dict[str, float] = {}

    def __enter__(self) -> Fleet:
        """Start to connect to all hosts; waits for none."""
        self.hello_by = time.monotonic() + self._hello_s
        self._pinged = time.monotonic()
        for channel in self._channels.values():
            channel.start(self._events.put)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the agents; at a Ctrl-C without waiting for them."""
        self.close(0.0 if kind is not None and not issubclass(kind, Exception) else END_S)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of all hosts, in the order in which they were given."""
        return tuple(self._channels)

    def ask(
        self, what: str, args: Args, limit_s: float, hosts: Sequence[str] | None = None
    ) -> dict[str, Answer | Problem]:
        """Return the answer of each host's agent to one question, or why there is none, in the order of `hosts`.

        Args:
            what: name of a question (`distrun_runtime.agent.query`).
            args: what it takes.
            limit_s: seconds that an agent has to answer, from the moment when it is there.
            hosts: whom to ask; all, if None.
        """
        self._asked += 1
        number, names = self._asked, self.hosts if hosts is None else tuple(hosts)
        found: dict[str, Answer | Problem] = {}
        by: dict[str, float] = {}

        def put(host: str) -> float:
            self.send(host, frames.ask(number, what, args(host) if callable(args) else args))
            return time.monotonic() + limit_s

        for name in names:
            if name in self.problems:
                found[name] = self.problems[name]
            else:
                by[name] = put(name) if name in self.hellos else self.hello_by
        while by:
            event = self.next(min(by.values()))
            if isinstance(event, events.AgentHello) and event.host in by:
                by[event.host] = put(event.host)
            elif isinstance(event, events.Answered) and event.id == number and event.host in by:
                wrong = Problem(event.host, "other", event.error)
                found[event.host] = wrong if event.error else Answer(event.value)
                del by[event.host]
            for name in [name for name in by if name in self.problems]:
                found[name] = self.problems[name]
                del by[name]
            for name in [name for name, deadline in by.items() if time.monotonic() >= deadline]:
                found[name] = self._late(name, what, limit_s)
                del by[name]
        return {name: found[name] for name in names}

    def next(self, deadline: float) -> events.Event | None:
        """Return what happens next, None at the `deadline` (monotonic clock); keeps hellos, problems and warnings."""
        while True:
            now = time.monotonic()
            if now >= self._pinged + PING_S:
                self._ping(now)
            try:
                event = self._events.get(timeout=max(0.0, min(deadline, self._pinged + PING_S) - now))
            except queue.Empty:
                if time.monotonic() < deadline:
                    continue
                return None
            self._note(event)
            return event

    def wake(self) -> None:
        """Make `next` return soon, from any thread."""
        self._events.put(events.Tick())

    def send(self, host: str, data: bytes) -> None:
        """Send frames to the agent of a host."""
        self._channels[host].send(data)

    def give_up(self, problem: Problem) -> None:
        """Have nothing more to do with a host."""
        self.problems.setdefault(problem.host, problem)
        self._channels[problem.host].close()

    def close(self, limit_s: float = END_S, end: bool = True) -> None:
        """Close all channels and wait, at most so long, until the agents have gone.

        Args:
            limit_s: seconds.
            end: tell the agents to end at once; else the end of their input makes them end their tasks gently.
        """
        try:
            for name, channel in self._channels.items():
                if end and name in self.hellos and name not in self._gone:
                    channel.send(frames.end(EndAgent(name)))
                channel.close()
                if name not in self.hellos:
                    channel.kill()
            deadline = time.monotonic() + limit_s
            while not self._gone >= self.hellos.keys() and self.next(deadline) is not None:
                pass
        finally:
            for channel in self._channels.values():
                channel.kill()

    def silence(self, host: str) -> float:
        """Return for how many seconds nothing has come from a host that was there; it is pinged every PING_S."""
        return time.monotonic() - self._heard[host] if host in self._heard else 0.0

    def _note(self, event: events.Event) -> None:
        self._heard[getattr(event, "host", "")] = time.monotonic()
        if isinstance(event, events.AgentHello):
            self.hellos[event.host] = event
        elif isinstance(event, events.StartFailed):
            self._gone.add(event.host)
            self.problems.setdefault(event.host, Problem(event.host, event.kind or "other", event.reason, event.fix))
        elif isinstance(event, events.AgentLost):
            self._gone.add(event.host)
            self.problems.setdefault(event.host, Problem(event.host, "other", event.reason))
        elif isinstance(event, events.Warned):
            self.warnings.append(event)

    def _late(self, host: str, what: str, limit_s: float) -> Problem:
        if host in self.hellos:
            return Problem(host, "timeout", "its agent did not answer %r within %g s" % (what, limit_s))
        problem = Problem(host, "timeout", "no agent answered within %g s" % self._hello_s)
        self.give_up(problem)
        return problem

    def _ping(self, now: float) -> None:
        self._pinged = now
        for name in self.hellos:
            if name not in self.problems:
                self.send(name, frames.ping(0))


def ask(backend: Backend, hosts: Sequence[Host], what: str, args: Args, limit_s: float) -> dict[str, Answer | Problem]:
    """Connect to all hosts, ask one question (see `Fleet.ask`), and end the agents."""
    with Fleet(backend, hosts) as fleet:
        return fleet.ask(what, args, limit_s)
