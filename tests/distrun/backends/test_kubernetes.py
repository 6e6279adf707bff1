"""The Kubernetes engine, as far as it needs no cluster: what is created, and what the cluster's own words mean.

The files in `kubernetes/*.json` were printed by kubectl from a real API server, scheduler and controllers 1.34.4,
without `managedFields`; what a kubelet writes came from the one of the tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrun.backends import kubernetes_answers as answers
from distrun.backends.bootstrap import Bootstrap
from distrun.backends.engine import (
    ENDED,
    QUEUED,
    RUNNING,
    EngineError,
    Explanation,
    QueueStatus,
    RoleGroup,
    Submission,
    examined,
)
from distrun.backends.kubernetes import (
    LEASE_S,
    NAME_LENGTH,
    SETTLED_S,
    JobDeadline,
    Kubernetes,
    KubernetesPreparation,
    base_name,
    owned_secret,
    selector_of,
    toleration_of,
    too_big,
    volumes_of,
)
from distrun.backends.kubernetes_answers import Objects, Reason
from distrun.errors import UsageError
from distrun.request import EngineOptions, Needs
from distrun_runtime.contract.plan import SERVER, WORKER

HERE = Path(__file__).parent / "kubernetes"
JOB = "calm-otter-7f3"
MARKER = "distrun-calm-otter-7f3-0123456789abcdef"


def options(worker: Needs = Needs(), server: Needs = Needs(), **more: Any) -> EngineOptions:  # noqa: B008
    own = {name: value for name, value in more.items() if name not in ("config", "args", "time_s")}
    rest = {name: value for name, value in more.items() if name not in own}
    return EngineOptions(worker=worker, server=server, own={"image": "python:3.12", **own}, **rest)


def submission(asked: EngineOptions, marker: str = MARKER) -> Submission:
    return Submission(
        job=JOB,
        marker=marker,
        groups=(RoleGroup(SERVER, 1, asked.server), RoleGroup(WORKER, 2, asked.worker)),
        options=asked,
        bootstrap=Bootstrap(JOB, "{certificate}", ("10.0.0.1:4711",), 120.0),
        folder=Path("/users/ann/jobs/engine"),
        cwd="/users/ann/work",
        secret="5ec4e7",
        found=KubernetesPreparation(context="gpu-cluster", user="0123456789abcdef", host="head"),
    )


def rendered(asked: Submission) -> str:
    """Return the Jobs without the bootstrap's program, and the commands."""
    engine = Kubernetes()
    engine.options = asked.options
    script = engine.render(asked)
    program = json.dumps(asked.bootstrap.command("python3", "p", "s")[3])
    text = script.files["jobs.json"].replace(program, '"PROGRAM"')
    return text + "".join(f"$ {' '.join(argv)}\n" for argv in script.commands)


# ------------------------------------------------------------------ what is created


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("plain", options()),
        (
            "all",
            options(
                Needs(4, 8 << 30, 2),
                Needs(2),
                namespace="team",
                image="ghcr.io/me/train@sha256:0123456789abcdef",
                image_pull_secret="registry",
                volume=(
                    "pvc/data:/data:ro",
                    "configmap/settings:/etc/train",
                    "/mnt/nvme:/scratch",
                    "empty:/tmp/work",
                    "memory:/dev/shm",
                ),
                gpu_resource="amd.com/gpu",
                node_selector=("disk=fast", "topology.kubernetes.io/zone=a"),
                toleration=("dedicated=ml:NoSchedule", "nvidia.com/gpu", "spot:NoExecute"),
                args=('{"priorityClassName": "high", "securityContext": {"supplementalGroups": [7]}}',),
                config={"run_as": "1000"},
            ),
        ),
    ],
)
def test_the_jobs_and_the_commands_are_these(name: str, asked: EngineOptions) -> None:
    assert rendered(submission(asked)) == (HERE / f"{name}.golden").read_text()


def test_the_secret_is_owned_by_the_jobs_and_in_no_file_and_no_command() -> None:
    asked = submission(options())
    assert "5ec4e7" not in rendered(asked)
    jobs = [answers.RoleJob.of(each) for each in json.loads((HERE / "running.json").read_text())["items"][:2]]
    secret = owned_secret(asked, jobs)
    assert [each["uid"] for each in secret["metadata"]["ownerReferences"]] == [each.uid for each in jobs]
    assert secret["stringData"] == {"enrolment": "5ec4e7"}
    assert secret["metadata"]["name"] == MARKER


