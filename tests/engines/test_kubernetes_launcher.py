"""The template `kubernetes-launcher` on a real API server, and a job with no more rights than it gives."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes
import pytest
import wheels
import yaml
from kubernetessite import TEST_S, KubernetesSite, site
from lab import ROOT, wait_until

from distrun import templates
from distrun.backends.kubernetes import JOBSET_RIGHTS, RIGHTS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(TEST_S)]

NAME = "distrun-launcher"
ACCOUNT = f"system:serviceaccount:{kubernetes.NAMESPACE}:{NAME}"
LAUNCH = """-n 2 -s 0 'echo $(HOME) "$RANK"'"""
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[KubernetesSite]:
    yield from site(2)


@pytest.fixture
def lab(cluster: KubernetesSite, tmp_path: Path) -> Iterator[KubernetesSite]:
    cluster.begin(tmp_path)
    yield cluster
    kinds = "pods,rolebindings,roles,serviceaccounts"
    cluster.cluster.kubectl("delete", kinds, "--field-selector", f"metadata.name={NAME}", "--now")
    cluster.end()


def rendered(launch: str = LAUNCH) -> str:
    values = (f"namespace={kubernetes.NAMESPACE}", "image=example/train:1", f"launch={launch}")
    return templates.render(templates.find("kubernetes-launcher"), values)


def objects() -> dict[str, dict[str, Any]]:
    """Return the rendered objects by their kinds."""
    return {each["kind"]: each for each in yaml.safe_load_all(rendered())}


def granted() -> set[tuple[str, str]]:
    rules = objects()["Role"]["rules"]
    return {(verb, kind) for rule in rules for kind in rule["resources"] for verb in rule["verbs"]}


def apply(lab: KubernetesSite, launch: str = LAUNCH) -> None:
    """Create everything, as an administrator."""
    lab.cluster.kubectl("create", "--validate=strict", "-f", "-", text=rendered(launch))


def end_of_pod(lab: KubernetesSite, code: int) -> str:
    """Wait until the launcher's pod has ended with a code; return what it said."""

    def status() -> dict[str, Any]:
        [pod] = lab.cluster.get("pods", fieldSelector="metadata.name=" + NAME)
        return dict(pod["status"])

    wait_until(lambda: status()["phase"] in ("Succeeded", "Failed"), LIMIT_S, "the pod has ended")
    said = lab.cluster.kubectl("logs", NAME)
    [container] = status()["containerStatuses"]
    assert container["state"]["terminated"]["exitCode"] == code, said
    return said


def test_api_server_takes_every_object_as_it_is_and_changes_nothing(lab: KubernetesSite) -> None:
    # Without its service account no pod is taken, so that one is made first.
    made = objects()
    lab.cluster.create(made.pop("ServiceAccount"))
    text = "---\n".join(json.dumps(each) + "\n" for each in made.values())
    words = ("create", "--dry-run=server", "--validate=strict", "-o", "name", "-f", "-")
    assert lab.cluster.kubectl(*words, text=text).split() == [
        f"role.rbac.authorization.k8s.io/{NAME}",
        f"rolebinding.rbac.authorization.k8s.io/{NAME}",
        f"pod/{NAME}",
    ]
    assert lab.cluster.get("pods") == []


def test_pod_keeps_to_the_strictest_level_of_pod_security(lab: KubernetesSite) -> None:
    label = "pod-security.kubernetes.io/enforce"
    lab.cluster.kubectl("label", "namespace", kubernetes.NAMESPACE, f"{label}=restricted")
    try:
        apply(lab)
    finally:
        lab.cluster.kubectl("label", "namespace", kubernetes.NAMESPACE, f"{label}-")
    assert [each["metadata"]["name"] for each in lab.cluster.get("pods")] == [NAME]


