"""What Slurm's commands answer, and what it means for a job. No side effects.

Only the formats that all versions since 20.11 print are read (`scontrol -o`, `squeue -o`, `sinfo -o`, `sacct -P`), not
JSON, for which a site may lack the plug-in. Accounting (sacct) only adds to an explanation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distrun.backends.engine import (
    ENDED,
    MARK,
    MIB,
    QUEUED,
    RUNNING,
    Explanation,
    Grant,
    QueueStatus,
    RoleGroup,
    check_known,
)
from distrun.errors import UsageError
from distrun.hosts.ranges import expand
from distrun.request import Needs
from distrun_runtime.contract import facts
from distrun_runtime.contract.facts import duration

PENDING = frozenset(
    [
        "PENDING",
        "CONFIGURING",
        "RESV_DEL_HOLD",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "REQUEUED",
        "RESIZING",
        "SPECIAL_EXIT",
        "POWER_UP_NODE",
    ]
)
OVER = frozenset(
    [
        "COMPLETED",
        "FAILED",
        "CANCELLED",
        "TIMEOUT",
        "NODE_FAIL",
        "PREEMPTED",
        "OUT_OF_MEMORY",
        "BOOT_FAIL",
        "DEADLINE",
        "REVOKED",
        "LAUNCH_FAILED",
        "RECONFIG_FAIL",
    ]
)
ENDING = frozenset(["COMPLETING", "STAGE_OUT", "SIGNALING"])
"""Slurm has decided that the job is over and ends its processes. How it ended is not shown yet."""
UNKNOWN_JOB = ("Invalid job id",)
GONE_ALREADY = ("Invalid job id", "already completing or completed", "Job/step already", "Invalid job/step")

HOPELESS = frozenset(
    [
        "PartitionConfig",
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "PartitionDown",
        "PartitionInactive",
        "BadConstraints",
        "AccountNotAllowed",
        "InvalidAccount",
        "InvalidQOS",
        "QOSNotAllowed",
        "QOSMaxWallDurationPerJobLimit",
        "QOSMaxCpuPerJobLimit",
        "QOSMaxNodePerJobLimit",
        "AssocMaxWallDurationPerJobLimit",
        "AssocMaxCpuPerJobLimit",
        "AssocMaxNodePerJobLimit",
        "DependencyNeverSatisfied",
        "AssociationJobLimit",
        "JobHeldAdmin",
        "launch_failed_requeued_held",
    ]
)
"""Reasons for which a job waits until the job or the cluster is changed."""

OOM = 125
"""As the signal in a `DerivedExitCode`, Slurm's mark of a step that ran out of memory."""
NO_OUTPUT_FILE = 53
"""As the signal in an `ExitCode`: the node could not open a file of the job."""


@dataclass(frozen=True)
class ScontrolJob:
    """One line of `scontrol show job -d -o`: a job, or one component of a heterogeneous job."""

    id: str
    name: str
    state: str
    reason: str
    time_limit: str
    partition: str
    exit: tuple[int, int]
    """Code and signal of the batch script."""
    derived: tuple[int, int]
    """The highest of its steps."""
    tasks: int
    """0: not said."""
    cpus: Mapping[str, int]
    """By node, in Slurm's order: how many the job has there (0: not said). Empty before it runs."""


def jobs(text: str) -> list[ScontrolJob]:
    """Read what `scontrol show job -d -o ID` prints: the components of a job in their order."""
    return [_job(line) for line in text.splitlines() if line.startswith("JobId=")]


def _job(line: str) -> ScontrolJob:
    def value(name: str) -> str:
        found = re.search(rf"(?:^|\s){re.escape(name)}=(\S*)", line)
        return "" if found is None or found[1] in ("(null)", "Unknown", "N/A", "None") else found[1]

    cpus: dict[str, int] = {}
    for nodes, ids in re.findall(r"\sNodes=(\S+) CPU_IDs=(\S*)", line):
        cpus.update(dict.fromkeys(expand(nodes), _count(ids)))
    state = value("JobState")
    if not cpus and value("NodeList") and state not in PENDING:
        cpus = dict.fromkeys(expand(value("NodeList")), 0)
    tasks = value("NumTasks")
    return ScontrolJob(
        id=value("JobId"),
        name=value("JobName"),
        state=state,
        reason=value("Reason"),
        time_limit=value("TimeLimit"),
        partition=value("Partition"),
        exit=_pair(value("ExitCode")),
        derived=_pair(value("DerivedExitCode")),
        tasks=int(tasks) if tasks.isdigit() else 0,
        cpus=cpus,
    )


