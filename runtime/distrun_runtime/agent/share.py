"""One host's share of a job: what `begin` gave the agent, and what the agent prepared for it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any, Dict, Mapping

from distrun_runtime.agent import ports, record, tasks
from distrun_runtime.contract import environ, wire
from distrun_runtime.contract.plan import Host, Plan, Task, from_json
from distrun_runtime.errors import ContractError


@dataclass(frozen=True)
class Share:
    """The plan cut down to this host, its address, its held ports, its private folder."""

    plan: Plan
    host: str
    address: str
    """IP address that peers use for this host."""
    held: Mapping[str, socket.socket]
    """Held ports by their label."""
    folder: str
    token_file: str
    secret_env: Mapping[str, str]

    @property
    def spool_folder(self) -> str:
        """Where the tasks' output is kept until it was taken."""
        return os.path.join(self.folder, "spool")

    @property
    def marks(self) -> Dict[str, str]:
        """What a process of the job is known by, whoever its parent is by then."""
        return {"DISTRUN_JOB_ID": self.plan.job, "DISTRUN_HOST": self.host}

    def environment(self, task: Task, sent: Mapping[str, str]) -> Dict[bytes, bytes]:
        """Return a task's environment: ours without stale names, its secrets, what was sent with it, and our marks."""
        who = {"DISTRUN_ROLE": task.role, "DISTRUN_RANK": str(task.rank)}
        secrets = {name: self.secret_env[name] for name in task.secret_env if name in self.secret_env}
        # Last, so that nothing overrides what a leftover process is known by.
        last = dict(self.marks, DISTRUN_TOKEN_FILE=self.token_file) if self.token_file else self.marks
        return tasks.environment(environ.snapshot_bytes(), self.plan.unset, who, secrets, sent, last)

    def ports(self) -> Dict[str, int]:
        """Return the numbers of the held ports by label."""
        return {label: ports.number(held) for label, held in self.held.items()}

    def close(self) -> None:
        """Let the ports go and remove the folder."""
        for held in self.held.values():
            held.close()
        record.remove(self.folder)


def take(header: Mapping[str, Any]) -> Share:
    """Return the share that a `begin` message gives, prepared: address settled, ports held, folder made.

    Raises:
        ContractError, OSError, LookupError, TypeError, ValueError: it cannot be taken; the message says why.
    """
    if header["version"] != wire.VERSION:
        raise ContractError(
            "the coordinator speaks version %r of the agent protocol, this agent %d; use one release of distrun on both"
            % (header["version"], wire.VERSION)
        )
    plan = from_json(header["plan"])
    host = _host(plan, str(header["host"]))
    token = str(header.get("token") or "")
    address = host.address or _address(plan, host)
    named = [task.env["DISTRUN_PORT_RANGE"] for task in plan.tasks if "DISTRUN_PORT_RANGE" in task.env]
    held = {label: ports.hold(address, named[0] if named else "") for label in host.ports}
    folder = record.create(plan.job, host.name, token)
    token_file = os.path.join(folder, record.TOKEN) if token else ""
    return Share(plan, host.name, address, held, folder, token_file, dict(header.get("secret_env") or {}))


def _host(plan: Plan, name: str) -> Host:
    for host in plan.hosts:
        if host.name == name:
            return host
    raise ContractError("the plan has no host %r; it has: %s" % (name, ", ".join(host.name for host in plan.hosts)))


def _address(plan: Plan, host: Host) -> str:
    """Return the address that peers use for this host, when the plan does not say. Raises ContractError."""
    from distrun_runtime.contract import address  # ctypes: only when it is needed

    others = [each.address or each.name for each in plan.hosts if each.name != host.name]
    return address.choose(plan.interface, plan.subnet, others[0] if others else "")
