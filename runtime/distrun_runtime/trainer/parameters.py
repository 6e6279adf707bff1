"""Parameters: weights with their gradients, on one device or several, as numpy arrays or torch tensors.

A `Parameter` has a replica for each device, which knows where the weight and the gradient of that device are.
`ArrayReplica` and `TensorReplica` have the same methods: a trainer does not see what is behind them. torch is not
needed for it: what has `detach` and `numpy` is a tensor.

    memory of the host                          used as it is, as an array
    of a GPU that CUDA knows, cupy is there     used as it is, as a tensor: a store reads and writes it there (`near`)
    of another device, or without cupy          goes through a buffer on the host
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Protocol, TypeGuard, Union

import numpy as np

from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays import dtypes, foreign
from distrun_runtime.arrays.dtypes import Array, DType
from distrun_runtime.errors import KVError
from distrun_runtime.store.values import RowSparse, refuse_mask

Near = Any
"""A torch tensor in the memory of a GPU, without its gradient's history: stores take it as it is."""
Gradient = Union[Array, RowSparse, Near]
Buffer = Union[Array, Near]
"""What a store writes into."""

STAMP = "_distrun_version"
"""Attribute of a torch gradient: its `_version` when a step had used it; a later backward raises `_version`."""

STYPES = ("default", "row_sparse")


class Owner(Protocol):
    """The trainer of a parameter, as the parameter sees it."""

    def multiplied(self) -> None:
        """Take note of a changed multiplier."""

    def may_replace(self, parameter: Parameter) -> None:
        """Raise if a parameter must not be written by its user alone."""

    def replaced(self, parameter: Parameter) -> None:
        """Take note that a parameter was written."""


