"""Agents' cumulative counters become rates, totals and means."""

from __future__ import annotations

import json
import math
import random
import tracemalloc
from typing import Any

import pytest
from measured import BOOT, WALL, MeasuredJob
from sample_plan import sample_plan

from distrun_runtime.contract import agent_messages
from distrun_runtime.contract.plan import Host, Place
from distrun_runtime.coordinator import metrics
from distrun_runtime.coordinator.metrics import JobMetrics, plain


def one_host() -> JobMetrics:
    return JobMetrics(sample_plan(1, 1, ("d1",)))


@pytest.fixture
def job() -> JobMetrics:
    """The numbers of a job on one host."""
    return one_host()


def frame(clock: float, **tasks: Any) -> dict[str, Any]:
    host = {"cores": 4, "cpu_s": 2 * clock, "net_rx": 100 * clock, "net_tx": 0}
    return {"clock": clock, "time": WALL + clock, "host": host, "tasks": tasks}


def test_rates_are_made_by_the_agents_clock_not_by_when_frames_arrive(job: JobMetrics) -> None:
    job.take("d1", frame(10, **{"worker-0": {"cpu_s": 5.0, "read": 0, "write": 1000}}), 0.0, WALL)
    job.take("d1", frame(12, **{"worker-0": {"cpu_s": 8.0, "read": 0, "write": 5000}}), 77.0, WALL + 77)
    task, host = job.tasks["worker-0"], job.hosts["d1"]
    assert (task.cpu, task.read, task.write) == (1.5, 0.0, 2000.0)
    assert (host.rates["cpu_s"], host.rates["net_rx"]) == (2.0, 100.0)
    assert host.shown(80.0)["cpu"] == 0.5
    assert host.shown(80.0)["heard_s"] == 3.0


@pytest.mark.parametrize(("clock", "cpu_s"), [(12, 4.0), (9, 8.0), (10.1, 8.0), (2000, 8.0), (12, None), (12, "8")])
def test_a_counter_or_clock_that_goes_back_or_jumps_gives_no_rate(job: JobMetrics, clock: float, cpu_s: Any) -> None:
    job.take("d1", frame(10, **{"worker-0": {"cpu_s": 5.0}}), 0.0, WALL)
    job.take("d1", frame(clock, **{"worker-0": {"cpu_s": cpu_s}}), 1.0, WALL)
    assert job.tasks["worker-0"].cpu is None


def test_the_rate_comes_back_with_the_frame_after(job: JobMetrics) -> None:
    for clock, cpu_s in ((10, 5.0), (11, 0.5), (12, 1.0)):
        job.take("d1", frame(clock, **{"worker-0": {"cpu_s": cpu_s}}), 0.0, WALL)
    assert job.tasks["worker-0"].cpu == 0.5


def test_a_servers_rates_go_by_when_its_counters_came(job: JobMetrics) -> None:
    """A frame may hold the counters of two seconds, or none that are new."""
    rates = []
    for clock, time, pushes in ((10, 9.9, 0), (11, 10.9, 100), (12, 10.9, 100), (13, 12.9, 300)):
        counters = {"role": "server", "values": {"pushes": pushes, "keys": 3}, "time": WALL + time}
        job.take("d1", frame(clock, **{"server-0": {"counters": counters}}), clock, WALL + clock)
        store = job.tasks["server-0"].store
        rates.append(store.rates["pushes"])
    assert rates == [None, pytest.approx(100), pytest.approx(100), pytest.approx(100)]


def test_a_clock_that_was_set_does_not_spoil_a_servers_rates(job: JobMetrics) -> None:
    for clock, time, pushes in ((10, 10, 0), (11, 3611, 100)):
        counters = {"values": {"pushes": pushes}, "time": WALL + time}
        job.take("d1", frame(clock, **{"server-0": {"counters": counters}}), clock, WALL + clock)
    store = job.tasks["server-0"].store
    assert store.rates["pushes"] == pytest.approx(100)


