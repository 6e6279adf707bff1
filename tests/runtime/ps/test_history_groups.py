"""What scheduler and server decide about stores that some of the workers share, by scripted histories."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cluster
import pytest
from gated_rules import Gate
from history_server import SCHEDULER, History, Piece, data, reason, said, values
from schedulerhistory import Job, finish, init, reasons, record, sends, spec, to
from slowness import scaled

from distrun_runtime.protocol.message import Entry, Kind, Message, Payload, entries_of
from distrun_runtime.ps import agreement, role, statefile
from distrun_runtime.ps.engine import WorkEngine
from distrun_runtime.ps.relay import _Settling
from distrun_runtime.ps.replies import refusal

Serving = Callable[..., History]

STORE = 65535
DIFFER = "group 'g' has the members %s for worker-0 and %s for %s; fix: all of its workers give the same list"
"""The first store of a group has this number."""


@pytest.fixture
def job() -> Job:
    """A scheduler to whom four workers and a server have come."""
    return Job(4)


# The scheduler


def create(job: Job, rank: int, members: list[int], name: str = "g", number: int = 1, **body: Any) -> list[role.Action]:
    """Let a worker create the `number`-th store of a group."""
    facts = {"type": "dist_sync", "group": name, "members": members, **body}
    return job.hear("w%d" % rank, Kind.OPEN, store=number, number=1, **facts)


def opened(job: Job, *members: int, name: str = "g", number: int = 1) -> int:
    """Let all members create a store of a group; return its number."""
    for rank in members:
        actions = create(job, rank, list(members), name, number)
    told = sends(job.settle(actions))
    assert [link for link, _ in told] == ["w%d" % rank for rank in members]
    return int(told[0][1].body["store"])


def test_servers_hear_who_shares_a_store_before_its_workers_hear_its_number() -> None:
    job = Job(4, 2)
    assert create(job, 2, [0, 2]) == []
    actions = create(job, 0, [0, 2])
    assert to(actions) == [("s0", "OPEN"), ("s1", "OPEN")]
    assert {(sent.store, str(sent.body)) for _, sent in sends(actions)} == {(STORE, "{'members': [0, 2], 'epoch': 0}")}
    told = job.answer(actions)
    assert [(link, sent.kind, dict(sent.body)) for link, sent in sends(told)] == [
        ("w2", Kind.OPEN, {"store": STORE, "epoch": 0}),
        ("w0", Kind.OPEN, {"store": STORE, "epoch": 0}),
    ]


def test_a_job_that_has_used_up_the_numbers_of_stores_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "LAST_STORE", agreement.GROUP_STORES)
    job = Job(2)
    assert opened(job, 0, 1) == agreement.GROUP_STORES
    text = reasons(create(job, 0, [0, 1], "h"))["w0"]
    assert text.startswith("this job has no number left for a store of group 'h'; fix: close stores")
    assert "about no store" in reasons(job.hear("w0", Kind.OPEN, number=1, group="h", take_back=True))["w0"]
    for rank in (0, 1):
        actions = job.hear("w%d" % rank, Kind.CLOSE, store=agreement.GROUP_STORES)
    assert "no number left" in reasons(create(job, 0, [0, 1], "h"))["w0"], "the servers may still have values there"
    job.answer(actions)
    assert opened(job, 0, 1, name="h") == agreement.GROUP_STORES


def test_stores_are_numbered_by_group_and_every_one_has_a_number_of_its_own_in_messages(job: Job) -> None:
    numbers = [
        opened(job, 0, 2),
        opened(job, 1, 3, name="h"),
        opened(job, 0, 2, number=2),
        opened(job, 3, name="alone"),
    ]
    assert numbers == [STORE, STORE - 1, STORE - 2, STORE - 3]


def test_members_that_differ_are_an_error_with_both_lists_also_for_whom_only_one_of_them_names(job: Job) -> None:
    create(job, 0, [0, 2])
    actions = create(job, 2, [1, 2])
    text = DIFFER % ("[0, 2]", "[1, 2]", "worker-2")
    assert reasons(actions) == {"w0": text, "w2": text}
    # They agree in a second try, and worker 1 hears why its first failed.
    create(job, 0, [0, 2], number=2)
    assert reasons(create(job, 1, [1, 2])) == {"w1": text}
    assert to(job.settle(create(job, 2, [0, 2], number=2))) == [("w0", "OPEN"), ("w2", "OPEN")]


def test_a_group_keeps_its_members_and_another_list_harms_nobody_but_its_sender(job: Job) -> None:
    opened(job, 0, 2)
    create(job, 0, [0, 2], number=2)
    text = DIFFER % ("[0, 2]", "[1, 3]", "worker-1")
    assert reasons(create(job, 1, [1, 3])) == {"w1": text}
    assert reasons(create(job, 3, [1, 3], number=2)) == {"w3": text.replace("worker-1", "worker-3")}
    assert to(job.settle(create(job, 2, [0, 2], number=2))) == [("w0", "OPEN"), ("w2", "OPEN")]


def test_a_store_that_the_servers_have_not_heard_of_yet_keeps_its_members(job: Job) -> None:
    create(job, 0, [0, 1])
    actions = create(job, 1, [0, 1])
    text = DIFFER % ("[0, 1]", "[2, 3]", "worker-2")
    assert reasons(create(job, 2, [2, 3])) == {"w2": text}
    assert reasons(create(job, 3, [2, 3])) == {"w3": text.replace("worker-2", "worker-3")}
    assert to(job.settle(actions)) == [("w0", "OPEN"), ("w1", "OPEN")]
    assert job.hear("w1", Kind.BARRIER, store=STORE, number=2) == []
    assert to(job.hear("w0", Kind.BARRIER, store=STORE, number=2)) == [("w1", "BARRIER"), ("w0", "BARRIER")]


def test_workers_that_create_other_kinds_in_a_group_are_told_of_the_group(job: Job) -> None:
    create(job, 0, [0, 2])
    actions = create(job, 2, [0, 2], type="dist_async", staleness=3)
    text = (
        "worker-0 creates a 'dist_sync' store of group 'g' where worker-2 creates a 'dist_async' store of group 'g'"
        " with staleness=3"
    )
    assert reasons(actions) == {"w0": text, "w2": text}


@pytest.mark.parametrize("members", [[2, 0], [0, 0], [1, 2], [0, 4], [-1, 0], []])
def test_members_that_no_worker_of_ours_would_name_are_refused_and_count_as_no_call(
    job: Job, members: list[int]
) -> None:
    text = "members are ranks of this job in ascending order, the sender among them"
    assert (text if 0 in members else "does not share this store") in reasons(create(job, 0, members))["w0"]
    assert opened(job, 0, 2) == STORE


def test_a_create_that_was_taken_back_may_be_made_again_with_other_members(job: Job) -> None:
    create(job, 0, [0, 2])
    actions = job.hear("w0", Kind.OPEN, store=1, number=1, group="g", take_back=True)
    assert [dict(sent.body).get("is_taken") for _, sent in sends(actions)] == [None, True]
    assert opened(job, 0, 1) == STORE - 1


def test_a_worker_that_creates_a_store_of_a_group_again_uses_the_one_in_which_the_others_wait(job: Job) -> None:
    number = opened(job, 0, 2)
    job.hear("w0", Kind.BARRIER, store=number, number=2)
    actions = create(job, 2, [0, 2], number=2, unused=[number])
    assert [(link, dict(sent.body)) for link, sent in sends(actions)] == [("w2", {"instead": number})]


def test_collective_calls_are_those_of_the_members_and_the_first_of_them_brings_the_values(job: Job) -> None:
    number = opened(job, 1, 3)
    job.hear("w3", Kind.KEYS, store=number, number=2, records=[record("w")])
    actions = job.hear("w1", Kind.KEYS, store=number, number=2, records=[record("w")])
    assert to(actions) == [("w1", "KEYS")]
    assert to(job.hear("w1", Kind.INIT, store=number, number=2)) == [("w1", "INIT"), ("w3", "KEYS")]
    job.hear("w1", Kind.BARRIER, store=number, number=3)
    assert job.scheduler.counters()["barrier_waiting"] == 1
    job.tick(0)
    notes = [dict(sent.body) for _, sent in sends(job.tick(2.5))]
    assert [(note["text"], note["for"]) for note in notes] == [
        ("waiting for worker-3 to call barrier in group 'g'", ["worker-3"])
    ]
    assert to(job.hear("w3", Kind.BARRIER, store=number, number=3)) == [("w1", "BARRIER"), ("w3", "BARRIER")]
    job.hear("w1", Kind.JOIN, store=number, number=4)
    assert ("w1", "JOIN") in to(job.settle(job.hear("w3", Kind.JOIN, store=number, number=4)))


def test_the_first_member_has_duties_which_others_cannot_do_when_it_has_left(job: Job) -> None:
    number = opened(job, 1, 2, 3)
    job.settle(job.hear("w1", Kind.LEFT, store=number))
    job.hear("w2", Kind.SAVE, store=number, number=2, folder="/f")
    told = reasons(job.hear("w3", Kind.SAVE, store=number, number=2, folder="/f"))
    assert told == dict.fromkeys(["w2", "w3"], "worker-1, who writes the manifest, has left the store")


def test_who_does_not_share_a_store_is_told_so_whatever_it_asks(job: Job) -> None:
    number = opened(job, 0, 2)
    text = (
        "worker-1 does not share this store of group 'g'; its members are worker-0, worker-2; fix: let only these call"
        " it"
    )
    for kind in (Kind.BARRIER, Kind.RULE, Kind.JOIN, Kind.LEFT, Kind.CLOSE):
        assert reasons(job.hear("w1", kind, store=number, number=2, spec=spec())) == {"w1": text}


def test_a_worker_that_ends_is_missed_in_its_own_groups_only(job: Job) -> None:
    mine, other = opened(job, 0, 1), opened(job, 2, 3, name="h")
    job.hear("w0", Kind.BARRIER, store=mine, number=2)
    job.hear("w2", Kind.BARRIER, store=other, number=2)
    actions = job.hear("w1", Kind.BYE)
    text = "worker-1@d1 (pid 1) has ended (BYE) and will never call barrier: all workers must"
    assert reasons(actions) == {"w0": text}
    assert to(job.hear("w3", Kind.BARRIER, store=other, number=2)) == [("w2", "BARRIER"), ("w3", "BARRIER")]
    assert reasons(create(job, 0, [0, 1], number=2)) == {"w0": text.replace("barrier", "create(group='g')")}


def test_a_store_is_forgotten_when_its_members_have_closed_it_and_its_group_goes_on(job: Job) -> None:
    number = opened(job, 0, 2)
    job.hear("w0", Kind.CLOSE, store=number)
    actions = job.hear("w2", Kind.CLOSE, store=number)
    assert to(actions) == [("w2", "CLOSE"), ("s0", "CLOSE")]
    assert opened(job, 0, 2, number=2) == STORE - 1
    assert "has the members [0, 2]" in reasons(create(job, 0, [0, 3], number=3))["w0"]


def test_a_lost_worker_ends_the_calls_of_its_own_groups_and_of_all_workers(job: Job) -> None:
    mine, other = opened(job, 0, 1), opened(job, 2, 3, name="h")
    init(job, 2, "w")
    actions = job.scheduler.handle(role.Broken("w1", "its connection closed"), 1)
    assert to(actions) == [("s0", "LOST"), ("w0", "LOST"), ("w2", "LOST"), ("w3", "LOST")]
    text = "worker-1@d1 (pid 1) is lost: its connection closed"
    assert reasons(job.hear("w0", Kind.BARRIER, store=mine, number=2)) == {"w0": text}
    assert reasons(job.hear("w2", Kind.BARRIER, store=1, number=3)) == {"w2": text}
    assert reasons(create(job, 0, [0, 1, 2], name="new")) == {"w0": text}
    job.hear("w2", Kind.BARRIER, store=other, number=2)
    assert to(job.hear("w3", Kind.BARRIER, store=other, number=2)) == [("w2", "BARRIER"), ("w3", "BARRIER")]
    assert opened(job, 0, 2, name="survivors") == STORE - 2
    for rank in (0, 2):
        assert finish(job.hear("w%d" % rank, Kind.BYE)) is None
    assert finish(job.hear("w3", Kind.BYE)) == role.Finish(1, text)


def test_the_loss_that_a_group_is_told_of_is_that_of_its_own_member(job: Job) -> None:
    number = opened(job, 2, 3)
    job.scheduler.handle(role.Broken("w0", "first"), 1)
    job.scheduler.handle(role.Broken("w3", "second"), 1)
    [(_, sent)] = sends(job.hear("w2", Kind.BARRIER, store=number, number=2))
    assert (sent.body["who"], sent.body["reason"]) == ("worker-3", "worker-3@d1 (pid 1) is lost: second")


def test_a_lost_server_ends_the_calls_of_all_groups() -> None:
    job = Job(4, 2)
    number = opened(job, 2, 3)
    job.scheduler.handle(role.Broken("s1", "gone"), 1)
    assert reasons(job.hear("w2", Kind.BARRIER, store=number, number=2)) == {"w2": "server-1@d1 (pid 1) is lost: gone"}


def test_a_server_that_is_lost_after_many_workers_is_told_to_all_who_are_left() -> None:
    job = Job(40, 2)
    for rank in range(20):
        job.scheduler.handle(role.Broken("w%d" % rank, "gone"), 1)
    told = to(job.scheduler.handle(role.Broken("s1", "gone"), 1))
    assert told == [("s0", "LOST"), *(("w%d" % rank, "LOST") for rank in range(20, 40))]


@pytest.mark.parametrize(
    "body",
    [
        {"group": "", "members": [0, 2]},
        {"group": "g" * 101, "members": [0, 2]},
        {"group": ["g"], "members": [0, 2]},
        {"group": "g", "members": [0, 2], "store": 0},
        {"group": "g", "members": [0, True]},
        {"group": "g", "members": {"0": 1}},
        {"store": STORE},
    ],
)
def test_an_open_that_cannot_be_is_refused_and_gives_away_no_number(job: Job, body: dict[str, Any]) -> None:
    assert list(reasons(job.hear("w0", Kind.OPEN, number=1, type="dist_sync", **body))) == ["w0"]
    assert job.scheduler._calls._stores == {}
    assert opened(job, 0, 2) == STORE


@pytest.mark.parametrize("body", [{"group": ""}, {"group": "g"}, {"store": STORE}, {"store": 7}])
@pytest.mark.parametrize("kind", [Kind.BARRIER, Kind.KEYS, Kind.CLOSE, Kind.JOIN, Kind.RULE])
def test_what_is_about_no_store_is_refused_and_makes_none(job: Job, kind: Kind, body: dict[str, Any]) -> None:
    message = Message(kind, store=body.get("store", 1), body={"number": 1, **body})
    actions = job.scheduler.handle(role.MessageReceived("w1", message), 0)
    assert reasons(actions) == {"w1": f"{kind.name} is about no store of this job"}
    assert job.scheduler._calls._stores == {}
    assert job.tick(100) == []


def test_of_a_store_that_was_not_made_nothing_stays_when_all_have_heard_of_it_or_ended(job: Job) -> None:
    create(job, 0, [0, 1])
    assert list(reasons(job.hear("w1", Kind.BYE))) == ["w0"]
    assert job.scheduler._calls._stores == {}
    create(job, 0, [0, 2], "h")
    assert list(reasons(create(job, 2, [2, 3], "h"))) == ["w0", "w2"]
    assert len(job.scheduler._calls._stores) == 1, "worker-3, whom only one of them names, is to hear of it"
    job.hear("w3", Kind.BYE)
    assert job.scheduler._calls._stores == {}
    assert job.tick(100) == []


def test_of_a_store_that_a_worker_did_not_create_after_all_nothing_stays(job: Job) -> None:
    """It is told to use the one before, in which another waits."""
    number = opened(job, 0, 2)
    assert create(job, 2, [0, 2], number=2, unused=[number]) == []
    actions = job.hear("w0", Kind.BARRIER, store=number, number=2)
    assert [(link, dict(sent.body)) for link, sent in sends(actions)] == [("w2", {"instead": number})]
    assert list(job.scheduler._calls._stores) == [number]


def test_members_that_a_server_refuses_have_no_store_and_may_create_the_next_one() -> None:
    job = Job(4, 2)
    create(job, 2, [0, 2])
    actions = create(job, 0, [0, 2])
    told = job.answer(actions, error="no memory")
    assert reasons(told) == dict.fromkeys(["w2", "w0"], "server-0, server-1: no memory")
    assert job.settle([each for each in told if each.link in ("s0", "s1")]) == []  # type: ignore[union-attr]
    assert job.scheduler._calls._stores == {}
    assert opened(job, 0, 2, number=2) == STORE - 1


def test_a_store_of_a_lost_worker_ends_when_the_others_have_closed_it(job: Job) -> None:
    number, other = opened(job, 0, 1, 2), opened(job, 2, 3, name="h")
    create(job, 0, [0, 1], name="never")
    job.hear("w0", Kind.BARRIER, store=number, number=2)
    job.scheduler.handle(role.Broken("w1", "gone"), 1)
    assert job.scheduler.counters()["barrier_waiting"] == 0
    assert job.tick(100) == []
    assert set(job.scheduler._calls._stores) == {number, other}
    assert to(job.hear("w0", Kind.CLOSE, store=number)) == [("w0", "CLOSE")]
    actions = job.hear("w2", Kind.CLOSE, store=number)
    assert to(actions) == [("w2", "CLOSE"), ("s0", "CLOSE")]
    job.answer(actions)
    assert opened(job, 0, 3, name="new") not in (number, other)
    assert list(job.scheduler._calls._free) == [(number, 1)], "what it was sent may come late, and names epoch 0"


def test_who_is_left_of_such_a_store_creates_the_first_of_its_group_with_others_at_once(job: Job) -> None:
    create(job, 0, [0, 1])
    actions = create(job, 1, [0, 1])
    job.scheduler.handle(role.Broken("w1", "gone"), 1)
    assert opened(job, 0, 2) == STORE - 1
    assert to(job.answer(actions)) == [("s0", "CLOSE")]
    assert list(job.scheduler._calls._stores) == [STORE - 1]
    assert opened(job, 0, 2, number=2) == STORE - 2


def test_a_number_is_used_again_when_all_servers_have_forgotten_its_store_and_no_other_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agreement, "LAST_STORE", agreement.GROUP_STORES + 3)
    job = Job(4, 2)
    last = agreement.GROUP_STORES + 3
    assert [opened(job, 0, 2, name=name) for name in "gh"] == [last, last - 1]
    for number in (last - 1, last):
        for rank in (0, 2):
            actions = job.hear("w%d" % rank, Kind.CLOSE, store=number)
        job.answer(actions)
    late = "what its first store was sent may come late, so a number rests as long as it can"
    numbers = [opened(job, 1, 3, number=number, name="i") for number in range(1, 5)]
    assert numbers == [last - 2, last - 3, last - 1, last], late


def test_a_number_that_is_used_again_has_the_next_epoch_also_in_a_group_that_has_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agreement, "LAST_STORE", agreement.GROUP_STORES)
    job = Job(4)
    for epoch in range(3):
        create(job, 0, [0, 1], number=epoch + 1)
        actions = create(job, 1, [0, 1], number=epoch + 1)
        assert [sent.body["epoch"] for _, sent in sends(actions)] == [epoch]
        told = sends(job.settle(actions))
        assert [dict(sent.body) for _, sent in told] == [{"store": agreement.GROUP_STORES, "epoch": epoch}] * 2
        for rank in (0, 1):
            actions = job.hear("w%d" % rank, Kind.CLOSE, store=agreement.GROUP_STORES)
        job.answer(actions)


def lose_and_close(job: Job, number: int) -> list[role.Action]:
    """Let worker 1 be lost, and worker 0 close a store that they shared; return what the servers are told."""
    job.scheduler.handle(role.Broken("w1", "gone"), 1)
    return job.hear("w0", Kind.CLOSE, store=number)


def test_a_rule_that_a_lost_worker_asked_for_is_not_that_of_the_next_store_of_the_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agreement, "LAST_STORE", agreement.GROUP_STORES)
    job = Job(4)
    number = opened(job, 0, 1)
    checked = job.hear("w1", Kind.RULE, store=number, spec=spec())
    put = job.answer(checked)
    assert to(put) == [("s0", "RULE")]
    waiting = job.hear("w2", Kind.RULE, store=1, number=1, spec=spec())
    assert waiting == []
    closed = lose_and_close(job, number)
    assert to(closed) == [("w0", "CLOSE"), ("s0", "CLOSE"), ("s0", "RULE")], "the next one has its turn"
    assert job.answer(put) == []
    job.answer(closed)
    assert opened(job, 0, 2, name="next") == number
    assert job.scheduler._rules.spec(number) is None
    assert job.scheduler._rules.spec(1) is None


def test_states_that_were_being_loaded_for_a_lost_worker_are_not_put_into_the_next_store_of_the_number(
    job: Job,
) -> None:
    number = opened(job, 0, 1)
    manifest = {"format": statefile.FORMAT, "type": "dist_sync", "data": "data-1", "keys": [], "rule": None}
    manifest |= {"workers": 2, "servers": 1, "rounds": [], "files": {}}
    job.hear("w1", Kind.LOAD, store=number, number=2, folder="/f")
    staged = job.hear("w0", Kind.LOAD, store=number, number=2, folder="/f", manifest=manifest)
    assert [sent.body["action"] for _, sent in sends(staged)] == ["stage"]
    lose_and_close(job, number)
    assert job.answer(staged) == []


def test_a_rule_that_waits_for_its_turn_is_given_up_with_its_store(job: Job) -> None:
    number = opened(job, 0, 1)
    actions = job.hear("w2", Kind.RULE, store=1, number=1, spec=spec())
    assert to(actions) == [("s0", "RULE")]
    assert job.hear("w0", Kind.RULE, store=number, spec=spec()) == []
    job.scheduler.handle(role.Broken("w1", "gone"), 1)
    job.hear("w0", Kind.CLOSE, store=number)
    actions = job.answer(actions)
    assert to(actions) == [("s0", "RULE")]
    assert to(job.answer(actions)) == [("w2", "RULE")]


def test_of_many_losses_the_later_ones_are_told_to_those_who_share_a_group_with_the_lost() -> None:
    job = Job(40)
    opened(job, 30, 39)
    opened(job, 30, 38, name="other")
    told = [to(job.scheduler.handle(role.Broken("w%d" % rank, "gone"), 1)) for rank in range(31)]
    assert all(len(each) > 2 for each in told[:16])
    assert told[16:30] == [[("s0", "LOST")]] * 14
    assert told[30] == [("s0", "LOST"), ("w38", "LOST"), ("w39", "LOST")]


def test_saved_states_of_a_group_name_its_size_and_files_by_the_ranks_in_it(job: Job) -> None:
    number = opened(job, 1, 3)
    body = {"store": number, "number": 2, "folder": "/f"}
    job.hear("w3", Kind.SAVE, residuals=True, **body)
    actions = job.hear("w1", Kind.SAVE, part="data-1", **body)
    told = job.answer(actions, file="server-0.npz", holds={}, rounds=[])
    manifest = sends(told)[0][1].body["manifest"]
    assert (manifest["workers"], sorted(manifest["files"])) == (2, ["server-0.npz", "worker-1.npz"])


def test_two_groups_do_not_save_into_one_folder_at_once(job: Job) -> None:
    stores = {"w0": opened(job, 0), "w1": opened(job, 1, name="h")}

    def call(link: str, kind: Kind, number: int, **body: Any) -> list[role.Action]:
        return job.hear(link, kind, store=stores[link], number=number, **body)

    def save(link: str, number: int) -> list[role.Action]:
        return call(link, Kind.SAVE, number, folder="/f", part="data-1")

    saved = {"file": "server-0.npz", "holds": {}, "rounds": []}
    text = (
        "group 'h' cannot save into '/f' while a store of group 'g' is saved there; fix: save each store into a folder"
        " of its own"
    )
    job.answer(save("w0", 2), **saved)
    assert reasons(save("w1", 2)) == {"w1": text}
    call("w0", Kind.BARRIER, 3)
    assert reasons(save("w1", 3)) == {"w1": text}
    call("w0", Kind.BARRIER, 4)
    assert reasons(job.answer(save("w1", 4), error="disk full")) == {"w1": "server-0: disk full"}
    job.answer(save("w0", 5), **saved)
    call("w0", Kind.BARRIER, 6, error="disk full")
    assert to(job.answer(save("w1", 5), **saved)) == [("w1", "SAVE")]


@pytest.mark.parametrize("of_group", [False, True])
def test_a_save_that_was_interrupted_leaves_its_folder_to_other_stores(of_group: bool) -> None:
    job = Job(2)
    first, second = (opened(job, 0, 1), opened(job, 0, 1, name="h")) if of_group else (1, 2)

    def call(rank: int, kind: Kind, store: int, number: int, **body: Any) -> list[role.Action]:
        return job.hear("w%d" % rank, kind, store=store, number=number, **body)

    def save(store: int) -> list[role.Action]:
        call(0, Kind.SAVE, store, 2, folder="/f", part="data-1")
        return job.answer(call(1, Kind.SAVE, store, 2, folder="/f"), file="server-0.npz", holds={}, rounds=[])

    assert to(save(first)) == [("w0", "SAVE"), ("w1", "SAVE")]
    call(0, Kind.BARRIER, first, 3)
    call(0, Kind.BARRIER, first, 3, take_back=True)
    assert to(save(second)) == [("w0", "SAVE"), ("w1", "SAVE")]


def test_long_lists_of_members_are_shortened_and_what_differs_is_named() -> None:
    job = Job(40)
    create(job, 0, list(range(40)))
    text = reasons(create(job, 1, [rank for rank in range(40) if rank != 30]))["w1"]
    first = ", ".join(map(str, range(16)))
    assert text == (
        f"group 'g' has the members [{first}, ... 39] (40 workers) for worker-0 and [{first}, ... 39] (39 workers) for"
        " worker-1 (only one has worker-30); fix: all of its workers give the same list"
    )


# A server


@pytest.fixture
def shared(serving: Serving) -> History:
    """A server of four workers, two of which share store 1, with `a` and `b`."""
    server = serving(workers=4, has_keys=False)
    assert said(server.scheduler(Kind.OPEN, 5, members=[0, 2], epoch=0)) == ["scheduler OPEN"]
    assert said(server.init({"a": [0, 0], "b": [0, 0]})) == ["w0 INIT"]
    return server


def test_whom_a_pull_waits_for_is_a_member_by_its_name_in_the_job(shared: History) -> None:
    shared.push(0, 1, {"a": [1, 2]})
    shared.pull(0, 1)
    [note] = shared.tick(2.5)
    assert (note.body["text"], note.body["for"]) == ("waiting for worker-2, key a, round 1", ["worker-2"])


def test_workers_that_do_not_share_a_store_are_refused_its_data(shared: History) -> None:
    assert reason(shared.push(1, 1, {"a": [1, 2]})) == "worker-1 does not share store 1"
    assert reason(shared.pull(3, 0)) == "worker-3 does not share store 1"
    shared.push(0, 1, {"a": [1, 2]})
    assert values(shared.pull(0, 0)) == {"a": [0, 0]}


@pytest.mark.parametrize("is_relayed", [False, True])
def test_workers_that_do_not_share_a_store_give_it_no_values(shared: History, is_relayed: bool) -> None:
    text = "worker-1 does not share store 1"
    message = replace(shared.initial({"c": [9, 9]}), is_relayed=is_relayed)
    assert reason(shared.hear("w1", message)) == text
    assert reason(shared.ask(1, Kind.SETTLE)) == text
    assert shared.stats()["keys"] == 2


def test_a_server_makes_no_store_of_a_group_that_it_has_not_heard_of(serving: Serving) -> None:
    server = serving(workers=4, has_keys=False)
    text = f"server-0 knows no store {STORE}"
    assert reason(server.hear("w0", replace(server.initial({"a": [0, 0]}), store=STORE))) == text
    assert reason(server.scheduler(Kind.JOIN, 7, store=STORE, rank=0)) == text
    assert server._loop._role._stores == {}


def test_a_server_keeps_a_store_and_its_values_when_it_hears_again_who_shares_it(shared: History) -> None:
    assert said(shared.scheduler(Kind.OPEN, 6, members=[0, 2], epoch=0)) == ["scheduler OPEN"]
    text = "server-0 has store 1 of the workers [0, 2] already"
    assert reason(shared.scheduler(Kind.OPEN, 7, members=[1, 3], epoch=0)) == text
    assert values(shared.pull(0, 0)) == {"a": [0, 0]}


def test_notes_of_a_skipped_round_are_those_of_the_members_by_their_ranks_in_the_job(shared: History) -> None:
    shared.skip(2, 1)
    shared.push(0, 1, {"a": [1, 2]})
    [reply] = shared.pull(0, 1)
    assert reply.body["skipped"] == {"0": {"0": None, "2": {"why": 2}}}


def test_members_join_and_leave_and_the_others_go_on(shared: History) -> None:
    shared.join(2)
    shared.push(0, 1, {"a": [1, 2]})
    assert values(shared.pull(0, 1)) == {"a": [1, 2]}
    shared.join(0, is_last=True)
    shared.push(0, 2, {"a": [1, 2]})
    assert shared.pull(0, 2) == []
    assert said(shared.leave(2)) == ["w0 PULL", "scheduler LEFT"]


def test_a_lost_worker_ends_the_pulls_of_the_stores_that_it_shares_only(shared: History) -> None:
    shared.push(0, 1, {"a": [1, 2]})
    shared.pull(0, 1)
    assert shared.lost("worker-1", "worker-1 is lost") == []
    [no] = shared.lost("worker-2", "worker-2 is lost")
    assert (str(no), no.body["reason"], no.body["who"]) == ("w0 PULL!", "worker-2 is lost", "worker-2")


def test_a_member_that_ends_without_its_push_ends_the_wait_and_others_do_not(shared: History) -> None:
    shared.push(0, 1, {"a": [1, 2]})
    shared.pull(0, 1)
    assert shared.bye(1) == shared.bye(3) == []
    assert "worker-2 has ended (BYE) without pushing round 1 of key 'a'" in reason(shared.bye(2))


def test_an_async_store_of_a_group_is_bounded_by_its_members_only(serving: Serving) -> None:
    server = serving("dist_async", workers=4, has_keys=False)
    server.scheduler(Kind.OPEN, 5, members=[0, 2], epoch=0)
    server.init({"a": [0, 0]}, staleness=0)
    server.rule("sgd", learning_rate=1)
    server.push(0, 1, {"a": [1, 1]})
    assert server.pull(0, 1) == []
    [note] = server.tick(2.5)
    assert note.body["for"] == ["worker-2"]
    assert "w0 PULL" in said(server.push(2, 1, {"a": [1, 1]}))


def test_states_are_saved_when_the_members_have_pushed_equally_often(shared: History) -> None:
    shared.push(0, 1, {"a": [1, 2]})
    text = reason(shared.scheduler(Kind.SAVE, 9, names=[[0, "a"], [1, "b"]], folder="/nowhere", part="data-1"))
    assert text.startswith("round 1 of key 'a' is open: worker-0 pushed it, worker-2 did not")


def test_a_sum_of_a_host_is_of_members(serving: Serving) -> None:
    server = serving(workers=4, servers=2, has_keys=False)
    server.scheduler(Kind.OPEN, 5, members=[0, 2], epoch=0)
    server.init({"a": [0, 0]})
    entries = entries_of([Entry(0, 0, 2, 1, 0, 0, Payload.PACKED)])
    summed = Message(Kind.PUSH, store=1, entries=entries, body={"ranks": [0, 1], "first": 0}, payloads=[bytes(8)])
    assert reason(server.hear("s1", summed)) == (
        "a relay names the workers that it speaks for, each of [0, 2], not [0, 1, 0]"
    )


def test_a_sum_for_a_store_that_its_owner_has_forgotten_is_refused_and_ends_no_server(serving: Serving) -> None:
    """The scheduler has a lost worker's store forgotten on all servers, and on one of them sooner."""
    server = serving(workers=4, servers=2, has_keys=False)
    summed = Message(Kind.PUSH, store=STORE, request=3, body={"ranks": [0, 2], "first": 0})
    [no] = server.hear("s1", summed)
    assert no.body["closed"] is True
    relay = server._loop._role._relay
    relay._sums = {3: STORE}
    assert relay.heard(refusal(summed, "no", closed=True)) == []
    relay._sums = {3: STORE, 4: STORE - 1}
    relay._settling = [_Settling("w0", Message(Kind.SETTLE, store=STORE), {3})]
    relay.forget(STORE)
    assert (relay._sums, relay._settling) == ({4: STORE - 1}, [])
    assert relay.heard(refusal(summed, "no")) == []