class Parameter:
    """A weight that is trained, its gradient, and multipliers of its own.

    The gradient is either a buffer given with the weight, which every step finds written anew, or is assigned before
    each step (`parameter.grad = ...`, an array or a RowSparse); a step without one is an error that names the
    parameter. A torch tensor brings its own.

    Arguments:
        data: numpy array (any float dtype of the store) or torch tensor; or a list of these, one for each device,
            all of one shape and dtype. Written in place.
        grad: array of the same shape and dtype, or a list of as many; not for tensors.
        name: for messages and saved states; by default what the trainer calls it.
        lr_mult, wd_mult: multiply learning rate and weight decay for this parameter. May be changed at any time.
        stype: "row_sparse": the weight stays in the store, and `Trainer.pull_rows` brings the rows that are needed.
        grad_stype: "row_sparse": gradients are RowSparse, or torch's sparse tensors.

    Raises:
        KVError: what does not fit together.
    """

    def __init__(
        self,
        data: object,
        grad: object = None,
        *,
        name: str = "",
        lr_mult: float = 1.0,
        wd_mult: float = 1.0,
        stype: str = "default",
        grad_stype: str | None = None,
    ) -> None:
        self.name = name
        datas = list(data) if isinstance(data, (list, tuple)) else [data]
        grads = list(grad) if isinstance(grad, (list, tuple)) else [grad] * len(datas) if grad is None else [grad]
        if not datas:
            raise KVError(f"parameter {name!r} is an array, or a list of one for each device, not an empty list")
        if len(datas) != len(grads):
            raise KVError(f"parameter {name!r}: {len(datas)} arrays and {len(grads)} gradients")
        self.replicas: list[Replica] = [replica_of(one, its) for one, its in zip(datas, grads, strict=True)]
        self._lr_mult, self._wd_mult = _multiplier("lr_mult", lr_mult), _multiplier("wd_mult", wd_mult)
        self.stype = _stype(stype)
        self.grad_stype = self.stype if grad_stype is None else _stype(grad_stype)
        self.owner: Owner | None = None
        weights = self._weights()
        self.shape: tuple[int, ...] = weights[0].shape
        """The weight's shape."""
        self.dtype: DType = weights[0].dtype
        """The weight's dtype, as numpy array of the host."""
        self._check(weights)

    def __repr__(self) -> str:
        return f"<Parameter {self.name!r}: {self.shape} {dtypes.name_of(self.dtype)}, {len(self.replicas)} device(s)>"

    @property
    def size(self) -> int:
        """The weight's elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def size_bytes(self) -> int:
        """The weight's bytes on one device."""
        return self.size * self.dtype.itemsize

    @property
    def trains(self) -> bool:
        """Whether it has a gradient: False for a torch tensor with requires_grad=False."""
        return self.replicas[0].trains

    @property
    def lr_mult(self) -> float:
        """What the learning rate is multiplied by."""
        return self._lr_mult

    @lr_mult.setter
    def lr_mult(self, value: float) -> None:
        self._lr_mult = _multiplier("lr_mult", value)
        if self.owner is not None:
            self.owner.multiplied()

    @property
    def wd_mult(self) -> float:
        """What the weight decay is multiplied by."""
        return self._wd_mult

    @wd_mult.setter
    def wd_mult(self, value: float) -> None:
        self._wd_mult = _multiplier("wd_mult", value)
        if self.owner is not None:
            self.owner.multiplied()

    @property
    def data(self) -> Any:
        """The weight as it was given: of the first device."""
        return self.replicas[0].source

    def list_data(self) -> list[Any]:
        """Return the weights as they were given, one for each device."""
        return [replica.source for replica in self.replicas]

    @property
    def grad(self) -> Any:
        """The gradient of the first device, or None. Assign one for all devices, or a list of one for each."""
        return self.replicas[0].grad

    @grad.setter
    def grad(self, value: object) -> None:
        values = list(value) if isinstance(value, (list, tuple)) else [value] * len(self.replicas)
        if len(values) != len(self.replicas):
            raise KVError(
                f"parameter {self.name!r} is on {len(self.replicas)} devices, {len(values)} gradients were"
                " given: a list has one for each device; of numbers, np.asarray makes an array"
            )
        for replica, one in zip(self.replicas, values, strict=True):
            replica.set_grad(one)

    def list_grad(self) -> list[Any]:
        """Return the gradients, one for each device; None where there is none."""
        return [replica.grad for replica in self.replicas]

    def set_data(self, value: object) -> None:
        """Write a new weight into all devices, and into the trainer's store if that is not shared with others.

        Raises:
            KVError: another shape, or a masked array.
            RuntimeError: its trainer updates it on a distributed store; see `Trainer.assign`.
        """
        refuse_mask(value, f"parameter {self.name!r}")
        array = foreign.tensor_memory(value.detach().cpu()) if is_tensor(value) else np.asarray(value)  # type: ignore[attr-defined]
        if array.shape != self.shape:
            raise KVError(f"parameter {self.name!r} has shape {self.shape}, not {array.shape}")
        array = (
            array
            if array.dtype == self.dtype
            else dtypes.narrow(dtypes.widen(array).astype(dtypes.work_dtype(self.dtype)), self.dtype)
        )
        if self.owner is not None:
            self.owner.may_replace(self)
        self.write(array)
        if self.owner is not None:
            self.owner.replaced(self)

    def write(self, array: Array) -> None:
        """Write an array of the weight's shape and dtype into all devices."""
        for replica in self.replicas:
            write_weight(replica, array)

    def written_devices(self) -> list[int]:
        """Return the devices whose weight was written by other code than the trainer, as far as that can be noticed."""
        return [index for index, replica in enumerate(self.replicas) if replica.is_written]

    def remember(self) -> None:
        """Take the weights as they are now for those that the trainer knows."""
        for replica in self.replicas:
            replica.remember()

    def zero_grad(self) -> None:
        """Forget the gradients; a buffer is filled with zeros."""
        for replica in self.replicas:
            replica.zero_grad()

    def gradients(self) -> list[Gradient]:
        """Return the gradients of the devices that have a fresh one.

        Raises:
            KVError: one has another shape or dtype than the weight.
        """
        found = [replica.gradient() for replica in self.replicas if replica.is_fresh]
        return [self._fitting(grad) for grad in found if grad is not None]

    @property
    def tells(self) -> bool:
        """Whether `watch` is told of every new gradient; a buffer that is written in place tells nothing."""
        return all(replica.tells for replica in self.replicas)

    def watch(self, told: Callable[[], None]) -> Callable[[], None]:
        """Call `told` whenever a device has a new gradient, in the thread that brought it; return what ends that."""
        ends = [replica.watch(told) for replica in self.replicas]

        def end() -> None:
            for each in ends:
                each()

        return end

    def follow(self) -> None:
        """Let what this thread does next on GPUs come after the gradients that `watch` has told of."""
        for replica in self.replicas:
            replica.follow()

    def used(self) -> None:
        """Note that a step has used the gradients."""
        for replica in self.replicas:
            replica.used()

    def _fitting(self, grad: Gradient) -> Gradient:
        shape = tuple(grad.shape)
        dtype = str(grad.dtype).rpartition(".")[2] if is_near(grad) else dtypes.name_of(grad.dtype)
        if shape != self.shape or dtype != dtypes.name_of(self.dtype):
            raise KVError(
                f"parameter {self.name!r} has shape {self.shape} and dtype {dtypes.name_of(self.dtype)}, its"
                f" gradient {shape} and {dtype}"
            )
        return grad.to_dense() if isinstance(grad, RowSparse) and not self.shape else grad

    def _weights(self) -> list[Array]:
        """Return the weight of each device."""
        if any(str(getattr(replica.source, "device", "")) == "meta" for replica in self.replicas):
            raise KVError(f"parameter {self.name!r} is on the device 'meta': it has no memory; materialise it first")
        if not all(getattr(replica.source, "is_leaf", True) for replica in self.replicas):
            raise KVError(
                f"parameter {self.name!r} is computed from other tensors (it is not a leaf of torch's graph)"
                " and gets no gradient: give the tensors that it is computed from"
            )
        try:
            return [replica.weight() for replica in self.replicas]
        except (TypeError, ValueError, RuntimeError) as err:
            # What torch has and numpy has not: 8-bit floats, sparse layouts, lazy layers that were never called.
            raise KVError(f"parameter {self.name!r} cannot be read as an array: {err}") from err

    def _check(self, weights: Sequence[Array]) -> None:
        """Return if all devices agree, and gradients that are there."""
        for weight in weights:
            if weight.shape != self.shape or weight.dtype != self.dtype:
                raise KVError(
                    f"parameter {self.name!r}: device values of shapes {[one.shape for one in weights]} and"
                    f" dtypes {[dtypes.name_of(one.dtype) for one in weights]}; all must be alike"
                )
        if "row_sparse" in (self.stype, self.grad_stype) and not self.shape:
            raise KVError(f"parameter {self.name!r} is a single number and has no rows: it cannot be row_sparse")
        for replica in self.replicas:
            if isinstance(replica, ArrayReplica) and replica.grad is not None:
                self._fitting(replica.grad)


