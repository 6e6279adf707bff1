"""The values of a store in this process, on the server's arithmetic (`ps.values`, `ps.arithmetic`), by device.

Each value is one shard. On every device that has some they lie in arenas, with the rule's states beside them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from distrun_runtime.arrays.device import Device, DeviceArray, copy, gpus, on_host
from distrun_runtime.arrays.dtypes import Array, DType, is_float, narrow, widen, work_dtype
from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.ops.reduce import Contribution, Dense, Rows, scaled
from distrun_runtime.ops.update import GpuSteps, WeightStep, can_fuse, prepare
from distrun_runtime.protocol.message import DTYPE_CODES
from distrun_runtime.ps import arithmetic, statefile
from distrun_runtime.ps.shards import Store
from distrun_runtime.ps.values import Values
from distrun_runtime.store.base import Selection, Updater
from distrun_runtime.store.keys import Key, KeyRecord, named
from distrun_runtime.store.reducer import is_gpu_array
from distrun_runtime.store.values import RowSparse, Value

if TYPE_CHECKING:  # Most processes use no GPU.
    from distrun_runtime.arrays.gpu import GpuArray, GpuDevice, TensorColumn
    from distrun_runtime.arrays.plans import CallArrays, PlacedColumn, Plans

COPIED_BYTES = 64 * 1024 * 1024
"""Of sums that are scaled, or copied to a GPU, before their keys are updated."""
JOINED_ELEMENTS = 1 << 15
"""Sums of fewer elements are copied together, for one step over all of them."""
CHUNK = 1 << 16
"""So many elements are copied together: they are in the processor's cache when the step comes to them."""
UPDATER = RuleSpec(rules.UPDATER, {})
"""Stands for a function of the user's."""


class Stored(NamedTuple):
    """A value, where it is."""

    record: KeyRecord
    values: Values
    shard: int
    array: DeviceArray
    """Its elements, in the user's shape."""


class _Together:
    """Keys of a call that are updated together: dense, of one dtype, on one device, by a flat rule or by none.

    Arguments:
        at: their places in the call.
        stored: the values of all keys of the call.
    """

    def __init__(self, at: list[int], stored: Sequence[Stored]) -> None:
        self.at, self.values, self.dtype = at, stored[at[0]].values, stored[at[0]].record.dtype
        self._code = DTYPE_CODES[self.dtype]
        self.arrays = [stored[each].array for each in at]
        self.sizes = [each.size for each in self.arrays]
        # The same objects again with each call: what is known of shards is found by that.
        self.shards = np.array([stored[each].shard for each in at])
        self.most = COPIED_BYTES // work_dtype(self.dtype).itemsize
        """Elements of sums that are copied on a GPU at once."""
        limits = (self.most,) if self.values.device.is_gpu else (CHUNK, JOINED_ELEMENTS)
        self.groups = _groups(self.sizes, *limits)
        """Of sums that are copied together."""
        self._pieces = [self.shards[each] for each in self.groups]
        self._totals = tuple(sum(self.sizes[each]) for each in self.groups)

    def update(self, sums: Sequence[Any], scale: float) -> None:
        """Update the keys by their sums, times `scale`."""
        values, code = self.values, self._code
        if values.device.is_gpu:
            self._update_on_gpu(cast("GpuDevice", values.device), sums, scale)
        elif values.rule is None:
            for array, total in zip(self.arrays, sums, strict=True):
                np.copyto(array, narrow(total if scale == 1 else scaled(widen(total), scale), array.dtype))
        else:
            joined = (_joined(sums[each], scale) for each in self.groups)
            arithmetic.update_by(values, code, self.shards, self._totals, joined)

    def _update_on_gpu(self, gpu: GpuDevice, sums: Sequence[Any], scale: float) -> None:
        if scale == 1 and all(getattr(each, "device", None) is gpu for each in sums):
            flat = [each.reshape(-1) for each in sums]
            arithmetic.update_by(self.values, self._code, self.shards, tuple(self.sizes), flat)
            return
        for its, shards, total in zip(self.groups, self._pieces, self._totals, strict=True):
            bucket = _bucket_of(gpu, sums[its], self.dtype, scale)
            arithmetic.update_by(self.values, self._code, shards, (total,), [bucket])


