from __future__ import annotations

import pytest

from distrun.cli.lines import HOLD_S, LINE_LIMIT, PROGRESS_S, Feed


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


def test_a_running_progress_bar_is_shown_now_and_then_on_a_terminal() -> None:
    feed = Feed(b"w | ", terminal=True)
    assert feed.feed(b"\r 1%", 0.0) == b"w |  1%\n"
    assert feed.feed(b"\r 2%", 0.1) == b""
    assert feed.wait_s(0.1) == pytest.approx(PROGRESS_S - 0.1)
    assert feed.feed(b"\r 3%", PROGRESS_S) == b"w |  3%\n"
    assert feed.feed(b"\rdone\n", PROGRESS_S + 0.1) == b"w | done\n"


def test_a_running_progress_bar_is_not_shown_elsewhere_and_needs_no_memory() -> None:
    feed = Feed(b"w | ")
    for percent in range(100_000):
        assert feed.feed(b"\r%d" % percent, percent / 10) == b""
    assert feed.flush() == b"w | 99999\n"


def test_an_endless_line_is_cut() -> None:
    feed = Feed(b"w | ")
    printed = feed.feed(b"x" * (LINE_LIMIT + 1), 0.0)
    assert printed == b"w | " + b"x" * (LINE_LIMIT + 1) + b"\n"
    assert feed.flush() == b""


def test_colours_of_one_line_do_not_run_into_the_next_on_a_terminal() -> None:
    assert Feed(b"w | ", terminal=True).feed(b"\x1b[31mred\n", 0.0) == b"w | \x1b[31mred\x1b[0m\n"
    assert Feed(b"w | ").feed(b"\x1b[31mred\n", 0.0) == b"w | \x1b[31mred\n"
