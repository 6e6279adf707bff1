from __future__ import annotations

import pytest
from screen import Screen

from distrun.cli.screen import HEIGHT, Region, StreamBars, chosen, clip, width


def group(name: str, *bars: str) -> StreamBars:
    return StreamBars(f"{name}@a-host | ".encode(), f"{name} | ".encode(), [bar.encode() for bar in bars])


def texts(lines: list[bytes]) -> list[str]:
    return [line.decode() for line in lines]


def test_lines_are_drawn_again_in_place() -> None:
    region, screen = Region(), Screen(40, 10)
    screen.write(b"first\n")
    screen.write(region.draw([b"a | 1%", b"b | 1%"], 40))
    assert screen.lines == ["first", "a | 1%", "b | 1%", ""]
    assert region.draw([b"a | 1%", b"b | 1%"], 40) == b""
    screen.write(region.draw([b"a | 22%", b"b | 1%"], 40))
    screen.write(region.erase() + b"second\n" + region.draw([b"a | 3%", b"b | 2%"], 40))
    assert screen.lines == ["first", "second", "a | 3%", "b | 2%", ""]
    screen.write(region.draw([b"b | 2%"], 40))
    assert screen.lines == ["first", "second", "b | 2%", ""]
    screen.write(region.draw([], 40))
    assert screen.lines == ["first", "second", ""]
    assert region.erase() == b""
    assert not region.is_drawn


def test_more_bars_than_lines_are_counted_and_the_job_has_the_last_line() -> None:
    groups = [group(f"worker-{rank}", f"{rank}%") for rank in range(200)]
    lines = texts(chosen(groups, b"step 3", 80, 24))
    assert len(lines) == HEIGHT
    assert lines == [*(f"worker-{rank}@a-host | {rank}%" for rank in range(6)), "+194 more progress bars", "step 3"]
    assert texts(chosen(groups[:9], b"", 80, 24)) == [
        *(f"worker-{rank}@a-host | {rank}%" for rank in range(7)),
        "+2 more progress bars",
    ]
    assert len(chosen(groups[:8], b"", 80, 24)) == 8
    assert texts(chosen(groups[:8], b"s", 80, 24))[-2:] == ["+2 more progress bars", "s"]


def test_of_nested_bars_the_outer_ones_of_all_tasks_come_first() -> None:
    groups = [group(f"worker-{rank}", "outer", "inner", "innermost") for rank in range(5)]
    lines = texts(chosen(groups, b"", 80, 24))
    assert [line.partition(" | ")[2] for line in lines[:-1]] == ["outer", "inner", "outer", "inner", *["outer"] * 3]
    assert lines[-1] == "+8 more progress bars"


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6])
def test_a_terminal_of_few_rows_keeps_room_for_output(rows: int) -> None:
    lines = chosen([group(f"worker-{rank}", "1%") for rank in range(9)], b"step 3", 80, rows)
    assert len(lines) <= max(1, rows - 2)
    assert lines[-1] == b"step 3"


def test_a_prefix_that_takes_more_than_half_of_a_narrow_terminal_is_shortened_or_left_out() -> None:
    groups = [group("worker-1", "50%")]
    assert [chosen(groups, b"", columns, 24) for columns in (80, 30, 12)] == [
        [b"worker-1@a-host | 50%"],
        [b"worker-1 | 50%"],
        [b"50%"],
    ]


def test_a_terminal_that_has_become_narrower_broke_the_lines_that_are_taken_away() -> None:
    region = Region()
    region.draw([b"x" * 70, b"y" * 20], 80)
    assert region.erase(columns=30) == b"\r\x1b[%dA\x1b[J" % (3 + 1)
    region.draw([b"x" * 70, b"y" * 20], 80)
    assert region.draw([b"x" * 70], 30) == b"\r\x1b[4A\x1b[J" + b"x" * 29 + b"\x1b[K\n"
    region.draw([b"x" * 70], 80)
    assert region.erase(columns=200) == b"\r\x1b[1A\x1b[J"


@pytest.mark.parametrize(
    ("line", "columns", "cut"),
    [
        (b"abcdef", 4, b"abcd"),
        ("█" * 9, 4, "█" * 4),
        (b"\x1b[32mabc\x1b[0mdef", 4, b"\x1b[32mabc\x1b[0md\x1b[0m"),
        ("日本語", 5, "日本"),
        ("e\u0301e\u0301e\u0301", 2, "e\u0301e\u0301"),
        (b"a\tb\x07c\xff", 9, "a b c\ufffd"),
        (b"\x1b[5Cab\x1b", 9, b"ab\x1b[0m"),
        ("a\u200bb", 2, "a b"[:2]),
        (b"abc", 0, b""),
        ("日", -1, ""),
    ],
)
def test_lines_are_cut_to_the_columns_of_a_terminal(line: bytes | str, columns: int, cut: bytes | str) -> None:
    line, cut = (each.encode() if isinstance(each, str) else each for each in (line, cut))
    assert clip(line, columns) == cut
    assert width(cut) <= max(0, columns)
