"""The Kubernetes engine, as far as it needs no cluster: what is created, and what the cluster's own words mean.

The files in `kubernetes/*.json` were printed by kubectl from a real API server, scheduler and controllers 1.34.4,
without `managedFields`; what a kubelet writes came from the one of the tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrun.backends import kubernetes as engines
from distrun.backends import kubernetes_answers as answers
from distrun.backends.bootstrap import Bootstrap
from distrun.backends.engine import (
    ENDED,
    QUEUED,
    RUNNING,
    EngineError,
    Explanation,
    Handle,
    QueueStatus,
    RoleGroup,
    Script,
    Submission,
    examined,
)
from distrun.backends.kubernetes import (
    JOBS,
    JOBSETS,
    LEASE_S,
    NAME_LENGTH,
    SETTLED_S,
    JobLease,
    Kubernetes,
    KubernetesPreparation,
    base_name,
    owned_secret,
    selector_of,
    toleration_of,
    volumes_of,
)
from distrun.backends.kubernetes_answers import Objects, Reason
from distrun.backends.queue import QueueBackend
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


def submission(asked: EngineOptions, marker: str = MARKER, kind: str = JOBS) -> Submission:
    return Submission(
        job=JOB,
        marker=marker,
        groups=(RoleGroup(SERVER, 1, asked.server), RoleGroup(WORKER, 2, asked.worker)),
        options=asked,
        bootstrap=Bootstrap(JOB, "{certificate}", ("10.0.0.1:4711",), 120.0),
        folder=Path("/users/ann/jobs/engine"),
        cwd="/users/ann/work",
        secret="5ec4e7",
        found=KubernetesPreparation(kind=kind, context="gpu-cluster", user="0123456789abcdef", host="head"),
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


def test_each_pod_of_a_role_gets_gpus_of_its_own() -> None:
    """Each task is a pod, and a limit counts for one pod."""
    made = engines.jobs(submission(options(Needs(gpus=2))))["items"]
    specs = [(job["spec"]["completions"], job["spec"]["template"]["spec"]["containers"]) for job in made]
    found = [(count, container["resources"]["limits"]) for count, (container,) in specs]
    assert found == [(1, {}), (2, {"nvidia.com/gpu": 2})]


def test_a_jobset_has_the_same_jobs_and_they_get_their_pods_the_same_way() -> None:
    shown = rendered(submission(options(), kind=JOBSETS))
    assert shown == (HERE / "jobset.golden").read_text()
    jobset = json.loads(shown.partition("$ kubectl")[0])
    jobs = json.loads((HERE / "plain.golden").read_text().partition("$ kubectl")[0])["items"]
    for replicated, job in zip(jobset["spec"]["replicatedJobs"], jobs, strict=True):
        del job["metadata"]["name"], job["spec"]["ttlSecondsAfterFinished"], job["apiVersion"], job["kind"]
        assert replicated["template"] == job


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
    assert len(f"{name}-worker-0-65535-abcde") <= 63
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
        (options(config={"jobset": "never"}), "jobset =: expected yes or no; found 'never'"),
        (options(args=("--priority",)), "--engine-arg --priority: expected JSON"),
        (options(args=("[]",)), "--engine-arg []: expected a JSON object"),
        (options()._replace(queue="gpu"), "--queue has no meaning here: Kubernetes has no such queues"),
        (options(volume=("/data/../etc:/a",)), "--volume /data/../etc:/a: the API refuses paths with '..'"),
        (options(volume=("empty:/a/..",)), "--volume empty:/a/..: the API refuses paths with '..'"),
        (options(node_selector=("größe=a",)), "--node-selector: expected KEY=VALUE"),
        (options(args=('{"containers": []}',)), "--engine-arg: containers cannot be replaced"),
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
    assert "kubectl = 'PATH' in [kubernetes]" in found.value.hint
    [only] = examined(Kubernetes())
    assert not only.ok


def kubectl(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a kubectl that runs a script of the shell, with the whole command as $*, where `~` is."""
    monkeypatch.setenv("HOME", str(folder))
    (folder / "kubectl").write_text(f"#!/bin/sh\ncase $* in\n{script}\n*whoami*) echo ann ;;\n*) exit 1 ;;\nesac\n")
    (folder / "kubectl").chmod(0o755)


