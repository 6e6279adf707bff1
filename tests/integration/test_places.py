"""Two agents of one job on one node: they share the node's files, and nothing else."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import agentkit
import pytest
from agentkit import AgentDriver, agent, python, shell

from distrun_runtime.agent import share, stopping
from distrun_runtime.agent.preflight import NodeLock
from distrun_runtime.contract.plan import Place

TELL = "import os; print(os.environ['DISTRUN_PLACE'], os.environ['DISTRUN_HOST'])"
PLACES = (Place("7", agentkit.HOST), Place("8", agentkit.HOST))


@contextlib.contextmanager
def two(script: str = "", code: str = "") -> Iterator[tuple[AgentDriver, AgentDriver]]:
    tasks = [
        (shell(script, f"worker-{number}") if script else python(code, f"worker-{number}"))._replace(place=place.name)
        for number, place in enumerate(PLACES)
    ]
    job = agentkit.new_job()
    with agent(tasks[0], job=job, places=PLACES) as one, agent(tasks[1], job=job, places=PLACES) as other:
        yield one, other


def test_each_place_has_a_folder_and_marks_of_its_own() -> None:
    with two(code=TELL) as (one, other):
        for driver, place, name in ((one, "7", "worker-0"), (other, "8", "worker-1")):
            driver.begin(place=place)
            driver.spawn(name)
            driver.exited(name)
            assert driver.text(name) == f"{place} {agentkit.HOST}\n".encode()
        assert sorted(map(os.path.basename, share.folders_of(one.job))) == ["7", "8"]
        one.finish()
        assert list(map(os.path.basename, share.folders_of(one.job))) == ["8"]
        other.finish()
        assert not share.folders_of(one.job)


def test_the_end_of_one_place_leaves_the_tasks_of_the_other_alone() -> None:
    with two("trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done") as (one, other):
        for driver, place, name in ((one, "7", "worker-0"), (other, "8", "worker-1")):
            driver.begin(place=place)
            driver.spawn(name)
            driver.hear_until(lambda driver=driver, name=name: driver.text(name), "the task runs")
        one.stop("worker-0")
        one.exited("worker-0")
        assert one.wait("cleared").header["left"] == []
        one.finish()
        other.say("ping", n=1)
        other.wait("pong")
        assert not [frame for frame in other.frames if frame.type == "exited"]
        other.stop("worker-1")
        assert other.exited("worker-1")["code"] == 0
        other.finish()


def test_a_place_waits_for_its_turn_while_another_one_makes_what_they_share(tmp_path: Path) -> None:
    with two("true") as (one, other):
        one.begin(place="7")
        [folder] = share.folders_of(one.job)
        lock = NodeLock(folder)
        assert lock.take()
        other.say("begin", **begin(other, "8"))
        other.say("ping", n=1)
        other.wait("pong")
        assert not [frame for frame in other.frames if frame.type == "ready"], "it waits, and answers meanwhile"
        lock.release()
        other.wait("ready")
        one.finish()
        other.finish()


def begin(driver: AgentDriver, place: str) -> dict[str, object]:
    from distrun_runtime.contract import plan as plans
    from distrun_runtime.contract import session

    return {
        "version": session.VERSION,
        "plan": plans.to_json(driver.plan),
        "token": "c0ffee",
        "secret_env": {},
        "host": agentkit.HOST,
        "place": place,
    }


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_the_lock_is_free_when_its_holder_has_died(tmp_path: Path) -> None:
    folder = str(tmp_path / "job" / "7")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, b"y" if NodeLock(folder).take() else b"n")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 1) == b"y"
    os.close(reading)
    os.close(writing)
    mine, other = NodeLock(folder), NodeLock(folder)
    assert mine.take()
    assert not other.take()
    mine.release()
    assert other.take()
    other.release()


def test_a_survey_tells_the_places_of_a_host_apart() -> None:
    with two("exec sleep 60") as (one, other):
        for driver, place, name in ((one, "7", "worker-0"), (other, "8", "worker-1")):
            driver.begin(place=place)
            driver.spawn(name)
        found = {each["host"]: each for each in stopping.survey()["jobs"] if each["job"] == one.job}
        assert sorted(found) == ["7", "8"]
        for place, name in (("7", "worker-0"), ("8", "worker-1")):
            assert found[place]["agent"] == "alive"
            assert [each["task"] for each in found[place]["processes"] if each["task"].startswith("worker")] == [name]
        for driver in (one, other):
            driver.finish()
