"""Sums on devices, as new arrays and in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def total(device: Any, arrays: Sequence[Any]) -> Any:
    """Return the sum of arrays of one shape and dtype as a new array on a device; they may be on others."""
    result = device.empty(arrays[0].shape, arrays[0].dtype)
    device.sum([array.reshape(-1) for array in arrays], result.reshape(-1))
    return result


def add(device: Any, into: Any, array: Any) -> None:
    """Add an array to one of the same shape and dtype that is on a device."""
    flat = into.reshape(-1)
    device.sum([flat, array.reshape(-1)], flat)
