"""The interface of a device: host memory or a GPU, which keeps arrays and adds them up for stores and servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard, Union

import numpy as np

from distrun_runtime.arrays.dtypes import Array, DType

__all__ = ["ArrayPlace", "Buffer", "Device", "DeviceArray", "copy", "is_on_host", "move", "on_host"]

Buffer = Union[bytes, bytearray, memoryview]
"""Bytes in the host's memory."""

DeviceArray = Any
"""An array in a device's memory: numpy's on cpu devices, a `gpu.GpuArray` on GPUs.

Both have `shape`, `dtype`, `size`, `nbytes`, `reshape`; flat ones have a length, and slices that share their memory.
"""


def is_on_host(array: DeviceArray) -> TypeGuard[Array]:
    """Tell whether an array is numpy's, in the host's memory; otherwise it is a `gpu.GpuArray`."""
    return isinstance(array, np.ndarray)


def on_host(array: DeviceArray) -> Array:
    """Return an array as numpy's: itself if it is in the host's memory, else a copy."""
    found: Array = array if is_on_host(array) else array.device.host(array)
    return found


def copy(array: DeviceArray, out: DeviceArray) -> None:
    """Copy an array to another of the same shape and dtype, wherever the two are; numpy's of any strides."""
    if not is_on_host(out):
        out.device.write(out, array)
    elif is_on_host(array):
        np.copyto(out, array)
    else:
        array.device.read(array, out)


class Device(Protocol):
    """One device. Its arrays are C-contiguous; sums are made in the order of the arguments.

    A GPU works on while a call has returned. What a call returns, or writes, in the host's memory is there when it
    returns; memory of the host that a call reads may be overwritten then, if the call does not say otherwise. Calls on
    one array, of any thread, take effect in their order.

    Threads: any, but one at a time for an array that is written.
    """

    name: str
    """`cpu:0`, `gpu:0`."""
    is_gpu: bool
    """Whether arrays are `gpu.GpuArray`s; else they are numpy's."""

    def empty(self, shape: Sequence[int], dtype: DType, *, is_sent: bool = False) -> DeviceArray:
        """Return a new array here, of undefined content.

        Arguments:
            is_sent: it is often sent to other processes, as it is: it may be where those on this host can read it.
        """

    def put(self, array: DeviceArray) -> DeviceArray:
        """Return a copy here of an array of the host or of any device."""

    def total(self, arrays: Sequence[DeviceArray]) -> DeviceArray:
        """Return the sum of at least one array of one shape and dtype as a new array here, added from first to last.

        The arrays may be on other devices. 16-bit floats are added in float32, and the sum rounded once.
        """

    def add(self, into: DeviceArray, array: DeviceArray) -> None:
        """Add an array of the same shape and dtype, which may be on another device, to one that is here."""

    def sum(self, parts: Sequence[DeviceArray], out: DeviceArray) -> None:
        """Write the sum of flat arrays of one length into `out`, all of them here, added from first to last.

        Arguments:
            parts: each in the dtype of `out`, or in its work dtype (float32 for 16-bit floats); only read.
            out: may be one of the parts. 16-bit floats are added in float32, and the sum rounded once.
        """

    def split(self, size: int, work: Callable[[slice], None]) -> None:
        """Call `work` with slices that make up range(size): with one, or on several threads where that pays."""

    def elements(self, frame: Buffer, dtype: DType) -> DeviceArray:
        """Return the elements of bytes that came from another process: flat, not to be written.

        cpu devices look into the bytes, which have to stay as they are meanwhile; GPUs take a copy.
        """

    def frame(self, array: DeviceArray) -> Buffer:
        """Return the bytes of a flat array that is here, to be sent; valid until the array is written.

        Of cpu devices they are the array's memory, of GPUs a copy.
        """

    def scale(self, array: DeviceArray, factor: float) -> None:
        """Multiply an array that is here; 16-bit floats in float32, rounded once."""

    def host(self, array: DeviceArray) -> Array:
        """Return an array that is here as a numpy array: its own memory on cpu devices, else a copy."""

    def read(self, array: DeviceArray, out: Array) -> None:
        """Copy an array that is here into a numpy array of the same shape and dtype, of any strides."""


class ArrayPlace(NamedTuple):
    """Where an array is referred to."""

    array: DeviceArray
    put: Callable[[DeviceArray], None]
    """Refers to another array in its place. Never fails."""
    is_sent: bool = False
    """As for `Device.empty`."""


def move(places: Iterable[ArrayPlace], device: Device) -> None:
    """Have arrays on another device: all of them, or none if a call fails.

    Raises:
        KVError: a call of a GPU failed, as when its memory is full. Nothing has changed.
    """
    every, made = list(places), list[DeviceArray]()
    try:
        for each in every:
            made.append(device.empty(each.array.shape, each.array.dtype, is_sent=each.is_sent))
        for at, each in enumerate(every):
            copy(each.array, made[at])
    except BaseException:
        made.clear()  # keeping the error does not keep their memory
        raise
    for each, new in zip(every, made, strict=True):
        each.put(new)
