"""`distrun kill` over real hosts: what dead launchers left is found and ended, everything else stays."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostlab import Process
from lab import Done, Site, wait_until
from slowness import scaled

from distrun_runtime.agent import stopping

AGENT = stopping.AGENT.encode()
WORKER = ("sh", "-c", "setsid sleep 600 & echo up; wait")
ROOT = Path("/")
LIMIT_S = 60.0


class Job:
    """A job whose workers are up on some hosts."""

    def __init__(self, lab: Site, *hosts: str) -> None:
        before = self._ids(lab)
        self.lab, self.hosts = lab, hosts
        count = str(len(hosts))
        words = ("-H", lab.hosts_file(*hosts), "-n", count, "-s", "0", "--grace", "1")
        self.launcher = lab.start("launch", *words, *WORKER, cwd=ROOT)
        wait_until(
            lambda: self.launcher.out.count("up") == len(hosts) or self.launcher.poll() is not None,
            LIMIT_S,
            "the workers are up",
        )
        assert self.launcher.poll() is None, self.launcher.err
        (self.id,) = self._ids(lab) - before
        self.coordinator = self.launcher.coordinator()

    @staticmethod
    def _ids(lab: Site) -> set[str]:
        return {path.name for path in (lab.home_folder / "state" / "distrun" / "jobs").glob("*") if path.is_dir()}

    def agents(self, host: str) -> list[Process]:
        return [each for each in self.lab.processes(host) if AGENT in each.command and self._is_ours(each)]

    def _is_ours(self, agent: Process) -> bool:
        """Whether it, or what it started, is above a process of this job."""
        below, pids = {agent.pid}, set()
        rows = self.lab.processes(agent.host)
        while below - pids:
            pids |= below
            below = {row.pid for row in rows if row.parent in pids}
        return any(row.pid in pids for row in self.left())

    def left(self) -> list[Process]:
        return self.lab.marked(self.id)

    def orphan(self) -> None:
        """Kill launcher, guards and agents in one moment, so that none does another's work."""
        pids = [each.pid for host in self.hosts for each in self.agents(host)]
        assert len(pids) == 2 * len(self.hosts)
        pids.append(self.coordinator)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        self.launcher.kill()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(AGENT in each.command for each in self.left()), LIMIT_S, "the agents are dead")
        assert {each.host for each in self.left()} == set(self.hosts)


@contextlib.contextmanager
def bystander(lab: Site, host: str, *argv: str, uid: int = 0) -> Iterator[Process]:
    """A process on a host that no job started."""
    words = ["setpriv", "--reuid", str(uid), "--clear-groups"] if uid else []
    child = subprocess.Popen(lab[host].enter_argv(*words, *argv), stdin=subprocess.DEVNULL)
    name = b"\0".join(map(os.fsencode, argv)) + b"\0"

    def find() -> Process | None:
        return next((each for each in lab.processes(host) if each.command == name), None)

    try:
        yield wait_until(find, LIMIT_S, "it runs")
    finally:
        found = find()
        if found is not None:
            os.kill(found.pid, signal.SIGKILL)
        child.kill()
        child.wait(scaled(LIMIT_S))


def lives(process: Process) -> bool:
    try:
        return Path("/proc/%d/stat" % process.pid).read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(lab: Site, *words: str, hosts: tuple[str, ...] = ("h1", "h2")) -> Done:
    return lab.distrun("kill", "--hosts", ",".join(hosts), "--grace", "2", *words)


def told(done: Done) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(done.out)
    assert value["schema"] == "distrun.kill/1"
    assert value["exit_code"] == done.code
    return value


def test_an_orphaned_job_is_shown_and_ended(lab: Site) -> None:
    job = Job(lab, "h1", "h2")
    job.orphan()
    shown = kill(lab, "--stale", "--dry-run")
    assert shown.code == 0
    assert job.left()
    for host in job.hosts:
        assert any(
            line.split()[:2] == [host, job.id] and "agent gone" in line and "worker-" in line and "sleep 600" in line
            for line in shown.out.splitlines()
        ), shown.out
    assert "nothing was ended" in shown.out
    done = kill(lab, "--stale", "-y")
    assert done.code == 0, done
    assert job.left() == []
    assert "h1: %s: ended" % job.id in done.out
    again = kill(lab, "--stale", "-y")
    assert (again.code, again.out) == (0, "no stale job is there\n")


