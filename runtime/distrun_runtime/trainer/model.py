"""What a trainer takes from a model: its parameters, and the buffers of a torch module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.arrays.foreign import not_of_torch
from distrun_runtime.errors import KVError
from distrun_runtime.trainer.parameters import Parameter, TensorReplica, is_tensor, memory_of, write_weight

_FLOATS = {1: np.float16, 2: np.float32, 4: np.float64}
"""Bytes of an integer to a float type that has all its values."""


def collect(params: object) -> list[Parameter]:
    """Return parameters in order, each once, all on as many devices.

    Arguments:
        params: a list of items, a dict of them by name (taken in order of name), or a torch module. An item is a
            Parameter, a torch tensor, a list of these for several devices, or a pair (name, one of these):
            `net.parameters()`, `net.named_parameters()`.

    Raises:
        KVError: something else; none at all; parameters on unequal numbers of devices; a name that is used twice;
            several parameters or devices in the same memory.
    """
    result: list[Parameter] = []
    seen: dict[int, Parameter] = {}
    sparse = _sparse_weights(params)
    for name, item in _items(params):
        parameter = _parameter(name, item, sparse, str(len(result)))
        source = id(parameter.data)
        if source in seen:
            continue
        seen[source] = parameter
        parameter.name = parameter.name or str(len(result))
        result.append(parameter)
    if not result:
        raise KVError("a trainer without parameters has nothing to do")
    _check(result)
    _check_memory(result)
    return result


def _check(params: list[Parameter]) -> None:
    first, names = params[0], set()
    for parameter in params:
        if len(parameter.replicas) != len(first.replicas):
            raise KVError(
                f"all parameters must be on the same devices: {first.name!r} is on {len(first.replicas)},"
                f" {parameter.name!r} on {len(parameter.replicas)}"
            )
        if parameter.name in names:
            raise KVError(f"two parameters have the name {parameter.name!r}")
        names.add(parameter.name)


def _check_memory(params: list[Parameter]) -> None:
    """Return if no weight begins where another does."""
    names: dict[tuple[str, int], str] = {}
    for parameter in params:
        for place in map(memory_of, parameter.list_data()):
            if place in names:
                if names[place] == parameter.name:
                    raise KVError(f"two devices of parameter {parameter.name!r} are in the same memory")
                both = f"{names[place]!r} and {parameter.name!r}"
                raise KVError(f"parameters {both} are in the same memory; give one of them")
            if place[1]:
                names[place] = parameter.name


def _items(params: object) -> list[tuple[str, object]]:
    if hasattr(params, "named_parameters"):
        return list(params.named_parameters())
    if isinstance(params, Mapping):
        return sorted(((str(name), item) for name, item in params.items()), key=lambda pair: pair[0])
    is_single = isinstance(params, (str, bytes, np.ndarray)) or is_tensor(params) or not_of_torch(params)
    if is_single or not isinstance(params, Iterable):
        raise KVError(
            "parameters are a list or dict of Parameter or torch tensors, not"
            f" {type(params).__name__}{not_of_torch(params)}"
        )
    return [
        (item[0], item[1]) if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) else ("", item)
        for item in params
    ]


def _parameter(name: str, item: object, sparse: set[int], index: str) -> Parameter:
    if isinstance(item, Parameter):
        item.name = item.name or name
        return item
    name = name or index
    one = item[0] if isinstance(item, (list, tuple)) and item else item
    if isinstance(one, np.ndarray):
        raise KVError(f"parameter {name!r}: a numpy array has no gradient; give Parameter(data, grad)")
    if not is_tensor(one):
        raise KVError(
            f"parameter {name!r} is a {type(one).__name__}, neither Parameter nor torch tensor{not_of_torch(one)}"
        )
    return Parameter(item, name=name, grad_stype="row_sparse" if id(one) in sparse else "default")


def _sparse_weights(params: object) -> set[int]:
    """Return the ids of the weights of a torch module's layers that make sparse gradients."""
    modules = params.modules() if hasattr(params, "modules") and hasattr(params, "named_parameters") else ()
    return {id(one.weight) for one in modules if getattr(one, "sparse", False) is True and hasattr(one, "weight")}


# --- buffers


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
                write_weight(TensorReplica(tensor), values[name])

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
                raise KVError(f"the module has no buffer {name!r} any more, which it had when the trainer was made")
        return [found[name] for name in self.names]

    def _read(self, name: str, tensor: Any) -> Array:
        try:
            return TensorReplica(tensor).weight()
        except (TypeError, ValueError, RuntimeError) as err:
            raise KVError(
                f"buffer {name!r} cannot be read as an array: {err}; fix: give the trainer"
                " net.named_parameters() instead of the module, and look after its buffers yourself"
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
