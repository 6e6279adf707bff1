"""mpirun inside an allocation of Slurm and of Grid Engine: the hosts and slots are those of the allocation."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import mpi
import pytest
from hostlab import Unavailable
from lab import ROOT, Done, Site, shared_folders, skip

pytestmark = pytest.mark.engine

HOSTS = 3
TELL = 'echo "$DISTRUN_RANK on $(hostname)"'
Run = Callable[[tuple[str, ...]], tuple[int, str]]
"""Runs a command in an allocation of three hosts with two slots each; returns its exit code and what it wrote."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that all hosts of a lab share with the launcher."""
    path = Path(tempfile.mkdtemp(dir="/opt"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module", params=["slurm", "sge"])
def allocation(request: pytest.FixtureRequest, folder: Path) -> Iterator[Run]:
    engine = importlib.import_module(request.param)
    try:
        site = Site.up(HOSTS, share=[ROOT, folder, *shared_folders()])
    except Unavailable as why:
        skip(why)
    home = folder / f"{request.param}-home"
    home.mkdir()
    site.begin(home)
    try:
        yield (_slurm if request.param == "slurm" else _sge)(site, engine, folder)
    finally:
        site.down()


def _slurm(site: Site, slurm: object, folder: Path) -> Run:
    cluster = slurm.Slurm(site, cpus=2)  # type: ignore[attr-defined]
    _up(cluster.up)

    def run(command: tuple[str, ...]) -> tuple[int, str]:
        done = site.run("salloc", "-N", str(HOSTS), "-n", "6", *command, env=dict(cluster.env), cwd=Path("/"))
        return done.code, done.out + done.err

    return run


def _sge(site: Site, sge: object, folder: Path) -> Run:
    (folder / "common").mkdir()
    _up(lambda: sge.up(site, folder / "common"))  # type: ignore[attr-defined]

    def run(command: tuple[str, ...]) -> tuple[int, str]:
        out = folder / "out"
        out.unlink(missing_ok=True)
        words = ("-sync", "y", "-b", "y", "-shell", "n", "-j", "y", "-o", str(out), "-pe", "mpi", "6")
        env = ("/usr/bin/env", "HOME=/root", "XDG_STATE_HOME=/tmp/state", "XDG_RUNTIME_DIR=/tmp")
        done: Done = site.run("qsub", *words, *env, *command, cwd=Path("/"))
        return done.code, out.read_text() + done.err

    return run


def _up(start: Callable[[], None]) -> None:
    try:
        start()
    except Unavailable as why:
        if os.environ.get("DISTRUN_ENGINES") == "required":
            raise
        pytest.skip(str(why))


@pytest.mark.parametrize("name", mpi.NAMES)
def test_an_allocation_gives_hosts_and_slots(allocation: Run, name: str) -> None:
    path = mpi.path(name)
    if not path:
        assert os.environ.get("DISTRUN_ENGINES") != "required" or name not in mpi.DEBIAN, f"no {name}"
        pytest.skip(f"no {name} on this machine")
    root = ("--engine-arg=--allow-run-as-root",) if "openmpi" in name else ()
    words = ("launch", "--launcher", "mpi", "--mpirun", path, *root, "-n", "6", "-s", "0", "--shell", TELL)
    code, told = allocation((sys.executable, "-m", "distrun", *words))
    assert code == 0, told
    places = dict(re.findall(r"^worker-\d@h\d \| (\d) on (h\d)$", told, re.MULTILINE))
    assert sorted(places) == list("012345"), told
    assert sorted(places.values()) == ["h1", "h1", "h2", "h2", "h3", "h3"]
