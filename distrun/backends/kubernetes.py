"""Kubernetes by kubectl: an Indexed Job for each role, whose pods are the places, with one task each.

Where the cluster has JobSets (https://jobset.sigs.k8s.io, v1alpha2) and this user may create one, the Jobs are those of
a JobSet, which its controller makes. Else this process creates them.

* What is submitted has nothing of the user's but what the options say of pods. The enrolment secret is a Secret that
  the Jobs own, so that it goes with them. Pods get no token of the API.
* Order matters, for this process may be killed at any time: Jobs without pods, then the Secret, then the Jobs' pods.
  A Job that is deleted, and made again by a JobSet, gets no pods.
* A Job has a deadline, the lease (`LEASE_S`), which this process renews while the job waits and begins. If it dies,
  Kubernetes ends the job. Once the agents are connected they see to that, and the deadline is the user's `--time`, or
  none.
* One pod that fails ends no other (`backoffLimitPerIndex`, Kubernetes 1.29): the coordinator ends them in order.

The Jobs in a JobSet's text cannot be changed, but those that its controller has made can: pods and deadlines are given
to Jobs in both cases. What kubectl prints is read by `kubernetes_answers`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distrun.backends import kubernetes_answers as answers
from distrun.backends.engine import (
    ANSWER_S,
    ENDED,
    MARK,
    MIB,
    QUEUED,
    RUNNING,
    CheckResult,
    Engine,
    EngineError,
    Explanation,
    FoundJob,
    Handle,
    Preparation,
    QueueStatus,
    Script,
    Submission,
    check_size,
    execute,
    hint_of,
    merged,
    refuse_queue_options,
    text_of,
    tries,
)
from distrun.backends.kubernetes_answers import HOST_NOTE, INDEX, JOB_LABEL, ROLE_LABEL, USER_LABEL, Objects
from distrun.errors import UsageError
from distrun.request import EngineOptions, Needs
from distrun_runtime.contract import facts, process

TEXT = "jobs.json"
"""Name of the Jobs' text in the folder of the submission."""
JOBS, JOBSETS = "jobs", "jobsets.jobset.x-k8s.io"
"""What kubectl calls the two kinds that a job can be."""
INDEX_VARIABLE, PLACE, SECRET = "DISTRUN_POD_INDEX", "DISTRUN_POD", "DISTRUN_ENROLMENT"
"""Variables of a pod: its index, its place made of that, and the secret, which the bootstrap takes out."""
NAME_LENGTH = 42
"""Length of a Job's name without `-worker`: names of a JobSet's pods (`NAME-worker-0-65535-abcde`) have at most 63
characters, which JobSet's webhook checks."""
GPU = "nvidia.com/gpu"
LEASE_S = 300
"""How long Kubernetes keeps a job whose launcher is gone before its agents are connected."""
SETTLED_S = 60.0
"""Time after all pods have begun to run, in seconds, when their agents are connected, or the job has failed."""
KEPT_S = 300
"""How long Kubernetes keeps a Job that has ended and was not deleted."""
BOOT_S = 86400.0
"""How long a pod tries to reach the coordinator: others may be pending for long. The lease ends it before."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""What a pod with a ServiceAccount's token has, by which kubectl finds the cluster."""
EXPLAIN_S = 4.0
GONE_S = 60.0
"""Time limit for a job that is deleted, in seconds. Kubernetes takes up to 55 s to notice that a node is lost."""
POD_S = 0.02
"""Least time between two looks at a job, in seconds for each of its pods: they are 10 kB each."""