@pytest.mark.parametrize("marker", [MARKER, "distrun-" + "a" * 30 + "-0123456789abcdef", "distrun-a-" + "b" * 46])
def test_host_names_of_pods_have_at_most_63_characters_and_the_marker_s_nonce(marker: str) -> None:
    name = base_name(marker)
    assert len(f"{name}-worker-65535") <= 63
    assert len(name) <= NAME_LENGTH
    assert name.startswith("distrun-")
    assert name[-16:] == marker[-16:]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (options(image=""), "--image is missing"),
        (options(image="two words"), "--image: expected the name of an image"),
        (options(image_pull_secret="Registry"), "--image-pull-secret: expected a Secret's name; found 'Registry'"),
        (options(volume=("data:/data",)), "--volume: expected SOURCE:DIR[:ro]"),
        (options(volume=("pvc/data:data",)), "--volume: expected SOURCE:DIR[:ro]"),
        (options(volume=("pvc/:/data",)), "--volume: expected SOURCE:DIR[:ro]"),
        (options(volume=("empty:/a:rw",)), "--volume: expected SOURCE:DIR[:ro]"),
        (options(volume=("empty:/a", "memory:/a")), "--volume memory:/a: /a is given twice"),
        (options(node_selector=("disk",)), "--node-selector: expected KEY=VALUE"),
        (options(node_selector=("disk=fast", "disk=slow")), "--node-selector disk=slow: disk is fast already"),
        (options(toleration=("a=b:Never",)), "--toleration: expected KEY[=VALUE][:EFFECT]"),
        (options(gpu_resource="gpu"), "--gpu-resource: expected a resource's name such as nvidia.com/gpu"),
        (options(config={"run_as": "root"}), "run_as =: expected a user id above 0; found 'root'"),
        (options(args=("--priority",)), "--engine-arg --priority: expected JSON"),
        (options(args=("[]",)), "--engine-arg []: expected a JSON object"),
        (options()._replace(queue="gpu"), "--queue has no meaning here: Kubernetes has no such queues"),
        (options(namespace="Team"), "--namespace: expected a namespace's name; found 'Team'"),
    ],
)
def test_an_option_that_cannot_be_is_named_before_anything_is_created(asked: EngineOptions, message: str) -> None:
    with pytest.raises(UsageError) as found:
        Kubernetes().prepare(submission(asked))
    assert message in str(found.value)


WORDS = st.lists(
    st.sampled_from(["pvc", "empty", "memory", "configmap", "/", ":", "ro", "a", "B", "=", ".", "$(X)", "\n"])
)


@given(st.builds(str.__add__, st.sampled_from(["empty:/", "pvc/a:/", "/a:/", "a=", ""]), WORDS.map("".join)))
def test_whatever_is_typed_is_a_usage_error_or_what_the_api_takes(text: str) -> None:
    with contextlib.suppress(UsageError):
        [mount], [volume] = volumes_of([text])
        assert mount["mountPath"].startswith("/")
        assert not {":", "\n"} & set(mount["mountPath"])
        assert len(volume) == 2
    with contextlib.suppress(UsageError):
        [(key, value)] = selector_of([text]).items()
        assert f"{key}={value}" == text
    with contextlib.suppress(UsageError):
        toleration = toleration_of(text)
        assert (toleration["operator"] == "Equal") == ("=" in text) == ("value" in toleration)


def test_without_kubectl_a_job_is_only_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = submission(options())
    assert Kubernetes().prepare(dataclasses.replace(asked, is_dry=True)) == KubernetesPreparation()
    with pytest.raises(EngineError, match="kubectl is not on this machine") as found:
        Kubernetes().prepare(asked)
    assert "kubectl = PATH in [kubernetes]" in found.value.hint
    [only] = examined(Kubernetes())
    assert not only.ok


def test_a_task_that_no_node_has_room_for_is_told() -> None:
    nodes = answers.room((HERE / "nodes.json").read_text(), "nvidia.com/gpu")
    assert nodes == [Needs(4, 4 << 30, 2)] * 3
    assert too_big(submission(options(Needs(4, 1 << 30, 2))), nodes) == ""
    told = too_big(submission(options(Needs(5, 0, 1))), nodes)
    assert told == "no node of the cluster has 5 cores and 1 GPUs for a worker: the job waits until there is one"


