"""The Kubernetes cluster of the lab itself: a real control plane, whose nodes do what a kubelet does."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes
import pytest
from distrun_cli import wait_until
from kubernetessite import TEST_S, KubernetesSite, site

pytestmark = [pytest.mark.engine, pytest.mark.timeout(TEST_S)]

LIMIT_S = 60.0
GRACE_S = 3
INDEX = "batch.kubernetes.io/job-completion-index"
STAY = "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.1; done"


@pytest.fixture(scope="module")
def cluster() -> Iterator[KubernetesSite]:
    yield from site(3)


@pytest.fixture
def lab(cluster: KubernetesSite, tmp_path: Path) -> Iterator[KubernetesSite]:
    cluster.begin(tmp_path)
    yield cluster
    cluster.end()


def begin(lab: KubernetesSite, script: str, count: int = 1, pod: Any = None, volume: Any = None, **more: Any) -> None:
    """Create, as the user, an Indexed Job whose pods run a shell script, on a node each.

    `pod` and `more` add to the pod's and the container's specification; `volume` is at /run/volume.
    """
    one = {"name": "main", "image": "debian:12", "command": ["sh", "-c", script], **more}
    one["volumeMounts"] = [{"name": "volume", "mountPath": "/run/volume"}]
    one.setdefault("env", []).append({"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    apart = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
    spec_of_pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        "containers": [one],
        "volumes": [{"name": "volume", **(volume or {"emptyDir": {}})}],
        "topologySpreadConstraints": [{**apart, "labelSelector": {"matchLabels": {"job-name": "job"}}}],
        **(pod or {}),
    }
    spec = {
        "completions": count,
        "parallelism": count,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": spec_of_pod},
    }
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": spec}
    made = lab.run("kubectl", "create", "-f", write(lab, job))
    assert made.code == 0, made.err


def write(lab: KubernetesSite, what: Any) -> str:
    path = lab.work / "object.json"
    path.write_text(json.dumps(what))
    return str(path)


def pods(lab: KubernetesSite) -> list[dict[str, Any]]:
    """The pods of the job by their index."""
    return sorted(lab.cluster.get("pods"), key=lambda pod: int(pod["metadata"]["annotations"][INDEX]))


def state(pod: dict[str, Any]) -> dict[str, Any]:
    """What the kubelet says of the container of a pod."""
    return dict((pod["status"].get("containerStatuses") or [{}])[0].get("state", {}))


def shown(lab: KubernetesSite, is_true: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
    """Wait until something is true of a pod, and return that pod."""

    def found() -> dict[str, Any]:
        return next((pod for pod in pods(lab) if is_true(pod)), {})

    pod: dict[str, Any] = wait_until(found, LIMIT_S, what)
    return pod


def running(lab: KubernetesSite, count: int) -> None:
    wait_until(lambda: [pod["status"]["phase"] for pod in pods(lab)] == ["Running"] * count, LIMIT_S, "all pods run")


def condition(lab: KubernetesSite) -> str:
    """How the job ended, once it has: the condition's type and reason."""

    def found() -> str:
        [job] = lab.cluster.get("jobs")
        ends = [each for each in job["status"].get("conditions", ()) if each["type"] in ("Complete", "Failed")]
        return " ".join((ends[0]["type"], ends[0]["reason"])) if ends else ""

    return str(wait_until(found, LIMIT_S, "the job has ended"))


def test_the_pods_of_a_job_run_on_all_nodes_and_one_that_fails_gives_its_exit_code(lab: KubernetesSite) -> None:
    begin(lab, 'echo "$JOB_COMPLETION_INDEX $ADDRESS $(hostname)"; until [ -e /tmp/go ]; do sleep 0.1; done; exit 7', 3)
    running(lab, 3)
    nodes = [pod["spec"]["nodeName"] for pod in pods(lab)]
    assert sorted(nodes) == ["h1", "h2", "h3"]
    lab[nodes[1]].exec("touch", "/tmp/go")
    assert condition(lab) == "Failed BackoffLimitExceeded"
    pod = next(pod for pod in pods(lab) if pod["metadata"]["annotations"][INDEX] == "1")
    assert state(pod)["terminated"]["exitCode"] == 7
    told = lab.run("kubectl", "logs", pod["metadata"]["name"])
    assert told.out == f"1 {lab[nodes[1]].address} job-1\n", told.err


