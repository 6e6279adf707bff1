"""Lines of a publish pipe."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from distrun_runtime.agent import publish
from distrun_runtime.agent.publish import Publisher


@pytest.fixture
def pipe() -> Iterator[tuple[Publisher, int]]:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    publisher = Publisher("scheduler-0", reading)
    yield publisher, writing
    publisher.close()
    os.close(writing)


def test_objects_come_whole_whatever_the_pieces(pipe: tuple[Publisher, int]) -> None:
    publisher, writing = pipe
    os.write(writing, b'{"a": "1"}\n{"b"')
    assert publisher.read() == ([{"a": "1"}], [])
    assert publisher.read() == ([], [])
    os.write(writing, b': "2"}\n\n')
    assert publisher.read() == ([{"b": "2"}], [])


def test_nonsense_is_reported_and_skipped(pipe: tuple[Publisher, int]) -> None:
    publisher, writing = pipe
    os.write(writing, b'[1]\nxx\n{"ok": "1"}\n')
    objects, wrong = publisher.read()
    assert objects == [{"ok": "1"}]
    assert len(wrong) == 2
    assert "scheduler-0" in wrong[0]


@pytest.mark.parametrize(
    "line", [b"[" * 60_000, b'{"a": ' * 10_000, b'{"lost_peer": ["x"]}', b'{"port": null}', b"\xff\xfe"]
)
def test_what_is_no_object_of_texts_is_reported_and_skipped(pipe: tuple[Publisher, int], line: bytes) -> None:
    publisher, writing = pipe
    os.write(writing, line + b"\n")
    objects, wrong = publisher.read()
    assert (objects, len(wrong)) == ([], 1)


def test_numbers_become_texts(pipe: tuple[Publisher, int]) -> None:
    publisher, writing = pipe
    os.write(writing, b'{"port": 9, "is_ready": true, "\\ud83d": 0.5}\n')
    assert publisher.read() == ([{"port": "9", "is_ready": "true", "\\ud83d": "0.5"}], [])


def test_half_a_character_is_shown_as_its_escape(pipe: tuple[Publisher, int]) -> None:
    publisher, writing = pipe
    os.write(writing, b'{"failed": "ValueError: hi \\ud83d, \\u00e9 \\udcff"}\n')
    objects, wrong = publisher.read()
    assert (objects, wrong) == ([{"failed": "ValueError: hi \\ud83d, \u00e9 \\udcff"}], [])


def test_endless_line_is_dropped(pipe: tuple[Publisher, int]) -> None:
    publisher, writing = pipe
    os.set_blocking(writing, False)
    wrong: list[str] = []
    for _ in range(3):
        os.write(writing, b"x" * (publish.LINE_LIMIT // 2))
        wrong += publisher.read()[1]
    assert len(wrong) == 1
    assert "more than" in wrong[0]