@pytest.mark.parametrize(
    ("text", "number"), [("4", 4), ("3920m", 3), ("16Gi", 16 << 30), ("129M", 129_000_000), ("1e3", 1000), ("x", 0)]
)
def test_quantities_of_the_api_are_read(text: str, number: int) -> None:
    assert answers.quantity(text) == number


# ------------------------------------------------------------------ the lease


def test_the_deadline_of_a_job_that_waits_is_put_off_before_it_comes() -> None:
    lease = JobDeadline(1000.0, None)
    assert lease.renewed(1050.0, None) == LEASE_S
    later = lease.renewed(1150.0, None)
    assert later == 150 + LEASE_S
    assert lease._replace(granted_s=later).renewed(1160.0, None) == later


@pytest.mark.parametrize(
    ("time_s", "after_s", "deadline_s"),
    [
        (None, 10.0, 450),
        (None, SETTLED_S, None),
        (3600.0, 10.0, 450),
        (3600.0, SETTLED_S, 200 + 3600),
        (20.0, 10.0, 200 + 20),
        (20.0, SETTLED_S, 200 + 20),
    ],
)
def test_once_the_agents_are_connected_the_deadline_is_the_users(
    time_s: float | None, after_s: float, deadline_s: int | None
) -> None:
    lease = JobDeadline(1000.0, time_s, granted_s=450)
    assert lease.renewed(1200.0 + after_s, 1200.0) == deadline_s


# ------------------------------------------------------------------ how a job stands


def objects(name: str) -> Objects:
    return Objects.of((HERE / f"{name}.json").read_text())


def standing(name: str) -> QueueStatus:
    return answers.standing(objects(name))


def test_pending_pods_say_what_the_scheduler_says() -> None:
    found = standing("pending")
    assert found.state == QUEUED
    assert found.text.startswith("0 of 3 pods run; ")
    assert "-0: 0/3 nodes are available: 3 Insufficient cpu" in found.text
    assert answers.stuck(objects("pending")) == ""


def test_a_job_runs_when_all_its_pods_do_and_each_is_a_place_for_one_task() -> None:
    found = standing("running")
    assert found.state == RUNNING
    assert {each.place: dict(each.takes) for each in found.grants} == {
        "server-0": {"server": 1},
        "worker-0": {"worker": 1},
        "worker-1": {"worker": 1},
    }
    assert {each.node for each in found.grants} <= {"h1", "h2", "h3"}
    assert not found.gone


def test_a_pod_without_an_image_ends_the_job_before_it_has_run() -> None:
    found = standing("image")
    assert found.state == ENDED
    assert found.why is not None
    assert found.why.code == 6
    assert "the image cannot be pulled on h" in found.why.text


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("oom", 137, "Kubernetes: out of memory (OOMKilled); raise --worker-memory"),
        ("evicted", 7, "Kubernetes: evicted: The node was low on resource: memory"),
    ],
)
def test_what_kubernetes_did_to_a_pod_is_the_explanation_of_its_place(name: str, code: int, text: str) -> None:
    found = objects(name)
    [place] = [pod.place for pod in found.pods if pod.phase == "Failed"]
    told = answers.explanation(found, place)
    assert told is not None
    assert told.code == code
    assert told.text.startswith(text)
    assert answers.explanation(found, "worker-9") != told
    assert answers.standing(found, {"worker-0", "worker-1"}).gone.keys() == {place}
    assert answers.standing(found).state == ENDED


def test_a_quota_is_a_refusal_and_other_warnings_are_not() -> None:
    warning = answers.warned((HERE / "quota.json").read_text())
    assert warning.word == "FailedCreate"
    assert answers.refusal(warning) == "exceeded quota: small, requested: pods=1, used: pods=1, limited: pods=1"
    assert answers.refusal(warning._replace(word="FailedMount")) == ""
    late = 'pods "x" is forbidden: error looking up service account team/default: serviceaccount not found'
    assert answers.refusal(Reason("FailedCreate", late)) == ""
    assert answers.warned('{"items": []}') == Reason()


