from __future__ import annotations

import math
from typing import Any

import pytest
import snapshots
from snapshots import NOW

from distrun.dashboard import rows, text
from distrun.dashboard.model import LONG_WAIT_S, Model


def recorded(workers: int = 8, hosts: int = 4) -> Model:
    model = Model("calm-otter-7f3")
    model.take("state", {"state": snapshots.state(workers, hosts)}, NOW)
    for event in snapshots.events():
        model.take("event", {"event": event}, NOW)
    return tell(model, metrics=snapshots.metrics(workers, hosts))


def tell(model: Model, **frames: Any) -> Model:
    """Give a model frames by their kinds, and let it settle."""
    for kind, value in frames.items():
        model.take(kind, {kind: value}, NOW)
    model.settle(NOW)
    return model


def names(model: Model, order: str = "problems", wanted: str = "", is_folded: bool = False) -> list[str]:
    found = rows.task_rows(model.tasks.values(), wanted, order, is_folded)
    return [text.folded(tuple(task.name for task in row)) for row in found]


def with_task(model: Model, name: str, when: float = NOW, **members: Any) -> None:
    metrics = snapshots.metrics(8)
    metrics["tasks"][name].update(members)
    model.take("metrics", {"metrics": metrics}, when)
    model.settle(when)


def test_problems_come_first_and_the_rest_keeps_the_order_of_ranks() -> None:
    found = names(recorded())
    assert found[:3] == ["worker-1", "worker-3", "worker-4"]
    assert found[3:] == [
        "worker-0",
        "worker-2",
        "worker-5",
        "worker-6",
        "worker-7",
        "server-0",
        "server-1",
        "scheduler",
    ]


def of_steps(steps: dict[str, int], **progress: Any) -> Model:
    """Return a model of workers that have come so far; their store's rule for stragglers does not apply."""
    model, metrics = Model("calm-otter-7f3"), snapshots.metrics(len(steps))
    state = snapshots.state(len(steps))
    for task in state["tasks"]:
        task.update(state="running", code=None, ended=None)
    told = {"condition": "", "why": ""}
    metrics["tasks"] = {name: {**told, "report": {"step": step, "total": 1000}} for name, step in steps.items()}
    metrics["progress"].update(step=min(steps.values()), slowest=min(steps, key=lambda name: steps[name]), **progress)
    return tell(model, state=state, metrics=metrics)


def test_a_worker_that_is_clearly_behind_in_steps_is_a_straggler_with_a_row_of_its_own() -> None:
    steps = {f"worker-{rank}": 614 - rank % 2 for rank in range(100)}
    model = of_steps({**steps, "worker-57": 600})
    (slow,) = [task for task in model.tasks.values() if task.word == "straggler"]
    assert (slow.name, slow.why, slow.is_problem) == ("worker-57", "14 steps behind the others", True)
    assert names(model)[0] == "worker-57"
    assert names(model, is_folded=True)[:2] == ["worker-57", "worker-[0-56,58-99]"]


@pytest.mark.parametrize(
    ("steps", "rate"),
    [
        ([100, 96, 100, 100], 0.5),  # four steps
        ([1000, 900, 1000, 1000], 60.0),  # reports that are 2 s apart
        ([600, 610, 620, 630, 640], 1.0),  # all differ
        ([990, 3, 995, 993], 1.0),  # one is in the next epoch
    ],
)
def test_workers_that_differ_as_they_do_at_all_times_are_no_stragglers(steps: list[int], rate: float) -> None:
    found = {f"worker-{rank}": step for rank, step in enumerate(steps)}
    least = min(step for step in steps if step > 3)
    model = of_steps(found, rate=rate)
    metrics: dict[str, Any] = {"progress": {"step": least, "rate": rate}}
    metrics["tasks"] = {name: {"report": {"step": step, "total": 1000}} for name, step in found.items()}
    tell(model, metrics=metrics)
    assert {task.word for task in model.tasks.values()} == {"running"}
    assert model.progress.slowest == ""


def test_the_slowest_rank_is_one_of_those_that_are_marked() -> None:
    model = of_steps({"worker-0": 610, "worker-1": 609, "worker-2": 610})
    metrics = snapshots.metrics(3)
    for name, task in metrics["tasks"].items():
        if name.startswith("worker"):
            task.update(condition="straggler" if name == "worker-2" else "", report={"step": 610, "total": 1000})
    metrics["progress"]["slowest"] = "worker-0"
    tell(model, metrics=metrics)
    assert model.progress.slowest == "worker-2"
    assert [task.name for task in model.tasks.values() if task.word == "straggler"] == ["worker-2"]


def test_a_task_that_waits_long_becomes_a_problem() -> None:
    model = recorded()
    assert not model.tasks["worker-5"].is_problem
    with_task(model, "worker-5", NOW + LONG_WAIT_S)
    assert model.tasks["worker-5"].is_problem
    assert names(model)[:4] == ["worker-1", "worker-3", "worker-5", "worker-4"]
    with_task(model, "worker-5", NOW + LONG_WAIT_S + 1, condition="")
    assert model.tasks["worker-5"].word == "running"
    with_task(model, "worker-5", NOW + LONG_WAIT_S + 2, condition="waiting")
    assert not model.tasks["worker-5"].is_problem


