"""Sums of device values: where they are made, and that it makes no difference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.cpu import Threads
from distrun_runtime.arrays.dtypes import narrow, widen
from distrun_runtime.errors import KVError
from distrun_runtime.store.compress import Setting
from distrun_runtime.store.record import Record
from distrun_runtime.store.reducer import DeviceReducer, Reducer, place, reducer_for
from distrun_runtime.store.sparse import RowSparse

REDUCERS = [
    *(Reducer(Threads()), Reducer(Threads(4, bound=2))),
    *(DeviceReducer(Threads()), DeviceReducer(Threads(2, bound=2))),
]


def test_the_largest_keys_are_placed_first_each_where_the_fewest_elements_are() -> None:
    assert place({"a": 10, "b": 30, "c": 20, "d": 25}, 2) == {"b": 0, "d": 1, "c": 1, "a": 0}
    assert place({1: 5, 2: 5, 3: 5, 4: 5, 5: 5}, 4) == {1: 0, 2: 1, 3: 2, 4: 3, 5: 0}
    assert place({"a": 1}, 4) == {"a": 0}
    assert place({}, 4) == {}


def test_keys_that_are_placed_stay_when_others_come() -> None:
    before = place({"a": 10, "b": 4}, 2)
    assert place({"a": 10, "b": 4, "c": 100, "d": 1}, 2, before) == {"a": 0, "b": 1, "c": 1, "d": 0}


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_no_device_has_more_than_another_by_more_than_its_last_key(sizes: list[int], devices: int) -> None:
    by_key: dict[int | str, int] = dict(enumerate(sizes))
    places = place(by_key, devices)
    load = [sum(size for key, size in by_key.items() if places[key] == device) for device in range(devices)]
    assert set(places) == set(by_key)
    for device in range(devices):
        mine = [by_key[key] for key in by_key if places[key] == device]
        if mine:
            assert load[device] - min(mine) <= min(load)


@pytest.mark.parametrize("dtype", dtypes.NAMES)
@pytest.mark.parametrize("devices", [2, 4])
def test_sums_on_the_host_on_devices_and_by_threads_are_the_same_bits(dtype: str, devices: int) -> None:
    random = np.random.default_rng(7)
    kind = dtypes.parse(dtype)
    values = [narrow((random.normal(size=(5, 3)) * 50).astype(dtypes.work_dtype(kind)), kind) for _ in range(devices)]
    record = Record.of("w", 0, values[0])
    sums = [reducer.reduce([(record, values)])[0] for reducer in REDUCERS]
    assert all(total.tobytes() == sums[0].tobytes() for total in sums)  # type: ignore[union-attr]  # arrays
    wide = [widen(value) for value in values]
    exact = wide[0].copy()
    for one in wide[1:]:
        exact += one
    assert np.array_equal(sums[0], narrow(exact, kind))  # type: ignore[arg-type]


@pytest.mark.parametrize("reducer", REDUCERS)
def test_one_value_is_handed_on_as_it_is_and_several_are_left_alone(reducer: Reducer) -> None:
    value, other = np.ones(3), np.ones(3)
    record = Record.of("w", 0, value)
    assert reducer.reduce([(record, [value])])[0] is value
    (total,) = reducer.reduce([(record, [value, other])])
    assert total is not value
    assert value.tolist() == other.tolist() == [1, 1, 1]


@pytest.mark.parametrize("reducer", REDUCERS)
def test_rows_of_devices_are_summed_into_each_row_once(reducer: Reducer) -> None:
    first = RowSparse(np.ones((2, 2)), [3, 1], (4, 2))
    second = RowSparse(np.full((2, 2), 2.0), [3, 3], (4, 2))
    record = Record.of("t", 0, first)
    (total,) = reducer.reduce([(record, [first, second])])
    assert isinstance(total, RowSparse)
    assert total.rows.tolist() == [1, 3]
    assert total.values.tolist() == [[1, 1], [5, 5]]


def test_the_merge_buffers_of_keys_are_spread_over_the_devices() -> None:
    reducer = DeviceReducer(Threads())
    values = {name: np.ones(size) for name, size in (("a", 8), ("b", 6), ("c", 4), ("d", 2))}
    records = [Record.of(name, n, value) for n, (name, value) in enumerate(values.items())]
    reducer.know(records)
    reducer.reduce([(record, [values[str(record.key)]] * 2) for record in records])
    assert reducer.places == {"a": 0, "b": 1, "c": 1, "d": 0}
    late = Record.of("e", 4, np.ones(30))
    reducer.know([late])
    reducer.reduce([(late, [np.ones(30)] * 2)])
    assert reducer.places["e"] == 0
    reducer.reduce([(records[0], [values["a"]] * 4)])  # two devices more: all are placed again
    assert reducer.places == {"e": 0, "a": 1, "b": 2, "c": 3, "d": 3}


def test_each_device_has_a_residual_of_its_own() -> None:
    reducer = DeviceReducer(Threads(), compresses=True)
    assert reducer.compressor is not None
    reducer.compressor.set(Setting.of({"type": "2bit", "threshold": 0.5, "min_size": 0}))
    values = [np.full(3, n, np.float32) for n in (0.4, 0.1)]
    record = Record.of("w", 0, values[0])
    sums = [reducer.reduce([(record, values)])[0] for _ in range(5)]
    # 0.4 is sent with the 2nd, 3rd, 4th and 5th push, 0.1 with the 5th.
    assert [round(float(total[0]), 6) for total in sums] == [0, 0.5, 0.5, 0.5, 1.0]  # type: ignore[index]
    assert reducer.reduce([(record, [np.full(3, 0.6, np.float32)])])[0].tolist() == [0.5] * 3  # type: ignore[union-attr]


def test_a_value_that_cannot_be_compressed_changes_no_residual() -> None:
    reducer = DeviceReducer(Threads(), compresses=True)
    assert reducer.compressor is not None
    reducer.compressor.set(Setting.of({"type": "2bit", "min_size": 0}))
    good, bad = np.full(2, 0.4, np.float32), np.array([1, np.nan], np.float32)
    record, other = Record.of("w", 0, good), Record.of("v", 1, good)
    with pytest.raises(KVError, match="key 'v'"):
        reducer.reduce([(record, [good, good]), (other, [good, bad])])
    assert reducer.compressor.residuals() == {}


def test_each_kind_of_store_has_its_reducer_set_up_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXNET_KVSTORE_REDUCTION_NTHREADS", "3")
    monkeypatch.setenv("MXNET_KVSTORE_BIGARRAY_BOUND", "77")
    kinds = {name: reducer_for(name) for name in ("local", "dist_sync", "device", "dist_device_sync")}
    assert [type(reducer) for reducer in kinds.values()] == [Reducer, Reducer, DeviceReducer, DeviceReducer]
    threads = kinds["local"]._threads
    assert (threads.count, threads.bound) == (3, 77)
    # A dist store compresses the sum on its way to the servers, not each device's part as well.
    assert [getattr(kinds[name], "compressor", None) is None for name in kinds] == [True, True, False, True]
