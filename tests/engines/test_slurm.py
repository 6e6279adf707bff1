"""Jobs on a real Slurm, whose nodes share no folder with the launcher."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import backendcontract
import pytest
import slurm
from backendcontract import STAY, WARNED, BackendContract
from lab import ROOT, wait_until
from slurmsite import SlurmSite, site

from distrun_runtime.contract import process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

up = functools.partial(backendcontract.up, limit_s=60)
SHORT = ("--grace", "2")
FRAIL = ("--suspect-after", "2", "--lost-after", "6", *SHORT)
"""An agent ends its tasks 9 s after it last heard of the coordinator."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmSite]:
    shared = tmp_path_factory.mktemp("shared")
    for lab in site(3, [shared]):
        lab.shared = shared  # type: ignore[attr-defined]
        yield lab


@pytest.fixture
def lab(cluster: SlurmSite, tmp_path: Path) -> Iterator[SlurmSite]:
    cluster.begin(tmp_path)
    yield cluster
    cluster.cluster.settle()
    cluster.end()


class TestContract(BackendContract):
    @pytest.fixture
    def site(self, lab: SlurmSite) -> SlurmSite:
        return lab


def test_the_secret_is_in_no_argument_and_tasks_see_nothing_of_the_agents_step(lab: SlurmSite) -> None:
    running = lab.begin_launch(*SHORT, "-n", "2", "-s", "0", "--worker-gpus", "1", "env; " + STAY)
    up(running, 2)
    job = lab.job()
    script = lab.cluster.run("scontrol", "write", "batch_script", job, "-")
    secret = re.search(r"DISTRUN_ENROLMENT=(\S+)", script)
    assert secret is not None
    assert "Requeue=0" in lab.shown(job)
    told = [lab.shown(job), lab.cluster.run("squeue", "-o", "%all"), running.out, running.err]
    told += [each.command.decode(errors="replace") for each in lab.processes()]
    assert not [text for text in told if secret[1] in text]
    assert running.out.count("| CUDA_VISIBLE_DEVICES=0,1\n") == 2, "both workers are on one node, and see its GPUs"
    assert not re.search(r"\| (SLURM_(PROCID|NTASKS|STEP_ID)|DISTRUN_ENROLMENT)=", running.out)
    running.signal(signal.SIGINT)
    assert running.wait() == 130
    assert running.out.count("| bye\n") == 2
    lab.nothing_stays()


def test_a_job_that_waits_says_so_and_ctrl_c_cancels_it(lab: SlurmSite) -> None:
    lab.cluster.run("sbatch", "--exclusive", "-N3", "--output=/dev/null", "--wrap", "sleep 100")
    wait_until(lambda: not lab.cluster.idle(), 20, "the cluster is full")
    running = lab.begin_launch("-n", "3", "-s", "0", "hostname")
    wait_until(lambda: "position 1 in debug (" in running.err, 30, "the position is told")
    job = lab.job()
    running.signal(signal.SIGINT)
    assert running.wait() == 130
    assert "JobState=CANCELLED" in lab.shown(job)
    assert running.out == ""


def test_a_detached_job_is_followed_and_waited_for(lab: SlurmSite) -> None:
    waits = "echo one; until [ -e /tmp/go ]; do echo waits; sleep 0.2; done; exit 5"
    done = lab.launch("--detach", *SHORT, "-n", "2", "-s", "0", waits)
    assert done.code == 0, done.err
    name = done.out.strip()
    attached = lab.start("attach", name)
    wait_until(lambda: {"0", "1"} == set(re.findall(r"worker-(\d)@h\d \| waits", attached.out)), 60, "both are shown")
    assert name in lab.distrun("status").out
    assert lab.distrun("logs", name, "worker-1").out.count("one") == 1
    for host in ("h1", "h2"):
        lab[host].exec("touch", "/tmp/go")
    assert lab.distrun("wait", name).code == 5
    assert attached.wait() == 5
    lab.nothing_stays()
    for host in ("h1", "h2"):
        lab[host].exec("rm", "/tmp/go")


def test_distrun_kill_ends_a_job_whose_coordinator_is_dead(lab: SlurmSite) -> None:
    running = lab.begin_launch(*SHORT, "--name", "mine", "-n", "2", "-s", "0", STAY)
    up(running, 2)
    os.kill(running.coordinator(), signal.SIGKILL)
    assert running.wait() == 8
    killed = lab.distrun("kill", "mine")
    assert killed.code == 0, killed.err
    lab.nothing_stays()


