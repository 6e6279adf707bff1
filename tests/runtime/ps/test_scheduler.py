"""The scheduler's decisions, by scripted histories: no socket, no clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cluster import config
from schedulerhistory import Job, finish, init, logs, node, reasons, record, rule, sends, to

from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.protocol.message import Kind
from distrun_runtime.ps import role
from distrun_runtime.ps.scheduler import Scheduler


@pytest.fixture
def job() -> Job:
    """A scheduler to whom two workers and a server have come."""
    return Job()


# Registration


def test_it_publishes_where_it_listens() -> None:
    actions = Scheduler(config("scheduler"), "tcp://[::1]:4711").start(0)
    assert role.Publish({"address": "::1", "port": "4711"}) in actions


def test_the_roster_goes_out_when_all_are_here_and_to_workers_when_the_servers_have_it() -> None:
    """A worker that had it earlier than a server would find one that knows nobody."""
    job = Job(servers=2, is_open=False)
    assert sends(job.register("w1", "worker", 1, "d2")) == []
    assert sends(job.register("s0", "server", 0)) == []
    assert sends(job.register("s1", "server", 1)) == []
    actions = job.register("w0", "worker", 0)
    assert to(actions) == [("s0", "ROSTER"), ("s1", "ROSTER")]
    (_, first), (_, second) = sends(actions)
    assert job.hear("s1", Kind.ROSTER, is_reply=True, request=second.request) == []
    last = job.hear("s0", Kind.ROSTER, is_reply=True, request=first.request)
    assert to(last) == [("w0", "ROSTER"), ("w1", "ROSTER")]
    assert [sent.body["rank"] for _, sent in [*sends(actions), *sends(last)]] == [0, 1, 0, 1]
    nodes = first.body["nodes"]
    assert sends(last)[0][1].body["nodes"] == nodes
    assert {(each["role"], each["rank"], each["host"]) for each in nodes} == {
        ("worker", 0, "d1"),
        ("worker", 1, "d2"),
        ("server", 0, "d1"),
        ("server", 1, "d1"),
    }


def test_ranks_are_given_in_the_order_of_registration() -> None:
    job = Job(3, 2, is_open=False)
    for link in ("wa", "sa", "wb", "sb"):
        job.register(link, "worker" if link[0] == "w" else "server")
    assert ranks(job, job.register("wc", "worker")) == {"wa": 0, "wb": 1, "wc": 2, "sa": 0, "sb": 1}


def ranks(job: Job, actions: list[role.Action]) -> dict[str, int]:
    """Return the ranks that nodes are told, workers when the servers have answered."""
    return {link: sent.body["rank"] for link, sent in [*sends(actions), *sends(job.answer(actions))]}


def test_ranks_that_nodes_bring_are_kept_and_the_others_fill_the_gaps() -> None:
    job = Job(3, 1, is_open=False)
    job.register("s0", "server")
    job.register("wa", "worker")
    job.register("wb", "worker", 0)
    assert ranks(job, job.register("wc", "worker")) == {"wa": 1, "wb": 0, "wc": 2, "s0": 0}


def test_a_node_of_another_job_is_refused() -> None:
    assert Job(is_open=False).scheduler.admit(node("worker", 0, job="other")) == (
        "worker-0@d1 (pid 1) belongs to job 'other', this is job 'test-job'"
    )


def test_under_an_agent_it_waits_for_ever_while_only_servers_are_here() -> None:
    """A job that opens no store is none of the servers' business."""
    job = Job(is_open=False, start_timeout_s=20, stays=True)
    job.register("s0", "server", 0)
    for now in (1, 30, 1000, 100000):
        assert job.tick(now) == []


def test_started_by_hand_it_ends_when_nobody_has_come_in_time() -> None:
    job = Job(is_open=False, start_timeout_s=20)
    assert job.tick(19.9) == []
    actions = job.tick(20)
    reason = "registration ended after 20 s, waiting for 2 of 2 workers: have none; 1 of 1 servers: have none"
    assert finish(actions) == role.Finish(1, reason)


