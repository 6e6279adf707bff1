"""The data calls that every store has, seen through a store that only notes what its hooks were given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from noting import Later, Noting, noted

from distrun_runtime.errors import KVError
from distrun_runtime.store.base import Array, Call
from distrun_runtime.store.sparse import RowSparse


@pytest.fixture
def kv() -> Noting:
    return noted()


def test_a_push_of_one_array_hands_over_the_array_itself(kv: Noting) -> None:
    value = np.ones(2, np.float32)
    kv.push("a", value, priority=-3)
    ((name, ((record, given),), call),) = kv.calls
    assert (name, record.key, call) == ("push", "a", Call(priority=-3))
    assert given is value


def test_a_push_of_several_arrays_hands_over_a_new_sum(kv: Noting) -> None:
    values = [np.ones(2, np.float32), np.full(2, 2, np.float32)]
    kv.push(["a", "b", "a"], [values[0], np.int64(5), values[1]])
    (_, items, _) = kv.calls[0]
    assert [(record.key, array.tolist()) for record, array in items] == [("a", [3, 3]), ("b", 5)]
    assert [value.tolist() for value in values] == [[1, 1], [2, 2]]


def test_a_pull_hands_over_the_outputs_themselves(kv: Noting) -> None:
    outs = [np.zeros(2, np.float32), np.zeros(4, np.float32)[::2]]
    kv.pull("a", out=outs)
    ((_, ((record, given),), call),) = kv.calls
    assert (record.key, call) == ("a", Call())
    assert given[0] is outs[0]
    assert given[1] is outs[1]


def test_pushpull_without_out_writes_into_the_pushed_arrays(kv: Noting) -> None:
    values = [np.ones(2, np.float32), np.ones(2, np.float32)]
    kv.pushpull("a", values)
    ((_, ((_, total, outs),), _),) = kv.calls
    assert total.tolist() == [2, 2]
    assert [out is value for out, value in zip(outs, values, strict=True)] == [True, True]
    with pytest.raises(KVError, match=r"key 'b': an output is a numpy array that can be written or .*, not int64"):
        kv.pushpull("b", np.int64(1))


def test_pushpull_with_out_pairs_repeated_keys(kv: Noting) -> None:
    one = np.ones(2, np.float32)
    outs = [np.zeros(2, np.float32) for _ in range(3)]
    kv.pushpull(["a", "a"], [one, one], out=[outs[0], outs[1:]])
    ((_, ((_, total, given),), _),) = kv.calls
    assert total.tolist() == [2, 2]
    assert len(given) == 3


def test_broadcast_is_init_and_pull(kv: Noting) -> None:
    out = np.zeros(2)
    kv.broadcast("c", np.ones(2), out)
    assert [call[0] for call in kv.calls] == ["reserve", "init", "pull"]
    assert kv.calls[2][1][0][0].key == "c"


def test_a_broadcast_that_does_not_fit_initialises_nothing(kv: Noting) -> None:
    with pytest.raises(KVError, match=r"key 'c': the output has shape \(3,\)"):
        kv.broadcast("c", np.ones(2), np.zeros(3))
    with pytest.raises(KVError, match="2 keys, but 1 outputs"):
        kv.broadcast(["c", "d"], [np.ones(2), np.ones(2)], [np.zeros(2)])
    assert kv.calls == []
    kv.init("c", np.ones(2))


def test_a_call_without_keys_does_nothing(kv: Noting) -> None:
    kv.push([], [])
    kv.pull([], [])
    kv.pushpull([], [])
    assert kv.calls == []


@pytest.mark.parametrize("call", ["push", "pull", "pushpull"])
def test_a_key_never_initialised_is_an_error_that_names_the_near_one(kv: Noting, call: str) -> None:
    with pytest.raises(KVError, match=r"key 'aa' was never initialised in this store of 3 keys \(near: 'a'\)"):
        getattr(kv, call)(["a", "aa"], [np.zeros(2, np.float32), np.zeros(2, np.float32)])
    assert kv.calls == []


@pytest.mark.parametrize("call", ["push", "pull", "pushpull", "init"])
def test_a_key_of_the_other_kind_is_an_error_that_names_both(kv: Noting, call: str) -> None:
    with pytest.raises(KVError, match="key 3 is int, key 'a' is str"):
        getattr(kv, call)(3, np.zeros(2, np.float32))


@pytest.mark.parametrize(("call", "noun"), [("push", "pushed value"), ("pull", "output"), ("pushpull", "pushed value")])
@pytest.mark.parametrize("value", [np.zeros(3, np.float32), np.zeros(2), np.zeros((2, 1), np.float32)])
def test_another_shape_or_dtype_is_an_error_that_names_both(kv: Noting, call: str, noun: str, value: Array) -> None:
    words = r"key 'a': the %s has shape .* and dtype .*, but the key has shape \(2,\) and dtype float32 since" % noun
    with pytest.raises(KVError, match=words):
        getattr(kv, call)(["b", "a"], [np.array(0), value])
    assert kv.calls == []


@pytest.mark.parametrize("priority", [1.5, "1", None])
def test_a_priority_is_an_int(kv: Noting, priority: object) -> None:
    with pytest.raises(KVError, match="priority is an int"):
        kv.push("a", np.zeros(2, np.float32), priority=priority)  # type: ignore[arg-type]  # what is tested
    kv.push("a", np.zeros(2, np.float32), priority=np.int32(4))
    assert kv.calls[0][2].priority == 4


def test_a_row_sparse_value_for_a_dense_key_is_handed_over_dense(kv: Noting) -> None:
    kv.init("m", np.zeros((3, 2)))
    kv.calls.clear()
    kv.push("m", [RowSparse(np.ones((1, 2)), [2], (3, 2)), np.ones((3, 2))])
    ((_, ((_, total),), _),) = kv.calls
    assert total.tolist() == [[1, 1], [1, 1], [2, 2]]


def test_an_array_for_a_row_sparse_key_is_handed_over_with_all_its_rows(kv: Noting) -> None:
    kv.push("t", np.zeros((4, 2), np.float32))
    kv.push("t", [np.ones((4, 2), np.float32), RowSparse(np.ones((2, 2), np.float32), [1, 1], (4, 2))])
    (first, second) = (call[1][0][1] for call in kv.calls)
    assert (first.rows.tolist(), first.values.any()) == ([0, 1, 2, 3], False)
    assert second.values[:, 0].tolist() == [1, 3, 1, 1]


def test_rows_are_handed_over_ascending_each_once(kv: Noting) -> None:
    kv.push("t", RowSparse(np.ones((3, 2), np.float32), [3, 0, 3], (4, 2)))
    ((_, ((_, given),), _),) = kv.calls
    assert (given.rows.tolist(), given.values[:, 0].tolist()) == ([0, 3], [1, 2])


def test_a_row_sparse_value_that_does_not_fit_is_an_error(kv: Noting) -> None:
    with pytest.raises(KVError, match=r"key 't': the pushed value has shape \(5, 2\)"):
        kv.push("t", RowSparse.empty((5, 2)))
    with pytest.raises(KVError, match="key 't': a RowSparse is filled by row_sparse_pull; pull writes whole arrays"):
        kv.pull("t", RowSparse.empty((4, 2)))
    assert kv.calls == []


def test_a_row_pull_asks_for_each_row_of_a_key_once_and_fills_the_outputs(kv: Noting) -> None:
    outs = [np.empty((2, 2), np.float32), RowSparse.empty((4, 2))]
    kv.row_sparse_pull("t", outs, row_ids=[[3, 1], [1, 2]], priority=2)
    ((name, ((record, rows, take),), call),) = kv.calls
    assert (name, record.key, rows.tolist(), call) == ("rows", "t", [1, 2, 3], Call(priority=2))
    take(np.array([[1, 1], [2, 2], [3, 3]], np.float32))
    assert outs[0].tolist() == [[3, 3], [1, 1]]  # type: ignore[union-attr]  # an array
    assert outs[1].rows.tolist() == [1, 2]  # type: ignore[union-attr]  # a RowSparse
    with pytest.raises(KVError, match="key 'a' is not row-sparse"):
        kv.row_sparse_pull("a", outs[0], row_ids=[0, 1])


@pytest.mark.parametrize("call", ["push", "pushpull"])
def test_a_scale_goes_with_the_contribution(kv: Noting, call: str) -> None:
    getattr(kv, call)("a", np.ones(2, np.float32), scale=0.25)
    assert kv.calls[0][2] == Call(scale=0.25)
    getattr(kv, call)("b", np.array(1), scale=1)
    with pytest.raises(KVError, match=r"key 'b': int64 values are pushed with scale 1, not 0\.5"):
        getattr(kv, call)(["a", "b"], [np.ones(2, np.float32), np.array(1)], scale=0.5)
    for wrong in (float("nan"), "x", "2", None):
        with pytest.raises(KVError, match="scale is a finite number"):
            getattr(kv, call)("a", np.ones(2, np.float32), scale=wrong)


def test_sums_are_the_stores_own_and_lent_but_a_single_array_is_not(kv: Noting) -> None:
    one = np.ones(2, np.float32)
    kv.push("a", one)
    kv.push("a", [one, one])
    kv.push(["a", "b"], [[one, one], np.array(1)])
    assert [call[2].lent for call in kv.calls] == [False, True, False]


def test_a_push_never_waits_and_the_other_calls_do(kv: Noting) -> None:
    later = Later()
    kv.outcome = lambda: later
    value = np.ones(2, np.float32)
    assert kv.push("a", value) is later
    assert later.waits == []
    assert kv.pull("a", value) is later
    assert kv.pushpull("a", value) is later
    assert kv.row_sparse_pull("t", RowSparse.empty((4, 2)), row_ids=[1]) is later
    assert kv.barrier() is later
    assert later.waits == [None] * 4


def test_a_push_that_is_known_to_have_failed_raises_at_once(kv: Noting) -> None:
    kv.outcome = lambda: Later(is_done=True, error=ZeroDivisionError("mine"))
    with pytest.raises(ZeroDivisionError, match="mine"):
        kv.push("a", np.ones(2, np.float32))
    assert kv.push("a", np.ones(2, np.float32), wait=False).is_done


def test_without_waiting_the_arrays_are_lent_and_the_outcome_is_returned(kv: Noting) -> None:
    later = Later(error=ZeroDivisionError("mine"))
    kv.outcome = lambda: later
    value = np.ones(2, np.float32)
    calls: list[Any] = [
        kv.push("a", value, wait=False),
        kv.pull("a", value, wait=False),
        kv.pushpull("a", value, wait=False),
        kv.row_sparse_pull("t", RowSparse.empty((4, 2)), row_ids=[1], wait=False),
    ]
    assert calls == [later] * 4
    assert [call[2].lent for call in kv.calls] == [True] * 4
    assert kv.barrier(wait=False) is later
    assert later.waits == []


def test_calls_without_keys_are_done(kv: Noting) -> None:
    for pending in (
        kv.init([], []),
        kv.assign([], []),
        kv.broadcast([], [], []),
        kv.push([], [], wait=False),
        kv.row_sparse_pull([], [], row_ids=[1]),
    ):
        pending.wait(0)
    assert kv.calls == []


def test_an_assign_hands_over_dense_values_that_fit(kv: Noting) -> None:
    kv.assign(["a", "t"], [np.ones(2, np.float32), RowSparse(np.ones((1, 2), np.float32), [1], (4, 2))])
    assert [call[0] for call in kv.calls] == ["reserve", "assign"]
    (_, items, ticket) = kv.calls[1]
    assert [(record.key, array.tolist()) for record, array in items] == [
        ("a", [1, 1]),
        ("t", [[0, 0], [1, 1], [0, 0], [0, 0]]),
    ]
    assert ticket == 1
    with pytest.raises(KVError, match="key 'a': the assigned value has shape"):
        kv.assign("a", np.ones(3, np.float32))
    with pytest.raises(KVError, match="key 'z' was never initialised"):
        kv.assign("z", np.ones(3, np.float32))
