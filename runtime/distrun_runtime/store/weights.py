"""The values of a store in this process, on the server's arithmetic (`ps.values`, `ps.arithmetic`), by device.

Each value is one shard. On every device that has some they lie in arenas, with the rule's states beside them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from distrun_runtime.arrays.device import Device, DeviceArray, copy, on_host
from distrun_runtime.arrays.dtypes import Array, DType, narrow, widen, work_dtype
from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.ops.partition import Shard
from distrun_runtime.ops.reduce import scaled
from distrun_runtime.ops.update import GpuSteps, WeightStep, can_fuse, new_state, prepare, update
from distrun_runtime.protocol.message import DTYPE_CODES
from distrun_runtime.ps import arithmetic, statefile
from distrun_runtime.ps.shards import Store
from distrun_runtime.ps.values import Values
from distrun_runtime.store.base import Selection, Updater
from distrun_runtime.store.keys import Key, KeyRecord, named
from distrun_runtime.store.reducer import end_to_end, is_gpu_array
from distrun_runtime.store.values import RowSparse, Value

if TYPE_CHECKING:  # Most processes use no GPU.
    from distrun_runtime.arrays.gpu import GpuArray, GpuDevice, ListLaunch, TensorColumn

COPIED_BYTES = 64 * 1024 * 1024
"""Of sums that are scaled, or copied from another GPU, before their keys are updated."""
JOINED_ELEMENTS = 1 << 14
"""Sums of fewer elements are copied together, for one step over all of them."""
PLANS = 4096
"""So many calls are kept that were planned."""
CHUNK = 1 << 16
"""So many elements are copied together: they are in the processor's cache when the step comes to them."""


class Place(NamedTuple):
    """Where the value of a key is."""

    record: KeyRecord
    number: int
    """From 0, in the order of `init`."""
    values: Values
    shard: int
    array: DeviceArray
    """The value itself, in the user's shape."""


class _Group(NamedTuple):
    """Keys of a call that are updated together: of one dtype, on one device."""

    values: Values
    code: int
    """Of the dtype, in messages."""
    at: list[int]
    """Their places in the call."""
    shards: Array
    joins: list[tuple[int, int]]
    """First and last of those in the group whose sums are copied together; of keys in the host's memory."""
    sizes: tuple[int, ...]
    """Elements of each of these."""
    updates: dict[tuple[int, int, tuple[int, ...]], arithmetic.FlatUpdate]
    """For the first and last key, and the sizes of arrays that have their sums."""

    def update(self, first: int, last: int, sizes: tuple[int, ...], sums: Iterable[DeviceArray]) -> None:
        """Update some of the keys by their sums, in arrays of these sizes."""
        found = self.updates.get((first, last, sizes))
        if found is None:
            if len(self.updates) >= PLANS:
                self.updates.clear()
            found = arithmetic.FlatUpdate(self.values, self.code, self.shards[first:last], sizes)
            self.updates[first, last, sizes] = found
        found(sums)


class _Plan(NamedTuple):
    """How the keys of a call are updated."""

    keys: Selection
    alone: list[int]
    """Places in the call of keys that go by themselves: rows, and rules that are not flat."""
    groups: list[_Group]


