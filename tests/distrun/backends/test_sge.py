"""The engine sge without a Grid Engine: what is submitted, what is read from recorded answers, and its script.

The files in `sge/` are what Grid Engine 8.1.9 said. The tests with a real one are in tests/engines/test_sge.py.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from slowness import scaled

from distrun.backends import bootstrap, sge
from distrun.backends.bootstrap import Bootstrap
from distrun.backends.engine import ENDED, QUEUED, RUNNING, EngineError, Handle, RoleGroup, Submission
from distrun.backends.sge import Sge
from distrun.errors import UsageError
from distrun.request import EngineOptions, Needs

HERE = Path(__file__).resolve().parent / "sge"
SECRET = "5e" * 32
START = Bootstrap("merry-fox-1a2", "ab" * 32, ("10.0.0.1:4000", "[fd00::1]:4000"), 120.0)
MPI = sge.SgePreparation(pe="mpi")
GIB = 2**30


def recorded(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def environments(*names: str) -> list[dict[str, str]]:
    return [sge.parse_settings(recorded(f"pe_{name}.txt")) for name in names]


def submission(
    servers: int = 2,
    workers: int = 4,
    *,
    found: sge.SgePreparation = MPI,
    folder: Path = Path("/nfs/jobs/engine"),
    python: str = "python3",
    **options: object,
) -> Submission:
    engine = EngineOptions(**options)  # type: ignore[arg-type]
    groups = (RoleGroup("server", servers, engine.server), RoleGroup("worker", workers, engine.worker))
    return Submission(
        job=START.job,
        marker="distrun-merry-fox-1a2-0123456789abcdef",
        groups=tuple(group for group in groups if group.count),
        options=engine,
        bootstrap=START,
        folder=folder,
        cwd="/nfs/anna",
        python=python,
        secret=SECRET,
        found=found,
    )


# What is submitted.


def test_the_script_is_the_golden_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "source", lambda: "PROGRAM")
    made = Sge().render(submission())
    assert made.files["sge.sh"] == recorded("golden.sh")


def test_a_parallel_job_asks_for_a_slot_for_each_task() -> None:
    assert Sge().render(submission()).commands == (
        (
            *("qsub", "-terse", "-N", "distrun-merry-fox-1a2-0123456789abcdef", "-S", "/bin/sh"),
            *("-b", "n", "-sync", "n", "-wd", "/", "-o", "/dev/null", "-j", "y", "-r", "n", "-notify"),
            *("-pe", "mpi", "6", "/nfs/jobs/engine/sge.sh"),
        ),
    )


def test_options_become_those_of_qsub() -> None:
    words = sge.qsub(
        submission(
            queue="long.q",
            project="vision",
            time_s=90.5,
            args=("-l", "exclusive=true"),
            worker=Needs(cores=2),
            config={"submit": "/opt/bin/qsub", "args": "-m n"},
        ),
        MPI,
    )
    assert words[0] == "/opt/bin/qsub"
    assert words[words.index("-pe") :] == (
        *("-pe", "mpi", "10", "-q", "long.q", "-P", "vision", "-l", "h_rt=91", "-m", "n", "-l", "exclusive=true"),
    )


def test_an_array_has_a_task_for_each_task() -> None:
    words = sge.qsub(submission(), sge.SgePreparation(pe="none"))
    assert words[-2:] == ("-t", "1-6")
    assert "-pe" not in words
    with pytest.raises(UsageError, match="need a parallel environment"):
        sge.qsub(submission(worker=Needs(cores=2)), sge.SgePreparation(pe="none"))


def test_the_secret_is_in_no_script_and_no_argument() -> None:
    made = Sge().render(submission())
    assert SECRET not in str(made)
    assert SECRET not in repr(submission())


@pytest.mark.parametrize(
    ("kind", "asked"),
    [("NO", ["mem_free=8192M", "gpu=2"]), ("YES", ["mem_free=4096M", "gpu=1"]), ("JOB", ["mem_free=20480M", "gpu=4"])],
)
def test_resources_are_counted_as_grid_engine_consumes_them(kind: str, asked: list[str]) -> None:
    told = submission(server=Needs(memory=2 * GIB), workers=2, worker=Needs(cores=2, memory=8 * GIB, gpus=2), servers=2)
    assert sge.requests(told, sge.SgePreparation(complexes={"mem_free": kind, "gpu": kind})) == asked


def test_a_resource_that_is_not_defined_is_named_with_what_to_type() -> None:
    found = sge.SgePreparation(complexes=sge.parse_complexes(recorded("complexes.txt")))
    with pytest.raises(UsageError, match="no resource 'gpu'") as caught:
        sge.requests(submission(worker=Needs(gpus=1)), found)
    assert "gpu = 'NAME'" in caught.value.hint
    named = submission(worker=Needs(memory=GIB), config={"memory": "mf"})
    assert sge.requests(named, found) == ["mf=1024M"]


def test_gpus_that_slots_cannot_share_are_refused() -> None:
    with pytest.raises(UsageError, match="a task with 4 slots"):
        sge.requests(submission(worker=Needs(cores=4, gpus=1)), sge.SgePreparation(complexes={"gpu": "YES"}))


# Which parallel environment.


def test_the_only_environment_over_several_hosts_is_taken() -> None:
    assert sge.choose(environments("mpi", "smp", "loose"), "") == "mpi"
    assert sge.choose(environments("smp"), "") == "smp"


def test_without_one_that_may_start_agents_the_job_is_an_array() -> None:
    assert sge.choose(environments("loose"), "") == "none"
    assert sge.choose([], "") == "none"
    assert sge.choose(environments("mpi"), "none") == "none"


def test_several_environments_are_listed() -> None:
    with pytest.raises(UsageError, match="--pe is needed") as caught:
        sge.choose(environments("mpi", "fill", "loose"), "")
    assert "mpi ($round_robin, 999 slots), fill ($fill_up, 999 slots), loose ($round_robin, 999 slots, no qrsh)" in (
        caught.value.hint
    )


def test_an_environment_that_is_not_there_or_starts_no_agents_is_refused() -> None:
    with pytest.raises(UsageError, match="--pe nope: there is no such"):
        sge.choose(environments("mpi"), "nope")
    with pytest.raises(UsageError, match="control_slaves is FALSE"):
        sge.choose(environments("mpi", "loose"), "loose")


# What Grid Engine says.


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("12\n", "12"),
        ("12.1-4:1\n", "12"),
        ("Welcome to our cluster\nquota: 3\n  77  \n", "77"),
        ('Your job 31 ("x") has been submitted\n', "31"),
        ('Your job-array 32.1-4:1 ("x") has been submitted\n', "32"),
        ("Unable to run job\n", ""),
    ],
)
def test_the_job_number_is_found_in_what_qsub_says(said: str, number: str) -> None:
    assert sge.parse_id(said) == number


def test_the_hosts_of_a_parallel_job_have_their_slots() -> None:
    rows = [row for row in sge.parse_jobs(recorded("qstat_running.xml")) if row.id == "1"]
    assert [(each.place, each.node, each.cores) for each in sge.grants(rows, sge.SgeJob(slots=6))] == [
        ("h1", "h1", 2),
        ("h2", "h2", 2),
        ("h3", "h3", 2),
    ]


def test_a_script_that_is_the_first_task_has_a_slot() -> None:
    rows = [row for row in sge.parse_jobs(recorded("qstat_first_task.xml")) if row.id == "25"]
    found = sge.grants(rows, sge.SgeJob(slots=4))
    assert [(each.place, each.cores) for each in found] == [("h1", 2), ("h2", 1), ("h3", 1)]


def test_the_first_tasks_of_an_array_are_servers() -> None:
    rows = [row for row in sge.parse_jobs(recorded("qstat_first_task.xml")) if row.id == "26"]
    found = sge.grants(rows, sge.SgeJob(True, 3, servers=1))
    assert [(each.place, each.node, dict(each.takes)) for each in found] == [
        ("1", "h1", {"server": 1}),
        ("2", "h1", {"worker": 1}),
        ("3", "h2", {"worker": 1}),
    ]


def test_the_position_is_that_among_jobs_that_may_run() -> None:
    """Jobs on hold or in an error state are before nobody."""
    rows = sge.parse_jobs(recorded("qstat_waiting.xml"))
    assert sge.position(rows, "5") == "position 1 of 3"
    assert sge.position(rows, "4") == "position 2 of 3"
    assert sge.position(rows, "99") == "waiting to be scheduled"
    assert [row.state for row in rows if row.id in ("6", "7")] == ["Eqw", "hqw"]


def test_reasons_of_an_error_state_are_told_without_their_dates() -> None:
    assert sge.parse_errors(recorded("qstat_error.xml")) == "can't chdir to /nonexistent: No such file or directory"
    assert sge.parse_errors("no xml") == ""


def test_hosts_that_are_not_heard_of_are_known() -> None:
    assert sge.parse_states(recorded("qstat_unheard.xml")) == {"all.q@h3": "u"}
    assert sge.parse_states("") == {}


def test_why_a_job_waits_is_what_the_scheduler_says_and_why_its_start_failed() -> None:
    said = recorded("qstat_prolog.xml")
    messages = sge.parse_messages(said, "62")
    assert len(messages) == 4
    assert len(sge.parse_messages(said, "63")) == 2  # of all jobs
    states = sge.parse_states(recorded("qstat_states.xml"))
    assert sge.reasons(messages, sge.parse_errors(said), states) == (
        "could not be started: exit_status of prolog = 1; not cleaned up after an earlier start: h3; "
        "in an error state (E): all.q@h1; disabled: all.q@h2"
    )
    assert sge.parse_messages("", "62") == []


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            'Job 5 (-l slots=1) cannot run in queue "all.q@h1" because it offers only qc:slots=0.000000\n'
            'Job 5 (-l slots=1) cannot run in queue "all.q@h2" because it offers only qc:slots=0.000000\n'
            'Job 5 cannot run in PE "mpi" because it only offers 3 slots\n'
            "verification: no suitable queues\n",
            "full: all.q; too few slots are free in mpi",
        ),
        (
            'Job 15 (-l mem_free=100G,h_rt=9) cannot run in queue "h1" because it offers only hl:mem_free=19.708G\n'
            'Job 15 (-l mem_free=100G,h_rt=9) cannot run in queue "h2" because it offers only hl:mem_free=19.693G\n'
            'Job 15 cannot run in PE "mpi" because it only offers 0 slots\n',
            "no mem_free=100G: h1, h2",
        ),
        (
            "".join(f'Job 7.1 queue instance "all.q@h{i}" dropped because it is disabled\n' for i in range(5))
            + 'Job 7.1 cannot run in queue "b.q" because it is not contained in its hard queue list (-q)\n',
            "disabled: all.q@h0, all.q@h1, all.q@h2 and others",
        ),
        (
            'Job 7 queue instance "a@h1" dropped because it is overloaded: np_load_avg=2.8 (no load adjustment) >= 1.75'
            '\nJob 7 cannot run because it exceeds limit "ann/////" in rule "max/1"',
            'overloaded: a@h1; cannot run because it exceeds limit "ann/////" in rule "max/1"',
        ),
        ("verification: found possible assignment with 2 slots\n", ""),
        ("denied: job is not yours\n", ""),
    ],
)  # fmt: skip
def test_why_a_job_waits_is_told_without_numbers_that_change(said: str, why: str) -> None:
    assert sge.reasons(sge.parse_verdict(said), "", {}) == why


def test_queues_in_an_error_state_are_why_a_start_failed_before_the_scheduler_looked_again() -> None:
    none = "There are no messages available"
    told = "<a><messages><element><SME_global_message_list><element><MES_message_number>90</MES_message_number>"
    told += f"<MES_message>{none}</MES_message></element></SME_global_message_list></element></messages></a>"
    assert sge.parse_messages(told, "62") == []
    messages = sge.parse_verdict(f"Job 62 {none}\n")
    states = sge.parse_states(recorded("qstat_states.xml"))
    assert sge.reasons(messages, "exit_status of prolog = 1", states) == (
        "could not be started: exit_status of prolog = 1; in an error state (E): all.q@h1"
    )
    assert sge.reasons(messages, "no such folder", {"all.q@h2": "d"}) == "could not be started: no such folder"


def test_what_is_free_is_verified_as_what_there_is_in_all() -> None:
    def asked(requests: str) -> tuple[str, ...]:
        return sge.in_an_empty_cluster(
            ("qsub", "-l", requests, "-pe", "mpi", "2"), recorded("complexes.txt"), recorded("qhost.txt")
        )

    assert asked("h_rt=9,mem_free=8192M,arch=lx-amd64")[1:3] == ("-l", "h_rt=9,mem_total=8192M,arch=lx-amd64")
    assert asked("mf=1G")[1:3] == ("-l", "mem_total=1G")
    assert asked("cpu=50") == ("qsub", "-pe", "mpi", "2")
    consumed = recorded("complexes.txt").replace("YES         NO ", "YES         YES")
    assert sge.in_an_empty_cluster(("-l", "mf=1G"), consumed, recorded("qhost.txt")) == ("-l", "mf=1G")


def test_what_is_no_xml_is_an_error_that_shows_it() -> None:
    with pytest.raises(EngineError, match="expected XML, found 'quota exceeded'"):
        sge.parse_jobs("quota exceeded")


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("killed", 143, "deleted or killed from outside"),
        ("grace", None, ""),  # the script's own 143
        ("time", 124, "the time limit of 3 s was reached; raise --time"),
        ("eqw", 6, "h1 could not run the script: changing into working directory"),
        ("seven", None, ""),
        ("array", None, ""),
    ],
)
def test_the_accounting_explains_an_end(name: str, code: int | None, text: str) -> None:
    found = sge.explanation(sge.parse_accounting(recorded(f"qacct_{name}.txt")), False, "")
    assert (found and found.code) == code
    assert found is None or text in found.text


def test_memory_beyond_h_vmem_is_told_from_the_time_limit() -> None:
    record = sge.AccountingRecord("h2", "", 37, "qmaster enforced h_rt, h_cpu, or h_vmem limit", 137, 5.0, "2.1G", "")
    both = record._replace(category="-l h_rt=3600,h_vmem=2G -pe mpi 2")
    found = sge.explanation([both], False, "h2")
    assert found.code == 137
    assert "maxvmem 2.1G of h_vmem 2G" in found.text
    late = sge.explanation([both._replace(wall_s=3600.0)], False, "h2")
    assert late.code == 124


def test_a_host_that_stopped_at_the_time_limit_was_not_cancelled() -> None:
    """The limit is recorded at the first host only, and maybe later."""
    other = sge.AccountingRecord("h2", "", 0, "", 140, 10.0, "", "-l h_rt=12 -pe mpi 2")
    head = other._replace(host="h1", failed=37, failure="qmaster enforced h_rt, h_cpu, or h_vmem limit", wall_s=12.0)
    for records in ([other], [other, head]):
        found = sge.explanation(records, False, "h2")
        assert (found.code, found.text) == (124, "Grid Engine: the time limit of 12 s was reached; raise --time")
    early = sge.explanation([other._replace(wall_s=5.0)], False, "h2")
    assert early.code == 143


def test_the_time_limit_counts_from_the_first_host_that_began() -> None:
    first = sge.AccountingRecord("h1", "", 0, "", 140, 12.0, "", "-l h_rt=12 -pe mpi 2")
    late = first._replace(host="h2", wall_s=4.0)
    assert sge.explanation([late, first], False, "h2").code == 124
    tasks = [late._replace(task="2"), first._replace(task="1")]
    assert sge.explanation(tasks, True, "2").code == 143  # of an array, each has its own limit


def test_a_script_that_could_not_be_run_is_the_cause_of_what_was_ended_beside_it() -> None:
    """What was started beside it is the command that brings the secret."""
    beside = sge.AccountingRecord("h1", "", 100, "assumedly after job", 0, 0.0, "0.000B", "-pe mpi 1")
    script = beside._replace(failed=28, failure="changing into working directory")
    for records in ([beside, script], [script, beside]):
        found = sge.explanation(records, False, "h1")
        assert (found.code, found.text) == (
            6,
            "Grid Engine: h1 could not run the script: changing into working directory",
        )


def test_without_accounting_nothing_is_explained() -> None:
    assert sge.parse_accounting("error: job id 99999 not found\n") == []
    assert sge.explanation([], False, "h2") is None


# How a job stands: the commands are stand-ins that print recorded answers.


class Commands:
    """`qstat` and the others as shell scripts, first on the search path; `said` has what they were called with."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "called"
        self._log.touch()
        for name in ("qsub", "qstat", "qdel", "qacct", "qrsh", "qconf", "qalter", "qhost"):
            self.answer(name, "exit 0")

    def answer(self, name: str, script: str) -> None:
        path = self._folder / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>{self._log}\n{script}\n')
        path.chmod(0o755)

    @property
    def said(self) -> list[str]:
        return self._log.read_text().splitlines()


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(sge, "_user", lambda: "root")
    return Commands(folder)


