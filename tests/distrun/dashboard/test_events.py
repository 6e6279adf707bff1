"""Events of a job as the dashboard and `distrun status JOB` show them."""

from __future__ import annotations

from typing import Any

from distrun.dashboard import text
from distrun.dashboard.events import EventLine, EventReader, folded

AT = {"version": 1, "time": "2026-11-24T15:49:45.000Z", "host": "d1"}
ERROR = "worker-0@d1 (pid 7) failed: ValueError: no"


def read(*events: dict[str, Any]) -> list[EventLine]:
    reader = EventReader()
    return [found for event in events if (found := reader.take({**AT, **event})) is not None]


def told(*events: dict[str, Any]) -> list[str]:
    return [found.words for found in read(*events)]


def exited(task: str, code: int | None = 1, **more: Any) -> dict[str, Any]:
    return {"event": "exited", "task": task, "code": code, "signal": None, "stopped": False, "reason": "", **more}


def published(task: str, stopped: bool = False, **values: str) -> dict[str, Any]:
    return {"event": "published", "task": task, "stopped": stopped, "values": values}


def said(text: str, repeats: str = "") -> dict[str, Any]:
    return {"event": "said", "level": "warning", "text": text, "repeats": repeats}


def test_a_failure_is_told_once() -> None:
    history = [
        published("worker-0", failed="ValueError: no"),
        *(published(name, lost_peer="worker-0", message=ERROR) for name in ("scheduler", "worker-1", "server-0")),
        exited("worker-0"),
        said("the job is being stopped: worker-0", repeats="worker-0"),
        {"event": "state", "state": "stopping"},
        published("server-0", stopped=True, lost_peer="scheduler", message="the scheduler was told to end by SIGTERM"),
    ]
    assert told(*history) == ["worker-0 on d1: ValueError: no", "worker-0 on d1: exit code 1", "job is stopping"]


def test_the_first_of_those_that_lost_a_task_tells_of_it() -> None:
    history = [published(name, lost_peer="worker-0", message="it is silent") for name in ("scheduler", "worker-1")]
    assert told(*history) == ["scheduler on d1: it is silent"]


def test_a_message_that_says_more_than_a_failure_is_told() -> None:
    silent = "d1 has been silent for 10 s, and tasks on other hosts lost those on it; stopping the job"
    other = "worker-1 on d1: exit code 1; stopping the job"
    assert told(exited("worker-0"), said(other, repeats="worker-1"), said(silent))[1:] == [other, silent]
    assert told(exited("worker-0", None, signal="KILL"), said("it is stopped", repeats="worker-0")) == [
        "worker-0 on d1: signal KILL"
    ]


def test_a_signal_to_the_job_is_told_once() -> None:
    history = [{"event": "interrupt", "signal": "TERM"}, said("terminated (SIGTERM): stopping all tasks")]
    assert told(*history) == ["terminated (SIGTERM): stopping all tasks"]


def test_a_lost_host_is_told_once_and_not_at_all_after_its_goodbye() -> None:
    lost = {"event": "lost", "reason": "silent for 30 s"}
    assert told(lost, said("a host is lost", repeats="d1")) == ["d1: host lost: silent for 30 s"]
    assert told({"event": "bye"}, lost) == []
    assert told({"event": "bye"}, {"event": "ready"}, lost)[1:] == ["d1: host lost: silent for 30 s"]


def test_what_happened_to_many_tasks_is_one_line_and_the_cause_stays_in_sight() -> None:
    def of_all(event: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**event, "task": f"worker-{rank}", "host": f"h{rank % 10}"} for rank in range(100) if rank != 57]

    history = [
        *of_all({"event": "started", "pid": 7, "attempt": 0}),
        exited("worker-57"),
        {"event": "state", "state": "stopping"},
        *of_all(exited("", None, signal="TERM", stopped=True)),
    ]
    assert [line.words for line in folded(read(*history))] == [
        "worker-[0-56,58-99] on h[0-9]: started",
        "worker-57 on d1: exit code 1",
        "job is stopping",
        "worker-[0-56,58-99] on h[0-9]: stopped (signal TERM)",
    ]


def test_the_same_is_told_again_if_it_happens_again_later() -> None:
    later = {"time": "2026-11-24T15:50:45.000Z"}
    history = [{"event": "ready"}, {"event": "ready", "host": "d2"}, {"event": "ready", **later}]
    assert [line.words for line in folded(read(*history))] == ["d[1-2]: host is ready", "d1: host is ready"]
    messages = [said("disk nearly full"), said("disk nearly full")]
    assert [line.words for line in folded(read(*messages))] == ["disk nearly full", "disk nearly full"]


def test_tasks_that_failed_because_they_lost_another_are_told_as_consequences() -> None:
    history = [
        *(published(name, lost_peer="worker-1", message=ERROR) for name in ("worker-0", "worker-2")),
        published("worker-1", failed="ValueError: no"),
        *(exited(name) for name in ("worker-0", "worker-1", "worker-2")),
    ]
    assert [(line.words, line.style) for line in folded(read(*history))] == [
        (f"worker-0 on d1: {ERROR}", text.YELLOW),
        ("worker-1 on d1: ValueError: no", text.RED),
        ("worker-[0,2] on d1: exit code 1 after it lost worker-1", text.DIM),
        ("worker-1 on d1: exit code 1", text.RED),
    ]


def test_the_tasks_that_a_message_is_about_are_those_that_it_names_as_data() -> None:
    def tasks(event: dict[str, Any]) -> tuple[str, ...] | None:
        found = EventReader().take({**AT, **event})
        return None if found is None else found.tasks

    assert tasks({**said("worker-9: no matter what"), "tasks": ["worker-1", "worker-2"]}) == ("worker-1", "worker-2")
    assert tasks(exited("worker-3")) == ("worker-3",)


def test_a_host_that_is_cut_again_is_told_again_behind_its_return() -> None:
    def at(second: int, event: str) -> dict[str, Any]:
        return {"event": event, "host": "h1", "time": f"2026-11-24T15:50:0{second}.000Z"}

    lines = [line.words for line in folded(read(at(0, "cut"), at(3, "resumed"), at(6, "cut")))]
    assert lines == [lines[0], lines[1], lines[0]]