MISSING = "install kubectl, or name it in the configuration file:  kubectl = 'PATH' in [kubernetes]"
UNREACHABLE = (
    "let pods reach that port: name an address that they reach with --coordinator-address and open ports with"
    " --port-range A-B; or launch inside the cluster, from a pod:  distrun template render kubernetes-launcher"
)
RIGHTS = (
    ("create", "jobs"),
    ("get", "jobs"),
    ("list", "jobs"),
    ("patch", "jobs"),
    ("delete", "jobs"),
    ("create", "secrets"),
    ("list", "pods"),
    ("delete", "pods"),
    ("list", "events"),
)
"""What a launch does in its namespace. It also looks at nodes, if it may."""
JOBSET_RIGHTS = (("create", JOBSETS), ("list", JOBSETS), ("delete", JOBSETS))
"""What it also does if it creates a JobSet."""
JOBSET_API = "jobset.x-k8s.io/v1alpha2"
WITHOUT = "or do without JobSets:  jobset = false in [kubernetes] of the configuration file"
CONFIGURED = "correct the configuration file"
HINTS = {
    "exceeded quota": "ask for less, or wait until others have ended; kubectl describe resourcequota shows it",
    "must specify": "say what each task needs: --worker-cores, --worker-memory, --server-cores, --server-memory",
    "podsecurity": "the namespace wants users without root: name one of the image, run_as = UID in [kubernetes] of the"
    " configuration file; or use another --namespace",
    "unknown field": "Kubernetes 1.29 or newer is needed; kubectl version shows the server's",
    "namespaces": "name another --namespace; kubectl get namespaces lists them",
    "forbidden": "ask the administrators for a Role; distrun doctor --launcher kubernetes says what is missing",
    "unable to connect": "kubectl cluster-info shows whether the cluster is reached",
    "was refused": "kubectl cluster-info shows whether the cluster is reached",
}
"""What to do about what kubectl or the cluster has said, by words in it."""

NO_JOBSETS = re.compile("resource type|forbidden", re.IGNORECASE)
"""What kubectl says if the cluster has no JobSets, or none for this user."""
UNNAMED = re.compile("selfsubjectreviews|forbidden|unknown command", re.IGNORECASE)
"""What kubectl says if the cluster does not tell users what it calls them, or if it is too old to ask."""

_NAME = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"{_NAME}(\.{_NAME})*"
_WORD = r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?"
_KEY = rf"({_SUBDOMAIN}/)?{_WORD}"
_PATH = r"[^:\x00-\x1f]"
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


@dataclass(frozen=True)
class KubernetesPreparation(Preparation):
    """What is known of the cluster before a job is submitted."""

    kind: str = JOBS
    context: str = ""
    """kubectl's; empty: it has none, as in a pod of the cluster."""
    namespace: str = ""
    """Where the job is created; empty: kubectl's own."""
    user: str = ""
    """The label that stands for the user."""
    host: str = "{host}"
    """This machine."""


