"""Jobs on a real Kubernetes control plane, by a user with the rights that the backend names, in one namespace."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import backendcontract
import kubernetes
import pytest
from backendcontract import STAY, BackendContract
from kubernetessite import TEST_S, KubernetesSite, needed, site
from lab import ROOT, Done, Running, wait_until

from distrun.backends.kubernetes import JOBS, JOBSET_RIGHTS, JOBSETS, KEPT_S, LEASE_S, RIGHTS, SETTLED_S

pytestmark = [pytest.mark.engine, pytest.mark.timeout(TEST_S)]

up = functools.partial(backendcontract.up, limit_s=60)
SHORT = ("--grace", "2")
FRAIL = ("--suspect-after", "2", "--lost-after", "6", *SHORT)
"""An agent ends its tasks 9 s after it last heard of the coordinator."""
IMAGE = ("--image", "debian:12")
LABELS = {"matchLabels": {"app.kubernetes.io/managed-by": "distrun"}}
BY_HOST = {"topologyKey": "kubernetes.io/hostname", "labelSelector": LABELS}
ALONE = {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [BY_HOST]}}}
APART = ("--engine-arg", json.dumps(ALONE))
"""Each pod on a node of its own: in the lab, those of one node have one address."""
SERVED = ("-s", "1", "--python", sys.executable, *APART)
"""One server; the python of the lab's hosts has no numpy."""
ACCOUNT_FOLDER = Path("/run/secrets/kubernetes.io/serviceaccount")
"""Where kubectl looks in a pod, by way of /var/run."""
GREEDY = "python3 -c 'import signal; b = bytearray(600 << 20); signal.pause()'"
"""It keeps the memory until it is killed: the lab's kubelet looks five times a second, and its stdin is empty."""
ORDINARY_S = 3.0
"""So long after an ordinary end nothing of a job is left."""


class PodSite(KubernetesSite):
    """Launches with an image; the user has the rights that doctor asks for, and no others."""

    def launch(self, *words: str, **more: Any) -> Done:
        return super().launch(*IMAGE, *words, **more)

    def begin_launch(self, *words: str, **more: Any) -> Running:
        return super().begin_launch(*IMAGE, *words, **more)


@pytest.fixture(scope="module")
def cluster() -> Iterator[PodSite]:
    for lab in site(3, has_jobsets=not kubernetes.why_not(kubernetes.JOBSET_FILES)):
        lab.__class__ = PodSite
        assert isinstance(lab, PodSite)
        allow(lab, RIGHTS)
        yield lab


def allow(lab: PodSite, rights: Sequence[tuple[str, str]]) -> None:
    """Give the user these rights, and no others."""
    groups = {JOBS: "batch", JOBSETS: "jobset.x-k8s.io"}
    rules = [
        {"apiGroups": [groups.get(what, "")], "resources": [what.partition(".")[0]], "verbs": [verb]}
        for verb, what in rights
    ]
    lab.cluster.kubectl("patch", "role", "user", "--type=merge", "-p", json.dumps({"rules": rules}))


@pytest.fixture(params=[JOBS, JOBSETS], ids=["jobs", "jobset"])
def kind(cluster: PodSite, request: pytest.FixtureRequest) -> Iterator[str]:
    """What a job is in the cluster. Who may not create JobSets gets Jobs."""
    if request.param == JOBSETS:
        needed(kubernetes.why_not(kubernetes.JOBSET_FILES))
        allow(cluster, RIGHTS + JOBSET_RIGHTS)
    yield request.param
    allow(cluster, RIGHTS)


as_both = pytest.mark.usefixtures("kind")
"""The test runs with Jobs and with a JobSet."""


@pytest.fixture
def lab(cluster: PodSite, tmp_path: Path) -> Iterator[PodSite]:
    cluster.begin(tmp_path)
    yield cluster
    cluster.end()


