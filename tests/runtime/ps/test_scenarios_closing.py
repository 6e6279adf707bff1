"""Jobs on every path: what is left of stores that are closed, in workers, servers and the scheduler."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cluster import DEADLINE_S, Cluster, open_store

from distrun_runtime.kvstore import KVStore, RowSparse
from distrun_runtime.ps import agreement

Job = Callable[..., Cluster]
Run = Callable[..., list[Any]]

LONG = 3 * (1 << 18) + 77
"""Elements of a value of several pieces."""


def use(kv: KVStore, rule: str) -> None:
    """Use all that a store remembers something for: buckets, routes, rules, residuals, rows, views, skipped rounds."""
    compressed, keys = rule == "compressed", ["a", "b"]
    if compressed:
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5, "two_way": True})
    elif rule:
        kv.set_optimizer(rule, learning_rate=0.1)
    kv.init([*keys, "rows"], [np.ones(5, np.float32), np.ones(LONG, np.float32), RowSparse.from_dense(np.eye(4))])
    outs = [np.empty(5, np.float32), np.empty(LONG, np.float32)]
    for _ in range(4):
        kv.push(keys, [np.ones_like(out) for out in outs])
        kv.pull(keys, out=outs)
    waiting = [kv.push(key, np.ones_like(out), wait=False) for key, out in zip(keys, outs, strict=True)]
    waiting += [kv.pull(key, out=out, wait=False) for key, out in zip(keys, outs, strict=True)]
    kv.pushpull(keys, outs, out=[np.empty_like(out) for out in outs])
    for each in waiting:
        each.wait()
    kv.push("rows", RowSparse(np.ones((1, 4)), [2], (4, 4)))
    kv.row_sparse_pull("rows", RowSparse.empty((4, 4), "float64"), row_ids=[1, 2])
    with kv.view(keys):
        pass
    kv.skip_round(keys, {}).wait()


def kept() -> Counter[str]:
    """Return how many objects of each of our classes there are in this process, which is the whole job."""
    gc.collect()
    names = ("%s.%s" % (type(each).__module__, type(each).__qualname__) for each in gc.get_objects())
    return Counter(name for name in names if name.startswith("distrun_runtime."))


def until(holds: Callable[[], Any]) -> None:
    """Wait until something is so: servers hear of it a little later."""
    deadline = time.monotonic() + DEADLINE_S / 10
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("rule", "engine", "server_device"),
    [("", "at once", "cpu"), ("lamb", "later", "cpu"), ("compressed", "later", "cpu"), ("adam", "at once", "gpu")],
    indirect=["engine", "server_device"],
)
@pytest.mark.usefixtures("engine", "server_device")
def test_nothing_of_a_store_stays_when_all_its_workers_have_closed_it(job: Job, rule: str) -> None:
    """401 stores of 1.6 MB left 638 MB in a server, and as much in each worker."""
    found: list[Any] = []

    def script(session: Any) -> None:
        held = open_store("dist_sync", session)
        held.init("w", np.ones(3))
        for number in range(6):
            kv = open_store("dist_sync", session)
            use(kv, rule)
            kv.close()
            held.barrier()
            if session.rank == 0 and number == 2:
                until(has_one)
                held.stats()  # As below: what was handled last is a message of this kind.
                found.append(kept())
            if session.rank == 0 and number == 5:
                until(lambda: not grown(held))
                found.append(grown(held))
            held.barrier()

    def has_one() -> bool:
        """Return whether the scheduler knows one store, and the servers no other one."""
        left = made.scheduler._calls._stores
        return len(left) == 1 and all(known.keys() <= left.keys() for known in stores(made))

    def grown(held: KVStore) -> dict[str, int]:
        """Return of what there is more than after three stores: one or more for each store that was closed since."""
        held.stats()  # Whoever has handled a message last still refers to it.
        more = kept() - found[0]
        del more["distrun_runtime.ps.counters._SampledRound"]  # Of the last 20 rounds, whosever they were.
        more["distrun_runtime.transport.base.Arrived"] -= 5  # Each node refers to the event that it handled last.
        # The stand-in of a GPU notes what it was told to do.
        return {name: many for name, many in more.items() if many >= 3 and ".cuda." not in name}

    with job(2, 2) as made:
        made.run_sessions(script)
    assert found[1] == {}


def stores(made: Cluster) -> list[dict[int, Any]]:
    """Return by store what each server and its engine know."""
    loops = [loop for thread, loop in made._loops.items() if thread.name.startswith("server")]
    return [known for loop in loops for known in (loop._role._stores, loop._engine._values)]  # type: ignore[union-attr]


@pytest.mark.parametrize("rule", ["", "lamb", "compressed"])
def test_a_store_whose_number_others_had_before_is_used_as_they_were(
    job: Job, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    monkeypatch.setattr(agreement, "LAST_STORE", agreement.GROUP_STORES + 1)

    def script(session: Any) -> list[tuple[int, int]]:
        held, found = open_store("dist_sync", session), []
        for _ in range(4):
            kv = open_store("dist_sync", session, group="g", members=[0, 1])
            use(kv, rule)
            assert len(kv.stats()) == 2
            found.append((kv._backend._link.store, kv._backend._link.epoch))
            kv.close()
            held.barrier()
            until(lambda: made.scheduler._calls._free)
            held.barrier()
        return found

    with job(2, 2) as made:
        first, second = made.run_sessions(script)
    assert first == second
    assert len(set(first)) == 4
    assert max(epoch for _, epoch in first) >= 1


def test_a_pull_that_was_not_waited_for_when_its_store_was_closed_has_its_value(run_sessions: Run) -> None:
    def script(session: Any) -> Any:
        found = []
        for number in range(20):
            kv = open_store("dist_sync", session)
            kv.init("w", np.full(LONG, number, np.float32))
            pending = kv.pull("w", out=(out := np.zeros(LONG, np.float32)), wait=False)
            kv.close()
            pending.wait()
            found.append(bool((out == number).all()))
        return found

    assert run_sessions(script) == [[True] * 20] * 2
