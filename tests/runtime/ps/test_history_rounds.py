"""A server by scripted histories: rounds, pulls, repeats, refusals, and workers that join, leave or die."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from history_server import History, Piece, data, raw, reason, said, values

from distrun_runtime.protocol.message import Kind

pytestmark = pytest.mark.usefixtures("engine")

Serving = Callable[..., History]

# Rounds


def test_a_push_is_acknowledged_at_once_and_its_round_is_over_when_every_worker_contributed(server: History) -> None:
    assert said(server.push(0, 1, {"a": [1, 2]})) == ["w0 PUSH"]
    assert values(server.pull(1, 0)) == {"a": [0, 0]}
    assert said(server.push(1, 1, {"a": [10, 20]})) == ["w1 PUSH"]
    assert values(server.pull(1, 1)) == {"a": [11, 22]}


def test_keys_have_rounds_of_their_own(server: History) -> None:
    server.push(0, 1, {"a": [1, 1]})
    server.push(1, 1, {"b": [2, 2]})
    assert server.rounds() == {"a": 0, "b": 0}
    server.push(0, 1, {"b": [3, 3]})
    assert server.rounds() == {"a": 0, "b": 1}
    assert values(server.pull(0, 1, "b")) == {"b": [5, 5]}


def test_rounds_that_are_ahead_are_summed_apart_in_whatever_order_their_keys_come(server: History) -> None:
    """Worker 0 pushes both keys in one message, worker 1 each alone, the second one first."""
    for number in (1, 2):
        server.push(0, number, {"a": [number, 0], "b": [0, number]})
    server.push(1, 1, {"b": [0, 10]})
    server.push(1, 2, {"b": [0, 20]})
    server.push(1, 1, {"a": [10, 0]})
    assert values(server.pull(0, 1, "b", "a")) == {"a": [11, 0], "b": [0, 22]}, "b has gone on"
    server.push(1, 2, {"a": [20, 0]})
    assert values(server.pull(0, 2, "a", "b")) == {"a": [22, 0], "b": [0, 22]}


@pytest.mark.parametrize("begin", [{"c": [5, 0]}, {"a": [1, 0], "c": [5, 0]}], ids=["", "some are repeats"])
def test_the_keys_of_one_message_may_be_at_different_rounds(server: History, begin: dict[str, Any]) -> None:
    server.init({"c": [0, 0]})
    server.push_all(1, begin)
    for rank in (0, 1):
        payloads = [raw(np.array([key, rank], np.float32)) for key in (10, 20, 30)]
        pieces = [Piece(key, round=1 + key // 2, payload=payload) for key, payload in enumerate(payloads)]
        assert said(server.hear("w%d" % rank, data(Kind.PUSH, pieces)))[0] == "w%d PUSH" % rank
    assert server.rounds() == {"a": 1, "b": 1, "c": 2}
    assert values(server.pull(0, 1, "a", "b")) == {"a": [2, 0] if "a" in begin else [20, 1], "b": [40, 1]}
    assert values(server.pull(0, 2, "c")) == {"c": [60, 1]}


def test_every_pull_gets_the_round_that_it_asks_for_though_its_worker_pushes_again_meanwhile(server: History) -> None:
    """Key b goes on while the pull waits for key a; once its round is over before its worker pushes it again."""
    for number, is_over in ((1, False), (3, False), (5, True)):
        server.push(0, number, {"a": [number, 0], "b": [number, 0]})
        assert server.pull(0, number, "a", "b") == []
        pushes = [(1, number, 1), (0, number + 1, 100)]
        for rank, each, value in (*(pushes if is_over else pushes[::-1]), (1, number + 1, 1)):
            assert said(server.push(rank, each, {"b": [0, value]})) == ["w%d PUSH" % rank]
        [pulled] = [each for each in server.push(1, number, {"a": [0, 1]}) if each.link == "w0"]
        assert values([pulled]) == {"a": [number, 1], "b": [number, 1]}
        server.push(0, number + 1, {"a": [0, 0]})
        server.push(1, number + 1, {"a": [0, 0]})


def test_a_pull_gets_its_round_though_its_worker_has_gone_on_while_the_others_were_rounds_behind(
    server: History,
) -> None:
    for number in (1, 2):
        server.push(0, number, {"a": [number, 0], "b": [number, 0]})
    assert server.pull(0, 2, "a", "b") == []
    server.push(0, 3, {"b": [100, 0]})
    for name, last in (("b", 3), ("a", 1)):
        for number in range(1, last + 1):
            assert said(server.push(1, number, {name: [0, 1]})) == ["w1 PUSH"]
    [pulled] = [each for each in server.push(1, 2, {"a": [0, 1]}) if each.link == "w0"]
    assert values([pulled]) == {"a": [2, 1], "b": [2, 1]}


@pytest.mark.parametrize(("pulled", "pushed"), [("abcde", "cdefghijkl"), ("abcdefgh", "fghi"), ("abc", "cd")])
def test_of_many_pulls_that_wait_those_are_answered_whose_keys_have_their_round(
    server: History, pulled: str, pushed: str
) -> None:
    server.init({key: [0, 0] for key in "cdefghijkl"})
    server.push(0, 1, {key: [1, 1] for key in "abcdefghijkl"})
    for name in pulled:
        assert server.pull(0, 1, name) == []
    sent = server.push(1, 1, {key: [2, 2] for key in pushed})
    answers = [each for each in sent if each.link == "w0"]
    assert sorted(name for each in answers for name in each.values) == sorted(set(pulled) & set(pushed))
    rest = server.push(1, 1, {key: [2, 2] for key in sorted(set(pulled) - set(pushed))})
    assert len(answers) + len([each for each in rest if each.link == "w0"]) == len(pulled)


def test_a_repeat_is_acknowledged_and_counted_once(server: History) -> None:
    server.push(0, 1, {"a": [1, 1]})
    assert said(server.push(0, 1, {"a": [100, 100]})) == ["w0 PUSH"]
    server.push(1, 1, {"a": [2, 2]})
    assert said(server.push(1, 1, {"a": [100, 100]})) == ["w1 PUSH"]
    assert values(server.pull(0, 1)) == {"a": [3, 3]}
    server.push(0, 2, {"a": [5, 5]})
    assert server.rounds()["a"] == 1, "the repeats are no part of the next round"
    server.push(1, 2, {"a": [6, 6]})
    assert values(server.pull(0, 2)) == {"a": [11, 11]}


def test_a_late_repeat_opens_no_round(server: History, tmp_path: Path) -> None:
    """States are saved only while no round is open."""
    for rank in (0, 1, 0):
        server.push(rank, 1, {"a": [1, 1]})
    assert said(server.scheduler(Kind.SAVE, 7, folder=str(tmp_path), part="data-1", names=[[0, "a"]])) == [
        "scheduler SAVE"
    ]


def test_a_repeat_of_some_keys_of_a_push_is_counted_for_the_others_only(server: History) -> None:
    server.push(0, 1, {"a": [1, 1]})
    server.push(0, 1, {"a": [100, 100], "b": [2, 2]})
    server.push(1, 1, {"b": [20, 20], "a": [10, 10]})
    assert values(server.pull(0, 1, "a", "b")) == {"a": [11, 11], "b": [22, 22]}


# Pulls


def test_a_pull_of_the_own_round_is_answered_when_the_round_is_over_and_the_push_after_it(server: History) -> None:
    server.push(0, 1, {"a": [1, 1]})
    assert server.pull(0, 1) == []
    request = server.last_request
    sent = server.push(1, 1, {"a": [2, 2]})
    assert sorted(said(sent)) == ["w0 PULL", "w1 PUSH"]
    [reply] = [each for each in sent if each.kind is Kind.PULL]
    assert (reply.request, reply.store, reply.is_reply) == (request, 1, True)
    assert values([reply]) == {"a": [3, 3]}


def test_a_pull_gets_its_own_round_though_the_next_is_complete_too(serving: Serving) -> None:
    """Both rounds are complete at once: no mixed value, and no later one."""
    server = serving(workers=3)
    server.push(0, 1, {"a": [1, 0]})
    server.pull(0, 1)
    server.push(0, 2, {"a": [10, 0]})
    for number in (1, 2):
        server.push(1, number, {"a": [0, number]})
    server.push(2, 2, {"a": [0, 0]})
    sent = server.push(2, 1, {"a": [0, 0]})
    [reply] = [each for each in sent if each.kind is Kind.PULL]
    assert values([reply]) == {"a": [1, 1]}
    assert values(server.pull(0, 2)) == {"a": [10, 2]}


def test_a_reply_names_its_pieces_as_the_pull_did(server: History) -> None:
    [reply] = server.pull(0, 0, "b", "a")
    assert [(piece.name, piece.length, piece.round, piece.codec) for piece in reply.pieces] == [
        ("b", 2, 0, 0),
        ("a", 2, 0, 0),
    ]


@pytest.mark.parametrize("rule", [None, "test"])
def test_a_reply_that_is_still_being_sent_is_not_changed_by_later_rounds(server: History, rule: str | None) -> None:
    """Its frames are the server's own memory until the transport has let go of them."""
    if rule:
        server.rule(rule)
    server.read_slowly()
    [first] = server.pull(0, 0)
    sent = {0: first.values["a"]}
    for number in (1, 2, 3):
        server.push_all(number, {"a": [number, 10 * number]})
        [reply] = server.pull(0, number)
        sent[number] = reply.values["a"]
    expected = {0: [0, 0], 1: [2, 20], 2: [6, 60], 3: [12, 120]} if rule else {n: [2 * n, 20 * n] for n in range(4)}
    assert {number: each.tolist() for number, each in sent.items()} == expected


