"""Asks the agents of many hosts, without a job: what a host has, and which jobs run there.

    with Fleet(backend, hosts) as fleet:
        found = fleet.ask("survey", {}, 30.0)

Each host gives a `HostAnswer` or a `Problem`. An answer may be a stream, which is read piece by piece:

    with Fleet(backend, [host]) as fleet:
        fleet.begin("jobs", {"jobs": [["calm-otter", folder, ""]]})
        while isinstance(found := fleet.next(), AnswerPiece): ...

What to send and when to give up is decided by `Questions`, which the
coordinator's loop drives.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distrun.errors import UsageError
from distrun.formats import age
from distrun_runtime.contract import agent_messages, facts
from distrun_runtime.contract.agent_messages import AnswerPiece
from distrun_runtime.contract.plan import Host
from distrun_runtime.coordinator import messages
from distrun_runtime.coordinator.failures import Problem
from distrun_runtime.coordinator.loop import HostLoop
from distrun_runtime.coordinator.messages import AgentAction, AskAgent, Close, Drop, EndAgent

if TYPE_CHECKING:
    from distrun.backends.base import Backend


# The agents of some hosts while no job runs: who is there, who cannot be used, and how they are let go.


HELLO_S = 60.0
"""How long the first frame of an agent is waited for, and HELLO_EACH_S more for each host: they come in turns."""
HELLO_EACH_S = 0.5
END_S = 3.0
"""How long the end of agents that were told to end is waited for."""
TICK_S = 1.0
"""Seconds between two looks at the clock, at most."""
SILENT_S = 15.0
"""A host that sends a stream is lost when nothing has come from it for so long, not even the answers to our pings."""
AWAY_S = 5.0
"""If the loop did not run for so long, this process was stopped, or asked for no piece: silence is counted anew. So it
is while there are pieces: what comes behind them is not read."""
SIGNALS = ("INT",)
"""Signals that the loop turns into events; all others keep their usual effect."""


class Agents:
    """What events tell of the agents of `hosts`. `now`: monotonic clock, seconds. No side effects."""

    def __init__(self, hosts: Iterable[str], hello_s: float | None = None) -> None:
        self.hosts = tuple(hosts)
        self.hello_s = HELLO_S + HELLO_EACH_S * len(self.hosts) if hello_s is None else hello_s
        self.hello_by = 0.0
        """When an agent that has not sent a frame is late."""
        self.hellos: dict[str, agent_messages.AgentHello] = {}
        self.problems: dict[str, Problem] = {}
        """Hosts that cannot be used any more, and why."""
        self.warnings: list[agent_messages.Warned] = []
        self.is_interrupted = False
        """Ctrl-C came while the loop ran."""
        self.now = 0.0
        """When the last event was taken in."""
        self._gone: set[str] = set()
        self._heard: dict[str, float] = {}
        self._close_by: float | None = None

    @property
    def is_closing(self) -> bool:
        """Whether the agents were let go."""
        return self._close_by is not None

    @property
    def have_gone(self) -> bool:
        """Whether the agents were let go and have ended, or are not waited for any longer."""
        return self._close_by is not None and (self._gone >= self.hellos.keys() or self.now >= self._close_by)

    def note(self, event: messages.Event, now: float) -> None:
        """Take in an event. The first one starts the time within which agents have to answer."""
        self.hello_by = self.hello_by or now + self.hello_s
        self.now = now
        host = getattr(event, "host", "")
        if host:
            self._heard[host] = now
        match event:
            case agent_messages.AgentHello():
                self.hellos[host] = event
            case agent_messages.StartFailed():
                self._gone.add(host)
                self.problems.setdefault(host, Problem(host, event.kind or "other", event.reason, event.fix))
            case messages.AgentLost():
                self._gone.add(host)
                self.problems.setdefault(host, Problem(host, "other", event.reason))
            case agent_messages.Warned():
                self.warnings.append(event)
            case messages.Interrupt():
                self.is_interrupted = True

    def silence_s(self, host: str) -> float:
        """Return for how long nothing has come from a host that was there; the loop pings it."""
        return self.now - self._heard.get(host, self.now)

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
        self._close_by = self.now + limit_s
        found: list[AgentAction] = []
        for host in self.hosts:
            if end and host in self.hellos and host not in self._gone:
                found.append(EndAgent(host))
            found.append(Close(host) if host in self.hellos else Drop(host))
        return found

    def wake_s(self, deadlines: Iterable[float]) -> float:
        """Return how long nothing has to be done, if it has to be at these times."""
        due = [self._close_by] if self._close_by is not None else [*deadlines]
        return max(0.0, min([TICK_S, *(each - self.now for each in due)]))


Args = Mapping[str, Any] | Callable[[str], Mapping[str, Any]]
"""Arguments of a tool: the same for all hosts, or by host."""


@dataclass(frozen=True)
class HostAnswer:
    """What a host's agent answered."""

    value: Any


