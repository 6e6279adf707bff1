"""Detached jobs on hosts: the coordinator is on one of them, agents dial it, and the launching machine may go."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from lab import Site, wait_until

LIMIT_S = 60.0
COUNTS = (
    "for i in 1 2 3; do echo line $i of $RANK; done; until [ -e /tmp/go-on ]; do sleep 0.05; done; echo last of $RANK"
)


def words(lab: Site, *hosts: str) -> list[str]:
    return ["-H", lab.hosts_file(*hosts), "-n", str(len(hosts)), "-s", "0", "--grace", "1"]


def launched(lab: Site, *command: str, **more: Any) -> str:
    """Launch a detached job on two hosts; return its id."""
    done = lab.distrun("launch", "--detach", *words(lab, "h1", "h2"), *command, cwd=Path("/tmp"), **more)
    assert done.code == 0, done.err
    assert done.out.count("\n") == 1
    return done.out.strip()


def folder_of(lab: Site, job: str) -> Path:
    return lab.home_folder / "state/distrun/jobs" / job


def is_left(lab: Site, host: str) -> bool:
    """Whether a control socket is there."""
    return bool(lab[host].exec("sh", "-c", "ls /var/tmp/distrun-0/*.s 2>/dev/null || :").strip())


def test_a_detached_job_runs_on_without_the_launching_machine_and_is_followed_to_its_end(lab: Site) -> None:
    job = launched(lab, f"bash -c '{COUNTS}'")
    where = json.loads((folder_of(lab, job) / "control.json").read_text())
    assert where["host"] == "h1"
    assert not [each for each in lab.marked() if each.host == "launcher"], "nothing of the job is left here"
    assert "running" in lab.distrun("status", job).out
    attached = lab.start("attach", "--since-start", job)
    followed = lab.start("logs", job, "worker-1", "-f")
    wait_until(lambda: attached.out.count("line 3 of") == 2, LIMIT_S, "both have printed")
    stacks = lab.distrun("stack", job)  # asked where its coordinator is, which asks both agents
    assert (stacks.code, stacks.err.count("is no Python: bash")) == (1, 2), stacks.err
    assert lab.distrun("logs", job, "worker-1").out.splitlines() == [f"line {each} of 1" for each in (1, 2, 3)]
    for name in ("h1", "h2"):
        lab[name].exec("touch", "/tmp/go-on")
    assert attached.wait() == 0
    assert attached.out.count("last of") == 2
    assert followed.wait() == 0
    assert followed.out.splitlines() == [*(f"line {each} of 1" for each in (1, 2, 3)), "last of 1"]
    assert lab.distrun("wait", job).code == 0
    merged = lab.distrun("logs", "--merge", job)
    assert sorted(merged.out.splitlines()) == sorted(attached.out.splitlines())
    assert json.loads((folder_of(lab, job) / "outcome.json").read_text())["exit_code"] == 0
    assert not is_left(lab, "h1")
    assert not list(folder_of(lab, job).rglob("*.tmp"))
    removed = lab.distrun("gc", job)
    assert removed.code == 0, removed.err
    assert "; also its folder on h1" in removed.out
    assert lab["h1"].exec("ls", where["folder"], check=False) == ""


def test_a_secret_of_a_detached_job_is_on_no_command_line_and_in_no_file_of_any_host(lab: Site) -> None:
    secret = f"hunter2-{time.monotonic_ns()}-of-a-detached-job"
    shows = '[ -n "$LAB_API_TOKEN" ] && exec sleep 600'
    job = launched(lab, "--env", "LAB_API_TOKEN", f"bash -c '{shows}'", env={"LAB_API_TOKEN": secret})
    holders = [each for each in lab.processes() if secret.encode() in each.environ().get(b"LAB_API_TOKEN", b"")]
    assert {each.host for each in holders} == {"h1", "h2"}
    assert [str(each) for each in lab.processes() if secret.encode() in each.command] == []
    files = f"find /tmp /var/tmp /run /root /home /dev/shm -xdev -type f -exec grep -l '{secret}' {{}} +"
    assert [lab[host].exec("sh", "-c", files, check=False) for host in ("h1", "h2")] == ["", ""]
    assert lab.distrun("kill", job).code == 0


def test_the_code_of_the_first_task_that_fails_comes_from_the_other_host(lab: Site) -> None:
    job = launched(lab, "bash", "-c", "until [ -e /tmp/go-off ]; do sleep 0.05; done; exit $((RANK + 4))")
    lab["h2"].exec("touch", "/tmp/go-off")
    assert lab.distrun("wait", job).code == 5
    assert "worker-1 on h2 failed with exit code 5" in lab.distrun("status", job).out


def test_a_detached_job_on_a_named_host_is_killed_from_here(lab: Site) -> None:
    more = ["--coordinator-host", "h2", *words(lab, "h1", "h2")]
    done = lab.distrun("launch", "--detach", *more, "sleep", "600", cwd=Path("/tmp"))
    job = done.out.strip()
    assert json.loads((folder_of(lab, job) / "control.json").read_text())["host"] == "h2"
    killed = lab.distrun("kill", job)
    assert killed.code == 0, killed.err
    assert lab.distrun("wait", job).code == 143
    assert not lab.marked()


def test_folders_that_another_user_made_first_keep_nobody_from_a_job(lab: Site) -> None:
    every = "/tmp/distrun-0 /var/tmp/distrun-0"
    for name in ("h1", "h2"):
        lab[name].exec("sh", "-c", f"rm -rf {every}; mkdir -m 700 {every}; chown 4711 {every}")
    try:
        job = launched(lab, "sleep", "600")
        attached = lab.start("launch", *words(lab, "h1", "h2"), "sh", "-c", "echo up; sleep 600", cwd=Path("/tmp"))
        wait_until(lambda: attached.out.count("up") == 2, LIMIT_S, "both run")
        killed = lab.distrun("kill", job)
        assert killed.code == 0, killed.err
        assert lab.distrun("wait", job).code == 143
        assert len({each.host for each in lab.marked()} - {"launcher"}) == 2, "the other job goes on"
        killed = lab.distrun("kill", "-y", "-H", lab.hosts_file("h1", "h2"))
        assert killed.code == 0, killed.err
        wait_until(lambda: not lab.marked(), LIMIT_S, "nothing is left")
        attached.wait()
    finally:
        for name in ("h1", "h2"):
            lab[name].exec("sh", "-c", f"rm -rf {every}")


def test_agents_that_cannot_reach_the_coordinator_end_the_job_before_any_task(lab: Site) -> None:
    lab["h1"].exec("sh", "-c", "iptables -A INPUT -p tcp --dport 1024:65535 -m conntrack --ctstate NEW ! -i lo -j DROP")
    try:
        more = ["--start-timeout", "12", *words(lab, "h1", "h2")]
        done = lab.distrun("launch", "--detach", *more, "touch", "/tmp/started", cwd=Path("/tmp"))
    finally:
        lab["h1"].exec("iptables", "-F", "INPUT")
    assert done.code == 3, done.err
    assert not done.out
    assert "its agent did not reach the coordinator at 10." in done.err
    assert "--port-range" in done.err
    wait_until(lambda: not lab.marked(), LIMIT_S, "the agents do not dial any more")


def test_hosts_that_refuse_end_a_detached_launch_as_any_other_and_are_not_swept(lab: Site) -> None:
    more = ["--activate", "venv:/nowhere", *words(lab, "h1", "h2")]
    done = lab.distrun("launch", "--detach", *more, "true", cwd=Path("/tmp"))
    assert done.code == 3, done.err
    assert "there is no /nowhere/bin/activate" in done.err
    assert "ending what may be left" not in done.err


def test_a_coordinator_is_only_placed_on_a_host_of_the_job(lab: Site) -> None:
    done = lab.distrun("launch", "--detach", "--coordinator-host", "h3", *words(lab, "h1", "h2"), "true")
    assert done.code == 2
    assert "'h3' is no host of this job" in done.err
    done = lab.distrun("launch", "--coordinator-host", "h1", *words(lab, "h1", "h2"), "true")
    assert done.code == 2
    assert "--detach" in done.err
