from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from screen import Screen as Terminal

from distrun.cli.screen import KEEP_S, PROGRESS_S, ROWS, SETTLE_S, STRING_LIMIT, Feed, Screen, is_blank, shown

HISTORIES = Path(__file__).parent / "golden" / "tqdm"
PREFIX = b"w | "

PARTS = [
    *[b"\r", b"\n", b"\r\n", b"\b", b"\t", b"\x07", b"\x0e", b"\0", b"\x7f", b"\xc2", b"\x9b", b"\xff", b"\xc2\x9b2J"],
    *[b"\x1b", b"\x1b[", b"\x1b[31m", b"\x1b[0m", b"\x1b[38;5;1", b"m", b"\x1b(B", b"\x1bM", b"\x1bc", b"\x1b]0;title"],
    *[b"\x07", b"\x1b\\", b"\x1bP", b"\x1b[?25l", b"\x1b[2K", b"\x1b[K", b"\x1b[J", b"\x1b[2J", b"\x1b[A", b"\x1b[99A"],
    *[b"\x1b[B", b"\x1b[3E", b"\x1b[F", b"\x1b[H", b"\x1b[10;10H", b"\x1b[1G", b"\x1b[ q", b"\x1b[?1049h", b"\x1b[6n"],
    *[b"text", b" 50%|", "█▎日本e\u0301".encode(), b"   ", b"1;2"],
]
STREAM = st.lists(st.one_of(st.sampled_from(PARTS), st.binary(max_size=8)), max_size=60).map(b"".join)
SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=40)


