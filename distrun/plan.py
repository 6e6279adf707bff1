"""From the wish to the plan: every process, its exact argv, its folder and its environment. Pure.

The variables are the rows of `contract/environ.py`; `tests/distrun/test_plan.py` checks that each of them is set
here, set by the agent, or named in `SET_ELSEWHERE`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from distrun import job as wish
from distrun import shell
from distrun.errors import UsageError
from distrun.hosts import HostSpec, Inventory, fold
from distrun.job import Job
from distrun.placement import Slot, hosts_of, worker_hosts
from distrun_runtime.contract import environ
from distrun_runtime.contract.plan import (
    ROLES,
    SCHEDULER,
    SERVER,
    SERVER_MODULES,
    WORKER,
    Host,
    Plan,
    Runtime,
    Secrets,
    Sync,
    Task,
)

SET_ELSEWHERE: Mapping[str, str] = {
    "DISTRUN_TOKEN_FILE": "the agent, which writes that file",
    "DISTRUN_PUBLISH_FD": "the agent, which opens that pipe",
    "PYTHONPATH": "the agent: the bundled runtime's folder, then the value that is already there",
    "GLOO_SOCKET_IFNAME": "the agent, which knows the interface",
    "NCCL_SOCKET_IFNAME": "the agent, which knows the interface",
    "DMLC_TRACKER_URI": "not set, only removed",
    "DMLC_TRACKER_PORT": "not set, only removed",
}
"""Rows of the table that are given, yet not here."""

MASTER_PORT = "master"
JAX_PORT = "jax"
PS_PORT = "ps"
"""Labels of the ports that agents hold for foreign programs."""
DEVICES = "CUDA_VISIBLE_DEVICES"
SHOWN = 8
"""Tasks that are named in a warning, at most."""

_PYTHON = re.compile(r"(.*/)?(python|pypy)[\d.]*\Z")


@dataclass(frozen=True, repr=False)
class Site:
    """What a plan needs to know of the submitting machine, of the hosts and of the moment."""

    job_id: str
    backend: str
    hosts: Inventory
    run_dir: str
    runtime: Runtime
    """Where tasks find the bundled runtime, or what they are sent."""
    python: str = ""
    """Interpreter of the bundled servers where nobody names one; empty: the command's own, else python3."""
    reach: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """How the backend gets to each host."""
    logins: Mapping[str, str] = field(default_factory=dict)
    """What a user types before a command to run it on a host, by host."""
    doctor: str = ""
    """What a user types to have the hosts examined."""
    sync: Sync | None = None
    outer: Mapping[str, str] = field(default_factory=dict)
    """The launcher's own environment, where tasks inherit it."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Data addresses that are known beforehand, by host."""
    token: str = ""


def make_plan(job: Job, slots: Sequence[Slot], site: Site) -> tuple[Plan, Secrets]:
    """Return the plan of `job` on `slots`, and the values that it only names. Pure.

    Raises:
        UsageError: one hidden variable has different values for two roles.
    """
    layout = _Layout.of(slots, site)
    users = {role: wish.given(job.settings, role) for role in (SCHEDULER, SERVER, WORKER)}
    tasks = tuple(_task(job, slot, layout, site, users[slot.role]) for slot in slots)
    plan = Plan(
        job=site.job_id,
        name=job.name,
        backend=site.backend,
        command=job.command,
        cwd=job.sync_dst_dir or job.cwd,
        hosts=tuple(_host(job, layout, site, name) for name in layout.nodes),
        tasks=tasks,
        limits=job.limits,
        interface=job.interface,
        subnet=job.subnet,
        unset=() if job.keep_outer_env else environ.stale_names(),
        runtime=site.runtime,
        activate=job.activate,
        sync=site.sync,
        joined=tuple(sorted({s.name for each in users.values() for s in each.values() if s.joins})),
        doctor=site.doctor,
    )
    return plan, Secrets(token=site.token, env=_hidden(slots, users))