def test_a_pull_that_waits_for_another_key_holds_its_value_while_later_rounds_are_applied(server: History) -> None:
    server.rule("test")
    server.push(0, 1, {"b": [1, 1]})
    assert server.pull(0, 0, "a", changes={"round": 0}) != []
    mixed = data(Kind.PULL, [Piece(0, round=0), Piece(1, round=1)])
    assert server.hear("w0", mixed) == []
    server.push_all(1, {"a": [5, 5]})
    sent = server.push(1, 1, {"b": [1, 1]})
    [reply] = [each for each in sent if each.kind is Kind.PULL]
    assert values([reply]) == {"a": [0, 0], "b": [2, 2]}
    assert values(server.pull(1, 1)) == {"a": [10, 10]}


def test_a_pull_is_told_soon_whom_it_waits_for_and_again_every_30_seconds(serving: Serving) -> None:
    server = serving(workers=3)
    server.push(0, 1, {"b": [1, 1]})
    server.push(2, 1, {"b": [1, 1]})
    server.now = 5
    server.pull(0, 1, "b")
    request = server.last_request
    assert server.tick(6.9) == []
    for now, seconds in ((7.0, 2.0), (37.0, 32.0), (67.0, 62.0)):
        [note] = server.tick(now)
        assert (note.link, note.kind, note.is_reply, note.request) == ("w0", Kind.WAITING, False, request)
        text = "waiting for worker-1, key b, round 1"
        assert note.body == {"text": text, "seconds": seconds, "for": ["worker-1"], "key": "b"}
        assert server.tick(now + 1) == []
    server.push(1, 1, {"b": [1, 1]})
    assert server.tick(100) == [], "it waits no more"


