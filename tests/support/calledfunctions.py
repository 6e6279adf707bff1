"""Functions that tests launch."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np

from distrun_runtime import kvstore


def described(value: Any, *, factor: float = 1.0) -> dict[str, Any]:
    print("half a line", end="")
    rank = int(os.environ["DISTRUN_RANK"])
    large = np.full(300_000, rank, np.float32) + np.random.default_rng(rank).random(300_000, np.float32)
    return {"rank": rank, "value": value * factor, "large": large, "none": None, "pair": (1, b"\0")}


def summed(value: np.ndarray[Any, Any]) -> float:
    kv = kvstore.create("dist_sync")
    kv.init(0, np.zeros_like(value))
    kv.push(0, value)
    out = np.empty_like(value)
    kv.pull(0, out)
    return float(out.sum())


def failing(rank: int) -> None:
    if int(os.environ["DISTRUN_RANK"]) == rank:
        raise ValueError("no\nsuch number")
    kvstore.create("dist_sync").barrier()


def ends(code: int) -> None:
    os._exit(code)


def odd() -> object:
    return {1, 2}


def nested() -> Any:
    def inner() -> None: ...

    return inner


bound = functools.partial(ends, 3)