def test_a_task_that_is_left_out_has_ended(job: JobMetrics) -> None:
    job.take("d1", frame(10, **{"worker-0": {"rss": 7}, "server-0": {}}), 0.0, WALL)
    assert {task.name for task in job.running} == {"worker-0", "server-0"}
    job.take("d1", frame(11, **{"server-0": {}}), 1.0, WALL)
    assert [task.name for task in job.running] == ["server-0"]
    assert job.tasks["worker-0"].rss is None


def test_an_agent_tells_of_its_own_tasks_only() -> None:
    job = JobMetrics(sample_plan(2, 0, ("d1", "d2")))
    job.take("d1", frame(10, **{"worker-0": {}, "worker-1": {}, "worker-9": {}}), 0.0, WALL)
    assert [task.name for task in job.running] == ["worker-0"]
    job.take("d9", frame(10), 0.0, WALL)
    assert set(job.hosts) == {"d1"}


def test_agents_of_one_node_make_one_host() -> None:
    plan = sample_plan(2, 0, ("d1",))
    tasks = tuple(task._replace(place=str(task.rank)) for task in plan.tasks)
    job = JobMetrics(plan._replace(places=(Place("0", "d1"), Place("1", "d1")), hosts=(Host("d1"),), tasks=tasks))
    for clock in (10.0, 11.0):
        job.take("0", frame(clock, **{"worker-0": {"cpu_s": clock}}), clock, WALL)
        job.take("1", frame(clock + 0.01, **{"worker-1": {"cpu_s": clock}}), clock, WALL)
    assert set(job.hosts) == {"d1"}
    assert job.hosts["d1"].rates["cpu_s"] == 2.0
    assert job.tasks["worker-1"].cpu == 1.0
    assert job.totals(11.0, 1.0)["cpu"] == 2.0


ODD = (
    *(None, True, -1, 0, 1e18, 1e308, math.nan, math.inf, -math.inf, 10**400, -(10**400), "", "x" * 5000, "nan"),
    *([], [1, 2], [[]] * 1000, {}, {"values": {"a": 1}}, {"a" * 500: {}}, "\x1b[2J", {"for": ["\n"], "since": 1}),
)


def odd_frame(choose: random.Random) -> dict[str, Any]:
    """Return a frame of which some members are not what they should be."""

    def odd(value: Any) -> Any:
        if choose.random() < 0.2:
            return choose.choice(ODD)
        if isinstance(value, dict):
            return {name: odd(each) for name, each in value.items()}
        return [odd(each) for each in value] if isinstance(value, list) else value

    report = {"step": 5, "total": 10, "values": {"loss": 0.5, "accuracy": 0.9}, "time": WALL}
    worker = {"cpu_s": 1.0, "rss": 5, "report": report, "output_at": WALL, "gpu": 0.5}
    worker["waiting"] = {"for": ["server-0"], "key": "w", "call": "pull", "since": WALL}
    worker["counters"] = {"role": "worker", "values": {"store_calls": 5}, "time": WALL}
    counters = {"role": "server", "values": {"pushes": 5, "keys": 4, "bytes": 3}, "lags": {"0": [1, 12, 0.5, 1.0]}}
    counters.update(device="gpu:0", device_why="there is\x1b[2J one")
    gpu = {"uuid": "GPU-1", "index": 0, "name": "H100", "util": 0.5, "mem_used": 1, "mem_total": 2, "pids": {"7": 1}}
    whole = frame(choose.random() * 100, **{"worker-0": worker, "server-0": {"counters": counters}})
    return {name: odd(each) for name, each in {**whole, "gpus": [gpu]}.items()}


def test_whatever_an_agent_sends_breaks_nothing_and_no_rate_is_negative() -> None:
    choose = random.Random(16)
    job = MeasuredJob(sample_plan(1, 1, ("d1",)))
    for number in range(1000):
        job.now = float(number)
        job.done += job.measuring.handle(metrics_of(odd_frame(choose)), job.now)
        if not number % 20:
            text = json.dumps(job.snapshot(), allow_nan=False)
            assert "\\u001b" not in text
            assert len(text) < 20_000
            assert not [rate for rate in rates(json.loads(text)) if rate < 0]
    assert all(len(line) < 4096 for line in job.kept)