def test_a_pull_that_waits_for_several_workers_names_them_all(serving: Serving) -> None:
    server = serving(workers=4)
    server.push(1, 1, {"a": [1, 1]})
    server.pull(1, 1)
    [note] = server.tick(3)
    assert note.body["text"] == "waiting for worker-0, worker-2, worker-3, key a, round 1"


# Mistakes of workers


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": 5}, "key 5, offset 0: no such piece on server-0"),
        ({"offset": 4}, "key 'a', offset 4: no such piece on server-0"),
        ({"length": 1, "payload": bytes(4)}, "key 'a': server-0 has 2 elements of float32, the message 1 of float32"),
        ({"dtype": 1, "payload": bytes(16)}, "key 'a': server-0 has 2 elements of float32, the message 2 of float64"),
    ],
)
def test_a_piece_that_does_not_fit_is_refused(server: History, changes: dict[str, Any], words: str) -> None:
    assert reason(server.push(0, 1, {"a": [1, 1]}, changes=changes)) == words
    assert reason(server.pull(0, 0, changes={**changes, "payload": None})) == words
    assert values(server.pull(0, 0)) == {"a": [0, 0]}


def test_one_wrong_key_refuses_the_whole_push(server: History) -> None:
    assert "no such piece" in reason(server.push(0, 1, {"a": [1, 1], "j": [1, 1]}))
    server.push(1, 1, {"a": [2, 2]})
    assert server.rounds()["a"] == 0
    assert said(server.push(0, 1, {"a": [3, 3]})) == ["w0 PUSH"]
    assert values(server.pull(0, 1)) == {"a": [5, 5]}


def test_one_push_has_each_piece_once(server: History) -> None:
    twice = [Piece(0, round=1, payload=bytes(8))] * 2
    assert reason(server.hear("w0", data(Kind.PUSH, twice))) == "key 'a', offset 0: twice in one push"


def test_a_push_without_values_and_a_pull_with_values_are_refused(server: History) -> None:
    assert reason(server.hear("w0", data(Kind.PUSH, [Piece(0, round=1)]))) == "key 'a': PUSH with payload kind NONE"
    pull = data(Kind.PULL, [Piece(0, payload=bytes(8))])
    assert reason(server.hear("w0", pull)) == "key 'a': PULL with payload kind FRAME"


def test_a_store_that_has_no_keys_is_refused(serving: Serving) -> None:
    pull = data(Kind.PULL, [Piece(0)], store=8)
    assert reason(serving().hear("w0", pull)) == "store 8 has no keys on server-0"