def _pair(text: str) -> tuple[int, int]:
    code, _, number = text.partition(":")
    return (int(code) if code.isdigit() else 0, int(number) if number.isdigit() else 0)


def _count(ids: str) -> int:
    """Return how many numbers `0-1,4` names."""
    ranges = [each.partition("-") for each in ids.split(",") if each]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)


class Component(NamedTuple):
    """What was asked for at once: the tasks of one role, or of all roles if they need the same."""

    roles: Sequence[tuple[str, int]]
    """Names, and how many tasks of each."""
    needs: Needs = Needs()
    """Of each task."""
    most: int = 0
    """Tasks on one node, the same on each: known where they need GPUs; 0: as many as there are processors for."""

    @property
    def tasks(self) -> int:
        """All of them."""
        return sum(count for _, count in self.roles)

    @property
    def gpus(self) -> int:
        """Of each node."""
        return self.most * self.needs.gpus


def grants(found: Sequence[ScontrolJob], components: Sequence[Component], is_ours: bool) -> tuple[Grant, ...]:
    """Return the places of a job that runs: one on each node of each component.

    A place is called by its node, as the process knows it (`place_variable`). Components may share a node: where there
    are several, a place is called by the number that srun gives its process, counted through all components.

    Args:
        found: the components as Slurm has them.
        components: as they were asked for.
        is_ours: the allocation was made for this job; in another one, tasks that asked for no cores go anywhere.
    """
    made: list[Grant] = []
    apart = len(components) > 1 and len(components) == len(found)
    counts_cores = is_ours or any(each.needs.cores for each in components)
    for number, job in enumerate(found):
        most = components[0].most * max(1, components[0].needs.cores) if is_ours and len(components) == 1 else 0
        for node, cpus in job.cpus.items():
            cores = (min(cpus, most) if most else cpus) if counts_cores else 0
            name = node if len(found) == 1 else str(len(made))
            takes = _room(components[number], cpus if counts_cores else 0) if apart else {}
            made.append(Grant(name, node, takes, cores))
    return tuple(made)


def crowded(found: Sequence[ScontrolJob], groups: Sequence[RoleGroup]) -> str:
    """Return what is said of tasks that are more than the processors of the allocation they go to; empty: nothing."""
    cpus = sum(count for job in found for count in job.cpus.values())
    wanted = sum(group.count * max(1, group.needs.cores) for group in groups)
    if not cpus or wanted <= cpus:
        return ""
    tasks = " + ".join(f"{group.count} {group.role}" for group in groups)
    return (
        f"Slurm's job {found[0].id} has {cpus} processors, and {tasks} want {wanted}: they share them"
        " (allocate more with salloc -n, or pass --oversubscribe if that is meant)"
    )


def place_variable(components: int) -> str:
    """Return the variable in which Slurm tells an agent the name of its place."""
    return "SLURMD_NODENAME" if components == 1 else "SLURM_PROCID"


def _room(component: Component, cpus: int) -> dict[str, int]:
    """Return how many tasks of the one role of a component a node with so many processors takes (0: not said)."""
    [(role, count)] = component.roles
    room = cpus // max(1, component.needs.cores) if cpus else count
    return {role: min(room, component.most) if component.most else room}


def standing(found: Sequence[ScontrolJob], places: Sequence[Grant], position: str = "") -> QueueStatus:
    """Return how a job stands.

    Args:
        found: its components; none: Slurm does not know it any more.
        places: its grants, if it runs.
        position: `position 3`, of one that waits; empty: not known.
    """
    if not found:
        return QueueStatus(ENDED, "Slurm does not know the job any more")
    if any(job.state in PENDING for job in found):
        return QueueStatus(QUEUED, _waits(found[0], position))
    if all(job.state in OVER for job in found):
        return QueueStatus(ENDED, _how_ended(_worst(found)))
    if any(job.state in ENDING or job.state in OVER for job in found):
        gone = dict.fromkeys([each.place for each in places], "Slurm ends the job")
        return QueueStatus(RUNNING, "Slurm ends its processes", tuple(places), gone)
    text = "suspended" if any(job.state == "SUSPENDED" for job in found) else ""
    return QueueStatus(RUNNING, text, tuple(places))


def _waits(job: ScontrolJob, position: str) -> str:
    where = f" in {job.partition}" if job.partition else ""
    if job.state == "CONFIGURING":
        return "its nodes are booting"
    if job.reason in HOPELESS:
        return f"it cannot start as it is: {job.reason}{where}; scontrol show job {job.id} says more"
    if job.reason == "JobHeldUser":
        return f"held; to release it: scontrol release {job.id}"
    because = f" ({job.reason})" if job.reason else ""
    # Not when Slurm expects it to start: that changes every few seconds, and each change would be told.
    return f"{position or 'waits'}{where}{because}"


