"""The sum of one value's arrays: one for each device of a worker, or one for each worker of a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
"""A numpy array of any shape and dtype."""


def total(values: Sequence[Array]) -> Array:
    """Return the sum of at least one array as a new C-contiguous array, added from first to last.

    Arguments:
        values: arrays of one shape and one dtype, in any memory order; they are only read.

    Returns:
        An array of exactly that shape and dtype. Integers wrap around as numpy's do; floats become inf.
    """
    result = np.array(values[0], order="C", copy=True)
    # An overflowing half-precision gradient is the training's affair (loss scaling looks for inf): no warning here.
    with np.errstate(over="ignore", invalid="ignore"):
        for value in values[1:]:
            np.add(result, value, out=result)
    return result
