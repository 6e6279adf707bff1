"""Runs one command on many hosts: a job of one task a host, whose hosts know nothing of each other.

`run` connects and drives `RunCommand`, which decides what agents are sent and when a host is given up, by the
coordinator's loop.
"""

from __future__ import annotations

import math
import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distrun.fleet.questions import END_S, SIGNALS, Agents
from distrun.formats import quote
from distrun_runtime.contract import agent_messages, environ, facts
from distrun_runtime.contract.plan import ACTIVATE_S, WORKER, Host, Limits, Plan, Secrets, Task, shares
from distrun_runtime.coordinator import messages
from distrun_runtime.coordinator.channel import Put
from distrun_runtime.coordinator.failures import Problem
from distrun_runtime.coordinator.loop import HostLoop
from distrun_runtime.coordinator.messages import Ack, AgentAction, Begin, Show, Spawn, StopTasks

if TYPE_CHECKING:
    from distrun.backends.base import Backend

GRACE_S = 3.0
"""Seconds between asking the command to end and killing it, after --timeout or Ctrl-C."""
LOST_S = facts.LOST_S
"""A host that is silent for so long is lost."""
SETTLE_S = 10.0
"""How long an agent may take to begin; and, when its command has ended, until more of the output comes."""
KEPT = 16 * 1024 * 1024
"""Bytes of each stream of a host that are kept, unless the caller says otherwise."""
UNREAD_LIMIT = 8 * 1024 * 1024
"""Bytes that may wait for the reader of output before no more is asked for; agents keep the rest on their disks."""
IN_FOLDER = 'cd && cd -- "$0" && exec "$@"'
"""Run by sh: the folder is seen from the home directory."""

OnOutput = Callable[[str, str, bytes], None]
"""Takes host, stream ("out" or "err") and bytes."""


def run(
    backend: Backend,
    hosts: Sequence[Host],
    argv: Sequence[str] | Mapping[str, Sequence[str]],
    *,
    cwd: str = "",
    limit_s: float | None = None,
    on_output: OnOutput | None = None,
    keep: int = KEPT,
    activate: str = "",
) -> dict[str, Ran | Problem]:
    """Run a command once on each host, and return how it went by host, in their order.

    Its environment is what a login by this backend has. What it leaves running in the background is ended with it.

    Args:
        backend: what reaches the hosts.
        hosts: which.
        argv: executed exactly, without a shell; the same on all hosts, or by host.
        cwd: folder, seen from the home directory; empty: that.
        limit_s: seconds after which it is ended; None: no limit.
        on_output: called with host, stream ("out" or "err") and bytes as they come, in a thread of its own. While it
            takes its time, no more is asked for, and the hosts go on.
        keep: bytes of each stream that are kept in what is returned.
        activate: shell text that is run before; the command has the environment that it leaves.

    Raises:
        KeyboardInterrupt: after the command was asked to end everywhere, and killed if it did not.
    """
    plan = plan_of(backend.name, hosts, argv, cwd)._replace(activate=activate)
    share_of = shares(plan)
    command = RunCommand(plan, limit_s=limit_s, keep=keep, is_shown=on_output is not None)
    reader = _OutputThread(command, on_output or (lambda host, stream, data: None))
    channels = backend.connect(hosts)
    loop = HostLoop(
        reader,
        channels,
        encoders={Begin: lambda action: messages.begin(share_of(action.host), Secrets(), action.host)},
        signals=SIGNALS,
    )
    try:
        reader.start(loop.put)
        loop.run()
    finally:
        for channel in channels:
            channel.kill()
    if command.agents.is_interrupted:
        raise KeyboardInterrupt
    reader.join()
    return command.found


def plan_of(backend: str, hosts: Sequence[Host], argv: Sequence[str] | Mapping[str, Sequence[str]], cwd: str) -> Plan:
    """Return the plan: one task a host. Its id is random."""
    before = ("sh", "-c", IN_FOLDER, cwd) if cwd else ()
    commands = argv if isinstance(argv, Mapping) else {host.name: argv for host in hosts}
    words = {name: (*before, *command) for name, command in commands.items()}
    return Plan(
        job="exec-" + secrets.token_hex(4),
        name="exec",
        backend=backend,
        command=tuple(next(iter(commands.values()), ())),
        cwd="/",
        # No peer will ask for an address, so that the agent need not look for one: also where `iface=` is wrong.
        hosts=tuple(host._replace(address=host.address or "127.0.0.1", interface="") for host in hosts),
        tasks=tuple(
            Task(name=f"{WORKER}-{rank}", role=WORKER, rank=rank, host=host.name, argv=words[host.name], cwd="~")
            for rank, host in enumerate(hosts)
        ),
        limits=Limits(grace_s=GRACE_S),
        unset=environ.STALE,
    )