def test_started_by_hand_it_says_whom_it_turned_away() -> None:
    job = Job(is_open=False, start_timeout_s=20)
    for number in range(9):
        for _ in range(3):
            job.scheduler.handle(role.Denied("reason %d" % number, "10.0.0.7"), number)
    reason = finish(job.tick(20)).reason
    assert reason.endswith(
        "have none; turned away: 10.0.0.7: reason 0; 10.0.0.7: reason 1; 10.0.0.7: reason 2; 10.0.0.7: reason 3"
    )


PS_LITE = role.Denied("it speaks ZeroMQ", "10.0.0.7", is_foreign=True)


@pytest.mark.parametrize(
    ("denied", "is_ours"),
    [
        (PS_LITE, True),
        (replace(PS_LITE, address="10.0.0.8"), False),
        (replace(PS_LITE, is_same_user=True), True),
        (replace(PS_LITE, address="127.0.0.1", is_same_user=True), True),
        (replace(PS_LITE, is_same_user=False), False),
        (replace(PS_LITE, address=""), False),
        (replace(PS_LITE, is_foreign=False), False),
    ],
)
def test_a_program_of_this_job_with_another_protocol_ends_it_and_a_stranger_does_not(
    denied: role.Denied, is_ours: bool
) -> None:
    job = Job(is_open=False, start_timeout_s=20, stays=True, worker_addresses=("10.0.0.7",))
    job.register("s0", "server", 0)
    said = logs(job.scheduler.handle(denied, 100))
    actions = job.tick(120)
    if not is_ours:
        assert (said, actions) == ([], [])
        return
    assert "this looks like ps-lite (MXNet, BytePS)" in said[0]
    assert "fix: distrun launch --ps command" in said[0]
    reason = "no worker has opened a store for 20 s, and " + said[0]
    assert finish(actions) == role.Finish(1, reason)
    assert role.Publish({"failed": reason}) in actions
    assert to(actions) == [("s0", "LOST")]


def test_a_program_with_another_protocol_on_one_of_several_hosts_is_told_and_does_not_end_the_job() -> None:
    """Any user of that host can send what such a program sends."""
    job = Job(is_open=False, start_timeout_s=20, stays=True, worker_addresses=("10.0.0.7", "10.0.0.8"))
    for now in (1, 2, 3):
        said = logs(job.scheduler.handle(PS_LITE, now))
        assert ["this looks like ps-lite" in text for text in said] == ([True] if now == 1 else [])
    assert finish(job.tick(1000)) is None
    assert logs(job.scheduler.handle(replace(PS_LITE, address="10.0.0.8"), 1000)) == []
    assert finish(job.tick(1019)) is None
    assert "at 10.0.0.7 speaks ZeroMQ" in finish(job.tick(1020)).reason


def test_on_a_schedulers_own_host_only_its_users_programs_count() -> None:
    job = Job(is_open=False, start_timeout_s=20, stays=True, worker_addresses=("10.0.0.6", "10.0.0.7"))
    job.scheduler.handle(PS_LITE, 1)
    job.scheduler.handle(replace(PS_LITE, address="10.0.0.6", is_same_user=False), 1)
    assert finish(job.tick(1000)) is None
    job.scheduler.handle(replace(PS_LITE, address="10.0.0.6", is_same_user=True), 1000)
    assert finish(job.tick(1020)) is not None


@pytest.mark.parametrize("came_at", [1, 50], ids=["before all were here", "in the middle of the training"])
def test_a_program_with_another_protocol_never_ends_a_job_that_has_opened(came_at: float) -> None:
    """Its deadline passed during the training, and was found when the last worker had ended."""
    job = Job(is_open=False, start_timeout_s=20, stays=True, worker_addresses=("10.0.0.7",))
    if came_at == 1:
        job.scheduler.handle(PS_LITE, 1)
    job.now = 2
    for link, kind, rank in [("s0", "server", 0), ("w0", "worker", 0), ("w1", "worker", 1)]:
        job.register(link, kind, rank)
    for now in range(3, 100):
        assert finish(job.tick(now)) is None
        if now == came_at:
            assert logs(job.scheduler.handle(PS_LITE, now)) == []
    job.hear("w0", Kind.BYE)
    job.settle(job.hear("w1", Kind.BYE))
    for now in (100, 101, 1000):
        assert finish(job.tick(now)) is None
    assert logs(job.scheduler.handle(PS_LITE, 1000)) == []
    assert finish(job.tick(2000)) is None


