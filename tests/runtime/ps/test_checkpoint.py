"""Saving and loading states, as the scheduler sees to it: by scripted histories."""

from __future__ import annotations

from typing import Any

import pytest
from schedulerhistory import Job, init, reasons, record, rule, sends, spec, to

from distrun_runtime.protocol.message import Kind
from distrun_runtime.ps import role


def opened(job: Job, type_name: str = "dist_sync", *keys: object) -> Job:
    """Open a store in all workers and declare keys."""
    for rank in range(job.counts["workers"]):
        job.hear("w%d" % rank, Kind.OPEN, number=1, type=type_name)
    if keys:
        init(job, 2, *keys)
    return job


def save(job: Job, number: int = 3, folder: str = "/data") -> list[role.Action]:
    """Have all workers save; return what follows from the last one's call."""
    actions: list[role.Action] = []
    for rank in range(job.counts["workers"]):
        actions = job.hear("w%d" % rank, Kind.SAVE, number=number, folder=folder, part="data-%d" % rank)
    return actions


def load(job: Job, manifest: Any, number: int = 3, folder: str = "/data") -> list[role.Action]:
    """Have all workers load what rank 0 read; return what follows from the last one's call."""
    actions: list[role.Action] = []
    for rank in range(job.counts["workers"]):
        more = {} if rank else {"manifest": manifest}
        actions = job.hear("w%d" % rank, Kind.LOAD, number=number, folder=folder, **more)
    return actions


def saved(job: Job, *rounds: tuple[int, int]) -> dict[str, Any]:
    """Save and return the manifest that the workers are told."""
    actions: list[role.Action] = []
    for index, (link, sent) in enumerate(sends(save(job))):
        body = {"file": "server-%d.npz" % index, "holds": {"pieces": [[0, index, 1]]}, "rounds": list(rounds)}
        actions += job.hear(link, Kind.SAVE, is_reply=True, request=sent.request, **body)
    assert to(actions) == [("w%d" % rank, "SAVE") for rank in range(job.counts["workers"])]
    manifests = [sent.body["manifest"] for _, sent in sends(actions)]
    assert all(manifest == manifests[0] for manifest in manifests)
    return dict(manifests[0])


def actions_of(actions: list[role.Action]) -> list[tuple[str, str]]:
    """Return (link, action) of what servers are told to do with saved states."""
    return [(link, sent.body["action"]) for link, sent in sends(actions) if sent.kind is Kind.LOAD and link[0] == "s"]


def test_all_servers_are_told_to_save_when_all_workers_have_asked() -> None:
    job = opened(Job(2, 2), "dist_sync", "w", 7)
    assert to(job.hear("w1", Kind.SAVE, number=3, folder="/data", part="data-1")) == []
    told = job.hear("w0", Kind.SAVE, number=3, folder="/data", part="data-0")
    assert to(told) == [("s0", "SAVE"), ("s1", "SAVE")]
    assert sends(told)[0][1].body == {"folder": "/data", "part": "data-0", "names": [[0, "w"], [1, 7]]}


def test_the_manifest_has_keys_rule_rounds_and_what_each_server_wrote() -> None:
    job = opened(Job(2, 2), "dist_sync", "w")
    job.settle(rule(job, "w0", lr=0.5))
    assert saved(job, (0, 4)) == {
        "format": 1,
        "type": "dist_sync",
        "data": "data-0",
        "keys": [{"key": "w", "shape": [2, 3], "dtype": "float32", "stype": "default", "number": 0, "index": 0}],
        "rule": spec(lr=0.5),
        "workers": 2,
        "servers": 2,
        "rounds": [(0, 4)],
        "files": {"server-0.npz": {"pieces": [[0, 0, 1]]}, "server-1.npz": {"pieces": [[0, 1, 1]]}},
    }


def test_what_one_server_has_against_saving_is_the_error_of_all_workers() -> None:
    job = opened(Job(2, 1), "dist_sync", "w")
    actions = job.answer(save(job), "no space left on device")
    assert reasons(actions) == dict.fromkeys(("w0", "w1"), "server-0: no space left on device")


def test_workers_that_save_to_different_folders_are_an_error_that_names_both() -> None:
    job = opened(Job())
    job.hear("w0", Kind.SAVE, number=2, folder="/a", part="x")
    actions = job.hear("w1", Kind.SAVE, number=2, folder="/b", part="x")
    assert reasons(actions)["w1"] == "worker-0 calls save_states('/a') where worker-1 gives '/b'"