def _multiplier(name: str, value: object) -> float:
    """Return what lr_mult or wd_mult is given as."""
    if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise KVError(f"{name} is a finite number, at least 0, not {value!r}")
    return float(value)


def _stype(value: str) -> str:
    if value not in STYPES:
        raise KVError(f"a storage type is {' or '.join(STYPES)}, not {value!r}")
    return value


# --- replicas


class ArrayReplica:
    """A weight in a numpy array, and a gradient that is given as an array or RowSparse."""

    trains = True
    """Whether it has a gradient at all."""
    is_written = False
    """Whether the user wrote the weight; an array of numpy cannot tell."""
    gpu: int | None = None
    """The number of the GPU whose memory stores use as it is."""

    def __init__(self, data: Array, grad: object = None) -> None:
        self.source: object = data
        """What the user gave; two replicas of one source are one."""
        self._data = data
        self._grad: Gradient | None = None if grad is None else gradient_of(grad)
        self._is_buffer = grad is not None
        self._is_new = False
        self._told: Callable[[], None] = lambda: None

    @property
    def grad(self) -> Gradient | None:
        """The gradient, as last given."""
        return self._grad

    def set_grad(self, value: object) -> None:
        """Take this gradient for the next step; None takes it away."""
        self._grad = None if value is None else gradient_of(value)
        self._is_buffer, self._is_new = False, value is not None
        if value is not None:
            self._told()

    @property
    def tells(self) -> bool:
        """Whether new gradients are noticed: those that are assigned are."""
        return not self._is_buffer

    def watch(self, told: Callable[[], None]) -> Callable[[], None]:
        """Call `told` when a gradient was assigned; return what ends that."""
        self._told = told

        def end() -> None:
            self._told = lambda: None

        return end

    def follow(self) -> None:
        """Do nothing: an array is there when it was given."""

    @property
    def is_fresh(self) -> bool:
        """Whether a gradient is there that no step has used. A buffer that was there from the start always is."""
        return self._is_buffer or self._is_new

    @property
    def is_surely_new(self) -> bool:
        """Whether a gradient certainly came since a step used or skipped the last; a buffer cannot tell."""
        return self._is_new

    def weight(self) -> Array:
        """Return the weight: the array itself."""
        return self._data

    def weight_buffer(self, *, on_host: bool = False) -> Buffer:
        """Return an array of the weight's shape and dtype to write a new weight into, for `weight_written`."""
        return self._data

    def weight_written(self, buffer: Buffer) -> None:
        """Take what was written into `weight()` or `weight_buffer()`."""

    def remember(self) -> None:
        """Do nothing: an array does not tell whether it was written."""

    def gradient(self) -> Gradient | None:
        """Return the gradient as it is."""
        return self._grad

    def grad_buffer(self, *, on_host: bool = False) -> Buffer:
        """Return an array for a dense gradient of all devices or workers; it is the gradient from now on."""
        if not (isinstance(self._grad, np.ndarray) and self._grad.flags.writeable):
            self._grad = np.zeros(self._data.shape, self._data.dtype)
        return self._grad

    def grad_written(self, buffer: Buffer) -> None:
        """Take what was written into `grad_buffer()`."""

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
        """The tensor of the host that was given to be written last, in place of a weight elsewhere."""
        self._host_grad: Any = None
        self._stream: Any = None
        """The stream on which backward has written the gradient, as far as `watch` has told."""
        self._has_gpus: bool | None = None
        """Whether stores can use GPUs; None: it was never asked, as the tensor never was on one."""
        self._seen: object = None
        """The tensor's mark when the trainer knew its value last."""

    @property
    def gpu(self) -> int | None:
        """The number of the GPU whose memory stores use as it is; None: there is none."""
        return self._tensor.device.index if self._is_near(self._tensor) else None

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

    tells = True
    """Whether new gradients are noticed: torch tells when backward has written one."""

    def watch(self, told: Callable[[], None]) -> Callable[[], None]:
        """Call `told` when backward has written the tensor's `.grad`; return what ends that.

        Raises:
            KVError: torch is older than 2.1.
        """
        register = getattr(self._tensor, "register_post_accumulate_grad_hook", None)
        if register is None:
            raise KVError("overlap=True needs torch 2.1 or newer: older ones do not tell when a gradient is there")

        def came(tensor: Any) -> None:
            if self._is_near(tensor):
                # Backward has a thread for each device, in which its streams are the current ones.
                self._stream = sys.modules["torch"].cuda.current_stream(tensor.device.index)
            told()

        end: Callable[[], None] = register(came).remove
        return end

    def follow(self) -> None:
        """Let the stream that is current in this thread wait for the gradient that `watch` has told of."""
        stream, self._stream = self._stream, None
        if stream is not None:
            current = sys.modules["torch"].cuda.current_stream(self._tensor.device.index)
            if current != stream:
                current.wait_stream(stream)

    @property
    def is_fresh(self) -> bool:
        """Whether `.grad` is there and was written since a step used it."""
        grad = self._tensor.grad
        return grad is not None and getattr(grad, STAMP, None) != grad._version

    @property
    def is_surely_new(self) -> bool:
        """Whether a gradient came since a step used or skipped the last."""
        return self.is_fresh

    def weight(self) -> Array:
        """Return the weight: the tensor's memory, or a copy on the host of a GPU's."""
        self._host = self._tensor.detach().cpu()
        return foreign.tensor_memory(self._host)

    def weight_buffer(self, *, on_host: bool = False) -> Buffer:
        """Return memory to write a new weight into: the tensor's own where that can be.

        Arguments:
            on_host: it is to be an array.
        """
        if not on_host and self._is_near(self._tensor):
            return _compact(self._tensor.detach())
        if self._on_host() or self._host is None:
            return self.weight()
        return foreign.tensor_memory(self._host)

    def weight_written(self, buffer: Buffer) -> None:
        """Bring what was written into `weight()` or `weight_buffer()` to where the tensor is."""
        if is_near(buffer) and buffer.data_ptr() != self._tensor.data_ptr():
            _copy_back(buffer, self._tensor)
        elif not is_near(buffer) and not self._on_host():
            self._tensor.detach().copy_(self._holding(buffer))
        elif hasattr(self._tensor, "_version"):
            _tell_torch(self._tensor)
        self.remember()

    def _holding(self, buffer: Array) -> Any:
        """Return the tensor of the host that has what is in a buffer."""
        if self._host is None or memory_of(foreign.tensor_memory(self._host)) != memory_of(buffer):
            self._host = self._tensor.detach().cpu()  # a caller that asked for another buffer may still use that one
            np.copyto(foreign.tensor_memory(self._host), buffer)
        return self._host

    @property
    def is_written(self) -> bool:
        """Whether other code than the trainer has written the tensor, or given it other memory, since `remember`."""
        return bool(self._seen != self._mark())

    def remember(self) -> None:
        """Take the weight as it is now for the one that the trainer knows; `weight_written` does so too."""
        self._seen = self._mark()
        if self._host is not None and self._is_near(self._tensor):
            self._host = None  # only some calls need one

    def gradient(self) -> Gradient | None:
        """Return `.grad`: as an array of the same memory, as a near tensor, as RowSparse; from elsewhere, a copy."""
        grad = self._tensor.grad
        if grad is None:
            return None
        if self._is_near(grad):
            return grad.detach()
        return on_host(grad)

    def grad_buffer(self, *, on_host: bool = False) -> Buffer:
        """Return memory for a dense gradient of all devices or workers; `grad_written` makes it `.grad`.

        Arguments:
            on_host: as for `weight_buffer`.
        """
        if self._tensor.grad is None or self._tensor.grad.is_sparse:
            self._tensor.grad = self._tensor.detach().new_zeros(self._tensor.shape)
        found = self._tensor.grad.detach()
        if not on_host and self._is_near(found):
            return _compact(found)
        if self._on_host():
            return foreign.tensor_memory(found)
        self._host_grad = found.cpu()
        return foreign.tensor_memory(self._host_grad)

    def grad_written(self, buffer: Buffer) -> None:
        """Bring what was written into `grad_buffer()` to where the gradient is."""
        grad = self._tensor.grad
        if is_near(buffer):
            if buffer.data_ptr() != grad.data_ptr():
                _copy_back(buffer, grad)
        elif not self._on_host():
            grad.detach().copy_(self._host_grad)

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

    def _is_near(self, tensor: Any) -> bool:
        if not foreign.is_on_gpu(tensor):
            return False
        if self._has_gpus is None:
            self._has_gpus = _has_gpus()
        return self._has_gpus

    def _on_host(self) -> bool:
        device = self._tensor.device
        return getattr(device, "type", str(device)) == "cpu"


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
        why = foreign.of_mxnet(data)
        found = f"; {why}" if why else f", not {type(data).__name__}"
        raise KVError(f"a parameter's data is a numpy array or a torch tensor{found}")
    refuse_mask(data, "a parameter's data")
    if not data.flags.writeable:
        raise KVError(f"a parameter's array of shape {data.shape} is read-only; give one that can be written")
    result = ArrayReplica(data, grad)
    if grad is not None and not (isinstance(result.grad, np.ndarray) and result.grad.flags.writeable):
        raise KVError(
            "a gradient that is given with its weight is an array that can be written, for every step anew; any other:"
            " assign it before each step (parameter.grad = ...)"
        )
    return result


