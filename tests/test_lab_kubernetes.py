"""What brings the lab's Kubernetes up, without a cluster: the build of its programs, and a kubelet's requests."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import kubelet
import kubernetes
import pytest
from dialkit import CERTIFICATE
from distrun_cli import wait_until
from hostlab import Unavailable

GO = """#!/bin/sh
[ "$1" = version ] && echo go version go1.26.6 linux/amd64 && exit
sleep 300 &
echo $! >"$GOTMPDIR/object"
cp "$GOTMPDIR/object" "$PIDS.new" && mv "$PIDS.new" "$PIDS"
wait
"""
"""A Go whose compiler does not end."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and the Go above."""
    monkeypatch.delenv(kubernetes.VARIABLE, raising=False)
    cache = tmp_path / "cache"
    monkeypatch.setattr(kubernetes, "CACHE", cache)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "go").write_text(GO)
    (tmp_path / "bin" / "go").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PIDS", str(tmp_path / "pid"))
    return cache


def fill(folder: Path, programs: Sequence[str] = kubernetes.PROGRAMS) -> Path:
    folder.mkdir(parents=True)
    for name in programs:
        (folder / name).touch()
    return folder


def has_ended(pid: int) -> bool:
    """Tell whether a process has ended; it may still have to be collected."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    return True


def test_a_folder_that_the_variable_names_is_not_changed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "DISKS", {})
    folder = fill(cache.parent / "given", ["mine"])
    monkeypatch.setenv(kubernetes.VARIABLE, str(folder))
    with pytest.raises(Unavailable, match=f"{folder} lacks etcd .*; unset DISTRUN_KUBERNETES or name another folder"):
        kubernetes.install()
    assert [each.name for each in folder.iterdir()] == ["mine"]
    assert not cache.exists()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("programs", "a relative path"),
        ("/tmp", "below /tmp, which hosts have of their own"),
        ("/tmp/programs", "below /tmp, which hosts have of their own"),
        ("/usr/../root/programs", "below /root, which hosts have of their own"),
    ],
)
def test_a_folder_that_hosts_do_not_share_is_refused(monkeypatch: pytest.MonkeyPatch, given: str, why: str) -> None:
    monkeypatch.setenv(kubernetes.VARIABLE, given)
    expected = f"DISTRUN_KUBERNETES: expected an absolute path that hosts share, found {given!r}, {why}"
    assert kubernetes.why_not() == expected


def test_a_build_that_takes_too_long_leaves_no_process_and_no_file(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "BUILD_S", 3)
    fill(cache / "tmpabc")
    with pytest.raises(kubernetes.TimedOut, match="go build failed: it took longer than 3 s"):
        kubernetes.install()
    wait_until(lambda: has_ended(int((tmp_path / "pid").read_text())), 10, "the compiler has ended")
    assert [each.name for each in cache.iterdir()] == ["kubernetes.lock"]


def test_a_build_that_is_told_to_end_leaves_no_process_and_no_file(cache: Path, tmp_path: Path) -> None:
    script = "import kubernetes as k, pathlib, sys; k.CACHE = pathlib.Path(sys.argv[1]); k.main(['install'])"
    env = {**os.environ, "PYTHONPATH": str(Path(kubernetes.__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", script, str(cache)], env=env) as build:
        wait_until((tmp_path / "pid").exists, 30, "it builds")
        build.terminate()
        assert build.wait(30) == 128 + signal.SIGTERM
    wait_until(lambda: has_ended(int((tmp_path / "pid").read_text())), 10, "the compiler has ended")
    assert [each.name for each in cache.iterdir()] == ["kubernetes.lock"]


def test_waiting_for_the_build_of_another_process_is_told_and_has_an_end(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kubernetes, "LOCK_S", 0.1)
    cache.mkdir()
    with (cache / "kubernetes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert kubernetes.main(["install"]) == kubernetes.EXIT_TIMED_OUT
    told = capfd.readouterr().err.splitlines()
    assert told == [
        f"kubernetes: waiting for another process, which locks {lock.name}",
        f"kubernetes: after 0.1 s another process still locks {lock.name}. fix: end it",
    ]


def test_builds_of_other_sources_go_when_they_have_not_been_used_for_a_week(cache: Path) -> None:
    used, fresh, old = (fill(each) for each in (kubernetes.programs(), cache / "kubernetes-1", cache / "kubernetes-2"))
    for each in (used, old):
        os.utime(each, (0, 0))
    assert kubernetes.install() == used
    assert set(cache.iterdir()) == {used, fresh, cache / "kubernetes.lock"}


def test_a_kubelet_repeats_a_request_whose_answer_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").touch()
    (tmp_path / "ca.crt").write_bytes(CERTIFICATE)
    monkeypatch.setattr(kubelet, "RETRY_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        api = kubelet.Api("http://127.0.0.1:%d" % server.getsockname()[1], tmp_path)

        def answer() -> None:
            for body in (b'{"is": ', b'{"is": "whole"}'):
                connection, _ = server.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n" + body)

        thread = threading.Thread(target=answer)
        thread.start()
        assert api.get("/") == {"is": "whole"}
        thread.join()


def test_a_kubelet_ends_with_the_traceback_of_a_thread() -> None:
    script = (
        "import kubelet, threading; threading.excepthook = kubelet.end_process\n"
        "threading.Thread(target=lambda: [][0], daemon=True).start(); threading.Event().wait(60)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(kubelet.__file__).parent)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "IndexError: list index out of range"
