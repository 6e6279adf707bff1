"""Makes the plan of a job: request -> allocation -> plan.

`plan_job` is the whole way. An allocation says which task runs on which host and how hosts are reached; for the local
and ssh backends it follows from the hosts that the user named. The plan is every process with its exact argv, its
folder and its environment (`make_plan`). Nothing of the job is started or written here.

The variables of tasks are the rows of `contract/environ.py`. A test checks that each of them is set here, set by the
agent, or named in `SET_ELSEWHERE`.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from distrun import backends, formats, shipping
from distrun.backends.base import Backend
from distrun.errors import UsageError
from distrun.formats import exact
from distrun.hosts import HostSpec, Inventory
from distrun.options import ENGINES, NO_ENGINES, ROWS
from distrun.placement import Slot, hosts_of, place
from distrun.request import BUNDLED, COMMAND, JobRequest, Setting, check_tuning, given
from distrun_runtime.contract import environ, facts, gpus
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.contract.plan import (
    HOLD,
    ROLES,
    SCHEDULER,
    SERVER,
    SERVER_MODULES,
    STOP,
    WORKER,
    Host,
    Place,
    Plan,
    Reach,
    Runtime,
    Secrets,
    Sync,
    Task,
)
from distrun_runtime.coordinator.jobstore import JobStore

if TYPE_CHECKING:
    from distrun.backends.engine import Grant
    from distrun.backends.queue import QueueBackend
    from distrun.sync.rules import CopyRules
    from distrun.sync.tree import Tree

DRY_RUN_ID = "dry-run"
SET_ELSEWHERE: Mapping[str, str] = {
    "DISTRUN_JOB_NONCE": "the agent, which finds processes by it",
    "DISTRUN_TOKEN_FILE": "the agent, which writes that file",
    "DISTRUN_PLACE": "the agent, which has that place",
    "DISTRUN_PUBLISH_FD": "the agent, which opens that pipe",
    "DISTRUN_PUBLISH_PIPE": "the agent, which opens that pipe",
    "DISTRUN_METRICS_SOCKET": "the agent, which opens that socket",
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
SHOWN = 8
"""Tasks that are named in a warning, at most."""
COPIES = "glibc.cpu.x86_non_temporal_threshold=0x100000:glibc.cpu.x86_rep_movsb_threshold=0x10000000"
"""Has the C library write copies of 1 MiB and more past the caches: what is overwritten is not read first.

A model's gradients and weights do not fit into the caches. glibc's own threshold is 3/4 of the last cache; a virtual
machine reports all of its host's, such as 260 MiB, so that no copy reaches it. And smaller copies are not made by the
instruction `rep movsb`: where another core has just written what is read, it takes three times as long on AMD's Zen 3
(glibc 2.39 does not use it there: its bug 30994). Other C libraries and processors ignore the variable."""


class PlannedJob(NamedTuple):
    """A job that is ready to be launched. Nothing of it has happened."""

    request: JobRequest
    allocation: Allocation
    plan: Plan
    secrets: Secrets
    backend: Backend
    runtime: bytes = b""
    """The archive that hosts are sent; empty: they have the runtime."""
    tree: Tree | None = None
    """Which files are copied to the hosts; None: none."""
    is_hosted: bool = False
    """The coordinator is to run on one of the job's hosts."""


@dataclass(frozen=True, repr=False)
class QueuedJob:
    """A job that is ready to be submitted to an engine. It is planned when its places are known."""

    request: JobRequest
    backend: QueueBackend
    setup: Setup
    runtime: bytes = b""
    tree: Tree | None = None
    is_hosted: bool = False
    """Its coordinator runs where distrun was typed."""

    def planned(self, grants: Sequence[Grant]) -> PlannedJob:
        """Return the job with its plan on these places. No side effects.

        Raises:
            UsageError, EngineError: the tasks do not fit on them.
        """
        request = self.request
        allocation = granted(request, self.backend.name, grants)
        plan, values = make_plan(request, allocation, self.setup)
        engine = self.backend.engine
        unset = (*(name for name in plan.unset if name != engine.shows), *engine.hides) if plan.unset else ()
        plan = plan._replace(on_eof=HOLD, unset=unset)
        if request.port_range:
            _check_ports(request, plan)
        return PlannedJob(request, allocation, plan, values, self.backend, self.runtime, self.tree)


