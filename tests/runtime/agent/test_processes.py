"""The processes of tasks: who belongs to which task (by tables written by hand), what they publish, how they end."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

import pytest
from agentkit import poll

from distrun_runtime.agent.tasks import JOB, LINE_LIMIT, Publisher, TaskProcesses, exit_facts, owners
from distrun_runtime.contract.process import Identity, Process

AGENT = 10
NOT_OURS = {1, 9, AGENT}
NO_MARKS: Mapping[int, str] = {}


def row(pid: int, ppid: int, pgid: int = 0, sid: int = 0, state: str = "S", start: str = "") -> Process:
    return Process(pid, ppid, pgid or pid, sid or pgid or pid, start or "s%d" % pid, state)


def processes(name: str, pid: int, is_reaped: bool = False, is_scattered: bool = False) -> TaskProcesses:
    found = TaskProcesses(name, Identity(pid, "s%d" % pid))
    found.is_reaped, found.is_scattered = is_reaped, is_scattered
    return found


def owned(
    rows: list[Process], tasks: list[TaskProcesses], strays: Sequence[int] = (), marks: Mapping[int, str] = NO_MARKS
) -> dict[str, set[int]]:
    chosen = [each for each in rows if each.pid in strays]
    found = owners(rows, tasks, chosen, lambda each: marks.get(each.pid, ""), NOT_OURS)
    return {name: {each.pid for each in members} for name, members in found.items()}


def test_group_session_and_descendants_belong_to_the_task() -> None:
    rows = [row(AGENT, 9), row(20, AGENT), row(21, 20, 20), row(22, 20, 22, 20), row(23, 22, 23, 23), row(30, AGENT)]
    assert owned(rows, [processes("a", 20), processes("b", 30)]) == {"a": {20, 21, 22, 23}, "b": {30}, JOB: set()}


def test_what_was_seen_once_is_remembered_when_it_lost_its_parent() -> None:
    one = processes("a", 20)
    owned([row(20, AGENT), row(23, 20, 23, 23)], [one])
    assert owned([row(20, AGENT), row(23, AGENT, 23, 23)], [one], strays=[23])["a"] == {20, 23}


def test_remembered_id_that_became_another_process_is_not_ours() -> None:
    one = processes("a", 20)
    owned([row(20, AGENT), row(23, 20, 23, 23)], [one])
    assert owned([row(20, AGENT), row(23, 1, 23, 23, start="later")], [one])["a"] == {20}


def test_orphan_belongs_to_the_task_that_its_environment_names_else_to_the_job() -> None:
    rows = [row(20, AGENT), row(40, AGENT), row(41, 40), row(50, AGENT)]
    assert owned(rows, [processes("a", 20)], strays=[40, 50], marks={40: "a", 50: "gone"}) == {
        "a": {20, 40, 41},
        JOB: {50},
    }


def test_dead_processes_and_our_own_belong_to_nobody() -> None:
    rows = [row(AGENT, 9, 20, 20), row(20, AGENT, state="Z"), row(21, AGENT, 20, 20)]
    assert owned(rows, [processes("a", 20)])["a"] == {21}


def test_ids_of_a_reaped_task_mean_nothing_once_its_session_was_empty() -> None:
    one = processes("a", 20, is_reaped=True)
    assert owned([row(22, AGENT, 20, 20)], [one])["a"] == {22}
    assert owned([row(30, AGENT)], [one])["a"] == set()
    assert one.is_scattered
    assert owned([row(20, 1, start="later")], [one])["a"] == set()


def test_reaped_leaders_id_given_to_a_stranger_is_not_the_task() -> None:
    one = processes("a", 20, is_reaped=True, is_scattered=True)
    assert owned([row(20, 1, 5, 5, start="later")], [one])["a"] == set()


def test_each_process_has_one_owner() -> None:
    rows = [row(20, AGENT), row(30, 20, 30, 30), row(31, 30, 30, 30)]
    found = owned(rows, [processes("a", 20), processes("b", 30)])
    assert found["a"] == {20, 30, 31}
    assert found["b"] == set()


# What tasks publish


@pytest.fixture
def pipe() -> Iterator[tuple[Publisher, int]]:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    publisher = Publisher("scheduler-0", reading)
    yield publisher, writing
    publisher.close()
    os.close(writing)


def test_objects_come_whole_whatever_the_pieces(pipe: tuple[Publisher, int]) -> None:
    publisher, writing = pipe
    os.write(writing, b'{"a": "1"}\n{"b"')
    assert publisher.read() == ([{"a": "1"}], [])
    assert publisher.read() == ([], [])
    os.write(writing, b': "2"}\n\n')
    assert publisher.read() == ([{"b": "2"}], [])


def test_nonsense_is_reported_and_skipped(pipe: tuple[Publisher, int]) -> None:
    publisher, writing = pipe
    os.write(writing, b'[1]\nxx\n{"ok": "1"}\n')
    objects, wrong = publisher.read()
    assert objects == [{"ok": "1"}]
    assert len(wrong) == 2
    assert "scheduler-0" in wrong[0]


@pytest.mark.parametrize(
    "line", [b"[" * 60_000, b'{"a": ' * 10_000, b'{"lost_peer": ["x"]}', b'{"port": null}', b"\xff\xfe"]
)
def test_what_is_no_object_of_texts_is_reported_and_skipped(pipe: tuple[Publisher, int], line: bytes) -> None:
    publisher, writing = pipe
    os.write(writing, line + b"\n")
    objects, wrong = publisher.read()
    assert (objects, len(wrong)) == ([], 1)


def test_numbers_become_texts(pipe: tuple[Publisher, int]) -> None:
    publisher, writing = pipe
    os.write(writing, b'{"port": 9, "is_ready": true, "\\ud83d": 0.5}\n')
    assert publisher.read() == ([{"port": "9", "is_ready": "true", "\\ud83d": "0.5"}], [])


def test_half_a_character_is_shown_as_its_escape(pipe: tuple[Publisher, int]) -> None:
    publisher, writing = pipe
    os.write(writing, b'{"failed": "ValueError: hi \\ud83d, \\u00e9 \\udcff"}\n')
    objects, wrong = publisher.read()
    assert (objects, wrong) == ([{"failed": "ValueError: hi \\ud83d, \u00e9 \\udcff"}], [])


def test_endless_line_is_dropped(pipe: tuple[Publisher, int]) -> None:
    publisher, writing = pipe
    os.set_blocking(writing, False)
    wrong: list[str] = []
    for _ in range(3):
        os.write(writing, b"x" * (LINE_LIMIT // 2))
        wrong += publisher.read()[1]
    assert len(wrong) == 1
    assert "more than" in wrong[0]


# How a child ended


def status_of(script: str) -> int:
    pid = os.posix_spawnp("sh", ["sh", "-c", script], os.environ)
    return os.waitpid(pid, 0)[1]


def test_exit_code_and_signal_are_told_apart() -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    exited, killed = status_of("exit 7"), status_of("kill -KILL $$")
    assert (exit_facts(exited, usage)["code"], exit_facts(exited, usage)["signal"]) == (7, None)
    assert (exit_facts(killed, usage)["code"], exit_facts(killed, usage)["signal"]) == (None, "KILL")


def test_real_time_signal_goes_by_number() -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    assert str(exit_facts(signal.SIGRTMIN + 3, usage)["signal"]) in ("37", "RTMIN+3", "38")


def test_children_are_reaped_without_waiting() -> None:
    code = (
        "import subprocess, sys, time\n"
        "from distrun_runtime.agent import tasks\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "assert list(tasks.reaped()) == []\n"
        "child.kill()\n"
        "found = []\n"
        "while not found: found = [(pid, status) for pid, status, usage in tasks.reaped()]\n"
        "assert found == [(child.pid, 9)]\n"
        "child.returncode = 0\n"
        "assert list(tasks.reaped()) == []\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code])
    poll(lambda: child.poll() is not None, "the child is done")
    assert child.returncode == 0
