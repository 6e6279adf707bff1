"""A server by scripted histories: rules that fail, norms between servers, codecs and rows, saved states."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from history_server import SCHEDULER, History, Piece, Sent, data, reason, rows_of, said, values

from distrun_runtime.protocol.message import Kind

pytestmark = pytest.mark.usefixtures("engine")

Serving = Callable[..., History]

FUSSY = "rules_of_users:Fussy"
"""w -= g; fails for a gradient that begins with 13."""
BAD = {"a": [13, 0]}
NOTHING = {"a": [0, 0]}
FAILED = "the rule failed on server-0 for key 'a': a thirteen"


def push_round(server: History, number: int, given: Any) -> list[Sent]:
    """Let worker 0 push values and worker 1 zeros."""
    zeros = {name: np.zeros_like(value) for name, value in given.items()}
    return [*server.push(0, number, given), *server.push(1, number, zeros)]


def to(sent: list[Sent], link: str) -> list[Sent]:
    return [each for each in sent if each.link == link]


# Rules


def test_a_rule_is_set_and_then_answered(server: History) -> None:
    [reply] = server.rule("sgd", learning_rate=0.5)
    assert (str(reply), reply.request) == ("scheduler RULE", 7)
    push_round(server, 1, {"a": [2, 4]})
    assert values(server.pull(0, 1)) == {"a": [-1, -2]}


def test_a_rule_that_cannot_be_set_is_refused(server: History) -> None:
    [reply] = server.scheduler(Kind.RULE, 7, spec={"name": "sdg", "params": {}})
    assert (reply.link, reply.is_error, reply.body["error"]) == (SCHEDULER, True, "KVError")
    assert str(reply.body["reason"]).startswith("unknown rule 'sdg'")
    push_round(server, 1, {"a": [2, 4]})
    assert values(server.pull(0, 1)) == {"a": [2, 4]}, "it has none still"


def test_a_rule_that_is_only_tried_changes_nothing(server: History) -> None:
    spec = {"name": "sgd", "params": {"learning_rate": 0.5}}
    assert said(server.scheduler(Kind.RULE, 7, spec=spec, check=True)) == ["scheduler RULE"]
    push_round(server, 1, {"a": [2, 4]})
    assert values(server.pull(0, 1)) == {"a": [2, 4]}


def test_a_rule_that_could_not_be_set_is_refused_when_it_is_tried(server: History) -> None:
    sent = server.scheduler(Kind.RULE, 7, spec={"name": "no_module:Rule", "params": {}}, check=True)
    assert "--server-import no_module" in reason(sent)


def test_what_a_users_rule_raises_for_a_value_is_told_with_the_traceback(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rules_of_users

    monkeypatch.setattr(rules_of_users.Choosy, "refused", 2)
    [reply] = serving().scheduler(Kind.RULE, 7, spec={"name": "rules_of_users:Choosy", "params": {}}, check=True)
    assert (reply.body["reason"], reply.body["error"]) == ("ValueError: 2 elements are too many", "RuleError")
    assert "rules_of_users.py" in reply.body["traceback"]


def test_without_a_rule_a_round_is_assigned_and_the_states_of_the_last_rule_are_forgotten(server: History) -> None:
    server.rule("sgd", learning_rate=1.0, momentum=0.5)
    push_round(server, 1, {"a": [4, 4]})
    server.rule("sgd", learning_rate=0.5, momentum=0.5)
    push_round(server, 2, {"a": [4, 4]})
    assert values(server.pull(0, 2)) == {"a": [-8, -8]}, "the other rule goes on with the momentum"
    server.rule(None)
    push_round(server, 3, {"a": [1, 1]})
    assert values(server.pull(0, 3)) == {"a": [1, 1]}
    server.rule("sgd", learning_rate=1.0, momentum=0.5)
    push_round(server, 4, {"a": [1, 1]})
    assert values(server.pull(0, 4)) == {"a": [0, 0]}, "no momentum is left"


def test_a_rule_that_fails_is_the_error_of_those_who_pull_that_round(server: History) -> None:
    server.rule(FUSSY)
    server.push(0, 1, BAD)
    server.pull(0, 1)
    sent = server.push(1, 1, NOTHING)
    assert sorted(said(sent)) == ["w0 PULL!", "w1 PUSH"]
    [reply] = to(sent, "w0")
    assert (reply.body["reason"], reply.body["error"]) == (FAILED, "RuleError")
    assert "rules_of_users.py" in reply.body["traceback"]
    assert reason(server.pull(1, 1)) == FAILED
    push_round(server, 2, {"a": [1, 1]})
    assert values(server.pull(1, 2)) == {"a": [-1, -1]}, "the next round is another matter"


def test_a_rule_that_fails_is_said_once_on_the_server_itself(server: History) -> None:
    """The pushes are acknowledged, and a script may end without a pull."""
    server.rule(FUSSY)
    for number in (1, 2):
        push_round(server, number, BAD)
    assert server.log.count("event=rule-failed store=1 " + FAILED) == 1


def test_a_round_that_failed_is_told_by_a_later_pull_to_who_pushed_on_without_asking(server: History) -> None:
    """Its update was lost, and the worker has not heard of it."""
    server.rule(FUSSY)
    push_round(server, 1, BAD)
    assert said(server.pull(1, 1)) == ["w1 PULL!"]
    for number in (2, 3):
        push_round(server, number, NOTHING)
    assert said(server.pull(1, 3)) == ["w1 PULL"], "it was told"
    assert reason(server.pull(0, 3)) == FAILED
    assert said(server.pull(0, 3)) == ["w0 PULL"], "once"


def test_failed_rounds_of_several_keys_are_one_error_of_the_pull_of_these_keys(server: History) -> None:
    server.rule(FUSSY)
    push_round(server, 1, {"a": [13, 0], "b": [13, 0]})
    push_round(server, 2, {"a": [1, 1], "b": [1, 1]})
    assert said(server.pull(0, 2, "a", "b")) == ["w0 PULL!"]
    assert values(server.pull(0, 2, "a", "b")) == {"a": [-1, -1], "b": [-1, -1]}


def test_a_late_pull_of_a_failed_round_is_told_although_another_round_is_over(server: History) -> None:
    server.rule(FUSSY)
    for number in range(1, 6):
        push_round(server, number, BAD)
    assert said(server.pull(0, 5)) == ["w0 PULL!"]
    assert said(server.pull(0, 4)) == ["w0 PULL!"]


def test_states_that_are_loaded_end_what_is_to_be_said_of_rounds_before(server: History) -> None:
    server.rule(FUSSY)
    push_round(server, 1, BAD)
    assert said(stage_nothing(server)) == ["scheduler LOAD"]
    assert said(server.scheduler(Kind.LOAD, 7, action="commit", rounds=[[0, 5]])) == ["scheduler LOAD"]
    assert said(server.pull(0, 5)) == ["w0 PULL"]


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_failed_pull_waits_nowhere_and_what_it_held_may_be_written(server: History, is_waiting: bool) -> None:
    """The first key is there, the second fails, the third is owed still."""
    server.init({"c": [0, 0]})
    server.rule(FUSSY)
    server.push(0, 1, {"a": [1, 1], "b": [13, 0], "c": [3, 3]})
    server.push(1, 1, {"a": [0, 0]})
    if is_waiting:
        assert server.pull(0, 1, "a", "b", "c") == []
    sent = server.push(1, 1, {"b": [0, 0]})
    if not is_waiting:
        sent = server.pull(0, 1, "a", "b", "c")
    assert "w0 PULL!" in said(sent)
    assert server.stats()["queue"] == 0
    assert said(server.push(1, 1, {"c": [0, 0]})) == ["w1 PUSH"], "it was answered already"
    push_round(server, 2, {"a": [1, 1]})
    assert values(server.pull(1, 2)) == {"a": [-2, -2]}


def test_a_pull_after_one_that_failed_gets_its_round_though_its_worker_pushes_again_meanwhile(server: History) -> None:
    """Key c, which the failed one was owed still, goes on while the next pull waits for key a."""
    server.init({"c": [0, 0]})
    server.rule(FUSSY)
    server.push(0, 1, {"a": [1, 1], "b": [13, 0], "c": [3, 3]})
    server.push(1, 1, {"a": [0, 0]})
    assert server.pull(0, 1, "a", "b", "c") == []
    assert "w0 PULL!" in said(server.push(1, 1, {"b": [0, 0]}))
    server.push(1, 1, {"c": [0, 0]})
    server.push(0, 2, {"a": [1, 1], "c": [1, 1]})
    assert server.pull(0, 2, "a", "c") == []
    server.push(0, 3, {"c": [100, 0]})
    for number in (2, 3):
        assert said(server.push(1, number, {"c": [0, 0]})) == ["w1 PUSH"]
    [pulled] = [each for each in server.push(1, 2, {"a": [0, 0]}) if each.link == "w0"]
    assert values([pulled]) == {"a": [-2, -2], "c": [-4, -4]}


def test_an_async_rule_that_fails_is_the_pushers_error_and_its_push_counts_as_made(serving: Serving) -> None:
    """Or the others would wait for it for ever, with a bound on staleness."""
    server = serving("dist_async", staleness=0)
    server.rule(FUSSY)
    server.push(0, 1, {"a": [1, 1]})
    assert server.pull(0, 1) == []
    sent = server.push(1, 1, BAD)
    assert said(sent) == ["w1 PUSH!", "w0 PULL"]
    assert (sent[0].body["error"], sent[0].body["reason"]) == ("RuleError", FAILED)
    assert "rules_of_users.py" in sent[0].body["traceback"]
    assert values(sent[1:]) == {"a": [-1, -1]}


def test_an_init_that_the_rule_does_not_take_is_refused_and_leaves_nothing_behind(server: History) -> None:
    server.rule("sgd")
    assert reason(server.init({"f": [1, 1]}, dtype=np.int32)) == "key 'f': rule 'sgd' updates float weights, not int32"
    assert said(server.init({"f": [1, 1]})) == ["w0 INIT"]


# Norms of whole values. Key `a` has two elements here and two on server 1; key `b` lies here alone.

SHAPES = {"0": [4], "1": [2]}
NORMALISED = "rules_of_users:Normalised"
"""w -= g / |g|"""
PICKY = "norm_rules:Picky"
"""w -= g; its first half fails for a weight of 7, its second half for a gradient of zeros."""
THREE = {"a": [3, 0]}
FOUR = [[2, 2, [16.0]]]
"""Server 1 has a gradient of length 4; with 3 here it is 5 in all."""


def norms_server(serving: Serving, rule: str = NORMALISED, type_name: str = "dist_sync") -> History:
    server = serving(type_name, servers=2, shapes=SHAPES)
    server.rule(rule)
    return server


@pytest.fixture
def normed(serving: Serving) -> History:
    """A server that normalises gradients."""
    return norms_server(serving)


def test_a_value_that_lies_here_alone_needs_no_other_server(normed: History) -> None:
    assert said(push_round(normed, 1, {"b": [3, 4]})) == ["w0 PUSH", "w1 PUSH"]
    assert values(normed.pull(0, 1, "b")) == {"b": pytest.approx([-0.6, -0.8])}


def test_sums_of_squares_go_to_the_other_servers_and_theirs_finish_the_update(normed: History) -> None:
    normed.push(0, 1, THREE)
    assert normed.pull(0, 1) == []
    sent = normed.push(1, 1, NOTHING)
    assert normed.calls[1:] == ["server-1"]
    [told] = to(sent, "server-1")
    assert (told.kind, told.store, told.request, told.is_reply) == (Kind.NORMS, 1, 0, False)
    assert told.body == {"script": 0, "key": 0, "rank": -1, "round": 1, "parts": [[0, 2, [9.0]]]}
    sent = normed.norms(1, parts=FOUR)
    assert said(sent) == ["w0 PULL"]
    assert values(sent) == {"a": pytest.approx([-0.6, 0])}


def test_the_other_servers_may_be_first(normed: History) -> None:
    assert normed.norms(1, parts=FOUR) == []
    push_round(normed, 1, THREE)
    assert values(normed.pull(0, 1)) == {"a": pytest.approx([-0.6, 0])}


def test_parts_are_added_in_the_order_of_their_offsets_on_every_server(serving: Serving) -> None:
    """All servers get the very same total: here 1e16 + 1 - 1e16 + 1 is 1 only if added from left to right."""
    for order in ([1, 2, 3], [3, 1, 2]):
        server = serving(servers=2, shapes={"0": [8], "1": [2]})
        server.rule(NORMALISED)
        parts = {1: [2, 2, [1e16]], 2: [4, 2, [-1e16]], 3: [6, 2, [1.0]]}
        push_round(server, 1, {"a": [1, 0]})
        for number in order:
            sent = server.norms(1, parts=[parts[number]])
            assert sent == []
        assert values(server.pull(0, 1)) == {"a": [-1, 0]}


def test_the_pieces_of_one_key_on_one_server_are_finished_together(normed: History) -> None:
    normed.init({"c+2": [0, 0], "c": [0, 0]}, shapes={"2": [4]})
    push_round(normed, 1, {"c": [3, 0]})
    assert values(normed.pull(0, 0, "c")) == {"c": [0, 0]}, "the other piece is missing"
    push_round(normed, 1, {"c+2": [0, 4]})
    assert values(normed.pull(0, 1, "c", "c+2")) == {"c": pytest.approx([-0.6, 0]), "c+2": pytest.approx([0, -0.8])}


def test_the_next_round_begins_when_this_one_is_finished(normed: History) -> None:
    push_round(normed, 1, THREE)
    assert to(push_round(normed, 2, {"a": [0, 6]}), "server-1") == []
    [told] = normed.norms(1, parts=FOUR)
    assert (told.body["round"], told.body["parts"]) == (2, [[0, 2, [36.0]]])
    assert normed.rounds()["a"] == 1
    normed.norms(2, parts=[[2, 2, [64.0]]])
    assert values(normed.pull(1, 2)) == {"a": pytest.approx([-0.6, -0.6])}


def test_rounds_go_on_after_another_rule_came_in_the_middle(normed: History) -> None:
    push_round(normed, 1, THREE)
    push_round(normed, 2, {"a": [1, 1]})
    normed.rule("sgd", learning_rate=1.0)
    normed.norms(1, parts=FOUR)
    assert values(normed.pull(0, 2)) == {"a": pytest.approx([-1.6, -1.0])}


def test_an_update_is_finished_by_the_rule_that_began_it_although_the_store_has_none_now(normed: History) -> None:
    push_round(normed, 1, THREE)
    normed.rule(None)
    normed.norms(1, parts=FOUR)
    assert values(normed.pull(0, 1)) == {"a": pytest.approx([-0.6, 0])}


def test_pieces_of_one_round_to_which_different_rules_were_applied_fail_it(server: History) -> None:
    """The rule was set between the pushes of the first and of the second piece of a key on this server."""
    server.init({"c": [0, 0], "c+2": [0, 0]}, shapes={"2": [4]})
    push_round(server, 1, {"c": [3, 0]})
    server.rule(NORMALISED)
    push_round(server, 1, {"c+2": [0, 4]})
    assert "the rule was changed while push 1 of key 'c' was under way" in reason(server.pull(0, 1, "c+2"))


def test_a_failure_that_comes_after_its_round_changes_nothing(normed: History) -> None:
    push_round(normed, 1, THREE)
    normed.norms(1, parts=FOUR)
    assert normed.norms(1, error="too late") == []
    push_round(normed, 2, THREE)
    normed.norms(2, parts=FOUR)
    assert values(normed.pull(0, 2)) == {"a": pytest.approx([-1.2, 0])}


def test_a_pull_that_waits_for_norms_is_told_so_and_a_worker_that_ended_is_not_blamed(normed: History) -> None:
    push_round(normed, 1, THREE)
    normed.pull(0, 1)
    assert normed.bye(1) == []
    [note] = normed.tick(10)
    assert note.body["text"] == "waiting for the other servers' norms, key a, round 1"
    assert said(normed.norms(1, parts=FOUR)) == ["w0 PULL"]


def test_a_reply_that_is_still_being_sent_is_not_changed_by_a_second_half(normed: History) -> None:
    normed.read_slowly()
    [reply] = normed.pull(0, 0)
    before = reply.values["a"]
    push_round(normed, 1, THREE)
    normed.norms(1, parts=FOUR)
    assert before.tolist() == [0, 0]
    assert values(normed.pull(0, 1)) == {"a": pytest.approx([-0.6, 0])}


def test_rows_for_a_rule_that_needs_norms_are_a_dense_gradient(serving: Serving) -> None:
    found = []
    for payload in (rows_of([1], [[5, 6]]), None):
        server = serving(shapes={"2": [2, 2]}, rows={})
        server.init({"c": [1, 2, 3, 4]}, shapes={"2": [2, 2]}, rows={"2": 2})
        server.rule("lamb", learning_rate=0.1)
        for rank in (0, 1):
            if payload is None:
                server.push(rank, 1, {"c": [0, 0, 5, 6]})
            else:
                server.push(rank, 1, {"c": bytes(payload)}, codec="rows")
        found.append(values(server.pull(0, 1, "c")))
    assert found[0] == found[1] != {"c": [1, 2, 3, 4]}


def test_a_rule_that_fails_on_one_server_fails_the_round_on_all(serving: Serving) -> None:
    server = norms_server(serving, PICKY)
    server.assign({"a": [7, 0]})
    server.push(0, 1, THREE)
    [told] = to(server.push(1, 1, NOTHING), "server-1")
    failed = "the rule failed on server-0 for key 'a': a seven"
    assert told.body["error"] == failed
    assert "norm_rules.py" in told.body["traceback"]
    assert reason(server.pull(0, 1)) == failed
    # And the other way round.
    server.assign({"a": [0, 0]})
    push_round(server, 2, THREE)
    server.pull(1, 2)
    [reply] = server.norms(2, error="the rule failed on server-1", traceback="Traceback of server 1")
    assert (reply.link, reply.body["error"], reply.body["reason"]) == (
        *("w1", "RuleError", "the rule failed on server-1"),
    )
    assert reply.body["traceback"] == "Traceback of server 1"
    push_round(server, 3, THREE)
    server.norms(3, parts=FOUR)
    assert values(server.pull(1, 3)) == {"a": [-3, 0]}, "the round that failed has changed nothing"
    assert reason(server.pull(0, 3)) == "the rule failed on server-1", "it did not ask for round 2"


def test_a_rule_that_fails_for_one_piece_fails_the_round_for_the_others_here(serving: Serving) -> None:
    server = norms_server(serving, PICKY)
    server.init({"c+2": [0, 0], "c": [7, 0]}, shapes={"2": [4]})
    push_round(server, 1, {"c+2": [0, 4]})
    assert server.pull(1, 1, "c+2") == []
    [refused] = [each for each in push_round(server, 1, {"c": [3, 0]}) if each.kind is Kind.PULL]
    assert reason([refused]) == "the rule failed on server-0 for key 'c': a seven"


def test_a_rule_that_fails_for_a_value_that_lies_here_alone_is_no_other_servers_affair(serving: Serving) -> None:
    server = norms_server(serving, PICKY)
    server.assign({"b": [7, 0]})
    assert said(push_round(server, 1, {"b": [1, 1]})) == ["w0 PUSH", "w1 PUSH"]
    assert reason(server.pull(0, 1, "b")) == "the rule failed on server-0 for key 'b': a seven"


def test_a_failure_that_is_heard_before_the_own_part_is_ready_counts(normed: History) -> None:
    normed.norms(1, error="the rule failed on server-1")
    normed.norms(1, error="a later reason")
    push_round(normed, 1, THREE)
    assert reason(normed.pull(0, 1)) == "the rule failed on server-1"


def test_a_second_half_that_fails_is_the_rounds_failure(serving: Serving) -> None:
    server = norms_server(serving, PICKY)
    push_round(server, 1, NOTHING)
    server.norms(1, parts=[[2, 2, [0.0]]])
    assert reason(server.pull(0, 1)) == "the rule failed on server-0 for key 'a': no gradient"


def test_a_server_that_had_another_rule_for_that_round_says_so(serving: Serving) -> None:
    """The rule was changed while pushes were under way; no server waits for ever."""
    server = serving(servers=2, shapes=SHAPES)
    push_round(server, 1, THREE)
    text = "the rule was changed while push 1 of key 'a' was under way: server-0 applied it with another one"
    [told] = server.norms(1, parts=FOUR)
    assert (told.link, told.body["error"]) == ("server-1", text)
    server.norms(2, parts=FOUR)
    [told] = to(push_round(server, 2, THREE), "server-1")
    assert told.body["error"] == text.replace("push 1", "push 2")


def test_servers_that_send_sums_of_different_rules_fail_instead_of_adding_them(normed: History) -> None:
    push_round(normed, 1, THREE)
    normed.norms(1, parts=[[2, 2, [16.0, 1.0]]])
    assert reason(normed.pull(0, 1)) == "the servers applied different rules"


def test_a_lost_connection_to_a_server_is_told_to_the_scheduler_which_ends_what_waits(normed: History) -> None:
    """The other server may live, and nobody else sees that what it was sent is lost."""
    push_round(normed, 1, THREE)
    normed.pull(0, 1)
    [told] = normed.cut("server-1")
    assert (told.link, told.kind, told.body["who"]) == ("scheduler", Kind.LOST, "server-1")
    text = r"server-0@here \(pid \d+\) lost its connection to server-1 \(tcp://[^)]+\): its connection closed"
    assert re.fullmatch(text, told.body["reason"])
    sent = normed.hear("scheduler", data(Kind.LOST, body=told.body))
    assert reason(sent) == told.body["reason"]


def test_the_reason_that_a_server_gives_for_its_end_is_told_to_who_waits_for_it(normed: History) -> None:
    push_round(normed, 1, THREE)
    normed.pull(0, 1)
    sent = normed.hear("server-1", data(Kind.LOST, body={"who": "server-1", "reason": "server-1 failed: its GPU"}))
    assert reason(sent) == "server-1 failed: its GPU"
    assert [told.link for told in normed.cut("server-1")] == ["scheduler"]


def test_after_a_loss_nothing_waits_for_norms(normed: History) -> None:
    push_round(normed, 1, THREE)
    normed.pull(0, 1)
    assert reason(normed.lost("server-1", "server-1 is lost")) == "server-1 is lost"
    assert normed.norms(1, parts=FOUR) == []
    assert normed.tick(1000) == []


def test_norms_of_the_last_script_are_none_of_the_next_one(normed: History) -> None:
    push_round(normed, 1, THREE)
    normed.pull(0, 1)
    assert said(normed.scheduler(Kind.STOP, 9, stay=True)) == ["scheduler STOP"]
    normed.init({"a": [0, 0], "b": [0, 0]}, shapes=SHAPES)
    normed.rule(NORMALISED)
    assert normed.norms(1, parts=FOUR) == [], "those of the last script"
    push_round(normed, 1, THREE)
    assert normed.rounds()["a"] == 0
    normed.norms(1, script=1, parts=[[2, 2, [27.0]]])
    assert values(normed.pull(0, 1)) == {"a": pytest.approx([-0.5, 0])}


def test_norms_need_the_shape_of_the_value(serving: Serving) -> None:
    server = serving(servers=2)
    server.rule(NORMALISED)
    push_round(server, 1, THREE)
    assert "the shape of key 'a' is not known to server-0" in reason(server.pull(0, 1))


def test_rules_with_norms_do_not_wait_for_those_of_a_skipped_round(normed: History) -> None:
    normed.push(0, 1, THREE)
    normed.skip(1, 1)
    assert values(normed.pull(0, 1)) == {"a": [0, 0]}


def test_an_async_push_is_acknowledged_before_its_norms_are_known_and_a_pull_waits_for_them(serving: Serving) -> None:
    server = norms_server(serving, type_name="dist_async")
    sent = server.push(0, 1, THREE)
    assert sorted(said(sent)) == ["server-1 NORMS", "w0 PUSH"]
    assert to(sent, "server-1")[0].body["rank"] == 0
    assert server.pull(0, 1) == []
    [note] = server.tick(10)
    assert note.body["text"] == "waiting for the other servers' norms, key a, push 1 of worker-0"
    assert values(server.norms(1, rank=0, parts=FOUR)) == {"a": pytest.approx([-0.6, 0])}


def test_async_pushes_of_each_worker_have_norms_of_their_own_and_may_overtake(serving: Serving) -> None:
    server = norms_server(serving, type_name="dist_async")
    server.push(0, 1, THREE)
    server.push(1, 1, {"a": [0, 3]})
    server.push(1, 2, THREE)
    server.norms(1, rank=1, parts=FOUR)
    server.norms(1, rank=0, parts=FOUR)
    assert server.pull(0, 1) == [], "it came after worker 1's second push"
    assert values(server.norms(2, rank=1, parts=FOUR)) == {"a": pytest.approx([-1.2, -0.6])}


def test_an_async_push_without_norms_is_counted_and_told_though_another_one_waits_for_norms(serving: Serving) -> None:
    """The rule was changed in between; server 1 had the old one for the second push, too."""
    server = norms_server(serving, type_name="dist_async")
    server.push(0, 1, THREE)
    server.rule("sgd")
    server.norms(1, rank=1, parts=FOUR)
    [told] = to(server.push(1, 1, {"a": [0, 3]}), "server-1")
    assert told.body["error"].startswith("the rule was changed while push 1 of key 'a' was under way")
    assert (told.body["rank"], server.stats()["updates"]) == (1, 1)
    server.norms(1, rank=0, parts=FOUR)
    server.push(0, 2, THREE)
    assert server.stats()["updates"] == 3
    assert server.stats()["staleness"]["0"] == {"mean": 1.0, "max": 2, "pushes": 2}


def test_a_refused_repeat_of_an_update_that_is_over_is_no_other_servers_affair(serving: Serving) -> None:
    server = norms_server(serving, type_name="dist_async")
    server.push(0, 1, THREE)
    server.norms(1, rank=0, parts=FOUR)
    bad = [Piece(0, round=1, codec=4, payload=bytes(3))]
    assert said(server.hear("w0", data(Kind.PUSH, bad))) == ["w0 PUSH!"]


def test_an_async_failure_after_the_acknowledgement_is_the_pushers_next_pull_once(serving: Serving) -> None:
    server = norms_server(serving, type_name="dist_async")
    server.push(0, 1, THREE)
    server.norms(1, rank=0, error="the rule failed on server-1")
    assert said(server.pull(1, 0)) == ["w1 PULL"], "it is not worker 1's affair"
    assert reason(server.pull(0, 1)) == "the rule failed on server-1"
    assert values(server.pull(0, 1)) == {"a": [0, 0]}


def test_a_pull_of_several_keys_that_failed_is_answered_once(serving: Serving) -> None:
    server = serving("dist_async", servers=2, shapes={"0": [4], "1": [4]})
    server.rule(NORMALISED)
    server.push(0, 1, {"a": [1, 1], "b": [1, 1]})
    server.pull(0, 1, "a", "b")
    assert said(server.norms(1, "a", rank=0, error="the rule failed on server-1")) == ["w0 PULL!"]
    assert server.norms(1, "b", rank=0, error="the rule failed on server-1") == []
    assert said(server.pull(0, 1, "a")) == ["w0 PULL"]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_push_that_is_refused_here_is_not_waited_for_by_the_server_that_took_its_piece(
    serving: Serving, is_first: bool
) -> None:
    """A worker pushed while another one's first rule was on its way: server 1 had the rule, this one had not."""
    server = serving("dist_async", servers=2, shapes=SHAPES)
    if is_first:
        assert server.norms(1, rank=0, parts=FOUR) == []
    sent = server.push(0, 1, THREE)
    assert said(sent)[0] == "w0 PUSH!"
    [told] = sent[1:] if is_first else server.norms(1, rank=0, parts=FOUR)
    assert (told.link, told.body["rank"], told.body["round"]) == ("server-1", 0, 1)
    assert told.body["error"]


