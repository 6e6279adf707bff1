"""Reads the JSON that kubectl prints of a job's objects, and decides how the job stands and why it ended.

A job of distrun is one Indexed Job of Kubernetes for each role (`kubernetes.py`), whose pods are the places: pod 3 of
the workers' Job is `worker-3`. A JobSet that has these Jobs is only listed. The fields and reasons are those of the
API reference of Kubernetes 1.34 (Job v1 batch, Pod v1, Event v1), and of
https://kubernetes.io/docs/concepts/workloads/pods/disruptions/ for DisruptionTarget. No side effects.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distrun.backends.engine import ENDED, QUEUED, RUNNING, Explanation, Grant, QueueStatus, one_line
from distrun.request import Needs
from distrun_runtime.contract import facts

JOB_LABEL, ROLE_LABEL, USER_LABEL = "distrun/job", "distrun/role", "distrun/user"
"""Labels: the job's marker, of all its objects; the role and the user, of a Job and its pods."""
HOST_NOTE = "distrun/host"
"""Annotation of a Job or JobSet: the machine on which it was launched."""
INDEX = "batch.kubernetes.io/job-completion-index"
"""Annotation that the Job controller gives each pod."""

NEVER_STARTS = frozenset(["ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"])
"""Reasons for which a container waits that do not pass by themselves: its image cannot be had."""
PULL, REFUSED = "ErrImagePull", re.compile("not found|denied|unauthorized", re.IGNORECASE)
"""Reason for which a container waits after one attempt to pull its image, and what its message has if that is final."""
NOT_STARTED = frozenset(["StartError", "ContainerCannotRun"])
"""Reasons for which a container has ended without having run."""
NO_PROGRAM = "executable file not found"
"""What the message has if a container waits because the image lacks its program (CRI-O)."""
AGENT = "agent"
"""Name of the container; others may be added by the cluster."""
PREEMPTION, PREEMPTED = "PreemptionByScheduler", "Preempted"
"""What the scheduler calls it that a pod has to go: in the pod's condition DisruptionTarget, and in an event."""
DISRUPTED = {
    PREEMPTION: "preempted by a pod of higher priority",
    "EvictionByEvictionAPI": "evicted, as when its node is drained",
    "DeletionByTaintManager": "its node {node} is lost, or was tainted",
    "DeletionByPodGC": "its node {node} is gone",
    "TerminationByKubelet": "ended by its node {node}, which shuts down or runs short",
}
"""What the reasons of the condition DisruptionTarget mean."""
LOSES_NODE = frozenset(["DeletionByTaintManager", "DeletionByPodGC"])
NODE_REASONS = frozenset(
    ["NodeLost", "NodeShutdown", "Terminated", "NodeAffinity", "Preempting", "UnexpectedAdmissionError"]
)
"""A pod's own reasons that its node is the cause."""
UNSCHEDULED_LENGTH = 200
DEADLINE = "DeadlineExceeded"
"""A Job's reason that it reached `activeDeadlineSeconds`."""
FORGOTTEN = Explanation(
    facts.EXIT_HOST_LOST,
    "distrun launch did not renew the job's lease for 5 minutes, for example because this machine slept; launch again",
)
"""Why a Job has ended before the agents were connected."""
TIME_LIMIT = Explanation(facts.EXIT_TIMEOUT, "Kubernetes: the job reached its time limit; raise --time")


class Reason(NamedTuple):
    """Why something is as it is, in the API's word and in its sentence."""

    word: str = ""
    text: str = ""

    @staticmethod
    def of(value: Mapping[str, Any] | None) -> Reason:
        """Return `reason` and `message` of an object."""
        value = value or {}
        return Reason(value.get("reason") or "", one_line(value.get("message") or ""))

    def __str__(self) -> str:
        return ": ".join(filter(None, self))


