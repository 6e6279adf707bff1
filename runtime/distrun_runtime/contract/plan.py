"""The plan of a job: everything that will happen, as one value, made before anything does.

A plan holds no secret: it names the variables that are forwarded, `Secrets` carries their values beside it, to
the agents only, and is never written. What is known only later (the scheduler's port, a reserved port) is in
`Task.refs` as `{name}` references; `resolve` fills them from the facts that the agents report.

No side effects. JSON both ways; the format is fixed by `docs/protocol.md` and carries a version.

The values are named tuples: every agent makes these classes when it starts, and frozen dataclasses take six times as
long.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, NamedTuple, NewType, Optional, Tuple

from distrun_runtime.contract import facts
from distrun_runtime.errors import ContractError

VERSION = 3

SCHEDULER, SERVER, WORKER = ROLES = facts.ROLES
SERVER_MODULES = ("numpy", "zmq")
"""What the bundled servers and scheduler import, beyond the runtime that goes along."""
ACTIVATE_S = 60.0
"""How long the shell text of --activate may take on a host."""

STOP = "stop"
"""`on_eof`: the end of the agent's input, or an expired lease, stops its tasks (attached jobs)."""
HOLD = "hold"
"""`on_eof`: the tasks go on until the lease ends (detached jobs)."""

_NONE: Mapping[str, str] = {}
"""Never changed."""
Reach = NewType("Reach", Mapping[str, str])
"""How a backend gets to a host, in texts. That backend makes it and reads it; all others hand it on."""
_REFERENCE = re.compile(r"\{([^{}]+)\}")


class Task(NamedTuple):
    """One process to be."""

    name: str
    """Role and rank, `worker-0`: unique in the job."""
    role: str
    rank: int
    """Index in the role, from 0."""
    host: str
    """`Host.name` of the place it runs at."""
    argv: Tuple[str, ...]
    """Executed exactly, without a shell."""
    cwd: str
    env: Mapping[str, str] = _NONE
    """Variables added, literally."""
    refs: Mapping[str, str] = _NONE
    """Variables added once their `{references}` are known, e.g. DMLC_PS_ROOT_PORT -> "{scheduler.port}"."""
    secret_env: Tuple[str, ...] = ()
    """Names of variables whose values travel in `Secrets.env` (given with --env, or forwarded)."""
    needs: Tuple[str, ...] = ()
    """Modules that the interpreter argv[0] must be able to import: checked on its host before anything starts."""
    place: str = ""
    """`Place.name` of the agent that starts it; empty: it is called as the host."""
    gpus: Optional[Tuple[int, int]] = None
    """Which GPUs of those that its place may use it sees: the first, and how many. Its agent sets CUDA_VISIBLE_DEVICES
    to them. None: that is not distrun's business."""

    @property
    def place_name(self) -> str:
        """The name of its place."""
        return self.place or self.host


class Resources(NamedTuple):
    """What a place may use of its node. What is not given is not limited."""

    cores: Optional[int] = None
    memory: Optional[int] = None
    """Bytes."""
    gpus: Tuple[str, ...] = ()
    """As CUDA_VISIBLE_DEVICES names them."""


class Place(NamedTuple):
    """One agent with its share of a node's resources. A node may have several; each has tasks of its own."""

    name: str
    """What the agent is called: unique in the job. Where an engine started it, the engine's name for that process."""
    host: str
    """`Host.name` of its node."""
    resources: Resources = Resources()


class Host(NamedTuple):
    """One machine of the job: a node."""

    name: str
    """What it is called in prefixes, reports and references."""
    address: str = ""
    """Address that peers use for data; empty: the agent finds it (interface, subnet, route)."""
    ports: Tuple[str, ...] = ()
    """Names of the ports that its agent holds for foreign programs: the fact `HOST/port:NAME` for each."""
    reach: Reach = Reach(_NONE)
    """How the backend gets there; only the backend reads it."""
    interface: str = ""
    """Takes the place of `Plan.interface` on this host."""
    login: str = ""
    """What a user types before a command to run it there, `ssh -p 2222 ann@d2`, for messages; empty: nothing."""
    gpus: str = ""
    """`gpus=` of the hosts file (`contract/gpus.py`); empty: nothing is said."""
    named: str = ""
    """Where the user describes it, `hosts:3`, for messages; empty: nowhere."""

    def typed(self, script: str, asks: bool = False) -> str:
        """Return what a user types to run shell text on this host. `asks`: it may ask for a password, as sudo does."""
        if not self.login:
            return script
        import shlex  # for a message only

        login = "ssh -t" + self.login[3:] if asks and self.login.startswith("ssh ") else self.login
        return f"{login} {shlex.quote(script)}"