def test_an_async_push_that_is_refused_while_it_is_read_leaves_no_half_update(serving: Serving) -> None:
    """The second payload cannot be read: the first key must not wait for norms of a push that was never made."""
    server = norms_server(serving, type_name="dist_async")
    bad = [Piece(0, round=1, payload=bytes(8)), Piece(1, round=1, codec=4, payload=bytes(3))]
    assert said(server.hear("w0", data(Kind.PUSH, bad)))[0] == "w0 PUSH!"
    assert values(server.pull(0, 0)) == {"a": [0, 0]}
    server.push(0, 2, THREE)
    assert values([*server.norms(2, rank=0, parts=FOUR), *server.pull(0, 2)]) == {"a": pytest.approx([-0.6, 0])}


# Codecs and rows


@pytest.mark.parametrize(
    ("codec", "payload", "body", "words"),
    [
        (9, bytes(4), {}, "key 'a': unknown codec number 9; known are 1 (2bit)"),
        (1, bytes(5), {}, "key 'a': compression '2bit' makes 4 bytes of 2 elements, the payload has 5"),
        (3, b"", {}, "key 'a': compression 'fp16' makes 4 bytes of 2 elements, the payload has 0"),
        (1, bytes(4), {"codec": {"threshold": -1}}, "key 'a': compression '2bit': threshold=-1: expected"),
        (1, bytes(4), {"codec": {"treshold": 1}}, "has no parameter 'treshold'"),
        (1, bytes(4), {"codec": [1]}, "key 'a': the parameters of a codec are an object, not [1]"),
        (16, bytes(8), {}, "key 'a' is not row-sparse"),
        (0, bytes(8), {"scale": True}, "a contribution is scaled by a finite number, not by True"),
        (0, bytes(8), {"scale": float("inf")}, "a contribution is scaled by a finite number, not by inf"),
        (0, bytes(8), {"scale": "2"}, "a contribution is scaled by a finite number, not by '2'"),
    ],
)
def test_a_push_that_cannot_be_read_is_refused_and_its_round_stays_open(
    server: History, codec: int, payload: bytes, body: dict[str, Any], words: str
) -> None:
    push = data(Kind.PUSH, [Piece(0, round=1, codec=codec, payload=payload)], body=body)
    assert words in reason(server.hear("w0", push))
    push_round(server, 1, {"a": [1, 2]})
    assert values(server.pull(0, 1)) == {"a": [1, 2]}


