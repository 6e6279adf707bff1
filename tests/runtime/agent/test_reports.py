"""The agent's end of what tasks report."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrun_runtime.agent import metrics as frames
from distrun_runtime.agent.reports import NAMES, TURN, Reports, checked
from distrun_runtime.contract import metrics, wire
from distrun_runtime.contract.metrics import Sender

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
MEMBERS = st.sampled_from(
    ["step", "total", "values", "role", "lags", "for", "key", "call", "since", "pid", "how", "path"]
)


@pytest.fixture
def closing() -> Iterator[Callable[[Sender], Sender]]:
    with contextlib.ExitStack() as stack:
        yield lambda sender: stack.enter_context(contextlib.closing(sender))


@pytest.fixture
def reports(tmp_path: Path) -> Iterator[Reports]:
    made = Reports(str(tmp_path), {"worker-0", "worker-1"}.__contains__)
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_the_last_of_each_kind_is_kept_for_each_task(reports: Reports, closing: Callable[[Sender], Sender]) -> None:
    one, other = closing(Sender(reports.path, "worker-0")), closing(Sender(reports.path, "worker-1"))
    for step in range(3):
        assert one.send("report", step=step, total=10, values={"loss": math.inf})
    assert one.send("counters", role="worker", values={"store_calls": 4})
    assert other.send("waiting", **{"for": ["server-0"], "key": 3, "call": "pull", "since": 7.5})
    reports.drain()
    said = reports.last["worker-0"]
    assert said["report"].pop("time") > 1e9
    assert said["report"] == {"step": 2, "total": 10, "values": {"loss": math.inf}}
    assert said["counters"]["values"] == {"store_calls": 4}
    assert reports.last["worker-1"]["waiting"]["key"] == "3"
    assert other.send("waiting", **{"for": []})
    reports.drain()
    assert "waiting" not in reports.last["worker-1"]
    reports.forget("worker-0")
    assert "worker-0" not in reports.last


def test_what_is_none_of_ours_is_ignored(reports: Reports) -> None:
    good = {"v": 1, "kind": "report", "task": "worker-0", "step": 1}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for data in (
            b"",
            b"\xff",
            b"[" * 4096,
            json.dumps({**good, "task": "worker-7"}).encode(),
            json.dumps({**good, "v": 2}).encode(),
            json.dumps({**good, "values": {"x" * 5000: 1}}).encode(),
        ):
            sender.sendto(data, reports.path)
            reports.drain()
    assert reports.last == {}


@given(st.sampled_from(metrics.KINDS), st.dictionaries(MEMBERS, JSON, max_size=6))
def test_whatever_a_task_says_can_be_sent_on(kind: str, said: dict[str, Any]) -> None:
    kept = checked(kind, said)
    assert kept is not None or kind == "waiting"
    wire.encode({"type": "metrics", "tasks": {"worker-0": {kind: kept}}})
    for name, value in ((kept or {}).get("values") or {}).items():
        assert isinstance(name, str)
        float(value)


def test_numbers_are_limited_in_count_and_in_size() -> None:
    many = {f"n{at}": at for at in range(100)}
    assert len(checked("report", {"values": many})["values"]) == NAMES  # type: ignore[index]
    huge = checked("report", {"step": 1 << 70, "values": {"a": 10**400, "b": True, "c": "1"}})
    assert huge == {"step": None, "total": None, "values": {}}


def test_the_socket_is_its_users_only(reports: Reports) -> None:
    assert stat.S_IMODE(os.stat(reports.path).st_mode) == 0o600


def test_one_turn_takes_a_part_of_what_comes(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    class Flood:
        def recv(self, limit: int) -> bytes:
            taken.append(limit)
            return b"{}"

        def close(self) -> None:
            pass

    held = reports._socket
    monkeypatch.setattr(reports, "_socket", Flood())
    reports.drain()
    assert len(taken) == TURN
    monkeypatch.setattr(reports, "_socket", held)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_tasks_reach_a_socket_in_a_folder_with_a_long_name(tmp_path: Path, closing: Callable[[Sender], Sender]) -> None:
    folder = tmp_path / ("x" * 150)
    folder.mkdir(mode=0o700)
    reports = Reports(str(folder), {"worker-0"}.__contains__)
    assert closing(Sender(reports.path, "worker-0")).send("report", step=1)
    reports.drain()
    assert reports.last["worker-0"]["report"]["step"] == 1
    reports.close()
    assert list(folder.iterdir()) == []


def test_without_proc_a_name_that_is_too_long_gives_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRUN_PORTABLE", "1")
    folder = tmp_path / ("x" * 150)
    folder.mkdir()
    with pytest.raises(OSError, match="too long"):
        Reports(str(folder), bool)


# The frame


def report(numbers: int) -> dict[str, Any]:
    return {"step": 1, "values": {f"n{at}": at for at in range(numbers)}}


def test_the_longest_reports_lose_their_values_if_a_frame_would_be_too_long() -> None:
    said = {
        "server-0": {"counters": {"role": "server", "values": {"keys": 3}, "lags": {"0": [1.0]}}},
        "worker-0": {"report": report(3), "waiting": {"for": ["server-0"]}},
        "worker-1": {"report": report(30)},
    }
    sizes = {("server-0", "counters"): 3000, ("worker-0", "report"): 90, ("worker-1", "report"): 500}
    assert frames.fitting(said, sizes) is said
    cut = frames.fitting(said, sizes, 2500)
    assert cut["server-0"] == {"counters": {"role": "server"}}
    assert cut["worker-1"] == said["worker-1"]
    cut = frames.fitting(said, sizes, 1700)
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
