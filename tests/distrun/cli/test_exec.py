"""How the outputs of many hosts are shown."""

from __future__ import annotations

from distrun.cli.exec import Lines, folded


def test_equal_outputs_are_shown_once_under_the_folded_names() -> None:
    said = {"gpu01": b"one\n", "gpu03": b"two", "gpu02": b"one\n", "gpu04": b""}
    assert folded(said).decode() == (
        "---------------\ngpu[01-02] (2)\n---------------\none\n---------------\ngpu03\n---------------\ntwo\n"
    )


def test_nobody_said_anything_gives_nothing() -> None:
    assert folded({"a": b"", "b": b""}) == b""


def test_bytes_that_are_no_text_stay_as_they_are() -> None:
    assert b"\xff\x00\n" in folded({"a": b"\xff\x00"}, "stderr")


def test_lines_are_cut_with_their_prefix_and_the_last_one_is_ended() -> None:
    lines = Lines("a: ")
    assert lines.feed(b"one\ntw") == b"a: one\n"
    assert lines.feed(b"o\n\n") == b"a: two\na: \n"
    assert lines.feed(b"rest") == b""
    assert lines.end() == b"a: rest\n"
    assert lines.end() == b""