def check_ports(job: Job, plan: Plan) -> None:
    """Check that --port-range has a port for each process of ours, and each held port, on every host. Pure.

    Raises:
        UsageError: with the arithmetic.
    """
    if not job.port_range:
        return
    first, last = wish.parse_port_range(job.port_range)
    for host in plan.hosts:
        terms = []
        if job.has_servers and job.ps == wish.BUNDLED:
            sizes = [(role, sum(task.host == host.name for task in plan.of_role(role))) for role in ROLES]
            terms = [(size, "%s%s" % (role, "" if size == 1 else "s")) for role, size in sizes if size]
        if host.ports:
            terms.append((len(host.ports), "held for other programs (%s)" % ", ".join(host.ports)))
        needed = sum(size for size, _ in terms)
        if needed > last - first + 1:
            raise UsageError(
                "--port-range %s has %d port%s, and host %s needs %d: %s"
                % (
                    job.port_range,
                    last - first + 1,
                    "" if first == last else "s",
                    host.name,
                    needed,
                    " + ".join("%d %s" % term for term in terms),
                ),
                "give a range of at least %d" % needed,
            )


@dataclass(frozen=True)
class _Layout:
    """What a task's variables say of the other tasks: worked out once, since a job may have many."""

    nodes: Mapping[str, int]
    """Hosts that have a task, and their index."""
    groups: Mapping[str, int]
    """Hosts that have a worker, and their index."""
    sizes: Mapping[str, int]
    """Tasks of each role."""
    first: Mapping[str, str]
    """Host of each role's first task."""

    @staticmethod
    def of(slots: Sequence[Slot], site: Site) -> _Layout:
        roles = [slot.role for slot in slots]
        return _Layout(
            nodes={name: index for index, name in enumerate(hosts_of(slots, site.hosts.order))},
            groups={name: index for index, name in enumerate(worker_hosts(slots))},
            sizes={role: roles.count(role) for role in ROLES},
            first={slot.role: slot.host for slot in reversed(slots)},
        )


def may_bring(job: Job, hosts: Sequence[HostSpec], names: Iterable[str]) -> bool:
    """Return whether what servers run by may be among the files that are copied, as far as can be said here. Pure.

    `names`: of the files and folders at the top of what is copied. Paths are judged on the host.
    """
    has_modules = any(name.partition(".")[0] in SERVER_MODULES for name in names)
    return job.activated is None or has_modules or any(spec.workdir for spec in hosts)