def test_servers_read_first_and_take_over_only_when_all_could() -> None:
    manifest = saved(opened(Job(2, 3), "dist_sync", "w"), (0, 4))
    job = opened(Job(2, 2), "dist_sync", "w")
    staged = load(job, manifest)
    assert actions_of(staged) == [("s0", "stage"), ("s1", "stage")]
    assert sends(staged)[0][1].body["numbers"] == [(0, 0, "w")]
    assert job.answer(staged[:1]) == []
    committed = job.answer(staged[1:])
    assert actions_of(committed) == [("s0", "commit"), ("s1", "commit")]
    told = job.answer(committed)
    assert to(told) == [("w0", "LOAD"), ("w1", "LOAD")]
    assert sends(told)[0][1].body == {
        "part": "data-0",
        "workers": 2,
        "residuals": [],
        "numbers": [[0, 0]],
        "rounds": [[0, 4]],
        "rule": None,
    }


def test_workers_that_look_are_told_what_is_there_and_no_server_hears_of_it() -> None:
    source = opened(Job(2, 2), "dist_sync", "w")
    source.hear("w0", Kind.SAVE, number=3, folder="/data", part="data-0", residuals=False)
    asked = sends(source.hear("w1", Kind.SAVE, number=3, folder="/data", residuals=True))
    body = {"holds": {"pieces": [[0, 0, 6]]}, "rounds": [[0, 4]]}
    source.hear("s0", Kind.SAVE, is_reply=True, request=asked[0][1].request, file="server-0.npz", **body)
    told = source.hear("s1", Kind.SAVE, is_reply=True, request=asked[1][1].request, file="server-1.npz", **body)
    manifest = sends(told)[0][1].body["manifest"]
    assert list(manifest["files"]) == ["server-0.npz", "server-1.npz", "worker-1.npz"]
    job = opened(Job(2, 2), "dist_sync", "w")
    job.hear("w0", Kind.LOAD, number=3, folder="/data", look=True, manifest=manifest)
    told = job.hear("w1", Kind.LOAD, number=3, folder="/data", look=True)
    assert to(told) == [("w0", "LOAD"), ("w1", "LOAD")]
    assert sends(told)[1][1].body["residuals"] == ["worker-1.npz"]


def test_what_a_worker_found_wrong_when_it_looked_fails_the_load_of_all() -> None:
    manifest = saved(opened(Job(), "dist_sync", "w"))
    job = opened(Job(), "dist_sync", "w")
    job.hear("w0", Kind.LOAD, number=3, folder="/data", manifest=manifest)
    refused = job.hear("w1", Kind.LOAD, number=3, folder="/data", error="worker-1.npz is torn")
    assert reasons(refused) == dict.fromkeys(("w0", "w1"), "worker-1 failed at load_states: worker-1.npz is torn")


def test_numbers_of_keys_may_be_others_when_states_are_loaded() -> None:
    manifest = saved(opened(Job(), "dist_sync", "a", "b"), (0, 4), (1, 5))
    job = opened(Job(), "dist_sync", "b", "a")
    told = job.settle(load(job, manifest))
    assert sends(told)[0][1].body["numbers"] == [[0, 1], [1, 0]]
    assert sends(told)[0][1].body["rounds"] == [[0, 5], [1, 4]]


def test_rounds_are_not_told_to_an_asynchronous_store() -> None:
    manifest = saved(opened(Job(), "dist_sync", "w"), (0, 4))
    told = load(job := opened(Job(), "dist_async", "w"), manifest)
    assert sends(job.settle(told))[0][1].body["rounds"] == []


def test_when_one_server_cannot_read_all_drop_what_they_read() -> None:
    manifest = saved(opened(Job(), "dist_sync", "w"))
    job = opened(Job(2, 2), "dist_sync", "w")
    (_, first), (_, second) = sends(load(job, manifest))
    job.hear("s0", Kind.LOAD, is_reply=True, request=first.request)
    dropped = job.hear(
        "s1", Kind.LOAD, is_reply=True, is_error=True, request=second.request, reason="/data/x.npz is torn"
    )
    assert actions_of(dropped) == [("s0", "drop"), ("s1", "drop")]
    assert reasons(job.answer(dropped)) == dict.fromkeys(("w0", "w1"), "server-1: /data/x.npz is torn")