def test_a_pod_above_its_memory_is_killed(lab: KubernetesSite) -> None:
    begin(lab, "head -c 200M /dev/zero | tail | sleep 60", resources={"limits": {"memory": "64Mi"}})
    pod = shown(lab, lambda pod: state(pod).get("terminated"), "it has ended")
    assert (state(pod)["terminated"]["reason"], state(pod)["terminated"]["exitCode"]) == ("OOMKilled", 137)


def test_a_pod_of_a_node_that_is_short_of_memory_is_evicted(lab: KubernetesSite) -> None:
    begin(lab, STAY, 3)
    running(lab, 3)
    lab.cluster.evict(lab["h2"])
    pod = shown(lab, lambda pod: pod["status"].get("reason") == "Evicted", "one is evicted")
    assert (pod["spec"]["nodeName"], pod["status"]["phase"]) == ("h2", "Failed")


@pytest.mark.parametrize("image", [kubernetes.BAD_IMAGE, kubernetes.PRIVATE_IMAGE])
def test_an_image_that_cannot_be_pulled_is_tried_again(lab: KubernetesSite, image: str) -> None:
    begin(lab, STAY, image=image)
    reasons = ("ErrImagePull", "ImagePullBackOff")
    for reason in reasons:
        pod = shown(lab, lambda pod: state(pod).get("waiting", {}).get("reason") == reason, reason)  # noqa: B023
        assert pod["status"]["phase"] == "Pending"


