"""Jobs by real mpiruns over the lab's hosts: Open MPI 4 and 5, MPICH 4 and 5, Intel MPI."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import mpi
import pytest
from backendcontract import BackendContract
from enginesneeded import is_required
from lab import ROOT, Done, Running, Site, wait_until

pytestmark = pytest.mark.engine

ALL = mpi.NAMES
DEBIAN = tuple(mpi.DEBIAN)
PYPI = tuple(mpi.PYPI)
STAY = "trap 'echo bye; exit 0' INT TERM; echo up; while :; do sleep 0.05; done"


@pytest.fixture
def mpirun(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The options of a launch by the mpirun of that name."""
    path = mpi.path(request.param)
    if not path:
        assert not is_required("mpi") or request.param not in DEBIAN, f"no {request.param}"
        pytest.skip(f"no {request.param} on this machine: PYTHONPATH=tests/lab python -m mpi install")
    root = ("--engine-arg=--allow-run-as-root",) if "openmpi" in request.param else ()
    return ("launch", "--launcher", "mpi", "--mpirun", path, *root)


def by(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mpirun", names, indirect=True)


def launch(lab: Site, mpirun: tuple[str, ...], *words: str, hosts: tuple[str, ...] = ("h1", "h3", "h2")) -> Done:
    return lab.distrun(*mpirun, "-H", lab.hosts_file(*hosts), *words, cwd=Path("/"))


@by(*ALL)
def test_each_host_gets_one_agent_and_its_tasks_are_no_ranks(lab: Site, mpirun: tuple[str, ...]) -> None:
    tell = (
        'echo "$DISTRUN_RANK on $(hostname) of $DISTRUN_HOST, may use $(nproc)";'
        " env | grep -E '^(OMPI|PMIX|PMI|PRTE|OPAL|HYDRA|HYDI|MPI_LOCAL)[^=]*=' || echo clean;"
        ' test -z "$DISTRUN_ENROLMENT" || echo "$DISTRUN_ENROLMENT"; readlink /proc/self/fd/0'
    )
    done = launch(lab, mpirun, "-n", "4", "-s", "0", "--shell", tell, hosts=("h1 slots=2", "h3 slots=1", "h2 slots=1"))
    assert done.code == 0, done.err
    cores = os.cpu_count()
    places = {0: "h1", 1: "h3", 2: "h2", 3: "h1"}
    for rank, host in places.items():
        lines = re.findall(rf"^worker-{rank}@{host} \| (.*)$", done.out, re.MULTILINE)
        assert lines == [f"{rank} on {host} of {host}, may use {cores}", "clean", "/dev/null"], done.out + done.err


@by(DEBIAN[0])
def test_more_tasks_than_slots_are_refused_before_mpirun_starts_unless_oversubscribed(
    lab: Site, mpirun: tuple[str, ...]
) -> None:
    hosts = ("h1 slots=2", "h3 slots=1")
    refused = launch(lab, mpirun, "-n", "5", "-s", "0", "hostname", hosts=hosts)
    assert refused.code == 2, refused.err
    assert "no room for worker-3" in refused.err
    done = launch(lab, mpirun, "--oversubscribe", "-n", "5", "-s", "0", "hostname", hosts=hosts)
    assert done.code == 0, done.err
    assert sorted(re.findall(r"worker-(\d)@(h\d) \| h\d", done.out)) == [
        ("0", "h1"),
        ("1", "h3"),
        ("2", "h1"),
        ("3", "h3"),
        ("4", "h1"),
    ]


@by(*PYPI)
def test_first_failing_worker_gives_the_exit_code_and_is_named(lab: Site, mpirun: tuple[str, ...]) -> None:
    words = ("-n", "3", "-s", "0", "--shell", "test $DISTRUN_RANK != 1 || exit 7; sleep 60")
    done = launch(lab, mpirun, *words)
    assert done.code == 7, done.err
    assert "worker-1" in done.err


@by("openmpi4", "intel")
def test_killed_launcher_leaves_nothing(lab: Site, mpirun: tuple[str, ...]) -> None:
    running = lab.start(*mpirun, "-H", lab.hosts_file("h1", "h2"), "-n", "2", "-s", "0", "--shell", STAY, cwd=Path("/"))
    wait_until(lambda: running.out.count("up") == 2, 60, "both workers run")
    os.kill(running.coordinator(), signal.SIGKILL)
    running.kill()
    wait_until(lambda: not lab.leftovers(), 60, "nothing is left")


@by(*DEBIAN, "intel")
def test_host_that_ssh_does_not_reach_is_named(lab: Site, mpirun: tuple[str, ...]) -> None:
    done = launch(lab, mpirun, "-n", "2", "-s", "0", "true", hosts=("h1", "h99"))
    assert done.code == 6, done.err
    assert "h99" in done.err


@by(*DEBIAN)
def test_host_that_dies_is_lost(lab: Site, mpirun: tuple[str, ...]) -> None:
    running = lab.start(*mpirun, "-H", lab.hosts_file("h1", "h2"), "-n", "2", "-s", "0", "--shell", STAY, cwd=Path("/"))
    wait_until(lambda: running.out.count("up") == 2, 60, "both workers run")
    lab["h2"].kill()
    assert running.wait() == 7, running.err
    assert "h2" in running.err


@by(*DEBIAN)
def test_mpirun_that_is_killed_is_named_and_no_host(lab: Site, mpirun: tuple[str, ...]) -> None:
    running = lab.start(*mpirun, "-H", lab.hosts_file("h1", "h2"), "-n", "2", "-s", "0", "--shell", STAY, cwd=Path("/"))
    wait_until(lambda: running.out.count("up") == 2, 60, "both workers run")
    path = mpirun[mpirun.index("--mpirun") + 1].encode()
    [pid] = [each.pid for each in lab.processes() if each.command.split(b"\0")[0] == path]
    os.kill(pid, signal.SIGKILL)
    assert running.wait() == 7, running.err
    assert running.err.splitlines()[-1].startswith("distrun: error: lost mpirun: it was ended by SIGKILL on ")


@by("openmpi4")
def test_digits_are_learnt_without_a_shared_folder(lab: Site, mpirun: tuple[str, ...]) -> None:
    program = ROOT / "examples" / "digits.py"
    done = lab.distrun(
        *mpirun,
        *("-H", lab.hosts_file("h1", "h2"), "-n", "2", "-s", "2", "--sync-dst-dir", "/tmp/digits"),
        *("--", sys.executable, program.name),
        cwd=program.parent,
    )
    assert done.code == 0, done.err


@by("openmpi4")
def test_job_whose_store_is_lost_is_found_and_ended(lab: Site, mpirun: tuple[str, ...]) -> None:
    running = lab.start(*mpirun, "-H", lab.hosts_file("h1", "h2"), "-n", "2", "-s", "0", "--shell", STAY, cwd=Path("/"))
    wait_until(lambda: running.out.count("up") == 2, 60, "both workers run")
    env = {"XDG_STATE_HOME": str(lab.home_folder / "another")}
    done = lab.distrun("kill", "--launcher", "mpi", "--stale", "-y", env=env)
    assert done.code == 0, done.err
    assert running.wait() != 0
    assert not lab.leftovers()


class MpiSite:
    """Where `BackendContract` tries mpi."""

    def __init__(self, lab: Site, mpirun: tuple[str, ...]) -> None:
        self._lab = lab
        self._words = (*mpirun, "-H", lab.hosts_file("h1", "h2"))

    def launch(self, *words: str) -> Done:
        return self._lab.distrun(*self._words, *words, cwd=Path("/"))

    def begin_launch(self, *words: str) -> Running:
        return self._lab.start(*self._words, *words, cwd=Path("/"))

    def distrun(self, *words: str) -> Done:
        return self._lab.distrun(*words, cwd=Path("/"))

    def commands(self) -> list[str]:
        return [process.command.replace(b"\0", b" ").decode(errors="replace") for process in self._lab.processes()]

    def nothing_stays(self) -> None:
        wait_until(lambda: not self._lab.leftovers(), 30, "nothing is left")
        assert not [each for each in self.commands() if "mpirun" in each or "mpiexec" in each]


@by(*DEBIAN)
class TestContract(BackendContract):
    @pytest.fixture
    def site(self, lab: Site, mpirun: tuple[str, ...]) -> MpiSite:
        return MpiSite(lab, mpirun)
