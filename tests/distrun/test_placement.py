from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrun import placement
from distrun.errors import UsageError
from distrun.hosts import HostSpec, Inventory, named, parse
from distrun.request import JobRequest, Setting

FIVE = named(("h1", "h2", "h3", "h4", "h5"))
THREE = named(("h1", "h2", "h3"))


def place(
    workers: int, servers: int, hosts: Inventory, policy: str = "cycle", relays: bool = False, **more: Any
) -> tuple[placement.Slot, ...]:
    """Place tasks as a request with these members has it. `relays`: workers of one host add first."""
    adds = Setting("DISTRUN_HOST_SUMS", "1" if relays else "0")
    made = JobRequest(("true",), workers, servers, "/", placement=policy, settings=(adds,), **more)
    return placement.place(made, hosts)


def where(slots: tuple[placement.Slot, ...], role: str) -> list[str]:
    return [slot.host for slot in slots if slot.role == role]


def found(text: str) -> Inventory:
    return parse.parse(text, "hosts")


def test_servers_go_first_then_workers_cycling_the_hosts() -> None:
    """The example of the tutorials: five hosts, -n 3, -s as many."""
    slots = place(3, 3, FIVE)
    assert where(slots, "server") == ["h1", "h2", "h3"]
    assert where(slots, "worker") == ["h4", "h5", "h1"]
    assert where(slots, "scheduler") == ["h1"]
    assert [slot.name for slot in slots[:2]] == ["scheduler", "server-0"]


def test_as_many_hosts_as_workers_get_one_of_each() -> None:
    slots = place(3, 3, THREE)
    assert where(slots, "server") == where(slots, "worker") == ["h1", "h2", "h3"]


def test_fewer_hosts_than_workers_go_round() -> None:
    slots = place(5, 5, named(("h1", "h2")))
    assert where(slots, "server") == ["h1", "h2", "h1", "h2", "h1"]
    assert where(slots, "worker") == ["h2", "h1", "h2", "h1", "h2"]


def test_hosts_with_several_workers_and_no_server_get_one_more_that_takes_no_slot() -> None:
    slots = place(7, 1, found("a slots=3\nb slots=3\nc slots=2"), policy="pack", relays=True)
    assert where(slots, "worker") == ["a", "a", "b", "b", "b", "c", "c"]
    assert [(slot.name, slot.host) for slot in slots if slot.role == "server"] == [
        ("server-0", "a"),
        ("server-1", "b"),
        ("server-2", "c"),
    ]


@pytest.mark.parametrize(
    ("workers", "servers", "text"),
    [
        (3, 1, "a\nb\nc"),  # nobody to add to
        (4, 2, "a\nb"),  # a server on each
        (4, 0, "a\nb"),
        (4, 1, "a role=server\nb role=worker"),  # b takes no server
    ],
)
def test_no_other_host_gets_a_server_beyond_those_that_were_asked_for(workers: int, servers: int, text: str) -> None:
    assert len(where(place(workers, servers, found(text), relays=True), "server")) == servers


def test_one_host_takes_all_and_counts_local_ranks_within_the_role() -> None:
    slots = place(3, 2, named(["here"]))
    assert [(s.role, s.rank, s.local_rank, s.local_size) for s in slots] == [
        ("scheduler", 0, 0, 1),
        ("server", 0, 0, 2),
        ("server", 1, 1, 2),
        ("worker", 0, 0, 3),
        ("worker", 1, 1, 3),
        ("worker", 2, 2, 3),
    ]


def test_local_ranks_are_counted_on_each_host() -> None:
    slots = place(5, 0, named(["a", "b"]))
    assert [(s.host, s.local_rank, s.local_size) for s in slots] == [
        ("a", 0, 3),
        ("b", 0, 2),
        ("a", 1, 3),
        ("b", 1, 2),
        ("a", 2, 3),
    ]


def test_a_host_that_stands_twice_takes_two_turns_but_is_one_host() -> None:
    inventory = found("a\na\nb\n")
    slots = place(4, 0, inventory)
    assert where(slots, "worker") == ["a", "a", "b", "a"]
    assert placement.hosts_of(slots, inventory.order) == ("a", "b")


def test_the_cycle_does_not_look_at_slots() -> None:
    assert where(place(4, 0, found("a slots=3\nb slots=1\n")), "worker") == ["a", "b", "a", "b"]


def test_hosts_without_a_task_are_not_of_the_job() -> None:
    slots = place(1, 1, FIVE)
    assert placement.hosts_of(slots, FIVE.order) == ("h1", "h2")


