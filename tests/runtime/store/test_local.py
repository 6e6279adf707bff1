"""The stores of one process, by the rows of MXNet's test suites that concern dense values, and on their own.

Every test runs with a `local` and a `device` store; a list of values is from as many devices.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from slowness import scaled

from distrun_runtime import kvstore
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore

Array = npt.NDArray[Any]
SHAPE = (4, 4)
DEVICES = 4
INT_KEYS, STR_KEYS = [5, 7, 11], ["b", "c", "d"]
KINDS: list[tuple[Any, list[Any]]] = [(3, INT_KEYS), ("a", STR_KEYS)]


class Chosen:
    """The kind of store that the tests are run with."""

    kind = "local"


@pytest.fixture(params=["local", "device"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Chosen, "kind", request.param)
    return str(request.param)


def create() -> KVStore:
    kv = kvstore.create(Chosen.kind)
    assert isinstance(kv, KVStore)
    return kv


def filled(key: Any, keys: list[Any]) -> KVStore:
    """Return a store whose keys were initialised with zeros."""
    kv = create()
    kv.init(key, np.zeros(SHAPE))
    kv.init(keys, [np.zeros(SHAPE)] * len(keys))
    return kv


def pulled(kv: KVStore, key: Any, like: Array | None = None) -> Array:
    out = np.full(SHAPE, np.nan) if like is None else np.empty_like(like)
    kv.pull(key, out=out)
    return out


@pytest.mark.parametrize(("key", "keys"), KINDS)
def test_a_pushed_value_is_pulled(key: Any, keys: list[Any]) -> None:
    """Row: tests/python/unittest/test_kvstore.py::test_single_kv_pair (dense)."""
    kv = filled(key, keys)
    kv.push(key, np.ones(SHAPE))
    assert np.array_equal(pulled(kv, key), np.ones(SHAPE))


@pytest.mark.parametrize("key", [3, "a"])
def test_a_pull_after_init_gives_the_init_value(key: Any) -> None:
    """Row: tests/python/unittest/test_kvstore.py::test_init."""
    kv = create()
    kv.init(key, np.ones(SHAPE) * 4)
    assert np.array_equal(pulled(kv, key), np.full(SHAPE, 4.0))


@pytest.mark.parametrize(("key", "other"), [(3, 4), ("a", "b")])
def test_a_pull_gives_the_sum_and_other_keys_are_untouched(key: Any, other: Any) -> None:
    """Row: tests/python/unittest/test_kvstore.py::test_pull."""
    kv = create()
    kv.init(key, np.zeros(SHAPE))
    kv.push(key, [np.ones(SHAPE)] * DEVICES)
    kv.init(other, np.ones(SHAPE))
    assert np.array_equal(pulled(kv, key), np.full(SHAPE, 4.0))
    assert np.array_equal(pulled(kv, other), np.ones(SHAPE))


@pytest.mark.parametrize(("key", "keys"), KINDS)
def test_a_list_of_keys_is_pushed_and_pulled(key: Any, keys: list[Any]) -> None:
    """Row: tests/python/unittest/test_kvstore.py::test_list_kv_pair."""
    kv = filled(key, keys)
    kv.push(keys, [np.ones(SHAPE) * 4] * len(keys))
    outs = [np.empty(SHAPE) for _ in keys]
    kv.pull(keys, out=outs)
    assert all(np.array_equal(out, np.full(SHAPE, 4.0)) for out in outs)


@pytest.mark.parametrize(("key", "keys"), KINDS)
def test_devices_are_summed_and_every_device_gets_the_sum(key: Any, keys: list[Any]) -> None:
    """Row: tests/python/unittest/test_kvstore.py::test_aggregator (skipped upstream)."""
    kv = filled(key, keys)
    values = [np.ones(SHAPE) for _ in range(DEVICES)]
    kv.push(key, values)
    kv.pull(key, out=values)
    assert all(np.array_equal(value, np.full(SHAPE, DEVICES)) for value in values)
    lists = [[np.ones(SHAPE) * 2.0 for _ in range(DEVICES)] for _ in keys]
    kv.push(keys, lists)
    kv.pull(keys, out=lists)
    assert all(np.array_equal(value, np.full(SHAPE, DEVICES * 2)) for values in lists for value in values)


@pytest.mark.parametrize(("key", "keys"), KINDS)
def test_an_updater_gets_the_sum_and_the_users_own_key(key: Any, keys: list[Any]) -> None:
    """Row: tests/python/unittest/test_kvstore.py::test_updater."""
    kv = filled(key, keys)
    seen: list[Any] = []

    def add(name: Any, received: Array, stored: Array) -> None:
        seen.append(name)
        stored += received

    kv.set_updater(add)
    values = [np.ones(SHAPE) for _ in range(DEVICES)]
    kv.push(key, values)
    kv.pull(key, out=values)
    assert all(np.array_equal(value, np.full(SHAPE, DEVICES)) for value in values)
    lists = [[np.ones(SHAPE) for _ in range(DEVICES)] for _ in keys]
    for _ in range(4):
        kv.push(keys, lists)
    kv.pull(keys, out=lists)
    assert all(np.array_equal(value, np.full(SHAPE, DEVICES * 4)) for values in lists for value in values)
    assert seen == [key, *keys * 4]
    assert {type(name) for name in seen} == {type(key)}


def test_the_type_echoes_the_name(kind: str) -> None:
    """Row: tests/python/unittest/test_kvstore.py::test_get_type."""
    kv = kvstore.create(kind.upper())
    assert (kv.type, kv.rank, kv.num_workers) == (kind, 0, 1)


@pytest.mark.parametrize(("mine", "foreign"), [(3, "a"), ("a", 3)])
def test_keys_of_the_other_kind_are_refused_by_init_push_and_pull(mine: Any, foreign: Any) -> None:
    """Row: tests/python/unittest/test_kvstore.py::test_invalid_pull (dense part)."""
    kv = create()
    kv.init(mine, np.zeros(SHAPE))
    value = np.ones(SHAPE)
    for call in (kv.init, kv.push, kv.pull, kv.pushpull):
        with pytest.raises(KVError, match="all ints or all strs"):
            call(foreign, value)
    assert np.array_equal(value, np.ones(SHAPE))


@pytest.mark.parametrize("grouped", [False, True])
def test_ten_rounds_of_random_sums_equal_numpys(grouped: bool) -> None:
    """Row: tests/nightly/test_kvstore.py::test_kvstore and ::test_group_kvstore (local types, dense).

    The updater adds lr * received; relative error below 1e-6 as there.
    """
    random = np.random.default_rng(5)
    keys, shapes, lr = [3, 5, 7], [(10,), (13, 5), (4, 5, 6)], 0.1
    kv = create()

    def descend(key: int, received: Array, stored: Array) -> None:
        stored += received * np.float32(lr)

    kv.set_updater(descend)
    for key, shape in zip(keys, shapes, strict=True):
        kv.init(key, np.zeros(shape, np.float32))
    expected = [np.zeros(shape) for shape in shapes]
    for _ in range(10):
        data = [[random.normal(size=shape).astype(np.float32) for _ in range(DEVICES)] for shape in shapes]
        outs = [[np.empty(shape, np.float32) for _ in range(DEVICES)] for shape in shapes]
        if grouped:
            kv.push(keys, data)
            kv.pull(keys, out=outs)
        else:
            for key, values, out in zip(keys, data, outs, strict=True):
                kv.push(key, values)
                kv.pull(key, out=out)
        for n, values in enumerate(data):
            expected[n] += lr * np.sum(values, axis=0, dtype=np.float64)
            for out in outs[n]:
                assert np.abs(out - expected[n]).sum() / np.abs(expected[n]).sum() < 1e-6


def test_without_updater_the_sum_is_assigned_not_added() -> None:
    kv = filled(3, INT_KEYS)
    for value in (2.0, 5.0):
        kv.push(3, [np.full(SHAPE, value), np.ones(SHAPE)])
        assert np.array_equal(pulled(kv, 3), np.full(SHAPE, value + 1))
    kv.push([3, 3], [np.full(SHAPE, 1.0), np.full(SHAPE, 9.0)])
    assert np.array_equal(pulled(kv, 3), np.full(SHAPE, 10.0))


def test_nothing_of_the_callers_is_kept_by_reference() -> None:
    kv = create()
    first, pushed = np.zeros(SHAPE), np.ones(SHAPE)
    kv.init(3, first)
    first += 5
    assert np.array_equal(pulled(kv, 3), np.zeros(SHAPE))
    kv.push(3, pushed)
    pushed += 5
    out = pulled(kv, 3)
    assert np.array_equal(out, np.ones(SHAPE))
    out += 5
    assert np.array_equal(pulled(kv, 3), np.ones(SHAPE))


@pytest.mark.parametrize("how", ["plain", "updater", "sgd", "adam", "test"])
def test_the_pushed_gradient_is_never_overwritten(how: str) -> None:
    kv = filled(3, INT_KEYS)
    if how == "updater":
        kv.set_updater(lambda key, received, stored: received.fill(99))
    elif how != "plain":
        kv.set_optimizer(how, rescale_grad=0.5)
    one, two = np.ones(SHAPE), np.full(SHAPE, 2.0)
    kv.push(3, one)
    kv.push(3, [one, two])
    kv.pushpull(3, one, out=np.empty(SHAPE))
    assert np.array_equal(one, np.ones(SHAPE))
    assert np.array_equal(two, np.full(SHAPE, 2.0))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8", "int32", "uint64"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (3, 4)])
def test_every_shape_and_dtype_goes_through(dtype: str, shape: tuple[int, ...]) -> None:
    kv = create()
    kv.init("w", np.full(shape, 7, dtype))
    out = np.empty(shape, dtype)
    kv.pull("w", out=out)
    assert np.array_equal(out, np.full(shape, 7, dtype))
    kv.push("w", [np.full(shape, 2, dtype), np.full(shape, 3, dtype)])
    kv.pull("w", out=out)
    assert np.array_equal(out, np.full(shape, 5, dtype))
    kv.pushpull("w", out)
    assert np.array_equal(out, np.full(shape, 5, dtype))


def test_arrays_of_any_strides_are_pushed_and_pulled_into() -> None:
    kv = create()
    base = np.arange(24.0).reshape(4, 6)
    kv.init("w", np.asfortranarray(np.zeros((2, 3))))
    for view in (base[::2, ::2], base[3:1:-1, 5:2:-1], np.asfortranarray(base[:2, :3]), base.T[1:3, 1:4]):
        kv.push("w", view)
        canvas = np.full((4, 6), -1.0)
        kv.pull("w", out=canvas[1::2, ::2])
        assert np.array_equal(canvas[1::2, ::2], view)
        assert (canvas[::2] == -1).all()
        assert (canvas[:, 1::2] == -1).all()


def test_pushpull_gives_the_new_value_in_place_or_in_out() -> None:
    kv = filled("a", STR_KEYS)
    values = [np.ones(SHAPE), np.full(SHAPE, 2.0)]
    kv.pushpull("a", values)
    assert all(np.array_equal(value, np.full(SHAPE, 3.0)) for value in values)
    outs = [np.empty(SHAPE) for _ in STR_KEYS]
    kv.pushpull(STR_KEYS, [values[0]] * 3, out=outs)
    assert all(np.array_equal(out, np.full(SHAPE, 3.0)) for out in outs)


def test_broadcast_stores_and_hands_out() -> None:
    """Row: tests/python/unittest/test_kvstore_custom.py, broadcast single and list, and pushpull in place."""
    kv = create()
    outs = [np.empty(SHAPE) for _ in range(DEVICES)]
    kv.broadcast("a", np.ones(SHAPE), out=outs)
    assert all(np.array_equal(out, np.ones(SHAPE)) for out in outs)
    lists = [[np.empty(SHAPE) for _ in range(DEVICES)] for _ in STR_KEYS]
    kv.broadcast(STR_KEYS, [np.full(SHAPE, 2.0)] * 3, out=lists)
    assert all(np.array_equal(out, np.full(SHAPE, 2.0)) for row in lists for out in row)
    with pytest.raises(KVError, match="already initialised"):
        kv.broadcast("a", np.ones(SHAPE), out=outs)


def test_an_equal_optimizer_keeps_state_and_a_different_one_needs_replace() -> None:
    kv = filled(3, INT_KEYS)
    kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
    kv.push(3, np.full(SHAPE, 2.0))
    kv.set_optimizer("SGD", lr=0.5, momentum=0.5)
    kv.push(3, np.zeros(SHAPE))
    assert np.array_equal(pulled(kv, 3), np.full(SHAPE, -1.5))
    with pytest.raises(KVError, match=r"has the rule sgd with learning_rate=0.5, not 0.25; .* replace=True"):
        kv.set_optimizer("sgd", lr=0.25, momentum=0.5)
    with pytest.raises(KVError, match="has the rule sgd, not adam"):
        kv.set_optimizer("adam")
    kv.set_optimizer("sgd", lr=0.25, momentum=0.5, replace=True)
    kv.push(3, np.zeros(SHAPE))  # the velocity of -0.5 goes on: -0.25
    assert np.array_equal(pulled(kv, 3), np.full(SHAPE, -1.75))
    kv.set_optimizer("test", rescale_grad=2, replace=True)
    kv.push(3, np.ones(SHAPE))
    assert np.array_equal(pulled(kv, 3), np.full(SHAPE, 0.25))


def test_an_optimizer_after_an_updater_needs_replace_and_an_updater_takes_over() -> None:
    kv = filled(3, INT_KEYS)
    kv.set_updater(lambda key, received, stored: stored.fill(8))
    with pytest.raises(KVError, match="has the rule updater, not"):
        kv.set_optimizer("sgd")
    kv.set_optimizer("test", replace=True)
    kv.push(3, np.ones(SHAPE))
    assert np.array_equal(pulled(kv, 3), np.ones(SHAPE))
    kv.set_updater(lambda key, received, stored: stored.fill(8))
    kv.push(3, np.ones(SHAPE))
    assert np.array_equal(pulled(kv, 3), np.full(SHAPE, 8.0))
    kv.set_updater(None)
    kv.push(3, np.ones(SHAPE))
    assert np.array_equal(pulled(kv, 3), np.ones(SHAPE))


def test_a_rule_and_a_dtype_that_do_not_fit_meet_at_once() -> None:
    kv = create()
    kv.init("i", np.zeros(2, np.int32))
    with pytest.raises(KVError, match="key 'i': rule 'sgd' updates float weights, not int32"):
        kv.set_optimizer("sgd")
    kv.push("i", np.ones(2, np.int32))
    other = create()
    other.set_optimizer("adam")
    with pytest.raises(KVError, match="key 'i': rule 'adam' updates float weights"):
        other.init("i", np.zeros(2, np.int32))
    other.init("i", np.zeros(2))


def test_an_updater_may_pull_other_keys_and_what_it_raises_reaches_the_push() -> None:
    kv = filled("a", STR_KEYS)

    def mix(key: str, received: Array, stored: Array) -> None:
        if key == "c":
            raise ZeroDivisionError("mine")
        stored += received + pulled(kv, "d")

    kv.push("d", np.ones(SHAPE))
    kv.set_updater(mix)
    kv.push("a", np.ones(SHAPE))
    assert np.array_equal(pulled(kv, "a"), np.full(SHAPE, 2.0))
    with pytest.raises(ZeroDivisionError, match="mine"):
        kv.push("c", np.ones(SHAPE))
    assert np.array_equal(pulled(kv, "c"), np.zeros(SHAPE))


def test_a_key_whose_init_nobody_waited_for_is_there_for_an_updater() -> None:
    kv = filled("a", STR_KEYS)
    kv.set_updater(lambda key, received, stored: np.copyto(stored, received + pulled(kv, "e")))
    assert kv.init("e", np.full(SHAPE, 2.0), wait=False).is_done
    kv.push("a", np.ones(SHAPE))
    assert np.array_equal(pulled(kv, "a"), np.full(SHAPE, 3.0))


def test_an_updater_does_not_wait_for_an_init_that_waits_for_it() -> None:
    """Another thread wants to initialise the key that the updater asks for."""
    kv = filled("a", STR_KEYS)
    threads: list[threading.Thread] = []

    def update(key: str, received: Array, stored: Array) -> None:
        threads.append(threading.Thread(target=lambda: kv.init("e", np.ones(SHAPE)), daemon=True))
        threads[0].start()
        threads[0].join(0.2)  # it cannot get further than to our lock
        with pytest.raises(KVError, match="initialised"):
            kv.pull("e", out=np.empty(SHAPE))

    kv.set_updater(update)
    kv.push("a", np.ones(SHAPE))
    threads[0].join(scaled(60))
    assert np.array_equal(pulled(kv, "e"), np.ones(SHAPE))


def test_threads_take_turns() -> None:
    kv = filled(3, INT_KEYS)
    kv.set_optimizer("test")
    threads, rounds = 4, 50

    def work() -> None:
        out = np.empty(SHAPE)
        for _ in range(rounds):
            kv.push(3, np.ones(SHAPE))
            kv.pull(3, out=out)
            assert len(np.unique(out)) == 1, "a torn value"

    with ThreadPoolExecutor(threads) as pool:
        for ended in [pool.submit(work) for _ in range(threads)]:
            ended.result(scaled(60))
    assert np.array_equal(pulled(kv, 3), np.full(SHAPE, float(threads * rounds)))