class Allocation(NamedTuple):
    """Which task runs on which host, and how hosts are reached."""

    hosts: Inventory
    slots: tuple[Slot, ...]
    reach: Mapping[str, Reach] = {}
    """How the backend reaches each host; only the backend reads it."""
    logins: Mapping[str, str] = {}
    """What a user types before a command to run it on a host, by host."""
    addresses: Mapping[str, str] = {}
    """Data addresses that are known beforehand, by host."""
    places: tuple[Place, ...] = ()
    """The places that an engine gave; empty: one a host."""
    claims: Mapping[str, str] = {}
    """What the engine calls them, by place."""

    def to_json(self) -> dict[str, Any]:
        """Return what allocation.json holds: JSON-able values."""
        hosts = [
            {
                "name": name,
                "address": self.addresses.get(name, ""),
                "reach": dict(self.reach.get(name, {})),
                "login": self.logins.get(name, ""),
            }
            for name in hosts_of(self.slots, self.hosts.order)
        ]
        return {
            "hosts": hosts,
            "tasks": [{"name": slot.name, "host": slot.host, "place": slot.place} for slot in self.slots],
            "places": [dict(place._asdict(), resources=place.resources._asdict()) for place in self.places],
        }


@dataclass(frozen=True, repr=False)
class Setup:
    """What the submitting machine adds to a plan: names, folders and a token that were made for this job."""

    job_id: str
    run_dir: str
    runtime: Runtime
    """Where tasks find the bundled runtime, or what they are sent."""
    python: str = ""
    """Interpreter of the bundled servers where the user names none; empty: the command's own, else python3."""
    sync: Sync | None = None
    inherited: Mapping[str, str] = field(default_factory=dict)
    """The environment of this process, where tasks inherit it."""
    token: str = ""
    nonce: str = ""
    imports: Mapping[str, str] = field(default_factory=dict)
    """Modules that the user's script imports, and where (`Plan.imports`)."""


def plan_job(request: JobRequest, store: JobStore) -> PlannedJob | QueuedJob:
    """Return a job that is ready to be launched, or, where an engine finds room for it, to be submitted.

    Raises:
        UsageError: the request cannot be fulfilled as it is.
    """
    backend = backends.load(request.launcher)
    check_tuning(request.settings, request.outer)
    if backend.inherits_env and request.python and request.has_bundled_servers:
        _check_python(request)
    _check_launcher(request, backend)
    hosts = backend.inventory(request.hosts)
    allocation = None if backend.is_engine else allocate(request, backend, hosts)
    job_id = DRY_RUN_ID if request.dry_run else store.new_id(request.name)
    data = b""
    if backend.ships_runtime:
        digest, data = shipping.archive()
        runtime = Runtime(digest=digest)
    else:
        runtime = Runtime(path=str(shipping.runtime_root(request.outer, copy=not request.dry_run)))
    tree = sync = None
    if request.sync_rules is not None and request.sync_dst_dir:
        tree, sync = _copied(request, request.sync_rules, backend, hosts)
    imports: Mapping[str, str] = {}
    if request.check_imports:
        from distrun import scriptcheck

        imports = scriptcheck.imports(request)
    setup = Setup(
        job_id=job_id,
        run_dir=os.path.abspath((request.run_dir or store.jobs) / job_id),
        nonce=DRY_RUN_ID if request.dry_run else os.urandom(8).hex(),
        runtime=runtime,
        python="" if backend.ships_runtime else sys.executable,
        sync=sync,
        inherited=request.outer if backend.inherits_env else {},
        token="" if request.dry_run else os.urandom(32).hex(),
        imports=imports,
    )
    if allocation is None:
        return QueuedJob(request, cast("QueueBackend", backend), setup, data, tree)
    plan, values = make_plan(request, allocation, setup)
    is_hosted = request.detach and backend.hosts_coordinator
    if request.coordinator_host:
        _check_coordinator_host(request.coordinator_host, plan, is_hosted)
    if request.port_range:
        _check_ports(request, plan)
    return PlannedJob(request, allocation, plan, values, backend, data, tree, is_hosted)


