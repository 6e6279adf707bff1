from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distrun.cli import tables
from distrun.cli.console import styled
from distrun.dashboard import jobs as jobs_of_top
from distrun.dashboard import text
from distrun.dashboard.user import ViewSelection
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


def view(state: dict[str, Any], **more: Any) -> JobView:
    return JobView(SimpleNamespace(id=state["id"], ended=lambda: None, reports=dict), state, **more)  # type: ignore[arg-type]


def jobs(*states: dict[str, Any]) -> list[str]:
    return styled(tables.jobs_table([view(each) for each in states], NOW)).splitlines()


def tasks(state: dict[str, Any], **more: Any) -> list[str]:
    return styled(tables.tasks_table(view(state, **more), NOW)).splitlines()


def test_jobs_have_a_row_each_with_the_command_quoted_and_no_markup_read() -> None:
    rows = jobs(state(), state(id="x-1", state="failed", exit_code=3, finished=START))
    assert rows[0].split() == ["JOB", "STATE", "CODE", "TASKS", "TIME", "HOSTS", "CREATED", "COMMAND"]
    assert rows[1].startswith("calm-otter-7f3  running")
    assert "2 (2 running)  1:02:05" in rows[1]
    assert rows[1].endswith("python 'a b.py' '[bold]'")
    assert "failed     3" in rows[2].replace("failed   ", "failed  ", 1) or " 3 " in rows[2]
    assert " 0:00:00 " in rows[2]


def test_tasks_have_a_row_each() -> None:
    ended = task("worker-1", state="failed", signal="KILL", ended=START, cpu_s=1.25, max_rss_kb=2048)
    found = state(tasks=[task("worker-0"), ended], message="worker-1 was killed")
    assert tables.heading(found).splitlines() == [
        "calm-otter-7f3  running  python 'a b.py' '[bold]'",
        "worker-1 was killed",
    ]
    head, first, second = tasks(found)
    assert head.split() == ["TASK", "HOST", "PID", "STATE", "UP", "MEM", "CPU", "TIME", "CODE"]
    assert first.split() == ["worker-1", "d1", "7", "failed", "0:00:00", "2.0M", "1.2", "s", "KILL"]
    assert second.split() == ["worker-0", "d1", "7", "running", "1:02:05"]


def test_of_more_tasks_than_there_is_room_for_those_that_are_alike_share_a_row_after_top() -> None:
    many = [task(f"worker-{rank}", role="worker", rank=rank) for rank in range(100)]
    many[7]["state"] = "failed"
    found = [text.plain(line) for line in tables.tasks_table(view(state(tasks=many)), NOW, 80, 20)]
    assert [line.split()[0] for line in found] == ["TASK", "worker-7", "worker-[0-6,8-99]"]
    assert len(tables.tasks_table(view(state(tasks=many)), NOW, 80, 100)) == 101


def test_a_task_that_runs_and_one_that_has_ended_are_shown_in_the_same_units() -> None:
    ended = task("worker-1", state="exited", code=0, ended=START, cpu_s=1.25, max_rss_kb=3 * 1024)
    head, first, second = tasks(
        state(tasks=[task("worker-0"), ended]), metrics={"tasks": {"worker-0": {"rss": 3 * 2**20, "cpu": 0.5}}}
    )
    at = head.index("MEM") - 1
    assert first[at : at + 4] == second[at : at + 4] == "3.0M"


def test_what_a_task_used_that_was_lost_with_its_host_is_not_shown_as_nothing() -> None:
    lost = task("worker-1", state="failed", ended=START, reason="lost with its host")
    *_, row = tasks(state(tasks=[lost]))
    assert row.split() == ["worker-1", "d1", "7", "lost", "0:00:00", "lost", "with", "its", "host"]


def test_a_lost_job_took_as_long_as_it_was_heard_of() -> None:
    assert " 0:00:00 " in jobs(state(state="lost"))[1]


def test_a_lost_job_and_its_tasks_took_as_long_as_anything_of_it_was_written() -> None:
    both = [task("worker-0", state="lost"), task("worker-1", state="lost")]
    lost = state(state="lost", heard="2026-01-31T12:00:07.000Z", tasks=both)
    assert "2 (2 lost)  0:00:07 " in jobs(lost)[1]
    assert all(line.endswith(" 0:00:07") for line in tasks(lost)[1:])


