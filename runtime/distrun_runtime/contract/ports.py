"""Which ports a range names, and in which order they are tried. No side effects but random numbers."""

from __future__ import annotations

import os
from typing import List, Tuple

from distrun_runtime.errors import ContractError


def ports_to_try(port_range: str) -> List[int]:
    """Return the ports to try, from a random one on; [0] (any) for an empty range.

    Raises:
        ContractError: not A-B with 1 <= A <= B <= 65535.
    """
    if not port_range.strip():
        return [0]
    low, high = _bounds(port_range)
    # Jobs that start together should not all try the same ports first.
    first = int.from_bytes(os.urandom(2), "big") % (high - low + 1)
    return list(range(low + first, high + 1)) + list(range(low, low + first))


def _bounds(port_range: str) -> Tuple[int, int]:
    first, dash, last = port_range.partition("-")
    try:
        low, high = int(first), int(last if dash else first)
    except ValueError:
        low, high = 0, 0
    if not 1 <= low <= high <= 65535:
        raise ContractError(f"port range {port_range!r}: expected A-B with 1 <= A <= B <= 65535")
    return low, high
