"""What the stores of one process do beside sums: compression between devices, rules that change, types, lending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from distrun_runtime import kvstore
from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import BFLOAT16, narrow, widen
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore

DEVICES = 4
SHAPES = {3: (4, 5), 5: (70, 30), 7: (1,)}
RATE = 2


def compressed(params: dict[str, object]) -> KVStore:
    """Return a `device` store that adds RATE times what it receives; its values are zeros."""
    kv = kvstore.create("device")
    kv.set_gradient_compression({**params, "min_size": 0})
    kv.set_optimizer("test", rescale_grad=RATE)
    kv.init(list(SHAPES), [np.zeros(shape, np.float32) for shape in SHAPES.values()])
    assert isinstance(kv, KVStore)
    return kv


def after(kv: KVStore, value: float, grouped: bool) -> float:
    """Push `value` from each device to each key and return the one number that all are now."""
    values = [[np.full(shape, value, np.float32) for _ in range(DEVICES)] for shape in SHAPES.values()]
    outs = [np.empty(shape, np.float32) for shape in SHAPES.values()]
    if grouped:
        kv.push(list(SHAPES), values)
        kv.pull(list(SHAPES), outs)
    else:
        for key, each, out in zip(SHAPES, values, outs, strict=True):
            kv.push(key, each)
            kv.pull(key, out)
    (number,) = np.unique(np.concatenate([out.reshape(-1) for out in outs]))
    return float(number)


@pytest.mark.parametrize("grouped", [False, True])
def test_two_bits_between_devices_send_what_the_threshold_says(grouped: bool) -> None:
    """Row: tests/nightly/test_kvstore.py::test_compress_kvstore, 2bit, t = 0.5, and its groups of keys."""
    kv = compressed({"type": "2bit", "threshold": 0.5})
    sent = 0.5 * RATE * DEVICES
    assert after(kv, 0.4, grouped) == 0
    assert after(kv, 0.2, grouped) == sent  # 0.6: 0.1 stays
    assert after(kv, 0.2, grouped) == sent
    assert after(kv, 0.2, grouped) == 2 * sent
    for step in range(1, 4):
        assert after(kv, -0.5, grouped) == pytest.approx((2 - step) * sent)


@pytest.mark.parametrize("threshold", [-0.5, 0.0, 0.5])
def test_one_bit_between_devices_moves_every_element_by_one(threshold: float) -> None:
    """Row: tests/nightly/test_kvstore.py::test_compress_kvstore, 1bit, t in -0.5, 0, 0.5."""
    kv = compressed({"type": "1bit", "threshold": threshold})
    one, repeat = RATE * DEVICES, 3
    for step in range(1, repeat + 1):
        assert after(kv, 1, False) == step * one
    for step in range(repeat - 1, -1, -1):
        assert after(kv, -1, False) == step * one
    assert [after(kv, value, False) for value in (2, 0, -2)] == [one, 2 * one, one]


def test_one_device_alone_is_compressed_too_and_small_values_are_left_alone() -> None:
    kv = kvstore.create("device")
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5, "min_size": 0}, keys="a")
    kv.init(["a", "b"], [np.zeros(2, np.float32)] * 2)
    outs = [np.empty(2, np.float32), np.empty(2, np.float32)]
    kv.pushpull(["a", "b"], [np.full(2, 0.7, np.float32)] * 2, out=outs)
    assert outs[0].tolist() == [0.5, 0.5]
    assert outs[1].tolist() == [np.float32(0.7)] * 2
    kv.set_gradient_compression({"type": "none"}, keys="a")
    kv.pushpull("a", np.full(2, 0.7, np.float32), out=outs[0])
    assert outs[0].tolist() == [np.float32(0.7)] * 2


def test_a_random_gradient_arrives_as_the_simulated_quantiser_says() -> None:
    random, residuals = np.random.default_rng(1), [np.zeros((13, 7), np.float32) for _ in range(DEVICES)]
    kv = kvstore.create("device")
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5, "min_size": 0})
    kv.init("a", np.zeros((13, 7), np.float32))
    for _ in range(7):
        grads = [random.normal(size=(13, 7)).astype(np.float32) for _ in range(DEVICES)]
        expected = np.zeros((13, 7), np.float32)
        for residual, grad in zip(residuals, grads, strict=True):
            residual += grad
            sent = np.where(residual >= 0.5, np.float32(0.5), np.where(residual <= -0.5, np.float32(-0.5), 0))
            residual -= sent
            expected += sent
        out = np.empty((13, 7), np.float32)
        kv.pushpull("a", grads, out=out)
        assert np.array_equal(out, expected)


def test_compression_has_no_use_in_a_local_store_nor_two_ways_in_a_device_store() -> None:
    with pytest.raises(KVError, match="a 'local' store sends nothing that could be compressed; 'device' compresses"):
        kvstore.create("local").set_gradient_compression({"type": "2bit"})
    with pytest.raises(KVError, match="a 'device' store compresses one way only"):
        kvstore.create("device").set_gradient_compression({"type": "fp16", "two_way": True})


def value(number: float, dtype: str) -> Any:
    kind = dtypes.parse(dtype)
    return narrow(np.full(3, number, dtypes.work_dtype(kind)), kind)


def pulled(kv: Any, key: Any, dtype: str) -> list[float]:
    out = value(-1, dtype)
    kv.pull(key, out)
    return [float(number) for number in widen(out)]


@pytest.mark.parametrize("kind", ["local", "device"])
@pytest.mark.parametrize(("dtype", "small"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_sixteen_bit_floats_of_devices_are_summed_in_float32(kind: str, dtype: str, small: float) -> None:
    kv = kvstore.create(kind)
    kv.init("w", value(0, dtype))
    kv.push("w", [value(1, dtype), *[value(small, dtype)] * 4])
    assert pulled(kv, "w", dtype) == [1 + 4 * small] * 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_master_keeps_steps_that_the_weight_cannot_show(dtype: str) -> None:
    kv = kvstore.create("local")
    kv.init("w", value(1, dtype))
    kv.set_optimizer("sgd", learning_rate=1e-4, multi_precision=True)
    for _ in range(200):
        kv.push("w", value(1, dtype))
    assert pulled(kv, "w", dtype) == [float(widen(value(0.98, dtype))[0])] * 3
    kv.assign("w", value(2, dtype))
    kv.push("w", value(0, dtype))  # the master was assigned as well
    assert pulled(kv, "w", dtype) == [2.0] * 3


def test_an_updater_of_bfloat16_values_calculates_in_float32() -> None:
    kv = kvstore.create("local")
    kv.init("w", value(1, "bfloat16"))

    def add(key: str, received: Any, stored: Any) -> None:
        assert received.dtype == stored.dtype == np.float32
        stored += received

    kv.set_updater(add)
    kv.push("w", value(2, "bfloat16"))
    assert pulled(kv, "w", "bfloat16") == [3.0] * 3


def test_ml_dtypes_bfloat16_arrays_are_viewed_as_ours_in_and_out() -> None:
    kv = kvstore.create("local")
    given = np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(2, 3)
    kv.init("w", given.T)
    out = np.zeros((3, 2), ml_dtypes.bfloat16)
    kv.pull("w", out)
    assert np.array_equal(out, given.T)
    ours = np.empty((3, 2), BFLOAT16)
    kv.pull("w", ours)
    assert np.array_equal(widen(ours), given.T.astype(np.float32))
    with pytest.raises(KVError, match=r"dtype uint16, but the key has .* dtype bfloat16"):
        kv.pull("w", np.empty((3, 2), np.uint16))


@pytest.mark.parametrize("kind", ["local", "device"])
def test_a_contribution_is_scaled_before_the_rule(kind: str) -> None:
    kv = kvstore.create(kind)
    kv.init(["w", "v"], [value(0, "float32"), value(0, "bfloat16")])
    kv.push("w", [value(3, "float32"), value(1, "float32")], scale=0.25)
    kv.push("v", value(3, "bfloat16"), scale=0.5)
    assert pulled(kv, "w", "float32") == [1.0] * 3
    assert pulled(kv, "v", "bfloat16") == [1.5] * 3
    kv.set_optimizer("sgd", learning_rate=1.0)
    kv.push("w", value(3, "float32"), scale=2)
    assert pulled(kv, "w", "float32") == [-5.0] * 3


def test_assigned_values_replace_the_weight_and_keep_the_rules_state() -> None:
    kv = kvstore.create("local")
    kv.init("w", value(0, "float64"))
    kv.set_optimizer("sgd", learning_rate=1, momentum=0.5)
    kv.push("w", value(1, "float64"))
    kv.assign("w", value(10, "float64"))
    kv.push("w", value(0, "float64"))  # the velocity of -1 goes on: -0.5
    assert pulled(kv, "w", "float64") == [9.5] * 3


def test_parameters_are_changed_while_running_and_state_stays() -> None:
    kv = kvstore.create("local")
    kv.init(["w", "v"], [value(0, "float64")] * 2)
    with pytest.raises(KVError, match="no rule to change; call set_optimizer first"):
        kv.set_learning_rate(0.5)
    kv.set_optimizer("sgd", learning_rate=1, momentum=0.5)
    kv.push(["w", "v"], [value(1, "float64")] * 2)
    kv.set_learning_rate(0.5)
    kv.set_multipliers(lr={"v": 2}, wd={"v": 0})
    kv.push(["w", "v"], [value(1, "float64")] * 2)
    assert pulled(kv, "w", "float64") == [-2.0] * 3  # -1, then -0.5 of momentum and -0.5
    assert pulled(kv, "v", "float64") == [-2.5] * 3
    kv.set_optimizer_params(momentum=0)
    kv.push("w", value(1, "float64"))
    assert pulled(kv, "w", "float64") == [-2.5] * 3
    for change in ({"learning_rate": -1}, {"moment": 1}, {"learning_rate": "fast"}):
        with pytest.raises(KVError, match="rule 'sgd'"):
            kv.set_optimizer_params(**change)
    kv.set_optimizer("sgd", learning_rate=0.5)  # an equal repeat


def test_a_schedule_lowers_the_rate_by_the_updates_of_each_weight() -> None:
    kv = kvstore.create("local")
    kv.init(["w", "v"], [value(0, "float64")] * 2)
    kv.set_optimizer("sgd", learning_rate=1, lr_scheduler=kvstore.schedule.Factor(step=2, factor=0.5))
    for _ in range(4):
        kv.push("w", value(1, "float64"))
    kv.push("v", value(1, "float64"))
    assert pulled(kv, "w", "float64") == [-3.0] * 3  # 1, 1, 0.5, 0.5
    assert pulled(kv, "v", "float64") == [-1.0] * 3


@pytest.mark.parametrize("wait", [True, False])
def test_what_an_updater_raises_is_raised_by_the_push_or_by_its_wait(wait: bool) -> None:
    kv = kvstore.create("local")
    kv.init("w", value(0, "float64"))

    def fail(key: str, received: Any, stored: Any) -> None:
        raise ZeroDivisionError("mine")

    kv.set_updater(fail)
    with pytest.raises(ZeroDivisionError, match="mine"):
        kv.push("w", value(1, "float64"), wait=wait).wait()
    kv.push("w", value(1, "float64"), wait=False)
    with pytest.raises(ZeroDivisionError, match="mine"):
        kv.pull("w", value(1, "float64"))
    assert pulled(kv, "w", "float64") == [0.0] * 3


def test_calls_that_are_not_waited_for_are_done_when_they_are() -> None:
    kv = kvstore.create("device")
    first = kv.init("w", value(0, "float32"), wait=False)
    out, again = value(-1, "float32"), value(-1, "float32")
    calls = [
        first,
        kv.push("w", [value(1, "float32"), value(2, "float32")], wait=False),
        kv.pull("w", out, wait=False),
        kv.pushpull("w", value(5, "float32"), out=again, wait=False),
        kv.assign("w", value(8, "float32"), wait=False),
        kv.broadcast("v", value(9, "float32"), value(0, "float32"), wait=False),
        kv.barrier(wait=False),
    ]
    for call in calls:
        call.wait(60)
    assert (out.tolist(), again.tolist()) == ([3.0] * 3, [5.0] * 3)
    assert pulled(kv, "w", "float32") == [8.0] * 3
    kv.close()


def test_threads_that_push_the_same_key_to_a_device_store_lose_nothing() -> None:
    kv = kvstore.create("device")
    kv.set_optimizer("test")
    kv.init("w", value(0, "float64"))

    def work() -> None:
        for _ in range(50):
            kv.push("w", [value(1, "float64"), value(2, "float64")])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert pulled(kv, "w", "float64") == [600.0] * 3


def test_a_store_of_one_process_loses_no_node() -> None:
    kv = kvstore.create("local")
    assert kv.num_dead_node(7) == 0


def test_calls_return_their_outcome() -> None:
    kv = kvstore.create("local")
    kinds: list[Callable[[], Any]] = [
        lambda: kv.init("w", value(0, "float32")),
        lambda: kv.push("w", value(1, "float32")),
        lambda: kv.pull("w", value(1, "float32")),
        kv.barrier,
    ]
    assert all(isinstance(call(), kvstore.Pending) for call in kinds)
    assert repr(kv.push("w", value(1, "float32"))) == "<Pending push of key 'w': done>"
