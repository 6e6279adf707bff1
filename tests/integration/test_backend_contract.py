"""The backends that need nothing but this machine and the lab keep what every backend keeps."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import folderqueue
import pytest
from backendcontract import BackendContract, TriedSite
from distrun_cli import Distrun, leaving_nothing, processes, wait_until
from lab import Done, Running, Site
from slowness import scaled

LIMIT_S = 60.0


class Ended(NamedTuple):
    code: int
    out: str
    err: str


class Begun:
    """A launch on this machine."""

    def __init__(self, child: subprocess.Popen[bytes], folder: Path) -> None:
        self._child, self._folder = child, folder

    @property
    def out(self) -> str:
        return (self._folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self._folder / "err").read_text()

    def poll(self) -> int | None:
        return self._child.poll()

    def wait(self) -> int:
        return self._child.wait(scaled(LIMIT_S))

    def signal(self, number: int) -> None:
        self._child.send_signal(number)


class Here:
    """This machine, where a launcher starts its agents."""

    def __init__(self, launcher: str, made: Distrun) -> None:
        self._launcher, self._distrun = launcher, made
        self._begun: list[Begun] = []

    def launch(self, *words: str) -> Ended:
        return self.distrun("launch", "--launcher", self._launcher, *words)

    def begin_launch(self, *words: str) -> Begun:
        self._begun.append(
            Begun(self._distrun.start("launch", "--launcher", self._launcher, *words), self._distrun.home)
        )
        return self._begun[-1]

    def distrun(self, *words: str) -> Ended:
        done = self._distrun.run(*words)
        return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())

    def commands(self) -> list[str]:
        return [command.replace(b"\0", b" ").decode("utf-8", "replace") for _, _, command in processes()]

    def nothing_stays(self) -> None:
        wait_until(lambda: not self._distrun.left(), LIMIT_S, "no process is left")

    def close(self) -> None:
        for each in self._begun:
            if each.poll() is None:
                each.signal(signal.SIGTERM)
                each.wait()


@pytest.fixture(params=["local", "folderqueue"])
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Here]:
    queue = tmp_path / "queue"
    queue.mkdir()
    with leaving_nothing(tmp_path) as distrun:
        distrun.env.update(folderqueue.install(queue))
        made = Here(request.param, distrun)
        yield made
        made.close()


@pytest.mark.slow
class TestHere(BackendContract):
    @pytest.fixture
    def site(self, here: Here) -> TriedSite:
        return here


class OnHosts:
    """The lab's hosts, by ssh."""

    def __init__(self, lab: Site) -> None:
        self._lab = lab
        self._hosts = lab.hosts_file()

    def launch(self, *words: str) -> Done:
        return self._lab.distrun("launch", "--launcher", "ssh", "-H", self._hosts, *words, cwd=Path("/tmp"))

    def begin_launch(self, *words: str) -> Running:
        return self._lab.start("launch", "--launcher", "ssh", "-H", self._hosts, *words, cwd=Path("/tmp"))

    def distrun(self, *words: str) -> Done:
        return self._lab.distrun(*words)

    def commands(self) -> list[str]:
        return [each.command.replace(b"\0", b" ").decode("utf-8", "replace") for each in self._lab.processes()]

    def nothing_stays(self) -> None:
        wait_until(lambda: not self._lab.leftovers(), LIMIT_S, "nothing is left on the hosts")


class TestSsh(BackendContract):
    @pytest.fixture
    def site(self, lab: Site) -> TriedSite:
        return OnHosts(lab)