class Kubernetes(Engine):
    """The cluster that kubectl reaches."""

    name = "kubernetes"
    hides = (INDEX_VARIABLE, PLACE, "JOB_COMPLETION_INDEX")
    keeps_ended = True
    dial_s = 45.0
    unreachable = UNREACHABLE

    def __init__(self) -> None:
        self._seen = Objects((), ())
        """All objects of the job that this process submitted, as they were last seen."""
        self._seen_at = 0.0
        """When its Jobs were last seen, by `clock`."""
        self._lease = JobLease(0.0, None)
        """The lease of the job that this process submitted."""
        self._ran_at: float | None = None
        """When all pods were first seen to run, by `clock`."""
        self._told = QueueStatus(QUEUED)
        """How the job stood when its objects were last seen."""

    # ------------------------------------------------------------------ before submitting

    def prepare(self, submission: Submission) -> KubernetesPreparation:
        """Check the options, and look whether a node has room for each task."""
        self.options = options = submission.options
        wants_jobset = self._wants_jobset()
        why = "Kubernetes has no such queues"
        refuse_queue_options(options, why, "use --namespace and --node-selector")
        for group in submission.groups:
            pod_spec(submission, group.role, group.needs)  # raises UsageError for an option of pods
        try:
            (context, namespace), user = self._context(), self._user()
        except EngineError:
            if not submission.is_dry:
                raise
            return KubernetesPreparation()
        note = ""
        try:
            check_size(submission.groups, self._nodes(), "node of the cluster", "")
        except UsageError as err:
            note = f"{err}: the job waits until there is one"  # which may be added
        except EngineError:
            pass  # this user may not look at nodes
        found = KubernetesPreparation(note, JOBS, context, namespace, user, socket.gethostname())
        if wants_jobset:
            jobset = dataclasses.replace(found, kind=JOBSETS)
            words = (*self._where(context, namespace), "create", "--dry-run=server", "--filename=-")
            with contextlib.suppress(EngineError):  # there is no such kind, or not for this user, or no webhook of it
                self._run(words, _text(dataclasses.replace(submission, found=jobset)))
                return jobset
        return found

    def render(self, submission: Submission) -> Script:
        """Return the Jobs, without pods as yet, and the commands that create them, their Secret and their pods."""
        where = self._where(submission.found.context, submission.found.namespace)
        create = (*where, "create", f"--filename={submission.folder / TEXT}")
        secret = (*where, "create", "--filename=-")
        begin = [
            (*where, "patch", "job", job_name(submission, group.role), "--type=merge", _spec(parallelism=group.count))
            for group in submission.groups
        ]
        return Script({TEXT: _text(submission)}, (create, secret, *begin))

    def _where(self, context: str, namespace: str = "") -> tuple[str, ...]:
        """Return kubectl with its cluster and namespace. Raises UsageError: --namespace is no name of one."""
        words = [os.path.expanduser(self.options.config.get("kubectl", "kubectl"))]
        words += [f"--context={context}"] if context else []
        given = self.options.own.get("namespace", "")
        namespace = namespace or _matched("--namespace", given, f"({_NAME})?", "a namespace's name")[0]
        return (*words, f"--namespace={namespace}") if namespace else tuple(words)

    def _context(self) -> tuple[str, str]:
        """Return kubectl's context (empty: it has no configuration) and the namespace. Raises EngineError."""
        form = r'--output=jsonpath={.current-context}{"\n"}{.contexts[0].context.namespace}'
        told = execute((*self._where(""), "config", "view", "--minify", form), MISSING)
        context, _, namespace = ("" if told.code else told.out).partition("\n")
        namespace = namespace if context else text_of(ACCOUNT / "namespace").strip()
        return context, self.options.own.get("namespace", "") or namespace

    def _user(self) -> str:
        """Return the label of the user, made of the cluster's name and the login name here. Raises EngineError."""
        words = ("auth", "whoami", "--output=jsonpath={.status.userInfo.username}")
        told = execute((*self._where(""), *words), MISSING)
        if told.code and not UNNAMED.search(told.err):  # by another label the job would not be found again
            raise EngineError(f"kubectl says: {told.said}", hint_of(told.said, HINTS))
        return hashlib.sha256(f"{told.out}/{process.user_name()}".encode()).hexdigest()[:16]

    # ------------------------------------------------------------------ the job in the cluster

    def handle(self, submission: Submission) -> Handle:
        """Return the job's label, and where and as what it is created."""
        found: KubernetesPreparation = submission.found
        more = {"context": found.context, "namespace": found.namespace, "kind": found.kind}
        return Handle(self.name, submission.marker, more)

    def submit(self, submission: Submission, script: Script) -> Handle:
        """Create the Jobs, their Secret, and then their pods."""
        create, secret, *begin = script.commands
        handle = self.handle(submission)
        try:
            self._lease = JobLease(clock(), submission.options.time_s)
            self._run(create)
            made = self._made(handle, len(submission.groups))
            self._run(secret, text=json.dumps(owned_secret(submission, made)))
            for argv in begin:
                self._run(argv)
        except BaseException:
            with contextlib.suppress(EngineError):  # what was said first counts
                self.cancel(handle)
            raise
        return handle

    def _made(self, handle: Handle, count: int) -> Sequence[answers.RoleJob]:
        """Return the Jobs, which a JobSet's controller makes a little later. Raises EngineError: it does not."""
        for _ in tries(ANSWER_S):
            found = self._objects(handle).jobs
            if handle.more["kind"] == JOBS or len(found) == count:
                return found
        why = f"the cluster takes JobSets, but nothing has made the Jobs of this one within {ANSWER_S:g} s"
        raise EngineError(why, f"ask the administrators whether JobSet's controller runs; {WITHOUT}")

    def look(self, handle: Handle) -> QueueStatus:
        """Ask for the job's objects, and for the events of what is slow; renew the lease. Of a job that was submitted.

        A job with many pods is not asked for each time.
        """
        if clock() < self._seen_at + min(POD_S * len(self._seen.pods), LEASE_S / 6):
            return self._told
        found = self._observed(handle)
        if self._is_forgotten(found):
            if self._ran_at is None:
                return QueueStatus(ENDED, answers.FORGOTTEN.text, why=answers.FORGOTTEN)
            return QueueStatus(ENDED, "its Jobs ended and were deleted while this machine slept")
        status = answers.standing(found, self._seen, self._ran_at is not None, self._lease.limit(self._ran_at))
        if status.state == RUNNING and self._ran_at is None:
            self._ran_at = clock()
        if status.state != ENDED:
            self._renew(handle, found)
        if status.state == QUEUED:
            with contextlib.suppress(EngineError):  # this user may not list events
                status = self._with_warning(handle, found, status)
        self._told = status
        return status

    def _with_warning(self, handle: Handle, found: Objects, status: QueueStatus) -> QueueStatus:
        """Add why pods are missing or slow to start, by the latest event; a job that gets none has ended."""
        name = answers.stuck(found)
        if not name:
            return status
        words = (f"--field-selector=involvedObject.name={name},type=Warning", "--output=json")
        warning = answers.warned(self._ask(handle, "get", "events", *words))
        refused = answers.refusal(warning)
        if refused:
            hint = hint_of(refused, HINTS)
            return QueueStatus(ENDED, f"no pod is allowed: {refused}" + (f"; {hint}" if hint else ""))
        return status._replace(text=f"{status.text}; {warning}") if warning.word else status

    def _renew(self, handle: Handle, found: Objects) -> None:
        """Give the job a later deadline, if it is time."""
        deadline_s = self._lease.renewed(clock(), self._ran_at)
        for job in found.jobs if deadline_s != self._lease.granted_s else ():
            patch = _spec(activeDeadlineSeconds=deadline_s)
            self._ask(handle, "patch", "job", job.name, "--type=merge", patch)
        self._lease = self._lease._replace(granted_s=deadline_s)

    def _is_forgotten(self, found: Objects) -> bool:
        """Return whether the Jobs may have ended by themselves, and have been deleted, while this process slept."""
        return not found.jobs and clock() > self._seen_at + LEASE_S

    def is_gone(self, handle: Handle) -> bool:
        """Return whether the job has no Jobs and no JobSet any more. Those that have ended are there for KEPT_S."""
        names = (JOBSETS, _selected(handle.id), "--output=name")
        return not self._objects(handle).jobs and (handle.more["kind"] == JOBS or not self._ask(handle, "get", *names))

    def cancel(self, handle: Handle) -> None:
        """Delete the Jobs, and with them pods and Secret. Pods of lost nodes are removed: agents end by themselves."""
        options = ("--cascade=foreground", "--wait=false", "--ignore-not-found")
        self._ask(handle, "delete", handle.more["kind"], _selected(handle.id), *options)
        force = ("--force", "--grace-period=0", "--wait=false", "--ignore-not-found")
        for _ in tries(GONE_S):
            with contextlib.suppress(EngineError):  # `is_gone` tells in the end
                found = self._objects(handle)
                if not found.jobs:
                    return
                lost = [pod.name for pod in found.pods if pod.may_be_lost and self._lost(handle, pod.node)]
                if lost:
                    self._ask(handle, "delete", "pods", *lost, *force)

    def explain(self, handle: Handle, place: str) -> Explanation | None:
        """Return what the job's objects say, the last ones that were seen of it; waits a little for a pod's end."""
        found, limit = self._seen, self._lease.limit(self._ran_at)
        for _ in tries(EXPLAIN_S):
            with contextlib.suppress(EngineError):  # what was seen before may tell
                found = self._observed(handle)
            if self._is_forgotten(found):
                return answers.FORGOTTEN if self._ran_at is None else None
            told = answers.explanation(found, self._seen, place, limit)
            mine = next((pod for pod in found.pods if pod.place == place), None)
            if told is not None or mine is None or mine.is_over:
                return told
            if mine.may_be_lost and (why := self._lost(handle, mine.node)):
                return Explanation(facts.EXIT_HOST_LOST, f"Kubernetes: the node {mine.node} is lost: {why}", mine.node)
        return None

    def _lost(self, handle: Handle, node: str) -> str:
        """Return why a node is lost; empty: it is not. Who may not look at nodes has the pod's word alone."""
        try:
            return answers.lost_node(self._ask(handle, "get", "node", node, "--output=json"))
        except EngineError:
            return "its pods are not ready"

    def find(self) -> Sequence[FoundJob]:
        """Return this user's jobs in the namespace."""
        (context, _), user = self._context(), self._user()
        found: dict[str, FoundJob] = {}
        for kind in (JOBSETS, JOBS):
            try:
                text = self._ask(None, "get", kind, f"--selector={USER_LABEL}={user}", "--output=json")
            except EngineError as err:
                if kind == JOBS or not NO_JOBSETS.search(str(err)):
                    raise
                continue
            for job in answers.listed(text):
                # Who may not list JobSets is told that when one is to be ended; to delete its Jobs would not end it.
                more = {"context": context, "namespace": job.namespace, "kind": JOBSETS if job.is_of_jobset else kind}
                state = f"{'ended' if job.is_over else 'there'}, launched on {job.host}"
                found.setdefault(job.marker, FoundJob(Handle(self.name, job.marker, more), job.marker, state))
        return list(found.values())

    def examine(self) -> Iterator[CheckResult]:
        """Look for kubectl, the cluster, what this user may do there, Pod Security, and nodes."""
        server = json.loads(self._ask(None, "get", "--raw=/version"))
        number = [int(re.sub(r"\D", "", server[each]) or 0) for each in ("major", "minor")]
        is_old = [0, 0] < number < [1, 29]
        yield CheckResult(not is_old, f"Kubernetes {server['gitVersion']}", "1.29 or newer is needed")
        context, own = self._context()
        namespace = own or "default"
        where = f"context {context}" if context else "inside the cluster"
        yield CheckResult(True, f"{where}; namespace {namespace}")
        may_not = [" ".join(each) for each in RIGHTS if not self._may(*each)]
        text = (
            f"this user may not: {', '.join(may_not)}" if may_not else "this user may create and delete what a job has"
        )
        yield CheckResult(not may_not, text, f"ask the administrators for a Role with these in {namespace}")
        yield self._jobsets()
        yield self._pod_security(namespace)
        try:
            nodes = self._nodes()
        except EngineError:
            yield CheckResult(True, "nodes: this user may not look at them; a lost one is told by its pods")
            return
        most = max(nodes, key=lambda each: each.memory, default=Needs())
        size = f"the largest has {most.cores} cores, {most.memory // MIB} MiB; GPUs: {most.gpus}" if nodes else ""
        yield CheckResult(bool(nodes), f"{len(nodes)} nodes take pods; {size}", "kubectl get nodes")

    def _may(self, *right: str) -> bool:
        """Return whether this user may do something. Raises EngineError: kubectl cannot tell."""
        told = execute((*self._where(""), "auth", "can-i", *right), MISSING)
        if told.out.split()[:1] not in (["yes"], ["no"]):
            raise EngineError(f"kubectl says: {told.said}", hint_of(told.said, HINTS))
        return not told.code

    def _jobsets(self) -> CheckResult:
        """Tell whether a job is a JobSet. Without them nothing is missing."""
        if not self._wants_jobset():
            return CheckResult(True, "JobSets are not used: jobset = false")
        try:
            self._ask(None, "get", f"--raw=/apis/{JOBSET_API}")
        except EngineError as err:
            return CheckResult(True, f"JobSets are not used: {err}")
        may_not = [verb for verb, what in JOBSET_RIGHTS if not self._may(verb, what)]
        if "create" in may_not:
            return CheckResult(True, "JobSets are not used: this user may not create them")
        but = f", but this user may not {' and '.join(may_not)} them" if may_not else " if the cluster takes them"
        return CheckResult(not may_not, f"JobSets are used{but}", f"ask the administrators for these rights; {WITHOUT}")

    def _wants_jobset(self) -> bool:
        """Return what the configuration file says. Raises UsageError."""
        text = self.options.config.get("jobset", "yes")
        return _matched("jobset =", text, "yes|no", "yes or no", CONFIGURED)[0] == "yes"

    def _pod_security(self, namespace: str) -> CheckResult:
        label = r"pod-security\.kubernetes\.io/enforce"
        try:
            level = self._ask(None, "get", "namespace", namespace, f"--output=jsonpath={{.metadata.labels.{label}}}")
        except EngineError:
            return CheckResult(True, "Pod Security: this user may not look at the namespace")
        text = f"Pod Security of {namespace}: {level or 'no level is enforced'}"
        return CheckResult(level != "restricted" or "run_as" in self.options.config, text, HINTS["podsecurity"])

    # ------------------------------------------------------------------ asking

    def _nodes(self) -> list[Needs]:
        """Return what each node has in all. Raises EngineError: this user may not look at them."""
        return answers.room(self._ask(None, "get", "nodes", "--output=json"), gpu_resource(self.options))

    def _objects(self, handle: Handle) -> Objects:
        found = Objects.of(self._ask(handle, "get", "jobs,pods", _selected(handle.id), "--output=json"))
        self._seen = self._seen.then(found)
        self._seen_at = clock() if found.jobs else self._seen_at
        return found

    def _observed(self, handle: Handle) -> Objects:
        """Return the job's objects; ask whether pods that have gone without a reason meanwhile were preempted."""
        found = self._objects(handle)
        there = {pod.name for pod in found.pods}
        if found.jobs and any(pod.name not in there and pod.explanation() is None for pod in self._seen.pods):
            words = ("get", "events", f"--field-selector=reason={answers.PREEMPTED}", "--output=json")
            with contextlib.suppress(EngineError):  # this user may not list events
                self._seen = self._seen.preempted(self._ask(handle, *words))
        return found

    def _ask(self, handle: Handle | None, *words: str) -> str:
        """Return what kubectl prints, asked where a job is; None: where the options say. Raises EngineError."""
        where = self._where(handle.more["context"], handle.more["namespace"]) if handle else self._where("")
        return self._run((*where, *words))

    @staticmethod
    def _run(argv: Sequence[str], text: str = "") -> str:
        told = execute(argv, MISSING, text=text, limit_s=ANSWER_S)
        if told.code:
            raise EngineError(f"kubectl says: {told.said}", hint_of(told.said, HINTS))
        return told.out


