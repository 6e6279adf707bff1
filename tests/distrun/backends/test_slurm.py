"""The Slurm engine, as far as it needs no Slurm: what is submitted, and what Slurm's own words mean.

The files in `slurm/` were printed by Slurm 22.05.8 on three nodes of two processors.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from distrun.backends import slurm
from distrun.backends import slurm_answers as answers
from distrun.backends.bootstrap import Bootstrap
from distrun.backends.engine import (
    ENDED,
    QUEUED,
    RUNNING,
    Answer,
    Explanation,
    Grant,
    Handle,
    QueueStatus,
    RoleGroup,
    Submission,
    check_size,
    examined,
    hint_of,
)
from distrun.backends.slurm import HINTS, Slurm, SlurmJob, SlurmPreparation, _most, components
from distrun.backends.slurm_answers import Component
from distrun.errors import UsageError
from distrun.request import EngineOptions, Needs
from distrun_runtime.contract.dataclass import read, written
from distrun_runtime.contract.plan import SERVER, WORKER

HERE = Path(__file__).parent / "slurm"
JOB = "calm-otter-7f3"
MARKER = "distrun-calm-otter-7f3-0123456789abcdef"
ANY = Component((("worker", 3),))


def told(name: str) -> str:
    return (HERE / name).read_text()


def jobs(name: str) -> list[answers.ScontrolJob]:
    return answers.jobs(told(name + ".scontrol"))


def submission(
    options: EngineOptions | None = None,
    servers: int = 1,
    workers: int = 2,
    found: SlurmPreparation = SlurmPreparation(),  # noqa: B008
    outer: Mapping[str, str] | None = None,
) -> Submission:
    options = options or EngineOptions()
    groups = (RoleGroup(SERVER, servers, options.server), RoleGroup(WORKER, workers, options.worker))
    return Submission(
        job=JOB,
        marker=MARKER,
        groups=tuple(group for group in groups if group.count),
        options=options,
        bootstrap=Bootstrap(JOB, "{certificate}", ("10.0.0.1:4711",), 120.0),
        folder=Path("/users/ann/jobs/engine"),
        cwd="/users/ann/work",
        secret="5ec4e7",
        found=found,
        outer=outer or {},
    )


def rendered(asked: Submission) -> tuple[str, tuple[str, ...]]:
    """Return the script without the bootstrap's program, and the command."""
    script = Slurm().render(asked)
    [argv] = script.commands
    return script.files.get("slurm.sh", "").replace(program(asked), "PROGRAM"), tuple(
        word.replace(program(asked), "PROGRAM") for word in argv
    )


def program(asked: Submission) -> str:
    return asked.bootstrap.command("python3", "p", "s")[3]


# ------------------------------------------------------------------ what is submitted


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("plain", submission()),
        ("shared", submission(found=SlurmPreparation(is_shared=True))),
        (
            "het",
            submission(
                EngineOptions(
                    queue="gpu",
                    time_s=5400.5,
                    project="ml",
                    args=("--nodelist=h[1-3]", "--comment=two words"),
                    worker=Needs(4, 8 << 30, 2),
                    server=Needs(2),
                ),
                servers=2,
                workers=4,
                found=SlurmPreparation(most=(2, 2)),
            ),
        ),
    ],
)
def test_the_script_and_the_command_are_these(name: str, asked: Submission) -> None:
    script, argv = rendered(asked)
    text = script + "\n# executed:\n" + "".join(f"# {word}\n" for word in argv)
    assert text == told(name + ".golden")


def test_nothing_but_the_script_has_the_secret_and_a_shared_folder_needs_none_there() -> None:
    script, argv = rendered(submission())
    assert "5ec4e7" in script
    assert "5ec4e7" not in " ".join(argv)
    assert "5ec4e7" not in rendered(submission(found=SlurmPreparation(is_shared=True)))[0]
    assert "5ec4e7" not in repr(submission())