def test_the_deadline_runs_from_the_first_workers_hello() -> None:
    job = Job(is_open=False, start_timeout_s=20)
    job.register("s0", "server", 0)
    job.now = 1000
    job.register("w0", "worker", 0, "d1")
    assert finish(job.tick(1019.9)) is None
    actions = job.tick(1020)
    reason = "registration ended after 20 s, waiting for 1 of 2 workers: have worker-0@d1"
    assert to(actions) == [("s0", "LOST"), ("w0", "LOST")]
    assert set(reasons(actions).values()) == {reason}
    assert finish(actions) == role.Finish(1, reason)
    assert role.Publish({"lost_peer": "worker-1", "message": reason}) in actions
    assert {sent.body["who"] for _, sent in sends(actions)} == {"worker-1"}
    assert job.tick(1021) == []


def test_who_did_not_register_is_not_named_where_ranks_are_not_known_yet() -> None:
    job = Job(is_open=False, start_timeout_s=20)
    job.register("w0", "worker", -1)
    actions = job.tick(20)
    assert not any("lost_peer" in action.facts for action in actions if isinstance(action, role.Publish))
    assert {sent.body["who"] for _, sent in sends(actions)} == {"job"}


def test_only_the_first_loss_is_an_error_in_the_log() -> None:
    job = Job(3)
    levels = [
        [action.level for action in job.scheduler.handle(role.Broken(link, "gone"), 1) if isinstance(action, role.Log)]
        for link in ("w1", "w2")
    ]
    assert levels == [["ERROR"], ["INFO"]]


def test_the_deadline_starts_anew_when_the_only_worker_went_away() -> None:
    job = Job(is_open=False, start_timeout_s=20)
    job.register("w0", "worker", 0)
    job.scheduler.handle(role.Broken("w0", "killed"), 1)
    job.now = 100
    job.register("w0b", "worker", 0)
    assert finish(job.tick(119)) is None
    assert finish(job.tick(120)) is not None


def test_the_deadline_stays_when_one_of_several_workers_went_away() -> None:
    job = Job(3, is_open=False, start_timeout_s=20)
    job.register("w0", "worker", 0)
    job.register("w1", "worker", 1)
    job.scheduler.handle(role.Broken("w1", "killed"), 10)
    assert finish(job.tick(20)) is not None


def test_it_says_every_few_seconds_whom_it_waits_for() -> None:
    job = Job(is_open=False)
    job.register("s0", "server", 0)
    job.register("w0", "worker", 0)
    text = "waiting for 1 of 2 workers: have worker-0@d1"
    said = {now: logs(job.tick(now)) for now in (0, 1, 5, 6, 10)}
    assert said == {0: [], 1: [], 5: [text], 6: [], 10: [text]}


def test_only_the_first_worker_moves_the_deadline() -> None:
    job = Job(3, is_open=False, start_timeout_s=20)
    job.now = 15
    job.register("w0", "worker", 0)
    job.now = 30
    job.register("s0", "server", 0)
    job.register("w1", "worker", 1)
    assert finish(job.tick(35)) is not None


def test_the_log_says_who_came_when_all_were_here_and_which_ranks_they_have() -> None:
    job = Job(1, is_open=False)
    said = [*logs(job.register("s0", "server")), *logs(job.register("w0", "worker"))]
    where = "host=d1 pid=1 endpoint=tcp://10.0.0.1:1"
    assert said == [
        f"event=registered node=server {where}",
        f"event=registered node=worker {where}",
        "event=complete workers=1 servers=1",
        f"event=assigned node=server-0 {where}",
        f"event=assigned node=worker-0 {where}",
    ]


def test_it_counts_who_lives_and_who_waits_at_a_barrier(job: Job) -> None:
    assert job.scheduler.counters() == {"members": 3, "barriers": 0, "barrier_waiting": 0}
    job.hear("w0", Kind.BARRIER)
    assert job.scheduler.counters() == {"members": 3, "barriers": 0, "barrier_waiting": 1}
    job.hear("w1", Kind.BARRIER)
    assert job.scheduler.counters() == {"members": 3, "barriers": 1, "barrier_waiting": 0}
    job.hear("w1", Kind.BYE)
    assert job.scheduler.counters() == {"members": 2, "barriers": 1, "barrier_waiting": 0}


