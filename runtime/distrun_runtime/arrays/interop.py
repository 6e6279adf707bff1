"""Arrays of other libraries as numpy arrays that share their memory: torch, ml_dtypes, and whatever has DLPack.

None of these libraries is ever imported here: a value of one can only come from a module that is loaded.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array

__all__ = ["is_tensor", "memory_of", "own_bfloat16", "tensor_memory"]


def memory_of(value: object) -> Array:
    """Return what numpy sees of a value: the same memory, if numpy can see it. bfloat16 becomes `dtypes.BFLOAT16`.

    Raises:
        TypeError, ValueError, RuntimeError, BufferError: what the value raises when it is asked for its memory, such
            as a tensor on a device.
    """
    if is_tensor(value):
        return tensor_memory(value)
    if not hasattr(value, "__array__") and hasattr(value, "__dlpack__"):
        shared: Array = np.from_dlpack(value)
        return own_bfloat16(shared)
    return own_bfloat16(np.asarray(value))


def is_tensor(value: object) -> bool:
    """Tell whether a value is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


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
