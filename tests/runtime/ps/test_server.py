"""A server's decisions, by scripted histories: rounds, who contributed, who waits. No socket, no array."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster import config
from rig import VALUE, A, B, Rig, kinds, node, reason, works

from distrun_runtime.errors import KVError
from distrun_runtime.protocol.message import Entry, Flag, Kind, Message, Payload
from distrun_runtime.ps import role, work
from distrun_runtime.ps.server import Server

# Rounds


def test_a_round_is_applied_when_every_worker_contributed() -> None:
    rig = Rig()
    assert kinds(rig.push(0, 1)) == [("w0", "PUSH")]
    assert works(rig) == ["add a1"]
    assert kinds(rig.push(1, 1)) == [("w1", "PUSH")]
    assert works(rig) == ["add a1", "apply a1"]


def test_keys_have_rounds_of_their_own() -> None:
    rig = Rig()
    rig.push(0, 1, 0)
    rig.push(1, 1, 1)
    assert works(rig) == ["add a1", "add b1"]
    rig.push(0, 1, 1)
    assert works(rig) == ["add b1", "apply b1"]


def test_a_second_push_of_one_worker_belongs_to_its_next_round() -> None:
    rig = Rig()
    for number in (1, 2, 3):
        rig.push(0, number)
    assert works(rig) == ["add a1", "add a2", "add a3"]
    rig.push(1, 1)
    assert works(rig) == ["add a1", "apply a1"]
    rig.push(1, 2)
    assert works(rig) == ["add a2", "apply a2"]


def test_a_repeat_is_acknowledged_and_counted_once() -> None:
    rig = Rig()
    rig.push(0, 1)
    assert kinds(rig.push(0, 1)) == [("w0", "PUSH")]
    rig.push(1, 1)
    assert kinds(rig.push(1, 1)) == [("w1", "PUSH")]
    assert works(rig) == ["add a1", "add a1", "apply a1"]


def test_several_keys_in_one_push_complete_one_by_one() -> None:
    rig = Rig()
    rig.push(0, 1, 0, 1)
    rig.push(1, 1, 0, 1)
    assert works(rig) == ["add a1", "add b1", "add a1", "apply a1", "add b1", "apply b1"]


# Pulls


def test_a_pull_before_any_push_is_answered_at_once() -> None:
    rig = Rig()
    assert kinds(rig.pull(0, 0)) == [("w0", "PULL")]
    assert works(rig) == ["lend", "deliver"]


def test_a_pull_of_the_own_round_waits_until_the_round_is_applied() -> None:
    rig = Rig()
    rig.push(0, 1)
    assert rig.pull(0, 1) == []
    assert kinds(rig.push(1, 1)) == [("w0", "PULL"), ("w1", "PUSH")]
    assert works(rig) == ["add a1", "add a1", "apply a1", "lend", "deliver"]


def test_a_pull_is_answered_only_once_the_work_is_done() -> None:
    rig = Rig()
    rig.is_held = True
    rig.push(0, 1)
    rig.push(1, 1)
    assert rig.pull(1, 1) == []
    assert kinds(rig.release()) == [("w1", "PULL")]


def test_a_pull_gets_its_own_round_though_the_next_is_complete_already() -> None:
    """Lend comes between the two Applies: no mixed value, no later one."""
    rig = Rig()
    rig.push(0, 1)
    rig.pull(0, 1)
    rig.push(0, 2)
    rig.is_held = True
    rig.push(1, 1)
    rig.push(1, 2)
    rig.done.clear()
    assert kinds(rig.release()) == [("w0", "PULL")]
    assert works(rig) == ["apply a1", "lend", "deliver"]
    assert rig.release() == []


def test_a_pull_of_an_earlier_round_than_the_present_is_answered_at_once() -> None:
    rig = Rig()
    for number in (1, 2):
        for rank in (0, 1):
            rig.push(rank, number)
    assert kinds(rig.pull(0, 1)) == [("w0", "PULL")]


def test_a_pull_of_several_keys_is_answered_once_when_the_last_is_there() -> None:
    rig = Rig()
    rig.push(0, 1, 0, 1)
    assert rig.pull(0, 1, 0, 1) == []
    assert kinds(rig.push(1, 1, 0)) == [("w1", "PUSH")]
    assert kinds(rig.push(1, 1, 1)) == [("w0", "PULL"), ("w1", "PUSH")]
    lends = [what for what in rig.done if isinstance(what, work.Lend)]
    assert [(what.number, what.slot) for what in lends] == [(0, A), (1, B)]


def test_pulls_of_two_workers_are_both_answered() -> None:
    rig = Rig()
    rig.push(0, 1)
    rig.pull(0, 1)
    rig.push(1, 1)
    rig.push(1, 2)
    rig.pull(1, 2)
    assert kinds(rig.push(0, 2)) == [("w1", "PULL"), ("w0", "PUSH")]


def test_a_pull_is_told_soon_whom_it_waits_for_and_again_every_30_seconds() -> None:
    rig = Rig(workers=3)
    rig.push(0, 1, 1)
    rig.push(2, 1, 1)
    rig.now = 5
    rig.pull(0, 1, 1)
    assert rig.perform(rig.server.tick(6.9)) == []
    for now, seconds in ((7.0, 2.0), (37.0, 32.0), (67.0, 62.0)):
        [(link, message)] = rig.perform(rig.server.tick(now))
        assert (link, message.kind, message.is_reply) == ("w0", Kind.WAITING, False)
        assert message.body == {"text": "waiting for worker-1, key b, round 1", "seconds": seconds}
        assert message.request == rig.requests
        assert rig.server.tick(now + 1) == []


# Async


def test_async_pushes_are_applied_on_arrival_and_answered_when_they_are() -> None:
    rig = Rig("dist_async")
    rig.scheduler(Kind.RULE, 1, spec={"name": "sgd", "params": {}})
    rig.is_held = True
    assert rig.push(0, 1, 0, 1) == []
    assert kinds(rig.release()) == [("w0", "PUSH")]
    steps = rig.done[-1]
    assert isinstance(steps, work.Steps)
    assert steps.slots == (A, B)


def test_async_pulls_never_wait() -> None:
    assert kinds(Rig("dist_async").pull(0, 17)) == [("w0", "PULL")]


def test_async_without_a_rule_is_refused_and_the_server_lives() -> None:
    rig = Rig("dist_async")
    assert "dist_async needs a rule on the servers: call kv.set_optimizer" in reason(rig.push(0, 1))
    assert kinds(rig.pull(0, 0)) == [("w0", "PULL")]
    rig.scheduler(Kind.RULE, 1, spec={"name": "sgd", "params": {}})
    assert kinds(rig.push(0, 1)) == [("w0", "PUSH")]


def test_an_async_rule_that_fails_is_the_pushers_error() -> None:
    rig = Rig("dist_async")
    rig.scheduler(Kind.RULE, 1, spec={"name": "sgd", "params": {}})
    rig.error = ZeroDivisionError("by zero")
    [(link, message)] = rig.push(1, 1)
    assert (link, message.body["error"]) == ("w1", "RuleError")
    assert message.body["reason"] == "the rule failed on server-0 for key 'a': by zero"
    assert message.body["traceback"] == "Traceback of the server"


# Mistakes of clients


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": 5}, "key 5, offset 0: no such piece on server-0"),
        ({"offset": 4}, "key 'a', offset 4: no such piece on server-0"),
        ({"length": 1}, "key 'a': server-0 has 2 elements of float32, the message 1 of float32"),
        ({"dtype": 1}, "key 'a': server-0 has 2 elements of float32, the message 2 of float64"),
    ],
)
def test_a_piece_that_does_not_fit_is_refused(changes: dict[str, int], words: str) -> None:
    rig = Rig()
    assert reason(rig.push(0, 1, **changes)) == words
    assert reason(rig.pull(0, 0, **changes)) == words
    assert works(rig) == []


def test_one_wrong_key_refuses_the_whole_push() -> None:
    rig = Rig()
    assert "no such piece" in reason(rig.push(0, 1, 0, 9))
    assert works(rig) == []
    assert kinds(rig.push(0, 1)) == [("w0", "PUSH")]


def test_a_push_without_values_and_a_pull_with_values_are_refused() -> None:
    rig = Rig()
    assert reason(rig.hear("w0", Message(Kind.PUSH, entries=(Entry(0, 0, 2, 1),)))) == (
        "key 'a': PUSH with payload kind NONE"
    )
    entry = Entry(0, 0, 2, payload=Payload.FRAME)
    assert reason(rig.hear("w0", Message(Kind.PULL, entries=(entry,), payloads=[VALUE]))) == (
        "key 'a': PULL with payload kind FRAME"
    )


def test_a_store_that_has_no_keys_is_refused() -> None:
    pull = Message(Kind.PULL, store=8, entries=(Entry(0, 0, 2),))
    assert reason(Rig().hear("w0", pull)) == "store 8 has no keys on server-0"


def test_a_double_init_is_refused_whole() -> None:
    rig = Rig()
    assert reason(rig.init("dist_sync", 5, 0)) == "key 'a' was initialised before"
    assert works(rig) == []
    assert kinds(rig.init("dist_sync", 5)) == [("w0", "INIT")], "the refused one left nothing behind"
    assert reason(rig.init("dist_sync", 6, 6)) == "key 6 was initialised before"


def test_an_init_without_a_value_is_refused() -> None:
    rig = Rig()
    init = Message(Kind.INIT, entries=(Entry(5, 0, 2),))
    assert reason(rig.hear("w0", init)) == "key 5: INIT without a value"
    assert "no such piece" in reason(rig.pull(0, 0, 5))


def test_an_unknown_request_is_refused_and_a_reply_or_a_stranger_is_not_answered() -> None:
    rig = Rig()
    assert reason(rig.hear("w0", Message(Kind.BARRIER))) == "server-0 knows no BARRIER"
    assert rig.hear("w0", Message(Kind.PULL, Flag.REPLY)) == []
    assert rig.hear("in:ff", Message(Kind.PULL)) == []


# Rules


def test_a_rule_is_set_by_the_executor_and_then_answered() -> None:
    rig = Rig()
    [(link, message)] = rig.scheduler(Kind.RULE, 7, spec={"name": "sgd", "params": {"lr": 1}})
    assert (link, message.kind, message.request, message.is_error) == (role.SCHEDULER_LINK, Kind.RULE, 7, False)
    [what] = rig.done
    assert (what.store, what.spec) == (1, {"name": "sgd", "params": {"lr": 1}})


def test_a_rule_that_cannot_be_set_is_refused() -> None:
    rig = Rig()
    rig.error = KVError("unknown rule 'sdg'")
    [(link, message)] = rig.scheduler(Kind.RULE, 7, spec={"name": "sdg", "params": {}})
    assert (link, message.is_error) == (role.SCHEDULER_LINK, True)
    assert message.body == {"reason": "unknown rule 'sdg'", "error": "KVError"}


def test_a_rule_that_fails_is_the_error_of_those_who_pull_that_round() -> None:
    rig = Rig()
    rig.push(0, 1)
    rig.pull(0, 1)
    rig.error = ZeroDivisionError("by zero")
    sent = rig.push(1, 1)
    assert kinds(sent) == [("w0", "PULL!"), ("w1", "PUSH")]
    assert sent[0][1].body == {
        "reason": "the rule failed on server-0 for key 'a': by zero",
        "error": "RuleError",
        "traceback": "Traceback of the server",
    }
    assert kinds(rig.pull(1, 1)) == [("w1", "PULL!")]
    for rank in (0, 1):
        rig.push(rank, 2)
    assert kinds(rig.pull(1, 2)) == [("w1", "PULL")], "the next round is another matter"


def test_a_rule_that_fails_is_said_once_on_the_server_itself() -> None:
    """The pushes are acknowledged, and a script may end without a pull."""
    rig = Rig()
    for number in (1, 2):
        rig.push(0, number)
        rig.error = ZeroDivisionError("by zero")
        rig.push(1, number)
    assert [log for log in rig.logs if log.level == "ERROR"] == [
        role.Log("ERROR", "event=rule-failed store=1 the rule failed on server-0 for key 'a': by zero")
    ]


def test_a_round_that_failed_is_told_by_a_later_pull_to_who_pushed_on_without_asking() -> None:
    """Its update was lost, and nobody heard of it."""
    rig = Rig()
    for number in (1, 2, 3):
        rig.push(0, number)
        rig.error = ZeroDivisionError("by zero") if number == 1 else None
        rig.push(1, number)
        if number == 1:
            assert kinds(rig.pull(1, 1)) == [("w1", "PULL!")]
    assert kinds(rig.pull(1, 3)) == [("w1", "PULL")], "it was told"
    [(_, message)] = rig.pull(0, 3)
    assert message.body["reason"] == "the rule failed on server-0 for key 'a': by zero"
    assert kinds(rig.pull(0, 3)) == [("w0", "PULL")], "once"


def test_states_that_are_loaded_end_what_is_to_be_said_of_rounds_before() -> None:
    rig = Rig()
    rig.push(0, 1)
    rig.error = ZeroDivisionError("by zero")
    rig.push(1, 1)
    rig.error = None
    rig.scheduler(Kind.LOAD, 7, action="commit", rounds=[[0, 5]])
    assert kinds(rig.pull(0, 5)) == [("w0", "PULL")]


@pytest.mark.parametrize("is_parked", [True, False])
def test_a_failed_pull_gives_back_what_it_holds_and_waits_nowhere(is_parked: bool) -> None:
    """The first key is lent, the second fails, the third is owed."""
    rig = Rig()
    rig.init("dist_sync", 2)
    rig.push(0, 1, 0, 1, 2)
    rig.push(1, 1, 0)
    if is_parked:
        rig.pull(0, 1, 0, 1, 2)
    rig.error = ValueError("broken")
    sent = rig.push(1, 1, 1)
    if not is_parked:
        sent = rig.pull(0, 1, 0, 1, 2)
    assert ("w0", "PULL!") in kinds(sent)
    assert isinstance(rig.done[-1], work.Discard)
    rig.done.clear()
    assert kinds(rig.push(1, 1, 2)) == [("w1", "PUSH")]
    assert not any(isinstance(what, (work.Lend, work.Deliver)) for what in rig.done)


# Joining, leaving, dying


def test_a_worker_that_joined_counts_as_zero_from_then_on() -> None:
    rig = Rig()
    rig.push(0, 1)
    rig.pull(0, 1)
    assert kinds(rig.scheduler(Kind.JOIN, 3, rank=1)) == [("w0", "PULL"), (role.SCHEDULER_LINK, "JOIN")]
    rig.done.clear()
    rig.push(0, 2)
    assert works(rig) == ["add a2", "apply a2"]


def test_when_all_have_joined_rounds_are_of_all_again() -> None:
    rig = Rig()
    rig.scheduler(Kind.JOIN, 3, rank=1)
    rig.push(0, 1)
    rig.scheduler(Kind.JOIN, 4, rank=0)
    rig.scheduler(Kind.JOIN, 5, rank=1, all=True)
    rig.done.clear()
    rig.push(0, 2)
    assert works(rig) == ["add a2"]
    [(_, message)] = rig.hear("w1", Message(Kind.ROUNDS))
    assert message.body == {"rounds": [(0, 1), (1, 0)]}


def test_a_round_without_any_contribution_is_none() -> None:
    rig = Rig()
    rig.scheduler(Kind.JOIN, 3, rank=1)
    rig.scheduler(Kind.JOIN, 3, rank=0)
    assert works(rig) == []


def test_a_worker_that_left_the_store_is_never_waited_for_again() -> None:
    rig = Rig()
    rig.push(0, 1)
    assert kinds(rig.scheduler(Kind.LEFT, 6, rank=1)) == [(role.SCHEDULER_LINK, "LEFT")]
    assert works(rig) == ["add a1", "apply a1"]
    rig.scheduler(Kind.JOIN, 7, rank=0)
    rig.scheduler(Kind.JOIN, 8, rank=0, all=True)
    rig.push(0, 2)
    assert works(rig) == ["add a2", "apply a2"]


def test_a_bye_with_an_open_round_ends_the_pulls_that_wait_for_it() -> None:
    rig = Rig()
    rig.push(0, 1)
    rig.pull(0, 1)
    sent = rig.scheduler(Kind.LEFT, rank=1, who="worker-1@d2 (pid 9)")
    text = (
        "worker-1@d2 (pid 9) has ended (BYE) without pushing round 1 of key 'a';"
        " a worker that runs out of data calls kv.join()"
    )
    assert reason(sent) == text
    assert sent[0][1].body["error"] == "PeerLost"
    assert reason(rig.pull(0, 1)) == text, "a later pull hears it at once"


def test_a_bye_after_the_round_was_pushed_harms_nobody() -> None:
    rig = Rig()
    rig.push(1, 1)
    assert rig.scheduler(Kind.LEFT, rank=1, who="worker-1") == []
    rig.push(0, 1)
    assert kinds(rig.pull(0, 1)) == [("w0", "PULL")]


def test_a_loss_refuses_the_pulls_that_wait() -> None:
    rig = Rig()
    rig.push(0, 1)
    rig.pull(0, 1)
    actions = rig.server.handle(
        role.Heard(role.SCHEDULER_LINK, Message(Kind.LOST, body={"who": "worker-1", "reason": "worker-1 is lost"})), 1
    )
    assert role.Publish({"lost_peer": "worker-1", "message": "worker-1 is lost"}) in actions
    sent = rig.perform(actions)
    assert reason(sent) == "worker-1 is lost"
    assert (sent[0][1].body["error"], sent[0][1].body["who"]) == ("PeerLost", "worker-1")
    assert isinstance(rig.done[-1], work.Discard)
    assert rig.server.tick(1000) == []


def test_a_workers_broken_connection_drops_its_pulls() -> None:
    rig = Rig()
    rig.push(0, 1)
    rig.pull(0, 1)
    rig.perform(rig.server.handle(role.Broken("w0", "gone"), 1))
    assert works(rig) == ["add a1", "discard"]
    assert kinds(rig.push(1, 1)) == [("w1", "PUSH")]
    assert works(rig) == ["add a1", "apply a1"]


# The job


def test_only_workers_of_the_roster_are_admitted() -> None:
    server = Rig().server
    assert server.admit(node("worker", 1)) == ""
    assert server.admit(node("worker", 2)) == "worker-2@d1 (pid 5) is not in this job's roster"
    other = replace(node("worker", 1), job="other")
    assert server.admit(other) == "worker-1@d1 (pid 5) belongs to job 'other', server-0 to job 'test-job'"


def test_it_connects_to_the_scheduler_and_gives_up_at_the_deadline() -> None:
    server = Server(config("server", root="::1", root_port=99, start_timeout_s=20), "tcp://[::1]:1")
    assert server.start(10) == [role.Connect(role.SCHEDULER_LINK, "tcp://[::1]:99")]
    assert server.tick(29) == []
    assert server.tick(30) == [role.Finish(1, "the scheduler at tcp://[::1]:99 did not answer for 20 s")]


def test_the_schedulers_refusal_is_its_end() -> None:
    server = Server(config("server", rank=3), "tcp://127.0.0.1:1")
    actions = server.handle(role.TurnedAway(role.SCHEDULER_LINK, "rank 3 is taken"), 1)
    assert actions == [role.Finish(1, "the scheduler refused server-3: rank 3 is taken")]


def test_stop_ends_it_well_and_a_lost_scheduler_does_not() -> None:
    for code in (0, 1):
        stop = role.Heard(role.SCHEDULER_LINK, Message(Kind.STOP, body={"code": code, "reason": "why"}))
        assert Rig().server.handle(stop, 1) == [role.Finish(code, "why")]
    published, finish = Rig().server.handle(role.Broken(role.SCHEDULER_LINK, "its connection closed"), 1)
    assert isinstance(published, role.Publish)
    assert published.facts["lost_peer"] == "scheduler"
    assert isinstance(finish, role.Finish)
    assert finish.code == 1
    assert "is lost: its connection closed" in finish.reason


def test_a_stop_that_lets_it_stay_makes_it_forget_everything() -> None:
    rig = Rig()
    rig.push(0, 1)
    rig.pull(0, 1)
    rig.done.clear()
    assert kinds(rig.scheduler(Kind.STOP, 9, stay=True)) == [(role.SCHEDULER_LINK, "STOP")]
    assert works(rig) == ["discard", "clear"]
    assert reason(rig.pull(0, 0)) == "store 1 has no keys on server-0"
    assert kinds(rig.init()) == [("w0", "INIT")]


TOLD = role.Publish({"told": "SIGTERM"})


def test_a_signal_ends_it_well() -> None:
    """It says BYE, so that nobody takes its end for a death, and ends when that has arrived."""
    server = Rig().server
    assert server.handle(role.Told(15), 1) == [TOLD, role.Send(role.SCHEDULER_LINK, Message(Kind.BYE))]
    answered = role.Heard(role.SCHEDULER_LINK, Message(Kind.BYE, Flag.REPLY))
    assert server.handle(answered, 1) == [role.Finish(0, "told to stop")]


def test_a_server_that_is_told_to_stop_does_not_wait_for_a_scheduler_that_has_gone() -> None:
    server = Rig().server
    server.handle(role.Told(15), 1)
    assert server.handle(role.Broken(role.SCHEDULER_LINK, "its connection closed"), 1) == [role.Finish(0)]


def test_a_server_that_is_told_to_stop_waits_two_seconds_for_a_frozen_scheduler() -> None:
    server = Rig().server
    server.handle(role.Told(15), 1)
    assert server.tick(2.9) == []
    assert server.tick(3.0) == [role.Finish(0, "the scheduler did not answer BYE for 2 s")]


def test_a_second_signal_ends_a_server_at_once() -> None:
    server = Rig().server
    server.handle(role.Told(15), 1)
    assert server.handle(role.Told(15), 1) == [TOLD, role.Finish(0, "signal 15")]


def test_a_server_that_has_not_registered_ends_at_once_when_it_is_told_to() -> None:
    server = Server(config("server"), "tcp://127.0.0.1:7")
    server.start(0)
    assert server.handle(role.Told(15), 1) == [TOLD, role.Finish(0, "signal 15")]