class Weights:
    """Values by key, and one way to update them: the sum itself, a rule, or a function of the user's.

    A value, and its state, is on a GPU from the first update by a sum that is on one. It comes back to host memory with
    the first update that a kernel cannot make: by a sum in host memory, by rows, by a function or a rule of the user's,
    or by a rule that needs more than the elements. The results are the same.

    Arguments:
        host: the device in host memory.

    Threads: one at a time, but for `prepare`.
    """

    def __init__(self, host: Device) -> None:
        self.places: dict[Key, Place] = {}
        self.spec: RuleSpec | None = None
        """What updates the values: of a function of the user's, its name is `rules.UPDATER`."""
        self.rule: rules.Rule | None = None
        self._host = host
        self._values: dict[Device, Values] = {}
        """Of devices that have values."""
        self._plans: dict[int, _Plan] = {}
        """By id of the keys; none when a value has moved, or the rule has changed."""
        self._kernels: dict[tuple[GpuDevice, DType], None] = {}
        """GPUs that may update weights of a dtype: no push waits until a rule is compiled for them."""
        self._preparing = threading.Lock()
        """While kernels are compiled, so that a rule and a GPU that come at the same time find each other."""

    @property
    def has_updater(self) -> bool:
        """Whether a function of the user's updates the values."""
        return self.spec is not None and self.spec.name == rules.UPDATER

    # Values

    def add(self, items: Sequence[tuple[KeyRecord, Value]]) -> None:
        """Keep copies of first values."""
        for place, (_, value) in zip(self._enter(self._host, [record for record, _ in items]), items, strict=True):
            copy(value.to_dense() if isinstance(value, RowSparse) else value, place.array)
            self.places[place.record.key] = place

    def assign(self, key: Key, value: Array) -> None:
        """Overwrite a value; the rule's state goes on."""
        place = self.places[key]
        copy(value, place.array)
        place.values.renew_master(place.shard)

    def _enter(self, device: Device, records: Sequence[KeyRecord]) -> list[Place]:
        """Return places of keys on a device, next to each other and of undefined content if they are new there."""
        values = self._values.get(device)
        if values is None:
            values = self._values[device] = Values(Store(0, 1), device, is_sent=False)
            values.set_rule(self.rule, self.spec)
        table, before = values.store, values.extent()
        known = {record.key: place.number for record in records if (place := self.places.get(record.key))}
        numbers = [known.get(record.key, len(self.places) + at) for at, record in enumerate(records)]
        new = [(number, each) for number, each in zip(numbers, records, strict=True) if number not in table.by_key]
        shards = table.add(
            Shard(0, 0, each.size, number, DTYPE_CODES[each.dtype], each.row_size if each.is_sparse else 0)
            for number, each in new
        )
        try:
            table.names.update((number, each.key) for number, each in new)
            for code, its, _ in values.codes(shards):
                values.place(its, code)
            return [
                Place(record, number, values, shard, values.weight(shard).reshape(record.shape))
                for record, number in zip(records, numbers, strict=True)
                for shard in table.by_key[number]
            ]
        except BaseException:
            values.take_back(before, shards)
            table.take_back(shards)
            raise

    def _move(self, device: Device, records: Sequence[KeyRecord]) -> None:
        """Let values and their states be on a device: all of them, or none if that fails."""
        old = [self.places[record.key] for record in records]
        try:
            new = self._enter(device, records)
            for there, here in zip(old, new, strict=True):
                copy(there.array, here.array)
                here.values.set_state(here.shard, there.values.state_of(there.shard))
        except KVError as err:
            raise KVError(f"{named(record.key for record in records)}: {err}") from err
        self.places.update((place.record.key, place) for place in new)
        for place in old:
            place.values.set_state(place.shard, None)
        used = {place.values.device for place in self.places.values()}
        self._values = {device: values for device, values in self._values.items() if device in used}
        self._plans = {}

    # Updates

    def update(self, keys: Selection, sums: Sequence[Value], scale: float = 1.0) -> None:
        """Take in the sums of a push, times `scale`; they are only read.

        Raises:
            KVError: a GPU has failed; names keys. Of these, none was updated or some were.
        """
        if set(map(type, sums)) != {np.ndarray} or self._values.keys() != {self._host}:
            self._settle(keys, sums)
        plan = self._plan(keys)
        for at in plan.alone:
            self._update_alone(self.places[keys.keys[at]], sums[at], scale)
        for group in plan.groups:
            given: Sequence[Any] = sums if len(group.at) == len(sums) else [sums[at] for at in group.at]
            if not group.values.device.is_gpu:
                if self.rule is not None:
                    group.update(0, len(given), group.sizes, _joined(given, group.joins, scale))
                    continue
                for at, value in zip(group.at, given, strict=True):
                    array = self.places[keys.keys[at]].array
                    np.copyto(array, narrow(value if scale == 1 else scaled(widen(value), scale), array.dtype))
                continue
            try:
                for first, last, some in _on_gpu(cast("GpuDevice", group.values.device), given, scale):
                    found = [whole for _, whole in end_to_end(some)]
                    group.update(first, last, tuple(map(len, found)), found)
            except KVError as err:
                raise KVError(f"{named(keys.keys[at] for at in group.at)}: {err}") from err

    def _update_alone(self, place: Place, value: Value, scale: float) -> None:
        flat, width = place.array.reshape(-1), place.record.row_size
        given = value.values if isinstance(value, RowSparse) else on_host(value)
        given = (given if scale == 1 else scaled(widen(given), scale)).reshape(-1)
        rows = value.rows if isinstance(value, RowSparse) and width else None
        if rows is not None:
            flat, given = flat.reshape(-1, width), given.reshape(-1, width)
        if self.rule is None:
            flat[...] = np.zeros((), flat.dtype)
            flat[slice(None) if rows is None else rows] = narrow(given, flat.dtype)
            return
        state = place.values.state.get(place.shard)
        if state is None:
            state = place.values.state[place.shard] = new_state(self.rule, place.array.reshape(-1))
        update(self.rule, flat, given, state, place.values.knobs_of(place.shard), rows=rows)

    def _plan(self, keys: Selection) -> _Plan:
        plan = self._plans.get(id(keys))
        if plan is not None and plan.keys is keys:
            return plan
        alone: list[int] = []
        groups: dict[tuple[Device, int], list[int]] = {}
        places = [self.places[key] for key in keys.keys]
        for at, place in enumerate(places):
            code = DTYPE_CODES[place.record.dtype]
            if place.record.is_sparse or not (self.rule is None or place.values.is_flat(code)):
                alone.append(at)
            else:
                groups.setdefault((place.values.device, code), []).append(at)
        plan = _Plan(keys, alone, [])
        for (device, code), its in groups.items():
            joins, sizes = _joins([places[at].record.size for at in its])
            shards = np.array([places[at].shard for at in its])
            plan.groups.append(_Group(self._values[device], code, its, shards, joins, sizes, {}))
        if len(self._plans) >= PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[id(keys)] = plan
        return plan

    def _settle(self, keys: Selection, sums: Sequence[Value]) -> None:
        """Let each value be where it can take in its sum."""
        may_fuse = self.rule is None or (any(map(is_gpu_array, sums)) and can_fuse(self.rule))
        moves: dict[Device, list[KeyRecord]] = {}
        for record, value in zip(keys.records, sums, strict=True):
            present = wanted = self.places[record.key].values.device
            if not (may_fuse and is_gpu_array(value) and record.size) or record.is_sparse:
                wanted = self._host
            elif not present.is_gpu:
                wanted = value.device
            if wanted is not present:
                moves.setdefault(wanted, []).append(record)
        for device, records in moves.items():
            self._move(device, records)

    def planned(
        self,
        keys: Selection,
        gpu: GpuDevice,
        parts: Sequence[TensorColumn],
        outs: Sequence[TensorColumn],
        is_apart: bool,
    ) -> PlannedUpdate | None:
        """Return what updates values on a GPU by the sums of `parts` and writes them to `outs`; None: no kernel can.

        Arguments:
            parts, outs: for each key an array in each column; what is not to be done has none.
            is_apart: no out shares memory with a part.
        """
        values = self._values.get(gpu)
        if values is None or any(self.places[key].values is not values for key in keys.keys):
            return None
        if parts and self.rule is not None:
            # The kernels that are compiled take two parts.
            shards = [self.places[key].shard for key in keys.keys]
            if len(parts) > 2 or not can_fuse(self.rule) or (values.steps[shards] < 0).any():
                return None
        return PlannedUpdate(self, keys, gpu, parts, outs, is_apart=is_apart)

    @property
    def layout(self) -> object:
        """Another object whenever a value has moved, or the rule has changed."""
        return self._plans

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

    def check(self, records: Iterable[KeyRecord], rule: rules.Rule | None = None) -> None:
        """Return if the rule (the present one, if none is given) takes values of these keys.

        Raises:
            KVError: it does not; the key is named.
        """
        chosen = rule or self.rule
        if chosen is not None:
            rules.check_keys(chosen, ((record.key, record.dtype) for record in records))

    def set_rule(self, spec: RuleSpec, replace: bool | None) -> None:
        """Install a rule; an equal one changes nothing."""
        if self.spec is not None and rules.same(self.spec, spec):
            return
        if not replace and self.spec is not None:
            there = "an updater" if self.has_updater else rules.difference(self.spec, spec)
            raise KVError(f"this store already has {there}; {rules.advice(spec, replace)}")
        self.install(spec, self.made(spec))

    def change_rule(self, change: Mapping[str, Any]) -> None:
        """Change parameters or multipliers of the rule."""
        if self.spec is None or self.has_updater:
            raise KVError("this store has no rule to change; call set_optimizer first")
        spec = self.spec.changed(change)
        self.install(spec, self.made(spec))

    def set_updater(self, updater: Updater | None) -> None:
        """Put a function, or nothing, in place of what is there."""
        self.install(None, None)
        if updater is None:
            return

        def call(key: Key, received: Array, stored: Array) -> None:
            shape = self.places[key].record.shape
            updater(key, received.reshape(shape), stored.reshape(shape))

        self.install(RuleSpec(rules.UPDATER, {}), rules.UpdaterRule(call, {}))

    def made(self, spec: RuleSpec) -> rules.Rule:
        """Return the rule of a spec, which takes all values that are here, and install nothing.

        Raises:
            KVError: there is no such rule, or it does not take a value.
        """
        # None: any module of the user's may be imported, as this is the user's own process.
        rule = rules.rule_of(spec, None)
        self.check((place.record for place in self.places.values()), rule)
        return rule

    def install(self, spec: RuleSpec | None, rule: rules.Rule | None) -> None:
        """Put a rule that was `made`, or nothing, in place of what is there; what state both rules know goes on.

        Raises:
            KVError: a GPU has failed; nothing was changed, but some values and states may be in host memory now.
        """
        with self._preparing:
            self._compile(rule, self._kernels)
            for values in list(self._values.values()):
                if values.device.is_gpu and rule is not None:
                    stays = can_fuse(rule) and (values.rule is None or values.keeps_state(rule))
                    if not stays:
                        its = [place.record for place in self.places.values() if place.values is values]
                        self._move(self._host, its)
            # Where states begin anew a user's rule may raise: that is in host memory.
            for values in sorted(self._values.values(), key=lambda values: values.device.is_gpu):
                values.set_rule(rule, spec)
            self.spec, self.rule, self._plans = spec, rule, {}

    # Saved states

    def saved(self) -> list[statefile.Saved]:
        """Return each value as the one shard that a server would have of it: views of weights and states."""
        return [
            statefile.Saved(
                place.number,
                0,
                place.values.weight(place.shard),
                None if self.has_updater else place.values.state_of(place.shard),
            )
            for place in self.places.values()
        ]

    def restore(self, staged: Sequence[statefile.Staged | None]) -> None:
        """Put what was read for the `saved` shards in its place."""
        for values in self._values.values():
            values.staged = [None] * values.store.count
        for place, read in zip(self.places.values(), staged, strict=True):
            place.values.staged[place.shard] = read
        for values in self._values.values():
            values.restore()

    def clear(self) -> None:
        """Forget everything."""
        self.places, self._values, self._plans, self.spec, self.rule = {}, {}, {}, None, None


