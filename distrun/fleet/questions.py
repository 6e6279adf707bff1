"""Asks tools of many hosts' agents, without a job.

    with Fleet(backend, hosts) as fleet:
        found = fleet.ask("survey", {}, 30.0)

Each host gives an `Answer` or a `Problem`. What to send and when to give up is decided by `Questions`, which the
coordinator's loop drives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from distrun.fleet.agents import END_S, SIGNALS, Agents
from distrun_runtime.contract.plan import Host
from distrun_runtime.coordinator import events
from distrun_runtime.coordinator.actions import AgentAction, AskAgent
from distrun_runtime.coordinator.loop import HostLoop
from distrun_runtime.coordinator.outcome import Problem

if TYPE_CHECKING:
    from distrun.backends.base import Backend

Args = Mapping[str, Any] | Callable[[str], Mapping[str, Any]]
"""Arguments of a tool: the same for all hosts, or by host."""


@dataclass(frozen=True)
class Answer:
    """What a host's agent answered."""

    value: Any


def ask(backend: Backend, hosts: Sequence[Host], what: str, args: Args, limit_s: float) -> dict[str, Answer | Problem]:
    """Connect to all hosts, ask one question (see `Fleet.ask`), and end the agents."""
    with Fleet(backend, hosts) as fleet:
        return fleet.ask(what, args, limit_s)


class Fleet:
    """Connections to the agents of some hosts, from `with` to its end. Not to be shared by threads."""

    def __init__(self, backend: Backend, hosts: Sequence[Host], hello_s: float | None = None) -> None:
        """`hello_s`: how long the first frame of an agent is waited for."""
        self._channels = backend.connect(hosts)
        self._questions = Questions([channel.host for channel in self._channels], hello_s)
        self._loop = HostLoop(self._questions, self._channels, signals=SIGNALS)

    def __enter__(self) -> Fleet:
        """Do nothing: the first question connects."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the agents; at a Ctrl-C without waiting for them."""
        self._questions.let_go(0.0 if kind is not None and not issubclass(kind, Exception) else END_S)
        try:
            self._run()
        finally:
            for channel in self._channels:
                channel.kill()

    @property
    def hellos(self) -> Mapping[str, events.AgentHello]:
        """The first frame of each agent."""
        return self._questions.agents.hellos

    @property
    def warnings(self) -> Sequence[events.Warned]:
        """What agents and channels had to say."""
        return self._questions.agents.warnings

    def ask(
        self, what: str, args: Args, limit_s: float, hosts: Sequence[str] | None = None
    ) -> dict[str, Answer | Problem]:
        """Return the answer of each host's agent to one question, or why there is none, in the order of `hosts`.

        Args:
            what: name of a tool (`distrun_runtime.agent.query`).
            args: what it takes.
            limit_s: seconds that an agent has to answer, from the moment when it is there.
            hosts: whom to ask; all, if None.

        Raises:
            KeyboardInterrupt: Ctrl-C.
        """
        self._questions.ask(what, args, limit_s, hosts)
        self._run()
        return self._questions.answers()

    def _run(self) -> None:
        self._loop.run()
        if self._questions.agents.is_interrupted:
            self._questions.agents.is_interrupted = False
            raise KeyboardInterrupt


class Questions:
    """Decides what agents are asked, one question after another, and when an answer is late.

    Events in, actions out. `ask` and `let_go` take effect with the next Tick. No side effects.
    """

    def __init__(self, hosts: Sequence[str], hello_s: float | None = None) -> None:
        self.agents = Agents(hosts, hello_s)
        self._number = 0
        self._what = ""
        self._args: Args = {}
        self._limit_s = 0.0
        self._asked: tuple[str, ...] = ()
        self._found: dict[str, Answer | Problem] = {}
        self._new: list[str] = []
        """Hosts that this question has not reached: no deadline is known."""
        self._by: dict[str, float] = {}
        """Until when the agent has to answer, or to be there."""
        self._close_s: float | None = None

    def ask(self, what: str, args: Args, limit_s: float, hosts: Sequence[str] | None = None) -> None:
        """Begin a question; see `Fleet.ask`."""
        self._number += 1
        self._what, self._args, self._limit_s = what, args, limit_s
        self._asked = self.agents.hosts if hosts is None else tuple(hosts)
        self._found, self._new, self._by = {}, list(self._asked), {}

    def answers(self) -> dict[str, Answer | Problem]:
        """Return what the question brought, in the order of its hosts."""
        return {host: self._found[host] for host in self._asked}

    def let_go(self, limit_s: float) -> None:
        """End all agents; their ends are waited for at most so long."""
        self._close_s = limit_s

    @property
    def is_over(self) -> bool:
        """Whether the question is answered; after `let_go`: whether the agents have gone."""
        if self._close_s is not None:
            return self.agents.have_gone or (self.agents.is_closing and self.agents.is_interrupted)
        return self.agents.is_interrupted or not (self._new or self._by)

    def wake_s(self) -> float:
        """Return after how many seconds at most the next Tick is wanted."""
        return self.agents.wake_s(self._by.values())

    def handle(self, event: events.Event, now: float) -> list[AgentAction]:
        """Return what is to be done about `event`."""
        self.agents.note(event, now)
        if self._close_s is not None:
            return [] if self.agents.is_closing else self.agents.let_go(self._close_s)
        found: list[AgentAction] = []
        match event:
            case events.AgentHello(host=host) if host in self._by:
                found += self._put(host, now)
            case events.Answered(host=host) if event.id == self._number and host in self._by:
                self._take(host, Problem(host, "other", event.error) if event.error else Answer(event.value))
            case events.Tick():
                found += self._begin(now)
        for host in [host for host in self._by if host in self.agents.problems]:
            self._take(host, self.agents.problems[host])
        if isinstance(event, events.Tick):
            for host in [host for host, deadline in self._by.items() if now >= deadline]:
                found += self._late(host)
        return found

    def _begin(self, now: float) -> list[AgentAction]:
        """Ask the agents that are there, and let the others have their time."""
        found: list[AgentAction] = []
        for host in self._new:
            self._by[host] = self.agents.hello_by
            if host in self.agents.hellos and host not in self.agents.problems:
                found += self._put(host, now)
        self._new = []
        return found

    def _put(self, host: str, now: float) -> list[AgentAction]:
        self._by[host] = now + self._limit_s
        args = self._args(host) if callable(self._args) else self._args
        return [AskAgent(host, self._number, self._what, args)]

    def _take(self, host: str, answer: Answer | Problem) -> None:
        self._found[host] = answer
        del self._by[host]

    def _late(self, host: str) -> list[AgentAction]:
        if host in self.agents.hellos:
            text = f"its agent did not answer {self._what!r} within {self._limit_s:g} s"
            self._take(host, Problem(host, "timeout", text))
            return []
        problem = Problem(host, "timeout", f"no agent answered within {self.agents.hello_s:g} s")
        self._take(host, problem)
        return self.agents.give_up(problem)
