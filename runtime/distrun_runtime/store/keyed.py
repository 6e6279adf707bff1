"""What a store knows of its keys: their records, which are being initialised, and whether a value fits one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.store import values
from distrun_runtime.store.controls import Controls
from distrun_runtime.store.hooks import Value
from distrun_runtime.store.pending import Pending, Task
from distrun_runtime.store.record import Record, missing, twice
from distrun_runtime.store.reducer import reducer_for
from distrun_runtime.store.sparse import RowSparse
from distrun_runtime.store.values import Key

__all__ = ["Contribution", "Keyed", "named"]

Contribution = tuple[Record, list[Value]]
"""A key's record and its values, one for each device: arrays, or RowSparse if the key is row-sparse."""


class Keyed(Controls):
    """Keys, and the calls that give them their values."""

    _is_shared = True
    """Calls that all workers make together wait for others; else they are over when they return, also unwaited."""

    def __init__(self, type_name: str) -> None:
        super().__init__(type_name)
        self._records: dict[Key, Record] = {}
        self._starting: dict[Key, Task] = {}
        """Keys whose init is under way, in order."""
        self._reducer = reducer_for(type_name)

    def _begin(
        self, items: list[tuple[Key, Value]], call: str, wait: bool, then: Callable[[], None] | None = None
    ) -> Pending:
        """Initialise keys, then call `then`."""

        def body(ticket: int) -> None:
            self._start(items, ticket)
            if then is not None:
                then()

        names = [name for name, _ in items]
        return self._together("%s of %s" % (call, named(names)), body, wait, names)

    def _together(self, what: str, body: Callable[[int], None], wait: bool, new: Sequence[Key] = ()) -> Pending:
        """Make a call that all workers make in the same order; `new` are the keys that it initialises."""
        with self._registry:
            self._check_new(new)
            ticket = self._reserve()
            task = Task(what, lambda: body(ticket), self._late)
            self._starting.update(dict.fromkeys(new, task))
            # Behind those that are under way, so that all workers make them in one order.
            queued = self._is_shared and not (wait and self._line.is_idle)
            if queued:
                self._line.put(task)
        if not queued:
            with self._late.told(task) if wait else nullcontext():
                task.run()
        return self._awaited(task, wait)

    def _check_new(self, names: Sequence[Key]) -> None:
        known = next(iter(self._records), next(iter(self._starting), None))
        values.one_kind(names, known)
        for name in names:
            if name in self._records or name in self._starting:
                raise KVError(twice(name, self._records.get(name)))

    def _start(self, items: list[tuple[Key, Value]], ticket: int) -> None:
        records: list[Record] = []
        try:
            records = self._init(items, ticket)
            self._reducer.know(records)
        finally:
            with self._registry:
                for name, _ in items:
                    self._starting.pop(name, None)
                self._records.update((record.key, record) for record in records)

    def _record(self, key: Key) -> Record:
        """Return the record of a key; of one whose init is under way, when that is done."""
        with self._registry:
            record, starting = self._records.get(key), self._starting.get(key)
            first = next(iter(self._records), None)
        if record is None and starting is not None:
            starting.wait()
            record = self._records.get(key)
        if record is None:
            values.one_kind([key], first)
            raise KVError(missing(key, self._records))
        return record

    def _fitting(self, given: Iterable[tuple[Key, list[Value]]], noun: str = "pushed value") -> list[Contribution]:
        """Return each key's record with its values, of the key's storage kind.

        Raises:
            KVError: a key was never initialised, or a value has another shape or dtype; `noun` is what it is.
        """
        items = [(self._record(name), each) for name, each in given]
        for record, each in items:
            try:
                for value in each:
                    record.fit(value, noun)
            except KVError as err:
                hint = values.list_hint(each, dtypes.name_of(record.dtype)) if record.shape else ""
                raise KVError("%s%s" % (err, hint)) from None
        return [(record, [_stored_as(record, value) for value in each]) for record, each in items]

    def _targets(self, outs: list[tuple[Key, list[Array]]]) -> list[tuple[Record, list[Array]]]:
        items = [(self._record(name), arrays) for name, arrays in outs]
        for record, arrays in items:
            for array in arrays:
                record.fit(array, "output")
        return items


def named(keys: Iterable[Key]) -> str:
    """Return keys for people: `key 'w'`, or the first three of several and their number."""
    names = [repr(key) for key in keys]
    shown = ", ".join(names[:3]) + (", ... (%d keys)" % len(names) if len(names) > 3 else "")
    return "key %s" % shown if len(names) == 1 else "keys %s" % shown


def _stored_as(record: Record, value: Value) -> Value:
    """Return a value in the form in which the key's values are pushed."""
    if record.is_sparse:
        return value if isinstance(value, RowSparse) else RowSparse(value, np.arange(record.shape[0]), record.shape)
    return value.to_dense() if isinstance(value, RowSparse) else value