def test_a_double_init_is_refused_whole(server: History) -> None:
    assert reason(server.init({"f": [1, 1], "a": [1, 1]})) == "key 'a' was initialised before"
    assert values(server.pull(0, 0)) == {"a": [0, 0]}
    assert said(server.init({"f": [2, 2]})) == ["w0 INIT"], "the refused one left nothing behind"
    assert values(server.pull(0, 0, "f")) == {"f": [2, 2]}
    twice = [Piece(6, payload=bytes(8))] * 2
    assert reason(server.hear("w0", data(Kind.INIT, twice))) == "key 6 was initialised before"


def test_an_init_without_a_value_is_refused(server: History) -> None:
    assert reason(server.hear("w0", data(Kind.INIT, [Piece(5)]))) == "key 5: INIT without a value"
    assert "no such piece" in reason(server.pull(0, 0, "f"))


def test_rows_must_be_whole_in_every_piece(server: History) -> None:
    assert reason(server.init({"f": [1, 1]}, rows={"5": 3})) == (
        "key 'f': 2 elements from 0 on are not whole rows of 3"
    )
    assert "no such piece" in reason(server.pull(0, 0, "f"))


def test_an_unknown_request_is_refused_and_a_reply_or_a_stranger_is_not_answered(server: History) -> None:
    assert reason(server.ask(0, Kind.BARRIER)) == "server-0 knows no BARRIER"
    assert server.hear("w0", data(Kind.PULL, [Piece(0)], is_reply=True)) == []
    assert server.hear("s9", data(Kind.PULL, [Piece(0)])) != [], "it is told to say HELLO"
    assert server.log.count("event=bad-bytes reason=PULL before WELCOME") == 1


def test_assign_replaces_the_value_and_no_round(server: History) -> None:
    server.push_all(1, {"a": [1, 1]})
    assert said(server.assign({"a": [7, 8]})) == ["w0 INIT"]
    assert server.rounds() == {"a": 1, "b": 0}
    assert values(server.pull(0, 1)) == {"a": [7, 8]}


def test_assign_to_what_does_not_exist_or_fit_is_refused(server: History) -> None:
    assert reason(server.assign({"h": [1, 1]})) == "key 7, offset 0: assigned before it was initialised"
    assert "2 elements of float32, the message 1 of float32" in reason(server.assign({"a": [1]}))
    assert values(server.pull(0, 0)) == {"a": [0, 0]}


# A worker whose own push was refused


def test_a_worker_never_waits_for_a_push_of_its_own_that_was_refused(server: History) -> None:
    server.push(1, 1, {"a": [1, 1], "b": [1, 1]})
    assert "no such piece" in reason(server.push(0, 1, {"a": [1, 1], "j": [1, 1]}))
    assert reason(server.pull(0, 1)) == "round 1 of key 'a' cannot come: this worker's own push of it was refused"
    assert said(server.pull(0, 0)) == ["w0 PULL"]
    server.push(0, 1, {"b": [1, 1]})
    assert values(server.pull(0, 1, "b")) == {"b": [2, 2]}


# Joining, leaving, dying


def test_a_worker_that_joins_in_open_rounds_completes_those_that_the_others_have_pushed(serving: Serving) -> None:
    """Its own contributions to them count as far as they have come."""
    server = serving(workers=3)
    for number in (1, 2, 3):
        server.push(0, number, {"a": [number, 0]})
    server.push(1, 1, {"a": [0, 1]})
    server.push(1, 2, {"a": [0, 2]})
    server.push(2, 1, {"b": [1, 1]})
    assert server.pull(0, 2) == []
    sent = server.join(2)
    assert sorted(said(sent)) == ["scheduler JOIN", "w0 PULL"]
    assert values([each for each in sent if each.kind is Kind.PULL]) == {"a": [2, 2]}
    assert server.rounds() == {"a": 2, "b": 0}
    sent = server.push(1, 3, {"a": [0, 3]})
    assert values(server.pull(1, 3)) == {"a": [3, 3]}


def test_when_all_have_joined_rounds_are_of_all_again(server: History) -> None:
    server.join(1)
    server.push(0, 1, {"a": [1, 1]})
    server.join(0)
    server.join(1, is_last=True)
    server.push(0, 2, {"a": [2, 2]})
    assert server.rounds(1) == {"a": 1, "b": 0}
    server.push(1, 2, {"a": [3, 3]})
    assert values(server.pull(1, 2)) == {"a": [5, 5]}


def test_a_round_without_any_contribution_is_none(server: History) -> None:
    server.join(1)
    server.join(0)
    assert server.rounds() == {"a": 0, "b": 0}
    assert server.stats()["updates"] == 0


