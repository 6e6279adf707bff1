"""Kubernetes by kubectl: an Indexed Job for each role, whose pods are the places, with one task each.

* What is submitted has nothing of the user's but what the options say of pods. The enrolment secret is a Secret that
  the Jobs own, so that it goes with them. Pods get no token of the API.
* Order matters, for this process may be killed at any time: Jobs without pods, then the Secret, then the Jobs' pods.
* A Job has a deadline (`LEASE_S`) that this process puts off while the job waits and begins. If it dies, Kubernetes
  ends the job. Once the agents are connected they see to that, and the deadline is the user's `--time`, or none.
* One pod that fails ends no other (`backoffLimitPerIndex`, Kubernetes 1.29): the coordinator ends them in order.

Jobs of a JobSet would be no gain: agents bring their addresses and the coordinator orders start and end, while the
deadline of a JobSet's Jobs cannot be changed. What kubectl prints is read by `kubernetes_answers`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
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
    execute,
    fits,
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

JOBS = "jobs.json"
"""Name of the Jobs' text in the folder of the submission."""
INDEX_VARIABLE, PLACE, SECRET = "DISTRUN_POD_INDEX", "DISTRUN_POD", "DISTRUN_ENROLMENT"
"""Variables of a pod: its index, its place made of that, and the secret, which the bootstrap takes out."""
NAME_LENGTH = 50
"""Of a Job's name before `-worker`: its pods' host names (`NAME-worker-65535`) may have 63 characters."""
GPU = "nvidia.com/gpu"
LEASE_S = 300
"""How long Kubernetes keeps a job whose launcher is gone before its agents are connected."""
SETTLED_S = 60.0
"""So long after all pods have begun to run, their agents are connected, or the job has failed."""
KEPT_S = 300
"""How long Kubernetes keeps a Job that has ended and was not deleted."""
BOOT_S = 86400.0
"""How long a pod tries to reach the coordinator: others may be pending for long. The lease ends it before."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""What a pod with a ServiceAccount's token has, by which kubectl finds the cluster."""
EXPLAIN_S = 4.0
GONE_S = 5.0
"""How long a job that is deleted is waited for, before its pods on lost nodes are given up."""

MISSING = "install kubectl, or name it in the configuration file:  kubectl = PATH in [kubernetes]"
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

_NAME = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"{_NAME}(\.{_NAME})*"
_WORD = r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?"
_KEY = rf"({_SUBDOMAIN}/)?{_WORD}"
_PATH = r"[^:\x00-\x1f]"
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


@dataclass(frozen=True)
class KubernetesPreparation(Preparation):
    """What is known of the cluster before a job is submitted."""

    context: str = ""
    """kubectl's; empty: it has none, as in a pod of the cluster."""
    user: str = ""
    """Whose the job is, as a label."""
    host: str = "{host}"
    """This machine."""


