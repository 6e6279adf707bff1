"""What all workers do together, by scripted histories of the scheduler: keys, stores, errors of one for all."""

from __future__ import annotations

from typing import Any

import pytest
from schedulerhistory import Job, init, reasons, record, sends, to

from distrun_runtime.net.message import Kind
from distrun_runtime.node import role


def keys(job: Job, number: int, *records: Any, **more: Any) -> list[role.Action]:
    """Declare keys in all workers; return what follows from the last one's call."""
    actions: list[role.Action] = []
    for rank in range(job.counts["workers"]):
        actions = job.hear("w%d" % rank, Kind.KEYS, number=number, records=list(records), **more)
    return actions


# Stores


def test_stores_of_different_staleness_are_an_error_that_names_both() -> None:
    job = Job()
    job.hear("w0", Kind.OPEN, number=1, type="dist_async", staleness=2)
    actions = job.hear("w1", Kind.OPEN, number=1, type="dist_async", staleness=None)
    text = "worker-0 creates a 'dist_async' store with staleness=2 where worker-1 creates a 'dist_async' store"
    assert reasons(actions) == {"w0": text, "w1": text}


def test_stores_of_equal_staleness_are_one() -> None:
    job = Job()
    job.hear("w0", Kind.OPEN, number=1, type="dist_async", staleness=0)
    assert to(job.hear("w1", Kind.OPEN, number=1, type="dist_async", staleness=0)) == [("w0", "OPEN"), ("w1", "OPEN")]


# Records


@pytest.mark.parametrize(
    ("name", "mine", "theirs", "text"),
    [
        ("stype", "default", "row_sparse", "shape (2, 3) float32, worker-1 has shape (2, 3) float32, row_sparse"),
        ("codec", "2bit", "", "shape (2, 3) float32, codec 2bit, worker-1 has shape (2, 3) float32"),
        ("codec", "1bit", "2bit", "codec 1bit, worker-1 has shape (2, 3) float32, codec 2bit"),
    ],
)
def test_storage_and_codec_of_a_key_are_compared(name: str, mine: str, theirs: str, text: str) -> None:
    job = Job()
    job.hear("w0", Kind.KEYS, number=1, records=[{**record("w"), name: mine}])
    actions = job.hear("w1", Kind.KEYS, number=1, records=[{**record("w"), name: theirs}])
    assert text in reasons(actions)["w0"]


# A failed init


def test_a_key_whose_values_did_not_reach_the_servers_can_be_initialised_again() -> None:
    """It was "initialised before" for ever."""
    job = Job()
    keys(job, 1, record("w"))
    job.hear("w0", Kind.INIT, number=1, error="no room")
    assert to(keys(job, 2, record("w"))) == [("w0", "KEYS")]
    assert to(job.hear("w0", Kind.INIT, number=2)) == [("w0", "INIT"), ("w1", "KEYS")]
    assert reasons(job.hear("w0", Kind.KEYS, number=3, records=[record("w")])) == {
        "w0": "key 'w' was initialised before"
    }


def test_the_number_of_a_key_whose_init_failed_is_not_given_again() -> None:
    """A server may hold pieces under it."""
    job = Job(1)
    keys(job, 1, record("a"), record("w"))
    job.hear("w0", Kind.INIT, number=1, error="no room")
    [(_, told)] = sends(keys(job, 2, record("w")))
    assert [number for number, _ in told.body["numbers"]] == [2]


def test_other_keys_of_the_store_stay_when_an_init_fails() -> None:
    job = Job()
    init(job, 1, "a")
    keys(job, 2, record("b"))
    job.hear("w0", Kind.INIT, number=2, error="no room")
    assert "key 'a' was initialised before" in reasons(job.hear("w0", Kind.KEYS, number=3, records=[record("a")]))["w0"]


# Assign


def test_assign_keeps_a_keys_number_and_the_others_wait_for_the_value() -> None:
    job = Job(1)
    init(job, 1, "a", "b")
    [(_, told)] = sends(keys(job, 2, record("b"), assign=True))
    assert told.body == {"keys": ["b"], "numbers": [[1, 1]]}
    job = Job(2)
    init(job, 1, "a")
    keys(job, 2, record("a"), assign=True)
    assert to(job.hear("w0", Kind.INIT, number=2)) == [("w0", "INIT"), ("w1", "KEYS")]


def test_assign_to_a_key_that_does_not_exist_is_an_error() -> None:
    actions = Job().hear("w0", Kind.KEYS, number=1, records=[record("x")], assign=True)
    assert reasons(actions) == {"w0": "key 'x' doesn't exist. Did you init?"}


