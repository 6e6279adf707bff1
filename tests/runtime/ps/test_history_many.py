"""A server by scripted histories, with so many workers that it does not look at all of them at each push."""

from __future__ import annotations

import random

import pytest
from history_server import History, said, values

from distrun_runtime.protocol.message import Kind
from distrun_runtime.ps.shards import MANY

WORKERS = MANY + 6


@pytest.mark.parametrize("seed", [1, 2])
def test_each_round_is_over_with_its_last_push_in_whatever_order_they_come(seed: int) -> None:
    chance = random.Random(seed)
    with History(workers=WORKERS) as server:
        for number in (1, 2, 3):
            order = chance.sample(range(WORKERS), WORKERS)
            late = chance.sample(order[:-1], 10)
            for rank in order[:-1]:
                server.push(rank, number, {"a": [rank, 1]} if rank in late else {"a": [rank, 1], "b": [1, 1]})
            assert server.rounds() == {"a": number - 1, "b": number - 1}
            server.push(order[-1], number, {"b": [1, 1], "a": [order[-1], 1]})
            assert server.rounds() == {"a": number, "b": number - 1}
            for rank in late:
                server.push(rank, number, {"b": [1, 1]})
            assert server.rounds() == {"a": number, "b": number}
            wanted = {"a": [sum(range(WORKERS)), WORKERS], "b": [WORKERS, WORKERS]}
            assert values(server.pull(0, number, "a", "b")) == wanted


def test_a_round_whose_last_worker_leaves_is_over() -> None:
    with History(workers=WORKERS) as server:
        for number in (1, 2):
            for rank in range(WORKERS - number):
                server.push(rank, number, {"a": [1, 1]})
            assert server.rounds()["a"] == number - 1
            server.leave(WORKERS - number)
            assert server.rounds()["a"] == number


def test_all_that_wait_are_told_the_same_every_30_seconds() -> None:
    with History(workers=WORKERS) as server:
        for rank in range(WORKERS - 20):
            server.push(rank, 1, {"a": [1, 1]})
            assert server.pull(rank, 1) == []
        told = {}
        for now in (1.9, 2.0, 2.1, 31.9, 32.0):
            server.now = now
            told[now] = server.step()
        assert {now: len(sent) for now, sent in told.items()} == {1.9: 0, 2.0: 50, 2.1: 0, 31.9: 0, 32.0: 50}
        assert set(said(told[2.0])) == {"w%d WAITING" % rank for rank in range(50)}
        assert {sent.kind for sent in told[32.0]} == {Kind.WAITING}
        names = ", ".join("worker-%d" % rank for rank in range(50, 66))
        assert {sent.body["text"] for sent in told[2.0]} == {"waiting for %s and 4 more, key a, round 1" % names}