@pytest.mark.parametrize(
    ("order", "first"),
    [
        ("task", "worker-0"),
        ("step", "worker-0"),
        ("host", "worker-0"),
        ("memory", "worker-7"),
        ("last line", "worker-3"),
    ],
)
def test_the_table_is_sorted_as_the_user_wants(order: str, first: str) -> None:
    assert names(recorded(), order)[0] == first


def test_sorted_by_step_the_task_that_is_least_far_is_first_and_those_without_steps_are_last() -> None:
    found = names(of_steps({"worker-0": 12, "worker-1": 9, "worker-2": 100}), "step")
    assert found == ["worker-1", "worker-0", "worker-2", "server-0", "server-1", "scheduler"]


def test_hosts_and_servers_are_in_the_order_of_their_numbers() -> None:
    model = Model("calm-otter-7f3")
    state, metrics = snapshots.state(12), snapshots.metrics(12)
    for task in state["tasks"]:
        task.update(host=f"h{task['rank']}", state="running")
    server = metrics["store"]["servers"]["server-0"]
    metrics["store"]["servers"] = {f"server-{rank}": server for rank in (1, 10, 11, 2)}  # sorted, as frames are
    tell(model, state=state, metrics=metrics)
    assert names(model, "host", wanted="worker") == [f"worker-{rank}" for rank in range(12)]
    assert [server.name for server in model.store.servers] == ["server-1", "server-2", "server-10", "server-11"]


def test_a_filter_is_for_name_host_and_state() -> None:
    model = recorded()
    assert names(model, wanted="gpu02") == ["worker-1", "worker-5"]
    assert names(model, wanted="GPU02 failed") == ["worker-1"]
    assert names(model, wanted="server") == ["server-0", "server-1"]


def test_folded_tasks_of_a_role_and_state_share_a_row_and_problems_have_their_own() -> None:
    assert names(recorded(40), is_folded=True) == [
        "worker-1",
        "worker-3",
        "worker-4",
        "worker-[0,2,6-39]",
        "worker-5",
        "server-[0-1]",
        "scheduler",
    ]


def test_the_first_error_is_the_earliest_that_is_no_consequence() -> None:
    state = snapshots.state(4)
    failed: dict[str, Any] = {"state": "failed", "code": 1}
    state["tasks"][3].update(failed, ended=snapshots.moment(NOW - 90), lost_peer="worker-1")
    state["tasks"][5].update(failed, ended=snapshots.moment(NOW - 30))
    model = tell(Model("calm-otter-7f3"), state=state)
    assert model.first_error is model.tasks["worker-1"]
    tell(model, outcome={"exit_code": 1, "reason": "task_failed", "culprit": {"task": "worker-2"}})
    assert model.first_error is model.tasks["worker-2"]


@pytest.mark.parametrize(
    ("state", "code"), [("running", 0), ("succeeded", 0), ("unknown", 1), ("failed", 1), ("killed", 1), ("lost", 1)]
)
def test_the_exit_code_is_that_of_status_of_a_job(state: str, code: int) -> None:
    model = Model("calm-otter-7f3")
    model.take("state", {"state": snapshots.state(2, state=state)}, NOW)
    assert model.exit_code == code


def test_an_outcome_ends_the_job_with_its_tasks_last_states() -> None:
    model = recorded()
    tasks = [{**each, "state": "stopped", "ended": NOW, "started": NOW - 10} for each in snapshots.state(8)["tasks"]]
    outcome = {"exit_code": 130, "reason": "interrupted", "message": "interrupted", "culprit": None, "tasks": tasks}
    model.take("outcome", {"outcome": outcome}, NOW)
    model.settle(NOW + 5)
    assert (model.job.state, model.job.exit_code, model.job.is_over) == ("killed", 130, True)
    assert model.tasks["worker-0"].uptime(NOW + 100) == 10
    assert model.job.elapsed(NOW + 100) == 730


def test_a_lost_host_and_a_silent_one_are_told_apart() -> None:
    model = recorded()
    model.take("event", {"event": {"event": "cut", "host": "gpu02", "reason": "timeout"}}, NOW)
    model.take("event", {"event": {"event": "lost", "host": "gpu03", "reason": "silent for 30 s"}}, NOW)
    model.settle(NOW)
    assert [host.word for host in model.hosts.values()] == ["ok", "silent", "lost", "ok"]
    assert [group[0].name for group in rows.host_rows(model.hosts.values(), "", True)] == ["gpu02", "gpu03", "gpu01"]
    tell(model, event={"event": "resumed", "host": "gpu02"})
    assert model.hosts["gpu02"].word == "ok"


def test_the_last_line_of_a_task_on_a_silent_host_gets_older() -> None:
    model = recorded()
    metrics = snapshots.metrics(8)
    host = model.tasks["worker-2"].host
    metrics["hosts"][host]["heard_s"] = 17.0
    metrics["tasks"]["worker-2"]["output_age_s"] = 0.4
    tell(model, metrics=metrics)
    assert model.tasks["worker-2"].quiet_s == pytest.approx(17.4)


