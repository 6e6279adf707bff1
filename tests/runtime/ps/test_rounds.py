"""What follows a push: codecs are read first, and updates that need norms wait for those of the other servers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rig import A, B, Rig, kinds, reason, works

from distrun_runtime.errors import KVError
from distrun_runtime.ops import rows as rowcodec
from distrun_runtime.protocol.message import Entry, Kind, Message, Payload
from distrun_runtime.ps import role, work

# Key `a` has two elements here and two on server 1; key `b` lies here alone.
SHAPES = {"0": [4], "1": [2]}


def lamb(rig: Rig) -> Rig:
    """Have the store's rule need norms: 3 and 5 are the sums of squares of each slot."""

    def value(what: Any) -> Any:
        if isinstance(what, work.SetRule):
            return True
        if isinstance(what, work.Apply):
            return (3.0, 5.0)
        return dict.fromkeys(what.slots, (3.0, 5.0)) if isinstance(what, work.Steps) else None

    rig.value = value
    rig.scheduler(Kind.RULE, 1, spec={"name": "lamb", "params": {}})
    rig.done.clear()
    return rig


def norms(rig: Rig, number: int, key: int = 0, rank: int = -1, **body: Any) -> list[tuple[str, Message]]:
    """Let NORMS of server 1 arrive."""
    parts = {"parts": [[2, 2, [10.0, 20.0]]]}
    facts = {"script": 0, "key": key, "rank": rank, "round": number, **(body or parts)}
    return rig.hear("s1", Message(Kind.NORMS, body=facts))


def push_round(rig: Rig, number: int, *keys: int) -> list[tuple[str, Message]]:
    return [*rig.push(0, number, *keys), *rig.push(1, number, *keys)]


# Norms in rounds


def test_a_value_that_lies_here_alone_needs_nobody() -> None:
    rig = lamb(Rig(servers=2, shapes=SHAPES))
    assert kinds(push_round(rig, 1, 1)) == [("w0", "PUSH"), ("w1", "PUSH")]
    assert works(rig) == ["add b1", "add b1", "apply b1", "finish b1"]
    assert kinds(rig.pull(0, 1, 1)) == [("w0", "PULL")]


def test_sums_of_squares_go_to_the_other_servers_and_theirs_finish_the_update() -> None:
    rig = lamb(Rig(servers=2, shapes=SHAPES))
    rig.push(0, 1)
    assert rig.pull(0, 1) == []
    sent = rig.push(1, 1)
    assert rig.called == ["server-1"]
    [(_, told)] = [each for each in sent if each[0] == "server-1"]
    assert (told.kind, told.store, told.request) == (Kind.NORMS, 1, 0)
    parts = [[0, 2, [3.0, 5.0]]]
    assert told.body == {"script": 0, "key": 0, "rank": -1, "round": 1, "parts": parts}
    assert works(rig) == ["add a1", "add a1", "apply a1"]
    assert kinds(norms(rig, 1)) == [("w0", "PULL")]
    [finish] = [what for what in rig.done if isinstance(what, work.Finish)]
    assert (finish.slot, finish.totals) == (A, (13.0, 25.0))


def test_the_others_may_be_first() -> None:
    rig = lamb(Rig(servers=2, shapes=SHAPES))
    assert norms(rig, 1) == []
    push_round(rig, 1)
    assert works(rig)[-2:] == ["apply a1", "finish a1"]


def test_the_next_round_begins_when_this_one_is_finished() -> None:
    rig = lamb(Rig(servers=2, shapes=SHAPES))
    push_round(rig, 1)
    push_round(rig, 2)
    assert works(rig)[-3:] == ["apply a1", "add a2", "add a2"]
    sent = norms(rig, 1)
    assert works(rig) == ["finish a1", "apply a2"]
    assert [message.body["round"] for _, message in sent] == [2]
    norms(rig, 2)
    assert works(rig) == ["finish a2"]


def test_rounds_go_on_after_another_rule_came_in_the_middle() -> None:
    rig = lamb(Rig(servers=2, shapes=SHAPES))
    push_round(rig, 1)
    push_round(rig, 2)
    rig.value = lambda what: None
    rig.scheduler(Kind.RULE, 2, spec={"name": "sgd", "params": {}})
    works(rig)
    norms(rig, 1)
    assert works(rig) == ["finish a1", "apply a2"]


def test_a_pull_that_waits_for_norms_is_told_so_and_a_worker_that_ended_is_not_blamed() -> None:
    rig = lamb(Rig(servers=2, shapes=SHAPES))
    push_round(rig, 1)
    rig.pull(0, 1)
    assert rig.scheduler(Kind.LEFT, rank=1, who="worker-1") == []
    [(_, message)] = rig.perform(rig.server.tick(10))
    assert message.body["text"] == "waiting for the other servers' norms, key a, round 1"
    assert kinds(norms(rig, 1)) == [("w0", "PULL")]