@dataclass(frozen=True)
class Pod:
    """One pod of the job."""

    name: str
    role: str
    place: str
    """`worker-3`: what the agent there claims."""
    node: str
    """Empty: it has none yet."""
    phase: str
    """Pending, Running, Succeeded or Failed."""
    why: Reason
    """Of the pod itself, such as Evicted."""
    conditions: Mapping[str, Mapping[str, Any]]
    """By type."""
    waits: Reason
    """Why its container does not run."""
    ended: Reason
    """How its container has ended."""
    code: int | None
    """The container's exit code."""
    is_deleted: bool
    """It is to go, and may still end its processes."""

    @staticmethod
    def of(value: Mapping[str, Any]) -> Pod:
        """Return what kubectl prints of a pod."""
        about, status = value["metadata"], value.get("status", {})
        role = about["labels"][ROLE_LABEL]
        states = {each["name"]: each.get("state", {}) for each in status.get("containerStatuses") or ()}
        state: Mapping[str, Any] = states.get(AGENT, {})
        ended = state.get("terminated") or {}
        return Pod(
            name=about["name"],
            role=role,
            place=f"{role}-{about['annotations'][INDEX]}",
            node=value["spec"].get("nodeName", ""),
            phase=status.get("phase", "Pending"),
            why=Reason.of(status),
            conditions={each["type"]: each for each in status.get("conditions") or ()},
            waits=Reason.of(state.get("waiting")),
            ended=Reason.of(ended),
            code=ended.get("exitCode"),
            is_deleted="deletionTimestamp" in about,
        )

    @property
    def is_over(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def may_be_lost(self) -> bool:
        """Whether its node may have gone: it counts as not ready though its container has not ended."""
        is_ready = self.conditions.get("Ready", {}).get("status", "True")
        return self.phase == "Running" and self.code is None and is_ready != "True"

    def pending(self) -> str:
        """Return why it does not run yet."""
        told = self.conditions.get("PodScheduled", {})
        if told.get("status") == "False":
            return one_line(told.get("message") or told.get("reason") or "not scheduled", UNSCHEDULED_LENGTH)
        return f"{self.waits if self.waits.word else 'starts'} on {self.node}" if self.node else "not scheduled yet"

    def explanation(self) -> Explanation | None:
        """Return why Kubernetes ended it, or cannot start it; None: it does not say."""
        disrupted = self.conditions.get("DisruptionTarget", {})
        by = disrupted.get("reason", "") if disrupted.get("status") == "True" else ""
        if self.ended.word == "OOMKilled":
            return Explanation(137, f"Kubernetes: out of memory (OOMKilled); raise --{self.role}-memory")
        if self.why.word == "Evicted":
            return Explanation(facts.EXIT_HOST_LOST, f"Kubernetes: evicted: {self.why.text}")
        if by in DISRUPTED:
            text = f"Kubernetes: {DISRUPTED[by].format(node=self.node)} ({by})"
            return Explanation(facts.EXIT_HOST_LOST, text, self.node if by in LOSES_NODE else "")
        if self.why.word in NODE_REASONS:
            return Explanation(facts.EXIT_HOST_LOST, f"Kubernetes: {self.why}")
        is_refused = self.waits.word == PULL and REFUSED.search(self.waits.text) is not None
        if is_refused or self.waits.word in NEVER_STARTS:
            text = f"Kubernetes: the image cannot be pulled on {self.node}: {self.waits}"
            return Explanation(facts.EXIT_START_FAILED, f"{text}; see --image and --image-pull-secret")
        if self.ended.word in NOT_STARTED or NO_PROGRAM in self.waits.text:
            why = self.ended if self.ended.word else self.waits
            text = f"Kubernetes: the container cannot start: {why}; the image must have python3 (3.8 or newer)"
            return Explanation(facts.EXIT_START_FAILED, text)
        if self.code == facts.EXIT_START_FAILED and self.ended.text:
            return Explanation(facts.EXIT_START_FAILED, f"Kubernetes: the agent did not start: {self.ended.text}")
        return None


@dataclass(frozen=True)
class RoleJob:
    """The Job of one role."""

    name: str
    uid: str
    role: str
    wanted: int
    """How many pods it is to have."""
    failed: Reason
    """Why it has failed."""
    failed_place: str
    """The first of its places whose pod has failed or has gone. It gets no other pod. Empty: none has."""
    is_over: bool
    is_deleted: bool

    @staticmethod
    def of(value: Mapping[str, Any]) -> RoleJob:
        """Return what kubectl prints of a Job."""
        about, status = value["metadata"], value.get("status", {})
        true = {each["type"]: each for each in status.get("conditions") or () if each["status"] == "True"}
        failed = re.match(r"\d+", status.get("failedIndexes") or "")
        return RoleJob(
            name=about["name"],
            uid=about["uid"],
            role=about["labels"][ROLE_LABEL],
            wanted=value["spec"]["completions"],
            failed=Reason.of(true.get("Failed") or true.get("FailureTarget")),
            failed_place=f"{about['labels'][ROLE_LABEL]}-{failed[0]}" if failed else "",
            is_over="Complete" in true or "Failed" in true,
            is_deleted="deletionTimestamp" in about,
        )


class OwnJob(NamedTuple):
    """A Job or JobSet among those of a user."""

    marker: str
    namespace: str
    host: str
    """Where it was launched."""
    is_over: bool
    is_of_jobset: bool


def listed(text: str) -> list[OwnJob]:
    """Read `kubectl get jobs --output=json`, or that of JobSets."""
    found = []
    for each in json.loads(text)["items"]:
        about, conditions = each["metadata"], each.get("status", {}).get("conditions") or ()
        true = {each["type"] for each in conditions if each["status"] == "True"}
        host = (about.get("annotations") or {}).get(HOST_NOTE, "?")
        is_over = bool(true & {"Complete", "Completed", "Failed"})
        is_of_jobset = any(owner["kind"] == "JobSet" for owner in about.get("ownerReferences") or ())
        found.append(OwnJob(about["labels"][JOB_LABEL], about["namespace"], host, is_over, is_of_jobset))
    return found


class Objects(NamedTuple):
    """What the cluster has of a job."""

    jobs: Sequence[RoleJob]
    pods: Sequence[Pod]

    @staticmethod
    def of(text: str) -> Objects:
        """Read `kubectl get jobs,pods --output=json`."""
        found = json.loads(text)["items"]
        jobs = [RoleJob.of(each) for each in found if each["kind"] == "Job"]
        # Without an index it is no pod of ours, whatever its labels.
        pods = [each for each in found if each["kind"] == "Pod" and INDEX in each["metadata"].get("annotations", {})]
        return Objects(jobs, [Pod.of(each) for each in pods])

    def then(self, later: Objects) -> Objects:
        """Return all objects as they were last seen, also those that have gone since, or were made again."""
        jobs = {job.uid: job for job in (*self.jobs, *later.jobs)}
        pods = {pod.name: pod for pod in (*self.pods, *later.pods)}
        return Objects(list(jobs.values()), list(pods.values()))

    def preempted(self, text: str) -> Objects:
        """Return all objects; pods that are in events of that, as kubectl prints them, say that they were preempted."""
        names = {each["involvedObject"].get("name") for each in json.loads(text)["items"]}
        told = {"DisruptionTarget": {"status": "True", "reason": PREEMPTION}}
        pods = [dataclasses.replace(pod, conditions=told) for pod in self.pods if pod.name in names]
        return self.then(Objects((), pods))


def standing(found: Objects, seen: Objects, has_run: bool = False, limit: Explanation = FORGOTTEN) -> QueueStatus:
    """Return how a job stands.

    Args:
        found: its objects.
        seen: all objects as they were last seen, `found` included.
        has_run: all its pods have run at once. Before that, a pod that has ended or gone ends the job: its place gets
            no other one.
        limit: what the Jobs' deadline means.
    """
    places = [f"{job.role}-{index}" for job in seen.jobs for index in range(job.wanted)]
    there = {pod.place for pod in found.pods}
    gone = {pod.place: str(pod.ended) or str(pod.why) or "its pod has ended" for pod in found.pods if pod.is_over}
    whole = explanation(found, seen, "", limit)
    if all(job.is_over for job in found.jobs):
        text = "; ".join(filter(None, (str(job.failed) for job in found.jobs)))
        return QueueStatus(ENDED, text or (whole.text if whole else ""), why=whole)
    if has_run:
        gone.update(dict.fromkeys((place for place in places if place not in there), "its pod was deleted"))
    else:
        failed = [pod.place for pod in found.pods if pod.explanation()]
        failed += [*gone, *(job.failed_place for job in found.jobs if job.failed_place)]
        if whole or failed:
            place = failed[0] if failed else ""
            why = explanation(found, seen, place, limit)
            text = why.text if why else gone.get(place, "its pod has gone")
            return QueueStatus(ENDED, f"{place}: {text}" if place else text, why=why)
    up = [pod for pod in found.pods if pod.phase == "Running" and not pod.is_deleted]
    if has_run or {pod.place for pod in up} == set(places):
        return QueueStatus(RUNNING, "", tuple(Grant(pod.place, pod.node, {pod.role: 1}) for pod in found.pods), gone)
    first = next((f"; {pod.place}: {pod.pending()}" for pod in found.pods if pod.phase == "Pending"), "")
    return QueueStatus(QUEUED, f"{len(up)} of {len(places)} pods run{first}")


def stuck(found: Objects) -> str:
    """Return the object whose events say why the job waits: a Job that lacks pods, or a pod that is slow to start."""
    for job in found.jobs:
        if sum(pod.role == job.role for pod in found.pods) < job.wanted:
            return job.name
    return next((pod.name for pod in found.pods if pod.phase == "Pending" and pod.node), "")


def warned(text: str) -> Reason:
    """Return the latest of the warnings that `kubectl get events --output=json` prints."""
    found = json.loads(text)["items"]
    found = [each for each in found if each.get("type") == "Warning"]
    return Reason.of(
        max(found, key=lambda each: each.get("lastTimestamp") or each.get("eventTime") or "", default=None)
    )


def refusal(warning: Reason) -> str:
    """Return why the cluster never lets the Job have its pods; empty: it may yet, or they are only late."""
    text = warning.text
    if warning.word != "FailedCreate" or "forbidden" not in text or "service account" in text:
        return ""
    return text[text.find("forbidden: ") + len("forbidden: ") :] if "forbidden: " in text else text


def explanation(found: Objects, seen: Objects, place: str, limit: Explanation = FORGOTTEN) -> Explanation | None:
    """Return why Kubernetes ended a place, or the job (`place` empty), as far as its objects say it.

    The other arguments are those of `standing`.
    """
    for pod in seen.pods:
        told = pod.explanation() if place in ("", pod.place) else None
        if told is not None:
            return told
    if any(job.failed.word == DEADLINE for job in seen.jobs):
        return limit
    left = {job.role: job.failed.word for job in found.jobs if not job.is_deleted}
    if not left or len(left) < len(seen.jobs):
        failed = [role for role, word in left.items() if word]
        if not failed:
            return Explanation(facts.EXIT_TERMINATED, "Kubernetes: the Job was deleted by someone else")
        if place and place.rpartition("-")[0] not in left:  # by the JobSet, because another of its Jobs has failed
            for first in sorted(seen.pods, key=lambda pod: pod.explanation() is None):  # those that say why first
                if first.role in failed and first.phase == "Failed":
                    why = Explanation(facts.EXIT_HOST_LOST, f"Kubernetes: its pod has failed: {first.ended}")
                    return (first.explanation() or why)._replace(lost=first.node)
            return None
    mine = [pod for pod in found.pods if pod.place == place]
    if place and (not mine or mine[0].is_deleted):
        text = "Kubernetes: its pod was deleted by someone else (kubectl delete pod, or a drain of its node)"
        return Explanation(facts.EXIT_TERMINATED, text)
    return None


def lost_node(text: str) -> str:
    """Return why a node is lost, from `kubectl get node NAME --output=json`; empty: it is not."""
    conditions = json.loads(text)["status"].get("conditions", ())
    ready: Mapping[str, Any] = {each["type"]: each for each in conditions}.get("Ready", {})
    return "" if ready.get("status") == "True" else str(Reason.of(ready)) or "not ready"


UNITS = {
    **{"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12},
    **{"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40},
}
"""Suffixes of the API's quantities: the decimal ones, and those of powers of two."""


def quantity(text: str) -> int:
    """Return a quantity of the API, such as `3920m` or `16Gi`, as a whole number, rounded down; 0: it is none."""
    number = text.rstrip("kKMGTim")
    try:
        return int(float(number) * UNITS[text[len(number) :]])
    except (ValueError, KeyError):
        return 0


def room(text: str, gpu: str) -> list[Needs]:
    """Return what each node that may get pods has in all, from `kubectl get nodes --output=json`."""
    nodes = [each for each in json.loads(text)["items"] if not each["spec"].get("unschedulable")]
    rows = (each["status"].get("allocatable", {}) for each in nodes)
    return [Needs(*(quantity(row.get(name, "0")) for name in ("cpu", "memory", gpu))) for row in rows]
