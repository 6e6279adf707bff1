"""Which workers wait, are stalled or are stragglers, by scripted histories."""

from __future__ import annotations

from typing import Any

import pytest
from measured import WALL, MeasuredJob
from sample_plan import sample_plan

from distrun_runtime.contract import agent_messages, facts
from distrun_runtime.coordinator import messages


def idle(workers: int = 2, **limits: Any) -> MeasuredJob:
    """A job whose workers do nothing from 10 s on."""
    job = MeasuredJob(sample_plan(workers, 1, ("d1",), **limits))
    job.run_to(10)
    job.cpu = {task.name: 0.001 for task in job.plan.tasks}
    return job


@pytest.fixture
def job() -> MeasuredJob:
    """A job of one worker that does nothing from 10 s on."""
    return idle(1)


def conditions(job: MeasuredJob) -> dict[str, str]:
    return {name: task["condition"] for name, task in job.snapshot()["tasks"].items() if task["condition"]}


def test_a_worker_without_a_sign_of_life_is_stalled_after_300_s_and_not_before() -> None:
    job = idle()
    job.run_to(309)
    assert conditions(job) == {}
    job.run_to(312)
    assert conditions(job) == {"worker-0": facts.STALLED, "worker-1": facts.STALLED}
    why = job.snapshot()["tasks"]["worker-0"]["why"]
    assert why.startswith("no output, report, store call, disk or CPU for 5 min")


def test_a_stall_is_one_event_a_worker_and_is_said_once_for_all() -> None:
    job = idle()
    job.run_to(1000)
    assert [(task, condition) for task, condition, _ in job.recorded] == [
        ("worker-0", facts.STALLED),
        ("worker-1", facts.STALLED),
    ]
    assert job.said == [
        "worker-0, worker-1 are stalled: no output, report, store call, disk or CPU for 5 min; "
        "to see where: distrun stack calm-otter-7f3 worker-0"
    ]
    [said] = [each for each in job.done if isinstance(each, messages.Announce)]
    assert (said.tasks, said.stalled) == (("worker-0", "worker-1"), True)


@pytest.mark.parametrize(
    "alive",
    [
        lambda job: {"output_at": WALL + job.now},
        lambda job: {"report": {"step": 1, "values": {}, "time": WALL + job.now}},
        lambda job: {"counters": {"values": {"store_calls": job.now}}},
        lambda job: {"read": 100 * job.now},
        lambda job: {"write": 100 * job.now},
    ],
)
def test_any_sign_of_life_prevents_a_stall(job: MeasuredJob, alive: Any) -> None:
    while job.now < 700:
        job.more["worker-0"] = alive(job)
        job.run_to(job.now + 100)
    assert job.recorded == []
    job.run_to(1100)  # the last sign was given at 600 s
    assert conditions(job) == {"worker-0": facts.STALLED}


def test_a_tick_of_the_clock_now_and_then_is_no_sign_of_life(job: MeasuredJob) -> None:
    while job.now < 320:  # 10 ms of a second, by the system's count: a thread that keeps a connection
        job.cpu["worker-0"] = 0.0101 if int(job.now) % 3 == 0 else 0.0
        job.run_to(job.now + 1)
    assert conditions(job) == {"worker-0": facts.STALLED}
    job.run_to(400)
    assert [condition for _, condition, _ in job.recorded] == [facts.STALLED]


def test_a_stalled_rank_that_is_the_slowest_leaves_the_time_unknown() -> None:
    job = idle(2)
    for task, step in (("worker-0", 5), ("worker-1", 50)):
        job.more[task] = {"report": {"step": step, "total": 100, "values": {}, "time": WALL + job.now}}
    job.run_to(15)
    for task, step in (("worker-0", 9), ("worker-1", 60)):
        job.more[task] = {"report": {"step": step, "total": 100, "values": {}, "time": WALL + job.now}}
    job.run_to(20)
    assert job.snapshot()["progress"]["eta_s"] is not None
    job.run_to(330)
    assert conditions(job) == {"worker-0": facts.STALLED, "worker-1": facts.STALLED}
    assert job.snapshot()["progress"]["eta_s"] is None


def test_a_worker_that_computes_is_not_stalled(job: MeasuredJob) -> None:
    job.cpu["worker-0"] = 0.02
    job.run_to(700)
    assert conditions(job) == {}


def test_where_the_use_of_the_processor_is_not_known_nobody_is_stalled(job: MeasuredJob) -> None:
    job.more["worker-0"]["cpu_s"] = None
    job.run_to(700)
    assert conditions(job) == {}


def test_a_stall_that_is_over_is_told(job: MeasuredJob) -> None:
    job.run_to(400)
    job.cpu["worker-0"] = 0.9
    job.run_to(403)
    assert conditions(job) == {}
    assert [condition for _, condition, _ in job.recorded] == [facts.STALLED, ""]


