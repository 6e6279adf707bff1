from __future__ import annotations

import pytest

from distrun.dashboard.terminal import KeyDecoder


def all_keys(data: bytes, step: int = 1000) -> list[str]:
    decoder = KeyDecoder()
    return [key for at in range(0, len(data), step) for key in decoder.feed(data[at : at + step])]


TYPED = "qä".encode() + b"\x1b[A\x1bOB\x1b[5~\x1b[6~\x1b[1~\x1b[F\r\t\x1b[Z\x7f\x0c\x1b[1;5C\x1bxz"
MEANT = [
    "q",
    "ä",
    "up",
    "down",
    "pgup",
    "pgdn",
    "home",
    "end",
    "enter",
    "tab",
    "backtab",
    "backspace",
    "ctrl-l",
    "esc",
    "x",
    "z",
]


@pytest.mark.parametrize("step", [1, 2, 3, 1000])
def test_keys_are_read_however_they_are_cut(step: int) -> None:
    assert all_keys(TYPED, step) == MEANT


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_what_is_pasted_is_dropped(step: int) -> None:
    assert all_keys(b"a\x1b[200~xyes\r\x1b[A\x1b[201~b", step) == ["a", "b"]


def test_a_lone_escape_is_a_key_when_nothing_follows() -> None:
    decoder = KeyDecoder()
    assert decoder.feed(b"\x1b") == []
    assert decoder.is_waiting
    assert decoder.expire() == ["esc"]
    assert not decoder.is_waiting
    assert decoder.feed(b"\x1b") == []
    assert decoder.feed(b"[A") == ["up"]
    assert decoder.feed(b"\x1b\x1b") == ["esc"]
    assert decoder.expire() == ["esc"]


def test_a_sequence_that_never_ends_is_dropped() -> None:
    decoder = KeyDecoder()
    assert decoder.feed(b"\x1b[" + b"1" * 200)[:1] == ["1"]
    assert decoder.feed(b"\x1b[1") == []
    assert decoder.expire() == []
    assert decoder.feed(b"q") == ["q"]


def test_bytes_that_are_no_characters_are_dropped() -> None:
    assert all_keys(b"\xff\xfe\x00\x01q") == ["q"]
