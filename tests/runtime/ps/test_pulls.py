"""Pulls that wait for slower workers of an asynchronous store, and pulls that get less than the whole."""

from __future__ import annotations

import numpy as np
import pytest
from rig import Rig, kinds, reason

from distrun_runtime.errors import KVError
from distrun_runtime.ops import rows as rowcodec
from distrun_runtime.protocol.message import Entry, Kind, Message, Payload
from distrun_runtime.ps import role, work
from distrun_runtime.ps.slots import Store


def bounded(staleness: int, workers: int = 2) -> Rig:
    rig = Rig("dist_async", workers=workers, staleness=staleness)
    rig.scheduler(Kind.RULE, 1, spec={"name": "sgd", "params": {}})
    return rig


# Bounded staleness


def test_a_pull_waits_until_no_worker_is_more_than_the_bound_behind() -> None:
    rig = bounded(1)
    rig.push(0, 1)
    assert kinds(rig.pull(0, 1)) == [("w0", "PULL")]
    rig.push(0, 2)
    assert rig.pull(0, 2) == []
    assert kinds(rig.push(1, 1)) == [("w1", "PUSH"), ("w0", "PULL")]


def test_with_a_bound_of_0_all_workers_keep_step() -> None:
    rig = bounded(0, workers=3)
    for rank in (0, 1):
        rig.push(rank, 1)
        assert rig.pull(rank, 1) == []
    assert kinds(rig.push(2, 1)) == [("w2", "PUSH"), ("w0", "PULL"), ("w1", "PULL")]


def test_the_slowest_worker_never_waits() -> None:
    rig = bounded(0)
    rig.push(0, 1)
    rig.push(0, 2)
    rig.push(1, 1)
    assert kinds(rig.pull(1, 1)) == [("w1", "PULL")]
    assert kinds(rig.pull(1, 0)) == [("w1", "PULL")]


def test_keys_have_clocks_of_their_own() -> None:
    rig = bounded(0)
    rig.push(0, 1, 0)
    rig.push(1, 1, 1)
    assert rig.pull(0, 1, 0) == []
    assert kinds(rig.pull(1, 1, 1)) == []
    assert kinds(rig.push(1, 1, 0)) == [("w1", "PUSH"), ("w0", "PULL")]


def test_who_is_slow_is_named() -> None:
    rig = bounded(2, workers=3)
    for number in (1, 2, 3):
        rig.push(0, number)
        rig.push(2, number)
    rig.pull(0, 3)
    [(link, message)] = rig.perform(rig.server.tick(10))
    assert (link, message.kind) == ("w0", Kind.WAITING)
    assert message.body["text"] == "waiting for worker-1, key a, push 1 (staleness 2)"


@pytest.mark.parametrize("how", ["join", "leave", "bye"])
def test_a_worker_that_is_through_is_not_waited_for(how: str) -> None:
    rig = bounded(0)
    rig.push(0, 1)
    assert rig.pull(0, 1) == []
    if how == "join":
        sent = rig.scheduler(Kind.JOIN, 3, rank=1)
    elif how == "leave":
        sent = rig.scheduler(Kind.LEFT, 3, rank=1)
    else:
        sent = rig.scheduler(Kind.LEFT, rank=1, who="worker-1")
    assert ("w0", "PULL") in kinds(sent)
    rig.push(0, 2)
    assert kinds(rig.pull(0, 2)) == [("w0", "PULL")]


def test_after_all_have_joined_they_count_from_where_the_farthest_was() -> None:
    rig = bounded(0)
    for number in (1, 2, 3):
        rig.push(0, number)
    rig.push(1, 1)
    rig.scheduler(Kind.JOIN, 3, rank=1)
    rig.scheduler(Kind.JOIN, 4, rank=0)
    rig.scheduler(Kind.JOIN, 5, rank=1, all=True)
    [(_, message)] = rig.hear("w1", Message(Kind.ROUNDS))
    assert message.body == {"rounds": [(0, 3), (1, 0)]}
    rig.push(1, 4)
    assert rig.pull(1, 4) == []
    assert kinds(rig.push(0, 4)) == [("w0", "PUSH"), ("w1", "PULL")]


def test_a_loss_ends_the_wait() -> None:
    rig = bounded(0)
    rig.push(0, 1)
    rig.pull(0, 1)
    sent = rig.scheduler(Kind.LOST, who="worker-1", reason="worker-1 is lost")
    assert (reason(sent), sent[0][1].body["error"]) == ("worker-1 is lost", "PeerLost")


