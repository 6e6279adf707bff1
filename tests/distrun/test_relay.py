"""The `ssh` program that reaches the host of a coordinator, and the files that come by it; `ssh` is a script here."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fakecoordinator import Coordinator
from sample_plan import sample_plan

from distrun import cli, client, remote_jobs
from distrun.backends.ssh import Ssh
from distrun.client import CoordinatorLost
from distrun.hosts import HostSpec
from distrun_runtime.contract import facts, session
from distrun_runtime.contract.plan import Host
from distrun_runtime.coordinator.failures import Outcome
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.jobstore import JobStore

DROPS = "kex_exchange_identification: Connection closed by remote host\r\nConnection closed by 10.0.0.1 port 22\r"
OTHERS = "Permission denied (publickey).\r"
RUNS = 'shift $(($# - 1)); exec sh -c "$1"\n'
LIMIT_S = 20.0
Stand = Callable[..., str]


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    """Makes an ssh that fails so often with some words, then runs the command here; returns a login by it."""

    def make(times: int, words: str = DROPS) -> str:
        calls = tmp_path / "calls"
        fails = f"echo {shlex.quote(words)} >&2; exit 255"
        path = tmp_path / "ssh"
        path.write_text(f"#!/bin/sh\necho >>{calls}\n[ $(wc -l <{calls}) -gt {times} ] || {{ {fails}; }}\n{RUNS}")
        path.chmod(0o755)
        return f"{path} d1"

    return make


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_jobs, "RETRY_S", 0.2)
    monkeypatch.setattr(remote_jobs, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(remote_jobs, "LONGEST_PAUSE_S", 0.05)


def calls(tmp_path: Path) -> int:
    return (tmp_path / "calls").read_text().count("\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobFolder:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return JobStore().create(sample_plan())


def place(folder: JobFolder, login: str, path: str = "", theirs: str = "") -> None:
    """Have the job's coordinator be on d1."""
    told = {"pid": 7, "start": "proc:1", "boot": "b", "path": path, "folder": theirs}
    folder.place_elsewhere(told, "d1", login)


def answers(path: Path, job: str) -> socket.socket:
    """Greet one client at a socket, as a coordinator does."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    listener.settimeout(LIMIT_S)

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(session.encode({"type": "hello", "version": [1, 0], "job": job, "pid": 7, "host": "d1"}))
            while connection.recv(65536):
                pass

    threading.Thread(target=serve, daemon=True).start()
    return listener


def test_pauses_grow_and_are_bounded_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_jobs, "RETRY_S", 30.0)
    monkeypatch.setattr(remote_jobs, "FIRST_PAUSE_S", 0.25)
    monkeypatch.setattr(remote_jobs, "LONGEST_PAUSE_S", 4.0)
    found = list(remote_jobs.pauses())
    assert sum(found) == pytest.approx(30.0)
    assert found[0] <= 0.25
    assert max(found) <= 4.0
    assert len(found) < 25


@pytest.mark.parametrize(
    ("code", "said", "is_dropped"),
    [
        (255, DROPS, True),
        (255, "Exceeded MaxStartups\r\n" + DROPS, True),
        (
            255,
            "kex_exchange_identification: read: Connection reset by peer\r\nConnection reset by 10.0.0.1 port 22",
            True,
        ),
        (255, OTHERS, False),
        (255, "ssh: connect to host d1 port 22: Connection refused", False),
        (255, "", False),
        (1, DROPS, False),  # what a command there wrote
        (None, DROPS, False),
    ],
)
def test_a_dropped_connection_is_known_by_code_and_words(code: int | None, said: str, is_dropped: bool) -> None:
    assert remote_jobs.is_dropped(code, said) is is_dropped


def test_a_client_whose_connection_the_host_drops_tries_again_and_says_nothing_of_it(
    folder: JobFolder, stand: Stand, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.s"
    place(folder, stand(2), str(path))
    with answers(path, folder.id), client.connect(folder) as connection:
        assert connection.hello["host"] == "d1"
    assert calls(tmp_path) == 3
    assert capfd.readouterr().err == ""


def test_a_host_that_goes_on_dropping_connections_is_given_up_with_what_was_tried(
    folder: JobFolder, stand: Stand, tmp_path: Path
) -> None:
    place(folder, stand(1000), str(tmp_path / "job.s"))
    with pytest.raises(
        CoordinatorLost, match=r"on d1, whose sshd dropped all \d+ connections that were tried within"
    ) as caught:
        client.connect(folder)
    assert "MaxStartups" in caught.value.hint
    assert "dropped all %d connections" % calls(tmp_path) in str(caught.value)


def test_another_failure_of_ssh_is_not_tried_again_and_shown(
    folder: JobFolder, stand: Stand, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place(folder, stand(1000, OTHERS), str(tmp_path / "job.s"))
    with pytest.raises(CoordinatorLost, match="cannot be reached by ssh"):
        client.connect(folder)
    assert calls(tmp_path) == 1
    assert OTHERS in capfd.readouterr().err


def theirs(tmp_path: Path, folder: JobFolder) -> str:
    """Make the folder that the job has on its coordinator's host."""
    made = tmp_path / "theirs"
    made.mkdir()
    (made / "state.json").write_bytes((folder.path / "state.json").read_bytes())
    return str(made)


