"""The dashboard on a real pseudo terminal, of a recorded job."""

from __future__ import annotations

import errno
import os
import select
import shlex
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dashboard_program
import pytest
from distrun_cli import wait_until
from slowness import scaled
from terminal import Session

from distrun.dashboard import text
from distrun.dashboard.terminal import Terminal
from distrun.dashboard.text import Line

TAKEN, GIVEN_BACK = "\x1b[?1049h", "\x1b[?1049l"
LIMIT_S = 20.0


class Screen(Session):
    """A session whose terminal is looked at."""

    @property
    def has_echo(self) -> bool:
        return bool(termios.tcgetattr(self._ours)[3] & termios.ECHO)

    def hang_up(self) -> None:
        self.close()

    def forget(self) -> None:
        """Read what is there, and forget what was shown."""
        while self._read(0.05):
            pass
        self.shown = ""


Start = Callable[..., Screen]


def argv(record: Path, *words: str) -> list[str]:
    return [sys.executable, dashboard_program.__file__, str(record), *words]


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "asked"


@pytest.fixture
def start(tmp_path: Path, record: Path) -> Iterator[Start]:
    started = []

    def begin(*words: str, command: list[str] | None = None) -> Screen:
        env = {**os.environ, "TERM": "xterm", "PS1": "READY> ", "HISTFILE": ""}
        screen = Screen(command or argv(record, *words), env, tmp_path, size=(100, 30))
        started.append(screen)
        return screen

    yield begin
    for screen in started:
        screen.kill()


def asked(record: Path, kind: str) -> bool:
    return record.exists() and kind in record.read_text().split()


def test_the_screen_is_taken_keys_work_and_quitting_gives_all_back(start: Start, record: Path) -> None:
    screen = start()
    screen.expect("worker-3")
    screen.expect("stalled")
    assert screen.shown.startswith(TAKEN)
    assert not screen.has_echo
    screen.type("\x1b[B\r")
    screen.expect("no output, step, store call or CPU")
    screen.type("\x1b")
    screen.expect("more (", 2)
    assert asked(record, "subscribe")
    screen.type("q")
    assert screen.ends() == 0
    assert screen.shown.count(TAKEN) == screen.shown.count(GIVEN_BACK) == 1
    assert "\x1b[?25h" in screen.shown.rpartition("\x1b[0m")[2]


def test_keys_that_come_in_one_read_are_for_what_the_ones_before_show(start: Start) -> None:
    screen = start()
    screen.expect("stalled")
    screen.resize(60, 10)
    screen.expect("\x1b[10;1H")
    screen.type("?G")
    screen.expect("Ctrl-Z")
    screen.type("qqx")
    assert screen.ends() == 0


def test_the_last_column_is_not_erased(start: Start) -> None:
    screen = start()
    screen.expect("stalled")
    screen.forget()
    screen.resize(55, 12)
    screen.expect("\x1b[12;1H")
    screen.type("q")
    assert screen.ends() == 0
    last = screen.shown.partition("\x1b[12;1H")[2]
    assert "x stop\x1b[0m" in last  # the keys fill the line
    assert "\x1b[K" not in last.partition("\x1b[?")[0]


def test_settings_of_the_terminal_are_the_same_afterwards(start: Start, record: Path) -> None:
    screen = start(command=["sh", "-c", f"stty -a > before; {shlex.join(argv(record))}; stty -a > after"])
    screen.expect("stalled")
    screen.type("q")
    assert screen.ends() == 0
    folder = record.parent
    assert (folder / "after").read_text() == (folder / "before").read_text()


def test_ctrl_z_gives_the_shell_its_terminal_and_fg_comes_back(start: Start, record: Path) -> None:
    screen = start(command=["bash", "--norc", "--noprofile", "-i"])
    screen.expect("READY> ")
    screen.type(shlex.join(argv(record)) + "\n")
    screen.expect("stalled")
    screen.type("\x1a")
    screen.expect("Stopped")
    screen.expect("READY> ", 2)
    assert GIVEN_BACK in screen.shown
    screen.forget()
    screen.type("stty -a; fg\n")
    screen.expect(TAKEN)
    assert " echo " in screen.shown
    screen.expect("stalled")
    screen.type("\x1a")
    screen.expect("Stopped")
    screen.type("fg\n")
    screen.expect(TAKEN, 2)
    screen.forget()
    screen.type("q")
    screen.expect("READY> ")
    screen.type("exit\n")
    assert screen.ends() == 0