def test_a_job_whose_store_is_lost_is_found_by_its_name_in_slurm(lab: SlurmSite) -> None:
    assert lab.launch("--detach", *SHORT, "-n", "2", "-s", "0", STAY).code == 0
    [told] = (lab.home_folder / "state" / "distrun" / "jobs").glob("*/launcher.json")
    coordinator = json.loads(told.read_text())["pid"]
    lab.run("kill", "-KILL", str(coordinator))
    lab.run("rm", "-r", str(lab.home_folder / "state"))
    done = lab.distrun("kill", "--launcher", "slurm", "--stale", "-y")
    assert done.code == 0, done.err
    lab.nothing_stays()


def test_tasks_without_a_job_are_found_on_the_nodes_of_jobs_that_were_lost(lab: SlurmSite) -> None:
    assert lab.launch("--detach", *SHORT, "-n", "3", "-s", "0", STAY).code == 0
    [folder] = (lab.home_folder / "state" / "distrun" / "jobs").glob("*/")
    wait_until(lambda: '"state": "running"' in lab.distrun("status", "--json").out, 60, "the job runs")
    lab.run("kill", "-KILL", str(json.loads((folder / "launcher.json").read_text())["pid"]))
    lab.cluster.run("scancel", lab.job())
    lab.nothing_stays()
    plan = json.loads((folder / "plan.json").read_text())
    marks = [f"{name}={value}" for name, value in process.marks(plan["job"], plan["nonce"], "h2").items()]
    for host in ("h2", "h3"):  # h3 had no part in the job
        lab[host].exec("env", *marks, "sh", "-c", "setsid sleep 600 </dev/null >/dev/null 2>&1 &")
    done = lab.distrun("kill", "--launcher", "slurm", "--stale", "-y")
    assert done.code == 0, done.err
    assert "looking for what lost jobs have left on h[1-2]" in done.out
    assert re.search(r"h2: .*: ended 1 process\n", done.out)
    done = lab.distrun("kill", "--launcher", "slurm", "--stale", "-y", "--hosts", "h3")
    assert re.search(r"h3: .*: ended 1 process\n", done.out), done.err
    lab.nothing_stays()


def test_a_killed_launcher_leaves_nothing(lab: SlurmSite) -> None:
    running = lab.begin_launch(*FRAIL, "-n", "2", "-s", "0", STAY)
    up(running, 2)
    coordinator = running.coordinator()
    running.signal(signal.SIGKILL)

    os.kill(coordinator, signal.SIGKILL)
    lab.nothing_stays()


def test_scancel_from_outside_is_explained(lab: SlurmSite) -> None:
    running = lab.begin_launch(*SHORT, "-n", "3", "-s", "0", "trap '' TERM; echo up; while :; do sleep 0.1; done")
    up(running, 3)
    lab.cluster.run("scancel", lab.job())
    assert running.wait() == 143, running.err
    assert "cancelled from outside" in running.err
    lab.nothing_stays()


def test_preemption_is_explained(lab: SlurmSite) -> None:
    running = lab.begin_launch(*SHORT, "-n", "6", "-s", "0", "echo up; exec sleep 100")
    up(running, 6)
    urgent = lab.cluster.run("sbatch", "--parsable", "-p", "urgent", "-n2", "--output=/dev/null", "--wrap", "true")
    assert running.wait() == 7, running.err
    assert "preempted by a job of higher priority" in running.err
    wait_until(lambda: "COMPLETED" in lab.shown(urgent.strip()), 30, "the urgent job has run")
    lab.nothing_stays()


def test_the_time_limit_is_explained(lab: SlurmSite) -> None:
    running = lab.begin_launch(*SHORT, "--time", "1min", "-n", "2", "-s", "0", "echo up; exec sleep 200")
    up(running, 2)
    assert "TimeLimit=00:01:00" in lab.shown(lab.job())
    end = lab.cluster.run("date", "-d", "+1 second", "+%Y-%m-%dT%H:%M:%S").strip()
    lab.cluster.run("scontrol", "update", "JobId=" + lab.job(), "EndTime=" + end)
    assert running.wait() == 124, running.err
    assert "raise --time" in running.err
    lab.nothing_stays()


