"""Commands beside a coordinator that sends frames which are not what they should be."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakecoordinator import Coordinator
from sample_plan import sample_plan

from distrun import cli
from distrun_runtime.contract import facts, session
from distrun_runtime.coordinator.failures import TaskResult
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.jobstore import JobStore

TASKS = [TaskResult("worker-0", "worker", 0, "d1", facts.RUNNING, pid=1)]
DAMAGED: list[dict[str, Any]] = [
    {"type": "said"},
    {"type": "said", "text": 3, "level": "shout"},
    {"type": "output"},
    {"type": "output", "task": 1, "host": None, "stream": [], "at": "x", "length": {}},
    {"type": "gap", "length": 1},
    {"type": "event", "event": 7},
    {"type": "state"},
    {"type": "prompt", "id": []},
    {"type": "withdrawn", "id": 9},
    {"type": "outcome", "outcome": 5},
    {"type": "outcome", "outcome": {"exit_code": "x"}},
    {"type": "failed"},
    {"type": "detached"},
    {"type": "refused"},
    {"type": "detach"},
    {"type": "stack", "task": "worker-0"},
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobFolder:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = JobStore().create(sample_plan(job="calm-1", name="calm"))
    made.write_state("running", TASKS)
    made.write_control(str(tmp_path / "c.s"))
    return made


@pytest.fixture
def answering(folder: JobFolder, tmp_path: Path) -> Iterator[dict[str, bytes]]:
    """A coordinator that answers each frame but `hello` with what is in it, and then ends the connection."""
    answer = {"hello": b"", "others": b""}

    def answers(kind: str) -> Iterator[bytes]:
        yield answer["hello" if kind == "hello" else "others"]
        if kind != "hello":
            raise OSError("that is all")

    made = Coordinator(tmp_path / "c.s", folder.id, answers)
    yield answer
    made.close()


@pytest.mark.parametrize("verb", ["attach", "wait", "detach", "stack"])
def test_a_damaged_frame_is_no_internal_error(
    verb: str, answering: dict[str, bytes], folder: JobFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    for frame in DAMAGED:
        answering["others"] = session.encode(frame)
        code = cli.run([verb, folder.id])
        said = capfd.readouterr().err
        assert "internal error" not in said, frame
        assert (code, f"job {folder.id}" in said or "coordinator" in said) in {(7, True), (2, True)}, (frame, said)


@pytest.mark.parametrize("verb", ["attach", "wait", "detach", "stack"])
@pytest.mark.parametrize(
    "hello", [{"type": "hello"}, {"type": "hello", "job": "calm-1", "version": 4}, {"type": "refused"}], ids=str
)
def test_a_damaged_greeting_is_no_internal_error(
    hello: dict[str, Any],
    verb: str,
    folder: JobFolder,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Coordinator, "_answer", lambda self, connection, kind: connection.sendall(session.encode(hello))
    )
    made = Coordinator(tmp_path / "c.s", folder.id)
    try:
        assert cli.run([verb, folder.id]) == 7
    finally:
        made.close()
    assert "internal error" not in capfd.readouterr().err


def test_what_is_no_frame_at_all_ends_the_connection(
    answering: dict[str, bytes], folder: JobFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    answering["others"] = b"\xff\xff\xff\xff" + os.urandom(100)
    for verb in ("attach", "wait"):
        assert cli.run([verb, folder.id]) == 7
        assert f"its coordinator (pid {os.getpid()} on {socket.gethostname()})" in capfd.readouterr().err