def device_warnings(plan: Plan) -> list[str]:
    """Return a warning for hosts that have more workers than the GPUs which these workers see. Pure.

    A program that takes the device `cuda:LOCAL_RANK`, as scripts for torchrun do, fails in such a worker. It is no
    error: workers may share a GPU, or use none. A value that hides all GPUs is taken as meant.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for task in plan.of_role(WORKER):
        value = task.env.get(DEVICES, "").strip()
        if value and value != "-1" and int(task.env["LOCAL_RANK"]) >= len(value.split(",")):
            found.setdefault(value, {}).setdefault(task.host, []).append(task.name)
    warnings = []
    for value, hosts in found.items():
        count = len(value.split(","))
        names = [name for tasks in hosts.values() for name in tasks]
        more = " and %d more" % (len(names) - SHOWN) if len(names) > SHOWN else ""
        warnings.append(
            "%s: more workers than GPUs: %s=%s shows %d GPU%s, and LOCAL_RANK is too large for cuda:LOCAL_RANK in %s%s."
            " Place fewer workers there, or let the program take LOCAL_RANK modulo the number of GPUs"
            % (fold(list(hosts)), DEVICES, value, count, "" if count == 1 else "s", ", ".join(names[:SHOWN]), more)
        )
    return warnings


def _host(job: Job, layout: _Layout, site: Site, name: str) -> Host:
    spec = site.hosts.spec(name)
    return Host(
        name=name,
        address=spec.addr or ("" if spec.iface else site.addresses.get(name, "")),
        ports=_ports(job, layout, name),
        reach=site.reach.get(name, {}),
        interface=spec.iface,
        login=site.logins.get(name, ""),
    )


def _task(job: Job, slot: Slot, layout: _Layout, site: Site, users: Mapping[str, wish.Setting]) -> Task:
    spec = site.hosts.spec(slot.host)
    env = {
        **_identity(slot, layout, site),
        **_parameter_server(job, slot, layout, site),
        **_unbuffered(site, users),
        **_tuning(job),
    }
    is_ours = slot.role != WORKER and job.ps == wish.BUNDLED
    if is_ours and slot.role == SERVER and job.server_imports:
        env["DISTRUN_SERVER_IMPORT"] = ",".join(job.server_imports)
    refs = _references(job, slot, layout)
    if slot.role == WORKER:
        env.update(_torch(slot, layout, site))
        env.update(_jax(slot, layout))
        if spec.gpus and DEVICES not in users:
            env[DEVICES] = _devices(spec)
    shown = {name: s.value for name, s in users.items() if not s.hidden and name not in env}
    return Task(
        name=slot.name,
        role=slot.role,
        rank=slot.rank,
        host=slot.host,
        argv=_argv(job, site, spec, slot.role),
        cwd=spec.workdir or job.sync_dst_dir or job.cwd,
        env={**env, **shown},
        refs=refs,
        secret_env=tuple(sorted(name for name, s in users.items() if s.hidden and name not in env)),
        needs=SERVER_MODULES if is_ours else (),
    )


def _argv(job: Job, site: Site, spec: HostSpec, role: str) -> tuple[str, ...]:
    if role == WORKER or job.ps == wish.COMMAND:
        return shell.to_argv(job.command, job.shell)
    return (job.python or spec.python or site.python or _interpreter(job.command), "-m", "distrun_runtime", role)


def _interpreter(command: Sequence[str]) -> str:
    """Return the Python that the user's command names, looked for in the same PATH as the command; else python3."""
    first = command[0].split()[0] if command[0].split() else ""
    return first if _PYTHON.match(first) else "python3"


def _devices(spec: HostSpec) -> str:
    """Return the GPUs that every worker of a host sees: all of `gpus=`, so that `cuda:LOCAL_RANK` is one of them."""
    return ",".join(map(str, range(int(spec.gpus)))) if spec.gpus.isdigit() else spec.gpus.strip(",")


def _identity(slot: Slot, layout: _Layout, site: Site) -> dict[str, str]:
    return {
        "DISTRUN_JOB_ID": site.job_id,
        "DISTRUN_ROLE": slot.role,
        "DISTRUN_RANK": str(slot.rank),
        "DISTRUN_WORLD_SIZE": str(layout.sizes[slot.role]),
        "DISTRUN_LOCAL_RANK": str(slot.local_rank),
        "DISTRUN_LOCAL_SIZE": str(slot.local_size),
        "DISTRUN_NODE_RANK": str(layout.nodes[slot.host]),
        "DISTRUN_NUM_NODES": str(len(layout.nodes)),
        "DISTRUN_HOST": slot.host,
        "DISTRUN_RESTART": "0",
        "DISTRUN_RUN_DIR": site.run_dir,
    }


def _parameter_server(job: Job, slot: Slot, layout: _Layout, site: Site) -> dict[str, str]:
    env = {
        "DMLC_ROLE": slot.role,
        "DMLC_NUM_WORKER": str(job.workers),
        "DMLC_NUM_SERVER": str(job.servers),
        "DMLC_RANK": str(slot.rank),
        "DMLC_JOB_CLUSTER": site.backend,
        "DMLC_NUM_ATTEMPT": "0",
    }
    if layout.sizes[SERVER] > job.servers:
        env["DISTRUN_RELAYS"] = str(layout.sizes[SERVER] - job.servers)
    if slot.role == WORKER:
        env["DMLC_TASK_ID"] = env["DMLC_WORKER_ID"] = str(slot.rank)
    elif slot.role == SERVER:
        env["DMLC_TASK_ID"] = str(job.workers + slot.rank)
        env["DMLC_SERVER_ID"] = str(slot.rank)
    return env


