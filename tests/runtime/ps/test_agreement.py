"""What the workers of a job agree on, by scripted histories of the scheduler: collective calls, keys, rules."""

from __future__ import annotations

from typing import Any

import pytest
from schedulerhistory import Job, init, reasons, record, rule, sends, spec, to

from distrun_runtime.protocol.message import Kind
from distrun_runtime.ps import role


@pytest.fixture
def job() -> Job:
    """A scheduler to whom two workers and a server have come."""
    return Job()


# What differs


def test_equal_calls_do_not_differ_whatever_the_order_of_their_keys(job: Job) -> None:
    job.hear("w1", Kind.KEYS, number=1, records=[record("b"), record("a")])
    assert to(job.hear("w0", Kind.KEYS, number=1, records=[record("a"), record("b")])) == [("w0", "KEYS")]
    job.hear("w0", Kind.INIT, number=1)
    job.hear("w1", Kind.KEYS, number=2, records=[])
    assert to(job.hear("w0", Kind.KEYS, number=2, records=[])) == [("w0", "KEYS")]


def test_kinds_are_called_by_the_names_that_users_know() -> None:
    job = Job(4)
    job.hear("w0", Kind.OPEN, number=7, type="dist")
    text = "worker-0 calls create where worker-3 calls join (call 7 of the store)"
    assert reasons(job.hear("w3", Kind.JOIN, number=7)) == {"w0": text, "w3": text}


def test_the_first_difference_of_records_is_the_one_that_is_named(job: Job) -> None:
    job.hear("w0", Kind.KEYS, number=1, records=[record("a"), record("b", (1,)), record("c", (1,))])
    actions = job.hear("w1", Kind.KEYS, number=1, records=[record("a"), record("b", (9,)), record("c", (9,))])
    assert reasons(actions)["w1"] == "for key 'b' worker-0 has shape (1,) float32, worker-1 has shape (9,) float32"


def test_every_later_call_is_compared_with_the_first() -> None:
    job = Job(4)
    job.hear("w2", Kind.BARRIER, number=1)
    assert job.hear("w0", Kind.BARRIER, number=1) == []
    text = "worker-2 calls barrier where worker-1 calls init (call 1 of the store)"
    actions = job.hear("w1", Kind.KEYS, number=1, records=[])
    assert reasons(actions) == {"w0": text, "w1": text, "w2": text}
    assert reasons(job.hear("w3", Kind.BARRIER, number=1)) == {"w3": text}


def keys(job: Job, number: int, *records: Any, **more: Any) -> list[role.Action]:
    """Declare keys in all workers; return what follows from the last one's call."""
    actions: list[role.Action] = []
    for rank in range(job.counts["workers"]):
        actions = job.hear("w%d" % rank, Kind.KEYS, number=number, records=list(records), **more)
    return actions


# Stores


def test_stores_of_different_staleness_are_an_error_that_names_both(job: Job) -> None:
    job.hear("w0", Kind.OPEN, number=1, type="dist_async", staleness=2)
    actions = job.hear("w1", Kind.OPEN, number=1, type="dist_async", staleness=None)
    text = "worker-0 creates a 'dist_async' store with staleness=2 where worker-1 creates a 'dist_async' store"
    assert reasons(actions) == {"w0": text, "w1": text}


def test_stores_of_equal_staleness_are_one(job: Job) -> None:
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
def test_storage_and_codec_of_a_key_are_compared(job: Job, name: str, mine: str, theirs: str, text: str) -> None:
    job.hear("w0", Kind.KEYS, number=1, records=[{**record("w"), name: mine}])
    actions = job.hear("w1", Kind.KEYS, number=1, records=[{**record("w"), name: theirs}])
    assert text in reasons(actions)["w0"]


