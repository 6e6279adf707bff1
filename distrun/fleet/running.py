"""One command on many hosts: a job of one task a host, whose hosts know nothing of each other."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distrun.fleet.relay import OnOutput, Relay
from distrun.fleet.talk import Fleet
from distrun.shell import quote
from distrun_runtime.contract import environ, facts
from distrun_runtime.contract.plan import ACTIVATE_S, WORKER, Host, Limits, Plan, Secrets, Task
from distrun_runtime.coordinator import events, frames
from distrun_runtime.coordinator.actions import Spawn, StopTasks
from distrun_runtime.coordinator.outcome import Problem

if TYPE_CHECKING:
    from distrun.backends.base import Backend

GRACE_S = 3.0
"""Seconds between asking the command to end and killing it, after --timeout or Ctrl-C."""
LOST_S = Limits().lost_s
"""A host that is silent for so long is lost."""
GLANCE_S = 1.0
SETTLE_S = 10.0
"""How long an agent may take to begin; and, when its command has ended, until more of the output comes."""
KEPT = 16 * 1024 * 1024
"""Bytes of each stream of a host that are kept, unless the caller says otherwise."""
IN_FOLDER = 'cd && cd -- "$0" && exec "$@"'
"""Run by sh: the folder is seen from the home directory."""


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

    def end(self, event: events.Exited) -> None:
        """Note its end."""
        self.code = facts.EXIT_TIMEOUT if self.is_late else facts.exit_code(event.code, event.signal)
        self.reason, self.sizes = event.reason, {"out": event.out, "err": event.err}


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
    return _Running(backend, hosts, plan, limit_s=limit_s, on_output=on_output, keep=keep).run()


def plan_of(backend: str, hosts: Sequence[Host], argv: Sequence[str] | Mapping[str, Sequence[str]], cwd: str) -> Plan:
    """Return the plan: one task a host. Not pure: its id is random."""
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
            Task(name="%s-%d" % (WORKER, rank), role=WORKER, rank=rank, host=host.name, argv=words[host.name], cwd="~")
            for rank, host in enumerate(hosts)
        ),
        limits=Limits(grace_s=GRACE_S),
        unset=environ.stale_names(),
    )


class _Running:
    """The run as it goes on."""

    def __init__(
        self,
        backend: Backend,
        hosts: Sequence[Host],
        plan: Plan,
        *,
        limit_s: float | None,
        on_output: OnOutput | None,
        keep: int,
    ) -> None:
        self._fleet = Fleet(backend, hosts)
        self._plan = plan
        self._limit_s = math.inf if limit_s is None else limit_s
        self._relay = None if on_output is None else Relay(on_output, self._fleet.wake)
        self._tasks = {task.host: task.name for task in plan.tasks}
        self._ran = {task.host: Ran(keep=keep) for task in plan.tasks}
        self._spawned: set[str] = set()
        self._acks: dict[tuple[str, str, str], int] = {}
        """Up to where each stream has come, if its agent was not told yet; by host, task, stream."""
        self._by: dict[str, float] = {}
        """Until when the next thing has to happen, for hosts that are not done."""

    def run(self) -> dict[str, Ran | Problem]:
        with self._fleet as fleet:
            self._by = dict.fromkeys(self._tasks, fleet.hello_by)
            try:
                while self._by:
                    event = fleet.next(min([time.monotonic() + GLANCE_S, *self._by.values()]))
                    if event is not None:
                        self._handle(event)
                    self._acknowledge()
                    self._look()
            except KeyboardInterrupt:
                fleet.close(GRACE_S + SETTLE_S, end=False)
                raise
            found = {name: self._result(name) for name in self._ran}
        if self._relay is not None:
            self._relay.join()
        return found

    def _handle(self, event: events.Event) -> None:
        host, now = getattr(event, "host", ""), time.monotonic()
        if host not in self._by:
            return
        ran = self._ran[host]
        if isinstance(event, events.AgentHello):
            self._fleet.send(host, frames.begin(self._plan, Secrets(), host))
            self._by[host] = now + SETTLE_S + (ACTIVATE_S if self._plan.activate else 0.0)
        elif isinstance(event, events.AgentReady):
            self._spawned.add(host)
            self._fleet.send(host, frames.spawn(Spawn(host, self._tasks[host])))
            self._by[host] = now + self._limit_s
        elif isinstance(event, events.Output):
            ran.take(event.stream, event.data)
            if self._relay is not None:
                self._relay.put(host, event.stream, event.data)
            self._acks[host, event.task, event.stream] = event.offset + len(event.data)
            if ran.code is not None:
                self._by[host] = now + SETTLE_S
        elif isinstance(event, events.Exited):
            ran.end(event)
            self._by[host] = now + SETTLE_S

    def _acknowledge(self) -> None:
        """Ask for more output, unless too much of it waits for its reader already."""
        if self._relay is None or self._relay.has_room:
            for (host, task, stream), offset in self._acks.items():
                if host not in self._fleet.problems:
                    self._fleet.send(host, frames.ack(task, stream, offset))
            self._acks.clear()
        now = time.monotonic()
        for host, _, _ in self._acks:
            if host in self._by and self._ran[host].code is not None:
                self._by[host] = now + SETTLE_S  # It is we who do not ask.

    def _look(self) -> None:
        """Let go of the hosts that are done, and end what took too long."""
        now = time.monotonic()
        for host in list(self._by):
            if self._ran[host].is_whole or host in self._fleet.problems:
                del self._by[host]
            elif now >= self._by[host]:
                self._late(host, now)
            elif self._fleet.silence(host) >= LOST_S:
                text = "it was silent for %.0f s; its agent, unless it is frozen, ends the command after %.0f s"
                text %= (LOST_S, Limits().lease_s)
                self._fleet.give_up(Problem(host, "timeout", text, "distrun kill --hosts %s --stale" % quote(host)))
                del self._by[host]

    def _late(self, host: str, now: float) -> None:
        ran = self._ran[host]
        if ran.code is not None:
            del self._by[host]  # Its output is kept as far as it came.
        elif host in self._spawned and not ran.is_late:
            ran.is_late = True
            ladder = (("TERM", GRACE_S), ("KILL", 0.0))
            self._fleet.send(host, frames.stop(StopTasks(host, (self._tasks[host],), ladder)))
            self._by[host] = now + GRACE_S + SETTLE_S
        else:
            what = "its agent did not say that the command has ended" if ran.is_late else "no agent was ready in time"
            self._fleet.give_up(Problem(host, "timeout", what))
            del self._by[host]

    def _result(self, host: str) -> Ran | Problem:
        ran, problem = self._ran[host], self._fleet.problems.get(host)
        if ran.code is None:
            return self._fleet.problems[host]
        if not ran.is_whole:
            text = "%d bytes of its output did not arrive" % ran.missing
            if problem is None:
                ran.problem = Problem(host, "timeout", "%s within %g s" % (text, SETTLE_S))
            else:
                ran.problem = Problem(host, problem.kind, "%s: %s" % (text, problem.text), problem.fix)
        return ran
