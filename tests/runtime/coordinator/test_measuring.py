"""How often agents measure, when snapshots are made, and what is kept, by scripted histories."""

from __future__ import annotations

import json

import pytest
import schemas
from measured import WALL, MeasuredJob
from sample_plan import sample_plan

from distrun_runtime.contract import agent_messages, control
from distrun_runtime.contract.plan import Host, Place
from distrun_runtime.coordinator import conditions, messages


def hosts_of(count: int) -> tuple[str, ...]:
    return tuple(f"h{number}" for number in range(count))


def test_a_host_that_is_looked_at_measures_every_second_and_no_more_afterwards() -> None:
    job = MeasuredJob(sample_plan(500, 0, hosts_of(500)), 5.0)
    job.tell(agent_messages.AgentReady("h1", "10.0.0.1"))
    job.tell(messages.MetricsWanted(True, ("h1", "h77", "no host")))
    assert job.intervals == [("h1", 1.0)], "a host without an agent is told nothing: it may still be connecting"
    job.tell(agent_messages.AgentReady("h77", "10.0.0.2"))
    assert job.intervals[1:] == [("h77", 1.0)], "it begins as `begin` said, however early it was looked at"
    job.tell(messages.MetricsWanted(True, ("h1",)))
    assert job.intervals[2:] == [("h77", 5.0)]
    job.tell(messages.AgentLost("h77", "gone"))
    job.tell(messages.MetricsWanted(False, ()))
    assert job.intervals[3:] == [("h1", 5.0)]


def test_in_a_small_job_looking_changes_nothing() -> None:
    job = MeasuredJob(sample_plan(2, 0, hosts_of(2)))
    job.tell(messages.MetricsWanted(True, ("h1",)))
    assert job.intervals == []


def test_to_look_at_a_node_is_to_look_at_all_its_agents() -> None:
    plan = sample_plan(4, 0, ("d1", "d2"))
    places = tuple(Place(str(task.rank), task.host) for task in plan.tasks)
    tasks = tuple(task._replace(place=str(task.rank)) for task in plan.tasks)
    job = MeasuredJob(plan._replace(hosts=(Host("d1"), Host("d2")), places=places, tasks=tasks), 2.0)
    for place in places:
        job.tell(agent_messages.AgentReady(place.name, "10.0.0.1"))
    job.tell(messages.MetricsWanted(True, ("d1",)))
    assert job.intervals == [("0", 1.0), ("2", 1.0)]


def test_no_snapshot_is_made_while_nobody_wants_one() -> None:
    job = MeasuredJob(sample_plan(2, 0, ("d1",)))
    job.run_to(20)
    assert job.shown == []


def test_a_snapshot_comes_at_once_and_then_when_something_has_changed_twice_a_second_at_most() -> None:
    job = MeasuredJob(sample_plan(2, 0, ("d1", "d2")))
    job.run_to(3)
    job.tell(messages.MetricsWanted(True))
    [first] = job.shown
    assert first["schema"] == control.METRICS_SCHEMA
    assert first["time"] == WALL + 3
    assert set(first["tasks"]) == {"worker-0", "worker-1"}
    for number in range(10):  # nothing has changed
        job.now = 3.1 + number / 5
        job.tell(messages.Tick(WALL + job.now))
    assert len(job.shown) == 1
    for number in range(100):
        job.now = 6.0 + number / 10
        job.tell(agent_messages.Measured("d1", job.frame("d1"), WALL + job.now))
    assert 18 <= len(job.shown) - 1 <= 21
    job.tell(messages.MetricsWanted(False))
    count = len(job.shown)
    job.run_to(30)
    assert len(job.shown) == count


def test_what_is_shown_late_is_shown_by_a_tick() -> None:
    job = MeasuredJob(sample_plan(1, 0, ("d1",)))
    job.tell(messages.MetricsWanted(True))
    job.now = 0.1
    job.tell(agent_messages.Measured("d1", job.frame("d1"), WALL + 0.1))
    assert len(job.shown) == 1
    assert job.measuring.wake_s() == 0.5
    job.now = 0.6
    job.tell(messages.Tick(WALL + 0.6))
    assert len(job.shown) == 2
    assert job.measuring.wake_s() == 1.0


def test_snapshots_of_a_very_large_job_are_farther_apart() -> None:
    job = MeasuredJob(sample_plan(8000, 0, hosts_of(1000)))
    job.tell(messages.MetricsWanted(True))
    for number in range(100):
        job.now = number / 10
        job.tell(agent_messages.Measured("h0", job.frame("h0"), WALL + job.now))
    assert 4 <= len(job.shown) <= 6


