"""Programs that the agent runs for itself."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from agentkit import poll

from distrun_runtime.agent.commands import TIMED_OUT, Command, CommandResult, is_missing, run
from distrun_runtime.contract import process

DENIED = PermissionError(13, "Permission denied")


@pytest.mark.parametrize(
    ("error", "program", "expected"),
    [
        (FileNotFoundError(2, "No such file or directory"), b"here", True),
        (DENIED, b"nowhere", True),  # a folder of PATH may not be entered
        (DENIED, b"here", False),
        (DENIED, b"./here", False),
        (ValueError("embedded null byte"), b"here", False),
    ],
)
def test_a_program_that_is_in_no_folder_of_path_is_missing_whatever_the_system_says(
    tmp_path: Path, error: Exception, program: bytes, expected: bool
) -> None:
    (tmp_path / "here").touch()
    assert is_missing(error, program, {b"PATH": b"/not/to/be/entered:" + os.fsencode(tmp_path)}) is expected


def shell(script: str, limit_s: float) -> CommandResult:
    return run(Command((b"sh", b"-c", script.encode()), os.environb, b"", limit_s, prints_result=True))


def test_what_a_program_prints_may_be_its_result() -> None:
    assert shell("echo told; echo odd >&2; exit 3", 20.0) == CommandResult(3, b"told\n", "odd\n")


def test_what_a_program_that_hangs_has_started_is_ended_with_it(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; wait"
    done: list[CommandResult] = []
    thread = threading.Thread(target=lambda: done.append(shell(script, 3.0)))
    thread.start()
    poll((tmp_path / "pid").exists, "it has a child")
    (child,) = process.table([int((tmp_path / "pid").read_text())])
    thread.join()
    assert (done[0].code, done[0].fault) == (None, TIMED_OUT)
    poll(lambda: not process.is_alive(child.identity), "its child has ended")