def test_it_counts_the_barriers_of_all_scripts_of_a_job() -> None:
    job = Job(1, stays=True)
    job.hear("w0", Kind.BARRIER)
    job.settle(job.hear("w0", Kind.BYE))
    job.answer(job.register("w0b", "worker", 0))
    job.hear("w0b", Kind.BARRIER)
    assert job.scheduler.counters()["barriers"] == 2


def test_under_an_agent_a_server_that_dies_before_all_are_here_is_a_loss_and_a_worker_is_none() -> None:
    job = Job(servers=2, is_open=False, stays=True)
    job.register("s0", "server", 0)
    job.register("w0", "worker", 0)
    assert to(job.scheduler.handle(role.Broken("w0", "killed"), 1)) == []
    actions = job.scheduler.handle(role.Broken("s0", "killed"), 2)
    assert role.Publish({"lost_peer": "server-0", "message": "server-0@d1 (pid 1) is lost: killed"}) in actions


def test_a_node_that_goes_away_before_all_are_here_may_come_again() -> None:
    job = Job(is_open=False)
    job.register("w0", "worker", 0)
    actions = job.scheduler.handle(role.Broken("w0", "killed"), 1)
    assert sends(actions) == []
    assert "went away before all had registered: killed" in logs(actions)[0]
    assert job.scheduler.admit(node("worker", 0)) == ""


# Collective calls


def test_stores_have_barriers_of_their_own(job: Job) -> None:
    job.hear("w0", Kind.BARRIER, number=1, store=1)
    assert sends(job.hear("w1", Kind.BARRIER, number=1, store=2)) == []


@pytest.mark.parametrize(
    ("mine", "theirs", "text"),
    [
        (
            [record("w")],
            [record("w", (3, 2))],
            "for key 'w' worker-0 has shape (2, 3) float32, worker-1 has shape (3, 2) float32",
        ),
        (
            [record(7)],
            [record(7, dtype="float64")],
            "for key 7 worker-0 has shape (2, 3) float32, worker-1 has shape (2, 3) float64",
        ),
        (
            [record("a"), record("b", ())],
            [record("a")],
            "worker-0 declares key 'b' (shape () float32), worker-1 does not",
        ),
        ([record("a")], [record("b")], "worker-0 declares key 'a' (shape (2, 3) float32), worker-1 does not"),
        ([], [record("b")], "worker-1 declares key 'b' (shape (2, 3) float32), worker-0 does not"),
        ([record(3)], [record("3")], "worker-0 declares key 3 (shape (2, 3) float32), worker-1 does not"),
    ],
)
def test_different_records_are_an_error_that_names_both_workers_and_both_records(
    job: Job, mine: list[Any], theirs: list[Any], text: str
) -> None:
    job.hear("w0", Kind.KEYS, number=2, records=mine)
    actions = job.hear("w1", Kind.KEYS, number=2, records=theirs)
    assert reasons(actions) == {"w0": text, "w1": text}
    assert to(actions) == [("w0", "KEYS!"), ("w1", "KEYS!")]


def test_init_numbers_the_keys_in_rank_0s_order_and_the_others_wait_for_the_values(job: Job) -> None:
    job.hear("w1", Kind.KEYS, number=1, records=[record("b"), record("a")])
    first = job.hear("w0", Kind.KEYS, number=1, records=[record("a"), record("b")])
    assert to(first) == [("w0", "KEYS")]
    body = {"keys": ["a", "b"], "numbers": [[0, 0], [1, 1]], "servers": [[0], [0]]}
    assert sends(first)[0][1].body == body
    then = job.hear("w0", Kind.INIT, number=1)
    assert to(then) == [("w0", "INIT"), ("w1", "KEYS")]
    assert sends(then)[1][1].body == body


