"""What nodes tell their agent: counters, lags of workers by scripted histories, and what a script waits for."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpukit import Machine, gpus_of_process
from history_server import History
from manual import ManualJob
from slowness import scaled

from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays.cuda import CudaMissing
from distrun_runtime.contract import metrics
from distrun_runtime.ps.counters import Lags, NodeMetrics
from distrun_runtime.ps.role import NodeRequest, Waits

LIMIT_S = 60.0


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / metrics.SOCKET))
        listening.settimeout(scaled(LIMIT_S))
        yield listening


# Lags


def lags_of(rounds: int, late_s: Callable[[int, int], float], workers: int = 3, round_s: float = 1.0) -> Lags:
    """Return the lags after rounds of a second in which worker `rank` comes `late_s(rank, round)` late."""
    lags = Lags(0)
    for number in range(1, rounds + 1):
        for when, rank in sorted((late_s(rank, number), rank) for rank in range(workers)):
            lags.contributed((rank,), number, workers, number * round_s + when)
    return lags


def test_the_worker_that_comes_last_is_counted_with_its_lag() -> None:
    found = lags_of(10, lambda rank, number: (0.0, 0.1, 0.5)[rank]).to_json()
    assert found == {"0": [-0.1, 0, -0.1, 1.0], "1": [0.0, 0, 0.0, 1.0], "2": [0.4, 9, 0.4, 1.0]}


def test_only_the_last_20_rounds_count() -> None:
    found = lags_of(60, lambda rank, number: 0.3 if rank == (0 if number <= 50 else 1) else 0.0).to_json()
    assert (found["0"][1], found["1"][1], found["2"][1]) == (10, 10, 0)


def test_rounds_that_follow_at_once_are_not_sampled() -> None:
    lags = Lags(0)
    for number in range(1, 2001):
        for rank in (0, 1):
            lags.contributed((rank,), number, 2, number * 0.001)
    assert lags.to_json() == {"0": [0.0, 0, 0.0, 0.001], "1": [0.0, 20, 0.0, 0.001]}


def test_a_round_that_began_before_it_could_be_sampled_is_not_sampled_from_its_middle() -> None:
    lags = Lags(0)
    for number in (1, 2, 3, 4):
        # Right after the round before, within the time that is left between two sampled rounds; the other one late.
        lags.contributed((0,), number, 2, number * 1.0 - 0.99)
        lags.contributed((1,), number, 2, float(number))
    assert lags.to_json() == {"0": [0.0, 0, 0.0, 1.0], "1": [0.99, 1, 0.99, 1.0]}, "the third one"


def test_a_round_that_is_never_complete_does_not_end_the_sampling() -> None:
    lags = Lags(0)
    lags.contributed((0,), 1, 2, 1.0)
    lags.contributed((0,), 2, 2, 2.0)
    for number in (3, 4, 5):
        for rank in (0, 1):
            lags.contributed((rank,), number, 2, number + rank / 2)
    assert {rank: each[1] for rank, each in lags.to_json().items()} == {"0": 0, "1": 2}


def test_of_a_sum_of_several_workers_none_is_called_the_last() -> None:
    lags = Lags(0)
    for number in (1, 2, 3):
        lags.contributed((0,), number, 3, number)
        lags.contributed((1, 2), number, 3, number + 0.5)
    assert {rank: each[1] for rank, each in lags.to_json().items()} == {"0": 0, "1": 0, "2": 0}


def test_workers_that_are_excused_are_not_waited_for() -> None:
    lags = Lags(0)
    for number in (1, 2, 3):
        for rank in (0, 2):
            lags.contributed((rank,), number, 2, number + rank / 4)
    assert {rank: each[1] for rank, each in lags.to_json().items()} == {"0": 0, "2": 2}


def test_one_worker_has_no_lag() -> None:
    assert lags_of(10, lambda rank, number: 0.0, workers=1).to_json() == {}


def test_of_many_workers_those_are_told_that_come_last_most_often() -> None:
    found = lags_of(21, lambda rank, number: 0.5 if rank == 70 + number % 2 else 0.0, workers=100).to_json()
    assert len(found) == 40
    assert (found["70"][1], found["71"][1]) == (10, 10)
    assert metrics.encode(metrics.COUNTERS, "server-0", {"lags": found, "values": {}}) is not None


# Counters


def test_a_server_counts_messages_values_and_who_waits() -> None:
    with History(workers=2) as server:
        server.push(0, 1, {"a": [1, 1]})
        server.push(1, 1, {"a": [1, 1]})
        server.push(0, 2, {"a": [1, 1]})
        assert server.pull(0, 2, "a") == []
        found = server.counters()
    wanted = {"pushes": 3, "pulls": 1, "rounds": 1, "updates": 1, "waiting": 1, "staleness_max": 0}
    assert {name: found[name] for name in wanted} == wanted
    assert found["keys"] > 0
    assert found["bytes"] > 0
    assert found["bytes_in"] == 40, "two initial values, three contributions"


def test_a_server_tells_where_its_values_are_and_why_not_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise CudaMissing("a GPU needs cupy, which is not installed")

    monkeypatch.setattr(devices, "gpus", missing)
    for more, wanted in (({"on_devices": True}, True), ({}, False)):
        with History(settings={"server_device": "auto"}, has_keys=False) as server:
            assert server.devices() == {}
            server.init({"a": [1, 1]}, **more)
            why = {"device_why": "a GPU needs cupy, which is not installed"}
            assert server.devices() == {"device": "cpu:0", **(why if wanted else {})}
    monkeypatch.undo()
    with gpus_of_process(Machine(1)), History(settings={"server_device": "auto"}, on_devices=True) as server:
        assert server.devices() == {"device": "gpu:0"}
        server.rule("lamb")
        assert server.devices() == {"device": "cpu:0", "device_why": "rule 'lamb' needs norms over the whole value"}
    sent = Sent()
    told = NodeMetrics("server", sent, dict, devices=lambda: {"device": "x" * 4096})  # type: ignore[arg-type]
    told.tick(1.0)
    assert metrics.encode("counters", "server-0", sent.take()[0]) is not None


class Sent:
    def __init__(self) -> None:
        self.datagrams: list[dict[str, Any]] = []
        self.is_full = False

    def send(self, kind: str, /, **members: Any) -> bool:
        if self.is_full:
            return False
        self.datagrams.append({"kind": kind, **members})
        return True

    def take(self) -> list[dict[str, Any]]:
        found, self.datagrams = self.datagrams, []
        return found


def test_counters_are_sent_once_a_second() -> None:
    sent, count = Sent(), {"store_calls": 0}
    told = NodeMetrics("worker", sent, lambda: count)  # type: ignore[arg-type]
    for tick in range(31):
        told.tick(100 + tick / 10)
    assert sent.take() == [{"kind": "counters", "role": "worker", "values": count}] * 4


def test_a_wait_of_the_script_is_told_with_whom_and_its_end() -> None:
    sent, waits, wall = Sent(), Waits(), [1000.0]
    told = NodeMetrics("worker", sent, dict, waits=waits, wall=lambda: wall[0])  # type: ignore[arg-type]

    def at(second: float) -> list[dict[str, Any]]:
        wall[0] = 1000 + second
        told.tick(50 + second)
        return [each for each in sent.take() if each["kind"] == metrics.WAITING]

    request = NodeRequest("pull of key 'w'", waits=waits)
    request.missing = {7: "server-0"}
    waits.request, waits.since = request, 1000.0
    assert at(0.9) == []
    assert at(1.5) == [], "nobody has said yet for whom"
    request.awaited, request.awaited_key = ("worker-1",), "w"
    [said] = at(2.1)
    assert said == {"kind": "waiting", "for": ("worker-1",), "key": "w", "call": "pull", "since": 1000.0}
    assert at(3) == []
    assert len(at(8)) == 1, "again: it may have been lost"
    waits.request = None
    [over] = at(9)
    assert over["for"] == []
    assert at(10) == []


def test_the_end_of_a_wait_that_could_not_be_sent_is_sent_later() -> None:
    sent, waits, wall = Sent(), Waits(), [1000.0]
    told = NodeMetrics("worker", sent, dict, waits=waits, wall=lambda: wall[0])  # type: ignore[arg-type]
    waits.request, waits.since = NodeRequest("push of key 'w'", waits=waits), 1000.0
    waits.request.awaited = ("server-0",)
    wall[0] = 1002.0
    told.tick(2.0)
    waits.request, sent.is_full = None, True
    told.tick(3.0)
    sent.is_full = False
    sent.take()
    told.tick(4.0)
    assert [each["for"] for each in sent.take() if each["kind"] == metrics.WAITING] == [[]]


def test_a_fault_of_the_counters_does_not_end_the_node(capsys: pytest.CaptureFixture[str]) -> None:
    sent = Sent()
    told = NodeMetrics("server", sent, lambda: {"rounds": 1 // 0})  # type: ignore[arg-type]
    told.tick(1.0)
    told.tick(9.0)
    assert sent.take() == []
    assert capsys.readouterr().err.count("ZeroDivisionError") == 1, "once"


def test_a_wait_for_a_server_that_says_nothing_is_for_that_server() -> None:
    sent, waits, wall = Sent(), Waits(), [1000.0]
    told = NodeMetrics("worker", sent, dict, waits=waits, wall=lambda: wall[0])  # type: ignore[arg-type]
    waits.request, waits.since = NodeRequest("push of key 'w'", waits=waits), 1000.0
    waits.request.missing = {7: "server-1", 8: "server-0"}
    wall[0] = 1003.5
    told.tick(3.5)
    assert sent.take()[0]["for"] == ("server-0", "server-1")


# A real store

SCRIPT = """
    import os, sys, time
    import numpy as np
    from distrun_runtime import kvstore
    kv = kvstore.create("dist_sync")
    kv.init("w", np.zeros(4, np.float32))
    out = np.empty(4, np.float32)
    for step in range(4):
        time.sleep(0.1)  # longer than rounds that are sampled are apart
        if kv.rank == 1 and step == 3:
            print("late", flush=True)
            while not os.path.exists(sys.argv[1]):
                time.sleep(0.01)
        kv.push("w", np.ones(4, np.float32))
        kv.pull("w", out=out)
        kv.report(step=step + 1, total=4, loss=out.sum())
    kv.barrier()
    time.sleep(1.5)  # the node's threads go on telling
    kv.close()
