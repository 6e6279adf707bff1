"""What YARN reports of its nodes and queues and of one job, as values and as words for the user. No side effects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from distrun.backends.engine import MIB, EngineError, Explanation, check_known, check_size
from distrun.errors import UsageError
from distrun.request import Needs
from distrun_runtime.contract import facts

if TYPE_CHECKING:
    from distrun.backends.engine import RoleGroup


GPU = "yarn.io/gpu"
WAITING = ("NEW", "NEW_SAVING", "SUBMITTED", "ACCEPTED")
OVER = ("FINISHED", "FAILED", "KILLED")
LIVE = ",".join((*WAITING, "RUNNING"))
"""States of an application."""
GONE = ("LOST", "DECOMMISSIONED", "UNHEALTHY", "SHUTDOWN", "REBOOTED")
"""States of a node on which nothing runs any more."""

# What a cluster can do


class Node(NamedTuple):
    """A node of the cluster, as the ResourceManager knows it."""

    name: str
    state: str
    room: Needs
    """What it has in all."""


def nodes_of(said: Mapping[str, Any]) -> tuple[Node, ...]:
    """Return the nodes that `/ws/v1/cluster/nodes` lists."""
    found = []
    for each in listed(said.get("nodes"), "node"):
        total = each.get("totalResource") or {}
        memory = total.get("memory") or each.get("usedMemoryMB", 0) + each.get("availMemoryMB", 0)
        cores = total.get("vCores") or each.get("usedVirtualCores", 0) + each.get("availableVirtualCores", 0)
        room = Needs(int(cores), int(memory) * MIB, amount(total, GPU))
        found.append(Node(str(each.get("nodeHostName", "")), str(each.get("state", "")), room))
    return tuple(found)


def amount(resource: Mapping[str, Any], name: str) -> int:
    """Return how much of a resource, `yarn.io/gpu`, there is."""
    rows = listed(resource.get("resourceInformations"), "resourceInformation")
    return next((int(each.get("value", 0)) for each in rows if each.get("name") == name), 0)


def refuse_too_big(groups: Sequence[RoleGroup], nodes: Sequence[Node]) -> None:
    """Raise UsageError if a task asks for more than any node that is up has: YARN would let some wait for ever."""
    up = [each.room for each in nodes if each.state == "RUNNING"]
    if not up:
        raise EngineError("YARN has no node that is up", "ask for its nodes: yarn node -list -all")
    check_size(groups, up, "node of YARN's", "ask for less; yarn node -list -all -showDetails shows the nodes")


class YarnQueue(NamedTuple):
    """A queue that takes jobs."""

    name: str
    path: str
    full: float | None
    """Per cent of what it may use that is used; None: the scheduler does not say."""
    pending: int = 0
    """Applications that wait in it."""
    state: str = "RUNNING"


def queues_of(said: Mapping[str, Any]) -> tuple[YarnQueue, ...]:
    """Return the leaf queues that `/ws/v1/cluster/scheduler` lists: of the capacity, fair or fifo scheduler."""
    info = (said.get("scheduler") or {}).get("schedulerInfo") or {}
    root = info.get("rootQueue") or info
    return tuple(_leaves(root, str(root.get("queueName", "root"))))


def _leaves(queue: Mapping[str, Any], path: str) -> Iterator[YarnQueue]:
    """Yield the leaves of a queue. The fair scheduler names a queue by its path, and says otherwise what it uses."""
    below = listed(queue.get("queues"), "queue") or listed(queue.get("childQueues"), "queue")
    for each in below:
        name = str(each.get("queueName", ""))
        yield from _leaves(each, str(each.get("queuePath") or (name if "." in name else f"{path}.{name}")))
    if not below and "queueName" in queue:
        most, used = queue.get("absoluteMaxCapacity"), queue.get("absoluteUsedCapacity")
        if "absoluteMaxCapacity" not in queue:  # the fair scheduler; the other's `usedResources` may be a text
            most, used = ((queue.get(name) or {}).get("memory") for name in ("maxResources", "usedResources"))
        full = 100.0 * used / most if most and used is not None else None
        pending = int(queue.get("numPendingApplications") or queue.get("numPendingApps") or 0)
        name = str(queue["queueName"]).rpartition(".")[2]
        yield YarnQueue(name, path, full, pending, str(queue.get("state", "RUNNING")))


def queue_named(queues: Iterable[YarnQueue], name: str) -> YarnQueue | None:
    """Return the queue of a name or path."""
    return next((each for each in queues if name in (each.name, each.path)), None)


def refuse_queue(name: str, queues: Sequence[YarnQueue]) -> None:
    """Raise UsageError if the scheduler has no such queue, or it takes no jobs."""
    if not queues:
        return  # a scheduler that we do not know
    wanted = name or "default"
    found = queue_named(queues, wanted)
    if found is None:
        check_known("--queue", "YARN has no queue", wanted, [each.name for each in queues])
    elif found.state != "RUNNING":
        raise UsageError(f"--queue {wanted}: it is {found.state.lower()} and takes no jobs", "say another --queue")


def refuse_label(label: str, said: Mapping[str, Any]) -> None:
    """Raise UsageError if the cluster has no such node label."""
    rows = listed(said, "nodeLabelInfo") or listed(said, "nodeLabelsInfo") or listed(said, "nodeLabels")
    known = [str(each.get("name", "")) if isinstance(each, dict) else str(each) for each in rows]
    check_known("--node-label", "YARN has no node label", label, known)


def listed(value: Any, name: str) -> list[Any]:
    """Return the list `name` of an answer: Hadoop gives null for none and an object for one."""
    found = (value or {}).get(name) if isinstance(value, dict) else None
    return found if isinstance(found, list) else [] if found is None else [found]


# How a job stands


class Container(NamedTuple):
    """A container of the job."""

    id: str
    place: str
    role: str
    node: str
    state: str
    is_localized: bool
    """Whether its files are on its node."""

    @property
    def is_over(self) -> bool:
        """Whether its process has ended."""
        return self.state in ("FAILED", "SUCCEEDED", "STOPPED")


class Exit(NamedTuple):
    """How a container ended."""

    code: int
    """Below 0: YARN ended it; -100 its node is lost, -102 preempted, -103 and -104 too much memory."""
    text: str
    """What YARN says of it."""


_EXIT = re.compile(
    r"\[COMPINSTANCE (?P<place>\S+) : container_\S+\][^\n]*ContainerStatus: \[(?P<text>.*?)"
    r", ExitStatus: (?P<code>-?\d+)",
    re.DOTALL,
)


_SHELL_EXIT = re.compile(
    r"containerID=(?P<place>container_\S+), state=COMPLETE, exitStatus=(?P<code>-?\d+), diagnostics=(?P<text>[^\n]*)"
)


def exits_of(log: str) -> dict[str, Exit]:
    """Return how containers have ended, by place, from the log of the application master."""
    found = {}
    for match in _EXIT.finditer(log):
        text = match["text"].partition("Diagnostics:")[2]
        if "State: COMPLETE" in match["text"]:
            found[match["place"]] = Exit(int(match["code"]), text.strip())
    for match in _SHELL_EXIT.finditer(log):
        found[match["place"]] = Exit(int(match["code"]), match["text"].strip())
    return found


def told(exit: Exit | None) -> str:
    """Return `: exit code 6: what YARN says`, or nothing."""
    if exit is None:
        return ""
    errors = re.findall(r"of stderr\S* :\n(.*?)(?=\n\n|\Z)", exit.text, re.DOTALL)
    text = last_words("\n".join(each for each in errors[:1] if each.strip()) or exit.text)
    return (f": exit code {exit.code}" if exit.code >= 0 else "") + (f": {text}" if text else "")


def containers_of(service: Mapping[str, Any]) -> tuple[Container, ...]:
    """Return the containers of a service that have a node: servers first, each role by rank."""
    found = []
    for component in service.get("components") or ():
        made = []
        for each in component.get("containers") or ():
            place, node = str(each.get("component_instance_name", "")), str(each.get("bare_host") or "")
            if not place or not node:
                continue
            files = each.get("localization_statuses")
            is_localized = bool(files) and all(file.get("state") == "COMPLETED" for file in files)
            state = str(each.get("state", ""))
            made.append(Container(str(each["id"]), place, str(component["name"]), node, state, is_localized))
        found += sorted(made, key=lambda each: int(each.place.rpartition("-")[2]))
    return tuple(found)


def wanted_of(service: Mapping[str, Any]) -> int:
    """Return how many containers a service is to have; 0: it does not say yet."""
    return sum(int(each.get("number_of_containers") or 0) for each in service.get("components") or ())


def waiting(app: Mapping[str, Any], placed: int, wanted: int, queue: YarnQueue | None) -> str:
    """Return why a job waits: its state, what YARN says, what it still asks for and how full its queue is."""
    state = f"{placed} of {wanted} places" if wanted else str(app.get("state", ""))
    diagnostics = re.sub(r"^\[[^\]]*\]\s*", "", str(app.get("diagnostics") or "")).strip()
    reason = re.split(r"\s*Details\s*:|(?<=[.;]) ", diagnostics)[0].rstrip(" .;")
    asks = asked_for(app)
    parts = [f"{state}: {reason}" if reason else state, f"still asked for: {asks}" if asks else ""]
    if queue is not None and queue.full is not None:
        others = f", {queue.pending} jobs wait in it" if queue.pending > 1 else ""
        parts.append(f"queue {queue.name} is {queue.full:.0f} % full{others}")
    return "; ".join(part for part in parts if part)


def asked_for(app: Mapping[str, Any]) -> str:
    """Return what an application still asks for: `3 x 1000 MiB, 1 core`."""
    counted: dict[str, int] = {}
    for each in app.get("resourceRequests") or ():
        if each.get("resourceName") != "*" or not each.get("numContainers"):
            continue
        size = each.get("capability") or {}
        cores, gpus = int(size.get("vCores") or 0), amount(size, GPU)
        text = f"{size.get('memory', 0)} MiB, {cores} {'core' if cores == 1 else 'cores'}"
        text += f", {gpus} {'GPU' if gpus == 1 else 'GPUs'}" if gpus else ""
        counted[text] = counted.get(text, 0) + int(each["numContainers"])
    return " + ".join(f"{count} x {text}" for text, count in counted.items())


def ending(app: Mapping[str, Any]) -> str:
    """Return how an application ended, a few words."""
    text = last_words(str(app.get("diagnostics") or ""))
    state = str(app.get("finalStatus") if app.get("state") == "FINISHED" else app.get("state")).lower()
    return f"{state}: {text}" if text else state


def last_words(text: str) -> str:
    """Return the part of a diagnosis that says something: its first sentence without dates, at most 300 characters."""
    text = re.sub(r"\[\d{4}-[^\]]*\]", "", text)
    text = re.split(r"\nFor more detailed output|\nDump of the process-tree", text)[0]
    return re.sub(r"\s+", " ", text).strip()[:300]


def explained(exit: Exit | None, container: Container) -> Explanation | None:
    """Return why YARN ended a container; None: it did not end it, or has not said so."""
    if exit is None:
        return None
    if exit.code in (-103, -104):
        match = re.search(r"([\d.]+ [KMGT]?B) of ([\d.]+ [KMGT]?B) (physical|virtual) memory used", exit.text)
        used = f" ({match.group(1)} of {match.group(2)} {match.group(3)} memory)" if match else ""
        return Explanation(137, f"YARN: out of memory{used}; raise --{container.role}-memory")
    if exit.code == -102:
        return Explanation(facts.EXIT_HOST_LOST, f"YARN: the container on {container.node} was preempted")
    if exit.code == -100:
        return Explanation(facts.EXIT_HOST_LOST, f"YARN: the node {container.node} is lost")
    return None


def explained_application(app: Mapping[str, Any]) -> Explanation | None:
    """Return why YARN ended an application; None: it runs, or ended by itself."""
    text = str(app.get("diagnostics") or "")
    if app.get("state") not in ("KILLED", "FAILED"):
        return None
    if "lifetime" in text.lower():
        return Explanation(facts.EXIT_TIMEOUT, "YARN: the job's time is over (--time)")
    if app.get("state") == "KILLED":
        return Explanation(facts.EXIT_TERMINATED, f"YARN: the job was killed from outside: {last_words(text)}")
    node = str(app.get("amHostHttpAddress") or "").partition(":")[0]
    where = f" on {node}" if node else ""
    return Explanation(facts.EXIT_HOST_LOST, f"YARN: the job's application master{where} failed: {last_words(text)}")
