"""Jobs on a real Kubernetes control plane that fail, are ended or never begin: what is told, and that nothing stays."""

from __future__ import annotations

import json
import os
import re
import signal

import kubernetes
import pytest
from backendcontract import STAY
from kubernetessite import TEST_S
from lab import ROOT, wait_until
from podsite import (
    APART,
    FRAIL,
    GREEDY,
    SERVED,
    SHORT,
    PodSite,
    as_both,
    cluster,
    configured,
    deadlines,
    kill_agents,
    kind,
    lab,
    pods,
    up,
)

from distrun.backends.kubernetes import JOBS, JOBSETS, KEPT_S, LEASE_S

__all__ = ["cluster", "kind", "lab"]
pytestmark = [pytest.mark.engine, pytest.mark.timeout(TEST_S)]


def test_distrun_kill_returns_when_nothing_is_left_of_a_job_one_of_whose_pods_has_failed(lab: PodSite) -> None:
    running = lab.begin_launch(*SHORT, *APART, "--name", "mine", "-n", "2", "-s", "0", STAY)
    up(running, 2)
    os.kill(running.coordinator(), signal.SIGKILL)
    assert running.wait() == 8
    kill_agents(lab, pods(lab)[0]["spec"]["nodeName"])
    wait_until(lambda: "Failed" in [each["status"]["phase"] for each in pods(lab)], 30, "its pod has failed")
    killed = lab.distrun("kill", "mine")
    assert killed.code == 0, killed.err
    assert not [each for each in lab.cluster.left() if not each.startswith("secrets/")]
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
        each["spec"]["ttlSecondsAfterFinished"] = 3  # so that they are seen
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
    # Its tasks take longer to end than distrun looks at pods.
    slow = "trap 'sleep 4; exit' TERM; echo up; while :; do sleep 0.1; done"
    running = lab.begin_launch("--grace", "10", "-n", "3", "-s", "0", "--worker-cores", "3", slow)
    up(running, 3)
    names = {each["metadata"]["name"] for each in pods(lab)}
    lab.cluster.create({"kind": "PriorityClass", **urgent})
    try:
        lab.cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "urgent"}, "spec": pod})
        assert running.wait() == 7, running.err
        assert "Kubernetes: preempted by a pod of higher priority" in running.err
    finally:
        lab.cluster.kubectl("delete", "pod,priorityclass", "urgent")
    # A pod may go before distrun looks at it. This event stays.
    [event] = lab.cluster.get("events", fieldSelector="reason=Preempted")
    assert event["involvedObject"]["name"] in names
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


def test_a_pod_without_python_is_told_at_once(lab: PodSite) -> None:
    done = lab.launch("-n", "1", "-s", "0", "true", env=configured(lab, "python = '/none/python3'"))
    assert done.code == 6, done.err
    assert re.search(r"the container cannot start: \w+: .*/none/python3", done.err)
    lab.nothing_stays()
