"""Whatever ends the launcher, no process of the job stays: signals, deaths, and tasks that do not want to go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from distrun_cli import AGENT, Distrun, processes, wait_until
from slowness import scaled

LIMIT_S = 60.0
"""For what takes a second or two on a machine that has nothing else to do."""
PATIENT = ("-n", "2", "-s", "0", "--grace", "60")
"""For tasks that end gently when they are asked to."""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for leftovers in /proc")

OBEYS = "touch up-$DMLC_RANK; sleep 300 & wait"
STUBBORN = "trap '' TERM INT HUP; touch up-$DMLC_RANK; while :; do sleep 0.1; done"
SETSID = "setsid bash -c \"trap '' TERM INT; touch escaped-$DMLC_RANK; while :; do sleep 0.1; done\" & %s" % OBEYS
DOUBLE_FORK = (
    "(setsid bash -c 'nohup sleep 300 >/dev/null 2>&1 & disown; touch escaped-$DMLC_RANK') & "
    "until [ -e escaped-$DMLC_RANK ]; do sleep 0.01; done; " + OBEYS
)
NOHUP = "nohup sleep 300 >/dev/null 2>&1 & %s" % OBEYS
WITHOUT_MARK = "env -i $(command -v setsid) $(command -v sleep) 300 & %s" % OBEYS
STOPPED = "touch up-$DMLC_RANK; kill -STOP $$; sleep 300"

KINDS = {
    "obeys": OBEYS,
    "stubborn": STUBBORN,
    "setsid": SETSID,
    "double-fork": DOUBLE_FORK,
    "nohup": NOHUP,
    "without-mark": WITHOUT_MARK,
    "stopped": STOPPED,
}
SOME = {
    "end when asked": ("obeys", "nohup", "without-mark"),
    "double-fork": ("double-fork",) * 2,
    "every kind": tuple(KINDS),
}
"""The kinds of a job's workers: all in one job, and those whose ends the job must not leave to the KILL that a stubborn
one gets."""


def parents_of_all() -> dict[int, int]:
    """Return the parent of every process."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            except OSError:
                continue
    return parents