def test_the_scheduler_host_is_one_of_the_hosts() -> None:
    assert where(place(1, 1, FIVE, scheduler_host="h4"), "scheduler") == ["h4"]
    with pytest.raises(UsageError, match="'h9' is none of the job's hosts: h1, h2, h3"):
        place(1, 1, THREE, scheduler_host="h9")


@pytest.mark.parametrize("policy", ["cycle", "pack", "spread"])
def test_the_scheduler_goes_to_a_host_of_its_own_takes_no_slot_and_can_be_moved(policy: str) -> None:
    inventory = found("a slots=2\ns role=scheduler\n")
    slots = place(1, 1, inventory, policy=policy)
    assert where(slots, "scheduler") == ["s"]
    assert where(slots, "server") == where(slots, "worker") == ["a"]
    assert where(place(1, 1, inventory, policy=policy, scheduler_host="a"), "scheduler") == ["a"]
    assert where(place(1, 1, found("a slots=2"), policy=policy), "scheduler") == ["a"]


@pytest.mark.parametrize("policy", ["cycle", "pack", "spread"])
def test_no_hosts_is_an_error(policy: str) -> None:
    with pytest.raises(UsageError, match="no host"):
        place(1, 0, named([]), policy=policy)


def test_an_unknown_policy_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(UsageError, match="--placement: expected cycle or pack or spread, found 'random'"):
        place(1, 0, FIVE, policy="random")


def test_in_the_cycle_a_turn_goes_to_the_next_line_that_takes_the_role() -> None:
    inventory = found("s1 role=server\nw1 role=worker\nw2 role=worker\n")
    slots = place(3, 2, inventory)
    assert where(slots, "server") == ["s1", "s1"]
    assert where(slots, "worker") == ["w1", "w2", "w1"]
    mixed = place(3, 2, found("a\ncpu role=server\nb\n"))
    assert where(mixed, "server") == ["a", "cpu"]
    assert where(mixed, "worker") == ["b", "a", "b"]


@pytest.mark.parametrize("policy", ["cycle", "pack", "spread"])
def test_a_role_that_no_host_takes_is_an_error(policy: str) -> None:
    with pytest.raises(UsageError, match="no host takes a server") as caught:
        place(1, 1, found("w role=worker"), policy=policy)
    assert "role=server" in caught.value.hint
    assert where(place(1, 0, found("w role=worker"), policy=policy), "worker") == ["w"]


def test_pack_fills_a_host_before_the_next() -> None:
    slots = place(4, 2, found("a slots=4\nb slots=4\n"), policy="pack")
    assert where(slots, "server") == ["a", "a"]
    assert where(slots, "worker") == ["a", "a", "b", "b"]


def test_spread_gives_one_to_each_host_as_slots_allow() -> None:
    slots = place(5, 1, found("a slots=1\nb slots=3\nc slots=2\n"), policy="spread")
    assert where(slots, "server") == ["a"]
    assert where(slots, "worker") == ["b", "c", "b", "c", "b"]


def test_without_slots_a_host_has_as_many_as_its_gpus_are_enough_for() -> None:
    inventory = found("a gpus=5\nb gpus=2\nc gpus=1\n")
    slots = place(4, 0, inventory, policy="pack", gpus_per_worker=2)
    assert [slot.host for slot in slots if slot.role == "worker"] == ["a", "a", "b", "c"]
    assert placement.notes(inventory, "pack", 2)[0] == "--placement pack: no slots= for a: taken as 2"


def test_without_slots_a_host_has_as_many_as_gpus_else_one_and_that_is_told() -> None:
    inventory = found("a gpus=2\nb gpus=0,3,5\nc\nd slots=1 gpus=8\n")
    slots = place(7, 0, inventory, policy="pack")
    assert where(slots, "worker") == ["a", "a", "b", "b", "b", "c", "d"]
    assert placement.notes(inventory, "pack") == (
        "--placement pack: no slots= for a: taken as 2",
        "--placement pack: no slots= for b: taken as 3",
        "--placement pack: no slots= for c: taken as 1",
    )
    assert placement.notes(found("h[1-4]"), "spread") == ("--placement spread: no slots= for h[1-4]: taken as 1 each",)
    assert placement.notes(inventory, "cycle") == ()


def test_a_role_uses_its_own_hosts_before_those_that_take_any() -> None:
    """Else the servers of this job would fill the only hosts that the workers may use."""
    inventory = found("any slots=2\ncpu slots=2 role=server\n")
    for policy in ("pack", "spread"):
        slots = place(2, 2, inventory, policy=policy)
        assert where(slots, "server") == ["cpu", "cpu"]
        assert where(slots, "worker") == ["any", "any"]