def test_integers_are_neither_compressed_nor_scaled(server: History) -> None:
    server.init({"c": [0, 0]}, dtype=np.int32)
    coded = server.push(0, 1, {"c": bytes(4)}, codec="2bit")
    assert reason(coded) == "key 'c': compression '2bit' is for float values, not int32"
    assert reason(server.push(0, 1, {"c": [1, 1]}, scale=0.5)) == "key 'c': only float values are scaled, not int32"
    assert said(server.push(0, 1, {"c": [1, 1]}, scale=1)) == ["w0 PUSH"]


def test_compressed_and_scaled_contributions_are_added_to_plain_ones_as_float32(server: History) -> None:
    server.push(0, 1, {"a": [0.75, -0.75]}, codec="2bit", scale=4.0)
    server.push(1, 1, {"a": [1, 1]})
    assert values(server.pull(0, 1)) == {"a": [3, -1]}


def test_only_sums_travel_back_compressed_and_weights_at_most_as_fp16(serving: Serving) -> None:
    server = serving()
    assert said(server.pull(0, 0, codec="2bit")) == ["w0 PULL"]
    server.rule("sgd")
    text = "key 'a': weights of a rule travel back in full or as fp16, not as 2bit"
    assert reason(server.pull(0, 0, codec="2bit")) == text
    assert values(server.pull(0, 0, codec="fp16")) == {"a": [0, 0]}
    assert "values of an asynchronous store" in reason(serving("dist_async").pull(0, 0, codec="topk"))


