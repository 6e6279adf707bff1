"""How the agent gets a task's stacks: real processes, and what must not be waited for or signalled."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distrun_cli import wait_until
from slowness import scaled

from distrun_runtime.agent import stacks
from distrun_runtime.agent.stacks import StackAnswer, StackReader
from distrun_runtime.contract import process
from distrun_runtime.contract.process import Identity

LIMIT_S = 20.0

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

OFFERS = """
    import faulthandler, signal, sys, time
    file = open(sys.argv[1] % __import__("os").getpid(), "ab", buffering=0)
    faulthandler.register(signal.SIGURG, file=file)
    def stuck():
        print("ready", flush=True)
        while True:
            time.sleep(0.01)
    stuck()
"""
HANDLES = """
    import signal, time
    signal.signal(signal.SIGURG, lambda *_: print("touched", flush=True))
    print("ready", flush=True)
    time.sleep(1000)
"""


class Task:
    """A task that runs."""

    def __init__(self, *argv: str, path: str = os.defpath) -> None:
        env = {**os.environ, "PATH": path}
        self.child = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.leader = process.identity(self.child.pid)
        self.is_reaped = False

    def line(self) -> str:
        return self.child.stdout.readline()

    def end(self) -> None:
        os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait(scaled(LIMIT_S))
        self.child.stdout.close()


class Rig:
    """Stacks in a loop like the agent's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tasks: dict[str, Any] = {}
        self.selector = selectors.PollSelector()
        self.stacks = StackReader(str(folder), self.tasks, self.selector)
        self.answers: list[StackAnswer] = []
        self.interpreter = folder / "here" / "python"
        """A link: there may be a py-spy beside the interpreter of these tests, and it would be asked first."""
        self.interpreter.parent.mkdir()
        self.interpreter.symlink_to(sys.executable)

    def start(self, *argv: str, path: str = os.defpath) -> Task:
        made = self.tasks["worker-0"] = Task(*argv, path=path)
        return made

    def python(self, code: str, **more: str) -> Task:
        stacks_file = str(self.folder / "stacks-%d.txt")
        made = self.start(str(self.interpreter), "-c", textwrap.dedent(code), stacks_file, **more)
        assert made.line() == "ready\n"
        return made

    def offer(self, task: Task, **changes: Any) -> None:
        told = {"pid": task.leader.pid, "start": task.leader.start, "how": "sigurg", "path": "ignored", **changes}
        self.stacks.heard("worker-0", told)

    def ask(self) -> StackAnswer:
        """Ask, and run the loop until there is an answer."""
        self.stacks.ask("worker-0", self.answers.append)
        until = time.monotonic() + scaled(LIMIT_S)
        while not self.answers:
            assert time.monotonic() < until
            left_s = min(self.stacks.next_at - time.monotonic(), 0.05)
            for key, _ in self.selector.select(max(0.0, left_s)):
                key.data()
            for spy in list(self.stacks._spies):
                spy.look()
            if time.monotonic() >= self.stacks.next_at:
                self.stacks.tick(time.monotonic())
        return self.answers.pop()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made = Rig(tmp_path)
    monkeypatch.setenv("PATH", os.defpath)  # no py-spy of this machine's
    yield made
    made.stacks.close()
    for task in made.tasks.values():
        task.end()


def spy(folder: Path, text: str) -> str:
    """Make a py-spy; return its folder."""
    path = folder / "bin" / "py-spy"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n%s\n" % text)
    path.chmod(0o755)
    return "%s:%s" % (path.parent, os.defpath)


def test_a_process_that_offered_its_stacks_writes_them(rig: Rig) -> None:
    rig.offer(rig.python(OFFERS))
    for _ in range(2):
        found = rig.ask()
        assert (found.task, found.how, found.error) == ("worker-0", "faulthandler", "")
        assert found.text.count("in stuck") == 1, "the stacks of this question only"


def test_a_child_of_the_task_may_be_the_one_that_offered(rig: Rig) -> None:
    code = textwrap.dedent(OFFERS)
    argv = (str(rig.interpreter), "-c", code, str(rig.folder / "stacks-%d.txt"))
    shell = rig.start("sh", "-c", '"$@"; true', "sh", *argv)
    assert shell.line() == "ready\n"
    [child] = process.descendants([shell.leader.pid])
    rig.stacks.heard("worker-0", {"pid": child.pid, "start": child.start, "how": "sigurg"})
    assert "in stuck" in rig.ask().text