def allocate(request: JobRequest, backend: Backend, hosts: Inventory) -> Allocation:
    """Return the allocation of a backend that is given its hosts: tasks placed on these.

    Raises:
        UsageError: the tasks do not fit on the hosts.
    """
    slots = place(request, hosts)
    used = hosts_of(slots, hosts.order)
    reach: dict[str, Reach] = {}
    logins: dict[str, str] = {}
    for name in used:
        reach[name] = backend.reach(hosts.spec(name), request.reach)
        logins[name] = backend.login(reach[name])
    return Allocation(
        hosts=hosts,
        slots=slots,
        reach=reach,
        logins=logins,
        addresses={} if request.interface or request.subnet else backend.addresses(used),
    )


def granted(request: JobRequest, engine: str, grants: Sequence[Grant]) -> Allocation:
    """Return the allocation on the places that an engine gave. No side effects.

    Raises:
        EngineError: they have too little room.
    """
    from distrun.backends.queue import groups_of, place_names, place_tasks  # with all that listens: for engines only

    known = {} if request.hosts is None else {spec.name: spec for spec in request.hosts.specs}
    nodes = tuple(dict.fromkeys(grant.node for grant in grants))
    specs = tuple(known.get(name, HostSpec(name)) for name in nodes)
    hosts = Inventory(engine, specs, nodes, where={} if request.hosts is None else request.hosts.where)
    names = place_names(grants)
    grants = [grant._replace(place=names[grant.place]) for grant in grants]
    slots = place_tasks(groups_of(request), grants, request.has_servers, request.adds_on_hosts, request.oversubscribe)
    used = {slot.place for slot in slots}
    places = tuple(Place(each.place, each.node, each.resources) for each in grants if each.place in used)
    return Allocation(hosts, slots, places=places, claims={name: claim for claim, name in names.items()})


def _check_launcher(request: JobRequest, backend: Backend) -> None:
    """Refuse options that mean nothing for the launcher. Raises UsageError."""
    takes = cast("QueueBackend", backend).engine.takes if backend.is_engine else ()
    for row in ROWS:
        if not row.launchers or not row.of(request):
            continue
        if not backend.is_engine and row.launchers != NO_ENGINES:
            raise UsageError(
                f"{row.name} is for engines, and --launcher {request.launcher} is none",
                f"leave it out, or name one: --launcher {'|'.join(backends.ENGINES)}",
            )
        if backend.is_engine and row.launchers not in (ENGINES, request.launcher) and row.name not in takes:
            why = ": the engine chooses the hosts" if row.launchers == NO_ENGINES else ""
            raise UsageError(f"{row.name} is not for --launcher {request.launcher}{why}", "leave it out")


def _check_coordinator_host(named: str, plan: Plan, is_hosted: bool) -> None:
    """Check --coordinator-host. Raises UsageError."""
    from distrun.hosts.ranges import fold

    if not is_hosted:
        raise UsageError("--coordinator-host: only a detached job has its coordinator on a host", "add --detach")
    names = [host.name for host in plan.hosts]
    if named not in names:
        raise UsageError(f"--coordinator-host: {named!r} is no host of this job", f"it has: {fold(names)}")


def _check_python(request: JobRequest) -> None:
    """Look for --python on this machine, where the servers will run."""
    import shutil  # with all its formats of archives: not for every launch

    folders = given(request.settings, SERVER).get("PATH")
    path = request.outer.get("PATH", os.defpath) if folders is None else folders.value
    if shutil.which(os.path.expanduser(request.python), path=path) is None:
        raise UsageError(
            f"--python: there is no program {request.python!r} on this machine", "leave it out, or give a full path"
        )