def test_the_first_value_is_answered_in_full_and_a_round_by_the_codec(server: History) -> None:
    [reply] = server.pull(0, 0, codec="2bit")
    assert reply.codecs == {"a": ""}
    push_round(server, 1, {"a": [0.75, -0.25]})
    [reply] = server.pull(0, 1, codec="2bit")
    assert reply.codecs == {"a": "2bit"}
    server.assign({"a": [0.3, 0.3]})
    [reply] = server.pull(0, 1, codec="2bit")
    assert reply.codecs == {"a": ""}
    assert values([reply]) == {"a": pytest.approx([0.3, 0.3])}


def test_a_round_is_encoded_once_for_all_and_what_was_left_out_comes_with_the_next(server: History) -> None:
    push_round(server, 1, {"a": [0.75, -0.25]})
    for rank in (0, 1, 0):
        assert values(server.pull(rank, 1, codec="2bit")) == {"a": [0.5, 0]}
    push_round(server, 2, {"a": [0.25, -0.25]})
    for rank in (0, 1):
        assert values(server.pull(rank, 2, codec="2bit")) == {"a": [0.5, -0.5]}
    assert values(server.pull(0, 2)) == {"a": [0.25, -0.25]}, "the value itself is in full"


@pytest.mark.parametrize("rule", [None, "test"])
def test_a_half_precision_answer_is_made_anew_after_each_update(server: History, rule: str | None) -> None:
    if rule:
        server.rule(rule)
    for number in (1, 2):
        push_round(server, number, {"a": [0.1, number]})
        full = values(server.pull(0, number))["a"]
        expected = np.array(full, np.float32).astype(np.float16).astype(np.float32).tolist()
        assert values(server.pull(0, number, codec="fp16")) == {"a": expected}