def test_a_state_is_fetched_also_from_a_host_that_drops_connections(
    folder: JobFolder, stand: Stand, tmp_path: Path
) -> None:
    there = theirs(tmp_path, folder)
    (folder.path / "state.json").write_text("older")
    place(folder, stand(2), theirs=there)
    assert remote_jobs.refreshed(folder) == ""
    assert (folder.path / "state.json").read_bytes() == Path(there, "state.json").read_bytes()
    assert calls(tmp_path) == 3


def test_a_fetched_state_that_cannot_be_written_here_is_no_failure_of_ssh(
    folder: JobFolder, stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(folder, stand(0), theirs=theirs(tmp_path, folder))

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


def test_a_host_without_the_jobs_folder_cannot_be_asked(folder: JobFolder, stand: Stand, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    place(folder, stand(0), theirs=str(tmp_path / "empty"))
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
    stand: Stand,
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
    place(folder, stand(0), str(tmp_path / "c.s"), theirs(tmp_path, folder))
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
    folder: JobFolder, stand: Stand, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ANSWER_S", 2.0)
    said = session.encode({"type": "said", "level": "warning", "text": "the job's logs cannot be read: no"})
    coordinator = Coordinator(tmp_path / "c.s", folder.id, lambda kind: [said] if kind == "subscribe" else [])
    place(folder, stand(0), str(tmp_path / "c.s"), theirs(tmp_path, folder))
    assert cli.run(["logs", folder.id, "worker-0"]) == facts.EXIT_HOST_LOST
    coordinator.close()
    shown = capfd.readouterr()
    assert "warning: the job's logs cannot be read: no\n" in shown.err
    assert "(pid 7 on d1) does not answer within 2 s" in shown.err
    assert shown.out == ""


def test_logs_of_a_job_on_hosts_wait_for_a_coordinator_that_answers_while_it_searches(
    folder: JobFolder, stand: Stand, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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
    place(folder, stand(0), str(tmp_path / "c.s"), theirs(tmp_path, folder))
    assert cli.run(["logs", folder.id, "worker-0"]) == 0
    coordinator.close()
    assert capfd.readouterr().out.endswith("abc\n")


def test_logs_of_a_job_on_hosts_whose_coordinator_cannot_be_asked_say_so(
    folder: JobFolder, stand: Stand, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place(folder, stand(0), str(tmp_path / "none.s"), theirs(tmp_path, folder))
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
    place(folder, "ssh d1", theirs=str(there))
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
    place(folder, "ssh d1", theirs=str(there) + "-gone")
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
            plan = sample_plan(job=f"calm-otter-{number}")._replace(backend="ssh", hosts=(Host("d1", reach=reach),))
            folders.append(JobStore().create(plan))
            there = over_there(folders[-1], tmp_path)
            place(folders[-1], "ssh d1", theirs=str(there))
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
    place(folder, "ssh d1", theirs=str(there))
    assert cli.run(["gc", folder.id]) == 1
    assert f"its folder on d1 stays: {there} is no folder of job {folder.id}; fix: " in capfd.readouterr().err
    assert (there / "logs").exists()


def test_the_last_words_of_a_coordinator_arrive_although_more_is_sent_to_it(tmp_path: Path) -> None:
    last = b"x" * 1_000_000
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "c.s"))
        listener.listen()
        argv = [sys.executable, "-I", "-c", remote_jobs.RELAY, str(tmp_path / "c.s")]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as relay:
            assert relay.stdin is not None
            assert relay.stdout is not None
            connection, _ = listener.accept()
            sending = threading.Thread(target=connection.sendall, args=(last,))
            sending.start()
            first = relay.stdout.read(500_000)
            connection.shutdown(socket.SHUT_RD)
            relay.stdin.write(b"too late")
            relay.stdin.flush()
            time.sleep(0.3)  # a relay that would end ends now
            rest = relay.stdout.read(500_000)
            sending.join()
            connection.close()
            assert first + rest == last
