"""Jobs on every path: which contributions make up a round, and what a pull of it gets."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("engine", "server_device")

Run = Callable[..., list[Any]]

SHAPES: dict[str, tuple[int, ...]] = {
    **{"a": (2, 3), "b": (50,), "c": (7, 2), "scalar": (), "empty": (0, 3)},
    "wide": (40, 40),
}
KEYS = list(SHAPES)
BOUND = 100
"""Elements from which a value is cut over all servers here: `wide` is."""
MIB = 1 << 20


def full(key: str, value: float) -> Any:
    return np.full(SHAPES[key], value, np.float32)


def zeros(kv: Any, keys: list[str]) -> None:
    kv.init(keys, [full(key, 0) for key in keys])


def pulled(kv: Any, keys: list[str]) -> list[float]:
    """Return the one number that each value consists of; an empty value counts as its key's sum would."""
    outs = [full(key, -1) for key in keys]
    kv.pull(keys, outs)
    return [number_in(out) for out in outs]


def number_in(value: Any) -> float:
    if not value.size:
        return 0.0
    assert value.min() == value.max(), "a value is of one round"
    return float(value.min())


def expected(keys: list[str], value: float) -> list[float]:
    return [value if full(key, 0).size else 0.0 for key in keys]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("rule", [None, "test"])
def test_rounds_are_exact_for_random_groups_in_random_orders(run: Run, rule: str | None, seed: int) -> None:
    """Each worker pushes each key once a round, in groups and an order of its own, with pulls between its pushes.

    It waits for all of them at the end, so that a fast worker is some rounds ahead.
    """
    rounds = 6

    def script(kv: Any) -> None:
        chance = random.Random(100 * seed + kv.rank)
        zeros(kv, KEYS)
        if rule:
            kv.set_optimizer(rule)
        kv.barrier()
        pulls = []
        for step in range(1, rounds + 1):
            left = chance.sample(KEYS, len(KEYS))
            total = 111 * (sum(range(1, step + 1)) if rule else step)
            while left:
                group = [left.pop() for _ in range(min(len(left), chance.randint(1, 3)))]
                kv.push(group, [full(key, 10**kv.rank * step) for key in group])
                if chance.random() < 0.5:
                    outs = [full(key, -1) for key in group]
                    pulls.append((kv.pull(group, outs, wait=False), group, outs, total))
        for pending, group, outs, total in pulls:
            pending.wait()
            assert [number_in(out) for out in outs] == expected(group, total)
        assert pulled(kv, KEYS) == expected(KEYS, 111 * (sum(range(1, rounds + 1)) if rule else rounds))

    run(script, 3, bigarray_bound=BOUND)


def test_a_pull_without_a_push_reads_the_present_and_never_waits(run: Run) -> None:
    def script(kv: Any) -> None:
        zeros(kv, ["a", "b"])
        if kv.rank == 0:
            kv.push("a", full("a", 1))
        kv.barrier()
        if kv.rank == 1:
            assert pulled(kv, ["a", "b"]) == [0, 0]
            kv.push("a", full("a", 10))
        assert pulled(kv, ["b", "a"]) == [0, 11]

    run(script)


@pytest.mark.parametrize("rule", [None, "test"])
@pytest.mark.parametrize("servers", [1, 2])
def test_large_values_are_whole_and_of_their_round_however_late_they_are_read(
    run: Run, servers: int, rule: str | None
) -> None:
    """Values of 5 MiB. Worker 0 leaves its pulls open while later rounds are applied to the same value."""
    rounds, count = 5, 5 * MIB // 4

    def script(kv: Any) -> None:
        kv.init("w", np.zeros(count, np.float32))
        if rule:
            kv.set_optimizer(rule)
        kv.barrier()
        outs, pending = [np.full(count, -1, np.float32) for _ in range(rounds)], []
        for step in range(rounds):
            kv.push("w", np.full(count, 10**kv.rank * (step + 1), np.float32))
            pending.append(kv.pull("w", outs[step], wait=False))
            if kv.rank:
                pending[-1].wait()
        for each in pending:
            each.wait()
        totals = [11.0 * (step + 1) for step in range(rounds)]
        assert [number_in(out) for out in outs] == (np.cumsum(totals).tolist() if rule else totals)

    run(script, 2, servers, bigarray_bound=MIB)


# Workers that join and leave


def test_workers_join_in_the_middle_of_open_rounds(run: Run) -> None:
    """Each has made another number of rounds, without a pull in between; the last pushes of the others count."""

    def script(kv: Any) -> None:
        zeros(kv, ["a", "wide"])
        for step in range(1, 2 + 2 * kv.rank):
            kv.push(["a", "wide"], [full("a", 10**kv.rank * step), full("wide", 10**kv.rank * step)])
        if kv.rank == 2:
            assert pulled(kv, ["a", "wide"]) == [500, 500], "round 5 is worker 2's alone"
        kv.join()
        assert pulled(kv, ["wide", "a"]) == [500, 500]
        kv.push(["a", "wide"], [full("a", 1), full("wide", 1)])
        assert pulled(kv, ["a", "wide"]) == [3, 3], "they begin anew together"

    run(script, 3, bigarray_bound=BOUND)


# Asynchronous stores


def test_async_pushes_of_groups_are_applied_on_arrival_and_none_is_lost(run: Run) -> None:
    rounds = 10

    def script(kv: Any) -> None:
        chance = random.Random(kv.rank)
        zeros(kv, KEYS)
        kv.set_optimizer("test")
        kv.barrier()
        for step in range(1, rounds + 1):
            left = chance.sample(KEYS, len(KEYS))
            while left:
                group = [left.pop() for _ in range(min(len(left), chance.randint(1, 3)))]
                kv.push(group, [full(key, 1) for key in group])
            outs = [full(key, -1) for key in KEYS]
            kv.pull(KEYS, outs)
            assert all(not out.size or out.min() >= step for out in outs), "a pull has at least the caller's pushes"
        kv.barrier()
        assert pulled(kv, KEYS) == expected(KEYS, 3 * rounds)

    run(script, 3, bigarray_bound=BOUND, type_name="dist_async")