# ---------------------------------------------------------------------- pure


def clock() -> float:
    """Return this machine's clock that only goes forward, in seconds; it goes on while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class JobLease(NamedTuple):
    """The deadline of a job. Kubernetes counts it from the job's start."""

    start: float
    """When it was submitted, by `clock`."""
    time_s: float | None
    """How long it may run (--time)."""
    granted_s: int | None = LEASE_S
    """Its deadline now; None: it has none."""

    def renewed(self, now: float, ran_at: float | None) -> int | None:
        """Return the deadline that it is to have; None: none. `ran_at`: when it began to run; None: it waits."""
        last = self._last(ran_at)
        if self.granted_s is None or (ran_at is not None and now >= ran_at + SETTLED_S):
            return last
        elapsed_s = now - self.start
        is_late = self.granted_s - elapsed_s < LEASE_S * 2 / 3
        lease_s = round(elapsed_s) + LEASE_S if is_late else self.granted_s
        return lease_s if last is None else min(last, lease_s)

    def limit(self, ran_at: float | None) -> Explanation:
        """Return what it means that the deadline is reached: `--time` is over, or the lease was not renewed."""
        last = self._last(ran_at)
        return answers.FORGOTTEN if last is None or last != self.granted_s else answers.TIME_LIMIT

    def _last(self, ran_at: float | None) -> int | None:
        return None if ran_at is None or self.time_s is None else round(ran_at - self.start + self.time_s)


