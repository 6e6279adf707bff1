"""Jobs whose coordinator is on another host: by agents that run here, or by an `ssh` that is a script of the test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from distrun_cli import wait_until
from fakecoordinator import Coordinator
from fakessh import LOGIN, RUNS, FakeSsh
from sample_plan import sample_plan
from slowness import scaled

from distrun import cli, client, jobs, killing, remote_jobs
from distrun.backends.ssh import Ssh
from distrun.client import CoordinatorLost
from distrun.dashboard.source import FrameSource
from distrun.hosts import HostSpec
from distrun.jobs import Job
from distrun.ssh import connector
from distrun_runtime.agent import query
from distrun_runtime.contract import facts, session
from distrun_runtime.contract.plan import Host
from distrun_runtime.coordinator.failures import Outcome
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.jobstore import JobStore

OTHERS = "Permission denied (publickey).\r"
LIMIT_S = 20.0
HERE = "run-on d1"
"""The login of a host whose agent runs here, without ssh."""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSsh:
    monkeypatch.setattr(connector, "PAUSE_S", 0.02)
    return FakeSsh(tmp_path, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobFolder:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return JobStore().create(sample_plan()._replace(hosts=(Host("d1", login=HERE),)))


def place(folder: JobFolder, login: str, path: str = "", theirs: str = "") -> None:
    """Have the job's coordinator be on d1."""
    told = {"pid": 7, "start": "proc:1", "boot": "b", "path": path, "folder": theirs}
    folder.place_elsewhere(told, "d1", login)


def answers(path: Path, job: str) -> socket.socket:
    """Greet one client at a socket, as a coordinator does, until it says `bye`."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    listener.settimeout(scaled(LIMIT_S))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(session.encode({"type": "hello", "version": [1, 0], "job": job, "pid": 7, "host": "d1"}))
            while connection.recv(65536) not in (b"", b"bye"):
                pass

    threading.Thread(target=serve, daemon=True).start()
    return listener


def test_a_client_whose_connection_the_host_drops_tries_again_and_says_nothing_of_it(
    folder: JobFolder, ssh: FakeSsh, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "RETRIES", 0)  # more often than a launch would
    path = tmp_path / "job.s"
    place(folder, ssh.fails(2), str(path))
    with answers(path, folder.id), client.connect(folder) as connection:
        assert connection.hello["host"] == "d1"
    assert len(ssh.calls) == 3
    assert capfd.readouterr().err == ""


def test_a_host_that_goes_on_dropping_connections_is_given_up_in_time_with_what_may_help(
    folder: JobFolder, ssh: FakeSsh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_jobs, "ANSWER_S", 4.0)
    place(folder, ssh.fails(1000), str(tmp_path / "job.s"))
    with pytest.raises(CoordinatorLost, match=r"on d1, which cannot be asked: .* closed the connection") as caught:
        client.connect(folder)
    assert "MaxStartups" in caught.value.hint


def test_another_failure_of_ssh_is_not_tried_again_and_told(folder: JobFolder, ssh: FakeSsh, tmp_path: Path) -> None:
    place(folder, ssh.fails(1000, OTHERS), str(tmp_path / "job.s"))
    with pytest.raises(CoordinatorLost, match=r"cannot be asked: .* does not let user .* in"):
        client.connect(folder)
    assert len(ssh.calls) == 1


def test_a_stream_that_ends_is_told_from_one_that_breaks(folder: JobFolder, ssh: FakeSsh, tmp_path: Path) -> None:
    login = ssh.does('echo $$ >"$CALLS.pid"; ' + RUNS)
    for path, is_ended in ((tmp_path / "1.s", True), (tmp_path / "2.s", False)):
        place(folder, login, str(path))
        stream = remote_jobs.RemoteSocket(folder, folder.control() or {}, may_ask=False)
        with contextlib.closing(stream), answers(path, folder.id):
            stream.settimeout(scaled(LIMIT_S))
            stream.sendall(b"hello")
            assert b"d1" in stream.recv(65536)
            if is_ended:
                stream.sendall(b"bye")
            else:
                os.killpg(int((tmp_path / "calls.pid").read_text()), signal.SIGKILL)
            assert stream.recv(65536) == b""
            assert (stream.problem is None) is is_ended


@pytest.fixture
def cut(folder: JobFolder, ssh: FakeSsh, tmp_path: Path) -> Callable[..., bool]:
    """Have the job's coordinator be reached by an ssh; return what kills that."""
    place(folder, ssh.does('echo $$ >"$CALLS.pid"; ' + RUNS), str(tmp_path / "c.s"), theirs(tmp_path, folder))

    def kill() -> bool:
        os.killpg(int((tmp_path / "calls.pid").read_text()), signal.SIGKILL)
        return True

    return kill