def test_a_process_that_offered_nothing_gets_no_signal(rig: Rig) -> None:
    task = rig.python(HANDLES)
    found = rig.ask()
    assert found.text == ""
    assert found.error.startswith("py-spy is not installed where the task runs, and process %d" % task.leader.pid)
    assert found.fix.startswith("pip install py-spy")
    rig.offer(task)
    rig.offer(task, how="")
    assert rig.ask().text == "", "it was taken back"
    rig.offer(task, start="proc:other:1")
    assert rig.ask().text == "", "that was another process of the same id"
    task.child.send_signal(signal.SIGURG)
    assert task.line() == "touched\n", "the first one"


def test_a_process_that_is_no_python_has_no_stacks(rig: Rig) -> None:
    task = rig.start("sleep", "1000")
    words = Path("/proc/%d/cmdline" % task.leader.pid)
    wait_until(words.read_bytes, LIMIT_S, "the words of the process, which come after its name")
    assert rig.ask().error == "process %d is no Python: sleep 1000" % task.leader.pid


def test_py_spy_is_asked_first(rig: Rig) -> None:
    path = spy(rig.folder, 'echo "stacks: $*"')
    task = rig.python(OFFERS, path=path)
    rig.offer(task)
    found = rig.ask()
    assert found == StackAnswer("worker-0", "stacks: dump --nonblocking --pid %d" % task.leader.pid, "py-spy")


@pytest.mark.parametrize("text", ["echo Permission denied >&2; exit 1", "exec sleep 1000", "exit 0"])
def test_if_py_spy_fails_or_hangs_the_process_writes_its_stacks(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(stacks, "PY_SPY_S", 0.3)
    rig.offer(rig.python(OFFERS, path=spy(rig.folder, text)))
    assert rig.ask().how == "faulthandler"


def test_what_py_spy_says_is_told_if_there_is_no_other_way(rig: Rig) -> None:
    task = rig.python(HANDLES, path=spy(rig.folder, "echo; echo Error: Permission denied >&2; exit 1"))
    found = rig.ask()
    assert "py-spy: Error: Permission denied, and process %d" % task.leader.pid in found.error
    assert found.fix.startswith("sudo py-spy dump --pid %d" % task.leader.pid)


def test_a_stopped_process_is_told_as_stopped(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "SIGNAL_S", 0.3)
    task = rig.python(OFFERS)
    rig.offer(task)
    os.kill(task.leader.pid, signal.SIGSTOP)
    os.waitpid(task.leader.pid, os.WUNTRACED)
    found = rig.ask()
    assert (found.error, found.fix) == (
        "process %d is stopped" % task.leader.pid,
        "kill -CONT %d, there" % task.leader.pid,
    )


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.symlink_to("/dev/null"), os.mkfifo])
def test_a_file_that_is_none_is_not_read_and_nothing_is_signalled(rig: Rig, make: Callable[[Path], Any]) -> None:
    task = rig.python(HANDLES)
    make(rig.folder / ("stacks-%d.txt" % task.leader.pid))
    rig.offer(task)
    assert rig.ask().error.startswith("its stacks cannot be read: ")


def test_who_has_ended_or_is_elsewhere_is_told_so(rig: Rig) -> None:
    task = rig.start("sleep", "1000")
    task.is_reaped = True
    assert rig.ask() == StackAnswer("worker-0", error="worker-0 has ended")
    rig.stacks.ask("worker-9", rig.answers.append)
    assert rig.answers.pop() == StackAnswer("worker-9", error="worker-9 does not run on this host")


def test_of_odd_datagrams_nothing_is_kept(rig: Rig) -> None:
    task = rig.start("sleep", "1000")
    for told in ({}, {"pid": "1", "start": "x"}, {"pid": 1, "start": 2, "how": "sigurg"}):
        rig.stacks.heard("worker-0", told)
    rig.stacks.heard("worker-9", {"pid": 1, "start": "x", "how": "sigurg"})
    assert rig.stacks._offers == {}
    for number in range(1000):
        rig.offer(task, pid=number)
    assert len(rig.stacks._offers["worker-0"]) == 64
    assert Identity(999, task.leader.start) in rig.stacks._offers["worker-0"].values()


def test_the_programs_own_thread_comes_first() -> None:
    other, main = (
        'Thread 0x1 (most recent call first):\n  File "a"',
        'Current thread 0x2 (most recent call first):\n  File "b"',
    )
    assert stacks.program_first(f"{other}\n\n{main}") == f"{main}\n\n{other}"
    assert stacks.program_first(main) == main
