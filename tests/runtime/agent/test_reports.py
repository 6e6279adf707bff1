"""The agent's end of what tasks report."""

from __future__ import annotations

import json
import math
import os
import selectors
import socket
import stat
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrun_runtime.agent import measuring as frames
from distrun_runtime.agent.measuring import NAMES, TURN, Reports, checked
from distrun_runtime.contract import metrics, session
from distrun_runtime.contract.metrics import Sender

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
MEMBERS = st.sampled_from(
    ["step", "total", "values", "role", "lags", "for", "key", "call", "since", "pid", "how", "path"]
)


class Desk:
    """The sockets of two tasks, and who sends there."""

    def __init__(self, folder: Path) -> None:
        self.selector = selectors.PollSelector()
        self.reports = Reports(str(folder), self.selector)
        self.paths = {task: self.reports.open(task) for task in ("worker-0", "worker-1")}
        self.senders = {task: Sender(path, task) for task, path in self.paths.items()}

    def send(self, task: str, kind: str, **members: Any) -> bool:
        return self.senders[task].send(kind, **members)

    def close(self) -> None:
        for sender in self.senders.values():
            sender.close()
        self.reports.close()
        assert not self.selector.get_map()
        self.selector.close()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_the_last_of_each_kind_is_kept_for_each_task(desk: Desk) -> None:
    for step in range(3):
        assert desk.send("worker-0", "report", step=step, total=10, values={"loss": math.inf})
    assert desk.send("worker-0", "counters", role="worker", values={"store_calls": 4})
    assert desk.send("worker-1", "waiting", **{"for": ["server-0"], "key": 3, "call": "pull", "since": 7.5})
    desk.reports.drain()
    said = desk.reports.last["worker-0"]
    assert said["report"].pop("time") > 1e9
    assert said["report"] == {"step": 2, "total": 10, "values": {"loss": math.inf}}
    assert said["counters"]["values"] == {"store_calls": 4}
    assert desk.reports.last["worker-1"]["waiting"]["key"] == "3"
    assert desk.send("worker-1", "waiting", **{"for": []})
    desk.reports.drain()
    assert "waiting" not in desk.reports.last["worker-1"]


def test_a_task_that_is_started_again_has_said_nothing(desk: Desk) -> None:
    assert desk.send("worker-0", "report", step=1)
    desk.reports.drain()
    assert desk.reports.open("worker-0") == desk.paths["worker-0"]
    assert "worker-0" not in desk.reports.last
    assert desk.send("worker-0", "report", step=0), "by the same name"
    desk.reports.drain()
    assert desk.reports.last["worker-0"]["report"]["step"] == 0


def test_what_is_none_of_ours_is_ignored(desk: Desk) -> None:
    good = {"v": 1, "kind": "report", "task": "worker-0", "step": 1}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for data in (
            b"",
            b"\xff",
            b"[" * 4096,
            json.dumps({**good, "task": "worker-7"}).encode(),
            json.dumps({**good, "task": "worker-1"}).encode(),
            json.dumps({**good, "v": 2}).encode(),
            json.dumps({**good, "values": {"x" * 5000: 1}}).encode(),
        ):
            sender.sendto(data, desk.paths["worker-0"])
            desk.reports.drain()
    assert desk.reports.last == {}


def test_stacks_are_told_one_by_one(desk: Desk) -> None:
    heard = []
    desk.reports.on_stacks = lambda task, found: heard.append((task, found["pid"], found["start"]))
    assert desk.send("worker-0", "stacks", pid=1, start="proc:1", how="sigurg", path="/a")
    assert desk.send("worker-0", "stacks", pid=2, start="proc:2", how="sigurg", path="/b")
    desk.reports.drain()
    assert heard == [("worker-0", 1, "proc:1"), ("worker-0", 2, "proc:2")]


@given(st.sampled_from(metrics.KINDS), st.dictionaries(MEMBERS, JSON, max_size=6))
def test_whatever_a_task_says_can_be_sent_on(kind: str, said: dict[str, Any]) -> None:
    kept = checked(kind, said)
    assert kept is not None or kind == "waiting"
    session.encode({"type": "metrics", "tasks": {"worker-0": {kind: kept}}})
    for name, value in ((kept or {}).get("values") or {}).items():
        assert isinstance(name, str)
        float(value)


def test_numbers_are_limited_in_count_and_in_size() -> None:
    many = {f"n{at}": at for at in range(100)}
    assert len(checked("report", {"values": many})["values"]) == NAMES  # type: ignore[index]
    huge = checked("report", {"step": 1 << 70, "values": {"a": 10**400, "b": True, "c": "1"}})
    assert huge == {"step": None, "total": None, "values": {}}