class Kubernetes(Engine):
    """The cluster that kubectl reaches."""

    name = "kubernetes"
    hides = (INDEX_VARIABLE, PLACE, "JOB_COMPLETION_INDEX")
    dial_s = 45.0  # a pod may try several addresses in vain, for 5 s each
    unreachable = UNREACHABLE

    def __init__(self) -> None:
        self._seen = Objects((), ())
        """All that was seen of the job that this process submitted, as it was last."""
        self._is_cancelled = False
        """By this process."""
        self._lease: JobDeadline | None = None
        """Of the job that this process submitted, until its deadline is the last one."""
        self._ran_at: float | None = None
        """When all pods were first seen to run."""
        self._places: frozenset[str] = frozenset()
        """Those of a job that has run."""

    # ------------------------------------------------------------------ before submitting

    def prepare(self, submission: Submission) -> KubernetesPreparation:
        """Check the options, and look whether a node has room for each task."""
        self.options = options = submission.options
        why = "Kubernetes has no such queues"
        refuse_queue_options(options._replace(time_s=None), why, "use --namespace and --node-selector")
        _matched("--namespace", options.own.get("namespace", ""), f"({_NAME})?", "a namespace's name")
        for group in submission.groups:
            pod_spec(submission, group.role, group.needs)  # refuses what the options cannot be
        try:
            context, user = self._context(), self._user()
        except EngineError:
            if not submission.is_dry:
                raise
            return KubernetesPreparation()
        note = ""
        with contextlib.suppress(EngineError):  # it may not look at nodes
            note = too_big(submission, self._nodes())
        return KubernetesPreparation(note, context, user, socket.gethostname())

    def render(self, submission: Submission) -> Script:
        """Return the Jobs, without pods as yet, and the commands that create them, their Secret and their pods."""
        where = self._where(submission.found.context)
        text = json.dumps(jobs(submission), indent=1) + "\n"
        create = (*where, "create", f"--filename={submission.folder / JOBS}")
        secret = (*where, "create", "--filename=-")
        begin = [
            (*where, "patch", "job", job_name(submission, group.role), "--type=merge", _spec(parallelism=group.count))
            for group in submission.groups
        ]
        return Script({JOBS: text}, (create, secret, *begin))

    def _where(self, context: str, namespace: str = "") -> tuple[str, ...]:
        """Return kubectl with its cluster and namespace."""
        words = [self.options.config.get("kubectl", "kubectl")]
        words += [f"--context={context}"] if context else []
        namespace = namespace or self.options.own.get("namespace", "")
        return (*words, f"--namespace={namespace}") if namespace else tuple(words)

    def _context(self) -> str:
        """Return kubectl's context, if it has a configuration. Raises EngineError: kubectl is not here."""
        told = execute((*self._where(""), "config", "current-context"), MISSING)
        return "" if told.code else told.out.strip()

    def _user(self) -> str:
        """Return a label for the user: as the cluster knows it, and by the login here. Raises EngineError."""
        words = ("auth", "whoami", "--output=jsonpath={.status.userInfo.username}")
        known = execute((*self._where(""), *words), MISSING).out  # nothing, if the cluster does not let it ask
        return hashlib.sha256(f"{known}/{process.user_name()}".encode()).hexdigest()[:16]

    # ------------------------------------------------------------------ the job in the cluster

    def submit(self, submission: Submission, script: Script) -> Handle:
        """Create the Jobs, their Secret, and then their pods."""
        create, secret, *begin = script.commands
        found: KubernetesPreparation = submission.found
        handle = Handle(self.name, submission.marker, {"context": found.context, "namespace": ""})
        try:
            self._run(create)
            made = self._objects(handle)
            namespace = made.jobs[0].namespace
            handle = handle._replace(more={**handle.more, "namespace": namespace})
            self._run(secret, text=json.dumps(owned_secret(submission, made.jobs)))
            self._lease = JobDeadline(time.monotonic(), submission.options.time_s)
            for argv in begin:
                self._run(argv)
        except BaseException:
            with contextlib.suppress(EngineError):  # what was said first counts
                self.cancel(handle)
            raise
        return handle

    def look(self, handle: Handle) -> QueueStatus:
        """Ask for the job's objects, and for the events of what is slow. A job that has ended is deleted."""
        found = self._objects(handle)
        if not found.jobs:
            text = "it was deleted" if self._seen.jobs else "Kubernetes does not know it"
            return QueueStatus(ENDED, text, why=None if self._is_cancelled else answers.explanation(found, ""))
        status = answers.standing(found, self._places)
        if status.state == QUEUED:
            status = self._with_warning(handle, found, status)
        if status.state == RUNNING and self._ran_at is None:
            self._ran_at = time.monotonic()
            self._places = frozenset(each.place for each in status.grants)
        if status.state == ENDED:
            self.cancel(handle)
        elif self._lease is not None:
            self._put_off(handle, self._lease, found)
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

    def _put_off(self, handle: Handle, lease: JobDeadline, found: Objects) -> None:
        """Give the job a later deadline, if it is time."""
        now = time.monotonic()
        deadline_s = lease.renewed(now, self._ran_at)
        for job in found.jobs if deadline_s != lease.granted_s else ():
            patch = _spec(activeDeadlineSeconds=deadline_s)
            self._ask(handle, "patch", "job", job.name, "--type=merge", patch)
        if deadline_s is None or is_settled(now, self._ran_at):
            self._lease = None
        else:
            self._lease = lease._replace(granted_s=deadline_s)

    def cancel(self, handle: Handle) -> None:
        """Delete the Jobs, and with them pods and Secret. Pods of lost nodes are given up: agents end by themselves."""
        self._is_cancelled = True
        options = ("--cascade=foreground", "--wait=false", "--ignore-not-found")
        self._ask(handle, "delete", "jobs", _selected(handle.id), *options)
        found = Objects((), ())
        for _ in tries(GONE_S):
            found = self._objects(handle)
            if not found.jobs:
                return
        lost = [pod.name for pod in found.pods if pod.may_be_lost and self._lost(handle, pod.node)]
        if lost:
            self._ask(
                handle, "delete", "pods", *lost, "--force", "--grace-period=0", "--wait=false", "--ignore-not-found"
            )

    def explain(self, handle: Handle, place: str) -> Explanation | None:
        """Return what the job's objects say, the last ones that were seen of it; waits a little for a pod's end."""
        for _ in tries(EXPLAIN_S):
            found = self._objects(handle)
            if not found.jobs and self._is_cancelled:
                found = self._seen
            told = answers.explanation(found, place, self._seen.pods)
            if told is not None:
                return told
            mine = next((pod for pod in found.pods if pod.place == place), None)
            if mine is None or mine.is_over:
                return None
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
        context = self._context()
        text = self._ask(None, "get", "jobs", f"--selector={USER_LABEL}={self._user()}", "--output=json")
        found = {}
        for job in Objects.of(text).jobs:
            handle = Handle(self.name, job.marker, {"context": context, "namespace": job.namespace})
            state = "ended" if job.is_over else "there"
            found[job.marker] = FoundJob(handle, job.marker, f"{state}, launched on {job.host}")
        return list(found.values())

    def examine(self) -> Iterator[CheckResult]:
        """Look for kubectl, the cluster, what this user may do there, Pod Security, and nodes."""
        server = json.loads(self._ask(None, "get", "--raw=/version"))
        number = [int(re.sub(r"\D", "", server[each]) or 0) for each in ("major", "minor")]
        is_old = [0, 0] < number < [1, 29]
        yield CheckResult(not is_old, f"Kubernetes {server['gitVersion']}", "1.29 or newer is needed")
        context = self._context()
        words = ("config", "view", "--minify", "--output=jsonpath={..namespace}")
        own = self._ask(None, *words) if context else text_of(ACCOUNT / "namespace")
        namespace = self.options.own.get("namespace") or own or "default"
        where = f"context {context}" if context else "inside the cluster"
        yield CheckResult(True, f"{where}; namespace {namespace}")
        may_not = [" ".join(each) for each in RIGHTS if execute((*self._where(""), "auth", "can-i", *each)).code]
        text = (
            f"this user may not: {', '.join(may_not)}" if may_not else "this user may create and delete what a job has"
        )
        yield CheckResult(not may_not, text, f"ask the administrators for a Role with these in {namespace}")
        yield self._pod_security(namespace)
        try:
            nodes = self._nodes()
        except EngineError:
            yield CheckResult(True, "nodes: this user may not look at them; a lost one is told by its pods")
            return
        most = max(nodes, key=lambda each: each.memory, default=Needs())
        size = f"the largest has {most.cores} cores, {most.memory // MIB} MiB, {most.gpus} GPUs" if nodes else ""
        yield CheckResult(bool(nodes), f"{len(nodes)} nodes take pods; {size}", "kubectl get nodes")

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


