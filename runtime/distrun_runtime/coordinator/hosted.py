"""The coordinator of a detached job on one of the job's hosts.

The launcher has checked the hosts and copied the files. It starts this process there (`contract.daemon`) and gives it
the job by standard input, secrets included: a frame with the plan, whose body is the program of the agents, and a frame
with the runtime's archive. The process prints one line, a JSON object that says where it listens. From then on it
runs alone: agents dial back to it, clients come by its control socket, and the job's folder is in the job store of this
host. If this host shares the launcher's job store, that is the folder which the launcher has made.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Iterator, List, Mapping, NamedTuple, Tuple

from distrun_runtime.contract import address, control, facts, process, session
from distrun_runtime.contract import plan as plans
from distrun_runtime.contract.dataclass import read
from distrun_runtime.contract.enrolment import with_port
from distrun_runtime.contract.plan import Plan, Secrets
from distrun_runtime.coordinator import jobrun
from distrun_runtime.coordinator import service as serving
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.jobstore import JobStore
from distrun_runtime.coordinator.listener import DialBack
from distrun_runtime.coordinator.service import Service
from distrun_runtime.errors import ContractError, RuntimeFault

DIAL_S = 60.0
"""How long agents may take to dial at most."""
DIAL_SHARE = 0.75
"""The same, as a share of the time for the whole start."""
READ_SIZE = 256 * 1024


class HostedRequest(NamedTuple):
    """What the launcher gives."""

    plan: Plan
    secrets: Secrets
    enrolment: str
    """The secret by which agents prove themselves."""
    pem: bytes
    """Certificate and key."""
    addresses: Tuple[str, ...]
    """What agents are told to dial; empty: every address of this host."""
    port_range: str
    request: Mapping[str, Any]
    allocation: Mapping[str, Any]
    login: str
    """What a user types before a command to run it on this host."""
    folder: str
    """The job's folder where it was launched."""
    program: bytes
    """The agents' blob."""
    runtime: bytes

    def encode(self) -> bytes:
        """Return the frames that `decoded` understands."""
        head = {
            **self._asdict(),
            "type": "coordinate",
            "version": session.VERSION,
            "plan": plans.to_json(self.plan),
            "secrets": {"token": self.secrets.token, "env": dict(self.secrets.env)},
            "pem": self.pem.decode("ascii"),
        }
        del head["program"], head["runtime"]
        return session.encode(head, self.program) + session.encode({"type": "runtime"}, self.runtime)


def decoded(frames: Iterator[session.Frame]) -> HostedRequest:
    """Return what the launcher gives. Raises ContractError if it is of another version, or not whole."""
    try:
        first, second = next(frames), next(frames)
    except StopIteration:
        raise ContractError("the launcher's order is not whole") from None
    head = first.header
    if head.get("version") != session.VERSION:
        raise ContractError(f"the launcher speaks version {head.get('version')!r}, this coordinator {session.VERSION}")
    plan, secrets, pem = plans.from_json(head["plan"]), Secrets(**head["secrets"]), head["pem"].encode("ascii")
    bodies = {"program": first.body, "runtime": second.body}
    return read(HostedRequest, first.header, plan=plan, secrets=secrets, pem=pem, **bodies)


def dial_s(plan: Plan) -> float:
    """Return how long agents may take to dial, seconds. No side effects."""
    return min(DIAL_S, DIAL_SHARE * plan.limits.start_s)


def main(ahead: bytes) -> int:
    """Coordinate the job that standard input has; return the exit code. `ahead`: bytes that were read already."""
    try:
        return _serve(ahead)
    except (RuntimeFault, OSError) as err:  # the launcher shows it, if it still waits for our line
        sys.stderr.write(f"{err}\n")
        return facts.EXIT_INTERNAL


def _serve(ahead: bytes) -> int:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    process.outlive_tasks_signals()
    order = decoded(_frames(ahead))
    plan = order.plan
    folder, is_shared = _folder(order)
    agents = DialBack(
        plan.job,
        order.enrolment,
        order.pem,
        [place.name for place in plan.all_places],
        program=lambda: order.program,
        port_range=order.port_range,
        limit_s=dial_s(plan),
        addresses=order.addresses or tuple(address.own()),
    )
    service = serving.service_of(folder, None)
    try:
        path = serving.listen(service, folder)
        folder.write_control(path, order.login)
        _say_where(folder, agents, path, is_shared)
        serving.leave_streams(folder)
        code = _run(order, folder, agents, service)
    finally:
        agents.close()
        service.close()
    return code


def _folder(order: HostedRequest) -> Tuple[JobFolder, bool]:
    """Return the job's folder, and whether it is the launcher's, whose job store this host shares."""
    store = JobStore()
    shared = store.take_over(order.plan)
    if shared is not None:
        return shared, True
    # The launcher's --run-dir may be on a disk of its own, while the link to it is in a store that this host shares.
    is_linked = (store.jobs / order.plan.job).is_symlink()
    run_dir = Path(order.folder).parent if is_linked else None
    return store.create(order.plan, run_dir, order.request, order.allocation), False


def _run(order: HostedRequest, folder: JobFolder, agents: DialBack, service: Service) -> int:
    try:
        outcome = jobrun.JobRun(
            order.plan, order.secrets, agents.channels, folder, service, runtime=lambda: order.runtime
        ).run()
    except Exception as err:
        told = control.failure(err)
        sys.stderr.write(told.trace)
        service.finish(told)
        return facts.EXIT_INTERNAL
    service.finish(control.JobEnded(folder.outcome_json(folder.explained(outcome))))
    return 0


def _frames(ahead: bytes) -> Iterator[session.Frame]:
    decoder = session.Decoder()
    data = ahead
    while True:
        found: List[session.Frame] = decoder.feed(data)
        yield from found
        data = os.read(0, READ_SIZE)
        if not data:
            return


def _say_where(folder: JobFolder, agents: DialBack, path: str, is_shared: bool) -> None:
    who = process.identity(os.getpid())
    told = {
        "pid": who.pid,
        "start": who.start,
        "boot": process.boot_id(),
        "path": path,
        "folder": str(folder.path),
        "is_shared": is_shared,
        "pin": agents.pin,
        "dial": [with_port(each, agents.port) for each in agents.addresses],
    }
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