def test_a_reply_says_what_each_payload_is(server: History) -> None:
    server.init({"c": [1, 2, 3, 4]}, rows={"2": 2}, shapes={"2": [2, 2]})
    server.push_all(1, {"a": [1, 1], "c": [1, 2, 3, 4]})
    pull = [Piece(0, round=1, codec=1), Piece(2, 0, 4, 1, codec=16, payload=bytes(rows_of([1])))]
    [reply] = server.hear("w0", data(Kind.PULL, pull, body={"codec": {"threshold": 0.5}}))
    assert reply.body == {"codec": {"threshold": 0.5}}
    assert reply.codecs == {"a": "2bit", "c": "rows"}
    assert [piece.round for piece in reply.pieces] == [1, 1]
    assert values([reply]) == {"a": [0.5, 0.5], "c": [6, 8]}


def test_what_cannot_be_compressed_is_the_pullers_error(serving: Serving) -> None:
    server = serving(shapes={"0": [2]})
    push_round(server, 1, {"a": [np.inf, 0]})
    text = "key 'a' of shape (2,): compression '2bit': element 0 is inf"
    assert reason(server.pull(0, 1, codec="2bit")).startswith(text)
    assert values(server.pull(0, 1))["a"][0] == np.inf


def embedding(serving: Serving, type_name: str = "dist_sync") -> History:
    """Key c has three rows of two."""
    server = serving(type_name)
    server.init({"c": [1, 1, 2, 2, 3, 3]}, rows={"2": 2}, shapes={"2": [3, 2]})
    return server