def write_weight(replica: Replica, array: Array) -> None:
    """Write an array of the weight's shape and dtype into a replica."""
    buffer = replica.weight_buffer(on_host=True)
    if buffer is not array:
        np.copyto(buffer, array)
    replica.weight_written(buffer)


def is_near(value: object) -> TypeGuard[Near]:
    """Tell whether a gradient or a buffer is a tensor in the memory of a GPU."""
    return not isinstance(value, (np.ndarray, RowSparse))


def on_host(tensor: Any) -> Array | RowSparse:
    """Return a tensor as an array of the same memory, or as RowSparse; from a GPU, a copy."""
    found = tensor.detach().cpu()
    return RowSparse.from_torch(found) if found.is_sparse else foreign.tensor_memory(found)


def memory_of(source: Any) -> tuple[str, int]:
    """Return where an array's or a tensor's memory begins: device and address; 0 where it has none."""
    if isinstance(source, np.ndarray):
        return "cpu", int(source.__array_interface__["data"][0]) if source.size else 0
    address = getattr(source, "data_ptr", None)
    return str(getattr(source, "device", "")), address() if address is not None else 0


def gradient_of(value: object) -> Gradient:
    """Return a gradient as RowSparse or as an array, the same memory where that is possible.

    Raises:
        KVError: a masked array, or an array of MXNet.
    """
    refuse_mask(value, "a gradient")
    why = foreign.of_mxnet(value)
    if why is not None:
        raise KVError(f"a gradient: {why}")
    sparse = RowSparse.of(value)
    return np.asarray(value) if sparse is None else sparse


def _compact(tensor: Any) -> Any:
    """Return a tensor's own memory, if its elements lie row by row as a store writes them; else a copy of it."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _copy_back(buffer: Any, tensor: Any) -> None:
    """Copy what `_compact` made, in this thread or another, to the tensor, on the stream that is current here."""
    # Its memory is of the stream that was current there: torch must not use it again before this copy.
    buffer.record_stream(sys.modules["torch"].cuda.current_stream(buffer.device.index))
    tensor.detach().copy_(buffer)


def _has_gpus() -> bool:
    """Tell whether stores of this process can use GPUs. Asked only if there is a tensor on one."""
    from distrun_runtime.arrays.cuda import CudaMissing  # most processes use no GPU

    try:
        devices.gpus()
    except CudaMissing:
        return False
    return True


def _tell_torch(tensor: Any) -> None:
    """Tell torch that a tensor was written, so that it refuses a backward through the old value."""
    torch = sys.modules["torch"]
    increment = getattr(torch.autograd.graph, "increment_version", None)
    if increment is not None:
        increment(tensor)
    else:  # Before torch 2.2: a write of nothing.
        tensor.detach().unsqueeze(0)[:0].zero_()
