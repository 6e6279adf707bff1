"""Device: a place with memory of its own where arrays are kept and added up. What stores and reduction need of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from distrun_runtime.arrays.dtypes import Array, DType

__all__ = ["Device", "DeviceArray"]

DeviceArray = Any
"""An array in a device's memory: numpy's on cpu devices; what another library calls an array elsewhere."""


class Device(Protocol):
    """One device. Its arrays are C-contiguous; sums are made in the order of the arguments.

    Threads: any, but one at a time for an array that is written.
    """

    name: str
    """`cpu:0`."""

    def empty(self, shape: Sequence[int], dtype: DType) -> DeviceArray:
        """Return a new array here, of undefined content."""

    def put(self, array: DeviceArray) -> DeviceArray:
        """Return a copy here of an array of the host or of any device."""

    def total(self, arrays: Sequence[DeviceArray]) -> DeviceArray:
        """Return the sum of at least one array of one shape and dtype as a new array here, added from first to last.

        The arrays may be on other devices. 16-bit floats are added in float32, and the sum rounded once.
        """

    def add(self, into: DeviceArray, array: DeviceArray) -> None:
        """Add an array of the same shape and dtype, which may be on another device, to one that is here."""

    def scale(self, array: DeviceArray, factor: float) -> None:
        """Multiply an array that is here; 16-bit floats in float32, rounded once."""

    def host(self, array: DeviceArray) -> Array:
        """Return an array that is here as a numpy array: its own memory where numpy can see it, else a copy."""

    def read(self, array: DeviceArray, out: Array) -> None:
        """Copy an array that is here into a numpy array of the same shape and dtype, of any strides."""
