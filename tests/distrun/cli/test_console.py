from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from distrun_cli import Distrun
from screen import Screen
from slowness import scaled

from distrun import formats
from distrun.cli import console as printing
from distrun.cli import status
from distrun.cli.console import Console, has_symbols, wants_colour
from distrun.cli.screen import HOLD_S
from distrun_runtime.coordinator import clients

LIMIT_S = 60.0
NO_THREAD = RuntimeError("can't start new thread")


def output(console: Console, task: str, host: str, stream: str, data: bytes, at: int | None) -> None:
    """Have bytes of a task printed; they begin at byte `at` of its log file."""
    console.show(clients.OutputPiece(data, task, host, stream, at, len(data)))


class Reader:
    """Two pipes; their ends are read when told to."""

    def __init__(self) -> None:
        self.out_read, self.out = os.pipe()
        self.err_read, self.err = os.pipe()
        self.got = {"out": b"", "err": b""}
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        for name, fd in (("out", self.out_read), ("err", self.err_read)):
            thread = threading.Thread(target=self._read, args=(name, fd))
            thread.start()
            self._threads.append(thread)

    def _read(self, name: str, fd: int) -> None:
        while data := os.read(fd, 65536):
            self.got[name] += data

    def finish(self, console: Console) -> dict[str, bytes]:
        console.close()
        os.close(self.out)
        os.close(self.err)
        for thread in self._threads:
            thread.join(scaled(LIMIT_S))
        return self.got


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    for fd in (made.out_read, made.err_read):
        os.close(fd)


def console(reader: Reader, **more: object) -> Console:
    return Console({}, out_fd=reader.out, err_fd=reader.err, **more)  # type: ignore[arg-type]


def interrupt_start(monkeypatch: pytest.MonkeyPatch, err: BaseException, at: int) -> None:
    """Have the start of a thread fail, from the `at`-th one on."""
    started, counts = threading.Thread.start, iter(range(1, 1000))

    def start(self: threading.Thread) -> None:
        if next(counts) >= at:
            raise err
        started(self)

    monkeypatch.setattr(threading.Thread, "start", start)


def test_a_job_that_prints_nothing_starts_no_thread(reader: Reader) -> None:
    before = set(threading.enumerate())
    console = Console({}, out_fd=reader.out, err_fd=reader.err)
    console.start()
    console.end_output()
    assert set(threading.enumerate()) <= before
    console.say("over")
    assert set(threading.enumerate()) - before
    reader.start()
    assert reader.finish(console) == {"out": b"", "err": b"distrun: over\n"}


def test_what_comes_after_an_interrupt_is_left_out_also_if_nothing_was_printed_before(reader: Reader) -> None:
    console = Console({}, out_fd=reader.out, err_fd=reader.err)
    console.attach(lambda task: Path("/none"), "job")
    console.start()
    console.leave_out(2048)
    reader.start()
    assert reader.finish(console)["err"] == b"distrun: 2.0 KiB of output are not shown: distrun logs job\n"


def test_an_interrupt_is_noted_without_a_thread_for_all_that_comes_later(reader: Reader) -> None:
    printer = console(reader, prefix=False)
    printer.start()
    before = threading.active_count()
    printer.leave_out()
    assert threading.active_count() == before
    for _ in range(100):
        output(printer, "worker-0", "h", "out", b"y" * 65535 + b"\n", None)
    reader.start()
    got = reader.finish(printer)
    assert len(got["out"]) < 1 << 19, "what the pipe held, and the last words"
    assert b"of output are not shown" in got["err"]