class Limits(NamedTuple):
    """The times of a job, seconds. None: no limit."""

    grace_s: float = facts.GRACE_S
    """Between asking a task to end and killing it."""
    timeout_s: float | None = None
    """The whole job; then exit code 124."""
    start_s: float = facts.START_S
    """Until every agent has answered and every task was started; then exit code 6."""
    lease_s: float = facts.LEASE_S
    """How long an agent goes on without hearing from the coordinator; longer than `lost_s`."""
    verdict_s: float = facts.EARLIER_FAILURE_S
    """How long reports of an earlier failure are awaited before the cause is named."""
    early_exit_s: float = facts.EARLY_EXIT_S
    """How long workers may take to end after a server or scheduler ended with 0."""
    suspect_s: float = facts.SUSPECT_S
    """A host that is silent for so long is suspect: said, and nothing else."""
    lost_s: float = facts.LOST_S
    """A host that is silent for so long is lost: the job ends with exit code 7."""
    stall_after_s: float = facts.STALL_AFTER_S
    """A worker without a sign of life for so long is said to be stalled; 0: none is."""


class Runtime(NamedTuple):
    """Where the tasks of a host find the package `distrun_runtime`. Neither given: distrun does not provide it."""

    path: str = ""
    """Folder that is put on PYTHONPATH as it stands: it is on this host already."""
    digest: str = ""
    """Else: SHA-256 (hex) of the archive that the agent keeps unpacked, and asks for if it does not have it."""


class Sync(NamedTuple):
    """The tree that is copied to `Plan.cwd` of every host before tasks start."""

    source: str
    """Folder on the launching machine."""
    size: int = 0
    """Bytes."""
    files: int = 0
    delete: bool = False
    """Whether what only a host has is deleted there; then only in a folder that carries our marker."""
    identity: str = ""
    """`folder.identity` of the source: where `Plan.cwd` is that very folder, nothing is copied or deleted."""
    brings: bool = True
    """Whether the environment, an interpreter or its modules may be among the files: then agents look at them after
    the copy, else before it."""
    activated: Tuple[str, ...] = ()
    """Folders of environments that are activated, as typed: one that is below `Plan.cwd` comes with the files."""
    lacks: Mapping[str, bool] = {}
    """Those of the program and the script that are not copied, as paths below `Plan.cwd`; and whether what a host has
    there stays. Else it is deleted."""


class Plan(NamedTuple):
    """All of a job."""

    job: str
    """Its id: short, unique on the submitting machine."""
    name: str
    """What the user calls it; may be empty."""
    backend: str
    command: Tuple[str, ...]
    """What the user typed, word by word."""
    cwd: str
    hosts: Tuple[Host, ...]
    tasks: Tuple[Task, ...]
    limits: Limits = Limits()
    on_eof: str = STOP
    interface: str = ""
    """--interface (or DMLC_INTERFACE): resolved on each host."""
    subnet: str = ""
    """--subnet CIDR: resolved on each host."""
    unset: Tuple[str, ...] = ()
    """Names and `PREFIX*` patterns of an outer job's variables, removed before anything is added."""
    runtime: Runtime = Runtime()
    activate: str = ""
    """Shell text that `bash -l` runs once on each host; the environment it leaves is what tasks start from."""
    sync: Optional[Sync] = None
    joined: Tuple[str, ...] = ()
    """Variables of `Task.secret_env` that are lists of folders and do not replace what a host has for its tasks."""
    doctor: str = ""
    """What a user types to have these hosts examined, for messages: `distrun doctor -H hosts`."""
    log_limit: int = 0
    """Bytes that are kept of each task's log, about: older ones are removed. 0: all are kept."""
    nonce: str = ""
    """64 random bits, hex: tells the job's processes from those of a job of another store by the same id. No secret."""
    metrics_port: Optional[int] = None
    """Port at which the coordinator answers Prometheus; 0: any free one; None: it does not."""
    metrics_address: str = ""
    """The address for that; empty: the loopback address."""
    places: Tuple[Place, ...] = ()
    """The job's places; empty: each host is one, of its own name."""
    gpus_per_worker: int = 0
    """How many GPUs each worker has to itself; 0: workers see what their hosts' `gpus` say."""
    forward_signals: Tuple[str, ...] = ()
    """Signals that workers are given when they reach `launch`, the coordinator or their agent: of
    `process.TASKS_SIGNALS`."""
    program: str = ""
    """What the command runs first, as typed: looked for on each host before files are copied. Empty: not known."""
    script: str = ""
    """The script that `program`, a Python, runs, as typed: looked for on each host, too. Empty: none, or not known."""
    imports: Mapping[str, str] = _NONE
    """Modules that its script imports, and where (`train.py:3`): `program`, a Python, is asked whether it has them."""
    version: int = VERSION

    def task(self, name: str) -> Task:
        """Return the task of that name; KeyError if there is none."""
        for task in self.tasks:
            if task.name == name:
                return task
        raise KeyError(name)

    @property
    def all_places(self) -> Tuple[Place, ...]:
        """All places: one agent each."""
        return self.places or tuple(Place(host.name, host.name) for host in self.hosts)

    def host_of(self, place: str) -> Host:
        """Return the node of a place; KeyError if there is none."""
        name = next((each.host for each in self.places if each.name == place), "") if self.places else place
        for host in self.hosts:
            if host.name == name:
                return host
        raise KeyError(place)

    def of_role(self, role: str) -> Tuple[Task, ...]:
        """Return the tasks of `role`, by rank."""
        return tuple(task for task in self.tasks if task.role == role)

    @property
    def gives_gpus(self) -> bool:
        """Whether a task gets GPUs, so that agents ask the driver before it starts."""
        return any(task.gpus is not None and task.gpus[1] > 0 for task in self.tasks)

    @property
    def settles(self) -> bool:
        """Whether agents have something to do between the copy of the files and the first task.

        An environment, an interpreter or a folder may come with the files: agents look at them only then.
        """
        if self.sync is None:
            return False
        return bool(self.activate or self.imports) or any(task.needs or task.cwd != self.cwd for task in self.tasks)