class Job:
    """A running job of two workers, or of one for each kind that SOME names, whose tasks are all up."""

    def __init__(self, distrun: Distrun, kind: str, *words: str, **more: object) -> None:
        for old in distrun.work.glob("up-*"):
            old.unlink()
        path = distrun.work / "task.sh"
        kinds = SOME.get(kind, (kind, kind))
        text = KINDS.get(kind, kind)
        if kind in SOME:
            cases = " ".join("%d) %s ;;" % (rank, KINDS[each]) for rank, each in enumerate(kinds))
            text = "case $DMLC_RANK in %s esac" % cases
        path.write_text("#!/bin/bash\n%s\n" % text)
        path.chmod(0o755)
        count = len(kinds)
        if "-n" not in words:
            words = ("-n", str(count), "-s", "0", *words)
        self.distrun = distrun
        self.launcher = distrun.begin("--grace", "1", *words, "./task.sh", **more)
        wait_until(lambda: len(list(distrun.work.glob("up-*"))) == count, LIMIT_S, "the workers are up")
        self.coordinator = distrun.coordinator()
        self.pids = self._of_this_job()

    def _of_this_job(self) -> set[int]:
        """Pids of the agent's whole tree: also of what carries no mark."""
        parents = parents_of_all()
        found = {self.launcher.pid}
        while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
            found |= more
        return found - {self.launcher.pid}

    def left(self) -> list[int]:
        living = {pid for pid, _, _ in processes()}
        return sorted(self.pids & living)

    def agents(self) -> list[int]:
        """The guard and the agent, in this order: the coordinator started the guard."""
        parents = parents_of_all()
        ours = [pid for pid, _, command in processes() if pid in self.pids and AGENT in command]
        return sorted(ours, key=lambda pid: parents.get(pid) != self.coordinator)

    def ends(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the launcher's end; when it has ended nothing may be left."""
        code = self.launcher.wait(scaled(limit_s))
        assert self.left() == []
        assert self.distrun.left() == []
        return code

    @property
    def words(self) -> str:
        return (self.distrun.home / "err").read_text()


@pytest.mark.parametrize("kind", SOME)
def test_terminating_the_launcher_ends_every_kind_of_task(kind: str, distrun: Distrun) -> None:
    job = Job(distrun, kind)
    job.launcher.terminate()
    assert job.ends() == 143
    assert distrun.state()["state"] == "killed"


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize(("victim", "state"), [("client", "killed"), ("coordinator", "lost")])
def test_killing_the_launcher_ends_every_kind_of_task(victim: str, state: str, kind: str, distrun: Distrun) -> None:
    """Where all end when asked, long before the grace time is over."""
    words = ("--grace", str(3 * scaled(LIMIT_S))) if kind == "end when asked" else ()
    job = Job(distrun, kind, *words)
    os.kill(job.launcher.pid if victim == "client" else job.coordinator, signal.SIGKILL)
    job.launcher.wait(scaled(LIMIT_S))
    wait_until(lambda: not job.left() and not distrun.left(), LIMIT_S, "nothing is left")
    assert distrun.run("status", distrun.jobs[0].name).stdout.decode().splitlines()[0].split()[1] == state
    if victim == "client":
        assert distrun.state()["message"] == "distrun launch was killed or crashed"
    if victim == "coordinator":
        assert "its coordinator (pid %d) was ended by signal SIGKILL" % job.coordinator in job.words


@pytest.mark.parametrize("kind", SOME)
def test_killing_the_agent_ends_every_kind_of_task(kind: str, distrun: Distrun) -> None:
    job = Job(distrun, kind)
    agent = job.agents()[1]
    os.kill(agent, signal.SIGKILL)
    assert job.ends() == 7


def test_killing_the_guard_ends_the_job(distrun: Distrun) -> None:
    job = Job(distrun, "obeys")
    os.kill(job.agents()[0], signal.SIGKILL)
    assert job.ends() != 0


@pytest.mark.slow
def test_an_agent_that_is_frozen_does_not_keep_the_job(distrun: Distrun) -> None:
    job = Job(distrun, "obeys")
    os.kill(job.agents()[1], signal.SIGSTOP)
    job.launcher.terminate()
    assert job.ends() == 143


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME)
def test_the_guard_ends_the_tasks_of_a_frozen_agent_whose_coordinator_is_dead(kind: str, distrun: Distrun) -> None:
    job = Job(distrun, kind, "--suspect-after", "1", "--lost-after", "3")
    os.kill(job.agents()[1], signal.SIGSTOP)
    os.kill(job.coordinator, signal.SIGKILL)
    job.launcher.wait(scaled(LIMIT_S))
    wait_until(lambda: not job.left(), LIMIT_S, "the guard has ended everything")
    assert distrun.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--detach",)])
def test_a_coordinator_that_is_stopped_before_its_agents_start_ends_the_launch(
    words: tuple[str, ...], distrun: Distrun
) -> None:
    setup = "until [ -e go ]; do sleep 0.1; done"  # nothing is started, however late the coordinator is stopped
    told = ("-n", "1", "-s", "0", "--start-timeout", "12", "--setup", setup, *words)
    launcher = distrun.begin(*told, "sleep", "300")

    def session(pid: int) -> int:
        try:
            return os.getsid(pid)
        except ProcessLookupError:  # what forks a daemon is over in a moment
            return 0

    def coordinator() -> int:
        mark = os.fsencode("XDG_STATE_HOME=%s" % (distrun.home / "state"))
        of_launch = (pid for pid, environ, command in processes() if mark in environ and b"launch" in command)
        others = {pid: led for pid in of_launch if (led := session(pid)) not in (0, session(launcher.pid))}
        # A daemon leads no session; the process that makes it does. Its agent looks like it until it runs another
        # program, and is younger.
        return min((pid for pid, led in others.items() if (pid == led) == (not words)), default=0)

    os.kill(wait_until(coordinator, LIMIT_S, "the coordinator is there"), signal.SIGSTOP)
    try:
        assert launcher.wait(scaled(LIMIT_S)) == 6
    finally:
        launcher.kill()
        launcher.wait()
    assert "did not answer within 12 s and was killed: was it stopped?" in (distrun.home / "err").read_text()
    # An agent that had been started by then ends by itself, as the end of its input says that its starter is gone.
    wait_until(lambda: not distrun.left(), LIMIT_S, "nothing is left")


def test_a_guard_that_is_frozen_does_not_stay_behind_a_job_that_ended_well(distrun: Distrun) -> None:
    job = Job(distrun, "touch up-$DMLC_RANK; until [ -e go ]; do sleep 0.02; done")
    guard = job.agents()[0]
    os.kill(guard, signal.SIGSTOP)
    (distrun.work / "go").touch()
    assert job.ends() == 0
    assert "ended pid %d (distrun's guard)" % guard in job.words


