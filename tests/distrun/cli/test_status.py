from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distrun.cli.console import render
from distrun.cli.tables import duration, heading, jobs_table, tasks_table
from distrun.jobs import JobView

START = "2026-01-31T12:00:00.000Z"
NOW = 1769860800.0 + 3725  # one hour, two minutes and five seconds after START


def task(name: str, **more: Any) -> dict[str, Any]:
    base = {"name": name, "role": name[:-2], "host": "d1", "pid": 7, "state": "running", "code": None, "signal": None}
    return {**base, "started": START, "ended": None, "cpu_s": 0.0, "max_rss_kb": 0, **more}


def state(**more: Any) -> dict[str, Any]:
    base = {"id": "calm-otter-7f3", "state": "running", "exit_code": None, "command": ["python", "a b.py", "[bold]"]}
    base.update(created=START, updated=START, finished=None, message=None, tasks=[task("worker-0"), task("worker-1")])
    return {**base, **more}


def test_jobs_have_a_row_each_with_the_command_quoted_and_no_markup_read() -> None:
    rows = render(jobs_table([state(), state(id="x-1", state="failed", exit_code=3, finished=START)], NOW)).splitlines()
    assert rows[0].split() == ["JOB", "STATE", "CODE", "TASKS", "TIME", "CREATED", "COMMAND"]
    assert rows[1].startswith("calm-otter-7f3  running")
    assert "2 (2 running)  1:02:05" in rows[1]
    assert rows[1].endswith("python 'a b.py' '[bold]'")
    assert "failed     3" in rows[2].replace("failed   ", "failed  ", 1) or " 3 " in rows[2]
    assert " 0:00:00 " in rows[2]


def test_tasks_have_a_row_each() -> None:
    ended = task("worker-1", state="failed", signal="KILL", ended=START, cpu_s=1.25, max_rss_kb=2048)
    found = state(tasks=[task("worker-0"), ended], message="worker-1 was killed")
    text = heading(found) + render(tasks_table(found, NOW))
    assert "calm-otter-7f3  running  python 'a b.py' '[bold]'" in text
    assert "worker-1 was killed" in text
    *_, first, second = text.splitlines()
    assert first.split() == ["worker-0", "running", "7", "1:02:05", "d1"]
    assert second.split() == ["worker-1", "failed", "KILL", "7", "0:00:00", "1.2", "s", "2", "MB", "d1"]


def test_what_a_task_used_that_was_lost_with_its_host_is_not_shown_as_nothing() -> None:
    lost = task("worker-1", state="failed", ended=START, reason="lost with its host")
    *_, row = render(tasks_table(state(tasks=[lost]), NOW)).splitlines()
    assert row.split() == ["worker-1", "failed", "7", "0:00:00", "d1"]


def test_a_lost_job_took_as_long_as_it_was_heard_of() -> None:
    assert " 0:00:00 " in render(jobs_table([state(state="lost")], NOW)).splitlines()[1]


def test_a_lost_job_and_its_tasks_took_as_long_as_anything_of_it_was_written() -> None:
    tasks = [task("worker-0", state="lost"), task("worker-1", state="lost")]
    lost = state(state="lost", heard="2026-01-31T12:00:07.000Z", tasks=tasks)
    assert "2 (2 lost)  0:00:07 " in render(jobs_table([lost], NOW)).splitlines()[1]
    assert all(" 0:00:07 " in line for line in render(tasks_table(lost, NOW)).splitlines()[1:])


@pytest.mark.parametrize("columns", [160, 100, 80, 72, 60, 50, 40, 30])
def test_where_there_is_no_room_columns_are_left_out_and_only_the_last_is_cut(columns: int) -> None:
    from rich.console import Console

    ended = task("worker-1", state="failed", signal="KILL", ended=START, cpu_s=1.25, max_rss_kb=2048)
    for table in (jobs_table([state()], NOW, columns), tasks_table(state(tasks=[ended]), NOW, columns)):
        console = Console(width=columns)
        with console.capture() as capture:
            console.print(table)
        head, row = capture.get().splitlines()[-2:]
        assert head.split()[1] == "STATE"
        whole = ("2 (2 running)", "2", "1:02:05", "calm-otter-7f3", "worker-1", "failed", "running", "KILL", "2 MB")
        for cell in row.rstrip().split("  ")[:-1]:
            assert cell.strip() in ("", "7", "1.2 s", "0:00:00", *whole) or cell.strip()[:3] in ("01-", "02-")


def test_a_very_long_command_takes_nothing_from_the_other_columns() -> None:
    head, row = render(jobs_table([state(command=["x" * 2000])], NOW)).splitlines()
    assert head.split() == ["JOB", "STATE", "CODE", "TASKS", "TIME", "CREATED", "COMMAND"]
    assert row.startswith("calm-otter-7f3  running        2 (2 running)  1:02:05")
    assert row.endswith("xxx…")


def test_no_jobs_is_an_empty_table() -> None:
    assert len(render(jobs_table([], NOW)).splitlines()) == 1


@pytest.mark.parametrize(
    ("start", "end", "text"),
    [
        (None, None, ""),
        (START, None, "1:02:05"),
        (START, START, "0:00:00"),
        (START, "2026-01-31T12:00:59.9Z", "0:00:59"),
    ],
)
def test_durations(start: str | None, end: str | None, text: str) -> None:
    assert duration(start, end, NOW) == text


def test_problems_of_tasks_are_seen_on_a_terminal_of_80_columns() -> None:
    tasks = [task("worker-0"), task("worker-1"), task("worker-2"), task("worker-3")]
    known: Any = JobView(
        SimpleNamespace(id="calm-otter-7f3"),  # type: ignore[arg-type]
        state(tasks=tasks),
        metrics={
            "tasks": {"worker-0": {"condition": "stalled"}},
            "progress": {"step": 1200, "total": 5000, "fraction": 0.24, "eta_s": 725.0},
        },
    )
    lines = render(jobs_table([known.state], NOW, 80, {known.id: known})).splitlines()
    assert lines[0].split() == ["JOB", "STATE", "PROGRESS", "TASKS", "TIME", "COMMAND"]
    assert lines[1].startswith("calm-otter-7f3  running  24 %, ETA 0:12:05  4 (1 stalled)  1:02:05  python")
    whole = render(jobs_table([known.state], NOW, 140, {known.id: known})).splitlines()
    assert "4 (4 running, 1 stalled)" in whole[1]