def pods(lab: PodSite, **labels: str) -> list[dict[str, Any]]:
    """The job's pods."""
    return lab.cluster.get("pods", *(f"--selector=distrun/{name}={value}" for name, value in labels.items()))


def gone_soon(lab: PodSite) -> None:
    """Nothing of the job is in the cluster, after the time that an ordinary end may take."""
    wait_until(lambda: not lab.cluster.left(), ORDINARY_S, "nothing is left in Kubernetes")


@as_both
class TestContract(BackendContract):
    @pytest.fixture
    def site(self, lab: PodSite) -> PodSite:
        return lab


def test_after_an_ordinary_end_nothing_is_left_within_three_seconds(kind: str, lab: PodSite) -> None:
    done = lab.launch(
        "-v", "-n", "2", *SERVED, "echo on $DISTRUN_HOST; env | grep -c 'ENROL\\|_POD\\|COMPLETION'; true"
    )
    assert done.code == 0, done.err
    gone_soon(lab)
    assert re.search(rf"submitting to kubernetes as \S+ \({re.escape(kind)}\)", done.err)
    assert done.out.count("| on h") == 2
    assert done.out.count("| 0\n") == 2, "tasks see nothing of the pod's own variables"
    lab.nothing_stays()


def test_pods_get_no_token_and_the_secret_is_a_secret_that_the_jobs_own(lab: PodSite) -> None:
    running = lab.begin_launch(*SHORT, "-n", "2", *SERVED, "--server-memory", "200MiB", STAY)
    up(running, 2)
    for role, count in (("worker", 2), ("server", 1)):
        found = pods(lab, role=role)
        assert len(found) == count
        for pod in found:
            assert pod["spec"]["automountServiceAccountToken"] is False
            assert not pod["spec"].get("volumes")
            limits = pod["spec"]["containers"][0]["resources"].get("limits", {})
            assert limits == ({"memory": str(200 << 20)} if role == "server" else {})
    [secret] = lab.cluster.get("secrets")
    owners = {each["uid"] for each in secret["metadata"]["ownerReferences"]}
    assert owners == {job["metadata"]["uid"] for job in lab.cluster.get("jobs")}
    [text] = secret["data"].values()
    # Data of a Secret is in base64. Without a Secret in the cluster this would find nothing anywhere.
    text = base64.b64decode(text).decode()
    [folder] = (lab.home_folder / "state" / "distrun" / "jobs").iterdir()
    assert (folder / "engine" / "secret").read_text() == text + "\n"
    files = [folder / "coordinator.log", folder / "engine" / "jobs.json", folder / "engine.json"]
    dry = lab.launch("--dry-run", "-n", "1", "true")
    shown = [json.dumps(lab.cluster.get("jobs,pods,events")), running.out, running.err, *lab.commands(), dry.out]
    assert not [each for each in [*shown, *(file.read_text() for file in files)] if text in each]
    running.signal(signal.SIGINT)
    assert running.wait() == 130
    assert running.out.count("| bye\n") == 2
    gone_soon(lab)
    lab.nothing_stays()


@as_both
def test_a_job_that_waits_says_why_and_ctrl_c_deletes_it(lab: PodSite) -> None:
    running = lab.begin_launch("-n", "2", "-s", "0", "--worker-cores", "64", "hostname")
    wait_until(lambda: "3 Insufficient cpu" in running.err, 30, "the scheduler's words are told")
    assert "kubernetes: queued, 0 of 2 pods run; worker-0: 0/3 nodes are available" in running.err
    running.signal(signal.SIGINT)
    assert running.wait() == 130
    gone_soon(lab)


def kill_agents(lab: PodSite, node: str) -> None:
    """Kill the agents on a node, and their guards."""
    found = [each.pid for each in lab.strangers() if each.host == node and b"env:DISTRUN_POD" in each.command]
    assert found
    for pid in found:
        with contextlib.suppress(ProcessLookupError):  # it ended with its guard
            os.kill(pid, signal.SIGKILL)