@pytest.mark.parametrize("fails_at", [1, 2])
def test_where_no_thread_can_be_started_all_is_printed_by_the_caller(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    reader.start()
    interrupt_start(monkeypatch, NO_THREAD, fails_at)
    printer = console(reader)
    printer.attach(lambda task: Path("/none"), "job")
    printer.start()
    printer.leave_out(2048)
    output(printer, "worker-0", "h", "out", b"one\ntw", 0)
    printer.say("hello")
    printer.hold("password: ")
    output(printer, "worker-0", "h", "out", b"o\n", 6)
    printer.say("later")
    printer.release("\n")
    printer.end_output()
    assert reader.finish(printer) == {
        "out": b"worker-0@h | one\nworker-0@h | two\n",
        "err": (
            b"distrun: hello\npassword: \ndistrun: later\ndistrun: 2.0 KiB of output are not shown: distrun logs job\n"
        ),
    }


@pytest.mark.parametrize("begin", [Console.hold, Console.toggle_pause])
def test_without_threads_the_end_of_a_question_or_a_pause_prints_what_came_meanwhile(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, begin: Callable[[Console], None]
) -> None:
    interrupt_start(monkeypatch, NO_THREAD, 1)
    printer = console(reader)
    printer.start()
    begin(printer)
    output(printer, "worker-0", "h", "out", b"one\n", 0)
    os.set_blocking(reader.out_read, False)
    with pytest.raises(BlockingIOError):
        os.read(reader.out_read, 100)
    (printer.release if begin is Console.hold else printer.toggle_pause)()
    assert os.read(reader.out_read, 100) == b"worker-0@h | one\n"


def test_without_threads_a_prompt_is_printed_with_what_comes_next(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_start(monkeypatch, NO_THREAD, 1)
    printer = console(reader, prefix=False)
    printer.start()
    output(printer, "worker-0", "h", "out", b"name? ", 0)
    time.sleep(HOLD_S)
    output(printer, "worker-1", "h", "out", b"one\n", 0)
    assert os.read(reader.out_read, 100) == b"one\nname? "


def test_without_threads_a_terminal_shows_progress_as_lines(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_start(monkeypatch, NO_THREAD, 1)
    printer = watched.console()
    printer.start()
    output(printer, "worker-0", "h", "err", b"\r 10%", None)
    time.sleep(HOLD_S)
    printer.follow("metrics", metrics(step=5))
    watched.shows("worker-0@h |  10%")


@pytest.mark.parametrize("what", ["pipe", "pipe after an interrupt", "terminal"])
def test_without_threads_a_reader_that_takes_nothing_is_given_up(
    reader: Reader, watched: Watched, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(printing, "STUCK_S", 0.3)
    monkeypatch.setattr(printing, "LAST_BYTES", 1 << 20)
    interrupt_start(monkeypatch, NO_THREAD, 1)
    fd = watched.terminal if what == "terminal" else reader.out
    printer = Console({}, out_fd=fd, err_fd=reader.err)
    printer.start()
    if what == "pipe after an interrupt":
        printer.leave_out()
    else:
        printer.toggle_pause()
    output(printer, "worker-0", "h", "out", b"x\n" * 200_000, None)
    if what == "pipe":
        waits, errors = select.select, iter([KeyboardInterrupt()])

        def wait(*args: Any) -> Any:
            for err in errors:
                raise err
            return waits(*args)

        monkeypatch.setattr(select, "select", wait)
    printer.close()
    assert os.get_blocking(fd)


def test_without_threads_a_reader_that_goes_away_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_start(monkeypatch, NO_THREAD, 1)
    (out_reader, out), (err_reader, err) = os.pipe(), os.pipe()
    told: list[int] = []
    printer = Console({}, out_fd=out, err_fd=err)
    printer.when_unread(lambda: told.append(1))
    printer.start()
    os.close(out_reader)
    for at, data in enumerate((b"one\n", b"two\n")):
        output(printer, "worker-0", "h", "out", data, 4 * at)
    printer.close()
    os.close(out)
    os.close(err)
    with open(err_reader, "rb") as file:
        assert file.read() == b""
    assert told == [1]


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupt_while_threads_begin_loses_nothing_of_what_comes_later(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    reader.start()
    interrupt_start(monkeypatch, KeyboardInterrupt(), at)
    printer = console(reader)
    printer.start()
    with pytest.raises(KeyboardInterrupt):
        printer.say("lost")
    monkeypatch.undo()
    printer.say("said")
    output(printer, "worker-0", "h", "out", b"one\n", 0)
    assert reader.finish(printer) == {"out": b"worker-0@h | one\n", "err": b"distrun: said\n"}
    assert "console" not in [each.name for each in threading.enumerate()], "closing ends what has begun"


def test_after_an_interrupt_before_the_thread_begins_nothing_is_drawn(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_start(monkeypatch, KeyboardInterrupt(), 1)
    printer = watched.console()
    printer.attach(lambda task: Path("/none"), "job", lambda: (1, 2), time.monotonic())
    with pytest.raises(KeyboardInterrupt):
        printer.start()
    printer.follow("metrics", metrics(step=5))
    printer.say("said")
    watched.shows("distrun: said")


def test_streams_go_to_their_own_places_with_prefixes(reader: Reader) -> None:
    reader.start()
    printer = console(reader)
    output(printer, "worker-1", "d2", "out", b"one\ntw", 0)
    output(printer, "worker-0", "d1", "out", b"other\n", 0)
    output(printer, "worker-1", "d2", "err", b"warned\n", 6)
    output(printer, "worker-1", "d2", "out", b"o\nlast", 13)
    printer.say("hello", "info")
    got = reader.finish(printer)
    assert got["out"] == b"worker-1@d2 | one\nworker-0@d1 | other\nworker-1@d2 | two\nworker-1@d2 | last\n"
    assert got["err"] == b"worker-1@d2 | warned\ndistrun: hello\n"


def test_levels_are_filtered_and_named(reader: Reader) -> None:
    reader.start()
    printer = console(reader, level="warning")
    for level in ("debug", "info", "warning", "error"):
        printer.say(level + "!", level)
    assert reader.finish(printer)["err"] == b"distrun: warning: warning!\ndistrun: error: error!\n"


def test_a_reader_that_sleeps_stalls_nobody_and_loses_nothing(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the limit the printer remembers places in the log file; both streams of a task are in one file."""
    monkeypatch.setattr(clients, "QUEUE_LIMIT", 64 * 1024)
    log = tmp_path / "worker-0.log"
    printer = console(reader, prefix=False)
    printer.attach(lambda task: tmp_path / (task + ".log"))
    expected = {"out": b"", "err": b""}
    begun = time.monotonic()
    with log.open("wb", buffering=0) as file:
        for number in range(3000):
            stream = "err" if number % 5 == 0 else "out"
            data = b"%d %s\n" % (number, b"x" * 300)
            at = file.tell()
            file.write(data)
            output(printer, "worker-0", "h", stream, data, at)
            expected[stream] += data
    assert time.monotonic() - begun < LIMIT_S
    reader.start()
    assert reader.finish(printer) == expected


def test_own_words_are_never_dropped_for_want_of_room(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "QUEUE_LIMIT", 10)
    printer = console(reader)
    for number in range(100):
        printer.say("word %d" % number)
    reader.start()
    assert reader.finish(printer)["err"].count(b"distrun: word") == 100


def test_what_is_in_no_log_is_kept_up_to_a_limit_and_then_counted(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "QUEUE_LIMIT", 10)
    monkeypatch.setattr(clients, "UNLOGGED_LIMIT", 300_000)
    printer = console(reader, prefix=False)
    for _ in range(10):
        output(printer, "worker-0", "h", "out", b"y" * 65535 + b"\n", None)
    reader.start()
    got = reader.finish(printer)
    assert len(got["out"]) < 10 * 65536
    assert len(got["out"]) % 65536 == 0


def test_a_reader_that_goes_away_ends_the_printing_there_only(reader: Reader) -> None:
    printer = console(reader)
    os.close(reader.out_read)
    reader.out_read = os.dup(reader.err_read)
    for _ in range(100):
        output(printer, "worker-0", "h", "out", b"z" * 10000 + b"\n", None)
    printer.say("still here")
    thread = threading.Thread(target=reader._read, args=("err", reader.err_read))
    thread.start()
    printer.close()
    os.close(reader.out)
    os.close(reader.err)
    thread.join(scaled(LIMIT_S))
    assert reader.got["err"] == b"distrun: still here\n"


def test_after_an_interrupt_the_backlog_is_left_out_and_one_line_says_how_much(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "QUEUE_LIMIT", 64 * 1024)
    log = tmp_path / "worker-0.log"
    printer = console(reader, prefix=False)
    printer.attach(lambda task: tmp_path / (task + ".log"), "calm-otter")
    line = b"%s\n" % (b"x" * 1023)
    log.write_bytes(line * 4000)
    for number in range(2000):
        output(printer, "worker-0", "h", "err" if number % 5 == 0 else "out", line, 1024 * number)
    printer.say("before")
    printer.leave_out()
    for number in range(2000, 4000):
        output(printer, "worker-0", "h", "out", line, 1024 * number)
    output(printer, "worker-0", "h", "out", b"the last words\n", None)
    reader.start()
    got = reader.finish(printer)
    assert len(got["out"]) < 2 * printing.LAST_BYTES + (1 << 17), "what the pipe held, and the last words"
    assert got["out"].endswith(b"the last words\n")
    assert b"distrun: before\n" in got["err"]
    *_, said = got["err"].decode().splitlines()
    shown = len(got["out"]) + got["err"].count(line) * len(line) - len(b"the last words\n")
    left_out = formats.size(4000 * 1024 - shown)
    assert said == f"distrun: {left_out} of output are not shown: distrun logs calm-otter"


def test_ctrl_c_while_the_last_output_is_printed_leaves_out_the_rest(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    printer = console(reader, prefix=False)
    for _ in range(100):
        output(printer, "worker-0", "h", "out", b"y" * 65535 + b"\n", None)

    joined = printing.Writer.join

    def interrupted(self: printing.Writer, limit_s: float | None) -> None:
        monkeypatch.setattr(printing.Writer, "join", begins_to_read)
        raise KeyboardInterrupt

    def begins_to_read(self: printing.Writer, limit_s: float | None) -> None:
        monkeypatch.setattr(printing.Writer, "join", joined)
        reader.start()
        joined(self, limit_s)

    monkeypatch.setattr(printing.Writer, "join", interrupted)
    got = reader.finish(printer)
    assert len(got["out"]) < 1 << 18, "what the pipe held, and the piece that was being written"
    assert b"of output are not shown" in got["err"]


def test_pause_holds_the_output_and_goes_on_again(reader: Reader) -> None:
    reader.start()
    printer = console(reader)
    printer.toggle_pause()
    output(printer, "worker-0", "h", "out", b"later\n", None)
    time.sleep(0.3)
    assert reader.got["out"] == b""
    printer.toggle_pause()
    assert reader.finish(printer)["out"] == b"worker-0@h | later\n"


def test_closing_ends_a_pause(reader: Reader) -> None:
    reader.start()
    printer = console(reader)
    printer.toggle_pause()
    output(printer, "worker-0", "h", "out", b"later\n", None)
    assert reader.finish(printer)["out"] == b"worker-0@h | later\n"


def test_a_log_that_vanished_is_said(reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "QUEUE_LIMIT", 10)
    printer = console(reader, prefix=False)
    printer.attach(lambda task: tmp_path / "gone")
    printer.toggle_pause()
    output(printer, "worker-0", "h", "out", b"0123456789ab", 0)
    printer.toggle_pause()
    reader.start()
    assert b"12 bytes not shown" in reader.finish(printer)["out"]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"CLICOLOR_FORCE": "1"}, True),
        ({"CLICOLOR_FORCE": "0"}, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_colour_is_a_matter_of_the_environment_where_there_is_no_terminal(
    env: dict[str, str], expected: bool, tmp_path: Path
) -> None:
    with (tmp_path / "file").open("w") as file:
        assert wants_colour(file.fileno(), env) is expected


def test_prefixes_are_coloured_by_role_when_wanted(reader: Reader) -> None:
    reader.start()
    printer = Console({"FORCE_COLOR": "1"}, out_fd=reader.out, err_fd=reader.err)
    output(printer, "server-0", "h", "out", b"x\n", 0)
    assert reader.finish(printer)["out"] == b"\x1b[38;5;67mserver-0@h\x1b[0m | x\n"


def test_on_a_terminal_the_order_of_both_streams_is_kept() -> None:
    main, terminal = os.openpty()
    other = os.dup(terminal)
    printer = Console({"NO_COLOR": "1"}, out_fd=terminal, err_fd=other)
    for number in range(20):
        output(printer, "worker-0", "h", "out" if number % 2 else "err", b"%d\n" % number, None)
    printer.close()
    data = b""
    while data.count(b"\n") < 20:
        data += os.read(main, 65536)
    assert [int(line.split()[-1]) for line in data.splitlines()] == list(range(20))
    for fd in (main, terminal, other):
        os.close(fd)


def test_a_stuck_terminal_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printing, "STUCK_S", 0.3)
    main, terminal = os.openpty()
    printer = Console({}, out_fd=terminal, err_fd=terminal)
    output(printer, "worker-0", "h", "out", b"x\n" * 200_000, None)
    begun = time.monotonic()
    printer.close()
    assert time.monotonic() - begun < 30
    os.close(main)  # the printing thread still sits in a write; now that fails
    printer._writers["out"]._thread.join(scaled(LIMIT_S))
    assert not printer._writers["out"]._thread.is_alive()
    os.close(terminal)


class Watched:
    """A terminal of 80 columns and 24 rows, and what it shows of what a console prints."""

    def __init__(self, **env: str) -> None:
        self.main, self.terminal = os.openpty()
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.screen = Screen(80, 24)
        self.env = {"TERM": "xterm", "NO_COLOR": "1", "LANG": "C.UTF-8", **env}

    def console(self, **more: Any) -> Console:
        return Console(self.env, **{"out_fd": self.terminal, "err_fd": self.terminal, **more})

    def shows(self, *lines: str) -> None:
        """Wait until these are the terminal's lines, but for those that are matched by "..."."""
        until = time.monotonic() + scaled(LIMIT_S)
        while not self._has(lines):
            assert time.monotonic() < until, self.screen.lines
            if select.select([self.main], [], [], 0.1)[0]:
                self.screen.write(os.read(self.main, 65536))

    def _has(self, lines: Sequence[str]) -> bool:
        shown = self.screen.lines[:-1]
        if "..." in lines:
            shown = shown[len(shown) - len(lines) + 1 :]
            lines = lines[1:]
        return list(lines) == shown and self.screen.lines[-1] == ""

    def close(self) -> None:
        os.close(self.main)
        os.close(self.terminal)


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.close()


def metrics(**progress: Any) -> dict[str, Any]:
    return {"schema": "distrun.metrics/1", "progress": progress, "tasks": {}, "hosts": {}}


def test_the_jobs_line_stands_below_the_bars_and_output_scrolls_above(watched: Watched) -> None:
    printer = watched.console()
    printer.attach(lambda task: Path("/none"), "job", lambda: (1, 2), time.monotonic())
    printer.start()
    watched.shows("connect 0/1")
    printer.follow("event", {"event": "hello", "host": "h"})
    watched.shows("connect 1/1 · check 0/1")
    printer.follow("sync", {"text": "", "level": "info", "sync": {"ready": 0, "hosts": 1, "detail": "5%, 3 files"}})
    watched.shows("connect 1/1 · check 0/1 · sync 0/1 (5%, 3 files)")
    printer.follow("event", {"event": "state", "state": "running"})
    output(printer, "worker-0", "h", "err", b"\r 10%", None)
    output(printer, "worker-1", "h", "out", b"\r 20%", None)
    printer.follow("metrics", metrics(step=5, total=10, fraction=0.5, loss="nan"))
    watched.shows("...", "worker-0@h |  10%", "worker-1@h |  20%", "step 5/10 (50 %) · loss nan")
    assert watched.screen.lines[0].startswith("distrun: 2 tasks started in ")
    output(printer, "worker-1", "h", "err", b"said\n", None)
    watched.shows("...", "worker-1@h | said", "worker-0@h |  10%", "worker-1@h |  20%", "step 5/10 (50 %) · loss nan")
    printer.end_output()
    printer.say("over")
    printer.close()
    watched.shows("...", "worker-1@h | said", "worker-0@h |  10%", "worker-1@h |  20%", "distrun: over")


def test_the_jobs_line_goes_at_the_jobs_end_although_the_reader_of_stdout_is_slow(
    watched: Watched, tmp_path: Path
) -> None:
    distrun = Distrun(tmp_path)
    text = "import os; os.write(2, b'\\r' + b'x' * 90); os.write(1, (b'y' * 99 + b'\\n') * 20000)"
    env = {**watched.env, "CI": ""}
    words = ("-n", "1", "-s", "0", "--launcher", "local", sys.executable, "-c", text)
    argv = distrun.argv("launch", *words)
    with subprocess.Popen(
        argv, env={**distrun.env, **env}, cwd=distrun.work, stdout=subprocess.PIPE, stderr=watched.terminal
    ) as child:
        assert child.stdout is not None
        host = socket.gethostname().partition(".")[0]
        bar = f"worker-0@{host} | {'x' * 90}"  # as long as it is drawn in place, it is cut
        watched.shows("...", bar[:80], bar[80:])
        assert child.poll() is None
        assert len(child.stdout.read()) > 2_000_000
    assert child.returncode == 0


def test_nothing_is_drawn_while_a_question_stands_there_or_printing_is_paused(watched: Watched) -> None:
    printer = watched.console()
    output(printer, "worker-0", "h", "err", b"\r 10%", None)
    watched.shows("worker-0@h |  10%")
    printer.hold("password: ")
    output(printer, "worker-0", "h", "err", b"\r 20%", None)
    output(printer, "worker-1", "h", "out", b"later\n", None)
    printer.hold("another? ")
    printer.release("yes\n")
    printer.release("no\n")
    watched.shows("password: another? yes", "no", "worker-1@h | later", "worker-0@h |  20%")
    printer.toggle_pause()
    paused = "distrun: printing is paused, the job goes on; Ctrl-Z again to go on"
    watched.shows("password: another? yes", "no", "worker-1@h | later", paused)
    printer.toggle_pause()
    watched.shows("password: another? yes", "no", "worker-1@h | later", paused, "worker-0@h |  20%")
    printer.close()


def test_the_region_is_on_the_terminal_of_stderr_only(watched: Watched, reader: Reader) -> None:
    reader.start()
    printer = watched.console(out_fd=reader.out)
    output(printer, "worker-0", "h", "out", b"line\n\r 10%", None)
    output(printer, "worker-0", "h", "err", b"\r 20%", None)
    watched.shows("worker-0@h |  20%")
    printer.follow("metrics", metrics(step=5))
    watched.shows("worker-0@h |  20%", "step 5")
    assert reader.finish(printer)["out"] == b"worker-0@h | line\nworker-0@h |  10%\n"
    watched.shows("worker-0@h |  20%")


def test_a_terminal_of_stdout_alone_gets_lines_and_no_region(watched: Watched, reader: Reader) -> None:
    reader.start()
    printer = watched.console(err_fd=reader.err)
    assert not printer.draws
    output(printer, "worker-0", "h", "out", b"\r 10%", None)
    watched.shows("worker-0@h |  10%")
    printer.follow("sync", {"text": "sync 1/1", "level": "info"})
    output(printer, "worker-0", "h", "out", b"\r 20%\n", None)
    assert reader.finish(printer)["err"] == b"distrun: sync 1/1\n"
    watched.shows("worker-0@h |  10%", "worker-0@h |  20%")


@pytest.mark.parametrize("env", [{"CI": "true"}, {"TERM": "dumb"}, {"TERM": ""}])
def test_nothing_is_drawn_in_ci_and_on_a_dumb_terminal(env: dict[str, str]) -> None:
    watched = Watched(**env)
    printer = watched.console()
    assert not printer.draws
    printer.follow("event", {"event": "hello", "host": "h"})
    output(printer, "worker-0", "h", "err", b"\r 10%\r 20%\n", None)
    printer.close()
    watched.shows("worker-0@h |  20%")
    watched.close()


def test_quiet_has_bars_and_no_line_of_the_job(watched: Watched) -> None:
    printer = watched.console(level="error")
    assert not printer.draws
    printer.follow("metrics", metrics(step=5))
    printer.follow("sync", {"text": "sync 1/1", "level": "info"})
    output(printer, "worker-0", "h", "err", b"\r 10%", None)
    watched.shows("worker-0@h |  10%")
    printer.close()


def test_bars_of_200_workers_are_folded_and_a_resize_is_noticed(watched: Watched) -> None:
    printer = watched.console()
    for rank in range(200):
        output(printer, f"worker-{rank}", "h", "err", b"\r%d%%" % rank, None)
    watched.shows(*(f"worker-{rank}@h | {rank}%" for rank in range(7)), "+193 more progress bars")
    fcntl.ioctl(watched.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 5, 80, 0, 0))
    watched.shows("worker-0@h | 0%", "worker-1@h | 1%", "+198 more progress bars")
    printer.close()


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"LANG": "en_US.UTF-8"}, True),
        ({"LANG": "de_DE.utf8@euro"}, True),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "C"}, False),
        ({"LANG": "en_US.ISO-8859-1"}, False),
        ({"LC_CTYPE": "C.UTF-8"}, True),
        ({"LANG": "en_US.UTF-8", "PYTHONIOENCODING": "ascii:replace"}, False),
        ({"LC_CTYPE": "UTF-8", "LANG": "C"}, True),
        ({}, False),
    ],
)
def test_symbols_are_used_where_the_locale_is_utf8(env: dict[str, str], expected: bool) -> None:
    assert has_symbols(env) is expected


@pytest.mark.parametrize(("locale", "is_ascii"), [("C.UTF-8", False), ("C", True)])
def test_the_dashboard_draws_symbols_where_the_job_line_does(
    locale: str, is_ascii: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    monkeypatch.setenv("LC_ALL", locale)
    assert status.look(False).is_ascii is is_ascii
    assert status.look(True).is_ascii


def test_lines_that_come_one_by_one_are_all_shown_above_the_region(watched: Watched) -> None:
    printer = watched.console()
    output(printer, "worker-0", "h", "err", b"\r 10%", None)
    watched.shows("worker-0@h |  10%")
    for number in range(3000):
        output(printer, "worker-1", "h", "out", b"%d\n" % number, None)
    watched.shows("...", "worker-1@h | 2998", "worker-1@h | 2999", "worker-0@h |  10%")
    assert [line.rpartition(" ")[2] for line in watched.screen.lines[:-2]] == [str(n) for n in range(3000)]
    printer.close()