def _how_ended(job: ScontrolJob) -> str:
    reason = f" ({job.reason})" if job.reason and job.reason != "NonZeroExitCode" else ""
    code = f", exit code {job.exit[0]}" if job.state == "FAILED" and job.exit[0] else ""
    return f"{job.state}{reason}{code}"


def _worst(found: Sequence[ScontrolJob]) -> ScontrolJob:
    """Return the component that says most of how the job ended."""
    order = ("NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "TIMEOUT", "DEADLINE", "BOOT_FAIL", "CANCELLED", "FAILED")
    ranked = sorted(found, key=lambda job: order.index(job.state) if job.state in order else len(order))
    return next((job for job in ranked if job.derived[1] == OOM), ranked[0])


def position(text: str, job: str) -> str:
    """Return `position 3`, given the numbers of the jobs that wait, the next one first (`squeue --sort=-p,i -o %i`)."""
    waiting = list(dict.fromkeys(re.sub(r"[+_].*", "", line.strip()) for line in text.splitlines() if line.strip()))
    return f"position {waiting.index(job) + 1}" if job in waiting else ""


def is_ending(found: Sequence[ScontrolJob]) -> bool:
    """Return whether it is about to be known how a job ended."""
    return any(job.state in ENDING for job in found)


def explanation(found: Sequence[ScontrolJob], accounts: str = "") -> Explanation | None:
    """Return why Slurm ended a job; None if it did not: it runs, or its script ended by itself.

    Args:
        found: its components.
        accounts: what `sacct -n -P -o JobID,State,ExitCode,MaxRSS,ReqMem` prints; empty: there is no accounting.
    """
    over = [job for job in found if job.state in OVER]
    if not over:
        return None
    job = _worst(over)
    if job.state == "OUT_OF_MEMORY" or job.derived[1] == OOM or "OUT_OF_MEMORY" in accounts:
        return Explanation(137, f"Slurm: out of memory{_memory(accounts)}; raise --worker-memory or --server-memory")
    if job.state in ("TIMEOUT", "DEADLINE"):
        limit = f"the time limit of {job.time_limit}" if job.state == "TIMEOUT" and job.time_limit else "its time limit"
        return Explanation(facts.EXIT_TIMEOUT, f"Slurm: the job reached {limit}; raise --time")
    if job.state == "PREEMPTED":
        return Explanation(facts.EXIT_HOST_LOST, "Slurm: preempted by a job of higher priority")
    if has_lost_node([job]):
        return Explanation(facts.EXIT_HOST_LOST, f"Slurm: a node failed ({job.state})")
    if job.state in ("CANCELLED", "REVOKED"):
        by = re.search(r"CANCELLED by (\w+)", accounts)
        return Explanation(143, f"Slurm: cancelled from outside{(f' by user {by[1]}' if by else ' (scancel)')}")
    if job.state == "FAILED" and job.exit[1] == NO_OUTPUT_FILE:
        return Explanation(facts.EXIT_START_FAILED, "Slurm: the node could not open a file of the job (signal 53)")
    return None


def has_lost_node(found: Sequence[ScontrolJob]) -> bool:
    """Return whether a component has ended because a node of it failed."""
    return any(job.state in ("NODE_FAIL", "BOOT_FAIL") for job in found)


def _memory(accounts: str) -> str:
    """Return ` (MaxRSS 78352K, asked for 100M)`, as far as it was accounted."""
    rows = [line.split("|") for line in accounts.splitlines() if line.count("|") >= 4]
    used = next((row[3] for row in rows if row[1].startswith("OUT_OF_MEMORY") and row[3]), "")
    asked = next((row[4] for row in rows if row[4]), "")
    parts = ([f"MaxRSS {used}"] if used else []) + ([f"the job asked for {asked}"] if asked else [])
    return f" ({', '.join(parts)})" if parts else ""


SRUN = re.compile(r"srun: error: (?P<nodes>[^:\s]+): tasks? (?P<tasks>[\d,-]+): (?P<what>.+)")


def told_by_srun(log: str) -> dict[str, str]:
    """Return what srun said, by node and by the process's number: `Killed`, `Out Of Memory`, `Exited with ...`."""
    told: dict[str, str] = {}
    for match in SRUN.finditer(log):
        told.update(dict.fromkeys(expand(match["nodes"]), match["what"].strip()))
        for first, _, last in (each.partition("-") for each in match["tasks"].split(",")):
            told.update((str(number), match["what"].strip()) for number in range(int(first), int(last or first) + 1))
    return told


def explained_by_srun(what: str) -> Explanation | None:
    """Return what srun's words of a place mean."""
    if "Out Of Memory" in what:
        return Explanation(137, "Slurm: out of memory on that node; raise --worker-memory or --server-memory")
    if what.startswith("Killed"):
        return Explanation(137, "Slurm: the agent was killed (SIGKILL; often: out of memory)")
    return None


def node_states(text: str) -> dict[str, str]:
    """Return the states of nodes, as `sinfo -h -N -o '%N %T'` prints them."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def down_nodes(states: Mapping[str, str]) -> dict[str, str]:
    """Return the nodes that are down, with their state. One that does not answer (`allocated*`) may be busy."""
    return {node: state for node, state in states.items() if re.match(r"(down|fail|powering_down|unknown)", state)}


def ended_but_for_lost(standing: QueueStatus, states: Mapping[str, str]) -> QueueStatus:
    """Return how a job stands that Slurm ends: ENDED if the nodes that still have it do not answer.

    It stays so until Slurm gives up these nodes, often for five minutes.
    """
    lost = [node for node, state in states.items() if state.endswith("*")]
    if not lost or any(state == "completing" for state in states.values()):
        return standing
    return QueueStatus(ENDED, f"it has ended but for {', '.join(lost)}, which does not answer")


def marked(queue: str, steps: str) -> dict[str, tuple[str, str]]:
    """Return this user's jobs whose marker is distrun's: {number: (marker, state)}.

    Args:
        queue: `squeue -h -o '%i|%j|%T'`.
        steps: `squeue -h --steps -o '%i|%j'`: agents that were started in an allocation of the user's. Their number is
            `JOB.STEP`.
    """
    found: dict[str, tuple[str, str]] = {}
    for line in queue.splitlines():
        number, name, state = [*line.split("|"), "", ""][:3]
        if name.startswith(MARK):
            found.setdefault(re.sub(r"\+.*", "", number), (name, state))
    for line in steps.splitlines():
        number, _, name = line.partition("|")
        job = re.sub(r"[+.].*", "", number)
        if name.startswith(MARK) and job not in found:
            found[number] = (name, "RUNNING")
    return found


@dataclass(frozen=True)
class Partition:
    """One line of `sinfo -h -e -o '%R|%l|%c|%m|%G|%D|%a'`: nodes of a partition that are alike."""

    name: str
    time_s: float | None
    """None: no limit."""
    room: Needs
    """What each node has in all."""
    nodes: int
    is_up: bool


def partitions(text: str) -> list[Partition]:
    """Read what sinfo prints of the partitions."""
    found = []
    for line in text.splitlines():
        row = line.split("|")
        if len(row) == 7:
            cpus, memory = (int(re.match(r"\d*", each)[0] or 0) for each in row[2:4])  # type: ignore[index]
            nodes = int(row[5]) if row[5].isdigit() else 0
            room = Needs(cpus, memory * MIB, _gpus(row[4]))
            found.append(Partition(row[0], _seconds(row[1]), room, nodes, row[6].startswith("up")))
    return found


def of_queue(found: Iterable[Partition], queue: str) -> list[Partition]:
    """Return the partitions that the user named, separated by commas; all, if none."""
    return [each for each in found if not queue or each.name in queue.split(",")]


def _seconds(text: str) -> float | None:
    """Return the seconds of `2-12:30:00`, `5:00`; None: infinite."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(each or 0) for each in match.groups())
    return ((days * 24.0 + hours) * 60 + minutes) * 60 + seconds


def _gpus(text: str) -> int:
    """Return the GPUs of `gpu:a100:4(S:0-1),nic:2`."""
    return sum(int(number) for number in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", text))


def refuse_partition(found: Sequence[Partition], queue: str, time_s: float | None) -> None:
    """Check that there are such partitions, and that one takes a job of such a time limit.

    Raises:
        UsageError: there is none.
    """
    for name in filter(None, queue.split(",")) if found else ():
        check_known("--queue", "Slurm has no partition", name, list(dict.fromkeys(each.name for each in found)))
    limits = [each.time_s for each in of_queue(found, queue)] if queue else []
    if time_s is not None and limits and all(limit is not None and limit < time_s for limit in limits):
        most = max(limit for limit in limits if limit is not None)
        text = f"--time {duration(time_s)}: jobs in {queue} may run for {duration(most)} at most"
        raise UsageError(text, "sinfo -s shows the partitions")