def test_distrun_kill_returns_when_nothing_is_left_of_a_job_one_of_whose_pods_has_failed(lab: PodSite) -> None:
    running = lab.begin_launch(*SHORT, *APART, "--name", "mine", "-n", "2", "-s", "0", STAY)
    up(running, 2)
    os.kill(running.coordinator(), signal.SIGKILL)
    assert running.wait() == 8
    kill_agents(lab, pods(lab)[0]["spec"]["nodeName"])
    wait_until(lambda: "Failed" in [each["status"]["phase"] for each in pods(lab)], 30, "its pod has failed")
    killed = lab.distrun("kill", "mine")
    assert killed.code == 0, killed.err
    assert not [each for each in lab.cluster.left() if not each.startswith("secret/")]
    lab.nothing_stays()


def test_an_agent_that_is_killed_is_a_lost_place_and_no_job_that_was_deleted(lab: PodSite) -> None:
    running = lab.begin_launch(*SHORT, "-n", "1", "-s", "0", STAY)
    up(running, 1)
    kill_agents(lab, pods(lab)[0]["spec"]["nodeName"])
    assert running.wait() == 7, running.err
    assert "deleted by someone else" not in running.err
    lab.nothing_stays()


def test_a_job_that_waits_ends_when_one_of_its_pods_is_deleted(lab: PodSite) -> None:
    running = lab.begin_launch(*SHORT, "-n", "4", "-s", "0", "--worker-cores", "3", STAY)
    wait_until(lambda: "3 of 4 pods run" in running.err, 60, "one waits")
    name = next(each["metadata"]["name"] for each in pods(lab) if each["status"]["phase"] == "Running")
    lab.cluster.kubectl("delete", "pod", name, "--wait=false")
    assert running.wait() == 143, running.err
    assert "its pod was deleted by someone else" in running.err
    lab.nothing_stays()


@as_both
def test_a_job_whose_store_is_lost_is_found_by_its_labels(lab: PodSite) -> None:
    assert lab.launch("--detach", *SHORT, "-n", "2", "-s", "0", "--worker-cores", "64", "true").code == 0
    wait_until(lambda: lab.cluster.get("jobs"), 30, "the job is there")
    [told] = (lab.home_folder / "state" / "distrun" / "jobs").glob("*/launcher.json")
    lab.run("kill", "-KILL", str(json.loads(told.read_text())["pid"]))
    lab.run("rm", "-r", str(lab.home_folder / "state"))
    shown = lab.distrun("kill", "--launcher", "kubernetes", "--stale", "--dry-run")
    assert re.search(r"distrun-\S+ +there, launched on launcher", shown.out), shown.out
    done = lab.distrun("kill", "--launcher", "kubernetes", "--stale", "-y")
    assert done.code == 0, done.err
    lab.nothing_stays()


def test_a_killed_launcher_leaves_nothing(kind: str, lab: PodSite) -> None:
    running = lab.begin_launch(*FRAIL, "-n", "2", "-s", "0", STAY)
    up(running, 2)
    coordinator = running.coordinator()
    running.signal(signal.SIGKILL)
    os.kill(coordinator, signal.SIGKILL)
    wait_until(lambda: not lab.leftovers(), 30, "the agents have ended")
    # They have ended by themselves; Kubernetes keeps them for a time that is written in them.
    ends = {"Complete", "Completed", "Failed"}

    def have_ended() -> bool:
        told = [job["status"].get("conditions", ()) for job in lab.cluster.get(kind)]
        return all(ends & {each["type"] for each in conditions} for conditions in told)

    wait_until(have_ended, 30, "it has ended")
    assert [job["spec"]["ttlSecondsAfterFinished"] for job in lab.cluster.get(kind)] == [KEPT_S]


