from __future__ import annotations

import pytest

from distrun import placement
from distrun.errors import UsageError

FIVE = ("h1", "h2", "h3", "h4", "h5")


def where(slots: tuple[placement.Slot, ...], role: str) -> list[str]:
    return [slot.host for slot in slots if slot.role == role]


def test_servers_go_first_then_workers_cycling_the_hosts() -> None:
    """The example of seed 001: five hosts, -n 3, -s as many."""
    slots = placement.place(3, 3, FIVE)
    assert where(slots, "server") == ["h1", "h2", "h3"]
    assert where(slots, "worker") == ["h4", "h5", "h1"]
    assert where(slots, "scheduler") == ["h1"]
    assert [slot.name for slot in slots[:2]] == ["scheduler", "server-0"]


def test_as_many_hosts_as_workers_get_one_of_each() -> None:
    slots = placement.place(3, 3, FIVE[:3])
    assert where(slots, "server") == where(slots, "worker") == ["h1", "h2", "h3"]


def test_one_host_takes_all_and_counts_local_ranks_within_the_role() -> None:
    slots = placement.place(3, 2, ["here"])
    assert [(s.role, s.rank, s.local_rank, s.local_size) for s in slots] == [
        ("scheduler", 0, 0, 1),
        ("server", 0, 0, 2),
        ("server", 1, 1, 2),
        ("worker", 0, 0, 3),
        ("worker", 1, 1, 3),
        ("worker", 2, 2, 3),
    ]


def test_local_ranks_are_counted_on_each_host() -> None:
    slots = placement.place(5, 0, ["a", "b"], scheduler=False)
    assert [(s.host, s.local_rank, s.local_size) for s in slots] == [
        ("a", 0, 3),
        ("b", 0, 2),
        ("a", 1, 3),
        ("b", 1, 2),
        ("a", 2, 3),
    ]


def test_a_host_that_stands_twice_takes_two_turns_but_is_one_host() -> None:
    slots = placement.place(4, 0, ["a", "a", "b"], scheduler=False)
    assert where(slots, "worker") == ["a", "a", "b", "a"]
    assert placement.hosts_of(slots, ["a", "a", "b"]) == ("a", "b")


def test_hosts_without_a_task_are_not_of_the_job() -> None:
    slots = placement.place(1, 1, FIVE)
    assert placement.hosts_of(slots, FIVE) == ("h1", "h2")


def test_groups_of_workers_begin_with_the_host_of_worker_0() -> None:
    assert placement.worker_hosts(placement.place(3, 3, FIVE)) == ("h4", "h5", "h1")


def test_the_scheduler_host_is_one_of_the_hosts() -> None:
    assert where(placement.place(1, 1, FIVE, scheduler_host="h4"), "scheduler") == ["h4"]
    with pytest.raises(UsageError, match="'h9' is none of the job's hosts: h1, h2"):
        placement.place(1, 1, FIVE[:2], scheduler_host="h9")


def test_no_hosts_is_an_error() -> None:
    with pytest.raises(UsageError, match="no host"):
        placement.place(1, 0, [])
