"""The sum of a worker's device values of each key, made by the host's threads or on one of the devices.

Both give the same sums: from the first device to the last, 16-bit floats in float32. Where a sum is made is decided
by `place`. Values of the i-th place of a list are device i's; in this version all devices are buffers in host memory.

Source: the placement is MXNet's (`CommDevice::InitMergeBuffer`): keys by size, the largest first, each to the device
that has the fewest elements so far.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from distrun_runtime.arrays import find
from distrun_runtime.arrays.cpu import Threads
from distrun_runtime.arrays.device import Device
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.contract import environ
from distrun_runtime.store import kinds
from distrun_runtime.store.base import KeyRecord, Value
from distrun_runtime.store.compress import Compressor
from distrun_runtime.store.sparse import RowSparse
from distrun_runtime.store.values import Key

__all__ = ["DeviceReducer", "Reducer", "place", "reducer_for"]


def reducer_for(type_name: str) -> Reducer:
    """Return the reducer of a kind of store, set up by the environment."""
    threads = Threads(environ.read("MXNET_KVSTORE_REDUCTION_NTHREADS"), environ.read("MXNET_KVSTORE_BIGARRAY_BOUND"))
    if not kinds.on_devices(type_name):
        return Reducer(threads)
    return DeviceReducer(threads, compresses=not kinds.is_dist(type_name))


class Reducer:
    """Sums by the host's threads. Threads: any may call."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._host = find.get("cpu:0", threads)

    def know(self, records: Iterable[KeyRecord]) -> None:
        """Take note of keys whose values will come."""

    def reduce(self, items: Sequence[tuple[KeyRecord, Sequence[Value]]]) -> list[Value]:
        """Return the sum of each key's values, which fit its record and are of its storage kind.

        A single value is returned as it is (a RowSparse: canonical); every other sum is new.

        Raises:
            KVError: a value cannot be compressed. Nothing was changed.
        """
        return [self._sum(record, values) for record, values in items]

    def check(self, items: Sequence[tuple[KeyRecord, Sequence[Value]]]) -> None:
        """Return if `reduce` would take these values; nothing is changed.

        Raises:
            KVError: a value cannot be compressed.
        """

    def _sum(self, record: KeyRecord, values: Sequence[Value]) -> Value:
        rows = [value for value in values if isinstance(value, RowSparse)]
        if rows:
            return RowSparse.total(rows)
        arrays = [value for value in values if not isinstance(value, RowSparse)]
        return arrays[0] if len(arrays) == 1 else self._total(record, arrays)

    def _total(self, record: KeyRecord, arrays: Sequence[Array]) -> Array:
        return self._host.host(self._host.total(arrays))


class DeviceReducer(Reducer):
    """Sums each key on the device that `place` gives it; with compression, of what each device sends there.

    Arguments:
        compresses: whether this is where contributions are compressed (else the store does it with the sum).
    """

    def __init__(self, threads: Threads, compresses: bool = False) -> None:
        super().__init__(threads)
        self.compressor = Compressor() if compresses else None
        self._devices: list[Device] = []
        self._records: dict[Key, KeyRecord] = {}
        self.places: dict[Key, int] = {}
        """The device that each key's sum is made on, once that was asked for."""
        self._lock = threading.Lock()

    def know(self, records: Iterable[KeyRecord]) -> None:
        """Take note of keys, for their placement together with the next sum."""
        with self._lock:
            self._records.update((record.key, record) for record in records)

    def reduce(self, items: Sequence[tuple[KeyRecord, Sequence[Value]]]) -> list[Value]:
        """Return the sum of each key's values."""
        if self.compressor is None:
            return super().reduce(items)
        self.check(items)  # All of them, before any residual changes.
        return [self._sum(record, self._compressed(record, values)) for record, values in items]

    def check(self, items: Sequence[tuple[KeyRecord, Sequence[Value]]]) -> None:
        """Return if `reduce` would take these values; nothing is changed."""
        if self.compressor is None:
            return
        # A device's residual belongs to one contribution at a time.
        with self._lock:
            for record, values in items:
                for device, value in enumerate(values):
                    if not isinstance(value, RowSparse):
                        self.compressor.check(record, value.reshape(-1), device)

    def _compressed(self, record: KeyRecord, values: Sequence[Value]) -> Sequence[Value]:
        assert self.compressor is not None
        if self.compressor.of(record) is None:
            return values
        with self._lock:
            return [
                self.compressor.through(record, value.reshape(-1), device).reshape(record.shape)
                if not isinstance(value, RowSparse)
                else value
                for device, value in enumerate(values)
            ]

    def _total(self, record: KeyRecord, arrays: Sequence[Array]) -> Array:
        device = self._device(record, len(arrays))
        return device.host(device.total(arrays))

    def _device(self, record: KeyRecord, count: int) -> Device:
        """Return where this key's sum is made, of `count` devices."""
        with self._lock:
            while len(self._devices) < count:
                self._devices.append(find.get("cpu:%d" % len(self._devices), self._threads))
                self.places.clear()  # A device more: all are placed again.
            if record.key not in self.places:
                self._records.setdefault(record.key, record)
                sizes = {key: known.size for key, known in self._records.items()}
                self.places = place(sizes, len(self._devices), self.places)
            return self._devices[self.places[record.key] % count]


def place(sizes: Mapping[Key, int], devices: int, before: Mapping[Key, int] | None = None) -> dict[Key, int]:
    """Return the device of each key: the largest first, each to the device with the fewest elements so far.

    Arguments:
        sizes: key to elements. Equal ones keep their order; of equal devices the first is taken.
        devices: how many there are, at least 1.
        before: where some of the keys are already; they stay.
    """
    places = dict(before or {})
    load = [0] * devices
    for key, device in places.items():
        load[device] += sizes[key]
    for key in sorted(sizes, key=lambda name: -sizes[name]):
        if key not in places:
            places[key] = load.index(min(load))
            load[places[key]] += sizes[key]
    return places
