from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from distrun.cli.jobline import JobLine
from distrun_runtime.contract.control import CopyProgress


def event(what: str, **members: Any) -> Mapping[str, Any]:
    return {"event": what, **members}


def copied(ready: int, detail: str, now: float) -> tuple[str, Mapping[str, Any], float]:
    return "sync", {"text": "no matter what", "sync": CopyProgress(ready, 2, detail)._asdict()}, now


def line(*, since: float | None = 0.0, places: int = 2, tasks: int = 3, has_symbols: bool = True) -> JobLine:
    return JobLine(lambda: (places, tasks), since, has_symbols)


def test_the_phases_of_a_start_are_counted_and_collapse_to_one_line() -> None:
    job, shown = line(), []
    history = [
        ("event", event("hello", host="h1"), 0.2),
        ("event", event("hello", host="h2"), 0.5),
        ("event", event("ready", host="h1"), 0.6),
        ("event", event("ready", host="h2"), 0.8),
        copied(0, "", 0.9),
        copied(1, "50%, 120 files, 2.0 KiB sent, 40.0 MiB/s, 0:12 left", 1.5),
        copied(1, "", 1.6),
        copied(2, "240 files, 4.0 KiB", 2.8),
        ("event", event("prepared"), 2.8),
        ("event", event("started", task="server-0"), 2.9),
        ("event", event("started", task="server-0"), 2.9),
        ("event", event("started", task="worker-0"), 2.9),
        ("event", event("started", task="worker-1"), 3.0),
        ("event", event("state", state="running"), 3.01),
    ]
    printed = []
    assert job.text() == "connect 0/2"
    for kind, value, now in history:
        printed += job.take(kind, value, now)
        shown.append(job.text())
    assert shown[1] == "connect 2/2 · check 0/2"
    assert shown[4] == "connect 2/2 · check 2/2 · sync 0/2"
    assert (
        shown[5]
        == shown[6]
        == "connect 2/2 · check 2/2 · sync 1/2 (50%, 120 files, 2.0 KiB sent, 40.0 MiB/s, 0:12 left)"
    )
    assert shown[11] == "connect 2/2 · check 2/2 · sync 2/2 (240 files, 4.0 KiB) · start 2/3"
    assert shown[-1] == ""
    assert printed == [
        "3 tasks on 2 hosts started in 3.0 s "
        "(connect 0.5 s · check 0.3 s · sync 2.0 s (240 files, 4.0 KiB) · start 0.2 s)"
    ]


def test_without_utf8_there_are_no_symbols() -> None:
    job = line(has_symbols=False)
    job.take("event", event("hello", host="h1"), 0.2)
    job.take("event", event("started", task="worker-0"), 0.2)
    (said,) = job.take("event", event("state", state="running"), 1.0)
    job.take("metrics", {"progress": {"step": 3, "rate": 2.0, "loss": 0.5}}, 2.0)
    assert (said + job.text()).isascii()
    assert job.text() == "step 3, 2 steps/s, loss 0.5"


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (None, ""),
        ({}, ""),
        ({"step": 1200, "total": 5000, "fraction": 0.24, "eta_s": 1187.4, "rate": 3.2, "loss": 0.12345678, "phase": 0},
         "step 1200/5000 (24 %) · 3.2 steps/s · ETA 0:19:47 · loss 0.1235"),
        ({"step": 7, "total": None, "fraction": None, "eta_s": None, "rate": None, "loss": "nan", "phase": 1},
         "phase 2: step 7 · loss nan"),
        ({"step": 0, "total": 10, "fraction": 0.0, "eta_s": "inf", "rate": 0.0, "loss": 1e-9},
         "step 0/10 (0 %) · loss 1e-09"),
        ({"loss": "inf"}, "loss inf"),
    ],
)  # fmt: skip
def test_progress_is_told_as_far_as_it_is_known(progress: Mapping[str, Any] | None, text: str) -> None:
    job = line()
    job.take("event", event("state", state="running"), 1.0)
    assert job.take("metrics", {"schema": "distrun.metrics/1", "progress": progress, "tasks": {}}, 2.0) == []
    assert job.text() == text


def test_a_job_that_is_stopped_or_over_has_no_phases_and_no_progress() -> None:
    job = line()
    job.take("event", event("hello", host="h1"), 0.2)
    assert job.take("event", event("state", state="stopping"), 1.0) == []
    assert job.text() == ""
    job.take("metrics", {"progress": {"step": 3}}, 2.0)
    assert job.text() == "step 3"
    job.take("event", event("finished", exit_code=0), 3.0)
    assert job.text() == ""


def test_who_attaches_sees_the_phases_of_a_job_that_starts_and_no_times() -> None:
    job = line(since=None)
    assert job.text() == ""
    tasks = [{"name": "worker-0", "state": "running"}, {"name": "worker-1", "state": "pending"}]
    job.take("state", {"state": "starting", "tasks": tasks}, 0.0)
    assert job.text() == "connect 0/2 · start 1/3"
    assert job.take("event", event("state", state="running"), 1.0) == []
    job.take("state", {"state": "running", "tasks": tasks}, 0.0)
    assert job.text() == ""


def test_a_queued_job_shows_nothing_before_it_has_a_place() -> None:
    known = (0, 0)
    job = JobLine(lambda: known, 0.0)
    job.take("event", event("state", state="queued"), 1.0)
    assert job.text() == ""
    known = (4, 8)
    job.take("event", event("hello", host="h1"), 2.0)
    assert job.text() == "connect 1/4 · check 0/4"