def _copied(request: JobRequest, rules: CopyRules, backend: Backend, hosts: Inventory) -> tuple[Tree, Sync]:
    """Return which files are copied to the hosts, and what a plan says of them."""
    from distrun.sync.rules import filters, is_kept, keep_rules  # not needed for jobs that copy nothing
    from distrun.sync.tree import check_channel_size, scan
    from distrun_runtime.contract.folder import identity

    folder = os.path.join(os.path.realpath(request.cwd), "")
    words = [formats.python_script(request.command, request.shell)]
    words += [word for word in formats.python_words(request.command, request.shell)[:1] if "/" in word]
    names = [os.path.normpath(word) for word in words if word and not word.startswith(("/", "~"))]
    # A link may lead to what has another name in the copy.
    tree = scan(request.cwd, rules, [name for name in names if os.path.realpath(folder + name) == folder + name])
    if backend.copies_over_channels:
        check_channel_size(tree)
    keeping = keep_rules(filters(rules, request.cwd)) if tree.lacks and request.sync_delete else ()
    top = [*os.listdir(request.cwd), *(each.name.partition("/")[0] for each in rules.extra)]
    return tree, Sync(
        request.cwd,
        tree.size,
        tree.files,
        request.sync_delete,
        "" if request.dry_run else identity(request.cwd),
        brings=may_bring(request, hosts.specs, top),
        activated=request.activated or (),
        lacks={name: not request.sync_delete or is_kept(keeping, name) for name in sorted(tree.lacks)},
    )


def make_plan(request: JobRequest, allocation: Allocation, setup: Setup) -> tuple[Plan, Secrets]:
    """Return the plan of a job, and the secret values that it only names. No side effects.

    Raises:
        UsageError: one hidden variable has different values for two roles; too few GPUs on a host.
    """
    slots = allocation.slots
    layout = _JobLayout.of(request, allocation)
    users = {role: given(request.settings, role) for role in ROLES}
    if request.gpus_per_worker and gpus.VISIBLE not in users[WORKER]:
        _check_gpus(request, allocation)
    if request.server_device and gpus.VISIBLE not in users[SERVER]:
        _check_server_device(request, allocation)
    tasks = tuple(_task(request, slot, layout, setup, users[slot.role]) for slot in slots)
    plan = Plan(
        job=setup.job_id,
        name=request.name,
        backend=request.launcher,
        command=request.command,
        cwd=request.sync_dst_dir or request.cwd,
        hosts=tuple(_host(request, layout, allocation, name) for name in layout.nodes),
        tasks=tasks,
        limits=request.limits,
        on_eof=HOLD if request.detach or request.reconnect else STOP,
        interface=request.interface,
        subnet=request.subnet,
        unset=() if request.keep_outer_env else environ.STALE,
        runtime=setup.runtime,
        activate=request.activate,
        sync=setup.sync,
        joined=tuple(sorted({s.name for each in users.values() for s in each.values() if s.joins})),
        doctor=request.doctor,
        log_limit=request.log_limit,
        nonce=setup.nonce,
        metrics_port=request.metrics_port,
        metrics_address=request.metrics_address,
        places=allocation.places,
        gpus_per_worker=request.gpus_per_worker,
        forward_signals=request.forward_signals,
        program=next(iter(formats.python_words(request.command, request.shell)), ""),
        script=formats.python_script(request.command, request.shell),
        imports=setup.imports,
    )
    return plan, Secrets(token=setup.token, env=_hidden(layout.sizes, users))