def test_pod_runs_distrun_launch_with_the_words_that_were_given(lab: KubernetesSite) -> None:
    # Pods of the lab are processes of a host, so the command is looked up there.
    for host in lab.hosts.values():
        program = host.root / "usr/local/bin/distrun"
        program.write_text("""#!/bin/sh\nprintf '%s\\n' "$@"\n""")
        program.chmod(0o755)
    try:
        apply(lab)
        said = end_of_pod(lab, 0).splitlines()
    finally:
        for host in lab.hosts.values():
            (host.root / "usr/local/bin/distrun").unlink()
    own = ["launch", "--launcher", "kubernetes", "--namespace", kubernetes.NAMESPACE, "--image", "example/train:1"]
    assert said == [*own, "-n", "2", "-s", "0", 'echo $(HOME) "$RANK"']


def test_service_account_may_do_what_its_role_says_and_nothing_else(lab: KubernetesSite) -> None:
    apply(lab)

    def may(verb: str, kind: str, *words: str) -> bool:
        asked = ("auth", "can-i", verb, kind, f"--as={ACCOUNT}", *words)
        return lab.cluster.kubectl(*asked, check=False).strip() == "yes"

    assert [each for each in granted() if not may(*each)] == []
    others = [("get", "secrets"), ("list", "secrets"), ("create", "pods"), ("create", "pods/exec"), ("get", "nodes")]
    others += [("create", "roles"), ("update", "jobs"), ("watch", "secrets"), ("delete", "secrets")]
    assert [each for each in others if may(*each)] == []
    assert not may("create", "jobs", "--namespace=default")


def test_role_is_what_the_backend_says_that_it_needs() -> None:
    assert granted() == {(verb, what.partition(".")[0]) for verb, what in RIGHTS + JOBSET_RIGHTS}


@pytest.fixture
def ready(lab: KubernetesSite) -> Iterator[KubernetesSite]:
    """Nodes that have what is in the image of the launcher: distrun, and kubectl."""
    for host in lab.hosts.values():
        for source in (ROOT / "distrun", ROOT / "runtime/distrun_runtime"):
            shutil.copytree(source, host.root / "opt/app" / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        host.exec("python3", "-m", "venv", "--without-pip", "/opt/python")
        (packages,) = (host.root / "opt/python/lib").glob("python3*/site-packages")
        (packages / "here.pth").write_text(f"{wheels.SITE}\n/opt/app\n")
        program = host.root / "usr/local/bin/distrun"
        words = f"PATH={shlex.quote(str(kubernetes.programs()))}:$PATH exec /opt/python/bin/python -m distrun"
        program.write_text(f"""#!/bin/sh\n{words} "$@"\n""")
        program.chmod(0o755)
    yield lab
    for host in lab.hosts.values():
        host.exec("rm", "-rf", "/opt/app", "/opt/python", "/usr/local/bin/distrun")


@pytest.mark.parametrize(("script", "code"), [("echo rank $RANK", 0), ("exit 7", 7)])
def test_launcher_in_a_pod_ends_with_the_code_of_its_job_and_leaves_nothing(
    ready: KubernetesSite, script: str, code: int
) -> None:
    lab = ready
    apply(lab, f"-v -n 2 -s 0 --grace 1 {shlex.quote(script)}")
    said = end_of_pod(lab, code)
    assert re.search(r"submitting to kubernetes as \S+ \(jobs\)", said), "the cluster has no JobSets"
    assert "orbidden" not in said
    if not code:
        assert sorted(re.findall(r"\| (rank \d)$", said, re.MULTILINE)) == ["rank 0", "rank 1"]
    wait_until(lambda: lab.cluster.left() == [f"pods/{NAME}"], LIMIT_S, "nothing is left of the job in Kubernetes")


def test_launcher_that_is_deleted_stops_its_job_first(ready: KubernetesSite) -> None:
    lab = ready
    apply(lab, "-n 2 -s 0 --grace 1 'echo up; exec sleep 300'")
    wait_until(lambda: lab.cluster.kubectl("logs", NAME, check=False).count("| up") == 2, LIMIT_S, "the job runs")
    lab.cluster.kubectl("delete", "pod", NAME)
    wait_until(lambda: not lab.cluster.left(), LIMIT_S, "nothing is left in Kubernetes")