def pod(**status: Any) -> answers.Pod:
    """A worker's pod on h2 with this status, as the API reference has it."""
    labels = {answers.ROLE_LABEL: "worker"}
    about = {"name": "p", "labels": labels, "annotations": {answers.INDEX: "0"}, **status.pop("metadata", {})}
    return answers.Pod.of({"metadata": about, "spec": {"nodeName": "h2"}, "status": status})


def ended(**state: Any) -> list[dict[str, Any]]:
    return [{"state": {"terminated": state}}]


def disrupted(reason: str) -> list[dict[str, str]]:
    return [{"type": "DisruptionTarget", "status": "True", "reason": reason}]


@pytest.mark.parametrize(
    ("found", "code", "lost", "words"),
    [
        (pod(phase="Failed", conditions=disrupted("PreemptionByScheduler")), 7, "", "higher priority"),
        (pod(phase="Failed", conditions=disrupted("DeletionByTaintManager")), 7, "h2", "its node h2 is lost"),
        (pod(phase="Failed", reason="NodeShutdown", message="Node is shutting down"), 7, "", "NodeShutdown: Node is"),
        (
            pod(phase="Failed", containerStatuses=ended(reason="StartError", exitCode=128, message="no python3")),
            6,
            "",
            "cannot start: StartError: no python3",
        ),
        (
            pod(phase="Failed", containerStatuses=ended(reason="Error", exitCode=6, message="distrun: no coordinator")),
            6,
            "",
            "the agent did not start: distrun: no coordinator",
        ),
    ],
)
def test_other_reasons_of_pods_are_told(found: answers.Pod, code: int, lost: str, words: str) -> None:
    told = found.explanation()
    assert told is not None
    assert (told.code, told.lost) == (code, lost)
    assert words in told.text


@pytest.mark.parametrize(
    "found", [pod(phase="Running"), pod(phase="Failed", containerStatuses=ended(reason="Error", exitCode=9))]
)
def test_an_ordinary_end_has_no_explanation(found: answers.Pod) -> None:
    assert found.explanation() is None


def test_a_job_or_pod_that_was_deleted_by_others_ends_with_143() -> None:
    gone = answers.explanation(Objects((), ()), "worker-0")
    assert gone == Explanation(143, "Kubernetes: the Job was deleted by someone else")
    running = objects("running")
    one_less = running._replace(pods=[each for each in running.pods if each.place != "worker-1"])
    assert answers.explanation(one_less, "worker-0") is None
    told = answers.explanation(one_less, "worker-1")
    assert told is not None
    assert told.code == 143
    assert answers.standing(one_less, {"worker-0", "worker-1"}).gone == {"worker-1": "its pod was deleted"}


def test_a_pod_that_has_gone_is_explained_by_what_was_last_seen_of_it() -> None:
    evicted = objects("evicted")
    [failed] = [each for each in evicted.pods if each.phase == "Failed"]
    now = evicted._replace(pods=[each for each in evicted.pods if each is not failed])
    seen = evicted.then(now)
    assert {each.place for each in seen.pods} == {"worker-0", "worker-1"}
    told = answers.explanation(now, failed.place, seen.pods)
    assert told is not None
    assert told.code == 7


def test_a_job_whose_time_is_over_ends_with_124() -> None:
    found = objects("deadline")
    told = answers.explanation(found, "worker-0")
    assert told == Explanation(124, "Kubernetes: the job reached its time limit; raise --time")
    assert answers.standing(found, {"worker-0", "worker-1"}).state == ENDED
    waited = answers.standing(found)
    assert (waited.state, waited.why) == (ENDED, None)
    assert "did not put off its deadline for 5 minutes" in waited.text


def test_a_node_that_is_not_ready_is_lost_and_says_why() -> None:
    node = json.loads((HERE / "nodes.json").read_text())["items"][0]
    assert answers.lost_node(json.dumps(node)) == ""
    for each in node["status"]["conditions"]:
        if each["type"] == "Ready":
            each.update(status="Unknown", reason="NodeStatusUnknown", message="Kubelet stopped posting node status.")
    assert answers.lost_node(json.dumps(node)) == "NodeStatusUnknown: Kubelet stopped posting node status."
    unready = pod(phase="Running", conditions=[{"type": "Ready", "status": "False"}])
    assert unready.may_be_lost