def test_inside_an_allocation_srun_is_all_that_is_executed() -> None:
    found = SlurmPreparation(inside="20", nodes="h1,h2", sizes=("2",))
    script, argv = rendered(submission(found=found))
    assert script == ""
    assert argv[0] == "srun"
    assert {"--jobid=20", "--overlap", "--nodelist=h1,h2", "--nodes=2", "--ntasks=2", f"--job-name={MARKER}"} <= {*argv}
    assert {"--cpu-bind=none", "--mem=0", "--mpi=none", "--kill-on-bad-exit=0", "--ntasks-per-node=1"} <= {*argv}
    assert argv[-5:] == (JOB, "env:SLURMD_NODENAME", "env:DISTRUN_ENROLMENT", "120", "10.0.0.1:4711")


def test_the_users_template_and_commands_take_the_place_of_ours(tmp_path: Path) -> None:
    own = tmp_path / "own.sh"
    own.write_text(
        "#!/bin/bash\n#SBATCH --constraint=ib\nmodule load python\n@{secret}\nagent=(@{agent})\nexec @{srun}\n"
    )
    config = {"template": str(own), "submit": "/opt/wrap sbatch", "args": "--qos 'a b'", "srun_args": "--quiet"}
    script, argv = rendered(submission(EngineOptions(config=config)))
    assert script.startswith("#!/bin/bash\n#SBATCH --constraint=ib\nmodule load python\nexport DISTRUN_ENROLMENT=")
    assert " --quiet --nodes=" in script
    assert argv[:3] == ("/opt/wrap", "sbatch", "--parsable")
    assert argv[-3:-1] == ("--qos", "a b")


def test_the_template_may_name_only_what_there_is(tmp_path: Path) -> None:
    own = tmp_path / "own.sh"
    own.write_text("@{nodes}")
    with pytest.raises(UsageError, match="known names: agent, log, secret, srun"):
        Slurm().render(submission(EngineOptions(config={"template": str(own)})))


def test_tasks_that_need_gpus_are_spread_so_that_all_nodes_are_alike() -> None:
    nodes = [each.room for each in answers.partitions("debug|1:00:00|16|64000|gpu:a100:4(S:0-1)|8|up\n")]
    for tasks, gpus, most in ((4, 1, 4), (6, 1, 3), (7, 1, 1), (4, 2, 2), (2, 8, 1)):
        [asked] = components(submission(EngineOptions(worker=Needs(gpus=gpus)), servers=0, workers=tasks))
        assert _most(asked, nodes) == most, (tasks, gpus)


# ------------------------------------------------------------------ what Slurm says


def test_a_job_that_waits_says_for_what() -> None:
    waiting = answers.position("2\n3\n4_[1-9]\n", "3")
    assert waiting == "position 2"
    standing = answers.standing(jobs("pending"), (), waiting)
    assert standing.state == QUEUED
    assert standing.text == "position 2 in debug (Priority)"
    het = answers.standing(jobs("het-pending"), (), answers.position("9\n12+0\n12+1\n", "12"))
    assert (het.state, het.text) == (QUEUED, "position 2 in debug (Resources)")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"reason": "PartitionConfig"},
            "it cannot start as it is: PartitionConfig in debug; scontrol show job 3 says more",
        ),
        ({"reason": "JobHeldUser"}, "held; to release it: scontrol release 3"),
        ({"state": "CONFIGURING"}, "its nodes are booting"),
        ({"reason": "QOSMaxJobsPerUserLimit"}, "waits in debug (QOSMaxJobsPerUserLimit)"),
    ],
)
def test_what_a_job_waits_for_is_told_with_what_to_do(changes: dict[str, str], text: str) -> None:
    [job] = jobs("pending")
    assert answers.standing([dataclasses.replace(job, **changes)], ()).text == text  # type: ignore[arg-type]


def test_a_place_is_a_node_with_its_processors() -> None:
    assert answers.grants(jobs("running"), [ANY], True) == (
        Grant("h1", "h1", cores=2),
        Grant("h2", "h2", cores=1),
    )
    assert [each.cores for each in answers.grants(jobs("running"), [ANY], False)] == [0, 0]


