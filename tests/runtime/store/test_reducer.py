"""Sums of device values: where they are made, and that it makes no difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrun_runtime import kvstore
from distrun_runtime.arrays import cores, dtypes
from distrun_runtime.arrays.dtypes import Array, narrow, widen
from distrun_runtime.errors import ContractError
from distrun_runtime.kvstore import KVStore, RowSparse
from distrun_runtime.store.keys import KeyRecord
from distrun_runtime.store.reducer import DeviceReducer, Reducer, SumDevices, reducer_for


def placed(sums: SumDevices, sizes: dict[Any, int], devices: list[int]) -> dict[Any, int]:
    """Return the device of each key, of which all devices have values."""
    records = [KeyRecord.of(key, 0, np.empty(size)) for key, size in sizes.items()]
    return dict(zip(sizes, sums.choose(records, [devices] * len(sizes)), strict=True))


def test_the_largest_keys_are_placed_first_each_where_the_fewest_elements_are() -> None:
    assert placed(SumDevices(), {"a": 10, "b": 30, "c": 20, "d": 25}, [0, 1]) == {"b": 0, "d": 1, "c": 1, "a": 0}
    assert placed(SumDevices(), {1: 5, 2: 5, 3: 5, 4: 5, 5: 5}, [0, 1, 2, 3]) == {1: 0, 2: 1, 3: 2, 4: 3, 5: 0}
    assert placed(SumDevices(), {"a": 1}, [0, 1, 2, 3]) == {"a": 0}
    assert placed(SumDevices(), {}, [0]) == {}


def test_keys_that_are_placed_stay_when_others_and_other_devices_come() -> None:
    sums = SumDevices()
    assert placed(sums, {"a": 10, "b": 4}, [0, 1]) == {"a": 0, "b": 1}
    assert placed(sums, {"a": 10, "b": 4, "c": 100, "d": 1}, [0, 1]) == {"a": 0, "b": 1, "c": 1, "d": 0}
    assert placed(sums, {"a": 10, "e": 5}, [0, 1, 2]) == {"a": 0, "e": 2}
    assert placed(sums, {"a": 10, "f": 5}, [1, 2]) == {"a": 2, "f": 2}
    assert placed(sums, {"a": 10}, [0]) == {"a": 0}
    assert placed(sums, {"a": 10}, []) == {"a": None}


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_no_device_has_more_than_another_by_more_than_its_last_key(sizes: list[int], devices: int) -> None:
    by_key = dict(enumerate(sizes))
    places = placed(SumDevices(), by_key, [*range(devices)])
    load = [sum(size for key, size in by_key.items() if places[key] == device) for device in range(devices)]
    for device in range(devices):
        mine = [by_key[key] for key in by_key if places[key] == device]
        if mine:
            assert load[device] - min(mine) <= min(load)


THREADS = {"DISTRUN_COPY_THREADS": "4", "MXNET_KVSTORE_BIGARRAY_BOUND": "2"}
"""Values of 2 elements are summed by four threads."""


def stores(monkeypatch: pytest.MonkeyPatch) -> list[KVStore]:
    """Return a store for each place where device values are summed: host or device, by one thread or several."""
    plain = [kvstore.create("local"), kvstore.create("device")]
    for name, value in THREADS.items():
        monkeypatch.setenv(name, value)
    return [*plain, kvstore.create("local"), kvstore.create("device")]


@pytest.mark.parametrize("dtype", dtypes.NAMES)
@pytest.mark.parametrize("devices", [2, 4])
def test_sums_on_the_host_on_devices_and_by_threads_are_the_same_bits(
    dtype: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(7)
    kind = dtypes.parse(dtype)
    values = [narrow((random.normal(size=(5, 3)) * 50).astype(dtypes.work_dtype(kind)), kind) for _ in range(devices)]
    wide = [widen(value) for value in values]
    exact = wide[0].copy()
    for one in wide[1:]:
        exact += one
    for kv in stores(monkeypatch):
        kv.init("w", np.zeros((5, 3), kind))
        kv.push("w", values)
        total = np.zeros((5, 3), kind)
        kv.pull("w", total)
        assert total.tobytes() == narrow(exact, kind).tobytes()


def test_rows_of_devices_are_summed_into_each_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = RowSparse(np.ones((2, 2)), [3, 1], (4, 2))
    second = RowSparse(np.full((2, 2), 2.0), [3, 3], (4, 2))
    for kv in stores(monkeypatch):
        kv.init("t", RowSparse.empty((4, 2), "float64"))
        kv.set_optimizer("test")
        kv.push("t", [first, second])
        total = np.empty((4, 2))
        kv.pull("t", total)
        assert total.tolist() == [[0, 0], [1, 1], [0, 0], [5, 5]]
        assert (first.rows.tolist(), second.rows.tolist()) == ([3, 1], [3, 3])


def compressing(*keys: str, size: int) -> KVStore:
    kv = kvstore.create("device")
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5, "min_size": 0})
    kv.init(list(keys), [np.zeros(size, np.float32) for _ in keys])
    return kv


def pushed(kv: KVStore, key: str, values: list[Array]) -> float:
    """Return the first element of the sum that a push has stored."""
    kv.push(key, values)
    out = np.empty_like(values[0])
    kv.pull(key, out)
    return round(float(out[0]), 6)


def test_each_device_has_a_residual_of_its_own() -> None:
    kv = compressing("w", size=3)
    values = [np.full(3, n, np.float32) for n in (0.4, 0.1)]
    # 0.4 is sent with the 2nd, 3rd, 4th and 5th push, 0.1 with the 5th.
    assert [pushed(kv, "w", values) for _ in range(5)] == [0, 0.5, 0.5, 0.5, 1.0]
    assert pushed(kv, "w", [np.full(3, 0.6, np.float32)]) == 0.5


def test_each_kind_of_store_has_its_reducer_set_up_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRUN_COPY_THREADS", "3")
    monkeypatch.setenv("MXNET_KVSTORE_BIGARRAY_BOUND", "77")
    kinds = {name: reducer_for(name) for name in ("local", "dist_sync", "device", "dist_device_sync")}
    assert [type(reducer) for reducer in kinds.values()] == [Reducer, Reducer, DeviceReducer, DeviceReducer]
    threads = kinds["local"].host._threads
    assert (threads.count(), threads.bound) == (3, 77 * 4)
    with monkeypatch.context() as patch, pytest.raises(ContractError, match="DISTRUN_COPY_THREADS='-1'"):
        patch.setenv("DISTRUN_COPY_THREADS", "-1")
        reducer_for("local")
    # A dist store compresses the sum on its way to the servers, not each device's part as well.
    assert [kinds[name]._is_shared for name in kinds] == [False, True, False, True]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        *(({}, 1), ({"MXNET_KVSTORE_REDUCTION_NTHREADS": "4"}, 1), ({"DISTRUN_COPY_THREADS": "3"}, 3)),
        ({"DISTRUN_COPY_THREADS": "3", "MXNET_KVSTORE_REDUCTION_NTHREADS": "2"}, 2),
    ],
)
def test_sums_have_the_threads_that_copies_have_or_fewer(
    env: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISTRUN_COPY_THREADS", "MXNET_KVSTORE_REDUCTION_NTHREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cores, "usable_cores", lambda: 1.0)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert reducer_for("local").host._threads.count() == expected