def test_a_push_whose_update_fails_counts_as_made() -> None:
    """Or the others would wait for it for ever."""
    rig = bounded(0)
    rig.push(0, 1)
    rig.pull(0, 1)
    rig.error = ValueError("broken")
    assert kinds(rig.push(1, 1)) == [("w1", "PUSH!"), ("w0", "PULL")]


# Rows and codecs


def pull_rows(rig: Rig, *rows: int, turn: int = 0) -> list[tuple[str, Message]]:
    entry = Entry(0, 0, 2, turn, codec=16, payload=Payload.FRAME)
    payload = rowcodec.encode_rows(np.array(rows, np.int64))
    return rig.hear("w0", Message(Kind.PULL, entries=(entry,), payloads=[payload]))


def test_rows_are_read_first_and_lent_when_their_round_is_applied() -> None:
    rig = Rig(rows={"0": 1})
    rig.push(0, 1)
    assert pull_rows(rig, 1, turn=1) == []
    assert kinds(rig.push(1, 1)) == [("w0", "PULL"), ("w1", "PUSH")]
    [lend] = [what for what in rig.done if isinstance(what, work.Lend)]
    assert lend.how.codec == 16
    assert rowcodec.decode_rows(lend.rows, 2).tolist() == [1]


def test_rows_out_of_range_are_refused_and_nothing_waits() -> None:
    rig = Rig(rows={"0": 1})
    rig.push(0, 1)
    rig.error = KVError("key 'a' of shape (2, 1): rows 0 to 1, found [7]")
    assert "found [7]" in reason(pull_rows(rig, 7, turn=1))
    assert kinds(rig.push(1, 1)) == [("w1", "PUSH")]


def test_the_first_value_is_answered_in_full_and_a_round_by_the_codec() -> None:
    rig = Rig()
    assert lent_codec(rig, 0) == 0
    for rank in (0, 1):
        rig.push(rank, 1)
    assert lent_codec(rig, 1) == 1
    entry = Entry(0, 0, 2, payload=Payload.FRAME)
    rig.hear("w0", Message(Kind.INIT, body={"assign": True}, entries=(entry,), payloads=[bytes(8)]))
    assert lent_codec(rig, 1) == 0


def lent_codec(rig: Rig, turn: int) -> int:
    rig.done.clear()
    rig.hear("w0", Message(Kind.PULL, entries=(Entry(0, 0, 2, turn, codec=1),)))
    [lend] = [what for what in rig.done if isinstance(what, work.Lend)]
    return int(lend.how.codec)


def test_a_pull_of_several_keys_fails_once() -> None:
    """Async, with norms: both pieces are late."""
    rig = Rig("dist_async", servers=2, shapes={"0": [4], "1": [4]})
    rig.value = lambda what: True if isinstance(what, work.SetRule) else dict.fromkeys(what.slots, (1.0,))
    rig.scheduler(Kind.RULE, 1, spec={"name": "lars", "params": {}})
    rig.push(0, 1, 0, 1)
    rig.pull(0, 1, 0, 1)
    sent = rig.perform(rig.server.handle(role.Broken("server-1", "gone"), 1))
    assert kinds(sent) == [("w0", "PULL!")]


# A worker whose own push was refused


def test_a_worker_never_waits_for_a_push_of_its_own_that_was_refused() -> None:
    rig = Rig()
    rig.push(1, 1, 0, 1)
    assert "no such piece" in reason(rig.push(0, 1, 0, 9))
    assert reason(rig.pull(0, 1)) == "round 1 of key 'a' cannot come: this worker's own push of it was refused"
    assert kinds(rig.pull(0, 0)) == [("w0", "PULL")]
    rig.push(0, 1, 1)
    assert kinds(rig.pull(0, 1, 1)) == [("w0", "PULL")]


def test_nor_does_it_in_async_with_a_bound() -> None:
    rig = bounded(0)
    assert "no such piece" in reason(rig.push(0, 1, 0, 9))
    rig.push(1, 1)
    assert kinds(rig.pull(0, 1)) == [("w0", "PULL")]


# Many of them


def test_a_pull_that_comes_is_judged_alone_even_when_a_worker_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that goes on without a worker has thousands of pulls waiting: each looks at itself only."""
    rig = Rig(workers=3)
    rig.scheduler(Kind.LEFT, 5, rank=2)
    rig.scheduler(Kind.LEFT, rank=2, who="worker-2")
    rig.push(0, 1)
    seen: list[object] = []
    missing = Store.missing
    monkeypatch.setattr(Store, "missing", lambda *args: (seen.append(args), missing(*args))[1])
    for _ in range(20):
        assert rig.pull(0, 1) == []
    assert len(seen) == 20
    assert len(kinds(rig.push(1, 1))) == 21
