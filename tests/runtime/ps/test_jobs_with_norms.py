"""Rules that need norms of whole values, in whole jobs: the servers talk to each other and nobody waits for ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cluster import run_job

from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore

pytestmark = pytest.mark.usefixtures("placement")
SHARD_BYTES = 80

SIZE = 60


def ramp() -> Any:
    return np.arange(1, SIZE + 1, dtype=np.float32)


def pulled(kv: KVStore, key: str = "w") -> Any:
    out = np.empty(SIZE, np.float32)
    kv.pull(key, out)
    return out


@pytest.mark.parametrize("over", ["inproc", "zmq"])
@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_a_value_on_three_servers_moves_as_on_one(name: str, over: str) -> None:
    def script(kv: KVStore) -> Any:
        kv.init(["w", "b"], [ramp(), np.ones(4, np.float32)])
        kv.set_optimizer(name, learning_rate=0.5, wd=0.01)
        for step in range(4):
            kv.push(["w", "b"], [ramp() * (kv.rank + step), np.ones(4, np.float32)])
            value = pulled(kv)
        return value

    found = []
    for servers in (1, 3):
        one, other = run_job(script, 2, servers, bigarray_bound=10, over=over)
        assert (one == other).all()
        found.append(one)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
    assert not (found[0] == ramp()).any()


def test_after_a_barrier_all_workers_see_all_asynchronous_pushes() -> None:
    def script(kv: KVStore) -> Any:
        kv.init("w", ramp())
        kv.set_optimizer("lars", learning_rate=0.5)
        kv.barrier()
        for _ in range(10):
            kv.push("w", ramp())
        kv.barrier()
        return pulled(kv), sum(facts["updates"] for facts in kv.stats())

    found = run_job(script, 3, 3, type_name="dist_async", bigarray_bound=10)
    assert [updates for _, updates in found] == [90] * 3
    assert all((value == found[0][0]).all() for value, _ in found)


@pytest.mark.parametrize("type_name", ["dist_sync", "dist_async"])
def test_rules_that_change_while_pushes_are_under_way_hold_nobody_up(type_name: str) -> None:
    """A round may be applied by one rule here and by another there; then it fails, and says why."""

    def script(kv: KVStore) -> list[str]:
        kv.init("w", ramp())
        kv.set_optimizer("lars", learning_rate=0.01)
        kv.barrier()
        failures = []
        for step in range(10):
            if kv.rank == 0:
                kv.set_optimizer(("sgd", "lars")[step % 2], learning_rate=0.01, replace=True)
            for _ in range(6):
                try:
                    kv.push("w", ramp())
                    if kv.rank:
                        pulled(kv)
                except KVError as err:
                    failures.append(str(err))
        return failures

    failures = [
        text for each in run_job(script, 3, 3, type_name=type_name, bigarray_bound=10, over="zmq") for text in each
    ]
    assert all("the rule was changed" in text for text in failures), failures
