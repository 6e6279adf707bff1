"""What a server is asked beside pushes and pulls: rules, saved states, counters, profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rig import Live, Rig

from distrun_runtime.errors import KVError
from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.ps import role, work
from distrun_runtime.ps.work import SlotId

SCHEDULER = role.SCHEDULER_LINK
SPEC = dict(RuleSpec.of("sgd", {"learning_rate": 0.5}).to_json())


def save(rig: Rig, *names: tuple[int, str]) -> list[tuple[str, Message]]:
    return rig.scheduler(Kind.SAVE, 7, folder="/data", part="data-1", names=[list(name) for name in names])


def told(sent: list[tuple[str, Message]]) -> list[tuple[str, str]]:
    return [(link, message.kind.name + ("!" if message.is_error else "")) for link, message in sent]


def body_of(sent: list[tuple[str, Message]]) -> dict[str, Any]:
    [(_, message)] = sent
    return dict(message.body)


def ask(rig: Rig, kind: Kind, **body: Any) -> list[tuple[str, Message]]:
    return rig.hear("w0", Message(kind, body=body))


# Rules


def test_a_rule_that_is_only_tried_changes_nothing() -> None:
    rig = Live()
    assert told(rig.scheduler(Kind.RULE, 7, spec=SPEC, check=True)) == [(SCHEDULER, "RULE")]
    assert [type(what) for what in rig.done] == [work.TryRule]
    assert rig.executor.rules == {}


def test_a_rule_that_could_not_be_is_refused_when_it_is_tried() -> None:
    rig = Live()
    spec = {"name": "no_module:Rule", "params": {}}
    sent = rig.scheduler(Kind.RULE, 7, spec=spec, check=True)
    assert told(sent) == [(SCHEDULER, "RULE!")]
    assert "--server-import no_module" in body_of(sent)["reason"]


def test_what_a_users_rule_raises_is_told_with_the_traceback() -> None:
    rig = Rig()
    rig.error = ZeroDivisionError("in new_state")
    assert body_of(rig.scheduler(Kind.RULE, 7, spec=SPEC)) == {
        "reason": "ZeroDivisionError: in new_state",
        "error": "RuleError",
        "traceback": "Traceback of the server",
    }


def test_without_a_rule_the_states_of_the_last_one_are_forgotten() -> None:
    rig = Live()
    rig.scheduler(Kind.RULE, 7, spec=dict(RuleSpec.of("sgd", {"momentum": 0.5}).to_json()))
    rig.push(0, 1)
    rig.push(1, 1)
    assert rig.executor.shelves[SlotId(1, 0, 0)].state
    rig.scheduler(Kind.RULE, 8, spec=None)
    assert rig.executor.rules == {}
    assert rig.executor.shelves[SlotId(1, 0, 0)].state is None


# Saved states


def test_a_server_is_told_its_file_and_answers_with_what_is_in_it_and_the_rounds() -> None:
    rig = Rig()
    rig.push(0, 1)
    rig.push(1, 1)
    rig.done.clear()
    rig.value = lambda what: {"file": "server-0.npz", "holds": {"pieces": []}}
    sent = save(rig, (0, "a"), (1, "b"))
    [what] = rig.done
    assert (what.message.body["file"], what.message.body["host"]) == ("server-0.npz", "here")
    assert body_of(sent) == {"file": "server-0.npz", "holds": {"pieces": []}, "rounds": [(0, 1), (1, 0)]}


def test_nothing_is_saved_while_a_round_is_open_and_the_workers_are_named() -> None:
    rig = Rig()
    rig.push(0, 1, 1)
    rig.done.clear()
    sent = save(rig, (0, "a"), (1, "b"))
    assert body_of(sent)["reason"] == (
        "round 1 of key 'b' is open: worker-0 pushed it, worker-1 did not; states are saved and loaded when all workers"
        " have pushed equally often"
    )
    assert rig.done == []


def test_nothing_is_loaded_while_a_round_is_open() -> None:
    rig = Rig()
    rig.push(0, 1)
    sent = rig.scheduler(Kind.LOAD, 7, action="stage", folder="/data", manifest={}, numbers=[[0, 0, "a"], [1, 1, "b"]])
    assert "round 1 of key 'a' is open" in body_of(sent)["reason"]


def test_a_key_whose_init_failed_keeps_nobody_from_saving() -> None:
    """Its slots are still here; the scheduler does not name it."""
    rig = Rig()
    rig.push(0, 1, 1)
    rig.value = lambda what: {"file": "server-0.npz", "holds": {}}
    assert told(save(rig, (0, "a"))) == [(SCHEDULER, "SAVE")]


def test_saving_waits_for_updates_that_are_under_way() -> None:
    """Their pushes are acknowledged: no worker would understand a refusal."""
    rig = Rig()
    rig.value = lambda what: {"file": "f", "holds": {}} if isinstance(what, work.Save) else None
    rig.is_held = True
    rig.push(0, 1)
    rig.push(1, 1)
    assert save(rig, (0, "a")) == []
    assert rig.perform(rig.server.tick(1.0)) == []
    rig.is_held = False
    rig.release()
    assert told(rig.perform(rig.server.tick(2.0))) == [(SCHEDULER, "SAVE")]
    assert rig.perform(rig.server.tick(3.0)) == []


def test_rounds_go_on_where_the_saved_ones_ended() -> None:
    rig = Rig()
    rig.scheduler(Kind.LOAD, 7, action="commit", rounds=[[0, 40]])
    assert told(rig.pull(0, 40)) == [("w0", "PULL")]
    rig.push(0, 41)
    assert rig.pull(0, 41) == []
    assert ("w0", "PULL") in told(rig.push(1, 41))
    assert told(rig.pull(0, 0, 1)) == [("w0", "PULL")], "the other key is where it was"


def test_what_a_server_could_not_read_is_told() -> None:
    rig = Rig()
    rig.error = KVError("/data/x.npz on host d1 is torn")
    sent = rig.scheduler(Kind.LOAD, 7, action="stage", folder="/data", manifest={}, numbers=[])
    assert body_of(sent) == {"reason": "/data/x.npz on host d1 is torn", "error": "KVError"}


def test_a_server_without_keys_of_the_store_saves_and_loads_too(tmp_path: Path) -> None:
    rig = Live()
    message = Message(Kind.SAVE, store=9, request=7, body={"folder": str(tmp_path), "part": "data-1", "names": []})
    sent = rig.perform(rig.server.handle(role.Heard(SCHEDULER, message), 0))
    assert body_of(sent)["file"] == "server-0.npz"
    assert body_of(sent)["rounds"] == []
    assert (tmp_path / "data-1" / "server-0.npz").exists()


# Counters


def test_a_server_counts_bytes_keys_rounds_and_who_waits() -> None:
    rig = Live()
    rig.push(0, 1)
    rig.push(1, 1)
    rig.pull(0, 1)
    rig.push(1, 2)
    rig.pull(1, 2)
    found = body_of(ask(rig, Kind.STATS))
    assert {name: found[name] for name in ("server", "host", "keys", "pieces", "rounds", "queue", "updates")} == {
        **{"server": "server-0", "host": "here", "keys": 2, "pieces": 2, "rounds": 1},
        **{"queue": 1, "updates": 1},
    }
    assert found["bytes_in"] == 2 * 8 + 3 * 8, "two first values, three pushes"
    assert found["bytes_out"] == 8, "one pull is answered, one waits"


def test_stats_of_a_store_without_keys_here_are_empty() -> None:
    found = body_of(Rig().hear("w0", Message(Kind.STATS, store=9)))
    assert (found["keys"], found["pieces"], found["rounds"], found["queue"]) == (0, 0, 0, 0)


def test_staleness_is_told_by_worker() -> None:
    """Between worker 0's pull and its push, worker 1 pushed twice."""
    rig = Live("dist_async")
    rig.scheduler(Kind.RULE, 7, spec=SPEC)
    rig.pull(0, 0)
    rig.pull(1, 0)
    rig.push(1, 1)
    rig.push(1, 2)
    rig.push(0, 1)
    found = body_of(ask(rig, Kind.STATS))["staleness"]
    assert found["0"] == {"mean": 2.0, "max": 2, "pushes": 1}


