"""What every round script shares: the numbers that it sends, and the line that it prints for `benchmarks/round.py`."""

from __future__ import annotations

import json
from typing import List

WARM_UP = 2
"""Rounds at the beginning that are not counted: buffers and connections are made in them."""
KINDS = 7


def sent(key: int, rank: int, number: int) -> float:
    """Return all elements of a rank's gradient of a key in a round; small enough that float32 adds them exactly."""
    return float((key % KINDS + 1) * number * (rank + 1))


def summed(key: int, workers: int, number: int) -> float:
    """Return all elements of the sum of these gradients."""
    return float((key % KINDS + 1) * number * (workers * (workers + 1) // 2))


def report(system: str, model: str, rank: int, times: List[float]) -> None:
    """Print one JSON line: the seconds of each round of this rank after the warm-up."""
    print(json.dumps({"system": system, "model": model, "rank": rank, "times_s": times[WARM_UP:]}), flush=True)
