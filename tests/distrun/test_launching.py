from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slowness import scaled

from distrun import backends, killing, launching, planning
from distrun.backends.base import Swept
from distrun.cli.attach import _Attached
from distrun.client import ControlConnection, CoordinatorError
from distrun.errors import UsageError
from distrun.request import JobRequest
from distrun_runtime.contract import process, session
from distrun_runtime.contract.plan import Limits, Plan
from distrun_runtime.coordinator.failures import Culprit, Outcome, Survivor
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.jobstore import JobStore


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(tmp_path / "state")


SWEPT = ["ended pid 9 (sleep)", "all its processes have ended"]


def prepare(store: JobStore, request: JobRequest | None = None, **more: Any) -> planning.PlannedJob:
    return planning.plan_job(request or JobRequest(command=("true",), workers=1, servers=0, cwd="/", **more), store)


def make(store: JobStore, **launcher: object) -> JobFolder:
    """Return the folder of a job whose launcher is the process described by `launcher`."""
    folder = store.create(prepare(store).plan)
    path = folder.path / "launcher.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **launcher}))
    return folder


def swept(monkeypatch: pytest.MonkeyPatch, left: tuple[str, ...] = ()) -> list[tuple[str, float]]:
    calls: list[tuple[str, float]] = []

    def sweep(self: object, plan: Plan, grace_s: float) -> dict[str, Swept]:
        calls.append((plan.job, grace_s))
        return {plan.hosts[0].name: Swept(("pid 9 (sleep)",), left)}

    monkeypatch.setattr(type(backends.load("local")), "sweep", sweep)
    return calls


def test_preparing_makes_nothing(store: JobStore, tmp_path: Path) -> None:
    ready = prepare(store)
    assert ready.plan.job not in ("", planning.DRY_RUN_ID)
    assert len(ready.secrets.token) == 64
    assert ready.plan.task("worker-0").env["DISTRUN_RUN_DIR"] == str(store.jobs / ready.plan.job)
    assert not list(tmp_path.iterdir())