class _JobLayout(NamedTuple):
    """What a task's variables say of the other tasks: worked out once, since a job may have many."""

    hosts: Inventory
    nodes: Mapping[str, int]
    """Hosts that have a task, and their index."""
    groups: Mapping[str, int]
    """Places that have a worker, and their index: that of worker 0 first, as torch numbers its groups."""
    sizes: Mapping[str, int]
    """Tasks of each role."""
    first: Mapping[str, Slot]
    """Each role's first task."""
    tuning: Mapping[str, str]
    """What options say of tuning, the same for all tasks."""

    @staticmethod
    def of(request: JobRequest, allocation: Allocation) -> _JobLayout:
        nodes = dict(zip(hosts_of(allocation.slots, allocation.hosts.order), itertools.count()))
        groups: dict[str, int] = {}
        sizes, first = dict.fromkeys(ROLES, 0), dict[str, Slot]()
        for slot in allocation.slots:
            sizes[slot.role] += 1
            first.setdefault(slot.role, slot)
            if slot.role == WORKER:
                groups.setdefault(slot.place, len(groups))
        return _JobLayout(allocation.hosts, nodes, groups, sizes, first, _tuning(request))


def _host(request: JobRequest, layout: _JobLayout, allocation: Allocation, name: str) -> Host:
    spec = allocation.hosts.spec(name)
    ports: tuple[str, ...] = (JAX_PORT, MASTER_PORT) if name == layout.first[WORKER].host else ()
    if request.has_servers and request.ps == COMMAND and name == layout.first[SCHEDULER].host:
        ports += (PS_PORT,)
    return Host(
        name=name,
        address=spec.addr or ("" if spec.iface else allocation.addresses.get(name, "")),
        ports=ports,
        reach=allocation.reach.get(name, Reach({})),
        interface=spec.iface,
        login=allocation.logins.get(name, ""),
        gpus=spec.gpus,
        named=allocation.hosts.where.get(name, ""),
    )


def _task(request: JobRequest, slot: Slot, layout: _JobLayout, setup: Setup, users: Mapping[str, Setting]) -> Task:
    spec = layout.hosts.spec(slot.host)
    env = {**_identity(slot, layout, setup), **_parameter_server(request, slot, layout), **layout.tuning}
    defaults = {"PYTHONUNBUFFERED": "1"}
    if slot.role == WORKER and request.has_bundled_servers:
        defaults["GLIBC_TUNABLES"] = COPIES
    env.update((name, value) for name, value in defaults.items() if name not in users and name not in setup.inherited)
    is_ours = slot.role != WORKER and request.ps == BUNDLED
    if is_ours and slot.role == SERVER and request.server_imports:
        env["DISTRUN_SERVER_IMPORT"] = ",".join(request.server_imports)
    if is_ours and slot.role == SERVER and request.server_device:
        env["DISTRUN_SERVER_DEVICE"] = request.server_device
    refs = _references(request, slot, layout)
    if slot.role == WORKER:
        env.update(_torch_and_jax(slot, layout, setup.job_id))
    sees = _gpus(request, slot, spec, users) if spec.gpus or request.gpus_per_worker else None
    if sees is not None:
        env.update(_devices(spec, *sees, users))
    hidden, own = [], dict(env)
    for name, setting in users.items():
        if setting.hidden and name not in env:
            hidden.append(name)
        elif name not in env:
            own[name] = setting.value
    return Task(
        name=slot.name,
        role=slot.role,
        rank=slot.rank,
        host=slot.host,
        argv=_argv(request, spec, slot.role, setup.python),
        cwd=spec.workdir or request.sync_dst_dir or request.cwd,
        env=own,
        refs=refs,
        secret_env=tuple(sorted(hidden)),
        needs=SERVER_MODULES if is_ours else (),
        place=slot.at,
        gpus=sees,
    )


def _argv(request: JobRequest, spec: HostSpec, role: str, python: str) -> tuple[str, ...]:
    if role == WORKER or request.ps == COMMAND:
        return formats.to_argv(request.command, request.shell)
    if not (chosen := request.python or spec.python or python):
        # The Python that the user's command names, which is looked for in the same PATH as the command.
        first = (request.command[0].split() or [""])[0]
        chosen = first if re.match(formats.PYTHON, first) else "python3"
    return (chosen, "-m", "distrun_runtime", role)


