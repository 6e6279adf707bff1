"""What every round script shares: the numbers that it sends, and the line that it prints for `benchmarks/round.py`."""

from __future__ import annotations

import json
from typing import List, Sequence, Tuple

WARM_UP = 6
"""Rounds at the beginning that are not counted: buffers and connections are made in them. A server of ours may need a
further copy of all values in any of the first five."""
KINDS = 7


def sent(key: int, rank: int, number: int) -> float:
    """Return all elements of a rank's gradient of a key in a round; small enough that float32 adds them exactly."""
    return float((key % KINDS + 1) * number * (rank + 1))


def summed(key: int, workers: int, number: int) -> float:
    """Return all elements of the sum of these gradients."""
    return float((key % KINDS + 1) * number * (workers * (workers + 1) // 2))


def report(system: str, model: str, rank: int, times: List[float], moved: Sequence[float] = (), **facts: float) -> None:
    """Print one JSON line: the seconds of each round of this rank after the warm-up.

    Arguments:
        moved: bytes a round that went out of this rank's host and came in (`link_bytes`), if they were counted.
        facts: what else was found, by name.
    """
    line = {"system": system, "model": model, "rank": rank, "times_s": times[WARM_UP:], **facts}
    if moved:
        line["moved"] = list(moved)
    print(json.dumps(line), flush=True)


def link_bytes() -> Tuple[int, int]:
    """Return the bytes that this host has sent and received so far over its links to others, headers included."""
    with open("/proc/net/dev") as file:
        rows = [line.partition(":") for line in file if ":" in line]
    numbers = [fields.split() for name, _, fields in rows if name.strip() != "lo"]
    return sum(int(each[8]) for each in numbers), sum(int(each[0]) for each in numbers)


def moved_since(begun: Tuple[int, int], rounds: int) -> List[float]:
    """Return the bytes a round that went out of this host and came in since `link_bytes` gave `begun`."""
    out, into = link_bytes()
    return [(out - begun[0]) / rounds, (into - begun[1]) / rounds]