class Fleet(contextlib.AbstractContextManager["Fleet"]):
    """Connections to the agents of some hosts, from `with` to its end. One thread asks; any may `send` and `cut`.

    The first question connects.
    """

    def __init__(self, backend: Backend, hosts: Sequence[Host], hello_s: float | None = None) -> None:
        """`hello_s`: how long the first frame of an agent is waited for."""
        self._backend = backend
        self._channels = backend.connect(hosts)
        self._questions = Questions([channel.host for channel in self._channels], hello_s)
        self.agents = self._questions.agents
        self._loop = HostLoop(self._questions, self._channels, signals=SIGNALS)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """End the agents; at a Ctrl-C without waiting for them."""
        self._questions.let_go(0.0 if kind is not None and not issubclass(kind, Exception) else END_S)
        try:
            self._run()
        finally:
            for channel in self._channels:
                channel.kill()

    def ask(
        self, what: str, args: Args, limit_s: float, hosts: Sequence[str] | None = None
    ) -> dict[str, HostAnswer | Problem]:
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

    def begin(self, what: str, args: Args) -> None:
        """Begin a question that the agent of the one host answers with a stream, which `next` gives."""
        self._questions.ask(what, args, SILENT_S, is_stream=True)

    def next(self, limit_s: float = math.inf) -> AnswerPiece | HostAnswer | Problem | None:
        """Return the next piece of the stream, or, after the last one, its end: a problem if it broke off.

        None: nothing came within `limit_s`. The agent sends more only as pieces are taken here. Signals are left alone.
        """
        self._questions.until = time.monotonic() + limit_s
        self._loop.drive()
        if not self._questions.pieces:
            return next(iter(self._questions.answers().values()), None)
        piece = self._questions.pieces.popleft()
        self._channels[0].send(messages.stream(len(piece.data)))
        return piece

    def send(self, job: str, data: bytes) -> None:
        """Have the one host pass `data` on to the control socket of a job whose stream goes on."""
        self._channels[0].send(messages.stream(0, job, data))

    def cut(self) -> None:
        """End all connections at once: `next` returns a problem."""
        for channel in self._channels:
            channel.kill()

    def close(self) -> None:
        """End all connections at once, and wait for their ends."""
        self.cut()
        self._backend.release(self._channels, 0.0)

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
        self._is_stream = False
        self.pieces: deque[AnswerPiece] = deque()
        """Pieces of a stream that were not taken yet."""
        self.until = math.inf
        """How long the next one is waited for."""
        self._found: dict[str, HostAnswer | Problem] = {}
        self._new: list[str] = []
        """Hosts that this question has not reached: no deadline is known."""
        self._by: dict[str, float] = {}
        """Until when the agent has to answer, or to be there."""
        self._close_s: float | None = None

    def ask(
        self, what: str, args: Args, limit_s: float, hosts: Sequence[str] | None = None, is_stream: bool = False
    ) -> None:
        """Begin a question; see `Fleet.ask`. `is_stream`: `limit_s` is how long a host may be silent."""
        self._number += 1
        self._is_stream, self.until = is_stream, math.inf
        self.pieces.clear()
        self._what, self._args, self._limit_s = what, args, limit_s
        self._asked = self.agents.hosts if hosts is None else tuple(hosts)
        self._found, self._new, self._by = {}, list(self._asked), {}

    def answers(self) -> dict[str, HostAnswer | Problem]:
        """Return what the question brought, in the order of its hosts."""
        return {host: self._found[host] for host in self._asked if host in self._found}

    def let_go(self, limit_s: float) -> None:
        """End all agents; their ends are waited for at most so long."""
        self._close_s = limit_s

    @property
    def is_over(self) -> bool:
        """Whether the question is answered; after `let_go`: whether the agents have gone."""
        if self._close_s is not None:
            return self.agents.have_gone or (self.agents.is_closing and self.agents.is_interrupted)
        is_answered = bool(self.pieces) or not (self._new or self._by)
        return self.agents.is_interrupted or is_answered or self.agents.now >= self.until

    def wake_s(self) -> float:
        """Return after how many seconds at most the next Tick is wanted."""
        return self.agents.wake_s([*self._by.values(), self.until])

    def handle(self, event: messages.Event, now: float) -> list[AgentAction]:
        """Return what is to be done about `event`."""
        was_away = now - self.agents.now > AWAY_S
        self.agents.note(event, now)
        if self._is_stream:
            heard = self._by if was_away or self.pieces else (getattr(event, "host", ""),)
            there = [host for host in heard if host in self._by and host in self.agents.hellos]
            self._by.update(dict.fromkeys(there, now + self._limit_s))
        if self._close_s is not None:
            return [] if self.agents.is_closing else self.agents.let_go(self._close_s)
        found: list[AgentAction] = []
        match event:
            case agent_messages.AgentHello(host=host) if host in self._by:
                found += self._put(host, now)
            case AnswerPiece(host=host) if event.id == self._number and host in self._by:
                self.pieces.append(event)
            case agent_messages.Answered(host=host) if event.id == self._number and host in self._by:
                self._take(host, Problem(host, "other", event.error) if event.error else HostAnswer(event.value))
            case messages.Tick():
                found += self._begin(now)
        for host in [host for host in self._by if host in self.agents.problems]:
            self._take(host, self.agents.problems[host])
        if isinstance(event, messages.Tick):
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

    def _take(self, host: str, answer: HostAnswer | Problem) -> None:
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