def test_a_sum_that_its_owner_refuses_as_closed_is_waited_for_until_this_server_hears_of_it(serving: Serving) -> None:
    """It was acknowledged: a worker went on though its contribution was gone."""
    server = serving(workers=4, servers=2, has_keys=False)
    relay = server._loop._role._relay
    summed, settle = Message(Kind.PUSH, store=1, request=3), Message(Kind.SETTLE, store=1, request=9)
    relay._sums, relay._settling = {3: 1}, [_Settling("w0", settle, {3})]
    assert relay.heard(refusal(summed, "no", closed=True)) == []
    assert (relay._sums, [each.missing for each in relay._settling]) == ({3: 1}, [{3}])
    relay.forget(1)
    assert (relay._sums, relay._settling) == ({}, [])
    assert relay.heard(refusal(summed, "no", closed=True)) == []


def test_nothing_follows_from_work_of_a_store_that_is_forgotten(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be that of another store by then, and an error of it may not end the server."""
    works: list[role.EngineWork] = []
    do = WorkEngine.do
    monkeypatch.setattr(WorkEngine, "do", lambda engine, what: works.append(what) or do(engine, what))
    server = serving(workers=4, servers=2, has_keys=False)
    server.scheduler(Kind.OPEN, 5, store=STORE, members=[0, 2], epoch=0)
    server.scheduler(Kind.RULE, 7, store=STORE, spec=spec())
    server.hear("w0", replace(server.initial({"a": [0, 0]}), store=STORE))
    server.hear("w0", replace(server.initial({"b": [0, 0]}, owner=1), store=STORE, is_relayed=True))
    for rank in (0, 2):
        entries = entries_of([Entry(0, 0, 2, 1, 0, 0, Payload.PACKED)])
        server.hear("w%d" % rank, Message(Kind.PUSH, store=STORE, entries=entries, payloads=[bytes(8)]))
    before = [type(what) for what in works]
    assert {role.SetRule, role.TryFill, role.Fill, role.Reserve, role.Apply} <= set(before)
    server.scheduler(Kind.CLOSE, 9, store=STORE)
    decides = server._loop._role
    for what in works[: len(before)]:
        for event in (role.WorkDone(what), role.WorkDone(what, MemoryError())):
            sent = decides.handle(event, 1.0)
            assert all(isinstance(each, role.Send) and each.link == SCHEDULER for each in sent), what
    assert decides._stores == {}


def test_what_follows_from_work_that_is_under_way_is_done_before_a_closed_store_is_forgotten(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "MUCH_BYTES", 0)
    Gate.close()
    server = serving(workers=4, has_keys=False, imports=("gated_rules",))
    server.scheduler(Kind.OPEN, 5, members=[0, 2], epoch=0)
    server.init({"a": [0, 0]})
    server.rule("gated_rules:Gated")
    server.transport.waits_for_engine = False
    for number in (1, 2):
        for rank in (0, 2):
            server.push(rank, number, {"a": [1, 1]})
    assert Gate.entered.wait(scaled(60))
    server.transport.waits_for_engine = True
    opening = threading.Timer(0.05, Gate.leave.set)
    opening.start()
    assert said(server.scheduler(Kind.CLOSE, 9)) == ["scheduler CLOSE"]
    opening.join()
    assert Gate.updates == 2, "the second round follows from the first"
    assert server._loop._engine._values == {}
    server.scheduler(Kind.OPEN, 10, members=[0, 2], epoch=1)
    server.hear("w0", replace(server.initial({"a": [0, 0]}), epoch=1))
    assert values(server.hear("w0", replace(data(Kind.PULL, [Piece(0)]), epoch=1))) == {"a": [0, 0]}


def test_what_was_sent_to_an_earlier_store_of_a_number_does_not_meet_the_next_one(serving: Serving) -> None:
    server = serving(workers=4, servers=2, has_keys=False)
    server.scheduler(Kind.OPEN, 5, members=[0, 2], epoch=1)
    server.hear("w0", replace(server.initial({"a": [0, 0]}), epoch=1))
    entries = entries_of([Entry(0, 0, 2, 1, 0, 0, Payload.PACKED)])
    push = Message(Kind.PUSH, store=1, entries=entries, payloads=[bytes(8)])
    later = "store 1 is another one since this was sent"
    assert reason(server.hear("w0", push)) == later
    assert reason(server.hear("w0", server.initial({"a": [0, 0]}))) == later
    assert reason(server.hear("w0", Message(Kind.SETTLE, store=1))) == later
    [no] = server.hear("s1", replace(push, body={"ranks": [0, 2], "first": 0}))
    assert no.body["closed"] is True
    norms = {"script": 0, "key": 0, "rank": -1, "round": 1, "parts": [[2, 1, [1.0]]]}
    assert server.hear("s1", Message(Kind.NORMS, store=1, body=norms)) == []
    assert not server._loop._role._rounds._norms.open
    server.hear("s1", Message(Kind.NORMS, store=1, epoch=1, body=norms))
    assert server._loop._role._rounds._norms.open
    assert not server.hear("w0", replace(push, epoch=1))[0].is_error


def test_a_large_group_goes_on_when_all_of_its_members_have_pushed_in_whatever_order(serving: Serving) -> None:
    """Of many workers a server remembers one that a round waits for: it has to be a member."""
    members = list(range(2, 80))
    server = serving(workers=80, has_keys=False)
    server.scheduler(Kind.OPEN, 5, members=members, epoch=0)
    server.init({"a": [0, 0]}, rank=2)
    for number, order in enumerate((members, members[::-1], members[1::2] + members[::2]), 1):
        for rank in order[:-1]:
            server.push(rank, number, {"a": [1, rank]})
        assert server.pull(order[0], number) == []
        server.push(order[-1], number, {"a": [1, order[-1]]})
        assert values(server.pull(order[-1], number)) == {"a": [len(members), sum(members)]}


def test_the_latest_worker_of_many_groups_is_reported_however_long_ago_its_group_had_a_round(serving: Serving) -> None:
    server = serving(workers=100, has_keys=False)
    late = 0.5
    for store in range(1, 51):
        pair = [2 * store - 2, 2 * store - 1]
        server.scheduler(Kind.OPEN, 5, store=store, members=pair, epoch=0)
        server.hear("w%d" % pair[0], replace(server.initial({"a": [0, 0]}), store=store))
        for number in range(1, 4):
            for rank in pair:
                server.tick(server.now + (late if rank == 1 else 0.1))
                entries = entries_of([Entry(0, 0, 2, number, 0, 0, Payload.PACKED)])
                server.hear("w%d" % rank, Message(Kind.PUSH, store=store, entries=entries, payloads=[bytes(8)]))
    lags = server._loop._role.lags()
    assert len(lags) == 40
    assert lags["1"][0] == late


def test_a_store_of_a_group_has_rows_for_its_members_only(serving: Serving) -> None:
    server = serving(workers=1000, has_keys=False)
    server.scheduler(Kind.OPEN, 5, members=[7, 999], epoch=0)
    server.init({"a": [0, 0]}, rank=7)
    store = server._loop._role._stores[1]
    assert {len(rows) for rows in (store.last, store.seen, store.owed)} == {2}


def test_each_worker_is_as_late_as_in_the_last_of_its_own_stores(serving: Serving) -> None:
    server = serving(workers=4, has_keys=False)
    pairs = {1: (0, 2), 2: (1, 3)}
    for store, (first, last) in pairs.items():
        server.scheduler(Kind.OPEN, 5, store=store, members=[first, last], epoch=0)
        server.hear("w%d" % first, replace(server.initial({"a": [0, 0]}), store=store))
    for number in range(1, 4):
        for store, pair in pairs.items():
            for rank in pair:
                server.tick(server.now + store)
                entries = entries_of([Entry(0, 0, 2, number, 0, 0, Payload.PACKED)])
                server.hear("w%d" % rank, Message(Kind.PUSH, store=store, entries=entries, payloads=[bytes(8)]))
    lags = server._loop._role.lags()
    assert {rank: each[0] for rank, each in lags.items()} == {"0": 0, "1": 0, "2": 1, "3": 2}


def test_a_store_without_a_sampled_round_hides_no_lag_of_its_workers(serving: Serving) -> None:
    server = serving(workers=2, has_keys=False)
    for store, rounds in ((1, 3), (2, 1)):
        server.scheduler(Kind.OPEN, 5, store=store, members=[0, 1], epoch=0)
        server.hear("w0", replace(server.initial({"a": [0, 0]}), store=store))
        for number in range(1, rounds + 1):
            for rank in (0, 1):
                server.tick(server.now + 1)
                entries = entries_of([Entry(0, 0, 2, number, 0, 0, Payload.PACKED)])
                server.hear("w%d" % rank, Message(Kind.PUSH, store=store, entries=entries, payloads=[bytes(8)]))
    lags = server._loop._role.lags()
    assert {rank: each[0] for rank, each in lags.items()} == {"0": 0, "1": 1}
