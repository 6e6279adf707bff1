"""What the backend of engines decides: where tasks go, and what an engine's explanation makes of a failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distrun.backends import queue
from distrun.backends.engine import EngineError, Explanation, Grant, Handle, RoleGroup, template
from distrun.backends.sge import SgeJob
from distrun.backends.slurm import SlurmJob
from distrun.backends.slurm_answers import Component
from distrun.errors import UsageError
from distrun.request import EngineOptions, Needs
from distrun.templates import fill
from distrun_runtime.contract import facts
from distrun_runtime.contract.dataclass import written
from distrun_runtime.coordinator.failures import Culprit, Outcome
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.listener import DialBack
from distrun_runtime.errors import JobStoreError

SERVERS = RoleGroup("server", 2, Needs())
WORKERS = RoleGroup("worker", 3, Needs(cores=2))


def placed(groups: list[RoleGroup], grants: list[Grant], scheduler: bool = False) -> list[str]:
    return [f"{slot.name}@{slot.place}" for slot in queue.place_tasks(groups, grants, scheduler)]


def test_servers_go_first_then_workers_one_at_each_place_in_turn() -> None:
    grants = [Grant("a", "h1"), Grant("b", "h2"), Grant("c", "h3")]
    assert placed([SERVERS, WORKERS], grants) == ["server-0@a", "server-1@b", "worker-0@c", "worker-1@a", "worker-2@b"]


def test_a_place_gets_no_more_tasks_than_its_cores_allow() -> None:
    grants = [Grant("a", "h1", cores=2), Grant("b", "h2", cores=6)]
    found = placed([SERVERS, RoleGroup("worker", 2, Needs(cores=2))], grants)
    assert found == ["server-0@a", "server-1@b", "worker-0@b", "worker-1@b"]


def test_full_places_take_turns_again_if_oversubscribed_up_to_what_they_take_at_most() -> None:
    grants = [Grant("a", "h1", cores=2, most=3), Grant("b", "h2", {"worker": 1}), Grant("c", "h3", cores=1)]

    def workers(count: int) -> list[str]:
        slots = queue.place_tasks([RoleGroup("worker", count, Needs())], grants, False, oversubscribe=True)
        return [slot.place for slot in slots]

    assert workers(8) == ["a", "b", "c", "a", "b", "c", "a", "b"]
    assert workers(11).count("a") == 3
    with pytest.raises(EngineError, match="no room for worker-3"):
        queue.place_tasks([RoleGroup("worker", 4, Needs())], [grants[0]], False, oversubscribe=True)


def test_a_node_with_several_workers_and_no_server_gets_one_that_only_adds() -> None:
    grants = [Grant("a", "h1", cores=3), Grant("b", "h2", cores=2), Grant("c", "h3", cores=4)]
    groups = [RoleGroup("server", 1, Needs()), RoleGroup("worker", 5, Needs())]

    def servers(*given: Grant, relays: bool = True) -> list[str]:
        slots = queue.place_tasks(groups, given, False, relays)
        return [f"{slot.name}@{slot.place}" for slot in slots if slot.role == "server"]

    assert servers(*grants) == ["server-0@a", "server-1@b", "server-2@c"]
    assert servers(*grants, relays=False) == ["server-0@a"]
    only_workers = grants[2]._replace(takes={"worker": 4})
    assert servers(*grants[:2], only_workers) == ["server-0@a", "server-1@b"]


def test_roles_go_where_the_engine_says_that_they_go() -> None:
    grants = [Grant("w0", "h1", {"worker": 2}), Grant("s0", "h1", {"server": 2}), Grant("w1", "h2", {"worker": 1})]
    found = placed([SERVERS, WORKERS], grants, scheduler=True)
    assert found == ["scheduler@w0", "server-0@s0", "server-1@s0", "worker-0@w1", "worker-1@w0", "worker-2@w0"]


def test_local_ranks_count_within_a_place_though_a_node_has_several() -> None:
    grants = [Grant("0", "h1", {"worker": 1}), Grant("1", "h1", {"worker": 1})]
    slots = queue.place_tasks([RoleGroup("worker", 2, Needs())], grants, False)
    assert [(slot.host, slot.local_rank, slot.local_size) for slot in slots] == [("h1", 0, 1), ("h1", 0, 1)]


@pytest.mark.parametrize("grants", [[], [Grant("a", "h1", cores=5)], [Grant("a", "h1", {"worker": 3})]])
def test_too_little_room_is_told_with_what_was_wanted_and_given(grants: list[Grant]) -> None:
    with pytest.raises(EngineError, match=r"no room for (server|worker)-\d: wanted 2 server of 1 cores"):
        placed([SERVERS, WORKERS], grants)


def test_a_place_is_called_as_its_node_where_a_node_has_only_one() -> None:
    grants = [Grant("0", "h1"), Grant("1", "h2"), Grant("2", "h2")]
    assert queue.place_names(grants) == {"0": "h1", "1": "1@h2", "2": "2@h2"}
    assert queue.place_names([Grant("h1", "h1"), Grant("h2", "h2")]) == {"h1": "h1", "h2": "h2"}
    crossed = queue.place_names([Grant("a", "b"), Grant("b", "a")])
    assert len(set(crossed.values())) == 2


LOST = Outcome(7, facts.HOST_LOST, "h2 was lost", Culprit("", "h2", reason="its connection ended"))


@pytest.mark.parametrize(
    ("code", "reason"),
    [(137, facts.TASK_FAILED), (124, facts.TIMEOUT), (143, facts.TERMINATED), (7, facts.HOST_LOST)],
)
def test_an_explanation_gives_the_exit_code_and_the_reason(code: int, reason: str) -> None:
    found = queue.with_explanation(LOST, Explanation(code, "Slurm: why"), "slurm")
    assert (found.exit_code, found.reason) == (code, reason)
    assert found.message == "h2 was lost; Slurm: why"
    assert found.culprit.reason == "Slurm: why"


def test_a_reason_that_was_told_already_is_not_repeated() -> None:
    assert (
        queue.with_explanation(LOST, Explanation(6, "its connection"), "sge").message == "h2 was lost; its connection"
    )
    assert queue.with_explanation(LOST, Explanation(6, "h2 was"), "sge").message == "h2 was lost"


def test_the_node_that_an_engine_says_failed_is_the_cause_whatever_ended_first() -> None:
    known = Explanation(7, "Slurm: a node failed: h3 is down", "h3")
    named = queue.with_explanation(LOST, known, "slurm")
    assert named.message == "lost h3: Slurm: a node failed: h3 is down"
    assert (named.culprit.task, named.culprit.host) == ("", "h3")


def test_an_engine_that_has_recorded_nothing_is_said_to_have_none() -> None:
    assert queue.with_explanation(LOST, None, "slurm").message == "h2 was lost; slurm has recorded no reason"
    failed = Outcome(1, facts.TASK_FAILED, "worker-0 failed", Culprit("worker-0", "h1", code=1))
    assert queue.with_explanation(failed, None, "slurm") == failed


def test_a_template_with_a_name_that_nobody_knows_is_refused_with_those_there_are() -> None:
    assert fill("a=@{a} $HOME ${b} @{c}", {"a": "1", "c": "$x @{a}"}) == "a=1 $HOME ${b} $x @{a}"
    with pytest.raises(UsageError, match=r"the template has @\{nope\}; known names: a, c"):
        fill("@{nope}", {"a": "1", "c": "2"})


def test_what_was_said_to_an_engine_survives_json() -> None:
    said = EngineOptions(
        "all.q", 60.0, "p", ("-x",), Needs(2, 1 << 30, 1), Needs(), {"yarn_rm": "http://rm"}, {"a": "b"}
    )
    assert EngineOptions.from_json(json.loads(json.dumps(written(said)))) == said


@pytest.mark.parametrize(
    "more",
    [
        SlurmJob(
            "/x", components=(Component(("worker",), Needs(2), 3),), grants=(Grant("h1", "h1", {"worker": 2}),)
        )._asdict(),
        SgeJob(False, 2, 2, 0, None)._asdict(),
        {"rm": ["http://rm:8088"], "hdfs": [], "tasks": 2},
    ],
)
def test_what_an_engine_has_to_say_of_its_job_is_read_from_the_jobs_folder(
    more: dict[str, Any], tmp_path: Path
) -> None:
    folder = JobFolder(tmp_path)
    folder.note_engine("distrun-otter-5f3a", written(Handle("engine", "12", more)))
    note = folder.engine()
    assert note["handle"] == json.loads(json.dumps(written(Handle("engine", "12", more))))
    assert queue.recorded_marker(tmp_path) == "distrun-otter-5f3a"


def test_a_job_whose_note_is_damaged_is_not_taken_for_one_without_a_coordinator(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    folder.note_engine("distrun-otter-5f3a", {"engine": "slurm"})
    with pytest.raises(JobStoreError, match="handle"):
        queue.recorded_marker(tmp_path)


@pytest.mark.parametrize(("count", "dial_s", "limit_s"), [(1, 45.0, 45.0), (12, 45.0, 70.0), (12, None, None)])
def test_agents_with_many_addresses_to_try_get_more_time(
    count: int, dial_s: float | None, limit_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []

    class Told(DialBack):
        def __init__(self, *words: Any, **more: Any) -> None:
            limits.append(more["limit_s"])
            super().__init__(*words, **more)

    monkeypatch.setattr(queue, "DialBack", Told)
    agents, start = queue.listen("otter", "5ec4e7", 1.0, [f"192.0.2.{each}" for each in range(count)], dial_s=dial_s)
    agents.close()
    assert len(start.addresses) == count
    assert limits == [limit_s]


def test_a_template_that_an_installation_lacks_is_named() -> None:
    with pytest.raises(UsageError, match=r"the template none\.sh is missing from this installation"):
        template("none.sh", EngineOptions())
