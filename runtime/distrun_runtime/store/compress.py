"""Compression of what workers push: which keys, how, and what was left out so far.

A `Compression` is what `set_gradient_compression` was given, checked. A `Compressor` has the settings of a store's keys
and the residuals of this process: one float32 value of the key's size for each key and device. Values are in the host's
memory or on GPUs; a residual is where the value is that it was last used with, and moves along with the next one.

The payloads of a message are written into one buffer, which its next push reuses. Small values of a message are encoded
by one call where the codec allows it: they are gathered, and their residuals lie end to end. Of values on a GPU, the
payloads are brought to that buffer together.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.device import Device, DeviceArray, copy, is_on_host, on_host
from distrun_runtime.arrays.dtypes import Array, Buffer, DType
from distrun_runtime.arrays.shared_memory import Pool, address_of
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import KVError
from distrun_runtime.ops import compression as codec
from distrun_runtime.ops.compression import Codec
from distrun_runtime.ops.params import did_you_mean
from distrun_runtime.ops.partition import Shard
from distrun_runtime.store.keys import Key, KeyRecord
from distrun_runtime.store.values import RowSparse

if TYPE_CHECKING:  # Most processes use no GPU, and not every store has servers.
    from distrun_runtime.arrays.gpu import GpuDevice
    from distrun_runtime.ps.routing import Portion


MIN_SIZE = 1024
"""Bytes below which a value travels as it is, unless told otherwise."""


@dataclass(frozen=True)
class Compression:
    """How values are compressed. `type` is a codec's name, or "none"."""

    type: str = "none"
    params: Mapping[str, float] = field(default_factory=dict)
    """The codec's parameters, complete."""
    min_size: int = MIN_SIZE
    """Values of fewer bytes travel as they are."""
    two_way: bool = False
    """Whether what is pulled is compressed too, where the store allows it."""

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Compression:
        """Return the setting that a dictionary describes.

        Arguments:
            given: `type` (required): "none", "2bit", "1bit", "fp16", "topk" or "1bit_scaled"; the type's parameters
                (`threshold`, `ratio`); `min_size` in bytes; `two_way`.

        Raises:
            KVError: no type, an unknown one, an unknown member, or a value that is not right; says what is.
        """
        if not isinstance(given, Mapping):
            raise KVError(
                f"compression is given as a dictionary such as {{'type': '2bit'}}, not {type(given).__name__}"
            )
        if "type" not in given:
            raise KVError(f"compression needs a 'type': one of none, {', '.join(sorted(codec.CODECS))}")
        name = given["type"]
        found = None if name == "none" else codec.named(name)
        own = [knob.name for knob in found.knobs] if found else []
        known = {"type", "min_size", "two_way", *own}
        for member in given:
            if member not in known:
                hint = did_you_mean(str(member), known)
                raise KVError(f"compression {name!r} has no member {member!r}{hint}; it has {', '.join(sorted(known))}")
        params = found.check({name: given[name] for name in own if name in given}) if found else {}
        return cls(str(name), params, _bytes(given.get("min_size", MIN_SIZE)), _switch(given.get("two_way", False)))

    def to_json(self) -> dict[str, Any]:
        """Return what `of` reads as the same setting."""
        return {"type": self.type, **self.params, "min_size": self.min_size, "two_way": self.two_way}

    @property
    def codec(self) -> Codec | None:
        """The codec; None for "none"."""
        return codec.CODECS.get(self.type)

    @property
    def number(self) -> int:
        """The codec's number on the wire; 0 for "none"."""
        return self.codec.number if self.codec else codec.NONE

    def applies(self, record: KeyRecord) -> bool:
        """Tell whether values of this key are compressed: float ones, dense, and large enough."""
        return (
            self.type != "none"
            and dtypes.is_float(record.dtype)
            and not record.is_sparse
            and record.size > 0
            and record.size * record.dtype.itemsize >= self.min_size
        )