def test_a_rule_that_fails_on_one_server_fails_the_round_on_all() -> None:
    rig = lamb(Rig(servers=2, shapes=SHAPES))
    rig.push(0, 1)
    rig.error = ZeroDivisionError("by zero")
    sent = rig.push(1, 1)
    [(_, told)] = [each for each in sent if each[0] == "server-1"]
    assert told.body["error"] == "the rule failed on server-0 for key 'a': by zero"
    assert told.body["traceback"] == "Traceback of the server"
    assert kinds(rig.pull(0, 1)) == [("w0", "PULL!")]
    # And the other way round.
    push_round(rig, 2)
    rig.pull(1, 2)
    sent = norms(rig, 2, error="the rule failed on server-1", traceback="Traceback of server 1")
    [(link, message)] = sent
    assert (link, message.body["error"], message.body["reason"]) == ("w1", "RuleError", "the rule failed on server-1")
    assert message.body["traceback"] == "Traceback of server 1"
    assert isinstance(rig.done[-2], work.Drop)
    push_round(rig, 3)
    norms(rig, 3)
    assert kinds(rig.pull(1, 3)) == [("w1", "PULL")], "the next round is another matter"
    assert reason(rig.pull(0, 3)) == "the rule failed on server-1", "it did not ask for round 2"


def test_a_failure_that_is_heard_before_the_own_part_is_ready_counts() -> None:
    rig = lamb(Rig(servers=2, shapes=SHAPES))
    norms(rig, 1, error="the rule failed on server-1")
    push_round(rig, 1)
    assert reason(rig.pull(0, 1)) == "the rule failed on server-1"


def test_a_second_half_that_fails_is_the_rounds_failure() -> None:
    rig = lamb(Rig(servers=2, shapes=SHAPES))
    push_round(rig, 1)
    rig.error = ValueError("broken")
    norms(rig, 1)
    assert reason(rig.pull(0, 1)) == "the rule failed on server-0 for key 'a': broken"


def test_a_server_that_had_another_rule_for_that_round_says_so() -> None:
    """The rule was changed while pushes were under way; nobody waits for ever."""
    rig = Rig(servers=2, shapes=SHAPES)
    push_round(rig, 1)
    text = "the rule was changed while push 1 of key 'a' was under way: server-0 applied it with another one"
    [(link, message)] = norms(rig, 1)
    assert (link, message.body["error"]) == ("server-1", text)
    norms(rig, 2)
    sent = push_round(rig, 2)
    assert [message.body["error"] for link, message in sent if link == "server-1"] == [text.replace("push 1", "push 2")]


def test_a_lost_connection_to_a_server_fails_what_waits_for_it() -> None:
    rig = lamb(Rig(servers=2, shapes=SHAPES))
    push_round(rig, 1)
    rig.pull(0, 1)
    sent = rig.perform(rig.server.handle(role.Broken("server-1", "its connection closed"), 1))
    assert reason(sent) == "server-0 lost its connection to server-1: its connection closed"
    rig.called.clear()
    push_round(rig, 2)
    assert rig.called == ["server-1"], "it is called again"


@pytest.mark.parametrize("is_over", ["lost", "stay"])
def test_a_loss_or_a_new_script_forgets_what_waits_for_norms(is_over: str) -> None:
    rig = lamb(Rig(servers=2, shapes=SHAPES))
    push_round(rig, 1)
    rig.pull(0, 1)
    if is_over == "lost":
        assert reason(rig.scheduler(Kind.LOST, who="server-1", reason="server-1 is lost")) == "server-1 is lost"
    else:
        rig.scheduler(Kind.STOP, 9, stay=True)
        rig.init()
        assert norms(rig, 1) == [], "those of the last script are none of this one"
    assert not rig.server._rounds._norms


def test_norms_need_the_shape_of_the_value() -> None:
    rig = lamb(Rig(servers=2))
    push_round(rig, 1)
    assert "the shape of key 'a' is not known to server-0" in reason(rig.pull(0, 1))


# Norms in async


def test_an_async_push_is_acknowledged_before_its_norms_are_known_and_a_pull_waits_for_them() -> None:
    rig = lamb(Rig("dist_async", servers=2, shapes=SHAPES))
    assert kinds(rig.push(0, 1)) == [("w0", "PUSH"), ("server-1", "NORMS")]
    assert rig.pull(0, 1) == []
    [(_, message)] = rig.perform(rig.server.tick(10))
    assert message.body["text"] == "waiting for the other servers' norms, key a, push 1 of worker-0"
    assert kinds(norms(rig, 1, rank=0)) == [("w0", "PULL")]


def test_async_turns_are_of_each_worker_and_may_overtake() -> None:
    rig = lamb(Rig("dist_async", servers=2, shapes=SHAPES))
    rig.push(0, 1)
    rig.push(1, 1)
    rig.push(1, 2)
    works(rig)
    norms(rig, 1, rank=1)
    norms(rig, 1, rank=0)
    assert works(rig) == ["finish a1", "finish a1"]
    assert rig.pull(0, 1) == [], "it came after worker 1's second push"
    assert kinds(norms(rig, 2, rank=1)) == [("w0", "PULL")]