TELLS = {"kubectl": "~/kubectl"}
VIEW = "*'config view'*) printf 'gpu\\nteam' ;;"
NODES = f"*'get nodes'*) cat {HERE / 'nodes.json'} ;;"


def test_a_task_that_no_node_has_room_for_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = answers.room((HERE / "nodes.json").read_text(), "nvidia.com/gpu")
    assert nodes == [Needs(4, 4 << 30, 2)] * 3
    kubectl(tmp_path, monkeypatch, f"{VIEW}\n{NODES}")
    assert Kubernetes().prepare(submission(options(Needs(4, 1 << 30, 2), config=TELLS))).note == ""
    found = Kubernetes().prepare(submission(options(Needs(5, 0, 1), config=TELLS)))
    text = "--worker-cores: 5 asked for, but no node of the cluster has more than 4: the job waits until there is one"
    assert found.note == text


def test_context_and_namespace_are_known_before_the_job_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl(tmp_path, monkeypatch, VIEW)
    asked = submission(options(config=TELLS))
    asked = dataclasses.replace(asked, found=Kubernetes().prepare(asked))
    more = {"context": "gpu", "namespace": "team", "kind": "jobs"}
    assert Kubernetes().handle(asked) == Handle("kubernetes", MARKER, more)


FORBIDDEN = 'Error from server (Forbidden): jobsets.jobset.x-k8s.io is forbidden: User "ann" cannot create resource'
NO_KIND = "error: resource mapping not found: no matches for kind JobSet in version jobset.x-k8s.io/v1alpha2"


