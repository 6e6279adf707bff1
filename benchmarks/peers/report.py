"""The line that every round script prints, so that `benchmarks/round.py` can set them side by side."""

from __future__ import annotations

import json
import statistics
from typing import List

WARM_UP = 2
"""Rounds at the beginning that are not counted: buffers and connections are made in them."""


def report(system: str, model: str, workers: int, bytes_moved: int, times: List[float]) -> None:
    """Print one JSON line: median and minimum seconds of a round after the warm-up, and GB/s of payload."""
    counted = times[WARM_UP:]
    median = statistics.median(counted)
    line = {
        "system": system,
        "model": model,
        "workers": workers,
        "median_s": median,
        "min_s": min(counted),
        "GBps": bytes_moved / median / 1e9,
    }
    print(json.dumps(line), flush=True)
