"""Several agents on one node: each place has tasks, an agent and a share of the plan of its own."""

from __future__ import annotations

import json

import pytest
from history import WALL, History
from sample_plan import sample_plan

from distrun_runtime.contract import agent_messages, session
from distrun_runtime.contract import plan as plans
from distrun_runtime.contract.plan import Host, Place, Plan, Resources, Secrets
from distrun_runtime.coordinator import messages
from distrun_runtime.coordinator.messages import Begin, Spawn


def two_places() -> Plan:
    """Places 1 and 2 are on node d1, place 3 on d2; each has one worker."""
    whole = sample_plan(3, 0, ("d1",))
    places = (Place("1", "d1", Resources(4, 1 << 30, ("0",))), Place("2", "d1"), Place("3", "d2"))
    tasks = [
        task._replace(place=place.name, host=place.host, refs={"DMLC_NODE_HOST": "{host:%s.address}" % place.name})
        for task, place in zip(whole.tasks, places, strict=True)
    ]
    return whole._replace(hosts=(Host("d1"), Host("d2")), tasks=tuple(tasks), places=places)


def running() -> History:
    history = History(two_places())
    for place in ("1", "2", "3"):
        history.hello(place)
        history.tell(agent_messages.AgentReady(place, f"10.0.0.{place}"))
    for number, place in enumerate(("1", "2", "3")):
        history.tell(agent_messages.Started(place, f"worker-{number}", 100 + number, "s", WALL + history.now))
    return history


def test_a_plan_without_places_has_one_a_host_of_its_name() -> None:
    plan = sample_plan(2, 0, ("d1", "d2"))
    assert plan.all_places == (Place("d1", "d1"), Place("d2", "d2"))
    assert plan.task("worker-1").place_name == "d2"
    assert plan.host_of("d2") == Host("d2")
    with pytest.raises(KeyError):
        plan.host_of("d3")


def test_places_come_back_from_json() -> None:
    plan = two_places()
    assert plans.from_json(json.loads(json.dumps(plans.to_json(plan)))) == plan


def test_a_place_gets_its_own_tasks_and_knows_the_places_of_its_node() -> None:
    [frame] = session.Decoder().feed(encoded(messages.begin(plans.shares(two_places())("2"), Secrets(), "2")))
    assert (frame.header["host"], frame.header["place"]) == ("d1", "2")
    share = plans.from_json(frame.header["plan"])
    assert [task.name for task in share.tasks] == ["worker-1"]
    assert [place.name for place in share.places] == ["1", "2"]
    assert [host.name for host in share.hosts] == ["d1", "d2"]
    with pytest.raises(KeyError):
        two_places().host_of("d1")


def encoded(frame: object) -> bytes:
    """The bytes of a frame, whether it is encoded already or not."""
    return frame if isinstance(frame, bytes) else session.encode(*frame)  # type: ignore[misc]


def test_each_agent_is_begun_and_spawns_the_tasks_of_its_place() -> None:
    history = running()
    assert sorted(action.host for action in history.did(Begin)) == ["1", "2", "3"]
    spawned = {action.task: (action.host, action.env["DMLC_NODE_HOST"]) for action in history.did(Spawn)}
    assert spawned == {
        "worker-0": ("1", "10.0.0.1"),
        "worker-1": ("2", "10.0.0.2"),
        "worker-2": ("3", "10.0.0.3"),
    }


def test_the_loss_of_one_place_is_not_that_of_the_other_on_its_node() -> None:
    history = running()
    history.tell(messages.AgentLost("1", "its connection ended", WALL + history.now))
    tasks = history.supervisor.roster.tasks
    assert tasks["worker-0"].state == "failed"
    assert tasks["worker-1"].state == "running"
    assert {task.host for task in tasks.values()} == {"d1", "d2"}


def test_silence_of_a_place_counts_for_its_node() -> None:
    roster = running().supervisor.roster
    roster.hosts["1"].silence_s = 9.0
    roster.hosts["2"].silence_s = 12.0
    assert roster.silent == {"d1": 12.0}


def test_a_task_of_another_place_of_the_same_node_is_not_believed() -> None:
    history = running()
    event = agent_messages.Exited("2", "worker-0", code=0)
    assert not history.supervisor.roster.knows(event)
    assert history.supervisor.roster.knows(event._replace(host="1"))