def _gpus(request: JobRequest, slot: Slot, spec: HostSpec, users: Mapping[str, Setting]) -> tuple[int, int] | None:
    """Return which GPUs of its place a task sees: the first, and how many. None: that is not distrun's business.

    All of `gpus=`, so that `cuda:LOCAL_RANK` is one of them. Or each worker its own and the other tasks none, but for
    servers that are to use GPUs: these see all that the place has, their workers' too.
    """
    if gpus.VISIBLE in users:
        return None
    uses_all = slot.role == SERVER and request.server_device not in ("", gpus.CPU)
    if request.gpus_per_worker and not uses_all:
        each = request.gpus_per_worker
        return (slot.local_rank * each, each) if slot.role == WORKER else (0, 0)
    return None if spec.gpu_count is None else (0, spec.gpu_count)


def _devices(spec: HostSpec, first: int, count: int, users: Mapping[str, Setting]) -> dict[str, str]:
    """Return the variables by which a task sees its GPUs, as far as the hosts file says; its agent knows more."""
    found = gpus.variables(gpus.View(gpus.listed(spec.gpus)), first, count)
    if count and not spec.gpus:
        del found[gpus.VISIBLE]
    return {name: value for name, value in found.items() if name not in users}


def _check_gpus(request: JobRequest, allocation: Allocation) -> None:
    """Check --gpus-per-worker against `gpus=` of the hosts; where it is not said, agents look. Raises UsageError."""
    from distrun.hosts.ranges import fold

    each = request.gpus_per_worker
    workers = Counter((slot.host, slot.place) for slot in allocation.slots if slot.role == WORKER)
    places = Counter(host for host, _ in workers)
    shared = [host for host, count in places.items() if count > 1]
    if shared and request.engine.worker.gpus < each:
        raise UsageError(
            f"--gpus-per-worker {each}: {request.launcher} gave the job several places on {fold(shared)}, and which of"
            " them has which GPUs is not known unless it gives each its own",
            f"--worker-gpus {each}",
        )
    faults: list[gpus.GpusUnfit] = []
    for (host, _), count in workers.items():
        spec = allocation.hosts.spec(host)
        if spec.gpus:
            said = f"gpus={spec.gpus} in {allocation.hosts.where.get(host, allocation.hosts.source)}"
            try:
                gpus.check_room(host, count, each, gpus.View(gpus.listed(spec.gpus), said))
            except gpus.GpusUnfit as err:
                faults.append(err)
    if faults:
        more = f"\nand {len(faults) - SHOWN} hosts more" if len(faults) > SHOWN else ""
        raise UsageError("\n".join(map(str, faults[:SHOWN])) + more, faults[0].fix)


def _check_server_device(request: JobRequest, allocation: Allocation) -> None:
    """Check --server-device against `gpus=` of the hosts; where it is not said, servers look. Raises UsageError."""
    _, _, number = request.server_device.partition(":")
    if not number:
        return
    for name in dict.fromkeys(slot.host for slot in allocation.slots if slot.role == SERVER):
        spec = allocation.hosts.spec(name)
        count = spec.gpu_count
        if count is not None and int(number) >= count:
            raise UsageError(
                f"--server-device {request.server_device}: servers on {name} see {formats.number_of(count, 'GPU')}"
                f" (gpus={spec.gpus} in {allocation.hosts.where.get(name, allocation.hosts.source)}), counted from 0",
                "--server-device gpu: each server takes one of those that it sees",
            )


