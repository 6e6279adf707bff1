"""Jobs on a real Grid Engine, whose hosts share no folder with the launcher."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import backendcontract
import pytest
from backendcontract import STAY, WARNED, BackendContract
from lab import ROOT, wait_until
from sgesite import SgeSite, bring_up, mend

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

up = functools.partial(backendcontract.up, limit_s=60)
SHORT = ("-s", "0", "--grace", "2")
FRAIL = ("--suspect-after", "2", "--lost-after", "6", *SHORT)
"""An agent ends its tasks 9 s after it last heard of the coordinator."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SgeSite]:
    yield from bring_up()


@pytest.fixture
def lab(cluster: SgeSite, tmp_path: Path) -> Iterator[SgeSite]:
    cluster.begin(tmp_path)
    yield cluster
    mend(cluster)


class TestContract(BackendContract):
    @pytest.fixture
    def site(self, lab: SgeSite) -> SgeSite:
        return lab


def test_the_secret_is_shown_by_nothing_and_ctrl_c_ends_all(lab: SgeSite) -> None:
    running = lab.begin_launch(*SHORT, "-n", "3", "env; " + STAY)
    up(running, 3)
    [secret] = (lab.home_folder / "state").glob("distrun/jobs/*/engine/secret")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    told = [lab.ask("qstat", "-j", lab.job()), running.out, running.err]
    told += lab.commands()
    told += [
        lab[host].exec("sh", "-c", "cat /var/spool/gridengine/execd/*/job_scripts/* 2>/dev/null", check=False)
        for host in lab.hosts
    ]
    assert not [text for text in told if secret.read_text().strip() in text]
    assert "| PE_HOSTFILE=" not in running.out
    assert len(set(re.findall(r"^worker-\d@(h\d) \| up$", running.out, re.M))) == 3
    running.signal(signal.SIGINT)
    assert running.wait() == 130, running.err
    assert running.out.count("| bye\n") == 3
    assert not secret.exists()
    lab.nothing_stays()


def test_a_job_that_waits_tells_its_position_and_why_and_ctrl_c_cancels_it(lab: SgeSite) -> None:
    lab.hold(12)
    running = lab.begin_launch(*SHORT, "-n", "2", "--queue", "all.q", "hostname")
    wait_until(lambda: "position 1 of 1 in all.q (full: all.q)" in running.err, 40, "the reason is told")
    running.signal(signal.SIGINT)
    assert running.wait() == 130, running.err
    assert running.out == ""
    assert "distrun-" not in lab.ask("qstat")


def test_a_disabled_queue_is_named_and_qdel_of_a_job_that_waits_is_explained(lab: SgeSite) -> None:
    lab.ask("qmod", "-d", "all.q")
    try:
        running = lab.begin_launch(*SHORT, "-n", "2", "hostname")
        wait_until(lambda: "(disabled: all.q@h1, all.q@h2, all.q@h3)" in running.err, 40, "the reason is told")
        lab.ask("qdel", lab.job())
        assert running.wait() == 143, running.err
        assert "the job was deleted from outside (qdel)" in running.err
    finally:
        lab.ask("qmod", "-e", "all.q")


def test_a_prolog_that_fails_ends_the_job_before_the_time_limit_of_its_start(lab: SgeSite) -> None:
    lab.change_queue(prolog="/bin/false")
    try:
        done = lab.launch(*SHORT, "--start-timeout", "90", "-n", "2", "hostname")
    finally:
        lab.change_queue(prolog="NONE")
        lab.ask("qmod", "-c", "all.q")
    assert done.code == 6, done.err
    assert "not started within" not in done.err
    # By the job's reasons and the queue's state, or, where Grid Engine has closed the job by then, by its accounting.
    assert re.search(r"exit_status of prolog = 1; .*error state \(E\): all\.q@h\d|in prolog", done.err), done.err
    lab.nothing_stays()


def test_memory_that_is_a_load_value_is_asked_for_and_more_than_a_host_has_is_refused(lab: SgeSite) -> None:
    done = lab.launch(*SHORT, "-n", "2", "--worker-memory", "10M", "echo up")
    assert done.code == 0, done.err
    assert done.out.count("| up\n") == 2
    done = lab.launch(*SHORT, "-n", "2", "--worker-memory", "99T", "echo up")
    assert done.code == 2, done.err
    assert "because it offers only hl:mem_total=" in done.err


def test_distrun_kill_ends_a_job_whose_coordinator_is_dead(lab: SgeSite) -> None:
    running = lab.begin_launch(*SHORT, "-n", "2", "--name", "mine", STAY)
    up(running, 2)
    os.kill(running.coordinator(), signal.SIGKILL)
    assert running.wait() == 8
    killed = lab.distrun("kill", "mine")
    assert killed.code == 0, killed.err
    lab.nothing_stays()


def test_a_killed_launcher_leaves_nothing(lab: SgeSite) -> None:
    running = lab.begin_launch(*FRAIL, "-n", "2", STAY)
    up(running, 2)
    coordinator = running.coordinator()
    running.signal(signal.SIGKILL)
    os.kill(coordinator, signal.SIGKILL)
    lab.nothing_stays()


def test_qdel_from_outside_is_explained(lab: SgeSite) -> None:
    running = lab.begin_launch(*SHORT, "-n", "3", "trap '' TERM INT; echo up; while :; do sleep 0.1; done")
    up(running, 3)
    lab.ask("qdel", lab.job())
    assert running.wait() == 143, running.err
    assert "deleted or killed from outside (qdel)" in running.err or "the job was deleted from outside" in running.err
    lab.nothing_stays()