def push_rows(server: History, rank: int, number: int, rows: list[int], given: Any, **body: Any) -> list[Sent]:
    payload = bytes(rows_of(rows, np.reshape(given, (len(rows), 2))))
    return server.push(rank, number, {"c": payload}, codec="rows", **body)


def test_without_a_rule_a_round_of_rows_assigns_their_sum_and_zeros_the_rest(serving: Serving) -> None:
    server = embedding(serving)
    push_rows(server, 0, 1, [2], [1, 2])
    push_rows(server, 1, 1, [0, 2], [[5, 5], [10, 10]], scale=2.0)
    assert values(server.pull(0, 1, "c")) == {"c": [10, 10, 0, 0, 21, 22]}


def test_a_round_of_rows_of_one_worker_alone(serving: Serving) -> None:
    server = embedding(serving)
    server.join(1)
    push_rows(server, 0, 1, [2], [7, 8])
    assert values(server.pull(0, 1, "c")) == {"c": [0, 0, 0, 0, 7, 8]}


@pytest.mark.parametrize("is_dense_first", [True, False])
def test_a_sparse_and_a_dense_contribution_make_a_dense_round(serving: Serving, is_dense_first: bool) -> None:
    server = embedding(serving)
    ranks = (0, 1) if is_dense_first else (1, 0)
    for rank in ranks:
        server.push(0, 1, {"c": [1] * 6}) if rank == 0 else push_rows(server, 1, 1, [1], [5, 6])
    assert values(server.pull(0, 1, "c")) == {"c": [1, 1, 6, 7, 1, 1]}


def test_a_round_without_any_rows_changes_no_row_of_a_rule(serving: Serving) -> None:
    server = embedding(serving)
    server.rule("sgd", learning_rate=1.0)
    for rank in (0, 1):
        push_rows(server, rank, 1, [], [])
    assert values(server.pull(0, 1, "c")) == {"c": [1, 1, 2, 2, 3, 3]}
    push_rows(server, 0, 2, [1], [1, 1])
    push_rows(server, 1, 2, [], [])
    assert values(server.pull(0, 2, "c")) == {"c": [1, 1, 1, 1, 3, 3]}


def test_rows_are_read_before_anything_is_counted(serving: Serving) -> None:
    server = embedding(serving)
    text = "key 'c' of shape (3, 2): rows: expected"
    one, bad = np.ones(2, np.float32).tobytes(), bytes(rows_of([5], np.zeros((1, 2))))
    both = [Piece(0, round=1, payload=one), Piece(2, 0, 6, 1, codec=16, payload=bad)]
    assert reason(server.hear("w0", data(Kind.PUSH, both))).startswith(text)
    push_round(server, 1, {"a": [2, 2]})
    assert values(server.pull(0, 1)) == {"a": [2, 2]}, "the refused one left no contribution behind"


@pytest.mark.parametrize("payload", [b"", bytes(7), bytes([1]) + bytes(7), bytes([2]) + bytes(40), bytes([255]) * 40])
def test_rows_that_cannot_be_read_are_refused(serving: Serving, payload: bytes) -> None:
    server = embedding(serving)
    assert "rows: expected" in reason(server.push(0, 1, {"c": payload}, codec="rows"))


def test_pulled_rows_come_in_the_order_of_the_request_when_their_round_is_over(serving: Serving) -> None:
    server = embedding(serving)
    assert values(server.pull(0, 0, "c", rows=[0, 2])) == {"c": [1, 1, 3, 3]}
    assert values(server.pull(0, 0, "c", rows=[])) == {"c": []}
    server.push(0, 1, {"c": range(6)})
    assert server.pull(0, 1, "c", rows=[1, 2]) == []
    [reply] = to(server.push(1, 1, {"c": [0] * 6}), "w0")
    assert values([reply]) == {"c": [2, 3, 4, 5]}


def test_rows_that_do_not_exist_are_refused_with_key_and_shape_and_nothing_waits(serving: Serving) -> None:
    server = embedding(serving)
    server.push(0, 1, {"c": [0] * 6})
    text = "key 'c' of shape (3, 2): rows: expected ascending row numbers from 0 to 2, found [0,7]"
    assert reason(server.pull(0, 1, "c", rows=[0, 7])).replace(", 7", ",7") == text
    assert said(server.push(1, 1, {"c": [0] * 6})) == ["w1 PUSH"]


def test_a_pull_of_rows_says_which_and_no_other_pull_brings_anything(serving: Serving) -> None:
    server = embedding(serving)
    assert reason(server.pull(0, 0, "c", codec="rows")) == "key 'c': PULL with payload kind NONE"
    assert reason(server.pull(0, 0, "c", codec="fp16", changes={"payload": bytes(4)})) == (
        "key 'c': PULL with payload kind FRAME"
    )


# Saved states


def save(server: History, folder: Path, *keys: str) -> list[Sent]:
    names = [[ord(key) - ord("a"), key] for key in keys]
    return server.scheduler(Kind.SAVE, 7, folder=str(folder), part="data-1", names=names)


def stage(server: History, folder: Path, holds: Any, *keys: str, spec: Any = None) -> list[Sent]:
    """Let the server read states; `holds` is what the manifest says of each file, `spec` the rule they are for."""
    numbers = [[ord(key) - ord("a"), ord(key) - ord("a"), key] for key in keys]
    manifest = {"data": "data-1", "files": holds}
    return server.scheduler(
        Kind.LOAD, 7, action="stage", folder=str(folder), manifest=manifest, numbers=numbers, spec=spec
    )


def saved(server: History, folder: Path, *keys: str) -> dict[str, Any]:
    """Let the server save keys; return what the manifest says of its file."""
    [reply] = save(server, folder, *keys)
    assert not reply.is_error, reply.body
    return {str(reply.body["file"]): dict(reply.body["holds"])}


def stage_nothing(server: History) -> list[Sent]:
    """Let the server read states of the rule that it has, which hold nothing."""
    manifest = {"data": "data-1", "files": {}}
    spec = {"name": FUSSY, "params": {}}
    return server.scheduler(Kind.LOAD, 7, action="stage", folder="/nowhere", manifest=manifest, numbers=[], spec=spec)


def test_a_server_saves_its_file_and_answers_with_what_is_in_it_and_the_rounds(server: History, tmp_path: Path) -> None:
    push_round(server, 1, {"a": [1, 2]})
    [reply] = save(server, tmp_path, "a", "b")
    assert (reply.body["file"], reply.body["rounds"]) == ("server-0.npz", [[0, 1], [1, 0]])
    assert reply.body["holds"]["pieces"] == [[0, 0, 2], [1, 0, 2]]
    with np.load(tmp_path / "data-1" / "server-0.npz") as file:
        assert file["0.0.weight"].tolist() == [1, 2]


def test_counts_of_saved_rounds_leave_out_those_that_were_skipped(server: History, tmp_path: Path) -> None:
    push_round(server, 1, {"a": [1, 1]})
    server.skip(0, 2)
    server.skip(1, 2)
    [reply] = save(server, tmp_path, "a", "b")
    assert reply.body["rounds"] == [[0, 1], [1, 0]]


