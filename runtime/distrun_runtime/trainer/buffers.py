"""Buffers: the persistent buffers of a torch module, such as the running statistics of BatchNorm.

They are no parameters: no gradient changes them, each forward pass of each worker does. A trainer that was made from a
module gives all workers rank 0's at the start, and saves and loads them with its states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.trainer.replica import TensorReplica

__all__ = ["Buffers"]

_FLOATS = {1: np.float16, 2: np.float32, 4: np.float64}
"""Bytes of an integer to a float type that has all its values."""


class Buffers:
    """The persistent buffers of a module, in the module's order; none for any other source of parameters.

    They are looked up by name at every use: a module may put another tensor in a buffer's place.

    Arguments:
        source: what a trainer was given as `params`.
    """

    def __init__(self, source: object) -> None:
        self._module: Any = source if hasattr(source, "named_buffers") and hasattr(source, "state_dict") else None
        self.names: list[str] = []
        if self._module is not None:
            saved = self._module.state_dict()
            self.names = [name for name, _ in self._module.named_buffers() if name in saved]

    def __bool__(self) -> bool:
        return bool(self.names)

    def arrays(self) -> list[Array]:
        """Return the buffers as host arrays, in the order of `names`; memory of the host's is shared.

        Raises:
            KVError: the module has lost one, or one cannot be read.
        """
        return [self._read(name, tensor) for name, tensor in zip(self.names, self._tensors(), strict=True)]

    def write(self, values: Mapping[str, Array]) -> None:
        """Write arrays of the buffers' shapes and dtypes into the buffers of these names."""
        for name, tensor in zip(self.names, self._tensors(), strict=True):
            if name in values:
                replica = TensorReplica(tensor)
                room = replica.room()
                np.copyto(room, values[name])
                replica.written(room)

    def floats(self) -> list[Array]:
        """Return the buffers as arrays of float types, which a store with a rule takes: `_as_floats` of each."""
        return [_as_floats(array) for array in self.arrays()]

    def take_floats(self, values: list[Array]) -> None:
        """Write what `floats` returned, or a store made of it."""
        own = self.arrays()
        self.write(
            {
                name: _from_floats(value, mine.dtype).reshape(mine.shape)
                for name, value, mine in zip(self.names, values, own, strict=True)
            }
        )

    def _tensors(self) -> list[Any]:
        if not self.names:
            return []
        found = dict(self._module.named_buffers())
        for name in self.names:
            if name not in found:
                raise KVError("the module has no buffer %r any more, which it had when the trainer was made" % name)
        return [found[name] for name in self.names]

    def _read(self, name: str, tensor: Any) -> Array:
        try:
            return TensorReplica(tensor).weight()
        except (TypeError, ValueError, RuntimeError) as err:
            raise KVError(
                "buffer %r cannot be read as an array: %s; fix: give the trainer net.named_parameters() instead of the"
                " module, and look after its buffers yourself" % (name, err)
            ) from err


def _as_floats(array: Array) -> Array:
    """Return an array as floats: integers of up to 4 bytes by their values, other types by their bytes. Exact."""
    if dtypes.is_float(array.dtype):
        return array
    if _has_values(array.dtype):
        return array.astype(_FLOATS[array.dtype.itemsize])
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8).astype(np.float16)


def _from_floats(value: Array, dtype: np.dtype[Any]) -> Array:
    """Return what `_as_floats` took, flat if it went by its bytes."""
    if value.dtype == dtype:
        return value
    if _has_values(dtype):
        return value.astype(dtype)
    return np.frombuffer(value.astype(np.uint8).tobytes(), dtype)


def _has_values(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biu" and dtype.itemsize in _FLOATS