@pytest.mark.parametrize(
    ("answer", "config", "kind"),
    [
        ("cat >~/taken", {}, JOBSETS),
        ("cat >~/taken", {"jobset": "no"}, JOBS),
        (f"echo '{FORBIDDEN}' >&2; exit 1", {}, JOBS),
        (f"echo '{NO_KIND}' >&2; exit 1", {}, JOBS),
    ],
    ids=["it is taken", "the user does not want one", "the user may not", "the cluster has none"],
)
def test_a_job_is_a_jobset_if_the_cluster_takes_it_as_one(
    answer: str, config: dict[str, str], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl(tmp_path, monkeypatch, f"{VIEW}\n*'--context=gpu --namespace=team create --dry-run=server'*) {answer} ;;")
    asked = submission(options(config={**TELLS, **config}))
    assert Kubernetes().prepare(asked).kind == kind
    if kind == JOBSETS:
        shown = json.loads((tmp_path / "taken").read_text())
        assert (shown["kind"], shown["metadata"]["name"]) == ("JobSet", MARKER)
    assert (tmp_path / "taken").exists() == (kind == JOBSETS)


def test_doctor_says_whether_jobsets_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = """*version*) echo '{"major": "1", "minor": "34", "gitVersion": "v1.34.4"}' ;;"""
    engine = Kubernetes()
    engine.options = options(config=TELLS)
    served = "*'get --raw=/apis/jobset.x-k8s.io/v1alpha2') ;;"
    refused = "jobsets.jobset.x-k8s.io') echo no; exit 1 ;;"
    for answer, told, is_ok in [
        (served, "used if the cluster takes them", True),
        ("*--raw=/apis*) echo 'Error: not found' >&2; exit 1 ;;", "not used: kubectl says: Error: not found", True),
        (f"{served}\n*'create {refused}", "not used: this user may not create them", True),
        (f"{served}\n*'delete {refused}", "used, but this user may not delete them", False),
    ]:
        kubectl(tmp_path, monkeypatch, f"{version}\n{VIEW}\n{answer}\n*can-i*) echo yes ;;")
        [line] = [each for each in examined(engine) if each.text.startswith("JobSets are ")]
        assert (line.text, line.ok) == (f"JobSets are {told}", is_ok)
    engine.options = options(config={**TELLS, "jobset": "no"})
    assert "JobSets are not used: jobset = false" in [each.text for each in examined(engine)]


def listed(kind: str, marker: str, conditions: str) -> str:
    """What kubectl prints of one Job or JobSet."""
    about = {"labels": {answers.JOB_LABEL: marker}, "namespace": "team", "annotations": {answers.HOST_NOTE: "head"}}
    status = {"conditions": [{"type": conditions, "status": "True"}]}
    return json.dumps({"items": [{"kind": kind, "metadata": about, "status": status}]})


@pytest.mark.parametrize(
    ("jobsets", "found"),
    [
        (f"echo '{listed('JobSet', 'distrun-a', 'Completed')}'", [(JOBSETS, "distrun-a", "ended, launched on head")]),
        (
            f"echo '{listed('JobSet', 'distrun-b', 'Suspended')}'",
            [(JOBSETS, "distrun-b", "there, launched on head"), (JOBS, "distrun-a", "there, launched on head")],
        ),
        ("echo 'error: no resource type' >&2; exit 1", [(JOBS, "distrun-a", "there, launched on head")]),
    ],
    ids=["the Jobs are those of a JobSet", "a JobSet has no Jobs as yet", "the cluster has no JobSets"],
)
def test_a_job_whose_store_is_lost_is_found_as_what_is_to_be_deleted(
    jobsets: str, found: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = f"*'get jobs '*) echo '{listed('Job', 'distrun-a', 'Suspended')}' ;;"
    kubectl(tmp_path, monkeypatch, f"{VIEW}\n*'get jobsets'*) {jobsets} ;;\n{jobs}")
    engine = Kubernetes()
    engine.options = options(config=TELLS)
    assert [(each.handle.more["kind"], each.marker, each.state) for each in engine.find()] == found


def test_jobs_of_jobsets_that_this_user_may_not_list_are_not_taken_for_jobs_and_kill_tells_the_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = json.loads(listed("Job", "distrun-a", "Suspended"))
    job["items"][0]["metadata"]["ownerReferences"] = [{"kind": "JobSet", "name": "distrun-a"}]
    refused = FORBIDDEN.replace("create", "list")
    answer = f"*'get jobsets'*) echo '{refused}' >&2; exit 1 ;;\n*'get jobs '*) echo '{json.dumps(job)}' ;;"
    kubectl(tmp_path, monkeypatch, f"{VIEW}\n{answer}\n*'get jobs,pods'*) echo '{{\"items\": []}}' ;;")
    engine = Kubernetes()
    engine.options = options(config=TELLS)
    [found] = engine.find()
    assert found.handle.more["kind"] == JOBSETS
    with pytest.raises(EngineError, match='User "ann" cannot list resource') as caught:
        QueueBackend(engine).cancelled(found.handle)
    assert "ask the administrators for a Role" in caught.value.hint


def test_jobsets_that_are_not_told_just_now_are_not_taken_for_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl(tmp_path, monkeypatch, f"{VIEW}\n*'get jobsets'*) echo 'error: timeout' >&2; exit 1 ;;")
    engine = Kubernetes()
    engine.options = options(config=TELLS)
    with pytest.raises(EngineError, match="timeout"):
        engine.find()


def test_a_user_whose_name_the_cluster_does_not_tell_just_now_gets_no_other_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = submission(options(config=TELLS))
    kubectl(tmp_path, monkeypatch, f"{VIEW}\n*whoami*) echo 'error: the server is currently busy' >&2; exit 1 ;;")
    with pytest.raises(EngineError, match="busy"):
        Kubernetes().prepare(asked)
    kubectl(tmp_path, monkeypatch, f"{VIEW}\n*whoami*) echo 'the selfsubjectreviews API is not enabled' >&2; exit 1 ;;")
    assert Kubernetes().prepare(asked).user


def test_doctor_tells_a_missing_right_from_a_question_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = """*version*) echo '{"major": "1", "minor": "34", "gitVersion": "v1.34.4"}' ;;"""
    engine = Kubernetes()
    engine.options = options(config=TELLS)
    kubectl(tmp_path, monkeypatch, f"{version}\n{VIEW}\n*'create jobs') echo no; exit 1 ;;\n*can-i*) echo yes ;;")
    assert "this user may not: create jobs" in [each.text for each in examined(engine)]
    kubectl(tmp_path, monkeypatch, f"{version}\n{VIEW}\n*can-i*) echo 'error: timeout' >&2; exit 1 ;;")
    assert [*examined(engine)][-1].text == "kubectl says: error: timeout"


def test_a_namespace_that_cannot_be_is_refused_by_doctor_and_kill() -> None:
    engine = Kubernetes()
    engine.options = options(namespace="--all")
    with pytest.raises(UsageError, match="expected a namespace's name"):
        engine.find()


@pytest.mark.parametrize(
    ("text", "number"), [("4", 4), ("3920m", 3), ("16Gi", 16 << 30), ("129M", 129_000_000), ("1e3", 1000), ("x", 0)]
)
def test_quantities_of_the_api_are_read(text: str, number: int) -> None:
    assert answers.quantity(text) == number


# ------------------------------------------------------------------ the lease


def test_the_lease_of_a_job_that_waits_is_renewed_before_it_ends() -> None:
    lease = JobLease(1000.0, None)
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
    lease = JobLease(1000.0, time_s, granted_s=450)
    assert lease.renewed(1200.0 + after_s, 1200.0) == deadline_s
    assert lease._replace(granted_s=None).renewed(2000.0, 1200.0) == (time_s and 200 + time_s)


@pytest.mark.parametrize(
    ("time_s", "granted_s", "ran_at", "limit"),
    [
        (None, LEASE_S, None, answers.FORGOTTEN),
        (None, LEASE_S, 1010.0, answers.FORGOTTEN),
        (3600.0, LEASE_S, None, answers.FORGOTTEN),
        (3600.0, LEASE_S, 1010.0, answers.FORGOTTEN),
        (3600.0, 3610, 1010.0, answers.TIME_LIMIT),
        (20.0, 30, 1010.0, answers.TIME_LIMIT),
    ],
)
def test_a_deadline_is_the_time_limit_only_if_it_was_set_for_that(
    time_s: float | None, granted_s: int, ran_at: float | None, limit: Explanation
) -> None:
    assert JobLease(1000.0, time_s, granted_s).limit(ran_at) == limit


# ------------------------------------------------------------------ how a job stands


def objects(name: str) -> Objects:
    return Objects.of((HERE / f"{name}.json").read_text())


def standing(name: str) -> QueueStatus:
    return answers.standing(objects(name), objects(name))


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


@pytest.mark.parametrize(
    ("word", "text", "is_final"),
    [
        ("ErrImagePull", "dial tcp: lookup registry.invalid: no such host", False),
        ("ErrImagePull", "429 Too Many Requests", False),
        ("ErrImagePull", "docker.io/library/none: not found", True),
        ("ErrImagePull", "pull access denied, insufficient_scope", True),
        ("ErrImagePull", "401 Unauthorized", True),
        ("ImagePullBackOff", "Back-off pulling image", True),
        ("InvalidImageName", "", True),
    ],
)
def test_a_pod_whose_image_cannot_be_pulled_ends_the_job_before_it_has_run(
    word: str, text: str, is_final: bool
) -> None:
    image = objects("image")
    image = image._replace(pods=[dataclasses.replace(each, waits=Reason(word, text)) for each in image.pods])
    found = answers.standing(image, image)
    if is_final:
        assert found.state == ENDED
        assert found.why.code == 6
        assert "the image cannot be pulled on h" in found.why.text
    else:
        assert found.state == QUEUED
        assert word in found.text


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
    told = answers.explanation(found, found, place)
    assert told.code == code
    assert told.text.startswith(text)
    assert answers.explanation(found, found, "worker-9") != told
    assert answers.standing(found, found, has_run=True).gone.keys() == {place}
    waits = answers.standing(found, found)
    assert (waits.state, waits.why) == (ENDED, told)


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
    sidecar = {"name": "istio-proxy", "state": {"running": {}}}
    return [sidecar, {"name": "agent", "state": {"terminated": state}}]


NO_PROGRAM = 'container create failed: exec: "python3": executable file not found in $PATH'


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
        (
            pod(
                containerStatuses=[
                    {"name": "agent", "state": {"waiting": {"reason": "CreateContainerError", "message": NO_PROGRAM}}}
                ]
            ),
            6,
            "",
            "cannot start: CreateContainerError: container create failed",
        ),
    ],
)
def test_other_reasons_of_pods_are_told(found: answers.Pod, code: int, lost: str, words: str) -> None:
    told = found.explanation()
    assert (told.code, told.lost) == (code, lost)
    assert words in told.text


