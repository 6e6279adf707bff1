"""A lab whose hosts are the nodes of a Kubernetes cluster: for tests/engines/test_kubernetes*.py."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import kubernetes
import pytest
from distrun_cli import wait_until
from enginesneeded import is_required
from hostlab import Process, Unavailable
from lab import ROOT, Done, Running, Site, shared_folders

TEST_S = 6 * kubernetes.UP_S
"""Time limit of a test: bringing the cluster up has three waits of `UP_S`, and settling it two."""


class KubernetesSite(Site):
    """The lab, and its cluster."""

    cluster: kubernetes.Kubernetes

    def strangers(self) -> list[Process]:
        """What runs on hosts beside sshd and the kubelets."""
        return [each for each in super().strangers() if not kubernetes.is_kubelet(each)]

    def env(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The launcher's variables, with the cluster's."""
        return super().env({**self.cluster.env, **(more or {})})

    def launch(self, *words: str, **more: Any) -> Done:
        """Run `distrun launch --launcher kubernetes WORDS` to its end, in a folder that all hosts have."""
        return self.distrun("launch", "--launcher", "kubernetes", *words, **{"cwd": Path("/tmp"), **more})

    def begin_launch(self, *words: str, **more: Any) -> Running:
        """Start `distrun launch --launcher kubernetes WORDS`."""
        return self.start("launch", "--launcher", "kubernetes", *words, **{"cwd": Path("/tmp"), **more})

    def commands(self) -> list[str]:
        """Return the command lines of all processes of the lab."""
        return [each.command.replace(b"\0", b" ").decode("utf-8", "replace") for each in self.processes()]

    def end(self) -> None:
        """End a test; fail if anything of a job is left on a host or in Kubernetes."""
        self.restore()
        self.cluster.settle()
        super().end()

    def nothing_stays(self) -> None:
        """Nothing of any job lives, on no host and not in Kubernetes."""
        wait_until(lambda: not self.cluster.left(), 30, "nothing is left in Kubernetes")
        wait_until(lambda: not self.leftovers(), 30, "nothing is left on the hosts")


def needed(why: str) -> None:
    """Skip if there is a reason, or fail where engines are required."""
    if why and is_required("kubernetes"):
        pytest.fail(why)
    if why:
        pytest.skip(why)


def site(
    count: int, share: list[Path] | None = None, *, has_jobsets: bool = False
) -> Generator[KubernetesSite, None, None]:
    """Bring up a lab with a cluster, and down again."""
    needed(kubernetes.why_not())
    try:
        lab = KubernetesSite.up(count, hide=[ROOT], share=[*shared_folders(), *(share or [])])
    except Unavailable as why:
        needed(str(why))
        raise
    try:
        lab.cluster = kubernetes.Kubernetes(lab, has_jobsets=has_jobsets)
        lab.cluster.up()
        yield lab
    finally:
        lab.down()
