"""Leaves a job to one of its hosts: `distrun launch --detach` with hosts.

The launcher has checked the hosts and copied the files, as for any job, and its agents have ended. Now it starts the
coordinator on one host, and on every host the bootstrap of an agent that dials this coordinator. It does so by agents
that start these processes and end; nothing is left that the launcher's connections hold.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distrun import shipping
from distrun.backends import bootstrap
from distrun.fleet import Fleet
from distrun.fleet.questions import HostAnswer
from distrun_runtime.contract import enrolment, facts, process
from distrun_runtime.contract.daemon import PYTHON
from distrun_runtime.coordinator.failures import Outcome, Problem, TaskResult
from distrun_runtime.coordinator.hosted import HostedRequest, dial_s

if TYPE_CHECKING:
    from distrun.planning import PlannedJob
    from distrun_runtime.coordinator.jobfolder import JobFolder
    from distrun_runtime.coordinator.service import Service

READY_S = 30.0
"""How long the coordinator may take to listen."""
ASK_S = 20.0
"""How long an agent may take to start a process."""
SECRET = "DISTRUN_ENROLMENT"
"""Variable by which a bootstrap gets the enrolment secret; it is removed before anything else runs."""


def place(job: PlannedJob, folder: JobFolder, sink: Service) -> Outcome:
    """Start the coordinator and the agents of a job whose hosts are ready; the folder then says where it is.

    Returns:
        A success if the job has been placed; else how it ended, which the folder says, too.
    """
    plan = job.plan
    host = job.request.coordinator_host or plan.hosts[0].name
    secret = os.urandom(enrolment.SECRET_BYTES).hex()
    login = next(each.login for each in plan.hosts if each.name == host)
    told = _start_coordinator(job, host, secret, login, folder)
    if isinstance(told, Problem):
        message = f"the coordinator could not be started on {host}: {told.text}"
        tasks = tuple(TaskResult(task.name, task.role, task.rank, task.host) for task in plan.tasks)
        how = facts.EXIT_START_FAILED, facts.START_FAILED, message
        outcome = Outcome(*how, tasks=tasks, job=plan.job, problems=(told,))
        folder.finish(outcome)
        return outcome
    if not told["is_shared"]:  # else the coordinator has written there who it is
        folder.place_elsewhere(told, host, login)
    sink.say(
        f"the coordinator runs on {host} (pid {told['pid']}); agents dial it at {' or '.join(told['dial'])}", "info"
    )
    for problem in _start_agents(job, secret, told):
        sink.say(f"{problem.host}: its agent could not be started: {problem.text}", "warning")
    return Outcome(0, facts.SUCCEEDED, f"the coordinator runs on {host}", job=plan.job)


def _start_coordinator(
    job: PlannedJob, host: str, secret: str, login: str, folder: JobFolder
) -> Mapping[str, Any] | Problem:
    """Start the coordinator; return what it tells of itself."""
    request = job.request
    order = HostedRequest(
        plan=job.plan,
        secrets=job.secrets,
        enrolment=secret,
        pem=bootstrap.certificate(job.plan.job),
        addresses=request.coordinator_addresses,
        port_range=request.port_range,
        request=request.to_json(),
        allocation=job.allocation.to_json(),
        login=login,
        folder=str(folder.path),
        program=shipping.dialed(),
        runtime=job.runtime,
    )
    args = _args(shipping.command(PYTHON), shipping.coordinator(shipping.START_HOSTED) + order.encode(), {}, READY_S)
    hosts = [each for each in job.plan.hosts if each.name == host]
    with Fleet(job.backend, hosts) as fleet:
        found = fleet.ask("daemon", args, READY_S + ASK_S)[host]
    if isinstance(found, Problem):
        return found
    told: dict[str, Any] = json.loads(found.value["line"])
    return told


def _start_agents(job: PlannedJob, secret: str, told: Mapping[str, Any]) -> list[Problem]:
    """Start the agents' bootstraps; return what went wrong. The coordinator notices who does not dial."""
    plan = job.plan

    start = bootstrap.Bootstrap(plan.job, told["pin"], told["dial"], dial_s(plan))

    def args(host: str) -> Mapping[str, Any]:
        argv = start.command(PYTHON, host, f"env:{SECRET}")
        return _args(argv, b"", {**process.marks(plan.job, plan.nonce, host, host), SECRET: secret}, 0.0)

    with Fleet(job.backend, plan.hosts) as fleet:
        found = fleet.ask("daemon", args, ASK_S)
    return [each for each in found.values() if not isinstance(each, HostAnswer)]


def _args(argv: tuple[str, ...], data: bytes, env: Mapping[str, str], limit_s: float) -> Mapping[str, Any]:
    return {"argv": list(argv), "input": base64.b64encode(data).decode("ascii"), "env": dict(env), "limit_s": limit_s}
