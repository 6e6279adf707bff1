from __future__ import annotations

import random
import re

import pytest

from distrun.cli.screen import HOLD_S, LINE_LIMIT, NAMES, PROGRESS_S, SETTLE_S, STDERR, Feed, prefix


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_are_whole_whatever_the_pieces(size: int) -> None:
    data = "one\ntwo ü\n\nthree".encode()
    feed = Feed(b"w | ")
    printed = b"".join(feed.feed(data[at : at + size], 0.0) for at in range(0, len(data), size)) + feed.flush()
    assert printed.decode() == "w | one\nw | two ü\nw | \nw | three\n"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_without_a_prefix_bytes_are_unchanged(size: int) -> None:
    data = b"a\r\nb\rc\0\xff\x1b[31m\n\n no newline"
    feed = Feed(b"", terminal=True)
    printed = b"".join(feed.feed(data[at : at + size], 0.0) for at in range(0, len(data), size)) + feed.flush()
    assert printed == data


def test_without_a_prefix_a_prompt_is_held_only_for_a_moment() -> None:
    feed = Feed(b"")
    assert feed.feed(b"name? ", 1.0) == b""
    assert feed.wait_s(1.0) == pytest.approx(HOLD_S)
    assert feed.due(1.0 + HOLD_S) == b"name? "
    assert feed.wait_s(2.0) is None


def test_a_finished_progress_bar_is_one_line() -> None:
    assert Feed(b"w | ").feed(b"\r 10%\r 50%\r100%\ndone\r\n", 0.0) == b"w | 100%\nw | done\n"


def fed(feed: Feed, data: bytes, now: float) -> bytes:
    """What is printed when this arrives, and nothing more until it has settled."""
    return feed.feed(data, now - SETTLE_S) + feed.due(now)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_running_progress_bar_is_a_line_at_most_once_a_second(terminal: bool) -> None:
    feed = Feed(b"w | ", terminal=terminal)
    assert feed.feed(b"\r 1%", 0.0) == b""
    assert feed.wait_s(0.0) == pytest.approx(SETTLE_S)
    assert feed.due(SETTLE_S) == b"w |  1%\n"
    assert feed.wait_s(SETTLE_S) is None
    assert fed(feed, b"\r 2%", 0.2) == b""
    assert feed.wait_s(0.2) == pytest.approx(SETTLE_S + PROGRESS_S - 0.2)
    assert fed(feed, b"\r 3%", PROGRESS_S + SETTLE_S) == b"w |  3%\n"
    assert fed(feed, b"\r 4%", PROGRESS_S + 0.2) == b""
    assert feed.due(3 * PROGRESS_S) == b"w |  4%\n"
    assert feed.due(5 * PROGRESS_S) == b""
    assert feed.feed(b"\rdone\n", 5 * PROGRESS_S + 0.1) == b"w | done\n"


def test_a_state_that_has_come_in_half_is_not_shown() -> None:
    feed = Feed(b"w | ")
    assert feed.feed(b"\r 1%", 0.0) + feed.feed(b" of all", SETTLE_S / 2) + feed.due(SETTLE_S) == b""
    assert feed.due(SETTLE_S * 2) == b"w |  1% of all\n"
    assert feed.feed(b"\r 2% of all\r 3", 5.0) == b"w |  2% of all\n"
    assert feed.feed(b"\r%d" % 4, 5.01) == b""
    # A bar that never pauses is shown all the same.
    printed = [feed.feed(b"\r%d" % n, 6.0 + n * SETTLE_S / 2) for n in range(80)]
    assert len([each for each in printed if each]) == 2


@pytest.mark.parametrize("over", [b"\n", b""])
def test_the_last_state_of_a_progress_bar_is_printed_once_in_any_case(over: bytes) -> None:
    unseen, seen = Feed(b"w | "), Feed(b"w | ")
    assert fed(unseen, b"\r 1%", 0.1) == b"w |  1%\n"
    assert fed(seen, b"\r99%", 0.1) == b"w | 99%\n"
    assert unseen.feed(b"\r99%" + over, 0.2) + unseen.flush() == b"w | 99%\n"
    assert seen.feed(over, 0.2) + seen.flush() == b""