def test_a_host_that_cannot_be_reached_is_a_row_and_the_others_are_swept(lab: Site) -> None:
    job = Job(lab, "h1")
    job.orphan()
    done = kill(lab, "--stale", "-y", hosts=("h1", "nosuch"))
    assert done.code == 3
    assert job.left() == []
    assert any(line.startswith("nosuch") and "cannot be asked" in line for line in done.out.splitlines())
    assert "distrun: error: nosuch:" in done.err
    assert "distrun: hint:" in done.err


def test_kill_by_name_sweeps_the_hosts_of_a_job_whose_launcher_is_dead(lab: Site) -> None:
    job = Job(lab, "h1", "h2")
    job.orphan()
    shown = lab.distrun("kill", job.id, "--dry-run")
    assert shown.code == 0
    assert "sleep 600" in shown.out
    assert job.left()
    done = lab.distrun("kill", job.id)
    assert done.code == 0, done
    assert job.left() == []
    assert "h1: " in done.out
    assert "h2: " in done.out


# From another machine of the same user, which has a job store of its own


def test_another_machine_finds_a_job_by_its_hosts_and_ends_it(lab: Site, tmp_path: Path) -> None:
    job = Job(lab, "h1", "h2")
    there = {"XDG_STATE_HOME": str(tmp_path / "another")}
    assert lab.distrun("status", job.id, env=there).code == 2
    shown = lab.distrun("status", "--hosts", "h1,h2", env=there)
    assert shown.code == 0, shown
    rows = [line.split() for line in shown.out.splitlines()]
    assert ["h1", "runs", job.id] in [row[:3] for row in rows]
    assert {(row[0], row[-1]) for row in rows if job.id in row} == {("h1", "worker-0"), ("h2", "worker-1")}
    found = json.loads(lab.distrun("status", job.id, "--hosts", "h1,h2,h3", "--json", env=there).out)
    assert [[each["tasks"] for each in host["jobs"]] for host in found["hosts"]] == [[["worker-0"]], [["worker-1"]], []]
    assert all(each["age_s"] >= 0 for host in found["hosts"] for each in host["jobs"])
    assert kill(lab, job.id, "-y", hosts=("h1", "h2")).code == 0
    assert job.launcher.wait() == 143
    assert job.left() == []


def test_a_host_that_cannot_be_asked_for_its_jobs_is_named(lab: Site) -> None:
    done = lab.distrun("status", "--hosts", "h1,nosuch")
    assert done.code == 3
    assert "distrun: error: nosuch: cannot be asked" in done.err
    assert "no job of mine is on the other hosts" in done.out


# The explicit old way


def test_a_pattern_shows_and_ends_what_it_means(lab: Site) -> None:
    with (
        bystander(lab, "h1", "sleep", "7001") as meant,
        bystander(lab, "h2", "sleep", "7002") as other,
        bystander(lab, "h2", "sleep", "7001", uid=65534) as foreign,
    ):
        shown = kill(lab, "--match", "sleep 7001", "--any-process", "--dry-run")
        assert shown.code == 0
        assert str(meant.inner) in shown.out
        assert lives(meant)
        assert kill(lab, "--match", "sleep 7001", "--any-process").code == 2
        done = told(kill(lab, "--match", "sleep 7001", "--any-process", "-y", "--json"))
        assert [len(host["ended"]) for host in done["hosts"]] == [1, 0]
        assert not lives(meant)
        assert lives(other)
        assert lives(foreign)


def test_a_pattern_that_means_everything_ends_neither_sshd_nor_agents(lab: Site) -> None:
    job = Job(lab, "h1")
    found = told(kill(lab, "--match", ".", "--any-process", "--dry-run", "--json", hosts=("h1",)))
    commands = [each["command"] for each in found["hosts"][0]["found"]]
    assert any("sleep 600" in command for command in commands)
    assert not any("sshd" in command or AGENT.decode() in command for command in commands)
    assert kill(lab, "-y", job.id, hosts=("h1",)).code == 0
    job.launcher.wait()


@pytest.mark.parametrize("words", [["--match", "x"], ["--any-process"], ["--match", "x", "--any-process", "job"]])
def test_half_of_the_old_way_is_refused(lab: Site, words: list[str]) -> None:
    assert lab.distrun("kill", *words).code == 2