def test_nothing_is_saved_or_loaded_while_a_round_is_open_and_the_workers_are_named(
    server: History, tmp_path: Path
) -> None:
    server.push(0, 1, {"b": [1, 1]})
    text = (
        "round 1 of key 'b' is open: worker-0 pushed it, worker-1 did not; states are saved and loaded when all workers"
        " have pushed equally often"
    )
    assert reason(save(server, tmp_path, "a", "b")) == text
    assert list(tmp_path.iterdir()) == []
    assert reason(stage(server, tmp_path, {}, "a", "b")) == text
    assert said(save(server, tmp_path, "a")) == ["scheduler SAVE"], "a key that is not named does not count"


def test_saving_waits_for_updates_that_are_under_way(normed: History, tmp_path: Path) -> None:
    """Their pushes are acknowledged: a worker would not understand a refusal."""
    push_round(normed, 1, THREE)
    assert save(normed, tmp_path, "a", "b") == []
    assert normed.tick(1.0) == []
    [reply] = [*normed.norms(1, parts=FOUR), *normed.tick(2.0)]
    assert (str(reply), reply.body["rounds"]) == ("scheduler SAVE", [[0, 1], [1, 0]])
    with np.load(tmp_path / "data-1" / "server-0.npz") as file:
        assert file["0.0.weight"].tolist() == pytest.approx([-0.6, 0])
    assert normed.tick(3.0) == []


def test_a_save_that_waits_is_refused_when_its_store_is_forgotten(normed: History, tmp_path: Path) -> None:
    """It would write a file without values."""
    push_round(normed, 1, THREE)
    assert save(normed, tmp_path, "a", "b") == []
    sent = normed.scheduler(Kind.CLOSE, 9)
    assert said(sent) == ["scheduler SAVE!", "scheduler CLOSE"]
    assert sent[0].body["reason"] == "server-0 knows no store 1"
    assert normed.tick(1.0) == []
    assert list(tmp_path.iterdir()) == []


def test_saving_waits_for_async_updates_until_the_last_of_them_is_over(serving: Serving, tmp_path: Path) -> None:
    server = norms_server(serving, type_name="dist_async")
    server.push(0, 1, THREE)
    server.push(1, 1, THREE)
    assert save(server, tmp_path, "a", "b") == []
    assert [*server.norms(1, rank=1, parts=FOUR), *server.tick(1.0)] == []
    assert said([*server.norms(1, rank=0, parts=FOUR), *server.tick(2.0)]) == ["scheduler SAVE"]


def test_rounds_go_on_where_the_saved_ones_ended(serving: Serving, tmp_path: Path) -> None:
    first = serving()
    push_round(first, 1, {"a": [1, 2], "b": [3, 4]})
    [reply] = save(first, tmp_path, "a")
    server = serving()
    assert said(stage(server, tmp_path, {"server-0.npz": reply.body["holds"]}, "a")) == ["scheduler LOAD"]
    assert values(server.pull(0, 0)) == {"a": [0, 0]}, "read, and not taken over yet"
    assert said(server.scheduler(Kind.LOAD, 7, action="commit", rounds=[[0, 40]])) == ["scheduler LOAD"]
    assert values(server.pull(0, 40)) == {"a": [1, 2]}
    server.push(0, 41, {"a": [5, 5]})
    assert server.pull(0, 41) == []
    assert sorted(said(server.push(1, 41, {"a": [5, 5]}))) == ["w0 PULL", "w1 PUSH"]
    assert values(server.pull(0, 0, "b")) == {"b": [0, 0]}, "the other key is where it was"


def test_states_that_were_read_and_dropped_change_nothing(serving: Serving, tmp_path: Path) -> None:
    first = serving()
    push_round(first, 1, {"a": [1, 2]})
    [reply] = save(first, tmp_path, "a")
    server = serving()
    stage(server, tmp_path, {"server-0.npz": reply.body["holds"]}, "a")
    assert said(server.scheduler(Kind.LOAD, 7, action="drop")) == ["scheduler LOAD"]
    assert values(server.pull(0, 0)) == {"a": [0, 0]}


def test_states_that_are_read_again_take_the_place_of_those_that_were_read_before(
    serving: Serving, tmp_path: Path
) -> None:
    first = serving()
    push_round(first, 1, {"a": [1, 2], "b": [3, 4]})
    holds = saved(first, tmp_path, "a", "b")
    server = serving()
    stage(server, tmp_path, holds, "a")
    stage(server, tmp_path, holds, "b")
    server.scheduler(Kind.LOAD, 7, action="commit", rounds=[[1, 1]])
    assert values(server.pull(0, 0, "a")) == {"a": [0, 0]}
    assert values(server.pull(0, 1, "b")) == {"b": [3, 4]}


def test_a_loaded_value_is_answered_in_full_first(server: History, tmp_path: Path) -> None:
    push_round(server, 1, {"a": [0.75, -0.25]})
    holds = saved(server, tmp_path, "a")
    push_round(server, 2, {"a": [1, 1]})
    stage(server, tmp_path, holds, "a")
    server.scheduler(Kind.LOAD, 7, action="commit", rounds=[[0, 1]])
    [reply] = server.pull(0, 1, codec="2bit")
    assert reply.codecs == {"a": ""}
    assert values([reply]) == {"a": [0.75, -0.25]}


def test_states_that_are_taken_over_spare_a_reply_that_is_still_being_sent(serving: Serving, tmp_path: Path) -> None:
    first = serving()
    push_round(first, 1, {"a": [1, 2]})
    [saved] = save(first, tmp_path, "a")
    server = serving()
    server.read_slowly()
    [reply] = server.pull(0, 0)
    before = reply.values["a"]
    stage(server, tmp_path, {"server-0.npz": saved.body["holds"]}, "a")
    server.scheduler(Kind.LOAD, 7, action="commit", rounds=[[0, 1]])
    assert values(server.pull(0, 1)) == {"a": [1, 2]}
    assert before.tolist() == [0, 0]


def test_elements_that_are_in_no_file_are_an_error_that_names_the_key(serving: Serving, tmp_path: Path) -> None:
    first, server = serving(), serving()
    first.init({"c": [1, 2]})
    server.init({"c": [0, 0, 0, 0]})
    text = "key 'c': elements 2 to 3 are in none of the files of %s/data-1 on host here" % tmp_path
    assert reason(stage(server, tmp_path, saved(first, tmp_path, "c"), "c")) == text
    assert values(server.pull(0, 0, "c")) == {"c": [0, 0, 0, 0]}


def test_saved_values_of_another_type_or_size_are_refused_with_file_key_and_host(
    serving: Serving, tmp_path: Path
) -> None:
    first, server = serving(), serving()
    first.init({"c": [1, 2]}, dtype=np.float16)
    server.init({"c": [0, 0]})
    holds = saved(first, tmp_path, "c")
    assert "npz on host here has key 'c' as float16; expected float32" in reason(stage(server, tmp_path, holds, "c"))
    holds["server-0.npz"]["pieces"] = [[2, 0, 4]]
    server.init({"d": [0, 0]}, dtype=np.float16)
    assert "for key 'c' 2 elements of its weight; expected 4" in reason(stage(server, tmp_path, holds, "c"))


