"""How far the workers of an asynchronous store are."""

from __future__ import annotations

from distrun_runtime.ps.clocks import Clock


def test_staleness_is_the_number_of_updates_since_the_workers_last_pull() -> None:
    clock = Clock()
    assert clock.push(0, 1) == 0, "nobody has changed the initial value"
    clock.updates += 1
    assert clock.push(1, 1) == 1
    clock.updates += 1
    clock.pull(0)
    assert (clock.push(0, 2), clock.push(1, 2)) == (0, 2)


def test_who_is_behind_is_counted_in_pushes() -> None:
    clock = Clock()
    clock.push(0, 3)
    clock.push(1, 1)
    assert clock.behind(2, range(3)) == [1, 2]
    assert clock.behind(0, range(3)) == []
    assert clock.most() == 3


def test_a_repeated_push_does_not_set_a_worker_back() -> None:
    clock = Clock()
    clock.push(0, 3)
    clock.push(0, 2)
    assert clock.pushed == {0: 3}


def test_when_all_are_level_each_is_where_the_farthest_was() -> None:
    clock = Clock()
    clock.level(range(2))
    assert clock.pushed == {}
    clock.push(1, 4)
    clock.level(range(2))
    assert clock.pushed == {0: 4, 1: 4}