def test_a_job_that_waits_goes_when_its_launcher_is_killed_and_the_lease_is_over(kind: str, lab: PodSite) -> None:
    running = lab.begin_launch("-n", "2", "-s", "0", "--worker-cores", "64", "true")
    wait_until(lambda: "Insufficient" in running.err, 30, "it waits")
    [job] = lab.cluster.get("jobs")
    assert deadlines(lab) == [LEASE_S]
    coordinator = running.coordinator()
    running.signal(signal.SIGKILL)
    os.kill(coordinator, signal.SIGKILL)
    # The five minutes are made shorter, and so is the time that Kubernetes keeps what has ended.
    for what, name, spec in [
        (JOBS, job["metadata"]["name"], {"activeDeadlineSeconds": 1}),
        (kind, lab.cluster.get(kind)[0]["metadata"]["name"], {"ttlSecondsAfterFinished": 1}),
    ]:
        lab.cluster.kubectl("patch", what, name, "--type=merge", "-p", json.dumps({"spec": spec}))
    wait_until(lambda: not lab.cluster.left(), 30, "nothing is left in Kubernetes")


def test_a_job_whose_agents_are_connected_has_no_deadline_but_that_of_the_user(lab: PodSite) -> None:
    running = lab.begin_launch(*SHORT, "-n", "2", "-s", "0", STAY)
    up(running, 2)
    assert deadlines(lab) == [LEASE_S]
    wait_until(lambda: deadlines(lab) == [None], SETTLED_S + 30, "the lease is over")
    running.signal(signal.SIGINT)
    assert running.wait() == 130
    lab.nothing_stays()


def deadlines(lab: PodSite) -> list[int | None]:
    """What Kubernetes lets the job's Jobs last."""
    return [job["spec"].get("activeDeadlineSeconds") for job in lab.cluster.get("jobs")]


who_deletes = pytest.mark.parametrize(
    ("kind", "deleted"), [(JOBS, JOBS), (JOBSETS, JOBSETS), (JOBSETS, JOBS)], indirect=["kind"]
)
"""What someone else deletes. A JobSet makes its Jobs again, without pods."""


@who_deletes
def test_a_job_that_someone_else_deletes_is_told(kind: str, deleted: str, lab: PodSite) -> None:
    running = lab.begin_launch(*SHORT, "-n", "2", "-s", "0", STAY)
    up(running, 2)
    lab.cluster.kubectl("delete", deleted, "--all", "--wait=false")
    assert running.wait() == 143, running.err
    assert "Kubernetes: the Job was deleted by someone else" in running.err
    lab.nothing_stays()


def test_an_image_that_cannot_be_pulled_ends_the_job_when_kubernetes_pauses_before_the_next_attempt(
    lab: PodSite,
) -> None:
    done = lab.launch("-n", "2", "-s", "0", "--image", kubernetes.BAD_IMAGE, "true")
    assert done.code == 6, done.err
    assert re.search(r"the image cannot be pulled on h\d: ImagePullBackOff", done.err)
    assert kubernetes.BAD_IMAGE in done.err
    lab.nothing_stays()


def test_a_private_image_is_pulled_with_the_secret_that_is_named(lab: PodSite) -> None:
    where = f"--docker-server={kubernetes.PRIVATE_IMAGE.partition('/')[0]}"
    words = ("docker-registry", "mine", where, "--docker-username=a", "--docker-password=b")
    lab.cluster.kubectl("create", "secret", *words)
    image = ("--image", kubernetes.PRIVATE_IMAGE)
    assert lab.launch("-n", "1", "-s", "0", *image, "true").code == 6
    assert lab.launch("-n", "1", "-s", "0", *image, "--image-pull-secret", "mine", "true").code == 0


def test_a_namespace_quota_is_the_cause_and_nothing_is_left(lab: PodSite) -> None:
    lab.cluster.kubectl("create", "quota", "small", "--hard=pods=1")
    done = lab.launch("-n", "2", "-s", "0", "true")
    assert done.code == 5, done.err
    assert "no pod is allowed: exceeded quota: small, requested: pods=1, used: pods=1, limited: pods=1" in done.err
    assert "kubectl describe resourcequota" in done.err
    lab.cluster.kubectl("delete", "quota", "small")
    lab.nothing_stays()