def test_a_host_whose_agent_said_goodbye_is_not_lost_when_its_connection_ends() -> None:
    model = recorded()
    before = model.events
    for event in ({"event": "bye"}, {"event": "lost", "reason": "its connection ended"}):
        tell(model, event={"host": "gpu02", **event})
    assert model.hosts["gpu02"].word == "ok"
    assert model.events == before


def test_a_host_is_lost_when_a_task_is_lost_with_it() -> None:
    model = recorded()
    state = snapshots.state(8)
    state["tasks"][4].update(state="failed", reason="lost with its host", ended=None)
    tell(model, state=state)
    lost = [task.host for task in model.tasks.values() if task.word == "lost"]
    assert len(lost) == 1
    assert model.hosts[lost[0]].word == "lost"
    assert next(task for task in model.tasks.values() if task.word == "lost").uptime(NOW + 1000) is None


def test_the_task_that_failed_first_is_above_those_that_failed_with_it() -> None:
    model = recorded()
    state = snapshots.state(8)
    failed: dict[str, Any] = {"state": "failed", "code": 1}
    first, second = state["tasks"][5], state["tasks"][3]
    first.update(failed, ended=snapshots.moment(NOW - 10))
    second.update(failed, ended=snapshots.moment(NOW - 20), lost_peer=first["name"])
    tell(model, state=state, outcome={"exit_code": 1, "reason": "failed", "culprit": {"task": first["name"]}})
    assert names(model)[0] == first["name"]


def test_tasks_that_are_no_problems_keep_the_order_of_ranks_whenever_they_ended() -> None:
    state = snapshots.state(12)
    for number, task in enumerate(state["tasks"]):
        task.update(state="exited", code=0, ended=snapshots.moment(NOW - number * 7 % 5))
    model = tell(Model("calm-otter-7f3"), state=state)
    assert names(model)[:12] == [f"worker-{rank}" for rank in range(12)]


def test_a_task_that_ended_well_although_it_lost_another_has_no_reason() -> None:
    state = snapshots.state(8)
    for task in state["tasks"]:
        task.update(state="exited", code=0, lost_peer="worker-5", reason="worker-5@gpu02 failed")
    assert {task.why for task in tell(Model("calm-otter-7f3"), state=state).tasks.values()} == {""}


def test_tasks_that_failed_because_they_lost_another_are_below_its_row_and_dim() -> None:
    state = snapshots.state(8)
    for task in state["tasks"]:
        failed = task["role"] == "worker"
        is_cause = task["name"] == "worker-5"
        ended = snapshots.moment(NOW - (10 if is_cause else 20))
        task.update(
            state="failed" if failed else "running", code=1 if failed else None, ended=ended if failed else None
        )
        task.update({} if is_cause or not failed else {"lost_peer": "worker-5", "reason": "worker-5@gpu02 failed"})
    model = tell(Model("calm-otter-7f3"), state=state)
    assert names(model, is_folded=True) == ["worker-5", "worker-[0-4,6-7]", "server-[0-1]", "scheduler"]
    assert model.tasks["worker-0"].why == "lost worker-5@gpu02 failed"
    found = rows.task_rows(model.tasks.values(), "worker", "problems", False)
    table = rows.tasks(found, 100, NOW, 0.0, text.ASCII, has_marks=True)
    styles = [style for number in range(8) for words, style in table.line(number, False) if words.strip() == "failed"]
    assert styles == [text.RED, *[text.DIM] * 7]


def test_nan_of_a_loss_is_kept_and_members_of_a_newer_version_do_no_harm() -> None:
    metrics = snapshots.metrics(8)
    metrics["progress"].update(loss="nan", novel={"a": 1}, eta_s=None)
    metrics["tasks"]["worker-0"]["report"] = "what is this"
    metrics["hosts"]["gpu01"] = None
    metrics["store"]["servers"]["server-0"] = 7
    model = recorded()
    tell(model, metrics=metrics)
    assert math.isnan(model.progress.loss or 0.0)
    assert model.progress.eta_s is None
    assert model.tasks["worker-0"].step is None


def test_a_frozen_copy_stays_as_it_is() -> None:
    model = recorded()
    held = model.frozen()
    with_task(model, "worker-0", NOW + 1, condition="stalled")
    assert model.tasks["worker-0"].word == "stalled"
    assert held.tasks["worker-0"].word == "running"


def test_a_lost_job_keeps_its_curves_if_its_folder_has_older_ones() -> None:
    model = tell(Model("calm-otter-7f3"), metrics={"reports": {"loss": [[1, 1.0, 2.0], [9, 9.0, 1.0]]}})
    for kept in ({}, {"loss": [[1, 1.0, 2.0]]}):
        assert len(tell(model, reports=kept).reports["loss"]) == 2
    assert tell(model, reports={"loss": [[9, 9.0, 1.0]]}).reports["loss"] == ((9, 9.0, 1.0),)
