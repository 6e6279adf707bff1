"""The store in this process's memory, for one worker: its values, and what updates them."""

from __future__ import annotations

import platform
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays.device import DeviceArray
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.ps import trace
from distrun_runtime.ps.counters import Counters
from distrun_runtime.store.base import (
    CallOptions,
    Contribution,
    Lifetime,
    RowsItem,
    RowsTarget,
    Selection,
    StoreBackend,
    Updater,
)
from distrun_runtime.store.compress import Compression, Compressor
from distrun_runtime.store.keys import Key, KeyRecord, Zeros, on_devices
from distrun_runtime.store.pending import CompletedCall, Pending
from distrun_runtime.store.reducer import reducer_for
from distrun_runtime.store.values import First, RowSparse, Value
from distrun_runtime.store.weights import Weights

MOST_UNCOUNTED = 64
"""So many lists of keys may have pushes that are not counted yet."""


class LocalBackend(StoreBackend):
    """The store of one worker: a push sums over its devices. Threads take turns; a pull never sees half a push.

    Every call is over when it returns, also with wait=False. An updater or a rule of the user's that fails leaves the
    keys of the call before its own updated, its own as far as it came.
    """

    is_shared = False
    rank = 0
    num_workers = 1

    def __init__(self, type_name: str = "local") -> None:
        self.lifetime = Lifetime(type_name)
        self._compressor = Compressor()
        self.reducer = reducer_for(type_name, compressor=self._compressor)
        self._lock = threading.RLock()  # an updater may pull other keys
        self._weights = Weights(self.reducer.host)
        self.reducer.prepares.append(self._weights.prepare)
        self._counters = Counters()
        self._pushes = Counter[Key]()
        self._uncounted = Counter[Selection]()
        """Pushes of whole calls that are not among those yet: to count them key by key takes long."""
        self._recorder = trace.Recorder()

    # Data

    def exclusive(self) -> AbstractContextManager[object]:
        """Return what holds the lock: a thread in an updater holds it too, and may wait for the init of a key."""
        return self._open()

    def agree(self, facts: Mapping[str, str], of: str) -> None:
        """Do nothing: there are no other workers."""

    def label(self, labels: Mapping[Key, str]) -> None:
        """Do nothing: no other worker has names for keys."""

    def init(self, items: list[tuple[Key, First]], call_number: int) -> list[KeyRecord]:
        with self._open():
            first = len(self._weights.kept)
            records = [
                KeyRecord.of(key, key if isinstance(key, int) else first + place, value)
                for place, (key, value) in enumerate(items)
            ]
            values = [value.to_dense() if isinstance(value, Zeros) else value for _, value in items]
            self._weights.add(list(zip(records, values, strict=True)))
            return records

    def assign(self, items: list[tuple[KeyRecord, Array]], call_number: int) -> None:
        with self._open():
            for record, value in items:
                self._weights.assign(record.key, value)

    def delete(self, records: list[KeyRecord], call_number: int) -> None:
        with self._open():
            self._count_pushes()
            for record in records:
                self._weights.delete(record.key)
                self._pushes.pop(record.key, None)
                self._compressor.forget(record.key)

    def push(self, keys: Selection, values: Sequence[Value], call: CallOptions) -> Pending:
        return self._made("push", keys, partial(self._update, keys, values, call.scale))

    def pull(self, keys: Selection, outs: Sequence[Sequence[DeviceArray]], call: CallOptions) -> Pending:
        return self._made("pull", keys, partial(self._write, keys, outs))

    def pull_rows(self, items: list[RowsItem], call: CallOptions) -> Pending:
        def work() -> None:
            for record, rows, take in items:
                take(self._rows(record, rows))

        return self._made("row_sparse_pull", Selection(record for record, _, _ in items), work)

    def pushpull(
        self, keys: Selection, values: Sequence[Value], outs: Sequence[Sequence[DeviceArray]], call: CallOptions
    ) -> Pending:
        update, write = partial(self._update, keys, values, call.scale), partial(self._write, keys, outs)
        return self._made("pushpull", keys, update, write)

    def pushpull_rows(
        self, keys: Selection, values: Sequence[Value], items: list[RowsTarget], call: CallOptions
    ) -> Pending:
        def work() -> None:
            for (record, give), value in zip(items, values, strict=True):
                rows = value.canonical().rows if isinstance(value, RowSparse) else np.arange(record.shape[0])
                give(self._rows(record, rows), rows.copy())

        return self._made("pushpull", keys, partial(self._update, keys, values, call.scale), work)

    def planned(
        self, keys: Selection, given: Sequence[Any] | None, outs: Sequence[Any] | None, scale: float
    ) -> Callable[[], object] | None:
        if keys.has_rows or self.compresses or self._recorder.is_on or not on_devices(self.type):
            return None
        with self._lock:
            try:
                made = self._weights.planned(keys, given, outs, scale)
                if made is None:
                    return None
            except KVError as err:
                raise KVError(f"{keys.named}: {err}") from err
            if given is not None:
                self._note_push(keys, keys.size_bytes)
            if outs is not None:
                copies = len(outs[0]) if isinstance(outs[0], (list, tuple)) else 1
                self._counters.bytes_out += copies * keys.size_bytes
        return made

    def _made(self, call: str, keys: Selection, *work: Callable[[], None]) -> Pending:
        """Do the work of a call and return its outcome."""
        what = f"{call} of {keys.named}"
        try:
            recorder = self._recorder
            span = recorder.span(call, "store", keys=keys.keys) if recorder.is_on else nullcontext()
            with self._open(), span:
                for each in work:
                    each()
        # Whatever the user's updater raises is raised where the call is waited for.
        except Exception as err:
            return CompletedCall(what, err, self.lifetime.late)
        return CompletedCall(what)

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Hold the lock of a store that no other thread has closed meanwhile."""
        with self._lock:
            self.lifetime.check()
            yield

    def _write(self, keys: Selection, outs: Sequence[Sequence[DeviceArray]]) -> None:
        kept = self._weights.kept
        for key, arrays in zip(keys.keys, outs, strict=True):
            value = kept[key].array
            for out in arrays:
                devices.copy(value, out)
                self._counters.bytes_out += value.nbytes

    def _rows(self, record: KeyRecord, rows: Array) -> Array:
        found: Array = devices.on_host(self._weights.kept[record.key].array)[rows]
        self._counters.bytes_out += found.nbytes
        return found

    def _update(self, keys: Selection, values: Sequence[Value], scale: float) -> None:
        self._weights.update(keys, values, scale)
        nbytes = keys.size_bytes
        if keys.has_rows:
            nbytes = sum(each.values.nbytes if isinstance(each, RowSparse) else each.nbytes for each in values)
        self._note_push(keys, nbytes)

    def _note_push(self, keys: Selection, nbytes: int) -> None:
        self._counters.bytes_in += nbytes
        self._counters.updates += len(keys.keys)
        self._uncounted[keys] += 1
        if len(self._uncounted) > MOST_UNCOUNTED:
            self._count_pushes()

    def _count_pushes(self) -> None:
        for keys, times in self._uncounted.items():
            self._pushes.update(dict.fromkeys(keys.keys, times))
        self._uncounted.clear()

    # What a push does

    def set_rule(self, spec: RuleSpec, replace: bool | None) -> None:
        with self._open():
            self._weights.set_rule(spec, replace)

    def change_rule(self, change: Mapping[str, Any]) -> None:
        with self._open():
            self._weights.change_rule(change)

    def set_updater(self, updater: Updater | None) -> None:
        with self._open():
            self._weights.set_updater(updater)

    def compress(self, setting: Compression, keys: list[Key] | None) -> None:
        if not on_devices(self.type):
            raise KVError(
                f"a {self.type!r} store sends nothing that could be compressed; 'device' compresses what devices send"
            )
        if setting.two_way:
            raise KVError(f"a {self.type!r} store compresses one way only: two_way is for stores on servers")
        self._compressor.set(setting, keys)

    @property
    def compresses(self) -> bool:
        return self._compressor.is_on

    def check(self, items: list[Contribution]) -> None:
        self.reducer.check(items)

    # States and facts

    def save(self, folder: str) -> None:
        # Imported here, as below: most scripts never save.
        from distrun_runtime.store import saving

        with self._open():
            saving.save_local(folder, self.type, self._weights, self._compressor.residuals())

    def load(self, folder: str) -> None:
        from distrun_runtime.store import saving

        with self._open():
            residuals = saving.load_local(folder, self._weights)
            self._compressor.restore(residuals if on_devices(self.type) else {})

    def stats(self) -> list[dict[str, Any]]:
        with self._lock:
            self._count_pushes()
            keys = len(self._weights.kept)
            rounds = max(self._pushes.values(), default=0)
            facts = {"server": self.type, "host": platform.node(), "keys": keys, "pieces": keys, "rounds": rounds}
            return [{**facts, "queue": 0, **self._counters.to_json()}]

    @contextmanager
    def profile(self, folder: str) -> Iterator[None]:
        if self._recorder.is_on:
            raise KVError(f"this {self.type!r} store is being profiled already")
        trace.prepare(folder)
        self._recorder.start()
        try:
            yield
        finally:
            trace.write(folder, "worker-0.json", self._recorder.stop(f"worker-0@{platform.node()}"))

    def join(self) -> None:
        """Return at once: there are no other workers."""

    def leave(self) -> None:
        """Do nothing: there are no other workers."""

    def close(self) -> None:
        with self._lock:
            self._weights = Weights(self.reducer.host)
        self.reducer.prepares.clear()
        self._compressor.clear()
        self.reducer.trim()
