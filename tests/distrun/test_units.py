from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from distrun import units


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (units.size, 512, "512 B"),
        (units.size, 3.4 * 1024**2, "3.4 MiB"),
        (units.size, 5000 * 1024**4, "5000.0 TiB"),
        (units.short_size, 0, "0"),
        (units.short_size, 1023, "1023"),
        (units.short_size, 3.4 * 1024**2, "3.4M"),
        (units.short_size, 128 * 1024**3, "128G"),
        (units.short_size, 1023.9 * 1024, "1.0M"),
        (units.rate, 1024, "1.0 KiB/s"),
        (units.percent, 0.874, "87 %"),
        (units.percent, 0.003, "0.3 %"),
        (units.percent, 0, "0 %"),
        (units.count, 12, "12"),
        (units.count, 3400, "3.4k"),
        (units.count, 999_900, "1.0M"),
        (units.per_second, 12.5, "12.5/s"),
        (units.per_second, 0, "0/s"),
        (units.per_second, 3400, "3.4k/s"),
        (units.value, 0.37123, "0.3712"),
        (units.value, "nan", "nan"),
        (units.value, float("inf"), "inf"),
        (units.age, 59.2, "59 s"),
        (units.age, 11112.0, "3:05 h"),
        (units.elapsed, 3725.9, "1:02:05"),
        (units.elapsed, -1, "0:00:00"),
        (units.elapsed, 1e17, "over 10 years"),
    ],
)
def test_numbers_as_a_person_reads_them(function: Callable[[Any], str], value: Any, text: str) -> None:
    assert function(value) == text


@pytest.mark.parametrize(
    "function",
    [
        *(units.size, units.short_size, units.rate, units.percent, units.count, units.per_second, units.value),
        *(units.age, units.elapsed),
    ],
)
def test_what_is_not_known_is_an_empty_text(function: Callable[[Any], str]) -> None:
    assert function(None) == ""


def test_a_part_is_shown_in_the_unit_of_its_whole() -> None:
    assert units.used(512 * 1024**2, 16 * 1024**3) == "0.5 of 16.0 GiB"
    assert units.used(100, 512) == "100 of 512 B"
    assert units.used(512, None) == "512 B"
    assert units.used(None, 512) == ""


def test_steps_with_and_without_a_total() -> None:
    assert (units.steps(12, 50), units.steps(12, None), units.steps(None, 50)) == ("12/50", "12", "")


def test_things_are_counted_by_their_kinds_and_kinds_without_any_are_left_out() -> None:
    assert units.counted(5, [(4, "running"), (0, "lost"), (1, "failed")]) == "5 (4 running, 1 failed)"
    assert units.counted(3, [(0, "running")]) == "3"