def pieces(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    found, at, number = [], 0, 0
    while at < len(data):
        found.append(data[at : at + sizes[number % len(sizes)]])
        at, number = at + sizes[number % len(sizes)], number + 1
    return found


def leaks(data: bytes) -> list[bytes]:
    """What a terminal might obey, but for newlines, tabs and colours."""
    left = re.sub(rb"\x1b\[[\d;:]*m", b"", data)
    return re.findall(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]", left)


@given(STREAM, SIZES, st.booleans(), st.booleans())
def test_whatever_comes_in_whatever_pieces_only_whole_lines_and_colours_are_printed(
    data: bytes, sizes: Sequence[int], terminal: bool, live: bool
) -> None:
    feed, printed, now = Feed(PREFIX, terminal, live), b"", 0.0
    for piece in pieces(data, sizes):
        printed += feed.feed(piece, now) + feed.due(now)
        assert all(not leaks(bar) and b"\n" not in bar for bar in feed.bars(now))
        wait_s = feed.wait_s(now)
        assert wait_s is None or 0 <= wait_s <= max(PROGRESS_S, KEEP_S)
        now += 0.07
    printed += feed.due(now + 9) + feed.flush()
    assert leaks(printed) == []
    assert printed == b"" or printed.endswith(b"\n")
    assert all(line.startswith(PREFIX) for line in printed.split(b"\n")[:-1])


@given(STREAM.filter(lambda data: not re.search(rb"\x1b\[\d*[AF]", data)), SIZES)
def test_the_rows_are_the_same_in_whatever_pieces_they_come(data: bytes, sizes: Sequence[int]) -> None:
    whole, cut = Screen(), Screen()
    ended = [row.visible for row in whole.write(whole.clean(data), 0.0)]
    parts = [row.visible for piece in pieces(data, sizes) for row in cut.write(cut.clean(piece), 0.0)]
    assert parts == ended
    assert [row.visible for row in cut.flush()] == [row.visible for row in whole.flush()]


TEXT = st.text(st.characters(blacklist_categories=("Cc", "Cs")), max_size=30)


@given(st.lists(st.tuples(TEXT, st.sampled_from(["\n", "\r\n"])), max_size=30), SIZES)
def test_no_text_is_lost_where_lines_end_by_newlines(lines: list[tuple[str, str]], sizes: Sequence[int]) -> None:
    data = "".join(text + end for text, end in lines).encode()
    feed = Feed(PREFIX)
    printed = b"".join(feed.feed(piece, 0.0) for piece in pieces(data, sizes)) + feed.flush()
    assert printed == b"".join(PREFIX + text.encode() + b"\n" for text, _ in lines)


@given(st.lists(st.tuples(TEXT, st.sampled_from(["\x1b[31m", "\x1b[K", "\x1b[?25l", "\x1b(B", "\x1b]0;t\x07"]))))
def test_colours_and_what_is_dropped_cost_no_text(lines: list[tuple[str, str]]) -> None:
    feed = Feed(PREFIX)
    printed = feed.feed("".join(text + sequence + "\n" for text, sequence in lines).encode(), 0.0) + feed.flush()
    left = re.sub(rb"\x1b\[31m", b"", printed).decode()
    assert left == "".join(f"w | {text}\n" for text, _ in lines)


def test_a_string_for_the_terminal_ends_by_itself() -> None:
    feed = Feed(PREFIX)
    printed = feed.feed(b"a\x1b]0;title\nb\x1bPx\x1b\\c\n\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n", 0.0)
    assert printed == b"w | a\nw | bc\nw | link\n"
    assert feed.feed(b"\x1b]" + b"x" * (STRING_LIMIT + 3) + b"\n", 0.0) == b"w | xxx\n"


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_a_spinner_of_backspaces_is_a_bar_and_keeps_its_place(size: int) -> None:
    data = b"wait \x1b[32m|\x1b[0m" + b"".join(b"\b\x1b[32m%c\x1b[0m" % c for c in b"/-\\|" * 500)
    feed = Feed(PREFIX, live=True)
    for at in range(0, len(data), size):
        feed.feed(data[at : at + size], 0.0)
    (bar,) = feed.bars(1.0)
    assert re.sub(rb"\x1b\[\d*m", b"", bar) == b"wait |"
    assert len(bar) < 40
    assert re.sub(rb"\x1b\[\d*m", b"", feed.feed(b"\b\bdone\n", 2.0)) == b"w | waitdone\n"


def test_erasing_empties_the_row_and_rows_below_but_not_what_was_printed() -> None:
    feed = Feed(PREFIX, live=True)
    assert feed.feed(b"kept\n\r 10% of it all\r\x1b[K 20%", 0.0) == b"w | kept\n"
    assert feed.bars(1.0) == [b" 20%"]
    assert feed.feed(b"\r\x1b[K", 1.0) == b""
    assert feed.bars(2.0) == []
    feed.feed(b"\rone\n\rtwo\n\rthree\x1b[2A\r", 2.0)
    assert feed.bars(3.0) == [b"one", b"two", b"three"]
    feed.feed(b"\x1b[B\x1b[J", 3.0)
    assert feed.bars(4.0) == [b"one"]


def test_rows_that_are_rewritten_by_moving_up_are_shown_in_place_and_printed_in_the_end() -> None:
    """As rich draws: each line is erased from below, then all are written again."""
    feed, printed = Feed(PREFIX, live=True), b""
    printed += feed.feed(b"a 0\nb 0\nc 0", 0.0)
    for number in range(1, 9):
        printed += feed.feed(b"\r\x1b[2K\x1b[1A\x1b[2K\x1b[1A\x1b[2Ka %d\nb %d\nc %d" % ((number,) * 3), number / 4)
        printed += feed.due(number / 4 + 0.2)
    assert feed.bars(2.2) == [b"a 8", b"b 8", b"c 8"]
    printed += feed.feed(b"\nend\n", 2.3) + feed.flush()
    assert printed == b"w | a 0\nw | b 0\nw | a 8\nw | b 8\nw | c 8\nw | end\n"


def test_a_stream_has_ten_rows_at_most() -> None:
    feed = Feed(PREFIX, live=True)
    data = b"".join(b"\rrow %d\n" % number for number in range(30)) + b"\x1b[25A"
    printed = feed.feed(data, 0.0)
    for _ in range(3):
        printed += feed.feed(b"".join(b"\rbar %d\n" % number for number in range(25)) + b"\x1b[25A", 0.0)
    assert len(feed.bars(1.0)) <= ROWS
    assert len(feed._screen.rows) <= ROWS
    assert printed.startswith(b"w | row 0\nw | row 1\n")


@pytest.mark.parametrize("text", [b"", b"  \t", b"\x1b[31m \x1b[0m"])
def test_blanks_and_colours_alone_are_not_seen(text: bytes) -> None:
    assert is_blank(text)
    assert not is_blank(text + b"x")


def test_sequences_that_arise_from_what_is_dropped_are_dropped_too() -> None:
    assert shown(b"\xc2\xc2\x9b\x9b31m") == b"31m"
    assert leaks(Feed(PREFIX).feed(b"\xc2\x07\x9b2J\n", 0.0)) == []
    assert leaks(Feed(PREFIX).feed(b"\x1b\x07[2J\n", 0.0)) == []


# ---------------------------------------------------------------------- what tqdm 4.70 wrote, by its own updates


def history(name: str) -> list[bytes]:
    """One update of a bar, or one line, for each item."""
    lines = (HISTORIES / f"{name}.txt").read_text("utf-8").splitlines()
    return [line.encode().decode("unicode_escape").encode("latin-1") for line in lines]


NAMES = ["single", "nested", "nested_leave", "three", "said", "gone"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step_s", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("live", [True, False])
def test_of_tqdm_bars_no_rubbish_is_printed_and_the_end_is_that_of_a_terminal(
    name: str, step_s: float, live: bool
) -> None:
    terminal, feed, printed, now = Terminal(200, 24), Feed(PREFIX, live=live), b"", 0.0
    for item in history(name):
        terminal.write(item)
        printed += feed.feed(item, now) + feed.due(now + step_s)
        now += step_s
    printed += feed.flush()
    assert leaks(printed) == []
    lines = [line[len(PREFIX) :].rstrip() for line in re.sub(rb"\x1b\[\d*m", b"", printed).decode().splitlines()]
    final = [line.rstrip() for line in terminal.lines if line.strip()]
    if live:
        # A terminal keeps the rest of a longer text that was overwritten.
        assert [end[: len(line)] for line, end in zip(lines, final, strict=True)] == lines
    else:
        assert all(any(end.startswith(line) for line in lines) for end in final)


@pytest.mark.parametrize("name", NAMES)
def test_of_tqdm_bars_the_rows_shown_in_place_are_those_of_a_terminal(name: str) -> None:
    terminal, feed, now = Terminal(200, 24), Feed(PREFIX, live=True), 0.0
    printed = 0
    for item in history(name):
        terminal.write(item)
        printed += len(feed.feed(item, now).splitlines())
        now += SETTLE_S
        rows = [line.rstrip() for line in terminal.lines if line.strip()]
        bars = [re.sub(rb"\x1b\[\d*m", b"", bar).decode().rstrip() for bar in feed.bars(now)]
        assert [row[: len(bar)] for bar, row in zip(bars, rows[printed:], strict=True)] == bars, (item, rows)