def test_the_time_can_be_chosen_and_0_is_never() -> None:
    job = idle(1, stall_after_s=20.0)
    job.run_to(35)
    assert conditions(job) == {"worker-0": facts.STALLED}
    job = idle(1, stall_after_s=0.0)
    job.run_to(2000)
    assert conditions(job) == {}


def test_a_silent_host_makes_nobody_stalled(job: MeasuredJob) -> None:
    job.now = 700.0
    job.tell(messages.Tick(WALL + 700))
    assert job.recorded == []


def wait(job: MeasuredJob, task: str, since: float) -> None:
    whom = {"for": ["worker-1"], "key": "weight", "call": "pull", "since": WALL + since}
    job.more[task]["waiting"] = whom


def test_a_worker_that_waits_says_for_whom_which_key_and_since_when() -> None:
    job = idle()
    wait(job, "worker-0", 10)
    job.run_to(15)
    task = job.snapshot()["tasks"]["worker-0"]
    assert (task["condition"], task["why"]) == (facts.WAITING, "has waited 5 s for worker-1 (pull of weight)")
    assert job.recorded == [], "every worker waits a little"


def test_waiting_that_lasts_is_an_event_and_its_end_too() -> None:
    job = idle()
    wait(job, "worker-0", 10)
    job.run_to(30)
    assert job.recorded == [("worker-0", facts.WAITING, "has waited 10 s for worker-1 (pull of weight)")]
    job.more["worker-0"]["waiting"] = {"for": []}
    job.run_to(35)
    assert job.recorded[1:] == [("worker-0", "", "")]
    assert job.said == []


def test_a_worker_that_waits_is_never_stalled_and_counts_from_its_end() -> None:
    job = idle()
    wait(job, "worker-0", 10)
    job.run_to(600)
    assert conditions(job) == {"worker-0": facts.WAITING, "worker-1": facts.STALLED}
    del job.more["worker-0"]["waiting"]
    job.run_to(890)
    assert conditions(job) == {"worker-1": facts.STALLED}
    job.run_to(910)
    assert conditions(job) == {"worker-0": facts.STALLED, "worker-1": facts.STALLED}


def lag(job: MeasuredJob, *lags: float, rank: int = 1) -> None:
    job.more["server-0"]["counters"] = {"role": "server", "values": {}, "time": WALL + job.now}
    job.more["server-0"]["counters"]["lags"] = {str(rank): list(lags)}


def test_a_straggler_is_last_in_half_of_the_rounds_by_a_fifth_of_a_round_and_50_ms() -> None:
    job = MeasuredJob(sample_plan(2, 1, ("d1",)))
    job.run_to(5)
    lag(job, 0.5, 12, 0.3, 1.0)
    job.run_to(8)
    task = job.snapshot()["tasks"]["worker-1"]
    assert task["condition"] == facts.STRAGGLER
    assert task["why"] == "last in 12 of 20 rounds, 0.3 s late, 30% of a round (seen by server-0)"
    assert [each[:2] for each in job.recorded] == [("worker-1", facts.STRAGGLER)]
    assert job.said == []
    assert job.snapshot()["store"]["servers"]["server-0"]["lags"] == {"1": 0.3}


@pytest.mark.parametrize("lags", [(9, 9, 0.3, 1.0), (1, 12, 0.19, 1.0), (1, 12, 0.04, 0.1)])
def test_a_worker_that_is_late_by_little_or_seldom_is_no_straggler(lags: tuple[float, ...]) -> None:
    job = MeasuredJob(sample_plan(2, 1, ("d1",)))
    job.run_to(5)
    lag(job, *lags)
    job.run_to(30)
    assert conditions(job) == {}


def test_a_straggler_that_keeps_up_again_is_none() -> None:
    job = MeasuredJob(sample_plan(2, 1, ("d1",)))
    job.run_to(5)
    lag(job, 0.5, 12, 0.3, 1.0)
    job.run_to(8)
    lag(job, 0.5, 12, 0.3, 1.0, rank=0)
    job.run_to(11)
    assert conditions(job) == {"worker-0": facts.STRAGGLER}


def test_events_of_conditions_are_bounded() -> None:
    job = MeasuredJob(sample_plan(200, 1, ("d1",)))
    for second in range(5, 50, 2):
        for rank in range(200):
            lag(job, 0.5, 12, 0.3, 1.0, rank=rank)
        job.more["server-0"]["counters"]["lags"] = {
            str(rank): [0.5, 12 if second % 4 == 1 else 3, 0.3, 1.0] for rank in range(60)
        }
        job.run_to(second)
    assert 30 < len(job.recorded) <= 61


def test_the_end_of_a_worker_ends_its_condition(job: MeasuredJob) -> None:
    job.run_to(400)
    job.tell(agent_messages.Exited("d1", "worker-0", code=0))
    job.ended.add("worker-0")
    job.run_to(403)
    assert "worker-0" not in job.snapshot()["tasks"]
    assert [condition for _, condition, _ in job.recorded] == [facts.STALLED, ""]
