"""How rules get to the servers, by scripted histories of the scheduler."""

from __future__ import annotations

from typing import Any

from schedulerhistory import Job, reasons, rule, sends, spec, to

from distrun_runtime.protocol.message import Flag, Kind
from distrun_runtime.ps import role


def change(job: Job, link: str, **what: Any) -> list[role.Action]:
    return job.hear(link, Kind.RULE, change=what)


def installed(actions: list[role.Action]) -> list[Any]:
    """Return the rules that servers are told to put in their places."""
    return [sent.body["spec"] for link, sent in sends(actions) if link == "s0" and "check" not in sent.body]


def answer_apart(job: Job, actions: list[role.Action], *errors: str) -> list[role.Action]:
    """Let server i answer with error i; empty: it did what it was asked."""
    found: list[role.Action] = []
    for (link, sent), error in zip(sends(actions), errors, strict=True):
        flags = Flag.REPLY | Flag.ERROR if error else Flag.REPLY
        body = {"reason": error, "error": "RuleError", "traceback": "their lines"} if error else {}
        found += job.hear(link, Kind.RULE, flags, request=sent.request, **body)
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


def test_an_equal_rule_changes_nothing() -> None:
    job = Job()
    job.settle(rule(job, "w0", lr=1.0))
    assert to(rule(job, "w1", lr=1)) == [("w1", "RULE")]


def test_a_different_rule_is_an_error_that_shows_the_one_there_is() -> None:
    job = Job()
    job.settle(rule(job, "w0", lr=0.1))
    actions = rule(job, "w1", "adam", lr=0.2)
    assert reasons(actions)["w1"] == (
        "the store has the rule sgd, not adam; set_optimizer('adam', ..., replace=True) puts another in its place"
    )
    assert to(actions) == [("w1", "RULE!")]


def test_a_rule_is_replaced_on_request() -> None:
    job = Job()
    job.settle(rule(job, "w0", lr=0.1))
    actions = rule(job, "w1", "adam", True, lr=0.2)
    assert to(actions) == [("s0", "RULE")]
    assert to(job.settle(actions)) == [("w1", "RULE")]
    assert to(rule(job, "w0", "adam", lr=0.2)) == [("w0", "RULE")]


def test_two_rules_at_once_are_set_one_after_the_other() -> None:
    job = Job()
    first = rule(job, "w0", lr=0.1)
    assert rule(job, "w1", lr=0.2) == []
    then = job.settle(first)
    assert to(then) == [("w0", "RULE"), ("w1", "RULE!")]
    assert "the store has the rule sgd with learning_rate=0.1, not 0.2; " in reasons(then)["w1"]


def test_two_equal_rules_at_once_are_one() -> None:
    job = Job()
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


def test_stores_have_rules_of_their_own() -> None:
    job = Job()
    job.settle(rule(job, "w0", lr=0.1))
    actions = job.hear("w0", Kind.RULE, store=2, spec=spec("adam"))
    assert to(actions) == [("s0", "RULE")]
    assert sends(actions)[0][1].store == 2


def test_parameters_are_changed_on_all_servers_and_the_others_stay_as_they_are() -> None:
    job = Job()
    job.settle(rule(job, "w0", lr=0.1, momentum=0.9))
    tried = change(job, "w1", params={"learning_rate": 0.01})
    assert sends(tried)[0][1].body == {"spec": spec(lr=0.01, momentum=0.9), "check": True}
    assert to(job.settle(tried)) == [("w1", "RULE")]
    assert to(rule(job, "w0", lr=0.01, momentum=0.9)) == [("w0", "RULE")], "it is the store's rule now"


def test_a_change_that_two_workers_make_is_made_once() -> None:
    job = Job()
    job.settle(rule(job, "w0", lr=0.1))
    first = change(job, "w0", params={"lr": 0.01})
    assert change(job, "w1", params={"lr": 0.01}) == []
    assert to(job.settle(first)) == [("w0", "RULE"), ("w1", "RULE")]


def test_a_change_that_is_no_right_value_changes_nothing() -> None:
    job = Job()
    job.settle(rule(job, "w0", lr=0.1))
    assert "learning_rate" in reasons(change(job, "w0", params={"lr": -1}))["w0"]
    assert to(rule(job, "w1", lr=0.1)) == [("w1", "RULE")]


def test_a_change_of_a_store_without_a_rule_is_an_error_that_says_what_to_call() -> None:
    assert "call kv.set_optimizer first" in reasons(change(Job(), "w0", params={"lr": 1}))["w0"]


def test_multipliers_are_changed_key_by_key_and_an_equal_rule_leaves_them() -> None:
    job = Job()
    job.settle(rule(job, "w0", lr=0.1))
    job.settle(change(job, "w0", lr_mult=[["w", 2.0], [3, 0.5]]))
    tried = change(job, "w1", lr_mult=[["w", 4.0]], wd_mult=[["3", 0.0]])
    asked = sends(tried)[0][1].body["spec"]
    assert sorted(asked["lr_mult"], key=str) == [["w", 4.0], [3, 0.5]]
    assert asked["wd_mult"] == [["3", 0.0]]
    job.settle(tried)
    assert to(rule(job, "w1", lr=0.1)) == [("w1", "RULE")]


def test_the_rule_can_be_taken_away() -> None:
    job = Job()
    job.settle(rule(job, "w0", lr=0.1))
    away = job.hear("w0", Kind.RULE, spec=None)
    put = job.answer(away)
    assert installed(put) == [None]
    assert to(job.settle(put)) == [("w0", "RULE")]
    assert to(job.hear("w1", Kind.RULE, spec=None)) == [("w1", "RULE")], "there is none to take away"


def test_a_rule_taken_away_makes_room_for_another() -> None:
    job = Job()
    job.settle(rule(job, "w0", lr=0.1))
    job.settle(job.hear("w0", Kind.RULE, spec=None))
    assert to(job.settle(rule(job, "w1", "adam"))) == [("w1", "RULE")]


def test_a_malformed_wish_is_refused_to_its_sender_and_leaves_the_next_its_turn() -> None:
    job = Job()
    first = rule(job, "w0")
    job.hear("w1", Kind.RULE, change=7)
    job.hear("w1", Kind.RULE, spec=["no rule"])
    then = job.settle(first)
    assert to(then) == [("w0", "RULE"), ("w1", "RULE!"), ("w1", "RULE!")]
    assert to(rule(job, "w1")) == [("w1", "RULE")]
