"""The life of a store: the order of collective calls, errors that nobody waited for, closing, forked children."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
from cluster import DEADLINE_S, Cluster, open_store

from distrun_runtime import kvstore
from distrun_runtime.errors import KVError, PeerLost, StoreClosed, TimedOut
from distrun_runtime.kvstore import KVStore, RowSparse
from distrun_runtime.ps.session import NodeSession


@pytest.fixture
def kv() -> KVStore:
    """A store with zeros: `a` (2 float32) and `t` (row-sparse, 4 rows of 2 float32)."""
    store = kvstore.create("local")
    store.init(["a", "t"], [np.zeros(2, np.float32), RowSparse.empty((4, 2))])
    return store


def ones() -> Any:
    return np.ones(2, np.float32)


# Closing

CALLS: list[tuple[str, Callable[[KVStore], object]]] = [
    ("init", lambda kv: kv.init("z", np.zeros(1))),
    ("push", lambda kv: kv.push("a", ones())),
    ("pull", lambda kv: kv.pull("a", ones())),
    ("pushpull", lambda kv: kv.pushpull("a", ones())),
    ("broadcast", lambda kv: kv.broadcast("z", np.zeros(1), np.zeros(1))),
    ("barrier", lambda kv: kv.barrier()),
    ("set_optimizer", lambda kv: kv.set_optimizer("sgd")),
    ("set_updater", lambda kv: kv.set_updater(None)),
    ("assign", lambda kv: kv.assign("a", ones())),
    ("row_sparse_pull", lambda kv: kv.row_sparse_pull("t", RowSparse.empty((4, 2)), row_ids=[1])),
    ("skip_round", lambda kv: kv.skip_round("a", {})),
    ("check_push", lambda kv: kv.check_push("a", ones())),
    ("set_learning_rate", lambda kv: kv.set_learning_rate(1.0)),
    ("set_multipliers", lambda kv: kv.set_multipliers(lr={"a": 1})),
    ("set_gradient_compression", lambda kv: kv.set_gradient_compression({"type": "none"})),
    ("save_states", lambda kv: kv.save_states("f")),
    ("load_states", lambda kv: kv.load_states("f")),
    ("stats", lambda kv: kv.stats()),
    ("profile", lambda kv: kv.profile("f")),
    ("num_dead_node", lambda kv: kv.num_dead_node()),
    ("join", lambda kv: kv.join()),
    ("leave", lambda kv: kv.leave()),
    ("with", lambda kv: kv.__enter__()),
]


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[name for name, _ in CALLS])
def test_after_close_every_call_says_so(kv: KVStore, name: str, call: Callable[[KVStore], object]) -> None:
    kv.close()
    with pytest.raises(StoreClosed, match=r"the 'local' store was closed; create another one with kvstore.create"):
        call(kv)


def test_close_finishes_what_was_begun_before() -> None:
    for end in (KVStore.close, lambda kv: kv.__exit__(None, None, None)):
        kv = kvstore.create("local")
        begun = [kv.init(key, np.zeros(2), wait=False) for key in range(20)]
        end(kv)
        for pending in begun:
            pending.wait(0)


def test_close_may_be_repeated_and_the_store_can_still_be_asked_what_it_is(kv: KVStore) -> None:
    kv.close()
    kv.close()
    assert (kv.type, kv.rank, kv.num_workers) == ("local", 0, 1)
    assert repr(kv) == "<KVStore 'local': 2 keys, closed>"


def test_after_leave_only_close_works(kv: KVStore) -> None:
    kv.join()
    kv.leave()
    with pytest.raises(StoreClosed, match="was left"):
        kv.barrier()
    kv.close()
    kv.close()
    with pytest.raises(StoreClosed, match="was closed"):
        kv.barrier()


def test_a_with_block_closes_also_a_store_that_is_closed_in_it(kv: KVStore) -> None:
    with kv as same:
        assert same is kv
        kv.close()
    with pytest.raises(StoreClosed):
        kv.barrier()
    with kvstore.create("local") as other:
        pass
    with pytest.raises(StoreClosed):
        other.barrier()


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_a_with_block_left_by_an_error_ends_the_job_of_all(error: BaseException) -> None:
    def script(kv: KVStore) -> None:
        kv.init("w", ones())
        if kv.rank == 0:
            with pytest.raises(type(error)), kv:
                raise error
            with pytest.raises(StoreClosed):
                kv.barrier()
        else:
            with pytest.raises(PeerLost, match="worker-0"):
                kv.barrier()

    with Cluster(over="inproc") as job:
        job.run(script)


@pytest.mark.parametrize("code", [0, None])
def test_a_with_block_left_by_a_good_exit_closes_and_the_job_goes_on(code: int | None) -> None:
    def script(session: NodeSession) -> None:
        kv = open_store("dist_sync", session)
        kv.init("w", ones())
        with pytest.raises(SystemExit), kv:
            raise SystemExit(code)
        kv = open_store("dist_sync", session)
        kv.init("w", ones())
        kv.pushpull("w", out := ones())
        assert out[0] == 2

    with Cluster(over="inproc") as job:
        job.run_sessions(script)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # newer Pythons warn of threads; none matter here
def test_in_a_forked_child_every_call_raises_and_leaving_the_block_does_nothing(kv: KVStore) -> None:
    pending = kv.init("b", np.zeros(1), wait=False)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for _, call in [*CALLS, ("close", lambda store: store.close())]:
                with pytest.raises(StoreClosed, match="belongs to process %d" % os.getppid()):
                    call(kv)
            with pytest.raises(StoreClosed):
                pending.wait()
            kv.__exit__(None, None, None)
            kv.__exit__(ValueError, ValueError("bad"), None)
            kv.give_up(ValueError("bad"))
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    kv.barrier()


# Errors that nobody waited for


def fail_unheard(kv: KVStore) -> Any:
    """Make a push fail that is not waited for; return its Pending."""

    def updater(key: object, received: object, stored: object) -> None:
        raise ZeroDivisionError("mine")

    kv.set_updater(updater)
    return kv.push("a", ones(), wait=False)


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[name for name, _ in CALLS])
def test_an_error_that_nobody_waited_for_is_raised_by_any_next_call_once(
    kv: KVStore, name: str, call: Callable[[KVStore], object]
) -> None:
    fail_unheard(kv)
    with pytest.raises(ZeroDivisionError, match="mine"):
        call(kv)
    kv.barrier()


def test_an_error_that_nobody_waited_for_is_raised_by_close_and_by_the_end_of_a_block(kv: KVStore) -> None:
    with pytest.raises(ZeroDivisionError, match="mine"), kv:
        fail_unheard(kv)
    kv.close()
    other = kvstore.create("local")
    other.init("a", ones())
    fail_unheard(other)
    with pytest.raises(ZeroDivisionError, match="mine"):
        other.close()
    with pytest.raises(StoreClosed):
        other.barrier()


def test_an_error_that_was_waited_for_is_not_raised_by_the_next_call(kv: KVStore) -> None:
    pending = fail_unheard(kv)
    assert pending.is_done
    for _ in range(2):  # each who waits hears of it
        with pytest.raises(ZeroDivisionError, match="mine"):
            pending.wait()
    kv.barrier()


def test_a_push_that_is_known_to_have_failed_raises_at_once_and_not_again(kv: KVStore) -> None:
    kv.set_updater(lambda key, received, stored: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kv.push("a", ones())
    kv.barrier()


def test_of_many_threads_exactly_one_is_told_an_error_that_nobody_waited_for(kv: KVStore) -> None:
    fail_unheard(kv)
    start = threading.Barrier(8)
    told: list[str] = []

    def call() -> None:
        start.wait(DEADLINE_S)
        try:
            kv.barrier()
        except ZeroDivisionError as err:
            told.append(str(err))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert told == ["mine"]


@pytest.mark.parametrize("timeout_s", ["x", float("nan"), []])
def test_what_is_no_number_of_seconds_is_refused_by_every_wait(timeout_s: Any) -> None:
    def script(kv: KVStore) -> None:
        for pending in (
            kv.init("a", ones(), wait=False),
            kv.push("a", ones(), wait=False),
            kv.pull("a", ones(), wait=False),
            kv.pushpull("a", ones(), wait=False),
            kv.barrier(wait=False),
            kv.push([], [], wait=False),
            kv.init("b", ones(), wait=False),
        ):
            pending.wait(np.float32(DEADLINE_S))  # type: ignore[arg-type]  # a number
            pending.wait(float("inf"))
            with pytest.raises(KVError, match="wait: timeout_s is a number of seconds or None, not"):
                pending.wait(timeout_s)

    with Cluster(1, 1, over="inproc") as job:
        job.run(script)


# Collective calls that are not waited for


class Held:
    """A job of two workers. Worker 1 does its part when worker 0 lets it."""

    def __init__(self) -> None:
        self._go = threading.Event()

    def release(self) -> None:
        """Called by worker 0."""
        self._go.set()

    def run(self, first: Callable[[KVStore], None], second: Callable[[KVStore], None]) -> None:
        def script(kv: KVStore) -> None:
            kv.init("a", ones())
            if kv.rank == 0:
                try:
                    first(kv)
                finally:
                    self.release()
            else:
                assert self._go.wait(DEADLINE_S)
                second(kv)

        with Cluster(over="inproc") as job:
            job.run(script)


class Waiting:
    """A call in a thread, once it waits for another call."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        end = time.monotonic() + DEADLINE_S
        while not self._waits():
            assert self._thread.is_alive()
            assert time.monotonic() < end
            time.sleep(0.001)

    def error(self) -> BaseException | None:
        """Return what the call has raised, when it has ended."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        return self._error

    def _run(self) -> None:
        try:
            self._call()
        except Exception as err:
            self._error = err

    def _waits(self) -> bool:
        # CPython 3.11 holds a lock while it gathers the frames. A collection in that time may wait for another thread,
        # which waits for the lock.
        gc.disable()
        try:
            found = sys._current_frames()[self._thread.ident or 0]
        finally:
            gc.enable()
        frames = traceback.walk_stack(found)
        return any((code.co_name, Path(code.co_filename).name) == ("wait", "pending.py") for code in map(_code, frames))


def _code(entry: tuple[FrameType, int]) -> CodeType:
    return entry[0].f_code


def test_a_collective_call_takes_its_place_in_the_order_when_it_is_made() -> None:
    held = Held()

    def first(kv: KVStore) -> None:
        init = kv.init("c", ones(), wait=False)
        assign = kv.assign("a", 2 * ones(), wait=False)
        with pytest.raises(TimedOut, match=r"init of key 'c': not done after \d+\.\d s"):
            init.wait(0)
        assert not init.is_done
        held.release()
        assign.wait()
        assert init.is_done
        # A call that waits comes behind those that were not waited for.
        pending = kv.init("d", ones(), wait=False)
        kv.init("e", ones())
        assert pending.is_done

    def second(kv: KVStore) -> None:
        kv.init("c", ones())
        kv.assign("a", ones())
        kv.init("d", ones())
        kv.init("e", ones())
        kv.pull("a", out := ones())
        assert out[0] == 2

    held.run(first, second)


def test_a_key_whose_init_is_under_way_cannot_be_initialised_by_another_call() -> None:
    held = Held()

    def first(kv: KVStore) -> None:
        pending = kv.init("c", ones(), wait=False)
        for call in (lambda: kv.init("c", ones()), lambda: kv.broadcast("c", ones(), ones(), wait=False)):
            with pytest.raises(KVError, match="key 'c' was already initialised; init works once a key"):
                call()
        held.release()
        pending.wait()
        kv.barrier()  # What was refused has taken no place in the order.

    def second(kv: KVStore) -> None:
        kv.init("c", ones())
        kv.barrier()

    held.run(first, second)


def test_a_call_on_a_key_whose_init_is_under_way_waits_for_it_and_others_do_not() -> None:
    held = Held()

    def first(kv: KVStore) -> None:
        pending = kv.broadcast("c", 3 * ones(), out := np.zeros(2, np.float32), wait=False)
        kv.pull("a", other := np.zeros(2, np.float32))
        assert other[0] == 1
        pushed = Waiting(lambda: kv.push(["a", "c"], [ones(), ones()]))
        assert not pending.is_done
        held.release()
        assert pushed.error() is None
        pending.wait()
        assert out[0] == 3

    def second(kv: KVStore) -> None:
        kv.broadcast("c", ones(), out := np.zeros(2, np.float32))
        assert out[0] == 3
        kv.push(["a", "c"], [ones(), ones()])

    held.run(first, second)


def test_a_call_on_a_key_whose_init_failed_says_so_and_the_key_may_be_initialised_again() -> None:
    held = Held()

    def first(kv: KVStore) -> None:
        kv.init("c", np.ones(3, np.float32), wait=False)
        pushed = Waiting(lambda: kv.push("c", np.ones(3, np.float32)))
        held.release()
        assert re.search(r"worker-\d has.*worker-\d has", str(pushed.error()))
        again(kv)

    def second(kv: KVStore) -> None:
        with pytest.raises(KVError, match=r"worker-\d has.*worker-\d has"):
            kv.init("c", ones())
        again(kv)

    def again(kv: KVStore) -> None:
        kv.init("c", ones())
        kv.pushpull("c", out := ones())
        assert out[0] == 2

    held.run(first, second)


def test_close_waits_for_what_is_under_way_and_raises_what_nobody_waited_for() -> None:
    held = Held()

    def first(kv: KVStore) -> None:
        kv.init("c", np.ones(3, np.float32), wait=False)
        held.release()
        with pytest.raises(KVError, match=r"worker-\d has.*worker-\d has"):
            kv.close()
        with pytest.raises(StoreClosed):
            kv.barrier()
        kv.close()

    def second(kv: KVStore) -> None:
        with pytest.raises(KVError, match=r"worker-\d has.*worker-\d has"):
            kv.init("c", ones())

    held.run(first, second)


def test_many_keys_are_named_by_the_first_three() -> None:
    kv = kvstore.create("local")
    assert kv.init(["w"], [ones()]).what == "init of key 'w'"
    assert kv.init(["x", "y"], [ones()] * 2).what == "init of keys 'x', 'y'"
    assert kv.init(list("abcde"), [ones()] * 5).what == "init of keys 'a', 'b', 'c', ... (5 keys)"