@pytest.mark.parametrize(
    "found", [pod(phase="Running"), pod(phase="Failed", containerStatuses=ended(reason="Error", exitCode=9))]
)
def test_an_ordinary_end_has_no_explanation(found: answers.Pod) -> None:
    assert found.explanation() is None


DELETED = Explanation(143, "Kubernetes: the Job was deleted by someone else")


def without(found: Objects, place: str) -> Objects:
    """The objects when the pod of a place has gone."""
    return found._replace(pods=[each for each in found.pods if each.place != place])


def test_a_job_or_pod_that_was_deleted_by_others_ends_with_143() -> None:
    running = objects("running")
    assert answers.explanation(Objects((), ()), running, "worker-0") == DELETED
    one_less = without(running, "worker-1")
    assert answers.explanation(one_less, running, "worker-0") is None
    told = answers.explanation(one_less, running, "worker-1")
    assert told.code == 143
    assert answers.standing(one_less, running, has_run=True).gone == {"worker-1": "its pod was deleted"}


def test_a_job_that_waits_ends_when_one_of_its_jobs_is_deleted() -> None:
    seen = objects("pending")
    left = Objects(seen.jobs[1:], [each for each in seen.pods if each.role == "worker"])
    assert answers.standing(left, seen) == QueueStatus(ENDED, DELETED.text, why=DELETED)