def test_a_worker_that_left_the_store_is_never_waited_for_again(server: History) -> None:
    server.push(0, 1, {"a": [1, 1]})
    assert said(server.leave(1)) == ["scheduler LEFT"]
    assert values(server.pull(0, 1)) == {"a": [1, 1]}
    server.join(0)
    server.join(0, is_last=True)
    server.push(0, 2, {"a": [2, 2]})
    assert values(server.pull(0, 2)) == {"a": [2, 2]}


def test_a_bye_with_an_open_round_ends_the_pulls_that_wait_for_it(server: History) -> None:
    server.push(0, 1, {"a": [1, 1], "b": [1, 1]})
    server.pull(0, 1)
    sent = server.bye(1, "worker-1@d2 (pid 9)")
    text = (
        "worker-1@d2 (pid 9) has ended (BYE) without pushing round 1 of key 'a';"
        " a worker that runs out of data calls kv.join()"
    )
    assert reason(sent) == text
    assert (sent[0].link, sent[0].body["error"], sent[0].body["who"]) == ("w0", "PeerLost", "worker-1")
    for names in ("a", "ab"):  # a message that came before, and one that did not
        assert reason(server.pull(0, 1, *names)) == text, "a later pull hears it at once"


def test_a_bye_after_the_round_was_pushed_harms_nobody(server: History) -> None:
    server.push(1, 1, {"a": [1, 1]})
    assert server.bye(1) == []
    server.push(0, 1, {"a": [2, 2]})
    assert values(server.pull(0, 1)) == {"a": [3, 3]}