def test_an_int_key_places_itself_and_a_str_key_by_its_position() -> None:
    job = Job(1)
    numbers = sends(job.hear("w0", Kind.KEYS, number=1, records=[record(99), record(-3)]))[0][1].body["numbers"]
    assert numbers == [[0, 99], [1, -3]]
    job.hear("w0", Kind.INIT, number=1)
    numbers = sends(job.hear("w0", Kind.KEYS, number=1, store=2, records=[record("x")]))[0][1].body["numbers"]
    assert numbers == [[0, 0]]
    job.hear("w0", Kind.INIT, number=1, store=2)
    more = sends(job.hear("w0", Kind.KEYS, number=2, store=2, records=[record("y")]))[0][1].body["numbers"]
    assert more == [[1, 1]]


def test_a_double_init_is_an_error_for_all(job: Job) -> None:
    init(job, 1, "w")
    actions = job.hear("w0", Kind.KEYS, number=2, records=[record("w")])
    assert reasons(actions) == {"w0": "key 'w' was initialised before"}
    assert reasons(job.hear("w1", Kind.KEYS, number=2, records=[record("w")])) == {
        "w1": "key 'w' was initialised before"
    }


def test_rank_0_that_cannot_fill_the_servers_tells_the_others(job: Job) -> None:
    for link in ("w0", "w1"):
        job.hear(link, Kind.KEYS, number=1, records=[record("w")])
    actions = job.hear("w0", Kind.INIT, number=1, error="no room")
    assert to(actions) == [("w0", "INIT"), ("w1", "KEYS!")]
    assert reasons(actions) == {"w1": "no room"}


def test_init_without_keys_is_refused() -> None:
    assert reasons(Job().hear("w0", Kind.INIT, number=1)) == {"w0": "INIT without KEYS"}


# Joining and leaving


def test_join_is_told_to_the_servers_and_answered_when_all_have_joined(job: Job) -> None:
    actions = job.hear("w1", Kind.JOIN, number=4)
    assert to(actions) == [("s0", "JOIN")]
    assert sends(actions)[0][1].body == {"rank": 1}
    assert job.answer(actions) == []
    actions = job.hear("w0", Kind.JOIN, number=4)
    assert [sent.body for _, sent in sends(actions)] == [{"rank": 0}, {"rank": 1, "all": True}]
    assert to(job.answer(actions)) == [("w1", "JOIN"), ("w0", "JOIN")]


def test_a_worker_that_ended_is_not_waited_for_by_those_who_joined(job: Job) -> None:
    job.hear("w0", Kind.JOIN, number=4)
    actions = job.hear("w1", Kind.BYE)
    assert ("s0", "JOIN") in to(actions)
    assert to(job.answer([action for action in actions if "all" in str(action)])) == [("w0", "JOIN")]


def test_a_call_that_another_worker_meets_with_join_is_an_error(job: Job) -> None:
    """It waited until its deadline: who has joined makes no other call."""
    job.hear("w1", Kind.JOIN, number=5)
    actions = job.hear("w0", Kind.BARRIER, number=5)
    text = "worker-1 calls join where worker-0 calls barrier (call 5 of the store)"
    assert reasons(actions) == {"w0": text}
    job = Job()
    job.hear("w0", Kind.BARRIER, number=5)
    actions = job.hear("w1", Kind.JOIN, number=5)
    text = "worker-0 calls barrier where worker-1 calls join (call 5 of the store)"
    assert reasons(actions) == {"w0": text, "w1": text}


def test_leave_is_told_to_the_servers_and_later_calls_do_without_the_worker(job: Job) -> None:
    actions = job.hear("w1", Kind.LEFT)
    assert to(actions) == [("s0", "LEFT")]
    assert to(job.answer(actions)) == [("w1", "LEFT")]
    assert to(job.hear("w0", Kind.BARRIER, number=3)) == [("w0", "BARRIER")]


def test_leave_completes_what_waited_for_the_worker(job: Job) -> None:
    job.hear("w0", Kind.BARRIER, number=3)
    assert to(job.hear("w1", Kind.LEFT)) == [("s0", "LEFT"), ("w0", "BARRIER")]


