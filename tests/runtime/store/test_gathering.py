"""Small calls that follow each other share messages, and nobody waits for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cluster import Cluster, open_store, run_job
from inproc import InprocNetwork
from slowness import scaled

from distrun_runtime.arrays.dtypes import Buffer
from distrun_runtime.errors import StoreClosed
from distrun_runtime.kvstore import KVStore
from distrun_runtime.protocol import message
from distrun_runtime.protocol.message import Kind
from distrun_runtime.store import dist

KEYS = ["k%d" % number for number in range(100)]


def full(value: float) -> Any:
    return np.full(3, value, np.float32)


class Slow:
    """Makes every message 20 ms late, and counts those that carry data to servers."""

    def __init__(self) -> None:
        self.data = 0
        self.network = InprocNetwork(self._delay_s)

    def _delay_s(self, endpoint: str, frames: Sequence[Buffer]) -> float:
        one = message.decode(frames)
        self.data += one.kind in (Kind.PUSH, Kind.PULL) and not one.is_reply
        return 0.02


@pytest.mark.parametrize("step", [0, -1])
def test_small_calls_that_follow_each_other_share_messages_whatever_their_priorities(step: int) -> None:
    slow = Slow()

    def script(kv: KVStore) -> list[float]:
        kv.init(KEYS, [full(0) for _ in KEYS])
        outs = [full(-1) for _ in KEYS]
        numbers = range(len(KEYS))
        calls = [kv.push(KEYS[at], full(at), at * step, wait=False) for at in numbers]
        calls += [kv.pull(KEYS[at], outs[at], at * step, wait=False) for at in numbers]
        for call in calls:
            call.wait()
        assert all(call.is_done for call in calls)
        return [float(out[0]) for out in outs]

    assert run_job(script, 2, 1, network=slow.network) == [[2.0 * number for number in range(len(KEYS))]] * 2
    # One by one it were 400.
    assert slow.data < 100


def test_a_value_that_was_pushed_may_be_overwritten_though_it_was_not_sent_yet() -> None:
    def script(kv: KVStore) -> list[float]:
        kv.init(KEYS, [full(0) for _ in KEYS])
        one = full(0)
        for number, key in enumerate(KEYS):
            one.fill(number)
            kv.push(key, one)
        one.fill(-5)
        outs = [full(-1) for _ in KEYS]
        kv.pull(KEYS, out=outs)
        return [float(out[0]) for out in outs]

    assert run_job(script, 1, 1, network=Slow().network) == [[float(number) for number in range(len(KEYS))]]


def test_a_push_never_waits_for_a_pull_that_waits_for_another_worker() -> None:
    """Worker 1 pushes `w` when it has the round of `v`, and that needs worker 0's push, made behind its pull of `w`."""

    def script(kv: KVStore) -> float:
        kv.init(["u", "v", "w"], [full(0)] * 3)
        out, other = full(-1), full(-1)
        if kv.rank == 0:
            kv.push("w", full(1)).wait()
            calls = [kv.pull("w", out=out, wait=False), kv.pull("u", out=other, wait=False)]
            kv.push("v", full(10))
            for call in calls:
                call.wait(scaled(60))
        else:
            kv.push("v", full(20))
            kv.pull("v", out=out)
            kv.push("w", full(2))
        return float(out[0])

    assert run_job(script, 2, 1) == [3.0, 30.0]


def test_small_pushpulls_that_follow_each_other_share_messages_and_have_their_own_rounds() -> None:
    slow = Slow()

    def script(kv: KVStore) -> list[float]:
        kv.init(KEYS, [full(0) for _ in KEYS])
        outs = [full(-1) for _ in KEYS]
        for step in range(2):
            calls = [kv.pushpull(key, full(step + at), outs[at], -at, wait=False) for at, key in enumerate(KEYS)]
            for call in calls:
                call.wait()
        return [float(out[0]) for out in outs]

    assert run_job(script, 2, 1, network=slow.network) == [[2.0 * (at + 1) for at in range(len(KEYS))]] * 2
    # One by one it were 800.
    assert slow.data < 100


def test_a_gathered_pushpull_of_a_round_that_was_skipped_leaves_its_outputs_as_they_are() -> None:
    def script(kv: KVStore) -> list[float]:
        kv.init(KEYS, [full(0) for _ in KEYS])
        kv.push(KEYS, [full(1) for _ in KEYS])
        outs = [full(-5) for _ in KEYS]
        if kv.rank:
            kv.skip_round(KEYS, {"why": "nan"})
        else:
            for call in [kv.pushpull(key, full(3), outs[at], wait=False) for at, key in enumerate(KEYS)]:
                call.wait()
        pulled = full(-1)
        kv.pull(KEYS[7], pulled)
        return [float(outs[7][0]), float(pulled[0])]

    assert run_job(script, 2, 1, network=Slow().network) == [[-5.0, 2.0]] * 2


@pytest.mark.parametrize("verb", ["push", "pushpull"])
def test_small_calls_are_sent_when_they_are_enough_for_a_message_though_nothing_was_answered(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "GATHERED_BYTES", 4 * full(0).nbytes)
    slow = Slow()

    def script(kv: KVStore) -> None:
        kv.init(KEYS, [full(0) for _ in KEYS])
        for key in KEYS:
            (kv.push(key, full(1), wait=False) if verb == "push" else kv.pushpull(key, full(1), full(-1), wait=False))

    run_job(script, 1, 1, network=slow.network)
    # Each message has at most four values.
    assert slow.data >= len(KEYS) / 4


def test_small_calls_that_were_kept_when_the_process_left_the_job_are_told_of_by_the_next_call() -> None:
    with Cluster(1, 1, over="inproc", network=Slow().network) as cluster:
        session = cluster.session(0)
        session.open()
        kv = open_store("dist_sync", session)
        kv.init(KEYS[:2], [full(0)] * 2)
        for key in KEYS[:2]:
            kv.push(key, full(1), wait=False)
        session.note_crash(ValueError("my bug"))
        session.end()
        with pytest.raises(StoreClosed, match="this worker has left the job"):
            kv.close()