# Jobs on hosts and their processes, read from the answers of agents' tools.


SHOWN = 100
"""Characters of a command line in a table; the JSON has all."""
_OWN = ("agent", "guard", facts.HELPER)
"""Processes of a job that are no tasks, by what they are called in place of one."""


@dataclass(frozen=True)
class JobProcess:
    """One process of a host."""

    pid: int
    start: str
    """Opaque: tells it from a later one of the same pid."""
    command: str
    task: str = ""
    """Which task of the job it belongs to, `agent`, `guard` or `helper`; empty: not known."""
    age_s: float | None = None


@dataclass(frozen=True)
class HostJob:
    """A job on one host."""

    host: str
    """What we call it."""
    job: str
    agent: str
    """alive, stopped, dead or none."""
    guard: str
    processes: tuple[JobProcess, ...]
    quiet_s: float | None = None
    """How long ago its agent heard from its launcher, at most."""
    lease_s: float | None = None
    grace_s: float | None = None
    """What its tasks have between TERM and KILL; None: nothing tells."""
    nonce: str = ""
    """Tells it from a job of another store by the same id."""

    @property
    def mark(self) -> str:
        """Which job it is of all stores: `ID/NONCE`; of an older version the id."""
        return f"{self.job}/{self.nonce}" if self.nonce else self.job

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of its tasks that have a process here."""
        names = (each.task for each in self.processes if each.task not in ("", *_OWN))
        return tuple(dict.fromkeys(names))

    @property
    def age_s(self) -> float | None:
        """How old its oldest process is; None: nothing tells."""
        return max((each.age_s for each in self.processes if each.age_s is not None), default=None)

    @property
    def is_stale(self) -> bool:
        """Whether it is abandoned: its agent is dead, stopped, or past its lease."""
        return self.agent != facts.AGENT_ALIVE or self.is_past_lease

    @property
    def is_past_lease(self) -> bool:
        """Whether its agent has not heard from its launcher for so long that it should have ended the job."""
        return self.quiet_s is not None and self.lease_s is not None and self.quiet_s > self.lease_s

    def state(self) -> str:
        """Return how its agent stands, in words."""
        if self.agent == facts.AGENT_ALIVE:
            return f"silent {age(self.quiet_s)}" if self.is_past_lease else "runs"
        return "agent " + {facts.AGENT_STOPPED: "stopped", facts.AGENT_NONE: "unknown"}.get(self.agent, "gone")


def read(host: str, answer: Mapping[str, Any]) -> list[HostJob]:
    """Return the jobs of a host from what its agent's `survey` answered."""
    return [
        HostJob(
            host,
            str(each["job"]),
            str(each["agent"]),
            str(each["guard"]),
            processes(each["processes"]),
            each.get("quiet_s"),
            each.get("lease_s"),
            each.get("grace_s"),
            str(each.get("nonce") or ""),
        )
        for each in answer["jobs"]
    ]