def test_the_socket_is_its_users_only(desk: Desk) -> None:
    assert {stat.S_IMODE(os.stat(path).st_mode) for path in desk.paths.values()} == {0o600}


def test_one_turn_takes_a_part_of_what_comes(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    class Flood:
        def recv(self, limit: int) -> bytes:
            taken.append(limit)
            return b"{}"

    with monkeypatch.context() as patch:
        patch.setattr(desk.reports, "_sockets", {"worker-0": Flood()})
        assert desk.reports.drain() == len(taken) == TURN


@pytest.mark.parametrize(("rate", "turns", "lost"), [(1, 7, 0), (10, 8, 0), (100, 50, 60)])
def test_datagrams_are_taken_in_few_turns_before_a_socket_is_full(
    rate: int, turns: int, lost: int, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many a second, for three seconds of a clock that is made up. The other task's find room anyway."""
    now = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr("distrun_runtime.agent.measuring.time", clock)
    took, missing, steps = 0, 0, 1000
    for at in range(3 * steps):
        now[0] = at / steps
        if at % (steps // rate) == 0:
            missing += not desk.send("worker-0", "report", step=at)
        if at % steps == 0:
            assert desk.send("worker-1", "report", step=at)
        ready = desk.selector.select(0) if desk.selector.get_map() else []
        for key, _ in ready[:1]:
            took += 1
            key.data()
        if now[0] >= desk.reports.next_at:
            took += 1
            desk.reports.tick(now[0])
    assert took <= turns
    assert missing <= lost, "a few, until it is seen that many come"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_tasks_reach_a_socket_in_a_folder_with_a_long_name(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 150)
    folder.mkdir(mode=0o700)
    desk = Desk(folder)
    assert desk.send("worker-1", "report", step=1)
    desk.reports.drain()
    assert desk.reports.last["worker-1"]["report"]["step"] == 1
    desk.close()
    assert list(folder.iterdir()) == []


def test_without_proc_a_name_that_is_too_long_gives_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRUN_PORTABLE", "1")
    folder = tmp_path / ("x" * 150)
    folder.mkdir()
    with selectors.PollSelector() as selector, pytest.raises(OSError, match="too long"):
        Reports(str(folder), selector).open("worker-0")


# The frame


def report(numbers: int) -> dict[str, Any]:
    return {"step": 1, "values": {f"n{at}": at for at in range(numbers)}}


def test_the_longest_reports_lose_their_values_if_a_frame_would_be_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "server-0": {"counters": {"role": "server", "values": {"keys": 3}, "lags": {"0": [1.0]}}},
        "worker-0": {"report": report(3), "waiting": {"for": ["server-0"]}},
        "worker-1": {"report": report(30)},
    }
    sizes = {("server-0", "counters"): 3000, ("worker-0", "report"): 90, ("worker-1", "report"): 500}
    assert frames.fitting(said, sizes) is said
    monkeypatch.setattr(frames, "FRAME_BYTES", 2500)
    cut = frames.fitting(said, sizes)
    assert cut["server-0"] == {"counters": {"role": "server"}}
    assert cut["worker-1"] == said["worker-1"]
    monkeypatch.setattr(frames, "FRAME_BYTES", 1700)
    cut = frames.fitting(said, sizes)
    assert cut["worker-1"] == {"report": {"step": 1}}
    assert cut["worker-0"] == said["worker-0"]
    assert "values" in said["worker-1"]["report"], "what was kept is as it was"


def test_a_gpu_tells_of_a_task_if_no_other_uses_it() -> None:
    gpus = [
        {"uuid": "GPU-a", "util": 0.5, "pids": {"1": 100, "2": None}},
        {"uuid": "GPU-b", "util": 0.9, "pids": {"1": 10, "3": 20}},
        {"uuid": "GPU-c", "pids": {"3": 5}},
        {"uuid": "GPU-d", "util": 1.0},
    ]
    owners = {1: "worker-0", 2: "worker-0", 3: "worker-1"}
    assert frames._gpu("worker-0", gpus, owners) == {"gpu": 0.5, "gpu_mem": 110}
    assert frames._gpu("worker-1", gpus, owners) == {"gpu_mem": 25}
    assert frames._gpu("worker-2", gpus, owners) == {}


def test_interpreters_of_the_tasks_come_first() -> None:
    argv = [[b"python", b"a.py"], [b"sh", b"-c"], [b"/opt/python3.11", b"b.py"]]
    assert frames.pythons({"python": "3.11.7 /venv/bin/python"}, argv) == [b"/venv/bin/python", b"python"]
    assert frames.pythons({}, [[b"./train"]]) == []
