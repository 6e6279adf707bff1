"""A worker's decisions, by scripted histories: registration, requests, deaths."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from cluster import config

from distrun_runtime.errors import KVError, PeerLost, Refused, RuleError, RuntimeFault, TimedOut
from distrun_runtime.protocol.handshake import NodeIdentity
from distrun_runtime.protocol.message import Entry, Kind, Membership, Message, entries_of
from distrun_runtime.ps import role
from distrun_runtime.ps.role import NodeRequest
from distrun_runtime.ps.routing import WINDOW_BYTES
from distrun_runtime.ps.worker import Ask, Goodbye, Worker


def node(kind: str, rank: int) -> NodeIdentity:
    return NodeIdentity("test-job", kind, rank, 0, "d%d" % rank, 5, "tcp://10.0.0.%d:1" % rank, 2, 2)


class Rig:
    """A worker; `is_ready`: registered as rank 1 and connected to two servers."""

    def __init__(self, *, is_ready: bool = True) -> None:
        self.ready = NodeRequest("registration")
        self.worker = Worker(config("worker", root_port=9, start_timeout_s=20.0), "tcp://127.0.0.1:7", self.ready)
        self.do(self.worker.start(0))
        if is_ready:
            self.welcome("scheduler")
            self.roster()
            self.welcome("server-0")
            self.welcome("server-1")

    def do(self, actions: list[role.Action]) -> list[role.Action]:
        """Resolve what is resolved, as the loop does."""
        for action in actions:
            if isinstance(action, role.Resolve):
                action.request.resolve(action.replies, action.error)
            elif isinstance(action, role.Note):
                action.request.note = action.text
        return actions

    def welcome(self, link: str, now: float = 0) -> list[role.Action]:
        return self.do(self.worker.handle(role.Welcomed(link, None), now))

    def roster(self) -> list[role.Action]:
        nodes = [asdict(each) for each in (node("server", 1), node("worker", 0), node("server", 0), node("worker", 1))]
        return self.hear("scheduler", Message(Kind.ROSTER, body={"nodes": nodes, "rank": 1}))

    def hear(self, link: str, message: Message, now: float = 0) -> list[role.Action]:
        return self.do(self.worker.handle(role.MessageReceived(link, message), now))

    def broken(self, link: str) -> list[role.Action]:
        return self.do(self.worker.handle(role.Broken(link, "its connection closed"), 0))

    def ask(
        self, *messages: tuple[str, Message], what: str = "pull of key 'w'", entries_of: Any = None
    ) -> tuple[NodeRequest, list[role.Action]]:
        request = NodeRequest(what)
        return request, self.do(self.worker.handle(role.CallSubmitted(Ask(request, messages, entries_of)), 0))

    def reply(self, link: str, request: int, is_error: bool = False, **body: Any) -> list[role.Action]:
        return self.hear(link, Message(Kind.PULL, is_reply=True, is_error=is_error, request=request, body=body))


@pytest.fixture
def rig() -> Rig:
    """A worker that is ready."""
    return Rig()


def sends(actions: list[role.Action]) -> list[tuple[str, Message]]:
    return [(action.link, action.message) for action in actions if isinstance(action, role.Send)]


def error_of(request: NodeRequest) -> RuntimeFault:
    with pytest.raises(RuntimeFault) as caught:
        request.wait(0)
    return caught.value


PULL = Message(Kind.PULL, store=1, entries=entries_of([Entry(0, 0, 1)]))


def test_it_registers_meets_the_servers_and_is_ready() -> None:
    rig = Rig(is_ready=False)
    rig.welcome("scheduler")
    actions = rig.roster()
    assert [action for action in actions if isinstance(action, role.Connect)] == [
        role.Connect("server-0", "tcp://10.0.0.0:1"),
        role.Connect("server-1", "tcp://10.0.0.1:1"),
    ]
    assert rig.worker.me.rank == 1
    assert [server.rank for server in rig.worker.servers] == [0, 1]
    rig.welcome("server-1")
    assert not rig.ready.is_done
    rig.welcome("server-0")
    assert rig.ready.wait(0) == ()


def test_a_refusal_is_the_error_and_names_who_refused() -> None:
    rig = Rig(is_ready=False)
    rig.do(rig.worker.handle(role.TurnedAway("scheduler", "rank 1 is taken"), 1))
    error = error_of(rig.ready)
    assert isinstance(error, Refused)
    assert "the scheduler at tcp://127.0.0.1:9 refused this process" in str(error)
    assert str(error).endswith(": rank 1 is taken")


def test_without_a_scheduler_it_gives_up_at_the_deadline() -> None:
    rig = Rig(is_ready=False)
    rig.do(rig.worker.tick(19.9))
    assert not rig.ready.is_done
    rig.do(rig.worker.tick(20))
    error = error_of(rig.ready)
    assert isinstance(error, TimedOut)
    assert "no scheduler answered at tcp://127.0.0.1:9 for 20 s" in str(error)


def test_it_waits_for_the_roster_a_little_longer_than_the_scheduler() -> None:
    rig = Rig(is_ready=False)
    rig.welcome("scheduler", 10)
    assert rig.worker.tick(34) == []
    rig.do(rig.worker.tick(35))
    assert "waited for the other nodes to register" in str(error_of(rig.ready))


def test_a_server_that_does_not_answer_is_named() -> None:
    rig = Rig(is_ready=False)
    rig.welcome("scheduler")
    rig.roster()
    rig.welcome("server-0")
    rig.do(rig.worker.tick(1000))
    assert "worker-1 waited for server-1@d1 (pid 5, tcp://10.0.0.1:1)" in str(error_of(rig.ready))


def test_once_ready_time_does_not_matter() -> None:
    assert Rig().worker.tick(10**9) == []


def test_a_request_is_complete_when_all_replies_are_there_in_the_order_of_its_messages(rig: Rig) -> None:
    request, actions = rig.ask(("server-1", PULL), ("server-0", PULL))
    numbers = {link: message.request for link, message in sends(actions)}
    assert set(numbers) == {"server-0", "server-1"}
    rig.reply("server-0", numbers["server-0"], who=0)
    assert not request.is_done
    rig.reply("server-1", numbers["server-1"], who=1)
    assert [reply.body["who"] for reply in request.wait(0)] == [1, 0]


def test_a_request_of_no_messages_is_complete_at_once() -> None:
    request, _ = Rig().ask()
    assert request.wait(0) == ()


def test_requests_to_the_scheduler_do_not_wait_in_a_servers_queue() -> None:
    _, actions = Rig().ask(("scheduler", Message(Kind.BARRIER)))
    assert [link for link, _ in sends(actions)] == ["scheduler"]


@pytest.mark.parametrize(
    ("name", "kind"), [("KVError", KVError), ("RuleError", RuleError), ("PeerLost", PeerLost), ("SystemExit", KVError)]
)
def test_a_refused_request_raises_what_the_other_side_says(rig: Rig, name: str, kind: type[RuntimeFault]) -> None:
    request, actions = rig.ask(("server-0", PULL))
    [(_, message)] = sends(actions)
    rig.reply("server-0", message.request, is_error=True, reason="no such piece", error=name, traceback="theirs")
    error = error_of(request)
    assert type(error) is kind
    assert str(error) == "pull of key 'w': no such piece"
    if isinstance(error, RuleError):
        assert error.server_traceback == "theirs"


def test_one_refusal_ends_the_request_and_later_replies_do_no_harm(rig: Rig) -> None:
    request, actions = rig.ask(("server-0", PULL), ("server-1", PULL))
    (_, one), (_, other) = sends(actions)
    rig.reply("server-0", one.request, is_error=True, reason="no")
    assert request.is_done
    assert rig.reply("server-1", other.request) == []
    assert rig.reply("server-1", 12345) == []


def test_a_refused_push_is_over_when_all_servers_have_answered(rig: Rig) -> None:
    """Until then its arrays may still be on their way: who lent them must not write."""
    push = Message(Kind.PUSH)
    request, actions = rig.ask(("server-0", push), ("server-1", push), what="push of key 'w'")
    (_, one), (_, other) = sends(actions)
    assert rig.reply("server-0", one.request, is_error=True, reason="no") == []
    assert not request.is_done
    rig.reply("server-1", other.request)
    with pytest.raises(KVError, match="push of key 'w': no"):
        request.wait(0)


def by_bucket(step: int, kind: Kind = Kind.PUSH, size: int = 8) -> Message:
    """Return a message that names a bucket in place of its entries."""
    payloads = [bytes(size)] if kind is Kind.PUSH else []
    return Message(kind, store=1, bucket=3, step=step, payloads=payloads)


def named(number: int) -> Any:
    return entries_of([Entry(key, 0, 1, 10 + number) for key in range(2)])


def test_a_message_whose_bucket_a_server_does_not_know_is_sent_again_with_its_entries(rig: Rig) -> None:
    asked: list[int] = []

    def told(number: int) -> Any:
        asked.append(number)
        return named(number)

    push = by_bucket(1)
    request, actions = rig.ask(("server-0", push), ("server-1", push), what="push of key 'w'", entries_of=told)
    (_, one), (_, other) = sends(actions)
    rig.reply("server-0", one.request)
    [(link, again)] = sends(rig.reply("server-1", other.request, is_error=True, reason="which?", again=True))
    assert (link, again.request, asked) == ("server-1", other.request, [1])
    assert (again.bucket, again.step, again.payloads) == (0, 0, other.payloads)
    assert again.entries.tobytes() == named(1).tobytes()
    assert not request.is_done
    rig.reply("server-1", other.request)
    assert len(request.wait(0)) == 2


def test_a_message_that_names_its_entries_is_sent_again_as_it_was(rig: Rig) -> None:
    request, actions = rig.ask(("server-0", PULL), entries_of=named)
    [(_, message)] = sends(actions)
    assert sends(rig.reply("server-0", message.request, is_error=True, again=True)) == [("server-0", message)]
    rig.reply("server-0", message.request)
    assert len(request.wait(0)) == 1


def test_a_message_that_is_refused_again_is_an_error(rig: Rig) -> None:
    request, actions = rig.ask(("server-0", by_bucket(1, Kind.PULL)), entries_of=named)
    [(_, message)] = sends(actions)
    assert sends(rig.reply("server-0", message.request, is_error=True, reason="which?", again=True))
    assert not sends(rig.reply("server-0", message.request, is_error=True, reason="which, please?", again=True))
    assert str(error_of(request)) == "pull of key 'w': which, please?"


def test_what_is_sent_again_goes_in_the_order_of_the_refusals_and_before_what_is_queued(rig: Rig) -> None:
    full = 64 * 1024 * 1024
    _, actions = rig.ask(("server-0", by_bucket(1, size=full)), entries_of=named)
    [(_, first)] = sends(actions)
    _, actions = rig.ask(("server-0", by_bucket(2, Kind.PULL)), entries_of=named)
    [(_, second)] = sends(actions)
    _, actions = rig.ask(("server-0", by_bucket(3)), entries_of=named)
    assert sends(actions) == [], "the window is full"
    for each in (first, second):
        [(_, again)] = sends(rig.reply("server-0", each.request, is_error=True, again=True))
        assert again.request == each.request
    [(_, third)] = sends(rig.reply("server-0", first.request))
    assert (third.bucket, third.step) == (3, 3), "what was queued names the bucket still, and is sent again in its turn"


def test_a_message_of_a_request_that_has_failed_is_sent_again_all_the_same(rig: Rig) -> None:
    """Its server expects it before anything else."""
    request, actions = rig.ask(("server-0", by_bucket(1, Kind.PULL)), ("server-1", PULL), entries_of=named)
    (_, one), (_, other) = sends(actions)
    rig.reply("server-1", other.request, is_error=True, reason="no")
    assert request.is_done
    [(_, again)] = sends(rig.reply("server-0", one.request, is_error=True, again=True))
    assert again.request == one.request
    assert rig.reply("server-0", one.request) == []


def test_waiting_is_noted_on_the_request_and_said(rig: Rig) -> None:
    request, actions = rig.ask(("server-0", PULL))
    [(_, message)] = sends(actions)
    body = {"text": "waiting for worker-1, key w, round 57", "seconds": 30.2}
    actions = rig.hear("server-0", Message(Kind.WAITING, request=message.request, body=body))
    assert role.Log("WARNING", "waiting for worker-1, key w, round 57 (30 s)") in actions
    with pytest.raises(
        TimedOut, match=r"pull of key 'w': no answer from server-0 for 0 s, waiting for worker-1, key w, round 57"
    ):  # fmt: skip
        request.wait(0)


def test_a_node_that_a_server_says_is_lost_counts_as_lost_and_the_agent_hears_of_it(rig: Rig) -> None:
    """A server's refusal came before the scheduler's word: there was a PeerLost, and nobody was dead."""
    request, actions = rig.ask(("server-0", PULL))
    number = sends(actions)[0][1].request
    told = rig.reply("server-0", number, is_error=True, error="PeerLost", reason="gone", who="worker-1")
    assert isinstance(error_of(request), PeerLost)
    assert rig.worker.dead == {"worker-1"}
    assert told[0] == role.Publish({"lost_peer": "worker-1", "message": "pull of key 'w': gone"})


def test_a_server_that_says_why_it_ends_is_lost_for_that_reason(rig: Rig) -> None:
    request, _ = rig.ask(("server-1", PULL))
    rig.hear("server-0", Message(Kind.LOST, body={"who": "server-0", "reason": "server-0@d0 failed: its GPU"}))
    rig.broken("server-0")
    rig.hear("scheduler", Message(Kind.LOST, body={"who": "server-0", "reason": "another"}))
    error = error_of(request)
    assert isinstance(error, PeerLost)
    assert (str(error), error.lost_peer) == ("pull of key 'w': server-0@d0 failed: its GPU", "server-0")


def test_a_server_that_ends_for_the_loss_of_the_scheduler_is_not_the_one_that_is_named(rig: Rig) -> None:
    request, _ = rig.ask(("server-1", PULL))
    text = "the scheduler at tcp://127.0.0.1:9 is lost: its connection closed"
    rig.hear("server-0", Message(Kind.LOST, body={"who": "scheduler", "reason": text}))
    rig.broken("server-0")
    error = error_of(request)
    assert isinstance(error, PeerLost)
    assert (str(error), error.lost_peer) == ("pull of key 'w': %s" % text, "scheduler")


def test_a_server_speaks_only_of_its_own_end(rig: Rig) -> None:
    request, _ = rig.ask(("server-1", PULL))
    assert rig.hear("server-0", Message(Kind.LOST, body={"who": "server-1", "reason": "x"})) == []
    assert not request.is_done


def test_a_wait_that_is_too_short_names_who_has_not_answered(rig: Rig) -> None:
    """Whom the servers wait for is only said after a while."""
    request, actions = rig.ask(("server-1", PULL), ("server-0", PULL), ("server-0", PULL))
    with pytest.raises(TimedOut, match=r"no answer from server-0, server-1 for [0-9.]+ s"):
        request.wait(0)
    for link, message in sends(actions):
        if link == "server-0":
            rig.reply(link, message.request)
    with pytest.raises(TimedOut, match=r"no answer from server-1 for 0 s"):
        request.wait(0)


@pytest.mark.parametrize("kind", [Kind.LOST, Kind.ROSTER])
def test_a_refusal_of_an_order_is_no_order(rig: Rig, kind: Kind) -> None:
    assert rig.hear("scheduler", Message(kind, is_reply=True, body={"reason": "it is not for you"})) == []


def test_a_lost_peer_ends_every_call_with_an_error_that_names_it(rig: Rig) -> None:
    one, _ = rig.ask(("server-0", PULL), ("server-1", PULL))
    two, _ = rig.ask(("scheduler", Message(Kind.BARRIER)), what="barrier")
    actions = rig.hear("scheduler", Message(Kind.LOST, body={"who": "worker-0", "reason": "worker-0@d0 is lost: x"}))
    assert role.Publish({"lost_peer": "worker-0", "message": "worker-0@d0 is lost: x"}) in actions
    for request, what in ((one, "pull of key 'w'"), (two, "barrier")):
        error = error_of(request)
        assert isinstance(error, PeerLost)
        assert str(error) == what + ": worker-0@d0 is lost: x"
    later, _ = rig.ask(("server-0", PULL))
    assert isinstance(error_of(later), PeerLost)


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("server-1", "server-1@d1 (pid 5, tcp://10.0.0.1:1) is lost: its connection closed"),
        ("scheduler", "the scheduler at tcp://127.0.0.1:9 is lost: its connection closed"),
    ],
)
def test_a_broken_connection_is_a_loss_that_names_who_was_there(rig: Rig, link: str, words: str) -> None:
    request, _ = rig.ask(("server-0", PULL))
    actions = rig.broken(link)
    assert role.Publish({"lost_peer": link, "message": words}) in actions
    assert str(error_of(request)) == "pull of key 'w': " + words
    assert rig.broken("server-0") == [], "the first loss is the one that counts"


def test_the_scheduler_is_told_of_a_lost_server_as_this_worker_may_end_first(rig: Rig) -> None:
    [(link, message)] = sends(rig.broken("server-1"))
    assert (link, message.kind, message.body["who"]) == ("scheduler", Kind.LOST, "server-1")
    reason = message.body["reason"]
    assert reason == "server-1@d1 (pid 5, tcp://10.0.0.1:1) is lost: its connection closed (seen by worker-1)"
    rig = Rig()
    failed = Message(Kind.LOST, body={"who": "server-0", "reason": "server-0@d0 failed: its GPU"})
    [(_, message)] = sends(rig.hear("server-0", failed))
    assert message.body == {"who": "server-0", "reason": "server-0@d0 failed: its GPU (seen by worker-1)"}


def test_what_the_scheduler_says_or_what_is_said_of_it_is_not_told_to_it() -> None:
    for link, who in (("scheduler", "server-0"), ("server-0", "scheduler")):
        assert sends(Rig().hear(link, Message(Kind.LOST, body={"who": who, "reason": "x"}))) == []
    assert sends(Rig().broken("scheduler")) == []


def test_a_connection_that_is_none_of_ours_does_not_matter() -> None:
    assert Rig().broken("in:ff") == []


def test_bye_is_answered_and_ends_the_node(rig: Rig) -> None:
    request = NodeRequest("goodbye")
    actions = rig.do(rig.worker.handle(role.CallSubmitted(Goodbye(request)), 0))
    assert [(link, message.kind) for link, message in sends(actions)] == [("scheduler", Kind.BYE)]
    assert not request.is_done
    actions = rig.hear("scheduler", Message(Kind.BYE, is_reply=True))
    assert role.Finish(0) in actions
    assert request.is_done


def test_a_connection_that_ends_after_bye_is_the_end_not_a_loss(rig: Rig) -> None:
    rig.do(rig.worker.handle(role.CallSubmitted(Goodbye(NodeRequest("goodbye"))), 0))
    actions = rig.broken("scheduler")
    assert role.Finish(0) in actions
    assert not any(isinstance(action, role.Publish) for action in actions)


def test_a_server_that_goes_first_at_the_end_is_no_loss(rig: Rig) -> None:
    rig.do(rig.worker.handle(role.CallSubmitted(Goodbye(NodeRequest("goodbye"))), 0))
    assert rig.broken("server-0") == []
    assert role.Finish(0) in rig.hear("scheduler", Message(Kind.BYE, is_reply=True))


def test_abort_names_the_reason_and_ends_when_the_scheduler_has_it(rig: Rig) -> None:
    request = NodeRequest("goodbye")
    actions = rig.do(rig.worker.handle(role.CallSubmitted(Goodbye(request, "ValueError: x")), 0))
    [(link, message)] = sends(actions)
    assert (link, message.kind, message.body) == ("scheduler", Kind.ABORT, {"reason": "ValueError: x"})
    assert not request.is_done
    assert role.Finish(0) in rig.hear("scheduler", Message(Kind.ABORT, is_reply=True))
    assert request.is_done


@pytest.mark.parametrize(("abort", "limit_s"), [("", 5.0), ("ValueError: x", 2.0)])
def test_last_words_that_a_frozen_scheduler_does_not_answer_are_not_waited_for_long(
    rig: Rig, abort: str, limit_s: float
) -> None:
    request = NodeRequest("goodbye")
    rig.do(rig.worker.handle(role.CallSubmitted(Goodbye(request, abort)), 100))
    assert rig.worker.tick(100 + limit_s - 0.1) == []
    actions = rig.do(rig.worker.tick(100 + limit_s))
    assert role.Finish(0) in actions
    assert request.is_done


@pytest.mark.parametrize("state", ["unregistered", "lost"])
def test_a_goodbye_that_nobody_can_hear_ends_at_once(state: str) -> None:
    rig = Rig(is_ready=state == "lost")
    if state == "lost":
        rig.broken("scheduler")
    request = NodeRequest("goodbye")
    actions = rig.do(rig.worker.handle(role.CallSubmitted(Goodbye(request)), 0))
    assert sends(actions) == []
    assert request.is_done


def test_a_stray_answer_to_bye_does_no_harm() -> None:
    assert Rig().hear("server-0", Message(Kind.BYE, is_reply=True)) == []


def test_only_nodes_of_the_job_may_connect() -> None:
    worker = Rig().worker
    assert worker.admit(node("worker", 0)) == ""
    stranger = NodeIdentity("other", "worker", 0, 0, "d", 1, "", 2, 2)
    assert worker.admit(stranger) == "worker-0@d (pid 1) belongs to job 'other'"


# Stores that some of the workers share


def asked_by(
    rig: Rig, members: Membership | None, *messages: tuple[str, Message]
) -> tuple[NodeRequest, list[role.Action]]:
    request = NodeRequest("pull of key 'w'")
    return request, rig.do(rig.worker.handle(role.CallSubmitted(Ask(request, messages, None, members)), 0))


def lose(rig: Rig, who: str) -> list[role.Action]:
    return rig.hear("scheduler", Message(Kind.LOST, body={"who": who, "reason": "%s is lost" % who}))


WITH_0, WITHOUT_0 = Membership((0, 1)), Membership((1, 2))


def test_a_lost_worker_ends_what_cannot_do_without_it_and_nothing_else(rig: Rig) -> None:
    asked = {each: asked_by(rig, each, ("server-0", PULL)) for each in (WITH_0, WITHOUT_0, None)}
    lose(rig, "worker-0")
    for each in (WITH_0, None):
        assert str(error_of(asked[each][0])) == "pull of key 'w': worker-0 is lost"
        assert isinstance(error_of(asked_by(rig, each, ("server-0", PULL))[0]), PeerLost)
    request, actions = asked[WITHOUT_0]
    assert not request.is_done
    rig.reply("server-0", sends(actions)[0][1].request)
    assert request.wait(0)
    _, actions = asked_by(rig, WITHOUT_0, ("server-0", PULL))
    assert [link for link, _ in sends(actions)] == ["server-0"]


def test_the_agent_hears_of_a_lost_worker_only_from_those_who_share_a_store_with_it(rig: Rig) -> None:
    asked_by(rig, WITHOUT_0, ("server-0", PULL))
    assert lose(rig, "worker-0") == []
    assert rig.worker.dead == {"worker-0"}
    told = [action.facts for action in lose(rig, "worker-2") if isinstance(action, role.Publish)]
    assert told == [{"lost_peer": "worker-2", "message": "worker-2 is lost"}]


def test_a_worker_goes_on_registering_when_another_is_lost_and_ends_when_a_server_is() -> None:
    rig = Rig(is_ready=False)
    rig.welcome("scheduler")
    rig.roster()
    rig.welcome("server-0")
    lose(rig, "worker-0")
    assert not rig.ready.is_done
    rig.welcome("server-1")
    assert rig.ready.wait(0) == ()
    assert isinstance(error_of(asked_by(rig, None, ("server-0", PULL))[0]), PeerLost)
    other = Rig(is_ready=False)
    other.welcome("scheduler")
    other.roster()
    lose(other, "server-1")
    assert isinstance(error_of(other.ready), PeerLost)


def test_a_store_that_a_lost_worker_has_ended_can_be_closed(rig: Rig) -> None:
    asked_by(rig, WITH_0, ("server-0", PULL))
    lose(rig, "worker-0")
    _, actions = asked_by(rig, WITH_0, ("scheduler", Message(Kind.CLOSE, store=1)))
    assert [(link, sent.kind) for link, sent in sends(actions)] == [("scheduler", Kind.CLOSE)]


def test_a_server_that_is_lost_after_a_worker_ends_the_rest(rig: Rig) -> None:
    request, _ = asked_by(rig, WITHOUT_0, ("server-0", PULL))
    lose(rig, "worker-0")
    rig.broken("server-1")
    assert "server-1@d1 (pid 5, tcp://10.0.0.1:1) is lost" in str(error_of(request))
    for members, who in ((WITHOUT_0, "server-1"), (WITH_0, "worker-0"), (None, "worker-0")):
        error = error_of(asked_by(rig, members, ("server-0", PULL))[0])
        assert isinstance(error, PeerLost)
        assert error.lost_peer == who


def test_a_worker_that_is_lost_after_a_server_is_not_the_reason(rig: Rig) -> None:
    rig.broken("server-1")
    lose(rig, "worker-0")
    for members in (WITHOUT_0, WITH_0, None):
        assert error_of(asked_by(rig, members, ("server-0", PULL))[0]).lost_peer == "server-1"


def test_pushes_that_a_lost_worker_has_ended_take_no_room_from_others(rig: Rig) -> None:
    """One is on its way and fills the window, one waits behind it."""
    size = WINDOW_BYTES // 4
    full = Message(Kind.PUSH, entries=entries_of([Entry(0, 0, size)]), payloads=[bytes(4 * size)])
    for _ in range(2):
        _, actions = asked_by(rig, WITH_0, ("server-0", full))
    assert sends(actions) == []
    lose(rig, "worker-0")
    later, actions = asked_by(rig, WITHOUT_0, ("server-0", full))
    assert sends(actions) == []
    actions = rig.hear("server-0", Message(Kind.PUSH, is_reply=True, request=1))
    assert [(link, sent.request) for link, sent in sends(actions)] == [("server-0", 3)], "and not what has failed"
    rig.hear("server-0", Message(Kind.PUSH, is_reply=True, request=3))
    assert later.wait(0)


@pytest.mark.parametrize(("members", "kinds"), [(None, []), (WITHOUT_0, [Kind.BYE])])
def test_a_worker_whose_groups_may_go_on_without_a_lost_one_says_its_last_words(
    rig: Rig, members: Membership | None, kinds: list[Kind]
) -> None:
    asked_by(rig, members, ("server-0", PULL))
    lose(rig, "worker-0")
    actions = rig.do(rig.worker.handle(role.CallSubmitted(Goodbye(NodeRequest("goodbye"))), 0))
    assert [sent.kind for _, sent in sends(actions)] == kinds


def test_relays_of_a_store_serve_hosts_with_several_of_its_members() -> None:
    rig = Rig(is_ready=False)
    nodes = [replace(node("server", rank), host="ab"[rank]) for rank in range(2)]
    nodes += [replace(node("worker", rank), host="aabb"[rank]) for rank in range(4)]
    body = {"nodes": [asdict(each) for each in nodes], "rank": 1, "host_sums": True}
    rig.worker = Worker(config("worker", root_port=9, host="a", workers=4), "tcp://127.0.0.1:7", rig.ready)
    rig.hear("scheduler", Message(Kind.ROSTER, body=body))
    assert rig.worker.relays == {1: 0}
    assert rig.worker.relays_among(Membership((0, 1, 2))) == ({1: 0}, [{1: 0}])
    assert rig.worker.relays_among(Membership((1, 2, 3))) == ({}, [{0: 1}])
    assert rig.worker.relays_among(Membership((1, 2))) == ({}, [])
