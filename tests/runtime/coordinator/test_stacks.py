"""Questions for stacks by scripted histories: each task of each question gets one answer, whoever does not answer."""

from __future__ import annotations

from typing import Any

import pytest

from distrun_runtime.contract import facts
from distrun_runtime.contract.agent_messages import StackFound
from distrun_runtime.contract.control import TaskStack
from distrun_runtime.coordinator.failures import TaskResult
from distrun_runtime.coordinator.jobrun import ANSWER_S, StackQueries
from distrun_runtime.coordinator.messages import AskStack, StackWanted

PLACES = {"scheduler": "h1", "server-0": "h1", "worker-0": "h1", "worker-1": "h2"}


def tasks(**changes: Any) -> dict[str, TaskResult]:
    found = {}
    for name, host in PLACES.items():
        role, _, rank = name.partition("-")
        state = {"state": facts.RUNNING, **changes.get(name.replace("-", "_"), {})}
        found[name] = TaskResult(name, role, int(rank or 0), host, **state)
    return found


def ask(stacks: StackQueries, task: str = "", number: int = 1, reached: str = "h1 h2", **changes: Any) -> Any:
    return stacks.wanted(StackWanted(number, task), tasks(**changes), set(reached.split()), 100.0)


@pytest.fixture
def stacks() -> StackQueries:
    return StackQueries(PLACES)


def said(told: list[tuple[int, TaskStack]]) -> list[tuple[str, str, int]]:
    return [(each.task, each.text or each.error, each.left) for _, each in told]


def test_each_task_has_one_answer_and_the_last_says_so(stacks: StackQueries) -> None:
    asked, told = ask(stacks)
    assert (asked, told) == ([AskStack("h1", 1, "worker-0"), AskStack("h2", 2, "worker-1")], [])
    assert said(stacks.heard(StackFound("h2", 2, "b", "py-spy"))) == [("worker-1", "b", 1)]
    assert stacks.heard(StackFound("h2", 2, "b", "py-spy")) == [], "it is answered"
    assert said(stacks.heard(StackFound("h1", 1, "a", "py-spy"))) == [("worker-0", "a", 0)]
    assert stacks.expired(now=1e9) == []


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("worker-1", ["worker-1"]),
        ("server", ["server-0"]),
        ("scheduler", ["scheduler"]),
        ("", ["worker-0", "worker-1"]),
    ],
)
def test_a_task_is_named_by_its_name_or_its_role(wanted: str, names: list[str]) -> None:
    asked, _ = ask(StackQueries(PLACES), wanted)
    assert [each.task for each in asked] == names


def test_an_unknown_task_is_told_with_the_known_ones() -> None:
    asked, told = ask(StackQueries(PLACES), "worker-7")
    assert asked == []
    known = "no task 'worker-7' in this job; there is: scheduler, server-0, worker-0, worker-1"
    assert said(told) == [("worker-7", known, 0)]


def test_an_agent_that_does_not_answer_is_answered_for(stacks: StackQueries) -> None:
    ask(stacks)
    stacks.heard(StackFound("h1", 1, "a", "py-spy"))
    assert stacks.expired(100.0 + ANSWER_S - 0.1) == []
    late = [("worker-1", "the agent of h2 did not answer within 10 s", 0)]
    assert said(stacks.expired(100.0 + ANSWER_S)) == late
    assert stacks.heard(StackFound("h2", 2, "b", "py-spy")) == []


def test_what_does_not_run_or_cannot_be_reached_is_told_at_once() -> None:
    ended = {"state": facts.FAILED, "signal": "KILL"}
    asked, told = ask(StackQueries(PLACES), reached="h1", worker_0=ended)
    assert asked == []
    answers = [
        ("worker-0", "worker-0 has ended (signal KILL)", 1),
        ("worker-1", "the agent of h2 cannot be reached", 0),
    ]
    assert said(told) == answers
    _, told = ask(StackQueries(PLACES), "worker-0", worker_0={"state": facts.PENDING})
    assert said(told) == [("worker-0", "worker-0 has not started yet", 0)]


def test_an_agent_answers_for_its_own_tasks_only(stacks: StackQueries) -> None:
    ask(stacks)
    assert stacks.heard(StackFound("h1", 2, "forged", "py-spy")) == []
    assert said(stacks.heard(StackFound("h2", 2, "b", "py-spy"))) == [("worker-1", "b", 1)]
