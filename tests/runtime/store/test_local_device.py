"""What the stores of one process do beside sums: compression between devices, rules that change, types, lending."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distrun_runtime import kvstore
from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import narrow, widen
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


def test_a_store_of_one_process_loses_no_node() -> None:
    kv = kvstore.create("local")
    assert kv.num_dead_node(7) == 0
