from __future__ import annotations

import datetime

import pytest

from distrun.errors import UsageError
from distrun.formats import lasting, parse_size, point_in_time

NOW = datetime.datetime(2026, 11, 24, 12, 30, 15).timestamp()


def local(*parts: int) -> float:
    return datetime.datetime(*parts).timestamp()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "seconds"), [("10m", 600), ("1h30m", 5400), ("90s", 90), ("2d", 172800), ("1.5 h", 5400), ("5min", 300)]
)
def test_a_duration_is_so_long_ago(text: str, seconds: float) -> None:
    assert point_in_time("--since", text, NOW) == pytest.approx(NOW - seconds)


def test_a_time_of_day_is_the_last_one() -> None:
    assert point_in_time("--since", "10:00", NOW) == local(2026, 11, 24, 10)
    assert point_in_time("--since", "12:30:15", NOW) == NOW
    assert point_in_time("--since", "12:31", NOW) == local(2026, 11, 23, 12, 31)


def test_a_date_is_local_or_says_what_it_is() -> None:
    assert point_in_time("--since", "2026-11-24T10:00", NOW) == local(2026, 11, 24, 10)
    assert point_in_time("--since", "2026-11-24 10:00:05", NOW) == local(2026, 11, 24, 10, 0, 5)
    assert point_in_time("--since", "2026-11-24", NOW) == local(2026, 11, 24)
    utc = datetime.datetime(2026, 11, 24, 10, tzinfo=datetime.timezone.utc).timestamp()
    assert point_in_time("--since", "2026-11-24T10:00:00Z", NOW) == utc
    assert point_in_time("--since", "2026-11-24T12:00+02:00", NOW) == utc


@pytest.mark.parametrize("text", ["", "10", "10x", "25:00", "12:60", "2026-13-01", "soon", "-5m", "10m ago"])
def test_what_is_no_time_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(UsageError, match="--since: expected a duration") as caught:
        point_in_time("--since", text, NOW)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2000000", 2_000_000),
        ("100M", 100 << 20),
        ("1.5GiB", 3 << 29),
        ("2g", 2 << 30),
        ("1 TB", 1 << 40),
        ("2048k", 2 << 20),
    ],
)
def test_sizes_have_units(text: str, number: int) -> None:
    assert parse_size("--log-limit", text, 1 << 20) == number


@pytest.mark.parametrize("text", ["", "0", "1000k", "M", "5x", "-1M", "9" * 30])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--log-limit: expected a size from 1\.0 MiB on"):
        parse_size("--log-limit", text, 1 << 20)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90m", 5400), ("1h30m", 5400), ("1:30:00", 5400), ("5400", 5400), ("0.5", 0.5), ("2 d", 172800)],
)
def test_how_long_something_lasts(text: str, seconds: float) -> None:
    assert lasting("--time", text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0m", "-5", "soon", "1:99:00", "10:00", "5 parsecs"])
def test_what_is_no_time_that_lasts_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match="--time: expected a time such as 90m, 1h30m, 1:30:00 or 5400"):
        lasting("--time", text)
