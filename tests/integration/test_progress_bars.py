"""Programs that draw progress bars: what is seen of them while they run, on a terminal, in a file and by `logs -f`."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from distrun_cli import Distrun, leaving_nothing, wait_until
from screen import Screen
from slowness import scaled

LIMIT_S = 60.0
WORKERS = 4

# As tqdm draws: on stderr, each state after a carriage return, a newline when all is done. It goes on until there is a
# file of that name. With another argument it prints lines meanwhile.
PROGRAM = """\
import os, sys, time
rank, at = os.environ["RANK"], 0
print("begin", rank, flush=True)
while not os.path.exists(sys.argv[1]):
    at += 1
    sys.stderr.write("\\r step %d of rank %s" % (at, rank))
    sys.stderr.flush()
    if at % 20 == 0 and len(sys.argv) > 2:
        print("said", at // 20, flush=True)
    time.sleep(0.05)
sys.stderr.write("\\r step last of rank %s\\n" % rank)
print("end", rank, flush=True)
"""


@pytest.fixture
def distrun(tmp_path: Path) -> Iterator[Distrun]:
    with leaving_nothing(tmp_path) as made:
        (made.work / "bar.py").write_text(PROGRAM)
        yield made


def words(*options: str, workers: int = WORKERS) -> tuple[str, ...]:
    return (*options, "-n", str(workers), "-s", "0", "python3", "bar.py", "done")


@contextlib.contextmanager
def ending(child: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A child that is ended in any case."""
    try:
        yield child
    finally:
        child.terminate()
        child.wait(scaled(LIMIT_S))


def steps(text: str, rank: int) -> list[int]:
    """The states of a rank's bar that are lines of their own."""
    host = r"worker-%d@\S+ \|  " % rank
    return [int(step) for step in re.findall(r"^%sstep (\d+) of rank %d$" % (host, rank), text, re.MULTILINE)]


def test_in_a_file_a_running_bar_is_a_line_now_and_then_and_its_end_is_there(distrun: Distrun) -> None:
    err = distrun.home / "err"
    with ending(distrun.begin(*words(), "and lines")) as job:
        enough = lambda: all(len(steps(err.read_text(), rank)) >= 3 for rank in range(WORKERS))  # noqa: E731
        wait_until(enough, LIMIT_S, "three lines of each bar")
        (distrun.work / "done").touch()
        assert job.wait(scaled(LIMIT_S)) == 0
    text, out = err.read_text(), (distrun.home / "out").read_text()
    for rank in range(WORKERS):
        found = steps(text, rank)
        assert found == sorted(set(found))
        assert text.count("step last of rank %d\n" % rank) == 1
        mine = [line.partition(" | ")[2] for line in out.splitlines() if line.startswith("worker-%d@" % rank)]
        assert mine == ["begin %d" % rank, *("said %d" % n for n in range(1, len(mine) - 1)), "end %d" % rank]


def test_the_log_has_the_bytes_as_they_came_and_is_followed_meanwhile(distrun: Distrun) -> None:
    with ending(distrun.begin(*words(workers=2))) as job:
        wait_until(lambda: len(distrun.jobs) == 1 and b"step 3 " in _log(distrun), LIMIT_S, "the log is written")
        every = _followed(distrun, lambda shown: all(len(steps(shown, rank)) >= 2 for rank in range(2)))
        assert "worker-0@" in every
        _followed(distrun, lambda shown: "\r step 9 of rank 0\r step 10 " in shown, "worker-0")
        (distrun.work / "done").touch()
        assert job.wait(scaled(LIMIT_S)) == 0
    assert re.search(rb"\r step 1 of rank 0\r step 2 of rank 0\r step 3 ", _log(distrun))
    assert distrun.run("logs", distrun.job.name, "worker-0").stdout == _log(distrun)


def test_what_is_printed_after_a_bars_end_comes_after_it(distrun: Distrun) -> None:
    """Both may wait in their pipes when the agent looks. The program goes on when it has read them."""
    program = (
        "import fcntl, sys, termios, time\n"
        "def is_read(pipe): return fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)) == bytes(4)\n"
        "def pause():\n"
        "    while not (is_read(1) and is_read(2)): time.sleep(0.001)\n"
        "for number in range(20):\n"
        "    sys.stderr.write('\\rbar %d' % number); sys.stderr.flush(); pause()\n"
        "    sys.stderr.write('\\rlast %d\\n' % number); print('after', number, flush=True); pause()\n"
    )
    assert distrun.run("launch", "-n", "1", "-s", "0", "python3", "-c", program).returncode == 0
    log = _log(distrun).decode()
    assert log == "".join("\rbar %d\rlast %d\nafter %d\n" % (number, number, number) for number in range(20))


def _followed(distrun: Distrun, is_enough: Callable[[str], bool], *task: str) -> str:
    """What `logs -f` shows while the job runs, once it is enough."""
    shown = distrun.home / "shown"
    argv = distrun.argv("logs", "-f", distrun.job.name, *task)
    with shown.open("wb") as out, ending(subprocess.Popen(argv, env=distrun.env, cwd=distrun.work, stdout=out)):
        wait_until(lambda: is_enough(shown.read_bytes().decode()), LIMIT_S, "the log is followed")
    return shown.read_bytes().decode()


def _log(distrun: Distrun) -> bytes:
    path = distrun.job / "logs" / "worker-0.log"
    return path.read_bytes() if path.exists() else b""


def test_on_a_terminal_the_bars_of_all_workers_stay_at_the_bottom(distrun: Distrun) -> None:
    ours, theirs = pty.openpty()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    screen = Screen(80, 24)
    seen: dict[int, set[int]] = {rank: set() for rank in range(WORKERS)}
    until = time.monotonic() + scaled(LIMIT_S)
    argv = ("launch", "--launcher", "local", *words(), "and lines")
    with ending(distrun.start(*argv, env={"TERM": "xterm-256color"}, **streams)) as job:
        os.close(theirs)
        while any(len(found) < 5 for found in seen.values()):
            assert time.monotonic() < until, "\n".join(screen.lines)
            _read(ours, screen)
            for rank, found in seen.items():
                # The last lines are the bars, each once, in the order of the ranks.
                at = len(screen.lines) - 1 - WORKERS + rank
                found.update(steps("\n".join(screen.lines[at : at + 1]), rank))
        (distrun.work / "done").touch()
        while _read(ours, screen):
            assert time.monotonic() < until
        assert job.wait(scaled(LIMIT_S)) == 0
    os.close(ours)
    text = "\n".join(screen.lines)
    for rank in range(WORKERS):
        assert text.count("step last of rank %d" % rank) == 1
        assert text.count("| begin %d" % rank) == text.count("| end %d" % rank) == 1
        mine = re.findall(r"^worker-%d@\S+ \| said (\d+)$" % rank, text, re.MULTILINE)
        assert mine == [str(n + 1) for n in range(len(mine))]
        assert steps(text, rank) == []  # no state but the last has stayed
    assert screen.lines[-1] == ""


def _read(fd: int, screen: Screen) -> bool:
    """Show what has been written; return whether more may come."""
    if not select.select([fd], [], [], 0.1)[0]:
        return True
    try:
        data = os.read(fd, 65536)
    except OSError:  # EIO: the other end is closed
        return False
    while data and select.select([fd], [], [], 0.0)[0]:
        try:
            data += os.read(fd, 65536)
        except OSError:
            break
    screen.write(data)
    return bool(data)


def test_the_last_state_of_a_bar_comes_before_the_report_of_its_end(distrun: Distrun) -> None:
    code = "import sys; sys.stderr.write('\\r 1%\\r 2%\\r 3%'); sys.exit(3)"
    done = distrun.launch("-n", "1", "-s", "0", "python3", "-c", code)
    assert done.returncode == 3
    lines = done.stderr.decode().splitlines()
    bar, report = (next(i for i, line in enumerate(lines) if text in line) for text in (" |  3%", "first failure"))
    assert bar < report
    assert "    |  3%" in lines
    assert not any("1%" in line for line in lines)
