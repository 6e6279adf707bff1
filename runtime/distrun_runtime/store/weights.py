"""The values of a store in this process, and what updates them: the sum itself, a rule, or a function of the user's.

Values are kept in the user's shape; rules see them flat (of row-sparse keys: as rows), as they do on a server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.store.hooks import Updater, Value
from distrun_runtime.store.record import Record
from distrun_runtime.store.sparse import RowSparse
from distrun_runtime.store.values import Key


class Weights:
    """Values by key, and one way to update them. Threads: one at a time."""

    def __init__(self) -> None:
        self.values: dict[Key, Array] = {}
        """Each C-contiguous and ours alone."""
        self.states: dict[Key, rules.State] = {}
        """What the rule remembers of a key, in flat arrays; of keys that it has updated."""
        self.spec: RuleSpec | None = None
        self.rule: rules.Rule | None = None
        self._updater: Updater | None = None

    @property
    def has_updater(self) -> bool:
        """Whether a function of the user's updates the values."""
        return self._updater is not None

    def add(self, key: Key, value: Value) -> None:
        """Keep a copy of a first value."""
        self.values[key] = value.to_dense() if isinstance(value, RowSparse) else np.array(value, order="C", copy=True)

    def assign(self, key: Key, value: Array) -> None:
        """Overwrite a value; the rule's state goes on."""
        np.copyto(self.values[key], value)
        rules.renew_master(self.values[key].reshape(-1), self.states.get(key, {}))

    def update(self, record: Record, value: Value, scale: float = 1.0) -> None:
        """Take in the sum of a push, times `scale`; it is only read."""
        if scale != 1:
            value = _scaled(value, scale)
        stored = self.values[record.key]
        if self._updater is not None:
            _call(self._updater, record.key, value, stored)
        elif self.rule is not None:
            self._step(self.rule, record, value)
        elif isinstance(value, RowSparse):
            stored[...] = np.zeros((), stored.dtype)
            stored[value.rows] = value.values
        else:
            np.copyto(stored, value)

    def _step(self, rule: rules.Rule, record: Record, value: Value) -> None:
        assert self.spec is not None
        knobs = self.spec.knobs(record.key)
        flat = self.values[record.key].reshape(-1)
        if record.key not in self.states:
            self.states[record.key] = rule.new_state(flat)
        state = self.states[record.key]
        if isinstance(value, RowSparse):
            table, grad = flat.reshape(record.shape[0], record.row_size), value.values
            rule.step(table, grad.reshape(len(value.rows), record.row_size), state, knobs, rows=value.rows)
        else:
            rule.step(flat, value.reshape(-1), state, knobs)

    # What updates

    def check(self, items: Iterable[tuple[Key, np.dtype[Any]]], rule: rules.Rule | None = None) -> None:
        """Return if the rule (the present one, if none is given) takes values of these dtypes.

        Raises:
            KVError: it does not; the key is named.
        """
        chosen = rule or self.rule
        if chosen is not None:
            rules.check_keys(chosen, items)

    def set_rule(self, spec: RuleSpec, replace: bool) -> None:
        """Install a rule; an equal one changes nothing."""
        if self.spec is not None and rules.same(self.spec, spec):
            return
        if not replace and (self.spec is not None or self.has_updater):
            there = "an updater" if self.spec is None else rules.difference(self.spec, spec)
            raise KVError("this store already has %s; to change it, call set_optimizer with replace=True" % there)
        self.install(spec, self.made(spec))

    def change_rule(self, change: Mapping[str, Any]) -> None:
        """Change parameters or multipliers of the rule."""
        if self.spec is None:
            raise KVError("this store has no rule to change; call set_optimizer first")
        spec = self.spec.changed(change)
        self.install(spec, self.made(spec))

    def install(self, spec: RuleSpec, rule: rules.Rule) -> None:
        """Put a rule that was `made` in place of what is there; what state both know goes on."""
        self.states = {
            key: rules.carry_state(rule, self.values[key].reshape(-1), state) for key, state in self.states.items()
        }
        self.spec, self.rule, self._updater = spec, rule, None

    def made(self, spec: RuleSpec) -> rules.Rule:
        """Return the rule of a spec, which takes all values that are here, and install nothing.

        Raises:
            KVError: there is no such rule, or it does not take a value.
        """
        # None: any module of the user's may be imported, as this is the user's own process.
        rule = rules.rule_of(spec, None)
        self.check(((key, value.dtype) for key, value in self.values.items()), rule)
        return rule

    def set_updater(self, updater: Updater | None) -> None:
        """Put a function, or nothing, in place of what is there."""
        self._updater, self.rule, self.spec = updater, None, None
        self.states.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.values.clear()
        self.set_updater(None)


def _call(updater: Updater, key: Key, value: Value, stored: Array) -> None:
    # A copy: the user's function may change or keep what it receives, and that may be the pushed array.
    received = value.to_dense() if isinstance(value, RowSparse) else value.copy()
    if stored.dtype != dtypes.BFLOAT16:
        updater(key, received, stored)
        return
    # numpy cannot calculate with bfloat16: the function gets float32, as it would on a server.
    wide = dtypes.widen(stored)
    updater(key, dtypes.widen(received), wide)
    stored[...] = dtypes.narrow(wide, stored.dtype)


def _scaled(value: Value, scale: float) -> Value:
    """Return a multiple of a value as a new one of its dtype."""
    if isinstance(value, RowSparse):
        return RowSparse(_scaled_array(value.values, scale), value.rows, value.shape)
    return _scaled_array(value, scale)


def _scaled_array(array: Array, scale: float) -> Array:
    wide = dtypes.widen(array)
    with np.errstate(over="ignore", invalid="ignore"):
        return dtypes.narrow(np.multiply(wide, wide.dtype.type(scale)), array.dtype)
