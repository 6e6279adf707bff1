"""How jobs stand: coordinators are sockets of this test, and `ssh` is a script that runs its command here."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakecoordinator import METRICS, Coordinator
from fakessh import LOGIN, RUNS, FakeSsh
from sample_plan import sample_plan
from scripted_agent import ScriptedAgent
from slowness import scaled

from distrun import cli, jobs, remote_jobs
from distrun.errors import UsageError
from distrun.ssh import connector
from distrun_runtime.contract import session
from distrun_runtime.contract.plan import Host
from distrun_runtime.coordinator.channel import StreamChannel
from distrun_runtime.coordinator.failures import Outcome, TaskResult
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.jobstore import JobStore
from distrun_runtime.coordinator.logs import Spool

LIMIT_S = 20.0


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobStore:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return JobStore()


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Callable[..., Coordinator]]:
    made: list[Coordinator] = []

    def make(name: str, job: str, **more: Any) -> Coordinator:
        made.append(Coordinator(tmp_path / name, job, **more))
        return made[-1]

    yield make
    for each in made:
        each.close()


def new(store: JobStore, job: str, state: str = "running") -> JobFolder:
    folder = store.create(sample_plan(job=job, name=job))
    folder.write_state(state, [TaskResult("worker-0", "worker", 0, "d1", "running", 7, started=1e9)])
    return folder


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSsh:
    monkeypatch.setattr(connector, "PAUSE_S", 0.02)
    return FakeSsh(tmp_path, monkeypatch)


def place(folder: JobFolder, login: str, path: Path, theirs: Path, state: str = "running", age_s: float = 0.0) -> None:
    """Have the job's coordinator be on d1, which has the job's real folder at `theirs`."""
    theirs.mkdir()
    value = json.loads((folder.path / "state.json").read_text())
    (theirs / "state.json").write_text(json.dumps({**value, "state": state}))
    when = time.time() - age_s
    os.utime(theirs / "state.json", (when, when))
    told = {"pid": 7, "start": "proc:1", "boot": "b", "path": str(path), "folder": str(theirs)}
    folder.place_elsewhere(told, "d1", login)


def states(views: list[jobs.JobView]) -> list[str]:
    return [str(view.state["state"]) for view in views]


def test_a_coordinator_here_is_asked_for_its_metrics(
    store: JobStore, tmp_path: Path, coordinator: Callable[..., Coordinator]
) -> None:
    folder = new(store, "here-1")
    folder.write_control(str(tmp_path / "c.s"))
    coordinator("c.s", "here-1")
    (view,) = jobs.look([folder], here_s=LIMIT_S)
    assert (view.metrics, view.is_here, view.problem) == (METRICS, True, "")
    assert view.progress == METRICS["progress"]


def test_coordinators_here_that_do_not_answer_cost_one_limit_of_time_and_their_metrics_only(
    store: JobStore, tmp_path: Path, coordinator: Callable[..., Coordinator]
) -> None:
    folders = [new(store, f"silent-{number}") for number in range(3)]
    for folder in folders:
        folder.write_control(str(tmp_path / f"{folder.id}.s"))
        coordinator(f"{folder.id}.s", folder.id, is_silent=True)
    other = new(store, "gone-1")
    other.write_control(str(tmp_path / "nobody.s"))
    began = time.monotonic()
    views = jobs.look([*folders, other], here_s=0.2)
    assert time.monotonic() - began < scaled(5)
    assert states(views) == ["running"] * 4
    assert [view.metrics for view in views] == [None] * 4


def test_metrics_of_another_job_that_has_the_socket_now_are_not_taken(
    store: JobStore, tmp_path: Path, coordinator: Callable[..., Coordinator]
) -> None:
    folder = new(store, "mine-1")
    folder.write_control(str(tmp_path / "c.s"))
    coordinator("c.s", "theirs-1")
    (view,) = jobs.look([folder], here_s=LIMIT_S)
    assert view.metrics is None


def test_all_jobs_of_a_host_are_asked_by_one_connection_that_may_not_ask_the_user(
    store: JobStore, tmp_path: Path, ssh: FakeSsh, coordinator: Callable[..., Coordinator]
) -> None:
    login = ssh.does()
    folders = [new(store, f"there-{number}", "starting") for number in range(2)]
    for folder in folders:
        place(folder, login, tmp_path / f"{folder.id}.s", tmp_path / f"theirs-{folder.id}")
        coordinator(f"{folder.id}.s", folder.id)
    views = jobs.look(folders, there_s=LIMIT_S)
    assert states(views) == ["running", "running"]
    assert [view.metrics for view in views] == [METRICS, METRICS]
    assert [view.host for view in views] == ["d1", "d1"]
    (call,) = ssh.calls
    assert "BatchMode=yes" in call


def test_a_job_that_has_ended_there_is_shown_as_it_ended_and_its_logs_are_still_to_be_fetched(
    store: JobStore, tmp_path: Path, ssh: FakeSsh
) -> None:
    folder = new(store, "over-1")
    place(folder, ssh.does(), tmp_path / "nobody.s", tmp_path / "theirs", state="succeeded")
    (view,) = jobs.look([folder], there_s=LIMIT_S)
    assert states([view]) == ["succeeded"]
    assert not folder.is_finished


def test_a_host_that_does_not_answer_in_time_leaves_its_jobs_unknown_with_when_they_were_seen(
    store: JobStore, tmp_path: Path, ssh: FakeSsh
) -> None:
    folder = new(store, "dead-1")
    place(folder, ssh.does("exec sleep 60\n"), tmp_path / "nobody.s", tmp_path / "theirs")
    when = time.time() - 180
    os.utime(folder.path / "state.json", (when, when))
    here = new(store, "here-1")
    began = time.monotonic()
    views = jobs.look([folder, here], there_s=0.3)
    assert time.monotonic() - began < scaled(10)
    assert states(views) == ["unknown", "running"]
    assert views[0].seen_s == pytest.approx(180, abs=30)
    assert views[0].problem == "d1 cannot be asked: no answer within 0.3 s"


def test_what_ssh_says_is_the_reason_and_the_fix_is_to_try_it(store: JobStore, tmp_path: Path, ssh: FakeSsh) -> None:
    folder = new(store, "denied-1")
    login = ssh.does("echo 'Permission denied (publickey).' >&2; exit 255\n")
    place(folder, login, tmp_path / "nobody.s", tmp_path / "theirs")
    (view,) = jobs.look([folder], there_s=LIMIT_S)
    assert "d1 cannot be asked: d1 port 22 does not let user " in view.problem
    assert view.fix == f"{login} true"


def test_a_host_that_drops_a_connection_is_asked_again(store: JobStore, tmp_path: Path, ssh: FakeSsh) -> None:
    folder = new(store, "busy-1", "starting")
    place(folder, ssh.fails(2), tmp_path / "nobody.s", tmp_path / "theirs")
    (view,) = jobs.look([folder], there_s=LIMIT_S)
    assert states([view]) == ["running"]
    assert len(ssh.calls) == 3


def test_ssh_has_ended_when_nothing_more_is_wanted_of_it(
    store: JobStore, tmp_path: Path, ssh: FakeSsh, coordinator: Callable[..., Coordinator]
) -> None:
    folder = new(store, "there-1")
    place(folder, ssh.does('echo $$ >"$CALLS.pid"; ' + RUNS), tmp_path / "c.s", tmp_path / "theirs")
    coordinator("c.s", folder.id)
    assert jobs.look([folder], there_s=LIMIT_S)[0].metrics == METRICS
    with pytest.raises(ProcessLookupError):
        os.killpg(int((tmp_path / "calls.pid").read_text()), 0)


@pytest.mark.parametrize(
    "said", ["nonsense\\n", '{"job": "x", "name": "state.json", "size": 1, "age_s": 0}\\n?', "x" * 5000]
)
def test_a_host_that_sends_nonsense_has_not_answered(said: str, store: JobStore, tmp_path: Path, ssh: FakeSsh) -> None:
    folder = new(store, "odd-1")
    place(folder, ssh.does(f"printf {shlex.quote(said)}\n"), tmp_path / "nobody.s", tmp_path / "theirs")
    (view,) = jobs.look([folder], there_s=LIMIT_S)
    assert states([view]) == ["unknown"]
    assert "cannot be asked" in view.problem


class Answering:
    """A backend whose only agent sends pieces, each when the one before is taken, and then ends the answer.

    `is_endless`: it sends the last one again and again.
    """

    asker = None

    def __init__(self, *pieces: dict[str, Any], is_endless: bool = False) -> None:
        def script(agent: ScriptedAgent) -> None:
            agent.say("hello", version=session.VERSION, host="d1", time=time.time(), agent={"pid": 1}, guard={"pid": 2})
            number = agent.wait("ask").header["id"]
            for each in itertools.chain(pieces, itertools.repeat(pieces[-1]) if is_endless else ()):
                agent.say("piece", b"x", id=number, **each)
                agent.wait("stream")
            agent.say("answer", id=number)
            agent.until_end(answer=True)

        self._script = script

    def connect(self, hosts: Sequence[Host]) -> tuple[StreamChannel, ...]:
        return (ScriptedAgent(self._script).channel,)

    def release(self, channels: Sequence[StreamChannel], limit_s: float) -> None: ...


OURS = {"job": "odd-1", "name": "state.json", "left": 5}


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        (Answering({**OURS, "job": "x", "left": 0}), "it sent a file of a job that it was not asked for: 'x'"),
        (Answering({**OURS, "name": "../../evil", "left": 0}), "it has no state of this job"),
        (Answering(OURS, {**OURS, "job": "x"}), "state.json did not come whole: "),
        (Answering({**OURS, "left": 1 << 40}), "it sent a file that is too large: 'state.json'"),
        (Answering(OURS, is_endless=True), "state.json did not come whole: it took too long"),
    ],
    ids=["another job", "a path that leaves the folder", "a part of another job", "too large", "no end"],
)
def test_pieces_that_no_agent_sends_are_no_answer_and_leave_no_file(
    backend: Answering, why: str, store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new(store, "odd-1")
    place(folder, "ssh d1", tmp_path / "nobody.s", tmp_path / "theirs")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(remote_jobs, "_reached", lambda *args: (backend, Host("d1")))
    monkeypatch.setattr(jobs, "END_S", 60.0)  # a busy machine is late to say what is wrong
    (view,) = jobs.look([folder], there_s=2.0)
    assert states([view]) == ["unknown"]
    assert f"d1 cannot be asked: {why}" in view.problem
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_file_that_is_none_of_a_job_is_not_fetched(
    store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new(store, "odd-1")
    place(folder, "ssh d1", tmp_path / "nobody.s", tmp_path / "theirs")
    backend = Answering({**OURS, "name": "logs/../../evil", "left": 0})
    monkeypatch.setattr(remote_jobs, "_reached", lambda *args: (backend, Host("d1")))
    assert "it sent a file that no job has: 'logs/../../evil'" in remote_jobs.refreshed(folder)
    assert not list(tmp_path.rglob("*evil*"))


def test_a_host_that_lacks_the_jobs_folder_is_not_told_as_late(
    store: JobStore, tmp_path: Path, ssh: FakeSsh, coordinator: Callable[..., Coordinator]
) -> None:
    folder = new(store, "bare-1")
    place(folder, ssh.does(), tmp_path / "c.s", tmp_path / "theirs")
    (tmp_path / "theirs" / "state.json").unlink()
    coordinator("c.s", folder.id)
    (view,) = jobs.look([folder], there_s=LIMIT_S)
    assert view.problem == "d1 cannot be asked: it has no state of this job"


def test_a_host_of_a_backend_that_is_not_installed_here_is_asked_by_ssh(
    store: JobStore, tmp_path: Path, ssh: FakeSsh
) -> None:
    plan = sample_plan(job="tsp-1")._replace(backend="tsp", hosts=(Host("d1", login=LOGIN),))
    folder = store.create(plan)
    place(folder, ssh.does(), tmp_path / "nobody.s", tmp_path / "theirs")
    (view,) = jobs.look([folder], there_s=LIMIT_S)
    assert (states([view]), view.problem) == (["running"], "")


def test_jobs_that_go_on_come_first_and_of_the_others_the_newest(store: JobStore) -> None:
    running = new(store, "running-1")
    over = []
    for number in range(3):
        over.append(new(store, f"over-{number}"))
        over[-1].finish(Outcome(0, "succeeded", "all well"))
    assert [each.id for each in jobs.listed(store.list(), 2)] == [running.id, "over-2", "over-1"]
    assert len(jobs.listed(store.list(), None)) == 4


def test_the_table_shows_progress_and_when_an_unknown_job_was_seen(
    store: JobStore,
    tmp_path: Path,
    ssh: FakeSsh,
    coordinator: Callable[..., Coordinator],
    capfd: pytest.CaptureFixture[str],
) -> None:
    dead, here = new(store, "dead-1"), new(store, "here-1")
    place(dead, ssh.does("exit 255\n"), tmp_path / "nobody.s", tmp_path / "theirs")
    when = time.time() - 180
    os.utime(dead.path / "state.json", (when, when))
    here.write_control(str(tmp_path / "c.s"))
    coordinator("c.s", "here-1")
    assert cli.run(["status"]) == 0
    shown = capfd.readouterr()
    rows = {line.split()[0]: " ".join(line.split()) for line in shown.out.splitlines()}
    assert rows["JOB"].startswith("JOB STATE PROGRESS")
    assert "running 24 %, ETA 0:12:00 here-1 1 (1 stalled)" in rows["here-1"]
    assert "unknown, seen 3 min ago" in rows["dead-1"]
    assert shown.err.count("d1 cannot be asked: d1 port 22: the ssh program ended without a message") == 1


def test_the_log_of_a_task_is_followed_to_its_end_where_the_coordinator_and_the_logs_are_on_a_host(
    store: JobStore,
    tmp_path: Path,
    ssh: FakeSsh,
    coordinator: Callable[..., Coordinator],
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = new(store, "there-1")
    piece = {"type": "output", "task": "worker-0", "host": "d1", "stream": "out", "at": 0, "length": 6, "cursor": 6}
    told = [
        session.encode({**piece, "time": 1.5e9, "attempt": 0}, b"hello\n"),
        session.encode({"type": "outcome", "outcome": {}}),
    ]
    coordinator("c.s", folder.id, answers=lambda kind: told if kind == "subscribe" else [])
    place(folder, ssh.does(), tmp_path / "c.s", tmp_path / "theirs")
    for words in (["-f"], []):  # it ends before the end of what there is now
        assert cli.run(["logs", folder.id, "worker-0", *words]) == 0
        assert capfd.readouterr().out == "hello\n"
    assert cli.run(["logs", folder.id, "-f", "--json"]) == 0
    line = json.loads(capfd.readouterr().out)
    assert (line["text"], line["time"][:10]) == ("hello", "2017-07-14")


def test_following_the_log_of_a_job_whose_coordinator_dies_on_its_host_ends_with_7(
    store: JobStore, tmp_path: Path, ssh: FakeSsh, coordinator: Callable[..., Coordinator]
) -> None:
    folder = new(store, "there-1")

    def dies(kind: str) -> list[bytes]:
        if kind == "subscribe":
            raise OSError
        return []

    coordinator("c.s", folder.id, answers=dies)
    place(folder, ssh.does(), tmp_path / "c.s", tmp_path / "theirs")
    assert cli.run(["logs", folder.id, "-f"]) == 7


@pytest.mark.parametrize("words", [["logs", "worker-0", "-f"], ["attach"]])
def test_a_job_that_ends_while_a_connection_to_its_coordinator_is_made_is_no_lost_one(
    words: list[str], store: JobStore, tmp_path: Path, ssh: FakeSsh, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, theirs, ended = new(store, "there-1"), tmp_path / "theirs", tmp_path / "ended"
    (ended / "logs").mkdir(parents=True)
    outcome = folder.outcome_json(Outcome(0, "succeeded", "all workers succeeded", job=folder.id))
    (ended / "outcome.json").write_text(json.dumps(outcome))
    spool = Spool(ended / "logs")
    spool.add("worker-0", "out", 0, b"hello\n")
    spool.close()
    end = f'[ $(wc -l <"$CALLS") -ne 2 ] || cp -r {ended}/. {theirs}\n'  # the second call is for the socket
    place(folder, ssh.does(end + RUNS), tmp_path / "nobody.s", theirs)
    assert cli.run([words[0], folder.id, *words[1:]]) == 0
    shown = capfd.readouterr()
    assert shown.out == "hello\n" if words[0] == "logs" else "is over" in shown.err


def test_jobs_are_listed_found_and_read_from_any_thread(store: JobStore) -> None:
    folder = new(store, "here-1")
    (folder.path / "logs").mkdir(exist_ok=True)
    (folder.log_path("worker-0")).write_bytes(b"hello\n")
    folder.finish(Outcome(3, "task_failed", "worker-0 failed", tasks=(TaskResult("worker-0", "worker", 0, "d1"),)))
    found: list[Any] = []

    def read() -> None:
        (job,) = jobs.Jobs(store).list()
        assert job.id == jobs.Jobs(store).get("here").id
        found.append((job.state, job.wait(), [task["name"] for task in job.tasks]))
        found.append([piece.data for piece in job.logs("worker", follow=True)])
        found.append([piece.data for piece in job.logs()])
        with pytest.raises(UsageError, match="no task 'worker-7' in this job; there is: worker-0"):
            next(job.logs("worker-7"))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(scaled(LIMIT_S))
    assert found == [("failed", 3, ["worker-0"]), [b"hello\n"], [b"hello\n"]]