def test_pod_security_is_the_cause_and_says_how_a_user_is_named(lab: PodSite) -> None:
    level = "pod-security.kubernetes.io/enforce"
    lab.cluster.kubectl("label", "namespace", kubernetes.NAMESPACE, f"{level}=restricted")
    try:
        done = lab.launch("-n", "1", "-s", "0", "true")
        assert done.code == 5, done.err
        assert "runAsNonRoot" in done.err
        assert "run_as = UID in [kubernetes]" in done.err
        done = lab.launch("-n", "1", "-s", "0", "id -u", env=configured(lab, "run_as = 1000"))
        assert done.code == 0, done.err
        assert done.out.endswith(" | 1000\n")
    finally:
        lab.cluster.kubectl("label", "namespace", kubernetes.NAMESPACE, f"{level}-")
    lab.nothing_stays()


def test_a_quota_of_memory_asks_for_what_each_task_needs(lab: PodSite) -> None:
    lab.cluster.kubectl("create", "quota", "memory", "--hard=limits.memory=1Gi")
    done = lab.launch("-n", "1", "-s", "0", "true")
    assert done.code == 5, done.err
    assert "must specify limits.memory" in done.err
    assert "--worker-memory" in done.err
    lab.cluster.kubectl("delete", "quota", "memory")
    lab.nothing_stays()


def test_a_volume_that_is_not_there_is_told_while_the_job_waits(lab: PodSite) -> None:
    running = lab.begin_launch("-n", "1", "-s", "0", "--volume", "configmap/none:/tmp/none", "true")
    wait_until(lambda: '"none" not found on h' in running.err, 60, "it is told")
    running.signal(signal.SIGINT)
    assert running.wait() == 130
    lab.nothing_stays()


def test_a_job_whose_launcher_was_killed_while_it_created_that_goes_by_itself(kind: str, lab: PodSite) -> None:
    golden = (
        ROOT / "tests" / "distrun" / "backends" / "kubernetes" / f"{'jobset' if kind == JOBSETS else 'plain'}.golden"
    )
    made = json.loads(golden.read_text().partition("$ kubectl")[0])
    made = [made] if kind == JOBSETS else made["items"]
    jobs = [each["template"] for each in made[0]["spec"]["replicatedJobs"]] if kind == JOBSETS else made
    # Both times are minutes, and made shorter here.
    for job in jobs:
        assert job["spec"]["parallelism"] == 0
        job["spec"]["activeDeadlineSeconds"] = 1
    for each in made:
        each["spec"]["ttlSecondsAfterFinished"] = 1
    lab.cluster.create(*made)
    wait_until(lambda: len(lab.cluster.get(JOBS)) == 2, 30, "the Jobs are there")
    wait_until(lambda: not lab.cluster.left(), 30, "nothing is left in Kubernetes")


def test_out_of_memory_is_explained(lab: PodSite) -> None:
    greedy = f"[ $DISTRUN_RANK = 0 ] && exec {GREEDY}; exec sleep 60"
    done = lab.launch(*SHORT, "--worker-memory", "200MiB", "-n", "2", "-s", "0", greedy)
    assert done.code == 137, done.err
    assert "Kubernetes: out of memory (OOMKilled); raise --worker-memory" in done.err
    assert re.search(r"h\d", done.err.splitlines()[-1])
    lab.nothing_stays()


@as_both
def test_the_only_pod_of_a_role_is_the_cause_though_a_jobset_then_ends_those_of_the_other_role(lab: PodSite) -> None:
    done = lab.launch(*SHORT, "--worker-memory", "200MiB", "-n", "1", *SERVED, f"echo up; exec {GREEDY}")
    assert done.code == 137, done.err
    assert "Kubernetes: out of memory (OOMKilled); raise --worker-memory" in done.err
    [host] = re.findall(r"^worker-0@(\S+) \| up", done.out, re.MULTILINE)
    assert host in done.err.splitlines()[-1]
    lab.nothing_stays()


