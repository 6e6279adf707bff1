"""LocalStore: a store in this process's memory, for one worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from distrun_runtime.algo import rules
from distrun_runtime.algo.reduce import Array
from distrun_runtime.errors import KVError
from distrun_runtime.store.base import KVStore, Record, Updater
from distrun_runtime.store.values import Key


class LocalStore(KVStore):
    """A store of one worker: a push sums over its devices. Threads take turns; a pull never sees half a push.

    An updater or rule that fails leaves the keys of the call before its own updated, its own as far as it came.
    """

    def __init__(self, type_name: str = "local") -> None:
        super().__init__(type_name)
        self._lock = threading.RLock()  # an updater may pull other keys
        self._values: dict[Key, Array] = {}
        self._states: dict[Key, rules.State] = {}
        self._rule: rules.Rule | None = None
        self._updater: Updater | None = None

    @property
    def rank(self) -> int:
        """0: the only worker."""
        return 0

    @property
    def num_workers(self) -> int:
        """1: a local store is not shared."""
        return 1

    def _init(self, items: list[tuple[Key, Array]]) -> list[Record]:
        with self._open():
            if self._rule is not None:
                for key, value in items:
                    _check(self._rule, key, value.dtype)
            records = []
            for key, value in items:
                records.append(Record.of(key, key if isinstance(key, int) else len(self._values), value))
                self._values[key] = np.array(value, order="C", copy=True)
            return records

    def _push(self, items: list[tuple[Record, Array]], priority: int) -> None:
        with self._open():
            for record, value in items:
                self._apply(record.key, value)

    def _pull(self, items: list[tuple[Record, list[Array]]], priority: int) -> None:
        with self._open():
            for record, outs in items:
                for out in outs:
                    np.copyto(out, self._values[record.key])

    def _pushpull(self, items: list[tuple[Record, Array, list[Array]]], priority: int) -> None:
        with self._open():
            self._push([(record, value) for record, value, _ in items], priority)
            self._pull([(record, outs) for record, _, outs in items], priority)

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Hold the lock of a store that no other thread has closed meanwhile."""
        with self._lock:
            self._ready()
            yield

    def _apply(self, key: Key, value: Array) -> None:
        stored = self._values[key]
        if self._updater is not None:
            # A copy: the user's function may change or keep what it receives, and that may be the pushed array.
            self._updater(key, value.copy(), stored)
        elif self._rule is not None:
            if key not in self._states:
                self._states[key] = self._rule.new_state(stored)
            self._rule.step(stored, value, self._states[key])
        else:
            np.copyto(stored, value)

    def _set_rule(self, name: str, params: dict[str, Any], replace: bool) -> None:
        rule = rules.make(name, params)
        with self._lock:
            if self._rule is not None and rules.same(self._rule, rule):
                return
            if not replace and (self._rule is not None or self._updater is not None):
                there = "an updater" if self._rule is None else rules.difference(self._rule, rule)
                raise KVError("this store already has %s; to change it, call set_optimizer with replace=True" % there)
            for key, value in self._values.items():
                _check(rule, key, value.dtype)
            self._states = {
                key: rules.carry_state(rule, self._values[key], state) for key, state in self._states.items()
            }
            self._rule, self._updater = rule, None

    def _set_updater(self, updater: Updater | None) -> None:
        with self._lock:
            self._updater, self._rule = updater, None
            self._states.clear()

    def _barrier(self) -> None:
        """Return at once: nobody else is there."""

    def _join(self) -> None:
        """Return at once: nobody else is there."""

    def _leave(self) -> None:
        """Do nothing: nobody else is there."""

    def _close(self) -> None:
        with self._lock:
            self._values.clear()
            self._states.clear()
            self._rule = self._updater = None


def _check(rule: rules.Rule, key: Key, dtype: np.dtype[Any]) -> None:
    try:
        rule.check(dtype)
    except KVError as err:
        raise KVError("key %r: %s" % (key, err)) from None
