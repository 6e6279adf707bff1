from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from distrun import formats


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (formats.size, 512, "512 B"),
        (formats.size, 3.4 * 1024**2, "3.4 MiB"),
        (formats.size, 5000 * 1024**4, "5000.0 TiB"),
        (formats.short_size, 0, "0"),
        (formats.short_size, 1023, "1023"),
        (formats.short_size, 3.4 * 1024**2, "3.4M"),
        (formats.short_size, 128 * 1024**3, "128G"),
        (formats.short_size, 1023.9 * 1024, "1.0M"),
        (formats.percent, 0.874, "87 %"),
        (formats.percent, 0.003, "0.3 %"),
        (formats.percent, 0, "0 %"),
        (formats.count, 12, "12"),
        (formats.count, 3400, "3.4k"),
        (formats.count, 999_900, "1.0M"),
        (formats.per_second, 12.5, "12.5/s"),
        (formats.per_second, 0, "0/s"),
        (formats.per_second, 3400, "3.4k/s"),
        (formats.value, 0.37123, "0.3712"),
        (formats.value, "nan", "nan"),
        (formats.value, float("inf"), "inf"),
        (formats.age, 59.2, "59 s"),
        (formats.age, 11112.0, "3:05 h"),
        (formats.elapsed, 3725.9, "1:02:05"),
        (formats.elapsed, -1, "0:00:00"),
        (formats.elapsed, 1e17, "over 10 years"),
    ],
)
def test_numbers_as_a_person_reads_them(function: Callable[[Any], str], value: Any, text: str) -> None:
    assert function(value) == text


@pytest.mark.parametrize(
    "function",
    [
        *(
            formats.size,
            formats.short_size,
            formats.percent,
            formats.count,
            formats.per_second,
            formats.value,
        ),
        *(formats.age, formats.elapsed),
    ],
)
def test_what_is_not_known_is_an_empty_text(function: Callable[[Any], str]) -> None:
    assert function(None) == ""


def test_a_part_is_shown_in_the_unit_of_its_whole() -> None:
    assert formats.used(512 * 1024**2, 16 * 1024**3) == "0.5 of 16.0 GiB"
    assert formats.used(100, 512) == "100 of 512 B"
    assert formats.used(512, None) == "512 B"
    assert formats.used(None, 512) == ""


def test_steps_with_and_without_a_total() -> None:
    assert (formats.steps(12, 50), formats.steps(12, None), formats.steps(None, 50)) == ("12/50", "12", "")


def test_things_are_counted_by_their_kinds_and_kinds_without_any_are_left_out() -> None:
    assert formats.counted(5, [(4, "running"), (0, "lost"), (1, "failed")]) == "5 (4 running, 1 failed)"
    assert formats.counted(3, [(0, "running")]) == "3"
