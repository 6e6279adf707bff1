from __future__ import annotations

import time

import pytest

from distrun_runtime.contract.facts import duration, time_of_day


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.05, "0.05 s"),
        (2.25, "2.25 s"),
        (45, "45 s"),
        (12.3456, "12.3 s"),
        (60, "1 min"),
        (90, "1 min 30 s"),
        (119.7, "2 min"),
        (3600, "1 h"),
        (5400, "1 h 30 min"),
        (7261, "2 h 1 min 1 s"),
        (86400, "24 h"),
        (259200, "3 d"),
        (266400.2, "3 d 2 h"),
    ],
)
def test_durations_are_told_as_a_person_reads_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_time_of_day_is_local_and_has_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    for zone, text in (("UTC0", "14:30:25.299"), ("XYZ-5:30", "20:00:25.299"), ("PST8", "06:30:25.299")):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert time_of_day(1795357825.299) == text
    assert time_of_day(1795357859.99996).endswith(":59.999")
    monkeypatch.undo()
    time.tzset()
