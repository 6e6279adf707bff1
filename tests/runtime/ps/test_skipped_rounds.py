"""Rounds that a worker skips, on a server: nothing is updated, and every pull of the round says who skipped it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rig import VALUE, Live, Rig, kinds, reason, works

from distrun_runtime.protocol.message import Entry, Kind, Message, Payload


def skip(rig: Rig, rank: int, number: int, *keys: int, note: Any = None, **changes: Any) -> list[tuple[str, Message]]:
    """Let the PUSH of a worker arrive that skips a round."""
    entries = tuple(Entry(**{"key": key, "offset": 0, "length": 2, "round": number, **changes}) for key in keys or (0,))
    body = {"skip": {"why": rank} if note is None else note}
    payloads = [VALUE for entry in entries if entry.payload is Payload.FRAME]
    return rig.hear("w%d" % rank, Message(Kind.PUSH, entries=entries, body=body, payloads=payloads))


def test_a_skipped_round_is_over_when_all_have_come_and_changes_nothing() -> None:
    rig = Live()
    rig.push(0, 1)
    assert kinds(skip(rig, 1, 1)) == [("w1", "PUSH")]
    [(_, reply)] = rig.pull(0, 1)
    assert reply.body == {"skipped": {"0": {"0": None, "1": {"why": 1}}}}
    assert bytes(reply.payloads[0]) == VALUE
    assert not rig.executor.shelves[(1, 0, 0)].sums, "the sum of a skipped round stayed"


def test_a_pull_waits_for_the_others_in_a_skipped_round_too() -> None:
    rig = Live()
    skip(rig, 0, 1, 0, 1)
    assert rig.pull(0, 1, 0, 1) == []
    rig.push(1, 1, 0)
    [(link, reply), _] = skip(rig, 1, 1, 1, note={})
    assert link == "w0"
    assert reply.body["skipped"] == {"0": {"0": {"why": 0}, "1": None}, "1": {"0": {"why": 0}, "1": {}}}


def test_the_next_round_is_an_ordinary_one() -> None:
    rig = Live()
    skip(rig, 0, 1)
    skip(rig, 1, 1)
    one = np.ones(2, np.float32).tobytes()
    for rank in range(2):
        entry = Entry(0, 0, 2, 2, payload=Payload.FRAME)
        rig.hear("w%d" % rank, Message(Kind.PUSH, entries=(entry,), payloads=[one]))
    [(_, reply)] = rig.pull(1, 2)
    assert reply.body == {}
    assert np.frombuffer(reply.payloads[0], np.float32).tolist() == [2, 2]


def test_who_has_joined_is_not_among_the_workers_of_a_skipped_round() -> None:
    rig = Live()
    rig.scheduler(Kind.JOIN, 1, rank=1)
    skip(rig, 0, 1)
    [(_, reply)] = rig.pull(0, 1)
    assert reply.body["skipped"] == {"0": {"0": {"why": 0}}}


def test_rules_with_norms_do_not_wait_for_those_of_a_skipped_round() -> None:
    rig = Live(servers=2, shapes={"0": [4], "1": [2]})
    rig.scheduler(Kind.RULE, 1, spec={"name": "lamb", "params": {}})
    rig.push(0, 1)
    skip(rig, 1, 1)
    assert kinds(rig.pull(0, 1)) == [("w0", "PULL")]


def test_a_repeat_counts_once_and_the_first_one_counts() -> None:
    rig = Rig()
    skip(rig, 0, 1)
    assert kinds(rig.push(0, 1)) == [("w0", "PUSH")]
    rig.push(1, 1)
    assert works(rig) == ["add a1", "apply a1"]
    assert kinds(rig.pull(0, 1)) == [("w0", "PULL")]


def test_counters_and_saved_rounds_are_those_of_updates() -> None:
    """Schedules count these: a skipped round is no step."""
    rig = Live()
    for number in (1, 2, 3):
        rig.push(0, number)
        skip(rig, 1, number) if number == 2 else rig.push(1, number)
    [(_, reply)] = rig.hear("w0", Message(Kind.STATS))
    assert (reply.body["rounds"], reply.body["updates"]) == (2, 2)
    store = rig.server._stores[1]
    assert (store.rounds(), store.updates()) == ([(0, 3), (1, 0)], [(0, 2), (1, 0)])
    assert list(store.slots[(1, 0, 0)].skipped) == [2], "what can still be pulled, and no more"
    rig.push(0, 4)
    rig.push(1, 4)
    assert not store.slots[(1, 0, 0)].skipped


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"note": "text"}, "a skipped round has a note that is an object, not 'text'"),
        ({"note": [1]}, "a skipped round has a note that is an object, not [1]"),
        ({"payload": Payload.FRAME}, "key 'a': a skipped round brings no value"),
        ({"codec": 1}, "key 'a': a skipped round brings no value"),
        ({"length": 3}, "key 'a': server-0 has 2 elements of float32, the message 3 of float32"),
        ({"key": 7}, "key 7, offset 0: no such piece on server-0"),
    ],
)
def test_what_skips_no_round_is_refused_and_changes_nothing(changes: dict[str, Any], words: str) -> None:
    rig = Rig()
    assert reason(skip(rig, 0, 1, **changes)) == words
    rig.push(0, 1)
    rig.push(1, 1)
    assert works(rig) == ["add a1", "add a1", "apply a1"]


def test_without_rounds_none_can_be_skipped() -> None:
    rig = Rig("dist_async")
    rig.scheduler(Kind.RULE, 1, spec={"name": "sgd", "params": {}})
    assert reason(skip(rig, 0, 1)) == "a round cannot be skipped in a dist_async store: it has no rounds"
