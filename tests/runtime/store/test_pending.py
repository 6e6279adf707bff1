"""Errors that nobody waited for, of several calls.

What a store's calls show of them, and of the thread of collective calls, is in tests/runtime/test_kvstore_lifetime.py.
"""

from __future__ import annotations

import queue

import pytest
from children import exit_code_of
from slowness import scaled

from distrun_runtime.errors import KVError, PeerLost, TimedOut
from distrun_runtime.store.pending import BackgroundCall, CompletedCall, Late


def test_of_several_late_errors_the_first_is_raised_and_the_others_are_its_notes() -> None:
    late = Late()
    for number in (0, 1, 0, 2):
        CompletedCall("push", ValueError(number), late)
    with pytest.raises(ValueError, match="0") as caught:
        late.raise_first()
    assert vars(caught.value)["__notes__"] == ["and also: 1", "and also: 2"]
    late.raise_first()


def test_a_cause_that_many_calls_fail_of_is_told_once() -> None:
    """A worker that had pushed all weights of a model, and lost a peer, printed a line for each."""
    late = Late()
    for number in range(100):
        what = "push of key %d" % number
        CompletedCall(what, PeerLost("%s: server-1 is lost" % what), late)
    CompletedCall("push of key 7", KVError("push of key 7: no such piece"), late)
    with pytest.raises(PeerLost, match="push of key 0: server-1 is lost") as caught:
        late.raise_first()
    assert vars(caught.value)["__notes__"] == ["and also: push of key 7: no such piece"]


def test_a_cause_that_a_call_was_waited_for_and_told_is_not_told_again_of_the_pushes_before_it() -> None:
    """A worker caught the loss of a peer at a pull, went on, and ended with 1 for the push before that pull."""
    late = Late()
    pull = CompletedCall("pull of key 7", PeerLost("pull of key 7: worker-2 is lost"))
    CompletedCall("push of key 7", PeerLost("push of key 7: worker-2 is lost"), late)
    CompletedCall("push of key 8", KVError("push of key 8: no such piece"), late)
    with pytest.raises(PeerLost, match="pull of key 7"), late.told(pull):
        pull.wait()
    with pytest.raises(KVError, match="no such piece") as caught:
        late.raise_first()
    assert not hasattr(caught.value, "__notes__")
    late.raise_first()


def test_an_error_is_not_raised_elsewhere_while_somebody_waits_for_it() -> None:
    late = Late()
    failing = BackgroundCall("init", _fail, late)
    with late.told(failing):
        failing.run()
        late.raise_first()
    late.raise_first()
    with pytest.raises(ValueError, match="mine"):
        failing.wait()


def test_of_two_that_wait_for_a_call_the_first_to_give_up_leaves_the_error_to_the_other() -> None:
    late = Late()
    failing = BackgroundCall("init", _fail, late)
    with late.told(failing):
        with pytest.raises(TimedOut):
            failing.wait(0)
        failing.run()
        late.raise_first()


def test_callbacks_of_calls_of_a_forked_child_are_called_there() -> None:
    called: queue.SimpleQueue[object] = queue.SimpleQueue()

    def call() -> None:
        CompletedCall("pull").add_done_callback(called.put)
        called.get(timeout=scaled(60))

    call()
    assert exit_code_of(call) == 0


def _fail() -> None:
    raise ValueError("mine")