@pytest.mark.parametrize("kind", ["obeys", "stubborn", "setsid", "double-fork"])
def test_agent_and_guard_killed_at_once_leave_the_sweep_to_the_launcher(kind: str, distrun: Distrun) -> None:
    job = Job(distrun, kind)
    for pid in job.agents():
        os.kill(pid, signal.SIGKILL)
    assert job.ends() == 7


def test_ctrl_c_once_leaves_servers_until_the_workers_are_done(distrun: Distrun) -> None:
    text = (
        "if [ $DMLC_ROLE != worker ]; then\n"
        "trap 'touch server-ended; exit 0' TERM INT; while :; do sleep 0.05; done; fi\n"
        "trap 'sleep 0.4; [ -e server-ended ] || touch served-$DMLC_RANK; exit 0' INT\n"
        "touch up-$DMLC_RANK; while :; do sleep 0.05; done"
    )
    job = Job(distrun, text, "-n", "2", "-s", "1", "--ps", "command", "--grace", "60")
    job.launcher.send_signal(signal.SIGINT)
    assert job.ends() == 130
    assert len(list(distrun.work.glob("served-*"))) == 2


def test_ctrl_c_twice_is_at_once(distrun: Distrun) -> None:
    job = Job(distrun, STUBBORN, "-n", "2", "-s", "0", "--grace", "600")
    job.launcher.send_signal(signal.SIGINT)
    wait_until(lambda: "nterrupt" in job.words, LIMIT_S)
    job.launcher.send_signal(signal.SIGINT)
    assert job.ends() == 130


def test_ctrl_c_in_a_terminal_reaches_the_launcher_only(distrun: Distrun) -> None:
    """The kernel signals the terminal's whole foreground group; tasks and agent are not in it."""
    text = "trap 'echo got-int >> ints; exit 0' INT; touch up-$DMLC_RANK; while :; do sleep 0.05; done"
    job = Job(distrun, text, *PATIENT, start_new_session=True)
    os.killpg(job.launcher.pid, signal.SIGINT)
    assert job.ends() == 130
    assert (distrun.work / "ints").read_text().count("got-int") == 2


