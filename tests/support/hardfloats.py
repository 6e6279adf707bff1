"""Numbers at which arithmetic on floats goes wrong, if it does."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BITS = [0, 1, 0x007FFFFF, 0x00800000, 0x38800000, 0x387FFFFF, 0x3F000000, 0x477FEFFF, 0x477FF000, 0x47800000]
SPECIAL = [*BITS, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x3EFFFFFF, 0x3F000001]
"""Bits of float32: zero, subnormal numbers, limits of float16, the threshold 0.5 and its neighbours, infinity, NaN."""


def floats(n: int, seed: int, finite: bool = True) -> Array:
    """Return numbers of any bits, ordinary ones near the threshold 0.5, and special ones, of both signs."""
    rng = np.random.default_rng(seed)
    special = np.array(SPECIAL, np.uint32)
    special = np.concatenate([special, special | np.uint32(0x80000000)]).view(np.float32)
    values = np.concatenate([
        rng.integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32),
        rng.normal(0, 0.5, n).astype(np.float32),
        rng.choice(special, n),
    ])  # fmt: skip
    if finite:
        values = values[np.abs(values) < 1e30]
    return rng.permutation(values)[:n]