def _identity(slot: Slot, layout: _JobLayout, setup: Setup) -> dict[str, str]:
    return {
        "DISTRUN_JOB_ID": setup.job_id,
        "DISTRUN_ROLE": slot.role,
        "DISTRUN_RANK": str(slot.rank),
        "DISTRUN_WORLD_SIZE": str(layout.sizes[slot.role]),
        "DISTRUN_LOCAL_RANK": str(slot.local_rank),
        "DISTRUN_LOCAL_SIZE": str(slot.local_size),
        "DISTRUN_NODE_RANK": str(layout.nodes[slot.host]),
        "DISTRUN_NUM_NODES": str(len(layout.nodes)),
        "DISTRUN_HOST": slot.host,
        "DISTRUN_RESTART": "0",
        "DISTRUN_RUN_DIR": setup.run_dir,
    }


def _parameter_server(request: JobRequest, slot: Slot, layout: _JobLayout) -> dict[str, str]:
    env = {
        "DMLC_ROLE": slot.role,
        "DMLC_NUM_WORKER": str(request.workers),
        "DMLC_NUM_SERVER": str(request.servers),
        "DMLC_RANK": str(slot.rank),
        "DMLC_JOB_CLUSTER": request.launcher,
        "DMLC_NUM_ATTEMPT": "0",
    }
    if layout.sizes[SERVER] > request.servers:
        env["DISTRUN_RELAYS"] = str(layout.sizes[SERVER] - request.servers)
    if slot.role == WORKER:
        env["DMLC_TASK_ID"] = env["DMLC_WORKER_ID"] = str(slot.rank)
    elif slot.role == SERVER:
        env["DMLC_TASK_ID"] = str(request.workers + slot.rank)
        env["DMLC_SERVER_ID"] = str(slot.rank)
    return env


def _references(request: JobRequest, slot: Slot, layout: _JobLayout) -> dict[str, str]:
    address = f"{{host:{slot.place}.address}}"
    refs = {"DISTRUN_ADDR": address, "DMLC_NODE_HOST": address}
    if request.has_servers and request.ps == COMMAND:
        # A foreign scheduler publishes nothing: its port is one that the agent of its host holds.
        root = layout.first[SCHEDULER].place
        refs.update(DMLC_PS_ROOT_URI=f"{{host:{root}.address}}", DMLC_PS_ROOT_PORT=f"{{{root}/port:{PS_PORT}}}")
    elif request.has_servers and slot.role != SCHEDULER:
        # The bundled scheduler takes a free port itself and tells it; so it is given none.
        refs.update(DMLC_PS_ROOT_URI="{scheduler.address}", DMLC_PS_ROOT_PORT="{scheduler.port}")
    elif request.has_servers:
        # It tells a program of this job that speaks another protocol from a stranger.
        refs["DISTRUN_WORKER_ADDRESSES"] = ",".join(f"{{host:{name}.address}}" for name in layout.groups)
    if slot.role == WORKER:
        first = layout.first[WORKER].place
        refs.update(
            MASTER_ADDR=f"{{host:{first}.address}}",
            MASTER_PORT=f"{{{first}/port:{MASTER_PORT}}}",
            JAX_COORDINATOR_ADDRESS=f"{{host:{first}.address}}:{{{first}/port:{JAX_PORT}}}",
        )
    return refs


def _torch_and_jax(slot: Slot, layout: _JobLayout, job_id: str) -> dict[str, str]:
    rank, size, group = str(slot.rank), str(layout.sizes[WORKER]), str(layout.groups[slot.place])
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
        "TORCHELASTIC_RUN_ID": job_id,
        "JAX_NUM_PROCESSES": size,
        "JAX_PROCESS_ID": rank,
    }


def _tuning(request: JobRequest) -> dict[str, str]:
    found = {}
    for row in ROWS:
        if row.variable and environ.BY_NAME[row.variable].group == "tuning" and (value := row.of(request)):
            found[row.variable] = exact(value) if isinstance(value, float) else str(value)
    return found


