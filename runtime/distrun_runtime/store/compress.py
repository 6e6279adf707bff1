"""Compression of what workers push: which keys, how, and what was left out so far.

A `Compression` is what `set_gradient_compression` was given, checked. A `Compressor` has the settings of a store's keys
and the residuals of this process: one float32 value of the key's size for each key and device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.ops import compression as codec
from distrun_runtime.ops.compression import Buffer, Codec
from distrun_runtime.ops.params import did_you_mean
from distrun_runtime.ops.partition import Shard
from distrun_runtime.store.base import KeyRecord
from distrun_runtime.store.values import Key

__all__ = ["MIN_SIZE", "Compression", "Compressor"]

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
                "compression is given as a dictionary such as {'type': '2bit'}, not %s" % type(given).__name__
            )
        if "type" not in given:
            raise KVError("compression needs a 'type': one of none, %s" % ", ".join(sorted(codec.CODECS)))
        name = given["type"]
        found = None if name == "none" else codec.named(name)
        known = {"type", "min_size", "two_way", *(found.knobs if found else ())}
        for member in given:
            if member not in known:
                hint = did_you_mean(str(member), known)
                raise KVError(
                    "compression %r has no member %r%s; it has %s" % (name, member, hint, ", ".join(sorted(known)))
                )
        params = found.check({name: given[name] for name in found.knobs if name in given}) if found else {}
        return cls(str(name), params, _bytes(given.get("min_size", MIN_SIZE)), _switch(given.get("two_way", False)))

    def to_json(self) -> dict[str, Any]:
        """Return what `of` reads as the same setting."""
        return {"type": self.type, **self.params, "min_size": self.min_size, "two_way": self.two_way}

    @property
    def codec(self) -> Codec | None:
        """The codec; None for "none"."""
        return None if self.type == "none" else codec.named(self.type)

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


class Compressor:
    """The settings and residuals of one store in this process.

    A key's residual is made of zeros when it is first used. It stays when the setting changes, and is dropped when
    compression of the key is turned off.

    Threads: any, but one at a time for a key.
    """

    def __init__(self) -> None:
        self._default = Compression()
        self._settings: dict[Key, Compression] = {}
        self._residuals: dict[tuple[Key, int], Array] = {}
        self.version = 0
        """Changes with the settings."""

    def set(self, setting: Compression, keys: Iterable[Key] | None = None) -> None:
        """Use a setting for these keys; for None, for all that have none of their own, initialised or not."""
        if keys is None:
            self._default = setting
        else:
            self._settings.update((key, setting) for key in keys)
        self.version += 1
        for held in list(self._residuals):
            if self.setting(held[0]).type == "none":
                del self._residuals[held]

    @property
    def is_on(self) -> bool:
        """Whether any key's values may be compressed."""
        return any(setting.type != "none" for setting in (self._default, *self._settings.values()))

    def setting(self, key: Key) -> Compression:
        """Return the setting of a key."""
        return self._settings.get(key, self._default)

    def of(self, record: KeyRecord) -> Compression | None:
        """Return the setting that values of this key are compressed by; None if they travel as they are."""
        setting = self.setting(record.key)
        return setting if setting.applies(record) else None

    def check(self, record: KeyRecord, flat: Array, device: int = 0) -> None:
        """Return if `encode` would take all shards of this value. Call it before the first shard of a call.

        Raises:
            KVError: an element, or its sum with the residual, is not finite; names the key. Nothing was changed.
        """
        setting = self.of(record)
        if setting is not None and setting.codec is not None and setting.codec.has_residual:
            residual = self._residuals.get((record.key, device))
            try:
                codec.total_of(setting.type, _floats(flat), residual)
            except KVError as err:
                raise KVError("key %r: %s" % (record.key, err)) from None

    def encode(self, record: KeyRecord, shard: Shard, flat: Array, device: int = 0) -> tuple[int, Buffer] | None:
        """Return the codec number and payload of one shard of a value; None if it travels as it is.

        What the payload leaves out goes into the key's residual: encode each shard of each contribution once.

        Arguments:
            record: the key's.
            flat: the whole value, of shape (record.size,), in the key's dtype or float32; only read.
            device: whose contribution it is, where each device's is compressed by itself.

        Raises:
            KVError: an element of the shard is not finite; the residual is as it was.
        """
        setting = self.of(record)
        if setting is None or setting.codec is None:
            return None
        run = slice(shard.offset, shard.end)
        residual = self._residual(record, device)[run] if setting.codec.has_residual else None
        return setting.number, setting.codec.encode(_floats(flat[run]), residual, dict(setting.params))

    def through(self, record: KeyRecord, flat: Array, device: int = 0) -> Array:
        """Return what a receiver would get of a value: encoded and decoded as one shard.

        Arguments:
            flat, device: as for `encode`.

        Returns:
            A new array of the key's dtype, or `flat` itself if the value is not compressed.
        """
        encoded = self.encode(record, Shard(0, 0, record.size), flat, device)
        if encoded is None:
            return flat
        setting = self.setting(record.key)
        values = codec.numbered(encoded[0]).decode(encoded[1], record.size, dict(setting.params))
        work = values.astype(dtypes.work_dtype(record.dtype), copy=False)
        return dtypes.narrow(work, record.dtype)

    def residuals(self) -> dict[Key, Array]:
        """Return a copy of what was left out, by key: float32 of shape (size,), or (devices, size) for several."""
        devices: dict[Key, list[int]] = {}
        for key, device in sorted(self._residuals, key=lambda held: held[1]):
            devices.setdefault(key, []).append(device)
        result = {}
        for key, held in devices.items():
            size = self._residuals[key, held[0]].size
            rows = [self._residuals.get((key, device), np.zeros(size, np.float32)) for device in range(held[-1] + 1)]
            result[key] = rows[0].copy() if len(rows) == 1 else np.stack(rows)
        return result

    def restore(self, residuals: Mapping[Key, Array]) -> None:
        """Put in place what `residuals` returned; all others are forgotten."""
        self._residuals = {
            (key, device): np.array(row, np.float32)
            for key, rows in residuals.items()
            for device, row in enumerate(np.atleast_2d(rows))
        }

    def _residual(self, record: KeyRecord, device: int) -> Array:
        residual = self._residuals.get((record.key, device))
        if residual is None or residual.size != record.size:
            residual = self._residuals[record.key, device] = np.zeros(record.size, np.float32)
        return residual


def _floats(flat: Array) -> Array:
    """Return the elements as float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return dtypes.widen(flat).astype(np.float32, copy=False)


def _bytes(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise KVError("compression: min_size=%r: expected a number of bytes, a whole number of at least 0" % (value,))
    return int(value)


def _switch(value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise KVError("compression: two_way=%r: expected True or False" % (value,))
    return bool(value)