def test_a_job_goes_on_without_a_worker_that_left_and_ended(serving: Serving) -> None:
    """Many pulls wait for the others, and none of them for the one that is gone."""
    server = serving(workers=3)
    server.leave(2)
    server.bye(2)
    server.push(0, 1, {"a": [1, 1]})
    for _ in range(20):
        assert server.pull(0, 1) == []
    assert sorted(said(server.push(1, 1, {"a": [1, 1]}))) == ["w0 PULL"] * 20 + ["w1 PUSH"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_value_that_one_contribution_became_can_be_stepped_by_a_rule(serving: Serving, workers: int) -> None:
    """The only contribution of its round: from a job of one worker, or of one that goes on alone."""
    server = serving(workers=workers)
    if workers == 2:
        server.join(1)
    server.push(0, 1, {"a": [1, 2]})
    server.rule("test")
    server.push(0, 2, {"a": [10, 20]})
    assert values(server.pull(0, 2)) == {"a": [11, 22]}


@pytest.mark.parametrize(
    ("kind", "body", "wrong"),
    [
        (Kind.PULL, {}, "a relay names the workers that it speaks for, each from 0 to 1, not []"),
        (Kind.PULL, {"ranks": [0, 2]}, "each from 0 to 1, not [0, 2]"),
        (Kind.PULL, {"ranks": [0], "own": -1}, "each from 0 to 1, not [0, -1]"),
        (Kind.PUSH, {"ranks": [0], "skip": {}}, "a relay's push names the first of its workers"),
        (Kind.STATS, {"ranks": [0]}, "server-0 expects no such STATS"),
    ],
)
def test_another_server_that_does_not_say_for_whom_it_speaks_is_refused(
    serving: Serving, kind: Kind, body: dict[str, Any], wrong: str
) -> None:
    sent = serving(servers=2).hear("s1", data(kind, [Piece(0)], body=body))
    assert wrong in reason(sent)


def test_a_worker_of_another_host_is_told_that_this_server_is_no_relay_for_it(serving: Serving) -> None:
    message = replace(data(Kind.PULL, [Piece(0)], request=3), is_relayed=True)
    assert reason(serving(servers=2).hear("w0", message)) == (
        "server-0 is no relay for worker-0: they are on two hosts"
    )


def test_a_sum_of_contributions_of_which_some_came_before_is_refused_and_changes_nothing(serving: Serving) -> None:
    server = serving(servers=2)
    server.push(0, 1, {"a": [1, 1]})
    values_of_both = np.array([5, 5], np.float32).tobytes()
    body = {"ranks": [0, 1], "first": 0}
    sent = server.hear("s1", data(Kind.PUSH, [Piece(0, round=1, payload=values_of_both)], body=body))
    assert reason(sent) == "entry 0 is a sum for worker-0, worker-1, of which worker-0 came before"
    server.push(1, 1, {"a": [10, 10]})
    assert values(server.pull(0, 1)) == {"a": [11, 11]}


def test_a_sum_for_several_workers_completes_their_round_and_counts_once_if_it_comes_again(serving: Serving) -> None:
    server = serving(servers=2)
    body = {"ranks": [0, 1], "first": 0}
    for _ in range(2):
        payload = np.array([5, 6], np.float32).tobytes()
        sent = server.hear("s1", data(Kind.PUSH, [Piece(0, round=1, payload=payload)], body=body))
        assert [each.is_error for each in sent] == [False]
    assert values(server.pull(0, 1)) == {"a": [5, 6]}


def test_a_loss_refuses_the_pulls_that_wait(server: History) -> None:
    server.push(0, 1, {"a": [1, 1]})
    server.pull(0, 1)
    sent = server.lost("worker-1", "worker-1 is lost")
    assert reason(sent) == "worker-1 is lost"
    assert (sent[0].link, sent[0].body["error"], sent[0].body["who"]) == ("w0", "PeerLost", "worker-1")
    assert server.published == [{"lost_peer": "worker-1", "message": "worker-1 is lost"}]
    assert server.tick(1000) == []


def test_a_workers_broken_connection_drops_its_pulls_and_no_others(serving: Serving) -> None:
    server = serving(workers=3)
    for rank in (0, 1):
        server.push(rank, 1, {"a": [1, 1]})
        assert server.pull(rank, 1) == []
    assert server.stats(2)["queue"] == 2
    assert server.cut("w0") == []
    assert server.stats(2)["queue"] == 1
    sent = server.push(2, 1, {"a": [2, 2]})
    assert sorted(said(sent)) == ["w1 PULL", "w2 PUSH"]
    assert values([each for each in sent if each.kind is Kind.PULL]) == {"a": [4, 4]}, "what it had pushed counts"


# Rounds that a worker skips


def test_a_skipped_round_is_over_when_all_have_come_and_changes_nothing(server: History) -> None:
    server.push(0, 1, {"a": [5, 5]})
    assert said(server.skip(1, 1)) == ["w1 PUSH"]
    [reply] = server.pull(0, 1)
    assert reply.body == {"skipped": {"0": {"0": None, "1": {"why": 1}}}}
    assert values([reply]) == {"a": [0, 0]}


def test_a_pull_waits_for_the_others_in_a_skipped_round_too(server: History) -> None:
    server.skip(0, 1, "a", "b")
    assert server.pull(0, 1, "a", "b") == []
    server.push(1, 1, {"a": [1, 1]})
    sent = server.skip(1, 1, "b", note={})
    [reply] = [each for each in sent if each.kind is Kind.PULL]
    assert reply.link == "w0"
    assert reply.body["skipped"] == {"0": {"0": {"why": 0}, "1": None}, "1": {"0": {"why": 0}, "1": {}}}


def test_the_round_after_a_skipped_one_is_an_ordinary_one(server: History) -> None:
    server.push(0, 1, {"a": [9, 9]})
    server.skip(1, 1)
    server.push_all(2, {"a": [1, 1]})
    [reply] = server.pull(1, 2)
    assert reply.body == {}
    assert values([reply]) == {"a": [2, 2]}, "nothing of the skipped round is in it"


def test_who_has_joined_is_not_among_the_workers_of_a_skipped_round(server: History) -> None:
    server.join(1)
    server.skip(0, 1)
    [reply] = server.pull(0, 1)
    assert reply.body["skipped"] == {"0": {"0": {"why": 0}}}


@pytest.mark.parametrize("is_skip_first", [True, False])
def test_of_a_skip_and_a_push_of_the_same_round_the_first_one_counts(server: History, is_skip_first: bool) -> None:
    calls = [lambda: server.skip(0, 1), lambda: server.push(0, 1, {"a": [1, 1]})]
    for call in calls if is_skip_first else reversed(calls):
        assert said(call()) == ["w0 PUSH"]
    server.push(1, 1, {"a": [2, 2]})
    assert values(server.pull(0, 1)) == {"a": [0, 0] if is_skip_first else [3, 3]}


def test_counted_and_saved_rounds_are_those_of_updates(server: History) -> None:
    """Schedules count these: a skipped round is no step."""
    for number in (1, 2, 3):
        server.push(0, number, {"a": [1, 1]})
        server.skip(1, number) if number == 2 else server.push(1, number, {"a": [1, 1]})
    assert (server.stats()["rounds"], server.stats()["updates"]) == (2, 2)
    assert server.rounds() == {"a": 3, "b": 0}, "a worker that joins is told all of them"
    [reply] = server.pull(0, 3)
    assert reply.body == {}
    [reply] = server.pull(1, 2)
    assert reply.body["skipped"] == {"0": {"0": None, "1": {"why": 1}}}, "a late pull is told still"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"note": "text"}, "a skipped round has a note that is an object, not 'text'"),
        ({"note": [1]}, "a skipped round has a note that is an object, not [1]"),
        ({"changes": {"payload": bytes(8)}}, "key 'a': a skipped round brings no value"),
        ({"changes": {"codec": 1}}, "key 'a': a skipped round brings no value"),
        ({"changes": {"length": 3}}, "key 'a': server-0 has 2 elements of float32, the message 3 of float32"),
        ({"changes": {"key": 7}}, "key 7, offset 0: no such piece on server-0"),
    ],
)
def test_what_skips_no_round_is_refused_and_changes_nothing(
    server: History, changes: dict[str, Any], words: str
) -> None:
    assert reason(server.skip(0, 1, **changes)) == words
    server.push(0, 1, {"a": [1, 1]})
    server.push(1, 1, {"a": [1, 1]})
    assert values(server.pull(0, 1)) == {"a": [2, 2]}