class Weights:
    """Values by key, and one way to update them: the sum itself, a rule, or a function of the user's.

    A value, and its state, is on a GPU from the first update by a sum that is on one. All come back to host memory when
    they get a rule that no kernel can make: a function or a rule of the user's, or a rule that needs more than the
    elements. The results are the same.

    Arguments:
        host: the device in host memory.

    Threads: one at a time, but for `prepare`.
    """

    def __init__(self, host: Device) -> None:
        self.kept: dict[Key, Stored] = {}
        """In the order of `init`."""
        self.spec: RuleSpec | None = None
        """Of the rule; None: a function of the user's, or nothing."""
        self.rule: rules.Rule | None = None
        self._host = host
        self._values: dict[Device, Values] = {}
        """Of devices that have values."""
        self.calls: WeakKeyDictionary[Selection, tuple[list[int], list[_Together]]] = WeakKeyDictionary()
        """Which keys of a call go by themselves, rows and those whose rule is not flat, and which go together."""
        self.plans: Plans | None = None
        """Of calls with arrays on a GPU, once there was one."""
        self.buckets: WeakValueDictionary[tuple[Any, ...], GpuArray] = WeakValueDictionary()
        """What the plans of calls share."""
        self._kernels: dict[tuple[GpuDevice, DType], None] = {}
        """GPUs that may update weights of a dtype: no push waits until a rule is compiled for them."""
        self._preparing = threading.Lock()
        """While kernels are compiled, so that a rule and a GPU that come at the same time find each other."""

    # Values

    def add(self, items: Sequence[tuple[KeyRecord, Value]]) -> None:
        """Keep copies of first values.

        Raises:
            KVError: the rule does not take one; the key is named.
        """
        if self.rule is not None:
            rules.check_keys(self.rule, ((record.key, record.dtype) for record, _ in items))
        with self._entering(self._on(self._host), [record for record, _ in items]) as new:
            for each, (_, value) in zip(new, items, strict=True):
                copy(value.to_dense() if isinstance(value, RowSparse) else value, each.array)
        self.kept.update((each.record.key, each) for each in new)

    def assign(self, key: Key, value: Array) -> None:
        """Overwrite a value; the rule's state goes on."""
        kept = self.kept[key]
        copy(value, kept.array)
        kept.values.renew_master(kept.shard)

    def delete(self, key: Key) -> None:
        """Forget a value and its state."""
        self._forget_calls()
        _drop(self.kept.pop(key))

    def _on(self, device: Device) -> Values:
        """Return the arrays of a device."""
        if device not in self._values:
            self._values[device] = Values(Store(0, 1), device, is_sent=False)
            self._values[device].set_rule(self.rule, self.spec or UPDATER)
        return self._values[device]

    @contextmanager
    def _entering(self, values: Values, records: Sequence[KeyRecord]) -> Iterator[list[Stored]]:
        """Give new values of undefined content, next to each other; they go if they cannot be filled."""
        table, before = values.store, values.extent()
        table.names.update((number, record.key) for number, record in enumerate(records, table.count))
        shards = table.add(record.whole(number) for number, record in enumerate(records, table.count))
        try:
            for code, its, _ in values.codes(shards):
                values.place(its, code)
            yield [
                Stored(record, values, shard, values.weight(shard).reshape(record.shape))
                for record, shard in zip(records, shards.tolist(), strict=True)
            ]
        except BaseException:
            values.take_back(before, shards)
            table.take_back(shards)
            raise

    def _move(self, values: Values, records: Sequence[KeyRecord]) -> None:
        """Let values and their states be among others: all of them, or none if that fails."""
        old = [self.kept[record.key] for record in records]
        try:
            with self._entering(values, records) as new:
                for there, here in zip(old, new, strict=True):
                    copy(there.array, here.array)
                    values.set_state(here.shard, there.values.state_of(there.shard))
        except KVError as err:
            raise KVError(f"{named(record.key for record in records)}: {err}") from err
        self._forget_calls()
        for there, here in zip(old, new, strict=True):
            self.kept[here.record.key] = here
            _drop(there)
        self._values = {each.values.device: each.values for each in self.kept.values()}

    def _forget_calls(self) -> None:
        """Keep nothing of calls: arrays have moved, or have other states."""
        self.calls, self.plans = WeakKeyDictionary(), None

    def _to_host(self) -> None:
        records = [each.record for each in self.kept.values() if each.values.device.is_gpu]
        self._move(self._on(self._host), records)

    # Updates

    def update(self, keys: Selection, sums: Sequence[Value], scale: float = 1.0) -> None:
        """Take in the sums of a push, times `scale`; they are only read.

        Raises:
            KVError: a GPU has failed; names keys. Of these, none was updated or some were.
        """
        if set(map(type, sums)) != {np.ndarray}:
            self._follow(keys, sums)
        alone, together = self._grouped(keys)
        for at in alone:
            kept = self.kept[keys.keys[at]]
            given = _contribution(kept.record, sums[at], scale)
            arithmetic.update_whole(kept.values, kept.shard, kept.array.reshape(-1), given)
        for each in together:
            try:
                each.update(sums if len(each.at) == len(sums) else [sums[at] for at in each.at], scale)
            except KVError as err:
                raise KVError(f"{named(keys.keys[at] for at in each.at)}: {err}") from err

    def _grouped(self, keys: Selection) -> tuple[list[int], list[_Together]]:
        """Return what `calls` keeps of a call."""
        found = self.calls.get(keys)
        if found is not None:
            return found
        alone: list[int] = []
        groups: dict[tuple[Device, int], list[int]] = {}
        every = [self.kept[key] for key in keys.keys]
        for at, (record, values, _, _) in enumerate(every):
            code = DTYPE_CODES[record.dtype]
            if record.is_sparse or not (self.rule is None or values.is_flat(code)):
                alone.append(at)
            else:
                groups.setdefault((values.device, code), []).append(at)
        found = self.calls[keys] = alone, [_Together(its, every) for its in groups.values()]
        return found

    def _follow(self, keys: Selection, sums: Sequence[Value]) -> None:
        """Let values be on the GPUs that have their sums, if kernels can update them there."""
        moves: dict[Device, list[KeyRecord]] = {}
        for record, value in zip(keys.records, sums, strict=True):
            if not is_gpu_array(value) or record.is_sparse or self.kept[record.key].values.device.is_gpu:
                continue
            if self.rule is None or can_fuse(self.rule):
                moves.setdefault(value.device, []).append(record)
        for gpu, records in moves.items():
            self._move(self._on(gpu), records)

    def planned(
        self, keys: Selection, given: Sequence[Any] | None, outs: Sequence[Any] | None, scale: float
    ) -> Callable[[], object] | None:
        """Make a call with arrays on GPUs by its plan (`Plans.call`); None: it has none."""
        if self.plans is None:
            from distrun_runtime.arrays.plans import Plans

            self.plans = Plans(gpus())
        return self.plans.call(keys, given, outs, self._plan, scale)

    def _plan(self, keys: Selection, call: CallArrays) -> PlannedUpdate | None:
        alone, together = self._grouped(keys)
        are_fit = (each.values.device.is_gpu and (is_float(each.dtype) or not call.is_scaled) for each in together)
        if alone or not all(are_fit):
            return None
        if call.parts and self.rule and any((each.values.steps[each.shards] < 0).any() for each in together):
            return None  # States begin with the first step.
        try:
            return PlannedUpdate(self, together, call)
        except _NoPlan:
            return None

    # What updates

    def prepare(self, gpu: GpuDevice, dtype: DType) -> None:
        """Have ready what updates of weights of this dtype need on a GPU, now and with later rules.

        Raises:
            KVError: a kernel does not compile, or the GPU has failed.
        """
        with self._preparing:
            self._kernels[gpu, dtype] = None
            self._compile(self.rule, [(gpu, dtype)])

    def _compile(self, rule: rules.Rule | None, wanted: Iterable[tuple[GpuDevice, DType]]) -> None:
        for gpu, dtype in wanted:
            if rule is None or not can_fuse(rule):
                return
            try:
                rule.check(dtype)
            except KVError:
                continue  # The call that brings such a key refuses it.
            prepare(rule, [dtype], gpu)

    def set_rule(self, spec: RuleSpec, replace: bool | None) -> None:
        """Install a rule; an equal one changes nothing."""
        present = UPDATER if self.spec is None and self.rule is not None else self.spec
        agreed = rules.agreed(present, spec, replace)
        if agreed is not self.spec:
            self.install(agreed, self.made(agreed))

    def change_rule(self, change: Mapping[str, Any]) -> None:
        """Change parameters or multipliers of the rule."""
        if self.spec is None:
            raise KVError("this store has no rule to change; call set_optimizer first")
        spec = self.spec.changed(change)
        self.install(spec, self.made(spec))

    def set_updater(self, updater: Updater | None) -> None:
        """Put a function, or nothing, in place of what is there."""
        if updater is not None and any(device.is_gpu for device in self._values):
            self._to_host()  # first, as nothing but this may fail
        self.install(None, None)
        if updater is not None:
            self.install(None, rules.UpdaterRule(self._shaped(updater), {}))

    def _shaped(self, updater: Updater) -> Updater:
        """Return a function that takes flat arrays, as rules do."""

        def call(key: Key, received: Array, stored: Array) -> None:
            shape = self.kept[key].record.shape
            updater(key, received.reshape(shape), stored.reshape(shape))

        return call

    def made(self, spec: RuleSpec) -> rules.Rule:
        """Return the rule of a spec, which takes all values that are here, and install nothing.

        Raises:
            KVError: there is no such rule, or it does not take a value.
        """
        # None: any module of the user's may be imported, as this is the user's own process.
        rule = rules.rule_of(spec, None)
        rules.check_keys(rule, ((key, each.record.dtype) for key, each in self.kept.items()))
        return rule

    def install(self, spec: RuleSpec | None, rule: rules.Rule | None) -> None:
        """Put a rule that was `made`, or nothing, in place of what is there; what state both rules know goes on.

        Raises:
            KVError: a GPU has failed; nothing was changed, but some values and states may be in host memory now.
        """
        with self._preparing:
            self._compile(rule, self._kernels)
            every = list(self._values.values())
            anew = [each for each in every if rule and each.rule is not None and not each.keeps_state(rule)]
            if rule and any(each.device.is_gpu and (each in anew or not can_fuse(rule)) for each in every):
                self._to_host()
            if anew or not (spec and self.spec and replace(spec, params=self.spec.params) == self.spec):
                self._forget_calls()
            # Where states begin anew a user's rule may raise: that is in host memory.
            for values in sorted(self._values.values(), key=lambda values: values.device.is_gpu):
                values.set_rule(rule, spec or UPDATER)
            self.spec, self.rule = spec, rule

    # Saved states

    def saved(self) -> list[statefile.Saved]:
        """Return each value as the one shard that a server would have of it: views of weights and states."""
        return [
            statefile.Saved(number, 0, each.values.weight(each.shard), each.values.state_of(each.shard))
            for number, each in enumerate(self.kept.values())
        ]

    def restore(self, staged: Sequence[statefile.Staged | None]) -> None:
        """Put what was read for the `saved` shards in its place."""
        self._forget_calls()
        for each, read in zip(self.kept.values(), staged, strict=True):
            each.values.restore([(each.shard, read)])