BROKE = "the connection to its coordinator on d1 broke: "


def test_a_connection_that_breaks_is_not_the_coordinators_end_and_one_that_we_end_is_none(
    folder: JobFolder, cut: Callable[[], bool], tmp_path: Path
) -> None:
    coordinator = Coordinator(tmp_path / "c.s", folder.id)
    with client.connect(folder) as connection:
        connection.end()
        assert connection.receive(LIMIT_S) is None
    with client.connect(folder) as connection:
        cut()
        with pytest.raises(client.CoordinatorUnreachable, match=BROKE) as caught:
            connection.ends(LIMIT_S)
    assert caught.value.hint.endswith(f"distrun attach {folder.id}")
    coordinator.close()


def test_attach_says_that_its_connection_broke_and_not_that_the_coordinator_is_gone(
    folder: JobFolder, cut: Callable[[], bool], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder.write_state("running", [])
    coordinator = Coordinator(tmp_path / "c.s", folder.id, lambda kind: [b""] if kind == "subscribe" and cut() else [])
    assert cli.run(["attach", folder.id]) == facts.EXIT_HOST_LOST
    told = capfd.readouterr().err
    assert BROKE in told
    assert "is gone" not in told
    coordinator.close()


def test_kill_does_not_say_that_a_coordinator_has_ended_whose_connection_broke(
    folder: JobFolder,
    cut: Callable[[], bool],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder.write_state("running", [])
    stopped = session.encode({"type": "stop"})
    coordinator = Coordinator(tmp_path / "c.s", folder.id, lambda kind: [stopped] if kind == "stop" else [])
    is_heard = killing._is_heard
    monkeypatch.setattr(killing, "_is_heard", lambda *args: is_heard(*args) and cut())
    assert cli.run(["kill", folder.id]) == facts.EXIT_HOST_LOST
    shown = capfd.readouterr()
    assert BROKE in shown.err
    assert "has ended" not in shown.out + shown.err
    coordinator.close()


def test_the_dashboard_connects_again_when_its_connection_breaks(
    folder: JobFolder, cut: Callable[[], bool], tmp_path: Path
) -> None:
    folder.write_state("running", [])
    coordinator = Coordinator(tmp_path / "c.s", folder.id)
    source = FrameSource(folder)
    source.start(client.connect(folder))

    def subscribed() -> int:
        return [each["type"] for each in coordinator.asked].count("subscribe")

    wait_until(lambda: subscribed() == 1, LIMIT_S, "the first subscription has come")  # else the cut takes it along
    cut()
    wait_until(lambda: subscribed() == 2, LIMIT_S, "a second one")
    assert "failed_here" not in [frame.type for frame in source.take()]
    source.close()
    coordinator.close()


def test_watching_a_job_connects_again_when_its_connection_breaks(
    folder: JobFolder, cut: Callable[[], bool], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder.write_state("running", [])
    outcome = session.encode({"type": "outcome", "outcome": folder.outcome_json(Outcome(0, "succeeded", "all well"))})
    subscribed: list[str] = []

    def answer(kind: str) -> list[bytes]:
        if kind != "subscribe":
            return []
        subscribed.append(kind)
        if len(subscribed) == 2:  # the first one asks for the snapshot
            cut()
        return [outcome] if len(subscribed) > 2 else []

    coordinator = Coordinator(tmp_path / "c.s", folder.id, answer)
    assert cli.run(["status", "--watch", "--json", folder.id]) == 0
    assert '"gap"' in capfd.readouterr().out
    coordinator.close()


def test_a_host_that_says_nothing_cannot_be_asked_and_is_not_asked_again(
    folder: JobFolder, ssh: FakeSsh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_jobs, "ANSWER_S", 0.5)
    place(folder, ssh.does("exec sleep 60\n"), str(tmp_path / "c.s"), theirs(tmp_path, folder))
    with pytest.raises(
        client.CoordinatorUnreachable, match=r"is on d1, which cannot be asked: no answer within 0\.5 s"
    ):
        Job(folder).attach()
    assert len(ssh.calls) == 1


def test_a_login_that_works_is_tried_where_a_host_cannot_be_asked(
    folder: JobFolder, ssh: FakeSsh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_jobs, "ANSWER_S", 0.5)
    ssh.does("exec sleep 60\n")
    place(folder, "ssh -p 2222 ann@d1", str(tmp_path / "c.s"))
    with pytest.raises(client.CoordinatorUnreachable) as caught:
        client.connect(folder)
    assert caught.value.hint == "try: ssh -p 2222 ann@d1 true; or type this command on d1"


def test_a_coordinator_is_not_read_faster_than_its_client_reads_and_nothing_is_lost(
    folder: JobFolder, tmp_path: Path
) -> None:
    place(folder, HERE, str(tmp_path / "c.s"))
    piece, sent = bytes(range(256)) * 4096, []

    def talk() -> Iterator[bytes]:
        for _ in range(24):
            yield piece
            sent.append(piece)

    coordinator = Coordinator(tmp_path / "c.s", folder.id, lambda kind: talk() if kind == "subscribe" else [])
    stream = remote_jobs.RemoteSocket(folder, folder.control() or {}, may_ask=False)
    with contextlib.closing(stream):
        stream.settimeout(scaled(LIMIT_S))
        stream.sendall(jobs.asked())
        received = bytearray(stream.recv(65536))
        before = -1
        while before != len(sent):
            before = len(sent)
            time.sleep(0.3)
        assert before <= 2 + query.WINDOW // len(piece)
        while len(received) < 24 * len(piece):
            received += stream.recv(65536)
        assert received.endswith(24 * piece)
    coordinator.close()


def test_everything_of_a_job_that_is_over_is_fetched_whatever_its_size(folder: JobFolder, tmp_path: Path) -> None:
    there = Path(theirs(tmp_path, folder))
    (there / "logs").mkdir()
    whole = {
        "logs/worker-0.out.log": os.urandom(query.WINDOW + 70_001),
        "logs/worker-1.err.log": b"",
        "events.jsonl": b"{}",
    }
    for name, data in whole.items():
        (there / name).write_bytes(data)
    (there / "outcome.json").write_text(json.dumps(folder.outcome_json(Outcome(0, "succeeded", "all well"))))
    os.utime(there / "events.jsonl", (1e9, 1e9))
    place(folder, HERE, theirs=str(there))
    assert remote_jobs.refreshed(folder) == ""
    assert {name: (folder.path / name).read_bytes() for name in whole} == whole
    assert (folder.path / "events.jsonl").stat().st_mtime == pytest.approx(1e9, abs=60)
    assert not remote_jobs.is_elsewhere(folder)


def theirs(tmp_path: Path, folder: JobFolder) -> str:
    """Make the folder that the job has on its coordinator's host."""
    made = tmp_path / "theirs"
    made.mkdir()
    (made / "state.json").write_bytes((folder.path / "state.json").read_bytes())
    return str(made)


def test_a_fetched_state_that_cannot_be_written_here_is_no_failure_of_ssh(
    folder: JobFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(folder, HERE, theirs=theirs(tmp_path, folder))

    def full(*names: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    warning = remote_jobs.refreshed(folder)
    assert f"cannot be written to {folder.path}: No space left on device" in warning
    assert "ssh" not in warning
    assert not list(folder.path.glob("*.tmp"))


def test_hosts_that_share_the_folder_fetch_into_files_of_different_names(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = set()
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda fresh, path: (used.add(str(fresh)), real(fresh, path)))
    for host in ("h1", "h2"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        remote_jobs.save(folder, "state.json", 0.0, [b"{}"])
    assert len(used) == 2


def test_a_host_without_the_jobs_folder_cannot_be_asked(folder: JobFolder, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    place(folder, HERE, theirs=str(tmp_path / "empty"))
    assert "host d1 cannot be asked: it has no state of this job" in remote_jobs.refreshed(folder)


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize(
    ("words", "since_ago_s", "tail"),
    [((), None, None), (("--since", "1m"), 60.0, None), (("--merge", "-n", "7"), None, 7)],
)
def test_logs_of_a_job_that_runs_on_hosts_show_what_is_there_and_end(
    words: tuple[str, ...],
    since_ago_s: float | None,
    tail: int | None,
    count: int,
    folder: JobFolder,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    about = {"task": "worker-0", "host": "d1", "stream": "out", "time": time.time(), "attempt": 0}
    told = [
        session.encode({"type": "output", **about, "at": at, "length": 4, "cursor": at + 4}, b"ab%d\n" % at)
        for at in range(0, 4 * count, 4)
    ]
    told.append(session.encode({"type": "output_end", "cursor": 4 * count}))
    coordinator = Coordinator(tmp_path / "c.s", folder.id, lambda kind: told if kind == "subscribe" else [])
    place(folder, HERE, str(tmp_path / "c.s"), theirs(tmp_path, folder))
    before = time.time()
    assert cli.run(["logs", *words, folder.id, "worker-0"]) == 0
    after = time.time()
    coordinator.close()
    lines = [line.rpartition("| ")[2] for line in capfd.readouterr().out.splitlines()]
    assert lines == ["ab0", "ab4"][:count]
    (asked,) = (header for header in coordinator.asked if header["type"] == "subscribe")
    wanted = asked["output"]
    assert wanted["until"] == "now"
    assert wanted.get("cursor") == (None if words else 0)
    assert wanted.get("tail") == tail
    if since_ago_s is None:
        assert wanted.get("since") is None
    else:
        assert before - since_ago_s <= wanted["since"] <= after - since_ago_s


def test_logs_of_a_job_on_hosts_whose_coordinator_falls_silent_end_with_an_error_and_what_it_said(
    folder: JobFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ANSWER_S", 2.0)
    said = session.encode({"type": "said", "level": "warning", "text": "the job's logs cannot be read: no"})
    coordinator = Coordinator(tmp_path / "c.s", folder.id, lambda kind: [said] if kind == "subscribe" else [])
    place(folder, HERE, str(tmp_path / "c.s"), theirs(tmp_path, folder))
    assert cli.run(["logs", folder.id, "worker-0"]) == facts.EXIT_HOST_LOST
    coordinator.close()
    shown = capfd.readouterr()
    assert "warning: the job's logs cannot be read: no\n" in shown.err
    assert "(pid 7 on d1) does not answer within 2 s" in shown.err
    assert shown.out == ""


def test_logs_of_a_job_on_hosts_wait_for_a_coordinator_that_answers_while_it_searches(
    folder: JobFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ANSWER_S", 1.0)
    about = {"task": "worker-0", "host": "d1", "stream": "out", "time": time.time(), "attempt": 0}
    found = [
        session.encode({"type": "output", **about, "at": 0, "length": 4, "cursor": 4}, b"abc\n"),
        session.encode({"type": "output_end", "cursor": 4}),
    ]
    asked: list[str] = []

    def answer(kind: str) -> list[bytes]:
        if kind != "state":
            return []
        asked.append(kind)
        state = session.encode({"type": "state", "state": {"id": folder.id}})
        return [state] if len(asked) <= client.PROBES else [state, *found]

    coordinator = Coordinator(tmp_path / "c.s", folder.id, answer)
    place(folder, HERE, str(tmp_path / "c.s"), theirs(tmp_path, folder))
    assert cli.run(["logs", folder.id, "worker-0"]) == 0
    coordinator.close()
    assert capfd.readouterr().out.endswith("abc\n")


def test_logs_of_a_job_on_hosts_whose_coordinator_cannot_be_asked_say_so(
    folder: JobFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place(folder, HERE, str(tmp_path / "none.s"), theirs(tmp_path, folder))
    assert cli.run(["logs", "--merge", folder.id]) == facts.EXIT_HOST_LOST
    assert f"job {folder.id}: its coordinator (pid 7 on d1) is gone" in capfd.readouterr().err


def over_there(folder: JobFolder, tmp_path: Path) -> Path:
    """End a job that has a folder on its coordinator's host; return that folder."""
    there = tmp_path / "store" / folder.id
    (there / "logs").mkdir(parents=True)
    (there / "plan.json").touch()
    folder.finish(Outcome(0, "succeeded", "all well"))
    return there


def test_gc_removes_the_folder_on_the_coordinators_host_too(
    folder: JobFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    there = over_there(folder, tmp_path)
    place(folder, HERE, theirs=str(there))
    assert cli.run(["gc", "--dry-run", folder.id]) == 0
    assert there.exists()
    assert cli.run(["gc", folder.id]) == 0
    assert capfd.readouterr().out.count("; also its folder on d1\n") == 2
    assert list(there.parent.iterdir()) == []
    assert not folder.path.exists()


def test_gc_is_content_if_the_folder_on_the_coordinators_host_is_gone(
    folder: JobFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    there = over_there(folder, tmp_path)
    place(folder, HERE, theirs=str(there) + "-gone")
    assert cli.run(["gc", folder.id]) == 0
    assert there.exists()


def test_gc_asks_a_host_that_cannot_be_asked_once_and_says_how_to_remove_the_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folders, connected, connect = [], [], Ssh.connect
    monkeypatch.setattr(Ssh, "connect", lambda *args, **more: (connected.append(args), connect(*args, **more))[1])
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # it does not listen: connections are refused
        for number in range(2):
            reach = Ssh().reach(HostSpec("127.0.0.1", port=silent.getsockname()[1]), {})
            plan = sample_plan(job=f"calm-otter-{number}")._replace(
                backend="ssh", hosts=(Host("d1", reach=reach, login=LOGIN),)
            )
            folders.append(JobStore().create(plan))
            there = over_there(folders[-1], tmp_path)
            place(folders[-1], LOGIN, theirs=str(there))
        assert cli.run(["gc", *(each.id for each in folders)]) == 1
    assert len(connected) == 1
    told = capfd.readouterr().err
    for each in folders:
        assert f"job {each.id}: its folder on d1 stays: " in told
        assert f"; fix: ssh d1 rm -r {tmp_path}/store/{each.id}\n" in told
        assert not each.path.exists()


def test_gc_removes_nothing_on_a_host_that_is_no_folder_of_the_job(
    folder: JobFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    there = over_there(folder, tmp_path)
    (there / "plan.json").unlink()
    place(folder, HERE, theirs=str(there))
    assert cli.run(["gc", folder.id]) == 1
    assert f"its folder on d1 stays: {there} is no folder of job {folder.id}; fix: " in capfd.readouterr().err
    assert (there / "logs").exists()