def test_leave_while_keys_are_filled_declares_them_once() -> None:
    job = Job(3)
    job.hear("w2", Kind.LEFT)
    for link in ("w0", "w1"):
        job.hear(link, Kind.KEYS, number=1, records=[record("a")])
    assert to(job.hear("w1", Kind.LEFT)) == [("s0", "LEFT")]
    assert to(job.hear("w0", Kind.INIT, number=1)) == [("w0", "INIT"), ("w1", "KEYS")]


def test_init_after_worker_0_has_left_the_store_is_an_error(job: Job) -> None:
    job.hear("w0", Kind.LEFT)
    actions = job.hear("w1", Kind.KEYS, number=2, records=[record("a")])
    assert reasons(actions) == {"w1": "worker-0, whose values count, has left the store"}


def test_a_store_is_forgotten_when_all_workers_have_closed_it(job: Job) -> None:
    """Its keys and its rule stayed, here and on the servers, until the job ended."""
    for store in (1, 2):
        for link in ("w0", "w1"):
            job.hear(link, Kind.KEYS, number=1, records=[record("a")], store=store)
        job.hear("w0", Kind.INIT, number=1, store=store)
        job.settle(job.hear("w0", Kind.RULE, spec=dict(RuleSpec.of("test", {}).to_json()), store=store))
    assert to(job.hear("w1", Kind.CLOSE, store=1)) == [("w1", "CLOSE")]
    assert to(job.hear("w1", Kind.CLOSE, store=1)) == [("w1", "CLOSE")], "a repeat"
    actions = job.hear("w0", Kind.CLOSE, store=1)
    assert [(link, sent.kind, sent.store) for link, sent in sends(actions)] == [
        ("w0", Kind.CLOSE, 1),
        ("s0", Kind.CLOSE, 1),
    ]
    assert job.answer(actions) == []
    assert set(job.scheduler._calls._stores) == set(job.scheduler._rules._specs) == {2}


def test_a_worker_that_has_ended_keeps_no_store() -> None:
    job = Job(3)
    job.hear("w0", Kind.CLOSE)
    assert to(job.hear("w1", Kind.BYE)) == [("w1", "BYE"), ("s0", "LEFT")]
    job.hear("w0", Kind.CLOSE, store=2)
    assert to(job.hear("w2", Kind.CLOSE, store=2)) == [("w2", "CLOSE"), ("s0", "CLOSE")]
    assert to(job.hear("w2", Kind.BYE)) == [("w2", "BYE"), ("s0", "LEFT"), ("s0", "CLOSE")]
    assert job.scheduler._calls._stores == {}


def test_bye_leaves_those_who_wait_with_an_error(job: Job) -> None:
    job.hear("w0", Kind.BARRIER, number=3)
    actions = job.hear("w1", Kind.BYE)
    text = "worker-1@d1 (pid 1) has ended (BYE) and will never call barrier: all workers must"
    assert to(actions) == [("w1", "BYE"), ("s0", "LEFT"), ("w0", "BARRIER!")]
    assert reasons(actions) == {"w0": text}


def test_a_call_after_anothers_bye_is_an_error_at_once(job: Job) -> None:
    job.hear("w1", Kind.BYE)
    actions = job.hear("w0", Kind.KEYS, number=1, records=[record("a")])
    assert "has ended (BYE) and will never call init" in reasons(actions)["w0"]


def test_bye_of_a_worker_that_left_the_store_harms_nobody_there() -> None:
    job = Job(3)
    job.hear("w2", Kind.LEFT)
    job.hear("w0", Kind.BARRIER, number=3)
    assert to(job.hear("w2", Kind.BYE)) == [("w2", "BYE"), ("s0", "LEFT")]
    assert to(job.hear("w1", Kind.BARRIER, number=3)) == [("w0", "BARRIER"), ("w1", "BARRIER")]


def test_servers_hear_who_ended() -> None:
    left = sends(Job().hear("w1", Kind.BYE))[1][1]
    assert (left.kind, left.request, left.body) == (Kind.LEFT, 0, {"rank": 1, "who": "worker-1@d1 (pid 1)"})


# The end


def test_when_all_workers_have_ended_the_servers_stop_and_it_ends_with_0() -> None:
    job = Job(2, 2)
    assert finish(job.hear("w1", Kind.BYE)) is None
    actions = job.hear("w0", Kind.BYE)
    assert to(actions)[-2:] == [("s0", "STOP"), ("s1", "STOP")]
    assert finish(actions) == role.Finish(0, "all workers have ended")
    assert job.hear("w0", Kind.BARRIER, number=9) == []