def metrics_of(value: dict[str, Any]) -> Any:

    return agent_messages.Measured("d1", value, WALL)


def rates(snapshot: dict[str, Any]) -> list[float]:
    found = [each[name] for each in snapshot["tasks"].values() for name in ("cpu", "read", "write")]
    found += [each[name] for each in snapshot["hosts"].values() for name in ("cpu", "net_rx", "net_tx")]
    return [each for each in found if each is not None]


def test_numbers_that_are_not_finite_are_texts() -> None:
    assert [plain(each) for each in (math.nan, math.inf, -math.inf, None, 3, 0.123456, 1e-7, 123456.7)] == [
        *("nan", "inf", "-inf", None, 3, 0.1235, 1e-7, 123457),
    ]


def test_history_has_means_of_10_s_and_tells_what_was_not_measured() -> None:
    job = MeasuredJob(sample_plan(2, 0, ("d1",)))
    job.run_to(35)
    job.cpu = {"worker-0": 1.5, "worker-1": 1.5}
    job.run_to(61)
    history = job.snapshot()["history"]
    assert history["cpu"][:3] == [1.0, 1.0, 1.0]
    assert 1.0 < history["cpu"][3] < 3.0
    assert history["cpu"][4:] == [3.0, 3.0]
    assert history["net"][0] == pytest.approx(1000)
    assert history["push_s"] == [None] * 6
    job.run_to(700)
    history = job.snapshot()["history"]
    assert len(history["cpu"]) == metrics.POINTS


def test_a_host_that_is_silent_is_left_out_of_totals() -> None:
    job = JobMetrics(sample_plan(2, 0, ("d1", "d2")))
    for clock in (10.0, 11.0):
        job.take("d1", frame(clock, **{"worker-0": {"cpu_s": clock}}), clock, WALL)
        job.take("d2", frame(clock, **{"worker-1": {"cpu_s": clock}}), clock, WALL)
    job.take("d1", frame(50, **{"worker-0": {"cpu_s": 50.0}}), 50.0, WALL)
    assert job.totals(50.0, 1.0)["cpu"] == 1.0


def test_the_largest_job_keeps_less_than_64_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of 2,000 tasks, with as many points as 65,536 would have, take less than their share."""
    share = metrics.MEMORY * 2000 // 65536
    monkeypatch.setattr(metrics, "MEMORY", share)
    hosts = tuple(f"h{number}" for number in range(20))
    plan = sample_plan(2000, 0, hosts)
    tracemalloc.start()
    try:
        job = JobMetrics(plan)
        for clock in (10.0, 11.0):
            for place in hosts:
                report = {"step": 5, "total": 10, "values": {f"v{each}": each / 3 for each in range(16)}, "time": clock}
                numbers = json.dumps({"cpu_s": clock, "rss": 1e9, "read": clock, "output_at": clock, "report": report})
                told = {task.name: json.loads(numbers) for task in plan.tasks if task.host == place}
                job.take(place, frame(clock + BOOT, **told), clock, WALL)
        del told
        job.end_mean()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken < share
    assert job.points >= 3


def test_mean_of_a_minute_counts_the_time_in_which_a_task_did_nothing(job: JobMetrics) -> None:
    for second in range(61):
        used = {"cpu_s": float(min(second, 30)), "rss": 1000}
        job.take("d1", frame(10 + second, **{"worker-0": used}), float(second), WALL + second)
        job.sample(float(second), 1.0)
        if second and second % 10 == 0:
            job.end_mean()
    assert job.minute("worker-0", "cpu") == pytest.approx(0.5, abs=0.02)
    assert job.minute("worker-0", "rss") == 1000
