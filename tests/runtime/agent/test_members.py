"""Who belongs to which task, told from process tables written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distrun_runtime.agent.members import JOB, Family, sort_out
from distrun_runtime.contract.process import Identity, Process

AGENT = 10
NOT_OURS = {1, 9, AGENT}
NO_MARKS: Mapping[int, str] = {}


def row(pid: int, ppid: int, pgid: int = 0, sid: int = 0, state: str = "S", start: str = "") -> Process:
    return Process(pid, ppid, pgid or pid, sid or pgid or pid, start or "s%d" % pid, state)


def family(name: str, pid: int, **more: bool) -> Family:
    return Family(name, Identity(pid, "s%d" % pid), **more)


def owners(
    rows: list[Process], families: list[Family], strays: Sequence[int] = (), marks: Mapping[int, str] = NO_MARKS
) -> dict[str, set[int]]:
    chosen = [each for each in rows if each.pid in strays]
    found = sort_out(rows, families, chosen, lambda each: marks.get(each.pid, ""), NOT_OURS)
    return {name: {each.pid for each in members} for name, members in found.items()}


def test_group_session_and_descendants_belong_to_the_task() -> None:
    rows = [row(AGENT, 9), row(20, AGENT), row(21, 20, 20), row(22, 20, 22, 20), row(23, 22, 23, 23), row(30, AGENT)]
    assert owners(rows, [family("a", 20), family("b", 30)]) == {"a": {20, 21, 22, 23}, "b": {30}, JOB: set()}


def test_what_was_seen_once_is_remembered_when_it_lost_its_parent() -> None:
    one = family("a", 20)
    owners([row(20, AGENT), row(23, 20, 23, 23)], [one])
    assert owners([row(20, AGENT), row(23, AGENT, 23, 23)], [one], strays=[23])["a"] == {20, 23}


def test_remembered_id_that_became_another_process_is_not_ours() -> None:
    one = family("a", 20)
    owners([row(20, AGENT), row(23, 20, 23, 23)], [one])
    assert owners([row(20, AGENT), row(23, 1, 23, 23, start="later")], [one])["a"] == {20}


def test_orphan_belongs_to_the_task_that_its_environment_names_else_to_the_job() -> None:
    rows = [row(20, AGENT), row(40, AGENT), row(41, 40), row(50, AGENT)]
    assert owners(rows, [family("a", 20)], strays=[40, 50], marks={40: "a", 50: "gone"}) == {
        "a": {20, 40, 41},
        JOB: {50},
    }


def test_dead_processes_and_our_own_belong_to_nobody() -> None:
    rows = [row(AGENT, 9, 20, 20), row(20, AGENT, state="Z"), row(21, AGENT, 20, 20)]
    assert owners(rows, [family("a", 20)])["a"] == {21}


def test_ids_of_a_reaped_task_mean_nothing_once_its_session_was_empty() -> None:
    one = family("a", 20, is_reaped=True)
    assert owners([row(22, AGENT, 20, 20)], [one])["a"] == {22}
    assert owners([row(30, AGENT)], [one])["a"] == set()
    assert one.is_scattered
    assert owners([row(20, 1, start="later")], [one])["a"] == set()


def test_reaped_leaders_id_given_to_a_stranger_is_not_the_task() -> None:
    one = family("a", 20, is_reaped=True, is_scattered=True)
    assert owners([row(20, 1, 5, 5, start="later")], [one])["a"] == set()


def test_each_process_has_one_owner() -> None:
    rows = [row(20, AGENT), row(30, 20, 30, 30), row(31, 30, 30, 30)]
    found = owners(rows, [family("a", 20), family("b", 30)])
    assert found["a"] == {20, 30, 31}
    assert found["b"] == set()