class _NoPlan(Exception):
    """A call is made as if it came only once."""


class PlannedUpdate:
    """An update of values on GPUs, and what is written of them: the same again and again (`arrays.plans.PlannedWork`).

    Each value is summed and updated where it is. What the call has on another GPU goes there and back by buckets: one
    kernel and one copy for all keys. A result without a rule is written by the sum's own kernel, to the store and to
    the outs.
    """

    def __init__(self, weights: Weights, together: Sequence[_Together], call: CallArrays) -> None:
        self._weights, self._rule, self._call = weights, weights.rule, call
        # Kernels that are compiled take two parts.
        self._sums_first = call.is_scaled or (weights.rule is not None and len(call.parts) > 2)
        self._scale = 1.0
        self._buckets: dict[tuple[Any, ...], GpuArray] = {}
        self._before: list[Callable[[], object]] = []
        """What brings the parts to the values' GPUs."""
        self._updates: list[Callable[[], object]] = []
        self._steps: list[tuple[Values, GpuSteps]] = []
        """Of the updates."""
        self._after: list[Callable[[], object]] = []
        """What brings the values to the outs."""
        for each in together:
            self._plan(each, cast("GpuDevice", each.values.device))
        self._work = [*self._before, *self._updates, *self._after]

    def _plan(self, of: _Together, home: GpuDevice) -> None:
        """Plan what is done with keys that are updated together."""
        from distrun_runtime.arrays.cuda import Read, Write
        from distrun_runtime.arrays.gpu import TensorColumn

        numbers, sizes, dtype, parts = of.at, of.sizes, of.dtype, list[TensorColumn]()

        def carried(work: list[Callable[[], Any]], column: TensorColumn, *way: GpuDevice) -> TensorColumn:
            """Return a column of one GPU on another, to which work brings it by one copy."""
            if sum(sizes) * dtype.itemsize > COPIED_BYTES:
                raise _NoPlan
            there, here = (self._bucket(each, sum(sizes), dtype) for each in way)
            work.append(way[0].sum_lists([column], [TensorColumn.within(Write, there, sizes)], sizes, dtype))
            work.append(partial(way[1].write, here, there))
            return TensorColumn.within(Read, here, sizes)

        for column in self._call.parts:
            there, part = _device_of(column, numbers), column.arrays.some(numbers)
            parts.append(part if there is home else carried(self._before, part, there, home))
        outs: dict[GpuDevice, list[TensorColumn]] = {}
        for column in self._call.outs:
            outs.setdefault(_device_of(column, numbers), []).append(column.arrays.some(numbers))
        if parts:
            at_once = outs.pop(home, []) if self._rule is None and self._call.are_apart else []
            self._update(of, home, parts, [TensorColumn.of(Write, of.arrays), *at_once])
        for there, columns in outs.items():
            value = TensorColumn.of(Read, of.arrays)
            value = value if there is home else carried(self._after, value, home, there)
            self._after.append(there.sum_lists([value], columns, sizes, dtype))

    def _update(self, of: _Together, home: GpuDevice, parts: list[TensorColumn], outs: list[TensorColumn]) -> None:
        """Plan the update of keys by parts that are with them; outs: what is written without a rule."""
        from distrun_runtime.arrays.cuda import Read, Write
        from distrun_runtime.arrays.gpu import TensorColumn

        sizes, dtype = of.sizes, of.dtype
        kind = work_dtype(dtype) if self._sums_first else dtype
        groups = [slice(0, len(sizes))]
        if self._sums_first:  # So many at a time that their sums fit into one bucket.
            if max(sizes) > of.most:
                raise _NoPlan
            groups, bucket = of.groups, self._bucket(home, min(sum(sizes), of.most), kind)
        for its in groups:
            numbers, some = range(its.start, its.stop), sizes[its]
            given = [each.some(numbers) for each in parts]
            if self._sums_first:
                sums = bucket[: sum(some)]
                self._updates.append(home.sum_lists(given, [TensorColumn.within(Write, sums, some)], some, dtype, kind))
                if self._call.is_scaled:
                    self._updates.append(partial(self._multiply, home, sums))
                given = [TensorColumn.within(Read, sums, some)]
            if self._rule is None:
                self._updates.append(home.sum_lists(given, [each.some(numbers) for each in outs], some, kind, dtype))
            else:
                items = self._rule_steps(of, its)
                counters = [(shard,) for shard in of.shards[its].tolist()]
                steps = GpuSteps(self._rule, items, counters, given, is_work=self._sums_first)
                self._steps.append((of.values, steps))
                self._updates.append(partial(_make, of.values, steps))

    def _rule_steps(self, of: _Together, its: slice) -> list[WeightStep]:
        """Return the rule's steps of some of the keys, without parts."""
        values = of.values
        return [
            WeightStep(array, [], cast("dict[str, Any]", values.state_of(shard)), values.knobs_of(shard))
            for array, shard in zip(of.arrays[its], of.shards[its].tolist(), strict=True)
        ]

    def _multiply(self, home: GpuDevice, sums: GpuArray) -> None:
        home.scale(sums, self._scale)

    def _bucket(self, device: GpuDevice, size: int, dtype: DType) -> GpuArray:
        """Return another flat array with each call. The plans of a store share them: one uses them at a time."""
        kind = (device, size, dtype)
        name = (*kind, [each[:-1] for each in self._buckets].count(kind))
        made = self._buckets[name] = self._weights.buckets.get(name) or device.empty((size,), dtype)
        self._weights.buckets[name] = made
        return made

    def is_valid(self) -> bool:
        """Tell whether what updates the values is that of the plan. There is none once they have moved."""
        are_in_step = (steps.are_in_step(values.steps) for values, steps in self._steps)
        return self._weights.rule is self._rule and all(are_in_step)

    def run(self, scale: float) -> None:
        """Launch all of it."""
        self._scale = scale
        for work in self._work:
            work()


