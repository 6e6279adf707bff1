"""Keys that are being initialised: who may use them when, and in which order calls of all workers are made."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from noting import Noting, noted

from distrun_runtime.errors import KVError, StoreClosed
from distrun_runtime.store.keyed import named

DEADLINE_S = 60.0


@pytest.fixture
def kv() -> Noting:
    return noted()


def test_a_second_init_is_an_error_and_an_init_that_failed_is_none(kv: Noting) -> None:
    with pytest.raises(KVError, match=r"key 'a' was already initialised with shape \(2,\) and dtype float32"):
        kv.init(["c", "a"], [np.zeros(1), np.zeros(2)])
    with pytest.raises(KVError, match="key 'a' was already initialised"):
        kv.broadcast("a", np.zeros(2), np.zeros(2))
    kv.fail = RuntimeError("no connection")
    with pytest.raises(RuntimeError, match="no connection"):
        kv.init("c", np.zeros(1))
    kv.fail = None
    kv.init("c", np.zeros(1))


def test_two_threads_cannot_initialise_one_key_at_the_same_time(kv: Noting) -> None:
    errors: list[Exception] = []

    def again() -> None:
        kv.during_init = None
        try:
            kv.init("c", np.zeros(1))
        except KVError as err:
            errors.append(err)

    def other_thread() -> None:
        thread = threading.Thread(target=again)
        thread.start()
        thread.join(DEADLINE_S)

    kv.during_init = other_thread
    kv.init("c", np.zeros(1))
    assert [str(error) for error in errors] == [
        "key 'c' was already initialised; init works once a key, push changes its value"
    ]


class Gate:
    """Holds an init until it is opened."""

    def __init__(self, kv: Noting) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        kv.during_init = self._pass

    def _pass(self) -> None:
        self.reached.set()
        assert self._open.wait(DEADLINE_S)

    def open(self) -> None:
        self._open.set()


def in_thread(call: object) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_an_init_that_is_not_waited_for_takes_its_place_in_the_order_at_once(kv: Noting) -> None:
    gate = Gate(kv)
    first = kv.init("c", np.zeros(1), wait=False)
    second = kv.assign("a", np.ones(2, np.float32), wait=False)
    assert gate.reached.wait(DEADLINE_S)
    assert not first.is_done
    gate.open()
    second.wait(DEADLINE_S)
    assert first.is_done
    # The numbers were given when the calls were made: the second before the first had ended.
    assert [(call[0], call[-1]) for call in kv.calls if call[0] in ("init", "assign")] == [("init", 1), ("assign", 2)]
    kv.push("c", np.zeros(1))


def test_a_call_that_waits_comes_behind_those_that_were_not_waited_for(kv: Noting) -> None:
    gate = Gate(kv)
    kv.init("c", np.zeros(1), wait=False)
    assert gate.reached.wait(DEADLINE_S)
    waiting = in_thread(lambda: kv.init("d", np.zeros(1)))
    gate.open()
    waiting.join(DEADLINE_S)
    assert [[key for key, _ in call[1]] for call in kv.calls if call[0] == "init"] == [["c"], ["d"]]


def test_a_later_call_on_a_key_waits_for_its_init(kv: Noting) -> None:
    gate = Gate(kv)
    kv.init("c", np.zeros(1), wait=False)
    assert gate.reached.wait(DEADLINE_S)
    pushed = in_thread(lambda: kv.push(["a", "c"], [np.zeros(2, np.float32), np.ones(1)]))
    other = np.zeros(2, np.float32)
    kv.pull("a", other)  # which others do not
    gate.open()
    pushed.join(DEADLINE_S)
    assert [call[0] for call in kv.calls if call[0] in ("push", "pull")] == ["pull", "push"]


def test_a_later_call_on_a_key_whose_init_failed_says_why_and_then_it_may_be_initialised(kv: Noting) -> None:
    gate = Gate(kv)
    kv.fail = RuntimeError("no connection")
    kv.init("c", np.zeros(1), wait=False)
    assert gate.reached.wait(DEADLINE_S)
    errors: list[BaseException] = []

    def push() -> None:
        try:
            kv.push("c", np.ones(1))
        except RuntimeError as err:
            errors.append(err)

    pushed = in_thread(push)
    gate.open()
    pushed.join(DEADLINE_S)
    assert [str(error) for error in errors] == ["no connection"]
    kv.fail = None
    kv.init("c", np.zeros(1))


def test_an_error_of_an_init_nobody_waited_for_is_raised_by_the_next_call_once(kv: Noting) -> None:
    kv.fail = RuntimeError("no connection")
    kv.init("c", np.zeros(1), wait=False)
    kv._line.finish()
    with pytest.raises(RuntimeError, match="no connection"):
        kv.barrier()
    kv.barrier()
    with pytest.raises(RuntimeError, match="no connection"):
        kv.init("c", np.zeros(1), wait=False).wait(DEADLINE_S)
    kv.barrier()


def test_a_close_waits_for_what_is_under_way_and_raises_what_nobody_waited_for(kv: Noting) -> None:
    kv.fail = RuntimeError("no connection")
    kv.init("c", np.zeros(1), wait=False)
    with pytest.raises(RuntimeError, match="no connection"):
        kv.close()
    assert [call[0] for call in kv.calls] == ["reserve", "init", "close"]
    with pytest.raises(StoreClosed):
        kv.barrier()
    kv.close()


def test_a_broadcast_that_is_not_waited_for_fills_its_outputs_when_it_is(kv: Noting) -> None:
    gate = Gate(kv)
    pending = kv.broadcast("c", np.ones(1), np.zeros(1), wait=False)
    assert gate.reached.wait(DEADLINE_S)
    assert [call[0] for call in kv.calls] == ["reserve", "init"]
    gate.open()
    pending.wait(DEADLINE_S)
    assert [call[0] for call in kv.calls] == ["reserve", "init", "pull"]


def test_an_init_that_does_not_fit_takes_no_place_in_the_order(kv: Noting) -> None:
    with pytest.raises(KVError, match="already initialised"):
        kv.init("a", np.zeros(2), wait=False)
    assert kv.calls == []


def test_many_keys_are_named_by_the_first_three() -> None:
    assert named(["w"]) == "key 'w'"
    assert named([1, 2]) == "keys 1, 2"
    assert named(range(5)) == "keys 0, 1, 2, ... (5 keys)"
