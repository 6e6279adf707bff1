"""Arrays of other libraries as arrays of ours that share their memory: numpy's, or those of a GPU.

None of these libraries is ever imported here: a value of one can only come from a module that is loaded.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from distrun_runtime.arrays import dlpack, dtypes, find, foreign
from distrun_runtime.arrays.device import DeviceArray
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError

if TYPE_CHECKING:  # Most processes use no GPU.
    from distrun_runtime.arrays.borrowing import Borrowing

__all__ = ["GpuArrays", "host_array", "is_tensor", "memory_of", "own_bfloat16", "tensor_memory", "tensor_output"]


class GpuArrays:
    """The arrays in GPU memory that one call of a store is given, in one thread. It looks up once what they share."""

    def __init__(self) -> None:
        self._borrowing: Borrowing | None = None
        self._streams = foreign.Streams()

    def of(self, value: object, what: str, *, is_output: bool = False) -> DeviceArray | None:
        """Return an array in GPU memory as a `gpu.GpuArray` in the same memory; None if it is elsewhere.

        None, too, if it is only to be read and there is no cupy or driver in this process: see `host_array`. It is to
        be borrowed (`Gpus.borrowing`) before anything is done with it.

        Arguments:
            what: as for `host_array`.
            is_output: it is to be written.

        Raises:
            KVError: the array cannot be used, or there is no cupy or driver and it is to be written; says what to do.
        """
        if not foreign.is_on_gpu(value):
            return None
        try:
            if self._borrowing is None:
                self._borrowing = find.gpus().borrowing
            take = self._borrowing.output if is_output else self._borrowing.value
            return take(value, self._streams)
        except KVError as err:
            from distrun_runtime.arrays.cuda import CudaError, CudaMissing  # most processes use no GPU

            if isinstance(err, CudaError):
                raise err.about(what)
            if not isinstance(err, CudaMissing):
                raise KVError(f"{what}: {err}") from err
            if not is_output:  # its library may copy it to the host
                return None
            why = foreign.refusal(value, is_output=True) or _missing(value, err)
            raise KVError(f"{what}: {why}") from err


def _missing(value: object, error: Exception) -> str:
    return f"found {foreign.named(value)} in the memory of a GPU; {error}"


def host_array(value: object, what: str) -> Array:
    """Return what numpy sees of a value: the same memory, if numpy can see it. bfloat16 becomes `dtypes.BFLOAT16`.

    An array in GPU memory, and a tensor that torch negates or conjugates lazily, is copied.

    Arguments:
        what: whose value it is, for the message, such as "key 'w'".

    Raises:
        KVError: numpy cannot see it: without values, of a layout of its own, ..., or it is on a GPU and cannot be
            copied; says what was found and what to do.
    """
    why = foreign.of_mxnet(value)
    if why is not None:  # numpy would look into it element by element
        raise KVError(f"{what}: {why}")
    on_gpu = GpuArrays().of(value, what)
    if on_gpu is not None:
        return find.gpus().borrowing.host(on_gpu)
    try:
        array = memory_of(value)
    # Whatever a foreign array raises when asked for its memory: on a device, needs a gradient, ...
    except (TypeError, ValueError, RuntimeError, BufferError) as err:
        raise KVError(f"{what}: {_why_not(value) or _unreadable(value, err)}") from err
    if array.dtype.kind == "O":  # numpy could not look into it
        why = _why_not(value)
        if why is not None:
            raise KVError(f"{what}: {why}")
    return array


def _why_not(value: object) -> str | None:
    """Return why numpy cannot read an array of another library."""
    if foreign.is_on_gpu(value):
        try:
            find.gpus()
        except KVError as err:
            return _missing(value, err)
    return foreign.refusal(value)


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