def base_name(marker: str) -> str:
    """Return the name of a job's Secret; its Jobs' names begin with it."""
    return marker if len(marker) <= NAME_LENGTH else MARK + marker[len(MARK) - NAME_LENGTH :].lstrip("-")


def job_name(submission: Submission, role: str) -> str:
    """Return the name of a role's Job. One of a JobSet has its number there, too."""
    return f"{base_name(submission.marker)}-{role}" + ("-0" if submission.found.kind == JOBSETS else "")


def labels(submission: Submission) -> dict[str, str]:
    """Return what all objects of a job are found by."""
    found = {"app.kubernetes.io/managed-by": "distrun", JOB_LABEL: submission.marker, USER_LABEL: submission.found.user}
    return {name: value for name, value in found.items() if value}


def jobs(submission: Submission) -> dict[str, Any]:
    """Return the Jobs of all roles as one List, or as one JobSet. Raises UsageError for what cannot be in one."""
    note, kept = {HOST_NOTE: submission.found.host}, {"ttlSecondsAfterFinished": KEPT_S}
    made: dict[str, Any] = {}
    for group in submission.groups:
        marks = {**labels(submission), ROLE_LABEL: group.role}
        spec = {
            "completions": group.count,
            "parallelism": 0,
            "completionMode": "Indexed",
            "backoffLimitPerIndex": 0,
            "activeDeadlineSeconds": LEASE_S,
            "template": {"metadata": {"labels": marks}, "spec": pod_spec(submission, group.role, group.needs)},
        }
        made[group.role] = {"metadata": {"labels": marks, "annotations": note}, "spec": spec}
    if submission.found.kind == JOBSETS:
        network = {"enableDNSHostnames": False}  # else there would be a Service
        replicated = [{"name": role, "template": job} for role, job in made.items()]
        about = {"name": base_name(submission.marker), "labels": labels(submission), "annotations": note}
        spec = {**kept, "network": network, "replicatedJobs": replicated}
        return {"apiVersion": JOBSET_API, "kind": "JobSet", "metadata": about, "spec": spec}
    items = [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": job_name(submission, role), **job["metadata"]},
            "spec": {**kept, **job["spec"]},
        }
        for role, job in made.items()
    ]
    return {"apiVersion": "v1", "kind": "List", "items": items}