def test_a_launch_under_nohup_ignores_the_hangup(distrun: Distrun) -> None:
    text = "touch up-$DMLC_RANK; until [ -e go ]; do sleep 0.02; done"
    job = Job(distrun, text, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    job.launcher.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert job.launcher.poll() is None
    (distrun.work / "go").touch()
    assert job.ends() == 0


def test_tasks_of_a_nohup_launch_do_not_ignore_signals(distrun: Distrun) -> None:
    text = "trap 'touch hup-$DMLC_RANK' HUP; touch up-$DMLC_RANK; kill -HUP $$; sleep 0.1"
    job = Job(distrun, text, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert job.ends() == 0
    assert len(list(distrun.work.glob("hup-*"))) == 2


@pytest.mark.parametrize("kind", ["setsid", "double-fork", "without-mark"])
def test_what_a_task_leaves_behind_ends_with_the_job(kind: str, distrun: Distrun) -> None:
    text = KINDS[kind].replace("sleep 300 & wait", "true") + "; until [ -e go ]; do sleep 0.02; done"
    job = Job(distrun, text)
    (distrun.work / "go").touch()
    assert job.ends() == 0


def test_a_worker_that_fails_takes_the_stubborn_ones_with_it(distrun: Distrun) -> None:
    wait = "touch up-$DMLC_RANK; until [ -e go ]; do sleep 0.02; done"
    text = "trap '' TERM; %s; [ $DMLC_RANK = 1 ] && exit 4; sleep 300" % wait
    job = Job(distrun, text)
    (distrun.work / "go").touch()
    assert job.ends() == 4


@pytest.mark.parametrize("name", ["server-0", "scheduler"])
def test_a_bundled_server_or_scheduler_that_dies_fails_the_job(name: str, distrun: Distrun) -> None:
    job = Job(distrun, "obeys", "-n", "2", "-s", "1")

    def pid() -> int | None:
        return next(task["pid"] for task in distrun.state()["tasks"] if task["name"] == name)

    os.kill(wait_until(pid, LIMIT_S), signal.SIGKILL)
    assert job.ends() == 137
    assert "first failure: %s" % name in job.words


def test_kill_ends_what_a_dead_launcher_and_a_dead_agent_left(distrun: Distrun) -> None:
    """Everything of ours is killed at one blow; the tasks run on, and `distrun kill` finds them by their record."""
    job = Job(distrun, STUBBORN)
    ours = [job.launcher.pid, job.coordinator, *job.agents()]
    for pid in ours:
        os.kill(pid, signal.SIGSTOP)
    for pid in ours:
        os.kill(pid, signal.SIGKILL)
    job.launcher.wait(scaled(LIMIT_S))
    wait_until(lambda: not job.agents(), LIMIT_S)
    assert job.left()
    said = distrun.run("kill", distrun.job.name)
    assert said.returncode == 0, said.stderr.decode()
    assert b"is gone" in said.stdout
    assert b"ended pid" in said.stdout
    assert job.left() == []


def test_ctrl_z_pauses_the_printing_and_the_job_goes_on(distrun: Distrun) -> None:
    text = (
        "touch up-$DMLC_RANK; until [ -e go ]; do sleep 0.02; done; echo line; touch done-$DMLC_RANK; "
        "until [ -e over ]; do sleep 0.02; done"
    )
    job = Job(distrun, text)
    job.launcher.send_signal(signal.SIGTSTP)
    wait_until(lambda: "paused" in job.words, LIMIT_S)
    (distrun.work / "go").touch()
    wait_until(lambda: len(list(distrun.work.glob("done-*"))) == 2, LIMIT_S)
    assert (distrun.home / "out").read_bytes() == b""
    job.launcher.send_signal(signal.SIGTSTP)
    (distrun.work / "over").touch()
    assert job.ends() == 0
    assert (distrun.home / "out").read_text().count("line") == 2


def test_the_launcher_waits_for_no_reader_when_interrupted_again(distrun: Distrun) -> None:
    """A pipe that nobody reads holds back the last lines; Ctrl-C then ends the wait."""
    read, write = os.pipe()
    child = distrun.begin("-n", "1", "-s", "0", "bash", "-c", "head -c 1000000 /dev/zero | tr '\\0' 'x'", stdout=write)
    os.close(write)
    wait_until(lambda: distrun.jobs and distrun.state()["state"] == "succeeded", LIMIT_S)
    wait_until(lambda: child.pid not in parents_of_all().values(), LIMIT_S, "its agent has left")
    time.sleep(2.0)  # it only waits by now
    child.send_signal(signal.SIGINT)
    try:
        assert child.wait(scaled(LIMIT_S)) == 0
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        raise
    finally:
        os.close(read)


# ---------------------------------------------------------------- what works without /proc, subreaper and pidfd


@pytest.mark.slow
@pytest.mark.portable
@pytest.mark.parametrize("kind", ["obeys", "stubborn", "nohup", "stopped"])
@pytest.mark.parametrize("how", ["TERM", "KILL"])
def test_without_proc_what_stays_in_its_group_ends_with_the_launcher(how: str, kind: str, distrun: Distrun) -> None:
    job = Job(distrun, kind, env={"DISTRUN_PORTABLE": "1"})
    job.launcher.send_signal(getattr(signal, "SIG" + how))
    code = job.launcher.wait(scaled(LIMIT_S))
    assert code == (143 if how == "TERM" else -9)
    wait_until(lambda: not job.left() and not distrun.left(), LIMIT_S, "nothing is left")


@pytest.mark.portable
def test_without_proc_codes_and_output_are_the_same(distrun: Distrun) -> None:
    text = "echo hello; touch said-$DMLC_RANK; until [ -e said-0 ] && [ -e said-1 ]; do sleep 0.02; done"
    words = ("-n", "2", "-s", "0", "--no-prefix", "bash", "-c", text + "; exit $((DMLC_RANK * 3))")
    result = distrun.launch(*words, env={"DISTRUN_PORTABLE": "1"})
    assert result.returncode == 3, result.stderr.decode()
    assert result.stdout == b"hello\nhello\n"


@pytest.mark.portable
def test_without_proc_ctrl_c_is_graceful(distrun: Distrun) -> None:
    text = "trap 'echo saved; exit 0' INT; touch up-$DMLC_RANK; while :; do sleep 0.05; done"
    job = Job(distrun, text, *PATIENT, env={"DISTRUN_PORTABLE": "1"})
    job.launcher.send_signal(signal.SIGINT)
    assert job.launcher.wait(scaled(LIMIT_S)) == 130
    wait_until(lambda: not job.left() and not distrun.left(), LIMIT_S, "nothing is left")
    assert (distrun.home / "out").read_text().count("saved") == 2
