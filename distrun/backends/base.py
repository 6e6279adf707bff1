"""What a backend is: it says what it would execute, and it opens a channel to an agent on each host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distrun_runtime.contract.plan import Host, Plan
from distrun_runtime.coordinator.channel import Channel

if TYPE_CHECKING:
    from distrun.hosts import HostSpec, Inventory
    from distrun.ssh.ask import Asker


@dataclass(frozen=True)
class Rendered:
    """Exactly what a backend executes to start the agents; the dry run shows it."""

    commands: Mapping[str, tuple[str, ...]]
    """argv, by host."""
    stdin: str
    """What is written to each, in words. Nothing of the user's is on a command line."""


@dataclass(frozen=True)
class Swept:
    """What became of the processes of a job whose agents were gone. Each is named as `pid 123 (command)`."""

    ended: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    """What would not end, or is not ours to signal."""
    problem: str = ""
    """Why the host could not be asked; empty: it was."""

    @property
    def told_left(self) -> list[str]:
        """What to tell the user of processes that are still there, a line each."""
        return ["%s did not end" % each for each in self.left]

    @property
    def told_problem(self) -> list[str]:
        """What to tell the user of a host that did not answer; empty if it did."""
        return ["cannot be asked: %s" % self.problem] if self.problem else []

    def lines(self) -> list[str]:
        """Return what to tell the user, a line each."""
        lines = ["ended %s" % each for each in self.ended] + self.told_left + self.told_problem
        return lines if self.left or self.problem else [*lines, "all its processes have ended"]


class Backend(ABC):
    """One way to start agents. Backends do not know each other, and decide nothing about a job."""

    name: str
    needs_hosts: bool = True
    """Whether the user must say which hosts."""
    inherits_env: bool = False
    """Whether tasks see the launcher's own environment without anything being forwarded."""
    ships_runtime: bool = True
    """Whether hosts have to be sent the bundled runtime; else they see this machine's folder."""
    asker: Asker | None = None
    """Knows what the user typed to get into hosts; None: nothing was asked."""

    @abstractmethod
    def inventory(self, found: Inventory | None) -> Inventory:
        """Return the job's hosts, given those that the user named (None: none)."""

    def reach(self, spec: HostSpec, options: Mapping[str, str]) -> Mapping[str, str]:
        """Return how a host is reached, in this backend's own words: `Host.reach` of the plan. Pure.

        Options are the user's, for all hosts (`transport`, `strict`, `config`, `connect_s`); empty ones are left out.
        """
        return {}

    @abstractmethod
    def addresses(self, hosts: Sequence[str]) -> Mapping[str, str]:
        """Return the data addresses that are known beforehand, by host; agents find the others."""

    @abstractmethod
    def render(self, plan: Plan) -> Rendered:
        """Return what would be executed. No effects."""

    @abstractmethod
    def connect(self, hosts: Sequence[Host]) -> tuple[Channel, ...]:
        """Return one channel for each host. Nothing is started before a channel's own `start`."""

    @abstractmethod
    def release(self, plan: Plan, channels: Sequence[Channel], limit_s: float) -> Mapping[str, Swept]:
        """Wait, at most so long, until what `connect` started has gone; then end what has not.

        The job is over. An agent that froze, or that died together with its guard, is this method's business. Returns
        what became of the hosts that had to be swept.
        """

    @abstractmethod
    def sweep(self, plan: Plan, grace_s: float) -> Mapping[str, Swept]:
        """End whatever is left of a job whose agents are gone, on all its hosts; nothing left is no error."""
