"""Pending: an error is raised once, by whoever waits or else by the next call."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest

from distrun_runtime.errors import KVError, PeerLost, StoreClosed, TimedOut
from distrun_runtime.store.outcome import Both
from distrun_runtime.store.pending import Late, Line, Settled, Task

DEADLINE_S = 60.0


def test_an_error_nobody_waited_for_is_raised_once_by_the_next_call() -> None:
    late = Late()
    Settled("push of key 'w'", ZeroDivisionError("mine"), late)
    with pytest.raises(ZeroDivisionError, match="mine"):
        late.raise_first()
    late.raise_first()


def test_an_error_that_was_waited_for_is_not_raised_again_by_the_next_call() -> None:
    late = Late()
    pending = Settled("push of key 'w'", ZeroDivisionError("mine"), late)
    assert pending.is_done
    for _ in range(2):  # each who waits hears of it
        with pytest.raises(ZeroDivisionError, match="mine"):
            pending.wait(0)
    late.raise_first()


@pytest.mark.parametrize("timeout_s", ["x", float("nan"), []])
def test_what_is_no_number_of_seconds_is_refused(timeout_s: Any) -> None:
    task = Task("push", lambda: None, Late())
    task.run()
    for pending in (Settled("push"), task, Both("pushpull", Settled("push"), task)):
        pending.wait(np.float32(1))
        with pytest.raises(KVError, match="wait: timeout_s is a number of seconds or None, not"):
            pending.wait(timeout_s)


def test_of_several_late_errors_the_first_is_raised_and_the_others_are_its_notes() -> None:
    late = Late()
    for number in (0, 1, 0, 2):
        Settled("push", ValueError(number), late)
    with pytest.raises(ValueError, match="0") as caught:
        late.raise_first()
    assert vars(caught.value)["__notes__"] == ["and also: 1", "and also: 2"]
    late.raise_first()


def test_a_cause_that_many_calls_fail_of_is_told_once() -> None:
    """A worker that had pushed all weights of a model, and lost a peer, printed a line for each."""
    late = Late()
    for number in range(100):
        what = "push of key %d" % number
        Settled(what, PeerLost("%s: server-1 is lost" % what), late)
    Settled("push of key 7", KVError("push of key 7: no such piece"), late)
    with pytest.raises(PeerLost, match="push of key 0: server-1 is lost") as caught:
        late.raise_first()
    assert vars(caught.value)["__notes__"] == ["and also: push of key 7: no such piece"]


def test_of_many_threads_exactly_one_is_told_a_late_error() -> None:
    late = Late()
    Settled("push", ValueError("mine"), late)
    start = threading.Barrier(8)
    told: list[str] = []

    def call() -> None:
        start.wait(DEADLINE_S)
        try:
            late.raise_first()
        except ValueError as err:
            told.append(str(err))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert told == ["mine"]


def test_an_error_is_not_raised_elsewhere_while_somebody_waits_for_it() -> None:
    late = Late()
    failing = Task("init", _fail, late)
    with late.told(failing):
        failing.run()
        late.raise_first()
    late.raise_first()
    with pytest.raises(ValueError, match="mine"):
        failing.wait()


def test_of_two_that_wait_for_a_call_the_first_to_give_up_leaves_the_error_to_the_other() -> None:
    late = Late()
    failing = Task("init", _fail, late)
    with late.told(failing):
        with pytest.raises(TimedOut):
            failing.wait(0)
        failing.run()
        late.raise_first()


def test_in_a_forked_child_a_wait_raises_at_once() -> None:
    task = Task("init of key 'w'", lambda: None, Late())
    child = os.fork()
    if child == 0:
        try:
            task.wait()
        except StoreClosed:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_task_that_is_run_is_done_and_gives_back_what_it_held() -> None:
    done: list[int] = []
    task = Task("init of key 'w'", lambda: done.append(1), Late())
    assert not task.is_done
    assert repr(task) == "<Pending init of key 'w'>"
    task.run()
    task.wait(0)
    assert done == [1]
    assert repr(task) == "<Pending init of key 'w': done>"
    assert not hasattr(task, "_body")


def test_a_wait_that_is_too_short_names_what_it_waited_for_and_may_be_repeated() -> None:
    release = threading.Event()
    line = Line("calls")
    task = Task("init of key 'w'", lambda: release.wait(DEADLINE_S) and None, Late())
    line.put(task)
    assert not line.is_idle
    with pytest.raises(TimedOut, match=r"init of key 'w': not done after \d+\.\d s"):
        task.wait(0.001)
    release.set()
    task.wait(DEADLINE_S)
    assert line.is_idle


def test_a_line_runs_its_tasks_in_order_and_goes_on_after_one_that_failed() -> None:
    order: list[int] = []
    late = Late()

    def fail() -> None:
        order.append(1)
        raise ZeroDivisionError("mine")

    line = Line("calls")
    line.finish()
    bodies = [lambda: order.append(0), fail, lambda: order.append(2)]
    tasks = [Task(str(number), body, late) for number, body in enumerate(bodies)]
    for task in tasks:
        line.put(task)
    line.finish()
    assert order == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        tasks[1].wait()
    late.raise_first()


def test_a_task_may_finish_its_own_line() -> None:
    line = Line("calls")
    task = Task("calls itself", line.finish, Late())
    line.put(task)
    task.wait(DEADLINE_S)


def _fail() -> None:
    raise ValueError("mine")