def test_an_evicted_pod_is_explained(lab: PodSite) -> None:
    running = lab.begin_launch(*SHORT, "-n", "2", "-s", "0", "trap '' TERM; echo up; while :; do sleep 0.1; done")
    up(running, 2)
    node = pods(lab)[0]["spec"]["nodeName"]
    lab.cluster.evict(lab[node])
    assert running.wait() == 7, running.err
    assert "Kubernetes: evicted: The node was low on resource: memory" in running.err
    lab.nothing_stays()


def test_a_pod_of_a_node_that_is_drained_is_explained(lab: PodSite) -> None:
    # Its task takes longer to end than distrun looks at pods: the API forgets why a pod was evicted when it has gone.
    slow = "trap '' TERM; echo up; while :; do sleep 0.1; done"
    running = lab.begin_launch("--grace", "20", "-n", "2", "-s", "0", slow)
    up(running, 2)
    [name, _] = [pod["metadata"]["name"] for pod in pods(lab)]
    about = {"name": name, "namespace": kubernetes.NAMESPACE}
    asked = json.dumps({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": about})
    path = f"/api/v1/namespaces/{kubernetes.NAMESPACE}/pods/{name}/eviction"
    lab.cluster.kubectl("create", f"--raw={path}", "--filename=-", text=asked)
    assert running.wait() == 7, running.err
    assert "Kubernetes: evicted, as when its node is drained (EvictionByEvictionAPI)" in running.err
    lab.nothing_stays()


def test_a_preempted_pod_is_explained(lab: PodSite) -> None:
    urgent = {"metadata": {"name": "urgent"}, "value": 1000, "apiVersion": "scheduling.k8s.io/v1"}
    container = {"name": "one", "image": "debian:12", "command": ["true"], "resources": {"limits": {"cpu": 3}}}
    pod = {"restartPolicy": "Never", "priorityClassName": "urgent", "containers": [container]}
    running = lab.begin_launch(*SHORT, "-n", "3", "-s", "0", "--worker-cores", "3", STAY)
    up(running, 3)
    lab.cluster.create({"kind": "PriorityClass", **urgent})
    try:
        lab.cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "urgent"}, "spec": pod})
        assert running.wait() == 7, running.err
        assert "Kubernetes: preempted by a pod of higher priority" in running.err
    finally:
        lab.cluster.kubectl("delete", "pod,priorityclass", "urgent")
    lab.nothing_stays()


def test_a_lost_node_is_named(lab: PodSite) -> None:
    running = lab.begin_launch(*FRAIL, *APART, "-n", "2", "-s", "0", STAY)
    up(running, 2)
    [first, second] = sorted(pod["spec"]["nodeName"] for pod in pods(lab))
    assert first != second, "--engine-arg is part of the pods"
    lab[second].poweroff()
    assert running.wait() == 7, running.err
    assert second in running.err.splitlines()[-1]
    wait_until(lambda: not lab.cluster.left(), 60, "nothing is left in Kubernetes")


@as_both
def test_the_time_limit_is_explained(lab: PodSite) -> None:
    running = lab.begin_launch(*SHORT, "--time", "15s", "-n", "2", "-s", "0", "echo up; exec sleep 200")
    up(running, 2)
    assert running.wait() == 124, running.err
    assert "raise --time" in running.err
    lab.nothing_stays()


def test_pods_that_cannot_reach_the_coordinator_are_told_and_what_helps(lab: PodSite) -> None:
    done = lab.launch("-n", "1", "-s", "0", "--coordinator-address", "203.0.113.9", "true")
    assert done.code == 3, done.err
    assert re.search(r"its agent did not reach the coordinator at 203\.0\.113\.9:\d+ within 45 s", done.err)
    assert "--coordinator-address" in done.err
    assert "distrun template render kubernetes-launcher" in done.err
    lab.nothing_stays()


