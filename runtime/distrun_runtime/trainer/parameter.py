"""Parameter: one weight with its gradient, on one device or several."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Protocol

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.store.sparse import refuse_mask
from distrun_runtime.trainer.replica import ArrayReplica, Gradient, Replica, array_of, is_tensor, replica_of

__all__ = ["Owner", "Parameter"]

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
            raise KVError("parameter %r is an array, or a list of one for each device, not an empty list" % name)
        if len(datas) != len(grads):
            raise KVError("parameter %r: %d arrays and %d gradients" % (name, len(datas), len(grads)))
        self.replicas: list[Replica] = [replica_of(one, its) for one, its in zip(datas, grads, strict=True)]
        self._lr_mult, self._wd_mult = _multiplier("lr_mult", lr_mult), _multiplier("wd_mult", wd_mult)
        self.stype = _stype(stype)
        self.grad_stype = self.stype if grad_stype is None else _stype(grad_stype)
        self.owner: Owner | None = None
        self._look()

    def __repr__(self) -> str:
        return "<Parameter %r: %s %s, %d device(s)>" % (
            *(self.name, self.shape, dtypes.name_of(self.dtype)),
            len(self.replicas),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The weight's dtype, as numpy array of the host."""
        return self._dtype

    @property
    def size(self) -> int:
        """The weight's elements."""
        return int(np.prod(self._shape, dtype=np.int64))

    @property
    def size_bytes(self) -> int:
        """The weight's bytes on one device."""
        return self.size * self._dtype.itemsize

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
                "parameter %r is on %d devices, %d gradients were given: a list has one for each device; of numbers,"
                " np.asarray makes an array" % (self.name, len(self.replicas), len(values))
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
        refuse_mask(value, "parameter %r" % self.name)
        array = array_of(value.detach().cpu()) if is_tensor(value) else np.asarray(value)  # type: ignore[attr-defined]
        if array.shape != self.shape:
            raise KVError("parameter %r has shape %s, not %s" % (self.name, self.shape, array.shape))
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
            room = replica.room()
            if room is not array:
                np.copyto(room, array)
            replica.written(room)

    def written_devices(self) -> list[int]:
        """Return the devices whose weight was written by anybody but the trainer, as far as that can be noticed."""
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

    def used(self) -> None:
        """Note that a step has used the gradients."""
        for replica in self.replicas:
            replica.used()

    def _fitting(self, grad: Gradient) -> Gradient:
        if tuple(grad.shape) != self.shape or grad.dtype != self.dtype:
            raise KVError(
                "parameter %r has shape %s and dtype %s, its gradient %s and %s"
                % (self.name, self.shape, dtypes.name_of(self.dtype), grad.shape, dtypes.name_of(grad.dtype))
            )
        return grad if isinstance(grad, np.ndarray) or self._shape else grad.to_dense()

    def _look(self) -> None:
        """Note shape and dtype; all devices must agree, and gradients that are there."""
        if any(str(getattr(replica.source, "device", "")) == "meta" for replica in self.replicas):
            raise KVError("parameter %r is on the device 'meta': it has no memory; materialise it first" % self.name)
        if not all(getattr(replica.source, "is_leaf", True) for replica in self.replicas):
            raise KVError(
                "parameter %r is computed from other tensors (it is not a leaf of torch's graph) and gets no gradient:"
                " give the tensors that it is computed from" % self.name
            )
        try:
            weights = [replica.weight() for replica in self.replicas]
        except (TypeError, ValueError, RuntimeError) as err:
            # What torch has and numpy has not: 8-bit floats, sparse layouts, lazy layers that were never called.
            raise KVError("parameter %r cannot be read as an array: %s" % (self.name, err)) from err
        self._shape, self._dtype = weights[0].shape, weights[0].dtype
        for weight in weights:
            if weight.shape != self._shape or weight.dtype != self._dtype:
                raise KVError(
                    "parameter %r: device values of shapes %s and dtypes %s; all must be alike"
                    % (
                        self.name,
                        [one.shape for one in weights],
                        [dtypes.name_of(one.dtype) for one in weights],
                    )
                )
        if "row_sparse" in (self.stype, self.grad_stype) and not self._shape:
            raise KVError("parameter %r is a single number and has no rows: it cannot be row_sparse" % self.name)
        for replica in self.replicas:
            if isinstance(replica, ArrayReplica) and replica.grad is not None:
                self._fitting(replica.grad)


def _multiplier(name: str, value: object) -> float:
    """Return what lr_mult or wd_mult is given as."""
    if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise KVError("%s is a finite number, at least 0, not %r" % (name, value))
    return float(value)


def _stype(value: str) -> str:
    if value not in STYPES:
        raise KVError("a storage type is %s, not %r" % (" or ".join(STYPES), value))
    return value
