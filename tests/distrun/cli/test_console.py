from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distrun.cli import writer
from distrun.cli.console import Console, wants_colour
from distrun_runtime.coordinator import output

LIMIT_S = 60.0


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
            thread.join(LIMIT_S)
        return self.got


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    for fd in (made.out_read, made.err_read):
        os.close(fd)


def console(reader: Reader, **more: object) -> Console:
    return Console({}, out_fd=reader.out, err_fd=reader.err, **more)  # type: ignore[arg-type]


def test_streams_go_to_their_own_places_with_prefixes(reader: Reader) -> None:
    reader.start()
    printer = console(reader)
    printer.output("worker-1", "d2", "out", b"one\ntw", 0)
    printer.output("worker-0", "d1", "out", b"other\n", 0)
    printer.output("worker-1", "d2", "err", b"warned\n", 6)
    printer.output("worker-1", "d2", "out", b"o\nlast", 13)
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
    monkeypatch.setattr(output, "QUEUE_LIMIT", 64 * 1024)
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
            printer.output("worker-0", "h", stream, data, at)
            expected[stream] += data
    assert time.monotonic() - begun < LIMIT_S
    reader.start()
    assert reader.finish(printer) == expected


def test_own_words_are_never_dropped_for_want_of_room(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "QUEUE_LIMIT", 10)
    printer = console(reader)
    for number in range(100):
        printer.say("word %d" % number)
    reader.start()
    assert reader.finish(printer)["err"].count(b"distrun: word") == 100


def test_what_is_in_no_log_is_kept_up_to_a_limit_and_then_counted(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "QUEUE_LIMIT", 10)
    monkeypatch.setattr(output, "UNLOGGED_LIMIT", 300_000)
    printer = console(reader, prefix=False)
    for _ in range(10):
        printer.output("worker-0", "h", "out", b"y" * 65535 + b"\n", None)
    reader.start()
    got = reader.finish(printer)
    assert len(got["out"]) < 10 * 65536
    assert len(got["out"]) % 65536 == 0


def test_a_reader_that_goes_away_ends_the_printing_there_only(reader: Reader) -> None:
    printer = console(reader)
    os.close(reader.out_read)
    reader.out_read = os.dup(reader.err_read)
    for _ in range(100):
        printer.output("worker-0", "h", "out", b"z" * 10000 + b"\n", None)
    printer.say("still here")
    thread = threading.Thread(target=reader._read, args=("err", reader.err_read))
    thread.start()
    printer.close()
    os.close(reader.out)
    os.close(reader.err)
    thread.join(LIMIT_S)
    assert reader.got["err"] == b"distrun: still here\n"


def test_pause_holds_the_output_and_goes_on_again(reader: Reader) -> None:
    reader.start()
    printer = console(reader)
    printer.toggle_pause()
    printer.output("worker-0", "h", "out", b"later\n", None)
    time.sleep(0.3)
    assert reader.got["out"] == b""
    printer.toggle_pause()
    assert reader.finish(printer)["out"] == b"worker-0@h | later\n"


def test_closing_ends_a_pause(reader: Reader) -> None:
    reader.start()
    printer = console(reader)
    printer.toggle_pause()
    printer.output("worker-0", "h", "out", b"later\n", None)
    assert reader.finish(printer)["out"] == b"worker-0@h | later\n"


def test_a_log_that_vanished_is_said(reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "QUEUE_LIMIT", 10)
    printer = console(reader, prefix=False)
    printer.attach(lambda task: tmp_path / "gone")
    printer.toggle_pause()
    printer.output("worker-0", "h", "out", b"0123456789ab", 0)
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
    printer.output("server-0", "h", "out", b"x\n", 0)
    assert reader.finish(printer)["out"] == b"\x1b[38;5;67mserver-0@h\x1b[0m | x\n"


def test_on_a_terminal_the_order_of_both_streams_is_kept() -> None:
    main, terminal = os.openpty()
    other = os.dup(terminal)
    printer = Console({"NO_COLOR": "1"}, out_fd=terminal, err_fd=other)
    for number in range(20):
        printer.output("worker-0", "h", "out" if number % 2 else "err", b"%d\n" % number, None)
    printer.close()
    data = b""
    while data.count(b"\n") < 20:
        data += os.read(main, 65536)
    assert [int(line.split()[-1]) for line in data.splitlines()] == list(range(20))
    for fd in (main, terminal, other):
        os.close(fd)


def test_a_stuck_terminal_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "STUCK_S", 0.3)
    main, terminal = os.openpty()
    printer = Console({}, out_fd=terminal, err_fd=terminal)
    printer.output("worker-0", "h", "out", b"x\n" * 200_000, None)
    begun = time.monotonic()
    printer.close()
    assert time.monotonic() - begun < 30
    os.close(main)  # the printing thread still sits in a write; now that fails
    printer._writers["out"]._thread.join(LIMIT_S)
    assert not printer._writers["out"]._thread.is_alive()
    os.close(terminal)