@pytest.mark.parametrize(
    "way",
    [
        ("scancel", "--signal=USR1"),
        ("scancel", "--signal=USR1", "--full"),
        ("scancel", "--signal=USR1", "--batch"),
        ("--signal=USR1@60",),
        ("--signal=B:USR1@60",),
    ],
    ids=" ".join,
)
def test_a_warning_signal_of_slurm_reaches_workers_that_want_it_and_ends_nothing(
    way: tuple[str, ...], lab: SlurmSite
) -> None:
    is_timed = way[0] != "scancel"
    words = ["--time", "10min", f"--engine-arg={way[0]}"] if is_timed else []
    program = (sys.executable, "-c", WARNED)
    running = lab.begin_launch(*SHORT, *words, "--forward-signal", "USR1", "-n", "3", "-s", "1", *program)
    up(running, 3)
    job = lab.job()
    if is_timed:
        end = lab.cluster.run("date", "-d", "+50 seconds", "+%Y-%m-%dT%H:%M:%S").strip()
        lab.cluster.run("scontrol", "update", "JobId=" + job, "EndTime=" + end)
    else:
        lab.cluster.run("scancel", "--signal=USR2", *way[2:], job)
        lab.cluster.run(*way, job)
    assert running.wait() == 0, running.err
    assert set(re.findall(r"worker-(\d)@h\d \| saved", running.out)) == {"0", "1", "2"}
    lab.nothing_stays()


def test_the_documented_script_saves_at_the_warning_and_goes_on_there(lab: SlurmSite) -> None:
    page = (ROOT / "docs" / "slurm.md").read_text()
    program = page.partition("<!-- run on a real Slurm -->\n```python\n")[2].partition("```\n")[0]
    program = program.replace("weight, count =", "print('trains', flush=True)\nweight, count =")
    states = lab.shared / "trained"  # type: ignore[attr-defined]
    job = (*SHORT, "--forward-signal", "USR1", "-n", "2", "-s", "1", "--python", sys.executable)
    first = lab.begin_launch(*job, sys.executable, "-c", program, str(states), "1000000000")
    wait_until(lambda: first.out.count("trains\n") == 2, 60, "both train")
    first.signal(signal.SIGUSR1)
    assert first.wait() == 75, first.err
    steps = set(re.findall(r"\| saved after step (\d+)", first.out))
    assert (first.out.count("saved after step"), len(steps)) == (2, 1), "both saved at one step"
    [step] = steps
    done = lab.launch(*job, sys.executable, "-c", program, str(states), str(int(step) + 10))
    assert done.code == 0, done.err
    assert done.out.count(f"goes on at step {int(step) + 1}\n") == 2
    lab.nothing_stays()


def test_out_of_memory_is_explained(lab: SlurmSite) -> None:
    if why := slurm.why_not_confined():
        pytest.skip(why)
    greedy = "[ $DISTRUN_RANK = 0 ] && exec python3 -c 'b = bytearray(600 << 20)'; exec sleep 60"
    done = lab.launch(*SHORT, "--worker-memory", "200MiB", "-n", "2", "-s", "0", greedy)
    assert done.code == 137, done.err
    assert "out of memory" in done.err
    assert "worker-0 on h1" in done.err
    lab.nothing_stays()


def test_the_digits_train_without_a_shared_folder_and_with_roles_of_different_needs(lab: SlurmSite) -> None:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install scikit-learn")
    (lab.work / "digits.py").write_bytes((ROOT / "examples" / "digits.py").read_bytes())
    python = sys.executable
    needs = ("-n", "2", "--worker-cores", "2", "-s", "2", "--server-memory", "300MiB", "--sync-dst-dir", "/tmp/digits")
    script = ("digits.py", "--kv-store", "dist_sync", "--epochs", "1")
    running = lab.begin_launch(*needs, "--python", python, "--env", "OMP_NUM_THREADS=1", python, *script, cwd=lab.work)
    shown = lab.shown(lab.job())
    assert re.findall(r"HetJobOffset=(\d)", shown) == ["0", "1"]
    assert "NumTasks=2 CPUs/Task=1 " in shown
    assert "NumTasks=2 CPUs/Task=2 " in shown
    assert running.wait() == 0, running.err
    assert set(re.findall(r"worker-(\d)@h\d \| Epoch 0: ", running.out)) == {"0", "1"}
    assert len(set(re.findall(r"worker-\d@(h\d) \|", running.out))) == 2
    lab.nothing_stays()


def test_inside_an_allocation_nothing_is_submitted_and_only_the_step_ends(lab: SlurmSite) -> None:
    tell = "echo cpus $(taskset -cp $$ | sed 's/.*: //') of $(hostname)"
    launch = "python -m distrun launch --launcher slurm -n 3 -s 0 %s" % ("'" + tell.replace("'", "'\\''") + "'")
    after = "squeue -h -o 'jobs %i %T'; scontrol show job -d -o $SLURM_JOB_ID"
    env = {"PATH": "%s:%s" % (Path(sys.executable).parent, lab.env()["PATH"])}
    done = lab.run("salloc", "-n3", "--mem-per-cpu=200", "sh", "-c", launch + "; " + after, env=env, cwd=Path("/tmp"))
    assert done.code == 0, done.err
    assert done.out.count("jobs ") == 1
    assert "RUNNING" in done.out
    if not slurm.why_not_confined():
        given = dict(re.findall(r"Nodes=(h\d) CPU_IDs=(\S+)", done.out))
        seen = {host: cpus for cpus, host in re.findall(r"cpus (\S+) of (h\d)", done.out)}
        assert {host: len_of(cpus) for host, cpus in seen.items()} == {host: len_of(ids) for host, ids in given.items()}
    lab.nothing_stays()