class PlannedUpdate:
    """An update of values on a GPU, and what is written of them: the same again and again (`arrays.plans.PlannedWork`).

    A result without a rule is written by the sum's own kernel, to the store and to the outs.
    """

    def __init__(
        self,
        weights: Weights,
        keys: Selection,
        gpu: GpuDevice,
        parts: Sequence[TensorColumn],
        outs: Sequence[TensorColumn],
        *,
        is_apart: bool,
    ) -> None:
        from distrun_runtime.arrays.cuda import Read, Write
        from distrun_runtime.arrays.gpu import TensorColumn, counts_of

        self._weights, self._layout = weights, weights.layout
        places = [weights.places[key] for key in keys.keys]
        self._values, self._shards = places[0].values, np.array([place.shard for place in places])
        self._states: list[Any] = []
        """Of each value, if a rule makes a step."""
        self._updates = self._values.steps[self._shards]
        """Of each value, before the next step."""
        self._sums: list[tuple[ListLaunch, list[np.generic]]] = []
        self._steps: GpuSteps | None = None
        self._copies: list[tuple[ListLaunch, list[np.generic]]] = []
        if parts and weights.rule is not None:
            self._states = [self._values.state_of(place.shard) for place in places]
            knobs = map(self._values.knobs_of, self._shards.tolist())
            items = [WeightStep(p.array, [], *its) for p, *its in zip(places, self._states, knobs, strict=True)]
            self._steps = GpuSteps(weights.rule, items, parts)
        for dtype in dict.fromkeys(keys.dtypes):
            numbers = [number for number, each in enumerate(keys.dtypes) if each == dtype]
            sizes = [keys.records[number].size for number in numbers]
            stored = [places[number].array for number in numbers]
            given, taken = ([each.some(numbers) for each in columns] for columns in (parts, outs))
            if given and self._steps is None:
                written = [TensorColumn.of(Write, stored), *(taken if is_apart else [])]
                self._sums.append((gpu.sum_lists(given, written, sizes, dtype), counts_of(len(given), len(written))))
            if taken and not (given and self._steps is None and is_apart):
                launch = gpu.sum_lists([TensorColumn.of(Read, stored)], taken, sizes, dtype)
                self._copies.append((launch, counts_of(1, len(taken))))

    def is_valid(self) -> bool:
        """Tell whether values and states are those of the plan, and what updates them is."""
        if self._weights.layout is not self._layout:
            return False
        return self._steps is None or bool((self._values.steps[self._shards] == self._updates).all())

    def run(self) -> None:
        """Launch all of it."""
        for launch, counts in self._sums:
            launch.run(counts)
        if self._steps is not None:
            try:
                self._steps.make()
                self._updates += 1
            except BaseException:  # some may have been made
                self._steps.count()
                self._updates[:] = [state["updates"] for state in self._states]
                raise
            finally:
                self._values.steps[self._shards] = self._updates
        for launch, counts in self._copies:
            launch.run(counts)