def test_the_components_of_a_heterogeneous_job_take_their_own_roles() -> None:
    parts = [Component((("server", 1),), Needs(2)), Component((("worker", 3),))]
    assert answers.grants(jobs("het-running"), parts, True) == (
        Grant("0", "h1", {"server": 1}, 2),
        Grant("1", "h2", {"worker": 2}, 2),
        Grant("2", "h3", {"worker": 1}, 1),
    )
    assert answers.grants(jobs("het-pending"), parts, True) == ()


def test_an_allocation_of_the_users_has_room_for_all_tasks_that_asked_for_no_cores() -> None:
    parts = [Component((("server", 5),)), Component((("worker", 400),))]
    takes = [each.takes for each in answers.grants(jobs("het-running"), parts, False)]
    assert {role for each in takes for role in each} == {"server", "worker"}
    assert all(each in ({"server": 5}, {"worker": 400}) for each in takes)


def test_the_file_system_of_a_folder_is_told_by_the_kernel() -> None:
    assert slurm._file_system(Path("/proc/self")) == "proc"
    assert slurm._file_system(Path("/proc/none/of/this")) == "proc"


def test_what_a_command_says_last_is_heard_after_any_length_of_warnings() -> None:
    assert Answer(1, "", "warning: x\n" * 100 + "Invalid job id specified\n").said.endswith("Invalid job id specified")


def test_nodes_that_are_alike_are_told_as_a_list() -> None:
    [job] = jobs("node-before")
    assert job.cpus == {"h1": 2, "h2": 2, "h3": 2}


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("oom", 137, "Slurm: out of memory (MaxRSS 78352K, the job asked for 100M); raise --worker-memory"),
        ("timeout", 124, "Slurm: the job reached the time limit of 00:01:00; raise --time"),
        ("cancelled", 143, "Slurm: cancelled from outside by user 0"),
        ("preempted", 7, "Slurm: preempted by a job of higher priority"),
        ("node-fail", 7, "Slurm: a node failed (NODE_FAIL)"),
    ],
)
def test_why_slurm_ended_a_job(name: str, code: int, text: str) -> None:
    found = answers.explanation(jobs(name), told(name + ".sacct"))
    assert (found.code, found.text[: len(text)]) == (code, text)
    alone = answers.explanation(jobs(name))
    assert alone is not None, "without accounting"
    assert alone.code == code


@pytest.mark.parametrize("states", [("h1 idle\nh2 down*\n",), ("h1 idle\nh2 down\n", "h1 idle\nh2 idle\n")])
def test_a_node_that_was_seen_down_is_named_as_the_one_that_failed(
    states: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list(states)
    engine = Slurm()

    def ask(program: str, *words: str, **more: object) -> str:
        return told("node-fail.scontrol") if program == "scontrol" else said.pop(0) if program == "sinfo" else ""

    monkeypatch.setattr(engine, "_ask", ask)
    handle = Handle("slurm", "21", {"log": "/nowhere"})
    if len(said) > 1:
        running = QueueStatus(RUNNING, "", (Grant("h2", "h2"),))
        engine._without_lost_nodes(running, is_ending=False)
    found = engine.explain(handle, "h1")
    assert (found.code, found.lost) == (7, "h2")
    assert found.text.startswith("Slurm: a node failed (NODE_FAIL): h2 is down")


def test_a_place_of_a_job_that_runs_is_lost_if_its_node_is_down_and_not_by_what_is_said_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"scontrol": told("running.scontrol"), "sinfo": "h1 idle\nh2 down*\n"}
    engine = Slurm()
    monkeypatch.setattr(engine, "_ask", lambda program, *words, **more: said.get(program, ""))
    monkeypatch.setattr(slurm, "EXPLAIN_S", 0.0)
    (tmp_path / "log").write_text("srun: error: h1: task 0: what it is is not known\n")
    handle = Handle("slurm", "21", {"log": str(tmp_path / "log"), "components": [[[["worker", 3]], [1, 0, 0], 0]]})
    assert engine.explain(handle, "h2") == Explanation(7, "Slurm: h2 is down*")
    assert engine.explain(handle, "h1") is None