def test_a_signal_that_interrupts_the_taking_of_the_terminal_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `bg` and `fg`: a process in the background is stopped by the call, which its SIGCONT then ends."""
    ours, its = os.openpty()
    before, interrupted = termios.tcsetattr, [True, True]

    def tcsetattr(*values: Any) -> None:
        if interrupted:
            interrupted.pop()
            raise termios.error(errno.EINTR, "Interrupted system call")
        before(*values)

    monkeypatch.setattr(termios, "tcsetattr", tcsetattr)
    with Terminal(its, its):
        assert not termios.tcgetattr(its)[3] & termios.ECHO
        interrupted.append(True)
    assert termios.tcgetattr(its)[3] & termios.ECHO
    for fd in (ours, its):
        os.close(fd)


def test_a_resize_draws_every_line_anew_in_the_new_size(start: Start) -> None:
    screen = start()
    screen.expect("stalled")
    screen.forget()
    screen.resize(60, 12)
    screen.expect("\x1b[12;1H")
    assert "\x1b[2J" in screen.shown
    assert "\x1b[13;1H" not in screen.shown
    screen.type("q")
    assert screen.ends() == 0


@pytest.mark.parametrize("name", ["TERM", "HUP"])
def test_a_signal_that_ends_it_gives_the_screen_back(name: str, start: Start) -> None:
    screen = start()
    screen.expect("stalled")
    number = getattr(signal, f"SIG{name}")
    screen.process.send_signal(number)
    assert screen.ends() == 128 + number
    assert GIVEN_BACK in screen.shown


def test_a_terminal_that_is_closed_ends_it(start: Start) -> None:
    screen = start()
    screen.expect("stalled")
    screen.hang_up()
    assert screen.process.wait(scaled(LIMIT_S)) == 128 + signal.SIGHUP


def test_an_error_of_ours_gives_the_screen_back_and_is_shown_after_that(start: Start) -> None:
    screen = start("broken")
    assert screen.ends() == 1
    assert "broken on purpose" in screen.shown.partition(GIVEN_BACK)[2]


def test_a_stuck_terminal_is_not_waited_for(start: Start) -> None:
    screen = start()
    screen.expect("stalled")
    # Nobody reads from here on. Each of these draws the whole screen, as far as the terminal takes it.
    for _ in range(60):
        screen.type("\x0c")
        screen.resize(250, 70)
        screen.resize(200, 60)
    screen.type("q")
    assert screen.process.wait(scaled(LIMIT_S)) == 0


def test_a_terminal_that_takes_nothing_drops_frames_and_is_given_back_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distrun.dashboard.terminal.GIVE_BACK_S", 0.1)
    ours, its = os.openpty()
    page: list[Line] = [((letter * 80, text.PLAIN),) for letter in "abcdefghijklmnopqrstuvwx"]
    with Terminal(its, its) as screen:
        for _ in range(1000):
            if not screen.draw(page):
                break
            screen.redraw()
        assert screen.is_behind
        assert not select.select([], [screen.out], [], 0)[1]
    said = b""
    while select.select([ours], [], [], 0)[0]:
        said += os.read(ours, 1 << 20)
    assert said.decode().endswith(GIVEN_BACK), "what it had not taken was thrown away"
    for fd in (ours, its):
        os.close(fd)


def test_a_pasted_answer_does_not_stop_the_job_and_a_typed_one_does(start: Start, record: Path) -> None:
    screen = start()
    screen.expect("stalled")
    screen.type("\x1b[200~xyes\r\x1b[201~")
    screen.type("x")
    screen.expect("stop job calm-otter-7f3?")
    screen.type("\x1b[200~yes\r\x1b[201~n")
    screen.expect("the job goes on")
    assert not asked(record, "stop")
    screen.type("x")
    screen.expect("stop job calm-otter-7f3?", 2)
    screen.type("yes\r")
    wait_until(lambda: asked(record, "stop"), LIMIT_S, "a stop")
    screen.type("q")
    assert screen.ends() == 0


def test_no_span_brings_escape_sequences_of_its_own() -> None:
    line = (("\x1b[2Jname\x07", text.BOLD), (" \x9bx\u202e", text.PLAIN))
    assert text.encode(line, True) == "\x1b[1mname\x1b[0m x"