def test_jobs_that_a_jobset_has_ended_end_for_the_reason_of_the_one_that_failed() -> None:
    seen = objects("oom")
    [pod] = [pod for pod in seen.pods if pod.explanation()]
    why = pod.explanation()
    assert why is not None
    failed = Reason("FailedIndexes", "")
    worker = dataclasses.replace(seen.jobs[0], failed=failed, is_over=True)
    server = dataclasses.replace(worker, name="server", role="server", failed=Reason(), is_over=False)
    going = dataclasses.replace(server, is_deleted=True)
    for left in ([worker], [worker, going]):
        found = seen._replace(jobs=left)
        seen_all = seen._replace(jobs=[worker, server])
        assert answers.explanation(found, seen_all, "server-0") == why._replace(lost=pod.node)
        assert answers.explanation(found, seen_all, "worker-9") != why
        killed = dataclasses.replace(pod, ended=Reason("Error", ""), code=137)
        told = answers.explanation(found, seen_all._replace(pods=[killed]), "server-0")
        assert told == Explanation(7, "Kubernetes: its pod has failed: Error", pod.node)
        both = [dataclasses.replace(killed, name="first", place="worker-1"), pod]
        told = answers.explanation(found, seen_all._replace(pods=both), "server-0")
        assert told == why._replace(lost=pod.node), "the one that says why counts, not the first one"
        assert answers.explanation(found, seen_all._replace(pods=[]), "server-0") is None
        assert answers.explanation(found, seen_all._replace(pods=[]), "") is None
    assert answers.explanation(seen._replace(jobs=[server]), seen_all, "server-0") == DELETED


def failed_index(found: Objects, index: int) -> Objects:
    """The objects when the pod of a worker has failed or has gone, as its Job then says."""
    jobs = [
        dataclasses.replace(job, failed_place=f"worker-{index}" if job.role == "worker" else "") for job in found.jobs
    ]
    return without(found._replace(jobs=jobs), f"worker-{index}")