def test_a_job_that_qstat_does_not_list_has_ended(commands: Commands) -> None:
    commands.answer("qstat", "echo '<job_info/>'")
    commands.answer("qacct", f"cat {HERE}/qacct_killed.txt")
    found = Sge().look(Handle("sge", "9"))
    assert found.state == ENDED
    assert "deleted or killed from outside" in found.text


def test_a_job_that_waits_tells_its_position(commands: Commands) -> None:
    commands.answer("qstat", f"cat {HERE}/qstat_waiting.xml")
    found = Sge().look(Handle("sge", "4"))
    assert (found.state, found.text) == (QUEUED, "position 2 of 3")
    assert Sge().look(Handle("sge", "7")).text.startswith("on hold (state hqw)")


def test_a_job_that_waits_tells_why_and_the_queue_is_not_asked_each_time(commands: Commands) -> None:
    commands.answer("qstat", f"case $* in *-f*) cat {HERE}/qstat_states.xml;; *) cat {HERE}/qstat_waiting.xml;; esac")
    engine = Sge()
    assert engine.look(Handle("sge", "4")).text == "position 2 of 3"
    said = 'Job 4 queue instance "all.q@h2" dropped because it is temporarily not available'
    commands.answer("qalter", f"echo '{said}'")
    for _ in range(2):
        found = engine.look(Handle("sge", "4"))
        assert (found.state, found.text) == (QUEUED, "position 2 of 3 (disabled: all.q@h2)")
    assert commands.said.count("qalter -w p 4") == 2