def len_of(ids: str) -> int:
    """How many processors `0-1,4` names."""
    return sum(int(b or a) - int(a) + 1 for a, _, b in (each.partition("-") for each in ids.split(",")))


def test_where_a_folder_is_shared_the_secret_is_in_a_file(lab: SlurmSite) -> None:
    shared: Path = lab.shared  # type: ignore[attr-defined]
    config = lab.home_folder / "config" / "distrun"
    config.mkdir(parents=True)
    (config / "config.toml").write_text("[slurm]\nshared_folders = true\n")
    env = {"XDG_STATE_HOME": str(shared / "state"), "XDG_CONFIG_HOME": str(config.parent)}
    running = lab.begin_launch(*SHORT, "-n", "2", "-s", "0", STAY, env=env)
    up(running, 2)
    script = lab.cluster.run("scontrol", "write", "batch_script", lab.job(), "-")
    [secret] = shared.glob("state/distrun/jobs/*/engine/secret")
    assert secret.stat().st_mode & 0o777 == 0o600
    assert secret.read_text().strip() not in script
    running.signal(signal.SIGINT)
    assert running.wait() == 130
    assert not secret.exists()
    lab.nothing_stays()


def test_doctor_says_what_is_there(lab: SlurmSite) -> None:
    done = lab.distrun("doctor", "--launcher", "slurm")
    assert done.code == 0, done.err
    assert "slurm 22.05" in done.out or "slurm-wlm 22.05" in done.out
    assert "debug, small, urgent" in done.out
    assert "accounting: none" in done.out


def test_inside_an_allocation_kill_ends_the_step_and_the_allocation_goes_on(lab: SlurmSite) -> None:
    launch = f"{sys.executable} -m distrun launch --launcher slurm --name mine --grace 2 -n 2 -s 0 " + shlex.quote(STAY)
    running = lab.spawn("salloc", "-n2", "sh", "-c", launch + "; echo code $?; squeue -h -o 'job %T'", cwd=Path("/tmp"))
    up(running, 2)
    assert lab.distrun("kill", "mine").code == 0
    assert running.wait() == 0
    assert "code 143\njob RUNNING\n" in running.out
    lab.nothing_stays()


def test_a_node_that_is_powered_off_is_lost(lab: SlurmSite) -> None:
    running = lab.begin_launch(*FRAIL, "-n", "4", "-s", "0", STAY)
    up(running, 4)
    lab["h2"].poweroff()
    assert running.wait() == 7, running.err
    assert "h2" in running.err
    lab["h2"].boot()
    lab.cluster.restart(lab["h2"])


TRAINS = r"""
import numpy as np
from distrun_runtime import kvstore

kv = kvstore.create("dist_sync")
kv.init("w", np.zeros(100, np.float32))
out = np.empty(100, np.float32)
print("up", flush=True)
while True:
    kv.pushpull("w", np.ones(100, np.float32), out=out)
"""


def test_a_node_that_is_set_down_is_named_whatever_tasks_elsewhere_say(lab: SlurmSite) -> None:
    program = ("--python", sys.executable, sys.executable, "-c", TRAINS)
    running = lab.begin_launch(*SHORT, "-n", "4", "-s", "2", *program)
    up(running, 4)
    lab.cluster.run("scontrol", "update", "NodeName=h3", "State=DOWN", "Reason=tested")
    try:
        assert running.wait() == 7, running.err
    finally:
        lab.cluster.run("scontrol", "update", "NodeName=h3", "State=RESUME")
    assert running.err.splitlines()[-1] == "distrun: error: lost h3: Slurm: a node failed (NODE_FAIL): h3 is down"
    lab.nothing_stays()


def test_accounting_says_who_cancelled_a_job(tmp_path: Path) -> None:
    for lab in site(2, [], accounting=True):
        lab.begin(tmp_path)
        assert "accounting: sacct answers" in lab.distrun("doctor", "--launcher", "slurm").out
        running = lab.begin_launch(*SHORT, "-n", "2", "-s", "0", "echo up; exec sleep 100")
        up(running, 2)
        lab.cluster.run("scancel", lab.job())
        assert running.wait() == 143, running.err
        assert "cancelled from outside by user 0" in running.err
        lab.end()
