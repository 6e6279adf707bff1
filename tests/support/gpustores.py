"""Stores whose values and outputs may be on GPUs of the stand-in, called as `KVStore` calls their backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gpukit import Machine

from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.store.base import CallOptions, Selection, StoreBackend
from distrun_runtime.store.dist import DistBackend
from distrun_runtime.store.keys import KeyRecord


def put(machine: Machine, place: str, array: Any) -> Any:
    """Return a copy of an array on a device, by its name; `host`: a numpy array."""
    if place == "host":
        return array.copy()
    number, _, part = place.removeprefix("gpu:").partition("/")
    return machine.gpus.get(int(number), int(part) if part else None).put(array)


class Store:
    """A store's backend, called as `KVStore` calls it."""

    def __init__(self, backend: StoreBackend, items: dict[Any, Any]) -> None:
        self.backend = backend
        backend.reducer.prepare(KeyRecord.of(key, 0, value) for key, value in items.items())
        records = backend.init(list(items.items()), backend.reserve() if isinstance(backend, DistBackend) else 0)
        self.records = {record.key: record for record in records}
        self.keys = Selection(records)

    def push(self, *given: Sequence[Any], scale: float = 1.0, wait: bool = True) -> Any:
        """Push a list of values for each key, in order."""
        items = list(zip(self.keys.records, given, strict=True))
        sums = self.backend.reducer.reduce(items)
        own = all(total is not value for total, (_, each) in zip(sums, items, strict=True) for value in each)
        call = CallOptions(lent=own or not wait, own=own, scale=scale, waits=wait)
        pending = self.backend.push(self.keys, sums, call)
        if pending.is_done and wait:
            pending.wait()
        return pending

    def pull(self, outs: Sequence[Sequence[Any]], wait: bool = True) -> Any:
        pending = self.backend.pull(self.keys, outs, CallOptions(waits=wait))
        if wait:
            pending.wait()
        return pending

    def pulled(self) -> list[Array]:
        outs = [np.empty(record.shape, record.dtype) for record in self.keys.records]
        self.pull([[out] for out in outs])
        return outs
