"""One host's share of a job: what `begin` gave the agent, and what the agent prepared for it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import Any, Dict, Mapping

from distrun_runtime.agent import ports, record, tasks
from distrun_runtime.agent.refusal import Refusal
from distrun_runtime.contract import environ, wire
from distrun_runtime.contract.plan import WORKER, Host, Plan, Task, from_json
from distrun_runtime.errors import ContractError

OF_THE_CONNECTION = ("SSH_*",)
"""Variables by which the agent was reached: to a task they would tell of a login that is not its own."""


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
    base: Mapping[bytes, bytes] = field(default_factory=dict)
    """The environment that tasks start from."""
    interface: str = ""
    """Name of the interface that has `address`, if the job has other hosts too."""
    runtime: str = ""
    """Folder that goes first on the tasks' PYTHONPATH; empty: none."""
    python: Mapping[str, str] = field(default_factory=dict)
    """`VERSION PATH` of the interpreters of tasks that need modules, by the name they are called by."""
    has_environment: bool = False
    """The environment was activated, and interpreters were looked at."""

    @property
    def cwd(self) -> str:
        """Folder of the plan in which tasks run here."""
        return self.plan.tasks[0].cwd if self.plan.tasks else self.plan.cwd

    @property
    def spool_folder(self) -> str:
        """Where the tasks' output is kept until it was taken."""
        return os.path.join(self.folder, "spool")

    @property
    def marks(self) -> Dict[str, str]:
        """What a process of the job is known by, whoever its parent is by then."""
        return {"DISTRUN_JOB_ID": self.plan.job, "DISTRUN_HOST": self.host}

    def environment(self, task: Task, sent: Mapping[str, str]) -> Dict[bytes, bytes]:
        """Return a task's environment: this host's, its secrets, what was sent with it, and what it is known by."""
        who = {"DISTRUN_ROLE": task.role, "DISTRUN_RANK": str(task.rank)}
        secrets = {name: self.secret_env[name] for name in task.secret_env if name in self.secret_env}
        # Last, so that nothing overrides what a leftover process is known by.
        last = dict(self.marks, DISTRUN_TOKEN_FILE=self.token_file) if self.token_file else self.marks
        secrets.update((name, self._joined(name, secrets[name])) for name in self.plan.joined if name in secrets)
        env = tasks.environment(self.base, (), who, secrets, sent, last)
        if not os.path.isdir(env.get(b"DISTRUN_RUN_DIR", b"")):
            env.pop(b"DISTRUN_RUN_DIR", None)  # the job's folder is on the launching machine; only a shared one is here
        if self.runtime:
            folders = [tasks.exact(self.runtime), env.get(b"PYTHONPATH", b"")]
            env[b"PYTHONPATH"] = os.fsencode(os.pathsep).join(folder for folder in folders if folder)
        if self.interface and task.role == WORKER:
            env.setdefault(b"GLOO_SOCKET_IFNAME", tasks.exact(self.interface))
            if self._asked_for:
                env.setdefault(b"NCCL_SOCKET_IFNAME", tasks.exact(self.interface))
        return env

    def _joined(self, name: str, sent: str) -> str:
        """Return the folders that were sent and those that this host has: in front of them if activation set them."""
        here = self.base.get(tasks.exact(name), b"")
        is_activated = here != environ.snapshot_bytes().get(tasks.exact(name), b"")
        lists = [here.decode("utf-8", "surrogateescape"), sent]
        # An empty entry would mean the current directory.
        folders = [entry for each in (lists if is_activated else lists[::-1]) for entry in each.split(":") if entry]
        return ":".join(dict.fromkeys(folders))

    @property
    def _asked_for(self) -> str:
        """What the user asked for of the data address; without anything NCCL finds better interfaces than we."""
        return _interface(self.plan, _host(self.plan, self.host)) or self.plan.subnet

    def ports(self) -> Dict[str, int]:
        """Return the numbers of the held ports by label."""
        return {label: ports.number(held) for label, held in self.held.items()}

    def close(self, has_guard: bool = False) -> None:
        """Let the ports go and remove the folder; a guard that lives removes it after us, and is in the record."""
        for held in self.held.values():
            held.close()
        if has_guard:
            record.strip(self.folder)
        else:
            record.remove(self.folder)


def take(header: Mapping[str, Any]) -> Share:
    """Return the share that a `begin` message gives, prepared: address settled, ports held, folder made.

    Raises:
        Refusal (a ContractError), or ContractError, OSError, LookupError, TypeError, ValueError: it cannot be taken;
        the message says why.
    """
    if header["version"] != wire.VERSION:
        raise Refusal(
            "protocol",
            "the coordinator speaks version %r of the agent protocol, this agent %d"
            % (header["version"], wire.VERSION),
            "use one release of distrun on both",
        )
    plan = from_json(header["plan"])
    host = _host(plan, str(header["host"]))
    token = str(header.get("token") or "")
    outer = environ.snapshot()
    address = host.address or _address(plan, host, outer)
    named = [task.env["DISTRUN_PORT_RANGE"] for task in plan.tasks if "DISTRUN_PORT_RANGE" in task.env]
    held = {label: ports.hold(address, named[0] if named else "") for label in host.ports}
    folder = record.create(plan.job, host.name, token)
    token_file = os.path.join(folder, record.TOKEN) if token else ""
    # Tasks on this very machine have what the user has, the login included.
    unset = plan.unset if plan.backend == "local" else (*plan.unset, *OF_THE_CONNECTION)
    return Share(
        plan,
        host.name,
        address,
        held,
        folder,
        token_file,
        dict(header.get("secret_env") or {}),
        base=tasks.environment(environ.snapshot_bytes(), unset),
        interface=_interface_of(address, plan),
    )


def _host(plan: Plan, name: str) -> Host:
    for host in plan.hosts:
        if host.name == name:
            return host
    raise ContractError("the plan has no host %r; it has: %s" % (name, ", ".join(host.name for host in plan.hosts)))


def _interface(plan: Plan, host: Host) -> str:
    return host.interface or plan.interface


def _address(plan: Plan, host: Host, outer: Mapping[str, str]) -> str:
    """Return the address that peers use for this host, when the plan does not say. Raises Refusal."""
    from distrun_runtime.contract import address  # ctypes: only when it is needed

    others = [each.address or each.name for each in plan.hosts if each.name != host.name]
    try:
        return address.settle(_interface(plan, host), plan.subnet, others[0] if others else "", outer)
    except ContractError as err:
        raise Refusal("interface", str(err)) from None


def _interface_of(ip: str, plan: Plan) -> str:
    """Return the interface that has an address; empty in a job of one host, or if none has it."""
    if len(plan.hosts) < 2 or not plan.of_role(WORKER):
        return ""
    from distrun_runtime.contract import address

    return next((row.name for row in address.interfaces() if row.ip == ip), "")