@pytest.mark.parametrize("policy", ["pack", "spread"])
def test_too_few_slots_is_e115_with_the_arithmetic(policy: str) -> None:
    with pytest.raises(UsageError) as caught:
        place(4, 2, found("d1 slots=2\nd2 slots=2\n"), policy=policy)
    assert str(caught.value) == (
        "E115: 4 worker + 2 server processes need 6 slots, hosts offer 4 (d1:2 d2:2). "
        "Add hosts, lower -n/-s, or pass --oversubscribe"
    )


def test_e115_counts_no_servers_where_there_are_none() -> None:
    with pytest.raises(UsageError, match="E115: 6 worker processes need 6 slots"):
        place(6, 0, found("d1 slots=2\nd2 slots=2\n"), policy="pack")


def test_e115_says_what_roles_leave() -> None:
    with pytest.raises(UsageError) as caught:
        place(3, 2, found("d1 slots=2\ns1 slots=8 role=server\nk role=scheduler slots=9\n"), policy="pack")
    assert "need 5 slots, hosts offer 4 that these roles can use (d1:2, s1:8 for a server)." in str(caught.value)


def test_e115_does_not_list_a_thousand_hosts() -> None:
    with pytest.raises(UsageError, match=r"h0015:1 \.\.\. 984 more\)"):
        place(2000, 0, found("h[0000-0999]"), policy="pack")


def test_oversubscribed_hosts_take_turns_up_to_their_most() -> None:
    inventory = found("a slots=2\nb slots=1\n")
    assert where(place(6, 0, inventory, policy="pack", oversubscribe=True), "worker") == list("aabaab")
    assert where(place(6, 0, inventory, policy="spread", oversubscribe=True), "worker") == list("abaaba")
    bounded = found("a slots=2 max_slots=3\nb slots=1 max_slots=2\n")
    assert sorted(where(place(5, 0, bounded, policy="pack", oversubscribe=True), "worker")) == list("aaabb")
    with pytest.raises(UsageError, match=re.escape("need 6 slots, hosts offer 5 (a:3 b:2)")):
        place(6, 0, bounded, policy="pack", oversubscribe=True)


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    specs = []
    for index in range(draw(st.integers(1, 5))):
        slots = draw(st.none() | st.integers(1, 4))
        most = draw(st.none() | st.integers(slots or 1, 6))
        role = draw(st.sampled_from(["", "", "server", "worker", "scheduler"]))
        specs.append(HostSpec("h%d" % index, slots=slots, max_slots=most, role=role))
    return Inventory("hosts", tuple(specs), tuple(spec.name for spec in specs))


@settings(deadline=None)
@given(inventories(), st.integers(1, 8), st.integers(0, 8), st.sampled_from(["pack", "spread"]), st.booleans())
def test_all_tasks_are_placed_within_slots_and_roles_or_refused_rightly(
    inventory: Inventory, workers: int, servers: int, policy: str, oversubscribe: bool
) -> None:
    most = {
        spec.name: (spec.max_slots or 99) if oversubscribe else placement.capacity(spec) for spec in inventory.specs
    }
    room = {
        role: sum(most[spec.name] for spec in inventory.specs if spec.role == role) for role in ("", "server", "worker")
    }
    if max(0, workers - room["worker"]) + max(0, servers - room["server"]) > room[""]:
        with pytest.raises(UsageError, match=r"E115|no host takes"):
            place(workers, servers, inventory, policy=policy, oversubscribe=oversubscribe)
        return
    slots = place(workers, servers, inventory, policy=policy, oversubscribe=oversubscribe)
    assert len(where(slots, "worker")) == workers
    assert len(where(slots, "server")) == servers
    for spec in inventory.specs:
        here = [slot for slot in slots if slot.host == spec.name and slot.role != "scheduler"]
        assert len(here) <= most[spec.name]
        assert all(placement.takes(spec, slot.role) for slot in here)


def test_local_ranks_count_within_a_place() -> None:
    tasks = [("worker", 0, "a", "7"), ("worker", 1, "a", "8"), ("worker", 2, "a", "8"), ("worker", 3, "b", "")]
    slots = placement.slots_in(tasks)
    assert [(slot.place, slot.local_rank, slot.local_size) for slot in slots] == [
        ("7", 0, 1),
        ("8", 0, 2),
        ("8", 1, 2),
        ("b", 0, 1),
    ]