def shares(plan: Plan) -> Callable[[str], Plan]:
    """Return what cuts the plan down to what the agent of a place needs, however large the job is.

    That is its own tasks, the places of its node, and of the other hosts the first: towards it the agent looks for
    its address. How they are reached is none of its business. The plan is looked through once: it may have thousands of
    places. What is returned raises KeyError if there is no such place.
    """
    numbers = {host.name: number for number, host in enumerate(plan.hosts)}
    host_of = {place.name: place.host for place in plan.all_places}
    places: Dict[str, List[Place]] = {}
    for place in plan.places:
        places.setdefault(place.host, []).append(place)
    tasks: Dict[str, List[Task]] = {}
    for task in plan.tasks:
        tasks.setdefault(task.place_name, []).append(task)

    def of(place: str) -> Plan:
        host = host_of[place]
        number = numbers[host]
        others = sorted({number, 0 if number else min(1, len(plan.hosts) - 1)})
        return plan._replace(
            hosts=tuple(plan.hosts[each]._replace(reach=Reach(_NONE)) for each in others),
            tasks=tuple(tasks.get(place, ())),
            places=tuple(places.get(host, ())),
        )

    return of


class Secrets:
    """What a plan names but does not hold. Goes to the agents; never written, printed or logged.

    Arguments:
        token: the job's token, hex; a job without servers has one too.
        env: values of the variables that `Task.secret_env` names.
    """

    def __init__(self, token: str = "", env: Mapping[str, str] = _NONE) -> None:
        self.token = token
        self.env = env

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secrets) and (self.token, self.env) == (other.token, other.env)

    __hash__ = None  # type: ignore[assignment]  # it holds a mapping

    def __repr__(self) -> str:
        return f"Secrets(token=..., env of {', '.join(sorted(self.env))})"


def references(task: Task) -> FrozenSet[str]:
    """Return the names of the facts that `task` waits for. No side effects.

    Known facts: `scheduler.address` and `scheduler.port` (published by the scheduler task itself),
    `host:NAME.address` and `NAME/port:LABEL` (from the agent of place NAME; one place a host is called as the host).
    """
    return frozenset().union(*map(_REFERENCE.findall, task.refs.values()))


def resolve(task: Task, facts: Mapping[str, str]) -> Dict[str, str]:
    """Return the variables added to `task`, references filled in. No side effects.

    Raises:
        ContractError: a fact is missing; the message names it.
    """

    def fill(match: re.Match[str]) -> str:
        try:
            return facts[match.group(1)]
        except KeyError:
            raise ContractError(f"{task.name} needs {match.group(1)!r}, which no agent has reported") from None

    env = dict(task.env)
    for name, text in task.refs.items():
        env[name] = _REFERENCE.sub(fill, text)
    return env


def to_json(plan: Plan) -> Dict[str, Any]:
    """Return the plan as JSON-able values; `from_json` gives it back."""
    from distrun_runtime.contract.dataclass import written  # agents only read plans

    return dict(written(plan))


def from_json(value: Mapping[str, Any]) -> Plan:
    """Return the plan that `to_json` wrote.

    Raises:
        ContractError: another version, or a member that is missing, unknown or of another type.
    """
    if value.get("version") != VERSION:
        raise ContractError(f"this is plan version {value.get('version')!r}; this program knows version {VERSION}")
    try:
        members = _tuples(value)
        members["hosts"] = tuple(Host(**_tuples(host)) for host in value["hosts"])
        members["tasks"] = tuple(Task(**_tuples(task)) for task in value["tasks"])
        members["places"] = tuple(
            Place(**dict(place, resources=Resources(**_tuples(place["resources"])))) for place in value["places"]
        )
        members["limits"] = Limits(**value["limits"])
        members["runtime"] = Runtime(**value["runtime"])
        members["sync"] = Sync(**_tuples(value["sync"])) if value["sync"] is not None else None
        return Plan(**members)
    except (AttributeError, KeyError, TypeError) as err:
        raise ContractError(f"this is not a plan of distrun: {err}") from err


def _tuples(value: Mapping[str, Any]) -> Dict[str, Any]:
    """Return members of JSON with tuples in place of lists."""
    return {name: tuple(member) if isinstance(member, list) else member for name, member in value.items()}
