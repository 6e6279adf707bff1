"""What an agent's tools find: real jobs, real processes, and what must not be touched."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentkit import HOST, WAIT_S, AgentDriver, agent, new_job, poll, python, shell
from slowness import scaled

from distrun_runtime.agent import query, share, stopping
from distrun_runtime.contract import process
from distrun_runtime.contract.plan import Limits
from distrun_runtime.errors import ContractError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
SHORT = Limits(grace_s=0.5)


@pytest.fixture(autouse=True)
def own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of agents that are killed here go with the test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def running(driver: AgentDriver, name: str = "worker-0") -> None:
    driver.begin()
    driver.spawn(name)
    driver.hear_until(lambda: driver.text(name), "the task's first words")


def found(job: str) -> dict[str, Any]:
    """What the survey says of one job (others of this user may run meanwhile)."""
    (only,) = [each for each in query.answer("survey", {})["jobs"] if each["job"] == job]
    return only


def freeze_and_kill(driver: AgentDriver) -> None:
    """Kill guard and agent so that neither can still do the other's work."""
    pids = (driver.child.pid, driver.agent_pid())
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
    driver.child.wait(scaled(WAIT_S))


@contextlib.contextmanager
def bystander(*argv: str, uid: int | None = None, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of nobody's job, or that only says so."""
    child = subprocess.Popen(argv, env={**os.environ, **env}, user=uid, start_new_session=True)
    try:
        poll(lambda: process.command_of(child.pid).startswith(argv[0]), "it runs")
        yield child
    finally:
        child.kill()
        child.wait(scaled(WAIT_S))


@pytest.mark.parametrize("way", ["", pytest.param("1", marks=[pytest.mark.portable, pytest.mark.slow])])
def test_a_running_job_is_found_with_its_tasks(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRUN_PORTABLE", way)
    with agent(shell("sleep 600 & echo ready; wait")) as driver:
        running(driver)

        def commands() -> list[tuple[str, str]]:
            return [(row["task"], row["command"].partition(" ")[0]) for row in found(driver.job)["processes"]]

        poll(lambda: ("worker-0", "sleep") in commands(), "its child has become another program")
        job = found(driver.job)
        assert (job["host"], job["agent"], job["guard"]) == (HOST, "alive", "alive")
        assert job["folder"] == share.folders_of(driver.job)[0]
        tasks = commands()
        assert ("worker-0", "sh") in tasks
        assert {"agent", "guard"} <= {task for task, _ in tasks}

        def lasting() -> dict[process.Identity, float]:
            return {process.Identity(row["pid"], row["start"]): row["age_s"] for row in found(driver.job)["processes"]}

        # Without /proc the agent starts `ps` now and then: what is found again is not one of these.
        first, ages = lasting(), lasting()
        same = [one for one in ages if one in first]
        assert len(same) >= 4, (first, ages)  # agent, guard, sh and sleep
        for one in same:
            assert process.is_alive(one)
            assert 0 <= ages[one] < 100


def test_a_stopped_agent_is_told_from_a_dead_one() -> None:
    with agent(shell("echo ready; sleep 600"), limits=SHORT) as driver:
        running(driver)
        os.kill(driver.agent_pid(), signal.SIGSTOP)
        poll(lambda: found(driver.job)["agent"] == "stopped", "the agent is seen to be stopped")
        assert found(driver.job)["guard"] == "alive"
        freeze_and_kill(driver)  # waits for the guard, which is our child; the agent may take a moment longer
        poll(lambda: found(driver.job)["agent"] == "dead", "the agent is seen to be dead")
        job = found(driver.job)
        assert job["guard"] == "dead"
        assert [row["task"] for row in job["processes"]] == ["worker-0"] * len(job["processes"])


def test_pings_are_signs_of_life() -> None:
    with agent(shell("echo ready; sleep 600"), limits=Limits(lease_s=77.0)) as driver:
        running(driver)
        path = os.path.join(share.folders_of(driver.job)[0], share.RECORD)
        os.utime(path, (1, 1))
        assert found(driver.job)["quiet_s"] > 1000
        driver.say("ping", n=1)
        driver.wait("pong")
        job = found(driver.job)
        assert job["quiet_s"] < 100
        assert job["lease_s"] == 77.0


@pytest.mark.parametrize("way", ["", pytest.param("1", marks=pytest.mark.portable)])
@pytest.mark.parametrize(("role", "rank", "name"), [("server", "2", "server-2"), ("scheduler", "0", "scheduler")])
def test_a_job_without_a_record_is_found_by_its_marks(
    way: str, role: str, rank: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTRUN_PORTABLE", way)
    job = "m" + uuid.uuid4().hex[:8]
    with bystander("sleep", "600", DISTRUN_JOB_ID=job, DISTRUN_HOST="d7", DISTRUN_ROLE=role, DISTRUN_RANK=rank):
        here = found(job)
        assert (here["host"], here["agent"], here["folder"]) == ("d7", "none", "")
        assert [(row["task"], row["command"]) for row in here["processes"]] == [(name, "sleep 600")]


def test_what_has_no_marks_belongs_to_the_place_of_what_started_it() -> None:
    job = "m" + uuid.uuid4().hex[:8]
    with contextlib.ExitStack() as stack:
        for place in ("7", "8"):
            marks = {"DISTRUN_JOB_ID": job, "DISTRUN_HOST": "d7", "DISTRUN_PLACE": place}
            stack.enter_context(bystander("sh", "-c", f"env -i sleep 60{place} & wait", **marks))

        def commands() -> dict[str, set[str]]:
            jobs = [each for each in query.answer("survey", {})["jobs"] if each["job"] == job]
            return {
                each["host"]: {row["command"] for row in each["processes"] if "wait" not in row["command"]}
                for each in jobs
            }

        stack.callback(stopping.sweep, job, 60.0)
        poll(lambda: commands() == {"7": {"sleep 607"}, "8": {"sleep 608"}}, "each has its own")


def test_a_task_that_has_cleared_its_environment_is_known_by_the_record() -> None:
    with agent(shell("echo ready; exec env -i sleep 600")) as driver:
        running(driver)
        poll(lambda: ("worker-0", "sleep 600") in told(driver.job), "the task's name")


def told(job: str) -> list[tuple[str, str]]:
    return [(row["task"], row["command"]) for row in found(job)["processes"]]


def test_processes_are_read_once_however_many_jobs_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    environ_of = process.environ_of
    monkeypatch.setattr(process, "environ_of", lambda pid: (read.append(pid), environ_of(pid))[1])
    jobs = ["m" + uuid.uuid4().hex[:8] for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for job in jobs:
            stack.enter_context(bystander("sleep", "600", DISTRUN_JOB_ID=job, DISTRUN_HOST="d7"))
        told = query.answer("survey", {})["jobs"]
    assert {each["job"] for each in told} >= set(jobs)
    assert len(read) == len(set(read))


def test_a_job_whose_record_was_tidied_away_still_has_its_agent() -> None:
    with agent(shell("echo ready; sleep 600")) as driver:
        running(driver)
        share.remove_folder(share.folders_of(driver.job)[0])
        job = found(driver.job)
        assert (job["agent"], job["guard"]) == ("alive", "alive")


def test_a_folder_that_nothing_belongs_to_is_told_of_and_removed() -> None:
    with agent(shell("echo ready; exec sleep 600"), limits=SHORT) as driver:
        running(driver)
        freeze_and_kill(driver)
        os.kill(found(driver.job)["processes"][0]["pid"], signal.SIGKILL)
        poll(lambda: found(driver.job)["processes"] == [], "nothing lives")
        assert query.answer("sweep", {"job": driver.job, "grace_s": 0.1}) == {"ended": [], "left": []}
        assert share.folders_of(driver.job) == []


def test_records_are_found_by_who_has_other_variables() -> None:
    with agent(shell("echo ready; sleep 600"), env={"XDG_RUNTIME_DIR": ""}) as driver:
        running(driver)
        assert found(driver.job)["agent"] == "alive"


def test_sweep_and_sweeps_end_what_was_left() -> None:
    drivers = [AgentDriver(shell("echo ready; sleep 600"), limits=SHORT) for _ in range(2)]
    try:
        for driver in drivers:
            running(driver)
            freeze_and_kill(driver)
        names = [driver.job for driver in drivers]
        told = query.answer("sweeps", {"jobs": names, "grace_s": 1.0})
        assert list(told) == names
        for driver in drivers:
            assert told[driver.job]["left"] == []
            assert told[driver.job]["ended"]
            assert driver.leftovers() == []
    finally:
        for driver in drivers:
            stopping.sweep(driver.job, 0.0)
            driver.close_input()
            driver.child.stdout.close()


def test_without_a_grace_time_each_job_has_the_one_that_it_was_launched_with(monkeypatch: pytest.MonkeyPatch) -> None:
    graces: list[float] = []
    end_all = stopping.end_all
    monkeypatch.setattr(stopping, "end_all", lambda find, grace_s: (graces.append(grace_s), end_all(find, grace_s))[1])
    with agent(shell("echo ready; exec sleep 600"), limits=Limits(grace_s=4.5)) as driver:
        running(driver)
        freeze_and_kill(driver)
        assert found(driver.job)["grace_s"] == 4.5
        assert query.answer("sweeps", {"jobs": [driver.job]})[driver.job]["left"] == []
    assert query.answer("sweep", {"job": "no-such-job"}) == {"ended": [], "left": []}
    query.answer("sweep", {"job": "no-such-job", "grace_s": 0.0})
    assert graces == [4.5, Limits().grace_s, 0.0]


@as_root
def test_what_another_user_runs_is_neither_found_nor_ended_whatever_it_claims() -> None:
    job = "u" + uuid.uuid4().hex[:8]
    seconds = "601%09d" % (uuid.uuid4().int % 10**9)  # as nobody else on this machine sleeps
    with bystander("sleep", seconds, uid=NOBODY, DISTRUN_JOB_ID=job) as child:
        assert [each for each in query.answer("survey", {})["jobs"] if each["job"] == job] == []
        assert query.answer("sweep", {"job": job, "grace_s": 0.1}) == {"ended": [], "left": []}
        assert query.answer("match", {"regex": "^sleep %s$" % seconds})["found"] == []
        assert child.poll() is None
        rows = process.table([child.pid, os.getpid()])
        assert [row.pid for row in process.mine(rows)] == [os.getpid()]


@as_root
def test_portable_way_tells_users_apart_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRUN_PORTABLE", "1")
    with bystander("sleep", "602", uid=NOBODY) as child:
        rows = process.table([child.pid, os.getpid()])
        assert [row.pid for row in process.mine(rows)] == [os.getpid()]


# The explicit old way


def test_a_pattern_finds_and_ends_what_it_means_and_nothing_else() -> None:
    word = "w" + uuid.uuid4().hex
    code = "import time; time.sleep(600) # "
    with (
        bystander(sys.executable, "-c", code + word) as meant,
        bystander(sys.executable, "-c", code + word[::-1]) as other,
    ):
        asked = {"regex": word + "$", "kill": False}
        rows = query.answer("match", asked)["found"]
        assert [row["pid"] for row in rows] == [meant.pid]
        nothing = query.answer("match", {**asked, "kill": True, "grace_s": 60.0, "only": []})
        assert nothing == {"found": [], "ended": [], "left": []}
        identity = [rows[0]["pid"], rows[0]["start"]]
        assert query.answer("match", {**asked, "spare": [identity]})["found"] == []
        done = query.answer("match", {**asked, "kill": True, "grace_s": 60.0, "only": [identity]})
        assert [pid for pid, _ in done["ended"]] == [meant.pid]
        assert meant.wait(scaled(WAIT_S)) == -signal.SIGTERM
        assert other.poll() is None


def test_no_pattern_means_us_those_above_us_agents_or_the_first_process() -> None:
    with agent(python("import time; print('up', flush=True); time.sleep(600)")) as driver:
        running(driver)
        pids = {row.pid for row in stopping.matching(process.table(), re.compile(""), set())}
        spared = {1, os.getpid(), *process.ancestors(os.getpid()), driver.child.pid, driver.agent_pid()}
        assert not pids & spared
        assert pids


@pytest.mark.parametrize(
    ("command", "is_daemon"),
    [
        ("sshd: root@pts/0", True),
        ("/usr/sbin/sshd -D", True),
        ("sshd-session: me [priv]", True),
        ("[sshd]", True),
        ("python sshd.py", False),
        ("sshdog", False),
        ("", False),
    ],
)
def test_the_ssh_daemon_is_known(command: str, is_daemon: bool) -> None:
    assert stopping.is_daemon(command) is is_daemon


def test_what_is_no_pattern_is_refused() -> None:
    with pytest.raises(ContractError, match="not a regular expression"):
        query.answer("match", {"regex": "*"})


# Ages


@pytest.mark.parametrize("start", ["", "proc:x:y", "ps:", "other:1"])
def test_a_start_that_tells_nothing_gives_no_age(start: str) -> None:
    assert stopping.age_s(start) is None


def test_jobs_of_two_stores_by_one_id_are_told_apart_and_ended_apart() -> None:
    script = "setsid sleep 600 & echo ready; wait"
    id_ = new_job()
    with (
        agent(shell(script), limits=SHORT, nonce="a" * 16, job=id_) as first,
        agent(shell(script), limits=SHORT, nonce="b" * 16, job=id_) as second,
    ):
        for driver in (first, second):
            running(driver)
        jobs = [each for each in query.answer("survey", {})["jobs"] if each["job"] == id_]
        assert sorted(each["nonce"] for each in jobs) == ["a" * 16, "b" * 16]
        pids = [{row["pid"] for row in each["processes"]} for each in jobs]
        assert not pids[0] & pids[1]
        for driver in (first, second):
            freeze_and_kill(driver)
        name = f"{id_}/{'a' * 16}"
        told = query.answer("sweeps", {"jobs": [name], "grace_s": 1.0})
        assert told[name]["left"] == []
        (other,) = [each for each in query.answer("survey", {})["jobs"] if each["job"] == id_]
        assert other["nonce"] == "b" * 16
        assert {row["task"] for row in other["processes"]} == {"worker-0"}
        assert stopping.sweep(id_, 0.1).ended == [], "without its nonce it is another job"
        assert len(stopping.sweep(id_, 1.0, "b" * 16).ended) >= 2