@pytest.mark.parametrize("columns", [160, 100, 80, 72, 60, 50, 40, 30])
def test_where_there_is_no_room_columns_are_left_out_and_only_the_last_is_cut(columns: int) -> None:
    ended = task("worker-1", state="failed", signal="KILL", ended=START, cpu_s=1.25, max_rss_kb=2048, reason="x" * 99)
    both = (
        tables.jobs_table([view(state())], NOW, columns),
        tables.tasks_table(view(state(tasks=[ended])), NOW, columns),
    )
    whole = (
        "1",
        "2 (2 running)",
        "2",
        "1:02:05",
        "calm-otter-7f3",
        "worker-1",
        "failed",
        "running",
        "KILL",
        "2.0M",
        "d1",
    )
    for table in both:
        head, row = (text.plain(line) for line in table)
        assert "STATE" in head
        assert len(row) <= columns
        for cell in row.split("  ")[:-1]:
            assert cell.strip() in ("", "7", "1.2 s", "0:00:00", *whole) or cell.strip()[:3] in ("01-", "02-")


def test_a_very_long_command_takes_nothing_from_the_other_columns() -> None:
    head, row = jobs(state(command=["x" * 2000]))
    assert head.split() == ["JOB", "STATE", "TASKS", "TIME", "HOSTS", "CREATED", "COMMAND"]
    assert row.startswith("calm-otter-7f3  running  2 (2 running)  1:02:05")
    assert row.endswith("xxx…")


def test_status_and_top_show_the_same_table_of_jobs() -> None:
    progress = {"step": 1200, "total": 5000, "fraction": 0.24, "eta_s": 725.0}
    known = [
        view(state(name="one"), metrics={"progress": progress}),
        view(state(id="x-1", state="unknown"), seen_s=180.0),
        view(state(id="x-2", state="damaged", command=[], tasks=[], message="state.json is torn")),
    ]
    models = [tables.model_of(each, NOW) for each in known]
    lines, *_ = jobs_of_top.picture(models, ViewSelection(), 142, 20, text.UNICODE, now=NOW)
    of_top = [text.plain(line)[2:] for line in lines[1:5]]
    assert of_top == [text.plain(line) for line in tables.jobs_table(known, NOW, 140)]
    assert "24 %, ETA 0:12:05" in of_top[1]
    assert "unknown, seen 3 min ago" in of_top[2]
    assert of_top[3].endswith("state.json is torn")


def test_the_chosen_job_is_in_sight_and_the_others_are_counted() -> None:
    models = [tables.model_of(view(state(id=f"job-{number}")), NOW) for number in range(50)]
    look = ViewSelection(chosen="job-30")
    lines, first, room = jobs_of_top.picture(models, look, 80, 14, text.ASCII, now=NOW)
    assert (first, room) == (21, 10)
    assert [text.plain(line)[:8] for line in lines if text.plain(line).startswith(">")] == ["> job-30"]
    assert text.plain(lines[-2]) == "  40 more"


def test_no_jobs_is_an_empty_table() -> None:
    assert len(jobs()) == 1


def test_problems_of_tasks_are_seen_on_a_terminal_of_80_columns() -> None:
    every = [task(f"worker-{rank}") for rank in range(4)]
    metrics = {
        "tasks": {"worker-0": {"condition": "stalled"}, "worker-1": {"condition": "waiting"}},
        "progress": {"step": 1200, "total": 5000, "fraction": 0.24, "eta_s": 725.0},
    }
    known = view(state(tasks=every), metrics=metrics)
    lines = styled(tables.jobs_table([known], NOW, 80)).splitlines()
    assert lines[0].split() == ["JOB", "STATE", "PROGRESS", "TASKS", "TIME", "COMMAND"]
    assert lines[1].startswith("calm-otter-7f3  running  24 %, ETA 0:12:05  4 (1 stalled)  1:02:05  python")
    whole = styled(tables.jobs_table([known], NOW, 140)).splitlines()
    assert "4 (3 running, 1 stalled)" in whole[1]
