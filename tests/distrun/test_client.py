"""A terminal's side of the control socket, with a coordinator that is a test's own."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slowness import scaled

from distrun import client, killing, planning
from distrun.client import CoordinatorLost
from distrun.errors import UsageError
from distrun.request import JobRequest
from distrun_runtime.contract import session
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.jobstore import JobStore

LIMIT_S = scaled(20.0)


class Coordinator:
    """Answers one client as it is told to, and keeps what was asked."""

    def __init__(self, path: Path, *answers: dict[str, Any]) -> None:
        self.path = str(path)
        self.asked: list[dict[str, Any]] = []
        self._answers = list(answers)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError), self._listener:
            connection, _ = self._listener.accept()
            decoder = session.Decoder()
            with connection:
                while self._answers and (data := connection.recv(65536)):
                    for frame in decoder.feed(data):
                        self.asked.append(frame.header)
                        connection.sendall(session.encode(self._answers.pop(0)))
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(LIMIT_S)


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    store = JobStore(tmp_path / "state")
    return store.create(planning.plan_job(JobRequest(command=("true",), workers=1, servers=0, cwd="/"), store).plan)


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path for a socket."""
    path = Path(f"/tmp/distrun-test-{os.getpid()}.s")
    yield path
    path.unlink(missing_ok=True)


def hello(folder: JobFolder, *version: int) -> dict[str, Any]:
    return {"type": "hello", "version": list(version), "job": folder.id, "pid": 7, "host": "d1"}


def test_a_coordinator_that_is_silent_is_asked_for_a_sign_of_life_and_given_up() -> None:
    ours, its = socket.socketpair()
    with client.ControlConnection(ours) as connection, its:
        with pytest.raises(TimeoutError):
            next(connection.frames(0.05))
        asked = session.Decoder().feed(its.recv(65536))
        assert [frame.type for frame in asked] == ["state"] * (client.PROBES - 1)
        its.sendall(session.encode({"type": "state", "state": {}}))
        assert next(connection.frames(60.0)).type == "state"


def test_a_coordinator_that_is_watched_no_more_may_be_silent() -> None:
    ours, its = socket.socketpair()
    with client.ControlConnection(ours) as connection, its:

        def is_watched() -> bool:
            its.close()
            return False

        assert list(connection.frames(0.05, is_watched)) == []


def test_a_job_without_a_control_socket_is_named_with_what_works(folder: JobFolder) -> None:
    with pytest.raises(UsageError, match=f"job {folder.id} has no control socket") as caught:
        client.connect(folder)
    assert f"distrun logs -f {folder.id}" in caught.value.hint


def test_a_coordinator_of_another_version_is_named_and_can_be_stopped(folder: JobFolder, place: Path) -> None:
    folder.write_control(str(place))
    other = Coordinator(place, hello(folder, 2, 3), {"type": "stop"})
    with client.connect(folder, any_version=True) as connection:
        with pytest.raises(UsageError, match=r"speaks control protocol 2\.3, and this distrun 1\.0") as caught:
            client.check_version(connection.hello["version"], folder)
        assert "use the distrun that launched it" in caught.value.hint
        assert connection.ask("stop").type == "stop"
    other.close()
    assert other.asked == [{"type": "hello", "version": [1, 0]}, {"type": "stop"}]


def test_a_socket_that_another_job_has_by_now_is_not_asked(folder: JobFolder, place: Path) -> None:
    folder.write_control(str(place))
    other = Coordinator(place, {**hello(folder, 1, 0), "job": "other-job-000"})
    with pytest.raises(CoordinatorLost, match="is gone, and another job has its socket") as caught:
        client.connect(folder)
    other.close()
    assert caught.value.exit_code == 7


def test_a_refusal_is_told(folder: JobFolder, place: Path) -> None:
    folder.write_control(str(place))
    other = Coordinator(place, {"type": "refused", "message": "64 clients already", "hint": "end one"})
    with pytest.raises(UsageError, match="64 clients already") as caught:
        client.connect(folder)
    other.close()
    assert caught.value.hint == "end one"


def test_kill_falls_back_on_a_signal_where_nobody_answers(folder: JobFolder, place: Path) -> None:
    folder.write_control(str(place))
    other = Coordinator(place, hello(folder, 1, 0))  # it answers nothing more
    with killing._connected(folder) as connection:
        assert not killing._is_heard(connection, "stop")
    other.close()