def test_a_progress_bar_that_ends_its_states_with_a_carriage_return_is_shown_too() -> None:
    feed = Feed(b"w | ")
    assert feed.feed(b"10%\r", 0.0) == b""
    assert feed.wait_s(0.0) == pytest.approx(HOLD_S)
    assert feed.due(HOLD_S) == b"w | 10%\n"
    assert feed.feed(b"20%\r30%\r", 0.5) == b""
    assert feed.due(HOLD_S + PROGRESS_S) == b"w | 30%\n"


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_windows_line_ends_are_no_progress_bars(size: int) -> None:
    data = b"one\r\n\r\ntwo\r\nthree\r\n"
    feed = Feed(b"w | ")
    pieces = [feed.feed(data[at : at + size], at / 100) for at in range(0, len(data), size)]
    assert b"".join(pieces) == b"w | one\nw | \nw | two\nw | three\n"
    assert feed.flush() == b""


def test_lines_around_a_progress_bar_are_neither_delayed_nor_torn() -> None:
    feed = Feed(b"w | ")
    assert feed.feed(b"before\n\r 1%", 0.0) == b"w | before\n"
    assert feed.feed(b"\r 2%\nafter\nhalf a li", 0.1) == b"w |  2%\nw | after\n"
    assert feed.due(9.0) == b""
    assert feed.feed(b"ne\n", 9.1) == b"w | half a line\n"


def test_many_short_progress_bars_print_only_what_they_come_to() -> None:
    feed = Feed(b"w | ")
    printed = b"".join(feed.feed(b"\r  0%%\r 50%%\r%d: 100%%\n" % n, n / 100) for n in range(5))
    assert printed == b"".join(b"w | %d: 100%%\n" % n for n in range(5))


def test_a_running_progress_bar_needs_no_memory() -> None:
    feed = Feed(b"w | ")
    printed = [feed.feed(b"\r%d" % percent, percent / 10) for percent in range(100_000)]
    assert sum(map(bool, printed)) <= 10_001
    assert feed.flush() == b"w | 99999\n"
    assert len(repr(feed)) < 2000


OUTER, INNER = b"\r%d%% epochs", b"\n\r%d%% batches\x1b[A"


def nested(feed: Feed, size: int) -> bytes:
    """What is printed of two epochs of tqdm bars below each other, in pieces, within 4 s."""
    data = []
    for epoch in range(2):
        data.append(OUTER % (50 * epoch))
        data += [INNER % (10 * batch) for batch in range(11)]
        data += [b"\n\r           \x1b[A", b"\r         \repoch %d is over\n" % epoch]
    data += [OUTER % 100, b"\n", b"end\n"]
    printed, now = b"", 0.0
    for piece in data:
        for at in range(0, len(piece), size):
            printed += feed.feed(piece[at : at + size], now)
        now += 0.15
        printed += feed.due(now)
    return printed + feed.flush()


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_bars_below_each_other_are_lines_at_most_once_a_second_each(size: int) -> None:
    lines = nested(Feed(b"w | "), size).decode().splitlines()
    assert all(line.startswith("w | ") and "\x1b" not in line for line in lines), lines
    assert [line for line in lines if "over" in line or "end" in line] == [
        "w | epoch 0 is over",
        "w | epoch 1 is over",
        "w | end",
    ]
    assert lines[0] in ("w | 0% epochs", "w | 0% batches")
    assert "w | 50% epochs" in lines
    assert "w | 100% epochs" in lines
    assert len([line for line in lines if "batches" in line]) <= 6, lines


def test_bars_in_place_are_given_as_they_stand_and_are_no_lines() -> None:
    feed = Feed(b"w | ", terminal=True, live=True)
    assert feed.feed(b"text\n\r 1%", 0.0) == b"w | text\n"
    assert feed.bars(SETTLE_S) == [b" 1%"]
    assert feed.feed(b"\r 2%", 0.1) + feed.due(9.0) == b""
    assert feed.bars(9.0) == [b" 2%"]
    feed.feed(b"\n\r5% inner\x1b[A", 9.1)
    feed.feed(b"\r 3%\n\r6% inner\x1b[A", 9.2)
    assert feed.bars(9.3) == [b" 3%", b"6% inner"]
    assert feed.feed(b"\r 4%\n\r          \x1b[A", 9.4) == b""
    assert feed.bars(9.5) == [b" 4%"]
    assert feed.flush() == b"w |  4%\n"
    assert feed.bars(9.3) == []