@pytest.mark.parametrize("name", ["completed", "failed", "running", "pending"])
def test_a_job_that_slurm_did_not_end_is_not_explained(name: str) -> None:
    assert answers.explanation(jobs(name)) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("completed", "COMPLETED"),
        ("failed", "FAILED, exit code 6"),
        ("timeout", "TIMEOUT (TimeLimit)"),
        ("node-fail", "NODE_FAIL (NodeDown)"),
        ("het-cancelled", "CANCELLED"),
    ],
)
def test_a_job_that_has_ended_says_how(name: str, text: str) -> None:
    standing = answers.standing(jobs(name), ())
    assert (standing.state, standing.text) == (ENDED, text)


def test_while_slurm_ends_a_job_all_its_places_are_gone() -> None:
    [job] = jobs("running")
    places = (Grant("h1", "h1"), Grant("h2", "h2"))
    standing = answers.standing([dataclasses.replace(job, state="COMPLETING")], places)
    assert standing.state == RUNNING
    assert set(standing.gone) == {"h1", "h2"}


def test_a_job_that_slurm_has_forgotten_has_ended() -> None:
    assert answers.standing(answers.jobs(""), ()).state == ENDED


def test_nodes_that_are_down_are_told_and_silent_ones_are_not() -> None:
    states = answers.node_states("h1 allocated\nh2 down*\nh3 allocated*\nh4 completing\n")
    assert answers.down_nodes(states) == {"h2": "down*"}


def test_a_job_that_ends_does_not_wait_for_a_node_that_does_not_answer() -> None:
    ending = answers.standing([dataclasses.replace(job, state="COMPLETING") for job in jobs("running")], ())
    for text, state in (
        ("h1 completing\nh2 completing*\n", RUNNING),
        ("h1 idle\nh2 completing*\n", ENDED),
        ("h1 idle\nh2 down*\n", ENDED),
        ("h1 idle\nh2 completing\n", RUNNING),
    ):
        assert answers.ended_but_for_lost(ending, answers.node_states(text)).state == state


def test_what_srun_says_of_agents_is_told_by_node() -> None:
    log = "srun: error: h2: task 1: Killed\nsrun: error: h[3-4]: tasks 2-3: Exited with exit code 6\n"
    log += "srun: error: h1: task 0: Out Of Memory\n"
    said = answers.told_by_srun(log)
    assert (said["h2"], said["1"], said["h4"]) == ("Killed", "Killed", "Exited with exit code 6")
    found = answers.explained_by_srun(said["h1"])
    assert found.code == 137
    assert answers.explained_by_srun(said["h3"]) is None


def test_my_jobs_are_found_by_their_names_and_components_are_one_job() -> None:
    found = answers.marked(told("me.squeue") + told("het-me.squeue") + "30|train|RUNNING\n", told("steps.squeue"))
    assert found == {
        number: (MARKER, state)
        for number, state in (
            ("2", "PENDING"),
            ("3", "PENDING"),
            ("1", "RUNNING"),
            ("12", "PENDING"),
            ("10", "RUNNING"),
        )
    }
    assert answers.marked("20|interactive|RUNNING\n", f"20.0|{MARKER}\n20.extern|extern\n") == {
        "20.0": (MARKER, "RUNNING")
    }


