"""One device's copy of a parameter: where its weight and its gradient are. Arrays and torch tensors look alike here.

torch is never needed: what has `detach` and `numpy` is a tensor. On the host its memory is used as it is; a tensor of
a GPU goes through a buffer on the host.
"""

from __future__ import annotations

from typing import Any, Union

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.store.sparse import RowSparse, refuse_mask

__all__ = ["ArrayReplica", "Gradient", "Replica", "TensorReplica", "is_tensor", "place_of", "replica_of"]

Gradient = Union[Array, RowSparse]

STAMP = "_distrun_version"
"""Attribute of a torch gradient: its `_version` when a step had used it; a later backward raises `_version`."""


class ArrayReplica:
    """A weight in a numpy array, and a gradient that is given as an array or RowSparse."""

    trains = True
    """Whether it has a gradient at all."""
    is_written = False
    """Whether the user wrote the weight; an array of numpy cannot tell."""

    def __init__(self, data: Array, grad: object = None) -> None:
        self.source: object = data
        """What the user gave; two replicas of one source are one."""
        self._data = data
        self._grad: Gradient | None = None if grad is None else gradient_of(grad)
        self._is_buffer = grad is not None
        self._is_new = False

    @property
    def grad(self) -> Gradient | None:
        """The gradient, as last given."""
        return self._grad

    def set_grad(self, value: object) -> None:
        """Take this gradient for the next step; None takes it away."""
        self._grad = None if value is None else gradient_of(value)
        self._is_buffer, self._is_new = False, value is not None

    @property
    def is_fresh(self) -> bool:
        """Whether a gradient is there that no step has used. A buffer that was there from the start always is."""
        return self._is_buffer or self._is_new

    @property
    def is_anew(self) -> bool:
        """Whether a gradient certainly came since a step used or skipped the last; of a buffer nobody can tell."""
        return self._is_new

    def weight(self) -> Array:
        """Return the weight: the array itself."""
        return self._data

    def room(self) -> Array:
        """Return an array of the weight's shape and dtype to write a new weight into, for `written`."""
        return self._data

    def written(self, array: Array) -> None:
        """Take what was written into `weight()` or `room()`."""

    def remember(self) -> None:
        """Do nothing: an array does not tell whether it was written."""

    def gradient(self) -> Gradient | None:
        """Return the gradient as it is."""
        return self._grad

    def target(self) -> Array:
        """Return an array for a dense gradient of all devices or workers; it is the gradient from now on."""
        if not (isinstance(self._grad, np.ndarray) and self._grad.flags.writeable):
            self._grad = np.zeros(self._data.shape, self._data.dtype)
        return self._grad

    def reduced(self, array: Array) -> None:
        """Take what was written into `target()`."""

    def used(self) -> None:
        """Note that a step has used the gradient."""
        self._is_new = False

    def zero_grad(self) -> None:
        """Fill a buffer with zeros, forget any other gradient."""
        if self._is_buffer and isinstance(self._grad, np.ndarray):
            self._grad[...] = np.zeros((), self._grad.dtype)
        elif not self._is_buffer:
            self.set_grad(None)


