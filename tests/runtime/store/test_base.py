"""What every store has in common, seen through a store that only notes what its hooks were given."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distrun_runtime.errors import KVError, StoreClosed
from distrun_runtime.store.base import Array, Key, KVStore, Record, Updater


class Noting(KVStore):
    """Notes each hook that was called, with its arguments."""

    def __init__(self) -> None:
        super().__init__("noting")
        self.calls: list[tuple[Any, ...]] = []
        self.fail: Exception | None = None
        self.during_init: Callable[[], None] | None = None

    rank = property(lambda self: 0)  # type: ignore[assignment]
    num_workers = property(lambda self: 1)  # type: ignore[assignment]

    def _init(self, items: list[tuple[Key, Array]]) -> list[Record]:
        self.calls.append(("init", items))
        if self.during_init:
            self.during_init()
        if self.fail:
            raise self.fail
        return [Record.of(key, n, value) for n, (key, value) in enumerate(items)]

    def _push(self, items: list[tuple[Record, Array]], priority: int) -> None:
        self.calls.append(("push", items, priority))

    def _pull(self, items: list[tuple[Record, list[Array]]], priority: int) -> None:
        self.calls.append(("pull", items, priority))

    def _pushpull(self, items: list[tuple[Record, Array, list[Array]]], priority: int) -> None:
        self.calls.append(("pushpull", items, priority))

    def _barrier(self) -> None:
        self.calls.append(("barrier",))

    def _set_rule(self, name: str, params: dict[str, Any], replace: bool) -> None:
        self.calls.append(("rule", name, params, replace))

    def _set_updater(self, updater: Updater | None) -> None:
        self.calls.append(("updater", updater))

    def _join(self) -> None:
        self.calls.append(("join",))

    def _leave(self) -> None:
        self.calls.append(("leave",))

    def _close(self) -> None:
        self.calls.append(("close",))

    def _abort(self, error: BaseException) -> None:
        self.calls.append(("abort", error))


@pytest.fixture
def kv() -> Noting:
    store = Noting()
    store.init(["a", "b"], [np.zeros(2, np.float32), np.zeros((), np.int64)])
    store.calls.clear()
    return store


def test_a_push_of_one_array_hands_over_the_array_itself(kv: Noting) -> None:
    value = np.ones(2, np.float32)
    kv.push("a", value, priority=-3)
    ((name, ((record, given),), priority),) = kv.calls
    assert (name, record.key, priority) == ("push", "a", -3)
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
    ((_, ((record, given),), priority),) = kv.calls
    assert (record.key, priority) == ("a", 0)
    assert given[0] is outs[0]
    assert given[1] is outs[1]


def test_pushpull_without_out_writes_into_the_pushed_arrays(kv: Noting) -> None:
    values = [np.ones(2, np.float32), np.ones(2, np.float32)]
    kv.pushpull("a", values)
    ((_, ((_, total, outs),), _),) = kv.calls
    assert total.tolist() == [2, 2]
    assert [out is value for out, value in zip(outs, values, strict=True)] == [True, True]
    with pytest.raises(KVError, match="key 'b': an output is a numpy array that can be written, not int64"):
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
    assert [call[0] for call in kv.calls] == ["init", "pull"]
    assert kv.calls[1][1][0][0].key == "c"


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
    with pytest.raises(KVError, match=r"key 'aa' was never initialised in this store of 2 keys \(near: 'a'\)"):
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
        thread.join(30)

    kv.during_init = other_thread
    kv.init("c", np.zeros(1))
    assert [str(error) for error in errors] == [
        "key 'c' was already initialised; init works once a key, push changes its value"
    ]


@pytest.mark.parametrize("priority", [1.5, "1", None])
def test_a_priority_is_an_int(kv: Noting, priority: object) -> None:
    with pytest.raises(KVError, match="priority is an int"):
        kv.push("a", np.zeros(2, np.float32), priority=priority)  # type: ignore[arg-type]  # what is tested
    kv.push("a", np.zeros(2, np.float32), priority=np.int32(4))
    assert kv.calls[0][2] == 4


def test_set_optimizer_hands_over_the_complete_parameters(kv: Noting) -> None:
    kv.set_optimizer("SGD", lr=0.5)
    kv.set_optimizer("test", rescale=2, replace=True)
    name, params, replace = kv.calls[0][1:]
    assert (name, params["learning_rate"], params["momentum"], replace) == ("sgd", 0.5, 0.0, False)
    assert kv.calls[1] == ("rule", "test", {"rescale_grad": 2.0, "multi_precision": False}, True)


def test_an_unknown_rule_or_parameter_or_updater_reaches_no_hook(kv: Noting) -> None:
    with pytest.raises(KVError, match="unknown rule 'lars'; known are adam, "):
        kv.set_optimizer("lars")
    with pytest.raises(KVError, match="did you mean 'momentum'"):
        kv.set_optimizer("sgd", momemtum=0.9)
    with pytest.raises(KVError, match="an updater is a function"):
        kv.set_updater("sgd")  # type: ignore[arg-type]  # what is tested
    assert kv.calls == []


CALLS: list[tuple[str, Callable[[KVStore], object]]] = [
    ("init", lambda kv: kv.init("z", np.zeros(1))),
    ("push", lambda kv: kv.push("a", np.zeros(2, np.float32))),
    ("pull", lambda kv: kv.pull("a", np.zeros(2, np.float32))),
    ("pushpull", lambda kv: kv.pushpull("a", np.zeros(2, np.float32))),
    ("broadcast", lambda kv: kv.broadcast("z", np.zeros(1), np.zeros(1))),
    ("barrier", lambda kv: kv.barrier()),
    ("set_optimizer", lambda kv: kv.set_optimizer("sgd")),
    ("set_updater", lambda kv: kv.set_updater(None)),
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


def test_close_may_be_repeated(kv: Noting) -> None:
    kv.close()
    kv.close()
    assert kv.calls == [("close",)]
    assert (kv.type, kv.rank, kv.num_workers) == ("noting", 0, 1)
    assert repr(kv) == "<Noting 'noting': 2 keys, closed>"


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