class JobDeadline(NamedTuple):
    """The deadline of a job. Kubernetes counts it from the job's start."""

    start: float
    """When it was submitted, by this machine's clock that only goes forward."""
    time_s: float | None
    """How long it may run (--time)."""
    granted_s: int = LEASE_S
    """Its deadline now."""

    def renewed(self, now: float, ran_at: float | None) -> int | None:
        """Return the deadline that it is to have; None: none. `ran_at`: when it began to run; None: it waits."""
        last = None if ran_at is None or self.time_s is None else round(ran_at - self.start + self.time_s)
        if is_settled(now, ran_at):
            return last
        elapsed_s = now - self.start
        is_late = self.granted_s - elapsed_s < LEASE_S * 2 / 3
        lease_s = round(elapsed_s) + LEASE_S if is_late else self.granted_s
        return lease_s if last is None else min(last, lease_s)


def is_settled(now: float, ran_at: float | None) -> bool:
    """Return whether the agents of a job that began to run at `ran_at` (None: it waits) are connected by now."""
    return ran_at is not None and now >= ran_at + SETTLED_S


def base_name(marker: str) -> str:
    """Return the name of a job's Secret; its Jobs' names begin with it."""
    return marker if len(marker) <= NAME_LENGTH else MARK + marker[len(MARK) - NAME_LENGTH :].lstrip("-")