def _references(job: Job, slot: Slot, layout: _Layout) -> dict[str, str]:
    address = "{host:%s.address}" % slot.host
    refs = {"DISTRUN_ADDR": address, "DMLC_NODE_HOST": address}
    if job.has_servers and job.ps == wish.COMMAND:
        # A foreign scheduler publishes nothing: its port is one that the agent of its host holds.
        root = layout.first[SCHEDULER]
        refs.update(DMLC_PS_ROOT_URI="{host:%s.address}" % root, DMLC_PS_ROOT_PORT="{%s/port:%s}" % (root, PS_PORT))
    elif job.has_servers and slot.role != SCHEDULER:
        # The bundled scheduler takes a free port itself and tells it; so it is given none.
        refs.update(DMLC_PS_ROOT_URI="{scheduler.address}", DMLC_PS_ROOT_PORT="{scheduler.port}")
    elif job.has_servers:
        # It tells a program of this job that speaks another protocol from a stranger.
        refs["DISTRUN_WORKER_ADDRESSES"] = ",".join("{host:%s.address}" % host for host in layout.groups)
    if slot.role == WORKER:
        first = layout.first[WORKER]
        refs.update(
            MASTER_ADDR="{host:%s.address}" % first,
            MASTER_PORT="{%s/port:%s}" % (first, MASTER_PORT),
            JAX_COORDINATOR_ADDRESS="{host:%s.address}:{%s/port:%s}" % (first, first, JAX_PORT),
        )
    return refs


def _torch(slot: Slot, layout: _Layout, site: Site) -> dict[str, str]:
    rank, size, group = str(slot.rank), str(layout.sizes[WORKER]), str(layout.groups[slot.host])
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": str(slot.local_rank),
        "LOCAL_WORLD_SIZE": str(slot.local_size),
        "GROUP_RANK": group,
        "GROUP_WORLD_SIZE": str(len(layout.groups)),
        "NODE_RANK": group,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": WORKER,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": site.job_id,
    }


def _jax(slot: Slot, layout: _Layout) -> dict[str, str]:
    return {"JAX_NUM_PROCESSES": str(layout.sizes[WORKER]), "JAX_PROCESS_ID": str(slot.rank)}


def _unbuffered(site: Site, users: Mapping[str, wish.Setting]) -> dict[str, str]:
    is_chosen = "PYTHONUNBUFFERED" in users or "PYTHONUNBUFFERED" in site.outer
    return {} if is_chosen else {"PYTHONUNBUFFERED": "1"}


def _tuning(job: Job) -> dict[str, str]:
    env = {}
    if job.op_timeout_s is not None:
        env["DISTRUN_OP_TIMEOUT"] = wish.exact(job.op_timeout_s)
    if job.start_timeout_s is not None:
        env["DISTRUN_START_TIMEOUT"] = wish.exact(job.start_timeout_s)
    if job.port_range:
        env["DISTRUN_PORT_RANGE"] = job.port_range
    return env


def _ports(job: Job, layout: _Layout, host: str) -> tuple[str, ...]:
    labels: tuple[str, ...] = ()
    if host == layout.first[WORKER]:
        labels += (JAX_PORT, MASTER_PORT)
    if job.has_servers and job.ps == wish.COMMAND and host == layout.first[SCHEDULER]:
        labels += (PS_PORT,)
    return labels


def _hidden(slots: Sequence[Slot], users: Mapping[str, Mapping[str, wish.Setting]]) -> dict[str, str]:
    values: dict[str, str] = {}
    for role in dict.fromkeys(slot.role for slot in slots):
        for name, setting in users[role].items():
            if setting.hidden and values.setdefault(name, setting.value) != setting.value:
                raise UsageError(
                    "%s has different values for two roles, and values that are kept secret are sent once" % name,
                    "give it under two names, or the same value to all with --env",
                )
    return values