@dataclass(frozen=True)
class _EncodedRun:
    """What one call encodes: a run of elements of one value, or several whole values."""

    items: list[int]
    """Places of the values in the call."""
    elements: slice
    """Of the values, end to end."""
    residual: DeviceArray | None
    payload: slice
    """Bytes in the message's buffer."""


@dataclass
class _EncodingPlan:
    """How the values of a message are encoded."""

    setting: Compression
    version: int
    """Of the residuals."""
    gpus: list[Device | None]
    """The GPU of each value of the call, None for those in the host's memory; empty: all are there."""
    runs: list[_EncodedRun]
    cuts: list[tuple[int, int]]
    """Where each shard's payload is in the buffer."""
    room: Array
    """The buffer."""
    gathered: Array
    """Holds small values, end to end."""


class Compressor:
    """The settings and residuals of one store in this process.

    A key's residual is made of zeros when it is first used. It stays when the setting changes, and is dropped when
    compression of the key is turned off.

    Threads: any, but one at a time for a key.
    """

    def __init__(self) -> None:
        self.is_on = False
        """Whether any key's values may be compressed."""
        self._default = Compression()
        self._settings: dict[Key, Compression] = {}
        self._residuals: dict[tuple[Key, int], DeviceArray] = {}
        self._of: dict[Key, tuple[KeyRecord, Compression | None]] = {}
        """What `of` has found with the present settings."""
        self._plans: WeakKeyDictionary[Portion, _EncodingPlan] = WeakKeyDictionary()
        self.version = 0
        """Changes with the settings."""
        self._residuals_version = 0
        """Changes when a residual is put in place of another."""
        self._gpus: list[GpuDevice] = []
        """Those that `prepare` was called for."""
        self._preparing = threading.Lock()
        """While kernels are compiled, so that a setting and a GPU that come at the same time find each other."""

    def prepare(self, gpu: GpuDevice, dtype: DType) -> None:
        """Have ready what compressed values of this dtype need on a GPU, now and with later settings.

        Raises:
            KVError: a kernel does not compile, or the GPU has failed.
        """
        if not dtypes.is_float(dtype):
            return
        with self._preparing:
            self._gpus = list(dict.fromkeys([*self._gpus, gpu]))
            for found in {setting.codec for setting in (self._default, *self._settings.values())}:
                if found is not None:
                    found.prepare(gpu)

    def set(self, setting: Compression, keys: Iterable[Key] | None = None) -> None:
        """Use a setting for these keys; for None, for all that have none of their own, initialised or not.

        Compiles the codec's loops where numba is installed, and its kernels on GPUs, so that no round waits for it.

        Raises:
            KVError: a kernel does not compile, or a GPU has failed. Nothing was changed.
        """
        with self._preparing:
            if setting.codec is not None:
                setting.codec.prepare()
                for gpu in self._gpus:
                    setting.codec.prepare(gpu)
            if keys is None:
                self._default = setting
            else:
                self._settings.update((key, setting) for key in keys)
        self.version += 1
        self.is_on = any(setting.type != "none" for setting in (self._default, *self._settings.values()))
        self._of = {}
        self._residuals_version += 1
        for held in list(self._residuals):
            if self.setting(held[0]).type == "none":
                del self._residuals[held]

    def setting(self, key: Key) -> Compression:
        """Return the setting of a key."""
        return self._settings.get(key, self._default)

    def of(self, record: KeyRecord) -> Compression | None:
        """Return the setting that values of this key are compressed by; None if they travel as they are."""
        known, setting = self._of.get(record.key, (None, None))
        if known is not record:
            found = self.setting(record.key)
            setting = found if found.applies(record) else None
            self._of[record.key] = (record, setting)
        return setting

    def check(self, record: KeyRecord, flat: DeviceArray, device: int = 0) -> None:
        """Return if `encode_all` would take this value. Call it for all values of a call, before any is encoded.

        Raises:
            KVError: an element, or its sum with the residual, is not finite; names the key. Nothing was changed.
        """
        setting = self.of(record)
        if setting is None or setting.codec is None or not setting.codec.has_residual:
            return
        try:
            setting.codec.check_finite(flat, self._known_residual(record, device, flat))
        except KVError as err:
            raise KVError(f"key {record.key!r}: {err}") from None

    def forget(self, key: Key) -> None:
        """A key is deleted."""
        for held in [held for held in self._residuals if held[0] == key]:
            del self._residuals[held]
        self._residuals_version += 1

    def check_all(self, items: Iterable[tuple[KeyRecord, DeviceArray, int]]) -> None:
        """Do as `check` for several values, each with its device; those on one GPU cost one wait."""
        there = []
        for record, flat, device in items:
            if is_on_host(flat):
                self.check(record, flat, device)
            elif (setting := self.of(record)) is not None and setting.codec is not None and setting.codec.has_residual:
                there.append((record, flat, device))
        if there and not codec.are_finite((item[1], self._known_residual(item[0], item[2], item[1])) for item in there):
            for record, flat, device in there:
                self.check(record, flat, device)

    def encode_all(
        self, portion: Portion, records: Sequence[KeyRecord], values: Sequence[DeviceArray], staging: Pool | None = None
    ) -> list[Buffer]:
        """Return the payload of each shard of a message, whose values are all compressed alike.

        `check` has taken the values. The payloads stay as they are until the push of the message is done
        (`Portion.carried_by`).

        Arguments:
            records, values: of each key of the call, by place; values of any shape.
            staging: memory that the receiver reads where it is; None: it does not.
        """
        gpus = _gpus_of(values)
        plan = self._plans.get(portion)
        if plan is None or plan.version != self._residuals_version or plan.gpus != gpus:
            plan = self._plans[portion] = self._plan(portion, records, values, gpus)
        elif portion.carried_by is not None and not portion.carried_by.is_done:
            plan.room = np.empty_like(plan.room)
        shared = None if staging is None else staging.empty(plan.room.shape, plan.room.dtype)
        room = plan.room if shared is None else shared
        found, params = plan.setting.codec, dict(plan.setting.params)
        assert found is not None
        last, whole = -1, plan.gathered
        packed = _Packed(room)
        for run in plan.runs:
            if len(run.items) == 1:
                if run.items[0] != last:  # the shards of a value follow each other
                    last, whole = run.items[0], _flat(values[run.items[0]])
                flat = whole[run.elements]
            else:
                # One call for all of them; axis None takes arrays of any shapes, in C order.
                flat = plan.gathered[: run.elements.stop]
                np.concatenate([values[item] for item in run.items], axis=None, out=flat)
            found.write(flat, run.residual, params, packed.room(flat, run.payload))
        packed.bring()
        return [room.data[begin:end] for begin, end in plan.cuts]

    def _plan(
        self,
        portion: Portion,
        records: Sequence[KeyRecord],
        values: Sequence[DeviceArray],
        gpus: list[Device | None],
    ) -> _EncodingPlan:
        shards = list(portion.shards())
        setting = self.of(records[shards[0][0]])
        assert setting is not None
        found = setting.codec
        assert found is not None
        params, cuts, at = dict(setting.params), [], 0
        for _, shard in shards:
            size = found.size(shard.length, params)
            cuts.append((at, at + size))
            at += size
        from distrun_runtime.ps.routing import DIRECT_BYTES  # a store with servers has imported it

        def is_small(item: int, shard: Shard) -> bool:
            """Whether the shard is a whole value that may be encoded together with others."""
            record = records[item]
            if (gpus and gpus[item] is not None) or record.dtype != np.float32 or not found.joins:
                return False
            is_whole = shard.length == record.size and record.size * record.dtype.itemsize < DIRECT_BYTES
            return is_whole and not shard.length % found.joins

        runs: list[_EncodedRun] = []
        for are_small, group in itertools.groupby(range(len(shards)), lambda number: is_small(*shards[number])):
            numbers = list(group)
            items = [shards[number][0] for number in numbers]
            if are_small:
                residuals = self._end_to_end(items, records, values) if found.has_residual else []
                for first, last in _joined(residuals) if found.has_residual else [(0, len(numbers))]:
                    some = numbers[first:last]
                    elements = slice(0, sum(shards[number][1].length for number in some))
                    residual = _as_one(residuals[first], elements.stop) if found.has_residual else None
                    payload = slice(cuts[some[0]][0], cuts[some[-1]][1])
                    runs.append(_EncodedRun(items[first:last], elements, residual, payload))
                continue
            for number, item in zip(numbers, items, strict=True):
                elements = slice(shards[number][1].offset, shards[number][1].end)
                residual = self._residual(records[item], 0, values[item])[elements] if found.has_residual else None
                runs.append(_EncodedRun([item], elements, residual, slice(*cuts[number])))
        gathered = max((run.elements.stop for run in runs if len(run.items) > 1), default=0)
        room, gathered_room = np.empty(at, np.uint8), np.empty(gathered, np.float32)
        return _EncodingPlan(setting, self._residuals_version, gpus, runs, cuts, room, gathered_room)

    def through(self, record: KeyRecord, flat: DeviceArray, device: int = 0) -> DeviceArray:
        """Return what a receiver would get of a value: encoded and decoded as one shard, where the value is.

        `check` has taken the value. What is left out goes into the key's residual: call it once for each contribution.

        Arguments:
            record: the key's.
            flat: the whole value, of shape (record.size,), in the key's dtype or float32; only read.
            device: whose contribution it is: each device's is compressed by itself.

        Returns:
            A new array of the key's dtype, or `flat` itself if the value is not compressed.
        """
        setting = self.of(record)
        if setting is None or setting.codec is None:
            return flat
        found, params, given = setting.codec, dict(setting.params), codec.floats(flat)
        residual = self._residual(record, device, flat) if found.has_residual else None
        payload = _empty(flat, found.size(record.size, params), np.uint8)
        found.write(given, residual, params, payload)
        values = _empty(flat, record.size, np.float32)
        found.read(payload, values, params)
        return codec.from_floats(values, record.dtype)

    def residuals(self) -> dict[Key, Array]:
        """Return a copy of what was left out, by key: float32 of shape (size,), or (devices, size) for several.

        They are in the host's memory.
        """
        devices: dict[Key, list[int]] = {}
        for key, device in sorted(self._residuals, key=lambda held: held[1]):
            devices.setdefault(key, []).append(device)
        result = {}
        for key, held in devices.items():
            none = np.zeros(self._residuals[key, held[0]].size, np.float32)
            rows = [on_host(self._residuals.get((key, device), none)) for device in range(held[-1] + 1)]
            result[key] = rows[0].copy() if len(rows) == 1 else np.stack(rows)
        return result

    def clear(self) -> None:
        """Forget all residuals: nothing will be compressed any more."""
        self.restore({})
        self._plans.clear()

    def restore(self, residuals: Mapping[Key, Array]) -> None:
        """Put in place what `residuals` returned; all others are forgotten."""
        self._residuals = {
            (key, device): np.array(row, np.float32)
            for key, rows in residuals.items()
            for device, row in enumerate(np.atleast_2d(rows))
        }
        self._residuals_version += 1

    def _known_residual(self, record: KeyRecord, device: int, flat: DeviceArray) -> DeviceArray | None:
        """Return what was left out, where a value is; None: nothing, or of a value of another size."""
        residual = self._residuals.get((record.key, device))
        if residual is None or residual.size != flat.size:
            return None
        # The first question is answered at once, for each key of a message.
        if not type(flat) is type(residual) is np.ndarray and _place(flat) is not _place(residual):
            residual = on_host(residual) if is_on_host(flat) else flat.device.put(residual)
            self._residuals[record.key, device] = residual
            self._residuals_version += 1
        return residual

    def _residual(self, record: KeyRecord, device: int, flat: DeviceArray) -> DeviceArray:
        """Return the residual of a value, where that is."""
        residual = self._known_residual(record, device, flat)
        if residual is None:
            if (record.key, device) in self._residuals:
                self._residuals_version += 1
            size, float32 = record.size, np.dtype(np.float32)
            residual = np.zeros(size, float32) if is_on_host(flat) else flat.device.zeros((size,), float32)
            self._residuals[record.key, device] = residual
        return residual

    def _end_to_end(
        self, items: Sequence[int], records: Sequence[KeyRecord], values: Sequence[DeviceArray]
    ) -> list[DeviceArray]:
        """Return the residuals of values in the host's memory; those that are made here lie end to end."""
        new = [records[item] for item in items if (records[item].key, 0) not in self._residuals]
        block, at = np.zeros(sum(record.size for record in new), np.float32), 0
        for record in new:
            self._residuals[record.key, 0] = block[at : at + record.size]
            at += record.size
        return [self._residual(records[item], 0, values[item]) for item in items]