def _text(submission: Submission) -> str:
    return json.dumps(jobs(submission), indent=1) + "\n"


def pod_spec(submission: Submission, role: str, needs: Needs) -> dict[str, Any]:
    """Return what each pod of a role is to be. Raises UsageError."""
    own, config = submission.options.own, submission.options.config
    limits = {"cpu": needs.cores, "memory": needs.memory, gpu_resource(submission.options): needs.gpus}
    mounts, volumes = volumes_of(own.get("volume", ()))
    user = run_as(config)
    start = submission.bootstrap._replace(limit_s=BOOT_S)
    agent = {
        "name": answers.AGENT,
        "image": image(submission.options),
        "command": [*start.command(submission.python, f"env:{PLACE}", f"env:{SECRET}")],
        "env": [
            {"name": INDEX_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}},
            {"name": PLACE, "value": f"{role}-$({INDEX_VARIABLE})"},
            {
                "name": SECRET,
                "valueFrom": {"secretKeyRef": {"name": base_name(submission.marker), "key": "enrolment"}},
            },
        ],
        "resources": {"limits": {name: amount for name, amount in limits.items() if amount}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            **({"capabilities": {"drop": ["ALL"]}} if user else {}),
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }
    pull = _matched("--image-pull-secret", own.get("image_pull_secret", ""), f"({_SUBDOMAIN})?", "a Secret's name")[0]
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "shareProcessNamespace": True,  # else the bootstrap is process 1, and ignores SIGTERM
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}, **user},
        "imagePullSecrets": [{"name": pull}] if pull else [],
        "nodeSelector": selector_of(own.get("node_selector", ())),
        "tolerations": [toleration_of(each) for each in own.get("toleration", ())],
        "volumes": volumes,
        "containers": [agent],
    }
    spec = {name: value for name, value in spec.items() if value not in ([], {})}
    example = """--engine-arg '{"priorityClassName": "NAME"}'"""
    made = merged(spec, submission.options.args, example)
    if made["containers"] != [agent]:
        raise UsageError("--engine-arg: containers cannot be replaced: the job's container is distrun's", example)
    return made