def test_what_no_partition_takes_is_refused() -> None:
    found = answers.partitions(told("partitions.sinfo"))
    assert [(each.name, each.time_s, each.room.cores, each.room.gpus) for each in found] == [
        ("debug", None, 2, 2),
        ("urgent", 3600.0, 2, 2),
        ("small", 300.0, 2, 2),
    ]
    with pytest.raises(UsageError, match=r"^--queue nope: Slurm has no partition nope; it has: debug, urgent, small"):
        answers.refuse_partition(found, "nope", None)
    with pytest.raises(UsageError, match=r"^--time 10 min: jobs in small may run for 5 min at most"):
        answers.refuse_partition(found, "small", 600.0)
    answers.refuse_partition(found, "small,debug", 600.0)
    rooms = [each.room for each in answers.of_queue(found, "small")]
    check_size([RoleGroup("worker", 1, Needs(2, 1 << 30, 2))], rooms, "node", "")
    for role, needs, text in (
        ("worker", Needs(3), "--worker-cores: 3 asked for, but no node has more than 2"),
        ("server", Needs(1, 8 << 30), "--server-memory: 8192 MiB asked for"),
    ):
        with pytest.raises(UsageError, match=text):
            check_size([RoleGroup(role, 1, needs)], rooms, "node", "")
    apart = [Needs(4, 1 << 30, 0), Needs(1, 4 << 30, 1)]
    with pytest.raises(UsageError, match="no node has the cores, the memory and the GPUs that one worker asks for"):
        check_size([RoleGroup("worker", 1, Needs(4, 1 << 30, 1))], apart, "node", "")
    check_size([RoleGroup("worker", 1, Needs(99))], [], "node", "")


def test_what_sbatch_refuses_comes_with_what_to_type() -> None:
    said = "sbatch: error: Batch job submission failed: Invalid partition name specified"
    assert "--queue" in hint_of(said, HINTS)
    assert hint_of("sbatch: error: something else", HINTS) == ""


def test_a_machine_without_slurm_is_told_and_a_dry_run_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = EngineOptions(config={"bin": "/nowhere"}, worker=Needs(gpus=1))
    asked = submission(nowhere, servers=0)
    with pytest.raises(Exception, match="sinfo is not on this machine") as caught:
        Slurm().prepare(asked)
    assert "bin = 'DIR'" in getattr(caught.value, "hint", "")
    assert Slurm().prepare(dataclasses.replace(asked, is_dry=True)) == SlurmPreparation(most=(2,))
    inside = dataclasses.replace(asked, is_dry=True, outer={"SLURM_JOB_ID": "20"})
    assert "--jobid=20" in Slurm().render(dataclasses.replace(inside, found=Slurm().prepare(inside))).commands[0]
    engine = Slurm()
    engine.options = nowhere
    [finding] = examined(engine)
    assert not finding.ok


@pytest.mark.parametrize("fails", ["srun", "scontrol", "none"])
def test_commands_without_a_controller_are_told_with_what_to_type(fails: str, tmp_path: Path) -> None:
    for name in ("sbatch", "srun", "scontrol"):
        says = "exit 1" if name == fails else "echo Slurmctld is DOWN"
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
    engine = Slurm()
    engine.options = EngineOptions(config={"bin": str(tmp_path)})
    finding = next(each for each in examined(engine) if not each.ok)
    assert "systemctl start slurmctld" in finding.fix


def test_more_tasks_than_an_allocation_has_processors_are_told() -> None:
    found = answers.jobs(told("running.scontrol"))
    cpus = sum(count for job in found for count in job.cpus.values())
    servers, workers = RoleGroup("server", 1, Needs()), RoleGroup("worker", cpus, Needs())
    assert answers.crowded(found, [workers]) == ""
    text = answers.crowded(found, [servers, workers])
    assert f"has {cpus} processors, and 1 server + {cpus} worker want {cpus + 1}" in text
    assert "--oversubscribe" in text


def test_options_of_a_queue_mean_nothing_inside_an_allocation() -> None:
    asked = submission(EngineOptions(queue="gpu"), outer={"SLURM_JOB_ID": "20"})
    with pytest.raises(UsageError, match="--queue has no meaning here: this is inside Slurm's job 20"):
        Slurm().prepare(asked)


def test_a_handle_survives_json() -> None:
    handle = Handle(
        "slurm", "12", SlurmJob("/x", components=(ANY,), grants=(Grant("h1", "h1", {"worker": 2}),))._asdict()
    )
    job = SlurmJob.of(read(Handle, json.loads(json.dumps(written(handle)))))
    assert [(each.place, each.takes) for each in job.grants] == [("h1", {"worker": 2})]
    assert [(each.tasks, each.needs.cores) for each in job.components] == [(3, 0)]
