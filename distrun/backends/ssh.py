"""Jobs on hosts that ssh reaches: one connection and one agent each, nothing installed there but sshd and python3."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from distrun import formats, shipping
from distrun.backends.base import GUARD_S, Backend, Rendered, Swept, marks
from distrun.errors import UsageError
from distrun.fleet import Fleet
from distrun.fleet.questions import HostAnswer
from distrun.hosts import HostSpec, Inventory
from distrun.ssh.connector import Connector, SshChannel
from distrun.ssh.resolve import PROGRAM, Target, remote_command, ssh_arguments, ssh_flags
from distrun_runtime.contract.plan import Host, Plan, Reach
from distrun_runtime.coordinator.channel import AgentChannel

if TYPE_CHECKING:
    from distrun.sync.copier import Copier, CopyRequest, Says

SWEEP_S = 20.0
"""How long a host may take to be swept, beyond the two grace times that this takes at most."""
REACH_S = 15.0
"""How long a host that was lost may take to be reached again."""


class Ssh(Backend):
    """The hosts that the user named, by ssh."""

    name = "ssh"
    hosts_coordinator = True

    def __init__(self) -> None:
        self._connector = Connector()
        self.asker = self._connector.asker

    def inventory(self, found: Inventory | None) -> Inventory:
        """Return the hosts that the user named.

        Raises:
            UsageError: there are none.
        """
        if found is None or not found.specs:
            raise UsageError(
                "--launcher ssh: no hosts were named", "give a file with -H FILE, or a list with --hosts a,b"
            )
        return found

    def reach(self, spec: HostSpec, options: Mapping[str, str]) -> Reach:
        """Return the host's `Target`, as text."""
        return Reach(Target.of(spec, **options).texts())

    def login(self, reach: Reach) -> str:
        """Return the `ssh` command for that host."""
        target = _target(reach)
        return formats.join([PROGRAM, *ssh_flags(target), target.host])

    def copier(self, hosts: Sequence[Host], request: CopyRequest, sink: Says) -> Copier:
        """Return a copier whose ssh reaches the hosts as our connections do, with what the user typed for these."""
        from distrun.sync.copier import Copier  # most launches copy nothing

        targets = {host.name: _target(host.reach, host.name) for host in hosts}
        return Copier(targets, request, sink, asker=self.asker)

    def render(self, plan: Plan) -> Rendered:
        """Return the `ssh` command line that does what a connection does."""
        commands = {}
        for host in plan.hosts:
            target = _target(host.reach, host.name)
            command = _command(target, plan.job, plan.nonce, host.name)
            argv = [*ssh_arguments(target, {}, target.connect_s), "--", target.host, command]
            commands[host.name] = tuple(argv)
        return Rendered(commands, "the agent's modules, then frames")

    def connect(
        self, hosts: Sequence[Host], job: str = "", nonce: str = "", holds_s: float = 0.0
    ) -> tuple[AgentChannel, ...]:
        """Return one channel for each host."""
        agent = shipping.agent()
        targets = [(host.name, _target(host.reach, host.name)) for host in hosts]
        return tuple(
            SshChannel(name, target, _command(target, job, nonce, name), agent, self._connector, holds_s=holds_s)
            for name, target in targets
        )

    def release(self, channels: Sequence[AgentChannel], limit_s: float) -> tuple[str, ...]:
        """Wait for the ends of the connections, which come when agent and guard have ended."""
        until = time.monotonic() + GUARD_S
        ours = [channel for channel in channels if isinstance(channel, SshChannel)]
        for channel in ours:
            channel.join(until - time.monotonic())
        for channel in ours:
            channel.kill()
        self._connector.close()
        return tuple(channel.host for channel in ours if not channel.ended_well)

    def sweep(self, plan: Plan, grace_s: float, hosts: Sequence[str] | None = None) -> Mapping[str, Swept]:
        """End the job's processes on its hosts, over new connections."""
        chosen = [host for host in plan.hosts if hosts is None or host.name in hosts]
        limit_s = 2 * grace_s + SWEEP_S
        try:
            with Fleet(self, chosen, limit_s if hosts is None else REACH_S) as fleet:
                found = fleet.ask("sweep", {"job": plan.job, "nonce": plan.nonce, "grace_s": grace_s}, limit_s)
        finally:
            self._connector.close()
        return {
            name: Swept.of(answer.value["ended"], answer.value["left"])
            if isinstance(answer, HostAnswer)
            else Swept(problem=answer.text)
            for name, answer in found.items()
        }


def _target(reach: Reach, name: str = "") -> Target:
    """Return the target that `Ssh.reach` wrote; where it names no host, `name` is the host."""
    return Target.parse({"host": name, **reach})


def _command(target: Target, job: str, nonce: str, host: str) -> str:
    return remote_command(shipping.BOOT, target.python, env=marks(job, nonce, host))
