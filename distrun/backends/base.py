"""The base class of backends: a backend says what it would execute, and opens a channel to an agent on each host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from distrun.errors import UsageError
from distrun.formats import number_of
from distrun_runtime.contract import process
from distrun_runtime.contract.plan import HOLD, Host, Plan, Reach

if TYPE_CHECKING:
    from pathlib import Path

    from distrun.hosts import HostSpec, Inventory
    from distrun.ssh.ask import Asker
    from distrun.sync.copier import CopyRequest, FileCopier, Says
    from distrun_runtime.coordinator.channel import AgentChannel
    from distrun_runtime.coordinator.failures import Outcome


GUARD_S = 5.0
"""How long the end of a guard that has nothing to do any more is waited for; it needs milliseconds."""


class Rendered(NamedTuple):
    """Exactly what a backend executes to start the agents; the dry run shows it."""

    commands: Mapping[str, tuple[str, ...]]
    """argv, by host."""
    stdin: str
    """What is written to each, in words. Nothing of the user's is on a command line."""


class Swept(NamedTuple):
    """What became of the processes of a job whose agents were gone. Each is named as `pid 123 (command)`."""

    ended: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    """What would not end, or is not ours to signal."""
    problem: str = ""
    """Why the host could not be asked; empty: it was."""

    @staticmethod
    def of(*found: Iterable[tuple[int, str]]) -> Swept:
        """Return what an agent says: the processes that have ended and those that are left, each as pid and command."""
        ended, left = (tuple(f"pid {int(pid)} ({command})" for pid, command in rows) for rows in found)
        return Swept(ended, left)

    @property
    def told_left(self) -> list[str]:
        """What to tell the user of processes that are still there, a line each."""
        return [f"{each} did not end" for each in self.left]

    @property
    def told_problem(self) -> list[str]:
        """What to tell the user of a host that did not answer; empty if it did."""
        return [f"cannot be asked: {self.problem}"] if self.problem else []

    @property
    def short(self) -> str:
        """What became of the host, in a few words."""
        if self.problem:
            return "it cannot be reached again"
        if self.left:
            return f"{number_of(len(self.left), 'process')} there did not end"
        if not self.ended:
            return "no process is left there"
        return f"{number_of(len(self.ended), 'process')} left there {'was' if len(self.ended) == 1 else 'were'} ended"

    def lines(self) -> list[str]:
        """Return what to tell the user, a line each."""
        lines = [f"ended {each}" for each in self.ended] + self.told_left + self.told_problem
        return lines if self.left or self.problem else [*lines, "all its processes have ended"]


class Backend(ABC):
    """One way to start agents. Backends do not know each other, and decide nothing about a job."""

    name: str
    needs_hosts: bool = True
    """Whether the user must say which hosts."""
    inherits_env: bool = False
    """Whether tasks see the launcher's own environment without anything being forwarded."""
    hosts_coordinator: bool = False
    """Whether the coordinator of a detached job runs on one of its hosts; else where distrun was typed."""
    ships_runtime: bool = True
    """Whether hosts have to be sent the bundled runtime; else they see this machine's folder."""
    is_engine: bool = False
    """Whether it finds room for a job itself, so that a plan is made when the job's places are known (`queue`)."""
    copies_over_channels: bool = False
    """Whether `copier` sends files over the agents' channels, which take `facts.CHANNEL_COPY_LIMIT` at most."""
    asker: Asker | None = None
    """Knows what the user typed to get into hosts; None: nothing was asked."""

    @abstractmethod
    def inventory(self, found: Inventory | None) -> Inventory:
        """Return the job's hosts, given those that the user named (None: none)."""

    def reach(self, spec: HostSpec, options: Mapping[str, str]) -> Reach:
        """Return how a host is reached: `Host.reach` of the plan, which only this backend reads. No side effects.

        Options are the user's, for all hosts (`transport`, `strict`, `config`, `connect_s`); empty ones are left out.
        """
        return Reach({})

    def login(self, reach: Reach) -> str:
        """Return what a user types before a command to run it on a host that is reached so; empty: nothing."""
        return ""

    def copier(self, hosts: Sequence[Host], request: CopyRequest, sink: Says) -> FileCopier:
        """Return what copies files to the hosts, not yet started. Messages go to `sink`, from threads of the copier's.

        Raises:
            UsageError: this backend copies no files.
        """
        raise UsageError(f"--launcher {self.name} copies no files to its hosts", "leave out --sync-dst-dir")

    def addresses(self, hosts: Sequence[str]) -> Mapping[str, str]:
        """Return the data addresses that are known beforehand, by host; agents find the others."""
        return {}

    def render(self, plan: Plan) -> Rendered:
        """Return what would be executed. No effects."""
        return Rendered({}, "")

    @abstractmethod
    def connect(
        self, hosts: Sequence[Host], job: str = "", nonce: str = "", holds_s: float = 0.0
    ) -> tuple[AgentChannel, ...]:
        """Return one channel for each host. Nothing is started before a channel's own `start`.

        `job`, `nonce`: the job whose agents they are. Agents and guards carry its marks (`marks`), as its tasks do.
        Without a job they carry none.
        `holds_s`: how long agents go on without a connection, so that it can be made again; 0: they do not.
        """

    def channels(self, plan: Plan) -> tuple[AgentChannel, ...]:
        """Return the channels of a job: one for each place of its plan, called as the place. See `connect`."""
        # Not every backend can make a connection again; it need not know the argument then.
        holds = {"holds_s": plan.limits.lease_s} if plan.on_eof == HOLD else {}
        return self.connect(plan.hosts, plan.job, plan.nonce, **holds)

    def start_agents(self, plan: Plan) -> None:  # noqa: B027 - most can do so only by their channels
        """Start the agents that `channels` is to lead to, if that is possible before. Does nothing by default.

        Called first in the coordinator's process, while nothing hears agents yet and signals may wait
        (`launching.HELD`), of jobs that are not run by a host. What it raises is ignored, and must leave nothing
        behind: `channels` then begins anew. Else `channels` leads to these agents, and `release` ends those that it
        was never asked for.
        """

    def boot(self, channels: Sequence[AgentChannel]) -> None:  # noqa: B027 - most have nothing to do
        """Begin what agents can do while the coordinator is not ready to hear them. Does nothing by default."""

    def explained(self, outcome: Outcome) -> Outcome:
        """Return an outcome with what the backend knows of a failure. It may take a few seconds."""
        return outcome

    def withdraw(self, folder: Path) -> Mapping[str, Swept]:
        """End what was asked for of a job that never was planned; by name of who was asked. `folder`: the job's."""
        return {}

    @abstractmethod
    def release(self, channels: Sequence[AgentChannel], limit_s: float) -> tuple[str, ...]:
        """Wait until what `connect` started has gone, at most so long where tasks are still being ended.

        The job is over; or it did not come to `connect`, and there are no channels. Returns the hosts on which
        something may be left: agent or guard froze, or both were killed, or the connection was lost. `sweep` ends it.
        """

    @abstractmethod
    def sweep(self, plan: Plan, grace_s: float, hosts: Sequence[str] | None = None) -> Mapping[str, Swept]:
        """End whatever is left of a job whose agents are gone; nothing left is no error.

        `hosts`: on these only, which were lost and may not be reachable; None: on all.
        """


def marks(job: str, nonce: str, host: str) -> dict[str, str]:
    """Return the variables by which processes of a job on a host are found; none without a job. No side effects."""
    return process.marks(job, nonce, host) if job else {}