def test_a_job_that_goes_back_to_the_queue_is_deleted_at_once_and_the_reason_told(commands: Commands) -> None:
    commands.answer("qstat", f"cat {HERE}/qstat_running.xml")
    engine = Sge()
    handle = Handle("sge", "1", {"slots": 6})
    assert engine.look(handle).state == RUNNING
    commands.answer(
        "qstat",
        f"case $* in *-j*) cat {HERE}/qstat_prolog.xml;; *-f*) cat {HERE}/qstat_states.xml;; "
        f"*) sed 's:<JB_job_number>4<:<JB_job_number>1<:' {HERE}/qstat_waiting.xml;; esac",
    )
    found = engine.look(handle)
    assert found.state == ENDED
    assert found.text.startswith(
        "h1 has not started it, and it went back to the queue (could not be started: exit_status of prolog = 1; "
    )
    assert "in an error state (E): all.q@h1" in found.text
    assert "qdel 1" in commands.said
    told = engine.explain(handle, "h2")
    assert (told.code, told.text) == (6, found.text)


def test_a_job_that_is_started_on_other_hosts_than_before_has_lost_its_places(commands: Commands) -> None:
    commands.answer("qstat", f"cat {HERE}/qstat_running.xml")
    engine = Sge()
    handle = Handle("sge", "1", {"slots": 6})
    engine.look(handle)
    commands.answer("qstat", f"sed 's:@h3<:@h4<:' {HERE}/qstat_running.xml")
    assert engine.look(handle).text.startswith("h1 has not started it, and it went back to the queue")


