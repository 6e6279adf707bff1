"""How much slower this machine is than an idle one, and so how much longer tests wait: the one owner of that factor.

The first process of a run measures it and puts it into the environment for the processes of `-n` and for programs. It
is the time that a fixed piece of work takes, or the load for each core if that is more: the work may have met a quiet
moment of a busy machine. It is for deadlines that a test does not expect to come. A limit that a test is about stays as
it is.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

VARIABLE = "SLOWNESS_OF_TESTS"
WORK = 2_000_000
WORK_S = 0.1
"""What the work takes on an idle machine on which all limits hold."""
MOST = 5.0
"""More than that would keep a test that hangs for a quarter of an hour."""


def measured() -> float:
    """Return how many times as long as on an idle machine work takes now, from 1 to `MOST`."""
    begin, total = time.monotonic(), 0
    for number in range(WORK):
        total += number * number % 7
    took = (time.monotonic() - begin) / WORK_S
    return min(MOST, max(1.0, took, os.getloadavg()[0] / (os.cpu_count() or 1)))


if VARIABLE not in os.environ:
    os.environ[VARIABLE] = f"{measured():.1f}"
FACTOR = float(os.environ[VARIABLE])


def scaled(limit_s: float) -> float:
    """Return how long to wait, in seconds, for what takes at most `limit_s` on an idle machine."""
    return FACTOR * limit_s


def lengthen(item: pytest.Item) -> None:
    """Scale the time limit of a test, unless the command line gives one."""
    import pytest  # not in programs of tests

    config = item.config
    if FACTOR > 1 and config.pluginmanager.hasplugin("timeout") and config.getoption("timeout") is None:
        marker = item.get_closest_marker("timeout")
        limit_s = float(marker.args[0] if marker else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(scaled(limit_s)), append=False)


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Start the limit anew for the rest of a test that failed: an alarm during its report would end the whole run."""
    if call.excinfo and signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, scaled(float(item.config.getini("timeout"))))


def pytest_report_header() -> str:
    return f"time limits: {FACTOR:g} times those of an idle machine"
