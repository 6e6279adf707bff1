"""Stop sequences: what is sent when, which of two counts, and in which order tasks get their signals."""

from __future__ import annotations

import math
import signal
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
from agentkit import poll
from hypothesis import given
from hypothesis import strategies as st
from slowness import scaled

from distrun_runtime.agent import stopping
from distrun_runtime.agent.stopping import Stopping, StopSequence
from distrun_runtime.contract import facts, process
from distrun_runtime.errors import ContractError


def started(*names: str) -> dict[str, Any]:
    return {
        name: SimpleNamespace(task=SimpleNamespace(name=name, role=name.split("-")[0]), is_reaped=False)
        for name in names
    }


@pytest.mark.parametrize("asked", [["scheduler", "worker-0", "server-0", "worker-1"], ["server-0", "scheduler"]])
def test_signals_go_to_workers_first_then_servers_then_the_scheduler(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = started("scheduler", "server-0", "worker-0", "worker-1")
    order: list[Any] = []
    monkeypatch.setattr(stopping, "deliver", lambda task, rows, number: order.append(task and task.task.name))
    end = Stopping({"DISTRUN_JOB_ID": "j"}, running, is_subreaper=True)
    monkeypatch.setattr(end, "look", dict)
    end.stop(asked, stopping.kill(0.0))
    end.step(0.0)
    whole = ["worker-0", "worker-1", "server-0", "scheduler", None]
    assert order == (whole if len(asked) == 4 else ["server-0", "scheduler"])


def test_a_stop_goes_on_until_its_tasks_are_reaped_and_nothing_of_them_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    running, sent = started("worker-0", "worker-1"), list[str]()
    living: dict[str, Any] = {"worker-0": ["a child"], "worker-1": ["it"]}
    monkeypatch.setattr(stopping, "deliver", lambda task, rows, number: sent.append(task.task.name if task else "job"))
    end = Stopping({}, running, is_subreaper=True)
    monkeypatch.setattr(end, "look", lambda: dict(living))

    def steps(*times: float) -> list[str]:
        sent.clear()
        assert [end.step(now) for now in times] == [None] * len(times)
        return sent

    end.stop(["worker-0"], stopping.kill(0.0))
    assert steps(0.0) == ["worker-0"]
    running["worker-0"].is_reaped = True
    assert steps(0.25) == ["worker-0"], "it has left a child"
    del living["worker-0"]
    steps(0.5)
    assert (end.is_over, end.next_at) == (True, math.inf)
    end.stop(["worker-1"], stopping.kill(1.0))  # now all tasks: the job
    assert steps(1.0, 1.25) == ["worker-1", "job"] * 2
    running["worker-1"].is_reaped = True
    del living["worker-1"]
    assert end.step(1.5) == [], "the report that is owed"
    assert (end.is_over, end.next_at, end.step(9.0)) == (True, math.inf, None)


def test_a_stop_of_the_job_gives_up_in_time_and_reports_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    running = started("worker-0")
    monkeypatch.setattr(stopping, "deliver", lambda *_: None)
    end = Stopping({}, running, is_subreaper=True)
    monkeypatch.setattr(end, "look", lambda: {"worker-0": ["stuck"]})
    end.stop(["worker-0"], stopping.kill(0.0))
    running["worker-0"].is_reaped = True
    assert [end.step(now) for now in (0.0, facts.GIVE_UP_S - 0.5)] == [None, None]
    assert end.step(facts.GIVE_UP_S) == ["stuck"]
    assert end.is_over


def test_a_signal_reaches_the_group_of_a_task_and_what_has_left_it() -> None:
    task, outside, other = (
        subprocess.Popen(["sleep", "600"], start_new_session=True, env={"JOB": job, "DISTRUN_ROLE": "worker", **rank})
        for job, rank in (("j", {"DISTRUN_RANK": "0"}), ("j", {}), ("another", {"DISTRUN_RANK": "0"}))
    )
    try:
        poll(lambda: all("JOB" in process.environ_of(each.pid) for each in (task, outside, other)), "they have begun")
        rows = process.table([task.pid, outside.pid])
        running = started("worker-0")["worker-0"]
        running.task.rank, running.was_signalled = 0, False
        running.leader = next(row.identity for row in rows if row.pid == task.pid)
        end = Stopping({"JOB": "j"}, {"worker-0": running}, is_subreaper=False)
        assert [end.task_of(each.pid) for each in (task, outside, other)] == ["worker-0", "", ""]
        stopping.deliver(None, [row for row in rows if row.pid == outside.pid], signal.SIGTERM)
        assert outside.wait(scaled(60)) == -signal.SIGTERM
        stopping.deliver(running, [], signal.SIGINT)
        assert task.wait(scaled(60)) == -signal.SIGINT
        assert running.was_signalled
    finally:
        for each in (task, outside, other):
            each.kill()
            each.wait(scaled(60))


def history(one: StopSequence, times: list[float]) -> list[str | None]:
    sent = []
    for now in times:
        one, number = one.due(now)
        sent.append(None if number is None else signal.Signals(number).name[3:])
    return sent


def test_steps_go_out_in_time_and_kill_repeats() -> None:
    one = stopping.parse([["INT", 10.0], ["SIGTERM", 5.0], ["KILL", 0]], now=100.0)
    assert (one.next_at, one.kill_at, one.gives_up_at) == (100.0, 115.0, 118.0)
    assert history(one, [100, 105, 110, 114.9, 115, 115.1, 115.25, 115.5]) == [
        "INT", None, "TERM", None, "KILL", None, "KILL", "KILL",
    ]  # fmt: skip


def test_late_loop_sends_only_the_last_step_that_is_due() -> None:
    one = stopping.parse([["INT", 1.0], ["TERM", 1.0], ["KILL", 0]], now=0.0)
    assert history(one, [50.0, 50.0]) == ["KILL", None]


def test_sequence_without_kill_ends_after_its_last_wait() -> None:
    one = stopping.parse([["TERM", 4.0]], now=0.0)
    assert history(one, [0.0, 100.0]) == ["TERM", None]
    assert (one.kill_at, one.gives_up_at) == (math.inf, 4.0)


@given(
    st.lists(st.tuples(st.sampled_from(["INT", "TERM", "KILL"]), st.floats(0, 20)), min_size=1, max_size=4), st.data()
)
def test_next_is_always_later_than_now_once_it_was_asked(steps: list[tuple[str, float]], data: st.DataObject) -> None:
    one = stopping.parse(steps, now=0.0)
    for now in sorted(data.draw(st.lists(st.floats(0, 100), max_size=20))):
        one, _ = one.due(now)
        assert one.next_at > now


def test_sequence_that_kills_earlier_counts() -> None:
    slow = stopping.parse([["INT", 10], ["TERM", 5], ["KILL", 0]], now=0.0)
    quick = stopping.gentle(2.0, now=1.0)
    assert stopping.harsher(None, slow) is slow
    assert stopping.harsher(slow, quick) is quick
    assert stopping.harsher(quick, slow) is quick
    assert stopping.harsher(quick, stopping.kill(1.5)).steps == (("KILL", 0.0),)
    assert stopping.harsher(slow, stopping.parse([["TERM", 1]], now=0.0)) is slow


@pytest.mark.parametrize(
    "steps", [[], [["TERM"]], [["NOPE", 1]], [["TERM", -1]], [["TERM", "x"]], [["KILL", math.nan]], [5]]
)
def test_what_is_no_stop_sequence_is_refused(steps: list[object]) -> None:
    with pytest.raises(ContractError):
        stopping.parse(steps, now=0.0)


def test_signals_go_by_name() -> None:
    assert stopping.signal_number("SIGTERM") == stopping.signal_number("term") == 15
    with pytest.raises(ContractError, match="no signal is called 'SIG_IGN'"):
        stopping.signal_number("SIG_IGN")
