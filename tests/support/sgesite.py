"""A lab whose hosts are a Grid Engine, for tests: what a test does with it as the launcher.

Nothing is shared between launcher and hosts but `shared`, which jobs do not use unless a test says so.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sge
from enginesneeded import is_required
from hostlab import LabError, Process, Unavailable
from lab import ROOT, Done, Running, Site, shared_folders, wait_until

HOSTS = 3
EVERYWHERE = Path("/tmp")
"""A folder that launcher and hosts have, each its own."""


class SgeSite(Site):
    """A lab with Grid Engine; jobs are launched in the parallel environment `mpi` unless a test names another."""

    shared: Path
    common: Path

    def strangers(self) -> list[Process]:
        """Return what runs on hosts and is neither their sshd's nor Grid Engine's own."""
        return [process for process in super().strangers() if process.name not in sge.DAEMONS]

    def launch(self, *words: str, pe: str = "mpi", **more: Any) -> Done:
        """Run `distrun launch --launcher sge` to its end."""
        return self.distrun("launch", "--launcher", "sge", "--pe", pe, *words, **{"cwd": EVERYWHERE, **more})

    def begin_launch(self, *words: str, pe: str = "mpi", **more: Any) -> Running:
        """Start `distrun launch --launcher sge`."""
        return self.start("launch", "--launcher", "sge", "--pe", pe, *words, **{"cwd": EVERYWHERE, **more})

    def commands(self) -> list[str]:
        """Return the command lines of all processes of launcher and hosts."""
        return [each.command.replace(b"\0", b" ").decode(errors="replace") for each in self.processes()]

    def ask(self, *words: str, text: str = "") -> str:
        """Run a command of Grid Engine as the launcher and return what it prints, whether it succeeds or not."""
        return self.inside(*words, text=text, check=False, env={"PWD": "/"})

    def change_queue(self, **values: str) -> None:
        """Change lines of the configuration of the queue all.q."""
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(sge.changed(self.inside("qconf", "-sq", "all.q"), values))
            file.flush()
            self.inside("qconf", "-Mq", file.name)

    def hold(self, slots: int, seconds: int = 100) -> str:
        """Submit another job that has `slots` slots for so long; return its number when it runs."""
        words = ("qsub", "-terse", "-S", "/bin/sh", "-wd", "/", "-o", "/dev/null", "-j", "y", "-N", "other")
        number = self.ask(*words, "-pe", "fill", str(slots), text=f"#!/bin/sh\nsleep {seconds}\n").strip()
        wait_until(lambda: re.search(rf"^ *{number} .* r ", self.ask("qstat"), re.M), 30, "the other job runs")
        return number

    def job(self) -> str:
        """Return the number of the only job of distrun's."""
        [number] = set(re.findall(r"^ *(\d+) \S+ distrun-", self.ask("qstat"), re.M))
        return number

    def nothing_stays(self) -> None:
        """Wait until nothing runs on any host and no job is in Grid Engine."""
        wait_until(lambda: not self.leftovers(), 30, "nothing is left on the hosts")
        wait_until(lambda: not self.ask("qstat", "-u", "*").strip(), 30, "no job is left in Grid Engine")


def bring_up() -> Iterator[SgeSite]:
    """Bring up a lab with Grid Engine, for a module's tests; skip them where that cannot be, unless it must."""
    with tempfile.TemporaryDirectory(prefix="distrun-sge-") as folder:
        common, shared = Path(folder, "common"), Path(folder, "shared")
        common.mkdir()
        shared.mkdir()
        Path(folder).chmod(0o755)
        lab = None
        try:
            if why := sge.missing():
                raise Unavailable(why)
            lab = SgeSite.up(HOSTS, hide=[ROOT], share=[*shared_folders(), common, shared])
            lab.common, lab.shared = common, shared
            sge.up(lab, common)
            yield lab
        except Unavailable as why:
            if is_required("sge"):
                raise
            pytest.skip(f"sge: {why}")
        finally:
            if lab is not None:
                lab.down()


def mend(lab: SgeSite) -> None:
    """End a test: no job is left, all hosts are there again."""
    try:
        sge.clear(lab)
    except LabError as err:
        pytest.fail(str(err))
    lab.end()
    sge.mend(lab, lab.common)