def test_without_rounds_none_can_be_skipped(serving: Serving) -> None:
    server = serving("dist_async")
    server.rule("sgd")
    assert reason(server.skip(0, 1)) == "a round cannot be skipped in a dist_async store: it has no rounds"


# Asynchronous stores


def test_async_pushes_are_applied_on_arrival_and_pulls_never_wait(serving: Serving) -> None:
    server = serving("dist_async")
    server.rule("test")
    assert said(server.push(0, 1, {"a": [1, 1], "b": [2, 2]})) == ["w0 PUSH"]
    assert values(server.pull(1, 17, "a", "b")) == {"a": [1, 1], "b": [2, 2]}
    server.push(1, 1, {"a": [3, 3]})
    assert values(server.pull(0, 1)) == {"a": [4, 4]}


def test_async_without_a_rule_is_refused_and_the_server_lives(serving: Serving) -> None:
    server = serving("dist_async")
    text = "dist_async needs a rule on the servers: call kv.set_optimizer('sgd', learning_rate=...) before push"
    assert reason(server.push(0, 1, {"a": [1, 1]})) == text
    assert values(server.pull(0, 0)) == {"a": [0, 0]}
    server.rule("test")
    assert said(server.push(0, 1, {"a": [1, 1]})) == ["w0 PUSH"]
    assert values(server.pull(0, 1)) == {"a": [1, 1]}


def bounded(serving: Serving, staleness: int, workers: int = 2) -> History:
    server = serving("dist_async", workers, staleness=staleness)
    server.rule("test")
    return server


ONE = {"a": [1, 1]}


def test_a_pull_waits_until_no_worker_is_more_than_the_bound_behind(serving: Serving) -> None:
    server = bounded(serving, 1)
    server.push(0, 1, ONE)
    assert said(server.pull(0, 1)) == ["w0 PULL"]
    server.push(0, 2, ONE)
    assert server.pull(0, 2) == []
    sent = server.push(1, 1, ONE)
    assert sorted(said(sent)) == ["w0 PULL", "w1 PUSH"]
    assert values([each for each in sent if each.kind is Kind.PULL]) == {"a": [3, 3]}


def test_with_a_bound_of_0_all_workers_keep_step(serving: Serving) -> None:
    server = bounded(serving, 0, workers=3)
    for rank in (0, 1):
        server.push(rank, 1, ONE)
        assert server.pull(rank, 1) == []
    assert sorted(said(server.push(2, 1, ONE))) == ["w0 PULL", "w1 PULL", "w2 PUSH"]


def test_the_slowest_worker_never_waits(serving: Serving) -> None:
    server = bounded(serving, 0)
    server.push(0, 1, ONE)
    server.push(0, 2, ONE)
    server.push(1, 1, ONE)
    assert said(server.pull(1, 1)) == ["w1 PULL"]
    assert said(server.pull(1, 0)) == ["w1 PULL"]


def test_keys_have_bounds_of_their_own(serving: Serving) -> None:
    server = bounded(serving, 0)
    server.push(0, 1, {"a": [1, 1]})
    server.push(1, 1, {"b": [1, 1]})
    assert server.pull(0, 1, "a") == []
    assert server.pull(1, 1, "b") == []
    assert sorted(said(server.push(1, 1, {"a": [1, 1]}))) == ["w0 PULL", "w1 PUSH"]


def test_who_is_too_far_behind_is_named(serving: Serving) -> None:
    server = bounded(serving, 2, workers=3)
    for number in (1, 2, 3):
        server.push(0, number, ONE)
        server.push(2, number, ONE)
    server.pull(0, 3)
    [note] = server.tick(10)
    assert (note.link, note.kind) == ("w0", Kind.WAITING)
    assert note.body["text"] == "waiting for worker-1, key a, push 1 (staleness 2; a worker that is done calls leave())"


@pytest.mark.parametrize("how", ["join", "leave", "bye"])
def test_a_bounded_pull_does_not_wait_for_a_worker_that_is_through(serving: Serving, how: str) -> None:
    server = bounded(serving, 0)
    server.push(0, 1, ONE)
    assert server.pull(0, 1) == []
    assert "w0 PULL" in said(getattr(server, how)(1))
    server.push(0, 2, ONE)
    assert values(server.pull(0, 2)) == {"a": [2, 2]}


