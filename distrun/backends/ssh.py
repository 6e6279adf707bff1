"""Jobs on hosts that ssh reaches: one connection and one agent each, nothing installed there but sshd and python3."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from distrun.backends import blob
from distrun.backends.base import Backend, Rendered, Swept
from distrun.errors import UsageError
from distrun.fleet import Answer, Fleet, Problem
from distrun.hosts import HostSpec, Inventory
from distrun.ssh import program, remote
from distrun.ssh.channel import SshChannel
from distrun.ssh.connector import Connector
from distrun.ssh.target import Target
from distrun_runtime.contract.plan import Host, Plan
from distrun_runtime.coordinator.channel import Channel

SWEEP_S = 20.0
"""How long, past the grace time, a host may take to be reached again and swept."""


class Ssh(Backend):
    """The hosts that the user named, by ssh."""

    name = "ssh"

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

    def reach(self, spec: HostSpec, options: Mapping[str, str]) -> Mapping[str, str]:
        """Return the host's `Target`, as text."""
        return Target.of(spec, **options).reach()

    def addresses(self, hosts: Sequence[str]) -> Mapping[str, str]:
        """Return nothing: how ssh reaches a host says nothing about the address of its data."""
        return {}

    def render(self, plan: Plan) -> Rendered:
        """Return the `ssh` command line that does what a connection does."""
        commands = {}
        for host in plan.hosts:
            target = _target(host)
            argv = [*program.arguments(target, {}, target.connect_s), "--", target.host, _command(target)]
            commands[host.name] = tuple(argv)
        return Rendered(commands, "the agent's modules, then frames")

    def connect(self, hosts: Sequence[Host]) -> tuple[Channel, ...]:
        """Return one channel for each host."""
        agent = blob.build()
        targets = [(host.name, _target(host)) for host in hosts]
        return tuple(SshChannel(name, each, _command(each), agent, self._connector) for name, each in targets)

    def release(self, plan: Plan, channels: Sequence[Channel], limit_s: float) -> Mapping[str, Swept]:
        """Wait for the ends of the connections; sweep hosts whose agent and guard were both killed."""
        until = time.monotonic() + limit_s
        ours = [channel for channel in channels if isinstance(channel, SshChannel)]
        for channel in ours:
            channel.join(until - limit_s / 2 - time.monotonic())
        cut = {channel.host for channel in ours if channel.was_cut}
        stray = [host for host in plan.hosts if host.name in cut]
        swept = self._sweep(plan, stray, plan.limits.grace_s, until - time.monotonic()) if stray else {}
        for channel in ours:
            channel.kill()
        self._connector.close()
        return swept

    def sweep(self, plan: Plan, grace_s: float) -> Mapping[str, Swept]:
        """End the job's processes on its hosts, over new connections."""
        try:
            return self._sweep(plan, plan.hosts, grace_s, grace_s + SWEEP_S)
        finally:
            self._connector.close()

    def _sweep(self, plan: Plan, hosts: Sequence[Host], grace_s: float, limit_s: float) -> dict[str, Swept]:
        with Fleet(self, hosts, limit_s) as fleet:
            found = fleet.ask("sweep", {"job": plan.job, "grace_s": grace_s}, limit_s)
        return {name: _swept(answer) for name, answer in found.items()}


def _swept(answer: Answer | Problem) -> Swept:
    if isinstance(answer, Problem):
        return Swept(problem=answer.text)
    ended, left = (tuple("pid %d (%s)" % (pid, text) for pid, text in answer.value[key]) for key in ("ended", "left"))
    return Swept(ended, left)


def _target(host: Host) -> Target:
    return Target.from_reach({"host": host.name, **host.reach})


def _command(target: Target) -> str:
    return remote.command(blob.BOOT, target.python)