def test_a_job_that_waits_ends_when_one_of_its_pods_has_gone() -> None:
    seen = objects("running")
    found = answers.standing(failed_index(seen, 1), seen)
    assert found.state == ENDED
    assert found.text.startswith("worker-1: Kubernetes: its pod was deleted by someone else")
    assert found.why.code == 143
    preempted = dataclasses.replace(
        pod(phase="Running", conditions=disrupted("PreemptionByScheduler"), metadata={"name": seen.pods[2].name}),
        place="worker-1",
    )
    found = answers.standing(failed_index(seen, 1), seen.then(Objects((), [preempted])))
    assert found.why.code == 7


def test_the_first_failed_place_is_read_from_the_job() -> None:
    value = json.loads((HERE / "running.json").read_text())["items"][1]
    assert answers.RoleJob.of(value).failed_place == ""
    value["status"]["failedIndexes"] = "1,3-5"
    assert answers.RoleJob.of(value).failed_place == "worker-1"


def test_a_pod_that_is_to_go_does_not_run() -> None:
    seen = objects("running")
    going = seen._replace(pods=[*seen.pods[:2], dataclasses.replace(seen.pods[2], is_deleted=True)])
    assert answers.standing(going, going).text == "2 of 3 pods run"


def test_a_pod_that_has_gone_is_explained_by_what_was_last_seen_of_it() -> None:
    evicted = objects("evicted")
    [failed] = [each for each in evicted.pods if each.phase == "Failed"]
    now = without(evicted, failed.place)
    seen = evicted.then(now)
    assert {each.place for each in seen.pods} == {"worker-0", "worker-1"}
    told = answers.explanation(now, seen, failed.place)
    assert told.code == 7


def test_a_job_whose_time_is_over_ends_with_124_and_one_whose_lease_is_over_with_7() -> None:
    found = objects("deadline")
    assert answers.TIME_LIMIT.code == 124
    assert answers.explanation(found, found, "worker-0", answers.TIME_LIMIT) == answers.TIME_LIMIT
    assert answers.standing(found, found, has_run=True).state == ENDED
    waited = answers.standing(found, found)
    assert (waited.state, waited.why) == (ENDED, answers.FORGOTTEN)
    assert answers.FORGOTTEN.code == 7


def test_a_node_that_is_not_ready_is_lost_and_says_why() -> None:
    node = json.loads((HERE / "nodes.json").read_text())["items"][0]
    assert answers.lost_node(json.dumps(node)) == ""
    for each in node["status"]["conditions"]:
        if each["type"] == "Ready":
            each.update(status="Unknown", reason="NodeStatusUnknown", message="Kubelet stopped posting node status.")
    assert answers.lost_node(json.dumps(node)) == "NodeStatusUnknown: Kubelet stopped posting node status."
    unready = pod(phase="Running", conditions=[{"type": "Ready", "status": "False"}])
    assert unready.may_be_lost


# ------------------------------------------------------------------ looking, renewing, deleting


