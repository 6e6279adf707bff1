"""A server by scripted histories: registering, who is let in, being told to stop, and the job's next script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from cluster import TOKEN
from history_server import SCHEDULER, History, data, node, reason, said, values

from distrun_runtime.protocol.handshake import Acceptor
from distrun_runtime.protocol.message import Kind
from distrun_runtime.transport.zeromq import Up

pytestmark = pytest.mark.usefixtures("engine")

Serving = Callable[..., History]


def test_only_workers_of_the_roster_are_admitted(server: History) -> None:
    assert server.enter("in:1", node("worker", 1)) == ""
    assert server.enter("in:2", node("worker", 2)) == "worker-2@d1 (pid 5) is not in this job's roster"
    other = replace(node("worker", 1), job="other")
    assert server.enter("in:3", other) == "worker-1@d1 (pid 5) belongs to job 'other', server-0 to job 'test-job'"


def test_it_connects_to_the_scheduler_and_gives_up_at_the_deadline(serving: Serving) -> None:
    server = serving(is_registered=False, settings={"root": "::1", "root_port": 99, "start_timeout_s": 20.0})
    assert server.transport.opened == [(SCHEDULER, "tcp://[::1]:99")]
    server.tick(19)
    assert server.finish is None
    server.tick(20)
    assert server.end == (
        1,
        "the scheduler at tcp://[::1]:99 did not answer for 20 s",
    )


def test_the_schedulers_refusal_is_its_end(serving: Serving) -> None:
    server = serving(is_registered=False, settings={"rank": 3})
    [hello] = server.step(Up(SCHEDULER))
    assert hello.kind is Kind.HELLO
    server.hear(SCHEDULER, data(Kind.REFUSED, body={"reason": "rank 3 is taken"}))
    assert server.end == (1, "the scheduler refused server-3: rank 3 is taken")


def test_a_scheduler_that_does_not_know_the_token_is_not_believed(serving: Serving) -> None:
    server = serving(is_registered=False)
    [hello] = server.step(Up(SCHEDULER))
    stranger = Acceptor(node("scheduler", 0), TOKEN + b"x", "bb")
    server.hear(SCHEDULER, stranger.challenge(data(Kind.HELLO, body=hello.body)))
    assert server.end[0] == 1
    assert "does not know this job's token" in server.end[1]


@pytest.mark.parametrize("code", [0, 1])
def test_the_schedulers_stop_ends_it_with_its_code(server: History, code: int) -> None:
    server.scheduler(Kind.STOP, code=code, reason="why")
    assert server.end == (code, "why")


def test_a_lost_scheduler_is_a_failure_that_is_published(server: History) -> None:
    server.cut(SCHEDULER)
    assert server.end[0] == 1
    assert "is lost: its connection closed" in server.end[1]
    [published] = server.published
    assert (published["lost_peer"], published["message"]) == ("scheduler", server.end[1])


def test_a_registration_that_failed_ends_it_with_the_reason(serving: Serving) -> None:
    server = serving(has_keys=False)
    server.scheduler(Kind.STOP, 9, stay=True)
    server.lost("worker-1", "worker-1 did not come")
    assert server.end == (1, "worker-1 did not come")


def test_a_stop_that_lets_it_stay_makes_it_forget_everything(server: History) -> None:
    server.rule("test")
    for rank in (0, 1):
        server.push(rank, 1, {"b": [1, 1]})
        server.pull(rank, 1, "b")
    server.push(0, 1, {"a": [1, 1]})
    assert server.pull(0, 1) == []
    server.ask(0, Kind.PROFILE, action="start")
    assert said(server.scheduler(Kind.STOP, 9, stay=True)) == ["scheduler STOP"]
    assert reason(server.pull(0, 0)) == "store 1 has no keys on server-0"
    assert server.tick(100) == [], "no pull waits"
    found = server.stats()
    assert (found["keys"], found["updates"], found["bytes_out"], found["staleness"]) == (0, 0, 0, {})
    assert "is not being profiled" in reason(server.ask(0, Kind.PROFILE, action="stop"))
    assert said(server.init({"a": [5, 5]})) == ["w0 INIT"]
    server.push_all(1, {"a": [1, 1]})
    assert values(server.pull(0, 1)) == {"a": [2, 2]}, "the rule is forgotten, and what was pushed before"


def test_a_store_that_is_closed_is_forgotten_and_its_rounds_stay_counted(server: History) -> None:
    server.rule("test")
    server.push_all(1, {"a": [1, 1]})
    before = server.counters()
    assert (before["keys"], before["rounds"]) == (2, 1)
    assert said(server.scheduler(Kind.CLOSE, 9)) == ["scheduler CLOSE"]
    assert reason(server.pull(0, 0)) == "store 1 has no keys on server-0"
    after = server.counters()
    assert (after["keys"], after["bytes"], after["rounds"]) == (0, 0, 1), "what is counted does not become less"
    assert said(server.scheduler(Kind.CLOSE, 10)) == ["scheduler CLOSE"], "one that is not known here"
    assert said(server.init({"a": [5, 5]})) == ["w0 INIT"]
    server.push_all(1, {"a": [1, 1]})
    assert values(server.pull(0, 1)) == {"a": [2, 2]}, "the rule is forgotten, and what was pushed before"
    assert server.counters()["rounds"] == 2


def test_workers_that_ended_in_the_last_script_are_missed_by_no_pull_of_the_next_one(server: History) -> None:
    server.bye(1)
    server.scheduler(Kind.STOP, 9, stay=True)
    server.init({"a": [0, 0]})
    server.push(0, 1, {"a": [1, 1]})
    assert server.pull(0, 1) == []
    assert sorted(said(server.push(1, 1, {"a": [1, 1]}))) == ["w0 PULL", "w1 PUSH"]


def test_a_signal_ends_it_well(server: History) -> None:
    """It says BYE, so that its end is not taken for a death, and ends when that has arrived."""
    [bye] = server.signal(15)
    assert (bye.link, bye.kind, bye.is_reply) == (SCHEDULER, Kind.BYE, False)
    assert server.published == [{"told": "SIGTERM"}]
    assert server.finish is None
    server.hear(SCHEDULER, data(Kind.BYE, is_reply=True))
    assert server.end == (0, "told to stop")


def test_a_server_that_is_told_to_stop_does_not_wait_for_a_scheduler_that_has_gone(server: History) -> None:
    server.signal(15)
    server.cut(SCHEDULER)
    assert server.end[0] == 0


def test_a_server_that_is_told_to_stop_waits_two_seconds_for_a_frozen_scheduler(server: History) -> None:
    server.now = 1
    server.signal(15)
    server.tick(2.9)
    assert server.finish is None
    server.tick(3.0)
    assert server.end == (0, "the scheduler did not answer BYE for 2 s")


@pytest.mark.parametrize("is_registered", [True, False])
def test_a_second_signal_ends_a_server_at_once_and_the_first_if_it_has_not_registered(
    serving: Serving, is_registered: bool
) -> None:
    server = serving(is_registered=is_registered)
    server.signal(15)
    assert (server.finish is None) is is_registered
    server.signal(15)
    assert server.end == (0, "signal 15")


def test_a_server_that_ends_for_the_loss_of_the_scheduler_tells_its_workers_before(serving: Serving) -> None:
    server = serving(servers=2)
    sent = server.cut(SCHEDULER)
    assert [(each.link, each.kind, each.body["who"]) for each in sent] == [
        ("w0", Kind.LOST, "scheduler"),
        ("w1", Kind.LOST, "scheduler"),
    ]
    assert server.finish is not None
    assert all(each.body["reason"] == server.end[1] for each in sent)


def test_a_server_whose_device_failed_says_why_on_every_connection_before_it_ends(serving: Serving) -> None:
    server = serving(servers=2)
    sent = server.breaks("gpu:0 is broken")
    assert [(each.link, each.kind) for each in sent] == [
        ("w0", Kind.LOST),
        ("w1", Kind.LOST),
        ("s1", Kind.LOST),
        (SCHEDULER, Kind.ABORT),
    ]
    assert {each.body["who"] for each in sent[:3]} == {"server-0"}
    assert all("server-0@" in each.body["reason"] for each in sent[:3])
    assert all(each.body["reason"].endswith("failed: gpu:0 is broken") for each in sent[:3])
    assert server.finish is None
    server.hear(SCHEDULER, data(Kind.ABORT, is_reply=True))
    assert server.end == (1, "gpu:0 is broken")
