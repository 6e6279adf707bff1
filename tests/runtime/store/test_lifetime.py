"""The life of a store, seen through one that only notes what its hooks were given."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
from noting import Noting, noted

from distrun_runtime.errors import StoreClosed
from distrun_runtime.kvstore import create
from distrun_runtime.store.base import KVStore
from distrun_runtime.store.pending import Settled
from distrun_runtime.store.sparse import RowSparse


@pytest.fixture
def kv() -> Noting:
    return noted()


CALLS: list[tuple[str, Callable[[KVStore], object]]] = [
    ("init", lambda kv: kv.init("z", np.zeros(1))),
    ("push", lambda kv: kv.push("a", np.zeros(2, np.float32))),
    ("pull", lambda kv: kv.pull("a", np.zeros(2, np.float32))),
    ("pushpull", lambda kv: kv.pushpull("a", np.zeros(2, np.float32))),
    ("broadcast", lambda kv: kv.broadcast("z", np.zeros(1), np.zeros(1))),
    ("barrier", lambda kv: kv.barrier()),
    ("set_optimizer", lambda kv: kv.set_optimizer("sgd")),
    ("set_updater", lambda kv: kv.set_updater(None)),
    ("assign", lambda kv: kv.assign("a", np.zeros(2, np.float32))),
    ("row_sparse_pull", lambda kv: kv.row_sparse_pull("t", RowSparse.empty((4, 2)), row_ids=[1])),
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
def test_after_close_every_call_says_so(kv: Noting, name: str, call: Callable[[KVStore], object]) -> None:
    kv.close()
    with pytest.raises(StoreClosed, match=r"the 'noting' store was closed; create another one with kvstore.create"):
        call(kv)
    assert kv.calls == [("close",)]


def test_close_finishes_what_was_begun_before() -> None:
    for end in (KVStore.close, lambda kv: kv.__exit__(None, None, None)):
        kv = create("local")
        begun = [kv.init(key, np.zeros(2), wait=False) for key in range(20)]
        end(kv)
        for pending in begun:
            pending.wait(0)


def test_close_may_be_repeated(kv: Noting) -> None:
    kv.close()
    kv.close()
    assert kv.calls == [("close",)]
    assert (kv.type, kv.rank, kv.num_workers) == ("noting", 0, 1)
    assert repr(kv) == "<Noting 'noting': 3 keys, closed>"


def test_after_leave_only_close_works(kv: Noting) -> None:
    kv.join()
    kv.leave()
    with pytest.raises(StoreClosed, match="was left"):
        kv.barrier()
    kv.close()
    kv.close()
    assert kv.calls == [("join",), ("leave",), ("close",)]


def test_a_with_block_closes(kv: Noting) -> None:
    with kv as same:
        assert same is kv
    with pytest.raises(StoreClosed):
        kv.barrier()
    assert kv.calls == [("close",)]


@pytest.mark.parametrize(
    ("error", "hook"),
    [
        (ValueError("bad"), "abort"),
        (KeyboardInterrupt(), "abort"),
        (SystemExit(3), "abort"),
        (SystemExit(0), "close"),
        (SystemExit(None), "close"),
    ],
)
def test_a_with_block_left_by_an_error_aborts(kv: Noting, error: BaseException, hook: str) -> None:
    with pytest.raises(type(error)), kv:
        raise error
    assert [call[0] for call in kv.calls] == [hook]


def test_a_with_block_leaves_a_closed_store_alone(kv: Noting) -> None:
    with kv:
        kv.close()
    assert kv.calls == [("close",)]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # newer Pythons warn of threads; none matter here
def test_in_a_forked_child_every_call_raises_and_leaving_the_block_does_nothing(kv: Noting) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for _, call in [*CALLS, ("close", lambda store: store.close())]:
                with pytest.raises(StoreClosed, match="belongs to process %d" % os.getppid()):
                    call(kv)
            kv.__exit__(None, None, None)
            kv.__exit__(ValueError, ValueError("bad"), None)
            code = 0 if kv.calls == [] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    kv.barrier()
    assert kv.calls == [("barrier",)]


def test_what_went_wrong_with_a_call_nobody_waited_for_is_raised_by_any_next_call_once(kv: Noting) -> None:
    for _, call in CALLS[1:4]:
        Settled("push", ZeroDivisionError("mine"), kv._late)
        with pytest.raises(ZeroDivisionError, match="mine"):
            call(kv)
    assert kv.calls == []
    Settled("push", ZeroDivisionError("mine"), kv._late)
    with pytest.raises(ZeroDivisionError, match="mine"):
        kv.close()
    assert kv.calls == [("close",)]


def test_a_with_block_that_ends_well_raises_what_nobody_waited_for(kv: Noting) -> None:
    with pytest.raises(ZeroDivisionError, match="mine"), kv:
        Settled("push", ZeroDivisionError("mine"), kv._late)
    assert kv.calls == [("close",)]