def test_a_connection_that_ends_after_bye_is_no_loss(job: Job) -> None:
    job.hear("w1", Kind.BYE)
    assert job.scheduler.handle(role.Broken("w1", "closed"), 1) == []


def test_a_lost_worker_is_told_to_everybody_who_lives() -> None:
    job = Job(3)
    actions = job.scheduler.handle(role.Broken("w1", "its connection closed"), 1)
    reason = "worker-1@d1 (pid 1) is lost: its connection closed"
    assert to(actions) == [("s0", "LOST"), ("w0", "LOST"), ("w2", "LOST")]
    assert sends(actions)[0][1].body == {"who": "worker-1", "host": "d1", "reason": reason}
    assert finish(actions) is None


def test_a_server_that_lost_another_one_is_believed_unless_that_one_has_left() -> None:
    job = Job(servers=3)
    reason = "server-1@d1 (pid 1) lost its connection to server-0 (tcp://10.0.0.1:1): its connection closed"
    assert job.hear("s1", Kind.LOST, who="server-7", reason=reason) == []
    actions = job.hear("s1", Kind.LOST, who="server-0", reason=reason)
    assert to(actions) == [(link, "LOST") for link in ("s1", "s2", "w0", "w1")]
    assert sends(actions)[0][1].body == {"who": "server-0", "host": "d1", "reason": reason}
    assert role.Publish({"lost_peer": "server-0", "message": reason}) in actions
    assert job.hear("s2", Kind.LOST, who="server-0", reason=reason) == [], "it is known"
    job.hear("s2", Kind.BYE)
    assert job.hear("s1", Kind.LOST, who="server-2", reason=reason) == []


def test_a_server_that_a_worker_has_lost_is_lost_even_if_that_worker_is_gone_before_the_scheduler_sees_it() -> None:
    job = Job(servers=2)
    reason = "server-1@d1 (pid 1) is lost: its connection closed (seen by worker-0)"
    actions = job.hear("w0", Kind.LOST, who="server-1", reason=reason)
    assert to(actions) == [(link, "LOST") for link in ("s0", "w0", "w1")]
    assert sends(actions)[0][1].body == {"who": "server-1", "host": "d1", "reason": reason}
    actions = job.scheduler.handle(role.Broken("w0", "its connection closed"), 1)
    assert [action.level for action in actions if isinstance(action, role.Log)] == ["INFO"], "it comes of the first"
    [(_, sent)] = sends(job.hear("w1", Kind.BARRIER, number=1))
    assert sent.body["who"] == "server-1"
    assert job.hear("w1", Kind.LOST, who="worker-0", reason="x") == [], "of workers only the scheduler judges"


def test_after_a_loss_calls_are_refused_and_nobody_may_join(job: Job) -> None:
    job.scheduler.handle(role.Broken("s0", "gone"), 1)
    [(_, sent)] = sends(job.hear("w0", Kind.BARRIER, number=1))
    assert sent.body == {"reason": "server-0@d1 (pid 1) is lost: gone", "error": "PeerLost", "who": "server-0"}
    assert job.scheduler.admit(node("worker", 0)) == "the job is ending: server-0@d1 (pid 1) is lost: gone"


def test_after_a_loss_it_ends_with_1_when_the_last_worker_has_gone(job: Job) -> None:
    job.scheduler.handle(role.Broken("w1", "gone"), 1)
    actions = job.hear("w0", Kind.BYE)
    assert finish(actions) == role.Finish(1, "worker-1@d1 (pid 1) is lost: gone")


def test_abort_is_a_loss_with_the_workers_own_reason() -> None:
    actions = Job().hear("w1", Kind.ABORT, reason="ValueError: bad data")
    assert reasons(actions)["w0"] == "worker-1@d1 (pid 1) failed: ValueError: bad data"