"""


@pytest.mark.slow
def test_the_nodes_of_a_real_store_tell_what_they_count_and_wait_for(agent: socket.socket, tmp_path: Path) -> None:
    seen: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def until(what: Callable[[], object]) -> None:
        end = time.monotonic() + scaled(LIMIT_S)
        while not what():
            assert time.monotonic() < end, "%s\n%s" % (seen, job.report())
            found = metrics.decode(agent.recv(metrics.LIMIT))
            seen.setdefault((found["task"], found["kind"]), []).append(found)

    go_on = tmp_path / "go"
    with ManualJob(workers=2, servers=1, DISTRUN_METRICS_SOCKET=agent.getsockname()) as job:
        script = job.script(SCRIPT)
        for role, rank in (("scheduler", 0), ("server", 0), ("worker", 0), ("worker", 1)):
            command = [script, str(go_on)] if role == "worker" else []
            job.start(role, *command, DISTRUN_ROLE=role, DISTRUN_RANK=str(rank), DMLC_RANK=str(rank))
        until(lambda: seen.get(("worker-0", "waiting")))
        said = seen["worker-0", "waiting"][0]
        assert (said["for"], said["key"], said["call"]) == (["worker-1"], "w", "pushpull")
        assert said["since"] == pytest.approx(time.time(), abs=LIMIT_S)
        go_on.touch()
        until(lambda: seen["worker-0", "waiting"][-1]["for"] == [])
        until(lambda: [each for each in seen["server-0", "counters"] if each["values"]["rounds"] == 4])
        until(lambda: [each for each in seen["scheduler", "counters"] if each["values"]["barriers"] == 1])
        until(lambda: any(each["step"] == 4 for each in seen.get(("worker-1", "report"), [])))
        assert job.wait() == [0, 0, 0, 0], job.report()
    counted = seen["server-0", "counters"][-1]["values"]
    assert (counted["keys"], counted["bytes"], counted["queue"]) == (1, 16, 0)
    assert counted["pushes"] >= 8
    assert {"1", "0"} == set(seen["server-0", "counters"][-1]["lags"])
    assert seen["worker-0", "counters"][-1]["values"]["store_calls"] > 0
    assert {task for task, kind in seen if kind == "stacks"} == {"scheduler", "server-0", "worker-0", "worker-1"}