def test_tasks_of_hosts_that_are_looked_at_have_a_history() -> None:
    job = MeasuredJob(sample_plan(2, 0, ("d1", "d2")))
    job.run_to(45)
    job.tell(messages.MetricsWanted(True, ("d2",)))
    shown = job.shown[-1]
    assert shown["tasks"]["worker-1"]["history"] == {"cpu": [0.5] * 4, "rss": [1048576] * 4}
    assert "history" not in shown["tasks"]["worker-0"]


def test_a_lost_host_has_no_running_tasks() -> None:
    job = MeasuredJob(sample_plan(2, 0, ("d1", "d2")))
    job.run_to(3)
    job.tell(messages.AgentLost("d2", "silent"))
    assert set(job.snapshot()["tasks"]) == {"worker-0"}


def test_the_store_has_sums_over_servers_and_the_schedulers_numbers() -> None:
    job = MeasuredJob(sample_plan(1, 2, ("d1",)))
    for second in range(5):
        for server, pace in (("server-0", 100), ("server-1", 300)):
            values = {"keys": 7, "bytes": 700, "pushes": pace * second, "rounds": second, "bytes_in": 0}
            job.more[server]["counters"] = {"role": "server", "values": values, "time": WALL + job.now + 0.5}
        values = {"members": 4, "barriers": 2, "barrier_waiting": 1}
        job.more["scheduler"]["counters"] = {"role": "scheduler", "values": values, "time": WALL}
        job.run_to(job.now + 1)
    store = job.snapshot()["store"]
    assert store["push_s"] == 400
    assert store["pull_s"] is None
    assert store["servers"]["server-1"]["push_s"] == 300
    assert store["servers"]["server-1"]["rounds"] == 4
    assert store["scheduler"] == {"members": 4, "barriers": 2, "barrier_waiting": 1}


def test_a_sample_a_minute_is_kept_and_one_at_the_end() -> None:
    job = MeasuredJob(sample_plan(2, 0, ("d1",)))
    job.report("worker-0", 5, 10, loss=0.25)
    job.run_to(200)
    assert len(job.kept) == 3
    job.done += job.measuring.finish(job.now)
    kept = [json.loads(line) for line in job.kept]
    assert len(kept) == 4
    for each in kept:
        schemas.check(each, "sample")
    assert kept[0]["schema"] == conditions.SCHEMA
    assert [each["time"] for each in kept[:2]] == ["1970-01-12T13:47:41.000Z", "1970-01-12T13:48:41.000Z"]
    assert kept[2]["cpu"] == 1.0
    assert kept[2]["progress"] == {
        "step": 5,
        "total": 10,
        "phase": 0,
        "rate": 0,
        "loss": 0.25,
        "values": {"loss": 0.25},
    }
    assert kept[2]["tasks"]["worker-1"] == {"cpu": 0.5, "rss": 1048576}
    assert kept[2]["hosts"]["d1"]["cpu"] == 0.5


def test_a_job_that_nothing_was_measured_of_keeps_nothing() -> None:
    job = MeasuredJob(sample_plan(2, 0, ("d1",)))
    for second in range(200):
        job.now = float(second)
        job.tell(messages.Tick(WALL + second))
    assert job.measuring.finish(200.0) == []
    assert job.kept == []


def test_a_line_has_at_most_4_kib_and_says_what_was_left_out() -> None:
    tasks = [(f"worker-{number}", {"cpu": 0.5, "rss": 123456789}) for number in range(1000)]
    hosts = [(f"a-host-with-a-name-{number}", {"cpu": 0.25}) for number in range(300)]
    line = conditions.MinuteLines().line("2026-01-31T12:00:00.000Z", {"cpu": 500.0}, hosts, tasks)
    assert 3800 < len(line) < conditions.LINE
    found = json.loads(line)
    schemas.check(found, "sample")
    assert len(found["tasks"]) + found["tasks_left_out"] == 1000
    assert found["hosts_left_out"] == 300
    assert list(found["tasks"])[:2] == ["worker-0", "worker-1"]


def test_a_job_whose_totals_alone_fill_a_line_keeps_their_time() -> None:
    line = conditions.MinuteLines().line("2026-01-31T12:00:00.000Z", {"x" * 5000: 1}, [], [])
    assert set(json.loads(line)) == {"schema", "time"}


def test_a_full_file_ends_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "LIMIT", 1000)
    lines = conditions.MinuteLines()
    kept = [lines.line("2026-01-31T12:00:00.000Z", {"cpu": number}, [], []) for number in range(50)]
    *samples, note = [line for line in kept if line]
    assert sum(len(line) + 1 for line in (*samples, note)) <= 1000
    assert json.loads(note)["note"] == "the file is full: no more samples are kept"
    assert len(samples) > 3
    assert kept[-1] == ""