class TensorReplica:
    """A torch tensor with its `.grad`."""

    def __init__(self, tensor: Any) -> None:
        self.source: object = tensor
        self._tensor = tensor
        self._host: Any = None
        self._seen: object = None
        """The tensor's mark when the trainer knew its value last."""

    @property
    def trains(self) -> bool:
        """Whether it has a gradient at all: `requires_grad`."""
        return bool(self._tensor.requires_grad)

    @property
    def grad(self) -> Any:
        """The tensor's `.grad`."""
        return self._tensor.grad

    def set_grad(self, value: object) -> None:
        """Give the tensor this `.grad`."""
        self._tensor.grad = value

    @property
    def is_fresh(self) -> bool:
        """Whether `.grad` is there and was written since a step used it."""
        grad = self._tensor.grad
        return grad is not None and getattr(grad, STAMP, None) != grad._version

    @property
    def is_anew(self) -> bool:
        """Whether a gradient came since a step used or skipped the last."""
        return self.is_fresh

    def weight(self) -> Array:
        """Return the weight: the tensor's memory, or a copy on the host of a GPU's."""
        self._host = self._tensor.detach().cpu()
        return array_of(self._host)

    def room(self) -> Array:
        """Return memory to write a new weight into: the tensor's own where it is on the host."""
        if self._on_host():
            return self.weight()
        if self._host is None:
            self._host = self._tensor.detach().cpu()
        return array_of(self._host)

    def written(self, array: Array) -> None:
        """Bring what was written to the tensor's device."""
        if not self._on_host():
            self._tensor.detach().copy_(self._host)
        elif hasattr(self._tensor, "_version"):
            # torch did not see it: it is told by a write of nothing, so that it refuses a backward through old weights.
            self._tensor.detach().unsqueeze(0)[:0].zero_()
        self.remember()

    @property
    def is_written(self) -> bool:
        """Whether anybody but the trainer has written the tensor, or given it other memory, since `remember`."""
        return bool(self._seen != self._mark())

    def remember(self) -> None:
        """Take the weight as it is now for the one that the trainer knows; `written` does so too."""
        self._seen = self._mark()

    def gradient(self) -> Gradient | None:
        """Return `.grad` as an array of the same memory, or as RowSparse; from a GPU, a copy."""
        grad = self._tensor.grad
        if grad is None:
            return None
        found = grad.detach().cpu()
        return RowSparse.from_torch(found) if found.is_sparse else array_of(found)

    def target(self) -> Array:
        """Return an array for a dense gradient of all devices or workers; `reduced` makes it `.grad`."""
        if self._tensor.grad is None or self._tensor.grad.is_sparse:
            self._tensor.grad = self._tensor.detach().new_zeros(self._tensor.shape)
        found = self._tensor.grad.detach()
        if self._on_host():
            return array_of(found)
        self._host_grad = found.cpu()
        return array_of(self._host_grad)

    def reduced(self, array: Array) -> None:
        """Bring what was written into `target()` to the tensor's device."""
        if not self._on_host():
            self._tensor.grad.detach().copy_(self._host_grad)

    def used(self) -> None:
        """Note that a step has used the gradient."""
        grad = self._tensor.grad
        if grad is not None:
            setattr(grad, STAMP, grad._version)

    def zero_grad(self) -> None:
        """Forget the gradient, as torch's optimizers do."""
        self._tensor.grad = None

    def _mark(self) -> object:
        # `.data = other` changes the memory, and in some versions of torch nothing else.
        address = getattr(self._tensor, "data_ptr", None)
        return getattr(self._tensor, "_version", 0), address() if address is not None else 0

    def _on_host(self) -> bool:
        return str(self._tensor.device) == "cpu"


Replica = Union[ArrayReplica, TensorReplica]


def is_tensor(value: object) -> bool:
    """Tell whether a value is a torch tensor, as far as is needed here."""
    return hasattr(value, "detach") and hasattr(value, "numpy") and hasattr(value, "requires_grad")


def replica_of(data: object, grad: object = None) -> Replica:
    """Return the replica of a torch tensor, or of a numpy array with the array that its gradients are written into.

    Raises:
        KVError: anything else; an array that cannot be written; a gradient of its own for a tensor.
    """
    if is_tensor(data):
        if grad is not None:
            raise KVError("a torch tensor has its gradient in .grad; do not give another")
        return TensorReplica(data)
    if not isinstance(data, np.ndarray):
        raise KVError("a parameter's data is a numpy array or a torch tensor, not %s" % type(data).__name__)
    refuse_mask(data, "a parameter's data")
    if not data.flags.writeable:
        raise KVError("a parameter's array of shape %s is read-only; give one that can be written" % (data.shape,))
    result = ArrayReplica(data, grad)
    if grad is not None and not (isinstance(result.grad, np.ndarray) and result.grad.flags.writeable):
        raise KVError(
            "a gradient that is given with its weight is an array that can be written, for every step anew; any other:"
            " assign it before each step (parameter.grad = ...)"
        )
    return result


def place_of(source: Any) -> tuple[str, int]:
    """Return where an array's or a tensor's memory begins: device and address; 0 where it has none."""
    if isinstance(source, np.ndarray):
        return "cpu", int(source.__array_interface__["data"][0]) if source.size else 0
    address = getattr(source, "data_ptr", None)
    return str(getattr(source, "device", "")), address() if address is not None else 0


def gradient_of(value: object) -> Gradient:
    """Return a gradient as RowSparse or as an array, the same memory where that is possible.

    Raises:
        KVError: a masked array.
    """
    refuse_mask(value, "a gradient")
    sparse = RowSparse.of(value)
    return np.asarray(value) if sparse is None else sparse


def array_of(tensor: Any) -> Array:
    """Return a host tensor's memory as an array; bfloat16 as `dtypes.BFLOAT16`."""
    if str(tensor.dtype) != "torch.bfloat16":
        array: Array = tensor.numpy()
        return array
    import torch  # It is there: the tensor is one of its.

    bits: Array = tensor.view(torch.int16).numpy()
    return bits.view(dtypes.BFLOAT16)