def test_after_all_have_joined_they_count_from_where_the_farthest_was(serving: Serving) -> None:
    server = bounded(serving, 0)
    for number in (1, 2, 3):
        server.push(0, number, ONE)
    server.push(1, 1, ONE)
    server.join(1)
    server.join(0)
    server.join(1, is_last=True)
    assert server.rounds(1) == {"a": 3, "b": 0}
    assert said(server.pull(0, 3)) == ["w0 PULL"], "worker 1 counts as having made 3 pushes"
    server.push(1, 4, ONE)
    assert server.pull(1, 4) == []
    assert sorted(said(server.push(0, 4, ONE))) == ["w0 PUSH", "w1 PULL"]


def test_a_repeated_async_push_number_does_not_set_a_worker_back(serving: Serving) -> None:
    """Worker 1 has made 3 pushes; a late one of lower number leaves it there."""
    server = bounded(serving, 0)
    server.push(1, 3, ONE)
    server.push(1, 2, ONE)
    server.push(0, 3, ONE)
    assert said(server.pull(0, 3)) == ["w0 PULL"]


def test_a_loss_ends_the_wait_for_a_slower_worker(serving: Serving) -> None:
    server = bounded(serving, 0)
    server.push(0, 1, ONE)
    server.pull(0, 1)
    sent = server.lost("worker-1", "worker-1 is lost")
    assert (reason(sent), sent[0].body["error"]) == ("worker-1 is lost", "PeerLost")


def test_a_bounded_pull_does_not_wait_for_a_push_of_its_own_that_was_refused(serving: Serving) -> None:
    server = bounded(serving, 0)
    assert "no such piece" in reason(server.push(0, 1, {"a": [1, 1], "j": [1, 1]}))
    server.push(1, 1, ONE)
    assert values(server.pull(0, 1)) == {"a": [1, 1]}


# Counters


def test_a_server_counts_bytes_keys_rounds_and_who_waits(server: History) -> None:
    server.push(0, 1, ONE)
    server.push(1, 1, ONE)
    server.pull(0, 1)
    server.push(1, 2, ONE)
    server.pull(1, 2)
    found = server.stats()
    expected = {"server": "server-0", "host": "here", "keys": 2, "pieces": 2, "rounds": 1, "queue": 1, "updates": 1}
    assert {name: found[name] for name in expected} == expected
    assert found["bytes_in"] == 2 * 8 + 3 * 8, "two first values, three pushes"
    assert found["bytes_out"] == 8, "one pull is answered, one waits"


def test_stats_of_a_store_without_keys_here_are_empty(serving: Serving) -> None:
    found = serving().stats(store=9)
    assert (found["keys"], found["pieces"], found["rounds"], found["queue"]) == (0, 0, 0, 0)


def test_staleness_is_told_by_worker_with_mean_maximum_and_count(serving: Serving) -> None:
    """How many updates of others came between a worker's last pull and its push."""
    server = serving("dist_async")
    server.rule("sgd")
    server.pull(0, 0)
    server.pull(1, 0)
    for number in (1, 2):
        server.push(1, number, ONE)
    server.push(0, 1, ONE)
    server.pull(0, 1)
    server.push(0, 2, ONE)
    found = server.stats()["staleness"]
    assert found == {"0": {"mean": 1.0, "max": 2, "pushes": 2}, "1": {"mean": 0.5, "max": 1, "pushes": 2}}
    assert server.stats()["updates"] == 4


def test_keys_of_another_type_that_come_late_have_room_beside_what_is_still_read(serving: Serving) -> None:
    """The first key's buffers were doubled for a slow reader before the other key was there."""
    server = serving(workers=1)
    server.read_slowly()
    server.push(0, 1, {"a": [1, 1]})
    first = server.pull(0, 1)
    server.push(0, 2, {"a": [2, 2]})
    server.init({"c": [0, 0]}, dtype="float64")
    server.push(0, 1, {"c": [3, 3]})
    second = server.pull(0, 1, "c")
    server.push(0, 2, {"c": [4, 4]})
    assert values(first) == {"a": [1, 1]}
    assert values(second) == {"c": [3, 3]}
    assert values(server.pull(0, 2, "c")) == {"c": [4, 4]}


def test_a_push_that_asks_for_its_result_is_refused_where_there_are_no_rounds(serving: Serving) -> None:
    piece = Piece(0, round=1, payload=raw(np.ones(2, np.float32)))
    sent = serving("dist_async").hear("w0", data(Kind.PUSHPULL, [piece]))
    assert reason(sent) == "PUSHPULL is for synchronous stores"