class Recorded(Kubernetes):
    """The engine with a cluster that says what a test sets, at a time that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        super().__init__()
        self.now = 1000.0
        self.found: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text())
        self.asked: list[str] = []
        self.fails: set[str] = set()
        self.goes_with = "pods"
        """What is deleted when all has gone."""
        self.events: list[dict[str, Any]] = []
        self.jobset = ""
        """What kubectl prints of JobSets."""
        self.node = json.dumps({"status": {"conditions": []}})
        monkeypatch.setattr(engines, "clock", lambda: self.now)
        monkeypatch.setattr(engines, "tries", lambda _: range(3))
        self.submit(submission(options()), Script(commands=(("create",), ("secret",), ("patch",))))
        self.asked.clear()

    def _ask(self, handle: Handle | None, *words: str) -> str:
        self.asked.append(" ".join(words[:3]))
        if words[1] in self.fails:
            raise EngineError(f"kubectl says: {words[1]} is forbidden")
        if words[:2] == ("delete", self.goes_with):
            self.found["items"] = []
        if words[:2] == ("get", JOBSETS):
            return self.jobset
        if words[:2] == ("get", "node"):
            return self.node
        return json.dumps({"items": self.events} if words[1] == "events" else self.found)

    def _run(self, argv: Sequence[str], text: str = "") -> str:  # type: ignore[override]
        self.asked.append(argv[0])
        return ""

    def sees(self) -> QueueStatus:
        """Look, later than the pause for many pods."""
        self.now += 10
        return self.look(HANDLE)

    def counts(self, words: str) -> int:
        return sum(each.startswith(words) for each in self.asked)


HANDLE = Handle("kubernetes", MARKER, {"context": "", "namespace": "team", "kind": JOBS})


@pytest.mark.parametrize("fails", [set(), {"events"}], ids=["events", "no right to list events"])
def test_a_job_that_waits_has_its_lease_renewed_and_needs_no_events(
    fails: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Recorded(monkeypatch, "image")
    engine.fails = fails
    assert engine.sees().state == QUEUED
    assert not engine.counts("patch")
    engine.now += LEASE_S / 2
    assert engine.sees().state == QUEUED
    assert engine.counts("patch job") == 1
    assert engine.counts("get events") == 2


def test_looking_at_a_job_that_has_ended_deletes_nothing_and_its_cause_stays_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Recorded(monkeypatch, "oom")
    assert engine.sees().state == ENDED
    assert not engine.counts("delete")
    engine.fails = {"jobs,pods"}
    told = engine.explain(HANDLE, "worker-0")
    assert told.code == 137


@pytest.mark.parametrize("has_run", [True, False], ids=["runs", "waits"])
def test_a_pod_that_was_preempted_and_has_gone_before_it_was_looked_at_is_explained_by_an_event(
    has_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Recorded(monkeypatch, "running")
    items = engine.found["items"]
    if not has_run:
        items[-1]["status"]["phase"] = "Pending"
    assert engine.sees().state == (RUNNING if has_run else QUEUED)
    [pod] = [each for each in answers.Objects.of(json.dumps(engine.found)).pods if each.place == "worker-0"]
    engine.found["items"] = [each for each in items if each["metadata"]["name"] != pod.name]
    if not has_run:
        [job] = [
            each for each in items if each["kind"] == "Job" and each["metadata"]["labels"]["distrun/role"] == "worker"
        ]
        job["status"]["failedIndexes"] = "0"
    engine.events = [{"reason": "Preempted", "type": "Normal", "involvedObject": {"kind": "Pod", "name": pod.name}}]
    if not has_run:
        found = engine.sees()
        assert (found.state, found.why.code) == (ENDED, 7)
        assert "preempted by a pod of higher priority" in found.text
    told = engine.explain(HANDLE, "worker-0")
    assert told.code == 7
    assert told.text.startswith("Kubernetes: preempted by a pod of higher priority")
    engine.fails = {"events"}
    assert engine.explain(HANDLE, "worker-0") == told


def test_a_pod_that_has_gone_and_no_event_says_why_was_deleted_by_someone_else(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Recorded(monkeypatch, "running")
    assert engine.sees().state == RUNNING
    assert not engine.counts("get events")
    *rest, _ = engine.found["items"]
    engine.found["items"] = rest
    for fails in (set(), {"events"}):
        engine.fails = fails
        assert engine.explain(HANDLE, "worker-1").code == 143
    assert engine.counts("get events") == 2


def test_what_a_job_that_has_ended_leaves_is_deleted_by_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Recorded(monkeypatch, "oom")
    engine.goes_with = "jobs"
    assert QueueBackend(engine).cancelled(HANDLE)
    assert engine.counts("delete jobs") == 1
    assert not QueueBackend(engine).cancelled(HANDLE)
    assert engine.counts("delete jobs") == 1


@pytest.mark.parametrize(
    ("slept_s", "why"), [(10.0, DELETED), (LEASE_S + 1.0, answers.FORGOTTEN)], ids=["awake", "slept"]
)
def test_jobs_that_went_while_this_machine_slept_were_not_deleted_by_others(
    slept_s: float, why: Explanation, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Recorded(monkeypatch, "pending")
    assert engine.sees().state == QUEUED
    engine.found["items"] = []
    engine.now += slept_s
    found = engine.sees()
    assert (found.state, found.why) == (ENDED, why)
    assert engine.explain(HANDLE, "") == why


def test_jobs_that_went_while_they_ran_and_this_machine_slept_are_not_told_as_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Recorded(monkeypatch, "running")
    assert engine.sees().state == RUNNING
    engine.found["items"] = []
    engine.now += LEASE_S + 1
    found = engine.sees()
    assert (found.state, found.text, found.why) == (
        ENDED,
        "its Jobs ended and were deleted while this machine slept",
        None,
    )


def test_a_question_that_fails_after_the_jobs_were_deleted_is_no_failure_of_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Recorded(monkeypatch, "running")
    engine.fails = {"jobs,pods"}
    engine.cancel(HANDLE)
    assert engine.counts("delete jobs") == 1
    assert engine.counts("get jobs,pods") == 3


def test_a_jobset_is_deleted_and_not_its_jobs_and_has_gone_when_nothing_of_it_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Recorded(monkeypatch, "running")
    engine.goes_with = JOBSETS
    handle = HANDLE._replace(more={**HANDLE.more, "kind": JOBSETS})
    engine.jobset = "jobset/x"
    assert not engine.is_gone(handle)
    engine.cancel(handle)
    assert engine.counts(f"delete {JOBSETS}") == 1
    assert not engine.counts("delete jobs ")
    assert not engine.is_gone(handle), "the JobSet is left"
    engine.jobset = ""
    assert engine.is_gone(handle)


def test_a_jobset_that_gets_no_jobs_is_deleted_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Recorded(monkeypatch, "running")
    engine.found["items"] = []
    with pytest.raises(EngineError, match="nothing has made the Jobs of this one within 20 s") as found:
        engine.submit(submission(options(), kind=JOBSETS), Script(commands=(("create",), ("secret",), ("patch",))))
    assert "jobset = false in [kubernetes]" in found.value.hint
    assert engine.asked.count("secret") == engine.asked.count("patch") == 0
    assert engine.counts(f"delete {JOBSETS}") == 1


def test_pods_of_a_lost_node_are_removed_as_soon_as_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Recorded(monkeypatch, "running")
    engine.cancel(HANDLE)
    assert engine.counts("get jobs,pods") == 3
    assert not engine.counts("delete pods")
    for each in engine.found["items"]:
        for condition in each["status"].get("conditions", ()) if each["kind"] == "Pod" else ():
            condition.update(status="False")
    engine.cancel(HANDLE)
    assert engine.counts("delete pods") == 1
    assert engine.counts("get jobs,pods") == 5


def test_a_job_with_many_pods_is_looked_at_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Recorded(monkeypatch, "running")
    [*rest, last] = engine.found["items"]
    for index in range(2, 500):
        more = json.loads(json.dumps(last))
        more["metadata"].update(name=f"p{index}")
        more["metadata"]["annotations"][answers.INDEX] = str(index)
        rest.append(more)
    engine.found["items"] = rest
    found = engine.sees()
    engine.now += 9.0
    assert engine.look(HANDLE) is found
    engine.now += 2.0
    engine.look(HANDLE)
    assert engine.counts("get jobs,pods") == 2


def test_the_user_s_time_is_the_last_deadline_and_none_takes_the_lease_away(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Recorded(monkeypatch, "running")
    assert engine.sees().state == RUNNING
    engine.now += SETTLED_S
    assert engine.sees().state == RUNNING
    assert engine.counts("patch job") == 2
    engine.now += 10 * LEASE_S
    assert engine.sees().state == RUNNING
    assert engine.counts("patch job") == 2, "it is not renewed any more"