@dataclass
class Ran:
    """How the command went on one host."""

    code: int | None = None
    """Exit code, as a shell gives it: 128 and the number for a signal; 124: it took too long."""
    out: bytearray = field(default_factory=bytearray)
    err: bytearray = field(default_factory=bytearray)
    reason: str = ""
    """Why it could not be started."""
    is_late: bool = False
    """It was ended because its time was over."""
    problem: Problem | None = None
    """Why its output is not whole."""
    keep: int = KEPT
    """Bytes of each stream that are kept; 0: they are only passed on."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes that each stream had when the command ended."""
    taken: dict[str, int] = field(default_factory=lambda: {"out": 0, "err": 0})

    @property
    def is_whole(self) -> bool:
        """It has ended and all its output has come."""
        return self.code is not None and not self.missing

    @property
    def missing(self) -> int:
        """Bytes of its output that have not come, as far as is known."""
        return sum(max(0, size - self.taken[name]) for name, size in self.sizes.items())

    @property
    def is_cut(self) -> bool:
        """It wrote more than was kept."""
        return 0 < self.keep < max(self.taken.values())

    def take(self, stream: str, data: bytes) -> None:
        """Keep more output."""
        kept = self.out if stream == "out" else self.err
        kept += data[: max(0, self.keep - len(kept))]
        self.taken[stream] += len(data)

    def end(self, event: agent_messages.Exited) -> None:
        """Note its end."""
        self.code = facts.EXIT_TIMEOUT if self.is_late else facts.exit_code(event.code, event.signal)
        self.reason, self.sizes = event.reason, {"out": event.out, "err": event.err}