@pytest.mark.parametrize(("priority", "code"), [("0.25000", 143), ("0,25000", 143), ("0.00000", None)])
def test_a_job_that_is_deleted_while_it_waits_ends_as_one_that_is_deleted_while_it_runs(
    priority: str, code: int | None, commands: Commands
) -> None:
    row = f"<job_list><JB_job_number>4</JB_job_number><JAT_prio>{priority}</JAT_prio></job_list>"
    commands.answer("qstat", f'case $* in *"-s z"*) echo "<x>{row}</x>";; *) echo "<x/>";; esac')
    commands.answer("qacct", "echo 'error: job id 4 not found' >&2; exit 1")
    found = Sge().look(Handle("sge", "4"))
    assert found.state == ENDED
    assert "deleted" in found.text
    assert (found.why and found.why.code) == code


def test_a_job_in_an_error_state_is_deleted_and_the_reason_told(commands: Commands) -> None:
    commands.answer("qstat", f"case $* in *-j*) cat {HERE}/qstat_error.xml;; *) cat {HERE}/qstat_waiting.xml;; esac")
    found = Sge().look(Handle("sge", "6"))
    assert found.state == ENDED
    assert found.text == "in an error state (Eqw): can't chdir to /nonexistent: No such file or directory"
    assert "qdel 6" in commands.said