def processes(rows: Iterable[Mapping[str, Any]]) -> tuple[JobProcess, ...]:
    """Return the processes that a tool told of."""
    return tuple(
        JobProcess(
            int(row["pid"]), str(row["start"]), str(row["command"]), str(row.get("task") or ""), row.get("age_s")
        )
        for row in rows
    )


def chosen(found: Iterable[HostJob], jobs: Sequence[str] = (), stale: bool = False) -> list[HostJob]:
    """Return the jobs that are meant, stale ones if so: those named; all without names.

    A name is an id, the beginning of one, or `ID/NONCE` where two stores have a job of that id.

    Raises:
        UsageError: a name could be several jobs, or is empty.
    """
    rows = [each for each in found if each.is_stale or not stale]
    ids: dict[str, str] = {each.mark: each.job for each in rows}
    meant = {each for word in jobs for each in _meant(word, ids)} if jobs else set(ids)
    return [each for each in rows if each.mark in meant]


def names(rows: Iterable[HostJob]) -> dict[str, str]:
    """Return what jobs are called, by `mark`: the id; `ID/NONCE` where two of them have the same id."""
    ids = {each.mark: each.job for each in rows}
    alike = list(ids.values())
    return {mark: mark if alike.count(job) > 1 else job for mark, job in ids.items()}


def _meant(word: str, ids: Mapping[str, str]) -> list[str]:
    """Return the marks of the one job that `word` names, none if there is none. `ids`: by mark."""
    if not word.strip():
        raise UsageError(f"there is no job {word!r}", "leave it out to mean all of mine on these hosts, or type an id")
    exact = [mark for mark, job in ids.items() if word in (mark, job)]
    found = exact or [mark for mark in ids if mark.startswith(word)]
    if len(found) > 1:
        told = found if len({ids[mark] for mark in found}) < len(found) else [ids[mark] for mark in found]
        raise UsageError(f"{word!r} could be {', '.join(told)}", "type more of the id, or name each of them")
    return found


def shown(process: JobProcess) -> str:
    """Return a process's command for a table: ours by its name, for theirs is long; others cut."""
    if process.task in _OWN:
        return f"distrun's {process.task}"
    return process.command if len(process.command) <= SHOWN else process.command[:SHOWN] + "..."