def test_volumes_selectors_and_tolerations_decide_where_and_with_what_tasks_run(lab: PodSite) -> None:
    lab.cluster.kubectl("label", "node", "h2", "disk=fast")
    lab.cluster.kubectl("taint", "node", "h2", "dedicated=ml:NoSchedule")
    lab.cluster.kubectl("create", "configmap", "settings", "--from-literal=rate=0.5")
    size = {"resources": {"requests": {"storage": "1Mi"}}, "accessModes": ["ReadWriteOnce"], "storageClassName": ""}
    meta, path = {"name": "mine", "namespace": kubernetes.NAMESPACE}, {"path": "/var/tmp/volume"}
    spec = {"capacity": {"storage": "1Mi"}, "accessModes": ["ReadWriteOnce"], "hostPath": path}
    lab.cluster.create(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "mine"}, "spec": spec},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": {**size, "volumeName": "mine"}},
    )
    try:
        words = ("--node-selector", "disk=fast", "--toleration", "dedicated=ml:NoSchedule")
        words += ("--volume", "configmap/settings:/tmp/settings:ro", "--volume", "empty:/tmp/scratch")
        words += ("--volume", "pvc/mine:/tmp/claimed", "--volume", "/var/tmp/volume:/tmp/of-node")
        words += ("--worker-gpus", "1")
        writes = "cat /tmp/settings/rate && touch /tmp/scratch/a && touch /tmp/claimed/b && ls /tmp/of-node"
        done = lab.launch(*words, "-n", "1", "-s", "0", writes)
        assert done.code == 0, done.err
        assert "worker-0@h2 | 0.5b\n" in done.out
    finally:
        lab.cluster.kubectl("taint", "node", "h2", "dedicated-")
        lab.cluster.kubectl("label", "node", "h2", "disk-")
        lab.cluster.kubectl("delete", "configmap", "settings")
        lab.cluster.kubectl("delete", "persistentvolumeclaim,persistentvolume", "mine", "--wait=false")
    lab.nothing_stays()


def test_the_digits_train_without_a_shared_folder_and_with_roles_of_different_needs(lab: PodSite) -> None:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install scikit-learn")
    (lab.work / "digits.py").write_bytes((ROOT / "examples" / "digits.py").read_bytes())
    needs = ("-n", "2", "--worker-cores", "1", *SERVED, "--server-memory", "300MiB", "--sync-dst-dir", "/tmp/digits")
    script = (sys.executable, "digits.py", "--kv-store", "dist_sync", "--epochs", "1")
    done = lab.launch(*needs, "--env", "OMP_NUM_THREADS=1", *script, cwd=lab.work)
    assert done.code == 0, done.err
    assert set(re.findall(r"worker-(\d)@\S+ \| Epoch 0: ", done.out)) == {"0", "1"}
    lab.nothing_stays()


@pytest.mark.parametrize("kind", [JOBSETS], indirect=True)
def test_where_jobsets_controller_does_not_run_a_job_is_not_left_waiting_for_it(kind: str, lab: PodSite) -> None:
    for each in lab.processes():
        if each.name == kubernetes.JOBSET:
            os.kill(each.pid, signal.SIGKILL)
    words = ("-v", "-n", "1", "-s", "0", "true")
    try:
        done = lab.launch(*words)
        assert done.code == 0, done.err
        assert "(jobs)" in done.err, "a JobSet is not taken without an answer of its webhook"
        hooks = "mutatingwebhookconfiguration,validatingwebhookconfiguration"
        lab.cluster.kubectl("delete", hooks, kubernetes.JOBSET)
        done = lab.launch(*words)
        assert done.code == 5, done.err
        assert f"({kind})" in done.err
        assert "nothing has made the Jobs of this one within 20 s" in done.err
        assert "jobset = false in [kubernetes]" in done.err
        lab.nothing_stays()
        done = lab.launch(*words, env=configured(lab, "jobset = false"))
        assert done.code == 0, done.err
        assert "(jobs)" in done.err
    finally:
        lab.cluster.begin(kubernetes.JOBSET)
        lab.cluster.add_webhooks()
    lab.nothing_stays()