@pytest.mark.parametrize(
    "records",
    [
        7,
        [7],
        [{"key": "w"}],
        [{**record("w"), "key": None}],
        [{**record("w"), "key": True}],
        [{**record("w"), "shape": "xy"}],
        [{**record("w"), "shape": [-1]}],
        [{**record("w"), "shape": [float("nan")]}],
        [{**record("w"), "dtype": 4}],
        [{**record("w"), "stype": []}],
    ],
)
def test_malformed_records_of_a_worker_harm_no_other_workers_call(job: Job, records: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a (list of records|record with key, shape and dtype), found"):
        job.hear("w1", Kind.KEYS, number=1, records=records)
    assert job.hear("w0", Kind.KEYS, number=1, records=[record("w")]) == []
    actions = job.hear("w1", Kind.KEYS, number=1, records=[record("w")])
    assert (to(actions), reasons(actions)) == ([("w0", "KEYS")], {})


# A failed init


def test_a_key_whose_values_did_not_reach_the_servers_can_be_initialised_again(job: Job) -> None:
    """It was "initialised before" for ever."""
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


def test_other_keys_of_the_store_stay_when_an_init_fails(job: Job) -> None:
    init(job, 1, "a")
    keys(job, 2, record("b"))
    job.hear("w0", Kind.INIT, number=2, error="no room")
    assert "key 'a' was initialised before" in reasons(job.hear("w0", Kind.KEYS, number=3, records=[record("a")]))["w0"]


# Assign


def test_assign_keeps_a_keys_number_and_the_others_wait_for_the_value() -> None:
    job = Job(1)
    init(job, 1, "a", "b")
    [(_, told)] = sends(keys(job, 2, record("b"), assign=True))
    assert told.body == {"keys": ["b"], "numbers": [[1, 1]], "servers": [[0]]}
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


def test_an_assign_that_failed_leaves_the_key_as_it_was(job: Job) -> None:
    init(job, 1, "a")
    keys(job, 2, record("a"), assign=True)
    assert reasons(job.hear("w0", Kind.INIT, number=2, error="no room")) == {"w1": "no room"}
    assert to(keys(job, 3, record("a"), assign=True)) == [("w0", "KEYS")]
    assert to(job.hear("w0", Kind.INIT, number=3)) == [("w0", "INIT"), ("w1", "KEYS")]


def test_init_in_one_worker_and_assign_in_another_is_an_error_that_names_both(job: Job) -> None:
    init(job, 1, "a")
    job.hear("w0", Kind.KEYS, number=2, records=[record("a")], assign=True)
    actions = job.hear("w1", Kind.KEYS, number=2, records=[record("a")])
    assert "worker-0 calls assign where worker-1 calls init" in reasons(actions)["w0"]


# Errors of one worker


def test_a_worker_that_cannot_make_its_call_fails_it_for_all(job: Job) -> None:
    job.hear("w0", Kind.BARRIER, number=1)
    actions = job.hear("w1", Kind.BARRIER, number=1, error="no room on /data")
    text = "worker-1 failed at barrier: no room on /data"
    assert reasons(actions) == {"w0": text, "w1": text}


def test_who_comes_after_a_worker_that_could_not_hears_why(job: Job) -> None:
    job.hear("w0", Kind.LOAD, number=1, folder="/data", error="no manifest")
    actions = job.hear("w1", Kind.LOAD, number=1, folder="/data")
    assert reasons(actions) == {"w1": "worker-0 failed at load_states: no manifest"}


@pytest.mark.parametrize("kind", ["init", "assign"])
def test_a_worker_0_that_ends_before_it_has_sent_the_values_is_not_waited_for(job: Job, kind: str) -> None:
    more = {}
    if kind == "assign":
        init(job, 0, "a")
        more["assign"] = True
    for rank in range(2):
        job.hear("w%d" % rank, Kind.KEYS, number=1, records=[record("a")], **more)
    told = job.hear("w0", Kind.BYE)
    assert "ended (BYE)" in reasons(told)["w1"]
    assert "and will never send the values of %s" % kind in reasons(told)["w1"]


def test_a_call_that_lacks_something_does_not_count(job: Job) -> None:
    job.hear("w0", Kind.KEYS, number=1, records=[record("a")])
    with pytest.raises(KeyError):
        job.hear("w1", Kind.KEYS, number=1)
    assert "ended (BYE) and will never call init" in reasons(job.hear("w1", Kind.BYE))["w0"]


# Calls that failed


def test_a_worker_that_is_not_there_yet_hears_why_a_call_failed_whatever_it_calls(job: Job) -> None:
    assert reasons(job.hear("w0", Kind.KEYS, number=1, error="KVError: x")) == {
        "w0": "worker-0 failed at init: KVError: x"
    }
    actions = job.hear("w1", Kind.BARRIER, number=1)
    assert reasons(actions) == {"w1": "worker-0 failed at init: KVError: x"}


@pytest.mark.parametrize("goes", [Kind.BARRIER, Kind.LEFT, Kind.BYE])
def test_a_call_that_failed_is_remembered_until_every_worker_has_heard_of_it(goes: Kind) -> None:
    """They piled up as long as the job went on."""
    job = Job(4)
    store = job.scheduler._calls._stores
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
    assert not job.scheduler._calls._stores[1].refused


# Calls that are taken back


def taken(actions: list[role.Action], link: str) -> Any:
    """Return what a worker hears of a call that it takes back."""
    return next(sent.body["is_taken"] for to, sent in sends(actions) if to == link and not sent.is_error)


def test_a_worker_may_take_back_a_call_that_others_have_not_made_and_make_another_of_that_number() -> None:
    job = Job(3)
    job.hear("w0", Kind.KEYS, number=2, records=[record("b")], request=7)
    actions = job.hear("w0", Kind.KEYS, number=2, take_back=True)
    assert taken(actions, "w0")
    assert [(sent.request, sent.is_error) for _, sent in sends(actions)] == [(7, True), (2, False)]
    assert to(init(job, 2, "a")) == [("w0", "INIT"), ("w1", "KEYS"), ("w2", "KEYS")]


def test_those_who_have_made_a_call_that_one_takes_back_go_on_waiting() -> None:
    job = Job(3)
    job.hear("w1", Kind.BARRIER, number=2)
    job.hear("w0", Kind.BARRIER, number=2)
    assert to(job.hear("w0", Kind.BARRIER, number=2, take_back=True)) == [("w0", "BARRIER!"), ("w0", "BARRIER")]
    assert to(job.hear("w2", Kind.BARRIER, number=2)) == []
    assert to(job.hear("w0", Kind.BARRIER, number=2)) == [("w1", "BARRIER"), ("w2", "BARRIER"), ("w0", "BARRIER")]


def test_a_call_that_all_have_made_or_that_failed_cannot_be_taken_back() -> None:
    job = Job(3)
    for link in ("w0", "w1", "w2"):
        job.hear(link, Kind.BARRIER, number=1)
    assert not taken(job.hear("w0", Kind.BARRIER, number=1, take_back=True), "w0")
    job.hear("w0", Kind.BARRIER, number=2)
    job.hear("w1", Kind.KEYS, number=2, records=[record("a")])
    assert not taken(job.hear("w0", Kind.BARRIER, number=2, take_back=True), "w0")
    assert "worker-0 calls barrier" in reasons(job.hear("w2", Kind.BARRIER, number=2))["w2"]


def test_worker_0_that_stops_waiting_for_an_init_fails_it_if_the_others_wait_for_its_values(job: Job) -> None:
    for link in ("w0", "w1"):
        job.hear(link, Kind.KEYS, number=1, records=[record("a")])
    assert not taken(job.hear("w1", Kind.KEYS, number=1, take_back=True), "w1")
    actions = job.hear("w0", Kind.KEYS, number=1, take_back=True)
    assert not taken(actions, "w0")
    assert reasons(actions) == {"w1": "worker-0 has stopped waiting for init and does not send the values"}
    assert to(init(job, 2, "a")) == [("w0", "INIT"), ("w1", "KEYS")]


# Workers that start over


def opened(job: Job, link: str, store: int, unused: Any = (), **more: Any) -> list[role.Action]:
    return job.hear(link, Kind.OPEN, store=store, number=1, type="dist_sync", unused=list(unused), **more)


def told(actions: list[role.Action]) -> list[tuple[str, Any]]:
    return [(link, sent.body.get("instead")) for link, sent in sends(actions)]


def test_a_worker_that_creates_again_is_given_the_store_in_which_the_others_wait_for_it() -> None:
    job = Job(3)
    for rank in range(3):
        opened(job, "w%d" % rank, 1)
    job.hear("w1", Kind.KEYS, number=2, records=[record("a")])
    assert told(opened(job, "w0", 2, unused=[1])) == [("w0", 1)]
    # The same where the others come to wait only then; and its number is free again.
    assert told(opened(job, "w2", 2, unused=[1])) == [("w2", 1)]
    for rank in (0, 2):
        job.hear("w%d" % rank, Kind.KEYS, number=2, records=[record("a")])
    assert to(job.hear("w0", Kind.INIT, number=2)) == [("w0", "INIT"), ("w1", "KEYS"), ("w2", "KEYS")]
    assert to([each for rank in range(3) for each in opened(job, "w%d" % rank, 2)]) == [
        ("w0", "OPEN"),
        ("w1", "OPEN"),
        ("w2", "OPEN"),
    ]


def test_a_worker_that_creates_again_waits_until_the_others_do_so_or_wait_for_it(job: Job) -> None:
    for rank in range(2):
        opened(job, "w%d" % rank, 1)
    assert told(opened(job, "w0", 2, unused=[1])) == []
    assert told(job.hear("w1", Kind.BARRIER, number=2)) == [("w0", 1)]
    assert to(job.hear("w0", Kind.BARRIER, number=2)) == [("w1", "BARRIER"), ("w0", "BARRIER")]


def test_two_stores_that_all_create_before_they_use_them_are_two(job: Job) -> None:
    for store, unused in ((1, []), (2, [1])):
        assert told(opened(job, "w0", store, unused)) == []
        assert told(opened(job, "w1", store, unused)) == [("w0", None), ("w1", None)]


@pytest.mark.parametrize(
    ("second", "unused"), [({"staleness": 1}, [1]), ({}, []), ({}, [7])], ids=["another kind", "used", "unknown"]
)
def test_a_store_that_is_used_or_of_another_kind_is_not_given_instead(job: Job, second: Any, unused: list[int]) -> None:
    for rank in range(2):
        opened(job, "w%d" % rank, 1)
    job.hear("w1", Kind.BARRIER, number=2)
    assert told(opened(job, "w0", 2, unused, **second)) == []


def test_a_create_whose_unused_stores_are_no_numbers_does_not_count(job: Job) -> None:
    with pytest.raises(TypeError):
        opened(job, "w0", 1, unused=[[1]])
    opened(job, "w0", 1)
    assert told(opened(job, "w1", 1)) == [("w0", None), ("w1", None)]


# Rules


def change(job: Job, link: str, **what: Any) -> list[role.Action]:
    return job.hear(link, Kind.RULE, change=what)


def installed(actions: list[role.Action]) -> list[Any]:
    """Return the rules that servers are told to put in their places."""
    return [sent.body["spec"] for link, sent in sends(actions) if link == "s0" and "check" not in sent.body]


def answer_apart(job: Job, actions: list[role.Action], *errors: str) -> list[role.Action]:
    """Let server i answer with error i; empty: it did what it was asked."""
    found: list[role.Action] = []
    for (link, sent), error in zip(sends(actions), errors, strict=True):
        body = {"reason": error, "error": "RuleError", "traceback": "their lines"} if error else {}
        found += job.hear(link, Kind.RULE, True, bool(error), request=sent.request, **body)
    return found


def test_a_rule_is_tried_by_all_servers_and_then_put_in_its_place_by_all() -> None:
    job = Job(2, 2)
    tried = rule(job, "w0", lr=0.1)
    assert [(link, sent.body) for link, sent in sends(tried)] == [
        ("s0", {"spec": spec(lr=0.1), "check": True}),
        ("s1", {"spec": spec(lr=0.1), "check": True}),
    ]
    assert job.answer(tried[:1]) == []
    put = job.answer(tried[1:])
    assert [(link, sent.body) for link, sent in sends(put)] == [
        ("s0", {"spec": spec(lr=0.1)}),
        ("s1", {"spec": spec(lr=0.1)}),
    ]
    assert job.answer(put[:1]) == []
    assert to(job.answer(put[1:])) == [("w0", "RULE")]


def test_a_rule_that_one_server_refuses_is_installed_on_none() -> None:
    job = Job(2, 2)
    then = answer_apart(job, rule(job, "w0", "my_rules:Mine"), "", "no module 'my_rules' on host d2")
    assert to(then) == [("w0", "RULE!")]
    [(_, sent)] = sends(then)
    assert sent.body == {
        "reason": "server-1: no module 'my_rules' on host d2",
        "error": "RuleError",
        "traceback": "their lines",
    }
    assert to(job.settle(rule(job, "w1", "adam"))) == [("w1", "RULE")], "the store has none still"


def test_a_rule_that_a_server_cannot_put_in_its_place_is_taken_back_on_all() -> None:
    job = Job(2, 2)
    job.settle(rule(job, "w0", lr=0.1))
    put = job.answer(rule(job, "w0", "adam", True))
    back = answer_apart(job, put, "", "new_state failed")
    assert [(link, sent.body) for link, sent in sends(back)] == [
        ("s0", {"spec": spec(lr=0.1)}),
        ("s1", {"spec": spec(lr=0.1)}),
    ]
    assert reasons(job.settle(back)) == {"w0": "server-1: new_state failed"}
    assert to(rule(job, "w1", lr=0.1)) == [("w1", "RULE")], "the one before is still the store's"


def test_a_first_rule_that_fails_leaves_the_store_without_one() -> None:
    job = Job(2, 2)
    put = job.answer(rule(job, "w0", "adam"))
    assert installed(answer_apart(job, put, "new_state failed", "")) == [None]


def test_an_equal_rule_changes_nothing(job: Job) -> None:
    job.settle(rule(job, "w0", lr=1.0))
    assert to(rule(job, "w1", lr=1)) == [("w1", "RULE")]


def test_a_different_rule_is_an_error_that_shows_the_one_there_is(job: Job) -> None:
    job.settle(rule(job, "w0", lr=0.1))
    actions = rule(job, "w1", "adam", lr=0.2)
    assert reasons(actions)["w1"] == (
        "the store has the rule sgd, not adam (worker-0 has set it, worker-1 asks for the other);"
        " set_optimizer('adam', ..., replace=True) puts another in its place"
    )
    assert to(actions) == [("w1", "RULE!")]


def test_a_rule_is_replaced_on_request(job: Job) -> None:
    job.settle(rule(job, "w0", lr=0.1))
    actions = rule(job, "w1", "adam", True, lr=0.2)
    assert to(actions) == [("s0", "RULE")]
    assert to(job.settle(actions)) == [("w1", "RULE")]
    assert to(rule(job, "w0", "adam", lr=0.2)) == [("w0", "RULE")]


def test_two_rules_at_once_are_set_one_after_the_other(job: Job) -> None:
    first = rule(job, "w0", lr=0.1)
    assert rule(job, "w1", lr=0.2) == []
    then = job.settle(first)
    assert to(then) == [("w0", "RULE"), ("w1", "RULE!")]
    assert "the store has the rule sgd with learning_rate=0.1, not 0.2 (worker-0 has set it, " in reasons(then)["w1"]


def test_two_equal_rules_at_once_are_one(job: Job) -> None:
    first = rule(job, "w0", lr=0.1)
    assert rule(job, "w1", lr=0.1) == []
    assert to(job.settle(first)) == [("w0", "RULE"), ("w1", "RULE")]


def test_a_rule_that_all_servers_refuse_is_not_set_and_the_next_gets_its_turn() -> None:
    job = Job(2, 2)
    first = rule(job, "w0", "my_rules:Missing")
    rule(job, "w1", "sgd")
    then = job.answer(first, "unknown rule")
    assert reasons(then)["w0"] == "server-0, server-1: unknown rule"
    assert to(then) == [("w0", "RULE!"), ("s0", "RULE"), ("s1", "RULE")]
    assert to(job.settle(then)) == [("w0", "RULE!"), ("w1", "RULE")]


def test_stores_have_rules_of_their_own(job: Job) -> None:
    job.settle(rule(job, "w0", lr=0.1))
    actions = job.hear("w0", Kind.RULE, store=2, spec=spec("adam"))
    assert to(actions) == [("s0", "RULE")]
    assert sends(actions)[0][1].store == 2


def test_parameters_are_changed_on_all_servers_and_the_others_stay_as_they_are(job: Job) -> None:
    job.settle(rule(job, "w0", lr=0.1, momentum=0.9))
    tried = change(job, "w1", params={"learning_rate": 0.01})
    assert sends(tried)[0][1].body == {"spec": spec(lr=0.01, momentum=0.9), "check": True}
    assert to(job.settle(tried)) == [("w1", "RULE")]
    assert to(rule(job, "w0", lr=0.01, momentum=0.9)) == [("w0", "RULE")], "it is the store's rule now"


def test_a_change_that_two_workers_make_is_made_once(job: Job) -> None:
    job.settle(rule(job, "w0", lr=0.1))
    first = change(job, "w0", params={"lr": 0.01})
    assert change(job, "w1", params={"lr": 0.01}) == []
    assert to(job.settle(first)) == [("w0", "RULE"), ("w1", "RULE")]


def test_a_change_that_is_no_right_value_changes_nothing(job: Job) -> None:
    job.settle(rule(job, "w0", lr=0.1))
    assert "learning_rate" in reasons(change(job, "w0", params={"lr": -1}))["w0"]
    assert to(rule(job, "w1", lr=0.1)) == [("w1", "RULE")]


def test_a_change_of_a_store_without_a_rule_is_an_error_that_says_what_to_call() -> None:
    assert "call kv.set_optimizer first" in reasons(change(Job(), "w0", params={"lr": 1}))["w0"]


def test_multipliers_are_changed_key_by_key_and_an_equal_rule_leaves_them(job: Job) -> None:
    job.settle(rule(job, "w0", lr=0.1))
    job.settle(change(job, "w0", lr_mult=[["w", 2.0], [3, 0.5]]))
    tried = change(job, "w1", lr_mult=[["w", 4.0]], wd_mult=[["3", 0.0]])
    asked = sends(tried)[0][1].body["spec"]
    assert sorted(asked["lr_mult"], key=str) == [["w", 4.0], [3, 0.5]]
    assert asked["wd_mult"] == [["3", 0.0]]
    job.settle(tried)
    assert to(rule(job, "w1", lr=0.1)) == [("w1", "RULE")]


def test_the_rule_can_be_taken_away_and_makes_room_for_another(job: Job) -> None:
    job.settle(rule(job, "w0", lr=0.1))
    away = job.hear("w0", Kind.RULE, spec=None)
    put = job.answer(away)
    assert installed(put) == [None]
    assert to(job.settle(put)) == [("w0", "RULE")]
    assert to(job.hear("w1", Kind.RULE, spec=None)) == [("w1", "RULE")], "there is none to take away"
    assert to(job.settle(rule(job, "w1", "adam"))) == [("w1", "RULE")]


def test_a_malformed_wish_is_refused_to_its_sender_and_leaves_the_next_its_turn(job: Job) -> None:
    first = rule(job, "w0")
    job.hear("w1", Kind.RULE, change=7)
    job.hear("w1", Kind.RULE, spec=["no rule"])
    then = job.settle(first)
    assert to(then) == [("w0", "RULE"), ("w1", "RULE!"), ("w1", "RULE!")]
    assert to(rule(job, "w1")) == [("w1", "RULE")]