def test_a_store_without_a_rule_gets_the_saved_one_before_it_gets_the_values() -> None:
    source = opened(Job(), "dist_sync", "w")
    source.settle(rule(source, "w0", "adam", lr=0.5))
    job = opened(Job(), "dist_sync", "w")
    tried = job.answer(load(job, saved(source)))
    assert [(sent.kind.name, sent.body) for _, sent in sends(tried)] == [
        ("RULE", {"spec": spec("adam", lr=0.5), "check": True})
    ]
    put = job.answer(tried)
    assert actions_of(job.answer(put)) == [("s0", "commit")]
    assert to(rule(job, "w1", "adam", lr=0.5)) == [("w1", "RULE")], "it is the store's rule now"


def test_a_saved_rule_that_servers_refuse_leaves_everything_as_it_was() -> None:
    source = opened(Job(), "dist_sync", "w")
    source.settle(rule(source, "w0", "my_rules:Mine"))
    job = opened(Job(), "dist_sync", "w")
    tried = job.answer(load(job, saved(source)))
    dropped = job.answer(tried, "no module my_rules")
    assert actions_of(dropped) == [("s0", "drop")]
    assert reasons(job.answer(dropped))["w1"] == "server-0: no module my_rules"
    assert to(rule(job, "w0")) == [("s0", "RULE")], "there is no rule"


def test_a_store_that_has_the_rule_keeps_its_parameters() -> None:
    source = opened(Job(), "dist_sync", "w")
    source.settle(rule(source, "w0", lr=0.5))
    job = opened(Job(), "dist_sync", "w")
    job.settle(rule(job, "w0", lr=0.125))
    told = job.settle(load(job, saved(source)))
    assert sends(told)[0][1].body["rule"] == spec(lr=0.125)


def test_states_of_another_rule_are_an_error_that_names_both() -> None:
    source = opened(Job(), "dist_sync", "w")
    source.settle(rule(source, "w0", "adam"))
    job = opened(Job(), "dist_sync", "w")
    job.settle(rule(job, "w0", "sgd"))
    text = "the states were saved under the rule 'adam', the store has 'sgd'"
    assert reasons(load(job, saved(source))) == {"w0": text, "w1": text}


@pytest.mark.parametrize(
    ("mine", "text"),
    [
        ([record("w"), record("x")], "key 'x' of the store is not in the saved states"),
        ([], "key 'w' is in the saved states and not in the store: init it before"),
        (
            [record("w", (6,))],
            "key 'w': the store has shape (6,) float32, the saved states have shape (2, 3) float32",
        ),
        (
            [{**record("w"), "stype": "row_sparse"}],
            "key 'w': the store has shape (2, 3) float32, row_sparse, the saved states have shape (2, 3) float32",
        ),
        (
            [record("w", dtype="int8")],
            "key 'w': the store has shape (2, 3) int8, the saved states have shape (2, 3) float32",
        ),
    ],
)
def test_other_keys_are_an_error_that_names_the_first_and_nothing_is_asked_of_servers(mine: Any, text: str) -> None:
    manifest = saved(opened(Job(), "dist_sync", "w"))
    job = opened(Job(1), "dist_sync")
    job.hear("w0", Kind.KEYS, number=2, records=mine)
    job.hear("w0", Kind.INIT, number=2)
    assert reasons(load(job, manifest)) == {"w0": text}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": 2}, "saved states of format 2; this version reads 1"),
        ({"keys": 7}, "the manifest is malformed: TypeError"),
        ({"rule": 7}, "the manifest is malformed: KVError: not a rule: 7"),
    ],
)
def test_a_foreign_manifest_is_refused(change: Any, text: str) -> None:
    manifest = {**saved(opened(Job(), "dist_sync", "w")), **change}
    job = opened(Job(), "dist_sync", "w")
    assert text in reasons(load(job, manifest))["w1"]


@pytest.mark.parametrize("member", ["data", "workers", "rounds", "keys", "rule"])
def test_a_manifest_that_lacks_something_is_refused_before_any_server_changes(member: str) -> None:
    manifest = saved(opened(Job(2, 2), "dist_sync", "w"), (0, 4))
    del manifest[member]
    told = load(opened(Job(2, 2), "dist_sync", "w"), manifest)
    assert to(told) == [("w0", "LOAD!"), ("w1", "LOAD!")]
    assert reasons(told)["w1"] == "the manifest is malformed: KeyError: '%s'" % member
