"""Values of a store in this process, and one way to update them: the sum itself, a rule, or the user's function."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Tuple, cast

import numpy as np

from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.device import DeviceArray
from distrun_runtime.arrays.dtypes import Array, DType
from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.ops.reduce import scaled
from distrun_runtime.ops.update import (
    WeightStep,
    can_fuse,
    new_state,
    prepare,
    state_on,
    state_on_host,
    step_all,
    update,
)
from distrun_runtime.store.base import Updater
from distrun_runtime.store.keys import Key, KeyRecord, named
from distrun_runtime.store.reducer import is_gpu_array
from distrun_runtime.store.values import RowSparse, Value

if TYPE_CHECKING:  # Most processes use no GPU.
    from distrun_runtime.arrays.gpu import GpuArray, GpuDevice

Sum = Tuple[KeyRecord, Value]
"""What a push brings of a key."""
COPIED_BYTES = 64 * 1024 * 1024
"""Of sums that are scaled, or copied from another GPU, before their keys are updated."""


class Weights:
    """Values by key, and one way to update them: the sum itself, a rule, or a function of the user's.

    Values are kept in the user's shape. Rules see them flat (of row-sparse keys: as rows), as they do on a server.

    A value, and its state, is on a GPU from the first update by a sum that is on one. It comes back to host memory with
    the first update that a kernel cannot make: by a sum in host memory, by rows, by a function or a rule of the user's,
    or by a rule that needs more than the elements. The results are the same.

    Threads: one at a time, but for `prepare`.
    """

    def __init__(self) -> None:
        self.values: dict[Key, DeviceArray] = {}
        """Each C-contiguous and ours alone; numpy's, or on a GPU."""
        self.states: dict[Key, rules.State] = {}
        """What the rule remembers of a key, in flat arrays where its value is; of keys that it has updated."""
        self.spec: RuleSpec | None = None
        self.rule: rules.Rule | None = None
        self._updater: Updater | None = None
        self._kernels: dict[GpuDevice, set[DType]] = {}
        """GPUs that may update weights, and the dtypes of these: no push waits until a rule is compiled for them."""
        self._preparing = threading.Lock()
        """While kernels are compiled, so that a rule and a GPU that come at the same time find each other."""

    @property
    def has_updater(self) -> bool:
        """Whether a function of the user's updates the values."""
        return self._updater is not None

    def on_host(self, key: Key) -> Array:
        """Return a value in host memory: itself, or a copy if it is on a GPU."""
        return devices.on_host(self.values[key])

    def state_on_host(self, key: Key) -> rules.State | None:
        """Return a value's state in host memory, likewise; None: it has none."""
        state = self.states.get(key)
        return state if state is None or devices.is_on_host(self.values[key]) else state_on_host(state)

    def add(self, key: Key, value: Value) -> None:
        """Keep a copy of a first value."""
        self.values[key] = value.to_dense() if isinstance(value, RowSparse) else np.array(value, order="C", copy=True)

    def assign(self, key: Key, value: Array) -> None:
        """Overwrite a value; the rule's state goes on."""
        if "master" in self.states.get(key, {}):
            self._bring_back(key)
        devices.copy(value, self.values[key])
        if devices.is_on_host(self.values[key]):
            rules.renew_master(self.values[key].reshape(-1), self.states.get(key, {}))

    def update(self, sums: Iterable[Sum], scale: float = 1.0) -> Iterator[Sum]:
        """Take in the sums of a push, times `scale`; they are only read. Yield each when that is done.

        Those that a rule takes in on GPUs are taken in together, if they follow each other.

        Raises:
            KVError: a GPU has failed; names the key. Those that were yielded are taken in.
        """
        for is_on_gpu, some in itertools.groupby(sums, lambda each: self._gpu_for(*each) is not None):
            if is_on_gpu:
                yield from self._update_on_gpus(list(some), scale)
                continue
            for record, value in some:
                try:
                    self._bring_back(record.key)
                    given = devices.on_host(value) if is_gpu_array(value) else value
                except KVError as err:
                    raise KVError(f"key {record.key!r}: {err}") from err
                self._update_on_host(record, given, scale)
                yield record, value

    def _update_on_host(self, record: KeyRecord, value: Value, scale: float) -> None:
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

    def _step(self, rule: rules.Rule, record: KeyRecord, value: Value) -> None:
        assert self.spec is not None
        knobs = self.spec.knobs(record.key)
        flat = self.values[record.key].reshape(-1)
        if record.key not in self.states:
            self.states[record.key] = new_state(rule, flat)
        state = self.states[record.key]
        if isinstance(value, RowSparse):
            table, grad = flat.reshape(record.shape[0], record.row_size), value.values
            update(rule, table, grad.reshape(len(value.rows), record.row_size), state, knobs, rows=value.rows)
        else:
            update(rule, flat, value.reshape(-1), state, knobs)

    # On GPUs

    def _gpu_for(self, record: KeyRecord, value: Value) -> GpuDevice | None:
        """Return the GPU on which a value is to be updated; None: it is updated in host memory."""
        if not is_gpu_array(value) or record.is_sparse or not record.size or self.has_updater:
            return None
        if self.rule is not None and not can_fuse(self.rule):
            return None
        stored = self.values[record.key]
        gpu: GpuDevice = value.device if devices.is_on_host(stored) else stored.device
        return gpu

    def _update_on_gpus(self, sums: Sequence[Sum], scale: float) -> Iterator[Sum]:
        ready: list[Sum] = []
        items: list[WeightStep] = []
        copied = 0
        for record, value in sums:
            gpu, given = self._gpu_for(record, value), cast(Any, value)
            assert gpu is not None
            try:
                self._bring_to(gpu, record.key)
                if given.device is not gpu or scale != 1:
                    given = gpu.put(given)
                    copied += given.nbytes
                if scale != 1:
                    gpu.scale(given, scale)
                if self.rule is None:
                    gpu.write(self.values[record.key], given)
                else:
                    items.append(self._item(self.rule, record, given))
            except KVError as err:
                yield from self._stepped(ready, items)
                raise KVError(f"key {record.key!r}: {err}") from err
            ready.append((record, value))
            if copied >= COPIED_BYTES:
                yield from self._stepped(ready, items)
                ready, items, copied = [], [], 0
        yield from self._stepped(ready, items)

    def _item(self, rule: rules.Rule, record: KeyRecord, value: GpuArray) -> WeightStep:
        """Return the step of a key on a GPU."""
        assert self.spec is not None
        flat = self.values[record.key].reshape(-1)
        if record.key not in self.states:
            self.states[record.key] = new_state(rule, flat)
        return WeightStep(flat, [value.reshape(-1)], self.states[record.key], self.spec.knobs(record.key))

    def _stepped(self, ready: Sequence[Sum], items: Sequence[WeightStep]) -> Sequence[Sum]:
        """Return sums when the steps that they are for are made."""
        if self.rule is not None:
            try:
                step_all(self.rule, items)
            except KVError as err:
                raise KVError(f"{named((record.key for record, _ in ready))}: {err}") from err
        return ready

    def prepare(self, gpu: GpuDevice, dtype: DType) -> None:
        """Have ready what updates of weights of this dtype need on a GPU, now and with later rules.

        Raises:
            KVError: a kernel does not compile, or the GPU has failed.
        """
        with self._preparing:
            self._kernels.setdefault(gpu, set()).add(dtype)
            if self.rule is not None:
                self._compile(self.rule, gpu, {dtype})

    def _compile(self, rule: rules.Rule, gpu: GpuDevice, its: Iterable[DType]) -> None:
        if not can_fuse(rule):
            return
        for dtype in its:
            try:
                rule.check(dtype)
            except KVError:
                continue  # The call that brings such a key refuses it.
            prepare(rule, [dtype], gpu)

    def _bring_to(self, gpu: GpuDevice, key: Key) -> None:
        """Let a value and its state be on a GPU, if they are in host memory."""
        value, state = self.values[key], self.states.get(key)
        if devices.is_on_host(value):
            moved = gpu.put(value), None if state is None else state_on(state, gpu)
            self.values[key] = moved[0]
            if moved[1] is not None:
                self.states[key] = moved[1]

    def _bring_back(self, key: Key) -> None:
        """Let a value and its state be in host memory."""
        if not devices.is_on_host(self.values[key]):
            state, self.values[key] = self.state_on_host(key), self.on_host(key)
            if state is not None:
                self.states[key] = state

    # What updates

    def check(self, items: Iterable[tuple[Key, np.dtype[Any]]], rule: rules.Rule | None = None) -> None:
        """Return if the rule (the present one, if none is given) takes values of these dtypes.

        Raises:
            KVError: it does not; the key is named.
        """
        chosen = rule or self.rule
        if chosen is not None:
            rules.check_keys(chosen, items)

    def set_rule(self, spec: RuleSpec, replace: bool | None) -> None:
        """Install a rule; an equal one changes nothing."""
        if self.spec is not None and rules.same(self.spec, spec):
            return
        if not replace and (self.spec is not None or self.has_updater):
            there = "an updater" if self.spec is None else rules.difference(self.spec, spec)
            raise KVError(f"this store already has {there}; {rules.advice(spec, replace)}")
        self.install(spec, self.made(spec))

    def change_rule(self, change: Mapping[str, Any]) -> None:
        """Change parameters or multipliers of the rule."""
        if self.spec is None:
            raise KVError("this store has no rule to change; call set_optimizer first")
        spec = self.spec.changed(change)
        self.install(spec, self.made(spec))

    def install(self, spec: RuleSpec, rule: rules.Rule) -> None:
        """Put a rule that was `made` in place of what is there; what state both know goes on.

        Raises:
            KVError: a GPU has failed; nothing was changed.
        """
        with self._preparing:
            for gpu, its in self._kernels.items():
                self._compile(rule, gpu, its)
            carried = {key: self._carried(rule, key, state) for key, state in self.states.items()}
            self.values.update((key, value) for key, (value, _) in carried.items())
            self.states.update((key, state) for key, (_, state) in carried.items())
            self.spec, self.rule, self._updater = spec, rule, None

    def _carried(self, rule: rules.Rule, key: Key, state: rules.State) -> tuple[DeviceArray, rules.State]:
        """Return a value, and the state that a rule in place of the present one goes on with; changes nothing."""
        value = self.values[key]
        if not devices.is_on_host(value):
            begun = rule.new_state(np.zeros(1, value.dtype))
            if begun.keys() <= state.keys():  # Nothing starts anew, so it stays where it is.
                return value, {name: state[name] for name in begun}
            value, state = devices.on_host(value), state_on_host(state)
        return value, rules.carry_state(rule, value.reshape(-1), state)

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
        return RowSparse(_scaled(value.values, scale), value.rows, value.shape)
    return dtypes.narrow(scaled(dtypes.widen(value), scale), value.dtype)
