"""Jobs on a real Kubernetes control plane, by a user with the rights that the backend names, in one namespace."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import sys

import kubernetes
import pytest
from backendcontract import STAY, BackendContract
from kubernetessite import TEST_S
from lab import ROOT, wait_until
from podsite import (
    ACCOUNT_FOLDER,
    SERVED,
    SHORT,
    PodSite,
    as_both,
    cluster,
    configured,
    deadlines,
    gone_soon,
    kind,
    lab,
    pods,
    up,
)

from distrun.backends.kubernetes import JOBSETS, LEASE_S, SETTLED_S

__all__ = ["cluster", "kind", "lab"]
pytestmark = [pytest.mark.engine, pytest.mark.timeout(TEST_S)]


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


def test_a_job_whose_agents_are_connected_has_no_deadline_but_that_of_the_user(lab: PodSite) -> None:
    running = lab.begin_launch(*SHORT, "-n", "2", "-s", "0", STAY)
    up(running, 2)
    assert deadlines(lab) == [LEASE_S]
    wait_until(lambda: deadlines(lab) == [None], SETTLED_S + 30, "the lease is over")
    running.signal(signal.SIGINT)
    assert running.wait() == 130
    lab.nothing_stays()


def test_a_private_image_is_pulled_with_the_secret_that_is_named(lab: PodSite) -> None:
    where = f"--docker-server={kubernetes.PRIVATE_IMAGE.partition('/')[0]}"
    words = ("docker-registry", "mine", where, "--docker-username=a", "--docker-password=b")
    lab.cluster.kubectl("create", "secret", *words)
    image = ("--image", kubernetes.PRIVATE_IMAGE)
    assert lab.launch("-n", "1", "-s", "0", *image, "true").code == 6
    assert lab.launch("-n", "1", "-s", "0", *image, "--image-pull-secret", "mine", "true").code == 0


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