def test_a_job_that_is_over_is_swept_of_what_would_not_die_then(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = swept(monkeypatch)
    folder = make(store)
    folder.finish(Outcome(0, "succeeded", "all well"))
    assert killing.kill(folder).lines == ["is over already: succeeded", *SWEPT]
    assert calls == [(folder.id, 0.0)]


def test_a_job_of_another_machine_is_refused(store: JobStore) -> None:
    folder = make(store, host="elsewhere")
    with pytest.raises(UsageError, match="was launched on elsewhere"):
        killing.kill(folder)


def test_a_dead_launchers_job_is_swept(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = swept(monkeypatch)
    child = subprocess.Popen([sys.executable, "-c", ""])
    pid, start = process.identity(child.pid)
    child.wait()
    folder = make(store, pid=pid, start=start)
    assert killing.kill(folder).lines == ["its launcher (pid %d) is gone" % pid, *SWEPT]
    assert calls == [(folder.id, 10.0)]
    state = folder.state()
    assert (state["state"], [task["state"] for task in state["tasks"]]) == ("killed", ["stopped"])
    assert killing.kill(folder).lines[0] == "is over already: killed"


def test_another_process_of_that_pid_is_not_touched(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    swept(monkeypatch)
    folder = make(store, pid=os.getpid(), start="proc:another-boot:1")
    assert killing.kill(folder, 1.0).lines[1:] == SWEPT


@pytest.mark.parametrize("obeys", [True, False])
def test_a_living_launcher_is_asked_and_one_that_does_not_end_is_killed(
    obeys: bool, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = swept(monkeypatch)
    code = "import signal,time;%s;print(1,flush=True);time.sleep(60)"
    ignore = "0" if obeys else "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    child = subprocess.Popen([sys.executable, "-c", code % ignore], stdout=subprocess.PIPE)
    child.stdout.readline()
    pid, start = process.identity(child.pid)
    done = killing.kill(make(store, pid=pid, start=start), grace_s=0.2, wait_s=0.3 if not obeys else 60.0).lines
    assert child.wait(scaled(60)) == (-15 if obeys else -9)
    child.stdout.close()
    assert done[0] == "asked its launcher (pid %d) to stop the job" % pid
    if obeys:
        assert done[1:] == ["the launcher has ended", *SWEPT]
    else:
        assert done[1:] == ["killed the launcher, which did not end within 0.5 s", *SWEPT]
    assert len(calls) == 1


def test_processes_that_do_not_end_are_told(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    swept(monkeypatch, left=("pid 8 (stuck)",))
    folder = make(store, pid=os.getpid(), start="proc:another-boot:1")
    assert killing.kill(folder, 1.0).lines[1:] == ["ended pid 9 (sleep)", "pid 8 (stuck) did not end"]
    outcome = folder.outcome()
    assert outcome["survivors"] == [{"what": "pid 8 (stuck)", "host": folder.plan().hosts[0].name}]


def sweeping(monkeypatch: pytest.MonkeyPatch, **found: Swept) -> None:
    monkeypatch.setattr(type(backends.load("local")), "sweep", lambda self, plan, grace_s: found)


def test_a_lost_job_whose_hosts_cannot_be_asked_stays_lost(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeping(monkeypatch, h1=Swept(("pid 9 (sleep)",)), h2=Swept(problem="no route"))
    folder = make(store, pid=os.getpid(), start="proc:another-boot:1")
    for _ in range(2):
        killed = killing.kill(folder, 0.0)
        assert killed.unasked == ["h2: cannot be asked: no route"]
        assert killed.lines[1:] == ["h1: ended pid 9 (sleep)", "h1: all its processes have ended", *killed.unasked]
        assert (folder.state()["state"], folder.outcome()) == ("lost", None)
    sweeping(monkeypatch, h1=Swept(), h2=Swept())
    assert killing.kill(folder, 0.0).unasked == []
    assert folder.state()["state"] == "killed"


def test_a_job_that_is_over_is_quiet_only_about_hosts_that_answered(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeping(monkeypatch, h1=Swept(), h2=Swept(problem="no route"))
    folder = make(store)
    folder.finish(Outcome(0, "succeeded", "all well"))
    killed = killing.kill(folder)
    assert killed.lines == ["is over already: succeeded", "h2: cannot be asked: no route"]
    assert (killed.left, killed.unasked) == ([], ["h2: cannot be asked: no route"])


def test_what_a_command_is_called_says_nothing_about_its_end(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeping(monkeypatch, h1=Swept(("pid 8 (echo cannot be asked)", "pid 9 did not end")))
    folder = make(store, pid=os.getpid(), start="proc:another-boot:1")
    killed = killing.kill(folder, 0.0)
    assert (killed.left, killed.unasked) == ([], [])
    assert "ended pid 9 did not end" in killed.lines


def request_of(**more: Any) -> JobRequest:
    return JobRequest(**{"command": ("true",), "workers": 1, "servers": 1, "cwd": "/", **more})


def test_the_python_of_servers_may_be_named_below_the_home(
    store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "py").symlink_to(sys.executable)
    assert prepare(store, request_of(python="~/py")).plan.task("server-0").argv[0] == "~/py"


def test_what_a_sweep_after_the_job_found_ended_is_not_said_to_run() -> None:
    pairs = [("worker-0", "d1"), ("worker-1", "d2"), ("the agent", "d2"), ("worker-2", "d3")]
    fears = tuple(Survivor(what, host) for what, host in pairs)
    outcome = Outcome(7, "host_lost", "d2 is lost", survivors=fears)
    swept = {"d1": Swept(problem="no route"), "d2": Swept(("pid 8 (sleep)",)), "d3": Swept((), ("pid 9 (stuck)",))}
    assert launching.with_swept(outcome, {}, 45.0) == outcome
    assert launching.with_swept(outcome, swept, 45.0).survivors == (fears[0], Survivor("pid 9 (stuck)", "d3"))


@pytest.mark.parametrize(
    ("swept", "told"),
    [
        (Swept(("pid 7 (sleep)", "pid 8 (distrun's agent)")), "; 2 processes left there were ended"),
        (Swept(("pid 7 (sleep)",)), "; 1 process left there was ended"),
        (Swept(), "; no process is left there"),
        (Swept(("pid 7 (sleep)",), ("pid 9 (stuck)",)), "; 1 process there did not end"),
        (
            Swept(problem="no route"),
            "; it cannot be reached again: if that machine still runs, its agent or guard ends the tasks"
            " there within 45 s; to make sure: distrun kill calm-otter-7f3",
        ),
    ],
)
def test_the_last_line_about_a_lost_host_says_what_was_done_there(swept: Swept, told: str) -> None:
    outcome = Outcome(7, "host_lost", "lost d2: silent for 30 s", Culprit("", "d2"), job="calm-otter-7f3")
    assert launching.with_swept(outcome, {"d2": swept}, 45.0).message == "lost d2: silent for 30 s" + told
    assert launching.with_swept(outcome, {"d1": swept}, 45.0).message == "lost d2: silent for 30 s"
    failed = dataclasses.replace(outcome, reason="task_failed")
    assert launching.with_swept(failed, {"d2": swept}, 45.0).message == failed.message


def left_of(plan: Plan) -> list[process.Process]:
    return process.marked(process.marks(plan.job, plan.nonce))


def test_a_coordinator_that_fails_before_its_job_begins_leaves_no_agent(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listen(*of: object) -> None:
        raise UsageError("there is no control socket for this job")

    ready = prepare(store)
    monkeypatch.setattr(launching, "_listen", listen)
    pid, ours = launching._fork(ready, store.create(ready.plan), 0)
    with ours:
        os.waitpid(pid, 0)
    assert not left_of(ready.plan)


def test_an_attached_job_does_without_a_control_socket_and_says_so_and_a_detached_one_does_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def listen(*of: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    said: list[Any] = []
    stands: Any = SimpleNamespace(say=lambda *words: said.append(words), write_control=said.append)
    monkeypatch.setattr("distrun_runtime.coordinator.service.listen", listen)
    launching._listen(stands, stands, False)
    [(text, level), path] = said
    assert "there is no control socket for this job: [Errno 28] No space left" in text
    assert (level, path) == ("warning", "")
    with pytest.raises(UsageError, match="there is no control socket for this job"):
        launching._listen(stands, stands, True)


def test_a_job_that_is_interrupted_before_its_loop_leaves_no_agent(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*of: object, **more: object) -> None:
        raise KeyboardInterrupt

    ready = prepare(store)
    ready.backend.start_agents(ready.plan)
    assert left_of(ready.plan)
    monkeypatch.setattr(type(ready.backend), "boot", interrupt)
    with pytest.raises(KeyboardInterrupt):
        launching.coordinate(ready, store.create(ready.plan), None)  # type: ignore[arg-type]  # nothing is said
    assert not left_of(ready.plan)


def test_a_job_that_we_failed_to_run_is_not_lost(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepare(store)
    folder = store.create(ready.plan)
    monkeypatch.setattr(type(ready.backend), "connect", lambda *of: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        launching.coordinate(ready, folder, None)  # type: ignore[arg-type]  # it does not come to that
    state = folder.state()
    assert state["state"] == "failed"
    assert [task["state"] for task in state["tasks"]] == ["pending"]
    outcome = json.loads((folder.path / "outcome.json").read_text())
    assert (outcome["exit_code"], outcome["reason"]) == (8, "internal")
    assert "ZeroDivisionError" in outcome["message"]


class Interrupted:
    """A terminal: a signal comes as it says something. Told to leave out what waits, it ends the coordinator."""

    draws = False

    def __init__(self, theirs: socket.socket) -> None:
        self.theirs = theirs
        self.sent = b""

    def start(self) -> None:
        self.theirs.recv(65536)  # what was sent before
        self.theirs.sendall(session.encode({"type": "said", "text": "hello", "level": "info"}))

    def say(self, text: str, level: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def leave_out(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.sent = self.theirs.recv(65536, socket.MSG_DONTWAIT)
        self.theirs.close()


def test_the_coordinator_is_told_of_a_signal_before_the_terminal(store: JobStore) -> None:
    ours, theirs = socket.socketpair()
    terminal = Interrupted(theirs)
    job = SimpleNamespace(request=SimpleNamespace(detach=True, limits=Limits()), is_hosted=False)
    with ControlConnection(ours) as connection, pytest.raises(CoordinatorError):
        launching._follow(connection, job, make(store), terminal, pid=0, verbosity=0)  # type: ignore[arg-type]
    assert b"TERM" in terminal.sent


def test_a_user_who_leaves_or_stops_an_attached_job_does_so_before_the_terminal_is_told() -> None:
    told: list[str] = []
    connection = SimpleNamespace(end=lambda: told.append("end"), send=lambda kind, **members: told.append(kind))
    console = SimpleNamespace(leave_out=lambda: told.append("leave out"))
    attached = _Attached(connection, SimpleNamespace(folder=None), console, None)  # type: ignore[arg-type]
    attached._stop()
    attached._leave(0)
    assert told == ["stop", "leave out", "end", "leave out"]