def test_doctor_says_what_is_there_and_which_right_is_missing(kind: str, lab: PodSite) -> None:
    done = lab.distrun("doctor", "--launcher", "kubernetes")
    assert done.code == 0, done.out
    assert f"namespace {kubernetes.NAMESPACE}" in done.out
    assert f"JobSets are {'used' if kind == JOBSETS else 'not used: '}" in done.out
    missing = lab.distrun("doctor", "--launcher", "kubernetes", "--namespace", "default")
    assert missing.code == 3
    assert "this user may not: create jobs" in missing.out


def test_another_namespace_is_refused_with_what_to_ask_for(lab: PodSite) -> None:
    done = lab.launch("-n", "1", "-s", "0", "--namespace", "default", "true")
    assert done.code == 5, done.err
    assert 'cannot create resource "jobs"' in done.err
    assert "distrun doctor --launcher kubernetes" in done.err


def test_inside_the_cluster_kubectl_needs_no_configuration(lab: PodSite) -> None:
    account = lab.file(ACCOUNT_FOLDER)
    account.mkdir(parents=True)
    certificate = lab.file(kubernetes.STATE) / "certs" / "apiserver.crt"
    (account / "ca.crt").write_text(certificate.read_text())
    (account / "namespace").write_text(kubernetes.NAMESPACE)
    (account / "token").write_text(lab.cluster.kubectl("create", "token", "user").strip())
    server = {"KUBERNETES_SERVICE_HOST": kubernetes.ADDRESS, "KUBERNETES_SERVICE_PORT": str(kubernetes.PORT)}
    env = {"KUBECONFIG": "/nowhere", **server}
    try:
        running = lab.begin_launch(*SHORT, "-n", "2", "-s", "0", "--name", "inner", STAY, env=env)
        up(running, 2)
        shown = lab.distrun("doctor", "--launcher", "kubernetes", env=env).out
        assert f"inside the cluster; namespace {kubernetes.NAMESPACE}" in shown
        assert lab.distrun("kill", "inner", env=env).code == 0
        assert running.wait() == 143
    finally:
        shutil.rmtree(account)
    lab.nothing_stays()


def test_a_pod_without_python_is_told_at_once(lab: PodSite) -> None:
    done = lab.launch("-n", "1", "-s", "0", "true", env=configured(lab, "python = '/none/python3'"))
    assert done.code == 6, done.err
    assert re.search(r"the container cannot start: \w+: .*/none/python3", done.err)
    lab.nothing_stays()


def test_the_api_server_accepts_all_that_options_can_make(kind: str, lab: PodSite) -> None:
    golden = ROOT / "tests" / "distrun" / "backends" / "kubernetes"
    made, jobset = (
        json.loads((golden / f"{name}.golden").read_text().partition("$ kubectl")[0]) for name in ("all", "jobset")
    )
    if kind == JOBSETS:
        for replicated, job in zip(jobset["spec"]["replicatedJobs"], made["items"], strict=True):
            replicated["template"]["spec"]["template"] = job["spec"]["template"]
        made = jobset
    told = lab.cluster.kubectl("create", "--dry-run=server", "--filename=-", text=json.dumps(made))
    assert told.count("created (server dry run)") == (1 if kind == JOBSETS else 2)


def configured(lab: PodSite, line: str) -> dict[str, str]:
    """The variables of a launch with a line in the section of the configuration file."""
    config = lab.home_folder / "config" / "distrun"
    config.mkdir(parents=True)
    (config / "config.toml").write_text(f"[kubernetes]\n{line}\n")
    return {"XDG_CONFIG_HOME": str(config.parent)}
