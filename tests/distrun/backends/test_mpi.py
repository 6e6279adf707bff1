"""What mpirun is told, and what is made of what it says. The banners and outputs are recorded ones of real mpiruns."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from distrun.backends import bootstrap, mpi
from distrun.backends.bootstrap import Bootstrap
from distrun.backends.engine import ENDED, RUNNING, EngineError, Grant, Handle, RoleGroup, Submission, marker
from distrun.errors import UsageError
from distrun.hosts import HostSpec, Inventory, parse
from distrun.request import EngineOptions, Needs
from distrun_runtime.contract.dataclass import read, written

RECORDED = Path(__file__).parent / "mpi"
FLAVOR_OF = {"openmpi4": "openmpi4", "openmpi5": "openmpi5", "mpich4": "mpich", "mpich5": "mpich", "intel": "intel"}
MAKES = ("o4", "o5", "m4", "m5", "in")
GRANTS = tuple(Grant(str(index), name) for index, name in enumerate(("h1", "h3", "h2")))
UNKNOWN = tuple(Grant(str(index), name) for index, name in enumerate(("h1", "h9", "h2")))
NONCE = "00112233445566aa"


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def submission(*specs: HostSpec, servers: int = 0, workers: int = 3, **more: Any) -> Submission:
    inventory = Inventory("--hosts", specs, tuple(spec.name for spec in specs))
    groups = tuple(RoleGroup(role, n, Needs()) for role, n in (("server", servers), ("worker", workers)) if n)
    return Submission(
        **{
            "job": "calm-otter-7f3",
            "marker": marker("calm-otter-7f3", NONCE),
            "groups": groups,
            "options": EngineOptions(),
            "bootstrap": Bootstrap("calm-otter-7f3", "ab" * 32, ("10.0.0.1:4000", "[fd00::1]:4000"), 120.0),
            "folder": Path("/state/jobs/calm otter/engine"),
            "cwd": "/users/ann",
            "hosts": inventory,
            "outer": {"PATH": os.environ["PATH"]},
            **more,
        }
    )


THREE = tuple(HostSpec(name) for name in ("h1", "h3", "h2"))


# ---------------------------------------------------------------------- which mpirun


@pytest.mark.parametrize("make", FLAVOR_OF)
def test_flavor_is_known_by_its_banner(make: str) -> None:
    found = mpi.flavor_of(recorded(f"{make}.version"))
    assert found.name == FLAVOR_OF[make]


def program(folder: Path, name: str, text: str = "#!/bin/sh\n") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_mpirun_of_the_path_is_taken_and_asked_what_it_is(tmp_path: Path) -> None:
    path = program(tmp_path, "mpirun", "#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
    found = mpi.installed("", "", {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert (found.path, found.flavor.name, found.version) == (path, "openmpi5", "5.0.11")


def test_intel_mpis_mpirun_gives_way_to_the_program_beside_it(tmp_path: Path) -> None:
    path = program(tmp_path, "mpirun")
    beside = program(tmp_path, "mpiexec.hydra")
    found = mpi.installed(path, "", {}, ask=lambda path, env: recorded("intel.version"))
    assert (found.path, found.flavor.name, found.version) == (beside, "intel", "2021.18.1")


def test_no_mpirun_is_an_error_that_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no mpirun or mpiexec") as caught:
        mpi.installed("", "", {"PATH": str(tmp_path)})
    assert "--mpirun" in caught.value.hint


def test_unknown_make_is_an_error_with_its_first_words(tmp_path: Path) -> None:
    path = program(tmp_path, "mpirun")
    with pytest.raises(UsageError, match="unknown make; its --version says: Fancy MPI 9") as caught:
        mpi.installed(path, "", {}, ask=lambda path, env: "\nFancy MPI 9\n")
    assert "--mpi-flavor" in caught.value.hint
    assert mpi.installed(path, "mpich", {}, ask=lambda path, env: "Fancy").flavor.name == "mpich"


def test_unknown_flavor_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="expected one of openmpi5, openmpi4, intel, mpich, found 'lam'"):
        mpi.installed("true", "lam", {"PATH": os.environ["PATH"]})


@pytest.mark.skipif(os.geteuid() != 0, reason="for root")
def test_open_mpi_runs_as_root_only_when_asked(tmp_path: Path) -> None:
    path = program(tmp_path, "mpirun", "#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    options = EngineOptions(own={"mpirun": path})
    asked = submission(*THREE, options=options)
    with pytest.raises(UsageError, match="does not run as root") as caught:
        mpi.Mpi().prepare(asked)
    assert "--engine-arg=--allow-run-as-root" in caught.value.hint
    for allowed in (
        dataclasses.replace(asked, options=options._replace(args=("--allow-run-as-root",))),
        dataclasses.replace(asked, options=options._replace(config={"args": "-v --allow-run-as-root"})),
        dataclasses.replace(
            asked, outer={**asked.outer, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        ),
    ):
        assert mpi.Mpi().prepare(allowed) == mpi.MpiPreparation(mpirun=path, flavor="openmpi4")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (EngineOptions(queue="all.q"), "--queue"),
        (EngineOptions(time_s=60.0), "--time"),
        (EngineOptions(project="p"), "--project"),
        (EngineOptions(worker=Needs(memory=1 << 30)), "--worker-memory"),
        (EngineOptions(server=Needs(memory=1 << 30)), "--server-memory"),
    ],
)
def test_what_only_a_queue_can_do_is_refused(options: EngineOptions, word: str) -> None:
    with pytest.raises(UsageError, match=f"{word} has no meaning here: mpirun asks no queue system"):
        mpi.check(submission(*THREE, options=options))


def test_how_ssh_reaches_a_host_is_said_in_its_own_configuration() -> None:
    with pytest.raises(UsageError, match="host d2: mpirun finds users") as caught:
        mpi.check(submission(HostSpec("d1"), HostSpec("d2", user="ann", port=2222)))
    assert caught.value.hint == "write there: Host d2; User ann; Port 2222"


# ---------------------------------------------------------------------- what is executed


@pytest.mark.parametrize("flavor", ["openmpi4", "openmpi5", "mpich", "intel"])
def test_script_and_hosts_file_are_the_recorded_ones(flavor: str) -> None:
    options = EngineOptions(args=("--mca", "x y"), config={"args": "-v"})
    place = {"openmpi4": "/usr/bin/mpirun", "openmpi5": "/opt/openmpi/bin/mpirun"}.get(flavor, "/opt/mpi/mpiexec.hydra")
    asked = submission(*THREE, servers=1, options=options, found=mpi.MpiPreparation(mpirun=place, flavor=flavor))
    script = mpi.Mpi().render(asked)
    assert script == mpi.Mpi().render(asked)
    assert script.commands == (("/state/jobs/calm otter/engine/mpirun.sh",),)
    shown = script.files["mpirun.sh"].replace(bootstrap.source(), "BOOTSTRAP") + "-- hosts\n" + script.files["hosts"]
    golden = RECORDED / f"{flavor}.golden"
    if os.environ.get("DISTRUN_UPDATE_GOLDEN"):
        golden.write_text(shown)
    assert shown == golden.read_text(), "it changed; if on purpose: DISTRUN_UPDATE_GOLDEN=1"


def test_a_sites_template_takes_the_place_of_ours(tmp_path: Path) -> None:
    own = tmp_path / "own.sh"
    own.write_text("#!/bin/sh\nmodule load openmpi\nexec @{mpirun} @{agent}\n")
    options = EngineOptions(config={"template": str(own)})
    found = mpi.MpiPreparation(mpirun="mpirun", flavor="mpich")
    script = mpi.Mpi().render(submission(*THREE, options=options, found=found)).files["mpirun.sh"]
    assert script.startswith("#!/bin/sh\nmodule load openmpi\nexec mpirun -f ")


def test_only_hosts_that_get_a_task_get_an_agent() -> None:
    specs = (HostSpec("h1", role="worker"), HostSpec("h2"), HostSpec("h3", slots=2, gpus="0,2"))
    grants = mpi.grants_of(submission(*specs, servers=1, workers=1))
    # The scheduler is in the first place, the server on the first host that takes one, the worker on the next.
    assert [(each.place, each.node) for each in grants] == [("0", "h1"), ("1", "h2"), ("2", "h3")]
    assert grants[2].cores == 2
    assert grants[2].resources.gpus == ("0", "2")
    assert [each.node for each in mpi.grants_of(submission(*specs, workers=1))] == ["h1"]


def test_too_few_slots_are_a_usage_error_before_anything_is_submitted_unless_oversubscribed() -> None:
    asked = submission(HostSpec("h1", slots=2), workers=3)
    with pytest.raises(UsageError, match="no room for worker-2") as caught:
        mpi.check(asked)
    assert "--oversubscribe" in caught.value.hint
    allowed = dataclasses.replace(asked, oversubscribe=True)
    mpi.check(allowed)
    assert [grant.node for grant in mpi.grants_of(allowed)] == ["h1"]
    limited = submission(HostSpec("h1", slots=2, max_slots=2), workers=3, oversubscribe=True)
    with pytest.raises(UsageError, match="no room for worker-2"):
        mpi.check(limited)


def test_slots_of_an_outer_allocation_are_kept() -> None:
    found = parse.find(None, None, {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2,1"})
    grants = mpi.grants_of(submission(*found.specs))
    assert [(each.node, each.cores) for each in grants] == [("n1", 2), ("n2", 1)]


def test_intel_mpi_is_told_in_whose_allocation_it_runs() -> None:
    assert mpi._bootstrap("intel", {"SLURM_JOB_ID": "1"}) == {"I_MPI_HYDRA_BOOTSTRAP": "slurm"}
    assert mpi._bootstrap("intel", {"PE_HOSTFILE": "f"}) == {"I_MPI_HYDRA_BOOTSTRAP": "sge"}
    assert mpi._bootstrap("intel", {"SLURM_JOB_ID": "1", "I_MPI_HYDRA_BOOTSTRAP": "ssh"}) == {}
    assert mpi._bootstrap("mpich", {"SLURM_JOB_ID": "1"}) == {}


# ---------------------------------------------------------------------- what mpirun says


@pytest.mark.parametrize("make", MAKES)
def test_host_that_is_not_reached_is_known_by_name(make: str) -> None:
    found = mpi.gone(recorded(f"unknown-{make}.txt"), UNKNOWN)
    assert list(found) == ["1"]
    assert "h9" in found["1"]
    assert "h9" in mpi.last_words(recorded(f"unknown-{make}.txt"))


@pytest.mark.parametrize("make", MAKES)
def test_missing_interpreter_is_told(make: str) -> None:
    assert "python9" in mpi.last_words(recorded(f"noprogram-{make}.txt"))


@pytest.mark.parametrize("make", MAKES)
def test_an_agents_last_words_are_known_by_its_rank(make: str) -> None:
    found = mpi.gone(recorded(f"refused-{make}.txt"), GRANTS)
    assert found == {"1": "distrun: this hosts python3 is Python 3.6.8; 3.8 or newer is needed"}


@pytest.mark.parametrize(("make", "host"), [("o4", "h3"), ("o5", "h3"), ("m4", ""), ("m5", "h3"), ("in", "h3")])
def test_host_that_went_while_the_job_ran_is_told(make: str, host: str) -> None:
    assert mpi.lost_node(recorded(f"lost-{make}.txt")) == host
    assert list(mpi.gone(recorded(f"lost-{make}.txt"), GRANTS)) == (["1"] if host else [])


def test_nothing_is_made_of_output_that_means_nothing() -> None:
    text = "Warning: Permanently added 'h1' (ED25519) to the list of known hosts.\n[1,0]<stdout>:up\n"
    text += "[h1:01172] plm:ssh: Warning: setpgid(1176,1176) failed in parent with errno=Permission denied(13)\n"
    assert mpi.gone(text, GRANTS) == {}
    assert mpi.lost_node(text) is None


# ---------------------------------------------------------------------- the child process


@pytest.fixture
def engine_job(tmp_path: Path) -> tuple[mpi.Mpi, Submission]:
    return mpi.Mpi(), submission(*THREE, folder=tmp_path, found=mpi.MpiPreparation(mpirun="mpirun", flavor="mpich"))


def begin(engine: mpi.Mpi, asked: Submission, text: str) -> Handle:
    script = engine.render(asked)
    program(asked.folder, "mpirun.sh", "#!/bin/sh\n" + text)
    return read(Handle, written(engine.submit(asked, script)))


def until_ended(engine: mpi.Mpi, handle: Handle) -> str:
    from fakeengine import wait_for

    wait_for(lambda: engine.look(handle).state == ENDED, "it has ended")
    wait_for(lambda: engine._guard is None or engine._is_reaped(), "the guard has ended")
    return engine.look(handle).text


def test_mpirun_that_ends_is_told_with_its_last_words(engine_job: tuple[mpi.Mpi, Submission]) -> None:
    engine, asked = engine_job
    handle = begin(
        engine, asked, "echo 'ssh: Could not resolve hostname h3: Name or service not known' >&2; exit 255\n"
    )
    text = until_ended(engine, handle)
    assert text == "mpirun ended with code 255: ssh: Could not resolve hostname h3: Name or service not known"
    assert list(engine.look(handle).gone) == ["1"]


def test_mpirun_has_the_secret_and_no_ones_rank(engine_job: tuple[mpi.Mpi, Submission]) -> None:
    engine, asked = engine_job
    outer = {**asked.outer, "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3", "OMPI_MCA_btl": "tcp", "A": "1"}
    asked = dataclasses.replace(asked, outer=outer, secret="hush")
    handle = begin(engine, asked, "env; pwd; readlink /proc/self/fd/0\n")
    until_ended(engine, handle)
    said = (asked.folder / "output").read_text().splitlines()
    assert {"DISTRUN_ENROLMENT=hush", "OMPI_MCA_btl=tcp", "A=1", f"DISTRUN_JOB_NONCE={NONCE}"} <= set(said)
    assert not [line for line in said if line.startswith(("OMPI_COMM", "PMIX_"))]
    assert said[-2:] == ["/", "/dev/null"]
    assert (asked.folder / "output").stat().st_mode & 0o777 == 0o600


def test_a_running_job_is_found_and_cancelled_by_another_process(engine_job: tuple[mpi.Mpi, Submission]) -> None:
    engine, asked = engine_job
    handle = begin(engine, asked, "trap '' TERM HUP INT; sleep 600 & wait\n")
    assert engine.look(handle).state == RUNNING
    assert [grant.node for grant in engine.look(handle).grants] == ["h1", "h3", "h2"]
    other = mpi.Mpi()
    found = [each for each in other.find() if each.marker == asked.marker]
    assert [each.handle for each in found] == [handle]
    assert found[0].marker.endswith(NONCE)
    other.cancel(handle)
    other.cancel(handle)
    until_ended(engine, handle)
    other.cancel(handle)
    assert other.look(handle).state == ENDED


def test_mpirun_ends_with_the_process_that_started_it(engine_job: tuple[mpi.Mpi, Submission]) -> None:
    engine, asked = engine_job
    handle = begin(engine, asked, "sleep 600\n")
    guard = engine._guard
    guard.stdin.close()  # as the kernel does when a process ends
    assert until_ended(engine, handle).startswith("mpirun was ended by SIGTERM")


def test_mpirun_that_is_killed_is_the_cause_whatever_it_said(engine_job: tuple[mpi.Mpi, Submission]) -> None:
    engine, asked = engine_job
    handle = begin(engine, asked, "echo Connection to h3 closed by remote host; kill -KILL $$\n")
    assert until_ended(engine, handle).startswith("mpirun was ended by SIGKILL")
    found = engine.explain(handle, "1")
    assert (found.code, found.lost) == (7, "mpirun")
    assert found.text == f"it was ended by SIGKILL on {handle.more['host']}"


def test_a_host_that_mpirun_lost_is_told_if_mpirun_ended_by_itself(
    engine_job: tuple[mpi.Mpi, Submission],
) -> None:
    engine, asked = engine_job
    handle = begin(engine, asked, "echo Connection to h3 closed by remote host; exit 137\n")
    until_ended(engine, handle)
    found = engine.explain(handle, "1")
    assert (found.text, found.lost) == ("mpirun lost its connection to h3", "")


def test_a_job_of_another_machine_is_not_touched(engine_job: tuple[mpi.Mpi, Submission]) -> None:
    handle = Handle("mpi", "1", {"start": "proc:x:1", "host": "elsewhere", "marker": "m", "folder": "/"})
    with pytest.raises(EngineError, match="runs on elsewhere"):
        engine_job[0].cancel(handle)
