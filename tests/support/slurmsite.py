"""A lab whose hosts are a Slurm cluster: for tests/engines/test_slurm.py."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import slurm
from enginesneeded import is_required
from hostlab import Process, Unavailable
from lab import ROOT, Done, Running, Site, shared_folders, wait_until


class SlurmSite(Site):
    """The lab, and its cluster."""

    cluster: slurm.Slurm

    def strangers(self) -> list[Process]:
        """What runs on hosts beside sshd and the cluster's daemons."""
        return [each for each in super().strangers() if each.name not in slurm.DAEMONS]

    def env(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The launcher's variables, with the cluster's."""
        return super().env({**self.cluster.env, **(more or {})})

    def launch(self, *words: str, **more: object) -> Done:
        """Run `distrun launch --launcher slurm WORDS` to its end, in a folder that all hosts have."""
        return self.distrun("launch", "--launcher", "slurm", *words, **{"cwd": Path("/tmp"), **more})

    def begin_launch(self, *words: str, **more: object) -> Running:
        """Start `distrun launch --launcher slurm WORDS`."""
        return self.start("launch", "--launcher", "slurm", *words, **{"cwd": Path("/tmp"), **more})

    def commands(self) -> list[str]:
        """Return the command lines of all processes of the lab."""
        return [each.command.replace(b"\0", b" ").decode("utf-8", "replace") for each in self.processes()]

    def job(self) -> str:
        """Return the number of the one job in Slurm that distrun submitted, once there is one."""
        return str(wait_until(self._job, 30, "there is a job in Slurm"))

    def _job(self) -> str:
        told = self.cluster.run("squeue", "-h", "-o", "%i %j").splitlines()
        return next((re.sub(r"\+.*", "", line.split()[0]) for line in told if " distrun-" in line), "")

    def shown(self, job: str) -> str:
        """Return what Slurm says of a job."""
        return self.cluster.run("scontrol", "show", "job", "-d", "-o", job)

    def nothing_stays(self) -> None:
        """Nothing of any job lives, on no host and not in Slurm."""
        wait_until(lambda: not self.leftovers(), 30, "nothing is left on the hosts")
        wait_until(lambda: not self.cluster.jobs(), 30, "no job is left in Slurm")


def needed(why: str) -> None:
    """Skip if there is a reason, or fail where engines are required."""
    if why and is_required("slurm"):
        pytest.fail(why)
    if why:
        pytest.skip(why)


def site(count: int, share: list[Path], accounting: bool = False) -> Iterator[SlurmSite]:
    """Bring up a lab with a cluster, and down again."""
    needed(slurm.missing(accounting))
    try:
        lab = SlurmSite.up(count, hide=[ROOT], share=[*shared_folders(), *share])
    except Unavailable as why:
        needed(str(why))
        raise
    try:
        lab.cluster = slurm.Slurm(lab, cpus=2, accounting=accounting, confined=not slurm.why_not_confined())
        lab.cluster.up()
        yield lab
    finally:
        lab.down()
        slurm.remove_groups(lab.hosts)