def _make(values: Values, steps: GpuSteps) -> None:
    steps.make(values.steps)


def _device_of(column: PlacedColumn, numbers: list[int]) -> GpuDevice:
    if len(devices := {column.devices[number] for number in numbers}) > 1:
        raise _NoPlan
    return devices.pop()


def _drop(old: Stored) -> None:
    """Forget a value and its state; others may have its place."""
    shards = np.array([old.shard])
    old.values.forget(shards)
    old.values.store.forget(shards)


def _contribution(record: KeyRecord, value: Value, scale: float) -> Contribution:
    """Return the sum of a key that goes by itself, times a number, as a server has it."""
    given = scaled(widen(value.values if isinstance(value, RowSparse) else on_host(value)), scale)
    if isinstance(value, RowSparse) and record.row_size:
        return Rows(value.rows, given.reshape(len(given), record.row_size))
    return Dense(given.reshape(-1), False)


def _groups(sizes: Sequence[int], most: int, alone: int | None = None) -> list[slice]:
    """Return groups of neighbours of at most so many elements together; a larger one is alone, or one of `alone`."""
    first, total = [0], 0
    for at, size in enumerate(sizes):
        if at and total + size > most:
            first.append(at)
            total = 0
        total += most if alone is not None and size >= alone else size
    return list(map(slice, first, [*first[1:], len(sizes)]))


def _joined(sums: Sequence[Array], scale: float) -> Array:
    """Return sums in host memory, flat and end to end; times a number, in their work dtype then."""
    flat = sums[0].reshape(-1)
    if len(sums) > 1:
        alike = len({each.dtype for each in sums}) == 1
        flat = np.concatenate(sums if alike else [*map(widen, sums)], axis=None)
    return flat if scale == 1 else scaled(widen(flat), scale)


def _bucket_of(gpu: GpuDevice, sums: Sequence[DeviceArray], dtype: DType, scale: float) -> GpuArray:
    """Return a flat copy of sums on a GPU, end to end and in the work dtype; times a number."""
    ends = list(itertools.accumulate((each.size for each in sums), initial=0))
    bucket = gpu.empty((ends[-1],), work_dtype(dtype))
    places = itertools.starmap(slice, itertools.pairwise(ends))
    gpu.sums([([each.reshape(-1)], bucket[place]) for each, place in zip(sums, places, strict=True)])
    if scale != 1:
        gpu.scale(bucket, scale)
    return bucket
