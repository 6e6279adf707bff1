"""Metrics over all workers: the mean of a value, and whether a condition holds on any or on all of them.

Each call is collective, and its result is the same on all workers: they can decide by it, such as to stop early.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np
import torch

from distrun_runtime.torch.job import store


def mean(x: Any, weight: float | None = None) -> Any:
    """Return the mean of a value over the workers.

    Arguments:
        x: a number; or a tensor of any dtype and of the same shape on all workers, averaged element by element.
        weight: how much this worker's value counts, from 0, such as the number of examples that it is the mean of; at 0
            the value may be nan. None: all count alike. Either all workers give a weight, or none does.

    Returns:
        A float for a number. For a tensor, a new one on its device, without a graph: of its dtype, or float64 if that
        is not a floating-point type.

    Raises:
        TypeError: neither a number nor a tensor, or a complex one.
        ValueError: on all workers, a weight that is no finite number from 0, or weights that are all 0.
    """
    value = _tensor(x)
    if value.is_complex():
        raise TypeError(f"expected real numbers, found {value.dtype}")
    if not value.is_floating_point():
        value = value.double()
    if weight is None:
        return _like(x, store().allreduce(value, op="mean"))
    # A sum of weighted halves may be too large for one.
    exact = torch.promote_types(value.dtype, torch.float32)
    weighted = value.to(exact) * weight if weight else torch.zeros_like(value, dtype=exact)
    sent = weight if 0 <= weight < math.inf else math.nan  # so that all workers raise
    parts = [weighted, torch.tensor([sent], dtype=torch.float64, device=value.device)]
    total, weights = store().allreduce(parts)
    if not weights > 0:
        raise ValueError(f"weights are finite numbers from 0, and not all are 0; this worker's is {weight!r}")
    return _like(x, (total / weights).to(value.dtype))


def any(x: Any) -> Any:
    """Return whether x is true on any worker: a bool for a number or a bool, for a tensor a bool tensor of its shape.

    Raises:
        TypeError: neither a number nor a tensor.
    """
    return _like(x, store().allreduce(_tensor(x).bool(), op="max"))


def all(x: Any) -> Any:
    """Return whether x is true on all workers: a bool for a number or a bool, for a tensor a bool tensor of its shape.

    Raises:
        TypeError: neither a number nor a tensor.
    """
    return _like(x, store().allreduce(_tensor(x).bool(), op="min"))


def _tensor(x: Any) -> torch.Tensor:
    """Return a value as a tensor of at least one axis, without a graph."""
    if isinstance(x, torch.Tensor):
        return torch.atleast_1d(x.detach())
    if isinstance(x, (bool, np.bool_)):
        return torch.tensor([bool(x)])
    if isinstance(x, numbers.Real):
        return torch.tensor([float(x)], dtype=torch.float64)
    raise TypeError(f"expected a number or a tensor, found {x!r:.60}, a {type(x).__name__}")


def _like(x: Any, result: torch.Tensor) -> Any:
    """Return a result as a number or in the tensor's shape."""
    return result.reshape(x.shape) if isinstance(x, torch.Tensor) else result.item()