def test_a_cursor_that_goes_up_beyond_what_is_there_does_no_harm() -> None:
    feed = Feed(b"w | ")
    printed = feed.feed(b"\x1b[99999A\x1b[3Ftext\n\x1b[A" * 100 + b"\r\x1b[2K\x1b[H\x1b[31mred\x1b[0m\n", 0.0)
    printed += feed.flush()
    assert b"w | \x1b[31mred\x1b[0m\n" in printed
    assert all(line.startswith(b"w | ") for line in printed.splitlines())
    assert b"\x1b" not in re.sub(rb"\x1b\[\d*m", b"", printed)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_no_line_is_lost_and_each_has_its_prefix(seed: int) -> None:
    chance = random.Random(seed)
    parts = [b"\r", b"\n", b"\r\n", b"\x1b[", b"\x1b[32m", b" 5%", b"\xe2\x96\x88", b"   "]
    parts += [b"\x1b[A", b"\n\rinner\x1b[A"] if seed % 2 else []  # these overwrite lines, so some are lost
    data, count = b"", 0
    for _ in range(300):
        if chance.random() < 0.2:
            data += b"\nline %d.\n" % count
            count += 1
        data += chance.choice(parts)
    feed, printed, at, now = Feed(b"w | "), b"", 0, 0.0
    while at < len(data):
        size = chance.randint(1, 40)
        printed += feed.feed(data[at : at + size], now) + feed.due(now)
        at, now = at + size, now + chance.random()
        wait_s = feed.wait_s(now)
        assert wait_s is None or 0 <= wait_s <= PROGRESS_S
    printed += feed.flush()
    assert all(line.startswith(b"w | ") for line in printed.splitlines())
    if seed % 2 == 0:
        assert [number for number in range(count) if b"line %d." % number not in printed] == []


def luminance(colour: int) -> float:
    """Relative luminance of one of the 256 colours (WCAG 2)."""
    levels = (0, 95, 135, 175, 215, 255)
    parts = [levels[(colour - 16) // step % 6] / 255 for step in (36, 6, 1)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_colours_of_prefixes_can_be_read_on_dark_and_on_light() -> None:
    for colour in [STDERR, *(colour for colours in NAMES.values() for colour in colours)]:
        assert min(1.05 / (luminance(colour) + 0.05), (luminance(colour) + 0.05) / 0.05) >= 3.4, colour
    assert STDERR not in [colour for colours in NAMES.values() for colour in colours]


def test_each_worker_has_a_colour_of_its_own_and_keeps_it() -> None:
    names = ["worker-%d" % rank for rank in range(12)] + ["server-0", "scheduler"]
    prefixes = [prefix(name, "d1", coloured=True) for name in names]
    colours = [re.match(rb"\x1b\[38;5;(\d+)m", each)[1] for each in prefixes]  # type: ignore[index]
    assert len(set(colours)) == len(names)
    assert prefixes[3] == prefix("worker-3", "d1", coloured=True)
    assert prefix("worker-3", "d2", coloured=True).startswith(prefixes[3].partition(b"w")[0])
    assert prefix("worker-3", "d1") == prefix("worker-3", "d1", is_error=True) == b"worker-3@d1 | "
    for each in prefixes:
        assert re.sub(rb"\x1b\[[\d;]*m", b"", each).endswith(b"@d1 | ")


def test_lines_of_stderr_can_be_told_from_those_of_stdout() -> None:
    out, err = (prefix("worker-3", "d1", is_error, coloured=True) for is_error in (False, True))
    assert err == out.replace(b" | ", b" \x1b[38;5;160m|\x1b[0m ")


def test_an_endless_line_is_cut() -> None:
    feed = Feed(b"w | ")
    printed = feed.feed(b"x" * (LINE_LIMIT + 1), 0.0)
    assert printed == b"w | " + b"x" * (LINE_LIMIT + 1) + b"\n"
    assert feed.flush() == b""


def test_colours_of_one_line_do_not_run_into_the_next_on_a_terminal() -> None:
    assert Feed(b"w | ", terminal=True).feed(b"\x1b[31mred\n", 0.0) == b"w | \x1b[31mred\x1b[0m\n"
    assert Feed(b"w | ").feed(b"\x1b[31mred\n", 0.0) == b"w | \x1b[31mred\n"
