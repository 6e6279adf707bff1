"""What the system tells of processes and of the host, as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrun_runtime.agent import procfs
from distrun_runtime.agent.procfs import PsRow, Rising, Stat

NAMES = st.binary(max_size=15) | st.sampled_from([b"a) b", b") R 1 1 1", b"((", b"a b c", b"", b"\n)", b"\xff) S 2 3"])
COUNTS = st.integers(0, 1 << 64)


def stat_line(name: bytes, ppid: int, sid: int, times: tuple[int, ...], start: int) -> bytes:
    fields = [b"S", *(b"%d" % each for each in (ppid, 7, sid, 0, -1, 0, 1, 2, 3, 4, *times, 20, 0, 1, 0, start))]
    return b"4711 (" + name + b") " + b" ".join(fields) + b" 2998272 362 18446744073709551615 1 1\n"


@given(NAMES, COUNTS, COUNTS, st.tuples(COUNTS, COUNTS, COUNTS, COUNTS), COUNTS)
def test_a_processs_row_is_read_whatever_the_program_is_called(
    name: bytes, ppid: int, sid: int, times: tuple[int, ...], start: int
) -> None:
    assert procfs.parse_stat(stat_line(name, ppid, sid, times, start)) == Stat(ppid, sid, sum(times), start)


@given(st.binary(max_size=300) | st.text(" :()\n0123456789 abkB", max_size=100).map(str.encode))
def test_what_is_no_such_file_is_left_out(data: bytes) -> None:
    for parse in (
        procfs.parse_stat,
        procfs.parse_statm,
        procfs.parse_io,
        procfs.busy_ticks,
        procfs.parse_load,
        procfs.parse_memory,
    ):
        parse(data)  # raises nothing
    procfs.parse_network(data)
    procfs.memory_group(data)
    procfs.limit(data)
    procfs.ps(data.decode("utf-8", "replace"))


@pytest.mark.parametrize(
    "parse", [procfs.parse_stat, procfs.parse_statm, procfs.parse_io, procfs.busy_ticks, procfs.parse_load]
)
def test_an_empty_file_tells_nothing(parse: object) -> None:
    assert parse(b"") is None  # type: ignore[operator]


def test_files_of_a_process() -> None:
    assert procfs.parse_statm(b"5021 1200 300 2 0 900 0\n") == (1200, 300)
    text = b"rchar: 7\nwchar: 8\nsyscr: 1\nsyscw: 1\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 0\n"
    assert procfs.parse_io(text) == (4096, 8192)
    assert procfs.memory_group(b"5:memory:/a/b\n4:cpu,cpuacct:/c\n0::/d\n") == ("/a/b", "/d")
    assert procfs.memory_group(b"9:name=systemd:/\n") == ("", "")
    assert [procfs.limit(text) for text in (b"1073741824\n", b"max\n", b"9223372036854771712\n", b"")] == [
        1073741824,
        None,
        None,
        None,
    ]


def test_files_of_a_host() -> None:
    assert procfs.busy_ticks(b"cpu  100 20 30 4000 500 6 7 8 9 1\ncpu0 1 1 1 1\n") == 100 + 20 + 30 + 6 + 7 + 8
    assert procfs.busy_ticks(b"cpu  100 20 30 4000 500 6 7\n") == 163, "an old kernel knows no stolen time"
    assert procfs.parse_load(b"2.92 5.75 5.28 15/447 23612\n") == 2.92
    assert procfs.parse_memory(b"MemTotal: 100 kB\nMemFree: 10 kB\nMemAvailable: 60 kB\n") == (102400, 40960)
    assert procfs.parse_memory(b"MemTotal: 100 kB\nMemFree: 10 kB\n") == (102400, 92160)
    head = b"Inter-|   Receive |  Transmit\n face |bytes packets errs|bytes\n"
    rows = b"    lo: 5 1 0 0 0 0 0 0 5 1 0 0 0 0 0 0\n  eth0:1:7 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0\n"
    assert procfs.parse_network(head + rows) == {"lo": (5, 5), "eth0:1": (7, 9)}


@pytest.mark.parametrize(
    ("time", "seconds"), [("00:00:07", 7), ("1-02:03:04", 93784), ("12:07.25", 727.25), ("0:00.00", 0)]
)
def test_times_of_ps_on_linux_and_macos(time: str, seconds: float) -> None:
    assert procfs.ps("  12   1  12  340 %s\nno line\n 1 2 3 x 0:00\n" % time) == [PsRow(12, 1, 12, 348160, seconds)]


@given(st.lists(st.integers(0, 1000)))
def test_a_counter_never_goes_back_and_counts_all_that_is_added(sums: list[int]) -> None:
    counter = Rising()
    values = [counter.note(each) for each in sums]
    assert values == sorted(values)
    assert counter.value == sum(max(0, new - old) for old, new in zip([0, *sums], sums, strict=False))
