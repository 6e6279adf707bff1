"""A real YARN for tests: the fixture `site`, a lab whose hosts run HDFS and YARN. See `tests/lab/yarn.py`.

One cluster serves all tests of a module. After each test nothing of a job may run on a node, be known to the
ResourceManager as not ended, or lie in HDFS. Where YARN cannot run, the tests are skipped and say why; with
DISTRUN_ENGINES=yarn they fail.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yarn
from enginesneeded import is_required
from hostlab import Process, Unavailable
from lab import ROOT, Done, Running, Site, shared_folders, wait_until

NODES = 3
LIMIT_S = 120.0
"""For what takes a few seconds on a machine that has nothing else to do."""


EVERYWHERE = Path("/tmp")
"""A folder that launcher and nodes have, each its own."""
SMALL = ("launch", "--launcher", "yarn", "--worker-memory", "256M", "--server-memory", "256M")
FOLDERS = ("/user/root/.yarn/services", "/user/root/.distrun")
"""Of HDFS: what YARN keeps of services, and the secrets of jobs."""


class YarnSite(Site):
    """A lab with YARN: h1 has ResourceManager and HDFS, the others are nodes."""

    cluster: yarn.Cluster

    def env(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The launcher's variables; it finds YARN by HADOOP_CONF_DIR."""
        return {**super().env({"HADOOP_CONF_DIR": self.cluster.conf, **(more or {})})}

    def strangers(self) -> list[Process]:
        """What runs on hosts and is neither their sshd's nor the cluster's own."""
        return [each for each in super().strangers() if not yarn.is_daemon(each)]

    def restore(self) -> None:
        """Mend every host; a node that was off is a node again."""
        super().restore()
        running = {each.host for each in self.processes() if yarn.is_daemon(each)}
        for name in self.cluster.nodes:
            if name not in running:
                self.cluster.prepare(self[name])
                self.cluster.start(self[name], "nodemanager")
        wait_until(lambda: self.cluster.active() == len(self.cluster.nodes), LIMIT_S, "all nodes are there")

    def end(self) -> None:
        """End a test; fail if anything of a job is left on a node, in YARN or in HDFS."""
        apps = self.cluster.applications()
        for app in apps:  # before the wait for what runs on nodes: it would not end
            self.cluster.call("PUT", "/ws/v1/cluster/apps/%s/state?user.name=root" % app["id"], {"state": "KILLED"})
        left = [self.files(folder) for folder in FOLDERS]
        with contextlib.suppress(AssertionError):  # an application master may take long to end
            wait_until(lambda: not self.leftovers(), LIMIT_S, "nothing runs")
        super().end()
        assert not apps, "left in YARN: %s" % [(app["name"], app["state"], app["diagnostics"]) for app in apps]
        assert left == [[], []], "left in HDFS: %s" % left

    def files(self, folder: str, user: str = "root") -> list[tuple[str, str]]:
        """Return name and mode of what is in a folder of HDFS; nothing if there is none."""
        status, said = self.cluster.hdfs("GET", folder, "op=LISTSTATUS", user)
        assert status in (200, 404), said
        rows = said["FileStatuses"]["FileStatus"] if status == 200 else []
        return [(row["pathSuffix"], row["permission"]) for row in rows]

    def launch(self, *words: str, **more: Any) -> Done:
        """Run `distrun launch --launcher yarn WORDS` to its end, with small workers, in a folder that nodes have."""
        return self.distrun(*SMALL, *words, **{"cwd": EVERYWHERE, **more})

    def begin_launch(self, *words: str, **more: Any) -> Running:
        """Start `distrun launch --launcher yarn WORDS`."""
        return self.start(*SMALL, *words, **{"cwd": EVERYWHERE, **more})

    def commands(self) -> list[str]:
        """Return the command lines of all processes of launcher and hosts."""
        return [each.command.replace(b"\0", b" ").decode("utf-8", "replace") for each in self.processes()]

    def nothing_stays(self) -> None:
        """Fail unless nothing of a job is left: on the hosts, in YARN, in HDFS."""
        wait_until(lambda: not self.leftovers(), LIMIT_S, "nothing runs")
        assert self.applications() == []
        assert [self.files(folder) for folder in FOLDERS] == [[], []]

    def applications(self) -> list[dict[str, Any]]:
        """Return the applications that YARN has and that have not ended."""
        return self.cluster.applications()

    def heard(self, running: Running, text: str) -> None:
        """Wait until a command has said so on its standard error."""
        self._until(running, lambda: text in running.err, "%r is said" % text)

    def printed(self, running: Running, text: str, times: int = 1) -> None:
        """Wait until a command has printed that."""
        self._until(running, lambda: running.out.count(text) >= times, "%r is printed" % text)

    @staticmethod
    def _until(running: Running, is_true: Any, what: str) -> None:
        wait_until(lambda: is_true() or running.poll() is not None, LIMIT_S, what)
        assert is_true(), "it ended, and not: %s; it says:\n%s%s" % (what, running.out, running.err)

    @staticmethod
    def job(running: Running) -> str:
        """Return the id of the job that a command has launched."""
        found = re.search(r"distrun: job (\S+) ", running.err)
        assert found, running.err
        return found[1]

    def folder(self, job: str) -> Path:
        """Return the folder of a job."""
        return self.home_folder / "state" / "distrun" / "jobs" / job

    def logged(self, job: str) -> str:
        """Return what the tasks of a job have written so far."""
        return "".join(path.read_text() for path in sorted((self.folder(job) / "logs").glob("worker-*.log")))

    def copy(self, *names: str) -> Path:
        """Copy examples into a folder that only the launcher has, and return it."""
        folder = self.home_folder / "examples"
        folder.mkdir()
        for name in names:
            shutil.copy(ROOT / "examples" / name, folder)
        return folder


@pytest.fixture(scope="module")
def site_of_module() -> Iterator[YarnSite]:
    """The cluster of a module; made when first asked for."""
    made: YarnSite | None = None
    try:
        if is_required("yarn"):
            yarn.install()
        if reason := yarn.why_not():
            raise Unavailable(reason)
        made = YarnSite.up(NODES + 1, hide=[ROOT], share=[*shared_folders(), yarn.CACHE])
        made.cluster = yarn.up(made)
        made.cluster.hdfs("PUT", "/user/root/.yarn/services", "op=MKDIRS&permission=750")
    except Unavailable as why:
        if made is not None:
            made.down()
        if is_required("yarn"):
            raise
        pytest.skip("yarn: %s" % why)
    except BaseException:
        if made is not None:
            made.down()
        raise
    yield made
    made.down()


@pytest.fixture
def site(site_of_module: YarnSite, tmp_path: Path) -> Iterator[YarnSite]:
    """The cluster, all of it well and empty."""
    site_of_module.begin(tmp_path)
    yield site_of_module
    site_of_module.end()


def kill(pid: int) -> None:
    """End a process at once."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