def test_a_host_that_is_not_heard_of_is_not_given_up_but_explains_a_loss(commands: Commands) -> None:
    """Its daemon may be started again, and jobs go on meanwhile."""
    commands.answer(
        "qstat", f'case $* in *"-qs u"*) cat {HERE}/qstat_unheard.xml;; *) cat {HERE}/qstat_running.xml;; esac'
    )
    handle = Handle("sge", "1", {"slots": 6})
    standing = Sge().look(handle)
    assert (standing.state, standing.gone) == (RUNNING, {})
    found = Sge().explain(handle, "h3")
    assert (found.code, found.text) == (7, "Grid Engine does not hear of h3 any more")
    assert Sge().explain(handle, "h2") is None


def test_the_secret_is_delivered_once_by_standard_input(commands: Commands, tmp_path: Path) -> None:
    commands.answer("qsub", "echo 1")
    commands.answer("qstat", f"cat {HERE}/qstat_running.xml")
    refuse = f"[ -e {tmp_path}/early ] || {{ touch {tmp_path}/early; exit 1; }}"  # the first time, as for a new job
    commands.answer("qrsh", f'{refuse}; [ "$JOB_ID" = 1 ] && TMP={tmp_path} sh; echo "$*" >>{tmp_path}/delivered')
    engine = Sge()
    handle = engine.submit(submission(), Sge().render(submission()))
    for _ in range(2):
        assert engine.look(handle).state == RUNNING
    engine._delivery.join(scaled(20))
    assert engine.look(handle).text == ""
    assert (tmp_path / "distrun-secret").read_text() == SECRET + "\n"
    assert stat.S_IMODE((tmp_path / "distrun-secret").stat().st_mode) == 0o600
    assert (tmp_path / "delivered").read_text() == "-inherit h1 /bin/sh\n"
    assert not any(SECRET in line for line in commands.said)