def _joins(lengths: Sequence[int]) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    """Return which of some sums are copied together, first and last of each such run, and the runs' elements."""
    sizes = np.array(lengths)
    ends = np.cumsum(sizes)
    is_long, chunk = sizes >= JOINED_ELEMENTS, (ends - sizes) // CHUNK
    first = [0, *(np.flatnonzero(is_long[1:] | is_long[:-1] | (chunk[1:] != chunk[:-1])) + 1).tolist()]
    joins = list(zip(first, [*first[1:], len(lengths)], strict=True))
    return joins, tuple(np.add.reduceat(sizes, first).tolist())


def _joined(sums: Sequence[Array], joins: Sequence[tuple[int, int]], scale: float) -> Iterator[Array]:
    """Yield sums in host memory, flat, those of each run end to end; times a number, in their work dtype then."""
    for first, last in joins:
        flat = sums[first].reshape(-1)
        if last > first + 1:
            some = sums[first:last]
            flat = np.concatenate(some if len({each.dtype for each in some}) == 1 else [*map(widen, some)], axis=None)
        yield flat if scale == 1 else scaled(widen(flat), scale)


def _on_gpu(gpu: GpuDevice, sums: Sequence[GpuArray], scale: float) -> Iterator[tuple[int, int, Sequence[GpuArray]]]:
    """Yield runs of sums that are on GPUs, the first and last of each among all: on this one, and times a number."""
    if scale == 1 and all(each.device is gpu for each in sums):
        yield 0, len(sums), sums
        return
    copied = [total // COPIED_BYTES for total in itertools.accumulate(each.nbytes for each in sums)]
    for (_, dtype), its in itertools.groupby(range(len(sums)), lambda at: (copied[at], sums[at].dtype)):
        numbers = list(its)
        some = sums[numbers[0] : numbers[-1] + 1]
        bucket = gpu.empty((sum(each.size for each in some),), work_dtype(dtype))
        gpu.gather([[each] for each in some], bucket)
        if scale != 1:
            gpu.scale(bucket, scale)
        yield numbers[0], numbers[-1] + 1, [bucket]
