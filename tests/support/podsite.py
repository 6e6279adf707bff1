"""Fixtures of tests on a real Kubernetes control plane, by a user with the rights that the backend names."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import backendcontract
import kubernetes
import pytest
from kubernetessite import KubernetesSite, needed, site
from lab import Done, Running, wait_until

from distrun.backends.kubernetes import JOBS, JOBSET_RIGHTS, JOBSETS, RIGHTS

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
    return lab.cluster.get("pods", labelSelector=",".join(f"distrun/{name}={value}" for name, value in labels.items()))


def gone_soon(lab: PodSite) -> None:
    """Nothing of the job is in the cluster, after the time that an ordinary end may take."""
    wait_until(lambda: not lab.cluster.left(), ORDINARY_S, "nothing is left in Kubernetes")


def kill_agents(lab: PodSite, node: str) -> None:
    """Kill the agents on a node, and their guards."""
    found = [each.pid for each in lab.strangers() if each.host == node and b"env:DISTRUN_POD" in each.command]
    assert found
    for pid in found:
        with contextlib.suppress(ProcessLookupError):  # it ended with its guard
            os.kill(pid, signal.SIGKILL)


def deadlines(lab: PodSite) -> list[int | None]:
    """What Kubernetes lets the job's Jobs last."""
    return [job["spec"].get("activeDeadlineSeconds") for job in lab.cluster.get("jobs")]


def configured(lab: PodSite, line: str) -> dict[str, str]:
    """The variables of a launch with a line in the section of the configuration file."""
    config = lab.home_folder / "config" / "distrun"
    config.mkdir(parents=True)
    (config / "config.toml").write_text(f"[kubernetes]\n{line}\n")
    return {"XDG_CONFIG_HOME": str(config.parent)}