def test_an_array_whose_tasks_do_not_all_start_is_given_up(commands: Commands) -> None:
    commands.answer("qstat", f"cat {HERE}/qstat_waiting.xml")
    handle = Handle("sge", "8", {"is_array": True, "tasks": 3})
    engine = Sge()
    waiting = engine.look(handle)
    assert (waiting.state, waiting.text) == (QUEUED, "1 of 3 array tasks have started; the others wait")
    engine._limit_s = 0.0
    found = engine.look(handle)
    assert found.state == ENDED
    assert "only 1 of 3 array tasks have started within 0 s" in found.text
    assert "qdel 8" in commands.said


def test_an_array_of_which_some_tasks_have_ended_still_runs(commands: Commands) -> None:
    commands.answer("qstat", f"cat {HERE}/qstat_first_task.xml")
    handle = Handle("sge", "26", {"is_array": True, "tasks": 3})
    engine = Sge()
    assert len(engine.look(handle).grants) == 3
    engine._limit_s = 0.0
    commands.answer("qstat", f"sed '/all.q@h2/d' {HERE}/qstat_first_task.xml")
    found = engine.look(handle)
    assert found.state == RUNNING
    assert "qdel 26" not in commands.said


def test_a_job_that_is_unknown_is_cancelled_already(commands: Commands) -> None:
    commands.answer("qdel", """echo 'denied: job "4" does not exist'; exit 1""")
    Sge().cancel(Handle("sge", "4", {}))
    commands.answer("qdel", """echo 'denied: "eve" is not your job'; exit 1""")
    with pytest.raises(EngineError, match="is not your job"):
        Sge().cancel(Handle("sge", "4", {}))


def test_a_job_that_is_being_deleted_on_a_host_that_is_not_heard_of_is_deleted_by_force(commands: Commands) -> None:
    commands.answer(
        "qstat",
        f'case $* in *"-qs u"*) cat {HERE}/qstat_unheard.xml;; '
        f"*) sed 's:<state>r<:<state>dr<:' {HERE}/qstat_running.xml;; esac",
    )
    assert Sge().look(Handle("sge", "1", {"slots": 6})).text == "being deleted"
    assert "qdel -f 1" in commands.said


def test_a_job_that_is_being_deleted_was_cancelled_from_outside(commands: Commands) -> None:
    commands.answer("qstat", f"sed 's:<state>r<:<state>dr<:' {HERE}/qstat_running.xml")
    found = Sge().explain(Handle("sge", "1", {"slots": 6}), "h2")
    assert found.code == 143


def test_the_time_limit_is_known_without_accounting(commands: Commands) -> None:
    commands.answer("qstat", f'case $* in *"-qs u"*) echo "<x/>";; *) cat {HERE}/qstat_running.xml;; esac')
    handle = Handle("sge", "1", {"slots": 6, "time_s": 4.0})
    engine = Sge()
    assert engine.explain(handle, "h2") is None
    engine.look(handle)
    found = engine.explain(handle, "h2")
    assert (found.code, found.text) == (124, "Grid Engine: the time limit of 4 s was reached; raise --time")


def test_a_host_that_began_late_was_not_cancelled_at_the_time_limit(commands: Commands) -> None:
    """The only record so far is its own, and the job is not listed any more."""
    notified = "s:^failed .*:failed 0:; s:^exit_status .*:exit_status 140:; s:h_rt=3:h_rt=40:"
    commands.answer("qacct", f"sed '{notified}' {HERE}/qacct_time.txt")
    commands.answer("qstat", f'case $* in *"-qs u"*) echo "<x/>";; *) cat {HERE}/qstat_running.xml;; esac')
    engine = Sge()
    for time_s, code in ((40.0, 143), (4.0, 124)):
        handle = Handle("sge", "1", {"slots": 6, "time_s": time_s})
        engine.look(handle)
        commands.answer("qstat", "echo '<x/>'")
        assert engine.explain(handle, "h3").code == code


def test_only_jobs_with_a_marker_are_found(commands: Commands) -> None:
    commands.answer("qstat", f"cat {HERE}/qstat_waiting.xml")
    found = {each.handle.id: (each.marker, each.state) for each in Sge().find()}
    assert found["5"] == ("distrun-bbb", "qw")
    assert "3" not in found  # called `filler`