class RunCommand:
    """Decides what the agents of a plan with one task a host are sent, and how the command went.

    Events in, actions out; output is acknowledged as its reader takes it. No side effects.
    """

    def __init__(self, plan: Plan, *, limit_s: float | None = None, keep: int = KEPT, is_shown: bool = False) -> None:
        """Prepare to run the command.

        Args:
            plan: one task a host.
            limit_s: seconds after which the command is ended; None: no limit.
            keep: bytes of each stream that are kept.
            is_shown: output is passed on as it comes (`Show`).
        """
        self.agents = Agents([host.name for host in plan.hosts])
        self.found: dict[str, Ran | Problem] = {}
        """How it went, by host, once it is over everywhere."""
        self._limit_s = math.inf if limit_s is None else limit_s
        self._is_shown = is_shown
        self._begin_s = SETTLE_S + (ACTIVATE_S if plan.activate else 0.0)
        self._tasks = {task.host: task.name for task in plan.tasks}
        self._ran = {task.host: Ran(keep=keep) for task in plan.tasks}
        self._spawned: set[str] = set()
        self._acks: dict[tuple[str, str, str], Ack] = {}
        """What the agents were not told yet, by host, task and stream."""
        self._unread = 0
        """Bytes that were passed on and not taken yet."""
        self._has_begun = False
        self._by: dict[str, float] = {}
        """Until when the next thing has to happen, for hosts that are not done."""

    @property
    def is_over(self) -> bool:
        """Whether the command has ended and the agents have gone."""
        return self.agents.have_gone

    def wake_s(self) -> float:
        """Return after how many seconds at most the next Tick is wanted."""
        return self.agents.wake_s(self._by.values())

    def handle(self, event: messages.Event, now: float) -> list[AgentAction | Show]:
        """Return what is to be done about `event`."""
        self.agents.note(event, now)
        if not self._has_begun:
            self._has_begun = True
            self._by = dict.fromkeys(self._tasks, self.agents.hello_by)
        if isinstance(event, messages.Interrupt):
            # The agents end their tasks gently when they see the end of their input; a second Ctrl-C does not wait.
            limit_s = 0.0 if self.agents.is_closing else GRACE_S + SETTLE_S
            return [*self.agents.let_go(limit_s, end=False)]
        if self.agents.is_closing:
            return []
        found: list[AgentAction | Show] = [*self._take(event, now), *self._acknowledge(now)]
        for host in [host for host in self._by if self._ran[host].is_whole or host in self.agents.problems]:
            del self._by[host]
        if isinstance(event, messages.Tick):
            for host in list(self._by):
                found += self._look(host, now)
        if not self._by:
            self.found = {host: self._result(host) for host in self._ran}
            found += self.agents.let_go(END_S)
        return found

    def _take(self, event: messages.Event, now: float) -> list[AgentAction | Show]:
        if isinstance(event, messages.Shown):
            self._unread -= event.size
            return []
        host = getattr(event, "host", "")
        if host not in self._by:
            return []
        ran = self._ran[host]
        match event:
            case agent_messages.AgentHello():
                self._by[host] = now + self._begin_s
                return [Begin(host)]
            case agent_messages.AgentReady():
                self._spawned.add(host)
                self._by[host] = now + self._limit_s
                return [Spawn(host, self._tasks[host])]
            case agent_messages.Output():
                ran.take(event.stream, event.data)
                end = event.offset + len(event.data)
                self._acks[host, event.task, event.stream] = Ack(host, event.task, event.stream, end)
                if ran.code is not None:
                    self._by[host] = now + SETTLE_S
                if self._is_shown:
                    self._unread += len(event.data)
                    return [Show(host, event.stream, event.data)]
            case agent_messages.Exited():
                ran.end(event)
                self._by[host] = now + SETTLE_S
        return []

    def _acknowledge(self, now: float) -> list[AgentAction]:
        """Ask for more output, unless too much of it waits for its reader already."""
        acks = list(self._acks.values())
        if self._unread < UNREAD_LIMIT:
            self._acks.clear()
            return [ack for ack in acks if ack.host not in self.agents.problems]
        for ack in acks:
            if ack.host in self._by and self._ran[ack.host].code is not None:
                self._by[ack.host] = now + SETTLE_S  # it is we who do not ask
        return []

    def _look(self, host: str, now: float) -> list[AgentAction]:
        """End what took too long on a host, and let go of one that is lost."""
        ran = self._ran[host]
        if now < self._by[host]:
            if self.agents.silence_s(host) < LOST_S:
                return []
            text = f"it was silent for {LOST_S:.0f} s; its agent or guard ends the command after {facts.LEASE_S:.0f} s"
            problem = Problem(host, "timeout", text, f"distrun kill --hosts {quote(host)} --stale")
        elif ran.code is not None:
            del self._by[host]  # its output is kept as far as it came
            return []
        elif host in self._spawned and not ran.is_late:
            ran.is_late = True
            self._by[host] = now + GRACE_S + SETTLE_S
            return [StopTasks(host, (self._tasks[host],), (("TERM", GRACE_S), ("KILL", 0.0)))]
        else:
            what = "its agent did not say that the command has ended" if ran.is_late else "no agent was ready in time"
            problem = Problem(host, "timeout", what)
        del self._by[host]
        return self.agents.give_up(problem)

    def _result(self, host: str) -> Ran | Problem:
        ran, problem = self._ran[host], self.agents.problems.get(host)
        if ran.code is None:
            return self.agents.problems[host]
        if not ran.is_whole:
            text = f"{ran.missing} bytes of its output did not arrive"
            if problem is None:
                ran.problem = Problem(host, "timeout", f"{text} within {SETTLE_S:g} s")
            else:
                ran.problem = Problem(host, problem.kind, f"{text}: {problem.text}", problem.fix)
        return ran


class _OutputThread:
    """The command's decisions for the loop, whose output is handed on by a thread of its own.

    A slow reader does not delay the hosts.
    """

    def __init__(self, command: RunCommand, on_output: OnOutput) -> None:
        self._command = command
        self._on_output = on_output
        self._pieces: queue.SimpleQueue[Show | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._put: Put = lambda event: None
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)

    def start(self, put: Put) -> None:
        """Start the thread, which puts `Shown`."""
        self._put = put
        self._thread.start()

    def join(self) -> None:
        """Wait until all is handed on, as long as the reader takes; raise what `on_output` raised."""
        self._pieces.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    @property
    def is_over(self) -> bool:
        return self._command.is_over

    def wake_s(self) -> float:
        return self._command.wake_s()

    def handle(self, event: messages.Event, now: float) -> list[AgentAction]:
        """Have the command decide; queue what is to be shown."""
        found: list[AgentAction] = []
        for action in self._command.handle(event, now):
            if isinstance(action, Show):
                self._pieces.put(action)
            else:
                found.append(action)
        return found

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            if self._error is None:
                try:
                    self._on_output(piece.host, piece.stream, piece.data)
                except Exception as err:  # the caller's: it is raised where the caller is
                    self._error = err
            self._put(messages.Shown(len(piece.data)))