class _Packed:
    """Where payloads of values on GPUs are written, until they are brought to a message's buffer."""

    def __init__(self, room: Array) -> None:
        self._room = room
        self._rooms: dict[Device, DeviceArray] = {}
        """On each GPU as many bytes as the buffer has; payloads are at the same places."""
        self._runs: list[tuple[Device, int, int]] = []
        """Which bytes were written on which GPU."""

    def room(self, flat: DeviceArray, payload: slice) -> DeviceArray:
        """Return where the payload of a value is written: beside the value."""
        if is_on_host(flat):
            return self._room[payload]
        device = flat.device
        if device not in self._rooms:
            self._rooms[device] = device.empty(self._room.shape, self._room.dtype)
        if self._runs and self._runs[-1][0] is device and self._runs[-1][2] == payload.start:
            self._runs[-1] = (device, self._runs[-1][1], payload.stop)
        else:
            self._runs.append((device, payload.start, payload.stop))
        return self._rooms[device][payload]

    def bring(self) -> None:
        """Copy to the buffer what was written elsewhere."""
        for device, begin, end in self._runs:
            copy(self._rooms[device][begin:end], self._room[begin:end])


def _gpus_of(values: Sequence[DeviceArray]) -> list[Device | None]:
    """Return the GPU of each value, None for those in the host's memory; nothing: all are there."""
    if set(map(type, values)) <= {np.ndarray}:
        return []
    return [None if isinstance(value, RowSparse) else _place(value) for value in values]


