from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from distrun_runtime.coordinator import logs
from distrun_runtime.coordinator.logs import Spool, TaskLog, Written


def test_streams_are_merged_in_the_order_of_arrival(tmp_path: Path) -> None:
    log = TaskLog(tmp_path / "a.log")
    assert log.add("out", 0, b"one\n") == Written(b"one\n", 0, 4)
    assert log.add("err", 0, b"two\n") == Written(b"two\n", 4, 4)
    assert log.add("out", 4, b"three\n") == Written(b"three\n", 8, 10)
    log.close()
    assert log.path.read_bytes() == b"one\ntwo\nthree\n"


def test_a_chunk_that_comes_twice_is_written_once(tmp_path: Path) -> None:
    log = TaskLog(tmp_path / "a.log")
    log.add("out", 0, b"abcd")
    assert log.add("out", 0, b"abcd") == Written(b"", None, 4)
    assert log.add("out", 2, b"cdef") == Written(b"ef", 4, 6)
    assert log.add("out", 1, b"bc") == Written(b"", None, 6)
    log.close()
    assert log.path.read_bytes() == b"abcdef"


def test_what_comes_after_a_gap_is_kept(tmp_path: Path) -> None:
    log = TaskLog(tmp_path / "a.log")
    log.add("out", 0, b"ab")
    assert log.add("out", 10, b"kl") == Written(b"kl", 2, 12)
    log.close()


def test_a_log_is_continued_where_it_stood(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"before\n")
    log = TaskLog(tmp_path / "a.log")
    assert log.add("out", 0, b"x").at == 7
    log.close()


def test_a_full_disk_is_said_once_and_stops_nothing(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    for task in ("a", "b"):
        (tmp_path / (task + ".log")).symlink_to("/dev/full")
    logs = Spool(tmp_path)
    assert logs.add("a", "out", 0, b"lost") == Written(b"lost", None, 4)
    assert logs.add("b", "out", 0, b"lost") == Written(b"lost", None, 4)
    assert "No space left on device" in logs.warning()
    assert logs.warning() == ""
    assert logs.flood("a") == "", "it has not printed much"
    assert logs.add("a", "out", 4, b"more").offset == 8
    logs.close()


def test_when_there_is_room_again_the_log_says_what_is_missing(tmp_path: Path) -> None:
    room = [6]

    def write(fd: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = os.write(fd, data[: room[0]])
        room[0] -= count
        return count

    log = TaskLog(tmp_path / "a.log", write)
    assert log.add("out", 0, b"abcd").at == 0
    assert log.add("out", 4, b"efgh").at is None
    assert log.add("out", 8, b"ijkl").at is None
    room[0] = 1000
    at = log.add("out", 12, b"mnop").at
    log.close()
    text = log.path.read_bytes()
    assert text == b"abcdef\n[distrun: 6 bytes are missing here: No space left on device]\nmnop"
    assert at == len(text) - 4


def test_a_disk_that_fills_is_said_once_at_90_percent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([0.5, 0.89, 0.9, 0.95, 0.8])
    monkeypatch.setattr(logs, "_used", lambda folder: next(used))
    made = logs.Spool(tmp_path)
    assert [made.filling() for _ in range(4)] == [
        "",
        f"the disk of {tmp_path} is 90% full; the tasks of this job have printed 0 MiB",
        "",
        "",
    ]


def test_tail_gives_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    assert logs.tail(path, 3) == []
    path.write_bytes(b"")
    assert logs.tail(path, 3) == []
    path.write_bytes(b"1\n2\r\n3\n4")
    assert logs.tail(path, 3) == ["2", "3", "4"]
    assert logs.tail(path, 0) == []
    path.write_bytes(b"\n\xff\n")
    assert logs.tail(path, 9) == ["", "\ufffd"]
    path.write_bytes(b"".join(b"%0100d\n" % number for number in range(5000)))
    assert [int(line) for line in logs.tail(path, 2000)] == list(range(3000, 5000))


def test_tail_gives_only_the_last_state_of_a_progress_bar(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"begin\n\r  0%\r 50%\r100%\nTraceback\r\n\r  1%\r  2%")
    assert logs.tail(path, 9) == ["begin", "100%", "Traceback", "  2%"]


def test_tail_of_a_file_without_line_ends_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * 3_000_000)
    [line] = logs.tail(path, 5)
    assert len(line) <= 1_200_000