def test_a_refusal_of_qsub_is_told(commands: Commands) -> None:
    commands.answer("qsub", "echo 'Unable to run job: job rejected: no' >&2; exit 1")
    with pytest.raises(EngineError, match="job rejected: no"):
        Sge().submit(submission(), Sge().render(submission()))


def test_a_job_that_can_never_run_is_refused_before_it_is_submitted(commands: Commands) -> None:
    commands.answer("qconf", f"case $1 in -spl) echo mpi;; -sp) cat {HERE}/pe_mpi.txt;; esac")
    said = 'Unable to run job: Job 21 cannot run in PE "mpi" because it only offers 12 slots'
    commands.answer("qsub", f"echo '{said}\nverification: no suitable queues\nExiting.' >&2; exit 1")
    with pytest.raises(UsageError, match='it cannot run in PE "mpi" because it only offers 12 slots'):
        Sge().prepare(submission(found=sge.SgePreparation()))


def test_a_load_value_that_cannot_be_verified_is_no_reason_to_refuse(commands: Commands) -> None:
    commands.answer(
        "qconf", f"case $1 in -spl) echo mpi;; -sp) cat {HERE}/pe_mpi.txt;; -sc) cat {HERE}/complexes.txt;; esac"
    )
    commands.answer("qhost", f"cat {HERE}/qhost.txt")
    said = 'Unable to run job: Job 2 cannot run in PE "mpi" because it only offers 0 slots'
    commands.answer("qsub", f"case $* in *mem_free*) echo '{said}' >&2; exit 1;; esac")
    Sge().prepare(submission(found=sge.SgePreparation(), worker=Needs(memory=GIB)))
    assert "mem_total=1024M" in commands.said[-1]
    asked = "(-l mem_total=1048576M) cannot run in queue"
    big = f'Job 3 {asked} "h1" because it offers only hl:mem_total=23.541G'
    commands.answer("qsub", f"printf 'Unable to run job: %s\\n' '{big}' 'Exiting.' >&2; exit 1")
    with pytest.raises(UsageError, match=r'it \(-l mem_total=1048576M\) cannot run in queue "h1"'):
        Sge().prepare(submission(found=sge.SgePreparation(), worker=Needs(memory=1024 * GIB)))


@pytest.mark.parametrize(
    ("said", "options"),
    [("no project list defined", {"project": "vis"}), ("no cqueue list defined", {"queue": "vis"})],
)
def test_an_empty_list_of_grid_engine_is_not_taken_for_names(
    said: str, options: Mapping[str, str], commands: Commands
) -> None:
    commands.answer("qconf", f"echo {said} >&2; exit 1")
    with pytest.raises(UsageError, match=r"vis: Grid Engine has no (queue|project) vis; it has: none"):
        Sge().prepare(submission(found=sge.SgePreparation(), **options))


def test_an_unknown_queue_is_refused_with_those_that_are_known(commands: Commands) -> None:
    commands.answer("qconf", "echo all.q; echo gpu.q")
    with pytest.raises(UsageError, match=r"--queue nope\.q: Grid Engine has no queue nope\.q; it has: all\.q, gpu\.q"):
        Sge().prepare(submission(found=sge.SgePreparation(), queue="nope.q"))


def test_commands_that_are_missing_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    [found] = Sge().examine()
    assert not found.ok
    assert "settings.sh" in found.fix
    with pytest.raises(EngineError, match="qdel is not on this machine"):
        Sge().cancel(Handle("sge", "4", {}))


def test_a_queue_master_that_does_not_answer_is_told_with_what_to_type(commands: Commands) -> None:
    commands.answer("qstat", "echo SGE 8.1.9")
    commands.answer("qacct", "true")
    commands.answer("qconf", "echo 'unable to contact qmaster using port 6444 on host \"m1\"' >&2; exit 1")
    finding = list(Sge().examine())[-1]
    assert (finding.ok, 'on host "m1"' in finding.text) == (False, True)
    for typed in ("act_qmaster", "systemctl start gridengine-master", "sgemaster start", "qconf -as"):
        assert typed in finding.fix


def test_the_doctor_lists_the_environments_of_which_the_user_has_to_choose_one(commands: Commands) -> None:
    commands.answer("qstat", "echo SGE 8.1.9")
    commands.answer("qacct", "true")
    commands.answer("qconf", f"case $1 in -spl) printf 'mpi\\nfill\\n';; -sp) cat {HERE}/pe_$2.txt;; *) echo h1;; esac")
    texts = [found.text for found in Sge().examine() if found.ok]
    assert [text for text in texts if "--pe is needed" in text and "choose one: mpi" in text]


# The script, with a stand-in for the agent that tells how it was started.

