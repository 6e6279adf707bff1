from __future__ import annotations

from pathlib import Path

import pytest

from distrun.cli.logs import READ_SIZE, tail_offset
from distrun.errors import UsageError
from distrun.jobs import choose

TASKS = [
    {"name": name, "role": role}
    for name, role in (("server-0", "server"), ("worker-0", "worker"), ("worker-1", "worker"))
]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ((), ["server-0", "worker-0", "worker-1"]),
        (("worker-1",), ["worker-1"]),
        (("worker",), ["worker-0", "worker-1"]),
        (("worker-1", "server"), ["server-0", "worker-1"]),
    ],
)
def test_tasks_roles_or_all_are_chosen(wanted: tuple[str, ...], names: list[str]) -> None:
    assert [task["name"] for task in choose(TASKS, wanted)] == names


def test_a_job_that_waits_in_a_queue_has_no_tasks_yet() -> None:
    with pytest.raises(UsageError, match="no task 'worker-0' in this job: it has none yet"):
        choose((), ("worker-0",))


def test_a_task_that_is_not_there_gets_near_names() -> None:
    with pytest.raises(UsageError, match="no task 'worker-2' in this job; there is: worker"):
        choose(TASKS, ("worker", "worker-2"))


@pytest.mark.parametrize(
    ("text", "lines", "left"),
    [
        (b"a\nb\nc\n", 2, b"b\nc\n"),
        (b"a\nb\nc", 2, b"b\nc"),
        (b"a\nb\n", 0, b""),
        (b"a\nb\n", 5, b"a\nb\n"),
        (b"", 3, b""),
        (b"\n\n\n", 2, b"\n\n"),
        (b"x" * READ_SIZE + b"\n" + b"y" * READ_SIZE + b"\nz\n", 2, b"y" * READ_SIZE + b"\nz\n"),
        (b"x\n" * READ_SIZE, READ_SIZE - 1, b"x\n" * (READ_SIZE - 1)),
    ],
)
def test_the_last_lines_are_found(text: bytes, lines: int, left: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(text)
    assert text[tail_offset(path, lines) :] == left


def test_a_log_that_is_not_there_yet_begins_at_0(tmp_path: Path) -> None:
    assert tail_offset(tmp_path / "none", 5) == 0