def test_an_async_failure_after_the_acknowledgement_is_the_pushers_next_pull_once() -> None:
    rig = lamb(Rig("dist_async", servers=2, shapes=SHAPES))
    rig.push(0, 1)
    norms(rig, 1, rank=0, error="the rule failed on server-1")
    assert kinds(rig.pull(1, 0)) == [("w1", "PULL")], "it is not worker 1's affair"
    assert reason(rig.pull(0, 1)) == "the rule failed on server-1"
    assert kinds(rig.pull(0, 1)) == [("w0", "PULL")]


# Codecs and rows


def test_a_compressed_push_is_added_by_its_codec() -> None:
    rig = Rig()
    entry = Entry(0, 0, 2, 1, codec=1, payload=Payload.FRAME)
    body = {"codec": {"threshold": 0.25}, "scale": 2.0}
    push = Message(Kind.PUSH, entries=(entry,), body=body, payloads=[bytes(4)])
    assert kinds(rig.hear("w0", push)) == [("w0", "PUSH")]
    [add] = rig.done
    assert add.how == work.How(1, {"threshold": 0.25}, 2.0)


def test_rows_are_read_before_anything_is_counted() -> None:
    rig = Rig(rows={"0": 1})
    entries = (Entry(1, 0, 2, 1, payload=Payload.FRAME), Entry(0, 0, 2, 1, codec=16, payload=Payload.FRAME))
    payload = rowcodec.encode(np.array([5]), np.zeros((1, 1), np.float32))
    push = Message(Kind.PUSH, entries=entries, payloads=[bytes(8), payload])
    rig.error = KVError("key 'a' of shape (2, 1): row 5")
    assert reason(rig.hear("w0", push)) == "key 'a' of shape (2, 1): row 5"
    assert works(rig) == ["check"]
    assert rig.push(0, 1, 1) != []
    assert works(rig) == ["add b1"], "the refused one left no contribution behind"


def test_rows_that_are_right_go_on_to_their_round() -> None:
    rig = Rig(rows={"0": 1})
    payload = rowcodec.encode(np.array([], np.int64), np.zeros((0, 1), np.float32))
    for link in ("w0", "w1"):
        entry = Entry(0, 0, 2, 1, codec=16, payload=Payload.FRAME)
        assert kinds(rig.hear(link, Message(Kind.PUSH, entries=(entry,), payloads=[payload]))) == [(link, "PUSH")]
    assert works(rig) == ["check", "add a1", "check", "add a1", "apply a1"]


# Counters


def test_updates_and_staleness_are_counted() -> None:
    rig = Rig("dist_async")
    rig.scheduler(Kind.RULE, 1, spec={"name": "sgd", "params": {}})
    rig.push(0, 1)
    rig.push(0, 2)
    rig.push(1, 1)
    rig.pull(1, 1)
    rig.push(1, 2)
    counters = rig.server._counters
    assert counters.updates == 4
    assert {rank: (each.pushes, each.max) for rank, each in counters.staleness.items()} == {0: (2, 1), 1: (2, 2)}


def test_slots_of_one_key_are_finished_together() -> None:
    rig = lamb(Rig(servers=2, shapes={**SHAPES, "2": [4]}))
    entries = tuple(Entry(2, offset, 2, payload=Payload.FRAME) for offset in (2, 0))
    rig.facts["shapes"]["2"] = [4]
    rig.hear("w0", Message(Kind.INIT, body={"shapes": {"2": [4]}}, entries=entries, payloads=[bytes(8)] * 2))
    works(rig)
    for rank in (0, 1):
        for offset in (0, 2):
            rig.push(rank, 1, 2, offset=offset)
    turns = [what for what in rig.done if isinstance(what, work.Finish)]
    assert [(what.slot.offset, what.totals) for what in turns] == [(0, (6.0, 10.0)), (2, (6.0, 10.0))]
    assert turns[0].slot != B


def test_failures_of_rounds_that_nobody_can_ask_for_any_more_are_forgotten() -> None:
    rig = Rig()
    for number in range(1, 6):
        rig.error = None
        rig.push(0, number)
        rig.error = ValueError("broken")
        rig.push(1, number)
    assert sorted(rig.server._stores[1].slots[A].failed) == [4, 5]
    assert kinds(rig.pull(0, 5)) == [("w0", "PULL!")]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_push_that_is_refused_here_is_not_waited_for_by_the_server_that_took_its_piece(is_first: bool) -> None:
    """A worker pushed while another one's first rule was on its way: server 1 had the rule, this one had not."""
    rig = Rig("dist_async", servers=2, shapes=SHAPES)
    if is_first:
        assert norms(rig, 1, rank=0) == []
    sent = rig.push(0, 1)
    assert kinds(sent)[0] == ("w0", "PUSH!")
    told = sent[1:] if is_first else norms(rig, 1, rank=0)
    [(link, message)] = told
    assert (link, message.body["rank"], message.body["round"]) == ("server-1", 0, 1)
    assert message.body["error"]
    assert not rig.server._rounds._norms
