"""Facts about processes, in the Linux way and the portable way."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from agentkit import poll
from children import exit_code_of
from slowness import scaled

from distrun_runtime.contract import process, streams
from distrun_runtime.contract.process import Identity, Process

LINUX = sys.platform.startswith("linux")


@pytest.fixture(
    params=[
        pytest.param("", id="linux", marks=pytest.mark.skipif(not LINUX, reason="needs /proc")),
        pytest.param("1", id="portable", marks=pytest.mark.portable),
    ]
)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DISTRUN_PORTABLE", request.param)
    return str(request.param)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "600"], env=dict(os.environ, MARK="m 1", JOB="j1"), start_new_session=True)
    poll(lambda: os.getsid(child.pid) == child.pid, "it has its session")
    yield child
    child.kill()
    child.wait()


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_closed_standard_streams_become_the_null_device_for_children_too(closed: tuple[int, ...]) -> None:
    def child() -> None:
        for number in closed:
            os.close(number)
            setattr(sys, ("stdin", "stdout", "stderr")[number], None)
        streams.open_streams()
        first, null = os.dup(0), os.stat(os.devnull)
        assert first > 2
        for number in closed:
            assert os.path.samestat(os.fstat(number), null)
            assert os.get_inheritable(number)
        print("nobody reads this", file=sys.stdout)
        sys.stderr.write("nor this")

    assert exit_code_of(child) == 0


def test_standard_streams_that_are_open_stay_as_they_are() -> None:
    def child() -> None:
        before = [os.fstat(number) for number in range(3)], (sys.stdin, sys.stdout, sys.stderr)
        streams.open_streams()
        assert before == ([os.fstat(number) for number in range(3)], (sys.stdin, sys.stdout, sys.stderr))

    assert exit_code_of(child) == 0


def test_identity_is_stable_and_tells_a_later_process_of_the_same_id_apart(way: str) -> None:
    me = process.identity(os.getpid())
    assert process.identity(os.getpid()) == me
    assert process.is_alive(me)
    kind, _, number = me.start.rpartition(":")
    assert not process.is_alive(Identity(me.pid, "%s:%d" % (kind, int(number) + 100)))


def test_identity_read_one_way_is_understood_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    if not LINUX:
        pytest.skip("there is one way only")
    monkeypatch.setenv("DISTRUN_PORTABLE", "1")
    portable = process.identity(os.getpid())
    monkeypatch.setenv("DISTRUN_PORTABLE", "0")
    assert portable.start.startswith("ps:")
    assert process.is_alive(portable)


def test_no_such_process(way: str) -> None:
    child = subprocess.Popen(["true"])
    who = process.identity(child.pid)
    child.wait()
    assert not process.is_alive(who)
    assert process.send_signal(who, signal.SIGTERM) is False
    with pytest.raises(ProcessLookupError, match="no process has the id"):
        process.identity(child.pid)
    assert process.command_of(child.pid) == ""
    assert process.environ_of(child.pid) == {}


def test_process_that_waits_to_be_reaped_is_dead(way: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    who = process.identity(child.pid)
    os.kill(child.pid, signal.SIGKILL)
    poll(lambda: not process.is_alive(who), "dead, though not reaped")
    assert process.table([child.pid])[0].is_dead
    child.wait()


def test_table_knows_parent_group_and_session(way: str, sleeper: subprocess.Popen[bytes]) -> None:
    row = next(row for row in process.table() if row.pid == sleeper.pid)
    assert (row.ppid, row.pgid, row.sid) == (os.getpid(), sleeper.pid, sleeper.pid)
    assert row.identity == process.identity(sleeper.pid)
    assert not row.is_dead
    assert sleeper.pid in {each.pid for each in process.descendants([os.getpid()])}
    assert os.getpid() in process.ancestors(sleeper.pid)


def test_marks_are_found_in_environments_and_nowhere_else(way: str, sleeper: subprocess.Popen[bytes]) -> None:
    poll(lambda: process.environ_of(sleeper.pid).get("JOB") == "j1", "the environment shows")
    code = "import time; time.sleep(600)"
    impostor = subprocess.Popen([sys.executable, "-S", "-c", code, "JOB=j1"])
    try:
        found = {row.pid for row in process.marked({"JOB": "j1"})}
        assert sleeper.pid in found
        assert impostor.pid not in found, "an argument is no mark"
        assert process.marked({"JOB": "j"}) == []
        assert process.marked({"JOB": "j1", "OTHER": "x"}) == []
    finally:
        impostor.kill()
        impostor.wait()


def test_signal_reaches_that_very_process(way: str, sleeper: subprocess.Popen[bytes]) -> None:
    who = process.identity(sleeper.pid)
    stranger = Identity(who.pid, who.start[:-3] + "000" if who.start[-3:] != "000" else who.start[:-3] + "999")
    assert process.send_signal(stranger, signal.SIGKILL) is False
    assert process.is_alive(who)
    assert process.send_signal(who, signal.SIGTERM) is True
    assert sleeper.wait(scaled(60)) == -signal.SIGTERM


def test_command_is_for_people(way: str, sleeper: subprocess.Popen[bytes]) -> None:
    poll(lambda: process.command_of(sleeper.pid) == "sleep 600", "the command shows")


@pytest.mark.skipif(not LINUX, reason="needs /proc")
def test_command_name_with_brackets_and_blanks_does_not_confuse_the_table(tmp_path: os.PathLike[str]) -> None:
    odd = os.path.join(tmp_path, "a) R 1 (b")
    os.symlink("/bin/sleep", odd)
    child = subprocess.Popen([odd, "600"])
    try:
        poll(lambda: process.command_of(child.pid).endswith("(b 600"), "it runs")
        assert process.table([child.pid])[0].ppid == os.getpid()
    finally:
        child.kill()
        child.wait()


def test_descendants_survive_a_circle_in_the_table() -> None:
    rows = [Process(1, 2, 1, 1, "", "S"), Process(2, 1, 1, 1, "", "S"), Process(3, 2, 1, 1, "", "S")]
    assert {row.pid for row in process.descendants([1], rows)} == {2, 3}
    assert process.ancestors(3, rows) == {1, 2}


def test_portable_means_no_subreaper_and_no_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRUN_PORTABLE", "1")
    assert process.is_portable()
    assert not process.has_pidfd()
    assert not process.become_subreaper()


@pytest.mark.skipif(not LINUX, reason="needs a subreaper")
def test_subreaper_inherits_orphans() -> None:
    code = (
        "import os,time\n"
        "from distrun_runtime.contract import process\n"
        "assert process.become_subreaper()\n"
        "if os.fork() == 0:\n"
        " parent = os.getpid()\n"
        " if os.fork() == 0:\n"
        "  while os.getppid() == parent: time.sleep(0.01)\n"
        "  print(os.getppid(), flush=True)\n"
        " os._exit(0)\n"
        "os.wait(); os.wait(); print(os.getpid())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.split()
    assert first == second


@pytest.mark.skipif(not LINUX, reason="waitid")
def test_a_process_whose_children_cannot_be_known_may_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    def waitid(*of: int) -> None:
        raise OSError(errno.ENOSYS, "a sandbox forbids it")

    monkeypatch.setattr(os, "waitid", waitid)
    assert process.has_children()


def test_a_row_of_the_table_takes_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent reads the table again and again while it waits."""
    process.boot_id()  # read once
    opened: list[str] = []

    def counting(path: str, mode: str) -> object:
        opened.append(path)
        return open(path, mode)

    monkeypatch.setattr(process, "open", counting, raising=False)
    assert len(process.table([os.getpid(), os.getppid()])) == len(opened) == 2


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "found"), [(64, 512, 300, 300), (64, 200, 300, 200), (400, 512, 300, 400)]
)
def test_open_files_are_allowed_as_far_as_the_hard_limit(soft: int, hard: int, wanted: int, found: int) -> None:
    program = (
        "import resource; from distrun_runtime.contract import process\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (%d, %d))\n"
        "print(process.allow_open_files(%d), *resource.getrlimit(resource.RLIMIT_NOFILE))" % (soft, hard, wanted)
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [str(found), str(found), str(hard)]


def test_too_many_open_files_are_told_with_the_limit_and_the_command_that_raises_it() -> None:
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/dev/null")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert process.why(error).startswith(f"too many open files: a process may have {limit} here")
    assert "ulimit -n" in process.why(error)
    assert process.why(OSError(errno.ENOENT, "no such file", "x")) == "no such file"


def test_a_forked_child_has_a_pid_of_its_own() -> None:
    assert process.own_pid() == os.getpid()
    child = os.fork()
    if not child:
        os._exit(process.own_pid() != os.getpid())
    assert os.waitpid(child, 0)[1] == 0
