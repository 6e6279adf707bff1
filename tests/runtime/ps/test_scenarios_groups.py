"""Jobs on every path whose stores are shared by some of the workers: groups that overlap and end at different times."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import DEADLINE_S, Cluster, open_store

from distrun_runtime.errors import KVError, PeerLost

pytestmark = pytest.mark.usefixtures("engine", "server_device")

Job = Callable[..., Cluster]

PAIRS = {"even": [0, 2], "odd": [1, 3]}


def full(value: float, count: int = 4) -> Any:
    return np.full(count, value, np.float32)


def pulled(kv: Any, key: Any = "w", count: int = 4) -> list[float]:
    out = full(-1, count)
    kv.pull(key, out)
    return out.tolist()


def of_pair(session: Any, type_name: str = "dist_sync", **how: Any) -> Any:
    """Return the store of the pair that a worker of four is in."""
    name = ("even", "odd")[session.rank % 2]
    return open_store(type_name, session, group=name, members=PAIRS[name], **how)


def test_each_group_has_ranks_rounds_and_barriers_of_its_own(job: Job) -> None:
    """The pairs run different numbers of rounds, and neither waits for the other."""

    def script(session: Any) -> tuple[int, int, list[int], list[float]]:
        kv = of_pair(session)
        kv.init("w", full(0))
        kv.barrier()
        for number in range(2 + 5 * (session.rank % 2)):
            kv.push("w", full(number + session.rank))
            assert pulled(kv) == [2 * number + sum(kv.members)] * 4
        kv.barrier()
        return kv.rank, kv.num_workers, kv.members, pulled(kv)

    with job(4, 2) as made:
        found = made.run_sessions(script)
    assert found == [
        (0, 2, [0, 2], [4] * 4),
        (0, 2, [1, 3], [16] * 4),
        (1, 2, [0, 2], [4] * 4),
        (1, 2, [1, 3], [16] * 4),
    ]