def test_what_it_does_not_know_is_refused_or_noted(job: Job) -> None:
    assert reasons(job.hear("w0", Kind.PULL)) == {"w0": "the scheduler knows no PULL"}
    assert logs(job.hear("s0", Kind.BARRIER)) == ["server-0@d1 (pid 1) sent BARRIER, which only workers send"]
    assert job.hear("nobody", Kind.BARRIER) == []
    assert job.hear("s0", Kind.RULE, is_reply=True, request=77) == []


# Several scripts, one after the other


def ended(job: Job, *links: str) -> list[role.Action]:
    """Let workers say BYE; return what the last one brings about."""
    actions: list[role.Action] = []
    for link in links:
        actions = job.hear(link, Kind.BYE)
    return actions


def stop_of(actions: list[role.Action]) -> list[role.Action]:
    return [action for action in actions if isinstance(action, role.Send) and action.message.kind is Kind.STOP]


def test_under_an_agent_it_has_the_servers_forget_and_waits_for_the_next_script() -> None:
    job = Job(stays=True)
    actions = ended(job, "w1", "w0")
    assert finish(actions) is None
    assert [sent.body for _, sent in sends(stop_of(actions))] == [{"stay": True}]
    assert job.answer(stop_of(actions)) == []
    job.register("n0", "worker", 0)
    actions = job.register("n1", "worker", 1)
    assert to(actions) == [("s0", "ROSTER")]
    assert to(job.answer(actions)) == [("n0", "ROSTER"), ("n1", "ROSTER")]
    assert to(rule(job, "n0")) == [("s0", "RULE")], "rules and keys are forgotten"
    assert to(job.hear("n0", Kind.KEYS, number=1, records=[])) == []


def test_a_worker_may_be_a_script_ahead_but_its_rank_only_once() -> None:
    job = Job(stays=True)
    ended(job, "w1")
    job.register("n1", "worker", 1, "d2")
    assert job.scheduler.admit(node("worker", 1)) == (
        "rank 1 is taken: worker-1@d2 (pid 1) registered as worker-1, for the next script"
    )
    actions = ended(job, "w0")
    assert sends(job.register("n0", "worker", 0)) == []
    actions = job.answer(stop_of(actions))
    assert to(actions) == [("s0", "ROSTER")]
    assert to(job.answer(actions)) == [("n0", "ROSTER"), ("n1", "ROSTER")]


def test_an_answer_from_the_last_script_is_none_of_the_next() -> None:
    job = Job(stays=True)
    late = rule(job, "w0")
    actions = ended(job, "w1", "w0")
    job.register("n0", "worker", 0)
    job.register("n1", "worker", 1)
    assert to(job.answer(late)) == []
    assert to(job.answer(stop_of(actions)))[0] == ("s0", "ROSTER")
    assert to(rule(job, "n0")) == [("s0", "RULE")], "the new servers' stores have none"


def test_a_script_that_broke_is_the_last_one() -> None:
    job = Job(stays=True)
    job.scheduler.handle(role.Broken("w1", "gone"), 1)
    assert finish(ended(job, "w0")) is None
    assert "the job is ending" in job.scheduler.admit(node("worker", 1))


def test_a_barrier_that_takes_long_is_told_whom_it_waits_for(job: Job) -> None:
    job.hear("w0", Kind.BARRIER, number=1)
    assert job.scheduler.tick(100.0) == []
    for now, seconds in ((102.0, 2.0), (132.0, 32.0)):
        [told] = job.scheduler.tick(now)
        assert isinstance(told, role.Send)
        assert (told.link, told.message.kind) == ("w0", Kind.WAITING)
        text = "waiting for worker-1 to call barrier"
        assert told.message.body == {"text": text, "seconds": seconds, "for": ["worker-1"]}
        assert job.scheduler.tick(now + 1) == []


def test_a_signal_stops_the_servers_before_the_scheduler_goes() -> None:
    """They would take its end for a death."""
    told, *stops, finish = Job().scheduler.handle(role.SignalReceived(15), 1)
    assert told == role.Publish({"told": "SIGTERM"})
    assert [(each.message.kind, each.message.body["code"]) for each in stops] == [(Kind.STOP, 0)] * len(stops)
    assert stops
    assert {each.message.body["who"] for each in stops} == {"scheduler"}
    assert finish == role.Finish(0, "signal 15")