def image(options: EngineOptions) -> str:
    """Return the containers' image. Raises UsageError."""
    found = options.own.get("image", "") or options.config.get("image", "")
    if not found:
        raise UsageError(
            "--launcher kubernetes: --image is missing",
            "name an image that has python3 and what your command needs:  --image python:3.12;"
            " or once for all:  image = 'NAME' in [kubernetes] of the configuration file",
        )
    return _matched("--image", found, r"[a-z0-9][\w./:@-]*", "the name of an image, such as ghcr.io/me/train:1")[0]


def gpu_resource(options: EngineOptions) -> str:
    """Return what GPUs are called in the cluster. Raises UsageError."""
    found = options.own.get("gpu_resource") or options.config.get("gpu_resource") or GPU
    return _matched("--gpu-resource", found, f"{_SUBDOMAIN}/{_WORD}", f"a resource's name such as {GPU}")[0]


def run_as(config: Mapping[str, str]) -> dict[str, Any]:
    """Return the user of the containers, as the configuration names it. Raises UsageError."""
    text = config.get("run_as", "")
    if not text:
        return {}
    _matched("run_as =", text, r"[1-9]\d{0,8}", "a user id above 0", CONFIGURED)
    return {"runAsUser": int(text), "runAsGroup": int(text), "fsGroup": int(text), "runAsNonRoot": True}


