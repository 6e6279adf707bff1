"""LocalStore: a store in this process's memory, for one worker."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.ps import profile
from distrun_runtime.ps.counters import Counters
from distrun_runtime.store.base import Call, KVStore, Record, RowsItem, Updater, Value
from distrun_runtime.store.compress import Compressor, Setting
from distrun_runtime.store.keyed import Contribution, named
from distrun_runtime.store.pending import Pending, Settled
from distrun_runtime.store.reducer import DeviceReducer
from distrun_runtime.store.values import Key
from distrun_runtime.store.weights import Weights


class LocalStore(KVStore):
    """A store of one worker: a push sums over its devices. Threads take turns; a pull never sees half a push.

    Every call is over when it returns, also with wait=False. An updater or rule that fails leaves the keys of the call
    before its own updated, its own as far as it came.
    """

    _is_shared = False

    def __init__(self, type_name: str = "local") -> None:
        super().__init__(type_name)
        self._lock = threading.RLock()  # an updater may pull other keys
        self._weights = Weights()
        self._counters = Counters()
        self._pushes: dict[Key, int] = {}
        self._recorder = profile.Recorder()

    @property
    def rank(self) -> int:
        """0: the only worker."""
        return 0

    @property
    def num_workers(self) -> int:
        """1: a local store is not shared."""
        return 1

    # Data

    def _together(self, what: str, body: Callable[[int], None], wait: bool, new: Sequence[Key] = ()) -> Pending:
        # A thread that may wait for the init of a key, an updater's, has the lock: so no init is under way without it.
        with self._open():
            return super()._together(what, body, wait, new)

    def _init(self, items: list[tuple[Key, Value]], ticket: int) -> list[Record]:
        with self._open():
            self._weights.check((key, value.dtype) for key, value in items)
            first = len(self._weights.values)
            for key, value in items:
                self._weights.add(key, value)
            return [
                Record.of(key, key if isinstance(key, int) else first + place, value)
                for place, (key, value) in enumerate(items)
            ]

    def _assign(self, items: list[tuple[Record, Array]], ticket: int) -> None:
        with self._open():
            for record, value in items:
                self._weights.assign(record.key, value)

    def _push(self, items: list[tuple[Record, Value]], call: Call) -> Pending:
        return self._made("push", [record for record, _ in items], lambda: self._update(items, call.scale))

    def _pull(self, items: list[tuple[Record, list[Array]]], call: Call) -> Pending:
        return self._made("pull", [record for record, _ in items], lambda: self._write(items))

    def _pull_rows(self, items: list[RowsItem], call: Call) -> Pending:
        def work() -> None:
            for record, rows, take in items:
                found = self._weights.values[record.key][rows]
                self._counters.sent(found.nbytes)
                take(found)

        return self._made("row_sparse_pull", [record for record, _, _ in items], work)

    def _pushpull(self, items: list[tuple[Record, Value, list[Array]]], call: Call) -> Pending:
        def work() -> None:
            self._update([(record, value) for record, value, _ in items], call.scale)
            self._write([(record, outs) for record, _, outs in items])

        return self._made("pushpull", [record for record, _, _ in items], work)

    def _made(self, call: str, records: list[Record], work: Callable[[], None]) -> Pending:
        """Do the work of a call and return its outcome."""
        keys = [record.key for record in records]
        what = "%s of %s" % (call, named(keys))
        try:
            with self._open(), self._recorder.span(call, "store", keys=keys):
                work()
        # Whatever the user's updater raises is for whoever waits.
        except Exception as err:
            return Settled(what, err, self._late)
        return Settled(what)

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Hold the lock of a store that no other thread has closed meanwhile."""
        with self._lock:
            self._alive()
            yield

    def _write(self, items: list[tuple[Record, list[Array]]]) -> None:
        for record, outs in items:
            value = self._weights.values[record.key]
            for out in outs:
                np.copyto(out, value)
                self._counters.sent(value.nbytes)

    def _update(self, items: list[tuple[Record, Value]], scale: float) -> None:
        for record, value in items:
            self._weights.update(record, value, scale)
            self._counters.received(value.nbytes if isinstance(value, np.ndarray) else value.values.nbytes)
            self._counters.updates += 1
            self._pushes[record.key] = self._pushes.get(record.key, 0) + 1

    # What a push does

    def _set_rule(self, spec: RuleSpec, replace: bool) -> None:
        with self._open():
            self._weights.set_rule(spec, replace)

    def _change_rule(self, change: Mapping[str, Any]) -> None:
        with self._open():
            self._weights.change_rule(change)

    def _set_updater(self, updater: Updater | None) -> None:
        with self._open():
            self._weights.set_updater(updater)

    def _compress(self, setting: Setting, keys: list[Key] | None) -> None:
        compressor = self._compressor()
        if compressor is None:
            raise KVError(
                "a %r store sends nothing that could be compressed; 'device' compresses what devices send" % self.type
            )
        if setting.two_way:
            raise KVError("a %r store compresses one way only: two_way is for stores on servers" % self.type)
        compressor.set(setting, keys)

    @property
    def _compresses(self) -> bool:
        compressor = self._compressor()
        return compressor is not None and compressor.is_on

    def _check(self, items: list[Contribution]) -> None:
        self._reducer.check(items)

    def _compressor(self) -> Compressor | None:
        return self._reducer.compressor if isinstance(self._reducer, DeviceReducer) else None

    # States and facts

    def _save(self, folder: str) -> None:
        # Imported here, as below: most scripts never save.
        from distrun_runtime.store import localstates

        compressor = self._compressor()
        with self._open():
            residuals = compressor.residuals() if compressor else {}
            localstates.save(folder, self.type, self._records.values(), self._weights, residuals)

    def _load(self, folder: str) -> None:
        from distrun_runtime.store import localstates

        compressor = self._compressor()
        with self._open():
            residuals = localstates.load(folder, self._records.values(), self._weights)
            if compressor is not None:
                compressor.restore(residuals)

    def _stats(self) -> list[dict[str, Any]]:
        with self._lock:
            keys = len(self._records)
            rounds = max(self._pushes.values(), default=0)
            facts = {"server": self.type, "host": platform.node(), "keys": keys, "pieces": keys, "rounds": rounds}
            return [{**facts, "queue": 0, **self._counters.to_json()}]

    @contextmanager
    def _recording(self, folder: str) -> Iterator[None]:
        if self._recorder.is_on:
            raise KVError("this %r store is being profiled already" % self.type)
        profile.prepare(folder)
        self._recorder.start()
        try:
            yield
        finally:
            profile.write(folder, "worker-0.json", self._recorder.stop("worker-0@%s" % platform.node()))

    def _profile(self, folder: str) -> AbstractContextManager[None]:
        return self._recording(folder)

    def _num_dead(self, mask: int) -> int:
        return 0

    # Membership

    def _barrier(self) -> Pending:
        return Settled("barrier")

    def _join(self) -> None:
        """Return at once: nobody else is there."""

    def _leave(self) -> None:
        """Do nothing: nobody else is there."""

    def _close(self) -> None:
        with self._lock:
            self._weights.clear()