def _hidden(sizes: Mapping[str, int], users: Mapping[str, Mapping[str, Setting]]) -> dict[str, str]:
    """Return the values of hidden variables of the roles that have tasks (`sizes`). Raises UsageError."""
    values: dict[str, str] = {}
    for role, settings in users.items():
        if not sizes[role]:
            continue
        for name, setting in settings.items():
            if setting.hidden and values.setdefault(name, setting.value) != setting.value:
                raise UsageError(
                    f"{name} has different values for two roles, and values that are kept secret are sent once",
                    "give it under two names, or the same value to all with --env",
                )
    return values


def _check_ports(request: JobRequest, plan: Plan) -> None:
    """Check that --port-range has a port for each process of ours, and each held port, on every host. No side effects.

    Raises:
        UsageError: with the arithmetic.
    """
    first, last = map(int, request.port_range.split("-"))
    for host in plan.hosts:
        terms = []
        if request.has_bundled_servers:
            sizes = [(role, sum(task.host == host.name for task in plan.of_role(role))) for role in ROLES]
            terms = [(size, f"{role}{'' if size == 1 else 's'}") for role, size in sizes if size]
        if host.ports:
            terms.append((len(host.ports), f"held for other programs ({', '.join(host.ports)})"))
        needed = sum(size for size, _ in terms)
        if needed > last - first + 1:
            raise UsageError(
                (
                    f"--port-range {request.port_range} has {last - first + 1}"
                    f" port{'' if first == last else 's'}, and host {host.name} needs {needed}:"
                    f" {' + '.join(f'{size} {what}' for size, what in terms)}"
                ),
                f"give a range of at least {needed}",
            )


def may_bring(request: JobRequest, hosts: Sequence[HostSpec], names: Iterable[str]) -> bool:
    """Return whether what servers run by may be among the files that are copied, as far as can be said here.

    `names`: of the files and folders at the top of what is copied. Paths are judged on the host.
    """
    has_modules = any(name.partition(".")[0] in SERVER_MODULES for name in names)
    return request.activated is None or has_modules or any(spec.workdir for spec in hosts)


def device_warnings(plan: Plan) -> list[str]:
    """Return a warning for hosts that have more workers than the GPUs which these workers see. No side effects.

    A program that takes the device `cuda:LOCAL_RANK`, as scripts for torchrun do, fails in such a worker. It is no
    error: workers may share a GPU, or use none. A value that hides all GPUs is taken as meant.
    """
    workers = plan.of_role(WORKER)
    if plan.gpus_per_worker:
        given = all(task.gpus is None for task in workers)
        return [f"--gpus-per-worker has no effect: workers are given {gpus.VISIBLE} by --env"] if given else []
    seeing: dict[str, list[Task]] = {}
    for task in workers:
        value = task.env.get(gpus.VISIBLE, "").strip()
        if value not in ("", "-1"):
            seeing.setdefault(value, []).append(task)
    warnings = []
    for value, tasks in seeing.items():
        count = len(value.split(","))
        late = sorted((each for each in tasks if int(each.env["LOCAL_RANK"]) >= count), key=lambda each: each.host)
        if not late:
            continue
        from distrun.hosts.ranges import fold

        names = [task.name for task in late]
        warnings.append(
            f"{fold(task.host for task in late)}: more workers than GPUs: {gpus.VISIBLE}={value} shows"
            f" {formats.number_of(count, 'GPU')}, and LOCAL_RANK is too large for cuda:LOCAL_RANK in"
            f" {facts.listed(names, SHOWN)}. Place fewer workers there, or let the program take LOCAL_RANK"
            " modulo the number of GPUs"
        )
    return warnings


def device_notes(plan: Plan) -> list[str]:
    """Return what scripts for torchrun take differently with --gpus-per-worker: LOCAL_RANK is no GPU's number."""
    each = plan.gpus_per_worker
    if not any(task.gpus is not None and int(task.env["LOCAL_RANK"]) >= each > 0 for task in plan.of_role(WORKER)):
        return []
    own = "its own GPU as cuda:0" if each == 1 else f"its own {each} GPUs as cuda:0 to cuda:{each - 1}"
    return [f"--gpus-per-worker: each worker sees {own}, whatever its LOCAL_RANK"]