def _place(array: DeviceArray) -> Device | None:
    """Return the GPU that an array is on; None: it is in the host's memory."""
    return None if is_on_host(array) else array.device


def _flat(value: DeviceArray) -> DeviceArray:
    return (np.ascontiguousarray(value) if is_on_host(value) else value).reshape(-1)


def _empty(like: DeviceArray, size: int, dtype: Any) -> DeviceArray:
    """Return a new flat array where another one is."""
    return np.empty(size, dtype) if is_on_host(like) else like.device.empty((size,), np.dtype(dtype))


def _joined(arrays: Sequence[Array]) -> list[tuple[int, int]]:
    """Return where arrays lie end to end in one: first and last index of each such run."""
    starts = [0]
    ends = [address_of(array) + array.nbytes for array in arrays]
    for number in range(1, len(arrays)):
        before, array = arrays[number - 1], arrays[number]
        if array.base is None or array.base is not before.base or address_of(array) != ends[number - 1]:
            starts.append(number)
    return list(zip(starts, [*starts[1:], len(arrays)], strict=True))


def _as_one(first: Array, size: int) -> Array:
    """Return `size` elements from an array's first one on: of the array that it is a part of, if it is one."""
    if first.size == size:
        return first
    assert isinstance(first.base, np.ndarray)
    begin = (address_of(first) - address_of(first.base)) // first.itemsize
    return first.base[begin : begin + size]


def _bytes(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise KVError(f"compression: min_size={value!r}: expected a number of bytes, a whole number of at least 0")
    return int(value)


def _switch(value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise KVError(f"compression: two_way={value!r}: expected True or False")
    return bool(value)
