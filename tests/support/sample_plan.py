"""Small plans for tests of the cluster side."""

from __future__ import annotations

from typing import Any

from distrun_runtime.contract.plan import SCHEDULER, SERVER, WORKER, Host, Limits, Plan, Task


def sample_plan(
    workers: int = 2,
    servers: int = 1,
    hosts: tuple[str, ...] = ("d1",),
    own_servers: bool = True,
    job: str = "calm-otter-7f3",
    name: str = "",
    **limits: Any,
) -> Plan:
    """Return a plan: scheduler on the first host, servers and workers cycling; each waits for references."""
    command = ("python", "train.py")
    bundled = ("python", "-m", "distrun_runtime")

    def task(role: str, rank: int, host: str) -> Task:
        refs = {"DMLC_NODE_HOST": "{host:%s.address}" % host}
        if role != SCHEDULER and servers:
            refs["DMLC_PS_ROOT_PORT"] = "{scheduler.port}"
        argv = command if role == WORKER or not own_servers else (*bundled, role)
        return Task(role + "-%d" % rank if role != SCHEDULER else role, role, rank, host, argv, "/", refs=refs)

    tasks = [task(SCHEDULER, 0, hosts[0])] if servers else []
    tasks += [task(SERVER, rank, hosts[rank % len(hosts)]) for rank in range(servers)]
    tasks += [task(WORKER, rank, hosts[rank % len(hosts)]) for rank in range(workers)]
    return Plan(
        job=job,
        name=name,
        backend="local",
        command=command,
        cwd="/",
        hosts=tuple(Host(host) for host in hosts),
        tasks=tuple(tasks),
        limits=Limits()._replace(**limits),
    )