def volumes_of(texts: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a container's mounts and its pod's volumes from `SOURCE:DIR[:ro]`. Raises UsageError."""
    mounts: list[dict[str, Any]] = []
    volumes: list[dict[str, Any]] = []
    for text in texts:
        match = _matched(
            "--volume",
            text,
            rf"(?P<source>(?P<kind>pvc|configmap)/(?P<name>{_SUBDOMAIN})|empty|memory|/{_PATH}*):(?P<path>/{_PATH}+)(?P<ro>:ro)?",
            "SOURCE:DIR[:ro], where SOURCE is pvc/NAME, configmap/NAME, a folder /DIR of the node, empty or memory",
        )
        if ".." in re.split("[:/]", text):
            raise UsageError(f"--volume {text}: the API refuses paths with '..'", "name the folder without it")
        if match["path"] in [each["mountPath"] for each in mounts]:
            raise UsageError(f"--volume {text}: {match['path']} is given twice", "name another folder of the container")
        name = f"v{len(volumes)}"
        mounts.append({"name": name, "mountPath": match["path"], "readOnly": bool(match["ro"])})
        if match["kind"] == "pvc":
            source: dict[str, Any] = {"persistentVolumeClaim": {"claimName": match["name"]}}
        elif match["kind"] == "configmap":
            source = {"configMap": {"name": match["name"]}}
        elif match["source"].startswith("/"):
            source = {"hostPath": {"path": match["source"]}}
        else:
            source = {"emptyDir": {"medium": "Memory"} if match["source"] == "memory" else {}}
        volumes.append({"name": name, **source})
    return mounts, volumes


def selector_of(texts: Sequence[str]) -> dict[str, str]:
    """Return the labels that a node must have, from `KEY=VALUE`. Raises UsageError."""
    found: dict[str, str] = {}
    for text in texts:
        match = _matched(
            "--node-selector", text, rf"(?P<key>{_KEY})=(?P<value>({_WORD})?)", "KEY=VALUE, a node's label"
        )
        if found.setdefault(match["key"], match["value"]) != match["value"]:
            raise UsageError(f"--node-selector {text}: {match['key']} is {found[match['key']]} already", "give it once")
    return found


def toleration_of(text: str) -> dict[str, str]:
    """Return what taint of a node is tolerated, from `KEY[=VALUE][:EFFECT]`. Raises UsageError."""
    form = rf"(?P<key>{_KEY})(?P<equal>=(?P<value>({_WORD})?))?(:(?P<effect>{'|'.join(EFFECTS)}))?"
    match = _matched("--toleration", text, form, f"KEY[=VALUE][:EFFECT], where EFFECT is {' or '.join(EFFECTS)}")
    value = {"operator": "Equal", "value": match["value"]} if match["equal"] else {"operator": "Exists"}
    return {"key": match["key"], **value, **({"effect": match["effect"]} if match["effect"] else {})}


def owned_secret(submission: Submission, owners: Sequence[answers.RoleJob]) -> dict[str, Any]:
    """Return the Secret, which Kubernetes deletes when the last of the Jobs has gone."""
    about = {
        "name": base_name(submission.marker),
        "labels": labels(submission),
        "ownerReferences": [
            {"apiVersion": "batch/v1", "kind": "Job", "name": each.name, "uid": each.uid} for each in owners
        ],
    }
    return {"apiVersion": "v1", "kind": "Secret", "metadata": about, "stringData": {"enrolment": submission.secret}}


def _selected(marker: str) -> str:
    return f"--selector={JOB_LABEL}={marker}"


def _spec(**members: Any) -> str:
    return "--patch=" + json.dumps({"spec": members})


def _matched(option: str, text: str, form: str, expected: str, fix: str = "") -> re.Match[str]:
    """Return a text's parts. Raises UsageError if the text does not have the form."""
    match = re.fullmatch(form, text, re.ASCII)
    if match is None:
        raise UsageError(f"{option}: expected {expected}; found {text!r}", fix)
    return match