def test_the_jobs_next_script_finds_nothing_counted_and_no_profile_under_way() -> None:
    rig = Live()
    rig.push(0, 1)
    ask(rig, Kind.PROFILE, action="start")
    rig.scheduler(Kind.STOP, 7, stay=True)
    assert rig.counters is not None
    assert rig.counters.to_json() == {"bytes_in": 0, "bytes_out": 0, "updates": 0, "staleness": {}}
    assert rig.recorder is not None
    assert not rig.recorder.is_on


# Profiles


def test_a_profile_has_the_works_that_were_done_meanwhile() -> None:
    rig = Live()
    assert told(ask(rig, Kind.PROFILE, action="start")) == [("w0", "PROFILE")]
    rig.push(0, 1)
    rig.push(1, 1)
    events = body_of(ask(rig, Kind.PROFILE, action="stop"))["events"]
    assert events[0]["args"] == {"name": "server-0@here"}
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"add", "apply"}
    rig.push(0, 2)
    assert ask(rig, Kind.PROFILE, action="start")
    assert not [event for event in body_of(ask(rig, Kind.PROFILE, action="stop"))["events"] if event["ph"] == "X"]


def test_one_profile_at_a_time() -> None:
    rig = Rig()
    assert body_of(ask(rig, Kind.PROFILE, action="stop"))["reason"] == "server-0 on host here is not being profiled"
    ask(rig, Kind.PROFILE, action="start")
    assert body_of(ask(rig, Kind.PROFILE, action="start"))["reason"] == (
        "server-0 on host here is being profiled already"
    )