def test_the_time_limit_is_explained(lab: SgeSite) -> None:
    running = lab.begin_launch(*SHORT, "--time", "12s", "-n", "2", "echo up; exec sleep 100")
    assert running.wait() == 124, running.err
    assert "the time limit of 12 s was reached; raise --time" in running.err
    lab.nothing_stays()


def test_a_host_that_is_powered_off_is_lost(lab: SgeSite) -> None:
    running = lab.begin_launch(*FRAIL, "-n", "12", STAY)
    up(running, 12)
    lab["h3"].poweroff()
    assert running.wait() == 7, running.err
    assert "h3" in running.err
    lab["h3"].boot()


def test_an_error_state_is_told_and_the_job_deleted(lab: SgeSite) -> None:
    done = lab.launch(*SHORT, "-n", "1", "--engine-arg=-wd", "--engine-arg=/nonexistent", "hostname")
    assert done.code not in (0, 143), done.err
    # Grid Engine keeps the job in this state, or ends it if it was just starting something beside the script.
    is_kept = "Eqw" in done.err and "can't chdir to /nonexistent" in done.err
    assert is_kept or re.search(r"h\d could not run the script: changing into working directory", done.err), done.err
    lab.nothing_stays()


def test_the_digits_are_learned_without_a_shared_folder(lab: SgeSite) -> None:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install scikit-learn")
    shutil.copy(ROOT / "examples" / "digits.py", lab.work)
    words = ("-n", "2", "-s", "2", "--sync-dst-dir", "/tmp/digits", "--python", sys.executable)
    done = lab.launch(*words, sys.executable, "digits.py", "--epochs", "5", "--kv-store", "dist_sync", cwd=lab.work)
    assert done.code == 0, done.err
    assert done.out.count("| Total number of workers: 2\n") == 2
    assert re.search(r"^worker-0@h\d \| Epoch 4: Test_acc 0\.[89]", done.out, re.M), done.out
    lab.nothing_stays()


def test_kill_stale_finds_a_job_whose_store_is_lost(lab: SgeSite) -> None:
    done = lab.launch("--detach", *FRAIL, "-n", "2", STAY)
    assert done.code == 0, done.err
    control = json.loads(next((lab.home_folder / "state").glob("distrun/jobs/*/control.json")).read_text())
    lab.inside("kill", "-9", str(control["pid"]))
    shutil.rmtree(lab.home_folder / "state")
    killed = lab.distrun("kill", "--launcher", "sge", "--stale", "-y")
    assert killed.code == 0, killed.err
    assert not lab.ask("qstat").strip()
    lab.nothing_stays()


def test_an_array_runs_where_the_folder_is_shared(lab: SgeSite) -> None:
    env = {"XDG_STATE_HOME": str(lab.shared / "state")}
    done = lab.launch(*SHORT, "-n", "3", "echo up", pe="none", env=env)
    assert done.code == 0, done.err
    assert done.out.count("| up\n") == 3
    lab.nothing_stays()


@pytest.mark.parametrize(
    ("way", "pe"), [("s_rt", "none"), ("s_rt", "fill"), ("suspension", "none"), ("suspension", "mpi")]
)
def test_a_warning_of_grid_engine_reaches_workers_that_want_it(way: str, pe: str, lab: SgeSite) -> None:
    limit = ("--engine-arg=-l", "--engine-arg=s_rt=25") if way == "s_rt" else ()
    job = (*SHORT, "--time", "10min", *limit, "--forward-signal", "USR1", "-n", "3", sys.executable, "-c", WARNED)
    running = lab.begin_launch(*job, pe=pe, env={"XDG_STATE_HOME": str(lab.shared / "state")})
    up(running, 3)
    if way == "suspension":
        lab.ask("qmod", "-sj", lab.job())
    assert running.wait() == 0, running.err
    assert set(re.findall(r"worker-(\d)@h\d \| saved", running.out)) == {"0", "1", "2"}
    lab.nothing_stays()


@pytest.mark.parametrize("pe", ["mpi", "none"])
def test_an_announced_suspension_ends_nothing(pe: str, lab: SgeSite) -> None:
    env = {"XDG_STATE_HOME": str(lab.shared / "state")}

    def stopped() -> list[bool]:
        """Of each script, an array has several: whether it is stopped."""
        scripts = [each.pid for each in lab.processes() if b"job_scripts" in each.command]
        return [" T " in Path("/proc", str(pid), "stat").read_text() for pid in scripts]

    lab.change_queue(notify="00:00:01")  # from SIGUSR1 to SIGSTOP
    try:
        running = lab.begin_launch(*SHORT, "-n", "3", STAY, pe=pe, env=env)
        up(running, 3)
        told = lab.ask("qmod", "-sj", lab.job())
        wait_until(lambda: (found := stopped()) and all(found), 60, "the job is suspended, of which qmod says: " + told)
        told = lab.ask("qmod", "-usj", lab.job())
        wait_until(lambda: (found := stopped()) and not any(found), 60, "the job goes on, of which qmod says: " + told)
    finally:
        lab.change_queue(notify="00:00:60")
    running.signal(signal.SIGINT)
    assert running.wait() == 130, running.err
    assert running.out.count("| bye\n") == 3
    lab.nothing_stays()