@pytest.mark.parametrize(
    ("given", "text"), [(record("a", (3,)), "shape (3,) float32"), (record("a", dtype="int8"), "shape (2, 3) int8")]
)
def test_assign_of_another_shape_or_type_is_an_error_that_shows_both(given: Any, text: str) -> None:
    job = Job(1)
    init(job, 1, "a")
    assert reasons(keys(job, 2, given, assign=True)) == {
        "w0": "key 'a': the store has shape (2, 3) float32, assign was given %s" % text
    }


def test_an_assign_that_failed_leaves_the_key_as_it_was() -> None:
    job = Job()
    init(job, 1, "a")
    keys(job, 2, record("a"), assign=True)
    assert reasons(job.hear("w0", Kind.INIT, number=2, error="no room")) == {"w1": "no room"}
    assert to(keys(job, 3, record("a"), assign=True)) == [("w0", "KEYS")]
    assert to(job.hear("w0", Kind.INIT, number=3)) == [("w0", "INIT"), ("w1", "KEYS")]


def test_init_in_one_worker_and_assign_in_another_is_an_error_that_names_both() -> None:
    job = Job()
    init(job, 1, "a")
    job.hear("w0", Kind.KEYS, number=2, records=[record("a")], assign=True)
    actions = job.hear("w1", Kind.KEYS, number=2, records=[record("a")])
    assert "worker-0 calls assign where worker-1 calls init" in reasons(actions)["w0"]


# Errors of one worker


def test_a_worker_that_cannot_make_its_call_fails_it_for_all() -> None:
    job = Job()
    job.hear("w0", Kind.BARRIER, number=1)
    actions = job.hear("w1", Kind.BARRIER, number=1, error="no room on /data")
    text = "worker-1 failed at barrier: no room on /data"
    assert reasons(actions) == {"w0": text, "w1": text}


def test_who_comes_after_a_worker_that_could_not_hears_why() -> None:
    job = Job()
    job.hear("w0", Kind.LOAD, number=1, folder="/data", error="no manifest")
    actions = job.hear("w1", Kind.LOAD, number=1, folder="/data")
    assert reasons(actions) == {"w1": "worker-0 failed at load_states: no manifest"}


@pytest.mark.parametrize("kind", ["init", "assign"])
def test_a_worker_0_that_ends_before_it_has_sent_the_values_is_not_waited_for(kind: str) -> None:
    job = Job()
    more = {}
    if kind == "assign":
        init(job, 0, "a")
        more["assign"] = True
    for rank in range(2):
        job.hear("w%d" % rank, Kind.KEYS, number=1, records=[record("a")], **more)
    told = job.hear("w0", Kind.BYE)
    assert "ended (BYE)" in reasons(told)["w1"]
    assert "and will never send the values of %s" % kind in reasons(told)["w1"]


def test_a_call_that_lacks_something_does_not_count() -> None:
    job = Job()
    job.hear("w0", Kind.KEYS, number=1, records=[record("a")])
    with pytest.raises(KeyError):
        job.hear("w1", Kind.KEYS, number=1)
    assert "ended (BYE) and will never call init" in reasons(job.hear("w1", Kind.BYE))["w0"]


# Calls that failed


@pytest.mark.parametrize("goes", [Kind.BARRIER, Kind.LEFT, Kind.BYE])
def test_a_call_that_failed_is_remembered_until_every_worker_has_heard_of_it(goes: Kind) -> None:
    """They piled up as long as the job went on."""
    job = Job(4)
    store = job.scheduler._assembly._stores
    for number in range(1, 4):
        job.hear("w0", Kind.KEYS, number=number, records=[record("w")])
        job.hear("w1", Kind.BARRIER, number=number)
        assert (
            "worker-0 calls init where worker-1 calls barrier"
            in reasons(job.hear("w2", Kind.BARRIER, number=number))["w2"]
        )
        assert list(store[1].refused) == [number]
        job.hear("w3", goes, number=number)
        assert not store[1].refused
        if goes is not Kind.BARRIER:
            break


def test_a_worker_that_joined_instead_has_no_call_that_failed_to_hear_of() -> None:
    job = Job(3)
    job.hear("w0", Kind.JOIN, number=1)
    job.hear("w1", Kind.BARRIER, number=1)
    job.hear("w2", Kind.BARRIER, number=1)
    assert not job.scheduler._assembly._stores[1].refused