def test_a_pod_waits_for_its_secret_and_gets_it_as_variable_and_file(lab: KubernetesSite) -> None:
    word = {"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "mine", "key": "word"}}}
    begin(
        lab, 'test "$WORD $(cat /run/volume/word)" = "hush hush"', volume={"secret": {"secretName": "mine"}}, env=[word]
    )
    shown(lab, lambda pod: "waiting" in state(pod), "it waits")
    meta = {"name": "mine"}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": {"word": "hush"}}
    assert lab.run("kubectl", "create", "-f", write(lab, secret)).code == 0
    assert condition(lab) == "Complete CompletionsReached"


def test_a_private_image_is_pulled_with_its_secret(lab: KubernetesSite) -> None:
    where = f"--docker-server={kubernetes.PRIVATE_IMAGE.partition('/')[0]}"
    words = ("docker-registry", "mine", where, "--docker-username=a", "--docker-password=b")
    assert lab.run("kubectl", "create", "secret", *words).code == 0
    begin(lab, "true", pod={"imagePullSecrets": [{"name": "mine"}]}, image=kubernetes.PRIVATE_IMAGE)
    assert condition(lab) == "Complete CompletionsReached"


def test_a_folder_of_the_node_is_mounted_as_such_and_by_a_claim(lab: KubernetesSite) -> None:
    path = {"path": "/var/tmp/volume", "type": "DirectoryOrCreate"}
    size = {"resources": {"requests": {"storage": "1Mi"}}, "accessModes": ["ReadWriteOnce"], "storageClassName": ""}
    meta, core = {"name": "mine", "namespace": kubernetes.NAMESPACE}, "v1"
    spec = {"capacity": {"storage": "1Mi"}, "accessModes": ["ReadWriteOnce"], "hostPath": path}
    lab.cluster.create(
        {"apiVersion": core, "kind": "PersistentVolume", "metadata": {"name": "mine"}, "spec": spec},
        {"apiVersion": core, "kind": "PersistentVolumeClaim", "metadata": meta, "spec": {**size, "volumeName": "mine"}},
    )
    begin(lab, "echo hello >/run/volume/file", pod={"nodeName": "h2"}, volume={"hostPath": path})
    assert condition(lab) == "Complete CompletionsReached"
    assert lab["h2"].exec("cat", "/var/tmp/volume/file") == "hello\n"
    assert lab.run("kubectl", "delete", "job", "job").code == 0
    claim = {"persistentVolumeClaim": {"claimName": "mine"}}
    begin(lab, "grep hello /run/volume/file", pod={"nodeName": "h2"}, volume=claim)
    assert condition(lab) == "Complete CompletionsReached"
    lab.cluster.kubectl("delete", "persistentvolume", "mine", "--wait=false")


def test_a_pod_reaches_the_api_with_the_rights_of_its_account(lab: KubernetesSite) -> None:
    kubectl = kubernetes.programs() / "kubectl"
    account = {"serviceAccountName": "user", "automountServiceAccountToken": True}
    begin(lab, f"{kubectl} get pods -o name && ! {kubectl} get nodes", pod=account)
    shown(lab, lambda pod: "terminated" in state(pod), "it has ended")
    [pod] = pods(lab)
    name = pod["metadata"]["name"]
    told = lab.run("kubectl", "logs", name).out
    assert state(pod)["terminated"]["exitCode"] == 0, told
    assert told.startswith(f"pod/{name}\n")
    assert 'User "system:serviceaccount:team:user" cannot list resource "nodes"' in told


def test_a_program_that_is_not_there_and_one_that_fails_are_told_apart(lab: KubernetesSite) -> None:
    begin(lab, "", command=["no-such-program"])
    first = state(shown(lab, lambda pod: state(pod).get("terminated"), "it has ended"))["terminated"]
    assert (first["exitCode"], first["reason"]) == (128, "StartError")
    assert lab.run("kubectl", "delete", "job", "job").code == 0
    lab.nothing_stays()
    begin(lab, "echo why; exit 3", terminationMessagePolicy="FallbackToLogsOnError")
    second = state(shown(lab, lambda pod: state(pod).get("terminated"), "it has ended"))["terminated"]
    assert (second["exitCode"], second["reason"], second["message"]) == (3, "Error", "why\n")


def test_a_pod_runs_as_the_user_that_it_names(lab: KubernetesSite) -> None:
    begin(lab, 'test "$(id -u) $(id -G)" = "1000 1000"', securityContext={"runAsUser": 1000})
    assert condition(lab) == "Complete CompletionsReached"


def test_each_pod_gets_gpus_of_its_own(lab: KubernetesSite) -> None:
    pod = {"nodeName": "h1", "topologySpreadConstraints": []}
    begin(lab, f"echo $NVIDIA_VISIBLE_DEVICES; {STAY}", 2, pod=pod, resources={"limits": {"nvidia.com/gpu": 1}})
    running(lab, 2)

    def told() -> list[str]:
        return sorted(lab.run("kubectl", "logs", "--selector=job-name=job").out.split())

    wait_until(lambda: told() == ["0", "1", "up", "up"], LIMIT_S, "each has told its own")


def test_a_node_that_vanishes_is_not_ready_and_is_again_after_it_has_booted(lab: KubernetesSite) -> None:
    begin(lab, STAY, 3)
    running(lab, 3)
    lab["h3"].poweroff()
    wait_until(lambda: lab.cluster.ready() == {"h1", "h2"}, LIMIT_S, "it is missed")
    lab["h3"].boot()
    lab.cluster.start(lab["h3"])
    pod = shown(lab, lambda pod: state(pod).get("terminated"), "its pod is reported")
    assert (pod["spec"]["nodeName"], pod["status"]["phase"]) == ("h3", "Failed")


def test_deleting_a_job_asks_its_pods_to_end_and_leaves_nothing(lab: KubernetesSite) -> None:
    begin(lab, STAY, 3)
    running(lab, 3)
    [name, *_] = [pod["metadata"]["name"] for pod in pods(lab)]
    follows = lab.spawn("kubectl", "logs", "--follow", name)
    wait_until(lambda: follows.out == "up\n", LIMIT_S, "it shows the log")
    assert lab.run("kubectl", "delete", "job", "job").code == 0
    lab.nothing_stays()
    assert follows.wait() == 0
    assert follows.out == "up\nbye\n"


def test_a_program_that_does_not_handle_sigterm_is_killed_after_its_grace_period(lab: KubernetesSite) -> None:
    begin(lab, "exec sleep 1000")
    running(lab, 1)
    began = time.monotonic()
    assert lab.run("kubectl", "delete", "job", "job").code == 0
    lab.nothing_stays()
    assert time.monotonic() > began + GRACE_S


def test_the_user_may_do_no_more_than_a_launch_needs(lab: KubernetesSite) -> None:
    assert lab.run("kubectl", "auth", "can-i", "create", "jobs").out == "yes\n"
    for words in (("get", "nodes"), ("create", "jobs", "--namespace", "default"), ("create", "pods")):
        assert lab.run("kubectl", "auth", "can-i", *words).out == "no\n", words


def test_a_cluster_that_is_down_has_left_no_process() -> None:
    with contextlib.closing(site(1)) as made:
        lab = next(made)
        there = {(each.pid, started(each.pid)): each.name for each in lab.processes()}
        assert {"etcd", "kube-apiserver", "kube-scheduler", "kube-controller"} <= set(there.values())
    wait_until(lambda: not [pid for pid, when in there if when and started(pid) == when], LIMIT_S, "all have ended")


def started(pid: int) -> str:
    """When a process was started, which tells it from a later one of its number; nothing if there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19]
    return ""