def job_name(submission: Submission, role: str) -> str:
    """Return the name of a role's Job."""
    return f"{base_name(submission.marker)}-{role}"


def labels(submission: Submission) -> dict[str, str]:
    """Return what all objects of a job are found by."""
    found = {"app.kubernetes.io/managed-by": "distrun", JOB_LABEL: submission.marker, USER_LABEL: submission.found.user}
    return {name: value for name, value in found.items() if value}


def jobs(submission: Submission) -> dict[str, Any]:
    """Return the Jobs of all roles as one List. Raises UsageError for an option that cannot be in one."""
    items = []
    for group in submission.groups:
        name, marks = job_name(submission, group.role), {**labels(submission), ROLE_LABEL: group.role}
        spec = {
            "completions": group.count,
            "parallelism": 0,
            "completionMode": "Indexed",
            "backoffLimitPerIndex": 0,
            "activeDeadlineSeconds": LEASE_S,
            "ttlSecondsAfterFinished": KEPT_S,
            "template": {"metadata": {"labels": marks}, "spec": pod_spec(submission, group.role, group.needs)},
        }
        about = {"name": name, "labels": marks, "annotations": {HOST_NOTE: submission.found.host}}
        items.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "spec": spec})
    return {"apiVersion": "v1", "kind": "List", "items": items}


def pod_spec(submission: Submission, role: str, needs: Needs) -> dict[str, Any]:
    """Return what each pod of a role is to be. Raises UsageError."""
    own, config = submission.options.own, submission.options.config
    limits = {"cpu": needs.cores, "memory": needs.memory, gpu_resource(submission.options): needs.gpus}
    mounts, volumes = volumes_of(own.get("volume", ()))
    user = run_as(config)
    start = submission.bootstrap._replace(limit_s=BOOT_S)
    agent = {
        "name": "agent",
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
    return merged(spec, submission.options.args, """--engine-arg '{"priorityClassName": "NAME"}'""")


def image(options: EngineOptions) -> str:
    """Return the containers' image. Raises UsageError."""
    found = options.own.get("image", "") or options.config.get("image", "")
    if not found:
        raise UsageError(
            "--launcher kubernetes: --image is missing",
            "name an image that has python3 and what your command needs:  --image python:3.12;"
            " or once for all:  image = NAME in [kubernetes] of the configuration file",
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
    _matched("run_as =", text, r"[1-9]\d{0,8}", "a user id above 0", "correct the configuration file")
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


def too_big(submission: Submission, nodes: Sequence[Needs]) -> str:
    """Return what is said of a role that no node of now has room for; empty: nothing. One may be added later."""
    for group in submission.groups:
        if not fits(group.needs, nodes):
            cores, memory, gpus = group.needs
            needs = [f"{cores} cores" * bool(cores), f"{memory // MIB} MiB" * bool(memory), f"{gpus} GPUs" * bool(gpus)]
            asked = " and ".join(filter(None, needs))
            return f"no node of the cluster has {asked or 'room'} for a {group.role}: the job waits until there is one"
    return ""


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
    """Return a text's parts. Raises UsageError: it has not the form."""
    match = re.fullmatch(form, text)
    if match is None:
        raise UsageError(f"{option}: expected {expected}; found {text!r}", fix)
    return match
