"""wait=False on a distributed store: order, lending, errors that nobody waited for, deadlines."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cluster import DEADLINE_S, Cluster, open_store, run_job
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inproc import InprocNetwork

from distrun_runtime.errors import KVError, PeerLost, StoreClosed, TimedOut
from distrun_runtime.kvstore import KVStore
from distrun_runtime.ps.session import NodeSession
from distrun_runtime.store import transfers

pytestmark = pytest.mark.usefixtures("placement")
SHARD_BYTES = 128

SHAPE = (2, 3)
KEYS = ["a", "b", "c"]
SHAPES = {"a": (2, 3), "b": (50,), "c": (7, 2)}
BOUND = 20
"""Elements from which values are cut over both servers here: `b` is."""


def full(value: float, shape: tuple[int, ...] = SHAPE) -> Any:
    return np.full(shape, value, "float32")


STEPS = st.lists(
    st.tuples(st.sampled_from(["push", "pull", "pushpull", "wait"]), st.sampled_from(KEYS), st.booleans()),
    min_size=1,
    max_size=25,
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS)
def test_random_calls_with_and_without_waiting_give_what_sequential_ones_give(steps: list[Any]) -> None:
    def run(script: Callable[[KVStore], Any]) -> list[Any]:
        with Cluster(over="inproc", bigarray_bound=BOUND) as job:
            return job.run(script)

    def play(kv: KVStore, lets_go: bool) -> list[Any]:
        kv.init(KEYS, [full(0, SHAPES[key]) for key in KEYS])
        kv.set_optimizer("test", rescale_grad=1.0)
        outs: list[Any] = []
        open_: list[Any] = []
        for number, (call, key, waits) in enumerate(steps):
            waits = waits or not lets_go
            value, out = full((kv.rank + 1) * (number + 1), SHAPES[key]), full(-1, SHAPES[key])
            if call == "push":
                pending = kv.push(key, value, wait=waits)
            elif call == "pull":
                pending = kv.pull(key, out, wait=waits)
                outs.append(out)
            elif call == "pushpull":
                pending = kv.pushpull(key, value, out, wait=waits)
                outs.append(out)
            else:
                for other in open_:
                    other.wait()
                continue
            open_.append(pending)
        for other in open_:
            other.wait()
        return outs

    one, two = run(lambda kv: play(kv, True)), run(lambda kv: play(kv, False))
    for ours, theirs in zip(one, two, strict=True):
        assert all((left == right).all() for left, right in zip(ours, theirs, strict=True))


def test_a_lent_array_is_not_copied_and_one_that_is_waited_for_may_change_at_once() -> None:
    """The lent memory itself goes to the transport, but for small values, which share frames."""
    shape = (200, 100)

    def script(kv: KVStore) -> None:
        kv.init("w", full(0, shape))
        value, out = full(kv.rank + 1, shape), full(0, shape)
        sent: list[bool] = []
        transport = kv._backend._node._loop._transport
        plain = transport.send

        def send(link: str, frames: Any) -> Any:
            sent.extend(np.shares_memory(np.frombuffer(frame, np.uint8), value) for frame in frames[2:])
            return plain(link, frames)

        transport.send = send
        pending = kv.push("w", value, wait=kv.rank == 1)
        if kv.rank == 1:
            value[...] = 100
        pending.wait()
        assert set(sent) == {kv.rank == 0}
        kv.pull("w", out)
        assert (out == 3).all()

    run_job(script)


def test_an_unheard_push_error_is_raised_once_by_the_next_call() -> None:
    def script(kv: KVStore) -> None:
        kv.init("w", full(0))
        pending = kv.push("w", full(1), wait=False)
        while not pending.is_done:
            threading.Event().wait(0.001)
        with pytest.raises(KVError, match=r"push of key 'w'.*set_optimizer"):
            kv.pull("w", full(0))
        kv.pull("w", full(0))
        # Whoever asks for that very push hears of it all the same, and nobody else once more.
        with pytest.raises(KVError, match="set_optimizer"):
            pending.wait()
        kv.barrier()

    run_job(script, type_name="dist_async")


def test_a_barrier_is_passed_when_all_pushes_are_with_the_servers() -> None:
    """Also one that is not waited for at once: what was pushed before it is seen by everybody after it."""
    network = InprocNetwork(lambda endpoint, frames: 0.01 if len(frames) > 2 else 0.0)

    def script(kv: KVStore) -> None:
        kv.init(KEYS, [full(0, SHAPES[key]) for key in KEYS])
        kv.set_optimizer("test", rescale_grad=1.0)
        kv.barrier()
        for key in KEYS:
            kv.push(key, full(1, SHAPES[key]), wait=False)
        pending = kv.barrier(wait=False)
        pending.wait()
        for key in KEYS:
            out = full(0, SHAPES[key])
            kv.pull(key, out)
            assert (out == 2).all()

    run_job(script, type_name="dist_async", network=network)


def test_a_wait_ends_at_its_own_deadline_says_for_whom_and_may_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from distrun_runtime.ps import role

    monkeypatch.setattr(role, "FIRST_NOTE_S", 0.1)
    released = threading.Event()

    def script(kv: KVStore) -> None:
        kv.init("w", full(0))
        if kv.rank == 0:
            out = full(0)
            kv.push("w", full(1), wait=False).wait()
            pending = kv.pull("w", out, wait=False)
            with pytest.raises(TimedOut, match=r"pull of key 'w'.*waiting for worker-1, key w, round 1"):
                pending.wait(timeout_s=3.0)
            assert not pending.is_done
            assert (out == 0).all()
            released.set()
            pending.wait()
            assert (out == 2).all()
        else:
            assert released.wait(DEADLINE_S)
            kv.push("w", full(1))

    run_job(script)


def test_a_wait_that_was_interrupted_while_it_filled_the_outputs_is_waited_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second wait returned, and the outputs were half filled."""
    scatter, calls = transfers.Portion.scatter, []

    def interrupted(portion: Any, payloads: Any, outs: Any) -> None:
        scatter(portion, payloads, outs)
        calls.append(portion)
        if len(calls) == 1:
            raise KeyboardInterrupt

    def script(kv: KVStore) -> None:
        kv.init("w", full(3))
        outs = [full(0), full(0)]
        pending = kv.pull("w", outs, wait=False)
        with pytest.raises(KeyboardInterrupt):
            pending.wait()
        pending.wait()
        assert all((out == 3).all() for out in outs)

    monkeypatch.setattr(transfers.Portion, "scatter", interrupted)
    run_job(script, 1, 1)