def test_a_piece_of_updated_and_never_updated_parts_begins_anew_where_nothing_was(
    serving: Serving, tmp_path: Path
) -> None:
    """Two servers had two elements each, one of them was stepped; the one that loads has all four."""
    holds: dict[str, Any] = {}
    for number, piece in enumerate(("c", "c+2")):
        each = serving()
        each.init({piece: [1, 2]})
        each.rule("sgd", learning_rate=1.0, momentum=0.5)
        if not number:
            push_round(each, 1, {piece: [4, 8]})
        holds["server-%d.npz" % number] = saved(each, tmp_path, "c")["server-0.npz"]
        (tmp_path / "data-1" / "server-0.npz").rename(tmp_path / "data-1" / ("of-%d" % number))
    for number in range(2):
        (tmp_path / "data-1" / ("of-%d" % number)).rename(tmp_path / "data-1" / ("server-%d.npz" % number))
    server = serving()
    server.init({"c": [0, 0, 0, 0]})
    server.rule("sgd", learning_rate=1.0, momentum=0.5)
    spec = {"name": "sgd", "params": {"learning_rate": 1.0, "momentum": 0.5}}
    assert said(stage(server, tmp_path, holds, "c", spec=spec)) == ["scheduler LOAD"]
    assert said(server.scheduler(Kind.LOAD, 7, action="commit", rounds=[[2, 1]])) == ["scheduler LOAD"]
    assert values(server.pull(0, 1, "c")) == {"c": [-3, -6, 1, 2]}
    push_round(server, 2, {"c": [0, 0, 1, 1]})
    assert values(server.pull(0, 2, "c")) == {"c": [-5, -10, 0, 1]}


@pytest.mark.parametrize(
    ("momentum", "text"),
    [
        (5.0, "the rule's state 'momentum' is an array, saved was 5.0"),
        (np.full(2, "x"), "the rule's state 'momentum' is float32, saved was <U1"),
        (np.zeros(2, complex), "the rule's state 'momentum' is float32, saved was complex128"),
    ],
)
def test_a_saved_state_of_another_kind_than_the_rules_is_an_error_and_nothing_is_loaded(
    serving: Serving, tmp_path: Path, momentum: Any, text: str
) -> None:
    first, server = serving(), serving()
    push_round(first, 1, {"a": [1, 2]})
    holds = saved(first, tmp_path, "a")
    path = tmp_path / "data-1" / "server-0.npz"
    if isinstance(momentum, float):
        holds["server-0.npz"]["counters"] = {"0.0": {"momentum": momentum}}
    else:
        with np.load(path) as file:
            np.savez(path, **{**file, "0.0.state.momentum": momentum})
        holds["server-0.npz"]["bytes"] = path.stat().st_size
    server.rule("sgd", learning_rate=1.0, momentum=0.5)
    spec = {"name": "sgd", "params": {"learning_rate": 1.0, "momentum": 0.5}}
    found = reason(stage(server, tmp_path, holds, "a", spec=spec))
    assert found == "key 'a' of the states in %s: %s" % (tmp_path, text)
    server.scheduler(Kind.LOAD, 7, action="commit", rounds=[])
    assert values(server.pull(0, 0)) == {"a": [0, 0]}


@pytest.mark.parametrize(("saver", "loader", "found"), [(None, 0.5, -1), (0.5, 0.0, -5), (0.5, 0.5, -7)])
def test_a_load_leaves_nothing_of_the_state_before_it_and_brings_what_the_rule_knows(
    serving: Serving, tmp_path: Path, saver: float | None, loader: float, found: float
) -> None:
    """Saved was a value that was never updated, or its first step of 4. The next one is of 1."""
    first, server = serving(), serving()
    if saver is not None:
        first.rule("sgd", learning_rate=1.0, momentum=saver)
        push_round(first, 1, {"a": [4, 4]})
    holds = saved(first, tmp_path, "a")
    server.rule("sgd", learning_rate=1.0, momentum=loader)
    push_round(server, 1, {"a": [100, 100]})
    stage(server, tmp_path, holds, "a", spec={"name": "sgd", "params": {"learning_rate": 1.0, "momentum": loader}})
    server.scheduler(Kind.LOAD, 7, action="commit", rounds=[[0, 1]])
    push_round(server, 2, {"a": [1, 1]})
    assert values(server.pull(0, 2)) == {"a": [found, found]}


def test_states_are_refused_when_the_rule_was_changed_while_they_were_read(serving: Serving, tmp_path: Path) -> None:
    first = serving()
    [saved] = save(first, tmp_path, "a")
    server = serving()
    stage(server, tmp_path, {"server-0.npz": saved.body["holds"]}, "a")
    server.rule("sgd", learning_rate=0.5)
    sent = server.scheduler(Kind.LOAD, 7, action="commit", rounds=[[0, 1]])
    assert reason(sent) == "the rule was changed while states were being loaded; nothing was loaded, load them again"


def test_a_server_without_keys_of_the_store_saves_and_loads_too(server: History, tmp_path: Path) -> None:
    [reply] = server.scheduler(Kind.SAVE, 7, store=9, folder=str(tmp_path), part="data-1", names=[])
    assert (reply.body["file"], reply.body["rounds"]) == ("server-0.npz", [])
    assert reply.body["holds"]["pieces"] == []
    assert (tmp_path / "data-1" / "server-0.npz").exists()
    assert said(server.scheduler(Kind.LOAD, 8, store=9, action="commit", rounds=[[0, 40]])) == ["scheduler LOAD"]


def test_a_users_state_that_is_neither_array_nor_number_is_refused_with_key_and_state(
    server: History, tmp_path: Path
) -> None:
    server.rule("rules_of_users:Remembering")
    push_round(server, 1, {"a": [1, 2]})
    text = "key 'a': the rule's state 'history' is of type list, which cannot be saved; arrays and numbers can"
    assert reason(save(server, tmp_path, "a")) == text


# Profiles


def test_a_profile_has_what_was_done_meanwhile_and_one_is_made_at_a_time(server: History) -> None:
    assert reason(server.ask(0, Kind.PROFILE, action="stop")) == "server-0 on host here is not being profiled"
    assert said(server.ask(0, Kind.PROFILE, action="start")) == ["w0 PROFILE"]
    push_round(server, 1, {"a": [1, 1]})
    text = "server-0 on host here is being profiled already"
    assert reason(server.ask(1, Kind.PROFILE, action="start")) == text
    [reply] = server.ask(0, Kind.PROFILE, action="stop")
    events = reply.body["events"]
    assert events[0]["args"] == {"name": "server-0@here"}
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"apply"}
    push_round(server, 2, {"a": [1, 1]})
    server.ask(0, Kind.PROFILE, action="start")
    [reply] = server.ask(0, Kind.PROFILE, action="stop")
    assert not [event for event in reply.body["events"] if event["ph"] == "X"]