AGENT = """\
#!{python}
import os, signal, sys, time
place, secret = (os.environ["DISTRUN_ENGINE_" + name] for name in ("PLACE", "SECRET"))

def tell(text):
    with open({log!r}, "a") as log:
        log.write(place + " " + text + "\\n")

def stop(number, frame):
    tell("stops")
    sys.exit()

script = os.getpgrp()
os.setsid()
signal.signal(signal.SIGTERM, stop)
was = signal.signal(signal.SIGUSR1, lambda number, frame: tell("is warned"))
tell(" ".join(["has", secret + ";", *sys.argv[4:8]]))
while place.startswith("stay") and was == signal.SIG_IGN:
    os.killpg(script, 0)  # fails when the script is gone
    time.sleep(0.02)
"""


@pytest.fixture
def run_script(commands: Commands, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start the rendered script as Grid Engine would: its own process group, a pe_hostfile, a folder for the job."""
    started: list[subprocess.Popen[bytes]] = []
    agent, log = tmp_path / "python3", tmp_path / "log"
    agent.write_text(AGENT.format(python=sys.executable, log=str(log)))
    agent.chmod(0o755)
    log.touch()
    for name in ("job folder", "tmp"):
        (tmp_path / name).mkdir()
    # Grid Engine starts what it runs with the default handling of signals.
    usual = "import os, signal as s, sys; s.signal(s.SIGUSR1, s.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
    commands.answer("qrsh", f'echo "qrsh $2" >>{log}; shift 2; exec {sys.executable} -c "{usual}" "$@"')

    def run(hosts: str = "", task: str = "undefined", secret: str = "job folder/secret") -> subprocess.Popen[bytes]:
        made = Sge().render(submission(folder=tmp_path / "job folder", python=str(agent)))
        (tmp_path / "script").write_text(made.files["sge.sh"].replace("-ge 120", "-ge 1"))
        (tmp_path / "hosts").write_text(hosts)
        if secret:
            (tmp_path / secret).write_text(SECRET + "\n")
        env = {**os.environ, "TMP": str(tmp_path / "tmp"), "SGE_TASK_ID": task}
        if hosts:
            env["PE_HOSTFILE"] = str(tmp_path / "hosts")
        started.append(subprocess.Popen(["/bin/sh", str(tmp_path / "script")], env=env, start_new_session=True))
        return started[-1]

    yield run
    for each in started:
        if each.poll() is None:
            os.killpg(each.pid, signal.SIGKILL)
            each.wait()


HAS = f"has {SECRET}; {START.pin} {START.job} env:DISTRUN_ENGINE_PLACE env:DISTRUN_ENGINE_SECRET"


def test_the_script_starts_one_agent_on_each_host(
    run_script: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    hosts = "h1 2 all.q@h1 UNDEFINED\nh2 1 all.q@h2 UNDEFINED\nh1 1 other.q@h1 UNDEFINED\n"
    assert run_script(hosts).wait(scaled(20)) == 0
    assert sorted((tmp_path / "log").read_text().splitlines()) == [f"h1 {HAS}", f"h2 {HAS}", "qrsh h2"]


def test_a_task_of_an_array_starts_its_own_agent(
    run_script: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    assert run_script(task="3").wait(scaled(20)) == 0
    assert (tmp_path / "log").read_text() == f"3 {HAS}\n"


def test_a_secret_that_is_delivered_is_removed_when_it_was_read(
    run_script: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    assert run_script("h1 1 q U\n", secret="tmp/distrun-secret").wait(scaled(20)) == 0
    assert (tmp_path / "log").read_text() == f"h1 {HAS}\n"
    assert not (tmp_path / "tmp" / "distrun-secret").exists()


def test_a_secret_that_never_comes_ends_the_script(
    run_script: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    assert run_script("h1 1 q U\n", secret="").wait(scaled(20)) == 6
    assert "the coordinator has not reached it by qrsh" in (tmp_path / "job folder" / "agents.log").read_text()


def test_a_warning_reaches_all_agents_and_notice_of_the_end_asks_them_to_stop(
    run_script: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    script = run_script("stay1 1 q U\nstay2 1 q U\n")
    deadline = time.monotonic() + scaled(20)

    def lines(words: str) -> set[str]:
        return {line for line in log.read_text().splitlines() if words in line}

    while len(lines(HAS)) < 2:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    while lines("warned") != {"stay1 is warned", "stay2 is warned"}:
        assert time.monotonic() < deadline, log.read_text()
        os.killpg(script.pid, signal.SIGUSR1)  # the script gives it on as soon as the agent is started
        time.sleep(0.02)
    assert script.poll() is None
    os.killpg(script.pid, signal.SIGUSR2)
    assert script.wait(scaled(20)) == 140
    assert lines("stops") == {"stay1 stops", "stay2 stops"}