def test_a_store_that_another_thread_closes_meanwhile_takes_no_push() -> None:
    """It was sent after the close, which waits for pushes, and could be lost."""

    class Closing:
        def __init__(self, kv: KVStore) -> None:
            self.kv = kv

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            self.kv.close()  # as another thread might at this moment
            return full(1)

    def script(kv: KVStore) -> None:
        kv.init("w", full(0))
        with pytest.raises(StoreClosed):
            kv.push("w", Closing(kv))

    run_job(script, 1, 1)


def test_an_error_that_leaves_the_block_is_told_to_the_others_at_once() -> None:
    """Not when the script ends: it may have caught the error, and go on for hours."""
    told = threading.Event()

    def script(kv: KVStore) -> None:
        kv.init("w", full(0))
        if kv.rank == 1:
            with pytest.raises(ZeroDivisionError), kv:
                raise ZeroDivisionError("mine")
            assert told.wait(DEADLINE_S)
            with pytest.raises(StoreClosed, match="this worker has left the job"):
                open_store("dist_sync", kv._backend._node)
            return
        with pytest.raises(PeerLost, match=r"worker-1.* failed: ZeroDivisionError: mine"):
            kv.pushpull("w", full(1), full(0))
        told.set()

    run_job(script)


def test_what_a_closed_store_held_is_free() -> None:
    """The session kept every store of a script until its end."""

    def script(session: NodeSession) -> None:
        kv = open_store("dist_sync", session)
        kv.init("w", full(0))
        kv.push("w", full(1), wait=False)
        kv.close()
        held = weakref.ref(kv)
        del kv
        gc.collect()
        assert held() is None

    with Cluster(1, 1, over="inproc") as job:
        job.run_sessions(script)


def test_a_barrier_that_is_not_reached_by_all_times_out_with_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from distrun_runtime.ps import role

    monkeypatch.setattr(role, "FIRST_NOTE_S", 0.1)
    released = threading.Event()

    def script(kv: KVStore) -> None:
        if kv.rank == 0:
            pending = kv.barrier(wait=False)
            with pytest.raises(TimedOut, match=r"barrier.*worker-1"):
                pending.wait(3.0)
            released.set()
            pending.wait()
        else:
            assert released.wait(DEADLINE_S)
            kv.barrier()

    run_job(script)


def test_threads_may_mix_waiting_and_not_waiting() -> None:
    rounds = 15

    def script(kv: KVStore) -> None:
        kv.init(KEYS, [full(0, SHAPES[key]) for key in KEYS])
        kv.set_optimizer("test", rescale_grad=1.0)

        def work(key: str, waits: bool) -> None:
            for step in range(rounds):
                out = full(0, SHAPES[key])
                kv.push(key, full(1, SHAPES[key]), wait=waits)
                kv.pull(key, out, wait=waits).wait()
                assert (out == 2 * (step + 1)).all()

        with ThreadPoolExecutor(len(KEYS)) as threads:
            for ended in [threads.submit(work, key, bool(number % 2)) for number, key in enumerate(KEYS)]:
                ended.result(DEADLINE_S)

    run_job(script, bigarray_bound=BOUND)


@pytest.mark.parametrize("ends", ["close", "script"])
def test_what_was_lent_is_sent_before_the_end(ends: str) -> None:
    def script(kv: KVStore) -> None:
        kv.init(KEYS, [full(0, SHAPES[key]) for key in KEYS])
        kv.init("late", full(0), wait=False)
        for key in KEYS:
            kv.push(key, full(1, SHAPES[key]), wait=False)
        if kv.rank == 0:
            if ends == "close":
                kv.close()
            return
        out = full(0)
        for key in KEYS:
            kv.pull(key, full(0, SHAPES[key]))
        kv.pull("late", out)
        assert (out == 0).all()

    network = InprocNetwork(lambda endpoint, frames: 0.05 if len(frames) > 2 else 0.0)
    run_job(script, bigarray_bound=BOUND, network=network)


def test_a_pull_that_was_open_when_the_store_closed_can_still_be_waited_for() -> None:
    def script(kv: KVStore) -> None:
        kv.init("w", full(0))
        out = full(0)
        pending = kv.pushpull("w", full(1), out, wait=False)
        kv.close()
        pending.wait()
        assert (out == 2).all()

    run_job(script)


def test_every_push_that_is_refused_says_why() -> None:
    """Later pushes name the bucket that the first one was to register, and it may be refused before they come."""
    names = ["k%d" % number for number in range(10)]

    def script(kv: KVStore) -> None:
        kv.init(names, [full(1)] * len(names))
        pushes = [kv.push(names, [full(1)] * len(names), wait=False) for _ in range(3)]
        for pending in pushes:
            with pytest.raises(KVError, match="set_optimizer"):
                pending.wait()

    run_job(script, 1, 1, type_name="dist_async", network=InprocNetwork(lambda endpoint, frames: 0.05))
