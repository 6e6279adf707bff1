"""The template `kubernetes-launcher` on a real API server, and a job with no more rights than it gives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab import wait_until

from distrun import templates

kubernetes = pytest.importorskip("kubernetes", reason="there is no lab of Kubernetes in tests/lab")
from kubernetessite import KubernetesSite, site  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

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
    cluster.restore()
    cluster.cluster.settle()
    cluster.end()


def rendered() -> str:
    values = (f"namespace={kubernetes.NAMESPACE}", "image=example/train:1", f"launch={LAUNCH}")
    return templates.render(templates.find("kubernetes-launcher"), values)


def objects() -> dict[str, dict[str, Any]]:
    """Return the rendered objects by their kinds."""
    return {each["kind"]: each for each in yaml.safe_load_all(rendered())}


def granted() -> set[tuple[str, str]]:
    rules = objects()["Role"]["rules"]
    return {(verb, kind) for rule in rules for kind in rule["resources"] for verb in rule["verbs"]}


def apply(lab: KubernetesSite) -> None:
    """Create everything, as an administrator."""
    lab.cluster.kubectl("create", "--validate=strict", "-f", "-", text=rendered())


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
        phase = ("get", "pod", NAME, "-o", "jsonpath={.status.phase}")
        wait_until(lambda: lab.cluster.kubectl(*phase) in ("Succeeded", "Failed"), LIMIT_S, "the pod has ended")
        said = lab.cluster.kubectl("logs", NAME).splitlines()
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
    backend = pytest.importorskip("distrun.backends.kubernetes", reason="there is no backend for Kubernetes")
    # kubectl reads a Job before it patches it.
    assert granted() == {*backend.RIGHTS, ("get", "jobs")}


@pytest.mark.parametrize(("script", "code"), [("echo rank $RANK", 0), ("exit $((RANK + 7))", 7)])
def test_job_with_the_rights_of_the_launcher_runs_and_leaves_nothing(
    lab: KubernetesSite, script: str, code: int
) -> None:
    pytest.importorskip("distrun.backends.kubernetes", reason="there is no backend for Kubernetes")
    lab.cluster.kubectl("create", "-f", "-", text=rendered().rpartition("---\n")[0])
    token = lab.cluster.kubectl("create", "token", NAME, "--duration=1h").strip()
    config = json.loads((lab.file(kubernetes.STATE) / "user").read_text())
    config["users"][0]["user"] = {"token": token}
    mine = lab.home_folder / "kubeconfig"
    mine.touch(mode=0o600)
    mine.write_text(json.dumps(config))
    words = ("--image", "debian:12", "-n", "1" if code else "2", "-s", "0", "--grace", "1", script)
    done = lab.launch(*words, env={"KUBECONFIG": str(mine)})
    assert done.code == code, done.err
    assert "orbidden" not in done.err
    if not code:
        assert sorted(re.findall(r"\| (rank \d)$", done.out, re.MULTILINE)) == ["rank 0", "rank 1"]
    wait_until(lambda: not lab.cluster.left(), LIMIT_S, "nothing is left in Kubernetes")
