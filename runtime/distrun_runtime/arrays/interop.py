"""Arrays of other libraries as numpy arrays that share their memory: torch, ml_dtypes, and whatever has DLPack.

None of these libraries is ever imported here: a value of one can only come from a module that is loaded.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from distrun_runtime.arrays import dlpack, dtypes, foreign
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError

__all__ = ["host_array", "is_tensor", "memory_of", "own_bfloat16", "tensor_memory", "tensor_output"]


def host_array(value: object, what: str) -> Array:
    """Return what numpy sees of a value: the same memory, if numpy can see it. bfloat16 becomes `dtypes.BFLOAT16`.

    A tensor that torch negates or conjugates lazily is copied.

    Arguments:
        what: whose value it is, for the message, such as "key 'w'".

    Raises:
        KVError: numpy cannot see it: in the memory of a GPU, without values, of a layout of its own, ...; says what was
            found and what to do.
    """
    try:
        array = memory_of(value)
    # Whatever a foreign array raises when asked for its memory: on a device, needs a gradient, ...
    except (TypeError, ValueError, RuntimeError, BufferError) as err:
        raise KVError(f"{what}: {foreign.refusal(value) or _unreadable(value, err)}") from err
    if array.dtype.kind == "O":  # numpy could not look into it
        why = foreign.refusal(value)
        if why is not None:
            raise KVError(f"{what}: {why}")
    return array


def tensor_output(tensor: object, what: str) -> Array:
    """Return a torch tensor's host memory, to be written.

    Raises:
        KVError: as `host_array`; a tensor that torch negates or conjugates lazily, too.
    """
    try:
        return tensor_memory(tensor)
    except (TypeError, ValueError, RuntimeError) as err:
        why = foreign.refusal(tensor, is_output=True) or _unreadable(tensor, err)
        raise KVError(f"{what}: {why}") from err


def _unreadable(value: object, error: Exception) -> str:
    return f"numpy cannot read a {type(value).__name__} ({error}); bring it to host memory as an array first"


def memory_of(value: object) -> Array:
    """Return what numpy sees of a value: the same memory, if numpy can see it. bfloat16 becomes `dtypes.BFLOAT16`.

    Raises:
        TypeError, ValueError, RuntimeError, BufferError: what the value raises when it is asked for its memory, such
            as a tensor on a device.
    """
    if is_tensor(value):
        return _tensor_values(value)
    if not hasattr(value, "__array__") and hasattr(value, "__dlpack__"):
        # numpy would take managed memory, too, and not wait for the GPU that writes it.
        place = dlpack.device_of(value)
        if place is not None and place[0] not in dlpack.HOSTS:
            raise BufferError("it is not in host memory")
        shared: Array = np.from_dlpack(value)
        return own_bfloat16(shared)
    return own_bfloat16(np.asarray(value))


def is_tensor(value: object) -> bool:
    """Tell whether a value is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _tensor_values(tensor: Any) -> Array:
    try:
        return tensor_memory(tensor)
    except (TypeError, RuntimeError):
        # torch negates and conjugates by a bit, and leaves the memory as it was.
        if not (tensor.is_neg() or tensor.is_conj()):
            raise
    return tensor_memory(tensor.detach().resolve_conj().resolve_neg())


def tensor_memory(tensor: Any) -> Array:
    """Return a dense torch tensor's host memory as an array; a parameter's too, without its gradient's history."""
    torch = sys.modules["torch"]
    plain = tensor.detach()
    if plain.dtype is torch.bfloat16:
        halves: Array = plain.view(torch.int16).numpy()
        return halves.view(dtypes.BFLOAT16)
    array: Array = plain.numpy()
    return array


def own_bfloat16(array: Array) -> Array:
    """Return an array of ml_dtypes' bfloat16 as one of `dtypes.BFLOAT16`, in the same memory; any other as it is."""
    # Known by name and form: the package need not be there.
    if array.dtype.kind == "V" and array.dtype.itemsize == 2 and array.dtype.name == "bfloat16":
        return array.view(dtypes.BFLOAT16)
    return array
